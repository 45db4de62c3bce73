"""One way to act, without torch: what a Policy is told (`Tick`, `Clock`, mode), what it decides, and the rules by which
it chooses.

A rollout, a live game, `bray eval`, `bray serve`, a deployment and `exp.policy` all drive the same generator,
`Policy.decide`.
"""

from bray.act.clock import TRAINED, Clock
from bray.act.epsilon_greedy import EpsilonGreedy
from bray.act.policy import (
    GREEDY,
    MODES,
    SAMPLE,
    ActingEngine,
    Deciding,
    Decision,
    Policy,
    Tick,
    decide_now,
    go_on,
    search_with,
    standard_normals,
)
from bray.act.rules import RULES, Distribution, Rule, make_rule
from bray.act.squashed import Deterministic, Squashed

__all__ = [
    "GREEDY",
    "MODES",
    "RULES",
    "SAMPLE",
    "TRAINED",
    "ActingEngine",
    "Clock",
    "Deciding",
    "Decision",
    "Deterministic",
    "Distribution",
    "EpsilonGreedy",
    "Policy",
    "Rule",
    "Squashed",
    "Tick",
    "decide_now",
    "go_on",
    "make_rule",
    "search_with",
    "standard_normals",
]
