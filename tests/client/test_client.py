"""bray.Client: what it sends, what it makes of replies, and when it sends again."""

import ast
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

import bray
from bray.client import Client, ClientError, ConnectFailed, ConnectionLost, SessionLost
from bray.client.wire import HttpReplies, TcpReplies
from tests.client_servers import SERVERS, BrayServer
from tests.server_for_tests import Server

BOTH = pytest.mark.parametrize("tcp", [False, True], ids=["http", "tcp"])


@pytest.fixture(params=SERVERS)
def server(request):
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def strict():
    with Server() as server:
        yield server


def client(server, tcp=False, **settings):
    return Client("127.0.0.1", server.port, **({"timeout": 10} | settings), tcp=tcp)


# --- a game -----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_game(server, tcp):
    with client(server, tcp) as c:
        answer = c.start()
        assert answer == b"started " + c.session.encode()
        for body in (b"", b"x", bytes(range(256)), b"y" * 300_000):
            assert c.tick(body) == body
        assert c.end(b"bye") == b"ended"
        name = c.session
    assert server.executed[0] == ("start", name, b"")
    assert server.executed[-1] == ("end", name, b"bye")
    assert [kind for kind, _, _ in server.executed] == ["start", "tick", "tick", "tick", "tick", "end"]


@BOTH
def test_names_of_existing_code(server, tcp):
    c = bray.Client("127.0.0.1", server.port, 10, tcp=tcp)
    c.start("match7", "red")
    assert c.session == "match7-agent-red"
    assert c._tick('{"obs": 1}') == b'{"obs": 1}'  # older code sends a str and gets bytes
    assert c.stop() == b"ended"
    c.start()
    first = c.session
    c.stop()
    c.start(agent="blue")
    assert c.session.endswith("-agent-blue")
    assert not c.session.startswith(first)
    c.stop()
    c.close()


@BOTH
def test_json(server, tcp):
    with client(server, tcp) as c:
        c.start()
        assert c.tick({"obs": [1, 2.5, None], "name": "é"}) == {"obs": [1, 2.5, None], "name": "é"}
        assert c.tick([1, 2]) == [1, 2]
        assert c.tick(bytearray(b"raw")) == b"raw"
        with pytest.raises(ClientError, match="JSON was expected; got b'ended'") as e:
            c.end({"last": True})
        assert e.value.code == "bad_reply"
        with pytest.raises(TypeError, match=r"expected bytes, str, a protobuf message, or a dict or list.*got int"):
            c.tick(3)


@BOTH
def test_stateless_step(server, tcp):
    with client(server, tcp) as c:
        assert c.step(b"one") == b"one"
        assert c.step({"a": 1}) == {"a": 1}
        assert c.session == ""


@BOTH
def test_fixed_session_outlives_its_client(server, tcp):
    c = client(server, tcp, session="mine")
    assert c.start() == b"started mine"
    c.close()
    other = client(server, not tcp, session="mine")  # no start here: the session is running
    assert other.tick(b"on") == b"on"
    assert other.end() == b"ended"
    c.start()
    assert c.session == "mine"
    c.end()
    c.close()
    other.close()


@BOTH
def test_names_beyond_ascii(server, tcp):
    with client(server, tcp, session="spiel-é-中") as c:
        assert c.start().decode() == "started spiel-é-中"
    assert server.executed[-1] == ("end", "spiel-é-中", b"")


@BOTH
def test_end_on_leaving_the_block(server, tcp):
    with client(server, tcp) as c:
        c.start("a")
    with pytest.raises(ZeroDivisionError), client(server, tcp) as c:  # noqa: PT012
        c.start("b")
        raise ZeroDivisionError
    assert [x[:2] for x in server.executed] == [("start", "a"), ("end", "a"), ("start", "b"), ("end", "b")]


@BOTH
def test_leaving_the_block_with_an_error_when_the_server_is_gone(strict, tcp):
    with pytest.raises(ZeroDivisionError), client(strict, tcp) as c:  # noqa: PT012
        c.start()
        strict.stop()
        raise ZeroDivisionError


# --- errors -----------------------------------------------------------------------------------------------------------


@BOTH
def test_lost_session(server, tcp):
    with client(server, tcp, session="gone") as c:
        with pytest.raises(SessionLost, match="start the session again") as e:
            c.tick(b"x")
        assert (e.value.status, e.value.code) == (404, "no_session")
        assert "gone" in e.value.message
        c.start()
        assert c.tick(b"x") == b"x"


@BOTH
def test_session_exists(server, tcp):
    with client(server, tcp) as a, client(server, tcp) as b:
        a.start("twice")
        with pytest.raises(ClientError) as e:
            b.start("twice")
        assert (e.value.status, e.value.code) == (409, "session_exists")
        assert a.tick(b"mine") == b"mine"


