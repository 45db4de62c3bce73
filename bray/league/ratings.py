"""How strong players are, as one number each with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

ELO = 1200.0
"""Where ratings start."""
ELO_BETA = 200.0
"""One is stronger by this where it scores 10 points to the other's 3.2."""
_SIGMA = 25.0 / 3.0
_BETA = _SIGMA / 2.0
TAU = _SIGMA / 100.0
"""By how much a player that learns may have changed from one game to the next."""
DRAWS = 0.1
"""Share of games between equals that are taken to end in a draw."""
_SCALE = ELO_BETA / _BETA
_NORM, _HALF = 1.0 / math.sqrt(2.0 * math.pi), math.sqrt(0.5)
_MOST = 2000  # players whose ratings are fitted together


def elo(a: float, b: float, score: float, k: float = 32.0, beta: float = ELO_BETA) -> tuple[float, float]:
    """Ratings after a game (Elo 1978); `score` of a: 1, a half or 0. They move in opposite directions, by at most k."""
    expected = 1.0 / (1.0 + 10.0 ** ((b - a) / (2.0 * beta)))
    change = k * (score - expected)
    return a + change, b - change


def fit_elo(wins: np.ndarray, beta: float = ELO_BETA) -> tuple[np.ndarray, np.ndarray]:
    """The ratings that make all results together most likely (Bradley and Terry 1952), and the half widths of their
    95 % intervals. `wins[i, j]`: points of i against j, a draw is a half. The mean is 1200; each player has drawn one
    game with it besides, so that who has won every game has a finite rating."""
    n = len(wins)
    if n > _MOST:
        raise ValueError(f"{n:,} players, expected at most {_MOST:,}: fit those that matter")
    games, points = wins + wins.T, wins.sum(1)
    scale = math.log(10.0) / (2.0 * beta)
    x = np.zeros(n)
    information = np.eye(n)
    for _ in range(100):
        expected = 1.0 / (1.0 + np.exp(np.clip(x[None, :] - x[:, None], -50.0, 50.0)))
        mean = 1.0 / (1.0 + np.exp(-x))
        gradient = points - (games * expected).sum(1) + 0.5 - mean
        weight = games * expected * (1.0 - expected)
        information = np.diag(weight.sum(1) + mean * (1.0 - mean)) - weight
        step = np.linalg.solve(information, gradient)
        step *= min(1.0, 2.0 / max(np.abs(step).max(), 1e-12))  # far away Newton's step goes too far
        x += step
        if np.abs(step).max() < 1e-10:
            break
    centred = np.eye(n) - 1.0 / n  # where all are together is not uncertain
    half = 1.96 * np.sqrt(np.diag(centred @ np.linalg.inv(information) @ centred))
    return ELO + (x - x.mean()) / scale, half / scale


class Rating(NamedTuple):
    """A normal distribution over how strong a player is, as TrueSkill keeps it."""

    mu: float = 0.0
    sigma: float = _SIGMA

    @property
    def elo(self) -> float:
        """On Elo's scale."""
        return ELO + _SCALE * self.mu

    @property
    def half(self) -> float:
        """Half the width of its 95 % interval, on Elo's scale."""
        return 1.96 * _SCALE * self.sigma


def rate(
    a: Rating, b: Rating, outcome: int, tau: Sequence[float] = (TAU, TAU), draws: float = DRAWS
) -> tuple[Rating, Rating]:
    """Ratings after a game of two (TrueSkill, Herbrich et al. 2006); `outcome` of a: 1, 0 for a draw, or -1. `tau`: by
    how much each may have changed since its last game; 0 for who does not learn."""
    (mean_a, sigma_a), (mean_b, sigma_b), (tau_a, tau_b) = a, b, tau
    va, vb = sigma_a * sigma_a + tau_a * tau_a, sigma_b * sigma_b + tau_b * tau_b
    square = va + vb + 2.0 * _BETA * _BETA
    c = math.sqrt(square)
    t, margin = (mean_a - mean_b) / c, _margin(draws) / c
    v, w = _drawn(t, margin) if outcome == 0 else _won(outcome * t - margin)
    move, shrink = (outcome or 1) * v / c, w / square
    new = (mean_a + va * move, math.sqrt(va * max(1.0 - va * shrink, 1e-9)))
    other = (mean_b - vb * move, math.sqrt(vb * max(1.0 - vb * shrink, 1e-9)))
    return tuple.__new__(Rating, new), tuple.__new__(Rating, other)  # a quarter of what its constructor takes


@cache
def _margin(draws: float) -> float:
    """By how little two performances differ where a game is drawn, so that equals draw this share of their games."""
    low, high = 0.0, 40.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if 2.0 * _cdf(middle) - 1.0 < draws else (low, middle)
    return low * math.sqrt(2.0) * _BETA


def _pdf(x: float) -> float:
    return math.exp(-0.5 * x * x) * _NORM


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(x * -_HALF)


def _won(t: float) -> tuple[float, float]:
    """By how much the mean moves and the variance shrinks after a win; `t`: how much stronger the winner was held to
    be."""
    p = _cdf(t)
    v = _pdf(t) / p if p > 1e-300 else -t
    return v, v * (v + t)


def _drawn(t: float, margin: float) -> tuple[float, float]:
    """The same after a draw. Of the two tails, the nearer one: the difference of two numbers that are almost one has no
    digits left."""
    side = abs(t)
    p = _cdf(margin - side) - _cdf(-margin - side)
    if p < 1e-300:
        return math.copysign(margin - side, -t) if t else 0.0, 1.0
    low, high = _pdf(-margin - side), _pdf(margin - side)
    v = (low - high) / p
    w = v * v + ((margin - side) * high + (margin + side) * low) / p
    return math.copysign(v, -t) if t else 0.0, w
