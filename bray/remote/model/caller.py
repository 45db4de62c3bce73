"""The workers of a model, seen from one event loop: samples of all who ask in a turn of the loop travel together.

A worker has one connection per loop that asks, and at most FLYING frames under way on it. While those are, samples accumulate, and the next
frame takes what there is. The worker with the fewest rows under way comes first. What a worker that died had not answered is sent to another
one; nobody waits longer than ANSWER_S for a worker, or NOBODY_S for there to be one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from bray.cluster import wire
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError, DataError, LinkLost, Unreachable
from bray.inference import rows as rows_
from bray.inference.rows import MISFITS, Template
from bray.remote.model.layout import CURRENT, Reader, Writer

logger = logging.getLogger("bray.remote")

FORWARD = 1
"""The kind of message."""
FLYING = 2
"""Frames under way to one worker."""
FEW_ROWS = 8
"""Rows of a frame, where `max_batch_size` is smaller."""
ANSWER_S = 60.0
NOBODY_S = 30.0
CONNECT_S = 10.0
TRIES = 2
"""How often a sample is sent: a worker that dies over it may not take all others with it."""
_LOOK_S = 1.0


# What waits: a future, the arguments, whether the step is wanted, the version that is asked, and the rows of a batch of one's own (0: one sample).
# (Plain tuples: an object with names costs half a microsecond.)
_Item = tuple["asyncio.Future[Any]", tuple[Any, ...], bool, int, int]


class Line:
    """The connection to one worker."""

    def __init__(self, member: Member):
        self.member = member
        self.link: wire.Link | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.writer, self.reader = Writer(), Reader()
        self.flying: dict[asyncio.Future[memoryview], tuple[list[_Item], float]] = {}
        self.rows = 0  # under way
        self.error = "it was never reached"


class Caller:
    """See the module. All of it belongs in the loop in which it was made."""

    def __init__(self, name: str, members: Sequence[Member], max_batch_size: int):
        self.name = name
        self.loop = asyncio.get_running_loop()
        self._lines = [Line(m) for m in members]
        self._most = max(max_batch_size, FEW_ROWS)
        self._queue: list[_Item] = []
        self._special = 0  # how many of them are batches, or ask for a version
        self._tried: dict[asyncio.Future[Any], int] = {}  # how often a sample was lost with its worker
        self._template: Template | None = None
        self._soon = False
        self._watch: asyncio.TimerHandle | None = None
        self._alone_since: float | None = None  # nobody is there to ask
        self._closed = False

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, args: tuple[Any, ...], batch: bool, step: int | None, with_step: bool) -> asyncio.Future[Any]:
        """A sample, or a batch -> a future of its outputs; of `(outputs, step)` if `with_step`."""
        rows = 0
        if batch:
            args = rows_.as_arrays(args)
            rows = rows_.length(args)
        if batch or step is not None:
            self._special += 1
        future = self.loop.create_future()
        self._queue.append((future, args, with_step, CURRENT if step is None else step, rows))
        if not self._soon:
            self._soon = True
            self.loop.call_soon(self._send_waiting)
        return future

    def _send_waiting(self) -> None:
        """Send what waits, as far as there are workers who have time."""
        self._soon = False
        while self._queue:
            free = [line for line in self._lines if line.link is not None and len(line.flying) < FLYING]
            if not free:
                break
            line = min(free, key=lambda line: line.rows)
            items = self._take(min(self._most, -(-len(self._queue) // len(free))))
            if items:
                self._send(line, items)
        if any(line.link is None and line.connecting is None for line in self._lines):
            self._connect_all()
        if self._watch is None and (self._queue or any(line.flying for line in self._lines)):
            self._watch = self.loop.call_later(_LOOK_S, self._look)

    def _take(self, most: int) -> list[_Item]:
        """The next frame: samples for one version, or a batch of somebody's own."""
        queue = self._queue
        if self._special:
            _, _, _, step, rows = queue[0]
            most = 1 if rows else next((i for i, item in enumerate(queue[:most]) if item[4] or item[3] != step), most)
        taken, self._queue = queue[:most], queue[most:]
        if self._special:
            self._special -= _count_special(taken)
        return [item for item in taken if not item[0].done()]  # the others were cancelled

    def _send(self, line: Line, items: list[_Item]) -> None:
        _, args, _, _, rows = items[0]
        if rows:
            self._send_frame(line, items, args, rows)
            return
        try:
            if self._template is None:
                raise rows_.Misfit
            batch = tuple(self._template.stack([item[1] for item in items]))
        except MISFITS:
            for kind, members in self._kinds(items).items():
                self._template = kind
                self._send_frame(line, members, tuple(kind.stack([item[1] for item in members])), len(members))
        else:
            self._send_frame(line, items, batch, len(items))

    def _kinds(self, items: list[_Item]) -> dict[Template, list[_Item]]:
        """Samples sorted by what they look like; those that are no trees of arrays get their error."""
        kinds: dict[Any, tuple[Template, list[_Item]]] = {}
        for future, given, *rest in items:
            try:
                args = rows_.as_arrays(given)
                signature = rows_.signature(args)
                if signature not in kinds:
                    kinds[signature] = Template(args), []
                kinds[signature][1].append((future, args, *rest))
            except Exception as e:
                future.set_exception(
                    e if isinstance(e, DataError) else DataError(f"this sample is no tree of arrays: {e!r}")
                )
        return dict(kinds.values())

    def _send_frame(self, line: Line, items: list[_Item], batch: Any, rows: int) -> None:
        link = line.link
        assert link is not None
        try:
            answer = link.request(FORWARD, *line.writer.write(batch, rows, items[0][3]))
        except BrayError as e:  # too large for one message
            self._fail(items, e)
            return
        line.flying[answer] = items, self.loop.time()
        line.rows += rows
        answer.add_done_callback(lambda answer: self._answered(line, answer))

    def _answered(self, line: Line, answer: asyncio.Future[memoryview]) -> None:
        items, _ = line.flying.pop(answer)
        whole = items[0][4]
        line.rows -= whole or len(items)
        try:
            step, rows, _, values = line.reader.read(answer.result())
            outputs = [values] if whole else rows_.split(values, rows, len(items))
        except LinkLost as e:
            self._again(line, items, e)
        except Exception as e:
            self._fail(items, e)
        else:
            for (future, _, with_step, _, _), output in zip(items, outputs, strict=True):
                if not future.done():
                    future.set_result((output, step) if with_step else output)
            if self._tried:
                self._forget(items)
        if self._queue and not self._soon:
            self._soon = True
            self.loop.call_soon(self._send_waiting)

    def _again(self, line: Line, items: list[_Item], error: LinkLost) -> None:
        """A worker died: others get what it had not answered."""
        for future, *_ in items:
            self._tried[future] = self._tried.get(future, 0) + 1
        again = [item for item in items if self._tried[item[0]] < TRIES]
        spent = [item for item in items if self._tried[item[0]] >= TRIES]
        why = f"{TRIES} workers of model {self.name!r} died before they answered, {line.member.name} last: {error}"
        self._fail(spent, Unreachable(why))
        self._queue = again + self._queue
        self._special += _count_special(again)

    def _fail(self, items: list[_Item], error: Exception) -> None:
        for future, *_ in items:
            if not future.done():
                future.set_exception(error)
        self._forget(items)

    def _forget(self, items: list[_Item]) -> None:
        for future, *_ in items:
            self._tried.pop(future, None)

    # --- connections ------------------------------------------------------------------------------------------------

    def _connect_all(self) -> None:
        for line in self._lines:
            if line.link is None and line.connecting is None:
                line.connecting = self.loop.create_task(self._connect(line))

    async def _connect(self, line: Line) -> None:
        """Find a worker, which may be about to be restarted, as long as somebody waits."""
        while line.link is None:
            try:
                address = await line.member.call("address", timeout=CONNECT_S, again=True)
                link = await session().connect(address, lost=lambda link: self._lost(line, link))
            except Exception as e:  # whatever it failed with when it started, for one
                line.error = str(e)
                if not self._queue:
                    break
                await asyncio.sleep(0.2)
            else:
                line.writer, line.reader = Writer(), Reader()
                line.link = link
        line.connecting = None
        self._send_waiting()

    def _lost(self, line: Line, link: wire.Link) -> None:
        if line.link is link:
            line.link = None
            line.error = "the connection ended"
            if not self._closed:
                self.loop.call_soon(self._send_waiting)  # which finds the next one

    def _look(self) -> None:
        """Every second while somebody waits: does anything move?"""
        self._watch = None
        now = self.loop.time()
        for line in self._lines:
            late = [a for a, (_, sent) in line.flying.items() if now - sent > ANSWER_S and not a.done()]
            if late and line.link is not None:
                for answer in late:
                    answer.set_exception(Unreachable(f"{line.member.name} did not answer in {ANSWER_S:g} s"))
                line.link.close()
        if any(line.link is not None for line in self._lines):
            self._alone_since = None
        elif self._queue:
            self._alone_since = self._alone_since or now
            if now - self._alone_since > NOBODY_S:
                why = "; ".join(f"{line.member.name}: {line.error}" for line in self._lines)
                waiting, self._queue, self._special = self._queue, [], 0
                self._fail(
                    waiting, Unreachable(f"no worker of model {self.name!r} was there for {NOBODY_S:g} s ({why})")
                )
        if self._queue or any(line.flying for line in self._lines):
            self._watch = self.loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for line in self._lines:
            if line.connecting is not None:
                line.connecting.cancel()
            if line.link is not None:
                line.link.close()
        self._fail(self._queue, BrayError(f"model {self.name!r} is closed"))
        self._queue.clear()


def _count_special(items: list[_Item]) -> int:
    return len([item for item in items if item[4] or item[3] != CURRENT])
