"""What one layer does to the pixel grid: the one list that everything reads.

A network is a flat tuple of these frozen layers. The halo walk, the parameter counts, the memory
model and `tilenet.model.network`, which builds the modules, all read the very same tuple, so what
was computed beforehand is what runs. Rows and columns are treated alike (kernels are square), so
each method speaks of one axis and counts in *cells*, the pixels of a feature map.

Whether a list of layers is a network at all: what is read from a file may be anything.

What is refused here would end in an error of torch, in endless memory, or in a wait without end.
"""

from dataclasses import Field, asdict, dataclass, fields
from fractions import Fraction
from math import isfinite
from typing import Any, ClassVar, Literal, get_args

from tilenet.errors import TilenetError

__all__ = [
    "Activation",
    "Conv",
    "Dropout",
    "Grid",
    "Layer",
    "Norm",
    "Pool",
    "Pop",
    "Stash",
    "TransposedConv",
    "Upsample",
    "check_layers",
    "layer_from_json",
    "layer_to_json",
]


@dataclass(frozen=True)
class Grid:
    """Where the cells of a feature map lie on the input's pixels.

    Attributes:
        stride: Distance between neighbouring cells, in input pixels.
        center: Centre of cell 0, in input pixels (the first input pixel's centre is 0).
    """

    stride: Fraction = Fraction(1)
    center: Fraction = Fraction(0)


@dataclass(frozen=True)
class Layer:
    """One layer; by itself the identity on the pixel grid."""

    in_channels: int
    out_channels: int

    kind: ClassVar[str] = ""

    def size(self, cells: int) -> int:
        """Number of cells that come out of `cells` cells."""
        return cells

    def divides(self, cells: int) -> bool:
        """Whether the layer's windows fit `cells` cells without a remainder being dropped."""
        return True

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """First and last input cell that the output cells `first` to `last` look at.

        The map is taken as endless: the answer may lie outside of it, where padding stands.
        """
        return first, last

    def grid(self, grid: Grid) -> Grid:
        """Where the output's cells lie, given where the input's lie."""
        return grid

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return 0


@dataclass(frozen=True)
class Conv(Layer):
    """Convolution; with `kernel` 1 it is the head that turns channels into classes."""

    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    bias: bool = False

    kind: ClassVar[str] = "conv"

    @property
    def reach(self) -> int:
        """Cells between the first and the last cell of the kernel's window."""
        return self.dilation * (self.kernel - 1)

    @property
    def keeps_size(self) -> bool:
        """Whether each output cell stands where an input cell stands."""
        return self.stride == 1 and self.kernel % 2 == 1 and 2 * self.padding == self.reach

    def size(self, cells: int) -> int:
        return (cells + 2 * self.padding - self.reach - 1) // self.stride + 1

    def divides(self, cells: int) -> bool:
        return (cells + 2 * self.padding - self.reach - 1) % self.stride == 0

    def needs(self, first: int, last: int) -> tuple[int, int]:
        start = first * self.stride - self.padding
        return start, last * self.stride - self.padding + self.reach

    def grid(self, grid: Grid) -> Grid:
        shift = Fraction(self.reach, 2) - self.padding
        return Grid(grid.stride * self.stride, grid.center + grid.stride * shift)

    @property
    def num_parameters(self) -> int:
        weights = self.in_channels * self.out_channels * self.kernel**2
        return weights + (self.out_channels if self.bias else 0)


