"""A transformer over time as a memory: GTrXL (Parisotto et al. 2020), beside LSTM and GRU.   B batch, T time, W window,
D size, L layers.

The same interface as `bray.nn.recurrent`. The state is what the layers saw at the last W steps, so a step costs W times
what a cell's does, and nothing is forgotten or blurred within the window; with L layers, what was seen up to L W steps
ago can still matter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bray import tree
from bray.nn.attention import attend, heads_of
from bray.nn.layers import linear
from bray.nn.recurrent import Recurrent, State

GATE_BIAS = 2.0
"""Gates start nearly closed: at first a layer passes on what it gets, and the policy is one without memory."""


class GRUGate(nn.Module):
    """In place of x + y: (1 - z) x + z h, z = sigmoid(Wz y + Uz x - 2), h = tanh(Wg y + Ug (r x)), r = sigmoid(Wr y +
    Ur x)."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.of_y = linear(size, 3 * size, 1.0)
        self.of_x, self.of_rx = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, size, bias=False)
        with torch.no_grad():
            self.of_y.bias[size : 2 * size] = -GATE_BIAS
            for weight in (*self.of_x.weight.split(size), self.of_rx.weight):
                nn.init.orthogonal_(weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = self.size
        gates, new = self.of_y(y).split([2 * n, n], -1)
        r, z = torch.sigmoid(gates + self.of_x(x)).split(n, -1)
        return torch.lerp(x, torch.tanh(new + self.of_rx(r * x)), z)


class Layer(nn.Module):
    """Attention to the window by content and distance (Transformer-XL, Dai et al. 2019), then a dense block, each
    behind a gate; the normalisation comes first."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads, self.d = heads, heads_of(size, heads)
        self.norm, self.norm_dense = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key_value = linear(size, size, 1.0), linear(size, 2 * size, 1.0)
        self.distance = nn.Linear(size, size, bias=False)
        self.content_bias, self.distance_bias = (nn.Parameter(torch.zeros(heads, 1, self.d)) for _ in range(2))
        self.out = linear(size, size, 1.0)
        self.dense = nn.Sequential(linear(size, 2 * size), nn.ReLU(), linear(2 * size, size, 1.0))
        self.gate, self.gate_dense = GRUGate(size), GRUGate(size)

    def forward(self, rows: Tensor, steps: int, visible: Tensor, distances: Tensor, waves: Tensor) -> Tensor:
        """`rows [B, K, D]`: the window and behind it the `steps` rows Q that are computed; `visible [B, Q, K]`;
        `distances [Q, K]`: how far back a key is, an index into `waves [W + 1, D]` -> `[B, Q, D]`."""
        seen, x = self.norm(rows), rows[:, -steps:]
        q = self.query(seen[:, -steps:]).unflatten(2, (self.heads, self.d)).transpose(1, 2)
        k, v = self.key_value(seen).unflatten(2, (2, self.heads, self.d)).permute(2, 0, 3, 1, 4).unbind(0)
        far = self.distance(waves).unflatten(1, (self.heads, self.d)).permute(1, 2, 0)  # [H, d, W + 1]
        by_distance = (q + self.distance_bias) @ far
        scores = (q + self.content_bias) @ k.transpose(2, 3)
        scores = scores + by_distance.gather(3, distances.expand(*scores.shape))
        y = self.out(attend(scores / math.sqrt(self.d), v, visible.unsqueeze(1)))
        x = self.gate(x, torch.relu(y))
        return self.gate_dense(x, torch.relu(self.dense(self.norm_dense(x))))


class GTrXL(nn.Module):
    """An encoder followed by `layers` of gated attention over the last `window` steps and this one."""

    waves: Tensor

    def __init__(self, encoder: nn.Module, size: int = 256, window: int = 32, layers: int = 1, heads: int = 4):
        super().__init__()
        self.encoder, self.size, self.window = encoder, size, window
        self.out_features = size
        self.project = linear(int(encoder.out_features), size, 1.0)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(Layer(size, heads) for _ in range(layers))
        self.register_buffer("waves", _waves(window + 1, size), persistent=False)

    def initial_state(self, batch_size: int) -> State:
        """Zeros, on the device of the weights: `rows`, what each layer saw, and `there`, 1 where it saw something."""
        zeros = self.project.weight.new_zeros
        rows = zeros(batch_size, self.window, len(self.layers) * self.size)
        return {"rows": rows, "there": zeros(batch_size, self.window)}

    def forward(self, obs: Any, state: State) -> tuple[Tensor, State]:
        """One step: obs `[B, ...]` and the state before it -> features `[B, size]` and the state after."""
        x = self.project(self.encoder(obs)).unsqueeze(1)
        out, state = self._run(x, state, x.new_zeros(x.shape[:2]))
        return out.squeeze(1), state

    def unroll(self, obs: Any, state: State, first: Tensor) -> tuple[Tensor, State]:
        """T steps at once: obs `[T, B, ...]`, the state before row 0, `first [T, B]` -> features `[T, B, size]` and the
        last state.
        Where `first[t]`, row t and those behind it see nothing from before."""
        flat = self.project(self.encoder(tree.map(lambda x: x.flatten(0, 1), obs)))
        out, state = self._run(flat.unflatten(0, first.shape).transpose(0, 1), state, first.t().to(flat.dtype))
        return out.transpose(0, 1), state

    def _run(self, x: Tensor, state: State, first: Tensor) -> tuple[Tensor, State]:
        """Rows `x [B, Q, D]` behind the window; `first [B, Q]`."""
        steps, window = x.shape[1], self.window
        episode = first.cumsum(1)
        episodes = torch.cat(
            [torch.zeros_like(state["there"]), episode], 1
        )  # the window is of the episode before `first`
        there = torch.cat([state["there"], torch.ones_like(episode)], 1)
        at = torch.arange(window + steps, device=x.device)
        back = at[window:].unsqueeze(1) - at  # [Q, K]
        in_reach = (back >= 0) & (back <= window)
        visible = (episodes.unsqueeze(1) == episode.unsqueeze(2)) & (there > 0.5).unsqueeze(1) & in_reach
        distances = back.clamp(0, window)
        kept = []
        for layer, past in zip(self.layers, state["rows"].split(self.size, 2), strict=True):
            rows = torch.cat([past, x], 1)
            kept.append(rows[:, -window:])
            x = layer(rows, steps, visible, distances, self.waves)
        there = (there * (episodes == episode[:, -1:]))[:, -window:]
        return x, {"rows": torch.cat(kept, 2) * there.unsqueeze(2), "there": there}


def _waves(count: int, size: int) -> Tensor:
    """Sines and cosines of the distances 0, 1, ...: `[count, size]` (Vaswani et al. 2017)."""
    half = -(-size // 2)
    angles = torch.arange(count).unsqueeze(1) * 10_000.0 ** (-torch.arange(half) / half)
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :size]


Memory = Recurrent | GTrXL
