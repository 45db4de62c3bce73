"""A buffer that fills itself with made-up samples, to develop a trainer before there are games."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bray import tree
from bray.cluster.session import session
from bray.data.piece import Piece
from bray.data.rows import to_samples
from bray.errors import ConfigError

logger = logging.getLogger("bray.remote")

_POOL = 256  # different samples that are made of a template
_CHUNK = 32  # samples that are pushed together


class FakeBuffer:
    """Pushes made-up samples into the buffer of this name, which is made if there is none, from a thread until `close`
    or the session's end.

        FakeBuffer("atari_buffer", {"obs": np.zeros((42, 42, 4), np.float32), "action": 8, "advantage": 0.0})
        FakeBuffer("atari_buffer", make_sample)            # a function of a random generator: make_sample(rng)
        FakeBuffer("atari_buffer", model="atari_model")    # what the model takes: its forward_args
        FakeBuffer("atari_buffer")                         # the same, where there is one model

    sample    a template: made-up samples have its keys, shapes and dtypes. Floats are drawn from a normal distribution,
              integers from 0 to the largest one in the template (action: 8 means nine actions)
    rate      samples per second; None: as many as the trainers take. Nothing is dropped: a full buffer is waited for
    settings  of the RemoteBuffer (size, batch_size, ...)
    """

    def __init__(
        self,
        name: str,
        sample: Any = None,
        *,
        model: Any = None,
        rate: float | None = None,
        seed: int = 0,
        **settings: Any,
    ):
        from bray.remote.buffer.handle import RemoteBuffer

        if rate is not None and not rate > 0:
            raise ConfigError(f"FakeBuffer {name!r}: expected rate > 0, got {rate}")
        self.name, self.rate = name, rate
        self._rng = np.random.default_rng(seed)
        self._make = self._maker(sample, model)
        first = self._make()  # a template that cannot work says so here
        self.buffer = RemoteBuffer(name, **settings)
        self.pushed = 0
        """Samples so far."""
        self.error: BaseException | None = None
        """Why it ended, if it was not asked to."""
        self._closed = threading.Event()
        session().close_hooks.append(self.close)
        self._thread = threading.Thread(target=self._run, args=(first,), name=f"bray-fake-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push no more."""
        self._closed.set()

    def _maker(self, sample: Any, model: Any) -> Callable[[], Any]:
        if callable(sample):
            return lambda: sample(self._rng)
        template = _as_arrays(_forward_args(self.name, model) if sample is None else sample)
        pool = [tree.map(self._draw, template) for _ in range(_POOL)]
        return lambda: pool[self._rng.integers(_POOL)]

    def _draw(self, leaf: np.ndarray) -> np.ndarray:
        kind = leaf.dtype.kind
        if kind == "f":
            return self._rng.standard_normal(leaf.shape).astype(leaf.dtype)
        if kind == "b":
            return self._rng.integers(0, 2, leaf.shape).astype(bool)
        if kind in "iu":
            return self._rng.integers(0, int(leaf.max(initial=0)), leaf.shape, endpoint=True).astype(leaf.dtype)
        raise ConfigError(f"FakeBuffer {self.name!r}: expected a template of numbers, got {leaf.dtype}")

    def _run(self, first: Any) -> None:
        chunk = [first]
        began = time.monotonic()
        try:
            while not self._closed.is_set():
                self.buffer.push(*chunk, drop=False).result()
                self.pushed += len(chunk)
                if self.rate is not None:
                    self._closed.wait(began + self.pushed / self.rate - time.monotonic())
                size = _CHUNK if self.rate is None else max(1, min(_CHUNK, int(self.rate / 20)))
                chunk = [self._make() for _ in range(size)]
        except BaseException as e:
            if not self._closed.is_set():
                logger.error("the fake buffer %s has ended", self.name, exc_info=e)
                self.error = e


def _as_arrays(sample: Any) -> Any:
    try:
        return tree.map(np.asarray, sample)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"expected a template of arrays and numbers, got {type(sample).__name__} ({e})") from None


def _forward_args(name: str, model: Any) -> Any:
    """One sample of what a model takes."""
    from bray.remote.model.handle import RemoteModel

    if model is None:
        models = sorted({n.split("/")[1] for n in session().cluster.names("model/")})
        if len(models) != 1:
            there = ", ".join(models) or "none"
            raise ConfigError(
                f"FakeBuffer {name!r}: expected a sample to imitate, or one model whose forward_args it may take; "
                f"models: {there}. Give FakeBuffer({name!r}, sample) a tree of arrays"
            )
        model = models[0]
    handle = RemoteModel(model) if isinstance(model, str) else model
    args = handle.get_torch_forward_args()
    if not args:
        raise ConfigError(f"FakeBuffer {name!r}: model {handle.name!r} was defined without forward_args: give a sample")
    args = tree.map(lambda x: x.numpy()[0], args)
    return args[0] if len(args) == 1 else args


def algo_sample(setup: Any, rng: np.random.Generator) -> Callable[[np.random.Generator], Any]:
    """For a trainer with an algorithm's Learner: samples as its agents push them, of a game that answers at random, in
    their order.

    setup  what `bray.remote.algo.algo_setup` found
    """
    origin = int(rng.integers(1 << 62))

    def again() -> Iterator[Any]:
        """The same stretch of a game again and again; its steps are counted each time."""
        piece, steps = _play(setup, rng), 0
        while True:
            steps += int(np.count_nonzero(piece.valid))
            yield from tree.split(to_samples(piece, origin, steps, ()))

    samples = again()
    return lambda rng: next(samples)


def _play(setup: Any, rng: np.random.Generator, ticks: int = 64) -> Piece:
    from bray.act import SAMPLE, Clock, Tick, decide_now
    from bray.inference.torch_engine import TorchEngine

    policy, engine = setup.make_policy(), TorchEngine(setup.make_model(), record=False)
    obs = tree.stack([setup.spec.observation.sample(rng) for _ in range(ticks + 1)])
    state = setup.initial_state
    memory = None if state is None else tree.map(lambda x: np.repeat(x[None], ticks + 1, 0), state)
    decision = decide_now(policy.decide(Tick(obs), memory, rng, SAMPLE, Clock()), engine.forward)

    def column(x: Any, rows: int) -> Any:
        return tree.map(lambda leaf: leaf[:rows, None], x)

    rows: dict[str, Any] = {k: column(v, ticks) for k, v in decision.extras.items()}
    ends = rng.random((ticks, 1)) < 0.05
    every = 1 if memory is None else setup.make_experience().state_every
    return Piece(
        obs=column(obs, ticks + 1),
        action=rows.pop("action"),
        reward=rng.standard_normal((ticks, 1)).astype(np.float32),
        terminated=ends,
        truncated=np.zeros_like(ends),
        valid=np.ones_like(ends),
        first=np.concatenate([np.ones((1, 1), bool), ends]),
        outputs={k: column(decision.outputs[k], ticks + 1) for k in policy.keeps},
        extras=rows,
        state=None if memory is None else tree.map(lambda x: x[:ticks:every, None], memory),
        state_every=every,
        stream=np.array([int(rng.integers(1 << 62))]),
    )
