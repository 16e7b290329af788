"""Maps that wait on the host change no bit, and micro-batches hardly add to the peak."""

import gc
import random
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dry_run import dry_run
from pairwise import pairs
from test_pipeline import CPU, KINDS, MODES, balance_of, check, images, made, options, piped, plain
from test_swaps_in_flight import LateStreams
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS, unet_layers
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.host_store import HostStore, Stored
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.planning.balance import least_bytes
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import block_bytes

MIB = 1 << 20


def copies_to(folder: Path, limit_bytes: int | None = None) -> HostCopies:
    return HostCopies(FileSlabs(str(folder), limit_bytes, slab_bytes=20_000), SwapStatistics())


def stored_pipe(
    network: Network, balance: list[int], mode: str, copies: HostCopies, **more: object
) -> Pipe:
    keys = {name: more.pop(name) for name in ("min_bytes", "lookahead") if name in more}
    stores = [HostStore(copies, CPU, **keys) for _ in balance]
    return Pipe(network, balance, [CPU] * len(balance), mode, stores=stores, **more)


def check_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("num_partitions", "micro_batches", "mode", "inline", "lookahead"),
    pairs((1, 2, 3, 4, 6), (1, 2, 5), MODES, (False, True), (0, 2)),
)
def test_the_same_bits(
    tmp_path: Path, num_partitions: int, micro_batches: int, mode: str, inline: bool, lookahead: int
) -> None:
    wished, batch = options(dropout=0.3), images(micro_batches)
    _, exact = plain(made(wished), batch)
    network = made(wished)
    balance = balance_of(len(network), num_partitions, num_partitions * 10 + micro_batches)
    pipe = Pipe(made(wished), balance, [CPU] * num_partitions, mode, inline=inline)
    wanted_outputs, wanted = piped(pipe, batch)
    copies = copies_to(tmp_path)
    more = {"inline": inline, "lookahead": lookahead}
    outputs, found = piped(stored_pipe(network, balance, mode, copies, **more), batch)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted_outputs, strict=True))
    check_bits(found, wanted)
    check(found, exact)
    counted = copies.statistics
    checkpointed = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]
    skips = sum(a != b for a, b in pipe._layout.by_ns_name.values())
    assert counted.out_count == checkpointed * (num_partitions - 1 + skips)
    # A skip is fetched for its pop, and for the pop's recomputation.
    assert counted.in_count == checkpointed * (num_partitions - 1 + 2 * skips)
    assert (counted.peak_host_bytes > 0) == (counted.out_count > 0)
    assert counted.host_bytes == 0


@pytest.mark.parametrize(
    ("mode", "more", "seed"), pairs(["always", "except_last"], KINDS[:-1], range(3))
)
def test_every_kind_of_layer_may_stand_at_a_cut(
    tmp_path: Path, mode: str, more: dict, seed: int
) -> None:
    wished, batch = options(**more), images(3)
    balance = balance_of(len(made(wished)), 4, seed)
    _, wanted = piped(Pipe(made(wished), balance, [CPU] * 4, mode), batch)
    copies = copies_to(tmp_path)
    pipe = stored_pipe(made(wished), balance, mode, copies, lookahead=1)
    for _ in range(2):
        pipe.network.zero_grad()
        _, found = piped(pipe, batch)
        if "batch" not in more.values():  # whose running statistics move on
            check_bits(found, wanted)
    check(found, wanted)
    assert copies.statistics.host_bytes == 0


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_half_precision_and_channels_last(tmp_path: Path, precision: str) -> None:
    wished = options(dropout=0.2)
    batch = [x.to(memory_format=torch.channels_last) for x in images(4, torch.float32)]
    network = made(wished, torch.float32)
    balance = balance_of(len(network), 4, 5)
    _, wanted = piped(Pipe(network, balance, [CPU] * 4, "always", precision), batch)
    again = made(wished, torch.float32)
    pipe = stored_pipe(again, balance, "always", copies_to(tmp_path), precision=precision)
    _, found = piped(pipe, batch)
    check_bits(found, wanted)


