"""LSTM and GRU on top of an encoder, for one step at a time (acting) and for whole sequences (learning).

The state is a dict of `[B, size]` tensors, carried by whoever drives and zeroed where an episode starts. For a sequence the
encoder and the input projection run once over all T x B rows; only the product with the hidden state is left to the loop.
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
    """An encoder followed by one recurrent cell. Same functions as torch.nn.LSTMCell and GRUCell; the blocks of the LSTM's
    weights are in the order input, forget, output, cell, so that the three sigmoids are one operation."""

    def __init__(self, encoder: nn.Module, cell: str = "lstm", size: int = 256):
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

    def initial_state(self, batch_size: int) -> State:
        """Zeros, on the device of the weights."""
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        return {name: self.hidden.new_zeros(batch_size, self.size) for name in names}

    def _step(self, x: Tensor, state: State) -> State:
        """One step from the projected input `[B, blocks * size]`."""
        h, n = state["h"], self.size
        if self.cell == "lstm":
            sums = torch.addmm(x, h, self.hidden)
            gates, new = sums.split([3 * n, n], 1)
            i, f, o = torch.sigmoid(gates).split(n, 1)
            c = torch.addcmul(f * state["c"], i, torch.tanh(new))
            return {"h": o * torch.tanh(c), "c": c}
        x_gates, x_new = x.split([2 * n, n], 1)
        w_gates, w_new = self.hidden.split([2 * n, n], 1)
        r, z = torch.sigmoid(torch.addmm(x_gates, h, w_gates)).split(n, 1)
        new = torch.tanh(torch.addcmul(x_new, r, torch.addmm(self.hidden_bias, h, w_new)))
        return {"h": torch.lerp(new, h, z)}

    def forward(self, obs: Any, state: State) -> tuple[Tensor, State]:
        """One step: obs `[B, ...]` and the state before it -> features `[B, size]` and the state after."""
        state = self._step(self.project(self.encoder(obs)), state)
        return state["h"], state

    def unroll(self, obs: Any, state: State, first: Tensor) -> tuple[Tensor, State]:
        """T steps: obs `[T, B, ...]`, the state before row 0, `first [T, B]` -> features `[T, B, size]` and the last state.
        Where `first[t]`, the state is zeroed before row t."""
        steps, batch = first.shape
        flat = self.encoder(tree.map(lambda x: x.flatten(0, 1), obs))
        rows = self.project(flat).unflatten(0, (steps, batch)).unbind(0)
        keep = (1.0 - first.to(flat.dtype)).unsqueeze(-1).unbind(0)
        out = []
        for t in range(steps):
            state = self._step(rows[t], {name: s * keep[t] for name, s in state.items()})
            out.append(state["h"])
        return torch.stack(out), state
