"""`env.wait_num`: a slow environment does not hold up the others, and every transition is still a true one."""

from __future__ import annotations

import logging
import time

import envs_for_tests as e
import numpy as np
import pytest
import torch

from bray import distributions, tree
from bray.data.ring import ReplayRing
from bray.envs import EnvConfig, episode_seed, make_vec
from bray.envs.rewards import RewardTransform
from bray.errors import ConfigError, EnvError
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.train.evaluate import eval_config

PACES = [{"terminate_at": 7}, {"terminate_at": None, "truncate_at": 4}, {"seconds": 0.003}, {"seconds": 0.01}]
PACES[2] |= {"slow_reset": True, "terminate_at": 3}


def vec(env=e.Sleepy, n=4, wait_num=3, seed=7, **kw):
    return make_vec(EnvConfig(env, num_envs=n, vector="subprocess", wait_num=wait_num, **kw), seed=seed)


def until(v, happens, action=1, seconds=30.0):
    """Step until it happens: the last result and the number of steps."""
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        result, steps = v.step([action] * v.num_envs), steps + 1
        if happens(result):
            return result, steps
    raise AssertionError("it did not happen in time")


# --- the environments -------------------------------------------------------------------------------------------------


def test_a_slow_environment_does_not_hold_up_the_others():
    with vec(per_env=[{}, {}, {}, {"seconds": 0.2}], env_config={"terminate_at": None}) as v:
        assert len(v.process_ids) == 4  # one each, so that none sits behind another
        v.reset()
        came = np.zeros(4, int)
        for _ in range(300):
            v.step([1] * 4)
            came += ~v.waiting
            assert v.waiting.sum() <= 1
    assert (came[:3] >= 300 - came[3]).all()  # where the slow one was among the three, another may have been the fourth
    assert came[3] < 50


def test_what_a_row_holds_while_it_waits(tmp_path):
    gate = tmp_path / "gate"
    with vec(e.Gated, n=2, wait_num=1, per_env=[{}, {"gate": str(gate)}], env_config={"terminate_at": 900}) as v:
        first = v.reset()
        assert not v.waiting.any()
        obs, reward, terminated, truncated, _ = v.step([3, 3])
        assert v.waiting.tolist() == [False, True]
        assert obs[0].tolist() == [1, episode_seed(7, 0, 0) % 1000, 3]
        assert obs[1].tolist() == first[1].tolist()
        for t in range(2, 5):
            obs, reward, terminated, truncated, _ = v.step([t % 3, t % 3])  # ignored by the second
            assert v.waiting.tolist() == [False, True]
            assert reward.tolist() == [t, 0.0]
            assert obs[1].tolist() == first[1].tolist()
            assert not (terminated | truncated | v.dead).any()
        gate.touch()
        (obs, reward, *_), _ = until(v, lambda _: not v.waiting[1], action=0)
        assert obs[1].tolist() == [1, episode_seed(7, 1, 0) % 1000, 3]  # the action of the first step was taken
        assert reward[1] == 1.0
        kept = obs.copy()
        (later, *_), _ = until(v, lambda _: not v.waiting[1], action=2)
        assert later[1].tolist() == [2, episode_seed(7, 1, 0) % 1000, 2]
        assert (kept == obs).all()  # what was returned is never written again


def test_others_are_waited_for_a_little_where_that_is_asked():
    paces = [{}, {"seconds": 0.05}]
    with vec(n=2, wait_num=1, step_wait_timeout=20.0, per_env=paces, env_config={"terminate_at": None}) as v:
        v.reset()
        for _ in range(5):
            v.step([0, 0])
            assert not v.waiting.any()


def test_environments_of_one_process_are_ready_together(tmp_path):
    gate = tmp_path / "gate"
    per_env = [{}, {}, {"gate": str(gate)}, {}]
    with vec(e.Gated, wait_num=2, num_processes=2, per_env=per_env) as v:
        v.reset()
        v.step([0] * 4)
        assert v.waiting.tolist() == [False, False, True, True]


def test_waiting_for_all_gives_the_trajectories_of_the_plain_form():
    acts = np.random.default_rng(0).integers(0, 2, (120, 3))
    rows = []
    for kw in ({}, {"wait_num": 3, "num_processes": 2}):
        with make_vec(EnvConfig("CartPole-v1", num_envs=3, vector="subprocess", **kw), seed=11) as v:
            assert not v.waiting.any()
            rows.append([v.reset()] + [[*v.step(a)[:4], v.dead] for a in acts])
            assert not v.waiting.any()
    assert all(tree.equal(a, b) for a, b in zip(*rows, strict=True))
    assert sum(r[2].sum() for r in rows[0][1:]) > 5


