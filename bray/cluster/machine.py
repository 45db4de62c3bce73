"""This machine, for what is asked of a Ray of our own: that one takes more than there is, because games wait more than
they compute."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from bray.train.machine import cores


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    cpus: int
    memory: float
    """In MB."""
    gpus: tuple[str, ...]

    @classmethod
    def look(cls) -> Machine:
        cpus = cores()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
        try:
            asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
            gpus = tuple(line.partition(": ")[2].partition(" (UUID")[0] for line in asked.stdout.splitlines())
        except (OSError, subprocess.TimeoutExpired):
            gpus = ()
        return cls(cpus, memory, gpus)

    def __str__(self) -> str:
        return f"{self.cpus} CPUs, {self.memory / 1024:.1f} GiB memory, {', '.join(self.gpus) or 'no GPU'}"

    def shortage(self, cpus: float, gpus: float, memory: float = 0) -> list[str]:
        """What is asked for beyond it, in words; memory in MB."""
        out = []
        if cpus > self.cpus:
            out.append(f"{cpus:g} CPUs are asked for and {self.cpus} are here: the processes share them")
        if gpus > len(self.gpus):
            out.append(f"{gpus:g} GPUs are asked for and {len(self.gpus)} are here")
        if memory > self.memory:
            out.append(f"{memory:,} MB are asked for and {self.memory:,.0f} are here")
        return out
