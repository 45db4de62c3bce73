"""Keys of the result rows that somebody waits for: a stop condition, the score of checkpoints, EarlyStopping."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bray.errors import ConfigError, UnknownName
from bray.metrics.rows import SIDE

logger = logging.getLogger("bray")

OWN_KEYS = ("loss/", "policy/", "replay/")
"""Prefixes of the keys that an algorithm brings."""
CUSTOM = "custom_metrics/"
"""Prefix of the keys that callbacks bring."""
PATIENCE = 20
"""Rows with episodes, after which a custom metric that has not come is told."""


class Awaited:
    def __init__(self, key: str, where: str):
        self.key, self._where = key, where
        self._without = 0  # rows

    def look(self, row: Mapping[str, Any], evaluates: bool) -> None:
        """Refuse a key that no row will have; tell once of a custom metric that does not come. Numbers of updates come
        with the first of them, those of episodes and of evaluations with theirs."""
        key = self.key
        if key in row:
            return
        if key.startswith("eval/"):
            if not evaluates:
                raise ConfigError(f"{self._where}: {key!r}, but nothing is evaluated: set eval_freq (--eval-freq N)")
            return
        learnt = any(k.startswith("loss/") for k in row)
        complete = learnt and row.get("episode_return_mean") is not None
        of_all = not key.startswith((CUSTOM, SIDE))  # a policy may begin to learn later than the others
        if (learnt and key.startswith(OWN_KEYS)) or (complete and of_all):
            raise UnknownName("key of a result row", key, row, self._where)
        self._without += complete
        if self._without == PATIENCE:
            there = ", ".join(k for k in row if k.startswith(CUSTOM)) or "none"
            logger.warning("%s: %d rows have had no %r (custom metrics: %s)", self._where, PATIENCE, key, there)
