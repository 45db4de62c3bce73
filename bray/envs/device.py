"""Environments of tensors: their `step` takes and returns tensors of one device, and a training on that device plays
them without a copy to the host (`bray/train/on_device.py`). Everything else (evaluation, replay, workers) gets them as
a VecEnv of arrays.

An environment of tensors is any class with the interface of a Gymnasium vector environment:

    num_envs, single_observation_space, single_action_space
    reset(seed=...) -> obs, infos                                  obs: a tensor [B, ...], or a dict of such
    step(actions)   -> obs, reward [B], terminated [B], truncated [B], infos

as those of Isaac Lab, ManiSkill and Warp have it; its constructor takes `num_envs` and `device` where it wants them. A
game that is written in torch from the start is shorter as a `Game` (`begin`, `move`, `see`), which is recorded, too.

**Who resets.** `metadata["autoreset_mode"]` says it, in Gymnasium's words. `next_step` is our own rule
(`bray/envs/vector.py`). `disabled`: ended games are reset here, by `reset(options={"reset_mask": mask})`. `same_step`,
which is assumed where nothing is said: the step that ends an episode returns the first observation of the next one. Our
row for the final observation then has no step of its own to stand for, so the next episode's first step is made with a
zero action and not learnt from; the final observation is taken from `infos["final_obs"]` (or `final_observation`), and
where there is none the last one before it stands in.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree
from bray.envs.config import EnvConfig
from bray.envs.registry import EnvOrigin
from bray.envs.spaces import BatchCheck, leaves, spec_from_gym
from bray.envs.tensor_game import Game
from bray.envs.torch_games import FORMS
from bray.envs.vector import StepResult, VecEnv
from bray.errors import ConfigError, EnvError, UnknownName
from bray.spec import EnvSpec
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

_MODES = ("next_step", "same_step", "disabled")
_FINAL = ("final_obs", "final_observation")


class Tensors:
    """An environment of tensors by our rule: the step after an episode's end ignores the action and returns the first
    observation of the next one. What it returns is looked at: device, shape, type."""

    def __init__(self, env: Any, spec: EnvSpec, device: torch.device | None):
        self.env, self.spec, self.num_envs = env, spec, int(env.num_envs)
        said = (getattr(env, "metadata", None) or {}).get("autoreset_mode", "same_step")
        self.mode = (
            str(getattr(said, "value", said)).lower().replace("nextstep", "next_step").replace("samestep", "same_step")
        )
        if self.mode not in _MODES:
            raise UnknownName("autoreset_mode", self.mode, _MODES, f"in the metadata of {spec.id}")
        self.device = device
        """None until the first observation has come from an environment that was not told one."""
        self.recordable = isinstance(env, Game)
        """Whether a step is operations of torch alone."""
        self.checks = not self.recordable

    def reset(self, seed: int | None) -> Any:
        obs, _ = self.env.reset(seed=seed)
        if self.device is None:
            self.device = tree.leaves(obs)[0].device
        self.dead = (
            self.env.dead if self.recordable else torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        )
        self._check(obs)
        self._obs = obs
        return obs

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
        if self.recordable:
            return self.env.step(actions)[:4]
        dead = self.dead
        if self.mode == "same_step":
            actions = tree.map(lambda x: x * _like(~dead, x).to(x.dtype), actions)
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        if self.mode == "disabled" and bool(dead.any()):
            obs, _ = self.env.reset(options={"reset_mask": dead})
        self._check(obs, reward, terminated, truncated)
        reward = reward.float() * ~dead
        terminated, truncated = terminated.bool() & ~dead, truncated.bool() & ~dead & ~terminated.bool()
        self.dead = terminated | truncated
        if self.mode == "same_step":
            final = next((infos[key] for key in _FINAL if key in infos), self._obs)
            ended = self.dead
            self._obs = obs
            obs = tree.map(lambda new, last: torch.where(_like(ended, new), last, new), obs, final)
        return obs, reward, terminated, truncated

    def _check(self, obs: Any, *columns: Any) -> None:
        if not self.checks:
            return
        found = {
            leaf.name: (leaf.of(obs), (self.num_envs, *leaf.space.shape), leaf.space.dtype)
            for leaf in leaves(self.spec.observation)
        }
        kinds = {"reward": "float32", "terminated": "bool", "truncated": "bool"}
        found |= {k: (x, (self.num_envs,), kind) for (k, kind), x in zip(kinds.items(), columns, strict=False)}
        for name, (x, shape, kind) in found.items():
            if not isinstance(x, Tensor):
                raise EnvError(
                    f"{self.spec.id}: {name} is a {type(x).__name__}; an environment with env.vector=device returns "
                    "tensors"
                )
            if x.device != self.device:
                raise EnvError(
                    f"{self.spec.id}: {name} is on {x.device}, and the environment plays on {self.device}: make it "
                    "there (its constructor may take `device`), or train with --device of where it is"
                )
            wants = getattr(torch, kind)
            same = (
                x.is_floating_point()
                if wants.is_floating_point
                else (x.dtype == wants or (kind == "bool" and not x.is_floating_point()))
            )
            if tuple(x.shape) != shape or not same:
                raise EnvError(
                    f"{self.spec.id}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected {wants} of shape {shape}"
                )

    def get_state(self) -> Any:
        """As arrays; None where the environment cannot say."""
        if not (hasattr(self.env, "get_state") and hasattr(self.env, "set_state")):
            return None
        return tree.map(lambda x: x.numpy(force=True).copy(), {"env": self.env.get_state(), "dead": self.dead})

    def set_state(self, state: Any) -> Any:
        state = tree.map(lambda x: torch.from_numpy(np.array(x)).to(self.device), state)
        self.dead.copy_(state["dead"])
        return self.env.set_state(state["env"])


def _like(flags: Tensor, x: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (x.dim() - 1))


class DeviceVecEnv(VecEnv):
    """An environment of tensors as a VecEnv of arrays: each step is copied to the host."""

    form = "device"

    def __init__(self, tensors: Tensors, *, seed: int = 0, check: bool = True):
        self.tensors, self.spec, self.num_envs = tensors, tensors.spec, tensors.num_envs
        self._seed, self._check, self._started, self._t = seed, BatchCheck.of(tensors.spec) if check else None, False, 0
        self.dead = np.zeros(self.num_envs, bool)

    def reset(self, seed: int | None = None) -> NestedArray:
        if seed is None and not self._started:
            seed = self._seed
        self._seed, self._started = self._seed if seed is None else seed, True
        obs = to_numpy(self.tensors.reset(seed))
        self.dead = np.zeros(self.num_envs, bool)
        self._check_values(obs)
        return obs

    def step(self, actions: NestedArray) -> StepResult:
        sent = tree.map(lambda x: torch.as_tensor(np.asarray(x), device=self.tensors.device), actions)
        obs, reward, terminated, truncated = (to_numpy(x) for x in self.tensors.step(sent))
        self._t += 1
        self.dead = terminated | truncated
        self._check_values(obs, reward, self.dead)
        return obs, reward, terminated, truncated, None

    def get_state(self) -> dict[str, Any]:
        arrays = self.tensors.get_state()
        self.exact = arrays is not None
        json = {"form": self.form, "num_envs": self.num_envs, "seed": self._seed, "step": self._t, "exact": self.exact}
        return {"arrays": arrays if self.exact else {}, "json": json}

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = self._read_state(state)
        self._seed, self._t, self.exact = int(json["seed"]), int(json["step"]), bool(json["exact"])
        if not self.exact:
            log.warning(
                "%s cannot save its state (get_state, set_state): new episodes start (exact: false).", self.spec.id
            )
            return self.reset(int(np.random.SeedSequence((self._seed, self._t)).generate_state(1)[0]))
        self.reset(self._seed)
        obs = to_numpy(self.tensors.set_state(arrays))
        self.dead = to_numpy(self.tensors.dead)
        return obs

    def render(self) -> np.ndarray | None:
        draw = getattr(self.tensors.env, "render", None)
        return None if draw is None else draw()

    def close(self) -> None:
        if hasattr(self.tensors.env, "close"):
            self.tensors.env.close()


def to_numpy(x: Any) -> Any:
    """Copies: the environment may write over its own."""
    return tree.map(lambda leaf: leaf.numpy(force=True).copy(), x)


def make_device(
    config: EnvConfig, source: EnvOrigin, preprocessing: dict[str, Any], seed: int, device: Any
) -> DeviceVecEnv:
    """`config.num_envs` of an environment of tensors; Gymnasium's classic ones by our own form of them."""
    refused = ("wrappers", "frame_stack", "flatten_obs", "drop_obs", "action_bounds", "per_env", "step_timeout")
    if given := [key for key in refused if getattr(config, key)]:
        raise ConfigError(
            f"env.vector=device takes no {', '.join(given)}: wrappers work on arrays of single environments"
        )
    creator = source.creator if source.gym_id is None else FORMS.get(source.gym_id)
    if creator is None:
        raise ConfigError(
            f"{source.name} has no form on a device: {', '.join(FORMS)} have, and classes of your own "
            "(docs/environments.md). Leave env.vector out."
        )
    given_device = config.env_config.get("device", device)
    device = None if given_device is None else torch.device(given_device)
    wanted = {"num_envs": config.num_envs, "device": device, "max_episode_steps": config.max_episode_steps}
    env = creator if not callable(creator) else _construct(creator, wanted, dict(config.env_config), source.name)
    if int(env.num_envs) != config.num_envs:
        raise ConfigError(
            f"{source.name} has {env.num_envs} environments, and env.num_envs={config.num_envs}: give one of them"
        )
    if isinstance(env, Game):
        device = env.device
    limit = getattr(env, "max_episode_steps", None)
    spaces = env.single_observation_space, env.single_action_space
    spec = spec_from_gym(source.name, *spaces, limit if isinstance(limit, int) else None, preprocessing)
    return DeviceVecEnv(Tensors(env, spec, _indexed(device)), seed=seed, check=config.check)


def _construct(creator: Any, wanted: dict[str, Any], arguments: dict[str, Any], name: str) -> Any:
    """With those of `wanted` that it takes."""
    parameters = inspect.signature(creator).parameters.values()
    takes = {p.name for p in parameters}
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = {k: v for k, v in wanted.items() if v is not None and (k in takes or (every and k != "max_episode_steps"))}
    if wanted["max_episode_steps"] is not None and "max_episode_steps" not in given:
        raise ConfigError(f"{name} takes no max_episode_steps: leave env.max_episode_steps out")
    for key in arguments:
        if key not in takes and not every:
            raise UnknownName(f"argument of {name}", key, takes, where="env_config")
    return creator(**given | arguments)


def _indexed(device: torch.device | None) -> torch.device | None:
    """cuda as cuda:0, as tensors say it."""
    if device is not None and device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
