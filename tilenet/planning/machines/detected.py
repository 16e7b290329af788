"""Facts of the machine that runs this."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["detected"]


def detected() -> dict[str, Any]:
    """Cores, memory and peaks of the machine that runs this.

    The peak takes 3 GHz and two units for fused multiply-adds of 256 bits, as most processors
    since 2013 have at least; half precision is no faster there than float32.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container or batch job
    with suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(limit.read_text()))
    single = cores * 3e9 * 2 * 2 * 8
    return {
        "memory_bytes": memory,
        "host_bytes": memory,
        "cores": cores,
        "flops": {
            "float64": single / 2,
            "float32": single,
            "bfloat16": single,
            "float16": single,
        },
    }
