"""What keeps one live game from spoiling what is learnt from all of them (`live.fair`).

    share      Of a batch, a game has about twice as many rows as the game in the middle at most, or 1/32 of it where
               that is more. The rest waits for the next batch; where too much of it waits, its oldest rows are dropped.
    rewards    They are cut to ten times the largest one of the game in the middle, though never below 10 in size. A
               piece that has more than a quarter of its rewards beyond that is left out.
    returns    An episode whose return such rewards cannot make is not counted. The score of checkpoints is the median
               over games.

In the middle: half of the games have more, half have less; so what holds is what most games do, from three games on.
Two or fewer have nothing to be compared with. A session counts for as much as it has played, up to 512 rows. Those of
32 ticks or fewer have no vote where three others have. The share of a session that has ended passes on to one that
begins: who starts session after session has as many shares as sessions at once. A share that is new belongs to all such
sessions together for its first 32 rows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bray.data.experience import Counts
from bray.data.piece import Piece

ACTIVE_S = 10.0
"""A game that has sent nothing for this long is not waited for, and not compared with."""
PATIENCE_S = 5.0
"""Nor is anybody held up when no game has brought a row that may be taken for this long."""
SHARE = 32
"""Of a batch, a game may have this part in any case."""
FASTER = 2.0
TIMES = 10.0
USUAL = 10.0
"""Rewards up to this size are never cut: what docs/games.md asks games to keep to."""
NEW = -1
"""The game of all sessions whose share is new."""
BEGINS = 32
"""Rows after which it is their own; rows of a session that has just begun."""
HEARD_S = 60.0
"""Games that have sent nothing for this long say nothing about what is usual, while others do."""
MOST_VOTES = 512
EPISODES = 10
_COMPARED = 3  # games, at least
_REMEMBERED = 1024  # games
_SESSIONS = 10_000


class Taken(NamedTuple):
    """A piece of a game that is to be learnt from, or None where only counts are left of it."""

    piece: Piece | None
    counts: Counts
    game: int


@dataclass
class _Game:
    waiting: deque[tuple[Piece, Counts]] = field(default_factory=deque)
    rows: int = 0
    """That wait."""
    taken: int = 0
    """Rows in the batch that is being filled."""
    seen: float = 0.0
    """When its last piece came."""
    lost: Counts | None = None
    """Of pieces that were dropped: what happened in them is counted all the same."""


@dataclass
class _Place:
    game: int
    rows: int = 0
    """That its sessions have sent, all together."""


class Places:
    """Which game a session is: one after the other at the same place are the same game."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, _Place] = OrderedDict()  # by stream
        self._free: deque[_Place] = deque(maxlen=_REMEMBERED)

    def game(self, stream: int, rows: int) -> int:
        """Of a session that sends `rows` rows now."""
        place = self._of.get(stream)
        if place is None:
            # the last one that was left: who ends a session to start another gets the same one back
            place = self._of[stream] = self._free.pop() if self._free else _Place(stream)
            if len(self._of) > _SESSIONS:
                self._of.popitem(last=False)
        place.rows += rows
        return place.game if place.rows > BEGINS else NEW

    def leave(self, stream: int) -> int:
        """A session has ended; the game that it was."""
        place = self._of.pop(stream, None)
        if place is None:
            return stream
        self._free.append(place)
        return place.game


