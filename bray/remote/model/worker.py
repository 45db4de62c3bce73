"""A process that answers for a model: batches come as frames over connections, those that wait together share a
forward."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import traceback
from typing import Any

import numpy as np

from bray import tree
from bray.cluster.session import session
from bray.errors import BrayError, RemoteError
from bray.remote.model.caller import FORWARD
from bray.remote.model.client import Follower
from bray.remote.model.engine_host import EngineHost
from bray.remote.model.keeper import ModelInfo
from bray.remote.model.layout import CURRENT, RowsReader, Writer
from bray.serving.link import Address, Link

logger = logging.getLogger("bray.remote")


class ModelWorker:
    """One of the workers of a model."""

    def __init__(self, model: str, index: int):
        self.model, self.index = model, index
        self.where = f"model/{model}/{index} (pid {os.getpid()} on {socket.gethostname()})"

    async def start(self) -> None:
        self._follower = Follower(self.model)
        self._follower.follow(await self._follower.keeper.call("about", retry=True))
        self.served = await self._follower.serve(self._make_served)
        self._loop = asyncio.get_running_loop()
        self.listener = await session().listen(f"model-{self.model}-{self.index}", self._message)

    def _make_served(self, about: ModelInfo) -> EngineHost:
        import torch

        from bray.train.device import device_of

        threads = max(1, int(about.definition.cpus_per_worker))
        if session().member:  # a process of our own
            torch.set_num_threads(threads)
            torch.seed()  # else all workers of a Model that draws numbers draw the same ones
        device = device_of(about.definition.gpus_per_worker > 0, self.where)
        return EngineHost(about, self._follower.keeper, device.type, threads)

    def address(self) -> Address:
        return self.listener.address

    def numbers(self) -> dict[str, Any]:
        """What this worker does, for a look from outside."""
        return {**self.served.host.numbers(), "engine": self.served.engine, "pid": os.getpid()}

    async def close(self) -> None:
        self._follower.close()
        await self.listener.close()
        await self.served.host.close()

    # --- frames -------------------------------------------------------------------------------------------------------

    def _message(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        """A frame is one batch to the ModelHost, whose batcher merges small batches that wait together."""
        if kind != FORWARD:
            raise BrayError(f"a model knows messages of kind {FORWARD}, got {kind}")
        if link.data is None:
            link.data = RowsReader(), Writer()
        batch = link.data[0].read(body)
        if batch.step == CURRENT:
            answer = self.served.host.forward(*batch.values, batch=True, with_step=True)
        else:
            answer = self._loop.create_task(self.served.ask_version(batch.values, True, batch.step, True))
        answer.add_done_callback(lambda answer: self._answered(link, number, batch.rows, answer))

    def _answered(self, link: Link, number: int, rows: int, answer: asyncio.Future[Any]) -> None:
        try:
            outputs, step = answer.result()
            if type(outputs) is not np.ndarray:
                outputs = tree.map(np.asarray, outputs)
            link.reply(number, *link.data[1].write(outputs, rows, step))
        except BrayError as e:
            link.fail(number, e)
        except Exception as e:
            trace = "".join(traceback.format_exception(e)).rstrip()
            link.fail(number, RemoteError(f"{trace}\nraised in {self.where}"))
