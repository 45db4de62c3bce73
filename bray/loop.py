"""Training in one process: rollouts, updates, evaluation. No Ray, no files.

`Training` joins the four names of an algorithm with an environment; `iterate()` is one iteration (a rollout and its update, or
1000 environment steps with their updates) and returns one row of numbers. `get_state` / `set_state` hold everything, so that a
training goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from bray import tree
from bray.data.replay import Replay
from bray.data.trajectory import Trajectory
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.rewards import RewardTransform
from bray.envs.vector import VecEnv
from bray.errors import ConfigError
from bray.inference.torch_engine import TorchEngine, is_recurrent, load_weights
from bray.metrics import EpisodeStats
from bray.schedules import make_schedule

SEPARATE = 0.3
"""Outputs that `act` does not read are computed once per rollout instead of at each step when at least this share of the Model's
parameters serves only them (a value network of its own; not a value head on a shared body)."""
ITERATION_STEPS = 1000
"""Environment steps of an iteration of an off-policy algorithm."""
EVAL_SEED = 1_000_003
"""Evaluation episodes are the same ones in every run."""


@dataclass(frozen=True)
class RunConfig:
    """How long, where and how carefully a run goes."""

    algorithm: str = "PPO"
    """A known algorithm's name, or `module:Name` of your own."""
    seed: int = 0
    """Seed of everything random in the run."""
    stop: dict[str, float] = field(default_factory=dict)
    """The run ends when any of these metrics is reached, e.g. {episode_return_mean: 475, env_steps_total: 200000}; -1 for a count is no
    limit. It ends with the iteration, but for episodes_total: that one is exact (episodes that end in the same step beyond it are not
    counted, and an on-policy algorithm does not learn from the rollout that was cut short)."""
    device: str = "cpu"
    """Where the learner computes: cpu, cuda, cuda:N, or auto (a GPU when there is one)."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of PyTorch; null = one for vector observations (more are slower there), all cores for pictures."""
    record: bool = True
    """Record updates and forwards once and replay them without Python (`bray.capture`); false runs them eagerly."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Rollout processes beside this one; only 0 is there yet."""
    eval_freq: Annotated[int, Field(ge=0)] = 0
    """Iterations between two evaluations; 0 = none while training."""
    eval_episodes: Annotated[int, Field(ge=1)] = 10
    """Greedy episodes per evaluation, on seeds that are the same in every run."""
    checkpoint_freq: Annotated[int, Field(ge=0)] = 0
    """Iterations between two checkpoints; 0 = only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = 5
    """Newest checkpoints kept, beside the best one; null = all."""
    checkpoint_score: str | None = None
    """What the best checkpoint goes by: a key of the result rows, with a '-' before it where lower is better, e.g. episode_return_max,
    -loss/value_loss; null = eval/return_mean where there are evaluations, else episode_return_mean."""
    checkpoint_replay: Literal["auto", "always", "never"] = "auto"
    """Whether checkpoints hold the replay's rows: auto = up to 2 GiB. Without them a resumed run starts with an empty replay."""
    save_figure: bool = True
    """Whether the learning curve is drawn to figures/learning_curve.png at the end."""
    show_figure: bool = False
    """Whether it is shown in a window at the end; the run ends when that is closed."""


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device: expected cpu, cuda, cuda:N or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device is {name!r}, but PyTorch finds no CUDA GPU here. Use --device cpu, or auto.")
    return device


