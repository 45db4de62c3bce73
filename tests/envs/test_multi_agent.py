"""Games of several agents: ours, RLlib's and PettingZoo's as they are, OpenSpiel's; and what the check says of them."""

import re

import numpy as np
import pytest
from gymnasium import spaces

import bray
from bray.envs import EnvConfig, env_spec, make_vec
from bray.envs.agent_games import Hunt, Matrix, Nim, TwoStep
from bray.envs.build import Builder
from bray.envs.check import check_env
from bray.envs.multi_agent import ALL, adapt_agents
from bray.errors import ConfigError, EnvError, UnknownName
from bray.train.rollout import Rollout


class MultiAgentEnv:
    """What classes of RLlib are derived from, in its shape and without it."""


class OldRLlib(MultiAgentEnv):
    """Of its first years: numbers for agents, one space for all, `reset` without a seed, four values of `step`."""

    def __init__(self):
        self.observation_space = spaces.Box(0.0, 9.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self):
        self.t = 0
        return {0: self.see(), 1: self.see()}

    def see(self):
        return np.array([self.t], np.float32)

    def step(self, actions):
        assert set(actions) == {0, 1}
        self.t += 1
        done = self.t == 3
        return {0: self.see(), 1: self.see()}, {0: 1.0, 1: float(actions[1])}, {0: done, 1: done, ALL: done}, {}


