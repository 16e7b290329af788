"""A Slurm of virtual nodes: its life, and what a user does on its login node."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
UP_LIMIT_S = 150  # of which installing packages may take 120
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

IDLE = "idle\nidle\nidle"  # all nodes

# The scripts of the interpreter that runs the tests come first: tilenet and mpiexec.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TILENET_START_SECONDS": "60",  # a start that hangs is to be loud
    # UCX's addresses are too long for Slurm's PMI2 on some machines (docs/failures.md)
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


class NoSlurmError(Exception):
    """There can be no Slurm on this machine; the message says why."""


class Cluster:
    """Virtual nodes n1, n2, …, with 32 pretended cores and 4 pretended GPUs each.

    Attributes:
        plain: Whether all nodes share this machine's name and address.

    Raises:
        NoSlurmError: When made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead: list[int] = []  # nodes that tests have ended
        log = folder / "up.log"
        try:
            with log.open("w") as file:  # not a pipe, which daemons would hold open
                subprocess.run(
                    [HERE / "up.sh", folder], stderr=file, check=True, timeout=UP_LIMIT_S
                )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            self.end()
            raise NoSlurmError(log.read_text().strip() or str(error)) from error
        self.plain = (folder / "plain").exists()

    def end(self) -> None:
        """End all its processes."""
        subprocess.run([HERE / "down.sh", self.folder], check=False, timeout=30)

    def run(
        self,
        *command: str | Path,
        limit_s: float = 30,
        cwd: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head; after `limit_s` it is killed and returns 124 or 137."""
        return subprocess.run(
            [HERE / "enter.sh", self.folder, "timeout", "-k", "3", str(limit_s), *command],
            cwd=cwd,
            env={**ENVIRONMENT, **(variables or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=limit_s + 15,
            check=False,
        )

    def answer(
        self, *command: str | Path, cwd: Path | None = None, variables: dict[str, str] | None = None
    ) -> str:
        """What a command prints that succeeds."""
        done = self.run(*command, cwd=cwd, variables=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> tuple[str, int]:
        """The state of a job and its script's exit code so far."""
        shown = self.answer("scontrol", "show", "job", "-o", number)
        found = re.search(r"JobState=(\w+).* ExitCode=(\d+):", shown)
        assert found, shown
        return found[1], int(found[2])

    def kill_node(self, number: int) -> None:
        """End all processes of node n1, n2, …; only where nodes have namespaces."""
        self.dead.append(number)
        self.answer(HERE / "node.sh", self.folder, "kill", str(number))

    def start_dead_nodes(self) -> None:
        """Start the nodes that were ended, and wait until all nodes are there for jobs."""
        while self.dead:
            node = HERE / "node.sh", self.folder, "start", str(self.dead.pop())
            with (self.folder / "started.log").open("w") as file:  # no pipe: the daemon holds it
                subprocess.run(
                    [HERE / "enter.sh", self.folder, *node],
                    stdout=file,
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                    check=True,
                    timeout=30,
                )
        until = time.monotonic() + 60
        while (states := self.answer("sinfo", "-h", "-N", "-p", "all", "-o", "%t")) != IDLE:
            assert time.monotonic() < until, states
            time.sleep(0.5)

    def wait(self, number: str, limit_s: float, states: tuple[str, ...] = ENDS) -> tuple[str, int]:
        """Wait until a job is in one of `states`; return it, and its script's exit code."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            found = self.job(number)
            if found[0] in states:
                return found
            time.sleep(0.3)
        self.run("scancel", "--full", "--signal=KILL", number)
        raise AssertionError(f"job {number} did not end within {limit_s:.0f} s")
