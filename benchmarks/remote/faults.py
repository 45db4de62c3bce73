"""Kill one part of a running training after the other, and see how it goes on.

    python -m benchmarks.remote.faults                    # all cases; a table at the end
    python -m benchmarks.remote.faults --only node

The training is the template's grid game: PPO on a real local Ray, a model worker and the keeper of its weights, two
buffer shards, two service workers, one rank, and games that are played over HTTP by another process. For `node` the Ray
has two nodes, one of which is taken away with all that runs there (`killed` of its row says what that was).

recovered  seconds from the kill until the killed part works in a new process and the trainer has made steps again
stuck      games that have no tick within 15 s after that
lost       samples that were in the killed process and reach no trainer (counted there just before the kill; an upper
           bound for sessions), and those that a rank had learned from since its checkpoint
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMITS = {"model": 10.0, "keeper": 10.0, "buffer": 10.0, "actor": 10.0, "rank": 30.0, "master": 15.0, "node": 60.0}
"""Seconds within which a training must go on."""
PATIENCE = 15.0
"""Seconds in which every game must go on; a request of theirs waits 10 s at most."""
GAMES = 16
EPISODE_LENGTH = 32
ROWS_PER_STEP = 1024 // 16  # a batch of the buffer, and PPO's gradient steps on it
RANK = "RayTrainWorker"
"""As Ray calls the process of a rank."""
OVERRIDES = [
    "model1.num_workers=1",
    "model1.local_mode=false",
    "model1.checkpoint_interval=64",
    "buffer1.num_workers=2",
    "actor1.num_workers=2",
    "actor1.port=0",
    "trainer1.checkpoint_interval=64",
]


@dataclass
class Outcome:
    case: str
    recovered: float
    lost: int
    step_before: int
    lowest_step: int
    last_checkpoint: int
    step_after: int
    corrupt: list[str]
    stuck_games: int
    killed: list[str]
    """What died, by the names of members and by Ray's classes."""
    errors: int
    """Requests of games that failed meanwhile: each game then starts a new session."""


@contextlib.contextmanager
def training(directory: Path, nodes: int = 1) -> Iterator[Any]:
    """The template's training at work, with games."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import bray
    from bray.launch.build import build
    from bray.launch.graph import load

    sys.path.insert(0, str(ROOT))
    graph = load(ROOT / "template" / "rl.yaml", OVERRIDES, project=str(directory), trial="faults")
    with contextlib.ExitStack() as stack:
        kwargs: dict[str, Any] = {"address": "local", "num_cpus": 32, "object_store_memory": 300 << 20}
        ray_cluster: Any = None
        if nodes > 1:
            from ray.cluster_utils import Cluster

            ray_cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 16, "object_store_memory": 200 << 20}
            )
            stack.callback(ray_cluster.shutdown)
            ray_cluster.second = ray_cluster.add_node(num_cpus=16, object_store_memory=200 << 20)
            kwargs = {"address": ray_cluster.address}
        session = bray.init(str(directory), "faults", **kwargs)
        stack.callback(bray.shutdown)
        run = build(graph, session)
        games = Games(run.actors["actor1"].port)
        stack.callback(games.close)
        yield System(session, run, games, ray_cluster)


class Games:
    """A process with games; it says every half second what each game has done."""

    def __init__(self, port: int):
        command = [sys.executable, "-m", "benchmarks.remote.faults", "--play", str(port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.ticks: list[int] = [0] * GAMES
        self.errors = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            row = json.loads(line)
            self.ticks, self.errors = row["ticks"], row["errors"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def play(port: int) -> None:
    """In the games' process."""
    from bray.client import Client, ClientError
    from template import gamecore
    from template.games import make_game

    ticks, errors = [0] * GAMES, [0] * GAMES

    class Counted(gamecore.Games):
        def __init__(self, number: int):
            super().__init__("grid", "127.0.0.1", port)
            self.number = number

        def play(self, seed: int) -> None:
            env = make_game("grid")
            while True:
                try:
                    with Client("127.0.0.1", port, timeout=10) as client:
                        client.start()
                        while True:
                            self.episode(client, env, seed)
                            seed += 1_000_003
                            ticks[self.number] = self.ticks
                except ClientError:
                    errors[self.number] += 1
                    time.sleep(0.2)

    for i in range(GAMES):
        threading.Thread(target=Counted(i).play, args=(i,), daemon=True).start()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
        print(json.dumps({"ticks": ticks, "errors": sum(errors)}), flush=True)


