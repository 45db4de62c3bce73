"""Algorithms by name. Each is one module with five names: Config, make_model, experience, Policy, Learner; a sixth,
DEFAULTS, says what it changes in the other sections.

`register_algo("MyAlgo", module_or_class)` or `module:Name` (or just an importable module's name with a colon) adds one
without touching this package; anything with the attributes will do. `experience` may be left out: see
`make_experience`. So may whatever is to be as in the algorithm whose Learner its own is derived from, and such a
Learner alone is an algorithm: see `_completed`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

from bray.config.hints import hint
from bray.errors import ConfigError, UnknownName
from bray.named import script_hint, where_looked

ALGORITHMS: dict[str, Any] = {
    "PPO": "bray.algos.ppo",
    "A2C": "bray.algos.a2c",
    "PG": "bray.algos.pg",
    "IMPALA": "bray.algos.impala",
    "APPO": "bray.algos.appo",
    "DQN": "bray.algos.dqn",
    "C51": "bray.algos.c51",
    "QR-DQN": "bray.algos.qrdqn",
    "IQN": "bray.algos.iqn",
    "Rainbow": "bray.algos.rainbow",
    "Ape-X": "bray.algos.apex",
    "R2D2": "bray.algos.r2d2",
    "PQN": "bray.algos.pqn",
    "SAC": "bray.algos.sac",
    "SAC-Discrete": "bray.algos.sac_discrete",
    "CrossQ": "bray.algos.crossq",
    "DDPG": "bray.algos.ddpg",
    "TD3": "bray.algos.td3",
    "ES": "bray.algos.es",
    "ARS": "bray.algos.ars",
    "MAPPO": "bray.algos.mappo",
    "QMIX": "bray.algos.qmix",
    "VDN": "bray.algos.vdn",
    "MADDPG": "bray.algos.maddpg",
    "COMA": "bray.algos.coma",
    "ATOC": "bray.algos.atoc",
    "NFSP": "bray.algos.nfsp",
    "AlphaZero": "bray.algos.alphazero",
    "BC": "bray.algos.bc",
    "MARWIL": "bray.algos.marwil",
    "TD3+BC": "bray.algos.td3_bc",
    "IQL": "bray.algos.iql",
    "CQL": "bray.algos.cql",
    "CQL-Discrete": "bray.algos.cql_discrete",
    "DQfD": "bray.algos.dqfd",
    "SQIL": "bray.algos.sqil",
    "SQIL-Discrete": "bray.algos.sqil_discrete",
    "GAIL": "bray.algos.gail",
    "DAgger": "bray.algos.dagger",
    "DT": "bray.algos.dt",
}
_ELSEWHERE = {
    **dict.fromkeys(("dqnnew", "doubledqn", "ddqn"), "DQN"),
    **dict.fromkeys(("categoricaldqn", "distributionaldqn"), "C51"),
    **dict.fromkeys(("quantiledqn", "quantileregressiondqn"), "QR-DQN"),
    **dict.fromkeys(("discretesac", "sacd"), "SAC-Discrete"),
    **{"behaviorcloning": "BC", "behaviouralcloning": "BC", "td3bc": "TD3+BC", "td3plusbc": "TD3+BC"},
    **{"discretecql": "CQL-Discrete", "decisiontransformer": "DT"},
    **dict.fromkeys(("reinforce", "vpg", "policygradient"), "PG"),
    **dict.fromkeys(("ppo2", "ppoclip", "maskableppo", "ippo"), "PPO"),
    **{"rainbowdqn": "Rainbow", "apexdqn": "Ape-X", "asyncppo": "APPO", "openaies": "ES"},
}
"""Names that other libraries have for ours, as `_folded` leaves them."""
_OWN = "your own is module:Name"
NAMES = ("Config", "make_model", "Policy", "Learner")
OPTIONAL = ("experience", "DEFAULTS", "iterate", "PLAYS_ON")


def register_algo(name: str, algo: Any, replace: bool = False) -> None:
    """Make `--run NAME` mean this module, class or import path. A name (see `algo_name`) that means another one already
    is refused unless `replace`."""
    known = {_folded(k): k for k in ALGORITHMS}.get(_folded(name), name)
    if known in ALGORITHMS and ALGORITHMS[known] != algo and algo_name(algo) != known and not replace:
        raise ConfigError(
            f"register_algo: {known!r} is {_path(ALGORITHMS[known])} already and would become {_path(algo)}; "
            "choose another name, or say replace=True"
        )
    ALGORITHMS.pop(known, None)
    ALGORITHMS[name] = algo


def check_name(name: Any, where: str = "--run") -> None:
    """Raise UnknownName for a name that is no algorithm's; nothing is imported. `where`: what the user wrote it in."""
    if isinstance(name, str) and algo_name(name) not in ALGORITHMS and ":" not in name:
        raise UnknownName("algorithm", name, ALGORITHMS, f"{where}; {_OWN}", hint(f"--run {_folded(name)}"))


def get_algo(name: Any) -> Any:
    """The algorithm of a name (see `algo_name`), of `module:Name`, or the given object itself."""
    check_name(name)
    algo = ALGORITHMS.get(algo_name(name), name) if isinstance(name, str) else name
    if isinstance(algo, str):
        algo = _import(algo)
    algo = _completed(algo)
    _check(algo, algo_name(name))
    return algo