class NewRLlib(MultiAgentEnv):
    """Of today: agent b leaves in step 2 and is back in step 4."""

    def __init__(self, config=None):
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys("ab", spaces.Box(0.0, 9.0, (1,), np.float32))
        self.action_spaces = dict.fromkeys("ab", spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.t, self.agents = 0, ["a", "b"]
        return self.see("ab"), {}

    def see(self, agents):
        return {agent: np.array([self.t], np.float32) for agent in agents}

    def step(self, actions):
        assert sorted(actions) == self.agents
        self.t += 1
        rewards = dict.fromkeys(actions, 1.0)
        if self.t == 2:
            self.agents = ["a"]
            return self.see("ab"), rewards, {"b": True, ALL: False}, {ALL: False}, {}
        if self.t == 4:
            self.agents = ["a", "b"]
        return self.see(self.agents), rewards, {ALL: self.t == 6}, {ALL: False}, {}


class ParallelEnv:
    """What classes of PettingZoo are derived from; agents leave one by one, and nobody says `__all__`."""

    possible_agents = ("x", "y")

    def __init__(self):
        self.agents = []

    def observation_space(self, agent):
        return spaces.Discrete(5)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, ["x", "y"]
        return dict.fromkeys(self.agents, 0), {"x": {}, "y": {}}

    def step(self, actions):
        self.t += 1
        now, cut = self.agents, self.t == 3
        ends = {agent: agent == "y" and self.t == 2 for agent in now}
        cuts = dict.fromkeys(now, cut)
        self.agents = [] if cut else [agent for agent in now if not ends[agent]]
        return dict.fromkeys(now, self.t), dict.fromkeys(now, 1.0), ends, cuts, {agent: {} for agent in now}


def play(env, choose=lambda agent: 0):
    """One game: who acted in each step, and what each got."""
    obs, _ = env.reset(seed=0)
    acting, turns, got = sorted(obs), [], dict.fromkeys(env.possible_agents, 0.0)
    while True:
        turns.append("".join(acting))
        obs, rewards, terminateds, truncateds, _ = env.step({agent: choose(agent) for agent in acting})
        for agent, reward in rewards.items():
            got[agent] += reward
        if terminateds[ALL] or truncateds[ALL]:
            return turns, got, bool(terminateds[ALL])
        acting = sorted(a for a in obs if not (terminateds.get(a) or truncateds.get(a)))


def test_classes_of_rllib_run_as_they_are():
    env = adapt_agents(OldRLlib())
    assert env.possible_agents == ["0", "1"]
    assert play(env, lambda agent: 1) == (["01"] * 3, {"0": 3.0, "1": 3.0}, True)
    env = adapt_agents(NewRLlib())
    assert play(env) == (["ab", "ab", "a", "a", "ab", "ab"], {"a": 6.0, "b": 4.0}, True)


def test_a_parallel_game_of_pettingzoo_is_over_when_nobody_is_left():
    assert play(adapt_agents(ParallelEnv())) == (["xy", "xy", "x"], {"x": 3.0, "y": 2.0}, False)


def test_others_are_games_of_one():
    assert adapt_agents(object()) is None
    assert isinstance(adapt_agents(TwoStep()), bray.MultiAgentEnv)


def test_connect_four_of_pettingzoo_is_played_in_turns():
    pytest.importorskip("pettingzoo")
    env = Builder.of(EnvConfig("pettingzoo:classic.connect_four_v3")).agents()
    turns, got, over = play(env, lambda agent: 0 if agent == "player_0" else 1)
    assert turns == ["player_0", "player_1"] * 3 + ["player_0"]  # four in the first column
    assert (got, over) == ({"player_0": 1.0, "player_1": -1.0}, True)


def test_spread_of_mpe2_declares_its_state():
    pytest.importorskip("mpe2")
    teams = {"team": ["agent_0", "agent_1", "agent_2"]}
    spec = env_spec(EnvConfig("pettingzoo:mpe2.simple_spread_v3", teams=teams))
    assert dict(spec.observation.items)["obs"].shape == (3, 18)
    assert spec.global_state.shape == (54,)
    assert spec.action.n == (5, 5, 5)


def test_games_of_openspiel():
    pytest.importorskip("pyspiel")
    env = Builder.of(EnvConfig("openspiel:kuhn_poker")).agents()
    first, _ = env.reset(seed=1)
    assert list(first) == ["player_0"]
    again, _ = env.reset(seed=1)
    np.testing.assert_array_equal(first["player_0"]["obs"], again["player_0"]["obs"])  # the cards are of the seed
    turns, got, _ = play(env)
    assert turns == ["player_0", "player_1"]
    assert sorted(got.values()) == [-1.0, 1.0]
    both = Builder.of(EnvConfig("openspiel:matrix_pd")).agents()
    turns, got, _ = play(both, lambda agent: 1 if agent == "player_0" else 0)
    assert (turns, got) == (["player_0player_1"], {"player_0": 10.0, "player_1": 0.0})
    with pytest.raises(UnknownName, match=r"unknown game of OpenSpiel 'kuhn_pokr'.*kuhn_poker"):
        Builder.of(EnvConfig("openspiel:kuhn_pokr")).agents()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("openspiel:", ConfigError, "openspiel: names no game"),
        ("pettingzoo:mpe2", ConfigError, "mpe2 has neither parallel_env nor env; games in it: .*simple_spread_v3"),
        ("pettingzoo:mpe2.simple_spred_v3", UnknownName, "unknown game 'simple_spred_v3' .*'simple_spread_v3'"),
        ("pettingzoo:classic.connect_for_v3", UnknownName, "unknown game 'connect_for_v3' .*'connect_four_v3'"),
        ("pettingzoo:no_such.game_v0", ConfigError, "it needs the module 'no_such', which is not installed"),
    ],
)
def test_a_name_that_means_no_game_is_told_from_a_package_that_is_not_there(name, error, said):
    pytest.importorskip("mpe2")
    with pytest.raises(error, match=said):
        Builder.of(EnvConfig(name)).agents()


def test_a_game_that_does_not_say_who_plays_or_what_they_see_is_refused():
    class Silent(NewRLlib, bray.MultiAgentEnv):
        """Says nothing of its spaces."""

        def __init__(self):
            self.possible_agents = ["a", "b"]

    with pytest.raises(EnvError, match="Silent does not say the observation space of agent 'a': set observation_spac"):
        env_spec(EnvConfig(Silent))

    class Nobody(Silent):
        def __init__(self):
            self.possible_agents = []

    with pytest.raises(EnvError, match="Nobody does not say who plays: set possible_agents"):
        env_spec(EnvConfig(Nobody))


