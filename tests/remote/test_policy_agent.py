"""PolicyAgent: of what an algorithm's Policy does in live games the learner gets what it gets of the same games in the
loop."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

import bray.remote.master
from bray import tree
from bray.act import Clock
from bray.algos import dqn, ppo
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.data.ring import ReplayRing
from bray.data.rollouts import Rollouts
from bray.data.rows import Decoder, to_samples
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.errors import ConfigError, Overloaded, UnknownName
from bray.inference.host import ModelHost
from bray.inference.torch_engine import TorchEngine
from bray.remote.actor.policy_agent import BufferSink, PolicyAgent
from bray.remote.algo import algo_setup, build_model
from bray.rl import returns
from bray.serving.agent import AgentActor
from bray.serving.protocol import Refusal
from bray.train import agent as agent_module
from bray.train.config import RunConfig
from bray.train.local import LocalTraining
from tests.sources_for_tests import make_piece

SCRIPTED = "tests.envs_for_tests:Scripted"


class Masked(gym.Env):
    """Choice (step mod 3) is illegal."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(-1, 100, (2,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert action != self.t % 3, "an illegal choice"
        self.t += 1
        return self._obs(), float(action), self.t == 4, False, {}

    def _obs(self):
        mask = np.ones(3, np.int8)
        mask[self.t % 3] = 0
        return {"x": np.array([self.t, 1.0], np.float32), "action_mask": mask}


class Box(gym.Env):
    observation_space = gym.spaces.Box(-2, 100, (2,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.t, action[0]], np.float32), float(action[1]), False, self.t == 5, {}


class Buffer:
    """What agents push."""

    def __init__(self):
        self.pushes = []

    name = "b"

    def push_batch(self, batch, drop=True):
        self.pushes.append(batch)

    @property
    def pieces(self):
        """As a trainer gets them, one after the other."""
        decoder = Decoder()
        return [piece.check() for pushed in self.pushes for piece in decoder.decode(pushed)[0]]

    @property
    def counts(self):
        decoder = Decoder()
        return [decoder.decode(pushed)[1] for pushed in self.pushes]


VALUES = {0: 1.0, 1: 2.0, 2: -1.0, 3: 4.0, 4: 0.5, 5: 3.0}


class Scripted:
    """A model that chooses blindly and knows the values of some observations."""

    def forward(self, obs):
        value = np.array([VALUES[int(x)] for x in obs[:, 0]], np.float32)
        return {"dist": np.zeros((len(obs), 4), np.float32), "value": value}


@pytest.fixture(autouse=True)
def merged(monkeypatch):
    """(name, value, labels) of all metrics."""
    out = []
    monkeypatch.setattr(
        bray.remote.master, "merge", lambda name, value, desc=None, **labels: out.append((name, value, labels)), False
    )
    return out


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def section(**more):
    return {"kind": "config", "algorithm": "PPO", "env": SCRIPTED, **more}


def make_config(algo, model, buffer, **agent):
    return {"mode": "train", "ppo": algo, "agent1": {"algo": "ppo", "model": model, "buffer": buffer, **agent}}


async def send(actor, obs, reward=0.0, terminated=False, truncated=False):
    obs = tree.map(lambda x: np.asarray(x).tolist(), obs)
    tick = {"obs": obs, "reward": float(reward), "terminated": bool(terminated), "truncated": bool(truncated)}
    return json.loads(await actor.tick(json.dumps(tick).encode()))["action"]


async def play(actor, env, ticks, seed=0):
    """A game by the rules of VecEnv: what its step returns is the next tick, final observations too."""
    obs, reward, terminated, truncated = env.reset(seed), [0.0], [False], [False]
    actions = []
    for _ in range(ticks):
        action = await send(actor, tree.index(obs, 0), reward[0], terminated[0], truncated[0])
        actions.append(action)
        obs, reward, terminated, truncated, _ = env.step(np.asarray(action)[None])
    await actor.end(b"")
    return actions


def make_training(algo, env_config, **model):
    """The loop, and the setup of the same algorithm on the same environment."""
    env = {"id": env_config} if isinstance(env_config, str) else env_config
    setup = algo_setup(section(env=env, settings=algo, model=model))
    training = LocalTraining(ppo, RunConfig(), EnvConfig(num_envs=1, **env), setup.model_config, setup.config)
    return setup, training


def host_of(training):
    return ModelHost("m", TorchEngine(training.model), step=3)


class Found(PolicyAgent):
    """A PolicyAgent that the test finds by the name of its session."""

    by_session: ClassVar = {}

    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        self.by_session[state.session] = self


