"""Record a tensor function once, replay it without Python.

Small networks spend most of an update in Python and in autograd's bookkeeping, not in arithmetic. `capture(fn)` runs `fn` once and
notes every tensor operation below autograd, *through* `torch.autograd.grad` and in-place updates. That flat list is replayed by
TorchScript's interpreter (CPU) or as a CUDA graph (GPU): the same kernels without the overhead.

    step = capture(self._step)      # forward, loss, gradients, clipping, optimizer: one function of tensors
    metrics = step(batch)           # a tree of tensors in, a tree of tensors out

Rules for `fn`: a function of a tree of tensors that returns a tree of tensors; tensors it closes over (parameters, optimizer moments,
buffers) are read and may be changed in place; shapes are fixed (one recording per shape of the inputs); nothing in Python may depend on
a tensor's value, and no Python state may change from call to call (a set-up at the first call may). A function that breaks the last two
rules runs eagerly, and the log says so once.

A recording is tried before it is used: on inputs other than those it was made from, twice in a row, results and side effects. An input
for which no other value can be made up (an index may be used to look something up) is tried at the first call that brings one. All of
that leaves tensors, Python state and random generators as one call of the function does.

`torch.compile` does more (it fuses kernels) but needs a C++ compiler and 3-10 s before the first step; a recording takes 0.1 s.
"""

from __future__ import annotations

import gc
import logging
import math
import platform
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bray.python_state import PythonState

logger = logging.getLogger("bray")
aten = torch.ops.aten

MAX_PROGRAMS = 8
"""Input shapes for which one function is recorded; with further ones it runs eagerly."""

_ARM = platform.machine() in ("aarch64", "arm64")


class NotRecordable(ValueError):
    """Why a function runs eagerly."""


class capture:
    """A callable that records `fn` at its first call for each shape of the inputs and replays the recording from then on."""

    holds_recordings = True  # so that the search for the Python state of a function does not go through recordings

    def __init__(self, fn: Callable[..., Any], enabled: bool = True, name: str | None = None):
        self.fn = fn
        self.enabled = enabled
        self.name = name or getattr(fn, "__qualname__", type(fn).__name__)
        self._programs: dict[Any, Program | None] = {}
        self._known: dict[Any, Program | None] = {}  # the same by a key that is five times cheaper to make
        self._warned = False

    def __call__(self, *args: Any) -> Any:
        if not self.enabled:
            return self.fn(*args)
        flat: list[Tensor] = []
        key = (_names(args, flat), tuple([(x.shape, x.dtype, x.device) for x in flat]))
        if key not in self._known:
            program = self.program(flat, pytree.tree_structure(args))
            if len(self._known) < MAX_PROGRAMS:
                self._known[key] = program
        else:
            program = self._known[key]
        if program is None:
            return self.fn(*args)
        return pytree.tree_unflatten(program.run(flat), program.out_structure)

    def bind(self, *fixed: Any) -> Callable[..., Any]:
        """A callable of the remaining arguments (tensors), for calling many times with the same first ones: those are flattened once."""
        first, _ = pytree.tree_flatten(fixed)
        programs: dict[Any, Program | None] = {}

        def call(*rest: Tensor) -> Any:
            flat = first + list(rest)
            shapes = tuple(x.shape for x in rest)
            if shapes not in programs:
                programs[shapes] = self.program(flat, pytree.tree_structure((*fixed, *rest))) if self.enabled else None
            program = programs[shapes]
            if program is None:
                return self.fn(*fixed, *rest)
            return pytree.tree_unflatten(program.run(flat), program.out_structure)

        return call

    def program(self, flat: list[Tensor], structure: Any) -> Program | None:
        """The recording for these inputs, made now if there is none; None when there cannot be one."""
        key = (structure, tuple((x.shape, x.dtype, x.device) for x in flat))
        if key not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                return None
            self._programs[key] = self._record(flat, structure)
        return self._programs[key]

    def _record(self, flat: list[Tensor], structure: Any) -> Program | None:
        try:
            return record(self.fn, flat, structure, self._warn)
        except Exception as e:  # whatever the recorder cannot follow: the function itself is still right
            self._warn(e)
            return None

    def _warn(self, e: Exception) -> None:
        """Once: the other shapes of the inputs have the same reason."""
        if not self._warned:
            logger.warning("%s is not recorded and runs slower: %s", self.name, _first_line(e))
        self._warned = True
        logger.debug("why recording failed", exc_info=e)


