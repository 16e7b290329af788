"""What a module's first weights, or small gradients, would hide from the proof."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_idea import Around
from torch import Tensor, nn

from tilenet.adoption.adopt import BatchNormMode, adopt
from tilenet.errors import TilenetError


class Rounded(torch.autograd.Function):
    """Rounds in forward, and hands gradients on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def gated(branch: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """A branch behind a factor that begins at 0 (ReZero, ControlNet, DANet)."""
    return Around(lambda m, x: x + m.gate * branch(m, x), gate=nn.Parameter(torch.zeros(1)))


BRANCHES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "gradients of its own": lambda m, x: Rounded.apply(x),
    "another function in evaluation": lambda m, x: x.relu() if m.training else x.sigmoid(),
    "dropout in evaluation": lambda m, x: F.dropout(x, 0.5, training=True),
    "heights of 32": lambda m, x: x if x.shape[2] % 32 == 0 else x.relu(),
    "one image": lambda m, x: x if len(x) == 1 else x.relu(),
}


def test_a_gate_that_begins_almost_at_zero_hides_nothing() -> None:
    module = Around(
        lambda m, x: x + m.gate * (x if x.shape[2] % 32 == 0 else x.relu()),
        gate=nn.Parameter(torch.full((1,), 1e-10)),
    )
    with pytest.raises(TilenetError, match=r"must be its list of layers .*differs by"):
        adopt(module, 3)


def test_wide_zeros_stay_small() -> None:
    """Three couplings whose factors begin at exp 0 (Glow)."""
    convs = {f"c{n}": nn.Conv2d(128, 128, 3, padding=1) for n in range(3)}
    for conv in convs.values():
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        x = module.wide(x)
        for name in convs:
            x = x * getattr(module, name)(x).exp()
        return x

    assert adopt(Around(forward, wide=nn.Conv2d(4, 128, 1), **convs), 3).classes == 128


@pytest.mark.parametrize("name", BRANCHES)
def test_a_gate_that_begins_at_zero_hides_nothing(name: str) -> None:
    with pytest.raises(TilenetError, match=r"must be its list of layers .*differs by"):
        adopt(gated(BRANCHES[name]), 3)


def test_weights_stay_zero() -> None:
    network = gated(lambda m, x: x.relu())
    assert adopt(network, 3).state["gate"].eq(0).all()
    assert network.gate.eq(0).all()


class Clipped(torch.autograd.Function):
    """Bounds gradients, which those of a small random image do not reach."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e5, 1e5)


class OfTheBatch(Clipped):
    """Divides gradients by the number of images."""

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / len(gradient)


class Swish(torch.autograd.Function):
    """x · sigmoid(x), which keeps x alone for backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        y = x.sigmoid()
        return gradient * y * (1 + x * (1 - y))


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1e5, 1e5))
    return x


@pytest.mark.parametrize("change", [Clipped.apply, OfTheBatch.apply, hooked])
@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_gradients_that_are_changed_are_refused(
    change: Callable[[Tensor], Tensor], batch_norm: BatchNormMode
) -> None:
    with pytest.raises(TilenetError, match=r"gradient of .* 3 images .*differs by"):
        adopt(Around(lambda m, x: change(x).relu()), 3, batch_norm)


def test_right_gradients_in_python_are_adopted() -> None:
    assert adopt(Around(lambda m, x: Swish.apply(x)), 3).classes == 4


class EvaluatesByBatch(nn.Sequential):
    """Batch norm that takes statistics of the batch in evaluation too (AdaBN)."""

    def train(self, mode: bool = True) -> "EvaluatesByBatch":
        super().train(mode)
        self[1].train()
        return self


@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_batch_statistics_in_evaluation_are_refused(batch_norm: BatchNormMode) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    with pytest.raises(TilenetError, match="in evaluation differs by"):
        adopt(EvaluatesByBatch(conv, nn.BatchNorm2d(4), nn.ReLU()), 3, batch_norm)
