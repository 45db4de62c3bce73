"""Replaying a tape without Python: by TorchScript's interpreter on the CPU, as a CUDA graph on a GPU. What asks other
ranks (`over_ranks.py`) is in no graph: one ends before it, and another one begins behind it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bray.capture.in_place import in_place
from bray.capture.simplify import ARM
from bray.capture.tape import NotRecordable, Op, Ref, Snapshot, Tape, generators_of

aten = torch.ops.aten

_ADAM = tuple(getattr(aten._fused_adam_, name) for name in aten._fused_adam_.overloads())

Replay = Callable[[list[Tensor]], list[Tensor]]
"""Flat inputs -> flat outputs."""
Part = Callable[[dict[int, Any]], None]
"""Runs some operations of a tape on its slots."""


def replayed(tape: Tape, flat: list[Tensor]) -> Replay:
    return cuda_graphs(parts_of(tape), tape, flat) if flat[0].is_cuda else interpreter(tape)


def parts_of(tape: Tape) -> list[Part | Op]:
    """The operations of a tape in their order: those that ask other ranks one by one, those between them together; at
    the end are some, or none, that ask nobody."""
    parts: list[Part | Op] = []
    for asks, same in groupby(tape.ops, _asks_ranks):
        ops = list(same)
        parts += ops if asks else [_adam_in_parallel(ops)]
    return parts if parts and not isinstance(parts[-1], Op) else [*parts, _adam_in_parallel([])]


def _asks_ranks(op: Op) -> bool:
    return op.func is torch.ops.bray.mean_over_ranks.default


def compiled(tape: Tape, flat: list[Tensor]) -> Replay:
    """By `torch.compile`: operations are fused. The tape is flat and has its gradients, so there is nothing that the
    compiler could not follow."""
    if flat[0].is_cuda and any(map(_asks_ranks, tape.ops)):
        raise NotRecordable("what is compiled is one CUDA graph, which cannot ask other ranks")
    held = _held(tape)
    names: dict[str, Any] = {"torch": torch, "List": list, "Tensor": Tensor}
    exec(source(tape, _torch_name), names)  # what we have written ourselves, from a list of operations
    run = torch.compile(names["program"], fullgraph=True, dynamic=False)

    @torch.no_grad()
    def play(flat: list[Tensor]) -> list[Tensor]:
        return list(run(*flat, *held))

    def whole(slots: dict[int, Any]) -> None:
        slots.update(zip(tape.outputs, play([slots[i] for i in range(tape.num_inputs)]), strict=True))

    return cuda_graphs([whole], tape, flat) if flat[0].is_cuda else play


def interpreter(tape: Tape) -> Replay:
    """TorchScript's interpreter: runs the list in C++. The tape is written out as a script; PyTorch's own tracer would
    not do, it turns numbers into tensors and fails on the backward of convolutions."""
    held = _held(tape)
    run = torch.jit.CompilationUnit(source(in_place(tape), _torch_name)).program
    if not _prefers_openblas(tape):
        return lambda flat: run(*flat, *held)

    def replay(flat: list[Tensor]) -> list[Tensor]:
        # PyTorch chooses the library for the whole process: a forward of another thread may get the slower one
        # meanwhile.
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return run(*flat, *held)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    return replay


_TINY_PRODUCT, _SMALL_PRODUCT = 60_000, 250_000_000  # multiplications; the two libraries are equal there (Neoverse N1)
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}


def _prefers_openblas(tape: Tape) -> bool:
    """On ARM oneDNN's small matrix products are up to 3x slower than OpenBLAS', its large ones and its convolutions
    faster."""
    if not ARM or any("conv" in op.func.name() for op in tape.ops):
        return False
    largest = 0
    for op in tape.ops:
        if op.func in _PRODUCTS:
            a, b = (tape.examples[op.args[_PRODUCTS[op.func] + i].slot] for i in range(2))
            largest = max(largest, a.shape[-2] * a.shape[-1] * b.shape[-1])
    return _TINY_PRODUCT < largest < _SMALL_PRODUCT


def _torch_name(op: Op) -> str:
    return f"torch.ops.{op.func.name().split('.')[0].replace('::', '.')}"


def source(tape: Tape, name: Callable[[Op], str]) -> str:
    """A tape as the text of a function `program` of its inputs and of what it holds. `name`: how an operation is called
    there."""
    lists = {_literal([Ref(s) for s in slots]): f"l{i}" for i, slots in enumerate(_held_lists(tape))}
    tensors = [f"t{s}" for s in [*range(tape.num_inputs), *tape.held]]
    lines = [f"def program({', '.join([*tensors, *(f'{x}: List[Tensor]' for x in lists.values())])}):"]
    for op in tape.ops:
        args = [lists.get(_literal(a), _literal(a)) for a in op.args] + [
            f"{k}={_literal(v)}" for k, v in op.kwargs.items()
        ]
        call = f"{name(op)}({', '.join(args)})"
        if not op.outs:
            lines.append(f"    {call}")
        elif op.results is None:
            lines.append(f"    t{op.outs[0]} = {call}")
        else:
            lines.append(f"    r = {call}")
            places = [i for i, there in enumerate(op.results) if there]
            lines += [f"    t{slot} = r[{i}]" for slot, i in zip(op.outs, places, strict=True)]
    lines.append(f"    return [{', '.join(f't{s}' for s in tape.outputs)}]")
    return "\n".join(lines) + "\n"


def _held(tape: Tape) -> list[Any]:
    """What `program` of `source` takes behind the inputs."""
    tensors: list[Any] = [x.detach() for x in tape.held.values()]
    return tensors + [[tape.held[s].detach() for s in slots] for slots in _held_lists(tape)]


def _held_lists(tape: Tape) -> list[tuple[int, ...]]:
    """Lists of held tensors, as operations that only change such lists are given (Adam's): TorchScript leaves an
    operation out if it changes nothing but a list that was made for it."""
    lists = [
        tuple(x.slot for x in a)
        for op in tape.ops
        if not op.outs
        for a in op.args
        if isinstance(a, list) and a and all(isinstance(x, Ref) and x.slot in tape.held for x in a)
    ]
    return list(dict.fromkeys(lists))


def _literal(x: Any) -> str:
    if isinstance(x, Ref):
        return f"t{x.slot}"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(_literal(v) for v in x)}]"
    if isinstance(x, float) and not math.isfinite(x):
        return f"float('{x}')"
    if isinstance(x, torch.device):
        return f"torch.device('{x}')"
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.memory_format, torch.layout)):
        return repr(x)
    raise NotRecordable(f"an operation has an argument of type {type(x).__name__}, which cannot be written out")


class Copies:
    """Copies the arguments of a call to the static inputs of a recording. It leaves out what it copied at the last call
    and nobody has changed since: all minibatches of a rollout read the same columns. (What a device cannot see
    changing, memory of the host, is copied always.)"""

    def __init__(self, static: list[Tensor]):
        self._static = static
        self._last: list[tuple[Any, int]] = [(lambda: None, 0)] * len(static)

    def take(self, flat: list[Tensor]) -> None:
        for i, (mine, given) in enumerate(zip(self._static, flat, strict=True)):
            last, version = self._last[i]
            if last() is given and version == given._version and given.device == mine.device:
                continue
            self._last[i] = weakref.ref(given), given._version
            mine.copy_(given, non_blocking=True)


class Results:
    """The outputs of a recording as copies that the next call leaves alone; the single numbers among them, which are
    many and small, in one copy."""

    def __init__(self, out: list[Tensor]):
        """In the recording, behind what makes the outputs."""
        self._out = out
        self._single = [i for i, x in enumerate(out) if x.numel() == 1 and x.dtype == torch.float32]
        self._joined = torch.cat([out[i].reshape(1) for i in self._single]) if self._single else None

    def copy(self) -> list[Tensor]:
        if self._joined is None:
            return [x.clone() for x in self._out]
        single = dict(zip(self._single, self._joined.clone().unbind(), strict=True))
        return [single[i].reshape(x.shape) if i in single else x.clone() for i, x in enumerate(self._out)]


def _adam_in_parallel(ops: list[Op]) -> Part:
    """Operations one by one, but consecutive calls of Adam in parallel, each on a stream of its own: they update
    different weights (`Optimizer`), and one alone keeps a quarter of a large GPU busy."""
    runs = [(is_adam, list(same)) for is_adam, same in groupby(ops, lambda op: op.func in _ADAM)]
    most = max((len(same) - 1 for is_adam, same in runs if is_adam), default=0)
    streams = [torch.cuda.Stream() for _ in range(most)]

    def play(slots: dict[int, Any]) -> None:
        here: Any = torch.cuda.current_stream() if streams else None
        for is_adam, same in runs:
            beside = same[1:] if is_adam else []
            for op, stream in zip(beside, streams, strict=False):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    op.run(slots)
            for op in same[: len(same) - len(beside)]:
                op.run(slots)
            for stream in streams[: len(beside)]:
                here.wait_stream(stream)

    return play


def cuda_graphs(parts: list[Part | Op], tape: Tape, flat: list[Tensor]) -> Replay:
    """A CUDA graph of each part of a tape over static copies of the inputs, with what asks other ranks between them;
    mostly it is one: one launch for the whole function."""
    static = [x.clone() for x in flat]
    before = Snapshot(list(tape.held.values()) + static, generators_of(flat))

    def begin() -> dict[int, Any]:
        """Slots. All results stay there until the end, so that no stream is given memory that another still reads."""
        return dict(enumerate(static)) | tape.held

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):  # cuBLAS and cuDNN choose their kernels and allocate outside the recording
            slots = begin()
            for part in parts:
                part.run(slots) if isinstance(part, Op) else part(slots)
            del slots
    torch.cuda.current_stream().wait_stream(side)
    # The products of all graphs recorded on one stream share cuBLAS's workspace, counters that kernels wait for
    # included: two such graphs that run at the same time may wait for ever. Who plays graphs beside others does it on a
    # stream of its own (central inference), and they are recorded there.
    here = torch.cuda.current_stream()
    own = None if here == torch.cuda.default_stream() else here
    steps: list[Callable[[], Any]] = []
    gc.collect()
    gc.disable()  # an old graph that is freed while a new one is recorded breaks the recording
    try:
        slots = begin()
        for part in parts:
            if isinstance(part, Op):
                steps.append(_asking(part, slots))
                continue
            graph = torch.cuda.CUDAGraph()
            # What other threads do on the device meanwhile (central inference) does not break the recording.
            with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"), torch.no_grad():
                part(slots)
                if part is parts[-1]:
                    results = Results([slots[s] for s in tape.outputs])
            steps.append(graph.replay)
    finally:
        gc.enable()
    before.restore()

    copies = Copies(static)

    def replay(flat: list[Tensor]) -> list[Tensor]:
        copies.take(flat)
        for step in steps:
            step()
        return results.copy()

    return replay


def _asking(op: Op, slots: dict[int, Any]) -> Callable[[], Any]:
    """What asks other ranks, between two graphs: it reads where the one before it writes, and writes where the one
    behind it reads."""
    given = slots[op.args[0].slot]
    got = slots[op.outs[0]] = torch.empty_like(given)

    @torch.no_grad()
    def ask() -> None:
        got.copy_(op.func(given))

    return ask
