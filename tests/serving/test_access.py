"""Who may reach what: tokens, session secrets, limits per client address, the admin port, and the audit log of it
all."""

import asyncio
import json
import logging

import pytest

import bray
from bray.cli.main import main
from bray.config import ConfigSource
from bray.errors import ConfigError
from bray.service import configure
from bray.serving.access import Access, Audit
from bray.serving.addresses import AddressCounts, Proxies, Rates, client_key
from bray.serving.admin import AdminGuard
from bray.serving.background import BackgroundServer
from bray.serving.config import ServiceConfig
from tests.serving.test_serving_workers import connections, metrics, service
from tests.serving_for_tests import Echo, Wire, http_request, on_loop, running


def code(body):
    return json.loads(body)["error"]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


# --- the admin port ---------------------------------------------------------------------------------------------------


class Pins:
    """A route of the admin port that can be changed, as /models of `bray serve`."""

    def __init__(self, **config):
        self.changes = []
        self._config = ServiceConfig(port=0, admin_port=0, **config)

    def __enter__(self):
        def prepare(server):
            server.routes["models"] = self._route

        self._running = BackgroundServer(Echo, self._config, prepare)
        return self

    def __exit__(self, *_):
        self._running.close()

    async def _route(self, method, path, body):
        if method == "POST":
            self.changes.append(body)
        return 200, "application/json", b"[]"

    def ask(self, method="POST", path="/models/m", body=b'{"pin": 1}', **headers):
        """(status, error code) of a request."""
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in ({"Host": "127.0.0.1"} | headers).items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""])
        with Wire(self._running.admin_port) as wire:
            status, _, reply = wire.send(head.encode() + body).response()
        return (status, "") if status == 200 else (status, code(reply))


def test_no_page_can_pin_a_model_and_nobody_without_a_token():
    with Pins() as pins:  # as it is started by default
        assert pins.ask(Origin="http://evil.example") == (403, "foreign_origin")
        assert pins.ask() == (403, "no_admin_token")
        assert pins.ask("GET")[0] == 200
    assert pins.changes == []


def test_a_change_needs_the_admin_token_and_comes_from_no_other_site(caplog):
    caplog.set_level(logging.INFO)
    good = {"Authorization": "Bearer s3cret-1"}
    with Pins(admin_tokens=("s3cret-1",)) as pins:
        assert pins.ask() == (401, "bad_admin_token")
        assert pins.ask(Authorization="Bearer s3cret-2") == (401, "bad_admin_token")
        assert pins.ask(Authorization="Basic s3cret-1") == (401, "bad_admin_token")
        for header in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            assert pins.ask(**good, **header) == (403, "foreign_origin")
            assert pins.ask("GET", **header) == (403, "foreign_origin")
        rebound = {"Host": "evil.example:8001", "Origin": "http://evil.example:8001", "Sec-Fetch-Site": "same-origin"}
        assert pins.ask(**good, **rebound) == (403, "foreign_host")
        assert pins.ask("GET", **rebound) == (403, "foreign_host")
        assert pins.ask("OPTIONS", Origin="http://evil.example") == (403, "foreign_origin")
        assert pins.changes == []
        assert pins.ask(**good) == (200, "")
        assert pins.ask(**good, Host="localhost:8001", Origin="http://localhost:8001") == (200, "")
    assert pins.changes == [b'{"pin": 1}'] * 2
    lines = [r.getMessage() for r in caplog.records if r.name == "bray.serving.audit"]
    assert len([x for x in lines if "/models/m" in x and "pin" in x and "answered with 200" in x]) == 2
    for refusal in ("bad_admin_token", "foreign_origin", "foreign_host"):  # one line of each class, not one per request
        assert len([x for x in lines if x.startswith(f"refused {refusal} from 127.0.0.1")]) == 1
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(("host", "known"), [
    ("127.0.0.1:8001", True), ("[::1]:8001", True), ("10.1.2.3", True), ("localhost", True), ("LOCALHOST.:80", True),
    ("bray.internal:8001", True), ("evil.example", False), ("127.0.0.1.evil.example", False), ("[", False),
    ("localhost.evil", False),
])  # fmt: skip
def test_the_admin_port_answers_to_its_own_names_only(host, known):
    guard = AdminGuard(ServiceConfig(admin_names=("bray.internal",)), Audit())
    refusal = guard.refusal("GET", "/models", {"host": host}, "127.0.0.1")
    assert (refusal is None) is known
    assert guard.refusal("GET", "/readyz", {"host": host}, "10.0.0.9") is None  # a probe may call it as it likes


