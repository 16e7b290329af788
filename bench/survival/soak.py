"""Does a run that is killed at random, and started again, lose anything?

Small runs are trained and mapped; their lives are disturbed in ways, on ranks and at moments that
the seed chooses, and started again with --resume until all is done. Half of the runs keep their
number of ranks, and must end equal to an undisturbed run to the last bit; the others change it from
life to life. --launcher says mpiexec, srun or both; srun runs on a Slurm of virtual nodes (root,
Debian). Quick: 10 kills under mpiexec. Exit code 1: something was lost; runs and logs are kept.
"""

import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path

from cluster import Cluster
from disturbed_runs import DisturbedRuns
from lives import Launcher

from bench.report import Found, at_least, at_most

STRICT = True  # a fault is an exit code of 1


def bench(
    quick: bool, kills: int = 200, seed: int = 1, launcher: str = "both", minutes: float = 1e6
) -> Found:
    """Soak; after so many minutes no more runs begin."""
    names = ["mpiexec", "srun"] if launcher == "both" else [launcher]
    runs, most_ranks = 1000, 4
    if quick:
        names, kills, runs, most_ranks = ["mpiexec"], 10, 2, 2
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tilenet-soak-"))  # short: sockets are made in it
    with ExitStack() as stack:
        soaks = []
        for name in names:
            cluster = None
            if name == "srun":
                (folder / "slurm").mkdir()
                cluster = Cluster(folder / "slurm")
                stack.callback(cluster.end)
            started = Launcher(name, cluster)
            soaks.append(DisturbedRuns(started, folder / name, seed, most_ranks))
        each = kills // len(names), runs, began + 60 * minutes
        with ThreadPoolExecutor() as pool:  # side by side
            done = [pool.submit(soak.run, *each) for soak in soaks]
        tallies = {name: one.result() for name, one in zip(names, done, strict=True)}
    faults = [fault for one in tallies.values() for fault in one.faults]
    figures = {
        "date": date.today().isoformat(),
        "seed": seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "launchers": {name: one.figures() for name, one in tallies.items()},
    }
    claims = [
        # Of ten some come too late, where lives are quick.
        at_least("kills", sum(t.kills.total() for t in tallies.values()), kills // (1 + quick)),
        at_most("faults", len(faults), 0),
    ]
    if faults:
        print(f"runs and logs: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return figures, claims
