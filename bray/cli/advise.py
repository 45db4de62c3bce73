"""What `bray algos --for ENV` looks at: a short random play, and what is known of each algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bray import act
from bray.algos import ALGORITHMS, get_algo, make_experience, refusal
from bray.config.runfile import preset, scores
from bray.diagnosis.advise import Candidate, Facts
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.vector import VecEnv
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec
from bray.train.evaluate import eval_config, play

EXPLORING = {"rnd": "rnd=1", "noisy": "noisy=true"}
"""Options of an algorithm that explore where chance does not find the reward, and how to switch them on."""
REPLAYED = ("replay", "sequences")
"""Kinds of experience that are learnt from more than once."""
_EPISODES, _STEPS = 8, 5_000  # of random play; it ends with the first of them


def look_at(config: EnvConfig, seed: int = 0) -> tuple[EnvSpec, Facts]:
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
        return env.spec, Facts(env.num_envs / seconds, tuple(r for r, _ in ended))


class _Uniform:
    """In place of a Model: all choices alike, numbers around the middle of their range."""

    def __init__(self, env: VecEnv):
        self._outputs = {"dist": np.zeros((env.num_envs, env.spec.layout.num_params), np.float32)}

    def forward(self, *inputs: Any) -> dict[str, np.ndarray]:
        return self._outputs


def candidates(spec: EnvSpec) -> Iterator[Candidate]:
    """The algorithms that take the spaces of an environment, and what is known of each."""
    for name in ALGORITHMS:
        algo = get_algo(name)
        if refusal(algo, spec):
            continue
        option = next((o for o in EXPLORING if hasattr(algo.Config(), o)), "")
        switch = "" if option and getattr(algo.Config(), option) else EXPLORING.get(option, "")
        has_preset = preset(name, spec.id) is not None
        found = tuple(s for s in scores() if (s["run"], s["env"]) == (name, spec.id) and s["must"] != "stay below")
        yield Candidate(name, learns_from(algo, spec) in REPLAYED, option, switch, has_preset, found)


def learns_from(algo: Any, spec: EnvSpec) -> str:
    """The kind of its experience."""
    return type(make_experience(algo, algo.Config(), spec, ModelConfig())).__name__.lower()
