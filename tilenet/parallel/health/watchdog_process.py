"""The watchdog's process next to a rank: watchdog_process.py PID WHO SIGNAL GRACE KEY.

Stands outside the rank, because MPI calls may keep the rank's interpreter locked while they wait.
Stdin brings `SECONDS WHAT` lines from the rank PID: what must end, and within how long. When that
time passes without another line, SIGNAL has the rank dump its stacks into a pipe that is stdout
here; they are printed with WHO it is, and after GRACE seconds the rank is ended. A job that is
suspended as a whole, with this process, loses no time.

A program by itself, with few imports, since every rank starts one.
"""

import os
import sys
import time
from select import select

DUMPS = 1  # stdout, for its small number: select takes none above 1023
KILL = 9
QUIET_SECONDS = 0.5  # after the last piece of a dump
SLICE_SECONDS = 1.0  # time is counted in such slices, of which a suspension costs one


def watch(rank: int, who: str, signal: int, grace: float, key: str = "hang_seconds") -> None:
    """Return when the rank has closed stdin: it has finished, or is gone."""
    wanted, left = "", float("inf")
    while True:
        pause = min(left, SLICE_SECONDS)
        if select([0], [], [], pause)[0]:
            lines = os.read(0, 1 << 16)
            if not lines:
                return
            wanted = lines.decode().splitlines()[-1]
            left = float(wanted.partition(" ")[0])
            continue
        left -= pause
        if left > 0:
            continue
        seconds, _, doing = wanted.partition(" ")
        say(
            who,
            f"tilenet: {doing} must end within {float(seconds):g} s; the stacks below show where "
            f"it hangs, or what is slow: then raise {key}\n{stacks(rank, signal)}",
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
    if _state(rank) in ("T", "t"):
        return "no stacks: the process was stopped (SIGSTOP, SIGTSTP or a debugger)"
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


def _state(process: int) -> str:
    """Its letter in the kernel's table; empty: not known."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def say(who: str, text: str) -> None:
    """Print, each line with its rank: launchers mix the lines of ranks."""
    lines = "".join(f"[{who}] {line}\n" for line in text.splitlines() if line)
    os.write(2, f"\n{lines}".encode())


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
