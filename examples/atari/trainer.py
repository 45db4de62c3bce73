"""The training: a function that every rank runs. PPO's loss, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.nn import functional as F

import bray

PASSES = 4  # gradient steps on each batch
CLIP, VALUE_COEF, ENTROPY_COEF = 0.2, 0.5, 0.01


def train_atari(model: str, buffer: str, batch_size: int, weights_publish_interval: int, num_steps: int) -> int:
    """Train until so many steps are made; returns the step. With several ranks each takes its own batches, and
    gradients are averaged."""
    remote_model = bray.RemoteModel(model)
    net = remote_model.get_model()
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    first = ranks == 1 or distributed.get_rank() == 0
    learner = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    batches = bray.BatchBuffer(bray.RemoteBuffer(buffer), batch_size, kind="concate")
    batches = bray.PrefetchBuffer(bray.TorchTensorBuffer(batches), size=1)
    step = 0
    while step < num_steps:
        replay = next(batches)
        for _ in range(PASSES):
            train_step(learner, optimizer, replay)
            step += 1
            if first and step % weights_publish_interval == 0:
                remote_model.publish_weights(bray.get_torch_model_weights(net))
    return step


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, replay: dict[str, torch.Tensor]) -> None:
    value, logits = model(replay["obs"])
    logp_all = logits.log_softmax(-1)
    logp = logp_all.gather(-1, replay["action"].unsqueeze(-1)).squeeze(-1)
    advantage = replay["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (logp - replay["logp"]).exp()
    policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    value_loss = F.mse_loss(value, replay["target"])
    entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
    loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    for name, number in (("loss", loss), ("policy", policy_loss), ("value", value_loss), ("entropy", entropy)):
        bray.merge(f"train/{name}", number.detach())
