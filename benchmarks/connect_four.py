"""python -m benchmarks.connect_four [--minutes 8] [--steps N] [--seed 0] [--run DIR] [--set KEY=VALUE ...] [--out DIR]:
PPO learns Connect Four by self-play, and meets players that it has never learnt from.

Training games begin anywhere (`random_moves`): a player that only knows the games that it plays itself is lost where a
stranger leads it. Evaluations begin with the empty board. Goals, of 200 greedy games against each, seats in turn: 98 %
won against random play, 70 % against a player that wins where it can and blocks where it must, one move ahead, 90 %
against its own first snapshot; and ratings that rise: no snapshot is rated below an earlier one by more than both
intervals. A draw is a half. No checkpoint is chosen: what is judged is what there is at the end. A run that has been
stopped (--run) is gone on with.

Writes connect-four-SEED.jsonl (each evaluation on the way, then what came of it), connect-four-SEED-ratings.png,
-payoff.png and -opponents.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import bray
from benchmarks.slime_game import uniform
from bray.cli.main import main as bray_command
from bray.compiled import compiled
from bray.config import ConfigSource, parse_assignments
from bray.envs.many_games import ManyGames
from bray.league import IN_RUN, read_league
from bray.spec import ACTION_MASK

HERE = Path(__file__).parent
BOT = "benchmarks.connect_four:one_ply"
GOALS = {"random": 0.98, BOT: 0.70, "first": 0.90}
SETTINGS: dict[str, Any] = {
    "env_config": {"random_moves": 20},
    "eval_env_config": {"random_moves": 0},
    "num_envs": 512,
    "rollout_length": 16,
    "epochs": 3,
    "minibatches": 8,
    "lr": {"kind": "linear", "start": 1e-3, "end": 1e-4, "steps": 4_000_000},
    "gamma": 1.0,
    "lambda_": 0.9,
    "entropy_coef": 0.05,
    "conv_filters": [[64, [3, 3], 1], [128, [4, 4], 1]],
    "conv_features": 256,
    "self_play": {"pool": 20, "newest": 0.6, "snapshot_every": 100_000, "opponents": list(GOALS)},
    "iteration_steps": 50_000,
    "eval_freq": 5,
    "eval_episodes": 50,
    "checkpoint_freq": 0,
    "keep_checkpoints": 1,
}
ROWS, COLUMNS = 6, 7


def _four_with(stones: np.ndarray, row: int, column: int) -> bool:
    """Whether one more stone here makes four in a row."""
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        run = 1
        for sign in (1, -1):
            r, c = row + sign * down, column + sign * right
            while 0 <= r < ROWS and 0 <= c < COLUMNS and stones[r, c]:
                run, r, c = run + 1, r + sign * down, c + sign * right
        if run >= 4:
            return True
    return False


four_with = compiled(_four_with)


def _drop(stones: np.ndarray, height: np.ndarray, moves: np.ndarray, column: int) -> int:
    """The player whose turn it is moves. Returns 1 where this wins, 0 where it fills the board, else -1."""
    me, row = moves[0] & 1, height[column]
    if row >= ROWS:
        raise ValueError("this column is full")
    won = four_with(stones[me], row, column)
    stones[me, row, column] = True
    height[column] += 1
    moves[0] += 1
    return 1 if won else 0 if moves[0] == ROWS * COLUMNS else -1


drop = compiled(_drop)


def _show(stones: np.ndarray, height: np.ndarray, agent: int, planes: np.ndarray, mask: np.ndarray) -> None:
    """What an agent sees: its own stones, empty cells, the other's; and which columns are not full."""
    for r in range(ROWS):
        for c in range(COLUMNS):
            mine, theirs = stones[agent, r, c], stones[1 - agent, r, c]
            planes[0, r, c], planes[1, r, c], planes[2, r, c] = mine, not (mine or theirs), theirs
    for c in range(COLUMNS):
        mask[c] = height[c] < ROWS


show = compiled(_show)


def _start(stones: np.ndarray, height: np.ndarray, moves: np.ndarray, draws: np.ndarray, most: int) -> None:
    """Up to `most` random moves, each number as likely, that have not ended the game."""
    while True:
        stones[:], height[:], moves[0], ended = False, 0, 0, False
        for _ in range(int(uniform(draws, 0.0, most + 1.0))):
            column = int(uniform(draws, 0.0, COLUMNS))
            while height[column] >= ROWS:
                column = int(uniform(draws, 0.0, COLUMNS))
            ended = drop(stones, height, moves, column) >= 0
            if ended:
                break
        if not ended:
            return


start = compiled(_start)


def _play_all(
    stones: np.ndarray,
    height: np.ndarray,
    moves: np.ndarray,
    actions: np.ndarray,
    playing: np.ndarray,
    planes: np.ndarray,
    mask: np.ndarray,
    acts: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
) -> None:
    for b in range(len(stones)):
        if not playing[b]:
            continue
        me = moves[b, 0] & 1
        came = drop(stones[b], height[b], moves[b], actions[b, me])
        terminated[b] = came >= 0
        reward[b, me], reward[b, 1 - me] = came == 1, -1.0 * (came == 1)
        acts[b, me], acts[b, 1 - me] = False, True
        show(stones[b], height[b], 1 - me, planes[b, 1 - me], mask[b, 1 - me])
        if came >= 0:
            show(stones[b], height[b], me, planes[b, me], mask[b, me])


play_all = compiled(_play_all)


class Anywhere(ManyGames):
    """Connect Four from a position that 0 to `random_moves` random moves lead to, each number as likely. Of a game that
    begins like that, whose turn it is may be anybody's."""

    possible_agents = ("player_0", "player_1")
    observation_spaces = dict.fromkeys(
        possible_agents,
        spaces.Dict(
            {
                "obs": spaces.Box(0, 1, (3, ROWS, COLUMNS), np.float32),
                ACTION_MASK: spaces.Box(0, 1, (COLUMNS,), np.int8),
            }
        ),
    )
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(COLUMNS))

    def __init__(self, num_games: int = 1, random_moves: int = 0):
        n = num_games
        self._most = random_moves
        self._stones, self._height = np.zeros((n, 2, ROWS, COLUMNS), bool), np.zeros((n, COLUMNS), np.int64)
        self._moves, self._draws = np.zeros((n, 1), np.int64), np.zeros((n, 1), np.uint64)
        planes = np.zeros((n, 2, 3, ROWS, COLUMNS), np.float32)
        self.obs = {"obs": planes, ACTION_MASK: np.ones((n, 2, COLUMNS), np.int8)}
        self.acts, self.reward = np.zeros((n, 2), bool), np.zeros((n, 2), np.float32)
        self.terminated, self.truncated = np.zeros(n, bool), np.zeros(n, bool)

    def begin(self, game: int, seed: int) -> None:
        one = self._stones[game], self._height[game]
        self._draws[game] = seed
        start(*one, self._moves[game], self._draws[game], self._most)
        turn = int(self._moves[game, 0]) & 1
        self.acts[game, turn], self.acts[game, 1 - turn] = True, False
        for agent in range(2):
            show(*one, agent, self.obs["obs"][game, agent], self.obs[ACTION_MASK][game, agent])

    def step(self, actions: Any, playing: np.ndarray) -> None:
        seen = self.obs["obs"], self.obs[ACTION_MASK], self.acts, self.reward, self.terminated
        play_all(self._stones, self._height, self._moves, actions, playing, *seen)


def one_ply(obs: Any, rng: np.random.Generator) -> int:
    """Wins where it can, else blocks where it must, else any column that is not full."""
    mine, _, theirs = np.asarray(obs["obs"]) > 0.5
    legal = np.flatnonzero(obs["action_mask"])
    height = (mine | theirs).sum(0)
    for stones in (mine, theirs):
        for column in legal:
            if four_with(stones, int(height[column]), int(column)):
                return int(column)
    return int(rng.choice(legal))


def rises(path: Path) -> bool:
    """No snapshot is rated below an earlier one by more than both intervals."""
    found = read_league(path / IN_RUN)
    ratings = [found.rating(ref) for ref in found.past()]
    return all(
        later.elo + later.half >= earlier.elo - earlier.half
        for i, earlier in enumerate(ratings)
        for later in ratings[i + 1 :]
    )


def points(row: Any, name: str) -> float:
    return float(row[f"eval/{name}/win"] + 0.5 * row[f"eval/{name}/draw"])


def train(path: Path, seed: int, minutes: float, steps: int | None, given: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    start, until, curve = time.process_time(), time.monotonic() + 60 * minutes, []
    if path.exists():
        made = bray.Experiment.resume(path, sources=[parse_assignments(given)] if given else [])
    else:
        sources = [ConfigSource("benchmark", SETTINGS), parse_assignments(given)]
        made = bray.Experiment("PPO", "benchmarks.connect_four:Anywhere", path=path, seed=seed, sources=sources)
    with made as exp:
        for row in exp.train({"env_steps_total": 1e9 if steps is None else steps}):
            if row.get("eval/return_mean") is not None:
                at = {"env_steps": row["env_steps_total"], "rating": round(row["league/rating"])}
                at |= {"s": round(row["time_total_s"]), "entropy": round(row["loss/entropy"], 3)}
                curve.append(at | {name: round(points(row, name), 3) for name in GOALS})
                print(json.dumps(curve[-1]), flush=True)
            if time.monotonic() >= until:
                break
        spent = time.process_time() - start
        final = exp.training.evaluate(200)
        exp.save()
    found = {name: {k: final[f"eval/{name}/{k}"] for k in ("win", "draw", "loss")} for name in GOALS}
    risen = rises(path)
    return {
        "seed": seed,
        "set": given,
        "env_steps": row["env_steps_total"],
        "cpu_s": round(spent),
        "found": found,
        "ratings_rise": risen,
        "passed": risen and all(points(final, name) >= goal for name, goal in GOALS.items()),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training in this call")
    parser.add_argument("--steps", type=int, help="of the game, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="a directory of its own, gone on with where it is there")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings that are others")
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path, name = args.run or Path(folder) / "connect-four", f"connect-four-{args.seed}"
        record = train(path, args.seed, args.minutes, args.steps, args.set)
        lines = [*record.pop("curve"), record]
        with (args.out / f"{name}.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
        print(json.dumps(record))
        bray_command(["league", str(path), "--plot"])
        for picture in ("ratings", "payoff", "opponents"):
            shutil.copy(path / "figures" / f"{picture}.png", args.out / f"{name}-{picture}.png")


if __name__ == "__main__":
    main()
