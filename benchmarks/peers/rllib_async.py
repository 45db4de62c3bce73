"""RLlib's IMPALA and APPO on CartPole-v1 with two env runners, through its own API: steps/s, and seconds to a return.

RLlib is inside Ray's wheel; it needs ray[rllib] (dm-tree, lz4, scipy, ormsgpack). Prints one JSON line.
"""

import argparse
import json
import logging
import time

import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=("IMPALA", "APPO"))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--length", type=int, default=20)
    args = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    made = IMPALAConfig() if args.run == "IMPALA" else APPOConfig()
    config = (
        made.environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=args.length)
        .learners(num_learners=0)
        .training(lr=1e-3, train_batch_size_per_learner=8 * args.length, gamma=0.99)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
        .reporting(min_time_s_per_iteration=1)
    )
    algo = config.build_algo()
    points: list[tuple[float, float]] = []  # (time, steps): the first results have none
    mean, end = None, None
    while end is None or time.perf_counter() < end:
        runners = algo.train()["env_runners"]
        mean = runners.get("episode_return_mean", mean)
        if steps := runners.get("num_env_steps_sampled_lifetime"):
            points.append((time.perf_counter(), steps))
            end = end or time.perf_counter() + args.seconds
    (began, first), (ended, last) = points[0], points[-1]
    rate = (last - first) / (ended - began)
    print(json.dumps({"run": args.run, "rllib": ray.__version__, "steps_per_second": rate, "return": mean}), flush=True)
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
