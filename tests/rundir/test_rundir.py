"""Run directories: layout, checkpoints that survive a kill or a full disk at every step, and damage that is refused."""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from bray import rundir, tree
from bray.config import parse_assignments, resolve
from bray.errors import CheckpointError, DataError, UnknownName
from bray.rundir import (
    RunDir,
    default_run_dir,
    log_to,
    logging_to,
    match_weights,
    pack_state,
    unpack_state,
    write_atomic,
)
from bray.rundir.weights import pack_weights, unpack_weights
from bray.spec import EnvSpec, Space


def weights(step: int) -> dict[str, np.ndarray]:
    return {"layer.weight": np.full((2, 3), step, np.float32), "steps": np.array(step), "mask": np.array([True, False])}


def state(step: int) -> dict:
    return {
        "arrays": {"momentum": np.full(4, step / 7), "none": np.zeros((0, 2), np.int8)},
        "rng": np.random.default_rng(step).bit_generator.state,  # text and numbers of 128 bits
        "groups": [{"lr": 1e-3, "amsgrad": False, "name": None}],
        "by_number": {0: np.arange(step), 1: (np.ones(1), b"\x00bytes\xff")},
        "scalar": np.float32(0.5),
    }


def save(run: RunDir, step: int, **kwargs) -> Path:
    return run.save_checkpoint(step, weights(step), state(step), {"env_steps_total": step * 10}, **kwargs)


