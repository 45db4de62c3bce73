"""Imitation and reinforcement together: batches come from two buffers, and each is learnt from in its own way. The
weight of imitation fades: demonstrations show the way, and the games that are played show a better one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bray
from bray.rl import losses
from template.trainers import sl_trainer

CLIP, VALUE_COEF, ENTROPY_COEF = 0.2, 0.5, 0.003


class Trainer1(bray.Trainer):
    def __init__(self, name: str, config: dict[str, Any], model: nn.Module):
        self.model = model
        self.imitation = sl_trainer.Trainer1(name, config, model)
        self.fade_steps = config["demonstrations"]["fade_steps"]

    def handle(self, replay: bray.NestedArray) -> bray.NestedArray:
        return replay if "advantage" in replay else self.imitation.handle(replay)

    def loss(self, replay: bray.NestedArray, step: int) -> Tensor:
        if "advantage" in replay:
            return self.reinforcement(replay)
        weight = 1.0 if self.fade_steps is None else max(0.0, 1.0 - step / self.fade_steps)
        bray.merge("loss/imitation_weight", weight)
        return weight * self.imitation.loss(replay)

    def reinforcement(self, replay: bray.NestedArray) -> Tensor:
        """PPO's loss of a batch of rows that agents pushed. Rows of weight 0 are final observations: nothing was
        decided there."""
        outputs = self.model(replay["obs"])
        weight = replay["weight"] / replay["weight"].sum()
        mean = torch.dot(weight, replay["advantage"])
        deviation = torch.dot(weight, (replay["advantage"] - mean) ** 2).sqrt()
        advantage = (replay["advantage"] - mean) / (deviation + 1e-8)
        logp_all = outputs["dist"].log_softmax(-1)
        logp = losses.select(logp_all, replay["action"])
        policy_loss, _ = losses.ppo_clip(logp, replay["logp"], advantage, CLIP)
        value_loss = losses.value_loss(outputs["value"], replay["target"])
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        for name, rows in (("policy", policy_loss), ("value", value_loss), ("entropy", entropy)):
            bray.merge(f"loss/{name}", torch.dot(weight, rows))
        return torch.dot(weight, policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy)

    def eval(self, replay: bray.NestedArray) -> None:
        self.imitation.eval(replay)
