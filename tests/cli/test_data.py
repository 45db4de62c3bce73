"""`bray data` and `bray collect`: what files hold, and files made from others."""

import dataclasses

import numpy as np
import pytest

import bray
from bray.cli.main import main
from bray.data import open_data, write_episodes
from bray.data.summary import parse_filter, summarise
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.spec import EnvSpec, Space
from tests.data.test_sources import EPISODES, SPEC, episode, joined, write

ENV = "tests.ways_for_tests:Signs"


def boxed(actions):
    n = len(actions)
    return {
        "obs": np.zeros((n + 1, 2), np.float32),
        "action": np.asarray(actions, np.float32).reshape(n, 1),
        "reward": np.ones(n, np.float32),
        "terminated": np.arange(n) == n - 1,
        "truncated": np.zeros(n, bool),
    }


def test_a_summary_counts_what_is_there(tmp_path):
    broken = {**EPISODES[0], "reward": np.full(4, np.nan)}
    stops = {**EPISODES[3], "terminated": np.zeros(6, bool)}
    write("ours", tmp_path / "a", [*EPISODES, EPISODES[1], broken, stops])
    found = summarise(open_data(tmp_path / "a"))
    assert found.lengths == [4, 3, 1, 6, 3, 6]
    assert found.returns == [sum(e["reward"]) for e in (*EPISODES, EPISODES[1], stops)]
    assert (found.terminated, found.truncated, found.cut) == (3, 2, 1)
    assert found.duplicates == 2  # obs, actions and rewards of the one that stops are those of another
    assert list(found.broken) == [5]
    (action,) = found.actions
    every = np.concatenate([e["action"] for e in (*EPISODES, EPISODES[1], stops)])
    assert action.counts.tolist() == np.bincount(every, minlength=4).tolist()


def test_coverage_of_a_range_and_of_its_ends(tmp_path):
    spec = EnvSpec("e", Space("box", (2,)), Space("box", (1,), "float32", -2.0, 2.0))
    write("ours", tmp_path / "a", [boxed([-2, 2, 2, 0.0]), boxed([0.05, 1.0])], spec)
    (action,) = summarise(open_data(tmp_path / "a")).actions
    assert action.edges == 3
    assert {i: int(n) for i, n in enumerate(action.counts) if n} == {0: 1, 10: 2, 15: 1, 19: 2}


def test_unmarked_time_limits_are_suspected(tmp_path):
    write("ours", tmp_path / "a", [episode(i, 9 if i % 2 else 1 + i % 7) for i in range(20)])
    assert "10 have exactly 9 steps, the most: they may be time limits" in summarise(open_data(tmp_path / "a")).ends


def test_bray_data_shows_draws_and_names_what_is_broken(tmp_path, capsys):
    folder = write("ours", tmp_path / "a", [*EPISODES, {**EPISODES[0], "action": np.full(4, 9)}])
    assert main(["data", str(folder), "--plot", str(tmp_path / "a.png")]) == 1
    out = capsys.readouterr().out
    for words in ("4, 14 steps, 1 to 6 each", "float32[3] -> discrete 4", "3 are over, 1 were cut by a limit"):
        assert words in out
    assert "4 of 4 choices" in out
    assert "episode 4: step 0: action 9 is outside of discrete 4" in out
    assert (tmp_path / "a.png").stat().st_size > 10_000
    np.savez(tmp_path / "b.npz", **joined(EPISODES))
    assert main(["data", str(tmp_path / "b.npz")]) == 0
    assert "perhaps --obs 'float32[3]' --actions '4'" in capsys.readouterr().out


def test_files_are_joined_filtered_and_converted(tmp_path, capsys):
    ours = write("ours", tmp_path / "a")
    np.savez(tmp_path / "b.npz", **joined(EPISODES))
    spaces = ["--obs", "float32[3]", "--actions", "4"]
    words = ["data", str(ours), str(tmp_path / "b.npz"), *spaces, "--out", str(tmp_path / "c")]
    assert main([*words, "--filter", "length >= 3 and return < 100"]) == 0
    assert "4 of 8 episodes written" in capsys.readouterr().out
    again = open_data(tmp_path / "c")
    assert again.spec.action == SPEC.action
    assert again.steps.tolist() == [4, 3, 4, 3]
    np.testing.assert_array_equal(again[3]["obs"], EPISODES[1]["obs"])
    assert main([*words, "--filter", "length >= 3"]) == 2  # it would be there twice
    assert "c holds episodes already: choose another directory" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "c"), "--filter", "length > 3"]) == 2
    assert "say where with --out" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "b.npz"), "--out", str(tmp_path / "d")]) == 2
    assert "--obs 'float32[3]' --actions '4', perhaps" in capsys.readouterr().err


