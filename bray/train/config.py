"""How long, where and how carefully a run goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field

from bray.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """How long, where and how carefully a run goes."""

    algorithm: str = "PPO"
    """A known algorithm's name, or `module:Name` of your own."""
    seed: int = 0
    """Seed of everything random in the run."""
    stop: dict[str, float] = field(default_factory=dict)
    """The run ends when any of these metrics is reached, e.g. {episode_return_mean: 475, env_steps_total: 200000}; -1 for a count is no
    limit. It ends with the iteration, but for episodes_total: that one is exact (episodes that end in the same step beyond it are not
    counted, and an on-policy algorithm does not learn from the rollout that was cut short)."""
    device: str = "cpu"
    """Where the learner computes: cpu, cuda, cuda:N, or auto (a GPU when there is one)."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of PyTorch; null = one for vector observations (more are slower there), all cores for pictures."""
    record: bool = True
    """Record updates and forwards once and replay them without Python (`bray.capture`); false runs them eagerly."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Rollout processes beside this one; only 0 is there yet."""
    eval_freq: Annotated[int, Field(ge=0)] = 0
    """Iterations between two evaluations; 0 = none while training."""
    eval_episodes: Annotated[int, Field(ge=1)] = 10
    """Greedy episodes per evaluation, on seeds that are the same in every run."""
    checkpoint_freq: Annotated[int, Field(ge=0)] = 0
    """Iterations between two checkpoints; 0 = by time alone, and at the end."""
    checkpoint_every_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds between two checkpoints, looked at after each iteration; 0 = not by time."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = 5
    """Newest checkpoints kept, beside the best one; null = all."""
    checkpoint_score: str | None = None
    """What the best checkpoint goes by: a key of the result rows, with a '-' before it where lower is better, e.g. episode_return_max,
    -loss/value_loss; null = eval/return_mean where there are evaluations, else episode_return_mean."""
    checkpoint_replay: Literal["auto", "always", "never"] = "auto"
    """Whether checkpoints hold the replay's rows: auto = up to 2 GiB. Without them a resumed run starts with an empty replay."""
    save_figure: bool = True
    """Whether the learning curve is drawn to figures/learning_curve.png at the end."""
    show_figure: bool = False
    """Whether it is shown in a window at the end; the run ends when that is closed."""


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device: expected cpu, cuda, cuda:N or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device is {name!r}, but PyTorch finds no CUDA GPU here. Use --device cpu, or auto.")
    return device
