"""Progress for people in a terminal."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from bray.metrics.rows import (
    ENV_STEPS,
    GRADIENT_STEPS,
    HEALTH,
    ITERATION,
    NAN_METRICS,
    RATING,
    RATING_CI,
    SIDE,
    Row,
    flatten_row,
    from_files,
)

_NOTEBOOK_S = 0.5  # between two pictures of the table in a notebook
_STALE = 10  # rows without the end of an episode, after which their return is told as an old one


def short(x: Any) -> str:
    """A number for people: 12,345 · 0.0123 · 1.2e-05 · – for None."""
    if x is None:
        return "–"
    if isinstance(x, (bool, str, list)):
        return str(x)
    if isinstance(x, int) or (float(x).is_integer() and abs(x) < 1e15):
        return f"{int(x):,}"
    size = abs(x)
    if size >= 1000:
        return f"{x:,.0f}"
    if size >= 10:
        return f"{x:.1f}"
    return f"{x:.3f}" if size >= 0.01 else f"{x:.2g}"


def duration(seconds: float) -> str:
    """1:02:03, 2:03 or 3.4 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


class TerminalSink:
    """Progress for people: a table that changes in a terminal or a notebook, else one line every `every` seconds."""

    def __init__(
        self,
        title: str = "",
        stop: Mapping[str, float] | None = None,
        console: Any = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console

        self.console = console or Console()
        self.title, self.stop, self.every, self._clock = title, dict(stop or {}), every, clock
        self._first: dict[str, float] = {}
        self._last: Row | None = None
        self._rate: float | None = None
        self._shown: Row | None = None
        self._at = -math.inf
        self._live: Any = None
        self._cell: Any = None  # where a notebook shows the table
        self._ended: tuple[int, Any] = 0, None  # rows since an episode has ended, and the steps of the run then

    def progress(self, row: Row) -> float | None:
        """How near the run is to the first of its stop conditions to come, 0..1; None without one."""
        done = []
        for key, target in self.stop.items():
            x = row.get(key)
            if isinstance(x, (int, float)) and isinstance(target, (int, float)):
                # totals start at 0; a return starts wherever the first agent's was
                start = 0.0 if "total" in key or key == ITERATION else self._first.setdefault(key, float(x))
                done.append(1.0 if x >= target else (x - start) / (target - start))
        return min(1.0, max(0.0, *done)) if done else 0.0 if self.stop else None

    def write(self, row: Row) -> None:
        row = flatten_row(row)
        self._rate, self._last, now = self._speed(row), row, self._clock()
        ended = row.get("episodes_this_iter", 1) > 0
        self._ended = (0, row.get(ENV_STEPS)) if ended else (self._ended[0] + 1, self._ended[1])
        fraction = self.progress(row)
        wait = _NOTEBOOK_S if self.console.is_jupyter else 0.1 if self.console.is_terminal else self.every
        if now - self._at < wait:
            return
        self._at, self._shown = now, row
        if self.console.is_jupyter:
            self._show_in_cell(self._table(row, fraction))
        elif self.console.is_terminal:
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self.console, auto_refresh=False)
                self._live.start()
            self._live.update(self._table(row, fraction), refresh=True)
        else:
            self.console.print(self._text(row, fraction), markup=False, highlight=False, soft_wrap=True)

    def _show_in_cell(self, table: Any) -> None:
        """The table in the place of the one before: rich would put a new one into the page each time."""
        from IPython.display import HTML, display
        from rich.console import Console

        page = Console(record=True, file=io.StringIO(), width=100)
        page.print(table)
        html = HTML(page.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>"))
        if self._cell is None:
            self._cell = display(html, display_id=True)
        else:
            self._cell.update(html)

    def _text(self, row: Row, fraction: float | None) -> str:
        steps = (
            f"gradient steps {short(row.get(GRADIENT_STEPS))}"
            if from_files(row)
            else f"steps {short(row.get(ENV_STEPS))}"
        )
        parts = [f"iter {short(row.get(ITERATION))}", steps]
        if self._rate is not None:
            parts.append(f"{short(round(self._rate))}/s")
        if row.get("episode_return_mean") is None:
            parts.append(_no_return(row))
        else:
            returned = f"return {short(row['episode_return_mean'])}{self._stale()}"
            parts += [returned, f"length {short(row.get('episode_length_mean'))}"]
        parts += [f"{k} {short(v)}" for k, v in _main(row)]
        if row.get("time_total_s") is not None:
            parts.append(duration(row["time_total_s"]))
        if fraction is not None:
            parts.append(f"{fraction:.0%}")
        if row.get(NAN_METRICS):
            parts.append("NOT A NUMBER: " + ", ".join(row[NAN_METRICS]))
        if row.get(HEALTH):
            parts.append(f"LOOKS WRONG: {row[HEALTH]}")
        return "  ".join(parts)

    def _speed(self, row: Row) -> float | None:
        """What it does in a second: steps of the environment, or gradient steps where it learns from files alone."""
        if not from_files(row):
            return row.get("env_steps_per_second")
        before, now = (None if r is None else r.get(GRADIENT_STEPS) for r in (self._last, row))
        seconds = row.get("time_this_iter_s")
        if not seconds or now is None or before is None:
            return None
        return self._rate if now == before else (now - before) / seconds  # the last row may bring none

    def _stale(self) -> str:
        """After a return that is an old one: no episode has ended for a while."""
        rows, steps = self._ended
        return f" (of step {short(steps)}, none since)" if rows >= _STALE else ""

    def _table(self, row: Row, fraction: float | None) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 3))
        for justify in ("left", "right", "left", "right"):
            grid.add_column(justify=justify)
        ranged = row.get("episode_return_min"), row.get("episode_return_max")
        returned = short(row.get("episode_return_mean"))
        if row.get("episode_return_mean") is None:
            returned = _no_return(row)
        elif None not in ranged:
            returned += f"  ({short(ranged[0])} … {short(ranged[1])}){self._stale()}"
        of_files = from_files(row)
        cells = [
            ("iteration", short(row.get(ITERATION))),
            ("return", returned),
            ("gradient steps", short(row.get(GRADIENT_STEPS)))
            if of_files
            else ("env steps", short(row.get(ENV_STEPS))),
            ("episode length", short(row.get("episode_length_mean"))),
            ("steps/s", short(None if self._rate is None else round(self._rate))),
            ("time", duration(row.get("time_total_s") or 0.0)),
            *((k, short(v)) for k, v in _main(row)),
        ]
        for i in range(0, len(cells), 2):
            (a, x), (b, y) = cells[i], cells[i + 1] if i + 1 < len(cells) else ("", "")
            grid.add_row(Text(a, "dim"), Text(x, "bold"), Text(b, "dim"), Text(y, "bold"))
        parts: list[Any] = [grid]
        if fraction is not None:
            goal = ", ".join(f"{k} {short(v)}" for k, v in self.stop.items())
            bar = Table.grid(padding=(0, 2))
            bar.add_row(ProgressBar(total=1.0, completed=fraction, width=36), Text(f"{fraction:.0%} of {goal}", "dim"))
            parts += [Text(), bar]
        if row.get(NAN_METRICS):
            parts.append(Text("not a number: " + ", ".join(row[NAN_METRICS]), "bold red"))
        if row.get(HEALTH):
            parts.append(Text(f"looks wrong: {row[HEALTH]}", "yellow"))
        return Panel(Group(*parts), title=Text(self.title), title_align="left", expand=False, border_style="dim")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """What was printed stays printed; the next row is shown at once."""
        self._at = -math.inf

    def close(self) -> None:
        """Show the last row if it was not, and leave the terminal as it was."""
        if self._last is not None and self._shown is not self._last:
            self._at = -math.inf
            self.write(self._last)
        if self._live is not None:
            self._live.stop()
            self._live = None


