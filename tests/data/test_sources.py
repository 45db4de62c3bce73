"""Data sets in other people's forms: read as ours are, and refused with file, episode and step."""

import base64
import json
import os
import pickle

import numpy as np
import pytest

from bray import tree
from bray.data import Dataset, EpisodeReader, Piece, open_data, write_episodes
from bray.data.experience import EndOfData
from bray.data.sources import guess
from bray.errors import ConfigError, DataError
from bray.rundir import RunDir
from bray.spec import EnvSpec, Space
from bray.train.source import FileSource, episode_piece

SPEC = EnvSpec("game", Space("box", (3,)), Space("discrete", (), "int64", n=(4,), start=(0,)))
BOXED = EnvSpec("game", Space("box", (3,)), Space("box", (2,), "float32", -1.0, 1.0))
PARTS = EnvSpec(
    "game",
    Space("dict", parts=(Space("box", (2,)), Space("discrete", (), "int64", n=(5,), start=(0,))), names=("x", "n")),
    Space("tuple", parts=(Space("discrete", (), "int64", n=(4,), start=(0,)), Space("box", (1,), "float32", -1, 1))),
)


def episode(number: int, n: int, over: bool = True) -> dict:
    t = np.arange(n + 1, dtype=np.float32)
    return {
        "obs": np.stack([t, np.full(n + 1, number, np.float32), 0 * t], 1),
        "action": np.arange(n) % 4,
        "reward": t[:-1] + 10 * number,
        "terminated": (np.arange(n) == n - 1) & over,
        "truncated": (np.arange(n) == n - 1) & (not over),
    }


EPISODES = [episode(0, 4), episode(1, 3, over=False), episode(2, 1), episode(3, 6)]


def joined(episodes, last=True):
    """Columns of all, one behind the other, under D4RL's names."""
    out = {
        "observations": np.concatenate([e["obs"][:-1] for e in episodes]),
        "actions": np.concatenate([e["action"] for e in episodes]),
        "rewards": np.concatenate([e["reward"] for e in episodes]),
        "terminals": np.concatenate([e["terminated"] for e in episodes]),
        "timeouts": np.concatenate([e["truncated"] for e in episodes]),
    }
    return out | ({"next_observations": np.concatenate([e["obs"][1:] for e in episodes])} if last else {})


def lines(episodes, packed=()):
    """RLlib's lines of three rows each, so that episodes go over lines, and lines over episodes."""
    rows = {
        "obs": np.concatenate([e["obs"][:-1] for e in episodes]),
        "new_obs": np.concatenate([e["obs"][1:] for e in episodes]),
        "actions": np.concatenate([e["action"] for e in episodes]),
        "rewards": np.concatenate([e["reward"] for e in episodes]),
        "terminateds": np.concatenate([e["terminated"] for e in episodes]),
        "truncateds": np.concatenate([e["truncated"] for e in episodes]),
        "eps_id": np.concatenate([[7 * i] * len(e["reward"]) for i, e in enumerate(episodes)]),
    }
    out = []
    for start in range(0, len(rows["rewards"]), 3):
        line = {k: v[start : start + 3].tolist() for k, v in rows.items()}
        line |= {k: base64.b64encode(pickle.dumps(line[k])).decode() for k in packed}
        out.append(json.dumps({"type": "SampleBatch", **line}))
    return "\n".join(out) + "\n"


def write(form, folder, episodes=EPISODES, spec=SPEC):
    folder.mkdir(exist_ok=True)
    if form == "ours":
        write_episodes(folder / "episodes", episodes)
        RunDir(folder).write_spec(spec)
        return folder
    if form == "npz":
        np.savez(folder / "a.npz", **joined(episodes))
        return folder / "a.npz"
    if form == "squeezed":
        np.savez_compressed(folder / "a.npz", **joined(episodes))
        return folder / "a.npz"
    if form == "rllib":
        (folder / "output-1.json").write_text(lines(episodes))
        return folder
    h5py = pytest.importorskip("h5py")
    if form == "d4rl":
        with h5py.File(folder / "a.hdf5", "w") as f:
            for name, x in joined(episodes).items():
                f[name] = x
        return folder / "a.hdf5"
    from bray.data.hdf5 import MinariWriter

    writer = MinariWriter(folder, spec)
    for e in episodes:
        writer.write(e)
    writer.close()
    return folder