def test_other_machines_read_probes_and_metrics_and_the_rest_with_the_token():
    guard = AdminGuard(ServiceConfig(admin_tokens=("t",)), Audit())
    for path in ("/healthz", "/readyz", "/metrics"):
        assert guard.refusal("GET", path, {}, "10.0.0.9") is None
        assert guard.refusal("POST", path, {}, "10.0.0.9").code == "bad_admin_token"
    for path in ("/models", "/training", "/version"):
        assert guard.refusal("GET", path, {}, "10.0.0.9").code == "bad_admin_token"
        assert guard.refusal("GET", path, {"authorization": "Bearer t"}, "10.0.0.9") is None
        for here in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            assert guard.refusal("GET", path, {}, here) is None


def test_refusals_are_logged_once_a_minute_and_counted(caplog):
    clock = Clock()
    audit = Audit(clock)
    for _ in range(1000):
        audit.refused("bad_token", "1.2.3.4", "a wrong token")
    clock.now += 61
    audit.refused("bad_token", "1.2.3.5", "a wrong token")
    assert [r.getMessage() for r in caplog.records] == [
        "refused bad_token from 1.2.3.4: a wrong token",
        "refused bad_token from 1.2.3.5: a wrong token (and 999 more like this since the last such line)",
    ]
    assert audit.counts["bad_token"] == 1001


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_of_a_file_are_rotated_while_the_service_runs(tmp_path, caplog):
    file = tmp_path / "tokens"
    file.write_text("# games of May\nfirst\n\n")
    with running(token_file=str(file)) as server, Wire(server.port) as wire:

        def statuses(*tokens):
            on_loop(server, server.access.refresh)  # what the service does every second
            return [wire.step("auto", None, b"x", token=token)[0] for token in tokens]

        assert statuses("first", "second", "", "# games of May") == [200, 401, 401, 401]
        file.write_text("second\nfirst\n")
        assert statuses("first", "second") == [200, 200]
        file.write_text("second\n")
        assert statuses("first", "second") == [401, 200]
        file.write_text("\n")  # it must not let everybody in
        assert statuses("second", "") == [200, 401]
        assert "has none" in caplog.text
        file.unlink()
        assert statuses("second", "") == [200, 401]


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "x" * 513])
def test_a_token_file_that_has_no_token_stops_the_start(tmp_path, content):
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="token_file"):
        running(token_file=str(file))


def test_tokens_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("BRAY_TOKEN", "one two")
    monkeypatch.setenv("BRAY_ADMIN_TOKEN", "boss")
    config, _ = configure([ConfigSource("test", {"port": 0, "admin_port": 0})])
    with BackgroundServer(Echo, config) as server, Wire(server.port) as wire:
        assert [wire.step("auto", None, b"x", token=t)[0] for t in ("one", "two", "boss", "")] == [200, 200, 401, 401]


