"""Callbacks, numbers of one's own in result rows, and functions that reach every environment."""

import itertools
import json
import time
from functools import partial

import numpy as np
import pytest
import torch

import bray
from bray.cli.main import main
from bray.envs.replayed_calls import ReplayedCalls
from bray.errors import ConfigError, EnvError
from bray.rundir import RunDir
from bray.rundir.trust import UntrustedRun
from bray.train.callbacks import EarlyStopping, make_callbacks
from tests.envs_for_tests import Phased


def test_of_one_place_in_the_code_the_last_function_is_kept():
    calls = ReplayedCalls()
    for level in range(3):
        calls.add(lambda env, level=level: level, level)
        calls.add(lambda env: env, "asked")
    assert list(calls) == [2, "asked"]
    calls.add(partial(max, 1), "built in")
    assert list(calls) == [2, "asked", "built in"]


def experiment(tmp_path, **more):
    config = {"num_envs": 2, "vector": "inprocess", "rollout_length": 16, "minibatches": 2, **more}
    return bray.Experiment(run="PPO", env=Phased, path=tmp_path / "run", config=config)


class Watcher(bray.Callbacks):
    def __init__(self):
        self.seen = []

    def on_episode_start(self, episode):
        episode.user_data["rewards"] = []
        self.seen.append(("start", episode.id, episode.env_index, episode.length))

    def on_episode_step(self, episode):
        episode.user_data["rewards"].append(episode.reward)
        assert episode.info["phase"] == episode.env.phase
        assert episode.obs.shape == (2,)
        assert int(episode.action) in (0, 1)

    def on_episode_end(self, episode):
        assert episode.terminated
        assert not episode.truncated
        assert episode.total_reward == sum(episode.user_data["rewards"])
        assert episode.length == 3
        episode.custom_metrics["late"] = episode.id
        self.seen.append(("end", episode.id, episode.env_index, episode.length))

    def on_train_result(self, experiment, row):
        row["mine"] = row["custom_metrics/late_max"]

    def on_checkpoint(self, experiment, path):
        self.seen.append(("checkpoint", path.name))

    def on_evaluate(self, experiment, result):
        self.seen.append(("evaluated", result["eval/return_mean"]))
        result["eval/judged"] = True


def test_callbacks_see_every_episode_in_order_and_add_numbers_to_rows(tmp_path):
    exp, watcher = experiment(tmp_path, eval_freq=1), Watcher()
    rows = list(exp.train({"training_iteration": 2}, callbacks=watcher))
    episodes = [event for event in watcher.seen if event[0] in ("start", "end")]
    for index in (0, 1):  # 32 rows of a cycle of 4: three steps and the row that begins the next episode
        mine = [event for event in episodes if event[2] == index]
        assert [event[0] for event in mine] == ["start", "end"] * 8
        assert all(start[1] == end[1] for start, end in zip(mine[::2], mine[1::2], strict=True))
    assert sorted(event[1] for event in episodes if event[0] == "start") == list(range(16))
    assert rows[-1]["custom_metrics/late_min"] == 0
    assert rows[-1]["custom_metrics/late_mean"] == 7.5
    assert rows[-1]["mine"] == rows[-1]["custom_metrics/late_max"] == 15
    assert ("evaluated", 9.0) in watcher.seen
    assert rows[-1]["eval/judged"] is True
    assert any(event[0] == "checkpoint" for event in watcher.seen)
    exp.close()


class Steady(bray.Callbacks):
    def __init__(self, value):
        self.value = value

    def on_episode_end(self, episode):
        episode.custom_metrics["odd / $json"] = self.value


def test_numbers_of_the_last_episodes_go_on_after_a_resume(tmp_path):
    exp = experiment(tmp_path)
    list(exp.train({"training_iteration": 1}, callbacks=Steady(1.0)))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run", env=Phased)
    (row,) = exp.train({"training_iteration": 2}, callbacks=Steady(3.0))
    exp.close()
    assert [row[f"custom_metrics/odd / $json_{what}"] for what in ("min", "mean", "max")] == [1.0, 2.0, 3.0]


class Counts(bray.Callbacks):
    """How many steps of each episode it has not seen."""

    def on_episode_start(self, episode):
        episode.user_data["seen"] = 0

    def on_episode_step(self, episode):
        episode.user_data["seen"] += 1

    def on_episode_end(self, episode):
        episode.custom_metrics["missed"] = episode.length - episode.user_data["seen"]


