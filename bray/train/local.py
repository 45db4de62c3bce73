"""A training in this process: an algorithm's names, an environment, a driver over both."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bray import tree
from bray.algos import algo_name, broken, make_experience, make_policy
from bray.data.experience import Replay
from bray.data.rollouts import Rollouts
from bray.envs.build import env_spec
from bray.envs.config import EnvConfig
from bray.envs.device import DeviceVecEnv
from bray.envs.make import make_vec
from bray.envs.registry import sent
from bray.envs.rewards import RewardTransform
from bray.errors import CheckpointError, ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.nn.catalog import example_obs
from bray.nn.shared import read_encoder
from bray.rundir import RunDir
from bray.spec import EnvSpec
from bray.train.acting import acting_engine, initial_state
from bray.train.central import CentralServer
from bray.train.config import RunConfig
from bray.train.device import is_picture, keep_freed_memory, resolve_device, tune, use_threads
from bray.train.driver import Driver
from bray.train.evaluate import evaluate_model
from bray.train.exchange import ExchangeSource
from bray.train.on_device import DeviceSource, why_not_on_device
from bray.train.output import EpisodeOutput
from bray.train.played import PlayedSource
from bray.train.processes import Processes
from bray.train.ranks import Ranks
from bray.train.rollout import EnvSource, Rollout
from bray.train.sampler import SamplerPlan, group_numbers
from bray.train.side import Side
from bray.train.workers import REPLAY_ROWS, Home, WorkerSource

logger = logging.getLogger("bray")

_COPYING = 4  # threads
_drawing = threading.RLock()  # a network may load another run


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights by a seed: torch has one random generator for all threads, and another one that made an experiment
    would draw from it too."""
    with _drawing:
        torch.manual_seed(seed)
        yield


