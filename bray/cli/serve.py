"""`bray serve`, `bray replay` and `bray gateway`: a trained policy answers games. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from bray.cli.show import facts, log_shown, make_console, plain_table, say
from bray.config import Source, parse_assignments
from bray.errors import ConfigError, DataError
from bray.service import SECTIONS, Service, configure, name_runs, serve as serve_runs
from bray.serving.config import ModelService, ServiceConfig
from bray.serving.protocol import TICK
from bray.serving.record import read_recording

_KEYS = {f.name for section in SECTIONS.values() for f in fields(section)} | {"sample"}  # the name of `act` in 0.1


def _torch_engine(path: Path, step: int) -> tuple[Any, Any]:
    from bray.experiment import torch_engine  # only when it is asked for

    return torch_engine(path, step)


@log_shown("info")
def serve(words: Sequence[str], flags: dict[str, Any]) -> int:
    """Serve until a signal; returns the exit code."""
    runs, service, model = settings(words, flags)
    logging.captureWarnings(True)
    console = make_console()

    def ready(port: int, admin_port: int) -> None:
        rows = [(name, str(path)) for name, path in runs.items()]
        facts(
            console, [*rows, ("admin", f"http://{service.admin_host}:{admin_port}/metrics  /models  /healthz  /readyz")]
        )
        kinds = "HTTP and TCP" if service.use_tcp else "HTTP"
        slots = service.workers * service.actors_per_worker
        token = " --token TOKEN" if service.tokens else ""  # not the secret itself: this goes into logs
        say(console, f"serving {kinds} on {service.host}:{port}, {slots} sessions at once; Ctrl-C ends it", "bold")
        say(
            console,
            f"try: bray fake gamecore --port {port} --run {next(iter(runs.values()))} --sessions 8 --seconds 5{token}",
            "dim",
        )

    return serve_runs(runs, service, model, _torch_engine, ready)


def settings(words: Sequence[str], flags: dict[str, Any]) -> tuple[dict[str, Path], ServiceConfig, ModelService]:
    """Run directories and KEY=VALUE, as they were typed, and the flags that were given."""
    keys = [w for w in words if _is_key(w)]
    runs = [w for w in words if w not in keys]
    if not runs:
        raise ConfigError("expected a run directory, as `bray train` names it: bray serve RUN_DIR")
    given: dict[str, Any] = {"service": {}, "model": {}}
    for name, value in flags.items():
        if value is not None:
            given["service" if name in {f.name for f in fields(ServiceConfig)} else "model"][name] = value
    return name_runs(runs), *configure([Source("command line", given), parse_assignments(keys)])


def _is_key(word: str) -> bool:
    """KEY=VALUE, also a misspelt one, and not NAME=RUN_DIR."""
    name, equals, value = word.partition("=")
    if not equals or Path(value).is_dir():
        return False
    section, _, key = name.rpartition(".")
    return section in SECTIONS or key in _KEYS or bool(difflib.get_close_matches(key, _KEYS, 1, 0.75))


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
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        raise ConfigError(f"--fallback: expected last, random or an action as JSON, got {text!r}") from None


# --- replay ---------------------------------------------------------------------------------------------------------------


@log_shown()
def replay(files: Sequence[Path], against: str, run: Path | None, engine: str, show: int) -> int:
    """Play recorded sessions again and compare the actions, tick by tick."""
    console = make_console()
    table = plain_table("recording", ">ticks", ">same action", "version then", "version now")
    differences: list[tuple[str, int, Any, Any]] = []
    total = same = 0
    config = ModelService(engine=engine, versions={against: 1.0})  # type: ignore[arg-type]
    for file, about, pairs in asyncio.run(_all_again(files, run, config)):
        for i, (then, now) in enumerate(pairs):
            if then != now:
                differences.append((file.name, i, then, now))
        agreed = sum(then == now for then, now in pairs)
        total, same = total + len(pairs), same + agreed
        share = f"{100 * agreed / len(pairs):.1f} %" if pairs else "–"
        table.add_row(file.name, f"{len(pairs):,}", share, str(about.get("version")), against)
    console.print(table)
    for name, i, then, now in differences[:show]:
        say(console, f"{name} tick {i}: {then} then, {now} now", "dim")
    if len(differences) > show:
        say(console, f"... {len(differences) - show:,} more (--show N)", "dim")
    say(console, f"{same:,} of {total:,} actions are the same" if total else "no ticks were recorded", "bold")
    return 0


Pairs = list[tuple[Any, Any]]
"""The action of each tick: then, now."""


async def _all_again(
    files: Sequence[Path], run: Path | None, config: ModelService
) -> list[tuple[Path, dict[str, Any], Pairs]]:
    """Every recording against its run (or another one); a run is loaded once."""
    services: dict[Path, Service] = {}
    out = []
    try:
        for file in files:
            about, steps = read_recording(file)
            path = run or Path(str(about.get("run")))
            if path not in services:
                services[path] = Service({str(about.get("model")): path}, config, torch_engine=_torch_engine)
            out.append((file, about, await _again(services[path], about, steps)))
    finally:
        for service in services.values():
            await service.close()
    return out


async def _again(service: Service, about: dict[str, Any], steps: Sequence[Any]) -> Pairs:
    actor = service.make_actor()
    actor.start(str(about.get("session", "")), b"")
    pairs = []
    for step in steps:
        if step.kind == TICK:
            try:
                then = msgspec.json.decode(step.reply)["action"]
            except (msgspec.DecodeError, KeyError, TypeError):
                raise DataError(f"a recorded reply is not an action: {step.reply[:60]!r}") from None
            pairs.append((then, msgspec.json.decode(await actor.tick(step.body))["action"]))
    return pairs


# --- gateway --------------------------------------------------------------------------------------------------------------

HAPROXY = """\
# Written by `bray gateway`: one address for the game services of several machines.
# A session's requests go to the same machine: the `session` header is hashed, consistently, so that a machine that is
# added or lost moves only its own share of the sessions. Inside a machine Bray's workers forward to the owner themselves.
global
    maxconn {maxconn}
