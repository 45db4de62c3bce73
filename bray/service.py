"""A trained policy as a game service: `bray serve RUN_DIR ...`.

A service holds one or more models, each a run directory; a model has one or more versions (checkpoints) that share its sessions by weight.
What is served is made of files alone: `spec.json`, `policy.json`, `models/default/graph.onnx` and a version's weights. Neither torch nor
the environment's package is needed, unless the engine is torch or the graph has to be exported first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import Field

from bray import tree
from bray.config import Source, resolve
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.inference.host import ModelHost
from bray.rl import act
from bray.rundir import RunDir, write_atomic
from bray.serving.actor import Actor
from bray.serving.config import ServiceConfig
from bray.serving.protocol import END, START, TICK, malformed
from bray.serving.record import Recording
from bray.serving.server import Numbers, Server
from bray.serving.values import plain, reader
from bray.spec import ACTION_MASK, EnvSpec

logger = logging.getLogger("bray.serving")

MODEL = "default"
"""The name under which a run keeps its weights."""
TorchEngine = Callable[[Path, int], tuple[Any, Any]]
"""(run directory, step) -> (engine, the algorithm's Policy): what `experiment.torch_engine` does, for those who have torch."""
EngineName = Literal["onnx", "int8", "torch"]


@dataclass(frozen=True)
class ModelService:
    """What the models of a service can be told."""

    engine: EngineName = "onnx"
    """What executes a model: onnx = ONNX Runtime, int8 = its quantized file (`bray export --quantize`), torch = PyTorch."""
    versions: dict[str, float] = field(default_factory=lambda: {"latest": 1.0})
    """Checkpoints and their shares of the sessions: {latest: 0.9, best: 0.1}; a number is a step."""
    sample: bool = False
    """Draw actions from the policy's distribution instead of taking the best one."""
    follow: bool = False
    """Go on to new checkpoints of a training that is running."""
    follow_every_s: Annotated[float, Field(gt=0)] = 1.0
    """How often a followed run is looked at."""
    fallback: Any = None
    """The action sent when a tick's deadline passes: an action as JSON, "last" (the session's last one) or "random"; null = an error."""
    record: str | None = None
    """Directory for recordings of every session; null = none."""
    max_batch_size: Annotated[int, Field(gt=0)] = 32
    """Rows of one forward."""
    max_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an idle model waits for a fuller batch."""
    max_queue: Annotated[int, Field(gt=0)] = 4096
    """Ticks that may wait for a model."""
    threads: Annotated[int, Field(gt=0)] = 1
    """Threads of one forward."""


SECTIONS = {"service": ServiceConfig, "model": ModelService}


def configure(sources: Sequence[Source]) -> tuple[ServiceConfig, ModelService]:
    """The settings of a service and of its models; unknown keys get the nearest one."""
    defaults = Source("defaults of bray serve", {"service": {"actors_per_worker": 1000}})
    config = resolve(SECTIONS, [defaults, *sources])
    return config["service"], config["model"]


# --- a model --------------------------------------------------------------------------------------------------------------


class ActingEngine:
    """An engine whose outputs are actions: the Model's forward, then the choice of actions for the whole batch."""

    def __init__(self, engine: Any, choose: Callable[[dict[str, Any], Any, np.ndarray | None], Any], recurrent: bool):
        self.engine, self.choose, self.recurrent = engine, choose, recurrent

    def forward(self, obs: Any, mask: np.ndarray | None = None, *state: Any) -> dict[str, Any]:
        outputs = self.engine.forward(obs, *state)
        out = {"action": self.choose(outputs, obs, mask)}
        if self.recurrent:
            out["state"] = outputs["state"]
        return out


@dataclass
class Arm:
    """A version among those that share a model's sessions."""

    label: str
    """latest, best or a step."""
    share: float
    step: int = -1


class ServedModel:
    """One run directory being served."""

    def __init__(self, name: str, path: str | Path, config: ModelService, torch_engine: TorchEngine | None = None):
        self.name, self.config, self.torch_engine = name, config, torch_engine
        self.run = RunDir.open(path)
        self.spec = EnvSpec.from_json(self.run.read_json("spec.json"))
        self.policy = self.run.read_json("policy.json")
        self.layout = self.spec.layout
        self.recurrent = bool(self.policy.get("recurrent"))
        self.arms = [Arm(str(label), float(share)) for label, share in config.versions.items()]
        if not self.arms or min(a.share for a in self.arms) < 0 or sum(a.share for a in self.arms) <= 0:
            raise ConfigError(f"versions: expected shares above 0, got {dict(config.versions)}")
        self.pinned: int | None = None
        self.served: list[int] = []  # steps that were the newest one, in order, for rolling back
        self._kept: set[int] = set()
        self.host: ModelHost
        self._engines = _Engines(self)
        self._rng = np.random.default_rng()
        self._read_obs = reader(self.spec.observation)
        self._in_obs = self.spec.observation.kind == "dict" and ACTION_MASK in self.spec.observation.names
        self._all_legal = np.ones(self.layout.num_logits, np.bool_)
        ends = np.cumsum([p.n for p in self.layout.parts if p.kind == "categorical"]).tolist()
        self._choices = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]  # of each part, in a mask
        self._initial = None
        if self.recurrent:
            self._initial = _zeros(self.policy.get("state"), self.run.path)

    # versions

    def open(self) -> None:
        """Load the first versions; fails with what is wrong with the run."""
        steps = {arm.label: self._step_of(arm.label) for arm in self.arms}
        first = steps[self.arms[0].label]
        c = self.config
        self.host = ModelHost(
            self.name,
            self._acting(first),
            step=first,
            max_batch_size=c.max_batch_size,
            max_wait=c.max_wait_s,
            max_queue=c.max_queue,
            template=self.sample(),
        )
        self.host(
            *tree.map(lambda x: x[None], self.sample()), batch=True
        )  # what is wrong shows now, not at the first tick
        for arm in self.arms:
            self._use(arm, steps[arm.label])

    def sample(self) -> tuple[Any, ...]:
        """What one tick may ask the model."""
        obs = tree.map(np.asarray, self.spec.observation.sample(np.random.default_rng(0)))
        mask = self._all_legal if len(self._all_legal) else None
        return tuple(x for x in (obs, mask, self._initial) if x is not None)

    def _step_of(self, label: str) -> int:
        if label in ("latest", "best"):
            step = self.run.pointer(label)
            if step is None:
                raise CheckpointError(f"{self.run.path} has no checkpoint {label!r} yet")
            return step
        if not label.isdigit():
            raise ConfigError(f"versions: expected latest, best or a step, got {label!r}")
        return int(label)

    def _acting(self, step: int) -> ActingEngine:
        engine = self._engines.make(step)
        return ActingEngine(engine, self._engines.choose, self.recurrent)

    def _use(self, arm: Arm, step: int, engine: ActingEngine | None = None) -> None:
        if step not in self.host.steps:
            self.host.add_version(step, engine or self._acting(step))
        arm.step = step
        self._keep(step)
        if arm.label == "latest" and (not self.served or self.served[-1] != step):
            self.served.append(step)

    def _keep(self, step: int) -> None:
        """Ask the training not to delete this version while it is served."""
        try:
            if step not in self._kept and not self.run.is_protected(step, MODEL):
                self.run.protect(step, MODEL)
                self._kept.add(step)
        except (BrayError, OSError) as e:  # a run that can only be read is served all the same
            logger.debug("%s: %s", self.name, e)

    def let_go(self, steps: Iterable[int]) -> None:
        """These versions are not served any more."""
        for step in set(steps) & self._kept:
            self._kept.discard(step)
            with contextlib.suppress(OSError):
                self.run.protect(step, MODEL, on=False)

    def unused(self) -> list[int]:
        """Versions in memory that no session is given any more."""
        wanted = {arm.step for arm in self.arms}
        return [step for step in self.host.steps if step not in wanted]

    def pick(self, u: float) -> int:
        """The version for a session whose place in [0, 1) is u."""
        if len(self.arms) == 1:
            return self.arms[0].step
        at = u * sum(arm.share for arm in self.arms)
        for arm in self.arms:
            at -= arm.share
            if at < 0:
                return arm.step
        return self.arms[-1].step

    async def look(self) -> None:
        """Go on to new checkpoints, where that is wanted."""
        if self.pinned is not None or not self.config.follow:
            return
        for arm in self.arms:
            if arm.label in ("latest", "best"):
                step = self.run.pointer(arm.label)
                if step is not None and step != arm.step:
                    engine = None
                    if step not in self.host.steps:
                        engine = await asyncio.get_running_loop().run_in_executor(None, self._acting, step)
                    self._use(arm, step, engine)
                    logger.info("%s: now serving %s = step %d", self.name, arm.label, step)

    async def change(self, wish: Mapping[str, Any]) -> None:
        """`{"pin": STEP}`, `{"pin": null}` (back to the versions of the start) or `{"versions": {LABEL: SHARE}}`."""
        loop = asyncio.get_running_loop()
        if wish.get("pin") is not None:
            labels = {str(wish["pin"]): 1.0}
        else:
            labels = {str(k): float(v) for k, v in wish.get("versions", self.config.versions).items()}
        if not labels or min(labels.values()) < 0 or sum(labels.values()) <= 0:
            raise ConfigError(f"expected versions with shares above 0, got {labels}")
        arms = []
        for label, share in labels.items():
            arm, step = Arm(label, share), self._step_of(label)
            engine = None if step in self.host.steps else await loop.run_in_executor(None, self._acting, step)
            self._use(arm, step, engine)
            arms.append(arm)
        self.arms, self.pinned = arms, wish.get("pin")

    def previous(self) -> int:
        """The version before the one that is served."""
        now = self.arms[0].step
        before = [s for s in self.served if s != now] or [s for s in self.run.versions(MODEL) if s < now]
        if not before:
            raise ConfigError(f"{self.name}: there is no version before step {now}")
        return before[-1]

    # observations in, actions out

    def read(self, message: Tick) -> tuple[Any, ...]:
        """A tick's message as what the model is asked."""
        obs, mask = message.obs, message.action_mask
        if self._in_obs and mask is not None and isinstance(obs, dict):
            obs = {**obs, ACTION_MASK: mask}
        x = self._read_obs(obs)
        if not len(self._all_legal):
            return (x,)
        if self._in_obs:
            return x, self._flat_mask(x[ACTION_MASK])
        return x, self._all_legal if mask is None else self._mask(mask)

    def _flat_mask(self, value: Any) -> np.ndarray:
        """A mask as it was sent (flat, or in the parts of a composite action) -> one bool per choice."""
        mask = self.layout.mask({ACTION_MASK: tree.map(lambda x: np.asarray(x)[None], value)})
        assert mask is not None
        if mask.shape[1] == len(self._all_legal) and not all(mask[0, part].any() for part in self._choices):
            raise DataError("action_mask: expected at least one legal action for every choice, got none")
        return mask[0]

    def _mask(self, value: Any) -> np.ndarray:
        try:
            mask = self._flat_mask(value)
        except (ValueError, TypeError, IndexError):
            mask = np.empty(0)
        if mask.shape != self._all_legal.shape:
            raise DataError(f"action_mask: expected {len(self._all_legal)} numbers 0 or 1, got {str(value)[:60]}")
        return mask

    def zero_state(self) -> Any:
        return self._initial

    def random_action(self) -> Any:
        outputs = self._engines.noise(1)
        return plain(tree.index(self._engines.choose(outputs, None, None, self._rng), 0))


