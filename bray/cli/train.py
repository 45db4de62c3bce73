"""`bray train`: from what was typed to a finished run directory, with a line for each thing it left there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from bray import figures
from bray.algos import algo_name
from bray.cli.options import Train
from bray.cli.show import facts, log_shown, put, say, terminal, trusting
from bray.config import ConfigSource, parse_assignments, parse_json
from bray.config.runfile import load_run_file, preset
from bray.errors import BrayError, ConfigError, StoppedBySignal
from bray.experiment import Experiment
from bray.experiment.start import find_start, learnt_by
from bray.figures import show_figure
from bray.metrics import TerminalSink, duration, short
from bray.rundir import RunDir
from bray.train.callbacks import Callbacks
from bray.train.config import RunConfig
from bray.train.live import LiveTraining
from bray.train.policies import named_policies

_LAST_LOOK = 5_000  # environment steps, at most, to see whether greedy plays as well as sampled
_MANY = 32  # environments: 256 of ALE take a minute, and their code lets nothing else run meanwhile
_FIXED = {
    "run": "--run",
    "env": "--env",
    "file": "-f",
    "seeds": "--seed",
    "project": "--project",
    "trial": "--trial",
}
_BEGINS = {"init_from": "--init-from", "init_map": "--init-map", "init_partial": "--init-partial"}
"""What a run that is resumed has already decided."""


# --- from what was typed to sources -----------------------------------------------------------------------------------


def make_sources(options: Train, flags: ConfigSource) -> list[ConfigSource]:
    """File < --config < --stop < key=value < flags."""
    out = []
    if options.file is not None:
        out.append(_one_experiment(load_run_file(options.file)))
    if options.config is not None:
        out.append(parse_json(options.config))
    if options.stop is not None or options.steps is not None:
        out.append(_stop(options))
    if options.keys:
        out.append(parse_assignments(options.keys))
    if "policies" in flags.values.get("run", {}) and (named := named_policies(out)):
        where = next(source.name for source in out if named_policies([source]))
        raise ConfigError(
            f"--policies and {where} both say which policies there are (the latter {', '.join(named)}): leave one of "
            f"them out; policies.{next(iter(named))}.run=DQN changes one of {where}"
        )
    return [*out, _flags(options, flags)]


def _flags(options: Train, flags: ConfigSource) -> ConfigSource:
    """The flags that set config keys, with those that name what runs."""
    texts = flags.texts or {}
    values: dict[str, Any] = {section: dict(keys) for section, keys in flags.values.items()}
    if "data" in values and not options.live and values.get("live", {}).keys() <= {"obs", "actions"}:
        values["data"] |= values.pop("live", {})  # --obs and --actions are of whatever has no spaces of its own
        texts = {("data" if key[0] == "live" else key[0], *key[1:]): text for key, text in texts.items()}
    if options.live:
        values.setdefault("live", {})
    elif "live" in values and options.resume is None:
        flag = next(text for (section, _), text in texts.items() if section == "live").partition(" ")[0]
        raise ConfigError(f"{flag} is for live games: add --live")
    for section, key, flag, value in (
        ("run", "algorithm", "--run", options.run),
        ("env", "id", "--env", options.env),
        ("run", "seed", "--seed", options.seeds[0] if options.seeds else None),
    ):
        if value is not None:
            values.setdefault(section, {})[key] = algo_name(value) if flag == "--run" else value
            texts = {**texts, (section, key): f"{flag} {value}"}
    if options.self_play:
        values.setdefault("run", {})["self_play"] = {}
    return ConfigSource("command line", values, texts=texts)


def _stop(options: Train) -> ConfigSource:
    """`--steps N` is one more condition of --stop."""
    stop = parse_json(options.stop, "--stop").values if options.stop is not None else {}
    if options.steps is None:
        return ConfigSource("--stop", {"run": {"stop": stop}})
    if {"env_steps_total", "timesteps_total"} & stop.keys():
        raise ConfigError(f"--steps {options.steps} and --stop both say how many env steps: leave out one of them")
    name = "--steps" if options.stop is None else "--stop, --steps"
    return ConfigSource(name, {"run": {"stop": {**stop, "env_steps_total": options.steps}}})


def _one_experiment(source: ConfigSource) -> ConfigSource:
    """RLlib's files hold `name: {run: ..., env: ..., stop: ..., config: ...}`; ours the inner part."""
    if len(source.values) != 1:
        return source
    ((name, inner),) = source.values.items()
    if not isinstance(inner, dict) or not {"run", "env"} <= inner.keys() or name in ("run", "env", "config"):
        return source
    lines = {key[1:]: line for key, line in (source.lines or {}).items() if len(key) > 1}
    return ConfigSource(source.name, dict(inner), lines or None)


