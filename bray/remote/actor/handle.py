"""RemoteActor: a game service whose workers live on all nodes of the cluster."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bray.cluster.protocol import Member, Node
from bray.cluster.session import ClusterSession, session
from bray.config import ConfigSource, resolve
from bray.errors import ConfigError, MissingComponent, ResourceError, Unreachable
from bray.inference.host import Promise
from bray.remote.actor.worker import ActorService, ActorWorker, HeadWorker
from bray.remote.master.handle import get
from bray.serving.access import with_environment
from bray.serving.agent import AgentActor
from bray.serving.config import ServiceConfig
from bray.serving.messages import compile_message
from bray.serving.server import Prepare, admin_of
from bray.serving.workers import reserve

logger = logging.getLogger("bray.remote")

CHECK_S = 3.0  # between two looks at nodes that come and go, and at workers that cannot restart
_GIVE_UP_S = 150.0  # a worker that has not answered for so long is started anew; its Actor may take a while to be made
_LONGEST_PAUSE_S = 60.0
_PATIENCE_S = 5.0


class RemoteActor:
    """Serves games with an Actor class: `num_workers` processes on every node, `actors_per_worker` sessions in each.

        remote_actor = bray.RemoteActor(port=8000)
        remote_actor.serve(Actor=AtariActor, model="atari_model", buffer="atari_buffer")
        bray.run_until_asked_to_stop()

    Games connect to `port` of a node, where the workers of that machine share it, or with use_gateway="head" to the
    head node alone. A worker that dies is replaced; a node that joins the cluster gets its workers, as long as this
    process lives.
    """

    def __init__(
        self,
        name: str = "default",
        num_workers: int = 2,
        cpus_per_worker: float = 1,
        memory_per_worker: float = 512,
        prepare: Prepare | None = None,
        **settings: Any,
    ):
        """
        name               unique among the services of a session
        num_workers        processes on every node of the cluster
        cpus_per_worker, memory_per_worker   what each is promised, memory in MB
        prepare            called in each process with its `Server` before it listens, to give it more admin routes and
                           numbers; it may be async
        settings           any other key of ServiceConfig:
          port               where games connect, 8000; 0 = any free one of this machine
          actors_per_worker  sessions that one worker holds at once, 10
          use_tcp            answer framed TCP too, on the same port
          use_gateway        node = all workers of a machine know whose session a request is for; head = one entry on
                             the head node does so for the whole cluster; None = a session belongs to its connection
          host               address to listen on; None = this machine alone where the cluster is this machine, else all
                             its networks
          admin_port         of /metrics, /healthz and /readyz; None = the port after the games', 0 = any free one
          tick_timeout_s=5, tokens=("secret",), ...
        """
        if "/" in name or not name:
            raise ConfigError(f"RemoteActor: expected a name without '/', got {name!r}")
        if type(num_workers) is not int or num_workers < 1:
            raise ConfigError(f"RemoteActor {name!r}: num_workers: expected a whole number from 1, got {num_workers!r}")
        self.name, self._prepare = name, prepare
        self._host = settings.pop("host", None)
        given = {"actors_per_worker": 10, **settings, "workers": num_workers}
        if self._host is not None:
            given["host"] = self._host
        source = ConfigSource(f"RemoteActor {name!r}", {"actor": given})
        self._asked: ServiceConfig = with_environment(resolve({"actor": ServiceConfig}, [source])["actor"])
        self._config = self._asked  # with the ports and the host that were found
        self._cpus, self._memory = cpus_per_worker, memory_per_worker
        self._ports = (self._asked.port, admin_of(self._asked, self._asked.port))
        self._reserved: list[socket.socket] = []
        self._session: ClusterSession | None = None
        self._nodes: dict[str, _NodeWorkers] = {}  # by node id
        self._entry: Member | None = None
        self._over = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._ending = threading.Lock()

    @property
    def port(self) -> int:
        """Where games connect."""
        return self._ports[0]

    @property
    def admin_port(self) -> int:
        return self._ports[1]

    def serve(self, *args: Any, Actor: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Start the service and return when every worker answers. Each session slot has an `Actor(*args, **kwargs)` of
        its own, which later sessions use again. An Actor that cannot be made is an error here, with its traceback."""
        if Actor is None:
            if not args:
                raise ConfigError("expected serve(Actor=MyActor, ...), got no Actor")
            Actor, *rest = args
            args = tuple(rest)
        if not callable(Actor):
            raise ConfigError(f"expected serve(Actor=MyActor, ...) with a class, got {Actor!r:.60}")
        if self._session is not None:
            raise ConfigError(f"RemoteActor {self.name!r} serves already: stop() it first, or make another one")
        if getattr(Actor, "__init__", None) is AgentActor.__init__ and "config" not in kwargs and not args[1:]:
            kwargs["config"] = get("config")
        if isinstance(Actor, type) and issubclass(Actor, AgentActor) and kwargs.get("serialize") == "proto":
            for key in ("tick_input_proto", "tick_output_proto"):  # .proto files are found here, not on every node
                kwargs[key] = compile_message(kwargs.get(key), key)
        if session().cluster.names(f"actor/{self.name}/"):
            raise ConfigError(f"there is an actor {self.name!r} already: choose another name, or stop that one first")
        self._session, self._over, self._config = session(), threading.Event(), self._asked
        self._made = (Actor, args, kwargs)
        self._session.stop_hooks.append(self.stop)
        try:
            if self._session.cluster.kind == "local":
                self._serve_here()
            else:
                self._serve_on_cluster()
        except BaseException:
            self._end(drain=False)  # nobody has played yet
            raise
        logger.info("actor %s: games connect to %s:%d, admin port %d", self.name, self._config.host, *self._ports)

    def _serve_here(self) -> None:
        """One worker on the io loop of this process."""
        if self._config.workers > 1:
            logger.info("actor %s: cluster='local' has one worker, not %d", self.name, self._config.workers)
        config = replace(self._config, workers=1, use_gateway=None)
        service = ActorService(secrets.token_hex(8), config, alone=True, prepare=self._prepare)
        place = self._nodes["local"] = _NodeWorkers(0, [f"actor/{self.name}/local/0"])
        member = self._cluster.start(place.names[0], ActorWorker, service, 0, *self._made)
        self._ports = member.call("ports").result()

    def _serve_on_cluster(self) -> None:
        config = self._config
        if self._host is None:
            config = replace(config, host="127.0.0.1" if session().info.one_machine else "0.0.0.0")
        port = self._reserve(config.host, config.port)
        self._ports = (port, self._reserve(config.admin_host, admin_of(config, port)))
        config = self._config = replace(config, port=self._ports[0], admin_port=self._ports[1])
        entry = f"actor/{self.name}/head" if config.use_gateway == "head" else None
        self._service = ActorService(secrets.token_hex(8), config, entry=entry, prepare=self._prepare)
        if entry is not None:
            self._start_entry()
            assert self._entry is not None
            self._entry.call("ports").result()  # it listens
        refused = self._start_workers(self._cluster.nodes())
        if not self._nodes:
            raise refused[0]
        for error in refused:
            logger.warning("actor %s: a node is left out: %s", self.name, error)
        if self._entry is not None:
            names = [name for place in self._nodes.values() for name in place.names]
            self._entry.call("wait_for", names, 10.0).result()
        self._supervisor = threading.Thread(target=_Supervisor(self).run, name=f"bray-actor-{self.name}", daemon=True)
        self._supervisor.start()

    def _reserve(self, host: str, port: int) -> int:
        self._reserved.append(reserve(host, port))
        return self._reserved[-1].getsockname()[1]

    @property
    def _cluster(self) -> Any:
        assert self._session is not None
        return self._session.cluster

    # --- workers ------------------------------------------------------------------------------------------------------

    def _start_workers(self, nodes: list[Node]) -> list[ResourceError]:
        """Start the workers of these nodes in parallel. Returns the errors of nodes that have no room; any other error
        is raised."""
        taken = {place.index for place in self._nodes.values()}
        places = {}
        for node in nodes:
            index = next(i for i in range(len(taken) + 1) if i not in taken)
            taken.add(index)
            names = [f"actor/{self.name}/{node.id[:12]}/{i}" for i in range(self._config.workers)]
            places[node.id] = _NodeWorkers(index, names)
        self._nodes |= places
        failed: dict[str, BaseException] = {}
        with ThreadPoolExecutor(8) as pool:
            started = [
                (at, pool.submit(self._start, at, place, i))
                for at, place in places.items()
                for i in range(len(place.names))
            ]
            for at, future in started:
                if (error := future.exception()) is not None:
                    failed.setdefault(at, error)
        for at in failed:
            self._stop_all(self._nodes.pop(at).names)
        for error in failed.values():
            if not isinstance(error, ResourceError):
                raise error
        return [e for e in failed.values() if isinstance(e, ResourceError)]

    def _start(self, node: str, place: _NodeWorkers, i: int) -> None:
        number = place.index * self._config.workers + i
        name = place.names[i]
        self._cluster.start(
            name, ActorWorker, self._service, number, *self._made, cpus=self._cpus, memory=self._memory, node=node
        )
        if self._over.is_set():
            self._cluster.stop(name)

    def _start_entry(self) -> None:
        nodes = self._cluster.nodes()
        head = next((n for n in nodes if n.head), nodes[0])
        self._entry = self._cluster.start(self._service.entry, HeadWorker, self._service, node=head.id)

    def _stop_all(self, names: list[str]) -> None:
        if names:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(self._cluster.stop, names))

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the service as SIGTERM does: no new sessions, running ones may end within `drain_timeout_s`, ticks under
        way are answered."""
        with self._ending:
            if self._session is not None:
                self._end(drain=True)

    def _end(self, drain: bool) -> None:
        assert self._session is not None
        self._over.set()
        if self._supervisor is not None:
            self._supervisor.join(timeout=20.0)
        names = [name for place in self._nodes.values() for name in place.names]
        entry = [self._entry.name] if self._entry is not None else []
        try:
            if drain:
                self._tell_to_drain(entry, None)
                # behind an entry that has drained nobody connects any more, and sessions had the time to end
                self._tell_to_drain(names, 0.0 if entry else None)
            self._stop_all(names)
            self._stop_all(entry)
        finally:
            for sock in self._reserved:
                sock.close()
            if self.stop in self._session.stop_hooks:
                self._session.stop_hooks.remove(self.stop)
            self._nodes, self._entry, self._supervisor, self._session = {}, None, None, None
            self._reserved = []

    def _ask(self, names: Iterable[str], timeout: float, method: str, *args: Any) -> dict[str, Promise]:
        """Call a method of these members in parallel; missing ones are left out."""
        asked = {}
        for name in names:
            with contextlib.suppress(MissingComponent):
                asked[name] = self._cluster.find(name).call(method, *args, timeout=timeout)
        return asked

    def _tell_to_drain(self, names: list[str], timeout: float | None) -> None:
        config = self._config
        most = config.drain_timeout_s + 2 * config.tick_timeout_s + _PATIENCE_S
        for name, promise in self._ask(names, most, "drain", timeout).items():
            error = promise.exception()
            if error is not None:
                logger.warning("%s has not ended well: %s", name, error)


@dataclass
class _NodeWorkers:
    """A node's workers."""

    index: int
    names: list[str]


