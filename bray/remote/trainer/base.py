"""`bray.Trainer`: a loss is all that has to be written; the rest of training is done around it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.algos.base import Update
from bray.errors import BrayError, ConfigError
from bray.train.ranks import Ranks, average_gradients

LEARNING_RATE = 5e-4


class Trainer:
    """What is particular to a training: how batches are prepared, the loss, the evaluation.

        class Imitate(bray.Trainer):
            def loss(self, replay):
                return F.cross_entropy(self.model(replay["obs"]), replay["action"])

    A constructor of your own takes `(name, config, model)` or `(name, config, model, optimizer)`. Gradients are
    averaged over all ranks, so a loss that is a mean needs to know nothing of them. `state_dict` and `load_state_dict`,
    if you write them, put what you keep into checkpoints (arrays, numbers, text).
    """

    def __init__(self, name: str, config: Mapping[str, Any], model: nn.Module, optimizer: Any = None):
        self.name, self.config, self.model, self.optimizer = name, config, model, optimizer

    @staticmethod
    def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer, before the Trainer is made. Overwrite it for another one than Adam."""
        return torch.optim.Adam(model.parameters(), lr=learning_rate)

    def handle(self, replay: Any) -> Any:
        """Prepare a batch, a tree of numpy arrays. Runs in a thread beside training. What it leaves as arrays reaches
        the loss as tensors on the model's device."""
        return replay

    def loss(self, replay: Any, step: int) -> Any:
        """The loss of a batch: a tensor with one element, or (that, numbers for the log by name). It may also be
        `loss(self, replay)`."""
        raise NotImplementedError

    def eval(self, replay: Any) -> Any:
        """Look at a batch of the evaluation's buffer, without gradients; may return numbers for the log by name. By
        default: the loss."""
        return call_loss(self, replay, 0)


def takes(function: Any, positions: int, name: str) -> bool:
    """Whether a function takes so many positional arguments, or one of this name."""
    params = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL or p.name == name for p in params):
        return True
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in params) >= positions


def call_loss(trainer: Any, replay: Any, step: int) -> Any:
    return trainer.loss(replay, step) if takes(trainer.loss, 2, "step") else trainer.loss(replay)


def named(value: Any, what: str, default: str) -> dict[str, Any]:
    """What a user's `loss` or `eval` returned, as numbers by name."""
    if value is None:
        return {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return {default: value[0], **value[1]}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Tensor, float, int, np.generic)):
        return {default: value}
    raise BrayError(f"{what}: expected a number, or numbers by name, got {type(value).__name__}")


class LossLearner:
    """The Learner that is made of a Trainer: its `update` follows the gradient of `loss`."""

    def __init__(
        self,
        cls: type,
        name: str,
        config: Mapping[str, Any],
        model: nn.Module,
        ranks: Ranks,
        learning_rate: float | None = None,
        max_grad_norm: float | None = 1.0,
    ):
        self.model, self.ranks, self.max_grad_norm = model, ranks, max_grad_norm
        make = getattr(cls, "make_optimizer", Trainer.make_optimizer)
        self.optimizer: torch.optim.Optimizer = make(model, LEARNING_RATE if learning_rate is None else learning_rate)
        args = (name, config, model, self.optimizer)
        self.trainer = cls(*args) if takes(cls, 4, "optimizer") else cls(*args[:3])
        self.what = f"{cls.__qualname__}.loss"
        self._with_step = takes(self.trainer.loss, 2, "step")
        self.steps = 0

    def update(self, batches: Sequence[Any], clock: Any = None) -> Update:
        """One step down the mean gradient of some batches, each as large as memory allows."""
        self.optimizer.zero_grad(set_to_none=True)
        seen: dict[str, list[Any]] = {}
        for replay in batches:
            out = self.trainer.loss(replay, self.steps) if self._with_step else self.trainer.loss(replay)
            numbers = named(out, self.what, "loss")
            loss = out[0] if isinstance(out, tuple) else out
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise BrayError(
                    f"{self.what}: expected a tensor with one element that has a gradient, got {_describe(loss)}"
                )
            (loss if len(batches) == 1 else loss / len(batches)).backward()
            for name, value in numbers.items():
                seen.setdefault(name, []).append(value)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        average_gradients(params, self.ranks)
        seen["grad_norm"] = [nn.utils.clip_grad_norm_(params, self.max_grad_norm or torch.inf)]
        self.optimizer.step()
        self.ranks.broadcast_tensors(list(self.model.buffers()))  # such as batch statistics: each rank has seen its own
        self.steps += 1
        values = [
            torch.stack([torch.as_tensor(v).detach().float().cpu().reshape(()) for v in vs]).mean()
            for vs in seen.values()
        ]
        return Update(tuple(seen), torch.stack(values))

    def prepare(self, data: Any) -> Any:
        return data  # `handle_batch` has run in the feed's thread

    def handle_batch(self, replay: Any) -> Any:
        """A batch as the loss gets it."""
        device = next(self.model.parameters()).device
        handle = getattr(self.trainer, "handle", None)
        return to_tensors(replay if handle is None else handle(replay), device)

    def evaluate(self, replay: Any) -> dict[str, Any]:
        """The numbers of one batch of the evaluation."""
        self.model.eval()
        try:
            with torch.no_grad():
                return named(self.trainer.eval(replay), f"{type(self.trainer).__qualname__}.eval", "loss")
        finally:
            self.model.train()

    def state_dict(self) -> dict[str, Any]:
        parts = {"optimizer": to_arrays(self.optimizer.state_dict())}
        if hasattr(self.trainer, "state_dict"):
            parts["trainer"] = to_arrays(self.trainer.state_dict())
        return {"parts": parts, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = state["parts"]
        try:
            self.optimizer.load_state_dict(to_tensors(parts["optimizer"], torch.device("cpu")))
        except ValueError as e:
            raise ConfigError(
                f"the checkpoint's optimizer is another one than {type(self.optimizer).__name__} ({e})"
            ) from None
        if "trainer" in parts and hasattr(self.trainer, "load_state_dict"):
            self.trainer.load_state_dict(parts["trainer"])
        self.steps = int(state["steps"])


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}" + ("" if x.requires_grad else " without one")
    return type(x).__name__


def to_tensors(data: Any, device: torch.device) -> Any:
    """Arrays of a tree as tensors on a device; other leaves stay as they are."""

    def convert(x: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biufc":
            array = np.asarray(x)
            x = torch.from_numpy(array if array.flags.writeable else array.copy())
        return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

    return tree.map(convert, data)


def to_arrays(data: Any) -> Any:
    """Tensors of a tree as arrays, for a checkpoint."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()

    return tree.map(convert, data)
