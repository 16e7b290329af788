"""Strips over partitions, and the optimizer's states over ranks: idle time, bytes and seconds.

A small U-Net on random pixels, float32, one thread per partition and one per rank. Idle slots are
counted with the threads of a real step: what they hand over carries the time of who gives it, where
a strip takes one slot forward and two backward. GPipe's are simulated, with as much for each
micro-batch. Bytes are those of each partition when it is the slowest, so that all that can wait
waits, as if each had a device. Seconds are those of a CPU whose two cores the partitions share, so
that ratios count, of a step by strips over one by GPipe with 2 × 2 tiles and exact halos, which
computes activations again too, but in one thread: torchgpipe has one per device.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_least, at_most, on_ranks

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor

    from tilenet.geometry.layers import Layer
    from tilenet.geometry.windows import Window
    from tilenet.model.network import Network

MICRO_BATCHES = (2, 4, 8, 12, 16, 24)


def built(poolings: int, base: int) -> tuple[tuple["Layer", ...], "Network"]:
    """A U-Net in training, whose batch norms are frozen."""
    import torch

    from tilenet.geometry.unet import UNetOptions, unet_layers
    from tilenet.model.network import build_network

    layers = unet_layers(UNetOptions(poolings, base=base, bands=3, classes=4, norm="batch"))
    network = build_network(layers).train()
    for part in network:
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()
    return layers, network


def step_by_strips(
    layers: tuple["Layer", ...],
    network: "Network",
    size: tuple[int, int],
    balance: tuple[int, ...],
    strip_rows: int,
) -> Callable[[], float]:
    """Forward and backward of an image."""
    import torch

    from tilenet.geometry.halo import context_of
    from tilenet.geometry.halo_rule import HaloRule
    from tilenet.geometry.sweep import Sweeps, strip_edges
    from tilenet.geometry.tiles import Cut, cut
    from tilenet.model.origin import Origin
    from tilenet.parallel.exchange.swept_training import SweptPipe

    cpu, sweeps = torch.device("cpu"), Sweeps(strip_edges(size[0], strip_rows))
    devices = [cpu] * len(balance)
    pipe = SweptPipe(
        network, layers, devices, "float32", lambda rows, cols: sweeps, balance=balance
    )
    whole = cut(*size, Cut(grid=(1, 1)), HaloRule(0, context_of(layers).alignment_px))
    image, labels = torch.randn(1, 3, *size), torch.randint(0, 4, (1, *size), dtype=torch.uint8)

    def loss(logits: "Tensor", own: "Window") -> "Tensor":
        wanted = labels[:, own.row : own.row + own.height].long()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    def step() -> float:
        total = pipe(image, Origin((0,), whole, (0,)), loss)
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    return step


def idle_slots(quick: bool) -> list[dict[str, Any]]:
    """Counted in the threads of a step, forward and backward."""
    from tilenet.geometry.sweep import strip_edges, sweep
    from tilenet.parallel.exchange import swept_partitions
    from tilenet.parallel.exchange.swept_partitions import idle_share
    from tilenet.planning.balance import likely_balance
    from tilenet.planning.time.timeline import simulate

    layers, network = built(2, 4)
    size, strip_rows = (512, 64), 16
    strips = sum(1 for _ in sweep(layers, strip_edges(size[0], strip_rows)))
    rows = []
    for partitions in (2, 3) if quick else range(2, 7):
        balance, clocks = likely_balance(layers, size, partitions), list[list[int]]()
        plain = swept_partitions._Worker
        swept_partitions._Worker = clocked(clocks)  # type: ignore[misc]
        try:
            step_by_strips(layers, network, size, balance, strip_rows)()
        finally:
            swept_partitions._Worker = plain  # type: ignore[misc]
        forward, backward = (max(one) for one in (clocks[0], clocks[1]))
        slots = [1.0] * partitions
        gpipe = {
            many: simulate(
                slots, [2 * one for one in slots], [0.0] * (partitions - 1), many, "always"
            ).bubble
            for many in MICRO_BATCHES
        }
        rows.append(
            {
                "partitions": partitions,
                "strips": strips,
                "counted": {"forward": 1 - strips / forward, "backward": 1 - 3 * strips / backward},
                "formula": idle_share(strips, partitions),
                "gpipe": gpipe,
            }
        )
    return rows


def clocked(clocks: list[list[int]]) -> Any:
    """A worker that counts slots; adds the last ones of each pass of all workers to `clocks`."""
    import threading

    from tilenet.parallel.exchange import swept_partitions

    lock = threading.Lock()

    class Worker(swept_partitions._Worker):
        now = owed = 0

        def forward(self, *args: Any) -> None:
            super().forward(*args)
            self.note(0)

        def backward(self, *args: Any) -> None:
            super().backward(*args)
            self.note(1)

        def note(self, place: int) -> None:
            with lock:
                while len(clocks) <= place:
                    clocks.append([])
                clocks[place].append(self.now)

        def _pass(self, strip: int, come: Any) -> Any:
            found = super()._pass(strip, come)
            self.now += 1
            return found

        def _backpropagate(self, *args: Any) -> Any:
            self.owed = 2  # once all has come, and before anything goes
            found = super()._backpropagate(*args)
            self.now, self.owed = self.now + self.owed, 0
            return found

        def _receive(self, other: int) -> Any:
            then, message = super()._receive(other)
            self.now = max(self.now, then)
            return message

        def _send(self, other: int, message: Any) -> None:
            self.now, self.owed = self.now + self.owed, 0
            super()._send(other, (self.now, message))

    return Worker


def peaks(quick: bool) -> list[dict[str, Any]]:
    """Bytes of each partition, measured and predicted."""
    import torch
    from partition_bytes import bytes_of_partitions

    from tilenet.geometry.sweep import Sweeps, strip_edges
    from tilenet.planning.balance import likely_balance
    from tilenet.planning.memory.live import LiveBytes
    from tilenet.planning.memory.sweeps.swept_partitions import partition_peaks
    from tilenet.planning.memory.sweeps.trained_sweeps import trained_bytes

    layers, network = built(3, 8)
    size, strip_rows = (512, 128) if quick else (512, 256), 64
    step = step_by_strips(layers, network, size, (len(layers),), strip_rows)
    with LiveBytes() as live:
        step()
    predicted = [trained_bytes(layers, *size, strip_rows, 4)]
    rows = [{"partitions": 1, "measured": [live.peak], "predicted": predicted}]
    labels = torch.randint(0, 4, (1, *size), dtype=torch.uint8)
    sweeps = Sweeps(strip_edges(size[0], strip_rows))
    for partitions in (2, 3):
        balance = likely_balance(layers, size, partitions)
        measured = [
            bytes_of_partitions(layers, network, sweeps, labels, balance, slow)[slow]
            for slow in range(partitions)
        ]
        found = partition_peaks(layers, *size, strip_rows, 4, balance)
        rows.append({"partitions": partitions, "measured": measured, "predicted": list(found)})
    return rows


def step_by_tiles(
    layers: tuple["Layer", ...], network: "Network", size: tuple[int, int], balance: tuple[int, ...]
) -> Callable[[], float]:
    """The same by GPipe, with tiles as micro-batches."""
    import torch

    from tilenet.geometry.halo_rule import halo_rule
    from tilenet.geometry.tiles import Cut, cut, owned
    from tilenet.model.origin import Origin
    from tilenet.parallel.pipeline.pipe import Pipe

    pipe = Pipe(network, balance, [torch.device("cpu")] * len(balance), "always")
    tiling = cut(*size, Cut(grid=(2, 2)), halo_rule("exact", layers))
    image, labels = torch.randn(1, 3, *size), torch.randint(0, 4, (1, *size))

    def of(x: "Tensor", window: "Window") -> "Tensor":
        rows = slice(window.row, window.row + window.height)
        return x[..., rows, window.col : window.col + window.width]

    def step() -> float:
        images = [of(image, tile.read).clone() for tile in tiling.tiles]
        origins = [Origin((0,), tiling, (number,)) for number in range(len(images))]
        total = torch.zeros(())
        for tile, logits in zip(tiling.tiles, pipe(images, origins), strict=True):
            wanted = of(labels, tile.own)
            of_own = owned(logits, tile)
            total = total + torch.nn.functional.cross_entropy(of_own, wanted, reduction="sum")
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    return step


def seconds(quick: bool) -> list[dict[str, Any]]:
    """Steps by strips and by tiles in turns, the fastest of each."""
    from tilenet.geometry.halo import context_of
    from tilenet.planning.balance import likely_balance

    side, times = (256, 1) if quick else (512, 3)
    rows = []
    for partitions in (2, 3):
        layers, network = built(3, 8)
        balance = likely_balance(layers, (side, side), partitions)
        steps = {
            "strips": step_by_strips(layers, network, (side, side), balance, 64),
            "tiles": step_by_tiles(layers, network, (side, side), balance),
        }
        took = {way: timed(step, times) for way, step in steps.items()}
        halo_px = context_of(layers).halo_px
        rows.append({"partitions": partitions, "halo_px": halo_px, "side": side, "seconds": took})
    return rows


def timed(step: Callable[[], Any], times: int) -> float:
    """The fastest, after one that is not timed."""
    step()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return min(took)


def states_on_rank(base: int, times: int) -> dict[str, Any]:
    """AdamW's states of a U-Net that this job's ranks share out, and a step with and without."""
    import torch
    from mpi4py import MPI

    from tilenet.planning.memory.states import state_bytes

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    found: dict[str, Any] = {"ranks": comm.size}
    for way in ("shared", "unshared"):
        step, kept, weights = step_of_states(comm, base, shares_out=way == "shared")
        took = timed(step, times)
        sharers = comm.size if way == "shared" else 1
        found[way] = {
            "bytes": max(comm.allgather(kept())),
            "planned_bytes": state_bytes("adamw", weights, sharers),
            "seconds": comm.allreduce(took, MPI.MAX),
        }
    return found


def step_of_states(
    comm: "MPI.Intracomm", base: int, *, shares_out: bool
) -> tuple[Callable[[], None], Callable[[], int], int]:
    """A step; what counts the bytes of its states; bytes of the weights."""
    import torch

    from tilenet.model.loss_scale import LossScale
    from tilenet.parallel.sums.gradients import PIECE_BYTES, GradientSum
    from tilenet.parallel.sums.shares import Shares
    from tilenet.training.config.keys import OptimizerKeys
    from tilenet.training.learning_rate import LearningRate
    from tilenet.training.optimizer import make_optimizer
    from tilenet.training.update import Update

    _, network = built(4, base)
    shares = Shares(network.trained, comm, PIECE_BYTES) if shares_out and comm.size > 1 else None
    gradients = GradientSum(network.trained, comm, shares or PIECE_BYTES)
    optimizer = make_optimizer(
        OptimizerKeys("adamw", 1e-3), network.trained if shares is None else shares.own
    )
    update = Update(optimizer, LearningRate(1e-3, 99), LossScale())
    image = torch.randn(1, 3, 128, 128)

    def step() -> None:
        comm.Barrier()
        gradients.zero()
        gradients.arm()
        network(image.clone()).square().mean().backward()
        gradients.finish()
        update.apply(gradients, 1.0, 0)

    def kept() -> int:
        states = optimizer.state.values()
        return sum(v.nbytes for one in states for k, v in one.items() if k != "step")

    return step, kept, sum(one.nbytes for one in network.trained)


def bench(quick: bool) -> Found:
    """Idle slots, bytes and seconds of strips; bytes and seconds of states."""
    import torch

    torch.set_num_threads(1)
    claims: list[Claim] = []
    idle = idle_slots(quick)
    for row in idle:
        case, formula = f"{row['partitions']} partitions", row["formula"]
        off = max(abs(one - formula) for one in row["counted"].values())
        claims.append(at_most(f"{case}: idle slots off (P − 1)/(T + P − 1) by", off, 1e-9))
        least = min(row["gpipe"].values())
        claims.append(
            at_most(f"{case}: idle slots over GPipe's with 24 micro-batches", formula / least, 1.0)
        )
    found = peaks(quick)
    for row in found:
        case = f"{row['partitions']} partition{'s' * (row['partitions'] > 1)}"
        over = [a / b for a, b in zip(row["predicted"], row["measured"], strict=True)]
        claims.append(at_least(f"{case}: predicted bytes over measured, least", min(over), 1.0))
        claims.append(at_most(f"{case}: predicted bytes over measured, most", max(over), 1.05))
    took = seconds(quick)
    for row in took:
        ratio = row["seconds"]["strips"] / row["seconds"]["tiles"]
        case = f"{row['partitions']} partitions on 2 cores"
        claims.append(at_most(f"{case}: a step by strips over one by GPipe's tiles", ratio, 1.0))
    ranks = (1, 2) if quick else (1, 2, 3, 4, 6)
    states = [on_ranks(n, states_on_rank, 8 if quick else 16, 1 if quick else 3) for n in ranks]
    for row in states:
        case, shared = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}", row["shared"]
        over_planned = shared["bytes"] / shared["planned_bytes"]
        claims.append(at_most(f"{case}: states of a rank over planned", over_planned, 1.0001))
    two = states[1]
    over_unshared = two["shared"]["seconds"] / two["unshared"]["seconds"]
    claims.append(at_most("2 ranks: a step with shared states over without", over_unshared, 1.1))
    return {"idle": idle, "peaks": found, "seconds": took, "states": states}, claims
