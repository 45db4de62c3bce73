"""Games of several agents as rows: all that comes out of `TableSource` is what a plain collector makes of the games."""

import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from chaos_for_tests import AGENTS, Chaos, Collector, drawn, fixed

import bray
from bray import tree
from bray.act import Clock
from bray.cli.collect import AgentEpisodes
from bray.data.piece import COLUMNS
from bray.envs.agent_games import Nim
from bray.envs.table import DEFAULT, Game
from bray.errors import BrayError, ConfigError, EnvError
from bray.experiment import Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.callbacks import CallbackList
from tests import forked

PLAIN = {"device": "cpu", "num_workers": 0, "inference": "worker"}  # nothing is timed before the games begin
SMALL = {"num_envs": 3, "fcnet_hiddens": [4], "use_preset": False, "save_figure": False, **PLAIN}
DQN = {"learning_starts": 32, "batch_size": 16, "replay_size": 1000}


def ppo(rows, **more):
    return {"rollout_length": rows, "minibatches": 1, "epochs": 1, **more}


def training(env=Chaos, run="PPO", **options):
    Chaos.logs.clear()
    return Experiment(env=env, run=run, **{**SMALL, **options}).training


def gathered(source, gathers):
    """The pieces of so many gathers, copied: workers write over theirs."""
    pieces = []
    for _ in range(gathers):
        for piece in source.gather(timeout=60.0)[0]:
            own = {name: tree.map(np.array, x) for name in COLUMNS if (x := getattr(piece, name)) is not None}
            pieces.append(replace(piece, **own))
    return pieces


def of_all(agent, game):
    return DEFAULT


def same_pieces(a, b):
    names = (*COLUMNS, "version", "stream", "start")
    return a.side == b.side and all(
        tree.equal(x, y) if isinstance(x, dict | tuple) else np.array_equal(x, y)
        for x, y in ((getattr(a, name), getattr(b, name)) for name in names)
    )


def collected(source, side_of=of_all, limit=None):
    """The rows of each seat, and the collector of each environment."""
    logs = source.foreach_env(lambda env: env.log)
    collectors = [Collector(i, side_of, limit).collect(log) for i, log in enumerate(logs)]
    rows = {}
    for i, one in enumerate(collectors):
        for (side, k), found in one.finish().items():
            rows[side, i * source.seats[side].env.seats + k] = found
    return rows, collectors


def same(column, at, value):
    """Whether a row of a column of a piece is this, as an environment gave or got it."""
    if isinstance(column, dict):
        return column.keys() == value.keys() and all(same(column[k], at, value[k]) for k in column)
    return np.array_equal(column[at], value)


def compare(pieces, rows):
    """Every column of the pieces with the rows; how many rows of each seat the pieces had."""
    taken = Counter()
    for piece in pieces:
        piece.check()
        n = piece.length
        for b in range(piece.num_envs):
            seat = piece.side, b if piece.stream is None else int(piece.stream[b])
            at = taken[seat]
            if piece.stream is not None:
                assert int(piece.start[b]) == at
            taken[seat] += n
            mine = rows[seat][at : at + n + 1]
            assert all(row.closed for row in mine[:n])
            for name in ("reward", "terminated", "truncated", "valid"):
                assert getattr(piece, name)[:, b].tolist() == [getattr(row, name) for row in mine[:n]], name
            seen = [t == 0 or piece.valid[t - 1, b] for t in range(n + 1)]  # what follows a dead row is nothing yet
            seen = [s or t < n for t, s in enumerate(seen)]
            for t in np.flatnonzero(seen):
                assert same(piece.obs, (t, b), mine[t].obs)
                assert piece.first[t, b] == mine[t].first
            for t in np.flatnonzero(piece.valid[:, b]):
                assert same(piece.action, (t, b), mine[t].action)
    return taken


