"""Metrics by number, rows without NaN, and sinks that survive kills and full disks."""

from __future__ import annotations

import builtins
import csv
import errno
import io
import json
import sys
import types

import numpy as np
import pytest
import yaml
from rich.console import Console

from bray.errors import CheckpointError, ConfigError, DataError
from bray.metrics import (
    CsvSink,
    EpisodeStats,
    JsonlSink,
    Sinks,
    TensorBoardSink,
    TerminalSink,
    Timer,
    Watchdog,
    duration,
    flatten_row,
    pretty_print,
    short,
)

# --- rows


def test_rows_hold_plain_finite_scalars():
    import torch

    row = flatten_row(
        {
            "a": np.float32(0.5),
            "b": {"c": np.int64(3), "d": float("nan")},
            "e": float("-inf"),
            "t": torch.tensor(2.5),
            "n": None,
            "s": "x",
        }
    )
    assert row == {
        "a": 0.5,
        "b/c": 3,
        "b/d": None,
        "e": None,
        "t": 2.5,
        "n": None,
        "s": "x",
        "nan_metrics": ["b/d", "e"],
    }
    assert type(row["b/c"]) is int
    assert flatten_row(row) == row  # a second pass forgets nothing


def test_episode_statistics_say_when_there_is_none():
    stats = EpisodeStats()
    nothing = {
        "episode_return_mean": None,
        "episode_return_min": None,
        "episode_return_max": None,
        "episode_length_mean": None,
    }
    assert stats.row() == nothing | {"episodes_total": 0, "episodes_this_iter": 0}


def test_episode_statistics_over_the_last_hundred():
    stats = EpisodeStats()
    for i in range(150):
        stats.add(i, 2 * i)
    assert stats.row() == {
        "episode_return_mean": 99.5,
        "episode_return_min": 50.0,
        "episode_return_max": 149.0,
        "episode_length_mean": 199.0,
        "episodes_total": 150,
        "episodes_this_iter": 150,
    }
    stats.add(1000.0, 10)
    row = stats.row()
    assert (row["episodes_total"], row["episodes_this_iter"], row["episode_return_min"]) == (151, 1, 51.0)


def test_returns_and_lengths_may_come_apart():
    stats = EpisodeStats(window=3)
    stats.add_returns([1.0, 2.0, 6.0], finished=50)  # of 50 episodes the newest three
    assert stats.row()["episode_length_mean"] is None
    stats.add_lengths([10, 20])
    row = stats.row()
    assert (row["episode_return_mean"], row["episode_length_mean"], row["episodes_total"]) == (3.0, 15.0, 50)
    resumed = EpisodeStats(window=3)
    resumed.set_state(stats.get_state())
    assert resumed.row() == stats.row()


def test_episode_statistics_resume_exactly():
    rng = np.random.default_rng(0)
    straight, first = EpisodeStats(window=5), EpisodeStats(window=5)
    data = [(float(r), int(n)) for r, n in zip(rng.normal(size=20), rng.integers(1, 9, 20), strict=True)]
    for pair in data[:12]:
        straight.add(*pair)
        first.add(*pair)
    resumed = EpisodeStats(window=5)
    resumed.set_state(first.get_state())
    for pair in data[12:]:
        straight.add(*pair)
        resumed.add(*pair)
    assert resumed.row() == straight.row()
    with pytest.raises(DataError, match="2 returns, 1 lengths of 1"):
        resumed.set_state({"returns": [1.0, 2.0], "lengths": [1], "total": 1, "this_iter": 0})
    with pytest.raises(DataError, match="KeyError"):
        resumed.set_state({})
    with pytest.raises(ConfigError, match="got 0"):
        EpisodeStats(0)


def test_timer_and_watchdog():
    synced = []
    with Timer(sync=lambda: synced.append(1)) as t:
        pass
    assert t.seconds >= 0
    assert len(synced) == 2

    def hang():
        while True:
            pass

    with pytest.raises(TimeoutError, match=r"the game took longer than 0\.01 s"), Watchdog(0.01, "the game"):
        hang()
    with Watchdog(1000):
        pass  # ends quietly, and the alarm with it
    import signal

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(ConfigError, match="time > 0"), Watchdog(0):
        pass


# --- files


def rows(first, last):
    out = []
    for i in range(first, last + 1):
        row = {"training_iteration": i, "env_steps_total": i * 100, "episode_return_mean": None if i < 3 else i / 3}
        if i >= 4:
            row["loss/policy"] = -1.0 / i
        if i == 6:
            row["note"] = 'a "quoted", line\nbroken'
        out.append(row)
    return out


