"""Rollout workers: processes that play for the one that learns."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import bray
from bray.act import TRAINED, Clock
from bray.act.squashed import random_actions
from bray.cli.main import main
from bray.errors import CheckpointError, ConfigError, EnvError
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.sampler import RowsOfAll
from tests.envs_for_tests import Phased
from tests.train.test_callbacks import Watcher


def experiment(path=None, env="CartPole-v1", run="PPO", **config):
    config = {"vector": "inprocess", "num_envs": 2, "num_workers": 2, "rollout_length": 32, "minibatches": 4, **config}
    if run != "PPO":
        del config["rollout_length"], config["minibatches"]
    return bray.Experiment(run=run, env=env, use_preset=False, path=path, config=config)


def rows_of(exp, iterations=3):
    rows = [exp.training.iterate() for _ in range(iterations)]
    exp.close()
    return rows


@pytest.mark.parametrize("more", [{}, pytest.param({"use_lstm": True, "lstm_cell_size": 16}, marks=pytest.mark.slow)])
def test_workers_play_what_one_process_with_all_environments_plays(more):
    alone = rows_of(experiment(num_workers=0, num_envs=4, **more))
    with_workers = rows_of(experiment(**more))
    for key in ("env_steps_total", "episodes_total", "episode_length_mean", "loss/policy_loss", "loss/value_loss"):
        assert [row[key] for row in with_workers] == pytest.approx([row[key] for row in alone], rel=1e-6, abs=1e-8)
    assert with_workers[-1]["workers/policy_lag"] == with_workers[-1]["workers/restarts"] == 0


@pytest.mark.parametrize(
    ("run", "env"), [("DQN", "CartPole-v1"), pytest.param("SAC", "Pendulum-v1", marks=pytest.mark.slow)]
)
def test_algorithms_that_replay_learn_while_workers_play_on(run, env):
    exp = experiment(run=run, env=env, learning_starts=200, num_envs=1)
    assert "num_workers=2" in exp.training.depends_on_timing
    rows = rows_of(exp, 2)
    assert rows[-1]["learner_steps_total"] > 0
    assert rows[-1]["workers/policy_lag_max"] >= rows[-1]["workers/policy_lag"] > 0


@pytest.mark.slow
def test_a_stopped_worker_holds_nobody_up_and_a_killed_one_is_replaced_meanwhile():
    exp = experiment(run="DQN", learning_starts=10_000, num_envs=1, worker_timeout_s=30)
    source, training = exp.training.sources[0], exp.training
    training.iterate()
    stopped, other = source.process_ids
    os.kill(stopped, signal.SIGSTOP)
    before = training.env_steps
    for _ in range(200):  # whatever the load, pieces come from the other one alone
        training.gather(1.0)
    assert training.env_steps > before + 300
    os.kill(stopped, signal.SIGKILL)
    while source.numbers()["workers/restarts"] == 0:
        training.gather(1.0)
    assert source.process_ids == [source.process_ids[0], other]
    assert exp.foreach_env(lambda env: 1) == [1, 1]
    assert source.process_ids[0] != stopped
    exp.close()


@pytest.mark.slow
def test_a_run_with_workers_resumes_exactly(tmp_path):
    whole = list(experiment(tmp_path / "whole").train({"training_iteration": 4}))
    exp = experiment(tmp_path / "half")
    list(exp.train({"training_iteration": 2}))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "half")
    rest = list(exp.train({"training_iteration": 4}))
    exp.close()
    assert exp.exact
    for key in ("env_steps_total", "episode_return_mean", "loss/policy_loss"):
        assert [row[key] for row in rest] == [row[key] for row in whole[2:]]


class Uneven(gym.Env):
    """A step takes as long as it is told; where it stands says how many were made."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, step_s: float = 0.0):
        self.step_s = step_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.tanh(self.np_random.normal(size=3)).astype(np.float32), {}

    def step(self, action):
        time.sleep(self.step_s)
        self._t += 1
        obs = np.tanh(self.np_random.normal(size=3) + action).astype(np.float32)
        return obs, float(-(action[0] ** 2)), False, self._t >= 30, {}


def of_lockstep(path=None, step_s=0.0):
    config = {"learning_starts": 40, "batch_size": 16, "iteration_steps": 64, "fcnet_hiddens": [8], "num_envs": 1}
    name = f"{Uneven.__module__}:Uneven"
    return experiment(path, name, "SAC", lockstep=True, env_config={"step_s": step_s}, **config)


