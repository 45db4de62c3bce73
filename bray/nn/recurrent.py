"""LSTM and GRU on top of an encoder, for one step at a time (acting) and for whole sequences (learning).

The state is a dict of `[B, size]` tensors, carried by whoever drives and zeroed where an episode starts. For a sequence
the encoder and the input's part of the sums run once over all T x B rows; only the product with the hidden state is
left to the loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bray import tree
from bray.errors import UnknownName

State = dict[str, Tensor]
CELLS = ("lstm", "gru")


class Recurrent(nn.Module):
    """An encoder followed by one recurrent cell. Same functions as torch.nn.LSTMCell and GRUCell; the blocks of the
    LSTM's weights are in the order input, forget, output, cell, so that the three sigmoids are one operation. An LSTM
    begins with a forget-gate bias of 1: it remembers until it learns to forget (Gers et al. 2000).

    `layer_norm`: what comes from the input, what comes from the hidden state and the LSTM's cell before its tanh are
    normalised apart, each with a gain and the first and the last with a bias (Ba et al. 2016)."""

    def __init__(self, encoder: nn.Module, cell: str = "lstm", size: int = 256, layer_norm: bool = False):
        super().__init__()
        if cell not in CELLS:
            raise UnknownName("recurrent cell", cell, CELLS)
        self.encoder, self.cell, self.size = encoder, cell, size
        self.out_features = size
        blocks = 4 if cell == "lstm" else 3
        self.project = nn.Linear(int(encoder.out_features), blocks * size)  # type: ignore[arg-type]
        self.hidden = nn.Parameter(torch.empty(size, blocks * size))
        nn.init.zeros_(self.project.bias)
        with torch.no_grad():
            for k in range(blocks):
                block = slice(k * size, (k + 1) * size)
                nn.init.orthogonal_(self.project.weight[block])
                self.hidden[:, block] = nn.init.orthogonal_(torch.empty(size, size))
        if cell == "gru":
            self.hidden_bias = nn.Parameter(torch.zeros(size))
        self.layer_norm = layer_norm
        if layer_norm:
            self.norm_input = nn.LayerNorm(blocks * size)
            self.norm_hidden = nn.LayerNorm(blocks * size, bias=False)
            if cell == "lstm":
                self.norm_cell = nn.LayerNorm(size)
        if cell == "lstm":
            bias = self.norm_input.bias if layer_norm else self.project.bias
            nn.init.ones_(bias[size : 2 * size])

    def initial_state(self, batch_size: int) -> State:
        """Zeros, on the device of the weights."""
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        return {name: self.hidden.new_zeros(batch_size, self.size) for name in names}

    def _input(self, obs: Any) -> Tensor:
        """What the input adds to the sums of the cell, `[B, blocks * size]`."""
        x = self.project(self.encoder(obs))
        return self.norm_input(x) if self.layer_norm else x

    def _step(self, x: Tensor, state: State) -> State:
        """One step from the projected input `[B, blocks * size]`."""
        return self._lstm(x, state["h"], state["c"]) if self.cell == "lstm" else self._gru(x, state["h"])

    def _lstm(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        n = self.size
        sums = x + self.norm_hidden(h @ self.hidden) if self.layer_norm else torch.addmm(x, h, self.hidden)
        gates, new = sums.split([3 * n, n], 1)
        i, f, o = torch.sigmoid(gates).split(n, 1)
        c = torch.addcmul(f * c, i, torch.tanh(new))
        return {"h": o * torch.tanh(self.norm_cell(c) if self.layer_norm else c), "c": c}

    def _gru(self, x: Tensor, h: Tensor) -> State:
        n = self.size
        x_gates, x_new = x.split([2 * n, n], 1)
        if self.layer_norm:
            h_gates, h_new = self.norm_hidden(h @ self.hidden).split([2 * n, n], 1)
            gates, h_new = x_gates + h_gates, h_new + self.hidden_bias
        else:
            w_gates, w_new = self.hidden.split([2 * n, n], 1)
            gates, h_new = torch.addmm(x_gates, h, w_gates), torch.addmm(self.hidden_bias, h, w_new)
        r, z = torch.sigmoid(gates).split(n, 1)
        return {"h": torch.lerp(torch.tanh(torch.addcmul(x_new, r, h_new)), h, z)}

    def forward(self, obs: Any, state: State) -> tuple[Tensor, State]:
        """One step: obs `[B, ...]` and the state before it -> features `[B, size]` and the state after."""
        state = self._step(self._input(obs), state)
        return state["h"], state

    def unroll(self, obs: Any, state: State, first: Tensor) -> tuple[Tensor, State]:
        """T steps: obs `[T, B, ...]`, the state before row 0, `first [T, B]` -> features `[T, B, size]` and the last
        state.
        Where `first[t]`, the state is zeroed before row t."""
        steps, batch = first.shape
        flat = self._input(tree.map(lambda x: x.flatten(0, 1), obs))
        rows = flat.unflatten(0, (steps, batch)).unbind(0)
        keep = (1.0 - first.to(flat.dtype)).unsqueeze(-1).unbind(0)
        out = []
        for t in range(steps):
            state = self._step(rows[t], {name: s * keep[t] for name, s in state.items()})
            out.append(state["h"])
        return torch.stack(out), state
