"""python -m benchmarks.scale_gpu [PART ...] [--seconds 20] [--set KEY=VALUE ...]: what a machine with a CUDA GPU and
many cores reaches. Parts, each below 40 s but for `pong`, where each setting is:

update    a PPO minibatch update of the Nature CNN: 256 and 16,384 rows, float32 (TF32) and bfloat16
copy      1,024 pictures 4 x 84 x 84 from the host to the device: pageable, staged (`to_device`), pinned
forward   the acting forward of 1,024 pictures in host memory, outputs back on the host: pageable and pinned, float32
          (TF32) and bfloat16
central   round trips of 16 blocks of 64 pictures through a CentralServer, asked from this process
pong      ALE/Pong-v5, 256 environments: environment steps/s with learning, by algorithm, workers, inference and form
          (see PONG); names choose some of them
cartpole  CartPole with 2,048 environments: environment steps/s with learning

One JSON line per result. Times of update are by CUDA events, all others by the clock, the device's work included.
Trainings (pong, cartpole) take the settings of --set, and tell how many cores each thread of the process that learns
kept busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.gpu import PONG as PICTURES, make, milliseconds
from bray.algos import ALGORITHMS, ppo
from bray.capture.transfer import pin, to_device
from bray.inference.torch_engine import TorchEngine
from bray.nn.catalog import ModelConfig
from bray.train.central import Answers, Arrays, CentralEngine, CentralServer
from bray.train.device import tune

BATCH = 1024
_KEPT: list[Arrays] = []  # what is pinned stays
_SETTINGS: dict[str, Any] = {"device": "cuda", "iteration_steps": 0}  # and those of --set
LEARN = {"rollout_length": 64, "lr": 5e-4, "clip": 0.1, "epochs": 4, "minibatches": 8, "clip_rewards": True}
PPO = ("PPO", LEARN)
APPO = ("APPO", {**LEARN, "epochs": 2, "minibatches": 4, "batch_envs": 64})
PONG: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "ppo-here": (PPO, {"num_workers": 0, "num_envs": 256, "vector": "native"}),
    "ppo-central-14": (PPO, {"num_workers": 14, "num_envs": 18, "inference": "central"}),
    "ppo-central-16": (PPO, {"num_workers": 16, "num_envs": 16, "inference": "central"}),
    "ppo-central-16-one-group": (PPO, {"num_workers": 16, "num_envs": 16, "inference": "central", "env_groups": 1}),
    "ppo-worker-16": (PPO, {"num_workers": 16, "num_envs": 16}),
    "appo-central-8": (APPO, {"num_workers": 8, "num_envs": 32, "inference": "central"}),
    "appo-central-14": (APPO, {"num_workers": 14, "num_envs": 18, "inference": "central"}),
    "appo-central-16": (APPO, {"num_workers": 16, "num_envs": 16, "inference": "central"}),
    "appo-central-14-bf16": (
        APPO,
        {"num_workers": 14, "num_envs": 18, "inference": "central", "precision": "bfloat16"},
    ),
    "appo-central-14-inprocess": (
        APPO,
        {"num_workers": 14, "num_envs": 18, "inference": "central", "vector": "inprocess"},
    ),
    "appo-worker-14": (APPO, {"num_workers": 14, "num_envs": 18}),
}


def tell(**line: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def wall_ms(call: Callable[[], Any], calls: int = 30) -> float:
    """Median; the device is waited for."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def update(seconds: float) -> None:
    for rows in (256, 16384):
        for precision in ("float32", "bfloat16"):
            learner, columns, index = make(PICTURES, rows, precision, record=True)
            step = learner._step.bind(columns)
            ms = milliseconds(lambda step=step, index=index: step(index))
            tell(part="update", minibatch=rows, precision=precision, recorded=learner.is_recorded, ms=ms)


def pictures(pinned: bool) -> np.ndarray:
    example = np.zeros((1, 4, 84, 84), np.uint8)
    arrays = Arrays([example], BATCH)
    _KEPT.append(arrays)
    if pinned:
        pin(arrays.memory)
    (x,) = arrays.views()
    x[...] = np.random.default_rng(0).integers(0, 255, x.shape, dtype=np.uint8)
    return x


def copy(seconds: float) -> None:
    device = torch.device("cuda")
    pageable, pinned = torch.from_numpy(pictures(False)), torch.from_numpy(pictures(True))
    tell(part="copy", how="pageable", ms=wall_ms(lambda: pageable.to(device)))
    tell(part="copy", how="staged", threads=torch.get_num_threads(), ms=wall_ms(lambda: to_device(pageable, device)))
    tell(part="copy", how="pinned", is_pinned=pinned.is_pinned(), ms=wall_ms(lambda: to_device(pinned, device)))


