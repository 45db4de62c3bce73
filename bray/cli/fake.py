"""`bray fake actor | gamecore | buffer`: partners to develop against, and a load table."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bray.cli.show import log_shown, make_console, plain_table, say
from bray.errors import ConfigError
from bray.fake.actor import FakeActor, Replies
from bray.fake.gamecore import FakeGamecore, Load
from bray.rundir import RunDir
from bray.serving.config import ServiceConfig
from bray.serving.values import plain
from bray.serving.workers import serve
from bray.spec import EnvSpec


@log_shown("info")
def actor(replies: Replies, config: ServiceConfig) -> int:
    """Serve fixed replies until a signal."""
    console = make_console()

    def ready(port: int, admin_port: int) -> None:
        kinds = "HTTP and TCP" if config.use_tcp else "HTTP"
        say(
            console,
            f"a fake actor answers {kinds} on {config.host}:{port} (admin {admin_port}); Ctrl-C ends it",
            "bold",
        )
        say(console, f"try: bray fake gamecore --port {port} --sessions 8 --seconds 5", "dim")

    return serve(partial(FakeActor, replies), config, on_ready=ready)


@log_shown()
def gamecore(load: Load, as_json: bool) -> int:
    """Play, then the table; 0 when every session could be started and every tick was answered."""
    result = FakeGamecore(load).play()
    numbers = result.to_json()
    if as_json:
        print(json.dumps(numbers))
        return 0 if result.requests and not result.errors else 1
    console = make_console()
    table = plain_table(
        ">sessions", ">requests/s", ">p50 ms", ">p90 ms", ">p99 ms", ">max ms", ">server CPU", ">us/request", ">RSS MB"
    )
    cpu = numbers.get("server_cpu")
    table.add_row(
        f"{result.started:,}",
        f"{numbers['per_second'] or 0:,.0f}",
        *[_short(numbers[f"{q}_ms"]) for q in ("p50", "p90", "p99", "max")],
        "–" if cpu is None else f"{100 * cpu:.0f} %",
        _short(numbers.get("server_cpu_us_per_request")),
        _short(numbers.get("server_rss_mb")),
    )
    console.print(table)
    if result.errors:
        for name, n in result.errors.most_common():
            say(console, f"{n:,} x {name}", "yellow")
        if load.tcp and not result.started and "connection lost" in result.errors:
            say(console, "does this service answer framed TCP? `bray serve --tcp` does", "dim")
    else:
        say(console, f"{result.requests:,} ticks in {result.seconds:.1f} s, no errors", "bold")
    return 0 if result.requests and not result.errors else 1


@log_shown()
def buffer(
    config: Path,
    keys: Sequence[str],
    sample: str | None,
    rate: float | None,
    seconds: float | None,
    trial: str | None,
    cluster: str,
) -> int:
    """Run the trainers of a launch file on made-up samples; 0 when all have made steps."""
    from bray.cli.launch import _show_failure as show_failure
    from bray.cluster import session as sessions
    from bray.fake.buffer import FakeBuffer, algo_sample
    from bray.launch.build import build
    from bray.launch.graph import load
    from bray.launch.modules import Modules, use_search_path
    from bray.remote.init import init

    graph = load(config, keys)
    trial = trial or f"{graph.settings.trial}-fake"  # what is learnt from nothing stays out of the real trial
    off = [f"{name}.enable=false" for name, c in graph.components.items() if c.kind in ("actor", "source")]
    graph = load(config, [*keys, *off], "train", trial)
    trainers = graph.of_kind("trainer")
    if not trainers:
        raise ConfigError(f"{config} has no trainer that made-up samples could be for")
    use_search_path(graph)
    given = None if sample is None else _named_sample(sample)
    console = make_console()
    session = init(graph.settings.project, graph.settings.trial, cluster)
    try:
        run = build(graph, session)
        modules = Modules(graph)
        fakes = {}
        for c in trainers.values():
            made = given
            if made is None and c.settings.algo is not None:
                made = algo_sample(modules.algorithm(c.settings.algo), np.random.default_rng(0))
            names = [*c.settings.buffers, *([] if c.settings.eval is None else [c.settings.eval.buffer])]
            fakes.update({n: FakeBuffer(n, made, model=c.settings.model, rate=rate) for n in names if n not in fakes})
        say(
            console,
            f"{', '.join(fakes)}: filled with made-up samples, for {', '.join(trainers)}; Ctrl-C ends it",
            "bold",
        )
        first, began = run.steps(), time.monotonic()
        due = began + 5.0

        last = first

        def poll() -> bool:
            nonlocal due, last
            now, last = time.monotonic(), run.steps()
            over = run.done() or (seconds is not None and now > began + seconds)
            if over or now > due:
                due = now + 5.0
                say(console, run.progress())
            for fake in fakes.values():
                if fake.error is not None:
                    raise fake.error
            return over

        try:
            sessions.run_until_asked_to_stop(poll)
        except Exception as e:
            show_failure(e)
            if given is None:
                say(
                    console,
                    "the samples were what the model takes: --sample MODULE:NAME gives the trainer others",
                    "yellow",
                )
            return 1
        steps = {name: step - first[name] for name, step in last.items()}
    finally:
        sessions.shutdown()
    spent = time.monotonic() - began
    table = plain_table("trainer", ">steps", ">steps/s")
    for name, n in steps.items():
        table.add_row(name, f"{n:,}", _short(n / spent))
    console.print(table)
    say(console, f"{sum(f.pushed for f in fakes.values()):,} samples were pushed · run directory {session.path}", "dim")
    return 0 if all(steps.values()) else 1


def _named_sample(path: str) -> Any:
    """`module:NAME`: a template, or a function of a random generator."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as e:
        raise ConfigError(f"--sample: expected module:NAME, a template or a function; got {path!r} ({e})") from None


def _short(x: Any) -> str:
    return "–" if x is None else f"{x:.3g}" if x < 100 else f"{x:,.0f}"


def bodies(file: Path | None, run: Path | None, size: int) -> tuple[bytes, ...]:
    """What the ticks say: a file's bytes, random observations of a run's spec as JSON, or so many bytes."""
    if file is not None and run is not None:
        raise ConfigError("give either --body FILE or --run RUN_DIR, not both")
    if file is not None:
        try:
            return (file.read_bytes(),)
        except OSError as e:
            raise ConfigError(f"--body: {file} cannot be read ({e.strerror})") from None
    if run is not None:
        spec = EnvSpec.from_json(RunDir.open(run).read_json("spec.json"))
        rng = np.random.default_rng(0)
        return tuple(json.dumps({"obs": plain(spec.observation.sample(rng))}).encode() for _ in range(64))
    return (b"x" * size,)
