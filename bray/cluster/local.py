"""All components in this process: for tests, debugging and notebooks."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from concurrent.futures import Future
from typing import Any

from bray.cluster import io
from bray.cluster.protocol import CALL_TIMEOUT, Hosted, Member, Node, missing, name_taken
from bray.cluster.session import session
from bray.errors import Unreachable
from bray.inference.host import Promise

logger = logging.getLogger("bray.remote")


class LocalMember:
    """A worker of this process."""

    def __init__(self, name: str):
        self.name = name

    def call(
        self, method: str, *args: Any, timeout: float = CALL_TIMEOUT, retry: bool = False, **kwargs: Any
    ) -> Promise:
        cluster = session().cluster
        assert isinstance(cluster, LocalCluster)
        promise = Promise()
        try:
            result = getattr(cluster.hosted(self.name).worker, method)(*args, **kwargs)
        except BaseException as e:
            promise.set_exception(e)
            return promise
        if not inspect.isawaitable(result):
            promise.set_result(result)
            return promise

        async def bounded() -> Any:
            try:
                return await asyncio.wait_for(result, timeout)
            except TimeoutError:
                raise Unreachable(f"{self.name} did not answer {method} in {timeout:g} s") from None

        io.submit(bounded()).add_done_callback(lambda done: _settle(promise, done))
        return promise

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        self.call(method, *args, **kwargs)


def _settle(promise: Promise, done: Future[Any]) -> None:
    error = Unreachable("the call was cancelled") if done.cancelled() else done.exception()
    promise.settle(None if error is not None else done.result(), error)


class LocalCluster:
    kind = "local"

    def __init__(self) -> None:
        self._hosted: dict[str, Hosted] = {}
        self._lock = threading.Lock()

    def start(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0,
        node: str | None = None,
        **kwargs: Any,
    ) -> Member:
        if name in self._hosted:
            raise name_taken(name)
        hosted = Hosted(name, lambda: cls(*args, **kwargs))
        if hosted.failure is not None:
            raise hosted.failure.error
        with self._lock:
            self._hosted[name] = hosted
        return LocalMember(name)

    def hosted(self, name: str) -> Hosted:
        found = self._hosted.get(name)
        if found is None:
            raise missing(name, self._hosted)
        return found

    def find(self, name: str) -> Member:
        self.hosted(name)
        return LocalMember(name)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(n for n in self._hosted if n.startswith(prefix))

    def pid(self, name: str) -> int:
        self.hosted(name)
        return os.getpid()

    def stop(self, name: str) -> None:
        with self._lock:
            hosted = self._hosted.pop(name, None)
        if hosted is not None:
            hosted.close()

    def nodes(self) -> list[Node]:
        return [Node("local", "127.0.0.1", True, float(os.cpu_count() or 1), 0.0, 0.0)]

    def put(self, value: Any) -> Any:
        return _Ref(value)

    def get(self, ref: Any) -> Any:
        return ref.value

    def host(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        for name in reversed(list(self._hosted)):
            try:
                self.stop(name)
            except Exception:
                logger.exception("%s did not end well", name)


class _Ref:
    def __init__(self, value: Any):
        self.value = value