def test_small_maps_stay(tmp_path: Path) -> None:
    wished, batch = options(), images(3)
    balance = balance_of(len(made(wished)), 6, 3)
    _, wanted = piped(Pipe(made(wished), balance, [CPU] * 6, "always"), batch)
    counts = []
    for min_bytes in (0, 20_000, 1 << 40):
        copies = copies_to(tmp_path)
        pipe = stored_pipe(made(wished), balance, "always", copies, min_bytes=min_bytes)
        _, found = piped(pipe, batch)
        check_bits(found, wanted)
        counts.append(copies.statistics.out_count)
    assert counts[0] > counts[1] > counts[2] == 0


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_reads_before_a_copy_has_ended(tmp_path: Path, lookahead: int, seed: int) -> None:
    wished, batch = options(dropout=0.3), images(5)
    balance = balance_of(len(made(wished)), 5, seed)
    _, wanted = piped(Pipe(made(wished), balance, [CPU] * 5, "always"), batch)
    copies = copies_to(tmp_path)
    streams = LateStreams(random.Random(seed))
    copies._streams = streams
    pipe = stored_pipe(made(wished), balance, "always", copies, lookahead=lookahead)
    for _ in range(2):
        pipe.network.zero_grad()
        _, found = piped(pipe, batch)
        check_bits(found, wanted)
    assert len(streams.fetched) == copies.statistics.in_count > 20
    assert streams.lost == 0
    copies.close()
    assert copies.statistics.host_bytes == 0


class Watching(HostStore):
    """A store that looks, when a map is fetched, whether the one that was put is still there."""

    seen: list[bool]

    def put(self, tensor: Tensor) -> Stored:
        stored = super().put(tensor)
        stored.original = weakref.ref(tensor.untyped_storage())  # type: ignore[attr-defined]
        return stored

    def get(self, stored: Stored) -> Tensor:
        self.seen.append(stored.original() is not None)  # type: ignore[attr-defined]
        return super().get(stored)


def test_nothing_stays_on_the_device_meanwhile(tmp_path: Path) -> None:
    network = made(options())
    pops = [i for i, layer in enumerate(network) if type(layer).__name__ == "JoinMaps"]
    edges = [0, 4, 9, 14, pops[0], pops[1], len(network)]
    balance = [b - a for a, b in pairwise(edges)]
    copies = copies_to(tmp_path)
    pipe = stored_pipe(network, balance, "always", copies, inline=True)
    pipe.stores = [Watching(copies, CPU) for _ in balance]
    Watching.seen = []
    piped(pipe, images(4))
    assert len(Watching.seen) > 30
    assert not any(Watching.seen)


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_without_backward_everything_is_given_back(tmp_path: Path, inline: bool) -> None:
    wished, batch = options(), images(4)
    copies = copies_to(tmp_path)
    network = made(wished)
    pipe = stored_pipe(network, balance_of(len(network), 4, 1), "always", copies, inline=inline)
    origins = [Origin((number,)) for number in range(4)]
    outputs = pipe(batch, origins)
    assert copies.statistics.host_bytes > 100_000
    del outputs
    assert copies.statistics.host_bytes == 0
    before = copies.statistics.out_count
    with torch.no_grad():
        pipe(batch, origins)
    assert copies.statistics.out_count == before


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_a_full_host_is_an_error_that_says_so(tmp_path: Path, inline: bool) -> None:
    wished, batch = options(), images(8)
    network = made(wished)
    balance = balance_of(len(network), 4, 1)
    copies = copies_to(tmp_path, limit_bytes=300_000)
    pipe = stored_pipe(network, balance, "always", copies, inline=inline)
    with pytest.raises(TilenetError, match=r"host's share \(needed: .* limit: 0\.3 MiB"):
        piped(pipe, batch)
    gc.collect()  # the error's traceback held the graph
    assert copies.statistics.host_bytes == 0
    _, wanted = piped(Pipe(made(wished), balance, [CPU] * 4, "always"), batch[:1])
    network.zero_grad()
    _, found = piped(pipe, batch[:1])  # there is room for one
    check_bits(found, wanted)


def test_the_peak_hardly_grows_with_micro_batches() -> None:
    """65 layers of the preset in 6 partitions, on tensors without memory."""
    layers = unet_layers(replace(PRESETS["small"], convolutions=1))
    keys = {"checkpointing": "always", "optimizer": "sgd"}
    costs = layer_bytes(layers, 256, 256)
    balance = least_bytes(block_bytes(costs, 12, "always", "sgd", 6, stored=True), 6)[0]
    few, many, without = (
        dry_run(layers, (256, 256), balance, m, stored=stored, **keys).partitions
        for m, stored in ((6, True), (9, True), (9, False))
    )
    assert max(many) <= 160 * MIB
    # An image of 3 more on the first, labels and logits on the last, and nothing in between.
    grown = [more - less for less, more in zip(few, many, strict=True)]
    assert max(grown) <= 3 * MIB
    assert grown[1:-1] == [0] * 4
    assert max(without) > 2 * max(many)
