"""Episode files: what is saved is read again, and nothing else is."""

import asyncio
import enum
import os
import pickle
import struct
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zstandard

from bray import tree
from bray.errors import DataError
from bray.serving import episodes
from bray.serving.agent import Agent, AgentActor, State
from bray.serving.episodes import PackedMessage, pack_state, read_episode, unpack_episode, write_episode
from tests.agent_for_tests import generated_messages, run, tick  # noqa: F401  (a fixture)


def state(**fields):
    made = State("s", 0, 0, {"x": 1})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def save(path, *states, session="s", actor=0, keep=100):
    return write_episode(path, session, actor, [pack_state(s) for s in states], keep)


def file_of(content: bytes, head=b"BRAYEPSD" + struct.pack("<Q", 1)) -> bytes:
    """A file whose frame is whole, whatever it holds."""
    return head + zstandard.ZstdCompressor(write_checksum=True).compress(content)


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, None),
        (True, True),
        (-5, -5),
        (2**64 - 1, 2**64 - 1),
        (0.1, 0.1),
        (float("inf"), float("inf")),
        ("ü\n\0", "ü\n\0"),
        (b"\x00\xff", b"\x00\xff"),
        ([1, [2, {"a": None}]], [1, [2, {"a": None}]]),
        ((1, 2), [1, 2]),
        ({}, {}),
        ({1: "one"}, {1: "one"}),
        (Color.RED, "red"),
        (np.str_("text"), "text"),
    ],
)
def test_plain_values_come_back(tmp_path, value, read):
    (back,) = read_episode(save(tmp_path, state(value=value, nested={"deep": [value]})))
    assert back.value == read
    assert type(back.value) is type(read)
    assert back.nested == {"deep": [read]}
    assert type(back) is State


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
        np.arange(10)[::2],
        np.array([1.5], ">f8"),
        np.array([1 + 2j]),
        np.array(3.5, np.float16),
        np.float32(0.25),
        np.float64(0.1),
        np.int64(-1),
        np.bool_(True),
    ],
    ids=lambda a: f"{type(a).__name__}-{a.dtype}-{a.shape}",
)
def test_arrays_come_back(tmp_path, array):
    transition = {"state": {"image": array}, "pair": (array, 1)}
    (back,) = read_episode(save(tmp_path, state(transition=transition)))
    native = array.astype(array.dtype.newbyteorder("="))
    assert tree.equal(back.transition["state"]["image"], native)
    assert tree.equal(back.transition["pair"][0], native)
    if array.ndim:
        back.transition["pair"][0][...] = 0  # one of its own, to be changed at will
    else:
        assert isinstance(back.transition["pair"][0], np.generic)


def test_what_turns_into_an_array_is_one(tmp_path):
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    (back,) = read_episode(save(tmp_path, state(tensor=Tensor())))
    np.testing.assert_array_equal(back.tensor, [0, 1, 2])


def test_messages_come_back_as_their_class_or_packed(tmp_path, messages):
    sent = messages.TickInput(position=[1, 2], name="x", items={"a": 1})
    reply = messages.TickOutput(action=3)
    path = save(tmp_path, state(input=sent, output=reply, list=[reply]))
    (back,) = read_episode(path, [messages.TickInput, messages.TickOutput])
    assert back.input == sent
    assert back.output == reply
    assert back.list == [reply]
    (packed,) = read_episode(path, [messages.TickInput])
    assert packed.input == sent
    assert packed.output == PackedMessage("bray_test.TickOutput", reply.SerializeToString())
    assert messages.TickOutput.FromString(packed.output.data) == reply


def test_what_cannot_be_stored_is_left_out_and_named_once(tmp_path, caplog):
    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("needs grad")

    loop = []
    loop.append(loop)
    bad = {
        "model": SimpleNamespace(),
        "function": test_arrays_come_back,
        "names": np.array(["a", "b"]),
        "objects": np.array([object()]),
        "large": 2**64,
        "text": "\ud800",
        "loop": loop,
        "raises": Raises(),
        "hidden": {"deep": [1, SimpleNamespace()]},
    }
    bad = {f"odd_{name}": value for name, value in bad.items()}  # the log has not named these yet
    states = read_episode(save(tmp_path, *(state(**bad, good=i) for i in range(3))))
    assert [s.good for s in states] == [0, 1, 2]
    assert set(vars(states[0])) == {"session", "game", "agent", "actor", "tick", "input", "good"}
    for name in bad:
        assert caplog.text.count(f"episode files leave out state.{name},") == 1
    assert "needs grad" in caplog.text
    assert "state.odd_model, a SimpleNamespace: a SimpleNamespace cannot be stored" in caplog.text


