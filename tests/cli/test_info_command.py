"""`tilenet info` says what the files are, against what was written to them; or refuses them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from info_answers import SIZE, Info, Write, pixels
from on_the_ground import MODEL, POINTS

from tilenet.__main__ import main
from tilenet.cli import info as info_command
from tilenet.data import inspect as header_module


def test_the_header_is_what_was_written(write_raster: Write, info: Info) -> None:
    path = write_raster("a.tif", pixels(3), nodata=7, compress="lzw")
    with rasterio.open(path, "r+") as file:
        file.descriptions = ("red", None, "B08")
    (found,) = info.asked(path, "--bands", "B08,1")
    assert [(b["number"], b["name"], b["dtype"], b["read"]) for b in found["bands"]] == [
        (1, "red", "uint16", True),
        (2, "", "uint16", False),
        (3, "B08", "uint16", True),
    ]
    assert (found["size"], found["read_size"]) == ([40, 60], [40, 60])
    assert (found["crs"], found["unit"]) == ("EPSG:32630", "metre")
    assert found["pixel"] == pytest.approx([np.hypot(2, 0.1)] * 2, rel=1e-15)
    text, _ = info.shown(path, "--bands", "B08,1", "--resolution", "4")
    assert "40 × 60 px (rows × columns), read as 20 × 30" in text
    assert "1 red, 2 (not read), 3 B08: uint16" in text
    assert "--image 20x30 --bands 2" in text


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"transform": Affine(2, 0, 5, 0, -3, 9)}, "2 × 3 metre (width × height)"),
        ({"transform": Affine(0, 2, 5, 3, 0, 9)}, "3 × 2 metre"),
        ({"transform": Affine(2, 0, 5, 0, -2, 9), "crs": None}, "no CRS, pixels of 2 × 2 unit"),
        ({"transform": Affine.identity(), "crs": None}, "no CRS and no transform: pixels only"),
        ({"transform": Affine(1e-5, 0, 5, 0, -1e-5, 9), "crs": "EPSG:4326"}, "1e-05 degree"),
        ({"transform": Affine(2, 0, 5, 0, -2, 9), "crs": "EPSG:2225"}, "US survey foot"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_the_grid_is_said_in_words(
    write_raster: Write, info: Info, grid: dict[str, Any], said: str
) -> None:
    text, _ = info.shown(write_raster("a.tif", pixels(1), **grid))
    (line,) = [line for line in text.splitlines() if line.startswith("  grid")]
    assert said in line


def masked(write: Write) -> str:
    path = write("masked.tif", pixels(2))
    with rasterio.open(path, "r+") as file:
        file.write_mask(np.arange(2400).reshape(SIZE) % 255 > 9)
    return path


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda w: w("a.tif", pixels(2)), [], "every pixel counts (no nodata tag"),
        (lambda w: w("a.tif", pixels(2), nodata=9), [], "where all bands are 9 (nodata tag)"),
        (lambda w: w("a.tif", pixels(1, "float32"), nodata=np.nan), [], "are nan (nodata tag)"),
        (masked, [], "where the file's mask is 0"),
        (
            lambda w: w("a.tif", pixels(4, "uint8"), photometric="RGB", alpha="YES"),
            [],
            "where the alpha band is 0",
        ),
        (lambda w: w("a.tif", pixels(2), nodata=9), ["--nodata", "none"], "every pixel counts ("),
        (lambda w: w("a.tif", pixels(2), nodata=9), ["--nodata", "collar"], "in the black collar"),
        (lambda w: w("a.tif", pixels(2), nodata=9), ["--nodata", "4.5"], "all bands are 4.5 ("),
    ],
)
def test_what_counts_as_data_is_said(
    write_raster: Write, info: Info, make: Callable[[Write], str], options: list[str], said: str
) -> None:
    path = make(write_raster)
    assert said in info.asked(path, *options)[0]["data"]
    assert said in info.shown(path, *options)[0]


@pytest.mark.parametrize("kind", ["gcps", "rpcs", "none"])
@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_points_and_rpcs_are_said_with_a_way_to_use_them(
    write_raster: Write, info: Info, kind: str
) -> None:
    path = write_raster("a.tif", pixels(1), crs=None, transform=Affine.identity())
    with rasterio.open(path, "r+") as file:
        if kind == "gcps":
            file.gcps = POINTS, "EPSG:4326"
        elif kind == "rpcs":
            file.rpcs = MODEL
    text, _ = info.shown(path)
    said = {"gcps": "9 ground control points", "rpcs": "RPCs", "none": "no CRS and no transform"}
    assert f"  grid     {said[kind]}" in text
    assert ("  note     the image has " in text) == (kind != "none")


def test_nodata_tags_are_said_once_and_each_where_they_differ(
    write_raster: Write, tmp_path: Path, info: Info
) -> None:
    path = write_raster("a.tif", pixels(3, "float32"), nodata=np.nan)
    assert info.asked(path)[0]["data"] == "no data where all bands are nan (nodata tag)"
    vrt = tmp_path / "b.vrt"
    bands = "".join(
        f'<VRTRasterBand dataType="Byte" band="{band}"><NoDataValue>{tag}</NoDataValue>'
        f'<SimpleSource><SourceFilename relativeToVRT="1">c.tif</SourceFilename>'
        f"<SourceBand>{band}</SourceBand></SimpleSource></VRTRasterBand>"
        for band, tag in ((1, 7), (2, 9), (3, 7))
    )
    write_raster("c.tif", pixels(3, "uint8"))
    rows, cols = SIZE
    vrt.write_text(f'<VRTDataset rasterXSize="{cols}" rasterYSize="{rows}">{bands}</VRTDataset>')
    assert info.asked(str(vrt))[0]["data"] == (
        "no data where each band is its own nodata tag (7, 9, 7)"
    )


def test_wide_strips_are_to_be_tiled_where_the_file_is_large(
    write_raster: Write, info: Info, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = np.random.default_rng(1).integers(0, 99, (8, 6000)).astype("uint8")
    strips = write_raster("strips $(of) rows+.tif", wide, blockysize=1)
    tiles = write_raster("tiles.tif", wide, tiled=True, blockxsize=256, blockysize=256)
    (found,) = info.asked(strips)
    assert found["times"] == 6000 / 1024  # whole rows for a window of 1024 columns
    assert found["suits_windows"]
    assert found["block"] == [1, 6000]
    monkeypatch.setattr(header_module, "SMALL_BYTES", wide.size - 1)
    text, _ = info.shown(strips, tiles)
    assert text.count("gdal_translate -co TILED=YES") == 1
    assert f"'{strips}' tiled.tif" in text  # as a shell takes it for one name
    assert "decodes up to 5.9 times its pixels" in text
    assert "strips of 1 × 6,000 px do not suit window reads" in text
    assert "tiles of 256 × 256 px suit window reads" in text
    (found,) = info.asked(tiles)
    assert found["times"] == 5 * 256 / 1024  # a window that begins in the middle of a tile
    monkeypatch.setattr(header_module, "SMALL_BYTES", wide.size)
    assert "gdal_translate" not in info.shown(strips)[0]


def test_each_image_has_its_block_and_each_refusal_its_sentence(
    write_raster: Write, tmp_path: Path, info: Info
) -> None:
    first, last = write_raster("first.tif", pixels(2)), write_raster("last.tif", pixels(1))
    broken = tmp_path / "broken.tif"
    data = Path(write_raster("whole.tif", pixels(1), compress="deflate")).read_bytes()
    broken.write_bytes(data[:-300])
    empty = write_raster("empty.tif", pixels(1), nodata=0)
    with rasterio.open(empty, "r+") as file:
        file.write(np.zeros_like(pixels(1)))
    paths = [first, "/nowhere.tif", str(broken), empty, last]
    text, said = info.shown(*paths, "--pixels", code=1)
    blocks = [block.splitlines()[0] for block in text.strip().split("\n\n")]
    assert blocks == [first, str(broken), empty, last]
    sentences = [line for line in said.splitlines() if line.startswith("tilenet: ")]
    assert len(sentences) == 3
    assert "a raster must be a file that GDAL can open (/nowhere.tif" in sentences[0]
    assert "must be readable everywhere" in sentences[1]
    assert "must hold pixels with data" in sentences[2]
    found = info.asked(*paths, "--pixels", code=1)
    assert [path["path"] for path in found] == paths
    assert ["refused" in one for one in found] == [False, True, True, True, False]
    assert ["pixels" in one for one in found] == [True, False, False, False, True]


def test_wrong_labels_leave_the_image_to_be_seen(write_raster: Write, info: Info) -> None:
    image = write_raster("image.tif", pixels(2))
    wrong = write_raster("wrong.tif", pixels(2, "uint8"))
    text, said = info.shown(image, image, "--labels", wrong, "/nowhere", "--pixels", code=1)
    assert text.count("0 of 2,400 pixels (0.00%) are without data") == 2
    lines = said.strip().splitlines()
    assert "labels must be one band of whole numbers" in lines[0]
    assert "labels must be a raster or a vector file" in lines[1]
    assert len(lines) == 2


def test_names_in_files_cannot_steer_a_terminal(write_raster: Write, info: Info) -> None:
    path = write_raster("image.tif", pixels(1))
    with rasterio.open(path, "r+") as file:
        file.set_band_description(1, "red\n  data     none\x9b2J")
    text, _ = info.shown(path)
    assert r"1 red\n  data     none\x9b2J: uint16" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "required: IMAGE"),
        (["a.tif", "b.tif", "--labels", "c.tif"], "each image needs one label file"),
        (["a.tif", "--classes", "a=1"], "name it with vectors.field (--field)"),
        (["a.tif", "--nodata", "black"], "nodata is a number, nan, none or collar"),
        (["a.tif", "--classes", "a=b", "--field", "x"], "a class is a whole number or ignore"),
        (["a.tif", "--classes", "a=1,b=2,a=ignore", "--field", "x"], "each value once"),
        (["a.tif", "--pix"], "--pix"),
    ],
    ids=str,
)
def test_what_cannot_be_understood_is_one_line(info: Info, options: list[str], said: str) -> None:
    text, errors = info.shown(*options, code=2)
    assert text == ""
    assert said in errors
    assert errors.count("\n") == 1


def test_help_is_shown_before_mpi_starts(monkeypatch: pytest.MonkeyPatch, info: Info) -> None:
    def started() -> None:
        raise AssertionError

    monkeypatch.setattr(info_command, "launched", lambda: True)
    monkeypatch.setattr(info_command, "world", started)
    with pytest.raises(SystemExit) as ended:
        main(["info", "--pixels", "--help"])
    assert ended.value.code == 0
    assert info.capture.readouterr().out.startswith("usage: tilenet info")
