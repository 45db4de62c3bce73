"""Self-play: a policy against itself and its snapshots: whose rows are learnt from, who decides, exact resume."""

import io
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console

import bray
from bray.envs.agent_games import Nim
from bray.envs.config import EnvConfig
from bray.errors import BrayError
from bray.league import IN_RUN, read_league
from bray.metrics import TerminalSink
from bray.rundir import trust
from bray.train.games import play_two
from bray.train.opponents import load_opponent

NIM = "bray.envs.agent_games:Nim"

SMALL = {"rollout_length": 16, "epochs": 2, "minibatches": 2, "num_envs": 4, "iteration_steps": 100}
SELF_PLAY = {"snapshot_every": 100, "pool": 3}


class Coded(bray.MultiAgentEnv):
    """Two take turns, two or three times each. What an agent sees says which game it is, who it is and how far it is;
    what it is paid in all says which game it was."""

    possible_agents = ("ann", "bob")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(-1e6, 1e6, (3,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))
    made = 0

    def __init__(self):
        Coded.made += 1
        self.game, self.played = 1000 * Coded.made, []

    def reset(self, *, seed=None, options=None):
        self.game, self.t = self.game + 1, 0
        return self.see(), {}

    def see(self):
        turn = self.t % 2
        return {self.possible_agents[turn]: np.array([self.game, turn, self.t], np.float32)}

    def step(self, actions):
        ((agent, action),) = actions.items()
        self.played.append((self.game, agent, int(action)))
        self.t += 1
        over = self.t == 4 + self.game % 3
        paid = {"ann": 0.0, "bob": 0.0, agent: 0.5}
        if over:
            given = Counter(a for game, a, _ in self.played if game == self.game)
            paid = {
                a: sign * self.game - 0.5 * given[a] + (0.5 if a == agent else 0.0)
                for a, sign in (("ann", 1), ("bob", -1))
            }
        return ({} if over else self.see()), paid, {"__all__": over}, {"__all__": False}, {}


def events(path):
    return [json.loads(line) for line in (path / "league" / "results.jsonl").read_text().splitlines()]


def make(env, path=None, algo="PPO", **more):
    return bray.Experiment(algo, env, path=path, **{**SMALL, "self_play": SELF_PLAY, **more})


@pytest.mark.parametrize("newest", [0.0, 0.5, 1.0])
def test_only_who_learns_has_rows_and_all_of_its_rows(tmp_path, newest):
    """Told by a game that says who decided when, and by the league's log of who sat where."""
    exp = make(Coded, tmp_path / "run", self_play={**SELF_PLAY, "newest": newest})
    exp.save()
    source, rows, closed = exp.training.sources[0], Counter(), set()
    for _ in range(12):
        for piece in source.gather()[0]:
            for t, b in zip(*np.nonzero(piece.valid), strict=True):
                game, who, at = piece.obs[t, b]
                rows[int(game), int(who), int(at)] += 1
                if piece.terminated[t, b]:
                    closed.add((int(game), int(who)))
    played = [one for log in source.foreach_env(lambda env: env.played) for one in log]
    logged = [event for event in events(tmp_path / "run") if "id" in event]
    live_of = {int(e["returns"]["ann"]): [a for a, ref in e["seats"].items() if ref == "default"] for e in logged}
    assert len(live_of) > 20
    assert sum(len(live) == 2 for live in live_of.values()) == pytest.approx(
        newest * len(live_of), abs=0.25 * len(live_of)
    )
    turns = {}
    for game, agent, _ in played:
        turns.setdefault(game, []).append(agent)
    for game, live in live_of.items():
        if all((game, ["ann", "bob"].index(agent)) in closed for agent in live):  # else its end is in the next piece
            expected = {(game, t % 2, t) for t, agent in enumerate(turns[game]) if agent in live}
            assert {key for key in rows if key[0] == game} == expected
    assert set(rows.values()) == {1}
    assert source.agent_steps >= sum(rows.values())
    exp.close()


def always(exp, action):
    """Its policy chooses this: by the bias of its two outputs, in a network with memory beside that of the value."""
    with torch.no_grad():
        for x in exp.training.model.parameters():
            if x.shape in ((2,), (3,)):
                x[:2] = torch.tensor([100.0, 0.0] if action == 0 else [0.0, 100.0])


