"""Optimizers of runs: torch's, step for step and bit for bit."""

from typing import Any

import pytest
import torch

from tilenet.training.config.keys import OptimizerKeys
from tilenet.training.optimizer import make_optimizer


@pytest.mark.parametrize(
    ("torchs", "given"),
    [
        (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1}),
    ],
)
def test_steps_are_those_of_torch(
    torchs: type[torch.optim.Optimizer], given: dict[str, Any]
) -> None:
    keys = OptimizerKeys("adamw" if torchs is torch.optim.AdamW else "sgd", **given)
    generator = torch.Generator().manual_seed(4)
    starts = [torch.randn(shape, generator=generator) for shape in [(5, 3), (7,)]]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in starts] for _ in range(2))
    found = make_optimizer(keys, ours)
    wanted = torchs(theirs, **given, fused=True)
    assert isinstance(found, torchs)
    for step in range(4):
        for pair in zip(ours, theirs, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator)
            for parameter in pair:
                parameter.grad = gradient.clone()
        for optimizer in (found, wanted):
            optimizer.param_groups[0]["lr"] = keys.lr / (step + 1)
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert not torch.equal(one, starts[0 if one.dim() > 1 else 1])
            assert found.state[one].keys() == wanted.state[other].keys()
            for name, value in found.state[one].items():
                assert value is None or torch.equal(value, wanted.state[other][name])
