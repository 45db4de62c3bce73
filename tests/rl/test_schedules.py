"""Schedules: exact values, and refusals that say what was expected."""

import math

import pytest

from bray.errors import ConfigError, UnknownName
from bray.schedules import make_schedule


def test_linear_values():
    eps = make_schedule({"kind": "linear", "start": 1.0, "end": 0.1, "steps": 90})
    assert [round(eps(t), 6) for t in (0, 9, 45, 90, 1000)] == [1.0, 0.91, 0.55, 0.1, 0.1]


def test_linear_is_the_kind_when_none_is_named_and_may_take_no_steps():
    assert make_schedule({"start": 0.0, "end": 2.0, "steps": 4})(1) == 0.5
    assert make_schedule({"start": 0.0, "end": 2.0, "steps": 0})(0) == 2.0


def test_exponential_values():
    eps = make_schedule({"kind": "exp", "start": 0.9, "end": 0.1, "decay": 100})
    assert eps(0) == 0.9
    assert eps(100) == pytest.approx(0.1 + 0.8 / math.e)
    assert eps(100_000) == pytest.approx(0.1)


def test_piecewise_joins_points_and_stays_outside_them():
    points = [[10, 1.0], [20, 0.0], [40, 0.5]]
    f = make_schedule({"kind": "piecewise", "points": points})
    assert [f(t) for t in (0, 10, 15, 20, 30, 40, 99)] == [1.0, 1.0, 0.5, 0.0, 0.25, 0.5, 0.5]
    assert make_schedule({"kind": "piecewise", "points": [[0.0, 3.0]]})(7) == 3.0


def test_a_number_is_a_constant():
    assert make_schedule(3)(10**9) == 3.0
    assert make_schedule(0.25)(0) == 0.25


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("fast", "a number or a dict with 'kind', got 'fast'"),
        (True, "got True"),
        (float("nan"), "expected a number, got nan"),
        ({"kind": "linear", "start": 1.0, "end": 0.0}, "steps missing"),
        (
            {"kind": "linear", "start": "a", "end": 0.0, "steps": 3},
            "start of a linear schedule: expected a number, got 'a'",
        ),
        ({"kind": "linear", "start": 1.0, "end": 0.0, "steps": -3}, "steps of a schedule of kind linear cannot be -3"),
        ({"kind": "exp", "start": 1.0, "end": 0.0, "decay": 0}, "decay of a schedule of kind exp cannot be 0"),
        ({"kind": "piecewise", "points": [[5, 1.0], [5, 0.0]]}, "growing steps"),
        ({"kind": "piecewise", "points": []}, "growing steps"),
        ({"kind": "piecewise", "points": [1, 2]}, "pairs"),
        ({"kind": "piecewise", "points": 3}, "pairs"),
    ],
)
def test_a_wrong_schedule_is_refused_when_it_is_made(schedule, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(schedule)


def test_wrong_names_are_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'linear'"):
        make_schedule({"kind": "linaer", "start": 1, "end": 0, "steps": 1})
    with pytest.raises(UnknownName, match="Did you mean 'steps'"):
        make_schedule({"kind": "linear", "start": 1, "end": 0, "step": 1})
    with pytest.raises(UnknownName, match="Known: exp, linear, piecewise"):
        make_schedule({"kind": ["x"]})
