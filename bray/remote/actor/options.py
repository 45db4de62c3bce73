"""The options of a RemoteActor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bray.config.declare import Amount, Count, Port, Positive, Whole
from bray.serving.config import AccessConfig


@dataclass(frozen=True, kw_only=True)
class ActorOptions(AccessConfig):
    """What a RemoteActor can be told, in Python and in launch files."""

    port: Port = 8000
    """Port that games call; 0 = any free one. The port after it has metrics and health."""
    num_workers: Count = 2
    """Processes on each node."""
    actors_per_worker: Count = 10
    """Sessions that one process holds at once."""
    cpus_per_worker: Amount = 1.0
    """CPUs of each process."""
    memory_per_worker: Whole = 512
    """Memory of each process, in MB."""
    use_tcp: bool = False
    """Answer framed TCP too, on the same port."""
    use_gateway: Literal["node", "head"] | None = "node"
    """`node`: any process of a node takes a session's requests; `head`: one address for all nodes; `null`: a session keeps to its connection."""
    tick_timeout_s: Positive = 30.0
    """A tick that takes longer is cancelled, and answered with an error or the `fallback`."""
