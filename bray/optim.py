"""The optimizer: gradients, clipping and the update on one flat array of all parameters.

One array means one norm, one Adam step and (with several learners) one all-reduce, whatever the number of layers. The
whole step is made of tensor operations that change tensors in place, so a Learner can record it (`bray.capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from bray.errors import CheckpointError, ConfigError, UnknownName

KINDS = ("adam", "rmsprop", "sgd")
_PARTS = 36
"""Arrays that one launch of CUDA's Adam takes. It gives up to 65,536 numbers of an array to a block of threads, of
which a GPU runs hundreds at once."""
_LAUNCHES = 4
"""Launches for a large array. A recording runs them at the same time (`bray.capture.replay`)."""
_SMALL_PART = 4096
"""Numbers; parts are a multiple of it: Adam reads four numbers at a time where an array begins at a multiple of
four."""
_LARGE = 1 << 18
"""Numbers of a gradient that is copied to its place; `torch.cat` is slow for such among small ones: 20 us in place of
10 for 1.7 million on an H200."""


class Optimizer:
    """Adam (Kingma & Ba 2015; decoupled weight decay as in AdamW), RMSprop or plain SGD over flat parameters.

    `params` become views of one array. `lr` is a tensor: `set_lr` changes it without a new recording."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        *,
        kind: str = "adam",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        ignore_grad_norm: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        if kind not in KINDS:
            raise UnknownName("optimizer", kind, KINDS)
        if not lr >= 0:
            raise ConfigError(f"lr: expected a number >= 0, got {lr}")
        self.params = list(dict.fromkeys(params))  # a tied parameter counts once
        if not self.params:
            raise ValueError("an optimizer needs at least one parameter")
        self.kind, self.max_grad_norm, self.max_grad_value = kind, max_grad_norm, max_grad_value
        self.ignore_grad_norm = ignore_grad_norm
        """A gradient beyond this norm is taken for zero; None = none is."""
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.flat = flatten_parameters(self.params)
        # float64, because 1 - 0.999**1 in float32 is wrong in the fifth digit
        self.lr = torch.tensor(float(lr), device=self.flat.device, dtype=torch.float64)
        self._lr = float(lr)  # what the tensor holds
        self.steps = torch.zeros((), device=self.flat.device, dtype=torch.float64)
        self.m = torch.zeros_like(self.flat) if kind == "adam" else torch.zeros(0)
        self.v = torch.zeros_like(self.flat) if kind != "sgd" else torch.zeros(0)
        self.average: Callable[[Tensor], Tensor | None] | None = None
        """Where several ranks train together: the mean of their gradients; None where a rank has ended its update, so
        that there is none."""

        self.extra: Callable[[], Tensor] | None = None
        """What is added to every loss, while it is set."""

    def set_lr(self, lr: float) -> None:
        if lr != self._lr:
            self.lr.fill_(lr)
            self._lr = lr

    def step(self, loss: Tensor) -> Tensor:
        """One step down the gradient of `loss`; returns the gradient's norm before clipping."""
        if self.extra is not None:
            loss = loss + self.extra()
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        pairs = zip(self.params, grads, strict=True)
        return self.apply(_joined([p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in pairs]))

    @torch.no_grad()
    def apply(self, grad: Tensor) -> Tensor:
        """One step with a flat gradient; returns its norm before clipping."""
        if self.average is not None:
            mean = self.average(grad)
            if mean is None:
                return torch.linalg.vector_norm(grad)
            grad = mean
        norm = torch.linalg.vector_norm(grad)
        if self.ignore_grad_norm is not None:
            grad = torch.where(norm <= self.ignore_grad_norm, grad, 0.0)
        if self.max_grad_norm is not None:
            grad = grad * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        if self.max_grad_value is not None:
            grad = grad.clamp(-self.max_grad_value, self.max_grad_value)
        self.steps.add_(1.0)
        if self.weight_decay:
            self.flat.mul_((1.0 - self.lr * self.weight_decay).to(self.flat.dtype))
        beta1, beta2 = self.betas
        if self.kind == "adam":  # one kernel in place of twenty
            on_gpu = self.flat.is_cuda
            size = -(-len(grad) // (_LAUNCHES * _PARTS * _SMALL_PART)) * _SMALL_PART
            arrays = (self.flat, grad, self.m, self.v)
            parts = list(zip(*(x.split(size) for x in arrays), strict=True)) if on_gpu else [arrays]
            steps, lr = (x.float() if on_gpu else x for x in (self.steps, self.lr))  # the CPU reads float64 as it is
            for i in range(0, len(parts), _PARTS):
                params, grads, m, v = zip(*parts[i : i + _PARTS], strict=True)
                torch._fused_adam_(
                    params,
                    grads,
                    m,
                    v,
                    [],
                    [steps] * len(params),
                    lr=lr,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=0.0,
                    eps=self.eps,
                    amsgrad=False,
                    maximize=False,
                )
        elif self.kind == "rmsprop":
            self.v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            self.flat.sub_(self.lr.to(grad.dtype) * grad / (self.v.sqrt() + self.eps))
        else:
            self.flat.sub_(self.lr.to(grad.dtype) * grad)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        return {"m": self.m, "v": self.v, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, mine in self.state_dict().items():
            given = torch.as_tensor(state[name])
            if given.shape != mine.shape:
                raise CheckpointError(
                    f"optimizer state {name!r} has shape {tuple(given.shape)}, this model needs {tuple(mine.shape)}: "
                    "the checkpoint belongs to another network"
                )
            mine.copy_(given)
        self._lr = float(self.lr)


@torch.no_grad()
def flatten_parameters(params: list[nn.Parameter]) -> Tensor:
    """Move the parameters into one array and make each a view of it; values stay."""
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    at = 0
    for p in params:
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


def _joined(parts: list[Tensor]) -> Tensor:
    """`torch.cat`, on a GPU with large parts copied to their places and the small ones between them joined first."""
    if not parts[0].is_cuda or all(len(x) < _LARGE for x in parts):
        return torch.cat(parts)
    out = parts[0].new_empty(sum(len(x) for x in parts))
    at = 0
    for is_large, run in groupby(parts, lambda x: len(x) >= _LARGE):
        for x in run if is_large else [torch.cat(list(run))]:
            out[at : at + len(x)].copy_(x)
            at += len(x)
    return out


def without_conflicts(gradients: Tensor, order: Tensor | None = None) -> Tensor:
    """PCGrad (Yu et al. 2020): the sum of the gradients of K tasks `[K, P]` -> `[P]`, each without its part against the
    others. Where two point against each other (g . h < 0), g loses its projection on h. `order [K]`: in which the
    others are gone through; the paper draws it."""
    count = len(gradients)
    others = range(count) if order is None else order.tolist()
    out = []
    for i in range(count):
        g = gradients[i]
        for j in others:
            if j != i:
                h = gradients[j]
                g = g - (torch.dot(g, h) / torch.dot(h, h).clamp(min=1e-30)).clamp(max=0.0) * h
        out.append(g)
    return torch.stack(out).sum(0)
