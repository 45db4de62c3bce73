"""Agents joined into one by `env.teams`, and the global state beside what they see."""

import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces

from bray import tree
from bray.data.rollouts import Rollouts
from bray.envs import EnvConfig, env_spec, make_vec
from bray.envs.agent_games import Hunt, Nim, TwoStep
from bray.envs.check import check_env
from bray.envs.multi_agent import ALL, MultiAgentEnv
from bray.envs.vector import episode_seed
from bray.errors import ConfigError, EnvError, UnknownName
from bray.experiment import Experiment, export_graph
from bray.spec import EnvSpec

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
HUNTERS = {"team": ["hunter_0", "hunter_1", "hunter_2"]}


def by_hand(seed, actions, **options):
    """What a team of hunters sees and gets, from the game alone: rows of (obs, mask, state, rewards, alive, ends)."""
    game = Hunt(**options)
    seen, _ = game.reset(seed=seed)
    acting, rows = list(seen), []

    def joined(obs, acting):
        stack = np.zeros((3, 24), np.float32)
        mask = np.tile(np.array([1, 0, 0], np.int8), (3, 1))
        for i, hunter in enumerate(HUNTERS["team"]):
            if hunter in obs:
                stack[i] = obs[hunter]["obs"]
            if hunter in acting:
                mask[i] = obs[hunter]["action_mask"]
        return stack, mask, game.global_state()

    rows.append((*joined(seen, acting), None, None, False))
    for action in actions:
        obs, rewards, terminateds, truncateds, _ = game.step(
            {h: action[i] for i, h in enumerate(HUNTERS["team"]) if h in acting}
        )
        alive = [h in acting for h in HUNTERS["team"]]
        over = terminateds[ALL] or truncateds[ALL]
        acting = [] if terminateds[ALL] else [h for h in obs if not terminateds.get(h)]
        paid = [rewards.get(h, 0.0) for h in HUNTERS["team"]]
        rows.append((*joined(obs, acting), paid, alive, over))
        if over:
            break
    return rows


@pytest.mark.parametrize("vector", ["inprocess", "subprocess"])
def test_a_team_is_its_members_row_by_row(vector):
    config = EnvConfig(Hunt, teams=HUNTERS, vector=vector, num_envs=1, env_config={"length": 25, "cells": 8})
    deaths = 0
    with make_vec(config, seed=3) as env:
        obs = env.reset()
        rng = np.random.default_rng(0)
        for episode in range(6):
            played, rows = [], [(tree.index(obs, 0), None, None, False)]
            while not rows[-1][-1]:
                mask = obs["action_mask"][0].astype(bool)
                played.append([int(rng.choice(np.flatnonzero(m))) for m in mask])
                obs, reward, terminated, truncated, infos = env.step(np.array([played[-1]]))
                rows.append((tree.index(obs, 0), float(reward[0]), infos[0], bool(terminated[0] or truncated[0])))
            expected = by_hand(episode_seed(3, 0, episode), played, length=25, cells=8)
            assert len(rows) == len(expected)
            for (seen, reward, info, over), (stack, mask, state, paid, alive, ends) in zip(rows, expected, strict=True):
                np.testing.assert_array_equal(seen["obs"], stack)
                np.testing.assert_array_equal(seen["action_mask"], mask)
                np.testing.assert_array_equal(seen["global_state"], state)
                assert over == ends
                if paid is not None:
                    assert reward == sum(paid)
                    np.testing.assert_array_equal(info["rewards"], np.array(paid, np.float32))
                    assert info["alive"].tolist() == alive
                    deaths += not all(alive)
            obs, *_ = env.step(np.zeros((1, 3), np.int64))  # the row between two episodes
    assert deaths


def test_returning_members_act_again():
    env = make_vec(EnvConfig(Hunt, teams=HUNTERS, num_envs=1, env_config={"length": 200, "returns": 3}), seed=1)
    obs, back, rng = env.reset(), 0, np.random.default_rng(1)
    before = np.ones(3, bool)
    for _ in range(190):
        mask = obs["action_mask"][0].astype(bool)
        obs, _, _, _, infos = env.step(np.array([[rng.choice(np.flatnonzero(m)) for m in mask]]))
        if infos is None:  # the row between two episodes
            before = np.ones(3, bool)
            continue
        back += int((infos[0]["alive"] & ~before).sum())
        before = infos[0]["alive"]
    assert back > 0


@pytest.mark.parametrize(
    ("env", "teams", "error", "said"),
    [
        (Hunt, {"t": ["hunter_0", "huntr_1"]}, UnknownName, r"unknown agent 'huntr_1' \(env.teams.t\).*hunter_1"),
        (Hunt, {"t": ["hunter_0", "hunter_1"]}, ConfigError, "'t' and 'hunter_2' have other observation spaces"),
        (Hunt, {"t": ["hunter_0"] * 2}, ConfigError, "hunter_0 is in t and in t"),
        (Hunt, {"t": []}, ConfigError, "env.teams.t has no members"),
        ("CartPole-v1", {"t": ["a"]}, ConfigError, "env.teams joins agents of a game of several, and CartPole-v1"),
    ],
)
def test_what_does_not_join_is_refused(env, teams, error, said):
    config = EnvConfig(env, teams=teams, num_envs=8)  # so many that CartPole would have its vector form
    for make in (env_spec, lambda config: make_vec(config, seed=0)):
        with pytest.raises(error, match=said):
            make(config)


