"""A launch file as a checked Graph: named components, the edges between them, and the file and line of every mistake.

    graph = load("template/sl_rl.yaml", ["model1.max_batch_size=8"], mode="deploy")
    graph.components["actor1"].settings.port        # typed, with defaults
    graph.config["network"]["state_space"]          # the plain file, as agents and builders get it

Nothing of the user's is imported here, and neither torch nor Ray: a wrong file is refused at once, with all its
mistakes.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bray.config import ConfigSource, load_yaml, parse_assignments, resolve
from bray.config.declare import options
from bray.errors import ConfigError, UnknownName, did_you_mean
from bray.launch.settings import KINDS, ActorSettings, LaunchSettings, TrainerSettings
from bray.remote.buffer.options import without_store
from bray.remote.trainer.options import gpus_of_rank

_TOP = tuple(f.name for f in dataclasses.fields(LaunchSettings))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")  # it becomes part of file names and of the names in the cluster


class Edge(NamedTuple):
    """Something flows from one component to another."""

    tail: str
    head: str
    what: str


@dataclass(frozen=True)
class Component:
    """One named component of the file."""

    name: str
    kind: str
    settings: Any
    """The dataclass of its kind (`bray.launch.settings`), with defaults filled in."""
    extra: dict[str, Any]
    """Keys of the user's own."""
    place: str
    """`file:line` of its name."""


class ResourceRequest(NamedTuple):
    """What a component asks of the cluster."""

    name: str
    processes: int
    cpus: float
    gpus: float
    memory: int
    """In MB."""
    where: str


@dataclass(frozen=True)
class Graph:
    """A run that can be started."""

    path: Path
    settings: LaunchSettings
    config: dict[str, Any]
    """The whole file, with what the command line changed: what agents and builders get."""
    components: dict[str, Component]
    """Those that exist in this mode."""
    absent: dict[str, str]
    """Those that do not, and why."""
    edges: tuple[Edge, ...]
    notes: tuple[str, ...]
    """What is allowed and looks like a mistake."""
    sources: tuple[ConfigSource, ...] = field(repr=False)

    def of_kind(self, kind: str) -> dict[str, Component]:
        """The components of a kind, in the order of the file."""
        return {name: c for name, c in self.components.items() if c.kind == kind}

    def where(self, *key: str) -> str:
        """`file:line` of a key, or `key=value on the command line`."""
        return _where(self.sources, key)

    def resources(self) -> list[ResourceRequest]:
        """What each component asks for, in the order of the file. Components without processes of their own ask for
        nothing."""
        return [ask for c in self.components.values() if (ask := _ask(c)) is not None]


def total(asks: Iterable[ResourceRequest]) -> ResourceRequest:
    """The sum."""
    asks = list(asks)
    columns = list(zip(*(a[1:5] for a in asks), strict=True)) or [()] * 4
    processes, cpus, gpus, memory = (sum(column) for column in columns)
    return ResourceRequest("sum", processes, cpus, gpus, memory, "")


def _ask(c: Component) -> ResourceRequest | None:
    s = c.settings
    cpus, gpus, memory, where = 0.0, 0.0, 0, "any node"
    if c.kind == "model":
        n, cpus, gpus, memory = s.num_workers, s.cpus_per_worker, s.gpus_per_worker, s.memory_per_worker
        if s.local_mode or not n:
            n, where = 0, "in whoever asks it"
    elif c.kind == "source":
        n = s.num_workers or 1
    elif c.kind == "buffer":
        n = min(s.num_workers, s.size)  # none without room for a batch
    elif c.kind == "actor":
        n, cpus, memory = s.num_workers, s.cpus_per_worker, s.memory_per_worker
        where = f"each node, port {s.port or 'any'}"
    elif c.kind == "trainer":
        n, cpus = s.num_workers or 1, 1.0 if s.cpus_per_worker is None else s.cpus_per_worker
        gpus = gpus_of_rank(s.use_gpu, s.gpus_per_worker)
    else:
        return None
    return ResourceRequest(c.name, n, n * cpus, n * gpus, n * memory, where)


