"""Trainings on games of several agents: policies against each other, a critic of the whole game, workers, resume."""

import json
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import bray
from bray.cli.main import main
from bray.envs import EnvConfig, env_spec
from bray.envs.agent_games import Hunt, Nim, TwoStep, Weather
from bray.envs.table import Seating
from bray.errors import CheckpointError, ConfigError, UnknownName
from bray.nn.shared import acting_encoder

SMALL = {"rollout_length": 16, "epochs": 2, "minibatches": 2}
AGAINST = {
    "policies": {"one": {"run": "PPO", "config": SMALL}, "two": {"run": "DQN", "config": {"learning_starts": 64}}},
    "policy_mapping": {"first": "one", "s*": "two"},
}


def weights_of(exp):
    found = exp.training.weights()
    return found if exp.training.several else {"default": found}


def same_weights(a, b):
    return all(np.array_equal(x, b[side][name]) for side in a for name, x in a[side].items())


def test_two_policies_play_one_game_and_go_on_exactly(tmp_path):
    with bray.Experiment(env=Nim, num_envs=4, path=tmp_path / "whole", **AGAINST) as exp:
        row = exp.fit({"env_steps_total": 1000}, progress=False)
        whole = weights_of(exp)
    assert row["agent/first/return_mean"] == -row["agent/second/return_mean"] == row["side/one/episode_return_mean"]
    assert row["episode_return_mean"] == 0.0  # what one wins the other loses
    assert row["agent_steps_total"] == row["env_steps_total"]  # one moves at a time
    assert row["side/two/replay/size"] > 0
    assert row["side/one/learner_steps_total"] > 0
    iteration = bray.Experiment(env=Nim, num_envs=4, path=tmp_path / "parts", iteration_steps=200, **AGAINST)
    with iteration as exp:
        for row in exp.train({"env_steps_total": 1000}):
            if row["env_steps_total"] > 300:
                break
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 1000}, progress=False)
        parts = weights_of(exp)
    assert same_weights(whole, parts)


def test_games_of_a_run_are_evaluated_with_all_its_policies(tmp_path):
    with bray.Experiment(env=Nim, num_envs=4, eval_freq=1, eval_episodes=4, path=tmp_path / "run", **AGAINST) as exp:
        row = exp.fit({"env_steps_total": 1000}, progress=False)
    assert row["eval/agent/first"] == -row["eval/agent/second"] == row["side/one/eval/return_mean"]
    with bray.Experiment.load(tmp_path / "run") as exp:
        matches = exp.play_games(6)
        found = exp.evaluate(6)
    assert [match.players for match in matches] == [{"first": "one", "second": "two"}] * 6
    assert found["eval/agent/first"] == sum(match.returns["first"] for match in matches) / 6
    with bray.Experiment.load(tmp_path / "run" / "models" / "two") as one:  # each alone acts for an agent
        assert one.policy({"obs": np.eye(13, dtype=np.float32)[12], "action_mask": np.ones(3, np.int8)}) in (0, 1, 2)
    with pytest.raises(CheckpointError, match="several policies"):
        bray.Experiment.load(tmp_path / "run", plays=False)


def test_a_policy_that_does_not_train_stays_as_it_is(tmp_path):
    made = {**AGAINST, "policies_to_train": ["one"]}
    with bray.Experiment(env=Nim, num_envs=4, path=tmp_path, **made) as exp:
        before = weights_of(exp)["two"]
        exp.fit({"env_steps_total": 600}, progress=False)
        after = weights_of(exp)
        assert exp.training.sides["one"].version > 0
        assert exp.training.sides["two"].version == 0
    assert all(np.array_equal(before[k], after["two"][k]) for k in before)


