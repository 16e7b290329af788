"""Normalisation whose statistics are those of the whole image, or of all images of a step.

Forward sums run over own cells of the extended image: each cell once. In backward the statistics'
gradients are sums over all cells that a rank has computed, its halo included, since each of them
was normalised with the same statistics. Both are added over the ranks, so output and gradient are
those of the whole image, in both halo modes.

The variance is the corrected two-pass one (Chan, Golub, LeVeque, "Algorithms for computing the
sample variance", 1983, eq. 1.7): E[x²] − E[x]² has no digits left for pixels far from zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.geometry.layers import Norm
from tilenet.geometry.windows import Window
from tilenet.model.gpipe import is_recomputing
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.sums.values import add_over

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Cells", "WholeImageNorm"]


@dataclass(frozen=True)
class Cells:
    """Which cells of a micro-batch's map count, and for which image.

    Attributes:
        own: For each sample its own window of the rank's map, counted from the map's first cell.
        images: For each sample the place of its image among those of the micro-batch.
    """

    own: tuple[Window, ...]
    images: tuple[int, ...]


Sum = Callable[[Tensor], Tensor]  # over the ranks


class WholeImageNorm(nn.Module):
    """Instance, group or batch norm over all ranks, (B, C, H, W) in and out. Collective.

    Args:
        plain: The module that it replaces, whose parameters and running statistics it keeps under
            their names.
        layer: Instance and group norm take the statistics of each image; batch norm those of all
            images of the micro-batch, on all ranks of `comm`.
        cells: Cells of the micro-batch that the thread computes.
        comm: The ranks that hold the same images, or for batch norm all; of one partition alone.
            None: there are no others.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        plain: nn.Module,
        layer: Norm,
        cells: Callable[[], Cells],
        comm: "MPI.Intracomm | None",
    ) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(plain, name, None))
        for name, buffer in plain.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.layer, self.cells, self.comm = layer, cells, comm

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.norm == "batch" and not self.training:
            mean, variance = self.running_mean, self.running_var
            return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.layer.epsilon)
        call = _Call(self.layer, self.cells(), partial(add_over, self.comm), x.device)
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, call)  # type: ignore[no-untyped-call]
        if self.layer.norm == "batch" and not is_recomputing():
            self._blend(call)
        return y

    def _blend(self, call: "_Call") -> None:
        """Update the running statistics as torch's batch norm does, alike on all ranks."""
        unbiased = call.variance[0] * call.count[0] / (call.count[0] - 1).clamp(min=1)
        with torch.no_grad():
            for buffer, new in ((self.running_mean, call.mean[0]), (self.running_var, unbiased)):
                buffer.lerp_(new.to(buffer), self.layer.momentum)
            self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        return f"{self.layer.norm}, {self.layer.out_channels}"


class _Call:
    """One forward pass of a norm: its statistics, float64, (images, groups); for batch norm (1, C).

    On the layer's device, so that one rank alone never waits for it.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, layer: Norm, cells: Cells, add: Sum, device: torch.device) -> None:
        self.layer, self.cells, self.add = layer, cells, add
        images = (0,) * len(cells.images) if layer.norm == "batch" else cells.images
        groups = layer.groups if layer.norm == "group" else layer.out_channels
        self.shape = max(images) + 1, groups
        self.images = torch.tensor(images).to(device, non_blocking=True)
        own = [0.0] * self.shape[0]
        for image, window in zip(images, cells.own, strict=True):
            own[image] += window.height * window.width * layer.out_channels / groups
        self.count = torch.tensor(own, dtype=torch.float64).to(device, non_blocking=True)

    def fold(self, values: Tensor) -> Tensor:
        """Sums (B, C) of samples and channels as sums (images, groups), of this rank."""
        by_group = values.double().view(len(values), self.shape[1], -1).sum(2)
        empty = torch.zeros(self.shape, dtype=torch.float64, device=values.device)
        return empty.index_add(0, self.images, by_group)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Values (images, groups) as (B, C, 1, 1), in the dtype of `like`."""
        channels = self.layer.out_channels // self.shape[1]
        wide = values.to(like.dtype).index_select(0, self.images)
        return wide.repeat_interleave(channels, dim=1)[:, :, None, None]

    def over_own(self, x: Tensor) -> Tensor:
        """Sums (B, C) over the samples' own cells."""
        full = Window(0, 0, x.shape[2], x.shape[3])
        if all(window == full for window in self.cells.own):
            return x.sum((2, 3))
        parts = [
            part_of(x[sample : sample + 1], window, 0, 0)
            for sample, window in enumerate(self.cells.own)
        ]
        return torch.cat([part.sum((2, 3)) for part in parts])


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        sums = call.fold(call.over_own(wide))
        added = call.add(torch.cat([sums, call.count[:, None]], dim=1))
        call.count = added[:, -1]
        rough = (added[:, :-1] / call.count[:, None]).to(wide.dtype)
        shift = call.spread(rough, wide)
        centred = wide - shift
        # What the mean's rounding left: it is not the mean of these numbers to the last digit.
        few = max(centred.shape[1] // 8, 1)  # channels at once: squares take memory of their own
        squares = [call.over_own(part.square()) for part in torch.split(centred, few, dim=1)]
        sums = torch.stack(
            [call.fold(call.over_own(centred)), call.fold(torch.cat(squares, dim=1))]
        )
        rest, spread = (call.add(sums) / call.count[:, None]).unbind()
        call.variance = (spread - rest.square()).clamp(min=0)
        call.mean = rough.double() + rest
        scale = call.spread((call.variance + call.layer.epsilon).rsqrt(), wide)
        rest = call.spread(rest, wide)
        ctx.save_for_backward(x, weight, shift, rest, scale)
        ctx.call = call
        if weight is not None:
            scale = scale * weight.to(scale)[:, None, None]
        offset = -rest * scale
        if bias is not None:
            offset = offset + bias.to(offset)[:, None, None]
        return centred.mul_(scale).add_(offset).to(x.dtype)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, shift, rest, scale = ctx.saved_tensors
        call: _Call = ctx.call
        wide = shift.dtype
        gradient = grads[0].to(wide)
        normal = x.to(wide).sub(shift).sub_(rest).mul_(scale)
        to_x = gradient * normal
        along, flat = to_x.sum((2, 3)), gradient.sum((2, 3))  # over all cells, not own ones only
        to_weight = along.sum(0) if ctx.needs_input_grad[1] else None
        to_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        factor = x.new_ones((), dtype=wide) if weight is None else weight.to(wide)
        sums = call.add(torch.stack([call.fold(flat * factor), call.fold(along * factor)]))
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None
        means = sums / call.count[:, None]  # of the gradient, and of it along the normal values
        # What each own cell did to the statistics; cells of a halo did nothing.
        normal.mul_(call.spread(means[1], normal)).add_(call.spread(means[0], normal))
        torch.mul(gradient, factor.view(-1, 1, 1), out=to_x)
        for sample, window in enumerate(call.cells.own):
            part_of(to_x[sample : sample + 1], window, 0, 0).sub_(
                part_of(normal[sample : sample + 1], window, 0, 0)
            )
        return to_x.mul_(scale).to(x.dtype), to_weight, to_bias, None
