"""From arguments and sources to a checked config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bray.algos import ALGORITHMS, algo_name, get_algo
from bray.config import ConfigSource, Resolved, resolve
from bray.config.declare import Excludes, Needs, options, show
from bray.config.runfile import other_versions, preset, spread_sections
from bray.envs.config import EnvConfig
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.train.config import DataConfig, LiveConfig, RunConfig
from bray.train.goals import STOP_ALIASES, check_stop
from bray.train.live import ID as LIVE
from bray.train.offline import ID as FILES

logger = logging.getLogger("bray")


@dataclass(frozen=True)
class Setup:
    """Algorithm, environment and checked config of an experiment."""

    algo: Any
    env: Any
    live: bool
    """Learn from games that call, instead of an environment."""
    config: Resolved


PLAIN: dict[str, Any] = {"device": "cpu", "num_workers": 0, "inference": "worker"}
"""Where a training plays and computes that does not choose: those of a launch file, and runs that say nothing of it."""

Check = Callable[[Mapping[str, Any]], None]
"""Raises if a config (plain data by section) names code that may not be imported."""


def set_up(
    run: Any,
    env: Any,
    sources: Sequence[ConfigSource],
    use_preset: bool = True,
    live: bool = False,
    check: Check | None = None,
    launched: bool = False,
    part: bool = False,
) -> Setup:
    """Merge and check: defaults of the algorithm < preset < what `run` and `env` name < the sources. `check` is asked
    before anything is imported: for the algorithm, and for all the rest once it is merged. `launched`: games of a
    launch file play; a preset says how to learn, not when to stop or how many environments Bray steps. `part`: of a
    run with several policies; a preset does not say when it stops."""
    given = [_with_listed_callbacks(spread_sections(source)) for source in sources]
    run = _last(run, given, "run", "algorithm")
    env = _last(env, given, "env", "id")
    live = live or any("live" in source.values for source in given)
    has_files = any("data" in source.values for source in given)
    of_files = [{**s.values, **(s.values.get("data") or {})} for s in given] if has_files else []
    mixes = any(values.get("share") is not None for values in of_files)
    from_files = has_files and not mixes
    if mixes and not any(values.get("files") for values in of_files):
        raise ConfigError("--data-share needs --data FILES (data=), which that share of every batch comes from")
    if mixes and env is None and not live:
        raise ConfigError(
            "--data-share mixes what is played with files: name what is played, --env ENV (env=) or --live (live=True)"
        )
    if live and from_files:
        raise ConfigError("live games and files beside them: say which share of a batch is of files, --data-share 0.5")
    if env is None and (live or from_files):
        env = LIVE if live else FILES
    if run is None or env is None:
        raise ConfigError(
            "an experiment needs an algorithm (run=, --run) and an environment (env=, --env), live games (live=True, "
            "--live), or files (data=, --data)"
        )
    if check is not None:
        check({"run": {"algorithm": run}})
    algo, name = get_algo(run), algo_name(run)
    layers = [ConfigSource("launched", {"run": dict(PLAIN)})] if launched else []
    if defaults := _defaults(algo, env):  # e.g. another network for this algorithm
        layers.append(ConfigSource(f"defaults of {name}", defaults))
    # A preset's goal and evaluations are of training in an environment, not from files.
    if use_preset and isinstance(env, str) and not from_files:
        of_policy = [ModelConfig, algo.Config]
        found = _preset_of(name, env, of_policy if launched else [*of_policy, EnvConfig] if part else None)
        both = options(algo.Config).keys() & options(DataConfig).keys() if has_files else set()
        layers += [replace(x, values={f"algo.{k}" if k in both else k: v for k, v in x.values.items()}) for x in found]
    layers.append(ConfigSource("named", {"run": {"algorithm": name}, "env": {"id": env}}))
    sections = {"run": RunConfig, "env": EnvConfig, "model": ModelConfig, "algo": algo.Config}
    if live:
        sections["live"] = LiveConfig
    if has_files:
        sections["data"] = DataConfig
    config = _with_checked_stop(resolve(sections, _with_last_stop([*layers, *given]), partial(_of_others, name)))
    _refuse_empty_cluster(config["run"])
    if check is not None:
        check(config.to_dict())
    else:  # a new run; one that was made before runs on
        _refuse_idle(config)
        _refuse_idle_workers(config, env)
    return Setup(algo, env, live, config)


def _with_listed_callbacks(source: ConfigSource) -> ConfigSource:
    """One callback may stand without a list around it: a function, a dict of functions, a name."""
    values: dict[str, Any] = dict(source.values)
    if isinstance(run := values.get("run"), dict):
        values["run"] = run = type(run)(run)  # `run.callbacks=...` makes a dict of another type
    for place in (values, run):
        if isinstance(place, dict) and not isinstance(one := place.get("callbacks"), (list, type(None))):
            place["callbacks"] = list(one) if isinstance(one, tuple) else [one]
    return replace(source, values=values)


def _of_others(algo: str, key: str) -> str:
    """The end of a message about a key that this algorithm has not: which ones have it."""
    others = [name for name in ALGORITHMS if name != algo and key in options(get_algo(name).Config)]
    return f" {algo} has none; it is a key of {', '.join(others)}." if others else ""


def _preset_of(algo: str, env: str, only: Sequence[type] | None) -> list[ConfigSource]:
    """Its preset, or the keys of some sections `only`; where there is one for another version of the environment only,
    that is said."""
    if found := preset(algo, env):
        if only is not None:
            known = {"model", "algo", *(["env"] if EnvConfig in only else [])}
            known |= {key.rstrip("_") for section in only for key in options(section)}
            found = replace(found, values={k: v for k, v in found.values.items() if k.rstrip("_") in known})
        return [found]
    if others := other_versions(algo, env):
        logger.warning(
            "%s has no preset for %s, only for %s, which is another environment: training with the defaults",
            algo,
            env,
            ", ".join(others),
        )
    return []


def _refuse_idle(config: Resolved) -> None:
    """Raise where an option was set that has no effect: another one switches it off, or the one that it belongs to is
    not set."""
    for section, values in config.sections.items():
        kind: type = type(values)
        known = options(kind)
        set_ = [name for name, option in known.items() if getattr(values, name) != option.default]
        for name in set_:
            for rule in known[name].metadata:
                if isinstance(rule, Excludes) and (other := rule.other) in set_:
                    raise ConfigError(
                        f"{_shown(config, section, name)} and {_shown(config, section, other)} exclude each other: "
                        f"set one of them and leave the other at its default ({name}={show(known[name].default)}, "
                        f"{other}={show(known[other].default)})"
                    )
                if isinstance(rule, Needs) and rule.other not in set_:
                    raise ConfigError(
                        f"{_shown(config, section, name)} has no effect without {section}.{rule.other}: set that too, "
                        f"or leave {name} out"
                    )


def _refuse_idle_workers(config: Resolved, env: Any) -> None:
    """Raise where an option of workers or environments was set that this run has no use for."""
    run, form = config["run"], config["env"].vector
    for name in ("num_cpus_per_worker", "num_gpus_per_worker", "object_store_mb"):
        if not on_ray(run) and getattr(run, name) != getattr(RunConfig, name):
            raise ConfigError(
                f"{_shown(config, 'run', name)} is for workers on a Ray cluster, and this run has none there: set "
                f"run.cluster=ray (--cluster ray) with num_workers, or leave {name} out"
            )
    alone = is_object(env)
    if config["env"].step_timeout is not None and (alone or form not in ("auto", "subprocess")):
        why = "an environment given as an object stays" if alone else f"env.vector={form} keeps environments"
        raise ConfigError(
            f"{_shown(config, 'env', 'step_timeout')} has no effect: {why} in this process, where a step that hangs "
            "cannot be ended; "
            + ("give its class or a function that makes it" if alone else "set env.vector=subprocess")
            + ", or leave step_timeout out"
        )


def is_object(env: Any) -> bool:
    """Whether an environment is given as an object, which is there only once."""
    return not isinstance(env, (str, type)) and hasattr(env, "step")


def on_ray(run: RunConfig) -> bool:
    """Whether rollout workers are Ray's."""
    return run.cluster == "ray" or (run.cluster is None and run.address is not None)


