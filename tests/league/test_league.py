"""Leagues by numbers: matchmaking, payoff, ratings, the fold over the log, and what is refused."""

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bray.errors import BrayError, ConfigError, DataError, UnknownName
from bray.league import (
    League,
    Outcome,
    Payoff,
    Player,
    PlayerRef,
    Rating,
    ResultLog,
    elo,
    fit_elo,
    make_players,
    pfsp,
    rate,
    read_league,
)
from bray.league.payoff import DRAW, LOSS, WIN

AGENTS = ["x", "o"]
MAIN = PlayerRef("main")


# --- matchmaking ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("win_rates", "weighting", "expected"),
    [
        ([0.1, 0.5, 0.9], "squared", [0.75701, 0.23364, 0.00935]),
        ([0.1, 0.5, 0.9], "variance", [0.20930, 0.58140, 0.20930]),
        ([0.1, 0.5, 0.9], "linear", [0.6, 1 / 3, 1 / 15]),
        ([0.1, 0.5, 0.9], "uniform", [1 / 3] * 3),
        ([0.0, 0.5, 1.0], "squared", [0.8, 0.2, 0.0]),
        ([0.0, 0.5, 1.0], "variance", [0.0, 1.0, 0.0]),
        ([0.0, 0.0, 0.0], "squared", [1 / 3] * 3),
        ([1.0, 1.0], "squared", [0.5, 0.5]),
        ([0.0, 1.0], "variance", [0.5, 0.5]),
        ([1.0], "linear", [1.0]),
    ],
)
def test_pfsp(win_rates, weighting, expected):
    assert pfsp(win_rates, weighting) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("wrong", [[], [0.5, 1.2], [-0.1], [math.nan], [[0.5]]])
def test_pfsp_refuses_what_is_no_win_rate(wrong):
    with pytest.raises(DataError, match="from 0 to 1"):
        pfsp(wrong)


def test_pfsp_names_the_weightings():
    with pytest.raises(UnknownName, match="squared"):
        pfsp([0.5], "square")


# --- payoff -----------------------------------------------------------------------------------------------------------


def test_the_payoff_equals_a_loop_over_each_pair():
    rng, payoff, games = np.random.default_rng(0), Payoff(decay=0.9, min_games=5), []
    for _ in range(600):
        a, b = rng.choice(6, 2, replace=False).tolist()
        games.append((a, b, int(rng.integers(-1, 2))))
        payoff.add(*games[-1])
    for a, b in itertools.permutations(range(6), 2):
        mine = [o if (x, y) == (a, b) else -o for x, y, o in games if {x, y} == {a, b}]
        ages = range(len(mine) - 1, -1, -1)
        counts = [
            math.fsum(0.9**age for age, o in zip(ages, mine, strict=True) if o == kind) for kind in (WIN, DRAW, LOSS)
        ]
        record = payoff.record(a, b)
        assert record[:3] == pytest.approx(counts)
        assert record.games == len(mine)
        assert payoff.win_rate(a, b) == pytest.approx((counts[0] + counts[1] / 2) / sum(counts))


def test_a_win_rate_is_known_from_the_eighth_game_on():
    payoff = Payoff()
    for n in range(8):
        assert payoff.win_rate(3, 1) == 0.5, n
        payoff.add(3, 1, WIN)
    assert payoff.win_rates(3, [1, 2]).tolist() == [1.0, 0.5]
    assert payoff.win_rates(1, [3]).tolist() == [0.0]
    assert payoff.record(3, 1).wins == pytest.approx((1 - 0.99**8) / 0.01)


# --- ratings ----------------------------------------------------------------------------------------------------------


def test_elo_by_its_published_numbers():
    assert [round(x) for x in elo(1613, 1573, 0.0)] == [1595, 1591]
    assert [round(x) for x in elo(1595, 1591, 0.5)] == [1595, 1591]
    assert [round(x) for x in elo(1613, 1573, 0.5)] == [1611, 1575]
    assert [round(x) for x in elo(1611, 1575, 1.0)] == [1625, 1561]


