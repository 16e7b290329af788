"""Maps by sweeps over ranks: the numbers of the plain network on the whole image."""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from safetensors.torch import save_file
from test_map_parts import ask, interrupt, map_of
from test_predict_norms import OPTIONS, Trained, mapped, scene_of, trained, wanted_map, worst
from torch import nn
from whole_image import Scene, standardised
from zoo import ZOO, network

import tilenet.mapping.choose
import tilenet.planning.maps.strips
from tilenet.adoption.adopt import adopt
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Mapper
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.storage.network_json import NetworkRecord

pytestmark = pytest.mark.ranks((1, 3), (2, 4))

SIZE = 203, 157


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is the whole image, no rank holds its share, strips are as low as they can be."""
    monkeypatch.setattr(tilenet.mapping.choose, "_memory", lambda *_: (1 << 14, 32))
    monkeypatch.setattr(tilenet.mapping.choose, "SWEEP_TIMES", 1 << 20)
    monkeypatch.setattr(tilenet.planning.maps.strips, "STRIP_PX", 16)
    monkeypatch.setattr(tilenet.planning.maps.strips, "STRIP_CELLS", (1,))


def in_columns(monkeypatch: pytest.MonkeyPatch, num_cols: int) -> None:
    """Let just so many columns of tiles fit."""
    right = tilenet.planning.maps.strips._strips

    def strips(asked: Any, height: int, width: int, columns: int, halo_px: int) -> int | None:
        fits = columns == num_cols and halo_px
        return right(asked, height, width, columns, halo_px) if fits else None

    monkeypatch.setattr(tilenet.planning.maps.strips, "_strips", strips)


def that_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let just columns of ranks that exchange halos fit."""
    right = tilenet.planning.maps.strips._strips

    def strips(asked: Any, height: int, width: int, columns: int, halo_px: int) -> int | None:
        return None if halo_px else right(asked, height, width, columns, halo_px)

    monkeypatch.setattr(tilenet.planning.maps.strips, "_strips", strips)


def adopted(comm: MPI.Intracomm, folder: Path, scene: Scene, module: nn.Module) -> Any:
    """A checkpoint of somebody's network, and its logits of the whole image."""
    found = adopt(module, 3)
    plain = found.network(torch.float64).eval()
    inside = scene.pixels[:, scene.valid].astype(np.float64)
    record = NetworkRecord(
        layers=found.layers,
        bands=(1, 2, 3),
        classes=tuple("abcdef"[: found.layers[-1].out_channels]),
        ignore_index=255,
        mean=tuple(inside.mean(axis=1)),
        std=tuple(inside.std(axis=1)),
        resolution=None,
        nodata=None,
        precision="float64",
        epsilon_px=0,
    )
    if comm.rank == 0:
        weights = {name: t.contiguous().clone() for name, t in plain.state_dict().items()}
        save_file(weights, folder / "weights.safetensors")
        (folder / "network.json").write_text(json.dumps(record.to_json()))
        save_file({}, folder / "state.safetensors")
        (folder / "progress.json").write_text("{}")
    comm.Barrier()
    unit = record.context().alignment_px
    edges = [(0, -size % unit) for size in SIZE]
    image = np.pad(standardised(scene), ((0, 0), *edges), mode="reflect")
    with torch.no_grad():
        logits = plain(torch.from_numpy(image)[None])[0].numpy()
    return Trained(folder, OPTIONS, found.layers, plain), logits[:, : SIZE[0], : SIZE[1]]


@pytest.mark.ranks((1, 2, 3, 4))
@pytest.mark.parametrize(
    ("name", "num_cols"), [(name, 1 + place % 2) for place, name in enumerate(ZOO)]
)
def test_adopted_networks(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_cols: int,
) -> None:
    in_columns(monkeypatch, num_cols)
    scene = scene_of(comm, shared_path, SIZE)
    made, wanted = adopted(comm, shared_path, scene, network(name, drops=False))
    found, done = mapped(made, scene, comm, tile_px=None)
    assert (done["method"], done["grid"][1]) == ("sweep", num_cols)
    assert worst(found, wanted, scene) <= 1e-12


