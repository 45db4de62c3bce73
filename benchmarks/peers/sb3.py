"""Stable-Baselines3 on the PPO, A2C, DQN, SAC, TD3 and DDPG cases, through its own API."""

from contextlib import suppress

import cases
import common
import gymnasium as gym
import numpy as np
import stable_baselines3
from custom_module import ResidualMLP
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecFrameStack
from torch import nn

FOREVER = 10**9
PPO_ARGUMENTS = {
    "n_steps": cases.NUM_STEPS,
    "n_epochs": cases.EPOCHS,
    "batch_size": cases.MINIBATCH,
    "learning_rate": cases.LEARNING_RATE,
    "gamma": cases.GAMMA,
    "gae_lambda": cases.GAE_LAMBDA,
    "clip_range": cases.CLIP,
    "ent_coef": cases.ENTROPY_COEF,
    "vf_coef": cases.VALUE_COEF,
    "max_grad_norm": cases.MAX_GRAD_NORM,
    "seed": common.SEED,
    "device": "cpu",
}
OFF_POLICY = {"sac-pendulum": SAC, "td3-pendulum": TD3, "ddpg-pendulum": DDPG}
CASES = [*cases.PPO_ENV_IDS, "ppo-pong", "a2c-cartpole", "dqn-cartpole", *OFF_POLICY]


class CustomExtractor(BaseFeaturesExtractor):
    """The way SB3 takes a user's own module: as the features extractor under two linear heads."""

    def __init__(self, observation_space: gym.spaces.Box):
        trunk = ResidualMLP(observation_space.shape[0])
        super().__init__(observation_space, trunk.num_features)
        self.trunk = trunk

    def forward(self, observations):
        return self.trunk(observations)


class TimeIsUp(Exception):
    """Raised where SB3 starts to collect, to leave `learn`: not every algorithm looks at what a callback returns."""


class StopAfter(BaseCallback):
    """Ticks the stopwatch where SB3 starts to collect, which is where the update before it ended."""

    def __init__(self, watch: common.Stopwatch):
        super().__init__()
        self.watch = watch

    def _on_rollout_start(self) -> None:
        if self.watch.tick(self.num_timesteps):
            raise TimeIsUp

    def _on_step(self) -> bool:
        return True


def make_ppo(case: str) -> PPO:
    if case == "ppo-pong":
        cases.register_atari()
        pong = {"frameskip": 1, "repeat_action_probability": 0.0}
        envs = make_atari_env("ALE/Pong-v5", n_envs=cases.NUM_ENVS, seed=common.SEED, env_kwargs=pong)
        return PPO("CnnPolicy", VecFrameStack(envs, n_stack=4), **PPO_ARGUMENTS)
    envs = make_vec_env(cases.PPO_ENV_IDS[case], n_envs=cases.NUM_ENVS, seed=common.SEED)
    if case == "ppo-custom-module":
        network = {"features_extractor_class": CustomExtractor, "net_arch": []}
    elif case == "ppo-cartpole-256relu":
        network = {"net_arch": [256, 256], "activation_fn": nn.ReLU}
    else:
        network = {"net_arch": [64, 64], "activation_fn": nn.Tanh}
    return PPO("MlpPolicy", envs, policy_kwargs=network, **PPO_ARGUMENTS)


def make_a2c() -> A2C:
    return A2C(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=cases.NUM_ENVS, seed=common.SEED),
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
        n_steps=cases.A2C_STEPS,
        learning_rate=cases.A2C_LEARNING_RATE,
        gamma=cases.GAMMA,
        ent_coef=cases.ENTROPY_COEF,
        vf_coef=cases.VALUE_COEF,
        max_grad_norm=cases.MAX_GRAD_NORM,
        seed=common.SEED,
        device="cpu",
    )


def make_dqn(kind=DQN, **network):
    """DQN, or a relative with the same arguments and what else its network is made of."""
    return kind(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=1, seed=common.SEED),
        policy_kwargs={"net_arch": list(cases.DQN_HIDDEN), **network},
        batch_size=cases.DQN_BATCH,
        learning_rate=cases.DQN_LEARNING_RATE,
        buffer_size=cases.DQN_BUFFER,
        train_freq=cases.DQN_TRAIN_EVERY,
        target_update_interval=cases.DQN_TARGET_EVERY,
        learning_starts=cases.DQN_LEARNING_STARTS,
        exploration_fraction=cases.DQN_EPSILON_STEPS / FOREVER,
        exploration_final_eps=cases.DQN_EPSILON,
        gamma=cases.GAMMA,
        seed=common.SEED,
        device="cpu",
    )


def off_policy_arguments() -> dict:
    return {
        "env": make_vec_env("Pendulum-v1", n_envs=1, seed=common.SEED),
        "batch_size": cases.SAC_BATCH,
        "learning_rate": cases.SAC_LEARNING_RATE,
        "buffer_size": cases.SAC_BUFFER,
        "learning_starts": cases.SAC_LEARNING_STARTS,
        "train_freq": 1,
        "gradient_steps": 1,
        "gamma": cases.GAMMA,
        "seed": common.SEED,
        "device": "cpu",
    }


def make_off_policy(case: str):
    more = {} if case == "sac-pendulum" else {"action_noise": NormalActionNoise(np.zeros(1), cases.NOISE * np.ones(1))}
    network = {"net_arch": list(cases.SAC_HIDDEN)}
    return OFF_POLICY[case]("MlpPolicy", policy_kwargs=network, tau=cases.SAC_TAU, **off_policy_arguments(), **more)


def train(model, watch: common.Stopwatch, callback=StopAfter) -> None:
    """Runs `model.learn` until the stopwatch has seen enough."""
    with suppress(TimeIsUp):
        model.learn(FOREVER, callback=callback(watch))
    watch.returns.extend(episode["r"] for episode in model.ep_info_buffer)


def main() -> None:
    args = common.parser(__doc__, CASES).parse_args()
    cases.prepare(args.case)
    if args.case == "dqn-cartpole":
        model, warm_steps = make_dqn(), cases.DQN_EPSILON_STEPS
    elif args.case == "a2c-cartpole":
        model, warm_steps = make_a2c(), 1
    elif args.case in OFF_POLICY:
        model, warm_steps = make_off_policy(args.case), cases.SAC_LEARNING_STARTS
    else:
        model, warm_steps = make_ppo(args.case), cases.ROLLOUT
    watch = common.Stopwatch(args.seconds, warm_steps)
    train(model, watch)
    common.report("sb3", stable_baselines3.__version__, args.case, watch)


if __name__ == "__main__":
    main()
