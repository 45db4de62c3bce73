"""RemoteBuffer: samples on their way from agents to trainers.

    buffer = RemoteBuffer("b", size=8, batch_size=128)
    buffer.push(*samples)                     # from any process, thread or coroutine; await it, or forget it
    for batch in buffer: ...                  # trees [128, ...]
    buffer.add_source(iterable, epoch=3)

The samples lie in shards, which are processes of the cluster. A handle holds only the settings: it may be sent anywhere
in the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from bray.cluster import io
from bray.cluster.session import ClusterSession, session
from bray.errors import ConfigError, Ended, MissingComponent, UnknownName, Unreachable
from bray.inference.host import Promise
from bray.remote.buffer.columns import Pushed
from bray.remote.buffer.connection import FLUSH_TIMEOUT, connection
from bray.remote.buffer.options import BufferDefinition, BufferOptions, without_store
from bray.remote.buffer.reader import PREFETCH, BufferReader
from bray.remote.buffer.worker import BufferShard
from bray.remote.master.handle import get, logger, set
from bray.tree import NestedArray

_FIND_TIMEOUT = 60.0  # for the shards of a buffer that another process is just making


class RemoteBuffer:
    """The buffer of this name, made if there is none. An existing one is found by its name alone, or with the settings
    it was made with.

    name      unique in the session
    settings  size=8, batch_size=128, ...: the fields of `bray.remote.buffer.options.BufferOptions`, each explained
              there. The first ones may be given by position, in that order

    It is a queue: each sample goes to one consumer, oldest first. A full one drops its oldest samples, or lets pushes
    wait (`drop=False`).
    """

    def __init__(self, name: str, *by_position: Any, **settings: Any):
        known = [f.name for f in fields(BufferOptions)]
        asked = without_store(dict(**dict(zip((*known, *BufferOptions.GONE), by_position, strict=False)), **settings))
        for key in asked:
            if key in BufferOptions.GONE:
                raise ConfigError(f"buffer {name!r}: {key}: {BufferOptions.GONE[key]}")
            if key not in known:
                raise UnknownName("setting", key, known, f"buffer {name!r}")
        self.settings = _find_or_make(BufferDefinition(name, **asked))

    @property
    def name(self) -> str:
        return self.settings.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self.settings,)

    def __repr__(self) -> str:
        return f"RemoteBuffer({self.name!r})"

    # --- pushing ------------------------------------------------------------------------------------------------------

    def push(self, *samples: NestedArray, drop: bool = True) -> Pushed:
        """Add samples: trees of numpy arrays and numbers (tensors are converted). They are copied before this returns.

        Await what it returns, take its `result()`, or forget it; the call itself never waits. A full queue drops its
        oldest samples. With drop=False the samples wait for room, and pushing without awaiting raises Overloaded when
        too many wait.
        """
        if _is_dropped(self.name):
            return Pushed(())
        return connection(self.settings).writer.push(samples, drop)

    def push_batch(self, batch: NestedArray, drop: bool = True) -> Pushed:
        """Add the rows of a tree `[N, ...]`: `push` of N samples, without taking them apart."""
        if _is_dropped(self.name):
            return Pushed(())
        return connection(self.settings).writer.push_batch(batch, drop)

    # --- reading ------------------------------------------------------------------------------------------------------

    def pop(self, timeout: float | None = None) -> NestedArray:
        """The next batch, a tree `[batch_size, ...]` (the next sample, where batch_size is None). Its arrays are the
        caller's.

        Waits for it in a thread; a coroutine awaits `pop_async` instead. Raises TimeoutError, or Ended when all sources
        have ended and everything is read.
        """
        reader = connection(self.settings).read()
        got = reader.pop()
        if not isinstance(got, Promise):
            return got()
        if io.is_loop() and not got.done():
            reader.give_up(got)
            raise RuntimeError("pop waits, and the loop of this process's connections must not: await pop_async()")
        with self._waiting(reader, got, timeout):
            got.result(timeout)
        return got.result()()

    async def pop_async(self, timeout: float | None = None) -> NestedArray:
        """`pop` in a coroutine."""
        reader = connection(self.settings).read()
        got = reader.pop()
        if not isinstance(got, Promise):
            return got()
        with self._waiting(reader, got, timeout):
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(got)), timeout)
        return got.result()()

    @contextlib.contextmanager
    def _waiting(self, reader: BufferReader, got: Promise, timeout: float | None) -> Iterator[None]:
        """After a timeout, what came at the last moment is there; who is interrupted leaves it to others."""
        try:
            yield
        except TimeoutError:
            if reader.give_up(got):
                raise TimeoutError(f"nothing came from buffer {self.name!r} in {timeout:g} s") from None
        except BaseException:
            reader.leave(got)
            raise

    def __iter__(self) -> Iterator[NestedArray]:
        return self

    def __next__(self) -> NestedArray:
        """As `pop`, but the next batches are fetched meanwhile. StopIteration when all sources have ended and
        everything is read."""
        connection(self.settings).read(PREFETCH)
        try:
            return self.pop()
        except Ended:
            raise StopIteration from None

    async def __aiter__(self) -> AsyncIterator[NestedArray]:
        with contextlib.suppress(Ended):
            while True:
                connection(self.settings).read(PREFETCH)
                yield await self.pop_async()

    # --- sources ------------------------------------------------------------------------------------------------------

    def add_source(
        self, *sources: Any, num_workers: int | None = None, epoch: int = 1, name: str | None = None
    ) -> Promise:
        """Fill the buffer from iterables, each read `epoch` times, in processes of their own. Samples wait for room;
        none is dropped. The samples of one iterable keep their order, for a single consumer.

        sources      iterables of samples, picklable, `iter()` of which starts anew; or functions that return a list of
                     such. One that has `__len__` and `__getitem__` is read by several workers at once, and so is a list
                     of functions that return a sample each
        num_workers  processes; None: one for each iterable, at most 4
        name         of the workers, `source/NAME/0` and so on; the buffer's if None
        The promise is kept when all are read, or broken by the error of the first one that raised: the others go on all
        the same.
        """
        from bray.remote.source import add_source

        return add_source(self.settings, sources, num_workers, epoch, name or self.name)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def numbers(self, timeout: float = 10.0) -> dict[str, Any]:
        """Samples pushed, popped, dropped, lost in crashes (about), waiting, behind (waiting for room), and bytes;
        `shards` has them one by one.
        Shards that do not answer in time are left out."""
        cluster = session().cluster
        shards: list[dict[str, Any]] = []
        calls = []
        for each in self.settings.members:
            with contextlib.suppress(MissingComponent):
                calls.append(cluster.find(each).call("numbers", timeout=timeout))
        for call in calls:
            with contextlib.suppress(Unreachable, MissingComponent):
                shards.append(call.result())
        keys = ("pushed", "popped", "dropped", "lost", "waiting", "behind", "bytes", "shared_bytes")
        total: dict[str, Any] = {key: sum(s[key] for s in shards) for key in keys}
        total["dropped"] += connection(self.settings).writer.dropped
        return {**total, "shards": shards}

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Wait until all that this process has pushed is there."""
        connection(self.settings).writer.flush(timeout)


