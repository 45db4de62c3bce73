"""Ape-X: exploration spread over environments, and priorities that transitions bring with them."""

import numpy as np
import pytest
import torch

import bray
from bray.act import SAMPLE, Clock, Tick
from bray.act.epsilon_greedy import epsilon_greedy
from bray.algos import get_algo
from bray.data.piece import Piece
from bray.data.ring import ReplayRing
from bray.errors import ConfigError, DataError
from bray.spec import EnvSpec, Space
from bray.train.sampler import RowsOfAll

SPEC = EnvSpec("test", Space("box", (2,)), Space("discrete", n=(2,), start=(0,)))


class Always:
    """In place of a random generator: one number, always."""

    def __init__(self, u):
        self.u = u

    def random(self, size):
        return np.full(size, self.u)


def explorers(policy, rows, u):
    """Environments that do not take the best action where a draw is u, whichever of the two is the best."""
    found = set()
    for best in (0, 1):
        q = np.tile(np.eye(2, dtype=np.float32)[best], (rows, 1))
        action, _ = policy.act({"q": q}, Tick(np.zeros((rows, 2), np.float32)), Always(u), SAMPLE, Clock())
        found |= set(np.flatnonzero(action != best).tolist())
    return sorted(found)


def make_policy(name="Ape-X", **settings):
    algo = get_algo(name)
    return algo.Policy(algo.Config(**settings), SPEC)


def test_each_environment_of_all_workers_explores_with_an_epsilon_of_its_own():
    # 0.4 ** (1 + 7 i / 3), worked out by hand: 0.4, 0.0472, 0.00556, 0.000655
    alone = make_policy()
    alone.seat(0, 4, 4)
    for u, expected in ((0.39, [0]), (0.0473, [0]), (0.0471, [0, 1]), (0.0055, [0, 1, 2]), (0.0006, [0, 1, 2, 3])):
        assert explorers(alone, 4, u) == expected
    first, second = make_policy(), make_policy()  # the same four, two in each of two workers
    first.seat(0, 2, 4)
    second.seat(2, 2, 4)
    assert (explorers(first, 2, 0.0055), explorers(second, 2, 0.0055)) == ([0, 1], [0])


def test_games_without_a_number_explore_as_the_middle_one():
    policy = make_policy()  # 0.4 ** 4.5 = 0.0162
    assert explorers(policy, 3, 0.0163) == []
    assert explorers(policy, 3, 0.0161) == [0, 1, 2]
    assert policy.numbers(Clock()) == pytest.approx(
        {"epsilon": 0.01619, "epsilon_max": 0.4, "epsilon_min": 0.00065536}, rel=1e-3
    )
    assert policy.rule.trained() == pytest.approx({"epsilon": 0.01619}, rel=1e-3)  # --act sample, in a service too
    single = make_policy()
    single.seat(0, 1, 1)
    assert explorers(single, 1, 0.0161) == [0]
    assert make_policy("DQN", epsilon=0.3).numbers(Clock()) == {"epsilon": 0.3}


def test_workers_explore_as_one_process_with_all_environments_does():
    q, one = np.tile(np.float32([0.0, 1.0, 0.5]), (4, 1)), np.random.default_rng([7, 0])
    workers = [RowsOfAll(7, range(2 * w, 2 * w + 2), 4) for w in range(2)]
    for _ in range(200):  # rarely somebody of one worker alone explores
        together = np.concatenate([epsilon_greedy(q[:2], 0.1, rng) for rng in workers])
        assert together.tolist() == epsilon_greedy(q, 0.1, one).tolist()


