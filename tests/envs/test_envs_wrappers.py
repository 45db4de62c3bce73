"""Wrappers and reward transforms against numbers worked out by hand on the scripted environment (reward 1, 2, 3,
...)."""

from __future__ import annotations

import envs_for_tests as e
import gymnasium as gym
import numpy as np
import pytest

from bray.envs import EnvConfig, RewardTransform, make_env, make_vec
from bray.envs.rewards import Moments
from bray.envs.wrappers import WRAPPERS, apply
from bray.errors import CheckpointError, ConfigError, UnknownName


def run(env, actions, seed=0):
    obs, _ = env.reset(seed=seed)
    out = [(obs, None, None)]
    for a in actions:
        obs, reward, terminated, _, info = env.step(a)
        out.append((obs, reward, info))
        if terminated:
            break
    return out


def wrapped(*wrappers, env=e.Scripted, **kw):
    return make_env(EnvConfig(env, wrappers=list(wrappers), env_config=kw))


def test_action_repeat_adds_rewards_and_stops_at_the_end():
    rows = run(wrapped({"name": "action_repeat", "repeat": 2}), [1] * 5)
    assert [r[1] for r in rows[1:]] == [3, 7, 5]  # 1+2, 3+4, 5 (the episode ends at 5)
    assert [r[0][0] for r in rows] == [0, 2, 4, 5]


def test_delay_reward_pays_sums():
    rows = run(wrapped({"name": "delay_reward", "delay": 2}), [1] * 5)
    assert [r[1] for r in rows[1:]] == [0, 3, 0, 7, 5]


def test_delay_action_plays_actions_later():
    rows = run(wrapped({"name": "delay_action", "delay": 2}), [1, 2, 3, 1])
    assert [r[0][2] for r in rows[1:]] == [0, 0, 1, 2]


def test_clip_reward_is_the_sign():
    assert [r[1] for r in run(wrapped("clip_reward"), [0] * 2)[1:]] == [1.0, 1.0]


def test_eval_episode_return():
    assert run(wrapped("eval_episode_return"), [0] * 5)[-1][2]["eval_episode_return"] == 15.0


def test_obs_plus_prev_action_reward():
    env = wrapped("obs_plus_prev_action_reward")
    rows = run(env, [3, 1])
    assert [(int(r[0]["prev_action"]), float(r[0]["prev_reward"][0])) for r in rows] == [(0, 0.0), (3, 1.0), (1, 2.0)]
    assert all(env.observation_space.contains(r[0]) for r in rows)


def test_reward_in_obs():
    env = wrapped("reward_in_obs")
    rows = run(env, [0, 0])
    assert [r[0][-1] for r in rows] == [0, 1, 2]
    assert env.observation_space.shape == (4,)
    assert rows[0][0].dtype == np.float32


def test_noop_and_fire_reset():
    env = wrapped({"name": "noop_reset", "noop_max": 3}, terminate_at=None)
    steps = {env.reset(seed=s)[0][0] for s in range(30)}
    assert steps == {1.0, 2.0, 3.0}
    assert env.reset(seed=4)[0][0] == env.reset(seed=4)[0][0]
    assert wrapped({"name": "fire_reset", "fire_action": 2}).reset(seed=0)[0].tolist()[::2] == [1.0, 2.0]


def test_static_obs_norm_and_scaled_frames_and_transpose():
    env = wrapped({"name": "static_obs_norm", "mean": [1.0, 0.0, 0.0], "std": [2.0, 1.0, 1.0]})
    assert run(env, [0])[1][0][0] == 0.0
    picture = gym.spaces.Box(0, 255, (2, 3, 1), np.uint8)

    class Pictures(e.Scripted):
        def __init__(self):
            super().__init__()
            self.observation_space = picture

        def _obs(self, action=0):
            return np.arange(6, dtype=np.uint8).reshape(2, 3, 1) * 51

    env = wrapped("scaled_float_frame", "obs_transpose", env=Pictures)
    obs, _ = env.reset()
    assert env.observation_space.shape == obs.shape == (1, 2, 3)
    assert obs.dtype == np.float32
    np.testing.assert_allclose(obs[0], [[0, 0.2, 0.4], [0.6, 0.8, 1.0]], rtol=1e-6)


