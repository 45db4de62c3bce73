"""`bray launch` is ended by a signal to its process, its process group or all its processes, and keeps what it has
learnt. Nothing is a stand-in here."""

import contextlib
import os
import signal
import time

import pytest
from launch_end_for_tests import Launched

from bray.figures import read_results
from bray.rundir import RunDir

PATIENCE = 120.0
"""Seconds that a busy machine may take; a quiet one takes 2 to 4."""


def to_process(run):
    os.kill(run.process.pid, signal.SIGTERM)


def to_group(run):
    os.killpg(run.process.pid, signal.SIGTERM)


def to_every_process(run):
    """As systemd does by default (KillMode=control-group)."""
    for pid in run.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def check_end(run, send):
    """All that was published is on disk, and no process is left. Returns how many seconds it took."""
    run.wait_until_it_trains()
    send(run)
    seconds, code = run.ended(PATIENCE)
    assert code == 0, run.stderr()
    assert run.lines[-1].startswith("stopped; the same command goes on")
    saved = max(RunDir(run.path).versions("model1"))
    assert saved >= run.step_seen() > 0
    assert RunDir(run.path).pointer("latest") == saved
    assert read_results(run.path)[-1]["learner_steps_total"] == saved
    check_nothing_is_left(run)
    return seconds


def check_nothing_is_left(run):
    until = time.monotonic() + 5.0
    while run.pids() and time.monotonic() < until:
        time.sleep(0.1)
    assert run.pids() == []


def test_sigterm_to_the_group_of_one_process(tmp_path):
    with Launched(tmp_path, "local") as run:
        check_end(run, to_group)


def test_sigterm_while_games_wait_for_the_trainer(tmp_path):
    with Launched(tmp_path, "local", games=4) as run:
        check_end(run, to_every_process)


@pytest.mark.slow
@pytest.mark.parametrize("send", [to_process, to_group, to_every_process])
def test_sigterm_on_ray(send, tmp_path):
    with Launched(tmp_path, "ray") as run:
        assert check_end(run, send) < 10.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_sigterm_ends_a_run_with_waiting_games_within_10_seconds(kind, tmp_path):
    with Launched(tmp_path, kind, games=16) as run:
        assert check_end(run, to_every_process) < 10.0


def test_a_terminal_that_is_closed(tmp_path):
    with Launched(tmp_path, "local") as run:
        check_end(run, lambda run: os.killpg(run.process.pid, signal.SIGHUP))


@pytest.mark.slow
def test_sigterm_while_components_are_started(tmp_path):
    """Ray brings handlers of its own, which would end the process at once and leave its workers behind."""
    with Launched(tmp_path, "ray") as run:
        run.lines.append(run.process.stdout.readline())
        assert "mode train" in run.lines[0]
        os.killpg(run.process.pid, signal.SIGTERM)
        _, code = run.ended(PATIENCE)
        assert code == 130, run.stderr()
        assert "SIGTERM received" not in run.stderr()
        check_nothing_is_left(run)


@pytest.mark.slow
def test_timeout_which_sends_its_signal_twice(tmp_path):
    with Launched(tmp_path, "ray", "timeout", "--preserve-status", "300") as run:
        check_end(run, to_process)
