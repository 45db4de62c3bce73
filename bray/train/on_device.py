"""Environments of tensors, played where the learner computes: forward, draw, step and columns stay on the device and
are recorded; once per piece, counts and episodes come to the host.   T rows, B environments."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import distributions, tree
from bray.act import Policy
from bray.act.rules import Distribution
from bray.algos import rows
from bray.capture import Record, capture
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.envs.device import DeviceVecEnv, to_numpy
from bray.errors import EnvError
from bray.inference.torch_engine import TorchEngine
from bray.rl import returns
from bray.spec import ActionLayout
from bray.train.rollout import EnvSource, Rollout


def why_not_on_device(rollout: Rollout, side: Any) -> str:
    """Why a piece cannot stay on the device from the environment to the update, in words; empty where it can."""
    policy, learner, layout = side.policy, side.learner, side.policy.layout
    assert isinstance(rollout.env, DeviceVecEnv)
    plays, learns = rollout.env.tensors.device, learner.device
    assert plays is not None
    if (plays.type, plays.index or 0) != (learns.type, learns.index or 0):
        return f"it plays on {plays}, and {learns} learns (--device)"
    if (
        not (isinstance(learner, rows.Learner) and isinstance(side.experience, Rollouts))
        or side.experience.asynchronous
    ):
        return "this algorithm takes arrays; PPO and A2C take tensors"
    if rollout.state is not None:
        return "its network has a memory"
    if getattr(learner, "novelty", None):
        return "rnd takes arrays"
    if side.experience.mixes:
        return "files beside it are arrays"
    usual = type(policy).decide is Policy.decide and type(policy).act is Policy.act and not policy.draws
    if not usual or type(policy.rule) is not Distribution:
        return "its policy decides in a way of its own"
    own = any(not hasattr(distributions.DISTRIBUTIONS[part.kind], "pick") for part in layout.parts)
    if own or layout.space.composite:
        return f"its actions are drawn one part after the other ({layout.space.kind})"
    return ""


class DeviceSource(EnvSource):
    """The rows that EnvSource would make, as tensors. With callbacks of episodes, which see single steps, it is one."""

    def __init__(self, rollout: Rollout, rows: int, record: Record):
        super().__init__(rollout, rows, record=record)
        assert isinstance(rollout.env, DeviceVecEnv)
        self._tensors, self._record = rollout.env.tensors, record
        self._device: torch.device = self._tensors.device  # type: ignore[assignment]
        self._reads = rollout.policy.reads if self._later is not None else (*rollout.policy.reads, *self._keep)
        self._columns_made = False
        self._clocks: list[Any] = []

    # --- what is kept on the device -----------------------------------------------------------------------------------

    def _make_columns(self) -> None:
        rollout, layout, device = self.rollout, self.rollout.policy.layout, self._device
        steps, games = self.rows, rollout.env.num_envs

        def column(rows: int, kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, games, *shape, dtype=kind, device=device)

        def like(x: np.ndarray) -> Tensor:
            return column(steps + 1, torch.from_numpy(x[:1]).dtype, *x.shape[1:])

        self._obs = tree.map(lambda x: torch.from_numpy(x).to(device), rollout.obs)
        self._action = torch.zeros(games, *layout.shape, dtype=_kind(layout), device=device)
        self._first, self._dead, self._returns, self._lengths = (
            torch.from_numpy(x.copy()).to(device)
            for x in (rollout.first, rollout.env.dead, rollout.returns, rollout.lengths.astype(np.float64))
        )
        self._of_obs = tree.map(like, rollout.obs)
        self._of_action = column(steps, _kind(layout), *layout.shape)
        self._of_logp, self._of_reward = column(steps, torch.float32), column(steps, torch.float32)
        self._of_value = column(steps + 1, torch.float32)
        self._flags = torch.zeros(steps, 3, games, dtype=torch.bool, device=device)  # terminated, truncated, valid
        self._noise = torch.zeros(steps, games, sum(part.n for part in layout.parts), device=device)
        self._engine = TorchEngine(rollout.engine.model, self._reads, self._record)
        self._units = in_its_units(layout, device)
        self._at = list(torch.arange(steps, device=device).split(1))
        recorded = bool(self._record)
        self._decide = capture(self._decide_row, recorded, "acting on the device")
        if self._tensors.recordable:
            self._step = capture(self._step_and_take, recorded, f"the step of {rollout.env.spec.id}")
        else:
            self._take = capture(self._take_row, recorded, "keeping rows on the device")
            self._step = self._step_then_take  # type: ignore[assignment]
        self._generator = torch.Generator(device)
        self._columns_made = True

    def _decide_row(self, at: Tensor) -> tuple[()]:
        """Actions for the observations that there are now, and both as row `at`."""
        layout, obs = self.rollout.policy.layout, self._obs
        outputs = self._engine._forward(obs)
        noise = self._noise.index_select(0, at)[0]
        action, logp = distributions.pick(layout, outputs["dist"].float(), noise, layout.mask(obs))
        self._action.copy_(action)
        tree.map(lambda column, x: column.index_copy_(0, at, x[None]), self._of_obs, obs)
        self._of_action.index_copy_(0, at, action[None].to(self._of_action.dtype))
        self._of_logp.index_copy_(0, at, logp[None])
        if "value" in outputs:
            self._of_value.index_copy_(0, at, outputs["value"].float()[None])
        return ()

    def _step_and_take(self, at: Tensor) -> tuple[()]:
        return self._take_row(at, *self._tensors.step(self._units(self._action)))

    def _step_then_take(self, at: Tensor) -> None:
        """For environments that are more than operations of torch."""
        self._take(at, *self._tensors.step(self._units(self._action)))

    def _take_row(self, at: Tensor, obs: Any, reward: Tensor, terminated: Tensor, truncated: Tensor) -> tuple[()]:
        """What the environments answered to row `at`. Whatever can be told from the whole piece is not done here:
        small operations are what a row costs."""
        self._of_reward.index_copy_(0, at, reward[None])
        self._flags.index_copy_(0, at, torch.stack([terminated, truncated, ~self._dead])[None])
        self._dead.copy_(terminated | truncated)
        tree.map(lambda mine, x: mine.copy_(x), self._obs, obs)
        return ()

    def _sums(self, numbers: Tensor, ended: Tensor, before: Tensor) -> Tensor:
        """`[T, B]` of each episode up to a row, from `before` on, which becomes what the next piece begins with."""
        goes_on = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]]).double()
        numbers = torch.cat([(numbers[0] + before)[None], numbers[1:]])
        sums = returns.discounted_sum(numbers.flip(0), goes_on.flip(0)).flip(0)
        before.copy_(sums[-1] * ~ended[-1])
        return sums

    # --- the source ---------------------------------------------------------------------------------------------------

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        rollout = self.rollout
        if rollout.watch is not None or rollout.output is not None:
            return super().gather(timeout)
        if not self._columns_made:
            self._make_columns()
        began = time.perf_counter()
        self._generator.manual_seed(int(rollout.rng.integers(1 << 62)))
        distributions.fill_noise(rollout.policy.layout, self._noise, self._generator)
        middle = self.rows // 2
        for t, at in enumerate(self._at):
            if t == middle:  # one row stands for all: where their time goes
                marks = [self._mark()]
                self._decide(at)
                marks.append(self._mark())
                self._step(at)
                marks.append(self._mark())
            else:
                self._decide(at)
                self._step(at)
        values = self._values()
        tree.map(lambda column, x: column[-1].copy_(x), self._of_obs, self._obs)
        terminated, truncated, valid = self._flags.unbind(1)
        ended = terminated | truncated
        first = torch.cat([self._first[None], ~valid])  # the row after a dead one is the first of an episode
        self._first = first[-1]
        steps, finite, *_ = torch.stack([valid.sum().double(), self._finite().double()]).tolist()
        self._split(marks, time.perf_counter() - began)
        if not finite:
            self._blame()
        of_return = self._sums(self._of_reward.double(), ended, self._returns)
        of_length = self._sums(valid.double(), ended, self._lengths)
        episodes = torch.stack([of_return[ended], of_length[ended]], 1).cpu().numpy()
        left = rollout.episodes_left
        if left is not None and len(episodes) >= left:
            return self._last_episodes(episodes[:left], ended, valid)
        rollout.env_steps += int(steps)
        if left is not None:
            rollout.episodes_left = left - len(episodes)
        columns: dict[str, Any] = {
            "obs": self._of_obs,
            "action": self._of_action,
            "reward": self._learned(ended),
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "first": first,
            "outputs": values,
            "extras": {"logp": self._of_logp},
        }
        piece = Piece(**columns, version=rollout.version)
        return [rollout.policy.label(piece)], Counts(int(steps), episodes)

    def _values(self) -> dict[str, Tensor]:
        """Of all T + 1 rows: in one forward, or of the last one alone where acting computed the others."""
        if not self._keep:
            return {}
        if self._later is None:
            self._of_value[-1].copy_(self._engine._forward(self._obs)["value"])
            return {"value": self._of_value}
        tree.map(lambda column, x: column[-1].copy_(x), self._of_obs, self._obs)
        flat = tree.map(lambda x: x.flatten(0, 1), self._of_obs)
        return {"value": self._later._forward(flat)["value"].float().view(self.rows + 1, -1)}

    def _learned(self, ended: Tensor) -> Tensor:
        """Rewards as the learner sees them."""
        change = self.rollout.rewards
        if change is None:
            return self._of_reward
        raw, ends = to_numpy(self._of_reward), to_numpy(ended)
        return torch.from_numpy(np.stack([change(raw[t], ends[t]) for t in range(self.rows)])).to(self._device)

    def _last_episodes(self, episodes: np.ndarray, ended: Tensor, valid: Tensor) -> tuple[list[Piece], Counts]:
        """The last episode to be counted ended in this piece, from which nothing is learnt: updates have a fixed
        shape."""
        per_row = to_numpy(ended.sum(1)).cumsum()
        row = int(np.searchsorted(per_row, len(episodes)))
        steps = int(valid[: row + 1].sum())
        self.rollout.episodes_left = 0
        self.rollout.env_steps += steps
        return [], Counts(steps, episodes)

    def _finite(self) -> Tensor:
        real = [x for x in (self._of_reward, *tree.leaves(self._of_obs)) if x.is_floating_point()]
        return torch.stack([x.sum().isfinite() for x in real]).all()

    def _blame(self) -> None:
        named = [("reward", self._of_reward), *tree.paths(self._of_obs, "observation")]
        for name, x in named:
            if x.is_floating_point() and len(bad := (~x.isfinite()).nonzero()):
                t, b = bad[0, :2].tolist()
                raise EnvError(
                    f"{self.rollout.env.spec.id}, environment {b}, row {t} of the rollout: the {name} is "
                    f"{float(x[tuple(bad[0].tolist())])}. Correct the environment."
                )

    def _mark(self) -> Any:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            return mark
        return time.perf_counter()

    def _split(self, marks: list[Any], seconds: float) -> None:
        """The time of a piece, by the share of its parts in one row."""
        if self._device.type == "cuda":
            forward, env = (a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        else:
            forward, env = (b - a for a, b in itertools.pairwise(marks))
        share = env / (forward + env) if forward + env > 0 else 0.5
        self.rollout.seconds["env"] += seconds * share
        self.rollout.seconds["forward"] += seconds * (1.0 - share)

    # --- resume -------------------------------------------------------------------------------------------------------

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        if self._columns_made:
            rollout = self.rollout
            rollout.obs = to_numpy(self._obs)
            rollout.first, rollout.returns, lengths, rollout.env.dead = (
                to_numpy(x) for x in (self._first, self._returns, self._lengths, self._dead)
            )
            rollout.lengths = lengths.astype(np.int64)
        return super().get_state(midway)

    def set_state(self, state: dict[str, Any], clock: Any) -> bool:
        exact = super().set_state(state, clock)
        self._columns_made = False  # made anew, from where the environments are now
        return exact


def _kind(layout: ActionLayout) -> torch.dtype:
    return torch.int64 if layout.discrete else torch.float32


def in_its_units(layout: ActionLayout, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`layout.to_env` for tensors of a device, where the action is not composite."""
    space, kind = layout.space, getattr(torch, str(np.dtype(layout.space.dtype)))
    if space.kind == "box":
        low, high = (torch.from_numpy(x.astype(np.float32)).to(device) for x in layout.bounds())
        bounded = low.isfinite() & high.isfinite()
        origin, span = torch.where(bounded, low, 0.0), torch.where(bounded, high - low, 1.0)
        whole = np.dtype(space.dtype).kind in "iu"

        def scaled(action: Tensor) -> Tensor:
            within = origin + (action.clamp(-1.0, 1.0) + 1.0) * 0.5 * span
            action = torch.where(bounded, within, action).clamp(low, high)
            return (action.round() if whole else action).reshape(-1, *space.shape).to(kind)

        return scaled
    start = torch.tensor(space.start if space.n else 0, device=device).squeeze(-1 if layout.single else ())
    return lambda action: (action + start).reshape(-1, *space.shape).to(kind)
