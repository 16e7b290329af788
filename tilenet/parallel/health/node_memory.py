"""Memory of the node that this process may use, and how much of it is for blocks of images."""

import os
from contextlib import suppress
from pathlib import Path

# Of a node's memory, for blocks of files that its ranks have decoded, burned or resampled.
BLOCKS_SHARE = 0.1
LEAST_BLOCKS_BYTES = 64 << 20  # of a rank: the blocks that neighbouring tiles share

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def node_memory_bytes() -> int:
    """Physical memory, or the least limit of the containers and batch jobs that hold the process.

    Limits are those of the process's own control group and the groups above it (cgroups of version
    1 and 2), and Slurm's of the job (`--mem`).
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(KeyError, ValueError):
        limits.append(int(os.environ["SLURM_MEM_PER_NODE"]) << 20 or limits[0])  # 0: all of it
    for folder, name in _groups():
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((folder / name).read_text()))
    return min(limits)


def _groups() -> list[tuple[Path, str]]:
    """Folders of the groups, and names of the files that hold the limits of their memory."""
    groups = [(CGROUPS, "memory.max")]  # in a container they may be all that is seen
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = Path(path).parts[1:]
            if ".." not in parts and controllers in ("", "memory"):
                top = CGROUPS / controllers
                name = "memory.limit_in_bytes" if controllers else "memory.max"
                groups += [(top.joinpath(*parts[:n]), name) for n in range(len(parts) + 1)]
    return groups
