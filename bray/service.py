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
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bray import act, tree
from bray.act import GREEDY, SAMPLE, TRAINED, Tick, decide_now
from bray.config import Source, resolve
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, UnknownName
from bray.inference.host import ModelHost
from bray.rundir import RunDir, write_atomic
from bray.serving.actor import Actor
from bray.serving.config import ModelService, ServiceConfig
from bray.serving.observe import Observations
from bray.serving.protocol import END, START, TICK, malformed
from bray.serving.record import Recording
from bray.serving.server import Numbers, Server
from bray.serving.values import plain, reader
from bray.serving.workers import Ready, serve as serve_workers
from bray.spec import EnvSpec

logger = logging.getLogger("bray.serving")

TorchEngine = Callable[[Path, int], tuple[Any, Any]]
"""(run directory, step) -> (engine, the algorithm's Policy): what `experiment.torch_engine` does, for those who have torch."""

_REMEMBERED = 64  # versions that were the newest one: a training may be followed for months
SECTIONS = {"service": ServiceConfig, "model": ModelService}


def configure(sources: Sequence[Source]) -> tuple[ServiceConfig, ModelService]:
    """The settings of a service and of its models; unknown keys get the nearest one."""
    config = resolve(SECTIONS, [_renamed(source) for source in sources])
    return config["service"], config["model"]


def _renamed(source: Source) -> Source:
    """`sample: true` was the name of `act: sample` in 0.1."""
    values = dict(source.values)
    section = values["model"] = dict(values["model"]) if isinstance(values.get("model"), dict) else {}
    for place in (values, section):
        if "sample" in place:
            logger.warning("`sample` is now `act`: say act=sample or act=greedy (%s)", source.name)
            place["act"] = SAMPLE if place.pop("sample") else GREEDY
    if not section:
        del values["model"]
    return Source(source.name, values, source.lines, source.texts)


# --- a model --------------------------------------------------------------------------------------------------------------


