"""A model that answers in this process."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable
from typing import Any

import numpy as np

from bray import tree
from bray.act.feed import Weights
from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError, CheckpointError
from bray.inference.host import ModelHost
from bray.inference.proof import ProvenGraph, prove
from bray.remote.model.definition import Definition, with_kwargs
from bray.remote.model.keeper import CALIBRATION_ROWS, ModelInfo, News

logger = logging.getLogger("bray.remote")

MOST_VERSIONS = 8
"""Older versions held beside the current one; beyond that, the least recently used is evicted."""
_MAX_QUEUE = 1 << 16
_QUICK_S = 2e-3  # of a forward for which recording pays
MAX_PROGRAMS = 8  # of bray.capture, which would import torch


class EngineHost(ModelHost):
    """The versions of a RemoteModel and their engines, as its keeper announces them. Made in a thread: it may import
    torch and load a graph.

    device   "cpu" or "cuda"; on a GPU the engine is torch
    threads  of one forward in ONNX Runtime
    noise    the Policy of agents that explore by noisy layers: each forward has new noise, and the engine is torch
    """

    def __init__(self, about: ModelInfo, keeper: Member, device: str = "cpu", threads: int = 1, noise: Any = None):
        import torch

        from bray.inference.torch_engine import TorchEngine, load_weights

        if session().member:  # a process of ours: else all those of a Model that draws numbers draw the same ones
            torch.seed()
        self.definition: Definition = about.definition
        self._keeper, self._device, self._threads = keeper, device, threads
        cluster, news = session().cluster, about.news
        module = copy.deepcopy(cluster.get(about.module)).eval()
        if self.definition.has_kwargs:
            module = with_kwargs(module)
        self._module = module.to(device)
        self._mode = self.definition.use_onnx if device == "cpu" and noise is None else None
        self._graph: bytes | None = None
        self._int8: ProvenGraph | None = None
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._used: dict[int, float] = {}  # older versions, and when they were asked last
        self._rows: list[Any] | None = [] if news.wants_rows and self._mode else None
        weights = cluster.get(news.weights)
        load_weights(self._module, weights)
        constant = self._mode in ("infer", "quantize")
        most = self.definition.max_batch_size
        self._recorded = noise is None and self._is_quick()
        sizes = _sizes(most) if self._recorded and self._mode is None else ()
        engine: Any = TorchEngine(self._module, record=self._recorded)
        if noise is not None:
            from bray.train.live import LiveEngine

            engine = LiveEngine(self._module, noise, np.random.default_rng())
        if self.definition.example is not None:
            for size in sizes:  # recorded now, so that nobody waits for it later
                engine.forward(*tree.map(lambda x, size=size: np.repeat(x[:1], size, 0), self.definition.args))
                if not engine.is_recorded:
                    self._recorded, sizes, engine = False, (), TorchEngine(self._module, record=False)
                    break
        super().__init__(
            self.definition.name,
            engine,
            news.step,
            weights,
            make_engine=self._make_newest if constant else None,
            decide=self._record if self._rows is not None else None,
            max_batch_size=most,
            max_queue=_MAX_QUEUE,
            pad_to=sizes,
        )
        self._tag = news.tag
        if news.graph is not None:
            self.take(news)

    def _is_quick(self) -> bool:
        """Whether recording pays: a forward on the CPU that takes long anyway gains nothing by it."""
        if self._device != "cpu" or self.definition.example is None:
            return True
        from bray.inference.torch_engine import TorchEngine

        engine, args = TorchEngine(self._module, record=False), tree.map(np.array, self.definition.args)
        engine.forward(*args)
        start = time.thread_time()  # not the clock's: other processes may be busy
        engine.forward(*args)
        return time.thread_time() - start < _QUICK_S

    # --- asking -------------------------------------------------------------------------------------------------------

    def ask(self, args: tuple[Any, ...], batch: bool, step: int | None, with_step: bool) -> Awaitable[Any]:
        """The outputs, when awaited."""
        if step is not None:
            return self.ask_version(args, batch, step, with_step)
        return self.forward(*args, batch=True, with_step=with_step) if batch else self.submit(args, with_step)

    async def ask_version(self, args: tuple[Any, ...], batch: bool, step: int, with_step: bool) -> Any:
        """Ask a certain version, which is loaded first if it is not held."""
        for last in (False, True):
            if step not in self.steps:
                await asyncio.shield(asyncio.wrap_future(io.submit(self._load_once(step))))
            if step in self._used:
                self._used[step] = time.monotonic()
            try:
                return await self.forward(*args, batch=batch, step=step, with_step=with_step)
            except BrayError:
                if last or step in self.steps:
                    raise  # else it was evicted while this one waited: it is loaded again

    async def _load_once(self, step: int) -> None:
        """On the io loop, so that many who ask at once wait for one load."""
        if step not in self._loading:
            self._loading[step] = asyncio.create_task(self._load_version(step))
        try:
            await asyncio.shield(self._loading[step])
        finally:
            self._loading.pop(step, None)

    async def _load_version(self, step: int) -> None:
        if step in self.steps:
            return
        ref, _ = await self._keeper.call("weights", step, retry=True)
        self.add_version(step, await asyncio.to_thread(lambda: self._make_fixed(session().cluster.get(ref))))
        self._used[step] = time.monotonic()
        while len(self._used) > MOST_VERSIONS:
            oldest = min(self._used, key=self._used.__getitem__)
            del self._used[oldest]
            self.drop_version(oldest)

    # --- engines ------------------------------------------------------------------------------------------------------

    def _make_newest(self, weights: Weights) -> Any:
        """For engines with constant weights: that of the version that is being published."""
        if self._int8 is not None:
            from bray.inference.onnx_engine import OnnxEngine

            engine = OnnxEngine(self._int8.graph, self._threads)
            if self._is_proven(engine, self._int8, "in int8", "in float32"):
                return engine
            self._mode, self._int8 = "infer", None
        return self._make_fixed(weights)

    def _is_proven(self, engine: Any, exported: ProvenGraph, how: str, instead: str) -> bool:
        """Whether it answers here as it did where it was made; if not, that is said."""
        try:
            prove(engine, exported.proof, f"model {self.definition.name} {how}")
        except CheckpointError as e:
            logger.error("%s. In this process it is served %s", e, instead)
            return False
        return True

    def _make_fixed(self, weights: Weights) -> Any:
        """An engine that keeps these weights."""
        from bray.inference.torch_engine import TorchEngine, load_weights

        if self._graph is not None:
            from bray.inference.graph import with_constant_weights
            from bray.inference.onnx_engine import OnnxEngine

            return OnnxEngine(with_constant_weights(self._graph, weights), self._threads)
        module = copy.deepcopy(self._module)
        load_weights(module, weights)
        return TorchEngine(module, record=self._recorded)

    def take(self, news: News) -> None:
        """Switch to a newer version, or to an engine that is ready now. In a thread: it waits for a running forward,
        and for engines that are built. (ONNX Runtime is imported where it is used: importing takes half a second of
        everybody's time.)"""
        cluster = session().cluster
        switched = self._mode is not None and news.graph is not None and self._graph is None
        if switched:
            switched = self._switch(cluster.get(news.graph))
        int8 = None if news.int8 is None or self._mode != "quantize" else cluster.get(news.int8)
        other = (int8 and int8.graph) != (self._int8 and self._int8.graph)
        rebuilt = self._mode in ("infer", "quantize") and (switched or other)
        if (news.tag != self._tag or rebuilt) and news.step >= self.step:
            self._int8 = int8
            self.publish_weights(cluster.get(news.weights), news.step).result()
            self._tag = news.tag

    def _switch(self, exported: ProvenGraph) -> bool:
        """From torch to a graph, if that answers here as it did where it was made."""
        from bray.inference.onnx_engine import OnnxEngine

        engine, weights = OnnxEngine(exported.graph, self._threads), exported.proof.weights
        assert weights is not None
        engine.set_weights(weights)
        proven = engine if self._mode == "train" else engine.with_weights(weights)
        if not self._is_proven(proven, exported, "as an ONNX graph", "by torch"):
            self._mode = None
            return False
        self._graph = exported.graph
        if self._mode == "train":
            self.replace_engine(engine)
        return True

    @property
    def engine(self) -> str:
        """What answers now: torch, onnx (weights are inputs), constant or int8."""
        if self._graph is None or self._mode is None:
            return "torch"
        return "onnx" if self._mode == "train" else "int8" if self._int8 is not None else "constant"

    def _record(self, outputs: Any, *args: Any) -> Any:
        """Collect inputs until there are enough to calibrate int8 on; then send them to the keeper."""
        if self._rows is not None:
            self._rows.append(tree.map(np.array, args))
            if sum(len(tree.leaves(x)[0]) for x in self._rows) >= CALIBRATION_ROWS:
                rows, self._rows = tree.index(tree.concat(self._rows), slice(CALIBRATION_ROWS)), None
                self._keeper.tell("calibrate", rows)
        return outputs


def _sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that are recorded: powers of two, as many as a recorder keeps."""
    sizes = [most]
    while sizes[0] > 1 and len(sizes) < MAX_PROGRAMS:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)
