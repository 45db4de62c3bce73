"""Secrets are in no file of a run directory, whatever key they come by; where a run goes on they are given again."""

import json
import sys
from types import SimpleNamespace

import gymnasium as gym
import pytest

import bray
from bray.cli.main import main
from bray.config import parse_assignments
from bray.config.secrets import HIDDEN, Kind, hide, kind_of
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.metrics.trackers import make_trackers
from bray.remote.trainer.worker import describe_run
from bray.rundir import RunDir
from tests.ray_for_tests import opened

LIVE = {"obs": "float32[2]", "actions": 2, "rollout_length": 16, "minibatches": 1, "epochs": 1, "rows": 64, "port": 0}
SMALL = {"use_preset": False, "num_envs": 1, "rollout_length": 8, "minibatches": 1, "export_graph_after_s": None}
SECRET = "s3cr3t"
PLACES = {
    "token": {"token": SECRET},
    "tokens": {"tokens": ("a", f"x{SECRET}")},
    "admin_tokens": {"admin_tokens": (SECRET,)},
}


def found(folder):
    """Files below a folder that hold a secret."""
    return [str(p) for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


SEEN = []


class Server(gym.Wrapper):
    """An environment that logs in."""

    def __init__(self, level=0, api_key="", login=None, url=""):
        super().__init__(gym.make("CartPole-v1"))
        SEEN.append((api_key, login, url))


LOGIN = {"level": 3, "api_key": SECRET, "login": {"password": f"{SECRET}4"}, "url": f"https://me:{SECRET}@games/x"}


@pytest.mark.parametrize("place", [*PLACES, "environment"])
def test_tokens_of_live_games_are_not_written(place, tmp_path, monkeypatch, capsys):
    if place == "environment":
        monkeypatch.setenv("BRAY_TOKEN", SECRET)
    exp = Experiment(run="PPO", live=True, path=tmp_path / "run", **LIVE, **PLACES.get(place, {}))
    exp.save()
    rows = exp.config.rows()
    exp.close()
    assert found(tmp_path) == []
    assert SECRET not in repr(rows)
    assert main(["doctor", str(exp.path)]) in (0, 1, 2)
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    monkeypatch.delenv("BRAY_TOKEN", raising=False)
    again = Experiment.resume(exp.path)
    if place == "admin_tokens":  # without one nothing can be changed: it may start
        assert again.training.source.port
    else:
        with pytest.raises(ConfigError, match=r"--token-file FILE, in the environment \(BRAY_TOKEN\)"):
            again.training.source.open()
    again.close()
    monkeypatch.setenv("BRAY_TOKEN", "another")
    again = Experiment.resume(exp.path)
    again.training.source.open()
    assert again.training.source.server.server.config.tokens == ("another",) or place == "tokens"
    again.close()


def test_what_is_typed_is_not_written(tmp_path, capsys):
    typed = [f'token="{SECRET}\\""', f"env_config={{level: 3, api_key: {SECRET}}}"]
    words = ["train", "--run", "PPO", "--live", "--obs", "float32[2]", "--actions", "2", *typed]
    assert main([*words, "--print-config"]) == 0
    said = capsys.readouterr().out
    assert "token on the command line" in said
    assert SECRET not in said
    exp = Experiment(run="PPO", live=True, sources=[parse_assignments(typed)], path=tmp_path / "run", **LIVE)
    exp.save()
    exp.close()
    assert found(tmp_path) == []
    assert "level: 3" in (exp.path / "config.yaml").read_text()


def test_secrets_of_an_environment_are_not_written_and_given_again(tmp_path, monkeypatch):
    SEEN.clear()
    exp = Experiment(run="PPO", env=Server, env_config=LOGIN, path=tmp_path / "run", **SMALL)
    exp.fit({"env_steps_total": 8}, progress=False)
    exp.close()
    assert found(tmp_path) == []
    assert set(map(str, SEEN)) == {str((LOGIN["api_key"], LOGIN["login"], LOGIN["url"]))}
    config = json.loads((exp.path / "params.json").read_text())["env"]["env_config"]
    assert config == {"level": 3, "api_key": HIDDEN, "login": {"password": HIDDEN}, "url": HIDDEN}
    for come_back in (Experiment.load, Experiment.resume):
        with pytest.raises(ConfigError, match=r"env\.env_config\.api_key=\.\.\.\) or .*BRAY_SECRET_API_KEY"):
            come_back(exp.path)
    Experiment.load(exp.path, plays=False)  # to be served: no environment is made
    monkeypatch.setenv("BRAY_SECRET_API_KEY", "from-outside")
    monkeypatch.setenv("BRAY_SECRET_PASSWORD", "p")
    SEEN.clear()
    again = Experiment.resume(exp.path, env_config={"url": "https://games/y"})
    assert again.training
    again.close()
    assert SEEN[-1] == ("from-outside", {"password": "p"}, "https://games/y")
    assert b"from-outside" not in (exp.path / "config.yaml").read_bytes()


def test_trackers_are_told_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=SimpleNamespace()))
    exp = Experiment(run="PPO", live=True, path=tmp_path / "run", **LIVE, token=SECRET)
    (sink,) = make_trackers(["wandb"], tmp_path, "title", exp.config.rows())
    assert sink.config["live.token"] == HIDDEN
    assert SECRET not in repr(sink.config)