defaults
    mode http
    timeout connect 5s
    timeout client {timeout}s
    timeout server {timeout}s
    timeout http-keep-alive {timeout}s
    option http-keep-alive
    option redispatch 0
frontend games
    bind {bind}
    # older clients say game_id
    http-request set-header session %[req.hdr(game_id)] if !{{ req.hdr(session) -m found }} {{ req.hdr(game_id) -m found }}
    use_backend stateless if !{{ req.hdr(session) -m found }}
    default_backend sessions
backend sessions
    balance hdr(session)
    hash-type consistent
    option httpchk GET /readyz
{servers}
backend stateless
    balance leastconn
    option httpchk GET /readyz
{servers}
"""


def gateway(servers: Sequence[str], bind: str, out: Path | None, maxconn: int, timeout: float) -> int:
    """Write an HAProxy configuration for services on several machines."""
    lines = []
    for i, server in enumerate(servers):
        address, _, admin = server.partition(",")
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit() or (admin and not admin.isdigit()):
            raise ConfigError(f"expected HOST:PORT or HOST:PORT,ADMIN_PORT, got {server!r}")
        check = admin or str(int(port) + 1)
        lines.append(f"    server bray{i} {host}:{port} check port {check} inter 1s fall 2 rise 1")
    if not bind.rpartition(":")[2].isdigit():
        raise ConfigError(f"--bind: expected *:PORT or HOST:PORT, got {bind!r}")
    text = HAPROXY.format(bind=bind, servers="\n".join(lines), maxconn=maxconn, timeout=f"{timeout:g}")
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        console = make_console()
        facts(console, [("written", out)])
        say(console, f"check it: haproxy -c -f {out}    run it: haproxy -f {out}", "dim")
    return 0
