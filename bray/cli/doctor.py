"""`bray doctor`: can this machine and this installation do the work, and how fast? Fit to be pasted into a bug
report."""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from packaging.requirements import InvalidRequirement, Requirement
from rich.text import Text

from bray._version import __version__
from bray.cli.doctor_run import examine
from bray.cli.options import Doctor
from bray.cli.show import say
from bray.errors import how_to_install
from bray.inference.cpu import this_cpu
from bray.train.machine import cores

SMOKE_SECONDS = 2.0
"""How long the trial training of `bray doctor` runs."""
TRIED = ("vectors", "pictures")
"""Observations that the settings which a run chooses by rule are tried on."""
_CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `ok` is None where there is nothing to judge."""

    name: str
    value: str
    ok: bool | None = None
    fix: str = ""


def doctor(options: Doctor) -> int:
    """Run all checks; 0 when nothing is to be fixed."""
    as_json = options.json
    if options.path is not None:
        return examine(options.path, as_json)
    checks: list[Check] = []
    for look in CHECKS:
        for check in _look(look):
            check = Check(check.name, _shareable(check.value), check.ok, _shareable(check.fix))
            checks.append(check)
            if not as_json:
                mark, style = {True: ("ok", "green"), False: ("FIX", "bold red"), None: ("", "")}[check.ok]
                say(Text.assemble((f"{mark:<4}", style), (f"{check.name:<18}", "dim"), check.value))
    wrong = [c for c in checks if c.ok is False]
    if as_json:
        report = {"bray": __version__, "ok": not wrong, "checks": [asdict(c) for c in checks]}
        print(json.dumps(report, indent=2))
        return int(bool(wrong))
    say()
    if not wrong:
        say("all good", "bold green")
        return 0
    say(f"{len(wrong)} to fix:", "bold red")
    for check in wrong:
        say(f"  {check.name}: {check.fix}")
    return 1


def _look(look: Callable[[], list[Check]]) -> list[Check]:
    """A check that raises is a finding, not the end of the report."""
    try:
        return look()
    except Exception as e:
        name = look.__name__.strip("_")
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return [Check(name, f"failed: {type(e).__name__}: {e} ({where})", False, f"{type(e).__name__}: {e}")]


def _shareable(text: str) -> str:
    """Without the home directory, the working directory and the user's name."""
    for path, short in ((str(Path.cwd()), "."), (str(Path.home()), "~"), (tempfile.gettempdir(), "<tmp>")):
        if len(path) > 1:
            text = text.replace(path, short)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        return text
    return re.sub(rf"\b{re.escape(user)}\b", "<user>", text) if len(user) > 2 and user != "root" else text


# --- the machine ------------------------------------------------------------------------------------------------------


