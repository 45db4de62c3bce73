"""d3rlpy on the files of benchmarks/offline.py.

It reads orders from its input, a line each, and answers with a line of JSON: `steps N` (so many gradient steps, and
their seconds: of the CPU, or of the clock on a GPU), `play SEED...` (the return of a greedy episode of each). Run by
`python -m benchmarks.offline`.
"""

import json
import sys
import time

import d3rlpy
import gymnasium as gym
import numpy as np
import torch


def make(name: str, actions: gym.Space, device: str, compiled: bool):
    """Its defaults, but for the sizes that both sides have."""
    encoder = d3rlpy.models.encoders.VectorEncoderFactory(hidden_units=[256, 256])
    encoders = dict.fromkeys(("actor_encoder_factory", "critic_encoder_factory"), encoder)
    more = {"batch_size": 256, "compile_graph": compiled}
    device = "cpu:0" if device == "cpu" else "cuda:0"
    algos, scaler = d3rlpy.algos, {}
    if isinstance(actions, gym.spaces.Box):
        scaler["action_scaler"] = d3rlpy.preprocessing.MinMaxActionScaler(actions.low, actions.high)
    if name == "BC":
        cls = algos.BCConfig if scaler else algos.DiscreteBCConfig
        return cls(**more, encoder_factory=encoder, **scaler).create(device=device)
    more["gamma"] = 0.99
    if name == "CQL-Discrete":
        return algos.DiscreteCQLConfig(**more, encoder_factory=encoder, learning_rate=5e-4).create(device=device)
    if name == "IQL":
        encoders["value_encoder_factory"] = encoder
    if name == "TD3+BC":
        scaler["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    cls = {"TD3+BC": algos.TD3PlusBCConfig, "CQL": algos.CQLConfig, "IQL": algos.IQLConfig}[name]
    return cls(**more, **encoders, **scaler).create(device=device)


def main() -> None:
    name, env_id, file, seed, device, how = sys.argv[1:7]
    clock = time.process_time if device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    d3rlpy.seed(int(seed))
    rows = np.load(file)
    env = gym.make(env_id)
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    data = d3rlpy.dataset.MDPDataset(
        rows["observations"],
        rows["actions"].reshape(len(rows["rewards"]), -1),
        rows["rewards"],
        rows["terminals"],
        rows["timeouts"],
        action_space=d3rlpy.ActionSpace.DISCRETE if discrete else d3rlpy.ActionSpace.CONTINUOUS,
    )
    algo = make(name, env.action_space, device, how == "compiled")
    algo.build_with_dataset(data)
    if (scaler := algo.config.observation_scaler) is not None:
        scaler.fit_with_transition_picker(data.episodes, data.transition_picker)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order, *numbers = line.split()
        if order == "steps":
            start = clock()
            for _ in range(int(numbers[0])):
                algo.update(data.sample_transition_batch(256))
            if device != "cpu":
                torch.cuda.synchronize()
            print(json.dumps({"seconds": clock() - start}), flush=True)
        else:
            print(json.dumps({"returns": [play(algo, env, int(s)) for s in numbers]}), flush=True)


def play(algo, env, seed: int) -> float:
    obs, total, ended = env.reset(seed=seed)[0], 0.0, False
    while not ended:
        obs, reward, *flags, _ = env.step(algo.predict(np.asarray(obs, np.float32)[None])[0])
        total, ended = total + float(reward), any(flags)
    return total


main()