@pytest.mark.parametrize("lstm", [False, True])
def test_snapshots_decide_by_their_own_weights(tmp_path, lstm):
    exp = make(Coded, tmp_path / "run", self_play={**SELF_PLAY, "newest": 0.0}, use_lstm=lstm)
    always(exp, 0)
    exp.save()
    source = exp.training.sources[0]
    source.gather()
    always(exp, 1)
    before = {game for log in source.foreach_env(lambda env: env.played) for game, *_ in log}
    for _ in range(4):
        source.gather()
    chosen = {}
    for game, agent, action in [one for log in source.foreach_env(lambda env: env.played) for one in log]:
        if game not in before:
            chosen.setdefault((game, agent), set()).add(action)
    checked = Counter()
    for e in events(tmp_path / "run"):
        for agent, ref in e.get("seats", {}).items():
            found = chosen.get((int(e["returns"]["ann"]), agent))
            if found is not None:
                assert found == ({1} if ref == "default" else {0})
                checked[ref] += 1
    assert min(checked["default"], checked["default@0"]) > 10
    exp.close()


@pytest.mark.parametrize(("algo", "more"), [("PPO", {}), ("PPO", {"use_lstm": True}), ("DQN", {"learning_starts": 50})])
def test_a_resumed_run_goes_on_exactly(tmp_path, algo, more):
    settings = {
        "num_envs": 4,
        "iteration_steps": 100,
        "self_play": SELF_PLAY,
        **(SMALL if algo == "PPO" else {}),
        **more,
    }

    def run(path):
        return bray.Experiment(algo, Nim, path=path, **settings)

    with run(tmp_path / "whole") as exp:
        exp.fit({"env_steps_total": 400}, progress=False)
        whole = exp.training.weights()
    with run(tmp_path / "parts") as exp:
        for row in exp.train({"env_steps_total": 400}):
            if row["env_steps_total"] > 200:
                break
    log = tmp_path / "parts" / "league" / "results.jsonl"
    result = {"id": 900, "seats": dict.fromkeys(["first", "second"], "default"), "returns": {"first": 1, "second": -1}}
    with open(log, "a") as f:  # of games after the checkpoint, which are played again
        f.write(json.dumps(result) + '\n{"id"')
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        row = exp.fit({"env_steps_total": 400}, progress=False)
        parts = exp.training.weights()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert log.read_bytes() == (tmp_path / "whole" / "league" / "results.jsonl").read_bytes()
    assert row["league/snapshots"] > 2


def test_snapshots_are_copies_that_stay(tmp_path):
    with make(Nim, tmp_path / "run", keep_checkpoints=1, checkpoint_freq=1) as exp:
        exp.save()
        first = {name: x.copy() for name, x in exp.training.weights().items()}
        row = exp.fit({"env_steps_total": 1000}, progress=False)
        assert not all(np.array_equal(first[name], x) for name, x in exp.training.weights().items())
    directory = bray.rundir.RunDir.open(tmp_path / "run")
    assert all(np.array_equal(first[name], x) for name, x in directory.load_weights(0).items())
    frozen = [int(e["snapshot"].partition("@")[2]) for e in events(tmp_path / "run") if "snapshot" in e]
    assert set(frozen) <= set(directory.versions())
    assert len(frozen) == row["league/snapshots"] > 3
    with bray.Experiment.load(tmp_path / "run") as exp:  # it is a run of one policy like any other
        assert len(exp.play_games(4)) == 4
    ids = [e["id"] for e in events(tmp_path / "run") if "id" in e]
    assert len(ids) == len(set(ids)) > 30
    seats = [tuple(e["seats"].values()) for e in events(tmp_path / "run") if "id" in e]
    assert {"default"} < {name for pair in seats for name in pair}
    assert all("default" in pair for pair in seats)


def test_a_snapshot_whose_file_is_gone_is_played_no_more(tmp_path, caplog):
    with make(Nim, tmp_path / "run") as exp:
        exp.fit({"env_steps_total": 500}, progress=False)
    gone = [e["snapshot"] for e in events(tmp_path / "run") if "snapshot" in e][-2]
    (tmp_path / "run" / "models" / "default" / f"{gone.partition('@')[2]}.safetensors").unlink()
    with bray.Experiment.resume(tmp_path / "run") as exp:
        exp.fit({"env_steps_total": 1500}, progress=False)
    assert f"the weights of player {gone} are gone" in caplog.text
    after = events(tmp_path / "run")
    lost = after.index({"lost": gone})
    assert all(e["id"] < 10**6 for e in after if "id" in e)
    open_then = [e for e in after[lost:] if gone in e.get("seats", {}).values()]
    assert len(open_then) <= 4, "only games that were under way"


