"""python -m benchmarks.slimevolley train plain|league [--seed 0] [--minutes 8] [--steps N] [--cores N] [--out DIR]
python -m benchmarks.slimevolley meet LEAGUE_RUN PLAIN_RUN

PPO learns Slime Volleyball (github.com/hardmaru/slimevolleygym 0.1.0) by playing itself: `plain` its newest self alone,
`league` a pool of what it was too. It never meets the game's own baseline while it learns, and no checkpoint is chosen
by it. Afterwards the newest policy plays 1,000 episodes against the baseline, drawing its actions; its score is the
mean return. Published, of 1,000 episodes: PPO trained on the baseline 1.377, self-play with genetic
algorithms 0.353, PPO by self-play -0.371. Goals: above -0.371 on 2 of 2 seeds, above 0 on one; and by `meet`, 55 % of
the decided ones of 400 games for the league at as many own steps (--steps: own decisions).

The game needs the old package gym, so it has an environment of its own: benchmarks/install_slimevolley.sh. Writes
slimevolley-HOW-SEED.jsonl (rows on the way, then what came of it), and the run beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import bray
from bray.act import SAMPLE, TRAINED, Tick, decide_now
from bray.cli.main import main as bray_command
from bray.experiment import Experiment
from bray.train.acting import ActingPolicy
from bray.train.games import play_two
from bray.train.table import outcome

HERE = Path(__file__).parent
ACTIONS = ([0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 0])
"""Forward, backward, jump: what the game's Atari mode offers."""
LONGEST = 3000
HOW = {"plain": {"newest": 1.0}, "league": {"newest": 0.5}}
SETTINGS: dict[str, Any] = {
    "num_envs": 64,
    "rollout_length": 128,
    "epochs": 4,
    "minibatches": 8,
    "lr": {"kind": "linear", "start": 5e-4, "end": 1e-4, "steps": 5_000_000},
    "gamma": 0.99,
    "lambda_": 0.95,
    "entropy_coef": 0.01,
    "fcnet_hiddens": [64, 64],
    "iteration_steps": 50_000,
    "eval_freq": 10,
    "eval_episodes": 20,
}
POOL = {"pool": 30, "snapshot_every": 200_000, "opponents": ["random", "first"]}


