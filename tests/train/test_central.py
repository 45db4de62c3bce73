"""Central inference: workers ask the process that learns, in two groups of environments that play in turn."""

import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import bray
from bray.act import Clock, Policy
from bray.algos import ppo
from bray.envs.config import EnvConfig
from bray.envs.rewards import Moments
from bray.errors import ConfigError, EnvError
from bray.nn.catalog import ModelConfig
from bray.train.central import Answers, CentralEngine, CentralServer
from bray.train.config import RunConfig
from bray.train.sampler import Sampler, SamplerPlan
from tests.train.test_workers import experiment, rows_of

KEYS = ("env_steps_total", "episodes_total", "episode_length_mean", "loss/policy_loss", "loss/value_loss")


@pytest.mark.parametrize(
    ("more", "total"),
    [
        ({}, 4),
        pytest.param({"use_lstm": True, "lstm_cell_size": 16}, 4, marks=pytest.mark.slow),
        pytest.param({"num_envs": 3, "num_workers": 3}, 9, marks=pytest.mark.slow),
        pytest.param({"env_groups": 1}, 4, marks=pytest.mark.slow),
    ],
)
def test_workers_that_ask_play_what_one_process_plays(more, total):
    alone = rows_of(experiment(**{**more, "num_workers": 0, "num_envs": total, "env_groups": None}))
    central = rows_of(experiment(inference="central", **more))
    for key in KEYS:
        assert [row[key] for row in central] == pytest.approx([row[key] for row in alone], rel=1e-5, abs=1e-6)
    assert central[-1]["workers/policy_lag"] == 0


