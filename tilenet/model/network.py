"""Build modules from layers, and only from them: what was planned is what runs.

A network is a flat `nn.Sequential` with one module per layer, so that pipeline, memory model, halo
walk and checkpoints all count the same layers. It never hears of ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Activation,
    Conv,
    Dropout,
    Layer,
    Norm,
    Pool,
    Pop,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.model.gpipe import Namespace
from tilenet.model.modules import BatchNorm, BlockMaxPool, ChannelDropout, MaskKey
from tilenet.model.skips import pop_layer, stash_layer
from tilenet.random_keys import key

__all__ = [
    "Network",
    "build_layer",
    "build_network",
    "check_weight_count",
    "load_weights",
    "network_to_score",
]


class Network(nn.Sequential):
    """A flat sequence of layers with named skips; (B, bands, H, W) to (B, classes, H′, W′).

    Attributes:
        mask_key: What dropout masks depend on; set before each forward pass in training.
    """

    def __init__(self, modules: list[nn.Module], mask_key: MaskKey) -> None:
        super().__init__(*modules)
        self.mask_key = mask_key


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
    namespaces: dict[str, Namespace] = defaultdict(Namespace)
    modules = []
    for index, layer in enumerate(layers):
        module = build_layer(layer, index, mask_key, namespaces)
        _draw_weights(module, key(seed, "weights", index))
        modules.append(module.to(device=device, dtype=dtype))
        layer_done()
    return Network(modules, mask_key)


def network_to_score(layers: tuple[Layer, ...], network: Network) -> Network:
    """The plain network of these layers in evaluation mode, around the very tensors of `network`.

    So a network in training can be scored, whatever its layers were replaced by, without its
    parameters being there twice and without its modules hearing of it. Neither reads nor changes
    any random state.
    """
    namespaces: dict[str, Namespace] = defaultdict(Namespace)
    mask_key = MaskKey(seed=0)  # nothing is dropped
    with torch.device("meta"):  # without memory, and without drawing weights
        modules = [build_layer(layer, i, mask_key, namespaces) for i, layer in enumerate(layers)]
    plain = Network(modules, mask_key).eval()
    plain.load_state_dict(network.state_dict(keep_vars=True), assign=True)
    return plain


def build_layer(
    layer: Layer, index: int, mask_key: MaskKey, namespaces: dict[str, Namespace]
) -> nn.Module:
    """The module of the network's layer `index`, with weights that mean nothing yet.

    Args:
        mask_key: Shared by the layers of a network.
        namespaces: A stash and its pop find one another in `namespaces[name]`.
    """
    match layer:
        case Conv(wide, out, kernel, stride, dilation, padding, bias):
            return nn.Conv2d(wide, out, kernel, stride, padding, dilation, bias=bias)
        case TransposedConv(wide, out, kernel, stride, padding, output_padding, bias):
            return nn.ConvTranspose2d(wide, out, kernel, stride, padding, output_padding, bias=bias)
        case Pool() if layer.in_blocks:
            return BlockMaxPool()
        case Pool(mode="max"):
            return nn.MaxPool2d(layer.kernel, layer.stride, layer.padding)
        case Pool():
            return nn.AvgPool2d(layer.kernel, layer.stride, layer.padding)
        case Upsample(mode="nearest"):
            return nn.Upsample(scale_factor=layer.factor, mode="nearest")
        case Upsample():
            return nn.Upsample(scale_factor=layer.factor, mode="bilinear", align_corners=False)
        case Norm():
            return _norm(layer)
        case Dropout():
            return ChannelDropout(layer.probability, index, mask_key)
        case Activation():
            # In place saves one of a cell's maps; may not be the first layer of a partition.
            return nn.LeakyReLU(layer.slope, inplace=True)
        case Stash():
            return stash_layer(namespaces[layer.name])
        case Pop():
            return pop_layer(namespaces[layer.name], layer.fit)
    raise AssertionError(f"no module for layer {layer}")


def _norm(layer: Norm) -> nn.Module:
    if layer.norm == "instance":
        return nn.InstanceNorm2d(layer.out_channels, affine=layer.affine)
    if layer.norm == "group":
        return nn.GroupNorm(layer.groups, layer.out_channels, affine=layer.affine)
    return BatchNorm(layer.out_channels, affine=layer.affine)


def _draw_weights(module: nn.Module, seed: int) -> None:
    """Kaiming's normal weights for leaky rectifiers, zero biases.

    Without normalisation torch's default would halve the signal in every layer. Drawn in float32
    on the CPU whatever the precision, so that the weights depend on the seed only.
    """
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        weight = module.weight
        channels = module.in_channels
        taps = weight[0, 0].numel()
        if isinstance(module, nn.ConvTranspose2d):
            taps //= module.stride[0] * module.stride[1]  # taps that reach one output cell
        generator = torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * math.sqrt(2 / (1 + 0.01**2) / (channels * max(taps, 1))))
            if module.bias is not None:
                module.bias.zero_()


def check_weight_count(layers: tuple[Layer, ...], found: dict[str, Tensor], source: str) -> None:
    """Refuse layers that need more weights than there are, before anything is allocated for them.

    Raises:
        TilenetError: With both numbers.
    """
    needed = sum(layer.num_parameters for layer in layers)
    held = sum(tensor.numel() for tensor in found.values())
    if needed > held:
        raise TilenetError(
            f"weights must fit the network ({source}: {held:,} values, network.json: {needed:,}); "
            "use another checkpoint"
        )


def load_weights(network: Network, found: dict[str, Tensor], source: str) -> None:
    """Fill in a network's weights, which come from `source`.

    Raises:
        TilenetError: Names or shapes differ.
    """
    wanted = network.state_dict()
    endless = [
        name
        for name, tensor in found.items()
        if not tensor.is_floating_point() or not tensor.double().isfinite().all()
        if name in wanted and wanted[name].is_floating_point()
    ]
    if endless:
        raise TilenetError(
            f"weights must be finite real numbers ({source}: {endless[0]} and {len(endless) - 1} "
            "more are not); use another checkpoint"
        )
    wrong = sorted(set(found) ^ set(wanted)) or [
        name for name, tensor in wanted.items() if found[name].shape != tensor.shape
    ]
    if wrong:
        name = wrong[0]
        raise TilenetError(
            f"weights must fit the network ({source}: {name} is {_shape(found.get(name))} there "
            f"and {_shape(wanted.get(name))} in the network, {len(wrong)} such); use weights of "
            "the same network"
        )
    network.load_state_dict(found)


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(str(n) for n in tensor.shape) or "a number"
