"""Crops that are computed in one batch give what they give one after another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from test_same_as_whole_image import check_same, outcome_of, run_file, scenes_of

from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup import stacking
from tilenet.training.setup.decide import plan_run
from tilenet.training.setup.run_plan import RunPlan

NETWORK = NetworkKeys(poolings=2, base=4, dropout=0.2)
SIZE = 157, 211
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "instance": {"network": replace(NETWORK, norm="instance")},
    "a loss of crops": {"loss": "ce+dice", "micro_batches": 5},
    "norms of tiles": {"network": replace(NETWORK, norm="instance", norm_scope="tile")},
    "tiles": {"tiles": TileKeys(2, 2)},
    "tiles and norms": {"tiles": TileKeys(2, 2), "network": replace(NETWORK, norm="group")},
    "exchange": {"halo_mode": "exchange", "network": replace(NETWORK, norm="instance")},
    "checkpointing": {"checkpointing": "always"},
}


def run_of(folder: Path, scenes: Any, **more: Any) -> RunFile:
    run = run_file(folder, scenes, more.pop("network", NETWORK), crop_px=64, **more)
    return replace(run, batch_size=5)


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.ranks(2)) if case == "exchange" else case
        for case in CASES
    ],
)
def test_a_run_is_the_same(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    scenes = scenes_of(shared_path, [SIZE], comm)
    more = dict(CASES[case])
    if comm.size > 1:
        more["mesh"] = MeshKeys(1, 1, comm.size)
    run = run_of(shared_path, scenes, **more)
    batches: list[int] = []
    call = Pipe.__call__

    def watched(self: Pipe, images: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            batches.extend(len(image) for image in images)
        return call(self, images, *args)

    monkeypatch.setattr(Pipe, "__call__", watched)
    monkeypatch.setattr(stacking, "_limit_bytes", lambda devices: 0)
    alone = outcome_of(run, comm, scenes[0].image, None)
    before = list(batches)
    batches.clear()
    monkeypatch.setattr(stacking, "_limit_bytes", lambda devices: 1 << 34)
    found = outcome_of(run, comm, scenes[0].image, None)
    check_same(comm, found, alone, scenes[0].valid, logits=np.inf)
    assert sum(batches) == sum(before)
    assert len(batches) <= len(before) // 3


def plan_of(**more: Any) -> RunPlan:
    run = RunFile(
        images=["i.tif"], labels=["l.tif"], classes=3, output="run", steps=1, batch_size=8,
        **{"crop_px": 256, "network": NETWORK, **more},
    )  # fmt: skip
    return plan_run(run, (((1, 2, 3), (900, 800)),), 1)


def most(plan: RunPlan, limit: int = 1 << 34, sizes: Any = ((900, 800),)) -> int:
    return stacking.most_together(plan, 8, sizes, "adamw", limit)


def test_as_many_as_fit_evenly() -> None:
    plan = plan_of()
    tile = plan.tiling(256, 256).tiles[0].read

    def bytes_of(batch: int) -> int:
        costs = layer_bytes(plan.record.layers, tile.height, tile.width, "float32", batch)
        (part,) = partition_bytes(costs, plan.balance, 1, "never", "adamw")
        return part.total

    sizes = [bytes_of(batch) for batch in range(1, 9)]
    assert [most(plan, size) for size in sizes] == [1, 2, 3, 4, 4, 4, 4, 8]
    assert [most(plan, size - 1) for size in sizes] == [1, 1, 2, 3, 4, 4, 4, 4]


def test_a_device_is_busy_with_some() -> None:
    plan = plan_of(crop_px=640)
    assert most(plan) == 4  # 5 would be enough, and 8 are 2 × 4


@pytest.mark.parametrize(
    "more",
    [
        {"crop_px": None},
        {"halo_mode": "sweep"},
        {"network": replace(NETWORK, norm="batch")},
        {"network": replace(NETWORK, norm="batch", norm_scope="tile")},
        {"partitions": 2},
    ],
)
def test_nothing_else_is_stacked(more: dict[str, Any]) -> None:
    assert most(plan_of(**more)) == 1


def test_crops_of_several_sizes_are_not_stacked() -> None:
    assert most(plan_of(), sizes=((900, 800), (100, 800))) == 1
    assert most(plan_of(), limit=0) == 1
