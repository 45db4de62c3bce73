"""What looks wrong in the numbers of a run, in words: said once per cause, with what usually helps.

A check is a function of a run's rows and options that yields a sentence, with cause and cure, where the newest row
looks bad. It is said when 5 of the last 10 rows do. A number that a row does not have is NaN, for which no comparison
holds: a check asks what is bad, and says nothing where it cannot know. The limits are far from what healthy runs show
(the pages of docs/algorithms tell what that is): a warning is to be believed. To add one, write the function here under
`@check`, a line for the table of docs/algorithms.md, and its signs in tests/diagnosis/test_health.py.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bray.metrics import ENV_STEPS, number, short

logger = logging.getLogger("bray")

DEAD_UNITS = "health/dead_units"
"""The key of a row, where they were counted."""
SECTIONS = ("model", "env", "algo")
"""Of a config: their options are what checks look at and advice names."""
PATIENCE = 5
"""How many of the last rows, twice as many, have to look bad."""
HUGE = 1e20
"""A loss beyond this is no loss any more: the next square of it is infinite."""
KL_FAR = 0.06
CLIPPED = 0.4
CERTAIN = 0.01
"""Share of its first entropy below which a policy always does the same."""
UNEXPLAINED = -0.2
Q_BEYOND = 4.0
"""Times the largest value that the rewards allow."""
REWARD_SCALE = 1e4
"""Size of values that a network does not get to by itself."""
GRADIENTS_GROWN = 1_000.0
DEAD = 0.9
FEW_ROWS = 12.0
"""Rows of a gradient step below which it mostly follows chance."""
STALE = 4.0
"""How many times older than usual replayed transitions may be. Usual is the number of gradient steps that are made
while half of the replay is filled."""
FLAT_ROWS, FLAT_STEPS, FLAT_PICTURES = 50, 150_000, 4
"""How long a return may stand still: rows and steps, the steps of Atari games times a factor."""
LOST_GAIN = 0.1
"""Share of what was gained that a policy which collapsed has left."""
ENDLESS = 5_000
"""Steps of each environment in which an episode should end, or five times its usual length."""
HOT = 100.0
"""A temperature, in rewards of a step, at which the entropy is all that counts."""
UNUSED = 0.2
"""Mean weight of importance sampling below which little is learnt from most rows."""
_SCALE = ("set normalize_rewards", "set clip_rewards")
_RETURN = "episode_return_mean"
_BEGINNINGS = (("loss/entropy", _RETURN), ("loss/grad_norm",), (_RETURN,))  # what checks ask `Rows.first` for


class Rows:
    """What is kept of the rows of a run so far: the newest two, how it began, and what its returns have been since.
    `options`: as `Symptoms` has them."""

    def __init__(self, options: Mapping[str, Any] | None = None, patience: int = PATIENCE):
        self._options, self.beginning = options, 2 * patience
        self.now: Mapping[str, Any] = {}
        self.before: Mapping[str, Any] = {}
        self.largest_return = math.nan
        """Of all episodes, whatever its sign."""
        self._first: dict[tuple[str, ...], list[list[float]]] = {keys: [] for keys in _BEGINNINGS}
        self.seen = 0
        self.resumed = False
        self._newest = deque[float](maxlen=self.beginning)
        self.best = -math.inf
        """The best mean return of as many rows as the beginning has."""
        self.longest = 0.0
        """Mean length of episodes, at its longest."""
        self.ended_at = 0.0
        """Steps of the run when an episode had ended last."""
        self.stands = math.nan, 0.0, 0
        """The return that later ones were equal to, and the steps and rows of the run when it was first seen."""

    def add(self, row: Mapping[str, Any]) -> None:
        for keys, first in self._first.items():
            values = [self[key] for key in keys]
            if len(first) < self.beginning and not any(map(math.isnan, values)):
                first.append(values)
        self.before, self.now = self.now, row
        returns = (number(row, f"episode_return_{end}") for end in ("min", "max"))
        self.largest_return = max([*(abs(x) for x in returns if x is not None), self.largest_return])
        self.seen += 1
        steps, got = self[ENV_STEPS], self[_RETURN]
        if self.since_last("episodes_total") > 0:
            self.ended_at = steps
            self.longest = max(self.longest, self["episode_length_mean"])
        if not math.isnan(got):
            self._newest.append(got)
            if len(self._newest) == self.beginning:
                self.best = max(self.best, statistics.fmean(self._newest))
            if not abs(got - self.stands[0]) <= 1e-3 * abs(got):
                self.stands = got, steps, self.seen

    @property
    def start(self) -> tuple[float, float]:
        """Mean of the first returns, of as many rows as a beginning has, and their deviation from a straight line, for
        what rises from the first row on is no noise; NaN before, and in a run that was resumed: how it began is not
        known."""
        first = [x for (x,) in self.first(_RETURN)]
        if self.resumed or len(first) < self.beginning:
            return math.nan, math.nan
        slope, begin = statistics.linear_regression(range(len(first)), first)
        off = [x - begin - slope * i for i, x in enumerate(first)]
        return statistics.fmean(first), math.sqrt(sum(x * x for x in off) / (len(off) - 2))

    def flat_for(self, steps: float, rows: int) -> bool:
        """Whether a return that has not moved for so long should have."""
        slow = FLAT_PICTURES if str(self.option("id")).startswith("ALE/") else 1
        return steps >= slow * FLAT_STEPS and rows >= FLAT_ROWS

    def __getitem__(self, key: str) -> float:
        """A finite number of the newest row; NaN where it has none."""
        found = number(self.now, key)
        return math.nan if found is None else found

    def first(self, *keys: str) -> list[list[float]]:
        """The first of the rows before the newest that have all of these numbers."""
        return self._first[keys]

    def since_last(self, key: str) -> float:
        """How much a count has grown since the row before."""
        return self[key] - (number(self.before, key) or 0.0)

    def option(self, name: str) -> Any:
        return (self._options or {}).get(name)

    @property
    def rewards_are_scaled(self) -> bool:
        """Whether the learner sees other rewards than the log tells."""
        return bool(self.option("normalize_rewards") or self.option("clip_rewards"))

    @property
    def sums_agents(self) -> bool:
        """Whether returns are sums over the agents of a game: such a sum may stand or fall where what one wins another
        loses, or where both do what is best for each."""
        return any(key.startswith("agent/") for key in self.now)

    def value_scale(self, return_: float) -> float:
        """The discounted return that episodes of this return suggest: all of it, or its mean reward for ever."""
        gamma = self.option("gamma")
        if not isinstance(gamma, (int, float)):
            return math.nan
        if gamma == 1.0:  # whoever sets it means episodes that end
            return return_
        return return_ * max(1.0 / (max(self["episode_length_mean"], 1.0) * max(1.0 - gamma, 1e-6)), 1.0)

    def discounted(self, return_: float) -> float:
        """The value of an episode of this return whose rewards are all alike."""
        gamma, length = self.option("gamma"), max(self["episode_length_mean"], 1.0)
        if not isinstance(gamma, (int, float)):
            return math.nan
        return return_ / length * (length if gamma == 1.0 else (1.0 - gamma**length) / (1.0 - gamma))

    def helps(self, *cures: str) -> str:
        """`Usually helps: lower lr (0.1 now) or set target_kl.`, with options that this run has. A cure is a verb and
        the name of an option; one that is `set` already is left out."""
        told = []
        for verb, name in (cure.split() for cure in cures):
            value = self.option(name)
            if (self._options is None or name in self._options) and not (verb == "set" and value):
                shown = isinstance(value, (int, float, str)) and not isinstance(value, bool)
                told.append(f"{verb} {name}" + (f" ({short(value)} now)" if shown else ""))
        *most, last = told or [""]
        return f"Usually helps: {', '.join(most)}{' or ' if most else ''}{last}." if told else ""


Check = Callable[[Rows], Iterator[str]]
CHECKS: dict[str, tuple[int, Check]] = {}
"""By cause: how many times the usual patience it takes (0: one row is enough), and the check."""


def check(cause: str, patience: int = 1) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[cause] = patience, function
        return function

    return register


class Symptoms:
    """Looks at every result row of a run and says what is wrong. `options`: those of `SECTIONS`, by name; without them
    all that might help is named."""

    def __init__(self, options: Mapping[str, Any] | None = None, patience: int = PATIENCE):
        self.told: list[str] = []
        """Causes, in the order in which they were said."""
        self._rows = Rows(options, patience)
        self._bad = {cause: deque[bool](maxlen=2 * max(1, n * patience)) for cause, (n, _) in CHECKS.items()}

    def resume(self, row: Mapping[str, Any], told: Iterable[str]) -> None:
        """Go on after this row; the causes `told` are not said again."""
        self.told += told
        self._rows.resumed = True
        self._rows.ended_at = number(row, ENV_STEPS) or 0.0
        self._rows.now = {key: row.get(key) for key in (ENV_STEPS, "learner_steps_total", "episodes_total")}

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Say what is to be said of this row; returns the causes that were said so far."""
        self._rows.add(row)
        for cause, (_, function) in CHECKS.items():
            if cause in self.told:
                continue
            bad, sentence = self._bad[cause], next(function(self._rows), "")
            bad.append(bool(sentence))
            if sentence and 2 * sum(bad) >= (bad.maxlen or 0):
                self.told.append(cause)
                logger.warning("%s", sentence)
        return self.told