def _names(x: Any, leaves: list[Tensor]) -> Any:
    """The structure of nested dicts, lists and tuples as something to look up by; the tensors in them are added to `leaves`."""
    if isinstance(x, Tensor):
        leaves.append(x)
        return None
    if isinstance(x, dict):
        return dict, tuple(x), tuple([_names(v, leaves) for v in x.values()])
    return type(x), tuple([_names(v, leaves) for v in x])


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


Replay = Callable[[list[Tensor]], list[Tensor]]


class Program:
    """A recording: `run(flat inputs) -> flat outputs`. If a later call shows that it is wrong, it becomes the function itself."""

    def __init__(self, subject: _Subject, replay: Replay, tape: Tape, reject: Callable[[Exception], None]):
        self.tape = tape
        self.out_structure = subject.out_structure
        self.is_recorded = True
        self._subject, self._replay, self._reject = subject, replay, reject
        self._untried: dict[int, Tensor] = {}  # inputs that had one value so far, with that value
        self.run: Replay = replay

    def _run_watched(self, flat: list[Tensor]) -> list[Tensor]:
        self._try(flat)
        if not self._untried:
            self.run = self._replay  # from now on without a look at the inputs
        return self._replay(flat)

    def check(self, flat: list[Tensor]) -> None:
        """Try the recording on made up inputs; NotRecordable if it differs from the function."""
        others = [_other(x) for x in flat]
        self._subject.compare(self._replay, [others, flat])
        self._untried = {i: x.clone() for i, (x, o) in enumerate(zip(flat, others, strict=True)) if _equal(x, o)}
        if self._untried:
            self.run = self._run_watched

    def _try(self, flat: list[Tensor]) -> None:
        new = [i for i, x in self._untried.items() if not _equal(x, flat[i])]
        if not new:
            return
        state = PythonState(self._subject.fn)
        try:
            self._subject.compare(self._replay, [flat])
            _refuse_changes(state)
        except NotRecordable as e:  # but an error of the function itself is for the caller: these inputs are wrong
            state.restore()
            self._reject(e)
            self._replay, self.is_recorded = self._run_eagerly, False
            new = list(self._untried)
        for i in new:
            del self._untried[i]

    def _run_eagerly(self, flat: list[Tensor]) -> list[Tensor]:
        leaves, self.out_structure = pytree.tree_flatten(self._subject.call(flat))
        return leaves


# --- recording ------------------------------------------------------------------------------------------------------------


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
        return (x.slot for x in pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_ref) if isinstance(x, Ref))


def _is_ref(x: Any) -> bool:
    return isinstance(x, Ref)


