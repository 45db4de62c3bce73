"""What is read from a run directory is checked first: plain files inside of it, of a size that can be, as they were
written, finite."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest

from bray import tree
from bray.cli.main import main
from bray.data.files import EpisodeReader, write_episodes
from bray.errors import BrayError, CheckpointError, DataError
from bray.experiment import Experiment, export_graph, torch_engine
from bray.figures import read_results
from bray.rundir import RunDir, pack_state, unpack_state
from bray.service import PolicyService
from bray.serving.config import ServedModelConfig
from bray.serving.graph import GraphExport
from bray.spec import Space
from bray.web.runs import Project
from bray.web.server import RenderServer

OLD = Path(__file__).parents[1] / "files" / "runs-0.1"


def train(path, run, **settings):
    """The weights of a short run."""
    exp = Experiment(
        run=run,
        env="CartPole-v1",
        record=False,
        save_figure=False,
        path=path,
        use_preset=False,
        num_envs=2,
        checkpoint_freq=1,
        fcnet_hiddens=[8],
        **settings,
    )
    for _ in exp.train(stop={"training_iteration": 2}):
        pass
    exp.close()
    return exp.training.weights()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Short runs, one of which leaves its graph while it trains."""
    path = tmp_path_factory.mktemp("made")
    train(path / "ppo", "PPO", rollout_length=8, minibatches=2, export_graph_after_s=0.0)
    train(path / "dqn", "DQN", replay_size=500)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "ppo", tmp_path / "run", symlinks=True)


def newest(run):
    return RunDir(run).pointer("latest")


def serve(run):
    PolicyService({"m": run}, ServedModelConfig())


def load(run):
    exp = Experiment.load(run)
    exp.policy(np.zeros(4, np.float32))


def resume(run):
    Experiment.resume(run).close()


def train_on(run):
    exp = Experiment.resume(run)
    try:
        next(iter(exp.train(stop={"training_iteration": 3})), None)
    finally:
        exp.close()


# --- checksums --------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_weights_is_never_served(run):
    directory, step = RunDir(run), newest(run)
    path = directory.weights_path(step)
    good, weights = path.read_bytes(), directory.load_weights(step)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 8 * len(good), 200):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        path.unlink()
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            assert tree.equal(directory.load_weights(step), weights), f"bit {at} is served"
    data = bytearray(good)
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed after it was written"):
        serve(run)


def test_a_flipped_bit_in_a_graph_is_never_served(run):
    path = run / "models" / "default" / "graph.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"graph\.onnx: its content was changed"):
        serve(run)


def begin_export(path):
    export = GraphExport(path, 0.0)
    export.tend(1.0)
    return export, export.process


def test_a_finished_training_leaves_its_export_to_itself(tmp_path):
    export, process = begin_export(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "wait", lambda *_: None)  # as without the tests' own wait
        export.close(goes_on=True)
    assert process.wait() == 2  # it ended by itself: there is no run in the directory


def test_a_stopped_training_ends_its_export(tmp_path):
    export, process = begin_export(tmp_path)
    export.close(goes_on=False)
    assert process.returncode == -signal.SIGKILL


def test_an_export_ends_with_a_training_that_is_killed(tmp_path):
    _, process = begin_export(tmp_path)
    process.stdin.close()  # what the kernel does for a process that dies
    assert process.wait() == 3


def test_a_training_leaves_its_graph_and_learns_the_same_to_the_bit(made, tmp_path):
    assert (made / "ppo" / "models" / "default" / "graph.onnx").exists()
    plain = train(tmp_path / "plain", "PPO", rollout_length=8, minibatches=2, export_graph_after_s=None)
    assert not (tmp_path / "plain" / "models" / "default" / "graph.onnx").exists()
    exported = RunDir(made / "ppo").load_checkpoint().weights
    assert tree.equal(plain, {name: exported[name] for name in plain})


