"""An encoder that several policies read and one of them trains."""

from __future__ import annotations

from torch import nn

from bray.errors import ConfigError
from bray.nn.gtrxl import Memory
from bray.nn.heads import TwoEncoders


def acting_encoder(model: nn.Module) -> nn.Module | None:
    """What a Model of ours encodes observations with when it acts: of separate ones for policy and value the policy's.
    Of a network of the user's own its `encoder`."""
    core = getattr(model, "core", None)
    if isinstance(core, Memory):
        core = core.encoder
    if isinstance(core, TwoEncoders):
        core = core.encoders[0]
    found = getattr(model, "encoder", None) if core is None else core
    return found if isinstance(found, nn.Module) else None


def read_encoder(model: nn.Module, owner: nn.Module) -> None:
    """From now on `model` acts by the encoder of `owner`: the same memory, in buffers, so that the optimizer of `owner`
    alone changes it. After the optimizer of `owner` was made, which moves parameters, and before that of `model`."""
    mine, theirs = acting_encoder(model), acting_encoder(owner)
    if mine is None or theirs is None:
        which = type(model if mine is None else owner).__name__
        raise ConfigError(f"{which} has no encoder that could be shared: a network of your own has it as self.encoder")
    shapes, other = ({k: tuple(p.shape) for k, p in part.named_parameters()} for part in (mine, theirs))
    if shapes != other:
        raise ConfigError(
            f"the encoders differ ({_shown(shapes)} here, {_shown(other)} there): one encoder needs policies that see "
            "the same and the same layers up to it (fcnet_hiddens, conv_filters and the rest of `model`)"
        )
    if next(theirs.buffers(), None) is not None:
        raise ConfigError(
            "the encoder keeps statistics of what it sees, and would of what both see: set normalize_observations=false"
        )
    for path, parameter in theirs.named_parameters():
        part, _, name = path.rpartition(".")
        layer = mine.get_submodule(part)
        del layer._parameters[name]
        layer.register_buffer(name, parameter.detach())


def _shown(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{k} {list(shape)}" for k, shape in shapes.items() if len(shape) > 1)
