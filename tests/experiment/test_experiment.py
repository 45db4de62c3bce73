"""`bray.Experiment` as a script or a notebook uses it, and the names of the package."""

import base64
import importlib
import threading
import warnings

import numpy as np
import pytest

import bray
from bray.errors import ConfigError, UnknownName
from bray.figures import read_results
from bray.train import local

SMALL = {"use_preset": False, "num_envs": 2, "rollout_length": 16, "export_graph_after_s": None, "save_figure": False}


@pytest.fixture
def exp(tmp_path):
    made = bray.Experiment("A2C", "CartPole-v1", path=tmp_path / "run", **SMALL)
    yield made
    made.close()


def test_training_that_nobody_iterates_warns(exp):
    with pytest.warns(RuntimeWarning, match=r"nothing was trained.*for row in exp.train.*exp.fit"):
        exp.train({"training_iteration": 1})
    assert not exp.path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [row["training_iteration"] for row in exp.train({"training_iteration": 2})] == [1, 2]
        exp.train({"training_iteration": 3}).close()


def test_an_experiment_made_in_another_thread_changes_no_weights(monkeypatch):
    def weights(seed):
        exp = bray.Experiment("A2C", "CartPole-v1", seed=seed, **SMALL)
        drawn = exp.training.weights()
        exp.close()
        return drawn

    alone, make_policy = weights(1), local.make_policy
    other, came = threading.Thread(target=weights, args=(2,)), threading.Event()

    def slow(*parts):
        if threading.current_thread() is other:
            came.set()
        else:
            other.start()
            came.wait(0.3)  # it has to wait for us, and comes later
        return make_policy(*parts)

    monkeypatch.setattr(local, "make_policy", slow)
    together = weights(1)
    other.join()
    assert came.is_set()
    for name, value in alone.items():
        assert np.array_equal(value, together[name])


def test_a_wrong_stop_name_is_told_at_once(exp):
    with pytest.raises(UnknownName, match="episodes_total"):
        exp.train({"episode_total": 3})


def test_fit_trains_to_the_end_with_progress_and_returns_the_last_row(exp, capsys):
    row = exp.fit({"env_steps_total": 160})
    assert row == exp.last_row
    assert row["env_steps_total"] >= 160
    assert f"steps {row['env_steps_total']}" in capsys.readouterr().out
    assert read_results(exp.path)[-1]["training_iteration"] == row["training_iteration"]
    exp.fit({"env_steps_total": 200}, progress=False)
    assert capsys.readouterr().out == ""


def test_fit_without_an_end_is_refused(exp):
    with pytest.raises(ConfigError, match=r'none is given: exp.fit\(\{"env_steps_total": 100_000\}\)'):
        exp.fit()


def test_an_experiment_says_what_it_is(exp, tmp_path):
    assert repr(exp) == "<Experiment A2C on CartPole-v1, seed 0, not trained yet>"
    exp.fit({"training_iteration": 8}, progress=False)
    returned = exp.last_row["episode_return_mean"]
    assert repr(exp).startswith(
        f"<Experiment A2C on CartPole-v1, seed 0, {exp.last_row['env_steps_total']} env steps, return {returned:.1f}"
    )
    assert str(tmp_path / "run") in repr(exp)


@pytest.mark.parametrize(
    ("run", "config", "most"),
    [
        ("DQN", {"num_envs": 1, "learning_starts": 100, "train_every": 50}, 0),
        ("A2C", {"num_envs": 2, "rollout_length": 10}, 20),
    ],
)
def test_the_last_iteration_ends_at_the_goal(run, config, most, tmp_path):
    """Other iterations end at multiples of 1,000; one that learns from rollouts ends with one."""
    config = {**config, "use_preset": False, "iteration_steps": 1_000, "save_figure": False}
    with bray.Experiment(run=run, env="CartPole-v1", path=tmp_path / "run", **config) as exp:
        steps = [row["env_steps_total"] for row in exp.train({"env_steps_total": 1_300})]
    assert len(steps) == 2
    assert 1_300 <= steps[-1] <= 1_300 + most


@pytest.mark.draws
def test_plot_draws_the_curve_and_notebooks_show_it(exp, tmp_path):
    with pytest.raises(ConfigError, match="train first"):
        exp.plot()
    last = exp.fit({"training_iteration": 8}, progress=False)
    assert last == exp.last_row
    assert repr(last).startswith(f"<A2C on CartPole-v1: {last['env_steps_total']} env steps, episode_return_mean ")
    assert len(repr(last)) < 150
    assert last._repr_png_() is None  # this run saves no figure
    picture = exp.plot()
    assert last._repr_png_()[:4] == b"\x89PNG"
    assert picture.path == tmp_path / "run" / "figures" / "learning_curve.png"
    assert picture._repr_png_()[:4] == b"\x89PNG"  # what IPython asks for
    loaded = bray.Experiment.load(tmp_path / "run")
    assert loaded.plot(tmp_path / "other.svg").path.read_text().startswith("<?xml")


@pytest.mark.draws
def test_without_a_finished_episode_there_is_no_curve_and_nothing_is_wrong(tmp_path, caplog):
    config = SMALL | {"rollout_length": 2, "iteration_steps": 4, "save_figure": True}
    with bray.Experiment("A2C", "CartPole-v1", path=tmp_path / "run", **config) as exp:
        row = exp.fit({"training_iteration": 1}, progress=False)
    assert row["episodes_total"] == 0
    assert "no learning curve: " in exp.run.directory.log.read_text()
    assert "could not be drawn" not in caplog.text


def test_a_film_is_shown_in_notebooks(exp, tmp_path):
    with pytest.raises(ConfigError, match="train first"):
        exp.film()
    exp.fit({"training_iteration": 1}, progress=False)
    shown = exp.film()
    assert shown.path == tmp_path / "run" / "videos" / "film.mp4"
    assert shown._repr_html_().startswith('<video controls loop src="data:video/mp4;base64,')
    assert shown._repr_png_() is None
    again = bray.Experiment.load(tmp_path / "run").film(tmp_path / "other.gif")
    picture = again.path.read_bytes()
    assert picture.startswith(b"GIF8")
    assert base64.b64encode(picture).decode() in again._repr_html_()


def test_dir_lists_the_public_names_and_nothing_else():
    importlib.import_module("bray.cli.main")  # a module that is imported becomes an attribute of the package
    assert hasattr(bray, "cli")
    assert dir(bray) == sorted(bray.__all__)
    assert {"Experiment", "RemoteModel", "register_env", "fake", "__version__"} <= set(dir(bray))
    assert not {"cli", "ast", "Any", "TYPE_CHECKING", "annotations"} & set(dir(bray))
    with pytest.raises(AttributeError, match="Known: Actor, "):
        bray.no_such_name  # noqa: B018
