"""The most memory that this process has held."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["peak_bytes"]

STATUS = Path("/proc/self/status")
highest = [0]  # that was seen, in bytes


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
        # The kernel's own falls by a page now and then: it counts each core's part later.
        highest[0] = max(highest[0], int(found[1]) * 1024)
        return highest[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
