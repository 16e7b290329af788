"""What does it cost a run to be disturbed, in seconds and steps, and does it end with its weights?

On a real Slurm of virtual nodes (root, Debian) one job on 2 to 3 nodes, a rank each, is disturbed
in the ways of --rows, after two checkpoints (quick: in four of them). It goes on by itself, or ends
and is submitted again; seconds are those to its end or to its first new step. The
final weights are compared with those of a run that nothing disturbed.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from cluster import ENDS, Cluster
from job import HEIGHT, NETWORK, RUN, WIDTH, Job, write_scene
from safetensors.numpy import load_file

from bench.report import Found, at_most
from launch.__main__ import main as launch
from tilenet.__main__ import main as tilenet

STEPS, EVERY = 600, 5  # a minute: Slurm looks for jobs near their limit every half
HANG_S = 40  # above what Slurm takes to give a node up, as on clusters
DISK_BYTES = 4 << 20
LIMIT_S = 400


@dataclass(frozen=True)
class Place:
    """A cluster, and a folder with all that a job takes."""

    cluster: Cluster
    folder: Path

    def rank(self, job: Job, signal: str) -> None:
        """Send a signal to rank 1 of the job."""
        find = (
            f"for p in $(pgrep -f 'tilenet train.*{job.output}'); do "
            "case $(cat /proc/$p/comm) in tilenet|python*) "
            "tr '\\0' '\\n' </proc/$p/environ | grep -qx SLURM_PROCID=1 && kill -$0 $p; esac; "
            "done; :"
        )
        self.cluster.answer("bash", "-c", find, signal)

    def time_limit(self, job: Job) -> None:
        """Have it end soon; Slurm sends what --signal says, within 30 s of 90 s before."""
        shown = self.cluster.answer("scontrol", "show", "job", "-o", job.number)
        found = re.search(r"RunTime=(\d+):(\d+):(\d+)", shown)
        assert found
        minutes = int(found[1]) * 60 + int(found[2]) + (1 if int(found[3]) < 20 else 2)
        limit = f"TimeLimit={minutes}"
        self.cluster.answer("scontrol", "update", f"jobid={job.number}", limit)

    def preempt(self, job: Job) -> None:
        """Hand in a job that goes first."""
        first = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "true")
        self.cluster.answer("sbatch", *first)

    def fill_disk(self, job: Job) -> None:
        """Leave no room where the job writes."""
        with (self.folder / "small" / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def cut_image(self, job: Job) -> None:
        """Take from an image the pixels that are read from now on."""
        (self.folder / "cut.tif").write_bytes((self.folder / "image.tif").read_bytes()[:4096])

    def mend(self) -> None:
        """Undo what was done to disk and image."""
        (self.folder / "small" / "filler").unlink(missing_ok=True)
        (self.folder / "cut.tif").write_bytes((self.folder / "image.tif").read_bytes())


Disturb = Callable[[Place, Job], object]
# What disturbs, whether the run goes on by itself, and what does it
ROWS: dict[str, tuple[bool, Disturb]] = {
    "scancel": (False, lambda p, job: p.cluster.answer("scancel", job.number)),
    "time limit": (True, Place.time_limit),
    "preemption": (True, Place.preempt),
    "a node dies": (True, lambda p, job: p.cluster.kill_node(2)),
    "kill -9 of a rank": (False, lambda p, job: p.rank(job, "KILL")),
    "SIGSTOP of a rank": (False, lambda p, job: p.rank(job, "STOP")),
    "full disk": (False, Place.fill_disk),
    "cut image": (False, Place.cut_image),
}
QUICK = ("scancel", "preemption", "a node dies", "kill -9 of a rank")


def prepare(folder: Path) -> None:
    """A scene, run files, a plan for 3 nodes, the script for 2 to 3, and a small disk."""
    write_scene(folder)
    (folder / "cut.tif").write_bytes((folder / "image.tif").read_bytes())
    run = f"{RUN}steps: {STEPS}\ncheckpoint_every: {EVERY}\nhang_seconds: {HANG_S}\n"
    # With 0.01 rounding grows 10¹⁴ times in 150 steps
    run = run.replace("{lr: 0.01}", "{lr: 0.001}")
    (folder / "run.yaml").write_text(run)
    (folder / "cut.yaml").write_text(run.replace("images: image.tif", "images: cut.tif"))
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x3", "--precision", "float64"]
    where = ["--machine", "slurm", "--nodes", "3", "--devices-per-node", "1"]
    plan, script = str(folder / "plan.json"), str(folder / "job.sh")
    assert tilenet(["plan", *NETWORK.split(), *image, *where, "-o", plan]) == 0
    assert launch([plan, "--nodes", "2-3", "--script", script]) == 0
    text = (folder / "job.sh").read_text()
    (folder / "job.sh").write_text(text.replace("OMP_NUM_THREADS=16", "OMP_NUM_THREADS=1"))


def made(job: Job) -> int:
    """Steps in the history, whose last line may be half written."""
    table = job.output / "history.csv"
    return max(0, table.read_text().count("\n") - 1) if table.exists() else 0


def begun(job: Job) -> list[int]:
    """Of each life that trained its steps before it."""
    return [STEPS - int(left) for left in re.findall(r"; (\d+) steps; gradients", job.log)]


def start(place: Place, name: str) -> Job:
    """Hand the job in, with the disk and the image of its row."""
    output = (f"small/{name}" if name == "full disk" else name).replace(" ", "-")
    run = "cut.yaml" if name == "cut image" else "run.yaml"
    names = {"IMAGE": "", "RUN": run, "GDAL_CACHEMAX": "0"}
    return Job(place.cluster, place.folder, output, **names)


def disturb(place: Place, name: str, whole: Path) -> dict[str, Any]:
    """Run the job, disturb it, have it finish, and compare it with the undisturbed one."""
    goes_on, how = ROWS[name]
    job = start(place, name)
    job.until(lambda: made(job) > 2 * EVERY)
    how(place, job)
    disturbed, lives = time.monotonic(), len(begun(job))
    row: dict[str, Any] = {"disturbance": name, "resumes": "by itself" if goes_on else "submitted"}
    before = made(job)
    released = False
    while True:
        state, code = place.cluster.job(job.number)
        waited = time.monotonic() - disturbed
        assert waited < LIMIT_S, job.log
        if len(begun(job)) == lives:
            before = max(before, made(job))
        if state in ENDS or (len(begun(job)) > lives and made(job) > begun(job)[-1]):
            break
        if state == "PENDING" and not released:  # it need not wait for the usual 2 minutes
            row["seconds_to_queue"], released = round(waited, 1), True
            # With its limit as before: else the next life is over as soon.
            new = f"jobid={job.number}", "StartTime=now+3seconds", "TimeLimit=9"
            place.cluster.answer("scontrol", "update", *new)
        time.sleep(0.05)
    assert before < STEPS, f"nothing disturbed it: {job.log}"
    row |= {"seconds": round(waited, 1), "state": state, "exit": code}
    place.mend()
    if state in ENDS:
        job = start(place, name)
    assert place.cluster.wait(job.number, LIMIT_S) == ("COMPLETED", 0), job.log
    assert made(job) == STEPS, job.log
    place.cluster.start_dead_nodes()
    row |= {"steps_made": before, "steps_lost": before - begun(job)[-1], "lives": len(begun(job))}
    return {**row, "weights": difference(job.output, whole)}


def difference(found: Path, wanted: Path) -> float:
    """Of the final weights, relative to the largest of each tensor."""
    ours, theirs = (load_file(one / "last" / "weights.safetensors") for one in (found, wanted))
    assert ours.keys() == theirs.keys()
    ratios = [np.abs(ours[k] - theirs[k]).max() / np.abs(theirs[k]).max() for k in theirs]
    return float(max(ratios))


def bench(quick: bool, rows: tuple[str, ...] = ()) -> Found:
    """Disturb and measure, in all ways or in these."""
    names = rows or (QUICK if quick else tuple(ROWS))
    if unknown := sorted(set(names) - set(ROWS)):
        sys.exit(f"no such row: {', '.join(unknown)}; rows: {', '.join(ROWS)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepare(folder)
        disk = folder / "small"
        disk.mkdir()
        # before the nodes' own mounts, which are copies of what is there
        mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
        subprocess.run(mount, check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        cluster = Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tn-"))))
        stack.callback(cluster.end)
        place = Place(cluster, folder)
        whole = start(place, "whole")
        assert cluster.wait(whole.number, LIMIT_S) == ("COMPLETED", 0), whole.log
        found = [disturb(place, name, whole.output) for name in names]
    lost = max(row["steps_lost"] for row in found) / EVERY
    off = max(row["weights"] for row in found)
    claims = [
        at_most("steps lost, over the steps between checkpoints", lost, 1),
        at_most("weights at the end, largest relative difference", off, 1e-10),
    ]
    figures = {"date": date.today().isoformat(), "steps": STEPS, "checkpoint_every": EVERY}
    return {**figures, "hang_seconds": HANG_S, "rows": found}, claims
