"""`tilenet check`: what it says of networks that can be cut, and why others cannot."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_out import short_halo
from torch import Tensor, nn
from zoo import ZOO

from tilenet.__main__ import main as tilenet
from tilenet.adoption.adopt import adopt
from tilenet.cli.check import main
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning import small_image
from tilenet.planning.machines.read import machine
from tilenet.planning.mesh import choose_mesh
from tilenet.planning.plan import OwnNetwork, Question
from tilenet.planning.search import Search
from tilenet.training.proof import alone

Capture = pytest.CaptureFixture[str]
HERE = __name__


def answer(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    found: dict[str, Any] = json.loads(printed.out)
    over = found.pop("over")  # tiles, to the last digit of rounding
    assert over or "--no-prove" in arguments
    for differences in over.values():
        assert differences["logits"] < 1e-12
        assert differences["gradients"] < 1e-12
    return found


class Plain(nn.Module):
    """Of which a reader can work out all numbers."""

    def __init__(
        self, channels: int = 6, kernel: int = 5, act: str = "relu", bias: bool = True
    ) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, channels, kernel, padding=kernel // 2, bias=bias)
        self.norm = nn.BatchNorm2d(channels)
        self.act = {"relu": nn.ReLU(), "silu": nn.SiLU()}[act]
        self.pool = nn.MaxPool2d(2)
        self.two = nn.Conv2d(channels, 4, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.norm(self.one(x))))
        out: Tensor = self.up(self.two(x))
        return out


class Flipping(nn.Module):
    """Swaps rows and columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(3)


class Wide(nn.Module):
    """Looks 402 px around each pixel."""

    def __init__(self) -> None:
        super().__init__()
        far = {"padding": 200, "dilation": 200}
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2), nn.Conv2d(6, 6, 3, **far), nn.Conv2d(6, 2, 3, **far)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class WideAndFaint(Wide):
    """What it sees beyond its first layer is below any rounding that is allowed."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        near = first(x)
        out: Tensor = near[:, :2] + 1e-11 * nn.Sequential(*others)(near)
        return out


def turning() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), Flipping()))


def half() -> nn.Module:
    """Gives one cell for four pixels."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1))


def rude() -> nn.Module:
    raise KeyError("weights of\nlast year")


class Nested:
    """A class inside of a class."""

    Inner = Plain


def softmax_over_rows() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), nn.Softmax(dim=2)))


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), norm)


# --- what can be cut


@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
@pytest.mark.parametrize("name", ZOO)
def test_numbers_of_the_zoo(capsys: Capture, name: str, batch_norm: str) -> None:
    module = ZOO[name]()
    found = answer(capsys, f"zoo:{type(module).__name__}", "--batch-norm", batch_norm)
    adopted = adopt(module, 3, batch_norm)  # type: ignore[arg-type]
    context = adopted.context
    assert found["network"] == type(module).__name__
    assert found["halo_px"] == context.halo_px > 0
    assert found["alignment_px"] == context.alignment_px
    assert found["context_aligned_px"] == context.context_aligned_px
    assert found["context_any_pixel_px"] == context.context_any_pixel_px
    assert found["num_parameters"] == sum(one.numel() for one in module.parameters())
    assert (found["bands"], found["classes"]) == (3, adopted.classes)
    out = module.eval()(torch.randn(1, 3, 96, 96))
    assert found["classes"] == (out if isinstance(out, Tensor) else out["out"]).shape[1]
    assert found["num_layers"] == len(adopted.layers) == sum(found["kinds"].values())
    assert found["kinds"] == Counter(layer.kind for layer in adopted.layers)
    whole = any(isinstance(part, nn.BatchNorm2d) for part in module.modules())
    assert found["looks_at_whole_image"] == (
        name not in ("residual", "channels", "shifted", "between", "moved", "located", "resized")
        or (batch_norm == "step" and whole)
    )


def test_numbers_that_a_reader_can_work_out(capsys: Capture) -> None:
    """A kernel of 5, pooling by 2, a kernel of 3 on cells of 2 px."""
    found = answer(capsys, f"{HERE}:Plain", "--bands", "2")
    assert found == {
        "network": "Plain",
        "bands": 2,
        "classes": 4,
        "num_layers": 6,
        "num_parameters": 2 * 6 * 25 + 6 + 6 + 6 + 6 * 4 * 9 + 4,
        "kinds": {
            "conv": 2, "norm": 1, "activation": 1, "pool": 1, "upsample": 1
        },
        "alignment_px": 2,
        "context_aligned_px": 2 + 2,
        "context_any_pixel_px": 2 + 2 + 1,
        "halo_px": 4,
        "looks_at_whole_image": False,
    }  # fmt: skip