def write(sink, some):
    for row in some:
        sink.write(row)


def test_jsonl_has_one_line_per_iteration_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "deep" / "result.jsonl")
    sink.write({"training_iteration": 1, "x": float("nan"), "y": {"z": np.float64(0.1)}})
    text = (tmp_path / "deep" / "result.jsonl").read_text()
    assert json.loads(text) == {"training_iteration": 1, "x": None, "y/z": 0.1, "nan_metrics": ["x"]}
    assert text.count("\n") == 1


@pytest.mark.parametrize("kind", [JsonlSink, CsvSink])
@pytest.mark.parametrize("killed_at", [2, 3, 5, 6, 8])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path, kind, killed_at):
    straight = kind(tmp_path / "straight")
    write(straight, rows(1, 8))
    straight.close()
    sink = kind(tmp_path / "resumed")
    write(sink, rows(1, killed_at))
    sink.close()
    with open(tmp_path / "resumed", "ab") as f:
        f.write(b'{"training_iteration": 9, "half')  # killed in the middle of a line
    sink = kind(tmp_path / "resumed")
    sink.truncate_after(2)  # the last checkpoint
    write(sink, rows(3, 8))
    sink.close()
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "straight").read_bytes()


@pytest.mark.parametrize("kind", [JsonlSink, CsvSink])
def test_truncating_to_nothing_and_beyond(tmp_path, kind):
    sink = kind(tmp_path / "f")
    sink.truncate_after(3)
    write(sink, rows(1, 3))
    before = (tmp_path / "f").read_bytes()
    sink.truncate_after(99)
    assert (tmp_path / "f").read_bytes() == before
    sink.truncate_after(0)
    assert (tmp_path / "f").read_bytes() == (b"" if kind is JsonlSink else before.splitlines(keepends=True)[0])


def test_csv_grows_a_column_when_a_key_appears(tmp_path):
    sink = CsvSink(tmp_path / "progress.csv")
    write(sink, rows(1, 6))
    sink.close()
    with open(tmp_path / "progress.csv", newline="") as f:
        got = list(csv.DictReader(f))
    assert list(got[0]) == ["training_iteration", "env_steps_total", "episode_return_mean", "loss/policy", "note"]
    assert [r["training_iteration"] for r in got] == ["1", "2", "3", "4", "5", "6"]
    assert [r["loss/policy"] for r in got] == ["", "", "", "-0.25", "-0.2", str(-1 / 6)]
    assert got[0]["episode_return_mean"] == ""
    assert got[5]["note"] == 'a "quoted", line broken'
    assert [p.name for p in tmp_path.iterdir()] == ["progress.csv"]
    again = CsvSink(tmp_path / "progress.csv")  # a second process knows the header
    again.write({"training_iteration": 7})
    assert (tmp_path / "progress.csv").read_text().splitlines()[-1] == "7,,,,"


