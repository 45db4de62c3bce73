"""An algorithm for the components of a graph: its five names, its settings and the game's spaces, from one section of
the file.

    ppo:
      kind: config
      algorithm: PPO                       # a name, or module:Name
      env: mygame.games.grid:GridEnv       # its spaces are what the game sends; or {id: ALE/Pong-v5, atari: {...}}
      settings: {lr: 5e-4}                 # of the algorithm's Config
      model: {fcnet_hiddens: [64, 64]}     # of the Model, where `make_model` makes it

Agents act with its Policy, a trainer runs its Learner over its experience, `build_model` makes its Model: the same that
`bray train` runs in one process. No algorithm is changed for it, or knows of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from bray import tree
from bray.algos import algo_name, make_experience, make_policy
from bray.capture import Record
from bray.cluster.session import current
from bray.config import ConfigSource, Resolved
from bray.data.experience import Replay, Sequences
from bray.envs.build import agent_spec
from bray.envs.config import EnvConfig
from bray.errors import ConfigError, UnknownName
from bray.inference.torch_engine import is_recurrent
from bray.nn.catalog import ModelConfig, example_obs
from bray.remote.model.handle import RemoteModel
from bray.rundir import TRAINER_JSON, read_json
from bray.spec import EnvSpec
from bray.train.setup import set_up

KEYS = ("algorithm", "env", "settings", "model")
"""What a section may say, beside what every component may."""
_COMMON = ("kind", "enable")


def algo_setup(section: Mapping[str, Any], name: str = "algo") -> AlgoSetup:
    """The algorithm that a section describes; `name` is the section's, for messages. Equal sections share one setup in
    a process: an environment is made to see its spaces."""
    try:
        return _cached(json.dumps(section), name, _begins_with_presets())
    except TypeError:  # a class in place of a name
        return _make(section, name, _begins_with_presets())


def _begins_with_presets() -> bool:
    """Whether the trial of this session has the settings of presets. One that began before launched trainings had them
    goes on without."""
    opened = current()
    claim = None if opened is None else opened.path / TRAINER_JSON
    return claim is None or not claim.exists() or bool(read_json(claim).get("presets"))


@lru_cache(maxsize=64)
def _cached(section: str, name: str, use_preset: bool) -> AlgoSetup:
    return _make(json.loads(section), name, use_preset)


def _make(section: Mapping[str, Any], name: str, use_preset: bool) -> AlgoSetup:
    for key in section:
        if key not in KEYS and key not in _COMMON:
            raise UnknownName("key", str(key), KEYS, f"in {name}, which describes an algorithm")
    missing = [key for key in ("algorithm", "env") if not section.get(key)]
    if missing:
        raise ConfigError(
            f"{name} describes an algorithm: expected {', '.join(KEYS)}; {' and '.join(missing)} missing. For example: "
            f"{name}: {{kind: config, algorithm: PPO, env: 'module:Class'}}"
        )
    env = section["env"]
    values = {
        "env": dict(env) if isinstance(env, Mapping) else {"id": env},
        "model": dict(section.get("model") or {}),
        "algo": dict(section.get("settings") or {}),
    }
    made = set_up(
        section["algorithm"],
        None,
        [ConfigSource(f"section {name}", values)],
        use_preset,
        check=None if use_preset else lambda config: None,
        launched=True,
    )
    config = made.config
    setup = AlgoSetup(made.algo, config["algo"], agent_spec(config["env"]), config["model"], config["env"], config)
    if setup.model_config.use_lstm:
        refuse_memory(setup, name)
    return setup


def refuse_memory(setup: AlgoSetup, name: str) -> None:
    """A Model with memory learns from runs of rows."""
    experience = setup.make_experience()
    if isinstance(experience, Replay) and not isinstance(experience, Sequences):
        raise ConfigError(
            f"{name}: {algo_name(setup.algo)} replays single steps and cannot train a memory: set use_lstm: false, or "
            "use PPO"
        )


def build_model(name: str, config: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """For `kind: model` with `module: bray.remote.algo` and `algo: NAME`: the Model that the section NAME describes."""
    setup = named_setup(config, name)
    return setup.make_model(), setup.forward_args()


def named_setup(config: Mapping[str, Any], component: str) -> AlgoSetup:
    """The algorithm that a component's section names with `algo: NAME`."""
    name = config[component].get("algo")
    if isinstance(name, Mapping):
        return algo_setup(name, f"{component}.algo")
    if not isinstance(name, str):
        raise ConfigError(
            f"{component}: expected algo: NAME, a kind: config section with algorithm and env; got {name!r}"
        )
    if name not in config:
        raise UnknownName(
            "section", name, [k for k, v in config.items() if isinstance(v, Mapping)], f"{component}.algo"
        )
    return algo_setup(config[name], name)


@dataclass(frozen=True)
class AlgoSetup:
    """What `algo_setup` found."""

    algo: Any
    """The module (or class) with Config, make_model, experience, Policy and Learner."""
    config: Any
    spec: EnvSpec
    model_config: ModelConfig
    env_config: EnvConfig
    resolved: Resolved
    """All sections, as `config.yaml` holds them."""

    # --- the Model ----------------------------------------------------------------------------------------------------

    def make_model(self) -> Any:
        """The Model, with weights as they are drawn first."""
        return self.algo.make_model(self.config, self.spec, self.model_config)

    def forward_args(self) -> tuple[Any, ...]:
        """Arguments of the Model, as a batch of one: an observation, and a state where it remembers."""
        obs = tree.map(lambda x: x.numpy(), example_obs(self.spec.observation, 1))
        if self.initial_state is None:
            return (obs,)
        return obs, tree.map(lambda x: x[None], self.initial_state)

    @cached_property
    def initial_state(self) -> Any:
        """What a Model remembers before the first tick of an episode (without batch dimension); None where it has no
        memory."""
        if not self.model_config.use_lstm and self.model_config.custom_model is None:
            return None
        model = self.make_model()
        return tree.map(lambda x: np.asarray(x)[0], model.initial_state(1)) if is_recurrent(model) else None

    # --- the other names ----------------------------------------------------------------------------------------------

    def make_policy(self) -> Any:
        """The Policy beside a game."""
        return make_policy(self.algo, self.config, self.spec)

    def make_experience(self) -> Any:
        """What the Learner learns from."""
        return make_experience(self.algo, self.config, self.spec, self.model_config)

    def make_learner(self, model: Any, seed: int = 0, record: Record = True, learner: Any = None) -> Any:
        """The Learner of the algorithm, or of another class in its place."""
        make = learner or self.algo.Learner
        return make(self.config, self.spec, model, self.model_config, seed=seed, record=record)


# --- exploring with noise ---------------------------------------------------------------------------------------------


def exploring_model(setup: AlgoSetup, model: Any, config: Mapping[str, Any]) -> Any:
    """What an agent in training asks in place of this model: with noise where it has noisy layers, or may have them
    because a module of the project builds it."""
    if not isinstance(model, RemoteModel):
        return model
    section = config.get(model.name)
    own = isinstance(section, Mapping) and section.get("module")
    noisy = own or getattr(setup.make_model(), "draws", None)
    return model.exploring(setup.make_policy()) if noisy else model
