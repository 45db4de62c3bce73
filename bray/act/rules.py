"""Rules: how outputs of a Model become actions, in numpy; masks are applied here.

`rng=None` means the most likely action. A rule is known by its name in a run's `policy.json`, so that a service acts by
it without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bray import distributions
from bray.act.clock import Clock
from bray.errors import UnknownName
from bray.spec import ActionLayout

Arrays = dict[str, np.ndarray]
Rng = np.random.Generator | None
Mask = np.ndarray | None


class Rule:
    """A way to choose."""

    name = ""
    reads: tuple[str, ...] = ()
    """Outputs of the Model."""
    stochastic = True
    """Whether draws are what it was trained for, not only for exploring."""

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        """`action`, flat as the learner wants it, and what else it keeps."""
        raise NotImplementedError

    def probabilities(self, layout: ActionLayout, outputs: Arrays, mask: Mask, clock: Clock) -> np.ndarray:
        """Of the choices of a single Discrete, `[B, N]` float64: how often `choose` draws each."""
        best: np.ndarray = np.eye(layout.num_logits)[self.choose(layout, outputs, mask, None, clock)["action"]]
        return best

    def seat(self, first: int, rows: int, total: int) -> None:
        """As `Policy.seat`."""

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        """Outputs that know nothing: drawn from, they give random legal actions."""
        return {name: np.zeros((rows, layout.num_params), np.float32) for name in self.reads}

    def numbers(self, env_steps: int) -> dict[str, float]:
        """What a result row says of it."""
        return {}

    def trained(self) -> dict[str, float]:
        """Its settings at the end of training, for `policy.json`."""
        return {}


class Distribution(Rule):
    """Draw from the distribution head; keeps the log-probability."""

    name, reads = "dist", ("dist",)

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        action, logp = distributions.sample(layout, outputs["dist"], rng, mask)
        return {"action": action, "logp": logp}

    def probabilities(self, layout: ActionLayout, outputs: Arrays, mask: Mask, clock: Clock) -> np.ndarray:
        logits = outputs["dist"].astype(np.float64)
        if mask is not None:
            logits = np.where(mask, logits, -np.inf)
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        chances: np.ndarray = odds / odds.sum(-1, keepdims=True)
        return chances


class Best(Distribution):
    """The most likely action of the distribution head, always: for policies that explore by other weights, not by
    draws."""

    name, stochastic = "best", False

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        return super().choose(layout, outputs, mask, None, clock)

    probabilities = Rule.probabilities

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        return {"dist": rng.standard_normal((rows, layout.num_params), np.float32)}


RULES: dict[str, Callable[..., Rule]] = {rule.name: rule for rule in (Distribution, Best)}
"""By name; a rule of your own is added here."""


def make_rule(name: str, settings: Mapping[str, Any] | None = None) -> Rule:
    """The rule that a `policy.json` names, with its settings at the end of training."""
    if name not in RULES:
        raise UnknownName("acting rule", name, RULES, "policy.json")
    return RULES[name](**settings or {})
