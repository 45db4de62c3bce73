"""Slime Volleyball (github.com/hardmaru/slimevolleygym 0.1.0) as a compiled loop over many games, to learn with: to the
last bit what the package's game does, but for where its random numbers come from. `python -m benchmarks.slimevolley
check` compares both."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from bray.compiled import compiled
from bray.envs.many_games import ManyGames

ACTIONS = np.array([[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 0]], np.uint8)
"""Forward, backward, jump: what the game's Atari mode offers."""
LONGEST = 3000
SIDE, GROUND, WALL_WIDTH, WALL_HEIGHT = 24.0 * 2.0, 1.5, 1.0, 3.5
SPEED_X, SPEED_Y, BALL_SPEED = 10.0 * 1.75, 10.0 * 1.35, 15.0 * 1.5
STEP, NUDGE, GRAVITY, DELAY, LIVES = 1.0 / 30.0, 0.1, -9.8 * 2.0 * 1.5, 30, 5
BALL_R, SLIME_R, STUB_R = 0.5, 1.5, WALL_WIDTH / 2.0

# The state of a game: of ball and slimes x, y, vx, vy; where the ball was; steps until it falls; lives; steps played.
BALL, LEFT, RIGHT, WAS_X, WAIT, LIVES_LEFT, LIVES_RIGHT, STEPS, STATE = 0, 4, 8, 12, 13, 14, 15, 16, 17

_GOLDEN, _A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = (np.uint64(x) for x in (30, 27, 31, 11))


def _uniform(draws: np.ndarray, low: float, high: float) -> float:
    """The next random number of a game (splitmix64); `draws` uint64[1] is moved on."""
    draws[0] += _GOLDEN
    x = draws[0]
    x = (x ^ (x >> _30)) * _A
    x = (x ^ (x >> _27)) * _B
    return low + (high - low) * (((x ^ (x >> _31)) >> _11) * 2.0**-53)


uniform = compiled(_uniform)


def _serve(state: np.ndarray, draws: np.ndarray) -> None:
    """A new ball over the net."""
    state[BALL], state[BALL + 1] = 0.0, SIDE / 4.0
    state[BALL + 2] = uniform(draws, -20.0, 20.0)
    state[BALL + 3] = uniform(draws, 10.0, 25.0)
    state[WAS_X], state[WAIT] = 0.0, DELAY


serve = compiled(_serve)


def _look(state: np.ndarray, seen: np.ndarray) -> None:
    """What each side sees: itself, the ball and the other one, all as if it stood on the right, by tens."""
    for side in range(2):
        me, other, sign = (LEFT, RIGHT, -1.0) if side == 0 else (RIGHT, LEFT, 1.0)
        for k, thing, turn in ((0, me, sign), (4, BALL, sign), (8, other, -sign)):
            seen[side, k] = state[thing] * turn / 10.0
            seen[side, k + 1] = state[thing + 1] / 10.0
            seen[side, k + 2] = state[thing + 2] * turn / 10.0
            seen[side, k + 3] = state[thing + 3] / 10.0


look = compiled(_look)


def _move_slime(state: np.ndarray, at: int, side: float, forward: bool, backward: bool, jump: bool) -> None:
    wanted = 0.0
    if forward and not backward:
        wanted = -SPEED_X
    if backward and not forward:
        wanted = SPEED_X
    state[at + 3] += GRAVITY * STEP
    if state[at + 1] <= GROUND + NUDGE * STEP:
        state[at + 3] = SPEED_Y if jump else 0.0
    state[at + 2] = wanted * side
    state[at] += state[at + 2] * STEP
    state[at + 1] += state[at + 3] * STEP
    if state[at + 1] <= GROUND:
        state[at + 1], state[at + 3] = GROUND, 0.0
    for bound, beyond in ((WALL_WIDTH / 2.0 + SLIME_R, -1.0), (SIDE / 2.0 - SLIME_R, 1.0)):
        if (state[at] * side - bound) * beyond >= 0.0:
            state[at + 2], state[at] = 0.0, side * bound


move_slime = compiled(_move_slime)


def _bounce(state: np.ndarray, x: float, y: float, vx: float, vy: float, r: float) -> None:
    """The ball off a round thing, where they touch."""
    reach = BALL_R + r
    dx, dy = x - state[BALL], y - state[BALL + 1]
    if not reach * reach > dx * dx + dy * dy:
        return
    nx, ny = state[BALL] - x, state[BALL + 1] - y
    apart = np.sqrt(nx * nx + ny * ny)
    nx, ny = nx / apart, ny / apart
    while reach * reach > dx * dx + dy * dy:
        state[BALL] += nx * NUDGE
        state[BALL + 1] += ny * NUDGE
        dx, dy = x - state[BALL], y - state[BALL + 1]
    ux, uy = state[BALL + 2] - vx, state[BALL + 3] - vy
    along = ux * nx + uy * ny
    ux -= nx * (along * 2.0)
    uy -= ny * (along * 2.0)
    state[BALL + 2], state[BALL + 3] = ux + vx, uy + vy


bounce = compiled(_bounce)


