"""The workers of a model, seen from one event loop: samples of all who ask in a turn of the loop travel together.

Each loop that asks has one connection to each worker, and at most MAX_IN_FLIGHT frames under way on it. Meanwhile
samples accumulate, and the next frame takes what there is. The worker with the fewest rows under way comes first. What
a worker that died had not answered is sent to another one; nobody waits longer than ANSWER_S for a worker's answer, or
NOBODY_S for a worker to be reachable.

A frame is a batch as columns, whose layout is described once per connection and then called by a number
(`bray.tree.layout`):

    body = step i64 | rows u32 | layout u32 | length of the description u32 | 4 bytes 0 | description | columns

The description comes with the first batch of a kind on a connection, and with every batch that has no number (layout
0).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bray import tree
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError, DataError, LinkLost, Unreachable
from bray.inference.batcher import Collector, Item, group_by_kind
from bray.inference.rows import STACK_ERRORS, Template, WrongSample, split
from bray.serving.link import Link
from bray.tree.layout import Layout, describe, to_bytes

FORWARD = 1
"""The kind of message."""
MAX_IN_FLIGHT = 2
"""Frames under way to one worker."""
MIN_ROWS = 8
"""Rows of a frame, where `max_batch_size` is smaller."""
ANSWER_S = 60.0
NOBODY_S = 30.0
CONNECT_S = 10.0
TRIES = 2
"""How often a sample is sent: one that kills its worker must not take all others with it."""
_CHECK_S = 1.0
_HEAD = struct.Struct("<qIII4x")
_MAX_DESCRIPTION = 1 << 20
MOST_KINDS = 64
"""Layouts that one side of a connection remembers; further kinds are described each time."""
CURRENT = -1
"""The step of a request for whichever version is current."""


class WorkerConnection:
    """The connection to one worker."""

    def __init__(self, member: Member):
        self.member = member
        self.link: Link | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.writer, self.reader = Writer(), RowsReader()
        self.in_flight: dict[asyncio.Future[memoryview], tuple[list[Item], float]] = {}
        self.rows = 0  # under way
        self.error = "it was never reached"


class Caller(Collector):
    """See the module. All of it belongs in the loop in which it was made."""

    def __init__(self, name: str, members: Sequence[Member], max_batch_size: int):
        super().__init__(max(max_batch_size, MIN_ROWS))
        self.name = name
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._workers = [WorkerConnection(m) for m in members]
        self._tried: dict[asyncio.Future[Any], int] = {}  # how often a sample was lost with its worker
        self._template: Template | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._alone_since: float | None = None  # no worker is connected
        self._closed = False

    # --- asking -------------------------------------------------------------------------------------------------------

    def ask(self, args: tuple[Any, ...], batch: bool, step: int | None, with_step: bool) -> asyncio.Future[Any]:
        """A sample, or a batch -> a future of its outputs; of `(outputs, step)` if `with_step`."""
        if not batch:
            return self._add(args, with_step, 0, step)
        args = tree.as_arrays(args)
        return self._add(args, with_step, tree.batch_rows(args), step)

    def _flush(self) -> None:
        """Send what waits, as long as a worker has room for another frame."""
        self._asleep = True
        while self._queue:
            free = [w for w in self._workers if w.link is not None and len(w.in_flight) < MAX_IN_FLIGHT]
            if not free:
                break
            items = self._take(min(self.max_batch_size, -(-len(self._queue) // len(free))))
            if items:
                self._send(min(free, key=lambda w: w.rows), items)
        for worker in self._workers:
            if worker.link is None and worker.connecting is None:
                worker.connecting = self._loop.create_task(self._connect(worker))
        if self._watch is None and self._somebody_waits():
            self._watch = self._loop.call_later(_CHECK_S, self._check)

    def _somebody_waits(self) -> bool:
        return bool(self._queue) or any(w.in_flight for w in self._workers)

    def _send(self, worker: WorkerConnection, items: list[Item]) -> None:
        if items[0][3]:
            self._send_frame(worker, items, items[0][1], items[0][3])
            return
        samples = [item[1] for item in items]
        try:
            if self._template is None:
                raise WrongSample
            batch = tuple(self._template.stack(samples))
        except STACK_ERRORS:
            errors: dict[int, BaseException] = {}
            for members in group_by_kind(samples, errors).values():
                arrays = list(members.values())
                self._template = Template(arrays[0])
                self._send_frame(worker, [items[i] for i in members], tuple(self._template.stack(arrays)), len(members))
            for i, error in errors.items():
                self._fail([items[i]], error)
        else:
            self._send_frame(worker, items, batch, len(items))

    def _send_frame(self, worker: WorkerConnection, items: list[Item], batch: Any, rows: int) -> None:
        assert worker.link is not None
        step = CURRENT if items[0][4] is None else items[0][4]
        try:
            answer = worker.link.request(FORWARD, *worker.writer.write(batch, rows, step))
        except BrayError as e:  # too large for one message
            self._fail(items, e)
            return
        worker.in_flight[answer] = items, self._loop.time()
        worker.rows += rows
        answer.add_done_callback(lambda answer: self._answered(worker, answer))

    def _answered(self, worker: WorkerConnection, answer: asyncio.Future[memoryview]) -> None:
        items, _ = worker.in_flight.pop(answer)
        whole = items[0][3]
        worker.rows -= whole or len(items)
        try:
            step, rows, _, values = worker.reader.read(answer.result())
            outputs = [values] if whole else split(values, rows, len(items))
        except LinkLost as e:
            self._retry(worker, items, e)
        except Exception as e:
            self._fail(items, e)
        else:
            self._answer(items, (outputs, {}, step))
            for item in items if self._tried else ():
                self._tried.pop(item[0], None)
        if self._queue and self._asleep:
            self._wake()

    def _retry(self, worker: WorkerConnection, items: list[Item], error: LinkLost) -> None:
        """A worker died: another one gets what it had not answered."""
        for future, *_ in items:
            self._tried[future] = self._tried.get(future, 0) + 1
        given_up = [item for item in items if self._tried[item[0]] >= TRIES]
        why = f"{TRIES} workers of model {self.name!r} died before they answered, {worker.member.name} last: {error}"
        self._fail(given_up, Unreachable(why))
        self._requeue([*items, *self._queue])

    def _fail(self, items: Any, error: BaseException) -> None:
        super()._fail(items, error)
        for item in items:
            self._tried.pop(item[0], None)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _connect(self, worker: WorkerConnection) -> None:
        """Find a worker, which may be about to be restarted, as long as somebody waits."""
        while worker.link is None:
            try:
                address = await worker.member.call("address", timeout=CONNECT_S, retry=True)
                link = await session().connect(address, lost=lambda link: self._lost(worker, link))
            except Exception as e:  # whatever it failed with when it started, for one
                worker.error = str(e)
                if not self._queue:
                    break
                await asyncio.sleep(0.2)
            else:
                worker.writer, worker.reader = Writer(), RowsReader()
                worker.link = link
        worker.connecting = None
        self._flush()

    def _lost(self, worker: WorkerConnection, link: Link) -> None:
        if worker.link is link:
            worker.link = None
            worker.error = "the connection ended"
            if not self._closed and self._asleep:
                self._wake()  # which connects again

    def _check(self) -> None:
        """Every second while somebody waits: has a worker stopped answering, is there no worker?"""
        self._watch = None
        now = self._loop.time()
        for worker in self._workers:
            late = [a for a, (_, sent) in worker.in_flight.items() if now - sent > ANSWER_S and not a.done()]
            if late and worker.link is not None:
                for answer in late:
                    answer.set_exception(Unreachable(f"{worker.member.name} did not answer in {ANSWER_S:g} s"))
                worker.link.close()
        if any(w.link is not None for w in self._workers):
            self._alone_since = None
        elif self._queue:
            self._alone_since = self._alone_since or now
            if now - self._alone_since > NOBODY_S:
                why = "; ".join(f"{w.member.name}: {w.error}" for w in self._workers)
                self._fail_queue(Unreachable(f"no worker of model {self.name!r} was there for {NOBODY_S:g} s ({why})"))
        if self._somebody_waits():
            self._watch = self._loop.call_later(_CHECK_S, self._check)

    def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for worker in self._workers:
            if worker.connecting is not None:
                worker.connecting.cancel()
            if worker.link is not None:
                worker.link.close()
        self._fail_queue(BrayError(f"model {self.name!r} is closed"))


# --- frames -----------------------------------------------------------------------------------------------------------


def _kind(node: Any, columns: list[np.ndarray]) -> Any:
    """What decides the layout of a batch: structure, dtypes, shapes of rows. Hashable. The arrays are appended to
    `columns`."""
    if type(node) is np.ndarray:
        columns.append(node)
        return node.dtype, node.shape[1:]
    if isinstance(node, dict):
        return dict, tuple([(k, _kind(v, columns)) for k, v in node.items()])
    return (list if isinstance(node, list) else tuple), tuple([_kind(v, columns) for v in node])


class Writer:
    """The layouts that one side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def write(self, batch: Any, rows: int, step: int) -> list[bytes | memoryview]:
        """A batch `[rows, ...]` as the parts of a message."""
        columns: list[np.ndarray] = []
        kind = _kind(batch, columns)
        number, spec = self._known.get(kind), b""
        if number is None:
            spec = Layout(describe(batch, lead=1)).spec
            number = len(self._known) + 1 if len(self._known) < MOST_KINDS else 0
            if number:
                self._known[kind] = number
        return [_HEAD.pack(step, rows, number, len(spec)) + spec, *to_bytes(columns)]


class RowsBatch(NamedTuple):
    """What a message holds."""

    step: int
    rows: int
    text: bytes
    """The description; equal ones are of one kind."""
    values: Any


class RowsReader:
    """The layouts that the other side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[int, Layout] = {}

    def read(self, body: memoryview) -> RowsBatch:
        """Raises DataError on anything that is no such message. Arrays are copies, aligned and writable."""
        if len(body) < _HEAD.size:
            raise DataError(f"not a batch: {len(body)} bytes")
        step, rows, number, size = _HEAD.unpack_from(body)
        at = _HEAD.size + size
        if size > _MAX_DESCRIPTION or at > len(body) or number > MOST_KINDS:
            raise DataError(f"not a batch: a description of {size} bytes, number {number}")
        try:
            layout = Layout.parse(bytes(body[_HEAD.size : at])) if size else self._known.get(number)
            if layout is None:
                raise DataError(f"layout {number} was never described")
            columns = layout.columns(body, rows, at)
        except DataError as e:
            raise DataError(f"not a batch: {e}") from None
        if size and number:
            self._known[number] = layout
        return RowsBatch(step, rows, layout.spec, layout.tree([c.copy() for c in columns]))
