"""Results written over an input that nobody reads afterwards: no memory is fetched for them, and what was just computed is still in the cache."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from bray.capture.tape import Op, Ref, Tape, is_ref, storage_of

aten = torch.ops.aten

_OVER_FIRST = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
}
_INTO = {
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
}
"""Operations without such a form, but with one that is told where to write."""


def in_place(tape: Tape) -> Tape:
    """The same program for the CPU with fewer tensors. What a recording holds, is given and returns stays as it is."""
    ops = _with_bias_apart(tape)
    shared = {s: storage_of(x) for s, x in tape.examples.items()}
    kept = {shared[s] for s in [*range(tape.num_inputs), *tape.held, *tape.outputs] if s in shared}
    last_read = dict.fromkeys(kept, math.inf)
    for at, op in enumerate(ops):
        last_read.update({shared[s]: max(at, last_read.get(shared[s], 0)) for s in op.inputs() if s in shared})
    done = []
    for at, op in enumerate(ops):
        if (op.func in _OVER_FIRST or op.func in _INTO) and _may_overwrite(tape, op, at, shared, last_read):
            into = op.func in _INTO
            func = _INTO[op.func] if into else _OVER_FIRST[op.func]
            op = Op(func, op.args, {**op.kwargs, "grad_input": op.args[0]} if into else op.kwargs, op.outs)
        done.append(op)
    return replace(tape, ops=done)


def _may_overwrite(tape: Tape, op: Op, at: int, shared: dict[int, int], last_read: dict[int, float]) -> bool:
    """Whether the first argument is a tensor of the program itself, shaped like the result, that is read here for the last time, by any name."""
    first = op.args[0]
    if not is_ref(first) or first.slot not in shared or op.outs[0] not in shared:
        return False
    x, out = tape.examples[first.slot], tape.examples[op.outs[0]]
    alike = x.shape == out.shape and x.dtype == out.dtype and x.is_contiguous() and x.device.type == "cpu"
    others = [s for s in op.inputs() if s != first.slot]
    alone = len(others) == len(list(op.inputs())) - 1 and all(shared.get(s) != shared[first.slot] for s in others)
    return alike and alone and last_read[shared[first.slot]] <= at


def _with_bias_apart(tape: Tape) -> list[Op]:
    """addmm(b, x, w) as a product to which b is added in place; TorchScript takes it apart too, but into a sum of its own."""
    slots, ops = itertools.count(1 + max((s for op in tape.ops for s in [*op.inputs(), *op.outs]), default=0)), []
    for op in tape.ops:
        if op.func is aten.addmm.default and not op.kwargs:
            bias, *factors = op.args
            product = next(slots)
            ops.append(Op(aten.mm.default, tuple(factors), {}, [product]))
            ops.append(Op(aten.add_.Tensor, (Ref(product), bias), {}, op.outs))
        else:
            ops.append(op)
    return ops
