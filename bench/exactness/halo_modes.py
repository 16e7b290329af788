"""Do halo modes, norms and grids change the result? The paper's networks over ranks.

Each case computes loss and gradients of one of the presets' structures (few channels, dropout) on
random pixels in float64: over 2, 4, 5 or 6 ranks with shares of uneven sizes, in each halo mode,
with each norm, in 1 to 3 partitions. It is held against one rank, and against torch's on the
whole image. Where the two differ it is torch that is off: its instance norm, 55 of which follow one
another in medium-1, loses digits that a careful two-pass formula in plain torch keeps.
"""

from itertools import product
from typing import Any

from bench.report import Claim, Found, at_most, on_ranks

GRIDS = {2: (1, 2), 4: (2, 2), 5: (1, 5), 6: (3, 2)}
SHAPES = {"small": (5, 2), "medium-1": (5, 5), "medium-2": (6, 2), "large": (7, 2)}
NORMS = ("none", "instance", "group", "batch")
MODES = ("overlap", "exchange")


def work(names: list[str]) -> list[dict[str, Any]]:
    """Run all cases of these networks on this job's ranks."""
    from mpi4py import MPI
    from shared_out import Case, Result, shared_out, weights_like, whole, worst

    from tilenet.geometry.halo import context_of
    from tilenet.geometry.unet import UNetOptions, unet_layers

    comm = MPI.COMM_WORLD
    grid = GRIDS[comm.size]

    def loss_of(result: Result) -> float:
        return float((weights_like(result.outputs[0]) * result.outputs[0].square()).mean())

    def apart(found: Result, wanted: Result) -> dict[str, float]:
        return {
            "loss": abs(loss_of(found) - loss_of(wanted)) / abs(loss_of(wanted)),
            "image": worst(found.images[0], wanted.images[0]),
            "parameters": max(
                worst(found.parameters[name], one) for name, one in wanted.parameters.items()
            ),
        }

    rows: list[dict[str, Any]] = []
    norm: Any
    mode: Any
    for name, norm in product(names, NORMS):
        poolings, convolutions = SHAPES[name]
        channels: Any = {"base": 4, "bands": 4, "classes": 3, "groups": 2}
        options = UNetOptions(poolings, convolutions, norm=norm, dropout=0.1, **channels)
        layers = unet_layers(options)
        context = context_of(layers)
        unit = context.alignment_px
        size = (grid[0] + 1) * unit, (grid[1] + 2) * unit
        alone = Case(layers, size, (1, 1), unit)
        plain, one_rank = whole(alone), shared_out(alone, MPI.COMM_SELF)
        for mode in MODES:
            # All three with each norm and mode, on one network or another
            partitions = 1 + (len(rows) + len(rows) // 8) % 3
            halo = context.halo_px if mode == "overlap" else 0
            case = Case(layers, size, grid, unit, halo, mode, partitions=partitions)
            result = shared_out(case, comm)
            found = {**apart(result, one_rank), "torch": apart(result, plain)}
            rows.append(
                {"network": name, "norm": norm, "mode": mode, "ranks": comm.size,
                 "partitions": partitions, **found}
            )  # fmt: skip
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """The largest differences."""
    made = []
    for network in dict.fromkeys(row["network"] for row in rows):
        some = [row for row in rows if row["network"] == network]
        for what, goal in (("loss", 1e-12), ("image", 1e-10), ("parameters", 1e-10)):
            most = max(row[what] for row in some)
            torchs = max(row["torch"][what] for row in some)
            said = f"{network}, {len(some)} cases: {what} against one rank (torch's: {torchs:.1e})"
            made.append(at_most(said, most, goal))
    return made


def bench(quick: bool) -> Found:
    """Run all."""
    names = ["small"] if quick else list(SHAPES)
    rows: list[dict[str, Any]] = []
    for ranks in (2,) if quick else GRIDS:
        rows += on_ranks(ranks, work, names)
    return {"cases": rows}, claims(rows)
