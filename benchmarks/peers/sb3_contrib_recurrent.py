"""sb3-contrib's RecurrentPPO on Dict observations: a 64-unit encoder, then one LSTM of 64 shared by both heads."""

import cases
import common
import dict_env
import gymnasium as gym
import sb3_contrib
import torch
from sb3 import PPO_ARGUMENTS, train
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class Encoder(BaseFeaturesExtractor):
    """Joins the entries of the Dict and encodes them with Linear-Tanh."""

    def __init__(self, observation_space: gym.spaces.Dict):
        super().__init__(observation_space, features_dim=64)
        num_inputs = sum(space.shape[0] for space in observation_space.spaces.values())
        self.layers = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh())

    def forward(self, observations):
        return self.layers(torch.cat(list(observations.values()), dim=1))


def main() -> None:
    args = common.parser(__doc__, ["ppo-dict-lstm"]).parse_args()
    cases.prepare(args.case)
    network = {
        "features_extractor_class": Encoder,
        "net_arch": [],
        "lstm_hidden_size": 64,
        "shared_lstm": True,
        "enable_critic_lstm": False,
    }
    envs = make_vec_env(dict_env.make, n_envs=cases.NUM_ENVS, seed=common.SEED)
    model = RecurrentPPO("MultiInputLstmPolicy", envs, policy_kwargs=network, **PPO_ARGUMENTS)
    watch = common.Stopwatch(args.seconds, warm_steps=cases.ROLLOUT)
    train(model, watch)
    common.report("sb3-contrib", sb3_contrib.__version__, args.case, watch)


if __name__ == "__main__":
    main()
