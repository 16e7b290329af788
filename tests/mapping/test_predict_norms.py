"""Maps of networks with norms over the whole image: by exchange, in passes, in one tile."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from pairwise import pairs
from safetensors.torch import save_file
from whole_image import Scene, random_scene, whole_input

import tilenet.mapping.choose
import tilenet.mapping.job
import tilenet.planning.maps.passes
from tilenet.errors import AgreedError
from tilenet.geometry.layers import Layer, Norm
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.model.network import Network, build_network
from tilenet.storage.network_json import NetworkRecord

pytestmark = pytest.mark.ranks(1, 2)

OPTIONS = UNetOptions(poolings=2, base=4, bands=3, classes=3, norm="instance", groups=2)
METHODS = ("exchange", "passes")


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and what it was made of."""

    folder: Path
    options: UNetOptions
    layers: tuple[Layer, ...]
    network: Network


def trained(
    comm: MPI.Intracomm,
    folder: Path,
    scene: Scene,
    options: UNetOptions,
    *,
    affine: bool | None = None,
    precision: str = "float64",
) -> Trained:
    """A checkpoint with weights that hide nothing, written by rank 0."""
    layers = unet_layers(options)
    if affine is not None:
        layers = tuple(replace(x, affine=affine) if isinstance(x, Norm) else x for x in layers)
    network = build_network(layers, 5, torch.float64).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:  # zeros and ones hide mistakes
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
    inside = scene.pixels[:, scene.valid].astype(np.float64)
    record = NetworkRecord(
        layers=layers,
        bands=(1, 2, 3),
        classes=("a", "b", "c"),
        ignore_index=255,
        mean=tuple(inside.mean(axis=1)),
        std=tuple(inside.std(axis=1)),
        resolution=None,
        nodata=None,
        precision=precision,
        epsilon_px=10,
    )
    if comm.rank == 0:
        weights = {name: t.contiguous() for name, t in network.state_dict().items()}
        if precision == "float32":
            weights = {name: t.float() for name, t in weights.items()}
        save_file(weights, folder / "weights.safetensors")
        (folder / "network.json").write_text(json.dumps(record.to_json()))
        save_file({}, folder / "state.safetensors")
        (folder / "progress.json").write_text("{}")
    comm.Barrier()
    return Trained(folder, options, layers, network)


def wanted_map(made: Trained, scene: Scene) -> np.ndarray[Any, Any]:
    """The plain network's logits on the whole extended image."""
    with torch.no_grad():
        logits = made.network(whole_input(scene, made.options))[0].numpy()
    height, width = scene.valid.shape
    return logits[:, :height, :width]


def mapped(
    made: Trained, scene: Scene, comm: MPI.Intracomm, name: str = "map.tif", **more: Any
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """The map, on every rank, and what `predict` says of it."""
    out = made.folder / name
    wanted = Prediction(
        str(made.folder), str(scene.image), str(out), "logits", overwrite=True, device="cpu", **more
    )
    done = predict(wanted, comm)
    with rasterio.open(out) as file:
        found = file.read()
    comm.Barrier()
    return found, done


def worst(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], scene: Scene) -> float:
    """Largest difference, relative to the largest logit."""
    assert np.isnan(found[:, ~scene.valid]).all()
    difference = np.abs(found - wanted)[:, scene.valid]
    assert np.isfinite(difference).all()
    return float(difference.max() / np.nanmax(np.abs(wanted)))


def scene_of(comm: MPI.Intracomm, folder: Path, size: tuple[int, int], seed: int = 1) -> Scene:
    scene = random_scene(folder, size, seed, write=comm.rank == 0)
    comm.Barrier()
    return scene


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize(
    ("norm", "method", "affine", "upsampling"),
    pairs(["instance", "group"], METHODS, [False, True], ["nearest", "bilinear", "transposed"]),
)
def test_logits_are_the_plain_networks(
    comm: MPI.Intracomm, shared_path: Path, norm: Any, method: str, affine: bool, upsampling: Any
) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    options = replace(OPTIONS, norm=norm, upsampling=upsampling, dropout=0.2)
    made = trained(comm, shared_path, scene, options, affine=affine)
    tile_px = {"tile_px": 60} if method == "passes" else {}
    found, done = mapped(made, scene, comm, **tile_px)
    if method == "passes" or comm.size > 1:
        assert done["method"] == method
    assert worst(found, wanted_map(made, scene), scene) <= 1e-12


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize(
    ("method", "partitions", "size"),
    pairs(METHODS, [2, 3, 5], [(97, 203), (211, 99), (61, 330)]),
)
def test_partitions_and_awkward_sizes(
    comm: MPI.Intracomm, shared_path: Path, method: str, partitions: int, size: tuple[int, int]
) -> None:
    scene = scene_of(comm, shared_path, size)
    options = replace(
        OPTIONS, poolings=3, convolutions=1, norm="group", groups=4, upsampling="bilinear"
    )
    made = trained(comm, shared_path, scene, options)
    tile_px = {"tile_px": 48} if method == "passes" else {}
    found, done = mapped(made, scene, comm, partitions=partitions, **tile_px)
    assert done["method"] in (method, "tiles")
    assert (done["passes"] > 1) == (method == "passes")
    assert worst(found, wanted_map(made, scene), scene) <= 1e-12


