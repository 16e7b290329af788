"""Draw a sweep: what each map of a small U-Net has done, computes and keeps, strip by strip.

    python docs/sweep.py docs/sweep.png

docs/sweep.png, which docs/halo.md shows, was drawn so.
"""

import sys
from itertools import islice

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from tilenet.geometry.layers import Activation, Join, Pool
from tilenet.geometry.maps import map_grids
from tilenet.geometry.sweep import Strip, strip_edges, sweep
from tilenet.geometry.unet import UNetOptions, unet_layers

ROWS, STRIP_ROWS, SHOWN = 192, 32, (1, 3, 5)  # strips are counted from 0
GONE, NOW, KEPT = "#d9d9d9", "#0072b2", "#e69f00"
LAYERS = unet_layers(UNetOptions(poolings=2, base=4, bands=4, classes=2))


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(10.5, 4.2), dpi=96, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    strips = list(islice(sweep(LAYERS, strip_edges(ROWS, STRIP_ROWS)), max(SHOWN) + 1))
    for place, number in enumerate(SHOWN, start=1):
        axes = figure.add_subplot(1, len(SHOWN), place)
        _draw(axes, strips[number - 1], strips[number])
        axes.set_title(f"strip {number + 1}", fontsize=10)
        axes.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("row of the image", fontsize=9)
    figure.legend(
        handles=[
            Patch(color=GONE, label="computed before, gone"),
            Patch(color=KEPT, label="kept from before: later rows look at it"),
            Patch(color=NOW, label="computed now, once"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.subplots_adjust(left=0.06, right=0.99, top=0.92, bottom=0.17, wspace=0.14)
    canvas.draw()  # type: ignore[no-untyped-call]
    drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    Image.fromarray(drawn).convert("RGB").quantize(32).save(sys.argv[1], optimize=True)


def _draw(axes: Axes, before: Strip, strip: Strip) -> None:
    """A bar for the image and for each map that convolutions or pools look at, and the logits."""
    shown = [
        number + 1
        for number, layer in enumerate(LAYERS)
        if isinstance(layer, Activation | Join | Pool) or number + 1 == len(LAYERS)
    ]
    strides = [float(grid.stride) for grid in map_grids(LAYERS)]
    computed = [strip.image, *(rows.out for rows in strip.layers)]
    for place, number in enumerate([0, *shown]):
        stride, (first, stop) = strides[number], computed[number]
        kept = before.held[number][0]
        for low, high, colour in ((0, kept, GONE), (kept, first, KEPT), (first, stop, NOW)):
            axes.bar(place, (high - low) * stride, bottom=low * stride, color=colour)
    axes.set_xticks([0, len(shown)], ["image", "logits"])
    axes.set_ylim(ROWS, 0)


if __name__ == "__main__":
    main()
