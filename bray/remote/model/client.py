"""A model as one process sees it: what is newest, forwards, publications. All handles of the process share one
Client."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from bray.cluster import io
from bray.cluster.session import current, session
from bray.inference.host import Promise
from bray.remote.model.caller import Caller
from bray.remote.model.definition import Definition
from bray.remote.model.engine_host import EngineHost
from bray.remote.model.keeper import POLL_S, Key, ModelInfo
from bray.remote.model.weights import as_arrays

logger = logging.getLogger("bray.remote")

_RETRY_S = 0.5


class Follower:
    """Knows what is newest, by a long poll to the keeper, and brings `served` (if there is one here) to it."""

    def __init__(self, name: str):
        self.name, self.session = name, session()
        self.keeper = self.session.cluster.find(f"model/{name}")
        self.ended = False
        self.served: EngineHost | None = None
        self._step = -1
        self._env_steps = 0
        self._published: tuple[Any, int, str] | None = None  # reference to weights, step, tag: what we published last
        self._following: Future[Any] | None = None
        self._lock = threading.Lock()

    def follow(self, about: ModelInfo, served: EngineHost | None = None) -> None:
        """Follow from here on; once more with `served` when that is ready."""
        with self._lock:
            if self.ended or (self._following is not None and served is None):
                return
            if self._following is not None:
                self._following.cancel()
            self.served = served
            self._step = max(self._step, about.news.step)
            self._env_steps = max(self._env_steps, about.news.env_steps)
            self._following = io.spawn(self._follow(about.news.key), f"following model {self.name}")

    async def _follow(self, key: Key) -> None:
        while True:
            try:
                news = await self.keeper.call("newer", key, self._newest_held(), timeout=3 * POLL_S, retry=True)
                if news is None:
                    continue
                if news.definition != key[0]:  # the model of this name is another one now
                    self.close()
                    return
                if news.wants == "offer":
                    await self._offer(key[2])
                    continue
                if self.served is not None:
                    await asyncio.to_thread(self.served.take, news)
                key = news.key
                self._step = max(self._step, news.step)
                self._env_steps = max(self._env_steps, news.env_steps)
            except Exception as e:  # the keeper died and with it its answer; or a version cannot be built
                if current() is not self.session:
                    return
                why = (str(e).splitlines() or [type(e).__name__])[0]
                logger.warning("model %s stays at step %d in this process and retries: %s", self.name, key[1], why)
                logger.debug("following model %s", self.name, exc_info=True)
                await asyncio.sleep(_RETRY_S)

    def _newest_held(self) -> int:
        """The newest step of which this process has the weights; -1 = none."""
        published = -1 if self._published is None else self._published[1]
        return published if self.served is None else max(published, self.served.host.step)

    async def _offer(self, tag: str) -> None:
        """Give the keeper weights that it lost in a crash."""
        if self._published is not None and self._published[1] == self._newest_held():
            ref, step, tag = self._published
        else:
            assert self.served is not None
            weights, step = self.served.host.get_weights()
            ref = self.session.cluster.put(weights)
        await self.keeper.call("offer", ref, step, tag, retry=True)

    def close(self) -> None:
        """The session ends, or the model of this name is another one now."""
        with self._lock:
            already, self.ended = self.ended, True
        if already:
            return
        if self._following is not None:
            self._following.cancel()
        if self.served is not None:
            io.spawn(self.served.host.close(), f"closing model {self.name}")


class _Publication(NamedTuple):
    promise: Promise
    ref: Any
    step: int | None
    env_steps: int


class Client(Follower):
    """Opens (finds out who answers, makes an engine) at the first forward, follows at the first question about the
    step."""

    def __init__(self, name: str):
        super().__init__(name)
        self.is_open = False
        self.has_kwargs = False
        self.has_answered = False
        """Whether a forward has come back: one that has never is still being loaded."""
        self.ask: Callable[..., Awaitable[Any]] = self._ask_workers
        """`ask(args, batch, step, with_step)`: the outputs, when awaited. The client must be open."""
        self._definition: Definition | None = None
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
            about: ModelInfo = await self.keeper.call("about", retry=True)
            definition = self._definition = about.definition
            self.has_kwargs = definition.has_kwargs
            served: EngineHost | None = None
            if definition.is_local or self.session.cluster.kind == "local":
                served = await asyncio.to_thread(self._serve, about)
                self.ask = served.ask
            else:
                names = [f"model/{self.name}/{i}" for i in range(definition.num_workers)]
                self._members = [self.session.cluster.find(name) for name in names]
            self.follow(about, served)
            with self._lock:
                self.is_open = not self.ended
            if self.ended and served is not None:
                await served.host.close()
        except BaseException:
            self.close()
            raise

    def _serve(self, about: ModelInfo) -> EngineHost:
        if self.session.member:
            import torch

            torch.seed()  # in a process of ours: else all actors of a Model that draws numbers draw the same ones
        return EngineHost(about, self.keeper)

    @property
    def definition(self) -> Definition:
        if self._definition is None:
            self._definition = self.keeper.call("about", retry=True).result().definition
        return self._definition

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask_workers(self, args: tuple[Any, ...], batch: bool, step: int | None, with_step: bool) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        caller = self._callers.get(loop)
        if caller is None:
            for old in [x for x in self._callers if x.is_closed()]:
                self._callers.pop(old, None)
            caller = self._callers[loop] = Caller(self.name, self._members, self.definition.max_batch_size)
        return caller.ask(args, batch, step, with_step)

    def _follow_at_first(self) -> None:
        if self._following is None:
            about: ModelInfo = self.keeper.call("about", retry=True).result()
            if self._following is None:
                self.follow(about)

    @property
    def step(self) -> int:
        """The newest step that this process knows of."""
        self._follow_at_first()
        return self._step

    @property
    def env_steps(self) -> int:
        """Environment steps behind the newest weights."""
        self._follow_at_first()
        return self._env_steps

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, weights: Mapping[str, Any], step: int | None, env_steps: int = 0) -> Promise:
        """One publication is sent at a time. Of those that come meanwhile the newest follows it, and stands for them
        all."""
        arrays = as_arrays(weights)
        if self.session.cluster.kind == "local":
            arrays = {k: np.array(x) for k, x in arrays.items()}  # a trainer goes on writing into its arrays
        made = _Publication(Promise(), self.session.cluster.put(arrays), step, env_steps)
        made.promise.set_running_or_notify_cancel()
        self._follow_at_first()
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
        call = self.keeper.call("publish", newest.ref, step, tag, count, self._step, newest.env_steps, retry=True)
        call.add_done_callback(lambda done: self._sent(made, tag, done))

    def _sent(self, made: list[_Publication], tag: str, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            with self._lock:
                self._step = max(self._step, done.result())
                self._published = made[-1].ref, done.result(), tag
        else:
            logger.error("model %s: weights are not published: %s", self.name, error)
        self._send_pending()
        for each in made:
            each.promise.set_exception(error) if error is not None else each.promise.set_result(done.result())

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self.is_open = False
        for loop, caller in self._callers.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(caller.close)


_clients: dict[str, Client] = {}
_lock = threading.Lock()


def client_of(name: str) -> Client:
    """The client of this process for a model. MissingComponent lists the models that exist."""
    here = session()
    with _lock:
        found = _clients.get(name)
        if found is None or found.session is not here or found.ended:
            found = _clients[name] = Client(name)
            here.close_hooks.append(found.close)
        return found


def forget(name: str) -> None:
    """The model of this name ends here; the next one of the name is another."""
    with _lock:
        found = _clients.pop(name, None)
    if found is not None:
        found.close()
