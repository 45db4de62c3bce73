"""Learning curves from run directories, as PNG (or any format matplotlib knows by the file's suffix)."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bray.errors import CheckpointError, ConfigError, DataError
from bray.metrics.rows import ENV_STEPS, GRADIENT_STEPS, RATING, RATING_CI, from_files, side_key
from bray.rundir import write_atomic
from bray.rundir.reader import read_plain

logger = logging.getLogger("bray")

TRAIN = "episode_return_mean"
EVAL = "eval/return_mean"
EVAL_CI = "eval/return_ci95"
EVAL_STEPS = "eval/env_steps"
_COLORS = ("#2f6fb5", "#d9722e", "#3a9a5b", "#b5403f", "#7a5aa8", "#8a6a4f", "#c46aa5", "#5b6770")
_SIZE = (8, 4.8)
_PALE = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6}  # behind text among lines
_POINTS = 300  # of a curve averaged over seeds
_ENOUGH = 20  # episodes, before their mean return is drawn

PathLike = str | Path
_MOST_ROWS = 1 << 30  # bytes of result.jsonl, a million rows


def read_results(run_dir: PathLike) -> list[dict[str, Any]]:
    """The rows of `result.jsonl`; half a line at the end (of a run that is being written) is left out."""
    path, root = Path(run_dir), None
    if path.is_dir():
        path, root = path / "result.jsonl", path
    try:
        lines = read_plain(path if root is None else path.name, root, _MOST_ROWS).split(b"\n")
    except CheckpointError as e:
        raise DataError(f"expected the results of a run: {e}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                continue
            raise DataError(f"{path}:{number}: expected a line of JSON, got {line[:60]!r}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a row of keys and values, got {line[:60]!r}")
        rows.append(row)
    return rows


def series(rows: Sequence[Mapping[str, Any]], key: str, x: str = ENV_STEPS) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a metric; rows without it are left out."""
    points = [
        (r[x], r[key]) for r in rows if isinstance(r.get(x), (int, float)) and isinstance(r.get(key), (int, float))
    ]
    xs, ys = zip(*points, strict=True) if points else ((), ())
    return np.array(xs, float), np.array(ys, float)


