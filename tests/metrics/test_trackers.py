"""Rows in Weights & Biases (offline) and MLflow; the packages are not among ours, so their tests run where they are
installed."""

import posixpath
import re
import sys
from types import SimpleNamespace

import pytest

import bray
from bray.errors import ConfigError
from bray.metrics import trackers


def train(tmp_path, *names, stop=2):
    exp = bray.Experiment(
        run="PPO", env="CartPole-v1", path=tmp_path / "run", track=list(names), rollout_length=16, epochs=1
    )
    rows = list(exp.train({"training_iteration": stop}))
    exp.close()
    return rows


def test_mlflow_gets_every_row_and_goes_on_after_a_resume(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rows = train(tmp_path, "mlflow")
    exp = bray.Experiment.resume(tmp_path / "run")
    rows += exp.train({"training_iteration": 3})
    exp.close()
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("bray").experiment_id])
    told = client.get_metric_history(run.info.run_id, "learner_steps_total")
    assert [(m.step, m.value) for m in told] == [(r["env_steps_total"], r["learner_steps_total"]) for r in rows]
    assert (run.info.status, run.data.params["algo.rollout_length"]) == ("FINISHED", "16")


def test_wandb_gets_every_row_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = train(tmp_path, "wandb")
    wandb.teardown()  # its own process writes the file
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    data = file.read_bytes()
    for key in ("episode_return_mean", "loss/policy_loss", "rollout_length"):
        assert key.encode() in data
    assert all(str(row["env_steps_total"]).encode() in data for row in rows)


def test_a_service_that_does_not_answer_is_told_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    class Silent(trackers.MlflowSink):
        def log(self, row):
            raise ConnectionError("nobody there")

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", (Silent, "json", "mlflow-skinny"))
    assert len(train(tmp_path, "mlflow", stop=3)) == 3
    assert (
        caplog.text.count("writing to mlflow failed, training goes on without it: ConnectionError: nobody there") == 1
    )


class Mlflow:
    """What we use of its client, as a server that may be away."""

    def __init__(self):
        self.away, self.asked, self.rows, self.ended = True, 0, [], []

    def get_experiment_by_name(self, name):
        self.asked += 1
        if self.away:
            raise ConnectionError("nobody there")

    def create_experiment(self, name):
        return "1"

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id="mine"))

    def log_param(self, run_id, key, value): ...

    def log_batch(self, run_id, metrics):
        self.rows.append({name: value for name, value, _, _ in metrics})

    def set_terminated(self, run_id):
        if self.away:
            raise ConnectionError("nobody there")
        self.ended.append(run_id)


@pytest.fixture
def mlflow(monkeypatch):
    client = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *parts: parts))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda uri: client))
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "7")  # put back what comes
    return client


def test_a_server_that_is_away_is_asked_once_a_minute_and_fails_nothing(tmp_path, mlflow, caplog):
    sink = trackers.MlflowSink(tmp_path, "a run", {"lr": 1})
    now = 1000.0
    sink.now = lambda: now
    for now in (1000.0, 1001.0, 1059.0, 1061.0):  # noqa: B007
        sink.write({"env_steps_total": 1})
    assert mlflow.asked == 2
    sink.close()
    assert (mlflow.ended, caplog.text.count("failed")) == ([], 1)
    mlflow.away, now = False, 1200.0
    sink.write({"env_steps_total": 2})
    mlflow.away = True
    sink.close()
    assert "ending the run at mlflow failed: ConnectionError: nobody there" in caplog.text
    mlflow.away = False
    sink.close()
    assert (mlflow.rows, mlflow.ended) == ([{"env_steps_total": 2.0}], ["mine"])


@pytest.mark.parametrize(("given", "kept"), [(None, "1"), ("5", "5")])
def test_mlflow_s_own_patience_is_short_unless_the_user_says_another(tmp_path, mlflow, monkeypatch, given, kept):
    if given is None:
        monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    else:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", given)
    trackers.MlflowSink(tmp_path, "a run", {}).write({"env_steps_total": 1})
    assert trackers.os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == kept


def test_names_that_mlflow_would_refuse_are_changed(tmp_path, mlflow):
    mlflow.away = False
    keys = ("loss/a b-c.d", "clipped %", "who?/x=1", "../up", "/top//b/", "é", "?", "..", "n" * 300)
    trackers.MlflowSink(tmp_path, "a run", {}).write(dict.fromkeys(keys, 1))
    (row,) = mlflow.rows
    assert list(row)[:5] == ["loss/a b-c.d", "clipped percent", "who_/x_1", "up", "top/b"]
    for name in row:  # MLflow's own rule
        assert re.fullmatch(r"[/\w.\- ]{1,250}", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith((".", "/"))


def test_each_experiment_has_a_run_of_its_own_where_wandb_can(tmp_path, monkeypatch):
    made = []
    run = SimpleNamespace(id="mine", define_metric=lambda *_, **__: None, log=lambda row: None, finish=lambda: None)

    def newer(*, reinit: 'bool | Literal["create_new"] | None' = None, **how):  # noqa: F821
        made.append(reinit)
        return run

    def older(*, reinit: "bool | None" = None, **how):
        made.append(reinit)
        return run

    for init in (newer, older):
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
        trackers.WandbSink(tmp_path, "a run", {}).write({"env_steps_total": 1})
    assert made == ["create_new", None]


def test_a_tracker_that_is_unknown_or_not_installed_is_said_before_training(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Did you mean 'mlflow'"):
        train(tmp_path / "a", "mlfow")
    monkeypatch.setitem(trackers.TRACKERS, "wandb", (trackers.WandbSink, "no_such_module", "wandb"))
    with pytest.raises(ConfigError, match="wandb needs the package wandb: pip install wandb"):
        train(tmp_path / "b", "wandb")
