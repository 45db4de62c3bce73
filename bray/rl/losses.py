"""Terms of the losses, in torch. Each returns one number per sample; a dot product with the weights makes it a loss.

B batch, N actions, K atoms or quantiles. Targets carry no gradient. `discount` is gamma^n, or 0 where the episode
terminated within those n steps, so that one `td_error` serves 1-step and n-step, Q and V.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bray.rl.transforms import rescale, unrescale

# Policies


def ppo_clip(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """`clipped_surrogate` of r = pi/pi_old, and r."""
    ratio = (logp - logp_old).exp()
    return clipped_surrogate(ratio, advantage, clip, dual_clip), ratio


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float, dual_clip: float | None = None) -> Tensor:
    """-min(r A, clip(r) A), r = pi/pi_old (Schulman et al. 2017). Dual clip (Ye et al. 2020): at least c A where A < 0.

    Only one side of the clip can be the minimum, 1 + clip where A > 0 and 1 - clip where A < 0: min(r A, A + clip |A|).
    A `where` on constants has a third of the backward operations of `minimum` and `clamp`.
    """
    gain, bound = ratio * advantage, advantage + clip * advantage.abs()
    objective = torch.where(gain < bound, gain, bound)
    if dual_clip is not None:
        objective = torch.where(advantage < 0.0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective


def kl_estimate(logp: Tensor, logp_other: Tensor, kind: str = "k3") -> Tensor:
    """KL(pi, other) from samples of pi (Schulman 2020), d = log pi - log other: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1
    + d (unbiased and never negative)."""
    d = logp - logp_other
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kind should be k1, k2 or k3, got {kind!r}")


def categorical_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(p, q) of p = softmax(logits), q = softmax(other), `[..., N]` -> `[...]`: sum p (log p - log q). With the old
    policy first and without gradient it is what PPG's auxiliary phase keeps the policy by (Cobbe et al. 2021)."""
    logp = logits.log_softmax(-1)
    return (logp.exp() * (logp - other.log_softmax(-1))).sum(-1)


def counterfactual_advantage(q: Tensor, probs: Tensor, action: Tensor) -> Tensor:
    """Q(u) - sum_a pi(a) Q(a), without gradient (COMA, Foerster et al. 2018): `[..., N]`, `[..., N]`, `[...]` ->
    `[...]`."""
    return (select(q, action) - (probs * q).sum(-1)).detach()


def acer_policy(
    logits: Tensor, logp_behaviour: Tensor, action: Tensor, q: Tensor, q_retrace: Tensor, truncation: float = 10.0
) -> Tensor:
    """ACER's policy loss (Wang et al. 2017): `logits, logp_behaviour, q [B, N]`, `action, q_retrace [B]` -> `[B]`.

        -min(c, rho_a) log pi(a) (Qret - V) - sum_b max(0, 1 - c / rho_b) pi(b) log pi(b) (Q(b) - V)

    rho = pi / mu, V = sum_b pi(b) Q(b); only log pi carries a gradient. Actions with logits of -inf do not count.
    """
    never, logp = logits == -torch.inf, logits.log_softmax(-1)
    pi = logp.detach().exp()
    logp, logp_behaviour, q = (x.masked_fill(never, 0.0) for x in (logp, logp_behaviour, q.detach()))
    rho, value = (logp.detach() - logp_behaviour).exp(), (pi * q).sum(-1)
    taken = select(rho, action).clamp(max=truncation) * select(logp, action) * (q_retrace.detach() - value)
    correction = (1.0 - truncation / rho).clamp(min=0.0) * pi * logp * (q - value.unsqueeze(-1))
    return -taken - correction.sum(-1)


def trust_region(gradient: Tensor, kl_gradient: Tensor, delta: float) -> Tensor:
    """ACER's gradient projected to a KL step of at most delta: g - max(0, (k.g - delta) / |k|^2) k, `[B, N]`."""
    excess = (kl_gradient * gradient).sum(-1, keepdim=True) - delta
    return gradient - (excess / kl_gradient.square().sum(-1, keepdim=True)).clamp(min=0.0) * kl_gradient


# Imitation


def cross_entropy(logit: Tensor, label: float) -> Tensor:
    """-label log D - (1 - label) log(1 - D) of a discriminator D = sigmoid(logit)."""
    return F.softplus(logit) - label * logit


def imitation_reward(logit: Tensor, signed: bool = False) -> Tensor:
    """-log(1 - D), D = sigmoid(logit) the chance that a step is demonstrated (Ho & Ermon 2016); `signed`: log D -
    log(1 - D), which is below 0 for what is more likely played (Fu et al. 2018)."""
    return logit if signed else F.softplus(logit)


# Values


def value_loss(value: Tensor, target: Tensor, value_old: Tensor | None = None, clip: float | None = None) -> Tensor:
    """(V - R)^2 / 2, or the larger of that and the same with V clipped to V_old +- clip."""
    loss = (value - target).square()
    if clip is not None:
        assert value_old is not None
        clipped = value_old + (value - value_old).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - target).square())
    return 0.5 * loss


