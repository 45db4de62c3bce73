"""A process that evaluates and films copies of the weights, one at a time, while the training goes on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bray.algos import make_policy
from bray.capture import Record
from bray.envs.config import EnvConfig
from bray.envs.process import STOP, Child, Lost, error_answer, portable, unpack
from bray.errors import BrayError, ConfigError, EnvError
from bray.experiment.film import film
from bray.experiment.policy import ServedPolicy
from bray.inference.torch_engine import load_weights
from bray.spec import EnvSpec
from bray.train.evaluate import evaluate_model
from bray.train.sampler import Parts
from bray.video import write_video


@dataclass
class EvaluationPlan(Parts):
    """What the process is told."""

    spec: EnvSpec


class Task(NamedTuple):
    """Weights to look at. `step` and `env_steps` say which they are."""

    weights: Mapping[str, np.ndarray]
    step: int
    env_steps: int
    episodes: int
    """To evaluate; 0 = none."""
    video: Path | None
    """A film of one episode goes there."""
    saved: bool = False
    """Whether there is a checkpoint of them."""


class Looked(NamedTuple):
    """What became of a task."""

    step: int
    saved: bool
    result: dict[str, Any] | None
    video: Path | None
    no_video: str
    """Why there is no film."""


def look_at(served: ServedPolicy, env: EnvConfig, task: Task, record: Record, threads: int = 0) -> Looked:
    """Evaluate and film the weights that `served` has now. `threads`: as those of `evaluate_model`."""
    result, video, no_video = None, None, ""
    if task.episodes:
        result = evaluate_model(served.model, served.policy, env, task.episodes, record, threads)
        result["eval/env_steps"] = task.env_steps
    if task.video is not None:
        try:
            frames, _, _, fps = film(served, env)
            video = write_video(frames, task.video, fps)
        except Exception as e:  # render() is the user's code: a film must not lose an evaluation, nor end a training
            no_video = str(e) if isinstance(e, (BrayError, OSError)) else f"{type(e).__name__}: {e}"
    return Looked(task.step, task.saved, result, video, no_video)


class Evaluator:
    """See the module. `begin` returns at once; `finished` says whether the answer of `take` is there. A process that
    died is started again by the next `begin`."""

    def __init__(self, plan: EvaluationPlan):
        try:
            self._told, self._needs_main = portable(plan)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"eval_parallel: this environment or model cannot be sent to another process ({e}): name it as "
                "module:Class, or set eval_parallel=false"
            ) from e
        self._child: Child | None = None
        self._waiting: bytes | None = None  # a task for a process that is not ready yet
        self.task: Task | None = None
        """What it is looking at."""

    def begin(self, task: Task) -> None:
        self.task, message = task, pickle.dumps(task)
        if self._child is None:
            self._child = Child(serve_evaluator, (self._told,), "bray-evaluator", Parts.__module__, self._needs_main)
            self._waiting = message  # it would not be read before the process is there
        else:
            self._child.send(message)

    def finished(self, timeout: float) -> bool:
        """Whether the task is done, waiting at most so long. `Lost` or the error of the process is raised, and the
        process is gone then."""
        assert self._child is not None
        try:
            if not self._child.conn.poll(timeout):
                return False
            if self._waiting is None:
                return True
            self._child.started()
            self._child.send(self._waiting)
        except (Lost, BrayError, OSError):
            self.close()
            raise
        self._waiting = None
        return False

    def take(self) -> Looked:
        assert self._child is not None
        try:
            looked: Looked = unpack(self._child.receive(None))[0]
        except Lost:
            where = self._child.stack()
            self.close()
            raise Lost(f"died\n{where}".rstrip()) from None
        finally:
            self.task = None
        return looked

    def close(self) -> None:
        child, self._child, self._waiting, self.task = self._child, None, None, None
        if child is not None:
            with suppress(OSError, EnvError):
                child.kill()


def serve_evaluator(conn: Connection, told: bytes) -> None:
    """In the process: one task after the other."""
    try:
        plan: EvaluationPlan = pickle.loads(told)  # our own bytes, from our own parent
        torch.set_num_threads(1)
        torch.manual_seed(plan.run.seed)
        policy = make_policy(plan.algo, plan.config, plan.spec)
        served = ServedPolicy(policy, plan.algo.make_model(plan.config, plan.spec, plan.model), plan.spec)
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    while (message := conn.recv_bytes()) != STOP:
        task: Task = pickle.loads(message)
        try:
            load_weights(served.model, task.weights)
            looked = look_at(served, plan.env, task, plan.run.record, threads=1)  # the training needs the other cores
            answer: tuple[Any, ...] = ("ok", looked, [])
        except Exception as e:
            answer = error_answer(e)
        conn.send(answer)