class ActingEngine:
    """An engine whose outputs are actions: the Policy decides for the whole batch, with as many forwards as it likes."""

    def __init__(
        self, engine: Any, policy: act.Policy, mode: str, masked: bool, recurrent: bool, with_outputs: bool = False
    ):
        """with_outputs: beside actions give what they were chosen by, `outputs` (of the Model) and `extras` (of the Policy)."""
        self.engine, self.policy, self.mode, self.masked, self.recurrent = engine, policy, mode, masked, recurrent
        self.with_outputs = with_outputs
        self.rng = np.random.default_rng()

    def forward(self, obs: Any, *rest: Any) -> dict[str, Any]:
        """rest: a mask where there are choices, then a state where the Model remembers."""
        mask, state = (rest[0], rest[1:]) if self.masked else (None, rest)
        deciding = self.policy.decide(Tick(obs, mask=mask), state[0] if state else None, self.rng, self.mode, TRAINED)
        decision = decide_now(deciding, self.engine.forward)
        out = {"action": decision.action}
        if self.recurrent:
            out["state"] = decision.carry
        if self.with_outputs:
            out["outputs"] = {k: v for k, v in decision.outputs.items() if k != "state"}
            out["extras"] = decision.extras
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

    def __init__(
        self,
        name: str,
        path: str | Path,
        config: ModelService,
        torch_engine: TorchEngine | None = None,
        marks: Marks | None = None,
        with_outputs: bool = False,
    ):
        """with_outputs: as ActingEngine says."""
        self.name, self.config, self.torch_engine, self.with_outputs = name, config, torch_engine, with_outputs
        self.run = RunDir.open(path)
        self.run.refuse_old_launch()
        self.spec = EnvSpec.from_json(self.run.read_json("spec.json"))
        self.policy = self.run.read_json("policy.json")
        self.layout = self.spec.layout
        self.kept_as = str(self.policy.get("model", "default"))
        """The name under which the run keeps its weights."""
        self.recurrent = bool(self.policy.get("recurrent"))
        self.arms: list[Arm] = []
        self.pinned: int | None = None
        self.served: list[int] = []  # steps that were the newest one, in order, for rolling back
        self._marks = marks or Marks()
        self.host: ModelHost
        self._engines = _Engines(self)
        self._rng = np.random.default_rng()
        self.observations = Observations(self.spec)
        self.masked = self.observations.masked
        self._initial = None
        if self.recurrent:
            self._initial = _zeros(self.policy.get("state"), self.run.path)
        if config.fallback is not None and config.fallback not in ("last", "random"):
            try:
                reader(self.spec.action, "fallback")(config.fallback)
            except DataError as e:
                raise ConfigError(f"{name}: {e}") from None

    # versions

    def wish(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be served, with the steps that `latest` and `best` mean now, so that all workers serve the same ones.
        `{"pin": STEP}`, `{"pin": null}` (back to the versions of the start), `{"rollback": true}` or `{"versions": {LABEL: SHARE}}`."""
        what, value = next(iter(asked.items())) if len(asked) == 1 else (None, None)
        pin = None
        if what == "rollback" and value is True:
            pin = self.previous()
        elif what == "pin" and type(value) is int:
            pin = value
        elif not (what == "pin" and value is None) and not (what == "versions" and isinstance(value, dict)):
            raise ConfigError(
                'expected {"pin": STEP}, {"pin": null}, {"rollback": true} or {"versions": {"latest": 0.9, "best": 0.1}}'
            )
        versions = {str(pin): 1.0} if pin is not None else (self.config.versions or {"latest": 1.0})
        if isinstance(value, dict):
            versions = {str(k): v for k, v in value.items()}
        shares = list(versions.values())
        if not all(type(x) in (int, float) and 0 <= x < math.inf for x in shares) or not sum(shares):
            raise ConfigError(f"versions: expected shares above 0, got {versions}")
        steps = {label: self._step_of(label) for label in versions}
        for step in steps.values():
            if self.config.engine == "onnx" and not self.run.weights_path(step, self.kept_as).exists():
                there = ", ".join(map(str, self.run.versions(self.kept_as)[-8:])) or "none"
                raise CheckpointError(f"{self.run.path}: the weights of step {step} are missing. There are: {there}.")
        return {"versions": versions, "steps": steps, "pinned": pin}

    def _steps(self, wish: Mapping[str, Any]) -> dict[str, int]:
        """Steps by label; where the training is followed its newest ones, for those of the wish may be gone."""
        if wish["pinned"] is not None or not self.config.follow:
            return dict(wish["steps"])
        return {k: self._step_of(k) if k in ("latest", "best") else step for k, step in wish["steps"].items()}

    def open(self, wish: Mapping[str, Any] | None = None) -> None:
        """Load the first versions; fails with what is wrong with the run."""
        wish = wish or self.wish({"pin": None})
        steps = self._steps(wish)
        first = next(iter(steps.values()))
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
        for label, share in wish["versions"].items():
            self.arms.append(self._use(Arm(label, share), steps[label]))
        self.pinned = wish["pinned"]

    def sample(self) -> tuple[Any, ...]:
        """What one tick may ask the model."""
        obs = tree.map(np.asarray, self.spec.observation.sample(np.random.default_rng(0)))
        mask = self.observations.all_legal if self.masked else None
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
        policy = self._engines.policy
        return ActingEngine(engine, policy, self.config.act, self.masked, self.recurrent, self.with_outputs)

    def _use(self, arm: Arm, step: int, engine: ActingEngine | None = None) -> Arm:
        if step not in self.host.steps:
            self.host.add_version(step, engine or self._acting(step))
        arm.step = step
        self._marks.set(self.run, self.kept_as, step)
        if arm.label == "latest" and (not self.served or self.served[-1] != step):
            self.served.append(step)
            del self.served[:-_REMEMBERED]
        return arm

    def let_go(self, steps: Iterable[int]) -> None:
        """These versions are not served any more."""
        for step in steps:
            self._marks.remove(self.run, self.kept_as, step)

    def unused(self) -> list[int]:
        """Versions in memory that no session is given any more; the one before the newest stays, for rolling back."""
        wanted = {arm.step for arm in self.arms}
        if self.served[-1:] and self.served[-1] in wanted:
            wanted.update(self.served[-2:-1])
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
        """Serve what `wish` made."""
        arms = []
        for label, step in self._steps(wish).items():
            engine = None
            if step not in self.host.steps:
                engine = await asyncio.get_running_loop().run_in_executor(None, self._acting, step)
            arms.append(self._use(Arm(label, wish["versions"][label]), step, engine))
        self.arms, self.pinned = arms, wish["pinned"]

    def previous(self) -> int:
        """The version before the one that is served."""
        now = self.arms[0].step
        before = self.served[: self.served.index(now)] if now in self.served else []
        before = before or [s for s in self.run.versions(self.kept_as) if s < now]
        if not before:
            raise ConfigError(f"{self.name}: there is no version before step {now}")
        return before[-1]

    # observations in, actions out

    def read(self, message: TickMessage) -> tuple[Any, ...]:
        """A tick's message as what the model is asked."""
        obs, mask = self.observations.read(message.obs, message.action_mask)
        if not self.masked:
            return (obs,)
        return obs, self.observations.all_legal if mask is None else mask

    def graph(self) -> Path:
        return self._engines.graph()

    def zero_state(self) -> Any:
        return self._initial

    def random_action(self, mask: np.ndarray | None = None) -> Any:
        outputs: dict[str, Any] = {}
        for rule in ("dist", "q"):  # a Policy of one's own reads what it likes
            outputs |= act.make_rule(rule).blank(self.layout, 1, self._rng)
        tick = Tick(None, mask=None if mask is None else mask[None])
        return plain(tree.index(self._engines.policy.act(outputs, tick, self._rng, SAMPLE, TRAINED)[0], 0))


class Marks:
    """Asks trainings not to delete the versions that are served. The marks that the workers of one service set are written down in a file
    of theirs, so that whoever ends last removes them, and none that somebody else has set."""

    def __init__(self, ledger: Path | None = None):
        self._ledger = ledger
        self._ours: set[tuple[str, str, int]] = set()  # run, model, step
        if ledger is not None and ledger.exists():
            self._ours = {(run, name, step) for run, name, step in map(json.loads, ledger.read_text().splitlines())}

    def set(self, run: RunDir, name: str, step: int) -> None:
        mark = (str(run.path), name, step)
        try:
            if mark in self._ours or not run.is_protected(step, name):
                run.protect(step, name)
                self._ours.add(mark)
                if self._ledger is not None:
                    with self._ledger.open("a") as f:
                        f.write(json.dumps(mark) + "\n")
        except (BrayError, OSError) as e:  # a run that can only be read is served all the same
            logger.debug("%s: %s", run.path, e)

    def remove(self, run: RunDir, name: str, step: int) -> None:
        mark = (str(run.path), name, step)
        if mark in self._ours:
            self._ours.discard(mark)
            with contextlib.suppress(OSError):
                run.protect(step, name, on=False)

    def remove_all(self) -> None:
        for run, name, step in list(self._ours):
            self.remove(RunDir(run), name, step)


class _Engines:
    """Makes the engines of a run's versions."""

    def __init__(self, model: ServedModel):
        self.model, self.config = model, model.config
        self._graph: Any = None
        saved = model.policy
        rule = saved.get("rule")
        self.policy: act.Policy = act.Policy(model.layout)
        if rule is not None:
            settings = saved.get("settings", {"epsilon": saved.get("epsilon", 0.0)} if rule == "q" else {})
            self.policy = act.Policy(model.layout, act.make_rule(rule, settings))
        elif self.config.engine != "torch":
            why = f"the Policy of {saved.get('algorithm')} acts in a way of its own, which needs its code"
            if "rule" not in saved:
                why = "its policy.json is of an older Bray and does not say how actions are chosen"
            raise ConfigError(f"{model.run.path}: {why}: serve it with --engine torch")

    def make(self, step: int) -> Any:
        run, name = self.model.run, self.config.engine
        if name == "torch":
            return self._torch(step)
        from bray.inference.onnx_engine import OnnxEngine

        if name == "int8":
            engine = OnnxEngine(run.models / self.model.kept_as / "model.int8.onnx", self.config.threads)
            if engine.step != step:
                raise ConfigError(
                    f"{run.path}: the int8 model is of step {engine.step}, step {step} was asked for: `bray export {run.path} --quantize --checkpoint {step}`"
                )
            return engine
        if self._graph is None:
            self._graph = OnnxEngine(self.graph(), self.config.threads)
        return self._graph.with_weights(run.load_weights(step, self.model.kept_as), step)

    def graph(self) -> Path:
        """The run's graph.onnx, exported if it is not there yet."""
        path = self.model.run.models / self.model.kept_as / "graph.onnx"
        if not path.exists():
            export_graph(self.model.run.path)
        return path

    def _torch(self, step: int) -> Any:
        if self.model.torch_engine is None:
            raise ConfigError("--engine torch needs what training needs: pip install 'bray[train]'")
        engine, policy = self.model.torch_engine(self.model.run.path, step)
        self.policy = policy  # also where there is a rule: it may draw inputs that an exported graph does not have
        return engine


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


class TickMessage(msgspec.Struct):
    """What a game sends each tick."""

    obs: Any
    action_mask: Any = None
    terminated: Any = False
    truncated: Any = False
    """The observation is its episode's last; the next tick starts another."""


class Opening(msgspec.Struct):
    """What a game may say at the start of a session (an empty body says nothing)."""

    model: str | None = None
    version: int | None = None


_read_tick = msgspec.json.Decoder(TickMessage).decode
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
        self.place = place_of(session)
        self.state = self.model.zero_state()
        self.last: Any = None
        reply = _write({"model": self.model.name, "version": self._step()})
        if self.service.config.record is not None and session:  # else a stateless request
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
            message = _read_tick(data)
            asked = model.read(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise malformed(f'expected a JSON object {{"obs": ...}}, got {_short(data)} ({e})') from None
        except DataError as e:
            raise malformed(str(e)) from None
        step = self._step()
        if self.state is None:
            out = await model.host.forward(*asked, step=step)
        else:
            out = await model.host.forward(*asked, self.state, step=step)
            over = message.terminated or message.truncated  # the next tick starts an episode, and remembers nothing
            # a row of the batch would keep the whole batch alive
            self.state = model.zero_state() if over else tree.map(np.copy, out["state"])
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
            mask = None
            with contextlib.suppress(msgspec.DecodeError, DataError):
                mask = self.model.read(_read_tick(data))[1] if self.model.masked else None
            action = self.model.random_action(mask)
        elif wish == "last":
            action = self.last
        return _write({"action": action, "version": self._step(), "fallback": True})


def place_of(session: str) -> float:
    """A session's place in [0, 1), by its name: which version's share it falls into."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "big") / 2**64


def _short(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + ("..." if len(data) > 60 else "")


# --- the service ----------------------------------------------------------------------------------------------------------


class Service:
    """The models of one worker, the wishes of the admin port, and the task that follows new checkpoints."""

    def __init__(
        self,
        runs: Mapping[str, str | Path],
        config: ModelService,
        shared: Path | None = None,
        torch_engine: TorchEngine | None = None,
        configs: Mapping[str, ModelService] | None = None,
        with_outputs: bool = False,
    ):
        """
        shared        a directory of the workers of one service, as `open_shared` prepares it
        configs       of models that have settings of their own
        with_outputs  as ActingEngine says
        """
        self.config = config
        own = configs or {}
        self._file = None if shared is None else shared / _WISHES
        marks = Marks(None if shared is None else shared / _MARKS)
        self.models = {
            name: ServedModel(name, path, own.get(name, config), torch_engine, marks, with_outputs)
            for name, path in runs.items()
        }
        self._wishes = self._read_wishes()
        self._said: dict[str, str] = {}  # the last mistake of each model
        self._unused: dict[tuple[str, int], int] = {}  # how often a version was seen unused in a row
        self._changing = asyncio.Lock()  # one change of what is served at a time
        for name, model in self.models.items():
            model.open(self._wishes.get(name))

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
        server.numbers.append(lambda: self.numbers(server.worker))
        task = asyncio.get_running_loop().create_task(self._follow())

        async def close() -> None:
            task.cancel()
            for model in self.models.values():
                await model.host.close()
                model.let_go(model.host.steps)

        server.closers.append(close)

    def numbers(self, worker: int = 0) -> Numbers:
        out: Numbers = {}
        for model in self.models.values():
            name = model.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            for key, value in model.host.numbers().items():
                # the workers' numbers are added up: those whose sum means nothing say whose they are
                own = f',worker="{worker}"' if key in ("step", "versions", "forward_seconds") else ""
                out[f'bray_model_{key}{{model="{name}"{own}}}'] = value
        return out

    async def _follow(self) -> None:
        """Look for new checkpoints and new wishes; a mistake is logged once and what was served goes on."""
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
        wish = self._read_wishes().get(model.name)
        if wish is not None and wish != self._wishes.get(model.name):
            await model.change(wish)
            self._wishes[model.name] = wish
        await model.look()
        unused = [(model.name, step) for step in model.unused()]
        for key in [k for k in self._unused if k[0] == model.name and k not in unused]:
            del self._unused[key]
        for key in unused:  # sessions may be in the middle of a tick with it
            self._unused[key] = self._unused.get(key, 0) + 1
            if self._unused[key] > 5:
                del self._unused[key]
                await model.host.drop_version(key[1])
                model.let_go([key[1]])

    def _read_wishes(self) -> dict[str, Any]:
        """What the workers were told last, whichever of them was."""
        if self._file is None or not self._file.exists():
            return {}
        return json.loads(self._file.read_bytes())

    async def admin(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """GET /models; POST /models/NAME with {"pin": STEP | null}, {"rollback": true} or {"versions": {LABEL: SHARE}}."""
        name = path.removeprefix("/models").strip("/")
        try:
            if method == "POST":
                model = self.model(name or None)
                asked = json.loads(body)
                async with self._changing:
                    wish = model.wish(asked if isinstance(asked, dict) else {})
                    await model.change(wish)
                    self._wishes[model.name] = wish
                    if self._file is not None:
                        write_atomic(self._file, json.dumps({**self._read_wishes(), model.name: wish}))
            elif method != "GET":
                return 405, "text/plain", b"expected GET or POST\n"
        except (BrayError, ValueError) as e:
            return 400, "application/json", json.dumps({"error": "malformed", "message": str(e)}).encode()
        return 200, "application/json", json.dumps([self._about(m) for m in self.models.values()]).encode()

    def _about(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "run": str(model.run.path),
            "env": model.spec.id,
            "algorithm": model.policy.get("algorithm"),
            "engine": model.config.engine,
            "versions": [{"label": a.label, "step": a.step, "share": a.share} for a in model.arms],
            "pinned": model.pinned,
            "loaded": sorted(model.host.steps),
        }


_WISHES, _MARKS = "wishes.json", "marks"


def open_shared(shared: Path, models: Mapping[str, ServedModel]) -> None:
    """Prepare the directory of the workers of one service. What is wrong is said once, before there are workers; and all begin with the same
    versions, also one that comes later."""
    wishes = {name: model.wish({"pin": None}) for name, model in models.items()}
    write_atomic(shared / _WISHES, json.dumps(wishes))
    marks = Marks(shared / _MARKS)
    for name, model in models.items():
        for step in wishes[name]["steps"].values() if not model.config.follow else ():
            marks.set(model.run, model.kept_as, step)
        if model.config.engine == "onnx":
            model.graph()


def close_shared(shared: Path) -> None:
    """The service is over: trainings may delete what it served."""
    Marks(shared / _MARKS).remove_all()
    (shared / _MARKS).unlink(missing_ok=True)


def serve(
    runs: Mapping[str, str | Path],
    service: ServiceConfig,
    model: ModelService,
    torch_engine: TorchEngine | None = None,
    on_ready: Ready | None = None,
) -> int:
    """Serve runs until a signal; returns the exit code. Every worker makes its own `Service`, after it was forked."""
    boxes: dict[str, Service] = {}

    def make_actor() -> PolicyActor:
        return boxes["here"].make_actor()

    async def prepare(server: Server) -> None:
        boxes["here"] = Service(runs, model, shared, torch_engine)
        await boxes["here"].prepare(server)

    with tempfile.TemporaryDirectory(prefix="bray-serve-") as directory:
        shared = Path(directory)
        try:
            open_shared(shared, {name: ServedModel(name, path, model, torch_engine) for name, path in runs.items()})
            return serve_workers(make_actor, service, on_ready=on_ready, prepare=prepare)
        finally:
            close_shared(shared)


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
