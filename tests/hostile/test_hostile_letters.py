"""Letters that a terminal would obey, that XML cannot hold, or that are no UTF-8."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import rasterio
from mpi4py import MPI

from launch.__main__ import main as launch
from tilenet.__main__ import main
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.mapping.writer import put_map
from tilenet.parallel.health.progress import progress_bar
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.read import read_run_file

Write = Callable[..., str]

LEAST = "images: a.tif\nlabels: b.tif\noutput: out\nsteps: 1\n"
RED, SHOWN = "\x1b[31mred", r"\x1b[31mred"
NO_UTF8 = os.fsdecode(b"a\xff")
LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))


def test_a_bar_shows_no_commands_to_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(MPI.COMM_SELF, 3, "tile", what=RED) as bar:
        bar.update(3)
    shown = capsys.readouterr().err
    assert SHOWN in shown
    assert "\x1b[31m" not in shown


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (main, [RED]),
        (main, ["info", f"--{RED}", "a.tif"]),
        (main, ["halo", "--image", RED]),
        (main, ["train", f"--{RED}=1"]),
        (main, ["train", "--steps", RED]),
        (launch, ["plan.json", f"--{RED}"]),
        (launch, ["plan.json", "--nodes", RED]),
        (launch, ["plan.json", "--time"]),
    ],
)
def test_words_that_are_not_understood_are_shown_without_commands(
    program: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(("tilenet", "launch: "))
    assert said.isprintable()


def test_pictures_and_warnings_are_named_without_commands(
    tmp_path: Path, write_raster: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    image = write_raster("a.tif", np.arange(4096, dtype="uint8").reshape(64, 64))
    assert main(["preview", image, str(tmp_path / f"{RED}.png")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/{SHOWN}.png: ")
    assert (tmp_path / f"{RED}.png").exists()
    assert warnings.formatwarning(RED, UserWarning, "a.py", 7) == f"a.py:7: UserWarning: {SHOWN}\n"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((f"b{letter}c", "without control") for letter in "\x01\x1b\t\n\r\x7f\x85\ufffe\uffff"),
        (NO_UTF8, "in UTF-8"),
    ],
)
def test_class_names_that_maps_cannot_hold_are_refused(
    tmp_path: Path, name: str, rule: str
) -> None:
    record = NetworkRecord(LAYERS, (1,), ("a", name), 255, (0.5,), (2.0,), None, None, "float32", 5)
    with pytest.raises(TilenetError, match=rf"name {rule}.*\(classes in network.json: '"):
        NetworkRecord.from_json(record.to_json())
    if rule == "in UTF-8":
        with pytest.raises(UsageError, match=r"words of the command line are UTF-8.*terminal"):
            read_run_file(["--classes", f"[a, {name}]"])
        return
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    (tmp_path / "run.yaml").write_text(f'{LEAST}classes: [a, "{escaped}"]\n')
    with pytest.raises(TilenetError, match=rf"name {rule}.*\(classes: '.*, character 2\)"):
        read_run_file(["-c", str(tmp_path / "run.yaml")])


def test_all_other_names_stand_beside_a_map_as_they_are(
    tmp_path: Path, write_raster: Write
) -> None:
    names = ("a & <b>", '"', "naïve 🌳", "می\u200cخواهم", "non\xa0breaking", "\u2028", "\ue000")
    (tmp_path / "run.yaml").write_text(f"{LEAST}classes: {list(names)!a}\n".replace("\\\\", "\\"))
    aside = write_raster("aside.tif", np.arange(4096, dtype="uint8").reshape(64, 64))
    put_map(aside, str(tmp_path / "map.tif"), names)
    tree = ElementTree.parse(tmp_path / "map.tif.aux.xml")
    assert tuple(one.text for one in tree.iter("Category")) == names
    record = NetworkRecord(LAYERS, (1,), names[:2], 255, (0.5,), (2.0,), None, None, "float32", 5)
    assert NetworkRecord.from_json(record.to_json()).classes == names[:2]


def test_names_of_files_that_are_no_utf8_are_to_be_changed(
    tmp_path: Path, write_raster: Write
) -> None:
    plain = write_raster("a.tif", np.arange(4096, dtype="uint8").reshape(64, 64))
    odd = str(tmp_path / f"{NO_UTF8}.tif")
    os.rename(plain, odd)
    rule = r"is UTF-8 without NUL bytes \('.*udcff.tif'\); give it another one"
    with pytest.raises(TilenetError, match=f"the name of a raster {rule}"):
        Raster(odd)
    with (
        Raster(write_raster("b.tif", np.ones((64, 64), "uint8"))) as image,
        pytest.raises(TilenetError, match=f"the name of labels {rule}"),
    ):
        open_labels(odd, image, 255)
    with pytest.raises(UsageError, match=r"\(--images: '.*udcff.tif'\); rename the file"):
        read_run_file(["--images", odd])


def test_a_map_s_bar_and_tags_hold_no_commands(tmp_path: Path, write_raster: Write) -> None:
    """The whole way: an image with an odd name through training, a map and its side file."""
    random = np.random.default_rng(3)
    image = write_raster(f"{RED}.tif", random.integers(1, 200, (48, 61)).astype(np.uint8))
    labels = write_raster("labels.tif", random.integers(0, 2, (48, 61)).astype(np.uint8))
    network = ["--network.poolings=1", "--network.base=2", "--steps=1", "--device=cpu"]
    keys = [f"--images={image}", f"--labels={labels}", '--classes=["<a>", b]', "--output=run"]
    commands = (["train", *keys, *network], ["predict", "run", image, f"{RED}map.tif"])
    for command in (*commands, ["evaluate", f"{RED}map.tif", labels]):
        done = subprocess.run(
            [sys.executable, "-m", "tilenet", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "\x1b[31m" not in done.stderr + done.stdout
    with rasterio.open(tmp_path / f"{RED}map.tif") as file:
        assert file.tags(1)["class_0"] == "<a>"
    assert ElementTree.parse(tmp_path / f"{RED}map.tif.aux.xml").getroot().tag == "PAMDataset"
