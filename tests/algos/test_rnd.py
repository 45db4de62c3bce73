"""Random network distillation: the reward for what is new, what it is added to, and that a resumed run goes on with
it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bray.act import Clock
from bray.algos import a2c, c51, dqn, ppo, r2d2
from bray.algos.rnd import Novelty
from bray.data.piece import Piece
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

SPEC = EnvSpec("test", Space("box", (3,), "float32"), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))


def make_novelty(weight=0.5):
    torch.manual_seed(0)
    return Novelty(SPEC, SMALL, weight, 1e-3, torch.device("cpu"))


def test_the_reward_is_the_error_by_its_running_root_mean_square():
    novelty, rng = make_novelty(weight=0.5), np.random.default_rng(0)
    seen = np.zeros((0, 3))
    squares, count = 0.0, 0
    for n in (40, 300, 7):  # more than one gradient step's rows in the second
        obs, weight = rng.normal(2.0, 3.0, (n, 3)).astype(np.float32), rng.random(n) < 0.8
        seen = np.concatenate([seen, obs[weight].astype(np.float64)])
        copy = make_novelty()
        copy.load_state_dict(novelty.state_dict())
        reward = novelty.reward(obs, weight)
        # the same by hand: observations normalised by all that were seen, errors before this batch was learnt
        scaled = np.clip((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10).astype(np.float32)
        with torch.no_grad():
            for network in (copy.target, copy.predictor):
                for name, buffer in network.named_buffers():
                    buffer.fill_(1.0 if "scale" in name else 0.0)
            error = copy.error(torch.from_numpy(scaled)).double().numpy()
        squares, count = squares + np.square(error[weight]).sum(), count + weight.sum()
        expected = np.where(weight, 0.5 * error / np.sqrt(squares / count), 0.0)
        np.testing.assert_allclose(reward, expected, rtol=2e-3, atol=1e-5)


def test_what_is_seen_again_and_again_is_no_news():
    novelty = make_novelty()
    old, new = np.zeros((64, 3), np.float32), np.ones((64, 3), np.float32)
    mixed = np.concatenate([old, new])
    weight = np.ones(64, bool)
    novelty.reward(mixed, np.ones(128, bool))  # scale of the observations
    first = novelty.reward(old, weight).mean()
    for _ in range(100):
        novelty.reward(old, weight)
    with torch.no_grad():
        seen, unseen = (novelty.error(torch.from_numpy(x[:1])).item() for x in (old, new))
    assert novelty.reward(old, weight).mean() < 0.1 * first
    assert unseen > 5 * seen


def rollout(seed=0):
    rng, (t, b) = np.random.default_rng(seed), (8, 3)
    valid = rng.random((t, b)) < 0.9
    return Piece(
        obs=rng.normal(size=(t + 1, b, 3)).astype(np.float32),
        action=rng.integers(0, 4, (t, b)),
        reward=np.zeros((t, b), np.float32),
        terminated=np.zeros((t, b), bool),
        truncated=np.zeros((t, b), bool),
        valid=valid,
        first=np.zeros((t + 1, b), bool),
        outputs={"value": np.zeros((t + 1, b), np.float32)},
        extras={"logp": np.full((t, b), -1.4, np.float32)},
    )


def test_the_reward_goes_to_the_step_that_led_there():
    novelty, piece = make_novelty(), rollout()
    same = make_novelty()
    rewarded, mean = novelty.rewarded(piece)
    bonus = same.reward(piece.obs[1:].reshape(-1, 3), piece.valid.reshape(-1)).reshape(8, 3)
    np.testing.assert_allclose(rewarded.reward, bonus, rtol=1e-6)
    assert (rewarded.reward[~piece.valid] == 0).all()
    assert (rewarded.reward[piece.valid] > 0).all()
    assert mean == pytest.approx(bonus[piece.valid].mean(), rel=1e-5)
    assert (piece.reward == 0).all()  # the piece is as it was


@pytest.mark.parametrize("algo", [ppo, a2c])
def test_rollouts_are_learnt_with_it(algo):
    updates = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        config = algo.Config(rnd=weight, normalize_advantage=False)
        model = algo.make_model(config, SPEC, SMALL)
        learner = algo.Learner(config, SPEC, model, SMALL)
        updates[weight] = learner.update(learner.prepare(rollout()), Clock()).metrics
    assert "novelty" not in updates[0.0]
    assert updates[0.0]["value_loss"] < 0.1 * updates[1.0]["value_loss"]  # without it there is nothing to get
    assert updates[1.0]["novelty"] == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize(("algo", "more"), [(dqn, {}), (c51, {}), (dqn, {"prioritized": True})])
def test_replayed_transitions_are_learnt_with_it(algo, more):
    torch.manual_seed(0)
    config = algo.Config(rnd=2.0, **more)
    model = algo.make_model(config, SPEC, SMALL)
    learner, rng = algo.Learner(config, SPEC, model, SMALL), np.random.default_rng(0)
    batch = {k: rng.normal(size=(16, 3)).astype(np.float32) for k in ("obs", "next_obs")}
    batch |= {k: np.ones(16, np.float32) for k in ("reward", "discount", "weight")} | {"action": rng.integers(0, 4, 16)}
    update = learner.update(batch, Clock())
    assert update.metrics["novelty"] == pytest.approx(2.0, abs=0.6)
    assert (batch["reward"] == 1).all()


def test_each_row_of_a_sequence_is_paid_before_rewards_are_summed(monkeypatch):
    memory = replace(SMALL, use_lstm=True)
    config = r2d2.Config(rnd=1.0, n_step=3, gamma=0.5, sequence_length=6, burn_in=2)
    learner = r2d2.Learner(config, SPEC, r2d2.make_model(config, SPEC, memory), memory)
    monkeypatch.setattr(learner.novelty, "reward", lambda obs, weight: weight.astype(np.float32))
    rows, none = 8, np.zeros((8, 1), bool)
    batch = {
        "obs": np.zeros((rows + 1, 1, 3), np.float32), "first": np.zeros((rows + 1, 1), bool), "state": {},
        "weight": np.ones(1, np.float32),
        "action": np.zeros((rows, 1), int), "reward": np.zeros((rows, 1), np.float32), "terminated": none,
        "truncated": none, "valid": ~none,
    }  # fmt: skip
    paid, mean = learner.rewarded(learner.prepare(batch), learner.novelty)
    assert paid["reward"].ravel().tolist() == [
        1.75,
        1.75,
        1.75,
        1.75,
        1.5,
        1.0,
    ]  # 1 + 1/2 + 1/4, until the sequence ends
    assert mean == 1.0
    assert (batch["reward"] == 0).all()


ON, OFF = {"rollout_length": 8, "minibatches": 2}, {"learning_starts": 100, "train_every": 100, "batch_size": 8}


@pytest.mark.parametrize(("algorithm", "settings"), [("PPO", ON), ("DQN", OFF)])
def test_a_resumed_run_goes_on_with_what_is_known(algorithm, settings, tmp_path):
    def run(path, iterations, resume=False):
        common = {"use_preset": False, "num_envs": 2, "rnd": 1.0, "record": False, **settings}
        exp = Experiment.resume(path) if resume else Experiment(run=algorithm, env="CartPole-v1", path=path, **common)
        rows = list(exp.train({"training_iteration": iterations}))
        state = exp.training.learner.state_dict()["parts"]
        exp.close()
        return rows[-1]["loss/novelty"], state

    whole, known = run(tmp_path / "whole", 4)
    run(tmp_path / "half", 2)
    half, again = run(tmp_path / "half", 4, resume=True)
    assert half == whole
    for part in ("novelty", "novelty_optimizer"):
        assert known[part].keys() == again[part].keys()
        assert all(np.array_equal(x, again[part][k]) for k, x in known[part].items())
    assert known["novelty"]["errors.count"] > 0


def test_off_by_default():
    for algo in (ppo, a2c, dqn, r2d2):
        assert algo.Config().rnd == 0.0