@pytest.mark.parametrize(
    ("session", "name"),
    [
        ("g-agent-red", "g-agent-red-3.0.episode"),
        ("../../etc/passwd", "_.._etc_passwd-3.0.episode"),
        (".hidden", "hidden-3.0.episode"),
        ("a b\0c\nü/", "a_b_c___-3.0.episode"),
        ("", "session-3.0.episode"),
        ("...", "session-3.0.episode"),
        ("x" * 500, "x" * 100 + "-3.0.episode"),
        ("a-3.7.episode", "a-3.7.episode-3.0.episode"),
    ],
)
def test_a_session_cannot_choose_where_its_file_goes(tmp_path, session, name):
    path = save(tmp_path / "episodes", state(), session=session, actor=3)
    assert path.parent == tmp_path / "episodes"
    assert os.listdir(path.parent) == [path.name] == [name]
    assert read_episode(path)[0].session == "s"


def test_the_newest_files_of_each_actor_are_kept_also_over_restarts(tmp_path):
    for i in range(12):
        save(tmp_path, state(i=i), session=f"s{i}", actor=1, keep=3)
        save(tmp_path, state(i=i), session=f"s{i}-1", actor=11, keep=2)  # its names hold the other's number
    (tmp_path / "notes.txt").touch()
    (tmp_path / "foreign.episode").touch()
    names = [f"s{i}-1.{i}.episode" for i in (9, 10, 11)] + [f"s{i}-1-11.{i}.episode" for i in (10, 11)]
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "notes.txt", "foreign.episode"])
    assert save(tmp_path, state(), session="again", actor=1, keep=3).name == "again-1.12.episode"
    assert not (tmp_path / "s9-1.9.episode").exists()


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    first = save(tmp_path, state(i=0), keep=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, state(i=1), keep=1)
    assert os.listdir(tmp_path) == [first.name]
    assert read_episode(first)[0].i == 0


def test_an_episode_that_is_too_large_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(episodes, "MAX_EPISODE", 1000)
    with pytest.raises(DataError, match="set a smaller episode_length"):
        save(tmp_path, state(x="a" * 1000))
    assert os.listdir(tmp_path) == []


# --- saved by an actor ------------------------------------------------------------------------------------------------


class Learns(Agent):
    async def on_tick(self, state):
        state.image = np.full((4, 8, 8), state.tick, np.uint8)
        state.output["action"] = state.tick

    async def on_episode(self, episode, done):
        for s in episode:
            s.advantage = np.float32(s.tick / 2)


@pytest.mark.parametrize(
    ("interval", "games", "saved"),
    [(None, 4, []), (1, 2, [0, 1, 2, 3]), (2, 3, [0, 2, 4]), (3, 3, [0, 3]), (100, 3, [0])],
)
def test_every_so_many_episodes_of_an_actor_are_saved(tmp_path, interval, games, saved):
    """Each game has two episodes, of ticks 0 1 2 and 3 4."""

    async def main():
        options = {"episode_length": 3, "episode_save_interval": interval, "save_dir": tmp_path}
        actor = AgentActor({"a": Learns}, serialize="json", actor=0, **options)
        for game in range(games):
            await actor.start(f"game{game}", b"")
            for t in range(5):
                await tick(actor, b'{"t": %d}' % t)
            await actor.end(b"")

    run(main())
    files = sorted((tmp_path / "episodes").glob("*"), key=lambda p: int(p.suffixes[-2][1:])) if interval else []
    assert not (tmp_path / "episodes").exists() or interval
    expected = [(f"game{n // 2}-0.{i}.episode", ([0, 1, 2], [3, 4])[n % 2]) for i, n in enumerate(saved)]
    assert [(f.name, [s.tick for s in read_episode(f)]) for f in files] == expected
    for f in files:
        for s in read_episode(f):
            assert (s.input, s.output, s.advantage) == ({"t": s.tick}, {"action": s.tick}, s.tick / 2)
            np.testing.assert_array_equal(s.image, np.full((4, 8, 8), s.tick, np.uint8))


