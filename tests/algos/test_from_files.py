"""Algorithms that learn from files: their losses against loops in float64, where their weights go on, what they
refuse."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import bray
from bray.act import Clock
from bray.algos import get_algo, make_policy
from bray.algos.base import to_torch
from bray.data.experience import Dataset
from bray.data.files import write_episodes
from bray.errors import ConfigError, DataError
from bray.nn import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec, Space
from bray.train.source import episode_piece

B, GAMMA = 6, 0.9
VECTOR = Space("box", (4,), "float32")
CHOICE = EnvSpec("choice", VECTOR, Space("discrete", (), "int64", n=(3,), start=(0,)))
NUMBERS = EnvSpec("numbers", VECTOR, Space("box", (2,), "float32", -1.0, 1.0))
MASKED = dataclasses.replace(
    CHOICE,
    observation=Space("dict", parts=(Space("box", (3,), "int8", 0, 1), VECTOR), names=("action_mask", "obs")),
)
MANY = EnvSpec("many", VECTOR, Space("multi_discrete", (2,), "int64", n=(3, 2), start=(0, 0)))


def make(name, spec, **options):
    torch.manual_seed(0)
    algo = get_algo(name)
    config, small = algo.Config(**options), ModelConfig(fcnet_hiddens=(16,))
    model = algo.make_model(config, spec, small)
    learner = algo.Learner(config, spec, model, small, seed=0, record=False)
    target = getattr(learner, "target", None)
    modules = [model, *filter(None, [getattr(learner, "critic", None), target and target.module])]
    with torch.no_grad():  # policies that are sure of something, targets that differ from what they follow
        for p in [p for module in modules for p in module.parameters()]:
            p.add_(0.3 * torch.randn_like(p))
    return model, learner


def rows(spec, seed=0, batch=B):
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.standard_normal((2, batch, 4)).astype(np.float32)
    if spec.layout.continuous:
        action = rng.uniform(-1, 1, (batch, 2)).astype(np.float32)
    else:
        action = rng.integers(0, 2, (batch, spec.layout.size)).reshape(batch, *spec.layout.shape)
    out = {
        "obs": obs,
        "action": action,
        "reward": rng.standard_normal(batch).astype(np.float32),
        "discount": np.where(rng.random(batch) < 0.3, 0.0, GAMMA).astype(np.float32),
        "next_obs": next_obs,
        "weight": np.ones(batch, np.float32),
    }
    if spec is MASKED:
        mask = rng.random((batch, 3)) < 0.5
        mask[np.arange(batch), action] = True
        out |= {"obs": {"obs": obs, "action_mask": mask.astype(np.int8)}}
        out |= {"next_obs": {"obs": next_obs, "action_mask": mask.astype(np.int8)}}
    return out


def ask(module, *inputs):
    """What a network says, as float64."""
    with torch.no_grad():
        out = module(*to_torch(list(inputs), torch.device("cpu")))
    return {k: v.double().numpy() for k, v in out.items()} if isinstance(out, dict) else out.double().numpy()


def log_prob(spec, dist, action, mask, min_std=0.0):
    """Of one row, number by number."""
    if spec.layout.continuous:
        total = 0.0
        for mean, log_std, a in zip(dist[:2], dist[2:], action, strict=True):
            std = max(math.exp(log_std), min_std)
            total += -0.5 * ((a - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        return total
    total, at = 0.0, 0
    for part, choice in zip(spec.layout.parts, np.atleast_1d(action), strict=True):
        logits = [dist[at + i] for i in range(part.n) if mask is None or mask[at + i]]
        total += dist[at + choice] - math.log(sum(math.exp(x) for x in logits))
        at += part.n
    return total


def mask_of(batch, b):
    return batch["obs"]["action_mask"][b] if isinstance(batch["obs"], dict) else None


def step(learner, batch, clock=Clock()):
    """What a step says of the weights before it."""
    return learner.update(batch, clock).metrics


# --- BC ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHOICE, MASKED, MANY, NUMBERS], ids=lambda spec: spec.id)
def test_bc_is_the_mean_log_likelihood(spec):
    model, learner = make("BC", spec, min_std=0.9)
    batch = rows(spec)
    dist = ask(model, batch["obs"])["dist"]
    each = [log_prob(spec, dist[b], batch["action"][b], mask_of(batch, b), 0.9) for b in range(B)]
    assert step(learner, batch)["loss"] == pytest.approx(-np.mean(each), rel=1e-5)


def test_bc_learns_what_was_done_and_leaves_the_value_as_it_starts():
    model, learner = make("BC", NUMBERS, lr=0.01)
    batch = rows(NUMBERS, batch=64)
    batch["action"] = np.tanh(batch["obs"][:, :2])
    value = {k: v.clone() for k, v in model.state_dict().items() if k.startswith(("value.", "core.encoders.1."))}
    assert value
    for _ in range(600):
        last = step(learner, batch)
    assert np.abs(ask(model, batch["obs"])["dist"][:, :2] - batch["action"]).max() < 0.15
    assert last["entropy"] == pytest.approx(2 * (math.log(0.05) + 0.5 * math.log(2 * math.pi * math.e)), abs=0.1)
    for name, x in value.items():
        assert torch.equal(model.state_dict()[name], x)


def test_a_demonstrator_who_did_what_is_forbidden_is_named():
    _, learner = make("BC", MASKED)
    batch = rows(MASKED)
    batch["obs"]["action_mask"][2] = [0, 0, 1]
    batch["action"][2] = 1
    with pytest.raises(DataError, match=r"choice 1 where the action_mask .* forbids it \(1 of 6 rows"):
        step(learner, batch)


# --- MARWIL -----------------------------------------------------------------------------------------------------------


def episodes(spec, seed=0, lengths=(7, 5)):
    """The first terminates, the second is cut."""
    rng = np.random.default_rng(seed)
    for i, n in enumerate(lengths):
        ends, no = np.arange(n) == n - 1, np.zeros(n, bool)
        box = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
        yield {
            "obs": rng.standard_normal((n + 1, 4)).astype(np.float32),
            "action": box if spec.layout.continuous else rng.integers(0, 3, n),
            "reward": rng.standard_normal(n).astype(np.float32),
            "terminated": no if i else ends,
            "truncated": ends if i else no,
        }


@pytest.mark.parametrize("spec", [CHOICE, NUMBERS], ids=lambda spec: spec.id)
def test_marwil_weighs_by_how_much_better_the_return_was(spec):
    options = {"beta": 1.5, "gamma": GAMMA, "value_coef": 0.7, "norm_rate": 0.2, "max_weight": 1.5}
    model, learner = make("MARWIL", spec, batch_size=12, entropy_coef=0.1, **options)
    data = get_algo("MARWIL").experience(learner.config, spec, ModelConfig())
    played = list(episodes(spec))
    for i, episode in enumerate(played):
        data.add(episode_piece(episode, i, spec.layout))
    data.complete()
    data.epochs = 3
    square = weight_of_square = 0.0
    for _ in range(3):  # the running norm has a past
        policy_loss, value_loss, entropy, advantages, logps = 0.0, 0.0, [], [], []
        for episode in played:
            out = ask(model, episode["obs"])
            total = 0.0 if episode["terminated"][-1] else out["value"][-1]
            for t in reversed(range(len(episode["reward"]))):
                total = float(episode["reward"][t]) + GAMMA * total
                advantages.append(total - out["value"][t])
                logps.append(log_prob(spec, out["dist"][t], episode["action"][t], None, 0.05))
                value_loss += 0.5 * advantages[-1] ** 2 / 12
                p = np.exp(out["dist"][t] - np.logaddexp.reduce(out["dist"][t]))
                gaussian = sum(out["dist"][t][2:]) + math.log(2 * math.pi * math.e)
                entropy.append(gaussian if spec is NUMBERS else -(p * np.log(p)).sum())
        square = 0.8 * square + 0.2 * np.mean(np.square(advantages))
        weight_of_square = 0.8 * weight_of_square + 0.2
        norm = math.sqrt(square / weight_of_square)
        weights = [min(math.exp(1.5 * a / norm), 1.5) for a in advantages]
        policy_loss = -np.mean([w * logp for w, logp in zip(weights, logps, strict=True)])
        assert 1.5 in weights
        said = step(learner, data.next(Clock()).data)
        assert said["loss"] == pytest.approx(policy_loss + 0.7 * value_loss - 0.1 * np.mean(entropy), rel=1e-4)
        assert said["weight"] == pytest.approx(np.mean(weights), rel=1e-4)


# --- TD3+BC, IQL, CQL -------------------------------------------------------------------------------------------------


def test_td3_bc_climbs_values_of_their_size_and_stays_near_the_data():
    model, learner = make("TD3+BC", NUMBERS, alpha=1.7)
    batch = rows(NUMBERS)
    mu = ask(model, batch["obs"])["mu"]
    q = ask(learner.critic, batch["obs"], mu.astype(np.float32))[0]
    tensors = to_torch(learner.columns(batch), learner.device)
    far = np.mean([(mu[b, d] - batch["action"][b, d]) ** 2 for b in range(B) for d in range(2)])
    size = np.mean([abs(x) for x in q])
    said = learner.actor_loss(tensors, ())
    assert said["actor_loss"].item() == pytest.approx(far - 1.7 / size * np.mean(q), rel=1e-5)
    assert said["bc_loss"].item() == pytest.approx(far, rel=1e-5)
    slope = torch.autograd.grad(said["actor_loss"], list(model.parameters()), retain_graph=True)
    alone = torch.autograd.grad(
        said["bc_loss"] - 1.7 / size * learner.critic(tensors["obs"], model(tensors["obs"])["mu"], 1).mean(),
        list(model.parameters()),
    )
    for x, y in zip(slope, alone, strict=True):  # the size of values has no gradient
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", [CHOICE, MASKED, NUMBERS], ids=lambda spec: spec.id)
def test_iql_learns_the_expectile_of_what_was_done(spec):
    model, learner = make("IQL", spec, expectile=0.8, beta=2.0, max_weight=0.55, min_std=0.01)
    batch = rows(spec)

    def q_of(critic):
        if spec is NUMBERS:
            return ask(critic, batch["obs"], batch["action"])
        return ask(critic, batch["obs"])[:, np.arange(B), batch["action"]]

    out, q, target = ask(model, batch["obs"]), q_of(learner.critic), q_of(learner.target.module)
    v_next = ask(model, batch["next_obs"])["value"]
    critic_loss = value_loss = policy_loss = 0.0
    weights = []
    for b in range(B):
        for critic in range(2):
            error = q[critic, b] - (batch["reward"][b] + batch["discount"][b] * v_next[b])
            critic_loss += 0.5 * error**2 / B
        error = min(target[0, b], target[1, b]) - out["value"][b]
        value_loss += (0.8 if error >= 0 else 0.2) * error**2 / B
        weights.append(min(math.exp(2.0 * error), 0.55))
        policy_loss -= weights[-1] * log_prob(spec, out["dist"][b], batch["action"][b], mask_of(batch, b), 0.01) / B
    assert 0.55 in weights
    assert min(weights) < 0.55
    said = learner.update(batch, Clock()).metrics
    assert said["critic_loss"] == pytest.approx(critic_loss, rel=1e-5)
    assert said["value_loss"] == pytest.approx(value_loss, rel=1e-5)
    assert said["actor_loss"] == pytest.approx(value_loss + policy_loss, rel=1e-5)
    assert said["weight"] == pytest.approx(np.mean(weights), rel=1e-5)


def test_an_expectile_is_where_the_two_sides_weigh_the_same():
    x = torch.tensor([-2.0, 1.0, 4.0], dtype=torch.float64)
    v = torch.linspace(-2, 4, 6001, dtype=torch.float64)
    least = v[losses.expectile(x.unsqueeze(0) - v.unsqueeze(1), 0.9).sum(1).argmin()].item()
    assert 0.9 * sum(max(a - least, 0) for a in x.tolist()) == pytest.approx(
        0.1 * sum(max(least - a, 0) for a in x.tolist()), abs=0.01
    )
    assert losses.expectile(x, 0.5).tolist() == [2.0, 0.5, 8.0]


@pytest.mark.parametrize("soft", [False, True])
def test_cql_holds_down_what_is_drawn_and_not_in_the_data(soft):
    model, learner = make("CQL", NUMBERS, cql_alpha=1.3, samples=4, soft_backup=soft)
    batch = rows(NUMBERS)
    columns = learner.columns(batch)

    def sample(obs, noise):
        """`[B, 2]` and log densities, by the change of variables."""
        mean, log_std = np.split(ask(model, obs)["dist"], 2, -1)
        u = mean + np.exp(log_std) * noise
        normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        return np.tanh(u).astype(np.float32), (normal - np.log1p(-(np.tanh(u) ** 2))).sum(-1)

    worth = np.zeros((2, B))
    for s in range(4):
        actions = [(columns["any"][s], np.full(B, math.log(0.25)))]
        actions += [sample(batch[k], columns["samples"][i, s]) for i, k in enumerate(("obs", "next_obs"))]
        for action, logp in actions:
            worth += np.exp(ask(learner.critic, batch["obs"], action) - logp) / 12
    q = ask(learner.critic, batch["obs"], batch["action"])
    next_action, next_logp = sample(batch["next_obs"], columns["next_noise"] if soft else np.zeros((B, 2)))
    q_next = ask(learner.target.module, batch["next_obs"], next_action).min(0)
    q_next -= learner.log_alpha.exp().item() * next_logp if soft else 0.0
    error = q - (batch["reward"] + batch["discount"] * q_next)
    gap = (np.log(worth) - q).mean(1).sum()
    update, _ = learner.gradient_step(to_torch(columns, learner.device))
    assert update.metrics["gap"] == pytest.approx(gap, rel=1e-4)
    assert update.metrics["critic_loss"] == pytest.approx(0.5 * (error**2).mean(1).sum() + 1.3 * gap, rel=1e-4)


@pytest.mark.parametrize(("gap", "factor"), [(1000.0, 0.99), (-1000.0, 1 / 0.99), (None, 1.0)])
def test_the_conservative_weight_falls_where_drawn_actions_are_held_down_and_grows_where_not(gap, factor):
    _, learner = make("CQL", NUMBERS, cql_alpha=1.3, cql_gap=gap, alpha_lr=-math.log(0.99), samples=4)
    weights = []
    for _ in range(3):
        update, _ = learner.gradient_step(to_torch(learner.columns(rows(NUMBERS)), learner.device))
        weights.append(update.metrics["cql_weight"])
    assert weights == pytest.approx([1.3 * factor**n for n in range(3)], rel=1e-4)


def test_many_actions_at_once_have_the_values_that_they_have_one_by_one():
    _, learner = make("CQL", NUMBERS)
    obs, actions = torch.randn(B, 4), torch.rand(5, B, 2)
    at_once = learner.critic.of_many(obs, actions)
    for s in range(5):
        torch.testing.assert_close(at_once[:, s], learner.critic(obs, actions[s]))


@pytest.mark.parametrize("spec", [CHOICE, MASKED], ids=lambda spec: spec.id)
def test_cql_of_choices_holds_down_the_others(spec):
    model, learner = make("CQL-Discrete", spec, cql_alpha=0.7)
    batch = rows(spec)
    q, after = ask(model, batch["obs"])["q"], ask(model, batch["next_obs"])["q"]
    target = ask(learner.target.module, batch["next_obs"])["q"]
    loss = 0.0
    for b in range(B):
        mask = mask_of(batch, b)
        legal = [a for a in range(3) if mask is None or mask[a]]
        best = max(legal, key=lambda a: after[b, a])
        taken = q[b, batch["action"][b]]
        error = taken - (batch["reward"][b] + batch["discount"][b] * target[b, best])
        loss += (0.5 * error**2 + 0.7 * (math.log(sum(math.exp(q[b, a]) for a in legal)) - taken)) / B
    assert step(learner, batch)["loss"] == pytest.approx(loss, rel=1e-5)


# --- DQfD -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHOICE, MASKED], ids=lambda spec: spec.id)
@pytest.mark.parametrize("mixed", [False, True])
def test_dqfd_prefers_what_was_demonstrated(spec, mixed):
    model, learner = make("DQfD", spec, margin=0.6, margin_coef=1.4)
    batch = rows(spec)
    if mixed:
        batch |= {"demo": np.array([1, 0, 1, 0, 0, 1], np.float32), "id": np.arange(B)}
    q, after = ask(model, batch["obs"])["q"], ask(model, batch["next_obs"])["q"]
    target = ask(learner.target.module, batch["next_obs"])["q"]
    loss = 0.0
    for b in range(B):
        mask = mask_of(batch, b)
        legal = [a for a in range(3) if mask is None or mask[a]]
        best, taken = max(legal, key=lambda a: after[b, a]), batch["action"][b]
        error = q[b, taken] - (batch["reward"][b] + batch["discount"][b] * target[b, best])
        margin = max(q[b, a] + (0.0 if a == taken else 0.6) for a in legal) - q[b, taken]
        loss += (0.5 * error**2 + 1.4 * margin * (batch["demo"][b] if mixed else 1.0)) / B
    assert step(learner, batch)["loss"] == pytest.approx(loss, rel=1e-5)


def test_dqfd_without_demonstrations_is_refused():
    _, learner = make("DQfD", CHOICE)
    with pytest.raises(ConfigError, match="learns from demonstrations: name files with --data FILES"):
        step(learner, rows(CHOICE) | {"id": np.arange(B)})


# --- SQIL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHOICE, MASKED], ids=lambda spec: spec.id)
def test_sqil_of_choices_is_soft_q_learning_on_its_own_rewards(spec):
    model, learner = make("SQIL-Discrete", spec, alpha=0.4)
    batch = rows(spec) | {"demo": np.array([1, 0, 1, 0, 0, 1], np.float32)}
    q, target = ask(model, batch["obs"])["q"], ask(learner.target.module, batch["next_obs"])["q"]
    loss = 0.0
    for b in range(B):
        legal = [a for a in range(3) if mask_of(batch, b) is None or mask_of(batch, b)[a]]
        soft = 0.4 * math.log(sum(math.exp(target[b, a] / 0.4) for a in legal))
        loss += 0.5 * (q[b, batch["action"][b]] - (batch["demo"][b] + batch["discount"][b] * soft)) ** 2 / B
    assert step(learner, batch)["loss"] == pytest.approx(loss, rel=1e-5)


def test_sqil_is_sac_on_its_own_rewards():
    demo = np.array([1, 0, 1, 0, 0, 1], np.float32)
    _, learner = make("SQIL", NUMBERS)
    _, plain = make("SAC", NUMBERS)
    said = step(learner, rows(NUMBERS) | {"demo": demo})
    assert said == step(plain, rows(NUMBERS) | {"reward": demo})


@pytest.mark.parametrize(("name", "spec"), [("SQIL", NUMBERS), ("SQIL-Discrete", CHOICE)])
def test_sqil_needs_demonstrations_and_play(name, spec):
    _, learner = make(name, spec)
    with pytest.raises(ConfigError, match=r"needs both: --data FILES --data-share 0\.5 beside --env"):
        step(learner, rows(spec))
    with pytest.raises(ConfigError, match="rewards single transitions"):
        get_algo(name).Config(n_step=3)


# --- where they learn, and what goes on from them ---------------------------------------------------------------------


@pytest.fixture
def cartpole(tmp_path):
    """Files of CartPole in which the action follows the pole."""
    rng = np.random.default_rng(0)

    def episode(n=20):
        obs = rng.standard_normal((n + 1, 4)).astype(np.float32)
        flags = {"terminated": np.arange(n) == n - 1, "truncated": np.zeros(n, bool)}
        return {"obs": obs, "action": (obs[:-1, 2] > 0).astype(np.int64), "reward": np.ones(n, np.float32), **flags}

    write_episodes(tmp_path / "files" / "episodes", [episode() for _ in range(10)])
    return tmp_path / "files"


def test_ppo_goes_on_from_what_was_cloned(cartpole, tmp_path, caplog):
    small = {"fcnet_hiddens": [8]}
    with bray.Experiment("BC", "CartPole-v1", data=cartpole, path=tmp_path / "bc", epochs=2, **small) as cloned:
        list(cloned.train())
        weights = cloned.training.weights()
    go_on = {"env": "CartPole-v1", "use_preset": False, "init_from": str(tmp_path / "bc"), **small}
    with bray.Experiment("PPO", path=tmp_path / "ppo", **go_on) as exp:
        for name, x in exp.training.weights().items():
            np.testing.assert_array_equal(x, weights[name])


@pytest.mark.parametrize("name", ["BC", "MARWIL"])
def test_an_environment_alone_is_not_enough(name, tmp_path):
    with pytest.raises(ConfigError, match="learns from files: name them with --data FILES"):
        _ = bray.Experiment(name, "CartPole-v1", path=tmp_path / "x").training
    with pytest.raises(ConfigError, match="learns from files: name them with --data FILES"):
        bray.Experiment(name, live=True, obs="float32[4]", actions=2, path=tmp_path / "y").training.close()


@pytest.mark.optimizes
@pytest.mark.parametrize("name", ["MARWIL", "IQL"])
def test_learning_from_files_is_recorded_and_resumed_exactly(name, cartpole, tmp_path):
    config = {"epochs": 8, "fcnet_hiddens": [8], "batch_size": 16, "env": "CartPole-v1", "normalize_observations": True}
    with bray.Experiment(name, data=cartpole, path=tmp_path / "whole", **config) as whole:
        list(whole.train())
        assert whole.training.side.learner.is_recorded
    with bray.Experiment(name, data=cartpole, path=tmp_path / "half", **config) as half:
        list(half.train(stop={"learner_steps_total": 30}))
    with bray.Experiment.resume(tmp_path / "half") as resumed:
        list(resumed.train(stop={}))
        for key, x in whole.training.weights().items():
            np.testing.assert_array_equal(resumed.training.weights()[key], x)
        assert resumed.training.side.learner.steps == 100


def test_spaces_that_do_not_fit_are_refused():
    for name in ("IQL", "CQL-Discrete"):
        with pytest.raises(ConfigError):
            make_policy(get_algo(name), get_algo(name).Config(), MANY)
    for name in ("CQL", "TD3+BC"):
        with pytest.raises(ConfigError, match="needs a Box action space"):
            make_policy(get_algo(name), get_algo(name).Config(), CHOICE)
    with pytest.raises(ConfigError, match="cannot train a memory"):
        get_algo("IQL").make_model(get_algo("IQL").Config(), CHOICE, ModelConfig(use_lstm=True))
    assert isinstance(get_algo("BC").experience(get_algo("BC").Config(), CHOICE, ModelConfig()), Dataset)
