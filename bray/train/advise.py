"""Which algorithm for an environment: what a short random play tells of it, and what follows from that."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray import act
from bray.algos import ALGORITHMS, get_algo, make_experience, refusal
from bray.config.runfile import preset, scores, settings
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.vector import VecEnv
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec
from bray.train.evaluate import eval_config, play

FAST = 2_000.0
"""Environment steps a second above which their number matters less than what an update costs."""
EXPLORING = {"rnd": "rnd=1", "noisy": "noisy=true"}
"""Options of an algorithm that explore where chance does not find the reward, and how to switch them on."""
REPLAYED = ("replay", "sequences")
"""Kinds of experience that are learnt from more than once."""
_EPISODES, _STEPS = 8, 5_000  # of random play; it ends with the first of them


@dataclass(frozen=True)
class Facts:
    """What is known of an environment."""

    spec: EnvSpec
    steps_per_second: float
    """Of random play in one process."""
    returns: tuple[float, ...]
    """Of the random episodes that ended."""

    @property
    def fast(self) -> bool:
        return self.steps_per_second >= FAST

    @property
    def sparse(self) -> bool:
        """Whether nothing that random play did made a difference."""
        return len(self.returns) >= 4 and len(set(self.returns)) == 1


def look_at(config: EnvConfig, seed: int = 0) -> Facts:
    """Play a few episodes at random."""
    with make_vec(eval_config(config, _EPISODES), seed=seed) as env:
        policy, engine = act.Policy(env.spec.layout, act.make_rule("dist")), _Uniform(env)
        times: list[float] = []
        ended = play(
            env,
            engine,
            policy,
            _EPISODES,
            seed,
            mode=act.SAMPLE,
            on_step=lambda step: times.append(time.perf_counter()),
            most_steps=_STEPS,
        )
        seconds = float(np.median(np.diff(times))) if len(times) > 1 else np.inf  # the first step compiles
        return Facts(env.spec, env.num_envs / seconds, tuple(r for r, _ in ended))


class _Uniform:
    """In place of a Model: all choices alike, numbers around the middle of their range."""

    def __init__(self, env: VecEnv):
        self._outputs = {"dist": np.zeros((env.num_envs, env.spec.layout.num_params), np.float32)}

    def forward(self, *inputs: Any) -> dict[str, np.ndarray]:
        return self._outputs


@dataclass(frozen=True)
class Advice:
    """An algorithm that fits, and why it stands where it stands."""

    name: str
    why: str
    options: str = ""
    """What to set, as on the command line."""


def rank(facts: Facts) -> list[Advice]:
    """The algorithms that take the spaces, the one to try first first: those with a preset for this environment,
    measured ones before others; where chance finds no reward, those with an option that explores; then those whose way
    to learn suits the speed of the steps."""
    fitting = [name for name in ALGORITHMS if not refusal(get_algo(name), facts.spec)]
    found = [_measured(name, facts) or _expected(name, facts) for name in fitting]
    return [advice for _, advice in sorted(found, key=lambda entry: entry[0])]  # equal: in the order of ALGORITHMS


def _measured(name: str, facts: Facts) -> tuple[tuple[int, float], Advice] | None:
    """Where it stands (lower is earlier), by what its preset reached on this environment."""
    cost = "seconds" if facts.fast else "steps"
    wanted = (name, facts.spec.id, "reach", "preset")
    found = [s for s in scores() if (s["run"], s["env"], s["must"], settings(s)) == wanted]
    passed = [s for s in found if s["passed"] == s["seeds"]]
    if not passed:
        return None
    best = min(passed, key=lambda s: s[cost][0])
    took = f"{best['steps'][0]:,.0f} steps, {best['seconds'][0]:,.0f} s"
    why = f"measured here: {best['target']} on {best['passed']} of {best['seeds']} seeds, {took}"
    return (0, best[cost][0]), Advice(name, why)


def _expected(name: str, facts: Facts) -> tuple[tuple[int, float], Advice]:
    """The same, by what is known of the environment."""
    algo = get_algo(name)
    often = learns_from(algo, facts.spec) in REPLAYED
    speed = f"{'cheap' if facts.fast else 'slow'} ({facts.steps_per_second:,.0f} a second)"
    suits = often != facts.fast
    why = f"uses each step {'many times' if often else 'once'}{'; they' if suits else ', though they'} are {speed}"
    if preset(name, facts.spec.id) is not None:
        return (1, 0.0 if suits else 1.0), Advice(name, f"has a preset for it; {why}")
    option = next((o for o in EXPLORING if hasattr(algo.Config(), o)), None)
    if not facts.sparse or option is None:
        return (3, 0.0 if suits else 1.0), Advice(name, why)
    on = bool(getattr(algo.Config(), option))
    return (2, 0.0 if suits else 1.0), Advice(name, f"explores with {option}; {why}", "" if on else EXPLORING[option])


def learns_from(algo: Any, spec: EnvSpec) -> str:
    """The kind of its experience."""
    return type(make_experience(algo, algo.Config(), spec, ModelConfig())).__name__.lower()
