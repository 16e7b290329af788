"""Networks strip by strip: the numbers of the network on the whole image."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, network

from tilenet.adoption.adopt import adopt
from tilenet.errors import TilenetError
from tilenet.geometry import sweep as sweeping
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import GlobalPool, Layer, Norm
from tilenet.geometry.maps import map_grids
from tilenet.geometry.sweep import strip_edges
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.network import Network, build_network
from tilenet.parallel.exchange.fixed import FixedNorm, FixedPool, moments_of
from tilenet.parallel.exchange.swept import Sweep, SweptPart

STRIPS = (1, 7, 32, 61, 500)


def with_statistics(layers: tuple[Layer, ...], net: Network, image: Tensor) -> Network:
    """The same network with this image's averages and moments in place of what takes them."""
    found: dict[int, nn.Module] = {}
    grids = map_grids(layers)

    def keep(number: int, layer: Layer) -> object:
        def hook(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
            if isinstance(layer, GlobalPool):
                found[number] = FixedPool(out[0].double())
            else:
                assert isinstance(layer, Norm)
                own = Window(0, 0, *given[0].shape[2:])
                found[number] = FixedNorm(module, layer, moments_of(given[0], own))

        return net[number].register_forward_hook(hook)

    for number, layer in enumerate(layers):
        whole = isinstance(layer, Norm) and layer.scope == "image" and layer.norm != "batch"
        if (whole or isinstance(layer, GlobalPool)) and not grids[number].whole:
            keep(number, layer)
    with torch.no_grad():
        net(image)
    return Network([found.get(n, module) for n, module in enumerate(net)], net.mask_key).eval()


def swept(layers: tuple[Layer, ...], net: Network, image: Tensor, strip_rows: int) -> Tensor:
    edges = strip_edges(image.shape[2], strip_rows)
    sweep = Sweep(layers, net, SweptPart((image.shape[2], image.shape[3]), edges))
    parts = [sweep.feed(part) for part in torch.split(image, strip_rows, dim=2)]
    while sum(part.shape[2] for part in parts) < image.shape[2]:
        parts.append(sweep.feed(None))
    assert sweep.held_bytes == 0
    return torch.cat(parts, 2)


def check(layers: tuple[Layer, ...], net: Network, bands: int) -> None:
    unit = context_of(layers).alignment_px
    rows, cols = -(-157 // unit) * unit, -(-61 // unit) * unit
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(1, bands, rows, cols, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        wanted = net(image)
    given = with_statistics(layers, net, image)
    for strip_rows in STRIPS:
        found = swept(layers, given, image, strip_rows)
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("name", ZOO)
def test_adopted_networks(name: str) -> None:
    adopted = adopt(network(name), 3)
    check(adopted.layers, adopted.network(torch.float64).eval(), 3)


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
def test_our_own(upsampling: str, norm: str) -> None:
    options = UNetOptions(poolings=3, base=4, bands=2, classes=3, dropout=0.2)
    layers = unet_layers(replace(options, upsampling=upsampling, norm=norm))
    check(layers, build_network(layers, 4, torch.float64).eval(), 2)


def test_rows_of_padding_alone() -> None:
    torch.manual_seed(1)
    wide = nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(3, 4, 3, padding=1)
    adopted = adopt(nn.Sequential(*wide, nn.ReLU(), nn.Conv2d(4, 2, 4)), 3)
    network = adopted.network(torch.float64).eval()
    image = torch.randn(1, 3, 21, 30, dtype=torch.float64)
    with torch.no_grad():
        wanted = network(image)
    for strip_rows in range(1, 8):
        found = swept(adopted.layers, network, image, strip_rows)
        assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("wrong", ["a row too few", "zeros at an inner edge"])
def test_what_is_wrong_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = adopt(network("residual"), 3)
    net = adopted.network(torch.float64).eval()
    if wrong == "a row too few":
        right = sweeping._still_read
        monkeypatch.setattr(sweeping, "_still_read", lambda *of: right(*of) + 1)
    else:
        exchange = Sweep.exchange

        def bordered(self: Sweep, layer: int):  # type: ignore[no-untyped-def]
            one = exchange(self, layer)
            need, border = one.halo.need, one.halo.border
            if layer != 0 or border[0] or need.height < 8:
                return one
            less = Window(need.row + 1, need.col, need.height - 1, need.width)
            return replace(one, halo=replace(one.halo, need=less, border=(1, *border[1:])))

        monkeypatch.setattr(Sweep, "exchange", bordered)
    with pytest.raises((AssertionError, RuntimeError)):
        check(adopted.layers, net, 3)


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_statistics_that_are_not_given_are_refused(norm: str) -> None:
    layers = unet_layers(replace(UNetOptions(poolings=2, base=4), norm=norm))
    net = build_network(layers).train(norm == "batch")
    with pytest.raises(TilenetError, match=r"statistics of the whole image as given \(layer"):
        Sweep(layers, net, SweptPart((64, 64), (0, 16, 64)))


def test_averages_that_are_not_given_are_refused() -> None:
    adopted = adopt(network("gated"), 3)
    with pytest.raises(TilenetError, match="global_pool"):
        Sweep(adopted.layers, adopted.network().eval(), SweptPart((64, 64), (0, 16, 64)))
