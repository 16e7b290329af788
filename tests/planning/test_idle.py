"""A plan says what stands idle: ranks without a tile, and devices of a pipeline that waits."""

import re
from dataclasses import replace
from typing import Any

import pytest
from questions import small_machine

from tilenet.geometry.unet import UNetOptions
from tilenet.planning.explain import answer, explain
from tilenet.planning.mesh import MeshShape, tiles_of
from tilenet.planning.plan import Plan, Question

OPTIONS = UNetOptions(poolings=1, convolutions=1, base=4)


def plan_of(devices: int, **changes: Any) -> Plan:
    machine = small_machine(devices, 2**26)
    asked = Question(OPTIONS, 3, (90, 70), machine=machine, partitions=1)
    return answer(replace(asked, **changes))[0]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (1, 3), (4, 3)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_ranks_without_a_tile_are_counted(
    devices: int, grid: tuple[int, int], batch_size: int
) -> None:
    plan = plan_of(devices, grid=grid, batch_size=batch_size)
    mesh = MeshShape(*plan.mesh)
    idle = sum(
        (place := mesh.place(rank)).replica >= batch_size or not tiles_of(place, mesh, grid)
        for rank in range(mesh.num_ranks)
    )
    found = [re.match(r"(\d+) of (\d+) ranks have no tile", note) for note in plan.notes]
    said = [(int(one[1]), int(one[2])) for one in found if one]
    assert said == ([(idle, mesh.num_ranks)] if idle else [])


def test_a_pipeline_that_waits_says_so() -> None:
    for micro_batches, says in ((1, True), (6, False)):
        asked = {"partitions": 3, "grid": (3, 2), "micro_batches": micro_batches}
        plan = plan_of(3, **asked)
        assert (plan.bubble > 0.5) == says
        assert any("devices wait for one another" in note for note in plan.notes) == says


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_several_nodes_are_counted_in_hours(nodes: int) -> None:
    plan = replace(plan_of(2, nodes=nodes), epoch_s=900.0)
    hours = re.findall(r"900 s per epoch(?:, (\S+) node-hours)?", explain([plan]))
    assert hours == ([str(nodes / 4)] if nodes > 1 else [""])
