"""`bray submit`: a job for a scheduler as a file, and the command inside of it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bray.cli.options import COMMANDS, Submit
from bray.cli.show import facts
from bray.cluster.job import AUTH_MODE, AUTH_TOKEN, HEAD, NODES, RANK, find_task, run_task
from bray.errors import ConfigError, did_you_mean

_STARTS = {"slurm": ["sbatch"], "k8s": ["kubectl", "apply", "-f"], "local": ["bash"]}
_SUFFIX = {"slurm": "sbatch", "k8s": "yaml", "local": "sh"}
_CLUSTERS = ("train", "tune", "launch")  # commands that place processes on several nodes
_DRAWN = "od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'"
"""A secret of the job: who has it may run code on its nodes."""
_RUNS = "/home/bray/runs"
"""Where the image of docker/train.Dockerfile works, and what it mounts."""


def submit(options: Submit) -> int:
    """Write the file, and hand it to the scheduler if asked to; inside of a job, be one of its tasks."""
    words = options.words
    if words[0] not in COMMANDS:
        raise ConfigError(f"unknown command {words[0]!r} after `--`.{did_you_mean(words[0], COMMANDS)}")
    if options.kind == "here":
        command = [sys.executable, "-m", "bray", *words]
        return run_task(find_task(os.environ), command, os.environ)
    if options.nodes > 1 and not (words[0] in _CLUSTERS and ("ray" in words or "--cluster=ray" in words)):
        raise ConfigError(
            f"--nodes {options.nodes} are one Ray cluster, which `bray {words[0]}` is not told to use: add --cluster "
            f"ray to it (commands that can: {', '.join(_CLUSTERS)})"
        )
    if options.kind == "local" and options.nodes > 1:
        raise ConfigError(f"--nodes {options.nodes}: this machine is one; leave it out, a run uses all of it")
    name = options.name or f"bray-{words[0]}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise ConfigError(f"--name {name}: expected small letters, digits and dashes, as in bray-train")
    text = {"slurm": _slurm, "k8s": _kubernetes, "local": _local}[options.kind](options, name)
    out = options.out or Path(f"{name}.{_SUFFIX[options.kind]}")
    out.touch(0o600)  # it may hold a secret
    out.write_text(text)
    start = [*_STARTS[options.kind], str(out)]
    facts([("written to", out), ("start it with", shlex.join(start))])
    if not options.start:
        return 0
    if shutil.which(start[0]) is None:
        raise ConfigError(f"{start[0]} is not here: copy {out} to where it is, and run {shlex.join(start)}")
    return subprocess.call(start)


def _task(options: Submit, python: str) -> str:
    """The words of one task."""
    return shlex.join([python, "-m", "bray", "submit", "here", "--", *options.words])


def _slurm(options: Submit, name: str) -> str:
    asks = [f"--job-name={name}", f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1"]
    asks += [f"--cpus-per-task={options.cpus}", f"--output={name}-%j.log"]
    asks += [f"--gres=gpu:{options.gpus}"] if options.gpus else []
    asks += [f"--mem={options.memory}"] if options.memory else []
    asks += [f"--time={options.time}"] if options.time else []
    asks += [f"--partition={options.partition}"] if options.partition else []
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {ask}" for ask in asks),
            "set -euo pipefail",
            f"cd {shlex.quote(os.getcwd())}",
            *([f"export {AUTH_MODE}=token {AUTH_TOKEN}=$({_DRAWN})"] if options.nodes > 1 else []),
            f"srun --kill-on-bad-exit=1 --cpus-per-task={options.cpus} {_task(options, sys.executable)}",
            "",
        ]
    )


def _local(options: Submit, name: str) -> str:
    return f"#!/bin/bash\nset -euo pipefail\ncd {shlex.quote(os.getcwd())}\nexec {_task(options, sys.executable)}\n"


def _kubernetes(options: Submit, name: str) -> str:
    """A Service, by which tasks find the first one, and a Job with a pod for each; of several also a secret, by which
    their Ray knows them."""
    limits = {"cpu": str(options.cpus), **({"memory": options.memory} if options.memory else {})}
    limits |= {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container: dict[str, Any] = {
        "name": "bray",
        "image": options.image,
        "command": ["python", "-m", "bray", "submit", "here", "--", *options.words],
        "env": [
            {"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": NODES, "value": str(options.nodes)},
            {"name": HEAD, "value": f"{name}-0.{name}" if options.nodes > 1 else "localhost"},
        ],
        "resources": {"requests": limits, "limits": limits},
    }
    if options.nodes > 1:
        of_secret = {"secretKeyRef": {"name": name, "key": "token"}}
        container["env"] += [{"name": AUTH_MODE, "value": "token"}, {"name": AUTH_TOKEN, "valueFrom": of_secret}]
    pod: dict[str, Any] = {"restartPolicy": "Never", "subdomain": name, "containers": [container]}
    if options.volume:
        container["volumeMounts"] = [{"name": "runs", "mountPath": _RUNS}]
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}}]
    labels = {"app": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": options.nodes,
            "parallelism": options.nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    if options.time:
        job["spec"]["activeDeadlineSeconds"] = _seconds(options.time)
    parts = [service, job]
    if options.nodes > 1:
        token = {"type": "Opaque", "stringData": {"token": secrets.token_hex(32)}}
        parts.insert(0, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": labels}, **token})
    return "---\n".join(yaml.dump(part, Dumper=_InFull, sort_keys=False) for part in parts)


class _InFull(yaml.SafeDumper):
    """What stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _seconds(text: str) -> int:
    """Of `HH:MM:SS`, as SLURM takes it."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        raise ConfigError(f"--time {text}: expected HH:MM:SS, or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds
