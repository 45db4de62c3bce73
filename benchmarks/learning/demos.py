"""python -m benchmarks.learning.demos NAME... [--out DIR]

The data sets that algorithms learn from which learn from files: made here, by a seed, and never committed. Each is a
folder of trajectory files with spec.json, in build/demos unless --out says otherwise; one that is there stays.

    cartpole-expert   10 episodes of a script that holds the pole (500 each)
    cartpole-one      the first of them
    cartpole-mixed    20 episodes of that script, and 464 of random play (about 22)
    cartpole-replay   the first 20,000 steps of DQN, as it explored
    cartpole-early    the first 3,000 of them
    pendulum-expert   10 episodes of a script that swings up and holds (about -140)
    pendulum-mixed    50 episodes of that script, and 50 of random play (about -1,210)
    pendulum-replay   the first 5,000 steps of SAC, as it explored
    hopper-replay     the first 100,000 of SAC (wants gymnasium[mujoco]; an hour or less)
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from bray.config.runfile import preset
from bray.data.files import Episode, EpisodeReader, write_episodes
from bray.envs import EnvConfig, env_spec
from bray.experiment import Experiment
from bray.rundir import RunDir

Act = Callable[[np.ndarray], Any]

BUILT = Path(__file__).parents[2] / "build" / "demos"
SEED = 1000
"""Beyond those of the cases."""


class Recorded(gym.Wrapper):
    """Keeps every step, in the environment's units."""

    def __init__(self, env_id: str):
        super().__init__(gym.make(env_id))
        self.steps: list[tuple[Any, ...]] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**options)
        self.steps.append((obs, None, 0.0, False, False))  # where an episode begins
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps.append((obs, action, reward, terminated, truncated))
        return obs, reward, terminated, truncated, info

    def episodes(self) -> Iterator[Episode]:
        """The last one is cut where the steps end."""
        starts = [i for i, (_, action, *_) in enumerate(self.steps) if action is None]
        for start, end in pairwise([*starts, len(self.steps)]):
            if end - start < 2:
                continue
            obs, action, reward, terminated, truncated = zip(*self.steps[start:end], strict=True)
            cut = np.array(truncated[1:])
            cut[-1] |= not terminated[-1]
            yield {
                "obs": np.stack(obs),
                "action": np.stack(action[1:]),
                "reward": np.array(reward[1:], np.float32),
                "terminated": np.array(terminated[1:]),
                "truncated": cut,
            }


def balance(obs: np.ndarray) -> int:
    """CartPole: push towards where the pole falls, and a little back to the middle."""
    return int(obs @ (0.1, 0.3, 3.0, 1.0) > 0.0)


def swing_up(obs: np.ndarray) -> np.ndarray:
    """Pendulum: pump energy up to that of standing, then hold."""
    cos, sin, speed = map(float, obs)
    if cos > 0.9 or (cos > 0.8 and abs(speed) < 3.0):
        torque = -12.0 * math.atan2(sin, cos) - 3.0 * speed
    else:
        missing = 5.0 * (1.0 - cos) - speed**2 / 6.0
        torque = 20.0 * max(-1.0, min(missing, 1.0)) * (math.copysign(1.0, speed) if abs(speed) > 1e-3 else 1.0)
    return np.array([max(-2.0, min(torque, 2.0))], np.float32)


def played(env: str, parts: Mapping[Act | None, int], out: Path) -> None:
    """So many episodes of each script; None draws evenly from the space."""
    recorded = Recorded(env)
    recorded.action_space.seed(SEED)
    for act, episodes in parts.items():
        for i in range(episodes):
            obs, ended = recorded.reset(seed=SEED + i)[0], False
            while not ended:
                action = recorded.action_space.sample() if act is None else act(obs)
                obs, _, *flags, _ = recorded.step(action)
                ended = any(flags)
    written(recorded, env, out)


def written(recorded: Recorded, env: str, out: Path) -> None:
    write_episodes(out / "episodes", recorded.episodes())
    RunDir(out).write_spec(env_spec(EnvConfig(id=env)))


def replayed(run: str, env: str, steps: int, out: Path) -> None:
    """What an algorithm saw of its environment while it learnt."""
    values = dict(found.values) if (found := preset(run, env)) else {}
    config = {k: v for k, v in values.items() if k not in ("stop", "run", "env", "eval_freq", "num_envs")}
    recorded = Recorded(env)
    with tempfile.TemporaryDirectory() as folder:
        exp = Experiment(run=run, env=recorded, path=Path(folder) / "run", seed=SEED, config=config)
        list(exp.train(stop={"env_steps_total": steps}))
        exp.close()
    written(recorded, env, out)


SETS: dict[str, Callable[[Path], None]] = {
    "cartpole-expert": lambda out: played("CartPole-v1", {balance: 10}, out),
    "cartpole-one": lambda out: played("CartPole-v1", {balance: 1}, out),
    "cartpole-mixed": lambda out: played("CartPole-v1", {balance: 20, None: 464}, out),
    "cartpole-replay": lambda out: replayed("DQN", "CartPole-v1", 20_000, out),
    "cartpole-early": lambda out: replayed("DQN", "CartPole-v1", 3_000, out),
    "pendulum-expert": lambda out: played("Pendulum-v1", {swing_up: 10}, out),
    "pendulum-mixed": lambda out: played("Pendulum-v1", {swing_up: 50, None: 50}, out),
    "pendulum-replay": lambda out: replayed("SAC", "Pendulum-v1", 5_000, out),
    "hopper-replay": lambda out: replayed("SAC", "Hopper-v5", 100_000, out),
}


def made(name: str, out: Path = BUILT) -> Path:
    """The folder of a data set, which is made first where it is not there."""
    if not (folder := out / name).exists():
        unfinished = out / f"{name}.unfinished-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        SETS[name](unfinished)
        with suppress(OSError):  # another process was first
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SETS, []], default=[], metavar="NAME", help="none: all")
    parser.add_argument("--out", type=Path, default=BUILT)
    args = parser.parse_args(argv)
    for name in args.names or SETS:
        reader = EpisodeReader(made(name, args.out))
        returns = [float(episode["reward"].sum()) for episode in reader]
        print(
            f"{args.out / name}: {len(reader)} episodes, {reader.steps.sum():,} steps, return {np.mean(returns):,.1f} "
            f"({min(returns):,.1f} to {max(returns):,.1f})"
        )


if __name__ == "__main__":
    main()
