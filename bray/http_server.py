"""A small HTTP/1.1 server on asyncio for what people, probes and browsers ask: the admin port, the master's numbers,
the pages of `bray render`. Ticks of games have their own (`serving/http.py`).

It bounds what a client may send and how long that may take; who may ask for what is up to whoever answers, with
`is_same_origin` and `host_name` against pages of other sites.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import urlsplit

from bray.errors import ConfigError

logger = logging.getLogger("bray")

_PART = 1 << 18  # bytes of a file that are in memory at once


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    """The path with its query, as it came."""
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes
    peer: str
    """The address of the client."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes | BinaryIO
    """A file is sent piece by piece (one may be larger than memory), and closed."""
    kind: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


def plain(status: int, message: str) -> Reply:
    return Reply(status, f"{message}\n".encode())


@dataclass(eq=False)
class HttpServer:
    answer: Callable[[Request], Awaitable[Reply]]
    failed: Callable[[int, str], Reply] = plain
    """Makes the reply to what is no request, or could not be answered."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of every reply."""
    max_body: int = 1 << 20
    max_waiting: int = 64
    """Connections whose request has not come; one more closes the oldest, since a probe sends it at once."""
    timeout: float = 10.0
    """Seconds that a request may take to arrive, or a piece of a reply to be read."""
    keep_alive: bool = False
    """Whether a connection may send another request."""

    def __post_init__(self) -> None:
        self._waiting: dict[asyncio.StreamWriter, None] = {}  # oldest first

    async def listen(self, sock: socket.socket) -> None:
        self.port: int = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=sock)

    def close(self) -> None:
        """From the thread of its event loop. Browsers keep connections open: they are closed too."""
        self._server.close()
        for writer in self._waiting:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._take(reader, writer) and self._server.is_serving():
                pass
        except (EOFError, ConnectionError, TimeoutError, asyncio.CancelledError):  # the last: its loop ends
            logger.debug("a connection broke", exc_info=True)
        finally:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether there may be another."""
        self._waiting[writer] = None
        if len(self._waiting) > self.max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(self.timeout):  # for what the client sends; what it asks for may take longer
                request = await self._read(reader, str((writer.get_extra_info("peername") or ("",))[0]))
        except (ValueError, asyncio.LimitOverrunError, asyncio.IncompleteReadError) as e:
            if isinstance(e, asyncio.IncompleteReadError) and not e.partial:
                return False  # it asks for nothing more
            why = str(e) if isinstance(e, ValueError) else "not a request"
            await self._send(writer, self.failed(400, why), last=True)
            return False
        finally:
            self._waiting.pop(writer, None)
        try:
            reply = await self.answer(request)
        except Exception:
            logger.exception("%s %s failed", request.method, request.target[:200])
            reply = self.failed(500, "failed; the log has it")
        last = not self.keep_alive or request.headers.get("connection", "").lower() == "close"
        return await self._send(writer, reply, last, request.method == "HEAD") and not last

    async def _read(self, reader: asyncio.StreamReader, peer: str) -> Request:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, *_ = [*first.split(" "), "", ""]
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "0")
        if not method.isalpha() or "transfer-encoding" in headers:
            raise ValueError("not a request")
        if not (length.isascii() and length.isdigit()) or int(length) > self.max_body:
            raise ValueError(f"expected a body of at most {self.max_body} bytes")
        return Request(method, target, headers, await reader.readexactly(int(length)), peer)

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply, last: bool, head_only: bool = False) -> bool:
        """Whether all of it was sent: a file may be cut while it is read."""
        with io.BytesIO(reply.body) if isinstance(reply.body, bytes) else reply.body as body:
            left = len(reply.body) if isinstance(reply.body, bytes) else os.fstat(body.fileno()).st_size
            headers = {"Content-Type": reply.kind, "Content-Length": str(left), **self.headers, **reply.headers}
            if last:
                headers["Connection"] = "close"
            lines = [f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, 'Error')}"]
            writer.write("\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode())
            while not head_only and left and (part := body.read(min(left, _PART))):
                writer.write(part)
                left -= len(part)
                await asyncio.wait_for(writer.drain(), self.timeout)
        return head_only or not left


# --- who asks ---------------------------------------------------------------------------------------------------------


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether no page of another site sent a request. Browsers send no Origin with a plain GET; Sec-Fetch-Site they
    always send to this machine."""
    host, origin = headers.get("host", "").lower(), headers.get("origin")
    if headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
        return False
    return origin is None or origin.lower() in (f"http://{host}", f"https://{host}")


def host_name(headers: Mapping[str, str]) -> str:
    """What a request calls this machine, without the port. A page whose name was pointed at this machine (DNS
    rebinding) is of the same origin: its name tells."""
    try:
        return (urlsplit(f"//{headers.get('host', '').lower()}").hostname or "").rstrip(".")
    except ValueError:  # an odd bracket
        return ""


def address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, as IPv4 where it is one in the form of IPv6; None for other names."""
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def listening(
    host: str, port: int, hint: str = "choose another --port or --host", shared: bool = False
) -> socket.socket:
    """A socket for a port; `shared`: with other processes, and then with anybody who asks for the same."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({e.strerror or e}): {hint}") from None
    return sock
