"""A model that answers in this process: a ModelHost, its engine, and whoever keeps it at the newest version."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from bray import tree
from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.errors import BrayError
from bray.inference.host import ModelHost
from bray.remote.model.definition import Definition, with_kwargs
from bray.remote.model.keeper import CALIBRATION_ROWS, POLL_S, About, Key, News

logger = logging.getLogger("bray.remote")

MOST_VERSIONS = 8
"""Older versions that are held beside the current one; of more, the one that was asked for longest ago goes."""
_MAX_QUEUE = 1 << 16
_RETRY_S = 0.5
_QUICK_S = 2e-3
MAX_PROGRAMS = 8  # of bray.capture, which would import torch

Weights = Mapping[str, np.ndarray]


class Served:
    """The engine of a model in this process. Made in a thread: it may import torch and load a graph.

    device   "cpu" or "cuda"; on a GPU the engine is torch
    threads  of one forward in ONNX Runtime
    """

    def __init__(self, about: About, keeper: Member, device: str = "cpu", threads: int = 1):
        from bray.inference.torch_engine import TorchEngine, load_weights

        self.definition: Definition = about.definition
        self._has_kwargs = self.definition.has_kwargs
        self._keeper, self._device, self._threads = keeper, device, threads
        cluster, news = session().cluster, about.news
        module = copy.deepcopy(cluster.get(about.module)).eval()
        if self.definition.has_kwargs:
            module = with_kwargs(module)
        self._module = module.to(device)
        self._mode = self.definition.use_onnx if device == "cpu" else None
        self._graph: bytes | None = None
        self._int8: bytes | None = None
        self._adding: dict[int, asyncio.Task[None]] = {}
        self._used: dict[int, float] = {}  # older versions, and when they were asked last
        self._rows: list[Any] | None = [] if news.wants == "rows" and self._mode else None
        weights = cluster.get(news.weights)
        load_weights(self._module, weights)
        constant = self._mode in ("infer", "quantize")
        most = self.definition.max_batch_size
        self._recorded = self._is_quick()
        sizes = _sizes(most) if self._recorded and self._mode is None else ()
        engine = TorchEngine(self._module, record=self._recorded)
        if self.definition.example is not None:
            for size in sizes:  # recorded now, so that nobody waits for it later
                engine.forward(*tree.map(lambda x, size=size: np.repeat(x[:1], size, 0), self.definition.args))
                if not engine.is_recorded:
                    self._recorded, sizes, engine = False, (), TorchEngine(self._module, record=False)
                    break
        self.host = ModelHost(
            self.definition.name,
            engine,
            news.step,
            weights,
            make_engine=self._make_engine if constant else None,
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

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: bool, step: int | None, with_step: bool
    ) -> Awaitable[Any]:
        """The outputs, when awaited."""
        if not (kwargs or batch or self._has_kwargs) and step is None:
            return self.host.submit(args, with_step)
        args = self.definition.engine_args(args, kwargs)
        if step is not None:
            return self.ask_version(args, batch, step, with_step)
        return self.host.forward(*args, batch=batch, with_step=with_step)

    async def ask_version(self, args: tuple[Any, ...], batch: bool, step: int, with_step: bool) -> Any:
        """Ask a certain version, which is found first if it is not held."""
        for last in (False, True):
            if step not in self.host.steps:
                await asyncio.shield(asyncio.wrap_future(io.submit(self._need_version(step))))
            if step in self._used:
                self._used[step] = time.monotonic()
            try:
                return await self.host.forward(*args, batch=batch, step=step, with_step=with_step)
            except BrayError:
                if last or step in self.host.steps:
                    raise  # else it had to go while this one waited: it is found again

    async def _need_version(self, step: int) -> None:
        """On the io loop, so that many who ask at once wait for one."""
        if step not in self._adding:
            self._adding[step] = asyncio.create_task(self._add_version(step))
        try:
            await asyncio.shield(self._adding[step])
        finally:
            self._adding.pop(step, None)

    async def _add_version(self, step: int) -> None:
        if step in self.host.steps:
            return
        ref, _ = await self._keeper.call("weights", step, again=True)
        self.host.add_version(step, await asyncio.to_thread(lambda: self._make_fixed(session().cluster.get(ref))))
        self._used[step] = time.monotonic()
        while len(self._used) > MOST_VERSIONS:
            oldest = min(self._used, key=self._used.__getitem__)
            del self._used[oldest]
            self.host.drop_version(oldest)

    # --- engines ----------------------------------------------------------------------------------------------------

    def _make_engine(self, weights: Weights) -> Any:
        """For engines whose weights are inside: of the version that is being published."""
        if self._int8 is not None:
            from bray.inference.onnx_engine import OnnxEngine

            return OnnxEngine(self._int8, self._threads)
        return self._make_fixed(weights)

    def _make_fixed(self, weights: Weights) -> Any:
        """An engine of one version for good."""
        from bray.inference.torch_engine import TorchEngine, load_weights

        if self._graph is not None:
            from bray.inference.graph import with_constant_weights
            from bray.inference.onnx_engine import OnnxEngine

            return OnnxEngine(with_constant_weights(self._graph, weights), self._threads)
        module = copy.deepcopy(self._module)
        load_weights(module, weights)
        return TorchEngine(module, record=self._recorded)

    def take(self, news: News) -> None:
        """Go on to a newer version, or to an engine that is ready now. In a thread: it waits for the forward that may be running, and for
        engines that are built. (ONNX Runtime is imported only where it is used: that takes half a second of everybody's time.)"""
        cluster = session().cluster
        switched = self._mode is not None and news.graph is not None and self._graph is None
        if switched:
            self._graph = cluster.get(news.graph)
            if self._mode == "train":
                from bray.inference.onnx_engine import OnnxEngine

                self.host.replace_engine(OnnxEngine(self._graph, self._threads))
        int8 = None if news.int8 is None else cluster.get(news.int8)
        rebuilt = self._mode in ("infer", "quantize") and (switched or int8 != self._int8)
        if (news.tag != self._tag or rebuilt) and news.step >= self.host.step:
            self._int8 = int8
            self.host.publish_weights(cluster.get(news.weights), news.step).result()
            self._tag = news.tag

    @property
    def engine(self) -> str:
        """What answers now: torch, onnx (weights are inputs), constant or int8."""
        if self._graph is None or self._mode is None:
            return "torch"
        return "onnx" if self._mode == "train" else "int8" if self._int8 is not None else "constant"

    def _record(self, outputs: Any, *args: Any) -> Any:
        """Remember inputs until there are enough to calibrate int8 on; then give them to the keeper."""
        if self._rows is not None:
            self._rows.append(tree.map(np.array, args))
            if sum(len(tree.leaves(x)[0]) for x in self._rows) >= CALIBRATION_ROWS:
                rows, self._rows = tree.index(tree.concat(self._rows), slice(CALIBRATION_ROWS)), None
                self._keeper.tell("calibrate", rows)
        return outputs

    async def close(self) -> None:
        await self.host.close()


def _sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that are recorded: powers of two, as many as a recorder keeps."""
    sizes = [most]
    while sizes[0] > 1 and len(sizes) < MAX_PROGRAMS:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)


class Follower:
    """Knows what is newest, by a long poll to the keeper, and tells `served` (if there is one here). `ended` is called when the model of this
    name is another one now."""

    def __init__(
        self, name: str, keeper: Member, key: Key, served: Served | None = None, ended: Callable[[], None] | None = None
    ):
        self.name, self._keeper, self._served, self._ended = name, keeper, served, ended
        self._key = key
        self.step = key[1]
        self.env_steps = 0
        """Environment steps behind the newest weights."""
        self.published: tuple[Any, int, str] | None = None
        """(a reference to weights, their step, their tag) that this process published last."""
        self._task = io.spawn(self._follow(), f"following model {name}")

    async def _follow(self) -> None:
        while True:
            try:
                news = await self._keeper.call("newer", self._key, self._holds(), timeout=3 * POLL_S, again=True)
                if news is None:
                    continue
                if news.definition != self._key[0]:
                    if self._ended is not None:
                        self._ended()
                    return
                if news.wants == "offer":
                    await self._offer()
                    continue
                if self._served is not None:
                    await asyncio.to_thread(self._served.take, news)
                self._key = news.key
                self.step = max(self.step, news.step)
                self.env_steps = max(self.env_steps, news.env_steps)
            except (
                Exception
            ) as e:  # the keeper has died, and with it what it was about to give; or a version cannot be built
                why = (str(e).splitlines() or [type(e).__name__])[0]
                logger.warning(
                    "model %s stays at step %d in this process and tries again: %s", self.name, self._key[1], why
                )
                logger.debug("following model %s", self.name, exc_info=True)
                await asyncio.sleep(_RETRY_S)

    def _holds(self) -> int:
        """The newest step of which we have the weights; -1 if of none."""
        published = -1 if self.published is None else self.published[1]
        return published if self._served is None else max(published, self._served.host.step)

    async def _offer(self) -> None:
        """The keeper has lost what we have."""
        if self.published is not None and self.published[1] == self._holds():
            ref, step, tag = self.published
        else:
            assert self._served is not None
            weights, step = self._served.host.get_weights()
            ref, tag = session().cluster.put(weights), self._key[2]
        await self._keeper.call("offer", ref, step, tag, again=True)

    def close(self) -> None:
        self._task.cancel()
