"""Random runs in random ways over up to four ranks give what they give in the plainest way.

mpiexec -n 4 python -m mpi4py tests/exactness/random_runs.py --from 0 --count 50, with
tests/exactness and tests/adoption on PYTHONPATH.

The plainest way is one rank and one tile, with all images of a step at once. Another way has
ranks, a mesh, tiles, halo mode, partitions, micro-batches, checkpointing, swapping, reading ahead,
shared states and pieces of gradients of its own; or two of these, where it stops and goes on. Ways
that tilenet refuses are drawn again. Losses, weights, scores of validation and a map must agree.
"""

import argparse
import csv
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose, isfinite
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import rasterio
import torch
from grammar import BANDS, generate
from mpi4py import MPI
from random_images import Images, draw_images, write_images
from safetensors.torch import load_file
from torch import nn

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import AgreedError, TilenetError
from tilenet.library import whole_run
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.training.config.keys import (
    AugmentKeys,
    GradientKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ScheduleKeys,
    SwappingKeys,
    TileKeys,
)
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys

__all__ = ["compare_ways"]

WAYS, MOST_DRAWN = 2, 16  # of a run
LOSS, WEIGHT, MAP, SCORE = 1e-11, 1e-8, 1e-8, 1e-8  # relative differences, at most
LEAST_WEIGHT = 0.1  # AdamW moves weights of no gradient by rounding over its ε

