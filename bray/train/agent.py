"""What PolicyAgents play with while a policy is trained, and how what happens in their games becomes pieces of
trajectory. It needs no torch.

The reward of a tick is that of the previous action. The tick that ends an episode carries its final observation; its
action is ignored, and the next tick is the first of a new episode (or the session ends). So the ticks of a session are
the rows of a piece by the autoreset rule of `bray/envs/vector.py`:

    tick          0     1     2     3 terminated   4        5
    row           0     1     2     3 dead         4        5
    its reward    r_1   r_2   r_3   0              r_5      r_6 (still to come)

A row is whole when the next tick has come. What `on_episode` gets is therefore one row short: the last tick is kept and
begins the next piece. A piece that ends in the middle of an episode bootstraps from the value of its last tick.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np

from bray import tree
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Decision, Policy, Tick
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.inference.batcher import Collector, Item
from bray.inference.rows import Template, split
from bray.serving.agent import State
from bray.serving.config import LearnConfig
from bray.serving.metrics import Numbers
from bray.serving.model import checked_observations, random_action, refuse_fallback
from bray.serving.policy_actor import BasePolicyAgent, DecisionRows, tell
from bray.serving.values import plain
from bray.spec import ACTION_MASK, EnvSpec

MAX_TICKS = 32
"""Ticks that are decided together at most; a row of a larger forward is hardly cheaper."""
IDLE_TURNS = 3
"""Turns of the loop that bring no tick, after which those that are there are decided."""


class PieceSink(Protocol):
    """Where pieces go."""

    async def push(self, piece: Piece, counts: Counts, session: str = "") -> None: ...

    def end(self, stream: int) -> None:
        """No more pieces of this session will come."""


class ActingModel:
    """What the agents of one name have in common in a process: a Policy, and the model that it asks.

    host       `forward(*args, batch=True, with_step=True)` to await, and maybe `run_now`: a ModelHost, a RemoteModel
    sink       where pieces go; None: it plays and nobody learns
    rewards    what the learner sees of raw rewards `[T, 1]`
    clock      how far training is, for exploration schedules
    count      told of the steps and episodes of every session
    strict     refuse keys of a tick that we do not know: one that is misspelt would be missed by nobody, but the
               learner
    options    how it answers
    """

    def __init__(
        self,
        spec: EnvSpec,
        policy: Policy,
        host: Any,
        *,
        sink: PieceSink | None = None,
        mode: str | None = None,
        initial_state: Any = None,
        state_every: int = 1,
        rewards: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
        clock: Callable[[], Clock] | None = None,
        count: Callable[[Counts], None] = lambda counts: None,
        seed: Any = None,
        strict: bool = False,
        options: LearnConfig | None = None,
    ):
        self.strict, self.learns = strict, sink is not None
        self.spec, self.policy, self.host, self.sink, self.rewards = spec, policy, host, sink, rewards
        self.mode = mode or (GREEDY if sink is None else SAMPLE)
        self.initial_state, self.state_every, self.count = initial_state, state_every, count
        self.clock = clock or (lambda: TRAINED)
        self.rng = np.random.default_rng(seed)
        self.options = options or LearnConfig()
        self.name: str = getattr(host, "name", "policy")
        refuse_fallback(self.options.fallback, spec, self.name)
        self.reward_range = self.options.reward_range if self.learns else math.inf
        most = self.options.obs_range if self.learns else math.inf
        self.observations, self.outside = checked_observations(self.name, spec, self.options, most)
        self.outputs = tuple(dict.fromkeys((*policy.reads, *policy.keeps)))
        self.config: Any = None
        """Of whoever found it."""
        self.warm = False
        """Whether a decision has been made: compiled code is loaded when it is first used."""
        self._template: Template | None = None
        self._turns: dict[asyncio.AbstractEventLoop, TickBatcher] = {}

    @property
    def step(self) -> int:
        """The version that answers."""
        return self.host.step

    def ask(self, agent: BasePolicyAgent, state: Any) -> asyncio.Future[None]:
        """Done when the State is filled, by `agent.decided`."""
        loop = asyncio.get_running_loop()
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = TickBatcher(self, loop)
        return turn.add((agent, state))

    def make_rows(self) -> SessionRows:
        """Of one session."""
        return SessionRows(self.count, self)

    def numbers(self) -> Numbers:
        """For a metrics page."""
        return {f'bray_model_outside_total{{model="{self.name}"}}': 0 if self.outside is None else self.outside.total}

    def random_action(self, mask: np.ndarray | None = None) -> Any:
        return random_action(self.policy, self.rng, mask)

    def warm_up(self) -> None:
        """Decide for nobody, in batches of all sizes that are recorded, so that no game waits until code is loaded and
        forwards are recorded."""
        sample = self.spec.observation.sample(np.random.default_rng(0))
        if self.observations.in_obs:
            sample[ACTION_MASK] = tree.map(np.ones_like, sample[ACTION_MASK])
        obs, mask = self.observations.read(msgspec.Raw(json.dumps(plain(sample)).encode()))
        state = SimpleNamespace(obs=obs, mask=mask, first=True, memory=self.initial_state)
        for rows in (1, 2, 4, 8, 16, 32):
            for _ in range(2):
                deciding = self.decide([state] * rows)
                more = next(deciding)
                while not isinstance(more, Decision):
                    more = _send(deciding, self.host(*more, batch=True))
        self.warm = True

    def decide(self, states: list[Any]) -> Any:
        """The Policy's generator for these ticks."""
        samples = [(s.obs,) for s in states]
        if self._template is None:
            self._template = Template(samples[0])
        (obs,) = self._template.stack(samples)
        if self.outside is not None:
            self.outside.count(obs)
        carry = mask = None
        if self.initial_state is not None:
            carry = tree.stack([s.memory for s in states])
        if any(s.mask is not None for s in states):
            legal = self.observations.all_legal
            mask = np.stack([legal if s.mask is None else s.mask for s in states])
        first = np.array([s.first for s in states])
        return self.policy.decide(Tick(obs, None, first, mask), carry, self.rng, self.mode, self.clock())

    def piece(self, states: list[State], stream: int) -> Piece:
        """The rows of ticks that follow each other: one fewer than ticks, of one game."""
        rows, after = states[:-1], states[1:]
        dead = np.array([[s.terminated or s.truncated] for s in rows])
        reward = np.array([[s.reward] for s in after], np.float32)
        if self.rewards is not None:
            reward = self.rewards(reward, dead)
        extras = _column([s.extras for s in rows])
        state = None
        if self.initial_state is not None:
            state = _column([s.memory for s in rows[:: self.state_every]])
        piece = Piece(
            obs=_column([s.obs for s in states]),
            action=extras.pop("action"),
            reward=np.where(dead, np.float32(0.0), reward),
            terminated=np.array([[s.terminated] for s in after]) & ~dead,
            truncated=np.array([[s.truncated] for s in after]) & ~dead,
            valid=~dead,
            first=np.array([[s.first] for s in states]),
            outputs={k: _column([s.outputs[k] for s in states]) for k in self.policy.keeps},
            extras=extras,
            state=state,
            state_every=self.state_every,
            version=np.array([[s.version] for s in rows]),
            stream=np.array([stream]),
            start=int(states[0].tick),
        )
        return self.policy.label(piece)