def collect(training, rows):
    """So many rows of the loop."""
    (source,) = training.sources
    source.rows = rows
    (piece,), _ = source.gather()
    return piece


def learner_of(setup):
    return setup.make_learner(setup.make_model(), record=False)


def prepared(setup, piece):
    """What the algorithm's learner makes of a piece."""
    return learner_of(setup).prepare(piece)


def assert_same(got, want):
    assert list(got) == list(want)
    for (path, a), (_, b) in zip(tree.paths(got), tree.paths(want), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype, path
        assert np.shape(a) == np.shape(b), path
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=path)


# --- the same as in the loop ------------------------------------------------------------------------------------------

GAMES = {
    "terminated": {"id": SCRIPTED, "env_config": {"terminate_at": 5}},
    "truncated": {"id": SCRIPTED, "env_config": {"terminate_at": None, "truncate_at": 4}},
    "endless": {"id": SCRIPTED, "env_config": {"terminate_at": None}},
    "clipped": {"id": SCRIPTED, "env_config": {"terminate_at": 5}, "clip_rewards": 2.5},
    "masked": {"id": "tests.remote.test_policy_agent:Masked"},
    "continuous": {"id": "tests.remote.test_policy_agent:Box"},
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("game", GAMES)
def test_pieces_of_a_session_give_the_learner_what_the_loop_does(game, normalize):
    setup, training = make_training({"normalize_advantage": normalize, "gamma": 0.9}, GAMES[game])
    buffer = Buffer()
    actor = AgentActor(
        {"agent1": Found},
        make_config(
            section(env=GAMES[game], settings={"normalize_advantage": normalize, "gamma": 0.9}),
            host_of(training),
            buffer,
        ),
        episode_length=8,
        serialize="json",
    )

    async def main():
        await actor.start("game", b"")
        Found.by_session["game"].model.rng = np.random.default_rng([0, 0])  # the loop's own
        with make_vec(EnvConfig(**GAMES[game]), seed=0) as env:
            await play(actor, env, 27)

    run(main())
    # 27 ticks are 26 rows: the first piece is a row short, the next ones begin with the tick that was kept.
    assert sum(c.env_steps for c in buffer.counts) == sum(int(p.valid.sum()) for p in buffer.pieces)
    for rows, piece in zip((7, 8, 8, 3), buffer.pieces, strict=True):
        assert np.unique(piece.version).tolist() == [3]
        assert_same(prepared(setup, piece), prepared(setup, collect(training, rows)))
    training.close()


def test_several_games_make_the_batch_of_one_rollout():
    """Advantages are standardised over the batch and not over each game's piece, as the loop does over a rollout."""
    setup, training = make_training({"gamma": 0.9}, GAMES["terminated"])
    pieces = []
    experience, decoder = Rollouts(6, columns=3), Decoder()
    for seed in (1, 2, 3):
        training.rollout.rng = np.random.default_rng(seed)
        training.rollout.reset(seed)
        training.rollout.first[:] = True
        pieces.append(collect(training, 6))
        samples = to_samples(replace(pieces[-1], stream=np.array([seed])), seed, 6, ())
        for piece in decoder.decode(samples)[0]:
            experience.add(piece)
    names = ("obs", "action", "reward", "terminated", "truncated", "valid", "first", "outputs", "extras")
    whole = {name: tree.concat([getattr(p, name) for p in pieces], axis=1) for name in names}
    assert_same(prepared(setup, experience.next(Clock()).data), prepared(setup, Piece(**whole)))
    assert experience.next(Clock()) is None
    training.close()


@pytest.mark.parametrize("game", ["terminated", "truncated"])
def test_a_memory_is_carried_through_a_session_and_forgotten_with_an_episode(game):
    model = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}
    setup, training = make_training({"normalize_advantage": False}, GAMES[game], **model)
    buffer = Buffer()
    config = make_config(
        section(env=GAMES[game], settings={"normalize_advantage": False}, model=model), host_of(training), buffer
    )
    actor = AgentActor({"agent1": Found}, config, episode_length=8, serialize="json")

    async def main():
        await actor.start("game", b"")
        Found.by_session["game"].model.rng = np.random.default_rng([0, 0])
        with make_vec(EnvConfig(**GAMES[game]), seed=0) as env:
            await play(actor, env, 27)

    run(main())
    # Rows that do not fill a sequence wait for the next piece: 7 of 8 ticks -> 4; 3 + 8 -> 8; 3 + 8 -> 8; at the end 3
    # + 3 and padding.
    assert [len(p["reward"]) for p in buffer.pushes] == [1, 2, 2, 2]
    *full, last = buffer.pieces
    for rows, piece in zip((4, 8, 8), full, strict=True):
        whole = collect(training, rows)
        got = prepared(setup, piece)
        assert got["obs"].shape[:2] == (4, rows // 4)
        assert_same(got, prepared(setup, whole))  # advantages too: they go through all sequences of a piece
    got = prepared(setup, last)
    whole = collect(training, 6)
    want = returns.gae(**_gae_args(whole), gamma=0.99, lambda_=0.95)
    np.testing.assert_allclose(got["advantage"].T.reshape(-1)[:6], want[:, 0], rtol=1e-5, atol=1e-6)
    assert got["weight"][2:, 1].tolist() == [0.0, 0.0]  # null rows fill the last sequence
    assert got["weight"][:2, 1].tolist() == whole.valid[4:, 0].astype(float).tolist()
    training.close()


def _gae_args(piece):
    names = ("reward", "terminated", "truncated", "valid")
    return {"value": piece.outputs["value"], **{k: getattr(piece, k) for k in names}}


def test_an_update_from_a_buffer_is_the_update_of_the_loop():
    env = GAMES["terminated"]
    setup, training = make_training({"epochs": 2, "minibatches": 2, "lr": 1e-2}, env)
    torch.manual_seed(0)
    theirs = setup.make_model()
    theirs.load_state_dict(training.model.state_dict())
    learner = setup.make_learner(theirs, seed=0)
    experience, decoder = Rollouts(8, columns=1), Decoder()
    for i in range(1, 3):
        piece = collect(training, 8)
        for got in decoder.decode(to_samples(replace(piece, stream=np.array([1])), 1, 8 * i, ()))[0]:
            experience.add(got)
        mine = training.learner.update(training.learner.prepare(piece), Clock(8 * i))
        other = learner.update(learner.prepare(experience.next(Clock()).data), Clock(8 * i))
        assert other.metrics == pytest.approx(mine.metrics, rel=1e-4, abs=1e-6)
    assert learner.steps == training.learner.steps == 8
    for name, x in training.model.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], x)
    assert isinstance(learner, ppo.Learner)
    state = learner.state_dict()
    learner.load_state_dict(state)
    training.close()


