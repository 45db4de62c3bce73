"""Which CPU this is, as people call it."""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from pathlib import Path

_FEATURES = {  # flag of /proc/cpuinfo -> how people call it
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx2": "AVX2",
    "asimd": "NEON",
    "bf16": "bf16",
    "sve": "SVE",
}


@lru_cache(1)
def this_cpu() -> tuple[str, list[str]]:
    """Its name, and what it can that matters for numbers and speed."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", info, re.M)
    arm = re.findall(r"^CPU (implementer|part)\s*:\s*(\w+)$", info, re.M)[:2]
    other = " ".join([platform.processor() or platform.machine(), *[" ".join(x) for x in arm]])
    flags = set((re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.M) or [""])[0].split())
    return model[1].strip() if model else other, [word for flag, word in _FEATURES.items() if flag in flags]
