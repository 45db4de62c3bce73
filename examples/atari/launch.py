"""Train: a model, a buffer, a trainer, and the service that games call.

python -m examples.atari.launch                      # Pong;  --game Breakout;  --game grid
python -m examples.atari.gamecore --games 8          # in another terminal
"""

from __future__ import annotations

import argparse

import numpy as np

import bray

from .actor import AtariActor
from .gamecore import make_game
from .model import AtariModel
from .trainer import train_atari


def parse(prog: str, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m examples.atari.{prog}")
    parser.add_argument("--game", default="Pong", help="Pong, Breakout, ... or grid")
    parser.add_argument("--project", default="./runs/atari")
    parser.add_argument("--trial", default="ppo-v0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cluster", default="ray", help="ray, or local: everything in this process")
    parser.add_argument("--num-steps", type=int, default=1_000_000)
    parser.add_argument("--trainers", type=int, default=1, help="processes that train together")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    a = parse("launch", arguments)
    bray.init(project=a.project, trial=a.trial, cluster=a.cluster)
    game = make_game(a.game)
    shape, num_actions = game.observation_space.shape, int(game.action_space.n)
    bray.RemoteModel(
        name="atari_model",
        model=AtariModel(shape, num_actions),
        forward_args=(np.zeros(shape, np.uint8),),
        max_batch_size=32,
        local_mode=True,
        use_onnx="train" if a.cluster == "ray" else None,
    )
    bray.set_tensorboard_step("atari_model")
    bray.RemoteBuffer("atari_buffer", size=8, batch_size=128, num_workers=1)
    actor = bray.RemoteActor(port=a.port, num_workers=1, actors_per_worker=64, cpus_per_worker=0.5)
    actor.serve(Actor=AtariActor, model="atari_model", buffer="atari_buffer", shape=shape)
    trainer = bray.RemoteTrainer(use_gpu=False, num_workers=a.trainers, cpus_per_worker=0.5)
    trained = trainer.train(
        train=train_atari,
        model="atari_model",
        buffer="atari_buffer",
        batch_size=2,
        weights_publish_interval=4,
        num_steps=a.num_steps,
    )
    print(f"games may call port {actor.port}", flush=True)
    bray.run_until_asked_to_stop(trained.done)


if __name__ == "__main__":
    main()