def test_a_policy_begins_with_weights_of_another_run(tmp_path):
    with bray.Experiment(env=Nim, num_envs=4, path=tmp_path / "first", **AGAINST) as exp:
        exp.fit({"env_steps_total": 600}, progress=False)
        learnt = weights_of(exp)["one"]
    policies = {"one": {"run": "PPO", "init_from": str(tmp_path / "first/models/one")}, "two": "PPO"}
    made = {"policies": policies, "policy_mapping": {"first": "one", "second": "two"}, "policies_to_train": ["two"]}
    with bray.Experiment(env=Nim, num_envs=4, path=tmp_path / "second", **made) as exp:
        mine = weights_of(exp)["one"]
    assert all(np.array_equal(learnt[k], mine[k]) for k in learnt)


class Counts(bray.Callbacks):
    """How often each hunter decided."""

    def on_episode_start(self, episode):
        episode.user_data["acted"] = 0

    def on_episode_step(self, episode):
        episode.user_data["acted"] += len(episode.action)

    def on_episode_end(self, episode):
        assert set(episode.policies.values()) == {"default"}
        episode.custom_metrics["decisions"] = episode.user_data["acted"]
        episode.custom_metrics["dead"] = sum(episode.ended.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_callbacks_of_episodes_see_games(tmp_path, workers):
    made = {"num_envs": 2, "num_workers": workers, "path": tmp_path / "run", "iteration_steps": 200, **SMALL}
    with bray.Experiment("PPO", Hunt, callbacks=Counts, **made) as exp:
        row = exp.fit({"env_steps_total": 600}, progress=False)
    assert 3 <= row["custom_metrics/decisions_mean"] <= 90
    assert 0 <= row["custom_metrics/dead_min"] <= row["custom_metrics/dead_max"] <= 3


def test_games_are_collected_in_files_of_each_policy(tmp_path, capsys):
    with bray.Experiment(env=Nim, num_envs=4, path=tmp_path / "run", **AGAINST) as exp:
        exp.fit({"env_steps_total": 300}, progress=False)
    assert (
        main(["collect", str(tmp_path / "run"), "--trust", "--episodes", "10", "--out", str(tmp_path / "files")]) == 0
    )
    said = capsys.readouterr().out
    assert "10 games" in said
    first, second = (list(bray.EpisodeReader(tmp_path / "files" / name)) for name in ("one", "two"))
    assert len(first) == len(second) == 10
    assert sum(e["reward"].sum() for e in first) == -sum(e["reward"].sum() for e in second)
    assert {int(g) for e in first for g in e["game"]} == {int(g) for e in second for g in e["game"]}
    with bray.Experiment("BC", data=tmp_path / "files/two", batch_size=8, path=tmp_path / "learnt") as exp:
        assert exp.fit({"learner_steps_total": 4}, progress=False)["loss/loss"] > 0.0
    assert main(["collect", str(tmp_path / "run"), "--trust", "--steps", "10"]) == 2
    assert "played to its end" in capsys.readouterr().err


@pytest.mark.parametrize("inference", ["worker", "central"])
def test_workers_in_rounds_learn_what_one_process_does(tmp_path, inference):
    found = []
    for games, workers in ((4, 0), (2, 2)):
        made = {"env": TwoStep, "num_envs": games, "num_workers": workers, "path": tmp_path / str(workers), **SMALL}
        made["inference"] = inference if workers else "worker"
        with bray.Experiment("PPO", **made) as exp:
            row = exp.fit({"env_steps_total": 500}, progress=False)
            found.append((weights_of(exp), row["agent_steps_total"], row["episodes_total"]))
    assert found[0][1:] == found[1][1:]
    for name, x in found[0][0]["default"].items():  # a forward of fewer rows rounds otherwise
        np.testing.assert_allclose(x, found[1][0]["default"][name], atol=1e-5)


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_counted_twice(tmp_path):
    made = {"num_envs": 2, "num_workers": 2, "path": tmp_path, "iteration_steps": 200, **SMALL}
    with bray.Experiment("PPO", Hunt, **made) as exp:
        for row in exp.train({"env_steps_total": 1200}):
            if row["training_iteration"] == 2:
                os.kill(exp.training.sources[0].process_ids[0], signal.SIGKILL)
        steps, episodes = row["env_steps_total"], row["episodes_total"]
    assert row["workers/restarts"] == 1
    rows = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert episodes == sum(r["episodes_this_iter"] for r in rows)
    assert steps >= 1200
    assert row["agent_steps_total"] <= 3 * steps


def test_workers_of_games_go_on_exactly(tmp_path):
    made = {"num_envs": 2, "num_workers": 2, "iteration_steps": 200, **SMALL}
    with bray.Experiment("PPO", Hunt, path=tmp_path / "whole", **made) as exp:
        exp.fit({"env_steps_total": 800}, progress=False)
        whole = weights_of(exp)
    with bray.Experiment("PPO", Hunt, path=tmp_path / "parts", **made) as exp:
        for _ in exp.train({"env_steps_total": 800}):
            break
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 800}, progress=False)
        assert same_weights(whole, weights_of(exp))


