"""The command line without training: errors, listings, eval, collect, check-env, doctor."""

import json
import re
import shutil
import subprocess
import sys
from typing import ClassVar

import imageio.v3 as imageio
import numpy as np
import pytest
from envs_for_tests import Scripted

import bray
from bray import algos, nn
from bray.algos import a2c, ppo
from bray.cli import collect, doctor
from bray.cli.main import NOT_YET, main
from bray.cli.options import COMMANDS
from bray.config.runfile import presets
from bray.data import EpisodeReader
from bray.envs import EnvConfig
from bray.envs.make import make_env
from bray.envs.vector import episode_seed
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.nn import own

TINY = ["--quiet", "rollout_length=16", "num_envs=2", "minibatches=1", "epochs=1", "--no-preset"]


class Drawn(Scripted):
    """Draws a picture that differs at every step."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, terminate_at=5, render_mode=None):
        super().__init__(terminate_at)
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 48, 3), 40 * self.t, np.uint8)


def trained(folder, env, *more):
    path = folder / "t"
    arguments = ["--project", str(folder), "--trial", "t", "--stop", '{"training_iteration": 3}']
    assert main(["train", "--run", "PPO", "--env", env, *arguments, *TINY, *more]) == 0
    return path


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("cartpole"), "CartPole-v1")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("drawn"), "test_cli:Drawn")


# --- words ------------------------------------------------------------------------------------------------------------


HEAVY = {"attr", "gymnasium", "markdown_it", "numba", "numpy", "onnxruntime", "pygments", "ray", "rich", "torch"}
"""What an answer about words alone does not wait for."""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], [f"  {name.split()[0]} " for name in COMMANDS]),
        (["--help"], ["Usage: bray [OPTIONS]", *(f"  {name.split()[0]} " for name in COMMANDS)]),
        (["fake"], ["  actor ", "  buffer ", "  gamecore "]),
        (["--version"], [f"bray {bray.__version__}"]),
        (["train", "--help"], ["What runs:\n  --run ALGO", "\nHow it runs:\n", "\nOptions:\n"]),
        (["serve", "--help"], ["Arguments:\n", "\nWhere it listens:\n", "\nWhat answers:\n"]),
    ],
)
def test_help_is_light(argv, said):
    code = f"import sys; from bray.cli.main import main; print(main({argv})); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    text, modules = out.rstrip("\n").rsplit("\n", 1)
    assert not HEAVY & {name.partition(".")[0] for name in modules.split()}
    assert text.endswith("\n0")
    assert [words for words in said if words not in text] == []


def test_version_agrees():
    version = subprocess.run([sys.executable, "-m", "bray", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"bray {bray.__version__}\n"


@pytest.mark.parametrize("name", NOT_YET)
def test_planned_commands_say_that_they_are_not_there(name, capsys):
    assert main([name, "x", "--port", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: `bray {name}` is not there yet.")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["dashbord"], "unknown command 'dashbord'; `bray dashboard` is not there yet either."),
        (["train", "--sed", "3"], "unknown option '--sed'. Did you mean '--seed'?"),
        (["train", "--lr", "3"], "Config keys are written without dashes: lr=VALUE."),
        (["train", "--seed", "x"], "invalid value for '--seed'"),
        (["eval"], "missing argument 'RUN_DIR'"),
        (["eval", "nowhere"], "nowhere: there is no such run directory"),
        (["eval", __file__], "test_cli.py is a file: expected a run directory, or one of its checkpoints/STEP"),
        (["train", "--run", "PPO"], "needs an algorithm (run=, --run) and an environment"),
        (["train", "--run", "PPX", "--env", "CartPole-v1"],
         "unknown algorithm 'PPX' (--run; your own is module:Name). Did you mean 'PPO'?"),
        (["train", "--run", "nomodule:X", "--env", "CartPole-v1"],
         "cannot import 'nomodule' for --run nomodule:X: no such module. Modules are looked for in the current "
         "folder, in PYTHONPATH and among what is installed"),
        (["train", "--run", "PPO", "--env", "CartPol-v1"],
         "unknown environment 'CartPol-v1'. Did you mean 'CartPole-v1'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "lrr=1"],
         "unknown key 'lrr' (lrr=1 on the command line). Did you mean 'lr'?"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "clip=abc"],
         "algo.clip (clip=abc on the command line): expected a number > 0, got 'abc'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--config", '{"epochs": "many"}'],
         "algo.epochs (--config): expected a whole number > 0, got 'many'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--config", '{"lr":'], "--config: not JSON"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--stop", "eval/x=4"],
         "Write it as --stop '{\"eval/x\": 4}'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--stop", '{"episode_retrun_mean": 3}'],
         "unknown stop name 'episode_retrun_mean' (run.stop). Did you mean 'episode_return_mean'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--stop", '{"env_steps_total": "x"}'],
         "run.stop.env_steps_total (--stop): input should be a valid number, got 'x'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--stop", '{"episodes_total": 2.5}'],
         "run.stop.episodes_total: expected a whole number > 0, or -1 for no limit, got 2.5"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--steps", "0"],
         "run.stop.env_steps_total: expected a whole number > 0, or -1 for no limit, got 0"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--steps", "9", "--stop", '{"timesteps_total": 9}'],
         "--steps 9 and --stop both say how many env steps"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--checkpoint-score", "-episode_retrun_max"],
         "unknown key of a result row 'episode_retrun_max' (run.checkpoint_score). Did you mean "
         "'episode_return_max'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--checkpoint-score", "eval/return_min"],
         "nothing is evaluated: set eval_freq (--eval-freq N)"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "word"],
         "expected key=value on the command line, got 'word'"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--seed", "1", "--seed", "1"],
         "expected different seeds, got [1, 1]"),
        (["train", "--resume", "x", "--env", "CartPole-v1", "--seed", "1"],
         "resumes that run: leave out --env, --seed"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--log-level", "loud"], "unknown log level 'loud'"),
        (["train", "-f", "no.yaml"], "no.yaml: there is no such file"),
        (["algos", "PPP"], "unknown algorithm 'PPP'"),
        (["envs", "cartpool"], "unknown environment 'cartpool'. Did you mean 'CartPole-v"),
        (["check-env", "CartPol-v1"], "unknown environment 'CartPol-v1'"),
    ],
    ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_message_without_traceback(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_debug_shows_the_traceback(capsys):
    assert main(["eval", "nowhere", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "error: nowhere: there is no such run directory" in err
    assert main(["eval", "nowhere"]) == 2  # and only there
    assert "Traceback" not in capsys.readouterr().err


# --- listings ---------------------------------------------------------------------------------------------------------


def test_algos_lists_what_each_can_do(capsys):
    assert main(["algos"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert re.search(r"rollouts +discrete, multi-discrete, box, dict/tuple,.* clipped policy opti", lines["PPO"])
    assert re.search(r"replay +teams +Q-learning for a team", lines["QMIX"])
    assert re.search(r"replay +discrete +double Q-learning", lines["DQN"])
    assert re.search(r"replay +box +soft actor-critic", lines["SAC"])


def test_algos_lists_the_keys_of_one(capsys):
    assert main(["algos", "ppo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PPO · learns from rollouts")
    assert re.search(
        r"rollout_length +256 +a whole number > 0 +Steps T that each environment takes between two updates\.", out
    )
    assert re.search(r"dual_clip +null ", out)


def test_envs_with_a_pattern(capsys):
    assert main(["envs", "CartPole-v?"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"CartPole-v1 +native +A2C, .*C51, DQN, .*PPO.*", lines[2])
    assert lines[1].split() == ["CartPole-v0", "native"]
    assert main(["envs", "acrobot"]) == 0
    assert "Acrobot-v1" in capsys.readouterr().out


def test_presets_name_known_algorithms_and_environments():
    found = [(algo, env) for algo, env, _ in presets()]
    assert ("PPO", "CartPole-v1") in found
    for algo, env in found:
        assert Experiment(algo, env).config.provenance["env.num_envs"].startswith("preset ")


def test_check_env(capsys):
    assert main(["check-env", "CartPole-v1"]) == 0
    assert "all good" in capsys.readouterr().out
    assert main(["check-env", "envs_for_tests:Scripted", "fault=nan", "fault_at=2"]) == 1
    out = capsys.readouterr().out
    assert "error   episode 0, step 2: observation[1] is nan" in out
    assert "1 to correct before training" in out
    assert main(["check-env", "envs_for_tests:Scripted", "terminate_at=null", "--steps", "20"]) == 0
    assert "it trains; 1 to look at" in capsys.readouterr().out  # no episode ends
    assert main(["check-env", "envs_for_tests:Scripted", "terminate_at=null", "env.max_episode_steps=5"]) == 0
    assert "all good" in capsys.readouterr().out


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_is_given_once(monkeypatch):
    bray.register_env("twice", Scripted)
    bray.register_env("twice", Scripted)  # a module that is imported again
    with pytest.raises(
        ConfigError, match=r"'twice' is envs_for_tests:Scripted already and would become test_cli:Drawn"
    ):
        bray.register_env("twice", Drawn)
    assert isinstance(make_env(EnvConfig(id="twice")).unwrapped, Scripted)
    bray.register_env("twice", Drawn, replace=True)
    assert isinstance(make_env(EnvConfig(id="twice")).unwrapped, Drawn)

    monkeypatch.setattr(algos, "ALGORITHMS", dict(algos.ALGORITHMS))
    bray.register_algo("PPO", "bray.algos.ppo")
    bray.register_algo("ppo", ppo)  # the same module
    with pytest.raises(ConfigError, match=r"'ppo' is bray.algos.ppo: already and would become bray.algos.a2c:; choose"):
        bray.register_algo("Ppo", a2c)
    assert algos.get_algo("PPO") is ppo
    bray.register_algo("Ppo", a2c, replace=True)
    assert algos.get_algo("PPO") is a2c
    assert "ppo" not in algos.ALGORITHMS

    for register in (nn.register_model, nn.register_preprocessor):
        register("twice", nn.ActorCritic)
        with pytest.raises(
            ConfigError, match=r"'twice' is bray.nn.heads:ActorCritic already .* bray.nn.heads:QNetwork;"
        ):
            register("twice", nn.QNetwork)
        register("twice", nn.QNetwork, replace=True)
    assert own.find_own("model", "twice") is nn.QNetwork


def test_an_algorithm_says_where_it_is_written(capsys, tmp_path, monkeypatch):
    assert main(["algos", "PPO"]) == 0
    assert f"\n{ppo.__file__}:1\n" in capsys.readouterr().out
    (tmp_path / "my_algo.py").write_text(
        "from bray.algos import ppo\n\n\nclass Mine:\n" + "".join(f"    {n} = ppo.{n}\n" for n in algos.NAMES)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["algos", "my_algo:Mine"]) == 0
    assert f"\n{tmp_path / 'my_algo.py'}:4\n" in capsys.readouterr().out


# --- eval -------------------------------------------------------------------------------------------------------------


def test_eval_prints_the_mean_of_exactly_ten(cartpole, capsys):
    assert main(["eval", str(cartpole)]) == 0
    head, columns, row = capsys.readouterr().out.splitlines()
    assert head == "PPO on CartPole-v1, checkpoint 3"
    assert " ".join(columns.split()) == "episodes mean return 95 % interval min max mean length"
    results = Experiment.load(cartpole).play(10)
    returns = [r for r, _ in results]
    assert len(returns) == 10
    number, how, mean, low, _, high, least, most, length = row.split()
    assert (number, how) == ("10", "greedy")
    half = 1.96 * np.std(returns, ddof=1) / np.sqrt(10)
    expected = [np.mean(returns), np.mean(returns) - half, np.mean(returns) + half, min(returns), max(returns)]
    assert [float(x) for x in (mean, low, high, least, most)] == pytest.approx(expected, rel=1e-2)
    assert float(length) == pytest.approx(np.mean([n for _, n in results]), rel=1e-2)


def test_eval_options(cartpole, capsys):
    assert (
        main(["eval", str(cartpole), "--episodes", "1", "--checkpoint", "best", "--seed", "5", "--act", "sample"]) == 0
    )
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("1 sampled")
    assert " – " in row  # one episode has no interval
    old = ["eval", str(cartpole), "--episodes", "1", "--checkpoint", "best", "--seed", "5", "--explore"]
    assert main(old) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == row
    assert "--explore is now --act sample" in said.err
    assert main([*old, "--act", "greedy"]) == 2
    assert "contradict each other" in capsys.readouterr().err
    assert main(["eval", str(cartpole), "--checkpoint", "99"]) == 2
    assert "unknown checkpoint '99'" in capsys.readouterr().err


def test_eval_of_exactly_so_many_steps(drawn, capsys, monkeypatch):
    seen = []
    real = Drawn.step
    monkeypatch.setattr(Drawn, "step", lambda self, action: seen.append(self.t) or real(self, action))
    assert main(["eval", str(drawn), "--steps", "13"]) == 0
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    _, _, row, played = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["2", "greedy", "15"]
    assert played == "played 13 steps: 2 whole episodes, 3 of one that was cut, return 6 so far"
    assert main(["eval", str(drawn), "--steps", "10"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "played 10 steps: 2 whole episodes"
    assert main(["eval", str(drawn), "--steps", "1"]) == 0
    _, played = capsys.readouterr().out.splitlines()  # no table of no episodes
    assert played == "played 1 step: 0 whole episodes, 1 of one that was cut, return 1 so far"
    for command in ("eval", "collect"):
        assert main([command, str(drawn), "--steps", "10", "--episodes", "2"]) == 2
        assert "give either --episodes or --steps, not both" in capsys.readouterr().err


def test_a_checkpoint_in_the_place_of_its_run(cartpole, capsys, monkeypatch):
    for name in ("latest", "3"):
        assert main(["eval", str(cartpole / "checkpoints" / name)]) == 2
        assert (
            f"It is a checkpoint of the run {cartpole}: give that, and --checkpoint {name}." in capsys.readouterr().err
        )
    monkeypatch.chdir(cartpole / "checkpoints")
    assert main(["collect", "best"]) == 2
    assert "It is a checkpoint of the run ..: give that, and --checkpoint best." in capsys.readouterr().err
    assert main(["eval", "..", "--checkpoint", "best", "--episodes", "1"]) == 0


def test_render_writes_a_frame_per_step_and_one(drawn, capsys):
    assert main(["eval", str(drawn), "--episodes", "2", "--render"]) == 0
    out = capsys.readouterr().out
    assert "filmed one episode of 5 steps, return 15" in out
    for suffix in ("mp4", "gif"):
        path = drawn / "videos" / f"eval.{suffix}"
        assert f"video  {path}" in out
        frames = list(imageio.imiter(path))
        assert len(frames) == 6
        assert [int(f.mean()) for f in frames] == pytest.approx([0, 40, 80, 120, 160, 200], abs=4)


@pytest.mark.parametrize(("command", "folder"), [("eval", "videos"), ("collect", "trajectories")])
def test_nothing_is_written_through_a_link_out_of_a_run(drawn, tmp_path, capsys, command, folder):
    run = tmp_path / "run"
    shutil.copytree(drawn, run, symlinks=True, ignore=shutil.ignore_patterns("videos", "trajectories"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / folder).symlink_to(elsewhere)
    more = ["--render"] if command == "eval" else []
    assert main([command, str(run), "--episodes", "1", "--trust", *more]) == 2
    assert f"{run / folder} is a link" in capsys.readouterr().err
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_the_place_of_a_half_written_file_is_replaced(drawn, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    for name in ("episodes-00000.episodes.tmp", "trajs_0.pkl.tmp"):
        (tmp_path / name).symlink_to(theirs)
    for format in ("bray", "pkl"):
        assert main(["collect", str(drawn), "--episodes", "1", "--out", str(tmp_path), "--format", format]) == 0
    assert theirs.read_text() == "precious"
    assert len(EpisodeReader(tmp_path)) == 1


def test_render_of_what_cannot_be_drawn(drawn, tmp_path, capsys):
    assert main(["eval", str(drawn), "--episodes", "1", "--render", "human"]) == 2
    assert "test_cli:Drawn has no render mode 'human', it has: rgb_array" in capsys.readouterr().err
    path = trained(tmp_path, "envs_for_tests:Scripted")
    assert main(["eval", str(path), "--episodes", "1", "--render"]) == 2
    assert (
        "envs_for_tests:Scripted draws no picture: expected uint8 [H, W, 3] from render(), got nothing"
        in capsys.readouterr().err
    )


# --- collect ----------------------------------------------------------------------------------------------------------


def test_2500_episodes_make_files_of_1000_1000_500(tmp_path, capsys):
    path = trained(tmp_path, "envs_for_tests:Scripted", "env_config={terminate_at: 2}")
    capsys.readouterr()
    assert main(["collect", str(path), "--episodes", "2500"]) == 0
    out = capsys.readouterr().out
    files = sorted(f for f in (path / "trajectories").iterdir() if f.name != "spec.json")
    assert [len(bray.EpisodeReader(f)) for f in files] == [1000, 1000, 500]
    assert all(f"file    {f}" in out for f in files)
    assert "2,500 episodes, 5,000 steps" in out
    reader = bray.EpisodeReader(path / "trajectories")
    assert sorted(e["reward"].sum() for e in reader) == sorted(r for r, _ in Experiment.load(path).play(2500))
    first = reader[0]
    assert first["obs"][:, 0].tolist() == [0.0, 1.0, 2.0]  # the final observation is the last row
    assert first["terminated"].tolist() == [False, True]
    assert first["obs"][1:, 2].tolist() == first["action"].tolist()


def test_collected_returns_are_those_of_play(cartpole, tmp_path):
    argv = [
        "collect",
        str(cartpole),
        "--episodes",
        "20",
        "--act",
        "sample",
        "--seed",
        "7",
        "--out",
        str(tmp_path / "a"),
    ]
    assert main([*argv, "--per-file", "8"]) == 0
    reader = bray.EpisodeReader(tmp_path / "a")
    played = Experiment.load(cartpole).play(20, seed=7, act="sample")
    assert [len(bray.EpisodeReader(p)) for p in reader.paths] == [8, 8, 4]
    assert sorted(reader.steps.tolist()) == sorted(n for _, n in played)
    assert sorted(float(e["reward"].sum()) for e in reader) == sorted(r for r, _ in played)
    assert (
        main(
            [
                "collect",
                str(cartpole),
                "--episodes",
                "3",
                "--format",
                "pkl",
                "--out",
                str(tmp_path / "b"),
                "--per-file",
                "2",
            ]
        )
        == 0
    )
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["trajs_0.pkl", "trajs_1.pkl"]


def test_exactly_so_many_steps_are_collected(tmp_path, capsys):
    path = trained(tmp_path, "envs_for_tests:Scripted")
    assert main(["collect", str(path), "--steps", "13"]) == 0
    assert "3 episodes, 13 steps" in capsys.readouterr().out
    reader = bray.EpisodeReader(path / "trajectories")
    assert reader.steps.tolist() == [5, 5, 3]
    ends = [(e["terminated"].tolist(), e["truncated"].tolist()) for e in reader]
    assert ends[:2] == [([False] * 4 + [True], [False] * 5)] * 2
    assert ends[2] == ([False] * 3, [False, False, True])  # it was cut, it did not end
    assert reader[2]["obs"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert main(["collect", str(path), "--steps", "10", "--out", str(tmp_path / "even")]) == 0
    assert bray.EpisodeReader(tmp_path / "even").steps.tolist() == [5, 5]


def test_a_collected_episode_can_be_played_again(tmp_path):
    """Actions are in the environment's units: Pendulum's torque reaches from -2 to 2."""
    exp = Experiment.load(trained(tmp_path, "Pendulum-v1", "max_episode_steps=30", "log_std_init=1.0"))
    (episode,) = collect.episodes(exp, 1, seed=3, act="sample")
    env = make_env(exp.config["env"])
    obs, _ = env.reset(seed=episode_seed(3, 0, 0))
    assert len(episode["action"]) == 30
    assert 1.0 < np.abs(episode["action"]).max() <= 2.0
    for t, action in enumerate(episode["action"]):
        np.testing.assert_array_equal(episode["obs"][t], obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        assert np.float32(reward) == episode["reward"][t]
        assert (terminated, truncated) == (episode["terminated"][t], episode["truncated"][t])
    np.testing.assert_array_equal(episode["obs"][30], obs)
    assert episode["truncated"].tolist() == [False] * 29 + [True]


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "SMOKE_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "TRIED", ("vectors",))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {c["name"]: c for c in report["checks"]}
    assert report["ok"] is True
    assert report["bray"] == bray.__version__
    assert checks["torch"]["value"].startswith("2.13.0")
    assert re.search(r"PPO on CartPole-v1: [\d,]+ steps/s", checks["trains"]["value"])
    assert re.match(
        r"recorded, 1 thread: [\d.e-]+ ms; eager, 1 thread: [\d.e-]+ ms", checks["update, vectors"]["value"]
    )
    assert {
        "python",
        "cpu",
        "cpu features",
        "memory",
        "gpu",
        "numba works",
        "ffmpeg works",
        "writing",
        "saves",
    } <= checks.keys()
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_to_fix_and_names_nobody(capsys, monkeypatch, tmp_path):
    def _broken():
        raise OSError(f"cannot open {tmp_path}/x/secret")

    def _old():
        return [
            doctor.Check("numpy", "1.0", False, "1.0 is too old: pip install 'numpy>=2.0'"),
            doctor.Check("cores", "2", None),
        ]

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "CHECKS", (_old, _broken))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert str(tmp_path) not in out
    assert "cannot open ~/x/secret" in out
    assert out.rstrip().splitlines()[-3:-1] == ["2 to fix:", "  numpy: 1.0 is too old: pip install 'numpy>=2.0'"]
    assert "all good" not in out