def test_a_filter_that_keeps_nothing_writes_nothing(tmp_path, capsys):
    write_episodes(tmp_path / "a" / "x", [episode(1, 5)])
    RunDir(tmp_path / "a").write_spec(SPEC)
    assert main(["data", str(tmp_path / "a"), "--filter", "return > 1e9", "--out", str(tmp_path / "b")]) == 2
    assert "--filter 'return > 1e9' keeps none of 1 episodes: nothing is written" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--merge", "c"], "unknown option '--merge'. Leave it out: several FILES are joined, to --out DIR."),
        (["--convert", "foo", "--out", "c"], "invalid value for '--convert': 'foo' is not one of 'bray', 'minari'."),
    ],
)
def test_wrong_options_are_told(words, message, capsys):
    assert main(["data", "files", *words]) == 2
    assert message in capsys.readouterr().err


def test_bounds_of_observations_may_differ_between_files(tmp_path, capsys):
    for name, obs in (("a", SPEC.observation), ("b", dataclasses.replace(SPEC.observation, low=-9.0, high=9.0))):
        write_episodes(tmp_path / name / "x", [episode(1, 5)])
        RunDir(tmp_path / name).write_spec(dataclasses.replace(SPEC, observation=obs))
    words = ["data", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")]
    assert main(words) == 0
    assert "2 of 2 episodes written" in capsys.readouterr().out


def test_what_cannot_be_done_together_is_refused(tmp_path, capsys):
    ours = str(write("ours", tmp_path / "a"))
    out, plot, run = (["--out", str(tmp_path / "b")], ["--plot", str(tmp_path / "a.png")], ["--evaluate", "run"])
    for words in ([*out, *plot], [*out, *run], [*plot, *run]):
        assert main(["data", ours, *words]) == 2
        assert "--out, --evaluate and --plot are three things to do" in capsys.readouterr().err
    assert main(["data", ours, *run, "--filter", "return > 1"]) == 2
    assert "--filter writes other files" in capsys.readouterr().err


def test_files_that_cannot_be_opened_are_broken_ones(tmp_path, capsys):
    ours = write("ours", tmp_path / "a")
    (ours / "x.npz").write_bytes(b"PK\x03\x04 and nothing else")
    assert main(["data", str(ours)]) == 1
    out = capsys.readouterr().out
    assert "4, 14 steps, 1 to 6 each" in out
    assert "x.npz cannot be read as npz" in out
    assert main(["data", str(ours), "--out", str(tmp_path / "b")]) == 2
    assert main(["data", str(ours), "--out", str(tmp_path / "b"), "--skip-broken"]) == 0
    assert "4 of 4 episodes written" in capsys.readouterr().out


def test_ours_become_minari_and_minari_ours(tmp_path):
    pytest.importorskip("h5py")
    ours = write("ours", tmp_path / "a")
    assert main(["data", str(ours), "--out", str(tmp_path / "m"), "--convert", "minari"]) == 0
    assert main(["data", str(tmp_path / "m"), "--out", str(tmp_path / "b"), "--convert", "bray"]) == 0
    first, second = open_data(ours), open_data(tmp_path / "b")
    assert (first.spec.observation, first.spec.action) == (second.spec.observation, second.spec.action)
    for mine, other in zip(first, second, strict=True):
        assert all(np.array_equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return > 20", [1, 3]),
        ("length<=3 and terminated = 1", [2]),
        ("truncated==1 or length != 4 and max_reward >= 35", [1, 3]),
        ("min_reward > -1e1", [0, 1, 2, 3]),
    ],
)
def test_filters(text, expected):
    keeps = parse_filter(text)
    assert [i for i, e in enumerate(EPISODES) if keeps(e)] == expected


