"""Gradients summed in pieces are the sum over ranks, whatever the order of completion."""

import time
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from torch import nn

from tilenet.parallel.sums.gradients import GradientSum, _Ready
from tilenet.parallel.sums.transports import HostTransport, Transport

pytestmark = pytest.mark.ranks(1, 2)


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (11,), (5, 2, 3), (1,), (40, 13)]
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]


def inputs(rank: int, step: int, tile: int) -> list[torch.Tensor]:
    return [p.detach() for p in parameters(1000 * rank + 10 * step + tile)]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("piece_bytes", [8, 100, 1 << 20])
@pytest.mark.parametrize("order", [1, -1], ids=["backward order", "other order"])
@pytest.mark.parametrize("meanwhile", [True, False])
def test_sum_over_ranks_and_tiles(
    comm: MPI.Intracomm, piece_bytes: int, order: int, meanwhile: bool
) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, piece_bytes, meanwhile=meanwhile)
    for step in range(3):
        summing.zero()
        tiles = (comm.rank + step) % 3  # ranks have 0, 1 or 2 tiles
        for tile in range(tiles):
            if tile == tiles - 1:
                summing.arm()
            pairs = list(zip(held, inputs(comm.rank, step, tile), strict=True))[::order]
            sum(((p * x).sum() for p, x in pairs), torch.zeros(())).backward()
        summing.finish()
        for index, parameter in enumerate(held):
            wanted = torch.zeros_like(parameter)
            for rank in range(comm.size):
                for tile in range((rank + step) % 3):
                    wanted = wanted + inputs(rank, step, tile)[index]
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-14, atol=1e-14)
    summing.close()


@pytest.mark.ranks(2, 3, 4)
def test_the_sum_is_its_own_adjoint(comm: MPI.Intracomm) -> None:
    """⟨Sx, y⟩ = ⟨x, S*y⟩ for the sum over ranks S, which is its own adjoint."""
    x, y = parameters(comm.rank + 1), parameters(comm.rank + 100)

    def summed(values: list[nn.Parameter]) -> list[torch.Tensor]:
        held = parameters(0)
        summing = GradientSum(held, comm, 64)
        for parameter, value in zip(held, values, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(value.detach())
        summing.finish()
        summing.close()
        return [p.grad for p in held if p.grad is not None]

    def inner(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return sum(float((p.detach() * q.detach()).sum()) for p, q in zip(a, b, strict=True))

    left = comm.allreduce(inner(summed(x), list(y)))
    right = comm.allreduce(inner(list(x), summed(y)))
    assert left == pytest.approx(right, rel=1e-12)


def test_pieces_are_summed_while_backward_is_still_running(comm: MPI.Intracomm) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, 8, meanwhile=True)
    first = held[-1]  # completed first: the network's last layer
    summing.arm()
    (first * 2.0).sum().backward()
    if comm.size > 1:
        # The helper sums without being waited for; every rank reaches this line by itself.
        wanted = torch.full_like(first, 2.0 * comm.size)
        for _ in range(2000):
            if torch.equal(first.grad, wanted):  # type: ignore[arg-type]
                break
            time.sleep(0.005)
        assert torch.equal(first.grad, wanted)  # type: ignore[arg-type]
    summing.finish()
    summing.close()


@pytest.mark.ranks(2)
def test_a_failure_of_the_helper_reaches_the_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: torch.Tensor) -> None:
        raise OverflowError("of the helper")

    summing = GradientSum(parameters(0), comm, 64)
    monkeypatch.setattr(summing._transport, "sum", fails)
    with pytest.raises(OverflowError, match="of the helper"):
        summing.finish()
    summing.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["cuda:2", "cpu"])
