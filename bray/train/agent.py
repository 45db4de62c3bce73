"""PolicyAgent: an algorithm's Policy plays a live game, and what happens in it becomes pieces of trajectory. It needs
no torch.

The game sends `{"obs": ..., "reward": r, "terminated": false, "truncated": false}` at every tick, maybe with an
`action_mask`, and gets `{"action": ..., "version": ...}`. The reward is that of the previous action. The tick that ends
an episode carries its final observation; its action is ignored, and the next tick is the first of a new episode (or the
session ends). So the ticks of a session are the rows of a piece by the autoreset rule of `bray/envs/vector.py`:

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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from bray import tree
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Decision, Policy, Tick
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.errors import DataError, did_you_mean
from bray.inference.batcher import Collector, Item
from bray.inference.rows import Template, split
from bray.serving.actor import FAILURES
from bray.serving.agent import Agent, State
from bray.serving.protocol import malformed
from bray.serving.values import Observations, plain
from bray.spec import ACTION_MASK, EnvSpec

_SHOWN = 1 << 12  # bytes of a tick that is decoded only to say what is wrong with it
MAX_TICKS = 32
"""Ticks that are decided together at most; a row of a larger forward is hardly cheaper."""


class _Message(msgspec.Struct):
    """A tick whose observation is left as it is written."""

    obs: msgspec.Raw
    reward: Any = msgspec.UNSET
    terminated: Any = False
    truncated: Any = False
    action_mask: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _StrictMessage(_Message, forbid_unknown_fields=True):
    pass


_decode_tick = msgspec.json.Decoder(_Message).decode
_decode_strictly = msgspec.json.Decoder(_StrictMessage).decode
_KEYS = _Message.__struct_fields__
_LARGEST = float(np.finfo(np.float32).max)  # of a reward: learners count in float32


class Observed(NamedTuple):
    """What a game said in a tick, not checked yet."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    mask: Any = None


class PieceSink(Protocol):
    """Where pieces go."""

    async def push(self, piece: Piece, counts: Counts) -> None: ...


class Player:
    """What the agents of one name have in common in a process.

    model      `forward(*args, batch=True, with_step=True)` to await, and maybe `run_now`: a ModelHost, a RemoteModel
    sink       where pieces go; None: it plays and nobody learns
    rewards    what the learner sees of raw rewards `[T, 1]`
    clock      how far training is, for exploration schedules
    strict     refuse keys of a tick that we do not know: one that is misspelt would be missed by nobody, but the
               learner
    """

    def __init__(
        self,
        spec: EnvSpec,
        policy: Policy,
        model: Any,
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
    ):
        self.strict = strict
        self.spec, self.policy, self.model, self.sink, self.rewards = spec, policy, model, sink, rewards
        self.mode = mode or (GREEDY if sink is None else SAMPLE)
        self.initial_state, self.state_every, self.count = initial_state, state_every, count
        self.clock = clock or (lambda: TRAINED)
        self.rng = np.random.default_rng(seed)
        self.observations = Observations(spec)
        self.outputs = tuple(dict.fromkeys((*policy.reads, *policy.keeps)))
        self.config: Any = None
        """Of whoever found it."""
        self.warm = False
        """Whether a decision has been made: compiled code is loaded when it is first used."""
        self._template: Template | None = None
        self._turns: dict[asyncio.AbstractEventLoop, TickBatcher] = {}

    def turn(self) -> TickBatcher:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._turns:
            self._turns[loop] = TickBatcher(self, loop)
        return self._turns[loop]

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
                    more = _send(deciding, self.model(*more, batch=True))
        self.warm = True

    def decide(self, states: list[Any]) -> Any:
        """The Policy's generator for these ticks."""
        samples = [(s.obs,) for s in states]
        if self._template is None:
            self._template = Template(samples[0])
        (obs,) = self._template.stack(samples)
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


