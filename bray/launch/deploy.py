"""`mode: deploy` from the files of a run: behind the agents of a launch file stands what `bray serve RUN_DIR` serves
with.

A model that only PolicyAgents ask is deployed from `spec.json`, `policy.json` and `models/NAME/` of its run directory.
Neither its module nor the algorithm's is imported, and so neither torch nor the environment. Each process of an actor
has one `bray.service.Service`, with its versions, its admin routes and its batches; the agents find it as the `model`
of their section of the config.

    runs, reasons = find_deployed(graph)        # run directories by model; why each of the others is not deployed so
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from bray import tree
from bray.data.experience import Counts
from bray.errors import BrayError, ConfigError, DataError
from bray.inference.batcher import own_error
from bray.launch.graph import Component, Graph
from bray.launch.modules import Modules, edges_in_code
from bray.remote.actor.policy_agent import PolicyAgent
from bray.rundir import RunDir
from bray.service import Service, close_shared, open_shared
from bray.serving.agent import AgentActor, State
from bray.serving.config import ServedModelConfig
from bray.serving.model import ServedModel, Version
from bray.serving.policy_actor import place_of, version_at
from bray.serving.protocol import END, START, TICK, malformed
from bray.serving.record import Recording
from bray.serving.server import Server
from bray.serving.values import reader
from bray.train.agent import DecisionRows, Observed, tell

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
    """Who asks the model without a Player that we could give it."""
    modules = Modules(graph)
    agents = {name: a for name, a in graph.of_kind("agent").items() if a.settings.model == c.name}
    if not agents:
        return "no agent names it as its model"
    for name, agent in agents.items():
        try:
            cls = modules.needed(agent)
        except BrayError as e:  # told by whoever starts that agent
            return f"the class of agent {name} cannot be had ({e!s:.80})"
        if not issubclass(cls, PolicyAgent) or cls.find_player is not PolicyAgent.find_player:
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
    Service."""

    actor: str
    runs: Mapping[str, Path]
    configs: Mapping[str, ServedModelConfig]
    """By model."""
    shared: Path
    """Where the processes of all actors share what the admin port was told."""
    fallback: Any = None
    record: Path | None = None

    @property
    def service(self) -> Service:
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
            Service, self.runs, ServedModelConfig(), self.shared, configs=self.configs, with_outputs=True
        )
        key = (str(self.shared), self.actor)
        _services[key] = service

        async def forget() -> None:
            del _services[key]

        await service.prepare(server)
        server.close_hooks.append(forget)


_services: dict[tuple[str, str], Service] = {}
"""Of this process, by the shared directory and the actor. In one process (`cluster: local`) there may be several
actors."""


def deploy_actor(graph: Graph, actor: Component, runs: Mapping[str, Path], shared: Path) -> Deployment | None:
    """The Deployment of an actor, if one of its agents plays with a model that is deployed from files."""
    configs = {}
    for name in actor.settings.agents:
        agent = graph.components.get(name)
        if agent is not None and agent.settings.model in runs:
            configs[agent.settings.model] = _model_service(graph, graph.components[agent.settings.model], agent, actor)
    if not configs:
        return None
    s = actor.settings
    record = None if s.record is None else Path(s.record).absolute()
    return Deployment(actor.name, {k: runs[k] for k in configs}, configs, shared, s.fallback, record)


