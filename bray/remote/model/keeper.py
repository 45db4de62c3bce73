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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.act.feed import FileFeed, Publication, Weights
from bray.cluster import io
from bray.cluster.feed import StoreFeed
from bray.cluster.session import session
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.inference.proof import WEIGHTS, write_export
from bray.limited_log import OncePer
from bray.remote.model.definition import Definition, with_kwargs
from bray.rundir import RunDir, match_weights, read_json, read_weights, write_atomic
from bray.rundir.weights import pack_weights

logger = logging.getLogger("bray.remote")

POLL_S = 20.0
CALIBRATION_ROWS = 256
"""Rows that int8 is calibrated on."""
_OLD_VERSIONS = 4  # held in memory for those who ask for them
_GRAPH, _CALIBRATION, _STATE = "graph.onnx", "calibration.tree", "state.json"


@dataclass(frozen=True)
class News(Publication):
    """What followers of a model hear. The weights are a reference to a dict of arrays."""

    definition: str = ""
    """Another one is another model of the same name."""
    tag: str = ""
    """Of the weights: they are announced again when there is a graph of them."""
    graph: Any = None
    """A reference to the ProvenGraph of the Model, weights as inputs; None: torch."""
    int8: Any = None
    """A reference to the ProvenGraph of this version in int8."""
    wants_rows: bool = False
    """Inputs to calibrate int8 on are missing."""

    @property
    def step(self) -> int:
        return self.clock.version


@dataclass(frozen=True)
class ModelInfo:
    """All that a process needs to answer for a model."""

    definition: Definition
    module: Any
    """A reference to the Model."""
    news: News


