"""A run directory from elsewhere is data: what it names is imported only where the user allows it, and `serve` needs
none of it."""

import io
import json
import re
import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from bray.cli.main import main
from bray.config import ConfigSource
from bray.errors import ConfigError
from bray.experiment import Experiment, export_graph
from bray.nn.catalog import register_model
from bray.nn.heads import ActorCritic
from bray.rundir import RunDir, UntrustedRun

PLACES = {
    "env.id": ("  id: CartPole-v1", "  id: {name}"),
    "env.import_modules": ("  import_modules: []", "  import_modules: [{module}]"),
    "env.wrappers": ("  wrappers: []", "  wrappers: [{{name: {name}}}]"),
    "run.algorithm": ("  algorithm: PPO", "  algorithm: {name}"),
    "model.custom_model": ("  custom_model: null", "  custom_model: {name}"),
    "model.custom_preprocessor": ("  custom_preprocessor: null", "  custom_preprocessor: {name}"),
    "a key without its section": ("  import_modules: []\n", ""),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    exp = Experiment(
        run="PPO",
        env="CartPole-v1",
        path=tmp_path_factory.mktemp("made") / "run",
        use_preset=False,
        num_envs=2,
        rollout_length=8,
    )
    exp.save()
    exp.close()
    return exp.path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run", symlinks=True)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported; its name is new for each test, so that nobody has allowed it."""
    name = f"evil_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def names(run, place, module):
    """Let the config of a run name a module at this place."""
    was, becomes = PLACES[place]
    text = re.sub(r" +#.*", "", (run / "config.yaml").read_text())
    assert was in text
    if not becomes:
        text = f"import_modules: [{module}]\n{text}"
    (run / "config.yaml").write_text(text.replace(was, becomes.format(name=f"{module}:Thing", module=module), 1))


@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_a_foreign_run_names_is_imported(place, run, evil, tmp_path, capsys):
    names(run, place, evil)
    for words in (
        ["eval", str(run)],
        ["exploitability", str(run)],
        ["collect", str(run)],
        ["train", "--resume", str(run)],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert evil in said[0]
        assert "--trust" in said[0]
        assert str(run) in said[0]
    assert not (tmp_path / "imported").exists()


def test_the_command_of_the_attack_is_refused(run, capsys):
    """`env.id: 'subprocess:Popen'` ran what env_config named."""
    mark = run.parent / "ran"
    text = re.sub(r" +#.*", "", (run / "config.yaml").read_text()).replace("CartPole-v1", "subprocess:Popen")
    (run / "config.yaml").write_text(text.replace("env_config: {}", f'env_config: {{args: [touch, "{mark}"]}}'))
    assert main(["eval", str(run)]) == 2
    assert "'subprocess:Popen' (env.id)" in capsys.readouterr().err
    assert not mark.exists()


def test_a_module_inside_of_a_run_directory_is_not_found(run, monkeypatch, capsys):
    """`cd RUN_DIR; bray eval .` does not look for modules there, whoever is trusted."""
    (run / "inside_of_it.py").write_text("raise SystemExit('imported')")
    names(run, "env.import_modules", "inside_of_it")
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [*sys.path, str(run)])
    assert main(["eval", ".", "--trust"]) == 2
    said = capsys.readouterr().err
    assert "cannot import 'inside_of_it'" in said
    assert "not in the current folder" in said


def test_a_network_of_a_launched_run_is_not_imported(run, evil, tmp_path):
    (run / "launch.json").write_text(json.dumps({"model": "m", "config": {"m": {"module": evil}}}))
    with pytest.raises(UntrustedRun, match=evil):
        Experiment.load(run)
    assert not (tmp_path / "imported").exists()


def test_a_network_of_ones_own_launch_is_trusted(run, evil):
    RunDir(run).write_launch("m", {"m": {"module": evil, "sizes": (8, 8)}})
    Experiment.load(run)


def test_trust_imports_it_and_is_remembered(run, evil, tmp_path):
    names(run, "env.import_modules", evil)
    with pytest.raises(UntrustedRun):
        Experiment.load(run)
    exp = Experiment.load(run, trust=True)
    assert exp.evaluate(1)["eval/episodes"] == 1
    assert (tmp_path / "imported").exists()
    Experiment.load(shutil.copytree(run, tmp_path / "copy", symlinks=True))  # the same code, with the same arguments
    names(run, "model.custom_model", evil)
    with pytest.raises(UntrustedRun, match="custom_model"):
        Experiment.load(run)


@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_the_caller_makes_nothing_else_trusted(place, run, evil, tmp_path):
    names(run, place, evil)
    for come_back in (Experiment.load, Experiment.resume):
        with pytest.raises(UntrustedRun, match=evil):
            come_back(run, sources=[ConfigSource("python", {"env": {"env_config": {"level": 2}}})])
    assert not (tmp_path / "imported").exists()


def test_an_environment_of_the_caller_takes_the_place_of_a_foreign_one(run, evil, tmp_path):
    names(run, "env.id", evil)
    exp = Experiment.resume(run, env=lambda config: gym.make("CartPole-v1"))
    assert isinstance(exp.foreach_env(lambda env: env.unwrapped)[0], CartPoleEnv)
    exp.close()
    assert not (tmp_path / "imported").exists()


def test_other_arguments_are_asked_for_again(run, evil):
    names(run, "env.id", evil)
    Experiment.load(run, trust=True)
    Experiment.load(run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("env_config: {}", "env_config: {command: rm}"))
    with pytest.raises(UntrustedRun):
        Experiment.load(run)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2), ("", 2)])
