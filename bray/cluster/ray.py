"""Components in processes that Ray places, names and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bray.cluster import io
from bray.cluster.protocol import (
    CALL_TIMEOUT,
    CLOSE_TIMEOUT,
    Failure,
    Hosted,
    Member,
    Node,
    as_coroutine,
    missing,
    name_taken,
)
from bray.cluster.ray_get import let_ray_get_take_ours
from bray.cluster.ray_start import alive_nodes
from bray.cluster.session import ClusterSession, SessionInfo, enter, session
from bray.errors import MissingComponent, ResourceError, Unreachable
from bray.inference.host import Promise
from bray.log_format import log_formatter, set_log_format
from bray.rundir import log_to

logger = logging.getLogger("bray.remote")

START_TIMEOUT = 120.0
BUSY_TIMEOUT = 30.0
"""Seconds after which a request fails that fits the cluster, but not what others leave free."""
_RETRY_S = 0.2
_INLINE = 50_000  # bytes of constructor arguments that travel in the message; larger ones go through the object store
_GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)  # the latter: its node is gone too


def prepare_worker(info: SessionInfo) -> None:
    """In a worker process: the session's modules are found, a SIGTERM ends it no more, and warnings are shown."""
    os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # a thread of ours waits, never Ray's loop
    _survive_sigterm()
    let_ray_get_take_ours()
    sys.path.extend(p for p in info.modules if p not in sys.path)
    set_log_format(info.log_format)
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.WARNING)  # the rest is in bray.log
    shown.setFormatter(log_formatter("%(levelname)s %(name)s: %(message)s"))
    # In place of what Ray Train has set up, which would show every line of ours.
    logging.basicConfig(handlers=[shown], level=logging.WARNING, force=True)
    logging.getLogger("bray").setLevel(logging.INFO)


def enter_worker(info: SessionInfo, member: str) -> None:
    """In a worker process: take part in the session."""
    prepare_worker(info)
    opened = enter(ClusterSession(info, RayCluster(info, False), member))
    opened.log = log_to(opened.numbers / "bray.log")


def _survive_sigterm() -> None:
    """Let SIGTERM do nothing to this process, but end the programs that this thread starts from now on.

    A Ray of our own blocks SIGTERM in all its processes (see ray_start). A blocked or ignored signal stays so in a
    program that is started here, and `Popen.terminate` would do nothing; a handler does not. It has to be one in C,
    because Python's run in the main thread, which is Ray's: abs() takes an int, as handlers do, and changes nothing.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGTERM, libc.abs)
        os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_end_by_sigterm)
        _unblock_sigterm()


def _block_sigterm() -> None:
    """During a fork: a signal that comes at once waits until the child has no handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()


