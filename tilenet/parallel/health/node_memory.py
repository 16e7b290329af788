"""Memory of the node that this process may use."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["node_memory_bytes"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def node_memory_bytes() -> int:
    """Physical memory, or the least limit of the containers and batch jobs that hold the process.

    Limits are those of cgroups of version 2, of the process's own group and the groups above it.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = "/"
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            own = line.removeprefix("0::") if line.startswith("0::") else own
    group = CGROUPS / own.strip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(CGROUPS):
            with suppress(OSError, ValueError):  # no such file, or "max"
                memory = min(memory, int((folder / "memory.max").read_text()))
    return memory
