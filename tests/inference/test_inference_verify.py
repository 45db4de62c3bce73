"""What is measured of an engine: errors, agreement of actions, and that a wrong one is refused."""

import numpy as np
import pytest

from bray.errors import ExportError
from bray.inference.verify import BATCHES, agree, check_close, follow, run, time_forward, verify
from bray.spec import Space

CHOICE = Space("discrete", (), "int64", n=(3,), start=(0,))
ARM = Space("box", (2,), "float32", (-1.0, 0.0), (1.0, 100.0))


class Linear:
    """Stands for an engine: `q` = obs @ matrix."""

    def __init__(self, matrix):
        self.matrix = np.asarray(matrix, np.float32)
        self.sizes = []

    def forward(self, obs, *state):
        self.sizes.append(len(obs))
        out = {"q": obs @ self.matrix}
        return out | {"state": {"h": state[0]["h"] + obs[:, :1]}} if state else out


OBS = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)


def greedy(outputs, obs):
    return outputs["q"].argmax(1)


def test_a_report_counts_errors_and_actions():
    right, wrong = np.eye(3), np.diag([1.0, 1.0, -1.0])
    expected = run(Linear(right), [OBS])
    same = verify(Linear(right), [OBS], expected, greedy, CHOICE, seconds=0.01)
    assert (same.max_error, same.mean_error, same.agreement) == (0, 0, 1)
    assert list(same.latency) == list(BATCHES)
    assert all(0 < median <= p99 for median, p99 in same.latency.values())
    other = verify(Linear(wrong), [OBS], expected, greedy, CHOICE, seconds=0.01)
    off = np.abs(OBS @ np.float32(wrong) - OBS)
    assert other.max_error == pytest.approx(off.max())
    assert other.mean_error == pytest.approx(off.mean())
    assert other.agreement == np.mean((OBS * [1, 1, -1]).argmax(1) == OBS.argmax(1)) < 1


def test_rows_go_through_in_pieces_and_come_back_in_order():
    engine = Linear(np.eye(3))
    np.testing.assert_array_equal(run(engine, [OBS])["q"], OBS)
    assert engine.sizes == [128, 128, 44]


def test_timing_uses_the_batch_it_is_asked_for_even_with_fewer_rows():
    engine = Linear(np.eye(3))
    time_forward(engine, [OBS[:5]], 8, seconds=0.0)
    assert set(engine.sizes) == {8}
    assert len(engine.sizes) >= 5


def test_check_close_refuses_a_wrong_graph():
    expected = run(Linear(np.eye(3)), [OBS])
    check_close(Linear(np.eye(3) * (1 + 1e-5)), [OBS], expected, "model.onnx")
    with pytest.raises(ExportError, match=r"model\.onnx answers otherwise than the Model: output 'q' is off by up to"):
        check_close(Linear(np.eye(3) * 1.1), [OBS], expected, "model.onnx")


def test_following_a_recurrent_model_carries_its_state():
    rows = OBS[:10]
    obs, states, outputs = follow(Linear(np.eye(3)), rows, lambda n: {"h": np.zeros((n, 1), np.float32)}, 4)
    assert len(obs) == len(states["h"]) == len(outputs["q"]) == 8
    np.testing.assert_array_equal(obs, rows[:8])
    np.testing.assert_array_equal(states["h"][:4], 0)
    np.testing.assert_array_equal(states["h"][4:], rows[:4, :1])


def test_choices_agree_when_equal():
    a = np.array([[0, 1], [1, 2], [2, 2]])
    space = Space("multi_discrete", (2,), "int64", n=(3, 3), start=(0, 0))
    assert agree(space, a, a + np.array([[0, 0], [0, 1], [1, 1]])).tolist() == [True, False, False]


def test_continuous_actions_agree_within_a_part_of_their_range():
    b = np.zeros((4, 2), np.float32)
    a = b + np.array([[0.0, 0.0], [0.02, 1.0], [0.0, 1.9], [0.03, 1.5]])  # ranges 2 and 100: 1 % is 0.02 and 1
    assert agree(ARM, a, b).tolist() == [True, True, True, False]


def test_without_bounds_the_range_is_what_the_model_does():
    space = Space("box", (1,), "float32")
    b = np.array([[0.0], [50.0], [100.0]])
    assert agree(space, b + np.array([[0.9], [-1.0], [1.1]]), b).tolist() == [True, True, False]
    still = np.ones((2, 1))
    assert agree(space, still, still).all()


def test_composite_actions_agree_in_all_parts():
    space = Space("dict", names=("aim", "fire"), parts=(ARM, CHOICE))
    b = {"aim": np.zeros((3, 2)), "fire": np.array([0, 1, 2])}
    a = {"aim": b["aim"] + [[0, 0], [1, 0], [0, 0]], "fire": np.array([0, 1, 1])}
    assert agree(space, a, b).tolist() == [True, False, False]
    pair = Space("tuple", parts=(CHOICE, CHOICE))
    assert agree(pair, (b["fire"], a["fire"]), (b["fire"], b["fire"])).tolist() == [True, True, False]
