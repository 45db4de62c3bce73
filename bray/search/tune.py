"""`bray.tune`: a search over settings from Python, and in the words of RLlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bray.config import ConfigSource, Resolved
from bray.errors import ConfigError, UnknownName, how_to_install
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.search.places import Resources, TrialCrew, make_places
from bray.search.runner import TrialEnd, TrialRun
from bray.search.space import LAYER, LISTS, RANGES, make_space
from bray.train.goals import STOP_ALIASES, check_stop
from bray.train.live import ID as LIVE
from bray.train.offline import ID as FILES

FRESH = 1000
"""From the first seed of the trials to that of the fresh runs."""
_FOR_ALL = {"save_figure": False, "export_graph_after_s": None}


class Search:
    """A search that is checked and has not begun."""

    def __init__(
        self,
        run: Any,
        env: Any,
        sources: Sequence[ConfigSource],
        *,
        name: str,
        use_preset: bool = True,
        project: str | Path = "runs",
        steps: int | None = None,
        stop: Mapping[str, Any] | None = None,
        trials: int | None = None,
        num_seeds: int = 1,
        seed: int = 0,
        scheduler: str | None = None,
        sampler: str = "tpe",
        storage: str | None = None,
        fresh_seeds: int = 4,
        cluster: str = "local",
        resources: Resources = Resources(),
    ):
        try:
            from bray.search.study import Plan
        except ImportError as e:
            raise ConfigError(f"a search needs {e.name}, which is not installed: {how_to_install('tune')}") from None
        if not name or name in (".", "..") or "/" in name:
            raise ConfigError(f"expected a name for the study, --name NAME, got {name!r}")
        self.made_of = {"run": run, "env": env, "use_preset": use_preset}
        self.storage, self.cluster, self.resources = storage, cluster, resources
        self.fresh_seeds, self.root = fresh_seeds, Path(project) / name
        own = ConfigSource(LAYER, {"run": {**_FOR_ALL, "threads": max(1, math.floor(resources.cpus))}})
        self.space = make_space([own, *sources], self._probe)
        config = self._probe(self.space.sources({}))
        if steps is not None:
            stop = {**(stop or {}), "env_steps_total": steps}
        # A preset's goal ends some runs earlier than others, which then cannot be compared.
        ends = check_stop(stop) if stop else {k: v for k, v in config["run"].stop.items() if k == "env_steps_total"}
        self.plan = Plan(name, ends, trials, num_seeds, seed, scheduler, sampler)
        self.about = f"{config['run'].algorithm} on {config['env'].id}"
        self.sign = -1.0 if str(config["run"].checkpoint_score).startswith("-") else 1.0

    def _probe(self, sources: Sequence[ConfigSource]) -> Resolved:
        return Experiment(sources=sources, **self.made_of).config

    def _job(self, folder: str, values: Mapping[str, Any] | None, seed: int, stop: dict[str, float]) -> TrialRun:
        ends = dict(self.plan.stop)
        sources = [*self.space.sources(values), ConfigSource(LAYER, {"run": {"seed": seed, "stop": ends}})]
        changes = [] if values is None else self.space.changes(values)
        return TrialRun(self.root / folder / f"seed-{seed}", self.made_of, sources, changes, stop, ends)

    def run(self, told: Callable[[Any, int], None] = lambda finding, total: None) -> Any:
        """Search, or go on; `told` gets each trial that is over, and how many there will be."""
        from bray.search.result import Result, middle, optimism, write_preset, write_result
        from bray.search.study import Study

        self.root.mkdir(parents=True, exist_ok=True)
        RunDir(self.root).lock("searching", "--name")
        try:
            study = Study(self.root, self.space, self.plan, self._job, self.storage, lambda f: told(f, study.total))
            places = make_places(self.resources, self.cluster)
            try:
                crew = TrialCrew(places)
                crew.work(study.take, study.done)
                result = Result(self.root, study.findings(), self.sign, study.importances())
                best = result.best
                result.fresh = self._fresh(crew, best.values) if self.fresh_seeds else None
            finally:
                places.close()
            write_result(result, study, f"{self.about}: {self.plan.name}")
            seeds = f", {self.plan.num_seeds} seeds each" if self.plan.num_seeds > 1 else ""
            said = [f"bray tune --name {self.plan.name}: trial {best.number}, the best of {len(result.trials)}{seeds}"]
            if result.fresh is not None and result.fresh.best:
                said += [f"{middle(result.fresh.best, self.sign)} on fresh seeds; {optimism(result)}"]
            config = self._probe(self._job("", best.values, self.plan.seed, {}).sources)
            env = config["env"].id if self.made_of["env"] is None else self.made_of["env"]
            plays = env not in (LIVE, FILES)
            without = Experiment(config["run"].algorithm, env).config if plays else config
            write_preset(result, config, without, said)
            return result
        finally:
            RunDir(self.root).close()

    def _fresh(self, crew: TrialCrew, values: Mapping[str, Any]) -> Any:
        """The best settings, and those without what was searched, on seeds that nothing was chosen by."""
        from bray.search.result import Fresh

        seeds = [self.plan.seed + FRESH + i for i in range(self.fresh_seeds)]
        kinds: list[tuple[str, Any]] = [("best", values), ("before", None)]
        todo = iter(list(itertools.product(kinds, seeds)))
        scores: dict[str, dict[int, float]] = {"best": {}, "before": {}}

        def take() -> Any:
            (kind, of), seed = next(todo, ((None, None), 0))
            return None if kind is None else ((kind, seed), self._job(f"fresh/{kind}", of, seed, dict(self.plan.stop)))

        def done(ticket: tuple[str, int], outcome: TrialEnd) -> None:
            if outcome.score is not None:
                scores[ticket[0]][ticket[1]] = outcome.score

        crew.work(take, done)
        both = [s for s in seeds if all(s in of for of in scores.values())] or seeds
        return Fresh(*([of[s] for s in both if s in of] for of in scores.values()))


class Tune:
    """`bray.tune(run=..., env=..., name=..., lr="1e-5..1e-2:log")`; `tune.run(...)` as RLlib has it."""

    def __call__(
        self,
        run: Any = None,
        env: Any = None,
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        cpus_per_trial: float = 1.0,
        gpus_per_trial: float = 0.0,
        parallel: int | None = None,
        address: str | None = None,
        **given: Any,
    ) -> Any:
        """Search over the keys of a run that have several values, and return what was found.

            found = bray.tune(run="PPO", env="CartPole-v1", name="lr", steps=20_000, trials=16, num_seeds=2,
                              lr="1e-5..1e-2:log", gamma=bray.tune.choice([0.95, 0.99]))
            found.best_config, found.preset, found.trials, found.fresh

        Beside keys of the run it takes `trials`, `num_seeds`, `steps` or `stop`, `scheduler` ("asha", "median", "pbt"),
        `sampler` ("tpe", "random"), `fresh_seeds`, `seed`, `project`, `storage`, `cluster` and `use_preset`: see
        docs/tuning.md. The same call goes on with a study that was interrupted."""
        of_search = {key: given.pop(key) for key in _OF_SEARCH if key in given}
        sources = [ConfigSource("python", dict(values)) for values in (config, given) if values]
        resources = Resources(cpus_per_trial, gpus_per_trial, parallel, address)
        return Search(run, env, sources, name=name, resources=resources, **of_search).run()

    @staticmethod
    def grid_search(values: Sequence[Any]) -> dict[str, Any]:
        """Each value is tried as often as every other one."""
        return {"grid_search": list(values)}

    @staticmethod
    def choice(values: Sequence[Any]) -> dict[str, Any]:
        """One of these."""
        return {"choice": list(values)}

    @staticmethod
    def uniform(low: float, high: float) -> dict[str, Any]:
        """A number between two."""
        return {"uniform": [low, high]}

    @staticmethod
    def loguniform(low: float, high: float) -> dict[str, Any]:
        """A number between two, by its logarithm."""
        return {"loguniform": [low, high]}

    def run(
        self,
        run_or_experiment: Any,
        name: str | None = None,
        *,
        stop: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_samples: int = 1,
        resources_per_trial: Mapping[str, Any] | None = None,
        local_dir: str | Path = "runs",
        metric: str | None = None,
        mode: str = "max",
        **other: Any,
    ) -> Any:
        """RLlib's `tune.run("PPO", stop={"timesteps_total": 50_000}, config={"env": "CartPole-v1", "lr":
        tune.grid_search([1e-2, 1e-3])}, resources_per_trial={"cpu": 1})`."""
        if other:
            known = ("name", "stop", "config", "num_samples", "resources_per_trial", "local_dir", "metric", "mode")
            raise UnknownName("argument of tune.run", next(iter(other)), known)
        settings = dict(config or {})
        env = settings.pop("env", None)
        if metric is not None:
            sign = {"max": "", "min": "-"}.get(mode)
            if sign is None:
                raise UnknownName("mode", mode, ["max", "min"])
            settings["checkpoint_score"] = sign + STOP_ALIASES.get(metric, metric)
        searched = [v for v in settings.values() if isinstance(v, dict) and v.keys() & {*LISTS, *RANGES}]
        grids = [v["grid_search"] for v in searched if "grid_search" in v]
        only_grids = len(grids) == len(searched)  # which are tried again with another seed
        cpus, gpus = _resources(resources_per_trial or {}, settings)
        return self(
            run_or_experiment,
            env,
            name=name or f"{run_or_experiment}-{env}".replace("/", "-"),
            project=local_dir,
            stop=stop,
            config=settings,
            trials=None if only_grids else num_samples * math.prod(map(len, grids)),
            num_seeds=num_samples if only_grids else 1,
            fresh_seeds=0,
            cpus_per_trial=cpus,
            gpus_per_trial=gpus,
        )


_OF_SEARCH = (
    *("steps", "stop", "trials", "num_seeds", "seed", "scheduler", "sampler", "storage", "fresh_seeds", "project"),
    *("cluster", "use_preset"),
)


def _resources(given: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """CPUs and GPUs of a trial; a function is asked with the config, as RLlib does."""
    known = ("cpu", "gpu", "extra_cpu", "extra_gpu")
    for key in given:
        if key not in known:
            raise UnknownName("resource of a trial", key, known)
    spec = SimpleNamespace(config=SimpleNamespace(**config))
    amount = {key: float(value(spec) if callable(value) else value) for key, value in given.items()}
    cpus = amount.get("cpu", 1.0) + amount.get("extra_cpu", 0.0)
    return cpus, amount.get("gpu", 0.0) + amount.get("extra_gpu", 0.0)


tune = Tune()
