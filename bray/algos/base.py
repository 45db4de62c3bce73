"""What the pages in this folder share: no algorithm, only glue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass
class Update:
    """What `Learner.update` returns: numbers for the log, and new priorities for a prioritized replay.

    The numbers stay one tensor until somebody reads `metrics`: an update of a small network is shorter than reading them."""

    names: tuple[str, ...]
    values: Tensor
    priorities: np.ndarray | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return dict(zip(self.names, self.values.tolist(), strict=True))


def to_torch(batch: Any, device: torch.device) -> Any:
    """A tree of numpy arrays as tensors on a device; on the CPU they share memory."""
    if device.type == "cpu":
        return tree.map(torch.from_numpy, batch)
    return tree.map(lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True), batch)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    dtype = PRECISIONS[precision]
    # Weight caching would keep casts of old weights inside a recording.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


def actor_critic(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """dist `[N, P]`, value `[N]` and the batch's columns as rows `[N, ...]`, whether the Model is recurrent or not."""
    if "first" not in batch:
        outputs = model(batch["obs"])
        return outputs["dist"].float(), outputs["value"].float(), batch
    outputs = model.unroll(batch["obs"], batch["state"], batch["first"])
    rows = {
        k: v.flatten(1) if k == "floats" else v.flatten(0, 1)
        for k, v in batch.items()
        if k not in ("obs", "state", "first")
    }
    return outputs["dist"].flatten(0, 1).float(), outputs["value"].flatten().float(), rows


def flat_obs(batch: dict[str, Any]) -> Any:
    """The observations of rows `[N, ...]`, also where the batch holds sequences `[L, S, ...]`."""
    return tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch["obs"]) if "first" in batch else batch["obs"]


def minibatches(rng: np.random.Generator, rows: int, pieces: int) -> Iterator[np.ndarray]:
    """A random order of the rows, cut into equal pieces; up to `pieces - 1` rows are left out of one pass so that shapes stay fixed."""
    order = rng.permutation(rows)
    size = max(1, rows // pieces)
    for i in range(min(pieces, rows)):
        yield order[i * size : (i + 1) * size]


def explained_variance(value: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    """1 - Var(target - value) / Var(target) over the rows that count; 0 where the targets do not vary."""
    value, target = value[weight > 0], target[weight > 0]
    variance = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / variance if variance > 1e-12 else 0.0


def save_learner(learner: Any) -> dict[str, Any]:
    """Model, optimizers, targets, counters and random state of a Learner. Attributes are found by their `state_dict`."""
    parts = {}
    for name, part in vars(learner).items():
        if name != "model" and hasattr(part, "state_dict"):
            parts[name] = {k: v.detach().cpu().numpy().copy() for k, v in part.state_dict().items()}
        elif isinstance(part, Tensor):
            parts[name] = {"": part.detach().cpu().numpy().copy()}
    return {"parts": parts, "rng": learner.rng.bit_generator.state, "steps": learner.steps}


def load_learner(learner: Any, state: dict[str, Any]) -> None:
    """The inverse of `save_learner`; the Model's weights are loaded by its owner."""
    for name, values in state["parts"].items():
        part = getattr(learner, name)
        if isinstance(part, Tensor):
            with torch.no_grad():
                part.copy_(torch.as_tensor(values[""]))
        else:
            part.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in values.items()})
    learner.rng.bit_generator.state = state["rng"]
    learner.steps = int(state["steps"])
