"""Pieces of workers at different speeds, side by side."""

from dataclasses import replace

import numpy as np

from bray.data import Piece, Replay
from bray.data.lanes import AHEAD, Lanes

T = 4


def piece(worker, number, version=0):
    """Rows whose observation says which step of which worker they are."""
    obs = np.arange(number * T, (number + 1) * T + 1, dtype=np.float32) + 1000 * worker
    flags = np.zeros((T, 1), bool)
    return Piece(
        obs=obs[:, None, None],
        action=np.zeros((T, 1), np.int64),
        reward=np.ones((T, 1), np.float32),
        terminated=flags,
        truncated=flags,
        valid=~flags,
        first=np.zeros((T + 1, 1), bool),
        version=version,
    )


def test_pieces_come_side_by_side_when_all_have_one():
    lanes = Lanes(2)
    lanes.add(1, piece(1, 0))
    assert lanes.take() == []
    lanes.add(0, piece(0, 0))
    (block,) = lanes.take()
    assert block.check().num_envs == 2
    assert block.obs[:, :, 0].tolist() == [[0, 1000], [1, 1001], [2, 1002], [3, 1003], [4, 1004]]


def test_one_that_is_far_behind_is_not_waited_for_and_nothing_leaks_over_its_gap():
    lanes, replay = Lanes(2), Replay(256, 4, gamma=0.5, n_step=3)
    for w in range(2):
        lanes.add(w, piece(w, 0))
    for number in range(1, AHEAD + 2):  # worker 1 is stuck
        lanes.add(0, piece(0, number))
        blocks = lanes.take()
        assert len(blocks) == (number in (1, AHEAD + 1))
        for block in blocks:
            replay.add(block)
    lanes.add(1, piece(1, 1))  # it goes on
    lanes.cut(1)  # it is replaced by one that is at another place
    lanes.add(1, piece(1, 50))
    for block in lanes.take():
        replay.add(block.check())
    ring = replay.ring
    drawn = ring.take(ring.ids())
    obs, after, reward = drawn["obs"][:, 0], drawn["next_obs"][:, 0], drawn["reward"]
    assert np.isin(after - obs, (1, 2, 3)).all()
    assert np.allclose(reward, [{1: 1.0, 2: 1.5, 3: 1.75}[step] for step in after - obs])
    assert np.allclose(drawn["discount"], 0.5 ** (after - obs))
    slow = np.sort(obs[obs >= 1000] - 1000)
    assert slow.tolist()[:8] == list(range(8))  # each of its rows once, also those beside the gaps
    assert (after[obs == 1003], after[obs == 1007]) == (1004, 1008)


def test_workers_that_are_replaced_at_once_leave_no_empty_block():
    lanes = Lanes(2)
    lanes.cut(0)
    lanes.cut(1)
    assert lanes.take() == []


def test_workers_that_are_replaced_at_once_begin_with_a_gap():
    """With one worker that is every replacement."""
    lanes, replay = Lanes(1), Replay(64, 4, gamma=0.5)
    lanes.add(0, piece(0, 0))
    lanes.cut(0)
    lanes.add(0, piece(0, 50))
    for block in lanes.take():
        replay.add(block.check())
    drawn = replay.ring.take(replay.ring.ids())
    assert np.sort(drawn["obs"][:, 0])[:5].tolist() == [0, 1, 2, 3, 200]
    assert (drawn["next_obs"] - drawn["obs"] == 1).all()


def test_a_gap_has_the_columns_of_a_model_with_memory():
    lanes = Lanes(2)
    for number in range(AHEAD + 1):
        lanes.add(
            0, replace(piece(0, number), state=(np.ones((T, 1, 2), np.float32),), extras={"logp": np.ones((T, 1))})
        )
    (block,) = lanes.take()
    block.check()
    assert block.valid[:, 1].sum() == 0
    assert block.state[0][:, 1].sum() == block.extras["logp"][:, 1].sum() == 0
