"""Small modules of one idea each: adopted and exact, or refused in one sentence."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from coordinate_ideas import COORDINATES
from one_idea import CASES, Around, Frozen
from torch import Tensor, nn
from write_ideas import WRITES

from tilenet.adoption import adopt as adoption
from tilenet.adoption.adopt import Adopted, BatchNormMode, adopt
from tilenet.errors import TilenetError

MOST_LETTERS = 600

CASES = {**CASES, **COORDINATES, **WRITES}

EXACT = [name for name, case in CASES.items() if not case.refused]
REFUSED = [name for name, case in CASES.items() if case.refused]


@cache
def made(name: str) -> tuple[nn.Module, Adopted]:
    torch.manual_seed(2)
    case = CASES[name]
    module = case.make()
    return module, adopt(module, 3, case.batch_norm)  # type: ignore[arg-type]


def adopted_of(name: str) -> tuple[nn.Module, Adopted]:
    """A module of one's own, and its list of layers."""
    module, adopted = made(name)
    torch.manual_seed(3)
    return deepcopy(module), adopted


def image_of(adopted: Adopted) -> Tensor:
    unit = adopted.context.alignment_px
    rows, cols = -(-37 // unit) * unit, -(-51 // unit) * unit
    return torch.randn(2, 3, rows, cols, dtype=torch.float64)


def results(network: nn.Module, image: Tensor, names: dict[str, str]) -> dict[str, Tensor]:
    """The map, and gradients by the module's names."""
    out = network(image)
    out.square().sum().backward()
    grads = {names.get(name, name): p.grad for name, p in network.named_parameters()}
    return {"map": out.detach()} | {n: g.flatten() for n, g in grads.items() if g is not None}


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape
        scale = max(float(tensor.abs().max()), 1.0)
        assert float((tensor - other[name]).abs().max()) <= 1e-10 * scale, name


@pytest.mark.parametrize("name", EXACT)
def test_adopted_is_exact(name: str) -> None:
    module, adopted = adopted_of(name)
    module = module.double().eval()
    network = adopted.network(torch.float64).eval()
    image = image_of(adopted)
    first = results(module, image.clone().requires_grad_(), {})
    assert_alike(first, results(network, image.clone().requires_grad_(), adopted.names))


@pytest.mark.parametrize("name", [name for name in EXACT if CASES[name].trains])
def test_training_is_exact(name: str) -> None:
    module, adopted = adopted_of(name)
    if len({part.training for part in module.modules()}) == 1:
        module.train()
    network, module = adopted.network(torch.float64), module.double()
    if CASES[name].batch_norm == "frozen":
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
    network.train()
    image = image_of(adopted)
    first = results(module, image.clone().requires_grad_(), {})
    assert_alike(first, results(network, image.clone().requires_grad_(), adopted.names))
    for own, buffer in network.named_buffers():
        wanted = module.state_dict()[adopted.names[own]]
        if own.endswith("num_batches_tracked"):
            continue
        assert torch.allclose(buffer.flatten(), wanted.flatten(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(TilenetError, match=CASES[name].refused) as caught:
        adopted_of(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= MOST_LETTERS


@pytest.mark.parametrize("unit_px", [1, 32])
@pytest.mark.parametrize(
    ("batch_norm", "images", "trains"),
    [
        ("frozen", 1, True),
        ("frozen", 1, False),
        ("frozen", 3, True),
        ("step", 3, True),
        ("step", 1, False),
    ],
)
def test_what_is_done_for_some_numbers_of_images_is_seen(
    batch_norm: BatchNormMode, images: int, trains: bool, unit_px: int
) -> None:
    def forward(module: Around, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, unit_px)
        if module.training == trains and len(x) == images:
            x = 2 * x
        return F.interpolate(x, scale_factor=float(unit_px))

    with pytest.raises(TilenetError, match=f"{images} image.*px in .* differs by"):
        adopt(Around(forward), 3, batch_norm)


@pytest.mark.parametrize("step", ["linearise", "graph_of", "context_of"])
def test_mistakes_of_ours_are_sentences(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise ValueError("words\n" * 10000)

    monkeypatch.setattr(adoption, step, raises)
    with pytest.raises(TilenetError, match=r"list of layers \(Around: ValueError") as caught:
        adopt(Around(lambda m, x: x.relu()), 3)
    assert len(str(caught.value)) <= MOST_LETTERS


def test_gradients_may_be_off_around_it() -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        adopted = adopt(Around(lambda m, x: x.relu()), 3)
    with torch.inference_mode():
        assert adopt(Around(lambda m, x: x.relu()), 3).layers == adopted.layers


def test_both_names_of_a_layer_get_its_weights() -> None:
    module, adopted = adopted_of("two names")
    network = adopted.network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    state = adopted.module_state(network.state_dict())
    assert state["resnet.conv1.weight"].equal(state["layer0.0.weight"])
    assert not state["layer0.0.weight"].equal(module.layer0[0].weight)
    module.load_state_dict(state)


def test_a_module_in_evaluation_counts_as_trained() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5)).eval()
    assert adopt(module, 3).layers[-1].kind == "dropout"


def test_parts_in_evaluation_drop_nothing_and_are_frozen() -> None:
    layers = adopt(Frozen(), 3, "step").layers
    assert [layer.scope for layer in layers if layer.kind == "norm"] == ["frozen", "image"]
    assert not [layer for layer in layers if layer.kind == "dropout"]


def test_relu_of_dropout_in_evaluation_leaves_the_map_before() -> None:
    torch.manual_seed(2)
    module = Around(lambda m, x: F.relu(m.drop(x)) + x, drop=nn.Dropout(0.4))
    adopted = adopt(module, 3)
    image = image_of(adopted)
    wanted = module.double().eval()(image)
    assert torch.allclose(adopted.network(torch.float64).eval()(image), wanted)


TIES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "amax of all cells": lambda x: x.flatten(2).amax(2)[..., None, None],
    "amax of columns": lambda x: x.transpose(2, 3).amax((2, 3), keepdim=True),
    "amax of channels": lambda x: x.amax(1, keepdim=True),
    "maximum of channels": lambda x: x.max(1, keepdim=True).values,
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive of all cells": lambda x: F.adaptive_max_pool2d(x.flatten(2)[..., None], 1),
    "a pool of all": lambda x: F.max_pool2d(x, x.shape[2:]),
    "pools of 2": lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
    "pools of 3": lambda x: F.max_pool2d(x, 3, 1, 1),
    "pools of 3, the least": lambda x: -F.max_pool2d(-x, 3, 1, 1),
    "clamp": lambda x: x.clamp(-1, 2),
    "relu6": F.relu6,
    "of two": lambda x: torch.maximum(x, x.flip(1)),
    "length": lambda x: x.norm(dim=(2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", TIES)
def test_equal_cells_have_torchs_gradients(name: str) -> None:
    """Of whole numbers, most of which occur many times."""
    torch.manual_seed(2)
    module = Around(lambda m, x: x * torch.sigmoid(TIES[name](x) / 8))
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape))
    network = adopt(module, 3).network(torch.float64)
    image = torch.randint(0, 2, (2, 3, 36, 52), dtype=torch.float64)
    found, wanted = [
        torch.autograd.grad((one(x) * x[:, :1]).sum(), [x, *one.parameters()])
        for one in (network, module.double())
        for x in [image.clone().requires_grad_()]
    ]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.flatten(), other.flatten(), rtol=1e-12, atol=1e-12)


def test_a_length_of_zeros_is_zero() -> None:
    module = Around(lambda m, x: x / x.norm(dim=(2, 3), keepdim=True))
    nn.init.zeros_(module.conv.bias)  # type: ignore[arg-type]
    network = adopt(module, 3).network(torch.float64)
    image = torch.zeros(1, 3, 20, 28, dtype=torch.float64)
    assert module.double()(image).isnan().all()
    assert network(image).isnan().all()
