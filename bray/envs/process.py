"""Worker processes of this one, on this machine: started, asked, killed by their id.

On Linux they are forked from a process that has loaded what they need (`fork_server.py`), so that a start is not
seconds of imports; elsewhere each loads it for itself.

They end with this process, however it ends: they watch its end of the pipe, and the kernel kills them where it can
(Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np

from bray.errors import CheckpointError, ConfigError, EnvError

ENDING = {signal.SIGINT, signal.SIGTERM}
"""Signals that end a run. Only the parent acts on them: it finishes its iteration and saves, for which it needs its
workers."""
STOP = b"q"
"""The message that ends a worker. Questions are pickled, (method, *arguments); so are answers, ("ok", result, failures)
or ("error", kind, text)."""

_FORKS = sys.platform == "linux" and sys.version_info < (3, 14)  # whose fork server asks for a key
_KINDS = {"config": ConfigError, "checkpoint": CheckpointError, "env": EnvError}

START_TIMEOUT = 120.0


class Lost(Exception):
    """A worker that died or did not answer in time."""


class LostAtStart(EnvError, Lost):
    """A worker that died or hung before it was ready."""


class Child:
    """A worker process, seen from its parent. It runs `serve(conn, *arguments)`, which answers questions at its end of
    a pipe."""

    def __init__(
        self, serve: Callable[..., None], arguments: tuple[Any, ...], name: str, loads: str, needs_main: bool = False
    ):
        """loads: the module that it begins with."""
        self.conn, theirs = multiprocessing.Pipe()
        handle, self._trace_path = tempfile.mkstemp(prefix=f"{name}-")
        self._trace = os.fdopen(handle)
        try:
            with _main_only_if(needs_main), _signals_held_back():
                self.process = _start(loads, name, (theirs, self._trace_path, dict(os.environ)), (serve, arguments))
        except (EOFError, ConnectionError):  # the fork server died while it loaded the module, and said why
            self._trace.close()
            self._unlink()
            raise LostAtStart(f"no worker process could be started: {loads} was not loaded, see above") from None
        self.killed = False
        """Whether it still lived when `kill` ended it."""
        theirs.close()  # so that the worker's death is seen as the end of the pipe
        self._poll = None
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(self.conn.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        try:
            self.conn.send_bytes(message)
        except OSError:  # its end of the pipe is gone, or ours is closed because it was killed
            raise self._died() from None

    def receive(self, timeout: float | None) -> bytes:
        try:
            if timeout is not None and not self._ready(timeout):
                raise Lost(f"did not answer within {timeout:g} s")
            return self.conn.recv_bytes()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> Lost:
        self.process.join(1.0)  # it is on its way: to kill it now would hide how it ended
        return Lost("died")

    def _ready(self, timeout: float) -> bool:
        return bool(self._poll.poll(timeout * 1000)) if self._poll is not None else self.conn.poll(timeout)

    def started(self) -> None:
        """Wait until its environments exist; what they raised is raised here."""
        try:
            unpack(self.receive(START_TIMEOUT))
        except Lost as e:
            self.kill()
            hint = ""
            if not self.killed and (self.process.exitcode or 0) > 0:
                hint = (
                    ". If your environment is defined in the script you run, put the training under `if __name__ == "
                    "'__main__':`"
                )
            raise LostAtStart(f"a worker process {e} while starting ({self.end}){hint}") from None
        except (ConfigError, EnvError):
            self.kill()
            raise
        finally:
            self._unlink()  # both sides hold it open

    def stack(self) -> str:
        """Where a hung worker is, or where a crashed one was; empty for one that was ended already."""
        if self._trace.closed:
            return ""
        if self.process.is_alive() and hasattr(signal, "SIGUSR1") and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.2)  # the time to write it down
        self._trace.seek(0)
        return self._trace.read().strip()

    @property
    def end(self) -> str:
        """How one that was killed, or had died before, has ended."""
        if self.killed:
            return "it was ended here"
        code = self.process.exitcode or 0
        return f"exit code {code}" + (f", {signal.strsignal(-code)}" if code < 0 else "")

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._trace_path)

    def kill(self) -> None:
        self._unlink()
        self.killed = self.process.is_alive()
        self.process.kill()
        self.process.join()
        self.conn.close()
        self._trace.close()

    def close(self) -> None:
        if self._trace.closed:
            return
        with suppress(OSError):
            self.conn.send_bytes(STOP)
        self.process.join(1.0)
        self.kill()


def _start(loads: str, name: str, setting: tuple[Any, ...], what: tuple[Any, ...]) -> Any:
    """A process that runs `run_child`."""
    made: Any
    if _FORKS:
        from bray.envs.fork_server import ForkedProcess, fork_server

        made, parent = ForkedProcess, fork_server(loads).pid
    else:
        made, parent = multiprocessing.get_context("spawn").Process, os.getpid()
    process = made(target=run_child, args=(*setting, parent, *what), daemon=True, name=name)
    process.module = loads
    process.start()
    return process


def forget_server(loads: str) -> None:
    """End the process that others which begin with this module were forked from."""
    if _FORKS:
        from bray.envs.fork_server import fork_server

        fork_server(loads).end()


def unpack(answer: bytes) -> tuple[Any, list[str]]:
    """(result, failures) of a worker's answer; its error is raised."""
    return read_answer(pickle.loads(answer))


