"""One forward, one backward over partitions: idle time, bytes and seconds, and those of GPipe.

A small U-Net on random crops, float32, one thread per partition. Idle slots are counted with the
threads of real steps of 2 to 24 micro-batches: what they hand over carries the time of who gives
it, where a micro-batch takes one slot forward and two backward. GPipe's are computed for 24 of them
in mini-batches of 2 to 24, after each of which the pipeline drains. Bytes are those of each
partition when it is the slowest, so that all that can wait waits, as if each had a device. Seconds
are of a step of 12 crops over one by GPipe with as many micro-batches at once as partitions, and
nothing computed again. They say little: torchgpipe has a thread per device, so that on a CPU its
partitions take turns, where these have a thread each.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_least, at_most
from bench.speed.strips import MICRO_BATCHES, built, timed

if TYPE_CHECKING:
    from torch import Tensor

    from tilenet.model.network import Network
    from tilenet.parallel.pipeline.flow import MicroBatch

NUMBER, SIDE = 24, 64


def crops(number: int, side: int) -> "Iterator[MicroBatch]":
    """Random ones."""
    import torch

    from tilenet.model.skips import Origin
    from tilenet.parallel.pipeline.flow import MicroBatch

    for at in range(number):
        yield MicroBatch(torch.randn(1, 3, side, side), Origin((at,)), at)


def loss(number: int, logits: "Tensor") -> "Tensor":
    """Of labels that its number says."""
    import torch

    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 4, (len(logits), *logits.shape[2:]), generator=generator)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def step_in_flow(
    network: "Network", balance: tuple[int, ...], number: int, side: int
) -> Callable[[], None]:
    """Forward and backward of crops that flow."""
    import torch

    from tilenet.parallel.pipeline.pipe import Pipe

    pipe = Pipe(network, balance, [torch.device("cpu")] * len(balance))
    return lambda: pipe.train_in_flow(crops(number, side), loss, len(balance))


def step_by_gpipe(
    network: "Network", balance: tuple[int, ...], number: int, side: int
) -> Callable[[], None]:
    """The same in mini-batches of as many micro-batches as partitions."""
    import torch

    from tilenet.parallel.pipeline.pipe import Pipe

    pipe = Pipe(network, balance, [torch.device("cpu")] * len(balance))

    def step() -> None:
        left = list(crops(number, side))
        while left:
            batch, left = left[: len(balance)], left[len(balance) :]
            outputs = pipe([one.image for one in batch], [one.origin for one in batch])
            losses = [loss(one.number, y) for one, y in zip(batch, outputs, strict=True)]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    return step


def idle_slots(quick: bool) -> list[dict[str, Any]]:
    """Counted in the threads of a step, and of GPipe by mini-batches."""
    from tilenet.parallel.pipeline import flow
    from tilenet.planning.balance import likely_balance

    layers, network = built(2, 4)
    rows = []
    for partitions in (2, 3) if quick else range(2, 7):
        balance = likely_balance(layers, (SIDE, SIDE), partitions)
        counted, formula, gpipe = dict[int, float](), dict[int, float](), dict[int, float]()
        for many in MICRO_BATCHES:
            clocks = list[int]()
            plain, flow._Worker = flow._Worker, clocked(clocks)  # type: ignore[misc]
            try:
                step_in_flow(network, balance, many, SIDE)()
            finally:
                flow._Worker = plain  # type: ignore[misc]
            counted[many] = 1 - 3 * many / max(clocks)
            formula[many] = (partitions - 1) / (many + partitions - 1)
            # All 24 in mini-batches of so many.
            gpipe[many] = 1 - NUMBER / (-(-NUMBER // many) * (many + partitions - 1))
        rows.append(
            {"partitions": partitions, "counted": counted, "formula": formula, "gpipe": gpipe}
        )
    return rows


def clocked(clocks: list[int]) -> Any:
    """A worker that counts slots, and adds its last one to `clocks`."""
    from tilenet.parallel.pipeline import flow

    lock = threading.Lock()

    class Worker(flow._Worker):
        now = owed = 0

        def run(self, *args: Any) -> None:
            super().run(*args)
            with lock:
                clocks.append(self.now)

        def _forward(self, *args: Any) -> None:
            self.owed = 1
            super()._forward(*args)

        def _backward(self, *args: Any) -> None:
            self.owed = 2  # once all has come, and before anything goes
            super()._backward(*args)

        def _receive(self, other: int) -> Any:
            then, message = super()._receive(other)
            self.now = max(self.now, then)
            return message

        def _send(self, messages: dict[int, Any]) -> None:
            self.now, self.owed = self.now + self.owed, 0
            super()._send({other: (self.now, messages.pop(other)) for other in list(messages)})

    return Worker


def peaks(quick: bool) -> list[dict[str, Any]]:
    """Bytes of each partition, measured and predicted, and GPipe's with the whole step at once."""
    from flow_bytes import bytes_in_flow

    from tilenet.planning.balance import likely_balance
    from tilenet.planning.memory.flow import flow_bytes
    from tilenet.planning.memory.layer import layer_bytes
    from tilenet.planning.memory.partition import partition_bytes

    layers, network = built(3, 8)
    size, rows = (128, 128), []
    costs = layer_bytes(layers, *size, "float32")
    for partitions in (2,) if quick else (2, 3, 4):
        balance = likely_balance(layers, size, partitions)
        measured = [
            bytes_in_flow(network, size, balance, partitions, "never", slow)[slow]
            for slow in range(partitions)
        ]
        kinds = {
            "predicted": flow_bytes(costs, balance, partitions, "never"),
            "gpipe": partition_bytes(costs, balance, NUMBER, "never"),
        }
        rows.append(
            {"partitions": partitions, "measured": measured}
            | {
                kind: [one.total - one.parameters - one.gradients - one.optimizer for one in parts]
                for kind, parts in kinds.items()
            }
        )
    return rows


