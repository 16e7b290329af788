"""The peak of a process's memory, or of its GPUs'."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
highest = [0]  # peak of resident memory so far, in bytes


def measure_peak_bytes(devices: Sequence[torch.device]) -> int:
    """Most bytes since the process began: of tensors on the fullest GPU, or resident on CPUs."""
    gpus = {device for device in devices if device.type != "cpu"}
    if gpus:
        peaks = [torch.get_device_module(gpu).max_memory_allocated(gpu) for gpu in gpus]
        return int(max(peaks))
    try:
        # Not getrusage's: in a process forked off a large one it begins at that one's size.
        match = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    except OSError:
        match = None
    if match:
        # The kernel's peak may fall by a page, since it adds up the counts of cores later.
        highest[0] = max(highest[0], int(match[1]) * 1024)
        return highest[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
