"""Run directories that older versions left on disk (tests/files/runs-0.1, ...) still load, evaluate, export and serve,
with the same actions, and go on training."""

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
from bray import tree
from bray.cli.main import main
from bray.client import Client
from bray.rundir import RunDir
from bray.service import PolicyService
from bray.serving.config import ServedModelConfig
from tests import forked

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


def same(a, b):
    """Whether two trees hold the same, in whatever order."""
    a, b = dict(tree.paths(a)), dict(tree.paths(b))
    return a.keys() == b.keys() and all(np.array_equal(x, b[path]) for path, x in a.items())


@pytest.mark.parametrize("run", [*TRAINED, "dqn-replay"], indirect=True)
def test_an_old_run_is_resumed_with_weights_optimizer_and_counters(run, caplog):
    saved = RunDir.open(run).load_checkpoint()
    exp = bray.Experiment.resume(run)
    said = [r.getMessage() for r in caplog.records if str(run) in r.getMessage()]
    assert len(said) == 1
    assert "new episodes start" in said[0] or "fills anew" in said[0]
    training, before = exp.training, saved.state["json"]
    assert same(training.weights(), saved.weights)
    parts, learner = training.learner.state_dict()["parts"], saved.state["arrays"]["learner"]
    assert same({name: parts[name] for name in learner}, learner)
    assert (training.iteration, training.steps) == (before["iteration"], saved.step)
    assert training.env_steps == before["rollout"]["env_steps"]
    assert exp.last_row["episodes_total"] == before["row"]["episodes_total"]
    rows = list(exp.train(stop={"training_iteration": training.iteration + 2}))
    exp.close()
    assert rows[-1]["env_steps_total"] > before["rollout"]["env_steps"]
    assert rows[-1]["learner_steps_total"] > saved.step
    assert rows[-1]["episodes_total"] >= before["row"]["episodes_total"]
    assert RunDir.open(run).pointer("latest") == rows[-1]["learner_steps_total"]
    with (run / "result.jsonl").open() as f:
        assert [json.loads(line)["training_iteration"] for line in f] == list(range(1, training.iteration + 1))
    bray.Experiment.resume(run).close()  # in today's form


@pytest.mark.parametrize("run", ["dqn-replay"], indirect=True)
def test_a_replay_of_0_1_is_filled_anew_which_is_said_once(run, caplog):
    old = set((run / "replay").iterdir())
    assert old
    exp = bray.Experiment.resume(run)
    for _ in exp.train(stop={"env_steps_total": exp.training.env_steps + 200}):
        pass
    exp.close()
    assert caplog.text.count("the replay has the layout of Bray 0.1, it fills anew") == 1
    assert not old & set((run / "replay").iterdir())  # nobody can read them any more


@pytest.mark.parametrize("run", ["ppo-cartpole"], indirect=True)
def test_bray_serve_answers_with_an_old_run(run):
    """One that was never exported."""
    words = bray_command("serve", str(run), "--port", "0")
    process = forked.Popen(words, stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        port = next(int(m[1]) for line in process.stdout if (m := re.search(r"serving HTTP on \S+:(\d+)", line)))
        answers_as_before(run.name, play(port, run.name))
    finally:
        process.terminate()
        process.communicate(timeout=30)


# --- later minor versions: what tests/files/make_runs.py made with each -----------------------------------------------

KEPT = sorted(path for path in DATA.parent.glob("runs-*/*") if path.is_dir() and path.parent != DATA)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_run_of_each_minor_version_acts_is_served_and_goes_on(kept, tmp_path):
    run = shutil.copytree(kept, tmp_path / "run", symlinks=True)
    answered = json.loads((kept.parent / "actions.json").read_text())[kept.name]
    exp = bray.Experiment.load(run)
    assert [exp.policy(np.float32(obs)) for obs in answered["obs"]] == answered["actions"]
    exp.close()
    service = PolicyService({"m": run}, ServedModelConfig())  # its graph proves itself here
    assert service.model("m").shares[0].version.step == RunDir(run).pointer("latest")
    exp = bray.Experiment.resume(run)
    before = exp.training.steps
    assert before == RunDir(run).pointer("latest")
    (row,) = exp.train(stop={"training_iteration": exp.training.iteration + 1})
    exp.close()
    assert row["learner_steps_total"] > before


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