def test_files_are_written_by_a_thread_while_the_game_goes_on(tmp_path, monkeypatch):
    threads, go = [], threading.Event()

    def slow(*args):
        threads.append(threading.current_thread().name)
        assert go.wait(20)
        return write_episode(*args)

    monkeypatch.setattr("bray.serving.agent.write_episode", slow)

    async def main():
        options = {"episode_length": 1, "episode_save_interval": 10, "save_dir": tmp_path}
        actor = AgentActor({"a": Learns}, serialize="json", actor=0, **options)
        await actor.start("s", b"")
        await tick(actor)
        while not threads:
            await asyncio.sleep(0.001)
        await tick(actor)  # answered, although the disk is not ready
        go.set()
        await actor.end(b"")

    run(main())
    assert threads[0].startswith("bray-episodes")
    assert os.listdir(tmp_path / "episodes") == ["s-0.0.episode"]


def test_a_disk_that_fails_is_logged_and_the_game_goes_on(tmp_path, caplog):
    (tmp_path / "episodes").write_text("a file where the directory should be")

    async def main():
        actor = AgentActor({"a": Learns}, serialize="json", episode_save_interval=1, save_dir=tmp_path)
        await actor.start("s", b"")
        assert await tick(actor) == b'{"action":0}'
        await actor.end(b"")

    run(main())
    assert "session 's': an episode could not be saved" in caplog.text


