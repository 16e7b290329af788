"""Partitions, micro-batches and checkpointing never change the result."""

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import pairs
from torch import Tensor, nn

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model import gpipe
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline import pipe as pipe_module
from tilenet.parallel.pipeline.partition import Partition
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.memory.live import LiveBytes

Passed = Callable[[Pipe, list[Tensor]], dict[str, Tensor]]
CPU = torch.device("cpu")
MODES = ("always", "except_last", "never")
SIZES = ((37, 53), (24, 40), (41, 29), (37, 53), (16, 88), (33, 33), (48, 21), (25, 25))


def options(**more: object) -> UNetOptions:
    return UNetOptions(**{"poolings": 2, "base": 4, "bands": 3, "classes": 3, **more})


def images(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 3, *size, generator=generator, dtype=dtype) for size in SIZES[:count]]


def balance_of(num_layers: int, num_partitions: int, seed: int) -> list[int]:
    """A random one: cuts fall before every kind of layer, activations in place among them."""
    rng = np.random.default_rng(seed)
    cuts = sorted(rng.choice(np.arange(1, num_layers), num_partitions - 1, replace=False))
    return np.diff([0, *cuts, num_layers]).tolist()


def made(network_options: UNetOptions, dtype: torch.dtype = torch.float64) -> Network:
    network = build_network(unet_layers(network_options), 7, dtype)
    network.mask_key.step = 3
    return network.train()


def term(number: int, output: Tensor) -> Tensor:
    """A micro-batch's part of the loss, whose gradient differs in every cell."""
    like = {"dtype": output.dtype, "device": output.device}
    weights = torch.linspace(-1, 2, output.numel(), **like).view_as(output)
    return (weights * output.square()).sum() * (number + 1)


def summed(outputs: Sequence[Tensor]) -> Tensor:
    return sum(map(term, itertools.count(), outputs), outputs[0].new_zeros(()))


