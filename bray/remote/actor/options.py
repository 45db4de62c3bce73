"""The options of a RemoteActor."""

from __future__ import annotations

from dataclasses import dataclass

from bray.config.declare import Amount, Count, Whole
from bray.serving.config import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class ActorOptions(ServiceSettings):
    """What a RemoteActor can be told, in Python and in launch files."""

    host: str | None = None
    """Address to listen on; `null` = this machine alone where the cluster is this machine, else every network."""
    num_workers: Count = 2
    """Processes on each node."""
    actors_per_worker: Count = 10
    """Sessions that one process holds at once."""
    cpus_per_worker: Amount = 1.0
    """CPUs of each process."""
    memory_per_worker: Whole = 512
    """Memory of each process, in MB."""