class SessionRows:
    """The rows of one session: they are counted, and pushed where somebody learns."""

    def __init__(self, count: Callable[[Counts], None], model: ActingModel | None = None):
        """model: of whom they are learnt from; None: they are counted only"""
        self._count_rows, self._sink = count, None if model is None else model.sink
        self._model, self._every = model, 1 if model is None else model.state_every
        self.stream = secrets.randbits(62)
        self._kept: list[State] = []  # ticks whose rows are not pushed yet
        self._return, self._length = 0.0, 0

    async def add(self, episode: list[State], done: bool) -> None:
        """The States of the next ticks; `done`: there are no more."""
        pieces = list(_cut(self._kept + episode))
        self._kept = []
        for states in pieces:
            rows = len(states) - 1
            if states is pieces[-1] and not done:
                rows -= rows % self._every  # the rest waits until its sequence is full
                self._kept = states[rows:]
            counts = self._count(states[: rows + 1])
            self._count_rows(counts)
            if rows and self._sink is not None:
                assert self._model is not None
                piece = self._model.piece(states[: rows + 1], self.stream)
                await self._sink.push(piece, counts, states[0].session)
            if states is not pieces[-1]:
                self._return = math.nan  # a tick is missing: what this episode made is not known
        if done and self._sink is not None:
            self._sink.end(self.stream)

    def _count(self, states: list[State]) -> Counts:
        """Steps, and returns and lengths of the episodes that end in these rows, raw."""
        steps = 0
        ended: list[tuple[float, int]] = []
        for before, after in pairwise(states):
            if before.first:
                self._return, self._length = 0.0, 0
            if before.terminated or before.truncated:
                continue
            steps += 1
            self._return += after.reward
            self._length += 1
            if (after.terminated or after.truncated) and not math.isnan(self._return):
                ended.append((self._return, self._length))
        return Counts(steps, tuple(ended))


