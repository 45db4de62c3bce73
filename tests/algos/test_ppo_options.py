"""Options of PPO that are off by default: value normalisation, advantages computed anew, a KL penalty, a magnet.
Against plain float64 loops."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sources_for_tests import make_piece

from bray.act import SAMPLE, Clock
from bray.algos import ppo
from bray.envs.agent_games import Matrix
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.experiment.exploitability import probabilities
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space
from tests.rl.test_rl import slow_gae

SPEC = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
GAMMA, LAMBDA = 0.9, 0.8
ROWS = 12


def make_learner(spec=SPEC, **options):
    torch.manual_seed(0)
    usual = {
        "minibatches": 1,
        "epochs": 1,
        "lr": 0.05,
        "normalize_advantage": False,
        "entropy_coef": 0.0,
        "max_grad_norm": None,
    }
    config = ppo.Config(gamma=GAMMA, lambda_=LAMBDA, **usual | options)
    model = ppo.make_model(config, spec, SMALL)
    return ppo.Learner(config, spec, model, SMALL, record=False)


def piece(seed=0, scale=1.0):
    out = make_piece(np.random.default_rng(seed), ROWS, None, ends=(3, 8))
    out.reward *= np.float32(scale)
    return out


def gae(data, value):
    flags = (data.terminated, data.truncated, data.valid)
    return slow_gae(value.astype(np.float64), data.reward.astype(np.float64), *flags, GAMMA, LAMBDA)[:, 0]


def recorded(learner):
    """What each gradient step gets, before it is taken."""
    seen, step = [], learner.bind
    learner.bind = lambda batch: seen.append(batch) or step(batch)
    return seen


# --- value normalisation ----------------------------------------------------------------------------------------------


def test_values_are_put_back_into_units_of_reward():
    learner, known, mean, deviation = make_learner(normalize_value=True), np.zeros(0), 0.0, 1.0
    for data in (piece(0, 100.0), piece(1, 100.0)):
        valid, raw = data.valid[:, 0], data.outputs["value"].astype(np.float64) * deviation + mean
        batch, advantage = learner.prepare(data), gae(data, raw)
        target = advantage + raw[:-1, 0]
        np.testing.assert_allclose(batch["advantage"][valid], advantage[valid], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(batch["target"][valid], target[valid], rtol=1e-4, atol=1e-3)
        learner.update(batch, Clock())
        known = np.concatenate([known, target[valid]])
        mean, deviation = known.mean(), known.std()
        assert float(learner.returns.mean) == pytest.approx(mean, rel=1e-4)
        assert float(learner.returns.var) == pytest.approx(deviation**2, rel=1e-4)


def test_the_value_loss_is_in_units_of_the_network():
    learner, data = make_learner(normalize_value=True), piece(0, 100.0)
    batch, valid = learner.prepare(data), data.valid[:, 0]
    with torch.no_grad():
        value = learner.model(torch.from_numpy(batch["obs"]))["value"].double().numpy()
    target = batch["target"].astype(np.float64)
    mean, deviation = target[valid].mean(), target[valid].std()
    want = 0.5 * np.mean((value - (target - mean) / deviation)[valid] ** 2)
    assert learner.update(batch, Clock()).metrics["value_loss"] == pytest.approx(want, rel=1e-4)


def test_large_rewards_are_learnt_as_small_ones():
    """Rewards of 1000: the value of a state that is never left, in units of reward, after 20 updates."""

    def error(**options):
        learner = make_learner(epochs=4, lr=1e-2, **options)
        data = piece(0, 0.0)
        data.reward[data.valid] = 1000.0
        for _ in range(20):
            data.outputs["value"] = learner.with_new_values(data).outputs["value"]
            batch = learner.prepare(data)
            learner.update(batch, Clock())
        return np.abs(batch["value"] - batch["target"])[data.valid[:, 0]].mean() / 1000.0

    assert error(normalize_value=True) < 0.5 * error()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_clipped_value_begins_where_the_network_is(recompute):
    """Statistics that move are no step of the value function: nothing is clipped before the first one, whatever the
    scale of returns."""
    values = []
    for clip_value in (None, 1e-3):
        learner = make_learner(
            normalize_value=True, clip_value=clip_value, recompute_advantages=recompute, lr=1e-9, epochs=2
        )
        values.append([])
        for seed in range(3):
            data = piece(seed, 100.0)
            data.outputs["value"] = learner.with_new_values(data).outputs["value"]
            values[-1].append(learner.update(learner.prepare(data), Clock()).metrics["value_loss"])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-4)


# --- advantages computed anew -----------------------------------------------------------------------------------------


def test_advantages_of_later_epochs_are_those_of_the_newer_weights():
    learner, data = make_learner(recompute_advantages=True, epochs=3), piece()
    seen, values = recorded(learner), []
    fresh = learner.with_new_values
    learner.with_new_values = lambda p: (values.append(fresh(p)), values[-1])[1]
    learner.update(learner.prepare(data), Clock())
    assert len(seen) == 3
    valid = data.valid[:, 0]
    for batch, value in zip(seen, [data.outputs["value"], *(v.outputs["value"] for v in values)], strict=True):
        want = gae(data, value)
        np.testing.assert_allclose(batch["advantage"][valid], want[valid], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch["target"][valid], (want + value[:-1, 0])[valid], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(batch["logp"], data.extras["logp"][:, 0])
    with torch.no_grad():
        now = learner.model(torch.from_numpy(data.obs[:, 0]))["value"].numpy()
    assert not np.allclose(now, values[-1].outputs["value"][:, 0])  # the third epoch has moved them
    assert not np.allclose(values[0].outputs["value"], values[1].outputs["value"])


def test_they_are_the_first_ones_without_it():
    learner, data = make_learner(epochs=3), piece()
    seen = recorded(learner)
    learner.update(learner.prepare(data), Clock())
    assert len(seen) == 1


def test_it_is_refused_with_memory():
    with pytest.raises(ConfigError, match=r"recompute_advantages=true does not go with a memory \(use_lstm=true, "):
        Experiment("PPO", "CartPole-v1", config={"recompute_advantages": True, "use_lstm": True}).training.iterate()


# --- KL penalty -------------------------------------------------------------------------------------------------------


def test_the_penalty_joins_the_gradient():
    options = {"kl_coef": 0.7, "value_coef": 0.0, "clip": 1e6}
    learner, data = make_learner(**options), piece()
    batch = learner.prepare(data)
    model = copy.deepcopy(learner.model)
    loss = 0.0
    for i in np.flatnonzero(batch["weight"]):
        logp = model(torch.from_numpy(batch["obs"][i : i + 1]))["dist"].log_softmax(-1)[0, int(batch["action"][i])]
        log_ratio = logp - float(batch["logp"][i])
        loss = loss - log_ratio.exp() * float(batch["advantage"][i]) + 0.7 * (log_ratio.exp() - 1 - log_ratio)
    loss = loss / batch["weight"].sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    norm = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
    metrics = learner.update(batch, Clock()).metrics
    assert metrics["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["kl_coef"] == pytest.approx(0.7)


@pytest.mark.parametrize(("aim", "after"), [(1e-9, 1.4), (1e9, 0.35)])
def test_its_weight_doubles_or_halves(aim, after):
    learner = make_learner(kl_coef=0.7, kl_aim=aim, epochs=2)
    learner.update(learner.prepare(piece()), Clock())
    assert float(learner.kl_coef) == pytest.approx(after)
    again = make_learner(kl_coef=0.7, kl_aim=aim, epochs=2)
    again.load_state_dict(learner.state_dict())
    assert float(again.kl_coef) == pytest.approx(after)


def test_its_weight_stays_where_the_kl_is_as_it_should_be():
    learner = make_learner(epochs=1)
    kl = learner.update(learner.prepare(piece()), Clock()).metrics["kl"]
    learner = make_learner(kl_coef=1e-9, kl_aim=kl, epochs=1)
    learner.update(learner.prepare(piece()), Clock())
    assert float(learner.kl_coef) == pytest.approx(1e-9)


@pytest.mark.optimizes
def test_all_of_them_train_together_recorded():
    options = {
        "kl_coef": 0.1,
        "normalize_value": True,
        "recompute_advantages": True,
        "rollout_length": 32,
        "num_envs": 4,
        "epochs": 2,
    }
    exp = Experiment("PPO", "CartPole-v1", use_preset=False, config=options)
    rows = [exp.training.iterate() for _ in range(4)]
    assert all(np.isfinite(row["loss/value_loss"]) for row in rows)
    assert exp.training.learner.is_recorded
    assert len({row["loss/kl_coef"] for row in rows}) > 1


# --- a magnet ---------------------------------------------------------------------------------------------------------


def legal_piece(seed=0):
    """With masks: of four choices the first is always legal."""
    data = piece(seed)
    mask = np.random.default_rng(seed).random((ROWS + 1, 1, 4)) < 0.6
    mask[..., 0] = True
    np.put_along_axis(mask[:-1], data.action[..., None], True, -1)
    data.obs = {"obs": data.obs, "action_mask": mask}
    return data


MASKED = EnvSpec(
    "test",
    Space.from_gym(
        spaces.Dict({"obs": spaces.Box(-np.inf, np.inf, (3,)), "action_mask": spaces.Box(0, 1, (4,), np.int8)})
    ),
    Space("discrete", n=(4,), start=(0,)),
)


@pytest.mark.parametrize("magnet", ["uniform", "slow", "start"])
def test_the_magnet_joins_the_gradient(magnet):
    options = {"magnet_coef": 0.7, "magnet": magnet, "value_coef": 0.0, "clip": 1e6, "magnet_tau": 0.25}
    learner = make_learner(spec=MASKED, **options)
    with torch.no_grad():
        for weights in learner.model.parameters():  # weights from elsewhere
            weights += torch.randn_like(weights)
    learner.start_with_model()
    copied = copy.deepcopy(learner.model)
    for seed in range(3):  # in the first update the copy is the policy itself
        batch = learner.prepare(legal_piece(seed))
        model, loss, total = copy.deepcopy(learner.model), 0.0, 0.0
        for i in np.flatnonzero(batch["weight"]):
            seen = {"obs": torch.from_numpy(batch["obs"]["obs"][i : i + 1])}
            legal = np.flatnonzero(batch["mask"][i])
            with torch.no_grad():
                other = copied(seen)["dist"][0].double()
            logits = model(seen)["dist"][0].double()
            p = [logits[k].exp() / sum(logits[j].exp() for j in legal) for k in legal]
            q = [other[k].exp() / sum(other[j].exp() for j in legal) for k in legal]
            if magnet == "uniform":
                q = [torch.tensor(1.0 / len(legal))] * len(legal)
            kl = sum(x * (x.log() - y.log()) for x, y in zip(p, q, strict=True))
            ratio = p[list(legal).index(int(batch["action"][i]))] / np.exp(float(batch["logp"][i]))
            loss, total = loss - ratio * float(batch["advantage"][i]) + 0.7 * kl, total + float(kl.detach())
        loss = loss / batch["weight"].sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        norm = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
        metrics = learner.update(batch, Clock()).metrics
        assert metrics["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert metrics["magnet_kl"] == pytest.approx(total / batch["weight"].sum(), rel=1e-3, abs=1e-7)
        with torch.no_grad():
            for mine, its in zip(copied.parameters(), learner.model.parameters(), strict=True):
                mine.lerp_(its, 0.25 if magnet == "slow" else 0.0)
    assert metrics["magnet_kl"] > 0.0


def test_a_uniform_magnet_has_the_gradient_of_an_entropy_bonus():
    """KL(pi, uniform) is ln n less the entropy."""
    after = []
    for options in ({"magnet_coef": 0.3}, {"entropy_coef": 0.3}):
        learner = make_learner(spec=MASKED, **options)
        for seed in range(3):
            learner.update(learner.prepare(legal_piece(seed)), Clock())
        after.append(learner.model.state_dict())
    for name, weights in after[0].items():
        torch.testing.assert_close(weights, after[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("magnet", ["slow", "start"])
def test_the_magnet_follows_its_schedule_and_is_saved(magnet):
    schedule = {"kind": "linear", "start": 1.0, "end": 0.0, "steps": 100}
    learner = make_learner(magnet_coef=schedule, magnet=magnet, magnet_tau=0.5)
    learner.start_with_model()
    for step in (0, 50):
        learner.update(learner.prepare(piece(step)), Clock(env_steps=step))
        assert learner.numbers() == {"magnet_coef": 1.0 - step / 100}
    again = make_learner(magnet_coef=schedule, magnet=magnet, magnet_tau=0.5)
    again.load_state_dict(learner.state_dict())
    again.model.load_state_dict(learner.model.state_dict())
    for one in (learner, again):
        one.update(one.prepare(piece(7)), Clock(env_steps=70))
    for name, weights in learner.model.state_dict().items():
        assert torch.equal(weights, again.model.state_dict()[name])


@pytest.mark.parametrize("magnet", ["slow", "start"])
def test_a_copy_as_magnet_is_refused_with_memory(magnet):
    config = {"magnet_coef": 0.1, "magnet": magnet, "use_lstm": True}
    with pytest.raises(ConfigError, match=rf"magnet={magnet} does not go with a memory.*use magnet=uniform"):
        Experiment("PPO", "CartPole-v1", config=config).training.iterate()


def test_a_magnet_at_the_start_needs_one():
    config = {"magnet_coef": 0.1, "magnet": "start", "num_envs": 2, "rollout_length": 8, "minibatches": 1}
    with Experiment("PPO", "CartPole-v1", use_preset=False, config=config) as exp:
        with pytest.raises(ConfigError, match=r"this one starts with none: name it with --init-from RUN_DIR"):
            exp.training.iterate()


def test_self_play_goes_in_circles_without_it():
    """Rock, paper, scissors with an equilibrium of 1/4, 1/2, 1/4: with a magnet the last policies are near it, without
    one they are elsewhere in turn."""
    config = {"num_envs": 64, "rollout_length": 8, "epochs": 4, "minibatches": 1, "fcnet_hiddens": [16]}
    config |= {"lr": {"kind": "linear", "start": 2e-3, "end": 2e-4, "steps": 60_000}, "entropy_coef": 0.0}
    drawn = {"magnet_coef": 0.5, "magnet": "slow", "magnet_tau": 0.05}
    away = {}
    for name, options in (("circles", {}), ("spiral", drawn)):
        with Experiment("PPO", Matrix, use_preset=False, config={**config, **options}) as exp:
            both, away[name] = np.eye(2, dtype=np.float32), []
            for _ in range(60):
                exp.training.iterate()
                (player,) = exp.players(exp.spec_of()).values()
                away[name].append(np.abs(probabilities(player, both, SAMPLE) - [0.25, 0.5, 0.25]).max())
    assert max(away["circles"][-20:]) > 0.3
    assert max(away["spiral"][-20:]) < 0.12
