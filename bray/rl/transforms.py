"""Invertible maps of values, maps of IQN's fractions, noise, and choices as vectors. torch tensors or, where nothing
else is said, numpy arrays, of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""numpy array or torch tensor."""
RISKS = ("neutral", "cpw", "cvar", "pow", "wang")


def rescale(x: Array, eps: float = 1e-3) -> Array:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x: makes large returns small (Pohlen et al. 2018)."""
    return _lib(x).sign(x) * (_lib(x).sqrt(abs(x) + 1.0) - 1.0) + eps * x


def unrescale(x: Array, eps: float = 1e-3) -> Array:
    """The inverse of `rescale`: sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1).

    The root is taken as 2 (|x| + 1 + eps) / (1 + sqrt(...)), which loses no digits where eps is small, and holds for
    eps = 0.
    """
    size = abs(x) + 1.0 + eps
    root = 2.0 * size / (1.0 + _lib(x).sqrt(1.0 + 4.0 * eps * size))
    return _lib(x).sign(x) * (root * root - 1.0)


def symlog(x: Array) -> Array:
    """sign(x) log(|x| + 1) (Hafner et al. 2023)."""
    return _lib(x).sign(x) * _lib(x).log1p(abs(x))


def symexp(x: Array) -> Array:
    """The inverse of `symlog`: sign(x) (exp(|x|) - 1)."""
    return _lib(x).sign(x) * _lib(x).expm1(abs(x))


def ornstein_uhlenbeck(
    x: Array, noise: Array, mu: float = 0.0, sigma: float = 0.3, theta: float = 0.15, dt: float = 0.01
) -> Array:
    """The next value of noise that remembers (Uhlenbeck and Ornstein 1930; Lillicrap et al. 2016): x + theta (mu - x)
    dt + sigma sqrt(dt) n, for standard normal `noise` n of the shape of x. In the long run its standard deviation is
    about sigma / sqrt(2 theta)."""
    return x + theta * dt * (mu - x) + sigma * dt**0.5 * noise


def gumbel_softmax(logits: Tensor, noise: Tensor, temperature: float = 1.0) -> Tensor:
    """A draw from softmax(logits) as a one-hot vector `[..., N]`, with the gradient of softmax((logits + noise) /
    temperature): straight through (Jang et al. 2017). `noise`: Gumbel numbers. Choices with a logit far below the
    others are never drawn."""
    soft = ((logits + noise) / temperature).softmax(-1)
    return one_hot(soft.argmax(-1), soft.shape[-1]) - soft.detach() + soft


def one_hot(action: Tensor, n: int) -> Tensor:
    """Choices `[...]` as floats `[..., n]`. PyTorch's own looks at the values, so that it cannot be recorded."""
    return torch.zeros(*action.shape, n, device=action.device).scatter_(-1, action.long().unsqueeze(-1), 1.0)


def distort(tau: Array, risk: str, eta: float = 0.71) -> Array:
    """Fractions tau in [0, 1] as an attitude to risk sees them (Dabney et al. 2018, IQN, section 3.1); [0, 1] onto a
    part of itself.

    neutral: tau. cpw (cumulative probability weighting): tau^eta / (tau^eta + (1 - tau)^eta)^(1/eta). cvar: eta tau,
    the worst part eta of all outcomes. pow: tau^(1 / (1 + eta)) for eta >= 0 (seeks risk), 1 - (1 - tau)^(1 / (1 -
    eta)) below (avoids it).
    wang: Phi(Phi^-1(tau) + eta).
    """
    if risk == "neutral":
        return tau
    if risk == "cpw":
        up, down = tau**eta, (1.0 - tau) ** eta
        return up / (up + down) ** (1.0 / eta)
    if risk == "cvar":
        return eta * tau
    if risk == "pow":
        power = 1.0 / (1.0 + abs(eta))
        return tau**power if eta >= 0 else 1.0 - (1.0 - tau) ** power
    if risk == "wang":
        x = torch.as_tensor(tau)
        shifted = torch.special.ndtr(torch.special.ndtri(x) + eta)
        return shifted.numpy() if isinstance(tau, np.ndarray) else shifted
    raise ValueError(f"risk should be one of {', '.join(RISKS)}, got {risk!r}")


def _lib(x: Array) -> Any:
    return np if isinstance(x, np.ndarray) else torch
