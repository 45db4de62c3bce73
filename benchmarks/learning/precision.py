"""PPO on Pong in float32 and bfloat16, the same otherwise; then both curves in one picture.

    # one per precision, then pong-precision.png of all
    python -m benchmarks.learning.precision train --precision bfloat16 --device cuda --seconds 500 --out DIR
    python -m benchmarks.learning.precision draw DIR

Learning Pong takes a million steps and more: minutes with a GPU, hours on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

HERE = Path(__file__).parent


def train(precision: str, device: str, seconds: float, num_envs: int, seed: int, out: Path) -> None:
    from bray.algos import ppo
    from bray.envs.config import EnvConfig
    from bray.metrics import flatten_row
    from bray.nn.catalog import ModelConfig
    from bray.train.config import RunConfig
    from bray.train.local import LocalTraining

    env = EnvConfig(id="ALE/Pong-v5", num_envs=num_envs, clip_rewards=True)
    config = ppo.Config(precision=precision, lr=5e-4, clip=0.1, epochs=4, minibatches=8, entropy_coef=0.01)  # type: ignore[arg-type]
    training = LocalTraining(ppo, RunConfig(seed=seed, device=device), env, ModelConfig(), config)
    (out / precision).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with open(out / precision / "result.jsonl", "w") as file:
        while time.perf_counter() - start < seconds:
            row = training.iterate()
            file.write(json.dumps(flatten_row(row)) + "\n")
            if training.iteration % 20 == 0:
                file.flush()
                print(
                    precision,
                    row["env_steps_total"],
                    row["episode_return_mean"],
                    round(row["env_steps_per_second"]),
                    flush=True,
                )
    training.close()


def draw(out: Path) -> None:
    from bray import figures

    runs = {p.name: [p] for p in sorted(out.iterdir()) if (p / "result.jsonl").exists()}
    figures.overlay(runs, HERE / "pong-precision.png", "PPO on ALE/Pong-v5, one seed each")
    for name, (path,) in runs.items():
        rows = [json.loads(x) for x in (path / "result.jsonl").read_text().splitlines()]
        thin = [r for i, r in enumerate(rows) if i % 10 == 0 or i == len(rows) - 1]
        keys = ("env_steps_total", "episode_return_mean", "env_steps_per_second")
        (HERE / f"pong-{name}.jsonl").write_text("".join(json.dumps({k: r[k] for k in keys}) + "\n" for r in thin))
        print(json.dumps({"precision": name, **{k: rows[-1][k] for k in keys}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "draw"])
    parser.add_argument("dir", nargs="?", type=Path, help="draw: where the runs are")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pong-runs"))
    args = parser.parse_args()
    if args.what == "draw":
        draw(args.dir or args.out)
    else:
        train(args.precision, args.device, args.seconds, args.num_envs, args.seed, args.out)


if __name__ == "__main__":
    main()
