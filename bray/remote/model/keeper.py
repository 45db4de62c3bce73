"""The keeper of a model: its definition, its newest weights and their step, its files in the run directory. One per
model; forwards do not pass through it.

Whoever has an engine follows the keeper with a long poll (`newer`) and fetches weights by reference, once per machine.
A keeper that was killed restarts from the run directory; a follower that has newer weights offers them to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.cluster import io
from bray.cluster.session import session
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.limited_log import OncePer
from bray.remote.model.definition import Definition, with_kwargs
from bray.rundir import RunDir, match_weights, read_json, read_weights, seal, write_atomic

logger = logging.getLogger("bray.remote")

POLL_S = 20.0
GAP_S = 0.012  # between two followers that are told of a new version
MOST_GAPS_S = 0.12  # between the first and the last
CALIBRATION_ROWS = 256
"""Rows that int8 is calibrated on."""
_OLD_VERSIONS = 4  # held in memory for those who ask for them
_GRAPH, _CALIBRATION, _STATE = "graph.onnx", "calibration.tree", "state.json"

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class VersionInfo:
    """What is newest."""

    definition: str
    step: int
    tag: str
    """Of this publication: the same step may be published again."""
    weights: Any
    """A reference to a dict of arrays."""
    graph: Any = None
    """A reference to the bytes of an ONNX graph, weights as inputs; None: torch."""
    int8: Any = None
    """A reference to the bytes of this version in int8."""
    env_steps: int = 0
    """Environment steps behind these weights, where the trainer said so."""
    wants: str = ""
    """"offer": the follower has newer weights than the keeper. "rows": inputs to calibrate int8 on are missing."""

    @property
    def key(self) -> Key:
        """What a follower remembers, to ask for what is newer."""
        return self.definition, self.step, self.tag, self.graph is not None, self.int8 is not None, self.wants


Key = tuple[str, int, str, bool, bool, str]


@dataclass(frozen=True)
class ModelInfo:
    """All that a process needs to answer for a model."""

    definition: Definition
    module: Any
    """A reference to the Model."""
    news: VersionInfo


class Keeper:
    """See the module. `module` and `weights` are references; `step` is that of the weights; the run directory may hold
    newer ones."""

    def __init__(self, definition: Definition, module: Any, weights: Any, step: int = 0):
        self.definition = definition
        self.name = definition.name
        self._module = module
        self._run = RunDir(session().path)
        self._folder = self._run.models / self.name
        self._env_steps = 0
        self._lock = threading.RLock()
        self._save_lock = threading.Lock()
        self._once = OncePer()
        self._waiting: set[asyncio.Future[None]] = set()
        self._tasks: list[Any] = []
        self._old: dict[int, Any] = {}  # step -> reference, of versions somebody asked for
        self._graph: Any = None
        self._int8_error = ""
        self._quantizing = False
        self._saved = -1  # the newest version that the run directory has
        self._state = self._read_state()
        self._rows = self._read_rows()
        given = session().cluster.get(weights)
        self._wanted = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in given.items()}
        step, arrays = self._load(step, given)
        self._due = step  # the last version that was saved or is being saved
        self._set(arrays, step, f"{definition.id[:8]}-{step}")

    # --- starting and ending ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._saved < 0:  # before anybody is answered: whatever a game was played with can be loaded again
            await asyncio.to_thread(self._save)
        if self.definition.checkpoint_interval is None:
            self._tasks.append(io.spawn(self._save_now_and_then(), f"saving model {self.name}"))
        if self.definition.use_onnx is not None and self.definition.on_gpu:
            logger.info("model %s runs on GPUs, with torch: use_onnx is for CPUs", self.name)
        elif self.definition.use_onnx is not None:
            exporting = threading.Thread(target=self._export, name="bray-export", daemon=True)
            exporting.start()
            if session().cluster.kind == "local":  # the export would block others of this process who use torch
                await asyncio.to_thread(exporting.join)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._save()  # not in a thread: there are none when the interpreter ends

    def _load(self, step: int, given: Weights) -> tuple[int, Weights]:
        """What to start from: (step, weights)."""
        versions = [s for s in self._run.versions(self.name) if s not in self._state["given_up"]]
        restarted = self._state["definition"] == self.definition.id
        checkpoint = self.definition.checkpoint
        if checkpoint is not None and not (restarted and versions):
            step, weights = self._read_checkpoint(checkpoint)
            weights = self._fitting(weights, f"checkpoint {checkpoint!r}")
            if step not in self._run.versions(self.name):
                self._run.save_weights(step, weights, self.name)
            self._state["given_up"] = [s for s in self._run.versions(self.name) if s > step]
            self._saved = step
        elif versions and max(versions) >= step:
            step = self._saved = max(versions)
            weights = self._fitting(self._run.load_weights(step, self.name), f"version {step} of this trial")
            logger.info("resuming model %s at step %d", self.name, step)
        else:
            weights = given
        self._state["definition"] = self.definition.id
        self._write_state()
        return step, weights

    def _fitting(self, weights: Weights, what: str) -> Weights:
        try:
            return match_weights(self._wanted, weights).weights
        except CheckpointError as e:
            raise CheckpointError(
                f"model {self.name!r} cannot start from {what}: {e}. Choose another trial or name, or give "
                "checkpoint= what fits."
            ) from None

    def _read_checkpoint(self, which: str | int) -> tuple[int, Weights]:
        """A step of this model, or the path of a weight file, of a checkpoint or of a run directory."""
        if isinstance(which, int) or which.isdigit():
            step, known = int(which), self._run.versions(self.name)
            if step not in known:
                raise UnknownName("checkpoint", str(which), map(str, known), f"model {self.name!r} of {self._run.path}")
            return step, self._run.load_weights(step, self.name)
        path = Path(which).resolve()
        if path.is_file():
            return _step_of(path.stem), read_weights(path)
        if (path / "model.safetensors").is_file():
            return _step_of(path.name), read_weights(path / "model.safetensors")
        other = RunDir(path)
        for name in (self.name, "default"):
            if versions := other.versions(name):
                return versions[-1], other.load_weights(versions[-1], name)
        raise CheckpointError(
            f"model {self.name!r}: checkpoint {str(which)!r} is neither a step of this trial nor a weight file "
            f"(.safetensors), nor a checkpoint or a run directory with weights of {self.name!r}"
        )

    def _read_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"definition": "", "given_up": [], "pool": []}
        if (self._folder / _STATE).exists():
            read = read_json(self._folder / _STATE)
            if isinstance(read, dict):
                state |= {k: read[k] for k in state if type(read.get(k)) is type(state[k])}
        return state

    def _write_state(self) -> None:
        write_atomic(self._folder / _STATE, json.dumps(self._state))

    # --- what is newest -----------------------------------------------------------------------------------------------

    def about(self) -> ModelInfo:
        return ModelInfo(self.definition, self._module, self._news)

    def step(self) -> int:
        return self._step

    def _set(self, weights: Weights, step: int, tag: str) -> None:
        """Take new weights. The lock is held, or the keeper is just starting."""
        cluster = session().cluster
        ref = cluster.put(dict(weights))  # a copy: a reference does not outlive the process that made it
        self._weights = cluster.get(ref)
        for x in self._weights.values():
            x.flags.writeable = False
        self._step, self._tag, self._ref = step, tag, ref
        if not self._quantize_soon():
            self._tell()

    def _tell(self, version: tuple[int, str, Any] | None = None, int8: Any = None) -> None:
        """Tell the followers what is newest."""
        step, tag, ref = version or (self._step, self._tag, self._ref)
        wants = "rows" if self.definition.use_onnx == "quantize" and self._rows is None else ""
        self._news = VersionInfo(self.definition.id, step, tag, ref, self._graph, int8, self._env_steps, wants)
        io.loop().call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """One after the other: answering a Ray call takes milliseconds of both processes, and where many workers share
        few cores, telling all at once would delay their forwards."""
        gap = min(GAP_S, MOST_GAPS_S / max(1, len(self._waiting)))
        for i, waiting in enumerate(self._waiting):
            io.loop().call_later(i * gap, _settle, waiting)

    async def newer(self, known: Key, holds: int, wait: float = POLL_S) -> VersionInfo | None:
        """What is newer than what the follower knows, as soon as there is something; None after `wait` seconds.
        `holds`: the newest step of which the follower has the weights, and could offer them; -1 = none."""
        end = time.monotonic() + wait
        while True:
            news = self._news
            if known[0] == news.definition and self._step < holds:
                return VersionInfo(news.definition, self._step, self._tag, None, wants="offer")
            if known != news.key and not (known[0] == news.definition and news.step < known[1]):
                return news
            left = end - time.monotonic()
            if left <= 0:
                return None
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await asyncio.wait([future], timeout=left)
            finally:
                self._waiting.discard(future)

    def publish(
        self, weights: Any, step: int | None, tag: str, count: int = 1, least: int = 0, env_steps: int = 0
    ) -> int:
        """New weights (a reference) of `step`, by default the newest step + `count`. `least` is the newest step that
        the publisher knows of.
        A publication that is retried has the same tag."""
        with self._lock:
            if tag == self._tag:
                return self._step
            self._env_steps = max(self._env_steps, env_steps)
            if step is None:
                step = max(self._step, least) + count
            elif step < self._step:
                raise ConfigError(
                    f"model {self.name!r} is at step {self._step} already, got weights of step {step}. A trainer that "
                    "goes on from an older checkpoint publishes without a step, or starts counting at model.step"
                )
            self._take(weights, int(step), tag)
            return self._step

    def offer(self, weights: Any, step: int, tag: str) -> int:
        """Weights that this keeper may have lost in a crash; taken if they are newer than ours."""
        with self._lock:
            if step > self._step:
                logger.warning(
                    "model %s takes step %d from a process that has it; ours was %d", self.name, step, self._step
                )
                self._take(weights, step, tag)
            return self._step

    def _take(self, weights: Any, step: int, tag: str) -> None:
        arrays = session().cluster.get(weights)
        report = match_weights(self._wanted, arrays, strict=False)
        if not report.exact:
            raise CheckpointError(f"these weights do not fit model {self.name!r}, which keeps those it has: {report}")
        self._set(arrays, step, tag)
        interval = self.definition.checkpoint_interval
        if interval is not None and step // interval > self._due // interval:
            self._due = step
            threading.Thread(target=self._save, name="bray-save", daemon=True).start()

    # --- versions -----------------------------------------------------------------------------------------------------

    def weights(self, step: int | None = None) -> tuple[Any, int]:
        """(a reference to the weights, their step) of the newest version, or of an older one that the run directory
        has."""
        with self._lock:
            if step is None or step < 0 or step == self._step:
                return self._ref, self._step
            if step not in self._old:
                if step not in self._run.versions(self.name):
                    known = ", ".join(map(str, sorted({*self._run.versions(self.name), self._step})[-8:]))
                    raise CheckpointError(f"model {self.name!r} has no version {step}; there are: {known}")
                while len(self._old) >= _OLD_VERSIONS:
                    del self._old[next(iter(self._old))]
                self._old[step] = session().cluster.put(self._run.load_weights(step, self.name))
            return self._old[step], step

    def freeze(self, step: int) -> tuple[Any, int]:
        """`weights`, and keep the version in the run directory for good."""
        with self._lock:
            ref, step = self.weights(step)
            if step not in self._run.versions(self.name):
                self._run.save_weights(step, session().cluster.get(ref), self.name)
                self._forgive(step)
            self._run.protect(step, self.name)
            return ref, step

    def add_to_pool(self, step: int) -> int:
        with self._lock:
            _, step = self.freeze(step)
            if step not in self._state["pool"]:
                self._state["pool"] = sorted([*self._state["pool"], step])
                self._write_state()
            return step

    def pool(self) -> list[int]:
        return list(self._state["pool"])

    # --- files --------------------------------------------------------------------------------------------------------

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self.definition.checkpoint_every_s)
            await asyncio.to_thread(self._save)

    async def save(self) -> None:
        """Save the newest version, if it is not saved yet."""
        await asyncio.to_thread(self._save)

    def _save(self) -> None:
        """Save the newest version, and remove old ones."""
        with self._save_lock:
            step, weights = self._step, self._weights
            if step == self._saved:
                return
            try:
                self._run.save_weights(step, weights, self.name)
                self._saved = step
                with self._lock:
                    self._forgive(step)
                self._retain()
            except BrayError as e:
                if self._once.due():
                    logger.error("model %s could not be saved at step %d: %s", self.name, step, e)

    def _forgive(self, step: int) -> None:
        """A version that `checkpoint=` had discarded has been trained again."""
        if step in self._state["given_up"]:
            self._state["given_up"].remove(step)
            self._write_state()

    def _retain(self) -> None:
        versions = self._run.versions(self.name)
        given_up = self._state["given_up"]
        order = [s for s in versions if s in given_up] + [s for s in versions if s not in given_up]
        kept = set(self._run.steps())
        for step in order[: -self.definition.keep_checkpoints]:
            if step not in kept and not self._run.is_protected(step, self.name):
                self._run.weights_path(step, self.name).unlink(missing_ok=True)

    # --- ONNX ---------------------------------------------------------------------------------------------------------

    def _export(self) -> None:
        """In a thread: make the graph, once for all versions."""
        from bray.remote.model.graphs import make_graph

        cluster, path = session().cluster, self._folder / _GRAPH
        start = time.monotonic()
        try:
            module = copy.deepcopy(cluster.get(self._module)).cpu().eval()
            if self.definition.has_kwargs:
                module = with_kwargs(module)
            ready = None if self.definition.override_model else path
            graph = make_graph(module, self.definition.args, self._weights, ready)
            write_atomic(path, seal(graph))
        except Exception as e:
            logger.warning("model %s is served by torch, not by ONNX: %s", self.name, e)
            return
        logger.info("model %s has its ONNX graph after %.1f s", self.name, time.monotonic() - start)
        with self._lock:
            self._graph = cluster.put(graph)
            if not self._quantize_soon():
                self._tell()

    def calibrate(self, rows: Any) -> None:
        """Real inputs, trees `[N, ...]`, to calibrate int8 on."""
        with self._lock:
            if self._rows is not None:
                return
            self._rows = rows
            write_atomic(self._folder / _CALIBRATION, tree.pack(rows))
            self._quantize_soon()

    def _read_rows(self) -> Any:
        """What int8 is calibrated on: the example if it has enough rows, or saved inputs."""
        if self.definition.use_onnx != "quantize":
            return None
        if len(tree.leaves(self.definition.args)[0]) >= CALIBRATION_ROWS // 8:
            return self.definition.args
        with contextlib.suppress(OSError, DataError):
            rows = tree.unpack((self._folder / _CALIBRATION).read_bytes(), copy=True)
            if _kind(rows) == _kind(self.definition.args):
                return rows
        return None

    def _quantize_soon(self) -> bool:
        """Whether the newest version is announced once its int8 form is made. The lock is held."""
        if self.definition.use_onnx != "quantize" or self._graph is None or self._rows is None:
            return False
        if not self._quantizing:
            self._quantizing = True
            threading.Thread(target=self._quantize, name="bray-quantize", daemon=True).start()
        return True

    def _quantize(self) -> None:
        """In a thread: make the newest version int8, until there is no newer one."""
        from bray.inference.graph import with_constant_weights
        from bray.inference.quantize import quantize

        cluster = session().cluster
        while True:
            with self._lock:
                version, weights = (self._step, self._tag, self._ref), self._weights
            try:
                made = cluster.put(
                    quantize(with_constant_weights(cluster.get(self._graph), weights, version[0]), self._rows)
                )
            except Exception as e:
                if str(e) != self._int8_error:  # once for all versions
                    logger.warning("model %s is served in float32, not in int8: %s", self.name, e)
                self._int8_error, made = str(e), None
            with self._lock:
                self._tell(version, made)
                if version[1] == self._tag:
                    self._quantizing = False
                    return


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _kind(args: Any) -> Any:
    return tree.map(lambda x: (x.dtype.str, x.shape[1:]), args)


def _step_of(name: str) -> int:
    return int(name) if name.isdigit() else 0
