"""An algorithm for the components of a graph: its four names, its settings and the game's spaces, from one section of the file.

    ppo:
      kind: config
      algorithm: PPO                          # a name, or module:Name
      env: mygame.games.grid:GridEnv          # its spaces are what the game sends; or {id: ALE/Pong-v5, atari: {size: 42}}
      settings: {lr: 5e-4}                    # of the algorithm's Config
      model: {fcnet_hiddens: [64, 64]}        # of the Model, where `make_model` makes it

Agents act and make samples with its Policy, a trainer runs its Learner, `build_model` makes its Model: the same three that `bray train`
runs in one process. No algorithm is changed for it, or knows of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from bray import tree
from bray.algos import algo_name, get_algo
from bray.config import Source, resolve
from bray.data.trajectory import Trajectory, nstep, unroll
from bray.envs.config import EnvConfig
from bray.envs.make import env_spec
from bray.errors import ConfigError, UnknownName
from bray.inference.torch_engine import is_recurrent
from bray.nn.catalog import ModelConfig, example_obs
from bray.rl.returns import standardize
from bray.spec import EnvSpec

KEYS = ("algorithm", "env", "settings", "model")
"""What a section may say, beside what every component may."""
_COMMON = ("kind", "enable")


def algo_setup(section: Mapping[str, Any], name: str = "algo") -> AlgoSetup:
    """The algorithm that a section describes; `name` is the section's, for messages. Equal sections share one setup in a process: an
    environment is made to see its spaces."""
    try:
        return _cached(json.dumps(section), name)
    except TypeError:  # a class in place of a name
        return _make(section, name)


@lru_cache(maxsize=64)
def _cached(section: str, name: str) -> AlgoSetup:
    return _make(json.loads(section), name)


def _make(section: Mapping[str, Any], name: str) -> AlgoSetup:
    for key in section:
        if key not in KEYS and key not in _COMMON:
            raise UnknownName("key", str(key), KEYS, f"in {name}, which describes an algorithm")
    missing = [key for key in ("algorithm", "env") if not section.get(key)]
    if missing:
        raise ConfigError(
            f"{name} describes an algorithm: expected {', '.join(KEYS)}; {' and '.join(missing)} missing. For example: "
            f"{name}: {{kind: config, algorithm: PPO, env: 'module:Class'}}"
        )
    algo = get_algo(section["algorithm"])
    env = section["env"]
    values = {
        "env": dict(env) if isinstance(env, Mapping) else {"id": env},
        "model": dict(section.get("model") or {}),
        "algo": dict(section.get("settings") or {}),
    }
    sources = [Source(f"section {name}", values)]
    defaults = getattr(algo, "DEFAULTS", None)
    if defaults:
        sources.insert(0, Source(f"defaults of {algo_name(algo)}", defaults))
    config = resolve({"env": EnvConfig, "model": ModelConfig, "algo": algo.Config}, sources)
    return AlgoSetup(algo, config["algo"], env_spec(config["env"]), config["model"], config["env"])


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
    """The module (or class) with Config, make_model, Policy and Learner."""
    config: Any
    spec: EnvSpec
    model_config: ModelConfig
    env_config: EnvConfig

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
        """What a Model remembers before the first tick of an episode (without batch dimension); None where it has no memory."""
        if not self.model_config.use_lstm and self.model_config.custom_model is None:
            return None
        model = self.make_model()
        return tree.map(lambda x: np.asarray(x)[0], model.initial_state(1)) if is_recurrent(model) else None

    # --- the Policy ---------------------------------------------------------------------------------------------------

    def make_policy(self) -> Any:
        """The Policy beside a game. It makes samples of one game's ticks, and those of many games make a batch: what is done over a whole
        rollout (`normalize_advantage`) is done with the batch, in the Learner of `make_learner`."""
        config = self.config
        if self._standardizes:
            config = dataclasses.replace(config, normalize_advantage=False)
        return self.algo.Policy(config, self.spec, self.model_config.max_seq_len)

    @property
    def rows_per_sample(self) -> int:
        """Rows of a trajectory in one sample: single rows, or sequences where the Model remembers."""
        return 1 if self.initial_state is None else self.model_config.max_seq_len

    def env_steps(self, version: int) -> int:
        """Environment steps that stand behind a version of the model. Schedules of exploration count them, and an agent sees only its own
        game: so it goes by the gradient steps that were made, and by how many the algorithm makes per environment step."""
        if self.config.on_policy or not version:
            return version
        return self.config.learning_starts + version * self.config.train_every // self.config.updates

    def samples(self, policy: Any, trajectory: Trajectory) -> dict[str, Any]:
        """What a Buffer takes of a trajectory, a tree `[N, ...]`: the rows (or sequences) of `Policy.samples`; for an algorithm that replays,
        the transitions, n steps long. N may be 0."""
        if not self.config.on_policy:
            return _transitions(trajectory, self.config.n_step, self.config.gamma)
        rows = self.rows_per_sample
        if trajectory.length % rows:
            (trajectory,) = unroll(trajectory, -(-trajectory.length // rows) * rows, "null_padding")
        samples = policy.samples(trajectory)
        return _swap(samples) if self.initial_state is not None else samples

    # --- the Learner --------------------------------------------------------------------------------------------------

    def make_learner(self, model: Any, seed: int = 0, record: bool = True) -> Any:
        """The Learner, whose `update` takes batches as Buffers stack them: `samples` one beside the other."""
        setup, Base = self, self.algo.Learner

        class Learner(Base):  # type: ignore[misc, valid-type]
            __doc__ = Base.__doc__

            def update(self, batch: dict[str, Any], env_steps: int = 0) -> Any:
                return super().update(setup.batch(batch), env_steps)

        return Learner(self.config, self.spec, model, self.model_config, seed=seed, record=record)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Stacked samples as `Policy.samples` would have made them of one rollout."""
        if not self.config.on_policy:
            return batch
        if self.initial_state is not None:
            batch = _swap(batch)
        if self._standardizes and "advantage" in batch:
            valid = batch["weight"] > 0
            if valid.any():
                batch = {**batch, "advantage": standardize(batch["advantage"], valid)}
        return batch

    @property
    def _standardizes(self) -> bool:
        return bool(getattr(self.config, "normalize_advantage", False))


def _transitions(t: Trajectory, n_step: int, gamma: float) -> dict[str, Any]:
    """The valid rows of a trajectory as transitions `[N, ...]`, each with the observation that it bootstraps from."""
    total, discount, after = nstep(t, n_step, gamma)
    row, env = np.nonzero(t.valid)
    kept = {k: v for k, v in t.extras.items() if k not in ("action", "state")}
    return {
        "obs": tree.index(t.obs, (row, env)),
        "action": tree.index(t.action, (row, env)),
        "reward": total[row, env],
        "discount": discount[row, env],
        "next_obs": tree.index(t.obs, (after[row, env], env)),
        "weight": np.ones(len(row), np.float32),
        **tree.index(kept, (row, env)),
    }


def _swap(samples: dict[str, Any]) -> dict[str, Any]:
    """Sequences `[L, S, ...]` as `[S, L, ...]`, or back; their first states are `[S, ...]` both times."""

    def swap(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(0, 1))

    return {k: v if k == "state" else tree.map(swap, v) for k, v in samples.items()}
