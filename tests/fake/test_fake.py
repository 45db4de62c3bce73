"""Fakes and the gateway's configuration, over real sockets."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.cli.fake import bodies
from bray.cli.main import main
from bray.cli.options import FakeGamecore as FakeGamecoreOptions
from bray.fake.actor import FakeActor, Replies
from bray.fake.gamecore import FakeGamecore, Load
from bray.launch.graph import load
from bray.launch.hints import game_command
from bray.rundir import RunDir
from bray.serving.protocol import malformed
from bray.spec import EnvSpec, parse_space
from tests import forked
from tests.serving_for_tests import Echo, Orders, Wire, running

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(*command):
    """A command in a process of its own; its first line has been printed."""
    p = forked.Popen(
        [sys.executable, "-m", "bray", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        p.first = p.stdout.readline()
        yield p
    finally:
        p.kill()
        p.communicate()


def test_fake_actor_answers_as_told():
    command = ["fake", "actor", "--port", "0", "--tcp", "--tick", "left", "--end", "over", "--start", "hello"]
    with process(*command) as p:
        port = int(p.first.split("127.0.0.1:")[1].split()[0])
        for tcp in (False, True):
            with bray.Client(port=port, tcp=tcp) as client:
                assert client.start() == b"hello"
                assert client.tick(b"anything") == b"left"
                assert client.end() == b"over"
        p.send_signal(signal.SIGTERM)
        assert p.wait(20) == 0


def test_fake_actor_in_python():
    with running(lambda: FakeActor(Replies(echo=True))) as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick(b"x") == b"x"
        assert client.end() == b"fake_actor_end_return"


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("rate", [0.0, 30.0])
def test_games_that_do_not_exist(tcp, rate):
    with running(Echo, use_tcp=True) as server:
        load = Load(
            port=server.port, tcp=tcp, sessions=8, rate=rate, seconds=1.0, connections=3, admin_port=server.admin_port
        )
        result = FakeGamecore(load).play()
        numbers = result.to_json()
        assert result.started == 8
        assert not result.errors
        assert 0 < numbers["p50_ms"] <= numbers["p90_ms"] <= numbers["p99_ms"] <= numbers["max_ms"]
        assert numbers["server_cpu"] > 0
        assert numbers["server_rss_mb"] > 10
        if rate:
            assert 0.5 * 8 * 30 <= result.requests <= 1.2 * 8 * 30
        assert not server.sessions.sessions  # every game was ended


def test_errors_are_counted_by_kind():
    with running(Orders, actors_per_worker=2, admin_port=0) as server:
        result = FakeGamecore(Load(port=server.port, sessions=3, seconds=0.3, bodies=(b"raise",))).play()
        assert result.errors["429 no_free_slot"] == 1
        assert result.errors["500 actor_error"] >= 2
        assert result.requests == 0
        assert result.cpu_s is None or result.cpu_s >= 0  # nobody, or another service, at the next port


def test_without_a_session_nothing_is_said_of_the_server():
    with running(Echo, tokens=("t",)) as server:
        load = Load(port=server.port, sessions=2, seconds=0.2, admin_port=server.admin_port)
        result = FakeGamecore(load).play()
        assert result.errors["401 bad_token"] == 2
        assert (result.requests, result.cpu_s, result.resident) == (0, None, None)


def test_the_load_table(tmp_path, capsys):
    body = tmp_path / "body"
    body.write_bytes(b"hello")
    with running(Echo, use_tcp=True) as server:
        where = ["--port", str(server.port), "--admin-port", str(server.admin_port), "--seconds", "0.3"]
        assert main(["fake", "gamecore", *where, "--sessions", "4", "--rate", "50", "--body", str(body), "--tcp"]) == 0
        out = capsys.readouterr().out
        for word in ("requests/s", "p50 ms", "p99 ms", "server CPU", "RSS MB", "no errors"):
            assert word in out
        assert main(["fake", "gamecore", *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["errors"] == {}
    assert main(["fake", "gamecore", *where]) == 2
    assert "no service answers" in capsys.readouterr().err
    assert main(["fake", "gamecore", "--body", str(tmp_path / "none")]) == 2
    assert main(["fake", "gamecor"]) == 2
    assert "Did you mean 'gamecore', 'actor'? `bray fake --help` lists" in capsys.readouterr().err
    with running(Echo, use_tcp=False) as server:
        assert (
            main(["fake", "gamecore", "--port", str(server.port), "--admin-port", "0", "--tcp", "--seconds", "0.2"])
            == 1
        )
        assert "does this service answer framed TCP?" in capsys.readouterr().out


class Strict(FakeActor):
    """Takes JSON alone, as `bray serve` does."""

    def tick(self, data):
        try:
            json.loads(data)
        except ValueError:
            raise malformed("expected JSON") from None
        return b"ok"


@pytest.mark.parametrize("tcp", ["--http", "--tcp"])
def test_observations_that_do_not_fit_are_answered_with_what_to_do(tcp, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    RunDir(tmp_path).write_spec(EnvSpec("x", parse_space("float32[4]"), parse_space(2)))
    with running(Strict, use_tcp=True) as server:
        words = [
            "fake",
            "gamecore",
            tcp,
            "--port",
            str(server.port),
            "--sessions",
            "1",
            "--rate",
            "50",
            "--seconds",
            "0.2",
        ]
        assert main(words) == 1
        assert "give --run RUN_DIR" in capsys.readouterr().out
        assert main([*words, "--run", str(tmp_path)]) == 0
        assert "give --run" not in capsys.readouterr().out


# --- the gateway ------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_games_without_a_game_know_what_a_launch_file_plays(capsys):
    """What `bray launch` hints at where a project has no gamecore.py: ticks by the spaces of the file, for one that
    learns."""
    file = ROOT / "template" / "rl.yaml"
    ticks = [json.loads(body) for body in bodies(FakeGamecoreOptions(config=file))]
    assert {np.shape(tick["obs"]) for tick in ticks} == {(5, 7, 7)}
    assert [tick["terminated"] for tick in ticks] == [False] * 63 + [True]
    assert ticks[0]["reward"] == 0.0
    graph = load(file)
    hint = game_command(graph, graph.components["actor1"], 8123)
    assert "python -m template.gamecore --port 8123 --game grid --games 32" in hint
    graph = load(file, ["ppo.env=template.games.atari:AtariEnv", "actor1.actors_per_worker=4"])
    assert "--game atari --games 4" in game_command(graph, graph.components["actor1"], 8123)
    assert main(["fake", "gamecore", "--config", str(file), "--run", "x"]) == 2
    assert "give one of --body FILE, --run RUN_DIR and --config FILE" in capsys.readouterr().err


def test_a_project_without_a_game_is_pointed_to_games_without_a_game(tmp_path):
    (tmp_path / "x.yaml").write_text((ROOT / "template" / "rl.yaml").read_text())
    graph = load(tmp_path / "x.yaml", ["actor1.actors_per_worker=4", "actor1.token_file=t.txt"])
    hint = game_command(graph, graph.components["actor1"], 8123)
    assert hint == f"bray fake gamecore --port 8123 --config {tmp_path}/x.yaml --sessions 4 --token-file t.txt"
    graph = load(tmp_path / "x.yaml", ["actor1.serialize=null"])
    assert "--body FILE_WITH_A_TICK" in game_command(graph, graph.components["actor1"], 8123)


def test_a_gateway_keeps_sessions_together(tmp_path, capsys):
    """HAProxy with our configuration before two services: a session's requests reach one of them, whatever connection
    they take."""
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (make system)")
    port, config = free_port(), tmp_path / "haproxy.cfg"

    class Who(Echo):
        def __init__(self, name):
            self.name = name

        async def tick(self, data):
            return self.name

    with running(lambda: Who(b"one")) as one, running(lambda: Who(b"two")) as two:
        servers = [f"127.0.0.1:{s.port},{s.admin_port}" for s in (one, two)]
        assert main(["gateway", *servers, "--bind", f"127.0.0.1:{port}", "--config", str(config)]) == 0
        assert "haproxy -c -f" in capsys.readouterr().out
        subprocess.run(["haproxy", "-c", "-f", str(config)], check=True, capture_output=True)
        proxy = subprocess.Popen(
            ["haproxy", "-db", "-f", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            owners = {}
            for i in range(30):
                with Wire(port) as wire:
                    assert wire.step("start", f"s{i}")[0] == 200
                    owners[i] = wire.step("tick", f"s{i}")[1]
            assert set(owners.values()) == {b"one", b"two"}
            for i, owner in owners.items():
                with Wire(port) as wire:
                    for _ in range(3):
                        assert wire.step("tick", f"s{i}") == (200, owner)
                    request = (
                        f"POST /step HTTP/1.1\r\nHost: x\r\ngame_id: s{i}\r\nstep_kind: tick\r\nContent-Length: "
                        "0\r\n\r\n"
                    )
                    assert wire.send(request.encode()).response()[2] == owner  # as older clients say it
            with Wire(port) as wire:
                assert wire.step("auto", None)[1] in (b"one", b"two")
                assert wire.step("tick", "unknown")[0] == 404
        finally:
            proxy.kill()
            proxy.wait()


def test_gateway_mistakes(capsys):
    for words in (["host"], ["host:x"], ["host:80,x"], ["host:80", "--bind", "nowhere"]):
        assert main(["gateway", *words]) == 2, words
    assert main(["gateway", "a:1", "b:2"]) == 0
    out = capsys.readouterr().out
    assert "server bray0 a:1 check port 2" in out
    assert "balance hdr(session)" in out
