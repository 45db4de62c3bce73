"""What holds a run up: from rows to advice, and from real trainings to the right rows."""

import json
import logging
import os
import re

import pytest

import bray
from benchmarks import advice
from bray.cli.main import main
from bray.config import ConfigSource, resolve
from bray.diagnosis.bottleneck import Advisor, Machine, Times, find_bottleneck
from bray.experiment.saved import with_choices
from bray.metrics.spent import PHASES, Laps, WorkerTimes
from bray.spec import EnvSpec, Space
from bray.train.config import RunConfig
from tests.envs_for_tests import Phased

PPO = {"num_envs": 8, "num_workers": 0, "rollout_length": 128, "minibatches": 16, "epochs": 10, "device": "cpu"}
DQN = {"num_envs": 1, "num_workers": 0, "replay_size": 1000, "train_every": 1, "updates": 1, "device": "cpu"}
TWO = Machine(cores=2)


def rows(count=6, seconds=1.0, worker=None, waits=(), cpu=None, steps=100, **phases):
    """Rows of a run whose phases take these shares of each second."""
    spent = {f"perf/{k}": 1e3 * seconds * phases.get(k, 0.0) for k in PHASES}
    spent |= {"perf/cpu": 1e3 * seconds * (1.0 if cpu is None else cpu), "perf/queued": 0.0}
    spent |= {f"perf/{k}": 1e3 * v for k, v in phases.items() if k not in PHASES}
    spent |= {f"perf/worker_{k}": 1e3 * seconds * v for k, v in (worker or {}).items()}
    spent |= {f"perf/worker_idle/{w}": 1e3 * seconds * v for w, v in enumerate(waits, 1)}
    return [
        {
            **spent,
            "training_iteration": i,
            "time_this_iter_s": seconds,
            "time_total_s": i * seconds,
            "learner_steps_total": i * steps,
        }
        for i in range(1, count + 1)
    ]


def said(options, machine=TWO, **told):
    return find_bottleneck(Times.of(rows(**told)), options, machine)


def keys(found):
    return [change.keys for change in found.changes]


def test_a_learner_that_holds_a_run_up_is_told_with_its_number_and_bound():
    found = said(PPO, learn=0.83, env=0.1, forward=0.07, steps=1000)
    assert str(found) == (
        "learner-bound: 83% of the time is the update (perf/learn); more workers will not help; a gradient step takes "
        "0.83 ms. Try minibatches=4 (at most 2.6 times as fast; learns differently, compare returns), or epochs=5 (at "
        "most 1.7 times as fast; learns differently, compare returns)."
    )
    assert found.changes[0].gain == pytest.approx(1 / (1 - 0.83 + 0.83 / 4))


@pytest.mark.parametrize(
    ("options", "machine", "expected"),
    [
        (PPO, TWO, [{"threads": 2}, {"epochs": 5}]),  # arithmetic: not fewer minibatches
        (PPO, Machine(16), [{"threads": 4}, {"epochs": 5}]),
        (PPO, Machine(16, gpus=1), [{"device": "cuda"}, {"epochs": 5}]),
        (DQN, TWO, [{"threads": 2}, {"train_every": 2}]),
        ({**DQN, "updates": 4}, Machine(1), [{"updates": 2}]),
        ({}, Machine(1), []),
    ],
)
def test_long_gradient_steps_want_other_hardware_or_fewer_of_them(options, machine, expected):
    found = said(options, machine, learn=0.7, env=0.3, steps=10)
    assert found.name == "learner-bound"
    assert keys(found) == expected


def test_an_update_that_has_several_threads_gets_no_more_of_them():
    busy = said({**PPO, "threads": "auto"}, Machine(4), learn=0.7, env=0.3, steps=10, cpu=2.4)
    assert keys(busy) == [{"epochs": 5}]
    assert keys(said({**PPO, "threads": 4}, Machine(4), learn=0.7, env=0.3, steps=10)) == [{"epochs": 5}]


def test_a_learner_that_replays_gets_a_worker_where_playing_takes_long():
    assert keys(said(DQN, learn=0.6, env=0.4, steps=1000)) == [
        {"num_workers": 1, "lockstep": True},
        {"train_every": 2},
    ]
    found = said(DQN, learn=0.7, env=0.3, steps=1000)  # 1.4 times at most, and the copies take more than that
    assert keys(found) == [{"train_every": 2}]
    assert "more workers will not help" in found.note


def test_environments_that_compute_get_as_many_workers_as_there_are_cores():
    found = said(PPO, env=0.6, forward=0.2, learn=0.2)
    assert found.name == "env-bound"
    assert keys(found) == [{"num_workers": 2, "num_envs": 4}]
    assert found.changes[0].gain == pytest.approx(1 / (0.2 + 0.8 / 2))
    assert found.changes[0].same
    assert keys(said(DQN, Machine(4), env=0.9, learn=0.1)) == [{"num_workers": 4, "num_envs": 1, "lockstep": True}]
    assert said(PPO, Machine(1), env=0.9, learn=0.1).note == (
        "all cores play already: a faster environment or more cores would help"
    )


