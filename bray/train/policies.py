"""Several policies in one run. In an environment of one agent each plays in environments of its own, and trains as it
would in a run of its own: the same weights, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bray.algos import check_name
from bray.config import ConfigSource
from bray.config.declare import options
from bray.config.runfile import spread_sections
from bray.envs.config import EnvConfig
from bray.errors import CheckpointError, ConfigError, UnknownName
from bray.metrics.rows import side_key
from bray.nn.catalog import ModelConfig
from bray.rundir.checkpoints import safe_name
from bray.train.config import RunConfig
from bray.train.driver import Driver
from bray.train.local import LocalTraining
from bray.train.setup import Check, Setup, is_object, set_up

_OF_RUN = ("policies", "policies_to_train", "policy_mapping")
_BEGINS = ("init_from", "init_map", "init_partial")
KEYS = ("run", "config", "model", "env", "share_encoder", "player", *_BEGINS)
"""What a policy may have of its own."""


# --- what they are ----------------------------------------------------------------------------------------------------


def named_policies(sources: Sequence[ConfigSource]) -> dict[str, Any]:
    """What sources say of policies, by name; before it is checked."""
    out: dict[str, Any] = {}
    for source in sources:
        for place in (source.values, source.values.get("run")):
            if isinstance(place, Mapping) and isinstance(found := place.get("policies"), Mapping):
                out |= found
    return out


def algorithm_of(policy: Any) -> Any:
    """The algorithm that a policy names; None: that of the run."""
    return policy.get("run") if isinstance(policy, Mapping) else policy


def set_up_policies(
    of_run: Setup, env: Any, sources: Sequence[ConfigSource], use_preset: bool, check: Check | None
) -> dict[str, Setup]:
    """A complete setup for each of `run.policies`: that of a run of its own, with what the run's sources say, and over
    it what they say of this policy. Keys of the run's algorithm are for policies with that algorithm."""
    run: RunConfig = of_run.config["run"]
    if not run.policies:
        return {}
    if "data" in of_run.config.sections:
        raise ConfigError("run.policies: several policies learn in an environment or from live games, not from files")
    if of_run.live and run.self_play is None:
        raise ConfigError("run.policies: several policies learn from live games as a league: set self_play: {} beside")
    if is_object(of_run.env):
        raise ConfigError("run.policies: an environment given as an object is there only once: give its class")
    if unknown := [name for name in run.policies_to_train or () if name not in run.policies]:
        raise UnknownName("policy", unknown[0], run.policies, "run.policies_to_train")
    encoder_owners(run.policies)
    players = [name for name, own in run.policies.items() if isinstance(own, Mapping) and own.get("player") is not None]
    if players and run.self_play is None:
        raise ConfigError(f"run.policies.{players[0]}.player is for a league: set self_play: {{}} beside policies")
    return {
        name: _set_up(_checked_name(name), policy, of_run, env, sources, use_preset, check)
        for name, policy in run.policies.items()
    }


def encoder_owners(policies: Mapping[str, Any]) -> dict[str, str]:
    """Whose encoder a policy reads, of those that have none of their own (`share_encoder`). A policy that owns one is
    the only one that trains it."""
    told = {name: own for name, own in policies.items() if isinstance(own, Mapping)}
    owners = {name: own["share_encoder"] for name, own in told.items() if own.get("share_encoder") is not None}
    for name, owner in owners.items():
        where, others = f"run.policies.{name}.share_encoder", [other for other in policies if other != name]
        if not isinstance(owner, str):
            raise ConfigError(f"{where}: one policy owns an encoder: name one of {', '.join(others)}, got {owner!r}")
        if owner not in others:
            raise UnknownName("policy", owner, others, where)
        if owner in owners:
            raise ConfigError(
                f"{where}: {owner} has no encoder of its own, it reads that of {owners[owner]}: an encoder has one "
                f"owner, which trains it, and the others name that one"
            )
        if found := [key for key in _BEGINS if key in told[name]]:
            raise ConfigError(f"{where} and {found[0]} exclude each other: the encoder begins as that of {owner}")
    return owners


def owners_first(names: Iterable[str], owners: Mapping[str, str]) -> list[str]:
    return sorted(names, key=lambda name: name in owners)


def keys_of(source: ConfigSource) -> set[str]:
    """The keys of a run that a source has."""
    return {str(key).partition(".")[0] for key in source.values} | set(source.values.get("run") or {})


