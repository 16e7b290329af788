"""Modules and the lists that are made of them, and what cannot be made into one."""

import copy
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore
from zoo import ZOO, network

import tilenet
from tilenet.adoption import adopt as adoption
from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.opaque import take_as_it_is
from tilenet.errors import TilenetError
from tilenet.geometry.halo import input_interval
from tilenet.geometry.layers import Conv, Dropout, Norm
from tilenet.geometry.legal_layers import check_layers
from tilenet.storage.layer_json import layer_from_json, layer_to_json


def first(out: Tensor | dict[str, Tensor]) -> Tensor:
    return out if isinstance(out, Tensor) else out["out"]


def test_a_notebook_shows_the_version_and_a_line_for_a_network() -> None:
    assert tilenet.__version__ == version("tilenet")
    assert {"__version__", "adopt"} < set(dir(tilenet))
    adopted = tilenet.adopt(nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.Conv2d(4, 2, 1)), 3)
    shown = "2 layers, 3 bands, 2 classes, looks 2 px around aligned tiles of 1 px"
    assert repr(adopted) == f"<Sequential: {shown}>"


@pytest.fixture(scope="module", params=list(ZOO))
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Adopted]:
    module = network(request.param)
    return module, tilenet.adopt(module, 3)


def test_the_list_gives_the_modules_map(pair: tuple[nn.Module, Adopted]) -> None:
    module, adopted = pair
    unit = adopted.context.alignment_px
    image = torch.randn(2, 3, 7 * unit, 9 * unit)
    wanted = first(module.eval()(image))
    found = adopted.network().eval()(image)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert adopted.classes == wanted.shape[1]


def test_the_module_stays_as_it_was(pair: tuple[nn.Module, Adopted]) -> None:
    module, _ = pair
    fresh = network(next(name for name, made in ZOO.items() if made is type(module)))
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)
        assert module.state_dict()[name].dtype == tensor.dtype


def test_layers_survive_a_checkpoint(pair: tuple[nn.Module, Adopted]) -> None:
    _, adopted = pair
    found = tuple(layer_from_json(layer_to_json(layer)) for layer in adopted.layers)
    assert found == adopted.layers
    check_layers(found, adopted.bands, adopted.classes)


def test_weights_go_back_into_the_module(pair: tuple[nn.Module, Adopted]) -> None:
    module, adopted = pair
    trained = adopted.network()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.25)
    other = copy.deepcopy(module)
    other.load_state_dict(adopted.module_state(trained.state_dict()))
    unit = adopted.context.alignment_px
    image = torch.randn(1, 3, 4 * unit, 5 * unit)
    wanted = trained.eval()(image)
    found = first(other.eval()(image))
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["residual", "gated", "channels"])
def test_the_context_is_what_gradients_reach(name: str) -> None:
    adopted = adopt(network(name), 3)
    with torch.no_grad():
        net = adopted.network(torch.float64).eval()
        for parameter in net.parameters():
            parameter.copy_(parameter.abs() + 0.1)
    unit = adopted.context.alignment_px
    middle = 8 * unit
    image = torch.rand(1, 3, 16 * unit, 16 * unit, dtype=torch.float64, requires_grad=True)
    window = middle, middle + unit - 1
    net(image)[..., window[0] : window[1] + 1, window[0] : window[1] + 1].sum().backward()
    assert image.grad is not None
    reach = image.grad.abs().sum((0, 1, 3))
    if adopted.looks_at_all:  # through averages the whole image reaches each cell, a little
        reach = torch.where(reach > 1e-3 * reach.max(), reach, 0)
    rows = reach.nonzero()
    low, high = input_interval(adopted.layers, *window)
    assert low <= int(rows.min())
    assert int(rows.max()) <= high


def test_batch_norm_is_frozen_or_that_of_the_step() -> None:
    module = network("residual")
    for mode, scope in (("frozen", "frozen"), ("step", "image")):
        layers = adopt(module, 3, mode).layers  # type: ignore[arg-type]
        assert {layer.scope for layer in layers if isinstance(layer, Norm)} == {scope}


def test_dropout_is_seen_where_the_module_drops() -> None:
    drops = [
        (layer.drops, layer.probability)
        for name in ("gated", "pyramid")
        for layer in adopt(network(name), 3).layers
        if isinstance(layer, Dropout)
    ]
    assert drops == [("samples", 0.25), ("cells", 0.3)]


class Made(nn.Module):
    """A convolution, and a function of its map."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def attention(x: Tensor) -> Tensor:
    cells = x.flatten(2)
    return (cells @ (cells.mT @ cells).softmax(-1)).view(x.shape)


def no_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y


def branching(x: Tensor) -> Tensor:
    return x if float(x.sum()) > 0 else -x


def resize(
    x: Tensor, y: Tensor, by: float, mode: str = "bilinear", corners: bool = False
) -> Tensor:
    """A map `y` in a size of the image `x`."""
    size = int(by * x.shape[2]), int(by * x.shape[3])
    return F.interpolate(y, size, mode=mode, align_corners=corners)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (attention, r"maps are multiplied as matrices, .* \(the module itself: matmul"),
        (lambda x: x.softmax(2), r"cells are taken together .*: softmax along dimensions \[2\]"),
        (nn.MaxPool2d((1, 2)), r"rows and columns are treated differently .* \[1, 2\]"),
        (lambda x: F.max_pool2d(x, 2), r"one cell per input pixel"),
        (lambda x: F.interpolate(x, scale_factor=1.5), r"enlarged by whole numbers only"),
        (
            lambda x: resize(x, x, 2 / 3),
            r"smaller by whole numbers only .*\(128, 256\) to \(85, 170",
        ),
        (lambda x: resize(x, x, 0.5, "bicubic"), r"maps are enlarged bicubically, no averages"),
        (lambda x: resize(x, x, 2, "bicubic", True), r"bicubically, .* not by align_corners"),
        (lambda x: resize(x, x.mean((2, 3), True), 1, "bicubic"), r"bicubically, no averages"),
        (lambda x: torch.cat([x, x], 2), r"cells are taken together .*: cat along dimensions"),
        (lambda x: x.mean(2, keepdim=True), r"a mean is taken over other dimensions"),
        (lambda x: x.mean((1, 2, 3), keepdim=True), r"a mean is taken over other dimensions"),
        (lambda x: x.amax(0, keepdim=True) + x, r"a maximum is taken over other .*: amax"),
        (lambda x: F.pad(x, [1, 1, 1, 1]).relu(), r"must give one cell per input pixel"),
        (lambda x: x.mean((2, 3)), r"must return a map \(B, classes, H, W\), alone or first"),
        (lambda x: x.view(-1, 4, x.shape[3], x.shape[2]), r"cells change their places"),
        (lambda x: x[:, 0, :, :, None] * x[:, 0, 0, 0, None, None, None], r"cells are taken"),
        (lambda x: x + x.flip(3), r"cells are taken together .*: flip along dimensions \[3\]"),
        (lambda x: x + x.roll(1, 2), r"cells are taken together .*: roll"),
        (
            lambda x: x + x[:, :, ::2].repeat(1, 1, 2, 1),
            r"rows and columns are treated differently",
        ),
        (lambda x: x.sort(1).values, r"receptive field of this operator is unknown .*: sort"),
        (lambda x: x.cumsum(2), r"cells are taken together .*: cumsum"),
        (lambda x: x + torch.rand_like(x), r"receptive field of this operator is unknown"),
        (branching, r"must take one image .* and do the same to each"),
        (lambda x: F.interpolate(x, size=(128, 256)), r"must grow with its image"),
        (no_gradients, r"a part is recorded as one operator"),
    ],
)
def test_what_cannot_be_a_layer_is_refused(
    function: Callable[[Tensor], Tensor], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TilenetError, match=sentence) as caught:
        adopt(Made(function), 3)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # of some, torch would print the graph


def _exported(net: nn.Module) -> nn.Module:
    return torch.export.export(net, (torch.randn(1, 3, 16, 16),)).module()


def _whole_and_part(make: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    made = [make(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())) for _ in range(2)]
    return [made[0], nn.Sequential(made[1], nn.Conv2d(4, 2, 1))]


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (torch.jit.script, r"TorchScript\); pass the one that was scripted or traced"),
        (_exported, r"pass the module that was exported"),
    ],
)
def test_what_torch_makes_of_a_module_is_refused(make: Any, remedy: str) -> None:
    for module in _whole_and_part(make):
        with pytest.raises(TilenetError, match=remedy):
            adopt(module, 3)


def test_a_module_over_ranks_of_torch_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for module in _whole_and_part(nn.parallel.DistributedDataParallel):
            with pytest.raises(TilenetError, match=r"\(Distributed.*: .*\); pass its \.module"):
                adopt(module, 3)
    finally:
        torch.distributed.destroy_process_group()


def test_torchscript_is_no_module_for_windows() -> None:
    for module in _whole_and_part(torch.jit.script):
        with pytest.raises(TilenetError, match="pass the one that was scripted"):
            take_as_it_is(module, 3, 32, "")


def test_exported_programs_of_any_size_are_taken() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    sizes = {0: torch.export.Dim("b"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    image = torch.randn(2, 3, 16, 24)
    program = torch.export.export(net, (image,), dynamic_shapes=(sizes,))
    assert adopt(program.module(), 3).layers == adopt(net, 3).layers


def test_a_refusal_names_the_submodule() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), nn.Softmax(dim=2)))
    with pytest.raises(TilenetError, match=re.escape("(1.1: softmax along dimensions [2])")):
        adopt(module, 3)


class Several(nn.Module):
    """What cannot be a layer in two parts and in forward, and what leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softmax(dim=2), nn.Conv2d(4, 4, 1))
        self.deep = nn.Sequential(nn.ReLU(), nn.Softmax(dim=3), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x.cumsum(2)
        return self.deep(x.flip(3)) + x.roll(1, 2)[:, :2]


def test_all_that_is_refused_is_said_at_once() -> None:
    with pytest.raises(TilenetError) as caught:
        adopt(Several(), 3)
    sentence = str(caught.value)
    line = Several.forward.__code__.co_firstlineno + 3
    assert re.search(
        r"cells are taken together \(stem\.1: softmax .*; deep\.1: .*; 1 more\)", sentence
    )
    assert f"flip along dimensions [3], test_adopt.py:{line}" in sentence
    assert "cumsum" not in sentence
    assert sentence.endswith(
        "use a network without these, or halo_mode: windows (window_px in predict), which is "
        "approximate"
    )
    assert "\n" not in sentence


def test_what_follows_on_a_refused_operator_is_not_refused() -> None:
    drop = Made(lambda x: F.dropout2d(x.permute(0, 2, 3, 1), 0.5).permute(0, 3, 1, 2))
    with pytest.raises(TilenetError) as caught:
        adopt(nn.Sequential(drop, nn.Conv2d(4, 3, 3, padding=1), Made(lambda x: x.cumsum(3))), 3)
    assert "feature_dropout" in str(caught.value)
    assert "cumsum" in str(caught.value)
    assert "conv2d" not in str(caught.value)


@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_weights_that_layers_share_are_one_parameter(batch_norm: Any) -> None:
    module = network("shared")
    adopted = adopt(module, 3, batch_norm)
    trained = {id(p): adopted.names[n] for n, p in adopted.network().named_parameters()}
    assert sorted(trained.values()) == sorted(n for n, _ in module.named_parameters())
    assert adopted.num_parameters == sum(p.numel() for p in module.parameters())
    assert len(adopted.network().trained) == len(list(module.parameters()))
    changed = {n: t + 1 for n, t in adopted.network().state_dict().items()}
    module.load_state_dict(adopted.module_state(changed))
    assert torch.equal(module.other.weight, network("shared").head.weight + 1)


def test_fixed_weights_that_layers_share_may_be_parted() -> None:
    adopted = adopt(
        network("shared", fixed=["encoder", "act", "again", "norms", "norm", "down"]), 3
    )
    assert adopted.together.keys() == {"scale", "head.weight", "head.bias"}
    assert len(adopted.network().trained) == len(adopted.together) + 1


def test_statistics_of_a_step_that_two_maps_share_are_refused() -> None:
    norm = nn.BatchNorm2d(4)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Conv2d(4, 4, 1), norm)
    with pytest.raises(TilenetError, match=r"those of one map \(1\.running_mean of Sequential"):
        adopt(module, 3, "step")
    assert adopt(module, 3).together == {"1.weight": (1, 3), "1.bias": (1, 3)}
    norm.eval()
    adopt(module, 3, "step")


