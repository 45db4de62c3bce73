"""PolicyAgent: an algorithm's Policy plays a live game, and makes samples of what it sees.

The game sends `{"obs": ..., "reward": r, "terminated": false, "truncated": false}` at every tick and gets `{"action": ...}`. The reward is
that of the previous action. The tick that ends an episode carries its final observation; its reply does nothing, and the next tick is the
first of a new episode (or the session ends). So the ticks of a session are the rows of a trajectory by the autoreset rule of
docs/architecture.md:

    tick          0     1     2     3 terminated   4        5
    row           0     1     2     3 dead         4        5
    its reward    r_1   r_2   r_3   0              r_5      r_6 (still to come)

A row is whole when the next tick has come. What `on_episode` gets is therefore one row short: the last tick is kept and begins the next
piece. A piece that ends in the middle of an episode bootstraps from the value of its last tick.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from bray import tree
from bray.data.trajectory import Trajectory
from bray.envs.rewards import RewardTransform
from bray.errors import ConfigError, DataError, Overloaded
from bray.inference.batcher import own_error
from bray.inference.rows import Template, split
from bray.remote.algo import named_setup
from bray.serving.actor import FAILURES
from bray.serving.agent import Agent, State
from bray.serving.protocol import malformed
from bray.serving.values import plain, reader

_TRAINED = 1 << 62  # the step of a Policy that explores no more
_AGAIN_S = 0.05
_ENOUGH = 32  # ticks; a row of a larger forward is hardly cheaper
_MOST_WAIT_S = 6.0  # the end of a session waits for up to four pieces, and is answered in time: a tick has 30 s


class _Tick(msgspec.Struct):
    """A tick whose observation is left as it is written."""

    obs: msgspec.Raw
    reward: Any = msgspec.UNSET
    terminated: Any = False
    truncated: Any = False


_decode_tick = msgspec.json.Decoder(_Tick).decode


class PolicyAgent(Agent):
    """Plays with the Policy of an algorithm and the newest weights of a model; in training it also pushes samples.

    Its section: `algo` names the `kind: config` section that describes the algorithm, `model` the model, `buffer` (if there is one) where
    samples go, `wait_s` how long a game may wait for room there (0: never, old samples are dropped: right for live games, while simulated ones
    learn more from each tick if they wait), and `explore: false` makes it play its best and learn nothing, as it does in `mode: deploy` and without a buffer. `model` and
    `buffer` may also be the objects themselves.

    Override `observe` and `answer` for a game that speaks otherwise. Every State of an episode then has the fields `obs`, `reward`,
    `terminated`, `truncated`, `first`, `outputs` (of the model), `extras` and `action` (of the Policy), and `version` (of the weights).
    """

    late_input = True

    def __init__(self, name: str, config: Any, state: State):
        super().__init__(name, config, state)
        self.shared = _find_shared(name, config)
        self.memory = self.shared.setup.initial_state
        self._first = True
        self._turn: _Turn | None = None  # of the loop that this session is played in
        self._kept: list[State] = []  # ticks whose rows are not pushed yet
        self._return, self._length = 0.0, 0

    def observe(self, state: State) -> tuple[Any, float, bool, bool]:
        """(observation, reward of the previous action, terminated, truncated) of a tick. The observation may be lists or arrays, or JSON that is
        not decoded yet."""
        data = state.unread()
        if data is not None:
            try:
                tick = _decode_tick(data)
            except (ValueError, RecursionError):
                pass  # told below
            else:
                self._check_reward(tick.reward is not msgspec.UNSET, "obs")
                return tick.obs, tick.reward or 0.0, bool(tick.terminated), bool(tick.truncated)
        tick = state.input
        if not isinstance(tick, Mapping) or "obs" not in tick:
            raise DataError(
                f'expected {{"obs": ..., "reward": ..., "terminated": ..., "truncated": ...}}, got {tick!r:.60}'
            )
        self._check_reward("reward" in tick, ", ".join(map(str, tick)))
        return tick["obs"], tick.get("reward") or 0.0, bool(tick.get("terminated")), bool(tick.get("truncated"))

    def _check_reward(self, there: bool, keys: str) -> None:
        if not there and self.shared.buffer is not None and not self._first:
            raise DataError(f"expected the reward of the previous action, got only {keys}")

    def answer(self, state: State, action: Any) -> None:
        """Tell the game what to do; `action` is one action of the environment's space."""
        state.output["action"] = plain(action)

    def on_tick(self, state: Any) -> Awaitable[None]:
        # no coroutine, which would need a task for every tick
        try:
            obs, reward, terminated, truncated = self.observe(state)
            if not self.shared.acted:
                return self._first_tick(state, obs, reward, terminated, truncated)
            return self._ask(state, self.shared.read(obs), _number(reward), terminated, truncated)
        except DataError as e:
            raise malformed(str(e)) from None

    async def _first_tick(self, state: Any, obs: Any, reward: Any, terminated: bool, truncated: bool) -> None:
        """Compiled code is loaded when it is first used, which takes a second: in a thread, so that the loop goes on."""
        try:
            obs, reward = await asyncio.to_thread(self.shared.read, obs), _number(reward)
        except DataError as e:
            raise malformed(str(e)) from None
        await self._ask(state, obs, reward, terminated, truncated)

    def _ask(self, state: Any, obs: Any, reward: float, terminated: bool, truncated: bool) -> asyncio.Future[None]:
        """Have this tick decided on, together with those of other games; then `decided` is called."""
        first, self._first = self._first, terminated or truncated
        if first:
            self.memory = self.shared.setup.initial_state
        state.obs, state.reward, state.first = obs, reward, first
        state.terminated, state.truncated = terminated, truncated
        if self.memory is not None:
            state.memory = self.memory
        if self._turn is None:
            self._turn = self.shared.turn()
        return self._turn.ask(self, state)

    def decided(self, state: Any, decided: _Decided, i: int) -> None:
        """What was decided for this tick is row i."""
        if self.memory is not None:
            # of the type that it began with, whatever came back; and a copy: a row would keep its whole batch alive
            self.memory = tree.map(lambda a, x: np.array(x[i], a.dtype), self.memory, decided.state)
        state.outputs, state.version = decided.outputs[i], decided.version
        state.extras, state.action = decided.extras[i], decided.action[i]
        self.answer(state, state.action)

    async def on_episode(self, episode: list[State], done: bool) -> None:
        pieces = list(_pieces(self._kept + episode))
        self._kept = []
        for piece in pieces:
            rows = len(piece) - 1
            if piece is pieces[-1] and not done:
                rows -= rows % self.shared.setup.rows_per_sample  # the rest waits until its sequence is full
                self._kept = piece[rows:]
            self._count(piece[: rows + 1])
            if rows and self.shared.buffer is not None:
                await self._push(piece[: rows + 1])
            if piece is not pieces[-1]:
                self._return = math.nan  # a tick is missing: what this episode made is not known

    async def _push(self, states: list[State]) -> None:
        from bray.remote.master import merge

        shared = self.shared
        samples = shared.samples(states) if shared.sampled else await shared.first_samples(states)
        if tree.length(samples):
            await self._hand_over(samples)
        versions = sum(s.version for s in states) / len(states)
        merge("staleness", shared.model.step - versions, agent=self.name)

    async def _hand_over(self, samples: dict[str, Any]) -> None:
        from bray.remote.master import merge

        buffer, wait = self.shared.buffer, self.shared.wait_s
        if not wait:
            buffer.push_batch(samples)
            return
        taken = False
        try:
            async with asyncio.timeout(wait):
                while not taken:
                    try:
                        pushed = buffer.push_batch(samples, drop=False)
                        taken = True
                    except Overloaded:  # so many wait here already
                        await asyncio.sleep(_AGAIN_S)
                await pushed
        except TimeoutError:  # the game goes on, and its samples are on their way, if they were taken
            if not taken:
                merge("samples_dropped", tree.length(samples), agent=self.name)

    def _count(self, states: list[State]) -> None:
        """Returns and lengths of the episodes that end in these rows, raw."""
        from bray.remote.master import merge

        steps = 0
        for before, after in pairwise(states):
            if before.first:
                self._return, self._length = 0.0, 0
            if before.terminated or before.truncated:
                continue
            steps += 1
            self._return += after.reward
            self._length += 1
            if (after.terminated or after.truncated) and not math.isnan(self._return):
                merge("episode_return", self._return, agent=self.name)
                merge("episode_length", self._length, agent=self.name)
        if steps:
            merge("env_steps", steps, agent=self.name)


