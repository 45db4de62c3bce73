"""A trained policy without its environment: to ask, to serve, to export."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import tree
from bray.act import GREEDY, MODES, SAMPLE, TRAINED, Policy, Tick, decide_now, make_rule
from bray.config import ConfigSource
from bray.errors import ConfigError, DataError, UnknownName
from bray.rundir.trust import module_of
from bray.serving.values import Observations
from bray.spec import EnvSpec
from bray.train.acting import ActingPolicy
from bray.train.local import acting_engine, initial_state


def check_mode(mode: str) -> str:
    """How to act: `sample` or `greedy`."""
    if mode not in MODES:
        raise UnknownName("way to act", mode, MODES, "--act")
    return mode


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

    @property
    def outputs(self) -> tuple[str, ...]:
        """What acting needs of the Model."""
        return (*self.policy.served_outputs, *(["state"] if self.recurrent else []))

    def __call__(self, obs: Any, state: Any = None, mode: str = GREEDY, reward: float | None = None) -> Any:
        """`reward`: of the previous action, for a Model that plays for a return."""
        batch = tree.map(lambda x: x[None], self._observations.read(obs)[0])
        if self.initial_state is not None and state is None:
            state = self.initial_state(1)
        tick = Tick(batch, reward=None if reward is None else np.array([reward]))
        deciding = self.policy.decide(tick, state, self.rng, mode, TRAINED)
        decision = decide_now(deciding, self.engine.forward)
        action = tree.index(decision.action, 0)
        return (action, decision.carry) if self.recurrent else action


def onnx_player(path: Path, spec: EnvSpec) -> ActingPolicy:
    """Who plays by an exported file, in a game with these spaces. The names of its outputs say how it chooses: a file
    that was copied from its run has nothing else."""
    from bray.inference.onnx_engine import OnnxEngine

    engine, layout = OnnxEngine(path), spec.layout
    outputs = engine.signature.outputs
    if engine.signature.weights != "constant":
        raise ConfigError(f"{path} waits for weights: name model.onnx, which `bray export` writes with them inside")
    rules = [name for name in ("dist", "q") if isinstance(outputs, dict) and name in outputs]
    if not rules or not layout.discrete:
        raise ConfigError(
            f"{path}: an exported file plays games of discrete actions by its output dist or q, this one has "
            f"{outputs} for {spec.action}: name the run directory that it was exported from"
        )
    remembers = len(engine.signature.inputs) > 1
    try:
        found = engine.forward(random_observations(spec, 1), *([engine.initial_state(1)] if remembers else []))
        if found[rules[0]].shape != (1, layout.num_params):
            raise DataError(f"expected {layout.num_params} numbers for the actions, got {found[rules[0]].shape[1:]}")
    except DataError as e:
        raise ConfigError(f"{path}: it was exported for other spaces than this game has: {e}") from None
    policy = Policy(layout, make_rule(rules[0]))
    return ActingPolicy(engine, policy, engine.initial_state if remembers else None, SAMPLE)


def random_observations(spec: EnvSpec, count: int) -> Any:
    """`[count, ...]`, the same in every call."""
    rng = np.random.default_rng(0)
    return tree.map(np.asarray, tree.stack([spec.observation.sample(rng) for _ in range(count)]))


def launched_model(launched: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a launched run, made by the project's own `build_model(name, config)`."""
    name, config, module = launched["model"], launched["config"], module_of(launched)
    try:
        made = importlib.import_module(module).build_model(name, config)
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"the network of model {name} is made by {module}, which cannot be imported here ({e}): run this where "
            "the project is"
        ) from None
    return made[0]


def serve_run(path: Path, given: dict[str, Any], torch_engine: Any, block: bool) -> Any:
    """Answer games with the policy of a run directory: until a signal comes, or in a thread of this process."""
    from bray.service import PolicyService, configure, serve, with_players
    from bray.serving.background import BackgroundServer

    service_config, model_config = configure([ConfigSource("python", given)])
    runs = with_players({path.resolve().name: path})
    if block:
        return serve(runs, service_config, model_config, torch_engine)
    service = PolicyService(runs, model_config, torch_engine=torch_engine)
    return BackgroundServer(service.make_actor, service_config, service.prepare)
