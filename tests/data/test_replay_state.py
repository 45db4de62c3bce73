"""Saving a replay: a restored one goes on exactly like the one that was never interrupted."""

import os

import numpy as np
import pytest

from bray import tree
from bray.errors import CheckpointError
from tests.data.test_replay import Stream, make

OPTIONS = {
    "uniform": {"n_step": 3},
    "prioritized": {"prioritized": True, "n_step": 2},
    "max_use": {"prioritized": True, "max_use": 3},
    "uniform_limits": {"max_use": 3, "max_staleness": 25},
    "limits": {"prioritized": True, "max_use": 5, "max_staleness": 7, "monitor": True},
    "monitor": {"monitor": True},
    "frames": {"prioritized": True, "frame_stack": 4},
}


def stream_for(kind: str, seed: int = 0) -> Stream:
    return Stream(2, seed, frames="mixed" if kind == "frames" else None)


def work(replay, stream, rng, steps: int, log: list) -> None:
    """What training does: add, sample, update, publish."""
    for _ in range(steps):
        replay.add(**stream.next())
        if len(replay) > 8:
            batch = replay.sample(4, rng)
            log.append(tree.map(np.copy, batch))
            if replay.config.prioritized:
                replay.update_priorities(batch["id"], rng.random(4) * 3)
            replay.advance(replay.version + 1)
        if replay.config.monitor:
            log.append(replay.stats())


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(tree.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("way", ["save", "get_state"])
def test_a_restored_replay_equals_one_never_interrupted(kind, way, tmp_path):
    """Saves at many moments, before and after wrap-around; each state is loaded into a new replay much later (the
    process was killed, and others had saved since) and must give the same samples as the uninterrupted twin."""
    stream, rng = stream_for(kind), np.random.default_rng(1)
    replay = make(stream, 40, **OPTIONS[kind])
    points = [0, 1, 2, 9, 15, 22, 60, 61, 100]  # steps at which a state is taken
    states, logs = [], []
    for i, point in enumerate(points):
        work(replay, stream, rng, point - replay.steps, log=[])
        state = replay.save(tmp_path) if way == "save" else replay.get_state()
        packed = tree.pack(state)  # as a checkpoint keeps it
        states.append((packed, rng.bit_generator.state, i))
        # the twin that goes on: a replay of its own, fed with the same rows
        twin_stream, twin_rng, log = stream_for(kind), np.random.default_rng(1), []
        twin = make(twin_stream, 40, **OPTIONS[kind])
        work(twin, twin_stream, twin_rng, point, [])
        work(twin, twin_stream, twin_rng, 50, log)
        logs.append(log)
    for packed, random, i in states:
        again = make(stream, 40, **OPTIONS[kind])
        state = tree.unpack(packed)
        again.load(tmp_path, state) if way == "save" else again.set_state(state)
        later, rng = stream_for(kind), np.random.default_rng(0)
        for _ in range(points[i]):
            later.next()
        rng.bit_generator.state = random
        log: list = []
        work(again, later, rng, 50, log)
        assert same(log, logs[i]), f"differs after row {points[i]}"


def test_a_save_appends_only_what_is_new(tmp_path):
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(10):
        replay.add(**stream.next())
    first = replay.save(tmp_path)
    files = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert len(files) == 1
    for _ in range(3):
        replay.add(**stream.next())
    second = replay.save(tmp_path)
    assert replay.save(tmp_path)["segments"].tolist() == second["segments"].tolist()  # nothing new, nothing written
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}.items() >= files.items()
    assert [row[:2] for row in second["segments"].tolist()] == [[0, 10], [10, 13]]
    assert second["segments"][0].tolist() == first["segments"][0].tolist()
    for _ in range(30):
        replay.add(**stream.next())
    assert [row[:2] for row in replay.save(tmp_path)["segments"].tolist()] == [[22, 43]]  # 21 rows are stored, all new


