"""Arrays as they are written in JSON: nested lists of numbers, read without making a Python object of each.

A game's picture is thousands of numbers per tick. Decoding them into lists, and the lists into an array, is most of what a service does for
such a tick (`python -m benchmarks.remote.ticks`). `read_numbers` reads what is plainly an array of the expected shape, and says False to anything
else. `is_array` says whether it is one at all, so that the ordinary decoder sees no more values than the shape has.
"""

from __future__ import annotations

import numba
import numpy as np

_COMMA, _MINUS, _PLUS, _DOT, _ZERO, _OPEN, _CLOSE, _E, _BIG_E = (ord(c) for c in ",-+.0[]eE")
_T, _F, _A, _Z = (ord(c) for c in "tfaz")
_MOST_DIGITS = 18  # of a whole number
_MOST_EXACT = (
    1 << 53
)  # mantissas up to this are doubles, and so are these powers: one multiplication or division then rounds correctly
_POWERS = np.array([float(f"1e{i}") for i in range(23)])


@numba.njit(cache=True, nogil=True)
def read_numbers(text, shape, whole, low, high, out):  # pragma: no cover - compiled
    """The numbers of `text`, from low to high, into the flat array `out`; whether it holds exactly those of an array of this shape.

    whole  they are integers, and `out` is int64; else they are decimals, rounded as Python rounds them, and `out` is float64
    """
    counts = np.zeros(shape.size + 1, np.int64)  # elements so far of the open list of each depth
    end, depth, k, at, value_next = text.size, 0, 0, 0, True
    while at < end:
        c = text[at]
        if c == _MINUS or _ZERO <= c <= _ZERO + 9:
            if not value_next or depth != shape.size or k == out.size:
                return False
            after = text[at + 1] if at + 1 < end else _COMMA
            if c != _MINUS and after in (_COMMA, _CLOSE):  # one digit: most numbers of most pictures
                value, power, at = np.int64(c) - _ZERO, 0, at + 1
            else:
                value, power, at = _number(text, at, whole)
            if at < 0 or value < low or value > high:
                return False
            if whole:
                out[k] = value
            elif power < 0:
                out[k] = value / _POWERS[-power]
            else:
                out[k] = value * _POWERS[power]
            k += 1
            counts[depth] += 1
            value_next = False
            continue
        if c == _COMMA:
            if value_next or depth == 0:
                return False
            value_next = True
        elif c == _OPEN:
            if not value_next or depth == shape.size:
                return False
            depth += 1
            counts[depth] = 0
        elif c == _CLOSE:
            if value_next or depth == 0 or counts[depth] != shape[depth - 1]:
                return False
            depth -= 1
            counts[depth] += 1
        elif c != 32 and c != 10 and c != 13 and c != 9:  # white space
            return False
        at += 1
    return k == out.size and depth == 0 and not value_next


@numba.njit(cache=True, nogil=True)
def _number(text, at, whole):  # pragma: no cover - compiled
    """(mantissa, power of ten, where it ends) of the number that begins here; it ends at -1 if it is none, or not a simple one."""
    end, power = text.size, 0
    negative = text[at] == _MINUS
    if negative:
        at += 1
    start, value = at, 0
    while at < end and _ZERO <= text[at] <= _ZERO + 9:
        value = 10 * value + (text[at] - _ZERO)
        at += 1
    if at == start or at - start > _MOST_DIGITS or (text[start] == _ZERO and at - start > 1):
        return 0, 0, -1
    if at < end and (text[at] == _DOT or text[at] == _E or text[at] == _BIG_E):
        if whole:
            return 0, 0, -1
        if text[at] == _DOT:
            at += 1
            first = at
            while at < end and _ZERO <= text[at] <= _ZERO + 9:
                if value < _MOST_EXACT:
                    value = 10 * value + (text[at] - _ZERO)
                at += 1
            if at == first:
                return 0, 0, -1
            power = first - at
        if at < end and (text[at] == _E or text[at] == _BIG_E):
            at += 1
            down = at < end and text[at] == _MINUS
            if at < end and (down or text[at] == _PLUS):
                at += 1
            first, exponent = at, 0
            while at < end and _ZERO <= text[at] <= _ZERO + 9:
                exponent = min(10 * exponent + (text[at] - _ZERO), 1000)
                at += 1
            if at == first:
                return 0, 0, -1
            power += -exponent if down else exponent
    if not whole and ((negative and value == 0) or value >= _MOST_EXACT or not -22 <= power <= 22):
        return 0, 0, -1
    return -value if negative else value, power, at


@numba.njit(cache=True, nogil=True)
def is_array(text, shape):  # pragma: no cover - compiled
    """Whether `text` is an array of this shape whose elements could be numbers, true or false: nothing is said of how they are written."""
    counts = np.zeros(shape.size + 1, np.int64)
    end, depth, at, value_next = text.size, 0, 0, True
    while at < end:
        c = text[at]
        at += 1
        if c == _COMMA:
            if value_next or depth == 0:
                return False
            value_next = True
        elif c == _OPEN:
            if not value_next or depth == shape.size:
                return False
            depth += 1
            counts[depth] = 0
        elif c == _CLOSE:
            if value_next or depth == 0 or counts[depth] != shape[depth - 1]:
                return False
            depth -= 1
            counts[depth] += 1
        elif _ZERO <= c <= _ZERO + 9 or c in (_MINUS, _T, _F):
            if not value_next or depth != shape.size or (depth and counts[depth] == shape[depth - 1]):
                return False
            while at < end and _in_value(text[at]):
                at += 1
            counts[depth] += 1
            value_next = False
        elif c != 32 and c != 10 and c != 13 and c != 9:
            return False
    return depth == 0 and not value_next


@numba.njit(cache=True, nogil=True)
def _in_value(c):  # pragma: no cover - compiled
    return _ZERO <= c <= _ZERO + 9 or _A <= c <= _Z or c in (_DOT, _MINUS, _PLUS, _BIG_E)


@numba.njit(cache=True, nogil=True)
def mark_outside(x, low, high, rows):  # pragma: no cover - compiled
    """Set `rows` for each row of `x` with a value below `low` or above `high`; how many were not set before."""
    new = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            if x[i, j] < low[j] or x[i, j] > high[j]:
                new += not rows[i]
                rows[i] = True
                break
    return new


def load() -> None:
    """Compile what is here, or load it, so that no game waits for it."""
    text, shape = np.frombuffer(b"[1]", np.uint8), np.array([1])
    read_numbers(text, shape, True, 0, 1, np.empty(1, np.int64))
    read_numbers(text, shape, False, -np.inf, np.inf, np.empty(1))
    is_array(text, shape)
