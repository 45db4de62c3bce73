"""A project with episodes and render functions, for the tests of `bray render`."""

import textwrap

import numpy as np

from bray.serving.episodes import pack_state, write_episode
from bray.serving.state import State

RENDERS = """
import time

import numpy as np

calls = []


def render(episode, tick):
    calls.append(tick)
    picture = np.zeros((8, 12, 3), np.uint8)
    picture[:, : tick % 12 + 1] = (200, 10 * (tick % 20), 40)
    return picture


def several(episode, tick):
    return {"bars": np.ones((6, 9)), "deep": [np.zeros((4, 4), bool), np.full((5, 7, 4), 128)]}


def fails(episode, tick):
    if tick % 2:
        raise ValueError(f"nothing to see at {tick}")
    return np.zeros((4, 4))


def hangs(episode, tick):
    while tick == 1:
        time.sleep(0.01)
    return np.zeros((4, 4))


def leaves(episode, tick):
    raise SystemExit("the user's code wants to go")


def asks(episode, tick):
    from bray.errors import ConfigError

    raise ConfigError("of the user's own making")


def wrong(episode, tick):
    return np.zeros((3, 20, 20))


def growing(episode, tick):
    return np.full((4 + tick, 6, 3), 255, np.uint8)
"""


def state(t, session="game-1", actor=0):
    made = State(session, actor, t, {"position": [t, 2 * t], "name": "a\nb"})
    made.output = {"action": t % 4}
    made.features = np.arange(6, dtype=np.float32).reshape(2, 3) + t
    made.image = np.full((3, 16, 16), 10 * t % 250, np.uint8)
    made.value = float("nan")
    return made


def save(run, ticks=12, session="game-1", actor=0):
    return write_episode(
        run / "episodes", session, actor, [pack_state(state(t, session, actor)) for t in range(ticks)], 100
    )


def make_project(root, module):
    """`root/game` with one trial and an episode of 12 ticks, and the module of the render functions beside it."""
    (root / f"{module}.py").write_text(textwrap.dedent(RENDERS))
    save(root / "game" / "first")
    return root / "game"
