"""Settings that say `auto` become those that a run has: facts are gathered, `fit` chooses, and the choice is written
into the config. Done once, before anything of the run is made.

What has to be timed is remembered for the machine (`$XDG_STATE_HOME/bray/steps.json`), so that another run of the same
seed chooses the same. A choice that was measured, by `bray calibrate`, comes before the rule's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bray.algos import make_experience
from bray.config import Resolved, load_yaml, to_plain
from bray.data.experience import Replay
from bray.data.rollouts import Rollouts
from bray.envs.build import Builder, of_tensors
from bray.envs.config import EnvConfig
from bray.envs.native import why_not_native
from bray.envs.process import Lost
from bray.envs.registry import env_name
from bray.envs.timing import time_step
from bray.errors import BrayError, ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.nn.catalog import example_obs
from bray.rundir.trust import user_state
from bray.spec import EnvSpec
from bray.train.acting import initial_state
from bray.train.device import is_picture
from bray.train.fit import AUTO, WORKER_CORES, Choice, Facts, Gpu, Work, banded, fit
from bray.train.gpu import visible_gpus
from bray.train.machine import cores
from bray.train.setup import is_object, on_ray

logger = logging.getLogger("bray")

_KEYS = ("device", "num_workers", "inference")


def settle(
    algo: Any, config: Resolved, spec_of: Callable[[], EnvSpec], plays: bool = True
) -> tuple[Resolved, Choice | None]:
    """The config with a value for each `auto`, and what was chosen; None where nothing was left to choose. `plays`:
    the run has an environment, and not live games or files."""
    run, env = config["run"], config["env"]
    given = {key: value for key in _KEYS if (value := getattr(run, key)) != AUTO}
    whence, said = (config.provenance.get(key, "").partition(":")[0] for key in ("env.num_envs", "run.num_workers"))
    if plays and run.workers > 1 and env.num_envs > 1 and whence.startswith("preset ") and said != whence:
        logger.warning(
            "num_workers=%d multiplies num_envs=%d of the %s: %s environments. Leave num_workers out to deal out those "
            "%d, or give num_envs too",
            run.workers,
            env.num_envs,
            whence,
            f"{run.workers * env.num_envs:,}",
            env.num_envs,
        )
    if len(given) == len(_KEYS):
        return config, None
    timed: dict[str, Any] = {}
    if plays and not given and (calibrated := _calibrated(run.algorithm, env)) is not None:
        choice = calibrated
    else:
        facts, timed = look(algo, config, spec_of, given, plays)
        choice = fit(facts)
    chosen = {key: getattr(choice, key) for key in _KEYS if key not in given}
    sections, places = dict(config.sections), dict(config.provenance)
    if choice.lockstep:
        chosen["lockstep"] = True
    changed: dict[str, dict[str, Any]] = {"run": chosen, "env": timed}
    if choice.num_workers and "num_workers" in chosen:
        changed["env"] = timed | {"num_envs": choice.num_envs}
        if getattr(config["algo"], "batch_envs", 0) is None:  # else a batch would be what one worker has
            changed["algo"] = {"batch_envs": env.num_envs}
    if choice.num_processes and env.num_processes is None:
        changed["env"] = changed["env"] | {"num_processes": choice.num_processes}
    if choice.threads is not None and not isinstance(run.threads, int):
        changed["run"] = chosen | {"threads": choice.threads}
    for section, values in changed.items():
        sections[section] = replace(sections[section], **values)
        places |= {f"{section}.{key}": AUTO for key in values}
    return Resolved(sections, places), choice


def look(
    algo: Any,
    config: Resolved,
    spec_of: Callable[[], EnvSpec],
    given: dict[str, Any],
    plays: bool = True,
    whole: bool = False,
) -> tuple[Facts, dict[str, Any]]:
    """Facts, as far as the choice can depend on them (or the `whole` of them); and what was found of the environment by
    timing it."""
    env, n = config["env"], cores()
    gpu, no_gpu = find_gpu() if "device" not in given else (None, "")
    step_ms, sleeps, timed = _step_of(env) if plays and "num_workers" not in given else (0.0, False, {})
    facts = Facts(n, env.num_envs, gpu=gpu, no_gpu=no_gpu, step_ms=step_ms, sleeps=sleeps, given=given)
    on_gpu = str(given.get("device", "")).startswith("cuda")
    if not whole and gpu is None and not on_gpu and (n < WORKER_CORES or env.num_envs == 1 or not plays):
        return replace(facts, plays="alone"), timed
    spec = spec_of()
    if spec.sides:  # games of several agents are played in one process
        spec, plays = next(iter(spec.sides.values())).spec, False
    source = Builder.of(env).source if plays else None
    facts = replace(
        facts,
        pictures=is_picture(spec),
        plays=_way_to_play(algo, config, spec) if plays else "alone",
        tensors=source is not None and (of_tensors(source) or env.vector == "device"),
        splits=_why_together(config),
    )
    work, draws = _work_of(algo, config, spec)
    return replace(facts, work=work, draws=draws), timed


def find_gpu() -> tuple[Gpu | None, str]:
    """The first one with room, else the first; or why none can be used, where one is here."""
    here = visible_gpus()
    if not here and torch.version.cuda is None:
        return None, ""
    if not torch.cuda.is_available():
        why = "PyTorch is built without CUDA" if torch.version.cuda is None else "CUDA finds no driver for it"
        return None, f"{here[0].name} is here, but {why}" if here else ""
    here = here or [Gpu(torch.cuda.get_device_name(0))]
    return next((gpu for gpu in here if not gpu.full), here[0]), ""


# --- the algorithm ----------------------------------------------------------------------------------------------------


def _way_to_play(algo: Any, config: Resolved, spec: EnvSpec) -> Any:
    try:
        experience = make_experience(algo, config["algo"], spec, config["model"])
    except BrayError:
        return "alone"  # making the training says what is wrong
    if not isinstance(experience, (Rollouts, Replay)):
        return "alone"
    if isinstance(experience, Replay):
        return "asynchronous" if getattr(algo, "PLAYS_ON", False) else "replay"
    return "asynchronous" if experience.asynchronous else "rounds"


def _why_together(config: Resolved) -> str:
    """Why the environments stay in one process; empty where they can be dealt out."""
    run, env = config["run"], config["env"]
    for why, so in (
        ("an environment given as an object is there only once", is_object(env.id)),
        ("env.per_env names each environment", bool(env.per_env)),
        ("env.wait_num counts those of one process", env.wait_num is not None),
        ("callbacks see the episodes of one process", bool(run.callbacks)),
        ("workers of a Ray cluster are asked for by number", on_ray(run)),
    ):
        if so:
            return why
    return ""


def _work_of(algo: Any, config: Resolved, spec: EnvSpec) -> tuple[Work, bool]:
    """What its network computes, counted in a forward of one row; and whether that takes random numbers."""
    c, total = config["algo"], config["env"].num_envs
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = algo.make_model(c, spec, config["model"])
            forward = _flops(model, spec)
    except Exception as e:  # making the training says what is wrong
        logger.debug("the network could not be looked at: %s", e)
        return Work(), False
    learnt = max(forward, 2.0 * sum(p.numel() for p in model.parameters()))  # critics do not act
    if length := getattr(c, "rollout_length", None):
        rows, steps = getattr(c, "epochs", 1), getattr(c, "epochs", 1) * getattr(c, "minibatches", 1) / (length * total)
    else:
        steps = getattr(c, "updates", 1) / max(1, getattr(c, "train_every", 1) or 1)
        rows = steps * (getattr(c, "batch_size", None) or 32) * (getattr(c, "sequence_length", None) or 1)
    return Work(forward, learnt, float(rows), float(steps)), bool(getattr(model, "draws", None))


def _flops(model: torch.nn.Module, spec: EnvSpec) -> float:
    from torch.utils.flop_counter import FlopCounterMode  # it takes a tenth of a second to import

    obs = example_obs(spec.observation, 1)
    memory = [torch.utils._pytree.tree_map(torch.as_tensor, initial_state(model)(1))] if is_recurrent(model) else []
    with FlopCounterMode(display=False) as counted:
        model(obs, *memory)
    return float(counted.get_total_flops())


# --- the environment --------------------------------------------------------------------------------------------------


def _step_of(env: EnvConfig) -> tuple[float, bool, dict[str, Any]]:
    """Milliseconds of a step, whether it waits more than it computes, and what of that is new: nothing where it is
    declared, or where nothing could follow from it."""
    source = Builder.of(env).source
    declared = env.step_ms if env.step_ms is not None else source.step_ms
    alone = env.num_envs == 1 or cores() == 1 or source.single
    alone = alone or env.vector != "auto" or env.step_timeout is not None or bool(env.per_env)
    if declared is not None or alone or of_tensors(source) or why_not_native(env, source, None) is None:
        return declared or 0.0, False, {}
    file, key = steps_file(), _key(env)
    known = read_steps(file)
    if key not in known:
        try:
            found = time_steps(env)
        except Lost as e:
            logger.warning(
                "%s %s while a step was timed: its environments play in processes of their own (vector=subprocess)",
                env_name(env.id),
                e,
            )
            return 0.0, False, {"vector": "subprocess"}
        if found is None:
            return 0.0, False, {}
        known[key] = found
        if "__main__" not in env_name(env.id) and "<" not in env_name(env.id):  # names that mean other things elsewhere
            write_steps(file, known)
    step_ms, sleeps = known[key]
    return step_ms, sleeps, {"step_ms": step_ms}


def time_steps(env: EnvConfig) -> list[Any] | None:
    """[milliseconds of a step in bands, whether it sleeps] of one environment, in a process of its own; None where it
    does not run: the training says why. Raises `Lost` where it hung, or ended that process."""
    try:
        found = time_step(Builder.of(env))
    except Lost:
        raise
    except Exception as e:
        logger.debug("%s could not be timed: %s", env_name(env.id), e)
        return None
    return None if found is None else [banded(1e3 * found[0]), found[1]]


# --- what is remembered -----------------------------------------------------------------------------------------------


def machine_id() -> str:
    """This machine, in words: its cores, their kind and its GPU."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        model = found[1] if found else model
    gpus = visible_gpus()
    return f"{cores()} cores, {model}, {gpus[0].name if gpus else 'no GPU'}"