@dataclass
class Tape:
    """Operations in order. Slots: the inputs first, then tensors that the function closed over (`held`), then results."""

    num_inputs: int
    ops: list[Op] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    examples: dict[int, Tensor] = field(default_factory=dict)  # what was in each slot during the recording run

    def play(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the operations one by one."""
        slots: dict[int, Any] = dict(enumerate(inputs)) | self.held
        return self.play_into(slots)

    def play_into(self, slots: dict[int, Any]) -> list[Tensor]:
        def value(x: Any) -> Any:
            return slots[x.slot] if isinstance(x, Ref) else x

        for op in self.ops:
            args, kwargs = pytree.tree_map(value, (op.args, op.kwargs), is_leaf=_is_ref)
            out = op.func(*args, **kwargs)
            for slot, x in zip(op.outs, _tensors(out), strict=True):
                slots[slot] = x
        return [slots[s] for s in self.outputs]


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]


class _NoPeeking(TorchFunctionMode):
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


class _Recorder(TorchDispatchMode):
    """Notes each operation; remembers the tensors from outside as they were before, and puts them back at the end."""

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.tape = Tape(len(inputs))
        self._slot_of: dict[int, int] = {id(x): i for i, x in enumerate(inputs)}
        self._alive: list[Any] = list(inputs)  # ids are only unique among the living
        self._outer = {_storage(x) for x in inputs}
        self._made: set[int] = set()  # storages of results
        self.tape.examples.update(enumerate(inputs))
        self.outside = _Snapshot(inputs, _generators(inputs))

    def slot(self, x: Tensor) -> int:
        if id(x) not in self._slot_of:
            if _storage(x) in self._made:
                raise NotRecordable("the recorder lost track of an intermediate result")
            self._outer.add(_storage(x))
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
        refs = pytree.tree_map_only(Tensor, lambda x: Ref(self.slot(x)), (args, kwargs))
        out = func(*args, **kwargs)
        outs = []
        for x in _tensors(out):
            if id(x) not in self._slot_of:
                self._new(x)
                if _storage(x) not in self._outer:
                    self._made.add(_storage(x))
            outs.append(self._slot_of[id(x)])
        results = [isinstance(x, Tensor) for x in out] if isinstance(out, (tuple, list)) else None
        self.tape.ops.append(Op(func, refs[0], refs[1], outs, results))
        return out

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.outside.restore()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _changes(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    changed = []
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            changed += _tensors(args[i] if i < len(args) else kwargs.get(declared.name))
    return changed


def record(
    fn: Callable[..., Any], flat: list[Tensor], structure: Any, reject: Callable[[Exception], None] = lambda e: None
) -> Program:
    """Run `fn` on these inputs and return what it did as a Program, tried on others. What it changed is put back; only what it sets up
    in Python at its first call stays. `reject` is told if a later call shows that the Program is wrong."""
    if not flat:
        raise NotRecordable("a recorded function takes at least one tensor")
    subject = _Subject(fn, structure)
    before = PythonState(fn)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tape = _recorded(subject, flat)
            if before.changed():
                state = PythonState(fn)
                tape = _recorded(subject, flat)
                _refuse_changes(state)
            else:
                state = before
            _simplify(tape)
            run = _cuda_graph(tape, flat) if flat[0].is_cuda else _interpreter(tape, flat)
            program = Program(subject, run, tape, reject)
            program.check(flat)
            _refuse_changes(state)
    except BaseException:
        before.restore()
        raise
    tape.examples.clear()
    return program


def _refuse_changes(state: PythonState) -> None:
    changed = state.changed()
    if changed:
        raise NotRecordable(f"each call changes {', '.join(changed[:3])}, which is no tensor that is changed in place")


def _recorded(subject: _Subject, flat: list[Tensor]) -> Tape:
    """One call, noted and undone."""
    with _Recorder(flat) as recorder, _NoPeeking():
        leaves, subject.out_structure = pytree.tree_flatten(subject.call(flat))
        bad = [type(x).__name__ for x in leaves if not isinstance(x, Tensor)]
        if bad:
            raise NotRecordable(f"a recorded function returns tensors only, got {bad[0]}")
        recorder.tape.outputs = [recorder.slot(x) for x in leaves]
    subject.outside = recorder.outside.tensors[len(flat) :]
    return recorder.tape


class _Snapshot:
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
        """Put back what was changed: the last one first, because it may share memory with one that was added before a change."""
        for x, before in zip(reversed(self.tensors), reversed(self._before), strict=True):
            if not _equal(x, before):  # most are not changed, and expanded views cannot be written to
                x.copy_(before)
        for generator, state in self._generators:
            generator.set_state(state)


def _generators(inputs: list[Tensor]) -> list[torch.Generator]:
    """The default generators that a function of these inputs draws from."""
    devices = sorted({x.device.index for x in inputs if x.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


_CHECK_SEED = 0x5EED


class _Subject:
    """The function that is recorded, with what it was found to read and write."""

    def __init__(self, fn: Callable[..., Any], structure: Any):
        self.fn, self.structure = fn, structure
        self.out_structure: Any = None
        self.outside: list[Tensor] = []

    def call(self, flat: list[Tensor]) -> Any:
        return self.fn(*pytree.tree_unflatten(flat, self.structure))

    def compare(self, replay: Replay, calls: list[list[Tensor]]) -> None:
        """The recording against the function: results and side effects of calls in a row. NotRecordable where they differ."""
        expected = self._outcome(lambda flat: pytree.tree_leaves(self.call(flat)), calls)
        got = self._outcome(replay, calls)
        if len(expected) != len(got):
            raise NotRecordable("the function returns another number of tensors for other inputs")
        for e, g in zip(expected, got, strict=True):
            if e.dtype != g.dtype or e.shape != g.shape:
                raise NotRecordable("the recording's results have other shapes or types than the function's")
            if not torch.allclose(e, g, rtol=1e-3, atol=1e-4, equal_nan=True):
                worst = (e.double() - g.double()).abs().max().item()
                raise NotRecordable(f"the recording's results differ from the function's by up to {worst:.3g}")

    def _outcome(self, run: Replay, calls: list[list[Tensor]]) -> list[Tensor]:
        """What calls return and leave behind: in the tensors from outside, in their inputs and in the generators. Random numbers are
        others than in the recording run, so that one that was frozen there shows. Afterwards all is as before."""
        generators = _generators(calls[0])
        before = _Snapshot(self.outside, generators)
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


def _other(x: Tensor) -> Tensor:
    """An input like this one, with other values: rows reversed, real numbers a bit smaller. Where rows are all alike real numbers are
    scaled and shifted, truth values changed in every other place. Whole numbers may be indices, so they stay within their column."""
    flipped = x.flip(0) if x.dim() else x
    varied = not _equal(flipped, x)
    if x.is_floating_point():
        ramp = torch.linspace(0.05, 0.25, x.numel(), device=x.device).reshape(x.shape)
        return (flipped * 0.97 if varied else x * 0.75 + ramp).to(x.dtype)
    if x.dtype == torch.bool and not varied:
        return x ^ (torch.arange(x.numel(), device=x.device).reshape(x.shape) % 2 == 0)
    return flipped


# --- simplifying ----------------------------------------------------------------------------------------------------------

_PURE_FACTORIES = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
_ALIASES = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
_LARGE = 4096  # elements from which four cheap operations on ARM beat one tanh


def _simplify(tape: Tape) -> None:
    """Rewrites that keep the results, each local: they matter because every operation costs microseconds."""
    _drop_same_value(tape)
    _fold_views(tape)
    _fold_constants(tape)
    if _ARM:
        _tanh_by_sigmoid(tape)
    _drop_unused(tape)


def _drop_same_value(tape: Tape) -> None:
    """Detached copies, views of the same shape and double transposes are the tensor they come from."""
    same: dict[int, int] = {}
    transposed: dict[int, int] = {}
    kept = []
    for op in tape.ops:
        op.args, op.kwargs = pytree.tree_map(
            lambda x: Ref(same.get(x.slot, x.slot)) if isinstance(x, Ref) else x, (op.args, op.kwargs), is_leaf=_is_ref
        )
        source = op.args[0].slot if op.args and isinstance(op.args[0], Ref) else None
        if source is not None and len(op.outs) == 1:
            before, after = tape.examples[source], tape.examples[op.outs[0]]
            if op.func in _SAME_VALUE or (op.func in _VIEWS and before.shape == after.shape):
                same[op.outs[0]] = source
                continue
            if op.func is aten.t.default:
                if source in transposed:
                    same[op.outs[0]] = transposed[source]
                    continue
                transposed[op.outs[0]] = source
        kept.append(op)
    tape.ops = kept
    tape.outputs = [same.get(s, s) for s in tape.outputs]


def _fold_views(tape: Tape) -> None:
    """A view of a held tensor (a transposed weight) is held itself: it shares the tensor's memory, so it sees in-place updates."""
    kept = []
    for op in tape.ops:
        if op.func in _ALIASES and all(s in tape.held for s in op.inputs()):
            for s in op.outs:
                tape.held[s] = tape.examples[s]
        else:
            kept.append(op)
    tape.ops = kept


def _fold_constants(tape: Tape) -> None:
    """Results that depend on nothing but shapes (ones, zeros and what is computed from them alone) are kept, not recomputed."""
    changed = {
        _storage(x)
        for op in tape.ops
        for x in _changes(
            op.func,
            *pytree.tree_map(
                lambda r: tape.examples[r.slot] if isinstance(r, Ref) else r, (op.args, op.kwargs), is_leaf=_is_ref
            ),
        )
    }
    constant: set[int] = set()
    kept = []
    for op in tape.ops:
        fixed = (
            op.func in _PURE_FACTORIES or (all(s in constant for s in op.inputs()) and any(True for _ in op.inputs()))
        ) and not (op.func._schema.is_mutable or _draws(op.func))
        if fixed and not any(_storage(tape.examples[s]) in changed for s in op.outs):
            constant.update(op.outs)
            for s in op.outs:
                tape.held[s] = tape.examples[s].detach()
        else:
            kept.append(op)
    tape.ops = kept


def _draws(func: Any) -> bool:
    """Whether an operation draws random numbers, which changes what later ones draw."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _tanh_by_sigmoid(tape: Tape) -> None:
    """tanh(x) = 2 sigmoid(2x) - 1: PyTorch's ARM kernel of sigmoid is 2.7x faster than that of tanh."""
    ops = []
    for op in tape.ops:
        x = tape.examples[op.outs[0]] if op.outs else None
        if op.func is aten.tanh.default and x is not None and x.dtype == torch.float32 and x.numel() >= _LARGE:
            out = Ref(op.outs[0])
            ops.append(Op(aten.mul.Tensor, (op.args[0], 2.0), {}, op.outs))
            ops.append(Op(aten.sigmoid_.default, (out,), {}, op.outs))
            ops.append(Op(aten.mul_.Tensor, (out, 2.0), {}, op.outs))
            ops.append(Op(aten.sub_.Tensor, (out, 1.0), {}, op.outs))
        else:
            ops.append(op)
    tape.ops = ops


def _drop_unused(tape: Tape) -> None:
    """Operations whose results nobody reads and that change nothing."""
    needed = set(tape.outputs)
    kept = []
    for op in reversed(tape.ops):
        if op.func._schema.is_mutable or _draws(op.func) or any(s in needed for s in op.outs):
            needed.update(op.inputs())
            kept.append(op)
    tape.ops = kept[::-1]
    tape.held = {s: x for s, x in tape.held.items() if s in needed}


# --- replaying ------------------------------------------------------------------------------------------------------------


def _interpreter(tape: Tape, flat: list[Tensor]) -> Replay:
    """TorchScript's interpreter: runs the list in C++. The tape is written out as a script; PyTorch's own tracer would not do, it
    turns numbers into tensors and fails on the backward of convolutions."""
    held = [x.detach() for x in tape.held.values()]
    run = torch.jit.CompilationUnit(_source(tape, range(len(flat)), list(tape.held))).program
    # On ARM oneDNN's small matrix products are up to 3x slower than OpenBLAS', its large ones and its convolutions faster.
    dense = (
        _ARM
        and not any("conv" in op.func.name() for op in tape.ops)
        and (_TINY_PRODUCT < _largest_product(tape) < _SMALL_PRODUCT)
    )

    def replay_dense(flat: list[Tensor]) -> list[Tensor]:
        torch._C._set_mkldnn_enabled(False)
        try:
            return run(*flat, *held)
        finally:
            torch._C._set_mkldnn_enabled(True)

    return replay_dense if dense else lambda flat: run(*flat, *held)


def _source(tape: Tape, inputs: Iterable[int], held: list[int]) -> str:
    """A tape as TorchScript."""
    lines = [f"def program({', '.join(f't{s}' for s in [*inputs, *held])}):"]
    for op in tape.ops:
        name = op.func.name().removeprefix("aten::").split(".")[0]
        args = [_literal(a) for a in op.args] + [f"{k}={_literal(v)}" for k, v in op.kwargs.items()]
        call = f"torch.ops.aten.{name}({', '.join(args)})"
        if op.results is None:
            lines.append(f"    t{op.outs[0]} = {call}")
        else:
            lines.append(f"    r = {call}")
            places = [i for i, there in enumerate(op.results) if there]
            lines += [f"    t{slot} = r[{i}]" for slot, i in zip(op.outs, places, strict=True)]
    lines.append(f"    return [{', '.join(f't{s}' for s in tape.outputs)}]")
    return "\n".join(lines) + "\n"


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


_TINY_PRODUCT, _SMALL_PRODUCT = 60_000, 4_000_000  # multiplications; the two libraries are equal there (Neoverse N1)
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}


def _largest_product(tape: Tape) -> int:
    """Multiplications of the largest matrix product in a tape."""
    sizes = [0]
    for op in tape.ops:
        if op.func in _PRODUCTS:
            a, b = (tape.examples[op.args[_PRODUCTS[op.func] + i].slot] for i in range(2))
            sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
    return max(sizes)


def _cuda_graph(tape: Tape, flat: list[Tensor]) -> Replay:
    """A CUDA graph over static copies of the inputs: one launch for the whole function."""
    static = [x.clone() for x in flat]
    before = _Snapshot(list(tape.held.values()) + static, _generators(flat))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):  # cuBLAS and cuDNN choose their kernels and allocate outside the recording
            tape.play(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # an old graph that is freed while a new one is recorded breaks the recording
    try:
        with torch.cuda.graph(graph), torch.no_grad():
            out = tape.play(static)
    finally:
        gc.enable()
    before.restore()

    def replay(flat: list[Tensor]) -> list[Tensor]:
        for mine, given in zip(static, flat, strict=True):
            mine.copy_(given, non_blocking=True)
        graph.replay()
        return [x.clone() for x in out]

    return replay
