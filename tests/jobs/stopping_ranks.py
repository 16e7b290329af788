"""A job of which a rank hangs inside of a function, wherever in a run that is.

stopping_ranks.py FUNCTION RANK ARGUMENT…: `tilenet ARGUMENT…`, of which a rank hangs at the first
call of MODULE:NAME. The patience is long until then, so that a busy machine wakes no watchdog.
`each_alone` has a rank of its own for each of several functions, in forks of one process: most of
the time goes into imports.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tilenet.cli.evaluate
import tilenet.cli.predict
import tilenet.cli.train  # noqa: F401, imported once for all
from tilenet.__main__ import main
from tilenet.parallel.health import watchdog as module
from tilenet.parallel.health.watchdog import Watchdog

__all__ = ["each_alone"]

PATIENCE_S = 0.2
OUTSIDE = "no watchdog keeps the time here"


def hang_in(function: str, rank: int) -> None:
    """Have a rank hang at the first call of a function."""
    module.GRACE_SECONDS = 0.2
    armed: list[tuple[Watchdog, str, float]] = []
    arm = Watchdog.arm

    def noting(watchdog: Watchdog, doing: str, times: float = 1.0) -> None:
        armed.append((watchdog, doing, times))
        arm(watchdog, doing, times)

    Watchdog.arm = noting  # type: ignore[method-assign]
    where, _, path = function.partition(":")
    owner: Any = importlib.import_module(where)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    real = getattr(owner, name)

    def hanging(*args: Any, **kwargs: Any) -> Any:
        from mpi4py import MPI

        if rank == MPI.COMM_WORLD.rank:
            if not armed or armed[-1][0]._over is None:
                os.write(2, OUTSIDE.encode())
                os._exit(3)
            watchdog, doing, times = armed[-1]
            watchdog.hang_seconds = PATIENCE_S
            arm(watchdog, doing, times)
            time.sleep(1000)
        return real(*args, **kwargs)

    setattr(owner, name, hanging)


def each_alone(jobs: Sequence[tuple[str, Sequence[str]]], folder: Path) -> list[tuple[int, str]]:
    """Status and stderr of one rank per job: the function that it hangs in, its arguments."""
    words = [word for function, arguments in jobs for word in (function, *arguments, ";")]
    subprocess.run([sys.executable, __file__, "--each", str(folder), *words], check=True)
    ended = []
    for number in range(len(jobs)):
        status = int((folder / f"{number}.status").read_text())
        ended.append((status, (folder / f"{number}.err").read_text()))
    return ended


def fork_each(folder: Path, words: Sequence[str]) -> None:
    """Two at a time."""
    jobs: list[list[str]] = [[]]
    for word in words:
        if word == ";":
            jobs.append([])
        else:
            jobs[-1].append(word)
    running: dict[int, int] = {}
    waiting = list(enumerate(jobs[:-1]))
    while waiting or running:
        if waiting and len(running) < 2:
            number, (function, *arguments) = waiting.pop(0)
            child = os.fork()
            if not child:
                error = os.open(folder / f"{number}.err", os.O_WRONLY | os.O_CREAT)
                os.dup2(error, 1)
                os.dup2(error, 2)
                hang_in(function, 0)
                os._exit(main(arguments))
            running[child] = number
        else:
            child, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            (folder / f"{running.pop(child)}.status").write_text(str(code))


if __name__ == "__main__":
    if sys.argv[1] == "--each":
        fork_each(Path(sys.argv[2]), sys.argv[3:])
    else:
        hang_in(sys.argv[1], int(sys.argv[2]))
        sys.exit(main(sys.argv[3:]))
