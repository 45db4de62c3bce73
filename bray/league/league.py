"""A league: players, the matches that are drawn for them, and what is known from results."""

from __future__ import annotations

import json
import logging
import math
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bray.errors import ConfigError, DataError, UnknownName
from bray.league.log import OUTSIDE, Event, ResultLog
from bray.league.payoff import DRAW, LOSS, WIN, Payoff, Record
from bray.league.players import Player, PlayerRef, kind_of
from bray.league.ratings import TAU, Rating, fit_elo, rate

logger = logging.getLogger("bray")

_BLOCK = 1 << 20  # numbers of matches that a league which starts from its log alone leaves out


class _Refs(list[PlayerRef]):
    """Players with their numbers: looking these up takes longer than all else in drawing one of ten thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = array("q")

    def note(self, ref: PlayerRef, number: int) -> None:
        self.append(ref)
        self.numbers.append(number)

    def forget(self, ref: PlayerRef) -> None:
        if ref in self:
            del self.numbers[self.index(ref)]
            self.remove(ref)


class Job(NamedTuple):
    """A match to play."""

    id: int
    seats: dict[str, PlayerRef]


class Snapshot(NamedTuple):
    """A player that is to be frozen: a copy of its weights is kept under this name."""

    ref: PlayerRef
    anew: bool = False
    """Whether the player then goes on from the weights that it began with."""


class Rank(NamedTuple):
    """How strong a player is."""

    ref: PlayerRef
    games: int
    """Against other players."""
    rating: Rating
    elo: float
    """Of all results together, in which newer games weigh more."""
    half: float
    """Half the width of its 95 % interval."""


class Match(Protocol):
    """A match that has ended."""

    @property
    def id(self) -> int | None: ...

    @property
    def returns(self) -> Mapping[str, float]:
        """Of each agent."""

    @property
    def length(self) -> int: ...


class Outcome(NamedTuple):
    """The plainest Match."""

    id: int | None
    returns: Mapping[str, float]
    length: int = 0


class League:
    """See the package. `agents`: those of the game. Players draw their matches in turn; in each, one seat is the
    player's, and each other seat draws an opponent.

    A match of a player with itself is logged and says nothing of its strength. Where a player has several seats, the
    mean of their returns counts; of more than two players each pair is compared."""

    def __init__(
        self,
        players: Mapping[str, Player],
        agents: Sequence[str],
        log: ResultLog | None = None,
        decay: float = 0.99,
        min_games: int = 8,
    ):
        self.players, self.agents, self.log = dict(players), list(agents), log or ResultLog()
        self._payoff = decay, min_games
        self._forget()

    def _forget(self) -> None:
        self.payoff = Payoff(*self._payoff)
        self.refs: list[PlayerRef] = []
        """All players that were ever seen, by their numbers."""
        self.ratings: list[Rating] = []
        """Of each of them."""
        self.lineage: list[Event] = []
        """Snapshots, oldest first."""
        self.opponents: dict[str, Rating] = {}
        """Of those that evaluations have played."""
        self.refused: Counter[str] = Counter()
        """Results that did not count, by reason."""
        self._numbers: dict[PlayerRef, int] = {}
        self._by_name: dict[str, int] = {}
        self._past: dict[str, _Refs] = {}
        self._all_past = _Refs()
        self._frozen_at = dict.fromkeys(self.players, 0)  # steps of the last snapshot
        self._open: dict[int, Job] = {}
        self._again: deque[dict[str, PlayerRef]] = deque()
        self._next = 0
        for name in self.players:
            self._number(PlayerRef(name))

    # --- standings ----------------------------------------------------------------------------------------------------

    def learning(self, kind: str = "") -> list[PlayerRef]:
        return [p.me for p in self.players.values() if not kind or kind_of(p) == kind]

    def past(self, side: str = "") -> Sequence[PlayerRef]:
        return self._past.get(side, []) if side else self._all_past

    def win_rates(self, player: PlayerRef, others: Sequence[PlayerRef]) -> np.ndarray:
        numbers = self._numbers
        of = others.numbers if isinstance(others, _Refs) else list(map(numbers.__getitem__, others))
        return self.payoff.win_rates(numbers[player], of)

    def record(self, player: PlayerRef, other: PlayerRef) -> Record:
        return self.payoff.record(self._numbers[player], self._numbers[other])

    def rating(self, player: PlayerRef) -> Rating:
        return self.ratings[self._numbers[player]]

    def sides(self) -> list[str]:
        """The names of players that learn, or have learnt."""
        return [ref.side for ref in self.refs if ref.step is None]

    def ranking(self, most: int = 200) -> list[Rank]:
        """All players, the strongest first. Elo ratings are fitted to the results of the `most` that have played most
        games; NaN for the others."""
        games = [self.payoff.games(number) for number in range(len(self.refs))]
        fitted = sorted((n for n, played in enumerate(games) if played), key=lambda n: -games[n])[:most]
        points = np.zeros((len(fitted), len(fitted)))
        for i, a in enumerate(fitted):
            for j, b in enumerate(fitted):
                record = self.payoff.record(a, b)
                points[i, j] = record.wins + 0.5 * record.draws
        elo, half = fit_elo(points) if fitted else (np.zeros(0), np.zeros(0))
        at = {number: i for i, number in enumerate(fitted)}
        ranks = [
            Rank(ref, games[n], self.ratings[n], *((elo[at[n]], half[at[n]]) if n in at else (math.nan, math.nan)))
            for n, ref in enumerate(self.refs)
        ]
        return sorted(ranks, key=lambda rank: -rank.rating.mu)

    def find(self, name: str) -> PlayerRef:
        """A player by its name, of all that were ever seen."""
        ref = PlayerRef.parse(name)
        if ref not in self._numbers:
            raise UnknownName("player", name, map(str, self.refs))
        return ref

    # --- matches ------------------------------------------------------------------------------------------------------

    def job(self, rng: np.random.Generator) -> Job:
        """The next match: one that was given back, or a new one."""
        if not self.players or len(self.agents) < 2:
            raise ConfigError(
                f"a league needs a player that learns and a game of at least two agents, got {list(self.players)} and "
                f"agents {self.agents}"
            )
        if self._again:
            seats = self._again.popleft()
        else:
            names = list(self.players)
            player = self.players[names[self._next % len(names)]]
            mine = self.agents[int(rng.integers(len(self.agents)))]
            seats = {a: player.me if a == mine else self._opponent(player, rng) for a in self.agents}
        return self.open(seats)

    def open(self, seats: Mapping[str, PlayerRef]) -> Job:
        """A match of these players: it is under way from now on."""
        job = self._open[self._next] = Job(self._next, dict(seats))
        self._next += 1
        return job

    def _opponent(self, player: Player, rng: np.random.Generator) -> PlayerRef:
        ref = player.opponent(self, rng)
        if ref not in self._numbers:
            raise ConfigError(
                f"player {player.name} ({type(player).__name__}) chose the opponent {ref}, which the league does not "
                f"know: choose one of `learning()` or `past()`, {', '.join(map(str, self.refs[:6]))}, ..."
            )
        return ref

    def give_back(self, id: int) -> None:
        """Nobody plays this match any more, because its worker is gone: somebody else is to, under another number."""
        if (job := self._open.pop(id, None)) is not None:
            self._again.append(job.seats)

    def void(self, id: int, why: str) -> None:
        """This match was played and has no result: that is counted by reason, and it is given back."""
        if id in self._open:
            self._refuse(why, Outcome(id, {}))
            self.give_back(id)

    def drop(self, id: int) -> None:
        """This match is not played at all."""
        self._open.pop(id, None)

    def seats(self, id: int) -> dict[str, PlayerRef]:
        """Of a match that is under way."""
        return self._open[id].seats

    def finish(self, match: Match) -> bool:
        """Whether this result counts: of a match that was drawn, once, with a return of each agent."""
        job = self._open.get(match.id) if isinstance(match.id, int) else None
        if job is None:
            return self._refuse("nobody drew this match, or its result has counted", match)
        returns = {agent: float(x) for agent, x in match.returns.items()}
        if returns.keys() != job.seats.keys() or not all(map(math.isfinite, returns.values())):
            return self._refuse("expected a finite return of each of its agents", match)
        del self._open[job.id]
        self._write(Event(id=job.id, seats=_plain(job.seats), returns=returns, length=int(match.length)))
        return True

    def _refuse(self, why: str, match: Match) -> bool:
        self.refused[why] += 1
        if self.refused[why] == 1:
            logger.warning("result of match %s does not count: %s. Others like it are counted only", match.id, why)
        return False

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def trained(self, player: str, steps: int, version: int) -> Snapshot | None:
        """A player has trained so many steps, and its weights have this version: whether it is to be frozen now. Its
        first snapshot is the one that it begins with."""
        if player not in self.players:
            raise UnknownName("player", player, self.players)
        one, ref = self.players[player], PlayerRef(player, version)
        first = not self._past.get(player)
        if ref in self._numbers or not (first or one.is_trained(self, steps - self._frozen_at[player])):
            return None
        anew = not first and one.starts_anew(np.random.default_rng([zlib.crc32(player.encode()), version]))
        self._write(Event(snapshot=str(ref), steps=steps, anew=anew))
        return Snapshot(ref, anew)

    def evaluated(self, player: PlayerRef, opponent: str, outcomes: Sequence[int]) -> None:
        """Games of an evaluation against somebody who is none of the players. They rate the opponent by the player,
        whose own rating they leave as it is."""
        self._write(Event(opponent=opponent, player=str(player), outcomes=list(outcomes)))

    def lost(self, ref: PlayerRef) -> None:
        """The weights of a snapshot are gone: nobody plays it any more. Its results stay."""
        if ref in self._past.get(ref.side, ()):
            logger.warning("the weights of player %s are gone: it is left out of the matches from now on", ref)
            self._write(Event(lost=str(ref)))

    # --- the fold -----------------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> None:
        self.log.add(event)
        self._fold(event)

    def _fold(self, event: Event) -> None:
        """What an event changes; the same when it happens and when it is read again."""
        if event.id is not None:
            self._fold_result(event)
        elif event.snapshot is not None:
            ref = PlayerRef.parse(event.snapshot)
            self._frozen_at[ref.side] = event.steps
            number = self._number(ref)
            for refs in (self._past.setdefault(ref.side, _Refs()), self._all_past):
                refs.note(ref, number)
            self.lineage.append(event)
            self.ratings[number] = Rating(self.ratings[self._number(PlayerRef(ref.side))].mu)
        elif event.lost is not None:
            ref = PlayerRef.parse(event.lost)
            for refs in (self._past.get(ref.side, _Refs()), self._all_past):
                refs.forget(ref)
        elif event.opponent is not None:
            mine, theirs = self.rating(PlayerRef.parse(event.player)), self.opponents.get(event.opponent, Rating())
            for outcome in event.outcomes:
                theirs = rate(theirs, mine, -outcome, (0.0, 0.0))[0]
            self.opponents[event.opponent] = theirs

    def _fold_result(self, event: Event) -> None:
        seats, returns = event.seats, event.returns
        if seats.keys() != returns.keys():
            raise DataError(f"{self.log.path}: match {event.id} has returns of other agents than it seats")
        if len(seats) == 2:  # most games
            (one, a), (other, b) = seats.items()
            if a != b:
                self._meet(a, b, returns[one] - returns[other])
            return
        of: dict[str, list[float]] = {}
        for agent, name in seats.items():
            of.setdefault(name, []).append(returns[agent])
        means = [(name, math.fsum(xs) / len(xs)) for name, xs in of.items()]
        for i, (a, x) in enumerate(means):
            for b, y in means[i + 1 :]:
                self._meet(a, b, x - y)

    def _meet(self, a: str, b: str, by: float) -> None:
        outcome = DRAW if abs(by) < 1e-9 else WIN if by > 0 else LOSS
        named, ratings = self._by_name, self.ratings
        i = named[a] if a in named else self._number(PlayerRef.parse(a))
        j = named[b] if b in named else self._number(PlayerRef.parse(b))
        self.payoff.add(i, j, outcome)
        changes = (0.0 if "@" in a else TAU, 0.0 if "@" in b else TAU)
        ratings[i], ratings[j] = rate(ratings[i], ratings[j], outcome, changes)

    def _number(self, ref: PlayerRef) -> int:
        if ref not in self._numbers:
            self._numbers[ref] = self._by_name[str(ref)] = len(self.refs)
            self.refs.append(ref)
            self.ratings.append(Rating())
        return self._numbers[ref]

    # --- state --------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Beside the log, as plain data: how far that is known, and the matches that are under way."""
        return {
            "offset": self.log.sync(),
            "next": self._next,
            "open": json.dumps([[job.id, _plain(job.seats)] for job in self._open.values()]),
            "again": json.dumps([_plain(seats) for seats in self._again]),
            "refused": dict(self.refused),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """As it was when `get_state` was called; what was logged since is cut off with the next result."""
        self._read(int(state["offset"]))
        self._next = int(state["next"])
        self._open = {int(id): Job(int(id), _seats(seats)) for id, seats in json.loads(state["open"])}
        self._again = deque(map(_seats, json.loads(state["again"])))
        self.refused.update({str(why): int(n) for why, n in state["refused"].items()})

    def restart(self, state: Mapping[str, Any] | None = None) -> None:
        """From the log: all results that are in it count. Results of matches that were under way are refused. `state`:
        as `get_state` gave it before; those of its matches that have no result are given back."""
        seen = self._read(None)
        if state is not None:
            open_ = [seats for id, seats in json.loads(state["open"]) if int(id) not in seen]
            self._again = deque(map(_seats, [*json.loads(state["again"]), *open_]))
            self._next = max(self._next, (int(state["next"]) // _BLOCK + 1) * _BLOCK)
            self.refused.update({str(why): int(n) for why, n in state["refused"].items()})

    def _read(self, until: int | None) -> set[int]:
        """Fold the log; the matches whose results are in it."""
        self._forget()
        seen: set[int] = set()
        for event in self.log.read(until):
            if event.id is not None:
                if event.id in seen:
                    raise DataError(f"{self.log.path}: the result of match {event.id} is in it twice")
                seen.add(event.id)
            self._fold(event)
        self._next = (max(seen, default=-1) // _BLOCK + 1) * _BLOCK
        return seen

    def read_outside(self, log: ResultLog) -> None:
        """Results of players from outside: each says how strong those are. The players of the league keep the ratings
        that games among themselves have given them."""
        own = list(self.ratings)
        for event in log.read():
            self._fold_result(event)
            for number in {self._by_name[name] for name in event.seats.values()}:
                if number < len(own):
                    self.ratings[number] = own[number]


def _plain(seats: Mapping[str, PlayerRef]) -> dict[str, str]:
    return {agent: str(ref) for agent, ref in seats.items()}


def _seats(seats: Mapping[str, str]) -> dict[str, PlayerRef]:
    return {agent: PlayerRef.parse(name) for agent, name in seats.items()}


def read_league(path: str | Path, outside: bool = False) -> League:
    """What a log says, to look at: nobody draws matches. `outside`: with players that were added to those of the
    run."""
    if Path(path).parent.is_symlink():
        raise DataError(f"{Path(path).parent} is a link: only plain files inside of a run directory are read")
    if not Path(path).exists():
        raise DataError(f"{path} is missing: it is written where a policy plays itself (bray train --self-play)")
    league = League({}, (), ResultLog(path))
    league.restart()
    if outside:
        league.read_outside(ResultLog(Path(path).with_name(OUTSIDE)))
    return league
