"""A league in live games: real sockets, a connection and a session for each agent, the player that the league names."""

import contextlib
import hashlib
import json
import threading
import uuid
from collections import Counter

import numpy as np
import pytest

import bray
from bray.client import Client, ClientError
from bray.errors import ConfigError
from bray.league import IN_RUN, read_league
from bray.rundir import RunDir

LONG = 120.0  # seconds; the only limit of time: a test that hangs fails
SMALL = {"rollout_length": 8, "epochs": 1, "minibatches": 1, "rows": 32, "iteration_steps": 64, "save_figure": False}
LEAGUE = {"snapshot_every": 60, "pool": 3, "newest": 0.3}
THREE = {
    "main": {"player": "main"},
    "hunter": {"player": {"kind": "main_exploiter", "snapshot_every": 90}, "config": {"lr": 1e-3}},
    "naive": {"player": "self_play", "run": "DQN", "config": {"learning_starts": 30, "train_every": 8}},
}
AGENTS = ["x", "o"]


@contextlib.contextmanager
def experiment(path, resume=False, **more):
    if resume:
        exp = bray.Experiment.resume(path, port=0, **more)
    else:
        settings = {"obs": "float32[3]", "actions": 2, "agents": AGENTS, "self_play": LEAGUE, "policies": THREE}
        exp = bray.Experiment("PPO", live=True, port=0, path=path, **{**SMALL, **settings, **more})
    try:
        yield exp
    finally:
        exp.close()


class Duel:
    """Three turns in which both choose at once; who chooses 1 more often wins. What was said and answered is kept."""

    def __init__(self, port, tcp=False, lies=()):
        self.port, self.tcp, self.lies = port, tcp, set(lies)
        self.over, self.broken, self.counted, self.seats, self.played = threading.Event(), None, [], [], 0

    def play(self, matches=1_000_000):
        try:
            with contextlib.ExitStack() as stack:
                clients = {
                    agent: stack.enter_context(Client("127.0.0.1", self.port, tcp=self.tcp, retries=0))
                    for agent in AGENTS
                }
                while matches and not self.over.is_set():
                    self.match(clients)
                    matches -= 1
        except ClientError as e:
            if not self.over.is_set():
                self.broken = e
        except BaseException as e:
            self.broken = e
            raise

    def match(self, clients):
        name = str(uuid.uuid4())
        said = {agent: client.start(name, agent, {}) for agent, client in clients.items()}
        assert said["x"]["match"] == said["o"]["match"]
        points = dict.fromkeys(AGENTS, 0)
        for turn in range(4):
            for agent, client in clients.items():
                mine, other = (points[a] for a in (agent, *(a for a in AGENTS if a != agent)))
                reward = float(np.sign(mine - other)) if turn == 3 else 0.0
                reply = client.tick({"obs": [turn, mine, other], "reward": reward, "terminated": turn == 3})
                assert said[agent]["version"] <= reply["version"]
                if "@" in said[agent]["player"]:
                    assert reply["version"] == said[agent]["version"], "a snapshot does not change"
                if turn < 3:
                    points[agent] += reply["action"]
        by = float(np.sign(points["x"] - points["o"]))
        returns = {"x": by, "o": -by}
        self.seats.append((said["x"]["match"], {agent: said[agent]["player"] for agent in AGENTS}, returns))
        lied = {"o": {"x": 1.0 - by, "o": by}} if len(self.seats) in self.lies else {}
        ends = [client.end({"returns": lied.get(agent, returns)}) for agent, client in clients.items()]
        assert ends[0] == {"counts": None}
        self.counted.append(ends[1])
        self.played += 1


@contextlib.contextmanager
def playing(*games):
    threads = [threading.Thread(target=game.play, daemon=True) for game in games]
    for thread in threads:
        thread.start()
    try:
        yield games
    finally:
        for game in games:
            game.over.set()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    assert not [game.broken for game in games if game.broken]


def results(path):
    return [event for event in map(json.loads, (path / IN_RUN).read_text().splitlines()) if "id" in event]


def snapshots(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for name in THREE
        for file in (path / "models" / name).glob("*.safetensors")
    }


def test_three_players_learn_from_live_games_and_no_result_is_lost(tmp_path):
    path = tmp_path / "run"
    with experiment(path) as exp:
        games = [Duel(exp.training.source.port, lies={3} if i == 0 else ()) for i in range(4)]
        with playing(*games):
            rows = list(exp.train(stop={"env_steps_total": 600}))
            for game in games:
                game.over.set()
        league = exp.training.source.league.league
        assert rows[-1]["league/refused"] == sum(league.refused.values()) == 1
        exp.save()
    told = {number: (seats, returns) for game in games for number, seats, returns in game.seats}
    assert len(told) == sum(game.played for game in games), "each match has a number of its own"
    logged = results(path)
    ids = [event["id"] for event in logged]
    assert len(ids) == len(set(ids)) == len(told) - 1
    for event in logged:
        assert (event["seats"], event["returns"], event["length"]) == (*told[event["id"]], 4)
    counted = Counter(end["counts"] for game in games for end in game.counted)
    assert counted == {True: len(ids), False: 1}
    assert [e["why"] for e in games[0].counted if not e["counts"]] == ["its sessions disagree about how it ended"]
    players = Counter(name for seats, _ in told.values() for name in seats.values())
    assert {"main", "hunter", "naive"} <= players.keys()
    assert any("@" in name for name in players)
    assert {f"side/{name}/league/rating" for name in THREE} <= rows[-1].keys()
    # a seat of a snapshot has no rows: what was learnt from is at most what players that learn decided
    learnt = sum(3 * count for name, count in players.items() if "@" not in name)
    assert rows[-1]["env_steps_total"] <= learnt < 3 * 2 * len(told)
    assert min(rows[-1][f"side/{name}/learner_steps_total"] for name in THREE) > 0
    fold = read_league(path / IN_RUN)
    for a in league.refs:
        for b in league.refs:
            assert fold.record(a, b) == league.record(a, b)
        assert fold.rating(a) == league.rating(a)
    _goes_on(path, ids)


