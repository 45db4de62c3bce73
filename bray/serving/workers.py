"""The processes of a game service: one, or several that share a port, with a parent that starts, watches and ends them.

The parent does nothing else: it opens no event loop and starts no thread, so that it can fork a new worker at any time.
The event loop of each worker writes the time into the workers' table a few times per second; one that no longer does is
killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bray.errors import BrayError, ConfigError
from bray.http_server import listening
from bray.serving.actor import FAILURES
from bray.serving.config import ServiceConfig
from bray.serving.node import NodeGateway
from bray.serving.server import Prepare, Server, admin_of
from bray.serving.table import Table

logger = logging.getLogger("bray.serving")
T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds before a worker that died is replaced
_MISTAKE = 2  # exit code of a worker that cannot work as it was told to
_GIVE_UP = 5  # deaths in a row before a worker was ready
_PATIENCE = 5.0  # seconds for a worker to end once it may

Ready = Callable[[int, int], None]
"""Called once with the port and the admin port when every worker answers."""


def serve(
    make_actor: Callable[[], Any] | None,
    config: ServiceConfig,
    on_ready: Ready | None = None,
    prepare: Prepare | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A first signal drains (running sessions may go on for
    `drain_timeout_s`), a second one ends at once. `make_actor` None: `prepare` sets that of the server."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("serve handles signals and runs in the main thread; elsewhere use bray.serving.server.Server")
    if config.use_gateway == "head":
        raise ConfigError(
            "use_gateway: head is for the machines of a cluster (bray.RemoteActor); here there is one machine: "
            "expected node or null"
        )
    allow_files(2 * config.max_connections)
    if config.workers == 1:
        return run_loop(_work(make_actor, config, None, on_ready, prepare))
    return _Parent(make_actor, config, on_ready, prepare).run()


def allow_files(n: int) -> None:
    """Raise the number of files (and connections) that this process may open, as far as the system allows; -1 is no
    limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = n if most < 0 else min(n, most)
    if 0 <= now < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, most))


def reserve(host: str, port: int) -> socket.socket:
    """Bound and never listened on: it keeps the port while no worker has it. A shared port can be taken by two services
    at once, so it is first asked for alone."""
    listening(host, port, shared=False).close()
    return listening(host, port, shared=True)


