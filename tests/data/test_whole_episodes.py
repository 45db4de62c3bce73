"""Experiences of whole episodes: `Episodes` (rows of episodes that have ended) and `Generation` (their returns)."""

from dataclasses import replace

import numpy as np
import pytest
from sources_for_tests import make_piece, side_by_side

from bray.act import Clock
from bray.data import Episodes, Generation, Piece
from bray.data.generation import MOST_BYTES
from bray.errors import ConfigError
from bray.experiment import Experiment


def ticks(piece):
    """(game, tick) of each valid row, from the observations of `make_piece`."""
    return [tuple(row) for row in piece.obs[:-1][piece.valid][:, :2].astype(int)]


def game(rng, stream, lengths, cut=None):
    """Pieces of 4 rows of one game whose episodes have these lengths, one dead row between them."""
    ends = tuple(int(e) for e in np.cumsum([n + 1 for n in lengths]) - 2)
    whole = make_piece(rng, sum(lengths) + len(lengths) - 1, stream, ends=ends)
    return whole if cut is None else [whole.rows(i, min(i + cut, whole.length)) for i in range(0, whole.length, cut)]


def test_only_episodes_that_have_ended_come_each_with_its_final_observation():
    rng = np.random.default_rng(0)
    experience = Episodes(rows=8)
    for piece in game(rng, 3, [5, 2, 6], cut=4):
        experience.add(piece)
        if len(batches := list(iter(lambda: experience.next(Clock()), None))):
            break
    (batch,) = batches
    piece = batch.data.check()
    assert batch.rows == 13  # 5 + 2 are too few, the third episode ends in the last piece
    assert ticks(piece) == [(3, t) for t in [*range(5), 6, 7, *range(9, 15)]]
    assert np.flatnonzero(piece.terminated | piece.truncated).tolist() == [4, 7, 14]
    assert np.flatnonzero(piece.first).tolist() == [0, 6, 9]
    assert piece.obs[[5, 8, 15], 0, 1].tolist() == [5, 8, 15]  # the final ones
    assert piece.length == 16  # a multiple of 4
    assert not piece.valid[15:].any()


def test_a_batch_equals_the_rows_of_the_game():
    rng = np.random.default_rng(1)
    whole = game(rng, 0, [3, 4, 5])
    experience = Episodes(rows=12)
    for i in range(0, whole.length, 5):
        experience.add(whole.rows(i, min(i + 5, whole.length)))
    piece = experience.next(Clock()).data
    for name in ("obs", "action", "reward", "terminated", "truncated"):
        mine, theirs = getattr(piece, name)[: whole.length], getattr(whole, name)[: whole.length]
        rows = whole.valid[:, 0]
        np.testing.assert_array_equal(mine[rows], theirs[rows])
    np.testing.assert_array_equal(piece.outputs["value"][: whole.length], whole.outputs["value"][:-1])
    np.testing.assert_array_equal(piece.extras["logp"][: whole.length][whole.valid], whole.extras["logp"][whole.valid])


def test_what_began_before_and_what_follows_a_gap_is_left_out():
    rng = np.random.default_rng(2)
    late = make_piece(rng, 8, 5, start=10, ends=(2,))  # an episode whose start was not seen, then the start of another
    experience = Episodes(rows=1)
    experience.add(late)
    assert experience.next(Clock()) is None
    experience.add(make_piece(rng, 4, 5, start=30, ends=(1,)))  # 12 ticks are missing: that one is lost too
    assert experience.next(Clock()) is None
    assert "0 of 1 rows" in experience.wait_reason()


def test_episodes_go_on_exactly_from_a_saved_state():
    def play(save_at):
        rng, experience, out = np.random.default_rng(3), Episodes(rows=10), []
        for i, piece in enumerate(game(rng, 0, [3, 9, 4, 2, 7], cut=4)):
            experience.add(piece)
            if i == save_at:
                state = experience.get_state(None)
                experience = Episodes(rows=10)
                assert experience.set_state(state, None)
            if (batch := experience.next(Clock())) is not None:
                out.append(batch.data)
        return out

    for one, two in zip(play(None), play(2), strict=True):
        np.testing.assert_array_equal(one.obs, two.obs)
        np.testing.assert_array_equal(one.reward, two.reward)