def test_foreign_files_are_refused_when_resuming(tmp_path):
    (tmp_path / "result.jsonl").write_text("hello\n")
    with pytest.raises(DataError, match=r"result\.jsonl:1: expected a row with 'training_iteration', got b'hello"):
        JsonlSink(tmp_path / "result.jsonl").truncate_after(1)
    (tmp_path / "progress.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="expected a column 'training_iteration', got a, b"):
        CsvSink(tmp_path / "progress.csv").truncate_after(1)


class FullDisk:
    """A file that takes a few bytes and then no more, as long as `full`."""

    full = False

    def __init__(self, real):
        self.real = real

    def write(self, data):
        self.real.write(data[:7] if self.full else data)
        self.flush()

    def flush(self):
        self.real.flush()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.real.close()


@pytest.mark.parametrize("kind", [JsonlSink, CsvSink])
def test_a_full_disk_leaves_no_half_line_and_says_so(tmp_path, kind, monkeypatch):
    path, real = tmp_path / "rows", open

    def on_disk(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        return FullDisk(opened) if mode == "ab" else opened

    monkeypatch.setattr(builtins, "open", on_disk)
    sink = kind(path)
    write(sink, rows(1, 2))
    before = path.read_bytes()
    seen = []

    class Other:
        def write(self, row):
            seen.append(row["training_iteration"])

        def truncate_after(self, iteration, env_steps=None): ...
        def close(self): ...

    monkeypatch.setattr(FullDisk, "full", True)
    with pytest.raises(CheckpointError, match=rf"{kind.__name__} could not write a row \({path}\): the disk is full"):
        Sinks([sink, Other()]).write(rows(3, 3)[0])
    assert path.read_bytes() == before
    assert seen == [3]  # the others got it
    monkeypatch.setattr(FullDisk, "full", False)
    sink.write(rows(3, 3)[0])  # space again
    assert len(path.read_bytes()) > len(before)


def test_sinks_fan_out_and_close(tmp_path):
    with Sinks([JsonlSink(tmp_path / "a"), CsvSink(tmp_path / "b")]) as sinks:
        sinks.write({"training_iteration": 1, "loss": {"policy": 0.5}})
        sinks.write({"training_iteration": 2, "loss": {"policy": 0.25}})
        sinks.truncate_after(1, 100)
    assert (tmp_path / "a").read_text() == '{"training_iteration": 1, "loss/policy": 0.5}\n'
    assert (tmp_path / "b").read_text() == "training_iteration,loss/policy\n1,0.5\n"


def test_errors_that_are_not_the_disks_pass_through(tmp_path):
    class Broken(JsonlSink):
        def write(self, row):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Sinks([Broken(tmp_path / "a")]).write({})


# --- TensorBoard


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_scalars_read_back_over_env_steps(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    write(sink, rows(1, 5))
    sink.close()
    got = scalars(tmp_path / "tb")
    assert got["episode_return_mean"] == [(300, 1.0), (400, 1.333333), (500, 1.666667)]  # None is left out
    assert got["loss/policy"] == [(400, -0.25), (500, -0.2)]
    assert got["training_iteration"] == [(i * 100, i) for i in range(1, 6)]


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path):
    sink = TensorBoardSink(tmp_path)
    write(sink, rows(1, 6))
    sink.close()
    sink = TensorBoardSink(tmp_path)
    sink.truncate_after(4, 400)
    write(sink, rows(5, 7))
    sink.close()
    assert scalars(tmp_path)["training_iteration"] == [(i * 100, i) for i in range(1, 8)]


# --- the terminal


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def test_plain_lines_every_few_seconds_and_the_last_one():
    now = [0.0]
    console = plain_console()
    sink = TerminalSink(stop={"env_steps_total": 1000}, console=console, every=5, clock=lambda: now[0])
    for i in range(1, 9):
        now[0] = i * 2.0
        sink.write(
            {
                "training_iteration": i,
                "env_steps_total": i * 100,
                "env_steps_per_second": 12345.6,
                "episode_return_mean": None,
            }
        )
    sink.close()
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["iter 1", "iter 4", "iter 7", "iter 8"]
    assert lines[0] == "iter 1  steps 100  12,346/s  no finished episode yet  10%"


def test_plain_line_shows_returns_losses_time_and_nan():
    console = plain_console()
    sink = TerminalSink(console=console)
    sink.write(
        {
            "training_iteration": 3,
            "env_steps_total": 12288,
            "episode_return_mean": 83.21,
            "episode_length_mean": 83.2,
            "loss/policy": -0.01234,
            "loss/value": float("nan"),
            "eval/return_mean": 480.0,
            "time_total_s": 75.0,
        }
    )
    assert console.file.getvalue() == (
        "iter 3  steps 12,288  return 83.2  length 83.2  eval/return_mean 480  loss/policy -0.012  1:15  NOT A "
        "NUMBER: loss/value\n"
    )


def test_what_learns_from_files_alone_counts_gradient_steps():
    plain, table = plain_console(), Console(file=io.StringIO(), force_terminal=True, width=120, height=30)
    sinks = [TerminalSink(console=x, clock=iter(range(0, 90, 10)).__next__) for x in (plain, table)]
    for steps in (0, 100, 300):
        row = {"training_iteration": 1 + steps // 100, "env_steps_total": 20_000, "env_steps_per_second": 1e8}
        row |= {"learner_steps_total": steps, "time_this_iter_s": 4.0, "episodes_total": 0, "data/episodes": 5}
        for sink in sinks:
            sink.write(row)
    assert plain.file.getvalue().splitlines() == [
        "iter 1  gradient steps 0  learns from 5 episodes of files",
        "iter 2  gradient steps 100  25/s  learns from 5 episodes of files",
        "iter 4  gradient steps 300  50/s  learns from 5 episodes of files",
    ]
    for sink in sinks:
        sink.close()
    shown = table.file.getvalue()
    assert "gradient steps" in shown
    assert "env steps" not in shown


def test_live_table_in_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=30)
    now = [0.0]
    sink = TerminalSink("PPO CartPole-v1", {"episode_return_mean": 475}, console, clock=lambda: now[0])
    sink.write({"training_iteration": 1, "env_steps_total": 1024, "episode_return_mean": None})
    now[0] = 1.0
    sink.write(
        {
            "training_iteration": 2,
            "env_steps_total": 2048,
            "episode_return_mean": 75.0,
            "episode_return_min": 9.0,
            "episode_return_max": 200.0,
        }
    )
    now[0] = 2.0
    sink.write(
        {
            "training_iteration": 3,
            "env_steps_total": 3072,
            "episode_return_mean": 275.0,
            "loss/value": 0.5,
            "bad": float("inf"),
        }
    )
    sink.close()
    out = console.file.getvalue()
    for part in (
        "PPO CartPole-v1",
        "no finished episode yet",
        "75  (9 … 200)",
        "3,072",
        "loss/value",
        "50% of episode_return_mean 475",
        "not a number: bad",
    ):
        assert part in out, part


def test_progress_counts_totals_from_zero_and_returns_from_the_first():
    sink = TerminalSink(stop={"episode_return_mean": 100.0, "env_steps_total": 1000}, console=plain_console())
    assert sink.progress({"env_steps_total": 100, "episode_return_mean": None}) == pytest.approx(0.1)
    assert sink.progress({"env_steps_total": 200, "episode_return_mean": -100.0}) == pytest.approx(0.2)
    assert sink.progress({"env_steps_total": 300, "episode_return_mean": 50.0}) == pytest.approx(0.75)
    assert sink.progress({"env_steps_total": 300, "episode_return_mean": 500.0}) == 1.0
    assert TerminalSink(console=plain_console()).progress({}) is None
    assert sink.progress({}) == 0.0
    done = TerminalSink(stop={"episode_return_mean": 10.0}, console=plain_console())
    assert done.progress({"episode_return_mean": 20.0}) == 1.0  # reached at once: nothing to divide by


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1234567, "1,234,567"),
        (475.0, "475"),
        (83.21, "83.2"),
        (0.01234, "0.012"),
        (1.2e-5, "1.2e-05"),
        (-12345.6, "-12,346"),
    ],
)
def test_short_numbers(x, text):
    assert short(x) == text


