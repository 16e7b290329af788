"""Do ranks, tiles, partitions or micro-batches change the result? Against the whole image.

Each case trains three float64 steps (with a pipeline ten) of a network without normalisation, with
dropout, on random pixels with holes of nodata, and maps the image; the reference is a plain PyTorch
loop over the whole image in one process (tests/exactness/whole_recipe.py). The last rows are the
negative control: a halo one alignment unit too small.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import Claim, Found, at_least, at_most, on_ranks

NETWORKS: dict[str, dict[str, Any]] = {
    "same/nearest": {"poolings": 4, "base": 4, "dropout": 0.2},
    "same/bilinear": {"poolings": 3, "base": 4, "dropout": 0.2, "upsampling": "bilinear"},
    "same/transposed": {"poolings": 3, "base": 4, "dropout": 0.2, "upsampling": "transposed"},
    "valid": {"poolings": 3, "base": 4, "dropout": 0.2, "padding": "valid"},
}
GRIDS = [(1, 1), (1, 2), (2, 2), (3, 2)]
# Partitions, micro-batches and checkpointing; sub-tiles where a rank has fewer tiles.
PIPELINES = [(2, 2, "always"), (3, 4, "except_last"), (4, 3, "never"), (6, 8, "always")]


def cases(ranks: int, quick: bool) -> list[dict[str, Any]]:
    """What a number of ranks runs."""
    names = ["same/nearest", "same/bilinear", "valid"] if quick else list(NETWORKS)
    grids = [(2, 2)] if quick else GRIDS
    size = [157, 211] if quick else [317, 451]
    made = [
        {"network": name, "grid": grid, "size": size, "less_px": 0, "pipeline": (1, 1, "never")}
        for name in names
        for grid in grids
    ]
    pipelines = PIPELINES[1:2] if quick else PIPELINES
    piped = [
        {**one, "grid": (2, 3), "pipeline": pipeline}
        for one in made[:: len(grids)]
        for pipeline in pipelines
    ]
    made += piped
    control = {**made[0], "grid": (4, 4), "size": [317, 451], "less_px": 16}
    return [*made, control] if ranks == 2 or not quick else made


def work(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the cases on this job's ranks; how far each is off."""
    from mpi4py import MPI
    from test_same_as_whole_image import LR, SEED, STEPS, differences, options_of, outcome_of
    from test_same_as_whole_image import run_file as make_run
    from whole_image import random_scene
    from whole_recipe import train_whole

    from tilenet.geometry.halo import context_of
    from tilenet.geometry.unet import unet_layers
    from tilenet.training.config.keys import NetworkKeys, TileKeys

    comm, rows = MPI.COMM_WORLD, []
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    for case in wanted:
        keys = NetworkKeys(**NETWORKS[case["network"]])
        options = options_of(keys)
        scene = random_scene(folder, tuple(case["size"]), 1, write=comm.rank == 0)
        comm.Barrier()
        partitions, micro_batches, checkpointing = case["pipeline"]
        steps = STEPS if partitions == 1 else 10
        run = make_run(
            folder,
            [scene],
            keys,
            tiles=TileKeys(*case["grid"]),
            partitions=partitions,
            micro_batches=micro_batches,
            checkpointing=checkpointing,
        )
        run = replace(run, steps=steps)
        if case["less_px"]:
            exact = context_of(unet_layers(options)).halo_px
            run = replace(run, halo=exact - case["less_px"])
        reference = train_whole([scene], options, steps, LR, SEED)
        found = outcome_of(run, comm, scene.image, max(s // 3 for s in case["size"]))
        loss, weights, logits = differences(found, reference, scene.valid)
        off = {"loss": loss, "weights": weights, "logits": logits}
        rows.append({**case, "ranks": comm.size, **off})
    return rows


def bench(quick: bool) -> Found:
    """Run all cases on all numbers of ranks."""
    rows: list[dict[str, Any]] = []
    for ranks in [1, 2, 4] if quick else [1, 2, 3, 4, 6]:
        rows += on_ranks(ranks, work, cases(ranks, quick))
    exact = [row for row in rows if not row["less_px"]]
    control = [row for row in rows if row["less_px"]]
    plain = [row for row in exact if row["pipeline"][0] == 1]
    piped = [row for row in exact if row["pipeline"][0] > 1]
    claims: list[Claim] = [
        at_most("losses differ by at most", max(r["loss"] for r in exact), 1e-12),
        at_most("over 10 steps with a pipeline by", max(r["loss"] for r in piped), 1e-12),
        at_most("final weights differ relatively by", max(r["weights"] for r in exact), 1e-10),
        # Ten steps amplify roundings of 1e-16 about a thousandfold: the weights' bound holds there.
        at_most("logits after 3 steps differ by", max(r["logits"] for r in plain), 1e-12),
        at_most("logits after 10 steps differ by", max(r["logits"] for r in piped), 1e-10),
        at_least(
            "a halo one unit too small shows in the weights by",
            min(r["weights"] for r in control),
            1e-10,
        ),
    ]
    return {"rows": rows}, claims
