"""The user's render functions, run where they can do no harm: in a thread of their own, with a limit on time, their
errors kept apart from ours."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from bray.errors import BrayError, ConfigError, UnknownName
from bray.serving.state import State
from bray.video import write_video
from bray.web.pictures import Frames, from_png, pictures, png, tiled
from bray.web.runs import Episode, Project

LIMIT = 10.0
"""Seconds that a picture may take."""
LOAD_LIMIT = 60.0
"""Seconds that importing a user's module may take."""
_MOST_STUCK = 4
CACHE_BYTES = 1 << 28
"""Bytes of pictures that are kept; those unused for longest leave first."""


class RenderError(BrayError):
    """The user's render code failed. The text is its traceback, or what it did wrong."""


class Render:
    """A `kind: render` component: a function `func(episode, tick)` of the user's module. It is imported when it is
    first needed, and again when its file has changed, so that an error can be mended while the page is open."""

    def __init__(self, name: str, module: str, func: str = "render"):
        self.name, self.module, self.func = name, module, func
        self._loaded: ModuleType | None = None
        self._changed = 0

    def stamp(self) -> int:
        """Another number when the file has changed."""
        file = getattr(self._loaded, "__file__", None)
        try:
            return Path(file).stat().st_mtime_ns if file else 0
        except OSError:
            return 0

    def load(self) -> Callable[[list[State], int], Any]:
        """The function, of the module as its file is now."""
        if self._loaded is None:
            self._loaded = importlib.import_module(self.module)
            self._changed = self.stamp()
        elif (changed := self.stamp()) != self._changed:
            importlib.invalidate_caches()
            importlib.reload(self._loaded)
            self._changed = changed
        function = getattr(self._loaded, self.func, None)
        if not callable(function):
            known = [k for k, v in vars(self._loaded).items() if callable(v) and not k.startswith("_")]
            raise UnknownName("function", self.func, known, f"renderer {self.name!r}, module {self.module}")
        return function


class Worker:
    """Runs the user's code in one thread, a call at a time. A call that takes too long is given up: Python cannot end a
    thread, so it stays behind and another one takes over."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._stuck: list[threading.Thread] = []
        self._start()

    def call(self, function: Callable[[], Any], limit: float, what: str) -> Any:
        """What `function()` returns; RenderError when it raises, or takes more than `limit` seconds once it is its
        turn."""
        with self._turn:
            self._stuck = [t for t in self._stuck if t.is_alive()]
            if len(self._stuck) >= _MOST_STUCK:
                raise RenderError(
                    f"{len(self._stuck)} calls of render code have not returned; end `bray render` and start it again"
                )
            done: Future[Any] = Future()
            self._jobs.put((function, done))
            wait([done], limit)
            if not done.done():
                where = _where(self._thread)
                self._stuck.append(self._thread)
                self._jobs.put(None)
                self._start()
                raise RenderError(f"{what} has not returned after {limit:g} s. It is here:\n{where}")
        error = done.exception()
        if error is None:
            return done.result()
        if isinstance(error, BrayError) and _raised_by_us(error):
            raise RenderError(f"{what}: {error}") from None
        raise RenderError(_trace(error)) from None

    def close(self) -> None:
        """End the thread, unless it is in the middle of the user's code: it then ends with the process."""
        self._jobs.put(None)

    def _start(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="bray-render", daemon=True)
        self._thread.start()


def _work(jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        function, done = job
        try:
            done.set_result(function())
        except BaseException as e:  # also SystemExit: the user's code ends this call and nothing else
            done.set_exception(e)


def _where(thread: threading.Thread) -> str:
    """The user's part of a thread's stack."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    return "".join(traceback.format_list([f for f in stack if not _is_ours(f.filename)]))


def _trace(error: BaseException) -> str:
    """The traceback of an error without the frames before the user's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and _is_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frame))).rstrip()


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _is_ours(file: str) -> bool:
    return file.startswith(("<frozen importlib", str(Path(__file__).parent))) or file in (
        importlib.__file__,
        threading.__file__,
    )


class RenderCache:
    """All render functions of a launch file, and the pictures that they have made."""

    def __init__(self, renders: Mapping[str, Render], limit: float = LIMIT):
        self.renders, self.limit = dict(renders), limit
        self._worker = Worker()
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[Any, ...], list[tuple[str, bytes]]] = OrderedDict()
        self._bytes = 0

    def pictures(self, name: str, episode: Episode, tick: int) -> list[tuple[str, bytes]]:
        """(name, PNG) of each picture of a tick; RenderError when the user's code does not make one."""
        render = self.renders.get(name)
        if render is None:
            raise UnknownName("renderer", name, self.renders)
        key = (name, render.stamp(), episode.stamp, tick)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        what = f"renderer {name!r}"
        function = self._worker.call(render.load, LOAD_LIMIT, what)
        made = self._worker.call(
            lambda: [(title, png(p)) for title, p in pictures(function(list(episode.states), tick))],
            self.limit,
            f"{what} at tick {tick}",
        )
        with self._lock:
            key = (name, render.stamp(), episode.stamp, tick)
            self._bytes += _size(made) - _size(self._cache.pop(key, []))
            self._cache[key] = made
            while self._bytes > CACHE_BYTES and len(self._cache) > 1:
                self._bytes -= _size(self._cache.popitem(last=False)[1])
        return made

    def close(self) -> None:
        self._worker.close()


