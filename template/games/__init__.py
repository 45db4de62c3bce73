"""The games, as Gymnasium environments. `template.gamecore` plays them over the network; `bray train` plays them in its
own process."""

from __future__ import annotations

import gymnasium as gym


def make_game(name: str) -> gym.Env:
    """`grid`, `atari`, or `atari:Breakout`."""
    kind, _, title = name.partition(":")
    if kind == "grid":
        from template.games.grid import GridEnv

        return GridEnv()
    if kind == "atari":
        from template.games.atari import AtariEnv

        return AtariEnv(title or "Pong")
    raise ValueError(f"unknown game {name!r}: grid, atari or atari:NAME")