def test_metrics_of_episodes_that_began_before_a_resume_are_left_out(tmp_path):
    config = {"vector": "inprocess", "num_envs": 3, "rollout_length": 7, "minibatches": 1}
    exp = bray.Experiment(run="PPO", env="CartPole-v1", use_preset=False, path=tmp_path / "run", config=config)
    list(exp.train({"training_iteration": 5}, callbacks=Counts()))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run")
    assert exp.training.rollout.lengths.any()
    *_, row = exp.train({"training_iteration": 30}, callbacks=Counts())
    exp.close()
    assert row["custom_metrics/missed_max"] == 0
    assert row["episodes_total"] > 10


def test_counters_are_those_of_the_training_whatever_a_callback_writes(tmp_path, caplog):
    class Wrong(bray.Callbacks):
        def on_train_result(self, experiment, row):
            row["env_steps_total"] = 1
            del row["training_iteration"]

    exp = experiment(tmp_path)
    rows = list(exp.train({"env_steps_total": 100}, callbacks=Wrong()))
    exp.close()
    assert rows[-1]["env_steps_total"] >= 100
    assert [row["training_iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert caplog.text.count("which the training counts itself: it stays as it was") == 1


def test_a_number_that_no_float_holds_is_told_in_one_line(tmp_path, caplog):
    class Large(bray.Callbacks):
        def on_train_result(self, experiment, row):
            row["mine"], row["deep"] = 10**400, {"er": -(10**5000)}

    exp = experiment(tmp_path, checkpoint_score="episode_return_max")
    rows = list(exp.train({"training_iteration": 2}, callbacks=Large()))
    exp.close()
    assert rows[-1]["mine"] == float("inf")
    assert caplog.text.count("row['mine'] to a number that is too large for a float: it counts as infinity") == 1
    written = json.loads((tmp_path / "run" / "result.jsonl").read_text().splitlines()[-1])
    assert (written["mine"], written["deep/er"]) == (None, None)
    assert {"mine", "deep/er"} <= set(written["nan_metrics"])


def test_a_custom_metric_that_no_float_holds_is_refused_in_one_line(tmp_path):
    class Large(bray.Callbacks):
        def on_episode_end(self, episode):
            episode.custom_metrics["mine"] = 10**5000

    exp = experiment(tmp_path)
    with pytest.raises(ConfigError, match=r"custom_metrics\['mine'\] .*expected a number, got one that is too large"):
        list(exp.train({"training_iteration": 1}, callbacks=Large()))
    exp.close()


@pytest.mark.parametrize("vector", ["inprocess", "subprocess"])
def test_a_function_reaches_every_environment_before_its_next_step(tmp_path, vector):
    class Harder(bray.Callbacks):
        def on_train_result(self, experiment, row):
            self.returned = experiment.foreach_env(lambda env: env.set_phase(5))

    exp, harder = experiment(tmp_path, vector=vector, wrappers=["RecordEpisodeStatistics"]), Harder()
    rows = exp.train({"training_iteration": 2}, callbacks=harder)
    assert next(rows)["episode_length_mean"] == 3
    assert harder.returned == [5, 5]
    assert next(rows)["episode_return_max"] == 25
    exp.close()


def test_an_environment_that_is_rebuilt_is_given_to_the_function_too(tmp_path, monkeypatch):
    exp = experiment(tmp_path, max_restarts=9)
    exp.foreach_env(lambda env: env.set_phase(7))
    monkeypatch.setattr(Phased, "to_fail", 2)
    rows = list(exp.train({"training_iteration": 2}))
    assert exp.training.env.restarts == 2
    assert exp.foreach_env(lambda env: env.phase) == [7, 7]
    assert rows[-1]["episode_return_max"] == 49
    exp.close()


def test_compiled_environments_say_how_to_reach_each_of_them(tmp_path):
    exp = bray.Experiment(run="PPO", env="CartPole-v1", config={"vector": "native", "num_envs": 2}, path=tmp_path)
    with pytest.raises(ConfigError, match=r"set env\.vector=inprocess"):
        exp.foreach_env(lambda env: env)
    exp.close()


def test_what_a_function_raises_in_another_process_is_told(tmp_path):
    exp = experiment(tmp_path, vector="subprocess")
    with pytest.raises(EnvError, match="has no attribute 'set_fase'"):
        exp.foreach_env(lambda env: env.set_fase(1))
    assert exp.foreach_env(lambda env: env.phase) == [3, 3]
    exp.close()


class Rising(bray.Callbacks):
    """A curriculum: one phase more after each iteration."""

    def __init__(self, phase=4):
        self.phase = phase

    def on_train_start(self, experiment):
        experiment.foreach_env(lambda env: env.set_phase(self.phase))

    def on_train_result(self, experiment, row):
        self.phase += 1

    def get_state(self):
        return {"phase": self.phase}

    def set_state(self, state):
        self.phase = state["phase"]


def test_a_curriculum_goes_on_after_a_resume(tmp_path, caplog):
    exp = experiment(tmp_path)
    assert [row["episode_return_max"] for row in exp.train({"training_iteration": 2}, callbacks=Rising())] == [16, 16]
    exp.close()
    assert RunDir.open(tmp_path / "run").load_checkpoint().meta["exact"] is False
    exp, rising = bray.Experiment.resume(tmp_path / "run", env=Phased), Rising()
    assert "what foreach_env or foreach_worker told the environments is not saved: tell them again" in caplog.text
    exp.save()  # before `train` has the callbacks
    assert [row["episode_return_max"] for row in exp.train({"training_iteration": 3}, callbacks=rising)] == [36]
    assert rising.phase == 7
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run", env=Phased)
    exp.foreach_env(lambda env: env.set_phase(8))
    assert [row["episode_return_max"] for row in exp.train({"training_iteration": 4})] == [64]
    assert "a state of callbacks that this training does not have (Rising)" in caplog.text
    exp.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": np.zeros(2)}]}, r"got ndarray at \['a'\]\[1\]\['b'\]"),
        ({"a": {1: 2}}, r"got the key 1 at \['a'\]"),
        ([1], "got list"),
    ],
)
def test_a_state_of_callbacks_that_is_no_plain_data_is_refused(tmp_path, state, message):
    exp = experiment(tmp_path)
    with pytest.raises(ConfigError, match=message):
        list(
            exp.train(
                {"training_iteration": 1}, callbacks=type("Mine", (bray.Callbacks,), {"get_state": lambda _: state})
            )
        )
    assert exp.saved  # what was learnt is
    exp.close()