def test_serve_imports_nothing_that_the_directory_names(run, monkeypatch):
    (run.parent / "evil_served.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(run.parent))
    text = re.sub(r" +#.*", "", (run / "config.yaml").read_text())
    for key, was in (("id", "CartPole-v1"), ("custom_model", "null"), ("algorithm", "PPO"), ("import_modules", "[]")):
        value = "[evil_served]" if was == "[]" else "evil_served:Thing"
        assert f"  {key}: {was}" in text
        text = text.replace(f"  {key}: {was}", f"  {key}: {value}")
    (run / "config.yaml").write_text(text)
    serve(run)


def test_weights_of_version_0_1_are_checked_by_their_checkpoint(tmp_path):
    run = RunDir(shutil.copytree(OLD / "ppo-cartpole", tmp_path / "run", symlinks=True))
    path = run.weights_path(run.pointer("latest"))
    assert run.load_weights(run.pointer("latest"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed after it was written"):
        run.load_weights(run.pointer("latest"))


# --- plain files inside of the directory ------------------------------------------------------------------------------

FILES = {
    "config.yaml": (load, resume),
    "spec.json": (load, serve, resume),
    "policy.json": (serve,),
    "models/default/graph.onnx": (serve,),
    "models/default/graph.weights": (serve,),
    "models/default/samples.tree": (serve,),
    "models/default/{step}.safetensors": (serve,),
    "checkpoints/{step}/meta.json": (load, resume),
    "checkpoints/{step}/state.tree": (load, resume),
    "checkpoints/{step}/model.safetensors": (load, resume),
    "checkpoints/{step}": (load, resume),
    "models/default": (serve,),
    "result.jsonl": (resume,),
    "bray.log": (resume,),
}


def instead(kind, path):
    """Something else in place of a file or a directory."""
    outside = path.parent / "moved"
    path.rename(outside)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
        os.chdir(here)
    elif kind == "sparse":
        with open(path, "wb") as f:
            f.truncate(1 << 42)


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "socket"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_is_refused(name, kind, run):
    instead(kind, run / name.format(step=newest(run)))
    for read in FILES[name]:
        with pytest.raises(BrayError):
            read(run)


@pytest.mark.parametrize("name", [n for n in FILES if "." in n and n not in ("result.jsonl", "bray.log")])
def test_a_file_larger_than_it_can_be_is_refused_unread(name, run):
    instead("sparse", run / name.format(step=newest(run)))
    for read in FILES[name]:
        with pytest.raises(BrayError, match=r"expected at most|bytes"):
            read(run)


def test_a_copy_that_followed_links_is_a_run_like_any_other(made, tmp_path, capsys):
    """`cp -rL`, or an archive: `latest` and `best` are directories then."""
    run, step = shutil.copytree(made / "ppo", tmp_path / "copy", symlinks=False), newest(made / "ppo")
    for which in ("latest", "best"):
        assert (run / "checkpoints" / which / "meta.json").is_file()
        assert not (run / "checkpoints" / which).is_symlink()
        assert RunDir(run).pointer(which) == RunDir(made / "ppo").pointer(which)
    serve(run)
    load(run)
    assert main(["export", str(run)]) == 0
    assert main(["eval", str(run), "--episodes", "1", "--checkpoint", "best"]) == 0
    train_on(run)
    assert newest(run) > step
    assert (run / "checkpoints" / "latest").is_symlink()
    assert not list((run / "checkpoints").glob(".*"))
    assert RunDir(run).load_checkpoint("best").step == RunDir(run).pointer("best")


def test_a_copied_pointer_names_a_step_or_is_refused(made, tmp_path):
    run = shutil.copytree(made / "ppo", tmp_path / "copy", symlinks=False)
    (run / "checkpoints" / "latest" / "meta.json").write_text('{"step": "../../etc"}')
    with pytest.raises(CheckpointError, match="expected the number of a checkpoint"):
        load(run)
    (run / "checkpoints" / "latest" / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json is missing"):
        load(run)


def rewrite_meta(run, **changes):
    """`meta.json` with other content and a checksum that is right."""
    path = run / "checkpoints" / str(newest(run)) / "meta.json"
    head = json.loads(path.read_text()) | changes
    head.pop("sha256")
    head["sha256"] = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(head))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"/dev/zero": {"bytes": 1, "sha256": ""}}},
        {"files": {"../../../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": []},
        {"files": {"state.tree": 1}},
        {"name": "../../x"},
        {"step": "1"},
        {"meta": None},
    ],
    ids=str,
)
def test_a_crafted_meta_json_reads_nothing_else(changes, run):
    rewrite_meta(run, **changes)
    with pytest.raises(CheckpointError, match=r"meta\.json|model name"):
        load(run)


