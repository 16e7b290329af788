"""What does a run cost before its first step, on many ranks and with many images?

`tilenet train` of a small U-Net, two steps, on 2 to 32 ranks (quick: 1 and 2), an image of 256²
with a crop per rank; then lists of images of 64² on 1 and 4 ranks. CPU seconds are those of all
ranks' processes, mpiexec's among them, over the ranks; memory is that of the largest of them. The
images of the list are one file under many names: what is counted is opening them, not their pixels.
Above as many ranks as the machine has cores only CPU seconds say something, for ranks that wait
sleep.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Claim, Found, alone, at_most
from bench.scenes import write_pair

RANKS, IMAGES, IMAGE_RANKS = (2, 8, 16, 32), (1, 1_000, 10_000), (1, 4)
NETWORK = ("--network.poolings", "1", "--network.base", "4", "--classes", "3", "--steps", "2")


def start(folder: Path, ranks: int, *options: object) -> dict[str, float]:
    """CPU seconds per rank, seconds, and the largest resident set of `tilenet train`."""
    command = ["mpiexec", "-n", ranks, sys.executable, "-m", "tilenet", "train", *NETWORK]
    command += ["--output", folder / f"run-on-{ranks}", "--overwrite", *options]
    return {"ranks": ranks, **alone(run, [str(word) for word in command], ranks)}


def run(command: list[str], ranks: int) -> dict[str, float]:
    """In a process of its own: the largest resident set of all children is never forgotten."""
    begun = time.perf_counter()
    # Ranks that wait let others compute.
    quiet = os.environ | {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    subprocess.run(command, check=True, env=quiet, stdout=subprocess.DEVNULL)
    seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "CPU seconds per rank": (used.ru_utime + used.ru_stime) / ranks,
        "seconds": seconds,
        "largest MiB": used.ru_maxrss / 1024,
    }


def list_of(folder: Path, count: int) -> Path:
    """A list of so many names of one image and its labels."""
    image, labels = folder / "one.tif", folder / "one_labels.tif"
    rows = ["image,label"]
    for number in range(count):
        names = folder / f"{number}.tif", folder / f"{number}-labels.tif"
        for name, file in zip(names, (image, labels), strict=True):
            if not name.exists():
                os.link(file, name)
        rows.append(f"{names[0]},{names[1]}")
    path = folder / f"{count}.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def bench(quick: bool) -> Found:
    """All starts, and what they grow by."""
    ranks_of, images_of = ((1, 2), (1, 100)) if quick else (RANKS, IMAGES)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        image, labels = write_pair(folder, (4, 256, 256), 3)
        crops = "--images", image, "--labels", labels, "--crop_px", "32"
        starts = [start(folder, ranks, *crops, "--batch_size", ranks) for ranks in ranks_of]
        write_pair(folder, (4, 64, 64), 3, "one")
        lists: list[dict[str, Any]] = []
        for count in images_of:
            for ranks in IMAGE_RANKS[: 1 if quick else None]:
                keys = "--images", list_of(folder, count), "--crop_px", "32", "--batch_size", ranks
                lists.append({"images": count, **start(folder, ranks, *keys)})
    return {"ranks": starts, "images": lists}, _claims(starts, lists)


def _claims(starts: list[dict[str, float]], lists: list[dict[str, Any]]) -> list[Claim]:
    few, many = starts[0], starts[-1]
    name = "CPU seconds per rank"
    claims = [
        at_most(
            f"{name} on {many['ranks']} ranks over those on {few['ranks']}",
            many[name] / few[name], 1.5,
        )
    ]  # fmt: skip
    for ranks in sorted({row["ranks"] for row in lists}):
        none, *_, all_of_them = (row for row in lists if row["ranks"] == ranks)
        more = (all_of_them[name] - none[name]) / (all_of_them["images"] - none["images"])
        claims.append(
            at_most(
                f"milliseconds of CPU per image and rank, {ranks} ranks", 1000 * more,
                2 if ranks > 1 else 4,
            )
        )  # fmt: skip
    return claims
