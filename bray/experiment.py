"""An experiment: an algorithm, an environment and a run directory.

    exp = bray.Experiment(run="PPO", env="CartPole-v1", lr=2.5e-4, num_envs=8)
    for result in exp.train():
        print(result["episode_return_mean"])

Nothing is written before `train` or `save`. `Experiment.load(path)` gives a trained one back (its `policy`, `evaluate`, more
training); `Experiment.resume(path)` goes on exactly where a run stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import figures, rundir, tree
from bray._version import __version__
from bray.act import GREEDY, MODES, TRAINED, Tick, decide_now
from bray.algos import algo_name, get_algo
from bray.config import Resolved, Source, load_config, load_yaml, resolve
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.registry import env_name
from bray.errors import CheckpointError, ConfigError, UnknownName
from bray.inference.torch_engine import load_weights
from bray.metrics import CsvSink, JsonlSink, Sink, Sinks, TensorBoardSink
from bray.nn.catalog import ModelConfig
from bray.rundir import RunDir, default_run_dir
from bray.serving.observe import Observations
from bray.spec import EnvSpec
from bray.train.config import RunConfig, resolve_device
from bray.train.evaluate import EVAL_SEED, eval_config, play, play_steps, summarize
from bray.train.live import ID as LIVE, LiveConfig, LiveTraining
from bray.train.local import LocalTraining, acting_engine, describe_policy, initial_state
from bray.train.offline import ID as FILES, DataConfig, FileTraining

logger = logging.getLogger("bray")

STOP_ALIASES = {"episode_reward_mean": "episode_return_mean", "timesteps_total": "env_steps_total"}
"""Names that people from RLlib type."""
STOP_KEYS = (
    "episode_return_mean",
    "episode_return_max",
    "episode_length_mean",
    "episodes_total",
    "env_steps_total",
    "learner_steps_total",
    "training_iteration",
    "time_total_s",
    "eval/return_mean",
)
STOP_COUNTS = ("episodes_total", "env_steps_total", "learner_steps_total", "training_iteration")
"""Stop conditions that count; -1 is no limit."""
ROW_KEYS = (
    *STOP_KEYS,
    "episode_return_min",
    "episodes_this_iter",
    "env_steps_per_second",
    "time_this_iter_s",
    *(f"eval/{k}" for k in ("return_min", "return_max", "return_ci95", "length_mean", "episodes")),
    *(f"perf/{k}" for k in ("env", "forward", "learn", "idle")),
)
"""Keys of the rows of every algorithm."""
OWN_KEYS = ("loss/", "policy/", "replay/")
"""Prefixes of the keys that an algorithm brings."""
VOLATILE = ("time_", "perf/")
"""Prefixes of result keys that differ between two runs of one seed (and so does everything `*_per_second`)."""


def load_run_file(path: str | Path) -> Source:
    """A run as YAML, JSON or Python: `run` and `env` may be names, `stop` and `config` stand beside them, sections work too."""
    return _spread(load_config(path))


def _spread(source: Source) -> Source:
    """`{run: PPO, env: CartPole-v1, stop: {...}, config: {...}}` as sections; keys remember their lines."""
    values: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    old = source.lines or {}

    def put(to: tuple[str, ...], frm: tuple[str, ...], value: Any) -> None:
        node = values
        for part in to[:-1]:
            node = node.setdefault(part, {})
        if isinstance(node.get(to[-1]), dict) and isinstance(value, dict):
            node[to[-1]] = {**node[to[-1]], **value}
        else:
            node[to[-1]] = value
        for key, line in old.items():
            if key[: len(frm)] == frm:
                lines[to + key[len(frm) :]] = line

    for key, value in source.values.items():
        if key == "run" and isinstance(value, str):
            put(("run", "algorithm"), (key,), value)
        elif key == "env" and isinstance(value, str):
            put(("env", "id"), (key,), value)
        elif key == "config" and isinstance(value, dict):
            for inner, v in value.items():
                put((inner,), (key, inner), v)
        else:
            put((key,), (key,), value)
    return Source(source.name, values, lines or None, source.texts)


def preset(algo: str, env: str) -> Source | None:
    """The tuned settings that ship with Bray for this algorithm and environment, if there are any."""
    for file in sorted(resources.files("bray").joinpath("presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            with resources.as_file(file) as path:
                source = _spread(load_yaml(path))
            if source.values["run"]["algorithm"] == algo and source.values["env"]["id"] == env:
                return Source(f"preset {Path(file.name).stem}", source.values, source.lines)
    return None


def check_stop(stop: Mapping[str, Any]) -> dict[str, float]:
    """A stop condition with its aliases resolved, without counts of -1 (no limit); unknown names get the nearest one."""
    out: dict[str, float] = {}
    for key, value in stop.items():
        name = STOP_ALIASES.get(key, key)
        if name not in STOP_KEYS and not name.startswith(("loss/", "eval/")):
            raise UnknownName("stop name", key, [*STOP_KEYS, *STOP_ALIASES], "run.stop")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"run.stop.{key}: expected a number, got {value!r}")
        if name in STOP_COUNTS and value == -1:
            continue
        if name in STOP_COUNTS and (value <= 0 or value % 1):
            raise ConfigError(f"run.stop.{key}: expected a whole number > 0, or -1 for no limit, got {value:g}")
        out[name] = value
    return out


def check_score(score: str, evaluates: bool) -> None:
    """Refuse a `checkpoint_score` that no row will hold. `loss/*` and `policy/*` are checked when the first ones are there."""
    key = score.removeprefix("-")
    if key not in ROW_KEYS and not key.startswith(OWN_KEYS):
        raise UnknownName("key of a result row", key, ROW_KEYS, "run.checkpoint_score")
    if key.startswith("eval/") and not evaluates:
        raise ConfigError(f"run.checkpoint_score is {score!r}, but nothing is evaluated: set eval_freq (--eval-freq N)")


class Experiment:
    """One run: configure, train, evaluate, save, load."""

    def __init__(
        self,
        run: Any = None,
        env: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        sources: Sequence[Source] = (),
        use_preset: bool = True,
        path: str | Path | None = None,
        project: str | Path | None = None,
        trial: str | None = None,
        live: bool = False,
        data: str | Path | None = None,
        **overrides: Any,
    ):
        """`live=True`: learn from games that call a service of this process, instead of an environment; `obs`, `actions`, `port` and the other keys
        of `LiveConfig` say where and what. `data`: trajectory files to learn from instead, a directory or a pattern."""
        given = [_spread(s) for s in sources]
        if config:
            given.append(Source("python", dict(config)))
        if overrides:
            given.append(Source("python", dict(overrides)))
        if data is not None:
            given.append(Source("python", {"data": {"files": str(data)}}))
        run = _first(run, given, "run", "algorithm")
        env = _first(env, given, "env", "id")
        live = live or any("live" in source.values for source in given)
        from_files = any("data" in source.values for source in given)
        if live and from_files:
            raise ConfigError("an experiment learns from live games or from files, not from both")
        if env is None and (live or from_files):
            env = LIVE if live else FILES
        if run is None or env is None:
            raise ConfigError(
                "an experiment needs an algorithm (run=, --run) and an environment (env=, --env), live games (live=True, --live), or "
                "files (data=, --data)"
            )
        self.algo = get_algo(run)
        name = algo_name(run)
        sections = {"run": RunConfig, "env": EnvConfig, "model": ModelConfig, "algo": self.algo.Config}
        if live:
            sections["live"] = LiveConfig
        if from_files:
            sections["data"] = DataConfig
        layers = [Source("named", {"run": {"algorithm": name}, "env": {"id": env}})]
        defaults = getattr(self.algo, "DEFAULTS", None)  # e.g. another network for this algorithm
        if defaults:
            layers.insert(0, Source(f"defaults of {name}", defaults))
        found = preset(name, env) if use_preset and isinstance(env, str) else None
        if found:
            layers.insert(1 if defaults else 0, found)
        self.config: Resolved = resolve(sections, _last_stop([*layers, *given]))
        stop = check_stop(self.config["run"].stop)
        self.config["run"].stop.clear()
        self.config["run"].stop.update(stop)
        if self.config["run"].checkpoint_score is not None:
            check_score(self.config["run"].checkpoint_score, evaluates=self.config["run"].eval_freq > 0)
        places = self.config.provenance
        for alias, known in STOP_ALIASES.items():
            if f"run.stop.{alias}" in places:
                places[f"run.stop.{known}"] = places.pop(f"run.stop.{alias}")
        self.live = live
        self.env_id = env_name(env)
        if path is not None and (project or trial):
            raise ConfigError("give either a path or project and trial, not both")
        if path is None and (project or trial):
            path = Path(project or "runs") / (trial or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self._path = Path(path) if path else None
        self._dir: RunDir | None = None
        self._training: LocalTraining | LiveTraining | FileTraining | None = None
        self._weights: Mapping[str, np.ndarray] | None = None
        self._spec: EnvSpec | None = None
        self._served: ServedPolicy | None = None
        self._best: float | None = None
        self._time = 0.0
        self._saved_at = -1
        self._saved_time = time.monotonic()
        self._last_row: dict[str, Any] | None = None
        self._stop_requested = False
        self.exact = self.config["env"].wait_num is None and not live
        """Whether another run of this seed, or a resumed one, is the same run."""

    # --- parts, made when needed --------------------------------------------------------------------------------------

    @property
    def training(self) -> LocalTraining | LiveTraining | FileTraining:
        if self._training is None:
            c = self.config
            parts = (self.algo, c["run"], c["env"], c["model"], c["algo"])
            if self.live:
                self._training = LiveTraining(*parts, c["live"])
            elif "data" in c.sections:
                self._training = FileTraining(*parts, c["data"])
            else:
                self._training = LocalTraining(*parts)
            if self._weights is not None:
                self._training.set_weights(self._weights)
        return self._training

    @property
    def path(self) -> Path:
        """The run directory (made by `train` or `save`)."""
        if self._path is None:
            self._path = default_run_dir(self.env_id, algo_name(self.config["run"].algorithm))
        return self._path

    def _run_dir(self) -> RunDir:
        if self._dir is None:
            self._dir = RunDir.create(self.path)
            self._dir.write_config(self.config)
            self._write_specs()
        return self._dir

    def _write_specs(self) -> None:
        assert self._dir is not None
        self._dir.write_spec(self.training.spec)
        policy = self.algo.Policy(self.config["algo"], self.training.spec)
        self._dir.write_policy(
            {"algorithm": self.config["run"].algorithm} | describe_policy(policy, self.training.model)
        )

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        stop: Mapping[str, float] | None = None,
        sinks: Sequence[Sink] = (),
        on_result: Callable[[dict[str, Any]], None] | None = None,
        show: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """Train until a stop condition holds (or forever); yields one result per iteration. Saves as configured and at the end.
        `show=False` leaves out the window that `run.show_figure` asks for."""
        run = self.config["run"]
        stop = check_stop(stop) if stop is not None else run.stop
        most_episodes = int(stop["episodes_total"]) if "episodes_total" in stop else None
        training, directory = self.training, self._run_dir()
        self._stop_requested = False
        training.start()
        with (
            rundir.logging_to(directory.log),
            Sinks(
                [
                    JsonlSink(directory.result_jsonl),
                    CsvSink(directory.progress_csv),
                    TensorBoardSink(directory.tensorboard),
                    *sinks,
                ]
            ) as out,
        ):
            if training.iteration:
                out.truncate_after(training.iteration, training.env_steps)
            logger.info("bray %s, torch %s, %s on %s", __version__, torch.__version__, run.algorithm, self.env_id)
            if training.depends_on_timing:
                why = "the games are live" if self.live else f"env.wait_num={self.config['env'].wait_num}"
                logger.warning(
                    "%s: what is learned depends on timing, another run of this seed will differ (exact: false in meta.json)",
                    why,
                )
            try:
                if not training.iteration and not self.saved:
                    self.save()  # a run can be resumed from its first second
                while not self._stop_requested and not self._reached(stop):
                    start = time.perf_counter()
                    row = training.iterate(most_episodes)
                    if row is None:
                        break
                    if run.eval_freq and training.iteration % run.eval_freq == 0:
                        assert isinstance(training, LocalTraining)
                        row |= training.evaluate()
                    self._time += time.perf_counter() - start
                    row["time_total_s"] = self._time
                    if on_result is not None:
                        on_result(row)
                    self._last_row = row
                    out.write(row)
                    self._checkpoint_when_due(row)
                    yield row
            finally:
                if training.iteration and self._saved_at != training.iteration:
                    self.save()
                if self._last_row is not None and run.save_figure:
                    self._draw(stop)
        if self._last_row is not None and run.show_figure and show:
            self.show_figure(stop)

    def _reached(self, stop: Mapping[str, float]) -> bool:
        row = self._last_row or {}
        return any(row.get(k) is not None and row[k] >= v for k, v in stop.items())

    @property
    def reached(self) -> dict[str, float]:
        """The stop conditions that hold now."""
        row = self._last_row or {}
        return {k: row[k] for k, v in self.config["run"].stop.items() if row.get(k) is not None and row[k] >= v}

    @property
    def saved(self) -> bool:
        """Whether this experiment's own run directory holds a checkpoint."""
        return self._dir is not None and bool(self._dir.steps())

    def request_stop(self) -> None:
        """End `train` after the iteration under way, or at once where it waits for games (signal handlers call this)."""
        self._stop_requested = True
        if self._training is not None:
            self._training.stop()

    @property
    def _score_key(self) -> str:
        run = self.config["run"]
        return run.checkpoint_score or ("eval/return_mean" if run.eval_freq else "episode_return_mean")

    def _score(self, row: Mapping[str, Any]) -> float | None:
        """How good this row is, more is better; None where it does not say."""
        key = self._score_key
        value = row.get(key.removeprefix("-"))
        if value is None or not math.isfinite(value):
            return None
        return -value if key.startswith("-") else value

    def _is_better(self, score: float | None) -> bool:
        return score is not None and (self._best is None or score > self._best)

    def _checkpoint_when_due(self, row: Mapping[str, Any]) -> None:
        run, iteration, key = self.config["run"], row["training_iteration"], self._score_key.removeprefix("-")
        if key.startswith(OWN_KEYS) and key not in row and any(k.startswith("loss/") for k in row):
            raise UnknownName("key of a result row", key, row, "run.checkpoint_score")
        due = run.checkpoint_freq and iteration % run.checkpoint_freq == 0
        late = run.checkpoint_every_s and time.monotonic() - self._saved_time >= run.checkpoint_every_s
        if due or late or (key.startswith("eval/") and self._is_better(self._score(row))):
            self.save()

    def save(self) -> Path:
        """A checkpoint of everything, and `best` if it is; returns its directory."""
        training, directory, run = self.training, self._run_dir(), self.config["run"]
        row = self._last_row or {}
        score = self._score(row)
        best = self._is_better(score)
        replay_dir = directory.path / "replay"
        state = training.get_state(replay_dir if self._saves_replay() else None)
        recent = training.recent_observations()
        previous, self._best = self._best, score if best else self._best
        state["json"] |= {"best": self._best, "best_by": self._score_key, "time": self._time, "row": row}
        state["arrays"]["observations"] = {} if recent is None else {"obs": recent}
        meta = {
            "bray": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "algorithm": run.algorithm,
            "env": self.env_id,
            "seed": run.seed,
            "training_iteration": training.iteration,
            "env_steps_total": training.env_steps,
            "learner_steps_total": training.learner.steps,
            "episode_return_mean": row.get("episode_return_mean"),
            "eval/return_mean": row.get("eval/return_mean"),
            "exact": self.exact,
        }
        try:
            path = directory.save_checkpoint(
                training.learner.steps, training.weights(), state, meta, best=best, keep=run.keep_checkpoints
            )
        except BaseException:
            self._best = previous
            raise
        self._saved_at, self._saved_time = training.iteration, time.monotonic()
        training.prune_replay(replay_dir, training.learner.steps, state, directory)
        return path

    def _saves_replay(self) -> bool:
        how = self.config["run"].checkpoint_replay
        return how == "always" or (how == "auto" and self.training.experience.nbytes <= 2 << 30)

    def _draw(self, stop: Mapping[str, float]) -> None:
        assert self._dir is not None
        out = self._dir.folder("figures") / "learning_curve.png"
        try:
            figures.learning_curve(self.path, out, self._title, stop.get("episode_return_mean"))
        except CheckpointError:
            raise
        except Exception as e:  # a picture must not lose a trained agent
            logger.warning("the learning curve could not be drawn: %s: %s", type(e).__name__, e)

    @property
    def _title(self) -> str:
        return f"{self.config['run'].algorithm} on {self.env_id}, seed {self.config['run'].seed}"

    def show_figure(self, stop: Mapping[str, float] | None = None) -> None:
        """The learning curve in a window, until that is closed; where none can be opened, a warning says why."""
        threshold = (self.config["run"].stop if stop is None else stop).get("episode_return_mean")
        show_figure([self.path], self._title, threshold)

    # --- coming back --------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: str | Path, which: str | int = "latest", sources: Sequence[Source] = (), env: Any = None
    ) -> Experiment:
        """A trained experiment: its policy, its evaluation, or further training in a new run directory."""
        directory = RunDir.open(path)
        directory.refuse_old_launch()
        checkpoint = directory.load_checkpoint(which)
        exp = cls(env=env, sources=[_saved_config(directory), *sources], use_preset=False)
        exp._weights = checkpoint.weights
        exp._spec = EnvSpec.from_json(directory.read_json("spec.json"))
        exp._loaded_from, exp._loaded_step = checkpoint.path, checkpoint.step
        if (directory.path / "launch.json").exists():
            exp._launched = directory.read_json("launch.json")
        return exp

    _loaded_from: Path | None = None
    _launched: dict[str, Any] | None = None
    """What a launch file said of the model, where its network is the project's own."""
    _loaded_step = -1

    @classmethod
    def resume(cls, path: str | Path, sources: Sequence[Source] = (), env: Any = None) -> Experiment:
        """Go on with a run in its own directory, exactly where its latest checkpoint is."""
        directory = RunDir.open(path)
        if (directory.path / "trainer.json").exists():
            raise ConfigError(f"{path} was made by `bray launch`: continue it with `bray launch` and the same file")
        saved = _saved_config(directory)
        if "live" not in saved.values and any("live" in source.values for source in sources):
            raise ConfigError(
                f"{path} learnt in an environment, not from live games: leave out --live and its flags; a new run can start with its weights "
                f"(bray train --live ... --init-from {path})"
            )
        checkpoint = directory.load_checkpoint("latest")
        exp = cls(env=env, sources=[saved, *sources], use_preset=False, path=path)
        training = exp.training
        theirs = EnvSpec.from_json(directory.read_json("spec.json"))
        if theirs != training.spec:
            raise CheckpointError(
                f"{path}: the environment has other spaces than at training time; resume needs the same ones"
            )
        state = checkpoint.state
        if "experience" not in state["json"]:
            raise CheckpointError(
                f"{path} was trained by an older Bray, whose training state has another form: start from its weights with --init-from {path}"
            )
        exp.exact = training.set_state(state, checkpoint.weights, directory.path / "replay")
        json = state["json"]
        exp._time, exp._last_row = json["time"], json["row"] or None
        if json.get("best_by", exp._score_key) == exp._score_key:
            exp._best = json["best"]
        exp._saved_at = training.iteration
        exp._dir = RunDir.create(path, resume=True)
        exp._dir.write_config(exp.config)
        if not exp.exact:
            logger.warning(
                "%s: this environment's state cannot be restored exactly: new episodes start (exact: false in meta.json)",
                path,
            )
        return exp

    def init_from(self, path: str | Path, which: str | int = "latest") -> None:
        """Start from another run's weights, and nothing else of it."""
        self._weights = RunDir.open(path).load_checkpoint(which).weights
        if self._training is not None:
            self._training.set_weights(self._weights)

    # --- using --------------------------------------------------------------------------------------------------------

    @property
    def served(self) -> ServedPolicy:
        """The policy as it is served: made from the spec and the weights alone."""
        if self._served is None:
            spec = self._spec or self.training.spec
            if self._training is not None:
                model = self._training.model
            else:
                c = self.config
                torch.manual_seed(c["run"].seed)
                if self._weights is None:
                    raise ConfigError("there is nothing to act with yet: train first, or load a run")
                if self._launched is not None:
                    model = _launched_model(self._launched)
                else:
                    model = self.algo.make_model(c["algo"], spec, c["model"])
                model = model.to(resolve_device(c["run"].device))
                load_weights(model, self._weights)
            self._served = ServedPolicy(self.algo.Policy(self.config["algo"], spec), model, spec)
        return self._served

    def policy(self, obs: Any, state: Any = None, act: str = GREEDY) -> Any:
        """The action for one observation (as the environment gives it); `(action, state)` for a recurrent Model. `act="sample"` draws it as in
        training."""
        return self.served(obs, state, check_mode(act))

    def evaluate(self, episodes: int = 10, seed: int | None = None, act: str = GREEDY) -> dict[str, Any]:
        """Mean return of episodes with its 95 % confidence interval; the same episodes in every call."""
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
        """Whole episodes with this policy: (return, length) of each. With `most_steps` it stops after that many environment steps."""
        with self._stage(num_envs or min(episodes, 16), seed, act) as stage:
            return play(episodes=episodes, on_step=on_step, most_steps=most_steps, **stage)

    def play_steps(
        self, steps: int, seed: int | None = None, act: str = GREEDY
    ) -> tuple[list[tuple[float, int]], tuple[float, int]]:
        """Exactly `steps` steps with this policy in one environment: (return, length) of each whole episode, and of the one that was cut
        (length 0: none was)."""
        with self._stage(1, seed, act) as stage:
            return play_steps(steps=steps, **stage)

    @property
    def has_env(self) -> bool:
        """Whether there is an environment that Bray can play in."""
        return self.config["env"].id not in (LIVE, FILES)

    def check_env(self) -> None:
        """Refuse a run that has no environment to play in."""
        if self.config["env"].id == FILES:
            raise ConfigError(
                "this run learnt from files and has no environment to play in; `bray train --data ... --env ENV` names one to play in afterwards"
            )
        if self.config["env"].id == LIVE:
            raise ConfigError(
                "this run learnt from live games and has no environment to play in: `bray serve RUN_DIR` answers its games. A run of "
                "`bray train --live --env module:Class`, in place of --obs and --actions, can be played by Bray too"
            )

    @contextlib.contextmanager
    def _stage(self, num_envs: int, seed: int | None, act: str) -> Iterator[dict[str, Any]]:
        """What `bray.train.evaluate` needs to play with this policy."""
        served = self.served
        seed = EVAL_SEED if seed is None else seed
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
        """Answer games with this policy, as `bray serve` does; `settings` are its keys (`workers=2`, `act="sample"`). Blocks until a
        signal comes and returns the exit code; with `block=False` a server in a thread (`.port`, `.close()`, a `with`)."""
        from bray.service import Service, configure, serve
        from bray.serving.background import BackgroundServer

        if self._training is not None and (self._saved_at != self._training.iteration or not self.saved):
            self.save()
        if self._dir is not None:
            path, version = self._dir.path, "latest"
        elif self._loaded_from is not None:
            path, version = self._loaded_from.parent.parent, str(self._loaded_step)
        else:
            raise ConfigError("there is nothing to serve yet: train first, or load a run")
        given = {"port": port, "versions": {version: 1.0}, **settings}
        service_config, model_config = configure([Source("python", given)])
        runs = {path.resolve().name: path}
        if block:
            return serve(runs, service_config, model_config, torch_engine)
        service = Service(runs, model_config, torch_engine=torch_engine)
        return BackgroundServer(service.make_actor, service_config, service.prepare)

    def close(self) -> None:
        if self._training is not None:
            self._training.close()
        if self._dir is not None:
            self._dir.close()


