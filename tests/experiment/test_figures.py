"""Learning curves and videos: the numbers behind them, and that the files are what they claim."""

from __future__ import annotations

import json

import imageio.v2 as imageio
import numpy as np
import pytest
from matplotlib.figure import Figure

from bray.errors import ConfigError, DataError
from bray.figures import learning_curve, mean_and_std, overlay, plot_learning_curve, read_results, series, thousands
from bray.video import write_video


def make_run(path, slope=1.0, iterations=20, evaluate=False):
    path.mkdir(parents=True)
    with open(path / "result.jsonl", "w") as f:
        for i in range(1, iterations + 1):
            row = {
                "training_iteration": i,
                "env_steps_total": i * 1000,
                "episode_return_mean": slope * i if i > 2 else None,
            }
            if evaluate and i % 5 == 0:
                row |= {"eval/return_mean": slope * i + 2, "eval/return_ci95": 1.5 if i > 5 else None}
            f.write(json.dumps(row) + "\n")
    return path


def test_rows_are_read_without_a_half_line(tmp_path):
    run = make_run(tmp_path / "a", iterations=3)
    with open(run / "result.jsonl", "a") as f:
        f.write('{"training_iteration": 4, "half')
    rows = read_results(run)
    assert [r["training_iteration"] for r in rows] == [1, 2, 3]
    x, y = series(rows, "episode_return_mean")
    assert (x.tolist(), y.tolist()) == ([3000.0], [3.0])
    with open(run / "result.jsonl", "a") as f:
        f.write("\n{}\n")
    with pytest.raises(DataError, match=r"result\.jsonl:4: expected a line of JSON"):
        read_results(run)
    with pytest.raises(DataError, match="expected the results of a run"):
        read_results(tmp_path / "nothing")


def test_mean_and_std_over_the_steps_all_seeds_have():
    a = np.array([0.0, 10.0]), np.array([0.0, 10.0])
    b = np.array([2.0, 6.0, 20.0]), np.array([4.0, 8.0, 22.0])
    x, mean, std = mean_and_std([a, b, (np.array([]), np.array([]))])
    assert (x[0], x[-1]) == (2.0, 10.0)
    np.testing.assert_allclose(mean, x + 1)
    np.testing.assert_allclose(std, 1.0)
    x, mean, std = mean_and_std([a])
    assert (mean.tolist(), std.tolist()) == ([0.0, 10.0], [0.0, 0.0])
    x, mean, std = mean_and_std([a, (np.array([50.0]), np.array([1.0]))])
    assert len(x) == len(mean) == len(std) == 0  # no step that both have
    x, mean, std = mean_and_std([a, (np.array([10.0, 50.0]), np.array([4.0, 5.0]))])
    assert (x.tolist(), mean.tolist(), std.tolist()) == ([10.0], [7.0], [3.0])


def test_seeds_are_drawn_to_their_own_ends_and_the_mean_as_far_as_all_go(tmp_path):
    from matplotlib.figure import Figure

    runs = [make_run(tmp_path / f"s{n}", n, n, evaluate=True) for n in (20, 12)]
    empty = make_run(tmp_path / "empty", iterations=2)
    axes = Figure().add_subplot()
    plot_learning_curve(axes, [*runs, empty])
    ends = [(line.get_label(), line.get_xdata()[-1], line.get_linewidth() > 1) for line in axes.lines]
    thin = "_child"
    assert [(thin if label.startswith("_") else label, x, thick) for label, x, thick in ends] == [
        (thin, 20_000, False),
        (thin, 12_000, False),
        ("training, 2 seeds, mean ± std", 12_000, True),
        (thin, 20_000, False),
        (thin, 10_000, False),
        ("evaluation, 2 seeds, mean ± std", 10_000, True),
    ]
    assert [band.get_paths()[0].vertices[:, 0].max() for band in axes.collections] == [12_000, 10_000]


def read_picture(path):
    picture = imageio.imread(path)
    assert picture.shape[:2] == (720, 1200)
    assert (picture[:5, :5, :3] == 255).all()  # white margin
    return picture