def plain(network: Network, batch: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients without a pipeline."""
    outputs = []
    for number, image in enumerate(batch):
        network.mask_key.images = (number + 10,)
        outputs.append(network(image))
    summed(outputs).backward()
    return outputs, {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def piped(pipe: Pipe, batch: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs = pipe(batch, [Origin((number + 10,)) for number in range(len(batch))])
    summed(outputs).backward()
    named = pipe.network.named_parameters()
    return outputs, {name: p.grad for name, p in named if p.grad is not None}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("num_partitions", "micro_batches", "mode", "inline"),
    pairs((1, 2, 3, 4, 5, 6), (1, 2, 3, 5, 8), MODES, (False, True)),
)
def test_outputs_and_gradients_are_the_plain_networks(
    num_partitions: int, micro_batches: int, mode: str, inline: bool
) -> None:
    wished = options(dropout=0.3)
    batch = images(micro_batches)
    wanted_outputs, wanted = plain(made(wished), batch)
    network = made(wished)
    balance = balance_of(len(network), num_partitions, num_partitions * 10 + micro_batches)
    devices = [CPU] * num_partitions
    outputs, found = piped(Pipe(network, balance, devices, mode, inline=inline), batch)
    for output, expected in zip(outputs, wanted_outputs, strict=True):
        assert torch.equal(output, expected)
    check(found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_stay_where_partitions_begin_with_a_dropout_of_nothing(mode: Any) -> None:
    """As in a proof: a rectifier after it writes over its input."""
    batch, networks = images(3), [made(options(dropout=0.3)) for _ in range(2)]
    dropouts = [n for n, part in enumerate(networks[0]) if isinstance(part, KeyedDropout)]
    for network, number in itertools.product(networks, dropouts):
        network[number].probability = 0.0  # type: ignore[assignment]
    balance = np.diff([0, *dropouts, len(networks[0])]).tolist()
    wanted_outputs, wanted = plain(networks[0], batch)
    outputs, found = piped(Pipe(networks[1], balance, [CPU] * len(balance), mode), batch)
    assert all(map(torch.equal, outputs, wanted_outputs))
    check(found, wanted)


KINDS = [
    {"norm": "instance", "norm_scope": "tile"},
    {"norm": "group", "norm_scope": "tile", "groups": 2},
    {"norm": "batch", "norm_scope": "tile"},
    {"upsampling": "bilinear", "dropout": 0.2},
    {"upsampling": "transposed", "bias": True},
    {"padding": "valid"},
]


def check_cuts(passed: Passed, mode: str, more: dict, seed: int) -> None:
    """Every kind of layer may stand at a cut; `passed` gives the gradients of a batch."""
    wished, batch = options(**more), images(5)
    if wished.padding == "valid":  # loses 44 cells in all and wants what poolings halve
        batch = [torch.nn.functional.pad(image, (44, 44, 44, 44)) for image in batch]
        batch = [x[..., : x.shape[2] // 4 * 4, : x.shape[3] // 4 * 4] for x in batch]
    reference = made(wished)
    _, wanted = plain(reference, batch)
    network = made(wished)
    balance = balance_of(len(network), 4, seed)
    check(passed(Pipe(network, balance, [CPU] * 4, mode), batch), wanted)
    # Running statistics: recomputing a tile's activations does not count it again.
    for name, buffer in reference.named_buffers():
        assert torch.allclose(network.state_dict()[name], buffer, rtol=1e-14, atol=0), name


@pytest.mark.parametrize(("mode", "more", "seed"), pairs(MODES, KINDS, range(3)))
def test_every_kind_of_layer_may_stand_at_a_cut(mode: str, more: dict, seed: int) -> None:
    check_cuts(lambda pipe, batch: piped(pipe, batch)[1], mode, more, seed)


@pytest.mark.parametrize("mode", MODES)
def test_one_layer_per_partition(mode: str) -> None:
    wished = options(dropout=0.3, norm="instance", norm_scope="tile")
    _, wanted = plain(made(wished), images(2))
    network = made(wished)
    ones = [1] * len(network)
    _, found = piped(Pipe(network, ones, [CPU] * len(network), mode), images(2))
    check(found, wanted)


@pytest.mark.parametrize(
    ("mode", "precision", "inline"), pairs(MODES, ("bfloat16", "float16"), (False, True))
)
def test_autocast_reaches_every_thread(mode: str, precision: str, inline: bool) -> None:
    wished = options(dropout=0.3)
    batch = images(3, torch.float32)
    low = getattr(torch, precision)
    with torch.autocast("cpu", low):
        wanted_outputs, wanted = plain(made(wished, torch.float32), batch)
    network = made(wished, torch.float32)
    balance = balance_of(len(network), 3, 4)
    pipe = Pipe(network, balance, [CPU] * 3, mode, precision, inline=inline)
    outputs, found = piped(pipe, batch)
    for output, expected in zip(outputs, wanted_outputs, strict=True):
        assert output.dtype == low
        assert torch.equal(output, expected)
    # Gradients of micro-batches are added in another order, and each is rounded to 16 bits.
    check(found, wanted, 4 * torch.finfo(low).eps)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_copies_of_weights_go_with_their_layer(precision: str) -> None:
    """Autocast's cache would hold them until the partition's end."""
    live, held = LiveBytes(), []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held.append(live.current - x.untyped_storage().nbytes())
            return x

    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3), Look()]
    partition = Partition(layers, CPU, precision, [])
    image = torch.randn(2, 3, 9, 11)
    with torch.no_grad(), live:
        partition(image)
    assert held == [0]


def test_passes_are_counted_as_hooks_fire() -> None:
    for mode, micro_batches in itertools.product(MODES, (1, 2, 5)):
        network = made(options())
        pipe = Pipe(network, balance_of(len(network), 3, 1), [CPU] * 3, mode)
        fired = dict.fromkeys(dict(network.named_parameters()), 0)

        def count(name: str, fired: dict[str, int] = fired) -> object:
            return lambda _: fired.update({name: fired[name] + 1})

        for name, parameter in network.named_parameters():
            parameter.register_post_accumulate_grad_hook(count(name))
        piped(pipe, images(micro_batches))
        assert set(fired.values()) == {pipe.passes(micro_batches)}, mode


def test_names_of_weights_do_not_know_of_partitions() -> None:
    network = made(options())
    names = list(network.state_dict())
    Pipe(network, balance_of(len(network), 4, 2), [CPU] * 4)
    assert list(network.state_dict()) == names == list(made(options()).state_dict())


def test_without_gradients_nothing_is_kept() -> None:
    network = made(options(dropout=0.3)).eval()
    pipe = Pipe(network, balance_of(len(network), 3, 5), [CPU] * 3, "always")
    with torch.inference_mode():
        (output,) = pipe(images(1), [Origin(())])
        assert torch.equal(output, network(images(1)[0]))


def test_an_error_in_a_partition_reaches_the_caller() -> None:
    network = made(options())
    for inline in (False, True):
        pipe = Pipe(network, balance_of(len(network), 3, 5), [CPU] * 3, inline=inline)
        with pytest.raises(RuntimeError, match="expected input"):
            pipe([torch.randn(1, 2, 16, 16, dtype=torch.float64)], [Origin((0,))])


@pytest.mark.parametrize("balance", [[1, 2], [0, 3, 99], [5]])
def test_a_balance_gives_all_layers_away(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="all layers away"):
        Pipe(made(options()), balance, [CPU] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("named", [[0], [0, 0, 0], None], ids=["one", "one thrice", "all"])
def test_partitions_on_gpus(named: list[int] | None, mode: str) -> None:
    """One that is named several times, or each a partition of its own."""
    count = torch.cuda.device_count()
    if count < (2 if named is None else 1):
        pytest.skip(f"needs GPUs, torch sees {count}")
    wished = options(dropout=0.3, norm="instance", norm_scope="tile")
    _, wanted = plain(made(wished), images(5))
    network = made(wished)
    devices = [torch.device("cuda", number) for number in named or range(count)]
    pipe = Pipe(network, balance_of(len(network), len(devices), 3), devices, mode)
    _, found = piped(pipe, images(5))
    check({name: gradient.cpu() for name, gradient in found.items()}, wanted, 1e-10)


def test_threads_stay_from_call_to_call_and_hold_nothing() -> None:
    """cuDNN plans each convolution for each thread; what a thread did last would stay alive."""
    network, seen = made(options()), set[int]()
    for layer in network:
        layer.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
    before = threading.active_count()
    pipe = Pipe(network, balance_of(len(network), 3, 5), [CPU] * 3, "always")
    for _ in range(3):
        outputs, _ = piped(pipe, images(2))
        last = weakref.ref(outputs[-1])
        del outputs
        assert last() is None
    assert len(seen - {threading.get_ident()}) == 1  # all partitions are on one device
    with pytest.raises(RuntimeError, match="expected input"):
        pipe([torch.randn(1, 2, 16, 16, dtype=torch.float64)], [Origin((0,))])
    piped(pipe, images(2))  # by another thread
    assert threading.active_count() > before
    del pipe
    gc.collect()
    assert threading.active_count() == before


PROGRAM = """
import torch
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.pipe import Pipe

network = build_network(unet_layers(UNetOptions(1, base=2, bands=3, classes=2))).train()
pipe = Pipe(network, (4, len(network) - 4), [torch.device("cpu")] * 2)
pipe([torch.randn(1, 3, 16, 16)] * 2, [Origin((0,)), Origin((1,))])
raise SystemExit(3)
"""


def test_a_program_ends_while_threads_wait() -> None:
    """Whether it ends well or by an error, which holds what it was raised in."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False)
    assert done.returncode == 3


def test_streams_are_kept_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 per device, and gives each out again."""
    network, made_streams = made(options()), []

    def new_stream(device: torch.device) -> Any:
        made_streams.append(device)
        return gpipe.new_stream(device)

    monkeypatch.setattr(pipe_module, "new_stream", new_stream)
    pipe = Pipe(network, balance_of(len(network), 3, 5), [CPU] * 3, "always")
    for count, most in ((2, 2), (2, 2), (5, 5), (3, 5)):
        piped(pipe, images(count))
        assert len(made_streams) == 3 * most
        assert [len(streams) for streams in pipe._streams] == [most] * 3
