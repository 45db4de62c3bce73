"""GAIL: the discriminator's loss and its rewards against loops in float64, what it learns from, what it refuses."""

import copy
import math

import numpy as np
import pytest
import torch

import bray
from bray.act import Clock
from bray.algos import get_algo
from bray.data.files import write_episodes
from bray.data.piece import Piece
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.nn.normalize import update_normalizers
from tests.algos.test_from_files import CHOICE, MANY, MASKED, NUMBERS, ask

T, GAMES, DEMOS = 5, 3, 8


def make(spec, **options):
    torch.manual_seed(0)
    algo, small = get_algo("GAIL"), ModelConfig(fcnet_hiddens=(16,))
    config = algo.Config(minibatches=2, epochs=1, **options)
    model = algo.make_model(config, spec, small)
    learner = algo.Learner(config, spec, model, small, seed=0, record=False)
    with torch.no_grad():  # a discriminator that is sure of something
        for p in learner.discriminator.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return learner


def rollout(spec, seed=0, last=0.0):
    rng = np.random.default_rng(seed)

    def see(*lead):
        obs = rng.standard_normal((*lead, 4)).astype(np.float32)
        return obs if spec is not MASKED else {"obs": obs, "action_mask": np.ones((*lead, 3), np.int8)}

    def act(*lead):
        if spec.layout.continuous:
            return rng.uniform(-1.5, 1.5, (*lead, 2)).astype(np.float32)
        return rng.integers(0, 2, (*lead, *spec.layout.shape))

    flags = np.zeros((T, GAMES), bool)
    valid = ~flags
    valid[2, 1] = valid[4, 0] = False
    return Piece(
        obs=see(T + 1, GAMES),
        action=act(T, GAMES),
        reward=np.full((T, GAMES), 100.0, np.float32),  # of the environment: nobody looks at it
        terminated=flags,
        truncated=flags,
        valid=valid,
        first=np.zeros((T + 1, GAMES), bool),
        outputs={"value": rng.standard_normal((T + 1, GAMES)).astype(np.float32)},
        extras={"logp": np.full((T, GAMES), -0.7, np.float32)},
        demos={"obs": see(DEMOS), "action": act(DEMOS)},
    )


def row(obs, t, b):
    return {k: x[t, b][None] for k, x in obs.items()} if isinstance(obs, dict) else obs[t, b][None]


def logit(discriminator, piece, t, b):
    return ask(discriminator, row(piece.obs, t, b), piece.action[t, b][None])[0]


@pytest.mark.parametrize("spec", [CHOICE, MASKED, MANY, NUMBERS], ids=lambda spec: spec.id)
@pytest.mark.parametrize("kind", ["positive", "signed"])
def test_the_discriminator_learns_to_tell_and_then_rewards(spec, kind):
    learner, piece = make(spec, imitation_reward=kind, logit_penalty=0.3, discriminator_lr=0.01), rollout(spec)
    before = copy.deepcopy(learner.discriminator)
    update_normalizers(
        before, {k: x[:-1] for k, x in piece.obs.items()} if spec is MASKED else piece.obs[:-1], piece.valid
    )
    update_normalizers(before, piece.demos["obs"])
    steps, take = [], learner.discriminator_optimizer.step
    learner.discriminator_optimizer.step = lambda loss: [steps.append(loss.item()), take(loss)]
    learnt, numbers = learner.rewarded(piece)

    played = [logit(before, piece, t, b) for t in range(T) for b in range(GAMES) if piece.valid[t, b]]
    shown = ask(before, piece.demos["obs"], piece.demos["action"])
    entropy = size = 0.0
    for x in played:
        entropy -= math.log(1.0 - 1.0 / (1.0 + math.exp(-x))) / len(played)
        size += x**2 / len(played)
    for x in shown:
        entropy -= math.log(1.0 / (1.0 + math.exp(-x))) / DEMOS
        size += x**2 / DEMOS
    assert numbers["discriminator_loss"] == pytest.approx(entropy, rel=1e-5)
    assert steps == pytest.approx([entropy + 0.3 * size], rel=1e-5)
    assert numbers["played_accuracy"] == pytest.approx(np.mean([x < 0 for x in played]))
    assert numbers["demo_accuracy"] == pytest.approx(np.mean([x > 0 for x in shown]))

    total = 0.0
    for t in range(T):
        for b in range(GAMES):
            x = logit(learner.discriminator, piece, t, b)  # as it is after its step
            d = 1.0 / (1.0 + math.exp(-x))
            worth = -math.log(1.0 - d) if kind == "positive" else math.log(d) - math.log(1.0 - d)
            expected = worth if piece.valid[t, b] else 0.0
            total += expected
            assert learnt.reward[t, b] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert numbers["imitation_reward"] == pytest.approx(total / piece.valid.sum(), rel=1e-4)
    assert learnt.reward.dtype == np.float32


