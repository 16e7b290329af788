"""Build modules from layers, and only from them, so that the planned layers run.

A network is a flat `nn.Sequential` with one module per layer, so that pipeline, memory model, halo
walk and checkpoints all count the same layers. It does not know of ranks.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.layers import (
    Activation,
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.opaque import Opaque, no_code, opaque_of
from tilenet.model.cellwise import CellwiseModule, cellwise_layer
from tilenet.model.coordinates import CoordinatesMap
from tilenet.model.dropout import KeyedDropout, MaskKey
from tilenet.model.in_place import in_place
from tilenet.model.modules import (
    BatchNorm,
    BlockMaxPool,
    ComputedConv,
    CornersPool,
    FrozenBatchNorm,
    GlobalSum,
    PaddedConv,
    PaddedPool,
    SharedMaximum,
    activation,
)
from tilenet.model.skips import expand_layer, join_layer, stash_layer
from tilenet.random_keys import key


class Network(nn.Sequential):
    """A flat sequence of layers with named skips; (B, bands, H, W) to (B, classes, H′, W′).

    Attributes:
        mask_key: Key of the dropout masks; set before each forward pass in training.
    """

    def __init__(self, modules: list[nn.Module], mask_key: MaskKey) -> None:
        super().__init__(*modules)
        self.mask_key = mask_key

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that training changes, in the layers' order."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


def build_network(
    layers: tuple[Layer, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layer_done: Callable[[], None] = lambda: None,
) -> Network:
    """Build the modules and draw the first weights, which depend on `seed` and the layer only.

    Args:
        layer_done: Is called after each layer, and may end the work.
    """
    mask_key = MaskKey(seed=seed)
    modules = []
    for index, layer in enumerate(layers):
        with torch.random.fork_rng(devices=[]):  # torch draws weights too, which are not kept
            module = build_layer(layer, index, mask_key, in_place=in_place(layers, index))
        _draw_weights(module, key(seed, "weights", index))
        modules.append(module.to(device=device, dtype=dtype))
        layer_done()
    return Network(modules, mask_key)


def network_to_score(layers: tuple[Layer, ...], network: Network) -> Network:
    """The plain network of these layers in evaluation mode, around the very tensors of `network`.

    So a network in training can be scored, also where its layers were replaced, without a
    second copy of its parameters and without a change to its modules. Neither reads nor changes
    any random state.
    """
    if opaque_of(layers) is not None:
        tensors = [*network.parameters(), *network.buffers()]
        return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors}).eval()
    plain = _without_memory(layers).eval()
    state = network.state_dict(keep_vars=True)
    for name, parameter in plain.named_parameters():  # the tensors get this flag from `plain`
        parameter.requires_grad_(state[name].requires_grad)
    plain.load_state_dict(state, assign=True)
    return plain


def network_to_fill(layers: tuple[Layer, ...], dtype: torch.dtype = torch.float32) -> Network:
    """Return the network on the CPU with weights in uninitialised memory, to be loaded."""
    network = _without_memory(layers)
    # Not `to_empty`, for which torch imports sympy: half a second at the start of each map.
    empty = {
        name: torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype)
        for name, value in network.state_dict().items()
    }
    network.load_state_dict(empty, assign=True)
    return network


def tie_weights(network: Network, shared: Iterable[Sequence[str]]) -> None:
    """Let all parameters of each group of names be the first of them, which is trained as one."""
    for first, *rest in shared:
        parameter = network.get_parameter(first)
        for other in rest:
            path, _, name = other.rpartition(".")
            network.get_submodule(path).register_parameter(name, parameter)


def _without_memory(layers: tuple[Layer, ...]) -> Network:
    """Build the network on torch's meta device, without drawing weights."""
    mask_key = MaskKey(seed=0)  # nothing is dropped, or a key is set
    with torch.device("meta"):
        modules = [
            build_layer(layer, index, mask_key, in_place=in_place(layers, index))
            for index, layer in enumerate(layers)
        ]
    return Network(modules, mask_key)


def build_layer(
    layer: Layer, index: int, mask_key: MaskKey, *, in_place: bool = False
) -> nn.Module:
    """The module of the network's layer `index`, with weights that mean nothing yet.

    Args:
        mask_key: Shared by the layers of a network.
        in_place: Whether an activation writes over its input (see `model.in_place`).
    """
    match layer:
        case Conv():
            return _conv(layer)
        case TransposedConv(wide, out, kernel, stride, padding, extra, bias, groups):
            return nn.ConvTranspose2d(wide, out, kernel, stride, padding, extra, groups, bias)
        case Pool():
            return _pool(layer)
        case Upsample():
            if layer.mode == "shuffle":
                return nn.PixelShuffle(layer.factor)
            corners = layer.corners if layer.mode == "bilinear" else None
            return nn.Upsample(scale_factor=layer.factor, mode=layer.mode, align_corners=corners)
        case Norm():
            return _norm(layer)
        case Cellwise():
            return cellwise_layer(layer)
        case Dropout():
            return KeyedDropout(layer, index, mask_key)
        case Activation():
            return activation(layer, in_place=in_place)
        case GlobalPool():
            if layer.takes == "maximum":
                return SharedMaximum(1) if layer.shared else nn.AdaptiveMaxPool2d(1)
            return GlobalSum(1) if layer.takes == "sum" else nn.AdaptiveAvgPool2d(layer.bins)
        case Stash():
            return stash_layer(layer)
        case Join():
            return join_layer(layer)
        case Expand():
            return expand_layer(layer)
        case Coordinates():
            return CoordinatesMap(layer)
        case Opaque():
            raise no_code(layer, "here")
    raise AssertionError(f"no module for layer {layer}")


