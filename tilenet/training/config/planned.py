"""Whether a plan holds for a run: for its network, and for images as large as its."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.plan import OwnNetwork, read_plan


def check_plan(
    path: str,
    options: UNetOptions | None,
    layers: tuple[Layer, ...],
    sizes: Sequence[tuple[int, int]],
    *,
    rotations: bool,
) -> None:
    """Refuse a plan of another network, or of smaller images (or crops).

    Args:
        options: Options of tilenet's own network; None: it is a module.
        layers: The network's layers.
        sizes: Heights and widths of images or crops.
        rotations: Whether these are turned.

    Raises:
        TilenetError: The plan is of another run; the error names the difference.
    """
    planned = read_plan(Path(path)).question
    unlike = _unlike(planned.options, options, layers)
    if unlike:
        key, planned_value, run_value = unlike
        raise TilenetError(
            f"a plan must be of the network that is trained ({key} in {path}: {planned_value}, "
            f"in the run: {run_value}); plan this network, or change the run"
        )
    for size in sizes:
        if size[0] > planned.image[0] or size[1] > planned.image[1]:
            raise TilenetError(
                f"a plan holds for images up to the size that it was made for ({path}: "
                f"{planned.image[0]} × {planned.image[1]} px, an image or crop: {size[0]} × "
                f"{size[1]} px); plan for the largest image"
                + ", and as it lies after a quarter turn"
                * rotations
            )


def _unlike(
    planned: UNetOptions | OwnNetwork, options: UNetOptions | None, layers: tuple[Layer, ...]
) -> tuple[str, Any, Any] | None:
    """The first difference between the planned network and the run's: its name and both values."""
    if isinstance(planned, UNetOptions) and options is not None:
        pairs = [
            (option.name, getattr(planned, option.name), getattr(options, option.name))
            for option in fields(options)
        ]
    elif isinstance(planned, OwnNetwork) and options is None:
        pairs = [("layers", len(planned.layers), len(layers))]
        pairs += [
            (f"layer {number}", planned_layer, layer)
            for number, (planned_layer, layer) in enumerate(
                zip(planned.layers, layers, strict=False)
            )
        ]
    else:
        kinds = "a module", "a U-Net of tilenet's own"
        pairs = [("network", *(kinds if options is not None else reversed(kinds)))]
    return next((pair for pair in pairs if pair[1] != pair[2]), None)
