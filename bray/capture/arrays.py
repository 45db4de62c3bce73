"""Playing the tape of a small network on numpy arrays.

A forward of a few rows spends most of its time before the first multiplication: TorchScript's interpreter takes 44 us
for one row of an MLP of 120 and 84 units, this 15 us (one thread of a Neoverse N1). It leaves the caches to others,
too: a step of CartPole takes 38 us after it, 70 us after the interpreter.

Matrix products are a compiled loop: BLAS would start threads for them. A row's results do not depend on the other rows
of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from bray.capture.replay import source
from bray.capture.tape import NotRecordable, Op, Tape
from bray.compiled import compiled

MAX_PRODUCTS = 600_000
"""Multiplications of a forward: 8 rows of 256 x 256 units take 98 us, TorchScript's interpreter 114 us; above that
torch is faster."""
MAX_ELEMENTS = 1 << 15
"""Of all results together."""
_DTYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.bool: np.bool_}


_sums = partial(compiled, fastmath={"reassoc", "contract"})  # in an order that vector registers like; nan and inf stay


@_sums
def _product(x, w, bias):  # pragma: no cover - compiled
    """x `[B, K]` @ w `[K, N]`, column after column, + bias `[N]`."""
    rows, depth = x.shape
    columns = w.shape[1]
    out = np.empty((rows, columns), np.float32)
    for j in range(columns):
        for i in range(rows):
            total = np.float32(0.0)
            for k in range(depth):
                total += x[i, k] * w[k, j]
            out[i, j] = total + bias[j]
    return out


@_sums
def _row_norm(x, weight, bias, eps):  # pragma: no cover - compiled
    """Rows of x `[B, N]` with mean 0 and variance 1, times weight, plus bias."""
    rows, n = x.shape
    out = np.empty((rows, n), np.float32)
    for i in range(rows):
        mean = np.float32(0.0)
        for k in range(n):
            mean += x[i, k]
        mean /= np.float32(n)
        var = np.float32(0.0)
        for k in range(n):
            var += (x[i, k] - mean) ** 2
        scale = np.float32(1.0 / np.sqrt(var / n + eps))
        for k in range(n):
            out[i, k] = (x[i, k] - mean) * scale * weight[k] + bias[k]
    return out


def _addmm(bias: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return _product(x, w, bias) if bias.ndim == 1 else _product(x, w, np.zeros(w.shape[1], np.float32)) + bias


def _clamp(x: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.tanh(0.5 * x) + 0.5  # exp would overflow


def _softmax(x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _layer_norm(x: np.ndarray, shape: list[int], w: np.ndarray, b: np.ndarray, eps: float) -> tuple[Any, ...]:
    return _row_norm(np.ascontiguousarray(x), w, b, eps), None, None


def _split(x: np.ndarray, size: int, dim: int = 0) -> list[np.ndarray]:
    n = x.shape[dim]
    return _split_with_sizes(x, [min(size, n - i) for i in range(0, n, size)], dim)


def _split_with_sizes(x: np.ndarray, sizes: list[int], dim: int = 0) -> list[np.ndarray]:
    ends = list(accumulate(sizes))  # (np.split takes five times as long)
    before = (slice(None),) * (dim % x.ndim)
    return [x[(*before, slice(end - size, end))] for end, size in zip(ends, sizes, strict=True)]


OPERATIONS: dict[Any, Callable[..., Any]] = {
    "addmm": _addmm,
    "mv": lambda x, v: (x * v).sum(-1),
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "clamp": _clamp,
    "sign": np.sign,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "add.Tensor": np.add,
    "sub.Tensor": np.subtract,
    "mul.Tensor": np.multiply,
    "div.Tensor": np.divide,
    "addcmul": lambda x, a, b: x + a * b,
    "mean.dim": lambda x, dims, keep=False: x.mean(tuple(dims), keepdims=keep),
    "eq.Tensor": np.equal,
    "_to_copy": lambda x, dtype: x.astype(_DTYPES[dtype]),
    "cat": np.concatenate,
    "split.Tensor": _split,
    "split_with_sizes": _split_with_sizes,
    "view": lambda x, shape: x.reshape(shape),
    "_unsafe_view": lambda x, shape: x.reshape(shape),
    "unsqueeze": np.expand_dims,
    "squeeze.dim": lambda x, dim: x.squeeze(dim),
}
"""By the name of PyTorch's operation."""


def _name(op: Op) -> str:
    return op.func.name().removeprefix("aten::")


class OnArrays:
    """A tape played on arrays: `on_arrays` takes and returns them, a call takes and returns tensors as any `Replay`
    does."""

    def __init__(self, tape: Tape):
        """NotRecordable where the tape is large or has an operation that is not known here."""
        _check(tape)
        self._dtypes = [tape.examples[i].numpy().dtype for i in range(tape.num_inputs)]
        self._held = [x.detach().numpy() for x in tape.held.values()]
        names = {name: f"f{i}" for i, name in enumerate(OPERATIONS)}
        known: dict[str, Any] = {names[name]: function for name, function in OPERATIONS.items()} | {"torch": torch}
        exec(source(tape, lambda op: names[_name(op)]), known)
        self._play = known["program"]

    def on_arrays(self, flat: list[np.ndarray]) -> list[np.ndarray]:
        for x, dtype in zip(flat, self._dtypes, strict=True):
            if x.dtype != dtype:
                raise RuntimeError(f"expected {dtype}, got {x.dtype}")
        return self._play(*flat, *self._held)

    def __call__(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.from_numpy(x) for x in self.on_arrays([x.numpy() for x in flat])]


def _check(tape: Tape) -> None:
    """Raise NotRecordable unless all of a tape can be played on arrays, and is the faster for it."""
    products = elements = 0
    for op in tape.ops:
        if _name(op) not in OPERATIONS:
            raise NotRecordable(f"{_name(op)} is not known on arrays")
        elements += sum(tape.examples[s].numel() for s in op.outs)
        if op.func is torch.ops.aten.addmm.default:
            x, w = (tape.examples[a.slot] for a in op.args[1:3])
            if op.kwargs or len(op.args) > 3 or w.dtype != torch.float32 or not w.t().is_contiguous():
                raise NotRecordable("a matrix product of another kind than a linear layer's")
            products += x.shape[0] * w.numel()
    if products > MAX_PRODUCTS or elements > MAX_ELEMENTS:
        raise NotRecordable(f"{products} multiplications and {elements} results")
