"""Games as functions of tensors: four of Gymnasium's classic ones, and two small ones with pictures
(`bray/envs/games.py` has these for the CPU). They compute in float64, as Gymnasium's do, and equal them step by step
(`tests/envs/test_device_games.py`).   B games."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from bray.envs.games import BREAKOUT_SPACES, CATCH_SPACES, PADDLE, ROWS, SIDE, WALL
from bray.envs.tensor_game import Game


def _box(*high: float) -> spaces.Box:
    return spaces.Box(-np.array(high, np.float32), np.array(high, np.float32))


class CartPole(Game):
    """Gymnasium's CartPole: a pole on a cart that is pushed left or right."""

    single_action_space = spaces.Discrete(2)
    random_numbers, max_episode_steps = 4, 500
    gravity, pole, total, half_length, push, tau = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
    x_limit, angle_limit = 2.4, 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, device: Any = "cpu", max_episode_steps: int | None = None):
        super().__init__(num_envs, device, max_episode_steps)
        self._limits = torch.tensor([self.x_limit, self.angle_limit], dtype=torch.float64, device=self.device)
        self.single_observation_space = _box(2 * self.x_limit, math.inf, 2 * self.angle_limit, math.inf)

    def begin(self, u: Tensor) -> Tensor:
        return u * 0.1 - 0.05

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, v, angle, spin = state.unbind(-1)
        sin, cos = angle.sin(), angle.cos()
        lever = self.pole * self.half_length / self.total
        push = (action.double() * 2.0 - 1.0) * (self.push / self.total) + lever * spin.square() * sin
        spin_rate = (self.gravity * sin - cos * push) / (
            self.half_length * (4.0 / 3.0 - self.pole / self.total * cos.square())
        )
        state = state + self.tau * torch.stack([v, push - lever * spin_rate * cos, spin, spin_rate], -1)
        terminated = (state[:, ::2].abs() > self._limits).any(-1)
        return state, torch.ones_like(v), terminated

    def see(self, state: Tensor) -> Tensor:
        return state.float()


class Pendulum(Game):
    """Gymnasium's Pendulum: swing it up and hold it there."""

    single_observation_space = _box(1.0, 1.0, 8.0)
    single_action_space = spaces.Box(-2.0, 2.0, (1,))
    random_numbers, max_episode_steps = 2, 200
    max_speed, max_torque, dt = 8.0, 2.0, 0.05

    def begin(self, u: Tensor) -> Tensor:
        angle, speed = (u * 2.0 - 1.0).unbind(-1)
        return torch.stack([angle * math.pi, speed], -1)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(-1)
        torque = action[:, 0].double().clamp(-self.max_torque, self.max_torque)
        up = torch.remainder(angle + math.pi, 2.0 * math.pi) - math.pi
        cost = up.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * self.dt).clamp(-self.max_speed, self.max_speed)
        return torch.stack([angle + speed * self.dt, speed], -1), -cost, torch.zeros_like(angle, dtype=torch.bool)

    def see(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), speed], -1).float()