def random_piece(rng, rows=16, envs=3, choices=4):
    """Episodes that end in all ways, each with its dead row, and choices that are not legal."""
    ends = rng.random((rows, envs)) < 0.2
    valid = np.ones((rows, envs), bool)
    for t in range(1, rows):
        valid[t] = ~(ends[t - 1] & valid[t - 1])
    ends &= valid
    terminated = ends & (rng.random((rows, envs)) < 0.5)
    return Piece(
        obs={"x": rng.standard_normal((rows + 1, envs, 2), np.float32),
             "action_mask": legal(rng, rows + 1, envs, choices)},
        action=rng.integers(0, choices, (rows, envs)),
        reward=np.where(valid, rng.standard_normal((rows, envs), np.float32), np.float32(0.0)),
        terminated=terminated,
        truncated=ends & ~terminated,
        valid=valid,
        first=np.concatenate([np.ones((1, envs), bool), ~valid]),
        outputs={"q": rng.standard_normal((rows + 1, envs, choices), np.float32)},
    )  # fmt: skip


def legal(rng, rows, envs, choices):
    mask = rng.random((rows, envs, choices)) < 0.6
    mask[..., 0] = True
    mask[rng.random((rows, envs)) < 0.2] = False  # as behind the end of an episode: then all count
    return mask.astype(np.int8)


def errors_by_a_loop(piece, n, gamma):
    """Row by row, in float64."""
    q, mask = np.float64(piece.outputs["q"]), piece.obs["action_mask"]
    errors = np.zeros(piece.reward.shape)
    for b in range(piece.num_envs):
        for t in range(piece.length):
            if not piece.valid[t, b]:
                continue
            total, at, ended = 0.0, t, False
            while at < min(t + n, piece.length) and piece.valid[at, b] and not ended:
                total += gamma ** (at - t) * float(piece.reward[at, b])
                ended = piece.terminated[at, b] or piece.truncated[at, b]
                at += 1
            best = max(q[at, b, a] for a in range(q.shape[-1]) if mask[at, b, a] or not mask[at, b].any())
            future = 0.0 if piece.terminated[at - 1, b] else gamma ** (at - t) * best
            errors[t, b] = total + future - q[t, b, piece.action[t, b]]
    return errors


@pytest.mark.parametrize("n", [1, 3, 40])
def test_the_priority_of_a_row_is_its_own_td_error(n):
    spaces = Space(
        "dict", parts=(Space("box", (2,), "float32"), Space("multi_binary", (4,), "int8")), names=("x", "action_mask")
    )
    algo, piece = get_algo("Ape-X"), random_piece(np.random.default_rng(n))
    policy = algo.Policy(
        algo.Config(n_step=n, gamma=0.9), EnvSpec("test", spaces, Space("discrete", n=(4,), start=(0,)))
    )
    assert policy.keeps == ("q",)
    labelled = policy.label(piece)
    np.testing.assert_allclose(labelled.extras["priority"], errors_by_a_loop(piece, n, 0.9), rtol=1e-5, atol=1e-5)
    assert labelled.outputs == {}  # not sent on


def row(value, **more):
    one = np.ones(1, bool)
    return {
        "obs": np.float32([value]),
        "action": np.int64([0]),
        "reward": np.float32([0]),
        "terminated": ~one,
        "truncated": ~one,
        "valid": one,
        **more,
    }


def test_a_row_enters_the_replay_with_the_priority_that_it_brings(tmp_path):
    options = {"prioritized": True, "alpha": 0.5, "eps": 0.0}
    example = {"obs": np.float32(0), "action": np.int64(0)}
    ring = ReplayRing(6, 1, example, **options)
    for error in (4.0, -9.0, 1.0):
        ring.add(**row(0.0, priority=np.array([error])))
    assert ring.get_state()["priority"].tolist() == [2.0, 3.0, 0.0]  # the newest one has no successor yet
    state = ring.save(tmp_path)
    again = ReplayRing(6, 1, example, **options)
    again.load(tmp_path, state)
    for replay in (ring, again):
        replay.add(**row(0.0))  # this one brings none: it gets the largest so far
        replay.add(**row(0.0))
        assert replay.get_state()["priority"].tolist() == [2.0, 3.0, 1.0, 3.0, 0.0]
    with pytest.raises(DataError, match="1 finite numbers"):
        ring.add(**row(0.0, priority=np.array([np.nan])))
    uniform = ReplayRing(6, 1, example)
    uniform.add(**row(0.0, priority=np.array([1.0])))


