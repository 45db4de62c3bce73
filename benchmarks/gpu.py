"""python -m benchmarks.gpu: a PPO minibatch update and an acting forward, eager and recorded (CUDA graph), on a CUDA
GPU.

One JSON line per size: median milliseconds of 5 x 20 calls by CUDA events, and the largest difference between the
weights that both ways reach after five updates.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
import torch

from bray.algos import packing, ppo
from bray.algos.base import to_torch
from bray.inference.torch_engine import TorchEngine
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space
from bray.train.device import tune

PONG = EnvSpec("pictures", Space("box", (4, 84, 84), "uint8", 0, 255), Space("discrete", n=(6,), start=(0,)))
VECTOR = EnvSpec("vectors", Space("box", (4,)), Space("discrete", n=(2,), start=(0,)))


def milliseconds(call: Any) -> float:
    for _ in range(5):
        call()
    rounds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 20)
    return statistics.median(rounds)


def make(spec: EnvSpec, rows: int, precision: str, record: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    config, model_config = ppo.Config(precision=precision), ModelConfig()
    model = ppo.make_model(config, spec, model_config).cuda()
    learner = ppo.Learner(config, spec, model, model_config, record=record)
    rng = np.random.default_rng(0)
    obs = (
        rng.integers(0, 255, (rows, 4, 84, 84), dtype=np.uint8)
        if spec is PONG
        else rng.normal(size=(rows, 4)).astype(np.float32)
    )
    batch = {k: rng.normal(size=rows).astype(np.float32) for k in ("value", "advantage", "target")}
    batch |= {
        "obs": obs,
        "action": rng.integers(0, spec.num_actions, rows),
        "logp": np.full(rows, -1.0, np.float32),
        "weight": np.ones(rows, np.float32),
    }
    columns = to_torch(packing.pack(batch), learner.device)
    return learner, columns, torch.arange(rows, device="cuda")


def main() -> None:
    tune(torch.device("cuda"))
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for name, spec, rows in (("cnn", PONG, 256), ("cnn", PONG, 2048), ("cnn", PONG, 16384), ("mlp", VECTOR, 256)):
        for precision in ("float32", "bfloat16"):
            line: dict[str, Any] = {"case": f"ppo-update-{name}", "minibatch": rows, "precision": precision}
            weights = {}
            for record in (False, True):
                learner, columns, index = make(spec, rows, precision, record)
                step = learner._step.bind(columns)
                for _ in range(5):
                    step(index)
                weights[record] = learner.optimizer.flat.clone()
                line["recorded_ms" if record else "eager_ms"] = round(
                    milliseconds(lambda step=step, index=index: step(index)), 3
                )
            line["ratio"] = round(line["eager_ms"] / line["recorded_ms"], 2)
            line["max_weight_difference"] = float((weights[True] - weights[False]).abs().max())
            print(json.dumps(line), flush=True)
    for rows in (8, 1024):
        learner, columns, _ = make(PONG, rows, "float32", True)
        obs = columns["obs"].cpu().numpy()
        line = {"case": "forward-cnn", "rows": rows}
        for record in (False, True):
            engine = TorchEngine(learner.model, ("dist", "value"), record)
            line["recorded_ms" if record else "eager_ms"] = round(
                milliseconds(lambda engine=engine, obs=obs: engine.forward(obs)), 3
            )
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
