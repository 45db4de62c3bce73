"""The cases of training with two workers: one table for Bray (`benchmarks/scale/peers.py`) and for the scripts of its
peers, which import nothing else of ours.

Equal for all: the environments and how pictures are made, the network, rollouts and batches, learning rate, discount
and the weights of the loss. A batch is the rollouts of one worker's environments. IMPALA makes one gradient step of it;
APPO two passes in four pieces each.
Threads are each library's own affair.
"""

import argparse
import json
import time
from dataclasses import dataclass

WORKERS = 2
ENVS = 8
"""Of each worker."""
GAMMA = 0.99
LAMBDA = 0.95
"""APPO's."""
CLIP = 0.2
EPOCHS = 2
MINIBATCHES = 4
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
HIDDEN = (64, 64)
"""tanh, for the policy and for the value apart. Pictures: the network of Mnih 2015 (a dense layer of 512), which both
share."""
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
FRAMES = 4
"""Stacked."""
WARM_S = 3.0
"""Seconds between the first results and the window that is measured."""


@dataclass(frozen=True)
class Case:
    run: str
    env: str
    length: int
    lr: float

    @property
    def batch(self) -> int:
        return ENVS * self.length

    @property
    def passes(self) -> int:
        return EPOCHS if self.run == "APPO" else 1

    @property
    def pictures(self) -> bool:
        return self.env.startswith("ALE/")


CASES = {
    "impala-cartpole": Case("IMPALA", "CartPole-v1", 20, 1e-3),
    "appo-cartpole": Case("APPO", "CartPole-v1", 64, 1e-3),
    "impala-pong": Case("IMPALA", "ALE/Pong-v5", 20, 2.5e-4),
    "appo-pong": Case("APPO", "ALE/Pong-v5", 64, 2.5e-4),
}


def arguments(doc: str, names: list[str]) -> argparse.Namespace:
    """The command line of a peer's script."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("case", choices=names)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the window; with --until: the most")
    parser.add_argument("--until", type=float, help="stop at this mean return of the last 100 episodes")
    parser.add_argument("--seed", type=int, default=100)
    return parser.parse_args()


class Watch:
    """Counts steps and seconds: those of a window, which begins soon after the first results, or all of them from its
    making to a return."""

    def __init__(self, seconds: float, until: float | None = None):
        self.limit, self.until = seconds, until
        self.made = time.perf_counter()
        self.came: float | None = None
        self.first: tuple[float, int, int] | None = None
        self.last = (self.made, 0, 0)
        self.mean: float | None = None

    def tick(self, steps: int | None, learnt: int | None, mean: float | None) -> bool:
        """Call with the steps so far, how many were learnt from (each pass counts) and the mean return; True when it is
        time to stop."""
        now = time.perf_counter()
        self.mean = self.mean if mean is None else float(mean)
        if steps:
            self.last = (now, int(steps), int(learnt or 0))
            self.came = self.came or now
            if self.first is None and now - self.came >= WARM_S:
                self.first = self.last
        if self.until is not None:
            return self.reached or now - self.made > self.limit
        return self.first is not None and now - self.first[0] >= self.limit

    @property
    def reached(self) -> bool:
        return self.until is not None and self.mean is not None and self.mean >= self.until

    def line(self) -> dict:
        seconds, steps, learnt = (b - a for a, b in zip(self.first or (self.made, 0, 0), self.last, strict=True))
        return {
            "steps_per_second": steps / max(seconds, 1e-9),
            "passes": learnt / max(steps, 1),
            "seconds": self.last[0] - self.made,
            "steps": self.last[1],
            "return": self.mean,
            "reached": self.reached,
        }


def report(peer: str, version: str, case: str, watch: Watch) -> None:
    """The one line that a peer's script prints, its last."""
    print(json.dumps({"peer": peer, "version": version, "case": case, **watch.line()}), flush=True)


def make_pong(**more):
    """ALE/Pong-v5 by Gymnasium's own wrappers: a decision every 4 frames, 84x84 grey, clipped rewards and no-op starts.
    Frames are stacked by who calls it."""
    import gymnasium as gym
    import numpy as np
    from ale_py.registration import register_v5_envs

    if "ALE/Pong-v5" not in gym.registry:  # ale_py does it itself, but not with a gymnasium below 1
        register_v5_envs()
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, **more)
    return gym.wrappers.TransformReward(env, np.sign)