def td_error(q: Tensor, reward: Tensor, discount: Tensor, q_next: Tensor) -> Tensor:
    """q - (r + discount q'), the target without gradient; with n-step samples, r is their sum and discount gamma^n or
    0."""
    return q - (reward + discount * q_next).detach()


def rescaled_td_error(q: Tensor, reward: Tensor, discount: Tensor, q_next: Tensor, eps: float = 1e-3) -> Tensor:
    """q - h(r + discount h^-1(q')): for networks that predict rescaled values (Pohlen et al. 2018; R2D2)."""
    target: Tensor = rescale(reward + discount * unrescale(q_next, eps), eps)
    return q - target.detach()


def soft_value(q: Tensor, alpha: float | Tensor) -> Tensor:
    """alpha logsumexp(q / alpha): the value of the policy softmax(q / alpha) with its entropy (Haarnoja et al. 2017).
    `[..., N]` -> `[...]`.
    Actions with q = -inf do not count."""
    return alpha * torch.logsumexp(q / alpha, -1)


def munchausen_bonus(q: Tensor, action: Tensor, tau: float = 0.03, alpha: float = 0.9, low: float = -1.0) -> Tensor:
    """alpha clip(tau log pi(a), low, 0), pi = softmax(q / tau) (Vieillard et al. 2020): added to the reward, with
    `soft_value(q', tau)` as the next value."""
    log_policy = select(q, action) - soft_value(q, tau)
    return alpha * log_policy.clamp(low, 0.0).detach()


def margin_loss(q: Tensor, action: Tensor, margin: float = 0.8) -> Tensor:
    """max_a (q(a) + margin 1{a != expert's}) - q(expert's): the supervised term of DQfD (Hester et al. 2018). `[B, N]`,
    `[B]` -> `[B]`."""
    raised = q + margin
    raised = raised.scatter(-1, action.unsqueeze(-1), select(q, action).unsqueeze(-1))
    return raised.amax(-1) - select(q, action)


def huber(x: Tensor, delta: float | None = 1.0) -> Tensor:
    """x^2/2 near zero, delta (|x| - delta/2) beyond delta; without a delta x^2/2 everywhere."""
    if delta is None:
        return 0.5 * x.square()
    return F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def expectile(x: Tensor, tau: float) -> Tensor:
    """|tau - 1{x < 0}| x^2 (IQL, Kostrikov et al. 2021): its least sum over x = q - v has v at the tau-expectile of q;
    tau = 0.5 is the mean."""
    return torch.where(x < 0.0, 1.0 - tau, tau) * x.square()


