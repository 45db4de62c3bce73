"""The keys of a launch file: one small dataclass per kind of component. The docstring of a field is its text in the
schema and in docs/launch.md.

The keys that a handle takes in Python too come from its own options (`bray.remote.*.options`).

`null` means the default, except where a field says what it means there. `class_` is spelt `class` in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval, MinLen

from bray.config.declare import Amount, Count, Name
from bray.remote.actor.options import ActorOptions
from bray.remote.buffer.options import BufferOptions
from bray.remote.model.options import ModelOptions
from bray.remote.trainer.options import RankOptions, TrainOptions
from bray.serving.config import DeployConfig, LearnConfig

Mode = Literal["train", "deploy"]


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The top of the file: what the run is called and how it starts."""

    project: Name
    """Name of the project; a path. The run directory is `project/trial`."""
    trial: Name
    """Name of the trial. A trial that is there is continued from its newest checkpoint."""
    mode: Mode = "train"
    """`train`: everything. `deploy`: the game service alone, without trainers and the buffers that they read."""
    trust: bool = False
    """In deploy mode: import what a run directory named by `checkpoint` names, where it has no graph.onnx; see
    docs/security.md."""
    dump_state: bool = False
    """Save the states of episodes, for `bray render`; how many is said by `episode_save_interval` of the actor."""


@dataclass(frozen=True, kw_only=True)
class ComponentSettings:
    """What every component has."""

    FREE: ClassVar[bool] = False  # takes keys of the user's own, which its code reads as `config[name]`

    enable: Mode | bool | None = None
    """In which mode the component exists: `train`, `deploy`, `true` or `null` (both), `false` (neither)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ModelOptions, ComponentSettings):
    """A PyTorch model as a RemoteModel: inference, versions, checkpoints."""

    module: Name | None = None
    """Python module with `build_model(name, config) -> (model, forward_args)`; may be left out when `algo` is given."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm and its env: the model is the one that the algorithm makes."""
    versions: dict[str, Amount] | None = None
    """In deploy mode: checkpoints and their shares of the sessions, like `{latest: 0.9, best: 0.1}`; a number is a
    step. `null` = the newest."""
    follow: bool = False
    """In deploy mode: go on to new checkpoints of a training that runs."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings(ComponentSettings):
    """Data that fills buffers: files, data sets, rollouts. Keys of your own are allowed; the function reads them as
    `config[name]`."""

    FREE: ClassVar[bool] = True

    module: Name
    """Python module of the function."""
    func: Name = "build_source"
    """The function: `func(name, config) -> list of iterables`; each of them is read on its own."""
    num_workers: Count | None = None
    """Processes that read; `null` = one for each iterable, at most 4."""
    epoch: Count = 1
    """How often the data is read from its beginning."""


@dataclass(frozen=True, kw_only=True)
class BufferSettings(BufferOptions, ComponentSettings):
    """Where samples wait for trainers."""

    sources: tuple[Name, ...] = ()
    """Sources that fill it. Agents push to it by its name."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings(ComponentSettings):
    """A decision maker inside an actor. Keys of your own are allowed; the agent reads them as `config[name]`."""

    FREE: ClassVar[bool] = True

    module: Name
    """Python module of the class."""
    class_: Name
    """The class: `Class(name, config, state)` with `on_tick(state)` and, if it likes, `on_episode(episode, done)` and
    the class method `before_sessions(name, config)`, which loads what takes long."""
    model: Name | None = None
    """The model that a `PolicyAgent` asks. In your own agent: for the diagram and the check."""
    buffer: Name | None = None
    """The buffer that a `PolicyAgent` pushes to. It may be absent in deploy mode."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm, whose `Policy` a `PolicyAgent` acts with."""
    seats: tuple[Name, ...] = ()
    """In a game of several agents: whose sessions it answers, of those that are named `<game>-agent-<agent>`; of the
    others it is told nothing. None = all sessions."""
    explore: bool = True
    """`false`: a `PolicyAgent` plays as well as it can and learns nothing."""
    act: Literal["greedy", "sample"] = "greedy"
    """How a `PolicyAgent` that does not explore (in deploy mode none does) chooses: the best action, or drawn as in
    training."""
    wait_s: Annotated[float, Interval(ge=0, le=6)] = 0.0
    """Seconds that a game of a `PolicyAgent` may wait for room in the buffer. 0: never, old samples are dropped."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A protobuf message."""

    message: Name
    """Name of the message."""
    module: Name | None = None
    """Python module that protoc made."""
    file: Name | None = None
    """Instead of a module: a `.proto` file, which is compiled at the start."""

    def spec(self) -> dict[str, str]:
        """As `bray.serving.messages` takes it."""
        where = {"module": self.module} if self.file is None else {"file": self.file}
        return {**{k: v for k, v in where.items() if v is not None}, "message": self.message}


@dataclass(frozen=True, kw_only=True)
class ActorSettings(LearnConfig, DeployConfig, ActorOptions, ComponentSettings):
    """The game service: games call it once per decision."""

    agents: tuple[Name, ...] = ()
    """Its agents. All of them see every tick."""
    episode_length: Count | None = 128
    """States of an episode; `null` = as many as the game has."""
    episode_save_interval: Count | None = None
    """With `dump_state`, each actor slot saves one of so many episodes; `null` = none."""
    serialize: Literal["json", "proto"] | None = None
    """What ticks carry; `null` = bytes, which the agents read themselves."""
    max_json: Count = 1 << 20
    """Bytes of a tick, where `serialize` is json; more is refused with 413."""
    tick_input_proto: Message | None = None
    """The message of a tick, where `serialize` is proto."""
    tick_output_proto: Message | None = None
    """The message of the reply, where `serialize` is proto."""
    module: Name | None = None
    """Instead of `agents`: Python module of an Actor class of your own. Keys of your own are then allowed."""
    class_: Name | None = None
    """The Actor class in that module: `Class(name, config)`, one for each session slot."""


@dataclass(frozen=True, kw_only=True)
class RenderSettings(ComponentSettings):
    """Turns saved episodes into pictures, for `bray render`. Keys of your own are allowed."""

    FREE: ClassVar[bool] = True

    module: Name
    """Python module of the function."""
    func: Name = "render"
    """The function: `func(episode, tick)` returns a picture, or several by name."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation on data that is not trained on."""

    buffer: Name
    """The buffer with that data."""
    interval: Count = 1000
    """Steps between evaluations."""
    steps: Count = 10
    """Batches of each evaluation."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(TrainOptions, RankOptions, ComponentSettings):
    """Trains one model from buffers."""

    module: Name | None = None
    """Python module of the class; may be left out when `algo` is given."""
    class_: Name | None = None
    """The class: a `bray.Trainer` (with `loss`) or a Learner (with `update`); may be left out when `algo` is given."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm, whose `Learner` trains."""
    model: Name
    """The model that is trained."""
    buffers: Annotated[tuple[Name, ...], MinLen(1)]
    """Where its batches come from."""
    eval: EvalSettings | None = None
    """Evaluation; `null` = none."""


@dataclass(frozen=True, kw_only=True)
class ConfigSettings(ComponentSettings):
    """Settings of your own, shared by all components as `config[name]`: every key is allowed."""

    FREE: ClassVar[bool] = True


KINDS: dict[str, type[ComponentSettings]] = {
    "model": ModelSettings,
    "source": SourceSettings,
    "buffer": BufferSettings,
    "agent": AgentSettings,
    "actor": ActorSettings,
    "render": RenderSettings,
    "trainer": TrainerSettings,
    "config": ConfigSettings,
}
