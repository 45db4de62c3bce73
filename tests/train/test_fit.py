"""What `auto` chooses: on machines that are made up, and here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import bray
from bray.cli.main import main
from bray.envs import timing
from bray.errors import ConfigError
from bray.train import gpu as gpus, settle as settling
from bray.train.fit import Facts, Gpu, Work, banded, dealt, fit

pytestmark = pytest.mark.times
H200 = Gpu("NVIDIA H200", 0, 130.0)
NATURE = 1.9e7  # floating-point operations of a forward
PICTURES = Work(NATURE, NATURE, 4.0, 4 * 8 / (64 * 256))
SMALL = Work(1.8e4, 1.8e4, 8.0, 64 / 1024)
SAC = Work(1.4e5, 4e5, 256.0, 1.0)


def choose(cores, num_envs, **facts):
    return fit(Facts(cores, num_envs, **facts))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # two cores: as it was before anything was chosen
        ({"cores": 2, "num_envs": 8, "work": SMALL}, ("cpu", 0, "worker", 8)),
        ({"cores": 2, "num_envs": 256, "plays": "asynchronous", "step_ms": 0.5}, ("cpu", 0, "worker", 256)),
        # a GPU and 16 cores
        (
            {"plays": "asynchronous", "work": PICTURES, "pictures": True, "step_ms": 0.5, "gpu": H200},
            ("cuda", 16, "central", 16),
        ),
        ({"work": PICTURES, "pictures": True, "step_ms": 0.5, "gpu": H200}, ("cuda", 0, "worker", 256)),
        ({"num_envs": 8, "work": SMALL, "gpu": H200}, ("cpu", 0, "worker", 8)),
        # an algorithm that replays: a worker plays a round ahead, where that is faster and there is a core for it
        ({"num_envs": 1, "plays": "replay", "work": SAC, "gpu": H200}, ("cuda", 1, "worker", 1)),
        ({"num_envs": 4, "plays": "replay", "work": SAC, "gpu": H200, "step_ms": 0.3}, ("cuda", 1, "worker", 4)),
        ({"num_envs": 16, "plays": "replay", "work": SAC, "gpu": H200}, ("cuda", 0, "worker", 16)),
        ({"cores": 2, "num_envs": 1, "plays": "replay", "work": SAC, "gpu": H200}, ("cuda", 0, "worker", 1)),
        ({"num_envs": 1, "plays": "replay", "work": SAC, "gpu": H200, "splits": "one"}, ("cuda", 0, "worker", 1)),
        ({"num_envs": 1, "plays": "replay", "work": SAC}, ("cpu", 0, "worker", 1)),
        # what does not divide, or may not be dealt out
        (
            {"num_envs": 18, "plays": "asynchronous", "work": PICTURES, "step_ms": 0.5, "gpu": H200},
            ("cuda", 9, "central", 2),
        ),
        (
            {"plays": "asynchronous", "work": PICTURES, "step_ms": 0.5, "gpu": H200, "splits": "one"},
            ("cuda", 0, "worker", 256),
        ),
        (
            {"plays": "asynchronous", "work": PICTURES, "step_ms": 0.5, "gpu": H200, "draws": True},
            ("cuda", 16, "worker", 16),
        ),
        # no GPU: workers where environments are dear, and not where the network is
        ({"num_envs": 30, "plays": "asynchronous", "work": SMALL, "step_ms": 1.0}, ("cpu", 15, "worker", 2)),
        ({"plays": "asynchronous", "work": PICTURES, "pictures": True, "step_ms": 0.5}, ("cpu", 0, "worker", 256)),
        ({"num_envs": 8, "plays": "asynchronous", "work": SMALL, "step_ms": 0.01}, ("cpu", 0, "worker", 8)),
        # environments that sleep do so at the same time, however few cores there are
        (
            {"num_envs": 32, "plays": "asynchronous", "work": SMALL, "step_ms": 10.0, "sleeps": True},
            ("cpu", 32, "worker", 1),
        ),
        # what is given stays
        (
            {"plays": "asynchronous", "work": PICTURES, "step_ms": 0.5, "given": {"device": "cuda:1"}},
            ("cuda:1", 16, "central", 16),
        ),
        ({"num_envs": 4, "work": PICTURES, "gpu": H200, "given": {"num_workers": 3}}, ("cuda", 3, "central", 4)),
        (
            {"plays": "asynchronous", "work": PICTURES, "step_ms": 0.5, "gpu": H200, "given": {"inference": "worker"}},
            ("cuda", 16, "worker", 16),
        ),
    ],
)
def test_made_up_machines(facts, expected):
    choice = fit(Facts(**{"cores": 16, "num_envs": 256, **facts}))
    assert (choice.device, choice.num_workers, choice.inference, choice.num_envs) == expected
    assert choice.lockstep == (facts.get("plays") == "replay" and choice.num_workers > 0)
    if "num_workers" not in facts.get("given", {}):
        total = facts.get("num_envs", 256)
        assert max(1, choice.num_workers) * choice.num_envs == total  # they are dealt out, never more
    assert fit(Facts(**{"cores": 16, "num_envs": 256, **facts})) == choice


def test_a_gpu_that_is_full_is_left_alone_and_its_users_are_named():
    full = Gpu("NVIDIA H200", 0, 0.4, ("python (process 4711, 120.0 GiB)",))
    choice = choose(16, 256, plays="asynchronous", work=PICTURES, pictures=True, step_ms=0.5, gpu=full)
    assert (choice.device, choice.num_workers) == ("cpu", 0)
    assert "NVIDIA H200 has 0.4 GiB free, held by python (process 4711, 120.0 GiB)" in str(choice)


def test_environments_that_sleep_get_a_process_each():
    choice = choose(2, 8, step_ms=3.0, sleeps=True)
    assert (choice.num_workers, choice.num_processes) == (0, 8)


def test_shares_and_bands():
    assert [dealt(n, 16) for n in (256, 8, 18, 17, 1)] == [16, 8, 9, 1, 1]
    assert [banded(ms) for ms in (0.004, 0.012, 0.05, 0.09, 0.5, 4.9, 5.7)] == [0.0, 0.01, 0.03, 0.1, 0.3, 3.0, 10.0]


def test_the_rule_needs_no_torch():
    code = "import sys; import bray.train.fit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- here -------------------------------------------------------------------------------------------------------------

SHORT = {"rollout_length": 16, "minibatches": 2, "epochs": 2, "iteration_steps": 0}


class Slow(gym.Env):
    """A step sleeps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        time.sleep(0.005)
        self._t += 1
        return np.full(3, self._t / 50, np.float32), float(action), False, self._t >= 40, {}


