"""What an experiment reads of a run directory beside the checkpoint, as data; and what it writes beside the state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bray.algos import ALGORITHMS, get_algo, make_policy
from bray.config import ConfigSource, Resolved, parse_yaml, to_plain
from bray.config.secrets import HIDDEN, give_again
from bray.errors import BrayError, CheckpointError, ConfigError
from bray.named import in_script
from bray.rundir import PolicyDir, RunDir
from bray.rundir.trust import Answer, When, check, named, named_by_launch
from bray.serving.access import TOKEN
from bray.spec import EnvSpec
from bray.train.device import resolve_device
from bray.train.fit import AUTO
from bray.train.local import describe_policy, threads_for
from bray.train.policies import keys_of, of_policy
from bray.train.setup import PLAIN, Check, set_up


def read_config(directory: RunDir) -> ConfigSource:
    """`config.yaml` of a run."""
    return parse_yaml(directory.read_text("config.yaml"), str(directory.path / "config.yaml"))


def with_secrets(saved: ConfigSource) -> ConfigSource:
    """A saved config with what the environment gives again of its secrets."""
    return replace(saved, values=give_again(saved.values))


def with_choices(config: Resolved, spec: EnvSpec) -> Resolved:
    """A config as it is written down: what was chosen by rule is said in it, so that a resumed run computes as before
    on any machine; and that there were tokens in the environment, so that it is not resumed without any."""
    sections, places = dict(config.sections), dict(config.provenance)
    if not isinstance(config["run"].threads, int):
        chosen = threads_for(spec, resolve_device(config["run"].device))
        sections["run"], places["run.threads"] = replace(config["run"], threads=chosen), AUTO
    if "live" in sections and os.environ.get(TOKEN):
        sections["live"], places["live.tokens"] = replace(sections["live"], tokens=(HIDDEN,)), TOKEN
    return Resolved(sections, places)


def changed_by(
    saved: ConfigSource, sources: Sequence[ConfigSource], env: Any, check: Check
) -> tuple[list[ConfigSource], Check]:
    """A saved config with what the caller changes, and the check that is left. What the caller names is the caller's
    own; what is saved is checked by itself, so that a change of an argument, as of `env_config`, makes no stranger of
    it."""
    given = [] if env is None else [ConfigSource("python", {"env": {"id": env}})]
    if given or sources:
        set_up(None, env, [saved], False, False, check)
        check = _nothing_left
    return [_UNSAID, saved, *_total_again(saved, sources), *given, *sources], check


_UNSAID = ConfigSource("before Bray chose", {"run": PLAIN})


def _total_again(saved: ConfigSource, sources: Sequence[ConfigSource]) -> Iterator[ConfigSource]:
    """All environments of the run, where they are to be dealt out anew."""
    said = [values.get("num_workers") for s in sources for values in (s.values, s.values.get("run")) if values]
    run, env = (saved.values.get(section) or {} for section in ("run", "env"))
    workers, each = run.get("num_workers"), env.get("num_envs", 1)
    if AUTO in said and isinstance(workers, int) and isinstance(each, int) and workers > 0:
        yield ConfigSource("all workers", {"env": {"num_envs": workers * each}})


def _nothing_left(config: Mapping[str, Any]) -> None:
    pass


def trust_check(directory: RunDir, trust: Answer, when: Iterable[When], env: Any = None) -> Check:
    """A check that raises where a run's config asks for what it may not, of what takes effect `when`. An `env` given
    as an object is the caller's own."""
    own_env, moments = env is not None and not isinstance(env, str), frozenset(when)

    def check_config(config: Mapping[str, Any]) -> None:
        asked = named(config, directory.path, moments)
        check(directory.path, [item for item in asked if not (item[0] == "env.id" and own_env)], trust)

    return check_config


def named_in_script(config: Resolved) -> dict[str, str]:
    """{key: name} of what a config names in the script that trains, where no other program finds it."""
    return {key: name for key, name, _ in named(config.to_dict()) if in_script(name)}


def read_launch(directory: RunDir, trust: Answer) -> dict[str, Any] | None:
    """`launch.json` of a run whose network is made by the project's own code, if that may be imported; None where there
    is none."""
    if not (directory.path / "launch.json").exists():
        return None
    launch = directory.read_json("launch.json")
    check(directory.path, named_by_launch(launch), trust)
    return launch


@contextmanager
def made_from(path: Path | None) -> Iterator[None]:
    """Turn an error while building what a run's config describes (too large for this machine, say) into one message
    that names the run."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as e:
        if path is None or isinstance(e, BrayError):
            raise
        raise CheckpointError(
            f"{path}: what its config.yaml describes cannot be made here ({type(e).__name__}: {str(e)[:200]}). "
            "`--debug` shows where"
        ) from e


def saved_policies(
    directory: RunDir,
    saved: ConfigSource,
    sources: Sequence[ConfigSource],
    env: Any,
    trust: Answer,
    moments: Iterable[When] = When,
) -> dict[str, tuple[Sequence[ConfigSource], Check]]:
    """What each policy of a run is made of, with what the caller changes, and the check that is left."""
    if isinstance(directory, PolicyDir):
        raise ConfigError(
            f"{directory.path} is one policy of a run: resume the run, or start one of this policy's own with its "
            f"weights (--init-from {directory.path})"
        )
    if any(keys_of(source) & {"policies", "policies_to_train"} for source in sources):
        raise ConfigError(
            "a run keeps its policies, and which of them learn, when it is resumed: leave out policies and "
            "policies_to_train. A new run can start with their weights (init_from of each)"
        )
    found: dict[str, tuple[Sequence[ConfigSource], Check]] = {}
    run = saved.values.get("run") or {}
    for source in sources:
        for values in (source.values, source.values.get("run")):
            if isinstance(values, Mapping) and "policy_mapping" in values:
                _require_same_mapping(run.get("policy_mapping"), values["policy_mapping"])
    for name in run.get("policies") or {}:
        own = directory.policy_folder(name)
        mine = with_secrets(read_config(own))
        algo = get_algo(run["algorithm"]) if sources and run["algorithm"] in ALGORITHMS else None
        changes = [of_policy(mine, source, run["algorithm"], algo) for source in sources]
        found[name] = changed_by(mine, changes, env, trust_check(own, trust, moments, env))
    return found


def _require_same_mapping(saved: Any, given: Any) -> None:
    """A function that no file can name is given again; it has the name that was saved."""
    if to_plain(given) != saved:
        raise ConfigError(
            f"a run keeps its policy_mapping when it is resumed: it has {saved}, got {to_plain(given)}. Leave it out; "
            "a new run can start with the weights of its policies (init_from of each)"
        )


def write_about(directory: RunDir, made: Any, training: Any) -> None:
    """Write down what a policy is: enough to serve it. `made`: from what, an Experiment or a Setup."""
    directory.write_spec(training.spec)
    policy = make_policy(made.algo, made.config["algo"], training.spec)
    about = {"algorithm": made.config["run"].algorithm}
    directory.write_policy(about | describe_policy(policy, training.model))


def check_spaces(directory: RunDir, spec: EnvSpec) -> None:
    """Refuse to go on in another environment than that of a run."""
    trained_on = EnvSpec.from_json(directory.read_json("spec.json"))
    if trained_on.id != spec.id:  # the caller's own, which need not say how long its episodes are
        trained_on = replace(trained_on, id=spec.id, max_episode_steps=spec.max_episode_steps)
    if trained_on != spec:
        raise CheckpointError(
            f"{directory.path}: the environment has other spaces than at training time; resume needs the same ones"
        )
