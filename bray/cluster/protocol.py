"""What a cluster offers: named workers, and calls to them that look the same whether they run in this process or under
Ray."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from bray.cluster import io
from bray.errors import BrayError, ConfigError, MissingComponent, RemoteError
from bray.inference.host import Promise

logger = logging.getLogger("bray.remote")

CALL_TIMEOUT = 60.0
CLOSE_TIMEOUT = 15.0  # a worker may have weights to save


class Node(NamedTuple):
    """A machine (or a part of one) of the cluster."""

    id: str
    host: str
    head: bool
    cpus: float
    gpus: float
    memory: float
    """MB"""


class Member(Protocol):
    """A started worker, wherever it runs. Cheap, and may be sent anywhere in the session."""

    name: str

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, retry: bool = False, **kwargs: Any
    ) -> Promise:
        """Call a method of the worker; await the Promise, or take its `.result()` in a thread.

        A worker that is dead or restarting raises Unreachable; with `retry` (for idempotent methods) the call is
        retried until `timeout`."""
        ...

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method without waiting: its result and its errors are lost."""
        ...


class Cluster(Protocol):
    kind: str

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        **kwargs: Any,
    ) -> Member:
        """Run `cls(*args, **kwargs)` as a member of this name, and wait until it answers. `memory` is in MB. It lives
        as long as the process that started it; after a crash it is created again with the same arguments."""
        ...

    def find(self, name: str) -> Member:
        """The member of this name; MissingComponent lists the existing ones of its kind."""
        ...

    def names(self, prefix: str = "") -> list[str]: ...

    def pid(self, name: str) -> int:
        """Of the process in which a member runs now."""
        ...

    def stop(self, name: str) -> None:
        """End a member; a missing one is not an error."""
        ...

    def nodes(self) -> list[Node]: ...

    def put(self, value: Any) -> Any:
        """A reference to a large value, which is sent to each machine once. It may be part of a call's arguments."""
        ...

    def get(self, ref: Any) -> Any: ...

    def host(self) -> str:
        """The address at which other machines reach this one."""
        ...

    def close(self) -> None: ...


def missing(name: str, names: Iterable[str]) -> MissingComponent:
    """The error for a missing `model/a`: it lists the existing models."""
    kind, _, rest = name.partition("/")
    if not rest:
        return MissingComponent("component", name, names)
    known = {n.split("/")[1] for n in names if n.startswith(kind + "/")}
    return MissingComponent(kind, rest.split("/")[0], known)


def name_taken(name: str) -> ConfigError:
    return ConfigError(f"{name} is there already: choose another name, or stop that one first")


# --- hosting a worker -------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """An error on its way to whoever waits."""

    error: BaseException
    """As it was raised; a RemoteError with the same text where it cannot be pickled."""
    trace: str
    where: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        trace = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(pickle.dumps(error))  # our own bytes of a moment ago: some errors can be written but not read
        except Exception:
            error = RemoteError(f"{type(error).__name__}: {error}")
        return cls(error, trace, where)

    def for_caller(self) -> Exception:
        """The error to raise, with a note where it ran and the worker's own traceback. A worker that calls `sys.exit`
        does not end its callers."""
        error = self.error if isinstance(self.error, Exception) else RemoteError(repr(self.error))
        ours = isinstance(error, BrayError) and not isinstance(error, RemoteError)
        error.add_note(f"raised in {self.where}" + ("" if ours else f":\n{self.trace}"))
        return error


class Hosted:
    """A worker in this process. Its plain methods are called as they are, coroutines run on the io loop."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self.failure: Failure | None = None
        self.where = f"{name} (pid {os.getpid()} on {socket.gethostname()})"
        try:
            self.worker = make()
            if (start := getattr(self.worker, "start", None)) is not None:
                if io.is_loop():  # of local mode: an Actor makes a buffer or a clone, and cannot wait for its own loop
                    io.spawn(start(), f"starting {name}")
                else:
                    io.run(start())
        except BaseException as e:
            self.failure = Failure.of(e, self.where)
            logger.error("%s could not be started", self.where, exc_info=e)

    def close(self) -> None:
        if self.failure is None and (close := getattr(self.worker, "close", None)) is not None:
            done = close()
            if inspect.isawaitable(done):
                io.run(as_coroutine(done), timeout=CLOSE_TIMEOUT - 2.0)


async def as_coroutine(awaitable: Any) -> Any:
    return await awaitable