def test_workers_a_round_ahead_go_by_counts_and_not_by_the_clock(tmp_path):
    def end_of(exp, iterations):
        rows = [exp.training.iterate() for _ in range(iterations)]
        weights = exp.training.weights()
        exp.close()
        return rows[-1], weights

    exp = of_lockstep(tmp_path / "run")
    assert (exp.training.depends_on_timing, exp.training.describe()) == ("", "2 workers with 1 env each, a round ahead")
    for _ in range(2):
        exp.training.iterate()
    exp.save()  # while a round is under way
    last, weights = end_of(exp, 2)
    assert last["workers/policy_lag_max"] == 16 > last["workers/policy_lag"] > 12  # of the steps of one round, no more
    row, slow = end_of(of_lockstep(step_s=0.002), 4)  # environments take longer than the learner
    resumed = bray.Experiment.resume(tmp_path / "run")
    assert resumed.training.totals.env_steps < last["env_steps_total"]
    again, after = end_of(resumed, 2)
    assert resumed.exact
    for other, theirs in ((row, slow), (again, after)):
        for key in ("env_steps_total", "learner_steps_total", "episode_return_mean", "loss/critic_loss"):
            assert other[key] == last[key]
        for name, value in weights.items():
            np.testing.assert_array_equal(theirs[name], value)
    anew = bray.Experiment.resume(tmp_path / "run", lockstep=False)  # what was played and not learnt from is lost
    assert not anew.exact
    anew.close()


def test_a_worker_that_is_killed_is_replaced_and_counted(caplog):
    exp = experiment(max_worker_restarts=1)
    source = exp.training.sources[0]
    exp.training.iterate()
    victim = source.process_ids[1]
    os.kill(victim, signal.SIGKILL)
    row = exp.training.iterate()
    assert row["workers/restarts"] == 1
    assert source.process_ids[1] != victim
    assert f"rollout worker 2 (process {victim}) died" in caplog.text
    assert row["env_steps_total"] > 200  # the round is whole
    os.kill(source.process_ids[0], signal.SIGKILL)
    with pytest.raises(EnvError, match=r"rollout worker 1 .*max_worker_restarts=1 are used up"):
        exp.training.iterate()
    exp.close()


def test_a_replacement_goes_on_as_the_other_was_told():
    exp = experiment(env=Phased, num_workers=1, normalize_rewards=True, max_worker_restarts=1)
    source = exp.training.sources[0]
    exp.foreach_env(lambda env: env.set_phase(5))
    assert exp.foreach_env(lambda env: env.phase) == [5, 5]  # a question takes no setting away
    exp.training.iterate()
    largest = np.max(source.gather()[0][0].reward)
    os.kill(source.process_ids[0], signal.SIGKILL)
    assert exp.foreach_env(lambda env: env.phase) == [5, 5]
    assert np.max(source.gather()[0][0].reward) == pytest.approx(largest, rel=0.2)
    assert source.restarts == 1
    os.kill(source.process_ids[0], signal.SIGKILL)
    with pytest.raises(EnvError, match="are used up"):
        exp.training.iterate()
    assert exp.training.get_state()["json"]["sources"][0]["workers"] is None  # what was learnt is saved without them
    exp.close()


class PaysByWorker(Phased):
    """Those of worker 2 pay ten times as much."""

    def __init__(self, config):
        super().__init__()
        self.pay = 10.0 if config.worker_index == 2 else 1.0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, self.pay * (1.0 + reward), *rest


def test_rewards_of_all_workers_have_one_scale(tmp_path):
    exp = experiment(tmp_path / "run", env=PaysByWorker, normalize_rewards=True)
    *_, row = exp.train({"training_iteration": 2})
    seen = exp.training.sources[0].returns.numbers
    assert seen[0] == row["env_steps_total"]
    (piece,), _ = exp.training.sources[0].gather()
    reward = np.where(piece.valid, piece.reward, 0.0)
    assert np.max(reward[:, 2:]) == pytest.approx(10 * np.max(reward[:, :2]), rel=0.2)
    exp.close()
    for workers in (0, 1):
        exp = bray.Experiment.resume(tmp_path / "run", num_workers=workers, num_envs=4)
        source = exp.training.sources[0]
        learnt = source.returns if workers else source.rollout.rewards.seen
        assert learnt.numbers == seen
        exp.close()