def test_a_name_of_a_model_leads_nowhere(run):
    policy = json.loads((run / "policy.json").read_text())
    (run / "policy.json").write_text(json.dumps(policy | {"model": "../../outside"}))
    with pytest.raises(CheckpointError, match="model name"):
        serve(run)
    with pytest.raises(CheckpointError, match="model name"):
        export_graph(run)


def test_a_graph_that_asks_for_other_files_is_refused(run):
    path = run / "models" / "default" / "graph.onnx"
    model = onnx.load_model_from_string(path.read_bytes())
    tensor = onnx.TensorProto(name="secret", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.initializer.append(tensor)
    del model.metadata_props[1:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match="'secret' lies in another file"):
        serve(run)


def test_a_seed_that_no_generator_takes_is_refused(run):
    text = re.sub(r" +#.*", "", (run / "config.yaml").read_text())
    (run / "config.yaml").write_text(text.replace("  seed: 0\n", f"  seed: {10**30}\n"))
    for read in (load, resume):
        with pytest.raises(BrayError, match="seed"):
            read(run)


def test_spaces_of_a_file_are_of_a_size_that_can_be():
    for space in (
        {"kind": "box", "shape": [1 << 20, 1 << 20]},
        {"kind": "discrete", "dtype": "int64", "n": [1 << 40], "start": [0]},
        {"kind": "box", "shape": [2], "dtype": "O"},
        {"kind": "box", "shape": [2], "dtype": "U1000000"},
    ):
        with pytest.raises(DataError):
            Space.from_json(space)


def test_videos_and_episodes_of_other_directories_are_not_shown(tmp_path):
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    run = tmp_path / "project" / "trial"
    (run / "videos").mkdir(parents=True)
    (run / "episodes").mkdir()
    (run / "videos" / "own.mp4").write_bytes(b"own" * 1000)
    (run / "videos" / "linked.mp4").symlink_to(tmp_path / "secret.mp4")
    os.mkfifo(run / "videos" / "pipe.mp4")
    (run / "episodes" / "s-0.0.episode").symlink_to(tmp_path / "secret.mp4")
    server = RenderServer(Project(tmp_path / "project", "trial"), {})
    try:
        get = lambda name: urllib.request.urlopen(f"{server.url}video?trial=trial&file={name}", timeout=10).read()  # noqa: E731
        assert get("own.mp4") == b"own" * 1000
        for name in ("linked.mp4", "pipe.mp4"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(name)
        assert server.episodes("trial")["episodes"] == []
        with pytest.raises(DataError, match="a link"):
            server.episode("trial", "s-0.0.episode")
    finally:
        server.close()


# --- weights that are numbers -----------------------------------------------------------------------------------------


def diverge(run, value=np.nan):
    """One more checkpoint, whose weights are no numbers any more."""
    directory = RunDir.create(run, resume=True)
    last = directory.load_checkpoint()
    weights = {k: v.copy() for k, v in last.weights.items()}
    name = next(k for k, v in weights.items() if v.ndim == 2)
    weights[name][0, :2] = value
    with patch("bray.rundir.weights.check_finite"):  # as a version wrote them that did not look
        directory.save_checkpoint(last.step + 1, weights, last.state, last.meta)
    directory.close()
    return name, last.step


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(run, value, capsys):
    name, good = diverge(run, value)
    for words in (["eval"], ["export"], ["train", "--resume"]):
        assert main([*words, str(run)]) == 2
        said = capsys.readouterr().err
        assert re.search(rf"2 of \d+ numbers of the tensor {name!r} are NaN or infinite", said)
        assert f"The newest intact one is {good}." in said
    with pytest.raises(CheckpointError, match=re.escape(name)):
        serve(run)


def test_what_rules_scores_out_may_be_infinite(tmp_path):
    run = RunDir.create(tmp_path / "run")
    mask = np.where(np.eye(3), 0, -np.inf).astype(np.float32)
    run.save_weights(1, {"mask": mask})
    assert np.array_equal(run.load_weights(1)["mask"], mask)
    with pytest.raises(CheckpointError, match="'w'"):
        run.save_weights(2, {"w": np.full(3, -np.inf)})
    run.close()


# --- mutations --------------------------------------------------------------------------------------------------------

STRANGE = [None, True, -1, 0, 2**63, 10**30, 1e308, "", "x", [], {}, [[]], {"a": 1}, "\x00", [None] * 3]


def mutate_bytes(data, rng):
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(data)))
        kind = rng.integers(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << rng.integers(8)
        elif kind == 2:
            data[at : at + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 9)))
        elif kind == 3:
            data[at : at + 8] = (2 ** int(rng.integers(1, 64)) - 1).to_bytes(8, "little")
        else:
            data[at:at] = data[: int(rng.integers(1, 50))]
        data = data or bytearray(b"x")
    return bytes(data)