FORMS = ["ours", "npz", "squeezed", "rllib", "d4rl", "minari"]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_episodes_come_from_every_form(form, tmp_path):
    data = open_data(write(form, tmp_path / "data"), SPEC)
    assert data.steps.tolist() == [4, 3, 1, 6]
    assert not data.notes
    for i in (3, 0, 2, 1):  # in any order
        assert tree.equal(data[i], dict(sorted(EPISODES[i].items(), key=lambda x: list(data[i]).index(x[0]))))
    assert len(list(data)) == len(data) == 4


@pytest.mark.parametrize("form", ["ours", "minari"])
def test_spaces_come_from_the_files(form, tmp_path):
    spec = open_data(write(form, tmp_path / "data", spec=SPEC)).spec
    assert (spec.observation, spec.action) == (SPEC.observation, SPEC.action)


def test_spaces_of_every_kind_go_to_minari_and_back(tmp_path):
    pytest.importorskip("h5py")
    rng, n = np.random.default_rng(0), 5
    parts = {
        "obs": {"x": rng.normal(size=(n + 1, 2)).astype(np.float32), "n": rng.integers(0, 5, n + 1)},
        "action": (rng.integers(0, 4, n), rng.uniform(-1, 1, (n, 1)).astype(np.float32)),
        "reward": np.ones(n, np.float32),
        "terminated": np.arange(n) == n - 1,
        "truncated": np.zeros(n, bool),
    }
    data = open_data(write("minari", tmp_path / "a", [parts], PARTS))
    assert (data.spec.observation, data.spec.action) == (PARTS.observation, PARTS.action)
    assert tree.equal(data[0], parts)
    for space in (
        Space("multi_discrete", (2,), "int64", n=(2, 3), start=(0, 4)),
        Space("multi_binary", (3,), "int8"),
        Space("box", (2,), "float32", (-2.0, 0.0), (2.0, 10.0)),
        Space("box", (2,), "float32"),
    ):
        from bray.data.hdf5 import space_of, space_to_minari

        assert space_of(json.loads(json.dumps(space_to_minari(space)))) == space


