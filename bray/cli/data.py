"""`bray data`: what files of episodes hold; written again in another form, filtered, joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bray.cli.options import Data
from bray.cli.show import facts, how_to_act, log_shown, plain_table, put, say, trusting
from bray.data.files import SUFFIX, Episode, EpisodeReader, EpisodeWriter
from bray.data.sources import DataSet, differing, given_spec, guess, open_data, shown
from bray.data.summary import Coverage, Summary, parse_filter, summarise
from bray.errors import ConfigError, DataError
from bray.metrics import short
from bray.rundir import RunDir
from bray.spec import EnvSpec

_BARS = 10  # of the histogram of returns
_WIDTH = 40


@log_shown("error")  # broken episodes are told in the summary
def data(options: Data) -> int:
    """Look, and write where that is asked for; returns the exit code: 1 where episodes are broken."""
    spec = None if options.obs is None and options.actions is None else given_spec(options.obs, options.actions)
    keeps = parse_filter(options.filter) if options.filter is not None else None
    looks = options.out is None and options.evaluate is None
    if sum(x is not None for x in (options.out, options.evaluate, options.plot)) > 1:
        raise ConfigError("--out, --evaluate and --plot are three things to do: one at a time")
    for name in ("convert", "filter"):
        if getattr(options, name) is not None and options.out is None:
            raise ConfigError(f"--{name} writes other files: say where with --out DIR")
    found = open_data(options.files, spec, options.skip_broken or looks)
    if options.out is not None:
        return _write(found, options, keeps)
    if options.evaluate is not None:
        return _evaluate(found, options)
    summary = summarise(found)
    if not summary.returns:
        why = next(iter(summary.broken.values()), "there are none")
        raise DataError(f"no episode can be read: {why}")
    _show(found, summary)
    if options.plot is not None:
        _plot(summary, options.plot)
    return 1 if summary.broken else 0


def _evaluate(found: DataSet, options: Data) -> int:
    """A table of estimates."""
    from bray.experiment import Experiment
    from bray.experiment.off_policy import estimate

    assert options.evaluate is not None
    with Experiment.load(options.evaluate, options.checkpoint, trust=trusting(options)) as exp:
        found.spec = exp.served.spec
        gamma = getattr(exp.config["algo"], "gamma", 0.99) if options.gamma is None else options.gamma
        act, episodes = how_to_act(options), list(found)
        rows = estimate(exp.served, episodes, gamma, act)
        title = f"{exp.config['run'].algorithm} on {exp.env_id}, {act}"
    say(f"{title}: return discounted by {gamma:g}, by {len(episodes):,} episodes of the files", "bold")
    table = plain_table("estimator", ">value", ">95 % from", ">to")
    for name, (value, low, high) in rows.items():
        table.add_row(name, f"{value:.4g}", f"{low:.4g}", f"{high:.4g}")
    put(table)
    played = [sum(gamma**t * r for t, r in enumerate(e["reward"].tolist())) for e in episodes]
    say(f"the episodes themselves: {short(float(np.mean(played)))} on average", "dim")
    return 0


def _show(found: DataSet, summary: Summary) -> None:
    returns, lengths = np.array(summary.returns), np.array(summary.lengths)
    if found.spec is None:
        obs, actions = guess(next(iter(found)))
        spaces = f"not said in the files; perhaps --obs '{obs}' --actions '{actions}'"
    else:
        spaces = f"{shown(found.spec.observation)} -> {shown(found.spec.action)}"
    rows: list[tuple[str, Any]] = [
        ("episodes", f"{len(returns):,}, {lengths.sum():,} steps, {lengths.min():,} to {lengths.max():,} each"),
        ("spaces", spaces),
        ("return", f"{short(float(returns.mean()))} on average, {short(returns.min())} … {short(returns.max())}"),
        ("ends", summary.ends),
        ("duplicates", f"{summary.duplicates:,}"),
        ("broken", f"{len(summary.broken):,}"),
        *[(part.name, _coverage(part)) for part in summary.actions],
    ]
    facts(rows)
    say("")
    for low, count in _histogram(returns):
        say(f"{short(low):>10}  {'█' * round(_WIDTH * count / len(returns))} {count:,}")
    for note in summary.notes:
        say(note, "yellow")
    for why in list(summary.broken.values())[:10]:
        say(why, "red")


def _coverage(part: Coverage) -> str:
    share = part.counts / max(1, part.counts.sum())
    used = len(part.counts) - len(part.unused)
    if part.edges or not part.labels[0].lstrip("-").isdigit():
        ends = f"{part.edges / max(1, part.counts.sum()):.0%} at its ends"
        return f"{used} of {len(part.counts)} parts of the range, {ends}"
    least = f"the rarest {share.min():.1%}" if not part.unused else f"never {', '.join(part.unused[:8])}"
    return f"{used} of {len(part.counts)} choices, {least}"


def _histogram(values: np.ndarray) -> list[tuple[float, int]]:
    """(low end, how many) of each bar."""
    if values.min() == values.max():
        return [(float(values[0]), len(values))]
    counts, ends = np.histogram(values, _BARS)
    return [(float(low), int(count)) for low, count in zip(ends[:-1], counts, strict=True)]


def _plot(summary: Summary, out: Path) -> None:
    from bray.figures import histograms

    panels: dict[str, Any] = {"return": summary.returns, "steps": summary.lengths}
    bars = {part.name: (part.labels, part.counts.tolist()) for part in summary.actions[:4]}
    histograms(panels, bars, out, f"{len(summary.returns):,} episodes")
    say(str(out))


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(found: DataSet, options: Data, keeps: Any) -> int:
    """The episodes that can be read and that the filter keeps, in the form that is asked for."""
    assert options.out is not None
    if any(options.out.glob(f"*{SUFFIX}")):
        raise ConfigError(f"{options.out} holds episodes already: choose another directory")
    if found.spec is None:
        obs, actions = guess(found[0])
        raise ConfigError(
            f"what is written says its spaces, and these files do not: --obs '{obs}' --actions '{actions}', perhaps"
        )
    read = written = 0

    def chosen() -> Iterator[Episode]:
        nonlocal read, written
        for episode in found:
            read += 1
            if keeps is None or keeps(episode):
                written += 1
                yield episode

    episodes = chosen()
    first = next(episodes, None)
    if first is None:
        why = f"--filter {options.filter!r} keeps none of {read:,} episodes" if read else "no episode can be read"
        raise ConfigError(f"{why}: nothing is written")
    write_as(options.convert or "bray", options.out, chain([first], episodes), found.spec)
    left = f", {len(found.broken):,} broken ones left out" if found.broken else ""
    say(f"{written:,} of {read:,} episodes written to {options.out}{left}")
    return 0


def make_place(out: Path, spec: EnvSpec) -> None:
    """The directory that episodes of these spaces go to: one that can be written to, without episodes of others."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: expected a directory that can be written to ({e.strerror})") from None
    there = EpisodeReader(out).spec if any(out.glob(f"*{SUFFIX}")) else None
    if there is not None and differing(there, spec):
        raise ConfigError(f"{out} holds episodes of other spaces already: choose another directory")


def write_as(form: str, out: Path, episodes: Iterable[Episode], spec: EnvSpec, per_file: int = 1000) -> list[Path]:
    """Write episodes as our files or as a data set of Minari; returns what was written."""
    make_place(out, spec)
    if form == "minari":
        from bray.data.hdf5 import MinariWriter

        writer: Any = MinariWriter(out, spec)
    else:
        writer = EpisodeWriter(out / "episodes", per_file)
    with writer:
        for episode in episodes:
            writer.write(episode)
    if form == "minari":
        return [writer.folder]
    RunDir(out).write_spec(spec)  # so that `bray train --data` needs no environment
    paths: list[Path] = writer.paths
    return paths
