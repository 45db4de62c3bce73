"""Code of the first Bray: module names, public names and keywords that are spelled otherwise here.

What has a counterpart works, with one warning that names it; what has none is an error that says what to write instead.
docs/moving.md has the whole table. New code uses nothing of this file, and nothing below imports it: `import bray` lets
it see each module of a public name once, and old spellings are put around what is there.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from bray.after_import import after_import
from bray.errors import ConfigError, did_you_mean

logger = logging.getLogger("bray")
warned: set[str] = set()


def warn_once(old: str, new: str) -> None:
    """Say what is written instead of an old spelling: once per process."""
    if old not in warned:
        warned.add(old)
        logger.warning("%s is of the first Bray; write %s", old, new)


# --- keywords ---------------------------------------------------------------------------------------------------------

Translate = Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | None]
"""The value of an old keyword, all keywords -> new keywords; None where the value is a new one already."""


def _renamed(to: str) -> tuple[str, Translate]:
    return f"{to}=", lambda value, _: {to: value}


def _ignored(new: str) -> tuple[str, Translate]:
    return new, lambda value, _: {}


def _framework(value: Any, _: Any) -> Mapping[str, Any]:
    if value not in (None, "torch", "pytorch"):
        raise ConfigError(f"framework={value!r}: Bray trains PyTorch models only")
    return {}


def _onnx(value: Any, _: Any) -> Mapping[str, Any] | None:
    return {"use_onnx": "train" if value else None} if isinstance(value, bool) else None


def _unless_none(new: str) -> tuple[str, Translate]:
    """None stood for the default; an option that does not take a None is left out."""
    return new, lambda value, _: {} if value is None else None


def _newest(value: Any, _: Any) -> Mapping[str, Any]:
    if value not in (None, -1):
        raise ConfigError(f"get_model(step={value!r}): write model.clone({value!r}).get_model()")
    return {}


def _no_parts(value: Any, _: Any) -> Mapping[str, Any]:
    raise ConfigError(
        "make_batch(parts=): there is none; take the lengths before: [len(bray.tree.leaves(s)[0]) for s in samples]"
    )


def _window(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"kind": ("time_window_" if value else "") + given.get("kind", "avg")}


def _name_of(value: Any, _: Any) -> Mapping[str, Any]:
    return {"model_name": getattr(value, "name", value)}


_NEVER_NONE = ("max_batch_size", "cpus_per_worker", "gpus_per_worker", "memory_per_worker", "local_mode")
_OF_A_MODEL = ("num_workers", "use_onnx", "checkpoint", "checkpoint_interval", "override_model", *_NEVER_NONE)

KEYWORDS: Mapping[str, Mapping[str, tuple[str, Translate]]] = {
    "AgentActor": {
        "name": _ignored("AgentActor without a name; RemoteActor(name=) has it"),
        "Agents": _renamed("agents"),
        "TickInput": _renamed("tick_input_proto"),
        "TickOutput": _renamed("tick_output_proto"),
        "TickInputProto": _renamed("tick_input_proto"),
        "TickOutputProto": _renamed("tick_output_proto"),
    },
    "RemoteTrainer": {
        "framework": ("RemoteTrainer without it: models are PyTorch's", _framework),
        "total_cpus_ratio": _ignored("num_workers= and cpus_per_worker=: CPUs are asked for by number"),
    },
    "RemoteModel": {
        "use_onnx": ("use_onnx='train' (or 'infer', 'quantize', None)", _onnx),
        "num_workers": _unless_none("num_workers=N: their number stays as it is; 0 = the process that asks computes"),
        **{key: _unless_none(f"RemoteModel without {key}=, or a value") for key in _NEVER_NONE},
    },
    "clone": {key: _ignored(f"RemoteModel(..., {key}=) of the model: clones are as it is") for key in _OF_A_MODEL},
    "get_model": {"step": ("get_model(), which has the newest weights", _newest)},
    "TorchTensorBuffer": {"to_gpu": ("device='cuda' or 'cpu'", lambda on, _: {"device": "cuda" if on else "cpu"})},
    "make_batch": {
        "concate": ("kind='concate' or 'stack'", lambda on, _: {"kind": "concate" if on else "stack"}),
        "parts": ("no parts", _no_parts),
    },
    "set_tensorboard_step": {
        "model": ("set_tensorboard_step(NAME)", _name_of),
        "get_step": _ignored("set_tensorboard_step(NAME): a model counts the steps"),
    },
    "query": {"time_window": ("kind='time_window_avg' (or 'avg': of all values)", _window)},
}
"""Function or class: old keyword: (what to write instead, how its value is translated)."""


def translate(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of `name`, in today's spelling."""
    for key, (new, to_new) in KEYWORDS[name].items():
        if key in given and (made := to_new(given[key], given)) is not None:
            warn_once(f"{name}({key}=)", new)
            del given[key]
            given.update(made)
    return given


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keywords of a call."""


def _keywords(name: str) -> Callable[..., Call]:
    return lambda *args, **kwargs: (args, translate(name, kwargs))


def _serve(self: Any, *args: Any, **kwargs: Any) -> Call:
    """`serve(Actor=AgentActor, ...)` takes the keywords of an AgentActor."""
    from bray.serving.agent import AgentActor

    ours = getattr(kwargs.get("Actor", *args[:1]), "__init__", None) is AgentActor.__init__
    return (self, *args), translate("AgentActor", kwargs) if ours else kwargs


def _train(self: Any, train: Any = None, *args: Any, **kwargs: Any) -> Call:
    """`train(train=bray.train, ...)`."""
    return ((self,), as_trainer(kwargs)) if is_old_train(train) else ((self, train, *args), kwargs)


def _reuse(self: Any, dataset: Any) -> Call:
    """`ReuseBuffer(iterator)`."""
    if iter(dataset) is not dataset:
        return (self, dataset), {}
    warn_once(
        "ReuseBuffer(iterator)",
        "ReuseBuffer(x) with an x whose __iter__ starts anew, such as a list; what an iterator gives is kept in memory",
    )
    return (self, _Kept(dataset)), {}


class _Kept:
    """What an iterator has given, to be read again."""

    def __init__(self, items: Iterator[Any]):
        self._items, self._kept = items, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        yield from self._kept
        for item in self._items:
            self._kept.append(item)
            yield item


_CALLS: Mapping[str, Callable[..., Call]] = {
    "AgentActor.__init__": _keywords("AgentActor"),
    "RemoteActor.serve": _serve,
    "RemoteModel.__init__": _keywords("RemoteModel"),
    "RemoteModel.clone": _keywords("clone"),
    "RemoteModel.get_model": _keywords("get_model"),
    "ReuseBuffer.__init__": _reuse,
    "RemoteTrainer.__init__": _keywords("RemoteTrainer"),
    "RemoteTrainer.train": _train,
    "TorchTensorBuffer.__init__": _keywords("TorchTensorBuffer"),
    "make_batch": _keywords("make_batch"),
    "query": _keywords("query"),
    "set_tensorboard_step": _keywords("set_tensorboard_step"),
}
"""Public function or method: a call of it, in today's spelling."""