def test_a_member_that_is_missing_is_named():
    env = make_vec(EnvConfig(Nim, teams={"t": ["first", "second"]}), seed=0)
    with pytest.raises(EnvError, match=r"env.teams.t: second has no observation at step 0 and has not ended"):
        env.reset()


class Mixed(MultiAgentEnv):
    """Two who see and choose different things."""

    possible_agents = ("big", "small")
    observation_spaces = {  # noqa: RUF012
        "big": spaces.Box(0.0, 1.0, (2, 2), np.float32),
        "small": spaces.Dict({"a": spaces.Discrete(2), "global_state": spaces.Box(0.0, 1.0, (1,), np.float32)}),
    }
    action_spaces = {"big": spaces.Discrete(4), "small": spaces.Discrete(2, start=5)}  # noqa: RUF012

    def see(self):
        small = {"a": 1, "global_state": np.full(1, 0.5, np.float32)}
        return {"big": np.full((2, 2), 0.25, np.float32), "small": small}

    def reset(self, *, seed=None, options=None):
        return self.see(), {}

    def step(self, actions):
        return self.see(), {"big": actions["big"], "small": actions["small"]}, {ALL: False}, {ALL: False}, {}


def test_members_that_differ_are_filled_up():
    env = make_vec(EnvConfig(Mixed, teams={"t": ["big", "small"]}), seed=0)
    obs = env.reset()
    np.testing.assert_array_equal(obs["obs"][0], [[0.25] * 4, [0.0, 1.0, 0.5, 0.0]])
    np.testing.assert_array_equal(obs["action_mask"][0], [[1, 1, 1, 1], [1, 1, 0, 0]])
    assert env.step(np.array([[3, 1]]))[1].tolist() == [3 + 6]  # in their own units
    assert env.spec.global_state is None  # not declared: a key like any other, which is seen


# --- the global state -------------------------------------------------------------------------------------------------


class Both(gym.Env):
    """A Dict with a key `global_state`, declared or not."""

    def __init__(self, declares=False):
        box = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"near": box, "global_state": box})
        self.action_space = spaces.Discrete(2)
        if declares:
            self.global_state_space = box

    def see(self):
        return {"near": np.full(2, 0.25, np.float32), "global_state": np.full(2, 0.5, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action):
        self.t += 1
        return self.see(), 1.0, self.t == 5, False, {}


@pytest.mark.parametrize("declares", [True, False])
def test_a_declared_state_reaches_learners_and_nobody_who_acts(tmp_path, monkeypatch, declares):
    learnt = []
    add = Rollouts.add
    monkeypatch.setattr(Rollouts, "add", lambda self, piece: (learnt.append(set(piece.obs)), add(self, piece))[1])
    config = {"declares": declares}
    exp = Experiment("PPO", Both, path=tmp_path / "run", env_config=config, rollout_length=8, num_envs=2, minibatches=1)
    for _ in exp.train({"training_iteration": 2}):
        pass
    exp.close()
    acting = {"near"} if declares else {"near", "global_state"}
    spec = json.loads((tmp_path / "run" / "spec.json").read_text())
    assert set(spec["observation"]["names"]) == acting
    assert learnt[0] == {"near", "global_state"}
    graph = export_graph(tmp_path / "run", trust=True)
    inputs = {i.name for i in onnxruntime.InferenceSession(str(graph)).get_inputs()}
    assert any("near" in name for name in inputs)
    assert any("global_state" in name for name in inputs) != declares


def test_a_spec_keeps_state_and_members_in_files():
    spec = env_spec(EnvConfig(Hunt, teams=HUNTERS))
    assert spec.team == tuple(HUNTERS["team"])
    assert "global_state" not in spec.observation.names
    assert set(spec.given.names) == {"obs", "action_mask", "global_state"}
    assert EnvSpec.from_json(spec.to_json()) == spec
    assert "team" not in env_spec(EnvConfig("CartPole-v1")).to_json()


def test_a_state_that_wrappers_take_away_is_told():
    with pytest.raises(ConfigError, match=r"declares global_state_space.*env.flatten_obs"):
        env_spec(EnvConfig(TwoStep, teams={"t": ["a", "b"]}, flatten_obs=True))


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    """Every python block of docs/agents.md, one after the other; PPO passes once over each rollout."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        block = block.replace('{"run": "PPO"}', '{"run": "PPO", "config": {"epochs": 1}}')
        exec(block.replace("rollout_length=32)", "rollout_length=32, epochs=1)"), names)
    row = json.loads((names["exp"].path / "result.jsonl").read_text().splitlines()[-1])
    assert row["env_steps_total"] >= 1000
    assert row["loss/td_error"] is not None
    assert check_env(EnvConfig(names["Meet"]), steps=60) == []
    names["exp"].close()
