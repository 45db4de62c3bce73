"""A part of a running training is killed, and the training goes on: the cases of `python -m benchmarks.remote.faults`,
on a real Ray with games over HTTP."""

import pytest

from benchmarks.remote.faults import LIMITS, run_cases
from tests.ray_for_tests import stop_shared_ray

BUSY = 2
"""How many times longer a busy machine may take."""


def check(outcome):
    case = outcome.case
    assert outcome.recovered <= BUSY * LIMITS[case], outcome
    assert outcome.step_after > outcome.step_before, outcome  # it has learned on
    assert outcome.lowest_step >= outcome.last_checkpoint, outcome
    assert outcome.last_checkpoint > 0, outcome  # else the line above says nothing
    assert outcome.corrupt == [], outcome
    assert outcome.stuck_games == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [[c for c in LIMITS if c != "node"], ["node"]], ids=["one process after the other", "a node"]
)
def test_a_training_goes_on(tmp_path, cases):
    stop_shared_ray()
    outcomes = run_cases(cases, tmp_path)
    assert [o.case for o in outcomes] == cases
    for outcome in outcomes:
        check(outcome)
