"""Bray: train a game agent and serve it with the same code."""

from bray._version import __version__

__all__ = ["__version__"]
