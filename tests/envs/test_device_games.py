"""Games of tensors against their forms on the CPU, step by step, and environments of tensors by the user."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import bray
from bray.envs import EnvConfig, env_spec, make_vec
from bray.envs.tensor_game import Game
from bray.envs.torch_games import FORMS
from bray.errors import ConfigError, EnvError

PUSHED = {"Acrobot-v1": 5, "MountainCar-v0": 1}
"""The observation of a speed."""


def copied(name, single, game, b):
    """Game b of the tensors, into one environment of the CPU."""
    if name == "bray/Catch-v0":
        single.x, single.y, single.drift, single.paddle = game.state[b].tolist()
    elif name == "bray/Breakout-v0":
        single.x, single.y, single.right, single.down, *before = game.state["ball"][b].tolist()
        single.before, single.paddle = tuple(before), int(game.state["paddle"][b])
        single.wall = game.state["wall"][b].numpy().copy()
    else:
        single.state = game.state[b].numpy().copy()
        single.steps_beyond_terminated = None


@pytest.mark.parametrize("name", FORMS)
def test_a_game_of_tensors_equals_its_form_on_the_cpu(name):
    games, steps = 5, 250
    tensors = make_vec(EnvConfig(id=name, num_envs=games, vector="device"), seed=3)
    singles = [gym.make(name).unwrapped for _ in range(games)]
    limit, obs = tensors.spec.max_episode_steps, tensors.reset(3)
    game, rng, ages = tensors.tensors.env, np.random.default_rng(0), np.zeros(games, int)
    for b, single in enumerate(singles):
        single.reset(seed=0)
        copied(name, single, game, b)
    ends = 0
    for _ in range(steps):
        dead = tensors.dead
        space = singles[0].action_space
        action = rng.integers(0, space.n, games) if hasattr(space, "n") else rng.uniform(-2.5, 2.5, (games, 1))
        if name in PUSHED:  # with the swing, so that it comes to an end
            action = np.where(obs[:, PUSHED[name]] > 0, 2, 0)
        obs, reward, terminated, truncated, _ = tensors.step(action)
        for b, single in enumerate(singles):
            if dead[b]:  # the first observation of the next episode
                assert reward[b] == 0.0
                assert not terminated[b]
                assert not truncated[b]
                copied(name, single, game, b)
                ages[b] = 0
                continue
            seen, gained, ended, _, _ = single.step(action[b])
            ages[b] += 1
            np.testing.assert_allclose(obs[b], seen, rtol=0, atol=1e-6)
            assert reward[b] == pytest.approx(gained, abs=1e-5)
            assert bool(terminated[b]) is bool(ended)
            assert bool(truncated[b]) == (limit is not None and ages[b] == limit and not ended)
            ends += ended or truncated[b]
    assert ends > 0


def test_starts_differ_between_games_and_episodes_and_follow_the_seed():
    def starts(seed):
        env = make_vec(EnvConfig(id="CartPole-v1", num_envs=64, vector="device"), seed=seed)
        first = env.reset(seed)
        return first, env.reset()

    (a, b), (c, _), (d, _) = starts(0), starts(0), starts(1)
    np.testing.assert_array_equal(a, c)
    assert not np.isclose(a, d).all(1).any()
    assert not np.isclose(a, b).all(1).any()
    assert len(np.unique(a[:, 0])) == 64
    assert abs(a.mean()) < 0.01
    assert a.min() < -0.04
    assert a.max() > 0.04


class Walk(Game):
    """Two steps up or down a line end it at +-3."""

    single_observation_space = spaces.Box(-9.0, 9.0, (1,))
    single_action_space = spaces.Discrete(2)

    def begin(self, u):
        return torch.zeros_like(u)

    def move(self, state, action):
        state = state + (action * 2 - 1)[:, None]
        return state, state[:, 0], state[:, 0].abs() >= 3

    def see(self, state):
        return state.float()


def test_a_game_of_the_users_own_is_played_without_a_word_about_its_form():
    env = make_vec(EnvConfig(id=Walk, num_envs=3, max_episode_steps=4), seed=0)
    assert env.reset(0).tolist() == [[0], [0], [0]]
    for _ in range(3):
        obs, reward, terminated, truncated, _ = env.step(np.array([1, 0, 1]))
    assert obs.tolist() == [[3], [-3], [3]]
    assert terminated.all()
    assert env.dead.all()
    obs, reward, *_ = env.step(np.array([1, 1, 1]))
    assert obs.tolist() == [[0], [0], [0]]
    assert reward.tolist() == [0, 0, 0]
    for action in (1, 0, 1, 0):
        *_, terminated, truncated, _ = env.step(np.full(3, action))
    assert truncated.all()
    assert not terminated.any()
    assert env_spec(EnvConfig(id=Walk)).observation.shape == (1,)


class Line:
    """An environment of tensors as others write them: it counts up, and ends at `length`."""

    single_observation_space = spaces.Box(-1.0, 99.0, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, device=None, mode="same_step", told=True, length=3):
        self.num_envs, self.device, self.told, self.length = num_envs, torch.device(device or "cpu"), told, length
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.mode = str(getattr(mode, "value", mode)).lower()
        self.at = torch.zeros(num_envs, 1, device=self.device)
        self.before = torch.zeros(num_envs, dtype=torch.bool)
        self.actions = []

    def reset(self, *, seed=None, options=None):
        mask = torch.ones(self.num_envs, dtype=torch.bool) if not options else options["reset_mask"]
        self.at[mask] = 0.0
        return self.at.clone(), {}

    def step(self, actions):
        self.actions.append(actions.clone())
        self.at += 1
        if "next" in self.mode:
            self.at[self.before] = 0.0
        reward = torch.ones(self.num_envs)
        truncated = self.at[:, 0] >= self.length
        final = self.at.clone()
        infos = {"final_obs": final} if self.told else {}
        if self.mode in ("same_step", "none"):
            self.at[truncated] = 0.0
        self.before = truncated
        return self.at.clone(), reward, torch.zeros(self.num_envs, dtype=torch.bool), truncated, infos


@pytest.mark.parametrize("mode", ["same_step", None, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_whoever_resets_rows_follow_one_rule(mode):
    made = []

    def make(num_envs, device=None):
        made.append(Line(num_envs, device, mode))
        return made[-1]

    env = make_vec(EnvConfig(id=make, num_envs=2, vector="device"), seed=0)
    assert env.reset(0).tolist() == [[0], [0]]
    seen, ends, rewards = [], [], []
    for _ in range(8):
        obs, reward, _, truncated, _ = env.step(np.array([1, 1]))
        seen.append(obs[0, 0])
        ends.append(bool(truncated[0]))
        rewards.append(reward[0])
    first = 1.0 if mode in ("same_step", None) else 0.0  # a step was made with a zero action
    assert seen[:4] == [1, 2, 3, first]
    assert ends[:4] == [False, False, True, False]
    assert rewards[:4] == [1, 1, 1, 0]
    if first:
        assert made[-1].actions[3].tolist() == [0, 0]


def test_without_a_final_observation_the_last_one_stands_in():
    env = make_vec(EnvConfig(id=lambda num_envs: Line(num_envs, told=False), num_envs=1, vector="device"), seed=0)
    env.reset(0)
    assert [float(env.step(np.array([1]))[0][0, 0]) for _ in range(3)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda obs, *rest: (obs.numpy(), *rest), "observation is a ndarray; an environment with env.vector=device"),
        (
            lambda obs, reward, *rest: (obs, reward.to("meta"), *rest),
            "reward is on meta, and the environment plays on cpu",
        ),
        (
            lambda obs, reward, *rest: (obs, reward[:, None], *rest),
            r"reward is torch.float32 of shape \(2, 1\), expected",
        ),
        (lambda obs, reward, *rest: (obs, reward.long(), *rest), "reward is torch.int64"),
        (lambda obs, reward, ended, *rest: (obs, reward, ended.float(), *rest), "terminated is torch.float32"),
    ],
)
def test_what_is_no_tensor_of_the_device_is_named(change, message):
    class Wrong(Line):
        def step(self, actions):
            return change(*super().step(actions))

    env = make_vec(EnvConfig(id=Wrong, num_envs=2, vector="device"), seed=0)
    env.reset(0)
    with pytest.raises(EnvError, match=message):
        env.step(np.array([0, 0]))


def test_what_has_no_form_on_a_device_is_said():
    with pytest.raises(ConfigError, match="FrozenLake-v1 has no form on a device: CartPole-v1"):
        make_vec(EnvConfig(id="FrozenLake-v1", vector="device"), seed=0)
    with pytest.raises(ConfigError, match=r"env\.vector=device takes no frame_stack"):
        make_vec(EnvConfig(id="CartPole-v1", vector="device", frame_stack=4), seed=0)
    with pytest.raises(ConfigError, match=r"has 4 environments, and env\.num_envs=2"):
        make_vec(EnvConfig(id=lambda: Line(4), num_envs=2, vector="device"), seed=0)


def test_the_state_of_a_game_is_all_of_it():
    config = EnvConfig(id="bray/Breakout-v0", num_envs=4, vector="device")
    env, other = make_vec(config, seed=0), make_vec(config, seed=9)
    env.reset(0)
    actions = np.random.default_rng(0).integers(0, 3, (120, 4))
    for action in actions[:60]:
        env.step(action)
    other.set_state(env.get_state())
    for action in actions[60:]:
        for a, b in zip(env.step(action)[:4], other.step(action)[:4], strict=True):
            np.testing.assert_array_equal(a, b)


def test_pictures_can_be_looked_at():
    env = gym.make("bray/Breakout-v0", render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (256, 256, 3)
    assert picture.max() > 0


def test_the_game_of_the_docs_trains(tmp_path, monkeypatch):
    page = (Path(bray.__file__).parents[1] / "docs" / "environments.md").read_text()
    code = page.split("# my_game.py\n")[1].split("```")[0]
    (tmp_path / "a_game_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"num_envs": 8, "rollout_length": 16, "iteration_steps": 0}
    with bray.Experiment(run="PPO", env="a_game_of_the_docs:Line", config=settings) as made:
        made.check_env()
        before = made.training.iterate()["env_steps_total"]
        assert before > 100
        assert made.training.evaluate(2)["eval/episodes"] == 2
