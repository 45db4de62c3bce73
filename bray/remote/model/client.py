"""A model as one process sees it; all handles of the process share it."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray.cluster import io
from bray.cluster.session import Session, session
from bray.inference.host import Promise
from bray.remote.model.caller import Caller
from bray.remote.model.definition import Definition
from bray.remote.model.keeper import About
from bray.remote.model.served import Follower, Served
from bray.remote.model.weights import as_arrays

logger = logging.getLogger("bray.remote")

_clients: dict[str, Client] = {}
_lock = threading.Lock()


def client_of(name: str) -> Client:
    """The client of this process for a model. MissingComponent names the models that exist."""
    here = session()
    found = _clients.get(name)
    if found is not None and found.session is here and not found.ended:
        return found
    with _lock:
        found = _clients.get(name)
        if found is None or found.session is not here or found.ended:
            found = _clients[name] = Client(name, here)
            here.closers.append(found.close)
        return found


def forget(name: str) -> None:
    """The model of this name ends here; the next one of the name is another."""
    with _lock:
        found = _clients.pop(name, None)
    if found is not None:
        found.close()


class Client:
    """See the module. It opens (finds the keeper, makes an engine) when the first forward asks."""

    def __init__(self, name: str, here: Session):
        self.name, self.session = name, here
        self.keeper = here.cluster.find(f"model/{name}")
        self.is_open = False
        self.ended = False
        self.served: Served | None = None
        self.ask: Callable[..., Awaitable[Any]] = self._ask_workers
        """`ask(args, kwargs, batch, step, with_step)`: the outputs, when awaited. It must be open."""
        self._definition: Definition | None = None
        self._callers: dict[asyncio.AbstractEventLoop, Caller] = {}
        self._members: list[Any] = []
        self._opening: Future[None] | None = None
        self._follower: Follower | None = None
        self._lock = threading.Lock()
        self._publishing = False
        self._pending: _Publication | None = None

    # --- opening ----------------------------------------------------------------------------------------------------

    def opening(self) -> Future[None]:
        """Ends when forwards can be asked."""
        with self._lock:
            if self._opening is None:
                self._opening = io.submit(self._open())
            return self._opening

    async def _open(self) -> None:
        try:
            about: About = await self.keeper.call("about", again=True)
            definition = self._definition = about.definition
            if definition.is_local or self.session.cluster.kind == "local":
                self.served = await asyncio.to_thread(self._serve, about)
                self.ask = self.served.ask
            else:
                names = [f"model/{self.name}/{i}" for i in range(definition.num_workers)]
                self._members = [self.session.cluster.find(name) for name in names]
            self._follow(about)
            with self._lock:
                self.is_open = not self.ended
            if self.ended and self.served is not None:
                await self.served.close()
        except BaseException:
            self.close()
            raise

    def _serve(self, about: About) -> Served:
        if self.session.member:
            import torch

            torch.seed()  # in a process of ours: else all actors of a Model that draws numbers draw the same ones
        return Served(about, self.keeper)

    def _follow(self, about: About) -> None:
        with self._lock:
            follower = Follower(self.name, self.keeper, about.news.key, self.served, self.close)
            follower.env_steps = about.news.env_steps
            old, self._follower = self._follower, follower
            if old is not None:
                follower.published = old.published
                follower.step = max(follower.step, old.step)
                follower.env_steps = max(follower.env_steps, old.env_steps)
                old.close()

    def follower(self) -> Follower:
        """Of one who publishes or wants to know the step, and may never ask for a forward."""
        if self._follower is None:
            about: About = self.keeper.call("about", again=True).result()
            if self._follower is None:
                self._follow(about)
        assert self._follower is not None
        return self._follower

    @property
    def definition(self) -> Definition:
        if self._definition is None:
            self._definition = self.keeper.call("about", again=True).result().definition
        return self._definition

    # --- asking -----------------------------------------------------------------------------------------------------

    def _ask_workers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: bool, step: int | None, with_step: bool
    ) -> Awaitable[Any]:
        definition = self.definition
        if kwargs or definition.has_kwargs:
            args = definition.engine_args(args, kwargs)
        loop = asyncio.get_running_loop()
        caller = self._callers.get(loop)
        if caller is None:
            for old in [x for x in self._callers if x.is_closed()]:
                self._callers.pop(old, None)
            caller = self._callers[loop] = Caller(self.name, self._members, definition.max_batch_size)
        return caller.ask(args, batch, step, with_step)

    @property
    def step(self) -> int:
        """The newest step that this process knows of."""
        return self.follower().step

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(self, weights: Mapping[str, Any], step: int | None, env_steps: int = 0) -> Promise:
        """One publication is under way at a time. Of those that come meanwhile the newest follows it, and stands for them all."""
        arrays = as_arrays(weights)
        if self.session.cluster.kind == "local":
            arrays = {k: np.array(x) for k, x in arrays.items()}  # a trainer goes on writing into its arrays
        made = _Publication([Promise()], self.session.cluster.put(arrays), step, env_steps=env_steps)
        made.promises[0].set_running_or_notify_cancel()
        self.follower()
        with self._lock:
            if self._publishing:
                self._pending = made if self._pending is None else self._pending.then(made)
                return made.promises[-1]
            self._publishing = True
        self._send(made)
        return made.promises[-1]

    def _send(self, made: _Publication) -> None:
        call = self.keeper.call(
            "publish", made.ref, made.step, made.tag, made.count, self.step, made.env_steps, again=True
        )
        call.add_done_callback(lambda done: self._published(made, done))

    def _published(self, made: _Publication, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            with self._lock:
                assert self._follower is not None
                self._follower.step = max(self._follower.step, done.result())
                self._follower.published = made.ref, done.result(), made.tag
        else:
            logger.error("model %s: weights are not published: %s", self.name, error)
        with self._lock:
            following, self._pending = self._pending, None
            self._publishing = following is not None
        if following is not None:
            self._send(following)
        for promise in made.promises:
            promise.set_exception(error) if error is not None else promise.set_result(done.result())

    # --- ending -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The session ends, or the model of this name is another one now."""
        with self._lock:
            if self.ended:
                return
            self.ended, self.is_open = True, False
        if self._follower is not None:
            self._follower.close()
        for loop, caller in self._callers.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(caller.close)
        if self.served is not None:
            io.spawn(self.served.close(), f"closing model {self.name}")


@dataclass
class _Publication:
    promises: list[Promise]
    ref: Any
    step: int | None
    count: int = 1
    """Versions that it stands for, where they are only counted."""
    tag: str = ""
    env_steps: int = 0

    def __post_init__(self) -> None:
        self.tag = self.tag or uuid.uuid4().hex

    def then(self, newer: _Publication) -> _Publication:
        """The newer one, for both."""
        step, count = newer.step, newer.count
        if step is None:
            step, count = (None, self.count + count) if self.step is None else (self.step + count, 1)
        return _Publication([*self.promises, *newer.promises], newer.ref, step, count, newer.tag, newer.env_steps)
