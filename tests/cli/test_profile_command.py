"""`tilenet profile`: layers are measured one by one, and `tilenet plan` takes what was measured."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tilenet.adoption.adopt import adopt
from tilenet.cli import plan as plan_command
from tilenet.cli.profile import main
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import Network, build_network
from tilenet.planning.time.measured import measure_layers
from tilenet.planning.time.profile import read_profile
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.setup import swap

Capture = pytest.CaptureFixture[str]
SMALL = ["--poolings", "2", "--convs", "1", "--base", "4", "--bands", "3", "--device", "cpu"]
LAYERS = unet_layers(UNetOptions(poolings=2, convolutions=1, base=4, bands=3))


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        UNetOptions(poolings=2, base=4, norm="batch", dropout=0.3),
        UNetOptions(poolings=1, base=4, padding="valid", upsampling="transposed"),
        UNetOptions(poolings=1, base=6, norm="group", upsampling="bilinear"),
    ],
    ids=["same", "valid", "group"],
)
def test_every_layer_is_measured(options: UNetOptions, precision: str, repeats: int) -> None:
    layers = unet_layers(options)
    dtype = torch.float64 if precision == "float64" else torch.float32
    network = build_network(layers, dtype=dtype).train()
    before = {name: value.clone() for name, value in network.named_parameters()}
    size = (40, 56)
    image = torch.randn(1, options.bands, *size, dtype=dtype)
    kept = image.clone()
    found = measure_layers(network, image, precision, repeats)
    assert len(found) == len(layers)
    assert all(one.forward_s > 0 for one in found)
    # Whatever stands behind the first weights has a gradient to pass on.
    assert found[0].backward_s > 0
    assert all(one.backward_s > 0 for one in found[1:])
    assert torch.equal(image, kept)
    for name, value in network.named_parameters():
        assert torch.equal(value, before[name])


def test_one_layer_is_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole network may not fit it. Nothing is moved here: both devices are the CPU."""
    network = build_network(LAYERS).train()
    there: list[torch.nn.Module] = []
    runs = []

    def move(layer: torch.nn.Module, device: torch.device) -> None:
        (there.remove if layer in there else there.append)(layer)
        assert device == torch.device("cpu")

    def run(layer: torch.nn.Module, _: object) -> None:
        assert there == [layer]
        runs.append(layer)

    monkeypatch.setattr(torch.nn.Module, "to", move)
    for layer in network:
        layer.register_forward_pre_hook(run)
    measure_layers(network, torch.randn(1, 3, 40, 56), "float32", 1)
    assert len(runs) == 2 * len(LAYERS)
    assert not there
    assert all(parameter.grad is None for parameter in network.parameters())


def test_swapping_is_planned_with_a_network_that_is_not_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(network: Network, image: torch.Tensor, *_: object) -> tuple[()]:
        assert image.is_meta
        assert not any(parameter.is_meta for parameter in network.parameters())
        return ()

    monkeypatch.setattr(swap, "measure_layers", measure)
    statistics = (0.0,) * 3, (1.0,) * 3
    record = NetworkRecord(
        LAYERS, (1, 2, 3), ("a", "b"), 255, *statistics, None, None, "float32", 0
    )
    assert swap._times(record, swap.Load((40, 56), 2, 1), torch.device("meta")) == ()