def _python() -> list[Check]:
    ok = sys.version_info >= (3, 11)
    return [
        Check("bray", __version__),
        Check(
            "python",
            f"{platform.python_implementation()} {platform.python_version()}",
            ok,
            "Bray needs Python 3.11 or newer",
        ),
        Check("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]


def _cpu() -> list[Check]:
    name, features = this_cpu()
    return [
        Check("cpu", name),
        Check("cpu features", ", ".join(features) or "none of those Bray knows"),
        Check("cores", f"{cores()} usable of {os.cpu_count()}"),
    ]


def _memory() -> list[Check]:
    try:
        info = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
        total, free = int(info["MemTotal"]) / 2**20, int(info["MemAvailable"]) / 2**20
    except (OSError, KeyError):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        return [Check("memory", f"{pages:.1f} GiB")]
    return [Check("memory", f"{total:.1f} GiB, {free:.1f} GiB free", free > 0.5, "less than half a GiB is free")]


# --- the installation -------------------------------------------------------------------------------------------------


DISTRIBUTION = "bray-rl"
"""What is installed: `bray` on the package index is other software."""
HALVES = {"train": "torch", "serve": "httptools"}
"""The two halves of an installation, and the package that tells whether one was wanted."""


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _packages() -> list[Check]:
    """Every dependency against what Bray asks for; in a checkout, the versions it was tested with are named beside
    others."""
    tested = _tested_versions()
    out: dict[str, Check] = {}
    extras = ["", *[half for half, package in HALVES.items() if _has(package)]]
    for line in _requirements():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            out.setdefault(requirement.name, _package(requirement, tested))
    for half in HALVES:
        if half not in extras:
            out[half] = Check(half, f"not installed: {how_to_install(half)}")
    return list(out.values())


def _requirements() -> list[str]:
    """Of the installation; of the checkout, where nobody has installed it."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        if not (file := _CHECKOUT / "pyproject.toml").is_file():
            return []
    project = tomllib.loads(file.read_text())["project"]
    lines = list(project["dependencies"])
    for extra, needed in project["optional-dependencies"].items():
        for name, _, marker in (line.partition(";") for line in needed):
            lines.append(f"{name}; extra == '{extra}'" + (f" and ({marker})" if marker else ""))
    return lines


def _package(requirement: Requirement, tested: dict[str, Requirement]) -> Check:
    name = requirement.name
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", False, f"pip install '{requirement.name}{requirement.specifier}'")
    fits = requirement.specifier.contains(version, prereleases=True)
    pin = tested.get(_canonical(name))
    other = pin is not None and not pin.specifier.contains(version, prereleases=True)
    value = f"{version}" + (f" (tested with {str(pin.specifier).lstrip('=')})" if pin is not None and other else "")
    return Check(name, value, fits, f"{version} is too old: pip install '{name}{requirement.specifier}'")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tested_versions() -> dict[str, Requirement]:
    path = _CHECKOUT / "constraints.txt"
    out = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        out[_canonical(requirement.name)] = requirement
    return out


def _torch() -> list[Check]:
    if not _has("torch"):
        return []
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    cuda = f"{', '.join(gpus)} (CUDA {torch.version.cuda})" if gpus else "none (training runs on the CPU)"
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()} kernels"
    return [Check("torch uses", threads), Check("gpu", cuda)]


def _numba() -> list[Check]:
    if not _has("numba"):
        return []
    import numba

    @numba.njit
    def dot(a, b):
        total = 0.0
        for i in range(len(a)):
            total += a[i] * b[i]
        return total

    x = np.arange(10.0)
    ok = bool(dot(x, x) == 285.0)
    return [
        Check("numba works", "compiled a loop" if ok else "compiled a loop wrongly", ok, "reinstall numba and llvmlite")
    ]


def _ffmpeg() -> list[Check]:
    if not _has("torch"):
        return []
    from bray.video import write_video

    frames = np.zeros((3, 32, 32, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        size = write_video(frames, Path(folder) / "test.mp4").stat().st_size
    return [
        Check(
            "ffmpeg works", f"wrote a video of {size:,} bytes", size > 0, "pip install --force-reinstall imageio-ffmpeg"
        )
    ]


def _disk() -> list[Check]:
    try:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".bray-doctor-"):
            pass
    except OSError as e:
        return [
            Check(
                "writing",
                f"not here: {e.strerror}",
                False,
                "start Bray in a directory you may write to, or use --project",
            )
        ]
    room = os.statvfs(".")
    free = room.f_bavail * room.f_frsize / 2**30
    return [Check("writing", f"works here, {free:.1f} GiB free", free > 0.2, "the disk is almost full")]


def _training() -> list[Check]:
    """PPO on CartPole for two seconds: everything a run needs, and a first number."""
    if not _has("torch"):
        return []
    from bray.experiment import Experiment

    with tempfile.TemporaryDirectory() as folder:
        exp = Experiment("PPO", "CartPole-v1", path=Path(folder) / "run", stop={"time_total_s": SMOKE_SECONDS})
        rates = [row["env_steps_per_second"] for row in exp.train()]
        saved = (exp.path / "checkpoints" / "latest").exists()
        exp.close()
    rate = float(np.median(rates))
    return [
        Check("trains", f"PPO on CartPole-v1: {rate:,.0f} steps/s, median of {len(rates)} iterations", True),
        Check("saves", "wrote a checkpoint and a curve", saved, "no checkpoint was written"),
    ]


def _choices() -> list[Check]:
    """What a run chooses by rule (`record`, `threads`), and what the other choices would cost here."""
    if not _has("torch"):
        return []
    from bray.cli.choices import Pictures, time_choices

    checks = []
    for name, env in (("vectors", "CartPole-v1"), ("pictures", Pictures)):
        if name not in TRIED:
            continue
        ways = time_choices(env, SMOKE_SECONDS / 4)
        chosen, best = ways[0], min(ways, key=lambda way: way.seconds)
        slow = f". Faster here: {best.typed}" if chosen.seconds > 1.3 * best.seconds else ""
        checks.append(Check(f"update, {name}", "; ".join(map(str, ways)) + slow))
    return checks


def _serving() -> list[Check]:
    """A game against a service without an agent: sockets, the protocol, the client."""
    if not _has("httptools"):
        return []
    from bray.client import Client
    from bray.fake.actor import FakeActor
    from bray.serving.background import BackgroundServer
    from bray.serving.config import ServiceConfig

    with BackgroundServer(FakeActor, ServiceConfig(port=0, admin_port=0)) as server:
        with Client(port=server.port, timeout=10) as client:
            client.start()
            times = []
            for _ in range(200):
                began = time.perf_counter()
                client.tick(b"x")
                times.append(time.perf_counter() - began)
            client.end()
    return [Check("serves", f"a tick over HTTP takes {1e6 * float(np.median(times)):,.0f} us", True)]


CHECKS = (_python, _cpu, _memory, _packages, _torch, _numba, _ffmpeg, _disk, _training, _choices, _serving)
