"""The directory over which a training and its workers exchange files; see `exchange.py`."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import ConfigError, DataError
from bray.rundir.files import write_atomic

AHEAD = 2
"""Pieces of a worker that wait in the directory."""
TURN_S = 0.005  # between two looks whether something has come


class About(msgspec.Struct):
    """What is said of a piece beside its arrays."""

    env_steps: int
    episodes: list[tuple[float, int]]
    metrics: list[dict[str, float]]
    returns: tuple[float, float, float]
    seconds: dict[str, float]


class OfPolicy(msgspec.Struct):
    """What is said of published weights."""

    env_steps: int
    version: int
    returns: tuple[float, float, float]


class Told(msgspec.Struct):
    """What a worker is told: `training.json`."""

    bray: str
    training: str
    ended: bool
    rows: int
    state_every: int
    config: dict[str, Any]


class GivenSeat(msgspec.Struct):
    """What a worker is told by the training when there is a place for it."""

    index: int
    life: int
    begun: int


class Folder:
    """The directory, as either side uses it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.policy, self.workers, self.seats, self.data = (
            self.path / name for name in ("policy", "workers", "seats", "data")
        )

    def tell(self, told: Told) -> None:
        write_atomic(self.path / "training.json", msgspec.json.format(msgspec.json.encode(told)))

    def told(self) -> Told | None:
        """What the training says; None where none has been here."""
        try:
            return msgspec.json.decode((self.path / "training.json").read_bytes(), type=Told)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as e:
            raise ConfigError(f"{self.path / 'training.json'} is not what a training writes there: {e}") from None

    def put(self, path: Path, about: Any, arrays: Any) -> None:
        """A file of arrays and what is said of them: whole, or not there."""
        data = tree.pack({"about": np.frombuffer(msgspec.msgpack.encode(about), np.uint8), "arrays": arrays})
        write_atomic(path, zlib.crc32(data).to_bytes(4, "little") + data, sync=False)

    def take(self, path: Path, kind: type[Any]) -> tuple[Any, Any]:
        """(what is said, arrays) of such a file. Raises DataError where it is damaged."""
        data = path.read_bytes()
        if len(data) < 4 or zlib.crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little"):
            raise DataError(f"{path.name}: its checksum is another one")
        held = tree.unpack(memoryview(data)[4:], copy=True)  # torch does not take what cannot be written to
        if not isinstance(held, dict) or held.keys() != {"about", "arrays"} or not _is_bytes(held["about"]):
            raise DataError(f"{path.name}: expected arrays and what is said of them")
        try:
            return msgspec.msgpack.decode(held["about"].tobytes(), type=kind), held["arrays"]
        except msgspec.MsgspecError as e:
            raise DataError(f"{path.name}: {e}") from None

    def newest_policy(self) -> Path | None:
        names = [name for name in names_in(self.policy) if name.isdecimal()]
        return self.policy / max(names) if names else None


def _is_bytes(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 1


def names_in(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []
