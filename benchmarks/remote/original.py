"""The original Bray's architecture, as its public description has it, for `python -m benchmarks.remote training`. All
code is our own.

    python -m benchmarks.remote.original UPDATES_FILE [--relay asyncio|uvloop] [--max-batch-size 32] [--workers 2]
    (in .venv-remote-peers)

What is modelled, and why it is not made worse than it is:

- **Gateway**: one process that relays bytes between games and workers with asyncio streams; a connection stays with its
  worker. As described it runs on asyncio's own loop and reads 4 KiB at a time (`relay.py`); `--relay uvloop` is the
  same code on uvloop with 64 KiB, which the original did not do and which helps it.
- **Actor workers**: two Ray actors, each a FastAPI app on uvicorn (httptools; on uvloop, which Ray's own asyncio actors
  use) and a pool of Actor objects, one per session slot. Headers are FastAPI parameters, the body is raw. No access
  log.
- **Model**: torch eager in the worker's process (`local_mode`), one thread, inference mode. All that wait in one turn
  of the loop make a batch (up to `max_batch_size`); there is no timer, which would only cost it.
- **Samples**: the Actor keeps a row (a dict) per tick, computes the advantages of 128 of them and pushes them with one
  Ray call to the buffer's actor, pickled. The buffer stacks them into a batch of 128 (its `batch_size`), so that they
  travel on as columns.
- **Trainer**: a Ray actor (the original used Ray Train, which costs more) that asks for the next batches before it
  needs them, and a plain eager PPO update on `settings.ROWS` rows: same network, epochs, minibatches, losses, clipping
  and Adam as ours.
- **Weights**: published after every update through the object store, as torch tensors; every worker is told the
  reference.

Not modelled, in its favour: metrics, TensorBoard, checkpoints, logs, other Agents, health checks. The code is plain and
straightforward; every process has its bytecode cached and one BLAS thread.

Games: `{"obs", "reward", "terminated", "truncated"}` per tick as JSON, `{"action"}` back (see games.py).
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of the function that it serves.
import argparse
import asyncio
import collections
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.remote.settings import EPISODE_LENGTH, GAMES, PPO, ROWS, WORKERS, say

HERE = Path(__file__).parent


# --- in a worker ------------------------------------------------------------------------------------------------------


class LocalModel:
    """Torch eager in this process; callers of one turn of the loop share a batch."""

    def __init__(self, max_batch_size: int):
        import torch

        from benchmarks.remote.network import GridNet

        torch.set_num_threads(1)
        self.torch, self.net, self.max_batch_size = torch, GridNet(), max_batch_size
        self.waiting: list[tuple[np.ndarray, asyncio.Future]] = []
        self.forwards = self.samples = 0

    def forward(self, obs: np.ndarray) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self._run)
        future = loop.create_future()
        self.waiting.append((obs, future))
        return future

    def _run(self) -> None:
        batch, self.waiting = self.waiting[: self.max_batch_size], self.waiting[self.max_batch_size :]
        if self.waiting:
            asyncio.get_running_loop().call_soon(self._run)
        with self.torch.inference_mode():
            out = self.net(self.torch.from_numpy(np.stack([obs for obs, _ in batch])))
        dist, value = out["dist"].numpy(), out["value"].tolist()
        for i, (_, future) in enumerate(batch):
            if not future.done():
                future.set_result((dist[i], value[i]))
        self.forwards += 1
        self.samples += len(batch)

    def set_weights(self, weights: dict[str, Any]) -> None:
        self.net.load_state_dict(weights)


class GridActor:
    """One game: decides, keeps rows, and pushes them when there are enough."""

    def __init__(self, model: LocalModel, buffer: Any, seed: int):
        self.model, self.buffer, self.rng = model, buffer, np.random.default_rng(seed)
        self.rows: list[dict[str, Any]] = []

    async def start(self, session: str, data: bytes) -> bytes:
        self.rows = []
        return b""

    async def tick(self, data: bytes) -> bytes:
        state = json.loads(data)
        obs = np.array(state["obs"], np.uint8)
        terminated, truncated = state["terminated"], state["truncated"]
        row = self.rows[-1] if self.rows and "reward" not in self.rows[-1] else {}  # the one whose result this is
        row.update(reward=state["reward"], last=terminated or truncated)
        if terminated:  # nothing is to be decided, and there is no future to judge
            value, action = 0.0, 0
        else:
            dist, value = await self.model.forward(obs)
            p = np.exp(dist - dist.max())
            p = np.cumsum(p / p.sum())
            action = min(int(np.searchsorted(p, self.rng.random())), len(p) - 1)
        row["next_value"] = value
        if len(self.rows) == EPISODE_LENGTH:
            self.push()
        if not (terminated or truncated):
            logp = float(np.log(p[action] - (p[action - 1] if action else 0.0) + 1e-20))
            self.rows.append({"obs": obs, "action": action, "logp": logp, "value": value})
        return json.dumps({"action": action}).encode()

    def push(self) -> None:
        rows, self.rows = self.rows, []
        advantage = 0.0
        for row in reversed(rows):
            delta = row["reward"] + PPO["gamma"] * row.pop("next_value") - row["value"]
            advantage = delta + (0.0 if row.pop("last") else PPO["gamma"] * PPO["lambda_"] * advantage)
            row["advantage"], row["target"] = advantage, advantage + row["value"]
        self.buffer.push.remote(rows)

    async def end(self, data: bytes) -> bytes:
        self.rows = []
        return b""


def make_app(pool: list[GridActor]) -> Any:
    from fastapi import FastAPI, Header, Request, Response

    app = FastAPI()
    sessions: dict[str, GridActor] = {}

    @app.post("/step")
    async def step(
        request: Request,
        session: str = Header(default=""),
        step_kind: str = Header(default="", convert_underscores=False),
    ):
        body = await request.body()
        if step_kind == "tick":
            answer = await sessions[session].tick(body)
        elif step_kind == "start":
            sessions[session] = pool.pop()
            answer = await sessions[session].start(session, body)
        else:
            actor = sessions.pop(session)
            answer = await actor.end(body)
            pool.append(actor)
        return Response(content=answer, media_type="application/octet-stream")

    return app


class Worker:
    """A process that answers games."""

    def __init__(self, buffer: Any, max_batch_size: int, seed: int):
        self.model = LocalModel(max_batch_size)
        self.pool = [GridActor(self.model, buffer, seed + i) for i in range(GAMES)]

    async def serve(self) -> int:
        """Listen on a free port, and say which."""
        import uvicorn

        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(self.pool), http="httptools", access_log=False, log_level="error")
        self.server = asyncio.create_task(uvicorn.Server(config).serve([sock]))
        return sock.getsockname()[1]

    async def set_weights(self, refs: list[Any]) -> None:
        self.model.set_weights(await refs[0])

    async def batch_size(self) -> float:
        return self.model.samples / max(1, self.model.forwards)


# --- the buffer and the trainer ---------------------------------------------------------------------------------------


class Buffer:
    """A queue of batches; the oldest is dropped when it is full."""

    def __init__(self) -> None:
        self.batches: collections.deque = collections.deque(maxlen=4 * GAMES)
        self.there = asyncio.Semaphore(0)
        self.dropped = 0

    async def push(self, rows: list[dict[str, Any]]) -> None:
        if len(self.batches) == self.batches.maxlen:
            self.dropped += 1
        else:
            self.there.release()
        self.batches.append({k: np.stack([row[k] for row in rows]) for k in rows[0]})

    async def pop(self) -> dict[str, np.ndarray]:
        await self.there.acquire()
        return self.batches.popleft()

    async def drops(self) -> int:
        return self.dropped


class Trainer:
    """Plain PPO; a line in `path` per update."""

    def __init__(self, buffer: Any, workers: list[Any], path: str):
        import torch

        from benchmarks.remote.network import GridNet

        torch.set_num_threads(1)
        self.torch, self.net, self.buffer, self.workers = torch, GridNet(), buffer, workers
        self.adam = torch.optim.Adam(self.net.parameters(), lr=PPO["lr"], eps=PPO["adam_eps"], foreach=True)
        self.rng = np.random.default_rng(0)
        self.file = open(path, "a")  # noqa: SIM115

    def ready(self) -> None:
        """Answered once the trainer is there: games must not play into a queue that nobody reads."""

    def publish(self) -> None:
        ref = ray.put({k: v.clone() for k, v in self.net.state_dict().items()})
        for worker in self.workers:
            worker.set_weights.remote([ref])

    def train(self) -> None:
        self.publish()
        count = ROWS // EPISODE_LENGTH
        coming = [self.buffer.pop.remote() for _ in range(count)]
        rows = 0
        while True:
            batches = ray.get(coming)
            coming = [self.buffer.pop.remote() for _ in range(count)]  # on their way during the update
            batch = {k: self.torch.from_numpy(np.concatenate([b[k] for b in batches])) for k in batches[0]}
            loss = self.update(batch)
            rows += ROWS
            self.publish()
            self.file.write(json.dumps({"time": time.monotonic(), "rows": rows, "loss": round(loss, 4)}) + "\n")
            self.file.flush()

    def update(self, batch: dict[str, Any]) -> float:
        torch, total = self.torch, 0.0
        batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        a = batch["advantage"]
        batch["advantage"] = (a - a.mean()) / (a.std() + 1e-8)
        size = ROWS // PPO["minibatches"]
        for _ in range(PPO["epochs"]):
            order = torch.from_numpy(self.rng.permutation(ROWS))
            for i in range(PPO["minibatches"]):
                index = order[i * size : (i + 1) * size]
                total += self.minibatch({k: v.index_select(0, index) for k, v in batch.items()})
        return total

    def minibatch(self, batch: dict[str, Any]) -> float:
        torch = self.torch
        out = self.net(batch["obs"])
        logp_all = out["dist"].log_softmax(-1)
        logp = logp_all.gather(1, batch["action"][:, None]).squeeze(1)
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        ratio = (logp - batch["logp"]).exp()
        advantage = batch["advantage"]
        clipped = ratio.clamp(1 - PPO["clip"], 1 + PPO["clip"])
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (out["value"] - batch["target"]).square().mean()
        loss = policy_loss + PPO["value_coef"] * value_loss - PPO["entropy_coef"] * entropy.mean()
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), PPO["max_grad_norm"])
        self.adam.step()
        return float(loss.detach())


# --- the whole --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("updates", help="a line is appended to this file for every update")
    parser.add_argument("--relay", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=WORKERS)
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=16,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=True,
        configure_logging=False,
    )
    make = ray.remote(num_cpus=0)
    buffer = make(Buffer).remote()
    options = {"num_cpus": 0, "max_concurrency": 1000}
    workers = [ray.remote(**options)(Worker).remote(buffer, args.max_batch_size, 1000 * i) for i in range(args.workers)]
    ports = ray.get([worker.serve.remote() for worker in workers])
    trainer = make(Trainer).remote(buffer, workers, args.updates)
    ray.get(trainer.ready.remote())
    running = trainer.train.remote()
    reading = ["--read", "65536"] if args.relay == "uvloop" else []
    gateway = subprocess.Popen(
        [sys.executable, str(HERE / "relay.py"), "0", *map(str, ports), "--loop", args.relay, *reading],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert gateway.stdout is not None
    try:
        say({"ready": int(gateway.stdout.readline())})
        sys.stdin.read()  # until whoever started us closes it
        if ray.wait([running], timeout=0)[0]:
            ray.get(running)
        sizes = ray.get([worker.batch_size.remote() for worker in workers])
        say({"batch_size": round(sum(sizes) / args.workers, 2), "dropped": ray.get(buffer.drops.remote())})
    finally:
        gateway.kill()
        gateway.wait()
        ray.shutdown()


if __name__ == "__main__":
    main()