def test_early_stopping_ends_a_training_that_does_not_improve(tmp_path):
    exp = experiment(tmp_path, callbacks=[{"name": "EarlyStopping", "patience": 3}])
    assert len(list(exp.train({"training_iteration": 3}))) == 3
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run", env=Phased)
    assert exp.exact
    assert len(list(exp.train({"training_iteration": 50}))) == 1
    exp.close()
    with pytest.raises(ConfigError, match="patience"):
        EarlyStopping(patience=0)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("episode_reward_mean", "unknown key of a result row 'episode_reward_mean'.*episode_return_mean"),
        ("loss/valu_loss", "Did you mean 'loss/value_loss'"),
        ("eval/return_mean", "nothing is evaluated: set eval_freq"),
    ],
)
def test_early_stopping_refuses_a_metric_that_no_row_has(tmp_path, metric, says):
    exp = experiment(tmp_path, callbacks=[{"name": "EarlyStopping", "metric": metric}])
    with pytest.raises(ConfigError, match=says):
        list(exp.train({"training_iteration": 20}))
    exp.close()


def test_early_stopping_by_a_number_that_is_to_fall(tmp_path):
    class Falls(bray.Callbacks):
        def on_train_result(self, exp, row):
            row["mine"] = max(0, 5 - row["training_iteration"])

    exp = experiment(tmp_path)
    rows = list(exp.train({"training_iteration": 50}, callbacks=[Falls(), EarlyStopping("-mine", patience=2)]))
    assert [row["mine"] for row in rows] == [4, 3, 2, 1, 0, 0, 0]
    exp.close()


def test_a_custom_metric_that_does_not_come_is_told_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("bray.train.awaited.PATIENCE", 2)
    exp = experiment(tmp_path, checkpoint_score="custom_metrics/late_meen")
    stop = {"training_iteration": 4, "custom_metrics/late_meen": 1}
    list(exp.train(stop, callbacks=[Watcher(), EarlyStopping("custom_metrics/late_meen")]))
    exp.close()
    for where in ("EarlyStopping: metric", "run.stop", "run.checkpoint_score"):
        said = f"{where}: 2 rows have had no 'custom_metrics/late_meen' (custom metrics: custom_metrics/late_"
        assert caplog.text.count(said) == 1


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ({"loss/valu_loss": 1.0}, "Did you mean 'loss/value_loss'"),
        ({"eval/return_mean": 1.0}, "nothing is evaluated: set eval_freq"),
    ],
)
def test_a_stop_condition_that_no_row_has_is_refused(tmp_path, stop, says):
    exp = experiment(tmp_path)
    with pytest.raises(ConfigError, match=says):
        list(exp.train(stop))
    exp.close()
    exp = bray.Experiment.resume(tmp_path / "run", env=Phased)
    if "eval/return_mean" in stop:  # beside another one it may be a preset's
        assert len(list(exp.train(stop | {"training_iteration": 3}))) == 2
    exp.close()


