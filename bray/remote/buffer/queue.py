"""The samples that wait in a shard. Who waits for them, and for room, is the shard's job (`worker.py`)."""

from __future__ import annotations

from collections import deque

from bray.errors import DataError
from bray.remote.buffer.columns import Chunk
from bray.tree.layout import Layout

_MESSAGE = 1 << 18  # bytes of single samples per answer


class Queue:
    """At most `capacity` rows, first in, first out, in batches of `batch_size` (None: single samples)."""

    def __init__(self, capacity: int, batch_size: int | None):
        self.capacity, self.batch_size = capacity, batch_size
        self._chunks: deque[Chunk] = deque()
        self._layout: Layout | None = None
        self.rows = self.nbytes = 0

    @property
    def room(self) -> int:
        return self.capacity - self.rows

    def check(self, layout: Layout) -> None:
        """Samples that share a batch have the same structure."""
        if self.batch_size is None:
            return
        if self._layout is None:
            self._layout = layout
        elif self._layout is not layout and (different := self._layout.differs(layout)):
            raise DataError(
                f"samples of a buffer with batch_size {self.batch_size} have the same keys and shapes; {different}. "
                "Pad or cut them, or make the buffer with batch_size=None."
            )

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.rows += chunk.rows
        self.nbytes += chunk.nbytes

    def drop(self, rows: int) -> None:
        """Drop the oldest rows."""
        self._take(rows)

    def has(self, ended: bool) -> bool:
        """Whether `take` gives something: a whole batch, or the rest at the end."""
        return self.rows > 0 if self.batch_size is None or ended else self.rows >= self.batch_size

    def take(self, most: int) -> list[Chunk]:
        """A batch, in pieces; or at most `most` single samples of one layout, and no more than fit in a message."""
        if self.batch_size is not None:
            return self._take(min(self.rows, self.batch_size))
        layout = self._chunks[0].layout
        most = min(most, max(1, _MESSAGE // max(1, layout.row_bytes)))
        rows = 0
        for chunk in self._chunks:
            if chunk.layout is not layout or rows >= most:
                break
            rows += chunk.rows
        return self._take(min(rows, most))

    def _take(self, rows: int) -> list[Chunk]:
        out: list[Chunk] = []
        while rows:
            chunk = self._chunks.popleft()
            if chunk.rows > rows:
                self._chunks.appendleft(chunk.part(rows, chunk.rows))
                chunk = chunk.part(0, rows)
            rows -= chunk.rows
            self.rows -= chunk.rows
            self.nbytes -= chunk.nbytes
            out.append(chunk)
        return out
