"""Iterators over a buffer, which can be stacked:

    batches = PrefetchBuffer(TorchTensorBuffer(BatchBuffer(buffer, 4, kind="concate"), "cuda"), size=1)

A buffer may be any iterable: a RemoteBuffer, another of these, a data set. They end when it ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.remote.buffer.reader import forget_interrupt, interrupt
from bray.tree import NestedArray

_JOINED: dict[str, Callable[[Sequence[NestedArray]], Any]] = {"stack": tree.stack, "concate": tree.concat}
"""Ways to make one tree of several."""


class BatchBuffer(Iterator[Any]):
    """Batches of `batch_size` items of a buffer: stacked along a new axis (kind "stack"), joined along the first one
    they have ("concate"), or as a list (None). The last batch, when the buffer ends, may be smaller."""

    def __init__(self, buffer: Iterable[NestedArray], batch_size: int, kind: str | None = "stack"):
        if kind is not None and kind not in _JOINED:
            raise UnknownName("kind of batch", str(kind), _JOINED)
        if batch_size < 1:
            raise ConfigError(f"a batch has at least 1 item, got batch_size {batch_size}")
        self.buffer, self.batch_size, self.kind = iter(buffer), batch_size, kind

    def __next__(self) -> Any:
        items = []
        for item in self.buffer:
            items.append(item)
            if len(items) == self.batch_size:
                break
        if not items:
            raise StopIteration
        return items if self.kind is None else make_batch(items, self.kind)


class TorchTensorBuffer(Iterator[Any]):
    """Batches as tensors on a device. On the CPU they share the batches' memory; to a GPU they are copied from pinned
    memory while the caller goes on."""

    def __init__(self, buffer: Iterable[NestedArray], device: Any = None):
        import torch

        self.buffer, self.device = iter(buffer), torch.device(device or "cpu")
        self._torch = torch

    def __next__(self) -> Any:
        return tree.map(self._tensor, next(self.buffer))

    def _tensor(self, leaf: Any) -> Any:
        torch = self._torch
        if not isinstance(leaf, torch.Tensor):
            array = np.ascontiguousarray(leaf) if np.ndim(leaf) else np.asarray(leaf)
            leaf = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self.device.type == "cuda":
            return leaf.pin_memory().to(self.device, non_blocking=True)
        return leaf.to(self.device)


class CallbackBuffer(Iterator[Any]):
    """`callback(batch)` for each batch."""

    def __init__(self, buffer: Iterable[NestedArray], callback: Callable[[Any], Any]):
        self.buffer, self.callback = iter(buffer), callback

    def __next__(self) -> Any:
        return self.callback(next(self.buffer))


class PrefetchBuffer(Iterator[Any]):
    """Fetches the next `size` batches in a thread, while the caller uses the last one (0: no thread).

    Instead of waiting for the next batch, the last one is returned again, at most `max_reuse` times (0: never);
    `reused` counts these. An error in the thread is raised here, after the batches that were fetched before it.
    `close()` ends the thread, as does deleting this object.
    `name` is that of the thread.
    """

    def __init__(self, buffer: Iterable[NestedArray], size: int = 1, max_reuse: int = 0, name: str = ""):
        if size < 0 or max_reuse < 0:
            raise ConfigError(f"size and max_reuse are at least 0, got {size} and {max_reuse}")
        self.buffer, self.size, self.max_reuse, self.name = iter(buffer), size, max_reuse, name
        self._ahead = Prefetcher(self.buffer, size, max_reuse) if size else None
        if self._ahead is not None:
            self._ahead.start(f"prefetch {name}".strip())

    def __next__(self) -> Any:
        return next(self.buffer) if self._ahead is None else self._ahead.get()

    @property
    def ready(self) -> int:
        """Batches that are fetched and wait."""
        return 0 if self._ahead is None else len(self._ahead.ready)

    @property
    def reused(self) -> int:
        return 0 if self._ahead is None else self._ahead.reused

    def close(self) -> None:
        """End the thread: at once where it waits for a RemoteBuffer, else when the buffer gives it what it waits
        for."""
        if self._ahead is not None:
            self._ahead.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):
            self.close()


class Prefetcher:
    """The thread of a PrefetchBuffer, and of a trainer's Feed. It does not refer to them, so that they can be garbage
    collected. With size 0 it fetches a batch when one is asked for."""

    def __init__(self, buffer: Iterator[Any], size: int, max_reuse: int):
        self._buffer, self._size, self._max_reuse = buffer, size, max_reuse
        self._changed = threading.Condition()
        self.ready: deque[Any] = deque()
        self.reused = 0
        """Batches given again so far."""
        self._wanted = size  # batches that may be ready
        self._error: BaseException | None = None
        self._started = self._closed = False
        self._thread = 0
        self._last: Any = None
        self._left = 0  # times that the last one may be given again

    def start(self, name: str) -> None:
        """If it is not started yet."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def get(self, timeout: float | None = None) -> Any:
        """The next batch, or the last one again; None when there is none in time. What the thread ended with is raised
        here."""
        with self._changed:
            if self._left and not self.ready and self._error is None:
                self._left -= 1
                self.reused += 1
                return self._last
            self._wanted = max(1, self._size)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.ready or self._error is not None or self._closed, timeout):
                return None
            if not self.ready:
                raise StopIteration if self._closed or self._error is None else self._error
            self._wanted = self._size
            batch = self.ready.popleft()
            self._changed.notify_all()
        if self._max_reuse:
            self._last, self._left = batch, self._max_reuse
        return batch

    def _run(self) -> None:
        with self._changed:
            self._thread = threading.get_ident()
        try:
            while self._fetch():
                pass
        except BaseException as e:
            self._error = e
        with self._changed:
            self._thread = 0
            self._changed.notify_all()
        forget_interrupt()

    def _fetch(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self.ready) < self._wanted or self._closed)
            if self._closed:
                return False
        batch = next(self._buffer)
        with self._changed:
            self.ready.append(batch)
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """A batch that comes now is for others."""
        with self._changed:
            self._closed, self._last = True, None
            self.ready.clear()
            self._changed.notify_all()
            if self._thread:
                interrupt(self._thread)