class FairQueue:
    """Pieces of games that wait for the learner. Whoever uses it from two threads holds a lock.

    rows   of a batch
    fair   whether shares are bounded; else pieces are taken as they are there
    """

    def __init__(self, rows: int, fair: bool = True, clock: Callable[[], float] = time.monotonic):
        self.rows, self._fair, self._clock = rows, fair, clock
        self._games: dict[int, _Game] = {}
        self.taken = 0
        """Rows in the batch that is being filled."""
        self._open = False  # whether that batch takes what there is
        self._last = clock()  # when something was taken
        self.waiting = 0
        """Rows."""

    def full(self, key: int, length: int) -> bool:
        """Whether rows are dropped if a piece of this game comes now."""
        game = self._games.get(key)
        mine = 0 if game is None else game.rows
        return self.waiting + length > 2 * self.rows or (mine > 0 and mine + length > self._room(length))

    def _room(self, length: int) -> float:
        """Rows of one game that may wait."""
        if not self._fair:
            return math.inf
        return max(2 * self.rows / min(SHARE, max(1, len(self._active()))), 4 * length)

    def put(self, key: int, piece: Piece, counts: Counts) -> None:
        """`key`: of the game."""
        game = self._games.setdefault(key, _Game())
        game.seen = self._clock()
        while game.waiting and game.rows + piece.length > self._room(piece.length):
            self._drop(game)
        while self.waiting and self.waiting + piece.length > 2 * self.rows:
            # of those who have most, who had their turn last
            self._drop(max(reversed(self._games.values()), key=lambda game: game.rows))
        game.waiting.append((piece, counts))
        game.rows += piece.length
        self.waiting += piece.length

    def _drop(self, game: _Game) -> None:
        """The oldest piece of a game."""
        piece, counts = game.waiting.popleft()
        game.rows -= piece.length
        self.waiting -= piece.length
        lost = add_up(game.lost or Counts(), counts)
        game.lost = lost._replace(dropped=lost.dropped + piece.length)

    def take(self) -> list[Taken]:
        """What may be learnt from now, a batch at most: a piece of each game in turn, as long as they may have more."""
        if self.taken >= self.rows:
            self.next_batch()
        out = [Taken(None, game.lost, key) for key, game in self._games.items() if game.lost is not None]
        for game in self._games.values():
            game.lost = None
        now = self._clock()
        if not self.waiting:
            self._last = now
        self._open = self._open or now - self._last > PATIENCE_S
        more = True
        while more and self.waiting:
            more = False
            for key, game in list(self._games.items()):
                if game.waiting and self._may(game):
                    self._games[key] = self._games.pop(key)  # whose turn it was comes last
                    piece, counts = game.waiting.popleft()
                    game.rows -= piece.length
                    self.waiting -= piece.length
                    game.taken += piece.length
                    self.taken += piece.length
                    out.append(Taken(piece, counts, key))
                    self._last = now
                    more = self.taken < self.rows
                    if not more:
                        break
        self._forget()
        return out

    def _may(self, game: _Game) -> bool:
        if not self._fair or self._open or game.taken < max(1, self.rows // SHARE):
            return True
        active = self._active()
        return len(active) < _COMPARED or game.taken < FASTER * statistics.median(g.taken for g in active)

    def _active(self) -> list[_Game]:
        since = self._clock() - ACTIVE_S
        return [game for game in self._games.values() if game.seen >= since]

    def next_batch(self) -> None:
        """From here on rows are for the next one."""
        self.taken, self._open = 0, False
        for game in self._games.values():
            game.taken = 0

    def end(self, key: int) -> None:
        """A game is over: it is not waited for."""
        if (game := self._games.get(key)) is not None:
            game.seen = -math.inf

    def give_back(self, key: int, length: int) -> None:
        """So many rows that were taken are not in the batch."""
        self.taken -= length
        if (game := self._games.get(key)) is not None:
            game.taken -= length

    def _forget(self) -> None:
        since = self._clock() - ACTIVE_S
        gone = [key for key, g in self._games.items() if g.seen < since and not g.waiting and g.lost is None]
        for key in gone:
            del self._games[key]


class Votes:
    """How much each game counts for, by what it has played."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._rows: OrderedDict[int, tuple[int, float]] = OrderedDict()  # and when it was last heard of, newest last

    def heard(self, game: int, rows: int) -> None:
        before, _ = self._rows.pop(game, (0, 0.0))
        self._rows[game] = min(MOST_VOTES, before + rows), self._clock()
        while len(self._rows) > _REMEMBERED:
            self._rows.popitem(last=False)

    def median(self, numbers: Mapping[int, float], least: int = 1) -> float | None:
        """Of the games that have a number and were heard of lately, or at all where none was; of those that have played
        for a while, if they are three. None where these are fewer than `least`."""
        since = self._clock() - HEARD_S
        known = [(number, *self._rows[game]) for game, number in numbers.items() if game in self._rows]
        voters = [(number, rows) for number, rows, seen in known if seen >= since] or [k[:2] for k in known]
        if len(old := [voter for voter in voters if voter[1] > BEGINS]) >= _COMPARED:
            voters = old
        if len(voters) < max(1, least):
            return None
        ordered, rows = zip(*sorted(voters), strict=True)
        at = np.searchsorted(np.cumsum(rows), sum(rows) / 2)
        return float(ordered[int(at)])


class RewardLimit:
    """Cuts the rewards of games to a size that most of them keep to."""

    def __init__(self, most: float, votes: Votes):
        """most: `reward_range`, beyond which nothing comes"""
        self._most, self._votes = most, votes
        self._sizes: OrderedDict[int, float] = OrderedDict()  # of the largest reward of each game
        self._limit, self._pieces = most, 0
        self.cut = 0
        """Rewards that were cut."""
        self.left_out = 0
        """Rows of pieces that were left out."""

    @property
    def now(self) -> float:
        """The limit; with many games it is looked at now and then."""
        self._pieces -= 1
        if self._pieces < 0:
            self._limit, self._pieces = self._compare(), len(self._sizes) // 16
        return self._limit

    def _compare(self) -> float:
        sizes = {game: size for game, size in self._sizes.items() if size}  # one without a reward so far says nothing
        middle = self._votes.median(sizes, _COMPARED)
        return self._most if middle is None else min(self._most, max(USUAL, TIMES * middle))

    def size(self, game: int) -> float:
        """Of the largest reward of a game."""
        return self._sizes.get(game, 0.0)

    def passes(self, piece: Piece, game: int) -> bool:
        """Whether a piece is learnt from. Its rewards are cut where they are."""
        sizes = np.abs(piece.reward)
        largest = float(sizes.max())
        self._sizes[game] = max(largest, self._sizes.pop(game, 0.0))
        while len(self._sizes) > _REMEMBERED:
            self._sizes.popitem(last=False)
        if largest <= USUAL or largest <= (limit := self.now):
            return True
        beyond = int(np.count_nonzero(sizes > limit))
        if 4 * beyond > piece.reward.size:
            self.left_out += piece.length
            return False
        self.cut += beyond
        np.clip(piece.reward, -limit, limit, out=piece.reward)
        return True

    def possible(self, episode: tuple[float, int]) -> bool:
        """Whether rewards up to the limit can make the return of an episode (return, length)."""
        total, length = episode
        return abs(total) <= USUAL * length or abs(total) <= self.now * length


class GameReturns:
    """The returns of episodes, by game: what one says of itself counts as one."""

    def __init__(self, votes: Votes):
        self._votes = votes
        self._games: OrderedDict[int, deque[float]] = OrderedDict()

    def add(self, game: int, returns: list[float]) -> None:
        mine = self._games.pop(game, None) or deque(maxlen=EPISODES)
        mine.extend(returns)
        self._games[game] = mine
        while len(self._games) > _REMEMBERED:
            self._games.popitem(last=False)

    @property
    def median(self) -> float | None:
        """Over games, of the mean of the last episodes of each; None before an episode has ended."""
        return self._votes.median({game: math.fsum(x) / len(x) for game, x in self._games.items()})


def add_up(a: Counts, b: Counts) -> Counts:
    return Counts(a.env_steps + b.env_steps, a.episodes + b.episodes, a.dropped + b.dropped)