# --- by hand ----------------------------------------------------------------------------------------------------------

GAMMA, LAMBDA = 0.9, 0.8


def advantage(rewards, values, bootstrap):
    """float64, from the definition: the sum of discounted TD errors."""
    values = [*values, bootstrap]
    deltas = [r + GAMMA * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((GAMMA * LAMBDA) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


BY_HAND = section(settings={"gamma": GAMMA, "lambda_": LAMBDA, "normalize_advantage": False})


def rows_of(buffer):
    """What the learner makes of each piece."""
    return [prepared(algo_setup(BY_HAND), piece) for piece in buffer.pieces]


def scripted_actor(buffer, episode_length=100):
    algo = BY_HAND
    config = make_config(algo, ModelHost("m", Scripted(), step=7), buffer)
    return AgentActor({"agent1": PolicyAgent}, config, episode_length=episode_length, serialize="json")


def tick(number):
    return [float(number), 0.0, 0.0]


def test_terminated_truncated_and_cut_episodes_by_hand(merged):
    buffer = Buffer()
    actor = scripted_actor(buffer)

    async def main():
        await actor.start("g", b"")
        await send(actor, tick(0))
        await send(actor, tick(1), 1.0)
        await send(actor, tick(2), 2.0, terminated=True)  # the final observation's value does not count
        await send(actor, tick(3))
        await send(actor, tick(4), 3.0)
        await send(actor, tick(5), 4.0, truncated=True)  # here it does
        await send(actor, tick(0))
        await send(actor, tick(1), 5.0)
        await actor.lost()  # in the middle: the last tick bootstraps the row before it

    run(main())
    (got,) = rows_of(buffer)
    want = (
        *advantage([1.0, 2.0], [1.0, 2.0], 0.0),
        0.0,
        *advantage([3.0, 4.0], [4.0, 0.5], 3.0),
        0.0,
        *advantage([5.0], [1.0], 2.0),
    )
    np.testing.assert_allclose(got["advantage"], want, rtol=1e-6)
    np.testing.assert_allclose(got["target"], np.array(want) + got["value"], rtol=1e-6)
    assert got["weight"].tolist() == [1, 1, 0, 1, 1, 0, 1]
    assert got["value"].tolist() == [VALUES[i] for i in (0, 1, 2, 3, 4, 5, 0)]
    assert got["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    np.testing.assert_allclose(got["logp"], np.log(0.25), rtol=1e-6)
    assert [(name, value) for name, value, _ in merged] == [
        ("episode_return", 3.0),
        ("episode_length", 2),
        ("episode_return", 7.0),
        ("episode_length", 2),
        ("env_steps", 5),
        ("staleness", 0.0),
    ]
    assert buffer.counts == [Counts(5, ((3.0, 2), (7.0, 2)))]  # the trainer hears of it too
    assert {labels["agent"] for *_, labels in merged} == {"agent1"}


def test_pieces_keep_their_last_tick_and_lose_no_row(merged):
    buffer = Buffer()
    actor = scripted_actor(buffer, episode_length=2)

    async def main():
        await actor.start("g", b"")
        for t in range(6):
            await send(actor, tick(t), float(t), terminated=t == 5)
        await actor.end(b"")

    run(main())
    assert [p.length for p in buffer.pieces] == [1, 2, 2]
    got = [rows["advantage"] for rows in rows_of(buffer)]
    v = VALUES
    np.testing.assert_allclose(got[0], advantage([1.0], [v[0]], v[1]), rtol=1e-6)
    np.testing.assert_allclose(got[1], advantage([2.0, 3.0], [v[1], v[2]], v[3]), rtol=1e-6)
    np.testing.assert_allclose(got[2], advantage([4.0, 5.0], [v[3], v[4]], 0.0), rtol=1e-6)
    assert ("episode_return", 15.0, {"agent": "agent1"}) in merged
    assert ("episode_length", 5, {"agent": "agent1"}) in merged


def test_a_tick_that_failed_cuts_the_rows_and_its_episode_is_not_counted(merged):
    buffer = Buffer()
    actor = scripted_actor(buffer)

    async def main():
        await actor.start("g", b"")
        await send(actor, tick(0))
        await send(actor, tick(1), 1.0)
        with pytest.raises(KeyError):
            await send(actor, tick(9), 2.0)  # the model fails
        await send(actor, tick(3), 3.0)
        await send(actor, tick(4), 4.0, terminated=True)
        await send(actor, tick(0))
        await send(actor, tick(1), 1.5, terminated=True)
        await actor.end(b"")

    run(main())
    v = VALUES
    one, two = rows_of(buffer)
    assert one["obs"][:, 0].tolist() == [0.0]
    assert two["obs"][:, 0].tolist() == [3.0, 4.0, 0.0]
    np.testing.assert_allclose(one["advantage"], advantage([1.0], [v[0]], v[1]), rtol=1e-6)
    np.testing.assert_allclose(two["advantage"][0], advantage([4.0], [v[3]], 0.0)[0], rtol=1e-6)
    assert [value for name, value, _ in merged if name == "episode_return"] == [1.5]


def test_staleness_is_how_many_steps_the_weights_are_behind(merged):
    buffer = Buffer()
    setup = algo_setup(section())
    model = setup.make_model()
    engine = TorchEngine(model)
    host = ModelHost("m", engine, step=10)
    actor = AgentActor(
        {"agent1": PolicyAgent}, make_config(section(), host, buffer), episode_length=3, serialize="json"
    )
    weights = {k: v.numpy() for k, v in model.state_dict().items()}

    async def main():
        await actor.start("g", b"")
        await send(actor, tick(0))
        host.publish_weights(weights, 16)
        await send(actor, tick(1))
        host.publish_weights(weights, 22)
        await send(actor, tick(2))
        await actor.end(b"")

    run(main())
    assert [m for m in merged if m[0] == "staleness"] == [("staleness", 22 - (10 + 16) / 2, {"agent": "agent1"})]
    assert [p.version[:, 0].tolist() for p in buffer.pieces] == [[10, 16]]


# --- playing, and playing to learn ------------------------------------------------------------------------------------


class Prefers:
    """A model that prefers action 2, but not by much."""

    def forward(self, obs):
        dist = np.tile(np.array([0.0, 0.0, 0.5, 0.0], np.float32), (len(obs), 1))
        return {"dist": dist, "value": np.zeros(len(obs), np.float32)}


@pytest.mark.parametrize(
    "change", [{"explore": False}, {"buffer": None}, {"mode": "deploy"}], ids=["explore: false", "no buffer", "deploy"]
)
def test_an_agent_that_does_not_learn_plays_its_best_and_pushes_nothing(change, merged):
    buffer = Buffer()
    config = make_config(section(), ModelHost("m", Prefers()), buffer)
    if "mode" in change:
        config |= change
        config["agent1"]["buffer"] = "a buffer that is not there in deploy mode"
    else:
        config["agent1"] |= change
    actor = AgentActor({"agent1": PolicyAgent}, config, episode_length=4, serialize="json")

    async def main():
        await actor.start("g", b"")
        actions = [await send(actor, tick(0), truncated=t == 19) for t in range(20)]
        # a game in production sends no rewards
        actions.append(json.loads(await actor.tick(json.dumps({"obs": tick(1)}).encode()))["action"])
        await actor.end(b"")
        return actions

    assert run(main()) == [2] * 21
    assert buffer.pushes == []
    assert [m[0] for m in merged if m[0] != "env_steps"] == ["episode_return", "episode_length"]


def test_agents_of_a_process_share_one_policy():
    config = make_config(section(), ModelHost("m", Prefers()), Buffer())
    actors = [AgentActor({"agent1": Found}, config, serialize="json") for _ in range(3)]

    async def main():
        for i, actor in enumerate(actors):
            await actor.start(f"g{i}", b"")
        return [Found.by_session[f"g{i}"] for i in range(3)]

    agents = run(main())
    assert len({id(a.model.policy) for a in agents}) == 1
    assert agents[0].model.config is config  # so that no other config can have its id and get this player
    other = make_config(section(), ModelHost("other", Prefers()), Buffer())
    actor = AgentActor({"agent1": Found}, other, serialize="json")
    run(actor.start("g", b""))
    assert Found.by_session["g"].model is not agents[0].model
    assert Found.by_session["g"].model.host.name == "other"


def test_a_subclass_speaks_the_games_own_language():
    class Speaks(PolicyAgent):
        def observe(self, state):
            x, reward, over = (float(n) for n in state.input.split())
            return [x, 0.0, 0.0], reward, bool(over), False

        def answer(self, state, action):
            state.output = b"go %d" % action

    buffer = Buffer()
    config = make_config(section(), ModelHost("m", Prefers()), buffer)
    actor = AgentActor({"agent1": Speaks}, config, serialize=None)

    async def main():
        await actor.start("g", b"")
        replies = [await actor.tick(b) for b in (b"0 0 0", b"1 2.5 0", b"2 1 1")]
        await actor.end(b"")
        return replies

    assert all(reply in (b"go 0", b"go 1", b"go 2", b"go 3") for reply in run(main()))
    (piece,) = buffer.pieces
    assert piece.obs[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    rows = prepared(algo_setup(section(settings={"normalize_advantage": False})), piece)
    assert rows["target"].tolist() == pytest.approx([2.5 + 0.99 * 0.95 * 1.0, 1.0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1, 2], r'expected \{"obs"'),
        ({"observation": 1}, r'expected \{"obs"'),
        ({"obs": [1.0, 2.0], "reward": 0}, r"expected shape \[3\], got \[2\]"),
        ({"obs": [1.0, 2.0, 3.0], "reward": "much"}, r"reward to be a finite number \(of float32\), got 'much'"),
        ({"obs": [1.0, 2.0, 3.0]}, "expected the reward of the previous action"),
    ],
)
def test_a_wrong_tick_is_answered_with_what_was_expected_and_the_session_goes_on(body, message):
    buffer = Buffer()
    config = make_config(section(), ModelHost("m", Prefers()), buffer)
    actor = AgentActor({"agent1": PolicyAgent}, config, serialize="json")

    async def main():
        await actor.start("g", b"")
        await actor.tick(json.dumps({"obs": tick(0)}).encode())  # the first one needs no reward
        with pytest.raises(Refusal, match=message) as refused:
            await actor.tick(json.dumps(body).encode())
        assert refused.value.status == 400
        await send(actor, tick(1), 1.0)
        await send(actor, tick(2), 1.0)
        await actor.end(b"")

    run(main())
    assert [p.obs[:-1, 0, 0].tolist() for p in buffer.pieces] == [
        [1.0]
    ]  # the row before the wrong tick has no successor


def test_options_of_the_actor_hold_for_its_agents():
    config = make_config(section(), ModelHost("m", Prefers()), Buffer())
    config["actor1"] = {"kind": "actor", "agents": ["agent1"], "check_obs": "refuse", "reward_range": 5.0}
    actor = AgentActor({"agent1": PolicyAgent}, config, serialize="json")

    async def main():
        await actor.start("g", b"")
        with pytest.raises(Refusal, match="obs: 2000 is not from -1 to 1000"):
            await send(actor, [2000.0, 0.0, 0.0])
        await send(actor, tick(0))
        with pytest.raises(Refusal, match="expected reward to be a number from -5 to 5, got 6") as refused:
            await send(actor, tick(1), 6.0)
        assert refused.value.status == 400
        await send(actor, tick(1), -5.0)

    run(main())


def test_composite_actions_leave_as_json():
    env = {"id": "tests.remote.test_policy_agent:Box"}
    _, training = make_training({}, env)
    actor = AgentActor(
        {"agent1": PolicyAgent}, make_config(section(env=env), host_of(training), Buffer()), serialize="json"
    )

    async def main():
        await actor.start("g", b"")
        return await send(actor, [0.0, 0.0])

    action = run(main())
    assert len(action) == 2
    assert all(-2.0 <= x <= 2.0 for x in action)
    training.close()


# --- algorithms that replay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("game", ["terminated", "truncated"])
def test_transitions_of_dqn_are_those_of_the_replay(game, n_step):
    algo = section(algorithm="DQN", env=GAMES[game], settings={"n_step": n_step, "gamma": 0.9, "epsilon": 0.5})
    setup = algo_setup(algo)
    buffer = Buffer()
    host = ModelHost("m", TorchEngine(setup.make_model()))
    actor = AgentActor({"agent1": PolicyAgent}, make_config(algo, host, buffer), episode_length=None, serialize="json")
    example = {"obs": np.zeros(3, np.float32), "action": np.int64(0)}
    replay = ReplayRing(64, 1, example, gamma=0.9, n_step=n_step)

    async def main():
        with make_vec(setup.env_config, seed=0) as env:
            obs, reward, terminated, truncated = env.reset(0), [0.0], [False], [False]
            await actor.start("g", b"")
            for _ in range(20):
                action = await send(actor, obs[0], reward[0], terminated[0], truncated[0])
                before, dead = obs, env.dead.copy()
                obs, reward, terminated, truncated, _ = env.step(np.array([action]))
                replay.add(before, np.array([action]), reward, terminated, truncated, ~dead)
            await actor.end(b"")

    run(main())
    (piece,) = buffer.pieces
    experience = setup.make_experience()
    experience.add(piece)

    def all_of(ring):
        drawn = ring.sample(4096, np.random.default_rng(0), 1.0)
        ids, where = np.unique(drawn["id"], return_index=True)
        assert len(ids) == len(ring)
        return tree.index({k: v for k, v in drawn.items() if k != "id"}, where)

    got = all_of(experience.ring)
    assert_same(got, all_of(replay))
    learner = learner_of(setup)
    assert isinstance(learner, dqn.Learner)
    assert np.isfinite(learner.update(learner.prepare(got), Clock()).metrics["loss"])


def test_exploration_follows_the_environment_steps_that_come_with_the_weights():
    epsilon = {"kind": "linear", "start": 1.0, "end": 0.0, "steps": 1400}
    algo = section(algorithm="DQN", settings={"epsilon": epsilon})

    class Best:
        def forward(self, obs):
            return {"q": np.tile(np.array([0.0, 0.0, 0.5, 0.0], np.float32), (len(obs), 1))}

    host = ModelHost("m", Best())
    actor = AgentActor({"agent1": Found}, make_config(algo, host, Buffer()), serialize="json")

    async def best(env_steps):
        host.env_steps = env_steps
        return np.mean([await send(actor, tick(0)) == 2 for _ in range(200)])

    async def main():
        await actor.start("g", b"")
        Found.by_session["g"].model.rng = np.random.default_rng(0)
        return [await best(n) for n in (0, 700, 1400)]

    none, half, all_ = run(main())
    assert none == pytest.approx(0.25, abs=0.1)
    assert half == pytest.approx(0.625, abs=0.1)
    assert all_ == 1.0


def test_sac_makes_transitions_too():
    algo = section(
        algorithm="SAC", env="tests.remote.test_policy_agent:Box", settings={"batch_size": 16, "learning_starts": 0}
    )
    setup = algo_setup(algo)
    buffer = Buffer()
    host = ModelHost("m", TorchEngine(setup.make_model()))
    actor = AgentActor({"agent1": PolicyAgent}, make_config(algo, host, buffer), episode_length=8, serialize="json")

    async def main():
        await actor.start("g", b"")
        with make_vec(setup.env_config, seed=0) as env:
            await play(actor, env, 20)

    run(main())
    experience = setup.make_experience()
    for piece in buffer.pieces:
        experience.add(piece)
    assert len(experience) == sum(c.env_steps for c in buffer.counts) == 16  # 19 rows, three of them dead
    batch = experience.next(Clock(16)).data
    assert batch["action"].shape == (16, 2)
    assert batch["discount"].tolist() == pytest.approx([0.99] * 16)
    assert np.isfinite(learner_of(setup).update(batch, Clock(16)).metrics["critic_loss"])


def test_what_cannot_be_learned_is_refused_before_a_session_starts():
    def start(algo):
        AgentActor({"agent1": PolicyAgent}, make_config(algo, ModelHost("m", Prefers()), Buffer()))

    with pytest.raises(ConfigError, match="DQN replays single steps"):
        start(section(algorithm="DQN", model={"use_lstm": True}))
    with pytest.raises(ConfigError, match="agent1: normalize_rewards needs the games side by side"):
        start(section(env={"id": SCRIPTED, "normalize_rewards": True}))
    with pytest.raises(ConfigError, match="agent1: expected model: NAME"):
        AgentActor({"agent1": PolicyAgent}, make_config(section(), None, Buffer()))


# --- the section ------------------------------------------------------------------------------------------------------


def test_a_section_gives_the_four_names_and_their_settings():
    setup = algo_setup(section(settings={"lr": 0.5}, model={"fcnet_hiddens": [8]}), "ppo")
    assert setup.algo is ppo
    assert setup.config.lr == 0.5
    assert setup.spec.observation.shape == (3,)
    assert setup.model_config.fcnet_hiddens == (8,)
    assert algo_setup(section(settings={"lr": 0.5}, model={"fcnet_hiddens": [8]}), "ppo") is setup
    model, args = build_model("m1", {"m1": {"kind": "model", "algo": "ppo"}, "ppo": section()})
    outputs = model(*tree.map(torch.from_numpy, args))
    assert {k: tuple(v.shape) for k, v in outputs.items()} == {"dist": (1, 4), "value": (1,)}
    model, args = build_model("m1", {"m1": {"algo": "ppo"}, "ppo": section(model={"use_lstm": True})})
    assert "state" in model(*tree.map(torch.from_numpy, args))


def test_an_environment_given_as_a_class():
    assert algo_setup(section(env=Masked)).spec.layout.num_logits == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"algoritm": "PPO"}, UnknownName, "unknown key 'algoritm' .in ppo.*Did you mean 'algorithm'"),
        ({"algorithm": "PPPO"}, UnknownName, "Did you mean 'PPO'"),
        ({"env": None}, ConfigError, "ppo describes an algorithm: expected .*; env missing"),
        ({"env": "CartPole-v11"}, UnknownName, "CartPole-v1"),
        ({"settings": {"lrr": 1}}, UnknownName, r"lrr.*section ppo"),
        ({"model": {"fcnet_hiddens": "many"}}, ConfigError, "fcnet_hiddens"),
    ],
)
def test_a_wrong_section_says_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        algo_setup(section() | change, "ppo")


