"""Weights of files as people have them find their places in a module, or are refused."""

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tilenet.adoption.weights import load_partial_weights
from tilenet.errors import TilenetError

State = dict[str, Tensor]


class Block(nn.Module):
    """A convolution and its norm, under names as of a resnet."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)


class Encoder(nn.Module):
    def __init__(self, bands: int = 3) -> None:
        super().__init__()
        self.stem = Block(bands, 4)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4), Block(4, 5))


class Net(nn.Module):
    """An encoder under a name, a decoder and a head."""

    def __init__(self, part: str = "encoder", bands: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.add_module(part, Encoder(bands))
        self.decoder = Block(5, 6)
        self.head = nn.Conv2d(6, classes, 1)


class Around(nn.Module):
    """A module within another, as DDP, compile and Lightning hold it."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        name, _, rest = path.partition(".")
        self.add_module(name, Around(rest, module) if rest else module)


def drawn(state: Mapping[str, Tensor], before: str = "", seed: int = 3) -> State:
    """Random tensors in the shapes of a state."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{before}{name}": torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in state.items()
    }


def written(folder: Path, content: Any, name: str = "w.pth") -> Path:
    if name.endswith(".safetensors"):
        save_file(content, folder / name)
    else:
        torch.save(content, folder / name)
    return folder / name


def without(state: State, before: str) -> State:
    """Tensors of one part, under its own names."""
    part = {name: tensor for name, tensor in state.items() if name.startswith(before)}
    return {name.removeprefix(before): tensor for name, tensor in part.items()}


def are_in(module: nn.Module, before: str, state: State) -> bool:
    held = module.state_dict()
    return all(torch.equal(held[f"{before}{name}"], tensor) for name, tensor in state.items())


PREFIXES = ["", "module.", "model.", "net.", "_orig_mod.", "module.model.", "model._orig_mod."]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".ckpt"])
@pytest.mark.parametrize("of_module", ["", "module", "model.net", "_orig_mod"])
@pytest.mark.parametrize("of_file", [*PREFIXES, "encoder.", "backbone.", "module.net.backbone."])
def test_prefixes_on_either_side(of_file: str, of_module: str, suffix: str, tmp_path: Path) -> None:
    state = drawn(Net().state_dict())
    path = written(tmp_path, {f"{of_file}{n}": tensor for n, tensor in state.items()}, f"w{suffix}")
    module = Around(of_module, Net()) if of_module else Net()
    note = load_partial_weights(module, path)
    assert are_in(module, f"{of_module}." if of_module else "", state)
    assert f"{len(state)} of {len(state)} tensors are filled in" in note
    assert "no place" not in note
    assert "stay as made" not in note


@pytest.mark.parametrize("of_file", [*PREFIXES, "encoder.", "backbone.", "module.net.backbone."])
@pytest.mark.parametrize("part", ["encoder", "backbone", "features"])
def test_an_encoder_finds_its_place(of_file: str, part: str, tmp_path: Path) -> None:
    state = drawn(Encoder().state_dict())
    more = {f"{of_file}fc.weight": torch.ones(10, 5), f"{of_file}fc.bias": torch.ones(10)}
    path = written(tmp_path, {f"{of_file}{n}": tensor for n, tensor in state.items()} | more)
    module = Net(part)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    note = load_partial_weights(module, path)
    assert are_in(module, f"{part}.", state)
    others = {n: tensor for n, tensor in before.items() if not n.startswith(part)}
    assert are_in(module, "", others)
    assert f"2 of the file have no place ({of_file}fc.weight, {of_file}fc.bias)" in note
    assert f"{len(others)} of the network stay as made (decoder.conv1.weight, " in note
    assert ", …)" in note


def test_wrappers_within_names(tmp_path: Path) -> None:
    """Only the encoder was compiled, only the decoder was in DDP."""
    state = drawn(Net().state_dict())
    content = {
        n.replace("encoder.", "encoder._orig_mod.").replace("decoder.", "decoder.module."): tensor
        for n, tensor in state.items()
    }
    module = Net()
    load_partial_weights(module, written(tmp_path, content))
    assert are_in(module, "", state)


@pytest.mark.parametrize(
    "holder", ["model", "state_dict", "model_state_dict", "net", "state_dict model"]
)
def test_tensors_within_other_things(holder: str, tmp_path: Path) -> None:
    state = drawn(Net().state_dict())
    content: Any = state
    for key in reversed(holder.split()):
        optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
        content = {"epoch": 3, "rng": torch.ones(9), "optimizer": optimizer, key: content}
    module = Net()
    load_partial_weights(module, written(tmp_path, content))
    assert are_in(module, "", state)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    state = drawn(Net().state_dict(), "model.")
    content = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": state | {"criterion.weight": torch.ones(2)},
        "optimizer_states": [],
        "hyper_parameters": {"lr": 1e-3},
    }
    module = Net()
    note = load_partial_weights(module, written(tmp_path, content, "last.ckpt"))
    assert are_in(module, "", without(state, "model."))
    assert "(model as the network)" in note
    assert "1 of the file have no place (criterion.weight)" in note
    content["hyper_parameters"] = argparse.Namespace(lr=1e-3)
    with pytest.raises(TilenetError, match=r"argparse.Namespace, .*weights_only=False"):
        load_partial_weights(module, written(tmp_path, content, "last.ckpt"))


def test_numbers_as_timm_writes_them(tmp_path: Path) -> None:
    """`layer1.0` of a classifier is `layer1_0` of timm's feature extractors."""
    state = drawn(Encoder().state_dict())
    module = Around("encoder.model", nn.Module())
    flat = module.get_submodule("encoder.model")
    for name, child in Encoder().named_children():
        parts = child.named_children() if name == "layer1" else [("", child)]
        for number, part in parts:
            flat.add_module(f"{name}_{number}" if number else name, part)
    load_partial_weights(module, written(tmp_path, state))
    places = {name.replace("layer1.", "layer1_"): tensor for name, tensor in state.items()}
    assert are_in(module, "encoder.model.", places)


