"""What a game service can be told: where it listens (`service`), and what answers (`model`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class ServiceConfig:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = every network of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the games; 0 = any free one."""
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /healthz, /readyz, /metrics and /version; null = the port after the games', 0 = any free one."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port: this machine alone unless told otherwise."""
    use_tcp: bool = False
    """Answer framed TCP too, on the same port: the first byte of a connection tells the two apart."""
    workers: Count = 1
    """Processes that share the port."""
    actors_per_worker: Count = 10
    """Sessions that one worker holds at once; more are refused with 429."""
    use_gateway: Literal["node", "head"] | None = "node"
    """node = a request that reaches another worker of the machine is forwarded to its session's owner; head = one entry forwards to the
    owners on all machines of a cluster (`bray.RemoteActor` only); null = clients must keep to one connection."""
    tick_timeout_s: Seconds = 30.0
    """A tick that takes longer is cancelled and answered with 504, or with the Actor's `fallback`."""
    idle_timeout_s: Seconds = 600.0
    """A session without a request for this long is ended."""
    request_timeout_s: Seconds = 30.0
    """A client may take this long to send a request, or to read a reply; then its connection is closed."""
    keep_alive_s: Seconds = 300.0
    """A connection without a request for this long is closed."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 10.0
    """After SIGTERM running sessions may go on for this long; new ones are refused."""
    max_body: Count = 16 << 20
    """Bytes of a request's body."""
    max_header: Count = 16 << 10
    """Bytes of a request's headers."""
    max_connections: Count = 10_000
    """Connections of one worker."""
    max_pending: Count = 1024
    """Requests of one worker that are being answered or wait for their turn; more are refused with 503."""
    max_pending_per_session: Count = 64
    """Requests of one session that wait for their turn; more are refused with 503."""
    tokens: tuple[str, ...] = ()
    """When given, a request must carry one of these in its `token`."""
    blocked_after_s: Seconds = 0.5
    """An Actor that keeps the event loop for this long is named in the log."""


@dataclass(frozen=True)
class ModelService:
    """What the models of a service can be told."""

    engine: Literal["onnx", "int8", "torch"] = "onnx"
    """What executes a model: onnx = ONNX Runtime, int8 = its quantized file (`bray export --quantize`), torch = PyTorch."""
    versions: dict[str, float] = field(
        default_factory=dict
    )  # not {"latest": 1}: what is given is merged into a default
    """Checkpoints and their shares of the sessions: {latest: 0.9, best: 0.1}; a number is a step; empty = latest alone."""
    act: Literal["greedy", "sample"] = "greedy"
    """How actions are chosen: greedy = the best one, sample = drawn as in training."""
    follow: bool = False
    """Go on to new checkpoints of a training that is running."""
    follow_every_s: Annotated[float, Field(gt=0)] = 1.0
    """How often a followed run is looked at."""
    fallback: Any = None
    """The action sent when a tick's deadline passes: an action as JSON, "last" (the session's last one) or "random"; null = an error."""
    record: str | None = None
    """Directory for recordings of every session; null = none."""
    max_batch_size: Annotated[int, Field(gt=0)] = 32
    """Rows of one forward."""
    max_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an idle model waits for a fuller batch."""
    max_queue: Annotated[int, Field(gt=0)] = 4096
    """Ticks that may wait for a model."""
    threads: Annotated[int, Field(gt=0)] = 1
    """Threads of one forward."""
