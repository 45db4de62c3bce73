"""Which algorithm for an environment: what follows from a short random play, and from what was measured before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FAST = 2_000.0
"""Environment steps a second above which their number matters less than what an update costs."""


@dataclass(frozen=True)
class Facts:
    """What a random play tells of an environment."""

    steps_per_second: float
    """In one process."""
    returns: tuple[float, ...]
    """Of the episodes that ended."""

    @property
    def fast(self) -> bool:
        return self.steps_per_second >= FAST

    @property
    def sparse(self) -> bool:
        """Whether nothing that random play did made a difference."""
        return len(self.returns) >= 4 and len(set(self.returns)) == 1


@dataclass(frozen=True)
class Candidate:
    """An algorithm that takes the spaces of an environment."""

    name: str
    replays: bool
    """Whether it learns from a step more than once."""
    explores: str = ""
    """Its option that explores where chance does not find the reward."""
    switch: str = ""
    """How to switch that on, where it is not."""
    preset: bool = False
    """Whether it has one for this environment."""
    scores: tuple[Mapping[str, Any], ...] = ()
    """What was measured there, with which settings."""


@dataclass(frozen=True)
class Advice:
    """An algorithm that fits, and why it stands where it stands."""

    name: str
    why: str
    options: str = ""
    """What to set, as on the command line."""


SUITED = {
    "PPO": "forgiving of its settings, a good first try",
    "A2C": "cheaper updates than PPO's, and noisier ones",
    "PG": "the plainest policy gradient, to learn from",
    "IMPALA": "for many workers: corrects for older weights",
    "APPO": "for many workers: PPO's clipping on older rows",
    "PQN": "action values without a replay, many environments",
    "ES": "no gradients: for few weights and short episodes",
    "ARS": "no gradients: for linear policies and short episodes",
    "DQN": "action values by replay",
    "C51": "DQN with the distribution of returns on fixed atoms",
    "QR-DQN": "DQN with the quantiles of returns",
    "IQN": "DQN with any quantile of returns, dearer updates",
    "Rainbow": "most out of few steps, dear updates",
    "Ape-X": "DQN for many workers, each with its own exploration",
    "R2D2": "DQN with memory, where one observation does not tell all",
    "SAC": "explores by entropy, few settings to tune",
    "SAC-Discrete": "explores by entropy; for choices",
    "CrossQ": "SAC without target networks, fewer steps",
    "DDPG": "the plainest of the deterministic ones, to learn from",
    "TD3": "two critics, the smaller counts: steadier than DDPG",
    "QMIX": "for teams: what agents are worth together",
    "VDN": "for teams: the sum of what agents are worth",
    "MAPPO": "PPO for the agents of a game, with a critic of the whole game",
    "MADDPG": "for teams: a critic of the whole game for each agent",
    "COMA": "for teams: what each choice is worth beside the others",
    "ATOC": "for teams: agents that talk when it helps",
    "NFSP": "for games against each other: an average policy that is hard to exploit",
    "AlphaZero": "for board games: a search, and a network that learns from it",
    "BC": "for files: does what demonstrators did",
    "MARWIL": "for files: does what turned out well for demonstrators",
    "TD3+BC": "for files: TD3 that stays near what they show",
    "IQL": "for files: the best of what they show, never other actions",
    "CQL": "for files: SAC that distrusts actions they do not show",
    "DQfD": "for demonstrations: DQN that prefers what they show",
    "SQIL": "for demonstrations: SAC rewarded for being where they were",
    "SQIL-Discrete": "for demonstrations: soft Q-learning rewarded for being where they were",
    "GAIL": "for demonstrations: PPO rewarded for what looks like them",
    "DAgger": "for an expert that can be asked: does what it would do wherever it comes to",
    "DT": "for files: plays for the return that it is asked for",
    "CQL-Discrete": "for files: DQN that distrusts actions they do not show",
}
"""What each of our algorithms is for, where nothing was measured."""


def rank(facts: Facts, candidates: Iterable[Candidate]) -> list[Advice]:
    """The one to try first first: what reached its score here on all seeds; then those with a preset for this
    environment; where chance finds no reward, those with an option that explores; then those whose way to learn suits
    the speed of the steps; last those that were measured here and failed."""
    found = [_place(candidate, facts) for candidate in candidates]
    return [advice for _, advice in sorted(found, key=lambda entry: entry[0])]  # equal ones keep their order


def _place(algo: Candidate, facts: Facts) -> tuple[tuple[int, float], Advice]:
    """Where it stands (lower is earlier), and why."""
    cost = "seconds" if facts.fast else "steps"
    by_cost = sorted(algo.scores, key=lambda s: (bool(s.get("config")), s[cost][0]))
    if passed := [s for s in by_cost if s["passed"] == s["seeds"]]:
        best = passed[0]
        took = f"{best['steps'][0]:,.0f} steps, {best['seconds'][0]:,.0f} s"
        options = " ".join(f"{k}={v}" for k, v in best.get("config", {}).items())
        why = f"measured here: {best['target']} on {best['passed']} of {best['seeds']} seeds, {took}"
        return (0, best[cost][0]), Advice(algo.name, f"{why}, with {options}" if options else why, options)
    if by_cost:
        seen = by_cost[0]
        seeds = f"{seen['passed']} of {seen['seeds']} seeds only"
        why = f"measured here: {seen['target']} on {seeds}, {seen['within']:,} steps"
        return (4, seen["passed"] == 0), Advice(algo.name, why)
    suits = algo.replays != facts.fast
    speed = f"{'cheap' if facts.fast else 'slow'} ({facts.steps_per_second:,.0f} a second)"
    uses = "many times" if algo.replays else "once"
    why = f"uses each step {uses}{'; they' if suits else ', though they'} are {speed}"
    why = f"{SUITED[algo.name]}; {why}" if algo.name in SUITED else why
    if algo.preset:
        return (1, not suits), Advice(algo.name, f"has a preset, not measured; {why}")
    if facts.sparse and algo.explores:
        return (2, not suits), Advice(algo.name, f"explores with {algo.explores}; {why}", algo.switch)
    if facts.sparse:
        why = f"no option that explores, and chance finds nothing here; {why}"
    return (3, not suits), Advice(algo.name, why)