def same(a, b) -> bool:
    """Equal states, whatever their leaves are."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (np.ndarray, np.generic)):
        return tree.equal(np.asarray(a), np.asarray(b))
    return type(a) is type(b) and a == b


def check(checkpoint: rundir.Checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert tree.equal(dict(sorted(checkpoint.weights.items())), dict(sorted(weights(step).items())))
    assert same(checkpoint.state, state(step))
    assert checkpoint.meta == {"env_steps_total": step * 10}


def leftovers(path: Path) -> list[str]:
    return [str(p.relative_to(path)) for p in path.rglob(".*") if p.name != ".lock"]


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path / "run")
    yield made
    made.close()


# --- the directory


def test_create_refuses_to_write_over_a_run(tmp_path, run):
    said = r"already holds a run \(checkpoints\). Go on with it by --resume .*another --trial"
    in_python = rf" \(in Python: Experiment.resume\('{run.path}'\), or another path=\)"
    with pytest.raises(CheckpointError, match=said + in_python):
        RunDir.create(run.path)
    assert RunDir.create(run.path, resume=True).path == run.path
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        RunDir.create(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    RunDir.create(tmp_path / "other").close()  # a folder with other things in it is fine
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_open_refuses_what_is_no_run(tmp_path, run):
    with pytest.raises(CheckpointError, match="there is no such run directory"):
        RunDir.open(tmp_path / "nothing")
    with pytest.raises(
        CheckpointError,
        match=r"not a run directory: expected config\.yaml or checkpoints/ in it\. There are runs in it: run",
    ):
        RunDir.open(tmp_path)


def test_one_process_writes_while_others_read(run):
    save(run, 1)
    code = (
        "import sys; from bray.rundir import RunDir\n"
        "print(RunDir.open(sys.argv[1]).load_checkpoint().step)\n"
        "try: RunDir.create(sys.argv[1], resume=True)\n"
        "except Exception as e: print(e)"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(run.path)], text=True).splitlines()
    assert out[0] == "1"
    assert "another process is training here" in out[1]
    run.close()
    out = subprocess.check_output([sys.executable, "-c", code, str(run.path)], text=True).splitlines()
    assert out == ["1"]


def test_default_run_dir(tmp_path):
    now = datetime(2026, 11, 15, 2, 3, 4)
    path = default_run_dir("ALE/Pong-v5", "PPO", now, tmp_path)
    assert path == tmp_path / "ALE-Pong-v5" / "PPO-20261115-020304"
    path.mkdir(parents=True)
    assert default_run_dir("ALE/Pong-v5", "PPO", now, tmp_path).name == "PPO-20261115-020304-2"
    assert (
        default_run_dir("my.module:Env", "a/../b", now, tmp_path)
        == tmp_path / "my.module-Env" / "a-..-b-20261115-020304"
    )
    assert default_run_dir("../..", "PPO", now, tmp_path).parent == tmp_path / "run"
    assert default_run_dir("CartPole-v1", "DQN", now).parts[0] == "runs"


def test_what_was_run_is_written(run):
    @dataclass
    class Algo:
        lr: float = 0.5
        sizes: tuple[int, ...] = (2, 1)

    Algo.__annotations__ = {"lr": float, "sizes": tuple[int, ...]}
    run.write_config(resolve({"algo": Algo}, [parse_assignments(["lr=1e-3"])]))
    assert "lr: 0.001" in (run.path / "config.yaml").read_text()
    text = (run.path / "params.json").read_text()
    assert text == '{\n  "algo": {\n    "lr": 0.001,\n    "sizes": [\n      2,\n      1\n    ]\n  }\n}\n'
    spec = EnvSpec("Game-v0", Space("box", (2,)), Space("discrete", (), "int64", n=(2,), start=(0,)))
    run.write_spec(spec)
    assert EnvSpec.from_json(run.read_json("spec.json")) == spec
    run.write_policy({"bounds": np.array([1.5]), "bad": float("nan")})
    assert run.read_json("policy.json") == {"bounds": [1.5], "bad": None}
    with pytest.raises(DataError, match="expected plain data"):
        run.write_json("x.json", {"a": object()})
    with pytest.raises(CheckpointError, match=r"nothing\.json is missing"):
        run.read_json("nothing.json")
    (run.path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected JSON"):
        run.read_json("broken.json")


def test_folders(run):
    assert run.folder("videos").is_dir()
    with pytest.raises(UnknownName, match="Did you mean 'figures'"):
        run.folder("figure")


def test_log_file(run):
    with logging_to(run.log, "WARN"):
        logging.getLogger("bray").info("quiet")
        logging.getLogger("bray.loop").warning("loud %d", 3)
    logging.getLogger("bray").warning("after")
    handler = log_to(run.log, "DEBUG")
    logging.getLogger("bray").debug("more")
    handler.close()
    lines = run.log.read_text().splitlines()
    assert [re.sub(r"^[\d-]+ [\d:,]+ ", "", line) for line in lines] == ["WARNING loud 3", "DEBUG   more"]
    assert handler not in logging.getLogger("bray").handlers
    with pytest.raises(UnknownName, match="Did you mean 'WARN'"):
        log_to(run.log, "wran")


SCRIPT = """
import logging, sys
from bray.rundir import logging_to
log = logging.getLogger("bray.train")
with logging_to("a.log"), logging_to("b.log"):
    log.info("quiet")
    log.warning("unheard")
    logging.getLogger("bray").addHandler(logging.StreamHandler(sys.stdout))
    log.warning("heard")
"""


def test_warnings_of_a_script_are_seen(tmp_path):
    """A file is a handler too, and Python shows what has none."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "unheard\n"
    assert done.stdout == "heard\n"
    for name in ("a.log", "b.log"):
        assert [line.split()[-1] for line in (tmp_path / name).read_text().splitlines()] == [
            "quiet",
            "unheard",
            "heard",
        ]


# --- trainer state


def test_state_keeps_arrays_numbers_text_bytes_and_int_keys():
    assert same(unpack_state(pack_state(state(3))), state(3))
    back = unpack_state(pack_state({"a": np.arange(3)}))
    back["a"][0] = 9  # writable
    rng = np.random.default_rng(5)
    rng.random(7)
    other = np.random.default_rng(0)
    other.bit_generator.state = unpack_state(pack_state(rng.bit_generator.state))
    assert other.random() == rng.random()
    assert unpack_state(pack_state({"nan": float("nan"), "inf": -float("inf")}))["inf"] == -float("inf")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": {"b": object()}}, "trainer state at /a/b: expected arrays, numbers, text or bytes, got object"),
        ({"a": {"$json": 1}}, r"trainer state at /a: expected keys that are text, got '\$json'"),
        ({"a": {"x": 1, 2: 3}}, "expected keys that are text, got 2"),
        ({"a": np.array(["x"])}, "arrays of numbers"),
    ],
)
def test_state_that_cannot_be_kept_is_refused(bad, message):
    with pytest.raises(DataError, match=message):
        pack_state(bad)