def relax_gc() -> None:
    """Let the garbage collector of this process look less often, and never at what is there already. Ticks leave many
    objects and hardly a cycle:
    by default it takes a fifth of the CPU time of a service whose agents keep episodes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run_loop(main: Coroutine[Any, Any, T], fast: bool = True) -> T:
    """Run a coroutine to its end on uvloop, or on asyncio's own loop where uvloop is not there (or not wanted).

    Not `asyncio.run`: that one ends with the first task of an Actor that calls `sys.exit`, and does not end at all
    while a task or thread that an Actor left behind goes on.
    """
    loop: asyncio.AbstractEventLoop | None = None
    if fast:
        with contextlib.suppress(ImportError):
            import uvloop

            loop = uvloop.new_event_loop()
    loop = loop or asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(main)
    try:
        while True:
            try:
                return loop.run_until_complete(task)
            except FAILURES:
                if task.done():
                    raise
                logger.exception("a task that an Actor had started ended the loop; it goes on")
    finally:
        left = asyncio.all_tasks(loop)
        for each in left:
            each.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


@dataclass
class _WorkerSlot:
    """Where a worker stands among the others."""

    worker: int
    table: Table
    directory: Path
    parent: int
    """A pipe that ends with the parent."""
    admin: socket.socket
    """All workers take connections from it: one that is stopped leaves them to the others."""


def _orphaned(loop: asyncio.AbstractEventLoop, parent: int, ask: Callable[[], None]) -> None:
    loop.remove_reader(parent)
    logger.error("the parent of this worker is gone: it ends too")
    ask()


async def _work(
    make_actor: Callable[[], Any] | None,
    config: ServiceConfig,
    place: _WorkerSlot | None,
    on_ready: Ready | None,
    prepare: Prepare | None,
) -> int:
    """One worker, from its first socket to its last reply."""
    loop = asyncio.get_running_loop()
    worker = place.worker if place is not None else 0
    server = Server(make_actor, config, worker)
    asked = asyncio.Event()
    at_once = asyncio.Event()

    def ask() -> None:
        (at_once if asked.is_set() else asked).set()

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, ask)
    await server.prepare(prepare)
    server.open()
    gateway = None
    if place is not None:
        loop.add_reader(place.parent, _orphaned, loop, place.parent, ask)
        gateway = NodeGateway(server, place.table, place.directory)
        await gateway.start()  # before the first client: its session would be missing in the table
    relax_gc()
    await server.listen(admin=place.admin if place is not None else None)
    if on_ready is not None:
        on_ready(server.port, server.admin_port)
    await asked.wait()
    logger.info("worker %d: no new sessions; %d are running", worker, len(server.sessions.sessions))
    if gateway is not None:
        gateway.table.open(False)
    drain = asyncio.ensure_future(server.drain())
    hurry = asyncio.ensure_future(at_once.wait())
    await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    hurry.cancel()
    await server.close()
    if gateway is not None:
        await gateway.close()
    return 0


class _Parent:
    """Starts the workers, replaces those that die, passes signals on."""

    def __init__(
        self,
        make_actor: Callable[[], Any] | None,
        config: ServiceConfig,
        on_ready: Ready | None,
        prepare: Prepare | None,
    ):
        if threading.active_count() > 1:
            logger.warning("workers are forked from a process with %d threads", threading.active_count())
        self.make_actor, self.on_ready, self.prepare = make_actor, on_ready, prepare
        self._port = reserve(config.host, config.port)
        port = self._port.getsockname()[1]
        self._admin = listening(config.admin_host, admin_of(config, port), shared=False)
        self.config = replace(config, port=port, admin_port=self._admin.getsockname()[1])
        self.directory = Path(tempfile.mkdtemp(prefix="bray-"))  # readable by this user alone
        self.table = Table(self.directory / "sessions", config.workers, config.actors_per_worker, create=True)
        self.pids: dict[int, int] = {}  # pid -> worker
        self.ready: set[int] = set()
        self.deaths = [0] * config.workers  # in a row, before it was ready
        self.due: dict[int, float] = {}  # worker -> when to start it again
        self.beats = [0.0] * config.workers  # the last of each worker
        self.silent = [0.0] * config.workers  # seconds since then in which this process was awake itself
        self.looked = time.monotonic()
        self.look_every = min(1.0, config.stopped_after_s / 5, config.busy_after_s / 5)
        self.ending = 0  # signals that asked for it
        self.kill_at = float("inf")
        self.code = 0
        self.told = False  # that the service answers

    def run(self) -> int:
        # A signal writes a byte here, and the loop below wakes.
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        old_fd = signal.set_wakeup_fd(waker.fileno())
        old = {s: signal.signal(s, self._signal) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
        self._ready_in, self._ready_out = os.pipe()
        self._parent_in, self._parent_out = os.pipe()  # closed when this process is gone, however it went
        try:
            for worker in range(self.config.workers):
                self._fork(worker)
            while self.pids or (self.due and not self.ending):
                next_time = min([*self.due.values(), self.kill_at, self.looked + self.look_every])
                pause = max(0.0, min(3600.0, next_time - time.monotonic()))
                readable, _, _ = select.select([wake.fileno(), self._ready_in], [], [], pause)
                if wake.fileno() in readable:
                    wake.recv(4096)
                if self._ready_in in readable:
                    for worker in os.read(self._ready_in, 4096):
                        self.ready.add(worker)
                        self.deaths[worker] = 0
                    if len(self.ready) == self.config.workers and not self.told:
                        self.told = True
                        if self.on_ready is not None:
                            self.on_ready(self.config.port, self.config.admin_port or 0)
                self._reap()
                self._watch()
                if max(self.deaths) >= _GIVE_UP and not self.ready and not self.ending:
                    self.code = 1
                    logger.error("a worker died %d times before it could answer: the service ends", _GIVE_UP)
                    self._signal(signal.SIGTERM, None)
                if time.monotonic() >= self.kill_at:
                    logger.error("%d workers have not ended in time: they are killed", len(self.pids))
                    self._pass_on(signal.SIGKILL)
                    self.kill_at = float("inf")
                for worker in [w for w, t in self.due.items() if t <= time.monotonic()]:
                    del self.due[worker]
                    if not self.ending:
                        self._fork(worker)
            return self.code
        finally:
            signal.set_wakeup_fd(old_fd)
            for sig, handler in old.items():
                signal.signal(sig, handler)
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            for pid in list(self.pids):
                os.waitpid(pid, 0)
            self.table.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            for sock in (wake, waker, self._port, self._admin):
                sock.close()
            for fd in (self._ready_in, self._ready_out, self._parent_in, self._parent_out):
                os.close(fd)

    def _signal(self, number: int, frame: Any) -> None:
        if number != signal.SIGCHLD:
            self.ending += 1
            # an Actor that never gives the event loop back does not hear the signal
            wait = self.config.drain_timeout_s + 2 * self.config.tick_timeout_s if self.ending == 1 else 0.0
            self.kill_at = time.monotonic() + wait + _PATIENCE
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has just been reaped
                os.kill(pid, number)

    def _watch(self) -> None:
        """Kill workers that stand still: their sessions end, others take their place."""
        now = time.monotonic()
        passed = now - self.looked
        if passed < self.look_every:
            return
        self.looked = now
        for pid, worker in self.pids.items():
            beat = self.table.last_beat(worker)
            # Not by the clock: where all of us were stopped or frozen together, nobody has been silent.
            self.silent[worker] = (
                self.silent[worker] + min(passed, 2 * self.look_every) if beat == self.beats[worker] else 0.0
            )
            self.beats[worker] = beat
            silent = self.silent[worker]
            if silent >= self.config.stopped_after_s and _is_stopped(pid):
                why = "has been stopped (SIGSTOP)"
            elif silent >= self.config.busy_after_s and worker in self.ready:  # one that starts may load large models
                why = "has not come back from an Actor's code"
            else:
                continue
            logger.error("worker %d (pid %d) %s for %.1f s: it is killed", worker, pid, why, silent)
            self.silent[worker] = 0.0
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self.pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self.pids.pop(pid, None)
            if worker is None:
                continue
            lost = self.table.clear(worker)
            if self.ending:
                continue
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _MISTAKE and not self.told:
                self.code = _MISTAKE  # it would be the same again
                self._signal(signal.SIGTERM, None)
                continue
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            logger.error(
                "worker %d (pid %d) died by %s with %d sessions; a new one takes its place", worker, pid, how, lost
            )
            if worker in self.ready:
                self.ready.discard(worker)
                self.deaths[worker] = 0
            self.deaths[worker] += 1
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self.deaths[worker] - 1))
            self.due[worker] = time.monotonic() + pause

    def _fork(self, worker: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.silent[worker] = 0.0
        # A signal waits until the parent knows this worker, and until the worker no longer has the parent's handlers.
        signals = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        pid = os.fork()
        if pid:
            self.pids[pid] = worker
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            return
        code = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on
            os.close(self._parent_out)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sig in signals:
                signal.signal(sig, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            self._port.close()
            # before the worker has locks: closing any descriptor of a file gives up those of the process
            self.table.close()
            table = Table(self.directory / "sessions", self.config.workers, self.config.actors_per_worker)
            if not table.take(worker):
                raise RuntimeError("the process that had this worker's place still lives")

            def tell(port: int, admin_port: int) -> None:
                os.write(self._ready_out, bytes([worker]))

            place = _WorkerSlot(worker, table, self.directory, self._parent_in, self._admin)
            code = run_loop(_work(self.make_actor, self.config, place, tell, self.prepare))
        except BrayError as e:
            code = _MISTAKE
            logger.error("worker %d: %s", worker, e)
        except BaseException:
            logger.exception("worker %d failed", worker)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
