"""The training cases of `python -m benchmarks training`: every algorithm has one, and both sides of it have the same
settings."""

import numpy as np
import pytest
import torch

from benchmarks import ours
from benchmarks.__main__ import TRAINING, beside_fastest
from bray.algos import ALGORITHMS
from bray.experiment import Experiment
from bray.rl import losses

import cases  # isort: skip: benchmarks/peers, which benchmarks.ours puts on the path
import cleanrl_style  # isort: skip

ELSEWHERE = {"IMPALA", "APPO", "Ape-X"}
"""Beside RLlib and others, with workers: benchmarks/scale."""
ALONE = {"QMIX", "VDN", "MADDPG", "COMA", "ATOC", "MAPPO", "NFSP", "AlphaZero"}
"""Of several agents: not measured beside a peer yet."""
FROM_FILES = {
    "BC",
    "MARWIL",
    "TD3+BC",
    "IQL",
    "CQL",
    "CQL-Discrete",
    "DQfD",
    "SQIL",
    "SQIL-Discrete",
    "GAIL",
    "DAgger",
    "DT",
}
"""Beside d3rlpy: benchmarks/offline.py; it has no MARWIL, DQfD, SQIL, GAIL, DAgger and DT."""
DQN = {
    "fcnet_hiddens": cases.DQN_HIDDEN,
    "batch_size": cases.DQN_BATCH,
    "lr": cases.DQN_LEARNING_RATE,
    "replay_size": cases.DQN_BUFFER,
    "train_every": cases.DQN_TRAIN_EVERY,
    "target_period": cases.DQN_TARGET_EVERY / cases.DQN_TRAIN_EVERY,
    "learning_starts": cases.DQN_LEARNING_STARTS,
    "gamma": cases.GAMMA,
}
ATOMS = {"num_atoms": cases.ATOMS, "v_min": cases.RETURNS[0], "v_max": cases.RETURNS[1], "double": True}
SEARCH = {"num_envs": 2 * cases.DIRECTIONS, "lr": cases.SEARCH_LEARNING_RATE, "sigma": cases.SEARCH_NOISE}
PEERS = {
    "a2c-cartpole": {
        "num_envs": cases.NUM_ENVS,
        "rollout_length": cases.A2C_STEPS,
        "lr": cases.A2C_LEARNING_RATE,
        "entropy_coef": cases.ENTROPY_COEF,
        "value_coef": cases.VALUE_COEF,
        "max_grad_norm": cases.MAX_GRAD_NORM,
        "gamma": cases.GAMMA,
    },
    "pg-cartpole": {"num_envs": cases.NUM_ENVS, "batch_size": cases.PG_BATCH, "lr": cases.PG_LEARNING_RATE},
    "pqn-cartpole": {
        "num_envs": cases.NUM_ENVS,
        "fcnet_hiddens": cases.DQN_HIDDEN,
        "rollout_length": cases.NUM_STEPS,
        "epochs": cases.EPOCHS,
        "minibatches": cases.MINIBATCHES,
        "lr": cases.LEARNING_RATE,
        "lambda_": cases.PQN_LAMBDA,
        "max_grad_norm": cases.PQN_MAX_GRAD_NORM,
        "layer_norm": True,
    },
    "dqn-cartpole": DQN | {"double": False},
    "qrdqn-cartpole": DQN | {"double": False, "num_quantiles": cases.QUANTILES},
    "c51-cartpole": DQN | ATOMS,
    "iqn-cartpole": DQN
    | {
        "double": True,
        "num_fractions": cases.FRACTIONS,
        "acting_fractions": cases.ACTING_FRACTIONS,
        "num_cosines": cases.COSINES,
    },
    "rainbow-cartpole": DQN
    | ATOMS
    | {
        "n_step": cases.RAINBOW_STEPS,
        "priority_alpha": cases.RAINBOW_ALPHA,
        "priority_beta": cases.RAINBOW_BETA,
        "dueling": True,
        "noisy": True,
    },
    "r2d2-cartpole": DQN
    | {
        "fcnet_hiddens": (cases.LSTM,),
        "lstm_cell_size": cases.LSTM,
        "batch_size": cases.SEQUENCES,
        "sequence_length": cases.SEQUENCE,
    },
    "ars-cartpole": SEARCH | {"top": cases.TOP_DIRECTIONS / cases.DIRECTIONS, "fcnet_hiddens": ()},
    "es-cartpole": SEARCH | {"fcnet_hiddens": cases.ES_HIDDEN},
    "sac-discrete-cartpole": {
        "fcnet_hiddens": cases.SAC_HIDDEN,
        "batch_size": cases.SAC_BATCH,
        "lr": cases.SAC_LEARNING_RATE,
        "replay_size": cases.SAC_BUFFER,
        "learning_starts": cases.SAC_LEARNING_STARTS,
        "tau": cases.SAC_TAU,
        "train_every": 1,
        "entropy_scale": cases.ENTROPY_SCALE,
        "gamma": cases.GAMMA,
    },
}