def test_durations():
    assert [duration(s) for s in (3.44, 75, 3723)] == ["3.4 s", "1:15", "1:02:03"]


def test_pretty_print_is_yaml_without_the_config():
    text = pretty_print(
        {
            "training_iteration": 1,
            "config": {"lr": 1},
            "loss": {"policy": np.float32(0.5)},
            "x": float("nan"),
            "name": "ä",
        }
    )
    assert "config" not in text
    assert yaml.safe_load(text) == {"training_iteration": 1, "loss": {"policy": 0.5}, "x": None, "name": "ä"}


def test_a_return_of_long_ago_is_told_as_one():
    out = io.StringIO()
    sink = TerminalSink(console=Console(file=out, width=200), every=0.0)
    for i in range(1, 13):
        sink.write({"env_steps_total": 100 * i, "episode_return_mean": 7.0, "episodes_this_iter": int(i == 2)})
    lines = out.getvalue().splitlines()
    assert [i for i, line in enumerate(lines, 1) if "return 7 (of step 200, none since)" in line] == [12]


def test_a_notebook_sees_one_table_that_changes(monkeypatch):
    """IPython's part is two names; what it is given is HTML."""
    shown, now = [], [0.0]
    page = types.ModuleType("IPython.display")
    page.HTML = str
    page.display = lambda html, display_id: shown.append(html) or types.SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    stdout = io.StringIO()
    sink = TerminalSink(
        "PPO on X", {"env_steps_total": 300}, Console(file=stdout, force_jupyter=True), clock=lambda: now[0]
    )
    for i, seconds in enumerate((0.0, 0.1, 1.0), 1):  # the second comes too early to be shown
        now[0] = seconds
        sink.write({"training_iteration": i, "env_steps_total": 100 * i, "episode_return_mean": 12.5, "loss/a": 1.0})
    sink.close()
    assert len(shown) == 2
    assert all(html.startswith("<pre") and "PPO on X" in html and "12.5" in html for html in shown)
    assert "100% of env_steps_total 300" in shown[1]
    assert stdout.getvalue() == ""
