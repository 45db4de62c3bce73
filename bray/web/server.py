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

import asyncio
import base64
import inspect
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs

from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.http_server import HttpServer, Reply, Request, host_name, is_same_origin, listening
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
_LOCAL = ("127.0.0.1", "localhost", "::1")
_MAX_BODY = 1 << 16
_WORKERS = 32  # requests that are answered at once
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
        self._gets: dict[str, Callable[..., Any]] = {
            "/api/start": self.start,
            "/api/episodes": self.episodes,
            "/api/episode": self.episode,
            "/api/frame": self.frame,
            "/api/export": self.exports.find,
        }
        self._posts: dict[str, Callable[..., Any]] = {"/api/export": self.exports.start, "/api/stop": self.exports.stop}
        sock = listening(host, port, "--port 0 takes any free port")
        sock.listen()  # now: whoever reads the address may ask at once
        self.port: int = sock.getsockname()[1]
        self._workers = ThreadPoolExecutor(_WORKERS, "bray-web")
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(sock,), name="bray-web", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '') else self.host}:{self.port}/"

    def close(self) -> None:
        """May be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.exports.close()
        self.renders.close()

    def _run(self, sock: socket.socket) -> None:
        async def serve() -> None:
            server = HttpServer(
                answer, failed=_error, headers=_HEADERS, max_body=_MAX_BODY, timeout=60, keep_alive=True
            )
            await server.listen(sock)
            await self._closed.wait()
            server.close()

        async def answer(request: Request) -> Reply:  # in a thread: a picture may take seconds
            return await self._loop.run_in_executor(self._workers, self._answer, request)

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve())

    # --- requests

    def _answer(self, request: Request) -> Reply:
        if why := self._not_trusted(request):
            return _error(403, why)
        try:
            return self._reply(request)
        except (UnknownName, DataError) as e:
            return _error(404, str(e))
        except BrayError as e:
            return _error(400, str(e))
        except Exception as e:
            logger.exception("%s failed", request.target[:200])
            return _error(500, f"{type(e).__name__}: {e}")

    def _not_trusted(self, request: Request) -> str:
        """Why a request was not meant for this page: it names another machine, or another page sent it. A link to the
        page itself may stand anywhere: it holds nothing before it asks."""
        headers = request.headers
        if self.host not in ("0.0.0.0", "::", "") and host_name(headers) not in (*_LOCAL, self.host.lower()):
            return f"this page is not called {headers.get('host', '')[:200]!r}"
        followed = request.path == "/" and headers.get("sec-fetch-mode") == "navigate" and "origin" not in headers
        return "" if followed or is_same_origin(headers) else "requests of other pages are not answered"

    def _reply(self, request: Request) -> Reply:
        path, calls = request.path, self._posts if request.method == "POST" else self._gets
        given: Any = {k: v[-1] for k, v in parse_qs(request.target.partition("?")[2], keep_blank_values=True).items()}
        if request.method == "POST":
            try:
                given = json.loads(request.body)
            except (ValueError, RecursionError):
                given = None
            if not isinstance(given, dict):
                return _error(400, "expected a JSON object")
        elif request.method not in ("GET", "HEAD"):
            return _error(405, "expected GET or POST")
        elif path in _FILES:
            file = _STATIC / _FILES[path]
            return Reply(200, file.read_bytes(), _TYPES[file.suffix] + "; charset=utf-8")
        elif path == "/video":
            video, name = _call(self.video, given), given["file"]
            extra = {"Content-Disposition": f'attachment; filename="{name}"'} if "download" in given else {}
            return Reply(200, video, _VIDEO_TYPES[Path(name).suffix], extra)
        if path not in calls:
            return _error(404, f"there is nothing at {request.target[:200]}")
        answer = _call(calls[path], given)
        body = json.dumps(asdict(answer) if isinstance(answer, Export) else answer, allow_nan=False)
        return Reply(200, body.encode(), "application/json")

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


def _error(status: int, message: str) -> Reply:
    return Reply(status, json.dumps({"error": message}).encode(), "application/json")


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
