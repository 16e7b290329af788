"""Normalisation with statistics of the whole image, or of all images of a step.

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.geometry.layers import Norm
from tilenet.geometry.windows import Window
from tilenet.model.gpipe import is_recomputing
from tilenet.model.upload import upload
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.sums.all_reduce import add_over


@dataclass(frozen=True)
class Cells:
    """The own cells of a micro-batch's map, and the images that they belong to.

    Attributes:
        own: Own window of each sample, counted from the first cell of the rank's map.
        images: Number of each sample's image among those of the micro-batch.
    """

    own: tuple[Window, ...]
    images: tuple[int, ...]

    def of(self, x: Tensor) -> list[Tensor]:
        """The own cells of each sample of a map, (1, C, h, w)."""
        return [part_of(x[n : n + 1], window, 0, 0) for n, window in enumerate(self.own)]


Sum = Callable[[Tensor], Tensor]  # over the ranks


class WholeImageNorm(nn.Module):
    """Instance, group or batch norm over all ranks, (B, C, H, W) in and out. Collective.

    Args:
        plain: The module that it replaces; it keeps the module's parameters and running statistics
            under their names.
        layer: Instance and group norm take the statistics of each image; batch norm those of all
            images of the micro-batch, on all ranks of `comm`.
        cells: Returns the own cells of the micro-batch that the thread computes.
        comm: The ranks that hold the same images, or for batch norm all; of one partition alone.
            None for a rank alone.
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
        comm: Intracomm | None,
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
        alone = self.comm is None or self.comm.size == 1
        fused = alone and kernels_pay(x.device) and call.one_per_channel(x)
        way = _Fused if fused else _Normalise
        y: Tensor = way.apply(x, self.weight, self.bias, call)  # type: ignore[no-untyped-call]
        if self.layer.norm == "batch" and not is_recomputing():
            self._blend(call)
        return y

    def _blend(self, call: "_Call") -> None:
        """Update the running statistics as torch's batch norm does, equally on all ranks."""
        count = call.count[0, 0]
        unbiased = call.variance[0] * count / (count - 1).clamp(min=1)
        with torch.no_grad():
            for buffer, new in ((self.running_mean, call.mean[0]), (self.running_var, unbiased)):
                buffer.lerp_(new.to(buffer), self.layer.momentum)
            self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        return f"{self.layer.norm}, {self.layer.out_channels}"


def kernels_pay(device: torch.device) -> bool:
    """Whether torch's batch norm kernels are faster: on a CPU they take one cell after another.

    Those of Intel's GPUs were not measured.
    """
    return device.type == "cuda"


