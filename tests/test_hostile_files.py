"""What fuzzing found, one case each: pipes, devices, nests, bombs and numbers without end."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from rasterio import Affine

from tilenet.errors import TilenetError, UsageError, one_line
from tilenet.files.history import History
from tilenet.files.image_list import read_image_list
from tilenet.files.image_patterns import matched
from tilenet.files.label_files import open_labels
from tilenet.files.network_record import NetworkRecord
from tilenet.files.raster import Raster
from tilenet.files.stack import stacked_paths
from tilenet.files.vector_keys import VectorKeys
from tilenet.files.weights import load_json, load_tensors
from tilenet.geometry.networks import UNetOptions, unet_layers
from tilenet.geometry.tiles import Window
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.model.optimizer_state import check_state
from tilenet.planning.layer_bytes import check_weight_bytes
from tilenet.planning.plan import read_plan
from tilenet.run.arguments import read_run_file

LEAST = "images: a.tif\nlabels: b.tif\nclasses: 2\noutput: out\nsteps: 1\n"
LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))
RECORD = NetworkRecord(LAYERS, (1,), ("a", "b"), 255, (0.5,), (2.0,), None, None, "float32", 5)


def read(tmp_path: Path, text: str, *options: str) -> Any:
    (tmp_path / "run.yaml").write_text(text)
    return read_run_file(["-c", str(tmp_path / "run.yaml"), *options])


# --- words


def test_a_sentence_is_one_line_of_bounded_length() -> None:
    error = TilenetError("rule (\x1b[31m\nred\0\u202e): " + "x" * 10**6 + "; remedy")
    assert str(error).startswith(r"rule (\x1b[31m\nred\x00\u202e): xxx")
    assert str(error).endswith("x; remedy")
    assert len(str(error)) < 1600
    assert one_line("ä × – …") == "ä × – …"
    assert one_line(one_line("\x1b" * 9000)) == one_line("\x1b" * 9000)
    assert str(UsageError("a\rb")) == r"a\rb"


# --- pipes and devices


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "use",
    [
        load_json,
        load_tensors,
        read_plan,
        lambda path: read_image_list(str(path)),
        lambda path: Raster(str(path)),
        lambda path: open_labels(str(path), None, 255),  # type: ignore[arg-type]
        lambda path: History(path, 1),
        lambda path: read_run_file(["-c", str(path)]),
        lambda path: read_run_file([f"--config={path}"]),
    ],
)
@pytest.mark.usefixtures("in_time")
def test_pipes_and_devices_are_not_read(tmp_path: Path, kind: str, use: Any) -> None:
    path = tmp_path / "file.csv"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((TilenetError, UsageError), match="is a pipe, device or socket"):
        use(path)


@pytest.mark.usefixtures("in_time")
def test_a_virtual_raster_of_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.vrt").write_text(
        '<VRTDataset rasterXSize="9" rasterYSize="9"><VRTRasterBand dataType="Byte" band="1">'
        '<SimpleSource><SourceFilename relativeToVRT="1">pipe</SourceFilename></SimpleSource>'
        "</VRTRasterBand></VRTDataset>"
    )
    with pytest.raises(TilenetError, match=r"a\.vrt.*is a pipe"):
        Raster(str(tmp_path / "a.vrt"))


@pytest.fixture
def in_time() -> Any:
    """Whoever waits for a pipe fails."""
    import signal

    def late(signum: int, frame: Any) -> None:
        raise AssertionError("waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- run files

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        "init: " + "[" * 100_000,
        "network: " + "{a: " * 5000 + "1" + "}" * 5000,
        BOMB,
        f"bands: [{'1,' * 20_000}1]",
    ],
    ids=["nest", "groups", "laughs", "values"],
)
@pytest.mark.usefixtures("in_time")
def test_run_files_that_unfold_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="at most 20000 values, 16 levels deep"):
        read(tmp_path, LEAST + text)
    if text.startswith("network"):
        with pytest.raises(UsageError, match="at most 20000 values, 16 levels deep"):
            read(tmp_path, LEAST, f"--network={{{text}}}")


def test_aliases_may_be_used(tmp_path: Path) -> None:
    text = "images: &a [a.tif, b.tif]\nlabels: *a\nclasses: 2\noutput: out\nsteps: 1\n"
    run, _ = read(tmp_path, text)
    assert run.image_paths == run.label_paths == ("a.tif", "b.tif")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("config: /etc/passwd", ()),
        ("network: /etc/passwd", ()),
        ("", ("--network", "/etc/passwd")),
        ("", ("--network=/etc/passwd",)),
    ],
)
def test_run_files_read_no_other_files(tmp_path: Path, text: str, options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"names no other ones|is a group of keys") as raised:
        read(tmp_path, LEAST + text, *options)
    assert "root:" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "saying"),
    [
        ("seed", "0x" + "f" * 20_000, "bits"),
        ("seed", "9" * 4000, "bits"),
        ("seed", "null", "has a value .seed: null"),
        ("optimizer", "{lr: null}", "has a value .optimizer.lr: null"),
        ("steps", "-0x" + "f" * 20_000, "bits"),
        ("vectors", "{field: a, classes: {? 0x" + "f" * 20_000 + " : 1}}", "bits"),
        ("classes", "1000000000", "at most 4096 classes"),
        ("batch_size", "1000000000000", "at most 1048576 images or crops"),
        ("profile", f"{{steps: '{'9' * 5000}'}}", "profile.steps are a first"),
    ],
)
def test_numbers_without_end_are_refused(tmp_path: Path, key: str, value: str, saying: str) -> None:
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    with pytest.raises(TilenetError, match=saying):
        read(tmp_path, "\n".join([*lines, f"{key}: {value}"]))


@pytest.mark.usefixtures("in_time")
def test_networks_without_end_are_refused() -> None:
    with pytest.raises(TilenetError, match="at most 100 convolutions"):
        UNetOptions(convolutions=10**9)
    many = unet_layers(UNetOptions(poolings=1, base=4, norm="group", groups=10**15))
    assert many == unet_layers(UNetOptions(poolings=1, base=4, norm="group", groups=64))
    with pytest.raises(TilenetError, match="weights alone"):
        check_weight_bytes(unet_layers(UNetOptions(poolings=1, base=10**6)))


# --- checkpoints


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bands": [float("inf")]}, "every key with its type"),
        ({"ignore_index": 10**400}, "numbers below 2³¹"),
        ({"statistics": {"mean": [float("nan")], "std": [1]}}, "finite statistics"),
        ({"statistics": {"mean": [10**400], "std": [1]}}, "every key with its type"),
        ({"resolution": "fine"}, "every key with its type"),
        ({"nodata": [1]}, "every key with its type"),
        ({"precision": "float17"}, "is no precision"),
        ({"layers": []}, "1 to 10000 layers"),
        ({"layers": RECORD.to_json()["layers"][2:3] * 10**5}, r"1 to 10000 layers .*: 100000\)"),
        ({"layers": RECORD.to_json()["layers"][:-1]}, "one channel per class"),
        ({"classes": ["a", "b", "c"]}, "one channel per class"),
        ({"bands": [1, 2], "statistics": {"mean": [0, 0], "std": [1, 1]}}, "layer 0.*in_channels"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_network_that_is_none_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        NetworkRecord.from_json(RECORD.to_json() | change)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("out_channels", "kernel", "stride") for value in (0, -1, "x", 10**9)]
    + [("padding", -1), ("padding", 0.5), ("bias", 1), ("dilation", float("nan")), ("kernel", [])],
)
def test_a_layer_of_wrong_values_is_refused(key: str, value: Any) -> None:
    entry = RECORD.to_json()
    entry["layers"][0][key] = value
    with pytest.raises(TilenetError, match=r"layer 0 of network\.json|every key with its type"):
        NetworkRecord.from_json(json.loads(json.dumps(entry)))


def test_a_larger_network_than_its_weights_is_refused_before_it_is_built() -> None:
    weights = build_network(LAYERS).state_dict()
    check_weight_count(LAYERS, weights, "w")
    wide = unet_layers(UNetOptions(poolings=1, base=2**20, bands=1, classes=2))
    with pytest.raises(TilenetError, match=r"weights must fit .*network\.json: \d\d,\d{3},\d{3},"):
        check_weight_count(wide, weights, "w")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1j])
def test_weights_that_are_no_numbers_are_refused(wrong: Any) -> None:
    network = build_network(LAYERS)
    weights = dict(network.state_dict())
    weights["0.weight"] = weights["0.weight"] * torch.tensor(wrong)
    with pytest.raises(TilenetError, match=r"finite real numbers \(w: 0\.weight and 0 more"):
        load_weights(network, weights, "w")


@pytest.mark.parametrize("shape", [[2**60], [0, 2**63], [2**32, 2**32], [-1]])
def test_shapes_without_end_are_refused(tmp_path: Path, shape: list[int]) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(TilenetError, match="files must be whole"):
        load_tensors(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"exp_avg": torch.ones(3)},
        {"exp_avg": torch.full((2, 1, 3, 3), torch.nan)},
        {"step": torch.ones(2)},
        {"momentum_buffer": torch.ones(2, 1, 3, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_optimizers_state_must_fit(change: dict[str, torch.Tensor]) -> None:
    network = build_network(LAYERS)
    optimizer = torch.optim.AdamW(network.parameters())
    good = {"step": torch.tensor(3.0)}
    good |= {name: torch.ones(2, 1, 3, 3) for name in ("exp_avg", "exp_avg_sq")}
    check_state("0.weight", network[0].weight, good, optimizer, "s")  # type: ignore[arg-type]
    with pytest.raises(TilenetError, match=rf"\(s: {next(iter(change))} of 0\.weight"):
        check_state("0.weight", network[0].weight, good | change, optimizer, "s")  # type: ignore[arg-type]


# --- tables, lists, patterns


@pytest.mark.parametrize(
    "text",
    [b"step,loss\n1,x\n", b"step,loss\n1,\xff\n", b'step,loss\n1,"' + b"9" * 200_000 + b'"\n'],
    ids=["word", "bytes", "long"],
)
def test_a_table_of_other_things_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "history.csv").write_bytes(text)
    with pytest.raises(TilenetError, match="a table of a run must hold numbers"):
        History(tmp_path / "history.csv", 3)


@pytest.mark.parametrize("step", ["²", "1" * 9999, "0", "-1", "x", "1.0", ""])
def test_a_row_of_no_step_is_refused(tmp_path: Path, step: str) -> None:
    path = tmp_path / "history.csv"
    path.write_text(f"\0tep,loss\n{step},2\n1,3\n")
    with pytest.raises(TilenetError, match=r"history\.csv, line 2: .* is no step\)"):
        History(path, 3)


@pytest.mark.usefixtures("in_time")
def test_lists_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("image,label\n" + "," * (2 << 20))
    with pytest.raises(TilenetError, match="a line has 1048576 letters or more"):
        read_image_list(str(path))
    assert len(stacked_paths("+" * 4000)) == 4001


def test_lists_within_a_list_are_texts(tmp_path: Path) -> None:
    feature = {"type": "Feature", "geometry": None, "properties": {"image": [1, 2], "label": "b"}}
    path = tmp_path / "list.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    assert len(read_image_list(str(path)).train) == 1


@pytest.mark.usefixtures("in_time")
def test_patterns_without_end_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(".")
    (tmp_path / ("x" * 200 + ".tif")).write_text("")
    with pytest.raises(TilenetError, match=r"searches at most 20,000 folders"):
        matched(f"{tmp_path}/**/*.tif", f"{tmp_path}/**/*.tif")
    with pytest.raises(TilenetError, match=r"at most 8 wildcards.*: 30\)"):
        matched(f"{tmp_path}/{'*x' * 30}.tif", f"{tmp_path}/{'*x' * 30}.tif")


# --- rasters and polygons


def sparse(path: Path, side: int, **profile: Any) -> str:
    """A raster of zeros that takes no room on the disk."""
    grid = {"crs": "EPSG:32630", "transform": Affine(1, 0, 5e5, 0, -1, 4e6), "SPARSE_OK": True}
    size = {"height": side, "width": side, "count": 1, "dtype": "uint8", "compress": "deflate"}
    with rasterio.open(path, "w", driver="GTiff", **(grid | size | profile)):
        return str(path)


def test_blocks_larger_than_memory_are_refused(tmp_path: Path) -> None:
    block = {"tiled": True, "blockxsize": 33_024, "blockysize": 33_024}
    path = sparse(tmp_path / "a.tif", 33_000, **block)
    with pytest.raises(TilenetError, match=r"blocks of 33024 × 33024 px, 1040 MiB\).*TILED=YES"):
        Raster(path)
    small = sparse(tmp_path / "b.tif", 100_000, tiled=True)
    with Raster(small) as image:
        assert image.read(Window(99_000, 99_000, 9, 9)).values.shape == (1, 9, 9)


def test_many_bands_are_looked_at_once(tmp_path: Path) -> None:
    band = '<VRTRasterBand dataType="Byte" band="{}"/>'
    for count in (4096, 4097):
        text = "".join(band.format(number + 1) for number in range(count))
        path = tmp_path / f"{count}.vrt"
        path.write_text(f'<VRTDataset rasterXSize="9" rasterYSize="9">{text}</VRTDataset>')
    Raster(str(tmp_path / "4096.vrt")).close()
    with pytest.raises(TilenetError, match="at most 4096 bands"):
        Raster(str(tmp_path / "4097.vrt"))


@pytest.mark.parametrize("a", [float("nan"), float("inf")])
def test_a_transform_without_numbers_is_refused(write_raster: Callable[..., str], a: float) -> None:
    pixels = np.arange(64, dtype="uint8").reshape(8, 8)
    with pytest.raises(TilenetError, match="transform must give pixels a place"):
        Raster(write_raster("a.tif", pixels, transform=Affine(a, 0, 5e5, 0, -1, 4e6)))


def test_a_pixel_larger_than_all_rasters_is_refused(write_raster: Callable[..., str]) -> None:
    path = write_raster("a.tif", np.arange(64, dtype="uint8").reshape(8, 8))
    with pytest.raises(TilenetError, match=r"resolution must be a whole multiple"):
        Raster(path, resolution=2e300)


@pytest.mark.parametrize("value", ["1" * 5000, "9" * 19])
def test_class_numbers_without_end_are_refused(value: str) -> None:
    with pytest.raises(TilenetError, match="must be whole numbers"):
        VectorKeys(field="class").classes_of([value], 255, "a.gpkg")
    assert VectorKeys(field="class").classes_of(["9" * 18], 255, "a.gpkg") == [10**18 - 1]


# --- whole commands


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "-c", "nest.yaml"], 2),
        (["train", "-c", "pipe"], 2),
        (["predict", "checkpoint", "image.tif", "map.tif"], 1),
        (["evaluate", "pipe", "image.tif"], 1),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, list) else None,
)
def test_a_command_says_one_line(
    tmp_path: Path, write_raster: Callable[..., str], arguments: list[str], code: int
) -> None:
    (tmp_path / "nest.yaml").write_text(LEAST + "init: " + "[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    write_raster("image.tif", np.arange(4096, dtype="uint8").reshape(64, 64))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    entry = RECORD.to_json()
    wide = unet_layers(UNetOptions(poolings=1, base=2**18, bands=1, classes=2))
    entry["layers"] = [{"kind": one.kind, **vars(one)} for one in wide]
    (tmp_path / "checkpoint" / "network.json").write_text(json.dumps(entry))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    command = [sys.executable, "-m", "tilenet", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("tilenet")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