def a_machine(monkeypatch, cores=16, gpu=None):
    monkeypatch.setattr(settling, "cores", lambda: cores)
    monkeypatch.setattr(settling, "find_gpu", lambda: (gpu, ""))


def weights(exp, iterations=2):
    for _ in range(iterations):
        exp.training.iterate()
    out = exp.training.weights()
    exp.close()
    return out


def test_a_small_machine_has_what_it_had_and_times_nothing(monkeypatch):
    monkeypatch.setattr(settling, "time_steps", lambda env: pytest.fail("CartPole is declared"))
    a_machine(monkeypatch, cores=2)
    auto = bray.Experiment("PPO", "CartPole-v1", **SHORT)
    mine = bray.Experiment("PPO", "CartPole-v1", **SHORT, device="cpu", num_workers=0, inference="worker", threads=1)
    ours, theirs = weights(auto), weights(mine)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[k], theirs[k]) for k in ours)
    assert (auto.config["run"].device, auto.config["run"].num_workers, auto.config["env"].num_envs) == ("cpu", 0, 8)
    assert auto.config.provenance["run.num_workers"] == "auto"
    assert mine.choice is None


def test_asynchronous_players_share_what_was_asked_for_and_a_batch_stays_as_large(monkeypatch, tmp_path):
    a_machine(monkeypatch, cores=4)
    config = {**SHORT, "num_envs": 4, "step_ms": 3.0}
    exp = bray.Experiment("APPO", "CartPole-v1", use_preset=False, config=config, path=tmp_path / "run")
    rows = list(exp.train({"training_iteration": 2}))
    exp.close()
    c = exp.config
    assert (c["run"].num_workers, c["env"].num_envs, c["algo"].batch_envs) == (2, 2, 4)
    assert rows[-1]["env_steps_total"] > 0
    written = (tmp_path / "run" / "config.yaml").read_text()
    for line in ("num_workers: 2", "num_envs: 2", "batch_envs: 4", "device: cpu", "inference: worker", "threads: 1"):
        assert any(text.strip().startswith(line) and text.rstrip().endswith("# auto") for text in written.splitlines())
    assert (
        "auto: device=cpu, 2 workers with 2 environments each, worker inference"
        in (tmp_path / "run" / "bray.log").read_text()
    )
    # the run keeps what was chosen, whatever machine it is on; asked for anew, the four are dealt out again
    a_machine(monkeypatch, cores=2)
    again = bray.Experiment.load(tmp_path / "run")
    again.settle()
    assert (again.config["run"].num_workers, again.config["env"].num_envs, again.choice) == (2, 2, None)
    anew = bray.Experiment.resume(tmp_path / "run", num_workers="auto")
    assert (anew.config["run"].num_workers, anew.config["env"].num_envs) == (0, 4)
    anew.close()


