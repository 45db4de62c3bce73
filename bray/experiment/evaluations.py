"""Evaluations and videos of a run while it trains: in line, or beside it in a process of its own (`eval_parallel`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bray.data.piece import DEFAULT
from bray.envs.process import Lost
from bray.envs.registry import sent
from bray.errors import BrayError, ConfigError, DiskFull
from bray.experiment.evaluator import Evaluated, EvaluationPlan, Evaluator, Looked, Task, look_at, looks
from bray.rundir import RunDir
from bray.train.callbacks import CallbackList
from bray.train.games import GameTraining
from bray.train.goals import Score
from bray.train.policies import PolicyTrainings

logger = logging.getLogger("bray")

_LISTEN_S = 0.5


class Evaluations:
    """Looks at the weights of an experiment every `eval_freq` and `video_freq` iterations. Beside the training there is
    one evaluation at a time: what falls due meanwhile begins when that one has ended, with the weights of then."""

    def __init__(self, experiment: Any, directory: RunDir, score: Score):
        self._experiment, self._directory, self._score = experiment, directory, score
        config, self._training = experiment.config, experiment.training
        self._run, self._env = config["run"], config["env"]
        self._seating = self._training.seating if isinstance(self._training, GameTraining) else None
        if self._run.eval_parallel and self._run.self_play is not None:
            raise ConfigError(
                "run.eval_parallel: the opponents of self-play are in this process: leave it out, and eval_freq "
                "evaluates here"
            )
        self._evaluate = self._film = False  # due
        self._beside: Evaluator | None = None
        if self._run.eval_parallel:
            env = sent(self._env) if experiment.has_env else self._env
            made: Mapping[str, Any] = experiment.policies or {DEFAULT: experiment}
            policies = {
                name: Evaluated(of.algo, of.config["algo"], self._training.sides[name].spec, of.config["model"])
                for name, of in made.items()
            }
            self._beside = Evaluator(EvaluationPlan(self._run, env, policies, self._seating))

    def look(self, row: dict[str, Any], callbacks: CallbackList) -> None:
        """After an iteration: tell its row of evaluations that have ended. In line, those that are due now."""
        self._evaluate |= self._is_due(self._run.eval_freq)
        self._film |= self._is_due(self._run.video_freq)
        if self._beside is None:
            if self._evaluate or self._film:
                self._tell(row, self._look_here(), callbacks)
        elif (looked := self._finish(self._beside, wait=False)) is not None:
            self._tell(row, looked, callbacks)

    def _look_here(self) -> Looked:
        task, t = self._task(), self._training
        evaluate, shoot = looks(t.sides, self._env, self._seating, self._run.record)
        if isinstance(t, (PolicyTrainings, GameTraining)):
            evaluate = t.evaluate
        return look_at(task, evaluate, shoot)

    def finish(self, row: dict[str, Any], callbacks: CallbackList) -> None:
        """After the last iteration: wait for what is under way, and then for what is due."""
        if self._beside is None:
            return
        if (looked := self._finish(self._beside, wait=True)) is not None:
            self._tell(row, looked, callbacks)
        if (self._evaluate or self._film) and not self._experiment.hurries:
            self._begin(self._beside, saved=False)
            if (looked := self._finish(self._beside, wait=True)) is not None:
                self._tell(row, looked, callbacks)

    def begin_when_due(self) -> None:
        """After the row of an iteration was written: look at its weights beside the training. They are saved first, so
        that there is a checkpoint to call the best."""
        if self._beside is None or self._beside.task is not None or not (self._evaluate or self._film):
            return
        try:
            if self._evaluate and not self._experiment.all_saved:
                self._experiment.save()
        except DiskFull as e:
            logger.warning("%s The weights that are evaluated now have no checkpoint.", e)
        self._begin(self._beside, self._experiment.all_saved)

    @property
    def looked_at(self) -> set[int]:
        """The step of the checkpoint whose weights are being evaluated: it has to stay until its score is known."""
        task = None if self._beside is None else self._beside.task
        return {task.step} if task is not None and task.saved else set()

    def _is_due(self, every: int) -> bool:
        return bool(every) and self._training.iteration % every == 0

    def _task(self) -> Task:
        """What is due, with the weights of now."""
        training = self._training
        video = self._directory.folder("videos") / f"steps-{training.env_steps:09d}.mp4" if self._film else None
        episodes = self._run.eval_episodes if self._evaluate else 0
        self._evaluate = self._film = False
        weights = {} if self._beside is None else {name: side.weights() for name, side in training.sides.items()}
        return Task(weights, training.number, training.env_steps, episodes, video)

    def _begin(self, beside: Evaluator, saved: bool) -> None:
        try:
            beside.begin(self._task()._replace(saved=saved))
        except (Lost, OSError) as e:
            beside.close()
            self._failed(e)

    def _finish(self, beside: Evaluator, wait: bool) -> Looked | None:
        """What the process has found; None where it is still at it, or failed."""
        try:
            while beside.task is not None:
                if beside.finished(_LISTEN_S if wait else 0.0):
                    return beside.take()
                if not wait or self._experiment.hurries:
                    break
        except (Lost, BrayError, OSError) as e:
            self._failed(e)
        return None

    def _failed(self, e: Exception) -> None:
        logger.warning("the evaluation failed: its process %s. Training goes on; the next one starts another.", e)

    def _tell(self, row: dict[str, Any], looked: Looked, callbacks: CallbackList) -> None:
        """Tell a row what was found. A checkpoint of the weights gets their score."""
        if looked.video is not None:
            row["video"] = str(looked.video.relative_to(self._directory.path))
            logger.info("video: %s", looked.video)
        elif looked.no_video:
            logger.warning("no video: %s", looked.no_video)
        if looked.result is not None:
            try:
                callbacks.on_evaluate(self._experiment, looked.result)
            finally:  # what was found is not lost where a callback raises
                if "eval/return_mean" in row:  # two have ended with the run, and the row has room for one
                    logger.info(
                        "evaluated at %s env steps: return %s; the last row has the evaluation after it",
                        row.get("eval/env_steps"),
                        row["eval/return_mean"],
                    )
                row |= looked.result
                if looked.saved:
                    self._rate(looked.step, looked.result)

    def _rate(self, step: int, result: dict[str, Any]) -> None:
        """Write down how the weights of a checkpoint were evaluated, and make it the best where it is."""
        score, meta = self._score.of(result), {"eval/return_mean": result.get("eval/return_mean")}
        if self._score.key.startswith("eval/"):
            meta["score"] = score
        better = self._score.is_better(score)
        try:
            self._directory.rate(step, meta, better)
        except DiskFull as e:
            logger.warning("%s Training goes on, and the score of checkpoint %d is not in its meta.json.", e, step)
        else:
            self._score.best = score if better else self._score.best

    def close(self) -> None:
        if self._beside is None:
            return
        if (task := self._beside.task) is not None:
            logger.info("the evaluation of the weights at %d env steps had not ended, and is dropped", task.env_steps)
        self._beside.close()
