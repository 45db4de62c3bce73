"""What a training survives: environments that die or hang, signals, kills, a full disk, numbers that are no longer
finite. Nothing learnt is lost."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs_for_tests import RaisesLater, Scripted

from bray.cli.main import main
from bray.config import ConfigSource
from bray.diagnosis.divergence import Health
from bray.diagnosis.symptoms import Symptoms
from bray.envs import EnvConfig, make_vec
from bray.errors import CheckpointError, Diverged, EnvError
from bray.experiment import Experiment
from bray.figures import read_results
from bray.limited_log import OncePer
from bray.rundir import RunDir, log_to
from tests import forked, trainer_for_tests as parts

HERE = Path(__file__).parent
TINY = ["num_envs=1", "rollout_length=4", "minibatches=1", "epochs=1", "save_figure=false"]


def ppo(path, **config):
    given = {"num_envs": 1, "rollout_length": 4, "minibatches": 1, "epochs": 1, "save_figure": False} | config
    env = given.pop("env", "CartPole-v1")
    return Experiment(run="PPO", env=env, use_preset=False, path=path, config=given)


def finish(exp, iterations):
    for _ in exp.train({"training_iteration": iterations}):
        pass
    exp.close()


def saved(path):
    """What is written about the latest checkpoint, which is intact."""
    return RunDir.open(path).load_checkpoint().meta


# --- environments -----------------------------------------------------------------------------------------------------


def test_environments_that_die_or_hang_cost_no_more_than_their_episodes(tmp_path, caplog):
    """One dies and is replaced (`max_restarts`); another hangs, which is one too many: the run ends, with all it had
    learnt."""
    faults = [{"fault": "die", "fault_at": 6}, {"fault": "hang", "fault_at": 11}]
    config = {"num_envs": 2, "vector": "subprocess", "num_processes": 2, "step_timeout": 3.0, "max_restarts": 1}
    per_env = [{"terminate_at": None, **fault} for fault in faults]
    exp = ppo(tmp_path / "r", env=Scripted, per_env=per_env, **config)
    with pytest.raises(EnvError, match=r"did not answer within 3 s.*max_restarts=1 rebuilds are used up"):
        finish(exp, 10)
    exp.close()
    assert "died (exit code 7). Rebuilt (1 of at most 1)" in caplog.text
    assert [r["training_iteration"] for r in read_results(tmp_path / "r")] == [1, 2]
    assert (saved(tmp_path / "r")["training_iteration"], saved(tmp_path / "r")["exact"]) == (2, False)
    here = ConfigSource("python", {"env": {"vector": "inprocess", "step_timeout": None}})
    resumed = Experiment.resume(tmp_path / "r", [here], env=Scripted)
    assert not resumed.exact
    finish(resumed, 3)
    assert [r["training_iteration"] for r in read_results(tmp_path / "r")] == [1, 2, 3]


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_environments_that_raise_in_the_same_step_lose_nothing_learnt(tmp_path, form):
    exp = ppo(tmp_path / "r", env=RaisesLater, num_envs=2, vector=form, num_processes=2)
    with pytest.raises(EnvError, match="scripted failure"):
        finish(exp, 10)
    exp.close()
    assert saved(tmp_path / "r")["training_iteration"] == 1


def test_an_environment_that_cannot_save_itself_is_saved_by_its_actions(tmp_path, caplog):
    finish(ppo(tmp_path / "r", env=RaisesLater, num_envs=2, vector="inprocess"), 1)
    assert "get_state of" in caplog.text
    assert saved(tmp_path / "r")["exact"] is True
    assert Experiment.resume(tmp_path / "r", env=RaisesLater).exact


def start(*words):
    """A training in a process group of its own."""
    command = [sys.executable, "-m", "bray", "train", "--run", "PPO", *words, *TINY]
    return forked.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)


def wait_for_rows(process, path, count):
    until = time.monotonic() + 60.0
    while not (path / "result.jsonl").exists() or len((path / "result.jsonl").read_bytes().splitlines()) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.01)


def test_sigterm_to_the_whole_group_saves_with_environments_in_processes(tmp_path):
    words = ["--env", "CartPole-v1", "--project", str(tmp_path), "--trial", "r", "--stop", '{"time_total_s": 1000}']
    process = start(*words, "vector=subprocess", "num_envs=2", "num_processes=2")
    wait_for_rows(process, tmp_path / "r", 2)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    last = read_results(tmp_path / "r")[-1]["training_iteration"]
    assert (saved(tmp_path / "r")["training_iteration"], saved(tmp_path / "r")["exact"]) == (last, True)


def test_after_a_kill_tensorboard_has_every_row(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["--env", "CartPole-v1", "--project", str(tmp_path), "--trial", "r", "--stop", '{"time_total_s": 1000}']
    process = start(*words)
    wait_for_rows(process, tmp_path / "r", 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    steps = [r["env_steps_total"] for r in read_results(tmp_path / "r")]
    board = EventAccumulator(str(tmp_path / "r" / "tb"))
    board.Reload()
    assert steps == [e.step for e in board.Scalars("env_steps_total")][: len(steps)]
    finish(Experiment.resume(tmp_path / "r"), 2)


# --- kills between any two operations of saving -----------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: nothing is cleaned up after it."""


