"""SQIL: SAC that is rewarded for being where demonstrators were, nothing else (Reddy et al. 2020).   B batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bray.algos import sac
from bray.errors import ConfigError

DEFAULTS, Policy, experience, make_model = sac.DEFAULTS, sac.Policy, sac.experience, sac.make_model
"""As SAC acts and replays."""


@dataclass(frozen=True)
class Config(sac.Config):
    def __post_init__(self) -> None:
        check_one_step(self.n_step)


class Learner(sac.Learner):
    """SAC's, with rewards of its own."""

    config: Config

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().columns(batch) | {"reward": reward(batch)}


def reward(batch: dict[str, Any]) -> np.ndarray:
    """`[B]`: 1 for what was demonstrated, 0 for what was played."""
    if "demo" not in batch:
        raise ConfigError(
            "SQIL tells what was demonstrated from what it plays itself, and needs both: --data FILES --data-share 0.5 "
            "beside --env"
        )
    demo: np.ndarray = batch["demo"]
    return demo


def check_one_step(n_step: int) -> None:
    if n_step != 1:
        raise ConfigError(f"n_step={n_step}: SQIL rewards single transitions, leave it at 1")
