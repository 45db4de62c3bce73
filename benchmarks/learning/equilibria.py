"""python -m benchmarks.learning.equilibria [--out DIR]: how far policies that play against themselves are from an
equilibrium. Draws the recorded curves of a game in one picture: PPO with a magnet, PPO without one, NFSP.

python -m benchmarks.learning.equilibria --circles [--seed 0] [--out DIR]: trains the three cases of biased rock, paper
and scissors once more, and draws where their policies go (circles.jsonl, circles.png)."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
CIRCLES = {"ppo-rps-plain": "plain self-play", "league-rps": "a league", "ppo-rps": "a magnet"}
CHOICES = "rock", "paper", "scissors"
PICTURES = {
    "kuhn": {"ppo-kuhn": "PPO with a magnet", "ppo-kuhn-plain": "PPO without", "nfsp-kuhn": "NFSP"},
    "leduc": {"ppo-leduc": "PPO with a magnet", "ppo-leduc-plain": "PPO without"},
    "rps": {"ppo-rps": "PPO with a magnet", "ppo-rps-plain": "PPO without", "league-rps": "a league's average"},
}


def minus_nash_conv(exp: Experiment) -> float:
    return -nash_conv(exp).total


def minus_distance(exp: Experiment) -> float:
    """From the equilibrium of a matrix game: the largest difference of a probability."""
    return _minus_distance(exp, exp.players(exp.spec_of()).values())


def minus_distance_of_average(exp: Experiment) -> float:
    """Of the average strategy of a league: that of who draws one of all snapshots of its first player before each
    game."""
    return _minus_distance(exp, past(exp))


def past(exp: Experiment) -> list[ActingPolicy]:
    """All snapshots of the first player of a league."""
    assert isinstance(exp.training, GameTraining)
    league = exp.training.league
    assert league is not None
    name = next(iter(exp.policies), DEFAULT)
    return [league.snapshots[name].player(ref.step or 0) for ref in league.league.past(name)]


def _minus_distance(exp: Experiment, players: Iterable[ActingPolicy]) -> float:
    return -float(np.abs(_drawn(players) - EQUILIBRIA[exp.config["env"].env_config["game"]]).max())


def _drawn(players: Iterable[ActingPolicy]) -> np.ndarray:
    """How often each choice of a matrix game is drawn, by who draws one of these players first: of both agents."""
    return np.mean([probabilities(player, np.eye(2, dtype=np.float32), SAMPLE) for player in players], 0)


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


def go_round(name: str, seed: int) -> dict[str, list[list[float]]]:
    """Of a case in biased rock, paper and scissors: the policy after each iteration, and the average of a league."""
    from benchmarks.learning.__main__ import CASES  # which names this module's judges

    case, found = CASES[name], {"policy": [], "average": []}
    with tempfile.TemporaryDirectory() as folder:
        made = {"run": case.run, "env": case.env, "path": Path(folder) / "run", "seed": seed, "checkpoint_freq": 0}
        with Experiment(**made, config={**case.config, "iteration_steps": 1_000}) as exp:
            for _ in exp.train({case.counts: case.limit}):
                found["policy"].append(_drawn(exp.players(exp.spec_of()).values())[0].round(4).tolist())
                if "self_play" in case.config:
                    found["average"].append(_drawn(past(exp))[0].round(4).tolist())
    return found


def draw_circles(found: Mapping[str, Mapping[str, list[list[float]]]], out: Path) -> None:
    """circles.png: each policy on the triangle of its choices, from pale to dark, and the equilibrium."""
    import matplotlib.pyplot as plt

    corners = np.array([[0.0, 0.0], [0.5, 0.75**0.5], [1.0, 0.0]])
    figure, places = plt.subplots(1, len(found), figsize=(4.2 * len(found), 4.0))
    for axes, (name, paths) in zip(places, found.items(), strict=True):
        axes.fill(*corners.T, color="0.96", ec="0.6")
        for at, word in zip(corners + np.array([[-0.02, -0.06], [0, 0.03], [0.02, -0.06]]), CHOICES, strict=True):
            axes.text(*at, word, ha="center")
        x, y = (np.array(paths["policy"]) @ corners).T
        axes.plot(x, y, color="C0", lw=0.5, alpha=0.5)
        axes.scatter(x, y, c=np.linspace(0.25, 1, len(x)), cmap="Blues", vmin=0, vmax=1, s=10, label="policy")
        if paths["average"]:
            axes.plot(*(np.array(paths["average"]) @ corners).T, color="C1", lw=2.2, label="average of snapshots")
        axes.plot(*(np.array(EQUILIBRIA["biased_rps"][0]) @ corners), "k*", ms=13, label="equilibrium")
        axes.set_title(CIRCLES[name], fontweight="bold", pad=14)
        if paths["average"]:
            axes.legend(loc="upper right", bbox_to_anchor=(1.25, 1.0), frameon=False, fontsize=8)
        axes.set_aspect("equal")
        axes.axis("off")
    figure.savefig(out / "circles.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--circles", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.circles:
        torch.set_num_threads(1)
        found = {name: go_round(name, args.seed) for name in CIRCLES}
        lines = [json.dumps({"case": name, "seed": args.seed, **paths}) for name, paths in found.items()]
        (args.out / "circles.jsonl").write_text("\n".join(lines) + "\n")
        draw_circles(found, args.out)
        return
    for name in PICTURES:
        draw(name, args.out)


if __name__ == "__main__":
    main()
