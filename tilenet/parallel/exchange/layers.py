"""Replace a network's layers by spatial ones, so that each rank holds its own window of each map.

Layers that look around themselves become layers that first exchange halos; norms with `scope:
image`, which need all pixels, become norms that sum over ranks (`norm.py`); all others stay.
Parameters stay those of the network, under the same names.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.layers import Conv, Layer, Norm, Pool, TransposedConv, Upsample
from tilenet.geometry.maps import map_grids
from tilenet.geometry.ownership import AxisShares, LayerHalo, halo_of, tiling_shares
from tilenet.geometry.tiles import Tiling
from tilenet.model.cellwise import kernel_of, taps_of
from tilenet.model.modules import block_max, take_cells
from tilenet.model.origin import Origin, origin_under_way
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.conv import Shape, convolve
from tilenet.parallel.exchange.copied import takes_copy
from tilenet.parallel.exchange.halo import HaloChannel, HaloExchange, extend, part_of

# A tag names a layer, a micro-batch and a direction, modulo these numbers: MPI guarantees 32 768
# tags only, and messages between two ranks with the same tag keep their order anyway.
TAG_LAYERS, TAG_MICRO_BATCHES, TAG_WAYS = 256, 64, 2


class SpatialContext:
    """Grids, shares and communicators for the halos that a rank's layers exchange.

    Args:
        layers: The network's layers.
        balance: Number of layers per partition.
        image_comm: The ranks that hold the same image, row by row of the grid. None: this rank
            alone, with zeros in place of halos (see `HaloChannel`).
        step_comm: All ranks of a step; only batch norm sums over them.
        device_mpi: Whether MPI takes device memory.

    Attributes:
        grids: Grids of the input and of each layer's output.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        balance: Sequence[int],
        image_comm: Intracomm | None,
        step_comm: Intracomm | None = None,
        *,
        device_mpi: bool = False,
    ) -> None:
        self.layers, self.grids = layers, map_grids(layers)
        self._ends = tuple(accumulate(balance))
        # One duplicate per partition: partitions compute in threads of their own.
        self._image_comms = [image_comm.Dup() if image_comm else None for _ in balance]
        self._step_comms = [step_comm.Dup() if step_comm else None for _ in balance]
        self._channels = [HaloChannel(comm, device_mpi=device_mpi) for comm in self._image_comms]
        self._shares: dict[tuple[int, int], tuple[tuple[AxisShares, ...], ...]] = {}
        self._halos: dict[tuple[int, int, int, int], LayerHalo] = {}

    def _partition(self, layer: int) -> int:
        return next(number for number, end in enumerate(self._ends) if layer < end)

    def norm_comm(self, layer: int, norm: str) -> Intracomm | None:
        """The ranks over which a norm sums."""
        if norm == "batch":
            return self._step_comms[self._partition(layer)]
        return self.image_comm(layer)

    def image_comm(self, layer: int) -> Intracomm | None:
        """The ranks that hold the same image."""
        return self._image_comms[self._partition(layer)]

    def shares(self, tiling: Tiling) -> tuple[tuple[AxisShares, ...], ...]:
        """The ranks' shares of each layer's maps, along rows and along columns."""
        size = tiling.extended
        if size not in self._shares:
            self._shares[size] = tiling_shares(self.layers, tiling)
        return self._shares[size]

    def exchange(self, layer: int) -> HaloExchange:
        """The layer's exchange of halos for the micro-batch that this thread computes."""
        origin = here()
        assert origin.tiling is not None
        tile = origin.tiles[0]  # all samples of a micro-batch stand at the same place
        where = (*origin.tiling.extended, layer, tile)
        if where not in self._halos:
            rows, cols = self.shares(origin.tiling)
            place = divmod(tile, origin.tiling.grid[1])
            self._halos[where] = halo_of(rows[layer], cols[layer], place)
        number = layer % TAG_LAYERS * TAG_MICRO_BATCHES + origin.micro_batch % TAG_MICRO_BATCHES
        channel = self._channels[self._partition(layer)]
        return HaloExchange(self._halos[where], channel, number * TAG_WAYS)

    @property
    def sent(self) -> tuple[int, int]:
        """Messages and bytes that this rank has sent for halos."""
        messages = sum(channel.messages for channel in self._channels)
        return messages, sum(channel.bytes for channel in self._channels)

    def close(self) -> None:
        """Free the communicators. Collective."""
        for comm in (*self._image_comms, *self._step_comms):
            if comm:
                comm.Free()


