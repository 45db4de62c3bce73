"""An environment of this process played by a Policy, row by row; and as a source of pieces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree
from bray.act import SAMPLE, TRAINED, Clock, Deciding, Policy, Tick, decide_now, go_on
from bray.capture import Record
from bray.capture.transfer import to_device
from bray.data.experience import Counts
from bray.data.piece import DEFAULT, Piece
from bray.diagnosis.divergence import blame_policy
from bray.envs.rewards import Moments, RewardTransform
from bray.envs.teams import ALIVE, REWARDS
from bray.envs.vector import Infos, VecEnv
from bray.errors import ConfigError
from bray.inference.torch_engine import TorchEngine
from bray.rl.draws import use_compiled_draws
from bray.train.callbacks import CallbackList, EpisodeMetrics, EpisodeWatch
from bray.train.output import EpisodeOutput
from bray.train.source import RolloutWorker, Source

logger = logging.getLogger("bray")

SEPARATE = 0.3
"""Outputs that `act` does not read are computed once per rollout instead of at each step when at least this share of
the Model's parameters serves only them (a value network of its own; not a value head on a shared body)."""


@dataclass(slots=True)
class Step:
    """One row of all environments: what was seen, done and got."""

    obs: Any
    valid: np.ndarray
    first: Any
    state: Any
    outputs: dict[str, Any]
    extras: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action: Any
    """In the environment's units."""