def make_side(
    algo: Any,
    run: RunConfig,
    spec: EnvSpec,
    model_config: Any,
    config: Any,
    model: nn.Module | None = None,
    learner: Any = None,
    learns: bool = True,
    reads: nn.Module | None = None,
) -> Side:
    """The parts of an algorithm for these spaces. What is drawn first is drawn in this order: Model, then Learner.
    `model`: one that is there already, on its device; `learner`: a class in place of the algorithm's. `reads`: the
    Model whose encoder this one has, too."""
    device = resolve_device(run.device) if model is None else next(model.parameters()).device
    tune(device, wait_asleep=run.workers > 0)  # workers need the cores
    keep_freed_memory()
    use_threads(run.threads if isinstance(run.threads, int) else max(1, threads_for(spec, device) // run.num_learners))
    with seeded(run.seed) if model is None else nullcontext():
        policy = make_policy(algo, config, spec)
        if model is None:
            model = algo.make_model(config, spec, model_config)
            if not isinstance(model, nn.Module):
                raise broken(algo_name(algo), f"its make_model returned {type(model).__name__}, not an nn.Module")
            model = model.to(device)
        if reads is not None:
            read_encoder(model, reads)
        policy.draws = getattr(model, "draws", None) or {}
        made = None
        if learns:
            made = (learner or algo.Learner)(config, spec, model, model_config, seed=run.seed, record=run.record)
    experience = make_experience(algo, config, spec, model_config)
    experience.seed(run.seed)
    if run.iteration_steps is not None:
        experience.iteration_steps = run.iteration_steps
    own = getattr(algo, "iterate", None) if learns else None
    return Side(model, policy, experience, made, config=config, spec=spec, iterate=own)


def describe_policy(policy: Any, model: Any) -> dict[str, Any]:
    """What a service needs to act without the algorithm's code, for `policy.json`. `rule` is null where the Policy has
    a way of its own."""
    recurrent = is_recurrent(model)
    initial = model.initial_state(1) if recurrent else None
    by_rule = policy.acts_by_rule()
    return {
        "rule": policy.rule.name if by_rule else None,
        "settings": policy.rule.trained() if by_rule else {},
        "outputs": list(policy.served_outputs),
        "recurrent": recurrent,
        "state": tree.map(lambda x: {"shape": list(x.shape[1:]), "dtype": str(np.asarray(x).dtype)}, initial)
        if recurrent
        else None,
    }


class LocalTraining(Driver):
    """An algorithm at work on an environment, in this process."""

    def __init__(
        self,
        algo: Any,
        run: RunConfig,
        env: EnvConfig,
        model: Any,
        config: Any,
        home: Callable[[], Home] | None = None,
        learns: bool = True,
        reads: nn.Module | None = None,
        ranks: Ranks | None = None,
    ):
        """`home` makes the place where workers live; None = processes of this machine. `learns`: else it plays with
        the weights that it starts with. `reads`: the Model whose encoder it has, too."""
        self.algo, self.run_config, self.env_config, self._home = algo, run, env, home
        self.device = resolve_device(run.device)
        self._central: CentralServer | None = None
        check_inference(run)
        self.env = None if run.workers else make_vec(env, seed=run.seed, device=self.device)
        self.spec = env_spec(env) if self.env is None else self.env.spec
        try:
            side = make_side(algo, run, self.spec, model, config, learns=learns, reads=reads)
            if env.wait_num is not None:
                _refuse_waiting(env.wait_num, side)
            if hasattr(side.experience, "check_rows"):
                total = env.num_envs * max(1, run.workers)
                ready = (env.wait_num or env.num_envs) * max(1, run.workers)
                side.experience.check_rows(total, ready)
            source = self._play_here(side) if self.env is not None else self._play_in_workers(side, model)
        except BaseException:
            if self.env is not None:
                self.env.close()
            if self._central is not None:
                self._central.close()
            raise
        super().__init__([side], [source], ranks=ranks)
        if run.output is not None:
            RunDir(run.output).write_spec(self.spec)

    def _play_here(self, side: Side) -> EnvSource:
        run, env = self.run_config, self.env_config
        assert self.env is not None
        side.policy.seat(0, env.num_envs, env.num_envs)
        rewards = RewardTransform(env, env.num_envs, getattr(side.config, "gamma", 1.0))
        self.rollout = Rollout(
            self.env,
            acting_engine(side.model, side.policy, run.record),
            side.policy,
            np.random.default_rng([run.seed, 0]),
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(side.model),
        )
        if run.output is not None:
            self.rollout.output = EpisodeOutput(run.output, 0, 0, run.output_file_mb)
        self.rollout.reset(run.seed)
        assert side.experience.piece_length is not None
        rows, state_every = side.experience.piece_length, side.experience.state_every
        if isinstance(self.env, DeviceVecEnv) and side.learner is not None:
            if not (why := why_not_on_device(self.rollout, side)):
                return DeviceSource(self.rollout, rows, run.record)
            logger.warning("every step of %s is copied to the host: %s", self.spec.id, why)
        return EnvSource(self.rollout, rows, state_every, run.record, isinstance(side.experience, Rollouts))

    def _play_in_workers(self, side: Side, model: Any) -> PlayedSource:
        """By the experience: workers that play while the learner learns, or in rounds with its newest weights."""
        run, rows = self.run_config, side.experience.piece_length
        assert rows is not None
        if not isinstance(side.experience, (Rollouts, Replay)):
            raise ConfigError(
                f"num_workers={run.workers}: {algo_name(self.algo)} learns from whole episodes that "
                "this process plays; set num_workers=0"
            )

        self._central = self._inference_for(side)
        weights = side.weights_now if self._central is None else dict

        if lockstep := run.lockstep and isinstance(side.experience, Replay):
            at_once = max(1, REPLAY_ROWS // (run.workers * self.env_config.num_envs))
        else:
            at_once = REPLAY_ROWS
        plan = SamplerPlan(
            self.algo,
            run,
            sent(self.env_config),
            model,
            side.config,
            index=0,
            rows=at_once if rows == 1 else rows,
            state_every=side.experience.state_every,
        )
        asynchronous = side.experience.asynchronous and not lockstep
        if run.exchange is not None:
            if not asynchronous:
                raise ConfigError(
                    f"run.exchange: workers play on while {algo_name(self.algo)} learns, and "
                    + ("run.lockstep" if lockstep else algo_name(self.algo))
                    + " has rounds, for which all would have to be there: leave out "
                    + ("run.lockstep" if lockstep else "run.exchange, or take an algorithm such as APPO or DQN")
                )
            plan.env = self.env_config  # by its name
            return ExchangeSource(plan, self.spec, weights, side.experience.lanes)
        home = Processes(weights(), self._central) if self._home is None else self._home()
        return WorkerSource(plan, home, weights, asynchronous, side.experience.lanes, ahead=lockstep)

    def _inference_for(self, side: Side) -> CentralServer | None:
        run = self.run_config
        if run.inference == "worker":
            return None
        obs = tree.map(lambda x: x.numpy(), example_obs(self.spec.observation, 1))
        groups = [len(numbers) for numbers in group_numbers(run, self.env_config.num_envs)]
        return CentralServer(side.model, side.policy, obs, run.workers, groups, run.record)

    def close(self) -> None:
        super().close()
        if self._central is not None:
            self._central.close()

    @property
    def depends_on_timing(self) -> str:
        """Why, in words; empty where it does not."""
        if self.env is not None and self.env.waits:
            return f"env.wait_num={self.env_config.wait_num}"
        if not all(source.exact for source in self.sources):
            return f"num_workers={self.run_config.workers}, which play while the learner learns"
        return ""

    def set_state(
        self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path | None = None
    ) -> bool:
        before, now = int(state["json"].get("learners", 1)), self.run_config.num_learners
        if before != now:
            raise CheckpointError(
                f"the checkpoint is of {before} learner{'s' if before > 1 else ''} and run.num_learners is {now}: what "
                f"an update learns from would change. Go on with num_learners={before}, or begin a new run with "
                "init_from=RUN_DIR"
            )
        exact = super().set_state(state, weights, replay_dir)
        self.experience.change_rewards(RewardTransform(self.env_config, 1, 1.0).clipped)
        return exact

    def describe(self) -> str:
        """Where pieces come from, in words."""
        if self.env is None:
            workers, n = self.run_config.workers, self.env_config.num_envs
            if (exchange := self.run_config.exchange) is not None:
                return f"at most {workers} workers that share {exchange}, with {n} env{'s' if n > 1 else ''} each"
            where = "" if self._home is None else f" on {self.run_config.cluster or 'ray'}"
            ahead = ", a round ahead" if self.run_config.lockstep and isinstance(self.experience, Replay) else ""
            return f"{workers} worker{'s' if workers > 1 else ''}{where} with {n} env{'s' if n > 1 else ''} each{ahead}"
        form = type(self.env).__name__.removesuffix("VecEnv")
        words = {
            "InProcess": "in process",
            "Subprocess": "in processes",
            "Native": "native",
            "Ale": "native, C++",
            "Device": "of tensors",
        }
        n = self.env.num_envs
        return f"{n} env{'s' if n > 1 else ''} ({words.get(form, form)})"

    def evaluate(self, episodes: int | None = None) -> dict[str, Any]:
        """Greedy episodes in environments of their own, on seeds that are the same in every run: mean with a 95 %
        interval."""
        episodes = episodes or self.run_config.eval_episodes
        return evaluate_model(self.model, self.policy, self.env_config, episodes, self.run_config.record)


def check_inference(run: RunConfig) -> None:
    if run.inference == "central" and not run.workers:
        raise ConfigError(
            "run.inference=central is for workers, which ask the process that learns: set run.num_workers, or leave "
            "it out"
        )
    if run.inference == "central" and (run.cluster == "ray" or run.address or run.exchange):
        raise ConfigError(
            "run.inference=central needs workers on this machine: leave run.cluster, run.address and run.exchange out, "
            "or set run.inference=worker"
        )
    if (run.env_groups or 1) > 1 and run.inference != "central":
        raise ConfigError(
            f"run.env_groups={run.env_groups}: environments play in turn while actions are computed elsewhere; set "
            "run.inference=central, or leave it out"
        )


def _refuse_waiting(wait_num: int, side: Side) -> None:
    """`env.wait_num` is for algorithms that learn from single transitions and sums over them."""
    n_step = getattr(side.config, "n_step", 1)
    if n_step > 1:
        what, instead = f"n_step={n_step}", "n_step=1"
    elif is_recurrent(side.model):
        what, instead = "a model with memory", "use_lstm=false"
    else:
        return
    raise ConfigError(
        f"env.wait_num={wait_num} does not go with {what}: between two steps of an environment that is waited for lie "
        f"rows in which nothing happened to it, and {what} takes neighbouring rows for neighbouring steps. Set "
        f"{instead}, or leave env.wait_num out."
    )


def threads_for(spec: EnvSpec, device: torch.device) -> int:
    """One thread for vectors and boards (more are slower there: PPO on 5 x 7 x 7 took a third more CPU time), all cores
    for pictures; but few where a GPU computes: the CPU only copies then, and threads that wait for more to copy take
    time from the environments."""
    cores = os.cpu_count() or 1
    return (min(cores, _COPYING) if device.type == "cuda" else cores) if is_picture(spec) else 1
