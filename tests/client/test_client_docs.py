"""docs/protocol.md: its examples are sent to a real server byte by byte, and the replies must be those of the page.

`python -m tests.client.test_client_docs` writes the replies of the server into the page; look at the difference before
you keep it.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bray.client.wire import STATUS
from bray.data.files import EpisodeReader, EpisodeWriter
from bray.data.sources import given_spec
from bray.errors import Overloaded
from bray.experiment.record import RecordActor
from tests.client_servers import BrayServer, EchoActor

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
BLOCK = re.compile(r"^```(http|hex) (send|receive)\n(.*?)^```$|^<!-- (closed) -->$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^#### (Example: .*?)\n(?:<!-- service: (.*?) -->\n)?(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)


def to_bytes(form, text):
    """The message that a block shows."""
    if form == "hex":
        return bytes.fromhex("".join(re.sub(r"\|.*", "", line[8:]) for line in text.splitlines()))
    head, _, body = text.rstrip("\n").partition("\n\n")
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body.encode()


def to_text(form, data):
    """A block that shows a message."""
    if form == "http":
        head, _, body = data.partition(b"\r\n\r\n")
        return head.decode().replace("\r\n", "\n") + ("\n\n" + body.decode() if body else "") + "\n"
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        words = "  ".join(row[i : i + 8].hex(" ") for i in (0, 8) if row[i : i + 8])
        shown = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in row)
        lines.append(f"{at:08x}  {words:<48}  |{shown}|\n")
    return "".join(lines)


class Actor(EchoActor):
    """The Actor of the page."""

    def tick(self, data):
        if data == b"overload":
            raise Overloaded("the model's queue is full")
        return super().tick(data)


def sections():
    return [(name, json.loads(service or "{}"), text) for name, service, text in SECTION.findall(PAGE.read_text())]


def play(service, text, look):
    """Send what a section sends; `look(form, expected, received)` for every reply."""
    with BrayServer(**service) as server:
        server.server.sessions.make_actor = Actor
        with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
            for block in BLOCK.finditer(text):
                form, direction, content, closed = block.groups()
                if closed:
                    assert sock.recv(1) == b""
                elif direction == "send":
                    sock.sendall(to_bytes(form, content))
                else:
                    look(block, form, to_bytes(form, content), sock)
            sock.settimeout(0.2)
            if not text.rstrip().endswith("<!-- closed -->"):
                with pytest.raises(TimeoutError):  # nothing more comes
                    sock.recv(1)


@pytest.mark.parametrize(("service", "text"), [s[1:] for s in sections()], ids=[s[0] for s in sections()])
def test_example(service, text):
    seen = []

    def look(block, form, expected, sock):
        received = b""
        while len(received) < len(expected) and (piece := sock.recv(len(expected) - len(received))):
            received += piece
        assert received == expected
        seen.append(received)

    play(service, text, look)
    assert seen, "the section has no reply"


def test_the_page_has_examples_of_both_protocols_and_every_code():
    text = PAGE.read_text()
    assert len(sections()) >= 10
    assert len(re.findall("^```http send", text, re.MULTILINE)) >= 8
    assert len(re.findall("^```hex send", text, re.MULTILINE)) >= 6
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, re.MULTILINE))
    assert {code: int(status) for code, status in rows.items()} == STATUS


def test_numbers_of_the_page_are_the_servers():
    from bray.serving.config import ServiceConfig
    from bray.serving.protocol import MAX_NAME

    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d ]+) ", PAGE.read_text(), re.MULTILINE))
    config = ServiceConfig()
    settings = {k: v for k, v in rows.items() if hasattr(config, k)}
    assert len(settings) >= 8
    for name, value in settings.items():
        assert int(value.replace(" ", "")) == getattr(config, name), name
    assert f"{MAX_NAME} bytes" in PAGE.read_text()


def test_text_and_bytes_are_the_same():
    for data in (b"", b"x", bytes(range(256))):
        assert to_bytes("hex", to_text("hex", data)) == data
    for data in (b"POST / HTTP/1.1\r\nA: b\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\na\nb"):
        assert to_bytes("http", to_text("http", data)) == data


@pytest.mark.parametrize("protocol", ["http", "tcp"])
def test_lua_client_of_the_page(tmp_path, protocol):
    lua = shutil.which("lua5.4")
    if lua is None or subprocess.run([lua, "-e", "require 'socket'"], capture_output=True).returncode:
        pytest.skip("no lua5.4 with luasocket")
    (source,) = re.findall(r"^```lua\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(source.splitlines()) <= 60
    (tmp_path / "bray.lua").write_text(source)
    game = """
        local bray = require "bray"
        local client = bray.connect("127.0.0.1", tonumber(arg[1]), arg[2] == "tcp")
        print(client:step("start", "lua-game", ""))
        for i = 1, 3 do
            local obs = string.rep("obs", i * 10000)
            print(client:step("tick", "lua-game", obs) == obs)
        end
        print(client:step("end", "lua-game", ""))
        print(client:step("auto", "", "stateless"))
        local ok, problem = pcall(client.step, client, "tick", "lua-game", "late")
        print(ok, problem.error)
    """
    (tmp_path / "game.lua").write_text(game)
    with BrayServer() as server:
        command = [lua, "game.lua", str(server.port), protocol]
        out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert out.stderr == ""
    assert out.stdout.split() == [
        "started",
        "lua-game",
        "true",
        "true",
        "true",
        "ended",
        "stateless",
        "false",
        "no_session",
    ]


def recorder(language, folder):
    """The program of the page that has a player recorded, ready to run."""
    found = re.findall(r"^```(python|cpp|csharp|lua|lua game)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = dict(found)
    name = {"python": "game.py", "cpp": "game.cpp", "csharp": "game.cs", "lua game": "game.lua"}[language]
    clients = PAGE.parents[1] / "clients"
    needs, build, start = {
        "python": (sys.executable, [], [sys.executable, name]),
        "cpp": ("g++", ["g++", "-std=c++17", "-O0", f"-I{clients}/cpp", name, "-o", "game", "-pthread"], ["./game"]),
        "csharp": ("mcs", ["mcs", "-out:game.exe", name, clients / "csharp/BrayClient.cs"], ["mono", "game.exe"]),
        "lua game": ("lua5.4", [], ["lua5.4", name]),
    }[language]
    if shutil.which(needs) is None or (
        needs == "lua5.4" and subprocess.run([needs, "-e", "require 'socket'"], capture_output=True).returncode
    ):
        pytest.skip(f"no {needs}, or not with sockets")

    def play(port):
        (folder / "bray.lua").write_text(blocks["lua"])
        (folder / name).write_text(blocks[language].replace("8000", str(port)))
        for command in (build, start):
            if command:
                subprocess.run(command, cwd=folder, check=True, timeout=60)

    return play


@pytest.mark.parametrize("language", ["python", "cpp", "csharp", "lua game"])
def test_every_client_of_the_page_has_a_player_recorded(language, tmp_path):
    spec = given_spec("float32[2]", "3")
    play = recorder(language, tmp_path)
    with BrayServer() as server:
        server.server.sessions.make_actor = partial(RecordActor, spec, EpisodeWriter(tmp_path / "episodes", 1))
        play(server.port)
    (episode,) = EpisodeReader(tmp_path)
    assert episode["obs"].tolist() == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert (episode["action"].tolist(), episode["reward"].tolist()) == ([2, 0], [1.0, 5.0])
    assert (episode["terminated"].tolist(), episode["truncated"].any()) == ([False, True], False)


def write_page():
    """Put the server's replies into the page."""
    page = PAGE.read_text()
    for name, service, text in sections():
        new = []

        def look(block, form, expected, sock, new=new):
            sock.settimeout(1)
            received = b""
            # As many replies as the block holds: one; the next block's come when it is asked for.
            while not _whole(form, received):
                received += sock.recv(1)
            new.append((block, to_text(form, received)))

        play(service, text, look)
        changed = text
        for block, shown in reversed(new):
            changed = changed[: block.start(3)] + shown + changed[block.end(3) :]
        page = page.replace(text, changed)
        print(f"{name}: {len(new)} replies", file=sys.stderr)
    PAGE.write_text(page)


def _whole(form, data):
    if form == "hex":
        return len(data) >= 24 and len(data) == 24 + sum(int.from_bytes(data[i : i + 8]) for i in (0, 8))
    head, found, body = data.partition(b"\r\n\r\n")
    return bool(found) and len(body) == int(re.search(rb"Content-Length: (\d+)", head)[1])


if __name__ == "__main__":
    write_page()