def _main(row: Row, most: int = 6) -> list[tuple[str, Any]]:
    """The numbers worth a place on the screen besides the fixed ones: what self-play comes to and evaluation first,
    then losses."""
    out: list[tuple[str, Any]] = []
    for key in [k for k in row if k.endswith(RATING) and row[k] is not None]:
        side = key.removesuffix(RATING)
        out.append((f"rating {side.removeprefix(SIDE)}".rstrip(" /"), f"{row[key]:.0f} ± {row[side + RATING_CI]:.0f}"))
    for key in [k for k in row if k.endswith("/win") and not k.startswith(SIDE)]:
        group = key.removesuffix("/win")
        shares = (row.get(f"{group}/{how}") or 0.0 for how in ("win", "draw", "loss"))
        whom = "past selves" if group == "league" else group.removeprefix("eval/")
        rating = f", rating {row[key]:.0f}" if (key := f"{group}/rating") in row and group != "league" else ""
        out.append((f"won, drawn, lost against {whom}", " ".join(f"{x:.0%}" for x in shares) + rating))
    keys = [k for k in row if k.startswith("eval/") and k.endswith("mean")]
    keys += [k for k in row if k.startswith(SIDE) and k.endswith("/episode_return_mean")]
    keys += [k for k in row if k.startswith("loss/")]
    return [*out, *((k, row[k]) for k in keys if isinstance(row[k], (int, float)))][:most]


def _no_return(row: Row) -> str:
    """Why a row has no return of episodes that were played."""
    if "data/episodes" in row:
        return f"learns from {short(row['data/episodes'])} episodes of files"
    return "no finished episode yet"