# --- checks -----------------------------------------------------------------------------------------------------------


@check("loss", patience=0)
def loss(rows: Rows) -> Iterator[str]:
    for key, value in rows.now.items():
        if key.startswith("loss/") and "loss" in key[5:] and abs(value or 0.0) > HUGE:
            cures = rows.helps("lower lr", "set max_grad_norm", "set clip_rewards")
            yield f"{key} is {value:.3g}: this run is lost, nothing is learnt from such numbers. {cures}"


@check("entropy")
def entropy(rows: Rows) -> Iterator[str]:
    """A policy that always does the same, and is no better than at the start. (Entropies of continuous actions have no
    zero: they only pass it.)"""
    now, got = rows["loss/entropy"], rows["episode_return_mean"]
    at_first, worst = next(iter(rows.first("loss/entropy", "episode_return_mean")), (now, got))
    is_certain = abs(now) < max(1e-3, CERTAIN * abs(at_first))
    if is_certain and not rows.sums_agents and got <= worst + 0.05 * abs(worst):
        yield (
            f"the policy always does the same (entropy {now:.2g}) and its return of {short(got)} is no better than at "
            f"the start ({short(worst)}): this run is lost. Begin another one. "
            + rows.helps("lower lr", "raise entropy_coef")
        )


@check("step size")
def step_size(rows: Rows) -> Iterator[str]:
    kl, clipped = rows["loss/kl"], rows["loss/clip_fraction"]
    seen = [f"kl {kl:.2g}, usual is below 0.02"] if kl > KL_FAR else []
    seen += [f"{clipped:.0%} of the rows are clipped, usual is below 20 %"] if clipped > CLIPPED else []
    if seen:
        cures = rows.helps("lower lr", "lower epochs", "set target_kl")
        yield f"the policy moves too far in each update ({'; '.join(seen)}): it forgets what it learnt. {cures}"


