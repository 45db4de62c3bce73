"""The C++ and C# clients, compiled here and played against a good and a misbehaving server by the same tests.

Each client has a driver (clients/cpp/driver.cpp, clients/csharp/Driver.cs) that obeys orders on its standard input.
"""

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.client_servers import SERVERS, BrayServer
from tests.server_for_tests import Server

CLIENTS = Path(__file__).parents[2] / "clients"
BOTH = pytest.mark.parametrize("protocol", ["http", "tcp"])


def build_cpp(folder, sanitize=False):
    if not (shutil.which("cmake") and (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"))):
        pytest.skip("no C++ compiler or no cmake")
    flags = "-g -O0 -fsanitize=address,undefined -fno-sanitize-recover=all" if sanitize else "-O0"
    if sanitize and not _compiles(folder, flags):
        pytest.skip("this compiler has no sanitizers")
    tls = "ON" if sanitize and _has_openssl(folder) else "OFF"
    run("cmake", "-S", CLIENTS / "cpp", "-B", folder, f"-DCMAKE_CXX_FLAGS={flags}", f"-DBRAY_TLS={tls}")
    run("cmake", "--build", folder, *["--target", "driver"] * sanitize)
    return [folder / "driver"]


def _compiles(folder, flags):
    (folder / "empty.cpp").write_text("int main() {}\n")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    command = [compiler, *flags.split(), folder / "empty.cpp", "-o", folder / "empty"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _has_openssl(folder):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    (folder / "tls.cpp").write_text(
        "#include <openssl/ssl.h>\nint main() { return SSL_CTX_new(TLS_client_method()) == 0; }\n"
    )
    command = [compiler, folder / "tls.cpp", "-o", folder / "tls", "-lssl", "-lcrypto"]
    return subprocess.run(command, capture_output=True).returncode == 0


def build_csharp(folder):
    sources = [CLIENTS / "csharp" / "BrayClient.cs", CLIENTS / "csharp" / "Driver.cs"]
    if shutil.which("mcs") and shutil.which("mono"):
        run("mcs", "-warn:4", "-warnaserror", "-langversion:7", f"-out:{folder / 'driver.exe'}", *sources)
        return ["mono", folder / "driver.exe"]
    if shutil.which("dotnet"):
        version = run("dotnet", "--version").split(".")[0]
        (folder / "driver.csproj").write_text(
            '<Project Sdk="Microsoft.NET.Sdk"><PropertyGroup><OutputType>Exe</OutputType>'
            f"<TargetFramework>net{version}.0</TargetFramework></PropertyGroup></Project>\n"
        )
        for source in sources:
            shutil.copy(source, folder)
        run("dotnet", "build", "-o", folder / "out", folder / "driver.csproj")
        return ["dotnet", folder / "out" / "driver.dll"]
    pytest.skip("neither mono nor dotnet is here")


def run(*command):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    return build_cpp(tmp_path_factory.mktemp("cpp"))


@pytest.fixture(scope="module")
def cpp_sanitized(tmp_path_factory):
    return build_cpp(tmp_path_factory.mktemp("sanitized"), sanitize=True)


@pytest.fixture(scope="module")
def csharp(tmp_path_factory):
    return build_csharp(tmp_path_factory.mktemp("csharp"))


class ClientFailed(Exception):
    """What the driver says of an exception of the client."""

    def __init__(self, line):
        super().__init__(line)
        _, self.kind, status, self.code, *message = line.split(" ")
        self.status, self.message = int(status), " ".join(message)


class Driver:
    def __init__(self, command, asynchronous):
        self.asynchronous = asynchronous
        self.process = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def new(self, server, protocol, timeout=10, retries=5, session="-", token="-", key="-", ca=""):
        self._order(f"new 127.0.0.1 {server.port} {protocol} {timeout} {retries} {session} {token} {key} {ca}".strip())
        return self

    def start(self, game="", agent="", data=b""):
        return self._call(f"start {game or '-'} {agent or '-'} {_hex(data)}")

    def tick(self, data, idempotent=False):
        return self._call(f"tick {_hex(data)}" + " idempotent" * idempotent)

    def end(self, data=b""):
        return self._call(f"end {_hex(data)}")

    def step(self, data, idempotent=False):
        return self._call(f"step {_hex(data)}" + " idempotent" * idempotent)

    @property
    def session(self):
        return self._order("session").decode()

    def _call(self, order):
        return self._order("async " * self.asynchronous + order)

    def _order(self, order):
        watch = threading.Timer(60, self.process.kill)  # a client that hangs fails its test
        watch.start()
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().rstrip("\n")
        watch.cancel()
        assert line, "the client ended or hung"
        if not line.startswith("ok "):
            raise ClientFailed(line)
        return b"" if line == "ok -" else bytes.fromhex(line[3:])


def _hex(data):
    return f"x*{len(data)}" if len(data) > 1 << 20 else data.hex() or "-"


@pytest.fixture(scope="module", params=["cpp", "cpp_sanitized", "csharp", "csharp async"])
def driver(request):
    name, _, asynchronous = request.param.partition(" ")
    driver = Driver(request.getfixturevalue(name), bool(asynchronous))
    yield driver
    driver.process.stdin.close()
    if name == "csharp":
        driver.process.kill()  # Mono 6.8 sometimes aborts in its own exit while its I/O thread is at work
        driver.process.wait(20)
    else:
        # A sanitizer that found something ends the program with another code; looking for leaks takes seconds.
        assert driver.process.wait(120) == 0


@pytest.fixture(params=SERVERS)
def server(request):
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def strict():
    with Server() as server:
        yield server


@BOTH
def test_a_game(driver, server, protocol):
    c = driver.new(server, protocol)
    c.start("match", "red")
    assert c.session == "match-agent-red"
    for body in (b"", b"x", bytes(range(256)), b"y" * 300_000):
        assert c.tick(body) == body
    assert c.end(b"bye") == b"ended"
    assert c.step(b"stateless") == b"stateless"
    c.start()
    first = c.session
    c.end()
    c.start()
    assert len(first) >= 32
    assert c.session != first
    c.end()
    games = [x for x in server.executed if x[1] == "match-agent-red"]
    assert [x[0] for x in games] == ["start", "tick", "tick", "tick", "tick", "end"]
    assert games[-1][2] == b"bye"


@BOTH
def test_errors(driver, server, protocol):
    c = driver.new(server, protocol, session="gone")
    with pytest.raises(ClientFailed) as e:
        c.tick(b"x")
    assert (e.value.kind, e.value.status, e.value.code) == ("SessionLost", 404, "no_session")
    assert "gone" in e.value.message
    c.start()
    with pytest.raises(ClientFailed) as e:
        c.start()
    assert (e.value.kind, e.value.status, e.value.code) == ("ClientError", 409, "session_exists")
    assert c.tick(b"on") == b"on"
    with pytest.raises(ClientFailed) as e:
        c.tick(b"x" * (17 << 20))
    assert (e.value.status, e.value.code) == (413, "too_large")
    assert c.tick(b"on") == b"on"


@BOTH
def test_token_and_key(driver, protocol):
    with Server(token=b"secret") as server:
        with pytest.raises(ClientFailed) as e:
            driver.new(server, protocol, token="wrong").start()
        assert (e.value.status, e.value.code) == (401, "bad_token")
        c = driver.new(server, protocol, token="secret", key="k1")
        c.start()
        c.tick(b"x")
        assert server.keys == [b"k1", b"k1"]


CERT, KEY, OTHER = (
    Path(__file__).parents[1] / "files" / "tls" / name for name in ("service.pem", "service.key", "other.pem")
)


@BOTH
def test_a_game_over_tls(driver, protocol):
    with BrayServer(tls_cert=str(CERT), tls_key=str(KEY)) as server:
        try:
            c = driver.new(server, protocol, ca=CERT)
        except ClientFailed as e:
            if "built without BRAY_TLS" not in e.message:
                raise
            pytest.skip("this client was built without TLS")
        c.start("match")
        for body in (b"", b"x", b"y" * 300_000):
            assert c.tick(body) == body
        server.running.call(lambda: [connection.transport.abort() for connection in list(server.server.front.open)])
        while server.running.call(lambda: len(server.server.front.open)):
            pass
        assert c.tick(b"again") == b"again"  # over a new connection
        assert c.end() == b"ended"
        with pytest.raises(ClientFailed) as e:
            driver.new(server, protocol, ca=OTHER).start()
        assert (e.value.kind, e.value.code) == ("ConnectFailed", "bad_certificate")


def test_the_secret_of_a_session_is_sent_by_itself(driver):
    with BrayServer(session_secrets=True, use_tcp=False) as server:
        c = driver.new(server, "http")
        for game in ("a", "b"):
            c.start(game)
            assert c.tick(b"x") == b"x"
        assert c.step(b"y") == b"y"
        assert c.end() == b"ended"
        with pytest.raises(ClientFailed) as e:
            driver.new(server, "http", session="a").tick(b"x")
        assert (e.value.status, e.value.code) == (403, "bad_secret")


@BOTH
def test_error_text_is_decoded(driver, strict, protocol):
    c = driver.new(strict, protocol)
    c.start()
    strict.tell("refuse:actor_error")
    with pytest.raises(ClientFailed, match="this is actor_error") as e:
        c.tick(b"x")
    assert (e.value.status, e.value.code) == (500, "actor_error")
    strict.message = 'a "quoted" \\ word, é 😀'
    strict.tell("refuse:tick_timeout")
    with pytest.raises(ClientFailed) as e:
        c.tick(b"x")
    assert e.value.message.startswith('a "quoted" \\ word, é 😀 (session')


@BOTH
def test_refusals_are_tried_again(driver, strict, protocol):
    c = driver.new(strict, protocol)
    strict.tell("full", "overloaded")
    c.start()
    strict.tell("overloaded:1")
    began = time.monotonic()
    assert c.tick(b"x") == b"x"
    assert protocol == "tcp" or time.monotonic() - began >= 1.0
    assert strict.connections == 1
    strict.tell(*["overloaded"] * 9)
    c = driver.new(strict, protocol, retries=2)
    before = strict.requests
    with pytest.raises(ClientFailed) as e:
        c.step(b"x")
    assert (e.value.status, e.value.code) == (503, "overloaded")
    assert strict.requests - before == 3


@BOTH
@pytest.mark.parametrize("fault", ["cut", "half", "garbage", "wrong_length", "negative"])
def test_lost_replies(driver, strict, protocol, fault):
    c = driver.new(strict, protocol)
    c.start()
    strict.tell(fault)
    with pytest.raises(ClientFailed) as e:
        c.tick(b"1")
    assert e.value.kind == "ConnectionLost"
    assert c.tick(b"2") == b"2"
    strict.tell(fault)
    assert c.tick(b"3", idempotent=True) == b"3"
    assert [x[2] for x in strict.executed if x[0] == "tick"] == [b"1", b"2", b"3", b"3"]


@BOTH
def test_timeout(driver, strict, protocol):
    c = driver.new(strict, protocol, timeout=0.5)
    c.start()
    strict.tell("slow:2")
    with pytest.raises(ClientFailed, match="no reply within the timeout") as e:
        c.tick(b"late")
    assert (e.value.kind, e.value.code) == ("ConnectionLost", "timeout")
    assert c.tick(b"next") == b"next"  # the late reply is not taken for this one's


@BOTH
def test_idle_connection_that_the_server_closed_is_reopened(driver, strict, protocol):
    c = driver.new(strict, protocol, retries=0)
    c.start()
    strict.hang_up()
    assert c.tick(b"1") == b"1"
    assert [x[2] for x in strict.executed] == [b"", b"1"]


@BOTH
def test_nobody_listens(driver, protocol):
    with Server() as server:
        pass
    with pytest.raises(ClientFailed, match="Is the service running") as e:
        driver.new(server, protocol, retries=1).start()
    assert (e.value.kind, e.value.status, e.value.code) == ("ConnectFailed", 0, "connect_failed")


@pytest.mark.parametrize("fault", ["other_time", "stray"])
def test_a_reply_to_somebody_else(driver, strict, fault):
    c = driver.new(strict, "tcp")
    c.start()
    strict.tell(fault)
    with pytest.raises(ClientFailed) as e:
        c.tick(b"1")
    assert (e.value.kind, e.value.code) == ("ConnectionLost", "bad_reply")
    assert c.tick(b"2") == b"2"


@pytest.mark.parametrize("form", ["continue", "chunked", "drip", "until_close", "close", "answer_and_close"])
def test_other_forms_of_http_replies(driver, strict, form):
    c = driver.new(strict, "http")
    c.start()
    for body in (b"", b"hello\r\n\r\nworld" * 20):
        strict.tell(form)
        assert c.tick(body) == body
        if form == "answer_and_close":
            while strict.open:
                time.sleep(0.01)
    assert c.tick(b"on") == b"on"


def test_tcp_reply_byte_by_byte(driver, strict):
    c = driver.new(strict, "tcp")
    strict.tell("drip", "drip")
    c.start()
    assert c.tick(b"slow") == b"slow"


def test_wrong_settings(driver, strict):
    with pytest.raises(ClientFailed, match="session: expected text without control characters"):
        driver.new(strict, "http").start("a\x07b")
    with pytest.raises(ClientFailed, match=r"call [sS]tart"):
        driver.tick(b"x")


@BOTH
def test_cpp_example_plays(cpp, server, protocol):
    example = cpp[0].parent / "example"
    out = run(example, "127.0.0.1", server.port, protocol, 3, "game1")
    assert out.splitlines() == [
        "started game1",
        *(f'{{"obs": [{i}, 0.5]}}' for i in range(3)),
        "ended",
    ]
    assert subprocess.run([example], capture_output=True).returncode == 2