def heap_of_one(obs, rng):
    return 0


def broken(obs, rng):
    raise RuntimeError("no idea")


def test_it_is_evaluated_against_named_opponents(tmp_path):
    with make(Nim, tmp_path / "other", self_play={}) as exp:
        exp.fit({"env_steps_total": 100}, progress=False)
    against = ["random", "first", f"{__name__}:heap_of_one", str(tmp_path / "other")]
    own = {**SELF_PLAY, "opponents": against}
    with make(Nim, tmp_path / "run", self_play=own, eval_freq=1, eval_episodes=8) as exp:
        row = exp.fit({"env_steps_total": 300}, progress=False)
        again = exp.training.evaluate()
    for name in against:
        shares = [row[f"eval/{name}/{how}"] for how in ("win", "draw", "loss")]
        assert sum(shares) == pytest.approx(1.0)
        assert shares[1] == 0.0
    assert row["eval/episodes"] == 32
    mean = np.mean([row[f"eval/{name}/win"] - row[f"eval/{name}/loss"] for name in against])
    assert row["eval/return_mean"] == pytest.approx(mean)  # the winner of Nim is paid 1
    assert {k: v for k, v in again.items() if k.endswith("/win")} == {
        k: v for k, v in row.items() if k.startswith("eval") and k.endswith("/win")
    }


def test_evaluations_rate_the_opponents_and_leave_the_players_alone(tmp_path):
    """The better it does against somebody, the lower that one's rating; what is known of the players is the same
    without evaluations."""
    own = {**SELF_PLAY, "opponents": ["random", "first", f"{__name__}:never_wins"]}
    with make(Rigged, tmp_path / "run", self_play=own, eval_freq=1, eval_episodes=20) as exp:
        row = exp.fit({"env_steps_total": 300}, progress=False)
        league = exp.training.league.league
        first = league.rating(league.past()[0])
    with make(Rigged, tmp_path / "alone", self_play=own) as exp:
        exp.fit({"env_steps_total": 300}, progress=False)
    log = [event for event in events(tmp_path / "run") if "opponent" not in event]
    assert log == events(tmp_path / "alone")
    assert len(events(tmp_path / "run")) > len(log)
    found = read_league(tmp_path / "run" / IN_RUN)
    assert {name: rating.elo for name, rating in found.opponents.items()} == {
        name: row[f"eval/{name}/rating"] for name in ("random", f"{__name__}:never_wins")
    }
    assert row["eval/first/rating"] == first.elo
    assert row["eval/random/rating"] - 200 > row[f"eval/{__name__}:never_wins/rating"] < row["league/rating"] - 300
    assert 0 < row["eval/random/rating_ci95"] < 1000


class Rigged(Nim):
    """Who says 2 first loses; else who moved last wins, as in Nim of few sticks."""

    def __init__(self):
        super().__init__(sticks=4)

    def step(self, actions):
        ((agent, action),) = actions.items()
        out = super().step(actions)
        if int(action) != 2:
            return out
        paid = {a: -1.0 if a == agent else 1.0 for a in self.possible_agents}
        return {}, paid, {"__all__": True}, {"__all__": False}, {}


def never_wins(obs, rng):
    return 2 if obs["action_mask"][2] else 0


def bot_games(one, other, game, games=24):
    table = bray.Experiment("PPO", game).spec_of()
    players = [load_opponent(name, table.sides["default"].spec) for name in (one, other)]
    matches = play_two(*players, EnvConfig(id=game), table.agents, games)
    return [match.returns[mine] for match, mine in matches]


def test_bots_of_openspiel_play():
    pytest.importorskip("pyspiel")
    strong = bot_games("openspiel:mcts(max_simulations=100)", "random", "openspiel:tic_tac_toe")
    assert min(strong) >= 0.0
    assert np.mean(strong) > 0.7
    assert strong == bot_games("openspiel:mcts(max_simulations=100)", "random", "openspiel:tic_tac_toe")
    blind = bot_games(
        "openspiel:mcts(max_simulations=2)", "openspiel:mcts(max_simulations=100)", "openspiel:tic_tac_toe"
    )
    assert np.mean(blind) < -0.4
    in_turn = bot_games(*["openspiel:fixed_action_preference"] * 2, "openspiel:tic_tac_toe")
    assert sorted(in_turn) == [-1.0] * 12 + [1.0] * 12, "who takes the first free square wins where it begins"
    both = bot_games(
        "openspiel:uniform_random",
        "openspiel:uniform_random",
        "openspiel:goofspiel(num_cards=4,imp_info=True,points_order=descending)",
    )
    assert len(set(both)) > 1, "a simultaneous game"