class TickBatcher(Collector):
    """Ticks that are asked about in the same turn of the loop, or while the model is busy, are decided together: one
    forward and one `act` for all.
    As long as each turn brings more of them, up to `MAX_TICKS`, we wait for another: games that play side by side then
    stay together. So we do for a few turns that bring nothing, where more were decided together before: a forward costs
    much, whatever its rows. A lone game waits for one turn, which is microseconds."""

    def __init__(self, model: ActingModel, loop: asyncio.AbstractEventLoop):
        super().__init__(MAX_TICKS, model.options.max_queue, model.options.max_wait_s)
        self._model, self._loop = model, loop
        self._seen = 0  # ticks that waited when we last looked
        self._idle = 0  # turns since then that brought nothing
        self._last = 0  # ticks that were decided together last
        self._running: set[asyncio.Task[None]] = set()

    add = Collector._add
    """An agent and its State -> a future, done when the State is filled by `agent.decided`."""

    def _flush(self) -> None:
        assert self._loop is not None
        self._asleep = False
        self._forget_timer()
        if self._seen < len(self._queue) < MAX_TICKS:
            self._seen, self._idle = len(self._queue), 0
        elif self._idle < IDLE_TURNS and len(self._queue) < self._last:
            self._idle += 1
        else:
            self._start()
            return
        self._loop.call_soon(self._flush)

    def _start(self) -> None:
        # as many forwards at once as the model has workers, and one on its way; more would only be smaller ones
        if len(self._running) > getattr(self._model.host, "num_workers", 0):
            return  # `_ended` goes on
        self._asleep, self._seen, self._idle = True, 0, 0
        items = self._take(max(1, len(self._queue)))
        if not items:
            return
        self._last = len(items)
        try:
            deciding = self._model.decide([item[1][1] for item in items])
            inputs = next(deciding)
            if self._model.warm and not self._running:
                inputs = self._decide_now(items, deciding, inputs)
        except Exception as e:
            self._fail(items, e)
            return
        if inputs is not None:
            assert self._loop is not None
            task = self._loop.create_task(self._decide(items, deciding, inputs))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    def _decide_now(self, items: list[Item], deciding: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Decide inline as long as the model is in this process and quick: None when that is done, else the inputs of
        the forward that is not quick."""
        run_now = getattr(self._model.host, "run_now", None)
        while run_now is not None and (done := run_now(inputs, len(items))) is not None:
            more = _send(deciding, done[0])
            if isinstance(more, Decision):
                self._settle(items, more, done[1])
                return None
            inputs = more
        return inputs

    async def _decide(self, items: list[Item], deciding: Any, inputs: tuple[Any, ...]) -> None:
        model = self._model
        try:
            while True:
                outputs, version = await model.host.forward(*inputs, batch=True, with_step=True)
                more = _send(deciding, outputs) if model.warm else await asyncio.to_thread(_send, deciding, outputs)
                model.warm = True
                if isinstance(more, Decision):
                    break
                inputs = more
            self._settle(items, more, version)
        except Exception as e:
            self._fail(items, e)
        finally:
            for item in items:
                item[0].cancel()  # those that have no answer, because the loop is being closed

    def _settle(self, items: list[Item], decision: Decision, version: int) -> None:
        n = len(items)
        outputs = {k: decision.outputs[k] for k in self._model.outputs if k in decision.outputs}
        action, extras, kept = (split(x, n, n) for x in (decision.action, decision.extras, outputs))
        rows = DecisionRows(action, extras, kept, decision.carry, version)
        for i, (future, (agent, state), *_) in enumerate(items):
            if not future.done():  # else its deadline has passed
                tell(future, agent, state, rows, i)


def _send(deciding: Any, outputs: Any) -> Any:
    """The next inputs of a decision, or the Decision."""
    try:
        return deciding.send(outputs)
    except StopIteration as end:
        return end.value


def _column(rows: list[Any]) -> Any:
    """Trees as one tree `[T, 1, ...]`."""
    if isinstance(rows[0], dict):
        return {k: _column([row[k] for row in rows]) for k in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(_column(list(parts)) for parts in zip(*rows, strict=True))
    return np.array(rows)[:, None]


def _cut(states: list[State]) -> Iterator[list[State]]:
    """The states cut where a tick is missing: one that failed is in no episode, and its neighbours do not follow each
    other."""
    start = 0
    for i, (before, after) in enumerate(pairwise(states), 1):
        if after.tick != before.tick + 1:
            yield states[start:i]
            start = i
    if states:
        yield states[start:]
