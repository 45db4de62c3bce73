"""A process that answers for a model: frames of samples come over connections, what waits is merged into one batch."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import traceback
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from bray import tree
from bray.cluster import wire
from bray.cluster.session import session
from bray.errors import BrayError, RemoteError
from bray.remote.model.caller import FORWARD
from bray.remote.model.keeper import About
from bray.remote.model.layout import CURRENT, Reader, Writer
from bray.remote.model.served import Follower, Served

logger = logging.getLogger("bray.remote")


class _Frame(NamedTuple):
    link: wire.Link
    number: int
    rows: int
    kind: tuple[int, bytes]
    """The version that is asked, and what the columns look like: frames of one kind may share a batch."""
    args: Any


class ModelWorker:
    """One of the workers of a model."""

    def __init__(self, model: str, index: int):
        self.model, self.index = model, index
        self.where = f"model/{model}/{index} (pid {os.getpid()} on {socket.gethostname()})"
        self._frames: deque[_Frame] = deque()
        self._busy = False

    async def start(self) -> None:
        keeper = session().cluster.find(f"model/{self.model}")
        about: About = await keeper.call("about", again=True)
        self.served: Served = await asyncio.to_thread(self._serve, about, keeper)
        self._most = about.definition.max_batch_size
        self._loop = asyncio.get_running_loop()
        self._listener = await session().listen(f"model-{self.model}-{self.index}", self._message)
        self._follower = Follower(self.model, keeper, about.news.key, self.served)

    def _serve(self, about: About, keeper: Any) -> Served:
        import torch

        threads = max(1, int(about.definition.cpus_per_worker))
        if session().member:  # a process of our own
            torch.set_num_threads(threads)
            torch.seed()  # else all workers of a Model that draws numbers draw the same ones
        device = "cuda" if about.definition.gpus_per_worker > 0 and torch.cuda.is_available() else "cpu"
        if about.definition.gpus_per_worker > 0 and device == "cpu":
            logger.warning("%s was given a GPU, and torch sees none: it runs on the CPU", self.where)
        return Served(about, keeper, device, threads)

    def address(self) -> wire.Address:
        return self._listener.address

    def numbers(self) -> dict[str, Any]:
        """What this worker does, for a look from outside."""
        return {**self.served.host.numbers(), "engine": self.served.engine, "pid": os.getpid()}

    async def close(self) -> None:
        self._follower.close()
        await self._listener.close()
        await self.served.close()

    # --- frames -----------------------------------------------------------------------------------------------------

    def _message(self, link: wire.Link, kind: int, number: int, body: memoryview) -> None:
        if kind != FORWARD:
            raise BrayError(f"a model knows messages of kind {FORWARD}, got {kind}")
        if link.data is None:
            link.data = Reader(), Writer()
        batch = link.data[0].read(body)
        self._frames.append(_Frame(link, number, batch.rows, (batch.step, batch.text), batch.values))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Begin with the next batch: all that wait and are of one kind, in order, as many rows as a batch may have."""
        frames, total = [self._frames.popleft()], 0
        total = frames[0].rows
        while self._frames and self._frames[0].kind == frames[0].kind and total + self._frames[0].rows <= self._most:
            frames.append(self._frames.popleft())
            total += frames[-1].rows
        args = frames[0].args if len(frames) == 1 else tree.concat([f.args for f in frames])
        self._ask(frames, args)

    def _ask(self, frames: list[_Frame], args: Any) -> None:
        step = frames[0].kind[0]
        try:
            if step == CURRENT:
                answer = self.served.host.forward(*args, batch=True, with_step=True)
            else:
                answer = self._loop.create_task(self.served.ask_version(args, True, step, True))
        except Exception as e:
            self._failed(frames, e)
            self._go_on()
            return
        answer.add_done_callback(lambda answer: self._answered(frames, answer))

    def _answered(self, frames: list[_Frame], answer: asyncio.Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            try:
                outputs, step = answer.result()
                self._reply(frames, outputs, step)
            except Exception as e:
                self._failed(frames, e)
        elif len(frames) > 1:  # whose fault it is, shows when each runs alone
            for frame in frames:
                self._loop.create_task(self._alone(frame))
        else:
            self._failed(frames, error)
        self._go_on()

    async def _alone(self, frame: _Frame) -> None:
        step = frame.kind[0]
        try:
            if step == CURRENT:
                answer = await self.served.host.forward(*frame.args, batch=True, with_step=True)
            else:
                answer = await self.served.ask_version(frame.args, True, step, True)
            self._reply([frame], *answer)
        except Exception as e:
            self._failed([frame], e)

    def _reply(self, frames: list[_Frame], outputs: Any, step: int) -> None:
        start = 0
        for frame in frames:
            part = outputs if len(frames) == 1 else tree.index(outputs, slice(start, start + frame.rows))
            start += frame.rows
            frame.link.reply(frame.number, *frame.link.data[1].write(_plain(part), frame.rows, step))

    def _failed(self, frames: list[_Frame], error: BaseException) -> None:
        if not isinstance(error, BrayError):
            trace = "".join(traceback.format_exception(error)).rstrip()
            error = RemoteError(f"{trace}\nraised in {self.where}")
        for frame in frames:
            frame.link.fail(frame.number, error)

    def _go_on(self) -> None:
        """The next batch starts through the loop, so that sockets are read in between."""
        self._busy = bool(self._frames)
        if self._busy:
            self._loop.call_soon(self._start)


def _plain(outputs: Any) -> Any:
    return outputs if type(outputs) is np.ndarray else tree.map(np.asarray, outputs)