def select(q: Tensor, action: Tensor) -> Tensor:
    """q[b, action[b]]: `[B, N]` and `[B]` -> `[B]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)


# Distributions of returns


def select_action(x: Tensor, action: Tensor) -> Tensor:
    """x[b, action[b]] for atoms or quantiles: `[B, N, K]` and `[B]` -> `[B, K]`."""
    return x.gather(1, action.view(-1, 1, 1).expand(-1, 1, x.shape[-1])).squeeze(1)


def project(probs: Tensor, support: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """The distribution of r + discount z on the atoms of `support` (C51, Bellemare et al. 2017): `probs [B, K]`,
    `support [K]` evenly spaced, `reward, discount [B]` -> `[B, K]`. What lies beyond the support counts at its ends.

    Each moved atom is shared between its lower and its upper neighbour by its distance to both; the highest atom counts
    as the upper neighbour of the one before it, so that one that falls upon an atom is whole there.
    """
    with torch.no_grad():
        spacing, most = support[1] - support[0], len(support) - 1
        # where r + discount z lies, counted in atoms
        base, scale = ((reward - support[0]) / spacing).unsqueeze(-1), (discount / spacing).unsqueeze(-1)
        place = torch.addcmul(base, scale, support).clamp(0, most)
        below = place.floor().clamp(max=most - 1)
        upper = (place - below) * probs
        lower = below.long()
        return torch.zeros_like(probs).scatter_add_(-1, lower, probs - upper).scatter_add_(-1, lower + 1, upper)


def categorical_loss(logits: Tensor, target: Tensor) -> Tensor:
    """-sum_k target_k log p_k: `[B, K]`, `[B, K]` -> `[B]`."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quantile_huber(quantiles: Tensor, tau: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    """Quantile regression (QR-DQN, IQN; Dabney et al. 2018): `quantiles, tau [B, K]`, `target [B, M]` -> `[B]`.

        sum_i mean_j |tau_i - 1{u_ij < 0}| huber_kappa(u_ij) / kappa,   u_ij = target_j - quantile_i

    kappa = 0 is the quantile loss itself, |u| in place of huber / kappa. The gradient is that by the quantiles.
    """
    # By the gradient's own formula: half of the passes over `[B, K, M]` that autograd needs.
    with torch.no_grad():
        u = target.unsqueeze(1) - quantiles.unsqueeze(2)
        inner = u.clamp(-kappa, kappa) if kappa > 0 else u.sign()  # huber_kappa(u) = inner (u - inner / 2)
        # |tau - 1{u < 0}| inner, which is minus the gradient of a term by its quantile
        slope = torch.add((tau - 0.5).unsqueeze(2) * inner.abs(), inner, alpha=0.5)
        loss = (slope * (torch.sub(u, inner, alpha=0.5) if kappa > 0 else u)).mean(2)
        slope = slope.mean(2)
    return (loss - slope * (quantiles - quantiles.detach())).sum(1) / (kappa or 1.0)


def fraction_loss(tau: Tensor, at_tau: Tensor, at_middle: Tensor) -> Tensor:
    """FQF's loss of the proposed fractions (Yang et al. 2019): its gradient by tau_i is that of the Wasserstein
    distance, 2 F(tau_i) - F(middle_i) - F(middle_{i-1}).

    `tau [B, K-1]`: the inner fractions, growing; `at_tau [B, K-1]`: quantiles there; `at_middle [B, K]`: quantiles at
    the middles of the K intervals. Where the quantiles do not grow as they should, the distance to the wrong neighbour
    counts with its size.
    """
    at_tau, at_middle = at_tau.detach(), at_middle.detach()
    below = torch.cat([at_middle[:, :1], at_tau[:, :-1]], 1)
    above = torch.cat([at_tau[:, 1:], at_middle[:, -1:]], 1)
    left, right = at_tau - at_middle[:, :-1], at_tau - at_middle[:, 1:]
    gradient = torch.where(at_tau > below, left, -left) + torch.where(at_tau < above, right, -right)
    return (gradient * tau).sum(-1)


# Labels and pairs


def match_labels(logits: Tensor, label: Tensor) -> Tensor:
    """Which label each row of logits is trained towards, where the order of the labels means nothing: the assignment
    with the least cross entropy.
    `logits [K, N]`, `label [K]` -> `[K]`, the labels in another order (the Hungarian method, Kuhn 1955)."""
    cost = -logits.detach().log_softmax(-1)[:, label]  # [K, K]
    return label[torch.tensor(_assign(cost.double().cpu().numpy()), device=label.device)]


def _assign(cost: np.ndarray) -> list[int]:
    """The column of each row in the assignment of least cost: rows come in one by one, each along the shortest path of
    changes."""
    n = len(cost)
    row_of = np.full(n + 1, -1)  # column n stands for the row that comes in
    row_price, column_price = np.zeros(n), np.zeros(n + 1)
    for row in range(n):
        row_of[n], column = row, n
        least, came_from, seen = np.full(n, np.inf), np.full(n, n), np.zeros(n + 1, bool)
        while row_of[column] >= 0:
            seen[column] = True
            free = ~seen[:n]
            reduced = cost[row_of[column]] - row_price[row_of[column]] - column_price[:n]
            better = free & (reduced < least)
            least[better], came_from[better] = reduced[better], column
            nearest = int(np.where(free, least, np.inf).argmin())
            step = least[nearest]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            least[free] -= step
            column = nearest
        while column != n:
            row_of[column] = row_of[came_from[column]]
            column = int(came_from[column])
        row_of[n] = -1
    return [int(np.flatnonzero(row_of[:n] == row)[0]) for row in range(n)]


def smoothed_cross_entropy(logits: Tensor, label: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross entropy to the label with `smoothing` of its probability spread over all classes alike (Szegedy et al.
    2016): `logits [..., N]`, `label [...]` -> `[...]`. 0 is the plain cross entropy."""
    logp = logits.log_softmax(-1)
    return -(1.0 - smoothing) * select(logp, label) - smoothing * logp.mean(-1)


def focal(logits: Tensor, label: Tensor, gamma: float = 2.0) -> Tensor:
    """-(1 - p)^gamma log p, p the probability of the label (Lin et al. 2017): what is known well counts little.
    `logits [..., N]`, `label [...]` -> `[...]`. gamma = 0 is the plain cross entropy."""
    logp = select(logits.log_softmax(-1), label)
    missing = (-torch.expm1(logp)).clamp(min=1e-12)  # a power below 1 has no gradient at 0
    return -(missing**gamma) * logp


def contrastive(x: Tensor, y: Tensor, temperature: float = 0.1) -> Tensor:
    """InfoNCE (van den Oord et al. 2018): of all rows of y, the one at the same place belongs to a row of x.
    `x, y [B, D]` -> `[B]`.

        -log softmax_j(cos(x_i, y_j) / temperature) at j = i

    B independent rows make B - 1 wrong answers for each; log B is what guessing costs.
    """
    similarity = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).transpose(-1, -2)
    return -(similarity / temperature).log_softmax(-1).diagonal(dim1=-2, dim2=-1)
