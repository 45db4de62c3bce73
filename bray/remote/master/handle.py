"""The master as every process sees it: numbers, pictures, shared values. Numbers are added up here and sent once a
second."""

from __future__ import annotations

import asyncio
import contextlib
import io as bytes_io
import logging
import math
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bray import tree
from bray.cluster import io
from bray.cluster.protocol import Member
from bray.cluster.session import ClusterSession, current, session
from bray.errors import BrayError, ConfigError, DataError, MissingComponent, UnknownName
from bray.inference.host import Promise
from bray.remote.master.worker import KEPT, KINDS, LAST_KINDS, Key, Labels, Master, Merged

logger = logging.getLogger("bray")
"""The project's log: lines of all processes are in the run directory's bray.log."""

SEND_EVERY = 1.0
_PATIENCE = 20.0  # a master that was killed is back by then
_END_PATIENCE = 4.0  # at the end of a session


def start_master(opened: ClusterSession, port: int = 0) -> None:
    """In the process that opens the session."""
    member = opened.cluster.start("master", Master, str(opened.numbers), port)
    opened.close_hooks.append(partial(_say_training_has_ended, member))  # the first closer is called last
    logger.info("numbers of %s: http://127.0.0.1:%d/metrics", opened.path, member.call("metrics_port").result())


def _say_training_has_ended(member: Member) -> None:
    try:
        member.call("training_has_ended", timeout=_END_PATIENCE).result()
    except BrayError as e:
        logger.warning("the last row has no learner_steps_total: %s", e)


def _ask(method: str, *args: Any) -> Any:
    return _recorder().master().call(method, *args, retry=True, timeout=_PATIENCE).result()


# --- numbers ----------------------------------------------------------------------------------------------------------


class _Recorder:
    """The numbers of this process that the master does not have yet."""

    ended = False

    def __init__(self, of: ClusterSession):
        self.of = of
        self._master: Member | None = None
        self._lock = threading.Lock()
        self._sending = asyncio.Lock()
        self._gathered: dict[Key, Merged] = {}
        self._due = False

    def master(self) -> Member:
        if self._master is None:
            self._master = self.of.cluster.find("master")
        return self._master

    def add(self, name: str, labels: Labels, values: Sequence[float], desc: Mapping[str, str]) -> None:
        with self._lock:
            entry = self._gathered.get((name, labels))
            if entry is None:
                entry = self._gathered[name, labels] = Merged()
            entry.sum += sum(values)
            entry.cnt += len(values)
            if desc:
                entry.desc.update(desc)
            if name in KEPT or not entry.desc.keys().isdisjoint(LAST_KINDS):
                entry.values += values
            due, self._due = self._due, True
        if not due:
            loop = io.loop()
            loop.call_soon_threadsafe(loop.call_later, SEND_EVERY, self._send_in_background)

    def _send_in_background(self) -> None:
        io.spawn(self._try_to_send(), "sending numbers")

    async def _try_to_send(self) -> None:
        try:
            await self._send()
        except BrayError as e:
            if current() is self.of:
                logger.warning("the master does not answer, its numbers are sent again later: %s", e)
                io.loop().call_later(SEND_EVERY, self._send_in_background)

    async def _send(self) -> None:
        """When this returns, the master has all that was merged before."""
        async with self._sending:
            rows = self._take()
            if not rows:
                return
            try:
                await self.master().call("merged", rows, retry=True, timeout=_PATIENCE)
            except BaseException:
                self._put_back(rows)
                raise

    def close(self) -> None:
        """Send what is gathered."""
        try:
            if not io.is_loop():
                io.run(self._send())
            elif rows := self._take():  # the loop cannot wait for itself
                self.master().call("merged", rows, retry=True, timeout=_PATIENCE).result()
        except MissingComponent:
            logger.warning("the last numbers of this process are lost: the master is gone")

    def _take(self) -> dict[Key, Merged]:
        with self._lock:
            rows, self._gathered, self._due = self._gathered, {}, False
        return rows

    def _put_back(self, rows: dict[Key, Merged]) -> None:
        with self._lock:
            for key, newer in self._gathered.items():
                rows.setdefault(key, Merged()).add(newer)
            self._gathered = rows


def _recorder() -> _Recorder:
    here = session()
    return here.own(("numbers",), lambda: _Recorder(here))


def merge(name: str, value: Any, desc: Mapping[str, str] | None = None, **labels: Any) -> None:
    """Add a value, or every value of an array or tensor, to the number `name`, from any process. What is not finite is
    left out.

    desc    which of `sum, cnt, avg, time_window_sum, time_window_cnt, time_window_avg, last_100_avg, last_100_min,
            last_100_max` go to TensorBoard, each with its description; without it the average of the last minute. The
            last 100 values are kept only where one of the last three is named (and of `episode_return` and
            `episode_length` always): name it in every call
    labels  tell apart numbers of one name, as in Prometheus
    """
    for kind in desc or ():
        if kind not in KINDS:
            raise UnknownName("key of desc", kind, KINDS, f"bray.merge({name!r})")
    _add_values(name, _values(value), desc or {}, labels)


