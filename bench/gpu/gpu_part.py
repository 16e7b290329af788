"""What every part of bench/gpu/gpu.py is asked, and what it answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.report import Found

__all__ = ["Asked", "Figures", "Found", "Part", "wait"]

Figures = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a part is asked.

    Attributes:
        device: A GPU; on a CPU every part runs too, with sizes that prove nothing but that it does.
        quick: Fewer cases.
        until: When no further case may begin, by `time.perf_counter`.
        machine: Whose peaks to compare with; None: those of the device's name.
        limit_gib: Of the device, for the largest images; None: 8, or what the host has room for.
    """

    device: torch.device
    quick: bool = False
    until: float = float("inf")
    machine: str | None = None
    limit_gib: float | None = None

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def late(self) -> bool:
        """Whether no further case may begin."""
        return time.perf_counter() > self.until

    def computes(self, precision: str) -> bool:
        """Whether the device has arithmetic for a precision."""
        if not self.cuda or precision != "bfloat16":
            return True
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


Part = Callable[[Asked], Found]


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