class _Engines:
    """Makes the engines of a run's versions."""

    def __init__(self, model: ServedModel):
        self.model, self.config = model, model.config
        self._graph: Any = None
        policy = model.policy
        self.rule = policy.get("rule")
        self.epsilon = float(policy.get("epsilon", 0.0))
        self._own: Any = None  # the algorithm's own Policy, where it has no rule
        if self.rule is None and self.config.engine != "torch":
            raise ConfigError(
                f"{model.run.path}: the Policy of {policy.get('algorithm')} acts in a way of its own, which needs its code: serve it with --engine torch"
            )

    def make(self, step: int) -> Any:
        run, name = self.model.run, self.config.engine
        if name == "torch":
            return self._torch(step)
        from bray.inference.onnx_engine import OnnxEngine

        if name == "int8":
            engine = OnnxEngine(run.models / MODEL / "model.int8.onnx", self.config.threads)
            if engine.step != step:
                raise ConfigError(
                    f"{run.path}: the int8 model is of step {engine.step}, step {step} was asked for: `bray export {run.path} --quantize --checkpoint {step}`"
                )
            return engine
        if self._graph is None:
            path = run.models / MODEL / "graph.onnx"
            if not path.exists():
                export_graph(run.path)
            self._graph = OnnxEngine(path, self.config.threads)
        return self._graph.with_weights(run.load_weights(step, MODEL), step)

    def _torch(self, step: int) -> Any:
        if self.model.torch_engine is None:
            raise ConfigError("--engine torch needs what training needs: pip install 'bray[train]'")
        engine, self._own = self.model.torch_engine(self.model.run.path, step)
        return engine

    def choose(self, outputs: Any, obs: Any, mask: Any, rng: Any = None) -> Any:
        rng = self.model._rng if self.config.sample else rng
        if self.rule is not None:
            return act.decide(self.rule, self.model.layout, outputs, rng, mask, self.epsilon)
        if mask is not None and isinstance(obs, dict):
            obs = {**obs, ACTION_MASK: mask}
        return self._own.act(outputs, obs, rng, 1 << 62)[0]

    def noise(self, rows: int) -> dict[str, np.ndarray]:
        """Outputs that know nothing, for actions at random."""
        width = self.model.layout.num_params
        return {
            "dist": np.zeros((rows, width), np.float32),
            "q": np.random.default_rng().random((rows, width), np.float32),
        }