def _conv(layer: Conv) -> nn.Module:
    cols = layer.along_cols
    plain = PaddedConv if layer.extra else nn.Conv2d
    module = (partial(ComputedConv, layer) if layer.steps else plain)(
        layer.in_channels,
        layer.out_channels,
        (layer.kernel, cols.kernel),
        layer.stride,
        (layer.padding, cols.padding),
        (layer.dilation, cols.dilation),
        layer.groups,
        layer.bias,
        layer.edge,
    )
    if isinstance(module, PaddedConv):
        module.extra = layer.extra
    return module


def _pool(layer: Pool) -> nn.Module:
    if layer.in_blocks:
        return BlockMaxPool()
    if layer.mode == "corners":
        return CornersPool(layer.stride)
    pool: nn.MaxPool2d | nn.AvgPool2d = nn.MaxPool2d(layer.kernel, layer.stride, layer.padding)
    if layer.mode == "average":
        pool = nn.AvgPool2d(
            layer.kernel, layer.stride, layer.padding, count_include_pad=layer.counts_padding
        )
    return PaddedPool(pool, layer.extra) if layer.extra else pool


def _norm(layer: Norm) -> nn.Module:
    channels, epsilon = layer.out_channels, layer.epsilon
    if layer.norm == "instance":
        return nn.InstanceNorm2d(channels, epsilon, affine=layer.affine)
    if layer.norm == "group":
        return nn.GroupNorm(layer.groups, channels, epsilon, affine=layer.affine)
    norm = FrozenBatchNorm if layer.scope == "frozen" else BatchNorm
    return norm(channels, epsilon, layer.momentum, affine=layer.affine)


def _draw_weights(module: nn.Module, seed: int) -> None:
    """Kaiming's normal weights for leaky rectifiers, zero biases; around 1 in cellwise layers.

    Without normalisation torch's default would halve the signal in every layer. Drawn in float32
    on the CPU whatever the precision, so that the weights depend on the seed only.
    """
    for part in module.modules():
        if isinstance(part, CellwiseModule | ComputedConv):
            generator = torch.Generator().manual_seed(seed % 2**63)
            for values in (*part.parameters(), *part.buffers()):
                values.data = 0.5 + torch.rand(values.shape, generator=generator)
    plain = not isinstance(module, ComputedConv)
    if plain and isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        weight = module.weight
        channels = module.in_channels // module.groups
        taps = weight[0, 0].numel()
        if isinstance(module, nn.ConvTranspose2d):
            taps //= module.stride[0] * module.stride[1]  # taps that reach one output cell
        generator = torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * math.sqrt(2 / (1 + 0.01**2) / (channels * max(taps, 1))))
            if module.bias is not None:
                module.bias.zero_()


def check_weight_count(
    layers: tuple[Layer, ...],
    weights: Mapping[str, Tensor],
    source: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuse layers that need more weights than there are, before anything is allocated for them.

    Args:
        names: See `load_weights`; layers may share a weight.

    Raises:
        TilenetError: The layers need more weights; the error names both numbers.
    """
    needed = sum(layer.num_parameters for layer in layers)
    used = [*weights]
    if names is not None:  # names that the network lacks are not counted
        own = _without_memory(layers).state_dict()
        used = [name for key, name in names.items() if key in own and name in weights]
    num_values = sum(weights[name].numel() for name in used)
    if needed > num_values:
        raise TilenetError(
            f"weights must fit the network ({source}: {num_values:,} values, network.json: "
            f"{needed:,}); use another checkpoint"
        )


def load_weights(
    network: Network,
    weights: Mapping[str, Tensor],
    source: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Fill in a network's weights, which come from `source`.

    Args:
        names: Name in `weights` of each weight of the network, where `weights` may hold others
            too, and shapes may differ if they have as many values; None: equal names.

    Raises:
        TilenetError: Names or shapes differ.
    """
    state = network.state_dict()
    if names is not None:
        weights = {
            own: t.reshape(state[own].shape) if t.numel() == state[own].numel() else t
            for own, name in names.items()
            if own in state and (t := weights.get(name)) is not None
        }
    endless = [
        name
        for name, tensor in weights.items()
        if name in state and state[name].is_floating_point() and not _is_finite(tensor)
    ]
    if endless:
        raise TilenetError(
            f"weights must be finite real numbers ({source}: {endless[0]} and {len(endless) - 1} "
            "more are not); use another checkpoint"
        )
    wrong = sorted(set(weights) ^ set(state)) or [
        name for name, tensor in state.items() if weights[name].shape != tensor.shape
    ]
    if wrong:
        name = wrong[0]
        raise TilenetError(
            f"weights must fit the network ({source}: {name} is {_shape(weights.get(name))} there "
            f"and {_shape(state.get(name))} in the network, {len(wrong)} such); use weights of "
            "the same network"
        )
    network.load_state_dict(weights)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite real numbers, by the least and the most, which NaN passes to.

    That makes no copy, and takes a tenth of the time of `isfinite`.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor.is_floating_point()
    wide = tensor if tensor.itemsize > 1 else tensor.float()
    return all(math.isfinite(value) for value in wide.aminmax())


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(str(n) for n in tensor.shape) or "a number"