class KilledAt:
    """From its n-th change of the file system on, the process does nothing any more."""

    NAMES = ("replace", "rename", "fsync", "symlink", "link", "unlink", "rmdir", "mkdir")

    def __init__(self, at, error=None):
        self.at, self.error, self.count = at, error, 0

    def install(self, monkeypatch):
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._guard(getattr(os, name)))

    def _guard(self, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count >= self.at:
                raise self.error or Killed
            return real(*args, **kwargs)

        return call


REPLAYED = {"learning_starts": 20, "train_every": 10, "batch_size": 8, "replay_size": 60}


class Trained:
    """A training by DQN, by `bray train`: made anew, or resumed where there is one."""

    def __init__(self, path):
        if path.exists():
            self.exp = Experiment.resume(path)
            assert self.exp.exact
        else:
            config = {**REPLAYED, "fcnet_hiddens": [8], "keep_checkpoints": 1}
            self.exp = Experiment("DQN", "CartPole-v1", use_preset=False, path=path, config=config)
        self.training, self.save, self.close = self.exp.training, self.exp.save, self.exp.close


class Launched:
    """The same by the trainer of a launch file."""

    def __init__(self, path, setup=parts.setup_of("DQN", "CartPole-v1", **REPLAYED), played=itertools.count()):
        remote = parts.MemoryModel(setup.make_model())
        remote.keep_checkpoints = 1
        games = parts.MemoryBuffer(lambda i: parts.played(next(played)))
        self.training = parts.learner_drive(setup, remote, [games], path=path, prefetch_size=0)
        self.training.call("before_run")
        self.save, self.close = self.training.run.save, self.training.run.close


@pytest.mark.parametrize("made", [Trained, Launched])
def test_a_kill_between_any_two_operations_of_saving_loses_one_checkpoint_at_most(tmp_path, monkeypatch, made):
    """With a replay, whose rows are in files of their own; every third point is tried here."""
    run = made(tmp_path / "r")
    run.save()
    done = 0
    while True:
        before = run.training.env_steps
        for _ in range(30):
            run.training.gather(5.0)
            run.training.learn()
        after, kill = run.training.env_steps, KilledAt(1 + 3 * done)
        assert after > before + 20
        try:
            with monkeypatch.context() as patch:
                kill.install(patch)
                run.save()
            break
        except Killed:
            done += 1
        run.close()
        run = made(tmp_path / "r")
        assert run.training.env_steps in (before, after)
    run.close()
    assert done > 5


# --- the disk ---------------------------------------------------------------------------------------------------------


class FullDisk:
    """No new file gets its name while it is full."""

    def __init__(self, monkeypatch):
        self.full, real = False, os.replace

        def replace(a, b, **kwargs):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(b))
            return real(a, b, **kwargs)

        monkeypatch.setattr(os, "replace", replace)


