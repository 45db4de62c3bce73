"""One event loop per process, in a thread of its own, for all sockets that plain code uses."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger("bray.remote")

_STOP_S = 2.0  # how long the process waits for the loop when it ends
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_pid = 0
_running: set[Future[Any]] = set()  # the loop itself keeps only weak references


def loop() -> asyncio.AbstractEventLoop:
    """The loop; started when first asked for, and anew in a forked process."""
    global _loop, _thread, _pid
    if _loop is not None and _pid == os.getpid():
        return _loop
    with _lock:
        if _loop is None or _pid != os.getpid():
            made = _new_loop()
            _thread = threading.Thread(target=_run, args=(made,), name="bray-io", daemon=True)
            _thread.start()
            _loop, _pid = made, os.getpid()
        return _loop


@atexit.register
def _stop() -> None:
    """A loop that runs while the interpreter is taken down crashes the process."""
    if _loop is not None and _thread is not None and _pid == os.getpid():
        with contextlib.suppress(TimeoutError):  # a task that does not end
            submit(_cancel_all()).result(_STOP_S)
        _loop.call_soon_threadsafe(_loop.stop)
        _thread.join(_STOP_S)


async def _cancel_all() -> None:
    """Python complains of tasks that wait for ever when it takes their loop down."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def _run(it: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(it)
    while True:
        try:
            it.run_forever()
            return
        except BaseException:  # a user's task that calls sys.exit would end it for everybody
            logger.exception("a task ended the io loop; it goes on")


def is_loop() -> bool:
    """Whether the calling code runs on the loop."""
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


def call(function: Callable[[], object]) -> None:
    """Call a function on the loop: at once where this is the loop, else soon."""
    if is_loop():
        function()
    else:
        loop().call_soon_threadsafe(function)


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine on the loop; the result comes as a future of threads."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop())


def run(coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """Run a coroutine on the loop and wait for it, from any other thread."""
    if is_loop():
        coroutine.close()
        raise RuntimeError("io.run waits, and the loop itself must not: await the coroutine")
    future = submit(coroutine)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


def spawn(coroutine: Coroutine[Any, Any, Any], what: str = "a background task") -> Future[Any]:
    """Run a coroutine on the loop and forget it; an error is logged. The future may be cancelled."""
    future = submit(coroutine)
    _running.add(future)

    def ended(f: Future[Any]) -> None:
        _running.discard(f)
        if not f.cancelled() and (error := f.exception()) is not None:
            logger.error("%s failed", what, exc_info=error)

    future.add_done_callback(ended)
    return future
