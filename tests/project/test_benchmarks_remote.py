"""benchmarks/remote measures what it says: the peer learns as we do, the relay relays, rows and CPU time are
counted."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.remote import __main__ as harness, original, processes, settings, training
from bray.act import Clock
from bray.algos import ppo
from bray.launch.graph import load
from bray.nn.catalog import ModelConfig
from bray.rl.returns import gae
from bray.spec import EnvSpec, Space

SPEC = EnvSpec(
    "grid",
    Space("box", settings.GRID_OBS, "uint8", 0, 1),
    Space("discrete", (), "int64", n=(settings.GRID_ACTIONS,), start=(0,)),
)


def test_samples_have_the_sizes_of_the_goal():
    assert settings.size(settings.small_sample(0)) == 100
    assert settings.size(settings.trajectory(0)) == 128 * (4 * 42 * 42 * 4 + 8 + 4 + 4)


class Pushes:
    """In place of the buffer's Ray actor."""

    def __init__(self):
        self.pushed = []
        self.push = self
        self.remote = self.pushed.append


class Values:
    """A model that always wants action 2, and whose values are known."""

    def __init__(self):
        self.values = []

    async def forward(self, obs):
        self.values.append(float(len(self.values) % 7) / 7)
        return np.array([-50.0, -50.0, 50.0, -50.0], np.float32), self.values[-1]


def test_the_originals_actor_makes_the_same_advantages_as_ours():
    model, buffer = Values(), Pushes()
    actor = original.GridActor(model, buffer, 0)
    obs = np.zeros(settings.GRID_OBS, np.uint8).tolist()
    ends = {9: "terminated", 30: "truncated", 70: "terminated"}

    async def play():
        await actor.start("s", b"")
        for t in range(140):
            state = {"obs": obs, "reward": 0.1 * (t % 5), "terminated": False, "truncated": False}
            if t in ends:
                state[ends[t]] = True
            assert json.loads(await actor.tick(json.dumps(state).encode()))["action"] == (
                0 if ends.get(t) == "terminated" else 2
            )

    asyncio.run(play())
    (rows,) = buffer.pushed
    assert len(rows) == settings.EPISODE_LENGTH

    # the same ticks as a trajectory of ours, whose final observations are rows of their own
    steps = settings.EPISODE_LENGTH + len(ends)
    asked = iter(model.values)
    value = np.array([0.0 if ends.get(t) == "terminated" else next(asked) for t in range(steps + 1)], np.float32)
    reward = np.array([0.1 * ((t + 1) % 5) for t in range(steps)], np.float32)
    terminated = np.array([ends.get(t + 1) == "terminated" for t in range(steps)])
    truncated = np.array([ends.get(t + 1) == "truncated" for t in range(steps)])
    valid = np.array([t not in ends for t in range(steps)])
    column = [x[:, None] for x in (value, reward, terminated, truncated, valid)]
    want = gae(*column, settings.PPO["gamma"], settings.PPO["lambda_"])[valid, 0]
    np.testing.assert_allclose([r["advantage"] for r in rows], want, atol=1e-4)
    np.testing.assert_allclose([r["target"] for r in rows], want + value[:-1][valid], atol=1e-4)
    np.testing.assert_allclose([r["logp"] for r in rows], 0.0, atol=1e-6)


def test_the_originals_update_is_the_one_of_our_learner(tmp_path, monkeypatch):
    rows = 256
    monkeypatch.setattr(original, "ROWS", rows)
    monkeypatch.setitem(settings.PPO, "epochs", 2)
    monkeypatch.setitem(settings.PPO, "minibatches", 1)
    trainer = original.Trainer(None, [], str(tmp_path / "updates"))
    from benchmarks.remote.network import GridNet

    net = GridNet()
    net.load_state_dict(trainer.net.state_dict())
    rng = np.random.default_rng(0)
    batch = {
        "obs": rng.integers(0, 2, (rows, *settings.GRID_OBS)).astype(np.uint8),
        "action": rng.integers(0, settings.GRID_ACTIONS, rows),
        "logp": np.log(rng.uniform(0.2, 0.4, rows)).astype(np.float32),
        "value": rng.normal(size=rows).astype(np.float32),
        "advantage": rng.normal(size=rows).astype(np.float32),
        "target": rng.normal(size=rows).astype(np.float32),
    }
    trainer.update({k: torch.from_numpy(v.copy()) for k, v in batch.items()})

    config = ppo.Config(**settings.PPO)
    learner = ppo.Learner(config, SPEC, net, ModelConfig())
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    ours = {**batch, "advantage": advantage, "weight": np.ones(rows, np.float32)}
    learner.update(ours, Clock())
    for (name, mine), theirs in zip(net.state_dict().items(), trainer.net.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_relay_keeps_a_connection_with_its_worker(loop):
    def worker(sock, name):
        def answer(connection):
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(name + data)

        while True:
            try:
                connection, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for sock, name in zip(socks, (b"a", b"b"), strict=True):
        threading.Thread(target=worker, args=(sock, name), daemon=True).start()
    ports = [str(s.getsockname()[1]) for s in socks]
    command = [sys.executable, "benchmarks/remote/relay.py", "0", *ports, "--loop", loop]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=settings.ROOT)
    try:
        port = int(relay.stdout.readline())
        games = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2)]
        seen = []
        for _ in range(2):
            for game in games:
                game.sendall(b"x")
                seen.append(game.recv(10))
        assert seen[0] == seen[2]
        assert seen[1] == seen[3]
        assert {seen[0], seen[1]} == {b"ax", b"bx"}
    finally:
        relay.kill()
        relay.wait()
        for sock in [*socks, *games]:
            sock.close()


