"""Torch's optimizers without its compiler, whose import takes longer than torch's own.

They run what torch's run, but for the wrappers by which `torch.compile` finds them.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

__all__ = ["SGD", "AdamW"]


class _Eager(torch.optim.Optimizer):
    """To be named before one of torch's optimizers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(super().add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return unwrap(super().step)(self, closure)


class AdamW(_Eager, torch.optim.AdamW):
    """AdamW."""


class SGD(_Eager, torch.optim.SGD):
    """SGD."""