class Twice(nn.Module):
    """Two encoders, or one under two names."""

    def __init__(self, bands: int, *, same: bool = False) -> None:
        super().__init__()
        self.optical = Encoder()
        self.radar = self.optical if same else Encoder(bands)
        self.head = nn.Conv2d(5, 2, 1)


def test_two_places_are_a_sentence(tmp_path: Path) -> None:
    state = drawn(Encoder().state_dict())
    path = written(tmp_path, state)
    said = r"the file as optical and the file as radar fit alike with 24 tensors"
    with pytest.raises(TilenetError, match=said):
        load_partial_weights(Twice(3), path)
    module = Twice(1)  # radar has one band: shapes decide
    load_partial_weights(module, path)
    assert are_in(module, "optical.", state)
    module = Twice(3, same=True)  # both places are the same tensors
    stay = "2 of the network stay as made (head.weight, head.bias)"
    assert stay in load_partial_weights(module, path)
    assert are_in(module, "radar.", state)
    named = {f"radar.{name}": tensor for name, tensor in state.items()}
    module = Twice(3)
    before = drawn(module.optical.state_dict())
    module.optical.load_state_dict(before)
    state = drawn(Encoder().state_dict(), seed=4)
    load_partial_weights(
        module, written(tmp_path, {f"radar.{name}": state[name[6:]] for name in named})
    )
    assert are_in(module, "radar.", state)
    assert are_in(module, "optical.", before)


def test_a_file_that_holds_the_network_twice(tmp_path: Path) -> None:
    state = Net().state_dict()
    content = drawn(state, "model.") | drawn(state, "ema.module.", 4)
    with pytest.raises(TilenetError, match=r"model as the network and ema as the network fit"):
        load_partial_weights(Net(), written(tmp_path, content))
    module = Net()
    load_partial_weights(module, written(tmp_path, drawn(state) | drawn(state, "ema.", 4)))
    assert are_in(module, "", drawn(state))  # its very names


