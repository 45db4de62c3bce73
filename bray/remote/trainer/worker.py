"""What runs in a rank: the user's function, or the loop of `drive.py` over components of the session."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from bray.cluster import io
from bray.cluster.protocol import Failure
from bray.cluster.session import SessionInfo, session
from bray.config.secrets import hide_launch
from bray.data.rollouts import Rollouts
from bray.errors import BrayError, ConfigError, DataError, Unreachable
from bray.named import load_named
from bray.remote.algo import AlgoSetup, named_setup
from bray.remote.trainer.base import LossLearner
from bray.remote.trainer.drive import RankDriver, Settings
from bray.remote.trainer.feed import BufferBatches, BufferSource, Feed, PreparedRows
from bray.rundir import TRAINER_JSON, RunDir, read_json, write_atomic
from bray.serving.link import Address, Link
from bray.train.device import device_of
from bray.train.live import COLUMNS
from bray.train.local import describe_policy, make_side
from bray.train.ranks import Ranks, is_rank_lost
from bray.train.side import Side

logger = logging.getLogger("bray.remote")

STOP, DONE = 1, 2  # messages: to the ranks; of the first one, with the summary
_GRACE = 5.0  # seconds that a user's function has after the end of the session


@dataclass(frozen=True)
class TrainPlan:
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
    seed: int = 0
    settings: Settings = field(default_factory=Settings)


def execute(plan: TrainPlan, device: torch.device, started: Callable[[RankDriver], None]) -> Any:
    """Do it; `started` is told of the driver, where there is one."""
    if plan.train is not None:
        return plan.train(*plan.args, **plan.kwargs)
    driver = make_driver(plan, Ranks(), device)
    started(driver)
    return driver.train()


def make_driver(plan: TrainPlan, ranks: Ranks, device: torch.device) -> RankDriver:
    """The loop over the components that the plan names."""
    from bray.remote.buffer.handle import RemoteBuffer
    from bray.remote.master import merge, reported
    from bray.remote.model.handle import RemoteModel

    def found(given: Any) -> Any:
        return RemoteBuffer(given) if isinstance(given, str) else given

    remote_model = RemoteModel(plan.model) if isinstance(plan.model, str) else plan.model
    model = remote_model.get_model().to(device)
    buffers = [found(b) for b in plan.buffers]
    eval_buffer = None if plan.eval_buffer is None else found(plan.eval_buffer)
    path = trainer_path(session().path, plan.name)
    setup = described_by(plan)
    about = None if setup is None else partial(describe_run, setup, model, remote_model.name, plan.config)
    by_name = {b.name: b for b in buffers}
    place: dict[str, Any] = {"run_path": path, "merge": merge, "about": about}
    if path == session().path and ranks.first:  # the session's rows are this trainer's
        place["reported"] = reported
        reported()
    return assemble(plan, model, remote_model, by_name, eval_buffer, ranks=ranks, **place)


def assemble(
    plan: TrainPlan,
    model: torch.nn.Module,
    remote_model: Any,
    buffers: Mapping[str, Any],
    eval_buffer: Any = None,
    *,
    ranks: Ranks,
    **place: Any,
) -> RankDriver:
    """A driver over these parts: of a `bray.Trainer` over opaque samples, or of an algorithm's Learner over pieces."""
    s = plan.settings
    cls = plan.trainer
    if isinstance(cls, str):
        cls = load_named(cls, "trainer", f"trainer {plan.name}", {})
    if eval_buffer is not None and not (hasattr(cls, "loss") and hasattr(cls, "eval")):
        raise ConfigError("eval needs a bray.Trainer with a method `eval`")
    if hasattr(cls, "loss"):
        learner: Any = LossLearner(cls, plan.name, plan.config, model, ranks, s.learning_rate, s.clip_grad_max_norm)
        rows = {name: _as_rows(plan, name, buffer, model) for name, buffer in buffers.items()}
        feed = Feed(
            rows, s.buffer_weights, s.batch_size, s.batch_kind, learner.handle_batch, s.prefetch_size, s.max_reuse,
            ranks.rank,
        )  # fmt: skip
        side = Side(model, None, BufferBatches(feed, s.accumulate), learner)
        eval_feed = None
        if eval_buffer is not None and ranks.first:
            eval_feed = Feed({"eval": eval_buffer}, None, s.batch_size, s.batch_kind, learner.handle_batch, 0)
        return RankDriver(plan.name, side, [], remote_model, s, eval_feed=eval_feed, ranks=ranks, feeds=[feed], **place)
    setup, cls = _algorithm(plan, cls)
    # A CUDA graph cannot hold the conversation between ranks.
    record = setup.resolved["run"].record if ranks.size == 1 or not next(model.parameters()).is_cuda else False
    run = replace(setup.resolved["run"], seed=plan.seed + 10_007 * ranks.rank, record=record)
    side = make_side(setup.algo, run, setup.spec, setup.model_config, setup.config, model, cls)
    fit_experience(setup, side.experience, buffers.values(), s.batch_size)
    feed = Feed(buffers, s.buffer_weights, 1, "concate", None, s.prefetch_size, 0, ranks.rank)
    config = setup.resolved
    return RankDriver(plan.name, side, [BufferSource(feed)], remote_model, s, ranks=ranks, config=config, **place)


