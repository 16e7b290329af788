"""The most memory that this process has held."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["peak_bytes"]

STATUS = Path("/proc/self/status")


def peak_bytes(devices: Sequence[torch.device]) -> int:
    """Bytes at the highest: of tensors on the fullest GPU, or of resident memory on CPUs.

    Since the process began. It may fall by some pages, which Linux counts roughly.
    """
    cuda = {device for device in devices if device.type == "cuda"}
    if cuda:
        return max(torch.cuda.max_memory_allocated(device) for device in cuda)
    try:
        # Not getrusage's: that of a process which was forked off a large one begins at its size.
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
