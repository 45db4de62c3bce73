"""Partners to develop against: a game without a player, a service without an agent, a model without weights, a buffer
without games."""

from typing import Any

from bray.fake.model import FakeModel

__all__ = ["FakeBuffer", "FakeModel"]


def __getattr__(name: str) -> Any:
    """FakeBuffer needs a cluster; the others do not."""
    if name != "FakeBuffer":
        raise AttributeError(f"module 'bray.fake' has no attribute {name!r}")
    from bray.fake.buffer import FakeBuffer

    return FakeBuffer
