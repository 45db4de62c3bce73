"""`bray train --live` among games that lie and with a learner that fails: the others learn, and all are answered."""

import asyncio
import itertools
import re
import threading
import time

import numpy as np
import pytest
import torch

import bray
from benchmarks.serving import strangers_live
from bray.client import Client, ClientError
from bray.errors import Diverged
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.train import steady
from bray.train.steady import SteadyDriver
from tests.train.test_live import GOOD, LONG, Sign, experiment, page, playing, port_of, train, until

DQN = {"run": "DQN", "learning_starts": 64, "batch_size": 32, "train_every": 4, "iteration_steps": 200}


class Liar(Sign):
    """Says that everything it did was wonderful."""

    said = 1e5

    def tick(self, client, obs, reward, terminated=False, truncated=False):
        return super().tick(client, obs, self.said, terminated, truncated)


def dqn(path, **settings):
    settings = {"obs": "float32[2]", "actions": 2, "save_figure": False, **DQN, **settings}
    return Experiment(live=True, port=0, path=path, **settings)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(SteadyDriver, "retries", (0.0, 0.0, 0.0))


# --- numbers of a game ------------------------------------------------------------------------------------------------


def test_a_game_that_lies_does_not_keep_the_others_from_learning(tmp_path):
    """One of eight sends 1e5 at every tick: they learn as without it, and `best` is not its own."""
    settings = {"lr": 3e-3, "rows": 256, "rollout_length": 32, "epochs": 4, "minibatches": 4, "wait_s": 5}
    with experiment(tmp_path / "run", **settings) as exp:
        port = port_of(exp)
        with playing(*(Sign(port, i) for i in range(7)), Liar(port, 9)) as games:
            rows = train(exp, games, game_return_median=7.5, env_steps_total=40_000)
            assert page(exp)["rows_left_out"] > 0
    last = rows[-1]
    assert last["game_return_median"] >= 7.5, "eight is the most that an episode brings, four is chance"
    assert last["live/rows_left_out"] > 0
    assert last["live/updates_undone"] == 0
    assert last["episode_return_mean"] < 1e3
    assert exp.run.score.name == "game_return_median"
    assert exp.run.score.best < 10.0


def test_what_a_replay_holds_is_cut_once_most_games_have_been_heard(tmp_path):
    """A liar that comes first has been learnt from before there is anybody to compare it with."""
    exp = dqn(tmp_path / "run")
    try:
        port = port_of(exp)
        with playing(Liar(port, 9)) as games:
            train(exp, games, env_steps_total=200)
        assert exp.training.experience.ring.newest(100)["reward"].max() == 1e5
        with playing(*(Sign(port, i) for i in range(4))) as games:
            train(exp, games, env_steps_total=1200)
        assert exp.training.experience.ring.newest(10_000)["reward"].max() == 10.0
    finally:
        exp.close()


def test_a_bound_of_ones_own(tmp_path):
    with experiment(tmp_path / "run", reward_range=2.0, obs_range=5.0) as exp:
        with Client("127.0.0.1", port_of(exp), retries=0) as client:
            client.start()
            client.tick(GOOD)
            with pytest.raises(
                ClientError, match=r"400 malformed: .*expected reward to be a number from -2 to 2, got 3"
            ):
                client.tick({**GOOD, "reward": 3})
            with pytest.raises(ClientError, match=r"400 malformed: .*up to 5 in size \(obs_range\), got 7"):
                client.tick({**GOOD, "obs": [7.0, 0.0]})
            assert client.tick({**GOOD, "reward": -2.0, "obs": [-5.0, 5.0]})["action"] in (0, 1)


def test_strangers_beside_honest_games(tmp_path, monkeypatch):
    """`python -m benchmarks.serving.strangers --live`, small."""
    monkeypatch.setenv("BRAY_TOKEN", strangers_live.TOKEN)
    settings = {"lr": 3e-3, "rows": 256, "rollout_length": 32, "epochs": 4, "minibatches": 4, "iteration_steps": 0}
    with experiment(tmp_path / "run", **settings) as exp:
        source = exp.training.source
        source.open()
        training = threading.Thread(target=lambda: list(exp.train()), daemon=True)
        training.start()
        place, said = asyncio.run(strangers_live.visit(source.port, source.admin_port, 0, 500, threshold=5.0))
        exp.request_stop()
        training.join(LONG)
        assert not training.is_alive()
    assert place.wrong == []
    assert place.messages >= 500
    assert {"lie", "out of range", "malformed"} <= place.sent.keys()
    assert {200, 400} <= place.statuses.keys()
    assert said["reached"], said
    assert said["learner"] == "learns"


