"""What waits on the host never changes the result, on a GPU as on a CPU."""

from pathlib import Path

import pytest
import torch
from test_pipeline import balance_of, check, images, made, options, piped, plain, summed

from tilenet.parallel.pipeline.host_store import HostStore
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import open_slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapping import swapping

WISHED = options(dropout=0.3, norm="instance", norm_scope="tile")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, torch sees none")
    return torch.device(request.param)


@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("num_partitions", [3, 6])
def test_maps_between_partitions(
    device: torch.device, num_partitions: int, mode: str, tmp_path: Path
) -> None:
    _, wanted = plain(made(WISHED), images(4))
    network, cuda = made(WISHED), device.type == "cuda"
    slabs = open_slabs(None if cuda else str(tmp_path), 1 << 30, pinned=cuda)
    copies = HostCopies(slabs, SwapStatistics())
    stores = [HostStore(copies, device, lookahead=1) for _ in range(num_partitions)]
    balance = balance_of(len(network), num_partitions, 3)
    pipe = Pipe(network, balance, [device] * num_partitions, mode, "float64", stores=stores)
    _, found = piped(pipe, images(4))
    assert copies.statistics.out_count > 0
    copies.close()
    check({name: gradient.cpu() for name, gradient in found.items()}, wanted, 1e-10)


@pytest.mark.parametrize("stream", [False, True], ids=["", "on a stream of its own"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_saved(device: torch.device, share: float, stream: bool, tmp_path: Path) -> None:
    network = made(options()).to(device)
    network.mask_key.images = (0,)
    image, cuda = images(1)[0].to(device), device.type == "cuda"
    layers = list(network)[: int(share * len(network))]
    folder = None if cuda else str(tmp_path)
    torch.use_deterministic_algorithms(cuda, warn_only=True)
    aside = torch.cuda.Stream(device) if cuda and stream else None
    results = []
    for some in ([], layers):
        with (
            torch.cuda.stream(aside),
            swapping(some, min_bytes=0, swap_dir=folder) as statistics,
        ):
            for _ in range(3):
                network.zero_grad()
                summed([network(image)]).backward()
        if cuda:
            torch.cuda.synchronize()  # the copies below are on another stream
        results.append([p.grad.clone() for p in network.parameters()])
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert statistics.out_count > 0
