"""`bray league`: the players of a run that plays itself: how strong each is, who beats whom, when each was frozen."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np

from bray import figures
from bray.act import SAMPLE
from bray.cli.options import League as Options
from bray.cli.show import facts, log_shown, plain_table, put, say, trusting
from bray.data.piece import DEFAULT
from bray.errors import ConfigError, UnknownName
from bray.experiment import Experiment
from bray.experiment.experiment import opponent_of
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.torch_engine import load_weights
from bray.league import IN_RUN, OUTSIDE, Event, League, PlayerRef, ResultLog, read_league
from bray.rundir import RunDir
from bray.train.acting import ActingPolicy, player_of
from bray.train.games import play_two
from bray.train.opponents import ALONE, RANDOM
from bray.train.table import Match, outcome

_WIDE = 8  # players in a table of who beats whom
_DRAWN = 30  # in a picture


@log_shown()
def league(options: Options) -> int:
    """Say what the log of a run knows, draw it, or play two of its players."""
    names = options.players or []
    if options.play != bool(names) or (names and len(names) != 2):
        raise ConfigError("two players play each other: bray league RUN_DIR --play A B")
    if names and options.add is not None:
        raise ConfigError("--play and --add are two commands: give one of them")
    if names:
        _play(options, *names)
        return 0
    directory = RunDir.open(options.path)
    if options.add is not None:
        _add(options, options.add, directory)
    found = read_league(directory.path / IN_RUN, outside=True)
    _ranking(found, options.top)
    _payoff(found)
    facts([(f"snapshots of {side}", _lineage(found, side)) for side in found.sides()])
    if options.plot:
        _plot(found, directory)
    return 0


def _ranking(found: League, top: int) -> None:
    ranks, steps = found.ranking(), {event.snapshot: event.steps for event in found.lineage}
    table = plain_table("player", ">frozen at step", ">games", ">rating", ">± 95 %", ">Elo of all results", ">± 95 %")
    for rank in ranks[:top]:
        name = str(rank.ref)
        of_all = ("–", "–") if math.isnan(rank.elo) else (f"{rank.elo:,.0f}", f"{rank.half:,.0f}")
        rating = f"{rank.rating.elo:,.0f}", f"{rank.rating.half:,.0f}"
        frozen = f"{steps[name]:,}" if name in steps else "learns" if rank.ref.step is None else "from outside"
        table.add_row(name, frozen, f"{rank.games:,}", *rating, *of_all)
    put(table)
    if len(ranks) > top:
        say(f"... {len(ranks) - top:,} more (--top N)", "dim")
    facts(
        [(name, f"{rating.elo:,.0f} ± {rating.half:,.0f}, by evaluations") for name, rating in found.opponents.items()]
    )


def _most_played(found: League, most: int) -> list[PlayerRef]:
    """Players that have met others, in the order of their ratings."""
    ranks = [rank for rank in found.ranking() if rank.games]
    kept = {rank.ref for rank in sorted(ranks, key=lambda rank: -rank.games)[:most]}
    return [rank.ref for rank in ranks if rank.ref in kept]


def _rates(found: League, refs: list[PlayerRef]) -> tuple[np.ndarray, np.ndarray]:
    """How often each wins against each other, a draw being half a win, and of how many games."""
    records = [[found.record(a, b) for b in refs] for a in refs]
    games = np.array([[record.games for record in row] for row in records])
    points = [[record.wins + 0.5 * record.draws for record in row] for row in records]
    counts = [[max(sum(record[:3]), 1e-9) for record in row] for row in records]
    return np.array(points) / np.array(counts), games


def _payoff(found: League) -> None:
    refs = _most_played(found, _WIDE)
    if len(refs) < 2:
        return
    rates, games = _rates(found, refs)
    table = plain_table("% won by", *(f">{ref}" for ref in refs))
    for i, ref in enumerate(refs):
        table.add_row(str(ref), *(f"{100 * x:.0f}" if n else "" for x, n in zip(rates[i], games[i], strict=True)))
    put(table)


def _lineage(found: League, side: str) -> str:
    """`@0 → @320 → | @640`: after the bar it went on from the weights that it began with."""
    mine = [event for event in found.lineage if PlayerRef.parse(event.snapshot or "").side == side]
    said = [f"@{(e.snapshot or '').partition('@')[2]}{' |' if e.anew else ''}" for e in mine]
    return " → ".join(said if len(said) <= _WIDE else [*said[:2], f"... {len(said) - 6} ...", *said[-4:]])


def _plot(found: League, directory: RunDir) -> None:
    refs, folder = _most_played(found, _DRAWN), directory.folder("figures")
    title = f"{directory.path.name}: "
    points: dict[str, list[tuple[float, float, float]]] = {}
    for event in found.lineage:
        ref = PlayerRef.parse(event.snapshot or "")
        rating = found.rating(ref)
        points.setdefault(ref.side, []).append((event.steps, rating.elo, rating.half))
    curve = figures.read_results(directory.path)
    drawn = [figures.ratings(folder / "ratings.png", curve, points, f"{title}ratings")]
    if len(refs) > 1:
        drawn.append(
            figures.win_rates(folder / "payoff.png", list(map(str, refs)), *_rates(found, refs), f"{title}% won")
        )
    if (path := figures.opponents(folder / "opponents.png", curve, f"{title}evaluations")) is not None:
        drawn.append(path)
    facts([("picture", path) for path in drawn])


def _add(options: Options, path: str, directory: RunDir) -> None:
    """Games of a player from outside against players of the run: its learning ones, and snapshots from the strongest to
    the weakest."""
    ref, log = _ref_of(options, path), ResultLog(directory.path / Path(IN_RUN).with_name(OUTSIDE))
    directory.lock("writing", "run")
    found, known = read_league(directory.path / IN_RUN), read_league(directory.path / IN_RUN, outside=True)
    if ref.side in {one.side for one in known.refs}:
        raise ConfigError(f"{ref.side} is a player of {options.path}: --name NAME calls this one otherwise")
    exp = _game_of(options)
    agents, env = exp.spec_of().agents, exp.config["env"]
    guest = _player(exp, options, path)
    number = sum(1 for _ in log.read())
    for other in _spread(found):
        matches = play_two(guest, _player(exp, options, str(other)), env, agents, options.games, options.seed, SAMPLE)
        for match, mine in matches:
            seats = {agent: str(ref if agent == mine else other) for agent in match.returns}
            log.add(Event(id=number, seats=seats, returns=match.returns, length=match.length))
            number += 1
        _said(str(ref), str(other), matches)
    log.close()
    directory.close()
    exp.close()


def _ref_of(options: Options, path: str) -> PlayerRef:
    """What a player from outside is called, and the version of its weights."""
    if path.endswith(".onnx"):
        return PlayerRef(_plain_name(options.name or Path(path).stem), OnnxEngine(Path(path)).step)
    if not Path(path).is_dir():
        raise ConfigError(f"--add {path}: expected a run directory, or a file that `bray export` wrote (model.onnx)")
    version = RunDir.open(path).pointer("latest")
    if version is None:
        raise ConfigError(f"--add {path}: this run has no checkpoint yet")
    return PlayerRef(_plain_name(options.name or Path(path).resolve().name), version)


def _plain_name(name: str) -> str:
    if not name or "@" in name:
        raise ConfigError(f"--name {name!r}: a player is called by a word without @, which is put before its version")
    return name


def _spread(found: League) -> list[PlayerRef]:
    """Up to eight players: those that learn, and snapshots over the whole of the ranking."""
    there = {*found.past(), *(ref for ref in found.refs if ref.step is None)}
    order = [rank.ref for rank in found.ranking() if rank.ref in there]
    learning = [ref for ref in order if ref.step is None][:_WIDE]
    past = [ref for ref in order if ref.step is not None]
    at = np.linspace(0, len(past) - 1, min(len(past), _WIDE - len(learning))).round().astype(int)
    return [*learning, *(past[i] for i in at)]


def _game_of(options: Options) -> Experiment:
    exp = Experiment.load(options.path, trust=trusting(options))
    if not exp.is_game:
        raise ConfigError(f"{options.path}: {exp.env_id} is a game of one agent, so nobody plays against anybody")
    return exp


def _play(options: Options, one: str, other: str) -> None:
    exp = _game_of(options)
    a, b = _player(exp, options, one), _player(exp, options, other)
    agents, env = exp.spec_of().agents, exp.config["env"]
    _said(one, other, play_two(a, b, env, agents, options.games, options.seed, SAMPLE))
    exp.close()


def _said(one: str, other: str, matches: list[tuple[Match, str]]) -> None:
    outcomes = [outcome(match, (mine,)) for match, mine in matches]
    points = np.array(outcomes) / 2 + 0.5
    half = 1.96 * points.std() / math.sqrt(len(points))
    counts = ", ".join(f"{outcomes.count(k)} {name}" for k, name in ((1, "won"), (0, "drawn"), (-1, "lost")))
    say(
        f"{one} against {other}: {counts} of {len(matches)} games, seats in turn: {points.mean():.1%} ± {half:.1%}",
        "bold",
    )


def _player(exp: Experiment, options: Options, name: str) -> ActingPolicy:
    known, (side, at, _) = list(exp.policies) or [DEFAULT], name.partition("@")
    served = exp.policy_named(side if side in known else known[0])
    if side not in known:
        if ":" not in name and name.partition("(")[0] not in (RANDOM, ALONE) and not Path(name).exists():
            more = f"or {known[0]}@STEP, mcts, openspiel:BOT, module:function, a run directory, model.onnx"
            raise UnknownName("player", name, (*known, RANDOM), more)
        return opponent_of(name, served.spec, trusting(options))
    model = copy.deepcopy(served.model)
    if at:
        load_weights(model, RunDir.open(options.path).load_weights(PlayerRef.parse(name).step or 0, side))
    return player_of(model, copy.deepcopy(served.policy))
