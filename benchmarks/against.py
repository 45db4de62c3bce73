"""python -m benchmarks.against [CASE ...] [--rev f9b96a5] [--pairs 5]: is this tree as fast as another commit?

The two trees take turns, in processes of their own, one thread each; a pair is one measurement of each, and which goes
first alternates. Training: environment steps per second of CPU time, after a warm-up, so that other work on the machine
counts less. `serve`: ticks per second of CPU time that `bray serve` spends on a small network, 32 games in another
process. `local`, `remote`, `trajectories`, `small`: the cases of `benchmarks.remote.ours`, of the tree that is
measured, as items per second of CPU time of all processes. One line per case: medians and the median ratio of the
pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.same_weights import BASE, ROOT, environment, other_tree

TRAINING = {
    "ppo": ("PPO", "CartPole-v1", 60_000, {}),
    "ppo-lstm": ("PPO", "CartPole-v1", 16_000, {"use_lstm": True}),
    "a2c": ("A2C", "CartPole-v1", 40_000, {}),
    "dqn": ("DQN", "CartPole-v1", 12_000, {}),
    "sac": ("SAC", "Pendulum-v1", 3_000, {}),
}
REMOTE = ("local", "remote", "trajectories", "small")
_TRAIN = """
import json, sys, time
from bray.experiment import Experiment
run, env, steps, config = json.loads(sys.argv[1])
training = Experiment(run=run, env=env, config=config).training
done = lambda: training.env_steps if hasattr(training, "env_steps") else training.rollout.env_steps  # 0.1 had it there
while done() < steps // 6:
    training.iterate()
before, start = done(), time.process_time()
while done() < steps:
    training.iterate()
print((done() - before) / (time.process_time() - start))
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
    elif case in REMOTE:
        words = ["-m", "benchmarks.remote.ours", case, "--seconds", "5"]
    else:
        words = ["-c", _TRAIN, json.dumps(TRAINING[case])]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment(tree), cwd=folder)
    if done.returncode:
        raise SystemExit(f"{case} in {tree} failed: {done.stderr.strip()[-400:]}")
    if case in REMOTE:
        return 1e6 / json.loads([x for x in done.stdout.splitlines() if x.startswith("{")][-1])["cpu_us"]
    return float(done.stdout.split()[-1])


def main() -> int:
    cases = [*TRAINING, "serve", *REMOTE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *cases], default=[], help=f"{', '.join(cases)}; none: all")
    parser.add_argument("--rev", default=BASE)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bray-against-") as folder, other_tree(args.rev, Path(folder)) as other:
        print(f"{'case':<12} {'here':>9} {args.rev:>9} {'ratio':>6}  pairs")
        for case in args.cases or cases:
            here, there = [], []
            for i in range(args.pairs):
                for tree, out in ((ROOT, here), (other, there))[:: 1 if i % 2 else -1]:
                    out.append(measure(tree, case, folder))
            ratios = [a / b for a, b in zip(here, there, strict=True)]
            shown = " ".join(f"{r:.2f}" for r in ratios)
            middle = [statistics.median(x) for x in (here, there, ratios)]
            print(f"{case:<12} {middle[0]:>9,.0f} {middle[1]:>9,.0f} {middle[2]:>6.3f}  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
