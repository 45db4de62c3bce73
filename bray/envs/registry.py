"""Names of environments: Gymnasium's registry, ours, `module:Class`, classes, factories and objects."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym

from bray.envs.config import EnvConfig
from bray.envs.families import family_of_id, family_of_module
from bray.envs.missing import what_is_missing
from bray.envs.outside_games import outside_game
from bray.errors import ConfigError, UnknownName, how_to_install
from bray.named import script_hint, where_looked

_CREATORS: dict[str, Callable[..., Any]] = {}

for _game, _limit in (("Catch", None), ("Breakout", 1000)):
    gym.registry.setdefault(
        f"bray/{_game}-v0",
        gym.envs.registration.EnvSpec(f"bray/{_game}-v0", f"bray.envs.games:{_game}", max_episode_steps=_limit),
    )

# Packages that bring environments: module of the environment -> (what to import, our extra)
_EXTRAS = {
    "ale_py": ("ale_py", "atari"),
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
}


class EnvContext(dict):
    """The `env_config` a creator gets: a dict that also knows which environment of which worker is being made.

    worker_index  the rollout worker: 0 is the training process itself, whatever `env.vector` is
    vector_index  the environment, 0 to num_envs - 1; different for each environment of a worker
    remote        whether it is made in another process than the training's
    """

    def __init__(self, values: dict[str, Any], worker_index: int = 0, vector_index: int = 0, remote: bool = False):
        super().__init__(values)
        self.worker_index, self.vector_index, self.remote = worker_index, vector_index, remote


def register_env(name: str, creator: Callable[..., Any], replace: bool = False) -> None:
    """Make `name` an environment: `creator(env_config)` returns one. It is a class or a function, also a lambda; worker
    processes get it too.
    A name that has another creator already is refused unless `replace`."""
    if not callable(creator):
        raise ConfigError(
            f"register_env({name!r}, ...) takes a class or a function that makes an environment, got {creator!r}"
        )
    taken = _CREATORS.get(name, creator)
    if taken is not creator and not replace:
        raise ConfigError(
            f"register_env: {name!r} is {env_name(taken)} already and would become {env_name(creator)}; "
            "choose another name, or say replace=True"
        )
    _CREATORS[name] = creator


def list_envs() -> list[str]:
    """All names that `make_env` takes now: registered ones first, then Gymnasium's, then those of the old gym package
    where it is loaded."""
    _import_if_there("ale_py")
    theirs = sorted(set(gym.registry) - set(_CREATORS))
    return sorted(_CREATORS) + theirs + sorted(set(_old_ids()) - set(gym.registry) - set(_CREATORS))


def _package(registry: Mapping[str, Any], name: str) -> str:
    """The package that an id's class comes from; importing it registers the id."""
    entry = registry[name].entry_point
    return (entry if isinstance(entry, str) else entry.__module__).partition(":")[0].partition(".")[0]


def _old_ids() -> Mapping[str, Any]:
    """Ids of the old `gym` package, where something has imported it."""
    old = sys.modules.get("gym")
    registry = getattr(getattr(old, "envs", None), "registry", {})
    return getattr(registry, "env_specs", registry)  # before gym 0.26 it was an object


@dataclass(frozen=True)
class OldGym:
    """Makes an environment that is registered with the old `gym` package alone."""

    id: str
    module: str
    """Imported first, as it registers the id."""

    def __call__(self, render_mode: str | None = None, **arguments: Any) -> Any:
        importlib.import_module(self.module)
        make = importlib.import_module("gym").make
        known = inspect.signature(make).parameters
        extra: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
        if "disable_env_checker" in known:  # gym's checker does not work with numpy 2
            extra["disable_env_checker"] = True
        return make(self.id, **{**arguments, **extra})