def _add_values(name: str, values: Sequence[float], desc: Mapping[str, str], labels: Mapping[str, Any]) -> None:
    if not all(map(math.isfinite, values)):
        count, values = len(values), [v for v in values if math.isfinite(v)]
        logger.warning("bray.merge(%r): %d of %d values are not finite, left out", name, count - len(values), count)
    if values:
        _recorder().add(name, _labels(labels) if labels else (), values, desc)


def _values(given: Any) -> list[float]:
    """Every value of a number, an array or a tensor."""
    if isinstance(given, (float, int)):
        return [float(given)]
    try:
        return _array(given).astype(np.float64).ravel().tolist()
    except (TypeError, ValueError) as e:
        raise DataError(
            f"expected a number, an array or a tensor of numbers, got {type(given).__name__} ({e})"
        ) from None


def _labels(given: Mapping[str, Any]) -> Labels:
    return tuple(sorted((k, str(v)) for k, v in given.items()))


def query(name: str, kind: str = "time_window_avg", **labels: Any) -> float | None:
    """What all processes have merged under this name; None where nothing came in the time window."""
    flush()
    return _ask("query", name, kind, _labels(labels))


def numbers() -> dict[str, dict[str, float | None]]:
    """Every number of the session, in all its kinds."""
    flush()
    return _ask("numbers")


def reported() -> dict[str, Any]:
    """What agents and other processes have reported, for a row of the trainer that asks; it writes the session's rows
    from then on. Empty where the master does not answer."""
    try:
        flush()  # a user's loss merges numbers too
        return _ask("reported")
    except BrayError as e:
        logger.warning("a row has only what its trainer knows: %s", e)
        return {}


def flush() -> None:
    """Send what `merge` has gathered in this process."""
    _recorder().close()


class Metric:
    """A number with bounds and a distribution. Values outside of the bounds are counted, and left out of everything
    else.

    max_samples   each time so many values have come, their maximum, minimum and percentiles (`NAME/max`, `NAME/min`,
                  `NAME/p30`, ...) are merged and their histogram goes to TensorBoard. `report` looks back on as many
    print_report  log a report then, too
    """

    PERCENTILES = (30, 50, 90, 95, 99)

    def __init__(
        self,
        name: str = "metric",
        up_bound: float = math.inf,
        low_bound: float = -math.inf,
        max_samples: int = 2048,
        print_report: bool = False,
    ):
        if max_samples < 1 or not low_bound <= up_bound:
            raise ConfigError(
                f"Metric({name!r}): expected max_samples >= 1 and low_bound <= up_bound, got {max_samples}, "
                f"{low_bound}, {up_bound}"
            )
        self.name, self.up_bound, self.low_bound, self.print_report = name, up_bound, low_bound, print_report
        self._last: deque[float] = deque(maxlen=max_samples)
        self._max_samples = max_samples
        self.count = 0
        """Values within the bounds."""
        self.outside = 0
        """Values out of bounds."""

    def merge(self, value: Any, **labels: Any) -> None:
        """Add a value, or every value of an array or tensor."""
        given = _values(value)
        values = [v for v in given if self.low_bound <= v <= self.up_bound]
        if outside := len(given) - len(values):
            self.outside += outside
            _add_values(f"{self.name}/outside", [1.0] * outside, {"sum": f"{self.name} out of bounds"}, labels)
        if values:
            _add_values(self.name, values, {}, labels)
        while values:
            room = self._max_samples - self.count % self._max_samples
            part, values = values[:room], values[room:]
            self._last.extend(part)
            self.count += len(part)
            if len(part) == room:
                self._publish(labels)

    def _publish(self, labels: Mapping[str, Any]) -> None:
        """The distribution of the last `max_samples` values. It does not wait for the master: a game may be waiting for
        this process."""
        last = np.array(self._last)
        merge(f"{self.name}/max", float(last.max()), **labels)
        merge(f"{self.name}/min", float(last.min()), **labels)
        for p, at in zip(self.PERCENTILES, np.percentile(last, self.PERCENTILES), strict=True):
            merge(f"{self.name}/p{p}", at, **labels)
        _recorder().master().tell("add_histogram", self.name, last)
        if self.print_report:
            logger.info("%s", self.report())

    def report(self) -> str:
        """The last values in one line."""
        last = np.array(self._last)
        if not len(last):
            return f"{self.name}: no values yet, {self.outside} out of bounds"
        percentiles = zip(self.PERCENTILES, np.percentile(last, self.PERCENTILES), strict=True)
        return (
            f"{self.name}: mean {last.mean():.4g}, std {last.std():.4g}, min {last.min():.4g}, "
            + ", ".join(f"p{p} {at:.4g}" for p, at in percentiles)
            + f", max {last.max():.4g} of {len(last)} values; {self.outside} out of bounds"
        )


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def set_tensorboard_step(model_name: Any) -> None:
    """TensorBoard's x axis becomes the step of this model, a RemoteModel or its name; None = seconds."""
    _ask("set_tensorboard_step", getattr(model_name, "name", model_name))