class _Supervisor:
    """Gives new nodes their workers, and restarts workers that Ray does not bring back."""

    def __init__(self, actor: RemoteActor):
        self.actor = actor
        self._silent_since: dict[str, float] = {}  # workers that do not answer
        self._pauses: dict[str, tuple[float, float]] = {}  # node or worker -> (not before, the pause after that)
        self._said = ""

    def run(self) -> None:
        while not self.actor._over.wait(CHECK_S):
            try:
                self._check_nodes()
                self._check_workers()
            except Exception as e:
                self._say(f"actor {self.actor.name}: cannot look after its workers: {e!r}")

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            logger.error("%s", message)

    def _may_retry(self, what: str) -> bool:
        """Whether it is time for another attempt; the next has to wait twice as long."""
        due, pause = self._pauses.get(what, (0.0, CHECK_S))
        if time.monotonic() < due:
            return False
        self._pauses[what] = (time.monotonic() + pause, min(_LONGEST_PAUSE_S, 2 * pause))
        return True

    def _check_nodes(self) -> None:
        actor = self.actor
        nodes = {n.id: n for n in actor._cluster.nodes()}
        for gone in set(actor._nodes) - set(nodes):
            logger.error("actor %s: node %s is gone", actor.name, gone[:12])
            actor._stop_all(actor._nodes.pop(gone).names)
        new = [n for n in nodes.values() if n.id not in actor._nodes and self._may_retry(n.id)]
        if not new or actor._over.is_set():
            return
        for error in actor._start_workers(new):
            self._say(f"actor {actor.name}: a node has no room for its workers: {error}")
        for node in new:
            if node.id in actor._nodes:
                logger.info("actor %s: node %s has joined and has its workers", actor.name, node.host)

    def _check_workers(self) -> None:
        """Ray restarts a worker whose process died. One that then cannot start (its model was not back yet) or does not
        come back is started anew."""
        actor = self.actor
        alive = {n.id for n in actor._cluster.nodes()}
        starts: dict[str, Callable[[], Any]] = {
            name: partial(actor._start, node, place, i)
            for node, place in actor._nodes.items()
            if node in alive
            for i, name in enumerate(place.names)
        }
        if actor._entry is not None:
            starts[actor._entry.name] = actor._start_entry
        asked = actor._ask(starts, 2 * CHECK_S, "ports")
        for name, start in starts.items():
            if actor._over.is_set():
                return
            error = asked[name].exception() if name in asked else Unreachable(f"{name} is not there")
            if error is None:
                self._silent_since.pop(name, None)
                self._pauses.pop(name, None)
                continue
            since = self._silent_since.setdefault(name, time.monotonic())
            patience = _GIVE_UP_S if name in asked else CHECK_S  # Ray has given up on one that it cannot find
            if isinstance(error, Unreachable) and time.monotonic() - since < patience:
                continue  # it may be restarting
            if self._may_retry(name):
                logger.error("%s is started anew, because it did not come back by itself: %s", name, error)
                actor._cluster.stop(name)
                start()