def export_graph(path: Path) -> None:
    """Write a run's `graph.onnx`. In a process of its own: torch does not come along into a service."""
    logger.info("%s has no graph.onnx yet: exporting it", path)
    code = "import sys; from bray.experiment import export_graph; export_graph(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"{path}: the model could not be exported ({last}): run `bray export {path}`, or serve it with --engine torch"
        )


def _zeros(state: Any, path: Path) -> Any:
    if state is None:
        raise CheckpointError(
            f"{path}/policy.json does not say what the model remembers: train with this version of Bray, or load and save it"
        )
    if isinstance(state, dict) and state.keys() == {"shape", "dtype"} and isinstance(state["dtype"], str):
        return np.zeros(state["shape"], state["dtype"])
    if isinstance(state, dict):
        return {k: _zeros(v, path) for k, v in state.items()}
    return tuple(_zeros(v, path) for v in state)


# --- a session ------------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct):
    """What a game sends each tick."""

    obs: Any
    action_mask: Any = None


class Opening(msgspec.Struct):
    """What a game may say at the start of a session (an empty body says nothing)."""

    model: str | None = None
    version: int | None = None


_read_tick = msgspec.json.Decoder(Tick).decode
_read_opening = msgspec.json.Decoder(Opening).decode
_write = msgspec.json.Encoder(enc_hook=plain).encode


