"""Trajectories in memory (cutting) and on disk (one safe columnar format)."""

import pickle
import struct

import numpy as np
import pytest
import zstandard

from bray import tree
from bray.data import EpisodeReader, EpisodeWriter, Piece, nstep, to_pickle, unroll, write_episodes
from bray.errors import ConfigError, DataError, UnknownName
from tests.data.test_replay import GAMMA, Stream


def trajectory(rows: int, envs: int = 2, state: bool = False) -> Piece:
    t = np.arange(rows + 1, dtype=np.float32)[:, None] + np.zeros(envs, np.float32)
    return Piece(
        obs={"x": t},
        action=t[:-1].astype(np.int64),
        reward=t[:-1] + 1,
        terminated=t[:-1] == rows - 1,
        truncated=np.zeros((rows, envs), bool),
        valid=np.ones((rows, envs), bool),
        first=t == 0,
        outputs={"value": t * 10},
        extras={"logp": -t[:-1]},
        state=t[:-1, :, None] + 0.5 if state else None,
    ).check()


@pytest.mark.parametrize(("last", "starts"), [("drop", [0, 4]), ("last", [0, 4, 6]), ("null_padding", [0, 4, 8])])
def test_ten_rows_in_pieces_of_four(last, starts):
    pieces = unroll(trajectory(10), 4, last)
    assert [float(p.obs["x"][0, 0]) for p in pieces] == starts
    for start, piece in zip(starts, pieces, strict=True):
        piece.check()
        assert piece.length == 4
        n = min(4, 10 - start)
        np.testing.assert_array_equal(piece.obs["x"][: n + 1, 0], np.arange(start, start + n + 1))
        np.testing.assert_array_equal(piece.outputs["value"][: n + 1, 1], 10 * np.arange(start, start + n + 1))
        np.testing.assert_array_equal(piece.reward[:n, 0], np.arange(start, start + n) + 1)
        assert piece.valid[:n].all()
    if last == "null_padding":
        tail = pieces[-1]
        assert not tail.valid[2:].any()
        assert not tail.reward[2:].any()
        assert not tail.terminated[2:].any()
        assert tail.terminated[1].all()
        np.testing.assert_array_equal(tail.obs["x"][:, 0], [8, 9, 10, 0, 0])


def test_pieces_that_fit_are_the_same_whatever_the_last_would_be():
    for last in ("drop", "last", "null_padding"):
        assert len(unroll(trajectory(8), 4, last)) == 2
    assert unroll(trajectory(3), 4, "drop") == []
    (short,) = unroll(trajectory(3), 4, "last")
    assert short.valid[:, 0].tolist() == [True, True, True, False]


def test_recurrent_pieces_start_with_the_state_of_their_first_row():
    pieces = unroll(trajectory(10, state=True), 4, "last")
    assert [float(p.state[0, 0, 0]) for p in pieces] == [0.5, 4.5, 6.5]
    padded = unroll(trajectory(10, state=True), 4, "null_padding")[-1].check()
    assert padded.state[:, 0, 0].tolist() == [8.5, 9.5, 0.0, 0.0]
    seldom = trajectory(10, state=True)
    seldom.state, seldom.state_every = seldom.state[::2], 2
    pieces = unroll(seldom.check(), 4, "null_padding")
    assert [p.check().state[:, 0, 0].tolist() for p in pieces] == [[0.5, 2.5], [4.5, 6.5], [8.5, 0.0]]
    with pytest.raises(ConfigError, match="cut where its state is known, every 2 rows; got row 5"):
        unroll(seldom, 5)


def test_columns_that_do_not_fit_are_named():
    for name, value in (
        ("action", np.zeros((5, 2))),
        ("first", np.zeros((10, 2))),
        ("extras", {"logp": np.zeros((10, 3))}),
    ):
        broken = trajectory(10)
        setattr(broken, name, value)
        with pytest.raises(DataError, match=name):
            broken.check()
    with pytest.raises(UnknownName, match="null_padding"):
        unroll(trajectory(10), 4, "null_paddin")
    with pytest.raises(ConfigError, match="at least 1"):
        unroll(trajectory(10), 0)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_nstep_windows_equal_a_loop(n):
    """The reference loop is the one replay is held against; a trajectory's last row is its newest."""
    stream = Stream(3, seed=n)
    rows = [stream.next() for _ in range(30)]
    columns = {
        k: np.stack([r[k] for r in rows]) for k in ("obs", "action", "reward", "terminated", "truncated", "valid")
    }
    first = np.stack([r["first"] for r in stream.rows])
    whole = Piece(**{k: v if k == "obs" else v[:-1] for k, v in columns.items()}, first=first).check()
    total, discount, after = nstep(whole, n, GAMMA)
    assert total.shape == (29, 3)
    for t, b in np.argwhere(whole.valid):
        reward, factor, bootstrap = stream.expected(int(t * 3 + b), n)
        assert total[t, b] == pytest.approx(reward, rel=1e-6, abs=1e-6)
        assert discount[t, b] == pytest.approx(factor, rel=1e-6)
        np.testing.assert_array_equal(whole.obs[after[t, b], b], bootstrap)
    dead = ~whole.valid
    assert dead.any()
    assert not total[dead].any()


