"""Layers and their effect on the pixel grid: the single list that all rooms read.

A network is a flat tuple of these frozen layers. The halo walk, the parameter counts, the memory
model and `tilenet.model.network`, which builds the modules, all read the very same tuple, so the
layers that were counted are those that run. Maps lie on one grid along rows and along columns, so
each method speaks of one axis and counts in *cells*, the pixels of a feature map. Where a kernel is
not square, it speaks of rows, and that of `across` of columns.

Most layers take the map of the layer before. A `Stash` keeps that map under a name; a `Join`, a
`Cellwise` and an `Expand` take stashed maps too, each of them once.

A `GlobalPool` makes a map of a few cells out of the whole image's, and the layers behind it work on
these cells, alike on every tile, until a gate or an `Expand` brings them back to the pixels. Such a
map is called *whole* here: its grid has stride 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, prod
from typing import Any, ClassVar, Literal, TypeVar

from tilenet.geometry.grid import HALF, WHOLE, Grid

T = TypeVar("T")
# An operator's name, such as `mul.Tensor`, and its arguments, which are numbers, words, None, and
# tuples: ("value", n) for the value n; ("size", n, letters) for n times the batch, rows and columns
# among the letters B, H, W; ("list", ...); ("named", name, argument).
Step = tuple[Any, ...]
HeldWeight = tuple[str, tuple[int, ...], bool]  # name, shape, whether it is trained


@dataclass(frozen=True)
class Layer:
    """One layer; by itself the identity on the pixel grid."""

    in_channels: int
    out_channels: int

    kind: ClassVar[str] = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stashed maps that it takes besides the map of the layer before."""
        return ()

    def size(self, cells: int, *stashed: int) -> int:
        """Return the number of output cells, from the cells of the input and of stashed maps."""
        return cells

    def divides(self, cells: int) -> bool:
        """Whether the layer's windows fit `cells` cells without a remainder being dropped."""
        return True

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and last input cell that the output cells `first` to `last` look at.

        The map is taken as endless: the answer may lie outside of it, where padding stands.
        """
        return first, last

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        """Return the output's grid, from those of the input and of the stashed maps."""
        return grid

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return 0


def walk(
    layers: tuple[Layer, ...], start: T, through: Callable[[Layer, T, tuple[T, ...]], T]
) -> list[T]:
    """Follow a value through the layers, forwards: that of the input, then of each output.

    Args:
        through: Function of a layer, the value of its input and those of the stashed maps that it
            takes; returns the value of its output.
    """
    values = [start]
    stashed: dict[str, T] = {}
    for layer in layers:
        if isinstance(layer, Stash):
            stashed[layer.name] = values[-1]
        values.append(through(layer, values[-1], tuple(stashed.pop(name) for name in layer.names)))
    return values


class _Windowed(Layer):
    """A layer in which output cell i looks at the window of cells from i · stride − padding on."""

    stride: int
    padding: int
    extra: int
    reach: int

    def size(self, cells: int, *stashed: int) -> int:
        return (cells + self._padded - self.reach - 1) // self.stride + 1

    def divides(self, cells: int) -> bool:
        return (cells + self._padded - self.reach - 1) % self.stride == 0

    def needs(self, first: int, last: int) -> tuple[int, int]:
        start = first * self.stride - self.padding
        return start, last * self.stride - self.padding + self.reach

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        more = (self._padded - self.reach - 1 + self.stride) // self.stride
        return grid.scaled(grid.stride * self.stride, more)

    @property
    def _padded(self) -> int:
        return 2 * self.padding + self.extra


