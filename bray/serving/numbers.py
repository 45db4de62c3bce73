"""Large arrays as they are written in JSON: nested lists of numbers, read without compiled code of our own and without
trusting their size.

Decoding a game's picture into lists, and the lists into an array, is most of what a service does for such a tick
(`python -m benchmarks.remote.ticks`).
So the shape is compared by brackets and commas alone, before anything is decoded, and whole numbers are read from their
digits, all at once.
The text must be valid JSON, which is what `msgspec.Raw` holds.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

_COMMA, _ZERO = ord(","), ord("0")
_BESIDE_STRUCTURE = bytes(c for c in range(256) if c not in b"[],")
_BRACKETS_AND_SPACE = b"[] \t\r\n"
_PIECE = 1 << 15  # bytes of text that are read at once: as objects, numbers are many times as large as their text
_MANY = 1 << 11  # bytes of text from which reading digits is quicker than decoding
_MOST_DIGITS = 9  # of a whole number that is read by its digits
_decode = msgspec.json.Decoder(list[float | int | bool]).decode


def structure(shape: tuple[int, ...]) -> bytes:
    """The brackets and commas of an array of this shape: `[[,],[,]]` for (2, 2)."""
    out = b""
    for n in reversed(shape):
        out = b"[" + b",".join([out] * n) + b"]"
    return out


def has_structure(text: bytes, expected: bytes) -> bool:
    """Whether the text has these brackets and commas, and so as many values. They may still be something else than
    numbers."""
    return text.translate(None, _BESIDE_STRUCTURE) == expected


def read_numbers(text: bytes, dtype: np.dtype) -> np.ndarray | None:
    """The numbers of an array, in order; None where something in it is no number. dtype: what they should be; whole
    numbers that are not, come as they are."""
    flat, out, at = text.translate(None, _BRACKETS_AND_SPACE), [], 0
    while at < len(flat):
        end = flat.find(b",", at + _PIECE)
        end = len(flat) if end < 0 else end
        piece = flat[at:end]
        digits = _read_digits(piece) if dtype.kind in "iu" and len(piece) > _MANY else None
        try:
            out.append(_array(_decode(b"[%b]" % piece), dtype) if digits is None else digits)
        except msgspec.ValidationError:  # a text, null, an object
            return None
        at = end + 1
    return np.concatenate(out)


def _array(numbers: list[Any], dtype: np.dtype) -> np.ndarray:
    if dtype == np.uint8:
        try:
            return np.frombuffer(bytes(numbers), np.uint8)  # four times as fast as numpy
        except (ValueError, TypeError):
            pass
    return np.array(numbers, dtype if dtype.kind == "f" else None)


def _read_digits(text: bytes) -> np.ndarray | None:
    """Whole numbers with commas between them, as pictures have them; None where one has a sign, a fraction or more than
    nine digits."""
    chars = np.frombuffer(b",%b," % text, np.uint8)
    is_comma, digits = chars == _COMMA, chars - _ZERO
    if np.count_nonzero((digits <= 9) | is_comma) != chars.size:
        return None
    commas = np.flatnonzero(is_comma)
    width = int(np.diff(commas).max()) - 1
    if width > _MOST_DIGITS:
        return None
    at = commas[1:] - 1
    numbers, inside = digits[at].astype(np.int32), np.ones(at.size, np.bool_)
    for power in range(1, width):
        at -= 1  # before the first number this is -1, the last comma
        inside &= ~is_comma[at]
        numbers += np.multiply(digits[at], inside, dtype=np.int32) * 10**power
    return numbers