def test_a_component_names_its_algorithm():
    config = {"ppo": section(), "agent1": {"algo": "pppo", "model": "m"}, "agent2": {"model": "m"}}
    for name, message in (("agent1", "unknown section 'pppo'.*Did you mean 'ppo'"), ("agent2", "expected algo: NAME")):
        with pytest.raises(ConfigError, match=message):  # before a game comes
            AgentActor({name: PolicyAgent}, config)


# --- a buffer that is full --------------------------------------------------------------------------------------------


class Full(Buffer):
    """Has room when it is told so."""

    def __init__(self):
        super().__init__()
        self.room, self.drops, self.refuses = asyncio.Event(), [], False

    def push_batch(self, batch, drop=True):
        if self.refuses:
            raise Overloaded("too many wait")
        super().push_batch(batch)
        self.drops.append(drop)
        return self.room.wait()


def test_a_game_waits_for_room_in_the_buffer_and_not_for_ever(merged):
    async def main():
        buffer = Full()
        config = make_config(section(), ModelHost("m", Scripted()), buffer, wait_s=0.5)
        actor = AgentActor({"agent1": PolicyAgent}, config, episode_length=2, serialize="json")
        await actor.start("g", b"")

        async def tick(i):
            return await actor.tick(json.dumps({"obs": [i % 5, 0, 0], "reward": 0.0}).encode())

        for i in range(5):  # two episodes wait, and the game goes on
            await tick(i)
        waiting = asyncio.create_task(tick(5))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        buffer.room.set()
        await waiting
        buffer.room.clear()
        for i in range(6, 12):  # nobody makes room: each episode waits its time, and the samples are on their way
            await tick(i)
        buffer.refuses = True
        for i in range(12, 16):
            await tick(i)
        buffer.room.set()
        await actor.end(b"")
        return buffer

    buffer = run(main())
    assert buffer.drops == [False] * len(buffer.drops)
    assert len(buffer.pushes) >= 4
    assert [m[0] for m in merged].count("samples_dropped") >= 1  # what was refused for as long as it may wait