def test_rounds_and_replays_stay_in_the_process_and_preset_totals_are_not_multiplied(monkeypatch, caplog):
    a_machine(monkeypatch)
    for run, env in (("PPO", "CartPole-v1"), ("DQN", "CartPole-v1"), ("PG", "CartPole-v1")):
        exp = bray.Experiment(run, env, use_preset=False, num_envs=8, step_ms=10.0)
        exp.settle()
        assert (exp.config["run"].num_workers, exp.config["env"].num_envs) == (0, 8)
    exp = bray.Experiment("PPO", "CartPole-v1", num_workers=2)
    exp.settle()
    assert "num_workers=2 multiplies num_envs=8 of the preset cartpole_ppo: 16 environments" in caplog.text


def test_a_worker_of_sac_beside_a_gpu_keeps_what_is_learnt_apart_from_the_clock(monkeypatch):
    a_machine(monkeypatch, gpu=H200)
    exp = bray.Experiment("SAC", "Pendulum-v1", use_preset=False)
    exp.settle()
    run = exp.config["run"]
    assert (run.device, run.num_workers, run.lockstep, exp.config["env"].num_envs) == ("cuda", 1, True, 1)
    assert "1 worker with 1 environment each, worker inference, a round ahead" in str(exp.choice)
    by_hand = bray.Experiment("SAC", "Pendulum-v1", use_preset=False, num_workers=1)
    by_hand.settle()
    assert not by_hand.config["run"].lockstep  # what it always meant


def test_atari_on_a_made_up_gpu(monkeypatch):
    pytest.importorskip("ale_py")
    a_machine(monkeypatch, gpu=H200)
    chosen = {}
    for run in ("APPO", "IMPALA", "PPO", "DQN"):
        exp = bray.Experiment(run, "ALE/Breakout-v5", atari={"size": 84})
        exp.settle()
        c = exp.config
        chosen[run] = c["run"].device, c["run"].num_workers, c["run"].inference, c["env"].num_envs
    assert chosen["APPO"] == chosen["IMPALA"] == ("cuda", 16, "central", 16)
    assert chosen["PPO"] == ("cuda", 0, "worker", 128)
    assert chosen["DQN"][:3] == ("cuda", 0, "worker")
    exp = bray.Experiment("PPO", "CartPole-v1")
    exp.settle()
    assert exp.config["run"].device == "cpu"


def test_a_slow_environment_is_timed_once_and_plays_in_processes(monkeypatch):
    monkeypatch.setattr(settling, "time_steps", (timed := Counted(settling.time_steps)))
    found = []
    for _ in range(2):
        exp = bray.Experiment("PPO", f"{__name__}:Slow", **{**SHORT, "num_envs": 2}, use_preset=False)
        exp.settle()
        found.append((exp.config["env"].step_ms, exp.config["env"].num_processes, exp.config.provenance["env.step_ms"]))
    form = type(exp.training.env).__name__
    exp.close()
    assert found[0] == found[1]
    assert found[0][0] in (3.0, 10.0)
    assert found[0][2] == "auto"
    assert form == "SubprocessVecEnv"
    assert timed.count == 1
    told = json.loads(settling.steps_file().read_text())
    assert [found[0][0], True] in told.values()


