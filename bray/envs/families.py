"""Packages of environments that people install: what to install, how their ids begin, what a step costs
(docs/environments.md)."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One package of environments."""

    module: str
    """Imported to register its ids."""
    install: str
    """What pip installs."""
    ids: tuple[str, ...]
    """How its ids begin."""
    step_ms: float
    """About the time of one step, as measured on one core; `env.vector=auto` goes by it."""


FAMILIES = (
    Family("minigrid", "minigrid", ("MiniGrid-", "BabyAI-"), 0.1),
    Family("highway_env", "highway-env", ("highway-", "merge-", "roundabout-", "parking-", "intersection-"), 20.0),
    Family("flappy_bird_gymnasium", "flappy-bird-gymnasium", ("FlappyBird-",), 1.0),
    Family("crafter", "crafter gym", ("Crafter",), 1.0),
    Family("minatar.gym", "MinAtar", ("MinAtar/",), 0.02),
    Family("gym_anytrading", "gym-anytrading", ("stocks-v", "forex-v"), 0.01),
    Family("tetris_gymnasium.envs", "tetris-gymnasium", ("tetris_gymnasium/",), 0.2),
    Family("slimevolleygym", "slimevolleygym gym opencv-python", ("SlimeVolley",), 0.1),
    Family("gymnasium.envs.mujoco", "mujoco", (), 0.05),
    Family("gymnasium.envs.box2d", "box2d-py", (), 0.05),
    *(Family(f"gymnasium.envs.{part}", "gymnasium", (), 0.0) for part in ("classic_control", "toy_text", "tabular")),
    Family("ale_py", "ale-py", ("ALE/",), 0.5),
)


def family_of_id(name: str) -> Family | None:
    """The family whose ids begin like this."""
    return next((f for f in FAMILIES if name.startswith(f.ids)), None) if name else None


def family_of_module(module: str) -> Family | None:
    """The family whose package has this module (or `module:Class`)."""
    for family in FAMILIES:
        package = family.module if family.module.startswith("gymnasium.") else family.module.split(".")[0]
        if module == package or module.startswith((f"{package}.", f"{package}:")):
            return family
    return None
