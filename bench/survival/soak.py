"""Does a run that is killed at random, and started again, lose anything?

    python -m bench.survival.soak [--quick] [--kills 200] [--seed 1] [--launcher mpiexec|srun|both]

Small runs are trained and mapped; their lives are disturbed in ways, on ranks and at moments that
the seed chooses, and started again with --resume until all is done. Half of the runs keep their
number of ranks, and must end equal to an undisturbed run to the last bit; the others change it from
life to life. srun runs on a Slurm of virtual nodes (root, Debian). Quick: 10 kills under mpiexec.
Exit code 1: something was lost; runs and logs are kept.
"""

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path

from bench.report import ROOT, at_least, at_most, report

sys.path += [str(ROOT / "tests" / "jobs" / "soak"), str(ROOT / "tests" / "jobs" / "slurm")]
from cluster import Cluster
from disturbed_runs import DisturbedRuns
from lives import Launcher


def main() -> int:
    """Soak, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launcher", choices=["mpiexec", "srun", "both"], default="both")
    parser.add_argument("--minutes", type=float, default=1e6, help="then no more runs begin")
    given = parser.parse_args()
    names = ["mpiexec", "srun"] if given.launcher == "both" else [given.launcher]
    kills, runs, most_ranks = given.kills, 1000, 4
    if given.quick:
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
            launcher = Launcher(name, cluster)
            soaks.append(DisturbedRuns(launcher, folder / name, given.seed, most_ranks))
        each = kills // len(names), runs, began + 60 * given.minutes
        with ThreadPoolExecutor() as pool:  # side by side
            done = [pool.submit(soak.run, *each) for soak in soaks]
        tallies = {name: one.result() for name, one in zip(names, done, strict=True)}
    faults = [fault for one in tallies.values() for fault in one.faults]
    figures = {
        "date": date.today().isoformat(),
        "seed": given.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "launchers": {name: one.figures() for name, one in tallies.items()},
    }
    claims = [
        # Of ten some come too late, where lives are quick.
        at_least(
            "kills", sum(t.kills.total() for t in tallies.values()), kills // (1 + given.quick)
        ),
        at_most("faults", len(faults), 0),
    ]
    report("soak", figures, claims)
    if faults:
        print(f"runs and logs: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