@pytest.mark.ranks(2, 3)
def test_passes_give_the_same_bits_on_any_number_of_ranks(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm="group"))
    together, _ = mapped(made, scene, comm, tile_px=40)
    alone, done = mapped(made, scene, MPI.COMM_SELF, f"alone{comm.rank}.tif", tile_px=40)
    assert done["grid"] == [4, 6]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.ranks(2, 4)
def test_exchange_gives_what_one_rank_gives(comm: MPI.Intracomm, shared_path: Path) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    made = trained(comm, shared_path, scene, OPTIONS)
    together, _ = mapped(made, scene, comm)
    alone, done = mapped(made, scene, MPI.COMM_SELF, f"alone{comm.rank}.tif")
    assert (done["method"], done["grid"]) == ("tiles", [1, 1])
    assert worst(together, alone, scene) <= 1e-12


@pytest.mark.parametrize("output", ["classes", "probabilities"])
def test_pieces_of_other_outputs(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, output: Any
) -> None:
    monkeypatch.setattr(tilenet.mapping.job, "PIECE_PX", (16, 48))
    scene = scene_of(comm, shared_path, (157, 211))
    made = trained(comm, shared_path, scene, OPTIONS)
    out = shared_path / "map.tif"
    predict(Prediction(str(made.folder), str(scene.image), str(out), output, device="cpu"), comm)
    logits = wanted_map(made, scene)
    with rasterio.open(out) as file:
        found = file.read()
    if output == "classes":
        wanted = np.where(scene.valid, logits.argmax(axis=0), 255)[None]
        np.testing.assert_array_equal(found, wanted)
    else:
        softmax = torch.from_numpy(logits).softmax(dim=0).numpy()
        assert worst(found, softmax, scene) <= 1e-12


