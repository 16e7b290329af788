"""How well are the seconds of a training step predicted? Tested on runs it has not seen.

    python -m bench.speed.model [--cpu] [--quick]

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

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.report import Claim, at_most, mpiexec, report
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


def main() -> None:
    """Calibrate, measure, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="count processor seconds")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    steps = 5 if given.quick else 12
    clock = "cpu" if given.cpu else "wall"

    def ask(ranks: int, *arguments: object) -> Any:
        printed = mpiexec(
            ranks, "-m", "mpi4py", "-m", "bench.speed.model_run", *map(str, arguments)
        )
        return json.loads(printed.splitlines()[-1])

    def measured(point: Point) -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = json.dumps({**vars(point), "image": point.image, "grid": point.grid})
            rows = ask(point.ranks, "train", folder, words, steps)
        return float(statistics.median(row[clock] for row in rows))

    cores = len(os.sched_getaffinity(0))
    layers = {
        base: {ranks: ask(ranks, "layers", SEEN_PX, base, clock) for ranks in {1, min(cores, 2)}}
        for base in SEEN_BASES
    }
    facts: dict[str, Any] = {
        "clock": clock,
        "cores": cores,
        "layers": layers,
        "links": ask(2, "links"),
    }
    # Layers one by one are not a step: caches, and the loss, labels, zeros and the optimizer
    facts["step_by_layers"] = 1.0
    facts["step_by_layers"] = statistics.median(
        [measured(point) / predicted(point, facts)["step_s"] for point in SEEN]
    )
    rows = []
    for point in QUICK if given.quick else POINTS:
        says, took = predicted(point, facts), measured(point)
        error = says["step_s"] / took - 1
        rows.append({**vars(point), "measured_s": took, **says, "error": error})
        print(
            f"{point}: measured {took:.3f} s, predicted {says['step_s']:.3f} s, {error:+.0%}",
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows]
    figures = {
        "clock": clock,
        "calibrated on": {"tile_px": SEEN_PX, "bases": list(SEEN_BASES),
                          "step_by_layers": facts["step_by_layers"], **facts["links"]},
        "points": rows,
    }  # fmt: skip
    claims: list[Claim] = [
        at_most("largest error of a step's predicted seconds", max(errors), GOAL),
        at_most("median error", statistics.median(errors), GOAL / 2),
    ]
    report("model", figures, claims)


if __name__ == "__main__":
    main()