def test_minari_reads_what_we_write(tmp_path):
    pytest.importorskip("h5py")
    minari = pytest.importorskip("minari")
    theirs = minari.MinariDataset(write("minari", tmp_path / "a") / "data")
    assert (theirs.total_episodes, theirs.total_steps) == (4, 14)
    for mine, other in zip(EPISODES, theirs.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(other.observations, mine["obs"])
        np.testing.assert_array_equal(other.truncations, mine["truncated"])


# --- time limits and ends ---------------------------------------------------------------------------------------------


def test_a_time_limit_without_the_observation_behind_it_costs_its_last_step(tmp_path):
    np.savez(tmp_path / "a.npz", **joined(EPISODES, last=False))
    data = open_data(tmp_path / "a.npz", SPEC)
    assert data.steps.tolist() == [4, 2, 1, 6]
    (note,) = data.notes
    assert "1 episodes are cut" in note
    np.testing.assert_array_equal(data[1]["obs"], EPISODES[1]["obs"][:3])
    assert data[1]["truncated"].tolist() == [False, True]
    np.testing.assert_array_equal(data[0]["obs"][:-1], EPISODES[0]["obs"][:-1])  # of one that is over, nothing is lost
    assert data[0]["terminated"].tolist() == [False, False, False, True]


def test_time_limits_without_a_flag_are_where_games_jump(tmp_path):
    columns = joined(EPISODES)
    del columns["timeouts"]
    np.savez(tmp_path / "a.npz", **columns)
    data = open_data(tmp_path / "a.npz", SPEC)
    assert data.steps.tolist() == [4, 3, 1, 6]
    assert "1 are found by where games jump" in data.notes[0]
    assert data[1]["truncated"].tolist() == [False, False, True]
    del columns["next_observations"]
    np.savez(tmp_path / "b.npz", **columns)
    assert "cannot be told from terminations" in open_data(tmp_path / "b.npz", SPEC).notes[0]


def test_what_is_cut_at_the_end_of_a_file_is_truncated(tmp_path):
    columns = {k: x[:-2] for k, x in joined(EPISODES).items()}
    np.savez(tmp_path / "a.npz", **columns)
    last = open_data(tmp_path / "a.npz", SPEC)[3]
    assert last["truncated"].tolist() == [False, False, False, True]
    np.testing.assert_array_equal(last["obs"], EPISODES[3]["obs"][:5])


def test_one_episode_with_its_last_observation(tmp_path):
    np.savez(tmp_path / "a.npz", **EPISODES[1])
    data = open_data(tmp_path / "a.npz", SPEC)
    assert tree.equal({k: data[0][k] for k in EPISODES[1]}, EPISODES[1])


# --- what is wrong ----------------------------------------------------------------------------------------------------


def changed(number, name, step, value):
    out = [dict(e) for e in EPISODES]
    column = np.array(out[number][name])
    column[step] = value
    out[number][name] = column
    return out


@pytest.mark.parametrize("form", ["ours", "npz", "rllib"])
@pytest.mark.parametrize(
    ("name", "step", "value", "message"),
    [
        ("obs", 2, np.nan, "step 2: obs is nan"),
        ("reward", 1, np.inf, "step 1: reward is inf"),
        ("action", 5, 4, "step 5: action 4 is outside of discrete 4"),
        ("action", 5, -1, "step 5: action -1 is outside of discrete 4"),
    ],
)
def test_wrong_numbers_are_said_with_file_episode_and_step(form, name, step, value, message, tmp_path):
    data = open_data(write(form, tmp_path / "data", changed(3, name, step, value)), SPEC)
    assert len(data[0]["reward"]) == 4
    with pytest.raises(DataError, match=f"(?s)data.*, episode 3.*: .*{message}") as e:
        _ = data[3]
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((7, 4), np.float32)}, r"obs: expected float32\[3\], got rows of shape \[4\]"),
        ({"obs": {"x": np.zeros((7, 3), np.float32)}}, r"obs: expected float32\[3\], got the parts \['x'\]"),
        ({"action": np.full(6, 0.5)}, "step 0: action has numbers that int64 does not hold, such as 0.5"),
        ({"terminated": np.array([0, 0, 1, 0, 0, 1], bool)}, "step 2 ends it, and 3 more steps follow"),
        ({"obs": np.full((7, 3), 1e39)}, "step 0: obs has numbers that float32 does not hold"),
    ],
)
def test_episodes_that_no_such_game_has_are_refused(change, message, tmp_path):
    data = open_data(write("ours", tmp_path / "a", [EPISODES[0], {**EPISODES[3], **change}]))
    with pytest.raises(DataError, match=f"episode 1: {message}"):
        _ = data[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": {"x": np.zeros((7, 2), np.float32)}}, r"obs of all its steps: expected the parts \['x', 'n'\], got"),
        ({"obs": np.zeros((7, 3), np.float32)}, r"obs of all its steps: expected the parts \['x', 'n'\], got an array"),
        ({"action": {"a": np.zeros(6, int)}}, r"action of all its steps: expected the parts \[0, 1\], got the parts"),
    ],
)
def test_wrong_keys_are_said_with_file_and_episode(change, message, tmp_path):
    obs = {"x": np.zeros((7, 2), np.float32), "n": np.zeros(7, int)}
    right = {**EPISODES[3], "obs": obs, "action": (np.zeros(6, int), np.zeros((6, 1), np.float32))}
    data = open_data(write("ours", tmp_path / "a", [right, {**right, **change}], PARTS))
    assert set(data[0]["obs"]) == {"x", "n"}
    with pytest.raises(DataError, match=f"episodes.*, episode 1: {message}"):
        _ = data[1]