def strange(rng):
    return STRANGE[rng.integers(len(STRANGE))]


def mutate_tree(node, rng):
    """The same tree with one of its nodes replaced, removed or added to."""
    if isinstance(node, (dict, list, tuple)) and node and rng.random() < 0.85:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        out = dict(node) if isinstance(node, dict) else list(node)
        if rng.random() < 0.1:
            del out[key]
        else:
            out[key] = mutate_tree(out[key], rng)
        return tuple(out) if isinstance(node, tuple) else out
    if isinstance(node, np.ndarray) and rng.random() < 0.7:
        kinds = [node.astype(np.float64), node.astype(np.int8), node[None], node.reshape(-1)[:1], np.zeros((0, 3))]
        return kinds[rng.integers(len(kinds))]
    return strange(rng)


def mutate_yaml(text, rng):
    lines = [re.sub(r" +#.*", "", line) for line in text.splitlines()]
    at = int(rng.integers(len(lines)))
    key = lines[at].partition(":")[0]
    lines[at] = f"{key}: {json.dumps(strange(rng))}"
    return "\n".join(lines) + "\n"


def mutate(run, rng):
    """Change one file of a run; returns which, and how. Behind checksums too: some files get the checksum of their new
    content."""
    step = newest(run)
    names = [n.format(step=step) for n in FILES if "." in n and n != "bray.log"] + [
        "progress.csv",
        "checkpoints/latest",
    ]
    names = [n for n in names if (run / n).exists()] + [str(p.relative_to(run)) for p in run.glob("replay/*")]
    path = run / names[rng.integers(len(names))]
    inner = rng.random() < 0.6
    if path.name == "latest":
        path.unlink()
        path.write_bytes(mutate_bytes(str(step).encode(), rng))
    elif inner and path.name == "state.tree":
        with contextlib.suppress(DataError):
            state = pack_state(mutate_tree(unpack_state(path.read_bytes()), rng))
            replace(path, state)
            head = json.loads((path.parent / "meta.json").read_text())
            files = head["files"] | {path.name: {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}}
            rewrite_meta(run, files=files)
    elif inner and path.name == "meta.json":
        changed = mutate_tree(json.loads(path.read_text()), rng)
        rewrite_meta(run, **changed if isinstance(changed, dict) else {"meta": changed})
    elif inner and path.suffix == ".json":
        path.write_text(json.dumps(mutate_tree(json.loads(path.read_text()), rng)))
    elif inner and path.suffix == ".yaml":
        path.write_text(mutate_yaml(path.read_text(), rng))
    else:
        replace(path, mutate_bytes(path.read_bytes(), rng))
    return path.name


def replace(path, data):
    """As a new file: weights are hard links of each other."""
    path.unlink()
    path.write_bytes(data)


def readers(i, what):
    last = train_on if what in ("result.jsonl", "progress.csv") and i % 2 == 0 else resume
    return [serve, load, last] if i % 2 == 0 else [load, last]


