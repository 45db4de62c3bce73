"""The agent's side of a game: it answers ticks with the model's choice, and turns what happened into samples."""

from __future__ import annotations

from typing import Any

import numpy as np

import bray

from .gamecore import HEAD

GAMMA, LAMBDA = 0.99, 0.95
LENGTH = 128  # ticks that make one piece of a game


class AtariActor(bray.Actor):
    """One game. Without a buffer it plays its best; with one it explores, and pushes samples."""

    def __init__(self, model: str, buffer: str | None = None, shape: tuple[int, ...] = (4, 42, 42)):
        self.model = bray.RemoteModel(model)
        self.buffer = None if buffer is None else bray.RemoteBuffer(buffer)
        self.shape = shape
        self.rng = np.random.default_rng()

    def start(self, session: str, data: bytes) -> None:
        self.rows: list[dict[str, Any]] = []
        self.total = 0.0

    async def tick(self, data: bytes) -> bytes:
        obs, reward, _, _ = self.read(data)
        value, logits = await self.model.forward(obs)
        self.reward(reward, value)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        action = p.argmax() if self.buffer is None else self.rng.choice(len(p), p=p)
        self.rows.append({"obs": obs, "action": np.int64(action), "logp": np.log(p[action]), "value": value})
        return b"%d" % action

    async def end(self, data: bytes) -> None:
        """The game's last words: the reward of the last action, and how it ended."""
        if not data:  # a game that broke off
            return
        obs, reward, terminated, _ = self.read(data)
        after = 0.0 if terminated else (await self.model.forward(obs))[0]
        if self.rows:
            self.reward(reward, after, over=True)
        bray.merge("episode_return", self.total)

    def read(self, data: bytes) -> tuple[np.ndarray, float, bool, bool]:
        obs = np.frombuffer(data, np.uint8, offset=HEAD.size).reshape(self.shape)
        return obs.copy(), *HEAD.unpack_from(data)  # what came from the network cannot be written to

    def reward(self, reward: float, after: float, over: bool = False) -> None:
        """The reward of the last row has come, and the value of what came after it."""
        if not self.rows:
            return
        self.total += reward
        self.rows[-1]["reward"] = (
            np.sign(reward) if abs(reward) >= 1.0 else reward
        )  # Atari's scores differ by a factor of thousands
        if self.buffer is not None and (over or len(self.rows) == LENGTH):
            self.buffer.push(*samples(self.rows, float(after)))
        if over or len(self.rows) == LENGTH:
            self.rows = []


def samples(rows: list[dict[str, Any]], after: float) -> list[dict[str, Any]]:
    """Generalised advantages (Schulman et al. 2016) of rows that follow each other; `after` is the value of what
    follows the last."""
    out = []
    advantage = 0.0
    for row in reversed(rows):
        advantage = row["reward"] + GAMMA * after - row["value"] + GAMMA * LAMBDA * advantage
        after = row["value"]
        sample = {name: row[name] for name in ("obs", "action", "logp")}
        out.append({**sample, "advantage": np.float32(advantage), "target": np.float32(advantage + row["value"])})
    return out[::-1]