def _edges(state: np.ndarray) -> int:
    """The ball off walls, ceiling and net; -1 or 1 where it fell on the left or on the right."""
    r, half = BALL_R, SIDE / 2.0
    if state[BALL] <= r - half:
        state[BALL + 2] *= -1.0
        state[BALL] = r - half + NUDGE * STEP
    if state[BALL] >= half - r:
        state[BALL + 2] *= -1.0
        state[BALL] = half - r - NUDGE * STEP
    if state[BALL + 1] <= r + GROUND:
        return -1 if state[BALL] <= 0.0 else 1
    if state[BALL + 1] >= SIDE - r:
        state[BALL + 3] *= -1.0
        state[BALL + 1] = SIDE - r - NUDGE * STEP
    net = WALL_WIDTH / 2.0 + r
    if state[BALL] <= net and state[WAS_X] > net and state[BALL + 1] <= WALL_HEIGHT:
        state[BALL + 2] *= -1.0
        state[BALL] = net + NUDGE * STEP
    net = -WALL_WIDTH / 2.0 - r
    if state[BALL] >= net and state[WAS_X] < net and state[BALL + 1] <= WALL_HEIGHT:
        state[BALL + 2] *= -1.0
        state[BALL] = net - NUDGE * STEP
    return 0


edges = compiled(_edges)


def _play(state: np.ndarray, draws: np.ndarray, left: np.ndarray, right: np.ndarray, seen: np.ndarray) -> int:
    """One step by the buttons of both (forward, backward, jump): what right is paid. Where a point was made a new ball
    is served, and both see what they saw before."""
    move_slime(state, LEFT, -1.0, left[0] > 0, left[1] > 0, left[2] > 0)
    move_slime(state, RIGHT, 1.0, right[0] > 0, right[1] > 0, right[2] > 0)
    state[STEPS] += 1
    if state[WAIT] > 0:
        state[WAIT] -= 1
    else:
        state[BALL + 3] += GRAVITY * STEP
        square = state[BALL + 2] * state[BALL + 2] + state[BALL + 3] * state[BALL + 3]
        if square > BALL_SPEED * BALL_SPEED:
            speed = np.sqrt(square)
            state[BALL + 2] = state[BALL + 2] / speed * BALL_SPEED
            state[BALL + 3] = state[BALL + 3] / speed * BALL_SPEED
        state[WAS_X] = state[BALL]
        state[BALL] += state[BALL + 2] * STEP
        state[BALL + 1] += state[BALL + 3] * STEP
    for at in (LEFT, RIGHT):
        bounce(state, state[at], state[at + 1], state[at + 2], state[at + 3], SLIME_R)
    bounce(state, 0.0, WALL_HEIGHT, 0.0, 0.0, STUB_R)
    paid = -edges(state)
    if paid != 0:
        state[LIVES_LEFT if paid > 0 else LIVES_RIGHT] -= 1
        serve(state, draws)
    else:
        look(state, seen)
    return paid


play = compiled(_play)


def _play_all(
    state: np.ndarray,
    draws: np.ndarray,
    actions: np.ndarray,
    buttons: np.ndarray,
    playing: np.ndarray,
    seen: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
) -> None:
    """One step of the games that are playing."""
    for b in range(len(state)):
        if playing[b]:
            paid = play(state[b], draws[b], buttons[actions[b, 0]], buttons[actions[b, 1]], seen[b])
            reward[b, 0], reward[b, 1] = -paid, paid
            terminated[b] = min(state[b, LIVES_LEFT], state[b, LIVES_RIGHT]) <= 0
            truncated[b] = state[b, STEPS] >= LONGEST and not terminated[b]


play_all = compiled(_play_all)


class SlimeVolley(ManyGames):
    """Two slimes and a ball. Each sees the court as if it stood on the right. A lost ball costs one, and the other is
    paid one; five lost balls or 3,000 steps end the game."""

    possible_agents = ("left", "right")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(-np.inf, np.inf, (12,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(len(ACTIONS)))

    def __init__(self, num_games: int = 1):
        n = num_games
        self._state, self._draws = np.zeros((n, STATE)), np.zeros((n, 1), np.uint64)
        self.obs, self.reward = np.zeros((n, 2, 12), np.float32), np.zeros((n, 2), np.float32)
        self.acts = np.ones((n, 2), bool)
        self.terminated, self.truncated = np.zeros(n, bool), np.zeros(n, bool)

    def begin(self, game: int, seed: int) -> None:
        state = self._state[game]
        state[:] = 0.0
        state[LEFT : LEFT + 2], state[RIGHT : RIGHT + 2] = (-SIDE / 4.0, GROUND), (SIDE / 4.0, GROUND)
        state[LIVES_LEFT] = state[LIVES_RIGHT] = LIVES
        self._draws[game] = seed
        serve(state, self._draws[game])
        look(state, self.obs[game])

    def step(self, actions: Any, playing: np.ndarray) -> None:
        of_all = self.obs, self.reward, self.terminated, self.truncated
        play_all(self._state, self._draws, actions, ACTIONS, playing, *of_all)
