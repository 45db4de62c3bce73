"""What remembers: R2D2's loss and the cells against independent float64 loops, and what their options change and
refuse."""

import copy
import dataclasses
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

from bray.act import Clock
from bray.algos import dqn, ppo, pqn, r2d2
from bray.data import Sequences
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.nn import ModelConfig, Recurrent, make_encoder, register_loss_term
from bray.spec import EnvSpec, Space

BOX = Space("box", (3,), "float32")
SPEC = EnvSpec("test", BOX, Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(use_lstm=True, lstm_cell_size=5, fcnet_hiddens=(6,))
GAMMA, BURN_IN, LENGTH, B = 0.9, 2, 7, 6


def sequences(seed=0):
    """What `Sequences` hands out: episodes that end inside, one way or the other, each followed by a dead row."""
    rng, rows = np.random.default_rng(seed), BURN_IN + LENGTH
    terminated, truncated, valid = (np.zeros((rows, B), bool) for _ in range(3))
    first = np.zeros((rows + 1, B), bool)
    valid[:] = True
    for b, t, end in (
        (0, 3, terminated),
        (1, 4, truncated),
        (2, 0, terminated),
        (3, rows - 1, terminated),
        (4, rows - 1, truncated),
    ):
        end[t, b] = True
        if t + 1 < rows:
            valid[t + 1, b] = False
        if t + 2 <= rows:
            first[t + 2, b] = True
    return {
        "obs": rng.normal(size=(rows + 1, B, 3)).astype(np.float32),
        "action": rng.integers(0, 4, (rows, B)),
        "reward": 20 * rng.normal(size=(rows, B)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
        "first": first,
        "weight": rng.random(B).astype(np.float32),
        "state": {k: rng.normal(size=(B, 5)).astype(np.float32) for k in ("h", "c")},
    }


def values(model, batch, b):
    """Action values of one sequence, row by row."""
    q = []
    state = {k: torch.from_numpy(v[b : b + 1]) for k, v in batch["state"].items()}
    for t in range(len(batch["obs"])):
        if batch["first"][t, b]:
            state = {k: torch.zeros_like(v) for k, v in state.items()}
        with torch.no_grad():
            out = model(torch.from_numpy(batch["obs"][t, b : b + 1]), state)
        state = out["state"]
        q.append(out["q"][0].double().numpy())
    return np.array(q)


def h(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def h_inverse(y):
    low, high = -1e7, 1e7
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < y else (low, middle)
    return low


@pytest.mark.parametrize(("double", "rescale", "n_step"), [(True, True, 3), (False, False, 1), (True, False, 20)])
def test_r2d2_loss_and_priority_equal_an_independent_loop(double, rescale, n_step):
    torch.manual_seed(0)
    config = r2d2.Config(
        sequence_length=LENGTH, burn_in=BURN_IN, double=double, rescale=rescale, n_step=n_step, gamma=GAMMA, eta=0.7
    )
    model = r2d2.make_model(config, SPEC, SMALL)
    learner = r2d2.Learner(config, SPEC, model, SMALL, seed=0, record=False)
    with torch.no_grad():
        for p in learner.target.module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    batch = sequences()
    online, target = copy.deepcopy(model), copy.deepcopy(learner.target.module)
    expected, priorities = [], []
    for b in range(B):
        q, q_target = values(online, batch, b), values(target, batch, b)
        errors = []
        for t in range(BURN_IN, BURN_IN + LENGTH):
            if not batch["valid"][t, b]:
                continue
            total, factor, at, terminated = 0.0, 1.0, t, False
            while at < min(t + n_step, BURN_IN + LENGTH):
                total, factor, at = total + factor * float(batch["reward"][at, b]), factor * GAMMA, at + 1
                if batch["terminated"][at - 1, b] or batch["truncated"][at - 1, b]:
                    terminated = bool(batch["terminated"][at - 1, b])
                    break
            future = q_target[at, (q if double else q_target)[at].argmax()]
            future = h_inverse(future) if rescale else future
            goal = total + (0.0 if terminated else factor * future)
            errors.append(abs(q[t, batch["action"][t, b]] - (h(goal) if rescale else goal)))
        expected.append(np.mean(np.square(errors) / 2))
        priorities.append(0.7 * max(errors) + 0.3 * np.mean(errors))
    update = learner.update(learner.prepare(batch), Clock())
    np.testing.assert_allclose(update.metrics["loss"], (batch["weight"] * expected).mean(), rtol=1e-4)
    np.testing.assert_allclose(update.priorities, priorities, rtol=1e-4)


@pytest.mark.parametrize("burn_in", [BURN_IN, 0])
def test_a_loss_term_sees_the_rows_that_r2d2_learns_from(burn_in):
    def spread(batch, outputs, model):
        assert all(
            batch[k].shape[:2] == outputs["q"].shape[:2] for k in ("obs", "action", "reward", "discount", "after")
        )
        return outputs["q"].std(-1)

    length = BURN_IN + LENGTH - burn_in
    model_config = dataclasses.replace(SMALL, loss_terms={"spread": 0.5})
    register_loss_term("spread", spread, replace=True)
    config = r2d2.Config(sequence_length=length, burn_in=burn_in)
    model = r2d2.make_model(config, SPEC, model_config)
    before = copy.deepcopy(model)
    learner = r2d2.Learner(config, SPEC, model, model_config, record=False)
    batch = sequences()
    learner.update(learner.prepare(batch), Clock())
    q = np.stack([values(before, batch, b) for b in range(B)], 1)[burn_in:-1]
    weight = (batch["valid"] * batch["weight"])[burn_in:]
    want = (weight * q.std(-1, ddof=1)).sum() / weight.sum()
    assert learner.numbers() == {"spread": pytest.approx(want, rel=1e-4)}


def test_burn_in_brings_the_memory_up_to_date_and_is_not_learnt():
    config = r2d2.Config(sequence_length=LENGTH, burn_in=BURN_IN)
    model = r2d2.make_model(config, SPEC, SMALL)
    learner = r2d2.Learner(config, SPEC, model, SMALL, record=False)

    def loss(change):
        batch = sequences()
        change(batch)
        return learner.errors(
            {
                k: torch.from_numpy(v) if k != "state" else {n: torch.from_numpy(x) for n, x in v.items()}
                for k, v in learner.columns(learner.prepare(batch)).items()
            },
            (),
            (),
            (),
        )[0].tolist()

    before = loss(lambda batch: None)
    assert loss(lambda batch: batch["reward"].__setitem__(slice(BURN_IN), 7.0)) == before
    assert loss(lambda batch: batch["obs"].__setitem__((slice(BURN_IN), 5), 7.0))[5] != before[5]
    assert loss(lambda batch: batch["state"]["h"].__setitem__(5, 7.0))[5] != before[5]


def test_r2d2_replays_sequences_by_its_keys():
    config = r2d2.Config(sequence_length=9, burn_in=3, batch_size=5, replay_size=70)
    replay = r2d2.experience(config, SPEC, SMALL)
    assert isinstance(replay, Sequences)
    assert (replay.length, replay.burn_in, replay.batch_size, replay.size, replay.prioritized) == (9, 3, 5, 70, True)


def test_what_r2d2_cannot_do_is_said():
    with pytest.raises(ConfigError, match="R2D2 is DQN with a memory: set use_lstm=true, or use DQN"):
        r2d2.make_model(r2d2.Config(), SPEC, ModelConfig())
    for key in ("max_use", "max_staleness"):
        with pytest.raises(ConfigError, match=f"{key} .*R2D2 replays sequences"):
            r2d2.Config(**{key: 3})
    with pytest.raises(ConfigError, match="use R2D2 or PPO"):
        dqn.make_model(dqn.Config(), SPEC, SMALL)


# --- cells ------------------------------------------------------------------------------------------------------------


def test_an_lstm_begins_by_remembering():
    for norm in (False, True):
        cell = Recurrent(make_encoder(BOX, ModelConfig()), "lstm", 8, norm)
        state = {k: torch.full_like(v, 0.5) for k, v in cell.initial_state(1).items()}
        bias = (cell.norm_input if norm else cell.project).bias
        assert bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
        assert (cell(torch.zeros(1, 3), state)[1]["c"].mean() > 0.25).item()


def normed(x, gain, bias=0.0):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * gain + bias


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_cells_with_layer_norm_equal_an_independent_float64_cell(cell):
    torch.manual_seed(0)
    n, encoder = 5, make_encoder(BOX, ModelConfig(fcnet_hiddens=(7,)))
    ours = Recurrent(encoder, cell, n, layer_norm=True)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    w = {k: v.detach().double().numpy() for k, v in ours.named_parameters()}
    obs = torch.randn(4, 3)
    state = {k: torch.randn_like(v) for k, v in ours.initial_state(4).items()}
    out, new = ours(obs, state)
    unrolled, last = ours.unroll(obs[None], state, torch.zeros(1, 4, dtype=torch.bool))
    torch.testing.assert_close(unrolled[0], out)
    features = encoder(obs).detach().double().numpy()
    for b in range(4):
        x = normed(w["project.weight"] @ features[b] + w["project.bias"], w["norm_input.weight"], w["norm_input.bias"])
        before = state["h"][b].double().numpy()
        hidden = normed(before @ w["hidden"], w["norm_hidden.weight"])
        if cell == "lstm":
            i, f, o, g = np.split(x + hidden, 4)
            c = sigmoid(f) * state["c"][b].double().numpy() + sigmoid(i) * np.tanh(g)
            after = sigmoid(o) * np.tanh(normed(c, w["norm_cell.weight"], w["norm_cell.bias"]))
            np.testing.assert_allclose(new["c"][b].detach(), c, rtol=1e-5, atol=1e-6)
        else:
            r, z = sigmoid(x[:n] + hidden[:n]), sigmoid(x[n : 2 * n] + hidden[n : 2 * n])
            g = np.tanh(x[2 * n :] + r * (hidden[2 * n :] + w["hidden_bias"]))
            after = (1 - z) * g + z * before
        np.testing.assert_allclose(out[b].detach(), after, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(last["h"][b].detach(), after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("max_seq_len", "rollout_length", "model", "said"),
    [
        (20, 128, {"use_lstm": True}, "max_seq_len=20 does not divide rollout_length=128.*sequences of 16 steps"),
        (20, 128, {}, None),
        (20, 16, {"use_lstm": True}, None),  # a rollout is shorter: whole
        (32, 128, {"use_lstm": True}, None),
    ],
)
def test_sequences_shorter_than_asked_for_are_said(max_seq_len, rollout_length, model, said, caplog):
    with caplog.at_level(logging.WARNING, "bray"):
        config = ModelConfig(max_seq_len=max_seq_len, **model)
        ppo.experience(ppo.Config(rollout_length=rollout_length), SPEC, config)
    assert len(caplog.messages) == (said is not None)
    assert said is None or re.search(said, caplog.messages[0])


# --- networks of one's own --------------------------------------------------------------------------------------------


class Passing(nn.Module):
    """As Tianshou's networks: a state goes in and comes out unused."""

    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.layer = nn.Linear(obs_dim, act_dim)

    def forward(self, obs, state=None, info=None):
        return self.layer(obs), state


class Remembering(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.rnn, self.head = nn.GRU(obs_dim, 8), nn.Linear(8, act_dim)

    def forward(self, x, state):
        out, state = self.rnn(x.unsqueeze(0), state)
        return self.head(out[0]), state


@pytest.mark.parametrize(("algo", "output"), [(dqn, "q"), (pqn, "q"), (ppo, "dist")])
def test_a_state_that_is_only_passed_on_is_no_memory(algo, output):
    model = algo.make_model(algo.Config(), SPEC, ModelConfig(custom_model=Passing))
    assert model(torch.zeros(2, 3))[output].shape == (2, 4)


def test_r2d2_trains_a_memory_of_ones_own(tmp_path):
    exp = Experiment(
        run="R2D2",
        env="CartPole-v1",
        path=tmp_path / "run",
        use_preset=False,
        custom_model=Remembering,
        record=False,
        use_lstm=False,
        dueling=False,
        learning_starts=100,
        batch_size=4,
        sequence_length=6,
        burn_in=2,
        train_every=100,
    )
    rows = list(exp.train({"env_steps_total": 1000}))
    exp.close()
    assert rows[-1]["learner_steps_total"] >= 8
    with pytest.raises(ConfigError, match="should take and return a state; or use DQN"):
        r2d2.make_model(r2d2.Config(dueling=False), SPEC, ModelConfig(custom_model=Passing))
    with pytest.raises(ConfigError, match=r"cannot train a memory \(R2D2, PPO and A2C can\)"):
        dqn.make_model(dqn.Config(), SPEC, ModelConfig(custom_model=Remembering))


@pytest.mark.parametrize("option", ["dueling", "noisy"])
def test_a_network_of_ones_own_has_no_head_of_ours(option):
    with pytest.raises(ConfigError, match=f"custom_model and {option}=true exclude each other"):
        dqn.make_model(dqn.Config(**{option: True}), SPEC, ModelConfig(custom_model=Passing))
