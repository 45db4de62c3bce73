"""Tiny environments whose right answers are known. Tests of other parts may import them; workers find them by module
name."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Scripted(gym.Env):
    """Observation [step, seed mod 1000, last action], reward = the number of the step (1, 2, ...).

    Ends by itself at `terminate_at`, is truncated at `truncate_at`; at step `fault_at` it does what `fault` names.
    """

    def __init__(
        self,
        terminate_at: int | None = 5,
        truncate_at: int | None = None,
        fault: str | None = None,
        fault_at: int = 3,
        noise: bool = False,
        lives_at: tuple[int, ...] = (),
    ):
        self.observation_space = spaces.Box(-1.0, 1000.0, (3,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.terminate_at, self.truncate_at = terminate_at, truncate_at
        self.fault, self.fault_at, self.noise, self.lives_at = fault, fault_at, noise, lives_at
        self.t, self.seed_seen, self.closed = 0, 0, False

    def _obs(self, action: int = 0) -> np.ndarray:
        x = float(self.np_random.integers(10)) if self.noise else float(action)
        return np.array([self.t, self.seed_seen % 1000, x], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.seed_seen = seed if seed is not None else 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        obs: Any = self._obs(int(action))
        reward: Any = float(self.t)
        if self.fault is not None and self.t == self.fault_at:
            obs, reward = self._break(obs, reward)
        info = {"life_lost": True} if self.t in self.lives_at else {}
        terminated = self.t == self.terminate_at or bool(info)
        return obs, reward, terminated, self.t == self.truncate_at, info

    def _break(self, obs: np.ndarray, reward: float) -> Any:
        match self.fault:
            case "raise":
                raise RuntimeError("scripted failure")
            case "exit":
                sys.exit(3)
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(7)
            case "nan":
                obs[1] = np.nan
            case "outside":
                obs[2] = 2000.0
            case "dtype":
                return obs.astype(np.float64), reward
            case "shape":
                return obs[:2], reward
            case "list":
                return obs.tolist(), reward
            case "reward_nan":
                return obs, float("nan")
            case "reward_text":
                return obs, "1"
            case "reward_none":
                return obs, None
            case "reward_array":
                return obs, np.array([1.0])
            case "reward_arrays":
                return obs, np.array([1.0, 2.0])
            case "text":
                return np.array(["a", "b", "c"]), reward
        return obs, reward

    def close(self) -> None:
        self.closed = True


class RaisesLater(Scripted):
    """All of them at the same step; and it cannot say where it is."""

    def __init__(self, at: int = 6):
        super().__init__(terminate_at=None, fault="raise", fault_at=at)

    def get_state(self) -> Any:
        raise RuntimeError("no state")

    def set_state(self, state: Any) -> None: ...


class Hidden(Scripted):
    """Not deterministic: part of its observation comes from outside its seed."""

    counter = 0

    def _obs(self, action: int = 0) -> np.ndarray:
        Hidden.counter += 1
        obs = super()._obs(action)
        obs[2] = Hidden.counter % 997
        return obs


class Stateful(Hidden):
    """As Hidden, but it can save and restore itself."""

    def get_state(self) -> dict[str, Any]:
        return {"t": self.t, "seed": self.seed_seen, "counter": Hidden.counter}

    def set_state(self, state: dict[str, Any]) -> None:
        self.t, self.seed_seen, Hidden.counter = state["t"], state["seed"], state["counter"]


class OldGym:
    """The interface of gym before 0.26: no seed in reset, no info from it, four values from step."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit: int = 3, cut: bool = False):
        self.limit, self.cut, self.t, self.seeds = limit, cut, 0, []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> np.ndarray:
        self.t = 0
        return np.zeros(1, np.float32)

    def step(self, action: int) -> Any:
        self.t += 1
        done = self.t == self.limit
        info = {"TimeLimit.truncated": True} if done and self.cut else {}
        return np.full(1, self.t, np.float32), 1.0, done, info


