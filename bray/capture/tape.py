"""A tape: the tensor operations of one call of a function, in order, and the recorder that writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class NotRecordable(ValueError):
    """Why a function runs eagerly."""


@dataclass(frozen=True)
class Ref:
    """A tensor in a tape: the number of the place that holds it."""

    slot: int


@dataclass
class Op:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int]  # slots
    results: list[bool] | None = None  # None: one tensor; else which of several results are tensors

    def inputs(self) -> Iterable[int]:
        return (x.slot for x in found_in((self.args, self.kwargs), Ref))

    def arguments(self, value: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with `value(slot)` in place of each Ref."""
        return replaced_in((self.args, self.kwargs), Ref, lambda x: value(x.slot))

    def run(self, slots: dict[int, Any]) -> None:
        args, kwargs = self.arguments(slots.__getitem__)
        slots.update(zip(self.outs, tensors_in(self.func(*args, **kwargs)), strict=True))


def is_ref(x: Any) -> bool:
    return isinstance(x, Ref)


def found_in(x: Any, kind: type) -> list[Any]:
    """What is of this kind among arguments or results of an operation. PyTorch's trees, which know more than lists,
    tuples and dicts, took half the time of a recording."""
    if isinstance(x, kind):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    return [leaf for part in x for leaf in found_in(part, kind)]


def replaced_in(x: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Arguments of an operation with `by(part)` in place of each part of this kind."""
    if isinstance(x, kind):
        return by(x)
    if isinstance(x, dict):
        return {k: replaced_in(v, kind, by) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([replaced_in(v, kind, by) for v in x])
    return x


@dataclass
class Tape:
    """Operations in order. Slots: the inputs first, then tensors that the function closed over (`held`), then
    results."""

    num_inputs: int
    ops: list[Op] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    examples: dict[int, Tensor] = field(default_factory=dict)  # what was in each slot during the recording run

    def play(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the operations one by one."""
        slots: dict[int, Any] = dict(enumerate(inputs)) | self.held
        for op in self.ops:
            op.run(slots)
        return [slots[s] for s in self.outputs]


def tensors_in(out: Any) -> list[Tensor]:
    return found_in(out, Tensor)


class NoPeeking(TorchFunctionMode):
    """Refuses what takes a tensor's values out of torch: no operation tells of it."""

    _PEEKS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._PEEKS:
            raise _reads_value(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _reads_value(by: str) -> NotRecordable:
    return NotRecordable(f"Python reads the value of a tensor ({by}), so the next call might go another way")


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operation hands a value to Python, as a number or as the shape of its result."""
    if func is aten.index.Tensor:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class Recorder(TorchDispatchMode):
    """Notes each operation; remembers the tensors from outside as they were before, and puts them back at the end."""

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.tape = Tape(len(inputs))
        self._slot_of: dict[int, int] = {id(x): i for i, x in enumerate(inputs)}
        self._alive: list[Any] = list(inputs)  # ids are only unique among the living
        self._outer = {storage_of(x) for x in inputs}
        self._made: set[int] = set()  # storages of results
        self.tape.examples.update(enumerate(inputs))
        self.outside = Snapshot(inputs, generators_of(inputs))

    def slot(self, x: Tensor) -> int:
        if id(x) not in self._slot_of:
            if storage_of(x) in self._made:
                raise NotRecordable("the recorder lost track of an intermediate result")
            self._outer.add(storage_of(x))
            self.outside.add(x)
            self.tape.held[self._new(x)] = x
        return self._slot_of[id(x)]

    def _new(self, x: Tensor) -> int:
        slot = self._slot_of[id(x)] = len(self._slot_of)
        self._alive.append(x)
        self.tape.examples[slot] = x
        return slot

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports its compiler (1.5 s) to keep it away from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise _reads_value(func.name())
        refs = replaced_in((args, kwargs), Tensor, lambda x: Ref(self.slot(x)))
        out = func(*args, **kwargs)
        outs = []
        for x in tensors_in(out):
            if id(x) not in self._slot_of:
                self._new(x)
                if storage_of(x) not in self._outer:
                    self._made.add(storage_of(x))
            outs.append(self._slot_of[id(x)])
        results = [isinstance(x, Tensor) for x in out] if isinstance(out, (tuple, list)) else None
        self.tape.ops.append(Op(func, refs[0], refs[1], outs, results))
        return out

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.outside.restore()


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Snapshot:
    """Tensors as they were when they were added, and generators of random numbers as they are now."""

    def __init__(self, tensors: list[Tensor], generators: list[torch.Generator]):
        self.tensors: list[Tensor] = []
        self._before: list[Tensor] = []
        self._generators = [(g, g.get_state()) for g in generators]
        for x in tensors:
            self.add(x)

    def add(self, x: Tensor) -> None:
        self.tensors.append(x)
        self._before.append(x.detach().clone())

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was changed: the last one first, because it may share memory with one that was added before a
        change."""
        for x, before in zip(reversed(self.tensors), reversed(self._before), strict=True):
            if not equal(x, before):  # most are not changed, and expanded views cannot be written to
                x.copy_(before)
        for generator, state in self._generators:
            generator.set_state(state)


def generators_of(inputs: list[Tensor]) -> list[torch.Generator]:
    """The default generators that a function of these inputs draws from."""
    devices = sorted({x.device.index for x in inputs if x.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
