"""Off-policy evaluation on CartPole: how often the 95 % intervals hold what the policy gets, over many data sets.

    python -m benchmarks.off_policy                    # 200 data sets of 100 episodes

The policy pushes to where the pole falls, with a logistic chance; those who play do so less surely. Its return,
discounted by 0.95, is known from many episodes of its own. Prints the share of intervals that hold it and their width
beside that of plain importance sampling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.experiment.off_policy import estimates

GAMMA = 0.95
LIMIT = 60
"""Steps of an episode."""


def chances(sure: float) -> Callable[[np.ndarray], np.ndarray]:
    """Of both choices in these observations."""

    def of(obs: np.ndarray) -> np.ndarray:
        right = 1.0 / (1.0 + np.exp(-sure * (4.0 * obs[:, 2] + obs[:, 3]).astype(np.float64)))
        return np.stack([1.0 - right, right], 1)

    return of


def play(policy: Callable[[np.ndarray], np.ndarray], episodes: int, seed: int) -> list[dict[str, np.ndarray]]:
    """The first episode of each environment."""
    rng, rows = np.random.default_rng(seed), []
    with make_vec(EnvConfig(id="CartPole-v1", num_envs=episodes, max_episode_steps=LIMIT), seed=seed) as env:
        obs, over = env.reset(seed), np.zeros(episodes, bool)
        lengths, terminated = np.full(episodes, LIMIT), np.zeros(episodes, bool)
        seen = [np.array(obs)]
        for t in range(LIMIT):
            p = policy(seen[-1])
            action = (rng.random(episodes) < p[:, 1]).astype(np.int64)
            obs, reward, done, cut, _ = env.step(action)
            rows.append((action, np.array(reward), np.log(p[range(episodes), action])))
            seen.append(np.array(obs))
            ends = (np.array(done) | np.array(cut)) & ~over
            lengths[ends], terminated[ends] = t + 1, np.array(done)[ends]
            over |= ends
            if over.all():
                break
    action, reward, logp = (np.stack(x) for x in zip(*rows, strict=True))
    all_seen = np.stack(seen)
    return [
        {
            "obs": all_seen[: n + 1, b],
            "action": action[:n, b],
            "reward": reward[:n, b],
            "logp": logp[:n, b],
            "terminated": (np.arange(n) == n - 1) & terminated[b],
        }
        for b, n in enumerate(lengths.tolist())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--sure", type=float, nargs=2, default=[1.0, 0.5], help="of the policy, and of who plays")
    options = parser.parse_args()
    policy, plays = (chances(sure) for sure in options.sure)
    own = [float(e["reward"] @ GAMMA ** np.arange(len(e["reward"]))) for e in play(policy, 10_000, 10**6)]
    true, error = float(np.mean(own)), float(np.std(own) / np.sqrt(len(own)))
    theirs = [float(e["reward"] @ GAMMA ** np.arange(len(e["reward"]))) for e in play(plays, 10_000, 10**6 + 1)]
    print(f"the policy gets {true:.3f} ± {error:.3f}, who plays {np.mean(theirs):.3f}")
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(options.sets):
        episodes = play(plays, options.episodes, 1000 + seed)
        obs = np.concatenate([e["obs"] for e in episodes])
        for name, estimate in estimates(episodes, obs, policy(obs), GAMMA, seed).items():
            found.setdefault(name, []).append(estimate)
    plain = np.mean([high - low for _, low, high in found["importance sampling"]])
    for name, several in found.items():
        value, low, high = np.array(several).T
        inside, width = ((low <= true) & (true <= high)).mean(), (high - low).mean()
        share = f"width {width:.3f} ({width / plain:.2f} of plain)"
        print(f"{name:<28} holds it {inside:6.1%}, {share}, mean {value.mean():.3f}")


if __name__ == "__main__":
    main()
