"""`bray.tune` and `bray tune` with real runs: what they leave, what they say, and that a kill loses nothing."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import bray
from bray import tree
from bray.cli.main import main
from bray.errors import BrayError, CheckpointError, ConfigError, UnknownName
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.search.runner import run_job
from tests import forked

TINY = {"rollout_length": 16, "num_envs": 2, "minibatches": 1, "epochs": 1, "iteration_steps": 0, "record": False}
FRAGILE = "search_for_tests:Fragile"


class Here:
    """Runs in this process: a process for each test would cost seconds of imports."""

    count = 1

    def __init__(self, *_):
        self.ran, self.look = [], lambda job: None

    def start(self, job):
        return self

    def send(self, job):
        self.ran.append(job)

    def receive(self):
        self.look(self.ran[-1])
        return run_job(self.ran[-1])

    def wait(self, busy):
        return list(busy)

    def close(self):
        pass


@pytest.fixture
def here(monkeypatch):
    """All runs, one after the other."""
    places = Here()
    monkeypatch.setattr("bray.search.tune.make_places", lambda *_: places)
    return places


def search(tmp_path, **given):
    kept = {"run": "PPO", "env": "CartPole-v1", "name": "s", "project": tmp_path, "use_preset": False, "steps": 200}
    return bray.tune(**{**kept, **TINY, "fresh_seeds": 0, **given})


def test_a_grid_leaves_runs_pictures_a_table_and_a_preset(tmp_path, here):
    found = search(tmp_path, lr=bray.tune.grid_search([1e-2, 1e-3, 1e-4]), num_seeds=2, fresh_seeds=2)
    root = tmp_path / "s"
    assert [t.values for t in found.trials] == [{"lr": 1e-2}, {"lr": 1e-3}, {"lr": 1e-4}]
    for trial in found.trials:
        for seed in (0, 1):
            exp = Experiment.load(root / f"trial-{trial.number:04d}" / f"seed-{seed}")
            assert exp.config["algo"].lr == trial.values["lr"]
            assert exp.config["run"].seed == seed
    best = max(found.trials, key=lambda t: t.score)
    assert found.best_config == found.get_best_config("episode_reward_mean", "max") == best.values
    with open(root / "trials.csv") as f:
        rows = list(csv.DictReader(f))
    assert [float(row["lr"]) for row in rows] == [1e-2, 1e-3, 1e-4]
    assert (root / "figures" / "parallel_coordinates.png").read_bytes()[:4] == b"\x89PNG"
    assert len(found.fresh.best) == len(found.fresh.before) == 2
    fresh = [str(job.path.relative_to(root)) for job in here.ran[6:]]
    assert fresh == [f"fresh/{kind}/seed-{seed}" for kind in ("best", "before") for seed in (1000, 1001)]
    default = Experiment("PPO", "CartPole-v1", use_preset=False).config["algo"].lr
    assert Experiment.load(root / "fresh/before/seed-1000").config["algo"].lr == default
    text = found.preset.read_text()
    assert "of 3, 2 seeds each" in text
    assert "on fresh seeds; the search said" in text
    assert (
        main(["train", "-f", str(found.preset), "--no-preset", "--quiet", "--project", str(tmp_path), "--trial", "t"])
        == 0
    )
    trained = Experiment.load(tmp_path / "t").config
    searched = Experiment.load(root / f"trial-{best.number:04d}" / "seed-0").config
    for section in ("algo", "model", "env"):
        assert trained[section] == searched[section]
    assert trained["run"].stop == {"env_steps_total": 200}


def test_the_same_call_again_runs_nothing_twice(tmp_path, here):
    first = search(tmp_path, lr="1e-4..1e-2:log", trials=2)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("result.jsonl")}
    again = search(tmp_path, lr="1e-4..1e-2:log", trials=3)
    assert len(again.trials) == 3
    assert again.trials[:2] == first.trials
    assert len(here.ran) == 3
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    with pytest.raises(ConfigError, match=r"has algo\.clip=0.2, got 0.3: give what it has to go on with it, or choose"):
        search(tmp_path, lr="1e-4..1e-2:log", trials=3, clip=0.3)
    with pytest.raises(ConfigError, match=r"has algo\.lr='0.0001..0.01:log', got '0.0001..0.1:log'"):
        search(tmp_path, lr="1e-4..1e-1:log", trials=3)


def test_a_study_is_one_programs_at_a_time(tmp_path, here):
    other = tmp_path / "s"
    other.mkdir()
    holder = "import sys, fcntl; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", holder, str(other / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        held.stdout.readline()
        with pytest.raises(CheckpointError, match=r"another process is searching here\. .* choose another --name"):
            search(tmp_path, lr="1e-4..1e-2:log", trials=2)
        held.stdin.close()
    assert len(search(tmp_path, lr="1e-4..1e-2:log", trials=1).trials) == 1


def test_a_population_copies_weights_and_optimizer(tmp_path, here):
    begins = {}

    def look(job):
        number = int(job.path.parent.name.removeprefix("trial-"))
        if number >= 2 and number not in begins:  # one that begins from another
            begins[number] = RunDir.open(job.path).load_checkpoint("latest")

    here.look = look
    found = search(tmp_path, lr="1e-4..1e-2:log", trials=2, scheduler="pbt", steps=400, keep_checkpoints=None)
    children = [t for t in found.trials if t.parent is not None]
    assert len(children) == len(begins) == 9
    for child in children[:3]:
        ours, parent = begins[child.number], tmp_path / "s" / f"trial-{child.parent:04d}" / "seed-0"
        theirs = RunDir.open(parent).load_checkpoint(ours.step)
        assert ours.step > 0
        for name, weight in ours.weights.items():
            np.testing.assert_array_equal(weight, theirs.weights[name])
        assert ours.state["json"] == theirs.state["json"]
        moments = {k: v for k, v in tree.paths(ours.state["arrays"]) if k[-1] in ("m", "v")}
        assert any(np.any(v) for v in moments.values())
        for key, array in tree.paths(theirs.state["arrays"]):
            np.testing.assert_array_equal(array, dict(tree.paths(ours.state["arrays"]))[key])
        lr = Experiment.load(tmp_path / "s" / f"trial-{child.number:04d}" / "seed-0").config["algo"].lr
        assert lr == pytest.approx(child.values["lr"])
        assert lr != found.trials[child.parent].values["lr"]


def test_asha_resumes_exactly(tmp_path, here):
    """A run that stood at three rungs ends with the weights of one that never stopped."""
    search(tmp_path, lr=1e-3, gamma={"choice": [0.99]}, scheduler="asha", steps=432)
    search(tmp_path, name="plain", lr=1e-3, gamma={"choice": [0.99]}, steps=432)
    assert len(here.ran) == 5
    weights = [
        RunDir.open(tmp_path / name / "trial-0000" / "seed-0").load_checkpoint("latest").weights
        for name in ("s", "plain")
    ]
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weight, weights[1][name])


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (
            {"env": FRAGILE, "env_config": {"fault": {"grid_search": [None, "raise", "also none"]}}},
            "it raised RuntimeError",
        ),
        ({"lr": {"grid_search": [1e-3, 1e30, 1e-4]}}, "finite"),
    ],
)
def test_a_trial_that_crashes_or_diverges_is_counted(tmp_path, here, space, says):
    found = search(tmp_path, **space)
    assert [t.state for t in found.trials] == ["complete", "failed", "complete"]
    assert says in found.trials[1].error
    assert "Traceback" in (tmp_path / "s" / "trial-0001" / "seed-0" / "error.txt").read_text()
    assert found.best.number in (0, 2)


def test_as_rllib_has_it(tmp_path, here):
    found = bray.tune.run(
        "PPO",
        stop={"timesteps_total": 100},
        config={"env": "CartPole-v1", "lr": bray.tune.grid_search([1e-2, 1e-3, 1e-4]), **TINY},
        resources_per_trial={"cpu": 1, "gpu": lambda spec: 0 * spec.config.num_envs, "extra_cpu": lambda spec: 0},
        local_dir=tmp_path,
        metric="episode_reward_mean",
        num_samples=2,
    )
    assert [len(t.scores) for t in found.trials] == [2, 2, 2]
    assert found.get_best_config()["lr"] in (1e-2, 1e-3, 1e-4)
    assert (tmp_path / "PPO-CartPole-v1" / "best.yaml").exists()
    with pytest.raises(UnknownName, match=r"unknown argument of tune\.run 'shceduler'"):
        bray.tune.run("PPO", shceduler=1)
    with pytest.raises(UnknownName, match="unknown resource of a trial 'cpus'"):
        bray.tune.run("PPO", config={"env": "CartPole-v1"}, resources_per_trial={"cpus": 1})


def test_smaller_may_be_better(tmp_path, here):
    found = search(tmp_path, lr={"grid_search": [1e-3, 1e-4]}, checkpoint_score="-episode_length_mean")
    lengths = [-t.score for t in found.trials]
    assert -found.best.score == min(lengths) > 0


# --- the command ------------------------------------------------------------------------------------------------------


def command(tmp_path, *words):
    tiny = [f"{k}={v}" for k, v in TINY.items()]
    return ["tune", "--run", "PPO", "--env", "CartPole-v1", "--no-preset", "--project", str(tmp_path), *tiny, *words]


def test_the_command_says_what_was_found(tmp_path, here, capsys):
    words = [
        "lr=1e-3..1e-2:log",
        "gamma=0.9,0.99",
        "--trials",
        "5",
        "--steps",
        "200",
        "--name",
        "s",
        "--fresh-seeds",
        "1",
    ]
    assert main(command(tmp_path, *words)) == 0
    out = capsys.readouterr().out
    assert "PPO on CartPole-v1: study s" in out
    assert "   5 of 5  trial 4" in out
    assert "without what was searched: the best settings are better on" in out
    assert "the search said" in out
    assert (tmp_path / "s" / "figures" / "importances.png").exists()
    assert out.rstrip().endswith(f"bray train -f {tmp_path / 's' / 'best.yaml'}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=1e-3,1e-4", "--steps", "9"], "missing option '--name'"),
        (["lr=1e-3", "--name", "s", "--steps", "9"], "there is nothing to search"),
        (["lrr=1..2", "--name", "s", "--steps", "9"], "Did you mean 'lr'?"),
        (["lr=1e-3,1e-4", "--name", "s"], "say how long a run is: --steps N"),
        (["lr=1e-3,1e-4", "--name", "a/b", "--steps", "9"], "expected a name for the study, --name NAME, got 'a/b'"),
        (["lr=1e-3,1e-4", "--name", "s", "--steps", "9", "--cpus-per-trial", "999"], "a run is to have 999 CPUs"),
        (["lr=1e-3,1e-4", "--name", "s", "--steps", "9", "--cpus-per-trial", "0"], "a run is given CPUs > 0"),
        (["lr=1e-3,1e-4", "--name", "s", "--steps", "9", "--address", "h:1"], "add --cluster ray"),
        (["lr=1e-3,1e-4", "--name", "s", "--steps", "9", "--scheduler", "ahsa"], "Did you mean 'asha'?"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, says):
    assert main(command(tmp_path, *words)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_search_that_is_killed_goes_on_with_the_same_trials(tmp_path):
    """kill -9 in the middle, with runs at work in processes of their own; one of them before its first checkpoint."""
    words = ["lr=1e-4..1e-2:log", "--trials", "5", "--steps", "400", "--sampler", "random", "--fresh-seeds", "0"]
    words = [sys.executable, "-m", "bray", *command(tmp_path, *words, "--parallel", "2", "--name", "s")]
    with forked.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("s/trial-*/seed-0/checkpoints/latest"))) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    begun = sorted(tmp_path.glob("s/trial-*"))
    assert [path.name for path in begun[:3]] == ["trial-0000", "trial-0001", "trial-0002"]
    shutil.rmtree(begun[-1] / "seed-0" / "checkpoints")
    (begun[-1] / "seed-0" / "checkpoints" / ".new-0-abc").mkdir(parents=True)
    done = forked.run(words, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.glob("s/trial-*")) == [f"trial-{n:04d}" for n in range(5)]
    with open(tmp_path / "s" / "trials.csv") as f:
        rows = list(csv.DictReader(f))
    assert [row["state"] for row in rows] == ["complete"] * 5
    assert len({row["lr"] for row in rows}) == 5
    lrs = [Experiment.load(tmp_path / "s" / f"trial-{n:04d}" / "seed-0").config["algo"].lr for n in range(5)]
    assert lrs == [float(row["lr"]) for row in rows]
    import optuna

    drawn = [optuna.samplers.RandomSampler(seed=n) for n in range(5)]
    expected = [optuna.create_study(sampler=s).ask().suggest_float("lr", 1e-4, 1e-2, log=True) for s in drawn]
    assert lrs == expected  # those of a study that nobody killed


@pytest.mark.slow
def test_trials_on_a_ray_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else its processes give way to whatever else runs
    found = search(tmp_path, lr={"grid_search": [1e-2, 1e-3, 1e30]}, cluster="ray", parallel=2)
    assert [t.state for t in found.trials] == ["complete", "complete", "failed"]
    assert (tmp_path / "s" / "trial-0001" / "seed-0" / "checkpoints" / "latest").exists()


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bray.search.study", None)
    assert main(command(tmp_path, "lr=1e-3,1e-4", "--name", "s", "--steps", "9")) == 2
    assert "pip install '.[tune]'" in capsys.readouterr().err


def test_nothing_came_to_its_end(tmp_path, here):
    with pytest.raises(BrayError, match=r"the first 2 trials failed, and the study ends: seed 0: .*it raised"):
        search(tmp_path, env=FRAGILE, env_config={"fault": "raise"}, lr={"grid_search": [1e-3, 1e-4]})
