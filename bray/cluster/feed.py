"""Weights in the object store of a cluster: they are sent to each machine once, and read there without a copy."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bray.act import Clock
from bray.act.feed import Publication, WeightFeed, Weights
from bray.cluster import io

GAP_S = 0.012  # between two of those who wait that are told of a new publication
MOST_GAPS_S = 0.12  # between the first and the last


class StoreFeed(WeightFeed):
    """What one process has published last. Its weights are a reference into the store, where nobody writes over them.

    A mark is (which feed, number): that of a process which was started again, and may have lost what it had published,
    begins differently."""

    def __init__(self, put: Callable[[Any], Any]):
        """put: into the store; what it returns is the reference."""
        self._put = put
        self._id, self._number = uuid.uuid4().hex, 0
        self._newest: Publication | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def publish(self, weights: Callable[[], Weights], clock: Clock) -> Any:
        """The reference, to be sent along with a question."""
        ref = self._put(dict(weights()))
        self.announce(Publication(ref, clock))
        return ref

    def announce(self, publication: Publication) -> None:
        """From now on this is the newest."""
        self._number += 1
        self._newest = replace(publication, mark=(self._id, self._number))
        if self._waiting:
            io.loop().call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """One after the other: answering a Ray call takes milliseconds of both processes, and where many workers share
        few cores, telling all at once would delay their forwards."""
        gap = min(GAP_S, MOST_GAPS_S / max(1, len(self._waiting)))
        for i, told in enumerate(self._waiting):
            io.loop().call_later(i * gap, _settle, told)

    @property
    def mark(self) -> Any:
        return None if self._newest is None else self._newest.mark

    def read(self) -> Any:
        return self._newest

    async def wait(self, known: Any, timeout: float) -> Any:
        """On the io loop. Who is told late is given what is newest then."""
        told = asyncio.get_running_loop().create_future()
        self._waiting.add(told)  # before the look: of what is announced behind it, this one is told
        try:
            if self.mark == known:
                await asyncio.wait([told], timeout=timeout)
            return self.newest(known)
        finally:
            self._waiting.discard(told)


def _settle(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
