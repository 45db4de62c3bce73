"""The page of `bray render`: one static page, and the few requests it makes.

    GET  /                                             the page; /render.js, /render.css
    GET  /api/start                                    project, trials, renderers
    GET  /api/episodes?trial=&find=                    the newest episodes
    GET  /api/episode?trial=&episode=                  how many ticks it has
    GET  /api/frame?trial=&episode=&renderer=&tick=    pictures and the State of one tick
    POST /api/export  {trial, episode, renderer, format, fps, first, last}      begins a video
    GET  /api/export?number=    POST /api/stop {number}                         how far it is; stop it
    GET  /video?trial=&file=                           a finished one

It listens on this machine alone unless told otherwise, and then answers only requests that name this machine: a page of
somebody else that is open in the same browser can neither read episodes nor start anything.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.rundir import open_plain
from bray.web.describe import describe
from bray.web.render import LIMIT, Export, Render, RenderCache, RenderError, VideoExports
from bray.web.runs import Project

logger = logging.getLogger("bray.web")

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {"/": "render.html", "/render.js": "render.js", "/render.css": "render.css", "/icon.svg": "icon.svg"}
_VIDEO = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(mp4|gif)")
_VIDEO_TYPES = {".mp4": "video/mp4", ".gif": "image/gif"}
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_MAX_BODY = 1 << 16
_PART = 1 << 18  # bytes of a video that are in memory at once
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class RenderServer:
    """Serves the page from threads until it is closed."""

    def __init__(
        self,
        project: Project,
        renders: Mapping[str, Render],
        host: str = "127.0.0.1",
        port: int = 0,
        limit: float = LIMIT,
    ):
        """`limit`: seconds that a picture may take."""
        self.project, self.renders = project, RenderCache(renders, limit)
        self.exports = VideoExports(project, self.renders)
        self.host = host
        try:
            self._http = _Http((host, port), self)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({e.strerror or e}); --port 0 takes any free port"
            ) from None
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="bray-web", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '') else self.host}:{self.port}/"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.exports.close()
        self.renders.close()

    # --- what the page asks for: a request's parameters are those of the method, by name and type

    def start(self) -> dict[str, Any]:
        return {
            "project": str(self.project.path),
            "trial": self.project.trial,
            "trials": self.project.trials(),
            "renderers": list(self.renders.renders),
        }

    def episodes(self, trial: str, find: str = "") -> dict[str, Any]:
        listed, total = self.project.episodes(trial, find)
        return {"trials": self.project.trials(), "episodes": [asdict(e) for e in listed], "total": total}

    def episode(self, trial: str, episode: str) -> dict[str, Any]:
        return {"ticks": len(self.project.read(trial, episode).states)}

    def frame(self, trial: str, episode: str, tick: int, renderer: str = "") -> dict[str, Any]:
        read = self.project.read(trial, episode)
        if not 0 <= tick < len(read.states):
            raise ConfigError(f"expected a tick of 0 to {len(read.states) - 1}, got {tick}")
        out: dict[str, Any] = {"tick": tick, "pictures": [], "error": None, "fields": describe(read.states[tick])}
        if renderer:
            try:
                made = self.renders.pictures(renderer, read, tick)
                out["pictures"] = [{"name": name, "png": base64.b64encode(file).decode()} for name, file in made]
            except RenderError as e:
                out["error"] = str(e)
        return out

    def video(self, trial: str, file: str) -> BinaryIO:
        run = self.project.run(trial)
        try:
            if _VIDEO.fullmatch(file):
                return open_plain(Path("videos", file), run)
        except CheckpointError as e:
            raise DataError(f"there is no video {file!r}: {e}") from None
        raise DataError(f"there is no video {file!r}")


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], page: RenderServer):
        self.page = page
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        super(ThreadingHTTPServer, self).server_bind()  # its own looks up this machine's name, which may take seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._connections):  # browsers keep them open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection of %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    disable_nagle_algorithm = True  # else head and body, written one after the other, are 40 ms apart
    server: _Http

    def do_GET(self) -> None:
        page, parts = self.server.page, urlsplit(self.path)
        query = {k: v[-1] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        if not self._is_trusted():
            return
        if parts.path in _FILES:
            file = _STATIC / _FILES[parts.path]
            return self._send(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix] + "; charset=utf-8")
        if parts.path == "/video":
            return self._answer(lambda: self._video(_call(page.video, query), query))
        calls: dict[str, Callable[..., Any]] = {
            "/api/start": page.start,
            "/api/episodes": page.episodes,
            "/api/episode": page.episode,
            "/api/frame": page.frame,
            "/api/export": page.exports.find,
        }
        self._json(calls.get(parts.path), query)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        exports = self.server.page.exports
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True
            return self._fail(HTTPStatus.BAD_REQUEST, f"expected a body of at most {_MAX_BODY} bytes")
        data = self.rfile.read(int(length))
        if not self._is_trusted():
            return
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return self._fail(HTTPStatus.BAD_REQUEST, "expected a JSON object")
        calls: dict[str, Callable[..., Any]] = {"/api/export": exports.start, "/api/stop": exports.stop}
        self._json(calls.get(urlsplit(self.path).path), body)

    # --- answers

    def _json(self, function: Callable[..., Any] | None, given: Mapping[str, Any]) -> None:
        """Answer with what a method of the page returns."""
        if function is None:
            return self._fail(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:200]}")

        def send() -> None:
            answer = _call(function, given)
            body = json.dumps(asdict(answer) if isinstance(answer, Export) else answer, allow_nan=False)
            self._send(HTTPStatus.OK, body.encode(), "application/json")

        self._answer(send)

    def _answer(self, send: Any) -> None:
        try:
            send()
        except (UnknownName, DataError) as e:
            self._fail(HTTPStatus.NOT_FOUND, str(e))
        except BrayError as e:
            self._fail(HTTPStatus.BAD_REQUEST, str(e))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as e:
            logger.exception("%s failed", self.path[:200])
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(e).__name__}: {e}")

    def _video(self, video: BinaryIO, query: Mapping[str, str]) -> None:
        """Piece by piece: one may be larger than memory."""
        name = query["file"]
        extra = {"Content-Disposition": f'attachment; filename="{name}"'} if "download" in query else {}
        with video:
            left = os.fstat(video.fileno()).st_size
            self._head(HTTPStatus.OK, left, _VIDEO_TYPES[Path(name).suffix], extra)
            while self.command != "HEAD" and left and (part := video.read(min(left, _PART))):
                self.wfile.write(part)
                left -= len(part)
        if left and self.command != "HEAD":
            self.close_connection = True  # it was cut while it was read: less was sent than was said

    def _is_trusted(self) -> bool:
        """Whether the request was meant for this page: it names this machine, and no other page sent it."""
        host = self.headers.get("Host", "")
        name, _, _ = host.rpartition(":") if re.search(r":\d+$", host) else (host, "", "")
        wanted = self.server.page.host
        origin = self.headers.get("Origin")
        if wanted not in ("0.0.0.0", "::", "") and name.lower() not in (*_LOCAL, wanted.lower()):
            self._fail(HTTPStatus.FORBIDDEN, f"this page is not called {host[:200]!r}")
        elif origin is not None and origin.partition("://")[2] != host:
            self._fail(HTTPStatus.FORBIDDEN, "requests of other pages are not answered")
        else:
            return True
        return False

    def _fail(self, status: HTTPStatus, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, extra: Mapping[str, str] | None = None) -> None:
        self._head(status, len(body), kind, extra or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, size: int, kind: str, extra: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(size), **_HEADERS, **extra}.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a method of the page with the parameters that it names, each checked by its type."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        value = given.get(name)
        if value in (None, "") and parameter.default is not parameter.empty:
            continue
        arguments[name] = _CHECKS[parameter.annotation](name, value)
    return function(**arguments)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: expected text, got {value!r}")
    return value


def _whole(key: str, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ConfigError(f"{key}: expected a whole number from 0, got {value!r}")


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    return float(value)


_CHECKS = {"str": _text, "int": _whole, "int | None": _whole, "float": _number}
