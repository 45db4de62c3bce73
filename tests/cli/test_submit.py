"""Jobs for schedulers: what is written, what a task finds in its variables, and a job of a real SLURM."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from bray.cli.main import main
from bray.cluster.job import JobTask, find_task, first_host, own_address
from bray.errors import ConfigError

ROOT = Path(__file__).parents[2]
TRAIN = ["--", "train", "--run", "PPO", "--env", "CartPole-v1"]
SLURM = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "gpu[07-09],login"}
JOB = {"BRAY_RANK": "0", "BRAY_NODES": "2", "BRAY_HEAD": "bray-train-0.bray-train"}


def written(tmp_path, monkeypatch, capsys, *words):
    monkeypatch.chdir(tmp_path)
    assert main(["submit", *words]) == 0
    path = Path(capsys.readouterr().out.split()[2])
    return path.name, path.read_text()


def test_a_script_for_slurm(tmp_path, monkeypatch, capsys):
    asks = ["--nodes", "2", "--cpus", "4", "--gpus", "1", "--time", "04:00:00", "--partition", "gpu", "--memory", "16G"]
    name, text = written(tmp_path, monkeypatch, capsys, "slurm", *asks, *TRAIN, "--cluster", "ray", "x y=1")
    assert name == "bray-train.sbatch"
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--gres=gpu:1",
        "--time=04:00:00",
        "--partition=gpu",
        "--mem=16G",
    }
    assert lines[-1].endswith("submit here -- train --run PPO --env CartPole-v1 --cluster ray 'x y=1'")
    (drawn,) = (line for line in lines if line.startswith("export "))
    shown = subprocess.run(["bash", "-c", f"{drawn}; echo $RAY_AUTH_TOKEN"], capture_output=True, text=True, check=True)
    assert len(bytes.fromhex(shown.stdout.strip())) == 32
    assert subprocess.run(["bash", "-n", str(tmp_path / name)], check=False).returncode == 0


def test_files_for_kubernetes_fit_its_schema(tmp_path, monkeypatch, capsys):
    asks = [
        "--nodes",
        "2",
        "--cpus",
        "4",
        "--gpus",
        "1",
        "--memory",
        "16Gi",
        "--time",
        "1-00:00:10",
        "--volume",
        "runs",
    ]
    name, text = written(tmp_path, monkeypatch, capsys, "k8s", *asks, "--name", "mine", *TRAIN, "--cluster=ray")
    assert name == "mine.yaml"
    assert "&id" not in text
    schemas = json.loads((Path(__file__).parents[1] / "files" / "kubernetes.schema.json").read_text())
    parts = list(yaml.safe_load_all(text))
    assert [part["kind"] for part in parts] == ["Secret", "Service", "Job"]
    for part in parts:
        jsonschema.validate(part, schemas[part["kind"]])
    secret, service, job = parts
    assert len(secret["stringData"]["token"]) == 64
    assert (tmp_path / name).stat().st_mode & 0o077 == 0
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == "mine"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert job["spec"]["activeDeadlineSeconds"] == 86410
    (container,) = pod["spec"]["containers"]
    environ = {e["name"]: e.get("value") for e in container["env"]}
    assert environ["BRAY_NODES"] == "2"
    assert environ["BRAY_HEAD"] == "mine-0.mine"
    references = {e["name"]: e["valueFrom"] for e in container["env"] if "valueFrom" in e}
    assert references["RAY_AUTH_TOKEN"]["secretKeyRef"] == {"name": "mine", "key": "token"}
    assert "job-completion-index" in references["BRAY_RANK"]["fieldRef"]["fieldPath"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}


def test_the_schema_notices_mistakes(tmp_path, monkeypatch, capsys):
    _, text = written(tmp_path, monkeypatch, capsys, "k8s", *TRAIN)
    schemas = json.loads((Path(__file__).parents[1] / "files" / "kubernetes.schema.json").read_text())
    job = list(yaml.safe_load_all(text))[1]
    job["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schemas["Job"])


def test_a_job_of_this_machine_runs_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]))
    assert main(["submit", "local", "--start", "--", "gateway", "a:1"]) == 0
    assert "server" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["slurm", "--nodes", "2", *TRAIN], "--nodes 2 are one Ray cluster, which `bray train` is not told to use"),
        (["slurm", "--nodes", "2", "--", "eval", "x"], "commands that can: train, tune, launch"),
        (["slurm", "--", "trian"], "unknown command 'trian' after `--`. Did you mean 'train'?"),
        (["slrum", *TRAIN], "'slrum' is not one of"),
        (["slurm"], "missing argument"),
        (["local", "--nodes", "2", *TRAIN, "--cluster", "ray"], "--nodes 2: this machine is one"),
        (["k8s", "--name", "My_Job", *TRAIN], "--name My_Job: expected small letters, digits and dashes"),
        (["k8s", "--time", "4h", *TRAIN], "--time 4h: expected HH:MM:SS"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["submit", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_scheduler_that_is_not_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "k8s", "--start", *TRAIN]) == 2
    assert "kubectl is not here: copy bray-train.yaml to where it is" in capsys.readouterr().err


# --- inside of a job --------------------------------------------------------------------------------------------------


def test_what_a_task_is():
    assert find_task({}) == JobTask(0, 1, "127.0.0.1", 20_000)
    assert find_task(SLURM) == JobTask(1, 3, "gpu07", 20_012)
    assert find_task({**SLURM, "BRAY_PORT": "7001"}).address == "gpu07:7001"
    assert find_task(JOB) == JobTask(0, 2, "bray-train-0.bray-train", 20_000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-7,9],m", "n3"),
        ("n[03,09]", "n03"),
        ("r[1-2]n[5-6],x", "r1n5"),
        ("a-b[1]", "a-b1"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**SLURM, "SLURM_PROCID": ""}, "this is a task of SLURM, and SLURM_PROCID is not set: start it with srun"),
        ({"SLURM_JOB_ID": "1"}, "SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_NODELIST is not set"),
        (
            {"BRAY_RANK": "1"},
            "a task of a job, and BRAY_NODES, BRAY_HEAD is not set: start it as `bray submit`",
        ),
        ({**JOB, "BRAY_RANK": "2"}, "BRAY_RANK=2 is not among the 2 tasks of BRAY_NODES"),
        ({**JOB, "BRAY_NODES": "two"}, "BRAY_NODES: expected a whole number, got 'two'"),
    ],
)
def test_a_variable_that_is_missing_or_wrong(environ, says):
    with pytest.raises(ConfigError) as e:
        find_task(environ)
    assert says in str(e.value)


def test_a_task_without_its_variables_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert main(["submit", "here", *TRAIN]) == 2
    assert capsys.readouterr().err.startswith("error: this is a task of SLURM, and SLURM_PROCID")


def test_a_port_that_is_taken(monkeypatch, capsys):
    with socket.create_server(("", 0)) as taken:
        for name, value in {**JOB, "BRAY_HEAD": "127.0.0.1", "BRAY_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        assert main(["submit", "here", *TRAIN]) == 2
    assert "is taken: set BRAY_PORT for all tasks of the job" in capsys.readouterr().err


# --- a real one -------------------------------------------------------------------------------------------------------

CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A SLURM of this machine alone, as Debian's packages slurm-wlm and munge have it."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = {name: shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd")}
    if not all(programs.values()) or os.getuid() != 0:
        pytest.skip("needs root and the packages slurm-wlm and munge")
    folder = Path("/run") / f"bray-{os.getpid()}"  # what munge trusts: no directory that others write to
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=free_ports(2)))
    (folder / "cgroup.conf").write_text("")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munge = [f"--{what}-file={folder}/{what}" for what in ("key", "pid", "log", "seed")]
    munge += ["--force", "--foreground", f"--socket={folder}/munge.socket"]
    running = []
    for name, words in (("munged", munge), ("slurmctld", ["-D"]), ("slurmd", ["-D", "-N", host])):
        with open(folder / f"{name}.out", "wb") as out:
            running.append(subprocess.Popen([programs[name], *words], stdout=out, stderr=out))
        time.sleep(1.0)
    try:
        yield folder
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(20)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_slurm_trains(slurm, tmp_path, monkeypatch, capfd):
    """sbatch, srun and the variables of a real job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tiny = ["rollout_length=16", "num_envs=2", "minibatches=1", "epochs=1", "record=false", "--no-preset", "--quiet"]
    words = ["--time", "00:05:00", *TRAIN, "--steps", "100", "--project", str(tmp_path), "--trial", "t", *tiny]
    assert main(["submit", "slurm", "--start", *words]) == 0
    said = capfd.readouterr().out
    assert "Submitted batch job 1" in said
    end = time.monotonic() + 240
    while time.monotonic() < end:
        left = subprocess.run(["squeue", "-h", "-o", "%T"], capture_output=True, text=True, check=True).stdout.split()
        if not left:
            break
        time.sleep(0.5)
    log = (tmp_path / "bray-train-1.log").read_text()
    assert f"run directory: {tmp_path / 't'}" in log, log
    assert (tmp_path / "t" / "checkpoints" / "latest").exists()
    # the variables are srun's: without it, one line says so
    bare = ["sbatch", "-o", "bare.log", "--wait", "--wrap", f"{sys.executable} -m bray submit here -- algos"]
    assert subprocess.run(bare, check=False, timeout=120).returncode != 0
    assert "SLURM_NTASKS is not set: start it with srun" in (tmp_path / "bare.log").read_text()


