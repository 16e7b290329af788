"""Start a job under a launcher, disturb it, and see how it ends and whether all of it does."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from disturbances import Disturbance, Life, Moment
from small_run import HANG_S, MAP, STEPS, VALIDATED_EVERY

__all__ = ["Ended", "Launcher", "live"]

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "tests" / "jobs" / "slurm"
MARK = "TILENET_SOAK_LIFE"
POLL_S = 0.001
# A watchdog allows four times its patience for a save or a first step, and ends a rank 2 s later;
# the rest is for a machine that does much else.
LIMIT_S = 4 * HANG_S + 2 + 70
LINGER_S = 20.0  # that ranks may take to end after their launcher has
SIGNALS = {
    "kill -9 of a rank": signal.SIGKILL,
    "SIGSEGV": signal.SIGSEGV,
    "SIGTERM": signal.SIGTERM,
    "SIGUSR1": signal.SIGUSR1,
    "SIGSTOP": signal.SIGSTOP,
}


@dataclass(frozen=True)
class Ended:
    """How a life ended."""

    code: int  # of the launcher; below 0: killed by that signal
    done: bool  # whether what was to be done to it was done
    seconds: float  # of the whole life
    after_s: float  # from what was done to the launcher's end
    linger_s: float  # from the launcher's end to that of its last process
    hung: bool  # whether it had to be killed after `LIMIT_S`
    left: int  # processes that were there `LINGER_S` after the launcher's end
    said: str  # on stdout and stderr


class Launcher:
    """Starts jobs: `mpiexec`, or `srun` on a cluster of virtual nodes."""

    def __init__(self, name: str, cluster: Cluster | None = None) -> None:
        self.name, self.cluster = name, cluster

    def command(self, ranks: int) -> list[str]:
        """What comes before the program."""
        if self.cluster is None:
            return ["mpiexec", "-n", str(ranks)]
        nodes = min(ranks, 2)
        launch = ["srun", "-Q", "--mpi=pmi2", "--kill-on-bad-exit=1", "--wait=60", f"-N{nodes}"]
        return [str(SLURM / "enter.sh"), str(self.cluster.folder), *launch, f"-n{ranks}"]

    def is_launcher(self, program: str) -> bool:
        """Whether a program of that name is the one that a user started."""
        return program.startswith("mpiexec" if self.cluster is None else "srun")

    def clear(self) -> None:
        """What the batch system does when a job's script ends: nothing of the job stays."""
        if self.cluster is not None:
            self.cluster.run("scancel", "--signal=KILL", "--full", "--user=root")
            self.cluster.run("scancel", "--user=root")