# --- signals ----------------------------------------------------------------------------------------------------------


class Signals(Callbacks):
    """SIGINT and SIGTERM: the first one ends the training after the iteration under way, the second one everything at
    once."""

    def __init__(self) -> None:
        self.experiment: Experiment | None = None
        self.number: int | None = None

    def __enter__(self) -> Signals:
        self._old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        # While Ray starts it makes exits of its own of ours.
        if isinstance(error, SystemExit) and self.number is not None:
            raise StoppedBySignal(128 + self.number) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.experiment is None:
            self.number = number
            raise StoppedBySignal(128 + number)
        if self.number is not None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live display hides the cursor
            os._exit(128 + number)
        self.number = number
        self.experiment.request_stop(hurry=True)
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of another write
            say("finishing this iteration, then saving; the same again ends at once", "dim")

    def on_train_result(self, experiment: Any, row: Any) -> None:
        """A signal that came before `train` began to listen is passed on."""
        if self.number is not None and self.experiment is not None:
            self.experiment.request_stop(hurry=True)

    @property
    def name(self) -> str:
        return {signal.SIGINT: "Ctrl-C"}.get(self.number, signal.Signals(self.number).name) if self.number else ""  # type: ignore[call-overload]


# --- the command ------------------------------------------------------------------------------------------------------


def train(options: Train, flags: ConfigSource = ConfigSource("command line", {})) -> int:
    """Train, and say what came of it; returns the exit code. `flags` sets config keys."""
    with log_shown("error" if options.quiet else "warning") as shown, Signals() as signals:
        if len(options.seeds or ()) > 1:
            return _several(options, flags, signals, shown)
        exp = _experiment(options, flags)
        _set_log_level(shown, exp, options)
        if options.print_config:
            put(exp.config.table())
            return 0
        with _closing(exp):
            code = _run(exp, options, signals)
            _last_line(exp.path)
        if exp.config["run"].show_figure and signals.number != signal.SIGTERM:
            exp.show_figure()  # after the last words: it waits for somebody
        return code


def _set_log_level(shown: Any, exp: Experiment, options: Train) -> None:
    """As the config says; --quiet leaves out warnings, unless a level was given."""
    level = exp.config["run"].log_level
    shown.set("error" if options.quiet and level == RunConfig.log_level else level)


def _experiment(options: Train, flags: ConfigSource, path: Path | None = None) -> Experiment:
    sources = make_sources(options, flags)
    if options.resume is not None:
        wrong = [flag for name, flag in _FIXED.items() if getattr(options, name)]
        wrong += [flag for key, flag in _BEGINS.items() if key in flags.values.get("run", {})]
        if wrong:
            raise ConfigError(f"--resume {options.resume} resumes that run: leave out {', '.join(wrong)}")
        return Experiment.resume(options.resume, sources, trust=trusting(options))
    place: dict[str, Any] = {"path": path} if path else {"project": options.project, "trial": options.trial}
    exp = Experiment(sources=sources, use_preset=not options.no_preset, live=options.live, **place)
    if options.render and exp.live:
        raise ConfigError("--render: live games are not played by Bray and cannot be filmed; leave it out")
    if options.render and exp.policies and not exp.is_game:
        raise ConfigError("--render: several policies are filmed one by one, `bray eval RUN_DIR/models/NAME --render`")
    if options.render:
        exp.check_env()
    return exp