def steps_file() -> Path:
    return user_state() / "steps.json"


def _key(env: EnvConfig) -> str:
    about = to_plain(env) | {"num_envs": 0, "id": env_name(env.id), "machine": machine_id()}
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read_steps(file: Path) -> dict[str, list[Any]]:
    """What is remembered; what is not as we write it counts as nothing."""
    try:
        known = json.loads(file.read_text())
        return {
            k: [float(v[0]), bool(v[1])]
            for k, v in known.items()
            if isinstance(v, list) and len(v) == 2 and isinstance(v[0], (int, float)) and 0 <= v[0] < 1e7
        }
    except (OSError, ValueError, AttributeError):
        return {}


def write_steps(file: Path, known: dict[str, Any]) -> None:
    with suppress(OSError):  # a home that cannot be written to: it is timed again
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(known, indent=0))
        made.replace(file)


def machine_file(algorithm: str, env: str) -> Path:
    """Where `bray calibrate` writes what it found for this machine."""
    machine = hashlib.sha256(machine_id().encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", f"{algorithm} {env}".lower()).strip("-")
    return user_state() / f"machine-{machine}" / f"{name}.yaml"


def _calibrated(algorithm: str, env: EnvConfig) -> Choice | None:
    """What `bray calibrate` found here for so many environments."""
    file = machine_file(algorithm, env_name(env.id))
    if not file.exists():
        return None
    try:
        said = load_yaml(file).values["config"]
        workers, each = int(said["num_workers"]), int(said["num_envs"])
        threads = None if said.get("threads") is None else int(said["threads"])
        why, ahead = f"as measured, {file}", bool(said.get("lockstep", False))
        choice = Choice(str(said["device"]), workers, said["inference"], each, why, threads=threads, lockstep=ahead)
    except (ConfigError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{file}: not what `bray calibrate` writes ({e}): run it again, or remove the file") from None
    if max(1, workers) * each != env.num_envs:
        logger.info("%s is for %d environments, and %d are asked for", file, max(1, workers) * each, env.num_envs)
        return None
    return choice