# --- updates that are not finite --------------------------------------------------------------------------------------


def spoil(exp, numbers, how):
    """Have the updates of these numbers (from 1) go wrong."""
    update, count = exp.training.learner.update, itertools.count(1)

    def spoilt(*args):
        made = update(*args)
        if next(count) in numbers:
            how(exp, made)
        return made

    exp.training.learner.update = spoilt


def spoil_loss(exp, made):
    made.values.fill_(torch.nan)


def spoil_weights(exp, made):
    with torch.no_grad():
        next(exp.training.model.parameters()).fill_(torch.inf)


def fail(exp, made):
    raise RuntimeError("the learner has had enough")


@pytest.mark.parametrize("how", [spoil_loss, spoil_weights])
def test_an_update_that_is_not_finite_is_undone_and_told(tmp_path, caplog, monkeypatch, how):
    monkeypatch.setattr(steady, "COPYING", 0.0)  # as it is for updates that take long
    with experiment(tmp_path / "run", wait_s=5) as exp:
        spoil(exp, {3, 5}, how)
        with playing(Sign(port_of(exp)), Sign(port_of(exp), 1)) as games:
            rows = train(exp, games, training_iteration=8)
            assert page(exp)["updates_undone"] == 2
        for game in games:
            assert game.error is None or "draining" in str(game.error), game.error
            assert game.versions == sorted(game.versions)
    assert len(rows) == 8
    assert rows[-1]["live/updates_undone"] == 2
    assert all(np.isfinite(x).all() for x in exp.training.weights().values())
    assert re.search(
        r"update \d+ is not finite and was undone \(1 so far\); its games: '.*' \(rewards up to 1\)", caplog.text
    )


# --- learners that raise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["PPO", "DQN"])
def test_a_learner_that_raises_now_and_then_goes_on_from_its_checkpoint(tmp_path, caplog, no_pause, make):
    exp = dqn(tmp_path / "run") if make == "DQN" else experiment(tmp_path / "run", wait_s=5).__enter__()
    try:
        spoil(exp, {4, 9}, fail)
        with playing(Sign(port_of(exp)), Sign(port_of(exp), 1)) as games:
            rows = train(exp, games, training_iteration=8)
            assert page(exp)["learner"] == "learns"
            for game in games:
                assert game.error is None
                assert game.versions == sorted(game.versions)
        assert [row["training_iteration"] for row in rows] == list(range(1, 9))
        steps = [row["env_steps_total"] for row in rows]
        assert steps == sorted(steps)
        assert "learning has failed (RuntimeError: the learner has had enough). Try 1 of 3 begins in 0 s" in caplog.text
    finally:
        exp.close()


def test_a_learner_that_always_raises_stays_off_while_games_are_answered(tmp_path, caplog, no_pause):
    with experiment(tmp_path / "run") as exp:
        spoil(exp, range(3, 10_000), fail)
        with playing(Sign(port_of(exp)), Sign(port_of(exp), 1)) as games:
            raised = []

            def run():
                try:
                    list(exp.train())
                except Exception as e:
                    raised.append(e)

            training = threading.Thread(target=run, daemon=True)
            training.start()
            until(lambda: "stays off" in page(exp)["learner"], "it never gives up")
            steps, answered = page(exp)["env_steps_total"], len(games[0].versions)
            until(lambda: page(exp)["env_steps_total"] > steps + 100, "games are not counted any more")
            assert len(games[0].versions) > answered
            assert [game.error for game in games] == [None, None]
            exp.request_stop()
            training.join(LONG)
            assert not training.is_alive()
    assert [str(e) for e in raised] == ["the learner has had enough"]
    assert all(np.isfinite(x).all() for x in RunDir.open(tmp_path / "run").load_checkpoint().weights.values())


