"""Engines: `forward(obs[, state]) -> dict of arrays` over a Model, whatever executes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bray import tree
from bray.capture import capture


def is_recurrent(model: nn.Module) -> bool:
    """Whether a Model takes and returns a state."""
    return bool(getattr(model, "recurrent", False))


class TorchEngine:
    """The Model itself, recorded (`bray.capture`) per batch size. It reads the Model's own parameters, so a learner's in-place
    updates are seen at once."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...] | None = None, record: bool = True):
        self.model = model
        self.outputs = outputs
        self.device = next(model.parameters()).device
        self._on_cpu = self.device.type == "cpu"
        self._captured = capture(self._forward, enabled=record)
        self._programs: dict[int, Any] = {}

    def _forward(self, *args: Any) -> dict[str, Any]:
        with torch.no_grad():
            out = self.model(*args)
        return out if self.outputs is None else {k: out[k] for k in self.outputs}

    def forward(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """A batch of observations (and recurrent states) -> outputs, all numpy."""
        if state is None and isinstance(obs, np.ndarray):  # the common case, and the one where microseconds count
            batch, flat = obs.shape[0], [torch.from_numpy(obs)]
        else:
            flat = [torch.from_numpy(x) for x in tree.leaves(obs if state is None else (obs, state))]
            batch = flat[0].shape[0]
        if not self._on_cpu:
            flat = [x.to(self.device, non_blocking=True) for x in flat]
        if batch not in self._programs:
            structure = pytree.tree_structure((obs,) if state is None else (obs, state))
            program = self._captured.program(flat, structure) if self._captured.enabled else None
            self._programs[batch] = (program, structure, _structure(program))
        program, structure, names = self._programs[batch]
        if program is None:
            out = self._forward(*pytree.tree_unflatten(flat, structure))
            return tree.map(_numpy, out)
        values = program.run(flat)
        if names is not None:
            if self._on_cpu:
                return {k: x.numpy() for k, x in zip(names, values, strict=True)}
            return {k: _numpy(x) for k, x in zip(names, values, strict=True)}
        return tree.map(_numpy, pytree.tree_unflatten(values, program.out_structure))

    def parameters_read(self, obs: Any, state: Any = None) -> int | None:
        """How many numbers of the Model the asked-for outputs depend on; None when the forward could not be recorded."""
        self.forward(obs, state)
        program = self._programs[len(tree.leaves(obs)[0])][0]
        return None if program is None else sum(x.numel() for x in program.tape.held.values())


def _structure(program: Any) -> list[str] | None:
    """The names of a flat dict of outputs, None for deeper ones."""
    if program is None or any(not s.is_leaf() for s in program.out_structure.children()):
        return None
    return list(program.out_structure.context)


def _numpy(x: Tensor) -> np.ndarray:
    return x.numpy(force=True)