def fit_experience(setup: AlgoSetup, experience: Any, buffers: Iterable[Any], batch_size: int) -> None:
    """A rollout has as many samples as a batch of the buffer, times those that the trainer puts together. A sample is a
    row, or a sequence for a Model with memory."""
    experience.check_live()
    sizes = [getattr(getattr(b, "settings", None), "batch_size", None) for b in buffers]
    size = next((n for n in sizes if n), None)
    if not isinstance(experience, Rollouts):
        return
    assert experience.piece_length is not None
    sequences = 1 if setup.initial_state is None else experience.state_every
    rows = COLUMNS * experience.piece_length if size is None else size * batch_size * sequences
    experience.piece_length = min(experience.piece_length, rows)
    experience.columns = max(1, rows // experience.piece_length)
    experience.sized_by = "" if size is None else "batch_size of the buffer"


def _as_rows(plan: TrainPlan, name: str, buffer: Any, model: Any) -> Any:
    """A buffer that agents with an algorithm push into, as rows prepared by that algorithm; any other as it is."""
    for section in plan.config.values():
        if isinstance(section, Mapping) and section.get("buffer") == name and section.get("algo") is not None:
            agent = next(k for k, v in plan.config.items() if v is section)
            setup = named_setup(plan.config, agent)
            experience = setup.make_experience()
            fit_experience(setup, experience, [buffer], 1)
            learner = setup.make_learner(copy.deepcopy(model), record=False)
            return PreparedRows(buffer, experience, learner.prepare)
    return buffer


def trainer_path(run: Path, name: str) -> Path:
    """Where a trainer's checkpoints are: in the run directory itself, which makes it one like any other; those of a
    second trainer in a directory of its own."""
    own = run / "trainers" / name.replace("/", "-")
    if (own / "checkpoints").exists():  # as Bray 0.1 did
        return own
    claim = run / TRAINER_JSON
    if not claim.exists():
        ours = run / f".trainer-{secrets.token_hex(4)}.json"
        write_atomic(ours, json.dumps({"name": name, "presets": True}))
        with contextlib.suppress(FileExistsError):  # another trainer that starts now was first
            os.link(ours, claim)
        ours.unlink()
    return run if read_json(claim).get("name") == name else own


def described_by(plan: TrainPlan) -> AlgoSetup | None:
    """The algorithm that plays with the model that is trained: the trainer's own, or that of an agent. It knows spaces
    and acting rule."""
    model = plan.model if isinstance(plan.model, str) else plan.model.name
    sections = {k: v for k, v in plan.config.items() if isinstance(v, Mapping)}
    mine = sections.get(plan.name, {})
    players = [k for k, v in sections.items() if v.get("kind") == "agent" and v.get("model") == model]
    for name in [plan.name, *players]:
        if (mine if name == plan.name else sections[name]).get("algo") is not None:
            return named_setup(plan.config, name)
    return None


def describe_run(setup: AlgoSetup, module: Any, model: str, config: Mapping[str, Any], run: RunDir) -> None:
    """What serving, exporting and evaluating need to know of a launched run, beside its weights."""
    policy = {"algorithm": setup.resolved["run"].algorithm, "model": model}
    run.write_config(setup.resolved)
    run.write_spec(setup.spec)
    run.write_policy(policy | describe_policy(setup.make_policy(), module))
    section = config.get(model)
    if isinstance(section, Mapping) and section.get("module"):  # its network is the project's own
        try:
            run.write_launch(model, hide_launch(config))
        except (TypeError, DataError) as e:
            logger.warning("%s: `bray eval` will not find the network of %s: %s", run.path, model, e)


def _algorithm(plan: TrainPlan, cls: Any) -> tuple[AlgoSetup, Any]:
    """The algorithm of a plan, and the class of its Learner where that is another one."""
    if cls is not None and not hasattr(cls, "update"):
        raise ConfigError(
            f"trainer {plan.name}: expected a bray.Trainer (with `loss`) or a Learner (with `update`), got "
            f"{plan.trainer!r}"
        )
    if plan.name not in plan.config:
        raise ConfigError(
            f"trainer {plan.name}: a Learner is made from config[{plan.name!r}]['algo'], the name of a section with "
            f"algorithm and env; config has {', '.join(map(repr, plan.config)) or 'nothing'}"
        )
    return named_setup(plan.config, plan.name), cls


# --- a rank of Ray Train ----------------------------------------------------------------------------------------------


class Failed(Exception):
    """An error that trying again does not mend: of the user's code, or of ours. It is sealed, because it passes through
    a process that does not know the user's modules."""

    def __init__(self, sealed: bytes):
        super().__init__(sealed)
        self.sealed = sealed

    def failure(self) -> Failure:
        return pickle.loads(self.sealed)  # from a rank of this session, through Ray


def rank_main(info: SessionInfo, name: str, address: Address, made: list[Any], use_gpu: bool) -> bytes:
    """The function that Ray Train runs. Errors of the user's code come back as Failed; others as they are, and then Ray
    Train begins again."""
    from bray.cluster.ray import enter_worker  # it imports Ray

    ranks = Ranks()
    enter_worker(info, f"trainer/{name}/{ranks.rank}")
    where = f"trainer {name}, rank {ranks.rank} of {ranks.size} (pid {os.getpid()} on {socket.gethostname()})"
    logger.info("%s begins", where)
    try:
        plan: TrainPlan = session().cluster.get(made[0])  # only now: the user's modules are found on the session's path
        device = device_of(use_gpu, where)
        ranks.check_gpus(device)
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
        raise Failed(pickle.dumps(Failure.of(e, where))) from None


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

    def __init__(self, address: Address, plan: TrainPlan):
        self._driven = plan.train is None
        self._drive: RankDriver | None = None
        self._over = self._left = False
        try:
            self._link: Link = io.run(session().connect(address, self._heard, self._lost))
        except Unreachable:  # not worth another try
            raise BrayError(f"trainer {plan.name}: whoever started it is gone, the session has ended") from None

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: Any) -> None:
        self._left = True

    def started(self, drive: RankDriver) -> None:
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

    def _heard(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        if kind == STOP:
            self._end()

    def _lost(self, link: Link) -> None:
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