def test_reset_and_render_while_a_step_is_under_way(tmp_path):
    gate = tmp_path / "gate"
    per_env = [{"gate": str(gate)}, {}]
    config = EnvConfig(e.Gated, num_envs=2, vector="subprocess", wait_num=1, per_env=per_env)
    with make_vec(config, seed=7, render_mode="rgb_array") as v:
        v.reset()
        v.step([3, 0])
        assert v.waiting.tolist() == [True, False]
        gate.touch()
        assert (v.render() == 1).all()  # after the step, which was waited for
        obs, reward, *_ = v.step([0, 0])
        assert obs[0].tolist() == [1, episode_seed(7, 0, 0) % 1000, 3]  # and is returned now
        assert reward[0] == 1.0
        gate.unlink()
        v.step([2, 0])
        assert v.waiting.tolist() == [True, False]
        gate.touch()
        assert v.reset()[:, :2].tolist() == [[0, episode_seed(7, i, 1) % 1000] for i in range(2)]
        gate.unlink()
        v.step([1, 0])
        gate.touch()
        (obs, *_), _ = until(v, lambda _: not v.waiting[0])
        assert obs[0].tolist() == [1, episode_seed(7, 0, 1) % 1000, 1]


@pytest.mark.parametrize(
    ("fault", "timeout", "says"),
    [
        ("raise", None, "scripted failure"),
        ("die", None, "exit code 7"),
        ("hang", 0.5, "did not answer within 0.5 s"),
    ],
)
def test_an_environment_that_fails_behind_the_others_is_restarted_up_to_the_limit(fault, timeout, says, caplog):
    slow = {"seconds": 0.1, "fault": fault, "terminate_at": None}
    with vec(n=2, wait_num=1, per_env=[{"terminate_at": 900}, slow], max_restarts=1, step_timeout=timeout) as v:
        v.reset()
        until(v, lambda r: r[0][1, 0] == 2)
        with caplog.at_level(logging.WARNING):
            (obs, reward, _, truncated, _), steps = until(v, lambda _: v.restarts == 1)
        assert says in caplog.text
        assert steps > 5  # the other one went on meanwhile
        assert not v.waiting[1]
        assert (obs[1, 0], reward[1], bool(truncated[1]), bool(v.dead[1])) == (2.0, 0.0, True, True)
        (obs, _, _, truncated, _), _ = until(v, lambda _: not v.dead[1])
        assert obs[1].tolist() == [0, episode_seed(7, 1, 1) % 1000, 0]
        assert not truncated[1]
        with pytest.raises(EnvError, match="max_restarts=1"):
            until(v, lambda _: False)


def test_a_value_outside_its_space_is_told_when_it_comes():
    per_env = [{"terminate_at": 900}, {"seconds": 0.02, "fault": "outside"}]
    with vec(n=2, wait_num=1, per_env=per_env) as v:
        v.reset()
        with pytest.raises(EnvError, match=r"environment 1, episode 0, step 3: observation\[2\] is 2000"):
            until(v, lambda _: False)


# --- what is learned from ---------------------------------------------------------------------------------------------


def experiment(algo, path=None, **config):
    env = {"vector": "subprocess", "num_envs": 4, "wait_num": 2, "per_env": PACES, "fcnet_hiddens": [8]}
    return Experiment(algo, e.Sleepy, use_preset=False, path=path, config={**env, **config})


def check_transition(obs, action, reward, next_obs, terminated, truncated, b):
    assert next_obs[0] == obs[0] + 1  # the next step
    assert next_obs[1] == obs[1]  # of the same episode
    assert next_obs[2] == action  # and this action made it
    assert reward == next_obs[0]
    end = {"terminate_at": 5, "truncate_at": None} | PACES[b]
    assert terminated == (next_obs[0] == end["terminate_at"])
    assert truncated == (next_obs[0] == end["truncate_at"])


