"""Record a tensor function once, replay it without Python.

Small networks spend most of an update in Python and in autograd's bookkeeping, not in arithmetic. `capture(fn)` runs
`fn` once and notes every tensor operation below autograd, *through* `torch.autograd.grad` and in-place updates. That
flat list is replayed by TorchScript's interpreter (CPU) or as a CUDA graph (GPU): the same kernels without the
overhead. The forward of a small network, asked with numpy arrays, is played on those (`arrays.py`).

    step = capture(self._step)      # forward, loss, gradients, clipping, optimizer: one function of tensors
    metrics = step(batch)           # a tree of tensors in, a tree of tensors out

Rules for `fn`: a function of a tree of tensors that returns a tree of tensors; tensors it closes over (parameters,
optimizer moments, buffers) are read and may be changed in place; shapes are fixed (one recording per shape of the
inputs); nothing in Python may depend on a tensor's value, and no Python state may change from call to call (a set-up at
the first call may). A function that breaks the last two rules runs eagerly, and the log says so once.

A recording is tried before it is used: on inputs other than those it was made from, twice in a row, results and side
effects. An input for which no other value can be made up (an index may be used to look something up) is tried at the
first call that brings one. All of that leaves tensors, Python state and random generators as one call of the function
does.

A recording takes 0.1 s. `enabled="compiled"` gives the flat list to `torch.compile`, which fuses operations: 10-60 s
before the first call, and a C++ compiler on the machine. It is tried like any recording, and where it cannot be made
the list is replayed as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from bray.capture.check import Subject, other_values
from bray.capture.over_ranks import alone
from bray.capture.python_state import PythonState
from bray.capture.replay import Replay, compiled, replayed
from bray.capture.simplify import simplify
from bray.capture.tape import NoPeeking, NotRecordable, Recorder, Tape, equal

logger = logging.getLogger("bray")

Record = bool | Literal["compiled"]
"""Whether a function is recorded, and what becomes of the recording."""

MAX_PROGRAMS = 8
"""Input shapes for which one function is recorded; with further ones it runs eagerly."""


class capture:
    """A callable that records `fn` at its first call for each shape of the inputs and replays the recording from then
    on."""

    holds_recordings = True  # so that the search for the Python state of a function does not go through recordings

    def __init__(self, fn: Callable[..., Any], enabled: Record = True, name: str | None = None, arrays: bool = False):
        """arrays: whether callers have numpy arrays and ask `Program.on_arrays`: small functions then need no
        tensors."""
        self.fn, self._arrays = fn, arrays
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
        """A callable of the remaining arguments (tensors), for calling many times with the same first ones: those are
        flattened once."""
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

    @property
    def recordings(self) -> int:
        """For how many shapes of the inputs a recording is in use."""
        return sum(program is not None and program.is_recorded for program in self._programs.values())

    def _record(self, flat: list[Tensor], structure: Any) -> Program | None:
        try:
            return self._record_as(flat, structure)
        except Exception as e:  # whatever the recorder cannot follow: the function itself is still right
            self._warn(e)
            return None

    def _record_as(self, flat: list[Tensor], structure: Any) -> Program:
        if self.enabled == "compiled":
            try:
                return record(self.fn, flat, structure, self._warn, lambda tape, flat, _: compiled(tape, flat))
            except Exception as e:  # no compiler, or an operation that it cannot do: a recording needs neither
                logger.warning("%s is recorded and not compiled: %s", self.name, _first_line(e))
                logger.debug("why compiling failed", exc_info=e)
        return record(self.fn, flat, structure, self._warn, *([_on_arrays] if self._arrays else []))

    def _warn(self, e: Exception) -> None:
        """Once: the other shapes of the inputs have the same reason."""
        if not self._warned:
            logger.warning("%s is not recorded and runs slower: %s", self.name, _first_line(e))
        self._warned = True
        logger.debug("why recording failed", exc_info=e)


def _names(x: Any, leaves: list[Tensor]) -> Any:
    """The structure of nested dicts, lists and tuples as something to look up by; the tensors in them are added to
    `leaves`."""
    if isinstance(x, Tensor):
        leaves.append(x)
        return None
    if isinstance(x, dict):
        return dict, tuple(x), tuple([_names(v, leaves) for v in x.values()])
    return type(x), tuple([_names(v, leaves) for v in x])


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


class Program:
    """A recording: `run(flat inputs) -> flat outputs`. If a later call shows that it is wrong, it becomes the function
    itself."""

    def __init__(self, subject: Subject, replay: Replay, tape: Tape, reject: Callable[[Exception], None]):
        self.tape = tape
        self.out_structure = subject.out_structure
        self.is_recorded = True
        self._subject, self._replay, self._reject = subject, replay, reject
        self._untried: dict[int, Tensor] = {}  # inputs that had one value so far, with that value
        self.run: Replay = self._run_watched
        self.on_arrays: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None
        """`run` for numpy arrays, where it needs no tensors."""

    def _run_watched(self, flat: list[Tensor]) -> list[Tensor]:
        self._try(flat)
        self._trust()
        return self._replay(flat)

    def _trust(self) -> None:
        """From now on run without a look at the inputs, if all were tried."""
        if not self._untried:
            self.run, self.on_arrays = self._replay, getattr(self._replay, "on_arrays", None)

    def check(self, flat: list[Tensor]) -> None:
        """Try the recording on made up inputs; NotRecordable if it differs from the function."""
        others = [other_values(x) for x in flat]
        self._subject.compare(self._replay, [others, flat])
        self._untried = {i: x.clone() for i, (x, o) in enumerate(zip(flat, others, strict=True)) if equal(x, o)}
        self._trust()

    def _try(self, flat: list[Tensor]) -> None:
        new = [i for i, x in self._untried.items() if not equal(x, flat[i])]
        if not new:
            return
        state = PythonState(self._subject.fn)
        try:
            with alone():
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


Maker = Callable[[Tape, list[Tensor], Subject], Replay]
"""A tape, the inputs that it was recorded with and what was recorded -> what is run in its place."""


def record(
    fn: Callable[..., Any],
    flat: list[Tensor],
    structure: Any,
    reject: Callable[[Exception], None] = lambda e: None,
    make: Maker = lambda tape, flat, subject: replayed(tape, flat),
) -> Program:
    """Run `fn` on these inputs and return what it did as a Program, tried on others. What it changed is put back; only
    what it sets up in Python at its first call stays. `reject` is told if a later call shows that the Program is wrong;
    `make` makes of a tape what is run."""
    if not flat:
        raise NotRecordable("a recorded function takes at least one tensor")
    subject = Subject(fn, structure)
    before = PythonState(fn)
    try:
        with warnings.catch_warnings(), alone():
            warnings.simplefilter("ignore")
            tape = _recorded(subject, flat)
            if before.changed():
                state = PythonState(fn)
                tape = _recorded(subject, flat)
                _refuse_changes(state)
            else:
                state = before
            simplify(tape)
            program = Program(subject, make(tape, flat, subject), tape, reject)
            program.check(flat)
            _refuse_changes(state)
    except BaseException:
        before.restore()
        raise
    tape.examples.clear()
    return program


def _on_arrays(tape: Tape, flat: list[Tensor], subject: Subject) -> Replay:
    if not flat[0].is_cuda:
        try:
            from bray.capture.arrays import OnArrays  # needs Numba, which a service may not have

            replay = OnArrays(tape)
            subject.compare(replay, [flat])
            return replay
        except (
            ImportError,
            NotRecordable,
            TypeError,
            ValueError,
        ) as e:  # numpy has rules of its own for types and shapes
            logger.debug("not played on arrays: %s", e)
    return replayed(tape, flat)


def _refuse_changes(state: PythonState) -> None:
    changed = state.changed()
    if changed:
        raise NotRecordable(f"each call changes {', '.join(changed[:3])}, which is no tensor that is changed in place")


def _recorded(subject: Subject, flat: list[Tensor]) -> Tape:
    """One call, noted and undone."""
    with Recorder(flat) as recorder, NoPeeking():
        leaves, subject.out_structure = pytree.tree_flatten(subject.call(flat))
        bad = [type(x).__name__ for x in leaves if not isinstance(x, Tensor)]
        if bad:
            raise NotRecordable(f"a recorded function returns tensors only, got {bad[0]}")
        recorder.tape.outputs = [recorder.slot(x) for x in leaves]
    subject.outside = recorder.outside.tensors[len(flat) :]
    return recorder.tape
