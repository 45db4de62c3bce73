"""Functions that turn a batch of game values `[B]` into float32 features `[B, F]`.

Values outside the stated range raise DataError, except in functions with `clip` in their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bray.errors import DataError
from bray.video import write_video


def one_hot(v: Any, num: int) -> np.ndarray:
    """Integers 0..num-1 as one-hot vectors of length `num`."""
    index = np.asarray(v)
    index = np.atleast_1d(index).astype(np.int64)
    if index.size and (index.min() < 0 or index.max() >= num):
        raise DataError(f"one_hot: values lie in 0..{num - 1}, got {index.min()}..{index.max()}")
    return (index[..., None] == np.arange(num)).astype(np.float32)


def clip_one_hot(v: Any, num: int) -> np.ndarray:
    """`one_hot` after clipping to 0..num-1."""
    return one_hot(np.clip(np.asarray(v, np.int64), 0, num - 1), num)


def sqrt_one_hot(v: Any, max_val: float) -> np.ndarray:
    """One-hot of floor(sqrt(value)), for values 0..max_val: fine bins for small values, coarse ones for large
    values."""
    return one_hot(np.floor(np.sqrt(np.asarray(v, np.float64))), int(np.sqrt(max_val)) + 1)


def div_one_hot(v: Any, max_val: float, ratio: float) -> np.ndarray:
    """One-hot of value // ratio, for values 0..max_val: bins of equal width."""
    return one_hot(np.asarray(v) // ratio, int(max_val / ratio) + 1)


def div_func(v: Any, other: float) -> np.ndarray:
    """The value divided by a constant, as one feature."""
    return (np.atleast_1d(np.asarray(v, np.float32)) / np.float32(other))[:, None]


def reorder_one_hot(v: Any, order: Mapping[int, int], num: int) -> np.ndarray:
    """One-hot of `order[value]`, for ids with gaps: `order` maps each id to an index 0..num-1."""
    try:
        return one_hot([order[int(x)] for x in np.atleast_1d(v)], num)
    except KeyError as e:
        raise DataError(f"reorder_one_hot: `order` has no index for the value {e}") from None


def reorder_one_hot_array(v: Any, order: Sequence[int] | np.ndarray, num: int) -> np.ndarray:
    """`reorder_one_hot` with an array as `order`; negative entries mark ids that may not occur."""
    return one_hot(np.asarray(order)[np.atleast_1d(np.asarray(v, np.int64))], num)


def reorder_boolean_vector(v: Sequence[int], order: Mapping[int, int], num: int) -> np.ndarray:
    """A vector `[num]` with a 1 at `order[value]` for every value in `v`; values that `order` lacks are skipped."""
    out = np.zeros(num, np.float32)
    out[[order[int(x)] for x in v if int(x) in order]] = 1.0
    return out


def batch_binary_encode(v: Any, bits: int) -> np.ndarray:
    """Integers 0..2**bits-1 as binary digits, the highest first."""
    x = np.atleast_1d(np.asarray(v, np.int64))
    if x.size and (x.min() < 0 or x.max() >= 1 << bits):
        raise DataError(f"batch_binary_encode: values lie in 0..{(1 << bits) - 1}, got {x.min()}..{x.max()}")
    return (x[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.float32)


def compute_denominator(i: Any, dim: int) -> np.ndarray:
    """1 / 10000^(2 floor(i / 2) / dim): the frequencies of sinusoidal position encoding (Vaswani 2017)."""
    return 1.0 / np.power(10000.0, 2 * (np.asarray(i) // 2) / dim)


def position_vector(v: Any, dim: int = 64) -> np.ndarray:
    """Sinusoidal encoding of a position: sines in the even features, cosines in the odd ones."""
    angle = np.atleast_1d(np.asarray(v, np.float64))[:, None] * compute_denominator(np.arange(dim), dim)
    return np.where(np.arange(dim) % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


def affine_transform(data: Any, low: Any, high: Any, clip: bool = True) -> np.ndarray:
    """Scale from [-1, 1] to [low, high]; `clip` limits the input to [-1, 1] first."""
    x = np.asarray(data, np.float32)
    x = np.clip(x, -1.0, 1.0) if clip else x
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    return x * (high - low) / 2 + (high + low) / 2


def save_frames_as_gif(frames: Sequence[np.ndarray], path: str | Path, fps: int = 30) -> None:
    """Write pictures uint8 [H, W, 3] as an animated GIF."""
    write_video(frames, Path(path).with_suffix(".gif"), fps)