def test_a_schedule_of_acting_is_that_of_one_process():
    """Epsilon falls by the steps of all environments, which no worker counts while a round is played."""
    fast = {
        "epsilon": {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 600},
        "rollout_length": 32,
        "iteration_steps": 128,
    }

    def played(workers, envs):
        config = {"vector": "inprocess", "num_envs": envs, "num_workers": workers, **fast}
        return rows_of(bray.Experiment(run="PQN", env="CartPole-v1", use_preset=False, config=config), 4)

    alone, workers = played(0, 4), played(2, 2)
    for key in ("env_steps_total", "episodes_total", "episode_return_mean"):
        assert [row[key] for row in workers] == [row[key] for row in alone]


def test_names_that_a_script_registered_reach_workers_and_the_process_that_evaluates(tmp_path):
    bray.register_env("phased-here", lambda config: Phased())
    gym.register("PhasedHere-v0", Phased)
    for name in ("phased-here", "PhasedHere-v0"):
        exp = experiment(tmp_path / name, env=name, num_workers=1, eval_parallel=True, eval_freq=1, eval_episodes=1)
        *_, row = exp.train({"training_iteration": 2})
        exp.close()
        assert row["env_steps_total"] > 0
        assert any("eval/return_mean" in row for row in read_results(tmp_path / name))


def test_a_result_that_cannot_be_sent_and_the_worker_of_an_error_are_told():
    exp = experiment(num_workers=1)
    with pytest.raises(EnvError, match=r"foreach_env: what the function returned cannot be sent .*return numbers"):
        exp.foreach_env(lambda env: (x for x in ()))
    exp.close()
    exp = experiment(env=FailsInTwo)
    with pytest.raises(EnvError, match=r"\nrollout worker 2: test_workers:FailsInTwo, environment 0"):
        exp.training.iterate()
    exp.close()


def test_draws_of_workers_are_rows_of_those_of_one_process():
    whole = np.random.default_rng([3, 0])
    parts = [RowsOfAll(3, range(3 * w, 3 * w + 3), 6) for w in range(2)]
    for name, arguments in (("normal", (1.0, 2.0)), ("choice", (np.arange(5),)), ("uniform", (0.0, 3.0))):
        drawn = getattr(whole, name)(*arguments, size=6)
        assert [x for part in parts for x in getattr(part, name)(*arguments, size=3)] == drawn.tolist()
    with pytest.raises(AttributeError, match=r"rng.poisson: in a rollout worker a Policy draws by random"):
        parts[0].poisson(3.0)


class FailsInOne(Phased):
    """The environments of worker 1 raise, those of the other one do not."""

    def __init__(self, config):
        super().__init__()
        self.fails = config.worker_index == 1

    def step(self, action):
        if self.fails:
            raise RuntimeError("the game fell over")
        return super().step(action)


class FailsInTwo(FailsInOne):
    def __init__(self, config):
        super().__init__(config)
        self.fails = config.worker_index == 2


def test_an_error_in_one_worker_leaves_the_others_alone():
    exp = experiment(env=FailsInOne, max_restarts=0)
    with pytest.raises(EnvError, match="the game fell over"):
        exp.training.iterate()
    state = exp.training.get_state()
    assert state["json"]["sources"][0]["workers"] is None
    assert state["json"]["midway"]
    assert not state["json"]["exact"]
    assert exp.training.sources[0].restarts == 0
    exp.close()
    assert not list(Path("/dev/shm").glob(f"bray-rollout-{os.getpid()}-*"))


class Exits(bray.Callbacks):
    def on_episode_step(self, episode):
        sys.exit(5)


class Dies(bray.Callbacks):
    def on_episode_step(self, episode):
        os._exit(5)


@pytest.mark.parametrize(
    ("callback", "says"), [(Exits, r"sys.exit\(5\)(.|\n)*SystemExit: 5"), (Dies, r"^exit code 5\nrollout worker 1")]
)
def test_how_a_worker_ended_is_told(tmp_path, callback, says):
    exp = experiment(tmp_path / "run", num_workers=1, max_worker_restarts=0)
    with pytest.raises(EnvError, match=says):
        list(exp.train({"training_iteration": 2}, callbacks=callback()))
    exp.close()


@pytest.mark.slow
def test_the_lag_is_counted_when_a_piece_is_learnt_from():
    exp = experiment(run="APPO", rollout_length=16, epochs=2, minibatches=2, num_envs=1, num_workers=3)
    learner, seen = exp.training.learner, []
    prepare = learner.prepare
    learner.prepare = lambda piece: seen.append(learner.steps - piece.version[piece.valid]) or prepare(piece)
    rows = rows_of(exp, 6)
    counted = np.concatenate(seen)
    assert max(row["workers/policy_lag_max"] for row in rows) == counted.max()


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(monkeypatch):
    exp = experiment(worker_timeout_s=30)
    source = exp.training.sources[0]
    exp.training.iterate()
    os.kill(source.process_ids[0], signal.SIGSTOP)
    assert exp.training.iterate()["workers/restarts"] == 1
    monkeypatch.setattr("bray.train.workers.START_TIMEOUT", 30.0)
    os.kill(source.process_ids[1], signal.SIGSTOP)
    assert exp.foreach_env(lambda env: 1) == [1, 1, 1, 1]
    assert source.restarts == 2
    exp.close()