class Plain(nn.Module):
    """Its outputs tell which rows it saw, by which weights, and how many at once. It can be made to wait."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.calls = [threading.Event(), threading.Event()]  # one is under way; it may go on
        self.calls[1].set()

    def __deepcopy__(self, memo):
        return self  # so that the test can hold up the server's copy

    def forward(self, obs):
        x = obs["x"]
        self.calls[0].set()
        self.calls[1].wait()
        if (x < 0).any():
            raise ValueError("a negative number")
        return {"y": x * self.scale, "many": torch.full_like(x, len(x)), "unread": x}


class Reads(Policy):
    reads, keeps = ("y",), ("many",)

    def __init__(self):
        pass


@pytest.fixture
def server():
    made = CentralServer(Plain(), Reads(), {"x": np.zeros(1, np.float32)}, workers=3, groups=[2, 1], record=False)
    yield made
    made.close()


def engines(server, worker, life=0):
    line = server.line(worker)
    answers = Answers(line)
    return [CentralEngine(line, group, answers, life) for group in range(2)]


def test_the_questions_that_have_come_are_answered_together(server):
    workers = [engines(server, w) for w in range(3)]
    started, go_on = server.model.calls
    started.clear()
    go_on.clear()
    workers[0][0].ask({"x": np.array([1.0, 2.0])})
    started.wait()
    workers[2][1].ask({"x": np.array([30.0])})
    workers[1][0].ask({"x": np.array([10.0, 20.0])})
    before = server.forwards
    go_on.set()
    assert workers[0][0].answer()["y"].tolist() == [1, 2]
    assert workers[2][1].answer()["y"].tolist() == [30]
    answer = workers[1][0].answer()
    assert answer["y"].tolist() == [10, 20]
    assert answer["many"].tolist() == [4, 4]  # 3 rows, filled up to a size that is recorded
    assert sorted(answer) == ["many", "y"]
    assert server.forwards - before == 2


@pytest.mark.parametrize("together", [[(0, 0), (1, 0), (2, 0)], [(0, 0), (2, 0)], [(1, 1), (2, 1)], [(2, 1), (0, 0)]])
def test_rows_come_back_to_those_who_asked_wherever_they_lie(server, together):
    workers = [engines(server, w) for w in range(3)]
    started, go_on = server.model.calls
    started.clear()
    go_on.clear()
    workers[1][0].ask({"x": np.zeros(2)})
    started.wait()
    asked = {}
    for i, (w, g) in enumerate(together):
        asked[w, g] = np.arange(1.0, 3.0 - g) + 10 * i
        workers[w][g].ask({"x": asked[w, g]})
    go_on.set()
    workers[1][0].answer() if (1, 0) not in asked else None
    for (w, g), x in asked.items():
        assert workers[w][g].answer()["y"].tolist() == x.tolist()


def test_new_weights_are_used_from_the_next_forward_on(server):
    (engine, _), *_ = [engines(server, 0)]
    assert engine.forward({"x": np.array([1.0, 2.0])})["y"].tolist() == [1, 2]
    server.newest = Plain()
    server.newest.scale.data.fill_(3.0)
    assert engine.forward({"x": np.array([1.0, 2.0])})["y"].tolist() == [1, 2]
    server.take_weights()
    assert engine.forward({"x": np.array([1.0, 2.0])})["y"].tolist() == [3, 6]


def test_an_error_of_the_model_reaches_those_who_asked_and_nobody_else(server, caplog):
    engine, other = engines(server, 0)
    with pytest.raises(EnvError, match=r"a negative number\ncentral inference failed"):
        engine.forward({"x": np.array([-1.0, 2.0])})
    assert "central inference failed" in caplog.text
    assert other.forward({"x": np.array([7.0])})["y"].tolist() == [7]
    assert engine.forward({"x": np.array([1.0, 2.0])})["y"].tolist() == [1, 2]


def test_an_answer_to_a_dead_worker_is_not_taken_for_ones_own(server):
    dead, _ = engines(server, 1)
    dead.ask({"x": np.array([1.0, 2.0])})
    successor, _ = engines(server, 1, life=1)
    assert successor.forward({"x": np.array([3.0, 4.0])})["y"].tolist() == [3, 4]


def test_what_does_not_go_with_central_inference_is_refused():
    with pytest.raises(ConfigError, match=r"inference=central is for workers.*num_workers"):
        experiment(inference="central", num_workers=0).training.iterate()
    with pytest.raises(ConfigError, match=r"env_groups=2.*inference=central"):
        experiment(env_groups=2).training.iterate()
    model = Plain()
    model.draws = {"noise": (3,)}
    with pytest.raises(ConfigError, match="inference=worker"):
        CentralServer(model, Reads(), {"x": np.zeros(1, np.float32)}, 1, [1])


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_asks_on():
    exp = experiment(inference="central")
    exp.training.iterate()
    os.kill(exp.training.sources[0].process_ids[1], signal.SIGKILL)
    row = exp.training.iterate()
    exp.close()
    assert row["workers/restarts"] == 1
    assert row["env_steps_total"] > 200


@pytest.mark.slow
def test_a_run_that_asks_resumes_exactly(tmp_path):
    whole = list(experiment(tmp_path / "whole", inference="central").train({"training_iteration": 3}))
    exp = experiment(tmp_path / "half", inference="central")
    list(exp.train({"training_iteration": 2}))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "half")
    rest = list(exp.train({"training_iteration": 3}))
    exp.close()
    assert exp.exact
    for key in ("env_steps_total", "episode_return_mean", "loss/policy_loss"):
        assert [row[key] for row in rest] == pytest.approx([row[key] for row in whole[2:]], rel=1e-5)


def player(groups=1, **told):
    run = RunConfig(num_workers=2, env_groups=groups)
    env = EnvConfig("CartPole-v1", num_envs=4, vector="inprocess")
    return Sampler(SamplerPlan(ppo, run, env, ModelConfig(), ppo.Config(), 1, 4, 1, **told))


def beginnings(player):
    """Of every group, the first observations and the next random numbers."""
    rollouts = [group.rollout for group in getattr(player.source, "groups", [player.source])]
    return np.concatenate([one.obs for one in rollouts]), [one.rng.random(2).tolist() for one in rollouts]


def test_a_player_that_replaces_another_draws_other_numbers():
    seen = [player(**told) for told in ({}, {"life": 1}, {"life": 1, "begun": 500}, {"life": 2})]
    obs, drawn = zip(*map(beginnings, seen), strict=True)
    assert len({x.tobytes() for x in obs}) == len({str(x) for x in drawn}) == 4
    for one in seen:
        one.close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_groups_begins_new_episodes(before, after):
    old, new = player(before), player(after)
    state, (obs, drawn) = old.get_state(), beginnings(old)
    assert new.set_state(state, Clock(128)) is False
    again, others = beginnings(new)
    assert (again != obs).any(-1).all()
    assert not set(map(str, others)) & set(map(str, drawn))
    for one in (old, new):
        one.close()


def test_workers_whose_environments_are_processes_play_the_same():
    """Their own children; `step_timeout` needs them, and so does `wait_num`."""
    alone = rows_of(experiment(num_workers=0, num_envs=2))
    central = rows_of(experiment(inference="central", num_workers=1, num_envs=2, env_groups=2, vector="subprocess"))
    for key in KEYS:
        assert [row[key] for row in central] == pytest.approx([row[key] for row in alone], rel=1e-5, abs=1e-6)


def test_native_environments_of_every_worker_play_episodes_of_their_own():
    run = RunConfig(num_workers=2)
    seen = []
    for index in (1, 2):
        plan = SamplerPlan(
            ppo, run, EnvConfig("CartPole-v1", num_envs=8, vector="native"), ModelConfig(), ppo.Config(), index, 4, 1
        )
        player = Sampler(plan)
        weights = {k: v.numpy() for k, v in player.model.state_dict().items()}
        seen.append(player.play(weights, Clock(), Moments()).pieces[0].obs[0])
        player.close()
    assert (seen[0] != seen[1]).any(-1).all()


def test_the_learner_learns_while_workers_ask_on():
    exp = experiment(run="APPO", inference="central", num_workers=2)
    row = [exp.training.iterate() for _ in range(6)][-1]
    exp.close()
    assert row["learner_steps_total"] > 0
    assert np.isfinite(row["loss/policy_loss"])
