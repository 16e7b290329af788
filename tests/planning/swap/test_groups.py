"""Groups of real layers: against the planner's formula, and against steps on fake tensors."""

import random
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from networks import Head, random_balance, random_options
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils.checkpoint import checkpoint

from tilenet.geometry.layers import Activation, Conv, Join, Layer, Norm, Pool, Stash, Upsample
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.parallel.swap.actions import Action
from tilenet.planning.memory.layer import cast_parameters, layer_bytes, parameter_dtype
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.choose import ACTIONS, options_of, predict
from tilenet.planning.swap.groups import group_sizes, layer_groups

PRECISIONS = ["float32", "float64", "bfloat16"]


def random_network(draw: random.Random) -> tuple[Layer, ...]:
    return unet_layers(random_options(draw, classes=draw.randint(1, 6), groups=2))


def times_of(layers: Sequence[Layer]) -> list[LayerTime]:
    return [LayerTime(3 + 7 * place, 5 + 11 * place) for place in range(len(layers))]


def random_actions(
    draw: random.Random, groups: Sequence[Any], some: Sequence[Action]
) -> list[Action]:
    return [ACTIONS[draw.choice(options_of(group, some))] for group in groups]


def test_a_group_is_a_convolution_with_what_follows() -> None:
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=2, norm="batch", dropout=0.1))
    convolution = 4  # with dropout, norm and activation
    # stash, pool; convolution; upsample, pop; convolution; head
    assert group_sizes(layers) == (convolution, 1, 1, convolution, 1, 1, convolution, 1)
    begins = Conv | Pool | Upsample | Stash | Join
    for edge in accumulate(group_sizes(layers)[:-1]):
        assert isinstance(layers[edge], begins)
    # A partition may begin anywhere.
    assert group_sizes(layers[2:7]) == (2, 1, 1, 1)
    assert group_sizes([Stash(2, 2), Norm(2, 2), Activation(2, 2)]) == (1, 2)


def test_seconds_and_saved_bytes_are_the_layers() -> None:
    layers = unet_layers(PRESETS["small"])
    costs = layer_bytes(layers, 96, 64)
    groups = layer_groups(costs, times_of(layers), 5, 60, 1)
    assert sum(group.forward_s for group in groups) == sum(3 + 7 * place for place in range(5, 60))
    assert sum(group.backward_s for group in groups) == sum(
        5 + 11 * place for place in range(5, 60)
    )
    assert len(groups) == len(group_sizes(layers[5:60]))
    for group in groups:
        assert group.swapped_bytes == group.saved_bytes
    most = max(cost.output for cost in costs[5:60])
    few = layer_groups(costs, times_of(layers), 5, 60, most)
    # Maps of the largest level only; not the statistics, masks and indices.
    assert 0 < sum(group.swapped_bytes for group in few) < sum(group.saved_bytes for group in few)
    assert all(group.swapped_bytes % most == 0 for group in few)
    assert not any(c.swapped_bytes for c in layer_groups(costs, times_of(layers), 5, 60, most + 1))


@pytest.mark.parametrize("seed", range(24))
def test_all_kept_needs_the_activations_of_the_formula(seed: int) -> None:
    draw = random.Random(seed)
    layers = random_network(draw)
    balance = random_balance(draw, len(layers), 5)
    edges = list(accumulate(balance, initial=0))
    size, many = (draw.randint(33, 70), draw.randint(33, 70)), draw.randint(2, 5)
    costs = layer_bytes(layers, *size, PRECISIONS[seed % 3])
    parts = partition_bytes(costs, balance, many, "never")
    for (start, stop), part in zip(pairwise(edges), parts, strict=True):
        groups = layer_groups(costs, times_of(layers), start, stop, 1000)
        found = predict(groups, ["keep"] * len(groups), 1e9, many)
        assert found.peak_bytes == part.activations


