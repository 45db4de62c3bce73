"""C51, QR-DQN, IQN, Rainbow and PQN: their losses against independent float64 loops, and what their options change."""

import math

import numpy as np
import pytest
import torch

from bray.act import Clock
from bray.algos import c51, iqn, pqn, qrdqn, rainbow
from bray.data.piece import Piece
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

SPEC = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
GAMMA = 0.9


def make(algo, **options):
    torch.manual_seed(0)
    config = algo.Config(**options)
    model = algo.make_model(config, SPEC, SMALL)
    return config, model, algo.Learner(config, SPEC, model, SMALL, seed=0)


def apart(learner):
    """The target differs from the online network, as it does in training."""
    with torch.no_grad():
        for p in learner.target.module.parameters():
            p.add_(0.3 * torch.randn_like(p))


def replayed(n=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(n, 3)).astype(np.float32),
        "next_obs": rng.normal(size=(n, 3)).astype(np.float32),
        "action": rng.integers(0, 4, n),
        "reward": rng.normal(size=n).astype(np.float32),
        "discount": np.where(rng.random(n) < 0.3, 0.0, GAMMA).astype(np.float32),
        "weight": rng.random(n).astype(np.float32),
    }


def outputs(module, obs):
    with torch.no_grad():
        return {k: v.numpy().astype(np.float64) for k, v in module(torch.from_numpy(obs)).items()}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check(learner, batch, expected):
    """One update: the mean loss is that of the loop, and the errors it hands back are the loop's."""
    update = learner.update(batch, Clock())
    np.testing.assert_allclose(update.metrics["loss"], (batch["weight"] * expected).mean(), rtol=1e-4)
    np.testing.assert_allclose(update.priorities, expected, rtol=1e-4)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_c51_loss_equals_an_independent_loop(double, dueling):
    _, model, learner = make(c51, num_atoms=11, v_min=-3.0, v_max=2.0, double=double, dueling=dueling, prioritized=True)
    apart(learner)
    batch, atoms = replayed(), np.linspace(-3.0, 2.0, 11)
    now, online, target = (
        outputs(model, batch["obs"]),
        outputs(model, batch["next_obs"]),
        outputs(learner.target.module, batch["next_obs"]),
    )
    expected = []
    for b in range(16):
        best = (online if double else target)["q"][b].argmax()
        probs, goal = softmax(target["logits"][b, best]), np.zeros(11)
        for p, z in zip(probs, atoms, strict=True):
            place = (min(max(batch["reward"][b] + batch["discount"][b] * z, -3.0), 2.0) + 3.0) / 0.5
            low = min(math.floor(place), 9)
            goal[low] += p * (low + 1 - place)
            goal[low + 1] += p * (place - low)
        expected.append(-(goal * np.log(softmax(now["logits"][b, batch["action"][b]]))).sum())
    np.testing.assert_allclose(now["q"], softmax(now["logits"]) @ atoms, rtol=1e-5)
    check(learner, batch, np.array(expected))


def quantile_loss(theta, tau, goal, kappa=1.0):
    total = 0.0
    for t, fraction in zip(theta, tau, strict=True):
        for g in goal:
            u = g - t
            size = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
            total += abs(fraction - (u < 0)) * size / kappa / len(goal)
    return total


def test_qrdqn_loss_equals_an_independent_loop():
    _, model, learner = make(qrdqn, num_quantiles=5, prioritized=True)
    apart(learner)
    batch = replayed()
    now, online = outputs(model, batch["obs"]), outputs(model, batch["next_obs"])
    target = outputs(learner.target.module, batch["next_obs"])
    tau = (np.arange(5) + 0.5) / 5
    expected = [
        quantile_loss(
            now["quantiles"][b, batch["action"][b]],
            tau,
            batch["reward"][b] + batch["discount"][b] * target["quantiles"][b, online["q"][b].argmax()],
        )
        for b in range(16)
    ]
    np.testing.assert_allclose(now["q"], now["quantiles"].mean(-1), rtol=1e-5)
    check(learner, batch, np.array(expected))


def test_iqn_loss_equals_an_independent_loop():
    """Its fractions come from the learner's random stream, first of all: the same stream gives the same here."""
    _, model, learner = make(iqn, num_fractions=3, acting_fractions=4, prioritized=True, double=False)
    apart(learner)
    batch = replayed()
    tau = np.random.default_rng([0, 1]).random((2, 16, 3), np.float32)
    with torch.no_grad():
        now = model.quantiles(torch.from_numpy(batch["obs"]), torch.from_numpy(tau[0])).numpy()
        after = learner.target.module.quantiles(torch.from_numpy(batch["next_obs"]), torch.from_numpy(tau[1])).numpy()
    expected = []
    for b in range(16):
        best = after[b].mean(-1).argmax()
        goal = batch["reward"][b] + batch["discount"][b] * after[b, best].astype(np.float64)
        expected.append(quantile_loss(now[b, batch["action"][b]].astype(np.float64), tau[0, b], goal))
    check(learner, batch, np.array(expected))


def test_iqn_acts_by_fractions_that_are_drawn_and_greedily_by_the_middles():
    _, model, _ = make(iqn, acting_fractions=4)
    obs = torch.randn(5, 3)
    middles = torch.tensor([[0.125, 0.375, 0.625, 0.875]])
    assert model.draws == {"fractions": (4,)}
    torch.testing.assert_close(model(obs)["q"], model.quantiles(obs, middles).mean(-1))
    drawn = model(obs, {"fractions": torch.tensor([-9.0, 0.0, 9.0, 0.0])})["q"]
    torch.testing.assert_close(
        drawn, model.quantiles(obs, torch.tensor([[0.0, 0.375, 0.75, 0.875]])).mean(-1), atol=1e-4, rtol=1e-4
    )


