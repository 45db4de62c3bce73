"""This process's connection to a buffer, shared by all its handles: a writer, a reader, and a port to each shard."""

from __future__ import annotations

import os
import threading
from typing import Any

from bray.cluster import io
from bray.cluster.local import LocalCluster
from bray.cluster.session import ClusterSession, session
from bray.errors import BrayError, Unreachable
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.ports import LocalPort, Port, RemotePort
from bray.remote.buffer.reader import QueueReader, Reader
from bray.remote.buffer.writer import LocalWriter, RemoteWriter

FLUSH_TIMEOUT = 5.0


class BufferConnection:
    """To shards that are objects of this process."""

    prefetches = False  # nothing would be gained
    writer: LocalWriter | RemoteWriter
    reader: Reader

    def __init__(self, settings: BufferDefinition, here: ClusterSession):
        self.settings = settings
        self.source = ("", False)
        """The source that this process reads into the buffer, and whether it has ended."""
        self._open(here, [f"buffer/{settings.name}/{i}" for i in range(settings.shards)])

    def _open(self, here: ClusterSession, names: list[str]) -> None:
        cluster = here.cluster
        assert isinstance(cluster, LocalCluster)
        ports = [LocalPort(i, cluster.hosted(n).worker) for i, n in enumerate(names)]
        self.writer = LocalWriter(self.settings, ports)
        self.reader = self._make_reader(ports)

    def _make_reader(self, ports: Any) -> Reader:
        self.ports: list[Port] = ports
        return QueueReader(self.settings, ports, self._run)

    def _run(self, function: Any) -> None:
        """Call a function where ports may be used."""
        function()

    def read(self) -> Reader:
        """The reader, connected."""
        return self.reader

    def close(self) -> None: ...


class RemoteConnection(BufferConnection):
    """To shards that are other processes."""

    prefetches = True

    def _open(self, here: ClusterSession, names: list[str]) -> None:
        self._ports = [RemotePort(here, name, i, self) for i, name in enumerate(names)]
        self.remote_writer = self.writer = RemoteWriter(self.settings, self._ports)
        self.reader = self._make_reader(self._ports)
        self._reading = self._closed = False

    def _run(self, function: Any) -> None:
        io.call(function)

    def read(self) -> Reader:
        if not self._reading:
            self._reading = True
            io.call(self._connect)
        return self.reader

    def _connect(self) -> None:
        for port in self._ports:
            port.connect()
        self._tick()

    def _tick(self) -> None:
        for port in self._ports:
            port.tick()
        self.reader.tick()
        if not self._closed:
            io.loop().call_later(1.0, self._tick)

    def close(self) -> None:
        if io.is_loop():
            self._close_ports()
            return
        source, has_ended = self.source
        if not source or has_ended:  # a source that is stopped halfway waits for room that nobody makes any more
            self.writer.flush(FLUSH_TIMEOUT)
        closed = threading.Event()
        io.call(self._close_ports)
        io.call(closed.set)
        closed.wait(1.0)  # ports cannot do anything without the session, which ends next

    def _close_ports(self) -> None:
        self._closed = True
        for port in self._ports:
            port.close()
        self.remote_writer.close()

    # of PortOwner
    def port_up(self, port: RemotePort) -> None:
        self.remote_writer.port_up(port)
        self.reader.port_up(port)

    def port_down(self, port: RemotePort) -> None:
        self.remote_writer.port_down(port)
        self.reader.port_down(port)

    def port_gone(self, port: RemotePort) -> None:
        if not all(p.gone for p in self._ports):
            self.port_down(port)
            return
        stopped = Unreachable(f"buffer {self.settings.name!r} has been stopped: all its workers are gone")
        self.remote_writer.fail(stopped)
        self.reader.fail(stopped, for_good=True)

    def port_failed(self, port: RemotePort, error: BaseException | None) -> None:
        self.reader.fail(error if isinstance(error, BrayError) else BrayError(str(error)))

    def port_freed(self, port: RemotePort, loans: list[int]) -> None:
        self.remote_writer.port_freed(port, loans)


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
            make = BufferConnection if here.cluster.kind == "local" else RemoteConnection
            _connections[key] = make(settings, here)
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