def test_stashes_pops_and_activations_that_overwrite_anothers_map_are_not_computed_again() -> None:
    layers = unet_layers(UNetOptions(poolings=2, base=4, norm="instance"))
    costs = layer_bytes(layers, 48, 64)
    place = 0
    for size, group in zip(
        group_sizes(layers), layer_groups(costs, times_of(layers), 0, len(layers), 1), strict=True
    ):
        assert group.may_checkpoint != isinstance(layers[place], Stash | Join)
        place += size
    joined = Stash(4, 4, name="a"), Conv(4, 4, padding=1), Join(4, 8, ("a",)), Activation(8, 8)
    overwrites = layer_groups(layer_bytes(joined, 20, 20), times_of(joined), 0, 4, 1)
    assert [group.may_checkpoint for group in overwrites] == [False, True, False, False]
    # As a partition's first layer it writes elsewhere.
    first = next(n for n, layer in enumerate(layers) if isinstance(layer, Activation))
    assert layer_groups(costs, times_of(layers), first, first + 5, 1)[0].may_checkpoint


class Gone:
    """Saved tensors whose storages leave at once, and come back where somebody asks."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) or storage.nbytes() < self.min_bytes:
            return tensor
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return weakref.ref(storage), storage.nbytes(), tensor.dtype, layout

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        known, num_bytes, dtype, (offset, shape, stride) = saved
        # What somebody else has kept counts already; `set_` would hold on to a fake storage.
        with nullcontext() if known() is None else _pop_mode_temporarily():
            flat = torch.empty(num_bytes, dtype=torch.uint8)
        return flat.view(dtype).as_strided(shape, stride, offset)


def step_bytes(
    layers: tuple[Layer, ...],
    size: tuple[int, int],
    precision: str,
    actions: Sequence[Action],
    many: int,
    min_bytes: int,
) -> int:
    """Peak of a step with each group as it was chosen; without images, weights, their gradients."""
    dtype = parameter_dtype(precision)
    mixed = {"bfloat16": torch.bfloat16}.get(precision)
    edges = accumulate(group_sizes(layers), initial=0)
    with FakeTensorMode():
        network = build_network(layers)
        cast_parameters(network, dtype)
        network.mask_key.images = (0,)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        parts = [nn.Sequential(*list(network)[a:b]) for a, b in pairwise(edges)]
        images = [
            torch.randn(1, layers[0].in_channels, *size, dtype=dtype, requires_grad=True)
            for _ in range(many)
        ]
        gone = Gone(min_bytes)
        with LiveBytes() as live:
            losses = []
            for x in images:
                with torch.autocast("cpu", mixed, enabled=mixed is not None):
                    for part, action in zip(parts, actions, strict=True):
                        again = action in ("checkpoint", "both")
                        swaps = action in ("swap", "both")
                        with (
                            saved_tensors_hooks(gone.pack, gone.unpack) if swaps else nullcontext()
                        ):
                            x = checkpoint(part, x, use_reentrant=False) if again else part(x)
                losses.append(Head.apply(x))
                del x
            while losses:
                losses.pop().backward()
                images.pop().grad = None
    return live.peak - 4 * many - 4  # the losses, and the gradient of one


@pytest.mark.parametrize(
    "some", [("checkpoint",), ("swap",), ACTIONS], ids=["checkpoint", "swap", "all"]
)
@pytest.mark.parametrize("seed", range(12))
def test_a_predicted_peak_is_that_of_a_step_or_a_little_more(
    seed: int, some: Sequence[Action]
) -> None:
    draw = random.Random(seed)
    layers, many = random_network(draw), draw.randint(1, 3)
    size, min_bytes = (draw.randint(48, 90), draw.randint(48, 90)), draw.choice([1, 4000])
    precision = PRECISIONS[seed % 3]
    costs = layer_bytes(layers, *size, precision)
    groups = layer_groups(costs, times_of(layers), 0, len(layers), min_bytes)
    for actions in [random_actions(draw, groups, some) for _ in range(2)]:
        predicted = predict(groups, actions, 1e30, many, 0).peak_bytes
        needed = step_bytes(layers, size, precision, actions, many, min_bytes)
        # Autocast holds its copies of weights and images until forward ends, whatever groups do.
        copies = (sum(cost.parameters for cost in costs) + costs[0].input) // 2
        copies *= precision == "bfloat16"
        assert needed - copies <= predicted <= 1.3 * needed