@pytest.mark.parametrize("value", [-1, "long", True, 60])
def test_a_wait_that_is_no_time_is_refused(value):
    config = make_config(section(), ModelHost("m", Scripted()), Buffer(), wait_s=value)
    with pytest.raises(ConfigError, match="expected wait_s to be seconds"):
        AgentActor({"agent1": PolicyAgent}, config, serialize="json")


class CountsRows(Scripted):
    """Remembers the sizes of its batches."""

    def __init__(self):
        self.batches = []

    def forward(self, obs):
        self.batches.append(len(obs))
        return super().forward(obs)


def games_that_ask(count, steps):
    """How ticks are decided on when one more game sends its tick in each turn of the loop."""
    model = CountsRows()
    config = make_config(section(), ModelHost("m", model, max_batch_size=64), Buffer())

    async def main():
        actors = [AgentActor({"agent1": PolicyAgent}, config, serialize="json") for _ in range(count)]
        for i, actor in enumerate(actors):
            await actor.start(f"g{i}", b"")
        await send(actors[0], tick(0))  # the first takes another way
        model.batches.clear()
        for _ in range(steps):
            waiting = []
            for actor in actors:
                waiting.append(asyncio.ensure_future(send(actor, tick(1))))
                await asyncio.sleep(0)
            await asyncio.gather(*waiting)

    run(main())
    return model.batches


