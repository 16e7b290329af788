"""Ranks that run one command of tilenet after another: mpiexec -n N python serve.py FOLDER.

To start ranks takes longer than what the tests give them to do. Rank 0 writes N.code, the largest
exit code of the ranks, once all have run the command in N.json; a file named `end` ends them. Each
rank looks for the files by itself: ranks that waited in MPI would take the cores from others.
"""

import json
import os
import sys
import time
from itertools import count
from pathlib import Path

from mpi4py import MPI

from tilenet.__main__ import main

PAUSE_S = 0.02


def serve(folder: Path) -> None:
    """Run commands until the end; one that raises ends all ranks."""
    for number in count():
        asked = folder / f"{number}.json"
        while not asked.exists():
            if (folder / "end").exists():
                return
            time.sleep(PAUSE_S)
        code = MPI.COMM_WORLD.allreduce(main(json.loads(asked.read_text())), MPI.MAX)
        sys.stdout.flush()
        if MPI.COMM_WORLD.rank == 0:
            answer = folder / f"{number}.code"
            answer.with_suffix(".part").write_text(str(code))
            os.replace(answer.with_suffix(".part"), answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