def test_options_reach_the_constructor(capsys: Capture) -> None:
    """Numbers and truth values as in JSON; what is none is a text."""
    options = ["channels=8", "kernel=9", "act=silu", "bias=false"]
    found = answer(capsys, f"{HERE}:Plain", "--bands", "2", "--options", *options)
    assert found["num_parameters"] == 2 * 8 * 81 + 8 + 8 + 8 * 4 * 9 + 4
    assert found["context_aligned_px"] == 4 + 2
    assert found["halo_px"] == 6
    quoted = ["channels=8", "kernel=9", 'act="silu"', "bias=false"]
    assert answer(capsys, f"{HERE}:Plain", "--bands", "2", "--options", *quoted) == found


@pytest.mark.parametrize("name", ["Nested.Inner", "Plain"])
def test_batch_norm_of_a_step_looks_at_the_whole_image(capsys: Capture, name: str) -> None:
    network = f"{HERE}:{name}", "--bands", "2"
    frozen = answer(capsys, *network, "--batch-norm", "frozen")
    step = answer(capsys, *network, "--batch-norm", "step")
    assert answer(capsys, *network) == frozen
    assert frozen | {"looks_at_whole_image": True} == step != frozen


def test_a_function_makes_a_network_too(capsys: Capture) -> None:
    found = answer(capsys, "zoo:network", "--options", "name=channels")
    assert found == answer(capsys, "zoo:Channels")


