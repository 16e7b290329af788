"""Measure by autograd what an output cell looks at; the walk is checked against it.

What is known of a layer here comes from its torch module alone. Weights are positive and the image
is a ramp, once rising and once falling, so that nothing cancels and each maximum is taken at the
far end of its window: a gradient is zero only where there is no path at all.
"""

import torch
from torch import nn

from tilenet.geometry.layers import Layer
from tilenet.model.modules import BlockMaxPool, ComputedConv, PaddedConv, PaddedPool
from tilenet.model.network import Network, build_network

Interval = tuple[int, int]


def positive_network(layers: tuple[Layer, ...]) -> Network:
    """The network in float64 with random positive weights and no biases."""
    network = build_network(layers, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(3)
    for module in network:
        if isinstance(module, ComputedConv):
            continue
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            weight = torch.rand(module.weight.shape, generator=generator) + 0.5
            taps = module.in_channels * module.kernel_size[0]
            module.weight.data = weight.double() / taps
            if module.bias is not None:
                module.bias.data.zero_()
    return network


def in_one_row(network: Network) -> Network:
    """Turn the modules into those that act alike on one row as before on rows that are all alike.

    A network of seven poolings needs images of more than a thousand rows; this one needs one row.
    """
    for index, module in enumerate(network):
        if isinstance(module, PaddedConv | PaddedPool):
            network[index], module = _padded_in_one_row(module)
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.weight.data = module.weight.data.sum(2, keepdim=True)
            module.kernel_size = (1, module.kernel_size[1])
            module.stride, module.dilation = (1, module.stride[1]), (1, module.dilation[1])
            module.padding = (0, module.padding[1])
            module.output_padding = (0, module.output_padding[1])
        elif isinstance(module, BlockMaxPool):
            network[index] = nn.MaxPool2d((1, 2))
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            module.kernel_size, module.stride = (1, module.kernel_size), (1, module.stride)
            module.padding = (0, module.padding)
        elif isinstance(module, nn.Upsample):
            module.scale_factor = (1.0, module.scale_factor)
    return network


def _padded_in_one_row(module: PaddedConv | PaddedPool) -> tuple[nn.Module, nn.Module]:
    """Cells on the right alone, with the module without any behind them; and that module."""
    extra, plain = module.extra, module.pool if isinstance(module, PaddedPool) else module
    if isinstance(module, PaddedConv):
        module.extra = 0
    fill = float("-inf") if isinstance(plain, nn.MaxPool2d) else 0.0
    return nn.Sequential(nn.ConstantPad2d((0, extra, 0, 0), fill), plain), plain


def looks_at(
    layers: tuple[Layer, ...], pixels: int, cells: list[Interval], least: float = 0.0
) -> tuple[list[Interval | None], int]:
    """First and last of `pixels` input pixels in a row that each interval of output cells looks at.

    Args:
        least: Gradients up to this are rounding.

    Returns:
        The intervals, None where there is no path, and the number of output cells.
    """
    network = in_one_row(positive_network(layers))
    seen = torch.zeros(len(cells), pixels, dtype=torch.bool)
    ramp = torch.linspace(1, 2, pixels, dtype=torch.float64)
    for row in (ramp, ramp.flip(0)):
        image = row.repeat(len(cells), layers[0].in_channels, 1, 1).requires_grad_()
        out = network(image)
        chosen = torch.zeros_like(out)
        for sample, (first, last) in enumerate(cells):
            chosen[sample, :, :, first : last + 1] = 1
        (gradient,) = torch.autograd.grad(out, image, chosen)
        seen |= (gradient.abs() > least).any(dim=1)[:, 0]
    return [_ends(row) for row in seen], out.shape[3]


def _ends(seen: torch.Tensor) -> Interval | None:
    places = seen.nonzero()[:, 0].tolist()
    return (places[0], places[-1]) if places else None