def test_a_critic_of_the_whole_game_explains_what_agents_cannot_see(tmp_path):
    explained = {}
    for run in ("MAPPO", "PPO"):
        made = {"num_envs": 8, "path": tmp_path / run, "rollout_length": 64, "epochs": 4, "minibatches": 4, "lr": 1e-3}
        with bray.Experiment(run, Weather, **made) as exp:
            explained[run] = exp.fit({"env_steps_total": 8000}, progress=False)["loss/explained_variance"]
            assert "global_state" not in exp.training.side.spec.observation.names
    assert explained["MAPPO"] >= 0.8
    assert explained["PPO"] <= 0.2


def test_a_mapping_may_deal_agents_out_anew_in_each_game(tmp_path):
    made = {"policies": {"one": {"run": "PPO", "config": SMALL}, "two": {"run": "PPO", "config": SMALL}}}
    asked = []

    def mapping(agent, game):
        asked.append((agent, game.env, game.episode))
        return "one" if (game.episode + int(agent == "second")) % 2 else "two"

    with bray.Experiment(env=Nim, num_envs=2, path=tmp_path, policy_mapping=mapping, **made) as exp:
        row = exp.fit({"env_steps_total": 600}, progress=False)
    assert row["side/one/learner_steps_total"] > 0
    assert row["side/two/learner_steps_total"] > 0
    assert len(asked) == len(set(asked))  # once for each agent and game
    assert {agent for agent, _, _ in asked} == {"first", "second"}


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        ({"policy_mapping": {"first": "one"}}, ConfigError, "not of agent 'second'.*policy_mapping="),
        ({"policy_mapping": {"*": "one"}}, ConfigError, "no agent plays by the policy 'two'"),
        ({"policy_mapping": {"*": "thre"}}, UnknownName, "unknown policy 'thre'.*agent 'first'"),
        ({"policy_mapping": lambda agent, game: None}, ConfigError, r"for agent 'first' \(one, two\), got None"),
        ({"policy_mapping": None}, ConfigError, "which policy decides for it"),
        ({"policies_to_train": ["tow"]}, UnknownName, "unknown policy 'tow'"),
        ({"policies": {"one": "ES", "two": "DQN"}}, ConfigError, "ES learns from whole episodes of one agent"),
        (
            {"policies": {"one": {"run": "PPO", "env": {"num_envs": 2}}, "two": "DQN"}},
            ConfigError,
            "env.num_envs is of the game",
        ),
        ({"inference": "central", "num_workers": 0}, ConfigError, "central is for workers"),
        (
            {"env_groups": 2, "inference": "central", "num_workers": 1},
            ConfigError,
            "env_groups is for environments of one",
        ),
        ({"policies": {"one": "MAPPO", "two": "DQN"}}, ConfigError, "MAPPO's critic.*Nim declares none"),
        ({"env": {"frame_stack": 2}}, ConfigError, "env.frame_stack changes what one agent sees.*game of several"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, made, error, said):
    given = {**AGAINST, **{k: v for k, v in made.items() if k != "env"}, **made.get("env", {})}
    with pytest.raises(error, match=said) as raised, bray.Experiment(env=Nim, path=tmp_path, **given) as exp:
        exp.training  # noqa: B018
    assert "\n" not in str(raised.value)