@pytest.mark.parametrize(
    "node", [{"$json": np.frombuffer(b"{", np.uint8)}, {"$ints": np.zeros(1)}, {"$ints": {"x": np.zeros(1)}}]
)
def test_state_from_a_forged_file_is_refused(node):
    with pytest.raises(DataError, match="not a trainer state"):
        unpack_state(tree.pack({"a": node}))


# --- checkpoints


def test_checkpoint_round_trip_and_layout(run):
    path = save(run, 7)
    check(run.load_checkpoint(), 7)
    check(RunDir.open(run.path).load_checkpoint(7), 7)
    check(run.load_checkpoint("7"), 7)
    assert sorted(p.name for p in path.iterdir()) == ["meta.json", "model.safetensors", "state.tree"]
    assert os.path.samefile(
        path / "model.safetensors", run.path / "models" / "default" / "7.safetensors"
    )  # one copy on disk
    assert os.readlink(run.checkpoints / "latest") == "7"
    head = json.loads((path / "meta.json").read_text())
    assert (head["format"], head["step"], head["meta"]) == (1, 7, {"env_steps_total": 70})
    assert leftovers(run.path) == []


def test_latest_and_best(run):
    with pytest.raises(CheckpointError, match="has no latest checkpoint"):
        run.load_checkpoint()
    save(run, 1, best=True)
    save(run, 2)
    assert run.load_checkpoint("latest").step == 2
    assert run.load_checkpoint("best").step == 1
    with pytest.raises(UnknownName, match="Did you mean 'latest'"):
        run.load_checkpoint("lastest")
    with pytest.raises(UnknownName, match="unknown checkpoint '3'"):
        run.load_checkpoint(3)


def test_a_file_system_without_links(run, monkeypatch):
    def no(*a, **k):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", no)
    monkeypatch.setattr(os, "link", no)
    save(run, 1, best=True)
    save(run, 2)
    assert not (run.checkpoints / "latest").is_symlink()
    check(run.load_checkpoint(), 2)
    check(run.load_checkpoint("best"), 1)


def test_saving_the_same_step_again_replaces_it(run):
    save(run, 1)
    run.save_checkpoint(1, weights(5), state(5), {"env_steps_total": 50})
    again = run.load_checkpoint()
    assert again.weights["steps"] == 5
    assert same(again.state, state(5))
    assert leftovers(run.path) == []


def test_retention_keeps_the_newest_best_latest_and_protected(run):
    for step in range(1, 8):
        save(run, step, best=step == 2, keep=2)
        if step == 4:
            run.protect(4)
    assert run.steps() == [2, 4, 6, 7]
    assert run.versions() == [2, 4, 6, 7]
    run.protect(4, on=False)
    save(run, 8, keep=1)
    assert run.steps() == run.versions() == [2, 8]
    check(run.load_checkpoint("best"), 2)
    assert leftovers(run.path) == []


def test_retention_forgets_a_future_that_was_given_up(run):
    for step in (1, 2, 3, 4):
        save(run, step)
    save(run, 2, keep=2)  # resumed from 1, trained to 2 again
    assert run.steps() == [1, 2]


