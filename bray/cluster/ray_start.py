"""Joining the Ray that runs, or starting one on this machine, in a way that lets a session end well."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from bray.cluster.protocol import Node
from bray.errors import ConfigError, how_to_install

logger = logging.getLogger("bray.remote")

# Ray starts a cluster by itself when a thread that has outlived its session asks it for something.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

CONNECT_S = 5.0
"""How long an address may take to accept a connection."""
STARTS = 3
"""How often a Ray of our own is started, where the machine is too busy for it."""
_OWN_ONLY = ("num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard", "_temp_dir")


def start_ray(namespace: str, kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Join the Ray that runs, or start one; (whether this call connected us, whether it started that Ray)."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"cluster='ray' needs Ray, which is not installed. Use cluster='local', or {how_to_install('remote')}"
        ) from None
    hook: Any = import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = False  # the environment variable comes too late where Ray was imported before us
    if ray.is_initialized():
        _refuse_another(kwargs.get("address"), ray.get_runtime_context().gcs_address)
        return False, False
    kwargs = {"namespace": namespace, "logging_level": "warning", "log_to_driver": True, **kwargs}
    address = kwargs.get("address")
    kwargs["address"] = address or _running_address() or "local"
    with _hold_sigterm():
        if kwargs["address"] != "local":
            if address is None:
                kwargs = {k: v for k, v in kwargs.items() if k not in _OWN_ONLY}
            elif not _answers(address):
                raise ConfigError(
                    f"address={address}: nothing answers there; start Ray there (`ray start --head`), or leave it out "
                    "to start one here"
                )
            ray.init(**kwargs)
            return True, False
        kwargs.setdefault("num_cpus", max(8, 4 * (os.cpu_count() or 1)))  # games wait more than they compute
        kwargs.setdefault("include_dashboard", False)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each worker would compile all libraries again
        with _own_process_groups() as started, _on_loopback("_node_ip_address" not in kwargs):
            _start_here(ray, kwargs, started)
    return True, True


def _start_here(ray: Any, kwargs: dict[str, Any], started: list[Any]) -> None:
    """A Ray of our own. Its processes have half a minute by Ray's own rule, which a busy machine may take: they are
    started again. Ray forgets those that it had `started`, so we end them."""
    for left in reversed(range(STARTS)):
        try:
            ray.init(**kwargs)
            return
        except Exception as e:
            ray.shutdown()
            while started:
                process = started.pop()
                process.terminate()
                process.wait()
            if not left or "timed out during startup" not in str(e):
                raise
            logger.warning("Ray was not there after half a minute (is this machine busy?): it is started again")


def _running_address() -> str | None:
    """Where the Ray is that `RAY_ADDRESS` or Ray's own notes on this machine name; None where one is to be started.
    Asked by a plain connection first, because `ray.init` tries an address where nothing listens for minutes without a
    word."""
    if named := os.environ.get("RAY_ADDRESS"):
        if named != "local" and not _answers(named):
            raise ConfigError(
                f"RAY_ADDRESS={named}: nothing answers there; start Ray there (`ray start --head`), or unset "
                "RAY_ADDRESS to start one here"
            )
        return named
    services: Any = import_module("ray._private.services")
    try:
        noted: str = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None
    if _answers(noted):
        return noted
    logger.warning(
        "the Ray at %s, the last one noted on this machine, does not answer: a new one is started here", noted
    )
    return None


def _refuse_another(address: str | None, connected: str) -> None:
    """A process belongs to one Ray: an address of another one would be ignored."""
    if address is None or not _is_host_and_port(address) or _resolved(address) == _resolved(connected):
        return
    raise ConfigError(
        f"address={address}: this process is connected to the Ray at {connected} already; leave the address out, or "
        "call ray.shutdown() first"
    )


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return port.isdigit() and "/" not in host


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host.strip("[]"))
    return host, port


def _answers(address: str) -> bool:
    """Whether `host:port` accepts a connection. Other forms of address (`auto`, `ray://...`) are not checked here."""
    if not _is_host_and_port(address):
        return True
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _hold_sigterm() -> Iterator[None]:
    """Within: `ray.init`, which sets handlers of SIGTERM, in Python and in C++, that end this process without saving
    anything. A SIGTERM that arrives meanwhile waits until the previous handler is back."""
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
def _on_loopback(wanted: bool) -> Iterator[None]:
    """Within: the Ray that is started belongs to this machine alone, and all its processes listen on 127.0.0.1. Ray has
    this for systems on which it does not support clusters; `_node_ip_address="127.0.0.1"` it takes for the machine's
    address in the network."""
    constants: Any = import_module("ray._private.ray_constants")
    name, before = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    if not wanted or name in os.environ:
        yield
        return
    os.environ[name] = "0"  # for the processes that it starts
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        del os.environ[name]
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _own_process_groups() -> Iterator[list[Any]]:
    """Within: each process that Ray starts (raylet, GCS, ...) gets a process group of its own and blocks SIGTERM, and
    so do the workers that they start. Yields a list of them.

    `timeout 30 bray launch ...`, `kill -TERM -PGID` and a closed terminal signal the whole group of this process,
    systemd every process of the service. Ray's processes would end before trainers and models could save; they are to
    end when this process says so (`ray.shutdown`) or dies.
    """
    services: Any = import_module("ray._private.services")  # Ray has no public way to say it
    popen: Any = getattr(services, "ConsolePopen", None)
    if popen is None or sys.platform == "win32":
        logger.warning(
            "this version of Ray starts its processes in our process group: a signal to the group ends them before us"
        )
        yield []
        return

    started: list[Any] = []

    class OwnGroup(popen):
        def __init__(self, *args: Any, preexec_fn: Callable[[], None], **kwargs: Any):
            def prepare() -> None:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                preexec_fn()

            super().__init__(*args, **kwargs, preexec_fn=prepare, process_group=0)
            started.append(self)

        def terminate(self) -> None:
            """By `ray.shutdown`, when all members have ended: this process and those that it started, which are of its
            group."""
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    services.ConsolePopen = OwnGroup
    try:
        yield started
    finally:
        services.ConsolePopen = popen


def alive_nodes() -> list[Node]:
    import ray

    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            "node:__internal_head__" in n["Resources"],
            n["Resources"].get("CPU", 0.0),
            n["Resources"].get("GPU", 0.0),
            n["Resources"].get("memory", 0.0) / 2**20,
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
        return alive_nodes()
    address = _running_address()
    if address in (None, "local"):
        return []
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    try:
        return alive_nodes()
    finally:
        ray.shutdown()
