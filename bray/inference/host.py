"""ModelHost: a named model with its versions. Anybody asks it, a trainer publishes to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from bray.errors import BrayError, CheckpointError, ConfigError
from bray.inference.batcher import Batcher
from bray.inference.engine import Engine, lasting

log = logging.getLogger("bray.inference")

Weights = Mapping[str, np.ndarray]


class Forward(Protocol):
    """All that a host needs of an engine; one that takes new weights has `set_weights` too (see `Engine`)."""

    def forward(self, *args: Any) -> Any: ...


class Promise(Future[Any]):
    """A result in the making: `await` it in a loop, or `.result()` in a thread. Nobody can cancel it."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """The first end counts."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


def totals(stats: Collection[Mapping[str, Any]], dropped: Mapping[str, int]) -> dict[str, float]:
    """The `stats` of all versions of a model together, with what those that are gone have counted."""
    return {
        "versions": len(stats),
        "batches_total": dropped["batches"] + sum(s["batches"] for s in stats),
        "samples_total": dropped["samples"] + sum(s["samples"] for s in stats),
        "queue": sum(s["queue"] for s in stats),
        "forward_seconds": max((s["forward_s"] or 0.0 for s in stats), default=0.0),
    }


class ModelHost:
    """The current version of a model, which `publish_weights` replaces, and any number of others, which stay as they
    are.

    engine         answers for the current version
    step, weights  what it holds; with weights, `get_weights` works and a publish is checked against their names and
                   shapes
    decide         `decide(outputs, *args) -> tree`, on whole batches (padding included), so that a policy's choice of
                   actions is batched with the forward; versions may call it at the same time
    make_engine    `make_engine(weights) -> Engine`, for engines that take no new weights: called in a thread of its own
    batching       arguments of `Batcher`; each version has a batcher of its own in each event loop that asks it, and
                   one forward at a time

    `forward` may be awaited in any event loop, everything else may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        engine: Forward,
        step: int = 0,
        weights: Weights | None = None,
        *,
        decide: Callable[..., Any] | None = None,
        make_engine: Callable[[Weights], Forward] | None = None,
        **batching: Any,
    ):
        self.name = name
        self._decide = decide
        self._make_engine = make_engine
        self._batching = batching
        self._current = self._make_version(engine, step, None if weights is None else _copy(weights))
        self._others: dict[int, _Version] = {}
        self._newest = step  # published or about to be
        self._lock = threading.Lock()  # one publisher at a time; taken before a version's lock, never after it
        self._builder: ThreadPoolExecutor | None = None
        self._closed = False
        self._dropped = {"batches": 0, "samples": 0}  # counts of versions that are gone

    # --- asking -------------------------------------------------------------------------------------------------------

    def forward(
        self, *args: Any, batch: bool = False, step: int | None = None, with_step: bool = False, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Await it: one sample (trees without batch dimension) -> its outputs. Samples of many callers share a batch.

        batch      the arguments are batches `[B, ...]` already, and so are the outputs; they run as a batch of their
                   own
        step       ask this version; without it, the current one at the time the batch starts
        with_step  give `(outputs, step)`: the version that produced them
        kwargs     if there are any, they are one more argument of the engine, a dict, after the others
        Raises Overloaded when too many wait.
        """
        batcher = self._find(step).batcher
        if kwargs:
            args = (*args, kwargs)
        return (batcher.submit_batch if batch else batcher.submit)(*args, with_step=with_step)

    def submit(self, args: tuple[Any, ...], with_step: bool = False) -> asyncio.Future[Any]:
        """`forward` of one sample for the current version and nothing else: half a microsecond less."""
        submit = self._current.batcher.submit
        return submit(*args, with_step=True) if with_step else submit(*args)

    def run_now(self, args: tuple[Any, ...], rows: int) -> tuple[Any, int] | None:
        """`(outputs, step)` of a batch of arrays from the current version, or None where that takes long: see
        `Batcher.run_now`."""
        return self._current.batcher.run_now(args, rows)

    def __call__(
        self, *args: Any, batch: bool = False, step: int | None = None, with_step: bool = False, **kwargs: Any
    ) -> Any:
        """`forward` without a loop: runs in the calling thread, whichever it is, after the forward that may be
        running."""
        batcher = self._find(step).batcher
        if kwargs:
            args = (*args, kwargs)
        return batcher.call(*args, batch=batch, with_step=with_step)

    @property
    def step(self) -> int:
        """The step of the current version."""
        return self._current.step

    @property
    def steps(self) -> list[int]:
        """The versions that can be asked."""
        return sorted({self._current.step, *self._others})

    @property
    def stats(self) -> dict[int, dict[str, Any]]:
        """The batcher's figures of each version, by step."""
        return {v.step: v.stats for v in (*self._others.values(), self._current)}

    def numbers(self) -> dict[str, float]:
        """The figures of all versions together, for a metrics page."""
        return {"step": self.step, **totals(self.stats.values(), self._dropped)}

    # --- versions -----------------------------------------------------------------------------------------------------

    def publish_weights(self, weights: Weights, step: int | None = None) -> Promise:
        """Replace the current version between two batches: whoever waits is answered by the new one. `step` is the last
        one + 1 by default.

        An engine with `set_weights` has the new weights when this returns, which may take until the running forward
        ends. With `make_engine` a new engine is built in a thread meanwhile. Arrays that can be written to are copied.
        Raises ConfigError for a step older than the newest, CheckpointError for weights that do not fit; the old
        version goes on then, as it does when building fails.
        """
        weights = _copy(weights)
        publishing = Promise()
        with self._lock:
            if self._closed:
                raise BrayError(f"model {self.name!r} is closed and takes no more weights")
            step = self._newest + 1 if step is None else step
            if step < self._newest:
                raise ConfigError(
                    f"model {self.name!r} is at step {self._newest} already, got weights of step {step}: "
                    "an older version is held beside the current one with add_version(step, engine)"
                )
            held = self._current.held[0]
            if held is not None:
                _check(held, weights)
            if self._make_engine is None:
                self._current.set_weights(weights, step)
                self._newest = step
                publishing.set_result(step)
            else:
                if self._builder is None:
                    self._builder = ThreadPoolExecutor(1, "bray-publish")
                self._newest = step
                self._builder.submit(self._build, weights, step, publishing)
        return publishing

    def _build(self, weights: Weights, step: int, publishing: Promise) -> None:
        """In the builder's thread: a new engine for the current version."""
        try:
            assert self._make_engine is not None
            if self._closed:
                raise BrayError(f"model {self.name!r} was closed before step {step} was built")
            engine = self._make_engine(weights)
            with self._lock:
                self._current.replace(engine, weights, step)
        except BaseException as e:
            with self._lock:
                if self._newest == step:
                    self._newest = self._current.step
            log.error("model %s: step %d is not published, step %d goes on: %s", self.name, step, self.step, e)
            publishing.set_exception(e)
        else:
            publishing.set_result(step)

    def replace_engine(self, engine: Engine) -> None:
        """Answer with another engine from the next batch on. It gets the weights of the current version first, which
        must be known."""
        with self._lock:
            weights, step = self.get_weights()
            engine.set_weights(weights)
            self._current.replace(engine, weights, step)

    def get_weights(self) -> tuple[Weights, int]:
        """The weights of the current version and their step. Do not write into them."""
        weights, step = self._current.held
        if weights is None:
            raise ConfigError(
                f"model {self.name!r} does not know its weights: give them as ModelHost(..., weights=...)"
            )
        return weights, step

    def add_version(self, step: int, engine: Forward) -> None:
        """Hold another version, of any age, beside the current one."""
        with self._lock:
            if step in self._others:
                raise ConfigError(f"model {self.name!r} holds version {step} already: drop_version({step}) first")
            self._others[step] = self._make_version(engine, step, None)

    def drop_version(self, step: int) -> Promise:
        """Let go of a version: its running batch is answered, callers who still wait for it get an error, then the
        result is there.
        If it is the current one, the newest of the others takes its place."""
        promise = Promise()
        with self._lock:
            version = self._others.pop(step, None)
            if version is None:
                version = self._find(step)
                if not self._others:
                    raise ConfigError(f"model {self.name!r} holds version {step} only: add another before you drop it")
                self._current = self._others.pop(max(self._others))
                self._newest = self._current.step
            for key in self._dropped:
                self._dropped[key] += version.stats[key]
        loop = next((b.loop for b in version.batchers if _is_running(b.loop)), None)
        if loop is None:
            promise.set_result(None)
            return promise

        async def end() -> None:
            await version.close()
            promise.set_result(None)

        asyncio.run_coroutine_threadsafe(end(), loop)
        return promise

    async def close(self, timeout: float = 5.0) -> None:
        """End all versions: who waits gets an error, running batches have `timeout` seconds."""
        with self._lock:
            self._closed = True
            builder, self._builder = self._builder, None
        if builder is not None:
            builder.shutdown(wait=False)
        await asyncio.gather(*[v.close(timeout) for v in (self._current, *self._others.values())])

    def _make_version(self, engine: Forward, step: int, weights: Weights | None) -> _Version:
        return _Version(engine, (weights, step), self._decide, self._batching)

    def _find(self, step: int | None) -> _Version:
        if step is None:
            return self._current
        version = self._others.get(step)
        if version is None and self._current.step == step:
            version = self._current
        if version is None:
            raise ConfigError(f"model {self.name!r} holds the versions {self.steps}, not {step}")
        return version