def read_answer(answer: tuple[str, Any, Any]) -> tuple[Any, list[str]]:
    """The same of an answer that is no bytes any more."""
    kind, first, second = answer
    if kind == "error":
        raise _KINDS.get(first, EnvError)(second)
    return first, second


def portable(share: Any) -> tuple[bytes, bool]:
    """What a worker is told as bytes, and whether it has to run the user's script to understand them.

    What a module defines is sent by its name. Lambdas, and what the script or notebook itself defines, are sent as
    code; the script is run again only where that does not work. These bytes go from this process to its own child, and
    nowhere else."""
    by_name = None
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        by_name = pickle.dumps(share)
    if by_name is not None and b"__main__" not in by_name:
        return by_name, False
    try:
        return cloudpickle.dumps(share), False
    except (pickle.PicklingError, AttributeError, TypeError):
        if by_name is None:
            raise
        return by_name, True


@contextmanager
def _main_only_if(needed: bool) -> Iterator[None]:
    """A spawned process runs the user's script again to find what is defined there. Where nothing of ours is, it need
    not."""
    main = sys.modules.get("__main__")
    if needed or main is None:
        yield
        return
    hidden: dict[str, Any] = {k: main.__dict__[k] for k in ("__file__", "__spec__") if k in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process started inside begins deaf to the signals that end a run: a whole process group gets them, and the
    workers are needed for saving."""
    resource_tracker.ensure_running()  # it is started with its own mask, and leaves ours cleared
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the child -----------------------------------------------------------------------------------------------------


def run_child(
    conn: Connection,
    trace_path: str,
    environ: dict[str, str],
    parent: int,
    serve: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """In the child: serve until told to stop or the parent is gone."""
    _die_with_parent(parent)
    if _FORKS:  # what it has from the fork server, and not from who asked for it
        os.environ.clear()
        os.environ.update(environ)
        np.random.seed()  # those of all would draw the same numbers
    # A daemon, so that no exit of the parent waits for it; but a rollout worker has children of its own, which end with
    # it as it does with its parent.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN: a game that an environment starts would inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    with open(trace_path, "w") as trace:
        faulthandler.enable(trace)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, trace)
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone or has given up on us
            serve(conn, *arguments)


def _die_with_parent(parent: int) -> None:
    """Two ways, for a process may hang in C with Python's lock held: the kernel's, and a thread that watches who asked
    for us. `parent`: from which we were started; a fork server, which ends with that one, has a single thread."""
    if _FORKS:
        from bray.envs.fork_server import leave

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        leave()
    process = multiprocessing.parent_process()
    if process is None or os.getppid() != parent:
        os._exit(1)
    sentinel = process.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def error_answer(e: BaseException) -> tuple[str, str, str]:
    """An error that the parent raises: our own are one message, others carry their traceback."""
    kind = next((kind for kind, error in _KINDS.items() if isinstance(e, error)), "")
    return "error", kind, str(e) if kind else "".join(traceback.format_exception(e)).rstrip()
