"""Does a run hold more and more, the longer it trains?

    python bench/leaks.py [--quick]

2 000 steps (quick: 200) of a small U-Net with instance norm over whole images on two ranks, in both
halo modes, with a validation and a checkpoint every twentieth of them and a report at the end. Both
ranks count their resident memory, open files, threads, Python's tensors and other objects,
communicators and requests. What the last three quarters add per step is the median of the slopes
between any two counts (Theil-Sen): a leak of every few steps is in it, a heap that grows by a piece
once is not, and stands in the second claim.
"""

import argparse
import json
import tempfile
from datetime import date
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import rasterio
from report import Claim, at_most, mpiexec, report

RANKS = 2
BYTES_PER_STEP = 256  # flat: 25 MB in 100 000 steps
ADDED_MIB = 4  # in all, after the first quarter
MODES = "overlap", "exchange"
COUNTS = "files", "threads", "tensors", "objects", "communicators", "request_slot"


def write_scene(folder: Path) -> None:
    """An image and labels, both random."""
    rng = np.random.default_rng(7)
    grid = {"driver": "GTiff", "height": 128, "width": 160, "crs": "EPSG:32630"}
    grid |= {"transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
    with rasterio.open(folder / "image.tif", "w", count=3, dtype="uint16", **grid) as file:
        file.write(rng.integers(1, 4000, (3, 128, 160)).astype(np.uint16))
    with rasterio.open(folder / "labels.tif", "w", count=1, dtype="uint8", **grid) as file:
        file.write(rng.integers(0, 3, (1, 128, 160)).astype(np.uint8))


def growth(counts: dict[str, list[int]], name: str) -> float:
    """Per step."""
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(late(counts, name), 2)]
    return round(median(slopes), 6)


def late(counts: dict[str, list[int]], name: str) -> list[tuple[int, int]]:
    """Steps and counts from the first quarter of the steps on; those after the run aside."""
    pairs = list(zip(counts["step"], counts[name], strict=True))[:-1]
    return [(step, count) for step, count in pairs if step >= counts["step"][-1] / 4]


def judged(figures: dict[str, Any], *, quick: bool) -> list[Claim]:
    """Claims on the counts of all modes, whose growth is put beside them."""
    claims = []
    for mode in MODES:
        ranks = figures[mode]["ranks"]
        grown = {of: [growth(counts, of) for counts in ranks] for of in ("rss_bytes", *COUNTS)}
        figures[mode]["per_step"] = grown
        held = [[count for _, count in late(counts, "rss_bytes")] for counts in ranks]
        added = max(rank[-1] - rank[0] for rank in held) / 2**20
        # In few steps heaps have not found their size.
        goal = BYTES_PER_STEP * (40 if quick else 1)
        claims += [
            at_most(f"{mode}: bytes per step", max(grown["rss_bytes"]), goal),
            at_most(f"{mode}: MiB added in all", added, ADDED_MIB),
            *(at_most(f"{mode}: {of} per step", max(grown[of]), 0.01) for of in COUNTS),
        ]
    return claims


def main() -> None:
    """Train in both modes, and fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    steps = 200 if quick else 2000
    figures: dict[str, Any] = {"date": date.today().isoformat(), "ranks": RANKS, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        write_scene(Path(name))
        for mode in MODES:
            said = mpiexec(RANKS, "bench/leaks_run.py", name, mode, str(steps))
            figures[mode] = {"ranks": json.loads(said.splitlines()[-1])}
    report("leaks", figures, judged(figures, quick=quick))


if __name__ == "__main__":
    main()
