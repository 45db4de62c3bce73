"""RLlib's PPO for several agents, one policy for all, on 64 games of simple_spread: see spread.py.

Its environments and its learner are in this process. Those of Ray that run beside it are not counted.
"""

import logging

import cases
import ray
import spread
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env


def configure() -> PPOConfig:
    register_env("spread", lambda _: ParallelPettingZooEnv(spread.make_parallel()))
    network = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    return (
        PPOConfig()
        .environment("spread")
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, *_, **__: "shared")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=spread.GAMES, rollout_fragment_length=spread.STEPS)
        .learners(num_learners=0)
        .training(
            lr=cases.LEARNING_RATE,
            gamma=cases.GAMMA,
            lambda_=cases.GAE_LAMBDA,
            clip_param=cases.CLIP,
            vf_clip_param=float("inf"),
            use_kl_loss=False,
            entropy_coeff=cases.ENTROPY_COEF,
            vf_loss_coeff=cases.VALUE_COEF,
            grad_clip=cases.MAX_GRAD_NORM,
            num_epochs=cases.EPOCHS,
            minibatch_size=spread.MINIBATCH,
            train_batch_size_per_learner=spread.GAMES * spread.STEPS,  # steps of games
        )
        .rl_module(model_config=network)
        .debugging(seed=cases.SEED)
    )


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    algo = configure().build_algo()
    turns = spread.Turns()
    while True:
        turns.tick(algo.train()["env_runners"].get("episode_return_mean", float("nan")))


if __name__ == "__main__":
    main()
