"""What a run's policy is worth, by files of episodes that another policy played: no environment is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.act import GREEDY, Clock, Tick
from bray.data.files import Episode
from bray.errors import ConfigError, DataError
from bray.rl import off_policy
from bray.rl.off_policy import Estimate

WIDTH = 96
"""Features of a state and an action, about: cosines of random directions (Rahimi and Recht 2007), for each choice."""
_ROWS = 4096  # of a forward


def estimate(
    served: Any, episodes: Sequence[Episode], gamma: float, act: str = GREEDY, seed: int = 0
) -> dict[str, Estimate]:
    """The discounted return of a served policy, by five estimators. The episodes have `logp`."""
    if len(episodes) < 2:
        raise DataError(f"estimates need two episodes or more, got {len(episodes)}")
    if lacks := sum("logp" not in episode for episode in episodes):
        raise DataError(
            f"{lacks:,} of {len(episodes):,} episodes have no column logp, the log probability of each action for who "
            "played: `bray collect --act sample` or, as for DQN, `--noise 0.1` writes it"
        )
    obs = tree.concat([e["obs"] for e in episodes])
    start = served.spec.action.start[0] if served.spec.action.start else 0
    episodes = [{**e, "action": np.asarray(e["action"]) - start} for e in episodes]
    return estimates(episodes, tree.flatten(obs), probabilities(served, obs, act), gamma, seed)


def estimates(
    episodes: Sequence[Episode], obs: np.ndarray, pi: np.ndarray, gamma: float, seed: int
) -> dict[str, Estimate]:
    """With the observations of all episodes `[R, F]`, the final ones too, and the probability of each choice in them
    `[R, A]`; actions are numbers of choices."""
    rng = np.random.default_rng(seed)
    n, lengths = len(episodes), np.array([len(e["reward"]) for e in episodes])
    last = np.cumsum(lengths + 1) - 1  # where final observations are
    rows = np.setdiff1d(np.arange(len(pi)), last)
    episode = np.repeat(np.arange(n), lengths)
    place = (episode, np.concatenate([np.arange(length) for length in lengths]))

    def column(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(e[name], np.float64) for e in episodes])

    def padded(x: np.ndarray, fill: float = 0.0) -> np.ndarray:
        out = np.full((n, int(lengths.max())), fill)
        out[place] = x
        return out

    choice, reward = column("action").astype(np.int64), column("reward")
    ratio = pi[rows, choice] / np.exp(column("logp"))
    features = _features(obs, WIDTH // pi.shape[1], rng)
    taken = _of_choice(features[rows], np.eye(pi.shape[1])[choice])
    expected = _of_choice(features, pi)
    discount = gamma * (1.0 - column("terminated"))
    fit = off_policy.fitted(taken, expected[rows + 1], reward, discount, episode, expected[last - lengths])
    iterations = int(lengths.max())
    q, v = np.zeros(len(rows)), np.zeros(len(rows))
    for half in (0, 1):  # values come from the other half of the episodes
        w = off_policy.fitted_q(fit, (np.arange(n) % 2 != half).astype(np.float64), iterations)
        mine = episode % 2 == half
        q[mine], v[mine] = taken[mine] @ w, expected[rows[mine]] @ w
    columns = padded(reward), padded(ratio, 1.0)
    values = padded(q), padded(v)
    return {
        "importance sampling": off_policy.importance_sampling(*columns, gamma, rng),
        "weighted importance sampling": off_policy.weighted_importance_sampling(*columns, gamma, rng),
        "doubly robust": off_policy.doubly_robust(*columns, *values, gamma, rng),
        "weighted doubly robust": off_policy.weighted_doubly_robust(*columns, *values, gamma, rng),
        "fitted Q": off_policy.fitted_q_evaluation(fit, iterations, rng),
    }


def probabilities(served: Any, obs: Any, act: str) -> np.ndarray:
    """Of each choice in these observations `[R, A]`, as the policy acts."""
    space, rule = served.spec.action, served.policy.rule.name if served.policy.acts_by_rule() else "its own"
    if space.kind != "discrete" or served.initial_state is not None:
        what = "a memory" if served.initial_state is not None else f"actions of kind {space.kind}"
        raise ConfigError(f"estimates are of policies with one choice and without memory; this one has {what}")
    if act != GREEDY and rule != "dist":
        raise ConfigError(f"--act {act}: this policy acts by the rule {rule!r}, whose draws only explore: leave it out")
    parts = []
    for start in range(0, tree.length(obs), _ROWS):
        seen = tree.index(obs, slice(start, start + _ROWS))
        outputs = served.engine.forward(seen)
        if act == GREEDY:
            action, _ = served.policy.act(outputs, Tick(seen), None, GREEDY, Clock())
            parts.append(np.eye(space.n[0])[action])
            continue
        logits = np.asarray(outputs["dist"], np.float64)
        mask = served.spec.layout.mask(seen)
        logits = logits if mask is None else np.where(mask, logits, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        parts.append(weights / weights.sum(1, keepdims=True))
    return np.concatenate(parts)


def _features(obs: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    scaled = (obs - obs.mean(0, dtype=np.float64)) / (obs.std(0, dtype=np.float64) + 1e-6)
    directions = rng.standard_normal((scaled.shape[1], max(8, width) - 1)) / np.sqrt(scaled.shape[1])
    waves = np.cos(scaled @ directions + rng.uniform(0, 2 * np.pi, directions.shape[1]))
    return np.concatenate([np.ones((len(scaled), 1)), waves], 1)


def _of_choice(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Features of states, for each choice by its weight: `[R, A * D]`."""
    return (weights[:, :, None] * features[:, None, :]).reshape(len(features), -1)
