"""What a master writes: rows, TensorBoard's events, and a state that survives."""

import json
import sys

import numpy as np
import pytest
import torch

from bray.errors import DataError
from bray.remote import master
from bray.remote.master import worker
from bray.remote.master.worker import Master
from bray.remote.model.handle import RemoteModel
from tests import forked
from tests.ray_for_tests import opened


def events(path):
    """Every value in TensorBoard's files, by its own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(path), size_guidance={"images": 0, "scalars": 0, "histograms": 0})
    reader.Reload()
    return reader


def test_rows_and_events_of_a_master(tmp_path):
    """A whole session in this process, then TensorBoard's own reader."""
    with opened(tmp_path, "local") as session:
        path = session.path
        master.merge("env_steps", 128)
        master.merge("episode_return", 2.0)
        master.merge("loss", 1.5, desc={"sum": "s", "time_window_avg": "a"})
        master.add_scalar("point", 3.5, step=7)
        master.add_image("picture", np.zeros((3, 8, 6), np.float32), step=1)
        master.add_video("clip", np.zeros((2, 4, 3, 8, 8), np.uint8), step=1)
        master.add_histogram("weights", torch.randn(100), step=2)
        master.Metric("spread", max_samples=10).merge(np.arange(12))
        master.add_graph(torch.nn.Linear(3, 2), (torch.zeros(1, 3),))
        with pytest.raises(DataError, match="expected dimensions CHW"):
            master.add_image("bad", np.zeros((3, 3)))
        with pytest.raises(DataError, match="finite"):
            master.add_histogram("bad", [np.nan])
    (row,) = [json.loads(line) for line in (path / "result.jsonl").read_text().splitlines()]
    assert row["env_steps_total"] == 128
    assert row["episode_return_mean"] == 2.0
    assert row["loss"] == 1.5
    found = events(path / "tb")
    assert {"loss", "loss/sum", "point", "episode_return"} <= set(found.Tags()["scalars"])
    (point,) = found.Scalars("point")
    assert (point.step, point.value) == (7, 3.5)
    assert found.Images("picture")[0].width == 6
    assert found.Images("clip")[0].width == 16
    assert found.Images("clip")[0].encoded_image_string[:3] == b"GIF"
    assert found.Histograms("weights")[0].histogram_value.num == 100
    assert found.Histograms("spread")[0].histogram_value.num == 10
    assert found.Graph().node


def rows_of(path):
    return [json.loads(line) for line in (path / "result.jsonl").read_text().splitlines()]


def finish_episodes(returns, agent="agent1"):
    """As a PolicyAgent says it."""
    for value in returns:
        master.merge("episode_return", value, agent=agent)
        master.merge("episode_length", 10 * value, agent=agent)


def test_rows_are_of_the_last_100_episodes_not_of_the_last_minute(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "WINDOW", 0.0)  # all episodes are longer ago than the time window
    with opened(tmp_path, "local") as session:
        path = session.path
        finish_episodes(range(200))
        finish_episodes(range(200, 250), "agent2")
        assert master.query("episode_return", "last_100_avg", agent="agent1") == 149.5
        assert master.query("episode_return", "last_100_min", agent="agent1") == 100.0
        assert master.query("episode_return", "last_100_max", agent="agent2") == 249.0
    row = rows_of(path)[-1]
    assert row["episode_return_mean"] == 199.5  # of 150 .. 249, whichever agent played them
    assert (row["episode_return_min"], row["episode_return_max"]) == (150.0, 249.0)
    assert row["episode_length_mean"] == 1995.0
    assert row["episodes_total"] == 250
    (point,) = events(path / "tb").Scalars("episode_return_mean")
    assert point.value == 199.5
    with opened(tmp_path, "local"):  # the trial goes on
        finish_episodes([1250])
    row = rows_of(path)[-1]
    assert (row["episode_return_mean"], row["episodes_total"]) == (
        210.5,
        251,
    )  # 100 more than 150 .. 249 without the 150