def test_updates_that_are_never_finite_end_in_the_same_way(tmp_path, no_pause):
    with experiment(tmp_path / "run", wait_s=5, rows=16) as exp:
        spoil(exp, range(2, 10_000), spoil_loss)
        with playing(Sign(port_of(exp))) as games, pytest.raises(Diverged, match="10 updates, one after the other"):
            train(exp, games, env_steps_total=3500)
        assert exp.training.updates_undone == 40


def test_an_error_of_an_ordinary_run_ends_it_at_once(tmp_path):
    exp = bray.Experiment(run="PPO", env="CartPole-v1", path=tmp_path / "run", num_envs=1, rollout_length=16)
    spoil(exp, {2}, fail)
    with pytest.raises(RuntimeError, match="had enough"):
        list(exp.train({"env_steps_total": 100_000}))
    exp.close()


# --- rows of a checkpoint ---------------------------------------------------------------------------------------------


class Once(Sign):
    """Sends one reward that is not like the others."""

    def __init__(self, port, said):
        super().__init__(port)
        self.said = said

    def tick(self, client, obs, reward, **more):
        if len(self.versions) == 20:
            reward = self.said
        return super().tick(client, obs, reward, **more)


def spoilt_replay(path, reward):
    """A run whose replay holds such a reward, as one of before had."""
    exp = dqn(path, fair=False, reward_range=1e30, learning_starts=100_000)
    try:
        with playing(Once(port_of(exp), reward)) as games:
            train(exp, games, env_steps_total=400)
        assert exp.training.experience.ring.newest(10_000)["reward"].max() == np.float32(reward)
    finally:
        exp.close()


def test_a_resumed_replay_leaves_out_what_no_game_may_send(tmp_path, caplog):
    spoilt_replay(tmp_path / "run", 1e20)
    exp = Experiment.resume(tmp_path / "run", reward_range=1e6, learning_starts=64, port=0)
    try:
        assert "1 rows of the saved replay are left out" in caplog.text
        assert exp.training.experience.ring.newest(10_000)["reward"].max() <= 1.0
        with playing(Sign(port_of(exp))) as games:
            rows = train(exp, games, env_steps_total=1200)
        assert rows[-1]["live/updates_undone"] == 0
        assert abs(rows[-1]["loss/q"]) < 100.0
    finally:
        exp.close()


def test_the_advice_to_clip_rewards_holds_for_what_is_saved_too(tmp_path):
    spoilt_replay(tmp_path / "run", 5e4)
    exp = Experiment.resume(tmp_path / "run", clip_rewards=1.0, port=0)
    try:
        assert exp.training.experience.ring.newest(10_000)["reward"].max() == 1.0
    finally:
        exp.close()


def test_so_it_does_for_environments(tmp_path):
    settings = {"num_envs": 1, "n_step": 1, "learning_starts": 50, "batch_size": 16, "save_figure": False}
    exp = bray.Experiment(run="DQN", env="CartPole-v1", path=tmp_path / "run", **settings)
    list(exp.train({"env_steps_total": 100}))
    exp.close()
    exp = Experiment.resume(tmp_path / "run", clip_rewards=0.5)
    assert exp.training.experience.ring.newest(1000)["reward"].max() == 0.5
    exp.close()


# --- what it says -----------------------------------------------------------------------------------------------------


def test_it_says_when_it_learns_and_which_key_changes_that(tmp_path):
    with experiment(tmp_path / "run") as exp:
        assert page(exp)["updates"] == "whenever 64 rows have come (live.rows sets how many)"
        with Client("127.0.0.1", port_of(exp)) as client:
            client.start()
            for _ in range(33):
                client.tick(GOOD)
            until(lambda: exp.training.source.waiting_rows, "no row has come")
        exp.training.gather(1.0)
        assert exp.training.experience.wait_reason().endswith(
            "of 64 rows of the next rollout have come (live.rows sets how many)"
        )
    exp = dqn(tmp_path / "dqn")
    assert exp.training.experience.when_due() == "after 64 steps (learning_starts), then every 4 (train_every)"
    exp.close()


def test_pauses_between_tries_end_when_the_run_is_stopped(tmp_path):
    with experiment(tmp_path / "run") as exp:
        threading.Timer(0.2, exp.training.stop).start()
        began = time.monotonic()
        exp.training.wait(100.0)
        assert time.monotonic() - began < 50.0
