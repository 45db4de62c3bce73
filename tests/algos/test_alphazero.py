"""AlphaZero: the search against a recursion, what is kept and learnt, positions of games, serving, resume."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import bray
from bray import tree
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Tick, decide_now, search_with
from bray.act.tree_search import GAME_OVER, NOT_TRIED, Trees, grow
from bray.algos import alphazero
from bray.cli.main import main as cli
from bray.data.piece import Piece
from bray.data.positions import Positions
from bray.envs.agent_games import ConnectFour, Hunt, Matrix, Nim
from bray.envs.build import env_spec
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.multi_agent import AdaptedAgents
from bray.envs.outside_games import OpenSpiel
from bray.envs.positions import KnownPositions
from bray.errors import ConfigError, EnvError
from bray.nn import ModelConfig
from bray.rundir.trust import UntrustedRun
from bray.service import PolicyService, configure
from bray.serving.background import BackgroundServer
from bray.serving.config import ServedModelConfig
from bray.serving.model import ServedModel
from bray.spec import MOVES
from bray.train.mcts import MCTS, best_move
from tests.serving_for_tests import Wire

C = 1.3
QUICK = {"num_envs": 4, "simulations": 6, "learning_starts": 40, "batch_size": 16, "train_every": 8}
SMALL = {"fcnet_hiddens": [8]}


def judged(obs):
    """Prior logits and a value of what is seen, which have nothing to do with the game: (float[9], float)."""
    seen = np.asarray(obs["obs"], np.float64).ravel()
    waves = np.sin(np.arange(1, 10)[:, None] * (1 + np.arange(len(seen)))) @ seen
    return 2.0 * np.sin(3.0 * waves), float(np.sin(5.0 * waves.sum()))


def prior_of(logits, mask):
    odds = np.where(mask, np.exp(logits[: len(mask)]), 0.0)
    return odds / odds.sum()


def searched(positions, simulations, leaves=1):
    """The batched search with `judged` as its network: visits, and the trees."""
    actions = len(positions[0].mask)
    trees = Trees(len(positions), simulations + 1, actions, C)

    def evaluated(found):
        priors = np.array([prior_of(judged(p.obs)[0], p.mask) for p in found])
        return priors, np.array([judged(p.obs)[1] for p in found])

    growing = grow(trees, positions, evaluated(positions)[0], simulations, leaves)
    asked = next(growing)
    while True:
        assert all(sum(p is q for q in asked) == 1 for p in asked)
        try:
            asked = growing.send(evaluated(asked))
        except StopIteration as end:
            return end.value, trees


class Node:
    """A recursive search by the book, which shares nothing with ours but the formula."""

    def __init__(self, env, agent, obs):
        mask = np.asarray(obs["action_mask"]) > 0
        logits, self.value = judged(obs)
        self.env, self.agent, self.children = env, agent, {}
        self.prior = prior_of(logits, mask)
        self.legal = [int(a) for a in np.flatnonzero(mask)]
        self.n, self.w = dict.fromkeys(self.legal, 0), dict.fromkeys(self.legal, 0.0)

    def visit(self):
        """The value of one more simulation, to who decides here."""

        def score(a):
            q = self.w[a] / self.n[a] if self.n[a] else 0.0
            return q + C * self.prior[a] * (1 + sum(self.n.values())) ** 0.5 / (1 + self.n[a])

        action = max(self.legal, key=lambda a: (score(a), -a))
        if action in self.children:
            paid, child = self.children[action]
            theirs = 0.0 if child is None else child.visit()
        else:
            env = self.env.clone()
            obs, rewards, ends, _, _ = env.step({self.agent: action})
            paid = rewards.get(self.agent, 0.0)
            child = None if ends["__all__"] else Node(env, next(iter(obs)), next(iter(obs.values())))
            self.children[action] = paid, child
            theirs = 0.0 if child is None else child.value
        value = paid + (theirs if child is not None and child.agent == self.agent else -theirs)
        self.n[action] += 1
        self.w[action] += value
        return value


def reference(make, moves, simulations):
    env = make()
    obs, _ = env.reset()
    for move in moves:
        obs, *_ = env.step({next(iter(obs)): move})
    root = Node(env, next(iter(obs)), next(iter(obs.values())))
    for _ in range(simulations):
        root.visit()
    return root


class Twice(Nim):
    """Nim in which a player who takes one stick moves again, and is paid for it."""

    def step(self, actions):
        ((player, take),) = actions.items()
        obs, rewards, *rest = super().step(actions)
        if take == 0 and len(obs) == 1:
            self._turn = 1 - self._turn
            return {player: self._seen()}, {player: 0.25}, *rest
        return obs, rewards, *rest


@pytest.mark.parametrize("make", [Nim, Twice, ConnectFour, OpenSpiel("tic_tac_toe")])
def test_the_batched_search_equals_a_recursion_visit_for_visit(make):
    starts = [[], [2], [2, 1]] if make in (Nim, Twice) else [[], [3], [3, 2, 4], [0, 1, 4, 2]]
    known = KnownPositions(make)
    positions = [known.at(np.array([*moves, -1], np.int16)) for moves in starts]
    visits, trees = searched(positions, 150)
    for i, moves in enumerate(starts):
        root = reference(make, moves, 150)
        np.testing.assert_array_equal(visits[i][root.legal], [root.n[a] for a in root.legal])
        np.testing.assert_allclose(trees.total[i, 0][root.legal], [root.w[a] for a in root.legal], atol=1e-9)
        assert visits[i].sum() == 150


@pytest.mark.parametrize("leaves", [2, 3, 7])
def test_several_leaves_at_a_time_leave_no_loss_behind(leaves):
    """Every simulation is counted once, and every total is the sum of what was found below, to the last."""
    known = KnownPositions(ConnectFour)
    positions = [known.at(np.array([*moves, -1], np.int16)) for moves in ([], [3], [0, 1, 0, 1, 0, 2])]
    visits, trees = searched(positions, 100, leaves)
    np.testing.assert_array_equal(visits.sum(1), 100)
    for g, position in enumerate(positions):

        def check(node, at, g=g):
            for a in np.flatnonzero(trees.visits[g, node]).tolist():
                n, total, behind = trees.visits[g, node, a], trees.total[g, node, a], trees.behind[g, node, a]
                paid, after = at.after(a)
                assert behind != NOT_TRIED
                if behind == GAME_OVER:
                    assert after is None
                    assert total == pytest.approx(n * paid)
                    continue
                below = trees.visits[g, behind].sum()
                assert 1 <= n - below <= leaves
                found = (n - below) * judged(after.obs)[1] + trees.total[g, behind].sum()
                assert total == pytest.approx(n * paid - found)
                check(behind, after)

        check(0, position)
    assert visits[2].argmax() == 0  # three in a column: four of them win


def spec_of(env, **more):
    return next(iter(env_spec(EnvConfig(id=env, moves=True, **more)).sides.values())).spec


def policy_of(env, **config):
    return alphazero.Policy(alphazero.Config(**config), spec_of(env))


def tick_of(policy, *moves):
    """What those who decide after these moves see."""
    known = KnownPositions(policy.spec.game)
    (most,) = dict(policy.spec.observation.items)[MOVES].shape
    seen = []
    for played in moves:
        row = np.array([*played, *[-1] * (most - len(played))], np.int16)
        at = known.at(row)
        seen.append({**(at.obs if at else known.at(row * 0 - 1).obs), MOVES: row})
    return Tick({k: np.stack([s[k] for s in seen]) for k in seen[0]})


def forward(obs):
    found = [judged({"obs": x}) for x in obs["obs"]]
    width = obs["action_mask"].shape[1]
    return {"dist": np.array([d[:width] for d, _ in found], np.float32), "value": np.array([v for _, v in found])}


def test_a_decision_is_the_search_of_those_who_decide():
    policy = policy_of(ConnectFour, simulations=50, c_puct=C, leaves=2, temperature_moves=0)
    tick = tick_of(policy, [], [3], [3, 3])._replace(acts=np.array([True, False, True]))
    rows = []

    def counted(obs):
        rows.append(len(obs["obs"]))
        return forward(obs)

    for mode, clock in ((GREEDY, Clock()), (SAMPLE, TRAINED)):
        decision = decide_now(policy.decide(tick, None, np.random.default_rng(0), mode, clock), counted)
        pi = decision.extras["pi"]
        known = KnownPositions(ConnectFour)
        visits, _ = searched([known.at(tick.obs[MOVES][i]) for i in (0, 2)], 50, leaves=2)
        np.testing.assert_allclose(pi[[0, 2]], visits / 50, atol=1e-6)
        np.testing.assert_array_equal(decision.action[[0, 2]], visits.argmax(1))
        assert not pi[1].any()
    assert set(rows) == {3}  # as many as are recorded


def test_noise_and_draws_are_of_training_alone_and_of_each_row_its_own():
    policy = policy_of(Nim, simulations=40, temperature_moves=2, dirichlet_share=0.8)
    tick = tick_of(policy, [], [], [1], [1, 1])

    def decide(mode, clock, seed=0):
        return decide_now(policy.decide(tick, None, np.random.default_rng(seed), mode, clock), forward)

    plain = decide(GREEDY, Clock()).extras["pi"]
    np.testing.assert_array_equal(decide(SAMPLE, TRAINED).extras["pi"], plain)
    noisy = decide(SAMPLE, Clock()).extras["pi"]
    assert (noisy != plain).any(1).all()
    assert (noisy[0] != noisy[1]).any()  # of one position, in two games
    np.testing.assert_array_equal(noisy, decide(SAMPLE, Clock()).extras["pi"])
    actions = np.array([decide(SAMPLE, TRAINED, seed).action for seed in range(60)])
    assert [len(set(column)) > 1 for column in actions.T.tolist()] == [True, True, True, False]  # two moves are drawn
    often = np.bincount(actions[:, :2].ravel(), minlength=3) / 120
    np.testing.assert_allclose(often, plain[0], atol=0.15)


def test_where_the_moves_are_of_no_game_the_network_decides(caplog):
    policy = policy_of(ConnectFour, simulations=10)
    tick = tick_of(policy, [3], [3] * 7, [0, 1, 0, 1, 0, 1, 0])  # a full column; a game that is over
    decision = decide_now(policy.decide(tick, None, None, GREEDY, TRAINED), forward)
    assert decision.extras["pi"].any(1).tolist() == [True, False, False]
    alone = forward(tick.obs)["dist"]
    assert decision.action[1:].tolist() == np.where(tick.obs["action_mask"] > 0, alone, -9)[1:].argmax(1).tolist()
    decide_now(policy.decide(tick_of(policy, [2] * 7), None, None, GREEDY, TRAINED), forward)
    assert caplog.text.count("no game that goes on has the moves") == 1
    assert "the moves [3, 3, 3, 3, 3, 3, 3, -1" in caplog.text
    policy.simulations = 0
    decision = decide_now(policy.decide(tick, None, None, GREEDY, TRAINED), forward)
    assert decision.action.tolist() == np.where(tick.obs["action_mask"] > 0, alone, -9).argmax(1).tolist()


def test_observations_have_the_moves():
    with make_vec(EnvConfig(id=ConnectFour, moves=True, num_envs=2), seed=0) as env:
        env.reset(0)
        for move in (3, 5):
            obs, *_ = env.step({"default": np.full((2, 2), move)})
        assert obs["default"]["obs"][MOVES][0].tolist()[0][:4] == [3, 5, -1, -1]
        assert obs["default"]["obs"][MOVES].dtype == np.int16


class Shuffled(Nim):
    def reset(self, *, seed=None, options=None):
        self.sticks = 12 - (seed or 0)
        return super().reset(seed=seed)


class Endless(Nim):
    def __init__(self):
        super().__init__()
        self.max_moves = 3


@pytest.mark.parametrize(
    ("game", "words"),
    [
        (OpenSpiel("kuhn_poker"), "openspiel:kuhn_poker cannot be searched: it has chance and hidden information"),
        (OpenSpiel("matrix_rps"), "hidden information|players who act at once"),
        (Matrix, r"Matrix cannot be searched: define clone\(self\)"),
        (Hunt, "Hunt has 3 agents: a search is for games of two"),
        (lambda: AdaptedAgents(Plain()), r"Plain cannot be searched: define clone\(self\)"),
        (Shuffled, "Shuffled begins otherwise with another seed: a search is for games without chance"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(game, words):
    with pytest.raises(ConfigError, match=words) as e:
        KnownPositions(game)
    assert "\n" not in str(e.value)


def test_a_training_is_refused_before_it_begins():
    exp = bray.Experiment("AlphaZero", "openspiel:kuhn_poker")
    with pytest.raises(ConfigError, match="it has chance and hidden information"):
        _ = exp.training


class Plain:
    possible_agents = ("a", "b")
    observation_spaces = action_spaces = Nim().action_spaces | dict.fromkeys("ab", Nim().action_spaces["first"])

    def reset(self):
        return {"a": 0}


def test_what_env_moves_is_not_for():
    for env, words in ((Matrix, "does not say how long its games are: set max_moves"), ("CartPole-v1", "has one")):
        with pytest.raises(ConfigError, match=words):
            env_spec(EnvConfig(id=env, moves=True))
    with make_vec(EnvConfig(id=Endless, moves=True), seed=0) as env:
        env.reset(0)
        for _ in range(3):
            env.step({"default": np.zeros((1, 2), np.int64)})
        with pytest.raises(EnvError, match="more than 3 actions: set a larger max_moves"):
            env.step({"default": np.zeros((1, 2), np.int64)})
    with pytest.raises(ConfigError, match=r"set env\.moves=true"):
        bray.Experiment("AlphaZero", Nim, moves=False).training  # noqa: B018
    with pytest.raises(ConfigError, match="has no use for a memory"):
        bray.Experiment("AlphaZero", Nim, use_lstm=True).training  # noqa: B018
    with pytest.raises(ConfigError, match="a live game cannot be copied"):
        alphazero.experience(alphazero.Config(), spec_of(Nim), ModelConfig()).check_live()


def a_piece(rewards, ends, first, start=0, stream=0):
    t = len(rewards)
    column = np.arange(start, start + t)
    return Piece(
        obs={"obs": np.append(column, 99)[:, None]},
        action=column[:, None],
        reward=np.array(rewards, np.float32)[:, None],
        terminated=np.array(ends, bool)[:, None],
        truncated=np.zeros((t, 1), bool),
        valid=np.ones((t, 1), bool),
        first=np.array([*first, False], bool)[:, None],
        outputs={},
        extras={"pi": column[:, None]},
        stream=np.array([stream]),
        start=np.array([start]),
    )


def test_a_position_waits_for_the_outcome_of_its_game():
    kept = Positions(4, 2)
    kept.add(a_piece([0, 0.5], [0, 0], [1, 0]))
    assert len(kept) == 0
    other = Positions(4, 2)
    other.set_state(kept.get_state(None), None)
    for positions in (kept, other):
        positions.add(a_piece([-1.0], [1], [0], start=2))
        assert len(positions) == 3
        drawn = positions.get_state(None)
        assert not drawn["exact"]
        rows = positions.newest_obs(3)
        assert rows["obs"].tolist() == [2, 1, 0]
    again = Positions(4, 2)
    again.set_state(kept.get_state("here"), "here")
    again.add(a_piece([1.0, 0.0], [0, 1], [1, 0], stream=5, start=7))
    rows = again.get_state("here")["arrays"]["positions"]["rows"]
    assert rows["outcome"].tolist() == [0.0, -0.5, -1.0, 1.0]  # the fifth takes the place of the first
    assert rows["pi"].tolist() == [8, 1, 2, 7]


def test_the_loss_equals_a_float64_loop():
    spec = spec_of(Nim)
    torch.manual_seed(0)
    config = alphazero.Config(value_coef=0.7, max_grad_norm=None)
    model_config = ModelConfig(fcnet_hiddens=(8,))
    model = alphazero.make_model(config, spec, model_config)
    learner = alphazero.Learner(config, spec, model, model_config, record=False)
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], np.int8)
    pi = rng.random((4, 3)) * mask
    batch = {
        "obs": {"obs": rng.random((4, 13), np.float32), "action_mask": mask, MOVES: rng.integers(-1, 3, (4, 12))},
        "pi": (pi / pi.sum(1, keepdims=True)).astype(np.float32),
        "outcome": np.array([1, -1, 0, 1], np.float32),
    }
    with torch.no_grad():
        out = model({k: torch.from_numpy(x) for k, x in batch["obs"].items()})
    policy_loss = value_loss = entropy = 0.0
    for i in range(4):
        legal = np.flatnonzero(mask[i])
        logits, target = out["dist"][i].double().numpy()[legal], batch["pi"][i].astype(np.float64)[legal]
        logp = logits - np.log(np.exp(logits).sum())
        policy_loss -= (target * logp).sum() / 4
        entropy -= (target * np.log(target)).sum() / 4
        value_loss += (float(batch["outcome"][i]) - float(out["value"][i])) ** 2 / 4
    metrics = learner.update(batch, Clock()).metrics
    want = {"policy_loss": policy_loss, "value_loss": value_loss, "target_entropy": entropy}
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-5)
    assert (out["value"].abs() < 1).all()
    moved = {**batch["obs"], MOVES: batch["obs"][MOVES] * 0}
    with torch.no_grad():  # the moves are for the search
        again, changed = (model({k: torch.from_numpy(x) for k, x in o.items()}) for o in (batch["obs"], moved))
    assert torch.equal(again["dist"], changed["dist"])


@pytest.mark.parametrize("make", [ConnectFour, OpenSpiel("tic_tac_toe")])
def test_every_second_position_is_learnt_as_in_a_mirror(make):
    """What the mirror shows is what the game would have been, played in it."""
    spec = spec_of(make) if make is ConnectFour else spec_of("openspiel:tic_tac_toe")
    config, known = alphazero.Config(mirror=True), KnownPositions(make)
    model = alphazero.make_model(config, spec, ModelConfig(**SMALL))
    learner = alphazero.Learner(config, spec, model, ModelConfig(**SMALL), 0, False)
    width = 7 if make is ConnectFour else 3
    played = [2, 1, 2, 0, 6, 1] if make is ConnectFour else [2, 1, 5]
    mirrored = [move - move % width + width - 1 - move % width for move in played]
    at, there = (known.at(np.array([*moves, -1], np.int16)) for moves in (played, mirrored))
    batch = {
        "obs": {k: np.stack([x, x]) for k, x in at.obs.items()} | {MOVES: np.array([[*played, -1]] * 2)},
        "pi": np.stack([np.arange(len(at.mask), dtype=np.float32)] * 2),
        "outcome": np.array([1, -1], np.float32),
    }
    given = copy.deepcopy(batch)
    learnt = learner.prepare(batch)
    for name in ("obs", "action_mask"):
        np.testing.assert_array_equal(learnt["obs"][name], np.stack([at.obs[name], there.obs[name]]))
    actions = np.arange(len(at.mask))
    np.testing.assert_array_equal(learnt["pi"][1], actions - actions % width + width - 1 - actions % width)
    np.testing.assert_array_equal(learnt["pi"][0], actions)
    assert tree.equal(batch, given)  # the replay's own
    nim = spec_of(Nim)
    model = alphazero.make_model(config, nim, ModelConfig(**SMALL))
    with pytest.raises(ConfigError, match="set mirror=false"):
        alphazero.Learner(config, nim, model, ModelConfig(**SMALL), 0, False)


def test_a_run_goes_on_exactly_is_evaluated_and_served(tmp_path):
    def weights(exp):
        return exp.training.weights()

    made = {"run": "AlphaZero", "env": "bray.envs.agent_games:Nim", "config": {**QUICK, "iteration_steps": 100}}
    made |= {"model": SMALL}
    with bray.Experiment(**made, path=tmp_path / "whole") as exp:
        row = exp.fit({"env_steps_total": 400}, progress=False)
        whole = weights(exp)
    assert row["loss/policy_loss"] > 0
    with bray.Experiment(**made, path=tmp_path / "parts") as exp:
        for row in exp.train({"env_steps_total": 400}):
            if row["env_steps_total"] >= 200:
                break
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 400}, progress=False)
        assert all(np.array_equal(x, weights(exp)[k]) for k, x in whole.items())
    path = tmp_path / "parts"
    assert json.loads((path / "policy.json").read_text())["rule"] is None
    exp = bray.Experiment.load(path)
    assert exp.evaluate(4)["eval/length_mean"] > 2
    served, seen = exp.served, Nim().reset()[0]["first"]
    after = KnownPositions(Nim).at(np.array([2, 2, 2, -1], np.int16)).obs  # three sticks are left: take them all
    played = np.full(12, -1, np.int16)
    played[:3] = 2
    served.policy.simulations = 30
    assert served({**after, MOVES: played}) == 2
    from bray.experiment import torch_engine

    def model(**config):
        return ServedModel("nim", path, ServedModelConfig(**config), torch_engine)

    with pytest.raises(ConfigError, match=r"acts in a way of its own, which needs its code.*--engine torch"):
        model()
    serving = model(engine="torch", simulations=30)
    serving.open()
    mask = np.ones((2, 3), bool)
    obs = {k: np.stack([seen[k], after[k]]) for k in seen} | {MOVES: np.stack([played * 0 - 1, played])}
    assert serving.shares[0].version.engine.forward(obs, mask)["action"][1] == 2
    assert serving.policy.simulations == 30


def test_a_service_searches_as_long_as_it_is_told(tmp_path, capsys):
    """Over a socket: with enough simulations whoever can win Nim does, and 0 is the network alone."""
    path = tmp_path / "run"
    with bray.Experiment("AlphaZero", Nim, path=path, model=SMALL, **QUICK) as exp:
        exp.fit({"training_iteration": 1}, progress=False)
    from bray.experiment import torch_engine

    def answers(simulations):
        asked = {"port": 0, "admin_port": 0, "engine": "torch", "simulations": simulations}
        service, model = configure([bray.config.ConfigSource("test", asked)])
        served = PolicyService({"nim": path}, model, torch_engine=torch_engine)
        known, played = KnownPositions(Nim), [[], [0], [0, 2], [1, 2, 1], [2, 2], [2, 2, 2]]
        with BackgroundServer(served.make_actor, service, served.prepare) as server, Wire(server.port) as wire:
            wire.step("start", "game", b"{}")
            for moves in played:
                row = [*moves, *[-1] * (12 - len(moves))]
                seen = {k: x.tolist() for k, x in known.at(np.array(row, np.int16)).obs.items()}
                status, body = wire.step("tick", "game", json.dumps({"obs": {**seen, "moves": row}}).encode())
                assert status == 200, body
                yield 12 - sum(m + 1 for m in moves), json.loads(body)["action"], {**seen, "moves": row}

    for left, action, _ in answers(300):
        if left % 4:
            assert action + 1 == left % 4
    exp = bray.Experiment.load(path)
    search_with(exp.served.policy, 0, "here")
    for _, action, obs in answers(0):
        assert action == exp.served({k: np.array(x, np.int16 if k == MOVES else np.float32) for k, x in obs.items()})
    assert cli(["eval", str(path), "--simulations", "40", "--episodes", "2"]) == 0
    assert cli(["export", str(path)]) == 0
    assert "the network alone: the search needs the game" in " ".join(capsys.readouterr().out.split())


def test_simulations_of_an_evaluation_are_for_policies_that_search(tmp_path, capsys):
    with bray.Experiment(
        "PPO", Nim, path=tmp_path / "run", num_envs=2, rollout_length=16, epochs=1, model=SMALL
    ) as exp:
        exp.fit({"training_iteration": 1}, progress=False)
    assert cli(["eval", str(tmp_path / "run"), "--simulations", "40"]) == 2
    assert "PPO: simulations=40 is for a policy that searches" in " ".join(capsys.readouterr().err.split())


def test_the_game_of_the_docs_is_searched(tmp_path, monkeypatch):
    page = (Path(bray.__file__).parents[1] / "docs" / "environments.md").read_text()
    (tmp_path / "a_board_of_the_docs.py").write_text(page.split("# my_board.py\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    with bray.Experiment("AlphaZero", "a_board_of_the_docs:Twentyone", model=SMALL, **QUICK) as exp:
        exp.check_env()
        row = exp.fit({"env_steps_total": 100}, progress=False)
        assert row["loss/policy_loss"] > 0
        game = exp.served.spec.game
    for moves in ([2, 2, 2, 1], [2, 2, 2, 2, 0], [2, 2, 2, 2, 1]):  # who makes 16 or 20 wins
        at = KnownPositions(game).at(np.array([*moves, -1], np.int16))
        total = sum(m + 1 for m in moves)
        assert best_move(at, 600, np.random.default_rng(0)) + 1 == 4 - total % 4


def test_a_run_from_elsewhere_does_not_bring_its_game(tmp_path):
    made = {"run": "AlphaZero", "env": "bray.envs.agent_games:Nim", "config": QUICK, "model": SMALL}
    with bray.Experiment(**made, path=tmp_path / "run") as exp:
        exp.fit({"training_iteration": 1}, progress=False)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("bray.envs.agent_games:Nim", "someones_module:Nim"))
    with pytest.raises(UntrustedRun, match="someones_module:Nim"):
        bray.Experiment.load(tmp_path / "run", plays=False)


def test_simulations_are_for_policies_that_search(tmp_path):
    with bray.Experiment(
        "PPO", Nim, path=tmp_path / "run", num_envs=2, rollout_length=16, epochs=1, model=SMALL
    ) as exp:
        exp.fit({"training_iteration": 1}, progress=False)
    from bray.experiment import torch_engine

    for engine, words in (("torch", "PPO: simulations=3 is for a policy that"), ("onnx", "needs --engine torch")):
        with pytest.raises(ConfigError, match=words):
            ServedModel("nim", tmp_path / "run", ServedModelConfig(engine=engine, simulations=3), torch_engine).open()


def test_search_alone_finds_what_wins_and_what_loses_not():
    mcts = MCTS(ConnectFour, simulations=150, seed=1)
    played = np.full(42, -1, np.int16)
    for moves, best in (([3, 0, 3, 0, 3, 6], 3), ([0, 3, 0, 3, 6, 3], 3)):  # wins at once; must be blocked
        played[: len(moves)] = moves
        assert mcts({"obs": None, MOVES: played}, None) == best
    with pytest.raises(ConfigError, match=r"set env\.moves=true"):
        mcts({"obs": None}, None)
    played[:7] = 3
    with pytest.raises(ConfigError, match=r"no game that goes on has the moves \[3, 3, 3"):
        mcts({"obs": None, MOVES: played}, None)