class _Decided(NamedTuple):
    """What became of observations that were decided on together, a row for each."""

    outputs: list[dict[str, Any]]
    """Of the Model, those that the Policy reads."""
    state: Any
    """Of the Model, if it has a memory: a batch, not rows."""
    version: int
    action: list[Any]
    extras: list[dict[str, Any]]


class _Asked(NamedTuple):
    agent: PolicyAgent
    state: Any
    future: asyncio.Future[None]


class _Turn:
    """Agents that ask in the same turn of the loop, or while the model is busy, are decided on together: one forward and one act for all,
    and not one of each per tick. As long as each turn brings more of them, up to `_ENOUGH`, we wait for another: games that play side by side
    then stay together. A lone game waits for one turn that brings nothing, which is microseconds."""

    def __init__(self, shared: _Shared, loop: asyncio.AbstractEventLoop):
        self.shared, self.loop = shared, loop
        self.waiting: list[_Asked] = []
        self.seen = 0  # of those that wait, when we last looked
        self.running: set[asyncio.Task[None]] = set()

    def ask(self, agent: PolicyAgent, state: Any) -> asyncio.Future[None]:
        future = self.loop.create_future()
        self.waiting.append(_Asked(agent, state, future))
        if len(self.waiting) == 1:
            self.seen = 0
            self.loop.call_soon(self.look)
        return future

    def look(self) -> None:
        if self.seen < len(self.waiting) < _ENOUGH:
            self.seen = len(self.waiting)
            self.loop.call_soon(self.look)
        else:
            self.go_on()

    def go_on(self) -> None:
        # as many forwards at once as somebody may work on, and one that is on its way; more would only be smaller ones
        if not self.waiting or len(self.running) > getattr(self.shared.model, "num_workers", 0):
            return
        asked, self.waiting = [a for a in self.waiting if not a.future.done()], []
        if not asked:
            return
        try:
            decided = None if self.running else self.shared.decide_now(asked)
        except Exception as e:
            _fail(asked, e)
            return
        if decided is not None:
            _answer(asked, decided)
        else:
            task = self.loop.create_task(self.run(asked))
            self.running.add(task)
            task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self.go_on()

    async def run(self, asked: list[_Asked]) -> None:
        try:
            _answer(asked, await self.shared.decide_all(asked))
        except Exception as e:
            _fail(asked, e)
        finally:
            for a in asked:
                a.future.cancel()  # those that have no answer, because the loop is being closed