def test_people_are_told_the_same_numbers(capsys: Capture) -> None:
    found = answer(capsys, "zoo:Gated")
    assert tilenet(["check", "zoo:Gated"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    first, *lines = printed.out.splitlines()
    assert first.startswith("Gated is the same network")
    shown = {words[0]: int(words[1].replace(",", "")) for line in lines if (words := line.split())
             and words[0] in found}  # fmt: skip
    wanted = {name: number for name, number in found.items() if type(number) is int}
    assert shown == wanted
    kinds = next(line for line in lines if line.startswith("layers: "))
    counts = [one.split() for one in kinds.removeprefix("layers: ").split(", ")]
    assert {kind: int(number) for number, kind in counts} == found["kinds"]
    assert "whole image, which no halo covers" in lines[-2]
    assert main(["zoo:Residual"]) == 0
    assert "no halo covers" not in capsys.readouterr().out


# --- over tiles


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a pass back over an image that tests a wide halo takes long."""
    monkeypatch.setattr(small_image, "SPEED", 5e7)


def test_people_are_told_how_far_tiles_are(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["zoo:Gated"]) == 0
    number = r"\de[+-]\d\d"
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"over 3 × 2 tiles +exact: logits {number}, gradients {number}", line)
    slow(monkeypatch)
    assert main([f"{HERE}:Wide"]) == 0
    *_, both, tile = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"over 2 × 2 tiles +exact: logits {number}, gradients {number}; 65 × 65 px are too few to "
        "test the halo",
        both,
    )
    assert re.fullmatch(rf"over a tile of 807 × 1 +exact: logits {number}", tile)
    monkeypatch.setattr(small_image, "SPEED", 1.0)
    assert main([f"{HERE}:Wide"]) == 0
    *_, both, tile = capsys.readouterr().out.splitlines()
    assert both.startswith("over 2 × 2 tiles       not compared: the smallest image for 2 × 2")
    assert tile.startswith("over a tile of 807 × 1 not compared: ")
    assert main([f"{HERE}:Wide", "--no-prove"]) == 0
    assert "over" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["zoo:Residual", "zoo:Gated", f"{HERE}:Wide", f"{HERE}:WideAndFaint"]
)
def test_a_short_halo_is_refused(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    slow(monkeypatch)
    monkeypatch.setattr(alone, "halo_rule", short_halo)
    assert main([name]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    tiles = "a tile of 807 × 1" if "Wide" in name else "3 × 2 tiles"
    assert f"({tiles}: logits of a small random image differ by " in printed.err
    assert main([name, "--no-prove"]) == 0


def test_wrong_gradients_of_tiles_are_refused(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(pipe: Pipe, *arguments: Any) -> list[Tensor]:
        outputs = piped(pipe, *arguments)
        outputs[0].register_hook(lambda gradient: gradient * (1 + 1e-6))
        return outputs

    piped = Pipe.__call__
    monkeypatch.setattr(Pipe, "__call__", bent)
    assert main(["zoo:Residual"]) == 1
    assert "(3 × 2 tiles: gradients of a small random image (" in capsys.readouterr().err


# --- what cannot


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (1, ["softmax_over_rows"], r"cells are taken together \(1\.1: softmax along"),
        (1, ["turning"], r"cells are taken together \(1\.1: flip along"),
        (1, ["turning", "--json"], r"cells are taken together \(1\.1: flip along"),
        (1, ["half"], r"one cell per input pixel"),
        (1, ["shared_norm", "--batch-norm", "step"], r"statistics of a step are those of one map"),
        (1, ["rude"], r":rude: KeyError: .*weights of\\+nlast year"),
        (1, ["Missing"], r":Missing: AttributeError: .*Missing"),
        (1, ["Nested.Missing"], r":Nested\.Missing: AttributeError: .*Missing"),
        (1, ["no_such_package_at_all:Net"], r"ModuleNotFoundError: .*no_such_package_at_all"),
        (1, ["zoo:ZOO"], r"zoo:ZOO: TypeError: .*dict"),
        (1, ["Plain", "--options", "depth=3"], r"TypeError: .*unexpected keyword .*'depth'"),
        (1, ["Plain"], r"one image \(B, 3, .*another number of bands"),  # takes 2
        (2, ["zoo.Gated"], r"package:function or package:Class \(zoo\.Gated\)"),
        (2, ["zoo:Gated", "--options", "wide"], r"name=value \(--options: wide\)"),
        (2, ["zoo:Gated", "--depth", "3"], r"--depth"),
        (2, ["zoo:Gated", "--bands", "three"], r"--bands.*three"),
        (2, ["zoo:Gated", "--batch-norm", "tile"], r"--batch-norm.*tile"),
        (2, [], r"PACKAGE:NAME"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_or_made_is_said_in_one_line(
    refusal: Any, code: int, arguments: list[str], words: str
) -> None:
    if code == 1 and ":" not in arguments[0]:
        arguments = [f"{HERE}:{arguments[0]}", *arguments[1:]]
    said = refusal(main, code, *arguments)
    assert re.match(rf"tilenet{' check' if code == 2 else ''}: .*{words}", said)
    assert "Traceback" not in said


def test_packages_of_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("own").mkdir()
    Path("own", "nets.py").write_text("from torch.nn import Conv2d\n")
    assert (
        answer(
            capsys,
            "own.nets:Conv2d",
            "--options",
            "in_channels=3",
            "out_channels=2",
            "kernel_size=1",
        )["network"]
        == "Conv2d"
    )


# --- memory


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_memory_of_a_rank_is_that_of_a_plan(capsys: Capture, ranks: int) -> None:
    asked = ["zoo:Residual", "--no-prove", "--image", "203x317", "--ranks", str(ranks)]
    found = answer(capsys, *asked)["memory"]
    assert list(found) == ["overlap", "exchange"]
    layers = adopt(ZOO["residual"](), 3).layers
    mesh = choose_mesh(ranks, 1)
    facts = replace(machine("summit"), devices_per_node=ranks)
    for mode, held in found.items():
        tiles = {"grid": (mesh.rows, mesh.columns)} if mode == "overlap" else {}
        question = Question(
            OwnNetwork("", layers), 0, (203, 317), facts, halo_mode=mode, partitions=1,
            micro_batches=1, checkpointing="never", **tiles,
        )  # fmt: skip
        (plan,) = Search(question).best(1)
        assert held["total"] == plan.device_bytes
        assert held["optimizer"] == 2 * held["gradients"]
        assert answer(capsys, *asked, "--halo-mode", mode)["memory"] == {mode: held}
    if ranks > 1:
        assert found["exchange"]["total"] < found["overlap"]["total"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, mode in zip(lines, found, strict=True):
        assert re.fullmatch(
            rf"memory of a rank +{mode}: [\d.e-]+ GiB \(feature maps [\d.e-]+, weights and "
            r"gradients [\d.e-]+, adamw [\d.e-]+\)",
            line,
        )


@pytest.mark.parametrize(
    ("code", "more", "said"),
    [
        (2, ["--halo-mode", "exchange"], "give --ranks"),
        (2, ["--image", "100"], "give --ranks"),
        (2, ["--ranks", "0"], "at least one rank"),
        (1, ["--ranks", "4", "--image", "8x8"], "tiles"),
        (1, ["--ranks", "1", "--image", "90000"], "elements"),
    ],
)
def test_memory_that_cannot_be_said(capsys: Capture, code: int, more: list[str], said: str) -> None:
    assert main(["zoo:Residual", "--no-prove", *more]) == code
    assert said in capsys.readouterr().err
