"""The first layers of each partition swap, with the same bits, and nothing stays behind."""

from pathlib import Path

import pytest
import torch
from pairwise import pairs
from test_pipeline import CPU, MODES, balance_of, images, made, options, piped
from test_swapping import check_empty, check_same
from torch import Tensor, nn

from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.pipeline.swaps import PipeSwaps
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.memory.live import LiveBytes


def swaps_of(layers: list[int], folder: Path, *, stored: bool = False) -> PipeSwaps:
    return PipeSwaps(
        layers,
        [CPU] * len(layers),
        FileSlabs(str(folder)),
        stored=stored,
        largest_bytes=0,
        min_bytes=0,
        in_flight=[0.0] * len(layers),
    )


@pytest.mark.parametrize(
    ("mode", "num_partitions", "share", "inline", "precision"),
    pairs(MODES, (1, 3), (0.0, 0.4, 1.0), (False, True), ("float64", "bfloat16")),
)
def test_pipelines(
    tmp_path: Path, mode: str, num_partitions: int, share: float, inline: bool, precision: str
) -> None:
    wished = options(dropout=0.3, norm="instance", norm_scope="tile")
    dtype = torch.float64 if precision == "float64" else torch.float32
    results = []
    for some in (0.0, share):
        network = made(wished, dtype)
        balance = balance_of(len(network), num_partitions, num_partitions)
        swaps = swaps_of([int(some * size) for size in balance], tmp_path)
        pipe = Pipe(network, balance, [CPU] * num_partitions, mode, precision, inline=inline)
        with swaps.swapping(pipe):
            outputs, gradients = piped(pipe, images(4, dtype))
        results.append([*outputs, *gradients.values()])
        assert (swaps.statistics.out_count > 10) == (some > 0)
        del outputs
        check_empty(swaps.statistics)
        swaps.close()
    check_same(results[1], results[0])


def test_so_many_layers_of_each_partition_swap_and_the_others_keep(tmp_path: Path) -> None:
    network = made(options())
    balance = balance_of(len(network), 3, 3)
    pipe, layers = Pipe(network, balance, [CPU] * 3), [0, 2, balance[2]]
    swaps = swaps_of(layers, tmp_path)
    with swaps.swapping(pipe):
        hooked = [[bool(layer._forward_hooks) for layer in part] for part in pipe.partitions]
    assert hooked == [
        [True] * count + [False] * (size - count)
        for count, size in zip(layers, balance, strict=True)
    ]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in network)
    swaps.close()


def deep(count: int = 8) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(5)
    layers = (
        nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
        )
        for _ in range(count)
    )
    return nn.Sequential(*layers), torch.randn(1, 8, 64, 64)


def test_memory(tmp_path: Path) -> None:
    """What stays between forward and backward, in maps."""
    model, x = deep()
    alive = []
    for count in (0, 3, 8):
        swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
        with SwapInForward(swapper).around(list(model)[:count]), LiveBytes() as live:
            y = model(x)
            alive.append(round(live.current / x.nbytes, 2))
            y.sum().backward()
        del y
        check_empty(swapper.statistics)
        swapper.close()
    # Keeping: 3 maps per module. Swapping: the output, and the first input, which counts once it
    # has been copied. Of a module that swaps next to one that keeps, what both have saved stays.
    assert alive == [24, 17, 2]


def interrupted(*call: object) -> None:
    raise KeyboardInterrupt


def test_nothing_stays_behind(tmp_path: Path) -> None:
    model, x = deep(2)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))

    def hooks() -> list[int]:
        return [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model]

    with SwapInForward(swapper).around(model):
        assert hooks() == [2, 2]
    assert hooks() == [0, 0]
    with pytest.raises(RuntimeError, match="expected input"), SwapInForward(swapper).around(model):
        model(x[:, :3])
    assert hooks() == [0, 0]
    model[0][2].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt), SwapInForward(swapper).around(model):
        model(x)
    assert hooks() == [0, 0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    swapper.close()
