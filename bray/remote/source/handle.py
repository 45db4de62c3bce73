"""Starting the readers of a buffer's sources, and waiting for them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import ConfigError
from bray.inference.host import Promise
from bray.remote.source.items import FOREVER, indexed
from bray.remote.source.worker import SourceReader, Target

logger = logging.getLogger("bray.remote")

_MOST_WORKERS = 4


def add_source(buffer: Target, sources: Sequence[Any], num_workers: int | None, epoch: int, name: str) -> Promise:
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
    shards = [cluster.find(f"buffer/{buffer.name}/{i}") for i in range(buffer.settings.shards)]

    def tell(reader: str, ended: bool) -> None:
        for call in [s.call("source", reader, ended, retry=True) for s in shards]:
            call.result()

    for reader in names:  # all of them, before the first can end
        tell(reader, False)
    members: list[Member] = []
    try:
        for i, reader in reversed(list(enumerate(names))):  # the first ones have the sources, and find the others there
            mine = [(n, s) for n, s in enumerate(sources) if _shared(s) or n % count == i]
            members.append(cluster.start(reader, SourceReader, reader, buffer, mine, epoch, names))
    except BaseException as e:
        for reader in names[: count - len(members)]:
            tell(reader, True)
        if not isinstance(e, (TypeError, AttributeError, pickle.PicklingError)):
            raise
        raise ConfigError(
            f"the sources of buffer {buffer.name!r} cannot be sent to another process ({e}): give objects that can be "
            "pickled, or a function that makes them there"
        ) from None
    promise = Promise()
    promise.set_running_or_notify_cancel()
    io.spawn(_wait(members, promise), f"waiting for {names[0]}")
    return promise


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
    errors = []
    for member in members:
        try:
            await member.call("wait", timeout=FOREVER, retry=True)
        except BaseException as e:
            errors.append(e)
    if errors:
        promise.set_exception(errors[0])
    else:
        promise.set_result(None)
