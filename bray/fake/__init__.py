"""Partners to develop against: a game without a player, a service without an agent, a model without weights."""

from bray.fake.model import FakeModel

__all__ = ["FakeModel"]
