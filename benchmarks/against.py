"""python -m benchmarks.against [CASE ...] [--rev fdd0939] [--pairs 5]: is this tree as fast as another commit?

The two trees take turns, in processes of their own, one thread each; a pair is one measurement of each, and which goes
first alternates. Training: environment steps per second of CPU time of all processes, after a warm-up, so that other
work on the machine counts less; `ppo-workers` has two worker processes, and the cases of `benchmarks training` are
named ours/CASE (`ours` = all of them). The two trainings of a pair take turns of a twentieth of a second of CPU time or
of an iteration, the same steps for both, and the first of a turn is the second of the next, because the speed of a core
changes within seconds: a pair's ratio is the median over those turns, and so is that of their wall times. `live`,
`launched`: rows that PPO learns from 32 games in another process, per second of CPU time of `bray train --live` and of
`bray launch` in one process. `serve`: ticks per second of CPU time that `bray serve` spends on a small network, 32
games in another process. `local`, `remote`, `trajectories`, `small`: items per second of CPU time of all processes.
These and `live`, `launched` are the cases of `benchmarks.remote.ours` and `benchmarks.live` of the tree that is
measured. One line per case: medians and the median ratio of the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import one_of, ours
from benchmarks.same_weights import BASE, ROOT, environment, other_tree

_SHORT = {"iteration_steps": 50}  # 1,000 steps of SAC are seconds
TRAINING = {
    "ppo": {"run": "PPO", "env": "CartPole-v1"},
    "ppo-lstm": {"run": "PPO", "env": "CartPole-v1", "use_lstm": True},
    "a2c": {"run": "A2C", "env": "CartPole-v1"},
    "dqn": {"run": "DQN", "env": "CartPole-v1"},
    "sac": {"run": "SAC", "env": "Pendulum-v1", "learning_starts": 1000},
    "ppo-workers": {"run": "PPO", "env": "CartPole-v1", "num_workers": 2},
    **{f"ours/{name}": {**_SHORT, **case, "use_preset": False, "seed": 1} for name, case in ours.CASES.items()},
}
OURS = [name for name in TRAINING if name.startswith("ours/")]
TURNS, WARM_UP = 60, 2  # of a training; turns before them, of half a second, are not counted
LIVE = ("live", "launched")
REMOTE = ("local", "remote", "trajectories", "small")
_TRAIN = """
import json, os, sys, time
from benchmarks.serving.__main__ import cpu_seconds, family
from bray.experiment import Experiment
import benchmarks.ours  # its environments
training = Experiment(**json.loads(sys.argv[1])).training
alone = lambda: len(family(os.getpid())) == 1  # then the clock that is not counted in hundredths
cpu = lambda: time.process_time() if alone() else cpu_seconds(family(os.getpid()))
for line in sys.stdin:  # a turn of so many steps; 0: of half a second, with something learnt
    before, start, wall, steps = training.env_steps, cpu(), time.perf_counter(), int(line)
    while training.env_steps < before + steps or not steps and (not training.learner.steps or cpu() - start < 0.5):
        training.iterate()
    made = training.env_steps - before
    print(made, made / (cpu() - start), made / (time.perf_counter() - wall), flush=True)
training.close()
"""
_SERVE = """
import json, subprocess, sys, tempfile, time
from bray.experiment import Experiment
with tempfile.TemporaryDirectory() as folder:
    train = "import sys, bray; bray.Experiment('PPO', 'CartPole-v1', path=sys.argv[1]).fit({'env_steps_total': 2000})"
    subprocess.run([sys.executable, "-c", train, folder + "/run"], check=True)  # training compiles, a service does not
    exp = Experiment.load(folder + "/run")
    with exp.serve(port=0, block=False) as server:
        games = subprocess.Popen([sys.executable, "-c", GAMES, str(server.port)], stdout=subprocess.PIPE, text=True)
        time.sleep(3.0)
        start = time.process_time()
        ticks = int(games.communicate()[0])
        print(ticks / (time.process_time() - start))
"""
_GAMES = """
import asyncio, sys, time
from bray.client import AsyncClient
async def play(end):
    count = 0
    async with AsyncClient("127.0.0.1", int(sys.argv[1])) as client:
        await client.start()
        while (now := time.monotonic()) < end:
            await client.tick({"obs": [0.01, 0.02, 0.03, 0.04]})
            count += now > end - 4.0
    return count
async def main():
    end = time.monotonic() + 7.0
    return sum(await asyncio.gather(*(play(end) for _ in range(32))))
print(asyncio.run(main()))
"""


def measure(tree: Path, case: str, folder: str) -> float:
    """Steps, ticks or items per CPU second with the code under `tree`."""
    if case == "serve":
        words = ["-c", f"GAMES = {_GAMES!r}\n{_SERVE}"]
    elif case in LIVE:
        words = ["-m", "benchmarks.live", "--side", case, "--repeat", "1", "--seconds", "12"]
    else:
        words = ["-m", "benchmarks.remote.ours", case, "--seconds", "5"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment(tree), cwd=folder)
    if done.returncode:
        raise SystemExit(f"{case} in {tree} failed: {done.stderr.strip()[-400:]}")
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    if case in LIVE:
        return float(lines[0]["rows_per_cpu_second"])
    if case in REMOTE:
        return 1e6 / lines[-1]["cpu_us"]
    return float(done.stdout.split()[-1])


def train_in_turns(trees: list[Path], case: str, folder: str) -> list[list[tuple[float, float]]]:
    """Steps per CPU second and per second of each turn, for each tree."""
    words = [sys.executable, "-c", _TRAIN, json.dumps(TRAINING[case])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder}
    both = [subprocess.Popen(words, env=environment(tree), **pipes) for tree in trees]
    rates: list[list[tuple[float, float]]] = [[] for _ in trees]
    steps = 0
    for turn in range(WARM_UP + TURNS):
        made = 0
        for child, out in list(zip(both, rates, strict=True))[:: 1 if turn % 2 else -1]:
            print(steps, file=child.stdin, flush=True)
            if not (line := child.stdout.readline()):
                raise SystemExit(f"{case}: a training ended by itself")
            made = int(line.split()[0])
            out.append((float(line.split()[1]), float(line.split()[2])))
        steps = max(1, made // 10) if turn == WARM_UP - 1 else steps
    for child in both:
        child.stdin.close()
        child.wait()
    return [out[WARM_UP:] for out in rates]


def main() -> int:
    cases = [*TRAINING, *LIVE, "serve", *REMOTE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*cases, "ours"]
    parser.add_argument("cases", nargs="*", type=one_of(known), help=f"{', '.join(known)}; none: all")
    parser.add_argument("--rev", default=BASE)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bray-against-") as folder, other_tree(args.rev, Path(folder)) as other:
        print(f"{'case':<28} {'here':>9} {args.rev:>9} {'ratio':>6} {'wall':>6}  pairs")
        for case in [c for name in args.cases or cases for c in (OURS if name == "ours" else [name])]:
            here, there, ratios, walls = [], [], [], []
            for i in range(args.pairs):
                order = 1 if i % 2 else -1
                trees = [ROOT, other][::order]
                if case in TRAINING:
                    mine, other_s = train_in_turns(trees, case, folder)[::order]
                    walls.append(statistics.median(a[1] / b[1] for a, b in zip(mine, other_s, strict=True)))
                    first, second = [m[0] for m in mine], [m[0] for m in other_s]
                else:
                    first, second = [[measure(tree, case, folder)] for tree in trees][::order]
                here.append(statistics.median(first))
                there.append(statistics.median(second))
                ratios.append(statistics.median(a / b for a, b in zip(first, second, strict=True)))
            shown = " ".join(f"{r:.2f}" for r in ratios)
            middle = [statistics.median(x) for x in (here, there, ratios)]
            wall = f"{statistics.median(walls):>6.3f}" if walls else " " * 6
            print(f"{case:<28} {middle[0]:>9,.0f} {middle[1]:>9,.0f} {middle[2]:>6.3f} {wall}  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
