"""`mode: deploy` from the files of a run: behind the agents of a launch file stands what `bray serve RUN_DIR` serves
with.

A model that only PolicyAgents ask is deployed from `spec.json`, `policy.json` and `models/NAME/` of its run directory.
Neither its module nor the algorithm's is imported, and so neither torch nor the environment. Each process of an actor
has one `bray.service.PolicyService`, with its versions, its admin routes and its batches; the agents find it as the
`model` of their section of the config.

    runs, reasons = find_deployed(graph)        # run directories by model; why each of the others is not deployed so
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bray.config.declare import values_of
from bray.errors import BrayError, ConfigError
from bray.launch.graph import Component, Graph
from bray.launch.modules import Modules, edges_in_code
from bray.remote.actor.policy_agent import PolicyAgent
from bray.rundir import RunDir
from bray.service import PolicyService, close_shared, open_shared
from bray.serving.config import DeployConfig, ServedModelConfig
from bray.serving.model import ServedModel
from bray.serving.server import Server

# --- which models, and from where -------------------------------------------------------------------------------------


def find_deployed(graph: Graph) -> tuple[dict[str, Path], dict[str, str]]:
    """The run directories of the models that are deployed from files, by name; and why each of the others is not.
    Nothing is imported but the modules of the agents that ask them. A `checkpoint` that names a run directory which
    cannot be deployed is a ConfigError."""
    runs: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    if graph.settings.mode == "deploy":
        for c in graph.of_kind("model").values():
            reason = _why_not(graph, c)
            if reason is None:
                runs[c.name] = _run_of(graph, c)
                continue
            s = c.settings
            if _names_run(c) or (s.module is None and s.algo is None):
                place = graph.where(c.name, "checkpoint")
                raise ConfigError(f"{c.name}.checkpoint ({place}): {s.checkpoint} cannot be deployed: {reason}")
            ignored = " and ".join(key for key in ("versions", "follow") if getattr(s, key))
            reasons[c.name] = reason + (f" ({ignored} has no effect)" if ignored else "")
    return runs, reasons


def _names_run(c: Component) -> bool:
    return isinstance(c.settings.checkpoint, str) and Path(c.settings.checkpoint).is_dir()


def _run_of(graph: Graph, c: Component) -> Path:
    if _names_run(c):
        return Path(c.settings.checkpoint).absolute()
    return Path(graph.settings.project, graph.settings.trial).absolute()


def _why_not(graph: Graph, c: Component) -> str | None:
    s = c.settings
    if not _names_run(c):
        if isinstance(s.checkpoint, str):
            return f"{s.checkpoint} is no run directory"
        if s.use_onnx is None and "use_onnx" in graph.config[c.name]:
            return "use_onnx is null, which asks for PyTorch"
        if s.num_workers and not s.local_mode:
            return f"num_workers is {s.num_workers}, which asks for processes of its own"
    return _lacks(graph, c) or _asked_otherwise(graph, c)


def _lacks(graph: Graph, c: Component) -> str | None:
    """What the run directory does not have."""
    run = RunDir(_run_of(graph, c))
    for file in ("spec.json", "policy.json"):
        if not (run.path / file).exists():
            return f"{run.path} has no {file}: nothing was trained there yet, or by an older Bray"
    policy = run.read_policy()
    if policy.get("rule") is None:
        return f"the Policy of {policy.get('algorithm')} acts in a way of its own, which needs its code"
    if not _names_run(c) and run.model_name() != c.name:
        return f"{run.path} says how to play with {run.model_name()}, not with {c.name}"
    if run.pointer("latest") is None:
        return f"{run.path} has no checkpoint yet"
    engine = "model.int8.onnx" if c.settings.use_onnx == "quantize" else "graph.onnx"
    exported = _names_run(c) and engine == "graph.onnx"  # when it is missing
    if not exported and not (run.models / run.model_name() / engine).exists():
        return f"{run.path} has no models/{run.model_name()}/{engine}"
    return None


def _asked_otherwise(graph: Graph, c: Component) -> str | None:
    """Who asks the model without a PolicyAgent that we could give it to."""
    modules = Modules(graph)
    agents = {name: a for name, a in graph.of_kind("agent").items() if a.settings.model == c.name}
    if not agents:
        return "no agent names it as its model"
    for name, agent in agents.items():
        try:
            cls = modules.needed(agent)
        except BrayError as e:  # told by whoever starts that agent
            return f"the class of agent {name} cannot be had ({e!s:.80})"
        if not issubclass(cls, PolicyAgent) or cls.find_model is not PolicyAgent.find_model:
            return f"agent {name} is no PolicyAgent and asks it by itself"
    for edge in edges_in_code(graph):
        if c.name == edge.tail:
            return f"the code of {edge.head} names it"
    for name, actor in graph.of_kind("actor").items():
        ways = {a: agents[a].settings.act for a in actor.settings.agents if a in agents}
        if len(set(ways.values())) > 1:
            return f"the agents of {name} act in different ways: {', '.join(f'{k} {v}' for k, v in ways.items())}"
    return None


@dataclass(frozen=True)
class ModelFiles:
    """In place of the handle of a model that is deployed from files."""

    name: str
    path: Path

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        return RunDir(self.path).pointer("latest") or 0


# --- what an actor is given -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deployment:
    """The models that the agents of one actor play with. It travels to the actor's processes, each of which opens a
    PolicyService."""

    actor: str
    runs: Mapping[str, Path]
    configs: Mapping[str, ServedModelConfig]
    """By model."""
    shared: Path
    """Where the processes of all actors share what the admin port was told."""

    @property
    def service(self) -> PolicyService:
        """That of this process."""
        return _services[str(self.shared), self.actor]

    async def prepare(self, server: Server) -> None:
        """Open the models of a process that is about to listen: RemoteActor's `prepare`."""
        if not self.shared.is_dir():
            raise ConfigError(
                f"{self.shared} is not on {socket.gethostname()}: models are deployed from files, which every machine "
                "of the cluster has to see. Share the run directory with all of them, or give the model `use_onnx: "
                "null`"
            )
        service = await asyncio.to_thread(
            PolicyService, self.runs, ServedModelConfig(), self.shared, configs=self.configs, with_outputs=True
        )
        key = (str(self.shared), self.actor)
        _services[key] = service

        async def forget() -> None:
            del _services[key]

        await service.prepare(server)
        server.close_hooks.append(forget)


