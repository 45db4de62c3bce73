"""Trying a recording: it must do what the function does, on inputs other than those it was made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bray.capture.replay import Replay
from bray.capture.tape import NotRecordable, Snapshot, equal, generators_of

_CHECK_SEED = 0x5EED


class Subject:
    """The function that is recorded, with what it was found to read and write."""

    def __init__(self, fn: Callable[..., Any], structure: Any):
        self.fn, self.structure = fn, structure
        self.out_structure: Any = None
        self.outside: list[Tensor] = []

    def call(self, flat: list[Tensor]) -> Any:
        return self.fn(*pytree.tree_unflatten(flat, self.structure))

    def compare(self, replay: Replay, calls: list[list[Tensor]]) -> None:
        """The recording against the function: results and side effects of calls in a row. NotRecordable where they
        differ."""
        calls = [[x.clone() for x in flat] for flat in calls]  # others may write to memory that the inputs share
        expected = self._outcome(lambda flat: pytree.tree_leaves(self.call(flat)), calls)
        got = self._outcome(replay, calls)
        if len(expected) != len(got):
            raise NotRecordable("the function returns another number of tensors for other inputs")
        for e, g in zip(expected, got, strict=True):
            if e.dtype != g.dtype or e.shape != g.shape:
                raise NotRecordable("the recording's results have other shapes or types than the function's")
            if not torch.allclose(e, g, **_tolerance(e), equal_nan=True):
                worst = (e.double() - g.double()).abs().max().item()
                raise NotRecordable(f"the recording's results differ from the function's by up to {worst:.3g}")

    def _outcome(self, run: Replay, calls: list[list[Tensor]]) -> list[Tensor]:
        """What calls return and leave behind: in the tensors from outside, in their inputs and in the generators.
        Random numbers are others than in the recording run, so that one that was frozen there shows. Afterwards all is
        as before."""
        generators = generators_of(calls[0])
        before = Snapshot(self.outside, generators)
        for g in generators:
            g.manual_seed(_CHECK_SEED)
        out: list[Tensor] = []
        try:
            for flat in calls:
                inputs = [x.clone() for x in flat]  # it may write to them
                out += [x.detach().clone() for x in run(inputs)] + inputs
            out += [x.detach().clone() for x in self.outside] + [g.get_state() for g in generators]
        finally:
            before.restore()
        return out


def _tolerance(x: Tensor) -> dict[str, float]:
    """Two calls of one function on a GPU may differ by the rounding of TF32: cuDNN chooses among algorithms that add in
    another order."""
    if x.is_cuda and torch.backends.cudnn.allow_tf32 and x.is_floating_point():
        largest = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
        return {"rtol": 1e-2, "atol": 1e-3 * max(1.0, largest)}
    return {"rtol": 1e-3, "atol": 1e-4}


def other_values(x: Tensor) -> Tensor:
    """An input like this one, with other values: rows reversed, real numbers a bit smaller. Where rows are all alike
    real numbers are scaled and shifted, truth values changed in every other place. Whole numbers may be indices, so
    they stay within their column."""
    flipped = x.flip(0) if x.dim() else x
    varied = not equal(flipped, x)
    if x.is_floating_point():
        ramp = torch.linspace(0.05, 0.25, x.numel(), device=x.device).reshape(x.shape)
        return (flipped * 0.97 if varied else x * 0.75 + ramp).to(x.dtype)
    if x.dtype == torch.bool and not varied:
        return x ^ (torch.arange(x.numel(), device=x.device).reshape(x.shape) % 2 == 0)
    return flipped
