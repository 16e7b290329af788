"""Whether pinned copies between host and GPU run beside convolutions."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from bench.gpu.gpu_part import Asked, Figures, Found, wait
from bench.report import at_least
from tilenet.parallel.swap.copies import CopyStreams

__all__ = ["overlap"]

AIM_S = 0.25  # of the convolutions, and of the copies, alone
HIDDEN = 0.8  # of the shorter of both


class _Work:
    """Convolutions and buffers to copy."""

    def __init__(self, asked: Asked, precision: torch.dtype) -> None:
        self.device = asked.device
        size, channels = (1024, 64) if asked.cuda else (16, 4)
        num_bytes = (64 << 20) if asked.cuda else 1 << 10
        with torch.device(asked.device):
            self._conv = nn.Conv2d(channels, channels, 3, padding=1, dtype=precision)
            self._x = torch.randn(1, channels, size, size, dtype=precision)
            self._here = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)]
        self._there = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=asked.cuda) for _ in range(2)
        ]
        self._streams = (
            [torch.cuda.Stream(asked.device) for _ in range(2)]  # type: ignore[no-untyped-call]
            if asked.cuda
            else []
        )
        self.num_bytes = num_bytes
        wait(asked.device)

    def compute(self, count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                self._conv(self._x)

    def copy(self, ways: tuple[int, ...], count: int) -> None:
        """Queue copies, each way on a stream of its own; 0 is out, 1 is back."""
        for way in ways:
            into, source = self._there[way], self._here[way]
            if way:
                into, source = source, into
            with self._on(way):
                for _ in range(count):
                    into.copy_(source, non_blocking=True)

    def _on(self, way: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[way]) if self._streams else nullcontext()

    def as_swapped(self, copies: int, each: int) -> None:
        """Copies out between convolutions, each after those before it, as swapping sends them."""
        streams, sent = CopyStreams(), []
        for number in range(copies):
            self.compute(each)
            sent.append(streams.send(self._here[number % 2], self._there[number % 2]))
        self.compute(each)

    def parts(self) -> tuple[Tensor, Tensor]:
        """What is copied, there and here."""
        return self._there[0], self._here[0]


def overlap(asked: Asked) -> Found:
    """Seconds of copies and convolutions together, against each alone and their sum."""
    torch.backends.cudnn.allow_tf32 = False
    rows: list[Figures] = []
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for precision, dtype in dtypes.items():
        if (rows and asked.late) or not asked.computes(precision):
            continue
        work = _Work(asked, dtype)
        many = _count(work.compute, asked)
        compute = partial(work.compute, many)
        for name, ways in (("out", (0,)), ("back", (1,)), ("both ways", (0, 1))):
            copies = _count(partial(work.copy, ways), asked)
            row = _row(asked, partial(work.copy, ways, copies), compute)
            moved = work.num_bytes * copies / row["copies_s"] / 2**30
            rows.append(
                {"precision": precision, "copies": name, **row, "gib_per_s_each_way": moved}
            )
        copies = min(many, _count(partial(work.copy, (0,)), asked))
        # One group of convolutions more than copies, since the first copy waits for the first group
        each = max(1, many // copies)
        row = _row(
            asked,
            partial(work.copy, (0,), copies),
            partial(work.compute, each * (copies + 1)),
            partial(work.as_swapped, copies, each),
        )
        rows.append({"precision": precision, "copies": "out, as swapping sends", **row})
        if not torch.equal(*(part.cpu() for part in work.parts())):
            raise RuntimeError("what was copied is not what was there")
    claims = [
        at_least(
            f"{row['precision']}, copies {row['copies']}: hidden of the shorter",
            row["hidden"],
            HIDDEN,
        )
        for row in rows
    ]
    return {"rows": rows}, claims if asked.cuda else []


def _row(
    asked: Asked,
    copy: Callable[[], None],
    compute: Callable[[], None],
    both: Callable[[], None] | None = None,
) -> Figures:
    def one_after_another() -> None:
        copy()
        compute()

    copies_s, work_s = (_seconds(what, asked) for what in (copy, compute))
    together_s = _seconds(both or one_after_another, asked)
    total = copies_s + work_s
    return {
        "copies_s": copies_s,
        "convolutions_s": work_s,
        "together_s": together_s,
        "sum_s": total,
        "hidden": (total - together_s) / min(copies_s, work_s),
    }


def _count(run: Callable[[int], None], asked: Asked) -> int:
    """How many take so long as is aimed at."""
    if not asked.cuda:
        return 3
    run(3)
    wait(asked.device)
    one = _seconds(lambda: run(10), asked) / 10
    return max(4, min(20_000, round(AIM_S / one)))


def _seconds(run: Callable[[], None], asked: Asked) -> float:
    """Median of three, until all is done."""
    took = []
    for _ in range(3):
        wait(asked.device)
        began = time.perf_counter()
        run()
        wait(asked.device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