def seconds(quick: bool) -> list[dict[str, Any]]:
    """Steps of 12 crops in both ways, in turns, the fastest of each."""
    from tilenet.planning.balance import likely_balance

    layers, network = built(3, 8)
    (side, times), rows = (64, 1) if quick else (192, 9), []
    for partitions in (2, 3):
        balance = likely_balance(layers, (side, side), partitions)
        steps = {
            "flow": step_in_flow(network, balance, 12, side),
            "gpipe": step_by_gpipe(network, balance, 12, side),
        }
        turns = [{way: timed(step, 1) for way, step in steps.items()} for _ in range(times)]
        took = {way: min(turn[way] for turn in turns) for way in steps}
        rows.append({"partitions": partitions, "side": side, "seconds": took})
    return rows


def bench(quick: bool) -> Found:
    """Idle slots, bytes and seconds."""
    import torch

    torch.set_num_threads(1)
    claims: list[Claim] = []
    idle = idle_slots(quick)
    for row in idle:
        case, counted = f"{row['partitions']} partitions", row["counted"]
        off = max(abs(counted[many] - formula) for many, formula in row["formula"].items())
        claims.append(
            at_most(f"{case}, 2 to 24 micro-batches: idle off (P − 1)/(m + P − 1) by", off, 1e-9)
        )
        claims.append(
            at_most(f"{case}, {NUMBER} micro-batches: share of idle slots", counted[NUMBER], 0.15)
        )
    found = peaks(quick)
    for row in found:
        case = f"{row['partitions']} partitions"
        over = [a / b for a, b in zip(row["predicted"], row["measured"], strict=True)]
        less = max(row["measured"]) / max(row["gpipe"])
        claims.append(at_least(f"{case}: predicted bytes over measured, least", min(over), 1.0))
        claims.append(at_most(f"{case}: predicted bytes over measured, most", max(over), 1.15))
        claims.append(
            at_most(f"{case}: bytes of the fullest over GPipe's of as few drains", less, 0.5)
        )
    took = seconds(quick)
    for row in took:
        ratio = row["seconds"]["flow"] / row["seconds"]["gpipe"]
        case = f"{row['partitions']} partitions on 2 cores"
        claims.append(at_most(f"{case}: a step over one by GPipe in one thread", ratio, 1.0))
    return {"idle": idle, "peaks": found, "seconds": took}, claims
