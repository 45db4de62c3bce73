"""Pictures: what a render function returns as arrays of one form, as PNG files, and as the frames of a video."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from bray import tree
from bray.errors import DataError

_MAX_PIXELS = 1 << 26
_MAX_PICTURES = 64
_SMALLEST = 256  # pixels of the longer side of a video; smaller pictures are enlarged


def pictures(result: Any) -> list[tuple[str, np.ndarray]]:
    """(name, uint8 `[H, W, 3 or 4]`) of each picture in what a render function returned: a picture, or a list or dict
    of pictures.

    A picture is `[H, W]`, `[H, W, 1]`, `[H, W, 3]` or `[H, W, 4]`: whole numbers of 0..255, bools, or floats of 0..1.
    Floats of which one is above 1 are taken as 0..255."""
    found = [(name, _picture(name, value)) for name, value in tree.paths(result)]
    if not found:
        raise DataError(f"expected a picture, or a list or dict of pictures, got {result!r}")
    if len(found) > _MAX_PICTURES:
        raise DataError(f"expected at most {_MAX_PICTURES} pictures, got {len(found)}")
    return found


def _picture(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    which = f"picture {name!r}: " if name else ""
    if array.dtype.kind not in "biuf":
        got = type(value).__name__ if array.dtype.kind == "O" else f"{array.dtype}{list(array.shape)}"
        raise DataError(f"{which}expected an array of numbers, [H, W] or [H, W, 1, 3 or 4], got {got}")
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        hint = ""
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            hint = "; if the channels come first: image.transpose(1, 2, 0)"
        raise DataError(
            f"{which}expected an array [H, W] or [H, W, 1, 3 or 4], got {array.dtype}{list(array.shape)}{hint}"
        )
    if array.shape[0] * array.shape[1] > _MAX_PIXELS:
        raise DataError(f"{which}expected at most {_MAX_PIXELS} pixels, got {list(array.shape)}")
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    elif array.dtype.kind == "f":
        array = np.nan_to_num(array.astype(np.float32), posinf=np.inf, neginf=-np.inf)
        array = np.clip(np.rint(array if array.max() > 1 else array * 255), 0, 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        array = np.clip(array, 0, 255).astype(np.uint8)
    if array.ndim == 2:
        array = array[:, :, None]
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def png(picture: np.ndarray) -> bytes:
    """A picture as a PNG file."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def from_png(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


# --- frames -----------------------------------------------------------------------------------------------------------


def tiled(several: Sequence[np.ndarray]) -> np.ndarray:
    """Several pictures as one without transparency: beside each other, in rows of about as many as there are rows."""
    several = [_opaque(p) for p in several]
    if len(several) == 1:
        return several[0]
    columns = math.ceil(math.sqrt(len(several)))
    gap = max(2, max(p.shape[0] for p in several) // 64)
    rows = [several[i : i + columns] for i in range(0, len(several), columns)]
    heights = [max(p.shape[0] for p in row) for row in rows]
    widths = [sum(p.shape[1] for p in row) + gap * (len(row) - 1) for row in rows]
    out = np.zeros((sum(heights) + gap * (len(rows) - 1), max(widths), 3), np.uint8)
    y = 0
    for row, height in zip(rows, heights, strict=True):
        x = 0
        for p in row:
            out[y : y + p.shape[0], x : x + p.shape[1]] = p
            x += p.shape[1] + gap
        y += height + gap
    return out


def _opaque(picture: np.ndarray) -> np.ndarray:
    if picture.shape[2] == 3:
        return picture
    alpha = picture[:, :, 3:].astype(np.float32) / 255
    return np.rint(picture[:, :, :3] * alpha).astype(np.uint8)  # on black


class Frames(Sequence):
    """The frames of a video, kept as PNG since a long episode would not fit otherwise. All have the size of the
    largest; others lie in the middle of black. Small ones are enlarged by a whole number: a video blurs single
    pixels."""

    def __init__(self) -> None:
        self._files: list[bytes] = []
        self._height = self._width = 1

    def append(self, frame: np.ndarray) -> None:
        self._height, self._width = max(self._height, frame.shape[0]), max(self._width, frame.shape[1])
        self._files.append(png(frame))

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> Frames: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            some = Frames()
            some._files, some._height, some._width = self._files[i], self._height, self._width
            return some
        frame = from_png(self._files[i])
        down, right = self._height - frame.shape[0], self._width - frame.shape[1]
        frame = np.pad(frame, [(down // 2, down - down // 2), (right // 2, right - right // 2), (0, 0)])
        times = math.ceil(_SMALLEST / max(self._height, self._width))
        return frame.repeat(times, axis=0).repeat(times, axis=1)
