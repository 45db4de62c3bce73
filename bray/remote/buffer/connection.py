"""This process's connection to a buffer, shared by all its handles: a writer, a reader, and a port to each shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from bray.cluster import io
from bray.cluster.local import LocalCluster
from bray.cluster.session import ClusterSession, session
from bray.errors import BrayError, Unreachable
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.ports import Loopback, Port, ShardLink
from bray.remote.buffer.reader import BufferReader
from bray.remote.buffer.writer import Writer

FLUSH_TIMEOUT = 5.0
_A_MOMENT = 0.002  # seconds in which a shard that has samples answers


class BufferConnection:
    """The ports are loopbacks where the shards are objects of this process, else links."""

    def __init__(self, settings: BufferDefinition, here: ClusterSession):
        self.settings, cluster = settings, here.cluster
        self.source = ("", False)
        """The source that this process reads into the buffer, and whether it has ended."""
        names = [f"buffer/{settings.name}/{i}" for i in range(settings.shards)]
        self._links: list[ShardLink] = []
        ports: list[Port]
        if cluster.kind == "local":
            assert isinstance(cluster, LocalCluster)
            ports = [Loopback(cluster.hosted(n).worker) for n in names]
        else:
            ports = [*(links := [ShardLink(here, n, self) for n in names])]
            self._links = links
        self.writer = Writer(settings, ports, here=not self._links)
        self.reader = BufferReader(settings, ports, *((io.call, _later) if self._links else (_now, _now)))
        self._reading = self._closed = False

    def read(self, prefetch: int) -> BufferReader:
        """The reader, connected."""
        if self._links and prefetch > self.reader.prefetch:  # of a loopback nothing would be gained
            self.reader.prefetch = prefetch
        if self._links and not self._reading:
            self._reading = True
            io.call(self._connect)
        return self.reader

    def _connect(self) -> None:
        for link in self._links:
            link.connect()
        self._tick()

    def _tick(self) -> None:
        for link in self._links:
            link.tick()
        self.reader.tick()
        if not self._closed:
            io.loop().call_later(1.0, self._tick)

    def close(self) -> None:
        if not self._links:
            return
        if io.is_loop():
            self._close_links()
            return
        source, has_ended = self.source
        if not source or has_ended:  # a source that is stopped halfway waits for room that nobody makes any more
            self.writer.flush(FLUSH_TIMEOUT)
        closed = threading.Event()
        io.call(self._close_links)
        io.call(closed.set)
        closed.wait(1.0)  # links cannot do anything without the session, which ends next

    def _close_links(self) -> None:
        self._closed = True
        for link in self._links:
            link.close()
        self.writer.close()

    # of PortOwner
    def port_up(self, port: ShardLink) -> None:
        self.writer.port_up(port)
        self.reader.port_up()

    def port_down(self, port: ShardLink) -> None:
        self.writer.port_down(port)

    def port_gone(self, port: ShardLink) -> None:
        if not all(link.gone for link in self._links):
            self.port_down(port)
            return
        stopped = Unreachable(f"buffer {self.settings.name!r} has been stopped: all its workers are gone")
        self.writer.fail(stopped)
        self.reader.fail(stopped, for_good=True)

    def port_failed(self, error: BaseException | None) -> None:
        self.reader.fail(error if isinstance(error, BrayError) else BrayError(str(error)))


def _later(function: Callable[[], None]) -> None:
    io.loop().call_later(_A_MOMENT, function)


def _now(function: Callable[[], None]) -> None:
    function()


_connections: dict[tuple[bytes, str], BufferConnection] = {}
_lock = threading.Lock()
_of_parent: list[Any] = []


def connection(settings: BufferDefinition) -> BufferConnection:
    """The connection of this process and session to a buffer."""
    here = session()
    key = here.token, settings.name
    found = _connections.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _connections:
            _connections[key] = BufferConnection(settings, here)
            here.close_hooks.append(lambda: _close(key))
        return _connections[key]


def connected(name: str) -> BufferConnection | None:
    """The connection to the buffer of this name, if there is one already."""
    return _connections.get((session().token, name))


def _close(key: tuple[bytes, str]) -> None:
    with _lock:
        closed = _connections.pop(key, None)
    if closed is not None:
        closed.close()


def _forked() -> None:
    """A forked process makes connections of its own. It keeps its parent's, unused: closing them would close the
    parent's."""
    global _lock
    _of_parent.append(dict(_connections))
    _connections.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
