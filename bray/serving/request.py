"""One request of a client, from whatever transport, the session that it is of, and what a session table asks of the
other workers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import perf_counter
from typing import Any

from bray.serving.actor import Actor
from bray.serving.protocol import END

logger = logging.getLogger("bray.serving")


class Request:
    """One request, from whatever transport. `secret` and `address` are of its client, and set only where something
    depends on them."""

    __slots__ = ("address", "arrived", "body", "key", "kind", "secret", "session")
    address: str
    secret: bytes

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()

    def reply(self, status: int, body: bytes) -> None:
        raise NotImplementedError

    @property
    def client(self) -> bytes:
        """Its secret and address as bytes, for another worker."""
        secret, address = getattr(self, "secret", b""), getattr(self, "address", "")
        return secret + b" " + address.encode() if secret or address else b""

    @client.setter
    def client(self, data: bytes) -> None:
        if data:
            self.secret, _, address = data.partition(b" ")
            self.address = address.decode()


_ends: dict[type, str] = {}


def end_of(cls: type) -> str:
    """`end`, or `stop` where a class has that in its place; of both, what the class itself says before what it
    inherits."""
    if cls not in _ends:
        own = (name for c in cls.__mro__ if c is not Actor for name in ("end", "stop") if name in vars(c))
        _ends[cls] = next(own, "end")
    return _ends[cls]


class Session:
    """A running game: its Actor, and what it was asked."""

    __slots__ = ("actor", "address", "cancelled_at", "finish", "keyed", "last", "name", "request", "secret", "start",
                 "task", "tick", "waiting")  # fmt: skip

    def __init__(self, name: bytes, actor: Any):
        self.name, self.actor = name, actor
        self.start, self.tick = actor.start, actor.tick
        self.finish = getattr(actor, end_of(type(actor)))
        self.request: Request | None = None  # the one that is being answered
        self.task: asyncio.Future[Any] | None = None
        # made when it is needed: an empty one is more than the rest of a session
        self.waiting: deque[Request] | None = None
        self.last = 0.0
        self.keyed = False
        self.address = ""  # whose slot it takes
        self.secret: bytes | None = None  # what its requests must carry
        self.cancelled_at: float | None = None

    @property
    def ending(self) -> bool:
        """Whether an end is under way, so that a start behind it is in order."""
        now = self.request
        return (now is not None and now.kind == END) or any(r.kind == END for r in self.waiting or ())

    def as_bytes(self, warned: set[tuple[type, str]], method: str, reply: Any) -> bytes:
        """What the Actor returned, as bytes. Text is taken as UTF-8, with a warning once per class and method."""
        if isinstance(reply, (bytes, bytearray, memoryview)):
            return bytes(reply)
        if isinstance(reply, str):
            cls = type(self.actor)
            if (cls, method) not in warned:
                warned.add((cls, method))
                what = "%s.%s returns text, which is sent as UTF-8: return bytes (text.encode())"
                logger.warning(what, cls.__name__, method)
            return reply.encode()
        raise TypeError(f"expected {method} to return bytes, got {type(reply).__name__}")


class Gateway:
    """The other workers, where there are any: by default nobody who could take a request."""

    def place(self, request: Request) -> bool:
        """Choose the owner of a new session: True = here; else the request is on its way there, or was refused."""
        return True

    def forward(self, request: Request) -> bool:
        """Send a request to the owner of its session; False when nobody owns it."""
        return False

    def spill(self, request: Request) -> bool:
        """Send a stateless request to a worker with a free slot; False when there is none."""
        return False

    def release(self, session: bytes) -> None:
        """A session of this worker is over."""

    def disconnected(self, session: bytes) -> None:
        """Tell the owner of a session that a connection with its requests has closed here."""

    def lent(self, actors: int) -> None:
        """So many of this worker's slots are taken by stateless requests."""

    def running(self) -> int:
        """Sessions of all workers."""
        return 0

    def idle(self) -> bool:
        """Whether no request is on its way to another worker."""
        return True