def has_color(picture, rgb):
    return (np.abs(picture[..., :3].astype(int) - rgb).max(-1) < 12).sum() > 100


def test_a_curve_begins_when_20_episodes_have_ended(tmp_path):
    """Before, the shortest ones stand for all; a run that never has 20 is drawn as it is."""
    for name, most in (("many", 40), ("few", 8)):
        (tmp_path / name).mkdir()
        rows = [
            {"env_steps_total": n, "episodes_total": n * most // 8, "episode_return_mean": 9.0 - n} for n in range(1, 9)
        ]
        (tmp_path / name / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    axes = Figure().subplots()
    plot_learning_curve(axes, tmp_path / "many")
    plot_learning_curve(axes, tmp_path / "few")
    many, few = (line.get_xdata().tolist() for line in axes.get_lines() if len(line.get_xdata()) > 2)
    assert (many, few) == ([4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8])


def test_learning_curve_of_one_run_with_evaluations(tmp_path):
    run = make_run(tmp_path / "a", evaluate=True)
    picture = read_picture(
        learning_curve(run, run / "figures" / "learning_curve.png", "PPO on CartPole-v1", threshold=15)
    )
    assert has_color(picture, (0x2F, 0x6F, 0xB5))
    assert has_color(picture, (0xD9, 0x72, 0x2E))  # evaluations
    assert [p.name for p in (run / "figures").iterdir()] == ["learning_curve.png"]
    bare = read_picture(learning_curve(make_run(tmp_path / "b"), tmp_path / "b.png"))
    assert not has_color(bare, (0xD9, 0x72, 0x2E))


def test_an_evaluation_beside_the_training_stands_at_the_steps_of_its_weights(tmp_path):
    from matplotlib.figure import Figure

    run = make_run(tmp_path / "a", iterations=4)
    with open(run / "result.jsonl", "a") as f:
        for steps, of in ((5000, 2000), (9000, 5000)):
            evaluated = {"eval/return_mean": 1.0, "eval/env_steps": of}
            f.write(json.dumps({"env_steps_total": steps, "episode_return_mean": 1.0, **evaluated}) + "\n")
    axes = Figure().add_subplot()
    plot_learning_curve(axes, run)
    assert axes.lines[1].get_xdata().tolist() == [2000.0, 5000.0]


def test_a_curve_that_stays_at_one_step_is_a_dot(tmp_path):
    from matplotlib.figure import Figure

    run = tmp_path / "files"
    run.mkdir()
    row = json.dumps({"env_steps_total": 2500, "episode_return_mean": 500.0})
    (run / "result.jsonl").write_text(f"{row}\n{row}\n")
    axes = Figure().add_subplot()
    plot_learning_curve(axes, run)
    plot_learning_curve(axes, make_run(tmp_path / "a"))
    assert [line.get_marker() for line in axes.lines] == ["o", ""]


def test_learning_curve_of_seeds_and_overlay(tmp_path, caplog):
    runs = [make_run(tmp_path / f"s{i}", 1 + i, 20 - i, evaluate=True) for i in range(3)]
    read_picture(learning_curve(runs, tmp_path / "seeds.png"))
    other = make_run(tmp_path / "t", 0.3)
    both = read_picture(overlay({"PPO": runs, "DQN": [other]}, tmp_path / "both.png", threshold=30))
    assert has_color(both, (0x2F, 0x6F, 0xB5))
    assert has_color(both, (0xD9, 0x72, 0x2E))
    with caplog.at_level("WARNING"):
        overlay({"PPO": runs, "A2C": [make_run(tmp_path / "empty", iterations=2)]}, tmp_path / "some.png")
    assert "no episode has finished there: A2C" in caplog.text
    assert overlay({"PPO": runs}, tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


def test_figures_of_nothing_are_refused(tmp_path):
    empty = make_run(tmp_path / "a", iterations=2)
    with pytest.raises(DataError, match="no finished episode"):
        learning_curve(empty, tmp_path / "x.png")
    with pytest.raises(DataError, match="at least one run"):
        overlay({}, tmp_path / "x.png")
    with pytest.raises(ConfigError, match="expected a picture file that ends in"):
        learning_curve(make_run(tmp_path / "b"), tmp_path / "x.doc")
    assert not (tmp_path / "x.png").exists()


def test_tick_labels():
    assert [thousands(x) for x in (0, 12500, 0.25, 1.5e6, -3)] == ["0", "12,500", "0.25", "1.5M", "-3"]


def frames(n=12, h=33, w=47):
    out = np.zeros((n, h, w, 3), np.uint8)
    for t in range(n):
        out[t, 8:24, t * 2 : t * 2 + 16] = (250, 120, 0)
    return out


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_videos_read_back(tmp_path, suffix):
    path = write_video(frames(), tmp_path / "videos" / f"episode{suffix}", fps=20)
    back = imageio.mimread(path)
    assert len(back) == 12
    assert back[0].shape[:2] == ((34, 48) if suffix == ".mp4" else (33, 47))  # mp4 has even sizes
    for t in (0, 11):
        got = np.asarray(back[t])[:33, :47, :3].astype(int)
        assert np.abs(got - frames()[t]).mean() < 12
    meta = imageio.get_reader(path).get_meta_data()
    assert meta["fps"] == 20 if suffix == ".mp4" else meta["duration"] == 50
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("fps", "shown"),
    [
        (20, [(0, 100), (40, 50), (80, 150), (120, 50)]),  # pictures 0, 0, 1, 2, 2, 2, 3
        (30, [(0, 70), (40, 30), (80, 100), (120, 30)]),  # 2 1/3 tenths of a second, whatever is merged
        (100, [(0, 20), (40, 20), (80, 20), (120, 20)]),  # every second one
        (0.5, [(0, 4000), (40, 2000), (80, 6000), (120, 2000)]),
    ],
)
def test_a_gif_lasts_as_long_as_its_frames(tmp_path, fps, shown):
    from PIL import Image, ImageSequence

    data = [np.full((8, 8, 3), 40 * i, np.uint8) for i in (0, 0, 1, 2, 2, 2, 3)]
    with Image.open(write_video(data, tmp_path / "a.gif", fps)) as image:
        got = [(np.asarray(f.convert("RGB")).max(), f.info["duration"]) for f in ImageSequence.Iterator(image)]
    assert got == shown


@pytest.mark.parametrize(
    ("name", "data", "fps", "error", "message"),
    [
        ("a.avi", frames(), 30, ConfigError, r"ends in \.mp4 or \.gif"),
        ("a.mp4", [], 30, DataError, "at least one frame"),
        ("a.mp4", frames()[..., :1], 30, DataError, r"expected frames of shape \[H, W, 3\], got \[33, 47, 1\]"),
        (
            "a.mp4",
            frames().astype(float),
            30,
            DataError,
            r"frame 0: expected uint8\[33, 47, 3\] like the first, got float64",
        ),
        ("a.mp4", [frames()[0], frames(h=20)[0]], 30, DataError, r"frame 1: .* got uint8\[20, 47, 3\]"),
        ("a.gif", frames(), 0, ConfigError, "frame rate"),
    ],
)
def test_videos_of_wrong_frames_are_refused(tmp_path, name, data, fps, error, message):
    with pytest.raises(error, match=message):
        write_video(data, tmp_path / name, fps)
    assert list(tmp_path.iterdir()) == []


def test_each_agent_of_a_game_has_a_line(tmp_path):
    agents = ("first", "second")
    rows = [
        {"env_steps_total": n, "episodes_total": 40, "episode_return_mean": 0.0}
        | {f"agent/{agent}/return_mean": sign * n / 100 for agent, sign in zip(agents, (1, -1), strict=True)}
        for n in (10, 20, 30)
    ]
    (tmp_path / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    axes = Figure().subplots()
    plot_learning_curve(axes, tmp_path)
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert lines["first, training"] == [0.1, 0.2, 0.3]
    assert lines["second, training"] == [-0.1, -0.2, -0.3]