def test_environments_that_sleep_get_more_workers_than_there_are_cores():
    assert keys(said(PPO, env=0.9, learn=0.1, cpu=0.15)) == [{"num_workers": 8, "num_envs": 1}]
    assert keys(said({**PPO, "vector": "subprocess"}, env=0.9, learn=0.1, cpu=0.15)) == [
        {"num_workers": 2, "num_envs": 4}
    ]
    crowded = said(PPO, env=0.9, learn=0.1, cpu=0.4, queued=0.6)  # does not sleep: others have the cores
    assert keys(crowded) == []
    assert "there are more processes than cores: one waits 60% of its time for them" in crowded.note


def test_a_large_network_gets_cores_a_device_or_more_environments():
    found = said(PPO, forward=0.7, env=0.1, learn=0.2)
    assert found.name == "inference-bound"
    assert keys(found) == [{"num_workers": 2, "num_envs": 4}, {"num_envs": 32, "rollout_length": 32}]
    assert keys(said(PPO, Machine(1, gpus=1), forward=0.7, env=0.1, learn=0.2))[0] == {"device": "cuda"}


def test_copies_that_hold_a_run_up_are_told():
    worker = {"env": 0.1, "forward": 0.1, "transfer": 0.6, "idle": 0.2}
    told = rows(learn=0.1, transfer=0.5, idle=0.4, worker=worker, waits=(0.2, 0.2))
    wall, options = Times.of(told).wall, {**PPO, "num_workers": 2, "num_envs": 4}
    assert wall["transfer"] == pytest.approx(0.5 + 0.4 * 0.6 / 0.8)  # while it waits, workers copy too
    assert wall["env"] == wall["forward"] == pytest.approx(0.4 * 0.1 / 0.8)
    assert sum(wall.values()) == pytest.approx(1.0)
    found = find_bottleneck(Times.of(told), options, TWO)
    assert (found.name, keys(found)) == ("transfer-bound", [{"num_workers": 0, "num_envs": 8}])
    assert found.note.startswith("most of it are pieces")
    weights = [{**row, "perf/transfer_weights": 450.0, "perf/worker_transfer_weights": 500.0} for row in told]
    assert keys(find_bottleneck(Times.of(weights), options, TWO)) == [
        {"num_workers": 0, "num_envs": 8},
        {"rollout_length": 256},
    ]


def test_a_slow_worker_that_others_wait_for_is_named():
    worker = {"env": 0.3, "idle": 0.7}
    found = said({**PPO, "num_workers": 4}, learn=0.1, idle=0.9, worker=worker, waits=(0.9, 0.9, 0.0, 1.0))
    assert found.name == "waiting"
    assert found.share == pytest.approx(0.9 * 0.7)
    assert found.note == "worker 3 is the slowest, the others wait for it at the end of each round"
    assert said(PPO, learn=0.1, idle=0.9).note.startswith("more games at once")


def test_evaluations_count_and_nothing_may_stand_out():
    told = [{**row, "time_total_s": 3 * row["time_total_s"], "eval/return_mean": 1.0} for row in rows(learn=1.0)]
    found = find_bottleneck(Times.of(told), {**PPO, "eval_freq": 1}, TWO)
    assert (found.name, keys(found)) == ("evaluation-bound", [{"eval_freq": 4}])
    found = said(PPO, env=0.35, forward=0.3, learn=0.35)
    assert str(found) == "balanced: nothing stands out (env 35%, learn 35%, forward 30%)."


@pytest.mark.parametrize("change", [{}, {"perf/learn": "x"}, {"time_this_iter_s": None}, {"perf/learn": float("nan")}])
def test_rows_that_do_not_tell_are_left_out(change):
    told = [{**row, **change} for row in rows(2, learn=1.0)]
    assert (Times.of(told) is None) == bool(change)
    assert Times.of(told[:1]) is None  # the first one


def test_phases_of_processes_are_counted_to_the_end():
    laps, times = Laps(), WorkerTimes()
    laps.lap("idle")
    laps.lap("idle")
    assert laps.take().keys() == {"idle"}
    assert laps.take() == {}
    times.add(1, {"env": 0.5, "idle": 0.25})
    times.add(2, {"env": 1.5})
    times.add(1, {"env": 1.0})
    told = times.row()
    assert told == {
        "perf/worker_env": 1500.0,
        "perf/worker_idle": 125.0,
        "perf/worker_idle/1": 250.0,
        "perf/worker_idle/2": 0.0,
    }
    assert times.row() == {}


