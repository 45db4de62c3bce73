"""`bray render` without a browser: episodes on disk, the user's render functions, pictures, the server and the
command."""

import base64
import contextlib
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import imageio.v2 as imageio
import numpy as np
import pytest
from PIL import Image
from render_for_tests import make_project, save, state

from bray.cli.main import main
from bray.data.files import EpisodeReader, write_episodes
from bray.errors import ConfigError, DataError, UnknownName
from bray.serving.episodes import PackedMessage
from bray.serving.state import State
from bray.web import render as render_module
from bray.web.describe import describe
from bray.web.pictures import Frames, from_png, pictures, png, tiled
from bray.web.render import Render, RenderCache, RenderError, VideoExports, Worker
from bray.web.runs import MOST_ROWS, Project, states_of
from bray.web.server import RenderServer
from tests import forked

FUNCTIONS = ("render", "several", "fails", "hangs", "leaves", "asks", "wrong", "growing")
_modules = iter(range(10**6))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A fresh name for the module of the render functions."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"renders_of_test_{next(_modules)}"
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def project(tmp_path, module):
    return Project(make_project(tmp_path, module), "first")


@pytest.fixture
def renders(project, module):
    made = RenderCache({f: Render(f, module, f) for f in FUNCTIONS}, limit=1.0)
    yield made
    made.close()


@pytest.fixture
def server(project, module):
    made = RenderServer(project, {f: Render(f, module, f) for f in FUNCTIONS})
    yield made
    made.close()


def only(project, trial="first"):
    (entry,) = project.episodes(trial)[0]
    return entry.name


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "pixel"),
    [
        (np.full((4, 5), 7, np.uint8), [7, 7, 7]),
        (np.full((4, 5, 1), 7, np.uint8), [7, 7, 7]),
        (np.full((4, 5, 3), 7, np.uint8), [7, 7, 7]),
        (np.full((4, 5, 4), 7, np.uint8), [7, 7, 7, 7]),
        (np.full((4, 5), 300, np.int64), [255] * 3),
        (np.full((4, 5), -3), [0] * 3),
        (np.full((4, 5), 0.5), [128] * 3),
        (np.full((4, 5), 1.0, np.float16), [255] * 3),
        (np.full((4, 5), 200.0, np.float32), [200] * 3),
        (np.full((4, 5), np.nan), [0] * 3),
        (np.full((4, 5), True), [255] * 3),
        (Image.new("RGB", (5, 4), (1, 2, 3)), [1, 2, 3]),
    ],
)
def test_what_counts_as_a_picture(value, pixel):
    ((name, picture),) = pictures(value)
    assert (name, picture.dtype, picture.shape[:2]) == ("", np.uint8, (4, 5))
    assert picture[2, 3].tolist() == pixel
    np.testing.assert_array_equal(from_png(png(picture)), picture)


def test_several_pictures_have_names():
    one = np.zeros((2, 2), np.uint8)
    assert [n for n, _ in pictures([one, one])] == ["0", "1"]
    assert [n for n, _ in pictures({"map": one, "views": (one, {"left": one})})] == ["map", "views/0", "views/1/left"]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, "expected an array of numbers.*got NoneType"),
        ("a.png", "expected an array of numbers.*got <U5"),
        ([], r"expected a picture.*got \[\]"),
        ({"a": np.zeros(3)}, r"picture 'a'.*got float64\[3\]"),
        (np.zeros((3, 9, 9)), r"got float64\[3, 9, 9\]; if the channels come first: image.transpose"),
        (np.zeros((4, 0)), r"got float64\[4, 0\]"),
        (np.zeros((4, 4, 2)), r"\[4, 4, 2\]"),
        ([np.zeros((1, 1))] * 65, "at most 64 pictures, got 65"),
    ],
)
def test_what_is_no_picture_is_said(value, match):
    with pytest.raises(DataError, match=match):
        pictures(value)


