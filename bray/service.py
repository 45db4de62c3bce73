"""Trained policies as a game service: `bray serve RUN_DIR ...`.

A service holds one or more models, each a run directory (`serving/model.py`); a model has one or more versions that
share its sessions by weight.
Sessions are PolicyActors (`serving/policy_actor.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bray.act import GREEDY, SAMPLE
from bray.config import ConfigSource, resolve
from bray.errors import BrayError, ConfigError, UnknownName
from bray.league import IN_RUN, read_league
from bray.rundir import RunDir, write_atomic
from bray.serving.access import with_environment
from bray.serving.config import ServedModelConfig, ServiceConfig
from bray.serving.metrics import Numbers
from bray.serving.model import ServedModel, TorchEngine, VersionLocks
from bray.serving.policy_actor import BasePolicyAgent, PolicyActor
from bray.serving.server import Server
from bray.serving.values import body_limit
from bray.serving.workers import Ready, serve as serve_workers

logger = logging.getLogger("bray.serving")

SECTIONS = {"service": ServiceConfig, "model": ServedModelConfig}


def configure(sources: Sequence[ConfigSource]) -> tuple[ServiceConfig, ServedModelConfig]:
    """The settings of a service and of its models; unknown keys get the nearest one."""
    config = resolve(SECTIONS, [_renamed(source) for source in sources])
    return with_environment(config["service"]), config["model"]


def _renamed(source: ConfigSource) -> ConfigSource:
    """`sample: true` was the name of `act: sample` in 0.1."""
    values = dict(source.values)
    section = values["model"] = dict(values["model"]) if isinstance(values.get("model"), dict) else {}
    for place in (values, section):
        if "sample" in place:
            logger.warning("`sample` is now `act`: say act=sample or act=greedy (%s)", source.name)
            place["act"] = SAMPLE if place.pop("sample") else GREEDY
    if not section:
        del values["model"]
    return ConfigSource(source.name, values, source.lines, source.texts)


class PolicyService:
    """The models of one worker, the versions that the admin port asks for, and the task that follows new
    checkpoints."""

    def __init__(
        self,
        runs: Mapping[str, str | Path],
        config: ServedModelConfig,
        shared: Path | None = None,
        torch_engine: TorchEngine | None = None,
        configs: Mapping[str, ServedModelConfig] | None = None,
        with_outputs: bool = False,
    ):
        """
        shared        a directory of the workers of one service, as `open_shared` prepares it
        configs       of models that have settings of their own
        with_outputs  as ActingEngine says
        """
        self.config = config
        own = configs or {}
        self._file = None if shared is None else shared / _DESIRED
        locks = VersionLocks(None if shared is None else shared / _LOCKS)
        self.models = {
            name: ServedModel(name, path, own.get(name, config), torch_engine, locks, with_outputs, ratings_of)
            for name, path in runs.items()
        }
        for model in self.models.values():
            model.players = [other for other in self.models.values() if other.run.whole == model.run.whole]
        self._desired = self._read_desired()
        self._said: dict[str, str] = {}  # the last mistake of each model
        self._unused: dict[tuple[str, int], int] = {}  # how often a version was seen unused in a row
        self._changing = asyncio.Lock()  # one change of what is served at a time
        for name, model in self.models.items():
            model.open(self._desired.get(name))

    def model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UnknownName("model", name, self.models)
        return self.models[name]

    def make_actor(self) -> PolicyActor:
        c = self.config
        return PolicyActor(
            {"policy": BasePolicyAgent}, fallback=c.fallback, record=c.record, find_model=self.model, serialize="json"
        )

    async def prepare(self, server: Server) -> None:
        """Join a worker: its admin routes, its numbers, its life."""
        limit = max(body_limit(model.spec, model.config.max_json) for model in self.models.values())
        server.config = replace(server.config, max_body=min(limit, server.config.max_body))
        server.routes["models"] = self.admin
        server.numbers.append(lambda: self.numbers(server.worker))
        task = asyncio.get_running_loop().create_task(self._follow())

        async def close() -> None:
            task.cancel()
            await self.close()

        server.close_hooks.append(close)

    async def close(self) -> None:
        for model in self.models.values():
            await model.close()

    def numbers(self, worker: int = 0) -> Numbers:
        out: Numbers = {}
        for model in self.models.values():
            name = model.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            for key, value in model.numbers().items():
                # the workers' numbers are added up: those whose sum means nothing say whose they are
                own = f',worker="{worker}"' if key in ("step", "versions", "forward_seconds") else ""
                out[f'bray_model_{key}{{model="{name}"{own}}}'] = value
        return out

    async def _follow(self) -> None:
        """Look for new checkpoints and newly asked versions; a mistake is logged once and what was served goes on."""
        while True:
            await asyncio.sleep(self.config.follow_every_s)
            for model in self.models.values():
                try:
                    async with self._changing:
                        await self._tend(model)
                    self._said.pop(model.name, None)
                except Exception as e:  # whatever it is, the next checkpoint may be a good one
                    if str(e) != self._said.get(model.name):
                        self._said[model.name] = str(e)
                        logger.error("%s: what is served stays as it is: %s", model.name, e)

    async def _tend(self, model: ServedModel) -> None:
        desired = self._read_desired().get(model.name)
        if desired is not None and desired != self._desired.get(model.name):
            await model.change(desired)
            self._desired[model.name] = desired
        await model.follow()
        unused = [(model.name, step) for step in model.unused()]
        for key in [k for k in self._unused if k[0] == model.name and k not in unused]:
            del self._unused[key]
        for key in unused:  # sessions may be in the middle of a tick with it
            self._unused[key] = self._unused.get(key, 0) + 1
            if self._unused[key] > 5:
                del self._unused[key]
                await model.drop(key[1])

    def _read_desired(self) -> dict[str, Any]:
        """By model, what any of the workers was told last."""
        if self._file is None or not self._file.exists():
            return {}
        return json.loads(self._file.read_bytes())

    async def admin(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """GET /models; POST /models/NAME with {"pin": STEP | null}, {"rollback": true} or {"versions": {LABEL:
        SHARE}}."""
        name = path.removeprefix("/models").strip("/")
        try:
            if method == "POST":
                model = self.model(name or None)
                asked = json.loads(body)
                async with self._changing:
                    desired = model.desired_versions(asked if isinstance(asked, dict) else {})
                    await model.change(desired)
                    self._desired[model.name] = desired
                    if self._file is not None:
                        write_atomic(self._file, json.dumps({**self._read_desired(), model.name: desired}))
            elif method != "GET":
                return 405, "text/plain", b"expected GET or POST\n"
        except (BrayError, ValueError, RecursionError) as e:
            return 400, "application/json", json.dumps({"error": "malformed", "message": str(e)}).encode()
        return 200, "application/json", json.dumps([self._about(m) for m in self.models.values()]).encode()

    def _about(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "run": str(model.run.path),
            "env": model.spec.id,
            "algorithm": model.about.get("algorithm"),
            "engine": model.config.engine,
            "versions": [{"label": s.label, "step": s.version.step, "share": s.share} for s in model.shares],
            "pinned": model.pinned,
            "loaded": sorted(model.versions),
        }


_DESIRED = "desired_versions.json"
_LOCKS = "marks"  # not to be renamed: it frees what a service that was killed had kept from deletion


def open_shared(shared: Path, models: Mapping[str, ServedModel]) -> None:
    """Prepare the directory of the workers of one service. What is wrong is said once, before there are workers; and
    all begin with the same versions, also one that is started later."""
    desired = {name: model.desired_versions({"pin": None}) for name, model in models.items()}
    write_atomic(shared / _DESIRED, json.dumps(desired))
    locks = VersionLocks(shared / _LOCKS)
    for name, model in models.items():
        for step in desired[name]["steps"].values() if not model.config.follow else ():
            locks.set(model.run, model.weights_name, step)
        if model.config.engine == "onnx":
            model.prepare_graph()


def close_shared(shared: Path) -> None:
    """The service is over: trainings may delete what it served."""
    VersionLocks(shared / _LOCKS).remove_all()
    (shared / _LOCKS).unlink(missing_ok=True)


def serve(
    runs: Mapping[str, str | Path],
    service: ServiceConfig,
    model: ServedModelConfig,
    torch_engine: TorchEngine | None = None,
    on_ready: Ready | None = None,
) -> int:
    """Serve runs until a signal; returns the exit code. Every worker makes its own `PolicyService`, after it was
    forked."""

    async def prepare(server: Server) -> None:
        made = PolicyService(runs, model, shared, torch_engine)
        server.make_actor = made.make_actor
        await made.prepare(server)

    with tempfile.TemporaryDirectory(prefix="bray-serve-") as directory:
        shared = Path(directory)
        try:
            open_shared(shared, {name: ServedModel(name, path, model, torch_engine) for name, path in runs.items()})
            return serve_workers(None, service, on_ready=on_ready, prepare=prepare)
        finally:
            close_shared(shared)


def ratings_of(run: RunDir) -> dict[str, float]:
    """How strong the players of a run that plays itself are, by the labels of their versions; in a league of several
    those of one policy."""
    if not (run.whole / IN_RUN).exists():
        return {}
    found, name = read_league(run.whole / IN_RUN), run.model_name()
    there = set(run.versions(name))
    return {
        "latest" if ref.step is None else str(ref.step): found.rating(ref).elo
        for ref in found.refs
        if ref.side == name and (ref.step is None or ref.step in there)
    }


def with_players(runs: Mapping[str, Path]) -> dict[str, Path]:
    """A league of several players as a model for each, by their names; the first one answers where a game names
    none. Other runs as they are."""
    ((path, *more),) = (list(runs.values()),)
    if more or not (path / IN_RUN).exists() or not (names := RunDir.open(path).policies()):
        return dict(runs)
    return {name: path / "models" / name for name in read_league(path / IN_RUN).sides() if name in names}


def name_runs(runs: Sequence[str | Path]) -> dict[str, Path]:
    """`RUN_DIR` or `NAME=RUN_DIR`, each: models by name; a name that is not given is the directory's."""
    out: dict[str, Path] = {}
    for run in runs:
        name, equals, path = str(run).partition("=")
        if not equals or Path(str(run)).exists():
            path, name = str(run), Path(run).resolve().name
        if name in out:
            raise ConfigError(f"two models are named {name!r}: name them, like first={out[name]} second={path}")
        out[name] = Path(path)
    return out
