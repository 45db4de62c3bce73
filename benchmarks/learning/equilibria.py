"""python -m benchmarks.learning.equilibria [--out DIR]: how far policies that play against themselves are from an
equilibrium. Draws the recorded curves of a game in one picture: PPO with a magnet, PPO without one, NFSP."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bray import figures
from bray.act import SAMPLE
from bray.envs.table import DEFAULT
from bray.experiment import Experiment
from bray.experiment.exploitability import nash_conv, probabilities
from bray.train.acting import ActingPolicy
from bray.train.games import GameTraining

HERE = Path(__file__).parent
EQUILIBRIA = {
    "biased_rps": ([0.25, 0.5, 0.25],) * 2,
    "prisoners_dilemma": ([0.0, 1.0],) * 2,
    "zero_sum": ([0.375, 0.625],) * 2,
}
"""Of `bray.envs.agent_games:Matrix`: of both players."""
PICTURES = {
    "kuhn": {"ppo-kuhn": "PPO with a magnet", "ppo-kuhn-plain": "PPO without", "nfsp-kuhn": "NFSP"},
    "leduc": {"ppo-leduc": "PPO with a magnet", "ppo-leduc-plain": "PPO without"},
    "rps": {"ppo-rps": "PPO with a magnet", "ppo-rps-plain": "PPO without", "league-rps": "a league's average"},
}


def minus_nash_conv(exp: Experiment) -> float:
    return -nash_conv(exp).total


def minus_distance(exp: Experiment) -> float:
    """From the equilibrium of a matrix game: the largest difference of a probability."""
    (player,) = exp.players(exp.spec_of()).values()
    return _minus_distance(exp, [player])


def minus_distance_of_average(exp: Experiment) -> float:
    """Of the average strategy of a league: that of who draws one of all snapshots of its first player before each
    game."""
    assert isinstance(exp.training, GameTraining)
    league = exp.training.league
    assert league is not None
    name = next(iter(exp.policies), DEFAULT)
    players = (league.snapshots[name].player(ref.step or 0) for ref in league.league.past(name))
    return _minus_distance(exp, players)


def _minus_distance(exp: Experiment, players: Iterable[ActingPolicy]) -> float:
    drawn = np.mean([probabilities(player, np.eye(2, dtype=np.float32), SAMPLE) for player in players], 0)
    return -float(np.abs(drawn - EQUILIBRIA[exp.config["env"].env_config["game"]]).max())


def draw(name: str, out: Path) -> None:
    """NAME.png: each seed a thin line, their mean a thick one, on a logarithmic scale."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (case, label), color in zip(PICTURES[name].items(), ("C0", "C3", "C2"), strict=False):
        if not (out / f"{case}.jsonl").exists():
            continue
        seeds: dict[Any, list[tuple[int, float]]] = {}
        for row in figures.read_results(out / f"{case}.jsonl"):
            if row.get(figures.EVAL) is not None:
                seeds.setdefault(row["seed"], []).append((row[figures.ENV_STEPS], -row[figures.EVAL]))
        for points in seeds.values():
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.35, linewidth=0.8)
        steps = np.array([x for x, _ in min(seeds.values(), key=len)])
        each = [np.interp(steps, *zip(*points, strict=True)) for points in seeds.values()]
        axes.plot(steps, np.mean(each, 0), color=color, linewidth=1.8, label=f"{label}, {len(seeds)} seeds")
    axes.set(yscale="log", xlabel="environment steps", title=name)
    axes.set_ylabel("largest distance from the equilibrium" if name == "rps" else "NashConv")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out / f"{name}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    for name in PICTURES:
        draw(name, out)


if __name__ == "__main__":
    main()
