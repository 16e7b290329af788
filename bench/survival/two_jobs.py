"""Does a run keep every row of its history when two jobs are started in its folder?

    python -m bench.survival.two_jobs

On a real Slurm of virtual nodes (root, Debian) a first job begins a run or resumes one, and a
second one begins, resumes or overwrites it: in the same second, a second later, or once the first
has made steps; on the same node, on another one, or on another one that looks like another machine
(another boot_id, so that heartbeats decide and not flock). Each pair ends with one whole history,
equal to that of a run that no second job disturbed.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from bench.report import ROOT, at_least, at_most, report

sys.path.insert(0, str(ROOT / "tests" / "jobs" / "slurm"))
from cluster import ENVIRONMENT, HERE, Cluster
from job import RUN, write_scene

STEPS, HALF, LIMIT_S = 600, 250, 300
FLAGS = {"begin": (), "resume": ("--resume",), "overwrite": ("--overwrite",)}
ORDERS = (
    ("begin", "begin"),
    ("begin", "resume"),
    ("begin", "overwrite"),
    ("resume", "resume"),
    ("resume", "overwrite"),
)
PLACES = ("one node", "two nodes")
DELAYS = ("at once", "a second later", "under way")
MACHINES = "two machines"
# A job of its own mount namespace, in which the kernel has another name.
ELSEWHERE = (
    "unshare", "-m", "sh", "-c",
    'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"',
)  # fmt: skip
SAME = ("loss", "weight_sum", "learning_rate")


@dataclass(frozen=True)
class Bench:
    """A cluster, and a folder with a scene, a run file and what runs are compared with."""

    cluster: Cluster
    folder: Path

    def start(
        self, output: str, how: str, node: int, *, elsewhere: bool = False
    ) -> "subprocess.Popen[str]":
        """Start a job of two ranks on a node."""
        place = ("-N1", "-n2", "-c4", f"-wn{node}", "--mpi=pmi2", "--kill-on-bad-exit=1")
        mount = (*ELSEWHERE, str(self.folder / "boot_id")) if elsewhere else ()
        train = ("tilenet", "train", "-c", "run.yaml", "--output", output, *FLAGS[how])
        return subprocess.Popen(
            [HERE / "enter.sh", self.cluster.folder, "srun", *place, *mount, *train],
            cwd=self.folder,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def rows(self, output: str) -> list[dict[str, str]]:
        """The history of a run."""
        path = self.folder / output / "history.csv"
        if not path.exists():
            return []
        with path.open() as file:
            return list(csv.DictReader(file))


def pair(bench: Bench, output: str, order: tuple[str, str], place: str, delay: str) -> list[str]:
    """Start both; return what the two printed, with their exit codes."""
    node = 1 if place == "one node" else 2
    jobs = [bench.start(output, order[0], 1)]
    if delay == "a second later":
        time.sleep(1)
    elif delay == "under way":
        until = time.monotonic() + LIMIT_S
        wanted = 5 + (HALF if order[0] == "resume" else 0)
        while len(bench.rows(output)) < wanted and time.monotonic() < until:
            time.sleep(0.02)
    jobs.append(bench.start(output, order[1], node, elsewhere=place == MACHINES))
    ended = [job.communicate(timeout=LIMIT_S)[1] for job in jobs]
    return [f"exit {job.returncode}: {said}" for job, said in zip(jobs, ended, strict=True)]


def outcome(said: str) -> str:
    """How a job ended, in a word or two."""
    for words, name in (
        ("one job at a time", "refused"),
        ("has taken over", "replaced"),
        ("not overwritten unasked", "holds a run"),
        ("exit 0:", "done"),
    ):
        if words in said:
            return name
    return "failed"


def measured(bench: Bench, number: int, order: tuple[str, str], place: str, delay: str) -> Any:
    """A pair of jobs, and what is missing from the run that they leave."""
    output = f"run{number}"
    if order[0] == "resume":
        shutil.copytree(bench.folder / "half", bench.folder / output, symlinks=True)
    said = pair(bench, output, order, place, delay)
    rows, whole = bench.rows(output), bench.rows("whole")
    same = sum(
        all(ours[name] == theirs[name] for name in ("step", *SAME))
        for ours, theirs in zip(rows, whole, strict=False)
    )
    ends = [outcome(one) for one in said]
    row: dict[str, Any] = {
        "first": order[0],
        "second": order[1],
        "place": place,
        "second_starts": delay,
    }
    row |= {"first_ended": ends[0], "second_ended": ends[1]}
    row |= {"rows": len(rows), "rows_lost": STEPS - same}
    print(row, flush=True)
    if "failed" in ends or same != STEPS:
        print("\n".join(said), flush=True)
    return row


def main() -> None:
    """Start pairs, count rows, and turn them into claims."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_scene(folder)
        (folder / "boot_id").write_text("another machine\n")
        run = f"{RUN}steps: {STEPS}\ncheckpoint_every: 20\ntiles: {{rows: 1, columns: 2}}\n"
        (folder / "run.yaml").write_text(run)
        cluster = Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tn-"))))
        stack.callback(cluster.end)
        bench = Bench(cluster, folder)
        for output, steps in (("whole", STEPS), ("half", HALF)):
            (folder / "run.yaml").write_text(run.replace(f"steps: {STEPS}", f"steps: {steps}"))
            job = bench.start(output, "begin", 1)
            said = job.communicate(timeout=LIMIT_S)[1]
            assert job.returncode == 0, said
        (folder / "run.yaml").write_text(run)
        pairs = [*product(ORDERS, PLACES, DELAYS), *((o, MACHINES, "under way") for o in ORDERS)]
        for number, (order, place, delay) in enumerate(pairs):
            rows.append(measured(bench, number, order, place, delay))
    ends = [end for row in rows for end in (row["first_ended"], row["second_ended"])]
    both = sum(row["first_ended"] == row["second_ended"] == "done" for row in rows)
    figures = {
        "date": date.today().isoformat(),
        "steps": STEPS,
        "pairs": len(rows),
        "ends": {name: ends.count(name) for name in sorted(set(ends))},
        "both_done_one_after_the_other": both,
        "rows": rows,
    }
    claims = [
        at_most("rows of histories lost", sum(row["rows_lost"] for row in rows), 0),
        at_most("jobs that ended otherwise than done or refused", ends.count("failed"), 0),
        at_least(
            "pairs of which one job at least was done",
            sum("done" in (row["first_ended"], row["second_ended"]) for row in rows) / len(rows),
            1,
        ),
    ]
    report("two_jobs", figures, claims)


if __name__ == "__main__":
    main()