def show_figure(paths: Sequence[Path], title: str, threshold: float | None) -> None:
    """The learning curve of runs in a window; a warning where that is not possible."""
    why = figures.no_window()
    try:
        if why is None:
            figures.show_learning_curve(paths, title, threshold)
    except Exception as e:  # a picture must not lose a trained agent
        why = f"{type(e).__name__}: {e}"
    if why is not None:
        logger.warning("no window shows the learning curve: %s", why)


def _first(given: Any, sources: Sequence[Source], section: str, key: str) -> Any:
    """What Python was given, else what the last source says."""
    if given is not None:
        return given
    for source in reversed(sources):
        value = source.values.get(section)
        if isinstance(value, dict) and value.get(key) is not None:
            return value[key]
    return None


def _last_stop(sources: Sequence[Source]) -> list[Source]:
    """Stop conditions replace those of an earlier source as a whole: a preset's goal is not the user's. `stop.name=value` changes one."""
    out: list[Source] = []
    replaced = False
    for source in reversed(sources):
        values = {k: dict(v) if k == "run" and type(v) is dict else v for k, v in source.values.items()}
        for place in (values, values.get("run")):
            if isinstance(place, dict) and "stop" in place:
                whole = type(place["stop"]) is dict  # `stop.name=value` makes a dict of another type
                if replaced:
                    del place["stop"]
                replaced = replaced or whole
        out.insert(0, Source(source.name, values, source.lines, source.texts))
    return out


