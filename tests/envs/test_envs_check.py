"""Environments that break their own spaces are stopped at once; check_env says what is wrong and what to do."""

from __future__ import annotations

import re
from typing import ClassVar

import envs_for_tests as e
import gymnasium as gym
import numpy as np
import pytest
import torch

from bray.envs import EnvConfig, make_env, make_vec
from bray.envs.check import check_env
from bray.errors import ConfigError, EnvError

FAULTS = {
    "nan": r"environment 1, episode 0, step 3: observation\[1\] is nan, in array\(\[ 3",
    "outside": r"environment 1, episode 0, step 3: observation\[2\] is 2000\.0, outside its space \[-1\.0, 1000\.0\]",
    "text": r"environment 1, episode 0, step 3: observation has dtype float32 in its space, got <U1: use \.astype",
    "shape": r"environment 1, episode 0, step 3: observation has shape \(3,\) in its space, got \(2,\)",
    "list": r"environment 1, episode 0, step 3: observation is an array of float32, got a list",
    "reward_nan": r"environment 1, episode 0, step 3: the reward is nan",
    "reward_text": r"environment 1, episode 0, step 3: the reward is a number, got str '1': return float",
    "reward_none": r"environment 1, episode 0, step 3: the reward is a number, got NoneType None: return float",
    "reward_arrays": r"environment 1, episode 0, step 3: the reward is a number, got ndarray array\(\[1\., 2\.\]\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_its_space_is_stopped_with_env_step_and_value(fault):
    v = make_vec(
        EnvConfig(e.Scripted, num_envs=2, vector="inprocess", per_env=[{}, {"fault": fault}], max_restarts=9), seed=0
    )
    v.reset()
    v.step([0, 0])
    v.step([0, 0])
    with pytest.raises(EnvError, match=FAULTS[fault]) as caught:
        v.step([0, 0])
    assert "env.check=false" in str(caught.value)
    assert v.restarts == 0  # a wrong value is not a crash


@pytest.mark.parametrize("fault", ["nan", "text", "reward_nan"])
def test_workers_report_the_same(fault):
    config = EnvConfig(e.Scripted, num_envs=2, vector="subprocess", per_env=[{}, {"fault": fault}])
    with make_vec(config, seed=0) as v:
        v.reset()
        v.step([0, 0])
        v.step([0, 0])
        with pytest.raises(EnvError, match=FAULTS[fault]):
            v.step([0, 0])


class Careless(e.Scripted):
    """Nothing where info belongs, arrays where flags belong."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], None

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, np.array([terminated]), truncated, None


def test_harmless_slips_are_taken():
    v = make_vec(EnvConfig(Careless, num_envs=2, vector="inprocess", per_env=[{}, {"terminate_at": 2}]), seed=0)
    v.reset()
    rows = [v.step([0, 0]) for _ in range(5)]
    assert [r[2].tolist() for r in rows] == [[False] * 2, [False, True], [False] * 2, [False] * 2, [True, True]]
    assert "warning: info is a dict, got None: return {}" in said(Careless)
    assert all(finding.startswith("warning") for finding in said(Careless))


def test_the_check_can_be_switched_off():
    for fault in ("nan", "outside", "dtype", "list", "reward_nan"):
        v = make_vec(EnvConfig(e.Scripted, env_config={"fault": fault}, check=False), seed=0)
        v.reset()
        v.step([0])
        v.step([0])
        obs, reward, *_ = v.step([0])
        assert obs.dtype == reward.dtype == np.float32
        assert obs[0, 0] == 3


def test_nested_observations_are_checked_by_path():
    class Bad(e.Composite):
        def __init__(self, part, value):
            super().__init__()
            self.part, self.value = part, value

        def _obs(self):
            return {**super()._obs(), **({self.part: self.value} if self.t == 1 else {})}

    for part, value, says in (
        ("place", 6, r"observation\['place'\] is 6, outside its space \[1, 5\]"),
        ("kinds", np.array([1, 3]), r"observation\['kinds'\]\[1\] is 3, outside its space \[0, 2\]"),
        ("pair", (np.zeros((2, 2), np.uint8), 0.5), r"observation\['pair'\]\[1\] is an integer"),
        ("vector", np.array([0, np.inf], np.float32), r"observation\['vector'\]\[1\] is inf"),
        ("bits", np.zeros(3, np.int8), r"observation\['bits'\] has shape \(4,\)"),
        ("extra", 1, r"keys its space does not have: \['extra'\]"),
    ):
        v = make_vec(EnvConfig(Bad, env_config={"part": part, "value": value}), seed=0)
        v.reset()
        with pytest.raises(EnvError, match=says):
            v.step(v.spec.layout.to_env(np.zeros((1, 5), np.float32)))


def test_native_forms_are_checked_too():
    v = make_vec(EnvConfig("CartPole-v1", num_envs=8), seed=0)
    v.reset()
    v.env.state[1, 5] = np.nan
    with pytest.raises(EnvError, match=r"CartPole-v1, environment 5, step 1: observation\[0\] is nan"):
        v.step(np.zeros(8, int))


# --- check_env --------------------------------------------------------------------------------------------------------


def said(env, **env_config):
    return [str(f) for f in check_env(EnvConfig(env, env_config=env_config), steps=60)]


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", e.Scripted, e.Composite])
def test_good_environments_have_no_findings(env):
    assert said(env) == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nan", "error: episode 0, step 3: observation[1] is nan"),
        ("outside", "error: episode 0, step 3: observation[2] is 2000.0, outside its space"),
        ("text", "error: episode 0, step 3: observation has dtype float32 in its space, got <U1: use .astype"),
        ("dtype", "warning: observation has dtype float32 in its space and comes as float64: it is cast to float32"),
        ("shape", "error: episode 0, step 3: observation has shape (3,)"),
        ("reward_array", "info: the reward is an array of shape (1,); it is taken as a number"),
        ("reward_arrays", "error: the reward is a number, got ndarray [1. 2.]: return float(reward)"),
        ("reward_nan", "error: the reward is nan"),
        ("raise", "error: step("),
    ],
)
def test_faults_are_found(fault, says):
    (finding,) = said(e.Scripted, fault=fault)
    assert finding.startswith(says)


def test_slow_steps_are_told_with_what_to_declare():
    class Undeclared(e.Slow):
        metadata: ClassVar = {}

    (finding,) = said(Undeclared)
    assert re.search(
        r"info: a step takes about \d+\.\d ms\. .*env\.vector=subprocess.*metadata = \{\"step_ms\": \d+\}", finding
    )
    assert said(e.Slow) == []  # it has declared it


def test_texts_are_told_with_what_to_write():
    findings = said(e.WithMission)
    assert findings[0] == (
        "info: observation['mission'] is a text: it is given to the agent as uint8[128], the codes of its characters; "
        "env.drop_obs=[mission] leaves it out"
    )
    assert "observation['note'] is a text: it is given to the agent as uint8[4]" in findings[1]
    dropped = check_env(EnvConfig(e.WithMission, drop_obs=["mission", "note"]), steps=20)
    assert dropped == []


@pytest.mark.parametrize("late", [False, True])
def test_what_is_missing_is_one_sentence(late):
    (finding,) = said(e.NeedsSomething, what="variable", late=late)
    assert "the environment variable NO_SUCH_VARIABLE_HOME, which is not set" in finding
    assert "Traceback" not in finding


def test_aliasing_is_found():
    (finding,) = said(e.Aliased)
    assert "aliasing" in finding
    assert "obs.copy()" in finding


def test_randomness_outside_the_seed_is_found():
    (finding,) = said(e.Hidden)
    assert "two runs with the same seed and actions differ at step 0" in finding
    assert "exact: false" in finding


def test_old_interfaces_get_advice():
    findings = said(e.OldGym)
    assert findings == [
        "info: OldGym is not a gymnasium.Env; it is adapted",
        "info: reset does not take `seed`; its method `seed` is called before each reset",
    ]

    class NoSeed(e.OldGym):
        seed = None

    assert "warning: reset does not take `seed`: define reset(self, *, seed=None, options=None)" in said(NoSeed)[1]


def test_masks_and_flags():
    (finding,) = said(e.Composite, mask_entries=(5, 2))
    assert "action_mask has 7 entries, the action space has 8 choices" in finding

    class Flags(e.Scripted):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, int(terminated), truncated, info

    assert said(Flags) == ["warning: terminated is a bool, got int 0: return bool(terminated)", *said(Flags)[1:]]

    class NoneLegal(e.Composite):
        def _obs(self):
            return {**super()._obs(), "action_mask": (np.ones(5, np.int8), np.zeros(3, np.int8))}

    assert "forbids every choice of action part 2" in said(NoneLegal)[0]


class _Spaces(e.Scripted):
    """Scripted with other spaces."""

    def __init__(self, observation, action=None):
        super().__init__()
        self.observation_space, self.action_space = observation, action or self.action_space

    def _obs(self, action=0):
        return self.observation_space.sample()

    def step(self, action):
        return super().step(0)


_VECTOR = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
@pytest.mark.parametrize(
    ("observation", "action", "says"),
    [
        ({"a": _VECTOR, "action_mask": gym.spaces.MultiBinary(6)}, None,
         "action_mask has 6 entries, the action space has 4 choices"),
        ({"a": _VECTOR, "action_mask": gym.spaces.MultiBinary(2)}, None,
         "action_mask has 2 entries, the action space has 4 choices"),
        (
            {"a": _VECTOR, "action_mask": gym.spaces.Dict(jump=gym.spaces.MultiBinary(2))},
            gym.spaces.Dict(move=gym.spaces.Discrete(2)),
            "action_mask has ['jump'], the action has ['move']",
        ),
        ({"a": _VECTOR, "b": gym.spaces.Box(0, 1, (0,), np.float32)}, None,
         "observation['b'] has no elements, its shape is (0,)"),
    ],
)  # fmt: skip
def test_spaces_that_cannot_work_are_refused_before_the_first_step(observation, action, says, form):
    keys = {"observation": gym.spaces.Dict(observation), "action": action}
    (finding,) = said(_Spaces, **keys)
    assert finding.startswith(f"error: {says}")
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_vec(EnvConfig(_Spaces, env_config=keys, vector=form, check=False), seed=0)


def test_half_floats_are_read_as_float32():
    space = gym.spaces.Box(-1.0, 1.0, (3,), np.float16)
    v = make_vec(EnvConfig(_Spaces, env_config={"observation": space, "action": space}, num_envs=2), seed=0)
    assert v.reset().dtype == v.step(np.zeros((2, 3)))[0].dtype == np.float32
    assert v.spec.action.dtype == "float16"  # the environment gets what it declares
    assert said(_Spaces, observation=space)[0].startswith("warning: observation has dtype float32")


def test_endless_episodes_and_unbounded_actions_are_told():
    assert "no episode ended in 60 random steps" in said(e.Scripted, terminate_at=None)[0]

    class Unbounded(e.Scripted):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def step(self, action):
            return super().step(0)

    assert "unbounded Box: give it finite low and high" in said(Unbounded)[0]


def test_what_cannot_be_made_is_an_error():
    assert "Did you mean 'CartPole-v1'" in said("CartPol-v1")[0]
    assert said(e.MultiEnv)  # takes env_config, never ends
    assert "observation_space" in said(lambda: object())[0] or "not an environment" in said(lambda: object())[0]


class Sized(e.Scripted):
    def __init__(self, size):
        super().__init__()
        self.size = size


def test_an_argument_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"Sized: size is missing: env\.env_config\.size=\.\.\."):
        make_vec(EnvConfig(Sized), seed=0)
    with pytest.raises(ConfigError, match="size is missing"):
        make_vec(EnvConfig(lambda size: Sized(size)), seed=0)
    assert any("size is missing" in finding for finding in said(Sized))
    for creator in (lambda c: Sized(c), lambda _: Sized(_), lambda conf: Sized(conf)):
        assert make_env(EnvConfig(creator, env_config={"depth": 2})).size == {"depth": 2}
    assert make_env(EnvConfig(Sized, env_config={"size": 3})).size == 3


class Tensors:
    """Many at once, as environments of tensors are, with nothing that a resume could save."""

    single_observation_space = gym.spaces.Box(-9.0, 9.0, (1,))
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs, device="cpu", reward=1.0):
        self.num_envs, self.reward = num_envs, reward

    def reset(self, *, seed=None, options=None):
        self.at = torch.zeros(self.num_envs, 1)
        return self.at, {}

    def step(self, actions):
        self.at = self.at + 1
        ended = self.at[:, 0] > 5
        self.at = torch.where(ended[:, None], 0.0, self.at)
        return self.at, torch.full((self.num_envs,), self.reward), ended, ended & False, {}


def test_environments_of_tensors_are_played_many_at_once():
    found = check_env(EnvConfig(id="CartPole-v1", vector="device"), steps=30)
    assert [f.severity for f in found] == ["info"]
    assert "4 environments of tensors on cpu" in found[0].message
    found = check_env(EnvConfig(id=Tensors, vector="device"), steps=30)
    assert [f.severity for f in found] == ["info", "warning"]
    assert "no get_state() and set_state(state)" in found[1].message
    found = check_env(EnvConfig(id=Tensors, vector="device", env_config={"reward": float("nan")}), steps=30)
    assert [f.severity for f in found] == ["error"]
    assert "environment 0: the reward is nan" in found[0].message
    (found,) = check_env(EnvConfig(id=Tensors), steps=30)
    assert "num_envs is missing" in found.message
    assert "as tensors, set env.vector=device" in found.message
