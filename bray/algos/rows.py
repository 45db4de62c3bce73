"""Rollouts as rows: advantages, minibatches, and one forward over rows or sequences. For algorithms that learn from
`Rollouts`.

T steps, B games, N = T * B rows; L rows per sequence and S sequences where the Model has a memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.algos import base
from bray.algos.base import Update, drawn, to_torch
from bray.algos.packing import pack, piece_size, take, unpack
from bray.capture.over_ranks import by_itself
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.nn.normalize import update_normalizers
from bray.rl import returns
from bray.spec import ActionLayout

logger = logging.getLogger("bray")


class Learner(base.Learner):
    """A Learner of rows, which may be tensors on its device (`bray/train/on_device.py`). Its
    `gradient_step(batch, *draws)` gets them by name, all of them or, where the Config has `minibatches`, one piece:
    those that `advantage_rows` makes, with weights that sum to one."""

    def step_on(self, batch: dict[str, Any]) -> Update:
        """One gradient step on all rows."""
        update: Update = self._step(
            to_torch(pack(batch, 1, self.over_ranks), self.device), *(x[0] for x in self.draw())
        )
        self.steps += 1
        return update

    def passes_over(self, batch: dict[str, Any]) -> Callable[[], list[Update]]:
        """A function that goes once over the rows in a new order: a gradient step for each of the `minibatches`."""
        pieces = self.config.minibatches
        step = self._step.bind(to_torch(pack(batch, pieces, self.over_ranks), self.device))

        def one_pass() -> list[Update]:
            updates = []
            for index in minibatches(self.rng, batch["weight"].shape[-1], pieces, batch["weight"]):
                updates.append(step(index.to(self.device), *(x[0] for x in self.draw())))
                self.steps += 1
            return updates

        return one_pass

    def make_step(self) -> Callable[..., Any]:
        return partial(self._on_rows, self.gradient_step)

    def _on_rows(self, step: Callable[..., Any], packed: dict[str, Any], *rest: Tensor) -> Any:
        if not hasattr(self.config, "minibatches"):
            return step(unpack(packed), *rest)
        size = piece_size(packed["floats" if "floats" in packed else "weight"].shape[-1], self.config.minibatches)
        return step(unpack(take(packed, rest[0]), size), *rest[1:])

    def rows_of(self, packed: dict[str, Any], *rest: Tensor) -> dict[str, Any]:
        return take(packed, rest[0]) if hasattr(self.config, "minibatches") else packed


def rollouts(config: Any, model: Any, **more: Any) -> Rollouts:
    """`rollout_length` rows of each game, cut into sequences where the Model has a memory. `more` arguments of
    `Rollouts`."""
    steps, most = config.rollout_length, getattr(model, "max_seq_len", None)
    length = sequence_length(steps, most)
    memory = getattr(model, "use_lstm", False) or getattr(model, "custom_model", None) is not None
    if memory and most is not None and length < min(most, steps):
        logger.warning(
            "max_seq_len=%d does not divide rollout_length=%d: a network with memory is trained on sequences of %d "
            "steps",
            most,
            steps,
            length,
        )
    return Rollouts(steps, state_every=length, **more)


def sequence_length(steps: int, max_seq_len: int | None) -> int:
    """The longest divisor of the rollout length that is at most `max_seq_len`."""
    return max(n for n in range(1, min(steps, max_seq_len or steps) + 1) if steps % n == 0)


def advantage_rows(
    piece: Piece,
    layout: ActionLayout,
    gamma: float,
    lambda_: float,
    standardize: bool,
    over_ranks: Callable[[Any], Any] = by_itself,
) -> dict[str, Any]:
    """Rows `[N, ...]` with GAE's advantage and its value target; sequences `[L, S, ...]` with their first state where
    the Model has a memory."""
    value = piece.outputs["value"]
    advantage = advantages(piece, gamma, lambda_)
    target = advantage + value[:-1]
    if standardize:
        advantage = returns.standardize(advantage, piece.valid, over_ranks)
    return learning_rows(piece, layout, piece.extras["logp"], value[:-1], advantage, target)


def learning_rows(
    piece: Piece,
    layout: ActionLayout,
    logp: np.ndarray,
    value: np.ndarray,
    advantage: np.ndarray,
    target: np.ndarray,
) -> dict[str, Any]:
    """Columns `[T, B]` and those of the piece as rows `[N, ...]`, or as sequences `[L, S, ...]`."""
    rows = {
        "obs": tree.map(lambda x: x[:-1], piece.seen),
        "action": piece.action,
        "logp": logp,
        "value": value,
        "advantage": advantage,
        "target": target,
        "weight": piece.valid.float() if isinstance(piece.valid, Tensor) else piece.valid.astype(np.float32),
        **masks(piece, layout),
    }
    if piece.state is None:
        return tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    rows["first"] = piece.first[:-1]
    length = piece.state_every
    sequences = tree.map(lambda x: _cut(x, length), rows)
    sequences["state"] = tree.map(lambda x: x.reshape(-1, *x.shape[2:]), piece.state)
    return sequences


def masks(piece: Piece, layout: ActionLayout) -> dict[str, np.ndarray]:
    """`mask [T, B, choices]`, where observations have one."""
    steps = piece.length
    mask = layout.legal(tree.map(lambda x: x[:steps].reshape(-1, *x.shape[2:]), piece.obs))
    return {} if mask is None else {"mask": mask.reshape(steps, -1, mask.shape[-1])}


def memory(piece: Piece) -> dict[str, Any]:
    """What a Model with memory needs to go through a whole piece: `first [T + 1, B]` and the `state` that it begins
    with; empty without one."""
    return {} if piece.state is None else {"first": piece.first, "state": tree.map(lambda x: x[0], piece.state)}


def advantages(piece: Piece, gamma: float, lambda_: float) -> np.ndarray:
    """GAE `[T, B]`, through all columns of a game where they lie in line."""
    columns = (piece.outputs["value"], piece.reward, piece.terminated, piece.truncated, piece.valid)
    if not piece.in_line:
        return returns.gae(*columns, gamma, lambda_)
    steps, batch = piece.reward.shape

    def line(x: np.ndarray) -> np.ndarray:
        """`[B (T + 1), 1]`: column after column, each with its last observation as a dead row behind it."""
        rows = np.zeros((batch, steps + 1), x.dtype)
        rows[:, : len(x)] = x.T
        return rows.reshape(-1, 1)

    value, reward, terminated, truncated, valid = (line(x) for x in columns)
    flags = terminated[:-1], truncated[:-1], valid[:-1]
    advantage = returns.gae(value, reward[:-1], *flags, gamma, lambda_)
    return np.ascontiguousarray(np.append(advantage, np.float32(0.0)).reshape(batch, steps + 1)[:, :-1].T)


def _cut(x: np.ndarray, length: int) -> np.ndarray:
    """`[T, B, ...]` -> `[L, T/L * B, ...]`: runs of L rows, side by side."""
    steps, batch = x.shape[:2]
    pieces = x.reshape(steps // length, length, batch, *x.shape[2:]).swapaxes(0, 1)
    return np.ascontiguousarray(pieces.reshape(length, -1, *x.shape[2:]))


def actor_critic(
    model: nn.Module, batch: dict[str, Any], draws: tuple[Tensor, ...] = (), names: tuple[str, ...] = ("dist", "value")
) -> dict[str, Tensor]:
    """`dist [N, P]` and `value [N]` for the rows of a batch, whether the Model has a memory or not."""
    noise = drawn(model, draws)
    if "first" not in batch:
        outputs = model(batch["obs"], *noise)
        return {k: outputs[k].float() for k in names}
    outputs = model.unroll(batch["obs"], batch["state"], batch["first"], *noise)  # type: ignore[operator]
    return {k: outputs[k].flatten(0, 1).float() for k in names}


def evaluate(model: nn.Module, batch: dict[str, Any], draws: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
    """`dist [T + 1, B, P]` and `value [T + 1, B]` for all observations `[T + 1, B, ...]` of rollouts, the last ones
    too."""
    shape = tree.leaves(batch["obs"])[0].shape[:2]
    if "first" not in batch:
        batch = {"obs": tree.map(lambda x: x.flatten(0, 1), batch["obs"])}
    outputs = actor_critic(model, batch, draws)
    return outputs["dist"].unflatten(0, shape), outputs["value"].unflatten(0, shape)


def evaluate_sequences(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As `evaluate`, for a Model with memory whose sequences each begin with the state that was kept for them, as in
    `learning_rows`: `state [T / L, B, ...]`."""
    (steps, games), count = batch["first"].shape, len(tree.leaves(batch["state"])[0])
    length = (steps - 1) // count

    def runs(x: Tensor) -> Tensor:
        """`[T + 1, B, ...]` -> `[L + 1, T / L * B, ...]`: each with the first row of the next one behind it."""
        return x.unfold(0, length + 1, length).movedim(-1, 0).flatten(1, 2)

    def line(x: Tensor) -> Tensor:
        x = x.unflatten(1, (count, games))
        return torch.cat([x[:-1].transpose(0, 1).flatten(0, 1), x[-1, -1:]])

    cut = {"obs": tree.map(runs, batch["obs"]), "first": runs(batch["first"])}
    dist, value = evaluate(model, cut | {"state": tree.map(lambda x: x.flatten(0, 1), batch["state"])})
    return line(dist), line(value)


