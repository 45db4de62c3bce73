"""Demonstrations from the game: ticks that carry the action that the player chose become files of episodes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.data.files import Episode, EpisodeWriter
from bray.errors import DataError
from bray.serving.actor import Actor
from bray.serving.protocol import malformed
from bray.serving.values import reader
from bray.spec import EnvSpec


class _Tick(msgspec.Struct, forbid_unknown_fields=True):
    obs: msgspec.Raw
    action: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Of the player, on this observation; not with an episode's last one."""
    reward: float = 0.0
    """Of the action before."""
    terminated: bool = False
    truncated: bool = False


class RecordActor(Actor):
    """A session of a game that a person plays. A tick is that of a game that learns, and has the player's `action`
    besides, which is sent back. An episode that ends without saying so is cut before its last action."""

    def __init__(self, spec: EnvSpec, writer: EpisodeWriter):
        self._writer = writer
        self._read_obs, self._read_action = reader(spec.observation), reader(spec.action, "action")
        self._decode = msgspec.json.Decoder(_Tick).decode
        self._clear()

    def _clear(self) -> None:
        self._obs: list[Any] = []
        self._actions: list[Any] = []
        self._rewards: list[float] = []

    def start(self, session: str, data: bytes) -> bytes:
        self._clear()
        return b"{}"

    def tick(self, data: bytes) -> bytes:
        try:
            tick = self._decode(data)
            over = tick.terminated or tick.truncated
            if not math.isfinite(tick.reward):
                raise DataError(f"reward: expected a finite number, got {tick.reward}")
            if tick.action is msgspec.UNSET and not over:
                raise DataError("expected the action that the player chose, as `action`; only the last tick has none")
            if over and tick.action is not msgspec.UNSET:
                raise DataError(
                    "got an action on the tick that ends the episode, which has the last observation and the reward "
                    "of the action before it alone"
                )
            if over and not self._obs:
                raise DataError("got the end of an episode before its first action")
            obs = self._read_obs(tick.obs)
            action = None if over else self._read_action(tick.action)
        except (msgspec.DecodeError, DataError, RecursionError, UnicodeDecodeError) as e:
            raise malformed(f'expected {{"obs": ..., "action": ..., "reward": ...}}: {e}') from None
        if self._obs:
            self._rewards.append(tick.reward)
        self._obs.append(obs)
        if over:
            self._finish(tick.terminated)
            return b"{}"
        self._actions.append(action)
        return b'{"action":' + bytes(tick.action) + b"}"  # type: ignore[arg-type]

    def end(self, data: bytes) -> bytes:
        if self._actions:
            del self._actions[-1]  # nobody saw what came of it
        self._finish(False)
        return b"{}"

    def lost(self) -> None:
        self.end(b"")

    def _finish(self, terminated: bool) -> None:
        n = len(self._actions)
        if n:
            last = np.arange(n) == n - 1
            episode: Episode = {
                "obs": tree.stack(self._obs),
                "action": tree.stack(self._actions),
                "reward": np.array(self._rewards, np.float32),
                "terminated": last & terminated,
                "truncated": last & (not terminated),
            }
            self._writer.write(episode)
        self._clear()