@check("value function", patience=4)
def value_function(rows: Rows) -> Iterator[str]:
    """Worse than a constant, and wrong by much: where all returns are equal, explained variance means nothing."""
    explained, loss = rows["loss/explained_variance"], rows["loss/value_loss"]
    scale = 1.0 if rows.rewards_are_scaled else rows.value_scale(rows.largest_return)
    if explained <= UNEXPLAINED and math.sqrt(2.0 * loss) >= 0.1 * scale:
        yield (
            f"the value function is worse than a constant (explained variance {explained:.2f}), so advantages are "
            "noise. " + rows.helps("lower lr", "raise num_envs", "raise rollout_length", *_SCALE)
        )


@check("action values")
def action_values(rows: Rows) -> Iterator[str]:
    q, scale = rows["loss/q"], rows.value_scale(rows.largest_return)
    bonus = rows["loss/alpha"] * abs(rows["loss/entropy"])
    if not math.isnan(scale + bonus):  # without options the scale is unknown
        scale += bonus / max(1.0 - rows.option("gamma"), 1e-6)  # what SAC adds to the rewards
    if not rows.rewards_are_scaled and abs(q) > Q_BEYOND * max(scale, 1.0):
        yield (
            f"action values are far beyond what the rewards allow (loss/q is {q:.3g}, returns suggest {scale:.3g} at "
            "most): they feed on themselves. "
            + rows.helps("lower lr", "lower critic_lr", "raise target_period", "lower tau", "set double")
        )