def test_frames_of_a_video_have_one_size():
    red, blue = np.zeros((4, 6, 3), np.uint8), np.zeros((2, 2, 4), np.uint8)
    red[..., 0], blue[..., 2], blue[..., 3] = 200, 100, 128
    both = tiled([red, blue, red])
    assert both.shape == (10, 10, 3)  # two rows, gaps of two pixels
    assert both[0, 0].tolist() == [200, 0, 0]
    assert both[0, 8].tolist() == [0, 0, 50]  # half transparent, on black
    assert tiled([red]) is red
    frames = Frames()
    frames.append(red)
    frames.append(tiled([blue]))
    assert len(frames) == 2
    assert {f.shape for f in frames} == {(172, 258, 3)}  # 43 times: at least 256 pixels
    assert frames[1][86, 129].tolist() == [0, 0, 50]
    assert frames[1][0, 0].tolist() == [0, 0, 0]
    assert len(frames[::2]) == 1
    assert frames[::2][0].shape == (172, 258, 3)


# --- the State --------------------------------------------------------------------------------------------------------


def test_a_state_is_described():
    made = state(3)
    made.text, made.raw, made.packed = "x" * 5000, b"\x00" * 40, PackedMessage("game.Tick", b"123")
    made.many, made.deep = list(range(1000)), {"a": {"b": [1.5, None, {"c": (True,)}]}}
    made.scalar, made.empty, made.numbers = np.float32(0.25), np.zeros((0, 2)), np.array([1, 2, 3])
    fields = dict(describe(made))
    json.dumps(fields, allow_nan=False)
    assert list(fields)[:2] == ["input", "output"]
    assert list(fields)[-2:] == ["actor", "tick"]
    assert fields["input"]["items"][0] == ("position", {"kind": "list", "text": "[3, 6]"})
    assert fields["features"]["kind"] == "float32[2, 3]"
    assert fields["features"]["text"] == "3 … 8"
    assert fields["features"]["preview"].replace("\n", "") == "[[3., 4., 5.], [6., 7., 8.]]"
    thumb = from_png(base64.b64decode(fields["image"]["png"]))
    assert thumb.shape == (16, 48, 3)
    assert (thumb == 30).all()
    assert "png" not in fields["features"]
    assert len(fields["text"]["text"]) < 2100
    assert fields["raw"]["kind"] == "40 bytes"
    assert fields["packed"]["text"].startswith("game.Tick, 3 bytes")
    assert (len(fields["many"]["items"]), fields["many"]["more"]) == (60, 940)
    assert fields["deep"]["items"][0][1]["items"][0][1]["items"][2][1]["items"][0][1]["text"] == "[True]"
    assert (fields["scalar"]["text"], fields["value"]["text"]) == ("0.25", "nan")
    assert (fields["empty"]["kind"], fields["empty"]["text"]) == ("float64[0, 2]", "")


def test_a_state_of_any_size_is_described_in_little():
    deep: dict = {}
    for _ in range(200):
        deep = {"again": deep}
    wide = {str(i): {str(j): {str(k): k for k in range(60)} for j in range(60)} for i in range(60)}
    made = State("s", 0, 0, {"deep": deep, "wide": wide})
    assert len(json.dumps(describe(made))) < 300_000


def test_messages_are_described(tmp_path, monkeypatch):
    from bray.serving.messages import message_class

    (tmp_path / "m.proto").write_text(
        'syntax = "proto3"; package g; message P { int32 x = 1; }'
        "message In { repeated float at = 1; map<string, int32> items = 2; P p = 3; string name = 4; }"
    )
    monkeypatch.chdir(tmp_path)
    message = message_class("m.proto:In", "k")(at=[1, 2.5], items={"sword": 2}, p={"x": 3}, name="n")
    node = dict(describe(State("s", 0, 0, message)))["input"]
    assert node["text"] == "g.In"
    items = dict(node["items"])
    assert (items["at"]["text"], items["name"]["text"]) == ("[1, 2.5]", "'n'")
    assert items["items"]["items"] == [("sword", {"kind": "int", "text": "2"})]
    assert items["p"]["items"] == [("x", {"kind": "int", "text": "3"})]


# --- episodes on disk -------------------------------------------------------------------------------------------------


