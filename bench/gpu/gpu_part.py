"""What every part of bench/gpu/gpu.py is asked, and how it takes times."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from bench.steps import in_turns

__all__ = ["Asked", "Figures", "seconds_of", "wait"]

Figures = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a part is asked.

    Attributes:
        device: A GPU; on a CPU every part runs too, with sizes that prove nothing but that it does.
        quick: Fewer cases.
        until: When no further case may begin, by `time.perf_counter`.
        machine: Whose peaks to compare with; empty: those of the device's name.
        limit_gib: Of the device, for the largest images; 0: 8, or what the host has room for.
    """

    device: torch.device
    quick: bool = False
    until: float = float("inf")
    machine: str = ""
    limit_gib: float = 0.0

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def late(self) -> bool:
        """Whether no further case may begin."""
        return perf_counter() > self.until

    def computes(self, precision: str) -> bool:
        """Whether the device has arithmetic for a precision."""
        if not self.cuda or precision != "bfloat16":
            return True
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    device: torch.device, repeats: int = 3, **steps: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of each, taken in turns, until the device has done it all."""

    def done(step: Callable[[], object]) -> None:
        step()
        wait(device)

    waited: dict[str, Callable[[], None]] = {
        name: partial(done, step) for name, step in steps.items()
    }
    return in_turns(waited, repeats, lambda: wait(device))
