"""The ranks that train one model together: each has batches of its own, and all have the same parameters after every
step.

Gradients are averaged as one flat array: in memory that the ranks of a machine share, else by one all-reduce. Small
numbers (who has a batch, who has ended) go over gloo, also where the gradients are on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bray.capture.over_ranks import mean_over_ranks, talk_by
from bray.errors import ConfigError, Unreachable
from bray.nn.normalize import RunningNorm
from bray.optim import Optimizer
from bray.train.shared_mean import SMALLEST, SharedMean


class RankLost(Unreachable):
    """Another rank has died: the group is started again."""


_ALIVE_S = 20.0  # in which a rank that is alive notices that NCCL does not work
_OF_COLLECTIVES = ("gloo/", "NCCL", "ProcessGroup", "c10d")


def is_rank_lost(error: BaseException) -> bool:
    """Whether an error is the echo of another rank's death and not one of the user's code."""
    if isinstance(error, (RankLost, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_COLLECTIVES)


class Ranks:
    """This process and its peers, by torch's process group; alone where there is none, or where `alone` says so."""

    def __init__(self, alone: bool = False) -> None:
        there = not alone and dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if there else 0
        self.size: int = dist.get_world_size() if there else 1
        self.meet()

    def meet(self) -> None:
        """Find each other: again where the others were started anew."""
        self._control: Any = None
        if self.size > 1 and dist.get_backend() != "gloo":
            self._control = dist.new_group(backend="gloo")
        self._shared = SharedMean(self)

    @property
    def first(self) -> bool:
        """Whether this is the rank that publishes, evaluates and saves."""
        return self.rank == 0

    def _run(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except RuntimeError as e:
            raise RankLost(f"rank {self.rank} of {self.size} lost another one: {e}") from e

    def check_gpus(self, device: torch.device) -> None:
        """Add up one number on the GPUs before anything depends on it. NCCL that is set up wrongly fails here, on ranks
        that are all alive; the same error later means that a rank has died."""
        if self._control is None:
            return
        try:
            x = torch.ones(1, device=device)
            dist.all_reduce(x)
            float(x)  # waits for it
        except RuntimeError as e:
            self._run(lambda: dist.monitored_barrier(self._control, timedelta(seconds=_ALIVE_S)))
            why = str(e).strip().splitlines()[-1]
            raise ConfigError(
                f"the GPUs of the {self.size} ranks do not reach each other: {why} NCCL_DEBUG=INFO says more; "
                "NCCL_SOCKET_IFNAME names the network interface; ranks that share a GPU need gpus_per_worker below 1"
            ) from e

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """The sums of some numbers over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def all_reduce_min(self, number: float) -> float:
        """The smallest of the ranks' numbers."""
        return self._reduced((number,), dist.ReduceOp.MIN)[0]

    def all_reduce_max(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return self._reduced((number,), dist.ReduceOp.MAX)[0]

    def _reduced(self, numbers: Sequence[float], op: Any) -> list[float]:
        if self.size == 1:
            return [float(x) for x in numbers]
        x = torch.tensor(numbers, dtype=torch.float64)
        self._run(lambda: dist.all_reduce(x, op, group=self._control))
        return x.tolist()

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all ranks of an array, a new one."""
        if self.size == 1:
            return x.clone()
        by_gloo = self._control is None or not x.is_cuda  # which copies what is on a GPU to the host and back, as here
        if by_gloo and x.numel() >= SMALLEST and x.dtype == torch.float32 and x.dim() == 1:
            shared = self._shared.mean(x)
            if shared is not None:
                return shared
        mean = x.to("cpu" if by_gloo else x.device, copy=True)
        self._run(lambda: dist.all_reduce(mean, group=self._control if by_gloo else None))
        return mean.div_(self.size).to(x.device)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of the first rank."""
        if self.size == 1:
            return
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.detach().reshape(-1) for t in same])
            flat = flat.cpu() if self._control is None else flat
            self._run(lambda flat=flat: dist.broadcast(flat, 0))  # type: ignore[misc]
            with torch.no_grad():
                for t, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                    t.copy_(part.view(t.shape))

    def broadcast(self, data: bytes) -> bytes:
        """The first rank's bytes, on all ranks."""
        if self.size == 1:
            return data
        length = int(self.all_reduce_sum(len(data) if self.first else 0)[0])
        x = (
            torch.from_numpy(np.frombuffer(data, np.uint8).copy())
            if self.first
            else torch.empty(length, dtype=torch.uint8)
        )
        self._run(lambda: dist.broadcast(x, 0, group=self._control))
        return x.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, on all ranks."""
        if self.size == 1:
            return [data]
        sizes = [int(n) for n in self.all_reduce_sum(*[len(data) if r == self.rank else 0 for r in range(self.size)])]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        parts = [torch.empty_like(mine) for _ in sizes]
        self._run(lambda: dist.all_gather(parts, mine, group=self._control))
        return [p.numpy()[:n].tobytes() for p, n in zip(parts, sizes, strict=True)]


def average_gradients(params: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Replace `.grad` of each parameter by its mean over the ranks. A parameter without one counts as zero, unless no
    rank has one."""
    if ranks.size == 1 or not params:
        return
    there = torch.tensor([float(p.grad is not None) for p in params], device=params[0].device)
    parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in params]
    flat = ranks.mean(torch.cat([*parts, there]))
    *means, there = flat.split([*[p.numel() for p in params], len(params)])
    for p, mean, some in zip(params, means, there.tolist(), strict=True):
        p.grad = mean.view(p.shape).to(p.dtype) if some else None


