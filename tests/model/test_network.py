"""Networks are built from layers only; on tiles they give the whole image's map."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.layers import Conv, Layer, Norm, Pool, TransposedConv
from tilenet.geometry.maps import output_size
from tilenet.geometry.tiles import Cut, cut, owned
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.modules import BatchNorm
from tilenet.model.network import Network, build_network, load_weights, network_to_score

SMALL = UNetOptions(poolings=2, base=4, bands=3, classes=5)
WAYS = list(product(("same", "valid"), ("nearest", "bilinear", "transposed")))
EVERY = [
    *(replace(SMALL, padding=padding, upsampling=upsampling) for padding, upsampling in WAYS),
    replace(SMALL, norm="instance"),
    replace(SMALL, norm="group", groups=3, bias=True),
    replace(SMALL, norm="batch", dropout=0.2),
    replace(SMALL, convolutions=3, kernel=5, poolings=1, base=6),
    replace(SMALL, convolutions=1, kernel=1, bias=False),
]


NAMES = [*(f"{padding} {way}" for padding, way in WAYS), "instance", "group", "batch", "wide", "k1"]


def image(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_biases(network: Network) -> Network:
    """Biases are drawn as 0, where a mistake with them would not show."""
    for number, module in enumerate(network):
        if getattr(module, "bias", None) is not None:
            module.bias.data.copy_(image(*module.bias.shape, seed=number))
    return network


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_there_is_one_module_per_layer_with_its_parameters_and_channels(
    options: UNetOptions,
) -> None:
    layers = unet_layers(options)
    network = build_network(layers, dtype=torch.float64)
    assert len(network) == len(layers)
    for layer, module in zip(layers, network, strict=True):
        assert sum(p.numel() for p in module.parameters()) == layer.num_parameters
    network.mask_key.images = (0, 1)
    shapes = []
    for module in network:
        module.register_forward_hook(lambda _, x, y: shapes.append((x[0].shape, y.shape)))
    side = 60 if options.padding == "valid" else 24
    out = network(image(2, 3, side, side + 4 * 5))
    assert [(x[1], y[1]) for x, y in shapes] == [
        (layer.in_channels, layer.out_channels) for layer in layers
    ]
    assert tuple(out.shape) == (
        *(2, 5),
        *(output_size(layers, side), output_size(layers, side + 4 * 5)),
    )


def test_a_network_computes_what_plain_pytorch_computes() -> None:
    """The 2015 U-Net, written out."""
    layers = unet_layers(replace(SMALL, padding="valid", upsampling="transposed"))
    network = with_biases(build_network(layers, dtype=torch.float64))
    state = list(network.state_dict().values())
    f = nn.functional

    def next_two(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = f.leaky_relu(f.conv2d(x, state.pop(0), state.pop(0)), 0.01)
        return x

    x = image(2, 3, 44, 60)
    top = next_two(x)
    middle = next_two(f.max_pool2d(top, 2))
    out = next_two(f.max_pool2d(middle, 2))
    for skip in (middle, top):
        out = f.conv_transpose2d(out, state.pop(0), state.pop(0), stride=2)
        rows, cols = ((a - b) // 2 for a, b in zip(skip.shape[2:], out.shape[2:], strict=True))
        out = next_two(torch.cat([out, skip[:, :, rows:-rows, cols:-cols]], 1))
    out = f.conv2d(out, state.pop(0), state.pop(0))
    assert not state
    assert torch.equal(network(x), out)


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        (Norm(6, 6, "instance"), nn.InstanceNorm2d(6)),
        (Norm(6, 6, "group", groups=3, affine=True), nn.GroupNorm(3, 6)),
        (Norm(6, 6, "batch", affine=True), nn.BatchNorm2d(6)),
        (Pool(6, 6, 3, 2, 1), nn.MaxPool2d(3, 2, 1)),
        (Pool(6, 6, 3, 2, 1, "average"), nn.AvgPool2d(3, 2, 1)),
    ],
    ids=repr,
)
def test_layers_without_drawn_weights_are_torchs(layer: Layer, module: nn.Module) -> None:
    x = image(3, 6, 9, 11)
    (built,) = build_network((layer,), dtype=torch.float64)
    # Batch norm is ours: torch's, but for counting each tile once under checkpointing.
    assert type(built) is (BatchNorm if type(module) is nn.BatchNorm2d else type(module))
    assert torch.equal(built(x), module.double()(x))


# --- first weights


def test_weights_depend_on_the_seed_and_the_layers_place_only() -> None:
    layers = unet_layers(SMALL)
    torch.manual_seed(1)
    network = build_network(layers, seed=7)
    torch.manual_seed(2)
    again = build_network(layers, seed=7)
    other = build_network(layers, seed=8)
    fewer = build_network(layers[:1] + layers[4:5], seed=7)  # the second has other channels
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        if name.endswith("weight"):
            assert not torch.equal(other.state_dict()[name], tensor)
    assert torch.equal(fewer[0].weight, network[0].weight)
    first, second = build_network((Conv(5, 6), Conv(5, 6)), seed=7)
    assert not torch.equal(first.weight, second.weight)


def test_precision_does_not_change_the_weights() -> None:
    layers = unet_layers(SMALL)
    single, double = build_network(layers, 7), build_network(layers, 7, torch.float64)
    for name, tensor in single.state_dict().items():
        assert tensor.dtype == torch.float32
        # scaled in the drawn precision, so that float64 starts from the very same numbers
        assert torch.equal(double.state_dict()[name], tensor.double())


@pytest.mark.parametrize(
    ("layer", "taps"),
    [
        (Conv(48, 64, 3), 48 * 9),
        (Conv(96, 80, 1, bias=True), 96),
        (TransposedConv(64, 48), 64),
        (TransposedConv(64, 48, 4, 2, 1), 64 * 4),
        (Conv(64, 64, 5, 2, 1, 2), 64 * 25),
    ],
    ids=str,
)
def test_the_signal_keeps_its_size_through_each_layer(layer: Layer, taps: int) -> None:
    """Kaiming: Var(w) = 2 / ((1 + slope²)·taps), so a rectified layer keeps the mean square."""
    (module,) = build_network((layer,), seed=3, dtype=torch.float64)
    x = nn.functional.leaky_relu(image(4, layer.in_channels, 24, 24), 0.01)
    out = nn.functional.leaky_relu(module(x), 0.01)[..., 4:-4, 4:-4]
    # one channel's mean square scatters by less than half of itself; five standard deviations
    ratio = (out**2).mean() / (x**2).mean()
    assert abs(ratio - 1) < 5 * 0.5 / layer.out_channels**0.5
    count = module.weight.numel()
    assert abs(module.weight.var() * taps * 1.0001 / 2 - 1) < 5 * (2 / count) ** 0.5
    assert abs(module.weight.mean() / module.weight.std()) < 5 / count**0.5
    if module.bias is not None:
        assert not module.bias.any()


# --- loading


def test_weights_are_loaded_under_partition_free_names() -> None:
    layers = unet_layers(replace(SMALL, norm="batch"))
    source = with_biases(build_network(layers, seed=1))
    target = build_network(layers, seed=2)
    load_weights(target, source.state_dict(), "there")
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
        assert name.split(".")[0].isdigit()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"0.weight": None}, r"here: 0.weight is missing there and 4×3×3×3 in the network, 1 such"),
        ({"99.bias": (4,)}, r"99.bias is 4 there and missing in the network"),
        ({"0.weight": (4, 4, 3, 3)}, r"0.weight is 4×4×3×3 there and 4×3×3×3"),
        ({"0.bias": (), "2.bias": (9,)}, r"0.bias is a number there and 4 in the network, 2 such"),
    ],
)
def test_weights_of_another_network_are_refused(
    change: dict[str, tuple[int, ...] | None], said: str
) -> None:
    network = build_network(unet_layers(SMALL))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = dict(build_network(unet_layers(SMALL), seed=9).state_dict())
    for name, shape in change.items():
        if shape is None:
            del found[name]
        else:
            found[name] = image(*shape) if shape else torch.tensor(2.5)
    with pytest.raises(TilenetError, match=said):
        load_weights(network, found, "here")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])


# --- the promise, without ranks


def maps_of(
    options: UNetOptions, rule: HaloRule, size: tuple[int, int], asked: Cut
) -> tuple[np.ndarray, int]:
    """The map that tiles give, and how many there are."""
    network = with_biases(build_network(unet_layers(options), seed=5, dtype=torch.float64))
    pixels = image(3, *size).numpy()
    tiling = cut(*size, asked, rule)
    found = np.full((5, *tiling.extended), np.nan)
    margin = 2 * max(*size, rule.halo_px + 16)
    endless = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")
    for tile in tiling.tiles:
        row, col = tile.read.row + margin, tile.read.col + margin
        window = endless[:, row : row + tile.read.height, col : col + tile.read.width]
        with torch.no_grad():
            out = network(torch.from_numpy(window[None].copy()))[0].numpy()
        rows = slice(tile.own.row, tile.own.row + tile.own.height)
        found[:, rows, tile.own.col : tile.own.col + tile.own.width] = owned(
            out, tile, rule.offset_px
        )
    return found, len(tiling.tiles)


@pytest.mark.parametrize(("padding", "upsampling"), WAYS)
@pytest.mark.parametrize(
    ("size", "asked"),
    [((70, 121), Cut(grid=(3, 4))), ((9, 150), Cut(size_px=24)), ((64, 64), Cut(size_px=8))],
    ids=["3 × 4 tiles", "a strip", "tiles as small as may be"],
)
def test_tiles_give_the_whole_images_map(
    padding: str, upsampling: str, size: tuple[int, int], asked: Cut
) -> None:
    options = replace(SMALL, padding=padding, upsampling=upsampling)
    layers = unet_layers(options)
    context = context_of(layers)
    rule = halo_rule("exact", layers)
    whole, _ = maps_of(options, rule, size, Cut())
    tiles, num_tiles = maps_of(options, rule, size, asked)
    assert num_tiles > 3
    scale = np.abs(whole).max()
    assert np.abs(tiles - whole).max() <= 1e-14 * scale
    if padding == "same" and size == (70, 121):  # one unit less shows
        short = replace(rule, halo_px=context.halo_px - context.alignment_px)
        tiles, _ = maps_of(options, short, size, asked)
        assert np.abs(tiles - whole).max() > 1e-12 * scale


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_a_network_in_training_is_scored_with_its_own_tensors(options: UNetOptions) -> None:
    layers = unet_layers(options)
    network = with_biases(build_network(layers, 3, torch.float64)).train()
    generators = torch.random.get_rng_state()
    plain = network_to_score(layers, network)
    assert torch.equal(torch.random.get_rng_state(), generators)
    assert [m.training for m in network.modules()] == [True] * len(list(network.modules()))
    tensors, others = network.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    assert tensors.keys() == others.keys()
    assert all(others[name] is tensor for name, tensor in tensors.items())
    assert all(parameter.requires_grad for parameter in network.parameters())
    x = image(1, 3, *(2 * [92 if options.padding == "valid" else 32]))
    with torch.no_grad():
        for parameter in network.parameters():  # as an optimizer would
            parameter.add_(0.01)
        found, wanted = plain(x), network.eval()(x)
    assert torch.equal(found, wanted)


def test_what_is_frozen_stays_frozen_while_a_network_is_scored() -> None:
    layers = unet_layers(replace(SMALL, norm="batch"))
    network = build_network(layers, 3, torch.float64).train()
    names = [name for name, _ in network.named_parameters()]
    frozen = set(np.random.default_rng(7).choice(names, len(names) // 3, replace=False))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in frozen)
    network_to_score(layers, network)
    assert {n for n, one in network.named_parameters() if not one.requires_grad} == frozen
