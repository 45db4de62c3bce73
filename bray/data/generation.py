"""Generation: an experience of returns. Every environment plays one whole episode with each version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import ITERATION_STEPS, Batch, Experience
from bray.data.piece import Piece
from bray.errors import ConfigError

MOST_BYTES = 64 << 20
"""Of the observations that are kept of a generation, for the statistics of the Model: pictures of whole episodes would
fill the memory."""


class Generation(Experience):
    """A batch: `return [B]` of the first episode that each environment began with the newest weights, the extras of the
    row that ended it `[B, ...]`, and observations `obs [N, ...]` since the last batch: all, or where these are many
    every second, fourth, ... step. Episodes that began before, and second ones while others still play, do not count.
    """

    piece_length = 1  # the weights change as soon as the last episode ends, so that all begin the next one together
    iteration_steps = ITERATION_STEPS

    def __init__(self) -> None:
        self._total = self._began = self._returns = np.zeros(0)
        self._extras: dict[str, np.ndarray] = {}
        self._newest: Any = None
        self._forget()

    def _forget(self) -> None:
        """Begin to gather observations anew."""
        self._obs: list[Any] = []
        self._steps = self._rows = self._bytes = 0
        self._every = 1

    def check_rows(self, num_envs: int, ready: int) -> None:
        """Refuse environments that do not make pairs, or that step at different times."""
        if num_envs % 2:
            raise ConfigError(f"num_envs is even: two environments try each direction, got {num_envs}")
        if ready != num_envs:
            raise ConfigError("env.wait_num does not go with whole episodes of all environments: leave it out")

    def check_live(self) -> None:
        raise ConfigError(
            "this algorithm tries other weights in every environment of one process (--env, num_envs); live games are "
            "learnt from by PPO, A2C, PG and DQN"
        )

    def add(self, piece: Piece) -> None:
        if piece.stream is not None:
            self.check_live()
        if len(self._total) != piece.num_envs:
            self._total = np.zeros(piece.num_envs)
            self._began, self._returns = np.full(piece.num_envs, -1), np.full(piece.num_envs, np.nan)
        for t in range(piece.length):
            first, valid = piece.first[t], piece.valid[t]
            self._total[first] = 0.0
            self._began[first] = piece.version
            self._total += np.where(valid, piece.reward[t], 0.0)
            ended = (piece.terminated[t] | piece.truncated[t]) & valid
            counts = ended & (self._began == piece.version) & np.isnan(self._returns)
            self._returns[counts] = self._total[counts]
            self._extras = tree.index(piece.extras, t)
            self._rows += int(np.count_nonzero(valid))
            self._steps += 1
            if self._steps % self._every == 0:
                self._keep(tree.map(lambda x, t=t, valid=valid: x[t][valid], piece.obs))

    def _keep(self, obs: Any) -> None:
        self._obs.append(obs)
        self._bytes += sum(x.nbytes for x in tree.leaves(obs))
        if self._bytes > MOST_BYTES and len(self._obs) > 1:
            self._obs, self._every = self._obs[1::2], 2 * self._every
            self._bytes = sum(x.nbytes for row in self._obs for x in tree.leaves(row))

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if not len(self._returns) or np.isnan(self._returns).any():
            return None
        self._newest, rows = tree.concat(self._obs), self._rows
        data = {"return": self._returns.copy(), "obs": self._newest, **tree.map(np.array, self._extras)}
        self._returns[:] = np.nan
        self._forget()
        return Batch(data, rows)

    def cut(self) -> None:
        self._began[:], self._returns[:] = -1, np.nan
        self._forget()

    def wait_reason(self) -> str:
        return f"{np.isfinite(self._returns).sum()} of {len(self._returns)} environments have played their episode"

    def newest_obs(self, rows: int) -> Any:
        return None if self._newest is None else tree.index(self._newest, slice(-rows, None))

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        arrays = {"total": self._total, "began": self._began, "returns": self._returns, "extras": self._extras}
        if self._obs:
            arrays |= {"obs": tree.concat(self._obs), "lengths": np.array([tree.length(x) for x in self._obs])}
        return {"arrays": arrays, "json": {"steps": self._steps, "steps_rows": self._rows, "every": self._every}}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        arrays, json = state["arrays"], state["json"]
        self._total, self._began = np.array(arrays["total"]), np.array(arrays["began"])
        self._returns, self._extras = np.array(arrays["returns"]), dict(arrays.get("extras", {}))
        self._forget()
        self._steps, self._rows = int(json.get("steps", 0)), int(json.get("steps_rows", 0))
        self._every = max(1, int(json.get("every", 1)))
        if "obs" in arrays:
            ends = np.cumsum(arrays.get("lengths", [tree.length(arrays["obs"])]))
            for low, high in zip([0, *ends[:-1]], ends, strict=True):
                self._keep(tree.map(lambda x, low=low, high=high: np.array(x[low:high]), arrays["obs"]))
        return True
