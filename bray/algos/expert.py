"""Experts: who says what to do wherever a learner comes to. A run directory, a function or a served policy."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bray import tree
from bray.client import Client, ClientError
from bray.errors import ConfigError, DataError
from bray.named import load_named
from bray.serving.config import ServedModelConfig
from bray.serving.model import ServedModel, VersionLocks
from bray.serving.values import plain, reader
from bray.spec import EnvSpec

KEY = "algo.expert"
_ADDRESS = re.compile(r"(https?|tcps?)://(\[[^\]]+\]|[^:/]+):(\d+)/?")
FORMS = "a run directory, module:function or the address of a service (http://HOST:PORT, tcp://HOST:PORT)"


class Expert(Protocol):
    """Acts greedily in games that step together."""

    def act(self, obs: Any, first: np.ndarray) -> Any:
        """Actions in the environment's units for observations `[B, ...]`; `first [B]`: where an episode begins."""


def load_expert(name: str, spec: EnvSpec, games: int) -> Expert:
    """By what `algo.expert` says."""
    if not name:
        raise ConfigError(f"{KEY} is not set: say who is asked what to do, expert=EXPERT: {FORMS}")
    if _ADDRESS.fullmatch(name):
        return ServiceExpert(name.rstrip("/"), spec, games)
    if Path(name).exists() or ":" not in name:
        return RunExpert(Path(name), spec, games)
    return FunctionExpert(name, spec)


class FunctionExpert:
    """`function(obs) -> action` of one game, in the environment's units."""

    def __init__(self, name: str, spec: EnvSpec):
        self._name, self._function = name, load_named(name, "expert", KEY, {})
        if not callable(self._function):
            raise ConfigError(f"{KEY}: {name} is no function of an observation")
        self._read = reader(spec.action, f"{KEY}: the action of {name}")

    def act(self, obs: Any, first: np.ndarray) -> Any:
        return tree.stack([self._read(self._ask(tree.index(obs, b))) for b in range(len(first))])

    def _ask(self, obs: Any) -> Any:
        try:
            return self._function(obs)
        except Exception as e:
            trace = "".join(traceback.format_exception(e)).rstrip()
            raise ConfigError(
                f"{trace}\n{KEY}: {self._name} raised {type(e).__name__}: it is called with the observation of one "
                "game and returns its action"
            ) from e


class RunExpert:
    """The policy of a run directory, its best checkpoint where it has one, as `bray serve` acts: by its files alone."""

    def __init__(self, path: Path, spec: EnvSpec, games: int):
        if not path.is_dir():
            raise ConfigError(f"{KEY}: there is no run directory {path}. Expected {FORMS}")
        locks = VersionLocks()
        self._model = ServedModel(str(path), path, ServedModelConfig(), locks=locks)
        best = self._model.run.pointer("best")
        self._model.open(self._model.desired_versions({"versions": {"latest" if best is None else "best": 1.0}}))
        locks.remove_all()  # it is in memory
        theirs = self._model.spec
        for what in ("observation", "action"):
            if (got := getattr(theirs, what).to_json()) != (expected := getattr(spec, what).to_json()):
                raise ConfigError(
                    f"{KEY}: {path} has another {what} space ({got}) than this run ({expected}): train it, or this "
                    "run, with the same environment and its wrappers, or serve it and write a function that asks it"
                )
        self.carry: Any = None
        """What it remembers of each game, where it has a memory."""
        if self._model.recurrent:
            self.carry = tree.map(lambda x: np.zeros((games, *x.shape), x.dtype), self._model.initial_state)

    def act(self, obs: Any, first: np.ndarray) -> Any:
        inputs = [obs]
        if self._model.masked:
            mask = self._model.spec.layout.legal(obs)
            all_legal = self._model.observations.all_legal
            inputs.append(np.tile(all_legal, (len(first), 1)) if mask is None else mask)
        if self.carry is not None:
            inputs.append(tree.map(lambda x: np.where(first.reshape(-1, *[1] * (x.ndim - 1)), 0, x), self.carry))
        out = self._model.shares[0].version.call(*inputs, batch=True)
        if self.carry is not None:
            self.carry = tree.map(np.asarray, out["state"])
        return out["action"]


class ServiceExpert:
    """A policy that is served somewhere: each game has a session there, a new one for each episode."""

    def __init__(self, url: str, spec: EnvSpec, games: int):
        self._url, self._layout = url, spec.layout
        address = _ADDRESS.fullmatch(url)
        assert address is not None
        scheme, host, port = address.groups()
        tcp, tls = scheme.startswith("tcp"), scheme in ("https", "tcps")
        self._clients = [Client(host.strip("[]"), int(port), tcp=tcp, tls=tls) for _ in range(games)]
        self._read = reader(spec.action, f"{KEY}: the action that {self._url} answered with")
        self._blank = tree.index(spec.layout.to_env(np.zeros((1, *spec.layout.shape), spec.layout.dtype)), 0)
        self._open = [False] * games

    def act(self, obs: Any, first: np.ndarray) -> Any:
        mask = self._layout.mask(obs)
        legal = np.ones((len(first), 1), bool) if mask is None else mask
        ended: Any = ~legal.any(-1)  # nothing is legal behind an episode
        try:
            return tree.stack([self._ask(b, tree.index(obs, b), first[b], ended[b]) for b in range(len(first))])
        except ClientError as e:
            raise ConfigError(
                f"{KEY}: {self._url} did not answer ({e}): start it with `bray serve RUN_DIR`, of a run with the "
                "spaces of this one"
            ) from e

    def _ask(self, b: int, obs: Any, first: bool, ended: bool) -> Any:
        client = self._clients[b]
        if self._open[b] and first:
            client.end()
        if first or not self._open[b]:
            client.start()
            self._open[b] = True
        if ended:
            return self._blank
        answer = client.tick({"obs": plain(obs)})
        if not isinstance(answer, dict) or "action" not in answer:
            raise DataError(f'{KEY}: expected {{"action": ...}} from {self._url}, got {answer!r:.60}')
        return self._read(answer["action"])

    def close(self) -> None:
        """End the sessions."""
        for client, is_open in zip(self._clients, self._open, strict=True):
            with suppress(ClientError):
                if is_open:
                    client.end()
            client.close()
