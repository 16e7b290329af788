"""Files in /dev/shm through which MPI passes messages on a node: a killed job must leave none.

MPICH names such a file after the job and deletes it in MPI_Finalize alone, which a killed rank
never calls: 3 MiB stay for each job, and a later job of the same number would take the file for
its own. Once all ranks of the node have mapped it, nothing needs its name.
"""

import re
from pathlib import Path

from tilenet.mpi import Intracomm

MAPS = Path("/proc/self/maps")
NAMES = re.compile(r"/dev/shm/mpich_(?:shm|vci)_[0-9a-f]+_\d+$")


def unname_shared_memory(comm: Intracomm) -> None:
    """Delete the names of files that MPICH shares on a node; mapped they stay. Collective.

    Does nothing with another MPI, or where the system does not list mapped files.
    """
    comm.Barrier()  # until all have mapped them
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
        for name in {match[0] for line in lines if (match := NAMES.search(line))}:
            Path(name).unlink(missing_ok=True)
    except OSError:
        pass  # MPI_Finalize deletes them, as long as nothing kills the rank
