"""Players that learn: against whom each plays, when it is frozen as a snapshot, and whether it then starts anew.

The kinds are those of AlphaStar's league (Vinyals et al. 2019), and plain self-play. One of your own derives from
`Player` and is named `module:Class`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from bray.errors import ConfigError, DataError, UnknownName
from bray.league.matchmaking import WEIGHTINGS, pfsp
from bray.named import load_named


class PlayerRef(NamedTuple):
    """A player as it is now, or as it was."""

    side: str
    step: int | None = None
    """The version of its weights; None: those that learn."""

    def __str__(self) -> str:
        return self.side if self.step is None else f"{self.side}@{self.step}"

    @staticmethod
    def parse(text: str) -> PlayerRef:
        side, at, step = text.partition("@")
        if not side or (at and not step.isdecimal()):
            raise DataError(f"expected a player as NAME or NAME@STEP, got {text!r}")
        return PlayerRef(side, int(step) if at else None)


class Standings(Protocol):
    """What a player may know of its league."""

    def learning(self, kind: str = "") -> list[PlayerRef]:
        """Players that learn, of this kind or of all, in the order in which they were named."""

    def past(self, side: str = "") -> Sequence[PlayerRef]:
        """Snapshots that may be played, of one player or of all, oldest first."""

    def win_rates(self, player: PlayerRef, others: Sequence[PlayerRef]) -> np.ndarray:
        """How often it wins against each of them; a half where too few games are known."""


def draw(
    league: Standings, me: PlayerRef, of: Sequence[PlayerRef], weighting: str, rng: np.random.Generator
) -> PlayerRef:
    """One of these, by how often `me` wins against each."""
    return _by_rates(of, league.win_rates(me, of), weighting, rng)


def _by_rates(of: Sequence[PlayerRef], rates: np.ndarray, weighting: str, rng: np.random.Generator) -> PlayerRef:
    return of[int(rng.choice(len(of), p=pfsp(rates, weighting)))]


def _one_of(of: Sequence[PlayerRef], rng: np.random.Generator) -> PlayerRef:
    return of[int(rng.integers(len(of)))]


@dataclass(frozen=True, kw_only=True)
class Player:
    """The contract. `opponent` is all that one of your own has to say."""

    name: str
    snapshot_every: int = 1_000_000
    """Steps of its training after which it is frozen at the earliest; after twice as many it is in any case."""
    strong: float = 0.7
    """Its win rate against each of its rivals from which it is frozen before that."""
    branches: Mapping[str, float] = field(default_factory=dict)
    """How often it chooses its opponent in which way, where it knows several."""

    def __post_init__(self) -> None:
        odds = self.branches.values()
        if self.branches and not (
            all(isinstance(p, (int, float)) and p >= 0 for p in odds) and math.isclose(sum(odds), 1.0, abs_tol=1e-6)
        ):
            raise ConfigError(
                f"player {self.name}: expected branches whose probabilities sum to 1, got {self.branches}"
            )
        if self.snapshot_every < 1 or not 0 <= self.strong <= 1:
            raise ConfigError(
                f"player {self.name}: expected snapshot_every of at least 1 and strong from 0 to 1, got "
                f"{self.snapshot_every} and {self.strong}"
            )

    @property
    def me(self) -> PlayerRef:
        return PlayerRef(self.name)

    def opponent(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        raise NotImplementedError

    def rivals(self, league: Standings) -> Sequence[PlayerRef]:
        """Whom it has to beat to be frozen early."""
        return league.past()

    def is_trained(self, league: Standings, steps: int) -> bool:
        """Whether it is to be frozen, so many steps after the last time."""
        if steps < self.snapshot_every or steps >= 2 * self.snapshot_every:
            return steps >= self.snapshot_every
        rivals = self.rivals(league)
        return bool(rivals) and float(league.win_rates(self.me, rivals).min()) > self.strong

    def starts_anew(self, rng: np.random.Generator) -> bool:
        """Whether it goes on from the weights that it began with, after it was frozen."""
        return False

    def _branch(self, rng: np.random.Generator, known: Sequence[str]) -> str:
        if unknown := [name for name in self.branches if name not in known]:
            raise UnknownName("branch", unknown[0], known, f"of player {self.name}")
        names = list(self.branches)
        return names[int(rng.choice(len(names), p=np.array([*self.branches.values()]) / sum(self.branches.values())))]


@dataclass(frozen=True, kw_only=True)
class SelfPlay(Player):
    """Plays itself, and its newest snapshots. It is frozen every `snapshot_every` steps."""

    pool: int = 20
    """How many of its newest snapshots are played."""
    newest: float = 0.5
    """Share of the games against itself as it is now."""
    weighting: str = "squared"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in WEIGHTINGS:
            raise UnknownName("weighting", str(self.weighting), WEIGHTINGS, f"of player {self.name}")
        if self.pool < 1 or not 0 <= self.newest <= 1:
            raise ConfigError(f"player {self.name}: expected a pool of at least 1 and newest from 0 to 1")

    def opponent(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        past = league.past(self.name)[-self.pool :]
        if not past or rng.random() < self.newest:
            return self.me
        return draw(league, self.me, past, self.weighting, rng)

    def is_trained(self, league: Standings, steps: int) -> bool:
        return steps >= self.snapshot_every


@dataclass(frozen=True, kw_only=True)
class MainPlayer(Player):
    """The one that is to become strong against everybody: it plays all snapshots, other main players, and those that it
    may have forgotten how to beat."""

    branches: Mapping[str, float] = field(
        default_factory=lambda: {"pfsp": 0.5, "self_play": 0.35, "verification": 0.15}
    )

    def opponent(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        branch = self._branch(rng, ("pfsp", "self_play", "verification"))
        found = {"pfsp": self._any_past, "self_play": self._main, "verification": self._forgotten}[branch](league, rng)
        return found or self._main(league, rng)

    def _any_past(self, league: Standings, rng: np.random.Generator) -> PlayerRef | None:
        past = league.past()
        return draw(league, self.me, past, "squared", rng) if past else None

    def _main(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        """A main player; one that is too strong as it was, when that was of one's own strength."""
        other = _one_of(league.learning(kind_of(self)), rng)
        if other == self.me or league.win_rates(self.me, [other])[0] > 1.0 - self.strong:
            return other
        past = league.past(other.side)
        return draw(league, self.me, past, "variance", rng) if past else other

    def _forgotten(self, league: Standings, rng: np.random.Generator) -> PlayerRef | None:
        """An exploiter that beats it, else a main player's snapshot that it does not beat any more."""
        exploiters = [league.past(one.side) for one in league.learning("main_exploiter")]
        exploited = exploiters[0] if len(exploiters) == 1 else [ref for refs in exploiters for ref in refs]
        past = league.past(_one_of(league.learning(kind_of(self)), rng).side)
        for refs, bound in ((exploited, 1.0 - self.strong), (past, self.strong)):
            if refs and (rates := league.win_rates(self.me, refs)).min() < bound:
                return _by_rates(refs, rates, "squared", rng)
        return None


