"""ES and ARS: noise, ranks and steps against plain float64 loops; perturbed weights against copies of the Model."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bray import act
from bray.act import Clock, Tick
from bray.algos import ars, es
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "es.md"
BOX = Space("box", (3,))
DISCRETE = EnvSpec("test", BOX, Space("discrete", n=(4,), start=(0,)))
PICTURES = EnvSpec("test", Space("box", (16, 16, 3), "uint8", 0, 255), Space("discrete", n=(4,), start=(0,)))
CONTINUOUS = EnvSpec("test", BOX, Space("box", (2,), "float32", -1.0, 1.0))
SMALL = ModelConfig(fcnet_hiddens=(5,))
RETURNS = np.array([3.0, 1.0, 7.0, 7.0, -2.0, 9.0])
"""Of three pairs: + and - of the first direction, of the second, of the third."""


def slow_ranks(x):
    """From -1/2 to 1/2: how many are smaller, and half of how many others are equal."""
    less = [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]
    return np.array(less) / (len(x) - 1) - 0.5


def make(algo, spec=DISCRETE, **options):
    torch.manual_seed(0)
    config = algo.Config(**options)
    model = algo.make_model(config, spec, SMALL)
    return model, algo.Learner(config, spec, model, SMALL, record=False)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS, PICTURES], ids=["discrete", "continuous", "pictures"])
def test_each_game_is_answered_by_weights_of_its_own(spec):
    model, _ = make(es, spec)
    (size,) = model.draws["noise"]
    obs, noise = torch.randn(4, 3), 0.3 * torch.randn(4, size)
    if spec is PICTURES:
        obs, noise = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8), 0.1 * noise
    out = model(obs, {"noise": noise})["dist"]
    for b in range(4):
        one, at = copy.deepcopy(model), 0
        with torch.no_grad():
            for p in one.moved_parameters():
                p += noise[b, at : at + p.numel()].view_as(p)
                at += p.numel()
        assert at == size
        np.testing.assert_allclose(out[b].detach(), one(obs[b : b + 1])["dist"][0].detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(obs)["dist"].detach(), model.net(obs)["dist"].detach())


def test_weights_of_the_value_are_not_searched():
    model, _ = make(es)
    names = {name for name, p in model.net.named_parameters() if any(p is q for q in model.moved_parameters())}
    assert names
    assert not any("value" in name for name in names)
    assert sum(p.numel() for p in model.moved_parameters()) == 3 * 5 + 5 + 5 * 4 + 4


def test_ranks():
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.integers(0, 6, rng.integers(2, 12)).astype(float)
        np.testing.assert_allclose(es.centred_ranks(x), slow_ranks(x))
    assert es.centred_ranks(np.array([5.0])).tolist() == [-0.5]
    assert es.centred_ranks(np.array([10.0, 30.0, 20.0])).tolist() == [-0.5, 0.5, 0.0]


def expected_step(learner, weights, key, l2):
    """theta, and sum_i w_i noise_i - l2 theta, in float64."""
    theta = learner.optimizer.flat.double().numpy().copy()
    noise = np.random.default_rng(key).standard_normal((len(weights), len(theta)), np.float32).astype(np.float64)
    gradient = -l2 * theta
    for w, direction in zip(weights, noise, strict=True):
        gradient = gradient + w * direction
    return theta, gradient


def test_an_update_of_ars_by_hand():
    _, learner = make(ars, lr=0.1, sigma=0.2, top=0.67)
    # The best directions are the third (9) and the second (7); sigma_R is the deviation of -2, 9, 7, 7.
    sigma_r = np.std([-2.0, 9.0, 7.0, 7.0])
    weights = [0.0, (7.0 - 7.0) / (2 * sigma_r), (-2.0 - 9.0) / (2 * sigma_r)]
    np.testing.assert_allclose(learner.weights(RETURNS[0::2], RETURNS[1::2]), weights)
    theta, gradient = expected_step(learner, weights, 11, 0.0)
    update = learner.update({"return": RETURNS, "key": np.full(6, 11), "obs": np.zeros((9, 3), np.float32)}, Clock())
    np.testing.assert_allclose(learner.optimizer.flat, theta + 0.1 * gradient, rtol=1e-4, atol=1e-6)
    assert update.metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    assert update.metrics["return_max"] == 9.0
    assert update.metrics["return_mean"] == pytest.approx(25 / 6)


def test_an_update_of_es_is_adam_on_the_ranked_gradient():
    _, learner = make(es, lr=0.1, sigma=0.2, l2=0.01)
    ranks = slow_ranks(RETURNS)
    weights = (ranks[0::2] - ranks[1::2]) / (6 * 0.2)
    np.testing.assert_allclose(learner.weights(RETURNS[0::2], RETURNS[1::2]), weights)
    theta, gradient = expected_step(learner, weights, 5, 0.01)
    learner.update({"return": RETURNS, "key": np.full(6, 5), "obs": np.zeros((9, 3), np.float32)}, Clock())
    # The first step of Adam: lr g / (|g| + eps).
    want = theta + 0.1 * gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(learner.optimizer.flat, want, rtol=1e-3, atol=1e-4)


def decide(policy, games, version, rng, mode=act.SAMPLE):
    deciding = policy.decide(Tick(np.ones((games, 3), np.float32)), None, rng, mode, Clock(0, version))
    inputs = next(deciding)
    try:
        deciding.send({"dist": np.zeros((games, 4), np.float32)})
    except StopIteration as end:
        return inputs, end.value


def test_noise_is_antithetic_kept_for_a_version_and_remade_from_its_key():
    policy = es.Policy(es.Config(sigma=0.5), DISCRETE)
    policy.draws = {"noise": (7,)}
    rng = np.random.default_rng(0)
    (_, first), decision = decide(policy, 6, 0, rng)
    (_, again), _ = decide(policy, 6, 0, rng)
    (_, other), later = decide(policy, 6, 1, rng)
    np.testing.assert_array_equal(first["noise"], again["noise"])
    np.testing.assert_array_equal(first["noise"][0::2], -first["noise"][1::2])
    assert not np.array_equal(first["noise"], other["noise"])
    assert decision.extras["key"].tolist() == [decision.extras["key"][0]] * 6 != later.extras["key"].tolist()
    np.testing.assert_array_equal(first["noise"][0::2], 0.5 * es.directions(decision.extras["key"][0], 3, 7))
    inputs, _ = decide(policy, 6, 2, rng, act.GREEDY)
    assert len(inputs) == 1  # no noise


@pytest.mark.parametrize(("name", "env"), [("ES", "CartPole-v1"), ("ARS", "Pendulum-v1")])
def test_a_run_goes_on_exactly(tmp_path, name, env):
    config = {"num_envs": 4, "fcnet_hiddens": [4], "iteration_steps": 0}
    whole = Experiment(name, env, use_preset=False, path=tmp_path / "a", config=config)
    one = list(whole.train({"training_iteration": 3}))
    half = Experiment(name, env, use_preset=False, path=tmp_path / "b", config=config)
    list(half.train({"training_iteration": 1}))
    half.close()
    again = Experiment.resume(tmp_path / "b")
    two = list(again.train({"training_iteration": 3}))
    for key in ("env_steps_total", "loss/return_mean", "loss/grad_norm"):
        assert [row[key] for row in one[1:]] == [row[key] for row in two]
    assert set(re.findall(r"`(loss/\w+)` \|", PAGE.read_text())) == {k for k in one[0] if k.startswith("loss/")}
    for k, x in whole.training.weights().items():
        np.testing.assert_array_equal(x, again.training.weights()[k])


def test_odd_generations_and_memory_are_refused():
    with pytest.raises(ConfigError, match="num_envs is even"):
        Experiment("ES", "CartPole-v1", config={"num_envs": 5}).training.iterate()
    with pytest.raises(ConfigError, match="PPO or A2C"):
        es.make_model(es.Config(), DISCRETE, ModelConfig(use_lstm=True))
