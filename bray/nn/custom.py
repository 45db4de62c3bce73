"""`custom_model`: a network of the user's own in place of ours (docs/networks.md).

A class is called as `Net(spec, config)`, or as `Net(obs_dim, act_dim)` if its parameters have such names; an instance
is used as it is. It returns the dict that the algorithm reads, or what tutorials return: a tensor, or a tuple. It has a
memory if its `forward` takes a state beside the observation. What does not fit is answered with one message that shows
the signature.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bray import tree
from bray.errors import ConfigError
from bray.nn.config import ModelConfig
from bray.nn.encoders import Features, make_encoder
from bray.nn.heads import LOG_STD_MAX, LOG_STD_MIN, VALUE_GAIN
from bray.nn.layers import linear
from bray.nn.noise import Shapes
from bray.nn.own import example_obs, find_own, make_preprocessor
from bray.spec import EnvSpec

_BATCH = 2
_OBS_WORDS = ("obs", "state", "input", "in_dim", "in_size", "in_features", "s_dim", "feature")
_ACT_WORDS = ("act", "out", "a_dim")
_STATE_NAMES = ("state", "hidden", "h", "hx", "memory", "carry", "hidden_state", "rnn_state", "lstm_state", "states")
_RETURNS = {
    "actor_critic": "or a tuple (dist, value); or dist alone, then Bray adds a value network",
    "q": "or that tensor alone",
    "squashed_gaussian": "or a tuple (mean, log_std)",
    "deterministic": "or that tensor alone, in [-1, 1]",
    "categorical": "or that tensor alone",
}
_SINGLE = {"q": "q", "deterministic": "mu", "categorical": "dist"}
"""What a lone tensor is."""
_WORDS = {
    "actor_critic": "PPO and A2C take",
    "q": "DQN, PQN and R2D2 take",
    "squashed_gaussian": "SAC and CrossQ take",
    "deterministic": "TD3 and DDPG take",
    "categorical": "SAC-Discrete takes",
}


def make_custom(kind: str, want: Shapes, spec: EnvSpec, config: ModelConfig, memory: bool = False) -> nn.Module:
    """The user's network, checked on one batch to return the arrays `want` (by name, for a batch of 2). `memory`:
    whether it may have one."""
    return _Maker(kind, want, spec, config, memory).make()


class _Maker:
    def __init__(self, kind: str, want: Shapes, spec: EnvSpec, config: ModelConfig, memory: bool):
        self.kind, self.want, self.spec, self.config, self.memory = kind, want, spec, config, memory
        self.name = config.custom_model if isinstance(config.custom_model, str) else _name_of(config.custom_model)
        self.features: nn.Module | None = None

    def make(self) -> nn.Module:
        net = self._build()
        if not isinstance(net, nn.Module):
            raise self.refuse(f"it should make an nn.Module, it made {type(net).__name__}")
        if _takes_state(net):
            if not self._passes_state_on(net):
                return self._with_memory(net)
            net = Stateless(net)
        if self.config.use_lstm:
            raise self.refuse("use_lstm adds no memory to it: leave that out, or let forward take and return a state")
        out = self._call(net, self._input(_BATCH))
        adapter = Adapted(net, self.features, self._reader(net, out))
        if self.features is None and isinstance(out, dict):
            return net
        return adapter

    def _build(self) -> Any:
        found, options = find_own("model", self.config.custom_model), self.config.custom_options
        if isinstance(found, nn.Module):
            return copy.deepcopy(found)  # a second run begins with the weights that the first one began with
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):  # written in C
            return found(self._seen_spec(), self.config, **options)
        sizes = self._sizes(signature)
        knows_its_sizes = all(
            p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
        )
        given = () if sizes is not None or knows_its_sizes else (self._seen_spec(), self.config)
        options = {**(sizes or {}), **options}
        try:
            signature.bind(*given, **options)
        except TypeError as e:
            raise self.refuse(f"it is {_show(found, signature)}: {e}") from None
        return self._run(lambda: found(*given, **options), f"{_name_of(found)}.__init__")

    def _seen_spec(self) -> EnvSpec:
        """The spaces as a network that takes them sees them: behind the `custom_preprocessor`, where there is one."""
        if self.config.custom_preprocessor is None:
            return self.spec
        self.features = make_preprocessor(self.spec.observation, self.config)
        return replace(self.spec, observation=self.features.space)  # type: ignore[arg-type]

    def _sizes(self, signature: inspect.Signature) -> dict[str, Any] | None:
        """Values for parameters that are called obs_dim, n_actions, hidden_dim and the like; None where the first one
        is no size."""
        names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = [n for n in names if n not in self.config.custom_options]
        if not names or _size_word(names[0]) not in ("obs", "shape"):
            return None
        features = Features(self.spec.observation, self.config)
        if _size_word(names[0]) == "obs":
            if features.has_image:
                raise self.refuse(
                    f"{names[0]} is a number and the observation holds an image: take (spec, config) instead"
                )
            self.features = features
        layout = self.spec.layout
        actions = layout.size if layout.continuous else layout.num_params
        sizes: dict[str, Any] = {"obs": features.out_features, "shape": self.spec.observation.shape, "act": actions}
        sizes["hidden"] = (*self.config.fcnet_hiddens, 64)[0]
        found = {n: (_size_word(n), signature.parameters[n]) for n in names}
        return {n: sizes[word] for n, (word, p) in found.items() if word and (word != "hidden" or p.default is p.empty)}

    def _input(self, batch: int) -> Any:
        obs = example_obs(self.spec.observation, batch)
        return obs if self.features is None else self.features(obs)

    def _call(self, net: nn.Module, *args: Any) -> Any:
        probe = copy.deepcopy(net).eval()  # batch norms and the like keep what they have
        with torch.no_grad():
            return self._run(lambda: probe(*args), f"{type(net).__name__}.forward")

    def _run(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except ConfigError:
            raise
        except Exception as e:
            frame = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename][-1]
            place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            raise self.refuse(f"{what} raised {type(e).__name__} at {place}: {e}") from e

    # --- what it returns ----------------------------------------------------------------------------------------------

    def _reader(self, net: nn.Module, out: Any) -> OutputReader:
        """How the outputs of this network become the dict that the algorithm reads."""
        read = OutputReader(self.kind)
        layout = self.spec.layout
        head = out[0] if isinstance(out, (tuple, list)) and out else out
        if self.kind == "actor_critic" and isinstance(out, Tensor):
            read.value = _Value(self.spec, self.config)
        if self.kind == "actor_critic" and layout.continuous and _shape(head) == (_BATCH, layout.size):
            read.log_std = nn.Parameter(torch.full((layout.size,), float(self.config.log_std_init)))
        obs = example_obs(self.spec.observation, _BATCH)
        try:
            with torch.no_grad():
                got = {k: v for k, v in read(out, obs).items() if k in self.want}
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            got = {}
        shapes = {k: _shape(v) for k, v in got.items()}
        if shapes != self.want:
            raise self.refuse(f"for a batch of {_BATCH} it returned {_describe(out)}")
        for name, array in got.items():
            if not array.is_floating_point() or array.dtype == torch.float64:
                raise self.refuse(f"it returned {name} as {array.dtype}: return float32, as .float() makes it")
        logits = got.get("dist" if layout.discrete else "q", got.get("q"))
        if logits is not None and logits.shape[-1] > 1 and bool(_are_probabilities(logits)):
            raise self.refuse("it returned probabilities (they sum to 1): leave out the softmax")
        return read

    # --- memory -------------------------------------------------------------------------------------------------------

    def _passes_state_on(self, net: nn.Module) -> bool:
        """Whether it takes a state for the sake of the signature only: `forward(obs, state=None)` returns (outputs,
        None), as in Tianshou."""
        if callable(getattr(net, "initial_state", None)):
            return False
        out = self._call(net, self._input(_BATCH), None)
        return isinstance(out, (tuple, list)) and len(out) == 2 and out[1] is None

    def _with_memory(self, net: nn.Module) -> nn.Module:
        if not self.memory:
            raise self.refuse(
                "its forward takes a state, and this algorithm cannot train a memory (R2D2, PPO and A2C can)"
            )
        states = [self._first_state(net, n) for n in (_BATCH, _BATCH + 1)]
        if any(bool(x.any()) for x in pytree.tree_leaves(states[0])):
            raise self.refuse("the memory of an episode begins with zeros, its initial_state does not")
        axes = [
            [d for d in range(min(a.ndim, b.ndim)) if a.shape[d] != b.shape[d]]
            for a, b in zip(*map(pytree.tree_leaves, states), strict=True)
        ]
        if not axes or any(len(found) != 1 for found in axes):
            raise self.refuse(f"each array of its state should have one axis for the batch, got {_describe(states[0])}")
        out = self._call(net, self._input(_BATCH), states[0])
        head, state = split_state(out)
        if state is None or _describe(state) != _describe(states[0]):
            raise self.refuse(f"its state is {_describe(states[0])}, and forward(obs, state) returned {_describe(out)}")
        read = self._reader(net, head)
        first = all(found == [0] for found in axes) and isinstance(states[0], dict)
        if self.features is None and isinstance(out, dict) and first and hasattr(net, "unroll"):
            return net
        leaves, structure = pytree.tree_flatten(states[0])
        names = [str(i) for i in range(len(leaves))]
        shapes = [tuple(n for d, n in enumerate(x.shape) if d != axis[0]) for x, axis in zip(leaves, axes, strict=True)]
        return AdaptedMemory(net, self.features, read, Memory(names, shapes, [axis[0] for axis in axes], structure))

    def _first_state(self, net: nn.Module, batch: int) -> Any:
        """What `initial_state` gives; without one, zeros like the state that comes back when None goes in (as with
        nn.LSTM and nn.GRU)."""
        initial: Any = getattr(net, "initial_state", None)
        if callable(initial):
            return self._run(lambda: initial(batch), f"{type(net).__name__}.initial_state")
        _, state = split_state(self._call(net, self._input(batch), None))
        if state is None:
            raise self.refuse("its forward takes a state and returns none")
        return pytree.tree_map(torch.zeros_like, state)

    def refuse(self, why: str) -> ConfigError:
        memory = (
            "    with a memory: forward(self, obs, state) returns these and the new state; initial_state(self, "
            "batch_size) returns zeros\n"
        )
        returns = ", ".join(f'"{k}": [B{"".join(f", {n}" for n in v[1:])}]' for k, v in self.want.items())
        return ConfigError(
            f"custom_model {self.name} does not fit: {why}. {_WORDS[self.kind]}\n    class Net(nn.Module):\n        "
            "def __init__(self, spec, config, **custom_options): ...    # or (obs_dim, act_dim); an instance will do "
            f"too\n        def forward(self, obs): ...    # {_describe(self._input(_BATCH))} for a batch of {_BATCH}\n"
            f"            return {{{returns}}}    # {_RETURNS[self.kind]}\n{memory if self.memory else ''}  "
            "docs/networks.md has examples."
        )


def split_state(out: Any) -> tuple[Any, Any]:
    """What a network with memory returned: its outputs, and the state; None where there is none."""
    if isinstance(out, dict):
        return {k: v for k, v in out.items() if k != "state"}, out.get("state")
    if isinstance(out, (tuple, list)) and len(out) > 1:
        return (out[0] if len(out) == 2 else tuple(out[:-1])), out[-1]
    return out, None


class _Value(nn.Module):
    """A value network beside a policy that has none."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.encoder = make_encoder(spec.observation, config)
        self.head = linear(self.encoder.out_features, 1, VALUE_GAIN, config.init)

    def forward(self, obs: Any) -> Tensor:
        return self.head(self.encoder(obs))


