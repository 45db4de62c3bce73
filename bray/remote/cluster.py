"""Where components live: in this process (`local`) or in processes that Ray places, names and restarts (`ray`).

`init` opens a session: a project, a trial, their run directory, and a Cluster. A Cluster starts workers (plain classes) as named members
and finds them again from anywhere in the session. All of Ray that the rest of `remote/` needs is here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bray.errors import BrayError, ConfigError, MissingComponent, RemoteError, ResourceError, UnknownName, Unreachable
from bray.inference.host import Promise
from bray.remote import io, wire
from bray.rundir import RunDir, log_to

logger = logging.getLogger("bray.remote")

# Ray starts a cluster by itself when a thread that has outlived its session asks it for something.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

CALL_TIMEOUT = 60.0
START_TIMEOUT = 120.0
_CLOSE_TIMEOUT = 15.0  # a member that ends may have weights to save
_BUSY_TIMEOUT = 30.0  # a request that fits the cluster but not what is free fails after this long
_ASK_AGAIN = 0.2
_INLINE = 50_000  # bytes of constructor arguments that travel in the message; larger ones go through the object store


class Node(NamedTuple):
    """A machine (or a part of one) of the cluster."""

    id: str
    host: str
    head: bool
    cpus: float
    gpus: float


class Member(Protocol):
    """A started worker, wherever it is. Cheap, and may be sent anywhere in the session."""

    name: str

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, again: bool = False, **kwargs: Any
    ) -> Promise:
        """Call a method of the worker; await the Promise, or take its `.result()` in a thread.

        A member that is gone or being restarted raises Unreachable; with `again` (for what may safely be done twice) the call is repeated
        until `timeout`."""
        ...

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method and do not wait: its result and its errors are lost."""
        ...


class Cluster(Protocol):
    kind: str

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        restarts: bool = True,
        **kwargs: Any,
    ) -> Member:
        """Make `cls(*args, **kwargs)` a member of this name, and wait until it answers. `memory` is in MB. It lives as long as the process
        that started it; after a crash it is made anew with the same arguments (unless `restarts` is False)."""
        ...

    def find(self, name: str) -> Member:
        """The member of this name; MissingComponent names those of its kind that are there."""
        ...

    def names(self, prefix: str = "") -> list[str]: ...

    def pid(self, name: str) -> int:
        """Of the process in which a member runs now."""
        ...

    def stop(self, name: str) -> None:
        """End a member; one that is not there is not an error."""
        ...

    def nodes(self) -> list[Node]: ...

    def put(self, value: Any) -> Any:
        """A reference to a large value, which travels once to each machine. It may be part of a call's arguments."""
        ...

    def get(self, ref: Any) -> Any: ...

    def host(self) -> str:
        """The address at which other machines reach this one."""
        ...

    def close(self) -> None: ...


# --- hosting a worker -------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """An error on its way to whoever waits."""

    error: BaseException
    """As it was raised; a RemoteError with the same text where it cannot be sent."""
    trace: str
    where: str


def _fail(error: BaseException, where: str) -> Failure:
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))  # our own bytes of a moment ago: some errors can be written but not read
    except Exception:
        error = RemoteError(f"{type(error).__name__}: {error}")
    return Failure(error, trace, where)


def _raise(failure: Failure) -> BaseException:
    """The error for the caller: the worker's own traceback first, then where it ran."""
    error = failure.error
    if not isinstance(error, BrayError) or isinstance(error, RemoteError):
        error.add_note(f"raised in {failure.where}:\n{failure.trace}")
    else:
        error.add_note(f"raised in {failure.where}")
    return error


