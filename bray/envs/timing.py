"""How long a step of an environment takes, found out in a process of its own: one that hangs or crashes there does so
without the process that asks."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bray.envs.build import Builder
from bray.envs.process import Child, Lost, error_answer, forget_server, portable, unpack

MOST_S, MOST_STEPS, FIRST = 0.4, 48, 3
"""Seconds and steps that are timed at most, and steps before them."""
LIMIT_S = 60.0
"""After which an environment counts as hung, its start included."""


def time_step(build: Builder) -> tuple[float, bool] | None:
    """Seconds of a step of one environment, and whether it waits more than it computes. None: it can only be made by
    running the user's script again. Raises `Lost` where it hung or its process ended, and what it raised."""
    told, needs_main = portable(replace(build, remote=True))
    if needs_main:
        return None
    child = Child(serve_timing, (told,), "bray-timing", __name__)
    try:
        found: tuple[float, bool] = unpack(child.receive(LIMIT_S))[0]
        return found
    except Lost as e:
        child.kill()
        raise Lost(f"{e} ({child.end})") from None
    finally:
        child.kill()
        forget_server(__name__)  # it is one process for the whole run otherwise


def serve_timing(conn: Connection, told: bytes) -> None:
    """In the child."""
    try:
        made, _ = pickle.loads(told)(0)  # our own bytes, from our own parent
        answer: tuple[Any, ...] = ("ok", _timed(made), [])
    except BaseException as e:
        answer = error_answer(e)
    conn.send_bytes(pickle.dumps(answer))


def _timed(made: Any) -> tuple[float, bool]:
    made.action_space.seed(0)
    made.reset(seed=0)
    took: list[tuple[float, float]] = []
    end = time.perf_counter() + MOST_S
    for step in range(FIRST + MOST_STEPS):
        action = made.action_space.sample()
        wall, cpu = time.perf_counter(), time.thread_time()
        _, _, terminated, truncated, _ = made.step(action)
        if step >= FIRST:
            took.append((time.perf_counter() - wall, time.thread_time() - cpu))
        if terminated or truncated:
            made.reset()
        if took and time.perf_counter() > end:
            break
    wall, cpu = (float(np.median(column)) for column in zip(*took, strict=True))
    return wall, wall > 2.0 * cpu and wall > 1e-3
