"""A task of a scheduler's job: which of how many it is, and a Ray cluster of all of them.

One task for each node. The first one starts a Ray there and runs the command, the others bring their nodes to it and
end with it. One task alone is the command and nothing else.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bray.errors import ConfigError

RANK, NODES, HEAD, PORT = "BRAY_RANK", "BRAY_NODES", "BRAY_HEAD", "BRAY_PORT"
"""What `bray submit` sets for tasks that have no SLURM to tell them."""
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""By which Ray knows who may run code on its nodes: all tasks of a job have the same."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_FIRST_PORT, _PORTS = 20_000, 10_000
_PATIENCE = 300.0  # seconds for the first task to be there; nodes of a cluster may start minutes apart
_LOOK_S = 3.0
_GONE = 5  # looks in a row without an answer


class JobTask(NamedTuple):
    """One task of a job, as the scheduler's variables say it."""

    rank: int
    size: int
    head: str
    """Address of the first one."""
    port: int

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"


def find_task(environ: Mapping[str, str]) -> JobTask:
    """Which one this is; one alone where no scheduler says anything."""
    if "SLURM_JOB_ID" in environ:
        job, of = environ["SLURM_JOB_ID"], "SLURM"
        names, hint = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"), "start it with srun"
        port = _FIRST_PORT + int(job) % _PORTS  # jobs that share a node have one each
    elif any(name in environ for name in (RANK, NODES, HEAD)):
        of, names, hint, port = "a job", (RANK, NODES, HEAD), "start it as `bray submit` writes it", _FIRST_PORT
    else:
        return JobTask(0, 1, "127.0.0.1", _FIRST_PORT)
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigError(f"this is a task of {of}, and {', '.join(missing)} is not set: {hint}")
    rank, size = (_whole(name, environ[name]) for name in names[:2])
    if not 0 <= rank < size:
        raise ConfigError(f"{names[0]}={rank} is not among the {size} tasks of {names[1]}")
    return JobTask(rank, size, first_host(environ[names[2]]), _whole(PORT, environ.get(PORT, str(port))))


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}: expected a whole number, got {text!r}")
    return int(text)


def first_host(nodes: str) -> str:
    """`node07` of `node[07-09,12],login`, as SLURM writes lists of nodes."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def run_task(task: JobTask, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command in the first task, and a node for it in the others; returns the exit code."""
    if task.size == 1:
        return subprocess.call(command, env=dict(environ))
    if task.rank:
        return _join(task)
    task = task._replace(head=own_address())  # its name may be 127.0.1.1 here
    if _answers(task):
        raise ConfigError(f"port {task.port} of {task.head} is taken: set {PORT} for all tasks of the job")
    with _Node(["--head", "--include-dashboard=false", f"--node-ip-address={task.head}", f"--port={task.port}"]):
        _await(task)
        return subprocess.call(command, env={**environ, "RAY_ADDRESS": task.address})


def own_address() -> str:
    """Of this machine, as others reach it. Nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:  # no network at all
            return "127.0.0.1"
        return str(asking.getsockname()[0])


def _join(task: JobTask) -> int:
    """Bring this node to the first one's Ray, until that is gone."""
    _await(task)
    with _Node([f"--address={socket.gethostbyname(task.head)}:{task.port}"]) as node:
        unanswered = 0
        while unanswered < _GONE:
            if (code := node.process.poll()) is not None:
                return code
            time.sleep(_LOOK_S)
            unanswered = 0 if _answers(task) else unanswered + 1
    return 0


class _Node:
    """`ray start --block`, ended with the block."""

    def __init__(self, words: Sequence[str]):
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        command = [*_RAY, "start", "--block", "--disable-usage-stats", *words]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)

    def __enter__(self) -> _Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _await(task: JobTask) -> None:
    end = time.monotonic() + _PATIENCE
    while not _answers(task):
        if time.monotonic() > end:
            raise ConfigError(
                f"nothing answers at {task.address} after {_PATIENCE:g} s: the first task of the job did not start Ray"
            )
        time.sleep(1.0)


def _answers(task: JobTask) -> bool:
    try:
        socket.create_connection((task.head, task.port), 5.0).close()
    except OSError:
        return False
    return True
