"""The optimizer of a run: torch's, without the compiler that takes longer to import than torch.

They run the code of torch's optimizers, but for the wrappers that `torch.compile` finds them by.
"""

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from tilenet.training.config.keys import OptimizerKeys


class _Eager(torch.optim.Optimizer):
    """Mixin to name before one of torch's optimizers in a class's bases."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(super().add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return unwrap(super().step)(self, closure)


class EagerAdamW(_Eager, torch.optim.AdamW):
    """AdamW."""


class EagerSGD(_Eager, torch.optim.SGD):
    """SGD."""


def make_optimizer(
    keys: OptimizerKeys, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of some parameters."""
    # Fused: in one pass, and without temporary tensors.
    options: dict[str, Any] = {"lr": keys.lr, "weight_decay": keys.weight_decay, "fused": True}
    if keys.name == "sgd":
        return EagerSGD(parameters, momentum=keys.momentum, nesterov=keys.nesterov, **options)
    return EagerAdamW(parameters, **options)
