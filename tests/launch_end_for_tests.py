"""A small project that trains on made up data, and `bray launch` of it in a process (and a process group) of its
own."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

TEMPLATE = Path(__file__).parent.parent / "template"

FILES = {
    "__init__.py": "",
    "code.py": """
        import itertools, time
        import numpy as np, torch
        import bray

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.line = torch.nn.Linear(2, 1)

            def forward(self, obs):
                return {"value": self.line(obs)[:, 0]}

        class Rows:
            def __iter__(self):
                for i in itertools.count():
                    time.sleep(0.002)
                    yield {"obs": np.full(2, i % 7, np.float32), "y": np.float32(i % 7)}

        class Agent(bray.Agent):
            def on_tick(self, state):
                state.output = {}

        class Trainer(bray.Trainer):
            def __init__(self, name, config, model):
                self.model = model

            def loss(self, replay):
                return ((self.model(replay["obs"])["value"] - replay["y"]) ** 2).mean()

        def build_model(name, config):
            return Net(), (np.zeros((1, 2), np.float32),)

        def build_source(name, config):
            return [Rows()]
    """,
    "x.yaml": """
        project: runs
        trial: t
        model1: {kind: model, module: NAME.code, tensorboard_step: true, local_mode: true}
        source1: {kind: source, module: NAME.code, epoch: 1000}
        buffer1: {kind: buffer, sources: [source1], batch_size: 4, size: 8, num_workers: 1}
        agent1: {kind: agent, module: NAME.code, class: Agent}
        actor1: {kind: actor, port: 0, agents: [agent1], num_workers: 1, cpus_per_worker: 0.1,
                 memory_per_worker: 64, serialize: json}
        trainer1: {kind: trainer, module: NAME.code, class: Trainer, model: model1, buffers: [buffer1],
                   cpus_per_worker: 0.1}
    """,
}
SMALL_RAY = """
import functools, os, sys
import bray.cluster.ray_start
if "ray" in sys.argv:
    import ray
    ray.init = functools.partial(ray.init, object_store_memory=100 << 20)
from bray.cli import launch
from bray.cli.main import main
launch.PROGRESS_EVERY = 0.5
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


class Launched:
    """`bray launch`, in a process group of its own; a context manager that leaves nothing behind."""

    def __init__(self, folder, kind, *command_before, games=0):
        name = "ended"
        (folder / name).mkdir()
        for file, text in FILES.items():
            (folder / name / file).write_text(textwrap.dedent(text).replace("NAME", name))
        (folder / "small_ray.py").write_text(SMALL_RAY)
        self.path = folder / "runs" / "t"
        self.mark = f"BRAY_TEST_LAUNCH={folder}"  # in the environment of all its processes
        key, _, value = self.mark.partition("=")
        env = {**os.environ, key: value, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        env["PYTHONFAULTHANDLER"] = "1"
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        words = ["launch", "--config", f"{name}/x.yaml", "--cluster", kind]
        if games:
            words[2:3] = [str(TEMPLATE / "rl.yaml"), "--project", "runs", "--trial", "t"]
            words.append("actor1.port=0")
        self.err = open(folder / "stderr", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command_before, sys.executable, "-u", "small_ray.py", *words],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=self.err, text=True, process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )  # fmt: skip
        self.lines = []
        self.num_games, self.games = games, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        if self.games is not None:
            self.games.kill()
            self.games.wait(10)
        self.process.stdout.close()
        self.err.close()

    def wait_until_it_trains(self):
        """Until a line of progress says that steps are published."""
        for line in self.process.stdout:
            self.lines.append(line)
            if self.num_games and (port := re.search(r"port (\d+); try", line)):
                self.start_games(port[1])
            if re.search("trainer1 step [1-9]", line):
                return
        raise AssertionError(f"it ended before it trained: {self.stderr()}")

    def start_games(self, port):
        """Games of the template, in a process that is not of this launch."""
        words = ["-m", "template.gamecore", "--port", port, "--games", str(self.num_games)]
        self.games = subprocess.Popen([sys.executable, *words], cwd=TEMPLATE.parent, stdout=subprocess.DEVNULL)

    def step_seen(self):
        """The last step that a line of progress has told."""
        told = re.findall(r"trainer1 step ([\d,]+)", "".join(self.lines))
        return int(told[-1].replace(",", ""))

    def ended(self, timeout):
        """(seconds until it ended, its exit code)."""
        began = time.monotonic()
        code = self.process.wait(timeout)
        seconds = time.monotonic() - began
        self.lines += self.process.stdout.readlines()
        return seconds, code

    def stderr(self):
        self.err.seek(0)
        return self.err.read()

    def pids(self):
        """All processes of this launch that are alive."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/environ", "rb") as f:
                        if self.mark.encode() in f.read().split(b"\0"):
                            found.append(int(entry))
                except OSError:
                    continue
        return found