def _goes_on(path, ids):
    """Resumed, now over TCP: all results count, and snapshots are what they were."""
    frozen = snapshots(path)
    with experiment(path, resume=True, use_tcp=True) as exp:
        game = Duel(exp.training.source.port, tcp=True)
        with playing(game):
            exp.fit({"env_steps_total": 700}, progress=False)
            game.over.set()
        assert len(exp.training.source.league.league.lineage) > 0
    assert {name: digest for name, digest in snapshots(path).items() if name in frozen} == frozen
    again = [event["id"] for event in results(path)]
    assert again[: len(ids)] == ids
    assert len(again) == len(set(again)) > len(ids)


@pytest.fixture
def league(tmp_path):
    """One that answers and does not learn yet: its log comes when it first trains."""
    with experiment(tmp_path / "run", self_play={**LEAGUE, "newest": 0.0}, policies={}) as exp:
        yield exp.training.source


def start(source, name):
    client = Client("127.0.0.1", source.port, session=name, retries=0)
    return client, client.start(data={})


def test_sessions_that_are_no_seat_of_a_match_are_refused(league):
    with start(league, "a-agent-x")[0]:
        for name, message in (
            ("match", "expected a session named <match>-agent-<agent>"),
            ("b-agent-y", "unknown agent 'y'"),
            ("-agent-x", "name of a match"),
        ):
            with pytest.raises(ClientError, match=message) as e:
                start(league, name)
            assert e.value.status == 400
        assert len(league.matches) == 1
    with pytest.raises(ClientError, match="match 'a' is over"):
        start(league, "a-agent-o")
    assert league.league.league.refused == {"an agent of it was never there": 1}


def test_a_game_that_vanishes_is_drawn_again(league):
    seats = {}
    for agent in AGENTS:
        client, seats[agent] = start(league, f"a-agent-{agent}")
        client.tick({"obs": [0, 0, 0]})
    sessions = league.server.server.sessions
    league.server.call(lambda: [sessions.lose(one) for one in list(sessions.sessions.values())])
    until_none_is_open(league)
    assert league.league.league.refused == {"none of its sessions said how it ended": 1}
    again = {agent: start(league, f"b-agent-{agent}")[1] for agent in AGENTS}
    assert {a: s["player"] for a, s in again.items()} == {a: s["player"] for a, s in seats.items()}
    assert again["x"]["match"] != seats["x"]["match"]


def until_none_is_open(source):
    wait = threading.Event()
    for _ in range(int(LONG / 0.02)):
        if not len(source.matches):
            return
        wait.wait(0.02)
    raise AssertionError("a match is still open")


def test_what_is_no_result_is_told_and_the_other_sessions_result_counts(league):
    (x, _), (o, _) = (start(league, f"a-agent-{agent}") for agent in AGENTS)
    with pytest.raises(ClientError, match="a finite number for each of x, o"):
        x.end({"returns": {"x": 1}})
    assert o.end({"returns": {"x": 1, "o": -1}}) == {"counts": True}


def test_a_session_is_one_match(league):
    (x, _), (o, _) = (start(league, f"a-agent-{agent}") for agent in AGENTS)
    for client in (x, o):
        client.tick({"obs": [0, 0, 0]})
        client.tick({"obs": [1, 0, 0], "reward": 0.0, "terminated": True})
        with pytest.raises(ClientError, match="this match is over"):
            client.tick({"obs": [0, 0, 0], "reward": 0.0})
        client.end({"returns": {"x": 0, "o": 0}})


def test_snapshots_that_were_removed_are_played_no_more(tmp_path):
    path = tmp_path / "run"
    own = {"snapshot_every": 40, "newest": 0.0, "weighting": "uniform"}
    with experiment(path, self_play=own, policies={}) as exp:
        game = Duel(exp.training.source.port)
        with playing(game):
            exp.fit({"env_steps_total": 200}, progress=False)
            game.over.set()
    _, *removed = read_league(path / IN_RUN).past("default")
    assert removed
    for ref in removed:
        RunDir.open(path).protect(ref.step, "default", on=False)
        (path / "models" / "default" / f"{ref.step}.safetensors").unlink()
    with experiment(path, resume=True) as exp:
        game = Duel(exp.training.source.port)
        with playing(game):
            exp.fit({"env_steps_total": 300}, progress=False)
            game.over.set()
    assert not {str(ref) for ref in removed} & {name for _, seats, _ in game.seats for name in seats.values()}
    assert '"lost":"default@' in (path / IN_RUN).read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"agents": []}, "the names of the game's agents"),
        ({"agents": ["x", "x"]}, "at least two"),
        ({"self_play": None, "policies": {"one": {}, "two": {}}}, "several policies learn from live games as a league"),
        ({"policies": {"one": {"player": "main"}}}, "a league has several policies"),
        ({"eval_freq": 1}, "cannot be evaluated"),
        ({"num_workers": 2}, "leave num_workers=2 out"),
        ({"policies": {"one": {"player": "man"}, "two": {}}}, "unknown kind of player 'man'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message), experiment(tmp_path / "run", **more) as exp:
        _ = exp.training
