"""U-Nets as flat lists of layers, and the paper's four models.

The structure is that of torchgpipe's "simplified U-Net" (benchmarks/models/unet); its numbers of
layers and parameters are the paper's to the digit: base channels double with every pooling, the
bottleneck and the decoder hand on half of the channels that they work with.
"""

from dataclasses import dataclass
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Activation,
    Conv,
    Dropout,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)

Padding = Literal["same", "valid"]
Upsampling = Literal["nearest", "bilinear", "transposed"]
NormKind = Literal["none", "instance", "group", "batch"]
NormScope = Literal["image", "tile"]

MOST_CONVOLUTIONS = 100


@dataclass(frozen=True)
class UNetOptions:
    """A U-Net's shape.

    Attributes:
        poolings: Number of poolings P; the paper counts levels, L = P + 1.
        convolutions: Convolutions per level.
        base: Channels of the first level; even, since the last level works with half of them.
        bands: Input channels.
        classes: Output channels.
        kernel: Width of the convolutions, odd.
        padding: `same` keeps sizes by zeros at the edges; `valid` is the 2015 U-Net.
        upsampling: Method of the decoder to enlarge maps.
        norm: Normalisation behind each convolution.
        norm_scope: Statistics over the whole image, or over each tile (approximate).
        groups: Groups of a group norm; where they do not divide the channels, the next smaller
            number that does.
        dropout: Probability that a channel is dropped; 0 leaves the layers out.
        bias: Whether convolutions add a constant; None: only where no norm follows.
    """

    poolings: int = 4
    convolutions: int = 2
    base: int = 64
    bands: int = 4
    classes: int = 1
    kernel: int = 3
    padding: Padding = "same"
    upsampling: Upsampling = "nearest"
    norm: NormKind = "none"
    norm_scope: NormScope = "image"
    groups: int = 8
    dropout: float = 0.0
    bias: bool | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "poolings", "convolutions", "bands", "classes", "groups")
        if self.poolings > 10:
            raise TilenetError(
                f"a network has at most 10 poolings (poolings: {self.poolings}): with 10 its "
                "tiles are already multiples of 1024 px; nearest: 10"
            )
        if self.convolutions > MOST_CONVOLUTIONS:
            raise TilenetError(
                f"a level has at most {MOST_CONVOLUTIONS} convolutions (convolutions: "
                f"{self.convolutions}); two are usual"
            )
        if self.base < 2 or self.base % 2:
            raise TilenetError(
                f"base channels must be even and at least 2, since the last level works with half "
                f"of them (base: {self.base}); nearest: {max(2, self.base // 2 * 2)}"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise TilenetError(
                f"the kernel must be odd, so that a pixel lies in its middle (kernel: "
                f"{self.kernel}); nearest: {max(1, self.kernel + 1)}"
            )
        if not 0 <= self.dropout < 1:
            raise TilenetError(
                f"dropout is a probability of at least 0 and below 1 (dropout: {self.dropout})"
            )


def _at_least_one(options: UNetOptions, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise TilenetError(f"{name} must be at least 1 ({name}: {getattr(options, name)})")


def _paper(poolings: int, convolutions: int) -> UNetOptions:
    return UNetOptions(
        poolings=poolings,
        convolutions=convolutions,
        base=64,
        bands=4,
        classes=1,
        norm="instance",
        dropout=0.1,
        bias=False,
    )


PRESETS: dict[str, UNetOptions] = {
    "small": _paper(5, 2),
    "medium-1": _paper(5, 5),
    "medium-2": _paper(6, 2),
    "large": _paper(7, 2),
}

# The paper puts the number of poolings where its formula counts levels, so its halo is half of
# these networks' context (see halo.epsilon_px).
PAPER_LEVELS: dict[str, int] = {name: preset.poolings for name, preset in PRESETS.items()}


def unet_layers(options: UNetOptions) -> tuple[Layer, ...]:
    """Return the network as a flat list of single layers, in the order in which they run."""
    layers: list[Layer] = []
    bias = options.norm == "none" if options.bias is None else options.bias
    fit: Literal["crop", "pad"] = "crop" if options.padding == "valid" else "pad"

    def convolve(channels: int, middle: int, out: int) -> None:
        for index in range(options.convolutions):
            wide = out if index == options.convolutions - 1 else middle
            layers.extend(_cell(options, channels, wide, bias))
            channels = wide

    channels = options.bands
    for level in range(options.poolings):
        width = options.base * 2**level
        convolve(channels, width, width)
        layers.append(Stash(width, width, name=f"skip{level}"))
        layers.append(Pool(width, width))
        channels = width
    convolve(channels, 2 * channels, channels)
    for level in reversed(range(options.poolings)):
        if options.upsampling == "transposed":
            layers.append(TransposedConv(channels, channels, bias=bias))
        else:
            layers.append(Upsample(channels, channels, mode=options.upsampling))
        joined = 2 * channels
        layers.append(Join(channels, joined, kept=(f"skip{level}",), fit=fit))
        convolve(joined, channels // 2, channels // 2)
        channels //= 2
    layers.append(Conv(channels, options.classes, kernel=1, bias=bias))
    return tuple(layers)


def _cell(options: UNetOptions, channels: int, wide: int, bias: bool) -> list[Layer]:
    padding = options.kernel // 2 if options.padding == "same" else 0
    cell: list[Layer] = [Conv(channels, wide, kernel=options.kernel, padding=padding, bias=bias)]
    if options.dropout > 0:
        cell.append(Dropout(wide, wide, probability=options.dropout))
    if options.norm != "none":
        cell.append(_norm(options, options.norm, wide))
    cell.append(Activation(wide, wide))
    return cell


def _norm(options: UNetOptions, norm: Literal["instance", "group", "batch"], channels: int) -> Norm:
    groups = min(options.groups, channels)
    while channels % groups:
        groups -= 1
    return Norm(
        channels,
        channels,
        norm=norm,
        scope=options.norm_scope,
        groups=groups if norm == "group" else 1,
        # as in the paper's networks, instance norm has no weights of its own
        affine=norm != "instance",
    )