def test_the_directory_of_a_launched_trial_has_no_secrets(tmp_path):
    """launch.json, and what the master keeps."""
    config = {
        "model1": {"kind": "model", "module": "mine"},
        "actor1": {"kind": "actor", "tokens": [SECRET], "admin_tokens": [SECRET], "token_file": "tokens"},
        "token_shop": {"kind": "config", "api_key": SECRET, "max_tokens": 7, "obs": {"tokens": "int64[3]"}},
    }
    exp = Experiment(run="PPO", env="CartPole-v1", **SMALL)
    setup = SimpleNamespace(resolved=exp.config, spec=exp.training.spec, make_policy=lambda: exp.training.policy)
    describe_run(setup, exp.training.model, "model1", config, RunDir.create(tmp_path / "run"))
    exp.close()
    with opened(tmp_path, "local"):
        bray.set("config", config)
        bray.set("mine", {"api_key": "kept"})
        assert bray.get("config") == config
    assert found(tmp_path) == []
    written = json.loads((tmp_path / "run" / "launch.json").read_text())["config"]
    assert written["token_shop"] == {**config["token_shop"], "api_key": HIDDEN}
    assert written["actor1"] == {"kind": "actor", "tokens": [HIDDEN], "admin_tokens": [HIDDEN], "token_file": "tokens"}
    (state,) = tmp_path.rglob("master.state")
    assert b"kept" in state.read_bytes()  # a value of the user's own


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("token", Kind.TEXTS), ("authToken", Kind.TEXTS), ("max_tokens", Kind.TEXTS), ("secret", Kind.TEXTS),
        ("API_KEY", Kind.ALL), ("privateKey", Kind.ALL), ("db_password", Kind.ALL), ("credentials", Kind.ALL),
        ("tokenizer", Kind.NOTHING), ("token_file", Kind.NOTHING), ("key", Kind.NOTHING), ("monkey", Kind.NOTHING),
        ("password_env", Kind.NOTHING), ("", Kind.NOTHING),
    ],
)  # fmt: skip
def test_what_is_called_a_secret(name, kind):
    assert kind_of(name) == kind


def test_only_what_is_secret_is_hidden():
    kept = {
        "max_tokens": 5,
        "tokens": "int64[8]",
        "token": {"type": "embed"},
        "password": "",
        "flag": True,
        "pwd": None,
    }
    assert hide(kept) == kept
    assert hide({"password": 1234, "tokens": ["a", "b"], "x": [{"api_key": b"k"}], "secret": ("a",)}) == {
        "password": HIDDEN,
        "tokens": [HIDDEN, HIDDEN],
        "x": [{"api_key": HIDDEN}],
        "secret": (HIDDEN,),
    }