def test_games_that_play_side_by_side_are_decided_on_together():
    assert games_that_ask(5, 3) == [5, 5, 5]
    assert games_that_ask(1, 3) == [1, 1, 1]


def test_a_tick_does_not_wait_for_all_the_others():
    batches = games_that_ask(50, 1)
    assert batches[0] == agent_module.MAX_TICKS
    assert sum(batches) == 50


@pytest.mark.parametrize("error", [LookupError("not this one"), StopIteration(), SystemExit(3)])
def test_an_answer_that_fails_is_the_error_of_its_own_tick(merged, error):
    class Picky(PolicyAgent):
        def answer(self, state, action):
            if state.obs[0] == 2:
                raise error
            super().answer(state, action)

    config = make_config(section(), ModelHost("m", Scripted()), Buffer())

    async def main():
        actors = [AgentActor({"agent1": Picky}, config, serialize="json") for _ in range(3)]
        for i, actor in enumerate(actors):
            await actor.start(f"g{i}", b"")
        await send(actors[0], tick(0))
        ticks = [{"obs": tick(i + 1), "reward": 0.0} for i in range(3)]
        replies = [actor.tick(json.dumps(t).encode()) for actor, t in zip(actors, ticks, strict=True)]
        await asyncio.wait(replies)
        return replies

    one, two, three = run(main())
    raised = two.exception()
    assert isinstance(raised, RuntimeError) if isinstance(error, StopIteration) else raised is error
    assert raised.__notes__ == ["raised by agent 'agent1'"]
    assert {"action", "version"} == set(json.loads(one.result())) == set(json.loads(three.result()))