# --- files ------------------------------------------------------------------------------------------------------------


def episode(i: int, steps: int = 5) -> dict:
    rng = np.random.default_rng(i)
    return {
        "obs": {"x": rng.normal(size=(steps + 1, 3)).astype(np.float32), "mask": rng.random((steps + 1, 2)) > 0.5},
        "action": rng.integers(0, 4, steps),
        "reward": np.full(steps, i, np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "truncated": np.zeros(steps, bool),
        "lives": np.arange(steps + 1),
    }


def frames_episode(steps: int = 40, k: int = 4, dtype=np.uint8) -> dict:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (steps + k, 20, 20)).astype(dtype)
    obs = np.stack([frames[t : t + k] for t in range(steps + 1)])
    return {**episode(0, steps), "obs": obs}


def test_2500_episodes_are_three_files(tmp_path):
    paths = write_episodes(tmp_path / "trajectories" / "expert", (episode(i, 1 + i % 3) for i in range(2500)))
    assert [p.name for p in paths] == [f"expert-0000{i}.episodes" for i in range(3)]
    assert [len(EpisodeReader(p)) for p in paths] == [1000, 1000, 500]
    reader = EpisodeReader(tmp_path / "trajectories")
    assert len(reader) == 2500
    assert reader.steps.sum() == sum(1 + i % 3 for i in range(2500))
    for i in (0, 999, 1000, 1999, 2499, -1):
        assert tree.equal(reader[i], episode(i % 2500, 1 + (i % 2500) % 3))
    assert [float(e["reward"][0]) for e in EpisodeReader(paths[2])][:3] == [2000, 2001, 2002]
    # a later writer goes on, it does not overwrite (nor repeat: file k + 1 holds only what came after file k)
    more = write_episodes(tmp_path / "trajectories" / "expert", [episode(7)])
    assert more[0].name == "expert-00003.episodes"
    assert len(EpisodeReader(tmp_path / "trajectories")) == 2501


def test_transitions_are_one_tree_of_arrays(tmp_path):
    episodes = [episode(1, 4), episode(2, 2), episode(3, 6)]
    write_episodes(tmp_path / "a", episodes)
    data = EpisodeReader(tmp_path).transitions()
    assert data["reward"].tolist() == [1] * 4 + [2] * 2 + [3] * 6
    np.testing.assert_array_equal(data["obs"]["x"], np.concatenate([e["obs"]["x"][:-1] for e in episodes]))
    np.testing.assert_array_equal(data["next_obs"]["x"], np.concatenate([e["obs"]["x"][1:] for e in episodes]))
    assert data["terminated"].nonzero()[0].tolist() == [3, 5, 11]
    assert data["lives"].shape == (12,)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_stacked_frames_are_stored_once(tmp_path, dtype):
    """Noise does not compress, so the file's size tells how many frames it holds: 44 instead of 41 x 4."""
    whole = frames_episode(dtype=dtype)
    (path,) = write_episodes(tmp_path / "a", [whole])
    raw = 44 * 400 * np.dtype(dtype).itemsize
    assert path.stat().st_size < raw + 2500
    again = EpisodeReader(path)[0]
    assert tree.equal(again, whole)
    assert again["obs"].dtype == dtype
    again["obs"][0, 0, 0, 0] = 1  # the caller's, and not shared between stacks
    assert again["obs"][1, 0, 0, 0] == whole["obs"][1, 0, 0, 0]


def test_what_compression_saves_little_of_is_stored_for_quick_reading(tmp_path):
    """Floats that are noise would become 8 % smaller; their bytes are in the file as they are."""
    rng, n = np.random.default_rng(0), 1000
    noise = {**episode(0, n), "obs": rng.standard_normal((n + 1, 256)).astype(np.float32)}
    flat = {**noise, "obs": np.zeros_like(noise["obs"])}
    (path,) = write_episodes(tmp_path / "a", [noise])
    assert noise["obs"][100:105].tobytes() in path.read_bytes()
    assert tree.equal(EpisodeReader(path)[0], noise)
    (small,) = write_episodes(tmp_path / "b", [flat])
    assert small.stat().st_size < 0.1 * path.stat().st_size


def test_frames_that_are_not_stacks_stay_as_they_are(tmp_path):
    almost = frames_episode()
    almost["obs"][7, 1, 3, 3] ^= 1
    zeros = frames_episode(dtype=np.float32)
    zeros["obs"][:] = 0.0
    zeros["obs"][3, 0, 0, 0] = -0.0
    write_episodes(tmp_path / "a", [almost, zeros])
    reader = EpisodeReader(tmp_path)
    assert tree.equal(reader[0], almost)
    assert reader[1]["obs"].tobytes() == zeros["obs"].tobytes()