def _returns(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The curve of the training's returns. Which episodes end first says more of their length than of the policy, so it
    begins when some have ended."""
    enough = [r for r in rows if r.get("episodes_total", _ENOUGH) >= _ENOUGH]
    curve = series(enough, TRAIN)
    return curve if len(curve[0]) else series(rows, TRAIN)


def mean_and_std(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Curves of several seeds on one x axis, over the steps that all of them have (perhaps none): x, mean, standard
    deviation."""
    curves = [c for c in curves if len(c[0])]
    if len(curves) == 1:
        return curves[0][0], curves[0][1], np.zeros_like(curves[0][1])
    low, high = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    grid = np.linspace(low, high, _POINTS if low < high else 1 if low == high else 0)
    ys = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, ys.mean(0), ys.std(0)


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and half width of the 95 % confidence interval of every evaluation (0 where it is not known). It stands
    at the steps of its weights: one beside the training is known when that has gone on."""
    points = [
        (r[GRADIENT_STEPS] if from_files(r) else r.get(EVAL_STEPS) or r[ENV_STEPS], r[EVAL], r.get(EVAL_CI) or 0.0)
        for r in rows
        if isinstance(r.get(ENV_STEPS), (int, float)) and isinstance(r.get(EVAL), (int, float))
    ]
    x, mean, half = np.array(points, float).reshape(-1, 3).T
    return x, mean, half


def learning_curve(
    run_dirs: PathLike | Sequence[PathLike],
    out: PathLike,
    title: str = "",
    threshold: float | None = None,
) -> Path:
    """Return against environment steps: one run with its evaluations, or several seeds, each a thin line to its own
    end, and their mean with a band of one standard deviation as far as all of them go. `threshold` draws a line at the
    return to reach."""
    with _figure(Path(out), title or "Learning curve", threshold) as axes:
        plot_learning_curve(axes, run_dirs)
    return Path(out)


def show_learning_curve(
    run_dirs: PathLike | Sequence[PathLike], title: str = "", threshold: float | None = None
) -> None:
    """The same picture in a window; returns when it is closed. Ask `no_window` first."""
    with _figure(None, title or "Learning curve", threshold) as axes:
        plot_learning_curve(axes, run_dirs)


def show_figure(paths: Sequence[Path], title: str, threshold: float | None) -> None:
    """The learning curve of runs in a window; a warning where that is not possible."""
    why = no_window()
    try:
        if why is None:
            show_learning_curve(paths, title, threshold)
    except Exception as e:  # a picture must not lose a trained agent
        why = f"{type(e).__name__}: {e}"
    if why is not None:
        logger.warning("no window shows the learning curve: %s", why)


def no_window() -> str | None:
    """Why no window can be opened here; None where one can."""
    import matplotlib
    import matplotlib.pyplot as plt
    from matplotlib.backends import BackendFilter, backend_registry

    try:
        plt.switch_backend(matplotlib.get_backend())
    except ImportError as e:
        return str(e)
    if matplotlib.get_backend().lower() not in backend_registry.list_builtin(BackendFilter.NON_INTERACTIVE):
        return None
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set)"
    return (
        f"matplotlib draws with {matplotlib.get_backend()!r}, which has no windows: install tkinter or PyQt6, or set "
        "MPLBACKEND"
    )


def plot_learning_curve(axes: Any, run_dirs: PathLike | Sequence[PathLike]) -> None:
    """Draw a learning curve on the axes of a figure."""
    dirs = [run_dirs] if isinstance(run_dirs, (str, Path)) else list(run_dirs)
    results = [read_results(d) for d in dirs]
    evaluations = [e for e in map(_evaluations, results) if len(e[0])]
    if all(rows and from_files(rows[-1]) for rows in results):
        axes.set_xlabel("gradient steps")
    curves = [_returns(rows) for rows in results]
    if any(len(x) for x, _ in curves) or not evaluations:  # learning from files plays no episodes
        _draw(axes, curves, _COLORS[0], "training", [str(d) for d in dirs])
    if len(dirs) == 1:
        _draw_agents(axes, results[0])
        _draw_rating(axes, results[0])
    if len(dirs) > 1 and evaluations:
        _draw(axes, [e[:2] for e in evaluations], _COLORS[1], "evaluation", [str(d) for d in dirs])
    elif evaluations:
        x, mean, half = evaluations[0]
        axes.plot(x, mean, "o-", color=_COLORS[1], ms=4, lw=1.4, label="evaluation, greedy")
        if half.any():
            axes.fill_between(x, mean - half, mean + half, color=_COLORS[1], alpha=0.2, lw=0, label="95 % confidence")


def _draw_agents(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """A thin line for each agent of a game, as far as there are colours: the sum of all tells nothing where what one
    wins another loses."""
    keys = [key for key in (rows[-1] if rows else ()) if key.startswith("agent/") and key.endswith("/return_mean")]
    for key, color in zip(keys, _COLORS[2:], strict=False):
        name = key.removeprefix("agent/").removesuffix("/return_mean")
        axes.plot(*series(rows, key), color=color, lw=1.0, label=f"{name}, training")


def _draw_rating(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rating of a policy that plays itself, on a scale of its own: what it is paid says little of how strong it
    is."""
    x, rating = series(rows, RATING)
    half = series(rows, RATING_CI)[1]
    if not len(x):
        return
    other = axes.twinx()
    other.plot(x, rating, color=_COLORS[4], lw=1.6)
    other.fill_between(x, rating - half, rating + half, color=_COLORS[4], alpha=0.15, lw=0)
    other.set_ylabel("rating")
    other.spines["top"].set_visible(False)
    axes.plot([], [], color=_COLORS[4], lw=1.6, label="rating, 95 % confidence (right)")


def win_rates(out: PathLike, names: Sequence[str], rates: np.ndarray, games: np.ndarray, title: str) -> Path:
    """A heat map: how often each player wins against each other one; pairs that never met are blank."""
    n = len(names)
    with _picture(Path(out), title, (3.2 + 0.42 * max(n, 5), 2.0 + 0.38 * max(n, 5))) as axes:
        shown = axes.imshow(np.where(games > 0, rates, np.nan), cmap="RdYlGn", vmin=0.0, vmax=1.0)
        for i, j in zip(*np.nonzero(games > 0), strict=True):
            axes.text(j, i, f"{100 * rates[i, j]:.0f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(n), names, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(n), names, fontsize=8)
        axes.figure.colorbar(shown, shrink=0.8, label="won by the row, draws a half")
    return Path(out)


def ratings(
    out: PathLike,
    curve: Sequence[Mapping[str, Any]],
    points: Mapping[str, Sequence[tuple[float, float, float]]],
    title: str,
) -> Path:
    """Ratings over environment steps: of each player while it trained, by its rows, and of its snapshots, (steps,
    rating, half width of its interval) each."""
    with _figure(Path(out), title, None) as axes:
        for i, (name, found) in enumerate(points.items()):
            color = _COLORS[i % len(_COLORS)]
            x, rating = series(curve, RATING if name == "default" else side_key(name, RATING))
            if len(x):
                axes.plot(x, rating, color=color, lw=1.6, label=f"{name} while it trained")
            steps, mean, half = np.array(found, float).reshape(-1, 3).T
            axes.errorbar(
                steps, mean, half, fmt="o", ms=4, lw=1.0, capsize=2, color=color, label=f"snapshots of {name}"
            )
        axes.set_ylabel("rating")
    return Path(out)


def opponents(out: PathLike, rows: Sequence[Mapping[str, Any]], title: str) -> Path | None:
    """How games against each opponent of evaluations ended, over environment steps; None where there was none."""
    names = [
        k[5:-4] for k in dict.fromkeys(k for row in rows for k in row) if k.startswith("eval/") and k[-4:] == "/win"
    ]
    if not names:
        return None
    with _sheet(Path(out), (min(4.0 * len(names), 16.0), 3.6)) as figure:
        figure.suptitle(title, fontweight="bold")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
            parts = [series(rows, f"eval/{name}/{how}") for how in ("win", "draw", "loss")]
            axes.stackplot(
                parts[0][0], *(100 * y for _, y in parts), labels=("won", "drawn", "lost"), alpha=0.75,
                colors=[_COLORS[i] for i in (2, 7, 3)],
            )  # fmt: skip
            rating = series(rows, f"eval/{name}/rating")[1]
            shown = name if len(name) <= 30 else f"…{name[-29:]}"
            axes.set_title(f"against {shown}" + (f" (rating {rating[-1]:,.0f})" if len(rating) else ""), fontsize=9)
            axes.set(xlabel="environment steps", ylim=(0, 100))
            axes.margins(x=0)
        figure.axes[0].set_ylabel("% of games")
        figure.axes[-1].legend(loc="lower right", fontsize=8)
    return Path(out)


def overlay(
    runs: Mapping[str, Sequence[PathLike]],
    out: PathLike,
    title: str = "",
    threshold: float | None = None,
) -> Path:
    """Several curves in one figure: {label: run directories (seeds)}."""
    if not runs:
        raise DataError("a figure needs at least one run, got none")
    with _figure(Path(out), title or "Learning curves", threshold) as axes:
        given = {k: [v] if isinstance(v, (str, Path)) else list(v) for k, v in runs.items()}
        curves = {label: [_returns(read_results(d)) for d in dirs] for label, dirs in given.items()}
        empty = [label for label, seeds in curves.items() if not any(len(x) for x, _ in seeds)]
        for i, (label, seeds) in enumerate(curves.items()):
            if label not in empty or len(empty) == len(curves):
                _draw(axes, seeds, _COLORS[i % len(_COLORS)], label, [str(d) for d in given[label]])
        if empty:
            logger.warning("not drawn, because no episode has finished there: %s", ", ".join(empty))
    return Path(out)


def histograms(
    values: Mapping[str, Sequence[float]], bars: Mapping[str, tuple[list[str], list[int]]], out: PathLike, title: str
) -> None:
    """How numbers are distributed, and how often each of some labels came, side by side."""
    with _sheet(Path(out)) as figure:
        figure.suptitle(title)
        panels = figure.subplots(1, len(values) + len(bars), squeeze=False)[0]
        figure.set_size_inches(4 * len(panels), 4)
        for axes, (name, x) in zip(panels, values.items(), strict=False):
            axes.hist(x, min(40, max(1, len(set(x)))), color=_COLORS[0])
            axes.set_xlabel(name)
        for axes, (name, (labels, counts)) in zip(panels[len(values) :], bars.items(), strict=True):
            axes.bar(range(len(counts)), counts, color=_COLORS[1])
            axes.set_xlabel(name)
            few = list(range(0, len(labels), max(1, len(labels) // 8)))
            axes.set_xticks(few, [labels[i] for i in few])


def _draw(
    axes: Any, curves: Sequence[tuple[np.ndarray, np.ndarray]], color: str, label: str, names: Sequence[str]
) -> None:
    """A curve, or thin ones with their mean and its band."""
    curves = [c for c in curves if len(c[0])]
    if not curves:
        raise DataError(f"{', '.join(names) or 'no run'}: no finished episode yet, so there is no curve to draw")
    x, mean, std = mean_and_std(curves)
    if len(curves) > 1:
        label = f"{label}, {len(curves)} seeds, mean ± std"
        axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.18, lw=0)
        for seed in curves:
            axes.plot(*seed, color=color, lw=0.8, alpha=0.55, marker=_dot(seed[0]), ms=4)
    axes.plot(x, mean, color=color, lw=2.2 if len(curves) > 1 else 1.8, marker=_dot(x), label=label)


def _dot(x: np.ndarray) -> str:
    """A curve that stays at one step, as one of learning from files may, is a dot: it has no line."""
    return "o" if len(set(x)) == 1 else ""


@contextmanager
def _figure(out: Path | None, title: str, threshold: float | None) -> Iterator[Any]:
    """The axes of a learning curve in our style."""
    with _picture(out, title) as axes:
        yield axes
        _style(axes, threshold)


@contextmanager
def _picture(out: Path | None, title: str, size: tuple[float, float] = _SIZE) -> Iterator[Any]:
    """The axes of a figure."""
    with _sheet(out, size) as figure:
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes


@contextmanager
def _sheet(out: Path | None, size: tuple[float, float] = _SIZE) -> Iterator[Any]:
    """A figure, which when the block ends is saved to `out`, or shown in a window (None)."""
    if out is None:
        import matplotlib.pyplot as plt

        figure: Any = plt.figure(figsize=size, layout="constrained")
    else:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained", dpi=150)  # no pyplot: no global state
        FigureCanvasAgg(figure)
    yield figure
    if out is None:
        plt.show()
        plt.close(figure)
        return
    kind, known = out.suffix.lstrip(".").lower(), figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ConfigError(f"{out}: expected a picture file that ends in .{', .'.join(sorted(known))}")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    write_atomic(out, picture.getvalue())


def _style(axes: Any, threshold: float | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if threshold is not None:
        label = f"threshold {threshold:,g}"
        axes.axhline(threshold, color="#444", lw=1.1, ls=(0, (5, 4)), label=label, zorder=1)
    axes.set_xlabel(axes.get_xlabel() or "environment steps")
    axes.set_ylabel(axes.get_ylabel() or "episode return")
    axes.xaxis.set_major_locator(MaxNLocator(8))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(thousands))
    axes.grid(color="#d9d9d9", lw=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")


def thousands(x: float, _: Any = None) -> str:
    """12,500 · 0.25 · 1.5M: tick labels that stay short."""
    if abs(x) >= 1e6:
        return f"{x / 1e6:,g}M"
    return f"{x:,.0f}" if float(x).is_integer() else f"{x:g}"


# --- searches ---------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A key that was searched: a range, or its values as text."""

    name: str
    log: bool = False
    values: Sequence[str] = ()


def parallel_coordinates(
    axes: Sequence[Axis],
    trials: Sequence[Sequence[Any]],
    scores: Sequence[float],
    whole: Sequence[bool],
    out: Path,
    title: str,
) -> None:
    """A line for each trial, through its values to its score; those that were not `whole` are drawn thin."""
    columns = [_column(axis, [trial[i] for trial in trials]) for i, axis in enumerate(axes)]
    columns.append(_column(Axis("score"), list(scores)))
    heights = np.array([[height(trial[i]) for i, (height, _) in enumerate(columns[:-1])] for trial in trials])
    last = np.array([columns[-1][0](score) for score in scores])
    with _picture(out, title, (max(8.0, 1.6 * len(columns)), 4.8)) as plot:
        from matplotlib import colormaps

        for i in np.argsort(last):  # the best ones on top
            style = {"lw": 1.6, "alpha": 0.85} if whole[i] else {"lw": 0.7, "alpha": 0.45, "ls": (0, (4, 3))}
            plot.plot(range(len(columns)), [*heights[i], last[i]], color=colormaps["viridis"](last[i]), **style)
        for x, (_, ticks) in enumerate(columns):
            plot.axvline(x, color="#444", lw=1.0, zorder=1)
            for at, label in ticks:
                plot.annotate(label, (x, at), (4, 0), "data", "offset points", fontsize=8, va="center", bbox=_PALE)
        plot.set_xticks(range(len(columns)), [*(axis.name for axis in axes), "score"], fontsize=10)
        plot.set_yticks([])
        plot.spines[["left", "bottom"]].set_visible(False)
        plot.set_xlim(-0.1, len(columns) - 0.6)


def _column(axis: Axis, values: Sequence[Any]) -> tuple[Callable[[Any], float], list[tuple[float, str]]]:
    """How high a value stands on an axis, from 0 to 1, and what is written there."""
    if axis.values:
        most = max(1, len(axis.values) - 1)
        ticks = [(i / most, text if len(text) <= 14 else f"{text[:13]}…") for i, text in enumerate(axis.values)]
        return lambda value: axis.values.index(value) / most, ticks
    low, high = min(values), max(values)
    if low == high:
        return lambda value: 0.5, [(0.5, f"{low:.3g}")]
    scale = math.log if axis.log else float
    first, last = scale(low), scale(high)
    at = [first + (last - first) * part for part in (0, 0.25, 0.5, 0.75, 1)]
    ticks = [((x - first) / (last - first), f"{math.exp(x) if axis.log else x:.3g}") for x in at]
    return lambda value: (scale(value) - first) / (last - first), ticks


def bars(shares: Mapping[str, float], out: Path, title: str) -> None:
    """A bar for each name, the longest on top."""
    ranked = sorted(shares.items(), key=lambda item: item[1])
    with _picture(out, title, (8.0, 1.2 + 0.4 * len(ranked))) as plot:
        drawn = plot.barh([name for name, _ in ranked], [share for _, share in ranked], color=_COLORS[0], height=0.6)
        plot.bar_label(drawn, [f"{share:.0%}" for _, share in ranked], padding=4, fontsize=9)
        plot.set_xticks([])
        plot.set_xlim(0, max(1e-9, *shares.values()) * 1.12)
        plot.spines["bottom"].set_visible(False)
