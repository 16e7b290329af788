"""Draw what the demo does: image, tiles with halo, ranks, map; and the seams of blended windows.

    python demo/picture.py demo/out docs/picture.png

docs/picture.png, which the README shows, was drawn so after `make demo`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle
from numpy.typing import NDArray
from PIL import Image
from preview import class_picture, image_picture
from torch import Tensor

from tilenet.data.rasters.raster import Raster
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.tiles import Cut, Tiling, cut, owned
from tilenet.geometry.windows import Window
from tilenet.model.inputs import standardise
from tilenet.model.network import Network, build_network, load_weights
from tilenet.storage.checkpoints import find_checkpoint, load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord

PART = Window(768, 768, 512, 512)  # of which logits are compared
WINDOW_PX, OVERLAP = 128, 0.25  # of windows that are blended, as is usual
RANKS = "#0072b2", "#d55e00", "#009e73", "#cc79a7"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the demo's rasters")
    parser.add_argument("out", type=Path, help="PNG to write")
    given = parser.parse_args()
    record, network, pixels = _opened(given.folder)
    rule = halo_rule("exact", record.layers, record.epsilon_px)
    tiling = cut(PART.height, PART.width, Cut(grid=(4, 4)), rule)
    with torch.inference_mode():
        whole = network(pixels)[0]
        seams = (_blended(pixels, network) - whole).abs().amax(0)
        ours = (_tiled(pixels, network, tiling) - whole).abs().amax(0)
    figure = Figure(figsize=(10.5, 6.4), dpi=96, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    image, mapped = image_picture(given.folder), class_picture(given.folder)
    _first_row(figure, image, mapped, rule.halo_px)
    _second_row(figure, image, seams.numpy(), ours.numpy())
    given.out.parent.mkdir(exist_ok=True)
    canvas.draw()  # type: ignore[no-untyped-call]
    drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    Image.fromarray(drawn).convert("RGB").quantize(160).save(given.out, optimize=True)


def _opened(folder: Path) -> tuple[NetworkRecord, Network, Tensor]:
    """The demo's network, and the pixels of the part of its scene."""
    checkpoint = find_checkpoint(folder / "run")
    record = NetworkRecord.from_json(load_json(checkpoint / "network.json"))
    network = build_network(record.layers, dtype=torch.float64)
    load_weights(network, load_tensors(checkpoint / "weights.safetensors"), str(checkpoint))
    with Raster(str(folder / "scene.tif")) as raster:
        found = raster.read(PART)
    means = record.mean, record.std
    return record, network.eval(), standardise(found.values, found.valid, *means, torch.float64)


def _blended(pixels: Tensor, network: Network) -> Tensor:
    """Logits of overlapping windows, blended by a Gaussian: how maps are made elsewhere."""
    step = int(WINDOW_PX * (1 - OVERLAP))
    places = torch.arange(WINDOW_PX) - (WINDOW_PX - 1) / 2
    bell = torch.exp(-((places / (WINDOW_PX / 8)) ** 2) / 2).double()
    weight = (bell[:, None] * bell[None]).clamp_min(1e-3)
    starts = sorted({*range(0, PART.height - WINDOW_PX, step), PART.height - WINDOW_PX})
    total = torch.zeros(1, PART.height, PART.width, dtype=torch.float64)
    sums = torch.zeros_like(total)
    for row in starts:
        for col in starts:
            place = (..., slice(row, row + WINDOW_PX), slice(col, col + WINDOW_PX))
            logits = network(pixels[place])[0]
            total = total.expand(len(logits), -1, -1).clone() if len(total) == 1 else total
            total[place] += logits * weight
            sums[place] += weight
    return total / sums


def _tiled(pixels: Tensor, network: Network, tiling: Tiling) -> Tensor:
    """Logits of tiles with their halos, each cut to what it owns."""
    found = []
    for tile in tiling.tiles:
        read = tile.read
        rows, cols = slice(read.row, read.row + read.height), slice(read.col, read.col + read.width)
        found.append(owned(network(pixels[..., rows, cols]), tile)[0])
    rows_of, cols_of = tiling.grid
    lines = [torch.cat(found[row * cols_of : (row + 1) * cols_of], -1) for row in range(rows_of)]
    return torch.cat(lines, -2)


def _first_row(
    figure: Figure, image: NDArray[np.uint8], mapped: NDArray[np.uint8], halo_px: int
) -> None:
    side, own = image.shape[0], image.shape[0] / 2
    halo = side / 16  # wider than the real one, so that it is seen
    axes = [figure.add_axes(place) for place in ((0.01, 0.42, 0.3, 0.52), (0.69, 0.42, 0.3, 0.52))]
    for one, picture in zip(axes, (image, mapped), strict=True):
        one.imshow(picture)
        one.axis("off")
    axes[0].set_title("image of any size", fontsize=11)
    axes[1].set_title("one map, as of the whole image", fontsize=11)
    middle = []
    for rank, colour in enumerate(RANKS):
        row, col = divmod(rank, 2)
        top, left = row * own, col * own
        corner = left, top
        axes[0].add_patch(Rectangle(corner, own, own, fill=False, ec=colour, lw=2.5))
        one = figure.add_axes((0.365 + 0.145 * col, 0.70 - 0.27 * row, 0.12, 0.21))
        one.imshow(image)
        one.set_xlim(max(left - halo, 0), min(left + own + halo, side))
        one.set_ylim(min(top + own + halo, side), max(top - halo, 0))
        one.add_patch(Rectangle(corner, own, own, fill=False, ec=colour, lw=2))
        one.set(xticks=[], yticks=[])
        one.spines[:].set(color=colour, linestyle="--", linewidth=1.5)
        one.set_title(f"rank {rank}", fontsize=9, color=colour, pad=3)
        middle.append(one)
    _arrow(figure, axes[0], middle[0])
    _arrow(figure, middle[1], axes[1])
    words = f"tiles: what a rank owns, and a halo ({halo_px} px here)"
    figure.text(0.5, 0.955, words, ha="center", fontsize=11)


def _arrow(figure: Figure, start: Axes, end: Axes) -> None:
    y = 0.5 if start.get_position().height > 0.3 else -0.15
    to = 0.5 if end.get_position().height > 0.3 else -0.15
    ends = start.transAxes, end.transAxes
    figure.add_artist(ConnectionPatch((1.02, y), (-0.03, to), *ends, arrowstyle="-|>", lw=1.5))


def _second_row(
    figure: Figure, image: NDArray[np.uint8], seams: NDArray[np.float64], ours: NDArray[np.float64]
) -> None:
    scale = image.shape[0] / 2048
    rows = slice(round(PART.row * scale), round((PART.row + PART.height) * scale))
    cols = slice(round(PART.col * scale), round((PART.col + PART.width) * scale))
    most = float(seams.max())
    panels: tuple[tuple[NDArray[Any], str], ...] = (
        (image[rows, cols], f"{PART.height} × {PART.width} px of the scene"),
        (seams, f"overlapping windows, blended: logits are off by up to {most:.2g}"),
        (ours, f"tilenet's tiles: by at most {float(ours.max()):.0e}"),
    )
    for number, (picture, title) in enumerate(panels):
        axes = figure.add_axes((0.06 + 0.33 * number, 0.01, 0.22, 0.32))
        axes.imshow(picture, cmap="magma", vmin=0, vmax=most / 2)  # of numbers, not of colours
        axes.axis("off")
        axes.set_title(title, fontsize=9)


if __name__ == "__main__":
    main()
