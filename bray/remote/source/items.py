"""Items of one source, loaded by several readers at once and handed out in the order of the source."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from bray.cluster.protocol import Member
from bray.errors import DataError
from bray.inference.host import Promise

FOREVER = 1e8  # seconds
_AHEAD = (
    4  # requests to each reader that are under way or not used yet; one slow item does not hold up the other readers
)
_MOST_ITEMS = 64  # of one request
_SHORT = 0.02  # seconds: requests that take less ask for more items the next time


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
        promise.set_running_or_notify_cancel()
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