def test_custom_metrics_end_a_training_and_score_its_checkpoints(tmp_path):
    exp = experiment(tmp_path, checkpoint_score="custom_metrics/late_max")
    rows = list(exp.train({"custom_metrics/late_max": 4, "training_iteration": 50}, callbacks=Watcher()))
    assert rows[-1]["custom_metrics/late_max"] >= 4
    assert len(rows) < 50
    exp.close()


def test_time_in_callbacks_is_time_of_the_training_and_told(tmp_path):
    class Slow(bray.Callbacks):
        def on_train_result(self, exp, row):
            time.sleep(0.2)

    exp = experiment(tmp_path)
    rows = list(exp.train({"training_iteration": 4}, callbacks=Slow()))
    exp.close()
    for before, row in itertools.pairwise(rows):
        assert row["perf/between"] >= 200.0
        spent = row["time_total_s"] - before["time_total_s"]
        assert spent >= row["time_this_iter_s"] + row["perf/between"] / 1e3


def test_time_of_the_caller_is_not_of_the_training(tmp_path):
    exp = experiment(tmp_path)
    start, slept = time.perf_counter(), 0.0
    for row in exp.train({"training_iteration": 4}):
        time.sleep(0.2)
        slept += 0.2
        assert row["time_total_s"] <= time.perf_counter() - start - slept
    exp.close()


def test_an_error_in_a_callback_ends_the_training_and_loses_nothing(tmp_path):
    class Broken(bray.Callbacks):
        def on_episode_end(self, episode):
            if episode.id > 4:
                raise ZeroDivisionError("mine")

    exp = experiment(tmp_path)
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(exp.train({"training_iteration": 9}, callbacks=[Broken]))
    exp.close()


@pytest.mark.parametrize("event", ["on_train_result", "on_evaluate"])
def test_the_row_of_an_iteration_is_written_although_a_callback_raises(tmp_path, event):
    def fail(self, experiment, numbers):
        if experiment.training.iteration == 2:
            raise ZeroDivisionError("mine")

    exp = experiment(tmp_path, eval_freq=1, eval_episodes=1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(exp.train({"training_iteration": 9}, callbacks=type("Broken", (bray.Callbacks,), {event: fail})))
    exp.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "result.jsonl").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2]
    assert [row["eval/return_mean"] for row in rows] == [9.0, 9.0]
    assert RunDir.open(tmp_path / "run").load_checkpoint().meta["training_iteration"] == 2


def test_what_a_callback_adds_to_a_row_is_saved_as_it_is_written(tmp_path):
    class Adds(bray.Callbacks):
        def on_train_result(self, experiment, row):
            row |= {"tensor": torch.tensor(1.5), "path": tmp_path, "nested": {"set": {1}}}

    exp = experiment(tmp_path)
    list(exp.train({"training_iteration": 2}, callbacks=Adds))
    exp.close()
    again = bray.Experiment.resume(tmp_path / "run")
    assert again.last_row["training_iteration"] == 2
    assert [again.last_row[k] for k in ("tensor", "path", "nested/set")] == [1.5, str(tmp_path), "{1}"]
    again.close()


def test_custom_metrics_are_numbers(tmp_path):
    class Words(bray.Callbacks):
        def on_episode_end(self, episode):
            episode.custom_metrics["phase"] = "hard"

    exp = experiment(tmp_path)
    with pytest.raises(ConfigError, match=r"custom_metrics\['phase'\].*expected a number, got 'hard'"):
        list(exp.train({"training_iteration": 9}, callbacks=Words))
    exp.close()


