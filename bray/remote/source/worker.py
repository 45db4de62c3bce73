"""A reader of sources: iterates them in threads, and pushes what comes to a buffer, waiting for room."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from bray import tree
from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError, ConfigError, Ended, MissingComponent, Overloaded
from bray.remote.source.items import Loader, indexed, load, spread

logger = logging.getLogger("bray.remote")

_THREADS = 8
_UNDER_WAY = 256  # samples
_BYTES_UNDER_WAY = 8 << 20
_NOTE = 1.0  # seconds between notes of how far we are


class Target(Protocol):
    """What a reader needs of a RemoteBuffer."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Any: ...

    def _reads(self, reader: str, ended: bool) -> None: ...

    def _push_from(self, reader: str, sample: Any) -> Any:
        """Its `result(timeout)` waits until the sample is in the buffer."""
        ...


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

    def __init__(self, name: str, buffer: Target, sources: list[tuple[int, Any]], epoch: int, readers: list[str]):
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
        self._first = session().cluster.find(f"buffer/{self.buffer.name}/0")
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
        self.buffer._reads(self.name, False)
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
                        if not self._arrived(pushed):
                            return
                        waiting -= nbytes
                        done += 1
                        self._note(label, epoch, done)
            except BaseException:
                for pushed, _ in under_way:  # what came before the error is in the buffer when it ends
                    self._arrived(pushed)
                raise
            for pushed, _ in under_way:
                if not self._arrived(pushed):
                    return
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
        while not self._stop:
            try:
                return promise.result(1.0)
            except TimeoutError:
                if promise.done():
                    raise
        raise Ended(f"{self.name} was stopped")

    def _push(self, sample: Any) -> Any:
        while True:
            try:
                return self.buffer._push_from(self.name, sample)
            except Overloaded:  # other sources of this process fill the room that there is
                if self._stop:
                    raise
                time.sleep(0.01)

    def _arrived(self, pushed: Any) -> bool:
        while not self._stop:
            try:
                pushed.result(1.0)
                return True
            except TimeoutError:
                continue
        return False

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
        self.buffer._reads(self.name, True)
        shards = range(self.buffer.settings.shards)
        calls = [
            session().cluster.find(f"buffer/{self.buffer.name}/{i}").call("source", self.name, True, retry=True)
            for i in shards
        ]
        for call in calls:
            try:
                call.result()
            except BrayError as e:
                logger.warning("%s has ended, but not all shards know: %s", self.name, e)
        ended = self._ended
        assert ended is not None
        io.loop().call_soon_threadsafe(ended.set)
