"""Imitation: make the demonstrated moves likely."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import bray


class Trainer1(bray.Trainer):
    def __init__(self, name: str, config: dict[str, Any], model: nn.Module):
        """
        Args:
            name: the trainer's name in the launch file; `config[name]` is its section.
            config: the whole file.
            model: what is trained. Its device and its weights are the trainer's business, not ours.
        """
        self.model = model

    def handle(self, replay: bray.NestedArray) -> bray.NestedArray:
        """What a batch goes through before `loss` and `eval` see it."""
        return {"obs": replay["obs"], "action": replay["action"]}

    def loss(self, replay: bray.NestedArray) -> Tensor:
        """The number whose gradient is followed."""
        loss = F.cross_entropy(self.model(replay["obs"])["dist"], replay["action"])
        bray.merge("loss/imitation", loss)
        return loss

    def eval(self, replay: bray.NestedArray) -> None:
        """Called with batches of the eval buffer, without gradients."""
        dist = self.model(replay["obs"])["dist"]
        bray.merge("eval/loss", F.cross_entropy(dist, replay["action"]))
        bray.merge("eval/accuracy", (dist.argmax(-1) == replay["action"]).float().mean())
