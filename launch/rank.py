"""Run a rank of a job script: rank.py STATUS FOLDER ignore|take PROGRAM…, in FOLDER.

It writes how the program ended into the status file, where the launcher's exit code does not tell a
stop from a crash (a step that is killed always says 137 or 143). A stop (75) is no reason to kill
the other ranks: the rank then ends with 0. Run by its path with `python -IS`, it loads nothing but
Python's own modules: as many start at once as the job has ranks.
"""

import os
import signal
import sys
from contextlib import suppress

NUMBERS = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK", "SLURM_PROCID")
ASKS = (signal.SIGUSR1, signal.SIGTERM)
STOPPED = 75


def status_of(code: int, stop: bool, rank: int) -> tuple[str, int]:
    """Return the text that a rank adds to the status file, and its exit code.

    `code` is the program's; less than 0 where a signal ended it.
    """
    code = code if code >= 0 else 128 - code
    if stop and code - 128 in ASKS:
        code = STOPPED  # it does not listen: they ended it
    speaks = rank == 0 or code not in (0, STOPPED)
    return (f"{code}\n" if speaks else ""), (0 if code == STOPPED else code)


def run(status: str, folder: str, early: str, program: list[str]) -> int:
    """Run the program to its end; returns the rank's exit code."""
    rank = int(next((os.environ[name] for name in NUMBERS if os.environ.get(name)), 0))
    os.chdir(folder)
    os.environ["TILENET_STARTED"] = f"{status}.mpi"  # which rank 0 makes when MPI is up
    # Signals wait until they are asked for, and none is lost, whatever ends at the same moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*ASKS, signal.SIGCHLD])
    # The program must not die of one that comes before it listens.
    for number in ASKS:
        signal.signal(number, signal.SIG_IGN if early == "ignore" else signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ctrl-C reaches all processes: the program ends of it, and this one sees how.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    usual = [signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ]  # the others Python ignores
    try:
        child = os.posix_spawnp(program[0], program, os.environ, setsigmask=(), setsigdef=usual)
    except OSError as error:
        print(f"tilenet: {program[0]} must be a program: {error.strerror}", file=sys.stderr)
        _write(status, "127\n")
        return 127
    # The launcher is up: only from now on can it be sent signals.
    if rank == 0:
        _write(status, "began\n")
    words, code = status_of(*_wait(child), rank)
    _write(status, words)
    return code


def _wait(child: int) -> tuple[int, bool]:
    """The program's exit code, and whether the rank was asked to stop."""
    stop = False
    while True:
        came = signal.sigtimedwait([*ASKS, signal.SIGCHLD], 1)
        stop = stop or (came is not None and came.si_signo in ASKS)
        ended, how = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(how), stop
        # The launcher may have told this process alone, and the program may not listen yet.
        if stop:
            os.kill(child, signal.SIGUSR1)


def _write(status: str, words: str) -> None:
    with suppress(OSError), open(status, "a") as file:  # a full disk; the run itself says so
        file.write(words)


if __name__ == "__main__":
    status, folder, early, *program = sys.argv[1:]
    sys.exit(run(status, folder, early, program))
