"""Time: how long a block took, and an end to one that takes too long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from bray.errors import ConfigError


class Timer:
    """`with Timer() as t: ...; t.seconds`. `sync` (torch.cuda.synchronize) is called at both ends, to time work on a
    device."""

    def __init__(self, sync: Callable[[], Any] = lambda: None):
        self._sync = sync
        self.seconds = 0.0

    def __enter__(self) -> Timer:
        self._sync()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self._sync()
        self.seconds = time.perf_counter() - self._start


@contextmanager
def Watchdog(seconds: float, what: str = "this") -> Iterator[None]:
    """`with Watchdog(30): ...` raises TimeoutError inside when it takes longer. Main thread and POSIX only
    (SIGALRM)."""
    if not seconds > 0:
        raise ConfigError(f"a watchdog needs a time > 0 s, got {seconds}")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a watchdog works in the main thread only: signals arrive there")

    def bark(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
