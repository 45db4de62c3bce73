"""The session of this process: a project's trial, its run directory and its cluster. `bray.init` opens it, `shutdown`
ends it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures.thread import _threads_queues
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bray.cluster.protocol import Cluster
from bray.errors import ConfigError
from bray.inference.host import Promise
from bray.log_format import LogFormat
from bray.rundir import RunDir
from bray.serving.link import Address, Handle, Link, Listener, connect

logger = logging.getLogger("bray.remote")


class SessionInfo(NamedTuple):
    """What a process needs to know to take part in a session."""

    project: str
    trial: str
    path: str
    """The run directory."""
    numbers: str
    """The folder for result rows, TensorBoard's events and the log."""
    token: bytes
    """Proves to the listeners of the session that a connection belongs to it."""
    one_machine: bool
    """The cluster is this machine alone."""
    modules: tuple[str, ...]
    """`sys.path` of the process that called `init`."""
    log_format: LogFormat = "text"

    @property
    def namespace(self) -> str:
        """Of the session's actors in Ray."""
        return f"bray:{self.numbers}"


@dataclass
class ClusterSession:
    info: SessionInfo
    cluster: Cluster
    member: str = ""
    """The member that this process runs; '' in the process that called `init`."""
    run: RunDir | None = None
    """What the process that called `init` has locked: the run directory, or `numbers` where that is all it writes
    to."""
    log: logging.Handler | None = None
    watched: list[tuple[str, Promise]] = field(default_factory=list)
    """(name, its end): components whose failure ends `run_until_asked_to_stop`."""
    stop_hooks: list[Callable[[], None]] = field(default_factory=list)
    """Called first at the end, newest first: they stop what makes work for others, games and trainers."""
    close_hooks: list[Callable[[], None]] = field(default_factory=list)
    """Called after them, newest first."""
    _own: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def own(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What this process has one of in the session: made when it is first asked for, or has `ended`; the end of the
        session closes it."""
        found = self._own.get(key)
        if found is None or found.ended:
            with _making:
                found = self._own.get(key)
                if found is None or found.ended:
                    found = self._own[key] = make()
                    self.close_hooks.append(lambda: self.disown(*key))
        return found

    def owned(self, key: tuple[Any, ...]) -> Any:
        """The same, or None where there is none."""
        return self._own.get(key)

    def disown(self, *beginning: Any) -> None:
        """Close what has a key that begins so."""
        for key in [key for key in self._own if key[: len(beginning)] == beginning]:
            self._own.pop(key).close()

    @property
    def path(self) -> Path:
        return Path(self.info.path)

    @property
    def numbers(self) -> Path:
        return Path(self.info.numbers)

    @property
    def writes_to(self) -> Path:
        """For what is no number, such as episodes."""
        return self.path if self.run is None else self.run.path

    @property
    def namespace(self) -> str:
        return self.info.namespace

    @property
    def token(self) -> bytes:
        return self.info.token

    def end(self) -> None:
        """Stop what runs, then close what it used."""
        for close in (*reversed(self.stop_hooks), *reversed(self.close_hooks)):
            try:
                close()
            except Exception:
                logger.exception("%s did not end well", self.member or "the session")

    def watch(self, name: str, end: Promise) -> None:
        """An error of this component reaches `run_until_asked_to_stop`."""
        self.watched.append((name, end))

    async def connect(self, address: Address, handle: Any = None, lost: Any = None, unix: bool = True) -> Link:
        """A link to a Listener of this session."""
        return await connect(address, self.token, handle, lost, unix)

    async def listen(self, name: str, handle: Handle, lost: Any = None) -> Listener:
        """A Listener that all processes of this session can reach."""
        listener = Listener(handle, self.token, lost)
        await listener.start(name.replace("/", "-"), self.cluster.host())
        return listener


_current: ClusterSession | None = None
_making = threading.RLock()
_of_parent: list[Any] = []


def _forked() -> None:
    """A forked process makes its own of everything. It keeps its parent's, unused: closing them would close the
    parent's."""
    global _making
    _making = threading.RLock()
    if _current is not None:
        _of_parent.append(_current._own)
        _current._own = {}


os.register_at_fork(after_in_child=_forked)


def current() -> ClusterSession | None:
    """The session of this process, if it has one."""
    return _current


def session() -> ClusterSession:
    """The session of this process."""
    if _current is None:
        raise ConfigError(
            'there is no session in this process: call bray.init(project="./runs/game", trial="v0") first'
        )
    return _current


def enter(opened: ClusterSession) -> ClusterSession:
    """Make this the session of the process."""
    global _current
    _current = opened
    return opened


def shutdown() -> None:
    """End the session: all its components, and the Ray that it started."""
    global _current
    ending = _current
    if ending is None:
        return
    ending.end()
    ending.cluster.close()
    if ending.run is not None:
        ending.run.close()
    if ending.log is not None:
        ending.log.close()
    _current = None


def _end_with_script() -> None:
    """For a script that does not call `shutdown`. It comes before `atexit`, when thread pools take no work any more
    that components need to end; threads of the script's own may use the session to their end, as ever."""

    def busy() -> list[threading.Thread]:
        ours = (threading.main_thread(), *_threads_queues)  # threads of pools wait for what comes after this
        return [t for t in threading.enumerate() if not t.daemon and t not in ours]

    while _current is not None and (threads := busy()):
        threads[0].join()
    shutdown()


threading._register_atexit(_end_with_script)  # type: ignore[attr-defined]  # newest first: before the pools' own

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_asked_to_stop(poll: Callable[[], bool] | None = None, every: float = 0.2) -> None:
    """Wait for Ctrl-C, SIGTERM or a closed terminal, then end the session. A trainer that fails ends it too, and its
    error is raised.

    poll  called about every `every` seconds; True ends the session
    """
    asked, ending = threading.Event(), False

    def ask(signum: int, _: Any) -> None:
        # A second Ctrl-C interrupts the ending. A second SIGTERM does not: `timeout` sends two, to the process and to
        # its group.
        if ending and asked.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    old = {}
    if threading.current_thread() is threading.main_thread():
        old = {s: signal.signal(s, ask) for s in _ENDING if signal.getsignal(s) != signal.SIG_IGN}
    try:
        while not asked.wait(every):
            for name, end in session().watched:
                if end.done() and (error := end.exception()) is not None:
                    error.add_note(f"{name} has failed, and the session ends")
                    raise error
            if poll is not None and poll():
                break
    finally:
        ending = True
        try:
            shutdown()
        finally:
            for sig, handler in old.items():
                signal.signal(sig, handler)