def test_episodes_of_messages_are_saved(tmp_path, messages):
    class Acts(Agent):
        def on_tick(self, state):
            state.output.action = len(state.input.position)

    async def main():
        options = {"tick_input_proto": messages.TickInput, "tick_output_proto": messages.TickOutput}
        actor = AgentActor({"a": Acts}, serialize="proto", episode_save_interval=1, save_dir=tmp_path, **options)
        await actor.start("s", b"")
        await tick(actor, messages.TickInput(position=[1, 2]).SerializeToString())
        await actor.end(b"")

    run(main())
    (path,) = (tmp_path / "episodes").iterdir()
    (back,) = read_episode(path, [messages.TickInput, messages.TickOutput])
    assert (list(back.input.position), back.output.action) == ([1, 2], 2)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A frame that claims more than anybody has."""
    frame = bytearray(zstandard.ZstdCompressor().compress(b"x" * 100_000))
    at = bytes(frame).index((100_000).to_bytes(4, "little"))
    frame[at : at + 4] = b"\xff" * 4
    return bytes(frame)


def unknown_size() -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    return compressor.compress(msgspec.msgpack.encode([{}]))


HEAD = b"BRAYEPSD" + struct.pack("<Q", 1)
PACK = msgspec.msgpack.encode
EXT = msgspec.msgpack.Ext


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not an episode file"),
        (pickle.dumps([1]), "not an episode file"),
        (b"BRAYEPSD" + struct.pack("<Q", 2), "another version"),
        (HEAD, "damaged"),
        (HEAD + b"no frame", "damaged"),
        (HEAD + bomb(), "the most is"),
        (HEAD + unknown_size(), "the most is"),
        (file_of(PACK([{}])) + b"more", "damaged"),
        (file_of(b""), "damaged"),
        (file_of(pickle.dumps([{}])), "damaged"),
        (file_of(PACK({})), "damaged"),
        (file_of(PACK([1])), "damaged"),
        (file_of(PACK([{1: 2}])), "damaged"),
        (file_of(PACK([{"a": EXT(1, b"x")}])), "not a packed tree"),
        (file_of(PACK([{"a": EXT(1, tree.pack([np.ones(2)]))}])), "an array that is a tree"),
        (file_of(PACK([{"a": EXT(2, b"x")}])), "damaged"),
        (file_of(PACK([{"a": EXT(2, PACK([1, 2]))}])), "damaged"),
        (file_of(PACK([{"a": EXT(9, b"x")}])), "unknown kind 9"),
        (file_of(b"\x91\x81\xa1a" + b"\x91" * 100_000), "damaged"),
        (file_of(b"\x91\x81\xa1a\xdd\xff\xff\xff\xff"), "damaged"),
        (file_of(b"\x91\x81\xa1a\xa2\xff\xff"), "damaged"),
        (file_of(b"\x91\x81\xa1a\x81" + PACK(EXT(1, tree.pack(np.ones(2)))) + b"\x01"), "damaged"),
    ],
)
def test_foreign_and_hostile_files_are_refused(tmp_path, data, match):
    path = tmp_path / "x.episode"
    path.write_bytes(data)
    with pytest.raises(DataError, match=match) as e:
        read_episode(path)
    assert str(path) in str(e.value)


def tiny_values(path, values, size, head=b"\x91\x81\xa1a\xdd"):
    n = size // len(values)
    path.write_bytes(file_of(head + struct.pack(">I", n) + values * n))
    return path


def test_a_kilobyte_of_a_file_does_not_take_gigabytes(tmp_path):
    """30 million empty States."""
    path = tiny_values(tmp_path / "x.episode", b"\x80", 30_000_000, head=b"\xdd")
    assert path.stat().st_size < 2000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than 1024 MiB of memory"):
            read_episode(path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "values",
    [
        b"\x80",
        b"\x90",
        b"\xa0",
        b"\xa1x",
        b"\x81\xa1a\x01",
        b"\x91\x91\x90",
        b"\xd4\x09\x00",
        b"\xcc\xc8\x80",
        b"\xc4\x00",
    ],
    ids=bytes.hex,
)
def test_many_tiny_values_are_added_up(tmp_path, monkeypatch, values):
    monkeypatch.setattr(episodes, "MAX_MEMORY", 16 << 20)
    with pytest.raises(DataError, match="more than 16 MiB of memory"):
        read_episode(tiny_values(tmp_path / "x.episode", values, 500_000))


def test_large_arrays_and_texts_are_not_taken_for_many_values(tmp_path):
    """Whatever their bytes look like."""
    array = np.full((1000, 64, 64), 0x80, np.uint8)
    rows = [state(image=array, text="é" * 500_000, raw=b"\x90" * 3_000_000, numbers=[0.5] * 10_000)] * 4
    back = read_episode(save(tmp_path, *rows))
    assert len(back) == 4
    assert (back[3].image == array).all()
    assert (back[3].raw, back[3].numbers) == (rows[0].raw, rows[0].numbers)


def test_a_file_without_a_checksum_is_refused(tmp_path):
    with pytest.raises(DataError, match="no checksum"):
        unpack_episode(HEAD + zstandard.ZstdCompressor().compress(PACK([{}])))


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.episode")
    for path in (tmp_path / "pipe.episode", "/dev/zero"):
        with pytest.raises(DataError, match="expected a plain file"):
            read_episode(path)


def test_a_message_that_is_none_is_refused(tmp_path, messages):
    path = tmp_path / "x.episode"
    path.write_bytes(file_of(PACK([{"a": EXT(2, PACK(["bray_test.TickInput", b"\x0a\xff"]))}])))
    assert read_episode(path)[0].a == PackedMessage("bray_test.TickInput", b"\x0a\xff")
    with pytest.raises(DataError, match=r"a bray_test\.TickInput message that is none"):
        read_episode(path, [messages.TickInput])


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"none\.episode is missing"):
        read_episode(tmp_path / "none.episode")
    with pytest.raises(DataError, match="expected a plain file, it is a directory"):
        read_episode(tmp_path)


def rich_file(path, messages) -> Path:
    rng = np.random.default_rng(1)
    rows = [
        state(
            transition={"obs": rng.normal(size=(2, 3)).astype(np.float32), "logit": [rng.integers(9), 0.5]},
            output=messages.TickOutput(action=i),
            note="text",
            raw=bytes(20),
            nested={"a": [None, True, {"b": -1}]},
        )
        for i in range(4)
    ]
    return save(path, *rows)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes flipped, cut off, cut out, doubled, or replaced by extremes."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(out))) if out else 0
        kind = rng.integers(0, 5)
        if kind == 0 and out:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + int(rng.integers(1, 9))]
        elif kind == 3:
            out[at:at] = out[at : at + int(rng.integers(1, 30))]
        elif out:
            out[at] = (0x00, 0x7F, 0x80, 0xC1, 0xC9, 0xDD, 0xDF, 0xFF)[rng.integers(0, 8)]
    return bytes(out)


@pytest.mark.parametrize("inside", [False, True], ids=["file", "content"])
def test_damage_is_a_data_error_and_nothing_else(tmp_path, messages, inside):
    """Damage to the file meets the checksum; damage inside a whole frame is what an attacker would do."""
    data = rich_file(tmp_path, messages).read_bytes()
    content = zstandard.ZstdDecompressor().decompress(data[len(HEAD) :])
    assert len(unpack_episode(file_of(content))) == 4
    rng = np.random.default_rng(2)
    refused = read = 0
    for _ in range(10_000):
        bad = file_of(damaged(content, rng)) if inside else damaged(data, rng)
        try:
            states = unpack_episode(bad, [messages.TickOutput])
        except DataError:
            refused += 1
        else:
            assert all(type(s) is State for s in states)
            read += 1
    assert refused > 5_000
    if not inside:
        assert read < 100  # only damage that undid itself