def _handle(settings: BufferDefinition) -> RemoteBuffer:
    made = RemoteBuffer.__new__(RemoteBuffer)
    made.settings = settings
    return made


# --- finding and making -----------------------------------------------------------------------------------------------


def find(name: str) -> RemoteBuffer:
    """The buffer of this name; MissingComponent names those that are there."""
    return _handle(_found(name))


def _found(name: str) -> BufferDefinition:
    member = session().cluster.find(f"buffer/{name}/0")
    end = time.monotonic() + _FIND_TIMEOUT
    while True:  # not `retry=True`: this may be the io loop itself, which then has no time for it
        try:
            return member.call("described").result(_FIND_TIMEOUT)
        except Unreachable:  # being restarted
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _find_or_make(asked: BufferDefinition) -> BufferDefinition:
    cluster = session().cluster
    try:
        there = _found(asked.name)
    except MissingComponent:
        if _left_out(asked.name):
            return asked
        try:
            return _make(asked)
        except ConfigError:
            if not cluster.names(f"buffer/{asked.name}/"):
                raise
            there = _found(asked.name)  # another process was faster
    if asked not in (there, BufferDefinition(asked.name)):
        different = [
            f"{key}={getattr(there, key)!r} (not {getattr(asked, key)!r})"
            for key in BufferDefinition.__dataclass_fields__
            if getattr(there, key) != getattr(asked, key)
        ]
        raise ConfigError(f"buffer {asked.name!r} is there with other settings: {', '.join(different)}")
    end = time.monotonic() + _FIND_TIMEOUT
    while len(cluster.names(f"buffer/{asked.name}/")) < there.shards:
        if time.monotonic() > end:
            raise Unreachable(f"buffer {asked.name!r} has not all of its {there.shards} workers")
        time.sleep(0.1)
    return there


def _make(asked: BufferDefinition) -> BufferDefinition:
    cluster, members = session().cluster, asked.members

    def start(index: int) -> None:
        cluster.start(members[index], BufferShard, asked, index)

    start(0)  # of several processes that make the buffer, the one that makes its first shard makes them all
    try:
        if cluster.kind == "local":
            for index in range(1, len(members)):
                start(index)
        else:
            with ThreadPoolExecutor(8) as pool:  # a process takes seconds
                list(pool.map(start, range(1, len(members))))
    except BaseException:
        for name in members:
            cluster.stop(name)
        raise
    return asked


# --- buffers that a mode leaves out -----------------------------------------------------------------------------------

_LEFT_OUT = "bray/left_out"
_not_there: dict[str, ClusterSession] = {}  # buffers that were pushed to all the same, each with its session


def leave_out(names: Iterable[str]) -> None:
    """Tell all processes of the session that these buffers do not exist in it, and that samples for them are dropped:
    agents push in a deployment too, where nobody trains."""
    set(_LEFT_OUT, {session().token.hex(): sorted(names)})  # the next session of the trial may have them


def _left_out(name: str) -> bool:
    """Whether a buffer that was not found is one of them; this process does not look for it again."""
    if _is_dropped(name):
        return True
    try:
        if name not in get(_LEFT_OUT, {}).get(session().token.hex(), ()):
            return False
    except MissingComponent:  # a session without a master was not launched
        return False
    _not_there[name] = session()
    logger.info("buffer %s does not exist in this mode: what is pushed to it is dropped", name)
    return True


def _is_dropped(name: str) -> bool:
    return name in _not_there and _not_there[name] is session()


# --- by name ----------------------------------------------------------------------------------------------------------


def _named(name: str) -> RemoteBuffer:
    known = session().owned(("buffer", name))
    if known is not None:
        return _handle(known.settings)
    try:
        return _handle(BufferDefinition(name)) if _is_dropped(name) else find(name)
    except MissingComponent:
        if not _left_out(name):
            raise
        return _handle(BufferDefinition(name))


def push(name: str, *samples: NestedArray, drop: bool = True) -> Pushed:
    """`RemoteBuffer.push` of the buffer of this name, which must be there."""
    return _named(name).push(*samples, drop=drop)


def pop(name: str, timeout: float | None = None) -> NestedArray:
    """`RemoteBuffer.pop` of the buffer of this name, which must be there."""
    return _named(name).pop(timeout)