def test_a_profile_is_written_and_planned_with(capsys: Capture, tmp_path: Path) -> None:
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    measured = ["--tile", "48x64", "--repeats", "2", "-o", str(path)]
    assert main([*SMALL, *measured]) == 0
    table = capsys.readouterr().out
    assert "48 × 64 px, float32, cpu" in table
    profile = read_profile(path)
    assert [one.layer for one in profile.layers] == list(LAYERS)
    for kind in {layer.kind for layer in LAYERS}:
        count = sum(layer.kind == kind for layer in LAYERS)
        assert any(line.split()[:2] == [kind, str(count)] for line in table.splitlines())
    planned = [*SMALL[:-2], "--image", "48x64", "--grid", "1x1", "--profile", str(path)]
    assert plan_command.main([*planned, "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "roofline" not in text
    assert f"measured on {profile.device} (float32, 48 × 64 px) and are taken for cpu;" in text
    total = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    answer = json.loads(out.read_text())["answer"]
    assert answer["pipeline_s"] == pytest.approx(total)
    for unlike, said in (
        (["--precision", "float64"], "(profile: float32, plan: float64); profile again with --pre"),
        (["--convs", "2"], "in the network: "),
        (["--base", "8"], "(layer 0, conv, in the profile: out_channels 4, in the network: out_"),
        (["--bands", "4"], "(layer 0, conv, in the profile: in_channels 3, in the network: in_c"),
    ):
        another = [*SMALL[:-2], *unlike, "--image", "48", "--profile", str(path)]
        assert plan_command.main(another) == 1
        refused = capsys.readouterr().err
        assert said in refused
        assert re.search("; profile (this network|again)", refused)
        assert refused.count("\n") == 1


def test_a_plan_is_made_again_with_its_profile(capsys: Capture, tmp_path: Path) -> None:
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    assert main([*SMALL, "--tile", "32", "--repeats", "1", "-o", str(path)]) == 0
    entry = json.loads(path.read_text())
    for layer in entry["layers"]:
        layer["forward_s"] += 0.5  # so that no roofline gives as many
    path.write_text(json.dumps(entry))
    asked = [*SMALL[:-2], "--image", "96x64", "--grid", "3x2", "--profile", str(path)]
    assert plan_command.main([*asked, "-o", str(out)]) == 0
    first = json.loads(out.read_text())["answer"]["step_s"]
    assert first > 0.5 * len(LAYERS)
    for more, wanted in ((["--profile", str(path)], True), ([], False)):
        capsys.readouterr()
        assert plan_command.main(["--replan", str(out), *more, "-o", str(out)]) == 0
        again = json.loads(out.read_text())["answer"]["step_s"]
        assert (again == pytest.approx(first)) == wanted
        assert ("No --profile is given" in capsys.readouterr().out) != wanted


def test_json_is_what_is_written(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert main([*SMALL, "--tile", "16", "--repeats", "1", "--json", "-o", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


@pytest.mark.parametrize("message", ["CUDA out of memory.\nTried 3 GiB", "DefaultCPUAllocator"])
def test_a_tile_that_is_too_large_is_refused(
    refusal: Any, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr("tilenet.cli.profile.measure_layers", full)
    said = refusal(main, 1, *SMALL, "--tile", "512")
    assert f"(tile: 512 × 512 px on cpu: {message.splitlines()[0]}); measure a smaller tile" in said


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (1, ["--tile", "50"], "(tile: 50 × 50 px, stride: 4 px); nearest: 48"),
        (1, ["--tile", "48x50"], "(tile: 48 × 50 px, stride: 4 px); nearest: 48 × 48"),
        (1, ["--tile", "0"], "nearest: 4"),
        (1, ["--repeats", "0"], "repeats must be at least 1"),
        (1, ["--repeats", "-3"], "repeats must be at least 1"),
        (1, ["--tile", "4", "--norm", "instance"], "more than one cell on every level"),
        (1, ["--tile", "16", "--repeats", "1", "-o", "no/such/file"], "name another file"),
        (2, ["--tile", "axb"], "expected N or ROWSxCOLUMNS"),
        (2, ["--preset", "small"], "a network is given by one of"),
    ],
)
def test_what_is_impossible_is_said_in_a_sentence(
    refusal: Any, code: int, arguments: list[str], said: str
) -> None:
    assert said in refusal(main, code, *SMALL, *arguments)


@pytest.mark.parametrize("name", ["Residual", "Gated", "Pyramid", "Looking"])
def test_a_module_is_profiled_and_planned_with(capsys: Capture, tmp_path: Path, name: str) -> None:
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    named = ["--network", f"zoo:{name}"]
    assert main([*named, "--tile", "64", "--repeats", "1", "--device", "cpu", "-o", str(path)]) == 0
    layers = tuple(one.layer for one in read_profile(path).layers)
    assert layers == adopt(getattr(import_module("zoo"), name)(), 3).layers
    asked = ["--image", "640", "--machine", "local", "--profile", str(path), "-o", str(out)]
    assert plan_command.main([*named, *asked]) == 0
    assert main([*named, "--poolings", "2"]) == 2
    assert "--poolings describes a U-Net" in capsys.readouterr().err