def test_every_row_of_a_rollout_is_a_true_transition_or_not_valid():
    """Over two rollouts, an action under way from one to the next, and many episode ends."""
    exp = experiment("PPO", normalize_rewards=False)
    training = exp.training
    (source,) = training.sources
    parts, episodes = [], []
    for source.rows in (250, 150):
        (piece,), counts = source.gather()
        parts.append(piece)
        episodes += counts.episodes
    obs = np.concatenate([parts[0].obs[:-1], parts[1].obs])
    assert (parts[0].obs[-1] == parts[1].obs[0]).all()
    names = ("action", "reward", "terminated", "truncated", "valid")
    action, reward, terminated, truncated, valid = (np.concatenate([getattr(p, k) for p in parts]) for k in names)
    waited = ends = 0
    for b in range(4):
        episode, dead = 0, False
        for t in range(400):
            row = (obs[t, b], action[t, b], reward[t, b], obs[t + 1, b], terminated[t, b], truncated[t, b])
            assert obs[t, b, 1] == episode_seed(0, b, episode) % 1000
            if valid[t, b]:
                assert not dead
                check_transition(*row, b)
                dead = bool(terminated[t, b] or truncated[t, b])
                ends += dead
                continue
            assert reward[t, b] == 0
            assert not terminated[t, b]
            assert not truncated[t, b]
            if (obs[t + 1, b] == obs[t, b]).all():
                waited += 1
                if t < 399 and not dead:  # the action that is under way is written down until it has been taken
                    assert action[t + 1, b] == action[t, b]
            else:
                assert dead
                episode, dead = episode + 1, False
                assert obs[t + 1, b].tolist() == [0, episode_seed(0, b, episode) % 1000, 0]
    assert waited > 100
    assert ends > 40
    assert 0 < valid.sum(0)[3] < 0.7 * valid.sum(0)[0]  # the slow one took fewer
    # the log-probability is that of the action that was taken, where it was chosen
    logp = np.concatenate([p.extras["logp"] for p in parts])
    with torch.no_grad():
        dist = training.model(torch.from_numpy(obs[:-1].reshape(-1, 3)))["dist"]
        expected = distributions.log_prob_entropy(training.spec.layout, dist, torch.from_numpy(action.reshape(-1)))[0]
    np.testing.assert_allclose(logp.reshape(-1), expected.numpy(), rtol=1e-4, atol=1e-5)
    # steps and episodes are counted once
    rollout = training.rollout
    assert rollout.env_steps == valid.sum()
    assert len(episodes) == ends
    seen = {(n, r) for r, n in episodes}
    assert {(7, 28), (4, 10)} <= seen <= {(7, 28), (4, 10), (3, 6), (5, 15)}
    exp.close()


@pytest.mark.parametrize(
    "options", [{}, {"frame_stack": 2}, {"prioritized": True}], ids=["plain", "frames", "prioritized"]
)
def test_dqn_draws_true_transitions_only(options):
    exp = experiment("DQN", learning_starts=300, train_every=8, replay_size=4000, epsilon=1.0, **options)
    training = exp.training
    row = training.iterate()
    assert row["learner_steps_total"] > 50
    assert np.isfinite(row["loss/loss"])
    replay = training.experience.ring
    ids = replay.ids()
    assert row["env_steps_total"] - 4 <= len(ids) == len(replay) <= row["env_steps_total"]
    assert (ids % 4 == 3).sum() < 0.7 * (ids % 4 == 0).sum()  # there were rows that waited
    batch = replay.take(ids)
    drawn = replay.sample(2000, np.random.default_rng(0))
    assert np.isin(drawn["id"], ids).all()
    for rows in (batch, drawn):
        obs, next_obs = rows["obs"], rows["next_obs"]
        if "frame_stack" in options:
            assert (next_obs[:, 0] == obs[:, 1]).all()  # the newest of this stack is the one before in the next
            obs, next_obs = obs[:, -1], next_obs[:, -1]
        for i, b in enumerate(rows["id"] % 4):
            terminated = rows["discount"][i] == 0.0
            truncated = b == 1 and next_obs[i, 0] == 4
            check_transition(obs[i], rows["action"][i], rows["reward"][i], next_obs[i], terminated, truncated, b)
    exp.close()


@pytest.mark.parametrize("algo", ["PPO", "A2C"])
def test_on_policy_algorithms_learn_with_it(algo):
    """A choice whose reward comes at once: as good as without waiting."""
    config = {"per_env": [{}, {}, {}, {"seconds": 0.01}], "rollout_length": 64, "lr": 0.01}
    config |= {"epochs": 4, "minibatches": 4} if algo == "PPO" else {}
    exp = Experiment(
        algo,
        e.Choice,
        use_preset=False,
        config={**config, "vector": "subprocess", "num_envs": 4, "wait_num": 3, "fcnet_hiddens": [16]},
    )
    rows = [exp.training.iterate() for _ in range(40)]
    assert rows[0]["episode_return_mean"] < 7
    assert exp.evaluate(4)["eval/return_mean"] >= 9.0
    assert all(np.isfinite(v) for k, v in rows[-1].items() if k.startswith("loss/"))
    exp.close()


def test_rows_that_wait_do_not_count_in_the_deviation_of_returns():
    config = EnvConfig("CartPole-v1", normalize_rewards=True)
    plain, waits = (RewardTransform(config, 1, gamma=0.9) for _ in range(2))
    rng = np.random.default_rng(0)
    dead = False
    for t in range(200):
        reward = np.array([0.0 if dead else rng.normal()], np.float32)
        ended = np.array([not dead and t % 9 == 8])
        for _ in range(rng.integers(0, 4)):
            waits(np.zeros(1, np.float32), np.array([dead]), np.array([False]))
        assert plain(reward, ended) == waits(reward, ended, np.array([not dead]))
        dead = bool(ended[0])
    assert plain.std == waits.std != 1.0


