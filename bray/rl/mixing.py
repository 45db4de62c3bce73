"""Values of teams from those of their agents."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def monotonic_mix(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """elu(q |W1| + b1) |w2| + b2: a value that no agent's lowers by being higher (Rashid et al. 2018). `q [..., N]`,
    `w1 [..., N, H]`, `b1, w2 [..., H]`, `b2 [...]` -> `[...]`."""
    hidden = F.elu((q.unsqueeze(-2) @ w1.abs()).squeeze(-2) + b1)
    return (hidden * w2.abs()).sum(-1) + b2
