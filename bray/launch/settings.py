"""The keys of a launch file: one small dataclass per kind of component. The docstring of a field is its text in the schema and in docs/launch.md.

`null` means the default, except where a field says what it means there. `class_` is spelt `class` in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

Count = Annotated[int, Field(gt=0)]
Some = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(min_length=1)]

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
    dump_state: bool = False
    """Save the states of episodes, for `bray render`; how many is said by `episode_save_interval` of the actor."""


@dataclass(frozen=True, kw_only=True)
class ComponentSettings:
    """What every component has."""

    FREE: ClassVar[bool] = False  # takes keys of the user's own, which its code reads as `config[name]`

    enable: Mode | bool | None = None
    """In which mode the component exists: `train`, `deploy`, `true` or `null` (both), `false` (neither)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ComponentSettings):
    """A PyTorch model as a RemoteModel: inference, versions, checkpoints."""

    module: Name | None = None
    """Python module with `build_model(name, config) -> (model, forward_args)`; may be left out when `algo` is given."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm and its env: the model is the one that the algorithm makes."""
    checkpoint_interval: Count | None = None
    """Steps between checkpoints of the model; `null` = every minute, or as `checkpoint_every_s` says. The newest five stay."""
    checkpoint_every_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds between checkpoints of the model, where `checkpoint_interval` is null. There is one at the start and one at the end too."""
    checkpoint: Annotated[int, Field(ge=0)] | Name | None = None
    """What the model starts from: a step of this trial or the path of a weight file; `null` = the newest checkpoint. In deploy mode also the
    path of another run directory, as `bray train` makes it."""
    max_batch_size: Count = 1
    """Samples that one forward takes together at most."""
    num_workers: Some = 0
    """Processes that do forwards; 0 = the process that asks does them itself."""
    cpus_per_worker: Amount = 1.0
    """CPUs of each process."""
    gpus_per_worker: Amount = 0.0
    """GPUs of each process; parts are shared."""
    memory_per_worker: Some = 1024
    """Memory of each process, in MB."""
    use_onnx: Literal["train", "infer", "quantize"] | None = None
    """`train`: an ONNX graph whose weights can be published; `infer`: constant weights, faster; `quantize`: int8; `null`: PyTorch. In deploy mode
    `null` asks for PyTorch only where the file says it; see "Deploying"."""
    local_mode: bool = False
    """The process that asks does the forwards itself, whatever `num_workers` says."""
    override_model: bool = True
    """Register the model anew at each start; `false` takes the one of the trial that is there, which starts faster."""
    tensorboard_graph: bool = False
    """Show the graph of the model in TensorBoard."""
    tensorboard_step: bool = False
    """The x axis of TensorBoard is this model's step."""
    versions: dict[str, Amount] | None = None
    """In deploy mode: checkpoints and their shares of the sessions, like `{latest: 0.9, best: 0.1}`; a number is a step. `null` = the newest."""
    follow: bool = False
    """In deploy mode: go on to new checkpoints of a training that runs."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings(ComponentSettings):
    """Data that fills buffers: files, data sets, rollouts. Keys of your own are allowed; the function reads them as `config[name]`."""

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
class BufferSettings(ComponentSettings):
    """Where samples wait for trainers."""

    sources: tuple[Name, ...] = ()
    """Sources that fill it. Agents push to it by its name."""
    size: Count = 512
    """Batches that it holds (samples, where `batch_size` is null); a full one drops the oldest."""
    batch_size: Count | None = None
    """Samples in a batch; `null` = samples come out as they were pushed."""
    num_workers: Count = 2
    """Processes that hold it."""
    density: Annotated[int, Field(ge=1, le=100)] = 100
    """Per cent of its processes that a producer connects to, at least one; less saves connections and memory."""
    store: Literal["queue", "uniform", "prioritized"] = "queue"
    """`queue`: each sample is taken once, in order; `uniform` and `prioritized`: replay, drawn again and again."""
    alpha: Amount = 0.6
    """Of `prioritized`: a priority counts as `(|p| + eps) ** alpha`."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Of `prioritized`: exponent of the importance weights."""
    eps: Amount = 1e-5
    """Of `prioritized`: what is added to every priority."""
    max_reuse: Count | None = None
    """Of replay: a sample that was drawn so often is drawn no more; `null` = no limit."""
    pushed_per_sampled: tuple[Amount, Positive] | None = None
    """Of replay: the least and the most rows that come in per row drawn; drawing or pushing waits. `null` = no limit."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings(ComponentSettings):
    """A decision maker inside an actor. Keys of your own are allowed; the agent reads them as `config[name]`."""

    FREE: ClassVar[bool] = True

    module: Name
    """Python module of the class."""
    class_: Name
    """The class: `Class(name, config, state)` with `on_tick(state)` and, if it likes, `on_episode(episode, done)`."""
    model: Name | None = None
    """The model that a `PolicyAgent` asks. In your own agent: for the diagram and the check."""
    buffer: Name | None = None
    """The buffer that a `PolicyAgent` pushes to. It may be absent in deploy mode."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm, whose `Policy` a `PolicyAgent` acts with."""
    explore: bool = True
    """`false`: a `PolicyAgent` plays as well as it can and learns nothing."""
    act: Literal["greedy", "sample"] = "greedy"
    """How a `PolicyAgent` that does not explore (in deploy mode none does) chooses: the best action, or drawn as in training."""
    wait_s: Annotated[float, Field(ge=0, le=6)] = 0.0
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
class ActorSettings(ComponentSettings):
    """The game service: games call it once per decision."""

    port: Port = 8000
    """Port that games call; 0 = any free one. The port after it has metrics and health."""
    num_workers: Count = 2
    """Processes on each node."""
    actors_per_worker: Count = 10
    """Sessions that one process holds at once."""
    cpus_per_worker: Amount = 1.0
    """CPUs of each process."""
    memory_per_worker: Some = 512
    """Memory of each process, in MB."""
    use_tcp: bool = False
    """Answer framed TCP too, on the same port."""
    use_gateway: Literal["node", "head"] | None = "node"
    """`node`: any process of a node takes a session's requests; `head`: one address for all nodes; `null`: a session keeps to its connection."""
    agents: tuple[Name, ...] = ()
    """Its agents. All of them see every tick."""
    episode_length: Count | None = 128
    """States of an episode; `null` = as many as the game has."""
    episode_save_interval: Count | None = None
    """With `dump_state`, each actor slot saves one of so many episodes; `null` = none."""
    tick_timeout_s: Positive = 30.0
    """A tick that takes longer is cancelled, and answered with an error or the `fallback`."""
    fallback: Any = None
    """In deploy mode, the answer to such a tick: an action as JSON, "last" (the session's last one) or "random"; `null` = an error."""
    record: Name | None = None
    """In deploy mode: directory for recordings of every session, for `bray replay`; `null` = none."""
    serialize: Literal["json", "proto"] | None = None
    """What ticks carry; `null` = bytes, which the agents read themselves."""
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
class TrainerSettings(ComponentSettings):
    """Trains one model from buffers."""

    module: Name | None = None
    """Python module of the class; may be left out when `algo` is given."""
    class_: Name | None = None
    """The class: a `bray.Trainer` (with `loss`) or a Learner (with `update`); may be left out when `algo` is given."""
    algo: Name | None = None
    """A `kind: config` component that names an algorithm, whose `Learner` trains."""
    model: Name
    """The model that is trained."""
    buffers: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Where its batches come from."""
    buffer_weights: tuple[Amount, ...] | None = None
    """The share of each buffer in what is trained on; `null` = equal shares."""
    eval: EvalSettings | None = None
    """Evaluation; `null` = none."""
    use_gpu: bool | None = None
    """Train on GPUs, one for each process; `null` = no."""
    num_workers: Count | None = None
    """Processes (ranks) that train together; `null` = 1."""
    cpus_per_worker: Amount | None = None
    """CPUs of each process; `null` = 1."""
    batch_size: Count = 1
    """Batches of a buffer that are put together to one."""
    batch_kind: Literal["concate", "stack"] | None = "concate"
    """How they are put together: along the batch axis, along a new axis, or (`null`) as a list."""
    prefetch_size: Some = 1
    """Batches that are made ready in the background; 0 = none."""
    max_reuse: Some = 0
    """How often a batch may be trained on again while no new one is there; it needs `prefetch_size`."""
    accumulate: Count = 1
    """Batches of one step, whose gradients are averaged."""
    learning_rate: Positive | None = None
    """Learning rate of the optimizer; `null` = 5e-4. (A Learner has its own.)"""
    clip_grad_max_norm: Positive | None = 1.0
    """Gradients of a larger norm are shortened to it; `null` = they are not. (A Learner has its own.)"""
    weights_publish_interval: Count = 1
    """Steps between publishing the weights to the model."""
    num_steps: Count | None = None
    """Steps to train, those of earlier starts of the trial included; `null` = until the run is stopped."""
    checkpoint_interval: Count | None = None
    """Steps between checkpoints of the trainer (its optimizer, its counters); `null` = every minute."""


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
