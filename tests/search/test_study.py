"""Trials from rung to rung, without training: scores are given, and what Optuna keeps is looked at."""

import json

import pytest

from bray.errors import BrayError, ConfigError
from bray.experiment import Experiment
from bray.search.places import LocalPlaces, Resources, TrialCrew
from bray.search.runner import TrialEnd, TrialRun
from bray.search.space import make_space, typed
from bray.search.study import JOURNAL, Plan, Study


def space_of(*items):
    return make_space([typed(items)], lambda given: Experiment("PPO", "CartPole-v1", sources=given).config)


def open_study(path, space, storage=None, **plan):
    plan = Plan(**{"name": "s", "stop": {"env_steps_total": 2700}, **plan})

    def job(folder, values, seed, stop):
        return TrialRun(path / folder / f"seed-{seed}", {}, [values], [], stop, dict(plan.stop))

    return Study(path, space, plan, job, storage)


def run(study, score, most=10_000):
    """Answer jobs by `score(values, seed, steps)`, a TrialEnd or a number; how many were."""
    for count in range(most):
        if (taken := study.take()) is None:
            return count
        (ticket, job), steps = taken, int(taken[1].stop["env_steps_total"])
        (values,) = job.sources
        found = score(values, ticket[1], steps)
        study.done(ticket, found if isinstance(found, TrialEnd) else TrialEnd(found, steps, steps >= 2700))
    return most


def test_every_combination_of_lists_is_tried_once(tmp_path):
    study = open_study(tmp_path, space_of("lr=1e-3,1e-4", "gamma=0.9,0.95,0.99"), num_seeds=2)
    assert run(study, lambda values, seed, steps: values["lr"] + values["gamma"] + seed) == 12
    found = study.findings()
    assert len({tuple(f.values.items()) for f in found}) == len(found) == 6
    assert {f.state for f in found} == {"complete"}
    assert found[0].score == pytest.approx(1e-3 + 0.9 + 0.5)
    assert found[0].scores == pytest.approx([0.901, 1.901])


def test_asha_ends_trials_by_the_interquartile_mean_over_seeds(tmp_path):
    """The mean would be led by one lucky seed of the bad trials: 4 seeds, of which the middle two count."""
    study = open_study(tmp_path, space_of("lr=1e-4..1e-2"), trials=12, num_seeds=4, scheduler="asha")

    def score(values, seed, steps):
        good = study.findings()[-1].number % 3 == 0
        return 1000.0 if seed == 3 and not good else float(steps if good else -steps)

    run(study, score)
    found = study.findings()
    states = {good: {f.state for f in found if (f.number % 3 == 0) == good} for good in (True, False)}
    assert "complete" in states[True]
    assert "stopped" in states[False]
    assert "stopped" not in states[True]
    assert {f.steps for f in found if f.state == "stopped"} <= {100, 300, 900}
    assert len(found) == 12


def test_median_ends_what_is_below_it(tmp_path):
    study = open_study(tmp_path, space_of("lr=1e-4..1e-2"), trials=12, scheduler="median", sampler="random")
    run(study, lambda values, seed, steps: float(study.findings()[-1].number < 6))
    assert [f.state for f in study.findings()] == ["complete"] * 6 + ["stopped"] * 6


def test_a_population_goes_on_from_its_best(tmp_path):
    for number in range(4):
        (tmp_path / f"trial-{number:04d}" / "seed-0").mkdir(parents=True)
        (tmp_path / f"trial-{number:04d}" / "seed-0" / "who").write_text(str(number))
    study = open_study(tmp_path, space_of("lr=1e-4..1e-2:log"), trials=4, scheduler="pbt")
    lrs = []

    def score(values, seed, steps):
        lrs.append((steps, values["lr"]))
        return values["lr"]

    run(study, score)
    found = study.findings()
    assert sum(f.state == "complete" for f in found) == 4
    assert sum(f.state == "stopped" for f in found) == 9  # at each rung before the end, one of four
    children = [f for f in found if f.parent is not None]
    assert len(children) == 9
    best = max(found[:4], key=lambda f: f.values["lr"])
    assert children[0].parent == best.number
    assert children[0].values["lr"] != best.values["lr"]
    assert (tmp_path / f"trial-{children[0].number:04d}" / "seed-0" / "who").read_text() == str(best.number)
    firsts = sorted({steps for steps, _ in lrs})
    assert firsts == [270 * n for n in range(1, 11)]
    assert [sum(s == steps for s, _ in lrs) for steps in firsts] == [4] * 10


@pytest.mark.parametrize("scheduler", [None, "asha", "pbt"])
@pytest.mark.parametrize("cut", [2, 9])
def test_a_study_that_was_killed_goes_on_with_the_same_trials(tmp_path, scheduler, cut):
    def score(values, seed, steps):
        return -abs(values["lr"] - 1e-3) * steps + seed

    def study(name):
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(6):
            (tmp_path / name / f"trial-{number:04d}").mkdir(exist_ok=True)
        return open_study(
            tmp_path / name, space, trials=6, num_seeds=2, scheduler=scheduler, sampler="random", name="s"
        )

    space = space_of("lr=1e-5..1e-2:log")
    run(study("whole"), score)
    run(study("cut"), score, most=cut)  # nothing is closed: the next one opens what the first one left
    with open(tmp_path / "cut" / JOURNAL, "ab") as f:
        f.write(b'{"op_code": 5, "wor')  # a kill in the middle of a line
    run(study("cut"), score)
    whole, again = study("whole").findings(), study("cut").findings()
    assert [(f.number, f.values, f.state, f.score) for f in again] == [
        (f.number, f.values, f.state, f.score) for f in whole
    ]


