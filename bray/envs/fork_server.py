"""Processes that begin with their modules loaded: they are forked from one that has done nothing but import them.

This is multiprocessing's fork server, with one of our own for each module: the one that all users of a process share
has neither our modules nor our deaf signals, and programs that others fork from it are not to get them. Only Linux has
it: to fork with a C library loaded is not safe elsewhere.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import set_spawning_popen
from typing import Any

_CODE = (
    "import sys; sys.path[:] = {path!r}; from bray.envs.fork_server import run; run({listener}, {alive}, {module!r})"
)
"""With our import path from the first import on: that of `python -c` begins with the working directory, which may be
a stranger's."""

_LONGEST = 100
"""Bytes of a socket's path: a folder for temporary files may have a longer one."""

_servers: dict[tuple[int, str], ForkServer] = {}
_lock = threading.Lock()


def fork_server(module: str) -> ForkServer:
    """The one of this process that has `module` loaded; it runs."""
    with _lock:
        found = _servers.setdefault((os.getpid(), module), ForkServer(module))
        found.start()
    return found


class ForkServer:
    """See the module; seen from the process that wants others. It ends with that process."""

    def __init__(self, module: str):
        self.module = module
        self.pid = 0
        self._address = ""
        self._alive = -1
        """Our end of a pipe that nobody writes to: it ends when we do."""

    def start(self) -> None:
        """Where it does not run yet, or was killed."""
        if self.pid and not self._ended(os.WNOHANG):
            return
        if self.pid:
            os.close(self._alive)
        else:
            # After the exit has ended those that were forked from it.
            util.Finalize(self, self.end, exitpriority=-10)
        resource_tracker.ensure_running()
        with socket.socket(socket.AF_UNIX) as listener:
            self._address = arbitrary_address("AF_UNIX")
            if len(os.fsencode(self._address)) > _LONGEST:
                self._address = tempfile.mktemp(prefix="bray-", dir="/tmp")
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen()
            theirs, self._alive = os.pipe()
            fds = [listener.fileno(), theirs]
            code = _CODE.format(path=sys.path, listener=fds[0], alive=fds[1], module=self.module)
            python = os.fsdecode(spawn.get_executable())
            words = [python, *util._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
            try:
                self.pid = util.spawnv_passfds(os.fsencode(python), words, fds)
            finally:
                os.close(theirs)

    def end(self) -> None:
        """With all that was forked from it."""
        with suppress(FileNotFoundError):
            os.unlink(self._address)
        if not self._ended(os.WNOHANG):
            os.kill(self.pid, signal.SIGKILL)
            self._ended(0)

    def _ended(self, how: int) -> bool:
        try:
            return os.waitpid(self.pid, how)[0] != 0
        except ChildProcessError:  # somebody waits for every child of this process
            return True

    def fork(self, fds: list[int]) -> tuple[int, int]:
        """A new process: where its id and its exit code come from, and where it reads what it is to do."""
        theirs: list[int] = []
        status, told = -1, -1
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            try:
                status, child_w = os.pipe()
                theirs.append(child_w)
                child_r, told = os.pipe()
                theirs.append(child_r)
                reduction.sendfds(client, [child_r, child_w, self._alive, resource_tracker.getfd() or 0, *fds])
            except BaseException:
                util.close_fds(*(fd for fd in (status, told) if fd >= 0))  # type: ignore[attr-defined]
                raise
            finally:
                util.close_fds(*theirs)  # type: ignore[attr-defined]
        return status, told


class _Popen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        """As the one that this extends, from a fork server."""
        written = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), written)
            reduction.dump(process_obj, written)
        finally:
            set_spawning_popen(None)
        self.sentinel, told = fork_server(process_obj.module).fork(self._fds)
        watched = os.dup(told)  # the new process sees its end when we end
        self.finalizer = util.Finalize(self, util.close_fds, (watched, self.sentinel))  # type: ignore[attr-defined]
        with open(told, "wb") as file:
            file.write(written.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class ForkedProcess(multiprocessing.get_context("forkserver").Process):  # type: ignore[misc]
    """As a Process; `module` is to be set before it starts, and names the fork server that it comes from."""

    module: str

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


# --- in the fork server and in what it forks --------------------------------------------------------------------------


def run(listener: int, alive: int, module: str) -> None:
    """The fork server: loads the module, then forks whenever it is asked to, until nobody is there who may ask."""
    __import__(module)
    gc.collect()
    gc.freeze()  # what all share is copied by a collection, and looking through it takes 0.1 s
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)  # there is nothing to tidy, which would take torch a while


def leave() -> None:
    """In a forked process: let go of what keeps the fork server alive, so that it ends with those who ask it."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
