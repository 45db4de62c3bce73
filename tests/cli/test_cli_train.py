"""`bray train`: what it says, what it leaves, how it ends, how it goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from envs_for_tests import Scripted

from bray.cli.main import main
from bray.config import load_yaml
from bray.experiment import OWN_KEYS, ROW_KEYS, Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.goals import LIVE_SCORE
from tests import forked

TINY = ["rollout_length=16", "num_envs=2", "minibatches=1", "epochs=1"]
CARTPOLE = ["train", "--run", "PPO", "--env", "CartPole-v1", *TINY, "iteration_steps=0"]
HERE = Path(__file__).parent
BRAY = Path(sys.executable).parent / "bray"


class Signalling(Scripted):
    """Sends its own process a signal at given steps: a Ctrl-C that comes at the same place in every run."""

    def __init__(self, at: list, number: int = signal.SIGINT):
        super().__init__()
        self.at, self.number, self.count = at, number, 0

    def step(self, action):
        self.count += 1
        if self.count in self.at:
            os.kill(os.getpid(), self.number)
        return super().step(action)


class Raises(Scripted):
    """Has a bug that shows at the fourth step."""

    def step(self, action):
        if self.t == 3:
            return self.a_bug_of_the_user()
        return super().step(action)

    def a_bug_of_the_user(self):
        return {}["missing"]


def iterations(path):
    return [row["training_iteration"] for row in read_results(path)]


def table(out):
    """key -> [value, where it comes from]"""
    return {line.split()[0]: line.strip().split(maxsplit=2)[1:] for line in out.splitlines()}


def place(folder, trial="t"):
    return ["--project", str(folder), "--trial", trial]


# --- what it says and leaves ------------------------------------------------------------------------------------------


@pytest.mark.draws
def test_a_run_says_what_runs_and_what_it_left(tmp_path, capsys):
    stop = '{"training_iteration": 3}'
    assert (
        main([*CARTPOLE, *place(tmp_path), "--stop", stop, "--eval-freq", "2", "--eval-episodes", "2", "--seed", "4"])
        == 0
    )
    out = capsys.readouterr().out
    path = tmp_path / "t"
    lines = out.splitlines()
    assert lines[0] == "PPO on CartPole-v1 · 2 envs (in process) · cpu, 1 thread · seed 4"
    assert lines[1].startswith("auto       device=cpu, 2 environments in this process: ")
    assert lines[2].startswith("settings   preset cartpole_ppo ")
    assert lines[3] == "stops      at training_iteration 3"  # the preset's goal is not the user's
    assert lines[4] == f"writes to  {path}"
    assert any(re.match(r"iter 1  steps \d+  [\d,]+/s ", line) for line in lines)
    assert any(line.startswith("reached training_iteration 3 after ") for line in lines)
    for label, file in (
        ("checkpoint", "checkpoints/3"),
        ("curve", "figures/learning_curve.png"),
        ("results", "result.jsonl"),
        ("tensorboard", "tb"),
    ):
        assert f"{label:<11}  {path / file}" in lines
        assert (path / file).exists()
    assert f"look at it   bray eval {path} --render" in lines
    assert lines[-1] == f"run directory: {path}"
    assert iterations(path) == [1, 2, 3]
    assert [row.get("eval/episodes") for row in read_results(path)] == [None, 2, None]
    config = load_yaml(path / "config.yaml").values
    assert config["run"]["seed"] == 4
    assert config["run"]["stop"] == {"training_iteration": 3}


def test_print_config_shows_every_layer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: A2C\nenv: CartPole-v1\nconfig:\n  lambda_: 0.9\n  clip: 0.1\n  gamma: 0.9\n")
    argv = ["train", "-f", "run.yaml", "--run", "ppo", "--config", '{"gamma": 0.95, "value_coef": 1.0}', "gamma=0.98"]
    flags = ["--seed", "3", "--num-envs-per-worker", "4", "--checkpoint-freq", "7", "--stop", '{"timesteps_total": 5}']
    assert main([*argv, *flags, "--print-config"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["run.algorithm"] == ["PPO", "--run ppo on the command line"]
    assert rows["env.id"] == ["CartPole-v1", "run.yaml:2"]
    assert rows["algo.epochs"][1].startswith("preset cartpole_ppo:")
    assert rows["algo.lambda_"] == ["0.9", "run.yaml:4"]
    assert rows["algo.clip"] == ["0.1", "run.yaml:5"]
    assert rows["algo.value_coef"] == ["1.0", "--config"]
    assert rows["algo.gamma"] == ["0.98", "gamma=0.98 on the command line"]
    assert rows["run.seed"] == ["3", "--seed 3 on the command line"]
    assert rows["env.num_envs"] == ["4", "--num-envs-per-worker 4 on the command line"]
    assert rows["run.checkpoint_freq"] == ["7", "--checkpoint-freq 7 on the command line"]
    assert rows["run.stop.env_steps_total"] == ["5.0", "--stop"]  # an alias, and the preset's goal is gone
    assert "run.stop.episode_return_mean" not in rows
    assert rows["algo.adam_eps"] == ["1e-05", "default"]
    assert main([*argv, "--no-preset", "--print-config"]) == 0
    assert "preset" not in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_a_flag_may_be_zero(capsys):
    argv = ["train", "--run", "PPO", "--env", "CartPole-v1", "--checkpoint-freq", "0", "--print-config"]
    assert main(argv) == 0
    assert "--checkpoint-freq 0" in capsys.readouterr().out


def test_stop_on_the_command_line_replaces_and_a_dotted_one_changes(capsys):
    argv = ["train", "--run", "PPO", "--env", "CartPole-v1", "--print-config"]

    def stops(*more):
        assert main([*argv, *more]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {r[0].removeprefix("run.stop."): float(r[1]) for r in rows if r[0].startswith("run.stop.")}

    ours = stops()
    assert ours["episode_return_mean"] == 475
    assert stops("stop.episode_return_mean=100") == {**ours, "episode_return_mean": 100}
    assert stops("--config", '{"stop": {"time_total_s": 9}}') == {"time_total_s": 9}
    assert stops("--config", '{"stop": {"time_total_s": 9}}', "--stop", '{"training_iteration": 2}') == {
        "training_iteration": 2
    }


def test_files_of_rllib_run_unchanged(tmp_path, capsys):
    file = tmp_path / "tuned.yaml"
    file.write_text(
        "cartpole-a2c:\n  env: CartPole-v0\n  run: A2C\n  stop:\n    episode_reward_mean: 150\n  config:\n    lr: "
        "0.01\n"
    )
    assert main(["train", "--yaml", str(file), "--print-config"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["algo.lr"] == ["0.01", f"{file}:7"]
    assert rows["run.algorithm"] == ["A2C", f"{file}:3"]
    assert rows["run.stop.episode_return_mean"] == ["150.0", f"{file}:5"]
    file.write_text(file.read_text().replace("episode_reward_mean: 150", "timesteps_total: 640"))
    assert main(["train", "--yaml", str(file), *place(tmp_path), "--quiet", "export_graph_after_s=null"]) == 0
    last = read_results(tmp_path / "t")[-1]
    assert last["env_steps_total"] >= 640
    assert last["learner_steps_total"] >= 4


@pytest.mark.parametrize(
    ("stop", "key", "least"),
    [
        ('{"training_iteration": 2}', "training_iteration", 2),
        ('{"env_steps_total": 50}', "env_steps_total", 50),
        ('{"timesteps_total": 50}', "env_steps_total", 50),
        ('{"time_total_s": 0.001}', "time_total_s", 0.001),
        ('{"episode_reward_mean": 15, "training_iteration": 50}', "episode_return_mean", 15),
    ],
)
def test_stop_conditions(tmp_path, capsys, stop, key, least):
    argv = ["train", "--run", "PPO", "--env", "envs_for_tests:Scripted", *TINY, *place(tmp_path), "--stop", stop]
    assert main(argv) == 0
    rows = read_results(tmp_path / "t")
    assert rows[-1][key] >= least
    assert all(row[key] is None or row[key] < least for row in rows[:-1])
    assert f"reached {key} " in capsys.readouterr().out


def test_steps_are_a_stop_condition(tmp_path, capsys):
    argv = ["train", "--run", "PPO", "--env", "envs_for_tests:Scripted", *TINY, *place(tmp_path)]
    assert main([*argv, "--steps", "50"]) == 0
    assert [row["env_steps_total"] >= 50 for row in read_results(tmp_path / "t")] == [False, True]
    assert "reached env_steps_total " in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path / "t"), "--steps", "90", "--stop", '{"training_iteration": 3}']) == 0
    assert iterations(tmp_path / "t") == [1, 2, 3]
    assert load_yaml(tmp_path / "t" / "config.yaml").values["run"]["stop"] == {
        "training_iteration": 3,
        "env_steps_total": 90,
    }


def episodes_of(tmp_path, trial, count, algo="A2C", *more):
    """The rows of a run of exactly so many episodes of 5 steps (and a dead row each)."""
    argv = ["train", "--run", algo, "--env", "envs_for_tests:Scripted", *place(tmp_path, trial), "--quiet", *more]
    assert main([*argv, "--stop", f'{{"episodes_total": {count}}}']) == 0
    return read_results(tmp_path / trial)


@pytest.mark.parametrize("count", [1, 4, 6, 7, 8])
def test_a_run_of_exactly_so_many_episodes(tmp_path, count):
    # three environments end together in rows 5, 11, 17, 23, ...: rollouts of 8 hold 3, 3, 3, 3, 0, ... episodes
    rows = episodes_of(tmp_path, "t", count, "A2C", "num_envs=3", "rollout_length=8")
    assert rows[-1]["episodes_total"] == count
    assert sum(row["episodes_this_iter"] for row in rows) == count
    assert rows[-1]["env_steps_total"] == 3 * 5 * -(-count // 3)  # it ends with the step that ends the last one
    assert rows[-1]["episode_return_mean"] == 15.0
    # a rollout that was cut is not learned from, those before it are
    learned = {1: [False], 4: [True, False], 6: [True, False], 7: [True, True, False], 8: [True, True, False]}
    assert ["loss/entropy" in row for row in rows] == learned[count]
    assert rows[-1]["learner_steps_total"] == sum(learned[count])
    assert RunDir.open(tmp_path / "t").load_checkpoint().meta["training_iteration"] == len(rows)


def test_a_rollout_that_ends_with_the_last_episode_is_learned_from(tmp_path):
    rows = episodes_of(tmp_path, "t", 2, "A2C", "rollout_length=11", "num_envs=1")
    assert [row["learner_steps_total"] for row in rows] == [1]


def test_the_number_of_episodes_changes_nothing_before_the_end(tmp_path):
    """... and an off-policy run that goes on from it is the run that was never stopped."""
    config = ["learning_starts=50", "batch_size=8", "train_every=5", "num_envs=1"]
    first = episodes_of(tmp_path, "parts", 150, "DQN", *config)
    assert [row["episodes_total"] for row in first] == [150]
    assert main(["train", "--resume", str(tmp_path / "parts"), "--stop", '{"episodes_total": 250}', "--quiet"]) == 0
    assert [row["episodes_total"] for row in read_results(tmp_path / "parts")] == [150, 200, 250]
    whole = episodes_of(tmp_path, "whole", 250, "DQN", *config)
    assert [row["episodes_total"] for row in whole] == [200, 250]
    a, b = (RunDir.open(tmp_path / n).load_checkpoint() for n in ("parts", "whole"))
    assert a.step == b.step == 241  # (1250 - 50) / 5, and the one that was due after the first 50
    for name in a.weights:
        np.testing.assert_array_equal(a.weights[name], b.weights[name], err_msg=name)


def test_minus_one_is_no_limit(tmp_path, capsys):
    argv = ["train", "--run", "PPO", "--env", "envs_for_tests:Scripted", *TINY]
    assert main([*argv, "--stop", '{"episodes_total": -1}', "--print-config"]) == 0
    assert table(capsys.readouterr().out)["run.stop"][0] == "{}"
    stop = '{"episodes_total": -1, "env_steps_total": -1, "training_iteration": 3}'
    assert main([*argv, *place(tmp_path), "--stop", stop]) == 0
    assert "stops      at training_iteration 3\n" in capsys.readouterr().out
    assert iterations(tmp_path / "t") == [1, 2, 3]
    assert main([*argv, "--stop", '{"episode_return_mean": -1}', "--print-config"]) == 0
    assert table(capsys.readouterr().out)["run.stop.episode_return_mean"][0] == "-1.0"  # a return of -1 is a return


def test_quiet_says_one_line(tmp_path, capsys):
    assert main([*CARTPOLE, *place(tmp_path), "--stop", '{"training_iteration": 1}', "--quiet"]) == 0
    assert capsys.readouterr().out == f"run directory: {tmp_path / 't'}\n"


def test_checkpoints_when_due_and_kept(tmp_path):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 6}']
    assert main([*argv, "--checkpoint-freq", "1", "--keep-checkpoints", "2"]) == 0
    run = RunDir.open(tmp_path / "t")
    assert run.pointer("latest") == 6
    assert {5, 6} <= set(run.steps()) <= {5, 6, run.pointer("best")}


def test_a_checkpoint_every_so_many_gradient_steps(tmp_path):
    argv = [
        *CARTPOLE,
        *place(tmp_path),
        "--quiet",
        "--stop",
        '{"training_iteration": 8}',
        "epochs=2",
    ]  # two steps in an iteration
    assert main([*argv, "checkpoint_updates=5", "--keep-checkpoints", "9"]) == 0
    assert RunDir.open(tmp_path / "t").steps() == [0, 6, 10, 16]  # at the end of the iteration that passes 5, 10 and 15


def test_the_best_checkpoints_are_kept(tmp_path):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 7}', "--checkpoint-freq", "1"]
    few = ["--keep-checkpoints", "1", "--keep-best", "3", "--checkpoint-score", "-env_steps_total"]
    assert main([*argv, *few]) == 0
    run = RunDir.open(tmp_path / "t")
    assert run.steps() == [1, 2, 3, 7]  # the lowest three, and the newest
    assert run.pointer("best") == 1
    assert main(["eval", str(tmp_path / "t"), "--checkpoint", "2", "--episodes", "1"]) == 0


@pytest.mark.parametrize("score", ["episode_return_max", "-loss/entropy", "env_steps_total", "-env_steps_total", None])
def test_what_the_best_checkpoint_goes_by(tmp_path, score):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 6}', "--checkpoint-freq", "1"]
    assert main([*argv, "--keep-checkpoints", "9", *(["--checkpoint-score", score] if score else [])]) == 0
    key, sign = (score or "episode_return_mean").lstrip("-"), -1 if score and score[0] == "-" else 1
    rows = [row for row in read_results(tmp_path / "t") if row[key] is not None]
    best = max(rows, key=lambda row: sign * row[key])  # the first of equal ones
    assert RunDir.open(tmp_path / "t").pointer("best") == best["learner_steps_total"]
    assert len({row[key] for row in rows}) > 1


def test_another_score_begins_anew(tmp_path):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 2}']
    assert main([*argv, "--checkpoint-freq", "1", "--checkpoint-score", "env_steps_total"]) == 0
    run = RunDir.open(tmp_path / "t")
    assert run.pointer("best") == 2
    more = ["train", "--resume", str(tmp_path / "t"), "--quiet", "--stop", '{"training_iteration": 4}']
    assert main([*more, "--checkpoint-score", "-env_steps_total"]) == 0
    assert run.pointer("best") == 3  # the first since then; by the old score it would be 4


def test_a_loss_that_no_row_holds_is_no_score(tmp_path, capsys):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--checkpoint-score", "-loss/value_los"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "unknown key of a result row 'loss/value_los' (run.checkpoint_score). Did you mean 'loss/value_loss'" in err
    assert iterations(tmp_path / "t") == [1]  # known as soon as there is a loss


def test_better_evaluations_are_saved_and_better_returns_are_not(tmp_path):
    """Returns in training may rise in every iteration."""
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 4}', "--eval-freq", "1"]
    assert main([*argv, "--eval-episodes", "1", "--checkpoint-score", "env_steps_total"]) == 0
    run = RunDir.open(tmp_path / "t")
    assert run.steps() == [0, run.pointer("best")] == [0, 4]  # the first one is of before the first step
    assert main([*argv, "--eval-episodes", "1", "--checkpoint-score", "eval/episodes", *place(tmp_path, "u")]) == 0
    run = RunDir.open(tmp_path / "u")
    assert (run.steps(), run.pointer("best")) == ([0, 1, 4], 1)


def test_rows_hold_the_keys_that_can_be_scores(tmp_path):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 1}', "--eval-freq", "1"]
    assert main(argv) == 0
    (row,) = read_results(tmp_path / "t")
    assert {k for k in row if not k.startswith(OWN_KEYS)} == {*ROW_KEYS, "date", "pid", "hostname"} - {LIVE_SCORE}
    assert (row["pid"], row["hostname"]) == (os.getpid(), socket.gethostname())
    assert abs(datetime.now() - datetime.strptime(row["date"], "%Y-%m-%d %H:%M:%S")) < timedelta(hours=1)


def test_the_epsilon_of_acting_is_in_the_rows(tmp_path):
    argv = [
        "train",
        "--run",
        "DQN",
        "--env",
        "CartPole-v1",
        "--no-preset",
        *place(tmp_path),
        "--quiet",
        "--steps",
        "3000",
    ]
    assert main([*argv, "epsilon={kind: linear, start: 1.0, end: 0.1, steps: 2000}", "train_every=100"]) == 0
    rows = read_results(tmp_path / "t")
    assert [row["env_steps_total"] for row in rows] == [1000, 2000, 3000]
    assert [row["policy/epsilon"] for row in rows] == pytest.approx([0.55, 0.1, 0.1])


# --- the curve --------------------------------------------------------------------------------------------------------


@pytest.fixture
def windows():
    """A matplotlib that shows windows to nobody; the list of titles and curves shown."""
    import matplotlib
    import matplotlib.pyplot as plt
    from matplotlib.backend_bases import FigureManagerBase
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    shown = []

    class Manager(FigureManagerBase):
        @classmethod
        def pyplot_show(cls, *, block=None):
            axes = plt.gcf().axes[0]
            shown.append((axes.get_title(loc="left"), len(axes.lines)))

    class Canvas(FigureCanvasAgg):
        manager_class = Manager

    module = types.ModuleType("windows_for_tests")
    module.FigureCanvas, module.FigureManager = Canvas, Manager
    sys.modules["windows_for_tests"] = module
    before = matplotlib.get_backend()
    plt.switch_backend("module://windows_for_tests")
    yield shown
    assert plt.get_fignums() == []  # closed again
    plt.switch_backend(before)
    del sys.modules["windows_for_tests"]


def test_the_curve_is_saved_unless_not(tmp_path, capsys):
    argv = [*CARTPOLE, *place(tmp_path), "--stop", '{"training_iteration": 4}', "save_figure=false"]
    assert main(argv) == 0
    assert not (tmp_path / "t" / "figures").exists()
    assert "learning_curve" not in capsys.readouterr().out
    assert main([*argv[:-1], *place(tmp_path, "u"), "--seed", "1", "--seed", "2", "run.save_figure=false"]) == 0
    assert list((tmp_path / "u").rglob("*.png")) == []
    assert "learning_curve" not in capsys.readouterr().out


def test_the_curve_is_shown_where_that_is_asked(tmp_path, capsys, windows):
    argv = [*CARTPOLE, *place(tmp_path), "--stop", '{"training_iteration": 4}', "--quiet"]
    assert main(argv) == 0
    assert windows == []
    assert (
        main(["train", "--resume", str(tmp_path / "t"), "show_figure=true", "--stop", '{"training_iteration": 5}']) == 0
    )
    assert windows == [("PPO on CartPole-v1, seed 0", 1)]
    windows.clear()
    argv = [*argv, *place(tmp_path, "u"), "show_figure=true", "save_figure=false", "--seed", "1", "--seed", "2"]
    assert main(argv) == 0  # one window for both, not one that keeps the second seed waiting
    assert windows == [("PPO on CartPole-v1", 3)]
    assert list((tmp_path / "u").rglob("*.png")) == []
    windows.clear()
    exp = Experiment.resume(tmp_path / "u" / "seed-1")
    list(exp.train(stop={"training_iteration": 5}))  # Python shows it too
    exp.close()
    assert windows == [("PPO on CartPole-v1, seed 1", 1)]


@pytest.mark.draws
def test_without_a_display_one_line_says_so(tmp_path, capsys, monkeypatch):
    import matplotlib

    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    matplotlib.use("agg")
    argv = [*CARTPOLE, *place(tmp_path), "--stop", '{"training_iteration": 4}', "show_figure=true"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"run directory: {tmp_path / 't'}"
    assert err == (
        "warning: no window shows the learning curve: there is no display (neither DISPLAY nor WAYLAND_DISPLAY is "
        "set)\n"
    )
    assert (tmp_path / "t" / "figures" / "learning_curve.png").exists()


@pytest.mark.draws
def test_several_seeds_and_one_curve(tmp_path, capsys):
    argv = [*CARTPOLE, *place(tmp_path), "--stop", '{"training_iteration": 4}']
    assert main([*argv, "--seed", "1", "--seed", "2"]) == 0
    out = capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["figures", "seed-1", "seed-2"]
    assert (tmp_path / "t" / "figures" / "learning_curve.png").stat().st_size > 10_000
    assert out.splitlines()[-1] == f"run directory: {tmp_path / 't'}"
    seeds = [load_yaml(tmp_path / "t" / f"seed-{n}" / "config.yaml").values["run"]["seed"] for n in (1, 2)]
    assert seeds == [1, 2]
    first, second = (RunDir.open(tmp_path / "t" / f"seed-{n}").load_checkpoint().weights for n in (1, 2))
    assert any(not np.array_equal(first[k], second[k]) for k in first)
    assert main(["eval", str(tmp_path / "t")]) == 2  # which of them?
    assert "There are runs in it: seed-1, seed-2" in capsys.readouterr().err


# --- coming from another run ------------------------------------------------------------------------------------------


def test_init_from_copies_weights_and_nothing_else(tmp_path, capsys):
    assert (
        main([*CARTPOLE, *place(tmp_path, "a"), "--quiet", "--stop", '{"training_iteration": 2}', "--seed", "1"]) == 0
    )
    argv = [*CARTPOLE, *place(tmp_path, "b"), "--stop", '{"training_iteration": 1}', "lr=1e-12", "--seed", "2"]
    assert main([*argv, "--init-from", str(tmp_path / "a")]) == 0
    assert f"weights    of {tmp_path / 'a'}" in capsys.readouterr().out
    a, b = (RunDir.open(tmp_path / n).load_checkpoint() for n in "ab")
    for name in a.weights:
        np.testing.assert_allclose(b.weights[name], a.weights[name], atol=1e-7)
    assert iterations(tmp_path / "b") == [1]
    assert b.step == 1
    wider = [*CARTPOLE, *place(tmp_path, "c"), "fcnet_hiddens=[32]", "--init-from", str(tmp_path / "a")]
    assert main(wider) == 2
    assert "the weights do not fit the model" in capsys.readouterr().err


def test_a_truncated_checkpoint_is_refused(tmp_path, capsys):
    assert main([*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 2}']) == 0
    state = tmp_path / "t" / "checkpoints" / "latest" / "state.tree"
    state.write_bytes(state.read_bytes()[:-10])
    for argv in (["train", "--resume", str(tmp_path / "t")], ["eval", str(tmp_path / "t")]):
        assert main(argv) == 2
        assert "truncated or foreign" in capsys.readouterr().err


def test_a_run_is_not_written_over_another(tmp_path, capsys):
    argv = [*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 1}']
    assert main(argv) == 0
    capsys.readouterr()
    assert main([word for word in argv if word != "--quiet"]) == 2
    said, error = capsys.readouterr()
    assert said == ""  # it is refused before anything is made
    assert (
        "already holds a run (config.yaml, result.jsonl, params.json, checkpoints, models). Go on with it by --resume "
        f"{tmp_path / 't'}" in error
    )
    assert "learned so far" not in error  # the checkpoints there are another run's
    assert main(["train", "--resume", str(tmp_path / "t")]) == 0  # reached before: nothing to do
    said = capsys.readouterr().out
    assert "reached training_iteration 1 after " in said
    assert "before this start: to go on, give a larger --steps or --stop" in said
    assert iterations(tmp_path / "t") == [1]


# --- signals and errors -----------------------------------------------------------------------------------------------


def signalling(tmp_path, at, number, *more):
    env = ["--env", "test_cli_train:Signalling", f"env_config={{at: {at}, number: {int(number)}}}", "num_envs=1"]
    short = ["rollout_length=16", "minibatches=1", "epochs=1", "iteration_steps=0"]
    return ["train", "--run", "PPO", *env, *short, *place(tmp_path), *more]


@pytest.mark.parametrize(
    ("number", "stop", "code", "said"),
    [
        (signal.SIGINT, ["--stop", '{"training_iteration": 99}'], 130, "ended by Ctrl-C after 2\\d steps"),
        (signal.SIGTERM, ["--stop", '{"training_iteration": 99}'], 143, "ended by SIGTERM after 2\\d steps"),
        (signal.SIGINT, [], 0, "ended by Ctrl-C after 2\\d steps"),  # the only way to end such a run
        (signal.SIGTERM, ["--stop", '{"training_iteration": 2}'], 0, "reached training_iteration 2"),
    ],
)
def test_a_signal_ends_after_the_iteration_and_saves(tmp_path, capsys, number, stop, code, said):
    before = signal.getsignal(number)
    # 2 iterations are 32 rows, about 27 of them steps: the rest are the dead rows between episodes of 5
    assert main(signalling(tmp_path, [20], number, *stop)) == code
    assert signal.getsignal(number) is before
    out = capsys.readouterr().out
    assert re.search(said, out)
    assert iterations(tmp_path / "t") == [1, 2]
    assert RunDir.open(tmp_path / "t").load_checkpoint().meta["training_iteration"] == 2
    assert out.splitlines()[-1] == f"run directory: {tmp_path / 't'}"


def test_the_second_signal_ends_at_once(tmp_path):
    argv = signalling(tmp_path, [20, 21], signal.SIGINT)
    done = forked.run([sys.executable, "-m", "bray", *argv], cwd=HERE, timeout=120)
    assert done.returncode == 130
    assert "finishing this iteration, then saving; the same again ends at once" in done.stdout
    assert "Traceback" not in done.stderr
    assert iterations(tmp_path / "t") == [1]
    assert RunDir.open(tmp_path / "t").steps() == [0]  # that of the start: it did not wait to save


def test_ctrl_c_from_outside_then_resume_without_gap_or_double(tmp_path, capsys):
    """The console script, a real SIGINT, and the same files as a run never interrupted."""
    argv = [*CARTPOLE, "--stop", '{"training_iteration": 100000}', "--checkpoint-freq", "3"]
    with subprocess.Popen([BRAY, *argv, *place(tmp_path, "a")], stdout=subprocess.PIPE, text=True) as process:
        rest = forked.interrupted(process)
    assert f"go on        bray train --resume {tmp_path / 'a'}" in rest
    assert rest.splitlines()[-1] == f"run directory: {tmp_path / 'a'}"
    done = iterations(tmp_path / "a")[-1]
    goal = f'{{"training_iteration": {done + 3}}}'
    assert main(["train", "--resume", str(tmp_path / "a"), "--stop", goal]) == 0
    assert f"resumes    exactly, after iteration {done} and" in capsys.readouterr().out
    assert iterations(tmp_path / "a") == list(range(1, done + 4))
    assert main([*CARTPOLE, *place(tmp_path, "b"), "--stop", goal, "--quiet"]) == 0
    a, b = (RunDir.open(tmp_path / n).load_checkpoint().weights for n in "ab")
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_an_exception_of_the_users_environment_shows_its_traceback(tmp_path, capsys):
    argv = ["train", "--run", "PPO", "--env", "test_cli_train:Raises", *TINY, *place(tmp_path)]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert 'return {}["missing"]' in err
    assert "KeyError: 'missing'" in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: test_cli_train:Raises, environment 0, episode 0, step 3: it raised KeyError")


def test_an_exception_of_the_users_algorithm_shows_its_traceback(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_broken_algo.py").write_text(
        "from bray.algos.ppo import *\nfrom bray.algos import ppo\nclass Learner(ppo.Learner):\n    def update(self, "
        "batch, clock):\n        raise RuntimeError('my own mistake')\n"
    )
    monkeypatch.chdir(tmp_path)  # found because it lies beside the user
    argv = ["train", "--run", "my_broken_algo:", "--env", "CartPole-v1", *TINY, "--project", "p", "--trial", "t"]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "raise RuntimeError('my own mistake')" in err
    assert err.strip().splitlines()[-1] == "RuntimeError: my own mistake"
    assert "typer" not in err


def test_results_are_json_rows(tmp_path):
    assert main([*CARTPOLE, *place(tmp_path), "--quiet", "--stop", '{"training_iteration": 2}']) == 0
    rows = [json.loads(line) for line in (tmp_path / "t" / "result.jsonl").read_text().splitlines()]
    assert [r["env_steps_total"] for r in rows] == sorted(r["env_steps_total"] for r in rows)
    assert rows[-1]["env_steps_total"] <= 2 * 2 * 16


def test_lambda_may_be_written_as_in_papers(capsys):
    assert main([*CARTPOLE, "--print-config", "lambda=0.5"]) == 0
    assert table(capsys.readouterr().out)["algo.lambda_"][0] == "0.5"