class _Version:
    """An engine and what it holds, behind a batcher for each event loop that asks. They change together, under the
    batchers' common lock."""

    def __init__(
        self,
        engine: Forward,
        held: tuple[Weights | None, int],
        decide: Callable[..., Any] | None,
        batching: dict[str, Any],
    ):
        self.engine = engine
        self.held = held
        """Weights and step."""
        self._decide, self._batching = decide, batching
        self.lock = threading.Lock()
        self._adding = threading.Lock()
        self.batchers = [self._make_batcher()]
        self.batcher = self.batchers[0]
        """The one to ask: it passes calls of other loops on."""
        self._past = {"batches": 0, "samples": 0}  # counts of batchers whose loops have ended

    def _make_batcher(self) -> Batcher:
        step = self._step
        return Batcher(self._forward, lock=self.lock, step=step, elsewhere=self._batcher_here, **self._batching)

    def _step(self) -> int:
        return self.held[1]

    def _forward(self, *args: Any) -> Any:
        outputs = self.engine.forward(*args)
        return outputs if self._decide is None else self._decide(outputs, *args)

    def _batcher_here(self) -> Batcher:
        """The batcher of the running event loop. Those of loops that have ended are forgotten."""
        loop = asyncio.get_running_loop()
        with self._adding:
            found = next((b for b in self.batchers if b.loop is loop), None)
            if found is None:
                ended = [b for b in self.batchers if b.loop is None or b.loop.is_closed()]
                for key in self._past:
                    self._past[key] += sum(b.stats[key] for b in ended)
                found = self._make_batcher().here()
                self.batchers = [*(b for b in self.batchers if b not in ended), found]
                self.batcher = self.batchers[0]
            return found

    @property
    def step(self) -> int:
        return self.held[1]

    @property
    def stats(self) -> dict[str, Any]:
        """The figures of its batchers together."""
        first, *more = [b.stats for b in self.batchers]
        for key in ("batches", "samples", "queue"):
            first[key] += self._past.get(key, 0) + sum(s[key] for s in more)
        first["mean_batch_size"] = first["samples"] / first["batches"] if first["batches"] else 0.0
        return first

    async def close(self, timeout: float = 5.0) -> None:
        """End its batchers, each in its own loop."""
        here = asyncio.get_running_loop()
        for batcher in self.batchers:
            ending = batcher.close(timeout)
            if batcher.loop is not here and batcher.loop is not None and _is_running(batcher.loop):
                with contextlib.suppress(TimeoutError):  # a loop that is blocked
                    await asyncio.wait_for(
                        asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ending, batcher.loop)), timeout + 1.0
                    )
            else:
                await ending

    def set_weights(self, weights: Weights, step: int) -> None:
        if not hasattr(self.engine, "set_weights"):
            raise ConfigError(
                f"{type(self.engine).__name__} takes no new weights (it has no set_weights): give ModelHost make_engine"
            )
        with self.lock:
            before = self.held[0]
            try:
                self.engine.set_weights(weights)
            except Exception:
                if before is not None:  # the engine may have taken some of them before it raised
                    self.engine.set_weights(before)
                raise
            self.held = (weights, step)

    def replace(self, engine: Forward, weights: Weights, step: int) -> None:
        with self.lock:
            self.engine, self.held = engine, (weights, step)


def _is_running(loop: asyncio.AbstractEventLoop | None) -> bool:
    return loop is not None and not loop.is_closed() and loop.is_running()


def _copy(weights: Weights) -> dict[str, np.ndarray]:
    """Weights of our own: a trainer goes on writing into its arrays."""
    return {name: lasting(np.asarray(x)) for name, x in weights.items()}


def _check(mine: Weights, new: Weights) -> None:
    """Raise CheckpointError unless names and shapes are the same."""
    wrong = [
        f"{name}: expected {_shape(mine, name)}, got {_shape(new, name)}"
        for name in {**mine, **new}
        if name not in mine or name not in new or mine[name].shape != new[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"these weights do not fit the model, which goes on with those it has: {'; '.join(wrong[:5])}{more}"
        )


def _shape(weights: Weights, name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "none"
