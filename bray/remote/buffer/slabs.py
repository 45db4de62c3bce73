"""Shared memory for large samples: a **Slab** belongs to one process, others on the machine look into it through a **Window**.

A slab is an anonymous file: it has no name on any disk, others reach it through its owner's entry in /proc, and it vanishes with the last
process that has it, however that one ends. It is a range of addresses far larger than the memory it uses: only pages that were written
take room. Slots are cut from it in powers of two and reused, the last one freed first, because pages that are there cost a twentieth of
new ones.
"""

from __future__ import annotations

import mmap
import os
import threading
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
    """What stands at the start: the number of a process may mean another one where process namespaces differ."""


class Slab:
    """The owner's side."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME)
        os.ftruncate(self._fd, _SPAN)
        self._map = mmap.mmap(self._fd, _SPAN)
        nonce = os.urandom(16)
        self._map[:16] = nonce
        self.address = SlabAddress(os.getpid(), self._fd, nonce)
        self._lock = threading.RLock()  # slots are given back wherever the last reference goes, also while one is taken
        self._end = _SMALLEST
        self._free: dict[int, list[int]] = {}  # size -> offsets
        self._warm: dict[int, int] = {}  # free slots that have pages: offset -> size, the first one freed first
        self._warm_bytes = 0
        self.used = 0
        """Bytes of the slots that are taken."""

    def take(self, nbytes: int) -> Slot:
        """A slot of at least so many bytes. It is free again when nobody refers to it any more."""
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
        return Slot(self, offset, size)

    def data(self, slot: Slot) -> memoryview:
        return memoryview(self._map)[slot.offset : slot.offset + slot.size]

    def _give_back(self, offset: int, size: int) -> None:
        with self._lock:
            self.used -= size
            self._free[size].append(offset)
            self._warm[offset] = size
            self._warm_bytes += size
            while self._warm_bytes > max(_WARM, self.used):
                offset, size = next(iter(self._warm.items()))
                del self._warm[offset]
                self._warm_bytes -= size
                self._map.madvise(mmap.MADV_REMOVE, offset, size)  # the pages go, the addresses stay
                self._free[size].remove(offset)
                self._free[size].insert(0, offset)

    def close(self) -> None:
        """No others can look into it from now on; those that do already keep what they see."""
        os.close(self._fd)


class Slot:
    """A piece of a slab."""

    __slots__ = ("__weakref__", "offset", "size", "slab")

    def __init__(self, slab: Slab, offset: int, size: int):
        self.slab, self.offset, self.size = slab, offset, size

    def __del__(self) -> None:
        self.slab._give_back(self.offset, self.size)


class Window:
    """A view of another process's slab."""

    def __init__(self, address: SlabAddress):
        """Raises OSError where that slab cannot be reached: another user, another process namespace, or a process that is gone."""
        path = f"/proc/{address.pid}/fd/{address.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # do not even open what is something else
            raise OSError("that process has no slab there")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != _SPAN:
                raise OSError("that slab is of another version")
            self.map = mmap.mmap(fd, _SPAN)
        finally:
            os.close(fd)
        if self.map[:16] != address.nonce:
            raise OSError("that process has another slab")

    def data(self, offset: int, size: int) -> np.ndarray:
        """Bytes of a slot, writable. Arrays made from this one refer to it, so it tells by a weak reference when none is left."""
        return np.frombuffer(self.map, np.uint8, size, offset)


def look_into(address: SlabAddress) -> Window | None:
    """A Window, or None where there cannot be one."""
    try:
        return Window(address)
    except OSError:
        return None