class Acrobot(Game):
    """Gymnasium's Acrobot: two links, torque on the joint between them; swing the end above the line."""

    single_observation_space = _box(1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi)
    single_action_space = spaces.Discrete(3)
    random_numbers, max_episode_steps = 4, 500
    dt = 0.2

    def begin(self, u: Tensor) -> Tensor:
        return (u * 0.2 - 0.1).float().double()  # Gymnasium's begins in float32

    def rates(self, state: Tensor, torque: Tensor) -> Tensor:
        """Its derivative, by the equations of the book; all masses, lengths and moments are 1, centres at 0.5."""
        angle1, angle2, speed1, speed2 = state.unbind(-1)
        cos2, sin2 = angle2.cos(), angle2.sin()
        d1 = 0.25 + 1.25 + cos2 + 2.0
        d2 = 0.25 + 0.5 * cos2 + 1.0
        phi2 = 0.5 * 9.8 * (angle1 + angle2 - math.pi / 2.0).cos()
        phi1 = (
            -0.5 * speed2.square() * sin2 - speed2 * speed1 * sin2 + 1.5 * 9.8 * (angle1 - math.pi / 2.0).cos() + phi2
        )
        rate2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin2 - phi2) / (1.25 - d2.square() / d1)
        return torch.stack([speed1, speed2, -(d2 * rate2 + phi1) / d1, rate2], -1)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torque, dt = action.double() - 1.0, self.dt
        k1 = self.rates(state, torque)  # Runge and Kutta's method of order four
        k2 = self.rates(state + dt / 2.0 * k1, torque)
        k3 = self.rates(state + dt / 2.0 * k2, torque)
        k4 = self.rates(state + dt * k3, torque)
        angle1, angle2, speed1, speed2 = (state + dt / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)).unbind(-1)
        angle1, angle2 = (_wrapped(x) for x in (angle1, angle2))
        speed1, speed2 = speed1.clamp(-4 * math.pi, 4 * math.pi), speed2.clamp(-9 * math.pi, 9 * math.pi)
        terminated = -angle1.cos() - (angle2 + angle1).cos() > 1.0
        return torch.stack([angle1, angle2, speed1, speed2], -1), terminated.double() - 1.0, terminated

    def see(self, state: Tensor) -> Tensor:
        angle1, angle2, speed1, speed2 = state.unbind(-1)
        return torch.stack([angle1.cos(), angle1.sin(), angle2.cos(), angle2.sin(), speed1, speed2], -1).float()


def _wrapped(angle: Tensor) -> Tensor:
    """In [-pi, pi], as repeated addition of 2 pi does it: those inside are left as they are."""
    turns = (angle.abs() - math.pi).div(2.0 * math.pi).ceil().clamp(min=0.0)
    return angle - angle.sign() * turns * (2.0 * math.pi)


class MountainCar(Game):
    """Gymnasium's MountainCar: a car too weak for the hill must swing."""

    single_observation_space = spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32))
    single_action_space = spaces.Discrete(3)
    random_numbers, max_episode_steps = 1, 200

    def begin(self, u: Tensor) -> Tensor:
        return torch.cat([u * 0.2 - 0.6, torch.zeros_like(u)], -1)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place, speed = state.unbind(-1)
        speed = (speed + ((action.double() - 1.0) * 0.001 + (3.0 * place).cos() * -0.0025)).clamp(-0.07, 0.07)
        place = (place + speed).clamp(-1.2, 0.6)
        speed = speed * ~((place == -1.2) & (speed < 0.0))
        return torch.stack([place, speed], -1), -torch.ones_like(place), (place >= 0.5) & (speed >= 0.0)

    def see(self, state: Tensor) -> Tensor:
        return state.float()