@dataclass(frozen=True)
class Conv(_Windowed):
    """Convolution; with `kernel` 1 it is the head that turns channels into classes.

    Attributes:
        padding: Zeros on each side.
        groups: Groups of channels that are convolved apart.
        extra: Further zeros below and on the right.
        cols: Kernel, dilation and padding along columns, where they differ from those along rows.
        edge: Values of the padding: zeros, the cells at the edge, or the map reflected there.
        weights, steps: Weights and steps of a kernel that is computed (see `Cellwise`).
    """

    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    bias: bool = False
    groups: int = 1
    extra: int = 0
    cols: tuple[int, ...] = ()
    edge: Literal["zeros", "replicate", "reflect"] = "zeros"
    weights: tuple[HeldWeight, ...] = ()
    steps: tuple[Step, ...] = ()

    kind: ClassVar[str] = "conv"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Cells between the first and the last cell of the kernel's window."""
        return self.dilation * (self.kernel - 1)

    @property
    def keeps_size(self) -> bool:
        """Whether each output cell stands where an input cell stands."""
        same = 2 * self.padding == self.reach and self.extra == 0
        return self.stride == 1 and self.kernel % 2 == 1 and same

    @property
    def is_square(self) -> bool:
        """Whether rows and columns are treated alike."""
        return not self.cols

    @property
    def along_cols(self) -> "Conv":
        """The same with a square kernel, as wide as this one."""
        if not self.cols:
            return self
        kernel, dilation, padding = self.cols
        return replace(self, kernel=kernel, dilation=dilation, padding=padding, cols=())

    @property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Channels out and in, rows and columns of the kernel."""
        wide = self.in_channels // self.groups
        return self.out_channels, wide, self.kernel, self.along_cols.kernel

    @property
    def num_parameters(self) -> int:
        trained = sum(prod(shape) for _, shape, trained in self.weights if trained)
        numbers = trained if self.steps else prod(self.kernel_shape)
        return numbers + (self.out_channels if self.bias else 0)


@dataclass(frozen=True)
class TransposedConv(Layer):
    """Transposed convolution: cell i of the input spreads over output cells i·s − p … + k − 1."""

    kernel: int = 2
    stride: int = 2
    padding: int = 0
    output_padding: int = 0
    bias: bool = False
    groups: int = 1

    kind: ClassVar[str] = "transposed"

    def size(self, cells: int, *stashed: int) -> int:
        return (cells - 1) * self.stride - 2 * self.padding + self.kernel + self.output_padding

    def needs(self, first: int, last: int) -> tuple[int, int]:
        # o = i·s − p + t with 0 ≤ t < k, solved for i
        start = -((self.kernel - 1 - self.padding - first) // self.stride)
        return start, (last + self.padding) // self.stride

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        more = self.size(1) - self.stride
        return grid.scaled(grid.stride / self.stride, more)

    @property
    def num_parameters(self) -> int:
        weights = self.in_channels * self.out_channels * self.kernel**2 // self.groups
        return weights + (self.out_channels if self.bias else 0)


@dataclass(frozen=True)
class Pool(_Windowed):
    """Maximum or average of a window of cells; or blocks of cells made one by their corners.

    With `corners` a whole map is made smaller bilinearly, so that its outermost cells' middles stay
    the outermost (`align_corners=True`): between places of each block, by its place on the map.

    Attributes:
        padding: Cells on each side that are never the maximum, or count as zeros.
        extra: Further ones below and on the right, as torch's `ceil_mode` has them.
        counts_padding: Whether an average counts padded cells; else only the map's cells.
    """

    kernel: int = 2
    stride: int = 2
    padding: int = 0
    mode: Literal["max", "average", "corners"] = "max"
    extra: int = 0
    counts_padding: bool = True

    kind: ClassVar[str] = "pool"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Cells between the first and the last cell of the window."""
        return self.kernel - 1

    @property
    def in_blocks(self) -> bool:
        """Whether it is the maximum of blocks of 2 × 2 cells, which has an operator of its own."""
        blocks = self.kernel == self.stride == 2 and self._padded == 0
        return self.mode == "max" and blocks


@dataclass(frozen=True)
class Upsample(Layer):
    """Nearest, bilinear or bicubic enlargement; `shuffle`: channels side by side, in factor² cells.

    Attributes:
        corners: Whether the outermost cells' middles stay the outermost (`align_corners=True`),
            so that places depend on the size of the whole map; else all cells keep their place.
    """

    factor: int = 2
    mode: Literal["nearest", "bilinear", "bicubic", "shuffle"] = "nearest"
    corners: bool = False

    kind: ClassVar[str] = "upsample"

    def size(self, cells: int, *stashed: int) -> int:
        return cells * self.factor

    def needs(self, first: int, last: int) -> tuple[int, int]:
        if self.mode not in ("bilinear", "bicubic"):
            return first // self.factor, last // self.factor
        # Output cell o takes from (o + 1/2)/f − 1/2: the cell below that and, unless it falls
        # exactly on a cell, the one above. With `corners` that is moved by less than half a cell.
        # Bicubic takes one more on each side; here always, since needed cells rise with cells.
        moved = HALF if self.corners else 0
        low = Fraction(2 * first + 1, 2 * self.factor) - HALF - moved
        high = Fraction(2 * last + 1, 2 * self.factor) - HALF + moved
        more = int(self.mode == "bicubic")
        return floor(low) - more, ceil(high) + more

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        return replace(grid, stride=grid.stride / self.factor)


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over cells.

    Attributes:
        scope: Cells of its statistics (see `halo.norm_context`); `frozen`, of batch norm only: its
            running statistics, which do not change.
        epsilon: Number that is added to variances.
        momentum: Share of a step's statistics in batch norm's running ones.
    """

    norm: Literal["instance", "group", "batch"] = "instance"
    scope: Literal["image", "tile", "frozen"] = "image"
    groups: int = 1
    affine: bool = False
    epsilon: float = 1e-5
    momentum: float = 0.1

    kind: ClassVar[str] = "norm"

    @property
    def num_parameters(self) -> int:
        return 2 * self.out_channels if self.affine else 0


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of whole channels (`Dropout2d`), of single cells, or of whole samples (drop path)."""

    probability: float = 0.1
    drops: Literal["channels", "cells", "samples"] = "channels"

    kind: ClassVar[str] = "dropout"


