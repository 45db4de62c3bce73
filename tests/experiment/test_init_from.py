"""A run that starts with weights of another one: all of them, a part, or what fits; and what is said about the rest."""

import logging

import numpy as np
import pytest
import torch

from bray.cli.main import main
from bray.data.files import write_episodes
from bray.errors import CheckpointError, ConfigError, UnknownName
from bray.experiment import Experiment
from bray.rundir import RunDir

TINY = {"num_envs": 2, "rollout_length": 8, "minibatches": 1, "epochs": 1, "fcnet_hiddens": [8], "save_figure": False}


def experiment(path, run="PPO", env="CartPole-v1", **keys):
    tiny = TINY if run == "PPO" else {"fcnet_hiddens": [8], "learning_starts": 8, "batch_size": 4, "save_figure": False}
    return Experiment(run, env, use_preset=False, path=path, **{**tiny, **keys})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of two iterations on CartPole (4 numbers, 2 actions)."""
    path = tmp_path_factory.mktemp("runs") / "a"
    exp = experiment(path, seed=1)
    exp.fit({"training_iteration": 2}, progress=False)
    exp.close()
    return path


def weights_of(path):
    return RunDir.open(path).load_checkpoint().weights


def begun(exp):
    """The weights that an experiment starts with."""
    try:
        return exp.training.weights()
    finally:
        exp.close()


def same(weights, other, prefix):
    names = [name for name in other if name.startswith(prefix)]
    return bool(names) and all(np.array_equal(weights[name], other[name]) for name in names)


def test_a_part_of_another_run_with_a_larger_head(source, tmp_path, caplog):
    """Acrobot has 6 numbers and 3 actions: nothing of CartPole's fits but what does not see those. Here: the same game,
    another head."""
    exp = experiment(tmp_path / "b", "DQN", init_from=str(source), init_map={"core": "core.encoders.0"})
    with caplog.at_level(logging.WARNING, "bray"):
        weights = begun(exp)
    old = weights_of(source)
    assert np.array_equal(weights["core.trunk.layers.0.weight"], old["core.encoders.0.trunk.layers.0.weight"])
    assert "loaded 2 of the model's 4 tensors (core.*)" in caplog.text
    assert "left as they start, not asked for: head.*" in caplog.text


def test_what_fits_is_taken_and_the_rest_is_named_with_its_shapes(source, tmp_path, caplog):
    """A deeper network: the first layer fits, the heads and the new layer do not."""
    exp = experiment(tmp_path / "b", fcnet_hiddens=[8, 5], init_from=str(source), init_partial=True)
    with caplog.at_level(logging.WARNING, "bray"):
        weights = begun(exp)
    old = weights_of(source)
    assert same(weights, old, "core.encoders.0.trunk.layers.0")
    said = caplog.text
    assert "policy.weight (expected float32[2, 5], got float32[2, 8])" in said
    assert "not in that run: core.encoders.0.trunk.layers.1.weight" in said


def test_trained_encoders_go_on_with_a_larger_head(source, tmp_path):
    """With a learning rate of almost nothing they stay equal through two iterations; the heads are others."""
    exp = experiment(tmp_path / "b", lr=1e-12, layers=None, seed=5)
    report = exp.init_from(source, names={"core": "core"})
    assert sorted(report.weights) == sorted(name for name in weights_of(source) if name.startswith("core."))
    exp.fit({"training_iteration": 2}, progress=False)
    exp.close()
    new, old = weights_of(tmp_path / "b"), weights_of(source)
    for name in report.weights:
        np.testing.assert_allclose(new[name], old[name], atol=1e-7)
    assert not np.allclose(new["policy.weight"], old["policy.weight"])


def test_it_is_strict_unless_told_otherwise(source, tmp_path):
    exp = experiment(tmp_path / "b", fcnet_hiddens=[9])
    with pytest.raises(CheckpointError, match=r"none was loaded.*policy\.weight \(expected float32\[2, 9\], got"):
        exp.init_from(source)
    with pytest.raises(CheckpointError, match=r"the weights do not fit the model.*\[9, 4\], got float32\[8, 4\]"):
        exp.init_from(source, names={"core": "core"})
    before = exp.training.weights()
    report = exp.init_from(source, partial=True)
    assert list(report.weights) == ["policy.bias", "value.bias"]
    assert same(exp.training.weights(), before, "core")
    exp.close()
    narrow = experiment(tmp_path / "c", "DQN", env="Acrobot-v1", fcnet_hiddens=[7])
    with pytest.raises(CheckpointError, match="none was loaded: 0 tensors fit") as error:
        narrow.init_from(source, partial=True)
    assert "--init-partial" not in str(error.value), "it was said already"
    narrow.close()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"cor": "core"}, "unknown weights of this model 'cor'.*Did you mean 'core'"),
        ({"core": "encoder"}, "unknown weights of .* 'encoder'"),
    ],
)
def test_names_that_are_not_there(source, tmp_path, names, message):
    exp = experiment(tmp_path / "b")
    with pytest.raises(UnknownName, match=message):
        exp.init_from(source, names=names)
    exp.close()


def test_a_target_network_starts_with_the_same_weights(tmp_path):
    a = experiment(tmp_path / "a", "DQN", seed=1)
    a.save()
    a.close()
    b = experiment(tmp_path / "b", "DQN", seed=2, init_from=str(tmp_path / "a"))
    x = torch.randn(3, 4)
    want = b.training.model(x)["q"]
    torch.testing.assert_close(b.training.learner.target(x)["q"], want)
    b.close()


def test_a_checkpoint_is_named_by_its_directory(source, tmp_path):
    step = RunDir.open(source).steps()[0]
    weights = begun(experiment(tmp_path / "b", init_from=str(source / "checkpoints" / str(step))))
    assert same(weights, RunDir.open(source).load_checkpoint(step).weights, "")
    latest = begun(experiment(tmp_path / "c", init_from=str(source / "checkpoints" / "latest")))
    assert same(latest, weights_of(source), "")


def test_the_command_line_and_resuming(source, tmp_path, capsys):
    argv = ["train", "--run", "PPO", "--env", "CartPole-v1", "--no-preset", "--project", str(tmp_path), "--trial", "b"]
    argv += [f"{k}={v}" for k, v in TINY.items()] + ["layer_norm=true", "--steps", "16"]
    assert main([*argv, "--init-from", str(source)]) == 2
    err = capsys.readouterr().err
    assert "missing: core.encoders.0.trunk.norms.0.weight" in err
    assert "--init-partial" in err
    heads = ["--init-map", "policy=policy", "--init-map", "value=value"]
    assert main([*argv, "--init-from", str(source), *heads, "lr=1e-12"]) == 0
    captured = capsys.readouterr()
    assert f"weights    of {source}" in captured.out
    assert "loaded 4 of the model's" in captured.err
    np.testing.assert_allclose(
        weights_of(tmp_path / "b")["policy.weight"], weights_of(source)["policy.weight"], atol=1e-7
    )
    source_moved = source.rename(tmp_path / "moved")  # what it began with is not asked again
    try:
        resumed = Experiment.resume(tmp_path / "b")
        resumed.close()
    finally:
        source_moved.rename(source)
    assert main(["train", "--resume", str(tmp_path / "b"), "--init-from", str(source)]) == 2
    assert "leave out --init-from" in capsys.readouterr().err
    assert main([*argv, "--init-from", str(source), "--init-map", "policy"]) == 2
    assert "expected NEW=OLD" in capsys.readouterr().err


def test_a_run_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such run directory"):
        begun(experiment(tmp_path / "b", init_from=str(tmp_path / "none")))
    with pytest.raises(ConfigError):
        experiment(tmp_path / "c", init_map=3)


def test_ppo_goes_on_from_cloned_demonstrations_and_keeps_to_them_for_a_while(tmp_path, caplog):
    """BC trains no value, which is said once. The policy of the start stays what a fading magnet is measured from, also
    in a run that was resumed."""
    rng, end = np.random.default_rng(0), np.arange(40) == 39
    obs = rng.standard_normal((41, 4)).astype(np.float32)
    episode = {"obs": obs, "action": np.zeros(40, np.int64), "reward": np.ones(40, np.float32)}
    write_episodes(tmp_path / "files" / "episodes", [{**episode, "terminated": end, "truncated": end & False}])
    given = {"obs": "float32[4]", "actions": "2", "fcnet_hiddens": [8], "epochs": 20, "save_figure": False}
    with Experiment("BC", data=tmp_path / "files", path=tmp_path / "bc", config=given) as exp:
        exp.fit({"learner_steps_total": 20}, progress=False)
    fading = {"kind": "linear", "start": 1.0, "end": 0.0, "steps": 4000}
    keys = {**TINY, "init_from": str(tmp_path / "bc"), "magnet": "start", "magnet_coef": fading}
    with caplog.at_level(logging.INFO, "bray"), experiment(tmp_path / "ppo", **keys) as exp:
        rows = [dict(row) for row in exp.train(stop={"training_iteration": 1})]
    assert caplog.text.count("BC does not train the value, which starts fresh") == 1
    with Experiment.resume(tmp_path / "ppo") as exp:
        rows += [dict(row) for row in exp.train(stop={"training_iteration": 2})]
        kept = exp.training.learner.state_dict()["parts"]["magnet"]
    said = [(row["loss/magnet_coef"], row["env_steps_total"]) for row in rows]
    assert said == [(pytest.approx(1.0 - steps / 4000, abs=0.01), steps) for _, steps in said]
    assert rows[1]["loss/magnet_kl"] > 0.0
    assert all(np.array_equal(kept[name], x) for name, x in weights_of(tmp_path / "bc").items())
