"""Policy: beside the environment, model outputs in, actions out.

`decide` is a generator: it yields the arguments of a forward and is sent the outputs, as often as it likes, and returns
a Decision.
Whoever drives it owns the Model: a rollout calls it in line, a game session awaits a batched or remote forward. A
Policy that searches yields many times; the default yields once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bray.act.asking import with_return
from bray.act.clock import TRAINED, Clock
from bray.act.rules import Rule
from bray.errors import ConfigError
from bray.spec import ActionLayout
from bray.tree import NestedArray

SAMPLE, GREEDY = "sample", "greedy"
MODES = (SAMPLE, GREEDY)
"""How actions are chosen: drawn as in training, or the best one."""


class Tick(NamedTuple):
    """What B games show before a decision, leaves `[B, ...]`."""

    obs: NestedArray
    reward: np.ndarray | None = None
    """Of the previous action."""
    first: np.ndarray | None = None
    """Where an episode starts."""
    mask: np.ndarray | None = None
    """Legal choices `[B, num_logits]` that came beside the observation; else those in it count."""
    acts: np.ndarray | None = None
    """Who decides, where not all do: others' actions count for nothing."""


class Decision(NamedTuple):
    """What was decided for B games."""

    action: NestedArray
    """In the environment's units."""
    extras: dict[str, NestedArray]
    """Columns for the learner: `action` (flat), `logp`, ..."""
    carry: NestedArray | None
    """What a Model with memory remembers."""
    outputs: dict[str, NestedArray]
    """Of the last forward."""


Deciding = Generator[tuple[Any, ...], dict[str, Any], Decision]


class Policy:
    """Acts by a rule of `bray.act`; a Policy of your own overrides `act`, or `decide` for several forwards."""

    reads: tuple[str, ...] = ()
    """Outputs of the Model that `act` reads."""
    keeps: tuple[str, ...] = ()
    """Outputs that the Learner wants for all T + 1 rows of a piece."""
    rule: Rule | None = None
    """What a service acts by where it does not have this class; None where `act` is a way of its own."""
    _as_chosen = False  # whether the environment takes the numbers that the rule chooses
    simulations: int | None = None
    """Steps of its search for each decision, which may be changed; None where it does not search."""
    target_return: float | None = None
    """What a Model is asked for that plays for a return (`bray.act.asking`); None = what it was trained to ask for."""
    draws: Mapping[str, tuple[int, ...]] = {}
    """Random inputs of the Model (`model.draws`): name -> shape. Greedily it gets none: the mean weights, as in an
    exported graph."""

    def __init__(self, layout: ActionLayout, rule: Rule | None = None):
        self.layout, self.rule = layout, rule
        self._as_chosen = layout.space.kind == "discrete" and not layout.space.start[0]
        if rule is not None and not self.reads:
            self.reads = rule.reads

    def act(
        self, outputs: dict[str, np.ndarray], tick: Tick, rng: np.random.Generator | None, mode: str, clock: Clock
    ) -> tuple[Any, dict[str, Any]]:
        """(actions in the environment's units, columns to keep). `rng` is used in mode `sample` only."""
        assert self.rule is not None, f"{type(self).__name__} has neither a rule nor an `act` of its own"
        mask = self.layout.mask(tick.obs) if tick.mask is None else tick.mask
        extras = self.rule.choose(self.layout, outputs, mask, rng if mode == SAMPLE else None, clock)
        return extras["action"] if self._as_chosen else self.layout.to_env(extras["action"]), extras

    def decide(
        self, tick: Tick, carry: NestedArray | None, rng: np.random.Generator | None, mode: str, clock: Clock
    ) -> Deciding:
        """Yield inputs of the Model, get its outputs, return a Decision. By default: one forward, then `act`."""
        inputs = (tick.obs,) if carry is None else (tick.obs, with_return(carry, self.target_return, tick.reward))
        if self.draws and mode == SAMPLE:
            assert rng is not None
            inputs += (standard_normals(self.draws, rng),)
        outputs = yield inputs
        action, extras = self.act(outputs, tick, rng, mode, clock)
        return Decision(action, extras, outputs.get("state"), outputs)

    def seat(self, first: int, rows: int, total: int) -> None:
        """Its rows are environments `first`, `first` + 1, ... of `total` that train together, those of all workers:
        told before they act. Live games, which come and go, and policies whose training is over are never told."""
        if self.rule is not None:
            self.rule.seat(first, rows, total)

    def label(self, piece: Any) -> Any:
        """A piece that it played, with columns that are made of several rows, such as priorities; called where it was
        played. `keeps` is there."""
        return piece

    def numbers(self, clock: Clock) -> dict[str, float]:
        """What a result row says of acting now (`policy/*`)."""
        return {} if self.rule is None else self.rule.numbers(clock.env_steps)

    def acts_by_rule(self) -> bool:
        """Whether `rule` alone says how this Policy acts once its training is over."""
        kind = type(self)
        return self.rule is not None and kind.act is Policy.act and kind.decide is Policy.decide

    @property
    def served_outputs(self) -> tuple[str, ...]:
        """Outputs of the Model that it acts by once its training is over."""
        return self.rule.reads if self.rule is not None and self.acts_by_rule() else self.reads

    def get_state(self) -> dict[str, np.ndarray]:
        """What it remembers of its rows from one decision to the next: saved with them."""
        return {}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on from `get_state`."""


def search_with(policy: Policy, simulations: int, who: str) -> None:
    """Let a Policy search this many steps for each decision; 0 = the Model alone. `who`: its name in the message."""
    if policy.simulations is None:
        raise ConfigError(
            f"{who}: simulations={simulations} is for a policy that searches, such as that of AlphaZero, and this one "
            "does not: leave it out"
        )
    policy.simulations = simulations


def standard_normals(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """New random inputs for a Model, one draw for a whole batch."""
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def decide_now(deciding: Deciding, forward: Callable[..., dict[str, Any]]) -> Decision:
    """Drive a decision in line."""
    return go_on(deciding, forward(*next(deciding)), forward)


def go_on(deciding: Deciding, outputs: dict[str, Any], forward: Callable[..., dict[str, Any]]) -> Decision:
    """Drive a decision to its end in line, from the outputs that it waits for."""
    while True:
        try:
            inputs = deciding.send(outputs)
        except StopIteration as end:
            decision: Decision = end.value
            return decision
        outputs = forward(*inputs)


class ActingEngine:
    """An engine whose outputs are actions: the Policy decides for the whole batch, with as many forwards as it
    likes."""

    def __init__(
        self, engine: Any, policy: Policy, mode: str, masked: bool, recurrent: bool, with_outputs: bool = False
    ):
        """with_outputs: beside actions give what they were chosen by, `outputs` (of the Model) and `extras` (of the
        Policy)."""
        self.engine, self.policy, self.mode, self.masked, self.recurrent = engine, policy, mode, masked, recurrent
        self.with_outputs = with_outputs
        self.rng = np.random.default_rng()

    def forward(self, obs: Any, *rest: Any) -> dict[str, Any]:
        """rest: a mask where there are choices, then a state where the Model remembers."""
        mask, state = (rest[0], rest[1:]) if self.masked else (None, rest)
        deciding = self.policy.decide(Tick(obs, mask=mask), state[0] if state else None, self.rng, self.mode, TRAINED)
        decision = decide_now(deciding, self.engine.forward)
        out = {"action": decision.action}
        if self.recurrent:
            out["state"] = decision.carry
        if self.with_outputs:
            out["outputs"] = {k: v for k, v in decision.outputs.items() if k != "state"}
            out["extras"] = decision.extras
        return out
