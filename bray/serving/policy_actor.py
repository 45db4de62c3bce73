"""A game session played by a trained policy: JSON in, JSON out."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import DataError, UnknownName
from bray.serving.actor import Actor
from bray.serving.config import ServedModelConfig
from bray.serving.model import ServedModel, Version
from bray.serving.protocol import END, START, TICK, Refusal, malformed
from bray.serving.record import Recording
from bray.serving.values import TooMuchText, plain


class TickMessage(msgspec.Struct):
    """What a game sends each tick."""

    obs: msgspec.Raw
    """As it is written: it is read by the model's space."""
    action_mask: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    terminated: bool | int | None = False
    truncated: bool | int | None = False
    """The observation is its episode's last; the next tick starts another."""


class Opening(msgspec.Struct):
    """What a game may say at the start of a session (an empty body says nothing)."""

    model: str | None = None
    version: int | None = None


_read_tick = msgspec.json.Decoder(TickMessage).decode
_read_opening = msgspec.json.Decoder(Opening).decode
_write = msgspec.json.Encoder(enc_hook=plain).encode


class PolicyActor(Actor):
    """A game session played by a trained policy: JSON in, JSON out."""

    def __init__(self, find_model: Callable[[str | None], ServedModel], config: ServedModelConfig):
        """find_model: the model of a name; None = the one that answers unless a game names another."""
        self.find_model, self.config = find_model, config
        self.recording: Recording | None = None
        if config.fallback is not None:
            self.fallback = self._fallback  # only where it is wanted: having the method replaces the error

    def start(self, session: str, data: bytes) -> bytes:
        try:
            opening = _read_opening(data) if data else Opening()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise malformed(
                f"expected an empty body or a JSON object with model and version, got {_short(data)} ({e})"
            ) from None
        try:
            self.model = self.find_model(opening.model)
        except UnknownName as e:
            raise malformed(str(e)) from None
        if opening.version is not None and opening.version not in self.model.versions:
            raise malformed(f"expected one of the versions {sorted(self.model.versions)}, got {opening.version}")
        self.asked_version = opening.version
        self.place = place_of(session)
        self.state = self.model.initial_state
        self.last: Any = None
        about = {"model": self.model.name, "version": self._version().step}
        reply = _write(about)
        if self.config.record is not None and session:  # else a stateless request
            about = {"run": str(self.model.run.path.resolve()), **about}
            self.recording = Recording(Path(self.config.record), session, about)
            self.recording.add(START, data, reply)
        return reply

    def _version(self) -> Version:
        """The version that answers now: the asked-for one while it is there, else the session's share of those that are
        served."""
        if self.asked_version is not None and self.asked_version in self.model.versions:
            return self.model.versions[self.asked_version]
        return version_at(self.model, self.place)

    def _read(self, message: TickMessage) -> tuple[Any, ...]:
        """A tick's message as what the model is asked: an observation, and a mask where there are choices."""
        observations = self.model.observations
        obs, mask = observations.read(message.obs, message.action_mask)
        if not observations.masked:
            return (obs,)
        return obs, observations.all_legal if mask is None else mask

    async def tick(self, data: bytes) -> bytes:
        try:
            message = _read_tick(data)
            asked = self._read(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise malformed(f'expected a JSON object {{"obs": ...}}, got {_short(data)} ({e})') from None
        except TooMuchText as e:
            raise Refusal(413, "too_large", str(e)) from None
        except DataError as e:
            raise malformed(str(e)) from None
        version = self._version()
        if self.state is None:
            out = await version.submit(*asked)
        else:
            out = await version.submit(*asked, self.state)
            over = message.terminated or message.truncated  # the next tick starts an episode, and remembers nothing
            # a row of the batch would keep the whole batch alive
            self.state = self.model.initial_state if over else tree.map(np.copy, out["state"])
        action = out["action"]
        self.last = action
        if type(action) is np.int64:
            reply = b'{"action":%d,"version":%d}' % (action, version.step)
        else:
            reply = _write({"action": action, "version": version.step})
        if self.recording is not None:
            self.recording.add(TICK, data, reply)
        return reply

    def end(self, data: bytes) -> bytes:
        if self.recording is not None:
            self.recording.add(END, data, b"")
            self.recording.close()
            self.recording = None
        return b"{}"

    def lost(self) -> None:
        self.end(b"")

    def _fallback(self, data: bytes) -> bytes:
        action = self.config.fallback
        if action == "last" and self.last is not None:
            action = self.last
        elif action in ("last", "random"):
            mask = None
            with contextlib.suppress(msgspec.DecodeError, DataError):
                mask = self._read(_read_tick(data))[1] if self.model.masked else None
            action = self.model.random_action(mask)
        return _write({"action": action, "version": self._version().step, "fallback": True})


def place_of(session: str) -> float:
    """A session's place in [0, 1), by its name: which version's share it falls into."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "big") / 2**64


def version_at(model: ServedModel, place: float) -> Version:
    """The version for a session at this place in [0, 1)."""
    shares = model.shares
    if len(shares) > 1:
        at = place * sum(share.share for share in shares)
        for share in shares:
            at -= share.share
            if at < 0:
                return share.version
    return shares[-1].version


def _short(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + ("..." if len(data) > 60 else "")
