"""What ranks that train together say to each other inside a Learner: one operation, which a recording may hold.

While a function is recorded, or a recording is compared with it, a rank is by itself: how often that happens is its own
affair, and the others would wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("bray", "DEF")
_library.define("mean_over_ranks(Tensor x) -> Tensor")
_mean: Callable[[Tensor], Tensor] | None = None
_alone = 0


def _run(x: Tensor) -> Tensor:
    return x.clone() if _mean is None or _alone else _mean(x)


_library.impl("mean_over_ranks", _run, "CompositeExplicitAutograd")


def mean_over_ranks(x: Any) -> Any:
    """On every rank the mean of what all of them give here, an array (the result is a new one) or a number. All ranks
    call it equally often."""
    if isinstance(x, Tensor):
        return torch.ops.bray.mean_over_ranks(x)
    return float(torch.ops.bray.mean_over_ranks(torch.tensor(float(x), dtype=torch.float64)))


def by_itself(x: Any) -> Any:
    """In place of `mean_over_ranks` where nobody trains together."""
    return x


def talk_by(mean: Callable[[Tensor], Tensor]) -> None:
    """`mean` makes a new array, the mean of those of all ranks. A process belongs to one group of them."""
    global _mean
    _mean = mean


@contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing is asked of other ranks."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1