class _Host:
    """The Ray actor around a worker. Its own loop is Ray's; the worker's coroutines run on the io loop."""

    def __init__(self, info: SessionInfo, name: str, made: bytes | list[Any]):
        enter_worker(info, name)
        self._hosted: Future[Hosted] = Future()
        # In a thread: this process answers at once, however long its worker takes to start.
        threading.Thread(target=self._make, args=(name, made), daemon=True).start()

    def _make(self, name: str, made: bytes | list[Any]) -> None:
        def make() -> Any:  # only now: the user's modules are found on the session's path
            cls, args, kwargs = ray.cloudpickle.loads(made) if isinstance(made, bytes) else ray.get(made[0])
            return cls(*args, **kwargs)

        self._hosted.set_result(Hosted(name, make))

    async def pid(self) -> int:
        return os.getpid()

    async def ready(self) -> Failure | None:
        _survive_sigterm()  # in Ray's loop, where plain methods run
        return (await asyncio.wrap_future(self._hosted)).failure

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(True, the result) or (False, a Failure)."""
        hosted = self._hosted.result() if self._hosted.done() else await asyncio.wrap_future(self._hosted)
        if hosted.failure is not None:
            return False, hosted.failure
        try:
            result = getattr(hosted.worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await asyncio.wrap_future(io.submit(as_coroutine(result)))
            return True, result
        except BaseException as e:
            return False, Failure.of(e, hosted.where)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._hosted.result().close()
        session().end()


class _Call(Promise):
    """A call under way. Answers come in a thread of Ray's, so that code on the io loop may wait for them too."""

    def __init__(self, member: RayMember, request: tuple[Any, ...], timeout: float, retry: bool):
        super().__init__()
        self._member, self._request, self._retry = member, request, retry
        self._timeout, self._end = timeout, time.monotonic() + timeout
        self._loop = io.loop()
        self._loop.call_soon_threadsafe(self._start_timer)
        self._send()

    def _start_timer(self) -> None:
        late = Unreachable(f"{self._what} in {self._timeout:g} s")
        timer = self._loop.call_later(self._timeout, self.settle, None, late)
        self.add_done_callback(lambda _: self._loop.call_soon_threadsafe(timer.cancel))

    @property
    def _what(self) -> str:
        return f"{self._member.name} did not answer {self._request[0]}"

    def _send(self) -> None:
        if self.done():
            return
        try:
            self._member.actor().call.remote(*self._request).future().add_done_callback(self._answered)
        except BaseException as e:
            self._lost(e)

    def _answered(self, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            self._lost(error)
            return
        fine, result = answer.result()
        if fine:
            self.settle(result)
        else:
            self.settle(error=result.for_caller())

    def _lost(self, error: BaseException) -> None:
        if not isinstance(error, (*_GONE, MissingComponent)):
            self.settle(error=error)
            return
        self._member.forget_actor()
        if self._retry and time.monotonic() + _RETRY_S < self._end:
            self._loop.call_soon_threadsafe(self._loop.call_later, _RETRY_S, self._send)
        elif isinstance(error, MissingComponent):
            self.settle(error=error)
        else:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self.settle(error=Unreachable(f"{self._what}: {why}"))


class RayMember:
    """A worker in another process."""

    def __init__(self, name: str, actor: Any = None):
        self.name, self._actor = name, actor

    def __reduce__(self) -> tuple[Any, ...]:
        return RayMember, (self.name,)  # whoever gets it finds the actor when it is needed

    def actor(self) -> Any:
        if self._actor is None:
            if not ray.is_initialized():
                raise Unreachable(f"{self.name} cannot be asked: the session has ended")
            try:
                self._actor = ray.get_actor(self.name, session().namespace)
            except ValueError:
                raise missing(self.name, session().cluster.names()) from None
        return self._actor

    def forget_actor(self) -> None:
        """It is gone; another one may have its name."""
        self._actor = None

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, retry: bool = False, **kwargs: Any
    ) -> Promise:
        return _Call(self, (method, args, kwargs), timeout, retry)

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            self.actor().call.remote(method, args, kwargs)
        except MissingComponent:
            logger.warning("%s is missing and was not told %s", self.name, method)


