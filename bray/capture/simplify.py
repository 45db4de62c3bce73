"""Rewrites of a tape that keep its results, each local: they matter because every operation costs microseconds."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bray.capture.tape import Op, Ref, Tape, storage_of, tensors_in

aten = torch.ops.aten
ARM = platform.machine() in ("aarch64", "arm64")

_PURE_FACTORIES = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_SAME_IF_AS_LARGE = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
}
_ALIASES = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
_LARGE = 4096  # elements from which four cheap operations on ARM beat one tanh
_SMALL_PRODUCT, _MANY_PATCHES = 4_000_000, 1 << 26  # multiplications; elements (256 MB)


def simplify(tape: Tape) -> None:
    """Rewrites that keep the results, each local: they matter because every operation costs microseconds."""
    _drop_same_value(tape)
    _fold_views(tape)
    _fold_constants(tape)
    if ARM:
        _tanh_by_sigmoid(tape)
        _weight_gradients_by_products(tape)
    _drop_unused(tape)


def _drop_same_value(tape: Tape) -> None:
    """Detached copies, views and slices of the same shape and double transposes are the tensor they come from."""
    same: dict[int, int] = {}
    transposed: dict[int, int] = {}
    kept = []
    for op in tape.ops:
        op.args, op.kwargs = op.arguments(lambda slot: Ref(same.get(slot, slot)))
        source = op.args[0].slot if op.args and isinstance(op.args[0], Ref) else None
        if source is not None and len(op.outs) == 1:
            before, after = tape.examples[source], tape.examples[op.outs[0]]
            if op.func in _SAME_VALUE or (op.func in _SAME_IF_AS_LARGE and before.shape == after.shape):
                same[op.outs[0]] = source
                continue
            if op.func is aten.t.default:
                if source in transposed:
                    same[op.outs[0]] = transposed[source]
                    continue
                transposed[op.outs[0]] = source
        kept.append(op)
    tape.ops = kept
    tape.outputs = [same.get(s, s) for s in tape.outputs]


def _fold_views(tape: Tape) -> None:
    """A view of a held tensor (a transposed weight) is held itself: it shares the tensor's memory, so it sees in-place
    updates."""
    kept = []
    for op in tape.ops:
        if op.func in _ALIASES and all(s in tape.held for s in op.inputs()):
            for s in op.outs:
                tape.held[s] = tape.examples[s]
        else:
            kept.append(op)
    tape.ops = kept


def _fold_constants(tape: Tape) -> None:
    """Results that depend on nothing but shapes (ones, zeros and what is computed from them alone) are kept, not
    recomputed."""
    changed = {
        storage_of(x)
        for op in tape.ops
        if op.func._schema.is_mutable
        for x in _changes(op.func, *op.arguments(tape.examples.__getitem__))
    }
    constant: set[int] = set()
    kept = []
    for op in tape.ops:
        inputs = list(op.inputs())
        pure = op.func in _PURE_FACTORIES or (inputs and constant.issuperset(inputs))
        fixed = pure and not (op.func._schema.is_mutable or _draws(op.func))
        if fixed and not any(storage_of(tape.examples[s]) in changed for s in op.outs):
            constant.update(op.outs)
            for s in op.outs:
                tape.held[s] = tape.examples[s].detach()
        else:
            kept.append(op)
    tape.ops = kept


def _draws(func: Any) -> bool:
    """Whether an operation draws random numbers, which changes what later ones draw."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _tanh_by_sigmoid(tape: Tape) -> None:
    """tanh(x) = 2 sigmoid(2x) - 1: PyTorch's ARM kernel of sigmoid is 2.7x faster than that of tanh."""
    ops = []
    for op in tape.ops:
        x = tape.examples[op.outs[0]] if op.outs else None
        if op.func is aten.tanh.default and x is not None and x.dtype == torch.float32 and x.numel() >= _LARGE:
            out = Ref(op.outs[0])
            ops.append(Op(aten.mul.Tensor, (op.args[0], 2.0), {}, op.outs))
            ops.append(Op(aten.sigmoid_.default, (out,), {}, op.outs))
            ops.append(Op(aten.mul_.Tensor, (out, 2.0), {}, op.outs))
            ops.append(Op(aten.sub_.Tensor, (out, 1.0), {}, op.outs))
        else:
            ops.append(op)
    tape.ops = ops


