"""TLS on the port of the games, with real clients over real sockets. The certificates of tests/data/tls are good until
2120."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

import bray
from bray.cli.main import main
from bray.errors import ConfigError
from bray.serving.config import ServiceConfig
from tests.serving.test_serving_workers import service
from tests.serving_for_tests import on_loop, running

FILES = Path(__file__).parents[1] / "files" / "tls"
CERT, KEY = str(FILES / "service.pem"), str(FILES / "service.key")
OTHER = str(FILES / "other.pem")
TLS = {"tls_cert": CERT, "tls_key": KEY}


@pytest.mark.parametrize("uvloop", [True, False])
@pytest.mark.parametrize("tcp", [False, True])
def test_the_clients_play_over_tls(tcp, uvloop):
    async def play(port):
        async with bray.AsyncClient(port=port, tcp=tcp, tls=CERT) as client:
            await client.start()
            return [await client.tick(body) for body in bodies]

    bodies = [b"", b"x", b"y" * 300_000]
    with running(use_tcp=True, uvloop=uvloop, **TLS) as server:
        with bray.Client(port=server.port, tcp=tcp, tls=CERT) as client:
            client.start()
            assert [client.tick(body) for body in bodies] == bodies
        assert asyncio.run(play(server.port)) == bodies
        assert on_loop(server, lambda: server.front.accepted) == 2  # the connection is kept


def test_many_sessions_share_one_connection_over_tls():
    async def play(port):
        async with bray.client.AsyncConnection(port=port, tls=CERT) as connection:
            games = [connection.session() for _ in range(20)]
            await asyncio.gather(*(game.start() for game in games))
            return await asyncio.gather(*(game.tick(b"%d" % i) for i, game in enumerate(games)))

    with running(use_tcp=True, **TLS) as server:
        assert asyncio.run(play(server.port)) == [b"%d" % i for i in range(20)]


def test_several_workers_speak_tls():
    with service(use_tcp=False, **TLS) as s:
        clients = [bray.Client(port=s.port, tls=CERT, session=f"s{i}") for i in range(16)]
        pids = {int(client.start()) for client in clients}
        assert len(pids) == 2
        for i, client in enumerate(clients):
            with bray.Client(port=s.port, tls=CERT, session=f"s{(i + 1) % 16}") as other:  # whichever worker has it
                other.tick(b"x")
            assert client.tick(b"x")


def test_a_client_that_does_not_trust_the_certificate_sends_nothing():
    async def play(port):
        async with bray.AsyncClient(port=port, tls=OTHER) as client:
            await client.start()

    with running(**TLS) as server:
        for trusted in (OTHER, True):
            with pytest.raises(bray.client.ConnectFailed) as e:
                bray.Client(port=server.port, tls=trusted).start()
            assert e.value.code == "bad_certificate"
        with pytest.raises(bray.client.ConnectFailed, match="not trusted"):
            asyncio.run(play(server.port))
        assert on_loop(server, lambda: sum(sum(c.values()) for c in server.sessions.counts)) == 0


def test_a_certificate_is_good_for_its_own_names_only():
    with running(host="127.0.0.2", **TLS) as server, pytest.raises(bray.client.ConnectFailed, match="not trusted"):
        bray.Client("127.0.0.2", server.port, tls=CERT).start()


def test_plain_clients_and_old_tls_are_turned_away():
    with running(**TLS) as server:
        with pytest.raises(bray.client.ClientError):
            bray.Client(port=server.port, retries=0, timeout=5).start()
        old = ssl.create_default_context(cafile=CERT)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(bray.client.ConnectFailed):
            bray.Client(port=server.port, tls=old, retries=0).start()
        with bray.Client(port=server.port, tls=CERT) as client:
            client.start()


def test_the_client_notices_that_the_server_closed_an_idle_connection():
    with running(**TLS) as server, bray.Client(port=server.port, tls=CERT, retries=0) as client:
        client.start()

        def close_all():
            for connection in list(server.front.open):
                connection.transport.abort()

        on_loop(server, close_all)
        while on_loop(server, lambda: len(server.front.open)):
            pass
        assert client.tick(b"x") == b"x"
        assert on_loop(server, lambda: server.front.accepted) == 2


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path, caplog):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(CERT, cert)
    shutil.copy(KEY, key)
    with running(tls_cert=str(cert), tls_key=str(key)) as server:

        def trusted(file):
            with bray.Client(port=server.port, tls=file) as client:
                client.start()
            return True

        assert trusted(CERT)
        cert.write_text("half a certificate")
        on_loop(server, server.refresh)  # what the service does every second
        assert "stays as it is" in caplog.text
        assert trusted(CERT)
        shutil.copy(OTHER, cert)
        shutil.copy(FILES / "other.key", key)
        on_loop(server, server.refresh)
        assert trusted(OTHER)


@pytest.mark.parametrize("wrong", [
    {"tls_cert": "/nowhere.pem"}, {"tls_cert": CERT}, {"tls_cert": CERT, "tls_key": str(FILES / "other.key")},
    {"tls_cert": __file__},
])  # fmt: skip
def test_a_certificate_that_cannot_be_used_is_one_message(wrong):
    with pytest.raises(ConfigError, match="tls_cert"):
        running(**wrong)


def test_a_key_without_a_certificate_is_refused():
    with pytest.raises(ConfigError, match="tls_key without tls_cert"):
        ServiceConfig(tls_key=KEY)


def test_the_fake_games_play_with_every_protection_on(tmp_path, capsys):
    (tmp_path / "tokens").write_text("one\n")
    with running(
        token_file=str(tmp_path / "tokens"), session_secrets=True, max_sessions_per_address=8, **TLS
    ) as server:
        where = [
            "--port",
            str(server.port),
            "--admin-port",
            str(server.admin_port),
            "--seconds",
            "0.2",
            "--sessions",
            "8",
        ]
        assert main(["fake", "gamecore", *where, "--token-file", str(tmp_path / "tokens"), "--tls", CERT]) == 0
    assert "no errors" in capsys.readouterr().out


def test_curl_speaks_to_it():
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    with running(**TLS) as server:
        url = f"https://localhost:{server.port}/step"
        out = subprocess.run(["curl", "-sS", "--cacert", CERT, "--data", "hello", url], capture_output=True, timeout=30)
        assert out.stdout == b"hello", out.stderr
