"""Who may send requests to a worker: tokens, session secrets and limits per client address, and the audit log of
refusals and changes.

Checked at the edge, where a connection is made or a request's headers are complete. What the owner of a session has to
know of a client (the secret, the address) travels with the request.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bray.config.secrets import HIDDEN
from bray.errors import ConfigError
from bray.limited_log import LimitedLog
from bray.serving.addresses import AddressCounts, Proxies, Rates, client_key
from bray.serving.config import ServiceConfig
from bray.serving.protocol import MAX_NAME, START, Refusal

logger = logging.getLogger("bray.serving")
audit_logger = logging.getLogger("bray.serving.audit")

TOKEN, ADMIN_TOKEN = "BRAY_TOKEN", "BRAY_ADMIN_TOKEN"
"""Environment variables: one token, or several with blanks between them."""
BAD_TOKEN = Refusal(401, "bad_token", "this service needs a valid token")
BAD_SECRET = Refusal(
    403,
    "bad_secret",
    "this session needs the session_secret that the reply to its start had, as a header of every tick and end",
)
_FILES = ("tls_cert", "tls_key", "token_file", "admin_token_file")


def with_environment(config: ServiceConfig) -> ServiceConfig:
    """The config with the tokens of the environment, and its files as seen from here: read where a service is started,
    since its workers may have neither the environment nor the current directory. A service whose tokens were not
    written down, and are not given again, does not start: it would let everybody in."""
    tokens, admin_tokens = (
        (*(token for token in given if token != HIDDEN), *os.environ.get(name, "").split())
        for name, given in ((TOKEN, config.tokens), (ADMIN_TOKEN, config.admin_tokens))
    )
    if HIDDEN in config.tokens and not tokens and config.token_file is None:
        raise ConfigError(
            "this service had a token, and secrets are not written to run directories: give it again, by "
            f"--token-file FILE, in the environment ({TOKEN}) or on the command line (token=...)"
        )
    files = {name: path for name in _FILES if (path := getattr(config, name)) is not None}
    return replace(
        config,
        tokens=tokens,
        admin_tokens=admin_tokens,
        **{name: os.path.abspath(path) for name, path in files.items()},
    )


class WatchedFile:
    """A file that others replace while we run."""

    def __init__(self, path: str):
        self.path = Path(path)
        self._seen: tuple[int, ...] | None = None

    def changed(self) -> bool:
        """Whether it is another one than at the last call."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        now = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        changed, self._seen = now != self._seen, now
        return changed


class Tokens:
    """The tokens that are valid now: given ones, and those of a file that is read again when it changes."""

    def __init__(self, given: Sequence[str], file: str | None, option: str):
        self._given = [token.encode() for token in given]
        self._option = option
        self._file = None if file is None else WatchedFile(file)
        self.valid: list[bytes] = self._given
        if self._file is not None:
            self._file.changed()
            self.valid = self._given + self._read(self._file.path)

    def _read(self, path: Path) -> list[bytes]:
        try:
            lines = [line.strip() for line in path.read_bytes().splitlines()]
        except OSError as e:
            raise ConfigError(f"{self._option}: {path} cannot be read ({e.strerror})") from None
        found = [line for line in lines if line and not line.startswith(b"#")]
        if not found:  # it must not mean that everybody may come
            raise ConfigError(f"{self._option}: expected a token per line, {path} has none")
        if max(map(len, found)) > MAX_NAME:
            raise ConfigError(f"{self._option}: a token has at most {MAX_NAME} bytes, {path} has a longer line")
        return found

    def refresh(self) -> None:
        """Look whether the file has changed. One that cannot be used is reported, and the tokens stay as they are."""
        if self._file is None or not self._file.changed():
            return
        try:
            self.valid = self._given + self._read(self._file.path)
        except ConfigError as e:
            logger.error("the tokens stay as they are: %s", e)
        else:
            audit_logger.info("%s: %d tokens are valid now", self._option, len(self.valid))

    def allow(self, token: bytes) -> bool:
        """Whether a token is one of ours, in a time that says nothing of how near it is."""
        good = False
        for known in self.valid:
            good |= hmac.compare_digest(token, known)
        return good


