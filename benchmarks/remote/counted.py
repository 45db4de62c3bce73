"""PPO as it is, but its Learner says in a file (BENCH_UPDATES) how many rows it has learned from:
`algorithm: "benchmarks.remote.counted:"`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from bray.act import Clock
from bray.algos import ppo
from bray.algos.base import Update
from bray.algos.ppo import Config, Policy, experience, make_model

__all__ = ["Config", "Learner", "Policy", "experience", "make_model"]


class Learner(ppo.Learner):
    rows = 0

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        result = super().update(batch, clock)
        self.rows += int((batch["weight"] > 0).sum())
        with open(os.environ["BENCH_UPDATES"], "a") as f:
            f.write(json.dumps({"time": time.monotonic(), "rows": self.rows}) + "\n")
        return result
