"""How fast does a survey look at all pixels, and does its memory depend on how many there are?

Images of 4 bands of 2500² and 5000² px (quick: 1500² and 3000²) in tiles of 512², uint8, uint16 and
float32, with labels of 5 classes, surveyed by one rank in a process of its own each. Seconds are
those of the processor; memory is the process's largest, less what it had before the survey. GDAL
may keep 8 MiB of blocks.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Claim, Found, alone, at_most
from bench.scenes import write_pair

BANDS, CLASSES, ALIGNMENT_PX = 4, 5, 32


def bench(quick: bool) -> Found:
    """Survey each kind and size in a process of its own."""
    os.environ["GDAL_CACHEMAX"] = "8"
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    for dtype in ("uint8", "uint16", "float32"):
        for side in (1500, 3000) if quick else (2500, 5000):
            with tempfile.TemporaryDirectory() as name:
                size, values = (BANDS, side, side), (0, 256)
                files = write_pair(Path(name), size, CLASSES, dtype=dtype, values=values)
                figures[f"{dtype} {side}"] = found = alone(look, *files)
            more = found["more_bytes"] / 2**20
            claims.append(at_most(f"{dtype}: MiB for a survey of {side}²", more, 128))
    return figures, claims


def look(image: str, labels: str) -> dict[str, float]:
    """Survey an image."""
    from mpi4py import MPI

    from tilenet.data.labels.open import open_labels
    from tilenet.data.rasters.raster import Raster
    from tilenet.data.survey import survey
    from tilenet.parallel.health.peak_memory import measure_peak_bytes
    from tilenet.parallel.ranks.together import RankControl

    with Raster(image) as raster, open_labels(labels, raster, 255) as source:
        before, began = measure_peak_bytes([]), time.process_time()
        survey([raster], [source], CLASSES, ALIGNMENT_PX, RankControl(MPI.COMM_SELF))
        seconds = time.process_time() - began
        mpx = raster.height * raster.width / 1e6
    return {
        "seconds": seconds,
        "mpx_per_s": mpx / seconds,
        "more_bytes": measure_peak_bytes([]) - before,
    }
