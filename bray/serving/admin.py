"""Who may do what at the admin port: probes and metrics are for whoever reaches it, changes need the admin token, and
no page of another site may ask for anything."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from bray.http_server import address, host_name, is_same_origin
from bray.serving.access import ADMIN_TOKEN, Audit, Tokens
from bray.serving.config import ServiceConfig
from bray.serving.protocol import Refusal

PROBES = ("/healthz", "/readyz", "/metrics")
"""Read-only, with nothing in them but numbers: any machine may ask, under any name."""
MAX_ADMIN = 64
"""Connections to the admin port that have not sent their request."""


class AdminGuard:
    """Answers whether a request of the admin port may go on."""

    def __init__(self, config: ServiceConfig, audit: Audit):
        self.tokens = Tokens(config.admin_tokens, config.admin_token_file, "admin_token_file")
        self.audit = audit
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in config.admin_names)}

    def refusal(self, method: str, path: str, headers: Mapping[str, str], peer: str) -> Refusal | None:
        """`headers` by their names in lower case."""
        found = self._foreign(path, headers) or self._needs_token(method, path, headers, peer)
        if found is not None:
            self.audit.refused(
                found.code, peer or "a client", f"{method} {path[:100]!r} at the admin port: {found.message}"
            )
        return found

    def _foreign(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        if not is_same_origin(headers):
            return Refusal(403, "foreign_origin", "pages of other sites may not use the admin port")
        name, host = host_name(headers), headers.get("host", "").lower()
        if path not in PROBES and host and name not in self._names and address(name) is None:
            return Refusal(403, "foreign_host", f"the admin port is not called {host[:100]!r}: admin_names adds a name")
        return None

    def _needs_token(self, method: str, path: str, headers: Mapping[str, str], peer: str) -> Refusal | None:
        change, ip = method not in ("GET", "HEAD"), address(peer)
        if not change and (path in PROBES or (ip is not None and ip.is_loopback)):
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if not self.tokens.valid:
            what = "changes at the admin port need" if change else "reading this from another machine needs"
            return Refusal(
                403,
                "no_admin_token",
                f"{what} an admin token, and this service has none: --admin-token-file, {ADMIN_TOKEN}",
            )
        if kind.lower() != "bearer" or not self.tokens.allow(token.strip().encode()):
            return Refusal(401, "bad_admin_token", "expected the header Authorization: Bearer ADMIN_TOKEN")
        return None
