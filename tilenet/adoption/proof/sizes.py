"""Run a module on large images and on many, without their values: it runs the same operators.

Operators are given the same numbers, too, unless these differ among small images.

A branch on a size or a number of images may lie beyond those that are run with values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilenet.errors import TilenetError

SIDE_PX = 128  # at least, of the small images
# Images of a batch, rows and columns, in sides; the first are compared with all others, the second
# have no size in common with them. As in training, and as in maps.
TRAINED = (2, 1, 2), (3, 3, 4), (33, 1, 2), (2, 160, 1), (2, 3, 64)
EVALUATED = (1, 1, 2), (1, 3, 4), (1, 12, 16), (1, 160, 1), (1, 3, 64)
# Where a map lies in memory decides whether it is copied, and how it is multiplied.
LAYING = frozenset({
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "copy_", "detach",
    "empty", "empty_like", "empty_strided", "expand", "permute", "reshape", "resize_", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view",
})  # fmt: skip
PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})

_Run = list[tuple[str, list[float]]]  # names of operators, and the numbers that each is given


def prove_sizes(
    module: nn.Module, modes: Mapping[nn.Module, bool], bands: int, unit_px: int
) -> None:
    """Compare the operators of small images with those of large ones, and of many.

    A module whose operators need values, or devices that it names, is not looked at.

    Args:
        module: The module in float64, in evaluation; it loses its values (torch's device `meta`).
        modes: Whether each of its parts trains in training.
        bands: Channels of the image.
        unit_px: Divisor of the images' sizes.

    Raises:
        TilenetError: Some run at one of the sizes alone.
    """
    side = -(-SIDE_PX // unit_px) * unit_px
    shapes = [
        [(images, bands, rows * side, cols * side) for images, rows, cols in of_mode]
        for of_mode in (EVALUATED, TRAINED)
    ]
    try:
        module.to("meta")
        apart = _apart(module, shapes[0])
        for part, training in modes.items():
            part.training = training
        apart = apart or _apart(module, shapes[1])
    except Exception:  # a user's forward may need values
        return
    if apart:
        name, *sizes = apart
        raise TilenetError(
            f"a network runs the same operators at all sizes and for any number of images "
            f"({type(module).__name__}, {' and '.join(sizes)}: {name} differs); use one without "
            "such a branch"
        )


def _apart(module: nn.Module, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """An operator in which some shape's images differ from the first, and both; empty: none."""
    small, other, *_ = runs = [_operators(module, shape) for shape in shapes]
    for shape, run in zip(shapes[1:], runs[1:], strict=True):
        if not _difference(small, other, run):
            continue
        # Once more, without the operators that make what a module keeps of a size.
        again = [_in_second_run(module, each) for each in (*shapes[:2], shape)]
        if differs := _difference(*again):
            return [differs, _words(shapes[0]), _words(shape)]
    return []


def _difference(small: _Run, other: _Run, large: _Run) -> str | None:
    """Name of an operator that small images and large ones do not run alike; None: they do.

    A number given to an operator must be the same, too, if images of two small sizes have the same:
    if these differ, as 1 / width does, the proof by values tells whether that is right.
    """
    names = [[name for name, _ in run] for run in (small, other, large)]
    counts = Counter(names[0]), Counter(names[2])
    if differs := sorted((counts[0] - counts[1]) + (counts[1] - counts[0])):
        return differs[0]
    if names[0] == names[1] == names[2]:
        for (name, a), (_, b), (_, c) in zip(small, other, large, strict=True):
            # Torch leaves out what has its default value.
            if len(a) == len(b) and (len(c) != len(a) or any(map(_alone, a, b, c))):
                return name
    return None


def _alone(small: float, other: float, large: float) -> bool:
    return repr(small) == repr(other) != repr(large)  # NaN too is equal to itself


def _in_second_run(module: nn.Module, shape: tuple[int, ...]) -> _Run:
    _operators(module, shape)
    return _operators(module, shape)


def _words(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} image{'s' * (shape[0] > 1)} of {shape[2]} × {shape[3]} px"


def _operators(module: nn.Module, shape: tuple[int, ...]) -> _Run:
    """The operators that are run, but for those of the memory's order."""
    noted = _Noted()
    with torch.no_grad(), torch.device("meta"), noted:
        module(torch.empty(shape, dtype=torch.float64))
    return noted.run


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run: _Run = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in LAYING | PRODUCTS:
            numbers = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (int, float))
            ]
            self.run.append((name, numbers))
        return func(*args, **(kwargs or {}))
