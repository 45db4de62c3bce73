"""What the pages in this folder share: no algorithm, only glue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bray import tree
from bray.act import Clock, standard_normals
from bray.algos.terms import Terms
from bray.capture import Record, capture
from bray.capture.over_ranks import by_itself
from bray.capture.transfer import to_device
from bray.errors import ConfigError
from bray.schedules import make_schedule
from bray.spec import EnvSpec
from bray.target import Target


@dataclass
class Update:
    """What `Learner.update` returns: numbers for the log, and new priorities for a prioritized replay.

    The numbers stay one tensor until somebody reads `metrics`: an update of a small network is shorter than reading
    them."""

    names: tuple[str, ...]
    values: Tensor
    priorities: np.ndarray | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, numbers: Mapping[str, Tensor], weight: Any = None) -> Update:
        """Numbers by name; those with an entry per row become the sum of these times `weight`, whose shape they
        have."""
        parts = []
        for dims, run in groupby(numbers.values(), Tensor.dim):
            joined = torch.stack(list(run))
            if dims:
                joined = torch.mv(joined, weight) if dims == 1 else (weight * joined).sum((1, 2))
            parts.append(joined)
        return cls(tuple(numbers), torch.cat(parts) if len(parts) > 1 else parts[0])

    @classmethod
    def mean(cls, updates: Sequence[Update]) -> Update:
        """The mean of each number over several gradient steps."""
        return cls(updates[0].names, torch.stack([u.values for u in updates]).mean(0).cpu())

    def __or__(self, more: Mapping[str, float]) -> Update:
        """With more numbers behind its own."""
        if not more:
            return self
        return Update((*self.names, *more), torch.cat([self.values, self.values.new_tensor(list(more.values()))]))

    @property
    def metrics(self) -> dict[str, float]:
        return dict(zip(self.names, self.values.tolist(), strict=True))


# A gradient step returns one, and a recording returns tensors: the names are part of its structure.
pytree.register_pytree_node(Update, lambda u: ([u.values], u.names), lambda x, names: Update(names, *x))


def to_torch(batch: Any, device: torch.device) -> Any:
    """A tree of numpy arrays as tensors on a device; on the CPU they share memory. Tensors are left as they are."""
    if device.type == "cpu":
        if isinstance(batch, dict):  # most are flat: without a walk for each column
            return {
                k: torch.from_numpy(x) if isinstance(x, np.ndarray) else to_torch(x, device) for k, x in batch.items()
            }
        return tree.map(torch.as_tensor, batch)

    def send(x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else to_device(torch.from_numpy(np.ascontiguousarray(x)), device)

    return tree.map(send, batch)


class Learner:
    """In the trainer: batches in, better weights out. What every Learner has: device, learning rate, random state,
    steps, saved state."""

    over_ranks: Callable[[Any], Any] = staticmethod(by_itself)
    """The mean of a tensor or a number over the ranks that train together. Optimizers take that of gradients: whatever
    else the rows of a batch have in common (the sum of their weights, the mean of their advantages) goes through it."""
    same_steps = True
    """Whether the ranks of an update take equally many gradient steps. Where they may not each is announced first, and
    none is recorded."""
    untrained: tuple[str, ...] = ()
    """Outputs of the Model that it leaves as they begin."""

    def __init__(
        self, config: Any, spec: EnvSpec, model: nn.Module, model_config: Any, seed: int = 0, record: Record = True
    ):
        self.config, self.spec, self.model, self.model_config = config, spec, model, model_config
        self.layout, self.record = spec.layout, record
        self.device = next(model.parameters()).device
        if hasattr(config, "lr"):
            self.lr = make_schedule(config.lr)
        self.rng = np.random.default_rng([seed, 1])
        self.steps = 0
        """Gradient steps; the version of the weights."""
        self._scheduled: dict[str, tuple[Callable[[int], float], Tensor]] = {}
        self._draws = dict(getattr(model, "draws", None) or {})  # asked once: a Model looks through its layers for it
        self._parts = self.build()
        if not isinstance(self._parts, dict):
            raise ConfigError(
                f"{type(self).__name__}.build: expected what checkpoints hold, by name, got {self._parts}"
            )
        self._step = capture(self.make_step(), self.record, f"{type(self).__name__}.gradient_step")
        terms = getattr(model_config, "loss_terms", None)
        self.terms = Terms(terms, model, self._parts) if terms else None
        """Terms of the user's own in the Model's loss."""
        if self.terms is not None:
            for step in vars(self).values():  # `_step`, and those that a page recorded for itself
                if isinstance(step, capture):
                    step.fn = partial(self._with_terms, step.fn)

    def build(self) -> dict[str, Any]:
        """Make optimizers, targets, critics; returns those that checkpoints hold, by name: whatever has a `state_dict`,
        and parameters."""
        raise NotImplementedError

    def prepare(self, data: Any) -> Any:
        """What a batch goes through before `update`, maybe in another thread: advantages and the like. It reads no
        weights."""
        return data

    def update(self, batch: Any, clock: Clock) -> Update:
        """Learn from what `prepare` returned."""
        raise NotImplementedError

    def gradient_step(self, *args: Any) -> Any:
        """Forward, losses, gradients, optimizers: a function of tensors, such as `Update.of` returns."""
        raise NotImplementedError

    def make_step(self) -> Callable[..., Any]:
        """What is recorded and called by `update`: here the gradient step itself."""
        return self.gradient_step

    def rows_of(self, batch: Any, *rest: Any) -> Any:
        """The rows that a gradient step with these arguments learns from."""
        return batch

    def _with_terms(self, step: Callable[..., Any], *args: Any) -> Any:
        assert self.terms is not None
        with self.terms.added(self.rows_of(*args)):
            return step(*args)

    @property
    def is_recorded(self) -> bool:
        """Whether gradient steps replay a recording."""
        return self._step.recordings > 0

    def scheduled(self, name: str, default: float = 0.0) -> Tensor:
        """A number of the config that may be a schedule (null: `default`), as a tensor: recorded steps read what
        `follow_schedules` writes there."""
        said = getattr(self.config, name)
        schedule = make_schedule(default if said is None else said)
        number = torch.tensor(schedule(0), dtype=torch.float32, device=self.device)
        if isinstance(said, dict):
            self._scheduled[name] = schedule, number
        return number

    def follow_schedules(self, clock: Clock) -> None:
        """Called by `update`, first: what is `scheduled` gets the value of now."""
        for schedule, number in self._scheduled.values():
            number.fill_(schedule(clock.env_steps))

    def draw(self, count: int = 1) -> list[Tensor]:
        """The Model's random inputs (`model.draws`), `count` of each, as tensors."""
        if not self._draws:
            return []
        noise = standard_normals({name: (count, *shape) for name, shape in self._draws.items()}, self.rng)
        return [torch.from_numpy(x).to(self.device) for x in noise.values()]

    def numbers(self) -> dict[str, float]:
        """What a result row says beside the metrics of updates: terms of the user's own, and where schedules stand."""
        scheduled = {name: float(number) for name, (_, number) in self._scheduled.items()}
        if self.terms is None:
            return scheduled
        if self.steps > 100 and not self.terms.names:
            raise ConfigError("loss_terms: this algorithm takes no step with the loss of its Model; leave them out")
        self.terms.require_free(scheduled)
        return scheduled | self.terms.numbers()

    def start_with_model(self) -> None:
        """The Model has got weights from elsewhere: targets that are copies of it begin with them too."""
        weights = self.model.state_dict()
        for part in self._parts.values():
            if isinstance(part, Target) and part.state_dict().keys() == weights.keys():
                part.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, targets, counters and random state; the Model's weights are its owner's."""
        parts: dict[str, Any] = {}
        for name, part in self._parts.items():
            state = {"": part} if isinstance(part, Tensor) else part.state_dict()
            parts[name] = {k: v.detach().cpu().numpy().copy() for k, v in state.items()}
        return {"parts": parts, "rng": self.rng.bit_generator.state, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["parts"].items():
            part, tensors = self._parts[name], {k: torch.from_numpy(np.array(v)) for k, v in values.items()}
            if isinstance(part, Tensor):
                part.data.copy_(tensors[""])
            else:
                part.load_state_dict(tensors)
        self.rng.bit_generator.state = state["rng"]
        self.steps = int(state["steps"])


def drawn(model: nn.Module, draws: list[Tensor] | tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """One draw of each random input as the last argument of a Model that has such; nothing for one that has none."""
    names = getattr(model, "draws", None) or {}
    return (dict(zip(names, draws, strict=True)),) if names else ()


def check_bounded(spec: EnvSpec) -> None:
    """Refuse an action space that is not a Box with finite bounds: the algorithm's actions are scaled to them."""
    if not spec.layout.continuous:
        raise ConfigError(f"this algorithm needs a Box action space, {spec.id} has {spec.action.kind}")
    low, high = spec.layout.bounds()
    if not np.isfinite([low, high]).all():
        raise ConfigError(
            f"this algorithm scales its actions to the bounds of the action space, and {spec.id} has low "
            f"{low.tolist()} and high {high.tolist()}: give them with env.action_bounds=[low, high], or use PPO or "
            "A2C, which need none"
        )
