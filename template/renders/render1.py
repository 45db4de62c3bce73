"""Pictures of a saved episode, for `bray render`."""

from __future__ import annotations

import numpy as np

import bray
from template.agents.metrics_agent import probabilities
from template.games.grid import PLANES, SIZE

COLOURS = {
    "wall": (70, 70, 80),
    "agent": (60, 120, 220),
    "key": (230, 180, 40),
    "door": (150, 90, 50),
    "goal": (70, 170, 90),
}
FLOOR, LINE = (245, 245, 240), (225, 225, 220)
CELL = 32


def render(episode: list[bray.State], tick: int) -> np.ndarray:
    """
    Args:
        episode: the states of an episode, as the agents left them.
        tick: which of them to show.
    Returns:
        A picture `[height, width, 3]` of bytes, or a list of pictures.
    """
    obs = episode[tick].obs
    if obs.shape != (len(PLANES), SIZE, SIZE):  # an Atari game: the newest picture is the last one
        return np.repeat(np.kron(obs[-1], np.ones((8, 8), np.uint8))[:, :, None], 3, axis=2)
    board = np.full((SIZE, SIZE, 3), FLOOR, np.uint8)
    for name, plane in zip(PLANES, obs, strict=True):
        board[plane > 0] = COLOURS[name]
    picture = board.repeat(CELL, 0).repeat(CELL, 1)
    picture[::CELL] = picture[:, ::CELL] = LINE
    return picture


def action_distribution(episode: list[bray.State], tick: int) -> np.ndarray:
    """A bar for each action, as high as it was likely; the one that was taken is darker."""
    state = episode[tick]
    p = probabilities(state.outputs["dist"])
    height, width = 160, 40
    picture = np.full((height, width * len(p), 3), FLOOR, np.uint8)
    for i, likely in enumerate(p):
        top = height - max(1, round(likely * height))
        colour = COLOURS["agent"] if i == state.action else (170, 195, 235)
        picture[top:, i * width + 4 : (i + 1) * width - 4] = colour
    return picture