def test_iqn_that_fears_the_worst_sees_the_low_fractions_alone():
    _, model, _ = make(iqn, acting_fractions=2, risk="cvar", eta=0.1)
    obs = torch.randn(5, 3)
    torch.testing.assert_close(model(obs)["q"], model.quantiles(obs, torch.tensor([[0.025, 0.075]])).mean(-1))


def test_iqn_that_fears_the_worst_learns_the_policy_that_it_follows():
    class Two(torch.nn.Module):
        """Action 0 pays -10 to 14, action 1 always 1."""

        def quantiles(self, obs, tau):
            return torch.stack([24.0 * tau - 10.0, torch.ones_like(tau)], 1)

        def forward(self, obs):
            tau = torch.linspace(0.0, 0.1, 32).expand(len(obs), -1)  # what the lowest tenth is worth
            return {"q": self.quantiles(obs, tau).mean(-1)}

    for double in (False, True):
        _, _, learner = make(iqn, risk="cvar", eta=0.1, double=double)
        learner.model, learner.target.module = Two(), Two()
        batch = {k: torch.as_tensor(x) for k, x in learner.columns(replayed() | {"action": np.ones(16, int)}).items()}
        loss, _, _ = learner.errors(batch | {"reward": torch.zeros(16), "discount": torch.ones(16)}, (), (), ())
        assert (loss == 0).all()  # 1 is what action 1 is worth, and what follows


def test_rainbow_is_all_six_at_once():
    config, model, learner = make(rainbow, num_atoms=5)
    assert (config.double, config.dueling, config.prioritized, config.noisy) == (True, True, True, True)
    assert (config.n_step, config.epsilon, model.atoms) == (3, 0.0, 5)
    assert set(model.draws) == {"noise"}
    obs = torch.randn(2, 3)
    noise = torch.randn(model.draws["noise"])
    assert not torch.equal(model(obs)["q"], model(obs, {"noise": noise})["q"])
    assert learner.update(replayed(), Clock()).priorities.shape == (16,)


def test_pqn_targets_and_loss_equal_an_independent_loop():
    _, model, learner = make(pqn, lambda_=0.7, gamma=GAMMA, epochs=1, minibatches=1)
    rng = np.random.default_rng(3)
    steps, batch = 6, 2
    obs = rng.normal(size=(steps + 1, batch, 3)).astype(np.float32)
    q = outputs(model, obs.reshape(-1, 3))["q"].reshape(steps + 1, batch, 4)
    reward = rng.normal(size=(steps, batch)).astype(np.float32)
    terminated, truncated, valid = (np.zeros((steps, batch), bool) for _ in range(3))
    terminated[2, 0], truncated[3, 1], valid[:] = True, True, True
    valid[3, 0] = valid[4, 1] = False
    action = rng.integers(0, 4, (steps, batch))
    first = np.zeros((steps + 1, batch), bool)
    piece = Piece(
        obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, valid=valid, first=first,
        outputs={"q": q.astype(np.float32)},
    )  # fmt: skip
    target, errors = np.zeros((steps, batch)), []
    for b in range(batch):
        for t in reversed(range(steps)):
            if not valid[t, b]:
                continue
            value = 0.0 if terminated[t, b] else q[t + 1, b].max()
            last = terminated[t, b] or truncated[t, b] or t + 1 == steps
            target[t, b] = reward[t, b] + GAMMA * (value if last else 0.3 * value + 0.7 * target[t + 1, b])
            errors.append(q[t, b, action[t, b]] - target[t, b])
    rows = learner.prepare(piece)
    np.testing.assert_allclose(rows["target"].reshape(steps, batch)[valid], target[valid], rtol=1e-5)
    got = learner.update(rows, Clock()).metrics
    assert got["loss"] == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-4)
    assert got["td_error"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)


def test_bounds_that_do_not_grow_are_refused():
    with pytest.raises(ConfigError, match=r"v_min should be below v_max, got 5.0 and 2.0"):
        c51.Config(v_min=5.0, v_max=2.0)


@pytest.mark.parametrize("algo", [c51, qrdqn, iqn, rainbow, pqn])
def test_a_memory_is_refused(algo):
    with pytest.raises(ConfigError, match="use_lstm=false"):
        algo.make_model(algo.Config(), SPEC, ModelConfig(use_lstm=True))


@pytest.mark.parametrize("algo", [c51, qrdqn, iqn, rainbow])
def test_a_network_of_ones_own_without_a_distribution_is_refused(algo):
    with pytest.raises(ConfigError, match="learns distributions of returns with a head of its own"):
        algo.make_model(algo.Config(), SPEC, ModelConfig(custom_model=torch.nn.Linear(3, 4)))


@pytest.mark.parametrize(("risk", "eta"), [("cvar", 0.0), ("cvar", 1.5), ("cpw", 0.0)])
def test_attitudes_to_risk_that_mean_nothing_are_refused(risk, eta):
    with pytest.raises(ConfigError, match=f"risk={risk} needs an eta above 0.*got {eta}"):
        iqn.Config(risk=risk, eta=eta)