def test_memory_decides_and_rank_0_says_so(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    made = trained(comm, shared_path, scene, OPTIONS)
    wanted = wanted_map(made, scene)
    # 160 × 212 px take 160 · 212 · 8 · (8 + 4 + 4) bytes where most lives
    monkeypatch.setattr(tilenet.mapping.choose, "CPU_BYTES", 300_000)
    monkeypatch.setattr(tilenet.mapping.choose, "CPU_TILE_PX", 64)
    capfd.readouterr()
    found, done = mapped(made, scene, comm)
    words = "".join(comm.allgather(capfd.readouterr().err))
    assert worst(found, wanted, scene) <= 1e-12
    assert done["method"] == "sweep"
    norms = sum(isinstance(layer, Norm) for layer in made.layers)
    assert done["passes"] == norms + 1
    assert words.count(f"statistics over the whole image: {norms + 1} passes over") == 1
    assert "do not hold the image; " in words
    assert "ranks would need one pass" in words


def test_a_halo_that_was_asked_for(comm: MPI.Intracomm, shared_path: Path) -> None:
    scene = scene_of(comm, shared_path, (93, 118))
    made = trained(comm, shared_path, scene, OPTIONS)
    wanted = wanted_map(made, scene)
    exact, done = mapped(made, scene, comm, tile_px=40, halo=36)
    assert (done["method"], done["halo_px"]) == ("passes", 36)
    assert worst(exact, wanted, scene) <= 1e-12
    narrow, _ = mapped(made, scene, comm, tile_px=40, halo=4)
    assert worst(narrow, wanted, scene) > 1e-12


def test_a_prefix_with_a_halo_one_unit_too_small_is_detected(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the tolerance is tight enough to see it."""
    scene = scene_of(comm, shared_path, (93, 118))
    made = trained(comm, shared_path, scene, OPTIONS)
    right: Callable[..., int] = tilenet.planning.maps.passes.prefix_halo_px
    last = max(index for index, layer in enumerate(made.layers) if isinstance(layer, Norm))
    monkeypatch.setattr(
        tilenet.planning.maps.passes,
        "prefix_halo_px",
        lambda layers, stop: right(layers, stop) - 4 * (stop == last),
    )
    found, _ = mapped(made, scene, comm, tile_px=40)
    assert worst(found, wanted_map(made, scene), scene) > 1e-12


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("standardised", [False, True])
def test_pixels_far_from_zero_in_float32(
    comm: MPI.Intracomm, shared_path: Path, method: str, standardised: bool
) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    rng = np.random.default_rng(3)
    pixels = rng.normal(40_000, 50, scene.pixels.shape).round().astype(np.uint16)
    pixels[:, ~scene.valid] = 0
    if comm.rank == 0:
        with rasterio.open(scene.image, "r+") as file:
            file.write(pixels)
    comm.Barrier()
    scene = replace(scene, pixels=pixels)
    made = trained(comm, shared_path, scene, OPTIONS, precision="float32")
    for parameter in made.network.parameters():
        parameter.data = parameter.data.float().double()
    if not standardised:
        # A network that was trained on other images: its input is far from zero everywhere.
        statistics = np.full(3, 38_000.0), np.full(3, 50.0)
        scene = replace(scene, statistics=statistics)
        rewrite(comm, made, mean=statistics[0], std=statistics[1])
    tile_px = {"tile_px": 40} if method == "passes" else {}
    found, _ = mapped(made, scene, comm, **tile_px)
    assert found.dtype == np.float32
    assert worst(found, wanted_map(made, scene), scene) <= 1e-5


def rewrite(comm: MPI.Intracomm, made: Trained, **statistics: np.ndarray[Any, Any]) -> None:
    if comm.rank == 0:
        path = made.folder / "network.json"
        entry = json.loads(path.read_text())
        entry["statistics"] |= {name: list(values) for name, values in statistics.items()}
        path.write_text(json.dumps(entry))
    comm.Barrier()


@pytest.mark.ranks((1, 2, 4))
@pytest.mark.parametrize("size", [(9, 120), (13, 13), (5, 9), (120, 6)])
@pytest.mark.parametrize("tile_px", [None, 8])
def test_images_that_are_small_for_the_ranks(
    comm: MPI.Intracomm, shared_path: Path, size: tuple[int, int], tile_px: int | None
) -> None:
    scene = scene_of(comm, shared_path, size)
    made = trained(comm, shared_path, scene, OPTIONS)
    found, _ = mapped(made, scene, comm, tile_px=tile_px)
    assert worst(found, wanted_map(made, scene), scene) <= 1e-12


@pytest.mark.parametrize(
    ("options", "size", "more", "sentence"),
    [
        ({}, (4, 3), {}, r"more than one cell .*image: 4 × 3 px, 4 × 4 px with its extension"),
        ({}, (4, 3), {"tile_px": 4}, "more than one cell of it on every level"),
        ({}, (40, 30), {"tile_px": 0}, "nearest legal tile: 4"),
        ({}, (40, 30), {"tile_px": 16, "halo": "epsilon"}, "use halo: exact or a multiple"),
        ({}, (40, 30), {"halo": 30}, "nearest: 28 or 32"),
        ({"padding": "valid"}, (90, 80), {"tile_px": 40}, "leave the tile's size out"),
        ({}, (40, 30), {"partitions": 99}, "every partition needs a layer"),
    ],
)
def test_bad_input(
    comm: MPI.Intracomm,
    shared_path: Path,
    options: dict[str, Any],
    size: tuple[int, int],
    more: dict[str, Any],
    sentence: str,
) -> None:
    scene = scene_of(comm, shared_path, size)
    made = trained(comm, shared_path, scene, replace(OPTIONS, **options))
    with pytest.raises(AgreedError, match=sentence):
        mapped(made, scene, comm, **more)


def test_an_unpadded_network_and_batch_norm_stay_as_they_were(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scene = scene_of(comm, shared_path, (90, 81))
    valid = trained(comm, shared_path, scene, replace(OPTIONS, padding="valid"))
    found, done = mapped(valid, scene, comm)
    assert (done["method"], done["grid"]) == ("tiles", [1, 1])
    assert worst(found, wanted_map(valid, scene), scene) <= 1e-12
    batch = trained(comm, shared_path, scene, replace(OPTIONS, norm="batch"))
    found, done = mapped(batch, scene, comm, tile_px=24)
    assert (done["method"], done["passes"]) == ("tiles", 1)
    assert worst(found, wanted_map(batch, scene), scene) <= 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_file_that_breaks_off_ends_all_ranks_alike(
    comm: MPI.Intracomm, shared_path: Path, method: str
) -> None:
    scene = scene_of(comm, shared_path, (157, 211))
    made = trained(comm, shared_path, scene, OPTIONS)
    if comm.rank == 0:
        whole = scene.image.read_bytes()
        scene.image.write_bytes(whole[: len(whole) // 2])
    comm.Barrier()
    if method == "exchange" and comm.size == 1:
        pytest.skip("one rank holds the image in one tile")
    with pytest.raises(AgreedError, match="must be readable everywhere"):
        mapped(made, scene, comm, **({"tile_px": 40} if method == "passes" else {}))
    comm.Barrier()
    assert not list(shared_path.glob(".*part"))