def test_training_goes_on_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
    disk = FullDisk(monkeypatch)
    exp = ppo(tmp_path / "r", checkpoint_freq=1)
    for row in exp.train({"training_iteration": 6}):
        disk.full = 2 <= row["training_iteration"] < 5
        if row["training_iteration"] == 4:
            assert saved(tmp_path / "r")["training_iteration"] == 2
    exp.close()
    assert caplog.text.count("disk full while writing") == 1  # once a minute
    assert "Training goes on" in caplog.text
    assert saved(tmp_path / "r")["training_iteration"] == 6
    assert [r["training_iteration"] for r in read_results(tmp_path / "r")] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_stays_full_is_one_message_and_the_last_checkpoint_is_good(tmp_path, monkeypatch, capsys):
    disk = FullDisk(monkeypatch)

    class Fills(Scripted):
        def reset(self, **kw):
            disk.full = disk.full or (tmp_path / "r" / "progress.csv").exists()
            return super().reset(**kw)

    monkeypatch.setattr("envs_for_tests.Fills", Fills, raising=False)
    words = ["--env", "envs_for_tests:Fills", "--project", str(tmp_path), "--trial", "r", "--quiet"]
    code = main(["train", "--run", "PPO", *words, "--stop", '{"training_iteration": 4}', *TINY])
    err = capsys.readouterr().err
    assert code != 0
    assert "Traceback" not in err
    assert f"error: disk full while writing {tmp_path / 'r'}" in err
    assert "Free some space and go on: bray train --resume" in err
    disk.full = False
    assert saved(tmp_path / "r")["training_iteration"] == 0


def test_a_place_that_may_not_be_written_is_one_message(tmp_path, monkeypatch, capsys):
    words = ["train", "--run", "PPO", "--env", "CartPole-v1", "--quiet", *TINY]
    assert main([*words, "--project", "/sys/none", "--trial", "r"]) != 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "/sys/none/r" in err
    assert "choose another place (--project)" in err
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert main([*words, "--project", str(tmp_path), "--trial", "r"]) != 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "Read-only file system" in err


def test_a_log_on_a_full_disk_is_one_line(tmp_path, capsys):
    handler = log_to(tmp_path / "bray.log")
    handler.stream = open("/dev/full", "w")  # noqa: SIM115
    for _ in range(5):
        logging.getLogger("bray").error("something")
    handler.close()
    assert capsys.readouterr().err.count("lines of the log are lost (No space left on device)") == 1


def test_once_per_minute_by_a_clock():
    now = [0.0]
    once = OncePer(60.0, lambda: now[0])
    told = []
    for now[0] in (0.0, 1.0, 59.0, 60.0, 100.0, 121.0):
        told.append(once.due())
    assert told == [True, False, False, True, False, True]


# --- numbers that are not finite --------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(tmp_path, capsys):
    words = ["--env", "CartPole-v1", "--project", str(tmp_path), "--trial", "r", "--quiet", "lr=1e38", "epochs=4"]
    code = main(
        ["train", "--run", "PPO", *words, "--stop", '{"training_iteration": 20}', "checkpoint_freq=1", *TINY[:3]]
    )
    err = capsys.readouterr().err
    assert code != 0
    assert "training has diverged: loss/value_loss is nan" in err
    assert "9,155 of 9,155 weights (" in err
    assert "since the first iteration" in err
    assert "The last good checkpoint stays the latest" in err
    checkpoint = RunDir.open(tmp_path / "r").load_checkpoint()
    assert checkpoint.step == 0
    assert all(np.isfinite(w).all() for w in checkpoint.weights.values())