def test_search_alone_plays_any_game_that_can_be_cloned():
    for game in (NIM, "bray.envs.agent_games:ConnectFour"):
        assert np.mean(bot_games("mcts(simulations=40)", "random", game, games=10)) >= 0.8
    strong = bot_games("mcts(simulations=150)", "mcts(simulations=3,c=1.5)", NIM, games=8)
    assert sum(strong) >= 6, "of eight games, whoever begins"
    assert bot_games("mcts(simulations=9)", "random", NIM, 6) == bot_games("mcts(simulations=9)", "random", NIM, 6)


@pytest.mark.parametrize(
    ("bot", "env", "message"),
    [
        ("openspiel:mtcs", "openspiel:tic_tac_toe", "mcts"),
        ("openspiel:mcts(simulations=3)", "openspiel:tic_tac_toe", "max_simulations"),
        ("openspiel:mcts(max_simulations=", "openspiel:tic_tac_toe", "is no bot for tic_tac_toe"),
        ("openspiel:mcts", NIM, "plays games of OpenSpiel, and this one is Nim"),
        ("mcts(rollouts=3)", NIM, r"unknown setting 'rollouts' \(of mcts\)"),
        ("mcts(simulations=few)", NIM, "numbers above 0"),
        ("mcts(simulations=3", NIM, "numbers above 0"),
        ("mcts", "openspiel:kuhn_poker", "cannot be searched: it has chance and hidden information"),
        ("mcts", "bray.envs.agent_games:Matrix", r"Matrix cannot be searched: define clone\(self\)"),
    ],
)
def test_bots_that_cannot_play_are_refused(bot, env, message):
    pytest.importorskip("pyspiel")
    with pytest.raises(BrayError, match=message):
        bot_games(bot, "random", env)


def test_a_function_of_a_strangers_run_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked = trust.named({"run": {"self_play": {"opponents": ["random", "theirs:bot"]}}})
    with pytest.raises(trust.UntrustedRun, match="'theirs:bot'"):
        trust.check(tmp_path, asked)


@pytest.mark.draws
def test_the_progress_line_and_the_curve_tell_the_rating(tmp_path):
    with make(Nim, tmp_path / "run", eval_freq=1, eval_episodes=4) as exp:
        out = io.StringIO()
        sink = TerminalSink("nim", console=Console(file=out, width=200), every=0.0)
        for row in exp.train({"env_steps_total": 400}, sinks=[sink]):
            assert row["league/rating_ci95"] > 0
    line = out.getvalue().splitlines()[-1]
    assert f"rating {row['league/rating']:.0f} ± {row['league/rating_ci95']:.0f}" in line
    assert "won, drawn, lost against past selves" in line
    assert re.search(r"won, drawn, lost against random \d+% \d+% \d+%, rating \d+", line)
    assert (tmp_path / "run" / "figures" / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("env", "more", "message"),
    [
        ("CartPole-v1", {}, "a game of several agents, and CartPole-v1 has one"),
        (Nim, {"policies": {"one": {}}}, "leave policies out"),
        (Nim, {"self_play": {"newest": 1.5}}, "newest"),
        (Nim, {"self_play": {"weighting": "cubed"}}, "squared"),
        (Nim, {"self_play": {"pools": 3}}, "pool"),
        (Nim, {"self_play": {"opponents": ["randon"]}, "eval_freq": 1}, "random"),
        (Nim, {"self_play": {"opponents": ["math:sinn"]}, "eval_freq": 1}, "sinn"),
        (Nim, {"self_play": {"opponents": [f"{__name__}:broken"]}, "eval_freq": 1}, r"broken.*raised RuntimeError"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, env, more, message):
    with pytest.raises(BrayError, match=message), make(env, tmp_path / "run", **more) as exp:
        exp.fit({"env_steps_total": 50}, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_tic_tac_toe_is_learnt_by_self_play(tmp_path, seed):
    with bray.Experiment(
        "PPO", "openspiel:tic_tac_toe", path=tmp_path / "run", seed=seed, self_play={"snapshot_every": 5_000}
    ) as exp:
        exp.fit({"env_steps_total": 100_000}, progress=False)
        found = exp.training.evaluate(400)
    assert found["eval/random/win"] > 0.75  # random against itself: 0.44
    assert found["eval/random/loss"] < 0.15
    assert found["eval/first/win"] > 0.75
