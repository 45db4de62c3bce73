"""PG: returns and gradients against plain loops."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sources_for_tests import make_piece

from bray.act import Clock
from bray.algos import pg
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

SPEC = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
GAMMA = 0.9
PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "pg.md"


def make_learner(**options):
    torch.manual_seed(0)
    config = pg.Config(gamma=GAMMA, **options)
    model = pg.make_model(config, SPEC, SMALL)
    return pg.Learner(config, SPEC, model, SMALL, record=False)


def piece():
    """Episodes of 3 (terminated), 4 (truncated) and 5 rows (terminated)."""
    return make_piece(np.random.default_rng(0), 14, None, ends=(2, 7, 13))


def slow_returns(piece, value):
    """The discounted reward to come, row by row; `value` is the future where an episode was truncated."""
    out, total = np.zeros(piece.length), 0.0
    for t in reversed(range(piece.length)):
        if piece.terminated[t, 0]:
            total = 0.0
        elif piece.truncated[t, 0]:
            total = value[t + 1]
        if piece.valid[t, 0]:
            total = out[t] = float(piece.reward[t, 0]) + GAMMA * total
    return out


def test_without_a_baseline_the_reward_to_come_is_all():
    data = piece()
    batch = make_learner(baseline=False, normalize_advantage=False).prepare(data)
    want = slow_returns(data, np.zeros(data.length + 1))
    np.testing.assert_allclose(batch["advantage"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch["target"], want, rtol=1e-5, atol=1e-6)
    assert data.outputs["value"].any()  # untouched


def test_hand_worked_returns():
    data = make_piece(np.random.default_rng(0), 3, None, ends=(2,))
    data.reward[:, 0] = [1.0, 2.0, 4.0]
    batch = make_learner(baseline=False, normalize_advantage=False).prepare(data)
    np.testing.assert_allclose(batch["advantage"], [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4])


def test_a_baseline_is_taken_off_and_stands_for_a_future_that_was_cut():
    data = piece()
    value = data.outputs["value"][:, 0].astype(np.float64)
    batch = make_learner(normalize_advantage=False).prepare(data)
    want = slow_returns(data, value)
    valid = data.valid[:, 0]
    np.testing.assert_allclose(batch["target"][valid], want[valid], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batch["advantage"][valid], (want - value[:-1])[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("baseline", [False, True])
def test_an_update_is_the_gradient_of_log_probability_times_return(baseline):
    data = piece()
    learner = make_learner(baseline=baseline, normalize_advantage=False, optimizer="sgd", lr=0.1, max_grad_norm=None)
    batch = learner.prepare(data)
    model = copy.deepcopy(learner.model)
    loss = 0.0
    for i in np.flatnonzero(batch["weight"]):
        out = model(torch.from_numpy(batch["obs"][i : i + 1]))
        logp = out["dist"].log_softmax(-1)[0, int(batch["action"][i])]
        loss = loss - logp * float(batch["advantage"][i])
        if baseline:
            loss = loss + 0.5 * 0.5 * (out["value"][0] - float(batch["target"][i])) ** 2
    loss = loss / batch["weight"].sum()
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    want = [p.detach() - 0.1 * (0 if g is None else g) for p, g in zip(parameters, grads, strict=True)]
    update = learner.update(batch, Clock())
    assert learner.steps == 1
    assert set(update.metrics) == {"policy_loss", "value_loss", "entropy", "grad_norm", "explained_variance"}
    for mine, theirs in zip(learner.model.parameters(), want, strict=True):
        np.testing.assert_allclose(mine.detach(), theirs, rtol=1e-4, atol=1e-6)


def test_memory_is_refused_with_what_has_it():
    with pytest.raises(ConfigError, match="PPO or A2C"):
        pg.make_model(pg.Config(), SPEC, ModelConfig(use_lstm=True))


def test_an_update_has_whole_episodes_of_so_many_steps():
    exp = Experiment(
        "PG", "CartPole-v1", use_preset=False, config={"batch_size": 100, "num_envs": 3, "fcnet_hiddens": [8]}
    )
    row = exp.training.iterate()
    assert row["env_steps_total"] >= 1000
    assert 3 <= row["learner_steps_total"] <= 10
    assert 0.5 < row["loss/entropy"] <= 0.6932
    assert set(re.findall(r"`(loss/\w+)` \|", PAGE.read_text())) == {k for k in row if k.startswith("loss/")}
