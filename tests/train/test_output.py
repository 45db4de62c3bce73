"""`bray train --output DIR`: what is played while training, as files."""

import numpy as np
import pytest

from bray.data import EpisodeReader, EpisodeWriter, open_data
from bray.errors import ConfigError
from bray.experiment import Experiment
from tests.data.test_sources import episode

ENV = "tests.ways_for_tests:Signs"
RIGHT = np.array([2, 0, 1, 2])


def check(episodes):
    """As they were played: each whole, with the raw reward of each choice."""
    for e in episodes:
        assert len(e["reward"]) == 8
        assert e["terminated"].tolist() == [False] * 7 + [True]
        right = e["action"] == RIGHT[e["obs"][:-1].argmax(1)]
        np.testing.assert_array_equal(e["reward"], 3.0 * right)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_played_while_training_is_written_by_each_worker(workers, tmp_path):
    config = {
        "num_workers": workers,
        "num_envs": 2,
        "rollout_length": 16,
        "minibatches": 2,
        "fcnet_hiddens": [8],
        "clip_rewards": True,
    }
    with Experiment(run="PPO", env=Tripled, path=tmp_path / "run", output=str(tmp_path / "out"), **config) as exp:
        rows = list(exp.train(stop={"env_steps_total": 500}))
    data = open_data(tmp_path / "out")
    assert data.spec.action.n == (3,)
    assert {p.name[: len("worker-0")] for p in (tmp_path / "out").glob("*.episodes")} == (
        {"worker-1", "worker-2"} if workers else {"worker-0"}
    )
    check(data)
    assert len(data) >= rows[-1]["episodes_total"] > 50
    assert all((e["logp"] < 0).all() for e in data)


class Tripled:
    """Signs with rewards of 3, which are clipped to 1 before they are learnt from."""

    def __new__(cls):
        from tests.ways_for_tests import Signs

        class Env(Signs):
            def step(self, action):
                obs, reward, *rest = super().step(action)
                return obs, 3.0 * reward, *rest

        return Env()


def test_a_resumed_run_writes_on_and_leaves_out_what_it_did_not_see_begin(tmp_path):
    config = {"num_workers": 0, "num_envs": 2, "rollout_length": 6, "minibatches": 1, "fcnet_hiddens": [8]}
    with Experiment(run="PPO", env=ENV, path=tmp_path / "run", output=str(tmp_path / "out"), **config) as exp:
        list(exp.train(stop={"env_steps_total": 60}))
    first = len(EpisodeReader(tmp_path / "out"))
    with Experiment.load(tmp_path / "run", trust=True) as exp:
        list(exp.train(stop={"env_steps_total": 200}))
    data = open_data(tmp_path / "out")
    assert len(data.sources[0].paths) == 2
    assert len(data) > first
    assert {len(e["reward"]) for e in data} == {8}


def test_files_roll_at_a_size(tmp_path):
    with EpisodeWriter(tmp_path / "e", 10**9, most_bytes=2000) as writer:
        for i in range(40):
            writer.write(episode(i, 9))
    sizes = [p.stat().st_size for p in writer.paths]
    assert len(sizes) > 3
    assert all(2000 <= size < 4000 for size in sizes[:-1])
    assert len(EpisodeReader(tmp_path)) == 40


def test_nothing_is_promised_where_nothing_is_played(tmp_path):
    write = Experiment(run="PPO", live=True, obs="float32[3]", actions=2, path=tmp_path / "x", output=str(tmp_path))
    with pytest.raises(ConfigError, match="not those of games of several agents, live games"):
        _ = write.training