def test_a_failed_trial_is_counted_and_the_study_goes_on(tmp_path):
    study = open_study(tmp_path, space_of("lr=1e-3,1e-4,1e-5,1e-6"), num_seeds=2)

    def score(values, seed, steps):
        return TrialEnd(steps=40, error="the loss is not finite") if values["lr"] == 1e-4 and seed == 1 else 1.0

    run(study, score)
    found = study.findings()
    assert [f.state for f in found] == ["complete", "failed", "complete", "complete"]
    assert found[1].error == "seed 1: the loss is not finite"


def test_where_the_first_trials_all_fail_the_study_ends(tmp_path):
    study = open_study(tmp_path, space_of("lr=1e-3,1e-4,1e-5,1e-6"))
    with pytest.raises(BrayError, match="the first 3 trials failed, and the study ends: seed 0: no such game"):
        run(study, lambda values, seed, steps: TrialEnd(error="no such game"))
    assert len(study.findings()) == 3


def test_other_settings_under_the_same_name(tmp_path):
    open_study(tmp_path, space_of("lr=1e-3..1e-2"), trials=2)
    open_study(tmp_path, space_of("lr=1e-3..1e-2"), trials=4)  # more of them is the same study
    with pytest.raises(ConfigError) as e:
        open_study(tmp_path, space_of("lr=1e-4..1e-2", "gamma=0.5"), trials=2)
    assert str(e.value) == (
        "the study 's' has algo.gamma=0.99, got 0.5 (and 1 more: algo.lr): give what it has to go on with it, or "
        "choose another --name"
    )


def test_a_study_in_a_database_belongs_to_one_directory(tmp_path):
    url = f"sqlite:///{tmp_path}/studies.db"
    space = space_of("lr=1e-3,1e-4")
    run(open_study(tmp_path / "a", space, url), lambda *_: 1.0)
    assert run(open_study(tmp_path / "a", space, url), lambda *_: 1.0) == 0
    with pytest.raises(ConfigError, match="the study 's' has directory="):
        open_study(tmp_path / "b", space, url)
    with pytest.raises(ConfigError, match="--storage sqlit:///x: the study cannot be opened"):
        open_study(tmp_path / "c", space, "sqlit:///x")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"scheduler": "ahsa"}, "unknown scheduler 'ahsa'. Did you mean 'asha'?"),
        ({"sampler": "cmaes"}, "unknown sampler 'cmaes'"),
        ({"stop": {}}, "say how long a run is: --steps N"),
        ({"stop": {"time_total_s": 3.0}, "scheduler": "asha"}, "asha compares trials at numbers of environment steps"),
        ({"scheduler": "pbt", "trials": 1}, "pbt trains a population: expected --trials 2 or more"),
        ({"trials": None}, "say how many trials there are, --trials N: lr may have any value of a range"),
    ],
)
def test_plans_that_cannot_work(tmp_path, plan, says):
    with pytest.raises(ConfigError) as e:
        open_study(tmp_path, space_of("lr=1e-3..1e-2"), **{"trials": 2, **plan})
    assert says in str(e.value)


@pytest.mark.parametrize("wants", [{"cpus": 1e6}, {"gpus": 64.0}])
def test_resources_that_nobody_has(wants):
    with pytest.raises(
        BrayError, match=r"a run is to have .* and this machine has .*: ask for less \(--.pus-per-trial"
    ):
        LocalPlaces(Resources(**wants))


def test_a_run_whose_process_dies_is_begun_again_once():
    from bray.envs.process import Lost

    class Place:
        def __init__(self, places):
            self.places = places

        def send(self, job):
            self.job = job

        def receive(self):
            self.places.asked.append(self.job)
            if self.places.asked.count(self.job) <= self.job:  # job N dies N times
                raise Lost("died")
            return TrialEnd(1.0)

        def give_up(self):
            return "exit code -9, Killed"

    class TrialPlaces:
        count, asked = 2, []

        def start(self, job):
            return Place(self)

        def wait(self, busy):
            return busy[:1]

    jobs, done = iter([("a", 0), ("b", 1), ("c", 2), ("d", 0)]), {}
    TrialCrew(TrialPlaces()).work(lambda: next(jobs, None), done.__setitem__)
    assert done == {
        "a": TrialEnd(1.0),
        "b": TrialEnd(1.0),
        "c": TrialEnd(error="its process died, 2 times (exit code -9, Killed)"),
        "d": TrialEnd(1.0),
    }


def test_what_a_study_keeps_is_plain(tmp_path):
    study = open_study(tmp_path, space_of("lr=1e-3,1e-4"))
    run(study, lambda *_: 1.0)
    lines = (tmp_path / JOURNAL).read_text().splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)