@dataclass(frozen=True, kw_only=True)
class MainExploiter(Player):
    """Looks for weaknesses of the main players: plays them, and as long as it has no chance, their snapshots. It starts
    anew after each of its own."""

    least: float = 0.2
    """Its win rate against a main player from which it plays that as it is now."""

    def opponent(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        main = _one_of(self.rivals(league), rng)
        past = league.past(main.side)
        if not past or league.win_rates(self.me, [main])[0] >= self.least:
            return main
        return draw(league, self.me, past, "variance", rng)

    def rivals(self, league: Standings) -> Sequence[PlayerRef]:
        mains = league.learning("main")
        if not mains:
            raise ConfigError(f"player {self.name} exploits main players, and there is none: add one of kind main")
        return mains

    def starts_anew(self, rng: np.random.Generator) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class LeagueExploiter(Player):
    """Looks for weaknesses of the whole league: plays all snapshots. Now and then it starts anew."""

    restart: float = 0.25
    """How often, after a snapshot."""

    def opponent(self, league: Standings, rng: np.random.Generator) -> PlayerRef:
        past = league.past()
        return draw(league, self.me, past, "squared", rng) if past else _one_of(league.learning(), rng)

    def starts_anew(self, rng: np.random.Generator) -> bool:
        return bool(rng.random() < self.restart)


KINDS: dict[str, type[Player]] = {
    "self_play": SelfPlay,
    "main": MainPlayer,
    "main_exploiter": MainExploiter,
    "league_exploiter": LeagueExploiter,
}


def kind_of(player: Player) -> str:
    """The kind that its class is known by, or that of the one it derives from; empty for another one."""
    return next((kind for kind, cls in KINDS.items() if isinstance(player, cls)), "")


def make_players(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Player]:
    """{name: kind} or {name: {kind: main, snapshot_every: 100_000, ...}}, where a kind may be `module:Class`.
    `defaults`: of all kinds that have these keys."""
    players: dict[str, Player] = {}
    for name, given in config.items():
        where = f"player {name}"
        if not isinstance(given, (str, Mapping, type(None))):
            raise ConfigError(f"{where}: expected a kind ({', '.join(KINDS)}) or a dict with `kind`, got {given!r}")
        about = {"kind": given} if isinstance(given, str) else dict(given or {})
        cls = load_named(str(about.pop("kind", "main")), "kind of player", where, KINDS)
        if not (isinstance(cls, type) and issubclass(cls, Player)):
            raise ConfigError(f"{where}: expected a class that derives from bray.league.Player, got {cls!r}")
        known = [f.name for f in dataclasses.fields(cls) if f.name != "name"]
        if unknown := [key for key in about if key not in known]:
            raise UnknownName("key", str(unknown[0]), known, where)
        if not name or "@" in name:
            raise ConfigError(f"{where}: expected a name without @, which stands before the step of a snapshot")
        about = {key: value for key, value in (defaults or {}).items() if key in known} | about
        try:
            players[name] = cls(name=name, **about)
        except TypeError as e:
            raise ConfigError(f"{where}: {e}") from None
    return players
