"""Ray Tune with RLlib's PPO on CartPole: python rllib_tune.py TRIALS STEPS PARALLEL, with ray[rllib]. Settings as those
of `benchmarks/tune.py`. It ends with one JSON line: how many trials came to their end."""

import json
import logging
import sys
import tempfile

import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main() -> None:
    trials, steps, parallel = map(int, sys.argv[1:])
    ray.init(num_cpus=parallel, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=128)
        .learners(num_learners=0)
        .training(
            lr=tune.loguniform(1e-4, 1e-2),
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            train_batch_size_per_learner=1024,
            minibatch_size=128,
            num_epochs=8,
            entropy_coeff=0.0,
            grad_clip=0.5,
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            "PPO",
            param_space=config,
            tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=parallel),
            run_config=tune.RunConfig(storage_path=folder, stop={"num_env_steps_sampled_lifetime": steps}, verbose=0),
        ).fit()
        done = [r.metrics for r in results if not r.error]
    returns = [m["env_runners"].get("episode_return_mean") for m in done]
    print(json.dumps({"trials": len(done), "returns": returns}))


if __name__ == "__main__":
    main()