def test_the_launch_file_of_the_training_has_the_shared_sizes():
    graph = load(
        settings.ROOT / "benchmarks/remote/training.yaml", [f"ppo.settings.{k}={v}" for k, v in settings.PPO.items()]
    )
    assert graph.components["buffer1"].settings.batch_size == settings.ROWS
    assert graph.components["actor1"].settings.num_workers == settings.WORKERS
    assert graph.components["actor1"].settings.episode_length == settings.EPISODE_LENGTH
    assert graph.config["ppo"]["settings"] == settings.PPO


SERVER = """
import json, sys
from bray.serving.actor import Actor
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

ticks = 0

class Left(Actor):
    async def start(self, session, data):
        return b""
    async def tick(self, data):
        global ticks
        assert set(json.loads(data)) == {"obs", "reward", "terminated", "truncated"}
        ticks += 1
        if ticks % 20 == 0:
            with open(sys.argv[1], "a") as f:
                f.write(json.dumps({"rows": ticks}) + "\\n")
        return b'{"action": 2}'
    async def end(self, data):
        return b""

import os, threading
def stop():
    sys.stdin.read()
    print(json.dumps({"dropped": 0}), flush=True)
    os._exit(0)
threading.Thread(target=stop, daemon=True).start()
config = ServiceConfig(port=0, admin_port=0, actors_per_worker=10)
serve(Left, config, on_ready=lambda port, admin: print(json.dumps({"ready": port}), flush=True))
"""


def test_a_training_is_measured_from_outside(monkeypatch):
    monkeypatch.setattr(training, "GAMES", 2)
    monkeypatch.setattr(training, "WARM_UP_S", 0.3)
    monkeypatch.setattr(training, "MOST_ROWS_PER_TICK", 1000.0)  # a busy machine may look at the two a little apart
    result = training.measure([sys.executable, "-c", SERVER], 0.3)
    assert result["updates"] >= 1
    assert result["dropped"] == 0
    assert result["seconds"] >= 0.3
    assert result["rows"] == 20 * result["updates"]  # every tick is a row here, and there are 20 in an update
    assert result["ticks"] > 0


def test_rows_that_nobody_played_are_noticed(monkeypatch):
    monkeypatch.setattr(training, "GAMES", 2)
    monkeypatch.setattr(training, "WARM_UP_S", 0.3)
    monkeypatch.setattr(training, "LONGEST_S", 3.0)
    server = SERVER.replace('{"rows": ticks}', '{"rows": 50 * ticks}')
    with pytest.raises(RuntimeError, match="not a steady state"):
        training.measure([sys.executable, "-c", server], 0.3)


def test_a_line_that_is_written_only_in_part_is_not_read(tmp_path):
    updates = tmp_path / "updates.jsonl"
    for text, lines in (("", 0), ('{"row', 0), ('{"rows": 1}\n', 1), ('{"rows": 1}\n{"row', 1)):
        updates.write_text(text)
        assert training.whole_lines(updates) == ['{"rows": 1}'] * lines


def test_a_server_that_does_not_start_is_told_with_its_error():
    with pytest.raises(RuntimeError, match="no such luck"):
        training.measure([sys.executable, "-c", "raise SystemExit('no such luck')"], 1.0)


def test_nothing_is_left_behind_by_a_command_that_runs_too_long(tmp_path):
    pid = tmp_path / "pid"
    child = "import time; time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); open({str(pid)!r}, "
        "'w').write(str(p.pid)); time.sleep(60)"
    )
    status, _, _ = processes.run([sys.executable, "-c", code], 3.0)
    assert status != 0
    stat = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 10.0
    while (
        stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    ):  # dead, but nobody has asked for its status
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_ratio_is_to_the_best_peer():
    def rows(*values):
        return [{"per_second": v, "cpu_us": 1.0, "seconds": 1.0} for v in values]

    results = {
        "ours": rows(90.0, 100.0, 110.0),
        "Ray calls, 1 producer": rows(1.0, 2.0, 3.0),
        "Ray calls, 4 producers": rows(4.0, 4.0, 5.0),
    }
    told = harness.summary("small", results, 3)
    assert told["ratios"]["samples"]["to"] == "Ray calls, 4 producers"
    assert told["ratios"]["samples"]["ratio"] == 25.0
    assert told["ratios"]["samples"]["to_each"]["Ray calls, 1 producer"] == 50.0
    assert "25.0 times 'Ray calls, 4 producers'" in harness.table(results, told)