def test_what_the_policy_broke_is_not_blamed_on_the_environment(tmp_path):
    """The loss of the only gradient step is finite, and the weights after it are not."""
    exp = ppo(tmp_path / "r", env="Pendulum-v1", lr=1e38, checkpoint_every_s=0)
    with pytest.raises(
        Diverged, match=r"the action that the policy chose for environment 0 is \[nan\].*after iteration 1 \(4"
    ):
        finish(exp, 5)
    exp.close()
    assert RunDir.open(tmp_path / "r").pointer("latest") == 0


def test_the_last_weights_are_looked_at_too(tmp_path):
    exp = ppo(tmp_path / "r")
    training = exp.train({"training_iteration": 1})
    next(training)
    next(exp.training.model.parameters()).data.fill_(np.nan)  # what the last gradient step may do
    with pytest.raises(Diverged, match=r"weights .* are not finite, after iteration 1 .* all was finite"):
        next(training)
    exp.close()
    assert RunDir.open(tmp_path / "r").pointer("latest") == 0
    with pytest.raises(CheckpointError, match=r"cannot be saved: 3 of 4 numbers of the tensor"):
        RunDir(tmp_path / "x").save_checkpoint(1, {"w": np.array([1, *[np.nan] * 3], np.float32)}, {})


def rows_of(**numbers):
    for i in range(1, 20):
        yield {"training_iteration": i, "env_steps_total": 10 * i, **numbers}


def test_a_run_that_is_lost_is_told_in_words_once(caplog):
    symptoms = Symptoms()
    for row in rows_of(**{"loss/value_loss": 1e25}):
        symptoms.look(row)
    assert caplog.text.count("loss/value_loss is 1e+25: this run is lost") == 1
    caplog.clear()
    symptoms = Symptoms()
    for row in rows_of(**{"loss/entropy": 1e-6, "episode_return_mean": 9.3}):
        symptoms.look(row)
    assert (
        caplog.text.count("the policy always does the same (entropy 1e-06) and its return of 9.300 is no better") == 1
    )
    caplog.clear()
    symptoms = Symptoms()
    for row in rows_of(**{"loss/entropy": 1e-6}):  # the same certainty, of a policy that has learnt
        symptoms.look(row | {"episode_return_mean": 20.0 * row["training_iteration"]})
    for row in rows_of(**{"loss/kl": float("nan")}):  # a number that is not a loss, of sound weights
        Health().check(row, str)
    assert not caplog.text


# --- masks ------------------------------------------------------------------------------------------------------------


class Masked(gym.Env):
    """No choice is legal from step `none_at` on; the episode ends at step `end_at`."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(0.0, 9.0, (1,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space = gym.spaces.Discrete(3)

    def __init__(self, none_at: int = 3, end_at: int = 5):
        self.none_at, self.end_at = none_at, end_at

    def _obs(self):
        mask = np.full(3, self.t < self.none_at, np.int8)
        return {"x": np.full(1, self.t, np.float32), "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, self.t == self.end_at, False, {}


def test_a_mask_without_a_legal_choice_is_told_with_its_step(tmp_path):
    says = (
        r"Masked, environment 1, episode 0, step 3: action_mask forbids every choice: "
        r"leave at least one legal, or end the episode"
    )
    config = EnvConfig(Masked, num_envs=2, vector="inprocess", per_env=[{"none_at": 9}, {}])
    with make_vec(config, seed=0) as env:
        env.reset()
        env.step([0, 0])
        env.step([0, 0])
        with pytest.raises(EnvError, match=says):
            env.step([0, 0])
    exp = ppo(tmp_path / "r", env=Masked, num_envs=2, vector="inprocess", per_env=[{"none_at": 9}, {}])
    with pytest.raises(EnvError, match=says):
        finish(exp, 5)
    exp.close()


def test_the_last_observation_of_an_episode_needs_no_legal_choice(tmp_path):
    finish(ppo(tmp_path / "r", env=Masked, env_config={"none_at": 5}, num_envs=2, vector="inprocess"), 4)
    for row in read_results(tmp_path / "r"):
        assert "nan_metrics" not in row