def minibatches(rng: np.random.Generator, rows: int, pieces: int, column: Any = None) -> Iterator[Tensor]:
    """A random order of the rows, cut into pieces of which some have one more than the others: two shapes at most, so
    at most two recordings. Where a `column` of them is a tensor, the order is drawn on its device: a million rows take
    0.1 s on a CPU."""
    if isinstance(column, Tensor):
        generator = torch.Generator(column.device).manual_seed(int(rng.integers(1 << 62)))
        yield from torch.randperm(rows, generator=generator, device=column.device).tensor_split(min(pieces, rows))
    else:
        yield from map(torch.from_numpy, np.array_split(rng.permutation(rows), min(pieces, rows)))


@contextmanager
def statistics_of_what_acted(model: nn.Module, obs: Any, weight: np.ndarray, first: bool) -> Iterator[None]:
    """Learn inside it: the statistics by which the Model normalises observations move afterwards, so that ratios and
    gradients are those of the Model that acted. Before the `first` update there are no statistics yet, and they are
    made of its own rows. `obs [..., *]` has the leading axes of `weight`."""
    obs, weight = tree.map(lambda x: x.reshape(-1, *x.shape[weight.ndim :]), obs), weight.reshape(-1)
    if first:
        update_normalizers(model, obs, weight)
    yield
    if not first:
        update_normalizers(model, obs, weight)


def explained_variance(batch: dict[str, Any]) -> float:
    """1 - Var(target - value) / Var(target) over the rows that count; 0 where the targets do not vary."""
    value, target = (batch[k][batch["weight"] > 0] for k in ("value", "target"))
    if isinstance(value, Tensor):
        variance, left = (x.double().var(correction=0).item() if len(x) else 0.0 for x in (target, target - value))
    else:
        variance, left = (float(np.var(x)) if x.size else 0.0 for x in (target, target - value))
    return 1.0 - left / variance if variance > 1e-12 else 0.0


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    # Weight caching would keep casts of old weights inside a recording.
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False)