class System:
    def __init__(self, session: Any, run: Any, games: Games, ray_cluster: Any):
        self.session, self.run, self.games, self.ray_cluster = session, run, games, ray_cluster
        self.lowest = 1 << 62

    def step(self) -> int:
        """The model's step as its keeper has it; -1 while that does not answer. What a handle knows never goes back."""
        from bray.errors import BrayError

        try:
            step = int(self.session.cluster.find("model/model1").call("step", timeout=5.0).result())
        except BrayError:
            return -1
        self.lowest = min(self.lowest, step)
        return step

    def wait_step(self, above: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.step() <= above:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def last_checkpoint(self) -> int:
        steps = [int(p.stem) for p in (self.session.path / "models" / "model1").glob("*.safetensors")]
        return max(steps, default=0)

    def corrupt(self) -> list[str]:
        """Files of the model and of the trainer that cannot be read back."""
        from bray.errors import BrayError
        from bray.remote.trainer.worker import trainer_path
        from bray.rundir import RunDir, read_weights

        bad = []
        for path in sorted((self.session.path / "models" / "model1").glob("*.safetensors")):
            try:
                read_weights(path)
            except BrayError:
                if path.exists():  # else retention has just removed it
                    bad.append(path.name)
        trainer = RunDir(trainer_path(self.session.path, "trainer1"))
        bad += [f"trainer1 {s}" for s in trainer.steps() if not trainer.is_intact(s) and s in trainer.steps()]
        return bad

    # --- who is killed ------------------------------------------------------------------------------------------------

    def victim(self, case: str) -> str:
        first = {
            "model": "model/model1/",
            "keeper": "model/model1",
            "buffer": "buffer/buffer1/",
            "actor": "actor/actor1/",
            "master": "master",
        }
        return self.session.cluster.names(first[case])[0]

    def rank_pid(self) -> int:
        """The trainer's rank, among the processes of this Ray alone."""
        import ray

        ours = ray._private.worker._global_node.get_session_dir_path()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if RANK.encode() in (entry / "cmdline").read_bytes():
                        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                        if ours.encode() in (Path("/proc") / str(parent) / "cmdline").read_bytes():
                            return int(entry.name)
        return -1

    def pids(self, names: list[str]) -> list[int]:
        """Of the processes of some members (or of the rank) that do their work; -1 of one that does not (yet)."""
        from bray.errors import BrayError

        out = []
        for name in names:
            try:
                if name == RANK:
                    out.append(self.rank_pid())
                    continue
                # Any method will do: it is answered once the worker is made.
                self.session.cluster.find(name).call("__repr__", timeout=5.0).result()
                out.append(self.session.cluster.pid(name))
            except BrayError:
                out.append(-1)
        return out

    def on_second_node(self) -> list[str]:
        """What runs there."""
        import ray

        node = self.ray_cluster.second.node_id
        alive = (a for a in ray._private.state.actors().values() if a["State"] == "ALIVE")
        return sorted(a["Name"] or a["ActorClassName"] for a in alive if a["Address"]["NodeID"] == node)

    def in_it(self, case: str, name: str) -> int:
        """Samples that die with a process."""
        if case == "buffer":
            shard = int(name.rpartition("/")[2])
            return int(self.run.buffers["buffer1"].numbers()["shards"][shard]["waiting"])
        if case == "actor":
            return GAMES // 2 * EPISODE_LENGTH
        if case == "node":
            waiting = sum(int(s["waiting"]) for s in self.run.buffers["buffer1"].numbers()["shards"])
            return waiting + GAMES * EPISODE_LENGTH
        return 0

    def learned(self) -> int:
        """Samples that the trainer has learned from since its last checkpoint."""
        from bray.remote.trainer.worker import trainer_path
        from bray.rundir import RunDir

        saved = RunDir(trainer_path(self.session.path, "trainer1")).steps()
        return max(0, self.step() - max(saved, default=0)) * ROWS_PER_STEP

    def stuck_games(self, seconds: float) -> int:
        """How many games do not go on from here, in so many seconds."""
        before, end = self.games.ticks, time.monotonic() + seconds
        while True:
            stuck = sum(a <= b for a, b in zip(self.games.ticks, before, strict=True))
            if not stuck or time.monotonic() > end:
                return stuck
            time.sleep(0.5)

    def suffer(self, case: str) -> Outcome:
        """Kill, and wait until all is well again."""
        limit = 3 * LIMITS[case]  # so that a late recovery is measured, too
        if case == "node":
            killed = self.on_second_node()
        else:
            killed = [RANK if case == "rank" else self.victim(case)]
        # Service workers of a node are not started elsewhere, and Ray Train's own processes are its business.
        returning = [n for n in killed if case != "node" or n == RANK or n.startswith(("model/", "buffer/", "master"))]
        old, lost = self.pids(returning), self.in_it(case, killed[0])
        assert -1 not in old, (
            f"not all of {returning} are at work before {case}"
        )  # and kill(-1) would end every process
        if RANK in killed:
            lost += self.learned()
        before, self.lowest = self.step(), 1 << 62
        checkpoint, errors = self.last_checkpoint(), self.games.errors
        start = time.monotonic()
        if case == "node":
            self.ray_cluster.remove_node(self.ray_cluster.second, allow_graceful=False)
        else:
            os.kill(old[0], signal.SIGKILL)
        end = start + limit
        while any(p in (-1, q) for p, q in zip(self.pids(returning), old, strict=True)) and time.monotonic() < end:
            self.step()
            time.sleep(0.1)
        self.wait_step(max(before, self.step()), max(0.0, end - time.monotonic()))
        recovered = time.monotonic() - start
        stuck = self.stuck_games(PATIENCE)
        return Outcome(
            case,
            recovered,
            lost,
            before,
            self.lowest,
            checkpoint,
            self.step(),
            self.corrupt(),
            stuck,
            killed,
            self.games.errors - errors,
        )


def run_cases(cases: list[str], directory: Path) -> list[Outcome]:
    outcomes = []
    ordinary = [c for c in cases if c != "node"]
    if ordinary:
        with training(directory / "one") as system:
            assert system.wait_step(100, 180.0), "the training did not begin"
            for case in ordinary:
                outcomes.append(system.suffer(case))
                print(json.dumps(asdict(outcomes[-1])), flush=True)
                assert system.wait_step(system.step() + 64, 90.0), f"the training stopped after {case}"
    if "node" in cases:
        with training(directory / "two", nodes=2) as system:
            assert system.wait_step(100, 240.0), "the training did not begin"
            outcomes.append(system.suffer("node"))
            print(json.dumps(asdict(outcomes[-1])), flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(LIMITS), help="this case; may be given several times")
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.play is not None:
        play(a.play)
        return
    with tempfile.TemporaryDirectory(prefix="bray-faults-") as directory:
        outcomes = run_cases(a.only or list(LIMITS), Path(directory))
    print(
        f"{'killed':8} {'recovered':>10} {'limit':>6} {'lost':>6} {'steps':>24} {'failed requests':>16} "
        f"{'stuck games':>12}"
    )
    for o in outcomes:
        steps = f"{o.step_before} > {o.lowest_step} > {o.step_after}"
        died = f"   killed: {', '.join(o.killed)}" if o.case == "node" else ""
        print(
            f"{o.case:8} {o.recovered:9.1f}s {LIMITS[o.case]:5.0f}s {o.lost:6} {steps:>24} {o.errors:16} "
            f"{o.stuck_games:12}{died}"
        )


if __name__ == "__main__":
    main()