class OutputReader(nn.Module):
    """Tensors and tuples, as tutorials return them, as the dict that an algorithm reads."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.value: nn.Module | None = None
        self.log_std: nn.Parameter | None = None

    def forward(self, out: Any, obs: Any) -> dict[str, Tensor]:
        if isinstance(out, dict):
            return out
        if self.kind in _SINGLE:
            return {_SINGLE[self.kind]: out}
        if self.kind == "squashed_gaussian":
            mean, log_std = out.chunk(2, 1) if isinstance(out, Tensor) else out
            return {"dist": torch.cat([mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)], 1)}
        dist, value = (out, self.value(obs)) if self.value is not None else out
        if self.log_std is not None:
            dist = torch.cat([dist, self.log_std.expand(dist.shape[0], -1)], 1)
        return {"dist": dist, "value": value.squeeze(1) if value.ndim == 2 else value}


class Stateless(nn.Module):
    """`forward(obs, state=None)` that hands its state back unused, as a network without memory."""

    recurrent = False

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, obs: Any) -> Any:
        return self.net(obs, None)[0]


class Adapted(nn.Module):
    """A user's network that takes flat features, or returns no dict."""

    recurrent = False

    def __init__(self, net: nn.Module, features: nn.Module | None, read: OutputReader):
        super().__init__()
        self.net, self.features, self.read = net, features, read
        self.draws: Shapes = getattr(net, "draws", None) or {}

    def forward(self, obs: Any, *draws: Any) -> dict[str, Any]:
        return self.read(self.net(obs if self.features is None else self.features(obs), *draws), obs)


