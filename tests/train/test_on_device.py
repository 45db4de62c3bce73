"""Environments of tensors played where the learner computes: the same rows, exact resume, and what is said where a
training cannot stay on the device."""

import logging

import numpy as np
import pytest
import torch
from gymnasium import spaces

import bray
from bray.envs.tensor_game import Game
from bray.errors import ConfigError, EnvError
from bray.spec import ActionLayout, Space
from bray.train.on_device import DeviceSource, in_its_units
from bray.train.rollout import EnvSource

SMALL = {"vector": "device", "num_envs": 6, "rollout_length": 16, "epochs": 2, "minibatches": 2, "iteration_steps": 0}


def experiment(env="CartPole-v1", run="PPO", **settings):
    common = {k: v for k, v in SMALL.items() if run == "PPO" or k not in ("epochs", "minibatches")}
    return bray.Experiment(run=run, env=env, use_preset=False, config={**common, **settings})


class Spread(Game):
    """Ends by itself and by time; a legal action is shown, and rewards are odd numbers."""

    single_observation_space = spaces.Dict(
        {"place": spaces.Box(-np.inf, np.inf, (2,)), "action_mask": spaces.Box(0, 1, (3,), np.int8)}
    )
    single_action_space = spaces.Discrete(3)
    random_numbers, max_episode_steps = 2, 7

    def begin(self, u):
        return u * 2 - 1

    def move(self, state, action):
        state = state + torch.stack([action - 1, 1 - action], -1) * 0.4
        return state, state.sum(-1) + action, state[:, 0] > 1.2

    def see(self, state):
        blocked = torch.stack([state[:, 0] > 0, torch.zeros_like(state[:, 0]) > 1, state[:, 0] < 0], -1)
        return {"place": state.float(), "action_mask": (~blocked).to(torch.int8)}


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "bray/Catch-v0", Spread], ids=str)
@pytest.mark.parametrize("record", [True, False])
def test_rows_are_those_of_an_environment_of_arrays(env, record):
    """The actions of a piece, played again by a VecEnv of arrays: every column is the same."""
    with experiment(env, record=record) as made, experiment(env) as other:
        source = made.training.sources[0]
        assert type(source) is DeviceSource
        plain = other.training.rollout
        engine, layout = plain.engine, plain.policy.layout
        for _ in range(3):
            (piece,), counts = source.gather()
            piece.check()
            ended = []
            for t in range(piece.length):
                obs, first, dead = plain.obs, plain.first, plain.env.dead
                for mine, theirs in zip(bray.tree.leaves(piece.obs), bray.tree.leaves(obs), strict=True):
                    np.testing.assert_array_equal(mine[t].numpy(), theirs)
                np.testing.assert_array_equal(piece.first[t], first)
                action = piece.action[t].numpy()
                mask = layout.mask(obs)
                outputs = engine.forward(obs)
                if mask is not None:
                    assert mask[np.arange(6), action].all()
                logp, _ = bray.distributions.log_prob_entropy(
                    layout,
                    torch.from_numpy(outputs["dist"]),
                    piece.action[t],
                    None if mask is None else torch.from_numpy(mask),
                )
                np.testing.assert_allclose(piece.extras["logp"][t], logp, atol=1e-5)
                plain.obs, reward, terminated, truncated, _ = plain.env.step(layout.to_env(action))
                np.testing.assert_array_equal(piece.reward[t], reward)
                np.testing.assert_array_equal(piece.terminated[t], terminated)
                np.testing.assert_array_equal(piece.truncated[t], truncated)
                np.testing.assert_array_equal(piece.valid[t], ~dead)
                plain.first = dead
                plain.returns += reward
                plain.lengths += ~dead
                ended += [(plain.returns[b], plain.lengths[b]) for b in np.flatnonzero(plain.env.dead)]
                plain.returns[plain.env.dead], plain.lengths[plain.env.dead] = 0.0, 0
            value = other.training.model(bray.tree.map(torch.from_numpy, plain.obs))["value"]
            np.testing.assert_allclose(piece.outputs["value"][-1], value.detach(), atol=1e-5)
            assert counts.env_steps == int(piece.valid.sum())
            np.testing.assert_allclose(np.reshape(counts.episodes, (-1, 2)), np.reshape(ended, (-1, 2)), rtol=1e-6)


def test_what_is_learnt_from_tensors_is_what_is_learnt_from_arrays():
    """The same piece as tensors and as arrays: the same advantages, weights and explained variance."""
    with experiment() as made:
        (piece,), _ = made.training.sources[0].gather()
        learner = made.training.learner
        arrays = bray.data.piece.replace(
            piece,
            **{
                name: bray.tree.map(lambda x: x.numpy().copy(), getattr(piece, name))
                for name in (
                    "obs",
                    "action",
                    "reward",
                    "terminated",
                    "truncated",
                    "valid",
                    "first",
                    "outputs",
                    "extras",
                )
            },
        )
        a, b = learner.prepare(piece), learner.prepare(arrays)
        for name in ("advantage", "target", "weight", "obs", "action"):
            np.testing.assert_allclose(a[name], b[name], atol=2e-5, err_msg=name)
        assert bray.algos.rows.explained_variance(a) == pytest.approx(bray.algos.rows.explained_variance(b), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"normalize_value": True, "normalize_rewards": True}, {"clip_rewards": 0.5}])