@BOTH
@pytest.mark.parametrize("kind", ["strict", "bray"])
def test_token_and_key(kind, tcp):
    settings = {"token": b"secret"} if kind == "strict" else {"tokens": ("secret",)}
    with SERVERS[kind](**settings) as server:
        with client(server, tcp, token="wrong") as c, pytest.raises(ClientError) as e:
            c.start()
        assert (e.value.status, e.value.code) == (401, "bad_token")
        assert server.executed == []
        with client(server, tcp, token="secret", key=b"k1") as c:
            c.start()
            reply = c.tick(b"key")
        assert reply == b"k1" if kind == "bray" else server.keys == [b"k1"] * 3


@BOTH
def test_actor_error(tcp):
    with BrayServer() as server, client(server, tcp) as c:
        c.start()
        with pytest.raises(ClientError) as e:
            c.tick(b"raise")
        assert (e.value.status, e.value.code) == (500, "actor_error")
        assert c.tick(b"on") == b"on"


@BOTH
def test_too_large(server, tcp):
    with client(server, tcp) as c:
        c.start()
        with pytest.raises(ClientError) as e:
            c.tick(b"x" * (32 << 20))
        assert (e.value.status, e.value.code) == (413, "too_large")  # read although the body could not be sent whole
        assert c.tick(b"on") == b"on"
    assert len(server.executed) == 3


@BOTH
@pytest.mark.parametrize(
    ("code", "status"), [("bad_kind", 400), ("tick_timeout", 504), ("actor_error", 500), ("malformed", 400)]
)
def test_status_of_every_code(strict, tcp, code, status):
    with client(strict, tcp) as c:
        c.start()
        strict.tell(f"refuse:{code}")
        with pytest.raises(ClientError, match=f"{status} {code}: this is {code}") as e:
            c.tick(b"x")
        assert (e.value.status, e.value.code) == (status, code)
        assert strict.requests == 2  # not sent again
        assert c.tick(b"x") == b"x"
        assert strict.connections == 1  # an error is an answer: the connection is kept


def test_status_table_is_the_servers():
    from bray.client.wire import STATUS
    from tests.server_for_tests import STATUS as KNOWN

    assert {code: status for code, (status, _) in KNOWN.items()}.items() <= STATUS.items()


def test_a_page_that_is_not_our_json():
    from bray.client.wire import Reply, reply_error

    error = reply_error(Reply(b"<html>Bad Gateway</html>", 502), "here")
    assert (error.status, error.code) == (502, "http_502")
    assert "Bad Gateway" in str(error)


def test_unknown_path_is_not_a_lost_session():
    from bray.client.wire import Reply, reply_error

    error = reply_error(Reply(b'{"error": "no_path", "message": "there is no /x"}', 404), "here")
    assert not isinstance(error, SessionLost)


def test_tick_before_start():
    with pytest.raises(ClientError, match="call start") as e:
        Client(port=1).tick(b"x")
    assert (e.value.status, e.value.code) == (0, "not_started")


@pytest.mark.parametrize("name", ["a\r\nstep_kind: end", "a\0", " a", "a\x7f"])
def test_names_that_would_break_the_framing(name):
    with pytest.raises(ValueError, match="session: expected text without control characters"):
        Client(session=name)
    with pytest.raises(ValueError, match="session"):
        Client(port=1).start(name)
    with pytest.raises(ValueError, match="token"):
        Client(token=name)
    with pytest.raises(ValueError, match="key"):
        Client(key=name.encode())


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="timeout"):
        Client(timeout=0)
    with pytest.raises(ValueError, match="retries"):
        Client(retries=-1)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(SessionLost(404, "no_session", "gone")))
    assert (type(error), error.status, error.code, error.message) == (SessionLost, 404, "no_session", "gone")


# --- sending again, and not -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("call", ["start", "tick", "end", "step"])
def test_overloaded_is_tried_again(strict, tcp, call):
    with client(strict, tcp) as c:
        if call in ("tick", "end"):
            c.start()
        strict.tell("overloaded", "overloaded")
        getattr(c, call)(*[b"x"] if call in ("tick", "step") else [])
        assert strict.requests == (4 if call in ("tick", "end") else 3)
        assert strict.connections == 1


@BOTH
def test_no_free_slot_is_tried_again(strict, tcp):
    with client(strict, tcp) as c:
        strict.tell("full", "full")
        assert c.start("g") == b"started g"
        strict.tell("full")
        assert c.step(b"x") == b"x"