class Rollout:
    """An environment, an engine and a Policy driven together; knows where each episode stands."""

    def __init__(
        self,
        env: VecEnv,
        engine: TorchEngine,
        policy: Any,
        rng: np.random.Generator | None,
        rewards: RewardTransform | None = None,
        initial_state: Callable[[int], Any] | None = None,
    ):
        self.env, self.engine, self.policy, self.rng, self.rewards = env, engine, policy, rng, rewards
        self.stats = EpisodeStats()
        self.returns = np.zeros(env.num_envs)
        self.lengths = np.zeros(env.num_envs, np.int64)
        self.first = np.ones(env.num_envs, bool)
        self.state = initial_state(env.num_envs) if initial_state else None
        self._under_way: dict[str, Any] | None = None  # the extras of the last row, where environments are waited for
        self.env_steps = 0
        self.obs: Any = None
        self.ended: list[tuple[int, float, int]] = []
        """(environment, return, length) of the episodes that the last step ended."""
        self.most_episodes: int | None = None
        """Episodes beyond this number are not counted."""
        self.full = False
        """Whether that many have been."""
        self.seconds = {"env": 0.0, "forward": 0.0}

    def reset(self, seed: int) -> None:
        self.obs = self.env.reset(seed)

    def step(self) -> Step:
        """One decision in every environment."""
        obs, first, state, env = self.obs, self.first, self.state, self.env
        dead, waits = env.dead, env.waits
        valid = ~dead
        t0 = time.perf_counter()
        if state is None:
            outputs = self.engine.forward(obs)
        else:
            if first.any():
                state = _zeroed(state, first)
            outputs = self.engine.forward(obs, state)
            self.state = outputs.pop("state")
        actions, extras = self.policy.act(outputs, obs, self.rng, self.env_steps)
        if waits:
            extras = self._under_way = self._taken(extras)
        t1 = time.perf_counter()
        self.obs, reward, terminated, truncated, _ = env.step(actions)
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
        self.lengths += valid
        self.env_steps += int(np.count_nonzero(valid))
        if self.ended:
            self.ended = []
        ends = ended.tolist()  # a list is searched ten times faster than an array of a few flags
        if True in ends:
            for b in [b for b, end in enumerate(ends) if end]:
                if not self.full:
                    self.ended.append((b, float(self.returns[b]), int(self.lengths[b])))
                    self.stats.add(self.returns[b], self.lengths[b])
                    self.full = self.stats.total == self.most_episodes
                self.returns[b] = 0.0
                self.lengths[b] = 0
        learned = reward
        if self.rewards is not None:
            learned = self.rewards(reward, env.dead, valid if waits else None)
        return Step(obs, valid, first, state, outputs, extras, learned, terminated, truncated)

    def _taken(self, extras: dict[str, Any]) -> dict[str, Any]:
        """The extras of the actions that are carried out in this row: the last ones where they are still under way. The row in which a
        result comes so holds the action that it came from."""
        waiting = self.env.waiting
        if self._under_way is None or not waiting.any():
            return extras

        def choose(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            return np.where(waiting.reshape(-1, *[1] * (new.ndim - 1)), old, new)

        return tree.map(choose, extras, self._under_way)

    def get_state(self) -> dict[str, Any]:
        """All that is needed to go on as if nothing had happened: {"arrays": tree, "json": plain data}."""
        assert self.rng is not None
        env = self.env.get_state()
        arrays = {
            "env": env["arrays"],
            "obs": self.obs,
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
            "first": self.first.copy(),
            "dead": self.env.dead.copy(),
            "state": {} if self.state is None else self.state,
            "rewards": self.rewards.get_state() if self.rewards else {},
            "stats": self.stats.get_state(),
        }
        json = {"env": env["json"], "rng": self.rng.bit_generator.state, "env_steps": self.env_steps}
        return {"arrays": arrays, "json": json}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`; where the environment cannot, new episodes start and `env.exact` is False."""
        arrays, json = state["arrays"], state["json"]
        assert self.rng is not None
        self.rng.bit_generator.state = json["rng"]
        self.env_steps = int(json["env_steps"])
        self.stats.set_state(arrays["stats"])
        if self.rewards:
            self.rewards.set_state(arrays["rewards"])
        self.obs = self.env.set_state({"arrays": arrays["env"], "json": json["env"]})
        same = tree.equal(self.obs, tree.map(np.asarray, arrays["obs"])) and np.array_equal(
            self.env.dead, arrays["dead"]
        )
        if self.env.exact and same:
            self.returns, self.lengths = np.array(arrays["returns"]), np.array(arrays["lengths"])
            self.first = np.array(arrays["first"])
            if self.state is not None:
                self.state = tree.map(np.array, arrays["state"])
        else:
            self.env.exact = False


@dataclass(slots=True)
class Step:
    """One row of all environments: what was seen, done and got."""

    obs: Any
    valid: np.ndarray
    first: np.ndarray
    state: Any
    outputs: dict[str, Any]
    extras: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Training:
    """An algorithm at work on an environment, in this process."""

    def __init__(self, algo: Any, run: RunConfig, env: EnvConfig, model: Any, config: Any):
        if run.num_workers:
            raise ConfigError(
                f"num_workers={run.num_workers}: rollouts in other processes (Ray) are not there yet, use num_workers=0"
            )
        self.algo, self.run, self.env_config, self.model_config, self.config = algo, run, env, model, config
        self.device = resolve_device(run.device)
        self.env = make_vec(env, seed=run.seed)
        self.spec = self.env.spec
        torch.set_num_threads(run.threads or _threads(self.spec.observation))
        torch.manual_seed(run.seed)
        self.policy = algo.Policy(config, self.spec, getattr(model, "max_seq_len", None))
        self.model: nn.Module = algo.make_model(config, self.spec, model).to(self.device)
        if env.wait_num is not None:
            self._refuse_waiting()
        self.learner = algo.Learner(config, self.spec, self.model, model, seed=run.seed, record=run.record)
        rewards = (
            RewardTransform(env, env.num_envs, config.gamma) if env.clip_rewards or env.normalize_rewards else None
        )
        initial_state = self.model.initial_state if is_recurrent(self.model) else None
        self._initial_state = (lambda n: tree.map(np.asarray, initial_state(n))) if initial_state else None
        engine = TorchEngine(self.model, None if initial_state else self.policy.act_outputs, run.record)
        rng = np.random.default_rng([run.seed, 0])
        self.rollout = Rollout(self.env, engine, self.policy, rng, rewards, self._initial_state)
        self.rollout.reset(run.seed)
        self.iteration = 0
        self.replay: Replay | None = None
        self._recent: Any = None
        self._policy_numbers: Callable[[int], Mapping[str, float]] = getattr(self.policy, "numbers", lambda step: {})
        self._due = 0
        if config.on_policy:
            self._later = self._separate_outputs()
            self._iterate = self._on_policy
        else:
            self._sample_rng = np.random.default_rng([run.seed, 2])
            self._beta = make_schedule(config.priority_beta if config.prioritized else 1.0)
            self._limits = {name: getattr(config, name, None) for name in ("max_use", "max_staleness")}
            self._least = config.batch_size if any(self._limits.values()) else 1
            ready = env.wait_num or env.num_envs  # of a row; and every other row may be a dead one
            size = -(-2 * config.batch_size * env.num_envs // ready)
            if self._least > 1 and config.replay_size < size:
                raise ConfigError(
                    f"with max_use or max_staleness a gradient step waits until batch_size={config.batch_size} transitions can be "
                    f"drawn, so replay_size is at least {size}; got {config.replay_size}"
                )
            self._iterate = self._off_policy

    def _refuse_waiting(self) -> None:
        """`env.wait_num` is for algorithms that learn from single transitions and sums over them."""
        n_step = getattr(self.config, "n_step", 1)
        if n_step > 1:
            what, instead = f"n_step={n_step}", "n_step=1"
        elif is_recurrent(self.model):
            what, instead = "a model with memory", "use_lstm=false"
        else:
            return
        self.env.close()
        raise ConfigError(
            f"env.wait_num={self.env_config.wait_num} does not go with {what}: between two steps of an environment that is waited for lie "
            f"rows in which nothing happened to it, and {what} takes neighbouring rows for neighbouring steps. Set {instead}, or leave "
            "env.wait_num out."
        )

    # --- one iteration ------------------------------------------------------------------------------------------------

    def iterate(self, most_episodes: int | None = None) -> dict[str, Any]:
        """One iteration; returns its row of numbers. It ends early when `most_episodes` have been finished since training began."""
        start, steps = time.perf_counter(), self.rollout.env_steps
        self.rollout.most_episodes, self.rollout.full = most_episodes, False
        self.rollout.seconds = {"env": 0.0, "forward": 0.0}
        self._learn_seconds = 0.0
        losses = self._iterate()
        self.iteration += 1
        seconds = time.perf_counter() - start
        perf = {**self.rollout.seconds, "learn": self._learn_seconds}
        perf["idle"] = max(0.0, seconds - sum(perf.values()))
        return {
            "training_iteration": self.iteration,
            "env_steps_total": self.rollout.env_steps,
            "learner_steps_total": self.learner.steps,
            **self.rollout.stats.row(),
            **{f"loss/{k}": v for k, v in losses.items()},
            **self._replay_numbers(),
            **{f"policy/{k}": v for k, v in self._policy_numbers(self.rollout.env_steps).items()},
            **{f"perf/{k}": 1e3 * v for k, v in perf.items()},
            "env_steps_per_second": (self.rollout.env_steps - steps) / seconds,
            "time_this_iter_s": seconds,
        }

    def _on_policy(self) -> dict[str, float]:
        trajectory = self.collect(self.config.rollout_length)
        if trajectory is None:
            return {}
        start = time.perf_counter()
        update = self.learner.update(self.policy.samples(trajectory), self.rollout.env_steps)
        metrics = update.metrics
        self._learn_seconds = time.perf_counter() - start
        return metrics

    def _off_policy(self) -> dict[str, float]:
        c, rollout = self.config, self.rollout
        until = (rollout.env_steps // ITERATION_STEPS + 1) * ITERATION_STEPS
        total: torch.Tensor | None = None
        names: tuple[str, ...] = ()
        count = 0
        while rollout.env_steps < until and not rollout.full:
            before = rollout.env_steps
            step = rollout.step()
            if self.replay is None:
                self.replay = self._make_replay(step)
            kept = _kept(step) if len(step.extras) > 1 else {}
            action = step.extras["action"]
            self.replay.add(step.obs, action, step.reward, step.terminated, step.truncated, step.valid, **kept)
            self._due += rollout.env_steps - before
            if rollout.env_steps <= c.learning_starts or len(self.replay) < self._least:
                self._due = min(self._due, c.train_every)
                continue
            start = time.perf_counter()
            while self._due >= c.train_every:
                self._due -= c.train_every
                for _ in range(c.updates):
                    if len(self.replay) < self._least:
                        break  # the rest is used up or stale: wait for new rows
                    batch = self.replay.sample(c.batch_size, self._sample_rng, self._beta(rollout.env_steps))
                    update = self.learner.update(batch, rollout.env_steps)
                    if update.priorities is not None:
                        self.replay.update_priorities(batch["id"], update.priorities)
                    self.replay.advance(self.learner.steps)
                    total = update.values if total is None else total + update.values
                    names, count = update.names, count + 1
            self._learn_seconds += time.perf_counter() - start
        return {} if total is None else dict(zip(names, (total / count).tolist(), strict=True))

    def collect(self, steps: int) -> Trajectory | None:
        """`steps` rows of every environment with the outputs that the Policy's `samples` reads; None when the last episode to be counted
        ended before: updates have a fixed shape."""
        rollout, keep = self.rollout, self.policy.keep_outputs
        columns: dict[str, Any] | None = None
        for t in range(steps):
            step = rollout.step()
            if columns is None:
                columns = _allocate(step, steps, keep)
            _write(columns, t, step, keep)
            if rollout.full and t + 1 < steps:
                self._recent = tree.map(lambda x, rows=t + 1: x[:rows].reshape(-1, *x.shape[2:]), columns["obs"])
                return None
        assert columns is not None
        tree.map(lambda column, x: column.__setitem__(steps, x), columns["obs"], rollout.obs)
        self._recent = tree.map(lambda x: x.reshape(-1, *x.shape[2:]), columns["obs"])
        columns["first"][steps] = rollout.first
        outputs = columns["outputs"]
        if self._later is not None:
            late = self._later.forward(self._recent)
            outputs = {k: late[k].reshape(steps + 1, -1, *late[k].shape[1:]) for k in keep}
        else:
            last = rollout.engine.forward(
                rollout.obs, *([] if rollout.state is None else [_zeroed(rollout.state, rollout.first)])
            )
            for k in keep:
                outputs[k][steps] = last[k]
        return Trajectory(
            obs=columns["obs"],
            action=columns["extras"]["action"],
            reward=columns["reward"],
            terminated=columns["terminated"],
            truncated=columns["truncated"],
            valid=columns["valid"],
            outputs=outputs,
            extras=columns["extras"],
            first=columns["first"],
            state=None,
        )

    def _separate_outputs(self) -> TorchEngine | None:
        """An engine for what `samples` reads and `act` does not, where computing that once per rollout saves work."""
        act, keep = self.policy.act_outputs, self.policy.keep_outputs
        both = TorchEngine(self.model, (*act, *keep), self.run.record)
        if self._initial_state is None and self.run.record:
            all_ = both.parameters_read(self.rollout.obs)
            some = self.rollout.engine.parameters_read(self.rollout.obs)
            if all_ and some and some < (1.0 - SEPARATE) * all_:
                return TorchEngine(self.model, keep, self.run.record)
        if self._initial_state is None:
            self.rollout.engine = both
        return None

    def _replay_numbers(self) -> dict[str, float]:
        """What a result row says of the replay and of what was drawn in this iteration."""
        if self.replay is None:
            return {}
        numbers = {"size": len(self.replay), **self.replay.stats()}
        return {f"replay/{k}": v for k, v in numbers.items()}

    def _make_replay(self, step: Step) -> Replay:
        c = self.config
        example = {"obs": tree.index(step.obs, 0), "action": step.extras["action"][0]} | tree.index(_kept(step), 0)
        options: dict[str, Any] = {"gamma": c.gamma, "n_step": c.n_step, "prioritized": c.prioritized}
        if c.prioritized:
            options["alpha"] = c.priority_alpha
        options |= {**self._limits, "monitor": True, "frame_stack": frame_stack(self.spec)}
        replay = Replay(c.replay_size, self.env.num_envs, example, **options)
        replay.advance(self.learner.steps)
        return replay

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, episodes: int | None = None) -> dict[str, Any]:
        """Greedy episodes in environments of their own, on seeds that are the same in every run: mean with a 95 % interval."""
        episodes = episodes or self.run.eval_episodes
        config = eval_config(self.env_config, min(episodes, 16))
        with make_vec(config, seed=EVAL_SEED) as env:
            engine = TorchEngine(self.model, None if self._initial_state else self.policy.act_outputs, self.run.record)
            results = play(env, engine, self.policy, episodes, EVAL_SEED, initial_state=self._initial_state)
        return summarize(results)

    # --- state --------------------------------------------------------------------------------------------------------

    def get_state(self, replay_dir: Path | None = None) -> dict[str, Any]:
        """{"arrays": tree, "json": plain data}; the Model's weights are apart (`weights`)."""
        rollout = self.rollout.get_state()
        learner = self.learner.state_dict()
        arrays: dict[str, Any] = {"rollout": rollout["arrays"], "learner": learner["parts"]}
        json: dict[str, Any] = {
            "rollout": rollout["json"],
            "learner": {k: v for k, v in learner.items() if k != "parts"},
            "iteration": self.iteration,
            "due": self._due,
        }
        if not self.config.on_policy:
            json["sample_rng"] = self._sample_rng.bit_generator.state
            json["replay"] = False
            if self.replay is not None and replay_dir is not None and self._saves_replay():
                arrays["replay"] = self.replay.save(replay_dir)
                json["replay"] = True
        return {"arrays": arrays, "json": json}

    def _saves_replay(self) -> bool:
        how = self.run.checkpoint_replay
        return how == "always" or (how == "auto" and self.replay is not None and self.replay.nbytes <= 2 << 30)

    def set_state(
        self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path | None = None
    ) -> bool:
        """Go on from a state; returns whether that is exact."""
        arrays, json = state["arrays"], state["json"]
        self.set_weights(weights)
        self.learner.load_state_dict({"parts": arrays["learner"], **json["learner"]})
        self.rollout.set_state({"arrays": arrays["rollout"], "json": json["rollout"]})
        self.iteration, self._due = int(json["iteration"]), int(json["due"])
        exact = self.env.exact
        if not self.config.on_policy:
            self._sample_rng.bit_generator.state = json["sample_rng"]
            if json["replay"] and replay_dir is not None:
                obs = self.rollout.obs
                self.replay = self._make_replay(self._example_step(obs))
                self.replay.load(replay_dir, arrays["replay"])
                if not self.env.exact:
                    self.replay.cut()
            elif self.rollout.env_steps:
                exact = False
        return exact

    def _example_step(self, obs: Any) -> Step:
        outputs = self.rollout.engine.forward(obs)
        _, extras = self.policy.act(outputs, obs, None, 0)
        nothing = np.zeros(self.env.num_envs, np.float32)
        return Step(obs, nothing, nothing, None, outputs, extras, nothing, nothing, nothing)

    def recent_observations(self, rows: int = 1024, most_bytes: int = 8 << 20) -> Any:
        """The newest raw observations, for checking and calibrating exported models; at most `most_bytes` of them."""
        obs = self._recent
        if self.replay is not None:
            newest = self.replay.newest(rows)["obs"]  # looked at, not drawn: saving must not count as use
            obs = newest if tree.length(newest) else obs
        if obs is None:
            return None
        rows = min(rows, tree.length(obs), max(1, most_bytes * tree.length(obs) // max(1, tree.nbytes(obs))))
        return tree.map(lambda x: np.ascontiguousarray(x[-rows:]), obs)

    def weights(self) -> dict[str, np.ndarray]:
        return {k: v.detach().cpu().numpy().copy() for k, v in self.model.state_dict().items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        load_weights(self.model, weights)

    def close(self) -> None:
        self.env.close()


def _threads(space: Any) -> int:
    pictures = any(len(s.shape) >= 2 for s in _leaf_spaces(space))
    return (os.cpu_count() or 1) if pictures else 1


def _leaf_spaces(space: Any) -> list[Any]:
    return [leaf for part in space.parts for leaf in _leaf_spaces(part)] if space.parts else [space]


def frame_stack(spec: Any) -> int | None:
    """How many frames an observation stacks, when the preprocessing says so and they come first."""
    stack = spec.preprocessing.get("frame_stack") or spec.preprocessing.get("atari", {}).get("frame_stack")
    space = spec.observation
    return stack if stack and stack > 1 and space.kind == "box" and space.shape[0] == stack else None


def _kept(step: Step) -> dict[str, Any]:
    """Extras that replay keeps beside the action."""
    return {k: v for k, v in step.extras.items() if k != "action"}


def _zeroed(state: Any, first: np.ndarray) -> Any:
    return tree.map(lambda x: np.where(first.reshape(-1, *[1] * (x.ndim - 1)), np.float32(0.0), x), state)


def _allocate(step: Step, steps: int, keep: tuple[str, ...]) -> dict[str, Any]:
    def column(x: np.ndarray, rows: int = steps) -> np.ndarray:
        return np.empty((rows, *x.shape), x.dtype)

    extras = dict(step.extras) | ({} if step.state is None else {"state": step.state})
    return {
        "obs": tree.map(lambda x: column(x, steps + 1), step.obs),
        "first": column(step.first, steps + 1),
        "outputs": {k: column(step.outputs[k], steps + 1) for k in keep if k in step.outputs},
        "extras": tree.map(column, extras),
        "reward": column(step.reward),
        "terminated": column(step.terminated),
        "truncated": column(step.truncated),
        "valid": column(step.valid),
    }


def _write(columns: dict[str, Any], t: int, step: Step, keep: tuple[str, ...]) -> None:
    obs = columns["obs"]
    if isinstance(obs, np.ndarray):
        obs[t] = step.obs
    else:
        tree.map(lambda column, x: column.__setitem__(t, x), obs, step.obs)
    for k, column in columns["outputs"].items():
        column[t] = step.outputs[k]
    extras = columns["extras"]
    for k, x in step.extras.items():
        extras[k][t] = x
    if step.state is not None:
        tree.map(lambda column, x: column.__setitem__(t, x), extras["state"], step.state)
    columns["first"][t] = step.first
    columns["reward"][t] = step.reward
    columns["terminated"][t] = step.terminated
    columns["truncated"][t] = step.truncated
    columns["valid"][t] = step.valid


# --- evaluation -------------------------------------------------------------------------------------------------------------


def eval_config(config: EnvConfig, num_envs: int) -> EnvConfig:
    """The environment as it is judged: whole episodes, raw rewards, all waited for. An environment given as an object is there only
    once."""
    if not isinstance(config.id, (str, type)) and hasattr(config.id, "step"):
        num_envs = 1
    atari = dataclasses.replace(config.atari, episodic_life=False)
    return dataclasses.replace(
        config,
        num_envs=num_envs,
        per_env=config.per_env[:num_envs],
        atari=atari,
        clip_rewards=None,
        normalize_rewards=False,
        wait_num=None,
        step_wait_timeout=0.0,
    )


def play(
    env: VecEnv,
    engine: TorchEngine,
    policy: Any,
    episodes: int,
    seed: int,
    *,
    rng: np.random.Generator | None = None,
    initial_state: Callable[[int], Any] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> list[tuple[float, int]]:
    """Play `episodes` whole episodes (each environment its share, so that short ones are not preferred): (return, length) each."""
    share = [episodes // env.num_envs + (b < episodes % env.num_envs) for b in range(env.num_envs)]
    done: list[list[tuple[float, int]]] = [[] for _ in share]
    rollout = Rollout(env, engine, policy, rng, None, initial_state)
    rollout.reset(seed)
    while any(len(d) < s for d, s in zip(done, share, strict=True)):
        step = rollout.step()
        if on_step is not None:
            on_step(step)
        for b, return_, length in rollout.ended:
            if len(done[b]) < share[b]:
                done[b].append((return_, length))
    return [result for d in done for result in d]


def play_steps(
    env: VecEnv,
    engine: TorchEngine,
    policy: Any,
    steps: int,
    seed: int,
    *,
    rng: np.random.Generator | None = None,
    initial_state: Callable[[int], Any] | None = None,
) -> tuple[list[tuple[float, int]], tuple[float, int]]:
    """Play exactly `steps` steps in one environment, episode after episode: (return, length) of each whole one, and of the one that was
    cut (length 0: none was)."""
    done: list[tuple[float, int]] = []
    rollout = Rollout(env, engine, policy, rng, None, initial_state)
    rollout.reset(seed)
    while rollout.env_steps < steps:
        rollout.step()
        done += [(return_, length) for _, return_, length in rollout.ended]
    return done, (float(rollout.returns[0]), int(rollout.lengths[0]))


def summarize(results: list[tuple[float, int]]) -> dict[str, Any]:
    """Mean return of evaluation episodes with the half width of its 95 % confidence interval."""
    returns = np.array([r for r, _ in results])
    n = len(returns)
    return {
        "eval/return_mean": float(returns.mean()),
        "eval/return_ci95": float(1.96 * returns.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "eval/return_min": float(returns.min()),
        "eval/return_max": float(returns.max()),
        "eval/length_mean": float(np.mean([n for _, n in results])),
        "eval/episodes": n,
    }