def test_a_tick_that_nobody_waits_for_is_not_decided_on():
    model = CountsRows()
    config = make_config(section(), ModelHost("m", model), Buffer())

    async def main():
        actors = [AgentActor({"agent1": PolicyAgent}, config, serialize="json") for _ in range(2)]
        for i, actor in enumerate(actors):
            await actor.start(f"g{i}", b"")
        await send(actors[0], tick(0))
        model.batches.clear()
        given_up = asyncio.ensure_future(send(actors[0], tick(1)))
        other = asyncio.ensure_future(send(actors[1], tick(1)))
        await asyncio.sleep(0)
        given_up.cancel()
        await other
        await send(actors[0], tick(2))

    run(main())
    assert model.batches == [1, 1]


def test_at_the_end_of_a_service_no_game_waits_for_a_trainer_that_is_gone():
    """Its buffer never takes anything: a game that may wait six seconds is let go at once."""

    class Full:
        name = "full"

        def push_batch(self, batch, drop=True):
            raise Overloaded("full")

    sink = BufferSink("agent", Full(), 6.0, SimpleNamespace(step=0))

    async def main():
        waiting = asyncio.create_task(sink.push(make_piece(np.random.default_rng(0), 3, 0), Counts(3)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        sink.stop_waiting()
        await asyncio.wait_for(waiting, 3.0)

    run(main())