class Audit:
    """One line for every change; for every class of refusals one line at once, then one a minute that says how many
    there were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._log = LimitedLog(audit_logger, clock)
        self.counts: Counter[str] = Counter()

    def changed(self, who: str, what: str) -> None:
        audit_logger.info("%s: %s", who, what)

    def refused(self, code: str, who: str, why: str) -> None:
        self.counts[code] += 1
        self._log.warning(code, "refused %s from %s: %s", code, who, why)


class Access:
    """What one worker knows about who may come."""

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self.tokens = Tokens(config.tokens, config.token_file, "token_file")
        self.audit = Audit(clock)
        self.secrets = config.session_secrets
        self.proxies = Proxies(config.trusted_proxies)
        self.rates = None if config.max_requests_per_address is None else Rates(config.max_requests_per_address, clock)
        self.connections = _counts(config.max_connections_per_address, "connections")
        self.sessions = _counts(config.max_sessions_per_address, "sessions")
        self.limited = any(x is not None for x in (self.rates, self.connections, self.sessions))
        """Whether anything is counted by client address."""
        self.marks = self.limited or self.secrets
        """Whether `mark` has something to say."""

    def share(self, directory: Path, row: int, rows: int) -> None:
        """Count sessions and connections together with the other workers of this machine."""
        for counts in (self.connections, self.sessions):
            if counts is not None:
                counts.share(directory, row, rows)

    def refresh(self) -> None:
        """Now and then: files that have changed, clients that went away."""
        self.tokens.refresh()
        if self.rates is not None:
            self.rates.forget()

    # --- a connection -------------------------------------------------------------------------------------------------

    def client(self, transport: Any) -> str:
        """The address that a connection is counted under."""
        return client_key(str((transport.get_extra_info("peername") or ("",))[0]))

    def admit(self, address: str) -> Refusal | None:
        """A new connection; `leave` must follow where None is returned. A proxy's own connections are not counted."""
        if self.connections is None or address in self.proxies or self.connections.take(address):
            return None
        return self._too_many(address, "too_many_connections", f"{self.connections.limit} connections at once")

    def leave(self, address: str) -> None:
        if self.connections is not None and address and address not in self.proxies:
            self.connections.give(address)

    # --- a request ----------------------------------------------------------------------------------------------------

    def refusal(self, token: bytes, address: str) -> Refusal | None:
        """Why a request may not go on, once its headers are known. Guessing tokens counts as requests, too."""
        if self.rates is not None and not self.rates.take(address):
            return self._too_many(address, "too_many_requests", f"{self.rates.limit:g} requests per second")
        if self.tokens.valid and not self.tokens.allow(token):
            self.audit.refused("bad_token", address or "a client", "a wrong token" if token else "no token")
            return BAD_TOKEN
        return None

    def mark(self, request: Any, secret: bytes, address: str) -> None:
        """Write down what the owner of a session has to know of a request's client."""
        request.address = address
        if self.secrets:
            request.secret = secrets.token_hex(16).encode() if request.kind == START else secret

    def slot_refusal(self, address: str) -> Refusal | None:
        """A new session in this worker; `free_slot` must follow where None is returned."""
        if self.sessions is None or self.sessions.take(address):
            return None
        return self._too_many(address, "too_many_sessions", f"{self.sessions.limit} sessions at once")

    def free_slot(self, address: str) -> None:
        if self.sessions is not None:
            self.sessions.give(address)

    def knows(self, secret: bytes, request: Any) -> bool:
        """Whether a request has the secret of its session."""
        good = hmac.compare_digest(secret, getattr(request, "secret", b""))
        if not good:
            self.audit.refused("bad_secret", getattr(request, "address", "") or "a client", BAD_SECRET.message)
        return good

    def _too_many(self, address: str, code: str, most: str) -> Refusal:
        refusal = Refusal(429, code, f"one client address may have {most}: try again later")
        self.audit.refused(code, address, refusal.message)
        return refusal


def _counts(limit: int | None, what: str) -> AddressCounts | None:
    return None if limit is None else AddressCounts(limit, what)