@contextlib.contextmanager
def _closing(exp: Experiment) -> Iterator[None]:
    """Close it in any case; after an error say what is saved."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(BrayError):
            if exp.saved and exp.training.steps:
                what = "what was learned so far" if exp.all_saved else "the last good checkpoint"
                print(f"{what} is saved in {exp.path}", file=sys.stderr)
        raise
    finally:
        exp.close()


def _run(exp: Experiment, options: Train, signals: Signals) -> int:
    if options.resume is None:
        RunDir.signs_of_free(exp.path)  # before anything is made or said
    exp.settle()
    run = exp.config["run"]
    if not options.quiet and exp.has_env and not exp.live:
        count = exp.config["env"].num_envs * max(1, run.workers)
        if count >= _MANY:
            say(f"making {count:,} environments of {exp.env_id}", "dim")
    training = exp.training
    signals.experiment = exp
    if isinstance(training, LiveTraining):
        training.source.open()  # a port that is taken is told before anything is written
    if not options.quiet:
        _head(exp, options)
    title = f"{exp.algorithms} on {exp.env_id}"
    sinks = [] if options.quiet else [TerminalSink(title, run.stop, terminal())]
    went_on = False
    for _ in exp.train(sinks=sinks, callbacks=signals, show=False):
        went_on = True
    signals.experiment = None  # from here on a signal ends at once: all is saved
    reached = exp.reached
    if not options.quiet:
        _ended(exp, reached, signals, went_on)
    if (
        not options.quiet
        and training.iteration
        and not exp.live
        and exp.has_env
        and not exp.is_game
        and not exp.policies
    ):
        from bray.cli.evaluate import say_if_greedy_is_worse

        greedy = exp.play(10, most_steps=_LAST_LOOK)
        if greedy:
            say_if_greedy_is_worse(exp, greedy)
    videos: list[Path] = []
    if options.render and training.iteration:
        from bray.cli.evaluate import judge

        videos = judge(exp, run.eval_episodes, "video", out=exp.path, quiet=options.quiet)
    if not options.quiet:
        _left(exp, videos, unfinished=not reached)
    if signals.number is not None and not reached and (run.stop or (exp.from_files and not exp.training.ended)):
        return 128 + signals.number
    return 0


def _head(exp: Experiment, options: Train) -> None:
    import torch

    training, run = exp.training, exp.config["run"]
    threads = torch.get_num_threads()
    device = str(training.device)
    if device == "cpu":
        device += f", {threads} thread{'s' if threads > 1 else ''}"
    what = [
        f"{exp.algorithms} on {exp.env_id}",
        training.describe(),
        device,
        f"seed {run.seed}",
    ]
    say(" · ".join(what), "bold")
    rows: list[tuple[str, Any]] = []
    if exp.choice is not None and not (exp.from_files or exp.live):  # what they play in is not here
        rows.append(("auto", f"{exp.choice} (pin with --device, --num-workers, --inference)"))
    if options.resume is None:
        plain = options.no_preset or exp.from_files or exp.policies
        used = None if plain else preset(run.algorithm, exp.env_id)
        if used is not None:
            rows.append(("settings", f"{used.name} (--no-preset leaves it out, --print-config shows all values)"))
    else:
        how = "exactly" if exp.exact else "with new episodes"
        rows.append(("resumes", f"{how}, after iteration {training.iteration} and {short(training.env_steps)} steps"))
    if options.resume is None and run.init_from is not None:
        algo, untrained = learnt_by(find_start(run.init_from)[0])
        fresh = f"; {algo} does not train the {' and '.join(untrained)}, which starts fresh" if untrained else ""
        rows.append(("weights", f"of {run.init_from}{fresh}"))
    if "data" in exp.config.sections and not exp.from_files:
        data = exp.config["data"]
        first = f", {data.pretrain:,} batches of them alone first" if data.pretrain else ""
        rows.append(("files", f"{data.files}: {data.share:.0%} of every batch{first}"))
    if isinstance(training, LiveTraining):
        rows.append(("games call", f"POST {training.source.url}"))
        if when := training.experience.when_due():
            rows.append(("it learns", when))
        rows.append(("how it goes", f"http://127.0.0.1:{training.source.admin_port}/training"))
    goal = " or ".join(f"{k} {short(v)}" for k, v in run.stop.items())
    goals = [f"at {goal}"] if goal else []
    if exp.from_files:
        goals.append(f"after {exp.config['data'].epochs:,} epochs of the files")
    rows.append(("stops", " or ".join(goals) or "never: it runs until Ctrl-C"))
    rows.append(("writes to", exp.path))
    facts(rows)


def _ended(exp: Experiment, reached: dict[str, float], signals: Signals, went_on: bool) -> None:
    """Why it ended."""
    row, stop = exp.last_row or {}, exp.config["run"].stop
    key, what = ("learner_steps_total", "gradient steps") if exp.from_files else ("env_steps_total", "steps")
    spent = f"{short(row.get(key) or 0)} {what}, {duration(row.get('time_total_s') or 0.0)}"
    if reached:
        what = " and ".join(f"{k} {short(v)}" for k, v in reached.items())
        aims = [k for k in stop if "return" in k]
        style = "green" if not aims or any(k in reached for k in aims) else "yellow"
        before = "" if went_on else ", before this start: to go on, give a larger --steps or --stop"
        say(f"reached {what} after {spent}{before}", style)
    else:
        why = f"ended by {signals.name}" if signals.number else "ended"
        if exp.from_files and exp.training.ended:
            why = f"all {exp.config['data'].epochs} epochs of the files are learnt from (data.epochs): ended"
        say(f"{why} after {spent}" + ("; the goal was not reached" if stop else ""), "yellow" if stop else "")


def _left(exp: Experiment, videos: list[Path], unfinished: bool) -> None:
    """What it left behind, and what to type next."""
    path, quoted = exp.path, shlex.quote(str(exp.path))
    alone = exp.policies and not exp.is_game
    one = shlex.quote(str(exp.path / "models" / next(iter(exp.policies)))) if alone else quoted
    latest = path / "checkpoints" / "latest"
    kept = [
        ("checkpoint", latest.parent / latest.resolve().name if latest.is_symlink() else latest),
        ("curve", path / "figures" / "learning_curve.png"),
        *[("video", video) for video in videos],
        *([("videos", path / "videos")] if exp.config["run"].video_freq else []),
        ("results", path / "result.jsonl"),
        ("tensorboard", path / "tb"),
    ]
    look = (
        ("serve it", f"bray serve {one}")
        if exp.live or not exp.has_env
        else ("look at it", f"bray eval {one} --render")
    )
    commands = [look, ("", f"tensorboard --logdir {quoted}")]
    if unfinished:
        commands.insert(0, ("go on", f"bray train --resume {quoted}"))
    facts([*[(name, p) for name, p in kept if p.exists()], *commands])


def _last_line(path: Path) -> None:
    say(f"run directory: {path}")


# --- several seeds ----------------------------------------------------------------------------------------------------


def _several(options: Train, flags: ConfigSource, signals: Signals, shown: Any) -> int:
    """One run after another in P/T/seed-<n>, then one curve with mean and deviation."""
    seeds = list(options.seeds or ())
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seed: expected different seeds, got {seeds}")
    probe = _experiment(replace(options, seeds=seeds[:1]), flags)
    _set_log_level(shown, probe, options)
    if options.print_config:
        put(probe.config.table())
        return 0
    root, code, done = probe.path, 0, []
    for seed in seeds:
        exp = _experiment(replace(options, seeds=[seed]), flags, root / f"seed-{seed}")
        with _closing(exp):
            code = _run(exp, options, signals)
            done.append(exp)
        if signals.number is not None:
            break
        if not options.quiet:
            say()
    run, paths = done[0].config["run"], [e.path for e in done]
    title, threshold = f"{run.algorithm} on {done[0].env_id}", run.stop.get("episode_return_mean")
    out = root / "figures" / "learning_curve.png"
    if run.save_figure:
        figures.learning_curve(paths, out, title, threshold)
    if not options.quiet:
        rows = [_of_seed(exp) for exp in done]
        facts([*rows, ("curve", out)] if run.save_figure else rows)
    _last_line(root)
    if run.show_figure and signals.number != signal.SIGTERM:
        show_figure(paths, title, threshold)
    return code


def _of_seed(exp: Experiment) -> tuple[str, str]:
    row = exp.last_row or {}
    said = f"return {short(row.get('episode_return_mean'))} after {short(row.get('env_steps_total'))} steps"
    return f"seed {exp.config['run'].seed}", said
