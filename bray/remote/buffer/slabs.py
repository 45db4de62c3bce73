"""Shared memory for large samples. A **Slab** belongs to one process; others on the machine map it through a
**Window**.

A slab is an anonymous file: it has no name on any disk, others open it through its owner's entry in /proc, and it
vanishes with the last process that maps it, however that one ends. It is a range of addresses far larger than the
memory it uses: only pages that were written take room. Slots are cut from it in powers of two and reused, the last one
freed first, because pages that exist cost a twentieth of new ones.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_NAME = "bray-slab"
_SMALLEST = 1 << 16
_SPAN = 1 << 38  # addresses, not memory
_WARM = 64 << 20  # bytes of free slots that keep their pages, at least


class SlabAddress(NamedTuple):
    pid: int
    fd: int
    nonce: bytes
    """The first bytes of the slab: in another process namespace the same pid is another process."""


class Slot:
    """A part of a slab, in the process that owns the slab or in one that maps it. `free(slot)` is called when nobody
    refers to it any more, in whatever thread that happens."""

    __slots__ = ("__weakref__", "_free", "memory", "offset", "size")

    def __init__(self, memory: Slab | Window, offset: int, size: int, free: Callable[[Slot], None]):
        self.memory, self.offset, self.size, self._free = memory, offset, size, free

    def data(self) -> np.ndarray:
        return self.memory.data(self.offset, self.size)

    def __del__(self) -> None:
        self._free(self)


class Slab:
    """The owner's side."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, _SPAN)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._map = mmap.mmap(self._fd, _SPAN)
        nonce = os.urandom(16)
        self._map[:16] = nonce
        self.address = SlabAddress(os.getpid(), self._fd, nonce)
        self._lock = threading.RLock()  # taking a slot may run the garbage collector, which frees others
        self._end = _SMALLEST
        self._free: dict[int, list[int]] = {}  # size -> offsets
        self._warm: dict[int, int] = {}  # free slots that have pages: offset -> size, oldest first
        self._warm_bytes = 0
        self.used = 0
        """Bytes of the slots that are taken."""

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, [])
            if free:
                offset = free.pop()
                if self._warm.pop(offset, 0):
                    self._warm_bytes -= size
            else:
                offset = self._end
                if offset + size > _SPAN:
                    raise MemoryError(f"a slab of {_SPAN >> 30} GB is used up")
                self._end += size
            self.used += size
        return Slot(self, offset, size, self._give_back)

    def memory(self, nbytes: int) -> tuple[np.ndarray, Slot]:
        """A slot and its bytes."""
        slot = self.take(nbytes)
        return slot.data(), slot

    def data(self, offset: int, size: int) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8, size, offset)

    def _give_back(self, slot: Slot) -> None:
        offset, size = slot.offset, slot.size
        with self._lock:
            self.used -= size
            self._free[size].append(offset)
            self._warm[offset] = size
            self._warm_bytes += size
            while self._warm_bytes > max(_WARM, self.used):
                offset, size = next(iter(self._warm.items()))
                del self._warm[offset]
                self._warm_bytes -= size
                self._map.madvise(mmap.MADV_REMOVE, offset, size)  # frees the pages, keeps the addresses
                self._free[size].remove(offset)
                self._free[size].insert(0, offset)

    def close(self) -> None:
        """Nobody can open it any more; those who have mapped it keep what they see."""
        os.close(self._fd)


class Window:
    """A mapping of another process's slab. `address` is this process's own entry for it, which stays when the owner
    ends."""

    def __init__(self, address: SlabAddress):
        """Raises OSError where that slab cannot be opened: another user, another process namespace, or a process that
        has ended."""
        path = f"/proc/{address.pid}/fd/{address.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # never open anything else
            raise OSError("that process has no slab there")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        sealed = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK  # else reading could raise SIGBUS
        if os.fstat(self._fd).st_size != _SPAN or not sealed:
            raise OSError("that slab is of another version")
        self._map = mmap.mmap(self._fd, _SPAN)
        if self._map[:16] != address.nonce:
            raise OSError("that process has another slab")
        self.address = SlabAddress(os.getpid(), self._fd, address.nonce)

    def data(self, offset: int, size: int) -> np.ndarray:
        """Bytes of a slot, writable. Arrays made from this one refer to it, so a weak reference tells when the last one
        is gone."""
        return np.frombuffer(self._map, np.uint8, size, offset)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


_windows: weakref.WeakValueDictionary[bytes, Window] = weakref.WeakValueDictionary()


def look_into(address: SlabAddress) -> Window | None:
    """A Window, the same for all who look into this slab; None where it cannot be opened."""
    window = _windows.get(address.nonce)
    if window is None:
        try:
            window = _windows[address.nonce] = Window(address)
        except OSError:
            return None
    return window
