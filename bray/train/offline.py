"""Training from files of episodes (`bray.data.sources` says which), without an environment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from bray.data.episodes import Episodes
from bray.data.experience import Dataset, Experience, Replay, Sequences
from bray.data.file_windows import Windows
from bray.data.generation import Generation
from bray.data.rollouts import Rollouts
from bray.data.sources import given_spec, guess, open_data
from bray.envs.build import agent_spec
from bray.envs.config import EnvConfig
from bray.envs.rewards import RewardTransform
from bray.errors import ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.spec import EnvSpec
from bray.train.config import DataConfig, RunConfig
from bray.train.device import resolve_device
from bray.train.driver import Driver
from bray.train.local import LocalTraining, make_side
from bray.train.source import FileSource
from bray.train.workers import Home

logger = logging.getLogger("bray")

ID = "files"
"""The environment's name of a run that has none."""
BATCHES = 100
"""Batches of an iteration, at most."""


class FileTraining(Driver):
    """An algorithm that learns from files."""

    depends_on_timing = ""

    def __init__(self, algo: Any, run: RunConfig, env: EnvConfig, model: Any, config: Any, data: DataConfig):
        self.algo, self.run_config, self.env_config = algo, run, env
        if env.id == ID and (run.eval_freq or run.video_freq):
            raise ConfigError("eval_freq, video_freq: there is no environment to evaluate in: name one with --env")
        if played := [key for key in run.stop if key.startswith("episode")]:
            raise ConfigError(
                f"run.stop: {played[0]!r}, but a run that learns from files plays no episodes (data/return_mean is "
                "that of the files): say eval/return_mean, with --env ENV --eval-freq N"
            )
        if not run.eval_freq:
            logger.warning(
                "nothing says how well this plays: --eval-freq N evaluates it%s",
                "" if env.id != ID else ", with --env ENV for an environment to play in",
            )
        self.device = resolve_device(run.device)
        self.data = open_files(data, env)
        self.spec = self.data.spec
        for note in self.data.notes:
            logger.warning("%s", note)
        side = make_side(algo, run, self.spec, model, config)
        if is_recurrent(side.model) and not isinstance(side.experience, Windows):
            raise ConfigError("a model with memory cannot learn from single transitions of files: set use_lstm=false")
        side.experience = as_dataset(side.experience, run.algorithm, config, data.epochs)
        side.experience.seed(run.seed)
        dataset = side.experience if isinstance(side.experience, Dataset) else None
        source = FileSource(self.data, self.spec.layout, reads_itself=dataset is not None)
        if dataset is not None:
            dataset.read_from(source, data.memory_mb * 1_000_000)
        super().__init__([side], [source])
        if "env_steps_total" in run.stop:
            logger.warning(
                "env_steps_total (--steps) counts what is read from files, and all %s steps are read before the first "
                "one is learnt from: the run ends with its first iteration. Say how much to learn by data.epochs, or "
                "by --stop '{\"learner_steps_total\": N}'",
                f"{self.data.steps.sum():,}",
            )

    def describe(self) -> str:
        return f"{len(self.data):,} episodes of files, {self.data.steps.sum():,} steps"

    def learn(self, total: Any = None, one: bool = False) -> int:
        """Several batches an iteration: a row for each would cost more than learning from it."""
        count = 0
        while count < BATCHES and not self.stopped and super().learn(total, one):
            count += 1
        return count


class MixedTraining(LocalTraining):
    """An algorithm that plays, with a share of every batch from files."""

    def __init__(
        self,
        algo: Any,
        run: RunConfig,
        env: EnvConfig,
        model: Any,
        config: Any,
        data: DataConfig,
        home: Callable[[], Home] | None = None,
    ):
        super().__init__(algo, run, env, model, config, home)
        try:
            mix_files(self.experience, run, env, data)
        except BaseException:
            self.close()
            raise


def mix_files(
    experience: Experience, run: RunConfig, env: EnvConfig, data: DataConfig, spec: EnvSpec | None = None
) -> None:
    """Have a share of every batch come from files. `spec`: the spaces of what is played, where that is no environment
    of ours."""
    rewards = RewardTransform(env, 1, 1.0)
    if not experience.mixes or rewards.normalize:
        raise ConfigError(
            f"--data-share {data.share}: rows of files go into batches that are replayed, with rewards as they "
            f"are: use DQN, SAC, GAIL or the like (not {run.algorithm}), without env.normalize_rewards"
        )
    files = open_files(data, env, spec)
    files.all_legal = spec is not None
    source = FileSource(files, files.spec.layout, reads_itself=True, rewards=rewards.clipped)
    assert data.share is not None
    experience.mix_with(source, data.share, data.memory_mb * 1_000_000, run.seed)
    if data.pretrain:
        if not isinstance(experience, Replay):
            raise ConfigError(
                f"data.pretrain: {run.algorithm} learns from rollouts beside the files, not from files alone: "
                "leave it out, or start with a cloned policy (--run BC --data FILES, then --init-from)"
            )
        experience.files_first = data.pretrain


def open_files(data: DataConfig, env: EnvConfig, spec: EnvSpec | None = None) -> Any:
    """The data set of a config. Its spaces are `spec`, an environment's where one is named, else those of `data.obs`
    and `data.actions`, else those that the files say."""
    if not data.files:
        raise ConfigError("data.files is empty: say which files to learn from, --data FILES (data=)")
    if spec is None and env.id != ID:
        spec = agent_spec(env)
    if spec is None and not (data.obs is None and data.actions is None):
        spec = given_spec(data.obs, data.actions)
    files = open_data(data.files, spec, data.skip_broken)
    if files.spec is None:
        obs, actions = guess(files[0]) if len(files) else ("float32[4]", "2")
        raise ConfigError(
            f"{data.files} does not say what observations and actions are (spec.json or metadata.json beside the files "
            f"would): name the environment with --env, or the spaces, such as --obs '{obs}' --actions '{actions}'"
        )
    return files


def data_spec(data: DataConfig, env: EnvConfig) -> EnvSpec:
    """The spaces of the files of a config."""
    spec: EnvSpec = open_files(data, env).spec
    return spec


def as_dataset(experience: Experience, algorithm: str, config: Any, epochs: int) -> Experience:
    """What an algorithm learns from, as a Dataset. One of the algorithm's own kind stays as it is."""
    if isinstance(experience, Rollouts) and experience.mixes:
        raise ConfigError(
            f"{algorithm} learns from what it plays, with files beside it: --data-share 0.5 beside --env ENV"
        )
    if isinstance(experience, (Rollouts, Sequences, Episodes, Generation)):
        raise ConfigError(
            f"{algorithm} learns from what its newest policy did, not from files of another one: use BC, MARWIL, IQL, "
            "CQL or TD3+BC, one that replays (DQN, SAC), or one of your own whose experience is a Dataset"
        )
    if isinstance(experience, Replay):
        return Dataset(experience.batch_size, epochs, config.gamma, getattr(config, "n_step", 1))
    if isinstance(experience, Dataset):
        experience.epochs = epochs
    return experience
