"""Facts of the machine that runs this."""

import os
from typing import Any

from tilenet.parallel.health.node_memory import BLOCKS_SHARE, node_memory_bytes


def detected() -> dict[str, Any]:
    """Cores, memory and peaks of the machine that runs this.

    Its CPUs are the device, whose memory is the node's, less what decoded blocks of images take.

    The peak takes 3 GHz and two units for fused multiply-adds of 256 bits, as most processors
    since 2013 have at least; half precision is no faster there than float32.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = node_memory_bytes()
    single = cores * 3e9 * 2 * 2 * 8
    return {
        "memory_bytes": int(memory * (1 - BLOCKS_SHARE)),
        "host_bytes": memory,
        "cores": cores,
        "flops": {
            "float64": single / 2,
            "float32": single,
            "bfloat16": single,
            "float16": single,
        },
    }