def test_what_is_saved_in_the_middle_of_an_iteration_is_not_exact(tmp_path, caplog):
    class Interrupts(bray.Callbacks):
        def on_episode_step(self, episode):
            if episode.id == 11 and episode.length == 2:
                raise KeyboardInterrupt

    exp = experiment(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(exp.train({"training_iteration": 9}, callbacks=Interrupts()))
    exp.close()
    saved = RunDir.open(tmp_path / "run").load_checkpoint()
    assert (saved.meta["training_iteration"], saved.meta["exact"]) == (1, False)
    exp = bray.Experiment.resume(tmp_path / "run", env=Phased)
    assert "the middle of an iteration" in caplog.text
    assert not exp.exact
    assert exp.training.rollout.lengths.tolist() == [0, 0]
    assert [row["episode_length_mean"] for row in exp.train({"training_iteration": 2})] == [3]
    exp.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "expected bray.Callbacks"),
        (["EarlyStoping"], "Did you mean 'EarlyStopping'"),
        (["os:path"], "expected bray.Callbacks"),
        (["no_such_module:Mine"], "cannot load 'no_such_module:Mine'.*PYTHONPATH"),
        ([{"name": "EarlyStopping", "patients": 3}], "does not take {'patients': 3}"),
        ({"on_episode_ends": print}, "unknown event of callbacks 'on_episode_ends'. Did you mean 'on_episode_end'"),
        ({"on_episode_end": 7}, "on_episode_end: expected a function"),
        ({"on_episode_end": bray.Callbacks}, "on_episode_end: expected a function"),
        ({}, "expected bray.Callbacks"),
    ],
)
def test_what_are_no_callbacks_is_refused(tmp_path, given, message):
    exp = experiment(tmp_path)
    with pytest.raises(ConfigError, match=message):
        exp.train({"training_iteration": 1}, callbacks=given)
    exp.close()


def note_result(experiment, row):
    row["noted"] = 1


def on_episode_end(episode):
    episode.custom_metrics["steps"] = episode.length


FUNCTIONS = {
    "function": note_result,
    "lambda": lambda experiment, row: row.update(noted=1),
    "dict": {"on_train_result": note_result, "on_episode_end": on_episode_end},
    "dict of names": {"on_train_result": f"{__name__}:note_result"},
    "name": f"{__name__}:note_result",
    "list": [on_episode_end, {"name": "EarlyStopping"}, note_result],
    "tuple": (note_result, f"{__name__}:on_episode_end"),
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_plain_functions_are_callbacks(form):
    given = FUNCTIONS[form]
    for where in ({"callbacks": given}, {"config": {"run": {"callbacks": given}}}, {"config": {"callbacks": given}}):
        made = make_callbacks(bray.Experiment(run="PPO", env=Phased, **where).config["run"].callbacks)
        for callbacks in (made, make_callbacks(given)):
            row = {"episode_return_mean": 0.0}
            callbacks.callbacks[-1 if form == "list" else 0].on_train_result(None, row)
            assert row["noted"] == 1
            assert callbacks.watches is (form in ("dict", "list", "tuple"))  # on_episode_end, by its name


def test_functions_train_and_go_on_after_a_resume(tmp_path):
    exp = experiment(tmp_path, callbacks={"on_episode_end": on_episode_end})
    (row,) = exp.train({"training_iteration": 1}, callbacks=note_result)
    assert (row["noted"], row["custom_metrics/steps_mean"]) == (1, 3.0)
    exp.close()
    exp = bray.Experiment.resume(exp.path, callbacks=[note_result, on_episode_end])
    (row,) = exp.train({"training_iteration": 2})
    assert (row["noted"], row["custom_metrics/steps_mean"]) == (1, 3.0)
    exp.close()


MINE = """
import bray
class Mine(bray.Callbacks):
    def on_train_result(self, experiment, row):
        row["steps_doubled"] = 2 * row["env_steps_total"]
"""


def test_callbacks_are_named_on_the_command_line_and_go_on_after_a_resume(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = [
        "train",
        "--run",
        "PPO",
        "--env",
        "CartPole-v1",
        "--quiet",
        "--trial",
        "a",
        "--callbacks",
        "my_callbacks:Mine",
    ]
    assert main([*run, "--stop", '{"training_iteration": 1}']) == 0
    exp = bray.Experiment.resume(tmp_path / "runs" / "a")
    (row,) = exp.train({"training_iteration": 2})
    assert row["steps_doubled"] == 2 * row["env_steps_total"]
    exp.close()


def test_a_stranger_s_run_may_not_name_callbacks_unasked(tmp_path, monkeypatch):
    exp = bray.Experiment(run="PPO", env="CartPole-v1", path=tmp_path / "run")
    list(exp.train({"training_iteration": 1}))
    exp.close()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("callbacks: []", "callbacks: ['os:system']"))
    with pytest.raises(UntrustedRun, match="os:system"):
        bray.Experiment.load(tmp_path / "run")


def test_live_games_have_no_callbacks_of_episodes(tmp_path):
    exp = bray.Experiment(run="PPO", live=True, obs="float32[2]", actions=2, port=0, path=tmp_path / "run")
    with pytest.raises(ConfigError, match="not live games"):
        list(exp.train({"training_iteration": 1}, callbacks=Watcher()))
    exp.close()