STEP = r"step returns \(observations, rewards, terminateds, truncateds, infos\), five dicts by agent, got "


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("step", ({}, {}, {}, {}), STEP + "4 values: dict, dict, dict, dict"),
        ("step", None, STEP + "None"),
        ("step", ([0, 1], {}, {"__all__": False}, {}, {}), STEP + "5 values: list, dict, dict, dict, dict"),
        ("reset", {"a": 0}, r"reset returns \(observations, infos\), two dicts by agent, got dict"),
    ],
)
@pytest.mark.parametrize("teams", [{}, {"t": ["a", "b"]}])
def test_answers_of_another_form_are_one_line_in_training_and_in_the_check(name, answer, said, teams):
    class Odd(TwoStep):
        pass

    setattr(Odd, name, lambda self, *_, **__: answer)
    config = EnvConfig(id=Odd, num_envs=1, teams=teams)

    def play(env):
        env.reset(seed=0)
        env.step(np.zeros((1, 2), np.int64) if teams else {"default": np.zeros((1, 2), np.int64)})

    with make_vec(config, seed=0) as env, pytest.raises(EnvError, match=said):
        play(env)
    (found,) = check_env(config, steps=5)
    assert re.search(said, found.message)


def test_what_plays_games_of_one_says_so():
    said = r"TwoStep is a game of several agents.*env.teams joins all agents"
    with make_vec(EnvConfig(id=TwoStep, num_envs=2), seed=0) as env, pytest.raises(ConfigError, match=said):
        Rollout(env, None, None, None)


# --- our games --------------------------------------------------------------------------------------------------------


def test_the_two_step_game_pays_what_the_paper_says():
    paid = {}
    for first in (0, 1):
        for a in (0, 1):
            for b in (0, 1):
                game = TwoStep()
                game.reset()
                game.step({"a": first, "b": 1})
                paid[first, a, b] = sum(game.step({"a": a, "b": b})[1].values())
    assert [paid[0, a, b] for a in (0, 1) for b in (0, 1)] == [7.0] * 4
    assert [paid[1, a, b] for a in (0, 1) for b in (0, 1)] == [0.0, 1.0, 1.0, 8.0]


@pytest.mark.parametrize(
    ("game", "equilibrium", "value"),
    [("biased_rps", [0.25, 0.5, 0.25], 0.0), ("zero_sum", [0.375, 0.625], -0.125)],
)
def test_nobody_gains_in_the_equilibrium_of_a_matrix_game(game, equilibrium, value):
    paid = np.zeros((len(equilibrium),) * 2)
    for mine, its in np.ndindex(*paid.shape):
        env = Matrix(game)
        acting, got, over = play(env, lambda agent, pair=(mine, its): pair[agent == "column"])
        assert (acting, over) == (["columnrow"], True)
        assert got["row"] == -got["column"]
        paid[mine, its] = got["row"]
    np.testing.assert_allclose(paid @ equilibrium, value, atol=1e-12)
    np.testing.assert_allclose(equilibrium @ paid, value, atol=1e-12)


def test_matrices_are_named_or_given():
    told = play(Matrix("prisoners_dilemma"), lambda agent: int(agent == "row"))[1]
    assert told == {"row": 0.0, "column": -20.0}
    own = Matrix([[[1, 2, 3], [4, 5, 6]], [[0, 0, 7], [0, 0, 0]]])
    assert [own.action_spaces[agent].n for agent in ("row", "column")] == [2, 3]
    assert play(own, lambda agent: 0 if agent == "row" else 2)[1] == {"row": 3.0, "column": 7.0}
    with pytest.raises(UnknownName, match=r"unknown matrix game 'rps'.*biased_rps"):
        Matrix("rps")
    with pytest.raises(ConfigError, match=r"game: expected one table of payoffs or two of one shape"):
        Matrix([[[1, 2]], [[1], [2]]])


def test_nim_is_won_by_who_takes_the_last():
    env = Nim(sticks=4)
    assert play(env, lambda agent: 0) == (["first", "second"] * 2, {"first": -1.0, "second": 1.0}, True)


@pytest.mark.parametrize("returns", [0, 4])
def test_the_dead_of_the_hunt_are_silent_until_they_are_back(returns):
    env = Hunt(length=200, returns=returns)
    deaths = came_back = 0
    for seed in range(5):
        acting, _ = env.reset(seed=seed)
        rng, dead = np.random.default_rng(seed), {}
        for t in range(1, 200):
            obs, rewards, terminateds, _, _ = env.step({a: rng.integers(3) for a in acting})
            assert rewards.keys() == acting.keys()
            fallen = [a for a in acting if terminateds.get(a)]
            for agent in [a for a in obs if a in dead]:
                assert returns
                assert t - dead.pop(agent) == returns
                came_back += 1
            dead |= dict.fromkeys(fallen, t)
            deaths += len(fallen)
            acting = {a: x for a, x in obs.items() if a not in fallen}
            if terminateds[ALL]:
                break
    assert deaths
    assert bool(came_back) == bool(returns)


