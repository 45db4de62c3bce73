"""TLS for the port of the games: Python's ssl, and certificates that are renewed while the service runs."""

from __future__ import annotations

import logging
import ssl

from bray.errors import ConfigError
from bray.serving.access import WatchedFile

logger = logging.getLogger("bray.serving")

HANDSHAKE_S = 10.0
"""How long a client may take to agree on TLS."""


class ServerTls:
    """The context of a port. New connections get the certificate that is in the file at that time."""

    def __init__(self, cert: str, key: str | None):
        self._cert, self._key = cert, key
        self._watched = [WatchedFile(path) for path in (cert, key) if path is not None]
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._changed()
        self._load(self.context)

    def _changed(self) -> bool:
        return sum(file.changed() for file in self._watched) > 0  # each is looked at

    def _load(self, context: ssl.SSLContext) -> None:
        files = self._cert if self._key is None else f"{self._cert} and {self._key}"
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"tls_cert: expected a certificate and its private key without a password (PEM) in {files}: {e}"
            ) from None

    def refresh(self) -> None:
        """Take a renewed certificate. One that cannot be used is reported, and the old one stays."""
        if not self._changed():
            return
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half a renewal must not spoil the context in use
            self._load(self.context)
        except ConfigError as e:
            logger.error("the certificate stays as it is: %s", e)
        else:
            logger.info("%s: new connections get the renewed certificate", self._cert)


def _no_password() -> str:
    raise ValueError("the key has a password")
