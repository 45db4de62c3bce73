"""Recordings of sessions: their names, their checksums, and what a damaged or crafted one is answered with."""

import contextlib
import logging
import os
import random
import struct
from zlib import crc32

import msgspec
import pytest

from bray.errors import DataError
from bray.limited_log import LimitedLog
from bray.serving import record
from bray.serving.protocol import END, START, TICK
from bray.serving.record import Recording, read_recording

ABOUT = {"run": "/runs/one", "model": "m", "version": 320}


def recorded(directory, session="game", ticks=20):
    recording = Recording(directory, session, ABOUT)
    recording.add(START, b"", b"{}")
    for i in range(ticks):
        recording.add(TICK, b'{"obs":[%d,0.25]}' % i, b'{"action":%d}' % (i % 2))
    recording.add(END, b"", b"")
    recording.close()
    return recording.path


def recording_of(frames):
    """As somebody would write it who knows the format, and means harm."""
    lengths = [struct.pack("<I", len(f)) for f in frames]
    heads = [n + struct.pack("<II", crc32(n), crc32(f)) for n, f in zip(lengths, frames, strict=True)]
    return record.MAGIC + b"".join(h + f for h, f in zip(heads, frames, strict=True))


@pytest.mark.parametrize("session", ["game", "語" * 80, "../../etc/passwd", "a/b\0c", "." * 300, "x" * 4000])
def test_whatever_a_session_is_called_it_is_recorded(tmp_path, session):
    path = recorded(tmp_path / "rec", session)
    assert path.parent == tmp_path / "rec"
    assert os.listdir(tmp_path / "rec") == [path.name]
    assert len(path.name) < 60
    about, steps = read_recording(path)
    assert about.session == session
    assert (about.run, about.model, about.version) == ("/runs/one", "m", 320)
    assert [s.kind for s in steps] == [START, *[TICK] * 20, END]


def test_every_flipped_bit_is_noticed(tmp_path):
    path = recorded(tmp_path, ticks=1)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(DataError):
            read_recording(path)


def test_a_recording_is_read_as_far_as_it_goes(tmp_path):
    path = recorded(tmp_path, ticks=3)
    data = path.read_bytes()
    lengths = []
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        with contextlib.suppress(DataError):  # before its first frame is whole
            lengths.append(len(read_recording(path)[1]))
    assert sorted(set(lengths)) == [0, 1, 2, 3, 4, 5]
    assert lengths == sorted(lengths)


GOOD = {"session": "s", "time": 0.0, **ABOUT}


@pytest.mark.parametrize(
    "frames",
    [
        [[]],
        [{}],
        [{**GOOD, "run": 5}],
        [{**GOOD, "run": "a\0b"}],
        [{**GOOD, "version": "latest"}],
        [{**GOOD, "model": None}],
        [{**GOOD, "session": b"\xff"}],
        [GOOD, {}],
        [GOOD, [TICK, 0.0, b"", 7]],
        [GOOD, [TICK, "now", b"", b""]],
        [GOOD, [TICK]],
        [GOOD, [77, 0.0, b"", b""]],
    ],
)
def test_what_is_no_recording_is_one_message(tmp_path, frames):
    path = tmp_path / "x.rec"
    path.write_bytes(recording_of([msgspec.msgpack.encode(f) for f in frames]))
    with pytest.raises(DataError, match="is not a recording") as e:
        read_recording(path)
    assert str(path) in str(e.value)


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.rec")
    for path in (tmp_path / "pipe.rec", "/dev/zero", tmp_path, tmp_path / "none.rec"):
        with pytest.raises(DataError):
            read_recording(path)


def test_a_length_that_is_a_lie_takes_no_memory(tmp_path):
    path = tmp_path / "x.rec"
    length = struct.pack("<I", 255 << 20)
    lie = length + struct.pack("<II", crc32(length), 0) + b"short"
    path.write_bytes(recording_of([msgspec.msgpack.encode(GOOD)]) + lie)
    assert read_recording(path)[1] == []  # a frame that was cut off


def test_mutated_recordings_end_in_one_message(tmp_path):
    """Of the file (the checksums notice) and of what is in the frames (as an attacker would)."""
    rng = random.Random(0)
    path = recorded(tmp_path)
    data = path.read_bytes()
    _, steps = read_recording(path)
    plain = [msgspec.msgpack.encode(GOOD), *map(msgspec.msgpack.encode, steps)]
    read, messages = 0, []
    for i in range(300):
        if i % 2:
            path.write_bytes(recording_of([mutated(f, rng) if rng.random() < 0.1 else f for f in plain]))
        else:
            path.write_bytes(mutated(data, rng))
        try:
            read_recording(path)
            read += 1
        except DataError as e:
            messages.append(str(e))
    assert read > 15
    assert len(messages) > 150
    assert not any("\n" in message for message in messages)


def mutated(data, rng):
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out)) if out else 0
        how = rng.randrange(4)
        if how == 0 and out:
            out[at] = rng.randrange(256)
        elif how == 1:
            del out[at:]
        elif how == 2:
            del out[at : at + rng.randrange(1, 9)]
        else:
            out[at:at] = out[at : at + rng.randrange(1, 30)]
    return bytes(out)


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_for_all_sessions(tmp_path, caplog):
    (tmp_path / "rec").symlink_to("/dev/full")
    for i in range(50):
        recording = Recording(tmp_path / "rec", f"s{i}", ABOUT)
        recording.add(START, b"", b"")
        recording.add(END, b"", b"")
        recording.close()
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "ends:" in lines[0]


def test_a_disk_that_takes_a_part_ends_the_recording_there(tmp_path, monkeypatch, caplog):
    class NearlyFull:
        room = 100

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            n, self.room = min(self.room, len(data)), max(0, self.room - len(data))
            return n

        def close(self):
            pass

    monkeypatch.setattr("builtins.open", lambda *a, **k: NearlyFull())
    recorded(tmp_path)
    assert "No space left on device" in caplog.text


def test_a_line_a_minute_per_cause(caplog):
    now = 0.0
    log = LimitedLog(logging.getLogger("bray.serving"), clock=lambda: now)
    for second in range(121):
        now = float(second)
        for i in range(10):
            log.error("disk", "session %d: no space", i)
            log.warning(("token", i % 2), "a wrong token")
    lines = [r.getMessage() for r in caplog.records]
    more = "(and 599 more like this since the last such line)"
    assert [m for m in lines if "space" in m] == ["session 0: no space", *[f"session 0: no space {more}"] * 2]
    assert len([m for m in lines if "token" in m]) == 6
