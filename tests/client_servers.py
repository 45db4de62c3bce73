"""The servers that the client tests play against: the strict one of server_for_tests.py, and Bray's own in a thread."""

import asyncio
import threading

from tests.server_for_tests import Server


class EchoActor:
    """Answers as the Actor of server_for_tests.py does, and remembers what it did."""

    executed: list = []  # noqa: RUF012 (all Actors write into one list; the server makes a class per test)

    def start(self, session, data):
        self.session = session
        self.executed.append(("start", session, data))
        return b"started " + session.encode()

    def tick(self, data):
        if data == b"raise":
            raise RuntimeError("the Actor was told to")
        if data == b"key":
            return self.key
        self.executed.append(("tick", self.session, data))
        return data

    def end(self, data):
        self.executed.append(("end", self.session, data))
        return b"ended"


class BrayServer:
    """bray.serving's server in a thread of its own."""

    def __init__(self, **settings):
        self.settings = {"actors_per_worker": 1000} | settings

    def __enter__(self):
        self.actor = type("EchoActor", (EchoActor,), {"executed": [], "key": b""})
        self.executed = self.actor.executed
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self.thread.start()
        assert ready.wait(20)
        return self

    async def _main(self, ready):
        from bray.serving.config import ServiceConfig
        from bray.serving.server import Server as GameServer

        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.server = GameServer(self.actor, ServiceConfig(port=0, admin_port=0, use_tcp=True, **self.settings))
        await self.server.start()
        self.port = self.server.port
        ready.set()
        await self.over.wait()
        await self.server.close()

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


SERVERS = {"strict": Server, "bray": BrayServer}