_services: dict[tuple[str, str], PolicyService] = {}
"""Of this process, by the shared directory and the actor. In one process (`cluster: local`) there may be several
actors."""


def deploy_actor(graph: Graph, actor: Component, runs: Mapping[str, Path], shared: Path) -> Deployment | None:
    """The Deployment of an actor, if one of its agents plays with a model that is deployed from files."""
    configs = {}
    for name in actor.settings.agents:
        agent = graph.components.get(name)
        if agent is not None and agent.settings.model in runs:
            configs[agent.settings.model] = _model_service(graph, graph.components[agent.settings.model], agent, actor)
    return Deployment(actor.name, {k: runs[k] for k in configs}, configs, shared) if configs else None


def _model_service(graph: Graph, c: Component, agent: Component, actor: Component) -> ServedModelConfig:
    s = c.settings
    versions = s.versions or ({str(s.checkpoint): 1.0} if isinstance(s.checkpoint, int) else {})
    given = {} if graph.config[c.name].get("max_batch_size") is None else {"max_batch_size": s.max_batch_size}
    return ServedModelConfig(
        engine="int8" if s.use_onnx == "quantize" else "onnx",
        versions=dict(versions),
        act=agent.settings.act,
        follow=s.follow,
        trust=graph.settings.trust,
        **values_of(actor.settings, DeployConfig),
        **given,
    )


def open_deployments(deployments: Mapping[str, Deployment], shared: Path) -> Callable[[], None]:
    """Look at all models once, before there are processes, and write down what they begin with. Returns what ends
    it."""
    shared.mkdir(parents=True, exist_ok=True)
    close_shared(shared)  # of a deployment that was killed
    models = {
        name: ServedModel(name, path, d.configs[name]) for d in deployments.values() for name, path in d.runs.items()
    }
    open_shared(shared, models)
    return partial(close_shared, shared)


def config_for(graph: Graph, deployment: Deployment) -> dict[str, Any]:
    """The config of an actor's agents: a deployed model stands in the section of each agent in place of its name."""
    sections = {
        name: {**graph.config[name], "model": DeployedModel(deployment, agent.settings.model)}
        for name, agent in graph.of_kind("agent").items()
        if agent.settings.model in deployment.runs
    }
    return {**graph.config, **sections}


@dataclass(frozen=True)
class DeployedModel:
    """A model for PolicyAgents: see `PolicyAgent.find_model`."""

    deployment: Deployment
    name: str

    def served(self) -> ServedModel:
        """In a process of the actor."""
        return self.deployment.service.models[self.name]
