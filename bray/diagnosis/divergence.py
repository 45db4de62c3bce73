"""Whether a training is sound. Numbers that are not finite end it, with what and since when; what else looks wrong is
said (`bray.diagnosis.symptoms`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from bray import tree
from bray.errors import Diverged
from bray.metrics import ENV_STEPS, ITERATION, short
from bray.metrics.rows import without_side

_ADVICE = "Lower the learning rate (lr), or clip gradients (max_grad_norm) and rewards (clip_rewards)"


def not_finite(arrays: Mapping[str, Any], constants: Collection[str] = ()) -> str:
    """Which weights are not finite, in words; empty where all are. A buffer (`constants`) may hold infinities: a mask
    does."""
    bad: list[str] = []
    lost = total = 0
    for name, x in arrays.items():
        x = np.asarray(x)
        if x.dtype.kind != "f":
            continue
        count = int(np.count_nonzero(np.isnan(x) if name in constants else ~np.isfinite(x)))
        total += x.size
        if count:
            lost += count
            bad.append(name)
    if not bad:
        return ""
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"{lost:,} of {total:,} weights ({', '.join(bad[:3])}{more})"


def blame_policy(error: BaseException, actions: Any) -> None:
    """Raise Diverged where environments failed at actions that are not finite: that is not their fault."""
    if not isinstance(error, Exception):
        return
    for _, x in tree.paths(actions):
        x = np.asarray(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            i = int(np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))[0])
            raise Diverged(f"the action that the policy chose for environment {i} is {x[i]}") from error


class Health:
    """Looks at every result row of a run."""

    def __init__(self) -> None:
        self._good: Mapping[str, Any] = {}  # the last row whose numbers were finite

    def check(self, row: Mapping[str, Any], weights: Callable[[], str]) -> None:
        """Raise Diverged where a loss is not finite, or another number of the learner is not because of its weights;
        `weights()` says which are not."""
        of_updates = {k: v for k, v in row.items() if without_side(k).startswith("loss/")}
        bad = {k: v for k, v in of_updates.items() if v is not None and not math.isfinite(v)}
        if bad:
            lost = weights()
            if lost or any("loss" in without_side(k).removeprefix("loss/") for k in bad):
                numbers = ", ".join(f"{k} is {v}" for k, v in bad.items())
                raise self.diverged(f"{numbers}; {lost} are not finite" if lost else numbers, row)
            return
        self._good = row

    def cause(self, error: Exception, lost: str) -> Diverged | None:
        """What to tell in place of an error that came of actions or weights that are not finite: whoever met them first
        is not to blame."""
        what = [str(error)] if isinstance(error, Diverged) else []
        what += [f"{lost} are not finite"] if lost else []
        return self.diverged("; ".join(what)) if what else None

    def diverged(self, what: str, row: Mapping[str, Any] | None = None) -> Diverged:
        """The error for the user: what is not finite, since when, what to do."""
        good, since = self._good, ""
        if good:
            since = f"after iteration {good[ITERATION]} ({short(good[ENV_STEPS])} environment steps) all was finite"
            if row is not None:
                since = f"since iteration {row[ITERATION]} ({short(row[ENV_STEPS])} environment steps); {since}"
        elif row is not None:
            since = f"since the first iteration ({short(row[ENV_STEPS])} environment steps)"
        return Diverged(
            f"training has diverged: {what}{', ' + since if since else ''}. The last good checkpoint stays the "
            f"latest. {_ADVICE}, and go on from it: bray train --resume, or the same bray launch again."
        )