def children_of(pid):
    """Their command lines, on Linux."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [Path(f"/proc/{child}/cmdline").read_text() for found in lists for child in found.read_text().split()]


class Counted:
    def __init__(self, fn):
        self.fn, self.count = fn, 0

    def __call__(self, *arguments):
        self.count += 1
        return self.fn(*arguments)


class Fatal(Slow):
    """A step ends the process, or never ends."""

    def __init__(self, hangs: bool = False):
        self._hangs = hangs

    def step(self, action):
        if self._hangs:
            time.sleep(1000)
        os._exit(3)


@pytest.mark.parametrize(("hangs", "says"), [(False, "died (exit code 3)"), (True, "did not answer within 4 s")])
def test_an_environment_that_ends_its_process_or_hangs_while_it_is_timed_plays_in_processes(
    hangs, says, monkeypatch, caplog
):
    monkeypatch.setattr(timing, "LIMIT_S", 4.0 if hangs else 60.0)
    known = settling.read_steps(settling.steps_file())
    name = f"{__name__}:Fatal"
    exp = bray.Experiment(
        "PPO", name, use_preset=False, config={**SHORT, "num_envs": 2, "env_config": {"hangs": hangs}}
    )
    exp.settle()
    assert exp.config["env"].vector == "subprocess"
    assert f"{name} {says}" in caplog.text
    assert "vector=subprocess" in caplog.text
    assert settling.read_steps(settling.steps_file()) == known  # it is tried again
    assert not [name for name in children_of(os.getpid()) if "bray.envs.timing" in name]


def test_what_is_remembered_may_be_anything(monkeypatch, tmp_path):
    file = tmp_path / "steps.json"
    for text in ("", "[1]", '{"a": 3, "b": [1], "c": ["x", true], "d": [-1, false]}', "\x00"):
        file.write_text(text)
        assert settling.read_steps(file) == {}
    settling.write_steps(file, {"e": [0.3, False]})
    assert settling.read_steps(file) == {"e": [0.3, False]}


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_gpu_that_goes_away_ends_the_run_with_one_line_and_its_last_checkpoint(tmp_path, caplog):
    exp = bray.Experiment("PPO", "CartPole-v1", path=tmp_path / "run", use_preset=False, **SHORT, checkpoint_freq=1)
    rows = exp.train({"training_iteration": 5})
    next(rows)
    next(rows)
    saved = exp.run.directory.steps()

    def gone(*_):
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be ...")

    exp.training.learner.update = gone
    exp.training.learner.device = torch.device("cuda")
    with pytest.raises(gpus.GpuLost, match=r"^the GPU \(cuda\) does not answer any more: CUDA error: unspecified"):
        list(rows)
    assert exp.run.directory.steps() == saved
    exp.close()
    assert bray.Experiment.load(tmp_path / "run").config["run"].device == "cpu"


def test_a_gpu_without_memory_names_its_users(monkeypatch):
    full = Gpu("NVIDIA H200", 0, 0.1, ("python (process 7, 138.0 GiB)",))
    monkeypatch.setattr(gpus, "visible_gpus", lambda: [full])
    with pytest.raises(gpus.GpuFull, match=r"cuda has no memory left: NVIDIA H200 has 0.1 GiB free, held by python"):
        with gpus.told_clearly(torch.device("cuda")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")


def test_wrong_words_are_refused():
    with pytest.raises(ConfigError, match=r"num_workers.*'auto' or a whole number >= 0, got 'many'"):
        bray.Experiment("PPO", "CartPole-v1", num_workers="many")
    with pytest.raises(ConfigError, match="inference"):
        bray.Experiment("PPO", "CartPole-v1", inference="both")
    with pytest.raises(ConfigError, match=r"run\.device: expected cpu, cuda, cuda:N or auto"):
        _ = bray.Experiment("PPO", "CartPole-v1", device="gpu").training


def test_a_policy_trained_on_a_gpu_acts_without_one(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    exp = bray.Experiment("PPO", "CartPole-v1", path=tmp_path / "run", use_preset=False, **SHORT)
    list(exp.train({"training_iteration": 1}))
    exp.close()
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    assert bray.Experiment.load(tmp_path / "run").evaluate(1)["eval/episodes"] == 1
    with pytest.raises(ConfigError, match="--device cpu, or auto"):
        bray.Experiment.resume(tmp_path / "run")
    resumed = bray.Experiment.resume(tmp_path / "run", device="auto")
    assert resumed.config["run"].device == "cpu"
    resumed.close()


# --- bray calibrate ---------------------------------------------------------------------------------------------------


def test_calibrate_measures_writes_and_is_gone_by(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    typed = ["num_envs=2", *(f"{k}={v}" for k, v in SHORT.items())]
    a_machine(monkeypatch, cores=2)
    assert main(["calibrate", "CartPole-v1", "--seconds", "0.001", *typed]) == 0
    told = capsys.readouterr().out
    assert "2 environments in this process" in told
    assert "2 workers with 1 environment each" in told
    file = settling.machine_file("PPO", "CartPole-v1")
    assert file.read_text().startswith("# bray calibrate CartPole-v1 --run PPO: ")
    file.write_text("config: {device: cpu, num_workers: 2, num_envs: 1, inference: worker, threads: 2}")
    exp = bray.Experiment("PPO", "CartPole-v1", num_envs=2)
    exp.settle()
    assert (exp.config["run"].num_workers, exp.config["env"].num_envs, exp.config["run"].threads) == (2, 1, 2)
    assert f"as measured, {file}" in str(exp.choice)
    other = bray.Experiment("PPO", "CartPole-v1", num_envs=6)  # not what was measured
    other.settle()
    assert (other.config["run"].num_workers, other.config["env"].num_envs) == (0, 6)
    file.write_text("config: {device: cpu}")
    with pytest.raises(ConfigError, match="not what `bray calibrate` writes"):
        bray.Experiment("PPO", "CartPole-v1", num_envs=2).settle()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["CartPole-v1", "--seconds", "0"], "seconds"),
        (["CartPole-v1", "--run", "PPOO"], "Did you mean 'PPO'"),
        (["CartPoll-v1"], "CartPoll-v1"),
        (["CartPole-v1", "num_workers=2"], "bray calibrate tries what auto chooses, and run.num_workers is set"),
        (["CartPole-v1", "--out", "nowhere/at/all.yaml"], "there is no directory"),
    ],
)
def test_calibrate_refuses_nonsense(typed, said, capsys):
    assert main(["calibrate", *typed]) == 2
    assert said in capsys.readouterr().err
