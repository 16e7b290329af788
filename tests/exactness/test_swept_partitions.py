"""Strips that flow through partitions: the numbers of the whole image, and who waits for whom."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar import generate
from mpi4py import MPI
from test_adopted_runs import CLASSES, SIZE, keys_of, run_file, scenes_of
from test_swept_training import (
    COMPARED_SIZE,
    HIGH,
    STRIPS,
    adopted_of,
    compare,
    gradients,
    strip_px,
)

from tilenet.adoption.adopt import adopt
from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.library.whole_run import train
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import build_network
from tilenet.parallel.exchange import swept_partitions
from tilenet.parallel.exchange.swept_partitions import idle_share, turns
from tilenet.planning.balance import likely_balance
from tilenet.planning.compatibility import whole_image

__all__ = ["strip_px"]

CPU = torch.device("cpu")


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("name", ["residual", "shifted", "between"])
def test_gradients_of_adopted_networks(name: str, partitions: int) -> None:
    adopted = adopted_of(name)
    balance = likely_balance(adopted.layers, COMPARED_SIZE, partitions)
    strips = STRIPS if (name, partitions) == ("between", 3) else HIGH
    compare(adopted.layers, adopted.network(torch.float64).train(), 3, 0, balance, strips)


@pytest.mark.parametrize(
    ("upsampling", "partitions", "strips"),
    [
        ("nearest", 2, STRIPS),
        ("nearest", 4, HIGH),
        ("bilinear", 2, HIGH),
        ("transposed", 4, STRIPS),
    ],
)
def test_gradients_of_our_own(upsampling: Any, partitions: int, strips: tuple[int, ...]) -> None:
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3, upsampling=upsampling))
    balance = likely_balance(layers, COMPARED_SIZE, partitions)
    compare(layers, build_network(layers, 4, torch.float64).train(), 2, 0, balance, strips)


@pytest.mark.parametrize("seed", range(300, 300 + int(os.environ.get("GENERATED_MODULES", "7"))))
def test_generated_modules_are_those_of_one_partition(seed: int) -> None:
    """The loss to the last bit; what a map's readers add to its gradient, in another order."""
    try:
        adopted = adopt(generate(seed), 3)
        balance = likely_balance(adopted.layers, (96, 48), 2 + seed % 3, adopted.together)
    except TilenetError:
        pytest.skip("it is refused, or too short")
    if whole_image(adopted.layers) is not None or context_of(adopted.layers).valid:
        pytest.skip("it is not swept over partitions")
    net = adopted.network(torch.float64).train()
    net.mask_key.images = (0,)
    generator = torch.Generator().manual_seed(seed)
    unit = adopted.context.alignment_px
    size = -(-96 // unit) * unit, -(-48 // unit) * unit
    image = torch.randn(1, 3, *size, generator=generator, dtype=torch.float64)
    weight = torch.randn((1, 1, *size), generator=generator, dtype=torch.float64)
    one, alone = gradients(adopted.layers, net, image, weight, unit, 0)
    several, over = gradients(adopted.layers, net, image, weight, unit, 0, balance)
    assert torch.equal(one, several)
    most = max(float(gradient.abs().max()) for gradient in alone)
    assert all(float((a - b).abs().max()) <= 1e-14 * most for a, b in zip(alone, over, strict=True))


def test_one_layer_per_partition() -> None:
    """With cuts before each rectifier, which writes over its input where nobody else has it."""
    layers = unet_layers(UNetOptions(1, base=2, bands=2, classes=2, dropout=0.3))
    net = build_network(layers, 4, torch.float64).train()
    net.mask_key.images, net.mask_key.step = (0,), 2
    compare(layers, net, 2, balance=(1,) * len(layers), strips=(7, 32))


@pytest.mark.parametrize("first", [1, 2, 4])
def test_what_came_is_not_written_over(first: int) -> None:
    """By a rectifier, even where a dropout before it gives what it is given."""
    layers = unet_layers(UNetOptions(1, base=2, bands=2, classes=2, dropout=0.3))
    net = build_network(layers, 4, torch.float64).train()
    for module in net:
        module.train(not isinstance(module, KeyedDropout))
    compare(layers, net, 2, balance=(first, len(layers) - first), strips=HIGH)


@pytest.mark.parametrize("wrong", ["gradients that come back", "rows that are not kept"])
def test_what_is_wrong_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "gradients that come back":
        monkeypatch.setattr(swept_partitions, "_edge", lambda one: None)
    else:
        monkeypatch.setattr(
            swept_partitions.Sweep, "state", swept_partitions.Sweep.state.setter(lambda *_: 0)
        )
    with pytest.raises(AssertionError):
        test_gradients_of_our_own("nearest", 2, HIGH)


@pytest.mark.parametrize("partition", [0, 1, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_an_error_ends_all(partition: int, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes, on a strip in the midst, the caller hears of it and nobody waits."""
    layers = unet_layers(UNetOptions(2, base=2, bands=2, classes=2))
    net, image = build_network(layers).double().train(), torch.randn(1, 2, 64, 16).double()
    size, right = (64, 16), swept_partitions._Worker._pass

    def broken(self: Any, strip: int, come: Any) -> Any:
        if self.number == partition and strip == 5 and torch.is_grad_enabled() == backward:
            raise RuntimeError("the rows are spoilt")
        return right(self, strip, come)

    monkeypatch.setattr(swept_partitions._Worker, "_pass", broken)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the rows are spoilt"):
        gradients(
            layers, net, image, torch.ones(1, 2, *size).double(), 4, 0, (9, 9, len(layers) - 18)
        )
    assert threading.active_count() == before


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_strips", [1, 3, 20, 80])
@pytest.mark.parametrize("back", [0, 2])
def test_idle_slots(num_strips: int, num_partitions: int, back: int) -> None:
    """Counted: a strip takes a slot to begin, and in backward two to end."""
    todo = [
        [
            (is_end, strip)
            for turn in turns(num_strips, num_partitions - 1 - number)
            for is_end, strip in enumerate(turn)
            if strip is not None
        ]
        for number in range(num_partitions)
    ]
    done, clocks = dict[tuple[int, int, int], int](), [0] * num_partitions
    while any(todo):
        before = len(done)
        for number, left in enumerate(todo):
            is_end, strip = left[0] if left else (0, -1)
            others = range(number + 1, num_partitions) if is_end else range(number)
            needed = [(other, is_end, strip) for other in others]
            if left and all(one in done for one in needed):
                first = max([clocks[number], *(done[one] for one in needed)])
                clocks[number] = done[number, is_end, strip] = first + (back if is_end else 1)
                del left[0]
        assert len(done) > before, "somebody waits without an end"
    idle = 1 - num_strips * (1 + back) / max(clocks)
    assert idle == pytest.approx(idle_share(num_strips, num_partitions))


@pytest.mark.parametrize("strip_px", [8], indirect=True)
def test_a_run_says_how_long_partitions_wait(
    comm: MPI.Intracomm, shared_path: Path, strip_px: int, capfd: pytest.CaptureFixture[str]
) -> None:
    scenes = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, scenes, keys_of("residual"), halo_mode="sweep")
    run = replace(run, classes=CLASSES["residual"], steps=1, partitions=3)
    assert train(run, comm=comm) == 0
    said = capfd.readouterr().err
    assert "layers on cpu, cpu, cpu; strips as micro-batches, " in said
    assert "proved on 1 × 1 ranks, sweep, 3 partitions" in said
