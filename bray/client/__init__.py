"""The Python game client. Standard library only, nothing of Bray: this folder can be copied into a game.

The protocol is described in docs/protocol.md.
"""

from .aio import AsyncClient, AsyncConnection
from .client import Client
from .errors import ClientError, ConnectFailed, ConnectionLost, SessionLost

__all__ = ["AsyncClient", "AsyncConnection", "Client", "ClientError", "ConnectFailed", "ConnectionLost", "SessionLost"]