# Printed by the package trueskill 0.4.5, TrueSkill(mu=0, sigma=25/3, beta=25/6, tau=..., draw_probability=...).
MIXED = [
    (1, 2, 1), (2, 0, -1), (3, 1, -1), (1, 0, -1), (0, 1, -1), (0, 2, -1), (2, 3, 1), (0, 1, 1), (0, 3, 1), (3, 2, 1),
    (3, 2, 1), (1, 3, -1), (1, 3, 1), (1, 3, 0), (0, 1, 1), (1, 2, 0), (0, 2, 0), (3, 2, 1), (2, 1, -1), (3, 2, 1),
]  # fmt: skip
ONE_SIDED = [(0, 1, 1)] * 30 + [(1, 0, 1)] * 2 + [(1, 0, 0)]


@pytest.mark.parametrize(
    ("games", "tau", "draws", "expected"),
    [
        (
            [(0, 1, 0), (0, 1, 1)],
            0.0,
            0.02,
            [(3.093073974256484, 5.679968445141552), (-3.093073974256484, 5.679968445141552)],
        ),
        (
            [(0, 1, 1), (0, 1, 1), (1, 0, 0), (0, 1, -1)],
            0.0,
            0.1,
            [(-1.4151310357556868, 4.621823707217136), (1.4151310357556868, 4.621823707217136)],
        ),
        (
            MIXED,
            25 / 300,
            0.1,
            [
                (3.2270887951551234, 3.2081891443224015),
                (0.8248751743308964, 2.6463120984878272),
                (-3.582344784095435, 2.65461397207826),
                (2.1762902375723296, 2.844777954498075),
            ],
        ),
        (ONE_SIDED, 0.0, 0.1, [(1.0625879934211442, 2.9578713475757885), (-1.0625879934211442, 2.9578713475757885)]),
    ],
)
def test_trueskill_equals_the_package(games, tau, draws, expected):
    ratings = [Rating() for _ in expected]
    for a, b, outcome in games:
        ratings[a], ratings[b] = rate(ratings[a], ratings[b], outcome, (tau, tau), draws)
    assert np.array(ratings) == pytest.approx(np.array(expected), abs=1e-4)


def test_no_result_makes_a_rating_infinite():
    strong, weak = Rating(500.0, 0.1), Rating(-500.0, 0.1)
    for outcome in (WIN, DRAW, LOSS):
        for a, b in ((strong, weak), (weak, strong)):
            after = rate(a, b, outcome)
            assert np.isfinite(after).all()
            assert after[0].sigma > 0
    up, down = rate(weak, strong, WIN)
    assert up.mu > weak.mu
    assert down.mu < strong.mu


def test_fitted_ratings_find_the_true_ones_within_their_intervals():
    true, rng, inside = np.array([1000.0, 1150.0, 1250.0, 1400.0]), np.random.default_rng(1), 0
    for _ in range(40):
        wins = np.zeros((4, 4))
        for i, j in itertools.combinations(range(4), 2):
            won = rng.binomial(200, 1 / (1 + 10 ** ((true[j] - true[i]) / 400)))
            wins[i, j], wins[j, i] = won, 200 - won
        found, half = fit_elo(wins)
        inside += int((np.abs(found - true) < half).sum())
    assert 0.9 < inside / 160 <= 1.0  # 95 %, and the game that each has drawn with the mean
    alone, half = fit_elo(np.array([[0.0, 9.0], [0.0, 0.0]]))
    assert np.isfinite([alone, half]).all()
    assert alone[0] - alone[1] > 300


# --- players ----------------------------------------------------------------------------------------------------------


def a_league(players, log=None, **more):
    return League(make_players(players), AGENTS, log, **more)