class Composite(gym.Env):
    """Dict observations with every kind of space, a composite action, and a mask per discrete part.

    Gymnasium sorts the keys of a Dict, so the action's parts are aim (2 numbers), items (2 and 3 choices), move (3).
    """

    def __init__(self, mask_entries: tuple[int, int] = (5, 3)):
        self.observation_space = spaces.Dict(
            {
                "vector": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "place": spaces.Discrete(5, start=1),
                "kinds": spaces.MultiDiscrete([2, 3]),
                "bits": spaces.MultiBinary(4),
                "pair": spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3)]),
                "action_mask": spaces.Tuple([spaces.MultiBinary(n) for n in mask_entries]),
            }
        )
        self.action_space = spaces.Dict(
            {
                "move": spaces.Discrete(3),
                "items": spaces.MultiDiscrete([2, 3]),
                "aim": spaces.Box(-2.0, 2.0, (2,), np.float32),
            }
        )
        self.mask_entries, self.t, self.actions = mask_entries, 0, []

    def _obs(self) -> dict[str, Any]:
        masks = tuple(np.ones(n, np.int8) for n in self.mask_entries)
        masks[1][self.t % 3] = 0
        return {
            "vector": np.full(2, self.t / 10, np.float32),
            "place": 1 + self.t % 5,
            "kinds": np.array([self.t % 2, self.t % 3]),
            "bits": np.array([self.t % 2, 1, 0, 0], np.int8),
            "pair": (np.full((2, 2), self.t, np.uint8), self.t % 3),
            "action_mask": masks,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        self.t += 1
        return self._obs(), float(action["move"]) + float(np.sum(action["items"])), self.t == 4, False, {}


class MultiEnv(gym.Env):
    """RLlib's example: which game it is depends on worker and place in the vector."""

    observation_space = spaces.Box(0.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, env_config: Any):
        self.key = (env_config.worker_index, env_config.vector_index)
        self.bonus = env_config.get("bonus", 0.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array(self.key, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.array(self.key, np.float32), self.bonus, False, False, {}


class Slow(Scripted):
    """A step of two milliseconds, and it says so."""

    metadata: ClassVar = {"step_ms": 2.0}

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return super().step(action)


class Sleepy(Scripted):
    """Its steps, and with `slow_reset` the starts of its episodes, take `seconds`."""

    def __init__(self, seconds: float = 0.0, slow_reset: bool = False, **kw: Any):
        super().__init__(**kw)
        self.seconds, self.slow_reset = seconds, slow_reset

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(self.seconds if self.slow_reset else 0.0)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


class Choice(Sleepy):
    """Ten steps; reward 1 for action 2."""

    def __init__(self, **kw: Any):
        super().__init__(terminate_at=10, **kw)

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs / np.float32(1000), float(action == 2), *rest


class Gated(Scripted):
    """A step lasts until the file `gate` is there; without one it lasts no time."""

    render_mode = "rgb_array"

    def __init__(self, gate: str | None = None, **kw: Any):
        super().__init__(**kw)
        self.gate = gate

    def step(self, action: Any) -> Any:
        while self.gate is not None and not os.path.exists(self.gate):
            time.sleep(0.002)
        return super().step(action)

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)


class MainProcessOnly(Scripted):
    """Cannot be made in a worker."""

    def __init__(self) -> None:
        super().__init__()
        if multiprocessing.parent_process() is not None:
            raise RuntimeError("only in the main process")


class Aliased(Scripted):
    """Returns one array again and again and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(3, np.float32)

    def _obs(self, action: int = 0) -> np.ndarray:
        self.buffer[0] = self.t
        return self.buffer


class FiveByFour(Scripted):
    """A gymnasium.Env whose step still returns four values."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class DoubleObs(Scripted):
    """As SlimeVolley: float32 in its space, float64 from step and reset; and its reward is an array of one number."""

    def _obs(self, action: int = 0) -> np.ndarray:
        return super()._obs(action).astype(np.float64)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class RoundedUp(Scripted):
    """As Flappy Bird: a float64 space [0, 1], and values above it by the rounding of a division."""

    def __init__(self, value: float = 1.0000000000000002):
        super().__init__()
        self.value, self.observation_space = value, spaces.Box(0.0, 1.0, (2,), np.float64)

    def _obs(self, action: int = 0) -> np.ndarray:
        return np.array([0.5, self.value])


class Mission(spaces.Space):
    """As MiniGrid's: a space of texts that does not say how long they are."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class WithMission(Scripted):
    """As MiniGrid: a Dict with a picture, a direction and a text; and a note whose space says how long it is."""

    def __init__(self, mission: str = "go to the goal") -> None:
        super().__init__()
        self.mission, self.note = mission, "ab"
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "direction": spaces.Discrete(4),
                "mission": Mission(),
                "note": spaces.Text(4, charset="abcd"),
            }
        )

    def _obs(self, action: int = 0) -> Any:
        image = np.full((4, 4, 3), self.t, np.uint8)
        return {"image": image, "direction": self.t % 4, "mission": self.mission, "note": self.note}


class Lives(Scripted):
    """Three lives, one lost at steps 2 and 4; the game ends at 5. `info["lives"]` tells, as Atari games do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"lives": 3}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"lives": 0 if terminated else 3 - self.t // 2}


class Timestep(NamedTuple):
    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class ConfiguredEnv:
    """The interface of DI-engine and nerveX: made with one cfg, `reset` gives the observation, `step` a named tuple
    whose reward is an array."""

    def __init__(self, cfg: dict[str, Any]):
        self.length, self.t, self.seeds = cfg.get("length", 4), 0, []
        self.observation_space = spaces.Box(-1.0, 100.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.reward_space = spaces.Box(0.0, 1.0, (1,), np.float32)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self.seeds.append(seed)

    def reset(self) -> np.ndarray:
        self.t = 0
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Timestep:
        self.t += 1
        done = self.t == self.length
        info = {"eval_episode_return": float(self.t)} if done else {}
        return Timestep(np.array([self.t, action], np.float32), np.array([1.0], np.float32), done, info)

    def close(self) -> None: ...


class NeedsSomething(Scripted):
    """Something is missing where it is made, or (`late`) in its first reset."""

    def __init__(self, what: str, late: bool = False):
        super().__init__()
        self.what = what
        if not late:
            self._need()

    def _need(self) -> None:
        match self.what:
            case "module":
                importlib.import_module("no_such_module_at_all")
            case "variable":
                os.environ["NO_SUCH_VARIABLE_HOME"]
            case "exit":
                sys.exit("Please declare the environment variable 'NO_SUCH_VARIABLE_HOME'")
            case "program":
                subprocess.run(["no-such-simulator"], check=True)
            case "display":
                raise NoSuchDisplayException('Cannot connect to "None"')

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._need()
        return super().reset(seed=seed)


class NoSuchDisplayException(Exception):
    """As pyglet's."""


class AddOne(gym.ObservationWrapper):
    """A user's wrapper, named in a config as envs_for_tests:AddOne."""

    def __init__(self, env: gym.Env, amount: float = 1.0):
        super().__init__(env)
        self.amount = amount

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation + np.float32(self.amount)


def make_scripted(env_config: dict[str, Any]) -> gym.Env:
    """A creator for register_env."""
    return Scripted(**env_config)


class Phased(gym.Env):
    """Episodes of `phase` steps; rewards tell the phase."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    to_fail = 0

    def __init__(self, **_):
        self.phase, self.steps = 3, 0

    def set_phase(self, phase):
        self.phase = phase
        return phase

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if Phased.to_fail:
            Phased.to_fail -= 1
            raise RuntimeError("the game fell over")
        return np.zeros(2, np.float32), float(self.phase), self.steps >= self.phase, False, {"phase": self.phase}