# --- the check --------------------------------------------------------------------------------------------------------


class Faulty(NewRLlib):
    """Wrong in one way each, from step 3 on, in which agent b is out of the game."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault

    def step(self, actions):
        obs, rewards, terminateds, truncateds, infos = super().step(actions)
        if self.t == 3:
            if self.fault == "turn":
                obs["b"] = obs["a"]
            if self.fault == "dead":
                rewards["b"] = 5.0
            if self.fault == "all":
                del terminateds[ALL]
            if self.fault == "space":
                obs["a"] = np.array([10.0], np.float32)
            if self.fault == "shape":
                obs["a"] = np.zeros(2, np.float32)
            if self.fault == "stranger":
                obs["c"] = obs["a"]
            if self.fault == "nobody":
                obs.clear()
            if self.fault == "nan":
                rewards["a"] = float("nan")
        return obs, rewards, terminateds, truncateds, infos


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("turn", "episode 0, step 3: agent 'b' has an observation and would act out of turn"),
        ("dead", "episode 0, step 3: a reward of 5.0 for agent 'b', who ended at episode 0, step 2"),
        ("all", "episode 0, step 3: terminateds has no '__all__'"),
        ("space", "episode 0, step 3, agent 'a': observation[0] is 10.0, outside its space [0.0, 9.0]"),
        ("shape", "episode 0, step 3, agent 'a': observation has shape (1,) in its space, got (2,)"),
        ("stranger", "episode 0, step 3: an observation for agent 'c', who is not in possible_agents ['a', 'b']"),
        ("nobody", "episode 0, step 3: nobody who is in the game has an observation"),
        ("nan", "episode 0, step 3, agent 'a': the reward is a finite number, got nan"),
    ],
)
def test_the_check_names_agent_and_step(fault, said):
    findings = check_env(EnvConfig(Faulty, env_config={"fault": fault}), steps=20)
    assert [f.severity for f in findings] == ["error"]
    assert findings[0].message.startswith(said)


@pytest.mark.parametrize("game", [NewRLlib, OldRLlib, ParallelEnv, TwoStep, Hunt, Nim])
def test_the_check_finds_nothing_in_games_without_faults(game):
    assert check_env(EnvConfig(game), steps=60) == []


class Dice(TwoStep):
    def step(self, actions):
        out = super().step(actions)
        return (out[0], {"a": float(np.random.default_rng().random()), "b": 0.0}, *out[2:])


def test_the_check_finds_dice_that_no_seed_throws():
    (finding,) = check_env(EnvConfig(Dice), steps=20)
    assert finding.message.startswith("two runs with the same seed and actions differ at step 0")


def test_without_all_a_training_stops_and_says_so():
    joined = make_vec(EnvConfig(NoAll, teams={"t": ["a", "b"]}), seed=0)
    joined.reset()
    with pytest.raises(EnvError, match="NoAll: terminateds and truncateds have no '__all__'"):
        joined.step(np.zeros((1, 2), np.int64))


@pytest.mark.parametrize("reward", [None, np.ones(3)], ids=["none", "array"])
@pytest.mark.parametrize("teams", [{}, {"t": ["a", "b"]}], ids=["agents", "team"])
def test_a_reward_that_is_no_number_names_its_agent(reward, teams):
    class Odd(TwoStep):
        def step(self, actions):
            obs, _, *rest = super().step(actions)
            return obs, {"a": 1.0, "b": reward}, *rest

    env = make_vec(EnvConfig(Odd, teams=teams), seed=0)
    env.reset()
    with pytest.raises(EnvError, match=r"agent 'b': its reward is .*expected a number"):
        env.step(np.zeros((1, 2), np.int64) if teams else {"default": np.zeros((1, 2), np.int64)})


class NoAll(TwoStep):
    def step(self, actions):
        out = super().step(actions)
        return (*out[:2], {}, {}, {})