def here() -> Origin:
    """The origin of the micro-batch that this thread computes."""
    origin = origin_under_way()
    assert origin is not None, "layers that exchange run in a pipeline only"
    return origin


class Halos(Protocol):
    """Source of the cells around a rank's own ones: other ranks, or the rows that a sweep holds.

    Attributes:
        grids: Grids of the input and of each layer's output.
    """

    grids: tuple[Grid, ...]

    def exchange(self, layer: int) -> HaloExchange:
        """The layer's exchange of halos for the cells that this thread computes."""


def spatial_layer(layer: Layer, index: int, module: nn.Module, spatial: Halos) -> nn.Module:
    """The module that computes a layer's output on a rank's own cells.

    Raises:
        TilenetError: There is no spatial module for the layer.
    """
    match layer:
        case Conv(kernel=1, stride=1, padding=0, extra=0, cols=()):
            return module
        case Conv():
            return SpatialConv(module, index, spatial, layer)
        case Pool():
            return SpatialPool(module, index, spatial, layer)
        case Upsample(mode="bilinear" | "bicubic"):
            return EnlargedByCells(module, index, spatial, layer)
        case Upsample(mode="nearest" | "shuffle") if (
            spatial.grids[index].origin % spatial.grids[index].stride
        ):
            # The cells that a rank owns are not those to which its own cells are enlarged.
            return EnlargedByCells(module, index, spatial, layer)
        case TransposedConv():
            return AnyTransposedConv(module, index, spatial, layer)
        case Norm():
            raise AssertionError("norms are norm.py's")
        case _ if type(layer).needs is Layer.needs or isinstance(layer, Upsample):
            return module
    raise TilenetError(
        f"a layer that looks around itself must be known to the exchange (layer {index}: "
        f"{layer.kind}); use halo_mode: overlap"
    )


class _Spatial(nn.Module):
    """A layer with own cells, (B, C, H, W), in and out. Collective over the ranks of an image."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, module: nn.Module, index: int, spatial: Halos) -> None:
        super().__init__()
        # Not a child module: its parameters are registered here, under the names that they had.
        self.__dict__["plain"] = module
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)
        self.index, self.spatial = index, spatial

    def extra_repr(self) -> str:
        return f"{self.__dict__['plain']}, layer={self.index}"


class SpatialConv(_Spatial):
    """A convolution with any kernel, stride, dilation and padding."""

    def __init__(self, module: nn.Module, index: int, spatial: Halos, layer: Conv) -> None:
        super().__init__(module, index, spatial)
        self.layer, self.taps = layer, taps_of(layer)

    def forward(self, x: Tensor) -> Tensor:
        exchange, layer = self.spatial.exchange(self.index), self.layer
        if self.taps:
            return take_cells(_extended(x, exchange, 0.0), layer, self.taps, pads=False)
        kernel = kernel_of(layer, self, x)
        # Ranks may choose differently: both ways send the same messages.
        same = exchange.halo.own == exchange.halo.out
        if same and not takes_copy(layer, x.shape[0] * x.shape[2] * x.shape[3]):
            shape = Shape(layer.kernel, layer.dilation, layer.groups)
            return convolve(x, kernel, self.bias, shape, exchange)
        if layer.edge != "zeros":
            padding = 0, 0
            extended = _with_edge(x, exchange, layer.edge)
        else:
            padding, exchange = _padded_columns(layer, exchange)
            extended = _extended(x, exchange, 0.0)
        dilation = layer.dilation, layer.along_cols.dilation
        return F.conv2d(extended, kernel, self.bias, layer.stride, padding, dilation, layer.groups)


class SpatialPool(_Spatial):
    """A maximum with a border of −∞, or an average with a border of zeros."""

    def __init__(self, module: nn.Module, index: int, spatial: Halos, layer: Pool) -> None:
        super().__init__(module, index, spatial)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        whole = self.spatial.exchange(self.index)
        padding, exchange = _padded_columns(self.layer, whole)
        kernel, stride = self.layer.kernel, self.layer.stride
        if self.layer.mode == "max":
            extended = _extended(x, exchange, float("-inf"))
            if self.layer.in_blocks:
                return block_max(extended)
            return F.max_pool2d(extended, kernel, stride, padding)
        y = F.avg_pool2d(_extended(x, exchange, 0.0), kernel, stride, padding)
        if self.layer.counts_padding or not any(whole.halo.border):
            return y
        need, (top, bottom, left, right) = whole.halo.need, whole.halo.border
        inside = F.pad(x.new_ones(1, 1, need.height, need.width), (left, right, top, bottom))
        return y / F.avg_pool2d(inside, kernel, stride)


class EnlargedByCells(_Spatial):
    """Nearest or interpolated enlargement; outermost cells repeat beyond the map's edge."""

    def __init__(self, module: nn.Module, index: int, spatial: Halos, layer: Upsample) -> None:
        super().__init__(module, index, spatial)
        self.factor = layer.factor

    def forward(self, x: Tensor) -> Tensor:
        # The operator clamps at all edges: rightly at the map's, where there is no halo, and
        # wrongly at the halo's, where its output is cut off.
        exchange = without_border(self.spatial.exchange(self.index))
        large = self.__dict__["plain"](_extended(x, exchange, 0.0))
        need, out = exchange.halo.need, exchange.halo.out
        return part_of(large, out, need.row * self.factor, need.col * self.factor)


