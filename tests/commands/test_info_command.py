"""`tilenet info` says what the files are, against what was written to them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from affine import Affine

from tilenet.__main__ import main
from tilenet.commands import info as info_command
from tilenet.commands.info_text import _bytes
from tilenet.files import header as header_module
from tilenet.planning.class_weights import balanced_weights

Write = Callable[..., str]
SIZE = 40, 60
GRID = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def pixels(bands: int, dtype: str = "uint16", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 250, (bands, *SIZE)).astype(dtype)


def not_json(name: str) -> None:
    raise AssertionError(name)


def asked(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[Any]:
    capfd.readouterr()
    assert main(["info", *arguments, "--json"]) == code
    images: list[Any] = json.loads(capfd.readouterr().out, parse_constant=not_json)["images"]
    return images


def shown(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    assert main(["info", *arguments]) == code
    return capfd.readouterr()


# --- headers


def test_the_header_is_what_was_written(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_raster("a.tif", pixels(3), nodata=7, compress="lzw")
    with rasterio.open(path, "r+") as file:
        file.descriptions = ("red", None, "B08")
    (found,) = asked(capfd, path, "--bands", "B08,1")
    assert [(b["number"], b["name"], b["dtype"], b["read"]) for b in found["bands"]] == [
        (1, "red", "uint16", True),
        (2, "", "uint16", False),
        (3, "B08", "uint16", True),
    ]
    assert (found["size"], found["read_size"]) == ([40, 60], [40, 60])
    assert (found["crs"], found["unit"], found["driver"]) == ("EPSG:32630", "metre", "GTiff")
    assert found["num_bytes"] == Path(path).stat().st_size
    assert found["pixel"] == pytest.approx([np.hypot(2, 0.1)] * 2, rel=1e-15)
    assert found["rotation"] == pytest.approx(np.degrees(np.arctan(0.05)), rel=1e-14)
    assert found["corner"] == pytest.approx(90, abs=1e-12)
    text, _ = shown(capfd, path, "--bands", "B08,1", "--resolution", "4")
    assert "40 × 60 px (rows × columns), read as 20 × 30" in text
    assert "1 red, 2 (not read), 3 B08: uint16" in text
    assert "rotated by 2.862°" in text
    assert "LZW" in text
    assert "--image 20x30 --bands 2" in text


@pytest.mark.parametrize(
    ("grid", "said", "unsaid"),
    [
        ({"transform": Affine(2, 0, 5, 0, -2, 9)}, "2 × 2 metre (width × height)", "rotated"),
        ({"transform": Affine(2, 0, 5, 0, -3, 9)}, "2 × 3 metre (width × height), not square", "x"),
        ({"transform": Affine(0, 2, 5, 2, 0, 9)}, "rotated by 90°", "mirrored"),
        ({"transform": Affine(0, -2, 5, -2, 0, 9)}, "rotated by -90°", "mirrored"),
        ({"transform": Affine(0, 2, 5, -2, 0, 9)}, "by -90°, mirrored", "sheared"),
        ({"transform": Affine(-2, 0, 5, 0, 2, 9)}, "rotated by 180°", "mirrored"),
        ({"transform": Affine(2, 0, 5, 0, 2, 9)}, "height), mirrored", "rotated"),
        ({"transform": Affine(2, 1, 5, 0, -2, 9)}, "meet at 63.43°", "rotated"),
        (
            {"transform": Affine(2, 0, 5, 0, -2, 9), "crs": None},
            "no CRS, pixels of 2 × 2 unit",
            "x",
        ),
        (
            {"transform": Affine(1, 0, 0, 0, 1, 0), "crs": None},
            "no CRS and no transform",
            "pixels of",
        ),
        ({"transform": Affine(1e-5, 0, 5, 0, -1e-5, 9), "crs": "EPSG:4326"}, "1e-05 degree", "x"),
        ({"transform": Affine(2, 0, 5, 0, -2, 9), "crs": "EPSG:2225"}, "US survey foot", "x"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_the_grid_is_said_in_words(
    write_raster: Write,
    capfd: pytest.CaptureFixture[str],
    grid: dict[str, Any],
    said: str,
    unsaid: str,
) -> None:
    text, _ = shown(capfd, write_raster("a.tif", pixels(1), **grid))
    (line,) = [line for line in text.splitlines() if line.startswith("  grid")]
    assert said in line
    assert not unsaid or f" {unsaid}" not in line


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
    write_raster: Write,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[Write], str],
    options: list[str],
    said: str,
) -> None:
    path = make(write_raster)
    assert said in asked(capfd, path, *options)[0]["data"]
    assert said in shown(capfd, path, *options)[0]


def test_wide_strips_are_to_be_tiled_where_the_file_is_large(
    write_raster: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = np.random.default_rng(1).integers(0, 99, (8, 6000)).astype("uint8")
    strips = write_raster("strips $(of) rows+.tif", wide, blockysize=1)
    tiles = write_raster("tiles.tif", wide, tiled=True, blockxsize=256, blockysize=256)
    (found,) = asked(capfd, strips)
    assert found["times"] == 6000 / 1024  # whole rows for a window of 1024 columns
    assert found["suits_windows"]
    assert found["block"] == [1, 6000]
    monkeypatch.setattr(header_module, "SMALL_BYTES", wide.size - 1)
    text, _ = shown(capfd, strips, tiles)
    assert text.count("gdal_translate -co TILED=YES") == 1
    assert f"'{strips}' tiled.tif" in text  # as a shell takes it for one name
    assert "decodes up to 5.9 times its pixels" in text
    assert "strips of 1 × 6,000 px do not suit window reads" in text
    assert "tiles of 256 × 256 px suit window reads" in text
    (found,) = asked(capfd, tiles)
    assert found["times"] == 5 * 256 / 1024  # a window that begins in the middle of a tile
    monkeypatch.setattr(header_module, "SMALL_BYTES", wide.size)
    assert "gdal_translate" not in shown(capfd, strips)[0]


# --- labels


def test_how_label_rasters_lie_to_their_image(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = pixels(1, "uint8")[0] % 3
    image = write_raster("image.tif", pixels(2))
    same = write_raster("same.tif", labels)
    bare = write_raster("bare.tif", labels, crs=None)
    finer = write_raster("finer.tif", np.kron(labels, np.ones((2, 2), "uint8")), **half())
    moved = write_raster("moved.tif", labels, transform=GRID @ Affine.translation(30, 10))
    found = asked(capfd, *[image] * 4, "--labels", same, bare, finer, moved)
    grids = [one["labels"]["grid"] for one in found]
    assert grids[0] == "the image's own grid"
    assert grids[1].startswith("taken to lie on the image's grid")
    assert grids[2] == (
        "the image's own grid; 2 × 2 label pixels per pixel, the most frequent class"
    )
    assert grids[3].startswith("another grid than the image's: resampled")
    shares = [one["labels"]["share"] for one in found]
    assert shares[0] == shares[2] == pytest.approx(1, rel=1e-12)
    assert shares[1] is None
    # half of the columns and three quarters of the rows, of bounds that the rotation widens
    assert shares[3] == pytest.approx(0.5 * 0.75, abs=0.06)
    assert all(one["labels"]["kind"].endswith("uint8") for one in found)


def half() -> dict[str, Any]:
    return {"transform": GRID @ Affine.scale(0.5)}


def test_how_polygons_lie_to_their_image(
    write_raster: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = write_raster("image.tif", pixels(2), transform=Affine(2, 0, 5e5, 0, -2, 4e6))
    path = tmp_path / "a.gpkg"
    shapes = [
        shapely.box(5e5, 4e6 - 80, 5e5 + 30, 4e6),
        shapely.box(5e5 + 20, 4e6 - 20, 5e5 + 60, 4e6),
    ]
    kinds = np.array(["road", "house"], object)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'crs' was not provided")
        pyogrio.raw.write(
            path,
            shapely.to_wkb(np.array(shapes)),
            [kinds],
            ["kind"],
            geometry_type="Polygon",
            layer="b",
        )
    options = ["--label-crs", "EPSG:32630", "--field", "kind", "--classes", "road=1,house=4"]
    (found,) = asked(capfd, image, "--labels", str(path), *options, "--pixels")
    labels = found["labels"]
    assert labels["kind"] == "2 polygons of layer b (kind)"
    assert labels["grid"] == "burned on the image's grid as classes from field kind"
    assert (labels["crs"], labels["share"]) == ("EPSG:32630", 0.5)
    assert labels["bounds"] == [5e5, 4e6 - 80, 5e5 + 60, 4e6]
    assert labels["class_pixels"] == [2400 - 600 - 150, 15 * 40 - 50, 0, 0, 20 * 10]
    (found,) = asked(capfd, image, "--labels", str(path), "--label-crs", "image")
    assert found["labels"]["grid"] == "burned on the image's grid as class 1"
    (found,) = asked(capfd, image, "--labels", str(path), code=1)
    assert "need a CRS" in found["refused"]
    assert found["size"] == [40, 60]


# --- pixels


def test_statistics_and_classes_are_those_of_all_pixels_with_data(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    values, labels = pixels(3, "float32") / 7, pixels(1, "uint8", 2)[0] % 5
    values[1] = 12.5
    values[:, 3:20, 10:40] = -1
    values[0, 30, 5:9] = np.nan
    labels[labels == 1] = 77
    image = write_raster("image.tif", values.astype("float32"), nodata=-1)
    path = write_raster("labels.tif", labels)
    options = ["--labels", path, "--ignore-index", "77", "--pixels"]
    (found,) = asked(capfd, image, *options)
    valid = (values != -1).any(axis=0) & np.isfinite(values).all(axis=0)
    inside = values.astype("float32")[:, valid].astype(np.float64)
    seen = found["pixels"]
    assert (seen["num_pixels"], seen["num_valid"]) == (2400, valid.sum())
    assert seen["share_without_data"] == 1 - valid.sum() / 2400
    for place, band in enumerate(seen["bands"]):
        ours = inside[place]
        assert band["band"] == place + 1
        assert (band["minimum"], band["maximum"]) == (ours.min(), ours.max())
        assert band["mean"] == pytest.approx(ours.mean(), rel=1e-14)
        assert band["std"] == pytest.approx(ours.std(), rel=1e-13)
        wanted = [np.percentile(ours, q, method="inverted_cdf") for q in (2, 25, 50, 75, 98)]
        assert list(band["percentiles"].values()) == wanted
    counts = np.bincount(labels[valid & (labels != 77)])
    assert counts[1] == 0
    assert found["labels"]["class_pixels"] == counts.tolist()
    assert found["labels"]["class_weights"] == list(balanced_weights(counts.tolist()))
    assert found["labels"]["share_labelled"] == counts.sum() / valid.sum()
    assert any("2 (12.5); leave them out with bands: [1, 3]" in note for note in found["notes"])
    text, _ = shown(capfd, image, *options)
    lines = [line.split() for line in text.splitlines()]
    assert ["2", "12.5", "0", *["12.5"] * 7] in lines
    assert ["4", f"{counts[4]:,}", f"{counts[4] / counts.sum():.2%}"] in [x[:3] for x in lines]
    assert not any(x[:1] == ["1"] and "%" in x[-2] for x in lines)


def test_labels_of_one_class_are_named(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    image = write_raster("image.tif", pixels(2))
    labels = write_raster("labels.tif", np.where(pixels(1)[0] > 99, 255, 0).astype("uint8"))
    text, _ = shown(capfd, image, "--labels", labels, "--pixels")
    assert "all labelled pixels are of one class (0)" in text
    assert "ignore_index (255)" in text
    text, _ = shown(capfd, image, "--labels", labels, "--pixels", "--ignore-index", "99")
    assert "one class" not in text


# --- refusals


def test_each_image_has_its_block_and_each_refusal_its_sentence(
    write_raster: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, last = write_raster("first.tif", pixels(2)), write_raster("last.tif", pixels(1))
    broken = tmp_path / "broken.tif"
    data = Path(write_raster("whole.tif", pixels(1), compress="deflate")).read_bytes()
    broken.write_bytes(data[:-300])
    empty = write_raster("empty.tif", pixels(1), nodata=0)
    with rasterio.open(empty, "r+") as file:
        file.write(np.zeros_like(pixels(1)))
    paths = [first, "/nowhere.tif", str(broken), empty, last]
    text, said = shown(capfd, *paths, "--pixels", code=1)
    blocks = [block.splitlines()[0] for block in text.strip().split("\n\n")]
    assert blocks == [first, str(broken), empty, last]
    sentences = [line for line in said.splitlines() if line.startswith("tilenet: ")]
    assert len(sentences) == 3
    assert "a raster must be a file that GDAL can open (/nowhere.tif" in sentences[0]
    assert "must be readable everywhere" in sentences[1]
    assert "must hold pixels with data" in sentences[2]
    found = asked(capfd, *paths, "--pixels", code=1)
    assert [path["path"] for path in found] == paths
    assert ["refused" in one for one in found] == [False, True, True, True, False]
    assert ["pixels" in one for one in found] == [True, False, False, False, True]


def test_wrong_labels_leave_the_image_to_be_seen(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    image = write_raster("image.tif", pixels(2))
    wrong = write_raster("wrong.tif", pixels(2, "uint8"))
    text, said = shown(capfd, image, image, "--labels", wrong, "/nowhere", "--pixels", code=1)
    assert text.count("0.00% of 2,400 pixels are without data") == 2
    lines = said.strip().splitlines()
    assert "labels must be one band of whole numbers" in lines[0]
    assert "labels must be a raster or a vector file" in lines[1]
    assert len(lines) == 2


def test_names_in_files_cannot_steer_a_terminal(
    write_raster: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_raster("image.tif", pixels(1))
    with rasterio.open(path, "r+") as file:
        file.set_band_description(1, "red\n  data     none\x9b2J")
    text, _ = shown(capfd, path)
    assert "1 red\ufffd  data     none\ufffd2J: uint16" in text


def test_bytes_below_the_next_unit_are_whole_numbers() -> None:
    assert [_bytes(number) for number in (1000, 1023 * 1024, 1023 << 20, 5 << 30)] == [
        "1000 B", "1023 KiB", "1023 MiB", "5.00 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "required: IMAGE"),
        (["a.tif", "b.tif", "--labels", "c.tif"], "each image needs one label file"),
        (["a.tif", "--classes", "a=1"], "name it with --field"),
        (["a.tif", "--nodata", "black"], "nodata is a number, nan, none or collar"),
        (["a.tif", "--classes", "a=b", "--field", "x"], "a class is a whole number or ignore"),
        (["a.tif", "--pix"], "--pix"),
    ],
    ids=str,
)
def test_what_cannot_be_understood_is_one_line(
    capfd: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    text, errors = shown(capfd, *options, code=2)
    assert text == ""
    assert said in errors
    assert errors.count("\n") == 1


def test_help_is_shown_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def started() -> None:
        raise AssertionError

    monkeypatch.setattr(info_command, "launched", lambda: True)
    monkeypatch.setattr(info_command, "world", started)
    with pytest.raises(SystemExit) as ended:
        main(["info", "--pixels", "--help"])
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("usage: tilenet info")


# --- real files

LABELS = {
    "fair_uganda_z21_rgb.tif": ["fair_uganda_z21_buildings.tif"],
    "fair_set1_z21_rgb.tif": ["fair_set1_z21_buildings.tif"],
    "massachusetts_23429155_15_uint16.tif": ["massachusetts_23429155_15.gpkg"],
    "sample_geotiff.tif": ["geotiff_labels.geojson"],
    "new_brunswick_2of2.tif": ["new_brunswick_BakerLake.gpkg"],
    "SN7_int16_4band.tif": ["SN7_buildings.geojson"],
}
REFUSED = {
    "sample_geotiff_custom_proj.tif": ("geotiff_custom_proj_labels.geojson", "in degrees"),
    "santa_monica_2020_91.tif": ("santa_monica_2020_91.json", "must be polygons"),
    "claremont_2020_10.tif": ("claremont_2020_10.json", "must be polygons"),
    "umbra_mount_yasur_rotated.tif": ("SN_Vegas_WV03.gpkg", "must overlap their image"),
    "pix4d_rgba_alpha.tif": ("opengeos_naip5m_4band.tif", "labels must be one band"),
}


@pytest.mark.real
def test_real_files_are_described_or_refused_by_the_right_sentence(
    real: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = sorted(path.name for path in real.glob("*.tif") if path.name not in LABELS | REFUSED)
    for name in bare:
        (found,) = asked(capfd, str(real / name), "--pixels")
        check_statistics(real / name, found)
    for name, labels in LABELS.items():
        (found,) = asked(capfd, str(real / name), "--labels", str(real / labels[0]), "--pixels")
        assert sum(count > 0 for count in found["labels"]["class_pixels"]) == 2
        if name != "fair_set1_z21_rgb.tif":
            check_statistics(real / name, found)
    for name, (other, said) in REFUSED.items():
        (found,) = asked(capfd, str(real / name), "--labels", str(real / other), "--pixels", code=1)
        assert said in found["refused"]
        check_statistics(real / name, found)
    constant = asked(capfd, str(real / "SN7_int16_4band.tif"), "--pixels")[0]["notes"]
    assert any("4 (255); leave them out with bands: [1, 2, 3]" in note for note in constant)
    (rotated,) = asked(capfd, str(real / "umbra_mount_yasur_rotated.tif"))
    assert abs(rotated["rotation"]) > 1


def check_statistics(path: Path, found: dict[str, Any]) -> None:
    """Against rasterio and numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path) as file:
            read = [band["number"] for band in found["bands"] if band["read"]]
            values, valid = file.read(read), file.dataset_mask() != 0
    assert found["pixels"]["num_valid"] == valid.sum()
    for band, ours in zip(found["pixels"]["bands"], values[:, valid], strict=True):
        assert (band["minimum"], band["maximum"]) == (ours.min(), ours.max())
        assert band["mean"] == pytest.approx(ours.mean(dtype=np.float64), rel=1e-12)
        assert band["percentiles"]["50"] == np.percentile(ours, 50, method="inverted_cdf")
