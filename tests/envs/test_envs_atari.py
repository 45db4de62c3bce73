"""Atari: the Python form and ALE's C++ form show the same pictures; lives, limits and resume."""

from __future__ import annotations

import numpy as np
import pytest

from bray.envs import AtariConfig, EnvConfig, env_spec, make_env, make_vec
from bray.envs.atari import area_weights
from bray.envs.inprocess import InProcessVecEnv
from bray.envs.native import AleVecEnv
from bray.errors import ConfigError

pytest.importorskip("ale_py")

PLAIN = AtariConfig(noop_max=0, fire_reset=False, repeat_action_probability=0.0)


def test_area_weights_average_what_a_pixel_covers():
    assert area_weights(4, 2).tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]
    np.testing.assert_allclose(area_weights(3, 2), [[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]], rtol=1e-6)


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_python_and_native_form_show_the_same_game(game):
    both = [
        make_vec(EnvConfig(f"ALE/{game}-v5", num_envs=1, vector=f, atari=PLAIN), seed=0)
        for f in ("native", "inprocess")
    ]
    assert [type(v) for v in both] == [AleVecEnv, InProcessVecEnv]
    assert both[0].spec == both[1].spec
    assert both[0].spec.observation.shape == (4, 84, 84)
    first = [v.reset() for v in both]
    assert first[0].dtype == np.uint8
    assert not first[1][0, :3].any()
    rng, rewards = np.random.default_rng(0), []
    for _ in range(150):
        action = rng.integers(0, both[0].spec.num_actions, 1)
        a, b = (v.step(action) for v in both)
        assert np.abs(a[0].astype(int) - b[0].astype(int)).max() <= 1  # rounding
        assert (a[1] == b[1]).all()
        assert (a[2] == b[2]).all()
        rewards.append(a[1][0])
    assert np.abs(rewards).sum() > 0


@pytest.mark.parametrize("form", ["native", "inprocess"])
def test_a_lost_life_is_terminated_but_the_game_goes_on(form):
    atari = AtariConfig(noop_max=0, repeat_action_probability=0.0, episodic_life=True)
    v = make_vec(EnvConfig("ALE/Breakout-v5", vector=form, atari=atari), seed=0)
    v.reset()
    ends = []
    for t in range(220):
        _, _, terminated, truncated, _ = v.step(np.array([1 if t % 8 == 0 else 0]))
        if terminated[0]:
            ends.append(bool(v.dead[0]))
        assert not truncated[0]
        if v.dead[0]:
            break
    assert ends == [False] * 4 + [True]  # five lives


def test_a_game_that_waits_for_a_serve_ends_without_one_by_the_agent():
    """Idle for 400 steps: Breakout loses its five lives, and the two forms show the same."""
    seen = []
    for form in ("native", "inprocess"):
        atari = AtariConfig(noop_max=0, repeat_action_probability=0.0)
        v = make_vec(EnvConfig("ALE/Breakout-v5", vector=form, atari=atari), seed=0)
        v.reset()
        idle = iter(range(400))
        seen.append([v.step(np.array([0]))[0] for _ in idle if not v.dead[0]])
        assert v.dead[0]
    assert len(seen[0]) == len(seen[1])
    assert all(np.abs(a.astype(int) - b.astype(int)).max() <= 1 for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("form", ["native", "inprocess"])
def test_sticky_actions_do_not_swallow_the_serve(form):
    """One frame of FIRE is overlooked in one serve of four; each game has five."""
    v = make_vec(EnvConfig("ALE/Breakout-v5", num_envs=3, vector=form), seed=0)
    v.reset()
    ended = np.zeros(3, bool)
    for _ in range(150):
        v.step(np.zeros(3, int))
        ended |= v.dead
    assert ended.all()


@pytest.mark.parametrize("form", ["native", "inprocess"])
def test_without_fire_reset_the_agent_has_to_serve(form):
    v = make_vec(EnvConfig("ALE/Breakout-v5", vector=form, atari=PLAIN), seed=0)
    v.reset()
    for _ in range(400):
        v.step(np.array([0]))
        assert not v.dead[0]


@pytest.mark.parametrize("form", ["native", "inprocess"])
def test_limit_counts_decisions(form):
    v = make_vec(EnvConfig("ALE/Pong-v5", vector=form, atari=PLAIN, max_episode_steps=6), seed=0)
    v.reset()
    assert [v.step(np.array([0]))[3][0] for _ in range(8)] == [False] * 5 + [True] + [False] * 2
    assert v.spec.max_episode_steps == 6


def test_python_form_resumes_exactly_and_native_says_it_cannot(caplog):
    v = make_vec(EnvConfig("ALE/Breakout-v5", vector="inprocess"), seed=3)  # sticky actions, random idling
    v.reset()
    acts = np.random.default_rng(0).integers(0, 4, (60, 1))
    for a in acts[:30]:
        v.step(a)
    state = v.get_state()
    rest = [v.step(a)[:2] for a in acts[30:]]
    v.set_state(state)
    assert v.exact
    assert all(
        (x[0] == y[0]).all() and (x[1] == y[1]).all()
        for x, y in zip(rest, [v.step(a)[:2] for a in acts[30:]], strict=True)
    )

    n = make_vec(EnvConfig("ALE/Breakout-v5", num_envs=2), seed=3)
    assert isinstance(n, AleVecEnv)
    assert not n.exact
    n.reset()
    state = n.get_state()
    assert n.set_state(state).shape == (2, 4, 84, 84)
    assert not n.exact
    assert "exact: false" in caplog.text


def test_native_episodes_depend_on_the_seed():
    v = make_vec(EnvConfig("ALE/Pong-v5", num_envs=2), seed=0)

    def play(seed):
        v.reset(seed)
        return np.stack([v.step(np.zeros(2, int))[0] for _ in range(10)])

    assert (play(1) == play(1)).all()
    assert (play(1) != play(2)).any()


def test_options_change_what_is_seen():
    colour = AtariConfig(grayscale=False, size=42, frame_stack=2)
    for form in ("native", "inprocess"):
        v = make_vec(EnvConfig("ALE/Pong-v5", vector=form, atari=colour), seed=0)
        assert v.reset().shape == (1, 2, 42, 42, 3)
    spec = env_spec(EnvConfig("ALE/Pong-v5", atari=AtariConfig(full_action_space=True)))
    assert spec.num_actions == 18
    assert spec.preprocessing["atari"]["frame_skip"] == 4
    assert env_spec(EnvConfig("PongNoFrameskip-v4")).observation.shape == (4, 84, 84)
    ram = make_env(EnvConfig("ALE/Pong-v5", env_config={"obs_type": "ram"}))
    assert ram.observation_space.shape == (128,)
    assert env_spec(EnvConfig("ALE/Pong-v5", atari=AtariConfig(preprocess=False))).observation.shape == (210, 160, 3)
    film = make_env(EnvConfig("ALE/Pong-v5"), render_mode="rgb_array")
    film.reset(seed=0)
    assert film.render().shape == (210, 160, 3)
    with pytest.raises(ConfigError, match="frame_skip: expected a whole number > 0, got 0"):
        AtariConfig(frame_skip=0)