def test_environments_that_step_together_are_kept_apart():
    rng = np.random.default_rng(4)
    columns = [make_piece(rng, 9, None, ends=ends) for ends in ((2, 6), (4,), ())]
    experience = Episodes(rows=5)
    experience.add(side_by_side(*columns))
    piece = experience.next(Clock()).data
    np.testing.assert_allclose(
        piece.reward[piece.valid],
        np.concatenate([columns[0].reward[:3, 0], columns[0].reward[4:7, 0], columns[1].reward[:5, 0]]),
    )


# --- generations ------------------------------------------------------------------------------------------------------


def rows(version, first, reward, ended, valid=None):
    """One row of as many environments as there are entries."""
    n = len(reward)
    return Piece(
        obs=np.full((2, n, 1), version, np.float32),
        action=np.zeros((1, n), np.int64),
        reward=np.array([reward], np.float32),
        terminated=np.array([ended], bool),
        truncated=np.zeros((1, n), bool),
        valid=np.array([[True] * n if valid is None else valid], bool),
        first=np.array([first, [False] * n], bool),
        extras={"key": np.full((1, n), 7 + version)},
        version=version,
    )


def test_a_generation_is_the_first_whole_episode_of_each_environment_with_the_newest_weights():
    experience = Generation()
    experience.add(rows(0, [1, 1], [1, 2], [0, 1]))
    assert experience.next(Clock()) is None
    experience.add(rows(0, [0, 0], [10, 0], [0, 0], valid=[True, False]))  # the second rests
    experience.add(rows(0, [0, 1], [100, 50], [1, 1]))  # and plays again, which does not count
    batch = experience.next(Clock())
    assert batch.data["return"].tolist() == [111.0, 2.0]
    assert batch.data["key"].tolist() == [7, 7]
    assert len(batch.data["obs"]) == batch.rows == 5
    experience.add(
        rows(1, [0, 0], [0, 5], [0, 0], valid=[False, True])
    )  # new weights: this episode began with the old ones
    experience.add(rows(1, [1, 0], [3, 0], [1, 1]))
    assert experience.next(Clock()) is None
    experience.add(rows(1, [0, 0], [0, 0], [0, 0], valid=[False, False]))
    experience.add(rows(1, [1, 1], [0, 4], [0, 1]))
    assert experience.next(Clock()).data["return"].tolist() == [3.0, 4.0]


def test_a_generation_goes_on_from_a_saved_state():
    experience = Generation()
    experience.add(rows(0, [1, 1], [1, 2], [0, 1]))
    again = Generation()
    again.set_state(experience.get_state(None), None)
    again.add(rows(0, [0, 0], [10, 0], [1, 0], valid=[True, False]))
    batch = again.next(Clock())
    assert batch.data["return"].tolist() == [11.0, 2.0]
    assert batch.rows == 3


def test_a_generation_of_large_observations_keeps_some_of_them_and_goes_on_alike():
    def play(experience, steps):
        for t in steps:
            piece = rows(0, [t == 0] * 2, [1, 1], [t == 999] * 2)
            experience.add(replace(piece, obs=np.full((2, 2, 100_000), t, np.float32)))

    whole, begun, again = Generation(), Generation(), Generation()
    play(whole, range(1000))
    play(begun, range(617))
    state = begun.get_state(None)
    assert state["arrays"]["obs"].nbytes <= MOST_BYTES
    again.set_state(state, None)
    play(again, range(617, 1000))
    batches = [x.next(Clock()) for x in (whole, again)]
    for batch in batches:
        assert batch.data["return"].tolist() == [1000.0, 1000.0]
        assert batch.rows == 2000
        assert MOST_BYTES / 4 < batch.data["obs"].nbytes <= MOST_BYTES
        steps = batch.data["obs"][::2, 0]
        assert len(set(np.diff(steps))) == 1  # evenly, from the first to the last
        assert steps[0] < 32
        assert steps[-1] > 967
    np.testing.assert_array_equal(*(b.data["obs"] for b in batches))


def test_generations_refuse_odd_numbers_waiting_and_live_games():
    with pytest.raises(ConfigError, match="num_envs is even"):
        Generation().check_rows(3, 3)
    with pytest.raises(ConfigError, match=r"env\.wait_num"):
        Generation().check_rows(4, 2)
    with pytest.raises(ConfigError, match="live games are learnt from by PPO"):
        Generation().add(make_piece(np.random.default_rng(0), 3, 1))
    spaces = {"obs": "float32[2]", "actions": "2", "port": 0}
    with pytest.raises(ConfigError, match="live games are learnt from by PPO"):
        _ = Experiment("ES", live=True, config={"live": spaces}).training
