"""The table of what composes with what (DESIGN.md, section 7)."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.compatibility import batch_obstacle, device_obstacle, obstacle, whole_image
from tilenet.planning.micro_batches import stacks
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.decide import plan_run

PLAIN = UNetOptions(poolings=2, base=4)
NORMS = ("none", "instance", "group", "batch")


def network(norm: str = "none", scope: str = "image", padding: str = "same") -> tuple[Layer, ...]:
    return unet_layers(replace(PLAIN, norm=norm, norm_scope=scope, padding=padding))  # type: ignore[arg-type]


GRIDS = [(1, 1), (3, 1), (3, 2), (6, 4), (2, 2), (3, 3)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", ["image", "tile"])
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_the_table(norm: str, scope: str, mode: str, padding: str) -> None:
    """On a mesh of 3 × 2 ranks per image; each reason is tested by what it says."""
    layers = network(norm, scope, padding)
    whole = norm != "none" and scope == "image"
    assert whole_image(layers) == (f"{norm} norm" if whole else None)
    for grid, replicas in product(GRIDS, (1, 5)):
        found = obstacle(layers, grid, (replicas, 3, 2), mode)  # type: ignore[arg-type]
        if mode == "exchange" and grid != (3, 2):
            said = "ranks that exchange halos hold one window"
        elif padding == "valid" and (mode == "exchange" or whole):
            said = "an unpadded network reflects the image beyond its edges"
        elif whole and (grid[0] < 3 or grid[1] < 2):
            said = f"{norm} norm over the whole image sums over all ranks of the image"
        else:
            assert found is None
            continue
        assert found is not None
        assert found.startswith(said)
        assert "\n" not in found
        if " sums over " in said:
            assert f"use at most {min(grid[0], 3)} × {min(grid[1], 2)} ranks per image" in found
        if not said.startswith("an unpadded"):
            assert f"tiles: {grid[0]} × {grid[1]}, mesh: {replicas} × 3 × 2" in found


@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 1), (1, 2, 1), (3, 1, 2)])
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], ["gpipe", "1f1b"]),
        (["cuda:0", "cuda:0", "cuda:1"], ["gpipe", "1f1b"]),
        (["cuda", "cuda:1", "cuda:0"], ["gpipe", "1f1b"]),
        (["cuda:2", "cuda:2"], ["1f1b"]),
        (["cuda", "cuda:0"], ["1f1b"]),
        (["cuda:0", "cuda:1", "cuda:2"], []),
        (["cpu", "cpu", "cpu"], []),
    ],
)
def test_partitions_that_wait_for_ranks_share_no_device(
    devices: list[str],
    shared: list[str],
    pipeline: Any,
    mesh: tuple[int, int, int],
    norm: str,
    mode: Any,
) -> None:
    """Of several; while others go back, of one either: autograd has one thread for all of a GPU."""
    found = device_obstacle(devices, network(norm), mesh, mode, pipeline)
    ranks = mesh[1] * mesh[2] * (mesh[0] if norm == "batch" else 1)
    if pipeline not in shared or ranks == 1 or (mode == "overlap" and norm == "none"):
        assert found is None
        return
    assert found is not None
    why = "halo_mode: exchange" if mode == "exchange" else f"over whole images: {norm} norm"
    values = f"{', '.join(devices)}, {why}, ranks that wait: {ranks}"
    values += ", pipeline: 1f1b" if pipeline == "1f1b" else ""
    assert f"(device: {values}); name each device once, or" in found


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("devices", [["cuda:0", "cuda"], ["cuda:0", "cuda:1"], ["cpu", "cpu"]])
def test_partitions_of_columns_that_are_swept_share_no_gpu(
    devices: list[str], columns: int
) -> None:
    """Each has a thread, and autograd one for all of a GPU."""
    found = device_obstacle(devices, network(), (1, 1, columns), "sweep")
    if columns == 1 or devices != ["cuda:0", "cuda"]:
        assert found is None
    else:
        assert found is not None
        assert "(device: cuda:0, cuda, mesh.columns: 2); name each once" in found


def test_a_run_on_shared_devices_is_refused_before_it_begins() -> None:
    shapes = (((1, 2, 3), (96, 90)),)
    keys = NetworkKeys(poolings=2, base=4, norm="instance")
    files = {"images": ["a.tif"], "labels": ["b.tif"], "classes": 3, "output": "run"}
    run = RunFile(
        **files, steps=1, network=keys, partitions=3, device=["cuda:0", "cuda:1", "cuda:0"]
    )
    with pytest.raises(TilenetError, match=r"\(device: cuda:0, cuda:1, cuda:0, over .*wait: 2\)"):
        plan_run(run, shapes, 2)
    for same in (replace(run, device=["cuda:0"] * 3), replace(run, device="cuda")):
        assert len(plan_run(same, shapes, 2).balance) == 3
    flows = replace(run, device=["cuda:0"] * 3, pipeline="1f1b")
    with pytest.raises(TilenetError, match=r"wait: 2, pipeline: 1f1b\); name each device once"):
        plan_run(flows, shapes, 2)
    for apart in ("cuda", "cpu", ["cuda:0", "cuda:1", "cuda:2"], ["cpu"] * 3):
        assert len(plan_run(replace(flows, device=apart), shapes, 2).balance) == 3


ONE_SIZE, TWO_SIZES = [(64, 64)] * 3, [(64, 64), (64, 96), (64, 64)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("replicas", "per_step", "sizes", "said"),
    [
        (1, [3], ONE_SIZE, None),
        (1, [3, 1], ONE_SIZE, None),
        (3, [3], TWO_SIZES, None),  # one image each: nothing is stacked
        (2, [4, 2], ONE_SIZE, None),
        (2, [3], ONE_SIZE, "(mesh.replicas: 2, images of a step: 3)"),
        (2, [4, 1], ONE_SIZE, "(mesh.replicas: 2, images of a step: 1)"),
        (1, [3], TWO_SIZES, "(sizes: (64, 64) and (64, 96), images per replica: 3)"),
        (2, [4], TWO_SIZES, "(sizes: (64, 64) and (64, 96), images per replica: 2)"),
    ],
)
def test_images_of_a_batch_norm(
    norm: str, replicas: int, per_step: list[int], sizes: list[object], said: str | None
) -> None:
    found = batch_obstacle(network(norm), replicas, per_step, sizes)
    if said is None or norm != "batch":
        assert found is None
        return
    assert found is not None
    assert found.startswith("batch norm over a step")
    assert said in found
    assert batch_obstacle(network(norm, "tile"), replicas, per_step, sizes) is None


@pytest.mark.parametrize("per_step", [[2], [3, 1], [4, 2], [6, 3]])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_that_are_named_would_do(per_step: list[int], replicas: int) -> None:
    layers = network("batch")
    found = batch_obstacle(layers, replicas, per_step, TWO_SIZES)
    if found and "set mesh.replicas: " in found:
        named = int(found.split("set mesh.replicas: ")[1].split(",")[0].split(" ")[0])
        assert batch_obstacle(layers, named, per_step, TWO_SIZES) is None


@pytest.mark.parametrize(
    ("crop_px", "said"), [(64, r"set mesh\.replicas: 2, a smaller crop_px, which"), (48, None)]
)
def test_crops_of_a_batch_norm_that_are_cut_off_need_smaller_ones(
    crop_px: int, said: str | None
) -> None:
    keys = NetworkKeys(poolings=2, base=4, norm="batch")
    run = RunFile(
        images=["a.tif", "b.tif"],
        labels=["a.tif", "b.tif"],
        classes=3,
        output="out",
        steps=1,
        crop_px=crop_px,
        batch_size=2,
        network=keys,
    )
    shapes = [((1, 2, 3), (90, 48)), ((1, 2, 3), (70, 80))]
    if said is None:
        assert plan_run(run, shapes, 1).crop_px == crop_px
        return
    with pytest.raises(TilenetError, match=said):
        plan_run(run, shapes, 1)


def test_tiles_that_a_norm_needs_at_once_are_one_micro_batch() -> None:
    work, images = ["a0", "a1", "b0", "a2", "c0", "b1"], [7, 7, 3, 7, 5, 3]
    for norm in NORMS:
        assert stacks(network(norm, "tile"), work, images) == [[one] for one in work]
    assert stacks(network(), work, images) == [[one] for one in work]
    for norm in ("instance", "group"):
        found = stacks(network(norm), work, images)
        assert found == [["a0", "a1", "a2"], ["b0", "b1"], ["c0"]]  # in the order of first tiles
    assert stacks(network("batch"), work, images) == [work]
    for norm in NORMS:
        assert stacks(network(norm), [], []) == []
