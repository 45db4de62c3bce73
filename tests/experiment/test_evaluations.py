"""Evaluations and videos while training goes on."""

import json
import multiprocessing
import os

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import bray
from bray.errors import ConfigError
from bray.experiment import evaluations
from bray.experiment.evaluator import Looked
from bray.rundir import RunDir

SMALL = {
    "use_preset": False,
    "rollout_length": 16,
    "minibatches": 2,
    "num_envs": 2,
    "iteration_steps": 0,
    "vector": "inprocess",
    "eval_episodes": 3,
}


class Seen(bray.Callbacks):
    """Keeps what was evaluated, and gives the evaluations these scores."""

    def __init__(self, *scores):
        self.scores, self.seen = list(scores), {}

    def on_evaluate(self, experiment, result):
        self.seen[result["eval/env_steps"]] = result["eval/return_mean"]
        if self.scores:
            result["eval/return_mean"] = self.scores.pop(0)
            result["eval/episodes"] = len(self.seen)


def trained(path, stop, seen, **config):
    exp = bray.Experiment(run="PPO", env=config.pop("env", "CartPole-v1"), path=path, **SMALL, **config)
    rows = list(exp.train(stop, callbacks=seen))
    exp.close()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluations_beside_the_training_are_those_in_line(tmp_path, workers):
    beside, in_line = Seen(), Seen()
    more = {"eval_freq": 2, "num_workers": workers, "lr": 1e-2}
    rows = trained(tmp_path / "beside", {"training_iteration": 6}, beside, eval_parallel=True, video_freq=6, **more)
    same = trained(tmp_path / "in_line", {"training_iteration": 6}, in_line, **more)
    assert len(rows) == len(same) == 6
    assert rows[-1]["loss/policy_loss"] == same[-1]["loss/policy_loss"]  # the training does not notice
    assert beside.seen.items() <= in_line.seen.items()  # what fell due while it was busy was looked at later, or not
    assert rows[-1]["env_steps_total"] in beside.seen  # the end is waited for
    assert rows[-1]["eval/env_steps"] == rows[-1]["env_steps_total"]
    assert rows[-1]["video"] == f"videos/steps-{rows[-1]['env_steps_total']:09d}.mp4"
    assert (tmp_path / "beside" / rows[-1]["video"]).stat().st_size > 1000


def test_the_best_checkpoint_is_what_was_evaluated(tmp_path):
    """The first evaluation is the best one. The second one ends the run: a stop condition sees what came from
    beside."""
    seen, stop = Seen(10.0, 5.0), {"eval/episodes": 2, "training_iteration": 100_000}
    more = {"eval_freq": 1, "eval_parallel": True, "keep_checkpoints": 1, "checkpoint_freq": 1, "lr": 1e-2}
    rows = trained(tmp_path / "run", stop, seen, **more)
    evaluated = [row for row in rows if row.get("eval/return_mean") is not None]
    assert [row["eval/return_mean"] for row in evaluated] == [10.0, 5.0]
    assert evaluated[0] is not rows[-1]
    assert evaluated[-1] is rows[-1]
    first = min(seen.seen)
    best = RunDir.open(tmp_path / "run").load_checkpoint("best")
    assert best.meta["env_steps_total"] == evaluated[0]["eval/env_steps"] == first < evaluated[0]["env_steps_total"]
    assert (best.meta["score"], best.meta["eval/return_mean"]) == (10.0, 10.0)
    again = bray.Experiment.load(tmp_path / "run", "best")
    assert again.evaluate(3)["eval/return_mean"] == seen.seen[first]  # of those very weights
    again.close()
    latest = RunDir.open(tmp_path / "run").load_checkpoint("latest")
    assert latest.meta["env_steps_total"] == rows[-1]["env_steps_total"]
    assert latest.state["json"]["best"] == 10.0