class SampleBuffer(Iterator[Any]):
    """Batches of several buffers, mixed: `weights` are the share of batches that comes from each. The next one is not
    drawn at random but taken from the buffer that is furthest behind its share, so the shares are right to within one
    batch at any time. A buffer that ends leaves the mixture, which ends with the last one."""

    def __init__(self, buffers: Sequence[Iterable[NestedArray]], weights: Sequence[float] | None = None):
        weights = [1.0] * len(buffers) if weights is None else [float(w) for w in weights]
        if not buffers or len(weights) != len(buffers):
            raise ConfigError(f"one weight per buffer: got {len(buffers)} buffers and {len(weights)} weights")
        if not all(0.0 <= w < np.inf for w in weights) or not sum(weights) > 0.0:
            raise ConfigError(f"the weights of buffers are numbers of at least 0, and not all 0: got {weights}")
        self.buffers: list[Iterator[Any]] = [iter(b) for b in buffers]
        self.weights = [w / sum(weights) for w in weights]
        self._owed = [0.0] * len(buffers)

    def __next__(self) -> Any:
        while True:
            total = sum(self.weights)
            if not total:
                raise StopIteration
            for i, weight in enumerate(self.weights):
                self._owed[i] += weight / total
            chosen = max((i for i, w in enumerate(self.weights) if w), key=lambda i: self._owed[i])
            self._owed[chosen] -= 1.0
            try:
                return next(self.buffers[chosen])
            except StopIteration:
                self.weights[chosen] = 0.0
                self._owed = [0.0] * len(self._owed)


class ReuseBuffer(Iterator[Any]):
    """A data set that starts over when it ends, forever."""

    def __init__(self, dataset: Iterable[NestedArray]):
        if iter(dataset) is dataset:
            raise ConfigError(
                f"{type(dataset).__name__} is an iterator, which can be read once: give an object whose __iter__ "
                "starts anew, such as a list"
            )
        self.dataset = dataset
        self._items = iter(dataset)

    def __next__(self) -> Any:
        for item in self._items:
            return item
        self._items = iter(self.dataset)
        return next(self._items)  # StopIteration where it is empty


def handle_nested_array(nested: NestedArray, handler: Callable[[Any], Any]) -> NestedArray:
    """Apply a function to each leaf of a tree; the structure stays."""
    return tree.map(handler, nested)


def make_batch(samples: Sequence[NestedArray], kind: str = "stack") -> NestedArray:
    """Trees of one structure -> one tree `[len(samples), ...]`; kind "concate" joins them along their first axis
    instead."""
    if kind not in _JOINED:
        raise UnknownName("kind of batch", str(kind), _JOINED)
    return _JOINED[kind](samples)