class Bfloat16(torch.nn.Module):
    """A Model that computes in bfloat16 and answers in float32."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, obs: Any) -> dict[str, Any]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return {k: v.float() for k, v in self.model(obs).items()}


def forward(seconds: float) -> None:
    for precision in ("float32", "bfloat16"):
        model = ppo.make_model(ppo.Config(), PICTURES, ModelConfig()).cuda()
        engine = TorchEngine(Bfloat16(model) if precision == "bfloat16" else model, ("dist", "value"))
        for pinned in (False, True):
            obs = pictures(pinned)
            ms = wall_ms(lambda engine=engine, obs=obs: engine.forward(obs))
            told = {"pictures": BATCH, "precision": precision, "pinned": pinned, "recorded": engine.is_recorded}
            tell(part="forward", **told, ms=ms)
        on_device = torch.zeros(BATCH, 4, 84, 84, dtype=torch.uint8, device="cuda")
        with torch.no_grad():
            tell(
                part="forward",
                precision=precision,
                where="device, eager",
                ms=wall_ms(lambda m=model, x=on_device: m(x)),
            )


def central(seconds: float) -> None:
    """One thread asks for all blocks and takes all answers; players ask at the same time."""
    model = ppo.make_model(ppo.Config(), PICTURES, ModelConfig()).cuda()
    policy = ppo.Policy(ppo.Config(), PICTURES)
    server = CentralServer(model, policy, np.zeros((1, 4, 84, 84), np.uint8), workers=16, groups=[32, 32])
    engines = []
    for w in range(16):
        line = server.line(w)
        answers = Answers(line)
        engines.append([CentralEngine(line, g, answers) for g in range(2)])
    obs = np.random.default_rng(0).integers(0, 255, (32, 4, 84, 84), dtype=np.uint8)

    def ask_all(groups: tuple[int, ...]) -> None:
        for group in groups:
            for pair in engines:
                pair[group].ask(obs)
        for group in groups:
            for pair in engines:
                pair[group].answer()

    for groups in ((0,), (0, 1)):
        before = server.forwards, server.rows
        ms = wall_ms(lambda groups=groups: ask_all(groups))
        forwards = server.forwards - before[0]
        tell(part="central", rows=512 * len(groups), ms=ms, rows_per_forward=(server.rows - before[1]) / forwards)
    ms = wall_ms(lambda: engines[0][0].forward(obs))
    tell(part="central", rows=32, ms=ms)
    server.close()


@contextmanager
def training(run: str, env: str, config: dict[str, Any]) -> Iterator[Any]:
    import bray

    exp = bray.Experiment(run=run, env=env, use_preset=False, config={**config, **_SETTINGS})
    try:
        yield exp.training
    finally:
        exp.close()


def speed(part: str, name: str, run: str, env: str, config: dict[str, Any], seconds: float) -> None:
    start = time.perf_counter()
    with training(run, env, config) as at_work:
        at_work.iterate()
        while time.perf_counter() - start < 8.0:  # recordings, and ALE's first episodes
            row = at_work.iterate()
        started, begin, steps, busy = (
            time.perf_counter() - start,
            time.perf_counter(),
            at_work.env_steps,
            thread_seconds(),
        )
        while time.perf_counter() - begin < seconds:
            row = at_work.iterate()
        took = time.perf_counter() - begin
        wanted = ("workers/policy_lag", "episode_return_mean", "learner_steps_total")
        more = {k: v for k, v in row.items() if k in wanted or k.startswith("perf/")}
        spent = {name: (now - busy.get(name, 0.0)) / took for name, now in thread_seconds().items()}
        cores = {name: round(share, 2) for name, share in spent.items() if share > 0.02}
        told = {"steps_per_s": (at_work.env_steps - steps) / took, "start_s": started, "cores": cores}
        tell(part=part, name=name, **told, **more)


def thread_seconds() -> dict[str, float]:
    """CPU seconds of each thread of this process so far, by its name in Python or, for those of libraries, its number
    (Linux)."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        ticks = os.sysconf("SC_CLK_TCK")
        found[names.get(int(folder.name)) or folder.name] = (int(user) + int(system)) / ticks
    return found


def pong(seconds: float, names: list[str]) -> None:
    for name in names or PONG:
        (run, learn), more = PONG[name]
        if run not in ALGORITHMS:
            tell(part="pong", name=name, skipped=f"no algorithm {run} here")
            continue
        try:
            speed("pong", name, run, "ALE/Pong-v5", {"vector": "native", **learn, **more}, seconds)
        except Exception as e:  # the others are still worth knowing
            tell(part="pong", name=name, failed=f"{type(e).__name__}: {e}"[-500:])


def cartpole(seconds: float) -> None:
    for rollout, minibatches in ((32, 4), (64, 4), (128, 4)):
        config = {"num_envs": 2048, "rollout_length": rollout, "minibatches": minibatches, "epochs": 2}
        name = f"2048 x {rollout}"
        speed("cartpole", name, "PPO", "CartPole-v1", {"vector": "native", **config}, seconds / 3)


PARTS: dict[str, Callable[[float], None]] = {
    "update": update,
    "copy": copy,
    "forward": forward,
    "central": central,
    "cartpole": cartpole,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join([*PARTS, 'pong', *PONG])}; none = all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the trainings")
    given = parser.parse_args()
    _SETTINGS.update({k: yaml.safe_load(v) for k, _, v in (x.partition("=") for x in given.set)})
    unknown = [p for p in given.parts if p not in (*PARTS, "pong", *PONG)]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join([*PARTS, 'pong', *PONG])}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.scale_gpu needs a CUDA GPU, and PyTorch finds none here")
    tune(torch.device("cuda"))
    tell(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cores=os.cpu_count(),
        cudnn=torch.backends.cudnn.version(),
    )
    for name, part in PARTS.items():
        if not given.parts or name in given.parts:
            part(given.seconds)
    chosen = [name for name in PONG if name in given.parts]
    if chosen or "pong" in given.parts or not given.parts:
        pong(given.seconds, chosen)


if __name__ == "__main__":
    main()
