"""Run directories that version 0.1 left on disk (tests/data/runs-0.1) still load, evaluate, export and serve, with the
same actions."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.cli.main import main
from bray.client import Client

DATA = Path(__file__).parents[1] / "files" / "runs-0.1"
TRAINED = ("ppo-cartpole", "ppo-lstm", "dqn-cartpole", "sac-pendulum")
ANSWERED = json.loads((DATA / "actions.json").read_text())
"""Run -> observations of one game, and the greedy actions of version 0.1."""
ENV = {**os.environ, "PYTHONPATH": str(Path(bray.__file__).parent.parent)}


@pytest.fixture
def run(request, tmp_path):
    """A copy of a run directory: using one may write into it."""
    path = tmp_path / request.param
    shutil.copytree(DATA / request.param, path, symlinks=True)
    return path


def bray_command(*words):
    return [sys.executable, "-m", "bray", *words]


each_trained = pytest.mark.parametrize("run", TRAINED, indirect=True)


def answers_as_before(name, actions):
    np.testing.assert_allclose(actions, ANSWERED[name]["actions"], atol=1e-4)


def play(port, name):
    """The actions that a service answers to one session, over HTTP."""
    with Client("127.0.0.1", port) as client:
        client.start()
        return [client.tick({"obs": obs})["action"] for obs in ANSWERED[name]["obs"]]


@pytest.mark.parametrize("name", TRAINED)
def test_the_data_is_whole(name):
    """`latest` and `best` are links that git and every copy must keep."""
    for pointer in ("latest", "best"):
        link = DATA / name / "checkpoints" / pointer
        assert link.is_symlink()
        assert (link / "model.safetensors").is_file()


@each_trained
def test_an_old_run_loads_and_acts_as_before(run):
    exp = bray.Experiment.load(run)
    state, actions = None, []
    for obs in ANSWERED[run.name]["obs"]:
        if "lstm" in run.name:
            action, state = exp.policy(obs, state)
        else:
            action = exp.policy(obs)
        actions.append(action)
    answers_as_before(run.name, actions)
    assert np.isfinite(exp.evaluate(episodes=1)["eval/return_mean"])


@each_trained
@pytest.mark.parametrize("checkpoint", ["latest", "best"])
def test_an_old_run_is_evaluated(run, checkpoint, capsys):
    assert main(["eval", str(run), "--episodes", "2", "--checkpoint", checkpoint]) == 0
    step = (run / "checkpoints" / checkpoint).resolve().name
    assert f"checkpoint {step}" in capsys.readouterr().out


@each_trained
def test_an_old_run_is_exported_and_served(run, capsys):
    assert main(["export", str(run)]) == 0
    assert "onnx" in capsys.readouterr().out
    assert list((run / "models").rglob("*.onnx"))
    with bray.Experiment.load(run).serve(port=0, block=False) as server:
        answers_as_before(run.name, play(server.port, run.name))


@pytest.mark.parametrize("run", ["ppo-cartpole"], indirect=True)
def test_bray_serve_answers_with_an_old_run(run):
    """One that was never exported."""
    words = bray_command("serve", str(run), "--port", "0")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        port = next(int(m[1]) for line in process.stdout if (m := re.search(r"serving HTTP on \S+:(\d+)", line)))
        answers_as_before(run.name, play(port, run.name))
    finally:
        process.terminate()
        process.communicate(timeout=30)


# --- a run directory of `bray launch` ---------------------------------------------------------------------------------
# 0.1 does not evaluate, export or serve one. A version that does replaces these two tests by ones of what it does.


@pytest.fixture(scope="module", params=[["eval"], ["export"], ["serve", "--port", "0"]], ids=lambda words: words[0])
def refusal(request, tmp_path_factory):
    """What a command says to a launched run."""
    path = tmp_path_factory.mktemp("old") / "launched"
    shutil.copytree(DATA / "launched", path, symlinks=True)
    (path / "checkpoints").mkdir(exist_ok=True)  # it is empty, so git does not store it
    command, *options = request.param
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main([command, str(path), *options]) != 0
    return said.getvalue()


def test_a_launched_run_is_refused_in_one_line(refusal):
    (line,) = refusal.strip().splitlines()
    assert line.startswith("error: ")


def test_the_refusal_of_a_launched_run_says_what_to_do(refusal):
    assert "bray launch" in refusal