def test_large_saves_are_cut_into_segments(tmp_path, monkeypatch):
    monkeypatch.setattr("bray.data.ring.SEGMENT_BYTES", 200)
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(30):
        replay.add(**stream.next())
    state = replay.save(tmp_path)
    assert len(state["segments"]) > 5
    again = make(stream, 40)
    again.load(tmp_path, state)
    a, b = (r.sample(30, np.random.default_rng(0)) for r in (replay, again))
    assert tree.equal(a, b)


def test_a_kill_while_saving_leaves_the_last_state_whole(tmp_path, monkeypatch):
    """The process dies when the second of three segments is written; the state before loads, and saving again works."""
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(6):
        replay.add(**stream.next())
    state = replay.save(tmp_path)
    expected = replay.sample(20, np.random.default_rng(0))
    for _ in range(6):
        replay.add(**stream.next())
    replaced = []

    def dies(source, target, replace=os.replace):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr("bray.data.ring.SEGMENT_BYTES", 200)
    with monkeypatch.context() as m:
        m.setattr("bray.data.segments.os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            replay.save(tmp_path)
    again = make(stream, 40)
    again.load(tmp_path, state)
    assert tree.equal(again.sample(20, np.random.default_rng(0)), expected)
    assert list(tmp_path.glob("*.tmp"))
    whole = replay.save(tmp_path)
    replay.prune(tmp_path, [whole])
    assert not list(tmp_path.glob("*.tmp"))
    again.load(tmp_path, whole)
    a, b = (r.sample(20, np.random.default_rng(0)) for r in (replay, again))
    assert tree.equal(a, b)


def test_two_futures_of_one_checkpoint_do_not_collide(tmp_path):
    """Resume from an old state, go another way, save: the newer state of the first run is still whole."""
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(10):
        replay.add(**stream.next())
    old = replay.save(tmp_path)
    for _ in range(5):
        replay.add(**stream.next())
    newer = replay.save(tmp_path)
    expected = replay.sample(20, np.random.default_rng(0))
    other = make(stream, 40)
    other.load(tmp_path, old)
    different = Stream(2, 99)
    for _ in range(5):
        other.add(**different.next())
    other.save(tmp_path)
    again = make(stream, 40)
    again.load(tmp_path, newer)
    assert tree.equal(again.sample(20, np.random.default_rng(0)), expected)


def test_prune_keeps_what_kept_states_name(tmp_path):
    stream = Stream(2, 0)
    replay = make(stream, 20)
    states = []
    for _ in range(8):
        for _ in range(4):
            replay.add(**stream.next())
        states.append(replay.save(tmp_path))
    (tmp_path / "rows-000000000000-000000000004-0123456789abcdef.seg.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert len(list(tmp_path.glob("*.seg"))) == 8
    gone = replay.prune(tmp_path, [states[4], states[7]])
    # rows 20-31 are in the ring of 11 rows at the end, rows 9-19 were in the ring of state 4: segments 2 to 7 stay
    assert len(gone) == 3
    assert len(list(tmp_path.glob("*.seg"))) == 6
    assert (tmp_path / "notes.txt").exists()
    for kept in (states[4], states[7]):
        make(stream, 20).load(tmp_path, kept)
    with pytest.raises(CheckpointError, match="missing"):
        make(stream, 20).load(tmp_path, states[1])
    replay.prune(tmp_path, [])  # no checkpoint kept: the next save still finds what it names
    for _ in range(2):
        replay.add(**stream.next())
    make(stream, 20).load(tmp_path, replay.save(tmp_path))


def test_truncated_foreign_and_changed_segments_are_refused(tmp_path):
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(10):
        replay.add(**stream.next())
    state = replay.save(tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for bad in (data[:-1], b"", bytes([data[0] ^ 1]) + data[1:], data[:-5] + b"zzzzz", b"x" * len(data)):
        path.write_bytes(bad)
        fresh = make(stream, 40)
        with pytest.raises(CheckpointError, match="segment"):
            fresh.load(tmp_path, state)
        assert len(fresh) == fresh.steps == 0
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        make(stream, 40).load(tmp_path, state)


def test_states_of_other_replays_are_refused(tmp_path):
    stream = Stream(2, 0)
    replay = make(stream, 40)
    for _ in range(10):
        replay.add(**stream.next())
    state = replay.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"rows 21 \(here 31\)"):
        make(stream, 60).load(tmp_path, state)
    with pytest.raises(CheckpointError, match="without priorities"):
        make(stream, 40, prioritized=True).load(tmp_path, state)
    with pytest.raises(CheckpointError, match="not the state of a replay"):
        replay.load(tmp_path, {"weights": np.zeros(3)})
    with pytest.raises(CheckpointError, match="version 7"):
        replay.load(tmp_path, {**state, "version": np.int64(7)})
    with pytest.raises(CheckpointError, match="end at row 10"):
        make(stream, 40).load(tmp_path, {**state, "steps": np.int64(12)})
    frames = Stream(2, 0, frames="zeros")
    other = make(frames, 40)
    for _ in range(10):
        other.add(**frames.next())
    with pytest.raises(CheckpointError, match="obs"):
        make(stream, 40).set_state(other.get_state())


def test_a_replay_saved_without_numbers_loads_into_one_that_keeps_them(tmp_path):
    """As of runs that began before there was a monitor; but what limits the draws must be known."""
    stream, rng = Stream(2, 0), np.random.default_rng(0)
    replay = make(stream, 40)
    for _ in range(10):
        replay.add(**stream.next())
    state = replay.save(tmp_path)
    again = make(stream, 40, monitor=True)
    again.load(tmp_path, state)
    again.advance(5)
    for _ in range(10):
        again.add(**stream.next())
    again.sample(200, rng)
    assert again.stats()["staleness_max"] == 5
    state = again.save(tmp_path)  # old and new rows
    third = make(stream, 40, monitor=True)
    third.load(tmp_path, state)
    a, b = (r.sample(30, np.random.default_rng(1)) for r in (again, third))
    assert tree.equal(a, b)
    assert third.stats() == again.stats()
    with pytest.raises(CheckpointError, match="version"):
        make(stream, 40, max_staleness=3, monitor=True).load(tmp_path, state)
    with pytest.raises(CheckpointError, match="max_use 0"):
        make(stream, 40, max_use=3).load(tmp_path, state)


def test_kept_frames_of_rows_outside_the_ring_are_not_loaded(tmp_path):
    """A segment may reach back further than the ring; what it holds beyond takes no room."""
    stream = Stream(2, 0, end=0.4, frames="real")
    replay = make(stream, 20, frame_stack=4)
    for _ in range(3):
        for _ in range(9):
            replay.add(**stream.next())
        state = replay.save(tmp_path)
    assert state["segments"][0, 0] < replay.steps - replay.rows
    again = make(stream, 20, frame_stack=4)
    again.load(tmp_path, state)
    assert make(stream, 20, frame_stack=4).nbytes < again.nbytes <= replay.nbytes


def test_a_cut_after_a_save_is_part_of_the_next_state(tmp_path):
    """Resume where the environments could not be restored: the newest saved row becomes a final observation, also in
    later states."""
    stream = Stream(2, 0, end=0.0)
    replay = make(stream, 40)
    for _ in range(5):
        replay.add(**stream.next())
    replay.load(tmp_path, replay.save(tmp_path))
    replay.cut()
    for _ in range(5):
        replay.add(**stream.next())
    assert len(replay) == 16
    again = make(stream, 40)
    again.load(tmp_path, tree.unpack(tree.pack(replay.save(tmp_path))))
    assert len(again) == 16
    batch = again.sample(200, np.random.default_rng(0))
    assert sorted(set((batch["id"] // 2).tolist())) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert again.sample_sequences(1, 9, 0, np.random.default_rng(0))["first"][:, 0].nonzero()[0].tolist() == [0, 5]
