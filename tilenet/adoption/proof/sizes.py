"""Run a module on large images and many, without their values: it runs the same operators.

A branch on a size or a number of images may lie beyond those that are run with values.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilenet.errors import TilenetError

__all__ = ["prove_sizes"]

IMAGES, MOST_IMAGES = 2, 64  # a batch of one may lie in memory otherwise
SIDE_PX = 128  # at least, of the small images
TIMES = 64  # sides of the large ones
# Where a map lies in memory decides whether it is copied, and how it is multiplied.
LAYING = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "copy_", "detach",
    "empty", "empty_like", "empty_strided", "expand", "permute", "reshape", "resize_", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view",
})  # fmt: skip
PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})


def prove_sizes(module: nn.Module, bands: int, unit_px: int) -> None:
    """Compare the operators of small images with those of large ones, and of many.

    A module whose operators need values, or devices that it names, is left alone.

    Args:
        module: The module in float64, without values: on the device `meta`.
        bands: Channels of the image.
        unit_px: Divisor of the images' sizes.

    Raises:
        TilenetError: Some run at one of the sizes alone.
    """
    side = -(-SIDE_PX // unit_px) * unit_px
    small = IMAGES, bands, side, 2 * side
    large = (IMAGES, bands, TIMES * side, TIMES * 2 * side), (MOST_IMAGES, *small[1:])
    try:
        of_small = _operators(module, small)
        others = [(shape, _operators(module, shape)) for shape in large]
    except Exception:  # a user's forward may need values
        return
    for shape, names in others:
        if apart := sorted((names - of_small) + (of_small - names)):
            raise TilenetError(
                f"a network runs the same operators at all sizes and for any number of images "
                f"({type(module).__name__}, {' and '.join(map(_words, (small, shape)))}: "
                f"{apart[0]} differs); use one without such a branch"
            )


def _words(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} images of {shape[2]} × {shape[3]} px"


def _operators(module: nn.Module, shape: tuple[int, ...]) -> Counter[str]:
    """How often each operator is run, but for those of the memory's order."""
    noted = _Noted()
    with torch.no_grad(), torch.device("meta"), noted:
        module(torch.empty(shape, dtype=torch.float64))
    return noted.names


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in LAYING | PRODUCTS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))