def test_retention_leaves_other_models_and_damaged_checkpoints_alone(run):
    save(run, 1)
    run.save_weights(1, weights(1), "rival")
    run.save_weights(5, weights(5))  # published, no checkpoint
    save(run, 2)
    (run.checkpoints / "2" / "meta.json").write_text("{}")
    save(run, 3, keep=1)
    assert run.steps() == [2, 3]
    assert run.versions("rival") == [1]
    assert run.versions() == [2, 3, 5]
    assert run.load_weights(1, "rival")["steps"] == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"step": -1}, "step that is a whole number >= 0, got -1"),
        ({"step": 1.5}, "got 1.5"),
        ({"name": "../x"}, "expected a model name"),
        ({"name": ""}, "expected a model name"),
        ({"keep": 0}, "at least 1 checkpoint, got keep=0"),
        ({"weights": {"a": [1]}}, "weight 'a': expected a numpy array of numbers, got list"),
        ({"weights": {"a": np.array([None])}}, "got object"),
        ({"state": {"a": object()}}, "trainer state at /a"),
        ({"meta": {"a": object()}}, "expected plain data"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_refused_before_anything_is(run, kwargs, message):
    save(run, 1)
    with pytest.raises((CheckpointError, DataError), match=message):
        run.save_checkpoint(**({"step": 2, "weights": weights(2), "state": state(2)} | kwargs))
    assert run.steps() == run.versions() == [1]


def test_weights_keep_their_types(run):
    w = {k: np.array([0, 1, 2]).astype(k) for k in ("float16", "float32", "float64", "int8", "uint8", "int64", "bool")}
    w["scalar"] = np.array(2.5)
    w["strided"] = np.arange(6.0).reshape(2, 3).T
    run.save_weights(3, w)
    got = run.load_weights(3)
    assert tree.equal({k: got[k] for k in w}, w)
    with pytest.raises(CheckpointError, match=r"4\.safetensors is missing"):
        run.load_weights(4)
    run.weights_path(3).write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="expected a safetensors file"):
        run.load_weights(3)


