"""Single requests in, batches out, one future per request.

`Collector` queues requests, cuts the queue into batches and hands each caller its part. What runs a batch differs: an
engine (`Batcher`, below), a worker behind a connection (`remote.model.caller.Caller`), a Policy
(`train.agent.TickBatcher`).

There is no timer. An idle collector starts with everything that was submitted in the same turn of the event loop; while
a batch runs, requests accumulate, and the next batch takes all of them, up to `max_batch_size`.

Nobody waits forever: an engine that raises, returns too few rows or ends its thread, a sample that does not fit, a full
queue and a closed batcher all end in an error for the callers concerned, and only for them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
import weakref
from asyncio.events import _get_running_loop  # asked for each sample; the public one raises where there is no loop
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.errors import BrayError, ConfigError, DataError, Overloaded
from bray.inference.rows import STACK_ERRORS, Template, check, difference, signature, split

_SMOOTHING = 0.2  # weight of the newest forward in the running mean of their times
WATCH_S = 1.0  # how often we check that the thread of a running batch is alive
_EXIT_S = 2.0  # how long the process waits for running forwards when it ends
_MAX_TEMPLATES = 16
_NOW_BELOW = 1e-3  # seconds; run_now refuses models with slower forwards
_CLOSED = "the batcher is closed and takes no more samples"

Item = tuple["asyncio.Future[Any]", Any, bool, int, Any]
"""A request: its future, its arguments, whether the caller wants the step too, the rows of a batch of its own (0: one
sample), and the version it asks for (None: the current one). A plain tuple: an object with names costs half a
microsecond."""
Outcome = tuple[Sequence[Any], dict[int, BaseException], Any]
"""What a batch came to: a value for each item, errors of some of them by position, and the step."""


class Collector:
    """A queue of requests of one event loop. Subclasses start batches in `_flush`."""

    merges_batches = False
    """Whether whole batches may share a forward with other whole batches."""

    def __init__(self, max_batch_size: int, max_queue: float = float("inf"), max_wait: float = 0.0):
        self.max_batch_size, self.max_queue, self.max_wait = max_batch_size, max_queue, max_wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: list[Item] = []
        self._special = 0  # how many of them are whole batches, or ask for a version
        self._asleep = True  # no `_flush` is due: whoever submits next schedules it
        self._timer: asyncio.TimerHandle | None = None  # of max_wait

    def _add(self, args: Any, with_step: bool = False, rows: int = 0, version: Any = None) -> asyncio.Future[Any]:
        """Queue a request. Raises Overloaded when the queue is full. Whoever cancels the future leaves the queue."""
        assert self._loop is not None
        if len(self._queue) >= self.max_queue:
            self._make_room()
        future = self._loop.create_future()
        self._queue.append((future, args, with_step, rows, version))
        if rows or version is not None:
            self._special += 1
        if self._asleep:
            self._wake()
        return future

    def _make_room(self) -> None:
        """Forget cancelled requests; if the queue is still full, refuse."""
        self._requeue(self._queue)
        if len(self._queue) >= self.max_queue:
            raise Overloaded(
                f"{len(self._queue)} callers wait for the model already, and max_queue is {self.max_queue}: more "
                "samples come in than it can answer. Try again later, send fewer, add workers, or raise max_queue if "
                "a longer wait will do"
            )

    def _requeue(self, items: Iterable[Item]) -> None:
        """The queue is these requests, without those that were cancelled."""
        self._queue = [item for item in items if not item[0].done()]
        self._special = sum(1 for item in self._queue if item[3] or item[4] is not None)

    def _wake(self) -> None:
        """Start a batch after this turn of the loop, or once it is full or `max_wait` has passed."""
        if not self.max_wait or self._special or len(self._queue) >= self.max_batch_size:
            self._wake_now()
        elif self._timer is None:
            assert self._loop is not None
            self._timer = self._loop.call_later(self.max_wait, self._flush)

    def _wake_now(self) -> None:
        """Start a batch after this turn of the loop."""
        assert self._loop is not None
        self._asleep = False
        self._loop.call_soon(self._flush)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        """Start the batches that can start, and set `_asleep` where no further call is due."""
        raise NotImplementedError

    def _take(self, most: int) -> list[Item]:
        """The next batch: up to `most` samples for one version, or a whole batch (or several that fit into one)."""
        waiting = self._queue
        if not self._special and len(waiting) <= most:
            self._queue = []
            return [item for item in waiting if not item[0].done()]
        self._requeue(waiting)
        waiting = self._queue
        end = 0
        if waiting:
            _, args, _, rows, version = waiting[0]
            end = 1
            if not rows:
                while end < min(len(waiting), most) and not waiting[end][3] and waiting[end][4] == version:
                    end += 1
            elif self.merges_batches:
                kind = None
                while end < len(waiting) and waiting[end][3] and rows + waiting[end][3] <= most:
                    kind = kind or signature(tree.index(args, 0))
                    if waiting[end][4] != version or signature(tree.index(waiting[end][1], 0)) != kind:
                        break
                    rows += waiting[end][3]
                    end += 1
        taken, rest = waiting[:end], waiting[end:]
        if self._special:
            self._requeue(rest)
        else:
            self._queue = rest
        return taken

    def _answer(self, items: list[Item], outcome: Outcome) -> None:
        values, errors, step = outcome
        for i, error in errors.items():
            _set_error(items[i][0], own_error(error))
        for (future, _, with_step, _, _), value in zip(items, values, strict=True):
            if not future.done():  # it may have been cancelled, or has its error
                future.set_result((value, step) if with_step else value)

    def _fail(self, items: Iterable[Item], error: BaseException) -> None:
        for item in items:
            _set_error(item[0], own_error(error))

    def _fail_queue(self, error: BaseException) -> None:
        waiting, self._queue, self._special = self._queue, [], 0
        self._fail(waiting, error)


def group_by_kind(samples: Iterable[Any], errors: dict[int, BaseException]) -> dict[Any, dict[int, Any]]:
    """Samples as arrays: signature -> position -> arguments. Those that are no trees of arrays get an entry in
    `errors`."""
    kinds: dict[Any, dict[int, Any]] = {}
    for i, sample in enumerate(samples):
        try:
            arrays = tree.as_arrays(sample)
            kinds.setdefault(signature(arrays), {})[i] = arrays
        except Exception as e:
            errors[i] = e if isinstance(e, DataError) else DataError(f"this sample is no tree of arrays: {e!r}")
    return kinds


class Batcher(Collector):
    """Runs `fn(*args) -> tree` on batches made of single samples: never two at once, answers in the order of the calls.
    Quick forwards run inline in the loop, slower ones in a thread of the batcher's own.

    `fn` takes trees of arrays `[B, ...]` and returns a tree of arrays `[B, ...]`. A batcher belongs to the event loop
    of its first `submit`, until that is closed; only `call` may come from any thread.

    max_batch_size  rows of the largest batch
    max_wait        seconds that an idle batcher may wait for a fuller batch; 0: it never waits
    max_queue       callers that may wait; one more gets Overloaded
    pad_to          batch sizes that `fn` is called with: a batch is filled up to the next one by repeating its last row
    inline_below    forwards that take fewer seconds (in the running mean) run in the loop, others in the thread
    template        one sample that shows what fits; without it, what `fn` has answered most often is expected
    lock            held during a forward; while somebody else holds it a batch waits in the thread, never in the loop
    step            asked after a forward, under the lock, for callers who want to know the version (`with_step`)
    elsewhere       returns the batcher of the running loop, when that is another one; without it, such a call is
                    refused
    """

    merges_batches = True

    def __init__(
        self,
        fn: Callable[..., Any],
        max_batch_size: int = 32,
        max_wait: float = 0.0,
        max_queue: int = 1024,
        pad_to: Sequence[int] = (),
        inline_below: float = 2e-4,
        *,
        template: tuple[Any, ...] | None = None,
        lock: threading.Lock | None = None,
        step: Callable[[], int] = lambda: 0,
        elsewhere: Callable[[], Batcher] | None = None,
    ):
        if max_batch_size < 1 or max_queue < 1 or max_wait < 0:
            raise ConfigError(
                "a batcher needs max_batch_size >= 1, max_queue >= 1 and max_wait >= 0, got "
                f"max_batch_size={max_batch_size}, max_queue={max_queue}, max_wait={max_wait}"
            )
        if pad_to and not (min(pad_to) >= 1 and max(pad_to) >= max_batch_size):
            raise ConfigError(
                f"pad_to={tuple(pad_to)} has no size for a batch of max_batch_size={max_batch_size}: "
                f"add {max_batch_size} to pad_to, or set max_batch_size={max(pad_to)}"
            )
        super().__init__(max_batch_size, max_queue, max_wait)
        self.pad_to = tuple(sorted(pad_to))
        self.inline_below = inline_below
        self.lock = lock or threading.Lock()
        self._fn, self._step, self._elsewhere = fn, step, elsewhere

        self._declared = None if template is None else Template(tree.as_arrays(template))
        self._template = self._declared  # the kind of the last batch
        self._templates: dict[Any, Template] = {}  # kinds that were answered, by signature

        self._running: list[Item] | None = None  # the batch in the thread
        self._thread: _Thread | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._ended: asyncio.Future[None] | None = None  # close() waits for it

        self._batches = self._samples = 0
        self._forward_s: float | None = None
        self._mean_s: float | None = None

    # --- callers ------------------------------------------------------------------------------------------------------

    def submit(self, *args: Any, with_step: bool = False) -> asyncio.Future[Any]:
        """One sample (trees without batch dimension) -> a future of its row of the outputs; of `(row, step)` if
        `with_step`.

        The arrays must not change until the answer is there. A row is a view of the outputs of its whole batch: copy
        what you keep for long. Raises Overloaded when the queue is full. Whoever cancels the future leaves the queue.
        """
        loop = self._loop
        if loop is None or loop is not _get_running_loop() or self._closed:
            return self.here()._add(args, with_step)
        return self._add(args, with_step)

    def submit_batch(self, *args: Any, with_step: bool = False) -> asyncio.Future[Any]:
        """A batch `[B, ...]` -> a future of its outputs `[B, ...]`. It runs `max_batch_size` rows at a time with nobody
        in between, so one version answers all of it; small batches that wait together share a forward. Raises DataError
        when the arrays have no common B."""
        batcher = self.here()
        args = tree.as_arrays(args)
        return batcher._add(args, with_step, tree.batch_rows(args))

    def run_now(self, args: tuple[Any, ...], rows: int) -> tuple[Any, Any] | None:
        """`(outputs, step)` of a batch of arrays, run immediately, past the queue: for callers that collect batches
        themselves. None where it would block the loop for long (or a forward runs), or where batches have fixed sizes:
        use `submit_batch` then."""
        if self._closed or self.pad_to or rows > self.max_batch_size or not self._is_below(_NOW_BELOW):
            return None
        if not self.lock.acquire(blocking=False):
            return None
        try:
            return self._timed(args, rows), self._step()
        finally:
            self.lock.release()

    def call(self, *args: Any, batch: bool = False, with_step: bool = False) -> Any:
        """`submit` or `submit_batch` without a loop: runs in the calling thread, after the forward that may be
        running."""
        if self._closed:
            raise BrayError(_CLOSED)
        args = tree.as_arrays(args)
        rows = tree.batch_rows(args) if batch else 0
        with self.lock:
            errors: dict[int, BaseException] = {}
            value = self._run_whole(args, rows) if batch else self._run_samples([args], errors)[0]
            if errors:
                raise errors[0]
            return (value, self._step()) if with_step else value

    async def close(self, timeout: float = 5.0) -> None:
        """Fail those who wait; let the running batch end, or fail its callers too after `timeout` seconds; end the
        thread."""
        self._closed = True
        self._fail_queue(BrayError("the batcher was closed while this caller waited; nothing was computed for it"))
        for handle in (self._timer, self._watch):
            if handle is not None:
                handle.cancel()
        if self._running and self._loop is _get_running_loop():
            self._ended = self._ended or asyncio.get_running_loop().create_future()
            await asyncio.wait([self._ended], timeout=timeout)
        if self._running:
            running, self._running = self._running, None
            self._fail(
                running, BrayError(f"the batcher was closed, and the running forward did not end within {timeout} s")
            )
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of this batcher, once there is one."""
        return self._loop

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the start, callers that wait now, seconds of the last forward (None before the first one)."""
        return {
            "batches": self._batches,
            "samples": self._samples,
            "mean_batch_size": self._samples / self._batches if self._batches else 0.0,
            "queue": len(self._queue),
            "forward_s": self._forward_s,
            "inline": self._is_below(self.inline_below),
        }

    # --- in the loop --------------------------------------------------------------------------------------------------

    def here(self) -> Batcher:
        """The batcher of the running loop: this one, which now belongs to that loop, or the one that `elsewhere`
        returns."""
        if self._closed:
            raise BrayError(_CLOSED)
        running = _get_running_loop()
        if self._loop is None:
            self._loop = running
        if running is None or running is not self._loop:
            if running is not None and self._elsewhere is not None:
                return self._elsewhere()
            where = "a thread without a loop" if running is None else "another loop"
            raise BrayError(
                f"submit() belongs in one event loop, and this call came from {where}; call() works anywhere"
            )
        return self

    def _flush(self) -> None:
        """Start the next batch, unless one runs."""
        self._forget_timer()
        if self._running is not None:
            return
        items = self._take(self.max_batch_size)
        if not items:
            self._go_on()
            return
        forwards = -(-items[0][3] // self.max_batch_size) or 1
        if not (self._is_below(self.inline_below / forwards) and self.lock.acquire(blocking=False)):
            self._start(items)
            return
        self._asleep = False
        try:
            outcome = self._compute(items)
        except BaseException as e:  # Ctrl-C or sys.exit() is for the process, but the callers must not wait for it
            outcome = _failed(items, e)
            raise
        finally:
            self.lock.release()
            self._answer(items, outcome)
            self._go_on()

    def _go_on(self) -> None:
        """After a batch. The next one starts through the loop, so that sockets are served in between."""
        self._asleep = not self._queue
        if self._queue:
            self._wake_now()

    def _is_below(self, seconds: float) -> bool:
        return self._mean_s is not None and self._mean_s < seconds

    def _start(self, items: list[Item]) -> None:
        """Run a batch in the thread."""
        assert self._loop is not None
        self._asleep = False
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = _Thread(self, self._loop)
        except RuntimeError as e:  # the system has no more threads, or the interpreter is shutting down
            self._fail(items, e)
            self._go_on()
            return
        self._running = items
        self._thread.jobs.put((self, items))
        if self._watch is None:
            self._watch = self._loop.call_later(WATCH_S, self._check_thread)

    def _finish(self, items: list[Item], outcome: Outcome) -> None:
        """The thread is done with a batch: give it the next one, then answer."""
        if self._running is not items:  # close() or _check_thread() gave it up
            return
        self._running = None
        if self._queue and not self._is_below(self.inline_below) and (following := self._take(self.max_batch_size)):
            self._start(following)
        self._answer(items, outcome)
        if self._running is None:
            self._go_on()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _check_thread(self) -> None:
        """Every second of a running batch."""
        assert self._loop is not None
        self._watch = None
        if self._running is None:
            return
        if self._thread is not None and self._thread.is_alive():
            self._watch = self._loop.call_later(WATCH_S, self._check_thread)
            return
        running, self._running = self._running, None
        self._fail(running, BrayError("the thread that ran the forward has died; the next call starts a new one"))
        self._go_on()

    # --- in the loop or in a thread; the lock is held -----------------------------------------------------------------

    def _compute(self, items: list[Item]) -> Outcome:
        """Run a batch. Exceptions end up in the outcome."""
        try:
            errors: dict[int, BaseException] = {}
            if items[0][3]:
                values = self._run_batches(items, errors)
            else:
                values = self._run_samples([item[1] for item in items], errors)
            return values, errors, self._step()
        except Exception as e:
            return _failed(items, e)

    def _run_batches(self, items: list[Item], errors: dict[int, BaseException]) -> list[Any]:
        """Whole batches, together where there are several; if that fails, each alone, so that only the one at fault
        gets the error."""
        if len(items) == 1:
            return [self._run_whole(items[0][1], items[0][3])]
        ends = np.cumsum([item[3] for item in items]).tolist()
        try:
            outputs = self._run_whole(tree.concat([item[1] for item in items]), ends[-1])
        except Exception:
            values: list[Any] = [None] * len(items)
            for i, item in enumerate(items):
                try:
                    values[i] = self._run_whole(item[1], item[3])
                except Exception as e:
                    errors[i] = e
            return values
        return [tree.index(outputs, slice(end - item[3], end)) for item, end in zip(items, ends, strict=True)]

    def _run_samples(self, samples: list[tuple[Any, ...]], errors: dict[int, BaseException]) -> list[Any]:
        """A value per sample. Samples that do not fit get an entry in `errors` instead; an error of all of them is
        raised."""
        template = self._template
        if template is not None:
            try:
                batch = template.stack(self._fill(samples))
            except STACK_ERRORS:
                pass
            else:
                return self._forward(template, batch, len(samples))
        return self._sort_out(samples, errors)

    def _sort_out(self, samples: list[tuple[Any, ...]], errors: dict[int, BaseException]) -> list[Any]:
        """Samples of several kinds, or of a new one: run those of the expected kind, and tell the others what was
        expected.

        Expected is the declared kind, else the one that was answered most often, else the most frequent. As long as
        nothing was ever answered, a kind that the engine refuses gives way to the next, so that the majority cannot be
        wrong about the shape.
        """
        kinds = group_by_kind(samples, errors)
        templates = [self._templates.get(kind) or Template(next(iter(found.values()))) for kind, found in kinds.items()]
        templates.sort(key=lambda t: (-t.answered, -len(kinds[t.signature])))
        expected = self._declared
        values: list[Any] = [None] * len(samples)
        for template in templates:
            members = kinds[template.signature]
            if expected is not None and template.signature != expected.signature:
                for i, arrays in members.items():
                    errors[i] = DataError(
                        f"this sample is not of the kind that the model takes: {difference(expected.sample, arrays)}. "
                        "Paths start with the number of the argument"
                    )
                continue
            try:
                batch = template.stack(self._fill(list(members.values())))
                rows = self._forward(template, batch, len(members))
            except Exception as e:
                errors.update(dict.fromkeys(members, e))
                expected = template if template.answered else expected
            else:
                expected = template
                for i, row in zip(members, rows, strict=True):
                    values[i] = row
        return values

    def _forward(self, template: Template, batch: list[Any], rows: int) -> list[Any]:
        """Run stacked samples; their rows of the outputs."""
        values = split(self._timed(batch, rows), self._padded(rows), rows)
        template.answered += rows
        if template is not self._template and self._declared is None:
            self._template = template
            if template.signature not in self._templates:
                if len(self._templates) == _MAX_TEMPLATES:
                    del self._templates[min(self._templates.values(), key=lambda t: t.answered).signature]
                self._templates[template.signature] = template
        return values

    def _run_whole(self, args: tuple[Any, ...], rows: int) -> Any:
        """Run a batch of somebody's own, in parts if it is large."""
        parts = []
        for start in range(0, rows, self.max_batch_size):
            count = min(self.max_batch_size, rows - start)
            size = self._padded(count)
            index: Any = slice(start, start + count)
            if size > count:
                index = np.minimum(np.arange(start, start + size), start + count - 1)
            out = self._timed(tree.index(args, index), count)
            check(out, size)
            parts.append(out if size == count else tree.index(out, slice(count)))
        return parts[0] if len(parts) == 1 else tree.concat(parts)

    def _padded(self, rows: int) -> int:
        return next(size for size in self.pad_to if size >= rows) if self.pad_to else rows

    def _fill(self, samples: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return samples + [samples[-1]] * (self._padded(len(samples)) - len(samples)) if self.pad_to else samples

    def _timed(self, batch: Sequence[Any], rows: int) -> Any:
        start = time.perf_counter()
        try:
            return self._fn(*batch)
        finally:
            last, self._forward_s = self._forward_s, time.perf_counter() - start
            seconds = self._forward_s if last is None else min(last, self._forward_s)
            self._mean_s = seconds if self._mean_s is None else self._mean_s + _SMOOTHING * (seconds - self._mean_s)
            self._batches += 1
            self._samples += rows


_Jobs = queue.SimpleQueue[tuple[Batcher, list[Item]] | None]
_threads: weakref.WeakSet[_Thread] = weakref.WeakSet()


class _Thread(threading.Thread):
    """Runs batches, one after the other. It ends with its batcher, and a forward that hangs does not keep the process
    from ending."""

    def __init__(self, batcher: Batcher, loop: asyncio.AbstractEventLoop):
        self.jobs: _Jobs = queue.SimpleQueue()
        super().__init__(target=_work, args=(self.jobs, loop), name="bray-batcher", daemon=True)
        self.start()
        _threads.add(self)
        self.end = weakref.finalize(batcher, self.jobs.put, None)


@atexit.register
def _end_all() -> None:
    """Let running forwards end before the interpreter does: a thread that is still in an engine's C++ then aborts the
    process."""
    end = time.monotonic() + _EXIT_S
    threads = list(_threads)
    for thread in threads:
        thread.jobs.put(None)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _work(jobs: _Jobs, loop: asyncio.AbstractEventLoop) -> None:
    while (job := jobs.get()) is not None:
        batcher, items = job
        try:
            with batcher.lock:
                outcome = batcher._compute(items)
        except BaseException as e:  # sys.exit() in an engine must not end the thread
            outcome = _failed(items, e)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could wait
            loop.call_soon_threadsafe(batcher._finish, items, outcome)
        del job, batcher, items, outcome  # an idle thread keeps nothing alive


def _failed(items: list[Item], error: BaseException) -> Outcome:
    return [None] * len(items), dict.fromkeys(range(len(items)), error), None


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is left who could wait
            future.set_exception(error)


def own_error(error: BaseException) -> BaseException:
    """A caller's own copy of an error, so that no two tasks write tracebacks and notes into the same object."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        # the first kind would end the loop, the second is refused by futures
        wrapped = BrayError(f"the engine raised {error!r}")
        wrapped.__cause__ = error
        return wrapped
    kind = type(error)
    own = kind.__new__(kind, *error.args)  # not kind(...), which may want other arguments
    own.__dict__.update(error.__dict__)
    if "__notes__" in own.__dict__:
        own.__notes__ = list(own.__notes__)
    if str(own) != str(error):  # it keeps its text elsewhere, as UnicodeDecodeError does, and cannot be copied
        return error
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    return own.with_traceback(error.__traceback__)