@BOTH
def test_retries_are_bounded(strict, tcp):
    with client(strict, tcp, retries=2) as c:
        strict.tell(*["overloaded"] * 9)
        with pytest.raises(ClientError) as e:
            c.start()
        assert (e.value.status, e.value.code) == (503, "overloaded")
        assert strict.requests == 3
    with client(strict, tcp, retries=0) as c:
        with pytest.raises(ClientError):
            c.start()
        assert strict.requests == 4


def test_retry_after_is_honoured(strict):
    with client(strict) as c:
        strict.tell("overloaded:1")
        began = time.monotonic()
        c.start()
        assert time.monotonic() - began >= 1.0


def test_retry_after_beyond_the_timeout_fails_at_once(strict):
    with client(strict, timeout=5) as c:
        strict.tell("overloaded:60")
        with pytest.raises(ClientError) as e:
            c.start()
        assert e.value.retry_after == 60
        assert strict.requests == 1


@BOTH
@pytest.mark.parametrize("fault", ["cut", "half"])
def test_a_tick_that_may_have_been_executed_is_not_repeated(strict, tcp, fault):
    with client(strict, tcp) as c:
        c.start()
        strict.tell(fault)
        with pytest.raises(ConnectionLost, match="may have been executed") as e:
            c.tick(b"1")
        assert (e.value.status, e.value.code) == (0, "connection_lost")
        assert c.tick(b"2") == b"2"  # over a new connection, the session goes on
        assert [x[2] for x in strict.executed] == [b"", b"1", b"2"]


@BOTH
@pytest.mark.parametrize("fault", ["cut", "half", "garbage", "wrong_length", "negative"])
def test_an_idempotent_tick_is_repeated(strict, tcp, fault):
    with client(strict, tcp) as c:
        c.start()
        strict.tell(fault)
        assert c.tick(b"1", idempotent=True) == b"1"
        assert [x[2] for x in strict.executed] == [b"", b"1", b"1"]
        strict.tell(fault)
        assert c.step(b"2", idempotent=True) == b"2"


@BOTH
def test_end_and_start_are_not_repeated_either(strict, tcp):
    with client(strict, tcp) as c:
        strict.tell("cut")
        with pytest.raises(ConnectionLost):
            c.start("s")
        strict.tell("cut")
        with pytest.raises(ConnectionLost):
            c.end()
        assert [x[0] for x in strict.executed] == ["start", "end"]


@BOTH
def test_timeout(strict, tcp):
    with client(strict, tcp, timeout=0.3) as c:
        c.start()
        strict.tell("slow:1")
        with pytest.raises(ConnectionLost, match="no reply within the timeout") as e:
            c.tick(b"late")
        assert e.value.code == "timeout"
        c.timeout = 10
        assert c.tick(b"next") == b"next"  # the late reply is not taken for this one's
        assert strict.connections == 2


@BOTH
def test_interrupted_call_does_not_shift_the_replies(strict, tcp):
    with client(strict, tcp) as c:
        c.start()
        strict.tell("slow:1")

        def interrupt(*args):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                c.tick(b"1")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert c.tick(b"2") == b"2"


@BOTH
@pytest.mark.parametrize("fault", ["wrong_length", "negative", "garbage"])
def test_replies_that_cannot_be_read(strict, tcp, fault):
    with client(strict, tcp) as c:
        c.start()
        strict.tell(fault)
        with pytest.raises(ConnectionLost) as e:
            c.tick(b"1")
        assert e.value.code in ("bad_reply", "connection_lost")
        assert c.tick(b"2") == b"2"


@pytest.mark.parametrize("fault", ["other_time", "stray"])
def test_a_reply_to_somebody_else(strict, fault):
    with client(strict, tcp=True) as c:
        c.start()
        strict.tell(fault)
        with pytest.raises(ConnectionLost, match="expected the reply to request 2") as e:
            c.tick(b"1")
        assert e.value.code == "bad_reply"
        assert c.tick(b"2") == b"2"


# --- connections ------------------------------------------------------------------------------------------------------


@BOTH
def test_one_connection_for_a_game(strict, tcp):
    with client(strict, tcp) as c:
        c.start()
        for i in range(20):
            c.tick(b"%d" % i)
    assert strict.connections == 1


@BOTH
def test_idle_connection_that_the_server_closed_is_reopened(strict, tcp):
    with client(strict, tcp, retries=0) as c:
        c.start()
        strict.tell("answer_and_close")
        assert c.tick(b"1") == b"1"
        wait_for(lambda: not strict.open)
        assert c.tick(b"2") == b"2"
        strict.hang_up()
        assert c.tick(b"3") == b"3"
    assert [x[2] for x in strict.executed] == [b"", b"1", b"2", b"3", b""]
    assert strict.connections == 3


def test_connection_close_is_obeyed(strict):
    with client(strict) as c:
        strict.tell("close")
        c.start()
        wait_for(lambda: not strict.open)
        assert c.tick(b"x") == b"x"


