"""What runs in a rank: the user's function, or the loop of `drive.py` over components of the session."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from bray.errors import BrayError, ConfigError, Unreachable
from bray.remote import cluster, io, wire
from bray.remote.cluster import SessionInfo, session
from bray.remote.trainer.base import LossLearner
from bray.remote.trainer.drive import Drive, Hook, Settings
from bray.remote.trainer.ranks import Ranks, is_rank_lost
from bray.schedules import make_schedule

logger = logging.getLogger("bray.remote")

STOP, DONE = 1, 2  # messages: to the ranks; of the first one, with the summary
_GRACE = 5.0  # seconds that a user's function has after the end of the session


@dataclass(frozen=True)
class Plan:
    """What every rank of a trainer does."""

    name: str
    train: Callable[..., Any] | None = None
    """The user's function; else the rest says what is driven."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    trainer: Any = None
    model: Any = None
    buffers: tuple[Any, ...] = ()
    eval_buffer: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    clip_grad_max_norm: float | None = 1.0
    seed: int = 0
    settings: Settings = field(default_factory=Settings)


def execute(plan: Plan, device: torch.device, started: Callable[[Drive], None]) -> Any:
    """Do it; `started` is told of the Drive, where there is one."""
    if plan.train is not None:
        return plan.train(*plan.args, **plan.kwargs)
    drive = make_drive(plan, Ranks(), device)
    started(drive)
    return drive.run()


def make_drive(plan: Plan, ranks: Ranks, device: torch.device) -> Drive:
    """The loop over the components that the plan names."""
    from bray.remote.buffer.handle import RemoteBuffer
    from bray.remote.master import merge
    from bray.remote.model.handle import RemoteModel

    def buffer(given: Any) -> Any:
        return RemoteBuffer(given) if isinstance(given, str) else given

    remote_model = RemoteModel(plan.model) if isinstance(plan.model, str) else plan.model
    model = remote_model.get_model().to(device)
    learner, env_steps = make_learner(plan, model, ranks)
    buffers = [buffer(b) for b in plan.buffers]
    config: Any = getattr(learner, "config", None)
    settings = plan.settings
    if getattr(config, "prioritized", False):
        settings = replace(
            settings, hooks=[*settings.hooks, Hook("before_step", _follow_beta(config.priority_beta, env_steps), 10)]
        )
    return Drive(
        plan.name,
        learner,
        remote_model,
        {b.name: b for b in buffers},
        settings,
        eval_buffer=None if plan.eval_buffer is None else buffer(plan.eval_buffer),
        run_path=trainer_path(session().path, plan.name),
        ranks=ranks,
        env_steps=env_steps,
        merge=merge,
    )


def _follow_beta(schedule: Any, env_steps: Callable[[int, int], int]) -> Callable[[Drive], None]:
    """The correction of prioritized draws follows the algorithm's schedule, in the buffers that have one."""
    beta = make_schedule(schedule)

    def follow(drive: Drive) -> None:
        value = beta(env_steps(drive.rows, drive.steps))
        for buffer in drive.buffers.values():
            if buffer.settings.store == "prioritized" and buffer.beta != value:
                buffer.beta = value

    return follow


def trainer_path(run: Path, name: str) -> Path:
    """Where a trainer's checkpoints are."""
    return run / "trainers" / name.replace("/", "-")


def make_learner(plan: Plan, model: torch.nn.Module, ranks: Ranks) -> tuple[Any, Callable[[int, int], int]]:
    """The Learner of a plan, and how it counts environment steps: (rows trained on, gradient steps) -> environment steps."""
    cls = find_class(plan.trainer)
    if hasattr(cls, "loss"):
        rate, norm = plan.learning_rate, plan.clip_grad_max_norm
        return LossLearner(cls, plan.name, plan.config, model, ranks, rate, norm), lambda rows, steps: rows
    if cls is not None and not hasattr(cls, "update"):
        raise ConfigError(
            f"trainer {plan.name}: expected a bray.Trainer (with `loss`) or a Learner (with `update`), got {plan.trainer!r}"
        )
    from bray.remote.algo import named_setup

    if plan.name not in plan.config:
        raise ConfigError(
            f"trainer {plan.name}: a Learner is made from config[{plan.name!r}]['algo'], the name of a section with algorithm and env; "
            f"config has {', '.join(map(repr, plan.config)) or 'nothing'}"
        )
    setup = named_setup(plan.config, plan.name)
    if cls is not None and cls is not setup.algo.Learner:
        names = {n: getattr(setup.algo, n) for n in ("Config", "make_model", "Policy")}
        setup = replace(setup, algo=SimpleNamespace(**names, Learner=cls))
    # A recording cannot hold the conversation between ranks.
    learner = setup.make_learner(model, seed=plan.seed + 10_007 * ranks.rank, record=ranks.size == 1)
    if setup.config.on_policy:
        return learner, lambda rows, steps: rows
    return learner, lambda rows, steps: setup.env_steps(steps)


