"""Measure the bytes of each layer of a network, on tensors without memory.

Each distinct layer (kind, channels, input size, dtype) is measured once. Two figures suffice to
put the peak of any consecutive layers together (`partition.py`): the bytes that stay for backward,
and the peaks of forward and backward above the bytes that live already.

Norms count as the plain modules that `build_layer` builds; whole-image statistics add messages of a
few bytes a channel. Autocast is the CPU's; its lists differ from CUDA's for a few layers.

A layer runs forward and backward between a source that makes its input and a sink that makes its
output's gradient, as neighbours in a network would, under `LiveBytes`.
"""

import weakref
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilenet.choices import HaloMode
from tilenet.geometry.layers import (
    Cellwise,
    Conv,
    Expand,
    Join,
    Layer,
    Pool,
    Stash,
    Upsample,
)
from tilenet.geometry.maps import map_shapes
from tilenet.model.dropout import MaskKey
from tilenet.model.dtypes import AUTOCAST, parameter_dtype
from tilenet.model.gpipe import use_own_skips
from tilenet.model.in_place import in_place
from tilenet.model.network import build_layer
from tilenet.model.skips import stash_layer
from tilenet.parallel.exchange.copied import takes_copy
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.live import LiveBytes


@dataclass(frozen=True)
class Case:
    """A layer and everything that its cost depends on.

    Attributes:
        layer: Without names of kept maps.
        shape: Shape of the input, (B, C, H, W).
        dtype: Dtype of its input.
        kept_maps: Shape and dtype of each kept map that it takes.
        halo: Cells above and on the left of its input that come from neighbours.
        wants_gradient: Whether its input does; images do not.
        in_place: Whether an activation may write over its input.
        viewed: Whether the input is a view (of instance norm's result): autograd pays for writing
            over it with a copy in backward.
    """

    layer: Layer
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept_maps: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    precision: str
    halo: tuple[int, int]
    wants_gradient: bool
    in_place: bool = False
    viewed: bool = False


class _WithHalo(nn.Module):
    """A layer on its input with a halo; where the layer does not use the halo up, it is cut off."""

    def __init__(self, layer: Layer, module: nn.Module, halo: tuple[int, int]) -> None:
        super().__init__()
        self.module, self.halo = module, halo
        self.cut = layer.factor * halo[0] if isinstance(layer, Upsample) else 0

    def forward(self, x: Tensor) -> Tensor:
        rows, cols = self.halo
        y: Tensor = self.module(F.pad(x, (cols, cols, rows, rows)))
        if self.cut:
            y = y[:, :, self.cut : -self.cut, self.cut : -self.cut].contiguous()
        return y