class Catch(Game):
    """`bray/Catch-v0`: a ball falls aslant, a paddle is to be under it."""

    single_observation_space, single_action_space = CATCH_SPACES
    random_numbers, max_episode_steps = 2, None

    def __init__(self, num_envs: int, device: Any = "cpu", max_episode_steps: int | None = None):
        super().__init__(num_envs, device, max_episode_steps)
        self._side = torch.arange(SIDE, device=self.device)

    def begin(self, u: Tensor) -> Tensor:
        """`[B, 4]`: column, row and drift of the ball, left end of the paddle."""
        column = (u[:, 0] * SIDE).long()
        drift = (u[:, 1] * 3).long() - 1
        return torch.stack([column, torch.zeros_like(column), drift, torch.full_like(column, SIDE // 2 - 1)], -1)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, drift, paddle = state.unbind(-1)
        paddle = (paddle + action - 1).clamp(0, SIDE - PADDLE)
        drift = torch.where((x + drift < 0) | (x + drift >= SIDE), -drift, drift)
        x, y = x + drift, y + 1
        terminated = y == SIDE - 1
        caught = (x >= paddle) & (x < paddle + PADDLE)
        reward = terminated.double() * (caught.double() * 2.0 - 1.0)
        return torch.stack([x, y, drift, paddle], -1), reward, terminated

    def see(self, state: Tensor) -> Tensor:
        x, y, _, paddle = (part[:, None] for part in state.unbind(-1))
        ball = (self._side == y)[:, :, None] & (self._side == x)[:, None, :]
        held = (self._side == SIDE - 1)[:, None] & ((self._side >= paddle) & (self._side < paddle + PADDLE))[:, None, :]
        return torch.stack([ball, held], 1).byte() * 255


class Breakout(Game):
    """`bray/Breakout-v0`: a ball breaks the bricks of a wall, a paddle keeps it in play."""

    single_observation_space, single_action_space = BREAKOUT_SPACES
    random_numbers, max_episode_steps = 2, 1000

    def __init__(self, num_envs: int, device: Any = "cpu", max_episode_steps: int | None = None):
        super().__init__(num_envs, device, max_episode_steps)
        self._side = torch.arange(SIDE, device=self.device)
        self._row = torch.arange(WALL, WALL + ROWS, device=self.device)

    def begin(self, u: Tensor) -> dict[str, Tensor]:
        """`ball [B, 6]`: column, row, its two speeds, column and row before; `paddle [B]`; `wall [B, ROWS, SIDE]`."""
        x, right = (u[:, 0] * SIDE).long(), (u[:, 1] * 2).long() * 2 - 1
        y = torch.full_like(x, WALL + ROWS)
        wall = torch.ones(len(u), ROWS, SIDE, dtype=torch.bool, device=u.device)
        return {
            "ball": torch.stack([x, y, right, torch.ones_like(x), x, y], -1),
            "paddle": torch.full_like(x, SIDE // 2 - 1),
            "wall": wall,
        }

    def move(self, state: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        x, y, right, down, _, _ = state["ball"].unbind(-1)
        before = x, y
        wall = state["wall"] | ~state["wall"].any((1, 2), keepdim=True)  # one that is broken down is built again
        paddle = (state["paddle"] + action - 1).clamp(0, SIDE - PADDLE)
        right = torch.where((x + right < 0) | (x + right >= SIDE), -right, right)
        x = x + right
        down = torch.where(y + down < 0, -down, down)
        there = (self._row == (y + down)[:, None])[:, :, None] & (self._side == x[:, None])[:, None, :]
        hit = there & wall
        broke = hit.any((1, 2))
        at_paddle = y + down == SIDE - 1
        saved = at_paddle & (x >= paddle) & (x < paddle + PADDLE)
        turned = broke | saved
        y = torch.where(turned, y, y + down)
        down = torch.where(turned, -down, down)
        ball = torch.stack([x, y, right, down, *before], -1)
        return {"ball": ball, "paddle": paddle, "wall": wall & ~hit}, broke.double(), at_paddle & ~saved

    def see(self, state: dict[str, Tensor]) -> Tensor:
        x, y, _, _, x0, y0 = (part[:, None] for part in state["ball"].unbind(-1))
        paddle, side = state["paddle"][:, None], self._side

        def dot(x: Tensor, y: Tensor) -> Tensor:
            return (side == y)[:, :, None] & (side == x)[:, None, :]

        held = (side == SIDE - 1)[:, None] & ((side >= paddle) & (side < paddle + PADDLE))[:, None, :]
        wall = torch.nn.functional.pad(state["wall"], (0, 0, WALL, SIDE - WALL - ROWS))
        return torch.stack([dot(x, y), dot(x0, y0), held, wall], 1).byte() * 255


FORMS: dict[str, type[Game]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "bray/Catch-v0": Catch,
    "bray/Breakout-v0": Breakout,
}
"""By their id in Gymnasium's registry."""
