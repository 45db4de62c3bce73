"""What the launch file of `benchmarks.same_weights` names: a model with a seed, a source that reads trajectory files in
their order, a trainer of our own.

It is copied beside each run, because the other tree need not have it. `rows_of` alone knows Bray's inside: what agents
push.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bray
from bray import tree
from bray.data.piece import Piece
from bray.data.rows import to_samples
from bray.rl import losses

OBS, ACTIONS = 6, 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.dist, self.value = nn.Linear(64, ACTIONS), nn.Linear(64, 1)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        x = self.body(obs)
        return {"dist": self.dist(x), "q": self.dist(x), "value": self.value(x).squeeze(-1)}


def build_model(name: str, config: dict[str, Any]) -> tuple[nn.Module, tuple[np.ndarray, ...]]:
    torch.manual_seed(config["game"]["seed"])
    return Network(), (np.zeros((1, OBS), np.float32),)


def build_source(name: str, config: dict[str, Any]) -> list[Rows]:
    return [Rows(config["game"]["files"])]


class Rows:
    """The rows of trajectory files, again and again, as an agent would have pushed them."""

    def __init__(self, files: str):
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        stream = steps = 0
        while True:
            for episode in bray.EpisodeReader(self.files):
                stream += 1
                steps += len(episode["reward"])
                yield from rows_of(episode, stream, steps)


def rows_of(episode: Any, stream: int, steps: int) -> Iterator[Any]:
    """An episode of game `stream`, after which there have been `steps` environment steps."""
    count, obs = len(episode["reward"]), episode["obs"]
    piece = Piece(
        obs=obs[:, None],
        action=episode["action"][:, None],
        reward=episode["reward"][:, None],
        terminated=episode["terminated"][:, None],
        truncated=episode["truncated"][:, None],
        valid=np.ones((count, 1), bool),
        first=(np.arange(count + 1) == 0)[:, None],
        outputs={"value": obs.sum(-1)[:, None]},
        extras={"logp": np.full((count, 1), -np.log(ACTIONS), np.float32)},
        stream=np.array([stream]),
    )
    samples = to_samples(piece, origin=1, steps=steps, episodes=((float(episode["reward"].sum()), count),))
    return (tree.index(samples, i) for i in range(count + 1))


class Agent(bray.PolicyAgent):
    pass


class Loss(bray.Trainer):
    """A policy gradient on the rows that PPO's experience prepares."""

    def __init__(self, name: str, config: dict[str, Any], model: nn.Module):
        self.model = model

    def loss(self, replay: Any) -> Tensor:
        out = self.model(replay["obs"])
        logp = losses.select(out["dist"].log_softmax(-1), replay["action"])
        rows = losses.value_loss(out["value"], replay["target"]) - logp * replay["advantage"]
        return torch.dot(replay["weight"], rows) / replay["weight"].sum()
