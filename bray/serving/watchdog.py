"""A thread that notices when the event loop of a worker stands still, and says whose code it stands in."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

logger = logging.getLogger("bray.serving")

_OURS = str(Path(__file__).parent.parent) + "/"
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MOST_CAUSES = 256


class LoopWatchdog:
    """Looks at the loop of the thread that made it. A place in an Actor's code is logged once; `blocked` counts every
    time.

    A loop that runs no Actor's code waits for the processor, or for another thread of this process: there is nothing in
    the game's code to mend, and nothing is logged.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, whose_code_runs: Callable[[], str | None], blocked_after_s: float
    ):
        self._loop, self._whose, self._limit = loop, whose_code_runs, blocked_after_s
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self.blocked = 0
        self._told: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._pulse()
        self._thread = threading.Thread(target=self._watch, name="bray-watchdog", daemon=True)
        self._thread.start()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        self._timer = self._loop.call_later(self._limit / 4, self._pulse)

    def _watch(self) -> None:
        seen = None
        while not self._over.wait(self._limit / 4):
            beat = self._beat
            if time.monotonic() - beat > self._limit and seen != beat:
                seen = beat
                self._tell(sys._current_frames().get(self._thread_id), time.monotonic() - beat)

    def _tell(self, frame: FrameType | None, seconds: float) -> None:
        who = self._whose()
        if who is None:
            logger.debug("the event loop has not run for %.1f s: the machine or another thread is busy", seconds)
            return
        self.blocked += 1
        place = _place(frame)
        cause = (who.partition(" (")[0], place)
        if cause in self._told or len(self._told) >= _MOST_CAUSES:
            return
        self._told.add(cause)
        logger.error(
            "the event loop has stood still for %.1f s in %s at %s: every session of this worker waits. Make that "
            "code async, or run it with asyncio.to_thread. This place is not logged again; bray_loop_blocked_total "
            "counts. The stack:\n%s",
            seconds,
            who,
            place,
            "".join(traceback.format_stack(frame)[-8:]).rstrip(),
        )

    def close(self) -> None:
        self._over.set()
        self._timer.cancel()
        self._thread.join(timeout=1.0)


def _place(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost code that is neither ours nor a library's; else of the innermost of
    all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, "<", *_LIBRARIES)):
            break
        frame = frame.f_back
    frame = frame or innermost
    return (
        "an unknown place"
        if frame is None
        else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    )
