"""Feature functions against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bray.envs import features as f
from bray.errors import DataError


def test_one_hots():
    assert f.one_hot([0, 2], 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert f.clip_one_hot([-4, 9], 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert f.sqrt_one_hot([0, 3, 4, 9], 9).argmax(1).tolist() == [0, 1, 2, 3]
    assert f.div_one_hot([0, 9, 10, 25], 30, 10).argmax(1).tolist() == [0, 0, 1, 2]
    assert f.div_one_hot([0], 30, 10).shape == (1, 4)
    assert f.reorder_one_hot([48, 7], {7: 0, 48: 1}, 2).tolist() == [[0, 1], [1, 0]]
    assert f.reorder_one_hot_array([2, 0], [1, -1, 0], 2).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(DataError, match=r"0\.\.2, got 0\.\.3"):
        f.one_hot([0, 3], 3)
    with pytest.raises(DataError, match="`order` has no index for the value 9"):
        f.reorder_one_hot([9], {7: 0}, 1)
    with pytest.raises(DataError, match=r"got -1"):
        f.reorder_one_hot_array([1], [1, -1, 0], 2)


def test_vectors_and_numbers():
    assert f.reorder_boolean_vector([5, 9, 77], {5: 2, 9: 0}, 3).tolist() == [1, 0, 1]
    assert f.batch_binary_encode([5, 2], 4).tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]
    with pytest.raises(DataError, match=r"0\.\.15, got 16"):
        f.batch_binary_encode([16], 4)
    assert f.div_func([5, 10], 10).tolist() == [[0.5], [1.0]]
    assert f.affine_transform([-1, 0, 2], [0, 0, 0], [10, 10, 10]).tolist() == [0, 5, 10]
    assert f.affine_transform([2.0], 0, 10, clip=False).tolist() == [15]


def test_position_vector():
    np.testing.assert_allclose(f.compute_denominator([0, 1, 2, 3], 4), [1, 1, 0.01, 0.01])
    np.testing.assert_allclose(
        f.position_vector([3.0], 4)[0], [np.sin(3), np.cos(3), np.sin(0.03), np.cos(0.03)], rtol=1e-6
    )


def test_gif_holds_the_frames(tmp_path):
    import imageio.v3 as imageio

    frames = [np.full((8, 8, 3), 80 * k, np.uint8) for k in range(3)]
    f.save_frames_as_gif(frames, tmp_path / "x.gif")
    back = imageio.imread(tmp_path / "x.gif")
    assert len(back) == 3
    assert [int(x.mean()) for x in back[..., :3]] == [0, 80, 160]
    with pytest.raises(DataError, match="at least one frame"):
        f.save_frames_as_gif([], tmp_path / "y.gif")