@dataclass(frozen=True)
class TransposedConv(Layer):
    """Transposed convolution: cell i of the input spreads over output cells i·s − p … + k − 1."""

    kernel: int = 2
    stride: int = 2
    padding: int = 0
    output_padding: int = 0
    bias: bool = False

    kind: ClassVar[str] = "transposed"

    def size(self, cells: int) -> int:
        return (cells - 1) * self.stride - 2 * self.padding + self.kernel + self.output_padding

    def needs(self, first: int, last: int) -> tuple[int, int]:
        # o = i·s − p + t with 0 ≤ t < k, solved for i
        start = -((self.kernel - 1 - self.padding - first) // self.stride)
        return start, (last + self.padding) // self.stride

    def grid(self, grid: Grid) -> Grid:
        stride = grid.stride / self.stride
        shift = Fraction(self.kernel - 1, 2) - self.padding
        return Grid(stride, grid.center - stride * shift)

    @property
    def num_parameters(self) -> int:
        weights = self.in_channels * self.out_channels * self.kernel**2
        return weights + (self.out_channels if self.bias else 0)


@dataclass(frozen=True)
class Pool(Layer):
    """Maximum or average of a window of cells."""

    kernel: int = 2
    stride: int = 2
    padding: int = 0
    mode: Literal["max", "average"] = "max"

    kind: ClassVar[str] = "pool"

    @property
    def in_blocks(self) -> bool:
        """Whether it is the maximum of blocks of 2 × 2 cells, which has an operator of its own."""
        return self.mode == "max" and self.kernel == self.stride == 2 and not self.padding

    def size(self, cells: int) -> int:
        return (cells + 2 * self.padding - self.kernel) // self.stride + 1

    def divides(self, cells: int) -> bool:
        return (cells + 2 * self.padding - self.kernel) % self.stride == 0

    def needs(self, first: int, last: int) -> tuple[int, int]:
        start = first * self.stride - self.padding
        return start, last * self.stride - self.padding + self.kernel - 1

    def grid(self, grid: Grid) -> Grid:
        shift = Fraction(self.kernel - 1, 2) - self.padding
        return Grid(grid.stride * self.stride, grid.center + grid.stride * shift)


@dataclass(frozen=True)
class Upsample(Layer):
    """Nearest or bilinear enlargement (`align_corners=False`, cells keep their place)."""

    factor: int = 2
    mode: Literal["nearest", "bilinear"] = "nearest"

    kind: ClassVar[str] = "upsample"

    def size(self, cells: int) -> int:
        return cells * self.factor

    def needs(self, first: int, last: int) -> tuple[int, int]:
        if self.mode == "nearest":
            return first // self.factor, last // self.factor
        # Output cell o takes from (o + 1/2)/f − 1/2: the cell below that and, unless it falls
        # exactly on a cell, the one above.
        low = Fraction(2 * first + 1, 2 * self.factor) - Fraction(1, 2)
        high = Fraction(2 * last + 1, 2 * self.factor) - Fraction(1, 2)
        return low.__floor__(), high.__ceil__()

    def grid(self, grid: Grid) -> Grid:
        stride = grid.stride / self.factor
        return Grid(stride, grid.center - stride * Fraction(self.factor - 1, 2))


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation: `scope` says over what its statistics are taken (see `halo.norm_context`)."""

    norm: Literal["instance", "group", "batch"] = "instance"
    scope: Literal["image", "tile"] = "image"
    groups: int = 1
    affine: bool = False

    kind: ClassVar[str] = "norm"

    @property
    def num_parameters(self) -> int:
        return 2 * self.out_channels if self.affine else 0


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of whole channels (`Dropout2d`)."""

    probability: float = 0.1

    kind: ClassVar[str] = "dropout"


@dataclass(frozen=True)
class Activation(Layer):
    """Leaky rectifier, computed in place."""

    slope: float = 0.01

    kind: ClassVar[str] = "activation"


@dataclass(frozen=True)
class Stash(Layer):
    """Keeps the map under a name for the `Pop` of that name."""

    name: str = ""

    kind: ClassVar[str] = "stash"


@dataclass(frozen=True)
class Pop(Layer):
    """Concatenates the map with a stashed one, which comes second.

    Where sizes differ, `fit` says what is done: `crop` cuts the stashed map evenly on both sides
    (valid networks), `pad` adds zeros below and right of the other (odd sizes, approximate).
    """

    name: str = ""
    fit: Literal["crop", "pad"] = "pad"

    kind: ClassVar[str] = "pop"


KINDS: dict[str, type[Layer]] = {
    kind.kind: kind
    for kind in (Conv, TransposedConv, Pool, Upsample, Norm, Dropout, Activation, Stash, Pop)
}


def layer_to_json(layer: Layer) -> dict[str, Any]:
    """The layer as a plain dictionary; `kind` names its class."""
    return {"kind": layer.kind, **asdict(layer)}


def layer_from_json(entry: dict[str, Any]) -> Layer:
    """The layer that `layer_to_json` wrote.

    Raises:
        TilenetError: The entry is not a layer that this version knows.
    """
    kind = KINDS.get(str(entry.get("kind")))
    values = {key: value for key, value in entry.items() if key != "kind"}
    if kind is None or set(values) != {field.name for field in fields(kind)}:
        raise TilenetError(
            f"a layer must have a known kind and that kind's fields (got {entry}); "
            f"known kinds: {', '.join(KINDS)}"
        )
    return kind(**values)


MOST_LAYERS = 10_000
MOST_CHANNELS = 2**24
MOST_CELLS = 2**12  # of a kernel, a stride, a padding, a dilation


def check_layers(layers: tuple[Layer, ...], bands: int, classes: int) -> None:
    """Refuse layers that do not follow on one another.

    Raises:
        TilenetError: There are none or too many; a value has the wrong type or size; a layer takes
            other channels than the one before gives, or a skip is popped that nobody stashed.
    """
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TilenetError(
            f"a network has 1 to {MOST_LAYERS} layers (network.json: {len(layers)}); use another "
            "checkpoint"
        )
    skips: dict[str, int] = {}
    channels = bands
    for number, layer in enumerate(layers):
        wrong = next((f.name for f in fields(layer) if not _is_sound(layer, f)), None)
        if wrong is None and layer.in_channels != channels:
            wrong = "in_channels"
        if wrong is None and not _fits(layer, skips):
            wrong = "out_channels"
        if wrong is not None:
            raise TilenetError(
                f"layers must follow on one another (layer {number} of network.json, {layer.kind}: "
                f"{wrong} is {getattr(layer, wrong)!r}, it is given {channels} channels); use "
                "another checkpoint"
            )
        if isinstance(layer, Stash):
            skips[layer.name] = layer.out_channels
        channels = layer.out_channels
    if channels != classes or skips:
        raise TilenetError(
            f"a network gives one channel per class and pops every skip (network.json: {channels} "
            f"channels, {classes} classes, skips left: {', '.join(skips) or 'none'}); use another "
            "checkpoint"
        )


def _is_sound(layer: Layer, part: "Field[Any]") -> bool:
    """Whether a value has the type and a size of its field."""
    value, kind = getattr(layer, part.name), part.type
    if kind is int:
        most = MOST_CHANNELS if "channels" in part.name or part.name == "groups" else MOST_CELLS
        return type(value) is int and ("padding" not in part.name) <= value <= most
    if kind is float:
        return type(value) in (int, float) and isfinite(value) and abs(value) < 1e6
    if kind is bool:
        return type(value) is bool
    return isinstance(value, str) and (kind is str or value in get_args(kind))


def _fits(layer: Layer, skips: dict[str, int]) -> bool:
    """Whether a layer whose values are sound can be built; takes the skip that it pops."""
    same = layer.in_channels == layer.out_channels
    match layer:
        case Conv() | TransposedConv():
            padded = isinstance(layer, Conv) or layer.output_padding < layer.stride
            return padded and layer.num_parameters < 2**50
        case Pool():
            return same and 2 * layer.padding <= layer.kernel
        case Norm():
            return same and layer.out_channels % layer.groups == 0
        case Dropout():
            return same and 0 <= layer.probability < 1
        case Stash():
            return same and layer.name not in skips
        case Pop():
            return layer.out_channels == layer.in_channels + skips.pop(layer.name, -1)
    return same