def test_a_file_appears_when_it_is_whole_and_keeps_what_came_before_an_error(tmp_path):
    writer = EpisodeWriter(tmp_path / "a", per_file=2)
    writer.write(episode(0))
    assert not list(tmp_path.glob("*.episodes"))
    writer.write(episode(1))
    assert [p.name for p in tmp_path.glob("*.episodes")] == ["a-00000.episodes"]
    more = [episode(2), {**episode(3), "action": np.zeros(4)}]
    with pytest.raises(DataError, match=r"'action'.*4 rows, expected 5"):
        write_episodes(tmp_path / "a", more, per_file=2)
    assert len(EpisodeReader(tmp_path)) == 3
    assert not list(tmp_path.glob("*.tmp"))
    with EpisodeWriter(tmp_path / "empty"):
        pass
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((5, 3))}, "'obs' has 5 rows, expected 6"),
        ({"terminated": np.zeros((6,), bool)}, "'terminated' has 6 rows, expected 5"),
        ({"reward": np.zeros((5, 1))}, r"reward of an episode is \[T\]"),
        ({"note": np.zeros(9)}, "'note' has 9 rows, expected 5 or 6"),
        ({"names": np.array(["a"] * 5)}, "numbers"),
    ],
)
def test_episodes_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        write_episodes(tmp_path / "a", [{**episode(0), **change}])
    with pytest.raises(DataError, match="a dict with obs, action"):
        write_episodes(tmp_path / "a", [{"obs": np.zeros((2, 1))}])


def test_truncated_files_are_refused_at_every_length(tmp_path):
    (path,) = write_episodes(tmp_path / "a", [episode(0), episode(1)])
    data = path.read_bytes()
    for n in [*range(0, 40), *range(40, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:n])
        with pytest.raises(DataError, match="a-00000"):
            EpisodeReader(path)


def test_damaged_bytes_never_read_as_another_episode(tmp_path):
    """Each byte flipped in turn: an error, or (in unused padding) the same episodes."""
    episodes = [episode(0, 3), frames_episode(3, 2)]
    (path,) = write_episodes(tmp_path / "a", episodes)
    data = path.read_bytes()
    refused = 0
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            got = list(EpisodeReader(path))
        except DataError:
            refused += 1
        else:
            assert all(tree.equal(a, b) for a, b in zip(got, episodes, strict=False))
    assert refused > 0.8 * len(range(0, len(data), 7))


def test_foreign_and_hostile_files_are_refused(tmp_path):
    path = tmp_path / "x.episodes"
    good = tree.pack({"episode": episode(0), "stacks": {}})

    def file(block: bytes, raw: int, steps: int = 5, offset: int = 16, size: int | None = None) -> bytes:
        rows = {"offset": offset, "size": len(block) if size is None else size, "raw": raw, "steps": steps}
        index = tree.pack({k: np.array([v], np.int64) for k, v in rows.items()})
        return (
            b"BRAYEPIS"
            + struct.pack("<Q", 1)
            + block
            + index
            + struct.pack("<QQ8s", 16 + len(block), len(index), b"BRAYEPIX")
        )

    path.write_bytes(file(zstandard.compress(good), len(good)))
    assert tree.equal(EpisodeReader(path)[0], episode(0))  # so that the hostile ones differ by one thing each
    stacked = tree.pack({"episode": episode(0), "stacks": {"0": np.array(9)}})
    bomb = zstandard.compress(b"\0" * (1 << 20))
    foreign = tree.pack({"weights": np.zeros(3)})
    for bad in (
        pickle.dumps({"state": []}),
        b"",
        b"\x93NUMPY" + b"\0" * 200,
        file(zstandard.compress(good), len(good), steps=4),
        file(zstandard.compress(good), len(good), offset=1 << 40),
        file(zstandard.compress(good), len(good), size=-1),
        file(zstandard.compress(good), 1 << 60),
        file(zstandard.compress(good), 10),
        file(bomb, 100),
        file(b"not zstd", 8),
        file(zstandard.compress(b"garbage"), 7),
        file(zstandard.compress(foreign), len(foreign)),
        file(zstandard.compress(stacked), len(stacked)),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"x\.episodes"):
            EpisodeReader(path)[0]
    with pytest.raises(DataError, match="no trajectory file"):
        EpisodeReader(tmp_path / "none.episodes")
    path.unlink()
    with pytest.raises(DataError, match="bray collect"):
        EpisodeReader(tmp_path)


def test_pickles_for_those_who_ask(tmp_path):
    """A dict of lists, an entry per episode; written, never read by us."""
    to_pickle(tmp_path / "trajs.pkl", [episode(0, 3), episode(1, 2)])
    with open(tmp_path / "trajs.pkl", "rb") as f:
        data = pickle.load(f)
    assert set(data) == {"state", "action", "reward", "next_state", "terminated", "info"}
    assert [len(x) for x in data["state"]] == [3, 2]
    assert data["reward"] == [[0, 0, 0], [1, 1]]
    assert data["terminated"] == [[False, False, True], [False, True]]
    np.testing.assert_array_equal(data["next_state"][0][0]["x"], data["state"][0][1]["x"])
    assert data["info"][1][0]["lives"] == 0
