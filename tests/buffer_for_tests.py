"""Buffers whose shards are reached through sockets, without a cluster: quick to start, and any process may take
part."""

import contextlib
import multiprocessing
import os

from bray.cluster.local import LocalCluster
from bray.cluster.session import ClusterSession, SessionInfo, enter, shutdown
from bray.inference.host import Promise


class SocketCluster(LocalCluster):
    """Members are objects of this process, but buffers take them for those of others."""

    kind = "sockets"


class _Known:
    """A shard that another process has."""

    def __init__(self, answers):
        self.answers = answers

    def call(self, method, *args, **kwargs):
        promise = Promise()
        promise.set_result(self.answers[method])
        return promise


class KnownCluster:
    """What a child process knows: the shards of its parent."""

    kind = "sockets"

    def __init__(self, openings):
        self.openings = openings

    def find(self, name):
        return _Known(self.openings[name])

    def names(self, prefix=""):
        return [n for n in self.openings if n.startswith(prefix)]

    def close(self):
        pass

    def host(self):
        return "127.0.0.1"


@contextlib.contextmanager
def session_of(kind, path):
    """A session of this process alone, without a run directory or a master: "local", or one whose buffers use "sockets"
    and shared memory."""
    info = SessionInfo("p", "t", str(path), str(path), os.urandom(16), True, ())
    try:
        yield enter(ClusterSession(info, SocketCluster() if kind == "sockets" else LocalCluster()))
    finally:
        shutdown()


def _child(info, openings, function, args, pipe):
    enter(ClusterSession(info, KnownCluster(openings)))
    try:
        pipe.send(function(*args))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        shutdown()


def child(session, function, *args):
    """Run a function of a module in another process of the session. Returns (process, pipe with its result)."""
    openings = {
        n: {method: session.cluster.find(n).call(method).result() for method in ("opening", "described")}
        for n in session.cluster.names("buffer/")
    }
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(session.info, openings, function, args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, mine