@pytest.mark.parametrize("text", ["", "return >", "__import__('os')", "obs > 1", "return > 1 and", "return > 1.2.3"])
def test_filters_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="expected comparisons such as 'return > 100"):
        parse_filter(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    exp = Experiment(run="PPO", env=ENV, path=path, fcnet_hiddens=[8])
    list(exp.train(stop={"env_steps_total": 300}))
    exp.close()
    return path


def test_noise_changes_the_share_of_choices_that_was_asked_for(run, tmp_path):
    words = ["collect", str(run), "--episodes", "200", "--noise", "0.3", "--out", str(tmp_path / "a")]
    assert main(words) == 0
    data = open_data(tmp_path / "a")
    with Experiment.load(run) as exp:
        best = [int(exp.policy(np.eye(4, dtype=np.float32)[i])) for i in range(4)]
    signs = np.concatenate([e["obs"][:-1].argmax(1) for e in data])
    actions = np.concatenate([e["action"] for e in data])
    logp = np.concatenate([e["logp"] for e in data])
    other = actions != np.array(best)[signs]
    assert other.mean() == pytest.approx(0.3 * 2 / 3, abs=0.035)  # three standard deviations
    np.testing.assert_allclose(np.exp(logp), np.where(other, 0.1, 0.8), rtol=1e-5)
    for e in data:  # what was done is what was rewarded
        right = np.array([2, 0, 1, 2])[e["obs"][:-1].argmax(1)]
        np.testing.assert_array_equal(e["reward"], e["action"] == right)


def test_episodes_of_two_games_are_not_collected_to_one_directory(run, tmp_path, capsys):
    folder = str(write("ours", tmp_path / "a"))
    assert main(["collect", str(run), "--episodes", "1", "--out", folder]) == 2
    assert "holds episodes of other spaces already: choose another directory" in capsys.readouterr().err
    assert open_data(folder).spec.observation == SPEC.observation


def test_draws_keep_their_log_probability(run, tmp_path):
    assert main(["collect", str(run), "--episodes", "3", "--act", "sample", "--out", str(tmp_path / "a")]) == 0
    for e in open_data(tmp_path / "a"):
        assert e["logp"].shape == (8,)
        assert (e["logp"] < 0).all()


def test_collect_writes_for_minari(run, tmp_path):
    pytest.importorskip("h5py")
    assert main(["collect", str(run), "--episodes", "3", "--format", "minari", "--out", str(tmp_path / "a")]) == 0
    assert open_data(tmp_path / "a").steps.tolist() == [8, 8, 8]


def test_written_files_have_their_spaces(tmp_path):
    write_episodes(tmp_path / "episodes", EPISODES)
    RunDir(tmp_path).write_spec(SPEC)
    assert bray.EpisodeReader(tmp_path).spec.action == SPEC.action


def test_a_policy_is_estimated_by_files_of_another(run, tmp_path, capsys):
    """What it would get is what it gets: the return is known, since each sign has one right choice."""
    other = ["collect", str(run), "--act", "sample", "--episodes", "150", "--out", str(tmp_path / "a")]
    assert main(other) == 0
    capsys.readouterr()
    assert main(["data", str(tmp_path / "a"), "--evaluate", str(run), "--act", "sample", "--gamma", "0.5"]) == 0
    out = capsys.readouterr().out
    rows = {line[:28].strip(): [float(x) for x in line[28:].split()] for line in out.splitlines()[2:7]}
    assert set(rows) == {
        "importance sampling",
        "weighted importance sampling",
        "doubly robust",
        "weighted doubly robust",
        "fitted Q",
    }
    with Experiment.load(run) as exp:
        dist = exp.served.engine.forward(np.eye(4, dtype=np.float32))["dist"]
    p = np.exp(dist) / np.exp(dist).sum(1, keepdims=True)
    true = p[range(4), [2, 0, 1, 2]].mean() * sum(0.5**t for t in range(8))
    for value, low, high in rows.values():
        assert low <= value <= high
        assert value == pytest.approx(true, abs=0.15)  # four standard errors of the episodes themselves


def test_estimates_need_probabilities(run, tmp_path, capsys):
    assert main(["collect", str(run), "--episodes", "3", "--out", str(tmp_path / "a")]) == 0
    assert main(["data", str(tmp_path / "a"), "--evaluate", str(run)]) == 2
    assert "3 of 3 episodes have no column logp" in capsys.readouterr().err