def test_a_token_on_the_command_line_is_warned_of(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nothing"), "--token", "s3cret"]) == 2
    err = capsys.readouterr().err
    assert "ps" in err
    assert "--token-file" in err
    assert "s3cret" not in err


def test_a_wrong_token_is_in_the_audit_log_and_the_numbers(caplog):
    with running(tokens=("right",)) as server, Wire(server.port) as wire:
        assert wire.step("auto", None, token="wrong")[0] == 401
        assert metrics(server.admin_port)['bray_access_refused_total{code="bad_token"}'] == "1"
    assert "refused bad_token from 127.0.0.1: a wrong token" in caplog.text


# --- session secrets --------------------------------------------------------------------------------------------------


def start(wire, session):
    """The secret of a new session."""
    status, headers, _ = wire.send(http_request("start", session)).response()
    assert status == 200
    return headers["session_secret"]


def test_nobody_ticks_or_ends_a_session_without_its_secret():
    with running(session_secrets=True) as server, Wire(server.port) as mine, Wire(server.port) as other:
        secret = start(mine, "g")
        theirs = start(other, "h")
        assert len(secret) == 32
        assert secret != theirs
        for kind in ("tick", "end", "stop"):
            for wrong in ({}, {"session_secret": theirs}, {"session_secret": secret[:-1]}, {"session_secret": ""}):
                status, reply = other.step(kind, "g", **wrong)
                assert (status, code(reply)) == (403, "bad_secret")
                assert secret not in reply.decode()
        assert mine.step("tick", "g", b"x", session_secret=secret) == (200, b"x")
        assert other.step("start", "g")[0] == 409
        assert other.step("auto", None, b"y") == (200, b"y")
        assert mine.step("stop", "g", session_secret=secret) == (200, b"1 ticks")
        again = start(other, "g")  # a name that is used again is not open to whoever had it
        assert mine.step("tick", "g", b"x", session_secret=secret)[0] == 403
        assert other.step("tick", "g", b"x", session_secret=again) == (200, b"x")


def test_a_start_behind_an_end_gets_a_secret_of_its_own():
    with running(session_secrets=True) as server, Wire(server.port) as wire:
        secret = start(wire, "g")
        wire.send(http_request("end", "g", session_secret=secret) + http_request("start", "g"))
        assert wire.response()[0] == 200
        status, headers, _ = wire.response()
        assert status == 200
        assert wire.step("tick", "g", b"x", session_secret=headers["session_secret"]) == (200, b"x")
        assert wire.step("tick", "g", b"x", session_secret=secret)[0] == 403


def test_the_python_clients_carry_the_secret_by_themselves():
    async def play(port):
        async with bray.AsyncClient(port=port) as client:
            await client.start()
            return await client.tick(b"async")

    with running(session_secrets=True) as server:
        with bray.Client(port=server.port, session="g") as client:
            for _ in range(2):
                client.start()
                assert client.tick(b"x") == b"x"
                with (
                    bray.Client(port=server.port, session="g", retries=0) as thief,
                    pytest.raises(bray.client.ClientError, match="bad_secret"),
                ):
                    thief.tick(b"x")
                assert client.end() == b"1 ticks"
            assert client.step(b"y") == b"y"
        assert asyncio.run(play(server.port)) == b"async"


def test_secrets_hold_whichever_worker_a_request_reaches():
    with service(session_secrets=True, use_tcp=False) as s:
        wires = connections(s.port)
        secrets = {f"s{i}": start(wires[i % 16], f"s{i}") for i in range(20)}
        for k in range(4):
            for i, (name, secret) in enumerate(secrets.items()):
                wire = wires[(i + k) % 16]
                assert wire.step("tick", name)[0] == 403
                assert wire.step("tick", name, session_secret=secret)[0] == 200
        assert int(metrics(s.admin)["bray_requests_forwarded_total"]) > 0
        for i, (name, secret) in enumerate(secrets.items()):
            assert wires[(i + 1) % 16].step("end", name)[0] == 403
            assert wires[(i + 2) % 16].step("end", name, session_secret=secret) == (200, b"bye")


def test_framed_tcp_and_secrets_do_not_start_together():
    with pytest.raises(ConfigError, match="framed TCP has no place"):
        ServiceConfig(session_secrets=True, use_tcp=True)


# --- limits per client address ----------------------------------------------------------------------------------------


def from_address(port, address):
    """A connection whose client is another address of this machine."""
    import socket

    wire = Wire.__new__(Wire)
    wire.sock, wire.buffer = socket.create_connection(("127.0.0.1", port), 10, (address, 0)), b""
    return wire


def test_one_client_cannot_take_all_slots():
    with running(actors_per_worker=400, max_sessions_per_address=5) as server, Wire(server.port) as greedy:
        replies = []
        for i in range(50):
            replies.append(greedy.send(http_request("start", f"g{i}")).response())
        assert [status for status, _, _ in replies] == [200] * 5 + [429] * 45
        _, headers, body = replies[-1]
        assert headers["retry-after"] == "1"
        assert code(body) == "too_many_sessions"
        with from_address(server.port, "127.0.0.2") as other:
            assert other.step("start", "other")[0] == 200
        assert greedy.step("auto", None)[0] == 429  # takes a slot, if for a moment
        assert greedy.step("end", "g0")[0] == 200
        assert greedy.step("auto", None)[0] == 200
        assert greedy.step("start", "again")[0] == 200
        assert greedy.step("start", "too much")[0] == 429


def test_slots_come_back_from_sessions_that_failed_or_were_lost():
    class Fails(Echo):
        async def start(self, session, data):
            if data == b"raise":
                raise RuntimeError("told to")

    with running(Fails, max_sessions_per_address=1) as server, Wire(server.port) as wire:
        for _ in range(3):
            assert wire.step("start", "g", b"raise")[0] == 500
        assert wire.step("start", "g")[0] == 200
        on_loop(server, lambda: server.sessions.lose(server.sessions.sessions[b"g"]))  # as when it is idle for too long
        assert wire.step("start", "h")[0] == 200


def test_the_limit_on_sessions_holds_for_all_workers_together():
    with service(max_sessions_per_address=7, actors_per_worker=100) as s:
        wires = connections(s.port)
        statuses = [wires[i % 16].step("start", f"s{i}")[0] for i in range(32)]
        assert statuses.count(200) == 7
        assert int(metrics(s.admin)["bray_requests_forwarded_total"]) >= 0
        with from_address(s.port, "127.0.0.2") as other:
            assert other.step("start", "other")[0] == 200


def test_one_client_cannot_take_all_connections():
    with running(max_connections_per_address=2) as server:
        with Wire(server.port) as a, Wire(server.port) as b:
            assert a.step("auto", None, b"x") == b.step("auto", None, b"x") == (200, b"x")
            with Wire(server.port) as third:
                status, headers, body = third.response()
                assert (status, headers["retry-after"], code(body)) == (429, "1", "too_many_connections")
                assert third.closed()
            with from_address(server.port, "127.0.0.2") as other:
                assert other.step("auto", None, b"x") == (200, b"x")
            a.sock.close()
            until_free(server)
            with Wire(server.port) as again:
                assert again.step("auto", None, b"x") == (200, b"x")


def test_a_flood_of_connections_leaves_room_for_others():
    with running(max_connections_per_address=1, max_connections=4) as server, Wire(server.port) as first:
        assert first.step("auto", None)[0] == 200
        flood = connections(server.port, 12)
        until_refused(server, 12)
        with from_address(server.port, "127.0.0.2") as other:
            assert other.step("auto", None, b"x") == (200, b"x")
        for wire in flood:
            wire.sock.close()


def until_refused(server, n):
    while on_loop(server, lambda: server.front.refused) < n:
        pass


def until_free(server):
    """Until the service has seen that a client is gone."""
    while on_loop(server, lambda: len(server.front.open)) > 1:
        pass


def test_a_connection_that_speaks_either_protocol_counts_once():
    with running(max_connections_per_address=2, use_tcp=True) as server, Wire(server.port) as a, Wire(server.port) as b:
        assert a.step("auto", None, b"x") == (200, b"x")
        assert b.ask(b"auto", b"", b"x")[1] == b"x"
        with Wire(server.port) as third:
            assert third.closed()
        assert a.step("auto", None, b"x") == (200, b"x")


def test_requests_per_second_are_counted_by_address():
    with running(max_requests_per_address=0.0001, use_tcp=True) as server, Wire(server.port) as wire:
        assert wire.step("auto", None)[0] == 200
        status, headers, body = wire.send(http_request("auto")).response()
        assert (status, headers["retry-after"], code(body)) == (429, "1", "too_many_requests")
        with Wire(server.port) as tcp:
            assert tcp.ask(b"auto", b"")[1]["error"] == "too_many_requests"
        with from_address(server.port, "127.0.0.2") as other:
            assert other.step("auto", None)[0] == 200


def test_a_rate_allows_a_burst_and_then_so_many_a_second():
    clock = Clock()
    rates = Rates(10, clock)
    assert [rates.take("a") for _ in range(12)] == [True] * 10 + [False] * 2
    assert rates.take("b")
    clock.now += 0.5
    assert [rates.take("a") for _ in range(7)] == [True] * 5 + [False] * 2
    clock.now += 3600
    rates.forget()
    assert [rates.take("a") for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_proxy_speaks_for_its_clients_and_nobody_else_does():
    settings = {"max_sessions_per_address": 1}
    with running(trusted_proxies=("127.0.0.1",), **settings) as server, Wire(server.port) as proxy:

        def begin(name, forwarded):
            return proxy.step("start", name, x_forwarded_for=forwarded)[0]

        assert begin("a", "203.0.113.1") == 200
        assert begin("b", "203.0.113.2") == 200
        assert begin("c", "203.0.113.2") == 429
        assert begin("d", "198.51.100.7, 203.0.113.2") == 429  # what stands before it the client has made up
        assert begin("e", "203.0.113.3, 127.0.0.1") == 200  # a second proxy of ours
        with from_address(server.port, "127.0.0.2") as liar:
            assert liar.step("start", "f", x_forwarded_for="203.0.113.9")[0] == 200
            assert liar.step("start", "g", x_forwarded_for="203.0.113.8")[0] == 429


def test_addresses_are_counted_as_one_customer_has_them():
    assert client_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_key("2001:db8:1:2:3:4:5:6") == client_key("2001:db8:1:2::1") == "2001:db8:1:2::/64"
    assert client_key("2001:db8:1:3::1") == "2001:db8:1:3::/64"
    proxies = Proxies(("10.0.0.0/8", "2001:db8:1:2::/64"))
    assert client_key("2001:db8:1:2::9") in proxies
    assert proxies.client("10.0.0.1", b"203.0.113.1:4711") == "203.0.113.1"
    assert proxies.client("10.0.0.1", b"unknown") == "10.0.0.1"
    with pytest.raises(ConfigError, match="trusted_proxies"):
        Access(ServiceConfig(trusted_proxies=("proxy.example",)))


def test_counts_are_shared_and_a_worker_that_comes_back_begins_anew(tmp_path):
    workers = [AddressCounts(3, "sessions") for _ in range(2)]
    for row, counts in enumerate(workers):
        counts.share(tmp_path, row, 2)
    assert [workers[i % 2].take("a") for i in range(5)] == [True] * 3 + [False] * 2
    assert workers[1].take("b")
    workers[0].give("a")
    assert workers[1].take("a")
    replaced = AddressCounts(3, "sessions")
    replaced.share(tmp_path, 1, 2)  # what the dead one had is free
    assert [replaced.take("a") for _ in range(3)] == [True, True, False]
