"""Rows in Weights & Biases (offline) and MLflow; the packages are not among ours, so their tests run where they are installed."""

import pytest

import bray
from bray.errors import ConfigError
from bray.metrics import trackers


def train(tmp_path, *names, stop=2):
    exp = bray.Experiment(run="PPO", env="CartPole-v1", path=tmp_path / "run", track=list(names), rollout_length=16)
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


def test_a_tracker_that_is_unknown_or_not_installed_is_said_before_training(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Did you mean 'mlflow'"):
        train(tmp_path / "a", "mlfow")
    monkeypatch.setitem(trackers.TRACKERS, "wandb", (trackers.WandbSink, "no_such_module", "wandb"))
    with pytest.raises(ConfigError, match="wandb needs the package wandb: pip install wandb"):
        train(tmp_path / "b", "wandb")
