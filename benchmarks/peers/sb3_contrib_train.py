"""sb3-contrib's RecurrentPPO, CrossQ, QR-DQN and ARS, through its own API. ARS with a dense network stands beside our
ES."""

import cases
import common
import dict_env
import gymnasium as gym
import sb3_contrib
import torch
from sb3 import PPO_ARGUMENTS, StopAfter, make_dqn, off_policy_arguments, train
from sb3_contrib import ARS, QRDQN, CrossQ, RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn


class Encoder(BaseFeaturesExtractor):
    """Joins the entries of the Dict and encodes them with Linear-Tanh."""

    def __init__(self, observation_space: gym.spaces.Dict):
        super().__init__(observation_space, features_dim=64)
        num_inputs = sum(space.shape[0] for space in observation_space.spaces.values())
        self.layers = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh())

    def forward(self, observations):
        return self.layers(torch.cat(list(observations.values()), dim=1))


class Generations(StopAfter):
    """Notes the returns of a generation where it ends: ARS empties the list before it calls back again."""

    def _on_rollout_end(self) -> None:
        self.watch.returns.extend(episode["r"] for episode in self.model.ep_info_buffer)


def make_recurrent_ppo() -> RecurrentPPO:
    """A 64-unit encoder, then one LSTM of 64 shared by both heads."""
    network = {
        "features_extractor_class": Encoder,
        "net_arch": [],
        "lstm_hidden_size": 64,
        "shared_lstm": True,
        "enable_critic_lstm": False,
    }
    envs = make_vec_env(dict_env.make, n_envs=cases.NUM_ENVS, seed=common.SEED)
    return RecurrentPPO("MultiInputLstmPolicy", envs, policy_kwargs=network, **PPO_ARGUMENTS)


def make_crossq() -> CrossQ:
    network = {"net_arch": {"pi": list(cases.SAC_HIDDEN), "qf": list(cases.CROSSQ_HIDDEN)}}
    return CrossQ("MlpPolicy", policy_kwargs=network, **off_policy_arguments())


def make_ars(case: str) -> ARS:
    """One environment: without processes of its own, ARS plays the members of a generation one after the other."""
    envs = VecNormalize(make_vec_env("CartPole-v1", n_envs=1, seed=common.SEED), norm_reward=False)
    linear = case == "ars-cartpole"
    return ARS(
        "LinearPolicy" if linear else "MlpPolicy",
        envs,
        policy_kwargs={"with_bias": True} if linear else {"net_arch": list(cases.ES_HIDDEN)},
        n_delta=cases.DIRECTIONS,
        n_top=cases.TOP_DIRECTIONS if linear else cases.DIRECTIONS,
        learning_rate=cases.SEARCH_LEARNING_RATE,
        delta_std=cases.SEARCH_NOISE,
        zero_policy=linear,
        seed=common.SEED,
    )


CASES = {
    "ppo-dict-lstm": (make_recurrent_ppo, cases.ROLLOUT),
    "crossq-pendulum": (make_crossq, cases.SAC_LEARNING_STARTS),
    "qrdqn-cartpole": (lambda: make_dqn(QRDQN, n_quantiles=cases.QUANTILES), cases.DQN_EPSILON_STEPS),
    "ars-cartpole": (lambda: make_ars("ars-cartpole"), 1),
    "es-cartpole": (lambda: make_ars("es-cartpole"), 1),
}
"""Case -> how its model is made, and steps of its warm-up."""


def main() -> None:
    args = common.parser(__doc__, CASES).parse_args()
    cases.prepare(args.case)
    make, warm_steps = CASES[args.case]
    model, watch = make(), common.Stopwatch(args.seconds, warm_steps)
    train(model, watch, Generations if isinstance(model, ARS) else StopAfter)
    common.report("sb3-contrib", sb3_contrib.__version__, args.case, watch)


if __name__ == "__main__":
    main()