@dataclass(frozen=True)
class EnvOrigin:
    """Where an environment comes from: a Gymnasium id, or a creator (class, function), or one object."""

    name: str
    gym_id: str | None = None
    creator: Any = None

    @property
    def single(self) -> bool:
        """A ready object: there is only one of it."""
        return self.creator is not None and not callable(self.creator)

    @property
    def gym_spec(self) -> Any:
        return gym.spec(self.gym_id) if self.gym_id else None

    @property
    def registered(self) -> bool:
        """Made by `make` of Gymnasium or old gym, which put wrappers around it."""
        return self.gym_id is not None or isinstance(self.creator, OldGym)

    @property
    def keeps_bounds(self) -> bool:
        """Whether numbers outside the declared bounds are a fault. Some of Gymnasium's own environments fly beyond
        theirs (LunarLander, BipedalWalker)."""
        entry = self.gym_spec.entry_point if self.gym_id else None
        return not (isinstance(entry, str) and entry.startswith("gymnasium.envs."))

    @property
    def step_ms(self) -> float | None:
        """What a step costs, as declared: `metadata["step_ms"]` of the class, else what is known of its package. None:
        nothing is."""
        made = self.gym_spec.entry_point if self.gym_id else self.creator
        module = made if isinstance(made, str) else getattr(made, "module", None) or getattr(made, "__module__", None)
        if isinstance(made, str):
            try:
                made = gym.envs.registration.load_env_creator(made)
            except Exception:  # making it says what is wrong
                made = None
        metadata = getattr(made, "metadata", None)  # of a subclass of gym.Wrapper: a property
        declared = metadata.get("step_ms") if isinstance(metadata, Mapping) else None
        family = family_of_module(module or "")
        if declared is None and family is None:
            return 0.0 if (module or "").startswith("bray.envs.") else None
        return float(declared) if declared is not None else family.step_ms if family else None

    def make(self, arguments: EnvContext, render_mode: str | None) -> Any:
        """A new environment (or the object itself)."""
        if self.gym_id is not None:
            return self._make_gym(arguments, render_mode)
        if self.single:
            return self.creator
        return call_creator(self.creator, arguments, render_mode, self.name)

    def _make_gym(self, arguments: EnvContext, render_mode: str | None) -> Any:
        assert self.gym_id is not None
        extra = {} if render_mode is None else {"render_mode": render_mode}
        try:
            return gym.make(self.gym_id, disable_env_checker=True, **{**arguments, **extra})
        except (gym.error.DependencyNotInstalled, ImportError) as e:
            raise missing_package(self.name, str(gym.spec(self.gym_id).entry_point), e) from e
        except TypeError as e:
            if "unexpected keyword" in str(e):
                raise ConfigError(f"{self.name} does not take this env_config {dict(arguments)}: {e}") from e
            raise


def missing_package(name: str, entry_point: str, cause: Exception | None = None) -> ConfigError:
    """The error for an environment whose package is not installed."""
    for module, (package, extra) in _EXTRAS.items():
        if entry_point.startswith(module):
            return ConfigError(f"{name} needs the package {package}: {how_to_install(extra)}")
    what = what_is_missing(cause) if isinstance(cause, ImportError) else None
    return ConfigError(f"{name} needs {what or f'a package that is not installed: {cause}'}")


