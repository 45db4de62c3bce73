"""`bray fake buffer`: the trainers of a launch file on made-up samples."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from bray.cli.options import FakeBuffer as Options
from bray.cli.show import log_shown, plain_table, put, say, show_failure
from bray.cluster import session as sessions
from bray.errors import ConfigError
from bray.fake.buffer import FakeBuffer, algo_sample
from bray.launch.build import Launched, build
from bray.launch.graph import Graph, load
from bray.launch.modules import Modules, use_search_path
from bray.remote.init import init

_PROGRESS_EVERY = 5.0  # seconds


@log_shown()
def buffer(options: Options) -> int:
    """Train until it is stopped, then the table; 0 when every trainer has made steps."""
    graph = _trainers_only(options)
    use_search_path(graph)
    template = None if options.sample is None else _named_sample(options.sample)
    session = init(graph.settings.project, graph.settings.trial, options.cluster)
    try:
        run = build(graph, session)
        fakes = _fake_buffers(graph, template, options.rate)
        trainers = ", ".join(graph.of_kind("trainer"))
        say(f"{', '.join(fakes)}: filled with made-up samples, for {trainers}; Ctrl-C ends it", "bold")
        first, began = run.steps(), time.monotonic()
        try:
            last = _train(run, list(fakes.values()), options.seconds)
        except Exception as e:
            show_failure(e)
            if template is None:
                hint = "the samples were what the model takes: --sample MODULE:NAME gives the trainer others"
                say(hint, "yellow")
            return 1
    finally:
        sessions.shutdown()
    spent = time.monotonic() - began
    table = plain_table("trainer", ">steps", ">steps/s")
    for name, step in last.items():
        table.add_row(name, f"{step - first[name]:,}", f"{(step - first[name]) / spent:.3g}")
    put(table)
    pushed = sum(fake.pushed for fake in fakes.values())
    say(f"{pushed:,} samples were pushed · run directory {session.path}", "dim")
    return 0 if all(step > first[name] for name, step in last.items()) else 1


def _trainers_only(options: Options) -> Graph:
    """The launch file without its games and sources, in a trial of its own: what is learnt from made-up samples stays
    out of the real one."""
    keys = options.keys or []
    graph = load(options.config, keys)
    off = [f"{name}.enable=false" for name, c in graph.components.items() if c.kind in ("actor", "source")]
    graph = load(options.config, [*keys, *off], "train", options.trial or f"{graph.settings.trial}-fake")
    if not graph.of_kind("trainer"):
        raise ConfigError(f"{options.config} has no trainer that made-up samples could be for")
    return graph


def _fake_buffers(graph: Graph, template: Any, rate: float | None) -> dict[str, FakeBuffer]:
    """One for every buffer that a trainer reads, filled with the template, or with what the trainer's algorithm
    takes."""
    modules, fakes = Modules(graph), {}
    for trainer in graph.of_kind("trainer").values():
        s, made = trainer.settings, template
        if made is None and s.algo is not None:
            made = algo_sample(modules.algorithm(s.algo), np.random.default_rng(0))
        for name in (*s.buffers, *([s.eval.buffer] if s.eval else ())):
            if name not in fakes:
                fakes[name] = FakeBuffer(name, made, model=s.model, rate=rate)
    return fakes


def _train(run: Launched, fakes: list[FakeBuffer], seconds: float | None) -> dict[str, int]:
    """Train until the run ends, the time limit passes or a signal comes; returns the last step of each trainer."""
    began = shown = time.monotonic()
    last = run.steps()

    def poll() -> bool:
        nonlocal shown, last
        now, last = time.monotonic(), run.steps()
        over = run.done() or (seconds is not None and now > began + seconds)
        if over or now > shown + _PROGRESS_EVERY:
            shown = now
            say(run.progress())
        for fake in fakes:
            if fake.error is not None:
                raise fake.error
        return over

    sessions.run_until_asked_to_stop(poll)
    return last


def _named_sample(path: str) -> Any:
    """`module:NAME`: a template, or a function of a random generator."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as e:
        raise ConfigError(f"--sample: expected module:NAME, a template or a function; got {path!r} ({e})") from None
