"""A scene, and jobs of it on the cluster: what a user has who copied jobs/slurm."""

import csv
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rasterio
from cluster import ENDS, ENVIRONMENT, Cluster

HEIGHT, WIDTH = 97, 131
LIMIT_S = 240
LOOK_S = 3  # between looks at a job's state
# More tiles than ranks
MORE = "--device cpu --tile 32"
NETWORK = "--poolings 2 --base 4 --dropout 0.2 --bands 4 --classes 3"
RUN = """
images: image.tif
labels: labels.tif
classes: 3
device: cpu
network: {poolings: 2, base: 4, dropout: 0.2}
optimizer: {lr: 0.01}
output: out
"""


def write_scene(made: Path) -> None:
    """An image and its labels, which can be learned."""
    rng = np.random.default_rng(7)
    labels = np.kron(rng.integers(0, 3, (7, 9)), np.ones((16, 16)))[:HEIGHT, :WIDTH]
    pixels = 1000 * labels + rng.integers(1, 1500, (4, HEIGHT, WIDTH))
    grid = {"driver": "GTiff", "height": HEIGHT, "width": WIDTH, "crs": "EPSG:32630"}
    grid["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    with rasterio.open(made / "image.tif", "w", count=4, dtype="uint16", nodata=0, **grid) as out:
        out.write(pixels.astype(np.uint16))
    with rasterio.open(made / "labels.tif", "w", count=1, dtype="uint8", **grid) as out:
        out.write(labels.astype(np.uint8), 1)


class Job:
    """The job of a folder's job.sh, and its output.

    It takes the options that its comments say can be given to sbatch, and names in the environment.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, output: str, *options: str, **variables: str
    ) -> None:
        self.cluster, self.output = cluster, folder / output
        self.log_file = folder / f"{output}.log"
        given = ("--parsable", "--time=9", "--signal=B:USR1@60", f"--output={self.log_file}")
        names = {"IMAGE": "image.tif", "OUTPUT": output, "PREDICT": MORE, **variables}
        self.number = cluster.answer(
            "sbatch", *given, *options, "job.sh", cwd=folder, variables=names
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def lives(self) -> int:
        shown = self.cluster.answer("scontrol", "show", "job", "-o", self.number)
        return 1 + int(re.findall(r"Restarts=(\d+)", shown)[0])

    @property
    def losses(self) -> list[float]:
        return losses(self.output)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that must come before the job ends."""
        end = time.monotonic() + LIMIT_S
        looked = time.monotonic()
        while not condition():
            now = time.monotonic()
            assert now < end, self.log
            if now > looked + LOOK_S:
                looked = now
                assert self.cluster.job(self.number)[0] not in ENDS, self.log
            time.sleep(0.05)

    def ends(self) -> tuple[str, int]:
        return self.cluster.wait(self.number, LIMIT_S)

    def queues_again(self) -> None:
        """Wait until it is in the queue again; it need not stay there for the usual 2 minutes.

        But 2 s: a node takes a start in the second of its old end for one that came too late.
        """
        state = self.cluster.wait(self.number, LIMIT_S, ("PENDING", *ENDS))
        assert state[0] == "PENDING", (state, self.log)
        self.cluster.answer("scontrol", "update", f"jobid={self.number}", "StartTime=now+3seconds")


def losses(output: Path) -> list[float]:
    """Of the steps so far, each once and in their order."""
    if not (output / "history.csv").exists():
        return []
    with (output / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def assert_same_losses(found: Path, wanted: Path, to: float = 1e-12) -> None:
    """Of all steps."""
    ours, theirs = losses(found), losses(wanted)
    assert len(ours) == len(theirs)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= to
    assert theirs[-1] < theirs[0] - 1e-3, "a run that learns nothing proves nothing"


def assert_same(found: Path, wanted: Path, to: float = 1e-12) -> None:
    """Losses as close as that, the map to the pixel."""
    assert_same_losses(found, wanted, to)
    maps = []
    for output in (found, wanted):
        with rasterio.open(output / "map.tif") as file:
            maps.append(file.read())
    assert np.array_equal(*maps)
    assert len(np.unique(maps[0])) > 1, "a map of one class proves nothing"


def under_mpiexec(folder: Path, ranks: int) -> Path:
    """The output of the folder's run and its map on so many ranks of one machine."""
    predict = f"predict whole image.tif whole/map.tif --plan plan.json {MORE}"
    for command in ("train -c run.yaml --plan plan.json --output whole", predict):
        done = subprocess.run(
            ["mpiexec", "-n", str(ranks), "tilenet", *command.split()],
            cwd=folder,
            env={**ENVIRONMENT, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "whole"