def settings(case):
    with_sections = Experiment(**ours.CASES[case], use_preset=False, seed=1)
    with_sections.close()
    return {k: v for section in with_sections.config.sections.values() for k, v in vars(section).items()}


def test_every_algorithm_is_measured_beside_a_peer():
    measured = {ours.CASES[case]["run"] for case, peers in TRAINING.items() if peers}
    assert set(ALGORITHMS) - ELSEWHERE - ALONE - FROM_FILES <= measured


def test_every_peer_knows_its_cases():
    for case, scripts in TRAINING.items():
        for script, *_ in scripts:
            source = (ours.PEERS / script).read_text()
            assert f'"{case}"' in source or (case in cases.PPO_ENV_IDS and "PPO_ENV_IDS" in source), (script, case)


@pytest.mark.parametrize("case", PEERS)
def test_both_sides_have_the_same_settings(case):
    here = settings(case)
    assert {k: here[k] for k in PEERS[case]} == PEERS[case]


def test_the_plain_returns_of_q_lambda_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    reward, value = rng.random((cases.NUM_STEPS, 3)), rng.random((cases.NUM_STEPS + 1, 3))
    done = rng.random((cases.NUM_STEPS + 1, 3)) < 0.1
    theirs = cleanrl_style.lambda_returns(
        *map(torch.tensor, (reward, done[:-1] * 1.0, value[:-1], done[-1] * 1.0, value[-1]))
    )
    following = value[-1]
    for t in reversed(range(cases.NUM_STEPS)):
        mixed = cases.PQN_LAMBDA * following + (1 - cases.PQN_LAMBDA) * value[t + 1]
        following = reward[t] + cases.GAMMA * np.where(done[t + 1], 0.0, mixed)
        np.testing.assert_allclose(theirs[t], following)


def test_the_plain_loss_of_c51_is_ours():
    torch.manual_seed(0)
    network, target = cleanrl_style.Distributions(2), cleanrl_style.Distributions(2)
    obs, after = torch.randn(2, 6, 4)
    action, reward = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([1.0, -3.0, 1.0, 2.5, 200.0, 0.0])
    done = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    loss = network.loss(target, obs, after, action.unsqueeze(1), reward, done)
    probs = losses.select_action(target.logits(after), network(after).argmax(1)).softmax(-1)
    goal = losses.project(probs, network.atoms, reward, cases.GAMMA * (1 - done))
    expected = losses.categorical_loss(losses.select_action(network.logits(obs), action), goal).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_ratio_is_to_the_fastest_peer():
    rates = {"bray": [30.0, 10.0, 20.0], "slow": [1.0], "fast": [8.0, 12.0]}
    medians = {"bray": 20.0, "slow": 1.0, "fast": 10.0}
    assert beside_fastest(rates) == {"medians": medians, "fastest_peer": "fast", "ratio": 2.0}
    assert beside_fastest({"bray": [3.0]}) == {"medians": {"bray": 3.0}}
