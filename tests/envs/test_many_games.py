"""Many games in one object: the same episodes as game by game, self-play, resume, and games that differ."""

import numpy as np
import pytest
from gymnasium import spaces

import bray
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.many_games import ManyGames
from bray.envs.table import Seating
from bray.errors import CheckpointError, ConfigError

AGENTS = ("ann", "bob")


class Race(ManyGames):
    """Two count in turn, from a number by the seed, by one or two; who comes to `goal` wins. Eight steps cut it off."""

    possible_agents = AGENTS
    observation_spaces = dict.fromkeys(
        AGENTS,
        spaces.Dict({"obs": spaces.Box(0, 1, (20,), np.float32), "action_mask": spaces.Box(0, 1, (2,), np.int8)}),
    )
    action_spaces = dict.fromkeys(AGENTS, spaces.Discrete(2))

    def __init__(self, num_games=1, goal=12):
        n = num_games
        self.goal, self.count, self.steps = goal, np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.obs = {"obs": np.zeros((n, 2, 20), np.float32), "action_mask": np.ones((n, 2, 2), np.int8)}
        self.acts, self.reward = np.zeros((n, 2), bool), np.zeros((n, 2), np.float32)
        self.terminated, self.truncated = np.zeros(n, bool), np.zeros(n, bool)

    def begin(self, game, seed):
        self.count[game], self.steps[game] = seed % 3, 0
        self.acts[game] = [True, False]
        self.see(np.array([game]))

    def see(self, which):
        self.obs["obs"][which] = np.eye(20, dtype=np.float32)[self.count[which], None]

    def step(self, actions, playing):
        which = np.flatnonzero(playing)
        turn = self.steps[which] % 2
        self.count[which] += 1 + actions[which, turn]
        self.steps[which] += 1
        won = self.count[which] >= self.goal
        self.reward[which, turn], self.reward[which, 1 - turn] = won, -1.0 * won
        self.terminated[which], self.truncated[which] = won, ~won & (self.steps[which] == 8)
        self.acts[which, turn], self.acts[which, 1 - turn] = False, True
        self.see(which)


def played(form, steps=60, **config):
    """What seats that act or end saw and were paid, and how games ended."""
    rng, out = np.random.default_rng(3), []
    with make_vec(EnvConfig(id=Race, num_envs=9, vector=form, **config), seed=5) as env:
        kind, obs = type(env).__name__, env.reset()
        for _ in range(steps):
            side = obs["default"]
            seen = np.where((side["flags"] > 0)[..., None], side["obs"]["obs"], 0.0)
            out.append((seen, side["flags"].copy(), side["reward"].copy(), side["agent"].copy(), obs["tick"].copy()))
            obs, *rest, _ = env.step({"default": rng.integers(2, size=(9, 2))})
            out.append((*rest, env.dead))
    return kind, out


@pytest.mark.parametrize("config", [{}, {"max_episode_steps": 5}, {"env_config": {"goal": 9}}])
def test_all_in_one_object_play_what_they_play_one_by_one(config):
    (kind, together), (other, alone) = played("auto", **config), played("inprocess", **config)
    assert (kind, other) == ("ManyGamesVecEnv", "InProcessVecEnv")
    for t, (mine, theirs) in enumerate(zip(together, alone, strict=True)):
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"step {t // 2}")
    ends = np.array([mine[3] for mine in together[1::2]])
    assert ends.sum() > 30, "games ended"


def test_games_that_differ_are_one_by_one():
    def form_of(seating=None, **config):
        with make_vec(EnvConfig(id=Race, **{"num_envs": 9, **config}), seed=0, seating=seating) as env:
            return type(env).__name__

    assert form_of(vector="native", num_envs=2) == form_of(num_envs=8) == "ManyGamesVecEnv"
    assert form_of(num_envs=7) == form_of(per_env=[{"goal": 9}]) == "InProcessVecEnv"
    assert form_of(Seating(AGENTS)) == "InProcessVecEnv"
    with pytest.raises(ConfigError, match="no native vector form"):
        form_of(vector="native", per_env=[{"goal": 9}])


def test_self_play_learns_from_them_and_resumes_exactly(tmp_path):
    settings = {"num_envs": 16, "rollout_length": 16, "epochs": 1, "minibatches": 1, "iteration_steps": 256}
    play = {"snapshot_every": 256, "pool": 3, "opponents": ["random"]}

    def run(path, *stops):
        exp = bray.Experiment("PPO", Race, path=path, fcnet_hiddens=[16], lr=3e-3, self_play=play, **settings)
        for stop in stops:
            with exp:
                exp.fit({"env_steps_total": stop}, progress=False)
            if stop != stops[-1]:
                exp = bray.Experiment.resume(path, env=Race, trust=True)
        return {k: v for k, v in exp.last_row.items() if k.startswith("loss/")}

    assert run(tmp_path / "whole", 1536) == run(tmp_path / "halves", 768, 1536)
    matches = bray.Experiment.load(tmp_path / "whole", env=Race, trust=True).play_games(20)
    assert len(matches) == 20
    assert {abs(m.returns["ann"]) for m in matches} <= {0.0, 1.0}


def test_a_state_of_other_games_is_refused():
    small, large = Race(2), Race(3)
    small.begin(0, 7)
    with pytest.raises(CheckpointError, match="not the state of these games"):
        large.set_state(small.get_state())


def test_arguments_for_evaluations_are_others(tmp_path):
    config = {"env_config": {"goal": 3}, "eval_env_config": {"goal": 12}, "num_envs": 8}
    exp = bray.Experiment(
        "PPO", Race, path=tmp_path / "run", fcnet_hiddens=[8], rollout_length=8, minibatches=1, **config
    )
    with exp:
        row = exp.fit({"env_steps_total": 64}, progress=False)
        assert row["episode_length_mean"] <= 3
        assert min(match.length for match in exp.play_games(8)) >= 5
