"""One request of a client, from whatever transport, and what a session table asks of the other workers."""

from __future__ import annotations

from time import perf_counter


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


class Gateway:
    """The other workers, where there are any: by default nobody who could take a request."""

    def place(self, request: Request) -> bool:
        """Choose the owner of a new session: True = here; else the request is on its way there, or was refused."""
        raise NotImplementedError

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
