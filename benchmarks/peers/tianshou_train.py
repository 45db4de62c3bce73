"""Tianshou on the PPO, Reinforce, SAC and Q-learning cases, through its procedural API.

Three of its ways decide what is compared: collecting runs in evaluation mode, so Rainbow's noisy layers act without
noise (epsilon explores instead, on our side as well); its recurrent DQN starts every sequence with an empty memory and
learns the last step alone; Reinforce continues episodes that a batch has cut.
"""

import math
from functools import partial
from importlib.metadata import version

import cases
import common
import gymnasium as gym
import torch
from custom_module import ResidualMLP
from networks import NatureCNN
from tianshou.algorithm import C51, DQN, IQN, PPO, SAC, DiscreteSAC, RainbowDQN, Reinforce
from tianshou.algorithm.modelfree.c51 import C51Policy
from tianshou.algorithm.modelfree.discrete_sac import DiscreteSACPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.iqn import IQNPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, PrioritizedVectorReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import ModuleWithVectorOutput, Net, Recurrent
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic, ImplicitQuantileNetwork, NoisyLinear
from torch import nn

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


def make_envs(env_id: str, count: int = 1) -> DummyVectorEnv:
    return DummyVectorEnv([lambda: gym.make(env_id) for _ in range(count)])


def on_policy(algorithm, envs, watch: common.Stopwatch, rollout: int, minibatch: int | None, epochs: int) -> None:
    collector = NotingCollector(watch, algorithm, envs, VectorReplayBuffer(rollout, cases.NUM_ENVS))
    collector.reset()
    params = OnPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=rollout,
        batch_size=minibatch,
        update_step_num_repetitions=epochs,
        training_fn=stop_when_done(watch),
        **QUIET,
    )
    algorithm.run_training(params)


def off_policy(
    algorithm, envs, watch: common.Stopwatch, replay, starts: int, every: int, batch: int, before=None
) -> None:
    """One update of `batch` samples for `every` steps; `before(steps)` is called before those."""
    collector = NotingCollector(watch, algorithm, envs, replay)
    collector.reset()
    collector.collect(n_step=starts, random=True)
    tick = stop_when_done(watch, starts)

    def training_fn(epoch: int, env_steps: int) -> None:
        if before is not None:
            before(env_steps + starts)
        tick(epoch, env_steps)

    params = OffPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=every,
        update_step_num_gradient_steps_per_sample=1 / every,
        batch_size=batch,
        training_fn=training_fn,
        **QUIET,
    )
    algorithm.run_training(params)


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
    on_policy(algorithm, envs, watch, cases.ROLLOUT, cases.MINIBATCH, cases.EPOCHS)


def reinforce(case: str, watch: common.Stopwatch) -> None:
    envs = make_envs("CartPole-v1", cases.NUM_ENVS)
    action_space = envs.action_space[0]
    trunk = make_trunk(case, envs.observation_space[0])
    actor = DiscreteActor(preprocess_net=trunk, action_shape=action_space.n, softmax_output=False)
    algorithm = Reinforce(
        policy=DiscreteActorPolicy(actor=actor, action_space=action_space),
        optim=AdamOptimizerFactory(lr=cases.PG_LEARNING_RATE),
        gamma=cases.GAMMA,
        return_standardization=True,
    )
    on_policy(algorithm, envs, watch, cases.PG_BATCH, minibatch=None, epochs=1)


def make_q_learning(case: str, space: gym.spaces.Discrete):
    """DQN or a relative of it, with its policy."""
    net = partial(Net, state_shape=(4,), action_shape=space.n, hidden_sizes=cases.DQN_HIDDEN)
    acting = {"action_space": space, "eps_training": cases.DQN_EPSILON}
    learning = {
        "optim": AdamOptimizerFactory(lr=cases.DQN_LEARNING_RATE),
        "gamma": cases.GAMMA,
        "target_update_freq": cases.DQN_TARGET_EVERY // cases.DQN_TRAIN_EVERY,
    }
    atoms = {"num_atoms": cases.ATOMS, "v_min": cases.RETURNS[0], "v_max": cases.RETURNS[1]}
    if case == "dqn-cartpole":
        return DQN(policy=DiscreteQLearningPolicy(model=net(), **acting), is_double=False, **learning)
    if case == "r2d2-cartpole":
        model = Recurrent(layer_num=1, state_shape=(4,), action_shape=space.n, hidden_layer_size=cases.LSTM)
        return DQN(policy=DiscreteQLearningPolicy(model=model, **acting), is_double=True, **learning)
    if case == "iqn-cartpole":
        trunk = Net(state_shape=(4,), hidden_sizes=cases.DQN_HIDDEN)
        model = ImplicitQuantileNetwork(preprocess_net=trunk, action_shape=space.n, num_cosines=cases.COSINES)
        fractions = {"online_sample_size": cases.FRACTIONS, "target_sample_size": cases.FRACTIONS}
        policy = IQNPolicy(model=model, sample_size=cases.ACTING_FRACTIONS, **fractions, **acting)
        return IQN(policy=policy, num_quantiles=cases.FRACTIONS, **learning)
    if case == "c51-cartpole":
        return C51(policy=C51Policy(net(softmax=True, num_atoms=cases.ATOMS), **atoms, **acting), **learning)
    stream = {"hidden_sizes": cases.DQN_HIDDEN[-1:], "linear_layer": NoisyLinear}
    model = net(softmax=True, num_atoms=cases.ATOMS, dueling_param=(stream, stream))
    policy = C51Policy(model, **atoms, **acting)
    return RainbowDQN(policy=policy, n_step_return_horizon=cases.RAINBOW_STEPS, **learning)