def _refuse_empty_cluster(run: RunConfig) -> None:
    if run.exchange is not None and not run.workers:
        raise ConfigError(
            f"run.exchange={run.exchange} is for workers that others start, and run.num_workers says how many there "
            "may be at once: set num_workers (--num-workers 8), or leave run.exchange out"
        )
    if on_ray(run) and not run.workers and run.num_learners == 1:
        said = f"run.address={run.address}" if run.cluster is None else "run.cluster=ray"
        raise ConfigError(
            f"{said} is where rollout workers and other learners run, and num_workers=0 asks for none: set num_workers "
            "(--num-workers 8) or num_learners, or leave it out"
        )


def _shown(config: Resolved, section: str, name: str) -> str:
    """`algo.tau=0.01 (preset cartpole_dqn)`."""
    key = f"{section}.{name}"
    return f"{key}={show(getattr(config[section], name))} ({config.provenance.get(key, 'given')})"


def _defaults(algo: Any, env: Any) -> dict[str, Any]:
    """What an algorithm changes in other sections. An environment given as an object is there only once, whatever
    number it would like."""
    defaults = dict(getattr(algo, "DEFAULTS", {}))
    if is_object(env):
        defaults["env"] = {k: v for k, v in defaults.get("env", {}).items() if k != "num_envs"}
    return defaults


def _last(given: Any, sources: Sequence[ConfigSource], section: str, key: str) -> Any:
    """What Python was given, else what the last source says."""
    found = [source.values[section] for source in sources if isinstance(source.values.get(section), dict)]
    named = [values[key] for values in found if values.get(key) is not None]
    return given if given is not None else named[-1] if named else None


def _with_checked_stop(config: Resolved) -> Resolved:
    """Stop conditions under their own names, without those that mean no limit; and a seed that generators take."""
    if config["run"].seed >= 2**63:
        raise ConfigError(f"run.seed: expected a whole number of 64 bits, got {config['run'].seed}")
    run = replace(config["run"], stop=check_stop(config["run"].stop))
    names = {f"run.stop.{alias}": f"run.stop.{name}" for alias, name in STOP_ALIASES.items()}
    return Resolved(
        {**config.sections, "run": run},
        {names.get(key, key): place for key, place in config.provenance.items()},
    )


def _with_last_stop(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """Stop conditions replace those of an earlier source as a whole: a preset's goal is not the user's.
    `stop.name=value` changes one."""
    out: list[ConfigSource] = []
    replaced = False
    for source in reversed(sources):
        values = {k: dict(v) if k == "run" and type(v) is dict else v for k, v in source.values.items()}
        for place in (values, values.get("run")):
            if isinstance(place, dict) and "stop" in place:
                whole = type(place["stop"]) is dict  # `stop.name=value` makes a dict of another type
                if replaced:
                    del place["stop"]
                replaced = replaced or whole
        out.insert(0, replace(source, values=values))
    return out
