"""How well are the seconds of a training step predicted? Tested on runs it has not seen.

The closed form behind `tilenet plan` is calibrated on this machine: seconds of the layers of two
networks (base 16 and 32) on a tile of 384², by one rank alone and by as many as there are cores;
what a message and a byte between two ranks cost; what a byte of a file costs; and whole steps on
small tiles over the sum of their layers, the median of three. It is then asked for whole steps of
`tilenet train` that it has not seen: other tiles, 1 to 4 ranks, both halo modes, other widths
(layer by layer, with what the two networks took over the roofline, which has convolutions of at
least 16 channels, as processors compute them), several tiles a rank, batch norm. Ranks that share a
core take turns.

Seconds are the clock's, medians over steps; with --cpu those that the processor of the busiest rank
spent, for a machine that others use too, where waiting for messages counts in part. Quick: fewer
and smaller runs.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.report import Found, at_most, on_ranks
from bench.speed import model_run
from bench.speed.model_prediction import SEEN_BASES, SEEN_PX, predicted

if TYPE_CHECKING:
    from tilenet.geometry.unet import NormKind

BASE = 16
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
GOAL = 0.2


@dataclass(frozen=True)
class Point:
    """A run to predict.

    Attributes:
        tile_px: Side of what a rank owns of a tile.
        ranks: Of the job; all hold one image.
        halo_mode: As in run files.
        base: Channels of the network's first level.
        norm: Its norm.
        tiles: Tiles along rows of each rank, one after another.
    """

    tile_px: int
    ranks: int
    halo_mode: str = "overlap"
    base: int = BASE
    norm: "NormKind" = "none"
    tiles: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of the image along rows and columns."""
        rows, columns = GRIDS[self.ranks]
        return rows * self.tiles, columns

    @property
    def image(self) -> tuple[int, int]:
        """Rows and columns, pixels."""
        return self.grid[0] * self.tile_px, self.grid[1] * self.tile_px


SEEN = Point(320, 1), Point(SEEN_PX, 1), Point(SEEN_PX, 1, base=SEEN_BASES[1])
POINTS = (
    Point(256, 1), Point(512, 1), Point(768, 1), Point(512, 1, base=8), Point(512, 1, base=24),
    Point(512, 1, base=32), Point(512, 1, tiles=3), Point(512, 1, norm="batch"),
    *(Point(size, ranks, mode) for mode in ("overlap", "exchange") for ranks in (2, 4)
      for size in (256, 512)),
    *(Point(512, 2, mode, base=24) for mode in ("overlap", "exchange")),
    *(Point(512, 2, mode, norm="batch") for mode in ("overlap", "exchange")),
)  # fmt: skip
QUICK = (Point(256, 1), Point(256, 2), Point(256, 2, "exchange"), Point(256, 1, base=24))


def bench(quick: bool, cpu: bool = False) -> Found:
    """Calibrate, measure and compare."""
    clock, cores = "cpu" if cpu else "wall", len(os.sched_getaffinity(0))

    def measured(point: Point) -> float:
        says = {**vars(point), "image": point.image, "grid": point.grid}
        with tempfile.TemporaryDirectory() as folder:
            rows = on_ranks(point.ranks, model_run.train, folder, says, 5 if quick else 12)
        return float(statistics.median(row[clock] for row in rows))

    facts: dict[str, Any] = {
        "clock": clock,
        "cores": cores,
        "layers": {
            base: {
                ranks: on_ranks(ranks, model_run.layers, SEEN_PX, base, clock)
                for ranks in {1, min(cores, 2)}
            }
            for base in SEEN_BASES
        },
        "links": on_ranks(2, model_run.links),
        "step_by_layers": 1.0,
    }
    # Layers one by one are not a step: caches, and the loss, labels, zeros and the optimizer
    facts["step_by_layers"] = statistics.median(
        [measured(point) / predicted(point, facts)["step_s"] for point in SEEN]
    )
    rows = []
    for point in QUICK if quick else POINTS:
        says, took = predicted(point, facts), measured(point)
        rows.append({**vars(point), "measured_s": took, **says, "error": says["step_s"] / took - 1})
    errors = [abs(row["error"]) for row in rows]
    figures = {
        "clock": clock,
        "calibrated on": {"tile_px": SEEN_PX, "bases": list(SEEN_BASES),
                          "step_by_layers": facts["step_by_layers"], **facts["links"]},
        "points": rows,
    }  # fmt: skip
    return figures, [
        at_most("largest error of a step's predicted seconds", max(errors), GOAL),
        at_most("median error", statistics.median(errors), GOAL / 2),
    ]
