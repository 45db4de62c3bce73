"""Sources: iterables that fill a buffer, read in processes of their own, or in threads where there is one process only.

`add_source` starts the readers and waits for them; a `SourceReader` iterates sources in threads and pushes what comes,
waiting for room. Items of one source that can be loaded by their number are loaded by several readers at once, and
handed out in its order.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np

from bray import tree
from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError, ConfigError, DataError, Ended, MissingComponent, Overloaded
from bray.inference.host import Promise
from bray.remote.buffer.connection import connection
from bray.remote.buffer.options import BufferDefinition

logger = logging.getLogger("bray.remote")

_MOST_WORKERS = 4
_THREADS = 8
_UNDER_WAY = 256  # samples
_BYTES_UNDER_WAY = 8 << 20
_NOTE = 1.0  # seconds between notes of how far we are
FOREVER = 1e8  # seconds
_AHEAD = 4  # requests to each reader, under way or not used yet; one slow item does not hold up the other readers
_MOST_ITEMS = 64  # of one request
_SHORT = 0.02  # seconds: requests that take less ask for more items the next time


def add_source(
    buffer: BufferDefinition, sources: Sequence[Any], num_workers: int | None, epoch: int, name: str
) -> Promise:
    """Read iterables into a buffer; see `RemoteBuffer.add_source`."""
    if not sources:
        raise ConfigError(
            "add_source needs at least one source: an iterable of samples, or a function that returns a list of them"
        )
    if epoch < 1 or (num_workers is not None and num_workers < 1):
        raise ConfigError(f"epoch and num_workers are at least 1, got {epoch} and {num_workers}")
    if io.is_loop():
        raise RuntimeError(
            "sources are added by the main program or a thread: the io loop must not wait for their readers"
        )
    for i, source in enumerate(sources):
        _check(source, i, epoch)
    count = num_workers or min(len(sources), _MOST_WORKERS)
    if count > len(sources) and not any(map(_shared, sources)):
        logger.warning(
            "buffer %r: num_workers=%d, but an iterator gives one item after the other, so that each source is read "
            "by one worker. To read one source with several, give it __len__ and __getitem__, or make it a list of "
            "functions that return a sample each.",
            buffer.name,
            count,
        )
        count = len(sources)
    cluster = session().cluster
    taken = [int(n.rsplit("/", 1)[1]) for n in cluster.names(f"source/{name}/")]
    names = [f"source/{name}/{max(taken, default=-1) + 1 + i}" for i in range(count)]
    for reader in names:  # all of them, before the first can end
        _tell_shards(buffer, reader, False)
    members: list[Member] = []
    try:
        for i, reader in reversed(list(enumerate(names))):  # the first ones have the sources, and find the others there
            mine = [(n, s) for n, s in enumerate(sources) if _shared(s) or n % count == i]
            members.append(cluster.start(reader, SourceReader, reader, buffer, mine, epoch, names))
    except BaseException as e:
        for reader in names[: count - len(members)]:
            _tell_shards(buffer, reader, True)
        if not isinstance(e, (TypeError, AttributeError, pickle.PicklingError)):
            raise
        raise ConfigError(
            f"the sources of buffer {buffer.name!r} cannot be sent to another process ({e}): give objects that can be "
            "pickled, or a function that makes them there"
        ) from None
    promise = Promise()
    io.spawn(_wait(members, promise), f"waiting for {names[0]}")
    return promise


def _tell_shards(buffer: BufferDefinition, reader: str, ended: bool) -> None:
    find = session().cluster.find
    shards = [find(name) for name in buffer.members]
    for call in [shard.call("source", reader, ended, retry=True) for shard in shards]:
        call.result()


def _shared(source: Any) -> bool:
    """Whether all readers need it: each takes its part of what a function returns, and of items that are loaded by
    their number."""
    return not isinstance(source, Iterable) or indexed(source)


def _check(source: Any, i: int, epoch: int) -> None:
    if isinstance(source, (dict, str, bytes)) or not (isinstance(source, Iterable) or callable(source)):
        raise ConfigError(
            f"source {i}: expected an iterable of samples, or a function that returns a list of them; got "
            f"{type(source).__name__}"
        )
    if isinstance(source, Iterable) and epoch > 1 and iter(source) is source:
        raise ConfigError(
            f"source {i}: {type(source).__name__} is an iterator, which can be read once, and epoch is {epoch}: give "
            "an object whose __iter__ starts anew, such as a list"
        )


async def _wait(members: list[Member], promise: Promise) -> None:
    error = None
    for member in members:
        try:
            await member.call("wait", timeout=FOREVER, retry=True)
        except BaseException as e:
            error = error or e
    promise.settle(error=error)


# --- a reader ---------------------------------------------------------------------------------------------------------


class SourceReader:
    """Reads its sources `epoch` times each, up to 8 at once. One that raises is logged, with its traceback, and stops
    none of the others.

    name     of this member
    sources  (number, source): iterables, or functions that return lists of them. Source i is read by reader i % n of n
    readers  the names of all readers
    The items of one source are pushed in its order. Where there are fewer sources than readers, those that are left
    help: they load items of sources that have `__len__` and `__getitem__` for the reader that pushes them.
    How far it is, is noted in the first shard of the buffer: a reader that was killed goes on there.
    """

    def __init__(
        self, name: str, buffer: BufferDefinition, sources: list[tuple[int, Any]], epoch: int, readers: list[str]
    ):
        self.name, self.buffer, self.epoch, self._readers = name, buffer, epoch, readers
        self._sources = sources
        self._found: dict[str, Iterable[Any]] = {}  # all that this reader knows, also those that another one pushes
        self._all_found = threading.Event()
        self._loader = Loader(self._find)
        self._tasks: deque[tuple[str, Iterable[Any]]] = deque()
        self._progress: dict[str, tuple[int, int]] = {}  # (epochs done, items of the next one)
        self._lock = threading.Lock()
        self._running = 0
        self._stop = False
        self._errors: list[BaseException] = []
        self._ended: asyncio.Event | None = None
        self._noted = 0.0

    async def start(self) -> None:
        self._ended = asyncio.Event()
        self._first = session().cluster.find(self.buffer.members[0])
        self._progress = dict(await self._first.call("progress", self.name, retry=True) or {})
        threading.Thread(target=self._begin, name=self.name, daemon=True).start()

    async def wait(self) -> None:
        """Until everything is read and in the buffer. Raises the error of the first source that failed."""
        assert self._ended is not None
        await self._ended.wait()
        if self._errors:
            raise self._errors[0]

    async def load(self, label: str, numbers: range) -> tuple[float, list[Any]]:
        """Items of a source, for the reader that pushes them: (seconds that it took, the items)."""
        return await self._loader.load(label, numbers)

    async def close(self) -> None:
        self._stop = True

    # --- threads ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        connection(self.buffer).source = self.name, False
        which, count = self._readers.index(self.name), len(self._readers)
        for number, source in self._sources:
            if isinstance(source, Iterable):
                label = f"source {number} ({type(source).__name__})"
                self._found[label] = source
                if number % count == which:
                    self._tasks.append((label, source))
                continue
            label = f"source {number} ({getattr(source, '__name__', type(source).__name__)})"
            try:
                made = source()
                if not isinstance(made, (list, tuple)) or not all(isinstance(s, Iterable) for s in made):
                    raise ConfigError(f"it returns a list of iterables, got {type(made).__name__}")
            except BaseException as e:
                self._failed(label, e)
                continue
            for i, each in enumerate(made):
                self._found[part := f"{label}[{i}] ({type(each).__name__})"] = each
                if i % count == which:
                    self._tasks.append((part, each))
        self._all_found.set()
        self._running = min(_THREADS, len(self._tasks)) or 1
        for i in range(self._running):
            threading.Thread(target=self._read_all, name=f"{self.name} {i}", daemon=True).start()

    def _read_all(self) -> None:
        while not self._stop:
            with self._lock:
                if not self._tasks:
                    break
                label, source = self._tasks.popleft()
            try:
                self._read(label, source)
            except BaseException as e:
                self._failed(label, e)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._end()

    def _failed(self, label: str, error: BaseException) -> None:
        if self._stop:
            return
        what = f"{label} of {self.name} raised; the others go on"
        logger.error("%s", what, exc_info=error)
        error.add_note(what)
        self._errors.append(error)

    def _read(self, label: str, source: Iterable[Any]) -> None:
        epochs, items = self._progress.get(label, (0, 0))
        for epoch in range(epochs, self.epoch):
            skip = items if epoch == epochs else 0
            under_way: deque[tuple[Any, int]] = deque()
            waiting, done = 0, skip
            try:
                for sample in self._items(label, source, skip):
                    if self._stop:
                        return
                    nbytes = sum(getattr(leaf, "nbytes", 8) for leaf in tree.leaves(sample))
                    under_way.append((self._push(sample), nbytes))
                    waiting += nbytes
                    while len(under_way) > _UNDER_WAY or waiting > _BYTES_UNDER_WAY:
                        pushed, nbytes = under_way.popleft()
                        self._result(pushed)
                        waiting -= nbytes
                        done += 1
                        self._note(label, epoch, done)
            finally:
                for pushed, _ in under_way:  # also what came before an error is in the buffer when it ends
                    self._result(pushed)
            self._note(label, epoch + 1, 0, now=epoch + 1 == self.epoch)

    def _items(self, label: str, source: Any, skip: int) -> Iterator[Any]:
        """The samples of a source from number `skip` on. Other readers help where there are more of them than
        sources."""
        if not indexed(source) or len(self._found) >= len(self._readers):
            return map(load, islice(iter(source), skip, None))
        readers = [self._member(name) for name in self._readers]
        return spread(label, range(skip, len(source)), readers, self._result)

    def _member(self, name: str) -> Member:
        """Another reader; it may still be starting."""
        while True:
            try:
                return session().cluster.find(name)
            except MissingComponent:
                if self._stop:
                    raise
                time.sleep(0.05)

    def _find(self, label: str) -> Any:
        self._all_found.wait()
        return self._found.get(label)

    def _result(self, promise: Any) -> Any:
        """Of a call or a push, unless this reader is stopped."""
        while not self._stop:
            try:
                return promise.result(1.0)
            except TimeoutError:
                if promise.done():
                    return promise.result()
        raise Ended(f"{self.name} was stopped")

    def _push(self, sample: Any) -> Any:
        while True:
            try:
                return connection(self.buffer).writer.push((sample,), False, self.name)
            except Overloaded:  # other sources of this process fill the room that there is
                if self._stop:
                    raise
                time.sleep(0.01)

    def _note(self, label: str, epoch: int, items: int, now: bool = False) -> None:
        with self._lock:
            self._progress[label] = epoch, items
            if not now and time.monotonic() - self._noted < _NOTE:
                return
            self._noted = time.monotonic()
            progress = dict(self._progress)
        self._first.tell("progress", self.name, progress)

    def _end(self) -> None:
        """All is in: tell the shards, so that the buffer may end."""
        if self._stop:
            return
        connection(self.buffer).source = self.name, True
        try:
            _tell_shards(self.buffer, self.name, True)
        except BrayError as e:
            logger.warning("%s has ended, but not all shards know: %s", self.name, e)
        ended = self._ended
        assert ended is not None
        io.loop().call_soon_threadsafe(ended.set)


# --- items by their number --------------------------------------------------------------------------------------------


def indexed(source: Any) -> bool:
    """Whether items can be loaded by their number, in any order: it has `__len__` and `__getitem__`. Of lists only
    those whose items are functions:
    samples that are in memory need no loading."""
    if isinstance(source, (list, tuple, np.ndarray)):
        return len(source) > 0 and callable(source[0])
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def load(item: Any) -> Any:
    """A sample; an item that is a function is called for it."""
    return item() if callable(item) else item


class Loader:
    """Loads items that another reader asks for, one request after the other, in a thread of its own."""

    def __init__(self, find: Callable[[str], Any]):
        self._find = find
        self._requests: queue.SimpleQueue[tuple[str, range, Promise]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def load(self, label: str, numbers: range) -> tuple[float, list[Any]]:
        """(seconds that it took, the items of these numbers). Fewer items come where the next one raises: who asks for
        that one gets the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loads items", daemon=True)
            self._thread.start()
        promise = Promise()
        self._requests.put((label, numbers, promise))
        return await asyncio.wrap_future(promise)

    def _run(self) -> None:
        while True:
            label, numbers, promise = self._requests.get()
            began, items = time.monotonic(), []
            try:
                source = self._find(label)
                if source is None:
                    raise DataError(
                        f"{label}: this reader has no such source; functions return the same list in each process"
                    )
                for i in numbers:
                    items.append(load(source[i]))
            except BaseException as e:
                if not items:
                    promise.set_exception(e)
                    continue
            promise.set_result((time.monotonic() - began, items))


def spread(label: str, numbers: range, readers: list[Member], wait: Callable[[Promise], Any]) -> Iterator[Any]:
    """The items of these numbers in order, loaded by all `readers` (their method `load`) at the same time. `wait` gives
    a promise's result."""
    requests: deque[tuple[range, Promise]] = deque()
    turn = cycle(readers)

    def ask(some: range) -> tuple[range, Promise]:
        return some, next(turn).call("load", label, some, timeout=FOREVER, retry=True)

    size = 1
    while numbers or requests:
        while numbers and len(requests) < _AHEAD * len(readers):
            size = min(size, max(1, len(numbers) // len(readers)))  # near the end there is work for all of them
            requests.append(ask(numbers[:size]))
            numbers = numbers[size:]
        asked, promise = requests.popleft()
        seconds, items = wait(promise)
        if seconds < _SHORT:
            size = min(2 * size, _MOST_ITEMS)
        yield from items
        if len(items) < len(asked):
            requests.appendleft(ask(asked[len(items) :]))