class Memory:
    """Between the state that a user's network has (any tree, the batch on any axis, as in nn.LSTM) and ours: a dict,
    the batch first."""

    def __init__(self, names: list[str], shapes: list[tuple[int, ...]], axes: list[int], structure: Any):
        self.names, self.shapes, self.axes, self.structure = names, shapes, axes, structure

    def to_net(self, state: dict[str, Tensor]) -> Any:
        moved = [state[n].movedim(0, axis) for n, axis in zip(self.names, self.axes, strict=True)]
        return pytree.tree_unflatten([x.contiguous() for x in moved], self.structure)

    def to_ours(self, state: Any) -> dict[str, Tensor]:
        leaves = pytree.tree_leaves(state)
        return {n: x.movedim(axis, 0) for n, axis, x in zip(self.names, self.axes, leaves, strict=True)}


class AdaptedMemory(Adapted):
    """A user's network with memory; a sequence is one step after another."""

    recurrent = True

    def __init__(self, net: nn.Module, features: nn.Module | None, read: OutputReader, memory: Memory):
        super().__init__(net, features, read)
        self.memory = memory

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        like = next(self.parameters())
        memory = self.memory
        return {n: like.new_zeros(batch_size, *s) for n, s in zip(memory.names, memory.shapes, strict=True)}

    def forward(self, obs: Any, state: Any, *draws: Any) -> dict[str, Any]:
        x = obs if self.features is None else self.features(obs)
        out, after = split_state(self.net(x, self.memory.to_net(state), *draws))
        return {**self.read(out, obs), "state": self.memory.to_ours(after)}

    def unroll(self, obs: Any, state: Any, first: Tensor, *draws: Any) -> dict[str, Any]:
        """obs `[T, B, ...]`, state before row 0, `first [T, B]` (episode starts: state zeroed) -> outputs `[T, B, ...]`
        and the last state."""
        rows = []
        for t in range(first.shape[0]):
            keep = (~first[t].bool()).float()
            state = {n: x * keep.reshape(-1, *[1] * (x.ndim - 1)) for n, x in state.items()}
            out = self(tree.map(lambda x, t=t: x[t], obs), state, *draws)
            state = out.pop("state")
            rows.append(out)
        return {**{k: torch.stack([row[k] for row in rows]) for k in rows[0]}, "state": state}


