"""A job on a range of nodes: where one dies, the others go on from the last checkpoint.

The plan is made again for as many nodes of the job as answer: the same tiles, fewer ranks.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .queues import Slurm, job_number, output_of
from .steps import Outcome, Steps, say

WATCH = Path(__file__).with_name("watch.py")
WATCH_S = 30  # seconds between two checks that the first node is alive
PROBE_S = 60  # seconds in which a node must run a probe
RELEASE_S = 90  # seconds in which Slurm must release a step


class Lives:
    """Runs steps, and runs a step again as long as it fails because nodes died.

    Attributes:
        plan: Path of the plan for the nodes that are left.
        once_per_node: Command line that starts one process on each of them.
    """

    def __init__(
        self,
        steps: Steps,
        planned: str,
        program: Sequence[str],
        once_per_node: Sequence[str],
        nodes: tuple[int, int],
    ) -> None:
        """Probe the job's nodes, and plan for them.

        Args:
            steps: The job's steps; their launch command is changed to the nodes that are left.
            planned: Path of the job's plan.
            once_per_node: Command line that starts one process on each node of the job.
            nodes: Fewest nodes to go on with, and ranks per node.
        """
        self.plan = str(steps.output / "plan.now.json")
        self.once_per_node = once_per_node
        self._steps, self._planned, self._program = steps, planned, program
        self._least, self._per_node = nodes
        self._srun, self._once = steps.launch, once_per_node
        self._watcher: subprocess.Popen[bytes] | None = None
        self._live_nodes = find_live_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))
        self._replan()

    def run(self, name: str, early: str, program: Sequence[str]) -> Outcome:
        """Run a program on all ranks, as `Steps.run` does."""
        steps, stop = self._steps, self._steps.stop
        while True:
            ended = steps.run(name, early, program)
            if ended.result in ("finished", "stopped") or stop.cancel:
                return ended
            before = len(self._live_nodes)
            self._live_nodes = find_live_nodes(",".join(self._live_nodes))
            if len(self._live_nodes) >= before:  # it did not fail because a node died
                if steps.once_more(ended):
                    continue
                return ended
            if stop.requeue:
                return replace(ended, result="killed")
            if not self._live_nodes:
                self._leave("none of the job's nodes answers any more: this needs a new allocation")
            if not _wait_for_release():
                self._leave(
                    "Slurm does not release the step that lost a node: this needs a new allocation"
                )
            self._replan()

    def _leave(self, why: str) -> None:
        """End this job and have the queue start it on other nodes."""
        say(why)
        self._steps.stop.requeue = True
        sys.exit(Slurm().come_again(self._steps.stop))

    def _replan(self) -> None:
        """Plan for the live nodes, or for as many of them as there is a plan for."""
        names = self._live_nodes
        if not names:
            say("not even the node of this script takes a step: srun does not work here")
            sys.exit(1)
        if len(names) < self._least:
            self._leave(
                f"{len(names)} of the job's nodes answer ({' '.join(names)}), at least "
                f"{self._least} must"
            )
        for count in range(len(names), self._least - 1, -1):
            again = ["plan", "--replan", self._planned, "--nodes", str(count), "-o", self.plan]
            if subprocess.run([*self._program, *again], stdout=subprocess.DEVNULL).returncode:
                continue
            ranks = count * self._per_node
            here = ["-w", ",".join(names[:count])]
            say(f"nodes: {here[1]}, ranks: {ranks}")
            self._steps.launch = [*self._srun, "-N", str(count), "-n", str(ranks), *here]
            self.once_per_node = [*self._once, "-N", str(count), "-n", str(count), *here]
            self._watch(names[count - 1] if count > 1 else None)
            return
        sys.exit(1)

    def _watch(self, last: str | None) -> None:
        """Have node `last` watch this one; None: no node does."""
        if self._watcher:
            self._watcher.terminate()
        self._watcher = None
        if last is not None:
            step = ["srun", "-N", "1", "-n", "1", "-w", last, "--overlap", "--mpi=none", "-Q"]
            watch = [sys.executable, "-IS", str(WATCH), job_number(), os.environ["SLURMD_NODENAME"]]
            self._watcher = subprocess.Popen(
                [*step, "-J", "watch", *watch, str(WATCH_S)], stdin=subprocess.DEVNULL
            )


def find_live_nodes(last: str) -> list[str]:
    """Names of the job's nodes that run a probe: Slurm may not know yet that a node is dead.

    Args:
        last: The nodes known before, as Slurm lists them, where its controller does not answer.
    """
    nodes = ""
    for attempt in range(1, 6):  # the controller may not answer while it waits for a dead node
        nodes = output_of("squeue", "-h", "-j", job_number(), "-o", "%N").strip()
        if nodes:
            break
        time.sleep(attempt)
    # by GNU's timeout: an srun that waits for a dead node ignores all signals but KILL
    probe = ["timeout", "-k", "1", str(PROBE_S), "srun", "-N", "1", "-n", "1"]
    probes = {
        name: subprocess.Popen(
            [*probe, "-w", name, "--overlap", "--mpi=none", "-Q", "true"], stdin=subprocess.DEVNULL
        )
        for name in output_of("scontrol", "show", "hostnames", nodes or last).split()
    }
    return in_order([name for name, process in probes.items() if process.wait() == 0])


def in_order(names: Sequence[str]) -> list[str]:
    """Names of nodes, sorted by their numbers: n2 before n10."""
    return sorted(names, key=lambda name: [part.zfill(20) for part in re.split(r"(\d+)", name)])


def holds_step(steps: str) -> bool:
    """Whether a step is left other than the job's own, in the output of `squeue -s -o '%i %j'`."""
    ours = re.compile(r"\.batch |\.extern | watch$")
    return any(not ours.search(line) for line in steps.splitlines())


def _wait_for_release() -> bool:
    """Wait until Slurm releases the last step; return whether it did in time.

    Where a step's ranks end just before Slurm declares their node dead, Slurm 22.05 may hold the
    step forever, and with it all devices of the job.
    """
    for _ in range(RELEASE_S):
        if not holds_step(output_of("squeue", "-h", "-s", "-j", job_number(), "-o", "%i %j")):
            return True
        time.sleep(1)
    return False
