"""What a module does at some sizes, for some numbers of images or in one mode only is refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.adoption.adopt import adopt
from tilenet.adoption.proof.as_defined import AsDefined
from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import Coordinates
from tilenet.model.modules import SharedMaximum
from tilenet.model.network import Network


class Module(nn.Module):
    """Two convolutions and a function of them and the image."""

    def __init__(self, function: Callable[["Module", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.drop, self.norm = nn.Dropout2d(0.4), nn.BatchNorm2d(4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def plain(m: Module, x: Tensor) -> Tensor:
    out: Tensor = m.two(F.relu(m.one(x)))
    return out


def padded(m: Module, x: Tensor) -> Tensor:
    rows, cols = x.shape[2:]
    return plain(m, F.pad(x, [0, -cols % 32, 0, -rows % 32]))[:, :, :rows, :cols]


def doubled_where(condition: Callable[[Tensor], bool]) -> Callable[[Module, Tensor], Tensor]:
    return lambda m, x: plain(m, 2 * x if condition(x) else x)


def in_evaluation(m: Module, x: Tensor) -> Tensor:
    return plain(m, x) if m.training else plain(m, x).sigmoid()


REFUSED = {
    "zeros up to a multiple of 32": padded,
    "odd heights": doubled_where(lambda x: x.shape[2] % 2 == 1),
    "odd widths": doubled_where(lambda x: x.shape[3] % 2 == 1),
    "heights that 3 divides": doubled_where(lambda x: x.shape[2] % 3 == 0),
    "widths that 5 divides": doubled_where(lambda x: x.shape[3] % 5 == 0),
    "one image": doubled_where(lambda x: x.shape[0] == 1),
    "three images": doubled_where(lambda x: x.shape[0] == 3),
    "evaluation": in_evaluation,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(TilenetError, match=r"must be its list of layers \(Module, the output of"):
        adopt(Module(REFUSED[name]), 3)


def test_masks_that_keep_all_are_scaled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(m: Module, x: Tensor) -> Tensor:
        return m.two(F.dropout(m.drop(m.one(x)), 0.25, m.training))  # type: ignore[no-any-return]

    layers = adopt(Module(dropped), 3).layers
    assert [one.probability for one in layers if one.kind == "dropout"] == [0.4, 0.25]  # type: ignore[attr-defined]
    monkeypatch.setattr("tilenet.adoption.proof.module._keeps_all", lambda module: module.eval())
    with pytest.raises(TilenetError, match="differs by"):
        adopt(Module(dropped), 3)


@pytest.mark.parametrize("part", ["running_mean", "weight"])
def test_statistics_and_gradients_are_compared(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(m: Module, x: Tensor) -> Tensor:
        return m.two(m.norm(m.one(x)).relu())  # type: ignore[no-any-return]

    adopt(Module(normed), 3, "step")
    forward = Network.forward

    def spoilt(network: Network, x: Tensor) -> Tensor:
        out: Tensor = forward(network, x)
        tensor = getattr(network[1], part)
        if network.training and part == "weight":
            tensor.register_hook(lambda gradient: 1.0001 * gradient)
        elif network.training:
            tensor.data.mul_(1.0001)
        return out

    monkeypatch.setattr(Network, "forward", spoilt)
    with pytest.raises(TilenetError, match=rf"norm\.{part} of 3 images .* in training differs"):
        adopt(Module(normed), 3, "step")


def test_a_gradient_of_equal_maxima_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(m: Module, x: Tensor) -> Tensor:
        y = m.one(x)
        return m.two(y * y.amax((2, 3), keepdim=True).tanh())  # type: ignore[no-any-return]

    adopt(Module(gated), 3)
    monkeypatch.setattr(SharedMaximum, "forward", nn.AdaptiveMaxPool2d.forward)
    with pytest.raises(TilenetError, match=r"the gradient of .* in training differs"):
        adopt(Module(gated), 3)


def test_cells_next_to_infinite_ones_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def ratio(m: Module, x: Tensor) -> Tensor:
        y = F.pad((x[:, :1] - x[:, 1:2]) / (x[:, :1] + x[:, 1:2]), (1, 1, 1, 1)).nan_to_num()
        return m.two(y[..., 1:-1, 1:-1].sigmoid() * m.one(x))  # type: ignore[no-any-return]

    adopt(Module(ratio), 3)
    monkeypatch.setattr("tilenet.model.modules.taps_of", lambda layer: ())
    with pytest.raises(TilenetError, match=r"the output of 1 image .* with zeros differs by \d"):
        adopt(Module(ratio), 3)


def test_sparse_buffers_are_refused() -> None:
    module = Module(plain)
    module.register_buffer("held", torch.eye(5).to_sparse())
    with pytest.raises(TilenetError, match=r"\(held of Module is torch.sparse_coo\)"):
        adopt(module, 3)


def test_weights_of_float64_keep_all_their_digits() -> None:
    adopted = adopt(Module(plain).double(), 3)
    assert adopted.state["one.weight"].dtype == torch.float64


@pytest.mark.parametrize("channels", [1, 4])
def test_nearest_cells_of_float64_are_those_of_float32(channels: int) -> None:
    """Of which torch takes others at some sizes, such as 164 of 2 cells."""
    for bins, size in ((2, (164, 82)), (3, (123, 188)), (5, (166, 164))):
        x = torch.randn(1, channels, bins, bins, requires_grad=True)
        wanted = F.interpolate(x, size=size).double()
        with AsDefined():
            found = F.interpolate(x.double(), size=size)
        assert torch.equal(found, wanted)


def test_instance_norm_has_its_gradient() -> None:
    """Of one image whose incoming gradient has channels last, torch 2.13 takes another."""
    x = torch.randn(1, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    incoming = torch.randn(1, 5, 7, 4, dtype=torch.float64).permute(0, 3, 1, 2)
    with AsDefined():
        F.instance_norm(x).backward(incoming)
    assert x.grad is not None
    assert torch.autograd.gradcheck(lambda x: F.instance_norm(x), (x,))
    (wanted,) = torch.autograd.grad(F.instance_norm(x), x, incoming.contiguous())
    assert torch.allclose(x.grad, wanted, rtol=1e-10)


def test_numbers_of_float32_are_as_exact_as_the_module() -> None:
    def shares(module: nn.Module, x: Tensor) -> Tensor:
        counted = torch.ones(x.shape[2:], dtype=torch.bool).cumsum(1, dtype=torch.float32)
        rows = torch.arange(x.shape[2]).to(torch.float32) / x.shape[2]
        out: Tensor = module.one(x + counted / counted[:, -1:]) + rows[:, None]
        return out

    module, image = Module(shares), torch.randn(2, 3, 37, 53)
    adopted = adopt(module, 3)
    assert sum(isinstance(layer, Coordinates) for layer in adopted.layers) == 2
    assert torch.allclose(module(image), adopted.network()(image), atol=1e-5)
    with AsDefined():
        assert torch.zeros(3, dtype=torch.float32).dtype == torch.float64
        assert torch.zeros(3, dtype=torch.float64).to(torch.float32).dtype == torch.float32


def test_numbers_without_a_type_are_as_exact_as_the_module() -> None:
    """In float32 they would be rounded, and differ from those of a list of layers by that."""

    def coordinates(module: nn.Module, x: Tensor) -> Tensor:
        rows, cols = torch.linspace(-1, 1, x.shape[2]), torch.arange(x.shape[3]).float()
        return module.one(x + rows[:, None]) + cols / (x.shape[3] - 1)

    module, image = Module(coordinates), torch.randn(2, 3, 37, 53)
    adopted = adopt(module, 3)
    assert sum(isinstance(layer, Coordinates) for layer in adopted.layers) == 2
    assert torch.allclose(module(image), adopted.network()(image), atol=1e-5)
    assert torch.get_default_dtype() is torch.float32
    with AsDefined():
        assert (torch.arange(3) / 2).dtype == (torch.arange(3) + 0.5).dtype == torch.float64
        assert torch.linspace(0, 1, 3).dtype == torch.arange(3).float().dtype == torch.float64
