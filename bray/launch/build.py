"""A Graph becomes running components: one line per component, one sentence per edge.

session = bray.init(graph.settings.project, graph.settings.trial)
run = build(graph, session)
bray.run_until_asked_to_stop(run.done)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bray.config.declare import values_of
from bray.errors import BrayError, ConfigError, MissingComponent
from bray.launch.deploy import (
    Deployment,
    ModelFiles,
    config_for,
    deploy_actor,
    find_deployed,
    open_deployments,
)
from bray.launch.graph import Component, Graph
from bray.launch.modules import Modules, check_network
from bray.remote.actor.options import ActorOptions
from bray.remote.buffer.options import BufferOptions
from bray.remote.model.options import ModelOptions
from bray.remote.trainer.options import RankOptions, TrainOptions

logger = logging.getLogger("bray.launch")

_RETURNS = ("episode_return", "episode_reward", "return")
"""Names under which agents merge what an episode made; labels, or more words after a '/', may follow. Where single
values are not kept (see `bray.merge`) the line has the mean of the last minute."""
_WINDOW = 60.0  # seconds of a time window of the master
_SAVE_TIMEOUT = 10.0
_TRAINING_DRAIN_S = 2.0


@dataclass
class Launched:
    """The components of a Graph, at work."""

    graph: Graph
    session: Any
    deployed: dict[str, Path] = field(default_factory=dict)
    """Run directories of the models that are deployed from files: see `bray.launch.deploy`."""
    deployments: dict[str, Deployment] = field(default_factory=dict)
    """By actor."""
    models: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    actors: dict[str, Any] = field(default_factory=dict)
    trainers: dict[str, Any] = field(default_factory=dict)
    """Handles, by name; of a model that is deployed from files it is a ModelFiles."""
    ends: dict[str, Any] = field(default_factory=dict)
    """What `train` of each trainer returned: it is done when the training is."""
    _seen: tuple[float, dict[str, int]] | None = None

    def done(self) -> bool:
        """Whether there are trainers, and all have done what they were asked. A run without trainers goes on until it
        is stopped."""
        return bool(self.ends) and all(end.done() for end in self.ends.values())

    def steps(self) -> dict[str, int]:
        """The step of each trained model."""
        return {name: self.models[c.settings.model].step for name, c in self.graph.of_kind("trainer").items()}

    def save_models(self) -> None:
        """Save the newest weights of each model now: a supervisor may kill the run before the games are drained."""
        for name in self.models:
            try:
                self.session.cluster.find(f"model/{name}").call("save", timeout=_SAVE_TIMEOUT).result()
            except MissingComponent:  # it has ended, and saved itself
                continue
            except BrayError as e:
                logger.warning("model %s is not saved yet: %s", name, e)

    def progress(self) -> str:
        """One line: the steps so far and per second, and the mean return of the last 100 episodes."""
        now, steps = time.monotonic(), self.steps()
        before, old = self._seen or (now, steps)
        self._seen = now, steps
        words = []
        for name, step in steps.items():
            pace = f" ({(step - old[name]) / (now - before):,.1f}/s)" if now > before else ""
            words.append(f"{name} step {step:,}{pace}")
        for tag, kinds in find_part("numbers")().items():
            name, _, labels = tag.rstrip("}").partition("{")
            of = "".join(f" ({label.partition('=')[2]})" for label in labels.split(",") if label)
            mean = kinds["time_window_avg"] if kinds["last_100_avg"] is None else kinds["last_100_avg"]
            if mean is not None and name.partition("/")[0] in _RETURNS:
                words.append(f"{name}{of} {mean:,.4g}")
            elif name == "samples":
                words.append(f"{(kinds['time_window_sum'] or 0.0) / _WINDOW:,.0f} samples/s{of}")
        return " · ".join(words)


_HOMES = {
    "leave_out": "bray.remote.buffer.handle",
    "PolicyActor": "bray.serving.policy_actor",
    "numbers": "bray.remote.master",
}
"""Of parts that are no public names."""


def find_part(name: str) -> Any:
    """What a run is made of, imported when it is needed: a run without trainers needs nothing of theirs."""
    return getattr(import_module(_HOMES.get(name, "bray")), name)


def build(graph: Graph, session: Any, started: Callable[[str], None] = lambda name: None) -> Launched:
    """Construct the components in the order in which they need each other. `started` hears the name of each one that is
    up.

    An error of the user's own code (`build_model` and the like) comes as it was raised, with a note about the
    component.
    """
    run, modules = Launched(graph, session), Modules(graph)
    find_part("set")("config", graph.config)  # agents and trainers find it with bray.get("config")
    find_part("leave_out")([name for name in graph.absent if graph.config[name]["kind"] == "buffer"])
    _deploy(run)
    for kind, make in (("model", _model), ("buffer", _buffer), ("actor", _actor), ("trainer", _trainer)):
        if kind == "trainer":  # stops are called newest first: after its end, before games in progress are waited for
            session.stop_hooks.append(run.save_models)
        for c in graph.of_kind(kind).values():
            try:
                make(run, modules, c)
            except Exception as e:
                e.add_note(f"{c.kind} {c.name} ({c.place}) could not be started")
                raise
            started(c.name)
    return run


def _deploy(run: Launched) -> None:
    """In deploy mode: find the models that need no torch, and prepare what the processes of their actors share."""
    run.deployed, reasons = find_deployed(run.graph)
    for name, reason in reasons.items():
        logger.warning("model %s is deployed by what build_model makes, not from the files of a run: %s", name, reason)
    shared = Path(run.session.path) / "deploy"
    for name, actor in run.graph.of_kind("actor").items():
        deployment = deploy_actor(run.graph, actor, run.deployed, shared)
        if deployment is not None:
            run.deployments[name] = deployment
        elif actor.settings.record is not None:
            logger.warning("%s: record needs a model that is deployed from the files of a run", name)
    if run.deployed:
        find_part("set_tensorboard_step")(None)  # that of the training: nobody counts it now
    if run.deployments:
        run.session.close_hooks.append(open_deployments(run.deployments, shared))


def _model(run: Launched, modules: Modules, c: Component) -> None:
    """`build_model(name, config)` makes the model, a RemoteModel registers it. One that is deployed from files is
    opened by its actors."""
    if c.name in run.deployed:
        run.models[c.name] = ModelFiles(c.name, run.deployed[c.name])
        return
    s = c.settings
    if s.module is None:
        from bray.remote.algo import build_model
    else:
        build_model = modules.needed(c)
    made = build_model(c.name, run.graph.config)
    model, forward_args = made if s.module is None else check_network(run.graph, modules, c, made)
    run.models[c.name] = find_part("RemoteModel")(c.name, model, forward_args, **values_of(s, ModelOptions))
    if run.graph.settings.mode == "deploy" and s.checkpoint is None and run.models[c.name].step == 0:
        logger.warning(
            "model %s has no checkpoint in %s: games are answered with the weights that build_model made. Train this "
            "trial first, or give %s.checkpoint",
            c.name, run.session.path, c.name,
        )  # fmt: skip


def _buffer(run: Launched, modules: Modules, c: Component) -> None:
    """A RemoteBuffer, and the sources that fill it. A source of two buffers is read once for each."""
    s = c.settings
    buffer = run.buffers[c.name] = find_part("RemoteBuffer")(c.name, **values_of(s, BufferOptions))
    for name in s.sources:
        source = run.graph.components.get(name)
        if source is None:  # it does not exist in this mode
            continue
        iterables = modules.needed(source)(name, run.graph.config)
        if not isinstance(iterables, Iterable):
            raise ConfigError(
                f"expected {source.settings.func} of source {name} ({source.place}) to return a list of iterables, "
                f"got {iterables!r:.80}"
            )
        buffer.add_source(*iterables, num_workers=source.settings.num_workers, epoch=source.settings.epoch, name=name)


def _actor(run: Launched, modules: Modules, c: Component) -> None:
    """A RemoteActor that serves its agents, or an Actor class of the user's own."""
    s, graph = c.settings, run.graph
    deployment = run.deployments.get(c.name)
    more: dict[str, Any] = {} if deployment is None else {"prepare": deployment.prepare}
    actor = run.actors[c.name] = find_part("RemoteActor")(
        name=c.name,
        **{**values_of(s, ActorOptions), **_training_drain(graph, c.name)},
        **more,
    )
    if s.module is not None:
        actor.serve(Actor=modules.needed(c), name=c.name, config=graph.config)
        return
    saves = graph.settings.dump_state and s.episode_save_interval is not None
    agents = {name: graph.components[name] for name in s.agents if name in graph.components}
    actor.serve(
        Actor=find_part("PolicyActor"),
        agents={name: modules.needed(agent) for name, agent in agents.items()},
        seats={name: seats for name, agent in agents.items() if (seats := agent.settings.seats)},
        fallback=s.fallback,
        record=None if s.record is None else str(Path(s.record).absolute()),
        config=graph.config if deployment is None else config_for(graph, deployment),
        episode_length=s.episode_length,
        episode_save_interval=s.episode_save_interval if saves else None,
        serialize=s.serialize,
        max_json=s.max_json,
        tick_input_proto=modules.message(c, "tick_input_proto") if s.serialize == "proto" else None,
        tick_output_proto=modules.message(c, "tick_output_proto") if s.serialize == "proto" else None,
        save_dir=str(run.session.writes_to) if saves else None,
    )


def _training_drain(graph: Graph, actor: str) -> dict[str, float]:
    """Games that are played for a training may be cut: a run that is told to end ends in seconds, unless the file says
    otherwise."""
    given = graph.config[actor].get("drain_timeout_s") is not None
    return {} if given or not graph.of_kind("trainer") else {"drain_timeout_s": _TRAINING_DRAIN_S}


def _trainer(run: Launched, modules: Modules, c: Component) -> None:
    """A RemoteTrainer that trains its model from its buffers; its failure ends the run."""
    s = c.settings
    trainer = run.trainers[c.name] = find_part("RemoteTrainer")(name=c.name, **values_of(s, RankOptions))
    evaluate = s.eval and {
        "buffer": run.buffers[s.eval.buffer],
        "interval": s.eval.interval,
        "steps": s.eval.steps,
    }
    run.ends[c.name] = trainer.train(
        trainer=modules.needed(c),  # None: the Learner of its `algo`
        model=run.models[s.model],
        buffers=[run.buffers[name] for name in s.buffers],
        eval=evaluate,
        config=run.graph.config,
        **values_of(s, TrainOptions),
    )
