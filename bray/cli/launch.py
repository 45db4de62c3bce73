"""`bray launch`: a launch file is checked, drawn, or run until it is stopped."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.text import Text

from bray.cli.options import Launch, Train
from bray.cli.show import facts, log_shown, plain_table, put, say, show_failure
from bray.cluster.machine import Machine
from bray.config import load_yaml
from bray.errors import BrayError, CheckpointError, ConfigError, ResourceError
from bray.launch.graph import Graph, ResourceRequest, load, total
from bray.launch.hints import game_command
from bray.launch.modules import check_modules, check_networks

if TYPE_CHECKING:
    from bray.launch.build import Launched

PROGRESS_EVERY = 10.0
"""Seconds between two lines about the progress."""
DEPLOY_FOLDER = "deploy"
"""Of the run directory: the numbers of a deployment are not those of the training, and are kept apart from them."""


def again(options: Launch, **changes: str) -> str:
    """The command line that was typed, with some flags changed."""
    flags = {"mode": options.mode, "trial": options.trial, "project": options.project, **changes}
    words = ["bray", "launch", "--config", str(options.config)]
    for flag, value in flags.items():
        words += [f"--{flag}", value] if value is not None else []
    words += ["--trust"] if options.trust else []
    words += ["--cluster", options.cluster] if options.cluster != "ray" else []
    return shlex.join([*words, *(options.keys or ())])


def launch(options: Launch) -> int:
    """Check, draw or run; returns the exit code."""
    if is_run(load_yaml(options.config).values):
        return _train(options)
    graph = load(options.config, options.keys or (), options.mode, options.trial, options.project, options.trust)
    if options.graph is not None:
        _draw(graph, options.graph)
    if options.graph is not None and not options.check:
        return 0
    with log_shown(options.log_level, options.log_format):
        deployed = _deployed(graph)
        check_modules(graph, deployed)
        if options.check:
            _show_plan(graph, options, [*graph.notes, *check_networks(graph, deployed)])
            return 0
        for note in graph.notes:
            print(f"note: {note}", file=sys.stderr)
        return _run(graph, options, reads_only=deployed.keys() >= graph.of_kind("model").keys())


def is_run(values: Mapping[str, Any]) -> bool:
    """Whether a file describes a run that learns from live games, as `bray train -f` reads it, and no components."""
    return "live" in values and not any(isinstance(x, Mapping) and "kind" in x for x in values.values())


def _train(options: Launch) -> int:
    """Training and service of such a file are one process, which `bray train` starts; a trial that is there is
    continued."""
    from bray.cli.train import train  # it loads torch

    project, trial = Path(options.project or "runs"), options.trial or options.config.stem
    odd = [flag for flag, value in (("--check", options.check), ("--graph", options.graph)) if value]
    odd += ["--mode deploy"] if options.mode == "deploy" else []
    if odd:
        raise ConfigError(
            f"{options.config} describes a run (`live:`), not components: leave out {', '.join(odd)}; bray train -f "
            f"{options.config} --print-config shows what it sets, bray serve {project / trial} serves it"
        )
    about: dict[str, Any] = {"keys": options.keys, "quiet": options.quiet, "trust": options.trust}
    if (project / trial / "checkpoints").exists():
        return train(Train(resume=project / trial, **about))
    return train(Train(file=options.config, project=project, trial=trial, **about))


def _deployed(graph: Graph) -> dict[str, Path]:
    """Models that are deployed from files, whose modules are not needed."""
    if graph.settings.mode != "deploy":
        return {}
    from bray.launch.deploy import find_deployed

    return find_deployed(graph)[0]


def _draw(graph: Graph, out: Path) -> None:
    from bray.launch.picture import svg

    if out.suffix.lower() != ".svg":
        raise BrayError(f"--graph: expected a file that ends in .svg, got {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(svg(graph), encoding="utf-8")
    except OSError as e:
        raise BrayError(f"--graph: {out} cannot be written ({e.strerror})") from None
    facts([("drawn", out)])


# --- what would start -------------------------------------------------------------------------------------------------


def _show_plan(graph: Graph, options: Launch, notes: Sequence[str]) -> None:
    s = graph.settings
    say(f"{s.project}/{s.trial} · mode {s.mode} · {len(graph.components)} components", "bold")
    table = plain_table("component", "kind", ">processes", ">CPUs", ">GPUs", ">MB", "where", "edges")
    asks = {ask.name: ask for ask in graph.resources()}
    for name, c in graph.components.items():
        table.add_row(Text(name, "bold"), c.kind, *_amounts(asks.get(name)), Text(_edges(graph, name), "dim"))
    every = total(asks.values())
    table.add_row("sum", "", *_amounts(every), style="bold")
    put(table)
    if graph.absent:
        gone = ", ".join(f"{name} ({why})" for name, why in graph.absent.items())
        say(f"not in this mode: {gone}", "dim")
    for note in notes:
        say(f"note: {note}", "yellow")
    machine, cluster = Machine.look(), _cluster(options.cluster)
    facts([("this machine", machine), ("cluster", cluster)])
    if cluster == _OWN:
        for problem in machine.shortage(every.cpus, every.gpus, every.memory):
            say(f"note: {problem}", "yellow")
    say(f"nothing was started; start it with: {again(options)}", "dim")


def _amounts(ask: ResourceRequest | None) -> tuple[str, ...]:
    if ask is None:
        return ("–", "–", "–", "–", "")
    return (str(ask.processes), *(f"{x:g}" if x else "–" for x in (ask.cpus, ask.gpus, ask.memory)), ask.where)


def _edges(graph: Graph, name: str) -> str:
    """`fills train_buffer; ...`: what goes out of a component."""
    out: dict[str, list[str]] = {}
    for e in graph.edges:
        if e.tail == name:
            out.setdefault(e.what, []).append(e.head)
    return "; ".join(f"{what} {', '.join(heads)}" for what, heads in out.items())


_OWN = "none runs here: a Ray of its own would be started on this machine"


def _cluster(kind: str) -> str:
    if kind == "local":
        return "local: all components in this process"
    from bray.cluster.ray_start import running_nodes

    nodes = running_nodes()
    if not nodes:
        return _OWN
    rows = "; ".join(f"{n.host}{' (head)' if n.head else ''}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in nodes)
    return f"a Ray cluster of {len(nodes)} would be joined: {rows}"


# --- running ----------------------------------------------------------------------------------------------------------


def _run(graph: Graph, options: Launch, reads_only: bool) -> int:
    from bray.cluster import session as sessions
    from bray.launch.build import build
    from bray.remote.init import init

    s, asked = graph.settings, total(graph.resources())
    with _term_as_interrupt():
        place: dict[str, Any] = {}
        if s.mode == "deploy":
            place = {"numbers_in": DEPLOY_FOLDER, "shared": reads_only}
        session = init(s.project, s.trial, options.cluster, **place, **ray_settings(options, asked))
        try:
            where = session.cluster.kind
            say(f"{s.project}/{s.trial} · mode {s.mode} · {where} · {len(graph.components)} components", "bold")
            if where == "ray" and session.info.one_machine:
                for problem in Machine.look().shortage(asked.cpus, asked.gpus, asked.memory):
                    say(f"note: {problem}", "yellow")
            run = build(graph, session, lambda name: _started(graph, name, options))
        except BaseException as e:
            sessions.shutdown()
            if not isinstance(e, Exception):
                raise
            show_failure(e)
            return 2 if isinstance(e, (ConfigError, ResourceError)) else 1
        _say_where(run)
        return _wait(run, options)


def _wait(run: Launched, options: Launch) -> int:
    """Until the run is done, has failed, or is asked to stop."""
    from bray.cluster import session as sessions

    due, done = time.monotonic() + PROGRESS_EVERY, False

    def poll() -> bool:
        nonlocal due, done
        done = run.done()
        if done or time.monotonic() >= due:
            due = time.monotonic() + PROGRESS_EVERY
            line = run.progress()
            if line and not options.quiet:
                say(line)
        return done

    try:
        sessions.run_until_asked_to_stop(poll)
    except Exception as e:
        show_failure(e)
        print(f"run directory: {run.session.path}", file=sys.stderr)
        return 1
    for end in run.ends.values():
        if end.done() and isinstance(error := end.exception(), CheckpointError):  # what it had learnt is not saved
            show_failure(error)
            return 1
    _say_next(run.graph, options, done)
    return 0


def ray_settings(options: Launch, asked: ResourceRequest) -> dict[str, Any]:
    """What `ray.init` is told where the Ray is our own: logical CPUs enough for the graph."""
    if options.cluster != "ray":
        return {}
    return {"num_cpus": max(8, 4 * (os.cpu_count() or 1), math.ceil(asked.cpus))}


def _started(graph: Graph, name: str, options: Launch) -> None:
    if not options.quiet:
        c = graph.components[name]
        say(f"started {c.kind} {name}", "dim")


def _say_where(run: Any) -> None:
    """Where games call, and where the numbers are."""
    rows: list[tuple[str, Any]] = [("run directory", run.session.path)]
    for name, actor in run.actors.items():
        component = run.graph.components[name]
        port = getattr(actor, "port", None) or component.settings.port
        rows.append((f"games ({name})", f"port {port}; try: {game_command(run.graph, component, port)}"))
        if name in run.deployments:
            rows.append(("admin", f"http://127.0.0.1:{actor.admin_port}/models  /metrics  /healthz  /readyz"))
    rows.append(("figures", f"tensorboard --logdir {shlex.quote(run.graph.settings.project)}"))
    facts(rows)
    say("Ctrl-C ends it", "dim")


def _say_next(graph: Graph, options: Launch, done: bool) -> None:
    s = graph.settings
    if s.mode == "train":
        what = "the training is done" if done else "stopped; the same command goes on"
        after = f"go on: {again(_for_longer(graph, options) if done else options)}"
        if graph.of_kind("actor"):
            after = f"serve it: {again(options, mode='deploy')}"
    else:
        what, after = "stopped", f"start it again: {again(options)}"
    say(f"{what} · run directory {Path(s.project) / s.trial} · {after}", "bold")


def _for_longer(graph: Graph, options: Launch) -> Launch:
    """What trains on where all steps are done: num_steps counts from the first start, so twice as many."""
    steps = {f"{name}.num_steps": c.settings.num_steps for name, c in graph.of_kind("trainer").items()}
    more = {key: 2 * count for key, count in steps.items() if count}
    kept = [word for word in options.keys or () if word.partition("=")[0] not in more]
    return replace(options, keys=[*kept, *(f"{key}={count}" for key, count in more.items())])


class _term_as_interrupt:
    """Within: SIGTERM and SIGHUP are Ctrl-C, so that what was started is stopped. Only the first of them: `timeout`
    sends two, and the second would interrupt the stopping. A SIGINT that the shell of a script has switched off for
    what it starts with `&` counts again, as in `bray train` and `bray serve`."""

    def __enter__(self) -> None:
        came = False

        def interrupt(signum: int, frame: FrameType | None) -> None:
            nonlocal came
            if not came:
                came = True
                raise KeyboardInterrupt

        self._old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            signals = (signal.SIGTERM, signal.SIGHUP)
            self._old = {s: signal.signal(s, interrupt) for s in signals if signal.getsignal(s) != signal.SIG_IGN}
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
                self._old[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: Any) -> None:
        for s, handler in self._old.items():
            signal.signal(s, handler)
