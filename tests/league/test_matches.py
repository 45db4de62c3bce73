"""Matches that games elsewhere play: who decides for which agent, and when a result counts."""

import json
from collections import Counter

import numpy as np
import pytest

from bray.errors import BrayError, DataError
from bray.league import League, Matches, PlayerRef, ResultLog, make_players
from bray.league.matches import DISAGREE, NOT_SAID, NOT_THERE

WON, LOST = {"x": 1.0, "o": -1.0}, {"x": -1.0, "o": 1.0}


class Drawn:
    """A league that draws by one generator."""

    def __init__(self, log=None):
        self.league = League(make_players({"main": "main", "hunter": "main_exploiter"}), ["x", "o"], log)
        self.rng = np.random.default_rng(0)

    def draw(self):
        return self.league.job(self.rng)

    def finish(self, job, match):
        return self.league.finish(match)

    def void(self, job, why):
        self.league.void(job.id, why)


@pytest.fixture
def drawn(tmp_path):
    return Drawn(ResultLog(tmp_path / "log.jsonl"))


def results(drawn):
    return [json.loads(line) for line in drawn.league.log.path.read_text().splitlines()]


def test_the_sessions_of_a_match_are_of_one_job_and_its_result_counts_once(drawn):
    matches = Matches(drawn, ["x", "o"])
    (number, x), (same, o) = matches.join("a", "x"), matches.join("a", "o")
    assert number == same
    assert drawn.league.seats(number) == {"x": x, "o": o}
    assert matches.join("b", "o")[0] != number
    assert matches.leave("a", "o", WON, 4).counts is None
    assert matches.leave("a", "x", WON, 5) == (True, "")
    assert results(drawn) == [{"id": number, "seats": {"x": str(x), "o": str(o)}, "returns": WON, "length": 5}]
    assert len(matches) == 1


@pytest.mark.parametrize(
    ("said", "why"), [((WON, LOST), DISAGREE), ((None, None), NOT_SAID), ((WON, None), ""), ((None, LOST), "")]
)
def test_a_result_counts_where_one_says_it_and_none_another(drawn, said, why):
    matches = Matches(drawn, ["x", "o"])
    seats = {agent: matches.join("a", agent)[1] for agent in "xo"}
    verdicts = [matches.leave("a", agent, one) for agent, one in zip("xo", said, strict=True)]
    assert verdicts[1] == (not why, why)
    assert drawn.league.refused == ({why: 1} if why else {})
    if why:  # the same is played again, under another number
        again, number = {}, 0
        for agent in "xo":
            number, again[agent] = matches.join("b", agent)
        assert (number, again) == (1, seats)


def test_a_match_without_its_other_agent_does_not_count(drawn):
    matches = Matches(drawn, ["x", "o"])
    matches.join("a", "x")
    assert matches.leave("a", "x", WON) == (False, NOT_THERE)
    with pytest.raises(DataError, match="match 'a' is over"):
        matches.join("a", "o")


@pytest.mark.parametrize(
    ("match", "agent", "message"), [("", "x", "empty"), ("a", "y", "unknown agent 'y'"), ("a", "x", "has a session")]
)
def test_sessions_of_no_seat_are_refused(drawn, match, agent, message):
    matches = Matches(drawn, ["x", "o"])
    matches.join("a", "x")
    with pytest.raises(BrayError, match=message):
        matches.join(match, agent)
    assert len(matches) == 1


@pytest.mark.parametrize(
    "said",
    [None, [1, -1], {"x": 1}, {"x": 1, "p": -1}, {"x": "1", "o": 0}, {"x": float("nan"), "o": 0}, {**WON, "p": 0}],
)
def test_what_is_no_result_is_refused(drawn, said):
    with pytest.raises(DataError, match="a finite number for each of x, o"):
        Matches(drawn, ["x", "o"]).returns(said)


def test_after_a_kill_all_results_count_and_what_was_under_way_is_drawn_again(tmp_path):
    path = tmp_path / "log.jsonl"
    before = Drawn(ResultLog(path))
    matches = Matches(before, ["x", "o"])
    seats = {}
    for name in "abcd":
        for agent in "xo":
            number, seats[name, agent] = matches.join(name, agent)
    state = json.loads(json.dumps(before.league.get_state()))
    for agent in "xo":  # after the checkpoint, before the kill
        matches.leave("b", agent, WON)
    after = Drawn(ResultLog(path))
    after.league.restart(state)
    games = [Matches(after, ["x", "o"]) for _ in range(3)]
    played = Counter()
    for game in games:
        found = [game.join("again", agent) for agent in "xo"]
        assert min(n for n, _ in found) > number
        played[tuple(ref for _, ref in found)] += 1
        assert [game.leave("again", agent, LOST).counts for agent in "xo"] == [None, True]
    assert played == Counter((seats[name, "x"], seats[name, "o"]) for name in "acd")
    ids = [event["id"] for event in results(after)]
    assert len(ids) == len(set(ids)) == 4
    fold = Drawn(ResultLog(path)).league
    fold.restart()
    refs = [PlayerRef("main"), PlayerRef("hunter")]
    assert fold.record(*refs) == after.league.record(*refs)
