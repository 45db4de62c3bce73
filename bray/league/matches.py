"""Matches that games elsewhere play. A game names its match, and each of its agents has a session of its own: at its
start it says which agent of which match it is, at its end how the match ended.

    join(match, agent)                     the first one draws the match; who decides for this agent
    leave(match, agent, returns, ticks)    the last one closes the match: its result counts where all agents were there,
                                           at least one said it, and none said another one

A match that is closed without a result is drawn again, under another number, for the next game that asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bray.errors import DataError, UnknownName
from bray.league.league import Job, Outcome
from bray.league.players import PlayerRef

_REMEMBERED = 10_000
"""Names of matches that are over."""
NOT_SAID = "none of its sessions said how it ended"
NOT_THERE = "an agent of it was never there"
DISAGREE = "its sessions disagree about how it ended"


class Drawing(Protocol):
    """What draws matches: a league whose players can play."""

    def draw(self) -> Job: ...

    def finish(self, job: Job, match: Any) -> bool:
        """Whether the result counts."""

    def void(self, job: Job, why: str) -> None:
        """The match has no result; it is drawn again."""


class Verdict(NamedTuple):
    """What has become of a match as a session of it left."""

    counts: bool | None
    """Whether its result counts; None: it is still played."""
    why: str = ""
    """Why not."""


class _Match:
    def __init__(self, job: Job):
        self.job, self.ticks = job, 0
        self.playing: set[str] = set()
        self.joined: set[str] = set()
        self.said: list[dict[str, float]] = []


class Matches:
    """Those that are being played, by the names that their games gave them. Not for several threads at once."""

    def __init__(self, league: Drawing, agents: Sequence[str]):
        self._league, self.agents = league, list(agents)
        self._open: dict[str, _Match] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def join(self, match: str, agent: str) -> tuple[int, PlayerRef]:
        """The number of the match, and who decides for this agent; DataError where nobody can."""
        if not match:
            raise DataError("expected the name of a match, got an empty one: all sessions of a game say the same one")
        if agent not in self.agents:
            raise UnknownName("agent", agent[:100], self.agents)
        if match in self._over:
            raise DataError(f"match {match[:100]!r} is over: give each match another name, a UUID is good")
        found = self._open.get(match)
        if found is None:
            found = self._open[match] = _Match(self._league.draw())
        if agent in found.joined:
            raise DataError(f"agent {agent!r} of match {match[:100]!r} has a session, or had one: one for each agent")
        found.joined.add(agent)
        found.playing.add(agent)
        return found.job.id, found.job.seats[agent]

    def returns(self, said: Any) -> dict[str, float]:
        """How a match ended, as a session said it: a finite return of each agent."""
        if isinstance(said, Mapping) and set(said) == set(self.agents):
            numbers = [x for x in said.values() if type(x) in (int, float) and abs(x) < math.inf]
            if len(numbers) == len(said):
                return {agent: float(said[agent]) for agent in self.agents}
        raise DataError(f"expected returns, a finite number for each of {', '.join(self.agents)}, got {said!r:.100}")

    def leave(self, match: str, agent: str, returns: Mapping[str, float] | None = None, ticks: int = 0) -> Verdict:
        """A session of a match has ended. Without `returns` it says nothing of the result."""
        found = self._open[match]
        found.playing.discard(agent)
        found.ticks = max(found.ticks, ticks)
        if returns is not None:
            found.said.append(dict(returns))
        if found.playing:
            return Verdict(None)
        del self._open[match]
        self._over[match] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        why = self._fault(found)
        if why:
            self._league.void(found.job, why)
            return Verdict(False, why)
        counts = self._league.finish(found.job, Outcome(found.job.id, found.said[0], found.ticks))
        return Verdict(counts, "" if counts else "the league does not know this match any more")

    def _fault(self, match: _Match) -> str:
        if len(match.joined) < len(self.agents):
            return NOT_THERE
        if not match.said:
            return NOT_SAID
        return DISAGREE if any(returns != match.said[0] for returns in match.said) else ""