def _answer(asked: list[_Asked], decided: _Decided) -> None:
    for i, (agent, state, future) in enumerate(asked):
        if future.done():
            continue  # its deadline passed meanwhile
        try:
            agent.decided(state, decided, i)
        except StopIteration as e:  # which no future takes
            future.set_exception(RuntimeError(f"agent {agent.name!r} raised {e!r}"))
        except FAILURES as e:
            future.set_exception(e)
        else:
            future.set_result(None)


def _fail(asked: list[_Asked], error: Exception) -> None:
    for a in asked:
        if not a.future.done():
            a.future.set_exception(own_error(error))


class _Shared:
    """What the agents of one name have in common in a process."""

    def __init__(self, name: str, config: Any):
        self.config = config
        section = config[name]
        self.setup = named_setup(config, name)
        self.policy = self.setup.make_policy()
        self.read = reader(self.setup.spec.observation)
        self.model = _find_model(name, section)
        self.buffer: Any = None
        self.rng: np.random.Generator | None = None
        learns = section.get("explore", True) and config.get("mode", "train") != "deploy"
        if section.get("buffer") is not None and learns:
            self.buffer, self.rng = _find_buffer(section["buffer"]), np.random.default_rng()
        self.wait_s = _seconds(name, section.get("wait_s", 0.0))
        self.outputs = (*self.policy.act_outputs, *getattr(self.policy, "keep_outputs", ()))
        algo, env = self.setup.config, self.setup.env_config
        if self.buffer is not None and env.normalize_rewards:
            raise ConfigError(
                f"{name}: normalize_rewards needs the games side by side; divide the rewards in the game, or use clip_rewards"
            )
        if self.buffer is not None and self.setup.initial_state is not None and not algo.on_policy:
            raise ConfigError(
                f"{name}: this algorithm replays single steps and cannot train a memory: set use_lstm: false"
            )
        self.rewards = RewardTransform(env, 1, algo.gamma)
        self.acted = self.sampled = False
        self._template: Template | None = None
        self._turns: dict[asyncio.AbstractEventLoop, _Turn] = {}

    def turn(self) -> _Turn:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._turns:
            self._turns[loop] = _Turn(self, loop)
        return self._turns[loop]

    def decide_now(self, asked: list[_Asked]) -> _Decided | None:
        """If the model is in this process and quick; else None."""
        run_now = getattr(self.model, "run_now", None)
        if run_now is None or not self.acted:
            return None
        args = self._stack(asked)
        done = run_now(args, len(asked))
        if done is None:
            return None
        outputs, version = done
        return self._decided(args, outputs, version, *self.policy.act(*self._acting(args, outputs, version)))

    async def decide_all(self, asked: list[_Asked]) -> _Decided:
        args = self._stack(asked)
        outputs, version = await self.model.forward(*args, batch=True, with_step=True)
        given = self._acting(args, outputs, version)
        action, extras = self.policy.act(*given) if self.acted else await self.first_act(*given)
        return self._decided(args, outputs, version, action, extras)

    def _stack(self, asked: list[_Asked]) -> tuple[Any, ...]:
        """Observations, and states where the Model remembers, as batches."""
        samples: list[tuple[Any, ...]] = [(a.state.obs,) for a in asked]
        if self.setup.initial_state is not None:
            samples = [(a.state.obs, a.state.memory) for a in asked]
        if self._template is None:
            self._template = Template(samples[0])
        return tuple(self._template.stack(samples))

    def _acting(self, args: tuple[Any, ...], outputs: Any, version: int) -> tuple[Any, ...]:
        step = _TRAINED if self.rng is None else self.setup.env_steps(version)
        return {k: outputs[k] for k in self.policy.act_outputs}, args[0], self.rng, step

    def _decided(self, args: tuple[Any, ...], outputs: Any, version: int, action: Any, extras: Any) -> _Decided:
        rows = len(tree.leaves(args)[0])
        state = outputs["state"] if len(args) > 1 else None
        kept = split({k: outputs[k] for k in self.outputs}, rows, rows)
        return _Decided(kept, state, version, split(action, rows, rows), split(extras, rows, rows))

    async def first_act(self, *args: Any) -> Any:
        """Compiled code is loaded when it is first used, which takes a second: in a thread, so that the loop goes on."""
        result = await asyncio.to_thread(self.policy.act, *args)
        self.acted = True
        return result

    async def first_samples(self, states: list[State]) -> dict[str, Any]:
        result = await asyncio.to_thread(self.samples, states)
        self.sampled = True
        return result

    def samples(self, states: list[State]) -> dict[str, Any]:
        return self.setup.samples(self.policy, self.trajectory(states))

    def trajectory(self, states: list[State]) -> Trajectory:
        """The rows of ticks that follow each other: one fewer than ticks, in a batch of one."""
        rows, after = states[:-1], states[1:]
        dead = np.array([[s.terminated or s.truncated] for s in rows])
        reward = self.rewards(np.array([[s.reward] for s in after], np.float32), dead)
        extras = _column([s.extras for s in rows])
        if self.setup.initial_state is not None:
            extras["state"] = _column([s.memory for s in rows])
        return Trajectory(
            obs=_column([s.obs for s in states]),
            action=extras["action"],
            reward=np.where(dead, np.float32(0.0), reward),
            terminated=np.array([[s.terminated] for s in after]) & ~dead,
            truncated=np.array([[s.truncated] for s in after]) & ~dead,
            valid=~dead,
            first=np.array([[s.first] for s in states]),
            outputs=_column([s.outputs for s in states]),
            extras=extras,
        )