def test_actions_outside_of_a_box_are_refused_but_not_a_rounded_edge(tmp_path):
    actions = np.zeros((6, 2), np.float32)
    actions[3, 1] = np.nextafter(np.float32(1), np.float32(2))
    edge = {**EPISODES[3], "action": actions}
    outside = {**EPISODES[3], "action": actions * 2}
    data = open_data(write("ours", tmp_path / "a", [edge, outside], BOXED))
    np.testing.assert_array_equal(data[0]["action"], actions)
    with pytest.raises(DataError, match=r"step 3: action \[0.0, 2.0.*\] is outside of float32\[2\] -1..1"):
        _ = data[1]


def test_broken_episodes_may_be_left_out_and_are_counted(tmp_path):
    folder = write("ours", tmp_path / "a", changed(1, "obs", 0, np.nan))
    with pytest.raises(DataError, match="--skip-broken leaves such episodes out"):
        list(open_data(folder))
    data = open_data(folder, skip_broken=True)
    assert [len(e["reward"]) for e in data] == [4, 1, 6]
    assert list(data.broken) == [1]
    assert "step 0: obs is nan" in data.broken[1]


def pickled(path):
    class Run:
        def __reduce__(self):
            return os.mkdir, (str(path.parent / "ran"),)

    return pickle.dumps([Run()])


def hostile(kind, folder):
    """A file of this kind, and what is said of it."""
    path = folder / "a.npz"
    if kind == "pickle":
        path = folder / "trajs_0.pkl"
        path.write_bytes(pickled(path))
        return path, "trajs_0.pkl is a pickle, and whoever reads one runs what is in it: write the episodes again"
    if kind == "folder of pickles":
        hostile("pickle", folder)
        return folder, "is a pickle"
    if kind == "objects":
        np.savez(path, **{**joined(EPISODES), "observations": np.array([{}] * 14, object)})
        return path, "observations is a pickled array"
    if kind == "wrong keys":
        np.savez(path, obs=np.zeros((3, 3)), reward=np.zeros(3), done=np.zeros(3))
        return path, "expected a column action or actions; it has done, obs, reward"
    if kind == "no ends":
        np.savez(path, obs=np.zeros((3, 3)), reward=np.zeros(3), action=np.zeros(3))
        return path, "does not say where episodes end"
    if kind == "lengths":
        np.savez(path, **{**joined(EPISODES), "actions": np.zeros(9, int)})
        return path, "action has 9 rows and reward 14"
    if kind == "flags":
        np.savez(path, **{**joined(EPISODES), "terminals": np.full(14, 3)})
        return path, "terminated is 0 or 1 for each step"
    if kind == "a number":
        np.savez(path, **{**joined(EPISODES), "rewards": 3.0})
        return path, "reward is a single number"
    if kind == "cut":
        np.savez(path, **joined(EPISODES))
        path.write_bytes(path.read_bytes()[:-200])
        return path, "cannot be read as npz"
    if kind == "text":
        (folder / "a.csv").write_text("obs,action\n1,2\n")
        return folder / "a.csv", "is no file of episodes"
    path = folder / "output-1.json"
    if kind == "packed":
        path.write_text(lines(EPISODES, ["obs", "new_obs"]))
        return path, 'is packed by RLlib .* write the files again with "output_compress_columns": \\[\\]'
    if kind == "several policies":
        path.write_text(json.dumps({"type": "MultiAgentBatch", "policy_batches": {"a": {}, "b": {}}}))
        return path, r"line 1 has rows of the policies \['a', 'b'\]"
    assert kind == "no lines"
    path.write_text('{"type": "SampleBatch", "rewards": [1')
    return path, "line 1: not a SampleBatch in JSON"