def with_inf(state: State) -> State:
    return state | {"head.bias": torch.full((2,), torch.inf)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (drawn(Net(classes=7).state_dict()), r"head.weight is \(7, 6, 1, 1\) there and \(2, 6,"),
        (drawn(Encoder(4).state_dict(), "net."), r"net.stem.conv1.weight is \(4, 4, 3, 3\) there"),
        ({"conv.weight": torch.ones(9, 9)}, r"of which 0 have a place"),
        (drawn(nn.LSTM(3, 3, 2).state_dict()) | drawn(nn.Linear(3, 2).state_dict()), r"1 have a"),
        (with_inf(drawn(Net().state_dict())), r"head.bias holds others"),
        ([torch.ones(2)], r"by their names \(.*: list\)"),
        ({"epoch": 3, "model": {"lr": 1}}, r"by their names \(.*: dict of epoch, model\)"),
        ({}, r"by their names"),
    ],
)
def test_what_has_no_place(content: Any, said: str, tmp_path: Path) -> None:
    module = Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(TilenetError, match=said):
        load_partial_weights(module, written(tmp_path, content))
    assert are_in(module, "", before)


def test_a_mapping_within_itself(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    with pytest.raises(TilenetError, match="by their names"):
        load_partial_weights(Net(), written(tmp_path, content))


def package(name: str) -> ModuleType:
    """A package, where it and the torch here go together."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs pip install '.[bench]' ({name}: {error})")


@pytest.mark.parametrize(
    ("encoder", "classifier", "before", "left"),
    [
        ("resnet18", "torchvision:resnet18", "encoder.", 2),
        ("resnet18", "timm:resnet18", "encoder.", 2),
        ("tu-resnet18", "timm:resnet18", "encoder.model.", 2),
        ("tu-resnet18", "torchvision:resnet18", "encoder.model.", 2),
        ("tu-convnext_tiny", "timm:convnext_tiny", "encoder.model.", 4),
        ("tu-efficientnet_b0", "timm:efficientnet_b0", "encoder.model.", None),
        ("mobilenet_v2", "torchvision:mobilenet_v2", "encoder.", 2),
        ("densenet121", "torchvision:densenet121", "encoder.", 2),
        ("vgg11_bn", "torchvision:vgg11_bn", "encoder.", 6),
    ],
)
def test_classifiers_fill_in_encoders(
    encoder: str, classifier: str, before: str, left: int | None, tmp_path: Path
) -> None:
    smp = package("segmentation_models_pytorch")
    library, _, name = classifier.partition(":")
    if library == "timm":
        source = package("timm").create_model(name)
    else:
        source = getattr(package("torchvision").models, name)(weights=None)
    state = drawn(source.state_dict())
    module = smp.Unet(encoder, encoder_weights=None)
    note = load_partial_weights(module, written(tmp_path, state))
    held = module.state_dict()
    places = {n.replace("_", "."): n for n in held}
    of_encoder = 0
    for n, tensor in state.items():
        place = places.get(f"{before}{n}".replace("_", "."))
        if place is not None:
            assert torch.equal(held[place], tensor)
            of_encoder += 1
    assert of_encoder == sum(n.startswith("encoder.") for n in held)
    assert f"{of_encoder} of {len(state)} tensors" in note
    assert left in (None, len(state) - of_encoder)


def test_networks_of_a_library_in_wrappers(tmp_path: Path) -> None:
    smp = package("segmentation_models_pytorch")
    state = drawn(smp.Unet("resnet18", encoder_weights=None).state_dict())
    content = {"state_dict": {f"module.model.{name}": tensor for name, tensor in state.items()}}
    module = smp.Unet("resnet18", encoder_weights=None)
    load_partial_weights(module, written(tmp_path, content, "last.ckpt"))
    assert are_in(module, "", state)
    other = smp.FPN("resnet18", encoder_weights=None)
    encoder = {n: tensor for n, tensor in state.items() if n.startswith("encoder.")}
    load_partial_weights(other, written(tmp_path, encoder))
    assert are_in(other, "", encoder)