@check("reward scale")
def reward_scale(rows: Rows) -> Iterator[str]:
    """Large rewards that the network has not followed: its values explain nothing, or are far from what they should
    be."""
    got = rows["episode_return_mean"]
    scale = rows.value_scale(abs(got))
    not_followed = rows["loss/explained_variance"] <= 0.5 or abs(rows["loss/q"]) <= 0.1 * scale
    if not rows.rewards_are_scaled and scale >= REWARD_SCALE and not_followed:
        yield (
            f"rewards are large (returns of {short(got)}, so values of about {scale:.2g}), and a network gets there in "
            f"many small steps. {rows.helps(*_SCALE)}"
        )


@check("gradients")
def gradients(rows: Rows) -> Iterator[str]:
    """Grown by orders of magnitude since the start."""
    norm, first = rows["loss/grad_norm"], rows.first("loss/grad_norm")
    usual = statistics.median(x for (x,) in first) if len(first) == rows.beginning else math.inf
    if norm > GRADIENTS_GROWN * max(usual, 1e-3):
        cures = rows.helps("lower lr", "lower critic_lr", "set max_grad_norm", *_SCALE)
        yield f"gradients have grown from {usual:.2g} to {norm:.2g}. {cures}"


@check("no gradients")
def no_gradients(rows: Rows) -> Iterator[str]:
    if rows["loss/grad_norm"] == 0.0:
        yield (
            "the gradient is exactly 0: nothing is learnt. All rewards alike, a Model that is cut off from its loss "
            "(detach, no_grad), or dead units. " + rows.helps("raise entropy_coef", "lower lr", *_SCALE)
        )


@check("flat return", patience=0)
def flat_return(rows: Rows) -> Iterator[str]:
    """No better than at the start, or all alike at the longest that an episode lasts and never rewarded."""
    if rows.sums_agents:
        return
    steps, got, (start, spread) = rows[ENV_STEPS], rows[_RETURN], rows.start
    stands, since, since_row = rows.stands
    cures = rows.helps("set rnd", "raise entropy_coef", "raise rollout_length", "raise num_envs", "lower lr")
    cures = f"{cures} `bray algos --for ENV` tells what has learnt there.".strip()
    if rows.flat_for(steps, rows.seen) and max(rows.best, got) <= start + max(2.0 * spread, 0.05 * abs(start)):
        what = f"the return has not moved in {short(steps)} steps: {short(got)}, {short(start)} at the start"
        if rows.largest_return == 0.0:
            what = f"no reward was ever seen in {short(steps)} steps: nothing tells a good action from a bad one"
        yield f"{what}. {cures}"
    elif (
        stands <= 0.0
        and rows.flat_for(steps - since, rows.seen - since_row)
        and rows["episode_length_mean"] >= 0.99 * rows.longest
    ):
        yield (
            f"the return has stood at {short(stands)} since step {short(since)}, and episodes are as long as ever: "
            f"what ends one early or rewards it was never found. {cures}"
        )


@check("collapse")
def collapse(rows: Rows) -> Iterator[str]:
    """Of what was gained next to nothing is left."""
    got, (start, spread) = rows[_RETURN], rows.start
    gain = rows.best - start
    if gain > max(abs(start), 10.0 * spread) and got - start < LOST_GAIN * gain:
        yield (
            f"the return has fallen from {short(rows.best)} to {short(got)}, about where it began ({short(start)}): "
            "what was learnt is lost; `best` among the checkpoints is from before. "
            + rows.helps("lower lr", "set target_kl", "lower epochs", "raise target_period", "lower tau", *_SCALE)
        )


@check("endless episodes", patience=0)
def endless_episodes(rows: Rows) -> Iterator[str]:
    envs = (rows.option("num_envs") or 1) * max(rows.option("num_workers") or 1, 1)
    without = rows[ENV_STEPS] - rows.ended_at
    plays = rows["episodes_total"] >= 0 and math.isnan(rows["data/episodes"])  # those of files were played before
    if plays and without > envs * max(ENDLESS, 5.0 * rows.longest):
        last = f"; the return of {short(rows[_RETURN])} is from step {short(rows.ended_at)}" if rows.longest else ""
        yield (
            f"no episode has ended for {short(without)} steps{last}. A game without an end needs a limit: "
            "env.max_episode_steps=1000"
        )


