"""How SAC, TD3 and DDPG act: tanh of a Gaussian, or a deterministic action and noise."""

from __future__ import annotations

import math
import sys
from functools import lru_cache

import numpy as np

from bray.act.clock import Clock
from bray.act.rules import RULES, Arrays, Mask, Rng, Rule
from bray.schedules import Schedule, make_schedule
from bray.spec import ActionLayout


class Continuous(Rule):
    """Random actions before learning starts, in the second half pink noise up to `random_hold` steps; then `explore`,
    with noise that is pink up to `noise_hold` steps."""

    def __init__(self, learning_starts: int = 0, random_hold: int = 1, noise_hold: int = 1):
        self.learning_starts, self.random_hold, self.noise_hold = learning_starts, random_hold, noise_hold

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        x = outputs[self.reads[0]]
        if rng is not None and clock.env_steps < self.learning_starts:
            hold = self.random_hold if 2 * clock.env_steps >= self.learning_starts else 1
            return {"action": random_actions(rng, clock.decisions, hold, len(x), layout.size)}
        return {"action": self.explore(x, rng, clock)}

    def explore(self, x: np.ndarray, rng: Rng, clock: Clock) -> np.ndarray:
        """Actions `[B, D]` in [-1, 1] by the Model's output."""
        raise NotImplementedError


class Squashed(Continuous):
    """tanh of a Gaussian (SAC)."""

    name, reads = "squashed", ("dist",)

    def explore(self, x: np.ndarray, rng: Rng, clock: Clock) -> np.ndarray:
        mean, log_std = np.split(x, 2, -1)
        if rng is not None:
            mean = mean + np.exp(log_std) * normal(rng, clock.decisions, self.noise_hold, *mean.shape)
        action: np.ndarray = np.tanh(mean)
        return action


class Deterministic(Continuous):
    """The Model's action and Gaussian noise of standard deviation `noise` (TD3, DDPG)."""

    name, reads, stochastic = "deterministic", ("mu",), False

    def __init__(self, noise: Schedule = 0.0, learning_starts: int = 0, random_hold: int = 1, noise_hold: int = 1):
        super().__init__(learning_starts, random_hold, noise_hold)
        self.noise = make_schedule(noise)

    def explore(self, x: np.ndarray, rng: Rng, clock: Clock) -> np.ndarray:
        if rng is None:
            return x
        noise = normal(rng, clock.decisions, self.noise_hold, *x.shape)
        return np.clip(x + self.noise(clock.env_steps) * noise, -1.0, 1.0)

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        return {"mu": rng.uniform(-1.0, 1.0, (rows, layout.size)).astype(np.float32)}

    def numbers(self, env_steps: int) -> dict[str, float]:
        return {"noise": self.noise(env_steps)}

    def trained(self) -> dict[str, float]:
        return {"noise": float(self.noise(sys.maxsize))}


RULES[Squashed.name] = Squashed
RULES[Deterministic.name] = Deterministic


def normal(rng: np.random.Generator, decisions: int | None, hold: int, rows: int, size: int) -> np.ndarray:
    """Normal noise `[rows, size]`: white for `hold` 1, new at every step. Else pink (Voss' algorithm: the sum of
    numbers that change every 1, 2, 4, ..., `hold` steps): in a game with inertia white noise cancels itself out, and a
    car in a valley never leaves it.
    The seed of `rng` and the number of decisions decide pink noise, so a resumed run continues it; where nobody counts
    them noise is white."""
    if hold == 1 or decisions is None:
        return rng.standard_normal((rows, size), np.float32)
    octaves = hold.bit_length()
    block, at = divmod(decisions, 1 << octaves - 1)
    noise: np.ndarray = _pink(tuple(rng.bit_generator.seed_seq.generate_state(4)), block, octaves, rows, size)[at]
    return noise


@lru_cache(8)  # a generator for each step would cost more than the step
def _pink(seed: tuple[int, ...], block: int, octaves: int, rows: int, size: int) -> np.ndarray:
    """The noise of as many steps as the slowest octave holds its number."""
    rng = np.random.default_rng([*seed, block])
    parts = [np.repeat(rng.standard_normal((1 << octaves - 1 - k, rows, size)), 1 << k, 0) for k in range(octaves)]
    noise: np.ndarray = np.sum(parts, 0) / math.sqrt(octaves)
    return noise.astype(np.float32)


def random_actions(rng: np.random.Generator, decisions: int | None, hold: int, rows: int, size: int) -> np.ndarray:
    """Random actions `[rows, size]`, each number uniform in [-1, 1], white or pink as in `normal`."""
    if hold == 1:
        return rng.uniform(-1.0, 1.0, (rows, size)).astype(np.float32)
    uniform: np.ndarray = _erf(normal(rng, decisions, hold, rows, size) / math.sqrt(2.0))
    return uniform.astype(np.float32)


_erf = np.vectorize(math.erf, otypes=[np.float64])