def test_at_a_terminal_it_is_asked_once(run, evil, monkeypatch, answer, code, tmp_path):
    names(run, "env.import_modules", evil)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", stderr)
    command = ["eval", str(run), "--episodes", "1"]
    assert main(command) == code
    assert stderr.getvalue().count("[y/N]") == 1
    assert (tmp_path / "imported").exists() == (code == 0)
    if code == 0:
        assert main(command) == 0
        assert stderr.getvalue().count("[y/N]") == 1


def test_what_one_made_oneself_is_trusted(tmp_path, monkeypatch, capsys):
    (tmp_path / "owngame.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Game(CartPoleEnv):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run"
    exp = Experiment(run="PPO", env="owngame:Game", path=path, num_envs=2, rollout_length=8, max_episode_steps=20)
    exp.save()
    exp.close()
    moved = path.rename(tmp_path / "moved")
    assert main(["eval", str(moved), "--episodes", "1"]) == 0
    assert "PPO on owngame:Game" in capsys.readouterr().out
    Experiment.resume(moved).close()


def test_a_policy_alone_needs_no_trust_in_its_environment(run, evil, tmp_path):
    names(run, "env.id", evil)
    with pytest.raises(UntrustedRun):
        Experiment.load(run)
    exp = Experiment.load(run, plays=False)
    assert exp.policy(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(ConfigError, match="plays=False"):
        exp.evaluate(1)
    assert not (tmp_path / "imported").exists()


def test_exporting_a_model_of_ones_own_needs_trust(run, evil, tmp_path, capsys):
    names(run, "model.custom_model", evil)
    with pytest.raises(UntrustedRun, match=rf"'{evil}:Thing' \(model.custom_model\).*--trust"):
        export_graph(run)
    assert main(["export", str(run)]) == 2
    assert evil in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


class OnlyHere(ActorCritic):
    """A model that another process cannot find."""


@pytest.mark.slow
def test_a_graph_that_cannot_be_written_is_said_once(tmp_path, caplog):
    register_model("only here", OnlyHere)
    exp = Experiment(
        run="PPO",
        env="CartPole-v1",
        path=tmp_path / "run",
        use_preset=False,
        num_envs=2,
        rollout_length=16,
        custom_model="only here",
        export_graph_after_s=0.0,
    )
    for _ in exp.train(stop={"training_iteration": 3}):
        pass
    exp.close()
    said = [r.getMessage() for r in caplog.records if "graph.onnx" in r.getMessage()]
    assert len(said) == 1
    assert "only here" in said[0]
    assert "--engine torch --trust" in said[0]