class Patient:
    """An evaluator that has ended only when it is waited for, and finds older weights better."""

    def __init__(self, plan):
        self.task = None

    def begin(self, task):
        self.task = task

    def finished(self, timeout):
        return timeout > 0

    def take(self):
        task, self.task = self.task, None
        result = {"eval/return_mean": 1000.0 - task.env_steps, "eval/env_steps": task.env_steps}
        return Looked(task.step, task.saved, result, None, "")

    def close(self):
        self.task = None


class Stops(Seen):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def on_train_result(self, experiment, row):
        if row["training_iteration"] == 2:
            experiment.request_stop(**self.how)


@pytest.mark.parametrize(("seen", "limit"), [(Seen(), 2), (Stops(), 9)], ids=["by a limit", "by a callback"])
def test_the_end_loses_no_evaluation(tmp_path, monkeypatch, caplog, seen, limit):
    monkeypatch.setattr(evaluations, "Evaluator", Patient)
    caplog.set_level("INFO", "bray")
    rows = trained(tmp_path / "run", {"training_iteration": limit}, seen, eval_freq=1, eval_parallel=True)
    assert len(rows) == 2
    first, last = rows[0]["env_steps_total"], rows[1]["env_steps_total"]
    assert list(seen.seen) == [first, last]
    assert rows[1]["eval/env_steps"] == last
    assert f"evaluated at {first} env steps: return {1000 - first}" in caplog.text
    assert RunDir.open(tmp_path / "run").load_checkpoint("best").meta["env_steps_total"] == first


def test_an_end_in_a_hurry_says_that_an_evaluation_is_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(evaluations, "Evaluator", Patient)
    caplog.set_level("INFO", "bray")
    seen = Stops(hurry=True)
    rows = trained(tmp_path / "run", {"training_iteration": 9}, seen, eval_freq=1, eval_parallel=True)
    assert (len(rows), seen.seen) == (2, {})
    assert f"the evaluation of the weights at {rows[0]['env_steps_total']} env steps had not ended" in caplog.text


class Undrawn(CartPoleEnv):
    def render(self):
        raise RuntimeError("no screen")


def test_an_environment_that_cannot_be_drawn_loses_the_film_only(tmp_path, caplog):
    (row,) = trained(tmp_path / "run", {"training_iteration": 1}, Seen(), env=Undrawn, eval_freq=1, video_freq=1)
    assert "eval/return_mean" in row
    assert "video" not in row
    assert "no video: RuntimeError: no screen" in caplog.text


class Dies(CartPoleEnv):
    def reset(self, **how):
        if multiprocessing.current_process().name == "bray-evaluator":
            os._exit(3)
        return super().reset(**how)


@pytest.mark.slow
def test_a_crash_of_the_evaluator_is_told_and_training_goes_on(tmp_path, caplog):
    rows = trained(tmp_path / "run", {"training_iteration": 2}, Seen(), env=Dies, eval_freq=1, eval_parallel=True)
    assert len(rows) == 2
    assert "the evaluation failed: its process died" in caplog.text
    assert "eval/return_mean" not in rows[-1]


@pytest.mark.slow
def test_a_film_in_line(tmp_path, caplog):
    rows = trained(tmp_path / "run", {"training_iteration": 2}, Seen(), video_freq=2)
    assert "video" not in rows[0]
    assert (tmp_path / "run" / rows[1]["video"]).exists()
    (line,) = [json.loads(x) for x in (tmp_path / "run" / "result.jsonl").read_text().splitlines()][1:]
    assert line["video"] == rows[1]["video"]


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(ConfigError, match="nothing is evaluated: set eval_freq"):
        bray.Experiment(run="PPO", env="CartPole-v1", eval_parallel=True)


class Endless(CartPoleEnv):
    """Goes on, whatever happens."""

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


def test_an_episode_without_an_end_is_cut(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("bray.train.evaluate.LONGEST", 40)
    exp = bray.Experiment(run="PPO", env="test_evaluations:Endless", path=tmp_path / "run", **SMALL)
    assert exp.play(5, num_envs=2) == [(40.0, 40), (40.0, 40)]
    exp.close()
    assert "an episode was cut after 40 steps and counts as it stands: env.max_episode_steps=N" in caplog.text
