"""What a master writes: rows, TensorBoard's events, and a state that survives."""

import json

import numpy as np
import pytest
import torch

from bray.errors import DataError
from bray.remote import master
from bray.remote.master.worker import Master
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
    assert found.Graph().node


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