def play(league, rng, games, wins=lambda ref: 0.5):
    """Play so many matches; `wins`: how often the live player of seat x beats this one."""
    met = Counter()
    for _ in range(games):
        job = league.job(rng)
        mine = next(a for a, ref in job.seats.items() if ref.step is None)
        other = next(a for a in AGENTS if a != mine)
        met[str(job.seats[other])] += 1
        sign = 1.0 if rng.random() < wins(job.seats[other]) else -1.0
        assert league.finish(Outcome(job.id, {mine: sign, other: -sign}))
    return met


def test_self_play_meets_itself_and_its_newest_snapshots():
    league, rng = (
        a_league({"main": {"kind": "self_play", "pool": 2, "newest": 0.25, "snapshot_every": 10}}),
        np.random.default_rng(0),
    )
    assert play(league, rng, 20) == {"main": 20}
    snapshots = [league.trained("main", steps, steps) for steps in (0, 9, 10, 15, 20, 30)]
    assert [str(s.ref) if s else None for s in snapshots] == ["main@0", None, "main@10", None, "main@20", "main@30"]
    met = play(league, rng, 800, lambda ref: 0.9 if ref.step == 20 else 0.1)
    assert met.keys() == {"main", "main@20", "main@30"}
    assert met["main"] == pytest.approx(200, abs=40)
    assert met["main@30"] > 5 * met["main@20"]  # by the square of how often it loses


def test_seats_are_dealt_evenly():
    league, rng = a_league({"main": {"kind": "self_play", "newest": 0.0}}), np.random.default_rng(0)
    league.trained("main", 0, 0)
    seats = Counter(next(a for a, ref in league.job(rng).seats.items() if ref == MAIN) for _ in range(400))
    assert seats["x"] == pytest.approx(200, abs=40)


def test_players_take_turns_and_play_whom_their_kind_says():
    kinds = {"main": "main", "hunter": {"kind": "main_exploiter", "least": 0.3}, "rover": "league_exploiter"}
    league, rng = a_league(kinds, min_games=1), np.random.default_rng(0)
    for name in kinds:
        league.trained(name, 0, 0)
    met = {name: Counter() for name in kinds}
    for i in range(900):
        job = league.job(rng)
        name = list(kinds)[i % 3]
        seats = list(job.seats.values())
        assert PlayerRef(name) in seats
        seats.remove(PlayerRef(name))
        met[name][str(seats[0])] += 1
    past = {"main@0", "hunter@0", "rover@0"}
    assert met["rover"].keys() == past
    assert met["hunter"].keys() == {"main"}
    assert met["main"].keys() == {"main", *past}
    # An exploiter that has no chance plays the snapshots.
    for _ in range(30):
        job = league.job(rng)
        hunted = {str(ref): agent for agent, ref in job.seats.items()}
        if hunted.keys() == {"hunter", "main"}:
            league.finish(Outcome(job.id, {hunted["hunter"]: -1.0, hunted["main"]: 1.0}))
    again = [league.job(rng) for _ in range(30)]
    assert {str(r) for job in again for r in job.seats.values() if PlayerRef("hunter") in job.seats.values()} == {
        "hunter",
        "main@0",
    }


def test_snapshots_come_early_for_who_beats_all_rivals_and_late_in_any_case():
    league = a_league({"main": {"kind": "main", "snapshot_every": 100}}, min_games=1)
    assert league.trained("main", 0, 0).ref == PlayerRef("main", 0)
    assert league.trained("main", 199, 1) is None
    assert league.trained("main", 200, 2).ref == PlayerRef("main", 2)
    rng = np.random.default_rng(0)
    play(league, rng, 200, lambda ref: 1.0)
    assert league.trained("main", 299, 3) is None
    assert league.trained("main", 300, 4) is not None
    assert league.trained("main", 5000, 4) is None, "these weights are frozen already"