# --- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_meta(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("state.tree", truncate, "bytes, got .* truncated or foreign"),
        ("model.safetensors", truncate, "truncated or foreign"),
        ("meta.json", truncate, None),
        ("state.tree", flip, "content was changed after it was written"),
        ("model.safetensors", flip, "content was changed"),
        ("state.tree", lambda p: p.unlink(), "state.tree is missing"),
        ("meta.json", lambda p: p.unlink(), "meta.json is missing"),
        ("meta.json", lambda p: p.write_text("[]"), "expected a JSON object, got \\[\\]"),
        ("meta.json", lambda p: p.write_text('{"kind": "zip"}'), "expected a bray checkpoint"),
        ("meta.json", lambda p: p.write_bytes(b"\xff\xfe"), "expected JSON"),
        ("meta.json", edit_meta(format=99), r"expected checkpoint format 1, got 99 \(written by Bray"),
        ("meta.json", edit_meta(meta={"seed": 1}), r"changed after it was written \(checksum\)"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_an_intact_one_named(run, file, damage, message):
    save(run, 1)
    save(run, 2)
    victim = run.checkpoints / "2" / file
    data = victim.read_bytes()
    victim.unlink()  # its own copy: the weights are a hard link
    victim.write_bytes(data)
    damage(victim)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    if file == "meta.json" and damage is truncate:
        assert run.is_intact(2)  # the last byte is a line feed
        truncate(victim)
        before[victim] = victim.read_bytes()
        message = "expected JSON"
    with pytest.raises(CheckpointError, match=message) as e:
        run.load_checkpoint()
    assert "checkpoint 'latest'" in str(e.value)
    assert str(e.value).endswith("The newest intact one is 1.")
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before  # nothing was overwritten
    check(run.load_checkpoint(1), 1)


def test_a_checkpoint_of_another_step_or_a_broken_pointer_is_refused(run):
    save(run, 1)
    shutil.copytree(run.checkpoints / "1", run.checkpoints / "5")
    with pytest.raises(CheckpointError, match="expected step 5, got 1: a foreign checkpoint"):
        run.load_checkpoint(5)
    shutil.rmtree(run.checkpoints / "1")
    with pytest.raises(CheckpointError, match=r"1 is missing\. No other one is intact"):
        run.load_checkpoint()
    (run.checkpoints / "latest").unlink()
    (run.checkpoints / "latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match=r"expected the number of a checkpoint, got '\.\./\.\./etc'"):
        run.load_checkpoint()


def test_every_truncation_of_every_file_is_refused(run):
    path = save(run, 1)
    for name in ("state.tree", "model.safetensors", "meta.json"):
        data = (path / name).read_bytes()
        for size in range(0, len(data) - 1, 37):
            (path / name).unlink()
            (path / name).write_bytes(data[:size])
            assert not run.is_intact(1), (name, size)
        (path / name).write_bytes(data)
    assert run.is_intact(1)


# --- a kill or a full disk at every step


class Killed(BaseException):
    """The process is gone: nothing it would still do happens."""


class Faults:
    """Counts what changes the file system; at the n-th such call something happens: an error once, or death for
    good."""

    def __init__(self, monkeypatch, at: int, error: type[BaseException]):
        self.calls, self.at, self.error, self.dead = 0, at, error, False
        self.log: list[str] = []
        patch = monkeypatch.setattr
        for module, names in ((os, ("replace", "rename", "fsync", "symlink", "link", "unlink", "rmdir")),):
            for name in names:
                patch(module, name, self.wrap(name, getattr(module, name)))
        patch(Path, "mkdir", self.wrap("mkdir", Path.mkdir))
        patch(Path, "unlink", self.wrap("unlink", Path.unlink))
        patch(shutil, "rmtree", self.wrap("rmtree", shutil.rmtree))
        patch(rundir, "open", self.open, raising=False)

    def step(self, name: str) -> None:
        if self.dead:
            raise Killed
        self.calls += 1
        self.log.append(name)
        if self.calls == self.at:
            if self.error is Killed:
                self.dead = True
                raise Killed
            raise OSError(errno.ENOSPC, "No space left on device")

    def wrap(self, name, real):
        def call(*args, **kwargs):
            self.step(name)
            return real(*args, **kwargs)

        return call

    def open(self, path, mode="r", *args, **kwargs):
        self.step("open")
        f = builtins.open(path, mode, *args, **kwargs)  # noqa: SIM115
        real = f.write

        def write(data):
            try:
                self.step("write")
            except BaseException:
                real(data[: len(data) // 2])  # half of it arrived
                f.flush()
                raise
            return real(data)

        return _Wrapped(f, write)


class _Wrapped:
    def __init__(self, f, write):
        self._f, self.write = f, write

    def __getattr__(self, name):
        return getattr(self._f, name)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._f.close()


def scenario_first(run):
    save(run, 1, best=True)


def scenario_next(run):
    save(run, 3, best=True)


def scenario_same_step(run):
    run.save_checkpoint(2, weights(9), state(9), {"env_steps_total": 90})


def scenario_retention(run):
    save(run, 3, keep=1)


SCENARIOS = [scenario_first, scenario_next, scenario_same_step, scenario_retention]


def prepared(tmp_path, scenario) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    if scenario is not scenario_first:
        save(run, 1)
        save(run, 2, best=True)
    return run


def count_calls(tmp_path, scenario) -> int:
    run = prepared(tmp_path / "count", scenario)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, 0, Killed)
        scenario(run)
    run.close()
    return faults.calls


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_fault_at_any_step_leaves_a_whole_checkpoint(tmp_path, scenario, error, monkeypatch):
    total = count_calls(tmp_path, scenario)
    assert total >= 15
    for at in range(1, total + 1):
        run = prepared(tmp_path / str(at), scenario)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, error)
            refused = ""
            try:
                scenario(run)
            except Killed:
                assert error is Killed
            except CheckpointError as e:
                refused = str(e)
        where = (at, faults.log[-1])
        if refused:
            assert error is OSError, where
            assert "disk full while writing" in refused, where
            assert "kept" in refused or "safe" in refused, where

        # a reader sees the previous state or the new one, whole
        reader = RunDir.open(run.path)
        found = None
        with contextlib.suppress(CheckpointError):
            found = reader.load_checkpoint()
        if scenario is scenario_first:
            assert found is None or found.step == 1, where
            assert found is not None or reader.pointer("latest") is None, where
        elif scenario is scenario_same_step:
            assert found is not None, where
            assert found.step == 2
            assert found.weights["steps"] in (2, 9), where
            assert same(found.state, state(int(found.weights["steps"]))), where
        else:
            assert found is not None, where
            assert found.step in (2, 3), where
            check(found, found.step)
        for step in reader.steps():
            assert reader.is_intact(step), where  # no half checkpoint is ever in sight
        if scenario is not scenario_first:
            assert reader.load_checkpoint("best").step in (2, 3), where

        # and training goes on
        again = RunDir.create(run.path, resume=True)
        assert leftovers(again.path) == [], where
        if found is not None:
            assert again.load_checkpoint().step == found.step
        save(again, 4, keep=1)
        check(again.load_checkpoint(), 4)
        again.close()
        shutil.rmtree(run.path)


@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_fault_while_writing_a_file_keeps_the_previous_one(tmp_path, error):
    path = tmp_path / "config.yaml"
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, 0, Killed)
        write_atomic(path, "old")
    for at in range(1, faults.calls + 1):
        path.write_text("old")
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, error)
            with pytest.raises((Killed, CheckpointError)):
                write_atomic(path, "new")
        assert path.read_text() in (("old", "new") if at == faults.calls else ("old",))
        if error is OSError:
            assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_other_errors_say_what_they_are(tmp_path):
    (tmp_path / "dir").mkdir()
    with pytest.raises(CheckpointError, match=r"could not write .*dir \(Is a directory\): the previous file is kept"):
        write_atomic(tmp_path / "dir", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["dir"]


# --- weights of another model


def test_matching_weights_strictly_and_partly():
    want = {"a": np.zeros(2, np.float32), "b": np.zeros((2, 2), np.float32), "c": np.zeros(1, np.float32)}
    got = {"net.a": np.ones(2, np.float32), "net.b": np.ones((2, 3), np.float32), "net.d": np.ones(1, np.float32)}
    report = match_weights(want, got, strict=False, remove_prefix="net.")
    assert report.missing == ["c"]
    assert report.redundant == ["d"]
    assert report.mismatched == ["b (expected float32[2, 2], got float32[2, 3])"]
    assert list(report.weights) == ["a"]
    with pytest.raises(
        CheckpointError, match="belong to another model: 1 tensors fit; missing: c; redundant: d; mismatched: b"
    ):
        match_weights(want, got, remove_prefix="net.")
    assert match_weights(want, want).exact
    assert match_weights({"m.a": want["a"]}, {"a": want["a"]}, add_prefix="m.").exact
    assert match_weights({"a": want["a"]}, want, skip=("b", "c")).exact


def test_a_kill_before_the_first_checkpoint_is_named_latest_loses_nothing(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.save_checkpoint(0, {"w": np.zeros(2, np.float32)}, {})
    (run.checkpoints / "latest").unlink()
    assert run.pointer("latest") == run.load_checkpoint().step == 0
    assert run.pointer("best") is None


def test_a_run_that_ended_before_its_first_checkpoint_is_begun_anew(tmp_path):
    path = tmp_path / "run"
    RunDir.create(path).close()
    (path / "config.yaml").write_text("run: {}\n")
    (path / "checkpoints" / ".new-0-abcd").mkdir()
    with pytest.raises(CheckpointError, match=r"has no latest checkpoint\. Start it again as it was begun"):
        RunDir.open(path).load_checkpoint()
    run = RunDir.create(path)
    assert list(run.checkpoints.iterdir()) == []
    run.close()
    (path / "result.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunDir.create(path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("# by hand\n")
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunDir.create(mine)


def test_a_kill_while_an_old_checkpoint_goes_leaves_no_weights_of_it(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run")
    for step in range(2):
        run.save_checkpoint(step, {"w": np.zeros(2, np.float32)}, {})

    def killed(source, target):
        if ".gone-" in str(target):
            raise KeyboardInterrupt
        rename(source, target)

    rename = os.rename
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(2, {"w": np.zeros(2, np.float32)}, {}, keep=1)
    monkeypatch.undo()
    assert all(run.is_intact(step) for step in run.steps())
    run.save_checkpoint(3, {"w": np.zeros(2, np.float32)}, {}, keep=1)
    assert run.steps() == run.versions() == [3]


def test_a_file_whose_length_begins_like_a_pickle_is_read(tmp_path):
    """0x80 begins a pickle, and a header of 128 bytes more than a multiple of 256."""
    for n in range(1, 300):
        data = pack_weights({"w" * n: np.zeros(1, np.float32)})
        if data[0] == 0x80:
            assert list(unpack_weights(data, "x.safetensors")) == ["w" * n]
            return
    raise AssertionError("no such file was made")
