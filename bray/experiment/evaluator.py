"""A process that evaluates and films copies of the weights, one at a time, while the training goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bray.algos import make_policy
from bray.capture import Record
from bray.envs.config import EnvConfig
from bray.envs.process import STOP, Child, Lost, error_answer, portable, unpack
from bray.envs.table import Seating
from bray.errors import BrayError, ConfigError, EnvError
from bray.experiment.film import Film, film, film_game
from bray.experiment.policy import ServedPolicy
from bray.inference.torch_engine import load_weights
from bray.spec import EnvSpec
from bray.train.acting import player_of
from bray.train.config import RunConfig
from bray.train.evaluate import evaluate_model
from bray.train.games import evaluate_games
from bray.video import write_video


class Evaluated(NamedTuple):
    """A policy as the process makes it."""

    algo: Any
    config: Any
    """Of the algorithm."""
    spec: EnvSpec
    model: Any

    def made(self) -> ServedPolicy:
        policy = make_policy(self.algo, self.config, self.spec)
        return ServedPolicy(policy, self.algo.make_model(self.config, self.spec, self.model), self.spec)


@dataclass
class EvaluationPlan:
    """What the process is told."""

    run: RunConfig
    env: EnvConfig
    policies: dict[str, Evaluated]
    seating: Seating | None = None
    """Of a game of several agents."""


class Task(NamedTuple):
    """Weights to look at. `step` and `env_steps` say which they are."""

    weights: Mapping[str, Mapping[str, np.ndarray]]
    """Of each policy."""
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


Evaluate = Callable[[int], dict[str, Any]]
Shoot = Callable[[], Film]


def looks(
    policies: Mapping[str, Any], env: EnvConfig, seating: Seating | None, record: Record, threads: int = 0
) -> tuple[Evaluate, Shoot]:
    """How to evaluate and to film the weights that these have now, each a `policy`, its `model` and a `spec`.
    `threads`: as those of `evaluate_model`."""
    if seating is not None:
        players = {name: player_of(of.model, of.policy, record) for name, of in policies.items()}
        return partial(evaluate_games, players, env, seating), partial(film_game, lambda spec: players, env, seating)
    one = next(iter(policies.values()))

    def evaluate(episodes: int) -> dict[str, Any]:
        return evaluate_model(one.model, one.policy, env, episodes, record, threads)

    return evaluate, lambda: film(ServedPolicy(one.policy, one.model, one.spec), env)


def look_at(task: Task, evaluate: Evaluate, shoot: Shoot) -> Looked:
    """Do what a task asks for."""
    result, video, no_video = None, None, ""
    if task.episodes:
        result = evaluate(task.episodes) | {"eval/env_steps": task.env_steps}
    if task.video is not None:
        try:
            frames, _, _, fps = shoot()
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
            self._child = Child(
                serve_evaluator, (self._told,), "bray-evaluator", EvaluationPlan.__module__, self._needs_main
            )
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
        served = {name: policy.made() for name, policy in plan.policies.items()}
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    while (message := conn.recv_bytes()) != STOP:
        task: Task = pickle.loads(message)
        try:
            for name, weights in task.weights.items():
                load_weights(served[name].model, weights)
            # The training needs the other cores.
            looked = look_at(task, *looks(served, plan.env, plan.seating, plan.run.record, threads=1))
            answer: tuple[Any, ...] = ("ok", looked, [])
        except Exception as e:
            answer = error_answer(e)
        conn.send(answer)