class _Call:
    """One forward pass of a norm: its statistics, float64, (images, groups); for batch norm (1, C).

    They lie on the layer's device, so that a rank alone never waits for it.

    Attributes:
        cells: Number of cells of a channel or group of each image on this rank, (images, 1).
        count: Number of these cells on all ranks, (images, 1).
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, layer: Norm, cells: Cells, add: Sum, device: torch.device) -> None:
        self.layer, self.own_cells, self.add = layer, cells, add
        images = (0,) * len(cells.images) if layer.norm == "batch" else cells.images
        groups = layer.groups if layer.norm == "group" else layer.out_channels
        self.shape = max(images) + 1, groups
        # None if each sample is an image of its own.
        self.images: Tensor | None = None
        if images != tuple(range(len(images))):
            self.images = upload(torch.tensor(images), device)
        self.cells = [[0.0] for _ in range(self.shape[0])]
        for image, window in zip(images, cells.own, strict=True):
            self.cells[image][0] += window.height * window.width * layer.out_channels / groups

    def whole(self, x: Tensor) -> bool:
        """Whether all cells are own ones."""
        return set(self.own_cells.own) == {Window(0, 0, x.shape[2], x.shape[3])}

    def one_per_channel(self, x: Tensor) -> bool:
        """Whether each channel has statistics of its own, of whole maps of one sample or of all."""
        single = self.layer.norm == "batch" or (
            self.layer.norm == "instance" and self.images is None
        )
        return single and self.whole(x)

    def fold(self, *values: Tensor) -> Tensor:
        """Sums (B, C) of samples and channels as sums (…, images, groups), of this rank."""
        by_group = torch.stack(values).double()
        if self.shape[1] < by_group.shape[2]:
            by_group = by_group.view(*by_group.shape[:2], self.shape[1], -1).sum(3)
        if self.images is None:
            return by_group
        empty = by_group.new_zeros((len(values), *self.shape))
        return empty.index_add(1, self.images, by_group)

    def spread(self, values: Tensor) -> Tensor:
        """Values (…, images, groups) as (…, B, C)."""
        if self.images is not None:
            values = values.index_select(-2, self.images)
        if self.shape[1] < self.layer.out_channels:
            values = values.repeat_interleave(self.layer.out_channels // self.shape[1], dim=-1)
        return values

    def own(self, x: Tensor) -> list[Tensor]:
        """The samples' own cells; one tensor of all samples where their windows are the same."""
        if self.whole(x):
            return [x]
        if len(set(self.own_cells.own)) == 1:
            return [part_of(x, self.own_cells.own[0], 0, 0)]
        return self.own_cells.of(x)


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _sum(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Sums (B, C) of samples and channels over their cells."""
    sums = [part.sum((2, 3), dtype=dtype) for part in parts]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


SQUARES = 1 << 18  # values that are squared at once, at least: squares take more memory


def _squares(parts: list[Tensor]) -> Tensor:
    """Sums (B, C) of squares, computed for a few channels at a time."""
    channels, cells = parts[0].shape[1], max(part.numel() for part in parts) // parts[0].shape[1]
    few = max(channels // 8, SQUARES // max(cells, 1), 1)
    if few >= channels:
        return _sum([part.square() for part in parts], parts[0].dtype)
    split = zip(*(torch.split(part, few, dim=1) for part in parts), strict=True)
    sums = [_sum([part.square() for part in some], some[0].dtype) for some in split]
    return torch.cat(sums, dim=1)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> Tensor:
        wide = _wide(x)
        sums = call.fold(_sum(call.own(x), wide))[0]
        count = upload(torch.tensor(call.cells, dtype=torch.float64), x.device)
        added = call.add(torch.cat([sums, count], dim=1))
        call.count = added[:, -1:]
        rough = (added[:, :-1] / call.count).to(wide)
        shift = call.spread(rough)[..., None, None]
        centred = x - shift
        # The rest that the mean's rounding left: it is not the exact mean of these numbers.
        own = call.own(centred)
        rest, spread = (call.add(call.fold(_sum(own, wide), _squares(own))) / call.count).unbind()
        call.variance = torch.addcmul(spread, rest, rest, value=-1).clamp_(min=0)
        call.mean = rough + rest
        ctx.call = call
        ctx.small = torch.stack([(call.variance + call.layer.epsilon).rsqrt(), rest])
        ctx.save_for_backward(x, weight, shift)
        scale, rest = call.spread(ctx.small)
        if weight is not None:
            scale = scale * weight
        level = -rest * scale
        if bias is not None:
            level = level + bias
        scale, level = torch.stack([scale, level]).to(wide)[..., None, None].unbind()
        return centred.mul_(scale).add_(level).to(x.dtype)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, shift = ctx.saved_tensors
        call: _Call = ctx.call
        wide, gradient = shift.dtype, grads[0]
        scale, rest = call.spread(ctx.small)
        centred = x - shift
        to_x = gradient * centred
        # Over all cells, not own ones only.
        flat, along = torch.stack([_sum([gradient], wide), _sum([to_x], wide)]).double().unbind()
        along = torch.addcmul(along, rest, flat, value=-1) * scale
        to_weight = along.sum(0).to(wide) if ctx.needs_input_grad[1] else None
        to_bias = flat.sum(0).to(wide) if ctx.needs_input_grad[2] else None
        if weight is not None:
            flat, along = flat * weight, along * weight
        sums = call.add(call.fold(flat, along))
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None
        # Means of the gradient, and of its product with the normal values (centred − rest) · scale.
        flat, along = call.spread(sums / call.count).unbind()
        along = along * scale.square()
        level = torch.addcmul(flat * scale, along, rest, value=-1)
        if weight is not None:
            scale = scale * weight
        scale, along, level = torch.stack([scale, along, level]).to(wide)[..., None, None].unbind()
        # Only own cells contributed to the statistics, so only theirs get this gradient.
        centred.mul_(along).add_(level)
        torch.mul(gradient, scale, out=to_x)
        for part, other in zip(call.own(to_x), call.own(centred), strict=True):
            part.sub_(other)
        return to_x.to(x.dtype), to_weight, to_bias, None


class _Fused(torch.autograd.Function):
    """The same for whole maps on one rank, by torch's kernels of batch norm.

    Wide numbers are first shifted by a rounded mean, so that deviations keep their digits; narrow
    numbers have few digits and are taken as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> Tensor:
        batch = call.layer.norm == "batch"
        dims, wide = (0, 2, 3) if batch else (2, 3), _wide(x)
        shift = x.mean(dims, keepdim=True, dtype=wide) if x.dtype == wide else None
        centred = _centred(x, shift)
        ctx.shape = centred.shape if batch else (1, -1, *x.shape[2:])
        ctx.repeats = 1 if batch else len(x)
        maps = centred.view(ctx.shape)
        if weight is not None:
            weight = weight.repeat(ctx.repeats)
        if bias is not None:
            bias = bias.repeat(ctx.repeats)
        # Written over deviations, which nothing else refers to.
        normal, into = centred, maps
        if shift is None:
            normal = torch.empty_like(centred)
            into = normal.view(ctx.shape)
        rest, inverse = x.new_empty(0, dtype=wide), x.new_empty(0, dtype=wide)
        outputs = into, rest, inverse
        torch.native_batch_norm(
            maps, weight, bias, None, None, True, 0.0, call.layer.epsilon, out=outputs
        )
        if batch:
            call.count = torch.tensor(call.cells, dtype=torch.float64)
            call.mean = rest[None].double() + (0.0 if shift is None else shift.view(1, -1))
            call.variance = inverse.double().pow(-2).sub(call.layer.epsilon).clamp(min=0)[None]
        ctx.save_for_backward(x, weight, shift, rest, inverse)
        ctx.epsilon = call.layer.epsilon
        return normal

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, shift, rest, inverse = ctx.saved_tensors
        maps = [map_.view(ctx.shape) for map_ in (grads[0].contiguous(), _centred(x, shift))]
        mask = ctx.needs_input_grad[:3]
        gradients = torch.ops.aten.native_batch_norm_backward(
            *maps, weight, None, None, rest, inverse, True, ctx.epsilon, mask
        )
        to_x, *of_parameters = (gradients[i] if mask[i] else None for i in range(3))
        to_weight, to_bias = (
            sums if sums is None else sums.view(ctx.repeats, -1).sum(0) for sums in of_parameters
        )
        return None if to_x is None else to_x.view_as(x), to_weight, to_bias, None


def _centred(x: Tensor, shift: Tensor | None) -> Tensor:
    return (x if shift is None else x - shift).contiguous()
