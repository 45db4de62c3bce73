"""A side: one policy of a run with what is its own: its Model, what it learns from, what learns, and its version."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from bray import tree
from bray.act import Clock
from bray.data.experience import Experience
from bray.data.piece import DEFAULT
from bray.diagnosis.divergence import not_finite
from bray.inference.torch_engine import load_weights
from bray.metrics.rows import side_key
from bray.train.units import SAMPLE, SAMPLE_BYTES, dead_share


@dataclass
class Side:
    """One policy of a run: what acts, what it learns from, what learns. Without a learner it is frozen."""

    model: nn.Module
    policy: Any
    experience: Experience
    learner: Any
    name: str = DEFAULT
    config: Any = None
    """Of the algorithm."""
    spec: Any = None
    """What it sees and does."""
    iterate: Callable[[Any], dict[str, float]] | None = None
    """An iteration of the algorithm's own: `iterate(driver)` gathers and learns with the driver's methods and returns
    numbers for the row (`loss/*`)."""

    @property
    def version(self) -> int:
        """Gradient steps of the weights."""
        return 0 if self.learner is None else int(self.learner.steps)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def with_numbers(self, losses: dict[str, float]) -> dict[str, float]:
        """The metrics of updates, and what the learner tells beside them; a `bray.Trainer` has nothing."""
        if (terms := getattr(self.learner, "terms", None)) is not None:
            terms.require_free(losses)
        return losses | getattr(self.learner, "numbers", dict)()

    def row(self, losses: dict[str, float], clock: Clock) -> dict[str, Any]:
        """What result rows say of it; `losses`: the means of its updates."""
        row = {
            **{loss_key(k): v for k, v in self.with_numbers(losses).items()},
            **{f"replay/{k}": v for k, v in self.experience.numbers().items()},
            **{f"policy/{k}": v for k, v in (self.policy.numbers(clock) if self.policy else {}).items()},
        }
        return row if self.name == DEFAULT else {side_key(self.name, k): v for k, v in row.items()}

    def recent_observations(self, rows: int = 1024, most_bytes: int = 8 << 20) -> Any:
        """The newest raw observations, for checking and calibrating exported models; at most `most_bytes` of them."""
        obs = self.experience.newest_obs(rows)
        if obs is None or not tree.length(obs):
            return None
        obs = self.learner.spec.acting(obs)
        rows = min(rows, tree.length(obs), max(1, most_bytes * tree.length(obs) // max(1, tree.nbytes(obs))))
        return tree.map(lambda x: np.ascontiguousarray(x[-rows:]), obs)

    def dead_units(self) -> float | None:
        """The share of units that are dead in the layer that has most of them, as the newest observations tell: None
        for a model without units that can die, NaN before there are observations."""
        obs = self.recent_observations(SAMPLE, SAMPLE_BYTES)
        return math.nan if obs is None else dead_share(self.model, obs)

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights_now(self) -> dict[str, np.ndarray]:
        """As they are; they change as training goes on, so whoever keeps them copies them."""
        return {k: v.detach().cpu().numpy() for k, v in self.model.state_dict().items()}

    def weights(self) -> dict[str, np.ndarray]:
        return {k: v.detach().cpu().numpy().copy() for k, v in self.model.state_dict().items()}

    def start_with(self, weights: Mapping[str, np.ndarray]) -> None:
        """Weights from elsewhere at the start of a run: the Learner's copies of the Model begin with them too."""
        load_weights(self.model, weights)
        if self.learner is not None:
            self.learner.start_with_model()

    def lost_weights(self, parts: Mapping[str, Any] | None = None) -> str:
        """Which weights are not finite, in words; empty where all are. `parts`: of its learner, where they are there
        already."""
        constants = {name for name, _ in self.model.named_buffers()}
        lost = not_finite(self.weights_now(), constants)
        if not lost and self.learner is not None:
            inside = dict(tree.paths(self.learner.state_dict()["parts"] if parts is None else parts))
            lost = not_finite(inside, inside.keys())  # a moment of Adam may overflow without harm
        return lost and (lost if self.name == DEFAULT else f"{lost} of policy {self.name}")

    # --- state --------------------------------------------------------------------------------------------------------

    def get_state(self, replay_dir: Path | None) -> dict[str, Any]:
        """Of its learner and experience: {"arrays": tree, "json": plain data, "exact": whether nothing is left out}."""
        learner = {"parts": {}} if self.learner is None else self.learner.state_dict()
        experience = self.experience.get_state(replay_dir)
        return {
            "arrays": {"learner": learner["parts"], "experience": experience["arrays"]},
            "json": {"learner": {k: v for k, v in learner.items() if k != "parts"}, "experience": experience["json"]},
            "exact": experience.get("exact", True),
        }

    def load_learner(self, arrays: Mapping[str, Any], json: Mapping[str, Any]) -> None:
        if self.learner is not None:
            self.learner.load_state_dict({"parts": arrays["learner"], **json["learner"]})

    def load_experience(self, arrays: Mapping[str, Any], json: Mapping[str, Any], replay_dir: Path | None) -> bool:
        """Returns whether that is exact."""
        return self.experience.set_state({"arrays": arrays["experience"], "json": json["experience"]}, replay_dir)


def loss_key(name: str) -> str:
    """The key of a metric in a row. A user's loss may name a group itself."""
    return name if "/" in name else f"loss/{name}"


class Means:
    """Means of the numbers of several updates; read once, since reading a tensor waits for its device."""

    def __init__(self) -> None:
        self.count = 0
        self._names: tuple[str, ...] = ()
        self._total: Tensor | None = None

    def add(self, update: Any) -> None:
        if update.names != self._names:  # a user's loss may name others from now on
            self._names, self._total, self.count = update.names, None, 0
        self._total = update.values if self._total is None else self._total + update.values
        self.count += 1

    def row(self) -> dict[str, float]:
        if self._total is None:
            return {}
        return dict(zip(self._names, (self._total / self.count).tolist(), strict=True))