def _model_service(graph: Graph, c: Component, agent: Component, actor: Component) -> ServedModelConfig:
    s = c.settings
    versions = s.versions or ({str(s.checkpoint): 1.0} if isinstance(s.checkpoint, int) else {})
    given = {} if graph.config[c.name].get("max_batch_size") is None else {"max_batch_size": s.max_batch_size}
    return ServedModelConfig(
        engine="int8" if s.use_onnx == "quantize" else "onnx",
        versions=dict(versions),
        act=agent.settings.act,
        follow=s.follow,
        fallback=actor.settings.fallback,
        trust=graph.settings.trust,
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


# --- in a process of the actor ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeployedModel:
    """A model for PolicyAgents: see `PolicyAgent.find_player`."""

    deployment: Deployment
    name: str

    def make_player(self, count: Callable[[Counts], None]) -> DeployedPlayer:
        return DeployedPlayer(self.deployment.service.models[self.name], count)


class DeployedPlayer:
    """What PolicyAgents need of a `bray.train.agent.Player`, with a ServedModel that decides."""

    sink = None
    state_every = 1
    strict = False
    config: Any = None
    """Of whoever found it."""

    def __init__(self, served: ServedModel, count: Callable[[Counts], None]):
        self.served, self.count = served, count
        self.spec, self.observations = served.spec, served.observations
        self.initial_state = served.initial_state
        self.warm = False
        self.turns: WeakKeyDictionary[Any, DeployedTickBatcher] = WeakKeyDictionary()
        """By the agents that have asked."""
        self.chosen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Versions that games chose at their start, by agent."""

    def turn(self) -> DeployedTickBatcher:
        """That of one session."""
        return DeployedTickBatcher(self)


class DeployedTickBatcher:
    """The questions of one session. They go to the ModelHost one by one; its batcher puts those of many sessions
    together."""

    def __init__(self, player: DeployedPlayer):
        self.player = player
        self.place: float | None = None
        self.chosen = -1
        self.last: Any = None
        """The last action."""
        self.mask: Any = None
        """The legal choices of the last tick; None where all are."""

    @property
    def version(self) -> Version:
        """The version that the game chose while it is served, else by the session's share."""
        served = self.player.served
        return served.versions.get(self.chosen) or version_at(served, self.place or 0.0)

    def ask(self, agent: Any, state: Any) -> asyncio.Future[None]:
        """Fill the State with what is decided, by `agent.decided`."""
        served = self.player.served
        if self.place is None:
            self.place = place_of(state.session)
            self.chosen = self.player.chosen.get(agent, -1)
            self.player.turns[agent] = self
        self.mask = state.mask
        asked = [state.obs]
        if served.masked:
            asked.append(served.observations.all_legal if state.mask is None else state.mask)
        if self.player.initial_state is not None:
            asked.append(state.memory)
        version = self.version
        return _Answer(self, agent, state, version.step, version.submit(*asked))


class _Answer(asyncio.Future[None]):
    """Done when the State is filled. Whoever cancels it leaves the queue of the model."""

    def __init__(self, turn: DeployedTickBatcher, agent: Any, state: Any, step: int, deciding: asyncio.Future[Any]):
        super().__init__(loop=deciding.get_loop())
        self._turn, self._agent, self._tick, self._step, self._deciding = turn, agent, state, step, deciding
        deciding.add_done_callback(self._decided)

    def cancel(self, msg: Any = None) -> bool:
        self._deciding.cancel()
        return super().cancel(msg)

    def _decided(self, deciding: asyncio.Future[Any]) -> None:
        if self.done():
            return
        if deciding.cancelled():
            self.cancel()
            return
        error = deciding.exception()
        if error is not None:
            self.set_exception(own_error(error))
            return
        row = deciding.result()
        carry = tree.map(lambda x: x[None], row["state"]) if "state" in row else None
        rows = DecisionRows([row["action"]], [row["extras"]], [row["outputs"]], carry, self._step)
        self._turn.player.warm = True
        self._turn.last = row["action"]
        tell(self, self._agent, self._tick, rows, 0)


class _Start(msgspec.Struct):
    """What the body of a `start` may ask for."""

    model: str | None = None
    version: int | None = None


_read_start = msgspec.json.Decoder(_Start).decode


class DeployedActor(AgentActor):
    """An AgentActor whose sessions are recorded, and whose late ticks are answered all the same, where that is
    wanted."""

    def __init__(self, deployment: Deployment, **kwargs: Any):
        super().__init__(**kwargs)
        self._deployment = deployment
        self._recording: Recording | None = None
        self._data = b""  # of the tick that runs, or ran last
        if deployment.fallback is not None:
            self.fallback = self._fallback  # only where it is wanted: having the method replaces the error

    async def start(self, session: str, data: bytes) -> None:
        await super().start(session, data)
        model = next(iter(self._deployment.service.models.values()))
        version = self._choose_version(data)
        if version is None:
            version = version_at(model, place_of(session)).step
        if self._deployment.record is not None and session:  # else a stateless request
            run = str(model.run.path.resolve())
            about = {"run": run, "model": model.name, "version": version}
            self._recording = Recording(self._deployment.record, session, about)
            self._recording.add(START, data, b"")

    def _choose_version(self, data: bytes) -> int | None:
        """`{"version": STEP}`, as `bray serve` takes it: the version that answers this session. Any other body is for
        the agents alone."""
        try:
            wanted = _read_start(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if wanted.version is None:
            return None
        for _, agent in self._agents:
            player = getattr(agent, "player", None)
            if isinstance(player, DeployedPlayer) and wanted.model in (None, player.served.name):
                loaded = player.served.versions
                if wanted.version not in loaded:
                    raise malformed(f"expected one of the versions {sorted(loaded)}, got {wanted.version}")
                player.chosen[agent] = wanted.version
        return wanted.version

    def tick(self, data: bytes) -> bytes | Awaitable[bytes]:
        self._data = data
        reply = super().tick(data)
        return reply if self._recording is None else self._record_tick(data, reply)

    async def _record_tick(self, data: bytes, reply: bytes | Awaitable[bytes]) -> bytes:
        reply = reply if isinstance(reply, bytes) else await reply
        if self._recording is not None:
            self._recording.add(TICK, data, reply)
        return reply

    async def end(self, data: bytes) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.add(END, data, b"")
            recording.close()
        await super().end(data)

    def _fallback(self, data: bytes) -> bytes:
        """The reply that the PolicyAgents give with the action that was wished for; agents of another kind have no part
        in it."""
        tick = max(0, self._ticks - 1)
        state: Any = State(self._session, self.actor, tick, data, self._game, self._agent, self._codec.decode)
        output = self._codec.new_output()
        if output is not None:
            state.output = output
        for _, agent in self._agents:
            player = getattr(agent, "player", None)
            if isinstance(player, DeployedPlayer):
                turn = player.turns.get(agent) or player.turn()
                turn.place, turn.chosen = place_of(self._session), player.chosen.get(agent, -1)
                if data is not self._data:  # it never had its turn
                    turn.mask = _mask_of(agent, state)
                state.version, state.action = turn.version.step, _fallback_action(self._deployment.fallback, turn)
                agent.answer(state, state.action)
        if isinstance(state.output, dict):
            state.output["fallback"] = True
        return self._codec.encode(state.output)


def _mask_of(agent: PolicyAgent, state: State) -> Any:
    with contextlib.suppress(DataError):
        seen = Observed(*agent.observe(state))
        return agent.player.observations.read(seen.obs, seen.mask)[1]
    return None


def _fallback_action(wish: Any, turn: DeployedTickBatcher) -> Any:
    served = turn.player.served
    if wish == "last" and turn.last is not None:
        return turn.last
    action = served.random_action(turn.mask) if wish in ("last", "random") else wish
    return reader(served.spec.action, "fallback")(action)