@pytest.mark.slow
def test_two_tasks_are_one_ray_cluster(tmp_path):
    """The second one is there first, and ends with the first one."""
    (port,) = free_ports(1)
    job = {"BRAY_NODES": "2", "BRAY_HEAD": own_address(), "BRAY_PORT": str(port), "PYTHONPATH": str(ROOT)}
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    alike = {"RAY_worker_niceness": "0"}  # else its processes give way to whatever else runs
    environ = {**os.environ, **job, **secret, **alike}
    tiny = ["num_envs=2", "rollout_length=16", "minibatches=1", "epochs=1", "--no-preset", "--quiet"]
    words = [*TRAIN, "--cluster", "ray", "--num-workers", "2", *tiny, "--steps", "200", "--project", str(tmp_path)]
    command = [sys.executable, "-m", "bray", "submit", "here", *words, "--trial", "t"]
    second = subprocess.Popen(command, env={**environ, "BRAY_RANK": "1"}, cwd=tmp_path)
    time.sleep(2.0)
    first = subprocess.run(command, env={**environ, "BRAY_RANK": "0"}, cwd=tmp_path, timeout=240, check=False)
    assert first.returncode == 0
    assert (tmp_path / "t" / "checkpoints" / "latest").exists()
    assert second.wait(90) == 0