def call_creator(creator: Callable[..., Any], arguments: EnvContext, render_mode: str | None, name: str) -> Any:
    """Call a class or function the way its signature asks: one dict, keywords, or nothing."""
    try:
        parameters = list(inspect.signature(creator).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = {p.name for p in parameters}
    extra: dict[str, Any] = {"worker_index": arguments.worker_index, "vector_index": arguments.vector_index}
    if render_mode is not None:
        extra["render_mode"] = render_mode
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = positional[0] if positional else None
    if first is not None and first.name not in arguments and _takes_dict(first):
        given = {k: v for k, v in extra.items() if k in names}
        return creator(arguments, **given)
    keywords = {**{k: v for k, v in extra.items() if k in names}, **arguments}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in arguments:
            if key not in names:
                raise UnknownName(f"argument of {name}", key, names, where="env_config")
    for p in parameters:
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in keywords:
            tensors = " Where it plays num_envs games at once as tensors, set env.vector=device."
            raise ConfigError(
                f"{name}: {p.name} is missing: env.env_config.{p.name}=... (a first parameter that is to get all of "
                f"env_config as one dict is called env_config or config){tensors if p.name == 'num_envs' else ''}"
            )
    return creator(**keywords)


_DICT_NAMES = ("env_config", "config", "cfg", "conf", "env_cfg", "context", "env_context", "ctx", "kwargs", "params")


def _takes_dict(p: inspect.Parameter) -> bool:
    """Whether a first parameter wants all of env_config: by its name (`lambda c: ...`, `lambda _: ...` too) or type."""
    said = getattr(p.annotation, "__name__", str(p.annotation))
    return p.name in _DICT_NAMES or (
        p.default is p.empty
        and (
            p.name.startswith("_")
            or len(p.name) == 1
            or said.partition("[")[0] in ("dict", "Dict", "Mapping", "EnvContext")
        )
    )


@dataclass(frozen=True)
class _Sent:
    """In the place of `EnvConfig.id`: what a name stands for where it was given."""

    source: EnvOrigin
    gym_spec: Any


def sent(config: EnvConfig) -> EnvConfig:
    """For another process, which has not run the user's script: what is registered there, and what `__main__` defines,
    goes with it."""
    source = resolve(config)
    return config if source.single else replace(config, id=_Sent(source, source.gym_spec))


def register_gym(spec: Any) -> None:
    """Where the user may have registered it in the parent only."""
    if spec is not None:
        with suppress(Exception):  # making it says what is wrong
            gym.envs.registration.load_env_creator(spec.entry_point)  # registers it, in most packages
        gym.registry.setdefault(spec.id, spec)


def resolve(config: EnvConfig) -> EnvOrigin:
    """The source behind `config.id`; a name nothing answers to is refused with the nearest known one."""
    for module in config.import_modules:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise ConfigError(f"env.import_modules: cannot import {module!r}: {e}{where_looked(module, e)}") from e
    name = config.id
    if isinstance(name, _Sent):
        register_gym(name.gym_spec)
        return name.source
    if not isinstance(name, str):
        if name is None or isinstance(name, (int, float, dict, list)):
            raise ConfigError(f"env.id is a name, 'module:Class', a class, a factory or an environment, got {name!r}")
        if not callable(name) and config.num_envs > 1:
            raise ConfigError(
                f"env.id is one {type(name).__name__} object, but num_envs={config.num_envs} need one each: "
                "give its class or a function that makes it"
            )
        return EnvOrigin(env_name(name), creator=name)
    if not name:
        raise ConfigError("no environment given: set env.id, e.g. CartPole-v1 (`bray envs` lists all)")
    if name in _CREATORS:
        return EnvOrigin(name, creator=_CREATORS[name])
    if name in gym.registry:
        return EnvOrigin(name, gym_id=name)
    if (creator := outside_game(name)) is not None:
        return EnvOrigin(name, creator=creator)
    if ":" in name:
        return _from_module(name)
    if name.startswith("ALE/") and importlib.util.find_spec("ale_py") is None:
        raise missing_package(name, "ale_py")
    known = list_envs()  # registers the Atari games where their package is installed
    if name in gym.registry:
        return EnvOrigin(name, gym_id=name)
    if name in _old_ids():
        return EnvOrigin(name, creator=OldGym(name, _package(_old_ids(), name)))
    if (family := family_of_id(name)) is not None:
        return _from_module(f"{family.module}:{name}")
    raise UnknownName("environment", name, known)


def _from_module(name: str) -> EnvOrigin:
    """The source behind `module:Class` or `module:id-of-a-registry`."""
    module_name, _, attribute = name.partition(":")
    module = _import(name, module_name)
    if attribute in _CREATORS:
        return EnvOrigin(attribute, creator=_CREATORS[attribute])
    if attribute not in gym.registry and callable(register := getattr(module, "register_envs", None)):
        register()  # packages that wait to be asked
    if attribute in gym.registry:
        return EnvOrigin(attribute, gym_id=attribute)
    if attribute in _old_ids():
        return EnvOrigin(attribute, creator=OldGym(attribute, module_name))
    creator: Any = module
    for part in attribute.split("."):
        creator = getattr(creator, part, None)
    if not callable(creator):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        package = module_name.partition(".")[0]
        public += [k for registry in (gym.registry, _old_ids()) for k in registry if _package(registry, k) == package]
        raise UnknownName("environment", attribute, public, f"in module {module_name}", script_hint(name))
    return EnvOrigin(name, creator=creator)


def _import(name: str, module: str) -> Any:
    """The module of environment `name`."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as e:
        family, what = family_of_module(module), what_is_missing(e)
        if what is None:
            raise
        looked = where_looked(module, e)
        if looked and family is not None:
            raise ConfigError(f"{name} needs a package that is not installed: pip install {family.install}") from e
        why = f"{e}{looked}" if looked else f"it needs {what}"
        raise ConfigError(f"environment {name!r}: cannot import the module {module!r}: {why}") from e


def env_name(env: Any) -> str:
    """What to call `EnvConfig.id` in files and messages: the name itself, or `module:Class` of a class, factory or
    object."""
    if isinstance(env, str):
        return env
    if isinstance(env, _Sent):
        return env.source.name
    named = env if hasattr(env, "__qualname__") else type(env)
    return f"{named.__module__}:{named.__qualname__}"


def _import_if_there(package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        module = importlib.import_module(package)
        if package == "ale_py" and "ALE/Pong-v5" not in gym.registry:
            gym.register_envs(module)