def test_the_helper_sets_its_device_before_all_else(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Of a thread of its own: else it would make a context on device 0."""
    said: list[object] = []

    def get() -> _Ready:
        said.append("a piece is asked for")
        return _Ready(None)  # the end

    summing = GradientSum(parameters(0), comm, 64, meanwhile=False)
    flat = SimpleNamespace(device=torch.device(device), is_cuda=device != "cpu")
    monkeypatch.setattr(summing, "_flats", [flat])
    monkeypatch.setattr(summing, "_ready", SimpleNamespace(get=get))
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    summing._sum_pieces()
    assert said == [torch.device(device), "a piece is asked for"][device == "cpu" :]
    summing.close()


class Recorder:
    """A transport that notes what it sums."""

    def __init__(self, inner: Transport) -> None:
        self.name, self._inner, self.sizes = inner.name, inner, list[int]()

    def sum(self, part: torch.Tensor) -> None:
        self._inner.sum(part)
        self.sizes.append(part.numel())

    def close(self) -> None:
        self._inner.close()


def recorded(summing: GradientSum) -> Recorder:
    assert summing._transport is not None
    summing._transport = recorder = Recorder(summing._transport)
    return recorder


@pytest.mark.ranks(2)
def test_the_sum_waits_for_the_last_of_three_passes(comm: MPI.Intracomm) -> None:
    """Under checkpointing each micro-batch adds to each gradient in a pass of its own."""
    held = parameters(0)
    summing = GradientSum(held, comm, 64, meanwhile=True)
    recorder = recorded(summing)
    summing.arm(passes=3)
    for tile in range(3):
        assert recorder.sizes == []
        pairs = zip(held, inputs(comm.rank, 0, tile), strict=True)
        sum(((p * x).sum() for p, x in pairs), torch.zeros(())).backward()
        if tile < 2:
            time.sleep(0.1)  # a helper that began too early would be done by now
    wanted = [
        sum(inputs(rank, 0, tile)[index] for rank in range(comm.size) for tile in range(3))
        for index in range(len(held))
    ]
    for _ in range(2000):  # and it begins with the third, before `finish`
        if len(recorder.sizes) == len(summing._pieces):
            break
        time.sleep(0.005)
    assert len(recorder.sizes) == len(summing._pieces)
    summing.finish()
    summing.close()
    for parameter, total in zip(held, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-14, atol=1e-14)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("meanwhile", [True, False])
def test_closing_gives_the_communicator_back(comm: MPI.Intracomm, meanwhile: bool) -> None:
    """MPI has so many of them only, and a process may train often."""
    summing = GradientSum(parameters(0), comm, 64, meanwhile=meanwhile)
    transport = summing._transport
    assert isinstance(transport, HostTransport)
    summing.close()
    assert transport._comm == MPI.COMM_NULL


@pytest.mark.ranks(2)
def test_without_a_core_to_spare_nothing_is_summed_before_the_end(comm: MPI.Intracomm) -> None:
    held = parameters(0)
    summing = GradientSum(held, comm, 64, meanwhile=False)
    recorder = recorded(summing)
    summing.arm()
    sum(((p * p).sum() for p in held), torch.zeros(())).backward()
    time.sleep(0.1)  # a helper that began too early would be done by now
    assert recorder.sizes == []
    summing.finish()
    assert sum(recorder.sizes) == sum(parameter.numel() for parameter in held)
    summing.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("piece_bytes", [1, 8, 100, 592, 1 << 20])
def test_pieces_are_of_the_size_asked_for(comm: MPI.Intracomm, piece_bytes: int) -> None:
    held = parameters(0)
    total = sum(parameter.numel() for parameter in held)
    size = max(1, piece_bytes // 8)
    summing = GradientSum(held, comm, piece_bytes)
    recorder = recorded(summing)
    summing.finish()
    summing.close()
    assert sum(recorder.sizes) == total
    assert recorder.sizes[:-1] == [size] * (-(-total // size) - 1)
    assert 0 < recorder.sizes[-1] <= size


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.25, 0.999, 1.001, 4.0])
def test_the_norm_of_the_sum_is_clipped(
    comm: MPI.Intracomm, share: float, dtype: torch.dtype
) -> None:
    """To a share of what it is; gradients whose squares float32 cannot hold."""
    held = [nn.Parameter(p.detach().to(dtype)) for p in parameters(0)]
    summing = GradientSum(held, comm, 100)
    for parameter, x in zip(held, inputs(comm.rank, 0, 0), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(x * 1e25)
    summing.finish()
    total = [sum(inputs(rank, 0, 0)[i] for rank in range(comm.size)) * 1e25 for i in range(5)]
    wanted = float(torch.cat([x.flatten() for x in total]).norm())
    norm = summing.clip(share * wanted)
    summing.close()
    rounding = 1e-13 if dtype == torch.float64 else 1e-6
    assert norm == pytest.approx(wanted, rel=rounding)
    assert comm.allgather(norm) == [norm] * comm.size
    for parameter, x in zip(held, total, strict=True):
        assert parameter.grad is not None
        left = (x * min(share, 1)).to(dtype)
        torch.testing.assert_close(parameter.grad, left, rtol=10 * rounding, atol=rounding * wanted)