def first_algorithm(sources: Sequence[ConfigSource]) -> list[ConfigSource]:
    """Where the run names no algorithm, its policies do: the first of theirs stands for it."""
    found = {name: algorithm_of(policy) for name, policy in named_policies(sources).items()}
    for name, algorithm in found.items():
        check_name(algorithm, f"of policy {name}")
    return [ConfigSource("policies", {"run": {"algorithm": x}}) for x in found.values() if isinstance(x, str)][:1]


def of_policy(saved: ConfigSource, source: ConfigSource, run: Any, algo: Any) -> ConfigSource:
    """What a source that changes a resumed run of this algorithm says to the policy of this config."""
    same = (saved.values.get("run") or {}).get("algorithm") == run
    return _of_all(source, None if same else algo)


def _checked_name(name: str) -> str:
    try:
        safe_name(name)
    except CheckpointError as e:
        raise ConfigError(f"run.policies: {e}") from None
    if name == "default":
        raise ConfigError("run.policies: `default` is the policy of a run that has one, choose another name")
    return name


def _set_up(
    name: str,
    policy: Any,
    of_run: Setup,
    env: Any,
    sources: Sequence[ConfigSource],
    use_preset: bool,
    check: Check | None,
) -> Setup:
    run, where = of_run.config["run"], f"run.policies.{name}"
    own: Any = {"run": policy} if isinstance(policy, str) else policy or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where}: expected an algorithm's name, or a dict of {', '.join(KEYS)}, got {policy!r}")
    for key in own:
        if key not in KEYS:
            raise UnknownName("key", key, KEYS, where)
    algorithm = own.get("run") or run.algorithm
    check_name(algorithm, f"of policy {name}")
    same = algorithm == run.algorithm
    shared = [_of_all(source, None if same else of_run.algo) for source in sources]
    values: dict[str, Any] = {k: dict(own[k]) for k in ("model", "env") if own.get(k)}
    values |= {"run": {k: own[k] for k in _BEGINS if k in own}, "algo": dict(own.get("config") or {})}
    more = [ConfigSource(where, values)]
    try:
        return set_up(algorithm, env, [*shared, *more], use_preset, of_run.live, check, part=True)
    except ConfigError as e:
        raise type(e)(f"policy {name}: {e}") if type(e) is ConfigError else e from None


def _of_all(source: ConfigSource, other: Any) -> ConfigSource:
    """What a source of the run says to a policy: not which policies there are, nor, where it has another algorithm,
    what is for the run's own (`other`)."""
    source = spread_sections(source)
    ours = {name for kind in (RunConfig, EnvConfig, ModelConfig) for name in options(kind)}
    theirs = set() if other is None else {"algo", *options(other.Config)} - ours
    values = {k: v for k, v in source.values.items() if str(k).partition(".")[0] not in {*_OF_RUN, *theirs}}
    if isinstance(values.get("run"), Mapping):
        values["run"] = {k: v for k, v in values["run"].items() if k not in (*_OF_RUN, "algorithm")}
    return replace(source, values=values)


def make_trainings(setups: Mapping[str, Setup], run: RunConfig, home_of: Callable[[RunConfig], Any]) -> PolicyTrainings:
    """`run`: which of the policies learn, and whose encoder those read that have none."""
    learn, owners = run.policies_to_train, encoder_owners(run.policies)
    for key in ("eval_parallel", "video_freq"):
        if getattr(run, key):
            raise ConfigError(
                f"run.{key} is for a run with one policy, or a game that several play: leave it out; eval_freq "
                "evaluates several, and `bray eval RUN_DIR/models/NAME --render` films one"
            )
    parts: dict[str, LocalTraining] = {}
    try:
        for name in owners_first(setups, owners):
            setup = setups[name]
            c, learns = setup.config, learn is None or name in learn
            made = c["run"], c["env"], c["model"], c["algo"]
            reads = parts[owners[name]].model if name in owners else None
            parts[name] = LocalTraining(setup.algo, *made, home=home_of(c["run"]), learns=learns, reads=reads)
        return PolicyTrainings({name: parts[name] for name in setups})
    except BaseException:
        for part in parts.values():
            part.close()
        raise


# --- at work ----------------------------------------------------------------------------------------------------------


