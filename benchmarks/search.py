"""python -m benchmarks.search [--seconds 430] [--workers 8] [--device auto] [--seed 0] [--run DIR] [--out DIR]:
AlphaZero learns Connect Four from games against itself, then plays OpenSpiel's MCTS bot and its own network.

Goals, with 64 simulations a move, of 200 games, seats in turn: 60 % against the bot with 500 rollouts (its own search
solves what it can), where both play what they find best; more than half against the network without the search, which
plays what it finds best while the search draws its first moves by its visits, for else all games would be two. A draw
is a half. A directory of a run that has been stopped (--run) is gone on with; the time that all parts took is told.

Writes connect-four-search.jsonl: a line each ten seconds of learning, then what came of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bray
from bray.act import GREEDY, SAMPLE
from bray.config import ConfigSource
from bray.envs.outside_games import make_bot
from bray.train.games import play_two
from bray.train.opponents import load_opponent
from bray.train.table import outcome

HERE = Path(__file__).parent
ENV = "bray.envs.agent_games:ConnectFour"
BOT, ROLLOUTS = "benchmarks.search:spiel_mcts", 500
GAMES, GOALS = 200, {"mcts": 0.6, "network": 0.5}
BLOCK = {"layer_type": "residual", "activation": "relu"}
SETTINGS: dict[str, Any] = {
    "num_envs": 64,
    "simulations": 64,
    "leaves": 2,
    "c_puct": 2.0,
    "temperature_moves": 10,
    "mirror": True,
    "lr": {"kind": "linear", "start": 1e-3, "end": 2e-4, "steps": 1_000_000},
    "batch_size": 512,
    "train_every": 64,
    "learning_starts": 5_000,
    "replay_size": 200_000,
    "model": {
        "layers": [
            {"layer_type": "conv2d", "layer_dim": 64, "kernel_size": 3, "padding": 1, "activation": "relu"},
            BLOCK,
            BLOCK,
            BLOCK,
            {"layer_type": "conv2d", "layer_dim": 16, "kernel_size": 1, "activation": "relu"},
            {"layer_type": "flatten"},
            {"layer_type": "linear", "layer_dim": 256, "activation": "relu"},
        ]
    },
    "iteration_steps": 2_000,
    "checkpoint_every_s": 120.0,
    "keep_checkpoints": 1,
}


def spiel_mcts(obs: Any, rng: np.random.Generator) -> int:
    """OpenSpiel's bot, told what has been played. Its tree is new for each move anyway."""
    state = _spiel_game().new_initial_state()
    for move in obs["moves"][obs["moves"] >= 0].tolist():
        state.apply_action(move)
    bot = f"mcts(max_simulations={ROLLOUTS})"
    return int(make_bot(bot, state.get_game(), state.current_player(), int(rng.integers(1 << 31))).step(state))


@functools.cache
def _spiel_game() -> Any:
    import pyspiel

    return pyspiel.load_game("connect_four")


def train(path: Path, args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Learn until that moment; rows of the curve."""
    place = {"num_workers": args.workers, "inference": args.inference, "device": args.device}
    if path.exists():
        made = bray.Experiment.resume(path)
    else:
        settings = {**SETTINGS, "num_envs": args.num_envs, "simulations": args.simulations}
        made = bray.Experiment("AlphaZero", ENV, path=path, seed=args.seed, **settings, **place)
    curve, shown = [], 0.0
    with made as exp:
        for row in exp.train({"time_total_s": 1e6}):
            now = time.monotonic()
            if now >= shown + 10.0 or now >= until:
                keys = (
                    "env_steps_total",
                    "learner_steps_total",
                    "env_steps_per_second",
                    "time_total_s",
                    "episodes_total",
                )
                losses = [key for key in row if key.startswith("loss/")]
                curve.append({key: row[key] for key in (*keys, *losses) if row.get(key) is not None})
                print(json.dumps(curve[-1]), flush=True)
                shown = now
            if now >= until:
                break
    return curve


def play(path: str, name: str, simulations: int, games: int, seed: int, device: str) -> list[float]:
    """Play games against an opponent, and return the outcomes."""
    torch.set_num_threads(1)
    where = [ConfigSource("search", {"run": {"device": device}})]
    mine, alone = (bray.Experiment.load(path, sources=where) for _ in range(2))
    spec = mine.spec_of()
    ((seat, side),) = spec.sides.items()
    me, network = mine.players(spec)[seat], alone.players(spec)[seat]
    me.policy.simulations, network.policy.simulations = simulations, 0
    me.mode = GREEDY if name == "mcts" else SAMPLE
    other = replace(load_opponent(BOT, side.spec), mode=GREEDY) if name == "mcts" else network
    played = play_two(me, other, mine.config["env"], spec.agents, games, seed=1_000 * seed + 17)
    return [float(outcome(match, (agent,))) for match, agent in played]


def score(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Wins, draws, losses and points against each opponent; each process plays its share, in both seats alike."""
    pairs, out = args.games // 2, {}
    shares = [2 * (pairs // args.jobs + (i < pairs % args.jobs)) for i in range(args.jobs)]
    device = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name in GOALS:
            asked = [(str(path), name, args.simulations, n, i, device) for i, n in enumerate(shares) if n]
            tasks = [pool.submit(play, *one) for one in asked]
            outcomes = np.array([x for task in tasks for x in task.result()])
            counts = {k: int((np.sign(outcomes) == v).sum()) for k, v in (("win", 1), ("draw", 0), ("loss", -1))}
            points = (counts["win"] + 0.5 * counts["draw"]) / len(outcomes)
            out[name] = {**counts, "points": round(points, 4)}
            print(json.dumps({name: out[name]}), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=430.0, help="from the start to the end of learning")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--inference", choices=("central", "worker"), default="central")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("build/connect-four-search"), help="run directory")
    parser.add_argument("--num-envs", type=int, default=SETTINGS["num_envs"], help="games of each worker")
    parser.add_argument("--simulations", type=int, default=SETTINGS["simulations"])
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--jobs", type=int, default=8, help="processes that play the matches")
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    args = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)
    curve = train(args.run, args, started + args.seconds)
    learnt = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(line)}\n" for line in curve)
    (args.out / "connect-four-search.jsonl").write_text(lines)
    found = score(args.run, args)
    record = {
        "seed": args.seed,
        "found": found,
        "passed": found["mcts"]["points"] >= GOALS["mcts"] and found["network"]["points"] > GOALS["network"],
        "seconds": round(curve[-1]["time_total_s"]),
        "match_seconds": round(time.monotonic() - learnt),
        "workers": args.workers,
        "simulations": args.simulations,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "settings": SETTINGS,
    }
    (args.out / "connect-four-search.jsonl").write_text(lines + json.dumps(record) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "settings"}), flush=True)


if __name__ == "__main__":
    main()