def test_rows_of_old_weights_are_stale_from_the_start():
    ring = ReplayRing(8, 1, {"obs": np.float32(0), "action": np.int64(0)}, max_staleness=3)
    ring.advance(5)
    for version in (1, 2, 3, 4, 5):
        ring.add(**row(float(version), version=version))
    assert ring.newest(8)["obs"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [ring.take(np.array([i]))["obs"].item() for i in ring.ids()] == [3.0, 4.0]  # 5 - 3 = 2 is too old


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_priorities_of_a_run_are_those_of_the_weights_that_acted(workers):
    exp = bray.Experiment(
        run="Ape-X", env="CartPole-v1", use_preset=False, num_workers=workers, num_envs=4 // (workers or 1),
        vector="inprocess",
        learning_starts=10_000, replay_size=1000, fcnet_hiddens=[16], n_step=3, iteration_steps=160, priority_alpha=1.0,
    )  # fmt: skip
    exp.training.iterate()
    state = exp.training.experience.ring.get_state()
    rows, priority = state["rows"], state["priority"].reshape(-1, 4)
    shape = priority.shape
    q = exp.training.model(torch.from_numpy(rows["obs"]))["q"].detach().numpy().reshape(*shape, 2)
    action, flags = rows["action"].reshape(shape), rows["flags"].reshape(shape)
    terminated, truncated, valid = ((flags & bit) != 0 for bit in (1, 2, 4))
    reward = rows["reward"].reshape(shape)
    checked = 0
    for t in range(shape[0] - 1):
        for b in range(4):
            if not valid[t, b]:
                assert priority[t, b] == 0.0
                continue
            end, total, at, ended = (t // 16 + 1) * 16, 0.0, t, False  # sums end with the piece
            while at < min(t + 3, end) and valid[at, b] and not ended:
                total += 0.99 ** (at - t) * float(reward[at, b])
                ended = terminated[at, b] or truncated[at, b]
                at += 1
            if at >= shape[0]:
                continue
            future = 0.0 if terminated[at - 1, b] else 0.99 ** (at - t) * q[at, b].max()
            assert priority[t, b] == pytest.approx(abs(total + future - q[t, b, action[t, b]]) + 1e-5, abs=1e-4)
            checked += 1
    assert checked > 100
    exp.close()


@pytest.mark.parametrize("name", ["C51", "QR-DQN", "IQN", "Rainbow", "R2D2"])
def test_priorities_of_another_kind_do_not_begin_with_td_errors(name):
    with pytest.raises(ConfigError, match="initial_priority=td_error is for priorities that are TD errors"):
        get_algo(name).Config(initial_priority="td_error")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["R2D2", "SAC"])
def test_r2d2_and_sac_train_with_workers(run):
    env = "Pendulum-v1" if run == "SAC" else "CartPole-v1"
    more = {"max_staleness": 100} if run == "SAC" else {"epsilon": 0.4, "epsilon_spread": 7.0}
    exp = bray.Experiment(
        run=run, env=env, use_preset=False, num_workers=2, num_envs=2, vector="inprocess", learning_starts=200,
        train_every=16, **more
    )  # fmt: skip
    rows = [exp.training.iterate() for _ in range(3)]
    assert rows[-1]["learner_steps_total"] > 20
    assert rows[-1]["workers/policy_lag"] > 0
    if run == "SAC":
        assert rows[-1]["replay/staleness_max"] < 100
    else:
        assert len(np.unique(exp.training.experience.ring.get_state()["priority"])) > 10
        assert rows[-1]["policy/epsilon_min"] == pytest.approx(0.4**8)
    exp.close()