def pictures(frame):
    """An environment whose observation is this picture."""

    class Pictures(e.Scripted):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(0, 255, frame.shape, frame.dtype)

        def _obs(self, action=0):
            return frame

    return Pictures


def test_warp_frame_is_gray_and_averages_areas():
    frame = np.zeros((4, 2, 3), np.uint8)
    frame[:2, :, 0], frame[2:, 0] = 200, 100  # red above: 0.299 * 200 = 59.8; gray 100 below on the left
    env = wrapped({"name": "warp_frame", "size": 2}, env=pictures(frame))
    obs, _ = env.reset(seed=0)
    assert obs.tolist() == [[60, 60], [100, 0]]
    assert obs.dtype == np.uint8
    assert env.observation_space == gym.spaces.Box(0, 255, (2, 2), np.uint8)
    assert wrapped({"name": "warp_frame", "size": 1}, env=pictures(frame)).reset(seed=0)[0].tolist() == [
        [55]
    ]  # of 59.8, 50
    with pytest.raises(ConfigError, match=r"warp_frame needs colour pictures uint8 \[H, W, 3\]"):
        wrapped("warp_frame")


def test_ram_is_float32_with_two_more_axes():
    env = wrapped("ram", env=pictures(np.array([0, 7, 255], np.uint8)))
    obs, _ = env.reset(seed=0)
    assert (obs.dtype, obs.tolist()) == (np.float32, [[[0.0]], [[7.0]], [[255.0]]])
    assert env.observation_space.contains(obs)


def test_episodic_life_ends_for_the_learner_only():
    env = wrapped("episodic_life", env=e.Lives)
    env.reset(seed=0)
    rows = [env.step(0) for _ in range(5)]
    assert [r[2] for r in rows] == [False, True, False, True, True]
    assert [bool(r[4].get("life_lost")) for r in rows] == [False, True, False, True, False]
    v = make_vec(EnvConfig(e.Lives, wrappers=["episodic_life"]), seed=0)
    v.reset()
    assert [(v.step([0])[0][0, 0], v.dead[0]) for _ in range(5)] == [(t, t == 5) for t in range(1, 6)]  # one game


class WithoutInfo(e.Scripted):
    def step(self, action):
        return *super().step(action)[:4], None


@pytest.mark.parametrize(("env", "got"), [(WithoutInfo, "info=None"), (e.Scripted, "info={")])
def test_episodic_life_says_what_it_needs(env, got):
    env = wrapped("episodic_life", env=env)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=rf'episodic_life needs info\["lives"\], .*{got}'):
        env.step(0)


def test_an_environment_without_info_has_a_return():
    rows = run(wrapped("eval_episode_return", env=WithoutInfo), [0] * 5)
    assert [r[2] for r in rows[1:]] == [None] * 4 + [{"eval_episode_return": 15.0}]


def test_max_and_skip_and_frame_stack():
    env = wrapped({"name": "max_and_skip", "skip": 3}, terminate_at=None)
    assert [(r[0][0], r[0][2], r[1]) for r in run(env, [2, 1])[1:]] == [
        (3, 2, 6),
        (6, 1, 15),
    ]  # steps 2, 3; 1+2+3, 4+5+6
    env = wrapped({"name": "frame_stack", "n": 2})
    assert [r[0][:, 0].tolist() for r in run(env, [0, 0])] == [[0, 0], [0, 1], [1, 2]]


def test_running_norms_equal_the_formulas():
    """Both start with a count of 1e-4, mean 0 and variance 1."""
    rows = run(wrapped("obs_norm", terminate_at=None), [0, 0])
    assert [float(r[0][0]) for r in rows] == pytest.approx(_normed([0.0, 1.0, 2.0]), abs=1e-5)
    got = [r[1] for r in run(wrapped("reward_norm", terminate_at=None), [0, 0, 0])[1:]]
    returns, g = [], 0.0
    for r in (1.0, 2.0, 3.0):
        g = g * 0.99 + r
        returns.append(g)
    assert got == pytest.approx([r / np.sqrt(v + 1e-8) for r, (_, v) in zip((1, 2, 3), _moments(returns), strict=True)])