def make_replay(case: str):
    if case == "rainbow-cartpole":
        return PrioritizedVectorReplayBuffer(cases.DQN_BUFFER, 1, alpha=cases.RAINBOW_ALPHA, beta=cases.RAINBOW_BETA)
    if case == "r2d2-cartpole":
        return VectorReplayBuffer(cases.DQN_BUFFER, 1, stack_num=cases.SEQUENCE, ignore_obs_next=True)
    return VectorReplayBuffer(cases.DQN_BUFFER, 1)


def q_learning(case: str, watch: common.Stopwatch) -> None:
    envs = make_envs("CartPole-v1")
    algorithm = make_q_learning(case, envs.action_space[0])

    def explore(env_steps: int) -> None:
        progress = env_steps / cases.DQN_EPSILON_STEPS
        algorithm.policy.set_eps_training(max(1.0 + (cases.DQN_EPSILON - 1.0) * progress, cases.DQN_EPSILON))

    batch = cases.SEQUENCES if case == "r2d2-cartpole" else cases.DQN_BATCH
    starts, every = cases.DQN_LEARNING_STARTS, cases.DQN_TRAIN_EVERY
    off_policy(algorithm, envs, watch, make_replay(case), starts, every, batch, explore)


def sac_arguments(make_critic, target_entropy: float) -> dict:
    """What the two kinds of SAC have in common."""
    adam = AdamOptimizerFactory(lr=cases.SAC_LEARNING_RATE)
    return {
        "policy_optim": adam,
        "critic": make_critic(),
        "critic_optim": adam,
        "critic2": make_critic(),
        "critic2_optim": adam,
        "tau": cases.SAC_TAU,
        "gamma": cases.GAMMA,
        "alpha": AutoAlpha(target_entropy=target_entropy, log_alpha=0.0, optim=adam),
    }


def make_sac(space: gym.spaces.Box) -> SAC:
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=(3,), hidden_sizes=cases.SAC_HIDDEN),
        action_shape=space.shape,
        unbounded=True,
        conditioned_sigma=True,
    )

    def make_critic():
        net = Net(state_shape=(3,), action_shape=space.shape, hidden_sizes=cases.SAC_HIDDEN, concat=True)
        return ContinuousCritic(preprocess_net=net)

    return SAC(policy=SACPolicy(actor=actor, action_space=space), **sac_arguments(make_critic, -1.0))


def make_discrete_sac(space: gym.spaces.Discrete) -> DiscreteSAC:
    net = partial(Net, state_shape=(4,), hidden_sizes=cases.SAC_HIDDEN)
    actor = DiscreteActor(preprocess_net=net(), action_shape=space.n, softmax_output=False)

    def make_critic():
        return DiscreteCritic(preprocess_net=net(), last_size=space.n)

    entropy = cases.ENTROPY_SCALE * math.log(space.n)
    return DiscreteSAC(policy=DiscreteSACPolicy(actor=actor, action_space=space), **sac_arguments(make_critic, entropy))


def sac(case: str, watch: common.Stopwatch) -> None:
    env_id, make = ("Pendulum-v1", make_sac) if case == "sac-pendulum" else ("CartPole-v1", make_discrete_sac)
    envs, replay = make_envs(env_id), VectorReplayBuffer(cases.SAC_BUFFER, 1)
    off_policy(make(envs.action_space[0]), envs, watch, replay, cases.SAC_LEARNING_STARTS, 1, cases.SAC_BATCH)


Q_LEARNING = ["dqn-cartpole", "c51-cartpole", "iqn-cartpole", "rainbow-cartpole", "r2d2-cartpole"]
CASES = {
    **dict.fromkeys([*cases.PPO_ENV_IDS, "ppo-pong"], ppo),
    "pg-cartpole": reinforce,
    **dict.fromkeys(Q_LEARNING, q_learning),
    **dict.fromkeys(["sac-pendulum", "sac-discrete-cartpole"], sac),
}


def main() -> None:
    args = common.parser(__doc__, CASES).parse_args()
    cases.prepare(args.case)
    watch = common.Stopwatch(args.seconds, cases.DQN_EPSILON_STEPS if args.case in Q_LEARNING else 1)
    try:
        CASES[args.case](args.case, watch)
    except TimeIsUp:
        common.report("tianshou", version("tianshou"), args.case, watch)


if __name__ == "__main__":
    main()
