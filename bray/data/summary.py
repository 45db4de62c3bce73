"""What a data set holds, and which of its episodes to keep."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bray import tree
from bray.data.files import Episode
from bray.data.sources import DataSet
from bray.errors import ConfigError
from bray.spec import EnvSpec, Space

BINS = 20
"""Of the range of a continuous action."""
_EDGE = 0.01  # of a range, counted as its end


@dataclass
class Coverage:
    """Of one part of the action: how often each choice was taken, or each twentieth of the range."""

    name: str
    counts: np.ndarray
    labels: list[str]
    edges: int = 0
    """Actions at the ends of a range."""

    @property
    def unused(self) -> list[str]:
        return [label for label, count in zip(self.labels, self.counts, strict=True) if not count]


@dataclass
class Summary:
    """Numbers of the episodes that could be read."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    terminated: int = 0
    truncated: int = 0
    """By a time limit, or by the end of a file."""
    cut: int = 0
    """Episodes whose last step says neither."""
    duplicates: int = 0
    """Episodes that are the same, number for number, as an earlier one."""
    actions: list[Coverage] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ends(self) -> str:
        """Whether time limits can be told from terminations, in words."""
        over = f"{self.terminated:,} are over, {self.truncated:,} were cut by a limit"
        if self.cut:
            over += f", {self.cut:,} stop without saying why (read as cut)"
        longest = max(self.lengths, default=0)
        same = self.lengths.count(longest)
        if not self.truncated and same > max(1, len(self.lengths) // 20) and min(self.lengths) < longest:
            over += f"; {same:,} have exactly {longest:,} steps, the most: they may be time limits that are not marked"
        return over


def summarise(data: DataSet) -> Summary:
    """Read every episode once."""
    out, seen = Summary(notes=data.notes), set[bytes]()
    for episode in readable(data, out):
        out.returns.append(float(np.sum(episode["reward"], dtype=np.float64)))
        out.lengths.append(len(episode["reward"]))
        terminated, truncated = bool(episode["terminated"][-1]), bool(episode["truncated"][-1])
        out.terminated += terminated
        out.truncated += truncated and not terminated
        out.cut += not (terminated or truncated)
        if data.spec is not None:
            _count_actions(out, data.spec, episode["action"])
        digest = _digest(episode)
        out.duplicates += digest in seen
        seen.add(digest)
    return out


def readable(data: DataSet, summary: Summary | None = None) -> Iterator[Episode]:
    """The episodes that can be read; what is wrong with the others goes to `summary.broken`."""
    data.skip_broken = data.skip_broken or summary is not None
    yield from data
    if summary is not None:
        summary.broken = data.broken


def _digest(episode: Episode) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for x in tree.leaves([episode[name] for name in ("obs", "action", "reward")]):
        digest.update(np.ascontiguousarray(x).view(np.uint8).data)
    return digest.digest()


def _count_actions(out: Summary, spec: EnvSpec, action: Any) -> None:
    parts = list(_parts(spec.action, action, "action"))
    if not out.actions:
        out.actions = [Coverage(name, np.zeros(len(labels), np.int64), labels) for name, _, labels, _ in parts]
    for known, (_, numbers, labels, edges) in zip(out.actions, parts, strict=True):
        known.counts += np.bincount(numbers, minlength=len(labels))
        known.edges += edges


def _parts(space: Space, x: Any, name: str) -> Iterator[tuple[str, np.ndarray, list[str], int]]:
    """Of each part of an action: name, the bin of each step, what the bins are, how many lie at the ends."""
    if space.composite:
        for key, part in zip(space.keys, space.parts, strict=True):
            yield from _parts(part, x[key], f"{name}/{key}")
        return
    flat = np.asarray(x).reshape(len(x), -1)
    single = flat.shape[1] == 1
    for i in range(flat.shape[1]):
        column, called = flat[:, i], name if single else f"{name}[{i}]"
        if space.kind != "box":
            n, start = (space.n[i], space.start[i]) if space.n else (2, 0)
            yield called, (column - start).astype(np.int64), [str(start + k) for k in range(n)], 0
            continue
        low, high = (float(bound.reshape(-1)[i]) for bound in space.bounds())
        if not np.isfinite([low, high]).all():
            low, high = -1.0, 1.0  # what lies beyond counts to the last bin
        place = (column.astype(np.float64) - low) / (high - low)
        labels = [f"{low + (high - low) * k / BINS:g}" for k in range(BINS)]
        edges = int(np.count_nonzero((place < _EDGE) | (place > 1 - _EDGE)))
        yield called, np.clip((place * BINS).astype(np.int64), 0, BINS - 1), labels, edges


# --- filters ----------------------------------------------------------------------------------------------------------

FACTS: dict[str, Callable[[Episode], float]] = {
    "return": lambda e: float(np.sum(e["reward"], dtype=np.float64)),
    "length": lambda e: len(e["reward"]),
    "terminated": lambda e: float(e["terminated"][-1]),
    "truncated": lambda e: float(e["truncated"][-1]),
    "max_reward": lambda e: float(np.max(e["reward"])),
    "min_reward": lambda e: float(np.min(e["reward"])),
}
"""What a filter may ask of an episode."""
_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
}
_TERM = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<|=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


def parse_filter(text: str) -> Callable[[Episode], bool]:
    """`return > 100 and length <= 500 or terminated = 1`: `and` binds closer than `or`."""
    either = [[_term(term, text) for term in re.split(r"\band\b", part)] for part in re.split(r"\bor\b", text)]
    return lambda episode: any(all(holds(episode) for holds in all_of) for all_of in either)


def _term(term: str, text: str) -> Callable[[Episode], bool]:
    found = _TERM.fullmatch(term)
    try:
        if found is None or found[1] not in FACTS:
            raise ValueError
        fact, compare, number = FACTS[found[1]], _COMPARE[found[2]], float(found[3])
    except ValueError:
        raise ConfigError(
            f"--filter {text!r}: expected comparisons such as 'return > 100 and length <= 500', of "
            f"{', '.join(FACTS)}; got {term.strip()!r}"
        ) from None
    return lambda episode: bool(compare(fact(episode), number))
