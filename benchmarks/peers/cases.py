"""The cases: hyper-parameters and environments, the same for every peer.

Nothing here imports Bray: the scripts run in the virtual environment of the peers (see `../install_peers.sh`).
"""

import os
import sys

import dict_env
import gymnasium as gym
import numpy as np
import torch
from common import SEED

NUM_ENVS = 8
NUM_STEPS = 128
EPOCHS = 4
MINIBATCHES = 4
ROLLOUT = NUM_ENVS * NUM_STEPS
MINIBATCH = ROLLOUT // MINIBATCHES

LEARNING_RATE = 2.5e-4
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5

PPO_ENV_IDS = {
    "ppo-cartpole": "CartPole-v1",
    "ppo-cartpole-256relu": "CartPole-v1",
    "ppo-custom-module": "CartPole-v1",
    "ppo-acrobot": "Acrobot-v1",
}

A2C_STEPS = 5
"""SB3's settings: with RMSprop, and lambda 1."""
A2C_LEARNING_RATE = 7e-4

PG_BATCH = 1_000
"""Environment steps of one gradient step."""
PG_LEARNING_RATE = 3e-3

DQN_HIDDEN = (120, 84)
DQN_BATCH = 128
DQN_LEARNING_RATE = 2.5e-4
DQN_BUFFER = 10_000
DQN_TRAIN_EVERY = 10
DQN_TARGET_EVERY = 500
DQN_LEARNING_STARTS = 1_000
DQN_EPSILON_STEPS = 2_000
"""Epsilon falls from 1 to 0.05 over this many steps, all within the warm-up: a random action needs no forward pass, so
a slow schedule would measure something else."""
DQN_EPSILON = 0.05

QUANTILES = 50
"""Of QR-DQN. Its other settings are DQN's, and so are those of C51, IQN and Rainbow; these three choose the next action
with the online network, as Tianshou always does."""
ATOMS = 51
RETURNS = (0.0, 100.0)
"""The first and the last atom of C51 and Rainbow."""
FRACTIONS = 8
"""Of IQN: those that are learnt, and those of the target."""
ACTING_FRACTIONS = 32
COSINES = 64
RAINBOW_STEPS = 3
RAINBOW_ALPHA = 0.5
RAINBOW_BETA = 0.4

SEQUENCE = 16
"""Steps through which the recurrent DQN goes, without burn-in."""
SEQUENCES = 32
"""Of an update. Uniform, one-step, without streams; the rest is DQN's."""
LSTM = 64
"""Width of the memory and of the layer before it."""

PQN_LAMBDA = 0.65
PQN_MAX_GRAD_NORM = 10.0
"""Rollouts, minibatches and the rate are PPO's, the widths and epsilon are DQN's."""

DIRECTIONS = 16
"""Of ARS and ES: a generation is twice as many episodes."""
TOP_DIRECTIONS = 8
SEARCH_LEARNING_RATE = 0.03
SEARCH_NOISE = 0.05
ES_HIDDEN = (32, 32)
"""ARS's policy is linear."""

SAC_HIDDEN = (256, 256)
SAC_BATCH = 256
SAC_LEARNING_RATE = 3e-4
SAC_BUFFER = 1_000_000
SAC_TAU = 0.005
SAC_LEARNING_STARTS = 500
NOISE = 0.1
"""Of TD3's and DDPG's actions; their networks, batches and rates are SAC's."""
CROSSQ_HIDDEN = (256, 256)
"""Of the critics."""
ENTROPY_SCALE = 0.7
"""Discrete SAC aims at this share of the largest entropy."""


def prepare(case: str) -> None:
    """Sets threads and seeds: one thread is right for small networks, the CNN gets two.

    `torch.set_num_threads` does not reach the OpenBLAS in torch's ARM wheels. The environment does, but only when it is
    set before torch loads, so the script starts itself again where it is not.
    """
    threads = 2 if case == "ppo-pong" else 1
    limits = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    if any(os.environ.get(name) != value for name, value in limits.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | limits)
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    np.random.seed(SEED)


def make_env(case: str) -> gym.Env:
    """One environment of a PPO case."""
    if case == "ppo-pong":
        return make_pong()
    if case == "ppo-dict-lstm":
        return dict_env.make()
    return gym.make(PPO_ENV_IDS[case])


def register_atari() -> None:
    """Makes gymnasium know the ALE environments."""
    import ale_py

    gym.register_envs(ale_py)


def make_pong() -> gym.Env:
    """ALE/Pong-v5 with frame skip 4, 84x84 grayscale, 4 stacked frames, clipped rewards and no-op starts."""
    register_atari()
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    env = gym.wrappers.FrameStackObservation(env, 4)
    return gym.wrappers.TransformReward(env, np.sign)
