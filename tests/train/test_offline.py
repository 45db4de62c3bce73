"""Learning from trajectory files: `bray train --run DQN --data DIR`, with no environment."""

import contextlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import bray
from bray.cli.main import main
from bray.data.experience import EndOfData, Replay
from bray.data.files import EpisodeWriter
from bray.diagnosis.symptoms import Symptoms
from bray.errors import ConfigError, DataError
from bray.experiment import Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.driver import Driver
from bray.train.offline import FileTraining
from bray.train.source import FileSource
from tests import forked
from tests.ways_for_tests import Signs

ENV = "tests.ways_for_tests:Signs"
SETTINGS = ["lr=3e-3", "gamma=0.5", "batch_size=32", "fcnet_hiddens=[32]"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What random play wrote, with the spaces beside it, as `bray collect` does."""
    folder = tmp_path_factory.mktemp("data")
    run = folder / "run"
    exp = Experiment(run="DQN", env=ENV, path=run, learning_starts=10_000, epsilon=1.0, fcnet_hiddens=[8])
    list(exp.train(stop={"env_steps_total": 1000}))
    exp.close()
    out = folder / "files"
    assert main(["collect", str(run), "--steps", "2400", "--act", "sample", "--out", str(out)]) == 0
    assert (out / "spec.json").exists()
    return out


def good_choices(exp):
    return [int(exp.policy(np.eye(4, dtype=np.float32)[i])) for i in range(4)]


def test_a_policy_is_learnt_without_an_environment_and_resumed_exactly(files, tmp_path, capsys):
    words = ["train", "--run", "DQN", "--data", str(files / "*.episodes"), "--project", str(tmp_path), *SETTINGS]
    assert main([*words, "--trial", "whole", "data.epochs=12"]) == 0
    assert "no environment" not in capsys.readouterr().err
    rows = read_results(tmp_path / "whole")
    assert rows[-1]["env_steps_total"] == 2400  # each counted once
    assert rows[-1]["learner_steps_total"] == 12 * 2400 // 32
    whole = Experiment.load(tmp_path / "whole")
    assert good_choices(whole) == list(Signs.right)
    with pytest.raises(ConfigError, match="learnt from files"):
        whole.check_env()

    half = [*words, "--trial", "half", "data.epochs=12", "--stop", '{"learner_steps_total": 400}']
    assert main(half) == 0
    assert main(["train", "--resume", str(tmp_path / "half"), "--stop", '{"learner_steps_total": 100000}']) == 0
    resumed = read_results(tmp_path / "half")
    assert [r["learner_steps_total"] for r in resumed][-1] == rows[-1]["learner_steps_total"]
    assert resumed[-1]["env_steps_total"] == 2400
    exp = Experiment.load(tmp_path / "half")
    for name, value in whole.training.weights().items():
        np.testing.assert_array_equal(exp.training.weights()[name], value)


def test_a_goal_that_was_not_reached_is_told_with_why_it_ended(files, tmp_path, capsys):
    words = ["train", "--run", "DQN", "--data", str(files), "--project", str(tmp_path), "fcnet_hiddens=[8]"]
    for epochs, steps, said in (
        (2, 1000, "all 2 epochs of the files are learnt from (data.epochs): ended after 75 gradient steps"),
        (2, 20, "reached learner_steps_total"),
    ):
        assert main([*words, f"data.epochs={epochs}", "--stop", f'{{"learner_steps_total": {steps}}}']) == 0
        out = capsys.readouterr().out
        assert said in out
        assert ("the goal was not reached" in out) == (steps == 1000)


def test_files_that_are_yet_to_be_read_are_no_game_without_an_end(files):
    source = FileSource(files, reads_itself=True)
    _, counts = source.gather()
    assert counts.env_steps == int(source.steps.sum())
    row = {"env_steps_total": 40_000, "episodes_total": 0, "training_iteration": 1, **source.numbers()}
    assert row["data/episodes"] == 0
    assert Symptoms({}).look(row) == []


def test_in_python(files, tmp_path, caplog):
    exp = bray.Experiment(run="DQN", data=files, env=ENV, path=tmp_path / "run", epochs=1, fcnet_hiddens=[8])
    row = list(exp.train())[-1]
    assert isinstance(exp.training, FileTraining)
    assert row["data/episodes"] == 300
    assert row["episodes_total"] == 0
    assert row["episode_return_mean"] is None  # it has played none
    assert exp.has_env  # for its spaces, and to play in afterwards
    assert "nothing says how well this plays: --eval-freq N evaluates it" in caplog.text
    exp.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"run": "PPO"}, "PPO learns from what its newest policy did"),
        ({"run": "PPO", "env": "CartPole-v1"}, "PPO learns from what its newest policy did"),
        ({"run": "PG"}, "PG learns from what its newest policy did"),
        ({"run": "ES"}, "ES learns from what its newest policy did"),
        ({"data": "nowhere/*.episodes"}, "found none"),
        ({"live": True}, "which share of a batch is of files"),
        ({"eval_freq": 1}, "there is no environment to evaluate in: name one with --env"),
        ({"stop": {"episode_return_mean": 475}}, "plays no episodes .* say eval/return_mean, with --env"),
    ],
)
def test_what_cannot_work_is_refused(files, tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        _ = Experiment(**{"run": "DQN", "data": files, "path": tmp_path / "x", **more}).training


def test_files_of_another_game_are_refused_before_anything_is_written(files, tmp_path, capsys):
    words = ["train", "--run", "DQN", "--data", str(files), "--env", "CartPole-v1", "--project", str(tmp_path / "p")]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "episode 0: step 4: action 2 is outside of discrete 2" in said.err
    assert "is saved" not in said.err
    assert not (tmp_path / "p").exists()


def test_ctrl_c_before_the_epochs_are_over_is_an_exit_code(files, tmp_path):
    words = ["train", "--run", "BC", "--data", str(files), "--project", str(tmp_path), "data.epochs=1000000"]
    command = [sys.executable, "-m", "bray", *words, "fcnet_hiddens=[8]"]
    with forked.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        forked.interrupted(process)


@pytest.mark.parametrize("run", ["DQN", "BC"])
def test_a_run_whose_files_have_changed_is_not_resumed(run, files, tmp_path, capsys):
    here = shutil.copytree(files, tmp_path / "files")
    words = ["train", "--run", run, "--data", str(here), "--project", str(tmp_path), "--trial", "a"]
    more = ["fcnet_hiddens=[8]", "data.epochs=50", "--stop", '{"learner_steps_total": 100}']
    assert main([*words, *more]) == 0
    went_on = ["train", "--resume", str(tmp_path / "a"), "--stop", '{"learner_steps_total": 200}']
    shutil.copy(next(here.glob("*.episodes")), here / "more-00000.episodes")
    capsys.readouterr()
    assert main(went_on) == 2
    assert "the files that are learnt from have changed: they had 300 episodes" in capsys.readouterr().err
    (here / "more-00000.episodes").unlink()
    assert main(went_on) == 0


def test_files_are_judged_by_evaluation_alone(files, tmp_path, caplog):
    config = {"epochs": 2, "fcnet_hiddens": [8], "eval_freq": 1, "eval_episodes": 2}
    with Experiment(run="DQN", data=files, env=ENV, path=tmp_path / "run", **config) as exp:
        rows = list(exp.train())
    judged = [row["eval/return_mean"] for row in rows if "eval/return_mean" in row]
    assert judged
    assert rows[-1]["data/return_mean"] not in judged
    assert RunDir.open(tmp_path / "run").load_checkpoint("best").meta["eval/return_mean"] == max(judged)
    assert "nothing says how well this plays" not in caplog.text


def test_an_environment_to_play_in_brings_no_preset(files, tmp_path):
    """That of DQN for CartPole has a goal and a length for playing."""
    exp = Experiment(run="DQN", data=files, env="CartPole-v1", path=tmp_path / "x")
    assert exp.config["run"].eval_freq == 0
    assert not exp.config["run"].stop


def test_files_without_their_spaces_need_an_environment(tmp_path):
    with EpisodeWriter(tmp_path / "a" / "b" / "episodes", 10) as writer:
        writer.write(episode())
    with pytest.raises(ConfigError, match=r"does not say what observations and actions are .* --obs 'float32\[4\]'"):
        _ = Experiment(run="DQN", data=tmp_path / "a" / "b").training
    _ = Experiment(run="DQN", data=tmp_path / "a" / "b", env=ENV).training


def episode(n=8):
    return {
        "obs": np.zeros((n + 1, 4), np.float32),
        "action": np.zeros(n, np.int64),
        "reward": np.ones(n, np.float32),
        "terminated": np.arange(n) == n - 1,
        "truncated": np.zeros(n, bool),
    }


def test_a_replay_that_is_resumed_has_the_rows_of_the_files_once(files, tmp_path):
    def fresh():
        side = Experiment(run="DQN", env=ENV, replay_size=10_000, learning_starts=100_000).training.side
        assert isinstance(side.experience, Replay)
        return Driver([side], [FileSource(files, side.policy.layout)])

    def read_all(driver):
        with contextlib.suppress(EndOfData):
            while True:
                driver.gather()
        return driver.experience.numbers()["size"]

    original = fresh()
    for _ in range(100):
        original.gather()
    state, weights = original.get_state(tmp_path), original.weights()
    whole = read_all(original)
    state["json"] = json.loads(json.dumps(state["json"]))
    resumed = fresh()
    resumed.set_state(state, weights, tmp_path)
    assert read_all(resumed) == whole
    assert resumed.env_steps == original.env_steps == 2400


def columns_of(folder):
    """The files as one npz, which does not say its spaces."""
    data = bray.EpisodeReader(folder).transitions()
    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    np.savez(folder.parent / "foreign.npz", **{name: data[name] for name in names})
    return folder.parent / "foreign.npz"


def test_a_foreign_file_trains_as_ours_does_with_spaces_from_the_command_line(files, tmp_path, capsys):
    foreign = columns_of(files)
    words = ["train", "--run", "DQN", "--project", str(tmp_path), *SETTINGS, "data.epochs=1"]
    assert main([*words, "--trial", "ours", "--data", str(files)]) == 0
    assert main([*words, "--trial", "a", "--data", str(foreign)]) == 2
    said = capsys.readouterr().err
    assert "does not say what observations and actions are" in said
    assert "--obs 'float32[4]' --actions '3'" in said
    assert main([*words, "--trial", "b", "--data", str(foreign), "--obs", "float32[4]", "--actions", "3"]) == 0
    ours, theirs = (Experiment.load(tmp_path / name).training.weights() for name in ("ours", "b"))
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)


def test_transitions_that_do_not_fit_into_memory_are_learnt_from_in_parts(files, tmp_path):
    exp = Experiment(run="DQN", data=files, path=tmp_path / "a", epochs=2, fcnet_hiddens=[8], batch_size=100)
    exp.training.experience.read_from(exp.training.sources[0], 20_000)  # of 2,400 transitions
    row = list(exp.train())[-1]
    assert row["learner_steps_total"] == 2 * 2400 // 100
    assert row["data/episodes"] == 300


def test_broken_episodes_end_a_run_or_are_left_out(files, tmp_path):
    bad = [{**episode(), "reward": np.full(8, np.nan, np.float32)}, episode()]
    with EpisodeWriter(tmp_path / "bad" / "episodes", 10) as writer:
        for one in bad:
            writer.write(one)
    config = {"run": "DQN", "data": tmp_path / "bad", "env": ENV, "epochs": 3, "batch_size": 4, "fcnet_hiddens": [8]}
    with pytest.raises(DataError, match=r"episode 0: step 0: reward is nan\. --skip-broken"):
        list(Experiment(**config, path=tmp_path / "a").train())
    row = list(Experiment(**config, skip_broken=True, path=tmp_path / "b").train())[-1]
    assert (row["data/broken"], row["data/episodes"], row["learner_steps_total"]) == (1, 1, 6)


# --- files and play ---------------------------------------------------------------------------------------------------

MIXED = {"env": ENV, "fcnet_hiddens": [8], "batch_size": 16, "learning_starts": 50, "num_workers": 0, "seed": 3}


@pytest.mark.parametrize("more", [{}, {"prioritized": True}])
@pytest.mark.parametrize("share", [0.0, 0.6, 0.33, 0.9])
def test_batches_have_the_share_of_files_that_was_asked_for(share, more, files, tmp_path):
    exp = Experiment(run="DQN", data=files, share=share, path=tmp_path / "x", replay_size=500, **MIXED, **more)
    drawn, learn = [], exp.training.learner.update

    def update(batch, clock):
        drawn.append(batch["demo"].copy())
        assert batch["obs"].shape == (16, 4)
        assert set(batch["id"][batch["demo"] == 1].tolist()) <= {-1}
        return learn(batch, clock)

    exp.training.learner.update = update
    rows = list(exp.train(stop={"env_steps_total": 1000}))
    exp.close()
    assert len(drawn) > 100
    assert np.mean(drawn) == pytest.approx(share, abs=0.02)
    assert all(abs(float(x.mean()) - share) <= 1 / 16 for x in drawn)
    assert rows[-1]["episodes_total"] > 0  # it has played, too


@pytest.mark.parametrize("more", [{}, {"prioritized": True}])
def test_batches_of_the_files_alone_come_first(more, files, tmp_path):
    """40 of them, drawn without replacement; the steps of the environment are learnt from as without them."""
    given = {"run": "DQN", "data": files, "share": 0.5, "replay_size": 500, **MIXED, **more}
    drawn = {}
    for pretrain in (0, 40):
        with Experiment(**given, path=tmp_path / str(pretrain), pretrain=pretrain) as exp:
            seen, learn = drawn.setdefault(pretrain, []), exp.training.learner.update
            exp.training.learner.update = lambda b, clock, s=seen, f=learn: s.append((b["demo"], clock)) or f(b, clock)
            list(exp.train(stop={"env_steps_total": 1000}))
    first, rest = drawn[40][:40], drawn[40][40:]
    assert all(demo.all() for demo, _ in first)
    assert max(clock.env_steps for _, clock in first) <= 8
    assert [demo.mean() for demo, _ in rest] == [demo.mean() for demo, _ in drawn[0]]


def test_a_mixture_goes_on_exactly(files, tmp_path):
    words = ["train", "--run", "DQN", "--env", ENV, "--data", str(files), "--data-share", "0.6", "num_workers=0"]
    words += ["--project", str(tmp_path), *SETTINGS, "learning_starts=50", "replay_size=500", "pretrain=20"]
    assert main([*words, "--trial", "whole", "--steps", "2000"]) == 0
    assert main([*words, "--trial", "half", "--steps", "1000"]) == 0
    assert main(["train", "--resume", str(tmp_path / "half"), "--stop", '{"env_steps_total": 2000}']) == 0
    whole, half = (Experiment.load(tmp_path / name) for name in ("whole", "half"))
    for name, value in whole.training.weights().items():
        np.testing.assert_array_equal(half.training.weights()[name], value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"env": None}, "name what is played"),
        ({"run": "PPO"}, r"use DQN, SAC, GAIL or the like \(not PPO\)"),
        ({"run": "PPO", "env": "CartPole-v1"}, r"use DQN, SAC, GAIL or the like \(not PPO\)"),
        ({"normalize_rewards": True}, "without env.normalize_rewards"),
        ({"run": "R2D2", "use_lstm": True}, "this algorithm draws Sequences"),
        ({"run": "GAIL", "pretrain": 9}, "GAIL learns from rollouts beside the files.*start with a cloned policy"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(more, message, files, tmp_path):
    with pytest.raises(ConfigError, match=message):
        _ = Experiment(
            **{"run": "DQN", "data": files, "share": 0.5, "env": ENV, "path": tmp_path / "x", **more}
        ).training


@pytest.mark.parametrize("run", ["DQN", "PPO"])  # a preset of PPO says `epochs`, as data does
@pytest.mark.parametrize("played", [["--env", "CartPole-v1"], ["--live", "--obs", "float32[4]", "--actions", "2"]])
def test_a_share_of_no_files_is_refused(run, played, tmp_path, capsys):
    assert main(["train", "--run", run, *played, "--data-share", "0.5", "--project", str(tmp_path)]) == 2
    assert "error: --data-share needs --data FILES" in capsys.readouterr().err


def test_a_mixture_has_the_preset_of_its_environment(files, tmp_path):
    given = {"run": "DQN", "env": "CartPole-v1", "data": files, "path": tmp_path / "x"}
    plain, mixed = (Experiment(**given, **more).config for more in ({}, {"share": 0.5}))
    assert not plain["run"].stop
    assert mixed["run"].stop
