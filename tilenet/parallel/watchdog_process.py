"""The watchdog's process beside a rank: watchdog_process.py PID WHO SIGNAL GRACE.

Stands outside the rank, because MPI calls may keep the rank's interpreter locked while they wait.
Stdin brings `SECONDS WHAT` lines from the rank PID: what must end, and within how long. When that
time passes without another line, SIGNAL has the rank dump its stacks into a pipe that is stdout
here; they are printed with WHO it is, and after GRACE seconds the rank is ended.

A program by itself, with few imports, since every rank starts one.
"""

import os
import sys
import time
from select import select

DUMPS = 1  # stdout, for its small number: select takes none above 1023
KILL = 9
QUIET_SECONDS = 0.5  # after the last piece of a dump


def watch(rank: int, who: str, signal: int, grace: float) -> None:
    """Return when the rank has closed stdin: it has finished, or is gone."""
    wanted, left = "", None
    while True:
        if select([0], [], [], left)[0]:
            lines = os.read(0, 1 << 16)
            if not lines:
                return
            wanted = lines.decode().splitlines()[-1]
            left = float(wanted.partition(" ")[0])
            continue
        seconds, _, doing = wanted.partition(" ")
        say(
            who,
            f"tilenet: {doing} must end within {float(seconds):g} s; the stacks below show where "
            f"it hangs, or what is slow: then raise hang_seconds\n{stacks(rank, signal)}",
        )
        # Launchers kill all ranks as soon as one has ended: let the others speak first
        end = time.monotonic() + grace
        while (rest := end - time.monotonic()) > 0:
            if select([0], [], [], rest)[0] and not os.read(0, 1 << 16):
                return
        if os.getppid() == rank:
            os.kill(rank, KILL)
        return


def stacks(rank: int, signal: int) -> str:
    """What the rank dumps at the signal."""
    os.kill(rank, signal)
    found, pause = b"", 4 * QUIET_SECONDS
    while select([DUMPS], [], [], pause)[0]:
        piece = os.read(DUMPS, 1 << 16)
        if not piece:
            break
        found, pause = found + piece, QUIET_SECONDS
    return found.decode(errors="replace") or (
        "no stacks: every thread is in a system call that no signal interrupts, often of a file "
        "system that does not answer"
    )


def say(who: str, text: str) -> None:
    """Print, each line with its rank: launchers mix the lines of ranks."""
    lines = "".join(f"[{who}] {line}\n" for line in text.splitlines() if line)
    os.write(2, f"\n{lines}".encode())


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
