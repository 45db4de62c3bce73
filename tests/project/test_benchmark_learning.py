"""benchmarks/learning: the statistics, what counts as passed, and the tables."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.learning import __main__ as learning, early, equilibria
from bray.act import Clock
from bray.algos import ALGORITHMS
from bray.config.runfile import scores
from bray.experiment import Experiment
from bray.metrics.stats import interval, iqm, summary


@pytest.mark.parametrize(
    ("values", "middle"),
    [([7.0], 7.0), ([1, 3], 2.0), ([4, 1, 3, 2], 2.5), ([1, 2, 3, 4, 5], 3.0), ([0, 0, 10, 20, 100], 10.0)],
)
def test_the_interquartile_mean_by_hand(values, middle):
    assert iqm(values) == pytest.approx(middle)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9))
def test_the_interquartile_mean_is_that_of_every_value_four_times(values):
    """With each value four times the quarters cut between values: the plain definition."""
    n, four = len(values), sorted(v for v in values for _ in range(4))
    assert iqm(values) == pytest.approx(sum(four[n : 3 * n]) / (2 * n), abs=1e-9)


def test_the_interval_holds_the_mean_and_narrows_with_more_seeds():
    few, many = (np.random.default_rng(n).normal(100.0, 10.0, n) for n in (5, 200))
    for values in (few, many):
        low, high = interval(values)
        assert min(values) <= low < iqm(values) < high <= max(values)
    assert np.diff(interval(many)) < 0.3 * np.diff(interval(few))
    assert interval(few) == interval(few)  # the same numbers, the same table
    assert summary([3.0, 3.0, 3.0]) == [3.0, 3.0, 3.0]


# --- cases ------------------------------------------------------------------------------------------------------------

SMALL = {
    "num_envs": 2,
    "rollout_length": 32,
    "epochs": 1,
    "minibatches": 1,
    "eval_episodes": 2,
    "fcnet_hiddens": [4],
    "save_figure": False,
}


def small(target, **more):
    return learning.Case("PPO", "CartPole-v1", target, 128, 1, config=SMALL, use_preset=False, **more)


@pytest.mark.parametrize(
    ("case", "seconds", "passed", "finished"),
    [
        (small(1.0), None, True, True),
        (small(1e6), None, False, True),
        (small(1e6, must="stay below"), None, True, True),
        (small(1.0, must="stay below"), None, False, True),
        (small(1e6, must="stay below"), 1e-9, False, False),  # cut off: nobody knows
        (small(1e6, must="end below"), None, True, True),
        (small(1.0, must="end below"), None, False, True),
    ],
)
def test_what_passes(case, seconds, passed, finished, tmp_path):
    result = learning.train(case, 7, tmp_path / "run", seconds)
    assert (result["passed"], result["finished"]) == (passed, finished)
    assert result["eval_return_mean"] > 0


def test_the_average_strategy_of_a_league_is_that_of_all_its_snapshots():
    rock, paper, scissors = 0, 1, 2
    env = {"env": "bray.envs.agent_games:Matrix", "env_config": {"game": "biased_rps"}}
    with Experiment("PPO", **env, fcnet_hiddens=[4], self_play={"snapshot_every": 1}, use_preset=False) as exp:
        for version, choice in enumerate([rock, paper, scissors, paper]):  # in equilibrium a half is paper
            weights = {k: np.zeros_like(x) for k, x in exp.training.weights().items()}
            (head,) = [k for k, x in weights.items() if k.endswith("bias") and x.shape == (3,)]
            weights[head][choice] = 1000.0
            exp.training.set_weights(weights)
            exp.training.league.freeze("default", Clock(10 * version, version))
        assert equilibria.minus_distance(exp) == -0.5
        assert equilibria.minus_distance_of_average(exp) == pytest.approx(0.0, abs=1e-6)


def test_a_case_names_an_environment_of_its_own(tmp_path):
    case = learning.Case(
        "PPO", "envs_for_tests:Scripted", 6.0, 64, 1, config={**SMALL, "env_config": {"terminate_at": 3}}
    )
    assert learning.train(case, 7, tmp_path / "run")["eval_return_mean"] == 6.0


def seed(n, passed=True, finished=True, score=500.0):
    return {
        "seed": n,
        "passed": passed,
        "finished": finished,
        "env_steps": 1000 * (n + 1),
        "eval_return_mean": score,
        "seconds": 2.0,
    }


def test_the_table_tells_what_did_not_pass(tmp_path):
    results = {
        "reached": (small(475), [seed(0), seed(1, False), seed(2, False, False, None)]),
        "below": (small(200, must="stay below"), [seed(0), seed(1, False)]),
    }
    for name, (case, seeds) in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(learning.make_record(name, case, seeds)))
    (tmp_path / "README.md").write_text("old\n\n## Kept\n")
    learning.table(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    changed = ", ".join(f"{k}={v}" for k, v in SMALL.items())
    below, reached = [line.split(" | ") for line in lines if line.startswith(("| [below]", "| [reached]"))]
    assert reached[1:6] == [
        f"PPO, CartPole-v1 (defaults, {changed})",
        "475",
        "128",
        "1 of 3, 1 unfinished",
        "500 [500, 500]",
    ]
    assert reached[8] == "1,000, 2,000 (not), 3,000 (unfinished)"
    assert (below[2], below[4], below[8]) == ("below 200", "1 of 2", "1,000, 2,000 (reached it)")
    assert lines[-1] == "## Kept"


def test_shipped_scores_are_those_of_the_records():
    assert scores() == [learning.score(record) for record in learning.read_records(learning.HERE)]
    assert {s["case"] for s in scores()} <= learning.CASES.keys()


def test_quick_has_one_case_of_each_algorithm_and_fits_an_hour():
    names = learning.quick_cases()
    assert [learning.CASES[name].run for name in names] == list(dict.fromkeys(c.run for c in learning.CASES.values()))
    assert {learning.CASES[name].run for name in names} == set(ALGORITHMS)
    assert learning.QUICK["minutes"] < 60


def test_what_there_is_no_time_for_is_told_as_unfinished(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(learning.QUICK, "out", tmp_path / "out")
    learning.main(["--quick", "--minutes", "0"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [t["case"] for t in told] == learning.quick_cases()
    assert {(t["passed"], t["seeds"], t["unfinished"]) for t in told} == {(0, 2, 2)}
    assert (tmp_path / "out" / "README.md").read_text().count("0 of 2, 2 unfinished") == len(told)


def test_how_soon_an_algorithm_learns_is_told_beside_another(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(early, "EPISODES", 1)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    settings = ["iteration_steps=100", "learning_starts=150", "batch_size=8", "fcnet_hiddens=[8]"]
    line = early.one("ours", "TD3", "Pendulum-v1", 3, [100, 200], settings)
    assert (line["run"], line["seed"], list(line["returns"])) == ("TD3", 3, [100, 200])
    assert line["returns"][100] != line["returns"][200]  # by the newest weights
    lines = [{**line, "side": "sb3", "set": [], "returns": {"100": x, "200": 7.0}} for x in (-2.0, 5.0)]
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(json.dumps(x) + "\n" for x in [*lines, {**line, "returns": {"100": 8.0}}]))
    early.main(["--table", str(kept)])
    told = capsys.readouterr().out.splitlines()
    assert told[2:] == [
        f"| Pendulum-v1 | TD3 of Bray {' '.join(settings)} | 8 (8) |  |",
        "| Pendulum-v1 | TD3 of SB3 | 1.5 (-2, 5) | 7 (7, 7) |",
    ]