class PolicyAgent(Agent):
    """Plays with a Policy and the newest weights of a model; in training, what happens goes to a sink.

    Override `observe` and `answer` for a game that speaks otherwise. Every State of an episode then has the fields
    `obs`, `reward`, `terminated`, `truncated`, `first`, `outputs` (of the model), `extras` and `action` (of the
    Policy), and `version` (of the weights).
    """

    late_input = True

    def __init__(self, name: str, config: Any, state: State):
        super().__init__(name, config, state)
        self.player = self.find_player(name, config)
        self.memory = self.player.initial_state
        self.stream = secrets.randbits(62)
        self._first = True
        self._turn: TickBatcher | None = None  # of the loop that this session is played in
        self._kept: list[State] = []  # ticks whose rows are not pushed yet
        self._return, self._length = 0.0, 0

    @staticmethod
    def find_player(name: str, config: Any) -> Player:
        """What this session shares with the others; `config[name]` is the agent's section."""
        return config[name]["player"]

    def observe(self, state: State) -> tuple[Any, ...]:
        """(observation, reward of the previous action, terminated, truncated) of a tick, and maybe a mask of legal
        choices. The observation may be lists or arrays, or JSON that is not decoded yet."""
        data = state.unread()
        if data is not None:
            try:
                tick = _decode_strictly(data) if self.player.strict else _decode_tick(data)
            except (ValueError, RecursionError) as e:
                if len(data) > _SHOWN:  # else it is told below; decoded, it may be thirty times as large
                    raise DataError(f'expected {{"obs": ...}}, got {len(data)} bytes that are not: {e}') from None
            else:
                reward = None if tick.reward is msgspec.UNSET else tick.reward
                ends = _flag("terminated", tick.terminated), _flag("truncated", tick.truncated)
                return Observed(tick.obs, self._reward(reward), *ends, tick.action_mask)
        tick = state.input
        if not isinstance(tick, Mapping) or "obs" not in tick:
            raise DataError(
                f'expected {{"obs": ..., "reward": ..., "terminated": ..., "truncated": ...}}, got {tick!r:.60}'
            )
        unknown = [str(key) for key in tick if key not in _KEYS] if self.player.strict else ()
        if unknown:
            raise DataError(
                f"expected a tick of {', '.join(_KEYS)}, got {unknown[0][:40]!r} too.{did_you_mean(unknown[0], _KEYS)}"
            )
        ends = _flag("terminated", tick.get("terminated")), _flag("truncated", tick.get("truncated"))
        return Observed(tick["obs"], self._reward(tick.get("reward")), *ends, tick.get("action_mask"))

    def _reward(self, reward: Any) -> Any:
        """What came as reward; a learner needs one for every action."""
        if reward is None and self.player.sink is not None and not self._first:
            raise DataError("expected the reward of the previous action, got none")
        return 0.0 if reward is None else reward

    def answer(self, state: State, action: Any) -> None:
        """Tell the game what to do; `action` is one action of the environment's space."""
        state.output["action"] = plain(action)
        state.output["version"] = state.version

    def on_tick(self, state: Any) -> Awaitable[None]:
        # no coroutine, which would need a task for every tick
        try:
            seen = Observed(*self.observe(state))
            if not self.player.warm:
                return self._first_tick(state, seen)
            return self._ask(state, seen, *self.player.observations.read(seen.obs, seen.mask))
        except DataError as e:
            raise malformed(str(e)) from None

    async def _first_tick(self, state: Any, seen: Observed) -> None:
        """Compiled code is loaded when it is first used, which takes a second: in a thread, so that the loop goes
        on."""
        try:
            obs, mask = await asyncio.to_thread(self.player.observations.read, seen.obs, seen.mask)
            asking = self._ask(state, seen, obs, mask)
        except DataError as e:
            raise malformed(str(e)) from None
        await asking

    def _ask(self, state: Any, seen: Observed, obs: Any, mask: np.ndarray | None) -> asyncio.Future[None]:
        """Have this tick decided on, together with those of other games; then `decided` is called."""
        reward = _number(seen.reward)
        if mask is not None and self.player.sink is not None and not self.player.observations.in_obs:
            raise DataError(
                "action_mask came beside obs, but there is none in the observation space, so what is learnt would "
                "ignore it: add action_mask to the (Dict) observation space"
            )
        first, self._first = self._first, seen.terminated or seen.truncated
        if first:
            self.memory = self.player.initial_state
        state.obs, state.mask, state.reward, state.first = obs, mask, reward, first
        state.terminated, state.truncated = seen.terminated, seen.truncated
        if self.memory is not None:
            state.memory = self.memory
        if self._turn is None:
            self._turn = self.player.turn()
        return self._turn.ask(self, state)

    def decided(self, state: Any, rows: DecisionRows, i: int) -> None:
        """What was decided for this tick is row i."""
        if self.memory is not None:
            # of the type that it began with, whatever came back; and a copy: a row would keep its whole batch alive
            self.memory = tree.map(lambda a, x: np.array(x[i], a.dtype), self.memory, rows.carry)
        state.outputs, state.version = rows.outputs[i], rows.version
        state.extras, state.action = rows.extras[i], rows.action[i]
        self.answer(state, state.action)

    async def on_episode(self, episode: list[State], done: bool) -> None:
        pieces = list(_cut(self._kept + episode))
        self._kept = []
        player = self.player
        for states in pieces:
            rows = len(states) - 1
            if states is pieces[-1] and not done:
                rows -= rows % player.state_every  # the rest waits until its sequence is full
                self._kept = states[rows:]
            counts = self._count(states[: rows + 1])
            player.count(counts)
            if rows and player.sink is not None:
                piece = player.piece(states[: rows + 1], self.stream)
                await player.sink.push(piece, counts)
            if states is not pieces[-1]:
                self._return = math.nan  # a tick is missing: what this episode made is not known

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


