"""Tianshou on the PPO, DQN and SAC cases, through its procedural API."""

from importlib.metadata import version

import cases
import common
import gymnasium as gym
import torch
from custom_module import ResidualMLP
from networks import NatureCNN
from tianshou.algorithm import DQN, PPO, SAC
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import ModuleWithVectorOutput, Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch import nn

CASES = [*cases.PPO_ENV_IDS, "ppo-pong", "dqn-cartpole", "sac-pendulum"]
QUIET = {"max_epochs": 10**6, "epoch_num_steps": 10**6, "verbose": False, "show_progress": False}


class TimeIsUp(Exception):
    """Raised at the start of a training step to leave Tianshou's trainer."""


class Trunk(ModuleWithVectorOutput):
    """A plain torch module as Tianshou calls one: numpy in, (features, state) out."""

    def __init__(self, module: nn.Module, num_features: int):
        super().__init__(num_features)
        self.module = module

    def forward(self, obs, state=None, info=None):
        return self.module(torch.as_tensor(obs, dtype=torch.float32)), state


class NotingCollector(Collector):
    """A collector that notes the returns of finished episodes."""

    def __init__(self, watch: common.Stopwatch, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch = watch

    def collect(self, *args, **kwargs):
        stats = super().collect(*args, **kwargs)
        self.watch.returns.extend(stats.returns)
        return stats


def make_trunk(case: str, observation_space) -> nn.Module:
    if case == "ppo-pong":
        return Trunk(NatureCNN(), 512)
    if case == "ppo-custom-module":
        module = ResidualMLP(observation_space.shape[0])
        return Trunk(module, module.num_features)
    hidden, activation = ((256, 256), nn.ReLU) if case == "ppo-cartpole-256relu" else ((64, 64), nn.Tanh)
    return Net(state_shape=observation_space.shape, hidden_sizes=hidden, activation=activation)


def stop_when_done(watch: common.Stopwatch, offset: int = 0):
    def training_fn(epoch: int, env_steps: int) -> None:
        if watch.tick(env_steps + offset):
            raise TimeIsUp

    return training_fn


def ppo(case: str, watch: common.Stopwatch) -> None:
    envs = DummyVectorEnv([lambda: cases.make_env(case) for _ in range(cases.NUM_ENVS)])
    observation_space, action_space = envs.observation_space[0], envs.action_space[0]
    trunk = make_trunk(case, observation_space)
    shared = case in ("ppo-pong", "ppo-custom-module")
    actor = DiscreteActor(preprocess_net=trunk, action_shape=action_space.n, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=trunk if shared else make_trunk(case, observation_space))
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=action_space),
        critic=critic,
        optim=AdamOptimizerFactory(lr=cases.LEARNING_RATE, eps=1e-5),
        eps_clip=cases.CLIP,
        vf_coef=cases.VALUE_COEF,
        ent_coef=cases.ENTROPY_COEF,
        max_grad_norm=cases.MAX_GRAD_NORM,
        gae_lambda=cases.GAE_LAMBDA,
        gamma=cases.GAMMA,
    )
    collector = NotingCollector(watch, algorithm, envs, VectorReplayBuffer(cases.ROLLOUT, cases.NUM_ENVS))
    collector.reset()
    params = OnPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=cases.ROLLOUT,
        batch_size=cases.MINIBATCH,
        update_step_num_repetitions=cases.EPOCHS,
        training_fn=stop_when_done(watch),
        **QUIET,
    )
    algorithm.run_training(params)


def dqn(watch: common.Stopwatch) -> None:
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1")])
    action_space = envs.action_space[0]
    model = Net(state_shape=(4,), action_shape=action_space.n, hidden_sizes=cases.DQN_HIDDEN)
    policy = DiscreteQLearningPolicy(model=model, action_space=action_space, eps_training=cases.DQN_EPSILON)
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=cases.DQN_LEARNING_RATE),
        gamma=cases.GAMMA,
        target_update_freq=cases.DQN_TARGET_EVERY // cases.DQN_TRAIN_EVERY,
        is_double=False,
    )
    collector = NotingCollector(watch, algorithm, envs, VectorReplayBuffer(cases.DQN_BUFFER, 1))
    collector.reset()
    collector.collect(n_step=cases.DQN_LEARNING_STARTS, random=True)
    tick = stop_when_done(watch, cases.DQN_LEARNING_STARTS)

    def training_fn(epoch: int, env_steps: int) -> None:
        progress = (env_steps + cases.DQN_LEARNING_STARTS) / cases.DQN_EPSILON_STEPS
        policy.set_eps_training(max(1.0 + (cases.DQN_EPSILON - 1.0) * progress, cases.DQN_EPSILON))
        tick(epoch, env_steps)

    params = OffPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=cases.DQN_TRAIN_EVERY,
        update_step_num_gradient_steps_per_sample=1 / cases.DQN_TRAIN_EVERY,
        batch_size=cases.DQN_BATCH,
        training_fn=training_fn,
        **QUIET,
    )
    algorithm.run_training(params)


def sac(watch: common.Stopwatch) -> None:
    envs = DummyVectorEnv([lambda: gym.make("Pendulum-v1")])
    action_space = envs.action_space[0]
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=(3,), hidden_sizes=cases.SAC_HIDDEN),
        action_shape=action_space.shape,
        unbounded=True,
        conditioned_sigma=True,
    )
    critic1, critic2 = (
        ContinuousCritic(
            preprocess_net=Net(
                state_shape=(3,), action_shape=action_space.shape, hidden_sizes=cases.SAC_HIDDEN, concat=True
            )
        )
        for _ in range(2)
    )
    adam = AdamOptimizerFactory(lr=cases.SAC_LEARNING_RATE)
    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=action_space),
        policy_optim=adam,
        critic=critic1,
        critic_optim=adam,
        critic2=critic2,
        critic2_optim=adam,
        tau=cases.SAC_TAU,
        gamma=cases.GAMMA,
        alpha=AutoAlpha(target_entropy=-1.0, log_alpha=0.0, optim=adam),
    )
    collector = NotingCollector(watch, algorithm, envs, VectorReplayBuffer(cases.SAC_BUFFER, 1))
    collector.reset()
    collector.collect(n_step=cases.SAC_LEARNING_STARTS, random=True)
    params = OffPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=1,
        update_step_num_gradient_steps_per_sample=1.0,
        batch_size=cases.SAC_BATCH,
        training_fn=stop_when_done(watch),
        **QUIET,
    )
    algorithm.run_training(params)


def main() -> None:
    args = common.parser(__doc__, CASES).parse_args()
    cases.prepare(args.case)
    watch = common.Stopwatch(args.seconds, cases.DQN_EPSILON_STEPS if args.case == "dqn-cartpole" else 1)
    try:
        if args.case == "dqn-cartpole":
            dqn(watch)
        elif args.case == "sac-pendulum":
            sac(watch)
        else:
            ppo(args.case, watch)
    except TimeIsUp:
        common.report("tianshou", version("tianshou"), args.case, watch)


if __name__ == "__main__":
    main()