@pytest.mark.parametrize("run", ["PPO", pytest.param("IMPALA", marks=pytest.mark.slow)])
def test_callbacks_and_functions_reach_the_environments_of_workers(run, tmp_path, caplog):
    exp = bray.Experiment(
        run=run, env=Phased, path=tmp_path / "run", num_workers=2, num_envs=1, vector="inprocess", rollout_length=16
    )
    assert exp.foreach_env(lambda env: env.phase) == [3, 3]
    rows = list(exp.train({"training_iteration": 2}, callbacks=Watcher()))
    late = rows[-1]["custom_metrics/late_max"]
    assert (
        late == 7 if run == "PPO" else late >= 3
    )  # each worker counts its own episodes; two rollouts of IMPALA may be of two workers
    assert rows[-1]["mine"] == late
    assert caplog.text.count("callbacks Watcher: with num_workers each worker has a copy") == 1
    source = exp.training.sources[0]
    state = source.get_state()
    metrics = state["json"].pop("metrics")
    source.set_state(state, exp.training.clock)  # as an older Bray saved it
    assert "custom_metrics/late_max" not in source.numbers()
    state["json"]["metrics"] = metrics
    source.set_state(state, exp.training.clock)
    assert source.numbers()["custom_metrics/late_max"] >= late
    assert source.get_state(midway=True)["json"]["workers"] is None  # then new episodes start
    exp.close()


def test_pink_noise_moves_on_in_a_worker(tmp_path):
    """Its learner's clock stands still while a piece is played."""
    exp = bray.Experiment(run="SAC", env="Pendulum-v1", path=tmp_path / "run", num_workers=1, num_envs=1)
    pieces, _ = exp.training.sources[0].gather(60.0)
    exp.close()
    action = pieces[0].action.reshape(-1)
    assert len(action) == 16
    assert len(np.unique(action)) == 16


def test_pink_noise_goes_by_the_decisions_made_here_and_not_by_the_steps_of_all(tmp_path):
    exp = bray.Experiment(run="SAC", env="Pendulum-v1", path=tmp_path / "run", num_envs=2)
    rollout, seen = exp.training.sources[0].rollout, []
    for steps in (0, 700, 5000):  # as a worker is told, whose neighbours play too
        rollout.set_clock(Clock(steps))
        for _ in range(2):
            seen.append(rollout.clock)
            rollout.step()
    assert [clock.decisions for clock in seen] == list(range(6))
    assert [clock.env_steps for clock in seen] == [0, 2, 700, 702, 5000, 5002]
    rollout.set_clock(TRAINED)
    rollout.step()
    assert rollout.clock == TRAINED
    own = exp.training.sources[0]
    own.set_state(own.get_state(), Clock(999))  # the steps of all workers
    assert rollout.env_steps == 14
    exp.close()


def test_held_random_actions_differ_from_worker_to_worker():
    one, other = (random_actions(RowsOfAll(0, range(3 * w, 3 * w + 3), 6), 0, 20, 3, 2) for w in range(2))
    assert (one != other).any()
    whole = np.random.default_rng([0, 0]).random(6)
    assert [x for w in range(2) for x in RowsOfAll(0, range(3 * w, 3 * w + 3), 6).random(3)] == whole.tolist()


def test_the_command_trains_with_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--run", "PPO", "--env", "CartPole-v1", "--num-workers", "2", "--num-envs-per-worker", "2"]
    assert main([*words, "--stop", '{"training_iteration": 1}', "iteration_steps=0"]) == 0
    assert "2 workers with 2 envs each" in capsys.readouterr().out


def test_callbacks_that_cannot_be_sent_to_workers_are_refused(tmp_path):
    watcher = Watcher()
    watcher.file = open(tmp_path / "log", "w")  # noqa: SIM115  cannot be pickled
    exp = experiment(tmp_path / "run", num_workers=1)
    with pytest.raises(ConfigError, match="cannot be sent there"):
        list(exp.train({"training_iteration": 1}, callbacks=watcher))
    exp.close()
    watcher.file.close()


