"""The curves of the template on Ray: python -m benchmarks.learning.template [RL.jsonl SL_RL.jsonl] [--out FILE]

The two files are the `result.jsonl` of `bray launch --config mygame/rl.yaml` and `.../sl_rl.yaml` with 32 games over
HTTP; by default the committed ones beside this file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent
BEST = 0.892  # of the best player, on average: template/games/grid.py


def curve(file: Path) -> tuple[list[float], list[float]]:
    """(thousands of ticks, mean return of the last episodes), as long as it was trained."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [r for r in rows if "episode_return_mean" in r and "learner_steps_total" in r]
    return [r["env_steps_total"] / 1000 for r in kept], [r["episode_return_mean"] for r in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rl", type=Path, nargs="?", default=HERE / "template-rl-ray.jsonl")
    parser.add_argument("sl_rl", type=Path, nargs="?", default=HERE / "template-sl_rl-ray.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "template-ray.png")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for file, label in ((args.rl, "rl.yaml: PPO from scratch"), (args.sl_rl, "sl_rl.yaml: PPO and demonstrations")):
        axes.plot(*curve(file), marker=".", label=label)
    axes.axhline(BEST, color="grey", linestyle="--", linewidth=1, label=f"best possible on average: {BEST}")
    axes.set_xlabel("ticks of the games (thousands)")
    axes.set_ylabel("mean return of the last episodes")
    axes.set_title("The template on Ray: 32 games over HTTP, one run each")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)
    print(args.out)


if __name__ == "__main__":
    main()