def _saved_config(directory: RunDir) -> Source:
    return load_yaml(directory.path / "config.yaml")


def _launched_model(launched: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a launched run, made by the project's own `build_model(name, config)`."""
    name, config = launched["model"], launched["config"]
    module = config[name]["module"]
    try:
        made = importlib.import_module(module).build_model(name, config)
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"the network of model {name} is made by {module}, which cannot be imported here ({e}): run this where the project is"
        ) from None
    return made[0]


def torch_engine(path: Path, step: int) -> tuple[Any, Any]:
    """A run's Model in torch and its Policy, for a service."""
    served = Experiment.load(path, step).served
    return served.engine, served.policy


def export_graph(path: str | Path) -> Path:
    """Write a run's `models/default/graph.onnx`: what a service without torch needs beside the weights."""
    from bray.inference.export import export_onnx

    run = RunDir.open(path)
    served = Experiment.load(path, sources=[Source("export", {"run": {"device": "cpu"}})]).served
    rng = np.random.default_rng(0)
    obs = tree.map(np.asarray, tree.stack([served.spec.observation.sample(rng) for _ in range(2)]))
    args = (obs,) if served.initial_state is None else (obs, served.initial_state(2))
    outputs = (*served.policy.reads, *(["state"] if served.recurrent else []))
    file = run.models / run.model_name() / "graph.onnx"
    rundir.write_atomic(file, export_onnx(served.model, args, outputs))
    return file


class ServedPolicy:
    """A Model and a Policy without an environment: one observation in, one action out."""

    def __init__(self, policy: Any, model: torch.nn.Module, spec: EnvSpec):
        self.policy, self.model, self.spec = policy, model, spec
        self.policy.draws = getattr(model, "draws", None) or {}
        self.initial_state = initial_state(model)
        self.engine = acting_engine(model, policy)
        self.rng = np.random.default_rng()
        self._observations = Observations(spec)

    @property
    def recurrent(self) -> bool:
        return self.initial_state is not None

    def __call__(self, obs: Any, state: Any = None, mode: str = GREEDY) -> Any:
        batch = tree.map(lambda x: x[None], self._observations.read(obs)[0])
        if self.initial_state is not None and state is None:
            state = self.initial_state(1)
        deciding = self.policy.decide(Tick(batch), state, self.rng, mode, TRAINED)
        decision = decide_now(deciding, self.engine.forward)
        action = tree.index(decision.action, 0)
        return (action, decision.carry) if self.recurrent else action


def check_mode(mode: str) -> str:
    """How to act: `sample` or `greedy`."""
    if mode not in MODES:
        raise UnknownName("way to act", mode, MODES, "--act")
    return mode