def test_an_environment_that_cannot_be_made_in_a_worker_is_told():
    with pytest.raises((ConfigError, EnvError), match="no_such_env"):
        experiment(env="no_such_env:Env").training.iterate()


def test_each_worker_knows_its_number():
    class Numbered(Phased):
        def __init__(self, config):
            super().__init__()
            self.number = config.worker_index, config.vector_index

    exp = experiment(env=Numbered)
    with pytest.raises(EnvError, match="cannot pickle"):
        exp.foreach_worker(lambda worker: threading.Lock())
    assert exp.foreach_env(lambda env: tuple(env.number)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert np.array_equal(exp.evaluate(2)["eval/return_mean"], 9.0)
    exp.close()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(happened, process):
    while not happened():
        assert process.poll() is None
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("run", ["IMPALA", "DQN"])
def test_a_run_that_is_ended_while_workers_play_is_resumed(run, end, tmp_path):
    words = ["train", "--run", run, "--env", "CartPole-v1", "--no-preset", "--num-workers", "2", "--trial", "t"]
    words += ["--project", str(tmp_path), "num_envs=1", "checkpoint_freq=1", "--quiet"]
    words += ["learning_starts=200", "train_every=16"] if run == "DQN" else []
    with subprocess.Popen([sys.executable, "-m", "bray", *words, "--stop", '{"env_steps_total": -1}']) as process:
        checkpoints = RunDir(tmp_path / "t").steps
        wait_for(lambda: (tmp_path / "t").exists() and len(checkpoints()) > 1, process)
        workers = [worker for child in children(process.pid) for worker in children(child)]  # it has them forked
        assert len(workers) == 2
        process.send_signal(end)
        process.wait()
    for worker in workers:
        while Path(f"/proc/{worker}/stat").exists() and b") Z " not in Path(f"/proc/{worker}/stat").read_bytes():
            time.sleep(0.1)  # they end with the one that learns, however it ends
    before = read_results(tmp_path / "t")
    exp = bray.Experiment.resume(tmp_path / "t")
    assert not exp.exact
    steps = exp.training.env_steps
    assert steps == [row["env_steps_total"] for row in before if row["learner_steps_total"] == exp.training.steps][-1]
    list(exp.train({"env_steps_total": steps + 2000}))
    exp.close()
    rows = read_results(tmp_path / "t")
    assert [row["training_iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["env_steps_total"] >= steps + 2000
    assert rows[-1]["episode_return_mean"] > 5


@pytest.mark.slow
def test_a_resumed_asynchronous_run_plays_other_episodes(tmp_path):
    exp = experiment(tmp_path / "run", run="DQN", learning_starts=10_000, num_envs=1)
    list(exp.train({"training_iteration": 1}))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run")
    seeds = exp.foreach_env(lambda env: env.unwrapped.np_random_seed)
    exp.close()
    exp = experiment(run="DQN", learning_starts=10_000, num_envs=1)
    assert not set(seeds) & set(exp.foreach_env(lambda env: env.unwrapped.np_random_seed))
    exp.close()


class Told(Phased):
    def __init__(self, config):
        super().__init__()
        self.told = dict(config)


def test_an_environment_given_to_resume_or_load_is_the_one_that_is_played(tmp_path):
    exp = experiment(tmp_path / "run", env=Phased, num_workers=0)
    list(exp.train({"training_iteration": 1}))
    exp.close()
    with pytest.raises(CheckpointError, match="other spaces"):
        bray.Experiment.resume(tmp_path / "run", env="CartPole-v1")
    with pytest.raises(CheckpointError, match="other spaces"):
        bray.Experiment.load(tmp_path / "run", env="CartPole-v1").evaluate(1)
    with pytest.raises(ConfigError, match="leave out run='DQN'"):
        bray.Experiment.resume(tmp_path / "run", run="DQN")
    exp = bray.Experiment.resume(tmp_path / "run", env=Told, env_config={"level": 3}, num_workers=1)
    exp.training.iterate()
    assert exp.foreach_env(lambda env: env.told) == [{"level": 3}] * 2
    exp.close()


def test_the_env_config_of_ones_own_run_may_be_another_one_at_a_resume(tmp_path):
    exp = experiment(tmp_path / "run", env="tests.train.test_workers:Told", num_workers=0, env_config={"level": 1})
    list(exp.train({"training_iteration": 1}))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run", env_config={"level": 2})
    assert exp.foreach_env(lambda env: env.told) == [{"level": 2}] * 2
    exp.close()