def _done() -> Any:
    """What may be awaited, or forgotten."""
    from bray.inference.host import Promise

    promise = Promise()
    promise.set_result(None)
    return promise


def _forward_inputs(self: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example of a model as tensors: (args, kwargs)."""
    import torch

    from bray import tree

    example = self._known().definition.example
    return self.get_torch_forward_args(), tree.map(torch.tensor, {} if example is None else example[1])


def _average(self: Any) -> float | None:
    from bray.remote.master import query

    return query(self.name, "avg")


METHODS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "AgentActor.stop": ("AgentActor.end(data)", lambda self, data=b"": self.end(data)),
    "Metric.avg": ('bray.query(NAME, "avg")', _average),
    "RemoteBuffer.iter_batches": ("for batch in buffer", lambda self, *_, **__: iter(self)),
    "RemoteBuffer.sync": ("nothing: a buffer finds its workers itself", lambda self: _done()),
    "RemoteModel.get_torch_forward_inputs": ("model.get_torch_forward_args()", _forward_inputs),
    "RemoteModel.sync": ("nothing: a model finds its workers itself", lambda self: _done()),
    "RemoteModel.warmup": (
        "nothing; where the first forward must be quick, await model.forward(EXAMPLE) before",
        lambda self: _done(),
    ),
}
"""Methods (`Metric.avg`: a property) that are gone: what to write instead, and what they do meanwhile."""


def adapt(module: ModuleType) -> None:
    """Let the public names of a module be called in the old spelling too."""
    for spelled, to_new in _CALLS.items():
        name, _, method = spelled.partition(".")
        if (found := vars(module).get(name)) is None:
            continue
        places = [(found, method)] if method else [(module, name), (sys.modules[found.__module__], name)]
        wrapped = _around(getattr(*places[0]), to_new)
        for place, attribute in places:
            setattr(place, attribute, wrapped)
    for spelled, (new, function) in METHODS.items():
        name, _, method = spelled.partition(".")
        if (found := vars(module).get(name)) is not None:
            made = _said(spelled, new, function)
            setattr(found, method, property(made) if function is _average else made)


def _said(spelled: str, new: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        warn_once(spelled, new)
        return function(*args, **kwargs)

    return called


def _around(function: Callable[..., Any], to_new: Callable[..., Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs or to_new is _reuse:
            args, kwargs = to_new(*args, **kwargs)
        return function(*args, **kwargs)

    return called


# --- names ------------------------------------------------------------------------------------------------------------

_NO_LONGER = {
    "export_onnx": "`bray export RUN_DIR` writes ONNX files; RemoteModel(..., use_onnx='train') answers through one",
    "get_step": 'bray.RemoteModel("NAME").step is the step of a model',
    "get_metrics_worker": "bray.init starts what adds up numbers; bray.merge and bray.query reach it",
    "TorchPrefetchBuffer": "bray.PrefetchBuffer(bray.TorchTensorBuffer(buffer, device), size=1)",
    "ListBuffer": "bray.BatchBuffer(buffer, batch_size, kind=None)",
    "StackBuffer": "bray.BatchBuffer(buffer, batch_size, kind='stack')",
    "ConcateBuffer": "bray.BatchBuffer(buffer, batch_size, kind='concate')",
    "TensorFlowTensorBuffer": "bray.TorchTensorBuffer(buffer): models are PyTorch's",
    "unflatten_nested_array": "bray.handle_nested_array applies a function to every array and keeps the structure",
}


def old_name(name: str, known: Iterable[str]) -> Any:
    """`bray.NAME` for a name that is none of today's; AttributeError with the new spelling where it has no
    counterpart."""
    if name in _MADE:
        return _MADE[name]()
    if name in _NO_LONGER:
        raise AttributeError(f"bray.{name} is of the first Bray and gone: {_NO_LONGER[name]} (docs/moving.md)")
    raise AttributeError(f"module 'bray' has no attribute {name!r}.{did_you_mean(name, list(known))}")


def _ray() -> Any:
    from bray.cluster.ray import ray

    warn_once("bray.ray", "import ray")
    return ray


def _state_dumper() -> Callable[..., None]:
    def RemoteStateDumper(name: str = "state") -> None:
        """Nothing has to be started: an AgentActor with `episode_save_interval` saves episodes itself."""
        warn_once("bray.RemoteStateDumper()", "nothing: an actor with episode_save_interval saves its episodes itself")

    return RemoteStateDumper


def _launch_path() -> Callable[[], str]:
    def get_trial_launch_path() -> str:
        """The directory of the session's TensorBoard events."""
        from bray.cluster.session import session

        warn_once("bray.get_trial_launch_path()", "str(bray.init(...).path)")
        return str(session().numbers)

    return get_trial_launch_path


def train(**_: Any) -> None:
    """The first Bray's training loop. RemoteTrainer.train takes it for its own."""
    raise ConfigError(
        "bray.train is not called by itself: RemoteTrainer(name).train(trainer=MyTrainer, model='m', buffers=['b'])"
    )


_MADE: Mapping[str, Callable[[], Any]] = {
    "ray": _ray,
    "train": lambda: train,
    "RemoteStateDumper": _state_dumper,
    "get_trial_launch_path": _launch_path,
}


def is_old_train(given: Any) -> bool:
    """Whether this is `bray.train`: the function above, or the package of that name where something has imported it."""
    return given is train or (isinstance(given, ModuleType) and given.__name__ == "bray.train")


def as_trainer(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `RemoteTrainer.train(train=bray.train, ...)` as those of `train(trainer=...)`."""
    warn_once("train=bray.train", "RemoteTrainer.train(trainer=MyTrainer, model=..., buffers=[...], eval={...})")
    new = {"Trainer": "trainer", "remote_model": "model", "remote_buffers": "buffers"}
    made = {new.get(k, k): v for k, v in given.items()}
    if isinstance(made.get("buffers"), Mapping):
        made["buffers"] = list(made["buffers"].values())
    evaluation = [made.pop(k, None) for k in ("remote_eval_buffer", "eval_interval", "eval_steps")]
    if evaluation[0] is not None:
        pairs = zip(("buffer", "interval", "steps"), evaluation, strict=True)
        made["eval"] = {k: v for k, v in pairs if v is not None}
    if "config" not in made:
        from bray.remote.master.handle import get

        made["config"] = get("config")
    return {k: v for k, v in made.items() if v is not None or k == "clip_grad_max_norm"}


# --- modules ----------------------------------------------------------------------------------------------------------

MODULES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        (
            *("bray.actor", "bray.actor.actor", "bray.actor.agent", "bray.actor.base"),
            *("bray.buffer", "bray.buffer.buffer", "bray.buffer.utils", "bray.master", "bray.master.master"),
            *("bray.metric", "bray.metric.metric", "bray.metric.validate", "bray.model", "bray.model.model"),
            *("bray.model.onnx", "bray.trainer", "bray.trainer.base", "bray.trainer.trainer"),
            *("bray.utils", "bray.utils.nested_array"),
        ),
        (),
    ),
    "bray.render": ("render",),
    "bray.fake.fake_actor": ("fake", "actor"),
    "bray.fake.fake_gamecore": ("fake", "gamecore"),
}
"""Old modules; those that were started with `python -m` with the command of today."""

HOROVOD = """horovod is not there, and not needed: `train` is called inside a process group of torch.distributed. Write
    import torch.distributed as dist                     for    import horovod.torch as hvd; hvd.init()
    dist.get_rank(), dist.get_world_size()               for    hvd.rank(), hvd.size()
    dist.all_reduce(x)                                   for    x = hvd.allreduce(x, op=hvd.Sum)
    torch.nn.parallel.DistributedDataParallel(model)     for    hvd.DistributedOptimizer(optimizer), and for
                                                                hvd.broadcast_parameters(...)
A bray.Trainer needs none of it: gradients of its loss are averaged over all ranks (docs/moving.md)"""


def _moved(name: str) -> Any:
    """Names of old modules that are no public names of `bray` today; None for others."""
    from bray.fake.actor import FakeActor
    from bray.tree import leaves, split

    return {
        "flatten_nested_array": leaves,
        "split_batch": split,
        "FakeActor": FakeActor,
        "merge_time_ms": merge_time_ms,
    }.get(name)


def merge_time_ms(name: str, beg: float, **labels: Any) -> None:
    """The milliseconds since `beg`, a `time.time()`, as a number of the session."""
    from bray.remote.master import merge

    warn_once("merge_time_ms(NAME, beg)", "bray.merge(NAME, 1000 * (time.time() - beg))")
    desc = {"time_window_avg": f"{name} latency ms", "time_window_cnt": f"{name} per minute"}
    merge(name, 1000 * (time.time() - beg), desc, **labels)


class _OldModules(MetaPathFinder, Loader):
    """Asked by `import` when nobody else has found a module. Those of the first Bray hand out the public names of this
    one, `bray`."""

    def __init__(self, bray: ModuleType):
        self._bray = bray

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "horovod":
            raise ModuleNotFoundError(HOROVOD, name="horovod")
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(m.startswith(f"{fullname}.") for m in MODULES))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        command = MODULES[name]
        warn_once(name, f"`bray {' '.join(command)}`" if command else "the names of `import bray`")
        module.__getattr__ = self._public_name  # type: ignore[method-assign]

    def _public_name(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _moved(name) or getattr(self._bray, name)

    def get_code(self, name: str) -> CodeType:
        """For `python -m NAME`."""
        return compile(f"from bray.compat import run_command\nrun_command({name!r})", name, "exec")


def run_command(module: str) -> None:
    """`python -m MODULE ...` becomes the command that has its place."""
    command = MODULES[module]
    if not command:
        raise SystemExit(f"python -m {module}: there is nothing to run; see docs/moving.md")
    warn_once(f"python -m {module}", f"`bray {' '.join(command)}`")
    os.execv(sys.executable, [sys.executable, "-m", "bray", *command, *sys.argv[1:]])


def install(bray: ModuleType, homes: Mapping[str, str]) -> None:
    """Let `import` find the old modules, and old keywords reach the public names of `bray`, whose `homes` are modules.
    `import bray` does it."""
    for home in {homes[spelled.partition(".")[0]] for spelled in (*_CALLS, *METHODS)}:
        after_import(home, adapt)
    sys.meta_path.append(_OldModules(bray))
