"""Queue a job again, with Slurm, with LSF and on a machine without a queue.

PBS and Flux queue no job again that ends by itself. qrerun of PBS is for managers and operators
alone (`req_rerunjob` in OpenPBS); it reruns those marked `-r y` that it preempts, or whose first
node dies. Flux has nothing of the kind. There the next job waits for this one (afternotok).
"""

import os
import re
import signal
import subprocess
import time

from tilenet.errors import TilenetError

from .stop_signals import StopSignals

AGAIN = 75  # LSF queues a job that ends with it again; elsewhere its user may


class Queue:
    """The queue of LSF, PBS, Flux, or of a machine without one."""

    def preempted(self) -> bool:
        """Whether others need the nodes; not known here."""
        return False

    def come_again(self, stop: StopSignals) -> int:
        """The exit code with which the job ends, so that it comes again."""
        return AGAIN


class Slurm(Queue):
    """Slurm's, of the job that this runs in."""

    def preempted(self) -> bool:
        return preempted(self._show_job())

    def come_again(self, stop: StopSignals) -> int:
        if not requeues(self._show_job(), stop.requeue):
            return AGAIN
        # The job's next life has the same number: nothing that is for this one may reach it. So
        # Slurm ends this program; an end of its own could be taken for that of the next life.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if subprocess.run(["scontrol", "requeue", job_number()], check=False).returncode == 0:
            time.sleep(1000)
        return AGAIN

    def _show_job(self) -> str:
        return output_of("scontrol", "show", "job", "-o", job_number())


def output_of(*command: str) -> str:
    """What a command of Slurm's prints, whether it fails or not."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def job_number() -> str:
    """The number of the job that this runs in.

    Raises:
        TilenetError: It runs outside of Slurm's jobs.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise TilenetError(
            "a script for Slurm runs in one of its jobs (SLURM_JOB_ID is not set); submit it with "
            "sbatch"
        )
    return os.environ["SLURM_JOB_ID"]


def preempted(job: str) -> bool:
    """Whether others need the nodes: Slurm then tells the ranks, and not the script."""
    return re.search(r" PreemptTime=\d", job) is not None


def requeues(job: str, requeue: bool) -> bool:
    """Whether a job, as `scontrol show job -o` shows it, goes back into the queue.

    Not where the user stopped the ranks (scancel --signal=USR1), or cancels the job.
    """
    return (requeue or preempted(job)) and " JobState=RUNNING " in job
