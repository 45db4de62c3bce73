"""IMPALA and APPO: their updates against an independent float64 loop, and what they learn from."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import bray
from bray.act import Clock
from bray.algos import appo, impala, ppo
from bray.data import Piece
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

DISCRETE = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
MEMORY = ModelConfig(fcnet_hiddens=(8,), use_lstm=True, lstm_cell_size=4, max_seq_len=3)
T, B, GAMMA, LAMBDA = 6, 3, 0.9, 0.8


def make(algo, model_config=SMALL, **options):
    torch.manual_seed(0)
    config = algo.Config(gamma=GAMMA, lambda_=LAMBDA, rho_clip=0.9, c_clip=0.7, **options)
    model = algo.make_model(config, DISCRETE, model_config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model, algo.Learner(config, DISCRETE, model, model_config, seed=0, record=False)


def piece(state=None, every=1):
    """One episode terminates in it, one is cut, one has a row that waits, one goes on."""
    rng = np.random.default_rng(3)
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    valid[:] = True
    terminated[2, 0] = truncated[3, 1] = True
    valid[3, 0] = valid[4, 1] = valid[1, 2] = False
    first = np.zeros((T + 1, B), bool)
    first[4, 0] = first[5, 1] = True
    return Piece(
        obs=rng.normal(size=(T + 1, B, 3)).astype(np.float32),
        action=rng.integers(0, 4, (T, B)),
        reward=rng.normal(size=(T, B)).astype(np.float32) * valid,
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        first=first,
        extras={"logp": rng.uniform(-3.0, -0.5, (T, B)).astype(np.float32)},
        state=state,
        state_every=every,
    )


def outputs(model, data, sequences=1):
    """Log probabilities of all actions `[T + 1, B, 4]` and values, row by row; float64 behind the network. A piece is
    cut into `sequences` of equal length, and each begins with its kept state."""
    twin = copy.deepcopy(model)
    rows, state = [], None
    if data.state is not None:
        state = {k: torch.from_numpy(x[0]) for k, x in data.state.items()}
    for t in range(T + 1):
        if state is not None and t < T and t % (T // sequences) == 0:
            state = {k: torch.from_numpy(x[t // (T // sequences)]) for k, x in data.state.items()}
        obs = torch.from_numpy(data.obs[t])
        if state is None:
            out = twin(obs)
        else:
            alive = torch.from_numpy(~data.first[t]).float().unsqueeze(-1)
            out = twin(obs, {k: x * alive for k, x in state.items()})
            state = out["state"]
        rows.append((out["dist"].double().log_softmax(-1), out["value"].double()))
    return twin, torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


def slow_vtrace(data, value, ratio):
    """Targets and r + gamma vs' - V, row by row as the paper has them; a row that is not valid passes on what
    follows."""
    target, gain = np.zeros((T, B)), np.zeros((T, B))
    for b in range(B):
        excess = 0.0
        for t in reversed(range(T)):
            if data.valid[t, b]:
                future = 0.0 if data.terminated[t, b] else GAMMA
                if data.terminated[t, b] or data.truncated[t, b]:
                    excess = 0.0
                r, v, after = float(data.reward[t, b]), value[t, b], value[t + 1, b]
                gain[t, b] = r + future * (after + excess) - v
                delta = min(0.9, ratio[t, b]) * (r + future * after - v)
                excess = delta + GAMMA * LAMBDA * min(0.7, ratio[t, b]) * excess
            target[t, b] = value[t, b] + excess
    return target, gain


def states():
    rng = np.random.default_rng(4)
    return {k: rng.normal(size=(2, B, 4)).astype(np.float32) for k in ("h", "c")}


@pytest.mark.parametrize("memory", [False, True])
def test_impalas_update_equals_an_independent_loop(memory):
    model, learner = make(impala, MEMORY if memory else SMALL, max_grad_norm=None)
    data = piece(*((states(), 3) if memory else ()))
    twin, logs, value = outputs(model, data)
    rows = [(t, b) for t in range(T) for b in range(B) if data.valid[t, b]]
    logp = {(t, b): logs[t, b, data.action[t, b]] for t, b in rows}
    ratio = np.zeros((T, B))
    for t, b in rows:
        ratio[t, b] = np.exp(float(logp[t, b].detach()) - float(data.extras["logp"][t, b]))
    target, gain = slow_vtrace(data, value.detach().numpy(), ratio)
    policy = sum(-logp[i] * min(0.9, ratio[i]) * gain[i] for i in rows) / len(rows)
    error = sum(0.5 * (value[i] - target[i]) ** 2 for i in rows) / len(rows)
    entropy = sum(-(logs[i].exp() * logs[i]).sum() for i in rows) / len(rows)
    loss = policy + 0.5 * error - 0.01 * entropy
    gradient = torch.autograd.grad(loss, [p for p in twin.parameters() if p.requires_grad], allow_unused=True)
    norm = np.sqrt(sum(float(g.square().sum()) for g in gradient if g is not None))
    want = [float(x.detach()) for x in (policy, error, entropy)]
    want += [np.mean([min(0.9, ratio[i]) for i in rows]), norm]
    got = learner.update(learner.prepare(data), Clock())
    assert got.names == ("policy_loss", "value_loss", "entropy", "rho", "grad_norm")
    np.testing.assert_allclose(got.values.numpy(), want, rtol=1e-4)
    assert learner.steps == 1


@pytest.mark.parametrize("memory", [False, True])
def test_appos_rows_equal_an_independent_loop(memory):
    model, learner = make(appo, MEMORY if memory else SMALL, normalize_advantage=False)
    data = piece(*((states(), 3) if memory else ()))
    _, logs, value = outputs(model, data, sequences=2)
    logp = np.array([[float(logs[t, b, data.action[t, b]].detach()) for b in range(B)] for t in range(T)])
    ratio = np.exp(logp - data.extras["logp"])
    target, gain = slow_vtrace(data, value.detach().numpy(), ratio)
    weighed = gain * np.minimum(ratio, learner.config.rho_clip)
    rows = learner.rows_to_learn(data)
    order = [(t, b) for t in range(T) for b in range(B)]
    if memory:  # sequences of three rows side by side: [L, S]
        order = [(3 * s + t, b) for t in range(3) for s in range(2) for b in range(B)]
    flat = {k: rows[k].reshape(-1) for k in ("advantage", "target", "logp", "value", "weight")}
    for k, want in (("advantage", weighed), ("target", target), ("logp", logp), ("value", value.detach())):
        for i, at in enumerate(order):
            if data.valid[at]:
                assert flat[k][i] == pytest.approx(float(want[at]), rel=1e-4, abs=1e-5)
    assert flat["weight"].tolist() == [float(data.valid[at]) for at in order]


def test_an_update_of_appo_begins_at_the_newest_policy_with_a_memory_too():
    _, learner = make(appo, MEMORY, epochs=1, minibatches=1)
    got = learner.update(learner.prepare(piece(states(), 3)), Clock())  # one gradient step: what it tells is of before
    told = dict(zip(got.names, got.values.tolist(), strict=True))
    assert told["kl"] == pytest.approx(0.0, abs=1e-7)
    assert told["clip_fraction"] == 0.0


def test_lent_pieces_are_copied_and_batches_that_were_learnt_from_are_written_over():
    experience = appo.experience(appo.Config(rollout_length=T, batch_envs=2 * B), DISCRETE, SMALL)
    seen = []
    for number in range(6):
        lent = replace(piece(), version=number, lent=True)
        lent.reward[:] = number
        experience.add(lent)
        lent.reward[:] = -1.0  # as its owner does when it plays on
        if number % 2:
            data = experience.next(Clock()).data
            assert not data.lent
            assert data.reward[:, :B].tolist() == [[number - 1.0] * B] * T
            assert data.reward[:, B:].tolist() == [[number] * B] * T
            assert data.version[0].tolist() == [number - 1] * B + [number] * B
            seen.append(data)
    assert seen[0] is not seen[1]  # the last one still holds
    assert seen[2] is seen[0]


def test_appo_on_its_own_policy_is_ppo_with_another_advantage():
    """Where the policy that acted is the newest, the ratios are one, and with lambda 1 V-trace is GAE."""
    plain = appo.Config(gamma=GAMMA, lambda_=1.0, normalize_advantage=False)
    torch.manual_seed(0)
    model = appo.make_model(plain, DISCRETE, SMALL)
    learner = appo.Learner(plain, DISCRETE, model, SMALL, record=False)
    data = piece()
    logp, value = learner.evaluate(learner.on_device(data))
    data = replace(data, extras={"logp": logp}, outputs={"value": value})
    got = learner.rows_to_learn(data)
    want = ppo.Learner(
        ppo.Config(gamma=GAMMA, lambda_=1.0, normalize_advantage=False), DISCRETE, model, SMALL, record=False
    ).rows_to_learn(data)
    alive = want["weight"] > 0
    for k in ("advantage", "target", "value", "logp"):
        np.testing.assert_allclose(got[k][alive], want[k][alive], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algo", [impala, appo])
def test_batches_have_the_columns_that_were_asked_for(algo):
    experience = algo.experience(algo.Config(rollout_length=T, batch_envs=2 * B), DISCRETE, SMALL)
    assert experience.asynchronous
    experience.add(piece())
    assert experience.next(Clock()) is None
    experience.add(replace(piece(), version=7))
    batch = experience.next(Clock())
    assert batch.data.reward.shape == (T, 2 * B)
    assert batch.data.version[:, :B].max() == 0
    assert batch.data.version[:, B:].min() == 7
    experience.add(piece())
    experience.forget()
    experience.add(piece())
    assert experience.next(Clock()) is None


def test_what_appo_refuses():
    with pytest.raises(ConfigError, match="recompute_advantages"):
        make(appo, recompute_advantages=True)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
def test_cartpole_is_solved_with_two_workers(run, tmp_path):
    exp = bray.Experiment(run, "CartPole-v1", path=tmp_path / "run", seed=7, eval_freq=10)
    rows = list(exp.train(stop={"eval/return_mean": 475, "env_steps_total": 300_000}))
    assert rows[-1]["eval/return_mean"] >= 475
    assert rows[-1]["workers/policy_lag"] > 0
    assert not exp.exact
    exp.close()
