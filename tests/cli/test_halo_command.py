"""`tilenet halo`: what it prints, what it refuses, and what it does not load."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from zoo import ZOO

from tilenet.adoption.adopt import adopt
from tilenet.cli.check import main as check
from tilenet.cli.halo import main
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_the_papers_large_model_in_json(capsys: Capture) -> None:
    found = answer(capsys, "--preset", "large", "--image", "10000", "--grid", "8x8")
    own = [9 * 128, 10 * 128]  # 10 000 px are 78.125 units of 128, so 79 over 8 tiles
    read = 10 * 128 + 2 * 768
    wanted = {
        "epsilon_px": 380,
        "context_formula_px": 764,
        "context_aligned_px": 766,
        "context_any_pixel_px": 891,
        "halo_px": 768,
        "alignment_px": 128,
        "num_layers": 149,
        "num_parameters": 1157578016,
        "norm_context": "image",
        "grid": [8, 8],
        "tile_own_px": own,
        "tile_read_px": read,
        "num_tiles": 64,
        "extended_px": [79 * 128, 79 * 128],
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["work_ratio"] == pytest.approx(64 * read**2 / 10000**2, rel=1e-15)
    assert found["work_ratio_tile"] == pytest.approx((read / own[1]) ** 2, rel=1e-15)


def test_people_are_told_both_widths_and_which_one_is_exact(capsys: Capture) -> None:
    assert main(["--preset", "large", "--image", "10000", "--grid", "8x8"]) == 0
    out = capsys.readouterr().out
    note = next(line for line in out.splitlines() if line.startswith("Two widths"))
    for number in ("380 px", "764 px", "768 px", "(halo: epsilon)", "exact"):
        assert number in note
    assert "Each pixel is computed 5.1 times" in out  # 64 · 2816² / 10⁸
    for name in ("epsilon_px", "num_parameters", "work_ratio_tile", "grid"):
        assert any(line.startswith(name) for line in out.splitlines())


def test_epsilon_gives_the_papers_tiles_and_says_that_they_are_approximate(capsys: Capture) -> None:
    arguments = ["--preset", "small", "--image", "10000", "--grid", "8x8", "--halo", "epsilon"]
    found = answer(capsys, *arguments)
    assert found["tile_own_px"] == [1250, 1250]
    assert found["tile_read_px"] == 1434
    assert found["work_ratio_tile"] == (1434 / 1250) ** 2
    assert main(arguments) == 0
    assert "approximate" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "epsilon"),
    [(["--levels", "5"], 92), (["--poolings", "4"], 92), (["--levels", "5", "--convs", "5"], 230)],
)
def test_levels_are_poolings_and_one_more(
    capsys: Capture, arguments: list[str], epsilon: int
) -> None:
    found = answer(capsys, *arguments)
    assert found["poolings"] == 4
    assert found["epsilon_px"] == found["context_formula_px"] == epsilon
    assert "grid" not in found


def test_every_option_reaches_the_network(capsys: Capture) -> None:
    options = UNetOptions(
        3, 1, base=6, bands=2, classes=7, kernel=5, padding="valid", upsampling="bilinear"
    )
    options = replace(options, norm="group", norm_scope="tile")
    found = answer(
        capsys,
        *("--poolings", "3", "--convs", "1", "--base", "6", "--bands", "2", "--classes", "7"),
        *("--kernel", "5", "--padding", "valid", "--upsampling", "bilinear"),
        *("--norm", "group", "--norm-scope", "tile", "--image", "300x1000", "--tile", "200"),
    )
    layers, context = unet_layers(options), context_of(unet_layers(options))
    assert found["num_layers"] == len(layers)
    assert found["num_parameters"] == sum(layer.num_parameters for layer in layers)
    assert found["context_aligned_px"] == context.context_aligned_px
    assert found["halo_px"] == context.halo_px
    assert found["norm_context"] == "tile"
    assert found["image"] == [300, 1000]
    assert found["grid"] == [2, 5]
    assert found["tile_own_px"] == [152, 200]
    assert found["tile_read_px"][0] < found["tile_read_px"][1]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_may_be_varied(capsys: Capture, preset: str) -> None:
    found = answer(capsys, "--preset", preset, "--norm", "none", "--upsampling", "bilinear")
    options = replace(PRESETS[preset], norm="none", upsampling="bilinear")
    assert found["context_aligned_px"] == context_of(unet_layers(options)).context_aligned_px
    assert found["norm_context"] == "none"


# --- somebody's network


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", ["Residual", "Gated", "Pyramid"])
def test_a_module_has_the_numbers_of_check(capsys: Capture, name: str, step: bool) -> None:
    more = ["--batch-norm", "step"] if step else []
    found = answer(capsys, "--network", f"zoo:{name}", *more)
    assert check([f"zoo:{name}", "--no-prove", "--json", *more]) == 0
    checked = json.loads(capsys.readouterr().out)
    del checked["over"]
    assert found == checked
    assert found["network"] == name
    adopted = adopt(ZOO[name.lower()](), 3, "step" if step else "frozen")
    assert found["looks_at_whole_image"] == adopted.looks_at_all


def test_options_and_bands_reach_the_module(capsys: Capture) -> None:
    network = ["--network", "torch.nn:Conv2d", "--bands", "2", "--options"]
    found = answer(
        capsys, *network, "in_channels=2", "out_channels=5", "kernel_size=7", "padding=3"
    )
    assert (found["bands"], found["classes"], found["halo_px"]) == (2, 5, 3)
    assert found["num_parameters"] == 2 * 5 * 49 + 5


def test_tiles_of_a_module(capsys: Capture) -> None:
    tiles = ["--image", "301x150", "--grid", "3x2"]
    found = answer(capsys, "--network", "zoo:Residual", *tiles)
    layers = adopt(ZOO["residual"](), 3).layers
    tiling = cut(301, 150, Cut(grid=(3, 2)), halo_rule("exact", layers))
    assert found["grid"] == [3, 2]
    assert found["tile_own_px"][1] == max(s.own for s in (*tiling.rows, *tiling.cols))
    assert found["tile_read_px"] == [tiling.rows[0].read, tiling.cols[0].read]
    assert found["work_ratio"] == tiling.work_ratio
    assert "epsilon_px" not in found
    assert main(["--network", "zoo:Gated", *tiles]) == 0
    said = capsys.readouterr().out
    assert "the whole image, which no halo covers" in said
    assert main(["--network", "zoo:Residual", *tiles, "--halo", "0"]) == 0
    assert "approximate" in capsys.readouterr().out


NETWORK = ["--poolings", "2"]
TILED = [*NETWORK, "--image", "100"]


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (1, ["--levels", "1"], "poolings must be at least 1"),
        (1, ["--poolings", "0"], "poolings must be at least 1"),
        (1, ["--poolings", "40"], "at most 10 poolings"),
        (1, [*NETWORK, "--base", "5"], "nearest: 4"),
        (1, [*NETWORK, "--kernel", "4"], "nearest: 5"),
        (1, [*NETWORK, "--convs", "0"], "convolutions must be at least 1"),
        (1, [*TILED, "--tile", "3"], "nearest legal tile: 4"),
        (1, [*TILED, "--grid", "26x1"], "at most 25 tiles"),
        (1, [*NETWORK, "--image", "0x5"], "at least one pixel a side"),
        (1, [*NETWORK, "--halo", "23"], "nearest: 20 or 24"),
        (1, [*NETWORK, "--halo", "wide"], "halo is exact, epsilon or a number"),
        (1, [*NETWORK, "--padding", "valid", "--halo", "20"], "use halo: exact"),
        (1, ["--network", "zoo:Residual", "--halo", "epsilon"], "the network is a module"),
        (1, ["--network", "zoo:Residual", *TILED[2:], "--tile", "1"], "nearest legal tile: 8"),
        (1, ["--network", "zoo:Missing"], "zoo:Missing: AttributeError"),
        (2, ["--network", "zoo.Residual"], "package:function or package:Class"),
        (2, ["--network", "zoo:Residual", "--options", "wide"], "name=value"),
        (2, ["--network", "zoo:Residual", *NETWORK], "--poolings describes a U-Net"),
        (2, ["--network", "zoo:Residual", "--norm-scope", "tile"], "--norm-scope describes"),
        (2, ["--network", "zoo:Residual", "--no-bias"], "--bias describes a U-Net"),
        (2, [*NETWORK, "--options", "a=1"], "--options goes with --network"),
        (2, [*NETWORK, "--batch-norm", "step"], "--batch-norm goes with --network"),
        (2, [*NETWORK, "--weights", "w.pth"], "--weights goes with --network"),
        (2, [], "or by --network"),
        (2, ["--levels", "5", "--poolings", "4"], ""),
        (2, ["--preset", "small", "--levels", "5"], ""),
        (2, ["--preset", "small", "--convs", "3"], ""),
        (2, [*NETWORK, "--grid", "8x8"], ""),
        (2, [*NETWORK, "--tile", "64"], ""),
        (2, [*TILED, "--grid", "2x2", "--tile", "64"], ""),
        (2, [*NETWORK, "--preset", "tiny"], "--preset"),
        (2, ["--poolings", "four"], "--poolings"),
        (2, [*NETWORK, "--image", "100x100x3"], "--image"),
        (2, [*NETWORK, "--image", "-100"], "--image"),
        (2, [*NETWORK, "--unknown"], "--unknown"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line_with_its_exit_code(
    refusal: Any, code: int, arguments: list[str], said: str
) -> None:
    words = refusal(main, code, *arguments)
    assert words.startswith("tilenet: " if code == 1 else "tilenet halo: ")
    assert said in words


SCRIPT = """
import sys
from tilenet.__main__ import main
code = main(["halo", "--preset", "large", "--image", "10000", "--grid", "8x8"])
print(code, sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_neither_torch_nor_mpi_nor_rasters_are_loaded() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stderr.startswith("0 [")
    assert "'tilenet'" in run.stderr
    for name in ("torch", "mpi4py", "rasterio", "numpy", "jsonargparse"):
        assert f"'{name}'" not in run.stderr
    assert "768" in run.stdout