class DistributedLearner:
    """Makes an algorithm's Learner train on several ranks: its Optimizers average their gradients between backward and
    step.

    A Learner of ours takes the same steps on all of them (`same_steps`), and they are recorded. With another one the
    ranks may want different numbers of steps: all make as many as the one that wants the fewest. Each is announced, so
    that nobody waits for a gradient that does not come.
    """

    def __init__(self, learner: Any, ranks: Ranks):
        self.learner, self.ranks = learner, ranks
        self._over = False
        self.differ = False
        """Whether the ranks wanted different numbers of steps in the last update."""
        self._buffers: list[Tensor] = []
        if ranks.size == 1:
            return
        self._announces = not getattr(learner, "same_steps", False)
        if hasattr(learner, "over_ranks"):
            talk_by(ranks.mean)
            learner.over_ranks = mean_over_ranks
        held = (*vars(learner).values(), *getattr(learner, "_parts", {}).values())
        for part in {id(part): part for part in held}.values():
            if isinstance(part, Optimizer):
                part.average = self._average if self._announces else mean_over_ranks
            elif isinstance(part, torch.optim.Optimizer):
                part.register_step_pre_hook(self._average_torch)
            module = getattr(part, "module", part)
            if isinstance(module, nn.Module):
                self._buffers += module.buffers()
                for norm in module.modules() if hasattr(learner, "over_ranks") else ():
                    if isinstance(norm, RunningNorm):
                        norm.over_ranks = mean_over_ranks

    def update(self, batch: Any, clock: Any) -> Any:
        if self.ranks.size == 1:
            return self.learner.update(batch, clock)
        self._over = self.differ = False
        out = self.learner.update(batch, clock)
        if self._announces and not self._over:
            self.differ = self.ranks.all_reduce_sum(0)[0] > 0
        if self.differ:
            self.learner.steps = int(self.ranks.all_reduce_min(self.learner.steps))
        self.ranks.broadcast_tensors(self._buffers)  # statistics of observations: each rank has seen its own
        return out

    def _goes_on(self) -> bool:
        if not self._over and self.ranks.all_reduce_sum(1)[0] < self.ranks.size:
            self._over = self.differ = True
        return not self._over

    def _average(self, grad: Tensor) -> Tensor | None:
        return self.ranks.mean(grad) if self._goes_on() else None

    def _average_torch(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if self._goes_on():
            average_gradients(params, self.ranks)
        else:
            for p in params:
                p.grad = None  # torch leaves such parameters alone