@pytest.mark.parametrize("fixed", ["parameter", "buffer"])
def test_weights_that_require_no_gradient_are_fixed(fixed: str) -> None:
    module = Made(nn.Conv2d(4, 4, 1))
    if fixed == "parameter":
        module.conv.weight.requires_grad_(False)
    else:
        weight = module.conv.weight.detach()
        del module.conv.weight
        module.conv.register_buffer("weight", weight)
    adopted = adopt(module, 3)
    assert adopted.fixed == {"conv.weight"}
    trained = [adopted.names[n] for n, p in adopted.network().named_parameters() if p.requires_grad]
    assert trained == ["conv.bias", "function.weight", "function.bias"]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_enlarging_by_one_is_no_layer(mode: str) -> None:
    """One between cells would look at neighbours, for nothing."""
    first, last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
    plain = adopt(nn.Sequential(first, last), 3).layers
    assert (
        adopt(nn.Sequential(first, nn.Upsample(scale_factor=1, mode=mode), last), 3).layers == plain
    )


def test_strides_of_three_are_recorded() -> None:
    down, up = nn.Conv2d(4, 4, 3, 3), nn.ConvTranspose2d(4, 2, 3, 3)
    assert adopt(Made(nn.Sequential(down, up)), 3).context.alignment_px == 3


