"""Results written over an input that nobody reads afterwards: no memory is fetched for them, and what was just computed
is still in the cache."""

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
    if any(tape.examples[s].requires_grad for s in range(tape.num_inputs)):
        return tape  # autograd refuses to write over what it watches
    ops = _with_bias_apart(tape)
    memory = _memory(tape, ops)
    kept = {memory[s] for s in [*range(tape.num_inputs), *tape.held, *tape.outputs]}
    last_read: dict[int, float] = dict.fromkeys(kept, math.inf)
    for at, op in enumerate(ops):
        last_read.update({memory[s]: max(at, last_read.get(memory[s], 0)) for s in op.inputs()})
    done = []
    for at, op in enumerate(ops):
        if (op.func in _OVER_FIRST or op.func in _INTO) and _may_overwrite(tape, op, at, memory, last_read):
            into = op.func in _INTO
            func = _INTO[op.func] if into else _OVER_FIRST[op.func]
            op = Op(func, op.args, {**op.kwargs, "grad_input": op.args[0]} if into else op.kwargs, op.outs)
        done.append(op)
    return replace(tape, ops=done)


def _memory(tape: Tape, ops: list[Op]) -> dict[int, int]:
    """Which slots may lie in the same memory: those with one number. By what operations say of themselves, since
    rewrites have changed who is a view of whom, and by the memory of the recording run."""
    group: dict[int, int] = {}
    members: dict[int, list[int]] = {}

    def join(slot: int, other: int) -> None:
        for s in (slot, other):
            if s not in group:
                group[s], members[s] = s, [s]
        mine, theirs = group[slot], group[other]
        if mine != theirs:
            members[mine] += members[theirs]
            group.update(dict.fromkeys(members.pop(theirs), mine))

    first: dict[int, int] = {}
    for slot, x in tape.examples.items():
        join(slot, first.setdefault(storage_of(x), slot))
    for slot in [*range(tape.num_inputs), *tape.held, *tape.outputs]:
        join(slot, slot)
    for op in ops:
        inputs = list(op.inputs())
        aliases = any(r.alias_info is not None for r in op.func._schema.returns)
        for slot in [*inputs, *op.outs]:
            join(slot, inputs[0] if aliases and inputs and slot in op.outs else slot)
    return group


def _may_overwrite(tape: Tape, op: Op, at: int, memory: dict[int, int], last_read: dict[int, float]) -> bool:
    """Whether the first argument is a tensor of the program itself, shaped like the result and alone in its memory,
    that is read here for the last time, by any name."""
    first = op.args[0]
    if not is_ref(first) or first.slot not in tape.examples or op.outs[0] not in tape.examples:
        return False
    x, out = tape.examples[first.slot], tape.examples[op.outs[0]]
    alike = x.shape == out.shape and x.dtype == out.dtype and x.is_contiguous() and x.device.type == "cpu"
    whole = x.untyped_storage().nbytes() == x.nbytes  # else a small result would keep a large memory
    where = [memory[s] for s in op.inputs()]
    return alike and whole and where.count(memory[first.slot]) == 1 and last_read[memory[first.slot]] <= at


def _with_bias_apart(tape: Tape) -> list[Op]:
    """addmm(b, x, w) as a product to which b is added in place; TorchScript takes it apart too, but into a sum of its
    own."""
    taken = [*tape.examples, *tape.held, *tape.outputs, *(s for op in tape.ops for s in [*op.inputs(), *op.outs])]
    slots, ops = itertools.count(1 + max(taken, default=0)), []
    for op in tape.ops:
        if op.func is aten.addmm.default and not op.kwargs:
            bias, *factors = op.args
            product = next(slots)
            ops.append(Op(aten.mm.default, tuple(factors), {}, [product]))
            ops.append(Op(aten.add_.Tensor, (Ref(product), bias), {}, op.outs))
        else:
            ops.append(op)
    return ops
