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
    """What its preset reached there, on all seeds."""


@dataclass(frozen=True)
class Advice:
    """An algorithm that fits, and why it stands where it stands."""

    name: str
    why: str
    options: str = ""
    """What to set, as on the command line."""


def rank(facts: Facts, candidates: Iterable[Candidate]) -> list[Advice]:
    """The one to try first first: those with a preset for this environment, measured ones before others; where chance
    finds no reward, those with an option that explores; then those whose way to learn suits the speed of the steps."""
    found = [_place(candidate, facts) for candidate in candidates]
    return [advice for _, advice in sorted(found, key=lambda entry: entry[0])]  # equal ones keep their order


def _place(algo: Candidate, facts: Facts) -> tuple[tuple[int, float], Advice]:
    """Where it stands (lower is earlier), and why."""
    if algo.scores:
        cost = "seconds" if facts.fast else "steps"
        best = min(algo.scores, key=lambda s: s[cost][0])
        took = f"{best['steps'][0]:,.0f} steps, {best['seconds'][0]:,.0f} s"
        why = f"measured here: {best['target']} on {best['passed']} of {best['seeds']} seeds, {took}"
        return (0, best[cost][0]), Advice(algo.name, why)
    suits = algo.replays != facts.fast
    speed = f"{'cheap' if facts.fast else 'slow'} ({facts.steps_per_second:,.0f} a second)"
    uses = "many times" if algo.replays else "once"
    why = f"uses each step {uses}{'; they' if suits else ', though they'} are {speed}"
    if algo.preset:
        return (1, not suits), Advice(algo.name, f"has a preset for it; {why}")
    if facts.sparse and algo.explores:
        return (2, not suits), Advice(algo.name, f"explores with {algo.explores}; {why}", algo.switch)
    return (3, not suits), Advice(algo.name, why)
