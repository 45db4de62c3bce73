"""A game service in a thread of this process: for notebooks, tests and demos. A service of its own is
`workers.serve`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from bray.serving.config import ServiceConfig
from bray.serving.server import Prepare, Server
from bray.serving.workers import run_loop


class BackgroundServer:
    """Serves until `close()`, or to the end of a `with`."""

    def __init__(
        self, make_actor: Callable[[], Any], config: ServiceConfig, prepare: Prepare | None = None, fast: bool = True
    ):
        self.server = Server(make_actor, config)
        self._prepare = prepare
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(fast,), name="bray-serve", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def admin_port(self) -> int:
        return self.server.admin_port

    def _run(self, fast: bool) -> None:
        try:
            run_loop(self._main(), fast)
        except BaseException as e:
            self._error = e
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        await self.server.prepare(self._prepare)
        try:
            await self.server.start()
        except BaseException:
            for closer in self.server.close_hooks:  # what was prepared ends with it
                await closer()
            raise
        self._ready.set()
        await self._over.wait()
        await self.server.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function (or make a coroutine) in the service's own loop and wait for what it returns."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