@pytest.mark.parametrize("bands", [0, -1])
def test_impossible_modules_are_refused(bands: int) -> None:
    with pytest.raises(TilenetError, match=rf"at least one band \(bands: {bands}\)"):
        adopt(network("dense"), bands)
    with pytest.raises(TilenetError, match=r"a network has layers \(Identity"):
        adopt(nn.Identity(), 3)


@pytest.mark.parametrize("change", ["padding", "slope"])
def test_a_list_that_is_not_the_module_is_refused(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: object) -> tuple[object, object]:
        layers, names = recorded(*arguments)  # type: ignore[arg-type]
        place = next(
            i for i, one in enumerate(layers) if isinstance(one, Conv) and one.dilation == 2
        )
        layer = layers[place]
        assert isinstance(layer, Conv)
        swapped = Conv(*list(vars(layer).values())[:4], 1, 1, layer.bias)
        return (*layers[:place], swapped, *layers[place + 1 :]), names

    recorded = adoption._recorded
    if change == "padding":
        monkeypatch.setattr(adoption, "_recorded", wrong)
        with pytest.raises(TilenetError, match=r"must be its list of layers \(Pyramid, the output"):
            adopt(network("pyramid"), 3)
    else:
        monkeypatch.setattr("tilenet.adoption.proof.module.ROUNDING", -1.0)
        with pytest.raises(TilenetError, match=r"differs by \d"):
            adopt(network("dense"), 3)


def test_uneven_crops_take_small_kernels() -> None:
    module = nn.Sequential(nn.Conv2d(3, 2, 1, padding=44), Crop(31))
    kernels = [layer.kernel for layer in adopt(module, 3).layers if isinstance(layer, Conv)]
    assert max(kernels) == 3


class Crop(nn.Module):
    """As many cells as come less 88, from a place on."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        rows, cols = (self.place + cells - 88 for cells in x.shape[2:])
        return x[:, :, self.place : rows, self.place : cols]


def test_a_programs_random_numbers_and_default_dtype_are_left_alone() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(), nn.Conv2d(4, 2, 1))
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        layers = adopt(net, 3).layers
        take_as_it_is(net, 3, 8, "a:b")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(4), wanted)
    assert layers == adopt(net, 3).layers