class PolicyTrainings(Driver):
    """A training for each policy, in turn: an iteration is one of each. A goal of environment steps is shared out
    among them, so that each plays as much."""

    depends_on_timing = ""

    def __init__(self, parts: Mapping[str, LocalTraining]):
        self.parts = dict(parts)
        super().__init__([part.side for part in parts.values()], [s for part in parts.values() for s in part.sources])
        self.sides = {name: part.side for name, part in self.parts.items()}
        first = next(iter(self.parts.values()))
        self.device, self.spec, self.run_config = first.device, first.spec, first.run_config
        self.depends_on_timing = next((p.depends_on_timing for p in self.parts.values() if p.depends_on_timing), "")

    @property
    def several(self) -> bool:
        return True

    @property
    def env_steps(self) -> int:
        return sum(part.env_steps for part in self.parts.values())

    @property
    def return_mean(self) -> float | None:
        return _mean([part.return_mean for part in self.parts.values()])

    def describe(self) -> str:
        return ", ".join(f"{name}: {part.run_config.algorithm}, {part.describe()}" for name, part in self.parts.items())

    def start(self) -> None:
        for part in self.parts.values():
            part.start()
        super().start()

    def stop(self) -> None:
        for part in self.parts.values():
            part.stop()
        super().stop()

    def _goals(self) -> dict[str, int | None]:
        """Of each policy."""
        if self.goal is None:
            return dict.fromkeys(self.parts)
        each, more = divmod(self.goal, len(self.parts))
        return {name: each + (i < more) for i, name in enumerate(self.parts)}

    def iterate(self, most_episodes: int | None = None) -> dict[str, Any] | None:
        start, before, self._midway = time.perf_counter(), self.env_steps, True
        rows: dict[str, dict[str, Any]] = {}
        for (name, part), goal in zip(self.parts.items(), self._goals().values(), strict=True):
            part.goal = goal
            if (goal is None or part.env_steps < goal) and (row := part.iterate()) is not None:
                rows[name] = row
        self._midway = False
        if not rows:
            return None
        self.iteration += 1
        seconds = time.perf_counter() - start
        return _row_of_all(rows) | {
            "training_iteration": self.iteration,
            "env_steps_total": self.env_steps,
            "learner_steps_total": self.steps,
            "episodes_total": sum(part.totals.episodes.total for part in self.parts.values()),
            "env_steps_per_second": (self.env_steps - before) / seconds,
            "time_this_iter_s": seconds,
        }

    def get_state(self, replay_dir: Path | None = None) -> dict[str, Any]:
        states = {name: part.get_state(self._place(replay_dir, name)) for name, part in self.parts.items()}
        json = {name: state["json"] for name, state in states.items()}
        return {
            "arrays": {"policies": {name: state["arrays"] for name, state in states.items()}},
            "json": {
                "policies": json,
                "exact": not self._midway and all(one["exact"] for one in json.values()),
                "midway": self._midway or any(one["midway"] for one in json.values()),
                "iteration": self.iteration,
            },
        }

    def set_state(self, state: dict[str, Any], weights: Mapping[str, Any], replay_dir: Path | None = None) -> bool:
        self.iteration, exact = int(state["json"]["iteration"]), True
        for name, part in self.parts.items():
            one = {kind: state[kind]["policies"][name] for kind in ("arrays", "json")}
            exact = part.set_state(one, weights[name], self._place(replay_dir, name)) and exact
        return exact and not state["json"]["midway"]

    def _of_sides(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state["policies"]

    def evaluate(self, episodes: int | None = None) -> dict[str, Any]:
        """Each policy in environments of its own."""
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            found |= {side_key(name, key): value for key, value in part.evaluate(episodes).items()}
        returns = [found[side_key(name, "eval/return_mean")] for name in self.parts]
        return found | {"eval/return_mean": sum(returns) / len(returns)}

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def _row_of_all(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Result rows of several policies as one: of episodes what holds for all, of time the sum, and all else by the name
    of the policy."""
    out: dict[str, Any] = {}
    for key, of in (("mean", _mean), ("min", _least), ("max", _most)):
        out[f"episode_return_{key}"] = of([row.get(f"episode_return_{key}") for row in rows.values()])
    out["episode_length_mean"] = _mean([row.get("episode_length_mean") for row in rows.values()])
    out["episodes_this_iter"] = sum(row["episodes_this_iter"] for row in rows.values())
    for name, row in rows.items():
        for key, value in row.items():
            if key.startswith("perf/"):
                out[key] = out.get(key, 0.0) + value
            elif key not in ("training_iteration", "time_this_iter_s"):
                out[side_key(name, key)] = value
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None


def _least(values: Sequence[float | None]) -> float | None:
    return min((x for x in values if x is not None), default=None)


def _most(values: Sequence[float | None]) -> float | None:
    return max((x for x in values if x is not None), default=None)