@check("support")
def support(rows: Rows) -> Iterator[str]:
    """C51's atoms do not reach to where the returns are."""
    low, high, q = rows.option("v_min"), rows.option("v_max"), rows["loss/q"]
    if low is None or high is None:
        return
    ends = sorted(rows.discounted(rows[f"episode_return_{end}"]) for end in ("min", "max"))
    far, edge = 0.05 * (high - low), 0.01 * (high - low)
    if not rows.rewards_are_scaled and (ends[0] < low - far or ends[1] > high + far):
        wide = math.floor(min(1.2 * ends[0], low)), math.ceil(max(1.2 * ends[1], high))
        yield (
            f"discounted returns reach from {ends[0]:.3g} to {ends[1]:.3g}, beyond the atoms of the values "
            f"({short(low)} to {short(high)}), which count all that as the same: set v_min={wide[0]} v_max={wide[1]}, "
            "and more where returns will grow"
        )
    elif rows.rewards_are_scaled and (q < low + edge or q > high - edge):
        yield f"values are at an end of their atoms ({q:.3g}; {short(low)} to {short(high)}): widen v_min and v_max"


@check("temperature")
def temperature(rows: Rows) -> Iterator[str]:
    alpha, reward = rows["loss/alpha"], abs(rows[_RETURN]) / max(rows["episode_length_mean"], 1.0)
    if alpha > HOT * max(reward, 1.0):
        yield (
            f"the temperature is {alpha:.3g} where a step is worth {reward:.2g}: only entropy counts, rewards do not. "
            + rows.helps("lower target_entropy", "lower alpha_lr", "lower initial_alpha", *_SCALE)
        )


@check("unused rows")
def unused_rows(rows: Rows) -> Iterator[str]:
    if rows["loss/rho"] < UNUSED:
        yield (
            f"what was played counts for {rows['loss/rho']:.0%} only (loss/rho, usual is above 80 %): the policy has "
            "moved far from the one that acted. "
            + rows.helps("lower lr", "lower num_workers", "lower epochs", "lower rollout_length")
        )


@check("equal returns")
def equal_returns(rows: Rows) -> Iterator[str]:
    """Of a generation of ES or ARS."""
    got = rows["loss/return_mean"]
    if rows["loss/return_std"] == 0.0 and not got > rows.start[0]:
        yield (
            f"all players of a generation return {short(got)}: no direction is better than another. "
            + rows.helps("raise sigma", "raise num_envs")
        )


@check("dead units", patience=0)
def dead_units(rows: Rows) -> Iterator[str]:
    dead = rows[DEAD_UNITS]
    if dead >= DEAD:
        yield (
            f"{dead:.0%} of the units of a layer say the same of every observation (ReLUs at zero, tanh at one end), "
            "and no gradient moves them any more. Begin another run. "
            + rows.helps("lower lr", "set layer_norm", "change fcnet_activation", *_SCALE)
        )


@check("stale replay")
def stale_replay(rows: Rows) -> Iterator[str]:
    age, steps = rows["replay/staleness_mean"], max(rows[ENV_STEPS], 1.0)
    usual = 0.5 * rows["replay/size"] * rows["learner_steps_total"] / steps
    if age > STALE * max(usual, 100.0):
        yield (
            f"what is learnt from is {short(round(age))} gradient steps old: more is learnt than gathered. "
            + rows.helps("set max_staleness", "raise train_every", "lower updates", "lower replay_size")
        )


@check("small minibatches", patience=0)
def small_minibatches(rows: Rows) -> Iterator[str]:
    """Few environments, and as many pieces as for many of them."""
    minibatches, epochs = rows.option("minibatches"), rows.option("epochs")
    steps, updates = rows.since_last(ENV_STEPS), rows.since_last("learner_steps_total")
    if minibatches and minibatches > 1 and epochs and steps > 0 and updates > 0 and steps * epochs / updates < FEW_ROWS:
        yield (
            f"each gradient step learns from {short(max(1, round(steps * epochs / updates)))} rows only, and follows "
            "chance more than the rewards. " + rows.helps("lower minibatches", "raise num_envs", "raise rollout_length")
        )
