"""A curriculum that adapts: python examples/curriculum.py [--plain]

The game is a lock with 20 digits, each 0 or 1; a wrong digit ends the try. Somebody who tries at random opens it once
in a million tries, so plain training sees no reward at all. The curriculum starts each try in front of the last digit,
and moves the start back by one digit whenever most tries succeed; every environment is told in the same iteration.
"""

import argparse

import gymnasium as gym
import numpy as np

import bray


class Lock(gym.Env):
    """Enter the digits in order; `phase` says how many of them are left at the start."""

    def __init__(self, digits: int = 20, phase: int | None = None):
        self.secret = np.random.default_rng(7).integers(0, 2, digits)
        self.phase = digits if phase is None else phase
        self.observation_space = gym.spaces.Box(0.0, 1.0, (digits,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def set_phase(self, phase: int) -> None:
        """From the next episode on."""
        self.phase = phase

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = len(self.secret) - self.phase
        return self._look(), {}

    def step(self, action):
        right = action == self.secret[self.at]
        self.at += int(right)
        opened = self.at == len(self.secret)
        self.at = min(self.at, len(self.secret) - 1)
        return self._look(), float(opened), bool(opened or not right), False, {}

    def _look(self) -> np.ndarray:
        return np.eye(len(self.secret), dtype=np.float32)[self.at]


class Curriculum(bray.Callbacks):
    """One digit more whenever nine of ten tries have opened the lock."""

    phase = 1

    def on_train_start(self, experiment):
        self._tell(experiment)

    def on_train_result(self, experiment, row):
        if (row["episode_return_mean"] or 0.0) > 0.9 and self.phase < 20:
            self.phase += 1
        self._tell(experiment)
        row["phase"] = self.phase

    def _tell(self, experiment):
        experiment.foreach_env(lambda env, phase=self.phase: env.set_phase(phase))

    def get_state(self):
        """Written to checkpoints; a resumed run gives it back before `on_train_start`."""
        return {"phase": self.phase}

    def set_state(self, state):
        self.phase = state["phase"]


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without the curriculum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200_000)
    options = parser.parse_args()
    short = {"rollout_length": 128, "minibatches": 16}  # the curriculum moves once per rollout
    exp = bray.Experiment(run="PPO", env=Lock, seed=options.seed, num_envs=8, vector="inprocess", **short)
    callbacks = [] if options.plain else [Curriculum()]
    for row in exp.train({"env_steps_total": options.steps}, callbacks=callbacks):
        if row["training_iteration"] % 20 == 0:
            digits = row.get("phase", 20)
            print(f"{row['env_steps_total']:>8,} steps  {digits:>2} digits  opened {row['episode_return_mean']:.2f}")
        if row.get("phase") == 20 and row["episode_return_mean"] > 0.95:
            break
    opened = exp.evaluate(10)["eval/return_mean"]
    print(f"the whole lock is opened in {opened:.0%} of the tries after {exp.last_row['env_steps_total']:,} steps")
    exp.close()
    return opened


if __name__ == "__main__":
    main()
