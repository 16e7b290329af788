"""Runs on the last node of a job on a range of nodes: watch.py JOB FIRST SECONDS.

Slurm keeps a job after its first node, the one that runs its script, has died, and nothing happens
any more (seen with 22.05): back into the queue.
"""

import os
import subprocess
import sys
import time


def _output_of(*command: str) -> list[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()


def main(job: str, first: str, seconds: float) -> None:
    """Look at each interval of `seconds` whether the job still has its first node."""
    while True:
        time.sleep(seconds)
        nodes = _output_of("squeue", "-h", "-t", "running", "-j", job, "-o", "%N")
        if nodes and first not in _output_of("scontrol", "show", "hostnames", *nodes):
            os.execvp("scontrol", ["scontrol", "requeue", job])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