# --- reading ----------------------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    mode: str | None = None,
    trial: str | None = None,
    project: str | None = None,
    trust: bool = False,
) -> Graph:
    """Read and check a launch file. `overrides` are `component.key=value`; all mistakes are in one ConfigError."""
    flags = {"mode": mode, "trial": trial, "project": project, "trust": trust or None}
    given = {k: v for k, v in flags.items() if v is not None}
    typed = ConfigSource("command line", given, texts={(k,): f"--{k} {v}" for k, v in given.items()})
    return _Reader(Path(path), (load_yaml(path), parse_assignments(overrides), typed)).read()


class _Reader:
    """One file on its way to a Graph; mistakes are collected."""

    def __init__(self, path: Path, sources: tuple[ConfigSource, ...]):
        self.path, self.sources = path, sources
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.kinds: dict[str, str | None] = {}  # of all components; None where it is wrong
        self.all: dict[str, Component] = {}  # those that could be read
        self.absent: dict[str, str] = {}
        self.deploys = False

    def read(self) -> Graph:
        top = self.read_top()
        config: dict[str, Any] = {}
        for source in self.sources:
            config = _merged(config, source.values)
        for name in [n for n in config if n not in _TOP]:
            self.read_component(name, config[name])
        edges = self.connect(config)
        if top is not None:
            self.leave_out(top.mode)
            self.deploys = top.mode == "deploy"
        present = {n: c for n, c in self.all.items() if n not in self.absent}
        edges = [e for e in edges if e.tail in present and e.head in present]
        self.check_present(present)
        if self.problems or top is None:
            raise self.error()
        self.note_unused(present, edges)
        config.update(dataclasses.asdict(top))
        return Graph(
            self.path, top, config, present, self.absent, tuple(edges), tuple(self.notes), self.sources
        )  # fmt: skip

    def error(self) -> ConfigError:
        """All mistakes, in the order of the file."""
        line = re.compile(re.escape(str(self.path)) + r":(\d+)")

        def order(text: str) -> int:
            found = line.search(text)
            return int(found[1]) if found else 1 << 30

        problems = sorted(dict.fromkeys(self.problems), key=order)
        if len(problems) == 1:
            return ConfigError(problems[0])
        error = ConfigError(f"{len(problems)} mistakes in {self.path}:\n  " + "\n  ".join(problems))
        error.problems = tuple(ConfigError(p) for p in problems)
        return error

    def where(self, *key: str) -> str:
        return _where(self.sources, key)

    def problem(self, key: Sequence[str], text: str) -> None:
        self.problems.append(f"{'.'.join(k for k in key if not k.isdigit())} ({self.where(*key)}): {text}")

    def read_top(self) -> LaunchSettings | None:
        """The keys that are no components."""
        file = self.sources[0]
        sources = [
            dataclasses.replace(s, values={k: v for k, v in s.values.items() if k in _TOP}) for s in self.sources
        ]
        for key in ("project", "trial"):
            if all(s.values.get(key) is None for s in sources):
                self.problems.append(
                    f"{file.name}: expected `{key}: NAME` at the top (or --{key} NAME); the run directory is "
                    "project/trial"
                )
                sources[0].values[key] = "-"
        return self.resolved("", LaunchSettings, sources)

    def resolved(self, section: str, cls: type, sources: Sequence[ConfigSource]) -> Any:
        """The dataclass, or None with the mistakes noted."""
        try:
            return resolve({section: cls}, sources, null_is_default=True)[section]
        except ConfigError as e:
            for problem in e.problems or (e,):
                text = re.sub(r"\bclass_\b", "class", str(problem).removeprefix("."))
                if missing := re.fullmatch(r"([\w.-]+)\.(\w+): expected .*, none was given", text):
                    key = missing[1].split(".")
                    text = f"{missing[1]} ({self.where(*key)}): expected `{missing[2]}: ...` under it"
                elif isinstance(problem, UnknownName):
                    text = self.unknown_key(cls, problem.name.split("."))
                self.problems.append(text)
            return None

    def unknown_key(self, cls: type, path: list[str]) -> str:
        """The nearest key of the same component. A section's own name would make all its keys look near."""
        *inside, leaf = path
        for part in inside[1:]:
            cls = next(a for a in typing.get_args(typing.get_type_hints(cls)[part]) if a is not type(None))
        if leaf in (gone := getattr(cls, "GONE", {})):
            return f"{'.'.join(path)} ({self.where(*path)}): {gone[leaf]}"
        hint = did_you_mean(leaf, [o.key for o in options(cls).values()], most=99)
        own = " Settings of your own belong in a `kind: config` component." if "Did you mean" not in hint else ""
        return f"unknown key {'.'.join([*inside, leaf])!r} ({self.where(*inside, leaf)}).{hint}{own}"

    def read_component(self, name: str, values: Any) -> None:
        file = self.sources[0]
        if name not in file.values:
            known = [*(n for n in file.values if n not in _TOP), *_TOP]
            typed = [text for s in self.sources for key, text in (s.texts or {}).items() if key[0] == name]
            self.problems.append(str(UnknownName("component", name, known, f"{typed[0]} on the command line")))
            return
        if not isinstance(file.values[name], dict):
            near = difflib.get_close_matches(name, _TOP, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Keys at the top: {', '.join(_TOP)}."
            self.problem((name,), f"expected a component ({name}: with `kind: ...` and its keys under it). {hint}")
            return
        if not isinstance(values, dict):
            self.problem((name,), f"it is a component: write {name}.KEY=VALUE")
            return
        if not _NAME.fullmatch(name):
            self.problem((name,), "expected a name of letters, digits, '_' and '-' that begins with a letter")
        kind = values.get("kind")
        self.kinds[name] = kind if kind in KINDS else None
        if kind is None:
            near = [k for k in values if difflib.get_close_matches(k, ["kind"])]
            hint = f" Did you mean that by {near[0]!r}?" if near else ""
            self.problem((name,), f"expected `kind: ...` under it: {', '.join(KINDS)}.{hint}")
        elif kind not in KINDS:
            self.problems.append(str(UnknownName("kind", str(kind), KINDS, f"{self.where(name, 'kind')}, {name}")))
        else:
            self.read_settings(name, kind, values)

    def read_settings(self, name: str, kind: str, values: dict[str, Any]) -> None:
        cls = KINDS[kind]
        declared = options(typing.cast(type, cls))
        known = {o.key for o in declared.values()}
        for field_name in values.keys() & (declared.keys() - known):  # `class_`, which is written `class`
            self.problems.append(self.unknown_key(cls, [name, field_name]))
        own = cls.FREE or (cls is ActorSettings and values.get("module") is not None)
        extra = {k: v for k, v in values.items() if own and k not in known and k != "kind"}
        if kind != "config":
            for key in extra:
                if near := difflib.get_close_matches(key, known, 1, 0.8):
                    self.notes.append(
                        f"{name}.{key} ({self.where(name, key)}) is taken as a key of your own; Bray's is {near[0]!r}"
                    )
        sources = []
        for source in self.sources:
            inner = source.values.get(name)
            if isinstance(inner, dict):
                kept = {k: v for k, v in inner.items() if k != "kind" and k not in extra}
                if kind == "buffer":
                    kept = without_store(kept)
                sources.append(ConfigSource(source.name, {name: kept}, source.lines, source.texts))
        settings = self.resolved(name, cls, sources)
        if settings is not None:
            self.all[name] = Component(name, kind, settings, extra, self.where(name))

    # --- edges --------------------------------------------------------------------------------------------------------

    def connect(self, config: Mapping[str, Any]) -> list[Edge]:
        """The edges; a name that is not there, or is something else, is a mistake. Names are read from the plain
        values, so that they are looked at even where other keys of a component are wrong."""
        edges = []

        def refs(kind: str, *key: str) -> list[str]:
            given = _get(config, key)
            places = [(*key, str(i)) for i in range(len(given))] if isinstance(given, list) else [key]
            out: list[str] = []
            for place, to in zip(places, given if isinstance(given, list) else [given], strict=True):
                if to in out:
                    self.problem(place, f"{to!r} is listed twice")
                elif isinstance(to, str) and self.refers(place, to, kind):
                    out.append(to)
            return out

        for name, kind in self.kinds.items():
            if kind in ("model", "agent", "trainer"):
                edges += [Edge(to, name, "algorithm") for to in refs("config", name, "algo")]
            if kind == "buffer":
                edges += [Edge(to, name, "fills") for to in refs("source", name, "sources")]
            elif kind == "agent":
                edges += [Edge(to, name, "answers") for to in refs("model", name, "model")]
                edges += [Edge(name, to, "pushes") for to in refs("buffer", name, "buffer")]
            elif kind == "actor":
                edges += [Edge(name, to, "ticks") for to in refs("agent", name, "agents")]
            elif kind == "trainer":
                shares = _shares(self.all[name].settings) if name in self.all else {}
                edges += [Edge(b, name, f"trains {shares.get(b, '')}".strip()) for b in refs("buffer", name, "buffers")]
                edges += [Edge(to, name, "evaluates") for to in refs("buffer", name, "eval", "buffer")]
                edges += [Edge(name, to, "publishes") for to in refs("model", name, "model")]
        return edges

    def refers(self, key: tuple[str, ...], to: str, kind: str) -> bool:
        """Whether `to` is a component of that kind (or one whose kind is a mistake of its own)."""
        if to in self.kinds:
            found = self.kinds[to]
            if found not in (kind, None):
                self.problem(key, f"expected {_a(kind)}, {to!r} is {_a(found)}{self.names_of(kind, to)}")
            return found in (kind, None)
        self.problem(key, f"there is no {kind} {to!r}{self.names_of(kind, to)}")
        return False

    def names_of(self, kind: str, name: str) -> str:
        names = [n for n, k in self.kinds.items() if k == kind]
        return "." + did_you_mean(name, names) if names else f"; the file has no {kind} at all"

    # --- which of them exist ------------------------------------------------------------------------------------------

    def leave_out(self, mode: str) -> None:
        """Components that do not exist in this mode."""
        for name, c in self.all.items():
            enable = c.settings.enable
            if enable is False:
                self.absent[name] = "enable: false"
            elif isinstance(enable, str) and enable != mode:
                self.absent[name] = f"enable: {enable}"
            elif c.kind == "trainer" and mode == "deploy":
                self.absent[name] = "deploy mode trains nothing"
        if mode == "deploy":
            read = set()
            for c in self.all.values():
                if c.kind == "trainer":
                    read |= {*c.settings.buffers, *([c.settings.eval.buffer] if c.settings.eval else [])}
            for name in read & self.all.keys() - self.absent.keys():
                if self.all[name].settings.enable is None:
                    self.absent[name] = "only trainers read it"
        used = {
            s for n, c in self.all.items() if c.kind == "buffer" and n not in self.absent for s in c.settings.sources
        }
        for name, c in self.all.items():
            if c.kind == "source" and name not in used:
                self.absent.setdefault(name, "no buffer reads it")

    def check_present(self, present: Mapping[str, Component]) -> None:
        """What must fit together in this mode."""
        ports: dict[int, str] = {}

        def needs(name: str, key: tuple[str, ...], to: str, advice: str) -> None:
            if to in self.absent:
                self.problem((name, *key), f"{to!r} does not exist in this mode ({self.absent[to]}). {advice}")

        for name, c in present.items():
            s = c.settings
            # a run directory says itself what its model is
            from_run = c.kind == "model" and self.deploys and isinstance(s.checkpoint, str)
            if c.kind in ("model", "trainer") and s.algo is None and not from_run:
                missing = [k for k in ("module", "class_") if hasattr(s, k) and getattr(s, k) is None]
                for key in missing:
                    self.problem(
                        (name,),
                        f"expected `{options(typing.cast(type, type(s)))[key].key}: ...` under it (or `algo: ...`)",
                    )
            if c.kind == "agent" and s.model is not None:
                needs(name, ("model",), s.model, "An agent needs its model wherever it acts: enable it there too.")
            elif c.kind == "actor":
                self.check_actor(c, ports)
            elif c.kind == "trainer":
                self.check_weights(c)
                needs(name, ("model",), s.model, "Enable it, or disable the trainer.")
                for i, buffer in enumerate(s.buffers):
                    needs(
                        name, ("buffers", str(i)), buffer, "Enable it, or take it (and its weight) out of this list."
                    )  # fmt: skip
                if s.eval is not None:
                    needs(name, ("eval", "buffer"), s.eval.buffer, "Enable it, or set eval to null.")

    def check_weights(self, c: Component) -> None:
        weights, buffers = c.settings.buffer_weights, c.settings.buffers
        if weights is None:
            return
        if len(weights) != len(buffers):
            self.problem(
                (c.name, "buffer_weights"),
                f"expected one weight for each of the {len(buffers)} buffers ({', '.join(buffers)}), got "
                f"{len(weights)}",
            )
        elif not sum(weights):
            self.problem((c.name, "buffer_weights"), "expected a weight above 0, all are 0")

    def check_actor(self, c: Component, ports: dict[int, str]) -> None:
        s: ActorSettings = c.settings
        agents = [a for a in s.agents if a not in self.absent]
        if s.module is not None and s.agents:
            self.problem((c.name, "agents"), "an actor has agents or a class of its own (module, class), not both")
        elif s.module is not None and s.class_ is None:
            self.problem((c.name, "module"), "expected `class: ...` beside it")
        elif s.module is None and not s.agents:
            self.problem((c.name,), "expected `agents: [...]` under it, or an Actor class of your own (module, class)")
        elif s.module is None and not agents:
            gone = ", ".join(f"{a} ({self.absent[a]})" for a in s.agents if a in self.absent)
            self.problem((c.name, "agents"), f"none of its agents exists in this mode: {gone}")
        for key in ("tick_input_proto", "tick_output_proto"):
            message = getattr(s, key)
            if s.serialize == "proto" and message is None:
                self.problem((c.name, "serialize"), f"serialize is proto: expected {key} with module and message")
            elif message is not None and (message.module is None) == (message.file is None):
                self.problem(
                    (c.name, key), "expected either `module: ...` (made by protoc) or `file: ...` (a .proto file)"
                )
        if s.port:
            for port, what in ((s.port, ""), (s.port + 1, " (the one after its own, for metrics)")):
                if port in ports:
                    self.problem(
                        (c.name, "port"),
                        f"port {port}{what} is {ports[port]}: choose one that is free, or 0 for any",
                    )
            place = self.where(c.name, "port")
            ports.setdefault(s.port, f"that of {c.name} too ({place})")
            ports.setdefault(s.port + 1, f"that of {c.name}'s metrics ({place})")

    def note_unused(self, present: Mapping[str, Component], edges: Sequence[Edge]) -> None:
        tails, heads = {e.tail for e in edges}, {e.head for e in edges}
        for name, c in present.items():
            if c.kind == "agent" and name not in heads:
                self.notes.append(f"{name} ({c.place}): no actor has this agent, so it does nothing")
            elif c.kind == "buffer" and name not in tails:
                self.notes.append(f"{name} ({c.place}): no trainer reads this buffer")
            elif c.kind == "actor" and c.settings.episode_save_interval and not self.dumps():
                self.notes.append(
                    f"{name}.episode_save_interval ({self.where(name, 'episode_save_interval')}): no episode is "
                    "saved, dump_state is not true"
                )

    def dumps(self) -> bool:
        return any(s.values.get("dump_state") is True for s in self.sources)


# --- small things -----------------------------------------------------------------------------------------------------


def _where(sources: Sequence[ConfigSource], key: Sequence[str]) -> str:
    """The place of a key: the last source that has it, or the nearest key around it."""
    for end in range(len(key), 0, -1):
        for source in reversed(sources):
            if tuple(key[:end]) in {**(source.lines or {}), **(source.texts or {})}:
                return source.where(tuple(key[:end]))
    return sources[0].name


def _get(values: Any, key: Sequence[str]) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _a(kind: str | None) -> str:
    return f"an {kind}" if kind in ("agent", "actor") else f"a {kind}"


def _merged(old: Any, new: Any) -> Any:
    """Plain data with newer data over it; dicts are merged, everything else is replaced."""
    if isinstance(new, dict):
        base = old if isinstance(old, dict) else {}
        return {**base, **{k: _merged(base.get(k), v) for k, v in new.items()}}
    return [_merged(None, v) for v in new] if isinstance(new, list) else new


def _shares(s: TrainerSettings) -> dict[str, str]:
    """buffer -> its part in per cent."""
    weights = s.buffer_weights
    if weights is None or len(weights) != len(s.buffers) or not sum(weights):
        return {}
    return {b: f"{100 * w / sum(weights):.3g} %" for b, w in zip(s.buffers, weights, strict=True)}