@pytest.mark.parametrize(
    "kind",
    [
        "pickle",
        "folder of pickles",
        "objects",
        "wrong keys",
        "no ends",
        "lengths",
        "flags",
        "a number",
        "cut",
        "text",
        "packed",
        "several policies",
        "no lines",
    ],
)
def test_hostile_and_foreign_files_are_refused_in_one_line(kind, tmp_path):
    path, message = hostile(kind, tmp_path)
    with pytest.raises(DataError, match=message) as e:
        list(open_data(path, SPEC))
    assert "\n" not in str(e.value)
    assert str(tmp_path) in str(e.value)
    assert not (tmp_path / "ran").exists()


def test_links_out_of_an_hdf5_file_are_not_followed(tmp_path):
    h5py = pytest.importorskip("h5py")
    secret = write("d4rl", tmp_path / "other")
    with h5py.File(tmp_path / "a.hdf5", "w") as f:
        for name, x in joined(EPISODES).items():
            f[name] = x
        del f["rewards"]
        f["rewards"] = h5py.ExternalLink(str(secret), "/rewards")
    with pytest.raises(DataError, match="rewards is a link to elsewhere"):
        open_data(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "b.hdf5", "w") as f:
        for name, x in joined(EPISODES).items():
            f[name] = x
        del f["rewards"]
        f.create_dataset("rewards", (14,), "f4", external=[(str(secret), 0, 56)])
    with pytest.raises(DataError, match="rewards lies in another file"):
        open_data(tmp_path / "b.hdf5")


def minari(folder, **more):
    """A data set whose HDF5 file has something else, too, by name: a link, or columns."""
    h5py = pytest.importorskip("h5py")
    path = write("minari", folder) / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as f:
        for name, x in more.items():
            f[name] = x
    return folder


def test_groups_of_minari_that_are_links_are_not_followed_either(tmp_path):
    h5py = pytest.importorskip("h5py")
    os.mkfifo(tmp_path / "pipe")  # who opens it waits for ever
    other = minari(tmp_path / "other") / "data" / "main_data.hdf5"
    for name, to in (("linked", str(other)), ("waits", str(tmp_path / "pipe"))):
        data = open_data(minari(tmp_path / name, episode_4=h5py.ExternalLink(to, "episode_0")))
        with pytest.raises(DataError, match="episode_4 is a link to elsewhere"):
            _ = data[4]
    with pytest.raises(DataError, match="episode_4 is no group"):
        _ = open_data(minari(tmp_path / "array", episode_4=np.zeros(3)))[4]