def _weight_gradients_by_products(tape: Tape) -> None:
    """The gradient of a convolution's weights as one matrix product with the patches of its input: half of oneDNN's
    time on ARM."""
    slots, ops = itertools.count(max(tape.examples, default=0) + 1), []
    for op in tape.ops:
        pays = op.func is aten.convolution_backward.default and _product_pays(tape, op)
        ops += _weight_gradient(tape, op, slots) if pays else [op]
    tape.ops = ops


def _product_pays(tape: Tape, op: Op) -> bool:
    given, image, weight = (tape.examples[x.slot] for x in op.args[:3])
    padding, dilation, transposed, _, groups, mask = op.args[5:]
    plain = image.dim() == 4 and not transposed and groups == 1 and not any(padding) and set(dilation) == {1}
    patches = given.numel() // given.shape[1] * weight[0].numel()
    worth = patches * given.shape[1] > _SMALL_PRODUCT and patches < _MANY_PATCHES
    return plain and worth and mask[1] and image.device.type == "cpu" and image.dtype == torch.float32


def _weight_gradient(tape: Tape, op: Op, slots: Iterator[int]) -> list[Op]:
    """convolution_backward for the input alone; then weights and bias, from patches [N, kh kw C] and what came back for
    them [N, O]."""
    given, x, weight, _, (down, across), *_, mask = op.args
    (outs, _, kh, kw), channels = tape.examples[weight.slot].shape, tape.examples[x.slot].shape[1]
    ends = dict(zip((i for i, there in enumerate(mask) if there), op.outs, strict=True))
    ops = []

    def add(func: Any, *args: Any, out: int | None = None, **more: Any) -> Ref:
        ops.append(Op(func, args, more, [next(slots) if out is None else out]))
        return Ref(ops[-1].outs[0])

    if mask[0]:
        ops.append(Op(op.func, (*op.args[:-1], [True, False, False]), {}, [ends[0]], [True, False, False]))
    windows = add(aten.unfold.default, add(aten.unfold.default, x, 2, kh, down), 3, kw, across)
    patches = add(
        aten.reshape.default, add(aten.permute.default, windows, [0, 2, 3, 4, 5, 1]), [-1, kh * kw * channels]
    )
    back = add(aten.reshape.default, add(aten.permute.default, given, [0, 2, 3, 1]), [-1, outs])
    product = add(aten.mm.default, add(aten.t.default, back), patches)
    found = add(aten.permute.default, add(aten.view.default, product, [outs, kh, kw, channels]), [0, 3, 1, 2])
    dense = tape.examples[ends[1]].is_contiguous()  # what reads it was recorded for its strides
    add(
        aten.clone.default,
        found,
        out=ends[1],
        memory_format=torch.contiguous_format if dense else torch.preserve_format,
    )
    if mask[2]:
        add(aten.sum.dim_IntList, back, [0], out=ends[2])
    return ops


def _drop_unused(tape: Tape) -> None:
    """Operations whose results nobody reads and that change nothing."""
    needed = set(tape.outputs)
    kept = []
    for op in reversed(tape.ops):
        if op.func._schema.is_mutable or _draws(op.func) or any(s in needed for s in op.outs):
            needed.update(op.inputs())
            kept.append(op)
    tape.ops = kept[::-1]
    tape.held = {s: x for s, x in tape.held.items() if s in needed}


def _changes(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to, by its schema."""
    changed = []
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            changed += tensors_in(args[i] if i < len(args) else kwargs.get(declared.name))
    return changed