class _Source(torch.autograd.Function):
    """Makes the input, as a layer before would; notes where its gradient lies."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, notes: dict[str, Any], name: str) -> Tensor:
        ctx.notes, ctx.name = notes, name
        return root.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        storage = gradients[0].untyped_storage()
        ctx.notes[ctx.name] = (storage.nbytes(), storage._cdata)
        return None, None, None


class _Sink(torch.autograd.Function):
    """Ends the layer; makes its output's gradient, as a layer behind would."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, live: LiveBytes, notes: dict[str, Any]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = y.shape, y.dtype, y.device
        ctx.live, ctx.notes = live, notes
        return torch.empty((), device=y.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        ctx.notes["g"] = weakref.ref(gradient.untyped_storage())
        ctx.notes["base"] = ctx.live.current
        return gradient, None, None


@lru_cache(maxsize=4096)
def measure(case: Case) -> tuple[LayerBytes, torch.dtype, bool]:
    """The layer's cost, the dtype of its output, and whether that is a view."""
    # On meta it takes a third of the time of fake tensors; but autocast does not know that device.
    fake = case.precision in AUTOCAST
    with FakeTensorMode() if fake else torch.device("meta"), torch.enable_grad():
        layer = case.layer
        if any(case.halo) and isinstance(layer, Conv | Pool):
            layer = replace(layer, padding=0, extra=0)
            if isinstance(layer, Conv) and layer.cols:
                layer = replace(layer, cols=(*layer.cols[:2], 0))
        images = tuple(range(case.shape[0]))
        module = build_layer(layer, 0, MaskKey(images=images), in_place=case.in_place)
        if any(case.halo):
            module = _WithHalo(layer, module, case.halo)
        cast_parameters(module, parameter_dtype(case.precision))
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return _run(case, module)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """`module.to(dtype)`, which refuses fake parameters."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(parameter.detach().to(dtype)))
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                part.register_buffer(name, buffer.to(dtype))


def _run(case: Case, module: nn.Module) -> tuple[LayerBytes, torch.dtype, bool]:
    notes: dict[str, Any] = {"base": None}
    trace: list[tuple[int, bool, bool]] = []

    def note() -> None:
        if notes["base"] is not None:
            gone = notes["x"]() is None, notes["g"]() is None
            trace.append((live.current - notes["base"], *gone))

    live = LiveBytes(on_change=note)
    root = torch.empty(case.shape, dtype=case.dtype, requires_grad=True)
    skip_roots = [
        torch.empty(shape, dtype=dtype, requires_grad=shape[1] > 0)
        for shape, dtype in case.kept_maps
    ]
    autocast = AUTOCAST.get(case.precision)
    with live:
        x = _Source.apply(root, notes, "gx") if case.wants_gradient else root.detach().clone()  # type: ignore[no-untyped-call]
        if case.viewed:
            x = x.view(case.shape)
        with use_own_skips():
            for name, skip_root in zip(case.layer.names, skip_roots, strict=True):
                skip = _Source.apply(skip_root, notes, name)  # type: ignore[no-untyped-call]
                stash_layer(Stash(skip_root.shape[1], skip_root.shape[1], name))(skip)
                del skip
            before = live.current
            live.reset_peaks()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                y = module(x)
        forward = live.peak - before
        elements = y.numel()
        dtype, is_view = y.dtype, y._is_view()
        x_bytes, y_bytes = x.untyped_storage().nbytes(), y.untyped_storage().nbytes()
        notes["x"] = weakref.ref(x.untyped_storage())
        y_held = weakref.ref(y.untyped_storage())
        in_place = y_held() is notes["x"]()
        has_graph = y.requires_grad
        z = _Sink.apply(y, live, notes) if has_graph else torch.empty(())  # type: ignore[no-untyped-call]
        del x, y
        keeps_input = notes["x"]() is not None and not in_place
        keeps_output = y_held() is not None
        saved = live.current - z.untyped_storage().nbytes()
        saved -= keeps_input * x_bytes + keeps_output * y_bytes
        # Where autograd keeps nothing of an input that wants no gradient, there is no backward.
        if has_graph:
            z.backward()
    own = (
        sum(p.numel() * p.element_size() for p in module.parameters()),
        sum(b.numel() * b.element_size() for b in module.buffers()),
    )
    # A map that this layer keeps neither as input nor as output is counted by who holds it.
    held_bytes = x_bytes if keeps_input or (in_place and keeps_output) else 0
    peaks = _backward_peaks(trace, held_bytes, y_bytes)
    ends = _gradients(notes, case.layer.names)
    sizes = x_bytes, y_bytes, elements
    cost = LayerBytes(
        case.layer, *own, *sizes, in_place, saved, keeps_input, keeps_output, forward, peaks,
        gradient=ends[0], skip_gradients=ends[1], shares_gradient=ends[2],
    )  # fmt: skip
    return cost, dtype, is_view


def _gradients(
    notes: dict[str, Any], names: tuple[str, ...]
) -> tuple[int, tuple[tuple[int, int], ...], bool]:
    """Bytes of the gradients of input and kept maps; whether some share the input's storage."""
    gradient, own = notes.get("gx", (0, None))
    gradients = [notes.get(name, (0, None)) for name in names]
    storages = [storage for _, storage in gradients]
    of_skips = tuple((size, storages.index(storage)) for size, storage in gradients)
    return gradient, of_skips, own is not None and own in storages


def _backward_peaks(
    trace: list[tuple[int, bool, bool]], x_bytes: int, y_bytes: int
) -> tuple[int, int, int, int]:
    """Most bytes in backward: alone, and where others hold input, output's gradient, or both."""

    def peak(held_x: bool, held_g: bool) -> int:
        sizes = (
            size + held_x * x_gone * x_bytes + held_g * g_gone * y_bytes
            for size, x_gone, g_gone in trace
        )
        return max(0, *sizes, 0)

    return peak(False, False), peak(True, False), peak(False, True), peak(True, True)


def layer_bytes(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    precision: str = "float32",
    batch: int = 1,
    halo_mode: HaloMode = "overlap",
) -> tuple[LayerBytes, ...]:
    """Bytes of each layer for a micro-batch (batch, bands, height, width).

    Maps may have any size here; `check_map_sizes` says which ones can be computed.

    Args:
        precision: `float32`, `float64`, `bfloat16` or `float16` (autocast, float32 parameters).
        halo_mode: With `exchange` the size is a rank's own, and layers that look around themselves
            work on a copy of their input with a halo, but for large maps' convolutions. There
            halos, a few rows of cells, are not counted.
    """
    shapes = map_shapes(layers, height, width)
    dtype = parameter_dtype(precision)
    stashed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    costs = []
    viewed = False
    for index, (layer, before) in enumerate(zip(layers, shapes, strict=False)):
        kept_maps = tuple(stashed.pop(name) for name in layer.names)
        shape = (batch, before.channels, before.rows, before.cols)
        if isinstance(layer, Stash):
            channels = 0 if layer.sizes else before.channels
            stashed[layer.name] = ((batch, channels, *shape[2:]), dtype)
        halo = 0, 0
        if halo_mode == "exchange":
            halo = _halo(layer, batch * before.rows * before.cols)
        case = Case(
            _nameless(layer), shape, dtype, kept_maps, precision, halo, wants_gradient=index > 0,
            in_place=in_place(layers, index),
        )  # fmt: skip
        if case.in_place:
            cost, dtype, _ = measure(replace(case, viewed=viewed))
            # Not in place where it begins a partition (see parallel.pipeline.pipe.Partition).
            cost = replace(cost, first=measure(replace(case, in_place=False))[0])
        else:
            cost, dtype, viewed = measure(case)
            if index == 0:
                # torchgpipe ties each micro-batch to the one before, and with that the image wants
                # a gradient after all.
                cost = replace(cost, first=measure(replace(case, wants_gradient=True))[0])
        costs.append(replace(cost, layer=layer))
    return tuple(costs)


def _nameless(layer: Layer) -> Layer:
    """Names of kept maps cost nothing; without them, levels alike are measured once."""
    match layer:
        case Stash() | Expand():
            return replace(layer, name="0")
        case Join() | Cellwise():
            return replace(layer, kept=tuple(str(place) for place in range(len(layer.kept))))
    return layer


def _halo(layer: Layer, cells: int) -> tuple[int, int]:
    """Cells around its input, of a number of cells, that a layer works on a copy with."""
    if isinstance(layer, Conv):
        copied = takes_copy(layer, cells)
        return (layer.reach // 2, layer.along_cols.reach // 2) if copied else (0, 0)
    if isinstance(layer, Pool):
        around = max(layer.padding, layer.kernel - layer.stride, 0)
    else:
        around = -layer.needs(0, layer.factor - 1)[0] if isinstance(layer, Upsample) else 0
    return around, around
