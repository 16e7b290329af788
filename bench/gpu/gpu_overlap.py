"""Whether pinned copies between host and GPU run at the same time as convolutions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.gpu.gpu_part import Asked, Figures, seconds_of
from bench.report import Found, at_least
from tilenet.parallel.swap.copies import CopyStreams

__all__ = ["overlap"]

AIM_S = 0.25  # of the convolutions, and of the copies, alone
HIDDEN = 0.8  # of the shorter of both
OUT, BACK = 0, 1


class _Work:
    """Convolutions and buffers to copy, one out and one back."""

    def __init__(self, asked: Asked, precision: torch.dtype) -> None:
        size, channels = (1024, 64) if asked.cuda else (16, 4)
        self.num_bytes = (64 << 20) if asked.cuda else 1 << 10
        one = partial(torch.ones, self.num_bytes, dtype=torch.uint8)
        with torch.device(asked.device):
            self._conv = nn.Conv2d(channels, channels, 3, padding=1, dtype=precision)
            self._x = torch.randn(1, channels, size, size, dtype=precision)
        self.here = [one(device=asked.device) for _ in (OUT, BACK)]
        self.there = [one(pin_memory=asked.cuda).zero_() for _ in (OUT, BACK)]
        self._streams: list[Any] = [
            torch.cuda.Stream(asked.device) if asked.cuda else None  # type: ignore[no-untyped-call]
            for _ in (OUT, BACK)
        ]

    def compute(self, count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                self._conv(self._x)

    def copy(self, ways: tuple[int, ...], count: int) -> None:
        """Queue copies, each way on a stream of its own."""
        for way in ways:
            pair = self.there[way], self.here[way]
            into, source = pair if way == OUT else pair[::-1]
            with torch.cuda.stream(self._streams[way]):
                for _ in range(count):
                    into.copy_(source, non_blocking=True)

    def as_swapped(self, copies: int, each: int) -> None:
        """Copies out between convolutions, each after those before it, as swapping sends them."""
        streams, sent = CopyStreams(), []
        for number in range(copies):
            self.compute(each)
            sent.append(streams.send(self.here[number % 2], self.there[number % 2]))
        self.compute(each)


def overlap(asked: Asked) -> Found:
    """Seconds of copies and convolutions together, against each alone and their sum."""
    torch.backends.cudnn.allow_tf32 = False
    rows: list[Figures] = []
    for precision in ("float32", "bfloat16"):
        if (rows and asked.late) or not asked.computes(precision):
            continue
        work = _Work(asked, getattr(torch, precision))
        many = _count(work.compute, asked)
        compute = partial(work.compute, many)
        for name, ways in (("out", (OUT,)), ("back", (BACK,)), ("both ways", (OUT, BACK))):
            copies = _count(partial(work.copy, ways), asked)
            copy = partial(work.copy, ways, copies)
            row = _row(asked, copy, compute, lambda: (copy(), compute()))  # noqa: B023
            moved = work.num_bytes * copies / row["copy_s"] / 2**30
            row["gib_per_s_each_way"] = moved
            rows.append({"precision": precision, "copies": name, **row})
        copies = min(many, _count(partial(work.copy, (OUT,)), asked))
        # One group of convolutions more than copies, since the first copy waits for the first group
        each = max(1, many // copies)
        row = _row(
            asked,
            partial(work.copy, (OUT,), copies),
            partial(work.compute, each * (copies + 1)),
            partial(work.as_swapped, copies, each),
        )
        rows.append({"precision": precision, "copies": "out, as swapping sends", **row})
        if not torch.equal(work.there[OUT].cpu(), work.here[OUT].cpu()):
            raise RuntimeError("what was copied is not what was there")
    claims = [
        at_least(f"{row['precision']}, copies {row['copies']}: hidden of the shorter",
                 row["hidden"], HIDDEN)
        for row in rows
    ]  # fmt: skip
    return {"rows": rows}, claims if asked.cuda else []


def _row(
    asked: Asked,
    copy: Callable[[], object],
    compute: Callable[[], object],
    both: Callable[[], object],
) -> Figures:
    found = seconds_of(asked.device, copy=copy, compute=compute, both=both)
    hidden = found["copy"] + found["compute"] - found["both"]
    seconds = {f"{name}_s": one for name, one in found.items()}
    return {**seconds, "hidden": hidden / min(found["copy"], found["compute"])}


def _count(run: Callable[[int], None], asked: Asked) -> int:
    """How many take so long as is aimed at."""
    if not asked.cuda:
        return 3
    one = seconds_of(asked.device, ten=lambda: run(10))["ten"] / 10
    return max(4, min(20_000, round(AIM_S / one)))