def test_env_steps_are_a_running_total(tmp_path):
    for _ in range(2):
        with opened(tmp_path, "local") as session:
            master.merge("env_steps", 100, agent="a")
            master.merge("env_steps", 50, agent="b")
    assert [row["env_steps_total"] for row in rows_of(session.path)] == [150, 300]


def test_any_number_may_ask_for_its_last_values(tmp_path):
    with opened(tmp_path, "local") as session:
        for value in range(300):
            master.merge("score", value, desc={"last_100_avg": "score of the last 100 matches"})
            master.merge("other", value)
        assert master.query("score", "last_100_avg") == 249.5
        assert master.query("score", "cnt") == 300
        assert master.query("other", "last_100_avg") is None
    assert rows_of(session.path)[-1]["score"] == 249.5
    assert rows_of(session.path)[-1]["other"] == 149.5


def test_the_last_row_has_the_last_step_of_the_model(tmp_path):
    with opened(tmp_path, "local") as session:
        net = torch.nn.Linear(2, 1)
        model = RemoteModel("m", net, (torch.zeros(1, 2),), tensorboard_step=True)
        model.publish_weights(net.state_dict(), step=700_000).result()
        master.merge("loss", 1.0)
    assert rows_of(session.path)[-1]["learner_steps_total"] == 700_000
    (point,) = events(session.path / "tb").Scalars("loss")
    assert point.step == 700_000


def test_a_step_that_is_not_known_is_left_out(tmp_path):
    """It was the number of seconds: a model that is gone cannot be asked."""
    with opened(tmp_path, "local") as session:
        master.set_tensorboard_step("gone")
        master.merge("loss", 1.0)
    (row,) = rows_of(session.path)
    assert "learner_steps_total" not in row
    assert row["loss"] == 1.0


def test_a_deployment_writes_its_numbers_to_a_folder_of_its_own(tmp_path):
    with opened(tmp_path, "local") as session:
        finish_episodes([1.0])
        path = session.path
    trained = {f: f.read_bytes() for f in path.rglob("*") if f.is_file()}
    with opened(tmp_path, "local", numbers_in="deploy"):
        finish_episodes([5.0])
        master.logger.warning("a player is here")
    assert {f: f.read_bytes() for f in trained} == trained
    (row,) = rows_of(path / "deploy")
    assert (row["training_iteration"], row["episode_return_mean"], row["episodes_total"]) == (1, 5.0, 1)
    assert (path / "deploy" / "progress.csv").exists()
    assert "a player is here" in (path / "deploy" / "bray.log").read_text()
    assert events(path / "deploy" / "tb").Scalars("episode_return_mean")[0].value == 5.0


def test_a_damaged_state_is_set_aside(tmp_path):
    first = Master(str(tmp_path))
    first.set("a", 1)
    first.set("object", object())  # cannot be stored, and is not
    second = Master(str(tmp_path))
    assert second.get("a") == 1
    assert second.get("object") is None
    (tmp_path / "master.state").write_bytes(b"garbage")
    third = Master(str(tmp_path))
    assert third.get("a") is None
    assert (tmp_path / "master.damaged").exists()


def test_a_script_that_just_ends_leaves_its_last_row(tmp_path):
    script = (
        "import bray, numpy as np, torch\n"
        "bray.init('project', 'trial', cluster='local')\n"
        "bray.RemoteModel('m', torch.nn.Linear(3, 2), (np.zeros(3, np.float32),), tensorboard_step=True)\n"
        "bray.merge('loss', 0.5)\n"
    )
    made = forked.run([sys.executable, "-c", script], cwd=tmp_path, timeout=120)
    assert made.stderr == ""
    (row,) = rows_of(tmp_path / "project" / "trial")
    assert (row["loss"], row["learner_steps_total"]) == (0.5, 0)


def test_a_model_of_an_earlier_run_of_the_trial_is_not_missed(tmp_path, caplog):
    with opened(tmp_path, "local"):
        master.set_tensorboard_step("of-before")
    caplog.clear()
    with opened(tmp_path, "local") as session:
        master.merge("loss", 0.5)
    assert "the last row has no learner_steps_total" not in caplog.text
    assert caplog.text.count("there is no model") <= 1
    assert rows_of(session.path)[-1]["loss"] == 0.5