def test_it_is_said_once_after_a_minute_and_loudly_where_nothing_else_changes(caplog):
    caplog.set_level(logging.INFO, "bray")
    advisor = Advisor(PPO, lambda: TWO)
    for row in rows(59, env=0.9, learn=0.1):
        advisor.look(row)
    assert advisor.said is None
    for row in rows(100, env=0.9, learn=0.1):
        advisor.look(row)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "env-bound: 90% of the time is stepping environments (perf/env). Try num_workers=2 num_envs=4"
    )
    again = Advisor(PPO, lambda: TWO)
    again.resume({"time_total_s": 61.0})
    quiet = Advisor(PPO, lambda: TWO)
    for row in rows(100, learn=0.9, env=0.1, steps=1000):
        again.look(row)
        quiet.look(row)
    assert again.said is None
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


# --- runs -------------------------------------------------------------------------------------------------------------


class Reach(bray.Callbacks):
    returned = None

    def on_train_result(self, experiment, row):
        if self.returned is None:
            self.returned = experiment.foreach_worker(
                lambda worker: (
                    worker.index,
                    worker.foreach_env(lambda env: env.set_phase(5)),
                    worker.policies[0] is None,
                )
            )


@pytest.fixture(scope="module", params=[0, 2])
def trained(request, tmp_path_factory):
    """A run without and with workers: how many, its directory, its rows, and what a function for all workers returned
    after the first."""
    path, reach = tmp_path_factory.mktemp("bottleneck") / "run", Reach()
    config = {"vector": "inprocess", "num_envs": 2, "rollout_length": 16, "epochs": 1, "iteration_steps": 0}
    exp = bray.Experiment("PPO", Phased, use_preset=False, path=path, config={**config, "num_workers": request.param})
    told = list(exp.train({"training_iteration": 3}, callbacks=reach))
    exp.close()
    return request.param, path, told, reach.returned


def test_the_phases_of_a_row_are_all_of_its_time(trained):
    workers, _, told, _ = trained
    for row in told:
        assert sum(row[f"perf/{phase}"] for phase in PHASES) == pytest.approx(1e3 * row["time_this_iter_s"], rel=1e-6)
    times = Times.of(told)
    assert sum(times.wall.values()) == pytest.approx(1.0)
    assert list(times.worker_idle) == list(range(1, workers + 1))
    assert (told[-1]["perf/env"] > 0, told[-1]["perf/transfer"] > 0) == (not workers, bool(workers))


def test_a_function_reaches_every_worker_in_the_same_iteration(trained):
    workers, _, told, returned = trained
    assert returned == [(w, [5, 5], False) for w in ([1, 2] if workers else [0])]
    assert [told[0]["episode_length_mean"], told[1]["episode_return_max"]] == [3, 25]


def test_what_was_chosen_by_rule_is_written_down_and_used_again(trained, monkeypatch):
    _, path, _, _ = trained
    assert re.search(r"^  threads: 1 +# auto$", (path / "config.yaml").read_text(), re.M)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    pictures = EnvSpec("pictures", Space("box", (4, 84, 84), "uint8", 0, 255), Space("discrete", n=(6,), start=(0,)))
    config = resolve({"run": RunConfig}, [ConfigSource("test", {"run": {"device": "cpu"}})])
    written = with_choices(config, pictures)
    assert (config["run"].threads, written["run"].threads) == ("auto", 7)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert with_choices(written, pictures)["run"].threads == 7  # as read from its config.yaml


def test_doctor_tells_where_the_time_of_a_run_goes_and_imports_nothing(trained, capsys):
    workers, path, _, _ = trained
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("algorithm: PPO", "algorithm: no_such_module:Own"))
    assert main(["doctor", str(path)]) == 0
    out = capsys.readouterr().out
    assert "no_such_module:Own on" in out
    assert ("idle: worker 1" in out) == bool(workers)
    assert main(["doctor", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["wall"].values()) == pytest.approx(1.0)
    assert report["finding"]["text"].startswith(report["finding"]["name"])


def test_doctor_says_what_is_wrong_with_the_rows_of_a_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("run: [1]\n")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "its rows do not say where the time goes" in capsys.readouterr().err
    for text in ("{}\nnot json\n", "[" * 100_000 + "\n"):
        (tmp_path / "result.jsonl").write_text(text)
        assert main(["doctor", str(tmp_path)]) == 2
        assert "expected lines of JSON" in capsys.readouterr().err
    (tmp_path / "result.jsonl").write_text(("{" + ", ".join(f'"{k}": {10**400}' for k in rows()[0]) + "}\n") * 3)
    assert main(["doctor", str(tmp_path)]) == 2
    assert "its rows do not say" in capsys.readouterr().err
    (tmp_path / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(learn=0.9, env=0.1)))
    assert main(["doctor", str(tmp_path)]) == 0
    assert "learner-bound" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in advice.CASES if name != "pictures"])
def test_made_up_trainings_are_told_apart(name):
    """`pictures` needs a core for each of its workers."""
    found, _ = advice.train(advice.CASES[name], 5.0, TWO)
    assert found.name == advice.CASES[name].expected