def check(source, gathers, side_of=of_all, limit=None):
    """All rows that are closed have come, no other, and the counts are theirs."""
    pieces = gathered(source, gathers)
    rows, collectors = collected(source, side_of, limit)
    taken = compare(pieces, rows)
    newest = {piece.side for piece in pieces[-2:]}
    for seat, found in rows.items():
        side = source.seats[seat[0]]
        if seat[0] in newest and side.steps == 0:
            closed = sum(row.closed for row in found)
            assert taken[seat] == closed - closed % (1 if side.state is None else side.state_every)
    assert source.env_steps == sum(c.env_steps for c in collectors)
    assert source.agent_steps == sum(c.agent_steps for c in collectors)
    assert source.games == sum(len(c.matches) for c in collectors)
    return pieces, rows, collectors


ONE_FOR_ALL = {}
TWO = {"policies": {"one": {}, "two": {}}, "policy_mapping": {"a": "one", "b": "one", "*": "two"}}
DRAWN = {"policies": {"one": {}, "two": {}}, "policy_mapping": drawn}
MAPPINGS = {"one": (ONE_FOR_ALL, of_all), "fixed": (TWO, fixed), "drawn": (DRAWN, drawn)}


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rows_are_those_of_the_collector(mapping, rows):
    options, side_of = MAPPINGS[mapping]
    source = training(config=ppo(rows), **options).sources[0]
    _, found, _ = check(source, -(-160 // rows), side_of)
    flat = [row for seat in found.values() for row in seat]
    assert len(flat) > 300
    assert {row.terminated + 2 * row.truncated for row in flat} == {0, 1, 2}


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rows_that_are_replayed(mapping):
    options, side_of = MAPPINGS[mapping]
    source = training(run="DQN", config=DQN, **options).sources[0]
    pieces, _, _ = check(source, 10, side_of)
    assert all(piece.stream is not None for piece in pieces)


def test_ppo_and_dqn_play_with_each_other_in_spaces_of_their_own():
    policies = {"one": {"run": "PPO", "config": ppo(9)}, "two": {"run": "PPO", "config": ppo(5)}}
    mapping = {"[ab]": "one", "[cd]": "two"}
    game = training(policies=policies, policy_mapping=mapping, env_config={"mixed": True})
    pieces, _, _ = check(game.sources[0], 30, fixed)
    assert {piece.side for piece in pieces} == {"one", "two"}
    policies["one"] = {"run": "DQN", "config": DQN}
    game = training(policies=policies, policy_mapping=mapping, env_config={"mixed": True})
    check(game.sources[0], 30, fixed)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_agents_that_all_act_at_every_step_are_one_piece(rows):
    source = training(config=ppo(rows), env_config={"even": True}, **TWO).sources[0]
    pieces, _, _ = check(source, -(-150 // rows), fixed)
    assert all(piece.stream is None and piece.reward.shape == (rows, 6) for piece in pieces)


@pytest.mark.parametrize("memory", [{}, {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}])
def test_in_turns_only_those_who_act_go_through_the_model(memory, monkeypatch):
    """Their rows are as if all did: draws are of seats, whoever's turn it is."""
    pieces, sizes = [], []
    for parts in (8, 1):
        monkeypatch.setattr("bray.train.table.SIZES", parts)
        source = training(Nim, num_envs=16, config={**ppo(16), **memory, "fcnet_activation": "relu"}).sources[0]
        pieces.append(gathered(source, 1))
        engine = source.seats[DEFAULT].engine
        inner, rows = engine.forward, []
        engine.forward = lambda *inputs, rows=rows, inner=inner: (
            rows.append(len(tree.leaves(inputs)[0])) or inner(*inputs)
        )
        pieces[-1] += gathered(source, 2)
        sizes.append(rows[:-1])  # at the end those are looked at whose rows go on
    assert set(sizes[0]) <= {8, 16, 24, 32}
    assert np.mean(sizes[0]) < 24  # 16 of 32 act, and beside them some show the end of a game
    assert set(sizes[1]) == {32}
    assert len(pieces[0]) == len(pieces[1]) > 3
    for a, b in zip(*pieces, strict=True):
        for name in ("obs", "action", "reward", "terminated", "valid", "stream"):
            assert tree.equal(getattr(a, name), getattr(b, name)), name
        seen = np.ones(a.first.shape, bool)
        seen[-1] = a.valid[-1]
        np.testing.assert_allclose(a.outputs["value"][seen], b.outputs["value"][seen], atol=1e-5)


def test_games_that_are_cut_and_games_that_fail():
    for options, limit in (({"max_episode_steps": 7}, 7), ({"max_restarts": 99, "env_config": {"fails": 0.1}}, None)):
        source = training(config=ppo(8), **options, **DRAWN).sources[0]
        _, found, collectors = check(source, 20, drawn, limit)
        assert sum(row.truncated for seat in found.values() for row in seat) > 20
        assert any(c.episode > 10 for c in collectors)
    assert source.env.restarts > 10


def test_environments_in_processes_give_the_same_rows():
    here, there = (
        training(config=ppo(8), vector=form, num_processes=2, **DRAWN).sources[0]
        for form in ("inprocess", "subprocess")
    )
    a, b = gathered(here, 10), check(there, 10, drawn)[0]
    there.close()
    assert len(a) == len(b) > 20
    assert all(same_pieces(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("run", "config"), [("PPO", ppo(8)), ("DQN", DQN), ("IMPALA", {"rollout_length": 8})])
def test_rows_of_workers_are_those_of_the_collector(run, config):
    """An environment has its number among those of all workers."""
    with closing(training(run=run, config=config, num_envs=2, **{**DRAWN, "num_workers": 4})) as game:
        source = game.sources[0]
        pieces, until = [], time.monotonic() + 120
        while sum(piece.valid.sum() for piece in pieces) < 1500 and time.monotonic() < until:
            pieces += gathered(source, 1)
        rows, collectors = {}, []
        for i, log in enumerate(source.foreach_env(lambda env: env.log)):
            collectors.append(Collector(i, drawn).collect(log))
            rows |= {(side, i * len(AGENTS) + k): found for (side, k), found in collectors[-1].finish().items()}
    assert len(collectors) == 8
    taken = compare(pieces, rows)
    assert sum(taken.values()) > 1500
    assert len({seat // 8 for _, seat in taken}) == 4  # of every worker
    if run == "PPO":
        assert sum(taken.values()) == sum(row.closed for found in rows.values() for row in found)


def as_tensors(obs):
    return tree.map(lambda x: torch.from_numpy(np.ascontiguousarray(x)), obs)


@pytest.mark.parametrize("shared", [False, True])
def test_values_and_probabilities_are_of_the_row_that_has_them(shared, monkeypatch):
    """Whether they are computed with the actions or at the end of a rollout, beside rows that nobody has written: these
    are no members of the space."""

    def empty(shape, dtype=float, **more):
        return np.full_like(np_empty(shape, dtype, **more), 99)

    np_empty = np.empty
    monkeypatch.setattr(np, "empty", empty)
    options = {"policies": {"one": {}, "two": {}}, "policy_mapping": {"[ab]": "one", "*": "two"}}
    game = training(config=ppo(6), vf_share_layers=shared, env_config={"mixed": True}, **options)
    checked = 0
    for piece in gathered(game.sources[0], 20):
        seat = game.sources[0].seats[piece.side]
        assert (seat.later is None) == shared
        seen = np.ones(piece.first.shape, bool)  # what follows a dead row is nothing yet
        seen[-1] = piece.valid[-1]
        model, layout = seat.engine.model, seat.env.spec.layout
        out = model(as_tensors(tree.map(lambda x, at=seen: x[at], piece.obs)))
        np.testing.assert_allclose(piece.outputs["value"][seen], out["value"].detach().numpy(), atol=1e-6)
        played = piece.valid
        obs = tree.map(lambda x, at=played: x[:-1][at], piece.obs)
        logits = model(as_tensors(obs))["dist"].detach().numpy().astype(np.float64)
        if piece.side == "one":
            logits = np.where(obs["action_mask"] > 0, logits, -np.inf)
        actions, logp, at = piece.action[played].reshape(len(logits), len(layout.parts)), 0.0, 0
        for k, part in enumerate(layout.parts):
            mine = logits[:, at : at + part.n]
            logp += np.take_along_axis(mine, actions[:, [k]], 1)[:, 0] - np.log(np.exp(mine).sum(1))
            at += part.n
        np.testing.assert_allclose(piece.extras["logp"][played], logp, atol=1e-5)
        checked += len(logits)
    assert checked > 200


@pytest.mark.parametrize("algorithm", ["PPO", "R2D2"])
def test_memory_is_of_the_seat_and_begins_anew_with_each_episode(algorithm):
    memory = {"use_lstm": True, "lstm_cell_size": 4}
    config = {**ppo(8), **memory, "max_seq_len": 4}
    if algorithm == "R2D2":
        config = {**DQN, **memory, "sequence_length": 4, "burn_in": 2}
    source = training(run=algorithm, config=config, **DRAWN).sources[0]
    pieces, rows, _ = check(source, 16, drawn)
    remembered = {}
    for key, found in rows.items():
        model = source.seats[key[0]].engine.model
        remembered[key], state = [], None
        for row in found:
            if row.first:
                state = model.initial_state(1)
            remembered[key].append(state)
            if row.valid:
                state = model(as_tensors(tree.map(lambda x: np.asarray(x)[None], row.obs)), state)["state"]
    taken, compared = Counter(), 0
    for piece in pieces:
        every = piece.state_every
        assert every == (4 if algorithm == "PPO" else 1)
        for b, seat in enumerate(piece.stream.tolist()):
            key = piece.side, seat
            for t in range(0, piece.length, every):
                if piece.valid[t, b]:
                    mine = tree.map(lambda x: x.detach().numpy()[0], remembered[key][taken[key] + t])
                    tree.map(
                        lambda x, y, t=t, b=b, n=every: np.testing.assert_allclose(x[t // n, b], y, atol=1e-5),
                        piece.state,
                        mine,
                    )
                    compared += 1
            taken[key] += piece.length
    assert compared > 60


def test_returns_are_of_whole_games():
    source = training(config=ppo(16), **DRAWN).sources[0]
    matches = []
    for _ in range(250):
        source.step()
        matches += source.matches
        source.seats["one"].pieces(), source.seats["two"].pieces()
    _, collectors = collected(source, drawn)
    for i, one in enumerate(collectors):
        assert [(m.returns, m.length) for m in matches if m.game == i] == one.matches
    assert len(matches) > 10
    numbers = source.numbers()
    for agent in AGENTS:
        mine = [m.returns[agent] for m in matches[-100:]]
        assert numbers[f"agent/{agent}/return_mean"] == pytest.approx(sum(mine) / len(mine))


class Watcher(bray.Callbacks):
    """Writes down what it is told of each game."""

    def __init__(self):
        self.ended, self.steps = [], []

    def on_episode_start(self, episode):
        assert episode.length == episode.total_reward == 0
        self.steps = []

    def on_episode_step(self, episode):
        self.steps.append((episode.action, episode.reward, episode.obs, episode.ended))

    def on_episode_end(self, episode):
        assert episode.total_reward == sum(episode.returns.values())
        assert episode.length == len(self.steps)
        assert episode.terminated != episode.truncated
        self.ended.append((episode.returns, episode.length, episode.policies, self.steps))


def test_callbacks_are_told_of_every_step_of_every_agent():
    source, watcher = training(config=ppo(16), num_envs=1, **DRAWN).sources[0], Watcher()
    source.watch(CallbackList([watcher]))
    for _ in range(200):
        source.step()
        source.seats["one"].pieces(), source.seats["two"].pieces()
    _, (collector,) = collected(source, drawn)
    assert [(returns, length) for returns, length, *_ in watcher.ended] == collector.matches
    assert len(watcher.ended) > 3
    (log,) = source.foreach_env(lambda env: env.log)
    games = [i for i, (kind, *_) in enumerate(log) if kind == "begin"]
    assert all(
        policies == {agent: drawn(agent, Game(0, i, log[begin][1])) for agent in AGENTS}
        for i, (begin, (*_, policies, _)) in enumerate(zip(games, watcher.ended, strict=False))
    )
    for (_, length, _, steps), begin in zip(watcher.ended, games, strict=False):
        before = None
        for told, (_, actions, obs, rewards, *_) in zip(steps, log[begin + 1 : begin + 1 + length], strict=True):
            action, paid, seen, ended = told
            assert {agent: int(x) for agent, x in action.items()} == actions
            assert {agent: r for agent, r in paid.items() if r} == {agent: r for agent, r in rewards.items() if r}
            assert all(same(seen[agent], (), obs[agent]) for agent in seen if agent in obs)
            assert ended.keys() <= seen.keys()
            assert before is None or actions.keys() <= before.keys()
            before = seen


def test_files_hold_the_rows_of_each_agent():
    source, written = training(config=ppo(16), num_envs=1).sources[0], []
    source.watch(CallbackList([AgentEpisodes([10**6], AGENTS, lambda policy, episode: written.append(episode))]))
    for _ in range(200):
        source.step()
        source.seats[DEFAULT].pieces()
    rows, _ = collected(source)
    assert len(written) > 20
    for k in range(len(AGENTS)):
        at = 0
        for episode in (e for e in written if e["agent"][0] == k):
            n = len(episode["reward"])
            mine = rows[DEFAULT, k][at : at + n + 1]
            assert [row.valid for row in mine] == [True] * n + [False]  # and its last observation
            for name in ("action", "reward", "terminated", "truncated"):
                assert episode[name].tolist() == [getattr(row, name) for row in mine[:n]]
            assert all(same(episode["obs"], t, row.obs) for t, row in enumerate(mine))
            at += n + 1
        assert not any(row.closed for row in rows[DEFAULT, k][at:] if row.valid and (row.terminated or row.truncated))


# --- going on ---------------------------------------------------------------------------------------------------------

RESUMED = {
    "one": (ppo(8), {}),
    "drawn": (ppo(5), DRAWN),
    "even": (ppo(5), {"env_config": {"even": True}}),
    "memory": ({**ppo(8), "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}, TWO),
    "normalized": (ppo(8), {"normalize_rewards": True, "normalize_observations": True, "max_episode_steps": 9}),
    "processes": (ppo(8), {**DRAWN, "vector": "subprocess", "num_processes": 2}),
    "replayed": (DQN, {"run": "DQN", **DRAWN}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_source_goes_on_exactly(case):
    config, options = RESUMED[case]
    with closing(training(config=config, **options).sources[0]) as whole:
        for k in range(3):
            gathered(whole, 1 + k)
            state = whole.get_state()
            state["arrays"] = tree.map(np.array, state["arrays"])
            state["json"] = json.loads(json.dumps(state["json"]))
            with closing(training(config=config, **options).sources[0]) as again:
                assert again.set_state(state, Clock())
                a, b = gathered(whole, 4), gathered(again, 4)
                assert len(a) == len(b) > 3
                assert all(same_pieces(x, y) for x, y in zip(a, b, strict=True))
                assert whole.numbers() == again.numbers()
                assert (whole.env_steps, whole.agent_steps) == (again.env_steps, again.agent_steps)


def test_games_that_cannot_go_on_begin_with_rows_of_their_own():
    """A game that was cut shows who would have decided next: nobody does."""
    options = {"config": ppo(4), "max_episode_steps": 1, "env_config": {"even": True}}
    with closing(training(**options).sources[0]) as source:
        source.step()
        assert source.env.dead.all()
        state = source.get_state()
    state["json"]["exact"] = False
    with closing(training(**options).sources[0]) as again:
        assert not again.set_state(state, Clock())
        pieces = gathered(again, 3)
        assert sum(piece.valid.sum() for piece in pieces) >= 36
        for piece in pieces:
            assert (piece.obs["obs"][:-1][piece.valid][:, 0] == 0.0).all()


def test_after_kill_minus_nine_a_game_goes_on_exactly(tmp_path):
    policies = {"one": {"run": "PPO", "config": ppo(8)}, "two": {"run": "DQN", "config": DQN}}
    told = {**SMALL, "policies": policies, "policy_mapping": "chaos_for_tests:drawn"}
    told |= {"export_graph_after_s": None, "checkpoint_every_s": 0.0}
    told["iteration_steps"] = 64
    whole = Experiment(env="chaos_for_tests:Chaos", path=tmp_path / "whole", **told)
    list(whole.train({"training_iteration": 12}))
    whole.close()
    del told["use_preset"]
    words = ["--env", "chaos_for_tests:Chaos", "--no-preset", "--config", json.dumps({**told, "checkpoint_freq": 1})]
    words += ["--project", str(tmp_path), "--trial", "r", "--stop", '{"time_total_s": 1000}', "--quiet"]
    process = forked.Popen([sys.executable, "-m", "bray", "train", *words], start_new_session=True)
    until = time.monotonic() + 120
    while len(RunDir(tmp_path / "r").steps()) < 4 and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    cut = Experiment.resume(tmp_path / "r")
    assert cut.exact
    last = max(12, cut.training.iteration + 2)
    assert cut.training.iteration > 0
    list(cut.train({"training_iteration": last}))
    cut.close()
    if last > 12:  # it was fast
        whole = Experiment.resume(tmp_path / "whole")
        list(whole.train({"training_iteration": last}))
        whole.close()
    for name in policies:
        a, b = (RunDir.open(tmp_path / run / "models" / name).load_checkpoint().weights for run in ("r", "whole"))
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[k], b[k]) for k in a)
    rows = [read_results(tmp_path / run) for run in ("r", "whole")]
    for key in ("env_steps_total", "agent_steps_total", "agent/a/return_mean", "side/two/loss/loss"):
        assert key in rows[0][-1]
        assert [row.get(key) for row in rows[0]] == [row.get(key) for row in rows[1]]


def test_a_run_is_resumed_with_the_policies_and_the_mapping_that_it_had(tmp_path):
    options = {**SMALL, **TWO, "config": ppo(8), "iteration_steps": 64, "export_graph_after_s": None}
    exp = Experiment(env="chaos_for_tests:Chaos", run="PPO", path=tmp_path / "r", **options)
    list(exp.train({"training_iteration": 1}))
    exp.close()
    for other in (
        {"policies": {"one": {}, "three": {}}},
        {"policy_mapping": {"a": "two", "*": "one"}},
        {"policy_mapping": "chaos_for_tests:drawn"},
    ):
        with pytest.raises(BrayError, match="keeps its polic"):
            Experiment.resume(tmp_path / "r", **other)
    again = Experiment.resume(tmp_path / "r", policy_mapping=dict(TWO["policy_mapping"]))
    assert again.exact
    again.close()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def refused(match, error=ConfigError, env=Chaos, gathers=0, **options):
    with pytest.raises(error, match=match), closing(training(env, **{"config": ppo(8), **options})) as game:
        gathered(game.sources[0], gathers)


def test_mistakes_of_a_mapping_are_told():
    two = TWO["policies"]
    some = {"policies": two, "policy_mapping": {"a": "one", "b": "two"}}
    refused(r"speaks of a, b, and not of agent 'c': .* Policies are one, two, as in policy_mapping={'a': 'one'", **some)
    refused("no agent plays by the policy 'two'; agents are a, b, c, d", policies=two, policy_mapping={"*": "one"})
    refused("speaks of nobody, and not of agent 'a'", policies=two)
    wrong = {"a": "one", "b": "two", "*": "three"}
    refused(r"unknown policy 'three' \(run.policy_mapping: agent 'c'\)", policies=two, policy_mapping=wrong)
    refused(r"unknown agent 'e' \(run.policy_mapping\)", policies=two, policy_mapping={"e": "one", "*": "two"})
    refused("or 'module:function', got 3", policies=two, policy_mapping=3)
    refused("no attribute 'nothing'", policies=two, policy_mapping="chaos_for_tests:nothing")
    refused("unknown policy 'three'.*agent 'a'", policies=two, policy_mapping=lambda agent, game: "three")
    refused("raised KeyError for agent 'a'", policies=two, policy_mapping=lambda agent, game: {}[agent])
    refused("env.num_envs is of the game", policies={"one": {}, "two": {"env": {"num_envs": 7}}}, policy_mapping=drawn)


def test_what_does_not_go_with_games_of_several_is_told():
    said = r"agents 'a' and 'c' have other observation spaces .*policies={one: {}, two: {}} and policy_mapping={a: one"
    refused(said, env_config={"mixed": True})
    refused(said, env_config={"mixed": True}, **DRAWN)
    refused(r"env.wrappers changes .*a game of several \(a, b, c, d\): leave it out", wrappers=[str])
    refused("ES learns from whole episodes of one agent.*env.teams", run="ES", config={})
    refused("PG learns from whole episodes of one agent.*env.teams", run="PG", config={})


class Wrong(Chaos):
    """Breaks the contract at step 5, or in a later game."""

    def __init__(self, what, vector_index=0):
        super().__init__(vector_index=vector_index)
        self.what, self.before, self.paid = what, set(), False
        if what == "names" and vector_index:
            self.possible_agents = ["a", "b", "c", "e"]
            for spaces in (self.observation_spaces, self.action_spaces):
                spaces["e"] = spaces["a"]

    def reset(self, **options):
        obs, infos = super().reset(**options)
        return ({"x": self._see("a")} if self.what == "later" and len(self.log) > 9 else obs), infos

    def step(self, actions):
        assert not self.paid  # the dead, in the step before, and nobody said so
        long = self.silent & self.before if self.t else set()  # who is dead since two steps and more
        self.before = set(self.silent)
        obs, rewards, terminateds, truncateds, infos = super().step(actions)
        if self.t == 5 and self.what in ("stranger", "paid", "nan", "dead"):
            if self.what == "stranger":
                obs["x"] = self._see("a")
            elif self.what != "dead":
                rewards["x" if self.what == "paid" else "a"] = float("nan") if self.what == "nan" else 1.0
        elif self.what == "dead":
            paid = {a: 1.0 for a in long & self.silent if a not in obs and not terminateds.get(a)}
            rewards, self.paid = rewards | paid, bool(paid)
        elif self.what == "blind" and self.t == 5:
            for seen in obs.values():
                seen["obs"][1] = np.nan
        elif self.what == "blocked" and self.t == 5:
            for seen in obs.values():
                seen["action_mask"][:] = 0
        return obs, rewards, terminateds, truncateds, infos


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stranger", "agent 'x', step 5: it has an observation and is none of possible_agents: a, b, c, d"),
        ("later", "agent 'x', step 0: it has an observation and is none of possible_agents: a, b, c, d"),
        ("paid", "agent 'x', step 5: it gets a reward and is none of possible_agents: a, b, c, d"),
        ("dead", r"agent '[abcd]', step \d+: it gets the reward 1.0, and has ended before"),
        ("nan", "agent 'a', step 5: its reward is nan"),
        ("blind", r"environment \d, episode \d+, step 5: agent '[abcd]': observation\['obs'\]\[1\] is nan"),
        ("blocked", r"environment \d, episode \d+, step 5: agent '[abcd]': action_mask forbids every choice"),
        ("names", "need the same possible_agents, number 0 has a, b, c, d, number 1 has a, b, c, e"),
    ],
)
def test_a_game_that_breaks_the_contract(what, said):
    refused(said, EnvError, Wrong, gathers=40, env_config={"what": what})