@dataclass(frozen=True)
class Activation(Layer):
    """A rectifier, which may write over its input.

    Attributes:
        slope: Slope of the leaky rectifier below 0.
    """

    slope: float = 0.01
    function: Literal["leaky_relu", "relu", "relu6"] = "leaky_relu"

    kind: ClassVar[str] = "activation"


@dataclass(frozen=True)
class Stash(Layer):
    """Keeps the map under a name for the layer that takes it.

    Attributes:
        sizes: Whether only the map's height and width are kept.
    """

    name: str = ""
    sizes: bool = False

    kind: ClassVar[str] = "stash"


class Joining(Layer):
    """A layer that takes the map and stashed ones, cell by cell.

    Attributes:
        kept: Names of the stashed maps, in order.
        place: Place of the map among the stashed ones, from 0.
    """

    kept: tuple[str, ...]
    place: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.kept

    def size(self, cells: int, *stashed: int) -> int:
        return max(cells, *stashed) if stashed else cells

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        return next((other for other in (grid, *stashed) if not other.whole), grid)


@dataclass(frozen=True)
class Join(Joining):
    """Joins the map with stashed ones.

    Attributes:
        kept: Names of the stashed maps, in order.
        how: `concatenate` along the channels; `add`, `multiply`, where a whole map of one cell
            counts for all cells (a gate); `take` the stashed map instead of the map.
        place: Place of the map among the stashed ones, from 0.
        fit: Remedy where sizes of two concatenated maps differ: `crop` cuts the stashed map evenly
            on both sides (valid networks), `pad` adds zeros below and right of the other (odd
            sizes, approximate).
    """

    kept: tuple[str, ...] = ()
    how: Literal["concatenate", "add", "multiply", "take"] = "concatenate"
    place: int = 0
    fit: Literal["crop", "pad"] = "pad"

    kind: ClassVar[str] = "join"

    def size(self, cells: int, *stashed: int) -> int:
        if self.how == "concatenate":
            return min(cells, *stashed) if self.fit == "crop" else stashed[0]
        return stashed[0] if self.how == "take" else max(cells, *stashed)

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        return stashed[0] if self.how == "take" else super().grid(grid, *stashed)


@dataclass(frozen=True)
class Cellwise(Joining):
    """Makes each cell of the same cells of maps, and of weights and numbers, by operators of torch.

    Values are numbered: the maps in their order, the weights, then the result of each step, of
    which the last is the map. A whole map of one cell counts for all cells.

    Attributes:
        kept: Names of the stashed maps, in order.
        place: Place of the map among the stashed ones, from 0.
        channels: Channels of each stashed map.
        single: Numbers of the maps that are whole maps of one cell.
        weights: Name and shape of each weight, and whether it is trained.
        steps: The operators, in the order in which they run.
    """

    kept: tuple[str, ...] = ()
    place: int = 0
    channels: tuple[int, ...] = ()
    single: tuple[int, ...] = ()
    weights: tuple[HeldWeight, ...] = ()
    steps: tuple[Step, ...] = ()

    kind: ClassVar[str] = "cellwise"

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for _, shape, trained in self.weights if trained)


@dataclass(frozen=True)
class GlobalPool(Layer):
    """Averages over the whole image, a whole map of `bins` × `bins` cells (adaptive pooling).

    Attributes:
        takes: The mean; or, with one bin, the sum or the largest value.
        shared: Whether all cells of the largest value share its gradient, as in torch's `amax`;
            else the first one has it, row by row, as in `adaptive_max_pool2d`.
    """

    bins: int = 1
    takes: Literal["mean", "sum", "maximum"] = "mean"
    shared: bool = False

    kind: ClassVar[str] = "global_pool"

    def size(self, cells: int, *stashed: int) -> int:
        return self.bins

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        return WHOLE


@dataclass(frozen=True)
class Expand(Layer):
    """Enlarges a whole map to the size of another map, which a `Stash` records."""

    name: str = ""
    mode: Literal["nearest", "bilinear"] = "bilinear"
    corners: bool = False

    kind: ClassVar[str] = "expand"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def size(self, cells: int, *stashed: int) -> int:
        return stashed[0]

    def grid(self, grid: Grid, *stashed: Grid) -> Grid:
        return stashed[0]


def across(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers as columns see them: with square kernels, as wide as theirs."""
    if all(not isinstance(layer, Conv) or layer.is_square for layer in layers):
        return layers
    return tuple(layer.along_cols if isinstance(layer, Conv) else layer for layer in layers)