def find_class(given: Any) -> Any:
    """A class, also by `module:Class`."""
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as e:
        if isinstance(e, ModuleNotFoundError) and e.name and not module.startswith(e.name):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"expected a trainer as module:Class, looked for {name!r} in {module!r} and found none ({e})"
        ) from None


# --- a rank of Ray Train ----------------------------------------------------------------------------------------------


class Failed(Exception):
    """An error that trying again does not mend: of the user's code, or of ours. It is sealed, because it passes through a process that
    does not know the user's modules."""

    def __init__(self, sealed: bytes):
        super().__init__(sealed)
        self.sealed = sealed

    def failure(self) -> cluster.Failure:
        return pickle.loads(self.sealed)  # from a rank of this session, through Ray


def rank_main(info: SessionInfo, name: str, address: wire.Address, made: list[Any], use_gpu: bool) -> bytes:
    """The function that Ray Train runs. Errors of the user's code come back as Failed; others as they are, and then Ray Train begins again."""
    ranks = Ranks()
    cluster._enter(info, f"trainer/{name}/{ranks.rank}")
    where = f"trainer {name}, rank {ranks.rank} of {ranks.size} (pid {os.getpid()} on {socket.gethostname()})"
    logger.info("%s begins", where)
    try:
        plan: Plan = session().cluster.get(made[0])  # only now: the user's modules are found on the session's path
        device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
        with _Line(address, plan) as line:
            result = execute(plan, device, line.started)
            if plan.train is None and ranks.first:
                line.done(result)
        _flush_numbers()
        return seal(result, where)
    except BaseException as e:
        if is_worth_another_try(e):
            raise
        logger.error("%s failed", where, exc_info=e)
        raise Failed(pickle.dumps(cluster._fail(e, where))) from None


def is_worth_another_try(error: BaseException) -> bool:
    """Whether a process is to blame that died, this rank's peer or a component's, and not what this rank did."""
    return isinstance(error, Unreachable) or is_rank_lost(error)


def seal(result: Any, where: str) -> bytes:
    """What a function returned, for the process that called `train`."""
    try:
        return pickle.dumps(result)
    except Exception as e:
        logger.warning("%s: what the function returned cannot be sent and is lost (%s)", where, e)
        return pickle.dumps(None)


def _flush_numbers() -> None:
    from bray.remote.master import flush

    try:
        flush()
    except Exception as e:  # the session may be at its end
        logger.warning("the last numbers of a rank are lost: %s", e)


class _Line:
    """The connection to the process that called `train`. When that ends the session, or is gone, the rank ends too."""

    def __init__(self, address: wire.Address, plan: Plan):
        self._driven = plan.train is None
        self._drive: Drive | None = None
        self._over = self._left = False
        try:
            self._link: wire.Link = io.run(session().connect(address, self._heard, self._lost))
        except Unreachable:  # not worth another try
            raise BrayError(f"trainer {plan.name}: whoever started it is gone, the session has ended") from None

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: Any) -> None:
        self._left = True

    def started(self, drive: Drive) -> None:
        self._drive = drive
        if self._over:
            drive.stop()

    def done(self, summary: Mapping[str, Any]) -> None:
        body = msgspec.json.encode(summary)

        async def send() -> None:
            await self._link.request(DONE, body)

        try:
            io.run(send(), timeout=10.0)
        except (Unreachable, TimeoutError):
            logger.warning("nobody is there to hear that the training has ended")

    def _heard(self, link: wire.Link, kind: int, number: int, body: memoryview) -> None:
        if kind == STOP:
            self._end()

    def _lost(self, link: wire.Link) -> None:
        if not self._left:
            self._end()

    def _end(self) -> None:
        self._over = True
        if self._drive is not None:
            self._drive.stop()
        if not self._driven:  # a user's function knows nothing of us
            timer = threading.Timer(_GRACE, lambda: None if self._left else os._exit(0))
            timer.daemon = True
            timer.start()