def _moments(values):
    """(mean, variance) after each value, as one weighted average with the start."""
    for n in range(1, len(values) + 1):
        x, w = np.array([0.0, *values[:n]]), np.array([1e-4, *[1.0] * n])
        mean = (w * x).sum() / w.sum()
        yield mean, ((w * (x - mean) ** 2).sum() + 1e-4 * 1.0) / w.sum()


def _normed(values):
    return [(x - m) / np.sqrt(v + 1e-8) for x, (m, v) in zip(values, _moments(values), strict=True)]


def test_all_named_wrappers_are_there():
    """Those of DI-engine's registry; their values are checked above."""
    names = (
        "noop_reset max_and_skip warp_frame scaled_float_frame clip_reward action_repeat delay_reward "
        "eval_episode_return frame_stack obs_transpose obs_norm static_obs_norm reward_norm ram episodic_life "
        "fire_reset gym_hybrid_dict_action obs_plus_prev_action_reward reward_in_obs time_limit flatten"
    )
    assert set(names.split()) <= set(WRAPPERS)


def test_wrappers_take_rewards_that_are_arrays_of_one_number():
    for name in ("action_repeat", "delay_reward", "eval_episode_return", "clip_reward", "reward_in_obs"):
        _, reward, *_ = run(wrapped(name, env=e.DoubleObs), [0, 0])[-1]
        assert np.size(reward) == 1
    assert run(wrapped("eval_episode_return", env=e.DoubleObs), [0] * 5)[-1][2]["eval_episode_return"] == 15.0


def test_hybrid_dict_action():
    class Hybrid(e.Scripted):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Tuple([gym.spaces.Discrete(4), gym.spaces.Box(-1.0, 1.0, (1,), np.float32)])

        def step(self, action):
            kind, argument = action
            obs, *rest = super().step(kind)
            obs[1] = argument[0]
            return obs, *rest

    env = wrapped("gym_hybrid_dict_action", env=Hybrid)
    obs = run(env, [{"action_type": 3, "action_args": np.array([0.5], np.float32)}])[1][0]
    assert obs.tolist() == [1, 0.5, 3]


def test_gymnasium_wrappers_and_users_own_by_name():
    env = wrapped({"name": "envs_for_tests:AddOne", "amount": 5.0}, e.AddOne, "frame_stack", "RecordEpisodeStatistics")
    rows = run(env, [0])
    assert rows[1][0][:, 0].tolist() == [6, 6, 6, 7]
    with pytest.raises(
        UnknownName, match=r"unknown wrapper 'action_repaet' \(env\.wrappers\)\. Did you mean 'action_repeat'"
    ):
        wrapped("action_repaet")
    with pytest.raises(ConfigError, match="action_repeat does not take"):
        wrapped({"name": "action_repeat", "times": 2})
    with pytest.raises(ConfigError, match="key 'name'"):
        wrapped({"repeat": 2})
    with pytest.raises(ConfigError, match="repeat must be 1 or more, got 0"):
        apply({"name": "action_repeat", "repeat": 0}, e.Scripted())


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "expected"),
    [(None, [-3, 0, 0.5, 9]), (True, [-1, 0, 1, 1]), (2.0, [-2, 0, 0.5, 2]), ([-1, 5], [-1, 0, 0.5, 5])],
)
def test_clipping(clip, expected):
    raw = np.array([-3, 0, 0.5, 9], np.float32)
    transform = RewardTransform(EnvConfig("x", clip_rewards=clip), 4, 0.99)
    assert transform(raw, np.zeros(4, bool)).tolist() == expected
    assert raw.tolist() == [-3, 0, 0.5, 9]
    assert transform.active == (clip is not None)


def test_clip_must_make_sense():
    for clip in (-1.0, [3, 1], [1]):
        with pytest.raises(ConfigError, match="clip_rewards"):
            RewardTransform(EnvConfig("x", clip_rewards=clip), 1, 0.99)