class DecisionRows(NamedTuple):
    """A Decision, row by row."""

    action: list[Any]
    extras: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    carry: Any
    """A batch, not rows."""
    version: int


class TickBatcher(Collector):
    """Ticks that are asked about in the same turn of the loop, or while the model is busy, are decided together: one
    forward and one `act` for all.
    As long as each turn brings more of them, up to `MAX_TICKS`, we wait for another: games that play side by side then
    stay together. A lone game waits for one turn that brings nothing, which is microseconds."""

    def __init__(self, player: Player, loop: asyncio.AbstractEventLoop):
        super().__init__(MAX_TICKS)
        self._player, self._loop = player, loop
        self._seen = 0  # ticks that waited when we last looked
        self._running: set[asyncio.Task[None]] = set()

    def ask(self, agent: PolicyAgent, state: Any) -> asyncio.Future[None]:
        """Done when the State is filled, by `agent.decided`."""
        return self._add((agent, state))

    def _flush(self) -> None:
        assert self._loop is not None
        if self._seen < len(self._queue) < MAX_TICKS:
            self._seen = len(self._queue)
            self._loop.call_soon(self._flush)
        else:
            self._start()

    def _start(self) -> None:
        # as many forwards at once as the model has workers, and one on its way; more would only be smaller ones
        if len(self._running) > getattr(self._player.model, "num_workers", 0):
            return  # `_ended` goes on
        self._asleep, self._seen = True, 0
        items = self._take(max(1, len(self._queue)))
        if not items:
            return
        try:
            deciding = self._player.decide([item[1][1] for item in items])
            inputs = next(deciding)
            if self._player.warm and not self._running:
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
        run_now = getattr(self._player.model, "run_now", None)
        while run_now is not None and (done := run_now(inputs, len(items))) is not None:
            more = _send(deciding, done[0])
            if isinstance(more, Decision):
                self._settle(items, more, done[1])
                return None
            inputs = more
        return inputs

    async def _decide(self, items: list[Item], deciding: Any, inputs: tuple[Any, ...]) -> None:
        player = self._player
        try:
            while True:
                outputs, version = await player.model.forward(*inputs, batch=True, with_step=True)
                more = _send(deciding, outputs) if player.warm else await asyncio.to_thread(_send, deciding, outputs)
                player.warm = True
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
        outputs = {k: decision.outputs[k] for k in self._player.outputs if k in decision.outputs}
        action, extras, kept = (split(x, n, n) for x in (decision.action, decision.extras, outputs))
        rows = DecisionRows(action, extras, kept, decision.carry, version)
        for i, (future, (agent, state), *_) in enumerate(items):
            if not future.done():  # else its deadline has passed
                tell(future, agent, state, rows, i)


def tell(future: asyncio.Future[None], agent: PolicyAgent, state: Any, rows: DecisionRows, i: int) -> None:
    """Give an agent what was decided for its tick; the future is then done."""
    try:
        agent.decided(state, rows, i)
    except StopIteration as e:  # which no future takes
        future.set_exception(RuntimeError(f"agent {agent.name!r} raised {e!r}"))
    except FAILURES as e:
        future.set_exception(e)
    else:
        future.set_result(None)


def _send(deciding: Any, outputs: Any) -> Any:
    """The next inputs of a decision, or the Decision."""
    try:
        return deciding.send(outputs)
    except StopIteration as end:
        return end.value


def _number(reward: Any) -> float:
    try:
        number = math.nan if isinstance(reward, (str, bool)) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise DataError(f"expected reward to be a finite number (of float32), got {reward!r:.60}")
    return number


def _flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if value is None or (type(value) in (int, float) and value in (0, 1)):
        return bool(value)
    raise DataError(f"expected {name} to be true or false, got {value!r:.60}")


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
