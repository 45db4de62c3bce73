"""Tianshou's PPO for several agents, one network for all, on 64 games of simple_spread: see spread.py.

Its games are PettingZoo's in turns, so an agent decides at each of its steps, and each agent's rows are an update of
their own, of the same network. Its environments give the agent and a mask beside what is seen, which its networks for
PPO do not take apart.
"""

import cases
import numpy as np
import spread
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.multiagent.marl import MultiAgentOnPolicyAlgorithm
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.env.pettingzoo_env import PettingZooEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch import nn


class Trunk(Net):
    def forward(self, obs, state=None, info=None):
        return super().forward(obs.obs, state)


class NotingCollector(Collector):
    """A collector that keeps the team's mean return."""

    mean_return = float("nan")

    def collect(self, *args, **kwargs):
        stats = super().collect(*args, **kwargs)
        if len(stats.returns):
            self.mean_return = float(np.sum(stats.returns, axis=-1).mean())
        return stats


def main() -> None:
    envs = DummyVectorEnv([lambda: PettingZooEnv(spread.make_turns()) for _ in range(spread.GAMES)])
    game = PettingZooEnv(spread.make_turns())

    def trunk() -> Trunk:
        return Trunk(state_shape=game.observation_space.shape, hidden_sizes=(64, 64), activation=nn.Tanh)

    actor = DiscreteActor(preprocess_net=trunk(), action_shape=game.action_space.n, softmax_output=False)
    shared = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=game.action_space),
        critic=DiscreteCritic(preprocess_net=trunk()),
        optim=AdamOptimizerFactory(lr=cases.LEARNING_RATE, eps=1e-5),
        eps_clip=cases.CLIP,
        vf_coef=cases.VALUE_COEF,
        ent_coef=cases.ENTROPY_COEF,
        max_grad_norm=cases.MAX_GRAD_NORM,
        gae_lambda=cases.GAE_LAMBDA,
        gamma=cases.GAMMA,
    )
    algorithm = MultiAgentOnPolicyAlgorithm(algorithms=[shared] * spread.AGENTS, env=game)
    rows = spread.GAMES * spread.STEPS * spread.AGENTS
    collector = NotingCollector(algorithm, envs, VectorReplayBuffer(rows, spread.GAMES))
    collector.reset()
    turns = spread.Turns()
    params = OnPolicyTrainerParams(
        training_collector=collector,
        collection_step_num_env_steps=rows,
        batch_size=spread.MINIBATCH,
        update_step_num_repetitions=cases.EPOCHS,
        training_fn=lambda epoch, steps: turns.tick(collector.mean_return),
        max_epochs=10**6,
        epoch_num_steps=10**6,
        verbose=False,
        show_progress=False,
    )
    algorithm.run_training(params)


if __name__ == "__main__":
    main()
