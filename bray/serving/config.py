"""What a game service can be told: where it listens (`service`), who may reach it, and what answers (`model`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bray.config.declare import Amount, Count, Flag, Name, Port, Positive, Secret, Whole
from bray.errors import ConfigError


def parse_versions(items: Sequence[str]) -> dict[str, float]:
    """`latest=0.9 best=0.1`, or one label alone."""
    out = {}
    for item in items:
        label, _, share = item.partition("=")
        try:
            out[label] = float(share or 1.0)
        except ValueError:
            raise ConfigError(f"--version: expected LABEL=SHARE, like latest=0.9, got {item!r}") from None
    return out


def parse_fallback(text: str) -> Any:
    if text in ("last", "random"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"--fallback: expected last, random or an action as JSON, got {text!r}") from None


_VERSION = Flag(
    "--version",
    "LABEL[=SHARE]",
    parse=parse_versions,
    help="latest (if nothing is given), best or a step; several share the sessions.",
)


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Who may reach a game service, and how much of it one client may take. See docs/security.md."""

    tls_cert: Annotated[str | None, Flag(metavar="FILE")] = None
    """Certificate with its chain (PEM): games connect with TLS, and only with TLS. A renewed file is used without a
    restart."""
    tls_key: Annotated[str | None, Flag(metavar="FILE")] = None
    """Private key of `tls_cert` (PEM); null = it is in the same file."""
    token_file: Annotated[str | None, Flag(metavar="FILE")] = None
    """File with tokens, one per line; a request must carry one of them. It is read again when it changes, so that
    tokens can be rotated."""
    session_secrets: Annotated[bool, Flag()] = False
    """The reply to a `start` has a `session_secret` header, and every tick and end of that session must carry it. HTTP
    only."""
    max_connections_per_address: Count | None = None
    """Connections of one client address; more are answered with 429. null = no limit."""
    max_sessions_per_address: Count | None = None
    """Sessions of one client address at once; more are refused with 429. null = no limit."""
    max_requests_per_address: Positive | None = None
    """Requests per second of one client address at one worker, after a burst of as many; more are refused with 429.
    null = no limit."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks (10.0.0.0/8) of proxies: their X-Forwarded-For says who the client is. Nobody else's is
    read."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port: this machine alone unless told otherwise. Other machines may read probes and metrics;
    the rest needs the admin token."""
    admin_names: tuple[str, ...] = ()
    """Host names by which the admin port is called, beside localhost, addresses and this machine's name; other names
    are refused."""
    admin_token_file: Annotated[str | None, Flag(metavar="FILE")] = None
    """File with admin tokens, one per line: a change at the admin port must carry one. Without an admin token nothing
    can be changed there."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(AccessConfig):
    """What every game service can be told, however it is started: `bray serve`, `bray.RemoteActor`, a launch file."""

    port: Annotated[Port, Flag()] = 8000
    """Port of the games; 0 = any free one."""
    admin_port: Annotated[Port | None, Flag()] = None
    """Port of /healthz, /readyz, /metrics and /version; null = the port after the games', 0 = any free one."""
    use_tcp: Annotated[bool, Flag("--tcp")] = False
    """Answer framed TCP too, on the same port. The first byte of a connection tells the two apart."""
    use_gateway: Literal["node", "head"] | None = "node"
    """node = a request that reaches another worker of the machine is forwarded to its session's owner; head = one entry
    forwards to the owners on all machines of a cluster (`bray.RemoteActor` only); null = clients must keep to one
    connection."""
    tick_timeout_s: Annotated[Positive, Flag("--tick-timeout", "SECONDS")] = 30.0
    """A tick that takes longer is cancelled and answered with 504, or with the Actor's `fallback`."""
    idle_timeout_s: Positive = 600.0
    """A session without a request for this long is ended, and its slot is free again."""
    disconnect_timeout_s: Positive | None = None
    """A session whose client's connection has closed is ended if no other request of it comes for this long: slots of
    games that crashed are free sooner. For games that keep their connection and connect directly, not through a proxy;
    null = `idle_timeout_s` alone counts."""
    request_timeout_s: Positive = 30.0
    """A client may take this long to send a request, or to read a reply; then its connection is closed."""
    keep_alive_s: Positive = 300.0
    """A connection without a request for this long is closed."""
    drain_timeout_s: Amount = 10.0
    """After SIGTERM running sessions may go on for this long; new ones are refused."""
    first_request_s: Positive = 30.0
    """A new connection that sends nothing for this long is closed."""
    max_body: Count = 16 << 20
    """Bytes of a request's body. A served policy takes no more than its spaces could need."""
    max_bodies: Count = 256 << 20
    """Bytes of all bodies that one worker holds, arriving or being answered; more are refused with 503."""
    max_header: Count = 16 << 10
    """Bytes of a request's headers."""
    max_connections: Count = 10_000
    """Connections of one worker."""
    max_pending: Count = 1024
    """Requests of one worker that are being answered or wait for their turn; more are refused with 503."""
    max_pending_per_session: Count = 64
    """Requests of one session that wait for their turn; more are refused with 503."""
    tokens: Annotated[
        tuple[str, ...],
        Flag("--token", "T", help="The old way to say --token-file: other users of this machine see it."),
        Secret(),
    ] = ()
    """When given, a request must carry one of these in its `token`. On a command line other users can see them: use
    `token_file` or BRAY_TOKEN."""
    admin_tokens: Annotated[tuple[str, ...], Secret()] = ()
    """As `admin_token_file`, for Python; on a command line use the file or BRAY_ADMIN_TOKEN."""
    blocked_after_s: Positive = 0.5
    """An Actor that keeps the event loop for this long is named in the log."""

    def __post_init__(self) -> None:
        if self.session_secrets and self.use_tcp:
            raise ConfigError(
                "session_secrets are HTTP headers, and framed TCP has no place for them: leave out use_tcp (--tcp) or "
                "session_secrets"
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("tls_key without tls_cert: give the certificate too (--tls-cert FILE)")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ServiceSettings):
    """Where a game service listens, who may reach it, and its limits."""

    host: Annotated[str, Flag(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = every network of this machine."""
    workers: Annotated[Count, Flag()] = 1
    """Processes that share the port."""
    actors_per_worker: Annotated[Count, Flag("--sessions")] = 1000
    """Sessions that one worker holds at once; more are refused with 429."""
    stopped_after_s: Positive = 5.0
    """One of several workers that is stopped (SIGSTOP) for this long is killed and replaced; its sessions are lost."""
    busy_after_s: Positive = 60.0
    """The same for a worker whose event loop stands still for this long in an Actor's code."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How the ticks of a policy are answered, wherever it plays: `bray serve`, `bray train --live`, a launch file."""

    check_obs: Annotated[Literal["off", "count", "refuse"], Flag()] = "count"
    """Observations outside the bounds of their space: count = they are answered, counted (`bray_model_outside_total`)
    and logged once a minute; refuse = 400; off = nobody looks."""
    fallback: Annotated[Any, Flag(metavar="ACTION", parse=parse_fallback)] = None
    """The action sent when a tick's deadline passes: an action as JSON, "last" (the session's last one) or "random";
    null = an error."""
    max_wait_s: Amount = 0.0
    """Seconds that an idle model waits for a fuller batch."""
    max_queue: Count = 4096
    """Ticks that may wait for a model."""
    max_json: Count = 1 << 20
    """Bytes of an array that is written as JSON numbers; more is refused with 413. Arrays in base64 have `max_body`
    alone."""


@dataclass(frozen=True, kw_only=True)
class LearnConfig(AnswerConfig):
    """How ticks are answered that are learnt from: `bray train --live`, and actors of a launch file that trains. One
    game's numbers must not spoil what is learnt from all."""

    reward_range: Annotated[Positive, Flag(metavar="SIZE")] = 1e6
    """A reward beyond this size, up or down, is refused with 400. Who knows the rewards of the games says it: the
    closer, the less can a stranger do."""
    obs_range: Annotated[Positive, Flag(metavar="SIZE")] = 1e9
    """An observation with a number beyond this size is refused with 400; closer bounds of a space are for
    `check_obs`."""


@dataclass(frozen=True, kw_only=True)
class DeployConfig(AnswerConfig):
    """What a policy can be told besides where it plays from the files of a run."""

    record: Annotated[Name | None, Flag(metavar="DIR")] = None
    """Directory for recordings of every session, for `bray replay`; null = none."""
    threads: Count = 1
    """Threads of one forward."""


@dataclass(frozen=True)
class ServedModelConfig(DeployConfig):
    """What the models of a service can be told."""

    engine: Annotated[Literal["onnx", "int8", "torch"], Flag()] = "onnx"
    """What executes a model: onnx = ONNX Runtime, int8 = its quantized file (`bray export --quantize`), torch =
    PyTorch."""
    # not {"latest": 1}: what is given is merged into a default
    versions: Annotated[dict[str, float], _VERSION] = field(default_factory=dict)
    """Checkpoints and their shares of the sessions: {latest: 0.9, best: 0.1}; a number is a step; empty = latest
    alone."""
    act: Annotated[Literal["greedy", "sample"], Flag()] = "greedy"
    """How actions are chosen: greedy = the best one, sample = drawn as in training."""
    simulations: Annotated[Whole | None, Flag()] = None
    """Steps of the search for each tick, where the policy searches (AlphaZero; engine: torch); 0 = its network alone,
    null = as in training."""
    target_return: Annotated[float | None, Flag()] = None
    """The return that sessions play for, of a policy that is asked for one (DT); a session's start may say another,
    {"target_return": 200}; null = as in training."""
    follow: Annotated[bool, Flag()] = False
    """Go on to new checkpoints of a training that is running."""
    follow_every_s: Positive = 1.0
    """Seconds between two looks at a followed run."""
    trust: Annotated[bool, Flag()] = False
    """Import what the run directory names (a model or an algorithm that is not part of Bray), where it has no
    graph.onnx or the engine is torch."""
    max_batch_size: Count = 32
    """Rows of one forward."""
