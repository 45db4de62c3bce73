"""`bray runs` and `bray plot`: what is below a directory as a table, and its curves on one picture."""

import json

import pytest
from imageio.v2 import imread

from bray import figures
from bray.cli.main import main
from bray.cli.plot import group


def make_run(path, algorithm="PPO", env="CartPole-v1", seed=0, slope=1.0, config="", best=None):
    path.mkdir(parents=True)
    rows = [
        {"training_iteration": i, "env_steps_total": 1000 * i, "episode_return_mean": slope * i} for i in range(1, 6)
    ]
    (path / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text(
        f"run: {{algorithm: {algorithm}, seed: {seed}}}\nenv: {{id: {env}}}\nalgo: {{{config}}}\n"
    )
    if best is not None:
        folder = path / "checkpoints" / "3"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({"meta": {"episode_return_mean": best}}))
        (path / "checkpoints" / "best").symlink_to("3")
    return path


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        make_run(tmp_path / "runs/a" / f"seed-{seed}", seed=seed, slope=1.0 + seed, config="lr: 0.001", best=4.5)
        make_run(tmp_path / "runs/b" / f"seed-{seed}", seed=seed, slope=3.0 + seed, config="lr: 0.01")
    make_run(tmp_path / "runs/dqn", "DQN", seed=7, slope=9.0)
    return tmp_path


def test_a_table_of_runs(project, capsys):
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head.split() == ["run", "algorithm", "env", "seed", "steps", "best", "when"]
    rows = {line.split()[0]: line.split()[1:6] for line in lines if line.startswith("runs/")}
    assert rows["runs/dqn"] == ["DQN", "CartPole-v1", "7", "5,000", "–"]
    assert rows["runs/a/seed-1"] == ["PPO", "CartPole-v1", "1", "5,000", "4.500"]
    assert len(rows) == 5
    assert "5 runs" in out


def test_a_run_that_cannot_be_read_hides_no_other(project, capsys):
    (project / "runs/dqn/config.yaml").write_text("run: [")
    (project / "runs/a/seed-0/checkpoints/best").unlink()
    (project / "runs/a/seed-0/checkpoints/best").symlink_to("../../../..")
    assert main(["runs", "runs"]) == 0
    out = capsys.readouterr().out
    assert out.count("cannot be read") == 2
    assert "runs/b/seed-1" in out


def test_no_runs_is_one_message(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "there is no run in it" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert main(["plot", str(tmp_path)]) == 2
    assert "expected a run directory" in capsys.readouterr().err


def test_runs_that_differ_in_their_seed_are_one_curve(project):
    title, groups = group([*sorted((project / "runs").glob("*/seed-*")), project / "runs/dqn"])
    assert title == "DQN and PPO on CartPole-v1"
    assert {label: len(runs) for label, runs in groups.items()} == {"PPO lr=0.001": 2, "PPO lr=0.01": 2, "DQN": 1}
    title, groups = group([project / "runs/a/seed-0", project / "runs/a/seed-1"])
    assert (title, list(groups)) == ("PPO on CartPole-v1", ["PPO"])


@pytest.mark.draws
def test_curves_of_runs_algorithms_and_seeds_are_one_picture(project, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        figures, "mean_and_std", lambda curves, f=figures.mean_and_std: drawn.append(len(curves)) or f(curves)
    )
    assert main(["plot", "runs", "--out", "all.png", "--threshold", "8"]) == 0
    assert imread(project / "all.png").shape[2] in (3, 4)
    assert sorted(drawn) == [1, 2, 2]  # a mean and a band for each setting
    said = capsys.readouterr().out
    assert "PPO lr=0.01" in said
    assert said.splitlines()[-1] == "all.png"
    assert main(["plot", "runs/dqn", "--quiet"]) == 0
    assert capsys.readouterr().out == "runs/dqn/figures/learning_curve.png\n"
    assert main(["plot", "runs", "--out", "curves.txt"]) == 2
    assert "expected a picture file" in capsys.readouterr().err
