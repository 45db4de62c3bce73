"""NFSP: the losses of both networks against loops in float64, who plays which game, the reservoir, resume, serving."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

import bray
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Tick
from bray.algos import nfsp
from bray.data.reservoir import KEEP, Reservoir
from bray.envs.agent_games import Matrix, Nim
from bray.errors import CheckpointError, ConfigError
from bray.experiment.exploitability import probabilities
from bray.nn import ModelConfig
from bray.spec import EnvSpec, Space

N, B = 4, 12
SEEN = spaces.Dict({"obs": spaces.Box(-np.inf, np.inf, (3,)), "action_mask": spaces.Box(0, 1, (N,), np.int8)})
SPEC = EnvSpec("test", Space.from_gym(SEEN), Space("discrete", n=(N,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
QUICK = {"num_envs": 4, "learning_starts": 64, "batch_size": 16, "train_every": 16, "fcnet_hiddens": [8]}


def observations(rng, rows=B):
    mask = (rng.random((rows, N)) < 0.6).astype(np.int8)
    mask[:, 1] = 1
    return {"obs": rng.standard_normal((rows, 3), np.float32), "action_mask": mask}


def make_learner(**options):
    torch.manual_seed(0)
    config = nfsp.Config(**options)
    model = nfsp.make_model(config, SPEC, SMALL)
    return nfsp.Learner(config, SPEC, model, SMALL, record=False)


def a_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": observations(rng),
        "next_obs": observations(rng),
        "action": rng.integers(0, N, B),
        "reward": rng.standard_normal(B).astype(np.float32),
        "discount": np.where(rng.random(B) < 0.4, 0.0, 0.9).astype(np.float32),
        "weight": np.ones(B, np.float32),
        "kept": {"obs": observations(rng), "action": np.ones(B, np.int64)},
    }


def row(obs, i):
    return {k: torch.from_numpy(x[i : i + 1]) for k, x in obs.items()}


def test_both_losses_equal_a_float64_loop():
    learner, batch = make_learner(target_period=1), a_batch()
    for _ in range(2):  # the second time the target is a copy of what the first made
        loss = error = imitation = entropy = 0.0
        with torch.no_grad():
            for i in range(B):
                q = learner.model(row(batch["obs"], i))["q"][0].double()
                after = learner.target(row(batch["next_obs"], i))["q"][0].double()
                best = max(float(after[a]) for a in range(N) if batch["next_obs"]["action_mask"][i, a])
                td = float(q[batch["action"][i]]) - float(batch["reward"][i]) - float(batch["discount"][i]) * best
                loss, error = loss + 0.5 * td * td / B, error + abs(td) / B
                logits = learner.model(row(batch["kept"]["obs"], i))["dist"][0].double().numpy()
                legal = np.flatnonzero(batch["kept"]["obs"]["action_mask"][i])
                p = np.exp(logits[legal]) / np.exp(logits[legal]).sum()
                imitation -= np.log(p[list(legal).index(1)]) / B
                entropy -= (p * np.log(p)).sum() / B
        metrics = learner.update(batch, Clock()).metrics
        want = {"loss": loss, "td_error": error, "average_loss": imitation, "entropy": entropy}
        assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-4)


def test_each_network_learns_from_its_own_loss():
    """The average policy imitates, whatever the rewards are; the best response does not look at what was kept."""
    after = []
    for change in ({}, {"reward": np.full(B, 9.0, np.float32)}, {"kept": a_batch(1)["kept"]}):
        learner = make_learner(lr=0.01, average_lr=0.01)
        learner.update(a_batch() | change, Clock())
        after.append(learner.model.state_dict())

    def changed(by):
        return {name.split(".")[0] for name, x in after[0].items() if not torch.equal(x, after[by][name])}

    assert changed(by=1) == {"response"}
    assert changed(by=2) == {"average"}


def test_a_game_is_played_by_one_of_the_two_from_its_start():
    config = nfsp.Config(anticipation=0.3, epsilon=0.0)
    policy, rng = nfsp.Policy(config, SPEC), np.random.default_rng(0)
    obs = {"obs": np.zeros((500, 3), np.float32), "action_mask": np.ones((500, N), np.int8)}
    outputs = {"dist": np.tile([50.0, 0, 0, 0], (500, 1)).astype(np.float32), "q": np.tile([0.0, 0, 0, 1], (500, 1))}
    new = np.ones(500, bool)
    action, extras = policy.act(outputs, Tick(obs, first=new), rng, SAMPLE, Clock())
    np.testing.assert_array_equal(action, np.where(extras[KEEP], 3, 0))
    assert extras[KEEP].mean() == pytest.approx(0.3, abs=0.05)
    later, more = policy.act(outputs, Tick(obs, first=~new), rng, SAMPLE, Clock())
    np.testing.assert_array_equal(later, action)
    new[:250] = False
    _, last = policy.act(outputs, Tick(obs, first=new), rng, SAMPLE, Clock())
    np.testing.assert_array_equal(last[KEEP][:250], more[KEEP][:250])
    assert (last[KEEP][250:] != more[KEEP][250:]).any()
    for mode, clock in ((GREEDY, Clock()), (SAMPLE, TRAINED)):  # trained, it is the average
        action, _ = policy.act(outputs, Tick(obs, first=new), rng, mode, clock)
        assert not action.any()


def test_every_row_that_came_is_as_likely_to_be_kept():
    rng, counts = np.random.default_rng(0), np.zeros(60)
    for _ in range(2000):
        kept = Reservoir(10)
        for part in np.split(np.arange(60), [1, 4, 30, 31]):
            kept.add({"row": part}, rng)
        assert (len(kept), kept.seen) == (10, 60)
        rows = kept.get_state()["rows"]["row"]
        assert len(set(rows.tolist())) == 10
        counts[rows] += 1
    np.testing.assert_allclose(counts / 2000, 1 / 6, atol=0.035)  # four standard deviations


def test_a_reservoir_goes_on_where_it_was():
    rng = np.random.default_rng(0)
    one, other = Reservoir(8), Reservoir(8)
    one.add({"row": np.arange(20)}, rng)
    other.set_state(one.get_state())
    for kept in (one, other):
        kept.add({"row": np.arange(20, 40)}, np.random.default_rng(1))
    np.testing.assert_array_equal(one.get_state()["rows"]["row"], other.get_state()["rows"]["row"])
    with pytest.raises(CheckpointError, match=r"has \[8\] rows of 40 that came, expected 4.*another reservoir_size"):
        Reservoir(4).set_state(one.get_state())


def test_a_run_goes_on_exactly_and_serves_the_average(tmp_path):
    def weights(exp):
        return exp.training.weights()

    made = {"run": "NFSP", "env": Nim, "config": {**QUICK, "iteration_steps": 200}}
    with bray.Experiment(**made, path=tmp_path / "whole") as exp:
        row = exp.fit({"env_steps_total": 800}, progress=False)
        whole = weights(exp)
    assert row["loss/average_loss"] > 0
    with bray.Experiment(**made, path=tmp_path / "parts") as exp:
        for row in exp.train({"env_steps_total": 800}):
            if row["env_steps_total"] >= 400:
                break
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 800}, progress=False)
        assert all(np.array_equal(x, weights(exp)[k]) for k, x in whole.items())
    told = json.loads((tmp_path / "parts" / "policy.json").read_text())
    assert (told["rule"], told["outputs"]) == ("dist", ["dist"])


def test_what_it_is_not_for():
    with pytest.raises(ConfigError, match="cannot train a memory"):
        bray.Experiment("NFSP", Nim, use_lstm=True).training  # noqa: B018
    with pytest.raises(ConfigError, match="live games come and go"):
        nfsp.experience(nfsp.Config(), SPEC, SMALL).check_live()


def test_the_average_comes_to_an_equilibrium():
    """Rock, paper, scissors with an equilibrium of 1/4, 1/2, 1/4: no policy of one moment, but the average of them."""
    config = {"batch_size": 64, "train_every": 32, "updates": 1, "replay_size": 4000, "target_period": 50}
    config |= {"lr": 5e-3, "average_lr": 2e-3, "anticipation": 0.3, "epsilon": 0.05, "learning_starts": 500}
    with bray.Experiment("NFSP", Matrix, use_preset=False, num_envs=32, fcnet_hiddens=[16], config=config) as exp:
        for _ in range(20):
            exp.training.iterate()
        (player,) = exp.players(exp.spec_of()).values()
        average = probabilities(player, np.eye(2, dtype=np.float32), SAMPLE)
    np.testing.assert_allclose(average, [[0.25, 0.5, 0.25]] * 2, atol=0.08)
