"""What one client address may take of a service: counts that the workers of a machine share, rates, and proxies that
may speak for others."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from bray.errors import ConfigError

_COLUMNS = 1 << 16  # of the shared counts; two addresses rarely fall into one
_MOST_REMEMBERED = 100_000  # addresses


@lru_cache(4096)
def client_key(address: str) -> str:
    """What a client is counted by: its address, of IPv6 the /64 network, which one customer has to himself."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a unix socket has none
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        if not ip.is_loopback:
            return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


class Proxies:
    """Proxies whose X-Forwarded-For is believed."""

    def __init__(self, networks: Sequence[str]):
        try:
            self._networks = [ipaddress.ip_network(network) for network in networks]
        except ValueError as e:
            raise ConfigError(f"trusted_proxies: expected addresses or networks like 10.0.0.0/8: {e}") from None
        self.client = lru_cache(4096)(self._client)  # asked for every request

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        try:
            ip = ipaddress.ip_network(address).network_address  # of IPv6 the key is a network
        except ValueError:
            return False
        return any(ip in network for network in self._networks)

    def _client(self, peer: str, forwarded: bytes) -> str:
        """Whose request it is: the peer's, or where that is a proxy of ours the last one of X-Forwarded-For that is
        none. What stands before it the client may have made up."""
        if peer not in self:
            return peer
        for part in reversed(forwarded.decode("latin-1").split(",")):
            name = part.strip()
            if name.count(":") == 1:
                name = name.partition(":")[0]  # with a port
            address = client_key(name.strip("[]"))
            try:
                ipaddress.ip_network(address)
            except ValueError:
                break
            if address not in self:
                return address
        return peer


class AddressCounts:
    """How many of something each client address has. Workers that share a directory add up their counts: each writes a
    row of its own in a mapped file, so that nobody locks, and reads the others' in the column that an address falls
    into."""

    def __init__(self, limit: int, what: str):
        self.limit, self._what = limit, what
        self._mine: dict[str, int] = {}
        self._rows: np.memmap | None = None

    def share(self, directory: Path, row: int, rows: int) -> None:
        path = directory / f"{self._what}_by_address"
        with path.open("ab") as file:  # sparse: pages that nobody falls into are never made
            file.truncate(rows * _COLUMNS * 4)
        self._rows, self._row = np.memmap(path, np.uint32, "r+", shape=(rows, _COLUMNS)), row
        self._key = str(directory).encode()[-64:]  # a random name: nobody can choose whom to share a column with
        self._rows[row] = 0  # what a worker that died had

    def _column(self, address: str) -> int:
        return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=2, key=self._key).digest(), "little")

    def take(self, address: str) -> bool:
        """One more, if that is within the limit."""
        n = self._mine.get(address, 0)
        if self._rows is None:
            others = 0
        else:
            column = self._rows[:, self._column(address)]
            others = int(column.sum()) - int(column[self._row])
        if n + others >= self.limit:
            return False
        self._mine[address] = n + 1
        if self._rows is not None:
            self._rows[self._row, self._column(address)] += 1
        return True

    def give(self, address: str) -> None:
        n = self._mine.get(address, 0) - 1
        if n > 0:
            self._mine[address] = n
        else:
            self._mine.pop(address, None)
        if self._rows is not None:
            self._rows[self._row, self._column(address)] -= 1


class Rates:
    """At most `limit` requests per second of an address, after a burst of as many (at least one)."""

    def __init__(self, limit: float, clock: Callable[[], float]):
        self.limit, self._clock = limit, clock
        self._burst = max(1.0, limit)
        self._left: dict[str, tuple[float, float]] = {}  # address -> requests it may still send, when that was so

    def take(self, address: str) -> bool:
        now = self._clock()
        left, at = self._left.get(address, (self._burst, now))
        left = min(self._burst, left + (now - at) * self.limit)
        allowed = left >= 1.0
        self._left[address] = (left - 1.0 if allowed else left, now)
        return allowed

    def forget(self) -> None:
        """Addresses that have their whole burst again; all, where there are too many to keep."""
        now = self._clock()
        full = self._burst / self.limit
        self._left = {a: (left, at) for a, (left, at) in self._left.items() if now - at < full}
        if len(self._left) > _MOST_REMEMBERED:
            self._left.clear()