class AnyTransposedConv(_Spatial):
    """A transposed convolution with any kernel, stride and padding."""

    def __init__(
        self, module: nn.Module, index: int, spatial: Halos, layer: TransposedConv
    ) -> None:
        super().__init__(module, index, spatial)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        exchange = without_border(self.spatial.exchange(self.index))
        need, out = exchange.halo.need, exchange.halo.out
        stride, padding, groups = self.layer.stride, self.layer.padding, self.layer.groups
        row, col = need.row * stride - padding, need.col * stride - padding  # of its full output
        top, left = out.row - row, out.col - col
        extended = _extended(x, exchange, 0.0)
        size = self.layer.size(need.height), self.layer.size(need.width)
        if padding == self.layer.output_padding == top == left == 0 and size == (
            out.height,
            out.width,
        ):
            return F.conv_transpose2d(extended, self.weight, self.bias, stride, groups=groups)
        # The full output of these cells; the own cells are cut out of it. Some of these may lie
        # beyond it: those of output_padding, and with a kernel narrower than the stride others.
        large = F.conv_transpose2d(extended, self.weight, None, stride, groups=groups)
        above, before = max(-top, 0), max(-left, 0)
        below = max(top + out.height - large.shape[2], 0)
        right = max(left + out.width - large.shape[3], 0)
        if above or before or below or right:
            large = F.pad(large, (before, right, above, below))
        own = part_of(large, out, row - above, col - before)
        return own if self.bias is None else own + self.bias[:, None, None].to(own.dtype)


def _extended(x: Tensor, exchange: HaloExchange, fill: float) -> Tensor:
    """`extend`, but without a copy where a rank owns exactly the cells that it needs."""
    halo = exchange.halo
    if halo.need == halo.own and not any(halo.border) and not halo.gives:
        return x
    return extend(x, exchange, fill)


def _with_edge(x: Tensor, exchange: HaloExchange, edge: str) -> Tensor:
    """`_extended`, with cells of the map repeated beyond its edges; `edge`: `mode` of `F.pad`."""
    top, bottom, left, right = exchange.halo.border
    inside = _extended(x, without_border(exchange), 0.0)
    return F.pad(inside, (left, right, top, bottom), mode=edge)


def _padded_columns(
    layer: Conv | Pool, exchange: HaloExchange
) -> tuple[tuple[int, int], HaloExchange]:
    """The operator's padding of (rows, columns), and the exchange without a border there.

    Where a rank has all columns, the operator pads them, which saves a copy.
    """
    layer = layer.along_cols if isinstance(layer, Conv) else layer
    halo, padding = exchange.halo, layer.padding
    top, bottom, left, right = halo.border
    cols = (halo.need.width + 2 * padding - layer.reach - 1) // layer.stride + 1
    if not left == padding >= right or cols != halo.out.width:
        return (0, 0), exchange
    return (0, padding), replace(exchange, halo=replace(halo, border=(top, bottom, 0, 0)))


def without_border(exchange: HaloExchange) -> HaloExchange:
    """The same exchange without the border outside of the map."""
    return replace(exchange, halo=replace(exchange.halo, border=(0, 0, 0, 0)))
