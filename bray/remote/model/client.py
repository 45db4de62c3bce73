"""A model as one process sees it: what is newest, forwards, publications. All handles of the process share one Client;
a process that answers for others has a ModelWorker."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from bray import tree
from bray.act import Clock
from bray.cluster import io
from bray.cluster.session import current, session
from bray.errors import BrayError, RemoteError
from bray.inference.host import Promise
from bray.remote.model.caller import CURRENT, FORWARD, Caller, RowsReader, Writer
from bray.remote.model.definition import Definition
from bray.remote.model.engine_host import EngineHost
from bray.remote.model.keeper import POLL_S, ModelInfo, News
from bray.remote.model.weights import as_arrays
from bray.serving.link import Address, Link

logger = logging.getLogger("bray.remote")

_RETRY_S = 0.5


class Follower:
    """Knows what is newest, by a long poll to the keeper, and brings those who asked for it to it."""

    def __init__(self, name: str):
        self.name, self.session = name, session()
        self.keeper = self.session.cluster.find(f"model/{name}")
        self.ended = False
        self.served: EngineHost | None = None
        """What answers in this process."""
        self._about: ModelInfo | None = None
        self._clock = Clock(0, -1)
        self._published: tuple[Any, Clock, str] | None = None  # last, by us: reference to weights, clock, tag
        self._following: Future[Any] | None = None
        self._lock, self._taking = threading.RLock(), threading.Lock()

    def follow(self, about: ModelInfo) -> None:
        """Hear of what is published from here on."""
        with self._lock:
            if self._about is None:
                self._about = about
                self._advance(about.news.clock)
                if not self.ended:
                    self._following = io.spawn(self._follow(about), f"following model {self.name}")

    @property
    def about(self) -> ModelInfo:
        """The model, and the newest that this process has heard of it."""
        if self._about is None:
            self.follow(self.keeper.call("about", retry=True).result())
        assert self._about is not None
        return self._about

    @property
    def clock(self) -> Clock:
        """The newest step that this process knows of, and the environment steps behind it. It does not go back."""
        _ = self.about  # it is heard of from now on
        return self._clock

    def _advance(self, clock: Clock) -> None:
        with self._lock:
            self._clock = Clock(*map(max, self._clock[:2], clock[:2]))

    async def serve(self, make: Callable[[ModelInfo], EngineHost]) -> EngineHost:
        """Answer in this process with what `make` makes in a thread."""
        served = await asyncio.to_thread(self._make, make)
        if self.served is None:
            await served.close()
        return served

    def _make(self, make: Callable[[ModelInfo], EngineHost]) -> EngineHost:
        with self._taking:  # what is published meanwhile waits
            served = make(self.about)
            with self._lock:
                self.served = None if self.ended else served
        return served

    def _take(self, about: ModelInfo) -> None:
        with self._taking:
            if self.served is not None:
                self.served.take(about.news)
            self._about = about
        self._advance(about.news.clock)

    async def _follow(self, about: ModelInfo) -> None:
        while True:
            known = about.news
            try:
                news = await self.keeper.call("newer", known.mark, timeout=3 * POLL_S, retry=True)
                if news is None:
                    continue
                if news.definition != known.definition:  # the model of this name is another one now
                    self.close()
                    return
                if news.mark[0] != known.mark[0]:  # the keeper was killed and has started again
                    await self._offer(news)
                newer = replace(about, news=news)
                await asyncio.to_thread(self._take, newer)
                about = newer
            except Exception as e:  # the keeper died and with it its answer; or a version cannot be built
                if current() is not self.session:
                    return
                why = (str(e).splitlines() or [type(e).__name__])[0]
                logger.warning("model %s stays at step %d in this process and retries: %s", self.name, known.step, why)
                logger.debug("following model %s", self.name, exc_info=True)
                await asyncio.sleep(_RETRY_S)

    async def _offer(self, news: News) -> None:
        """Give the keeper weights that it lost in a crash, where this process has newer ones than it."""
        ref, clock, tag = self._published or (None, Clock(0, -1), "")
        if self.served is not None and self.served.step > clock.version:
            weights, step = self.served.get_weights()
            ref, clock, tag = self.session.cluster.put(weights), Clock(self._clock.env_steps, step), self.about.news.tag
        if clock.version > news.step:
            await self.keeper.call("offer", ref, clock, tag, retry=True)

    def close(self) -> None:
        """The session ends, or the model of this name is another one now."""
        with self._lock:
            already, self.ended = self.ended, True
        if already:
            return
        if self._following is not None:
            self._following.cancel()
        if self.served is not None:
            io.spawn(self.served.close(), f"closing model {self.name}")


class _Publication(NamedTuple):
    promise: Promise
    ref: Any
    step: int | None
    env_steps: int


class Client(Follower):
    """Opens (finds out who answers, makes an engine) at the first forward, follows at the first question about the
    step.

    noise  the Policy of agents that explore: where the Model has noisy layers, forwards run in this process, on a copy
           that follows the published weights, and each has new noise. Other clients answer without noise, as the
           exported graph does
    """

    def __init__(self, name: str, noise: Any = None):
        super().__init__(name)
        self._noise = noise
        self.is_open = False
        self.has_kwargs = False
        self.has_answered = False
        """Whether a forward has come back: one that has never is still being loaded."""
        self.ask: Callable[..., Awaitable[Any]] = self._ask_workers
        """`ask(args, batch, step, with_step)`: the outputs, when awaited. The client must be open."""
        self._callers: dict[asyncio.AbstractEventLoop, Caller] = {}
        self._opening: Future[None] | None = None
        self._publishing = False
        self._pending: list[_Publication] = []

    # --- opening ------------------------------------------------------------------------------------------------------

    def opening(self) -> Future[None]:
        """Done when the client is open."""
        with self._lock:
            if self._opening is None:
                self._opening = io.submit(self._open())
            return self._opening

    async def _open(self) -> None:
        try:
            self.follow(await self.keeper.call("about", retry=True))
            definition = self.definition
            self.has_kwargs = definition.has_kwargs
            cluster = self.session.cluster
            if self._noise is not None:
                module = await asyncio.to_thread(cluster.get, self.about.module)
                self._noise = self._noise if getattr(module, "draws", None) else None
            if self._noise is not None or definition.is_local or cluster.kind == "local":
                served = await self.serve(lambda about: EngineHost(about, self.keeper, noise=self._noise))
                self.ask = served.ask
            else:
                names = [f"model/{self.name}/{i}" for i in range(definition.num_workers)]
                self._members = [cluster.find(name) for name in names]
            with self._lock:
                self.is_open = not self.ended
        except BaseException:
            self.close()
            raise

    @property
    def definition(self) -> Definition:
        return self.about.definition

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask_workers(self, args: tuple[Any, ...], batch: bool, step: int | None, with_step: bool) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        caller = self._callers.get(loop)
        if caller is None:
            for old in [x for x in self._callers if x.is_closed()]:
                self._callers.pop(old, None)
            caller = self._callers[loop] = Caller(self.name, self._members, self.definition.max_batch_size)
        return caller.ask(args, batch, step, with_step)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, weights: Mapping[str, Any], step: int | None, env_steps: int = 0) -> Promise:
        """One publication is sent at a time. Of those that come meanwhile the newest follows it, and stands for them
        all."""
        arrays = as_arrays(weights)
        if self.session.cluster.kind == "local":
            arrays = {k: np.array(x) for k, x in arrays.items()}  # a trainer goes on writing into its arrays
        made = _Publication(Promise(), self.session.cluster.put(arrays), step, env_steps)
        _ = self.clock  # the newest step that we know of goes along
        with self._lock:
            self._pending.append(made)
            idle, self._publishing = not self._publishing, True
        if idle:
            self._send_pending()
        return made.promise

    def _send_pending(self) -> None:
        with self._lock:
            made, self._pending = self._pending, []
            self._publishing = bool(made)
        if not made:
            return
        step, count = None, 0  # of the newest, where those before it were counted too
        for each in made:
            step, count = (step, count + 1) if each.step is None else (each.step, 0)
        if step is not None:
            step += count
        newest, tag = made[-1], uuid.uuid4().hex
        call = self.keeper.call(
            "publish", newest.ref, step, tag, count, self._clock.version, newest.env_steps, retry=True
        )
        call.add_done_callback(lambda done: self._sent(made, tag, done))

    def _sent(self, made: list[_Publication], tag: str, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            clock = Clock(made[-1].env_steps, done.result())
            self._published = made[-1].ref, clock, tag
            self._advance(clock)
        else:
            logger.error("model %s: weights are not published: %s", self.name, error)
        self._send_pending()
        for each in made:
            each.promise.settle(None if error is not None else done.result(), error)

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self.is_open = False
        for loop, caller in self._callers.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(caller.close)


def client_of(name: str, noise: Any = None) -> Client:
    """The client of this process for a model (and those who explore it). MissingComponent lists the models that
    exist."""
    return session().own(("model", name, noise), lambda: Client(name, noise))


# --- answering for others ---------------------------------------------------------------------------------------------


class ModelWorker:
    """A process that answers for a model: batches come as frames over connections, those that wait together share a
    forward."""

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
        device = device_of(about.definition.gpus_per_worker > 0, self.where)
        return EngineHost(about, self._follower.keeper, device.type, threads)

    def address(self) -> Address:
        return self.listener.address

    def numbers(self) -> dict[str, Any]:
        """What this worker does, for a look from outside."""
        return {**self.served.numbers(), "engine": self.served.engine, "pid": os.getpid()}

    async def close(self) -> None:
        self._follower.close()
        await self.listener.close()
        await self.served.close()

    # --- frames -------------------------------------------------------------------------------------------------------

    def _message(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        """A frame is one batch to the ModelHost, whose batcher merges small batches that wait together."""
        if kind != FORWARD:
            raise BrayError(f"a model knows messages of kind {FORWARD}, got {kind}")
        if link.data is None:
            link.data = RowsReader(), Writer()
        batch = link.data[0].read(body)
        if batch.step == CURRENT:
            answer = self.served.forward(*batch.values, batch=True, with_step=True)
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
