"""Leagues: which players there are, who plays whom, who beats whom. Logic alone: no processes, no networks.

    job(rng)                          a match to play: for each agent a player, as it is now or as it was at a step
    finish(match)                     its result goes to the log, and from there to payoff and ratings
    trained(player, steps, version)   a snapshot where the player has learnt enough since its last one

What is known of players is a **fold over the log**: an append-only file of results, each with the number of its match,
and of snapshots (`log.py`). A league that was killed is what its log says; a checkpoint adds which matches were under
way.
"""

from bray.league.league import Job, League, Outcome, PlayerRef, Snapshot, read_league
from bray.league.log import IN_RUN, OUTSIDE, Event, ResultLog
from bray.league.matches import Matches, Verdict
from bray.league.matchmaking import pfsp
from bray.league.payoff import Payoff
from bray.league.players import KINDS, Player, make_players
from bray.league.ratings import Rating, elo, fit_elo, rate

__all__ = [
    "IN_RUN",
    "KINDS",
    "OUTSIDE",
    "Event",
    "Job",
    "League",
    "Matches",
    "Outcome",
    "Payoff",
    "Player",
    "PlayerRef",
    "Rating",
    "ResultLog",
    "Snapshot",
    "Verdict",
    "elo",
    "fit_elo",
    "make_players",
    "pfsp",
    "rate",
    "read_league",
]