Keys = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A run, and the module that it trains.

    Attributes:
        run: In no way yet.
        images: What it reads.
        module: Seed of a generated module; None: a U-Net.
    """

    run: RunFile
    images: Images
    module: int | None

    def made(self) -> nn.Module | None:
        """The module, made again."""
        return None if self.module is None else generate(self.module)


def draw_run(random: Random, folder: Path) -> Drawn:
    """Draw a run; a TilenetError says that its keys do not go together."""
    numbers, crops = random.random() < 0.15, random.random() < 0.45
    module = random.randrange(1 << 20) if not numbers and random.random() < 0.3 else None
    outputs = 0 if module is None else generate(module).parts[-1].out_channels
    classes = 0 if numbers else outputs or 3
    images = draw_images(random, classes, bands=BANDS if outputs else None, crops=crops)
    network = _network(random, crops=crops)
    if outputs:
        network = NetworkKeys(module="grammar:made", batch_norm=random.choice(["frozen", "step"]))
    names, labels = images.paths(folder)
    number = len(names)
    run = RunFile(
        images=names,
        labels=labels,
        classes=["height"] if numbers else classes,
        task="regression" if numbers else "classification",
        output=str(folder / "plainest"),
        network=network,
        steps=random.choice([2, 3, 4]),
        batch_size=random.choice([1, 2, 3, 5] if crops else [1, number, number]),
        optimizer=_optimizer(random, numbers=numbers, norm=network.norm),
        seed=random.randrange(5),
        precision="float64",
        device="cpu",
        hang_seconds=120,
        prove=random.random() < 0.3,
        **_recipe(random, images, numbers=numbers, crops=crops),
    )
    return Drawn(run, images, module)


def _network(random: Random, *, crops: bool) -> NetworkKeys:
    norm = random.choice(["none", "none", "batch", "group", "instance"])
    unpadded = norm == "none" and not crops and random.random() < 0.2
    return NetworkKeys(
        poolings=random.choice([1, 1, 2, 2, 3]),
        convolutions=random.choice([1, 2]),
        base=random.choice([2, 4, 6]),
        kernel=random.choice([3, 3, 3, 1, 5]),
        padding="valid" if unpadded else "same",
        upsampling=random.choice(["nearest", "bilinear", "transposed"]),
        norm=norm,
        groups=2 if norm == "group" else None,
        dropout=random.choice([0, 0, 0.2, 0.4]),
        bias=random.choice([None, None, True, False]),
    )


def _optimizer(random: Random, *, numbers: bool, norm: str | None) -> OptimizerKeys:
    momentum = random.choice([0, 0.9])
    keys = OptimizerKeys(
        "sgd", 0.002 if numbers else 0.04, momentum, random.choice([0, 0.01]), nesterov=momentum > 0
    )
    # AdamW divides gradients by their size, which is rounding behind a norm.
    if norm == "none" and random.random() < 0.4:
        keys = OptimizerKeys("adamw", 1e-3, weight_decay=random.choice([0, 0.1]))
    return replace(keys, clip_norm=random.choice([None, 0.3]), ema=random.choice([None, 0.9]))


def _recipe(random: Random, images: Images, *, numbers: bool, crops: bool) -> Keys:
    keys: Keys = {
        "loss": random.choice(["l2", "huber"] if numbers else ["ce", "focal", "dice", "ce+dice"]),
        "schedule": random.choice(
            [
                ScheduleKeys(),
                ScheduleKeys(),
                ScheduleKeys("poly", warmup_steps=1, min_lr=1e-4),
                ScheduleKeys("step", milestones=[1]),
            ]
        ),
        "augment": AugmentKeys(
            flips=random.random() < 0.3,
            rotations=random.random() < 0.3,
            brightness=random.choice([0, 0.2]),
            contrast=random.choice([0, 0.2]),
            noise=random.choice([0, 0, 0.3]),
        ),
        "nodata": random.choice([*[None] * 6, "none", "collar", 7.0]),
        "resolution": random.choice([*[None] * 9, 4.0]),
    }
    if random.random() < 0.3:
        block, every = random.choice([24, 32, 40]), random.choice([None, 1, 2])
        keys["validation"] = ValidationKeys(share=0.2, block_px=block, every=every)
    if images.labels == "polygons":
        keys["vectors"] = VectorKeys(
            field="class",
            all_touched=random.random() < 0.3,
            background=random.choice([0, "ignore"]),
            priority=random.choice([None, [1, 0]]),
        )
    if not numbers:
        weights = [1.0, 2.0, 0.5][: images.classes]
        keys["class_weights"] = random.choice([None, None, "auto", weights])
    if crops:
        keys["crop_px"] = random.choice([16, 24, 32, 40])
        keys["oversample"] = 0 if numbers else random.choice([0, 0, 0.5])
    elif len(images.sizes) == 1 and random.random() < 0.2:
        height, width = images.sizes[0]
        keys["window"] = [3, 5, height - 8, width - 9]
    return keys


def plainest(drawn: Drawn) -> RunFile:
    """The run on one rank, as one tile."""
    in_one_batch = drawn.module is not None or drawn.run.network.norm == "batch"
    at_once = 1 if in_one_batch else drawn.run.batch_size
    return replace(drawn.run, micro_batches=at_once, tiles=TileKeys(rows=1, columns=1))


def draw_way(random: Random, run: RunFile) -> tuple[int, Keys]:
    """Ranks, and keys that must not change the result."""
    ranks = random.choice([1, 2, 2, 3, 4, 4])
    sides = range(1, ranks + 1)
    meshes = [(a, b, ranks // a // b) for a in sides for b in sides if ranks % (a * b) == 0]
    mode = random.choice(["overlap", "overlap", "exchange", "exchange", "sweep"])
    tiles = random.choice(
        [
            TileKeys(),
            TileKeys(rows=random.choice([1, 2, 3]), columns=random.choice([1, 2, 3, 4])),
            TileKeys(size_px=random.choice([32, 48, 64])),
        ]
    )
    parts = random.choice([None, None, 2, 3])
    keys: Keys = {
        "halo_mode": mode,
        "mesh": MeshKeys(*random.choice([*meshes, (None, None, None)])),
        "tiles": TileKeys() if mode == "exchange" else tiles,
        "partitions": parts,
        "micro_batches": random.choice([1, 1, 1, 2, 3, 4, 6]) if mode != "sweep" else 1,
        "pipeline": random.choice(["gpipe", "gpipe", "1f1b"]) if parts else "gpipe",
        "checkpointing": random.choice(["never", "never", "always", "except_last"]),
        "read_ahead": random.choice([0, 1, 2, 5]),
        "checkpoint_every": random.choice([1, 2, 100]),
        "gradients": GradientKeys(piece_mb=random.choice([4.0, 0.002])),
        "optimizer": replace(run.optimizer, shard=random.choice(["auto", "always", "never"])),
        "validation": replace(run.validation, batch_size=random.choice([1, 2, 4])),
    }
    if mode == "sweep":
        keys["checkpointing"] = "never"
    if random.random() < 0.3:
        keys["swap"] = "all"
        keys["swapping"] = SwappingKeys(min_mib=random.choice([0.001, 0.01, 0.05]))
    return ranks, keys


def draw_map(random: Random, run: RunFile) -> tuple[Keys, Keys]:
    """What a map holds, and how it is made."""
    numbers = run.task == "regression"
    holds: Keys = {"output": "values" if numbers else random.choice(["logits", "probabilities"])}
    if random.random() < 0.2:
        tta = random.choice(["flips", "all"])
        holds = {"output": "values" if numbers else "probabilities", "tta": tta}
    way: Keys = {"tile_px": random.choice([None, 32, 48, 64, 96])}
    return holds, way | {"partitions": random.choice([1, 1, 2, 3])}


def compare_ways(comm: MPI.Intracomm, seed: int, folder: Path) -> Iterator[tuple[str, str]]:
    """What became of a seed's run: words, and the halo mode of a way that agrees. Collective.

    Args:
        comm: All ranks.
        seed: Of the run and of its ways.
        folder: That of the run, on all ranks; it is made, and removed where nothing differs.
    """
    random = Random(seed)
    try:
        drawn = draw_run(random, folder)
    except TilenetError:
        yield "no run", ""
        return
    if comm.rank == 0:
        write_images(drawn.images, folder)
    comm.Barrier()
    if _trained(comm, 1, plainest(drawn), drawn):
        yield "refused", ""
    else:
        number = 0
        for _ in range(MOST_DRAWN):
            said, mode = _one_way(comm, random, drawn, folder / f"way {number}")
            yield said, mode
            number += said == "agrees"
            if number == WAYS or said.startswith("differs"):
                break
    if comm.rank == 0:
        shutil.rmtree(folder)


def _one_way(comm: MPI.Intracomm, random: Random, drawn: Drawn, output: Path) -> tuple[str, str]:
    run, ways = drawn.run, [draw_way(random, drawn.run) for _ in range(2)]
    stops = run.steps == 4 and run.schedule == ScheduleKeys() and random.random() < 0.5
    holds, way = draw_map(random, run)
    try:
        runs = [replace(run, output=str(output), **keys) for _, keys in ways]
    except TilenetError:
        return "refused", ""
    refused = _trained(comm, ways[0][0], replace(runs[0], steps=2) if stops else runs[0], drawn)
    if stops and not refused:
        refused = _trained(comm, ways[1][0], runs[1], drawn, resume=True)
    if refused:
        return "refused", ""
    _mapped(comm, 1, plainest(drawn), holds)
    if _mapped(comm, ways[stops][0], runs[stops], holds | way):
        _mapped(comm, 1, runs[stops], holds)
    apart: dict[str, float] = {}
    if comm.rank == 0:
        apart = differences(Path(run.output), output, last=stops)
    apart = comm.bcast(apart)
    if not apart:
        return "agrees", ways[0][1]["halo_mode"]
    return f"differs: {apart}, ways {ways[: 1 + stops]}, map {holds | way}, of {drawn}", ""


def _trained(
    comm: MPI.Intracomm, ranks: int, run: RunFile, drawn: Drawn, *, resume: bool = False
) -> bool:
    """Whether the first ranks refuse to train; they are the only ones that try. Collective."""
    some = comm.Split(int(comm.rank >= ranks), comm.rank)
    refused = False
    if comm.rank < ranks:
        try:
            module = drawn.made()
            whole_run.train(run, resume=resume, overwrite=not resume, comm=some, module=module)
        except AgreedError:
            refused = True
    some.Free()
    return bool(comm.bcast(refused))


def _mapped(comm: MPI.Intracomm, ranks: int, run: RunFile, keys: Keys) -> bool:
    """Whether the first ranks refuse to make a map. Collective."""
    some = comm.Split(int(comm.rank >= ranks), comm.rank)
    refused = False
    if comm.rank < ranks:
        out = str(Path(run.output) / "map.tif")
        try:
            predict(Prediction(run.output, run.images[0], out, overwrite=True, **keys), some)
        except AgreedError:
            refused = True
    some.Free()
    return bool(comm.bcast(refused))


def differences(wanted: Path, found: Path, *, last: bool) -> dict[str, float]:
    """What differs between the folders of two runs by more than rounding, and by how much."""
    apart = {
        f"{name} of {file}": worst
        for file, least in (("history.csv", LOSS), ("validation.csv", SCORE))
        for name, worst in _columns(wanted / file, found / file, last=last).items()
        if not worst <= least
    }
    old, new = (load_file(folder / "last" / "weights.safetensors") for folder in (wanted, found))
    for name, tensor in old.items():
        worst = float((new[name] - tensor).abs().max() / tensor.abs().max().clamp(min=LEAST_WEIGHT))
        if not worst <= WEIGHT:
            apart[name] = worst
    maps = []
    for folder in (wanted, found):
        with rasterio.open(folder / "map.tif") as file:
            maps.append(file.read().astype(np.float64))
    no_data = np.isnan(maps[0])
    if not np.array_equal(no_data, np.isnan(maps[1])):
        apart["pixels without data"] = float((no_data != np.isnan(maps[1])).sum())
    elif not no_data.all():
        worst = float(np.nanmax(np.abs(maps[1] - maps[0])) / max(1.0, np.nanmax(np.abs(maps[0]))))
        apart |= {} if worst <= MAP else {"map": worst}
    return apart


def _columns(wanted: Path, found: Path, *, last: bool) -> dict[str, float]:
    """Largest differences of losses and scores; of the last row alone where a run has stopped."""
    if not wanted.exists():
        return {}
    tables = [list(csv.DictReader(path.open())) for path in (wanted, found)]
    if last:
        tables = [rows[-1:] for rows in tables]
    if len(tables[0]) != len(tables[1]):
        return {"number of rows": abs(len(tables[0]) - len(tables[1]))}
    names = ["loss"] if wanted.name == "history.csv" else [*tables[0][0]]
    return {
        name: max(_apart(new[name], old[name]) for old, new in zip(*tables, strict=True))
        for name in names
        if "second" not in name
    }


def _apart(new: str, old: str) -> float:
    if new == old or isclose(float(new), float(old), rel_tol=1e-15):
        return 0.0
    values = float(new), float(old)
    return (
        abs(values[0] - values[1]) / max(1.0, abs(values[1])) if all(map(isfinite, values)) else 9.0
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    whole_run.try_report = lambda folder, maps: None  # takes longer than a small run
    place = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else "")
    with (Path(place) / f"rank {comm.rank}").open("w") as said_by_runs:
        os.dup2(said_by_runs.fileno(), 2)
    if comm.rank == 0:
        print(f"what the runs say is in {place}", flush=True)
    kinds: Counter[str] = Counter()
    for seed in range(asked.start, asked.start + asked.count):
        for said, mode in compare_ways(comm, seed, Path(place) / str(seed)):
            kinds[f"{said.partition(':')[0]} {mode}".strip()] += 1
            if comm.rank == 0 and said.startswith("differs"):
                print(f"seed {seed} {said}", flush=True)
        if comm.rank == 0 and seed % 10 == 9:
            print(f"to seed {seed}: {dict(kinds)}", flush=True)
    if comm.rank == 0:
        print(f"{asked.count} runs: {dict(kinds)}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    raise SystemExit(int(kinds["differs"] > 0))


if __name__ == "__main__":
    main()