def test_a_run_is_repeated_and_resumed_exactly(tmp_path, settings):
    def weights(training):
        return {k: v.numpy().copy() for k, v in training.model.state_dict().items()}

    with (
        experiment(**settings) as a,
        bray.Experiment(
            run="PPO", env="CartPole-v1", use_preset=False, config={**SMALL, **settings}, path=tmp_path / "run"
        ) as b,
    ):
        for _ in range(6):
            a.training.iterate()
        for _, _row in zip(range(3), b.train(), strict=False):
            pass
        b.save()
    with bray.Experiment.resume(tmp_path / "run") as c:
        for _ in range(3):
            c.training.iterate()
        assert c.exact
        assert c.training.env_steps == a.training.env_steps
        wanted = weights(a.training)
        assert wanted
        assert all(np.array_equal(x, wanted[k]) for k, x in weights(c.training).items())


def test_a2c_and_recomputed_advantages_learn_on_the_device():
    for settings in ({"run": "A2C"}, {"recompute_advantages": True}):
        with experiment(**settings) as made:
            assert type(made.training.sources[0]) is DeviceSource
            row = made.training.iterate()
            assert np.isfinite(row["loss/value_loss"])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"use_lstm": True}, "its network has a memory"),
        ({"rnd": 1.0}, "rnd takes arrays"),
        ({"run": "DQN", "rollout_length": None}, "this algorithm takes arrays; PPO and A2C take tensors"),
    ],
)
def test_where_a_training_takes_arrays_it_says_so_and_goes_on(settings, why, caplog):
    given = {k: v for k, v in {**SMALL, **settings}.items() if v is not None and k != "run"}
    if settings.get("run"):
        given = {k: v for k, v in given.items() if k in ("vector", "num_envs")}
    with (
        caplog.at_level(logging.WARNING),
        bray.Experiment(run=settings.get("run", "PPO"), env="CartPole-v1", use_preset=False, config=given) as made,
    ):
        assert type(made.training.sources[0]) is EnvSource
        assert made.training.iterate() is not None
    assert f"every step of CartPole-v1 is copied to the host: {why}" in caplog.text


def test_the_last_episodes_are_counted_exactly():
    with experiment() as made:
        while made.training.totals.episodes.total < 7:
            made.training.iterate(most_episodes=7)
        assert made.training.totals.episodes.total == 7


def test_callbacks_of_episodes_see_every_step():
    class Watch(bray.Callbacks):
        seen = 0

        def on_episode_step(self, episode):
            Watch.seen += 1

    with experiment(callbacks=[Watch]) as made:
        next(iter(made.train()))
        assert Watch.seen >= made.training.env_steps > 0


class Broken(Game):
    single_observation_space, single_action_space = spaces.Box(-9.0, 9.0, (1,)), spaces.Discrete(2)

    def begin(self, u):
        return torch.zeros_like(u)

    def move(self, state, action):
        return state + 1, torch.where(state[:, 0] == 3, torch.nan, 1.0), state[:, 0] > 5

    def see(self, state):
        return state.float()


def test_a_reward_that_is_no_number_is_blamed_on_its_environment():
    with (
        experiment(Broken) as made,
        pytest.raises(EnvError, match="environment 0, row 3 of the rollout: the reward is nan"),
    ):
        made.training.iterate()


def test_workers_and_evaluation_play_games_of_tensors():
    with experiment(num_workers=2, num_envs=2) as made:
        assert made.training.iterate()["env_steps_total"] > 0
        assert made.training.evaluate(2)["eval/episodes"] == 2


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=2),
        spaces.MultiDiscrete([3, 2]),
        spaces.Box(-2.0, 5.0, (2,), np.float32),
        spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32)),
        spaces.MultiBinary(3),
    ],
    ids=str,
)
def test_actions_go_to_the_environment_in_its_units(space):
    layout = ActionLayout(Space.from_gym(space))
    rng = np.random.default_rng(0)
    flat = (
        rng.integers(0, 2, (5, *layout.shape))
        if layout.discrete
        else rng.normal(0, 2, (5, *layout.shape)).astype(np.float32)
    )
    wanted = layout.to_env(flat)
    got = in_its_units(layout, torch.device("cpu"))(torch.from_numpy(flat)).numpy()
    assert got.dtype == wanted.dtype or got.dtype.kind == wanted.dtype.kind
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="PyTorch finds no CUDA GPU here"):
        _ = experiment(device="cuda").training
