"""Action distributions over a `spec.ActionLayout`, in torch, for losses.

`dist` is `[..., layout.num_params]`; `action` is int64 `[...]` for a single Discrete, else `[..., layout.size]` with choices
as indices (floats in mixed spaces); `mask` is bool `[..., layout.num_logits]`, the choices of all categorical parts in order.
A masked choice has probability exactly 0 and no gradient; its logit becomes -1e9, not -inf, so that entropies stay finite.
A row with every choice masked (a dead row) counts as uniform.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bray.spec import ACTION_MASK, ActionLayout, ActionPart

NEVER = -1e9
_LOG_2PI = math.log(2.0 * math.pi)


def log_prob(layout: ActionLayout, dist: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log probability (density for Gaussian parts) of flat actions: `[...]`."""
    return _log_prob(layout, dist, action, _log_softmaxes(layout, dist, mask))


def entropy(layout: ActionLayout, dist: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy in nats (differential for Gaussian parts): `[...]`."""
    return _entropy(layout, dist, _log_softmaxes(layout, dist, mask))


def log_prob_entropy(
    layout: ActionLayout, dist: Tensor, action: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both at the price of one softmax, for losses that need both."""
    logs = _log_softmaxes(layout, dist, mask)
    return _log_prob(layout, dist, action, logs), _entropy(layout, dist, logs)


def kl(layout: ActionLayout, dist_p: Tensor, dist_q: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(p || q): `[...]`; the mask holds for both."""
    terms = [
        (p.exp() * (p - q)).sum(-1)
        for p, q in zip(_log_softmaxes(layout, dist_p, mask), _log_softmaxes(layout, dist_q, mask), strict=True)
    ]
    if _uniform(layout):
        return terms[0].sum(-1)
    for part in _gaussians(layout):
        mean_p, log_std_p = _gaussian(dist_p, part)
        mean_q, log_std_q = _gaussian(dist_q, part)
        ratio = torch.exp(2.0 * (log_std_p - log_std_q))
        distance = ((mean_p - mean_q) * torch.exp(-log_std_q)).square()
        terms.append((log_std_q - log_std_p + 0.5 * (ratio + distance - 1.0)).sum(-1))
    return _total(terms)


def mode(layout: ActionLayout, dist: Tensor, mask: Tensor | None = None) -> Tensor:
    """The most likely flat action: best choices (unmasked), means of Gaussian parts."""
    choices = _logits(layout, dist, mask)
    if layout.single or _uniform(layout):
        return choices[0].argmax(-1)
    rest = iter(choices)
    columns = [
        next(rest).argmax(-1, keepdim=True) if part.kind == "categorical" else _gaussian(dist, part)[0]
        for part in layout.parts
    ]
    return torch.cat([c if layout.discrete else c.to(dist.dtype) for c in columns], -1)


def squashed_sample(dist: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A sample of tanh(N(mean, std)) and its log probability, differentiable (SAC).

    `dist [..., 2D]`: mean, then log_std; `noise [..., D]`: standard normal. Returns the action in [-1, 1] `[..., D]` and its
    log density `[...]`. log(1 - tanh(u)^2) is taken as 2 (log 2 - u - softplus(-2u)), which is exact for large u as well.
    """
    mean, log_std = dist.chunk(2, -1)
    u = torch.addcmul(mean, log_std.exp(), noise)
    per_dim = 0.5 * noise.square() + log_std - 2.0 * (u + F.softplus(-2.0 * u))
    return torch.tanh(u), -per_dim.sum(-1) - noise.shape[-1] * (0.5 * _LOG_2PI + 2.0 * math.log(2.0))


def squashed_mode(dist: Tensor) -> Tensor:
    """tanh(mean): the greedy action of SAC."""
    return torch.tanh(dist.chunk(2, -1)[0])


def action_mask(obs: Any) -> Tensor | None:
    """The flat mask in a batch of observation tensors `[B, ...]` as bool `[B, num_logits]`, or None."""
    if not isinstance(obs, dict) or ACTION_MASK not in obs:
        return None
    mask = obs[ACTION_MASK]
    if isinstance(mask, dict):
        mask = list(mask.values())
    if isinstance(mask, (list, tuple)):
        mask = torch.cat([m.flatten(1) for m in mask], 1)
    return mask.flatten(1) > 0.5


# --- parts ------------------------------------------------------------------------------------------------------------


def _gaussians(layout: ActionLayout) -> Iterator[ActionPart]:
    return (part for part in layout.parts if part.kind == "gaussian")


def _gaussian(dist: Tensor, part: ActionPart) -> tuple[Tensor, Tensor]:
    mean, log_std = dist[..., part.param].split(part.n, -1)
    return mean, log_std


def _uniform(layout: ActionLayout) -> bool:
    """Several choices of one size: a single softmax over `[..., K, n]`."""
    return layout.discrete and not layout.single and len({part.n for part in layout.parts}) == 1


def _log_softmaxes(layout: ActionLayout, dist: Tensor, mask: Tensor | None) -> list[Tensor]:
    return [logits.log_softmax(-1) for logits in _logits(layout, dist, mask)]


def _logits(layout: ActionLayout, dist: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Masked logits of the choices of each categorical part; one `[..., K, n]` when all are of one size."""
    if layout.discrete:
        if mask is not None:
            dist = torch.where(mask, dist, NEVER)
        if layout.single:
            return [dist]
        if _uniform(layout):
            return [dist.unflatten(-1, (len(layout.parts), layout.parts[0].n))]
        return list(dist.split([part.n for part in layout.parts], -1))
    out, at = [], 0
    for part in layout.parts:
        if part.kind == "categorical":
            logits = dist[..., part.param]
            if mask is not None:
                logits = torch.where(mask[..., at : at + part.n], logits, NEVER)
            out.append(logits)
            at += part.n
    return out


def _log_prob(layout: ActionLayout, dist: Tensor, action: Tensor, logs: list[Tensor]) -> Tensor:
    if layout.single:
        return logs[0].gather(-1, action.unsqueeze(-1)).squeeze(-1)
    if _uniform(layout):
        return logs[0].gather(-1, action.unsqueeze(-1)).squeeze(-1).sum(-1)
    rest = iter(logs)
    terms = []
    for part in layout.parts:
        if part.kind == "categorical":
            terms.append(next(rest).gather(-1, action[..., part.action].long()).squeeze(-1))
        else:
            mean, log_std = _gaussian(dist, part)
            z = (action[..., part.action] - mean) * torch.exp(-log_std)
            terms.append((-0.5 * z.square() - log_std).sum(-1) - 0.5 * part.n * _LOG_2PI)
    return _total(terms)


def _entropy(layout: ActionLayout, dist: Tensor, logs: list[Tensor]) -> Tensor:
    if _uniform(layout):
        return -(logs[0].exp() * logs[0]).sum((-2, -1))
    terms = [-(x.exp() * x).sum(-1) for x in logs]
    for part in _gaussians(layout):
        terms.append(_gaussian(dist, part)[1].sum(-1) + 0.5 * part.n * (1.0 + _LOG_2PI))
    return _total(terms)


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