def test_exploiters_start_anew():
    kinds = {name: {"kind": name, "snapshot_every": 1} for name in ("main", "main_exploiter", "league_exploiter")}
    league = a_league(kinds)
    found = {name: [league.trained(name, 2 * v, v).anew for v in range(200)] for name in kinds}
    assert not any(found["main"])
    assert found["main_exploiter"] == [False] + 199 * [True]
    assert sum(found["league_exploiter"]) == pytest.approx(50, abs=20)


class Stubborn(Player):
    """Plays the oldest."""

    def opponent(self, league, rng):
        return PlayerRef("nobody") if self.name == "lost" else league.past("main")[0]


def test_a_player_of_ones_own():
    league, rng = a_league({"main": "self_play", "mine": f"{__name__}:Stubborn"}), np.random.default_rng(0)
    for version in range(3):
        league.trained("main", version * 10**7, version)
    assert {str(r) for _ in range(5) for r in (league.job(rng), league.job(rng))[1].seats.values()} == {
        "mine",
        "main@0",
    }
    lost = a_league({"lost": f"{__name__}:Stubborn"})
    with pytest.raises(ConfigError, match="chose the opponent nobody, which the league does not know"):
        lost.job(rng)


@pytest.mark.parametrize(
    ("players", "message"),
    [
        ({"a": {"kind": "man"}}, "main"),
        ({"a": {"kind": "math:sin"}}, "derives from bray.league.Player"),
        ({"a": {"kind": "main", "branches": {"pfsp": 0.5, "self_play": 0.4}}}, "sum to 1"),
        ({"a": {"kind": "main", "branches": {"pfsp": -1.0, "self_play": 2.0}}}, "sum to 1"),
        ({"a": {"kind": "main", "snapshots": 3}}, "snapshot_every"),
        ({"a": {"kind": "self_play", "weighting": "cubed"}}, "squared"),
        ({"a": {"kind": "self_play", "newest": 1.5}}, "newest from 0 to 1"),
        ({"a@1": "main"}, "without @"),
        ({}, "needs a player that learns"),
    ],
)
def test_wrong_players_are_refused(players, message):
    with pytest.raises(BrayError, match=message):
        a_league(players).job(np.random.default_rng(0))


def test_unknown_branches_are_named():
    league = a_league({"a": {"kind": "main", "branches": {"pfps": 1.0}}})
    with pytest.raises(UnknownName, match="pfsp"):
        league.job(np.random.default_rng(0))


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_counts_once_and_only_of_a_match_that_was_drawn():
    league, rng = a_league({"main": {"kind": "self_play", "newest": 0.0}}), np.random.default_rng(0)
    league.trained("main", 0, 0)
    job = league.job(rng)
    for wrong in ({"x": 1.0}, {"x": 1.0, "o": math.nan}, {"x": 1.0, "p": -1.0}):
        assert not league.finish(Outcome(job.id, wrong))
    good = Outcome(job.id, {"x": 1.0, "o": -1.0}, 5)
    assert league.finish(good)
    assert not league.finish(good)
    assert not league.finish(Outcome(99, good.returns))
    assert not league.finish(Outcome(None, good.returns))
    assert sorted(league.refused.values()) == [3, 3]
    assert league.record(MAIN, PlayerRef("main", 0)).games == 1


def test_a_match_that_is_given_back_is_played_again_under_another_number():
    league, rng = a_league({"main": "self_play"}), np.random.default_rng(0)
    first = league.job(rng)
    league.give_back(first.id)
    again = league.job(rng)
    assert again.seats == first.seats
    assert again.id != first.id
    assert not league.finish(Outcome(first.id, {"x": 0.0, "o": 0.0}))
    assert league.finish(Outcome(again.id, {"x": 0.0, "o": 0.0}))


def test_of_three_players_each_pair_is_compared():
    league = League(make_players({"a": {"kind": "self_play", "newest": 0.0}}), ["x", "y", "z"])
    league.trained("a", 0, 0)
    job = league.job(np.random.default_rng(0))
    live = next(agent for agent, ref in job.seats.items() if ref.step is None)
    returns = {agent: 1.0 if agent == live else 0.0 for agent in job.seats}
    assert league.finish(Outcome(job.id, returns))
    assert league.record(PlayerRef("a"), PlayerRef("a", 0)) == (1.0, 0.0, 0.0, 1), "two seats of one player count once"


