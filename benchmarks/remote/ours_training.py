"""Our side of the whole training: python -m benchmarks.remote.ours_training UPDATES_FILE [key=value ...]     (see
training.py)

The launch file training.yaml, built as `bray launch` builds it, in a Ray of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.remote.settings import EPISODE_LENGTH, PPO, ROWS, WORKERS, say


def main() -> None:
    *overrides, updates = sys.argv[1:]
    os.environ["BENCH_UPDATES"] = updates
    import bray
    from bray.launch.build import build
    from bray.launch.graph import load

    shared = [f"ppo.settings.{k}={v}" for k, v in PPO.items()]
    shared += [f"buffer1.batch_size={ROWS}", f"actor1.num_workers={WORKERS}", f"actor1.episode_length={EPISODE_LENGTH}"]
    with tempfile.TemporaryDirectory(prefix="bray-project-") as project:
        file = Path(__file__).with_name("training.yaml")
        graph = load(file, [*shared, *overrides], project=project)
        ray = {"address": "local", "num_cpus": 16, "object_store_memory": 256 << 20}
        session = bray.init(graph.settings.project, graph.settings.trial, cluster="ray", **ray)
        try:
            run = build(graph, session)
            names = {str(session.cluster.pid(name)): name for name in session.cluster.names()}
            say({"ready": run.actors["actor1"].port, "names": names})
            sys.stdin.read()  # until whoever started us closes it
        finally:
            bray.shutdown()


if __name__ == "__main__":
    main()