def test_normalisation_divides_by_the_deviation_of_the_discounted_return():
    """One environment, gamma 0.5, rewards 1 2 | (dead) | 4: returns 1, 2.5, then 4 again from zero."""
    t = RewardTransform(EnvConfig("x", normalize_rewards=True), 1, 0.5, epsilon=0.0)
    no, yes = np.array([False]), np.array([True])
    assert t(np.array([1.0]), no)[0] == 1.0  # one number has no deviation
    assert t(np.array([2.0]), yes)[0] == pytest.approx(2 / np.std([1, 2.5]))
    t(np.array([0.0]), no)  # the dead row
    assert t.seen.count == 2
    assert t(np.array([4.0]), no)[0] == pytest.approx(4 / np.std([1, 2.5, 4.0]))


def test_rewards_that_are_all_equal_have_no_deviation():
    t = RewardTransform(EnvConfig("x", normalize_rewards=True), 3, 0.99)
    assert t(np.full(3, 0.1), np.zeros(3, bool)).tolist() == pytest.approx([0.1] * 3)
    assert (t(np.full(3, 0.1), np.zeros(3, bool)) > 0.1).all()


def test_normalisation_equals_numpy_over_many_environments_and_resumes():
    rng = np.random.default_rng(0)
    rewards, ended = rng.normal(size=(50, 3)), rng.random((50, 3)) < 0.1
    t = RewardTransform(EnvConfig("x", normalize_rewards=True), 3, 0.9)
    seen, r, dead = [], np.zeros(3), np.zeros(3, bool)
    for x, end in zip(rewards, ended, strict=True):
        end = end & ~dead
        x = np.where(dead, 0.0, x)
        out = t(x, end)
        r = r * 0.9 + x
        seen += r[~dead].tolist()
        r, dead = np.where(end, 0.0, r), end
    assert t.std == pytest.approx(np.sqrt(np.var(seen) + 1e-8), rel=1e-9)
    assert out.dtype == np.float32
    other = RewardTransform(EnvConfig("x", normalize_rewards=True), 3, 0.9)
    other.set_state(t.get_state())
    x = rng.normal(size=3)
    assert (other(x, ended[0]) == t(x, ended[0])).all()
    with pytest.raises(CheckpointError, match="no finite numbers"):
        other.set_state(t.get_state() | {"returns": np.array([0.0, np.nan, 0.0])})
    with pytest.raises(CheckpointError, match="of 3 environments, there are 2: resume with the same num_envs"):
        RewardTransform(EnvConfig("x"), 2, 0.9).set_state(t.get_state())


def test_what_two_have_seen_is_what_one_would_have_seen():
    rng = np.random.default_rng(1)
    config = EnvConfig("x", normalize_rewards=True)
    whole, parts = RewardTransform(config, 5, 0.9), [RewardTransform(config, n, 0.9) for n in (2, 3)]
    for _ in range(3):
        for _ in range(7):
            x, end = rng.normal(3.0, 2.0, 5), rng.random(5) < 0.2
            whole(x, end)
            for part, mine in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
                part(x[mine], end[mine])
        told = Moments.of_all([parts[0].seen, parts[1].take_news()])
        parts[0].take_news()
        for part in parts:
            part.learn(told)
            assert part.seen.numbers == pytest.approx(whole.seen.numbers, rel=1e-12)
    parts[0].learn(Moments(1.0, 0.0, 0.0))  # that is old
    assert parts[0].std == pytest.approx(whole.std, rel=1e-12)


@pytest.mark.parametrize(
    "numbers",
    [[1.0, 2.0], [-1, 0, 0], [1, float("nan"), 0], [1, 0, "x"], [None, 0, 0], [0, 1, 1], [2, 1e200, 0], [2, 0, 1e200]],
)
def test_moments_of_a_checkpoint_that_are_none_are_refused(numbers):
    with pytest.raises(CheckpointError, match="count, mean and squares"):
        Moments.saved(numbers)
