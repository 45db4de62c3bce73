"""The servers that the client tests play against: the strict one of server_for_tests.py, and Bray's own in a thread."""

from tests.server_for_tests import Server
from tests.serving_for_tests import running


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
        self.settings = {"actors_per_worker": 1000, "use_tcp": True} | settings

    def __enter__(self):
        self.actor = type("EchoActor", (EchoActor,), {"executed": [], "key": b""})
        self.executed = self.actor.executed
        self.running = running(self.actor, uvloop=False, **self.settings)
        self.server, self.port = self.running.server, self.running.port
        return self

    def __exit__(self, *_):
        self.running.close()


SERVERS = {"strict": Server, "bray": BrayServer}
