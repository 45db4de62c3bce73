"""The Model itself as an engine, on the CPU or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bray import tree
from bray.capture import Record, capture
from bray.capture.transfer import to_device, to_host
from bray.errors import CheckpointError


def is_recurrent(model: nn.Module) -> bool:
    """Whether a Model takes and returns a state."""
    said = getattr(model, "recurrent", None)
    return hasattr(model, "initial_state") if said is None else bool(said)


def load_weights(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Weights into a Model, in place; a missing, superfluous or differently shaped one is named."""
    mine = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    theirs = {k: tuple(np.shape(v)) for k, v in weights.items()}
    if mine != theirs:
        wrong = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        detail = "; ".join(f"{k}: model {mine.get(k, 'none')}, file {theirs.get(k, 'none')}" for k in wrong[:5])
        raise CheckpointError(
            f"the weights do not fit the model in {len(wrong)} entries: {detail}. They are of another network; where "
            "a default network of Bray has changed since, CHANGELOG.md says how to load them"
        )
    model.load_state_dict({k: torch.from_numpy(_writable(v)) for k, v in weights.items()})


def _writable(x: Any) -> np.ndarray:
    """An array that torch takes without a warning. Copied only where it must be: callers wait meanwhile."""
    return x if isinstance(x, np.ndarray) and x.flags.writeable else np.array(x)


_FLAG_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def _parts_in_training(model: nn.Module) -> list[nn.Module]:
    """(`Module.modules()` takes five times as long, for the names.)"""
    parts, at = [model], 0
    while at < len(parts):
        parts += [m for m in parts[at]._modules.values() if m is not None]
        at += 1
    return [m for m in parts if m.training]


def _set_training(parts: list[nn.Module], training: bool) -> None:
    for m in parts:
        vars(m)["training"] = (
            training  # plain assignment goes through Module.__setattr__, which takes ten times as long
        )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, every part of a Model is in eval mode; afterwards each is in the mode it was in. Other threads that enter
    with the same Model wait: their way out would change the mode of those still inside."""
    with _FLAG_LOCKS.setdefault(model, threading.RLock()):
        training = _parts_in_training(model)
        _set_training(training, False)
        try:
            yield
        finally:
            _set_training(training, True)


class TorchEngine:
    """The Model itself in eval mode (as it is exported), recorded (`bray.capture`) per batch size. It reads the Model's
    own parameters, so a learner's in-place updates are seen at once; the learner's Model stays in train mode. It is
    never compiled: batch sizes are several, and each would take many seconds.

    A Model that cannot be recorded has its modes changed for the time of a forward: a learner in another thread needs a
    copy."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...] | None = None, record: Record = True):
        self.model = model
        self.outputs = outputs
        self.device = next((x.device for x in model.parameters()), torch.device("cpu"))
        self.on_cpu = self.device.type == "cpu"
        """Whether arrays are read where they are; else they are sent to the device."""
        name = f"the forward of {type(model).__name__}"
        self._captured = capture(self._forward, enabled=bool(record), name=name, arrays=True)
        self.sent: list[Tensor] = []
        """The inputs of the last forward on the device, where it is a GPU."""
        self._structures: dict[int, Any] = {}  # by the number of arguments: draws may be left out
        self._programs: dict[Any, Any] = {}  # by the shapes of the inputs

    def _forward(self, *args: Any) -> Any:
        with torch.no_grad(), in_eval_mode(self.model):
            out = self.model(*args)
        return out if self.outputs is None else {k: out[k] for k in self.outputs}

    def forward(self, *args: Any) -> Any:
        """A batch of what the Model takes (observations, recurrent states) and its draws, if any -> its outputs, all
        numpy. Observations may be one tensor."""
        # The common case, and the one where microseconds count.
        if len(args) == 1 and isinstance(args[0], (np.ndarray, Tensor)):
            return self._run([args[0]], args[0].shape, args)
        expected = self._structures.get(len(args)) or tree.map(lambda _: "", args)
        leaves = tree.leaves_like(expected, args)
        out = self._run(leaves, tuple([x.shape for x in leaves]), expected)
        self._structures[len(args)] = expected  # only now: what the Model refuses is no example for others
        return out

    def _run(self, leaves: list[Any], shapes: Any, example: Any) -> Any:
        """`example` has the structure of the arguments."""
        known = self._programs.get(shapes)
        if known is None:
            known = self._programs[shapes] = self._program(leaves, example)
        program, structure, names = known
        if program is None or not program.is_recorded:
            return self._run_eagerly(leaves, structure)
        try:
            if program.on_arrays is not None:
                values = program.on_arrays(leaves)
            else:
                values = to_host(program.run(self._tensors(leaves)))
        except RuntimeError:
            # It may run, as no recording does while torch exports in another thread; or raise with the Model's lines.
            return self._run_eagerly(leaves, structure)
        if names is not None and program.is_recorded:
            return dict(zip(names, values, strict=True))
        return pytree.tree_unflatten(values, program.out_structure)

    def _program(self, leaves: list[Any], example: Any) -> Any:
        structure = pytree.tree_structure(example)
        program = self._captured.program(self._tensors(leaves), structure) if self._captured.enabled else None
        return program, structure, _names(program)

    def _tensors(self, leaves: list[Any]) -> list[Tensor]:
        flat = [x if isinstance(x, Tensor) else torch.from_numpy(x) for x in leaves]
        if not self.on_cpu:
            flat = self.sent = [to_device(x, self.device) for x in flat]
        return flat

    def _run_eagerly(self, leaves: list[Any], structure: Any) -> Any:
        return tree.map(_numpy, self._forward(*pytree.tree_unflatten(self._tensors(leaves), structure)))

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Weights into the Model, in place."""
        load_weights(self.model, weights)

    @property
    def is_recorded(self) -> bool:
        """Whether a forward so far could be recorded."""
        return any(program is not None and program.is_recorded for program, *_ in self._programs.values())

    def parameters_read(self, *args: Any) -> int | None:
        """How many numbers of the Model the asked-for outputs depend on; None when the forward could not be
        recorded."""
        self.forward(*args)
        program = next((program for program, *_ in self._programs.values() if program is not None), None)
        return None if program is None else sum(x.numel() for x in program.tape.held.values())


def _names(program: Any) -> list[str] | None:
    """The names of a flat dict of outputs, None for other trees."""
    if program is None or program.out_structure.type is not dict:
        return None
    if any(not s.is_leaf() for s in program.out_structure.children()):
        return None
    return list(program.out_structure.context)


def _numpy(x: Tensor) -> np.ndarray:
    return x.numpy(force=True)
