"""Predicted bytes, against the tensors that live while real modules run."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilenet.geometry.networks import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.planning.memory import inference_bytes

SMALL = UNetOptions(poolings=2, base=4, bands=3, classes=5)
SHAPES = list(product((1, 3), ("same", "valid"), ("nearest", "bilinear", "transposed")))
WAYS = [
    replace(SMALL, poolings=poolings, padding=padding, upsampling=upsampling)
    for poolings, padding, upsampling in SHAPES
]
NAMES = ["-".join(str(part) for part in shape) for shape in SHAPES]


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that still live, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        out = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.found.update({StorageWeakRef(storage): storage.nbytes() for storage in storages})
        self.found = {ref: size for ref, size in self.found.items() if not ref.expired()}
        self.most = max(self.most, sum(self.found.values()))
        return out


def most_bytes_alive(options: UNetOptions, height: int, width: int) -> int:
    """Of the maps that the layers make; the image is its caller's."""
    network = build_network(unet_layers(options), dtype=torch.float64).eval()
    image = torch.randn(1, options.bands, height, width, dtype=torch.float64)
    with torch.inference_mode(), Alive() as alive:
        network(image)
    return alive.most


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
@pytest.mark.parametrize(("height", "width"), [(104, 120), (136, 248)])
def test_inference_takes_the_bytes_of_the_maps_that_live_at_one_time(
    options: UNetOptions, height: int, width: int
) -> None:
    layers = unet_layers(options)
    predicted = inference_bytes(layers, height, width, 8)
    measured = most_bytes_alive(options, height, width)
    if options.padding == "same":
        assert predicted == measured
    else:  # a stash counts its map as input, output and skip, which matters where it is the largest
        assert measured <= predicted <= 2 * measured
    assert inference_bytes(layers, height, width, 4) * 2 == predicted


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_inference_counts_the_copy_that_an_odd_size_costs(upsampling: str) -> None:
    options = replace(SMALL, upsampling=upsampling)
    predicted = inference_bytes(unet_layers(options), 149, 155, 8)
    assert predicted >= most_bytes_alive(options, 149, 155)


def test_many_bands_count_where_they_are_the_largest_map() -> None:
    layers = unet_layers(replace(SMALL, poolings=1, base=2, bands=64, classes=1))
    assert inference_bytes(layers, 40, 48, 8) == 8 * (64 + 2) * 40 * 48