def test_every_row_is_learnt_from_once_in_each_pass():
    learner, piece = make(CHOICE, discriminator_batch=4, discriminator_epochs=2), rollout(CHOICE)
    seen, step = [], learner.discriminator_step
    learner.discriminator_step = lambda *rows: [seen.append(rows), step(*rows)][1]
    learner.rewarded(piece)
    assert len(seen) == 6  # 13 rows, about four at a time, twice
    for kind, rows in enumerate((piece.obs[:-1][piece.valid], piece.demos["obs"])):
        for half in (seen[:3], seen[3:]):
            found = np.concatenate([taken[kind]["obs"].numpy() for taken in half])
            np.testing.assert_array_equal(np.sort(found, 0), np.sort(rows, 0))


def test_an_action_beyond_the_bounds_is_what_the_environment_makes_of_it():
    discriminator, obs = make(NUMBERS).discriminator, np.zeros((1, 4), np.float32)
    far, at, inside = (ask(discriminator, obs, np.array([[x, -0.2]], np.float32)) for x in (1.7, 1.0, 0.5))
    assert far == at != inside


def test_ppo_learns_from_these_rewards_and_no_others():
    learner, other = make(CHOICE), make(CHOICE)
    piece = rollout(CHOICE)
    told = learner.update(learner.prepare(piece), Clock()).metrics
    piece.reward[...] = -5.0
    assert other.update(other.prepare(piece), Clock()).metrics == told
    plain = super(type(learner), other := make(CHOICE))
    rewarded, _ = other.rewarded(piece)
    assert plain.update(plain.prepare(rewarded), Clock()).metrics.items() <= told.items()


# --- where it learns --------------------------------------------------------------------------------------------------

SMALL = {"rollout_length": 16, "minibatches": 2, "num_envs": 2, "fcnet_hiddens": [8], "share": 0.6}


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)

    def episode(n=20):
        obs = rng.standard_normal((n + 1, 4)).astype(np.float32)
        flags = {"terminated": np.arange(n) == n - 1, "truncated": np.zeros(n, bool)}
        return {"obs": obs, "action": (obs[:-1, 2] > 0).astype(np.int64), "reward": np.ones(n, np.float32), **flags}

    write_episodes(tmp_path / "files" / "episodes", [episode() for _ in range(5)])
    return tmp_path / "files"


def test_demonstrations_come_in_the_share_that_was_asked_for_and_it_goes_on_exactly(files, tmp_path):
    given = {"run": "GAIL", "env": "CartPole-v1", "data": files, "use_preset": False, "config": SMALL}
    with bray.Experiment(**given, path=tmp_path / "whole") as whole:
        learner, came = whole.training.learner, []
        learn = learner.update
        learner.update = lambda batch, clock: [came.append(batch), learn(batch, clock)][1]
        list(whole.train(stop={"env_steps_total": 400}))
        weights = whole.training.weights()
    assert len(came) > 10
    for piece in came:
        assert len(piece.demos["action"]) == round(piece.valid.sum() * 0.6 / 0.4)
        assert (piece.demos["action"] == (piece.demos["obs"][:, 2] > 0)).all()
    with bray.Experiment(**given, path=tmp_path / "half") as half:
        list(half.train(stop={"env_steps_total": 200}))
    with bray.Experiment.resume(tmp_path / "half") as resumed:
        list(resumed.train(stop={"env_steps_total": 400}))
        for name, x in resumed.training.weights().items():
            np.testing.assert_array_equal(x, weights[name])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"share": None}, "learns from what it plays, with files beside it: --data-share 0.5 beside --env ENV"),
        ({"share": 1.0}, "a share between 0 and 1, got 1"),
        ({"share": 0.0}, "a share between 0 and 1, got 0"),
        ({"normalize_rewards": True}, r"without env.normalize_rewards"),
    ],
)
def test_what_cannot_be_is_refused(more, message, files, tmp_path):
    given = {"run": "GAIL", "env": "CartPole-v1", "data": files, "path": tmp_path / "x"}
    with pytest.raises(ConfigError, match=message):
        _ = bray.Experiment(**given, config=SMALL | more).training


def test_play_alone_is_refused(tmp_path):
    config = {k: v for k, v in SMALL.items() if k != "share"}
    with (
        bray.Experiment("GAIL", "CartPole-v1", path=tmp_path / "x", config=config) as exp,
        pytest.raises(ConfigError, match=r"needs both: --data FILES --data-share 0\.5 beside --env"),
    ):
        list(exp.train(stop={"env_steps_total": 100}))
