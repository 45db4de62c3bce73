"""Games of several agents as rows: all that comes out of `TableSource` is what a plain collector makes of the games."""

from collections import Counter

import numpy as np
import pytest
import torch
from chaos_for_tests import AGENTS, Chaos, Collector, drawn, fixed

from bray import tree
from bray.data.piece import COLUMNS
from bray.envs.table import DEFAULT
from bray.experiment import Experiment

PLAIN = {"device": "cpu", "num_workers": 0, "inference": "worker"}  # nothing is timed before the games begin
SMALL = {"num_envs": 3, "fcnet_hiddens": [4], "use_preset": False, "save_figure": False, **PLAIN}
DQN = {"learning_starts": 32, "batch_size": 16, "replay_size": 1000}


def ppo(rows, **more):
    return {"rollout_length": rows, "minibatches": 1, "epochs": 1, **more}


def training(env=Chaos, run="PPO", **options):
    Chaos.logs.clear()
    return Experiment(env=env, run=run, **{**SMALL, **options}).training


def gathered(source, gathers):
    """So many gathers, and the pieces of all of them by side; they may be written over."""
    pieces = []
    for _ in range(gathers):
        pieces += source.gather()[0]
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
        if seat[0] in newest and side._steps == 0:
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