_in_use: WeakValueDictionary[tuple[int, str], _Shared] = WeakValueDictionary()


def _find_shared(name: str, config: Any) -> _Shared:
    shared = _in_use.get((id(config), name))
    if shared is None:
        shared = _in_use[id(config), name] = _Shared(name, config)
    return shared


def _find_model(name: str, section: Mapping[str, Any]) -> Any:
    model = section.get("model")
    if model is None:
        raise ConfigError(f"{name}: expected model: NAME, the model to play with; got none")
    if not isinstance(model, str):
        return model
    from bray.remote.model.handle import RemoteModel

    return RemoteModel(model)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_WAIT_S:
        raise ConfigError(f"{name}: expected wait_s to be seconds, from 0 to {_MOST_WAIT_S:g}, got {value!r}")
    return float(value)


def _find_buffer(buffer: Any) -> Any:
    if not isinstance(buffer, str):
        return buffer
    from bray.remote.buffer.handle import RemoteBuffer

    return RemoteBuffer(buffer)


def _number(reward: Any) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"expected reward to be a finite number, got {reward!r:.60}")
    return number


def _column(rows: list[Any]) -> Any:
    """Trees as one tree `[T, 1, ...]`."""
    if isinstance(rows[0], dict):
        return {k: _column([row[k] for row in rows]) for k in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(_column(list(parts)) for parts in zip(*rows, strict=True))
    return np.array(rows)[:, None]


def _pieces(states: list[State]) -> Iterator[list[State]]:
    """The states cut where a tick is missing: one that failed is in no episode, and its neighbours do not follow each other."""
    start = 0
    for i, (before, after) in enumerate(pairwise(states), 1):
        if after.tick != before.tick + 1:
            yield states[start:i]
            start = i
    if states:
        yield states[start:]