def trajectory(steps, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": {"image": rng.integers(0, 255, (steps + 1, 4, 6, 6)).astype(np.uint8), "speed": np.arange(steps + 1.0)},
        "action": rng.integers(0, 4, steps),
        "reward": np.arange(steps, dtype=np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "truncated": np.zeros(steps, bool),
        "value": np.arange(steps + 1.0),
    }


def test_trials_and_episodes_newest_first(project):
    root = project.path
    later = save(root / "second" / "seed-1", 3)
    os.utime(later.parent, (time.time() + 100, time.time() + 100))
    (root / "models").mkdir()
    (root / ".hidden" / "episodes").mkdir(parents=True)
    assert project.trials() == ["second/seed-1", "first"]
    assert Project(root, "planned").trials() == ["second/seed-1", "first", "planned"]
    assert Project(root, "planned").episodes("planned") == ([], 0)
    for i in range(5):
        path = save(root / "first", 2, f"session {i}", actor=i)
        os.utime(path, (time.time() + i, time.time() + i))
    listed, total = project.episodes("first")
    assert total == 6
    assert [e.title for e in listed[:2]] == ["session_4", "session_3"]
    assert listed[0].detail == "actor 4, episode 0"
    assert [e.title for e in project.episodes("first", find="ION_2")[0]] == ["session_2"]
    listed, total = project.episodes("first", most=2)
    assert (len(listed), total) == (2, 6)
    episode = project.read("first", listed[0].name)
    assert [s.tick for s in episode.states] == [0, 1]
    assert project.read("first", listed[0].name) is episode


def test_a_small_file_does_not_become_millions_of_states(project, monkeypatch):
    """Zeros are compressed to almost nothing, and every row of a trajectory would be a State."""
    flat = np.zeros(MOST_ROWS, np.int8)
    columns = {"obs": np.zeros((MOST_ROWS + 1, 0), np.int8), "action": flat, "reward": flat}
    columns |= {"terminated": flat.astype(bool), "truncated": flat.astype(bool)}
    write_episodes(project.path / "first" / "trajectories" / "large", [columns])
    (file,) = (project.path / "first" / "trajectories").glob("large*")
    assert file.stat().st_size < 2000
    monkeypatch.setattr("bray.web.runs.states_of", None)
    monkeypatch.setattr(EpisodeReader, "__getitem__", None)  # it is not even unpacked
    with pytest.raises(DataError, match=r"262,145 rows.*the most that is shown"):
        project.read("first", f"{file.name}#0")
    entries = {entry.name: entry.error for entry in project.episodes("first")[0]}
    assert "262,145 rows" in entries[f"{file.name}#0"]


def test_trajectories_are_episodes_too(project):
    columns = trajectory(5)
    write_episodes(project.path / "first" / "trajectories" / "episodes", [trajectory(3, 1), columns])
    listed, total = project.episodes("first", find="#1")
    assert total == 3
    assert [(e.name, e.ticks) for e in listed] == [("episodes-00000.episodes#1", 6)]
    states = project.read("first", listed[0].name).states
    assert len(states) == 6
    np.testing.assert_array_equal(states[2].obs["image"], columns["obs"]["image"][2])
    assert (states[2].action, states[2].reward, states[5].value) == (columns["action"][2], 2.0, 5.0)
    assert states[2].input["obs"]["speed"] == 2.0
    assert (states[2].input["reward"], states[0].input["reward"]) == (
        1.0,
        0.0,
    )  # a game tells what the last action brought
    assert states[2].output == {"action": columns["action"][2]}
    assert states[5].input["terminated"] is True
    assert "output" not in vars(states[5])
    assert "action" not in vars(states[5])
    assert [s.tick for s in states] == list(range(6))


def test_a_column_whose_parts_have_different_rows():
    columns = trajectory(2) | {"memory": {"a": np.zeros(3), "b": np.zeros(2)}}
    assert ["memory" in vars(s) for s in states_of(columns, "s")] == [True, True, False]


def test_damaged_episodes_are_named_and_the_others_shown(project):
    run = project.path / "first"
    broken = save(run, 4, "broken")
    broken.write_bytes(broken.read_bytes()[:-20])
    empty = save(run, 0, "empty")
    (run / "trajectories").mkdir()
    (run / "trajectories" / "x.episodes").write_bytes(b"BRAYEPIS what is this")
    (run / "episodes" / ".half.episode.12.tmp").write_bytes(b"")
    assert {e.title for e in project.episodes("first")[0] if e.error} == {"x"}
    with pytest.raises(DataError, match=r"broken-0\.1\.episode.*damaged"):
        project.read("first", broken.name)
    with pytest.raises(DataError, match="without a single tick"):
        project.read("first", empty.name)
    with pytest.raises(DataError, match="not a trajectory file"):
        project.read("first", "x.episodes#0")
    entries = {e.title: e for e in project.episodes("first")[0]}
    assert {t for t, e in entries.items() if e.error} == {"x", "broken", "empty"}
    assert "damaged" in entries["broken"].error
    assert len(project.read("first", entries["game-1"].name).states) == 12
    broken.unlink()
    with pytest.raises(DataError, match="is gone"):
        project.read("first", broken.name)
    save(run, 4, "again").rename(broken)  # another file takes its name
    assert len(project.read("first", broken.name).states) == 4
    write_episodes(run / "trajectories" / "y", [trajectory(2)])
    with pytest.raises(DataError, match="holds 1 episodes, there is no number 7"):
        project.read("first", "y-00000.episodes#7")


@pytest.mark.parametrize(
    "trial", ["..", ".", "", "../game", "first/..", "/", "nowhere", "a/b/c", "\0", "x" * 5000, "..\\x"]
)
def test_no_trial_leads_out_of_the_project(project, trial):
    (project.path.parent / "episodes").mkdir()  # what `..` would find
    with pytest.raises(UnknownName, match="unknown trial"):
        project.episodes(trial)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../secret.episode",
            "..",
            "",
            "a/b.episode",
            "x.txt",
            "\0.episode",
            ".x.episode",
            "x.episodes",
            "x.episode#a",
        ),
        *("x.episodes#-1", "x" * 5000 + ".episode", "x.episodes#", "..\\secret.episode"),
    ],
)
def test_no_name_leads_out_of_the_run_directory(project, name):
    secret = save(project.path / "first", 2, "secret")
    secret.rename(project.path / "first" / "secret.episode")
    with pytest.raises(DataError):
        project.read("first", name)