def test_a_snapshot_begins_with_the_rating_of_its_player():
    league, rng = (
        a_league({"main": {"kind": "self_play", "newest": 0.0, "snapshot_every": 1}}),
        np.random.default_rng(0),
    )
    league.trained("main", 0, 0)
    play(league, rng, 50, lambda ref: 0.9)
    league.trained("main", 1, 1)
    live, new, old = (league.rating(PlayerRef("main", step)) for step in (None, 1, 0))
    assert new.mu == live.mu > old.mu
    assert new.sigma == Rating().sigma > live.sigma
    assert new.elo > 1200 > old.elo
    assert live.half < new.half


# --- the log ----------------------------------------------------------------------------------------------------------

PLAYERS = {"main": {"kind": "main", "snapshot_every": 20}, "hunter": {"kind": "main_exploiter", "snapshot_every": 20}}


def train(league, rng, games, start=0):
    jobs = []
    for i in range(start, start + games):
        jobs.append(league.job(rng))
        if i % 5 == 0:
            for name in PLAYERS:
                league.trained(name, i, i)
        if len(jobs) > 3:
            job = jobs.pop(int(rng.integers(4)))
            score = float(rng.integers(-1, 2))
            league.finish(Outcome(job.id, dict(zip(job.seats, (score, -score), strict=True)), 9))


def standing(league):
    refs = league.refs
    rates = [league.win_rates(ref, refs).tolist() for ref in refs]
    return [list(map(str, refs)), rates, league.ratings, list(map(str, league.past())), league.lineage]


def test_what_is_known_is_a_fold_over_the_log(tmp_path):
    path, rng = tmp_path / "league" / "log.jsonl", np.random.default_rng(0)
    league = a_league(PLAYERS, ResultLog(path))
    train(league, rng, 400)
    league.log.close()
    ids = [event["id"] for event in map(json.loads, path.read_text().splitlines()) if "id" in event]
    assert len(ids) == len(set(ids)) > 380
    again = a_league(PLAYERS, ResultLog(path))
    again.restart()
    assert standing(again) == standing(league)
    assert again.job(rng).id > max(ids), "a late result of an earlier life is no result of this one"


def test_a_league_goes_on_exactly_from_its_checkpoint(tmp_path):
    def run(path, stop):
        rng, league = np.random.default_rng(0), a_league(PLAYERS, ResultLog(path))
        train(league, rng, 200)
        if stop:
            state, draws = league.get_state(), rng.bit_generator.state
            train(league, rng, 50, 200)  # lost with the kill
            league.log.close()
            rng, league = np.random.default_rng(), a_league(PLAYERS, ResultLog(path))
            rng.bit_generator.state = draws
            league.set_state(json.loads(json.dumps(state)))
        train(league, rng, 100, 200)
        league.log.close()
        return standing(league), path.read_bytes()

    assert run(tmp_path / "whole.jsonl", False) == run(tmp_path / "killed.jsonl", True)


