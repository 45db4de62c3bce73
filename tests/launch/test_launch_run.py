"""`bray launch`: what is built from a file, with what, and how a run ends. The remote components are stand-ins, nothing
listens."""

import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import launch_for_tests as fakes
import pytest

from bray.cli import launch as command
from bray.cli.main import main
from bray.cli.options import Launch
from bray.cluster import session as sessions
from bray.errors import ConfigError
from bray.launch import build as building
from bray.launch.graph import load
from bray.serving.policy_actor import PolicyActor
from tests import forked

_number = itertools.count()


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The launch file of a small project, and stand-ins for what it starts."""
    monkeypatch.setattr(building, "find_part", building.find_part)  # whatever `use` does is undone
    monkeypatch.setattr(sys, "path", [*sys.path])
    fakes.use()
    return fakes.write_project(tmp_path, f"launched{next(_number)}_{os.getpid()}", tmp_path / "runs")


def built(file, *keys, **kwargs):
    return building.build(
        load(file, keys, **kwargs),
        SimpleNamespace(path=Path("somewhere/t"), writes_to=Path("somewhere/t"), stop_hooks=[]),
    )


def made(what):
    return [(args, kwargs) for kind, args, kwargs in fakes.made if kind == what]


# --- building ---------------------------------------------------------------------------------------------------------


def test_components_are_built_in_the_order_in_which_they_need_each_other(file):
    run = built(file)
    assert [kind for kind, _, _ in fakes.made] == [
        "model",
        "buffer",
        "add_source",
        "actor",
        "serve",
        "trainer",
        "train",
    ]
    assert run.ends == fakes.ends
    assert not run.done()
    assert fakes.shared["config"] == run.graph.config
    assert fakes.shared["config"]["network"]["width"] == 7


def test_what_each_component_is_made_with(file):
    run = built(file)
    ((args, kwargs),) = made("model")
    assert args == ("model1", "torch of model1", (7,))
    assert kwargs["memory_per_worker"] == 1024
    ((args, kwargs),) = made("add_source")
    assert (args, kwargs) == ((range(3), range(4)), {"num_workers": None, "epoch": 2, "name": "source1"})
    ((_, kwargs),) = made("serve")
    assert kwargs["Actor"] is PolicyActor
    assert list(kwargs["agents"]) == ["agent1", "metrics"]
    assert (kwargs["config"], kwargs["save_dir"], kwargs["episode_save_interval"]) == (
        run.graph.config,
        "somewhere/t",
        5,
    )
    ((_, kwargs),) = made("train")
    assert kwargs["trainer"].__name__ == "Trainer"
    assert kwargs["model"] is run.models["model1"]
    assert kwargs["buffers"] == [run.buffers["buffer1"]]
    assert kwargs["config"] is run.graph.config


VALUES = {  # a value for each key that is not the default
    "model": {
        "checkpoint_interval": 5, "checkpoint_every_s": 7.5, "keep_checkpoints": 3, "checkpoint": 7,
        "max_batch_size": 8, "num_workers": 2, "cpus_per_worker": 0.5,
        "gpus_per_worker": 0.25, "memory_per_worker": 64, "use_onnx": "infer", "local_mode": True,
        "override_model": False,
        "tensorboard_graph": True, "tensorboard_step": True,
    },
    "buffer": {"size": 9, "batch_size": 3, "num_workers": 4, "density": 5},
    "actor": {
        "port": 9, "num_workers": 3, "actors_per_worker": 4, "cpus_per_worker": 2.0, "memory_per_worker": 64,
        "use_tcp": True,
        "use_gateway": "head", "tick_timeout_s": 2.5, "idle_timeout_s": 9.0, "disconnect_timeout_s": 3.0,
        "tokens": ("a", "b"),
        "host": "0.0.0.0", "admin_port": 7, "request_timeout_s": 5.0, "keep_alive_s": 6.0, "drain_timeout_s": 7.0,
        "first_request_s": 8.0,
        "max_body": 9, "max_bodies": 10, "max_header": 11, "max_connections": 12, "max_pending": 13,
        "max_pending_per_session": 14,
        "admin_tokens": ("c",), "blocked_after_s": 1.5,
    },
    "serve": {"episode_length": 9, "episode_save_interval": 3, "serialize": "json"},
    "trainer": {"use_gpu": True, "num_workers": 2, "cpus_per_worker": 3.0},
    "train": {
        "buffer_weights": (2.0,), "batch_size": 3, "batch_kind": "stack", "prefetch_size": 4, "max_reuse": 5,
        "accumulate": 6, "learning_rate": 0.5,
        "clip_grad_max_norm": 2.0, "weights_publish_interval": 6, "num_steps": 7, "checkpoint_interval": 8,
    },
    "add_source": {"num_workers": 3, "epoch": 4},
}  # fmt: skip


@pytest.mark.parametrize(("what", "key"), [(w, k) for w, values in VALUES.items() for k in values])
def test_every_key_reaches_its_component(what, key, file):
    component = {"serve": "actor1", "train": "trainer1", "add_source": "source1"}.get(what, f"{what}1")
    value = VALUES[what][key]
    text = {True: "true", False: "false"}.get(value, list(value) if isinstance(value, tuple) else value)
    assert made_with(file, what, key) != value
    assert made_with(file, what, key, f"{component}.{key}={text}") == value


def made_with(file, what, key, *keys):
    fakes.made.clear()
    built(file, *keys)
    return made(what)[0][1][key]


def test_evaluation(file):
    run = built(file, "trainer1.eval={buffer: buffer1, interval: 3, steps: 2}")
    assert made("train")[0][1]["eval"] == {"buffer": run.buffers["buffer1"], "interval": 3, "steps": 2}
    assert made_with(file, "train", "eval") is None


def test_episodes_are_saved_only_when_the_file_says_so(file):
    assert made_with(file, "serve", "episode_save_interval", "dump_state=false") is None
    assert made_with(file, "serve", "save_dir", "dump_state=false") is None
    assert made_with(file, "serve", "save_dir", "actor1.episode_save_interval=null") is None


def test_games_of_a_training_are_not_waited_for_long(file):
    assert made_with(file, "actor", "drain_timeout_s") == 2.0
    fakes.made.clear()
    built(file, mode="deploy")
    assert made("actor")[0][1]["drain_timeout_s"] == 10.0
    assert made_with(file, "actor", "drain_timeout_s", "actor1.drain_timeout_s=10") == 10.0


def test_a_service_that_cannot_be_is_told_before_anything_starts(file, capsys):
    assert main(["launch", "--config", str(file), "--check", "actor1.session_secrets=true", "actor1.use_tcp=true"]) == 2
    said = capsys.readouterr().err
    assert "actor1" in said
    assert "session_secrets are HTTP headers" in said


def test_deploy_builds_no_trainer_and_no_buffer(file):
    run = built(file, mode="deploy")
    assert [kind for kind, _, _ in fakes.made] == ["model", "actor", "serve"]
    assert list(made("serve")[0][1]["agents"]) == ["agent1"]
    assert not run.done()  # it goes on until it is stopped


def test_a_model_that_was_never_trained_is_not_served_in_silence(file, caplog):
    built(file)
    built(file, "model1.checkpoint=weights.safetensors", mode="deploy")
    assert "no checkpoint" not in caplog.text
    built(file, mode="deploy")
    assert "model model1 has no checkpoint in somewhere/t" in caplog.text


def test_an_actor_of_ones_own(file):
    name = file.parent.name
    keys = ["actor1.agents=[]", f"actor1.module={name}.code", "actor1.class=Actor", "actor1.colour=red"]
    run = built(file, *keys)
    ((_, kwargs),) = made("serve")
    assert kwargs["Actor"].__name__ == "Actor"
    assert (kwargs["name"], kwargs["config"]["actor1"]["colour"]) == ("actor1", "red")
    assert set(kwargs) == {"Actor", "name", "config"}
    assert run.actors["actor1"].port == 4321


def test_an_algorithm_needs_no_modules(file):
    text = file.read_text() + "ppo: {kind: config, algorithm: PPO, env: CartPole-v1}\n"
    text = text.replace(f"kind: model, module: {file.parent.name}.code", "kind: model, algo: ppo")
    text = text.replace(f"module: {file.parent.name}.code, class: Trainer, model", "algo: ppo, model")
    file.write_text(text)
    built(file)
    assert made("train")[0][1]["trainer"] is None  # RemoteTrainer takes the Learner of config["trainer1"]["algo"]
    model, forward_args = made("model")[0][0][1:]
    assert set(model(*map(_tensor, forward_args))) == {"dist", "value"}


def _tensor(x):
    import torch

    return torch.from_numpy(x)


@pytest.mark.parametrize(
    ("function", "body", "said"),
    [
        ("build_model", "return 3", "expected build_model to return (model, forward_args), got 3"),
        (
            "build_source",
            "return 3",
            "expected build_source of source source1 ({file}:7) to return a list of iterables, got 3",
        ),
    ],
)
def test_what_a_function_returns_is_looked_at(function, body, said, file):
    code = file.parent / "code.py"
    code.write_text(code.read_text() + f"\ndef {function}(name, config):\n    {body}\n")
    with pytest.raises(ConfigError) as e:
        built(file)
    assert said.replace("{file}", str(file)) in str(e.value)


def test_an_error_of_the_users_code_comes_as_it_is_with_the_component(file):
    code = file.parent / "code.py"
    code.write_text(code.read_text() + "\ndef build_model(name, config):\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError) as e:
        built(file)
    assert e.value.__notes__ == [f"model model1 ({file}:6) could not be started"]


# --- progress ---------------------------------------------------------------------------------------------------------


def test_a_line_of_progress(file):
    run = built(file)
    average = {"time_window_avg": 12.5, "time_window_sum": 1200.0, "last_100_avg": None}
    fakes.numbers.update(
        {
            "return{agent=agent1}": average,
            "episode_reward/m": average,
            "loss/x": average,
            "samples{trainer=trainer1}": average,
        }
    )
    assert run.progress() == "trainer1 step 0 · return (agent1) 12.5 · episode_reward/m 12.5 · 20 samples/s (trainer1)"
    run.models["model1"].step = 1500
    time.sleep(0.01)
    assert run.progress().startswith("trainer1 step 1,500 (")
    fakes.numbers["return{agent=agent1}"] = {**average, "time_window_avg": None}
    assert "return" not in run.progress()


def test_progress_is_the_mean_of_the_last_100_episodes_where_they_are_kept(file):
    run = built(file)
    fakes.numbers["episode_return{agent=agent1}"] = {
        "time_window_avg": 6.15, "time_window_sum": 1200.0, "last_100_avg": 11.6,
    }  # fmt: skip
    assert run.progress() == "trainer1 step 0 · episode_return (agent1) 11.6"


# --- the command ------------------------------------------------------------------------------------------------------


def launch(file, *more):
    return main(["launch", "--config", str(file), "--cluster", "local", *more])


def end_training(error=None):
    """When the training has begun, let it end."""

    def wait():
        while "trainer1" not in fakes.ends:
            time.sleep(0.01)
        end = fakes.ends["trainer1"]
        end.set_exception(error) if error is not None else end.set_result({"steps": 3})

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_run_ends_when_its_trainers_are_done(file, tmp_path, capsys):
    end_training()
    assert launch(file) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{tmp_path / 'runs'}/t · mode train · local · 8 components"
    assert "started trainer trainer1" in out
    assert "trainer1 step 0" in out
    assert any("port 4321; try: bray fake gamecore --port 4321" in line for line in out)
    assert out[-1] == (
        f"the training is done · run directory {tmp_path / 'runs' / 't'} · serve it: bray launch --config {file} "
        "--mode deploy --cluster local"
    )
    assert (tmp_path / "runs" / "t").is_dir()


def test_what_to_type_after_a_training_is_done_trains_on(file, tmp_path, capsys):
    """num_steps counts from the first start: the same number again would train nothing."""
    end_training()
    assert launch(file, "actor1.enable=deploy", "trainer1.num_steps=20") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        f"go on: bray launch --config {file} --cluster local actor1.enable=deploy trainer1.num_steps=40"
    )


def test_a_projects_own_games_are_named(file, capsys):
    (file.parent / "gamecore.py").write_text("")
    end_training()
    assert launch(file) == 0
    assert f"python -m {file.parent.name}.gamecore --port 4321" in " ".join(capsys.readouterr().out.split())


def test_a_trainer_that_fails_shows_its_traceback_first_and_the_code_is_1(file, capsys):
    error = ValueError("the loss is nan")
    error.add_note(
        "raised in trainer/trainer1 (pid 7 on host):\nTraceback (most recent call last):\n  File ...\nValueError: the "
        "loss is nan"
    )
    end_training(error)
    assert launch(file) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[:2] == ["raised in trainer/trainer1 (pid 7 on host):", "Traceback (most recent call last):"]
    assert err[-2] == "error: trainer trainer1 has failed, and the session ends: ValueError: the loss is nan"
    assert err[-1].startswith("run directory: ")


def test_a_trainer_of_this_process_that_fails(file, capsys):
    try:
        raise KeyError("gone")
    except KeyError as e:
        end_training(e)
    assert launch(file) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "error: trainer trainer1 has failed, and the session ends: KeyError: 'gone'" in err


@pytest.mark.parametrize(
    ("body", "code", "first", "last"),
    [
        ("return 1 / 0", 1, "Traceback (most recent call last):", "ZeroDivisionError: division by zero"),
        ("return 3", 2, None, "expected build_model to return (model, forward_args), got 3"),
    ],
)
def test_a_component_that_cannot_be_built_ends_the_session(body, code, first, last, file, capsys):
    path = file.parent / "code.py"
    path.write_text(path.read_text() + f"\ndef build_model(name, config):\n    {body}\n")
    assert launch(file) == code
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == f"error: model model1 ({file}:6) could not be started: {last}"
    if first is None:
        assert len(err) == 1
    else:
        assert err[0] == first
        assert err[1].startswith(f'  File "{path}"')  # the user's code, and none of ours before it
    from bray.cluster.session import session

    with pytest.raises(ConfigError, match="there is no session"):
        session()


@pytest.mark.parametrize(("mode", "folder"), [("train", "."), ("deploy", "deploy")])
def test_the_numbers_of_a_deployment_are_in_a_folder_of_its_own(mode, folder, file, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "run_until_asked_to_stop", lambda poll: sessions.shutdown())
    assert launch(file, "--mode", mode) == 0
    written = {p.parent for p in (tmp_path / "runs" / "t").rglob("bray.log")}
    assert written == {tmp_path / "runs" / "t" / folder}


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["train", "deploy"])
def test_a_signal_stops_it_cleanly_with_code_0(sig, mode, file, tmp_path):
    code = "import sys, launch_for_tests as f; f.use(); from bray.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["launch", "--config", str(file), "--cluster", "local", "--mode", mode]
    here = str(Path(__file__).parents[1])
    process = forked.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([here, str(Path(here).parent)])},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),  # as a script's shell starts it with `&`
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C ends it" in line:
                break
        time.sleep(0.3)
        process.send_signal(sig)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    last = out.splitlines()[-1]
    assert f"run directory {tmp_path / 'runs' / 't'}" in last
    assert last.startswith("stopped; the same command goes on" if mode == "train" else "stopped · ")


# --- looking before ---------------------------------------------------------------------------------------------------


@pytest.fixture
def real(file):
    """Its model is one of torch: what is checked is run."""
    code = file.parent / "code.py"
    line = "import torch; return torch.nn.Identity(), (torch.zeros(1, config['network']['width']),)"
    code.write_text(re.sub(r'return f"torch of.*', line, code.read_text()))
    return file


def test_check_says_what_would_start(real, tmp_path, capsys, monkeypatch):
    file = real
    monkeypatch.setattr(command.Machine, "look", classmethod(lambda cls: cls(1, 2048.0, ())))
    monkeypatch.setattr("bray.cluster.ray_start.running_nodes", lambda: [])
    assert main(["launch", "--config", str(file), "--check", "model1.num_workers=2", "model1.gpus_per_worker=1"]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[0] == f"{tmp_path / 'runs'}/t · mode train · 8 components"
    assert "model1 model 2 2 2 2048 any node" in rows
    assert "buffer1 buffer 2 – – – any node trains trainer1" in rows
    assert "actor1 actor 2 2 – 1024 each node, port any ticks agent1, metrics" in rows
    assert "trainer1 trainer 1 1 – – any node publishes model1" in rows
    assert "sum 8 5 2 3072" in rows
    assert "this machine 1 CPUs, 2.0 GiB memory, no GPU" in rows
    assert "cluster none runs here: a Ray of its own would be started on this machine" in rows
    assert "note: 5 CPUs are asked for and 1 are here: the processes share them" in rows
    assert "note: 2 GPUs are asked for and 0 are here" in rows
    assert "note: 3,072 MB are asked for and 2,048 are here" in rows
    assert rows[-1].startswith("nothing was started; start it with: bray launch --config ")
    assert rows[-1].endswith(f"{file} model1.num_workers=2 model1.gpus_per_worker=1")
    assert fakes.made == []
    assert not (tmp_path / "runs").exists()


def test_check_of_deploy_mode(real, capsys):
    assert launch(real, "--check", "--mode", "deploy", "--trial", "t2") == 0
    out = capsys.readouterr().out
    assert "/t2 · mode deploy · 4 components" in out
    assert "local: all components in this process" in out
    assert "are here" not in out  # one process asks for nothing
    assert (
        "not in this mode: metrics (enable: train), trainer1 (deploy mode trains nothing), buffer1 (only trainers "
        "read it)" in out
    )


def test_the_clusters_nodes_are_shown(real, capsys, monkeypatch):
    file = real
    nodes = [
        SimpleNamespace(host="10.0.0.1", head=True, cpus=4.0, gpus=1.0),
        SimpleNamespace(host="10.0.0.2", head=False, cpus=8.0, gpus=0.0),
    ]
    monkeypatch.setattr("bray.cluster.ray_start.running_nodes", lambda: nodes)
    assert main(["launch", "--config", str(file), "--check"]) == 0
    out = capsys.readouterr().out
    assert "a Ray cluster of 2 would be joined: 10.0.0.1 (head): 4 CPUs, 1 GPUs; 10.0.0.2: 8 CPUs, 0 GPUs" in out
    monkeypatch.setattr("bray.cluster.ray_start.running_nodes", lambda: [])
    assert main(["launch", "--config", str(file), "--check"]) == 0
    assert "a Ray of its own would be started on this machine" in capsys.readouterr().out


def test_a_wrong_file_starts_nothing(file, tmp_path, capsys):
    assert launch(file, "model1.module=nowhere") == 2
    assert (
        "error: model1.module (model1.module=nowhere on the command line): there is no module 'nowhere'"
        in capsys.readouterr().err
    )
    assert fakes.made == []
    assert not (tmp_path / "runs").exists()


def test_the_picture_is_drawn(file, tmp_path, capsys):
    out = tmp_path / "pictures" / "out.svg"
    assert launch(file, "--graph", str(out), "model1.module=nowhere") == 0  # no module of the user's is looked at
    assert out.read_text().startswith("<svg ")
    assert capsys.readouterr().out.split() == ["drawn", str(out)]
    assert launch(file, "--graph", str(tmp_path / "out.png")) == 2
    assert "--graph: expected a file that ends in .svg" in capsys.readouterr().err


def test_a_ray_of_its_own_is_told_of_enough_cpus(file):
    asked = command.total(load(file, ["trainer1.num_workers=100"]).resources())
    assert command.ray_settings(Launch(config=file), asked) == {"num_cpus": 102}
    assert command.ray_settings(Launch(config=file), asked._replace(cpus=0.5))["num_cpus"] >= 8
    assert command.ray_settings(Launch(config=file, cluster="local"), asked) == {}


def test_python_m_bray_launch_is_the_same_command(real, monkeypatch, capsys):
    def said(module, *words):
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(SystemExit) as end:  # as `python -m` runs it
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert not end.value.code
        return capsys.readouterr().out

    words = ["--config", str(real), "--check", "--cluster", "local"]
    whole = said("bray.launch", *words)
    assert whole == said("bray", "launch", *words)
    assert "mode train · 8 components" in whole
    help = said("bray.launch", "--help")
    assert "Usage: bray launch" in help
    assert all(flag in help for flag in ("--config", "--mode", "--trial", "--check", "--graph", "--cluster"))