def _size(made: list[tuple[str, bytes]]) -> int:
    return sum(len(file) for _, file in made)


# --- video ------------------------------------------------------------------------------------------------------------


@dataclass
class Export:
    """A video that is being made, in a thread of its own."""

    number: int
    total: int
    """Ticks."""
    done: int = 0
    state: str = "running"
    """running | writing | done | failed | stopped"""
    file: str = ""
    """Its name in the run directory's `videos/`, once it is there."""
    path: str = ""
    error: str = ""
    stop: bool = False


class VideoExports:
    """Makes videos of episodes, one at a time."""

    def __init__(self, project: Project, renders: RenderCache):
        self._project, self._renders = project, renders
        self._lock = threading.Lock()
        self._exports: list[Export] = []

    def start(
        self,
        trial: str,
        episode: str,
        renderer: str,
        format: str,
        fps: float = 30.0,
        first: int = 0,
        last: int | None = None,
    ) -> Export:
        """Begin with a video of the ticks `first` to `last` (None: the last one there is)."""
        run, read = self._project.run(trial), self._project.read(trial, episode)
        ticks = len(read.states)
        last = ticks - 1 if last is None else last
        if format not in ("mp4", "gif"):
            raise UnknownName("video format", format, ("mp4", "gif"))
        if not 0.1 <= fps <= 120:
            raise ConfigError(f"expected a speed of 0.1 to 120 ticks/s, got {fps:g}")
        if not 0 <= first <= last < ticks:
            raise ConfigError(f"expected ticks of 0 to {ticks - 1}, got {first} to {last}")
        if renderer not in self._renders.renders:
            raise UnknownName("renderer", renderer, self._renders.renders)
        part = "" if (first, last) == (0, ticks - 1) else f"-{first}-{last}"
        stem = re.sub(
            r"[^A-Za-z0-9._-]+", "_", f"{Path(episode).stem if '#' not in episode else episode}-{renderer}{part}"
        )
        path = run / "videos" / f"{stem.lstrip('.')}.{format}"
        if path.parent.is_symlink() or path.is_symlink():
            raise ConfigError(f"{path} is a link, or below one: videos are written inside of the run directory only")
        with self._lock:
            if self._exports and self._exports[-1].state in ("running", "writing"):
                raise ConfigError("another video is being made; wait for it or stop it")
            export = Export(len(self._exports), last - first + 1)
            self._exports.append(export)
        args = (export, read, renderer, range(first, last + 1), path, fps)
        threading.Thread(target=self._make, args=args, name="bray-export", daemon=True).start()
        return export

    def stop(self, number: int) -> Export:
        export = self.find(number)
        export.stop = True
        return export

    def find(self, number: int) -> Export:
        if not 0 <= number < len(self._exports):
            raise UnknownName("export", str(number), [str(e.number) for e in self._exports[-8:]])
        return self._exports[number]

    def close(self) -> None:
        """Ask the one that runs to stop."""
        for export in self._exports:
            export.stop = True

    def _make(self, export: Export, episode: Episode, render: str, ticks: range, path: Path, fps: float) -> None:
        frames = Frames()
        try:
            for tick in ticks:
                if export.stop:
                    export.state = "stopped"
                    return
                made = self._renders.pictures(render, episode, tick)
                frames.append(tiled([from_png(file) for _, file in made]))
                export.done += 1
            export.state = "writing"
            write_video(frames, path, fps)
            export.file, export.path, export.state = path.name, str(path), "done"
        except Exception as e:  # the page shows it
            export.error = str(e) if isinstance(e, BrayError) else "".join(traceback.format_exception(e))
            export.state = "failed"
