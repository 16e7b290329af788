"""One step of a job: run a program on all ranks, and read how it ended from their status file."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .stop_signals import StopSignals

RANK = Path(__file__).with_name("rank.py")
LOOK_S = 0.5  # between looks at signals
MOST_UNSTARTED = 2


@dataclass(frozen=True)
class Outcome:
    """The end of a step.

    Attributes:
        result: The ends that the ranks wrote; killed: the step ended before they could write.
        started: Whether MPI was up.
    """

    result: Literal["finished", "stopped", "failed", "killed"]
    started: bool


def outcome(status: str, started: bool, requeue: bool) -> Outcome:
    """Read the end of a step from its status file.

    Args:
        status: Lines of the status file.
        started: Whether MPI was up.
        requeue: Whether the job was asked to make room.
    """
    codes = set(status.split()) - {"began"}
    if codes - {"0", "75"}:
        # Told to stop while MPI could not start: nothing was done, and nothing speaks against the
        # queue.
        return Outcome("stopped" if requeue and not started else "failed", started)
    if codes:
        return Outcome("stopped" if "75" in codes else "finished", started)
    return Outcome("killed", started)


def starts_again(ended: Outcome, stop: StopSignals, unstarted: int) -> bool:
    """Whether a step is to be run once more, since MPI did not start: nothing was done yet.

    Slurm's PMI2, for one, cuts long messages (docs/failures.md). `unstarted`: how often before.
    """
    nothing = not (ended.started or ended.result == "finished")
    return nothing and not stop and unstarted < MOST_UNSTARTED


def say(sentence: str) -> None:
    """Write a line to the job's log; no job ends for a log that takes no more.

    Python's own buffer would keep the line, and have Python end with 120.
    """
    with suppress(OSError):
        os.write(sys.stdout.fileno(), os.fsencode(f"{sentence}\n"))


class Steps:
    """Runs steps with a launcher.

    Attributes:
        launch: The launcher's command line, up to the program.
        folder: Folder in which the ranks work.
    """

    def __init__(self, launch: Sequence[str], output: Path, folder: str, stop: StopSignals) -> None:
        self.launch, self.output, self.folder, self.stop = launch, output, folder, stop
        self._unstarted = 0

    def run(self, name: str, early: str, program: Sequence[str]) -> Outcome:
        """Run a program on all ranks.

        Args:
            name: Name of the step in the log.
            early: `ignore` or `take`: effect of signals on it before it catches them.
            program: Command line of the program.
        """
        handle, status = tempfile.mkstemp(prefix="status.", dir=self.output)
        os.close(handle)
        started = Path(f"{status}.mpi")
        rank = [sys.executable, "-IS", str(RANK), status, self.folder, early]
        line = [*self.launch, *rank, *program]
        self._wait(subprocess.Popen(line, stdin=subprocess.DEVNULL), status)
        ended = outcome(Path(status).read_text(), started.exists(), self.stop.requeue)
        os.unlink(status)
        started.unlink(missing_ok=True)
        say(f"{name}: {ended.result}")
        return ended

    def once_more(self, ended: Outcome) -> bool:
        """Whether MPI did not start and the step runs again; twice in the whole job."""
        again = starts_again(ended, self.stop, self._unstarted)
        if again:
            self._unstarted += 1
            say("MPI did not start: once more")
        return again

    def attempts(self, name: str, early: str, program: Sequence[str]) -> Outcome:
        """Run a program on all ranks, again where MPI did not start."""
        while self.once_more(ended := self.run(name, early, program)):
            pass
        return ended

    def _wait(self, launcher: "subprocess.Popen[bytes]", status: str) -> None:
        """Wait for the launcher, which hands signals on to its ranks once it is up."""
        while launcher.poll() is None:
            if self.stop and _holds_words(status):
                launcher.send_signal(signal.SIGUSR1)
            time.sleep(LOOK_S)


def _holds_words(status: str) -> bool:
    try:
        return os.path.getsize(status) > 0
    except OSError:  # a file system that does not answer for a while
        return False
