"""What looks wrong in the numbers of a run, in words: said once per cause, with what usually helps.

Each rule looks at a result row and gives a sentence where it looks bad; it is said when 5 of the last 10 rows do. The
limits are far from what healthy runs show (the pages of docs/algorithms tell what that is): a warning is to be
believed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bray.metrics import number, short

logger = logging.getLogger("bray")

DEAD_UNITS = "health/dead_units"
"""The key of a row, where they were counted."""
SECTIONS = ("model", "env", "algo")
"""Of a config: their options are what rules look at and advice names."""
HUGE = 1e20
"""A loss beyond this is no loss any more: the next square of it is infinite."""
KL_FAR = 0.06
CLIPPED = 0.4
CERTAIN = 0.01
"""Share of its first entropy below which a policy always does the same."""
UNEXPLAINED = -0.5
Q_BEYOND = 10.0
"""Times the largest value that the rewards allow."""
REWARD_SCALE = 1e4
"""Size of values that a network does not get to by itself."""
GRADIENTS_GROWN = 1_000.0
DEAD = 0.9
FEW_ROWS = 12.0
"""Rows of a gradient step below which it mostly follows chance."""
STALE = 4.0
"""Times the age that transitions have where learning and gathering keep pace."""
_LOWER_LR = ("lower", "lr")
_SCALE = (("set", "normalize_rewards"), ("set", "clip_rewards"))


class Symptoms:
    """Looks at every result row of a run. `options`: those of `SECTIONS`, by name; without them all that might help is
    named."""

    def __init__(self, options: Mapping[str, Any] | None = None, patience: int = 5):
        """`patience`: how many of the last rows, twice as many, have to look bad."""
        self.options, self.patience = options, patience
        self.told: list[str] = []
        """Causes, in the order in which they were said."""
        self._first: dict[str, float] = {}
        self._largest = 0.0
        self._counted = [0.0, 0.0]  # environment and learner steps of the last row
        self._norms: list[float] = []
        self._rules: dict[str, tuple[int, Callable[[Mapping[str, Any]], str]]] = {
            "loss": (1, self._loss),
            "entropy": (patience, self._entropy),
            "step size": (patience, self._step_size),
            "value function": (4 * patience, self._value_function),
            "action values": (patience, self._action_values),
            "reward scale": (patience, self._reward_scale),
            "gradients": (patience, self._gradients),
            "dead units": (1, self._dead_units),
            "stale replay": (patience, self._stale_replay),
            "small minibatches": (1, self._small_minibatches),
        }
        self._bad = {cause: deque[bool](maxlen=2 * most) for cause, (most, _) in self._rules.items()}

    @property
    def causes(self) -> list[str]:
        """All that it looks for."""
        return list(self._rules)

    def resume(self, row: Mapping[str, Any], told: Iterable[str]) -> None:
        """Go on after this row; the causes `told` are not said again."""
        self.told += told
        self._counted = _counts(row)

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Say what is to be said of this row; returns the causes that were said so far."""
        for cause, (patience, rule) in self._rules.items():
            if cause in self.told:
                continue
            sentence = rule(row)
            self._bad[cause].append(bool(sentence))
            if sentence and sum(self._bad[cause]) >= patience:
                self.told.append(cause)
                logger.warning("%s", sentence)
        return self.told

    # --- rules --------------------------------------------------------------------------------------------------------

    def _loss(self, row: Mapping[str, Any]) -> str:
        for key, value in row.items():
            if key.startswith("loss/") and "loss" in key[5:] and abs(value or 0.0) > HUGE:
                return f"{key} is {value:.3g}: this run is lost, nothing is learnt from such numbers. " + self._helps(
                    _LOWER_LR, ("set", "max_grad_norm"), ("set", "clip_rewards")
                )
        return ""

    def _entropy(self, row: Mapping[str, Any]) -> str:
        """A policy that always does the same, and is no better than at the start. (Entropies of continuous actions have
        no zero: they only pass it.)"""
        entropy, got = number(row, "loss/entropy"), number(row, "episode_return_mean")
        if entropy is None or got is None:
            return ""
        at_first, worst = self._first.setdefault("entropy", abs(entropy)), self._first.setdefault("return", got)
        if abs(entropy) >= max(1e-3, CERTAIN * at_first) or got > worst + 0.05 * abs(worst):
            return ""
        return (
            f"the policy always does the same (entropy {entropy:.2g}) and its return of {short(got)} is no better "
            f"than at the start ({short(worst)}): this run is lost. Begin another one. "
            + self._helps(_LOWER_LR, ("raise", "entropy_coef"))
        )

    def _step_size(self, row: Mapping[str, Any]) -> str:
        kl, clipped = number(row, "loss/kl"), number(row, "loss/clip_fraction")
        if (kl or 0.0) <= KL_FAR and (clipped or 0.0) <= CLIPPED:
            return ""
        seen = [f"kl {kl:.2g}, usual is below 0.02"] if (kl or 0.0) > KL_FAR else []
        seen += [f"{clipped:.0%} of the rows are clipped, usual is below 20 %"] if (clipped or 0.0) > CLIPPED else []
        return (
            f"the policy moves too far in each update ({'; '.join(seen)}): it forgets what it learnt. "
            + self._helps(_LOWER_LR, ("lower", "epochs"), ("set", "target_kl"))
        )

    def _value_function(self, row: Mapping[str, Any]) -> str:
        """Worse than a constant, and wrong by much: where all returns are equal, explained variance means nothing."""
        explained, loss = number(row, "loss/explained_variance"), number(row, "loss/value_loss")
        scale = 1.0 if self._scaled else self._value_scale(row)
        if explained is None or loss is None or scale is None:
            return ""
        if explained > UNEXPLAINED or math.sqrt(2.0 * loss) < 0.1 * scale:
            return ""
        return (
            f"the value function is worse than a constant (explained variance {explained:.2f}), so advantages are "
            "noise. " + self._helps(("lower", "lr"), ("raise", "num_envs"), ("raise", "rollout_length"), *_SCALE)
        )

    def _action_values(self, row: Mapping[str, Any]) -> str:
        q, scale = number(row, "loss/q"), self._value_scale(row)
        if q is None or scale is None or self._scaled or abs(q) <= Q_BEYOND * max(scale, 1.0):
            return ""
        return (
            f"action values are far beyond what the rewards allow (loss/q is {q:.3g}, returns suggest {scale:.3g} at "
            "most): they feed on themselves. "
            + self._helps(
                _LOWER_LR, ("lower", "critic_lr"), ("raise", "target_period"), ("lower", "tau"), ("set", "double")
            )
        )

    def _reward_scale(self, row: Mapping[str, Any]) -> str:
        """Large rewards that the network has not followed: its values explain nothing, or are far from what they should
        be."""
        scale = self._value_scale(row, row.get("episode_return_mean"))
        if scale is None or self._scaled or scale < REWARD_SCALE:
            return ""
        explained, q = number(row, "loss/explained_variance"), number(row, "loss/q")
        if (explained is None or explained > 0.5) and (q is None or abs(q) > 0.1 * scale):
            return ""
        return (
            f"rewards are large (returns of {short(row['episode_return_mean'])}, so values of about {scale:.2g}), and "
            "a network gets there in many small steps. " + self._helps(*_SCALE)
        )

    def _gradients(self, row: Mapping[str, Any]) -> str:
        """Grown by orders of magnitude since the start."""
        norm = number(row, "loss/grad_norm")
        if norm is None:
            return ""
        if len(self._norms) < 2 * self.patience:
            self._norms.append(norm)
            return ""
        usual = statistics.median(self._norms)
        if norm <= GRADIENTS_GROWN * max(usual, 1e-3):
            return ""
        return f"gradients have grown from {usual:.2g} to {norm:.2g}. " + self._helps(
            _LOWER_LR, ("lower", "critic_lr"), ("set", "max_grad_norm"), *_SCALE
        )

    def _dead_units(self, row: Mapping[str, Any]) -> str:
        dead = number(row, DEAD_UNITS)
        if dead is None or dead < DEAD:
            return ""
        return (
            f"{dead:.0%} of the units of a layer say the same of every observation (ReLUs at zero, tanh at one end), "
            "and no gradient moves them any more. Begin another run. "
            + self._helps(_LOWER_LR, ("set", "layer_norm"), ("change", "fcnet_activation"), *_SCALE)
        )

    def _stale_replay(self, row: Mapping[str, Any]) -> str:
        """Transitions much older than they get where learning and gathering keep pace: half of what a replay of this
        size holds."""
        age, size = number(row, "replay/staleness_mean"), number(row, "replay/size")
        steps, updates = number(row, "env_steps_total"), number(row, "learner_steps_total")
        if not (age and size and steps and updates) or age <= STALE * max(100.0, 0.5 * size * updates / steps):
            return ""
        return (
            f"what is learnt from is {short(round(age))} gradient steps old: more is learnt than gathered. "
            + self._helps(
                ("set", "max_staleness"), ("raise", "train_every"), ("lower", "updates"), ("lower", "replay_size")
            )
        )

    def _small_minibatches(self, row: Mapping[str, Any]) -> str:
        """Few environments, and as many pieces as for many of them."""
        pieces, epochs = (number(self.options or {}, name) for name in ("minibatches", "epochs"))
        before, self._counted = self._counted, _counts(row)
        steps, updates = (now - then for now, then in zip(self._counted, before, strict=True))
        if (
            not pieces
            or pieces == 1
            or not epochs
            or steps <= 0
            or updates <= 0
            or steps * epochs / updates >= FEW_ROWS
        ):
            return ""
        return (
            f"each gradient step learns from {short(max(1, round(steps * epochs / updates)))} rows only, and follows "
            "chance more than the rewards. "
            + self._helps(("lower", "minibatches"), ("raise", "num_envs"), ("raise", "rollout_length"))
        )

    # --- what they share ----------------------------------------------------------------------------------------------

    @property
    def _scaled(self) -> bool:
        """Whether the learner sees other rewards than the log tells."""
        options = self.options or {}
        return bool(options.get("normalize_rewards") or options.get("clip_rewards"))

    def _value_scale(self, row: Mapping[str, Any], return_: float | None = None) -> float | None:
        """The discounted return that episodes of this return suggest: all of it, or its mean reward for ever. Default:
        the largest return so far."""
        low, high, length = (number(row, f"episode_{k}") for k in ("return_min", "return_max", "length_mean"))
        gamma = (self.options or {}).get("gamma")
        if low is None or high is None or not length or not isinstance(gamma, (int, float)):
            return None
        self._largest = max(abs(low), abs(high), self._largest)
        size = self._largest if return_ is None else abs(return_)
        return size * max(1.0, 1.0 / (length * max(1.0 - gamma, 1e-6)))

    def _helps(self, *what: tuple[str, str]) -> str:
        """`Usually helps: lower lr (0.1 now) or set target_kl.`, with options that this run has."""
        options = self.options
        known = [(verb, name) for verb, name in what if options is None or name in options]
        told = [
            f"{verb} {name}{self._now(name)}" for verb, name in known if verb != "set" or not (options or {}).get(name)
        ]
        if not told:
            return ""
        return f"Usually helps: {' or '.join(_listed(told))}."

    def _now(self, name: str) -> str:
        value = (self.options or {}).get(name)
        return f" ({short(value)} now)" if isinstance(value, (int, float, str)) and not isinstance(value, bool) else ""


def _counts(row: Mapping[str, Any]) -> list[float]:
    """Environment and learner steps so far."""
    return [number(row, key) or 0.0 for key in ("env_steps_total", "learner_steps_total")]


def _listed(words: Iterable[str]) -> list[str]:
    """`[a, b, c]` -> `["a, b", "c"]`, to be joined by a word."""
    *most, last = words
    return [", ".join(most), last] if most else [last]
