"""Letters that XML cannot hold, that are no UTF-8, or that a terminal would obey."""

import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from launch.__main__ import main as launch
from tilenet.__main__ import main
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError, one_line
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.mapping.writing.target import check_target, put_map
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.read import read_run_file
from tilenet.training.folder.run_folder import RunFolder

Write = Callable[..., str]

LEAST = "images: a.tif\nlabels: b.tif\noutput: out\nsteps: 1\n"
RED = "\x1b[31mred"
NO_UTF8 = os.fsdecode(b"a\xff")
LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))


def test_a_sentence_is_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    error = TilenetError("rule (\x1b[31m\nred\0\u202e): " + "x" * 10**6 + "; remedy")
    assert str(error).startswith(r"rule (\x1b[31m\nred\x00\u202e): xxx")
    assert str(error).endswith("x; remedy")
    assert len(str(error)) < 1600
    assert one_line("ä × – …") == "ä × – …"
    for program, words in (
        (main, [RED]),
        (main, ["train", "--steps", RED]),
        (launch, [f"--{RED}"]),
    ):
        assert program(words) == 2
        assert capsys.readouterr().err.splitlines()[-1].isprintable()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((f"b{letter}c", "must not contain control") for letter in "\x01\t\n\x85\uffff"),
        (NO_UTF8, "must be UTF-8"),
    ],
)
def test_class_names_that_maps_cannot_hold_are_refused(
    tmp_path: Path, name: str, rule: str
) -> None:
    record = NetworkRecord(LAYERS, (1,), ("a", name), 255, (0.5,), (2.0,), None, None, "float32", 5)
    with pytest.raises(TilenetError, match=rf"name {rule}.*\(classes in network.json: '"):
        NetworkRecord.from_json(record.to_json())
    if rule == "must be UTF-8":
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
    with pytest.raises(TilenetError, match=f"the name of a map {rule}"):
        check_target(odd, overwrite=True)
    with pytest.raises(TilenetError, match="the name of output is UTF-8"):
        RunFolder(Path(odd), write=True).prepare(resume=False, overwrite=False)