@BOTH
def test_nobody_listens(tcp):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}.*Nothing was executed. Is the service running") as e:
        Client(port=port, timeout=5, retries=1, tcp=tcp).start()
    assert (e.value.status, e.value.code) == (0, "connect_failed")


@BOTH
def test_server_that_comes_up_late(tcp):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(Client(port=port, timeout=30, retries=50, tcp=tcp).step(b"x"))
    )
    thread.start()
    time.sleep(0.2)
    with Server(port=port):
        thread.join(30)
    assert answers == [b"x"]


def test_tcp_client_at_an_http_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            sock, _ = listener.accept()
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        c = Client(port=listener.getsockname()[1], tcp=True, timeout=5)
        with pytest.raises(ConnectionLost, match="got HTTP: use tcp=False, or switch use_tcp on"):
            c.start()


@pytest.mark.parametrize("form", ["continue", "chunked", "drip", "until_close"])
@pytest.mark.parametrize("body", [b"", b"x", b"hello\r\n\r\nworld" * 20])
def test_other_forms_of_http_replies(strict, form, body):
    with client(strict) as c:
        c.start()
        for _ in range(2):
            strict.tell(form)
            assert c.tick(body) == body
        assert c.tick(b"on") == b"on"


def test_tcp_reply_byte_by_byte(strict):
    with client(strict, tcp=True) as c:
        strict.tell("drip", "drip")
        c.start()
        assert c.tick(b"slow") == b"slow"


def wait_for(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# --- replies in pieces ------------------------------------------------------------------------------------------------

HTTP_REPLIES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:0\r\nConnection: Keep-Alive\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA ;x\r\n0123456789\r\n0\r\nT: 1\r\n\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"HTTP/1.1 204 No Content\r\n\r\n",
]


@pytest.mark.parametrize("data", HTTP_REPLIES)
def test_http_reply_cut_anywhere_reads_the_same(data):
    (whole,) = HttpReplies().feed(data)
    for at in range(1, len(data)):
        parser = HttpReplies()
        assert parser.feed(data[:at]) == []
        assert parser.eof() is None
        assert parser.feed(data[at:]) == [whole]


def test_http_reply_fields():
    reply = HttpReplies().feed(HTTP_REPLIES[2])[0]
    assert (reply.body, reply.status, reply.keep) == (b"hello0123456789", 200, True)
    reply = HttpReplies().feed(HTTP_REPLIES[3])[0]
    assert (reply.body, reply.status, reply.keep, reply.retry_after) == (b"{}", 503, False, 7.0)
    assert HttpReplies().feed(HTTP_REPLIES[0] + b"more")[0].keep is False  # out of step


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    ],
)
def test_http_that_is_none(data):
    with pytest.raises(ConnectionLost, match="bad_reply: expected"):
        HttpReplies().feed(data)


def test_framed_replies_cut_anywhere_read_the_same():
    from tests.server_for_tests import tcp_reply

    data = tcp_reply(b"a", b"one", 1) + tcp_reply(b"", b"", -2) + tcp_reply(b"bb", b"x" * 100, 3)
    for at in range(len(data) + 1):
        parser = TcpReplies()
        replies = parser.feed(data[:at]) + parser.feed(data[at:])
        assert [(r.session, r.body, r.time) for r in replies] == [
            (b"a", b"one", 1),
            (b"", b"", -2),
            (b"bb", b"x" * 100, 3),
        ]
        assert parser.eof() is None


# --- what it is made of -----------------------------------------------------------------------------------------------


def test_imports_the_standard_library_and_nothing_of_bray():
    for path in (Path(bray.__file__).parent / "client").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name}:{node.lineno} leaves the folder"
                names = [] if node.level else [node.module]
            else:
                continue
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names, f"{path.name}:{node.lineno} imports {name}"
                # what Windows lacks
                assert name.split(".")[0] not in {"fcntl", "resource", "pwd", "grp", "termios"}, f"{path.name}: {name}"


def test_works_where_poll_is_missing(monkeypatch, strict):
    import select

    monkeypatch.delattr(select, "poll")
    with client(strict) as c:
        c.start()
        strict.hang_up()
        assert c.tick(b"x") == b"x"


@BOTH
def test_protobuf_messages_in_and_out(server, tcp):
    wrappers = pytest.importorskip("google.protobuf.wrappers_pb2")
    with client(server, tcp) as c:
        c.start()
        output = wrappers.StringValue()
        assert c.tick(wrappers.StringValue(value="left"), output) is output
        assert output.value == "left"
        assert c.step(wrappers.StringValue(value="up"), wrappers.StringValue()).value == "up"