def test_agents_with_other_spaces_need_policies_of_their_own():
    with pytest.raises(ConfigError, match=r"'t' and 'hunter_2' have other observation spaces.*policy_mapping="):
        env_spec(EnvConfig(Hunt, teams={"t": ["hunter_0", "hunter_1"]}))
    sides = env_spec(EnvConfig(Hunt, teams={"t": ["hunter_0", "hunter_1"]}), Seating(("t", "hunter_2"))).sides
    assert [side.seats for side in sides.values()] == [1, 1]
    assert sides["t"].spec.team == ("hunter_0", "hunter_1")


class Counted(gym.Env):
    """Says how often it was made."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}


def test_an_environment_of_one_agent_is_made_once_to_be_played(tmp_path):
    placed = {"device": "cpu", "num_workers": 0, "inference": "worker"}  # else a step may be timed
    with bray.Experiment("PPO", Counted, num_envs=2, path=tmp_path, **placed, **SMALL) as exp:
        exp.training  # noqa: B018
    assert Counted.made == 2


@pytest.mark.slow
def test_two_policies_of_a_game_are_computed_where_they_learn(tmp_path):
    made = {"num_envs": 2, "num_workers": 2, "inference": "central", "iteration_steps": 200, **AGAINST}
    with bray.Experiment(env=Nim, path=tmp_path, **made) as exp:
        row = exp.fit({"env_steps_total": 800}, progress=False)
        assert exp.foreach_worker(lambda worker: worker.model) == [None, None]
        assert all(server.forwards > 50 for server in exp.training.central.values())
    assert row["side/one/learner_steps_total"] > 0
    assert row["side/two/learner_steps_total"] > 0
    assert row["agent/first/return_mean"] == -row["agent/second/return_mean"]


class Drawn(Nim):
    """Shows how many sticks are left."""

    def render(self):
        return np.full((16, 16, 3), 20 * self._left, np.uint8)


def pairs(agent, game):
    return {"first": "one", "second": "two"}[agent]


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_games_are_evaluated_and_filmed_while_their_policies_train(tmp_path, beside):
    made = {"env": Drawn, "num_envs": 4, "eval_freq": 1, "eval_episodes": 4, "video_freq": 2, "iteration_steps": 200}
    made |= {"policies": AGAINST["policies"], "policy_mapping": "tests.train.test_games:pairs", "eval_parallel": beside}
    with bray.Experiment(path=tmp_path, **made) as exp:
        rows = list(exp.train({"training_iteration": 2}))
        last = exp.evaluate(4)
    found = rows[-1]
    assert found["eval/agent/first"] == -found["eval/agent/second"] == found["side/one/eval/return_mean"]
    assert found["eval/agent/first"] == last["eval/agent/first"]
    assert found["eval/env_steps"] == found["env_steps_total"]
    assert (tmp_path / found["video"]).stat().st_size > 500


SHARED = {
    "policies": {
        "one": {"run": "PPO", "config": SMALL},
        "two": {"run": "DQN", "config": {"learning_starts": 64}, "share_encoder": "one"},
    },
    "policy_mapping": {"first": "one", "second": "two"},
    "fcnet_activation": "relu",
}


def test_an_encoder_of_two_policies_is_one_and_its_owner_alone_trains_it(tmp_path):
    made = {"env": Nim, "num_envs": 4, "iteration_steps": 200, **SHARED}
    with bray.Experiment(path=tmp_path / "whole", **made) as exp:
        one, two = (exp.training.sides[name] for name in ("one", "two"))
        mine, theirs = acting_encoder(two.model), acting_encoder(one.model)
        places = {k: x.data_ptr() for k, x in theirs.state_dict().items()}
        assert places == {k: x.data_ptr() for k, x in mine.state_dict().items()}
        assert not list(mine.parameters())
        assert sum(p.numel() for p in two.learner.optimizer.params) == sum(p.numel() for p in two.model.parameters())
        before = weights_of(exp)
        for row in exp.train({"env_steps_total": 1000}):
            assert row  # each forward below is a recording of before
        whole = weights_of(exp)
        obs = {"obs": np.eye(13, dtype=np.float32)[1:9], "action_mask": np.ones((8, 3), np.int8)}
        engine = exp.training.sources[0].seats["two"].engine
        said = engine.model({k: torch.from_numpy(x) for k, x in obs.items()})["q"].detach().numpy()
        np.testing.assert_allclose(engine.forward(obs)["q"], said, atol=1e-6)
        assert two.version > 0
    encoder = [k for k in whole["two"] if k.startswith("core.")]
    assert encoder
    for k in encoder:
        assert np.array_equal(whole["two"][k], whole["one"][k.replace("core.", "core.encoders.0.", 1)])
    assert any(not np.array_equal(before["two"][k], whole["two"][k]) for k in encoder)
    assert any(not np.array_equal(before["two"][k], whole["two"][k]) for k in whole["two"] if k not in encoder)
    with bray.Experiment(path=tmp_path / "parts", **made) as exp:
        for row in exp.train({"env_steps_total": 1000}):
            if row["env_steps_total"] > 300:
                break
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 1000}, progress=False)
        assert same_weights(whole, weights_of(exp))
    with bray.Experiment.load(tmp_path / "parts" / "models" / "two") as alone:  # it needs no other policy to play
        left = {"obs": np.eye(13, dtype=np.float32)[12], "action_mask": np.ones(3, np.int8)}
        assert alone.policy(left) in (0, 1, 2)
        assert same_weights({"x": whole["two"]}, {"x": alone.served.engine.model.state_dict()})


@pytest.mark.slow
def test_workers_play_with_the_encoder_that_its_owner_has_now(tmp_path):
    made = {"env": Nim, "num_envs": 2, "num_workers": 2, "path": tmp_path, **SHARED}
    with bray.Experiment(**made) as exp:
        exp.fit({"env_steps_total": 600}, progress=False)
        exp.training.sources[0].gather(60.0)
        (there, _), now = exp.foreach_worker(copied_weights), weights_of(exp)
        assert exp.training.sides["one"].version > 0
    for side in now:
        for k, x in now[side].items():
            assert np.array_equal(there[side][k], x)


def copied_weights(worker):
    return {side: {k: x.numpy().copy() for k, x in m.state_dict().items()} for side, m in worker.model.items()}


@pytest.mark.parametrize(
    ("one", "two", "error", "said"),
    [
        ({"share_encoder": "two"}, {"share_encoder": "one"}, ConfigError, "two has no encoder of its own.*one owner"),
        ({}, {"share_encoder": ["one", "three"]}, ConfigError, "one policy owns an encoder: name one of one, got"),
        ({}, {"share_encoder": "tow"}, UnknownName, "unknown policy 'tow'.*two.share_encoder"),
        ({}, {"share_encoder": "two"}, UnknownName, "unknown policy 'two'.*two.share_encoder"),
        ({}, {"share_encoder": "one", "init_from": "x"}, ConfigError, "share_encoder and init_from exclude each other"),
        (
            {},
            {"share_encoder": "one", "model": {"fcnet_hiddens": [8]}},
            ConfigError,
            r"policy two, share_encoder: the encoders differ \(.*\[8, 13\] here, .*\[64, 13\]",
        ),
        (
            {"model": {"normalize_observations": True}},
            {"share_encoder": "one", "model": {"normalize_observations": True}},
            ConfigError,
            "policy two, share_encoder: the encoder keeps statistics",
        ),
    ],
)
def test_an_encoder_has_one_owner_that_it_fits(tmp_path, one, two, error, said):
    policies = {"one": {"run": "PPO", "config": SMALL} | one, "two": {"run": "PPO", "config": SMALL} | two}
    made = {"policies": policies, "policy_mapping": {"first": "one", "second": "two"}, "path": tmp_path}
    with pytest.raises(error, match=said) as raised, bray.Experiment(env=Nim, **made) as exp:
        exp.training  # noqa: B018
    assert "\n" not in str(raised.value)
