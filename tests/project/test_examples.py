"""The examples run as they stand."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bray.cli import train
from bray.cli.main import main
from bray.experiment import Experiment
from bray.figures import read_results
from bray.league import read_league

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def from_root(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))


def test_an_algorithm_of_ones_own_learns(from_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["custom_algorithm.py", "--trial", "mine", "--stop", '{"env_steps_total": 20000}'])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "custom_algorithm.py"), run_name="__main__")
    assert end.value.code == 0
    returns = [row["episode_return_mean"] for row in read_results(tmp_path / "runs" / "mine")]
    assert returns[0] < 30
    assert returns[-1] > 60  # a random agent stays at 22
    assert main(["eval", "runs/mine", "--episodes", "2"]) == 0  # and it is an algorithm like any other
    assert "examples.custom_algorithm:Reinforce on CartPole-v1" in capsys.readouterr().out


def test_another_surrogate_of_ppo_learns(from_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop = ["--stop", '{"env_steps_total": 16000}']
    monkeypatch.setattr(sys, "argv", ["own_surrogate.py", "--trial", "mine", *stop, "minibatches=8", "lr=1e-3"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "own_surrogate.py"), run_name="__main__")
    assert end.value.code == 0
    returns = [row["episode_return_mean"] for row in read_results(tmp_path / "runs" / "mine")]
    assert returns[0] < 30
    assert returns[-1] > 60


def test_two_levels_of_a_game_learn(from_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hierarchy.py", "--steps", "60000", "--seed", "3"])
    runpy.run_path(str(EXAMPLES / "hierarchy.py"), run_name="__main__")
    (file,) = (tmp_path / "runs").rglob("result.jsonl")
    rows = read_results(file.parent)
    assert rows[0]["agent/low/return_mean"] < 0.0  # it walks at random
    assert rows[-1]["agent/low/return_mean"] > 1.0
    assert rows[-1]["agent/top/return_mean"] > rows[0]["agent/top/return_mean"] + 0.2
    assert "greedy returns: top" in capsys.readouterr().out


def test_an_algorithm_takes_under_100_lines():
    assert len((EXAMPLES / "custom_algorithm.py").read_text().splitlines()) < 100


def test_its_keys_are_listed_and_it_resumes_exactly(from_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["algos", "examples.custom_algorithm:Reinforce"]) == 0
    assert re.search(r"entropy_coef +0\.01 +a number.* +Weight of the entropy bonus\.", capsys.readouterr().out)
    run = {"run": "examples.custom_algorithm:Reinforce", "env": "CartPole-v1", "rollout_length": 8, "num_envs": 2}
    whole = Experiment(**run, path="a")
    rows = list(whole.train(stop={"training_iteration": 4}))
    half = Experiment(**run, path="b")
    list(half.train(stop={"training_iteration": 2}))
    half.close()
    again = Experiment.resume("b")
    more = list(again.train(stop={"training_iteration": 4}))
    assert [r["loss/policy_loss"] for r in more] == [r["loss/policy_loss"] for r in rows[2:]]


@pytest.mark.draws
def test_the_demo(tmp_path, monkeypatch, capsys):
    """The demo as it stands, but for a goal that is near."""
    monkeypatch.chdir(tmp_path)
    options = []

    def short(o):
        options.append(o)
        return train.train(replace(o, keys=["rollout_length=32"], stop='{"training_iteration": 2}'))

    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["main"].__globals__["train"] = short
    assert demo["main"]() == 0
    assert (options[0].run, options[0].env, options[0].render) == ("PPO", "CartPole-v1", True)
    out = capsys.readouterr().out
    (path,) = (tmp_path / "demo").iterdir()
    for file in ("figures/learning_curve.png", "videos/eval.mp4", "videos/eval.gif", "result.jsonl"):
        assert f"{Path('demo') / path.name / file}" in out
        assert (path / file).stat().st_size > 0
    assert "10 greedy" in out
    assert "bray eval demo/" in out


@pytest.mark.slow
def test_the_demo_reaches_475(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(EXAMPLES / "demo.py"))["main"]() == 0
    (path,) = (tmp_path / "demo").iterdir()
    assert read_results(path)[-1]["episode_return_mean"] >= 475


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "opened"), [([], "100%"), (["--plain", "--steps", "60000"], "0%")])
def test_a_curriculum_opens_the_lock_that_plain_training_does_not(tmp_path, arguments, opened):
    """As users start it: here, where each rollout is an iteration, the curriculum would move faster than is learnt."""
    command = [sys.executable, str(EXAMPLES / "curriculum.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=True)
    assert f"the whole lock is opened in {opened} of the tries" in done.stdout


def test_a_league_on_an_environment_of_ones_own(from_root, tmp_path, monkeypatch):
    """What docs/league.md shows, in under 30 lines, for a tenth of its steps."""
    shown = (EXAMPLES / "league.py").read_text()
    assert len(shown.splitlines()) < 30
    assert shown.partition("import bray\n")[2].strip() in (EXAMPLES.parent / "docs" / "league.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(shown.replace("10_000", "1_000"))
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    (log,) = (tmp_path / "runs").rglob("league/results.jsonl")
    assert {ref.side for ref in read_league(log).refs} == {"main", "hunter", "second"}