class Hosted:
    """A worker object and its calls: plain methods run at once, async ones on the process's io loop."""

    def __init__(self, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.name = name
        self.failure: Failure | None = None
        self.where = f"{name} (pid {os.getpid()} on {socket.gethostname()})"
        try:
            self.worker = cls(*args, **kwargs)
            if (start := getattr(self.worker, "start", None)) is not None:
                io.run(start())
        except BaseException as e:
            self.failure = _fail(e, self.where)
            logger.error("%s could not be started", self.where, exc_info=e)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or a coroutine for the io loop."""
        return getattr(self.worker, method)(*args, **kwargs)

    def close(self) -> None:
        if self.failure is None and (close := getattr(self.worker, "close", None)) is not None:
            done = close()
            if inspect.isawaitable(done):

                async def wait() -> None:
                    await done

                io.run(wait(), timeout=_CLOSE_TIMEOUT - 2.0)


# --- this process -----------------------------------------------------------------------------------------------------


class LocalMember:
    """A worker of this process."""

    def __init__(self, name: str):
        self.name = name

    def _hosted(self) -> Hosted:
        cluster = session().cluster
        assert isinstance(cluster, LocalCluster)
        return cluster.hosted(self.name)

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, again: bool = False, **kwargs: Any
    ) -> Promise:
        promise = Promise()
        promise.set_running_or_notify_cancel()
        try:
            result = self._hosted().call(method, args, kwargs)
        except BaseException as e:
            promise.set_exception(e)
            return promise
        if not inspect.isawaitable(result):
            promise.set_result(result)
            return promise

        async def bounded() -> Any:
            try:
                return await asyncio.wait_for(result, timeout)
            except TimeoutError:
                raise Unreachable(f"{self.name} did not answer {method} in {timeout:g} s") from None

        io.submit(bounded()).add_done_callback(lambda f: _pass(f, promise))
        return promise

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        self.call(method, *args, **kwargs)


def _pass(done: Future[Any], promise: Promise) -> None:
    if done.cancelled():
        promise.set_exception(Unreachable("the call was cancelled"))
    elif (error := done.exception()) is not None:
        promise.set_exception(error)
    else:
        promise.set_result(done.result())


class LocalCluster:
    """All components in this process: for tests, debugging and notebooks."""

    kind = "local"

    def __init__(self) -> None:
        self._hosted: dict[str, Hosted] = {}
        self._lock = threading.Lock()

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        restarts: bool = True,
        **kwargs: Any,
    ) -> Member:
        if name in self._hosted:
            raise ConfigError(f"{name} is there already: choose another name, or stop that one first")
        hosted = Hosted(name, cls, args, kwargs)
        if hosted.failure is not None:
            raise hosted.failure.error
        with self._lock:
            self._hosted[name] = hosted
        return LocalMember(name)

    def hosted(self, name: str) -> Hosted:
        found = self._hosted.get(name)
        if found is None:
            raise _missing(name, self.names())
        return found

    def find(self, name: str) -> Member:
        self.hosted(name)
        return LocalMember(name)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(n for n in self._hosted if n.startswith(prefix))

    def pid(self, name: str) -> int:
        self.hosted(name)
        return os.getpid()

    def stop(self, name: str) -> None:
        with self._lock:
            hosted = self._hosted.pop(name, None)
        if hosted is not None:
            hosted.close()

    def nodes(self) -> list[Node]:
        return [Node("local", "127.0.0.1", True, float(os.cpu_count() or 1), 0.0)]

    def put(self, value: Any) -> Any:
        return _Held(value)

    def get(self, ref: Any) -> Any:
        return ref.value

    def host(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        for name in reversed(list(self._hosted)):
            try:
                self.stop(name)
            except Exception:
                logger.exception("%s did not end well", name)


@dataclass
class _Held:
    value: Any


def _missing(name: str, names: list[str]) -> MissingComponent:
    """`model/a` is missing: name the models that are there."""
    kind, _, rest = name.partition("/")
    if not rest:
        return MissingComponent("component", name, names)
    known = {n.split("/")[1] for n in names if n.startswith(kind + "/")}
    return MissingComponent(kind, rest.split("/")[0], known)


# --- Ray --------------------------------------------------------------------------------------------------------------


class _Host:
    """The Ray actor around a worker. Its own loop is Ray's; the worker's coroutines run on the io loop."""

    def __init__(self, info: SessionInfo, name: str, made: bytes | list[Any]):
        _enter(info, name)
        self._made: Future[Hosted] = Future()
        # In a thread: this process answers as soon as it is there, however long its worker takes to be made.
        threading.Thread(target=self._make, args=(name, made), daemon=True).start()

    def _make(self, name: str, made: bytes | list[Any]) -> None:
        import ray

        try:  # only now: the user's modules are found on the session's path
            cls, args, kwargs = ray.cloudpickle.loads(made) if isinstance(made, bytes) else ray.get(made[0])
        except BaseException as e:
            hosted = Hosted(name, _Unmade, (e,), {})
        else:
            hosted = Hosted(name, cls, args, kwargs)
        self._made.set_result(hosted)

    async def pid(self) -> int:
        return os.getpid()

    async def ready(self) -> Failure | None:
        return (await asyncio.wrap_future(self._made)).failure

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        hosted = self._made.result() if self._made.done() else await asyncio.wrap_future(self._made)
        if hosted.failure is not None:
            return False, hosted.failure
        try:
            result = hosted.call(method, args, kwargs)
            if inspect.isawaitable(result):
                result = await asyncio.wrap_future(io.submit(_awaited(result)))
            return True, result
        except BaseException as e:
            return False, _fail(e, hosted.where)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._made.result().close()
        session().end()


class _Unmade:
    """In place of a worker whose class or arguments could not be read."""

    def __init__(self, error: BaseException):
        raise error


async def _awaited(result: Any) -> Any:
    return await result


class RayMember:
    """A worker in another process."""

    def __init__(self, name: str, actor: Any = None):
        self.name, self._actor = name, actor

    def __reduce__(self) -> tuple[Any, ...]:
        return RayMember, (self.name,)  # whoever gets it finds the actor when it is needed

    def _find(self) -> Any:
        if self._actor is None:
            import ray

            if not ray.is_initialized():
                raise Unreachable(f"{self.name} cannot be asked: the session has ended")
            try:
                self._actor = ray.get_actor(self.name, session().namespace)
            except ValueError:
                raise _missing(self.name, session().cluster.names()) from None
        return self._actor

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, again: bool = False, **kwargs: Any
    ) -> Promise:
        promise = Promise()
        promise.set_running_or_notify_cancel()
        loop = io.loop()
        end = time.monotonic() + timeout
        lock = threading.Lock()  # two threads may be about to answer

        def settle(result: Any = None, error: BaseException | None = None) -> None:
            with lock:
                if promise.done():
                    return
                if error is None:
                    promise.set_result(result)
                else:
                    promise.set_exception(error)

        def ask() -> None:
            if promise.done():
                return
            try:
                self._find().call.remote(method, args, kwargs).future().add_done_callback(answered)
            except BaseException as e:
                failed(e)

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                failed(error)
                return
            fine, result = future.result()
            settle(result) if fine else settle(error=_raise(result))

        def failed(error: BaseException) -> None:
            import ray

            gone = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)  # the latter: with its node
            if not isinstance(error, (*gone, MissingComponent)):
                settle(error=error)
                return
            self._actor = None
            if again and time.monotonic() + _ASK_AGAIN < end:
                loop.call_soon_threadsafe(loop.call_later, _ASK_AGAIN, ask)
            elif isinstance(error, MissingComponent):
                settle(error=error)
            else:
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                settle(error=Unreachable(f"{self.name} did not answer {method}: {why}"))

        def late() -> None:
            settle(error=Unreachable(f"{self.name} did not answer {method} in {timeout:g} s"))

        def set_timer() -> None:
            timer = loop.call_later(timeout, late)
            promise.add_done_callback(lambda _: loop.call_soon_threadsafe(timer.cancel))

        loop.call_soon_threadsafe(set_timer)
        ask()
        return promise

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            self._find().call.remote(method, args, kwargs)
        except MissingComponent:
            logger.warning("%s is not there and was not told %s", self.name, method)


class RayCluster:
    kind = "ray"

    def __init__(self, info: SessionInfo, connected: bool):
        self._info = info
        self._connected = connected  # by `init`, which then ends it
        self._kept: dict[str, Any] = {}  # constructor arguments: a restart needs them

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        restarts: bool = True,
        **kwargs: Any,
    ) -> Member:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if name in self.names():
            raise ConfigError(f"{name} is there already: choose another name, or stop that one first")
        self._check_feasible(name, cpus, gpus, memory, node)
        made: Any = ray.cloudpickle.dumps((cls, args, kwargs))
        if len(made) > _INLINE:
            made = [ray.put((cls, args, kwargs))]
        options: dict[str, Any] = {
            "name": name,
            "namespace": self._info.namespace,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": -1 if restarts else 0,
            "max_task_retries": 0,
            "max_concurrency": 10_000,
        }
        if memory:
            options["memory"] = int(memory * 2**20)
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            actor = ray.remote(_Host).options(**options).remote(self._info, name, made)
        except ValueError as e:  # taken meanwhile
            raise ConfigError(f"{name} is there already ({e})") from None
        self._kept[name] = (made, actor)
        self._wait_ready(name, actor, cpus, gpus, memory)
        return RayMember(name, actor)

    def _wait_ready(self, name: str, actor: Any, cpus: float, gpus: float, memory: float) -> None:
        import ray

        asked = time.monotonic()
        placed, ready = actor.pid.remote(), actor.ready.remote()
        while not ray.wait([ready], timeout=1.0)[0]:
            waited = time.monotonic() - asked
            if waited > _BUSY_TIMEOUT and not ray.wait([placed], timeout=0)[0]:
                free = ray.available_resources()
                self.stop(name)
                raise ResourceError(
                    f"{name} asks for {_amount(cpus, gpus, memory)}, and others hold what there is: free are "
                    f"{_amount(free.get('CPU', 0.0), free.get('GPU', 0.0), free.get('memory', 0.0) / 2**20)} of "
                    f"{_all(self.nodes())}. Ask for less, stop something, or add a node."
                )
            if waited > START_TIMEOUT:
                self.stop(name)
                raise Unreachable(f"{name} was not ready after {START_TIMEOUT:g} s and was stopped; Ray's logs say why")
        try:
            failure = ray.get(ready)
        except ray.exceptions.RayError as e:
            self.stop(name)
            raise Unreachable(f"{name} died while it started: {e}") from None
        if failure is not None:
            self.stop(name)
            raise _raise(failure)

    def _check_feasible(self, name: str, cpus: float, gpus: float, memory: float, node: str | None) -> None:
        import ray

        alive = [n for n in ray.nodes() if n["Alive"]]
        if node is not None:
            alive = [n for n in alive if n["NodeID"] == node]
            if not alive:
                raise ResourceError(f"{name} is to run on node {node[:12]}, which is not there (any more)")
        want = {"CPU": cpus, "GPU": gpus, "memory": memory * 2**20}
        if any(all(n["Resources"].get(k, 0.0) >= v for k, v in want.items()) for n in alive):
            return
        raise ResourceError(
            f"{name} asks for {_amount(cpus, gpus, memory)} on one node, and no node has that: there are {_all(self.nodes())}. "
            "Ask for less (cpus_per_worker, gpus_per_worker, memory_per_worker), or add a larger node."
        )

    def check_group(self, name: str, count: int, cpus: float, gpus: float) -> None:
        """Refuse `count` processes that would not fit if the cluster were empty."""
        nodes = self.nodes()
        room = sum(min(int(n.cpus / cpus) if cpus else count, int(n.gpus / gpus) if gpus else count) for n in nodes)
        if room < count:
            raise ResourceError(
                f"{name} asks for {count} x {_amount(cpus, gpus, 0)}, and there is room for {room}: there are {_all(nodes)}. "
                "Ask for less (num_workers, cpus_per_worker, use_gpu), or add a node."
            )

    def wait_group(self, name: str, count: int, cpus: float, gpus: float) -> None:
        """Wait a while until others leave room for `count` processes."""
        import ray

        end = time.monotonic() + _BUSY_TIMEOUT
        while True:
            free = ray.available_resources()
            if free.get("CPU", 0.0) >= count * cpus and free.get("GPU", 0.0) >= count * gpus:
                return
            if time.monotonic() > end:
                raise ResourceError(
                    f"{name} asks for {count} x {_amount(cpus, gpus, 0)}, and others hold what there is: free are "
                    f"{_amount(free.get('CPU', 0.0), free.get('GPU', 0.0), 0)} of {_all(self.nodes())}. "
                    "Ask for less, stop something, or add a node."
                )
            time.sleep(0.5)

    def find(self, name: str) -> Member:
        member = RayMember(name)
        member._find()
        return member

    def names(self, prefix: str = "") -> list[str]:
        import ray

        rows = ray.util.list_named_actors(all_namespaces=True)
        mine = (r["name"] for r in rows if r["namespace"] == self._info.namespace)
        return sorted(n for n in mine if n.startswith(prefix))

    def pid(self, name: str) -> int:
        import ray

        member = RayMember(name)
        try:
            return ray.get(member._find().pid.remote(), timeout=CALL_TIMEOUT)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as e:
            raise Unreachable(f"{name} does not answer: {type(e).__name__}") from None

    def stop(self, name: str) -> None:
        import ray

        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name, self._info.namespace)
            with contextlib.suppress(Exception):  # it may hang or be dead: it is killed all the same
                ray.get(actor.close.remote(), timeout=_CLOSE_TIMEOUT)
            ray.kill(actor)
        # Not before: Ray kills an actor of which nobody has a handle, and it could not close.
        self._kept.pop(name, None)

    def nodes(self) -> list[Node]:
        return _ray_nodes()

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def get(self, ref: Any) -> Any:
        import ray

        return ray.get(ref)

    def host(self) -> str:
        import ray

        return "127.0.0.1" if self._info.one_machine else ray.util.get_node_ip_address()

    def close(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        try:
            there = set(self.names())
            for name in reversed([n for n in self._kept if n in there]):  # the master, who came first, goes last
                with contextlib.suppress(Exception):
                    self.stop(name)
        except Exception as e:  # Ray is going down by itself: what could be saved is saved
            logger.warning("Ray ended before the session did: %s", e)
        if self._connected:
            ray.shutdown()


def _amount(cpus: float, gpus: float, memory: float) -> str:
    parts = [f"{cpus:g} CPUs"] if cpus or not (gpus or memory) else []
    parts += [f"{gpus:g} GPUs"] if gpus else []
    parts += [f"{memory:.0f} MB"] if memory else []
    return ", ".join(parts)


def _all(nodes: list[Node]) -> str:
    return "; ".join(f"node {n.host}: {_amount(n.cpus, n.gpus, 0)}" for n in nodes) or "no nodes"


# --- the session ------------------------------------------------------------------------------------------------------


class SessionInfo(NamedTuple):
    """What a process needs to know to take part in a session."""

    project: str
    trial: str
    path: str
    namespace: str
    token: bytes
    one_machine: bool
    modules: tuple[str, ...]
    """Where the process that called `init` finds its modules."""
    numbers: str = ""
    """The folder for rows, TensorBoard's events and the log; '' = the run directory itself."""


@dataclass
class Session:
    """A project's trial at work: its run directory and its cluster."""

    info: SessionInfo
    cluster: Cluster
    member: str = ""
    """The member that this process runs; '' in the process that called `init`."""
    run: RunDir | None = None
    watched: list[tuple[str, Promise]] = field(default_factory=list)
    """(what, its end): what `run_until_asked_to_stop` waits for."""
    stops: list[Callable[[], None]] = field(default_factory=list)
    """Called first at the end, the newest first: they stop what makes work for others, games and trainers."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called after them, the newest first."""
    _log: logging.Handler | None = None

    @property
    def project(self) -> str:
        return self.info.project

    @property
    def trial(self) -> str:
        return self.info.trial

    @property
    def path(self) -> Path:
        return Path(self.info.path)

    @property
    def numbers(self) -> Path:
        """Where the session's rows, TensorBoard's events and log go."""
        return Path(self.info.numbers or self.info.path)

    @property
    def writes_to(self) -> Path:
        """Where it may write what is no number: the run directory, or its own folder of one that another session trains in."""
        return self.path if self.run is None else self.run.path

    @property
    def namespace(self) -> str:
        return self.info.namespace

    @property
    def token(self) -> bytes:
        return self.info.token

    def end(self) -> None:
        """Stop what runs, then close what it used."""
        for close in (*reversed(self.stops), *reversed(self.closers)):
            try:
                close()
            except Exception:
                logger.exception("%s did not end well", self.member or "the session")

    def watch(self, what: str, end: Promise) -> None:
        """An error of this reaches `run_until_asked_to_stop`."""
        self.watched.append((what, end))

    async def connect(
        self, address: wire.Address, handle: Any = None, lost: Any = None, unix: bool = True
    ) -> wire.Link:
        """A link to a Listener of this session."""
        return await wire.connect(address, self.token, handle, lost, unix)

    async def listen(self, name: str, handle: wire.Handle, lost: Any = None) -> wire.Listener:
        """A Listener that the others of this session can reach."""
        listener = wire.Listener(handle, self.token, lost)
        await listener.start(name.replace("/", "-"), self.cluster.host())
        return listener


_session: Session | None = None


def session() -> Session:
    """The session of this process."""
    if _session is None:
        raise ConfigError(
            'there is no session in this process: call bray.init(project="./runs/game", trial="v0") first'
        )
    return _session


def init(
    project: str = "./runs/default",
    trial: str = "default",
    cluster: str = "ray",
    metrics_port: int = 0,
    numbers_in: str = "",
    shared: bool = False,
    **ray_kwargs: Any,
) -> Session:
    """Open the session of a project's trial; its run directory is `project/trial`. A trial that is there is continued.

    cluster     "ray": components are processes of a Ray cluster, the one that runs here (or at RAY_ADDRESS), else one that is started on
                this machine (RAY_ADDRESS=local always starts one); "local": they are objects of this process
    metrics_port  of the session's Prometheus page on this machine; 0 = any free one (bray.log says which)
    numbers_in    folder of the run directory for rows (result.jsonl, progress.csv), TensorBoard's events and bray.log, made where it is
                  missing; '' = the run directory itself
    shared        only `numbers_in` is written to: a session that serves may run while another one trains in the same run directory
    ray_kwargs    go to `ray.init`
    """
    global _session
    if _session is not None:
        if (_session.project, _session.trial, _session.cluster.kind) == (str(project), str(trial), cluster):
            return _session
        raise ConfigError(
            f"this process is in the session {_session.project}/{_session.trial} already: bray.shutdown() ends it"
        )
    if cluster not in ("ray", "local"):
        raise UnknownName("cluster", str(cluster), ("ray", "local"))
    if cluster == "local" and ray_kwargs:
        raise ConfigError(f"cluster='local' has no Ray to give these to: {', '.join(ray_kwargs)}")
    path = Path(os.path.abspath(Path(project) / trial))
    has_run = (path / "checkpoints").exists()
    if shared:
        (path / numbers_in).mkdir(parents=True, exist_ok=True)
        run = RunDir(path / numbers_in)
        run.lock("serving")
    else:
        run = RunDir.create(path, resume=has_run)
    try:
        namespace = f"bray:{path / numbers_in}"
        token = secrets.token_bytes(16)
        modules = tuple(os.path.abspath(p) for p in sys.path)
        numbers = str(path / numbers_in)
        info = SessionInfo(str(project), str(trial), str(path), namespace, token, True, modules, numbers)
        if cluster == "local":
            made: Cluster = LocalCluster()
        else:
            connected, started = _start_ray(namespace, ray_kwargs)
            info = info._replace(one_machine=started)
            made = RayCluster(info, connected)
        _session = Session(info, made, run=run, _log=log_to(Path(numbers) / "bray.log"))
    except BaseException:
        run.close()
        raise
    if has_run:
        logger.info("%s is there and goes on", path)
    try:
        from bray.remote.master.handle import start_master

        start_master(_session, metrics_port)
    except BaseException:
        shutdown()
        raise
    return _session


def _start_ray(namespace: str, kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Join the Ray that runs, or start one on this machine; whether we have connected to one, and whether it was started for us."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "cluster='ray' needs Ray, which is not installed: pip install 'bray[remote]', or use cluster='local'"
        ) from None
    if ray.is_initialized():
        return False, False
    hook: Any = import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = False  # the environment variable says it too late where Ray was imported before us
    kwargs = {"namespace": namespace, "logging_level": "warning", "log_to_driver": True, **kwargs}
    if kwargs.get("address") is None and os.environ.get("RAY_ADDRESS") == "local":
        kwargs["address"] = "local"
    if kwargs.get("address") is None:
        own = {k: v for k, v in kwargs.items() if k not in _OWN_ONLY}
        try:
            with _hold_sigterm():
                ray.init(**{**own, "address": "auto"})
            return True, False
        except ConnectionError:
            kwargs["address"] = "local"
    if kwargs["address"] != "local":
        with _hold_sigterm():
            ray.init(**kwargs)
        return True, False
    kwargs.setdefault("num_cpus", max(8, 4 * (os.cpu_count() or 1)))  # games wait more than they compute
    kwargs.setdefault("include_dashboard", False)
    with contextlib.suppress(KeyError):
        del os.environ["PYTHONDONTWRITEBYTECODE"]  # workers would compile all libraries anew, each
    with _hold_sigterm(), _own_process_groups():
        ray.init(**kwargs)
    return True, True


@contextlib.contextmanager
def _hold_sigterm() -> Iterator[None]:
    """Within: `ray.init`, which sets handlers of SIGTERM, in Python and in C++, that end this process without saving anything. A SIGTERM
    that comes meanwhile waits until the handler that was there before is back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Within: each process that Ray starts (raylet, GCS, ...) gets a process group of its own and blocks SIGTERM, and so do the workers that
    they start.

    `timeout 30 bray launch ...`, `kill -TERM -PGID` and a terminal that is closed signal the whole group of this process, systemd every
    process of the service. Ray's processes would end before trainers and models could save; they are to end when this process says so
    (`ray.shutdown`) or dies.
    """
    services: Any = import_module("ray._private.services")  # Ray has no public way to say it
    popen: Any = getattr(services, "ConsolePopen", None)
    if popen is None or sys.platform == "win32":
        logger.warning(
            "this version of Ray starts its processes in our process group: a signal to the group ends them before us"
        )
        yield
        return

    class OwnGroup(popen):
        def __init__(self, *args: Any, preexec_fn: Callable[[], None], **kwargs: Any):
            def prepare() -> None:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                preexec_fn()

            super().__init__(*args, **kwargs, preexec_fn=prepare, process_group=0)

        def terminate(self) -> None:
            """By `ray.shutdown`, when all members have ended: this process and those that it started, which are of its group."""
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    services.ConsolePopen = OwnGroup
    try:
        yield
    finally:
        services.ConsolePopen = popen


_OWN_ONLY = ("num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard", "_temp_dir")


def _enter(info: SessionInfo, member: str) -> None:
    """In a worker process: take part in the session."""
    global _session
    os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # a thread of ours waits, never Ray's loop
    # This process blocks SIGTERM (see _own_process_groups); its children must not, or `Process.terminate` would do nothing.
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
    sys.path.extend(p for p in info.modules if p not in sys.path)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("bray").setLevel(logging.INFO)
    _session = Session(info, RayCluster(info, False), member)
    _session._log = log_to(_session.numbers / "bray.log")


def shutdown() -> None:
    """End the session: all its components, and the Ray that it started."""
    global _session
    ending = _session
    if ending is None:
        return
    ending.end()
    ending.cluster.close()
    if ending.run is not None:
        ending.run.close()
    if ending._log is not None:
        ending._log.close()
    _session = None


atexit.register(shutdown)


def run_until_asked_to_stop(poll: Callable[[], bool] | None = None, every: float = 0.2) -> None:
    """Wait for Ctrl-C, SIGTERM or a terminal that is closed, then end the session. A trainer that fails ends it too, and its error is raised.

    poll  called about every `every` seconds; True ends the session
    """
    asked = threading.Event()
    old = {}
    if threading.current_thread() is threading.main_thread():
        old = {s: signal.signal(s, lambda *_: asked.set()) for s in _ENDING if signal.getsignal(s) != signal.SIG_IGN}
    try:
        while not asked.wait(every):
            for what, end in session().watched:
                if end.done() and (error := end.exception()) is not None:
                    error.add_note(f"{what} has failed, and the session ends")
                    raise error
            if poll is not None and poll():
                break
    finally:
        # A second Ctrl-C interrupts what follows. A second SIGTERM does not: `timeout` sends two, to the process and to its group.
        if signal.SIGINT in old:
            signal.signal(signal.SIGINT, old.pop(signal.SIGINT))
        try:
            shutdown()
        finally:
            for sig, handler in old.items():
                signal.signal(sig, handler)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ray_nodes() -> list[Node]:
    import ray

    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            "node:__internal_head__" in n["Resources"],
            n["Resources"].get("CPU", 0.0),
            n["Resources"].get("GPU", 0.0),
        )
        for n in ray.nodes()
        if n["Alive"]
    ]


def running_nodes() -> list[Node]:
    """The nodes of the Ray cluster that `init` would join; empty where none runs."""
    try:
        import ray
    except ImportError:
        return []
    if ray.is_initialized():
        return _ray_nodes()
    try:
        ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=False)
    except ConnectionError:
        return []
    try:
        return _ray_nodes()
    finally:
        ray.shutdown()
