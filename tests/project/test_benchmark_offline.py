"""benchmarks/learning/demos.py and benchmarks/offline.py: data sets are what they say, on both sides the same."""

import numpy as np
import pytest

from benchmarks import offline
from benchmarks.learning import demos
from bray.data.files import EpisodeReader


@pytest.mark.parametrize(
    ("env", "script", "least"), [("CartPole-v1", "balance", 500), ("Pendulum-v1", "swing_up", -400)]
)
def test_scripts_play_well_and_what_they_did_is_kept(env, script, least, tmp_path):
    demos.played(env, {getattr(demos, script): 2, None: 1}, tmp_path)
    *good, bad = EpisodeReader(tmp_path)
    for episode in good:
        assert episode["reward"].sum() >= least
        assert episode["truncated"].tolist() == [False] * (len(episode["reward"]) - 1) + [True]
        assert not episode["terminated"].any()
    assert bad["reward"].sum() < least
    assert (tmp_path / "spec.json").exists()
    np.testing.assert_array_equal(good[0]["obs"][0], bad["obs"][0])  # the seeds are the same


def test_an_episode_that_recording_ends_is_cut():
    recorded = demos.Recorded("CartPole-v1")
    recorded.reset(seed=0)
    for _ in range(3):
        recorded.step(1)
    (episode,) = recorded.episodes()
    assert episode["truncated"].tolist() == [False, False, True]
    assert episode["obs"].shape == (4, 4)
    recorded.reset()  # one without a step is none
    assert len(list(recorded.episodes())) == 1


def test_d3rlpy_gets_the_rows_that_we_read(tmp_path):
    demos.played("Pendulum-v1", {demos.swing_up: 2}, tmp_path / "files")
    rows = np.load(offline.as_npz(tmp_path / "files", tmp_path / "rows.npz"))
    episodes = list(EpisodeReader(tmp_path / "files"))
    assert rows["timeouts"].nonzero()[0].tolist() == [199, 399]
    assert not rows["terminals"].any()
    for name, column in (("observations", "obs"), ("actions", "action"), ("rewards", "reward")):
        np.testing.assert_array_equal(rows[name][200:], episodes[1][column][:200])


def test_our_side_learns_and_plays_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(offline.SAME, "fcnet_hiddens", [8])
    demos.played("CartPole-v1", {demos.balance: 1}, tmp_path / "files")
    ours = offline.Ours("BC", "CartPole-v1", tmp_path / "files", 0, "cpu", tmp_path)
    assert ours.steps(3) > 0.0
    assert ours.learner.steps == 3
    first, again = ours.play(range(1)), ours.play(range(1))
    assert first == again


def test_an_unknown_case_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        offline.main(["wrongcase", "--peer", "python"])
    assert capsys.readouterr().err.endswith(f"'wrongcase' is none of {', '.join(offline.CASES)}\n")