class SlimeVolley(bray.MultiAgentEnv):
    """Two slimes and a ball. Each sees the court as if it stood on the right. A lost ball costs one, and the other is
    paid one; five lost balls or 3,000 steps end the game."""

    possible_agents = ("right", "left")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(-np.inf, np.inf, (12,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(len(ACTIONS)))

    def __init__(self) -> None:
        from slimevolleygym.slimevolley import Game

        self._game = Game(np_random=np.random.default_rng())
        self._t = 0

    def _seen(self) -> dict[str, np.ndarray]:
        sides = {"right": self._game.agent_right, "left": self._game.agent_left}
        return {name: np.asarray(side.getObservation(), np.float32) for name, side in sides.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._game.np_random = np.random.default_rng(seed)
        self._t = 0
        self._game.reset()
        return self._seen(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self._t += 1
        self._game.agent_left.setAction(ACTIONS[int(actions["left"])])
        self._game.agent_right.setAction(ACTIONS[int(actions["right"])])
        paid = float(self._game.step())
        over = min(self._game.agent_left.life, self._game.agent_right.life) <= 0
        cut = not over and self._t >= LONGEST
        return self._seen(), {"right": paid, "left": -paid}, {"__all__": over}, {"__all__": cut}, {}


class Baseline:
    """The game's own policy, a small network that remembers, in many games at once."""

    def __init__(self, games: int):
        from slimevolleygym.slimevolley import BaselinePolicy

        one = BaselinePolicy()
        self._weight, self._bias, self._inputs = one.weight, one.bias, one.nGameInput
        self.outputs = np.zeros((games, one.nOutput))

    def act(self, obs: np.ndarray, games: list[int]) -> np.ndarray:
        """Numbers of `ACTIONS`. It may press forward and backward at once, which moves it nowhere."""
        inputs = np.concatenate([obs[:, : self._inputs], self.outputs[games]], 1)
        self.outputs[games] = out = np.tanh(inputs @ self._weight.T + self._bias)
        forward, backward, jump = (out[:, :3] > 0.75).T
        return _NUMBERS[(forward & ~backward).astype(int), (backward & ~forward).astype(int), jump.astype(int)]


_NUMBERS = np.zeros((2, 2, 2), np.int64)
for number, buttons in enumerate(ACTIONS):
    _NUMBERS[tuple(buttons)] = number


def against_baseline(player: ActingPolicy, episodes: int, mode: str, seed: int = 0) -> dict[str, float]:
    """The mean return of a policy on the right against the game's own on the left."""
    rng, games = np.random.default_rng(seed), [SlimeVolley() for _ in range(min(episodes, 100))]
    baseline = Baseline(len(games))
    seen = [game.reset(seed=seed + i)[0] for i, game in enumerate(games)]
    left, returns, sums = episodes - len(games), [], np.zeros(len(games))
    playing = list(range(len(games)))
    while playing:
        right, other = (np.stack([seen[i][side] for i in playing]) for side in ("right", "left"))
        deciding = player.policy.decide(Tick(right), None, rng, mode, TRAINED)
        mine, theirs = decide_now(deciding, player.engine.forward).action, baseline.act(other, playing)
        for i, action, answer in zip(tuple(playing), mine, theirs, strict=True):
            seen[i], paid, over, cut, _ = games[i].step({"right": action, "left": answer})
            sums[i] += paid["right"]
            if over["__all__"] or cut["__all__"]:
                returns.append(sums[i])
                sums[i], baseline.outputs[i] = 0.0, 0.0
                if left > 0:
                    left, seen[i] = left - 1, games[i].reset()[0]
                else:
                    playing.remove(i)
    found = np.array(returns)
    return {"episodes": len(found), "mean": round(float(found.mean()), 3), "std": round(float(found.std()), 3)}


def train(how: str, path: Path, seed: int, minutes: float, steps: int | None, cores: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    start, lines = time.process_time(), []
    play = {"vector": "subprocess", "num_processes": cores - 1} if cores > 1 else {"vector": "inprocess"}
    given = {**SETTINGS, **play, "self_play": {**POOL, **HOW[how]}}
    with Experiment("PPO", "benchmarks.slimevolley:SlimeVolley", path=path, seed=seed, **given) as exp:
        for row in exp.train({"time_total_s": 60 * minutes}):
            if row.get("eval/return_mean") is not None:
                keys = ("env_steps_total", "agent_steps_total", "league/rating", "eval/random/win", "eval/first/win")
                lines.append({key: row.get(key) for key in keys})
                print(json.dumps(lines[-1]), flush=True)
            if steps is not None and row["agent_steps_total"] >= steps:
                break
        exp.save()
        (player,) = exp.players(exp.spec_of()).values()
        score = against_baseline(player, 1_000, SAMPLE)
    ends = {"how": how, "seed": seed, "env_steps": row["env_steps_total"], "own_steps": row["agent_steps_total"]}
    return [*lines, {**ends, "cpu_s": round(time.process_time() - start), "baseline": score, "settings": given}]


def meet(one: Path, other: Path, games: int = 400) -> dict[str, Any]:
    """How often the newest policy of the first run beats that of the second, of decided games, both drawing."""
    with Experiment.load(one, trust=True) as a, Experiment.load(other, trust=True) as b:
        (mine,), (theirs,) = (exp.players(exp.spec_of()).values() for exp in (a, b))
        matches = play_two(mine, theirs, a.config["env"], a.spec_of().agents, games, mode=SAMPLE)
    found = [outcome(match, (agent,)) for match, agent in matches]
    won, lost = found.count(1), found.count(-1)
    return {"won": won, "drawn": found.count(0), "lost": lost, "of_decided": round(won / max(won + lost, 1), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("how", choices=list(HOW))
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--minutes", type=float, default=8.0)
    training.add_argument("--steps", type=int, help="own decisions")
    training.add_argument("--cores", type=int, default=1, help="one learns and decides, the others step games")
    training.add_argument("--out", type=Path, default=HERE / "learning")
    two = commands.add_parser("meet")
    two.add_argument("runs", nargs=2, type=Path)
    args = parser.parse_args()
    if args.command == "meet":
        print(json.dumps(meet(*args.runs)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"slimevolley-{args.how}-{args.seed}"
    lines = train(args.how, args.out / name, args.seed, args.minutes, args.steps, args.cores)
    (args.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(json.dumps({k: v for k, v in lines[-1].items() if k != "settings"}))
    bray_command(["league", str(args.out / name), "--plot"])


if __name__ == "__main__":
    main()
