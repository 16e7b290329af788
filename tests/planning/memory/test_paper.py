"""The paper's profile against the sizes of the network's own maps."""

import random

import pytest

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Conv, Join
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.memory.paper import level_bytes


def network(seed: int) -> tuple[UNetOptions, int]:
    """A random U-Net, and an input that it halves without remainders."""
    draw = random.Random(seed)
    options = UNetOptions(
        poolings=draw.randint(1, 4),
        convolutions=draw.randint(1, 4),
        base=2 * draw.randint(1, 9),
        kernel=draw.choice([3, 5]),
        padding=draw.choice(["same", "valid"]),
    )
    lost = 0 if options.padding == "same" else (options.kernel - 1) * options.convolutions
    size = 2 * lost + 2 * draw.randint(1, 9)
    for _ in range(options.poolings):
        size = 2 * size + lost
    return options, size


@pytest.mark.parametrize("seed", range(12))
def test_the_profile_counts_the_networks_convolutions(seed: int) -> None:
    # Widths are the network's; channels are the level's throughout, where the network has half of
    # them behind the last convolution of the bottleneck, and in the decoder.
    options, size = network(seed)
    layers = unet_layers(options)
    shapes = map_shapes(layers, size, size)
    found = level_bytes(options, size, item_bytes=1)
    cells = [
        (shape.rows, layer.kernel)
        for layer, shape in zip(layers, shapes[1:], strict=True)
        if isinstance(layer, Conv)
    ][:-1]
    count = options.convolutions
    joined = [
        shape.rows
        for layer, shape in zip(layers, shapes[1:], strict=True)
        if isinstance(layer, Join)
    ]
    by_level = [cells[i : i + count] for i in range(0, len(cells), count)]
    inputs = [size, *(maps[-1][0] // 2 for maps in by_level[: options.poolings])]
    for level, width in enumerate(inputs):
        maps = sum(rows**2 for rows, _ in by_level[level])
        assert found.encoder[level] == width**2 + 2**level * options.base * maps
    for level in range(options.poolings):
        above = by_level[len(by_level) - 1 - level]
        maps = sum(rows**2 for rows, _ in above) + 2 * joined[-1 - level] ** 2
        assert found.decoder[level] == 2**level * options.base * maps


def test_an_odd_size_is_halved_downwards_and_padded_on_the_way_up() -> None:
    found = level_bytes(UNetOptions(poolings=2, base=2, convolutions=1), 103, 1)
    assert found.encoder == (103**2 * 3, 51**2 * 5, 25**2 * 9)
    assert found.decoder == (2 * 3 * 103**2, 4 * 3 * 51**2)


def test_too_small_an_input_is_refused() -> None:
    with pytest.raises(TilenetError, match="use a larger tile or fewer poolings"):
        level_bytes(UNetOptions(poolings=4, padding="valid"), 124)
    level_bytes(UNetOptions(poolings=4, padding="valid"), 140)