def test_a_torn_last_line_is_a_match_that_was_not_played(tmp_path):
    path, rng = tmp_path / "log.jsonl", np.random.default_rng(0)
    league = a_league(PLAYERS, ResultLog(path))
    train(league, rng, 100)
    whole, before = path.read_bytes(), standing(league)
    path.write_bytes(whole + b'{"id":7777,"seats":{"x":"ma')
    again = a_league(PLAYERS, ResultLog(path))
    again.restart()
    assert standing(again) == before
    job = again.job(rng)
    again.finish(Outcome(job.id, {"x": 0.0, "o": 0.0}))
    assert path.read_bytes().startswith(whole + b'{"id":1048576,')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense\n", "line 3: expected a result or a snapshot"),
        (b'{"id": "7"}\n', "line 3"),
        (b'{"id": 0, "seats": {"x": "main", "o": "main"}, "returns": {"x": 0, "o": 0}}\n', "match 0 is in it twice"),
        (b'{"id": 5, "seats": {"x": "main", "o": "main@1"}, "returns": {"x": 0, "p": 0}}\n', "other agents"),
        (b'{"id": 5, "seats": {"x": "main", "o": "main@one"}, "returns": {"x": 0, "o": 0}}\n', "NAME@STEP"),
        (b'{"snapshot": "@7"}\n', "NAME@STEP"),
    ],
)
def test_a_log_that_was_changed_is_refused(tmp_path, line, message):
    path = tmp_path / "log.jsonl"
    good = b'{"id": %d, "seats": {"x": "main", "o": "main"}, "returns": {"x": 0, "o": 0}}\n'
    path.write_bytes(good % 0 + good % 1 + line + good % 2)
    with pytest.raises(DataError, match=message):
        a_league(PLAYERS, ResultLog(path)).restart()


def test_a_log_that_was_cut_off_before_the_checkpoint_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    league = a_league(PLAYERS, ResultLog(path))
    train(league, np.random.default_rng(0), 100)
    state, whole = league.get_state(), path.read_bytes()
    for left in (whole[:-30], None):
        path.unlink() if left is None else path.write_bytes(left)
        with pytest.raises(DataError, match=r"cut off|is missing"):
            a_league(PLAYERS, ResultLog(path)).set_state(state)


def test_a_player_whose_weights_are_gone_is_played_no_more(tmp_path):
    path, rng = tmp_path / "log.jsonl", np.random.default_rng(0)
    players = {"main": {"kind": "self_play", "newest": 0.0, "snapshot_every": 1}}
    league = a_league(players, ResultLog(path))
    gone, _ = (league.trained("main", v, v).ref for v in range(2))
    play(league, rng, 30)
    games = league.record(MAIN, gone).games
    league.lost(gone)
    league.lost(gone)
    assert play(league, rng, 30).keys() == {"main@1"}
    again = a_league(players, ResultLog(path))
    again.restart()
    assert standing(again) == standing(league)
    assert again.record(MAIN, gone).games == games > 0


def test_the_log_follows_no_link(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "target")
    league = a_league({"main": "self_play"}, ResultLog(tmp_path / "log.jsonl"))
    with pytest.raises(BrayError):
        league.trained("main", 0, 0)
    with pytest.raises(BrayError, match="link"):
        league.restart()
    assert (tmp_path / "target").read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "league").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="league is a link"):
        read_league(tmp_path / "league" / "results.jsonl")


def test_a_log_that_nobody_keeps():
    league = a_league({"main": {"kind": "self_play", "snapshot_every": 1}})
    play(league, np.random.default_rng(0), 5)
    assert league.get_state()["offset"] > 0
    assert league.find("main") == MAIN
    with pytest.raises(UnknownName, match="main"):
        league.find("mian")


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """Every python block of docs/league.md, one after the other."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "league.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/league.md", "exec"), {})
    assert re.search(r"True \d+", capsys.readouterr().out)


def test_win_rates_are_those_of_the_records_while_pairs_meet_and_players_come():
    rng, payoff = np.random.default_rng(3), Payoff(min_games=2)
    for game in range(600):
        players = 3 + game // 20  # more and more
        a, b = rng.choice(players, 2, replace=False).tolist()
        payoff.add(a, b, int(rng.integers(-1, 2)))
        me, others = int(rng.integers(3)), rng.permutation(players + 5).tolist()
        records = [payoff.record(me, other) for other in others]
        expected = [(r.wins + r.draws / 2) / (r.wins + r.draws + r.losses) if r.games >= 2 else 0.5 for r in records]
        assert payoff.win_rates(me, others) == pytest.approx(expected)
