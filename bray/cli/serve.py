"""`bray serve` and `bray replay`: a trained policy answers games. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import difflib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bray.cli.options import Replay, Serve
from bray.cli.show import facts, log_shown, plain_table, put, renamed_act, say
from bray.config import ConfigSource, options as options_of, parse_assignments
from bray.data.piece import DEFAULT
from bray.errors import ConfigError, DataError
from bray.league import IN_RUN, PlayerRef, read_league
from bray.service import SECTIONS, PolicyService, configure, name_runs, serve as serve_runs, with_players
from bray.serving.config import ServedModelConfig, ServiceConfig
from bray.serving.protocol import TICK, Refusal
from bray.serving.record import About, Step, read_recording

logger = logging.getLogger("bray.serving")
_KEYS = {"sample", *(key for section in SECTIONS.values() for key in options_of(section))}  # sample: `act` in 0.1


def _torch_engine(path: Path, step: int, trust: bool = False) -> tuple[Any, Any]:
    from bray.experiment import torch_engine  # only when it is asked for

    return torch_engine(path, step, trust)


def serve(options: Serve, flags: ConfigSource) -> int:
    """Serve until a signal; returns the exit code. `flags` sets keys of the service and its models."""
    with log_shown("info", options.log_format):
        return _serve(options, flags)


def _serve(options: Serve, flags: ConfigSource) -> int:
    if options.sample:
        models = flags.values.setdefault("model", {})
        models["act"] = renamed_act(models.get("act"), True, "--sample")
    runs, service, model = settings(options.words, flags)
    if options.player is not None or options.rating is not None:
        ref = _player(list(runs.values()), model, options.player, options.rating)
        model = replace(model, versions={"latest" if ref.step is None else str(ref.step): 1.0})
        if ref.side != DEFAULT:  # of a league of several
            runs = {name: path / "models" / ref.side for name, path in runs.items()}
    else:
        runs = with_players(runs)
    if "tokens" in flags.values.get("service", {}) or any(word.startswith("tokens=") for word in options.words):
        print(
            "warning: --token can be seen by every user of this machine (ps) and goes with the next release: use "
            "--token-file FILE or BRAY_TOKEN",
            file=sys.stderr,
        )
    logging.captureWarnings(True)

    def ready(port: int, admin_port: int) -> None:
        if options.log_format == "json":  # all that is said is JSON
            logger.info("serving on %s:%d, admin port %s:%d", service.host, port, service.admin_host, admin_port)
            return
        rows = [(name, str(path)) for name, path in runs.items()]
        facts([*rows, ("admin", f"http://{service.admin_host}:{admin_port}/metrics  /models  /healthz  /readyz")])
        kinds = "HTTP and TCP" if service.use_tcp else "HTTP"
        slots = service.workers * service.actors_per_worker
        more = " --token-file FILE" if service.tokens or service.token_file else ""  # no secret: this goes into logs
        if service.tls_cert is not None:
            kinds, more = f"{kinds} over TLS", f"{more} --tls {service.tls_cert}"
        say(f"serving {kinds} on {service.host}:{port}, {slots} sessions at once; Ctrl-C ends it", "bold")
        say(
            f"try: bray fake gamecore --port {port} --run {next(iter(runs.values()))} --sessions 8 --seconds 5{more}",
            "dim",
        )

    return serve_runs(runs, service, model, partial(_torch_engine, trust=model.trust), ready)


def _player(runs: Sequence[Path], model: ServedModelConfig, player: str | None, rating: float | None) -> PlayerRef:
    """The one that is to answer."""
    if len(runs) != 1 or model.versions or (player is not None and rating is not None):
        raise ConfigError("--player NAME, --rating X and --version say which version of one run is served: give one")
    found = read_league(runs[0] / IN_RUN)
    if player is not None:
        return found.find(player)
    ref = min(found.refs, key=lambda one: abs(found.rating(one).elo - float(rating or 0.0)))
    say(f"{ref}, rating {found.rating(ref).elo:,.0f} ± {found.rating(ref).half:,.0f}, is nearest to {rating:,.0f}")
    return ref


def settings(words: Sequence[str], flags: ConfigSource) -> tuple[dict[str, Path], ServiceConfig, ServedModelConfig]:
    """Run directories and KEY=VALUE, as they were typed, and the flags that were given."""
    keys = [w for w in words if _is_key(w)]
    runs = [w for w in words if w not in keys]
    if not runs:
        raise ConfigError("expected a run directory, as `bray train` names it: bray serve RUN_DIR")
    return name_runs(runs), *configure([flags, parse_assignments(keys)])


def _is_key(word: str) -> bool:
    """KEY=VALUE, also a misspelt one, and not NAME=RUN_DIR."""
    name, equals, value = word.partition("=")
    if not equals or Path(value).is_dir():
        return False
    section, _, key = name.rpartition(".")
    return section in SECTIONS or bool(difflib.get_close_matches(key, _KEYS, 1, 0.75))


# --- replay -----------------------------------------------------------------------------------------------------------


@log_shown()
def replay(options: Replay) -> int:
    """Play recorded sessions again and compare the actions, tick by tick."""
    table = plain_table("recording", ">ticks", ">same action", "version then", "version now")
    differences: list[tuple[str, int, Any, Any]] = []
    total = same = 0
    config = ServedModelConfig(engine=options.engine, versions={options.against: 1.0}, trust=options.trust)
    for file, about, pairs in asyncio.run(_all_again(options.files, options.run, config)):
        for i, (then, now) in enumerate(pairs):
            if then != now:
                differences.append((file.name, i, then, now))
        agreed = sum(then == now for then, now in pairs)
        total, same = total + len(pairs), same + agreed
        share = f"{100 * agreed / len(pairs):.1f} %" if pairs else "–"
        table.add_row(file.name, f"{len(pairs):,}", share, str(about.version), options.against)
    put(table)
    for name, i, then, now in differences[: options.show]:
        say(f"{name} tick {i}: {then} then, {now} now", "dim")
    if len(differences) > options.show:
        say(f"... {len(differences) - options.show:,} more (--show N)", "dim")
    say(f"{same:,} of {total:,} actions are the same" if total else "no ticks were recorded", "bold")
    return 0


Pairs = list[tuple[Any, Any]]
"""The action of each tick: then, now."""


async def _all_again(
    files: Sequence[Path], run: Path | None, config: ServedModelConfig
) -> list[tuple[Path, About, Pairs]]:
    """Every recording against its run (or another one); a run is loaded once."""
    services: dict[Path, PolicyService] = {}
    engine = partial(_torch_engine, trust=config.trust)
    out = []
    try:
        for file in files:
            about, steps = read_recording(file)
            path = run or Path(about.run)
            try:
                if path not in services:
                    services[path] = PolicyService({about.model: path}, config, torch_engine=engine)
                out.append((file, about, await _again(services[path], about, steps)))
            except (DataError, Refusal, OSError) as e:
                raise DataError(f"{file} cannot be played again: {e}") from None
    finally:
        for service in services.values():
            await service.close()
    return out


async def _again(service: PolicyService, about: About, steps: Sequence[Step]) -> Pairs:
    actor = service.make_actor()
    actor.start(about.session, b"")
    pairs = []
    for step in steps:
        if step.kind == TICK:
            try:
                then = msgspec.json.decode(step.reply or b"")["action"]
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
                raise DataError(f"a recorded reply is not an action: {(step.reply or b'')[:60]!r}") from None
            reply = actor.tick(step.body)
            pairs.append((then, msgspec.json.decode(reply if isinstance(reply, bytes) else await reply)["action"]))
    return pairs