def test_a_file_that_is_there_for_its_size_is_not_read(tmp_path):
    """Rows that are declared and not stored, and a few rows in a part that is many times as large."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.hdf5", "w") as f:
        for name, kind in (("observations", "f4"), ("actions", "i8"), ("rewards", "f4"), ("terminals", "?")):
            f.create_dataset(name, (1 << 40,), kind, chunks=(1024,))
    with h5py.File(tmp_path / "part.hdf5", "w") as f:
        for name, x in joined(EPISODES).items():
            if name == "observations":
                f.create_dataset(name, x.shape, x.dtype, maxshape=(None, 3), chunks=(1 << 28, 3))
            else:
                f[name] = x
    for name in ("rows", "part"):
        with pytest.raises(DataError, match=rf"{name}\.hdf5: .*they only fill the memory"):
            open_data(tmp_path / f"{name}.hdf5")
    with open(minari(tmp_path / "m") / "data" / "metadata.json", "wb") as f:
        f.truncate(1 << 34)
    with pytest.raises(DataError, match=r"metadata\.json has 17,179,869,184 bytes"):
        open_data(tmp_path / "m")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"next_observations": np.zeros((14, 2))}, "rows of obs are"),
        ({"rewards": np.zeros((14, 2))}, "reward is a number for each step"),
        ({"observations": np.zeros((14, 3), complex)}, r"episode 0 \(from row 0\): obs holds complex128, not real"),
        ({"actions": np.zeros(14, "V0")}, r"episode 0 \(from row 0\) cannot be read"),
        ({"terminals": np.zeros(14, [("a", "f4")])}, "terminated is 0 or 1 for each step"),
    ],
)
def test_columns_that_cannot_be_are_told_in_one_line(more, message, tmp_path):
    columns = {k: v for k, v in joined(EPISODES).items() if k != "timeouts"}
    np.savez(tmp_path / "a.npz", **columns | more)
    with pytest.raises(DataError, match=message):
        _ = open_data(tmp_path / "a.npz", SPEC)[0]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b'{"policy_batches": {"a": 3}}', "line 1: expected columns, got 3"),
        (b'{"rewards": [1.0], "terminateds": [[true]]}', "true or false for each row"),
        (b'{"rewards": [1.0], "terminateds": [0.5]}', "true or false for each row"),
        (b'{"rewards": [1.0], "terminateds": [true], "infos": "\xff"}', r"episode 0 \(from line 1\) cannot be read"),
        (
            b'{"rewards": [1.0], "terminateds": [true], "obs": [[[1]]], "new_obs": [[1]], "actions": [1]}',
            "the observation after its last step has another shape",
        ),
    ],
)
def test_lines_that_cannot_be_are_told_in_one_line(sent, message, tmp_path):
    (tmp_path / "output-1.json").write_bytes(sent + b"\n")
    with pytest.raises(DataError, match=message):
        _ = open_data(tmp_path, SPEC)[0]


def test_files_that_cannot_be_opened_are_left_out_and_counted(tmp_path):
    """A pipe, half a file, a pickled array, and one of other spaces; nothing waits."""
    good = write("ours", tmp_path / "a") / "episodes-00000.episodes"
    (tmp_path / "a" / "half.episodes").write_bytes(good.read_bytes()[:-9])
    os.mkfifo(tmp_path / "a" / "pipe.npz")
    np.savez(tmp_path / "a" / "pickled.npz", obs=np.array([{}], object))
    write("ours", tmp_path / "b", spec=BOXED)
    for broken in [*(tmp_path / "a").glob("*p*.npz"), tmp_path / "a" / "half.episodes"]:
        with pytest.raises(DataError, match=broken.name):
            open_data(broken)
    data = open_data([tmp_path / "a", tmp_path / "b"], skip_broken=True)
    assert [len(e["reward"]) for e in data] == [4, 3, 1, 6]
    assert sorted(data.broken) == [-4, -3, -2, -1]
    words = " ".join(data.broken.values())
    assert all(x in words for x in ("half.episodes", "pipe.npz", "pickled array", "different spaces"))
    with pytest.raises(DataError):
        open_data([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(DataError, match="half"):
        open_data(tmp_path / "a" / "half.episodes", skip_broken=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_changes_while_it_is_read_is_noticed(form, tmp_path):
    path = write(form, tmp_path / "data")
    data = open_data(path, SPEC)
    _ = data[0]
    file = next(
        p for p in [path, *sorted(path.rglob("*"))] if p.is_file() and p.name not in ("spec.json", "metadata.json")
    )
    os.utime(file, ns=(1, 1))
    with pytest.raises(DataError, match=f"{file.name} changed while it was read"):
        _ = data[1]
    file.unlink()
    with pytest.raises(DataError, match=f"{file.name} cannot be read"):
        _ = data[1]


def test_what_only_fills_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    still = {**EPISODES[3], "obs": np.zeros((7, 50_000), np.float32)}
    path = write("ours", tmp_path / "a", [still], EnvSpec("game", Space("box", (50_000,)), SPEC.action))
    columns = joined([still])
    np.savez_compressed(tmp_path / "a.npz", **columns)
    assert tree.nbytes(open_data(path)[0]) > 1_000_000
    monkeypatch.setattr("bray.data.files.LARGE_EPISODE", 1_000_000)
    for file in (path, tmp_path / "a.npz"):
        with pytest.raises(DataError, match=r"bytes that say they are 1\d{6} are not read"):
            _ = open_data(file)[0]


def test_two_data_sets_with_different_spaces_are_refused(tmp_path):
    write("ours", tmp_path / "a")
    write("ours", tmp_path / "b", spec=BOXED)
    with pytest.raises(
        DataError, match=r"different spaces: actions of .*a.* are discrete 4, those of .*b.* float32\[2\]"
    ):
        open_data(tmp_path / "*" / "*.episodes")
    assert len(open_data(tmp_path / "*" / "*.episodes", SPEC)) == 8


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a directory, a file or a pattern .*\*.episodes, \*.npz"):
        open_data(tmp_path)


def test_spaces_are_proposed_where_files_do_not_say_them(tmp_path):
    assert guess(EPISODES[0]) == ("float32[3]", "4")
    assert guess({**EPISODES[0], "action": np.zeros((4, 2), np.float32)}) == ("float32[3]", "float32[2] -1..1")


# --- more than fits into memory ---------------------------------------------------------------------------------------


def make(folder, epochs=2, memory=2000, n_step=1):
    """A Dataset of 50 episodes of 1 to 9 steps, which reads them itself."""
    if not folder.exists():
        write_episodes(folder / "e", [episode(i, 1 + i % 9, over=i % 2 == 0) for i in range(50)], per_file=20)
    data = Dataset(16, epochs=epochs, gamma=0.9, n_step=n_step)
    data.seed(3)
    source = FileSource(folder, SPEC.layout, reads_itself=True)
    data.read_from(source, memory)
    return source, data


def drawn(data, most=1000):
    out = []
    try:
        while len(out) < most:
            out.append(data.next(None).data)
    except EndOfData:
        pass
    return out


@pytest.mark.parametrize("n_step", [1, 3])
def test_in_parts_each_epoch_has_every_transition_once_in_another_order(n_step, tmp_path):
    _, data = make(tmp_path / "a", n_step=n_step)
    data.complete()
    batches = drawn(data)
    count = sum(1 + i % 9 for i in range(50))
    assert {len(b["reward"]) for b in batches} == {16}
    assert len(batches) == 2 * count // 16
    keys = [tuple(row[:2]) for b in batches for row in b["obs"].tolist()]
    first, second = keys[:count], keys[count:]
    assert len(set(first)) == count
    assert len(set(second)) == len(second)
    assert first[: len(second)] != second
    whole = Dataset(16, gamma=0.9, n_step=n_step)
    for i in range(50):
        whole.add(episode_piece(episode(i, 1 + i % 9, over=i % 2 == 0), i, SPEC.layout))
    whole.complete()
    wanted = {tuple(b["obs"][i, :2].tolist()): tree.index(b, i) for b in drawn(whole) for i in range(16)}
    for batch in batches[: count // 16]:
        for i in range(16):
            if (key := tuple(batch["obs"][i, :2].tolist())) in wanted:
                assert tree.equal(tree.index(batch, i), wanted[key])


@pytest.mark.parametrize("stop", [0, 1, 7, 18, 29])
@pytest.mark.parametrize("memory", [2000, 1_000_000])
def test_learning_goes_on_exactly_in_the_middle_of_a_part(memory, stop, tmp_path):
    def fresh():
        _, data = make(tmp_path / "a", memory=memory)
        return data

    original = fresh()
    original.complete()
    drawn(original, stop)
    state = original.get_state(None)
    state["json"] = json.loads(json.dumps(state["json"]))
    state["arrays"] = tree.unpack(tree.pack(state["arrays"]))
    resumed = fresh()
    assert resumed.set_state(state, None)
    resumed.complete()
    rest, again = drawn(original), drawn(resumed)
    assert len(rest) == len(again) > 0
    assert all(tree.equal(a, b) for a, b in zip(rest, again, strict=True))


def test_a_source_that_is_read_in_parts_counts_its_steps_once(tmp_path):
    source, data = make(tmp_path / "a")
    pieces, counts = source.gather()
    assert not pieces
    assert counts.env_steps == int(EpisodeReader(tmp_path / "a").steps.sum())
    with pytest.raises(EndOfData):
        source.gather()
    data.complete()
    drawn(data)
    assert source.numbers()["data/episodes"] == 50
    assert isinstance(source.read(0), Piece)