class PolicyActor(Actor):
    """A game session played by a trained policy: JSON in, JSON out."""

    def __init__(self, service: Service):
        self.service = service
        self.recording: Recording | None = None
        if service.config.fallback is not None:
            self.fallback = self._fallback  # only where it is wanted: having the method replaces the error

    def start(self, session: str, data: bytes) -> bytes:
        try:
            opening = _read_opening(data) if data else Opening()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise malformed(
                f"expected an empty body or a JSON object with model and version, got {_short(data)} ({e})"
            ) from None
        try:
            self.model = self.service.model(opening.model)
        except UnknownName as e:
            raise malformed(str(e)) from None
        if opening.version is not None and opening.version not in self.model.host.steps:
            raise malformed(f"expected one of the versions {sorted(self.model.host.steps)}, got {opening.version}")
        self.version = opening.version
        self.place = int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "big") / 2**64
        self.state = self.model.zero_state()
        self.last: Any = None
        reply = _write({"model": self.model.name, "version": self._step()})
        if self.service.config.record is not None:
            about = {"run": str(self.model.run.path.resolve()), "model": self.model.name, "version": self._step()}
            self.recording = Recording(Path(self.service.config.record), session, about)
            self.recording.add(START, data, reply)
        return reply

    def _step(self) -> int:
        """The version that answers now: the asked-for one while it is there, else the session's share of those that are served."""
        if self.version is not None and self.version in self.model.host.steps:
            return self.version
        return self.model.pick(self.place)

    async def tick(self, data: bytes) -> bytes:
        model = self.model
        try:
            asked = model.read(_read_tick(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise malformed(f'expected a JSON object {{"obs": ...}}, got {_short(data)} ({e})') from None
        except DataError as e:
            raise malformed(str(e)) from None
        step = self._step()
        if self.state is None:
            out = await model.host.forward(*asked, step=step)
        else:
            out = await model.host.forward(*asked, self.state, step=step)
            self.state = tree.map(np.copy, out["state"])  # a row of the batch would keep the whole batch alive
        action = out["action"]
        self.last = action
        if type(action) is np.int64:
            reply = b'{"action":%d,"version":%d}' % (action, step)
        else:
            reply = _write({"action": action, "version": step})
        if self.recording is not None:
            self.recording.add(TICK, data, reply)
        return reply

    def end(self, data: bytes) -> bytes:
        if self.recording is not None:
            self.recording.add(END, data, b"")
            self.recording.close()
            self.recording = None
        return b"{}"

    def lost(self) -> None:
        self.end(b"")

    def _fallback(self, data: bytes) -> bytes:
        wish = self.service.config.fallback
        action = wish
        if wish == "random" or (wish == "last" and self.last is None):
            action = self.model.random_action()
        elif wish == "last":
            action = self.last
        return _write({"action": action, "version": self._step(), "fallback": True})


def _short(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + ("..." if len(data) > 60 else "")


# --- the service ----------------------------------------------------------------------------------------------------------


class Service:
    """The models of one worker, the wishes of the admin port, and the task that follows new checkpoints."""

    def __init__(
        self,
        runs: Mapping[str, str | Path],
        config: ModelService,
        control: Path | None = None,
        torch_engine: TorchEngine | None = None,
    ):
        self.config, self.control = config, control
        self.models = {name: ServedModel(name, path, config, torch_engine) for name, path in runs.items()}
        self._wishes: dict[str, Any] = {}
        self._seen = -1
        for model in self.models.values():
            model.open()

    def model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UnknownName("model", name, self.models)
        return self.models[name]

    def make_actor(self) -> PolicyActor:
        return PolicyActor(self)

    async def prepare(self, server: Server) -> None:
        """Join a worker: its admin routes, its numbers, its life."""
        server.routes["models"] = self.admin
        server.numbers.append(self.numbers)
        await self._read_control()
        task = asyncio.get_running_loop().create_task(self._follow())

        async def close() -> None:
            task.cancel()
            for model in self.models.values():
                await model.host.close()
                model.let_go(model.host.steps)

        server.closers.append(close)

    def numbers(self) -> Numbers:
        out: Numbers = {}
        for model in self.models.values():
            for key, value in model.host.numbers().items():
                out[f'bray_model_{key}{{model="{model.name}"}}'] = value
        return out

    async def _follow(self) -> None:
        """Look for new checkpoints and new wishes; a mistake is logged once and what was served goes on."""
        said = ""
        idle: dict[tuple[str, int], int] = {}
        while True:
            await asyncio.sleep(self.config.follow_every_s)
            try:
                await self._read_control()
                for model in self.models.values():
                    await model.look()
                    for step in model.unused():  # sessions may be in the middle of a tick with it
                        key = (model.name, step)
                        idle[key] = idle.get(key, 0) + 1
                        if idle[key] > 5:
                            del idle[key]
                            await model.host.drop_version(step)
                            model.let_go([step])
                said = ""
            except (BrayError, OSError) as e:
                if str(e) != said:
                    said = str(e)
                    logger.error("what is served stays as it is: %s", e)

    async def _read_control(self) -> None:
        """Wishes that another worker (or this one) wrote down."""
        if self.control is None or not self.control.exists():
            return
        stamp = self.control.stat().st_mtime_ns
        if stamp != self._seen:
            self._seen = stamp
            wishes = json.loads(self.control.read_bytes())
            for name, wish in wishes.items():
                if wish != self._wishes.get(name):
                    await self.models[name].change(wish)
            self._wishes = wishes

    async def admin(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """GET /models; POST /models/NAME with {"pin": STEP | null}, {"rollback": true} or {"versions": {LABEL: SHARE}}."""
        name = path.removeprefix("/models").strip("/")
        try:
            if method == "POST":
                model = self.model(name or None)
                wish = json.loads(body)
                if (
                    not isinstance(wish, dict)
                    or len(wish) != 1
                    or next(iter(wish)) not in ("pin", "rollback", "versions")
                ):
                    raise ConfigError(
                        'expected {"pin": STEP}, {"rollback": true} or {"versions": {"latest": 0.9, "best": 0.1}}'
                    )
                if "rollback" in wish:
                    wish = {"pin": model.previous()}
                await model.change(wish)
                self._wishes = {**self._wishes, model.name: wish}
                if self.control is not None:
                    write_atomic(self.control, json.dumps(self._wishes))
                    self._seen = self.control.stat().st_mtime_ns
            elif method != "GET":
                return 405, "text/plain", b"expected GET or POST\n"
        except (BrayError, ValueError, TypeError, AttributeError) as e:
            return 400, "application/json", json.dumps({"error": "malformed", "message": str(e)}).encode()
        return 200, "application/json", json.dumps([self._about(m) for m in self.models.values()]).encode()

    def _about(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "run": str(model.run.path),
            "env": model.spec.id,
            "algorithm": model.policy.get("algorithm"),
            "engine": self.config.engine,
            "versions": [{"label": a.label, "step": a.step, "share": a.share} for a in model.arms],
            "pinned": model.pinned,
            "loaded": sorted(model.host.steps),
        }


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