def test_a_run_says_that_it_is_not_exact_and_resumes_with_new_episodes(tmp_path, caplog):
    for algo, config in (
        ("PPO", {"rollout_length": 16, "minibatches": 2}),
        ("DQN", {"learning_starts": 300, "train_every": 50}),
    ):
        path = tmp_path / algo
        exp = experiment(algo, path, **config)
        with caplog.at_level(logging.WARNING):
            list(exp.train({"training_iteration": 2}))
        exp.close()
        assert "env.wait_num=2: what is learned depends on timing" in caplog.text
        checkpoint = RunDir.open(path).load_checkpoint()
        assert checkpoint.meta["exact"] is False
        episodes = [r["episode"] for r in checkpoint.state["json"]["sources"][0]["env"]["envs"]]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            resumed = Experiment.resume(path)
        assert not resumed.exact
        assert "new episodes start" in caplog.text
        training = resumed.training
        assert training.env.dead.all()
        replay = training.experience.ring if algo == "DQN" else None
        kept = replay.steps - 1 if replay else 0
        rows = list(resumed.train({"training_iteration": 3}))
        assert [r["training_iteration"] for r in rows] == [3]
        later = [r["episode"] for r in training.env.get_state()["json"]["envs"]]
        assert all(now > then for now, then in zip(later, episodes, strict=True))
        if replay:  # nothing was made of the last row before and the first one after
            batch = replay.take(replay.ids())
            assert (batch["next_obs"][:, 0] == batch["obs"][:, 0] + 1).all()
            assert (batch["id"] // 4 > kept).any()
            assert (batch["id"] // 4 < kept).any()
        resumed.close()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["auto", "native", "inprocess", "envpool"])
def test_forms_that_cannot_wait_refuse_it(form):
    with pytest.raises(ConfigError, match=rf"env.wait_num=2 is for env.vector=subprocess.*got env.vector={form}"):
        EnvConfig("CartPole-v1", num_envs=4, vector=form, wait_num=2)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"wait_num": 0}, "wait_num: expected a whole number > 0 or null, got 0"),
        ({"wait_num": 5}, "between 1 and num_envs=4, got 5"),
        ({"wait_num": 2, "step_wait_timeout": -1.0}, "step_wait_timeout: expected a number >= 0, got -1.0"),
        ({"step_wait_timeout": 1.0}, "set env.wait_num too"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        EnvConfig("CartPole-v1", num_envs=4, vector="subprocess", **config)


@pytest.mark.parametrize(
    ("algo", "config", "says"),
    [
        (
            "DQN",
            {"n_step": 3},
            "does not go with n_step=3.*takes neighbouring rows for neighbouring steps. Set n_step=1",
        ),
        ("PPO", {"use_lstm": True}, "does not go with a model with memory.*Set use_lstm=false"),
        ("DQN", {"max_use": 1, "replay_size": 128, "batch_size": 64}, "replay_size is at least 256; got 128"),
    ],
)
def test_what_reads_neighbouring_rows_is_refused(algo, config, says):
    with pytest.raises(ConfigError, match=says):
        _ = experiment(algo, **config).training


def test_evaluation_waits_for_all():
    config = EnvConfig("CartPole-v1", num_envs=4, vector="subprocess", wait_num=2, step_wait_timeout=0.1)
    judged = eval_config(config, 2)
    assert (judged.wait_num, judged.step_wait_timeout, judged.vector) == (None, 0.0, "subprocess")
    with make_vec(judged, seed=0) as v:
        assert not v.waits


def test_frame_stacks_are_rebuilt_across_rows_that_wait():
    """A stack that is repeated is no shifted one; the replay keeps it as it is."""
    replay = ReplayRing(60, 1, {"obs": np.zeros((3, 2), np.float32), "action": np.int64(0)}, frame_stack=3)
    rng = np.random.default_rng(0)
    stack, t = np.zeros((3, 2), np.float32), 0
    no = np.zeros(1, bool)
    expected = {}
    for _ in range(50):
        for _ in range(rng.integers(0, 3)):
            replay.add(stack[None], np.array([t]), np.zeros(1, np.float32), no, no, no)
        after = np.concatenate([stack[1:], rng.normal(size=(1, 2)).astype(np.float32)])
        expected[t] = (stack, after)
        replay.add(stack[None], np.array([t]), np.zeros(1, np.float32), no, no, ~no)
        stack, t = after, t + 1
    replay.add(stack[None], np.array([t]), np.zeros(1, np.float32), no, no, no)
    batch = replay.take(replay.ids())
    assert len(batch["id"]) > 20
    for obs, action, after in zip(batch["obs"], batch["action"], batch["next_obs"], strict=True):
        assert (obs == expected[int(action)][0]).all()
        assert (after == expected[int(action)][1]).all()
