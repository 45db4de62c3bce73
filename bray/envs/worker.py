"""A worker process of `SubprocessVecEnv`: steps its share of the environments and writes what they return to shared
memory."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bray import tree
from bray.envs.build import Builder
from bray.envs.inprocess import InProcessVecEnv
from bray.envs.process import STOP, error_answer
from bray.envs.registry import register_gym
from bray.envs.spaces import leaves
from bray.spec import EnvSpec, Space
from bray.tree import NestedArray

STEP, QUIET = b"s", b"k"
"""A step, and the answer to it where no environment had an info or failed. All other messages are pickled."""

_ALIGN = 64
_FLAGS = {
    "reward": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "dead": np.bool_,
    "episode": np.int64,
}


class EnvArrays:
    """The arrays both sides see, laid out one after another in one piece of memory."""

    def __init__(self, spec: EnvSpec, num_envs: int):
        self.spec, self.size = spec, 0
        self._places: list[tuple[int, tuple[int, ...], np.dtype]] = []
        for space in (spec.given, spec.action):
            for leaf in leaves(space):
                self._place((num_envs, *leaf.space.shape), np.dtype(leaf.space.dtype))
        for dtype in _FLAGS.values():
            self._place((num_envs,), np.dtype(dtype))

    def _place(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._places.append((self.size, shape, dtype))
        self.size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN) * _ALIGN

    def view(self, memory: Any) -> dict[str, Any]:
        """{obs, action, reward, terminated, truncated, dead, episode} as arrays of the memory."""
        arrays = iter(np.frombuffer(memory, t, int(np.prod(shape)), at).reshape(shape) for at, shape, t in self._places)
        trees = {"obs": _fill(self.spec.given, arrays), "action": _fill(self.spec.action, arrays)}
        return trees | {name: next(arrays) for name in _FLAGS}


def _fill(space: Space, arrays: Iterator[np.ndarray]) -> NestedArray:
    return space.join(_fill(part, arrays) for part in space.parts) if space.composite else next(arrays)


@dataclass
class Share:
    """What a worker process is told: which environments to make, and how."""

    build: Builder
    spec: EnvSpec
    seed: int
    beside: range
    """The numbers of all environments that share the arrays."""
    numbers: range
    """Those that this worker makes."""
    gym_spec: Any
    """The user may have registered it in the parent only."""
    episodes: list[int] | None = None
    """Where this worker replaces a dead one: the episodes its environments were in, and which of them begin the next
    one."""
    begin: list[bool] | None = None
    each: tuple[bytes, ...] = ()
    """The functions that were called with each environment, as `cloudpickle` has them."""

    def make(self, memory: Any, failures: list[str]) -> tuple[InProcessVecEnv, dict[str, Any]]:
        """The environments, and their rows of the shared arrays."""
        config = self.build.config
        for module in config.import_modules:
            importlib.import_module(module)
        register_gym(self.gym_spec)
        envs = InProcessVecEnv(self.build, self.seed, self.spec, self.numbers, failures.append)
        for told in self.each:
            envs.foreach_env(pickle.loads(told))  # our own bytes, from our own parent
        rows = slice(self.numbers.start - self.beside.start, self.numbers.stop - self.beside.start)
        view = tree.index(EnvArrays(self.spec, len(self.beside)).view(memory), rows)
        if self.episodes is not None and self.begin is not None:
            for to, given in zip(
                tree.leaves(view["obs"]), tree.leaves(envs.take_over(self.episodes, self.begin)), strict=True
            ):
                to[self.begin] = given[self.begin]
            view["episode"][...] = envs.episodes
        return envs, view


def serve_share(conn: Connection, memory: Any, share: bytes) -> None:
    """Serve one share of the environments until told to stop."""
    failures: list[str] = []
    try:
        envs, view = pickle.loads(share).make(memory, failures)  # our own bytes, from our own parent
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    try:
        _serve(conn, envs, failures, view)
    finally:
        envs.close()


def _serve(conn: Connection, envs: InProcessVecEnv, failures: list[str], view: dict[str, Any]) -> None:
    obs_leaves = tree.leaves(view["obs"])

    def publish(obs: NestedArray) -> None:
        for to, given in zip(obs_leaves, tree.leaves(obs), strict=True):
            to[...] = given
        view["dead"][...] = envs.dead
        view["episode"][...] = envs.episodes

    def step() -> Any:
        obs, view["reward"][...], view["terminated"][...], view["truncated"][...], infos = envs.step(view["action"])
        publish(obs)
        return infos

    def call(method: str, *arguments: Any) -> Any:
        if method == "foreach_env":
            return envs.foreach_env(pickle.loads(*arguments))  # our own bytes, from our own parent
        result = getattr(envs, method)(*arguments)
        if method not in ("reset", "set_state"):
            return result
        publish(result)
        return envs.exact

    while (message := conn.recv_bytes()) != STOP:
        try:
            result = step() if message == STEP else call(*pickle.loads(message))
            quiet = message == STEP and result is None and not failures
            answer = QUIET if quiet else pickle.dumps(("ok", result, failures))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as e:
            answer = pickle.dumps(error_answer(e))
        failures.clear()
        conn.send_bytes(answer)