class RayCluster:
    """connected  `ray.init` was called for this session, which then calls `ray.shutdown`"""

    kind = "ray"

    def __init__(self, info: SessionInfo, connected: bool):
        self._info, self._connected = info, connected
        self._kept: dict[str, Any] = {}  # constructor arguments, which a restart needs, and handles: see `stop`

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        **kwargs: Any,
    ) -> Member:
        if name in self.names():
            raise name_taken(name)
        if session().member not in ("", "master"):  # else it would end with this process, which Ray may restart
            resources = {"cpus": cpus, "gpus": gpus, "memory": memory, "node": node}
            wait = BUSY_TIMEOUT + START_TIMEOUT
            return self.find("master").call("start_member", name, cls, args, resources, kwargs, timeout=wait).result()
        self._check_feasible(name, cpus, gpus, memory, node)
        made: Any = ray.cloudpickle.dumps((cls, args, kwargs))
        if len(made) > _INLINE:
            made = [ray.put((cls, args, kwargs))]
        options: dict[str, Any] = {
            "name": name,
            "namespace": self._info.namespace,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 10_000,
        }
        if memory:
            options["memory"] = int(memory * 2**20)
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            actor = ray.remote(_Host).options(**options).remote(self._info, name, made)
        except ValueError:  # taken meanwhile
            raise name_taken(name) from None
        self._kept[name] = (made, actor)
        try:
            self._wait_ready(name, actor, _amount(cpus, gpus, memory))
        except BaseException:
            self.stop(name)
            raise
        return RayMember(name, actor)

    def _wait_ready(self, name: str, actor: Any, asks: str) -> None:
        start = time.monotonic()
        placed, ready = actor.pid.remote(), actor.ready.remote()
        while not ray.wait([ready], timeout=1.0)[0]:
            waited = time.monotonic() - start
            if waited > BUSY_TIMEOUT and not ray.wait([placed], timeout=0)[0]:
                raise self.busy(name, asks)
            if waited > START_TIMEOUT:
                raise Unreachable(f"{name} was not ready after {START_TIMEOUT:g} s and was stopped; Ray's logs say why")
        try:
            failure = ray.get(ready)
        except ray.exceptions.RayError as e:
            raise Unreachable(f"{name} died while it started: {e}") from None
        if failure is not None:
            raise failure.for_caller()

    def _check_feasible(self, name: str, cpus: float, gpus: float, memory: float, node: str | None) -> None:
        nodes = self.nodes()
        if node is not None and node not in [n.id for n in nodes]:
            raise ResourceError(f"{name} is to run on node {node[:12]}, which is not there (any more)")
        for n in nodes:
            if node in (None, n.id) and n.cpus >= cpus and n.gpus >= gpus and n.memory >= memory:
                return
        raise ResourceError(
            f"{name} asks for {_amount(cpus, gpus, memory)} on one node, and no node has that: there are "
            f"{_list(nodes)}. Ask for less (cpus_per_worker, gpus_per_worker, memory_per_worker), or add a larger "
            "node."
        )

    def busy(self, name: str, asks: str) -> ResourceError:
        """The error for a request that fits the cluster, but not what others leave free."""
        free = ray.available_resources()
        return ResourceError(
            f"{name} asks for {asks}, and others hold what there is: free are "
            f"{_amount(free.get('CPU', 0.0), free.get('GPU', 0.0), free.get('memory', 0.0) / 2**20)} of "
            f"{_list(self.nodes())}. Ask for less, stop something, or add a node."
        )

    def check_group(self, name: str, count: int, cpus: float, gpus: float) -> None:
        """Refuse `count` processes that would not fit if the cluster were empty."""
        room = self.room(count, cpus, gpus)
        if room < count:
            raise ResourceError(
                f"{name} asks for {count} x {_amount(cpus, gpus)}, and there is room for {room}: there are "
                f"{_list(self.nodes())}. Ask for less (num_workers, CPUs or GPUs per worker), or add a node."
            )

    def room(self, count: int, cpus: float, gpus: float) -> int:
        """How many of `count` processes would fit if the cluster were empty."""
        of_nodes = [
            min(int(n.cpus / cpus) if cpus else count, int(n.gpus / gpus) if gpus else count) for n in self.nodes()
        ]
        return min(count, sum(of_nodes))

    def wait_group(self, name: str, count: int, cpus: float, gpus: float) -> None:
        """Wait until others leave room for `count` processes; ResourceError after BUSY_TIMEOUT."""
        end = time.monotonic() + BUSY_TIMEOUT
        free = ray.available_resources()
        while free.get("CPU", 0.0) < count * cpus or free.get("GPU", 0.0) < count * gpus:
            if time.monotonic() > end:
                raise self.busy(name, f"{count} x {_amount(cpus, gpus)}")
            time.sleep(0.5)
            free = ray.available_resources()

    def find(self, name: str) -> Member:
        member = RayMember(name)
        member.actor()
        return member

    def names(self, prefix: str = "") -> list[str]:
        rows = ray.util.list_named_actors(all_namespaces=True)
        mine = (r["name"] for r in rows if r["namespace"] == self._info.namespace)
        return sorted(n for n in mine if n.startswith(prefix))

    def pid(self, name: str) -> int:
        try:
            return ray.get(RayMember(name).actor().pid.remote(), timeout=CALL_TIMEOUT)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as e:
            raise Unreachable(f"{name} does not answer: {type(e).__name__}") from None

    def stop(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name, self._info.namespace)
            with contextlib.suppress(Exception):  # it may hang or be dead: it is killed all the same
                ray.get(actor.close.remote(), timeout=CLOSE_TIMEOUT)
            ray.kill(actor)
        # Not before: Ray kills an actor of which nobody has a handle, and it could not close.
        self._kept.pop(name, None)

    def nodes(self) -> list[Node]:
        return alive_nodes()

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, ref: Any) -> Any:
        return ray.get(ref)

    def host(self) -> str:
        return "127.0.0.1" if self._info.one_machine else ray.util.get_node_ip_address()

    def close(self) -> None:
        if not ray.is_initialized():
            return
        try:
            running = self.names()
            ours = [n for n in self._kept if n in running]
            for name in (
                *(n for n in running if n not in ours),
                *reversed(ours),
            ):  # the master, started first, goes last
                with contextlib.suppress(Exception):
                    self.stop(name)
        except Exception as e:  # what could be saved is saved
            logger.warning("Ray ended before the session did: %s", e)
        if self._connected:
            ray.shutdown()


def _amount(cpus: float, gpus: float, memory: float = 0) -> str:
    parts = [f"{cpus:g} CPUs"] if cpus or not (gpus or memory) else []
    parts += [f"{gpus:g} GPUs"] if gpus else []
    parts += [f"{memory:.0f} MB"] if memory else []
    return ", ".join(parts)


def _list(nodes: list[Node]) -> str:
    return "; ".join(f"node {n.host}: {_amount(n.cpus, n.gpus)}" for n in nodes) or "no nodes"
