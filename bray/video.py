"""Frames to a video file: .mp4 (H.264) or .gif."""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bray.errors import ConfigError, DataError

_GIF_FPS = 50  # viewers slow a frame of less than 1/50 s down to 1/10 s


def write_video(frames: np.ndarray | Sequence[np.ndarray], path: str | Path, fps: float = 30) -> Path:
    """Write frames (uint8 `[T, H, W, 3]`, or a list of `[H, W, 3]`) as .mp4 or .gif. The file appears when it is
    complete.

    A GIF lasts as long as the frames do: pictures that do not change become one that is shown longer, and above 50
    frames/s (more is not played) every n-th frame is kept."""
    import imageio.v2 as imageio

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".mp4", ".gif"):
        raise ConfigError(f"{path}: expected a video file that ends in .mp4 or .gif")
    if not 0 < fps <= 1000:
        raise ConfigError(f"{path}: expected a frame rate within 0..1000, got {fps}")
    if len(frames) == 0:
        raise DataError(f"{path}: a video needs at least one frame; did the environment render any?")
    shape = np.shape(frames[0])
    if len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise DataError(f"{path}: expected frames of shape [H, W, 3], got {list(shape)}")
    for i, frame in enumerate(frames):
        if np.shape(frame) != shape or np.asarray(frame).dtype != np.uint8:
            got = f"{np.asarray(frame).dtype}{list(np.shape(frame))}"
            raise DataError(f"{path}: frame {i}: expected uint8{list(shape)} like the first, got {got}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{secrets.token_hex(4)}{path.name}")
    options: dict[str, Any]
    if suffix == ".mp4":
        # yuv420p plays everywhere and needs even sizes
        options = {"fps": fps, "codec": "libx264", "macro_block_size": 1, "pixelformat": "yuv420p", "quality": 8}
        pad = [(0, shape[0] % 2), (0, shape[1] % 2), (0, 0)]
    else:
        every = math.ceil(fps / _GIF_FPS)
        frames = frames[::every]
        options = {"duration": _gif_times(len(frames), fps / every), "loop": 0}
        pad = [(0, 0)] * 3
    try:
        writer: Any
        with imageio.get_writer(temp, **options) as writer:
            for frame in frames:
                writer.append_data(np.pad(frame, pad, "edge") if pad[0][1] or pad[1][1] else np.asarray(frame))
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    return path


def _gif_times(frames: int, fps: float) -> list[int]:
    """Milliseconds of each frame. A GIF counts hundredths of a second: rounding the moments instead of the differences
    keeps the whole right, e.g. 30, 40, 30 at 30 frames/s."""
    moments = [round(100 * i / fps) for i in range(frames + 1)]
    return [10 * (b - a) for a, b in itertools.pairwise(moments)]