class Rollout:
    """An environment, an engine and a Policy driven together; knows where each episode stands."""

    def __init__(
        self,
        env: VecEnv,
        engine: Any,
        policy: Any,
        rng: np.random.Generator,
        mode: str = SAMPLE,
        rewards: RewardTransform | None = None,
        initial_state: Callable[[int], Any] | None = None,
    ):
        use_compiled_draws()
        if env.spec.sides:
            raise ConfigError(
                f"{env.spec.id} is a game of several agents, and this plays games of one: `bray train` and `bray eval` "
                "play such games (docs/agents.md); env.teams joins all agents into one, which everything plays"
            )
        self.env, self.engine, self.policy, self.rng, self.mode, self.rewards = env, engine, policy, rng, mode, rewards
        self.games = env.num_envs
        self.returns = np.zeros(env.num_envs)
        self.lengths = np.zeros(env.num_envs, np.int64)
        self.first = np.ones(env.num_envs, bool)
        self.reward = np.zeros(env.num_envs, np.float32)
        """Of the last step, as the environments gave it."""
        self.state = initial_state(env.num_envs) if initial_state else None
        self.one_forward = self.state is None and not policy.draws and type(policy).decide is Policy.decide
        """Whether a step asks the engine once, with the observations alone."""
        self._asked: tuple[Tick, Any, Deciding] | None = None  # a step that waits for its answer
        self._under_way: dict[str, Any] | None = None  # the extras of the last row, where environments are waited for
        self.env_steps = 0
        self.version = 0
        """Of the weights that act."""
        self._told: tuple[Clock, int] | None = None
        """The learner's clock, where the learner counts the steps, and `env_steps` when it came."""
        self._held: int | None = None
        self.obs: Any = None
        self.worker_index = 0
        """Of the process that plays."""
        self.numbers_from = 0
        """The number of the first environment, where others have a Rollout of their own."""
        self.ended: list[tuple[int, float, int]] = []
        """(environment, return, length) of the episodes that the last step ended."""
        self.episodes_left: int | None = None
        """Episodes that still count; those beyond are not told of."""
        self.seconds = {"env": 0.0, "forward": 0.0}
        self.watch: EpisodeWatch | None = None
        """Whom steps are told to, where callbacks want to know."""
        self.output: EpisodeOutput | None = None
        """Who writes the episodes to files, where that is asked for."""
        self._broken = False  # a step did not come to its end: nobody knows where the environments are

    @property
    def full(self) -> bool:
        """Whether all episodes that count have been played."""
        return self.episodes_left == 0

    def reset(self, seed: int | None = None) -> None:
        self.obs = self.env.reset(seed)

    def ask(self) -> None:
        """Begin a step: put the question to an engine that is somewhere else (`ask`, `answer`) and return. `step` waits
        for the answer and goes on."""
        start = time.perf_counter()
        tick, state, clock = self._tick()
        deciding = self.policy.decide(tick, state, self.rng, self.mode, clock)
        self.engine.ask(*next(deciding))
        self._asked = tick, state, deciding
        self.seconds["forward"] += time.perf_counter() - start

    def _tick(self) -> tuple[Tick, Any, Clock]:
        """What is decided on: observations, memory and time."""
        if self.watch is not None:
            self.watch.before_step(self)
        first, state = self.first, self.state
        if state is not None and first.any():
            state = zeroed(state, first)
        return Tick(self.seen, self.reward, first), state, self.clock

    @property
    def seen(self) -> Any:
        """What of the observations those see who act."""
        return self.env.spec.acting(self.obs)

    @property
    def clock(self) -> Clock:
        """The time for schedules and noise."""
        if self._told is not None and self._told[0].env_steps == TRAINED.env_steps:
            return TRAINED
        version = self.version if self._told is None else self._told[0].version
        steps = self._time() if self._held is None else self._held
        return Clock(steps, version, self.env_steps // self.games)

    def _time(self) -> int:
        """Environment steps of the run. In a worker they are the learner's, plus those made here since."""
        if self._told is None:
            return self.env_steps
        told, at = self._told
        return told.env_steps + self.env_steps - at

    def hold_time(self) -> None:
        """Schedules stay as they are now, until the next call: over the rows of a piece, which several workers may play
        a part of each."""
        self._held = self._time()

    def set_clock(self, clock: Clock) -> None:
        """Take the learner's clock. Time never goes back: a worker gets the same clock again while nothing is
        learnt."""
        self._told = (
            Clock(max(clock.env_steps, self._time() if self._told else 0), clock.version),
            self.env_steps,
        )

    def step(self) -> Step:
        """One decision in every environment."""
        env = self.env
        dead, waits, obs = env.dead, env.waits, self.obs
        valid = ~dead
        t0 = time.perf_counter()
        tick, state, actions, extras, outputs = self._decide()
        if waits:
            extras = self._under_way = self._taken(extras)
        t1 = time.perf_counter()
        try:
            self.obs, reward, terminated, truncated, infos = env.step(actions)
        except BaseException as e:
            self._broken = True
            blame_policy(e, actions)
            raise
        t2 = time.perf_counter()
        self.seconds["forward"] += t1 - t0
        self.seconds["env"] += t2 - t1
        ended = env.dead
        self.first = dead  # the row after a dead one is the first of an episode
        if waits:
            here = ~env.waiting
            valid &= here
            ended = ended & valid  # it stays dead while its next episode is waited for, but ended once
            self.first = dead & here
        self.returns += reward
        self.reward = reward
        self.lengths += valid
        self.env_steps += int(np.count_nonzero(valid))
        if self.ended:
            self.ended = []
        ends = true_of(ended)
        if ends:
            self._end(ends)
        learned = reward
        if self.rewards is not None:
            learned = self.rewards(reward, env.dead, valid if waits else None)
        if env.spec.team:
            extras = {**extras, **_of_members(infos, env.num_envs, len(env.spec.team))}
        step = Step(obs, valid, tick.first, state, outputs, extras, learned, terminated, truncated, actions)
        if self.output is not None:
            self.output.add(step, reward, ends, self.obs)
        if self.watch is not None:
            self.watch.after_step(self, step, reward, infos)
        return step

    def _decide(self) -> tuple[Tick, Any, Any, dict[str, Any], dict[str, Any]]:
        """What was seen and remembered, and what is decided on that: actions, extras, outputs of the Model."""
        if self._asked is not None:
            (tick, state, deciding), self._asked = self._asked, None
            actions, extras, self.state, outputs = go_on(deciding, self.engine.answer(), self.engine.forward)
            return tick, state, actions, extras, outputs
        tick, state, clock = self._tick()
        if self.one_forward:  # what the default `decide` does, without a generator: 2 % of a step of a small network
            outputs = self.forward(tick.obs)
            actions, extras = self.policy.act(outputs, tick, self.rng, self.mode, clock)
        else:
            deciding = self.policy.decide(tick, state, self.rng, self.mode, clock)
            actions, extras, self.state, outputs = decide_now(deciding, self.forward)
        return tick, state, actions, extras, outputs

    def forward(self, *inputs: Any) -> Any:
        """The Model's outputs for what a Policy asks."""
        return self.engine.forward(*inputs)

    def _end(self, environments: list[int]) -> None:
        for b in environments:
            if not self.full:
                self.ended.append((b, float(self.returns[b]), int(self.lengths[b])))
                if self.episodes_left is not None:
                    self.episodes_left -= 1
            self.returns[b] = 0.0
            self.lengths[b] = 0

    def _taken(self, extras: dict[str, Any]) -> dict[str, Any]:
        """The extras of the actions that are carried out in this row: the last ones where they are still under way. The
        row in which a result comes so holds the action that it came from."""
        waiting = self.env.waiting
        if self._under_way is None or not waiting.any():
            return extras

        def choose(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            return np.where(waiting.reshape(-1, *[1] * (new.ndim - 1)), old, new)

        return tree.map(choose, extras, self._under_way)

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        """All that is needed to go on as if nothing had happened: {"arrays": tree, "json": plain data}. Where the
        environments cannot say where they are (one has failed, or does not answer), all the rest; then `exact` is false
        in it. `midway`: see `Source.get_state`."""
        env: dict[str, Any] = {"arrays": {}, "json": None} if midway else self._env_state()
        arrays = {
            "env": env["arrays"],
            "obs": self.obs,
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
            "first": self.first.copy(),
            "reward": np.array(self.reward),
            "dead": self.env.dead.copy(),
            "state": {} if self.state is None else self.state,
            "rewards": self.rewards.get_state() if self.rewards else {},
            "policy": self.policy.get_state(),
        }
        json = {"env": env["json"], "rng": self.rng.bit_generator.state, "exact": self.env.exact and not midway}
        return {"arrays": arrays, "json": json | {"env_steps": self.env_steps}}

    def _env_state(self) -> dict[str, Any]:
        if not self._broken:
            try:
                return self.env.get_state()
            except Exception as e:  # what was learnt is saved in any case
                logger.warning(
                    "the state of the environments cannot be saved, a resumed run starts new episodes: %s", e
                )
        self.env.exact = False
        return {"arrays": {}, "json": None}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`; where the environment cannot, new episodes start and `env.exact` is False."""
        arrays, json = state["arrays"], state["json"]
        self._told = None  # its time may be later than the state's
        if "rng" in json:  # else workers played
            self.rng.bit_generator.state = json["rng"]
            if self.rewards and arrays["rewards"]:  # else they were left as they are before
                self.rewards.set_state(arrays["rewards"])
        elif self.rewards:
            self.rewards.learn(returns_of(state))
        if json.get("env") is None:
            self.obs = self.env.reset(int(self.rng.integers(1 << 31)))  # other episodes than those that began the run
            self.env.exact = False
            return
        self.obs = self.env.set_state({"arrays": arrays["env"], "json": json["env"]})
        same = tree.equal(self.obs, tree.map(np.asarray, arrays["obs"])) and np.array_equal(
            self.env.dead, arrays["dead"]
        )
        if self.env.exact and same:
            self.returns, self.lengths = np.array(arrays["returns"]), np.array(arrays["lengths"])
            self.first = np.array(arrays["first"])
            self.reward = np.array(arrays.get("reward", self.reward))  # older checkpoints have none
            if self.state is not None:
                self.state = tree.map(np.array, arrays["state"])
            if policy := arrays.get("policy"):
                self.policy.set_state(policy)
        else:
            self.env.exact = False


def _of_members(infos: Infos, num_envs: int, members: int) -> dict[str, np.ndarray]:
    """What environments tell of each member of a team: `rewards [B, N]`, and who was `alive` and acted."""
    rewards, alive = np.zeros((num_envs, members), np.float32), np.ones((num_envs, members), bool)
    for b, info in enumerate(infos or ()):
        if REWARDS in info:
            rewards[b], alive[b] = info[REWARDS], info[ALIVE]
    return {REWARDS: rewards, ALIVE: alive}


_FEW = 64


def true_of(flags: np.ndarray) -> list[int]:
    """Where flags are true. A list is searched ten times faster than an array of a few of them, and thirty times slower
    than one of two thousand."""
    if len(flags) > _FEW:
        return np.flatnonzero(flags).tolist()
    found = flags.tolist()
    return [b for b, end in enumerate(found) if end] if True in found else []


KEPT_BYTES = 1 << 16
"""Observations of a row, from which they stay on the GPU that they were sent to for acting."""


def separate_outputs(rollout: Rollout, record: Record) -> TorchEngine | None:
    """An engine for what the Learner reads and `act` does not, where computing that once per rollout saves work."""
    reads, keep = rollout.policy.reads, rollout.policy.keeps
    if not isinstance(rollout.engine, TorchEngine):
        return None
    model = rollout.engine.model
    both = TorchEngine(model, (*reads, *keep), record)
    if record:
        all_, some = both.parameters_read(rollout.seen), rollout.engine.parameters_read(rollout.seen)
        if all_ and some and some < (1.0 - SEPARATE) * all_:
            return TorchEngine(model, keep, record)
    rollout.engine = both
    return None


class EnvSource(Source):
    """The environment of this process as a source: asked for rows, with the parameters that the Learner trains in
    place. Pictures that were sent to a GPU stay there for the Learner (`Piece.on_device`)."""

    exact = True

    def __init__(
        self,
        rollout: Rollout,
        rows: int,
        state_every: int = 1,
        record: Record = True,
        learnt_here: bool = False,
        side: str = DEFAULT,
    ):
        """learnt_here: whether a Learner of this process takes the pieces as they are. side: whose policy acts."""
        self.side = side
        self.rollout, self.rows, self._state_every = rollout, rows, state_every
        self._metrics = EpisodeMetrics()
        self._keep = rollout.policy.keeps
        self._later: TorchEngine | None = None
        if self._keep and rollout.state is None:
            self._later = separate_outputs(rollout, record)
        self._row: tuple[Columns, Piece] | None = None
        self._stays = learnt_here and rows > 1 and self.sends_pictures()
        self.begin()

    def sends_pictures(self) -> bool:
        """Whether each row has one forward on a GPU, with observations that are many bytes."""
        rollout = self.rollout
        if not (
            rollout.one_forward and isinstance(rollout.engine, TorchEngine) and isinstance(rollout.obs, np.ndarray)
        ):
            return False
        return rollout.obs.nbytes >= KEPT_BYTES and rollout.engine.device.type == "cuda"

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        """`rows` rows of every environment; no piece where the last episode to be counted ended before: updates have a
        fixed shape."""
        if self.rows == 1:
            return self._gather_row()
        self.begin()
        for t in range(self.rows):
            self.row(t)
            if self.rollout.full and t + 1 < self.rows:
                return [], self._counts()
        return self.end()

    def begin(self) -> None:
        """A new piece; then come its `row`s and its `end`."""
        self._columns: Columns | None = None
        self._on_device: Tensor | None = None
        self._episodes: list[tuple[float, int]] = []
        self._before = self.rollout.env_steps
        if self.rows > 1:
            self.rollout.hold_time()

    def row(self, t: int) -> None:
        rollout = self.rollout
        step = rollout.step()
        if self._columns is None:
            self._columns = Columns(step, self.rows, self._keep, self._state_every)
        self._columns.write(t, step)
        if self._stays:
            self._keep_on_device(t, rollout.engine.sent[0])
        if rollout.ended:
            self._episodes += [(return_, length) for _, return_, length in rollout.ended]

    def _keep_on_device(self, t: int, obs: Tensor) -> None:
        """Not written over by the next piece: a Learner may still read it."""
        if self._on_device is None:
            self._on_device = obs.new_empty((self.rows + 1, *obs.shape))
        self._on_device[t].copy_(obs)

    def end(self) -> tuple[list[Piece], Counts]:
        assert self._columns is not None
        return [self._piece(self._columns)], self._counts()

    def _counts(self) -> Counts:
        return Counts(self.rollout.env_steps - self._before, tuple(self._episodes))

    def _gather_row(self) -> tuple[list[Piece], Counts]:
        """One row: the same piece again and again, written over. Whoever keeps rows copies them."""
        rollout, before = self.rollout, self.rollout.env_steps
        step = rollout.step()
        if self._row is None or self._keep:
            columns = Columns(step, 1, self._keep, self._state_every)
            columns.write(0, step)
            self._row = columns, self._piece(columns)
        columns, piece = self._row
        columns.write(0, step)
        columns.write_last(rollout.obs, rollout.first)
        piece.version = rollout.version
        ended = tuple([(return_, length) for _, return_, length in rollout.ended]) if rollout.ended else ()
        return [piece], Counts(rollout.env_steps - before, ended)

    def _piece(self, columns: Columns) -> Piece:
        rollout, rows = self.rollout, self.rows
        columns.write_last(rollout.obs, rollout.first)
        outputs = columns.outputs
        began = time.perf_counter()
        if self._stays:
            self._keep_on_device(rows, to_device(torch.from_numpy(rollout.obs), rollout.engine.device))
        if self._later is not None:
            seen = rollout.env.spec.acting(columns.obs) if self._on_device is None else self._on_device
            flat = tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
            late = self._later.forward(flat)
            outputs = {k: late[k].reshape(rows + 1, -1, *late[k].shape[1:]) for k in self._keep}
        elif self._keep:
            state = None if rollout.state is None else zeroed(rollout.state, rollout.first)
            inputs = next(rollout.policy.decide(Tick(rollout.seen), state, None, "greedy", Clock()))
            last = rollout.engine.forward(*inputs)
            for k in self._keep:
                outputs[k][rows] = last[k]
        rollout.seconds["forward"] += time.perf_counter() - began
        piece = columns.piece(outputs, rollout.version, self._state_every, self.side)
        if self._on_device is not None:
            piece.obs = piece.obs.view()
            piece.obs.flags.writeable = False  # a change would not reach the GPU
            piece.on_device = piece.obs, self._on_device
        return rollout.policy.label(piece)

    def limit_episodes(self, left: int | None) -> None:
        self.rollout.episodes_left = left

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        """The parameters are shared: only their version is news."""
        if side == self.side:
            self.rollout.version = clock.version

    def set_clock(self, clock: Clock) -> None:
        """What schedules are told, and the version of the weights, where somebody else counts."""
        self.rollout.set_clock(clock)
        self.rollout.version = clock.version

    def watch(self, callbacks: CallbackList) -> None:
        self.rollout.watch = callbacks.watch()

    def ended_metrics(self) -> list[dict[str, float]]:
        """`custom_metrics` of the episodes that have ended since the last call."""
        watch = self.rollout.watch
        if watch is None:
            return []
        ended, watch.ended = watch.ended, []
        return ended

    def numbers(self) -> dict[str, float]:
        self._metrics.add(self.ended_metrics())
        return self._metrics.row()

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self.rollout.env.foreach_env(fn)

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        rollout = self.rollout
        return [fn(RolloutWorker(0, (rollout.env,), rollout.engine.model, (rollout.policy,)))]

    def seconds(self) -> dict[str, float]:
        spent, self.rollout.seconds = self.rollout.seconds, {"env": 0.0, "forward": 0.0}
        return spent

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = self.rollout.get_state(midway)
        state["json"]["metrics"] = self._metrics.get_state()
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self.rollout.set_state(state)
        self._metrics.set_state(state["json"].get("metrics", "[]"))  # older checkpoints have none
        # its own steps are fewer than those of the clock where others play too; older checkpoints do not have them
        self.rollout.env_steps = int(state["json"].get("env_steps", clock.env_steps))
        self.rollout.version = clock.version
        return self.rollout.env.exact

    def close(self) -> None:
        if self.rollout.output is not None:
            self.rollout.output.close()
        self.rollout.env.close()


class Columns:
    """Preallocated columns of `rows` rows, written row by row."""

    def __init__(self, step: Step, rows: int, keep: tuple[str, ...], state_every: int):
        def column(x: np.ndarray, rows: int = rows) -> np.ndarray:
            return np.empty((rows, *x.shape), x.dtype)

        def longer(x: np.ndarray) -> np.ndarray:
            return column(x, rows + 1)

        self.rows, self._state_every = rows, state_every
        self.obs = tree.map(longer, step.obs)
        self.first = longer(step.first)
        self.outputs = {k: longer(step.outputs[k]) for k in keep if k in step.outputs}
        self.extras = tree.map(column, step.extras)
        self.reward, self.valid = column(step.reward), column(step.valid)
        self.terminated, self.truncated = column(step.terminated), column(step.truncated)
        self.state = None
        if step.state is not None:
            self.state = tree.map(lambda x: column(x, -(-rows // state_every)), step.state)

    def write(self, t: int, step: Step) -> None:
        obs = self.obs
        if isinstance(obs, np.ndarray):
            obs[t] = step.obs
        else:
            tree.map(lambda column, x: column.__setitem__(t, x), obs, step.obs)
        for k, column in self.outputs.items():
            column[t] = step.outputs[k]
        for k, x in step.extras.items():
            self.extras[k][t] = x
        if self.state is not None and t % self._state_every == 0:
            tree.map(lambda column, x: column.__setitem__(t // self._state_every, x), self.state, step.state)
        self.first[t] = step.first
        self.reward[t] = step.reward
        self.terminated[t] = step.terminated
        self.truncated[t] = step.truncated
        self.valid[t] = step.valid

    def write_last(self, obs: Any, first: np.ndarray) -> None:
        if isinstance(self.obs, np.ndarray):
            self.obs[self.rows] = obs
        else:
            tree.map(lambda column, x: column.__setitem__(self.rows, x), self.obs, obs)
        self.first[self.rows] = first

    def piece(self, outputs: dict[str, Any], version: int, state_every: int, side: str) -> Piece:
        extras = dict(self.extras)
        return Piece(
            obs=self.obs,
            action=extras.pop("action"),
            reward=self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            valid=self.valid,
            first=self.first,
            outputs=outputs,
            extras=extras,
            state=self.state,
            state_every=state_every,
            version=version,
            side=side,
        )


def zeroed(state: Any, first: np.ndarray) -> Any:
    """A batch of memories with those of games that begin an episode at zero."""
    return tree.map(lambda x: np.where(first.reshape(-1, *[1] * (x.ndim - 1)), np.float32(0.0), x), state)


def returns_of(state: dict[str, Any]) -> Moments:
    """What rewards are normalised by, of the state of any source: one process has it beside its environments, workers
    have it together."""
    json, rewards = state["json"], state["arrays"].get("rewards")
    if "returns" in json:
        return Moments.saved(json["returns"])
    if rewards:
        return Moments.saved([rewards.get(name) for name in ("count", "mean", "m2")])
    of_workers = json.get("scales") or ()  # in older checkpoints each had its own
    return Moments.of_all(Moments.saved(part) for worker in of_workers for part in worker)
