"""Serve what was trained: the same Actor without a buffer, the newest checkpoint of the trial, no trainer.

python -m examples.atari.deploy
python -m examples.atari.gamecore --games 8
"""

from __future__ import annotations

import numpy as np

import bray

from .actor import AtariActor
from .gamecore import make_game
from .launch import parse
from .model import AtariModel


def main(arguments: list[str] | None = None) -> None:
    a = parse("deploy", arguments)
    bray.init(project=a.project, trial=a.trial, cluster=a.cluster)
    game = make_game(a.game)
    shape, num_actions = game.observation_space.shape, int(game.action_space.n)
    model = bray.RemoteModel(
        name="atari_model",
        model=AtariModel(shape, num_actions),
        forward_args=(np.zeros(shape, np.uint8),),
        max_batch_size=32,
        local_mode=True,
        use_onnx="infer",
    )
    actor = bray.RemoteActor(port=a.port, num_workers=1, actors_per_worker=64, cpus_per_worker=0.5)
    actor.serve(Actor=AtariActor, model="atari_model", shape=shape)
    print(f"version {model.step} answers at port {actor.port}", flush=True)
    bray.run_until_asked_to_stop()


if __name__ == "__main__":
    main()