# --- names and shapes -------------------------------------------------------------------------------------------------


def _takes_state(net: nn.Module) -> bool:
    """Whether its forward takes a state beside the observation."""
    said = getattr(net, "recurrent", None)
    if isinstance(said, bool):
        return said
    names = [p.name for p in inspect.signature(net.forward).parameters.values()]
    return callable(getattr(net, "initial_state", None)) or (len(names) > 1 and names[1] in _STATE_NAMES)


def _size_word(name: str) -> str | None:
    """What a parameter of this name is: the size or shape of an observation, the number of actions, or of hidden
    units."""
    name = name.lower()
    if "space" in name or "spec" in name:
        return None
    if "shape" in name:
        return "shape" if any(word in name for word in _OBS_WORDS) else None
    if "hid" in name:
        return "hidden"
    if any(word in name for word in _OBS_WORDS):
        return "obs"
    return "act" if any(word in name for word in _ACT_WORDS) and "activ" not in name else None


def _name_of(made: Any) -> str:
    named = made if hasattr(made, "__qualname__") else type(made)
    return str(named.__qualname__)


def _show(made: Any, signature: inspect.Signature) -> str:
    return f"{_name_of(made)}{signature}"


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _are_probabilities(x: Tensor) -> Tensor:
    return (x >= 0).all() & ((x.sum(-1) - 1).abs() < 1e-4).all()


def _describe(value: Any) -> str:
    """Shapes (and types that are not float32) of a tree of tensors."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{list(value.shape)}" + ("" if kind == "float32" else f" {kind}")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_describe, value)) + ")"
    return type(value).__name__
