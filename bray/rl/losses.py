"""Terms of the losses, in torch. Each returns one number per sample; a dot product with the weights makes it a loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ppo_clip(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), r = pi/pi_old (Schulman et al. 2017), and r. Dual clip (Ye et al. 2020): at least c A where A < 0.

    Only one side of the clip can be the minimum, 1 + clip where A > 0 and 1 - clip where A < 0: min(r A, A + clip |A|). A `where`
    on constants has a third of the backward operations of `minimum` and `clamp`.
    """
    ratio = (logp - logp_old).exp()
    gain, bound = ratio * advantage, advantage + clip * advantage.abs()
    objective = torch.where(gain < bound, gain, bound)
    if dual_clip is not None:
        objective = torch.where(advantage < 0.0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective, ratio


def value_loss(value: Tensor, target: Tensor, value_old: Tensor | None = None, clip: float | None = None) -> Tensor:
    """(V - R)^2 / 2, or the larger of that and the same with V clipped to V_old +- clip."""
    loss = (value - target).square()
    if clip is not None:
        assert value_old is not None
        clipped = value_old + (value - value_old).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - target).square())
    return 0.5 * loss


def td_error(q: Tensor, reward: Tensor, discount: Tensor, q_next: Tensor) -> Tensor:
    """q - (r + discount q'), the target without gradient; with n-step samples, r is their sum and discount gamma^n or 0."""
    return q - (reward + discount * q_next).detach()


def huber(x: Tensor, delta: float | None = 1.0) -> Tensor:
    """x^2/2 near zero, delta (|x| - delta/2) beyond delta; without a delta x^2/2 everywhere."""
    if delta is None:
        return 0.5 * x.square()
    return F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def select(q: Tensor, action: Tensor) -> Tensor:
    """q[b, action[b]]: `[B, N]` and `[B]` -> `[B]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
