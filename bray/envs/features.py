"""Small functions that turn game values into features: numpy in, float32 out, values `[B]` -> features `[B, F]`.

Values outside their range are refused, except where the name says `clip`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bray.errors import DataError
from bray.video import write_video


def one_hot(v: Any, num: int) -> np.ndarray:
    """One 1 among `num` places."""
    index = np.asarray(v)
    index = np.atleast_1d(index).astype(np.int64)
    if index.size and (index.min() < 0 or index.max() >= num):
        raise DataError(f"one_hot: values lie in 0..{num - 1}, got {index.min()}..{index.max()}")
    return (index[..., None] == np.arange(num)).astype(np.float32)


def clip_one_hot(v: Any, num: int) -> np.ndarray:
    """One-hot after clipping to 0..num-1."""
    return one_hot(np.clip(np.asarray(v, np.int64), 0, num - 1), num)


def sqrt_one_hot(v: Any, max_val: float) -> np.ndarray:
    """One-hot of the whole part of the square root: fine for small values, coarse for large ones."""
    return one_hot(np.floor(np.sqrt(np.asarray(v, np.float64))), int(np.sqrt(max_val)) + 1)


def div_one_hot(v: Any, max_val: float, ratio: float) -> np.ndarray:
    """One-hot of value // ratio."""
    return one_hot(np.asarray(v) // ratio, int(max_val / ratio) + 1)


def div_func(v: Any, other: float) -> np.ndarray:
    """The value over a constant, as one feature."""
    return (np.atleast_1d(np.asarray(v, np.float32)) / np.float32(other))[:, None]


def reorder_one_hot(v: Any, order: Mapping[int, int], num: int) -> np.ndarray:
    """One-hot of `order[value]`: sparse game ids as dense places."""
    try:
        return one_hot([order[int(x)] for x in np.atleast_1d(v)], num)
    except KeyError as e:
        raise DataError(f"reorder_one_hot: no place is given for the value {e}") from None


def reorder_one_hot_array(v: Any, order: Sequence[int] | np.ndarray, num: int) -> np.ndarray:
    """The same with an array as the table (negative entries: no place)."""
    return one_hot(np.asarray(order)[np.atleast_1d(np.asarray(v, np.int64))], num)


def reorder_boolean_vector(v: Sequence[int], order: Mapping[int, int], num: int) -> np.ndarray:
    """`[num]` with a 1 at the place of every value in `v`; values without a place are skipped."""
    out = np.zeros(num, np.float32)
    out[[order[int(x)] for x in v if int(x) in order]] = 1.0
    return out


def batch_binary_encode(v: Any, bits: int) -> np.ndarray:
    """Binary digits, the highest first."""
    x = np.atleast_1d(np.asarray(v, np.int64))
    if x.size and (x.min() < 0 or x.max() >= 1 << bits):
        raise DataError(f"batch_binary_encode: values lie in 0..{(1 << bits) - 1}, got {x.min()}..{x.max()}")
    return (x[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.float32)


def compute_denominator(i: Any, dim: int) -> np.ndarray:
    """1 / 10000^(2 floor(i / 2) / dim): the frequencies of position features (Vaswani 2017)."""
    return 1.0 / np.power(10000.0, 2 * (np.asarray(i) // 2) / dim)


def position_vector(v: Any, dim: int = 64) -> np.ndarray:
    """A place as sines (even features) and cosines (odd ones) of falling frequency."""
    angle = np.atleast_1d(np.asarray(v, np.float64))[:, None] * compute_denominator(np.arange(dim), dim)
    return np.where(np.arange(dim) % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


def affine_transform(data: Any, low: Any, high: Any, clip: bool = True) -> np.ndarray:
    """[-1, 1] -> [low, high]."""
    x = np.asarray(data, np.float32)
    x = np.clip(x, -1.0, 1.0) if clip else x
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    return x * (high - low) / 2 + (high + low) / 2


def save_frames_as_gif(frames: Sequence[np.ndarray], path: str | Path, fps: int = 30) -> None:
    """Pictures [H, W, 3] uint8 as a moving picture."""
    write_video(frames, Path(path).with_suffix(".gif"), fps)
