"""Sweeps over ranks that hold columns of the image: the whole image's numbers, nothing twice."""

from typing import Any

import pytest
import torch
from mpi4py import MPI
from shared_out import summed
from sweeps import CPU, whole
from torch.utils.flop_counter import FlopCounterMode
from zoo import network

from tilenet.adoption.adopt import adopt
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange import swept
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.memory.sweeps.trained_sweeps import maps_to_keep

pytestmark = pytest.mark.ranks(2, (3, 4))

STRIPS = (1, 7, 32, 500)
SIZE = 72, 144


def pair(seed: int, bands: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random image, and random weights of its logits, which make the loss."""
    generator = torch.Generator().manual_seed(seed)
    image, weight = (
        torch.randn(1, channels, *SIZE, generator=generator, dtype=torch.float64)
        for channels in (bands, classes)
    )
    return image, weight


def over_ranks(
    comm: MPI.Intracomm,
    layers: tuple[Layer, ...],
    net: Network,
    unit: int,
    image: torch.Tensor,
    weight: torch.Tensor,
    strip: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and gradients of all ranks."""
    tiling = cut(*SIZE, Cut(grid=(1, comm.size)), HaloRule(0, unit, exchanged=True))

    def sweeps(rows: int, cols: int) -> Sweeps:
        return Sweeps(strip_edges(rows, strip), maps_to_keep(layers, rows, cols))

    pipe = SweptPipe(net, layers, [CPU], "float64", sweeps, HaloChannel(comm))
    read = tiling.tiles[comm.rank].read
    net.zero_grad()
    mine = image[:, :, :, read.col : read.col + read.width].clone()
    laid = pipe(mine, Origin((0,), tiling, (comm.rank,)), whole(SIZE))
    (laid * weight).sum().backward()  # type: ignore[no-untyped-call]
    grads = [summed(one.grad.contiguous(), comm) for one in net.trained]  # type: ignore[union-attr]
    return summed(laid.detach().contiguous(), comm), grads


def compare(
    comm: MPI.Intracomm, layers: tuple[Layer, ...], net: Network, unit: int, strip: int
) -> None:
    """Logits and gradients with those of the network on the whole image."""
    image, weight = pair(strip, layers[0].in_channels, layers[-1].out_channels)
    found, grads = over_ranks(comm, layers, net, unit, image, weight, strip)
    net.zero_grad()
    wanted = net(image.clone())
    (wanted * weight).sum().backward()
    plain = [one.grad for one in net.trained]
    most = max(float(one.abs().max()) for one in plain if one is not None)
    apart = float((found - wanted.detach()).abs().max())
    assert apart <= 1e-12 * float(wanted.detach().abs().max())
    for one, other in zip(grads, plain, strict=True):
        assert other is not None
        least = 1e-3 * most
        assert float((one - other).abs().max()) <= 1e-10 * max(float(other.abs().max()), least)


@pytest.mark.ranks((2, 3, 4))
@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("name", ["residual", "shifted", "between", "gated", "pyramid", "resized"])
def test_adopted_networks(comm: MPI.Intracomm, name: str, strip: int) -> None:
    """Strides, dilations, even kernels, both corners, unequal pads, gates, averages in bins."""
    adopted = adopt(network(name, drops=False), 3)
    net = adopted.network(torch.float64).train()
    compare(comm, adopted.layers, net, adopted.context.alignment_px, strip)


@pytest.mark.ranks((2, 3, 4))
@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_our_own(comm: MPI.Intracomm, upsampling: Any, strip: int) -> None:
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3, upsampling=upsampling))
    compare(comm, layers, build_network(layers, 4, torch.float64).train(), 8, strip)


def test_masks_of_single_cells_are_those_of_the_image(comm: MPI.Intracomm) -> None:
    convs = [torch.nn.Conv2d(wide, out, 3, padding=1) for wide, out in ((3, 4), (4, 2))]
    adopted = adopt(torch.nn.Sequential(convs[0], torch.nn.Dropout(0.4), convs[1]), 3)
    net = adopted.network(torch.float64).train()
    vector = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    comm.Bcast(vector.numpy())
    torch.nn.utils.vector_to_parameters(vector, net.parameters())
    net.mask_key.images, net.mask_key.step = (0,), 2
    compare(comm, adopted.layers, net, 1, 7)


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_backward_is_the_adjoint(comm: MPI.Intracomm, upsampling: Any) -> None:
    """⟨Fw, y⟩ = ⟨w, F*y⟩ of the convolutions that all ways pass, the first and the last.

    Without biases and norms logits are homogeneous in each (Euler).
    """
    layers = unet_layers(UNetOptions(2, base=4, bands=2, classes=3, upsampling=upsampling))
    net = build_network(layers, 6, torch.float64).train()
    image, weight = pair(9, 2, 3)
    out, grads = over_ranks(comm, layers, net, 4, image, weight, 8)
    of = dict(zip(net.state_dict(), grads, strict=True))
    names = [name for name, _ in net.named_parameters() if name.endswith("weight")]
    for name in (names[0], names[-1]):
        backward = float((net.state_dict()[name] * of[name]).sum())
        assert backward == pytest.approx(float((out * weight).sum()), rel=1e-11), name


def test_nothing_is_computed_twice(comm: MPI.Intracomm) -> None:
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3))
    net = build_network(layers, 4, torch.float64).train()
    image, _ = pair(1, 2, 3)
    tiling = cut(*SIZE, Cut(grid=(1, comm.size)), HaloRule(0, 8, exchanged=True))
    channel = HaloChannel(comm)
    pipe = SweptPipe(
        net, layers, [CPU], "float64", lambda rows, _: Sweeps(strip_edges(rows, 16)), channel
    )
    read = tiling.tiles[comm.rank].read
    mine = image[:, :, :, read.col : read.col + read.width].clone()
    with torch.no_grad(), FlopCounterMode(display=False) as alone:
        net(image)
    with torch.no_grad(), FlopCounterMode(display=False) as shared:
        pipe(mine, Origin((0,), tiling, (comm.rank,)), lambda logits, _: logits.sum())
    assert comm.allreduce(shared.get_total_flops()) == alone.get_total_flops()
    assert channel.bytes > 0


def test_a_halo_that_is_short_is_seen(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The red control: zeros in place of the neighbours' columns."""
    right = swept.Columns
    monkeypatch.setattr(
        "tilenet.parallel.exchange.swept_training.Columns",
        lambda shares, number, channel: right(shares, number, HaloChannel(None)),
    )
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3))
    with pytest.raises(AssertionError):
        compare(comm, layers, build_network(layers, 4, torch.float64).train(), 8, 32)
