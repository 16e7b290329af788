"""Layers that save: against the planner's formula, and against steps on tensors without memory."""

import random
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from networks import Head, random_balance, random_options
from owned_bytes import OwnedBytes
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _pop_mode_temporarily

from tilenet.geometry.layers import Layer
from tilenet.geometry.unet import PRESETS, unet_layers
from tilenet.model.network import build_network
from tilenet.planning.memory.layer import cast_parameters, layer_bytes, parameter_dtype
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.layers import saving_layers
from tilenet.planning.swap.threshold import simulate
from tilenet.planning.time.layer_time import LayerTime

PRECISIONS = ["float32", "float64", "bfloat16"]


def random_network(draw: random.Random) -> tuple[Layer, ...]:
    return unet_layers(random_options(draw, classes=draw.randint(1, 6), groups=2))


def times_of(layers: Sequence[Layer]) -> list[LayerTime]:
    return [LayerTime(3 + 7 * place, 5 + 11 * place) for place in range(len(layers))]


def test_seconds_and_saved_bytes_are_the_layers() -> None:
    layers = unet_layers(PRESETS["small"])
    costs = layer_bytes(layers, 96, 64)
    saving = saving_layers(costs, times_of(layers), 5, 60, 1)
    assert sum(layer.forward_s for layer in saving) == sum(3 + 7 * place for place in range(5, 60))
    assert sum(layer.backward_s for layer in saving) == sum(
        5 + 11 * place for place in range(5, 60)
    )
    assert len(saving) == 55
    for layer in saving:
        assert layer.swapped_bytes == layer.saved_bytes
    most = max(cost.output for cost in costs[5:60])
    few = saving_layers(costs, times_of(layers), 5, 60, most)
    # Maps of the largest level only; not the statistics, masks and indices.
    assert 0 < sum(layer.swapped_bytes for layer in few) < sum(layer.saved_bytes for layer in few)
    assert all(layer.swapped_bytes % most == 0 for layer in few)
    assert not any(c.swapped_bytes for c in saving_layers(costs, times_of(layers), 5, 60, most + 1))


@pytest.mark.parametrize("seed", range(12))
def test_all_kept_needs_the_activations_of_the_formula(seed: int) -> None:
    draw = random.Random(seed)
    layers = random_network(draw)
    balance = random_balance(draw, len(layers), 5)
    edges = list(accumulate(balance, initial=0))
    size, many = (draw.randint(33, 70), draw.randint(33, 70)), draw.randint(2, 5)
    costs = layer_bytes(layers, *size, PRECISIONS[seed % 3])
    parts = partition_bytes(costs, balance, many, "never")
    for (start, stop), part in zip(pairwise(edges), parts, strict=True):
        saving = saving_layers(costs, times_of(layers), start, stop, 1000)
        found = simulate(saving, 0, 1e9, many)
        assert found.peak_bytes == part.activations


class Gone:
    """Saved tensors whose storages leave at once, and come back where somebody asks."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) or storage.nbytes() < self.min_bytes:
            return tensor
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return weakref.ref(storage), storage.nbytes(), tensor.dtype, tensor.device, layout

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        known, num_bytes, dtype, device, (offset, shape, stride) = saved
        # What somebody else has kept counts already.
        with nullcontext() if known() is None else _pop_mode_temporarily():
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return flat.view(dtype).as_strided(shape, stride, offset)


def step_bytes(
    layers: tuple[Layer, ...],
    size: tuple[int, int],
    precision: str,
    swapping: int,
    many: int,
    min_bytes: int,
) -> int:
    """Peak of a step whose first layers swap; without images, weights, their gradients."""
    dtype = parameter_dtype(precision)
    mixed = {"bfloat16": torch.bfloat16}.get(precision)
    network = build_network(layers)
    cast_parameters(network, dtype)
    network.mask_key.images = (0,)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images = [
        torch.randn(1, layers[0].in_channels, *size, dtype=dtype, requires_grad=True)
        for _ in range(many)
    ]
    gone = Gone(min_bytes)
    with OwnedBytes() as live:
        losses = []
        for x in images:
            with torch.autocast("cpu", mixed, mixed is not None, cache_enabled=False):
                for number, layer in enumerate(network):
                    swaps = number < swapping
                    with saved_tensors_hooks(gone.pack, gone.unpack) if swaps else nullcontext():
                        x = layer(x)
            losses.append(Head.apply(x))
            del x
        # In one go, as GPipe does: weights' gradients wait for those of all micro-batches.
        for image in images:
            image.register_post_accumulate_grad_hook(drop_gradient)
        torch.autograd.backward(losses)
    return live.peak - 8 * many  # the losses and their gradients


def drop_gradient(image: Tensor) -> None:
    image.grad = None


@pytest.mark.parametrize("seed", range(24))
def test_a_predicted_peak_is_that_of_a_step(seed: int) -> None:
    draw = random.Random(seed)
    layers, many = random_network(draw), draw.randint(1, 3)
    size, min_bytes = (draw.randint(48, 90), draw.randint(48, 90)), draw.choice([1, 4000])
    precision = PRECISIONS[seed % 3]
    costs = layer_bytes(layers, *size, precision)
    saving = saving_layers(costs, times_of(layers), 0, len(layers), min_bytes)
    for k in (len(saving), draw.randint(1, len(saving)), draw.randint(1, len(saving))):
        predicted = simulate(saving, k, 1e30, many, 0).peak_bytes
        needed = step_bytes(layers, size, precision, k, many, min_bytes)
        # The first layer's copy of its weights, and statistics that bfloat16 has in float32.
        few = many * (costs[0].parameters // 2 + 8 * len(layers)) * (precision == "bfloat16")
        assert needed - few <= predicted <= 1.02 * needed
        if precision != "bfloat16":
            assert predicted - needed <= 8 * many  # the losses
