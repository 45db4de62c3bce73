"""python -m benchmarks.matrix_share [SAC TD3 ...] [--updates 200]: how much of an update's time is spent in matrix
products.

Default settings on Pendulum-v1, one thread, as in `td3-pendulum`; PyTorch's profiler looks at `--updates` calls of
`Learner.update`. The profiler slows small operations down more than large ones, so the share without it is larger; time
of an update with and without it is told too.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import bray

RUNS = ("SAC", "TD3", "DDPG", "CrossQ")
PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::dot",
    "aten::mv",
}
"""They compute and call nothing else; `aten::linear` and `aten::matmul` call them."""


def measure(run: str, updates: int) -> None:
    config = {"threads": 1, "learning_starts": 300, "iteration_steps": 0}
    exp = bray.Experiment(run, "Pendulum-v1", use_preset=False, config=config)
    try:
        learner = exp.training.learner
        plain, seconds = learner.update, [0.0, 0.0]

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            with record_function("update"):
                out = plain(*given)
            seconds[0] += time.perf_counter() - start
            seconds[1] += 1
            return out

        learner.update = timed
        play(exp.training, learner, 50)  # recordings
        seconds[:] = 0.0, 0
        play(exp.training, learner, updates)
        alone = seconds[0] / seconds[1]
        with profile(activities=[ProfilerActivity.CPU]) as found:
            play(exp.training, learner, updates)
        rows = {row.key: row for row in found.key_averages()}
        whole, products = rows["update"].cpu_time_total, sum(rows[k].self_cpu_time_total for k in PRODUCTS if k in rows)
        each = rows["update"].count
        share = f"{100 * products / whole:.1f} % in matrix products ({products / each / 1e3:.2f} ms)"
        print(
            f"{run}: update {whole / each / 1e3:.2f} ms under the profiler, {1e3 * alone:.2f} ms without it; {share}",
            flush=True,
        )
    finally:
        exp.close()


def play(training: Any, learner: Any, updates: int) -> None:
    last = learner.steps + updates
    while learner.steps < last:
        training.iterate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{', '.join(RUNS)}; none = SAC and TD3")
    parser.add_argument("--updates", type=int, default=200)
    given = parser.parse_args()
    unknown = [run for run in given.runs if run not in RUNS]
    if unknown or given.updates < 1:
        parser.error(
            f"no algorithm {unknown[0]!r}; there are {', '.join(RUNS)}" if unknown else "--updates: at least 1"
        )
    torch.set_num_threads(1)
    for run in given.runs or RUNS[:2]:
        measure(run, given.updates)


if __name__ == "__main__":
    main()