def read_mutations(made, tmp_path, count, seed, every):
    """Read so many mutated directories, each by every reader or by one of them."""
    rng = np.random.default_rng(seed)
    outcomes = {True: 0, False: 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        run = shutil.copytree(made / ("ppo", "dqn")[i % 2], tmp_path / f"{seed}-{i}", symlinks=True)
        what = mutate(run, rng)
        ways = readers(i, what)
        for read in ways if every else [ways[rng.integers(len(ways))]]:
            try:
                read(run)
                outcomes[True] += 1
            except BrayError:
                outcomes[False] += 1
            except BaseException as e:
                raise AssertionError(f"mutation {i} of seed {seed} in {what}, {read.__name__}: {e!r}") from e
        shutil.rmtree(run)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500_000, f"{grown} kB more memory"
    assert all(outcomes.values())


@pytest.mark.filterwarnings("ignore")
def test_a_mutated_run_directory_is_read_or_refused(made, tmp_path):
    read_mutations(made, tmp_path, 80, 0, every=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_mutated_run_directory_is_read_or_refused_by_every_reader(made, tmp_path, seed):
    read_mutations(made, tmp_path, 1000, seed, every=True)


# --- found by trying --------------------------------------------------------------------------------------------------


def test_results_are_read_as_a_plain_file(tmp_path):
    """A pipe would be waited for, a link to /dev/zero would fill the memory."""
    results = tmp_path / "result.jsonl"
    os.mkfifo(results)
    for _ in range(2):
        with pytest.raises(DataError, match="plain file"):
            read_results(tmp_path)
        results.unlink()
        results.symlink_to("/dev/zero")
    results.unlink()
    results.write_text("[" * 100_000 + "\n{}\n")
    with pytest.raises(DataError, match="expected a line of JSON"):
        read_results(tmp_path)


@pytest.mark.parametrize("folder", ["models", "models/default"])
def test_nothing_is_written_through_a_link_to_models(folder, run, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(run / folder, outside)
    (run / folder).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match="is a link: models are written inside"):
        RunDir(run).protect(newest(run))
    with pytest.raises(CheckpointError, match="is a link: models are written inside"):
        export_graph(run)
    assert sorted(outside.rglob("*")) == before


def test_a_curve_is_not_drawn_through_a_link(run, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(run / "figures", ignore_errors=True)
    (run / "figures").symlink_to(outside)
    assert main(["plot", str(run)]) == 2
    assert "figures is a link" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_a_state_whose_json_is_nested_without_end_is_refused():
    deep = tree.pack({"$json": np.frombuffer(b"[" * 100_000, np.uint8)})
    with pytest.raises(DataError, match="not a trainer state"):
        unpack_state(deep)


def test_a_wish_of_the_admin_port_that_is_nested_without_end_is_refused(run):
    async def ask():
        service = PolicyService({"m": run}, ServedModelConfig(engine="torch"), torch_engine=torch_engine)
        try:
            return await service.admin("POST", "/models/m", b"[" * 200_000)
        finally:
            await service.close()

    status, _, reply = asyncio.run(ask())
    assert (status, json.loads(reply)["error"]) == (400, "malformed")


def test_frames_are_not_stacked_beyond_the_largest_episode(tmp_path, monkeypatch):
    """Sixteen times as much as the file says."""
    frames = np.lib.stride_tricks.sliding_window_view(np.arange(4000).astype(np.uint8)[:, None], 8, axis=0)
    flat = np.zeros(3992, bool)
    episode = {"obs": np.moveaxis(frames, -1, 1), "action": flat, "reward": flat, "terminated": flat, "truncated": flat}
    (file,) = write_episodes(tmp_path / "x", [episode])
    monkeypatch.setattr("bray.data.files.MAX_EPISODE", EpisodeReader(file).sizes[0])
    with pytest.raises(DataError, match=r"damaged episode.*32000 bytes; the most is"):
        EpisodeReader(file)[0]
    with pytest.raises(DataError, match="Write it in parts"):
        write_episodes(tmp_path / "y", [episode])
