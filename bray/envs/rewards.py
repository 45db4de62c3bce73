"""What the learner sees of rewards: clipped, or divided by the running deviation of the discounted return.

The loop applies this after the metrics have taken the raw reward; evaluation does not apply it at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bray.envs.config import EnvConfig
from bray.errors import CheckpointError, ConfigError

_EQUAL = 1e-12
"""Numbers whose squared deviation is this share of their squared mean are equal, but for rounding."""
_LARGEST = 1e100  # its square is a number, too


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of numbers; two of them add up to those of all their numbers (Chan et
    al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, other: Moments) -> None:
        if other.count:
            delta, total = other.mean - self.mean, self.count + other.count
            self.m2 += other.m2 + delta * delta * self.count * other.count / total
            self.mean += delta * other.count / total
            self.count = total

    @classmethod
    def of_all(cls, parts: Iterable[Moments]) -> Moments:
        moments = cls()
        for part in parts:
            moments.add(part)
        return moments

    @classmethod
    def saved(cls, numbers: Iterable[Any]) -> Moments:
        """From a checkpoint."""
        try:
            count, mean, m2 = map(float, numbers)
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"not the count, mean and squares of returns: {e}") from None
        fine = count >= 0 and 0 <= m2 < _LARGEST and abs(mean) < _LARGEST
        if not fine or (count == 0 and (mean or m2)) or not np.isfinite(count):
            raise CheckpointError(f"not the count, mean and squares of returns: {count}, {mean}, {m2}")
        return cls(count, mean, m2)

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.count, self.mean, self.m2


class RewardTransform:
    """`transform(reward, ended) -> reward`; raw float32[B] in, what is learned from out. The input stays as it is."""

    def __init__(self, config: EnvConfig, num_envs: int, gamma: float, epsilon: float = 1e-8):
        self.normalize = config.normalize_rewards
        self.gamma, self.epsilon, self.num_envs = gamma, epsilon, num_envs
        self.sign, self.low, self.high = _clip(config.clip_rewards)
        self.returns = np.zeros(num_envs, np.float64)
        self.ended = np.zeros(num_envs, bool)
        self.seen, self._news = Moments(), Moments()
        """Of the discounted returns; and of those that nobody has been told of."""

    @property
    def active(self) -> bool:
        """Whether rewards are changed at all."""
        return self.normalize or self.sign or self.low is not None

    @property
    def std(self) -> float:
        """Deviation of the discounted return so far; 1 before two different numbers have been seen."""
        count, mean, m2 = self.seen.numbers
        return float(np.sqrt(m2 / count + self.epsilon)) if m2 > _EQUAL * count * mean**2 else 1.0

    def __call__(self, reward: np.ndarray, ended: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
        """`ended` is `env.dead` after the step: these rewards are their episodes' last. The row that follows is no
        transition and is left out of the statistics; so are those that are not `valid`, where that is given."""
        if self.normalize:
            reward = self._normalized(reward, ended, valid)
        if self.sign:
            return np.sign(reward).astype(np.float32)
        if self.low is not None:
            return np.clip(reward, self.low, self.high).astype(np.float32)
        return reward.astype(np.float32, copy=False)

    def _normalized(self, reward: np.ndarray, ended: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
        returns = self.returns * self.gamma + reward
        self.returns = returns if valid is None else np.where(valid, returns, self.returns)
        seen = self.returns[~self.ended if valid is None else valid]
        if seen.size:
            mean = float(seen.mean())
            of_these = Moments(seen.size, mean, float(((seen - mean) ** 2).sum()))
            self.seen.add(of_these)
            self._news.add(of_these)
        self.ended = np.array(ended, bool)
        self.returns[self.ended] = 0.0
        return (reward / self.std).astype(np.float32)

    def clipped(self, reward: np.ndarray) -> np.ndarray:
        """What is learnt from rewards that came before, which a resumed run may clip otherwise."""
        clips = not self.normalize and self.active
        return self(reward, np.zeros(reward.shape, bool)) if clips else reward

    def learn(self, seen: Moments) -> None:
        """Go on from what all others have seen, unless that is older than what is known here."""
        if seen.count > self.seen.count:
            self.seen = Moments(*seen.numbers)

    def take_news(self) -> Moments:
        """Of the returns since the last call."""
        news, self._news = self._news, Moments()
        return news

    def get_state(self) -> dict[str, Any]:
        """A tree of arrays."""
        seen = {k: np.array(v) for k, v in asdict(self.seen).items()}
        return {"returns": self.returns.copy(), "ended": self.ended.copy(), **seen}

    def set_state(self, state: dict[str, Any]) -> None:
        try:
            returns, ended = np.array(state["returns"], np.float64), np.array(state["ended"], bool)
            seen = Moments.saved(state[name] for name in ("count", "mean", "m2"))
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"not the state of a reward transform: {type(e).__name__}: {e}") from None
        if returns.shape != (self.num_envs,) or ended.shape != returns.shape:
            raise CheckpointError(
                f"the reward transform's state is of {returns.size} environments, there are {self.num_envs}: resume "
                "with the same num_envs"
            )
        if not np.isfinite(returns).all():
            raise CheckpointError("the reward transform's state holds returns that are no finite numbers")
        self.returns, self.ended, self.seen, self._news = returns, ended, seen, Moments()


def _clip(clip: Any) -> tuple[bool, float | None, float | None]:
    """(sign only, low, high) of `env.clip_rewards`."""
    if clip is None or clip is False:
        return False, None, None
    if clip is True:
        return True, None, None
    if isinstance(clip, (int, float)) and clip > 0:
        return False, -float(clip), float(clip)
    if isinstance(clip, (list, tuple)) and len(clip) == 2 and clip[0] < clip[1]:
        return False, float(clip[0]), float(clip[1])
    raise ConfigError(f"env.clip_rewards is true (sign), a positive number c ([-c, c]) or [low, high], got {clip!r}")
