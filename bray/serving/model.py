"""A run directory being served: its versions (checkpoints) in memory, their shares of the sessions, and the engines
that answer.

What is served is made of files alone: `spec.json`, `policy.json`, `models/default/graph.onnx` and a version's weights.
Neither torch nor the environment's package is needed, unless the engine is torch or the graph has to be exported first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bray import act, tree
from bray.act import SAMPLE, TRAINED, ActingEngine, Tick, search_with
from bray.act.asking import is_asked, with_return
from bray.act.feed import FileFeed
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, how_to_install
from bray.inference.batcher import Batcher
from bray.inference.host import totals
from bray.rundir import RunDir
from bray.serving.bounds import Bounds, OutsideCount
from bray.serving.config import AnswerConfig, ServedModelConfig
from bray.serving.graph import export_graph
from bray.serving.values import Observations, plain, reader
from bray.spec import MOVES, EnvSpec, Space

logger = logging.getLogger("bray.serving")

TorchEngine = Callable[[Path, int], tuple[Any, Any]]
"""(run directory, step) -> (engine, the algorithm's Policy): what `experiment.torch_engine` does, for those who have
torch."""
ReadRatings = Callable[[RunDir], Mapping[str, float]]
"""run directory -> how strong its versions are, by their labels, where it knows."""
_MOST_RATED = 64  # versions in memory because somebody wished for their rating
_REMEMBERED = 64  # versions that were served before: a training may be followed for months


class Version(Batcher):
    """A version in memory: an engine behind a batcher."""

    def __init__(self, engine: ActingEngine, step: int, outside: OutsideCount | None = None, **options: Any):
        forward = engine.forward if outside is None else partial(outside.then, engine.forward)
        super().__init__(forward, step=partial(int, step), **options)
        self.engine, self.step = engine, step


def checked_observations(
    name: str, spec: EnvSpec, config: AnswerConfig, largest: float = math.inf
) -> tuple[Observations, OutsideCount | None]:
    """What reads the ticks of a model, and what counts those outside of the bounds of their space, by `check_obs`.
    `largest`: numbers beyond that size are refused."""
    bounds = Bounds(spec.observation) if config.check_obs != "off" else None
    observations = Observations(spec, config.max_json, bounds if config.check_obs == "refuse" else None, largest)
    return observations, OutsideCount(name, bounds) if config.check_obs == "count" and bounds else None


def refuse_fallback(fallback: Any, spec: EnvSpec, name: str) -> None:
    if fallback is not None and fallback not in ("last", "random"):
        try:
            reader(spec.action, "fallback")(fallback)
        except DataError as e:
            raise ConfigError(f"{name}: {e}") from None


def random_action(policy: act.Policy, rng: np.random.Generator, mask: np.ndarray | None = None) -> Any:
    """A legal action, drawn without a look at the game."""
    outputs: dict[str, Any] = {}
    for rule in ("dist", "q"):  # a Policy of one's own reads what it likes
        outputs |= act.make_rule(rule).blank(policy.layout, 1, rng)
    tick = Tick(None, mask=None if mask is None else mask[None])
    return plain(tree.index(policy.act(outputs, tick, rng, SAMPLE, TRAINED)[0], 0))


@dataclass
class TrafficShare:
    """A version among those that share a model's sessions."""

    label: str
    """latest, best or a step."""
    share: float
    version: Version


class ServedModel:
    """One run directory being served."""

    strict = learns = False  # as an ActingModel says; games may send keys that we do not know, and nobody learns
    reward_range = math.inf
    warm = True

    def make_rows(self) -> None:
        """Nobody learns from its sessions."""

    def __init__(
        self,
        name: str,
        path: str | Path,
        config: ServedModelConfig,
        torch_engine: TorchEngine | None = None,
        locks: VersionLocks | None = None,
        with_outputs: bool = False,
        read_ratings: ReadRatings | None = None,
    ):
        """with_outputs: as ActingEngine says."""
        self.name, self.config, self.torch_engine, self.with_outputs = name, config, torch_engine, with_outputs
        self.run = RunDir.open(path)
        self.run.refuse_old_launch()
        self.spec = EnvSpec.from_json(self.run.read_json("spec.json"))
        self.about = self.run.read_policy()
        self.weights_name: str = self.about.get("model", "default")
        """The name under which the run keeps its weights."""
        self.policy = self._make_policy()
        self.recurrent = bool(self.about.get("recurrent"))
        self._zeros = _zeros(self.about.get("state"), self.run.path) if self.recurrent else None
        self.initial_state = self._zeros
        if config.target_return is not None:
            self.initial_state = self.asked_for(config.target_return)
        self.observations, self._outside = checked_observations(name, self.spec, config)
        self.masked = self.observations.masked
        self.versions: dict[int, Version] = {}
        """In memory, by step."""
        self.shares: list[TrafficShare] = []
        self.pinned: int | None = None
        # by label: those whose step changes while a training runs
        self._feeds = {label: FileFeed(self.run, self.weights_name, label) for label in ("latest", "best")}
        self._before: list[int] = []  # steps that were served before this one, in order, for rolling back
        self._locks = locks or VersionLocks()
        self._read_ratings, self._ratings = read_ratings, dict[str, float]()
        self._rated: dict[int, None] = {}  # versions that were wished for by rating, the newest wish last
        self._rating = asyncio.Lock()
        self.players: Sequence[ServedModel] = (self,)
        """Of its league: those who may answer where a game wishes for a rating."""
        self._graph: Any = None
        self._dropped = {"batches": 0, "samples": 0}  # counts of versions that are gone
        self._rng = np.random.default_rng()
        refuse_fallback(config.fallback, self.spec, name)

    def asked_for(self, target_return: float) -> Any:
        """What a session remembers at the start of an episode in which it plays for this return."""
        if not is_asked(self._zeros):
            raise ConfigError(
                f"{self.name} does not play for a return that it is asked for (target_return={target_return:g}): that "
                "is for runs of DT"
            )
        return with_return(self._zeros, target_return)

    # --- which versions -----------------------------------------------------------------------------------------------

    def desired_versions(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be served, with the steps that `latest` and `best` mean now, so that all workers serve the same
        ones.
        `{"pin": STEP}`, `{"pin": null}` (back to the versions of the start), `{"rollback": true}` or
        `{"versions": {LABEL: SHARE}}`."""
        what, value = next(iter(asked.items())) if len(asked) == 1 else (None, None)
        pin, before = None, self._before
        versions = self.config.versions or {"latest": 1.0}
        if what == "rollback" and value is True:
            pin, before = self._previous()
        elif what == "pin" and type(value) is int:
            pin = value
        elif what == "versions" and isinstance(value, dict):
            versions = {str(k): v for k, v in value.items()}
        elif not (what == "pin" and value is None):
            raise ConfigError(
                'expected {"pin": STEP}, {"pin": null}, {"rollback": true} or {"versions": {"latest": 0.9, "best": '
                "0.1}}"
            )
        if pin is not None:
            versions = {str(pin): 1.0}
        shares = list(versions.values())
        if not all(type(x) in (int, float) and 0 <= x < math.inf for x in shares) or not sum(shares):
            raise ConfigError(f"versions: expected shares above 0, got {versions}")
        steps = {label: self._step_of(label) for label in versions}
        for step in steps.values():
            if self.config.engine == "onnx" and not self.run.weights_path(step, self.weights_name).exists():
                there = ", ".join(map(str, self.run.versions(self.weights_name)[-8:])) or "none"
                raise CheckpointError(f"{self.run.path}: the weights of step {step} are missing. There are: {there}.")
        step = next(iter(steps.values()))
        if what == "pin" and pin is None:  # taken back, as if it had never been
            before = before[: before.index(step)] if step in before else before
        elif what != "rollback":
            before = self._followed_by(step)
        return {"versions": versions, "steps": steps, "pinned": pin, "before": before}

    def _step_of(self, label: str) -> int:
        if label in self._feeds:
            return self._feeds[label].step()
        if not label.isdigit():
            raise ConfigError(f"versions: expected latest, best or a step, got {label!r}")
        return int(label)

    def _steps(self, desired: Mapping[str, Any]) -> dict[str, int]:
        """Steps by label; where the training is followed its newest ones, since those of `desired` may be gone."""
        if desired["pinned"] is not None or not self.config.follow:
            return dict(desired["steps"])
        return {label: self._step_of(label) for label in desired["steps"]}

    def _previous(self) -> tuple[int, list[int]]:
        """The version that was served before this one, and those before that; where nothing was, the next older one of
        the run."""
        now, there = self.shares[0].version.step, self.run.versions(self.weights_name)
        before = [step for step in self._before if step in there]
        if not before:
            before = [step for step in there if step < now][-1:]
        if not before:
            raise ConfigError(f"{self.name}: there is no version before step {now}")
        return before[-1], before[:-1]

    def _followed_by(self, step: int) -> list[int]:
        """What will have been served before, once `step` is served."""
        now = self.shares[0].version.step if self.shares else step
        return self._before if step == now else [*self._before, now][-_REMEMBERED:]

    # --- loading and dropping them ------------------------------------------------------------------------------------

    def open(self, desired: Mapping[str, Any] | None = None) -> None:
        """Load the first versions; fails with what is wrong with the run."""
        desired = desired or self.desired_versions({"pin": None})
        for label, step in self._steps(desired).items():
            if step not in self.versions:
                version = self._load(step)
                if not self.versions:  # what is wrong shows now, not at the first tick
                    self._try_out(version)
                self.versions[step] = version
            self.shares.append(self._use(label, desired["versions"][label], self.versions[step]))
        self.pinned, self._before = desired["pinned"], desired["before"]

    def _try_out(self, version: Version) -> None:
        try:
            version.call(*tree.map(lambda x: x[None], self.sample()), batch=True)
        except BrayError:
            raise
        except Exception as e:  # ONNX Runtime and numpy have many for a graph that is not that of this policy
            raise CheckpointError(
                f"{self.run.path}: its model does not answer an observation of its spec.json ({type(e).__name__}: "
                f"{str(e)[:200]}): `bray export {self.run.path}` writes its graph again"
            ) from e

    async def change(self, desired: Mapping[str, Any]) -> None:
        """Serve what `desired_versions` made."""
        self.shares = [
            self._use(label, desired["versions"][label], await self._loaded(step))
            for label, step in self._steps(desired).items()
        ]
        self.pinned, self._before = desired["pinned"], desired["before"]

    async def follow(self) -> None:
        """Go on to new checkpoints, where that is wanted."""
        if self.pinned is not None or not self.config.follow:
            return
        for i, share in enumerate(self.shares):
            step = self._feeds[share.label].mark if share.label in self._feeds else None
            if step is not None and step != share.version.step:
                version = await self._loaded(step)
                if i == 0:
                    self._before = self._followed_by(step)
                self.shares[i] = self._use(share.label, share.share, version)
                logger.info("%s: now serving %s = step %d", self.name, share.label, step)

    async def nearest(self, rating: float, own: bool = False) -> tuple[ServedModel, int, float]:
        """The player whose rating is nearest to this one: its model, its version, which is loaded, and its rating.
        own: of this model alone."""
        players = (self,) if own else self.players
        known = [(one, *rated) for one in players for rated in (await one.ratings()).items()]
        if not known:
            raise ConfigError(f"{self.name} has no players with a rating: a run that plays itself has them")
        model, label, found = min(known, key=lambda player: abs(player[2] - rating))
        return model, await model._wished(label), found

    async def ratings(self) -> Mapping[str, float]:
        """The rating of each version, by its label. Read once, at the first question: that may take seconds."""
        async with self._rating:
            if not self._ratings and self._read_ratings is not None:
                read = asyncio.get_running_loop().run_in_executor(None, self._read_ratings, self.run)
                self._ratings = dict(await read)
        return self._ratings

    async def _wished(self, label: str) -> int:
        """The step of a version that a session wished for by its rating: it is loaded, and stays for a while."""
        async with self._rating:
            step = self._step_of(label)
            await self._loaded(step)
        self._rated.pop(step, None)
        self._rated[step] = None
        for old in list(self._rated)[:-_MOST_RATED]:
            del self._rated[old]
        return step

    async def _loaded(self, step: int) -> Version:
        if step not in self.versions:
            self.versions[step] = await asyncio.get_running_loop().run_in_executor(None, self._load, step)
        return self.versions[step]

    def _load(self, step: int) -> Version:
        c, engine = self.config, self._make_engine(step)
        return Version(
            ActingEngine(engine, self.policy, c.act, self.masked, self.recurrent, self.with_outputs),
            step,
            outside=self._outside,
            max_batch_size=c.max_batch_size,
            max_wait=c.max_wait_s,
            max_queue=c.max_queue,
            template=self.sample(),
        )

    def _use(self, label: str, share: float, version: Version) -> TrafficShare:
        self._locks.set(self.run, self.weights_name, version.step)
        return TrafficShare(label, share, version)

    def unused(self) -> list[int]:
        """Versions in memory that no session is given any more; the one that was served before stays, for rolling
        back."""
        wanted = {share.version.step for share in self.shares} | set(self._before[-1:]) | self._rated.keys()
        return [step for step in self.versions if step not in wanted]

    async def drop(self, step: int) -> None:
        """Let go of a version: its running batch is answered, callers who still wait for it get an error."""
        version = self.versions.pop(step)
        for key in self._dropped:
            self._dropped[key] += version.stats[key]
        await version.close()
        self._locks.remove(self.run, self.weights_name, step)

    async def close(self) -> None:
        for step in list(self.versions):
            await self.drop(step)

    def numbers(self) -> dict[str, float]:
        """The figures of all versions together, for a metrics page."""
        return {
            "step": self.shares[0].version.step,
            **totals([version.stats for version in self.versions.values()], self._dropped),
            "outside_total": 0 if self._outside is None else self._outside.total,
        }

    # --- engines ------------------------------------------------------------------------------------------------------

    def sample(self) -> tuple[Any, ...]:
        """What one tick may ask the model."""
        obs: Any = tree.map(np.asarray, self.spec.observation.sample(np.random.default_rng(0)))
        if self.spec.preprocessing.get("moves"):
            obs[MOVES].fill(-1)  # others are of no game
        mask = self.observations.all_legal if self.masked else None
        return tuple(x for x in (obs, mask, self.initial_state) if x is not None)

    def random_action(self, mask: np.ndarray | None = None) -> Any:
        return random_action(self.policy, self._rng, mask)

    def _make_policy(self) -> act.Policy:
        rule = self.about.get("rule")
        if rule is not None:
            settings = self.about.get("settings", {"epsilon": self.about.get("epsilon", 0.0)} if rule == "q" else {})
            return act.Policy(self.spec.layout, act.make_rule(rule, settings))
        if self.config.engine != "torch":
            why = f"the Policy of {self.about.get('algorithm')} acts in a way of its own, which needs its code"
            if "rule" not in self.about:
                why = "its policy.json is of an older Bray and does not say how actions are chosen"
            raise ConfigError(f"{self.run.path}: {why}: serve it with --engine torch")
        return act.Policy(self.spec.layout)  # until the algorithm's own is loaded, with the engine

    def _make_engine(self, step: int) -> Any:
        run, name = self.run, self.config.engine
        if name == "torch":
            if self.torch_engine is None:
                raise ConfigError(f"--engine torch needs what training needs: {how_to_install('train')}")
            # the algorithm's own Policy, also where there is a rule: it may draw inputs that an exported graph does not
            # have
            engine, self.policy = self.torch_engine(run.path, step)
            if (simulations := self.config.simulations) is not None:
                search_with(self.policy, simulations, f"{run.path}, {self.about.get('algorithm')}")
            return engine
        if self.config.simulations is not None:
            raise ConfigError(f"simulations={self.config.simulations} needs --engine torch, which has the search")
        if name == "int8":
            engine = self._read_graph("model.int8.onnx")
            if engine.step != step:
                raise ConfigError(
                    f"{run.path}: the int8 model is of step {engine.step}, step {step} was asked for: `bray export "
                    f"{run.path} --quantize --checkpoint {step}`"
                )
            return engine
        if self._graph is None:
            self.prepare_graph()
            self._graph = self._read_graph("graph.onnx")
        return self._graph.with_weights(self._feeds["latest"].read(step).weights, step)

    def prepare_graph(self) -> None:
        """Export the run's graph.onnx if it is not there yet."""
        if not (self.run.models / self.weights_name / "graph.onnx").exists():
            export_graph(self.run.path, self.config.trust)

    def _read_graph(self, name: str) -> Any:
        """An ONNX file of the run, as it was written and answering as it did then."""
        from bray.inference.onnx_engine import OnnxEngine

        file = self.run.models / self.weights_name / name
        return OnnxEngine(file.relative_to(self.run.path), self.config.threads, self.run.path)


def _zeros(state: Any, path: Path) -> Any:
    if state is None:
        raise CheckpointError(
            f"{path}/policy.json does not say what the model remembers: train with this version of Bray, or load and "
            "save it"
        )
    if isinstance(state, dict) and state.keys() == {"shape", "dtype"} and isinstance(state["dtype"], str):
        space = Space.from_json({"kind": "box", **state})  # checks type and size
        return np.zeros(space.shape, space.dtype)
    if isinstance(state, dict):
        return {k: _zeros(v, path) for k, v in state.items()}
    if not isinstance(state, (list, tuple)):
        raise CheckpointError(f"{path}/policy.json: expected the shapes of what the model remembers, got {state!r:.60}")
    return tuple(_zeros(v, path) for v in state)


class VersionLocks:
    """Asks trainings not to delete the versions that are served. The locks that the workers of one service set are
    written to a file of theirs, so that whoever ends last removes them, and none that somebody else has set."""

    def __init__(self, ledger: Path | None = None):
        self._ledger = ledger
        self._ours: set[tuple[str, str, int]] = set()  # run, model, step
        if ledger is not None and ledger.exists():
            self._ours = {(run, name, step) for run, name, step in map(json.loads, ledger.read_text().splitlines())}

    def set(self, run: RunDir, name: str, step: int) -> None:
        lock = (str(run.path), name, step)
        try:
            if lock in self._ours or not run.is_protected(step, name):
                run.protect(step, name)
                self._ours.add(lock)
                if self._ledger is not None:
                    with self._ledger.open("a") as f:
                        f.write(json.dumps(lock) + "\n")
        except (BrayError, OSError) as e:  # a run that can only be read is served all the same
            logger.debug("%s: %s", run.path, e)

    def remove(self, run: RunDir, name: str, step: int) -> None:
        lock = (str(run.path), name, step)
        if lock in self._ours:
            self._ours.discard(lock)
            with contextlib.suppress(OSError):
                run.protect(step, name, on=False)

    def remove_all(self) -> None:
        for run, name, step in list(self._ours):
            self.remove(RunDir.open(run), name, step)