@pytest.mark.ranks((2, 3))
@pytest.mark.parametrize("name", [name for name in ZOO if name != "looking"])
def test_adopted_networks_over_columns_that_exchange_halos(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    that_exchange(monkeypatch)
    scene = scene_of(comm, shared_path, SIZE)
    made, wanted = adopted(comm, shared_path, scene, network(name, drops=False))
    found, done = mapped(made, scene, comm, tile_px=None)
    assert (done["method"], done["grid"][1]) == ("sweep", comm.size)
    assert worst(found, wanted, scene) <= 1e-12
    unit = context_of(made.layers).alignment_px
    widest = ceil(SIZE[1] / comm.size / unit) * unit
    assert done["work_ratio"] <= comm.size * widest * (SIZE[0] + unit) / (SIZE[0] * SIZE[1])


@pytest.mark.ranks(1, 2)
def test_coordinates_of_a_part_are_those_of_the_whole_image(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    made, wanted = adopted(comm, shared_path, scene, network("located", drops=False))
    for row, col, height, width in [(51, 63, 20, 40), (31, 45, 100, 33)]:
        part = {"window": (row, col, height, width), "tile_px": 56}
        (found, _), _ = map_of((scene, made, part), comm, "part.tif")
        there = slice(row, row + height), slice(col, col + width)
        apart = np.abs(found - wanted[(slice(None), *there)])[:, scene.valid[there]]
        assert apart.max() <= 1e-12


@pytest.mark.ranks(1, 2)
def test_the_image_is_read_for_the_first_statistics_and_for_the_map(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes between begin from kept maps."""
    that_exchange(monkeypatch) if comm.size > 1 else in_columns(monkeypatch, 1)
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, OPTIONS)
    read, windows = Mapper.input, list[Window]()

    def counted(self: Mapper, window: Window) -> Any:
        windows.append(window)
        return read(self, window)

    monkeypatch.setattr(Mapper, "input", counted)
    found, done = mapped(made, scene, comm)
    assert (done["method"], done["passes"], done["grid"][1]) == ("sweep", 11, comm.size)
    assert len(windows) == 2 * len(set(windows)) == 2 * done["grid"][0]
    assert worst(found, wanted_map(made, scene), scene) <= 1e-12


def test_statistics_of_the_image_itself(comm: MPI.Intracomm, shared_path: Path) -> None:
    """No layer comes before the norm that takes them."""
    scene = scene_of(comm, shared_path, SIZE)
    norm, conv = nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 4, 3, padding=1)
    made, wanted = adopted(comm, shared_path, scene, nn.Sequential(norm, conv))
    found, done = mapped(made, scene, comm)
    assert (done["method"], done["passes"]) == ("sweep", 2)
    assert worst(found, wanted, scene) <= 1e-12


@pytest.mark.ranks((1, 2, 3, 4))
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_our_own(comm: MPI.Intracomm, shared_path: Path, norm: Any, upsampling: Any) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    options = replace(OPTIONS, norm=norm, upsampling=upsampling, dropout=0.2)
    made = trained(comm, shared_path, scene, options)
    found, done = mapped(made, scene, comm)
    assert (done["method"], done["passes"] > 1) == ("sweep", norm in ("instance", "group"))
    assert worst(found, wanted_map(made, scene), scene) <= 1e-12
    if comm.size == 1:
        assert done["work_ratio"] == pytest.approx(204 * 160 / (203 * 157))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_map_is_the_same_to_the_last_bit_on_any_number_of_ranks(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, norm: Any
) -> None:
    in_columns(monkeypatch, 1)
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm=norm), precision="float32")
    together, done = mapped(made, scene, comm)
    alone, _ = mapped(made, scene, MPI.COMM_SELF, f"alone{comm.rank}.tif")
    assert done["method"] == "sweep"
    np.testing.assert_array_equal(together, alone)


@pytest.mark.ranks(1, 3)
def test_a_part_is_that_part_of_the_map(comm: MPI.Intracomm, shared_path: Path) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm="batch"))
    whole, _ = mapped(made, scene, comm)
    for window in ((30, 10, 100, 140), (0, 60, 203, 97), (190, 0, 13, 157)):
        part, done = mapped(made, scene, comm, "part.tif", window=window)
        assert done["method"] == "sweep"
        row, col, height, width = window
        np.testing.assert_array_equal(part, whole[:, row : row + height, col : col + width])


def test_several_partitions_and_narrow_parts_are_mapped_by_tiles(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm="batch"))
    for more in ({"partitions": 2}, {"window": (0, 0, 200, 60)}, {"tile_px": 40}):
        assert mapped(made, scene, comm, **more)[1]["method"] == "tiles"


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("norm", "where", "at", "alone"),
    [
        ("batch", "tiles_done", 2, False),
        ("group", "tiles_done", 2, True),
        ("group", "round_done", 7, False),
        ("group", "round_done", 7, True),
    ],
)
def test_an_interrupted_map_goes_on_at_a_strip(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    norm: Any,
    where: str,
    at: int,
    alone: bool,
) -> None:
    """On the same ranks, or on a single one."""
    scene = scene_of(comm, shared_path, SIZE)
    options = replace(OPTIONS, norm=norm, convolutions=1)
    made = trained(comm, shared_path, scene, options, precision="float32")
    rows: list[int] = []
    take = ReadAhead.__next__

    def counted(reads: ReadAhead[Any, Any]) -> Any:
        taken = take(reads)
        rows.append(taken[0].shape[2])
        return taken

    monkeypatch.setattr(ReadAhead, "__next__", counted)
    wanted, done = mapped(made, scene, comm, "whole.tif", resume=True)
    assert (done["method"], done["grid"][1]) == ("sweep", 1)
    total = sum(rows)
    rows.clear()
    interrupt(monkeypatch, where, at, ask)
    out = shared_path / "map.tif"
    asked = Prediction(
        str(made.folder), str(scene.image), str(out), "logits", device="cpu", resume=True
    )
    assert predict(asked, comm)["stopped"]
    assert not out.exists()
    first = sum(rows)
    rows.clear()
    if alone and comm.rank == 0:
        predict(asked, MPI.COMM_SELF)
    elif not alone:
        assert not predict(asked, comm)["stopped"]
    comm.Barrier()
    if where == "tiles_done" and not alone:
        assert sum(rows) < total  # not from the start
    with rasterio.open(out) as file:
        np.testing.assert_array_equal(file.read(), wanted)
    assert first < total
    assert not list(shared_path.glob(".*part"))


@pytest.mark.ranks(2)
def test_a_file_that_breaks_ends_all_ranks_in_one_sentence(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, OPTIONS)
    read = Mapper.input

    def broken(self: Mapper, window: Window) -> Any:
        if comm.rank == 1 and window.row > 120:
            raise TilenetError("a block is broken")
        return read(self, window)

    monkeypatch.setattr(Mapper, "input", broken)
    with pytest.raises(AgreedError, match="a block is broken"):
        mapped(made, scene, comm)


def test_strips_that_own_no_cell_of_a_smaller_map(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last 16 rows of the image lie beyond what 41 rows leave of it."""
    in_columns(monkeypatch, 1)
    torch.manual_seed(4)
    parts = [torch.nn.Conv2d(3, 2, 41), torch.nn.InstanceNorm2d(2), torch.nn.GELU()]
    module = torch.nn.Sequential(*parts, torch.nn.ConvTranspose2d(2, 2, 41))
    scene = scene_of(comm, shared_path, SIZE)
    made, wanted = adopted(comm, shared_path, scene, module)
    found, done = mapped(made, scene, comm)
    assert (done["method"], done["passes"]) == ("sweep", 2)
    assert worst(found, wanted, scene) <= 1e-12
