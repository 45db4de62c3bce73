"""PufferLib's PPO trainer on the PPO cases, serial backend.

PufferLib draws whole segments of 128 steps as minibatches, clamps rewards to [-1, 1], always clips the value loss and
does not reset its LSTM where an episode ends. Its priorities are switched off (alpha 0) and so is its dashboard.
"""

import contextlib
import tempfile
from importlib.metadata import version

import cases
import common
import torch
from networks import actor_critic, layer_init
from torch import nn

# Importing pufferlib leaves a link called `resources` in the working directory: let that be a temporary one.
with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
    import pufferlib
    import pufferlib.emulation
    import pufferlib.models
    import pufferlib.pytorch
    import pufferlib.vector
    from pufferlib.pufferl import PuffeRL

CASES = [*cases.PPO_ENV_IDS, "ppo-dict-lstm", "ppo-pong"]


class Trainer(PuffeRL):
    def print_dashboard(self, *args, **kwargs):
        """Silent: the dashboard would only slow it down."""


class Policy(nn.Module):
    """A plain torch actor-critic as PufferLib calls it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, observations, state=None):
        return self.network(observations)

    forward_eval = forward


class DictEncoder(nn.Module):
    """What PufferLib's LSTM wrapper wants: everything before and everything after the LSTM."""

    is_continuous = False

    def __init__(self, env):
        super().__init__()
        self.dtype = pufferlib.pytorch.nativize_dtype(env.emulated)
        self.encoder = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.policy_head = layer_init(nn.Linear(64, env.single_action_space.n), 0.01)
        self.value_head = layer_init(nn.Linear(64, 1), 1.0)

    def encode_observations(self, observations, state=None):
        observations = pufferlib.pytorch.nativize_tensor(observations, self.dtype)
        return self.encoder(torch.cat(list(observations.values()), dim=1))

    def decode_actions(self, hidden):
        return self.policy_head(hidden), self.value_head(hidden)


def make_policy(case: str, env) -> nn.Module:
    if case == "ppo-dict-lstm":
        return pufferlib.models.LSTMWrapper(env, DictEncoder(env), input_size=64, hidden_size=64)
    return Policy(actor_critic(case, env.single_observation_space, env.single_action_space.n))


def make_config(case: str) -> dict:
    return {
        "env": case,
        "seed": common.SEED,
        "device": "cpu",
        "torch_deterministic": False,
        "cpu_offload": False,
        "use_rnn": case == "ppo-dict-lstm",
        "compile": False,
        "precision": "float32",
        "optimizer": "adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-5,
        "anneal_lr": False,
        "learning_rate": cases.LEARNING_RATE,
        "total_timesteps": 10**9,
        "batch_size": cases.ROLLOUT,
        "bptt_horizon": cases.NUM_STEPS,
        "minibatch_size": cases.MINIBATCH,
        "max_minibatch_size": cases.MINIBATCH,
        "update_epochs": cases.EPOCHS,
        "gamma": cases.GAMMA,
        "gae_lambda": cases.GAE_LAMBDA,
        "clip_coef": cases.CLIP,
        "vf_clip_coef": cases.CLIP,
        "vf_coef": cases.VALUE_COEF,
        "ent_coef": cases.ENTROPY_COEF,
        "max_grad_norm": cases.MAX_GRAD_NORM,
        "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0,
        "prio_alpha": 0.0,
        "prio_beta0": 0.0,
        "checkpoint_interval": 10**9,
        "data_dir": "unused",
    }


def main() -> None:
    args = common.parser(__doc__, CASES).parse_args()
    cases.prepare(args.case)

    def make_env(buf=None, seed=0):
        env = pufferlib.EpisodeStats(cases.make_env(args.case))
        return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)

    envs = pufferlib.vector.make(make_env, backend=pufferlib.vector.Serial, num_envs=cases.NUM_ENVS)
    trainer = Trainer(make_config(args.case), envs, make_policy(args.case, envs.driver_env))
    watch = common.Stopwatch(args.seconds, warm_steps=cases.ROLLOUT)
    seen = 0
    while not watch.tick(trainer.global_step):
        episodes = trainer.evaluate()["episode_return"]
        watch.returns.extend(episodes[seen:])
        seen = 0 if trainer.train() else len(episodes)  # the trainer forgets its statistics whenever it logs
    trainer.utilization.stop()
    common.report("pufferlib", version("pufferlib"), args.case, watch)


if __name__ == "__main__":
    main()
