"""Real images with labels, and what training on them must give: rasterio and torch alone.

Labels are moved and burned by GDAL's functions, pixels are averaged, standardised and sent through
the rebuilt network (rebuild.py) as one whole image.
"""

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyogrio
import rasterio
import shapely
import torch
from affine import Affine
from numpy.typing import NDArray
from outside.rebuild import Checkpoint, Image, read_safetensors, whole_image
from rasterio.features import rasterize
from rasterio.warp import transform_geom
from torch import Tensor

LR, IGNORE = 0.1, 255
BASE = ("--network.base", "2")


@dataclass(frozen=True)
class Case:
    """An image, its labels, and how a small network is trained on them."""

    files: tuple[str, ...]  # of one image; several are stacked
    labels: str
    options: str  # of the network, and others of `tilenet train`
    field: str | None = None  # attribute with the class of polygons; None: all are 1
    own_crs: bool = False  # whether polygons are in the image's CRS, whatever the file says
    bands: tuple[int, ...] = ()  # of those of all files, from 1, in their order; empty: all
    factor: int = 1  # pixels of the file along the side of one that is read
    classes: int = 2
    balanced: bool = False  # whether all classes weigh the same, however frequent
    init: str | None = None  # case whose network is the start


VEGAS = tuple(f"SN_Vegas_WV03-{band}.tif" for band in "RGBN")
CASES = {
    "fair_uganda": Case(
        ("fair_uganda_z21_rgb.tif",),
        "fair_uganda_z21_buildings.tif",
        "--network.poolings 3 --network.norm batch --resolution 0.6",
        factor=8,
    ),
    "massachusetts": Case(
        ("massachusetts_23429155_15_uint16.tif",),
        "massachusetts_23429155_15.gpkg",
        "--network.poolings 2 --network.convolutions 1 --vectors.field class",
        field="class",
    ),
    "sample_geotiff": Case(
        ("sample_geotiff.tif",),
        "geotiff_labels.geojson",
        "--network.poolings 2 --network.convolutions 1 --network.padding valid "
        "--class_weights auto",
        balanced=True,
    ),
    "custom_proj": Case(
        ("sample_geotiff_custom_proj.tif",),
        "geotiff_custom_proj_labels.geojson",
        "--network.poolings 3 --network.norm group --network.groups 2 --vectors.crs image "
        "--resolution 60",
        own_crs=True,
        factor=2,
    ),
    "new_brunswick": Case(
        ("new_brunswick_2of2.tif",),
        "new_brunswick_BakerLake.gpkg",
        "--network.poolings 3 --network.upsampling bilinear --vectors.field Quatreclasses",
        field="Quatreclasses",
        classes=5,
    ),
    "SN7": Case(
        ("SN7_int16_4band.tif",),
        "SN7_buildings.geojson",
        "--network.poolings 2 --network.convolutions 1 --network.base 4",
    ),
    "SN_Vegas": Case(
        VEGAS,
        "SN_Vegas_WV03.gpkg",
        "--network.poolings 2 --network.convolutions 1 --network.base 4 --bands [n,r,G,b]",
        bands=(4, 1, 2, 3),
        init="SN7",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Where the pixels of an image lie."""

    size: tuple[int, int]
    transform: Affine
    crs: rasterio.CRS


def image_name(data: Path, files: tuple[str, ...]) -> str:
    """What tilenet is given."""
    return "+".join(str(data / name) for name in files)


@cache
def read_image(
    data: Path, files: tuple[str, ...], bands: tuple[int, ...] = (), factor: int = 1
) -> tuple[Image, Grid]:
    """All bands but alpha, or some of them; a pixel counts where it does in each file."""
    values, valid = [], []
    for name in files:
        with rasterio.open(data / name) as file:
            colours = [band.name != "alpha" for band in file.colorinterp]
            values.append(file.read([n for n, colour in enumerate(colours, 1) if colour]))
            valid.append(file.dataset_mask() != 0)
            transform, crs = file.transform, file.crs
    pixels, counted = np.concatenate(values).astype(np.float64), np.all(valid, axis=0)
    pixels = pixels[[band - 1 for band in bands]] if bands else pixels
    if factor > 1:
        assert counted.all(), "means of valid pixels alone are not made here"
        height, width = (size // factor for size in counted.shape)
        pixels = pixels.reshape(-1, height, factor, width, factor).mean(axis=(2, 4))
        counted = np.ones((height, width), np.bool_)
    grid = Grid(counted.shape, transform @ Affine.scale(factor), crs)
    return Image(pixels, counted), grid


def read_labels(data: Path, case: Case, grid: Grid) -> NDArray[np.int64]:
    """Classes of the pixels of a grid, (H, W)."""
    path = data / case.labels
    if path.suffix == ".tif":
        with rasterio.open(path) as file:
            fine = file.read(1).astype(np.int64)
        height, width = grid.size
        blocks = fine.reshape(height, case.factor, width, case.factor)
        counts = np.stack([(blocks == one).sum(axis=(1, 3)) for one in range(case.classes)])
        return counts.argmax(axis=0)
    fields = [case.field] if case.field else []
    info, _, wkb, columns = pyogrio.raw.read(path, columns=fields)
    shapes = [shapely.geometry.mapping(shape) for shape in shapely.from_wkb(wkb)]
    if not case.own_crs:
        shapes = transform_geom(info["crs"], grid.crs, shapes)
    values = [int(value) for value in columns[0]] if fields else [1] * len(shapes)
    pairs = list(zip(shapes, values, strict=True))
    burned = rasterize(pairs, grid.size, transform=grid.transform, dtype="int32")
    return burned.astype(np.int64)


def arguments(data: Path, name: str, output: Path) -> list[str]:
    """Of `tilenet train`, length and start aside."""
    case = CASES[name]
    return [
        *("train", "--images", image_name(data, case.files), "--labels", str(data / case.labels)),
        *("--classes", str(case.classes), *BASE, *case.options.split()),
        *("--optimizer.name", "sgd", "--optimizer.lr", str(LR), "--precision", "float64"),
        *("--seed", "3", "--device", "cpu", "--output", str(output)),
    ]


def read_losses(run: Path) -> list[float]:
    """Of the steps."""
    with (run / "history.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Whatever the resolution that it reads at: pixels are averaged here."""
    network = json.loads((folder / "network.json").read_text())
    return Checkpoint(network, read_safetensors(folder / "weights.safetensors"))


def plain_losses(
    first: Checkpoint, image: Image, labels: NDArray[np.int64], *, balanced: bool
) -> list[float]:
    """Losses of two steps of plain SGD; statistics are the image's own."""
    inside = image.pixels[:, image.valid]
    own = {"mean": inside.mean(axis=1).tolist(), "std": inside.std(axis=1).tolist()}
    network = first.network | {"statistics": own}
    counted = torch.from_numpy(image.valid & (labels != IGNORE))
    target = torch.from_numpy(labels)[counted]
    weight = torch.bincount(target).double().reciprocal() if balanced else None

    def loss_of(tensors: dict[str, Tensor]) -> Tensor:
        logits = whole_image(Checkpoint(network, tensors), image, seed=3)
        return torch.nn.functional.cross_entropy(logits[:, counted].T, target, weight)

    names = [name for name in first.tensors if name.endswith((".weight", ".bias"))]
    before = {name: first.tensors[name].clone().requires_grad_() for name in names}
    loss = loss_of(first.tensors | before)
    gradients = torch.autograd.grad(loss, list(before.values()))
    after = {
        name: (tensor - LR * gradient).detach()
        for (name, tensor), gradient in zip(before.items(), gradients, strict=True)
    }
    return [float(loss.detach()), float(loss_of(first.tensors | after))]


def check_losses(data: Path, name: str, start: Path, run: Path) -> None:
    """The two losses of a run are those of plain torch on the whole image."""
    case = CASES[name]
    image, grid = read_image(data, case.files, case.bands, case.factor)
    labels = read_labels(data, case, grid)
    assert len(np.unique(labels[image.valid])) >= 2
    wanted = plain_losses(read_checkpoint(start), image, labels, balanced=case.balanced)
    assert abs(wanted[0] - wanted[1]) > 1e-4, "a step must matter"
    assert np.abs(np.subtract(read_losses(run), wanted)).max() <= 1e-12


def check_logits(data: Path, name: str, run: Path, path: Path) -> None:
    """A map of logits is the network's on the whole image, and lies where that does."""
    case = CASES[name]
    image, grid = read_image(data, case.files, case.bands, case.factor)
    wanted = logits_of(run, image)
    with rasterio.open(path) as file, rasterio.open(data / case.files[0]) as source:
        found = file.read()
        assert (file.dtypes[0], file.shape) == ("float64", grid.size)
        assert (file.transform, file.crs) == (grid.transform, source.crs)
    assert np.array_equal(np.isnan(found), np.broadcast_to(~image.valid, found.shape))
    apart = np.abs(found - wanted)[:, image.valid]
    assert apart.max() <= 1e-12 * max(1.0, float(np.abs(wanted).max()))


def logits_of(run: Path, image: Image) -> NDArray[np.float64]:
    """Of the whole image by the network that a run left, (K, H, W)."""
    with torch.inference_mode():
        return whole_image(read_checkpoint(run / "last"), image).numpy()