# --- the user's code --------------------------------------------------------------------------------------------------


def test_pictures_are_made_once(project, renders, module):
    episode = project.read("first", only(project))
    for _ in range(3):
        ((name, file),) = renders.pictures("render", episode, 4)
    assert name == ""
    assert from_png(file)[0, 4].tolist() == [200, 40, 40]
    assert sys.modules[module].calls == [4]
    assert [n for n, _ in renders.pictures("several", episode, 0)] == ["bars", "deep/0", "deep/1"]
    with pytest.raises(UnknownName, match=r"unknown renderer 'rendr'.*Did you mean 'render'"):
        renders.pictures("rendr", episode, 0)


def test_the_cache_has_a_bound(project, renders, monkeypatch, module):
    episode = project.read("first", only(project))
    monkeypatch.setattr(render_module, "CACHE_BYTES", 250)  # two or three of these
    for tick in (0, 1, 2, 3, 4, 5, 5, 0):
        renders.pictures("render", episode, tick)
    assert sys.modules[module].calls == [0, 1, 2, 3, 4, 5, 0]


def test_errors_of_the_users_code_are_its_own_traceback(project, renders, module):
    episode = project.read("first", only(project))
    with pytest.raises(RenderError) as e:
        renders.pictures("fails", episode, 3)
    lines = str(e.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f"{module}.py" in lines[1]
    assert "in fails" in lines[1]
    assert lines[-1] == "ValueError: nothing to see at 3"
    assert "bray/web" not in str(e.value)
    renders.pictures("fails", episode, 2)
    with pytest.raises(RenderError, match="SystemExit: the user's code wants to go"):
        renders.pictures("leaves", episode, 0)
    with pytest.raises(RenderError, match=r"(?s)in asks\n.*ConfigError: of the user's own making"):
        renders.pictures("asks", episode, 0)
    with pytest.raises(RenderError, match=r"renderer 'wrong' at tick 1: .*\[3, 20, 20\]"):
        renders.pictures("wrong", episode, 1)


def test_code_that_hangs_is_given_up_and_the_next_call_works(project, renders, module):
    episode = project.read("first", only(project))
    with pytest.raises(RenderError, match=r"(?s)'hangs' at tick 1 has not returned after 1 s.*in hangs\n.*sleep") as e:
        renders.pictures("hangs", episode, 1)
    assert "threading.py" not in str(e.value)
    assert renders.pictures("hangs", episode, 0)
    assert renders.pictures("render", episode, 1)


def test_threads_that_never_return_are_bounded():
    worker, free = Worker(), threading.Event()
    before = threading.active_count()
    for _ in range(4):
        with pytest.raises(RenderError, match="has not returned"):
            worker.call(lambda: free.wait(30), 0.05, "it")
    with pytest.raises(RenderError, match="4 calls of render code have not returned"):
        worker.call(lambda: 1, 0.05, "it")
    free.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.call(lambda: 1, 5, "it") == 1
    worker.close()
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() < before


def test_changed_code_is_loaded_again(tmp_path, project, module):
    file = tmp_path / f"{module}.py"
    good = file.read_text()
    renders = RenderCache({"render": Render("render", module), "gone": Render("gone", module, "rendre")})
    episode = project.read("first", only(project))

    def first_pixel():
        return from_png(renders.pictures("render", episode, 0)[0][1])[0, 0, 0]

    def write(text):
        file.write_text(text)
        later = time.time_ns() + write.count * 10**9  # byte code is looked up by whole seconds
        os.utime(file, ns=(later, later))
        write.count += 1

    write.count = 10
    write("def render(episode, tick:\n")
    with pytest.raises(RenderError, match=r"(?s)def render.*SyntaxError"):
        first_pixel()
    write(good)
    assert first_pixel() == 200
    write(good.replace("200", "123"))
    assert first_pixel() == 123
    write(good + "\n1 / 0\n")
    with pytest.raises(RenderError, match=r"(?s)1 / 0\n.*ZeroDivisionError"):
        first_pixel()
    write(good.replace("200", "77"))
    assert first_pixel() == 77
    with pytest.raises(RenderError, match=r"unknown function 'rendre'.*Did you mean 'render'"):
        renders.pictures("gone", episode, 0)
    renders.close()
    missing = RenderCache({"x": Render("x", "no_such_module_anywhere")})
    with pytest.raises(RenderError, match="ModuleNotFoundError: No module named 'no_such_module_anywhere'"):
        missing.pictures("x", episode, 0)
    missing.close()


# --- videos -----------------------------------------------------------------------------------------------------------


def finished(exports, export):
    deadline = time.monotonic() + 30
    while export.state in ("running", "writing"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return exports.find(export.number)


@pytest.mark.parametrize("form", ["mp4", "gif"])
@pytest.mark.parametrize("function", ["render", "several", "growing"])
def test_a_video_of_an_episode(project, renders, form, function):
    exports = VideoExports(project, renders)
    export = finished(exports, exports.start("first", only(project), function, form, 10))
    assert (export.state, export.error, export.done) == ("done", "", 12)
    assert export.file == f"game-1-0.0-{function}.{form}"
    video = imageio.mimread(project.path / "first" / "videos" / export.file, memtest=False)
    changes = {"render": 12, "several": 1 if form == "gif" else 12, "growing": 12}  # a GIF shows what stays for longer
    assert len(video) == changes[function]
    assert max(video[0].shape[:2]) >= 256
    if function == "growing":  # a column of white grows from the middle
        heights = [int((np.asarray(f)[:, f.shape[1] // 2, 0] > 128).sum()) for f in video]
        assert heights == sorted(heights)
        assert heights[-1] > 3 * heights[0]


def test_a_part_of_an_episode_as_a_video(project, renders):
    exports = VideoExports(project, renders)
    export = finished(exports, exports.start("first", only(project), "render", "mp4", 5, 3, 6))
    assert export.file == "game-1-0.0-render-3-6.mp4"
    reader = imageio.get_reader(project.path / "first" / "videos" / export.file)
    assert reader.count_frames() == 4
    assert reader.get_meta_data()["fps"] == 5


def test_an_error_on_the_way_leaves_no_video(project, renders):
    exports = VideoExports(project, renders)
    export = finished(exports, exports.start("first", only(project), "fails", "mp4", 10))
    assert export.state == "failed"
    assert "ValueError: nothing to see at 1" in export.error
    assert not (project.path / "first" / "videos").exists()
    with pytest.raises(UnknownName):
        exports.find(5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"trial": "third"}, "unknown trial"),
        ({"episode": "none.episode"}, "is gone"),
        ({"renderer": "x"}, "unknown renderer"),
        ({"format": "avi"}, "unknown video format"),
        ({"fps": 0.0}, "expected a speed"),
        ({"fps": float("nan")}, "expected a speed"),
        ({"first": 3, "last": 2}, "expected ticks of 0 to 11, got 3 to 2"),
        ({"last": 12}, "expected ticks of 0 to 11"),
        ({"first": -1}, "expected ticks"),
    ],
)
def test_videos_that_cannot_be_made(project, renders, change, match):
    given = {"trial": "first", "episode": only(project), "renderer": "render", "format": "mp4", "fps": 10.0} | change
    with pytest.raises((ConfigError, DataError), match=match):
        VideoExports(project, renders).start(**given)


# --- the server -------------------------------------------------------------------------------------------------------


def ask(server, path, body=None, method=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    data = json.dumps(body) if isinstance(body, dict) else body
    connection.request(method or ("POST" if body is not None else "GET"), path, data, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.headers["Content-Type"] == "application/json" and data:
        return answer.status, json.loads(data)
    return answer.status, data


def test_the_page_and_its_files(server):
    for path, word in (("/", b"<!doctype html>"), ("/render.js", b'"use strict"'), ("/render.css", b"prefers-color")):
        status, data = ask(server, path)
        assert status == 200
        assert word in data
    with urllib.request.urlopen(server.url, timeout=20) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        page = answer.read().decode()
    assert not re.search(r"https?://|style=|<script>", page)  # nothing from elsewhere, nothing inline
    assert ask(server, "/", method="HEAD") == (200, b"")


def test_what_the_page_asks_for(server, project):
    assert ask(server, "/api/start") == (
        200,
        {"project": str(project.path), "trial": "first", "trials": ["first"], "renderers": list(FUNCTIONS)},
    )
    status, listed = ask(server, "/api/episodes?trial=first")
    assert (status, listed["total"], listed["trials"]) == (200, 1, ["first"])
    (name,) = [e["name"] for e in listed["episodes"]]
    assert ask(server, f"/api/episode?trial=first&episode={name}") == (200, {"ticks": 12})
    where = f"/api/frame?trial=first&episode={name}&tick=3"
    status, frame = ask(server, f"{where}&renderer=several")
    assert (status, frame["tick"], frame["error"]) == (200, 3, None)
    assert [p["name"] for p in frame["pictures"]] == ["bars", "deep/0", "deep/1"]
    assert Image.open(io.BytesIO(base64.b64decode(frame["pictures"][0]["png"]))).size == (9, 6)
    assert dict(frame["fields"])["tick"]["text"] == "3"
    status, frame = ask(server, f"{where}&renderer=fails")
    assert (status, frame["pictures"]) == (200, [])
    assert frame["error"].endswith("ValueError: nothing to see at 3")
    assert dict(frame["fields"])["tick"]["text"] == "3"
    assert ask(server, where)[1]["pictures"] == []  # the State alone


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/nothing", 404, "nothing at"),
        ("/../../etc/passwd", 404, "nothing at"),
        ("/static/../server.py", 404, "nothing at"),
        ("/render.html", 404, "nothing at"),
        ("/api/episodes", 400, "trial: expected text"),
        ("/api/episodes?trial=..", 404, "unknown trial"),
        ("/api/episode?trial=first&episode=..%2F..%2Fx.episode", 404, "not the name"),
        ("/api/frame?trial=first&episode=game-1-0.0.episode&tick=99", 400, "tick of 0 to 11, got 99"),
        ("/api/frame?trial=first&episode=game-1-0.0.episode&tick=-1", 400, "expected a whole number"),
        ("/api/frame?trial=first&episode=game-1-0.0.episode&tick=1e3", 400, "expected a whole number"),
        ("/api/frame?trial=first&episode=game-1-0.0.episode&tick=0&renderer=x", 404, "unknown renderer"),
        ("/api/export?number=3", 404, "unknown export"),
        ("/video?trial=first&file=..%2F..%2Fpyproject.mp4", 404, "no video"),
        ("/video?trial=first&file=none.mp4", 404, "no video"),
        ("/video?trial=..&file=none.mp4", 404, "unknown trial"),
    ],
)
def test_requests_for_what_is_not_there(server, path, status, word):
    got, answer = ask(server, path)
    assert got == status
    assert word in answer["error"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("not json", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ({}, "trial: expected text"),
        ({"number": True}, "number: expected a whole number"),
        ("x" * 70_000, "at most 65536 bytes"),
    ],
)
def test_bodies_that_are_refused(server, body, word):
    path = "/api/stop" if isinstance(body, dict) and body else "/api/export"
    status, answer = ask(server, path, body)
    assert status == 400
    assert word in answer["error"]


def test_other_pages_and_other_names_are_not_answered(server):
    """A page of somebody else in the same browser, and a name of somebody else that leads to this machine."""
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
    ):
        assert ask(server, "/api/start", **headers)[0] == 403
        assert ask(server, "/api/export", {}, **headers)[0] == 403
    for host in (f"localhost:{server.port}", f"127.0.0.1:{server.port}", "localhost"):
        assert ask(server, "/api/start", Host=host)[0] == 200
    own = f"127.0.0.1:{server.port}"
    assert ask(server, "/api/start", **{"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert ask(server, "/", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(server, "/?trial=first", **link)[0] == 200  # of a message that somebody was sent
    assert ask(server, "/api/stop", {"number": 0}, Host=own, Origin=f"http://{own}")[0] == 404
    everywhere = RenderServer(server.project, {}, host="0.0.0.0")
    try:
        assert ask(everywhere, "/api/start", Host="my-machine.lan")[0] == 200
        assert ask(everywhere, "/api/start", Host="my-machine.lan", Origin="http://evil.example")[0] == 403
    finally:
        everywhere.close()


def test_an_export_over_http(server, project):
    name = only(project)
    given = {"trial": "first", "episode": name, "renderer": "render", "format": "gif", "fps": 20}
    status, export = ask(server, "/api/export", given)
    assert (status, export["total"]) == (200, 12)
    deadline = time.monotonic() + 30
    while export["state"] in ("running", "writing"):
        assert time.monotonic() < deadline
        status, export = ask(server, f"/api/export?number={export['number']}")
    assert (export["state"], export["done"]) == ("done", 12)
    status, data = ask(server, f"/video?trial=first&file={export['file']}&download=1")
    assert status == 200
    assert len(imageio.mimread(data, ".gif")) == 12
    assert ask(server, "/api/export", given | {"fps": "fast"})[1]["error"] == "fps: expected a number, got 'fast'"


def test_one_video_at_a_time_and_it_can_be_stopped(tmp_path, project, module):
    (tmp_path / f"{module}_slow.py").write_text(
        "import time, numpy\ndef render(episode, tick):\n    time.sleep(0.05)\n    return numpy.zeros((4, 4))\n"
    )
    server = RenderServer(project, {"slow": Render("slow", f"{module}_slow")})
    try:
        given = {"trial": "first", "episode": only(project), "renderer": "slow", "format": "mp4"}
        export = ask(server, "/api/export", given)[1]
        status, answer = ask(server, "/api/export", given)
        assert (status, answer["error"]) == (400, "another video is being made; wait for it or stop it")
        ask(server, "/api/stop", {"number": export["number"]})
        assert finished(server.exports, server.exports.find(export["number"])).state == "stopped"
        assert ask(server, "/api/export", given)[0] == 200
    finally:
        server.close()


def test_many_requests_at_once(server, project):
    name, wrong = only(project), []

    def look(k):
        for tick in range(12):
            status, frame = ask(
                server, f"/api/frame?trial=first&episode={name}&tick={tick}&renderer={FUNCTIONS[k % 3]}"
            )
            if status != 200 or frame["tick"] != tick or bool(frame["error"]) != (k % 3 == 2 and tick % 2 == 1):
                wrong.append((k, tick, status))

    threads = [threading.Thread(target=look, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


# --- the command ------------------------------------------------------------------------------------------------------


def launch_file(root, module):
    path = root / "rl.yaml"
    path.write_text(
        f"project: game\ntrial: first\nview:\n  kind: render\n  module: {module}\n"
        f"bars:\n  kind: render\n  module: {module}\n  func: several\n"
    )
    return path


def test_the_command_serves_a_launch_file_until_ctrl_c(tmp_path, project, module):
    file = launch_file(tmp_path, module)
    command = [sys.executable, "-m", "bray", "render", "--config", file.name, "--no-open"]
    process = forked.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127.0.0.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(f"{url}api/start", timeout=20) as answer:
            start = json.load(answer)
        assert (start["trial"], start["renderers"]) == ("first", ["view", "bars"])
        where = f"{url}api/frame?trial=first&episode={only(project)}&tick=3&renderer=view"
        with urllib.request.urlopen(where, timeout=20) as answer:
            frame = json.load(answer)
        assert frame["error"] is None
        assert len(frame["pictures"]) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
        assert "ended" in out
    finally:
        process.kill()
        process.wait(20)


def test_it_ends_after_some_seconds_and_works_without_a_launch_file(tmp_path, project, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["render", "--project", "game", "--trial", "first", "--no-open", "--seconds", "0"]) == 0
    assert "renderers  none" in capsys.readouterr().out
    assert main(["render", "--project", "game", "--host", "0.0.0.0", "--no-open", "--seconds", "0"]) == 0
    assert "anyone who can connect to 0.0.0.0" in capsys.readouterr().out


def test_mistakes_of_the_command_line(tmp_path, project, module, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = launch_file(tmp_path, module)
    for argv, word in (
        (["--no-open"], "say what to show: --config LAUNCH_FILE, or --project DIR"),
        (["--project", "gaem"], "there is no project directory gaem"),
        (["--config", str(file), "--project", "gaem"], f"`bray launch --config {file}` makes it"),
        (["--config", "rl.yml"], "rl.yml"),
    ):
        assert main(["render", *argv]) == 2
        assert word in capsys.readouterr().err
    with contextlib.closing(RenderServer(project, {})) as taken:
        assert main(["render", "--config", str(file), "--port", str(taken.port)]) == 2
        assert f"cannot listen on 127.0.0.1:{taken.port}" in capsys.readouterr().err


def test_messages_of_the_actors_are_read(tmp_path, capsys, monkeypatch, module):
    from bray.cli.render import message_classes
    from bray.launch.graph import load

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tick.proto").write_text('syntax = "proto3"; package g; message In { int32 x = 1; }')
    (tmp_path / "sub" / "rl.yaml").write_text(
        "project: game\ntrial: first\nagent1:\n  kind: agent\n  module: m\n  class: A\n"
        "actor1:\n  kind: actor\n  agents: [agent1]\n  serialize: proto\n"
        "  tick_input_proto: {file: tick.proto, message: In}\n"
        "  tick_output_proto: {module: no_such_pb2, message: Out}\n"
    )
    classes, notes = message_classes(load("sub/rl.yaml"))
    assert [c.DESCRIPTOR.full_name for c in classes] == ["g.In"]
    assert len(notes) == 1
    assert "actor1.tick_output_proto: there is no module no_such_pb2" in notes[0]


def test_from_a_game_session_with_messages_to_a_picture(tmp_path, project, module):
    """An AgentActor saves what a game sent as protobuf messages; the render function reads their fields."""
    import asyncio

    from bray.serving.agent import Agent, AgentActor
    from bray.serving.messages import message_class

    (tmp_path / "tick.proto").write_text(
        'syntax = "proto3"; package game; message In { repeated int32 at = 1; } message Out { int32 action = 1; }'
    )
    protos = {f"tick_{k.lower()}put_proto": f"{tmp_path}/tick.proto:{k}" for k in ("In", "Out")}

    class Acts(Agent):
        def on_tick(self, state):
            state.output.action = sum(state.input.at)

    classes = [message_class(spec, key) for key, spec in protos.items()]
    sent = classes[0]

    async def play():
        actor = AgentActor(
            {"a": Acts}, serialize="proto", episode_save_interval=1, save_dir=project.path / "played", **protos
        )
        await actor.start("arena-agent-red", b"")
        for t in range(3):
            actor.tick(sent(at=[t, 5]).SerializeToString())
        await actor.end(b"")

    asyncio.run(asyncio.wait_for(play(), 30))
    (tmp_path / f"{module}_played.py").write_text(
        "import numpy\ndef render(episode, tick):\n    return numpy.full((4, 4), 10 * episode[tick].input.at[0])\n"
    )
    for known in (True, False):
        of = Project(project.path, messages=classes if known else ())
        with contextlib.closing(RenderServer(of, {"view": Render("view", f"{module}_played")})) as server:
            (listed,) = ask(server, "/api/episodes?trial=played")[1]["episodes"]
            frame = ask(server, f"/api/frame?trial=played&episode={listed['name']}&tick=2&renderer=view")[1]
        fields = dict(frame["fields"])
        if known:
            assert from_png(base64.b64decode(frame["pictures"][0]["png"]))[0, 0, 0] == 20
            assert fields["input"]["items"] == [["at", {"kind": "list", "text": "[2, 5]"}]]
            assert fields["output"]["items"] == [["action", {"kind": "int", "text": "7"}]]
        else:
            assert "'PackedMessage' object has no attribute 'at'" in frame["error"]
            assert fields["input"]["text"].startswith("game.In, ")
        assert fields["agent"]["text"] == "'red'"