def add_scalar(tag: str, value: Any, step: int | None = None) -> None:
    """One point; without a step it is drawn at the current one."""
    _add(tag, step, simple_value=float(value))


def add_image(tag: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
    """A picture: [C, H, W] (or as `dataformats` says: HWC, HW), uint8 or floats in 0..1."""
    _add_picture(tag, step, [_picture(_array(image), dataformats, tag)], "PNG")


def add_video(tag: str, video: Any, step: int | None = None, fps: float = 4) -> None:
    """A video: [T, C, H, W], or [N, T, C, H, W] shown side by side; uint8 or floats in 0..1."""
    array = _array(video)
    if array.ndim == 5:
        n, t, c, h, w = array.shape
        array = array.transpose(1, 2, 3, 0, 4).reshape(t, c, h, n * w)
    if array.ndim != 4 or not len(array):
        raise DataError(f"add_video({tag!r}): expected [T, C, H, W] or [N, T, C, H, W], got shape {list(array.shape)}")
    frames = [_picture(frame, "CHW", tag) for frame in array]
    _add_picture(tag, step, frames, "GIF", duration=1000.0 / fps, loop=0)


def _add_picture(tag: str, step: int | None, frames: list[np.ndarray], file: str, **how: Any) -> None:
    from PIL import Image

    first, *rest = [Image.fromarray(frame) for frame in frames]
    if rest:
        how |= {"save_all": True, "append_images": rest}
    out = bytes_io.BytesIO()
    first.save(out, file, **how)
    shape = {"height": first.height, "width": first.width, "colorspace": 3}
    _add(tag, step, image={**shape, "encoded_image_string": out.getvalue()})


def add_histogram(tag: str, values: Any, step: int | None = None, bins: int = 30) -> None:
    """How values are distributed."""
    flat = np.array(_values(values))
    if not flat.size or not np.isfinite(flat).all():
        raise DataError(f"add_histogram({tag!r}): expected finite numbers, got {flat.size} of which some are not")
    _ask("add_histogram", tag, flat, step, bins)


def add_graph(model: Any, forward_args: Any) -> None:
    """The operations of a torch Model, as TensorBoard draws them."""
    _ask("add_graph", draw_graph(model, forward_args))


def draw_graph(model: Any, forward_args: Any) -> bytes:
    """TensorBoard's graph of a Model that takes and returns trees; DataError where torch cannot trace it."""
    import torch
    from torch.utils.tensorboard._pytorch_graph import graph

    args = tuple(forward_args) if isinstance(forward_args, (tuple, list)) else (forward_args,)

    class Leaves(torch.nn.Module):  # torch traces dicts of one type alone
        def forward(self, *flat: Any) -> tuple[Any, ...]:
            leaves = iter(flat)
            return tuple(tree.leaves(model(*tree.map(lambda _: next(leaves), args))))

    traced = Leaves()
    traced.model, traced.training = model, model.training
    said = contextlib.redirect_stdout(bytes_io.StringIO())  # torch prints what it then raises
    with warnings.catch_warnings(), said, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of Models that draw numbers, and of tracing itself
        try:
            made, _ = graph(traced, tuple(tree.leaves(args)))
        except Exception as e:
            why = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise DataError(f"torch cannot draw the graph of {type(model).__name__}: {why}") from e
    return made.SerializeToString()


def _add(tag: str, step: int | None, **value: Any) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    _ask("add_summary", Summary(value=[{"tag": tag, **value}]).SerializeToString(), step)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _picture(image: np.ndarray, dataformats: str, tag: str) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3 or 4]."""
    if image.ndim != len(dataformats) or sorted(dataformats) not in (sorted("CHW"), sorted("HW")):
        raise DataError(f"add_image({tag!r}): expected dimensions {dataformats}, got shape {list(image.shape)}")
    image = image.transpose([dataformats.index(d) for d in ("HWC" if "C" in dataformats else "HW")])
    if image.dtype != np.uint8:
        image = (np.clip(image.astype(np.float64), 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if image.ndim == 3 and image.shape[2] not in (3, 4):
        raise DataError(f"add_image({tag!r}): expected 1, 3 or 4 channels, got {image.shape[2]}")
    return np.ascontiguousarray(image)


# --- shared values ----------------------------------------------------------------------------------------------------


def set(key: str, value: Any) -> Promise:
    """Share a value with all processes of the session. When this returns, they see it."""
    told = _recorder().master().call("set", key, value, retry=True, timeout=_PATIENCE)
    told.result()
    return told


def get(key: str, default: Any = None) -> Any:
    """A shared value, or `default`."""
    return _ask("get", key, default)


def register(key: str) -> int:
    """A number of one's own: 0 for the first who asks with this key, 1 for the second, in the whole session."""
    return _ask("register", key)


def log(message: str, *args: Any) -> None:
    """A line in the run directory's log, from any process."""
    logger.info(message, *args)