def live(launcher: Launcher, life: Life, program: list[str], run: Path, log: Path) -> Ended:
    """One life of a job, to the end of its last process."""
    mark = uuid.uuid4().hex
    temporary = log.parent / "tmp"  # a killed mpiexec leaves files there
    temporary.mkdir(exist_ok=True)
    more = {"OMP_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "PYTHONPATH": str(ROOT)}
    more |= {MARK: mark, "TMPDIR": str(temporary)}
    more["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if launcher.cluster is not None:
        more["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # UCX: too long for Slurm's PMI2 (docs/failures.md)
    began = time.monotonic()
    with log.open("w") as file:
        started = subprocess.Popen(
            [*launcher.command(life.ranks), *program],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **more},
            cwd=ROOT,
            start_new_session=True,
        )
    watched = _Watched(launcher, life, mark, run, started, began)
    hung = watched.follow()
    code, ended = started.wait(), time.monotonic()
    if life.disturbance and life.disturbance.kind == "kill -9 of the launcher":
        launcher.clear()
    while _processes(mark) and time.monotonic() < ended + LINGER_S:
        time.sleep(0.01)
    linger_s, left = time.monotonic() - ended, _processes(mark)
    for process in left:
        _send(process, signal.SIGKILL)
    launcher.clear()
    after_s = ended - watched.done_at if watched.done_at else 0.0
    said, done = log.read_text(errors="replace"), watched.done_at is not None
    return Ended(code, done, ended - began, after_s, linger_s, hung, len(left), said)


class _Watched:
    """A life under way."""

    def __init__(
        self,
        launcher: Launcher,
        life: Life,
        mark: str,
        run: Path,
        started: "subprocess.Popen[bytes]",
        began: float,
    ) -> None:
        self.launcher, self.life, self.mark, self.run = launcher, life, mark, run
        self.started, self.began = started, began
        self.done_at: float | None = None

    def follow(self) -> bool:
        """Disturb it when its moment comes, until it ends; return whether it had to be killed."""
        todo = self.life.disturbance
        due = None if todo is None else self._due(todo.moment)
        while self.started.poll() is None:
            if time.monotonic() > self.began + LIMIT_S:
                for process in _processes(self.mark):
                    _send(process, signal.SIGKILL)
                return True
            if todo is None or due is None or self.done_at is not None:
                time.sleep(0.02)
            elif due():
                if self._disturb(todo):
                    self.done_at = time.monotonic()
            else:
                time.sleep(POLL_S)
        return False

    def _due(self, moment: Moment) -> Callable[[], bool]:
        """Says whether the moment has come."""
        seen = _seen(moment.after, self.run)
        count, before, since = 0, seen(), None

        def due() -> bool:
            nonlocal count, before, since
            now = seen()
            if since is None:
                # A first look at a folder may show what an earlier life left.
                count += bool(now and now != before)
                before = now
                if moment.after == "start" or count >= moment.count:
                    since = self.began if moment.after == "start" else time.monotonic()
            return since is not None and time.monotonic() >= since + moment.seconds

        return due

    def _disturb(self, todo: Disturbance) -> bool:
        """Do it; whether there was something to do it to."""
        found = _processes(self.mark)
        ranks = {rank: one for one in found if (rank := _rank(one)) is not None}
        if todo.kind in ("kill -9 of the launcher", "Ctrl-C"):
            kill = todo.kind != "Ctrl-C"
            launchers = [one for one in found if self.launcher.is_launcher(_name(one))]
            for one in launchers:
                _send(one, signal.SIGKILL if kill else signal.SIGINT)
                if not kill and self.launcher.cluster is not None:
                    time.sleep(0.3)  # srun wants it twice within a second
                    _send(one, signal.SIGINT)
            return bool(launchers)
        if todo.kind == "kill -9 of all ranks":
            if len(ranks) < self.life.ranks:
                return False
            for one in ranks.values():
                _send(one, signal.SIGKILL)
            return True
        assert todo.rank is not None
        if todo.rank not in ranks:
            return False
        if todo.kind == "disk full":
            size = 2000  # below all that the run still writes but the first rows and small texts
            resource.prlimit(ranks[todo.rank], resource.RLIMIT_FSIZE, (size, size))
        else:
            _send(ranks[todo.rank], SIGNALS[todo.kind])
        return True


def _seen(after: str, run: Path) -> Callable[[], object]:
    """What changes, and is then not empty, when that happens."""

    def link() -> object:
        return os.readlink(run / "last") if os.path.lexists(run / "last") else ""

    def parts() -> object:
        return "".join(sorted(one.name for one in (run / "checkpoints").glob(".step-*.part")))

    def rows() -> int:
        """Of the history, whose first line is no row."""
        try:
            return max((run / "history.csv").read_bytes().count(b"\n") - 1, 0)
        except OSError:
            return 0

    def scored_next() -> object:
        now = rows()
        return now if now % VALIDATED_EVERY == 0 else 0

    def of_file(name: str, what: str) -> object:
        try:
            return getattr((run / name).stat(), what)
        except OSError:
            return 0

    looks: dict[str, Callable[[], object]] = {
        "start": lambda: 0,
        "row of a step": rows,
        "save begun": parts,
        "save named": link,
        "validation begun": scored_next,
        "last row": lambda: rows() == STEPS,
        "tiles kept": lambda: of_file(f".{MAP}.pieces.part", "st_mtime_ns"),
        "map copied": lambda: of_file(f".{MAP}.pieces.part/map.tif", "st_size"),
        "map placed": lambda: of_file(MAP, "st_ino"),
    }
    return looks[after]


def _processes(mark: str) -> list[int]:
    """Those that carry the mark in their environment, wherever they run."""
    wanted = f"{MARK}={mark}".encode()
    numbers = [one for one in os.listdir("/proc") if one.isdigit()]
    return [int(one) for one in numbers if wanted in _read(one, "environ").split(b"\0")]


def _rank(process: int) -> int | None:
    """The rank that a process is; None: it is a launcher, or something next to a rank."""
    if b"tilenet" not in _read(str(process), "cmdline").split(b"\0")[1:4]:
        return None
    if not _name(process).startswith("python"):
        return None
    for part in _read(str(process), "environ").split(b"\0"):
        name, _, value = part.partition(b"=")
        if name in (b"PMI_RANK", b"SLURM_PROCID"):
            return int(value)
    return None


def _name(process: int) -> str:
    return _read(str(process), "comm").decode(errors="replace").strip()


def _read(process: str, name: str) -> bytes:
    try:
        return Path("/proc", process, name).read_bytes()
    except OSError:  # it has ended
        return b""


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