def _completed(algo: Any) -> Any:
    """An algorithm with the names that it leaves to those from whose Learners its own is derived; such a Learner alone
    leaves all the others."""
    learner = getattr(algo, "Learner", algo)
    modules = {c: sys.modules.get(c.__module__) for c in getattr(learner, "__mro__", ())}
    pages = [module for c, module in modules.items() if getattr(module, "Learner", None) is c]
    places = [algo, *pages][::-1]  # the nearest one last
    found = {n: getattr(place, n) for place in places for n in (*NAMES, *OPTIONAL) if hasattr(place, n)}
    if all(hasattr(algo, n) for n in found):
        return algo
    about = {n: getattr(algo, n) for n in ("__module__", "__name__", "__qualname__", "__doc__") if hasattr(algo, n)}
    return SimpleNamespace(**found | {"Learner": learner, "written": algo} | about)


CONTRACT = """
    Config                               a dataclass: @dataclass(frozen=True), a type and a default for each field
    make_model(config, spec, model) -> nn.Module
    experience(config, spec, model)      Rollouts or Replay; left out: by the Config's rollout_length or replay_size
    DEFAULTS                             {"env": {"num_envs": 8}}, say: its defaults of other sections; may be left out
    Policy(config, spec)                 a bray.act.Policy
    Learner(config, spec, model, model_config, seed=0, record=True)    a bray.algos.base.Learner
    Learner.update(batch, clock) -> bray.algos.base.Update(names, values, priorities=None)
  What is left out of one whose Learner is derived from ours is as in ours: class Mine(ppo.Learner) is enough.
  examples/custom_algorithm.py is one, docs/algorithms.md tells more."""
"""What an algorithm has; shown where one of these is wrong."""


def _check(algo: Any, name: str) -> None:
    """Raise for an algorithm with a mistake that can be seen before it runs."""
    if missing := [n for n in NAMES if not hasattr(algo, n)]:
        raise broken(name, f"it needs {', '.join(NAMES)}; {', '.join(missing)} missing")
    if not (isinstance(algo.Config, type) and dataclasses.is_dataclass(algo.Config)):
        raise broken(name, "its Config is no dataclass: write @dataclass(frozen=True) above it")
    calls = {"make_model": ("config", "spec", "model"), "Policy": ("config", "spec")}
    if hasattr(algo, "experience"):
        calls["experience"] = ("config", "spec", "model")
    for part, given in calls.items():
        try:
            signature = inspect.signature(getattr(algo, part))
            signature.bind(*given)
        except TypeError as e:
            raise broken(name, f"its {part} takes {signature}, it is called with ({', '.join(given)}): {e}") from None
        except ValueError:  # written in C
            continue
    try:
        inspect.signature(algo.Learner).bind("config", "spec", "model", "model_config", seed=0, record=True)
    except TypeError as e:
        raise broken(name, f"its Learner takes {inspect.signature(algo.Learner)}: {e}") from None


def broken(name: str, why: str) -> ConfigError:
    """An algorithm that does not keep the contract."""
    return ConfigError(f"{name} is not an algorithm that Bray can train: {why}. An algorithm has{CONTRACT}")


def refusal(algo: Any, spec: Any) -> str:
    """Why an algorithm does not take these spaces, in its own words; empty where it does. It is asked for its
    Policy."""
    try:
        algo.Policy(algo.Config(), spec)
    except Exception as e:  # one of the user's own may raise anything
        return str(e) or type(e).__name__
    return ""


def takers(spec: Any) -> list[str]:
    """The algorithms that take these spaces."""
    return [name for name in ALGORITHMS if not refusal(get_algo(name), spec)]


def make_policy(algo: Any, config: Any, spec: Any) -> Any:
    """Its Policy. Where it does not take these spaces, the error names the algorithms that do."""
    try:
        return algo.Policy(config, spec)
    except ConfigError as e:
        if not refusal(algo, spec):
            raise  # it is the config, not the spaces
        known = ", ".join(takers(spec)) or "none of ours"
        raise ConfigError(f"{e}. Algorithms that take these spaces: {known}") from None


def make_experience(algo: Any, config: Any, spec: Any, model: Any) -> Any:
    """What an algorithm learns from: its own `experience`, else by the fields of its Config: `Rollouts` where it has a
    `rollout_length`, `Replay` where it has a `replay_size`."""
    if hasattr(algo, "experience"):
        return algo.experience(config, spec, model)
    from bray.algos.rows import rollouts
    from bray.data.experience import Replay

    if hasattr(config, "rollout_length"):
        return rollouts(config, model)
    if hasattr(config, "replay_size"):
        return Replay.of(config, spec.frame_stack)
    raise ConfigError(
        f"{algo_name(algo)} does not say what it learns from: give it experience(config, spec, model), or a Config "
        "with rollout_length or replay_size"
    )


def algo_name(algo: Any) -> str:
    """How an algorithm is called in configs and run directories. Case, hyphens, underscores and spaces of what was
    given do not matter, and names that other libraries have for one of ours are known."""
    if isinstance(algo, str):
        known = {**_ELSEWHERE, **{_folded(k): k for k in ALGORITHMS}}
        return known.get(_folded(algo), algo)
    for name, known_algo in ALGORITHMS.items():
        if known_algo is algo or known_algo == getattr(algo, "__name__", None):
            return name
    return _path(algo)


def _folded(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


def _path(algo: Any) -> str:
    """`module:Name` of a class or object, `module:` of a module."""
    if isinstance(algo, str):
        return algo
    module, name = getattr(algo, "__module__", ""), getattr(algo, "__qualname__", getattr(algo, "__name__", str(algo)))
    return f"{module}:{name}" if module else f"{name}:"


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if not (looked := where_looked(module, e)):
            raise  # the module is there; something that it imports is not
        raise ConfigError(f"cannot import {module!r} for --run {path}: no such module{looked}") from None
    if not name:
        return found
    if not hasattr(found, name):
        public = [n for n in dir(found) if not n.startswith("_")]
        raise UnknownName(f"name in {module}", name, public, f"--run {path}", script_hint(path))
    return getattr(found, name)
