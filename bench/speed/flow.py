"""One forward, one backward over partitions: idle time, bytes and seconds, and those of GPipe.

A small U-Net on random crops, float32, one thread per partition. Idle slots are counted with the
threads of real steps of 2 to 24 micro-batches: what they hand over carries the time of who gives
it, where a micro-batch takes one slot forward and two backward. GPipe's are computed for 24 of them
in mini-batches of 2 to 24, after each of which the pipeline drains. Bytes are those of each
partition when it is the slowest, so that all that can wait waits, as if each had a device. Seconds
are of a step of 12 crops over one by GPipe with nothing computed again, two partitions on two
cores: one on the CPU, the other on a device that tests add to torch, so that each engine's
partitions compute at the same time, forward and backward. GPipe drains after each two crops, which
holds as many bytes, or after the twelve.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_least, at_most
from bench.speed.strips import MICRO_BATCHES, built, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from tilenet.model.network import Network
    from tilenet.parallel.pipeline.flow import MicroBatch

NUMBER, SIDE = 24, 64


def crops(number: int, side: int) -> "Iterator[MicroBatch]":
    """Random ones."""
    import torch

    from tilenet.model.origin import Origin
    from tilenet.parallel.pipeline.flow import MicroBatch

    for at in range(number):
        yield MicroBatch(torch.randn(1, 3, side, side), Origin((at,)), at)


def loss(number: int, logits: "Tensor") -> "Tensor":
    """Of labels that its number says."""
    import torch

    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 4, (len(logits), *logits.shape[2:]), generator=generator)
    return torch.nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")


def step_in_flow(
    network: "Network",
    balance: tuple[int, ...],
    number: int,
    side: int,
    devices: "Sequence[torch.device]" = (),
) -> Callable[[], None]:
    """Forward and backward of crops that flow; without devices all on the CPU."""
    import torch

    from tilenet.parallel.pipeline.pipe import Pipe

    pipe = Pipe(network, balance, devices or [torch.device("cpu")] * len(balance))
    return lambda: pipe.train_in_flow(crops(number, side), loss, len(balance))


def step_by_gpipe(
    network: "Network",
    balance: tuple[int, ...],
    number: int,
    side: int,
    devices: "Sequence[torch.device]",
    at_once: int,
) -> Callable[[], None]:
    """The same in mini-batches."""
    import torch

    from tilenet.parallel.pipeline.pipe import Pipe

    pipe = Pipe(network, balance, devices)

    def step() -> None:
        left = list(crops(number, side))
        while left:
            batch, left = left[:at_once], left[at_once:]
            outputs = pipe([crop.image for crop in batch], [crop.origin for crop in batch])
            losses = [loss(crop.number, y) for crop, y in zip(batch, outputs, strict=True)]
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
            self.now, self.owed = self.now + self.owed, 0

        def _backward(self, *args: Any) -> None:
            self.owed = 2  # once all has come, and before anything goes
            super()._backward(*args)
            self.now, self.owed = self.now + self.owed, 0

        def _receive(self, other: int) -> Any:
            then, message = super()._receive(other)
            self.now = max(self.now, then)
            return message

        def _send(self, other: int, message: Any) -> None:
            self.now, self.owed = self.now + self.owed, 0
            super()._send(other, (self.now, message))

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


def seconds(quick: bool, second: "torch.device") -> dict[str, float]:
    """Steps of 12 crops in each way, in turns, the fastest of each."""
    import torch

    from tilenet.planning.balance import likely_balance

    (side, times), number = (64, 1) if quick else (192, 9), 12
    devices = [torch.device("cpu"), second]
    steps = dict[str, Callable[[], None]]()
    for way, at_once in {"flow": 0, "gpipe by 2": 2, "gpipe by 12": number}.items():
        layers, network = built(3, 8)  # a network's weights move to its devices
        balance = likely_balance(layers, (side, side), 2)
        args = network, balance, number, side, devices
        steps[way] = step_by_gpipe(*args, at_once) if at_once else step_in_flow(*args)
    turns = [{way: timed(step, 1) for way, step in steps.items()} for _ in range(times)]
    return {way: min(turn[way] for turn in turns) for way in steps}


def bench(quick: bool) -> Found:
    """Idle slots, bytes and seconds."""
    import torch
    from second_device import add_second_device

    torch.set_num_threads(1)
    second = add_second_device()
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
    took = seconds(quick, second)
    for at_once, goal in {2: 1.0, 12: 1.05}.items():
        case = f"a step over one by GPipe, drained after {at_once} crops"
        ratio = took["flow"] / took[f"gpipe by {at_once}"]
        claims.append(at_most(f"2 partitions on 2 devices: {case}", ratio, goal))
    return {"idle": idle, "peaks": found, "seconds": took}, claims
