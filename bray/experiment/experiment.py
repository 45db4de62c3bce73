"""The class that users and commands drive: train, save, load, resume, evaluate, serve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import figures, rundir
from bray._version import __version__
from bray.act import GREEDY, SAMPLE
from bray.act.asking import is_asked
from bray.algos import algo_name, make_policy
from bray.config import ConfigSource
from bray.config.secrets import refuse_hidden
from bray.data.piece import DEFAULT
from bray.diagnosis.symptoms import SECTIONS
from bray.diagnosis.watch import Watch
from bray.envs.build import Builder, env_spec, with_game
from bray.envs.make import make_vec
from bray.envs.registry import env_name
from bray.errors import CheckpointError, ConfigError, DataError
from bray.experiment.evaluations import Evaluations
from bray.experiment.film import Film, film, film_game
from bray.experiment.places import check_playable, crew_of, home_of, run_path
from bray.experiment.policy import ServedPolicy, check_mode, launched_model, onnx_player, serve_run
from bray.experiment.saved import (
    changed_by,
    check_spaces,
    made_from,
    named_in_script,
    read_config,
    read_launch,
    saved_policies,
    trust_check,
    with_choices,
    with_secrets,
    write_about,
)
from bray.experiment.start import start_with
from bray.inference.torch_engine import load_weights
from bray.metrics import Sink, TerminalSink
from bray.metrics.trackers import make_trackers
from bray.rundir import TRAINER_JSON, Checkpoint, RunDir, default_run_dir, several
from bray.rundir.trust import Answer, When
from bray.rundir.weights import WeightReport
from bray.serving.graph import GraphExport
from bray.spec import EnvSpec
from bray.train.acting import ActingPolicy
from bray.train.callbacks import CallbackList, make_callbacks
from bray.train.device import acting_device
from bray.train.evaluate import EVAL_SEED, eval_config, play, play_steps, summarize
from bray.train.fit import Choice
from bray.train.games import GameTraining, play_games, seating_of, side_of, summarize_games
from bray.train.goals import Score, check_stop, reached
from bray.train.live import ID as LIVE, LiveTraining, live_spec
from bray.train.live_league import LiveLeagueTraining
from bray.train.local import LocalTraining, seeded
from bray.train.machine import this_machine
from bray.train.offline import ID as FILES, FileTraining, MixedTraining, data_spec
from bray.train.opponents import load_opponent
from bray.train.policies import (
    PolicyTrainings,
    encoder_owners,
    first_algorithm,
    make_trainings,
    named_policies,
    set_up_policies,
)
from bray.train.progress import LastRow, Picture, Rows, describe, open_sinks
from bray.train.run import Run
from bray.train.settle import settle
from bray.train.setup import Check, Setup, set_up
from bray.train.source import RolloutWorker
from bray.train.table import Match
from bray.video import write_video

logger = logging.getLogger("bray")

_AUTO_REPLAY_BYTES = 2 << 30  # checkpoint_replay=auto saves replays up to this size
_TRY_AGAIN = 60.0  # seconds: a full disk is not asked at every iteration


class Experiment:
    """One run: configure, train, evaluate, save, load.

        exp = bray.Experiment(run="PPO", env="CartPole-v1", lr=2.5e-4, num_envs=8)
        exp.fit({"env_steps_total": 20_000})     # row by row: for row in exp.train(): print(row["episode_return_mean"])
        exp.plot()

    Nothing is written before `train` or `save`. `Experiment.load(path)` gives a trained one back (its `policy`,
    `evaluate`, more training); `Experiment.resume(path)` goes on exactly where a run stopped.
    """

    def __init__(
        self,
        run: Any = None,
        env: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        sources: Sequence[ConfigSource] = (),
        use_preset: bool = True,
        path: str | Path | None = None,
        project: str | Path | None = None,
        trial: str | None = None,
        live: bool = False,
        data: str | Path | None = None,
        _check: Check | None = None,
        _policies: Mapping[str, tuple[Sequence[ConfigSource], Check]] | None = None,
        **overrides: Any,
    ):
        """`live=True`: learn from games that call a service of this process, instead of an environment; `obs`,
        `actions`, `port` and the other keys of `LiveConfig` say where and what. `data`: trajectory files to learn from
        instead, a directory or a pattern. `policies={"first": {"run": "PPO"}, "second": {...}}`: several in one run
        (docs/policies.md)."""
        files = {"data": {"files": str(data)}} if data is not None else None
        given = [*sources, *(ConfigSource("python", dict(values)) for values in (config, overrides, files) if values)]
        several = bool(named_policies(given))
        begun = [*first_algorithm(given), *given] if run is None and several else given
        setup = set_up(run, env, begun, use_preset and not several, live, _check)
        self.algo, self.config, self.live = setup.algo, setup.config, setup.live
        saved = {} if _policies is None else _policies
        self.policies = {n: set_up(None, env, of, False, False, left, part=True) for n, (of, left) in saved.items()}
        if _policies is None:
            self.policies = set_up_policies(setup, env, given, use_preset, _check)
        """The setup of each policy, by name; empty where there is one."""
        self.env_id = env_name(setup.env)
        self._score = Score(self.config["run"], self.live)
        self._path = run_path(path, project, trial, self.config["run"].algorithm)
        self._run: Run | None = None
        self._weights: dict[str, Mapping[str, np.ndarray]] = {}  # by policy
        self._specs: dict[str, EnvSpec] = {}
        self._served: dict[str, ServedPolicy] = {}
        self.loaded: tuple[Path, int] | None = None
        """The checkpoint that was loaded, and its step."""
        self._opened = Path()  # of which run, or which of its policies
        # What a launch file said of the model, where its network is the project's own.
        self._launched: dict[str, Any] | None = None
        self._plays = True
        self._settled = False
        self.choice: Choice | None = None
        """What was chosen for settings that said `auto`, and why; None as long as none was."""
        self._check_training: Check | None = None
        """Asked before a loaded run trains: it may connect, listen and write."""
        self._resumes = False

    # --- parts, made when needed --------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """Its training and what is written of it."""
        if self._run is None:
            self.settle()
            training = self._make_training()
            watch = Watch(self.config.options("run", *SECTIONS), this_machine)
            about = {"env": self.env_id}
            self._run = Run(training, self.config["run"], self._open_dir, self._score, watch, owner=self, about=about)
            self._run.exact = self.config["env"].wait_num is None and not self.live
            if self._weights:
                weights: Any = self._weights if training.several else self._weights[DEFAULT]
                training.set_weights(weights)
            elif not self._resumes:
                self._start_with_others()
        return self._run

    def _start_with_others(self) -> None:
        """Take the weights that `init_from` names, of each policy its own."""
        training = self.run.training
        parts: Mapping[str, Any] = training.sides if training.several else {"": training}
        for name, part in parts.items():
            run = (self.policies[name].config if name else self.config)["run"]
            if run.init_from is not None:
                start_with(part, run.init_from, "latest", run.init_map, run.init_partial)
        for name in encoder_owners(self.config["run"].policies):
            if (learner := parts[name].learner) is not None:
                learner.start_with_model()
        training.show_weights()

    @property
    def training(self) -> LocalTraining | LiveTraining | FileTraining | PolicyTrainings | GameTraining:
        return self.run.training  # type: ignore[return-value]

    def settle(self) -> None:
        """Choose where to play and to compute, where `config` says `auto`; what was chosen is in it, and in
        `choice`."""
        if self._settled:
            return
        self._check_plays()
        if self._check_training is not None:
            self._check_training(self.config.to_dict())
        plays = not self.live and not self.from_files
        for name, setup in self.policies.items():
            spec_of = partial(self._side_spec, name) if self.is_game else partial(env_spec, setup.config["env"])
            config, choice = settle(
                setup.algo, setup.config, self.spec_of if self.live else spec_of, plays and not self.is_game
            )
            self.policies[name] = replace(setup, config=config)
            if choice is not None:
                logger.info("auto: %s: %s", name, choice)
        if self.policies:  # of the run as a whole, what holds for its first policy is said
            first = next(iter(self.policies.values())).config["run"]
            chosen = {key: getattr(first, key) for key in ("device", "num_workers", "inference")}
            sections = {**self.config.sections, "run": replace(self.config["run"], **chosen)}
            self.config = replace(self.config, sections=sections)
        else:
            self.config, self.choice = settle(self.algo, self.config, self.spec_of, plays)
        self._settled = True

    def spec_of(self) -> EnvSpec:
        """The spaces of what it learns from, before anything else is made."""
        c = self.config
        if self.live:
            return live_spec(c["live"], c["env"])
        return data_spec(c["data"], c["env"]) if self.from_files else self._env_spec

    @cached_property
    def _env_spec(self) -> EnvSpec:
        return env_spec(self.config["env"], seating_of(self.config["run"]))

    @property
    def from_files(self) -> bool:
        """Whether it learns from files alone."""
        return "data" in self.config.sections and self.config["data"].share is None

    @property
    def is_game(self) -> bool:
        """Whether it plays games of several agents."""
        self._check_plays()
        c = self.config
        if self.live or self.from_files or not Builder.of(c["env"]).may_have_agents:
            return False
        return bool(self._env_spec.sides)

    def _side_spec(self, name: str) -> EnvSpec:
        return self._env_spec.sides[side_of(self.config["run"], name)].spec

    def _make_training(self) -> LocalTraining | LiveTraining | FileTraining | PolicyTrainings | GameTraining:
        c = self.config
        if c["run"].output is not None and (self.is_game or self.live or self.from_files or self.policies):
            raise ConfigError(
                "run.output writes the episodes of one policy in environments of one agent that Bray steps, not those "
                "of games of several agents, live games, files or several policies: leave it out"
            )
        if c["run"].num_learners > 1:
            odd = self.is_game or self.live or self.policies or "data" in c.sections or c["run"].output is not None
            odd = odd or c["run"].exchange is not None
            if odd or c["env"].wait_num is not None:
                raise ConfigError(
                    "run.num_learners: several learners are for one policy in environments of one agent, not for games "
                    "of several agents, live games, files, several policies, run.output, run.exchange or env.wait_num: "
                    "leave it out"
                )
        elif c["run"].exchange is not None and (self.is_game or self.live or self.from_files or self.policies):
            raise ConfigError(
                "run.exchange: workers elsewhere play for one policy in environments of one agent, not for games of "
                "several agents, live games, files or several policies: leave it out"
            )
        if self.is_game:
            setups = self.policies or {DEFAULT: Setup(self.algo, self.env_id, False, c)}
            home, learn = home_of(c["run"]), c["run"].policies_to_train
            return GameTraining(setups, c["run"], c["env"], learn, home, opponent_of)
        if self.live:
            setups = self.policies or {DEFAULT: Setup(self.algo, self.env_id, True, c)}
            kind = LiveTraining if c["run"].self_play is None else LiveLeagueTraining
            return kind(setups, c["run"], c["env"], c["live"], c.sections.get("data"))
        if c["run"].self_play is not None:
            raise ConfigError(f"run.self_play is for a game of several agents, and {self.env_id} has one: leave it out")
        if c["run"].policy_mapping is not None:
            raise ConfigError(
                f"run.policy_mapping is for a game of several agents, and {self.env_id} has one: leave it out, each "
                "policy plays in environments of its own"
            )
        if self.policies:
            return make_trainings(self.policies, c["run"], home_of)
        parts = (self.algo, c["run"], c["env"], c["model"], c["algo"])
        if "data" in c.sections:
            return (
                FileTraining(*parts, c["data"])
                if self.from_files
                else MixedTraining(*parts, c["data"], home_of(c["run"]))
            )
        if c["run"].num_learners > 1:
            from bray.train.learners import LearnersTraining  # few ask for it, and it loads torch.distributed

            return LearnersTraining(*parts, crew=crew_of(c["run"]))
        return LocalTraining(*parts, home=home_of(c["run"]))

    @property
    def path(self) -> Path:
        """The run directory (made by `train` or `save`)."""
        if self._path is None:
            self._path = default_run_dir(self.env_id, algo_name(self.config["run"].algorithm))
        return self._path

    def _open_dir(self) -> RunDir:
        directory = RunDir.create(self.path, resume=self._resumes)
        directory.write_config(with_choices(self.config, self.training.spec))
        training = self.training
        if training.several:
            for name, part in training.sides.items():
                own = directory.policy_folder(name)
                own.write_config(with_choices(self.policies[name].config, part.spec))
                if not self._resumes:
                    write_about(own, self.policies[name], part)
        elif not self._resumes:
            write_about(directory, self, training)
        training.keep_in(directory)
        if not self._resumes:
            self._warn_of_script()
        return directory

    def _warn_of_script(self) -> None:
        """Of names that only this script knows."""
        if own := named_in_script(self.config):
            logger.warning(
                "%s: defined in this script, where `bray eval` and other commands will not find it. Put it in a "
                "module and name it my_module:%s, or load the run in this script with bray.Experiment.load",
                ", ".join(f"{key}={name}" for key, name in own.items()),
                next(iter(own.values())).partition(":")[2],
            )

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        stop: Mapping[str, float] | None = None,
        sinks: Sequence[Sink] = (),
        callbacks: Any = None,
        show: bool = True,
    ) -> Rows:
        """Train until a stop condition holds (or forever): an iterator that gives one result row per iteration, and
        trains only while it is asked for them. Saves as configured and at the end. `callbacks`: `bray.Callbacks`, one
        or several, beside those of the config. `show=False` leaves out the window that `run.show_figure` asks for."""
        stop = check_stop(stop) if stop is not None else self.config["run"].stop
        own = make_callbacks(self.config["run"].callbacks, callbacks)
        if self._run is not None:
            own.set_state(self._run.saved_callbacks)
            self._run.saved_callbacks = {}
        return Rows(self._train(stop, sinks, own, show))

    def fit(self, stop: Mapping[str, float] | None = None, progress: bool = True, callbacks: Any = None) -> LastRow:
        """Train until a stop condition holds, showing progress; returns the last result row."""
        until = check_stop(stop) if stop is not None else self.config["run"].stop
        if not until:
            raise ConfigError('fit trains to an end, and none is given: exp.fit({"env_steps_total": 100_000})')
        about = f"{self.algorithms} on {self.env_id}"
        for _ in self.train(until, [TerminalSink(about, until)] if progress else [], callbacks):
            pass
        return LastRow(self.last_row or {}, about, self.path / "figures" / "learning_curve.png")

    def _train(
        self, stop: Mapping[str, float], sinks: Sequence[Sink], callbacks: CallbackList, show: bool
    ) -> Generator[dict[str, Any], None, None]:
        config, run = self.config["run"], self.run
        trackers = make_trackers(config.track, self.path, self._title, self.config.rows())
        training, directory = run.training, run.directory
        run.callbacks, run.stop_requested, run.hurries, graph = callbacks, False, False, self._graph_export()
        evaluations = Evaluations(self, directory, self._score)
        training.start()
        if config.num_learners > 1 and callbacks.of_episodes().callbacks:
            raise ConfigError(
                "callbacks of episodes see those of one learner, and run.num_learners is more: leave out "
                "on_episode_start, _step and _end, or set it to 1"
            )
        for source in training.sources:
            source.watch(callbacks)
        with rundir.logging_to(directory.log), self._closing(graph), open_sinks(directory, [*trackers, *sinks]) as out:
            if training.iteration or self._resumes:  # rows may be newer than the checkpoint of step 0, too
                out.truncate_after(training.iteration, training.env_steps)
            self._log_start()
            try:
                yield from run.rows(stop, out, evaluations, graph.tend)
            finally:
                evaluations.close()
                if self.last_row is not None and config.save_figure:
                    self._draw(stop)
        if self.last_row is not None and config.show_figure and show:
            self.show_figure(stop)

    @contextlib.contextmanager
    def _closing(self, graph: GraphExport) -> Iterator[None]:
        """Around the sinks: a run that is over does not wait for graph.onnx, one that was stopped leaves it out."""
        try:
            yield
        finally:
            graph.close(goes_on=not self.run.stop_requested)

    def _graph_export(self) -> GraphExport:
        """The background export of graph.onnx; nothing is exported if the file exists, or if the process that exports
        could not make the model."""
        there = all((self.run.directory.models / n / "graph.onnx").exists() for n in self.policies or ["default"])
        no_module = any(key.startswith(("run.", "model.")) for key in named_in_script(self.config))
        return GraphExport(self.path, None if there or no_module else self.config["run"].export_graph_after_s)

    def _log_start(self) -> None:
        logger.info("bray %s, torch %s, %s on %s", __version__, torch.__version__, self.algorithms, self.env_id)
        if self.choice is not None:
            logger.info("auto: %s", self.choice)
        if why := self.training.depends_on_timing:
            self.run.exact = False
            logger.warning(
                "%s: what is learned depends on timing, another run of this seed will differ (exact: false in "
                "meta.json)",
                why,
            )

    @property
    def last_row(self) -> dict[str, Any] | None:
        """The newest result row."""
        return None if self._run is None else self._run.last_row

    @property
    def exact(self) -> bool:
        """Whether another run of this seed, or a resumed one, is the same run."""
        return self.run.exact

    @property
    def hurries(self) -> bool:
        """Whether a signal asked for the end: nothing is waited for then."""
        return self._run is not None and self._run.hurries

    @property
    def reached(self) -> dict[str, float]:
        """The stop conditions that hold now."""
        return reached(self.config["run"].stop, self.last_row)

    @property
    def saved(self) -> bool:
        """Whether this experiment's own run directory holds a checkpoint."""
        return self._run is not None and self._run.saved

    @property
    def all_saved(self) -> bool:
        """Whether the newest checkpoint holds all iterations."""
        return self._run is not None and self._run.all_saved

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(env)` for every environment of the training, in whatever process it is; what it returned, in their order.
        It takes effect before their next step: `exp.foreach_env(lambda env: env.set_phase(2))`."""
        self._tells("foreach_env")
        return [result for source in self.training.sources for result in source.foreach_env(fn)]

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        """`fn(worker)` in every rollout worker, or here without any: `index`, `envs`, `model`, `policies`; what it
        returned, in their order."""
        self._tells("foreach_worker")
        return [result for source in self.training.sources for result in source.foreach_worker(fn)]

    def _tells(self, what: str) -> None:
        """Functions of the user change the environments."""
        if self.config["run"].num_learners > 1:
            raise ConfigError(
                f"{what} reaches the environments of one learner, and run.num_learners is more: set it to 1"
            )
        self.run.told_envs = True

    def request_stop(self, hurry: bool = False) -> None:
        """End `train` after the iteration under way, or at once where it waits for games. An evaluation beside the
        training (`eval_parallel`) is waited for where a callback asks; with `hurry`, which is for signal handlers, it
        is dropped."""
        if self._run is not None:
            self._run.request_stop(hurry)

    def save(self) -> Path:
        """A checkpoint of everything, and `best` if it is; returns its directory."""
        path = self.run.save()
        assert path is not None
        return path

    # --- curves -------------------------------------------------------------------------------------------------------

    def _draw(self, stop: Mapping[str, float]) -> None:
        try:
            out = self.run.directory.folder("figures") / "learning_curve.png"
            figures.learning_curve(self.path, out, self._title, stop.get("episode_return_mean"))
        except DataError as e:
            logger.info("no learning curve: %s", e)
        except Exception as e:  # a picture must not lose a trained agent
            logger.warning("the learning curve could not be drawn: %s: %s", type(e).__name__, e)

    @property
    def algorithms(self) -> str:
        """The algorithm; of several policies each one's."""
        named = (f"{name} {setup.config['run'].algorithm}" for name, setup in self.policies.items())
        return ", ".join(named) or str(self.config["run"].algorithm)

    @property
    def _title(self) -> str:
        return f"{self.algorithms} on {self.env_id}, seed {self.config['run'].seed}"

    def plot(self, out: str | Path | None = None) -> Picture:
        """Draw the learning curve to a file (without a name: figures/learning_curve.png of the run); notebooks show
        what this returns."""
        run = self._read_from
        if run is None:
            raise ConfigError("there is no learning curve to draw yet: train first, or load a run")
        file = Path(out) if out is not None else run / "figures" / "learning_curve.png"
        return Picture(
            figures.learning_curve(run, file, self._title, self.config["run"].stop.get("episode_return_mean"))
        )

    def film(self, out: str | Path | None = None, seed: int | None = None, act: str = GREEDY) -> Picture:
        """Film one whole episode to a .mp4 or .gif file (without a name: videos/film.mp4 of the run); notebooks show
        what this returns."""
        if out is None:
            if self._read_from is None:
                raise ConfigError('there is no run directory to film into yet: train first, or exp.film("film.mp4")')
            out = RunDir(self._read_from).folder("videos") / "film.mp4"
        frames, _, _, fps = self.shoot(seed=seed, act=act)
        return Picture(write_video(frames, out, fps))

    def shoot(self, mode: str = "rgb_array", seed: int | None = None, act: str = GREEDY) -> Film:
        """One whole episode as `film` has it: frames, return, steps, frames/s."""
        self._check_plays()
        self.check_env()
        env = self.config["env"]
        if self.is_game:
            return film_game(self.players, env, seating_of(self.config["run"]), mode, check_mode(act), seed)
        return film(self.served, env, mode, check_mode(act), seed)

    @property
    def _read_from(self) -> Path | None:
        """The run directory that has rows: this training's, or that of a run that was loaded."""
        run = self.loaded[0].parents[1] if self.loaded is not None and self._written is None else self.path
        return run if (run / "result.jsonl").exists() else None

    def __repr__(self) -> str:
        return describe(self._title, self.last_row, self._written, self.loaded[0] if self.loaded else None)

    def show_figure(self, stop: Mapping[str, float] | None = None) -> None:
        """The learning curve in a window, until that is closed; where none can be opened, a warning says why."""
        threshold = (self.config["run"].stop if stop is None else stop).get("episode_return_mean")
        figures.show_figure([self.path], self._title, threshold)

    # --- coming back --------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | Path,
        which: str | int = "latest",
        sources: Sequence[ConfigSource] = (),
        env: Any = None,
        trust: Answer = False,
        plays: bool = True,
    ) -> Experiment:
        """A trained experiment: its policy, its evaluation, or further training in a new run directory. A directory
        that was not made here by this user may name code of its own (environment, model, algorithm): that is imported
        with `trust=True` only. `plays=False`: its policy alone is wanted, and so what makes its environment needs no
        trust."""
        directory = RunDir.open(path)
        directory.refuse_old_launch()
        if not plays:
            directory.refuse_several()
        checkpoint = directory.load_checkpoint(which)
        saved = with_secrets(read_config(directory))
        searches = bool((saved.values.get("env") or {}).get("moves"))  # its policy makes the game
        moments = [When.MADE, When.PLAYS] if plays or searches else [When.MADE]
        check = trust_check(directory, trust, moments, env)
        policies = saved_policies(directory, saved, sources, env, trust, moments) if directory.policies() else None
        sources, check = changed_by(saved, sources, env, check)
        exp = cls(env=env, sources=sources, use_preset=False, _check=check, _policies=policies)
        if policies is not None and not exp.is_game:
            directory.refuse_several()
        exp._refuse_hidden(path, *(["env", "model"] if plays else ["model"]))
        exp._plays, exp._check_training = plays, trust_check(directory, trust, [When.TRAINS])
        places: dict[str, Any] = {name: directory.policy_folder(name) for name in exp.policies} or {DEFAULT: directory}
        exp._specs = {name: EnvSpec.from_json(place.read_json("spec.json")) for name, place in places.items()}
        exp._weights = (
            {name: checkpoint.models[name].weights for name in places}
            if exp.policies
            else {DEFAULT: checkpoint.weights}
        )
        exp.loaded, exp._opened = (checkpoint.path, checkpoint.step), directory.path
        exp._launched = read_launch(directory, trust)
        return exp

    @classmethod
    def resume(
        cls,
        path: str | Path,
        sources: Sequence[ConfigSource] = (),
        env: Any = None,
        trust: Answer = False,
        **overrides: Any,
    ) -> Experiment:
        """Go on with a run in its own directory, exactly where its latest checkpoint is. `trust`: as in `load`.
        `overrides`: keys that are other than before, such as `num_workers=4`."""
        if "run" in overrides:
            raise ConfigError(f"a run keeps its algorithm when it is resumed: leave out run={overrides['run']!r}")
        sources = [*sources, ConfigSource("python", overrides)] if overrides else sources
        directory = RunDir.open(path)
        if (directory.path / TRAINER_JSON).exists():
            raise ConfigError(f"{path} was made by `bray launch`: continue it with `bray launch` and the same file")
        saved = with_secrets(read_config(directory))
        if "live" not in saved.values and any("live" in source.values for source in sources):
            raise ConfigError(
                f"{path} learnt in an environment, not from live games: leave out --live and its flags; a new run can "
                f"start with its weights (bray train --live ... --init-from {path})"
            )
        checkpoint = directory.load_checkpoint("latest")
        policies = saved_policies(directory, saved, sources, env, trust)
        sources, check = changed_by(saved, sources, env, trust_check(directory, trust, When, env))
        exp = cls(env=env, sources=sources, use_preset=False, path=path, _check=check, _policies=policies)
        exp._refuse_hidden(path, "run", "env", "model")
        exp._resumes = True
        if exp.config["run"].init_from != (saved.values.get("run") or {}).get("init_from"):
            raise ConfigError(f"--resume {path} resumes that run: leave out --init-from")
        try:
            why = exp._go_on_from(directory, checkpoint)
        except BaseException:
            exp.close()
            raise
        if why:
            logger.warning("%s: %s (exact: false in meta.json)", path, why)
        return exp

    def _refuse_hidden(self, path: str | Path, *sections: str) -> None:
        """Secrets are not written: those that are needed now must have been given again. A service looks after its own
        tokens."""
        plain = self.config.to_plain()
        refuse_hidden({section: plain[section] for section in sections}, str(path))

    def _go_on_from(self, directory: RunDir, checkpoint: Checkpoint) -> str:
        """Take over the state of a checkpoint of a run, and its directory; returns why that is not exact, in words."""
        path = directory.path
        with made_from(path):
            run = self.run
        training, weights = self.training, checkpoint.models
        training.keep_in(directory)
        if training.several:
            if training.sides.keys() != weights.keys():
                raise CheckpointError(
                    f"{path}: its config names the policies {', '.join(training.sides)}, its checkpoint has "
                    f"{', '.join(weights)}"
                )
            for name, part in training.sides.items():
                check_spaces(directory.policy_folder(name), part.spec)
            why = run.resume(path, checkpoint.state, {name: model.weights for name, model in weights.items()})
        else:
            check_spaces(directory, training.spec)
            why = run.resume(path, checkpoint.state, checkpoint.weights)
        _ = run.directory  # from now on it is this process's
        return why

    def init_from(
        self,
        path: str | Path,
        which: str | int = "latest",
        names: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> WeightReport:
        """Start with weights of another run (or of one of its checkpoints), and nothing else of it. `names`: take a
        part, by beginnings of names, ours to theirs: {"core": "core"}. `partial`: leave out what does not fit; else
        that is an error. Returns what was loaded and left."""
        if self.policies:
            raise ConfigError("a run with several policies: say init_from of each in `policies`")
        report = start_with(self.training, path, which, names or {}, partial)
        self.training.show_weights()
        return report

    # --- using --------------------------------------------------------------------------------------------------------

    @property
    def served(self) -> ServedPolicy:
        """The policy as it is served: made from the spec and the weights alone."""
        if self.policies:
            raise several(self.path, self.policies)
        return self.policy_named(DEFAULT)

    def policy_named(self, name: str) -> ServedPolicy:
        """One of several policies as it is served; `default` where there is one."""
        if name not in self._served:
            made: Any = self.policies.get(name, self)
            side = self.training.sides[name] if self._run is not None or name not in self._specs else None
            spec: EnvSpec = self._specs[name] if side is None else side.spec
            model = self._trained_model(name, spec) if side is None else side.model
            policy = make_policy(made.algo, made.config["algo"], with_game(spec, self.config["env"]))
            self._served[name] = ServedPolicy(policy, model, spec)
        return self._served[name]

    def _trained_model(self, name: str, spec: EnvSpec) -> torch.nn.Module:
        made: Any = self.policies.get(name, self)
        c = made.config
        if name not in self._weights:
            raise ConfigError("there is nothing to act with yet: train first, or load a run")
        with seeded(c["run"].seed):
            if self._launched is not None:
                model = launched_model(self._launched)
            else:
                with made_from(self.loaded[0] if self.loaded else None):
                    model = made.algo.make_model(c["algo"], spec, c["model"])
        model = model.to(acting_device(c["run"].device))
        load_weights(model, self._weights[name])
        return model

    def policy(self, obs: Any, state: Any = None, act: str = GREEDY, reward: float | None = None) -> Any:
        """The action for one observation (as the environment gives it); `(action, state)` for a recurrent Model.
        `act="sample"` draws it as in training. `reward`: of the previous action, for one that plays for a return."""
        return self.served(obs, state, check_mode(act), reward)

    def ask_for(self, target_return: float) -> None:
        """From now on evaluations, games and `policy` play for this return; for DT."""
        served = self.served
        if served.initial_state is None or not is_asked(served.initial_state(1)):
            raise ConfigError(f"{self.algorithms} does not play for a return that it is asked for: train DT")
        served.policy.target_return = float(target_return)

    def evaluate(self, episodes: int = 10, seed: int | None = None, act: str = GREEDY) -> dict[str, Any]:
        """Mean return of episodes with its 95 % confidence interval; the same episodes in every call. Of games of
        several agents the sum over agents, and `eval/agent/NAME` of each."""
        if self.is_game:
            return summarize_games(self.play_games(episodes, seed=seed, act=act))
        return summarize(self.play(episodes, seed=seed, act=act))

    def play(
        self,
        episodes: int,
        seed: int | None = None,
        act: str = GREEDY,
        num_envs: int | None = None,
        on_step: Any = None,
        most_steps: int | None = None,
    ) -> list[tuple[float, int]]:
        """Whole episodes with this policy: (return, length) of each. With `most_steps` it stops after that many
        environment steps."""
        if self.is_game:
            return [(m.total, m.length) for m in self.play_games(episodes, seed, act, num_envs, most_steps=most_steps)]
        with self._stage(num_envs or min(episodes, 16), seed, act) as stage:
            return play(episodes=episodes, on_step=on_step, most_steps=most_steps, **stage)

    def play_games(
        self,
        games: int,
        seed: int | None = None,
        act: str = GREEDY,
        num_envs: int | None = None,
        on_step: Any = None,
        most_steps: int | None = None,
        callbacks: CallbackList | None = None,
    ) -> list[Match]:
        """Whole games of several agents with this run's policies: each one's `returns` by agent, `players`,
        `length`. `callbacks` of episodes are told of them."""
        self._check_plays()
        seed = EVAL_SEED if seed is None else seed
        config = eval_config(self.config["env"], num_envs or min(games, 16))
        with make_vec(config, seed=seed, seating=seating_of(self.config["run"])) as env:
            players = self.players(env.spec)
            return play_games(env, players, games, seed, check_mode(act), on_step, most_steps, callbacks)

    def players(self, spec: EnvSpec) -> dict[str, ActingPolicy]:
        """Who decides for the sides of a game; where all players of a league sit at one, the first of them."""
        out: dict[str, ActingPolicy] = {}
        for name, side in spec.sides.items():
            served = self.policy_named(name if name in self.policies else next(iter(self.policies), DEFAULT))
            if (side.spec.observation, side.spec.action) != (served.spec.observation, served.spec.action):
                raise CheckpointError(f"the game has other spaces than the policy {name} was trained for")
            out[name] = ActingPolicy(served.engine, served.policy, served.initial_state)
        return out

    def play_steps(
        self, steps: int, seed: int | None = None, act: str = GREEDY
    ) -> tuple[list[tuple[float, int]], tuple[float, int]]:
        """Exactly `steps` steps with this policy in one environment: (return, length) of each whole episode, and of the
        one that was cut (length 0: none was)."""
        with self._stage(1, seed, act) as stage:
            return play_steps(steps=steps, **stage)

    @property
    def has_env(self) -> bool:
        """Whether there is an environment that Bray can play in."""
        return self.config["env"].id not in (LIVE, FILES)

    def check_env(self) -> None:
        """Refuse a run that has no environment to play in."""
        check_playable(self.config["env"].id)

    def _check_plays(self) -> None:
        if not self._plays:
            raise ConfigError("this run was loaded with plays=False, for its policy alone: load it without that")

    @contextlib.contextmanager
    def _stage(self, num_envs: int, seed: int | None, act: str) -> Iterator[dict[str, Any]]:
        """The arguments that `bray.train.evaluate` needs to play with this policy; the environments are closed at the
        end."""
        if self.is_game:
            raise ConfigError(
                f"{self.env_id} is a game of several agents, which is played to its end: ask for episodes, not steps"
            )
        served = self.served
        seed = EVAL_SEED if seed is None else seed
        self._check_plays()
        self.check_env()
        with make_vec(eval_config(self.config["env"], num_envs), seed=seed) as env:
            if env.spec.observation != served.spec.observation or env.spec.action != served.spec.action:
                raise CheckpointError("the environment has other spaces than the policy was trained for")
            yield {
                "env": env,
                "engine": served.engine,
                "policy": served.policy,
                "seed": seed,
                "mode": check_mode(act),
                "initial_state": served.initial_state,
            }

    def serve(self, port: int = 8000, block: bool = True, **settings: Any) -> Any:
        """Answer games with this policy, as `bray serve` does; `settings` are its keys (`workers=2`, `act="sample"`).
        Blocks until a signal comes and returns the exit code; with `block=False` a server in a thread (`.port`,
        `.close()`, a `with`). Of a league all players are served, with their newest weights."""
        if self.policies and self.config["run"].self_play is None:
            raise several(self.path, self.policies)
        if self._run is not None and not (self.saved and self.all_saved):
            self.save()
        if self._written is not None:
            path, version = self._written, "latest"
        elif self.loaded is not None:
            path, version = self._opened, str(self.loaded[1])
        else:
            raise ConfigError("there is nothing to serve yet: train first, or load a run")
        given = {"port": port, **({} if self.policies else {"versions": {version: 1.0}}), **settings}
        return serve_run(path, given, torch_engine, block)

    @property
    def _written(self) -> Path | None:
        """The run directory, where something was written."""
        return self._run.directory.path if self._run is not None and self._run.has_directory else None

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


def opponent_of(name: str, spec: EnvSpec, trust: Answer = False) -> ActingPolicy:
    """Who plays by this name, in a game with these spaces: a name of `load_opponent`, the directory of a run, or a file
    that `bray export` wrote."""
    if name.endswith(".onnx"):
        return onnx_player(Path(name), spec)
    if not Path(name).is_dir():
        return load_opponent(name, spec)
    served = Experiment.load(name, trust=trust, plays=False).served
    if (served.spec.observation, served.spec.action) != (spec.observation, spec.action):
        raise ConfigError(f"opponent {name}: it was trained for other spaces than this game has")
    return ActingPolicy(served.engine, served.policy, served.initial_state, SAMPLE)


def torch_engine(path: Path, step: int, trust: Answer = False) -> tuple[Any, Any]:
    """A run's Model in torch and its Policy, for a service; of a checkpoint, or of a version without one, such as a
    snapshot."""
    directory = RunDir.open(path)
    known = step in directory.steps()
    served = Experiment.load(path, step if known else "latest", trust=trust, plays=False).served
    if not known:
        load_weights(served.model, directory.load_weights(step, directory.model_name()))
    return served.engine, served.policy
