"""The replay inside a training: limits by configuration, and what a result row says of it."""

import numpy as np
import pytest

from bray.cli.main import main
from bray.config import ConfigSource
from bray.data import Replay, ReplayRing
from bray.errors import CheckpointError, ConfigError
from bray.experiment import Experiment
from bray.figures import read_results

SMALL = {
    "learning_starts": 100,
    "batch_size": 16,
    "train_every": 2,
    "replay_size": 2000,
    "fcnet_hiddens": [8],
    "seed": 0,
}
ENVS = {"DQN": "CartPole-v1", "SAC": "Pendulum-v1"}


@pytest.fixture(autouse=True)
def short_iterations(monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 400)


def train(algo, iterations=2, **config):
    """The rows of a short training, and of each batch of its learner: ids, and gradient steps since they were
    collected."""
    exp = Experiment(algo, ENVS.get(algo, "CartPole-v1"), use_preset=False, config={**SMALL, **config})
    training, batches, came = exp.training, [], []
    update, add = training.learner.update, ReplayRing.add

    def spy_add(replay, *row, **extras):
        came.append(training.learner.steps)
        add(replay, *row, **extras)

    def spy_update(batch, clock):
        batches.append(
            (batch["id"].copy(), training.learner.steps - np.array(came)[batch["id"] // training.env.num_envs])
        )
        return update(batch, clock)

    training.learner.update = spy_update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayRing, "add", spy_add)
        rows = [training.iterate() for _ in range(iterations)]
    exp.close()
    return rows, batches


@pytest.mark.parametrize("algo", ENVS)
@pytest.mark.parametrize("prioritized", [False, True])
def test_max_use_bounds_how_often_a_transition_is_learned_from(algo, prioritized):
    free, _ = train(algo, prioritized=prioritized)
    rows, batches = train(algo, prioritized=prioritized, max_use=3)
    uses: dict[int, int] = {}
    for ids, _ in batches:
        assert max((uses.get(i, 0) for i in ids.tolist()), default=0) < 3  # nothing that was used up before this batch
        for i in ids.tolist():
            uses[i] = uses.get(i, 0) + 1
    assert max(uses.values()) >= 3
    assert (
        rows[-1]["learner_steps_total"] == len(batches) < 0.6 * free[-1]["learner_steps_total"]
    )  # it waited for new ones
    assert len(batches) > 50
    assert rows[-1]["replay/use_max"] < free[-1]["replay/use_max"]


@pytest.mark.parametrize("algo", ENVS)
def test_max_staleness_bounds_how_old_a_transition_may_be(algo):
    free, _ = train(algo)
    rows, batches = train(algo, max_staleness=40, num_envs=2)
    assert max(staleness.max() for _, staleness in batches) == 39
    assert all(row["replay/staleness_max"] < 40 for row in rows)
    assert all(row["replay/size"] < 200 for row in rows)
    assert free[-1]["replay/staleness_max"] > 250
    assert free[-1]["replay/size"] > 780


def test_use_and_staleness_in_a_row_are_those_of_the_draws():
    """Against counts of our own over the batches that are looked at: the first one of the iteration and every 16th
    after it."""
    rows, batches = train("DQN", iterations=1)
    uses, use, stale = np.zeros(500), [], []
    for i, (ids, staleness) in enumerate(batches):
        np.add.at(uses, ids, 1)
        if i % 16 == 0:
            use.append(uses[ids])
            stale.append(staleness)
    assert rows[0]["replay/use_mean"] == pytest.approx(np.mean(use))
    assert rows[0]["replay/use_max"] == np.max(use)
    assert rows[0]["replay/staleness_mean"] == pytest.approx(np.mean(stale))
    assert rows[0]["replay/staleness_max"] == np.max(stale)
    assert "replay/priority_mean" not in rows[0]


def test_priorities_are_in_the_row_when_they_count():
    rows, _ = train("DQN", prioritized=True, priority_alpha=0.0)
    assert rows[-1]["replay/priority_mean"] == rows[-1]["replay/priority_max"] == 1.0
    rows, _ = train("DQN", prioritized=True)
    assert 0 < rows[-1]["replay/priority_mean"] < rows[-1]["replay/priority_max"]


def test_before_learning_there_is_a_size_and_no_draws():
    (row,), _ = train("DQN", iterations=1, learning_starts=5000)
    assert {k for k in row if k.startswith("replay/")} == {"replay/size"}


def test_saving_is_not_a_use(tmp_path):
    """A checkpoint holds recent observations; taking them must not bring a transition nearer to its end."""
    exp = Experiment("DQN", ENVS["DQN"], use_preset=False, path=tmp_path / "r", config={**SMALL, "max_use": 2})
    exp.training.iterate()
    replay = exp.training.experience.ring
    before, uses = len(replay), replay.get_state()["uses"]
    recent = exp.training.side.recent_observations(rows=50)
    np.testing.assert_array_equal(recent, replay.newest(50)["obs"])
    assert len(recent) == 50
    assert len(replay) == before
    np.testing.assert_array_equal(replay.get_state()["uses"], uses)
    exp.close()


def test_limits_on_the_command_line_and_in_the_result_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--run", "DQN", "--env", "CartPole-v1", "--no-preset", "--project", "p", "--trial", "t"]
    limits = {"max_use": 2, "max_staleness": 50, "prioritized": "true"}
    settings = [f"{k}={v}" for k, v in {**SMALL, **limits}.items() if k != "seed"]
    assert main([*command, "--stop", '{"env_steps_total": 800}', *settings]) == 0
    last = read_results(tmp_path / "p" / "t")[-1]
    assert 0 < last["replay/staleness_max"] < 50
    assert 1 <= last["replay/use_mean"] <= last["replay/use_max"]
    assert last["replay/size"] > 0


def test_what_workers_wait_for_counts_for_all_of_them():
    config = {**SMALL, "num_envs": 4, "wait_num": 1, "vector": "subprocess", "num_workers": 3, "batch_size": 1000}
    with pytest.raises(ConfigError, match="replay_size is at least 8000; got 2000"):  # 3 of 12 are ready at a time
        _ = Experiment("DQN", ENVS["DQN"], use_preset=False, config=config).training


@pytest.mark.parametrize(("before", "after"), [((0, 2), (1, 2)), pytest.param((1, 2), (0, 2), marks=pytest.mark.slow)])
def test_a_replay_goes_on_with_as_many_environments_wherever_they_are(before, after, tmp_path):
    def config(workers, envs):
        return {"run": {"num_workers": workers}, "env": {"num_envs": envs}}

    options = {**SMALL, "vector": "inprocess", "num_workers": before[0], "num_envs": before[1]}
    exp = Experiment("DQN", ENVS["DQN"], use_preset=False, config=options, path=tmp_path / "run")
    for _ in exp.train(stop={"training_iteration": 1}):
        pass
    exp.close()
    with pytest.raises(CheckpointError, match=r"the replay is of 2 environments in step, this run has 6 .*--init-from"):
        Experiment.resume(tmp_path / "run", [ConfigSource("python", config(0, 6))])
    exp = Experiment.resume(tmp_path / "run", [ConfigSource("python", config(*after))])
    assert not exp.exact
    rows = exp.training.experience.ring.steps
    assert exp.training.iterate()["env_steps_total"] > 400
    assert exp.training.experience.ring.steps > rows > 50
    exp.close()


def test_a_replay_too_small_for_its_limits_is_refused():
    with pytest.raises(ConfigError, match="replay_size is at least 64; got 60"):
        train("DQN", batch_size=32, replay_size=60, max_use=1)
    with pytest.raises(ConfigError, match=r"replay_size is at least 40 \* 64 environments = 2560; got 2000"):
        train("R2D2", num_envs=64, use_lstm=True)
    with pytest.raises(ConfigError, match="max_use"):
        Experiment("DQN", ENVS["DQN"], use_preset=False, config={**SMALL, "max_use": 0})
