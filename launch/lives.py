"""A job on a range of nodes: where one dies, the others go on from the last checkpoint.

With the plan made again for them: the same tiles, fewer ranks. As many nodes of the job as answer.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .queues import Slurm, job_number
from .steps import Outcome, Steps

__all__ = ["Lives", "holds_step", "in_order"]

WATCH = Path(__file__).with_name("watch.py")
WATCH_S = 30  # between looks whether the first node lives
PROBE_S = 60
LET_GO_S = 90


class Lives:
    """Runs steps, each again as long as it fails because nodes died.

    Attributes:
        plan: The plan for the nodes that are left.
        once_per_node: A command line that starts one process on each of them.
    """

    def __init__(
        self,
        steps: Steps,
        planned: str,
        program: Sequence[str],
        once_per_node: Sequence[str],
        nodes: tuple[int, int],
    ) -> None:
        """`nodes`: the fewest, and ranks on each."""
        self.plan = str(steps.output / "plan.now.json")
        self.once_per_node = once_per_node
        self._steps, self._planned, self._program = steps, planned, program
        self._least, self._per_node = nodes
        self._srun, self._once = steps.launch, once_per_node
        self._heir: subprocess.Popen[bytes] | None = None
        self._answer = answering()
        self._settle()

    def run(self, name: str, early: str, program: Sequence[str]) -> Outcome:
        """Run a program on all ranks, as `Steps.run`."""
        steps, stop = self._steps, self._steps.stop
        while True:
            ended = steps.run(name, early, program)
            if ended.result in ("finished", "stopped") or stop.cancel:
                return ended
            before, self._answer = len(self._answer), answering()
            if len(self._answer) >= before:  # the nodes are not to blame
                if steps.once_more(ended):
                    continue
                return ended
            if stop.requeue:
                return replace(ended, result="killed")
            if not _let_go():
                self._leave(
                    "Slurm does not let go of the step that lost a node: this needs a new "
                    "allocation"
                )
            self._settle()

    def _leave(self, why: str) -> None:
        """End this life for one on other nodes."""
        print(why, flush=True)
        self._steps.stop.requeue = True
        sys.exit(Slurm().come_again(self._steps.stop))

    def _settle(self) -> None:
        """Plan for the nodes that answer; of these the most for which there is a plan."""
        names = self._answer
        if not names:
            print("not even the node of this script takes a step: srun does not work here")
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
            print(f"nodes: {here[1]}, ranks: {ranks}", flush=True)
            self._steps.launch = [*self._srun, "-N", str(count), "-n", str(ranks), *here]
            self.once_per_node = [*self._once, "-N", str(count), "-n", str(count), *here]
            self._watch(names[count - 1] if count > 1 else None)
            return
        sys.exit(1)

    def _watch(self, last: str | None) -> None:
        if self._heir:
            self._heir.terminate()
        self._heir = None
        if last is not None:
            step = ["srun", "-N", "1", "-n", "1", "-w", last, "--overlap", "--mpi=none", "-Q"]
            watch = [sys.executable, "-IS", str(WATCH), job_number(), os.environ["SLURMD_NODENAME"]]
            self._heir = subprocess.Popen(
                [*step, "-J", "watch", *watch, str(WATCH_S)], stdin=subprocess.DEVNULL
            )


def answering() -> list[str]:
    """Which of the job's nodes run what they are given: Slurm may not know yet that one is dead."""
    nodes = ""
    for attempt in range(1, 6):  # the controller may not answer while it waits for a dead node
        nodes = _output_of("squeue", "-h", "-j", job_number(), "-o", "%N").strip()
        if nodes:
            break
        time.sleep(attempt)
    # GNU's, since an srun that waits for a dead node ignores all signals
    probe = ["timeout", "-k", "1", str(PROBE_S), "srun", "-N", "1", "-n", "1"]
    probes = {
        name: subprocess.Popen(
            [*probe, "-w", name, "--overlap", "--mpi=none", "-Q", "true"], stdin=subprocess.DEVNULL
        )
        for name in _output_of("scontrol", "show", "hostnames", nodes).split()
    }
    return in_order([name for name, process in probes.items() if process.wait() == 0])


def in_order(names: Sequence[str]) -> list[str]:
    """Names of nodes by their numbers: n2 before n10."""
    return sorted(names, key=lambda name: [part.zfill(20) for part in re.split(r"(\d+)", name)])


def holds_step(steps: str) -> bool:
    """Whether Slurm holds a step, of those that `squeue -s -o '%i %j'` shows."""
    ours = re.compile(r"\.batch |\.extern | watch$")
    return any(not ours.search(line) for line in steps.splitlines())


def _let_go() -> bool:
    """Whether Slurm lets the last step go.

    One whose ranks end just before Slurm gives their node up it may hold forever (seen with 22.05),
    and with it all devices of the job.
    """
    for _ in range(LET_GO_S):
        if not holds_step(_output_of("squeue", "-h", "-s", "-j", job_number(), "-o", "%i %j")):
            return True
        time.sleep(1)
    return False


def _output_of(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