class Keeper:
    """See the module. `module` and `weights` are references; `step` is that of the weights; the run directory may hold
    newer ones."""

    def __init__(self, definition: Definition, module: Any, weights: Any, step: int = 0):
        self.definition = definition
        self.name = definition.name
        self._module = module
        self._run = RunDir(session().path)
        self._folder = self._run.models / self.name
        self._lock = threading.RLock()
        self._save_lock = threading.Lock()
        self._once = OncePer()
        self._tasks: list[Any] = []
        self._graph: Any = None
        self._int8_error = ""
        self._quantizing = False
        self._saved = -1  # the newest version that the run directory has
        self._state = self._read_state()
        self._files = FileFeed(self._run, self.name, skips=self._state["given_up"])
        cluster = session().cluster
        self._feed = StoreFeed(cluster.put)
        self._old = lru_cache(_OLD_VERSIONS)(lambda step: cluster.put(self._files.read(step).weights))
        self._rows = self._read_rows()
        given = cluster.get(weights)
        self._wanted = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in given.items()}
        step, arrays = self._load(step, given)
        self._due = step  # the last version that was saved or is being saved
        self._set(arrays, Clock(0, step), f"{definition.id[:8]}-{step}")

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
        saved = self._files.mark
        restarted = self._state["definition"] == self.definition.id and saved is not None
        checkpoint = self.definition.checkpoint
        if checkpoint is not None and not restarted:
            step, weights = self._read_checkpoint(checkpoint)
            weights = self._fitting(weights, f"checkpoint {checkpoint!r}")
            versions = self._run.versions(self.name)
            if step not in versions:
                self._files.publish(lambda: weights, Clock(version=step))
            self._state["given_up"][:] = [s for s in versions if s > step]
            self._saved = step
        elif saved is not None and saved >= step:
            step = self._saved = saved
            weights = self._fitting(self._files.read(step).weights, f"version {step} of this trial")
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
        return ModelInfo(self.definition, self._module, self._feed.read())

    def step(self) -> int:
        return self._step

    async def newer(self, known: Any, wait: float = POLL_S) -> News | None:
        """What is newest, as soon as that is not the `known` mark; None after `wait` seconds."""
        return await self._feed.wait(known, wait)

    def _set(self, weights: Weights, clock: Clock, tag: str) -> None:
        """Take new weights. The lock is held, or the keeper is just starting."""
        cluster = session().cluster
        ref = cluster.put(dict(weights))  # a copy: a reference does not outlive the process that made it
        self._weights = cluster.get(ref)
        for x in self._weights.values():
            x.flags.writeable = False
        self._newest = News(ref, clock, definition=self.definition.id, tag=tag)
        if not self._quantize_soon():
            self._announce(self._newest)

    @property
    def _step(self) -> int:
        return self._newest.step

    def _announce(self, version: News, int8: Any = None) -> None:
        wants_rows = self.definition.use_onnx == "quantize" and self._rows is None
        self._feed.announce(replace(version, graph=self._graph, int8=int8, wants_rows=wants_rows))

    def publish(
        self, weights: Any, step: int | None, tag: str, count: int = 1, least: int = 0, env_steps: int = 0
    ) -> int:
        """New weights (a reference) of `step`, by default the newest step + `count`. `least` is the newest step that
        the publisher knows of.
        A publication that is retried has the same tag."""
        with self._lock:
            if tag == self._newest.tag:
                return self._step
            if step is None:
                step = max(self._step, least) + count
            elif step < self._step:
                raise ConfigError(
                    f"model {self.name!r} is at step {self._step} already, got weights of step {step}. A trainer that "
                    "goes on from an older checkpoint publishes without a step, or starts counting at model.step"
                )
            self._take(weights, Clock(env_steps, int(step)), tag)
            return self._step

    def offer(self, weights: Any, clock: Clock, tag: str) -> int:
        """Weights that this keeper may have lost in a crash; taken if they are newer than ours."""
        with self._lock:
            if clock.version > self._step:
                logger.warning(
                    "model %s takes step %d from a process that has it; ours was %d",
                    self.name, clock.version, self._step,
                )  # fmt: skip
                self._take(weights, clock, tag)
            return self._step

    def _take(self, weights: Any, clock: Clock, tag: str) -> None:
        arrays = session().cluster.get(weights)
        report = match_weights(self._wanted, arrays, strict=False)
        if not report.exact:
            raise CheckpointError(f"these weights do not fit model {self.name!r}, which keeps those it has: {report}")
        env_steps = max(self._newest.clock.env_steps, clock.env_steps)  # not everybody who publishes counts them
        self._set(arrays, clock._replace(env_steps=env_steps), tag)
        interval = self.definition.checkpoint_interval
        if interval is not None and clock.version // interval > self._due // interval:
            self._due = clock.version
            threading.Thread(target=self._save, name="bray-save", daemon=True).start()

    # --- versions -----------------------------------------------------------------------------------------------------

    def weights(self, step: int | None = None) -> tuple[Any, int]:
        """(a reference to the weights, their step) of the newest version, or of an older one that the run directory
        has."""
        with self._lock:
            if step is None or step < 0 or step == self._step:
                return self._newest.weights, self._step
            versions = self._run.versions(self.name)
            if step not in versions:
                known = _some({*versions, self._step})
                raise CheckpointError(f"model {self.name!r} has no version {step}; there are: {known}")
            return self._old(step), step

    def freeze(self, step: int) -> tuple[Any, int]:
        """`weights` of the newest version at or below `step` (-1: of all), which the run directory keeps for good."""
        with self._save_lock, self._lock:  # meanwhile nothing is removed
            known = {*self._run.versions(self.name), self._step}
            at_or_below = [s for s in known if s == step or (s < step and s not in self._state["given_up"])]
            if step >= 0 and not at_or_below:
                raise CheckpointError(
                    f"model {self.name!r} has no version at or below {step}; there are: {_some(known)}. "
                    "keep_checkpoints says how many stay"
                )
            ref, step = self.weights(max(at_or_below) if step >= 0 else None)
            if step not in self._run.versions(self.name):
                self._write(step, session().cluster.get(ref))
            self._run.protect(step, self.name)
            return ref, step

    def add_to_pool(self, step: int) -> int:
        _, step = self.freeze(step)
        with self._lock:
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
                self._write(step, weights)
                self._saved = step
                self._retain()
            except BrayError as e:
                if self._once.due():
                    logger.error("model %s could not be saved at step %d: %s", self.name, step, e)

    def _write(self, step: int, weights: Weights) -> None:
        self._files.publish(lambda: weights, Clock(version=step))
        with self._lock:
            if step in self._state["given_up"]:  # by `checkpoint=`; now it has been trained again
                self._state["given_up"].remove(step)
                self._old.cache_clear()
                self._write_state()

    def _retain(self) -> None:
        """Remove old versions, those that were given up first."""
        if self.definition.keep_checkpoints is None:
            return
        order = sorted(self._run.versions(self.name), key=lambda step: (step not in self._state["given_up"], step))
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
        with self._lock:
            version, weights = self._newest, self._weights
        try:
            module = copy.deepcopy(cluster.get(self._module)).cpu().eval()
            if self.definition.has_kwargs:
                module = with_kwargs(module)
            ready = None if self.definition.override_model else path
            made = make_graph(module, self.definition.args, weights, version.step, ready)
            write_export(self._folder, {_GRAPH: made.graph, WEIGHTS: pack_weights(weights)}, made.proof)
        except Exception as e:
            logger.warning("model %s is served by torch, not by ONNX: %s", self.name, e)
            return
        logger.info("model %s has its ONNX graph after %.1f s", self.name, time.monotonic() - start)
        with self._lock:
            self._graph = cluster.put(made)
            if not self._quantize_soon():
                self._announce(self._newest)

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
        from bray.remote.model.graphs import make_int8

        cluster = session().cluster
        while True:
            with self._lock:
                version, weights = self._newest, self._weights
            try:
                made = cluster.put(make_int8(cluster.get(self._graph).graph, weights, version.step, self._rows))
            except Exception as e:
                if str(e) != self._int8_error:  # once for all versions
                    logger.warning("model %s is served in float32, not in int8: %s", self.name, e)
                self._int8_error, made = str(e), None
            with self._lock:
                self._announce(version, made)
                if version is self._newest:
                    self._quantizing = False
                    return


def _kind(args: Any) -> Any:
    return tree.map(lambda x: (x.dtype.str, x.shape[1:]), args)


def _some(steps: set[int]) -> str:
    return ", ".join(map(str, sorted(steps)[-8:]))


def _step_of(name: str) -> int:
    return int(name) if name.isdigit() else 0
