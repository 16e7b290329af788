"""`tilenet preview`: the picture shows the image's pixels, and its labels where they lie."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rasterio
import shapely
from affine import Affine

from tilenet.__main__ import main
from tilenet.mapping.writing.class_colours import class_colours

Write = Callable[..., str]
Preview = Callable[..., np.ndarray]
Capture = pytest.CaptureFixture[str]
SIZE = 61, 83
UPRIGHT = Affine(2, 0, 5e5, 0, -2, 4e6)


def picture(path: Path) -> np.ndarray:
    with rasterio.open(path) as file:
        assert file.driver == "PNG"
        return file.read()


@pytest.fixture
def preview(tmp_path: Path) -> Preview:
    """Make a picture of these files with these options."""

    def make(*given: str) -> np.ndarray:
        files = [one for one in given if not one.startswith("--")]
        options = [one for one in given if one.startswith("--")]
        out = tmp_path / "out.png"
        assert main(["preview", *files, str(out), "--overwrite", *options]) == 0
        return picture(out)

    return make


def an_image(count: int = 3, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 4000, (count, *size)).astype(np.uint16)


def stretched(band: np.ndarray, valid: np.ndarray, low: float, high: float) -> np.ndarray:
    bottom, top = np.percentile(band[valid].astype(float), [low, high])
    return np.round(np.clip((band - bottom) / (top - bottom), 0, 1) * 255)


@pytest.mark.parametrize(
    ("bands", "low", "high"), [(None, 2, 98), ("3,1,2", 0, 100), ("2", 10, 60), ("2", 2, 98)]
)
def test_bands_are_stretched_and_nodata_is_transparent(
    write_raster: Write, preview: Preview, bands: str | None, low: int, high: int
) -> None:
    image = an_image()
    image[:, 10:30, 20:44] = 0
    valid = image.any(axis=0)
    path = write_raster("image.tif", image, nodata=0)
    found = preview(path, f"--stretch={low},{high}", *([f"--bands={bands}"] if bands else []))
    numbers = [int(b) - 1 for b in (bands or "1,2,3").split(",")]
    for plane, number in zip(found, numbers * (3 // len(numbers)), strict=False):
        wanted = stretched(image[number], valid, low, high)
        assert np.array_equal(plane[valid], wanted[valid])
    assert np.array_equal(found[3], np.where(valid, 255, 0))


def test_colours_are_found_by_what_the_file_says(write_raster: Write, preview: Preview) -> None:
    path = write_raster("image.tif", an_image(4), photometric="rgb", alpha="unspecified")
    with rasterio.open(path, "r+") as file:
        file.colorinterp = [rasterio.enums.ColorInterp[n] for n in ("blue", "nir", "red", "green")]
    found = preview(path)
    assert np.array_equal(found, preview(path, "--bands=3,4,1"))
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize(("most", "size"), [(90, SIZE), (83, SIZE), (82, (60, 82)), (41, (30, 41))])
def test_a_picture_is_as_large_as_asked(
    write_raster: Write, preview: Preview, capsys: Capture, most: int, size: tuple[int, int]
) -> None:
    assert preview(write_raster("image.tif", an_image()), f"--size={most}").shape == (4, *size)
    of = "all pixels" if size == SIZE else "of 61 × 83"
    assert capsys.readouterr().out.endswith(f"out.png: {size[0]} × {size[1]} px, {of}\n")


def labelled(write_raster: Write, **profile: object) -> tuple[str, str, np.ndarray]:
    """An image and labels of a background, three classes and a border that does not count."""
    labels = np.zeros(SIZE, np.uint8)
    labels[5:30, 8:40] = 1
    labels[5:30, 40:60] = 2
    labels[35:50, 20:44] = 3
    labels[:, 70:] = 255
    image = write_raster("image.tif", an_image(), **profile)
    return image, write_raster("labels.tif", labels, **profile), labels


def painted(below: np.ndarray, label: int, opacity: float) -> np.ndarray:
    colour = np.array(class_colours(label + 1)[label][:3])[:, None, None]
    return np.round(below[:3] * (1 - opacity) + colour * opacity)


@pytest.mark.parametrize("opacity", [None, 0, 0.25, 1])
def test_labels_are_painted_over_the_image_and_class_0_is_not(
    write_raster: Write, preview: Preview, opacity: float | None
) -> None:
    image, path, labels = labelled(write_raster)
    given = [] if opacity is None else [f"--opacity={opacity}"]
    below = preview(image).astype(float)
    above = preview(image, path, "--no-legend", *given).astype(float)
    unpainted = (labels == 0) | (labels == 255)
    assert np.array_equal(below[:, unpainted], above[:, unpainted])
    used = 0.4 if opacity is None else opacity
    for label in (1, 2, 3):
        where = labels == label
        assert np.array_equal(above[:3, where], painted(below, label, used)[:, where])
    assert np.array_equal(below, above) == (opacity == 0)


@pytest.mark.parametrize(
    ("classes", "shown"), [("0", {0}), ("2,3", {2, 3}), ("lake,0", {0, 2}), ("7", set())]
)
def test_the_classes_that_are_named_are_painted(
    write_raster: Write, preview: Preview, capsys: Capture, classes: str, shown: set[int]
) -> None:
    image, path, labels = labelled(write_raster)
    with rasterio.open(path, "r+") as file:
        file.update_tags(1, class_0="field", class_1="a forest", class_2="lake")
    below = preview(image)
    capsys.readouterr()
    above = preview(image, path, "--no-legend", f"--classes={classes}")
    changed = (below != above).any(axis=0)
    for label in range(4):
        assert changed[labels == label].any() == (label in shown)
    assert not changed[labels == 255].any()
    said = capsys.readouterr().out.splitlines()[1:]
    colours = ["#{:02x}{:02x}{:02x}".format(*colour[:3]) for colour in class_colours(4)]
    counted = (labels != 255).sum()
    for label, name in enumerate(("0 field", "1 a forest", "2 lake", "3")):
        colour = colours[label] if label in shown else "not painted"
        share = f"{(labels == label).sum() / counted:.2%}"
        assert said[label].split() == [*name.split(), *colour.split(), share]
    assert len(said) == (4 if shown else 5)
    assert shown or "no labels are painted" in said[4]


def test_a_legend_is_drawn_below_the_picture(write_raster: Write, preview: Preview) -> None:
    image, path, _ = labelled(write_raster)
    with rasterio.open(path, "r+") as file:
        file.update_tags(1, class_1="$x_{$\n森林 \x1b[2J", class_2="l" * 500)
    above, whole = preview(image, path, "--no-legend"), preview(image, path)
    assert np.array_equal(whole[:, : SIZE[0], : SIZE[1]], above)
    strip = whole[:, SIZE[0] :]
    assert not whole[3, : SIZE[0], SIZE[1] :].any()  # transparent where names need more room
    assert strip.shape[2] < 500
    for label, colour in enumerate(class_colours(4)):
        patch = (strip == np.array(colour)[:, None, None]).all(axis=0).sum()
        assert (patch > 60) == (label > 0)
    dark = (strip[:3].max(axis=0) < 90).sum(axis=1)
    assert (dark > 0).any()  # letters


def test_nodata_is_what_the_option_says(write_raster: Write, preview: Preview) -> None:
    image = an_image()
    image[:, 10:30, 20:44] = 7
    path = write_raster("image.tif", image, nodata=9)
    assert np.array_equal(preview(path, "--nodata=7")[3] != 0, (image != 7).any(axis=0))
    assert preview(path, "--nodata=none")[3].all()


NUMBERS = "road=4,house=ignore,a lake=0,=0,null=7"


def row_of_boxes(write_vector: Write, kinds: list[str | None]) -> str:
    """Each 20 × 9 px, from row 10 and column 10 × its number on."""
    lefts = [5e5 + 20 * number for number in range(len(kinds))]
    boxes = [shapely.box(left, 4e6 - 60, left + 18, 4e6 - 20) for left in lefts]
    return write_vector("boxes.gpkg", boxes, np.array(kinds, object))


@pytest.mark.parametrize(
    ("given", "boxes"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        (["--field=class"], [0, 1, 3, 4]),
        (["--field=class", "--classes=house"], [1]),
        (["--field=class", "--classes=road,a lake"], [0, 3, 4]),
        (["--field=class", "--classes=1"], [0, 3]),  # road, the most frequent value
        (["--field=class", f"--classes={NUMBERS}"], [0, 2, 3, 4, 5]),
        (["--classes=1"], [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_values_of_a_field_need_no_numbers_to_be_seen(
    write_raster: Write, write_vector: Write, preview: Preview, given: list[str], boxes: list[int]
) -> None:
    image = write_raster("image.tif", an_image(), transform=UPRIGHT)
    path = row_of_boxes(write_vector, ["road", "house", "", "road", "a lake", None])
    below, above = preview(image), preview(image, path, "--no-legend", *given)
    if given and given[-1].endswith(NUMBERS):
        inner = np.s_[:3, 12:28, 2:7]
        assert np.array_equal(above[inner], painted(below, 4, 0.4)[inner])
    changed = (below != above).any(axis=0)
    assert [n for n in range(6) if changed[10:30, 10 * n : 10 * n + 9].mean() > 0.9] == boxes
    assert changed[10:30, :60].mean() < len(boxes) / 6  # between them is nothing


def test_a_window_is_a_part_of_the_image(write_raster: Write, preview: Preview) -> None:
    image = an_image()
    found = preview(write_raster("a.tif", image), "--window=7,11,20,30", "--stretch=0,100")
    part = image[0, 7:27, 11:41]
    assert np.array_equal(found[0], stretched(part, part > 0, 0, 100))


ROADS = ["--field", "class", "--classes", "road,horse"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["IMAGE", "out.jpg"], 1, "a preview is a PNG"),
        (["IMAGE", "there.png"], 1, r"not overwritten unasked \(.*there.png exists\)"),
        (["there.png", "there.png", "--overwrite"], 1, "may not replace what it shows"),
        (["IMAGE", "no/out.png"], 1, "must go where it can be written"),
        (["gone.tif", "out.png"], 1, "must be a file that GDAL can open"),
        (["IMAGE", "gone.tif", "out.png"], 1, "must be a raster or a vector file"),
        (["IMAGE", "SMALL", "out.png"], 1, "must overlap|image's size"),
        (["IMAGE", "NEGATIVE", "out.png"], 1, r"classes from 0 to 65535 \(.*: -4\)"),
        (["IMAGE", "out.png", "--bands", "1,2"], 2, "three bands make colours"),
        (["IMAGE", "out.png", "--bands", "1,2,9"], 1, r"leave out \[9\]"),
        (["IMAGE", "out.png", "--bands", "1,2,red"], 1, "red"),
        (["IMAGE", "out.png", "--window", "1,2,3"], 1, "ROW,COL,HEIGHT,WIDTH"),
        (["IMAGE", "out.png", "--window", "1,2,3,x"], 2, "write ROW,COL,HEIGHT,WIDTH"),
        (["IMAGE", "out.png", "--window", "50,0,20,20"], 1, "has pixels and lies inside the image"),
        (["IMAGE", "out.png", "--window", "0,0,0,20"], 1, "has pixels and lies inside the image"),
        (["IMAGE", "out.png", "--stretch", "98,2"], 2, "two percentiles"),
        (["IMAGE", "out.png", "--stretch", "nan,2"], 2, "two percentiles"),
        (["IMAGE", "out.png", "--size", "0"], 2, "from 1 to"),
        (["IMAGE", "out.png", "--classes", "a=1"], 2, r"name it with vectors.field \(--field\)"),
        (
            ["IMAGE", "NAMED", "out.png", "--classes", "1,lakes"],
            1,
            "no lakes.; the nearest is lake",
        ),
        (["IMAGE", "NAMED", "out.png", "--opacity", "1.5"], 2, r"from 0 to 1 \(1\.5\)"),
        (["UPRIGHT", "BOXES", "out.png", *ROADS], 1, "no horse.; the nearest is house"),
        (["UPRIGHT", "BOXES", "out.png", "--classes", "2"], 1, "no 2.; the nearest is 1"),
        (["IMAGE"], 2, "required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_shown_is_said(
    write_raster: Write,
    write_vector: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    given: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    image, named, _ = labelled(write_raster)
    with rasterio.open(named, "r+") as file:
        file.update_tags(1, class_0="field", class_2="lake")
    negative = np.random.default_rng(1).integers(-4, 3, SIZE).astype(np.int16)
    elsewhere = Affine(2, 0, 7e5, 0, -2, 4e6)
    names = {
        "IMAGE": image,
        "SMALL": write_raster("small.tif", negative[:5, :5].clip(0), transform=elsewhere),
        "NEGATIVE": write_raster("negative.tif", negative),
        "NAMED": named,
        "UPRIGHT": write_raster("upright.tif", an_image(), transform=UPRIGHT),
        "BOXES": row_of_boxes(write_vector, ["road", "", "house"]),
    }
    rgb = np.random.default_rng(2).integers(0, 255, (3, 9, 9)).astype(np.uint8)
    write_raster("there.png", rgb, driver="PNG", crs=None, transform=None)
    before = sorted(tmp_path.iterdir())
    assert main(["preview", *(names.get(one, one) for one in given)]) == code
    assert re.search(said, capsys.readouterr().err)
    assert [p for p in sorted(tmp_path.iterdir()) if p not in before and p.suffix != ".xml"] == []


def test_a_nan_or_an_empty_image_is_shown(write_raster: Write, preview: Preview) -> None:
    image = an_image().astype(np.float32)
    image[0, 3:9] = np.nan
    assert (preview(write_raster("nan.tif", image))[3] == 0).sum() == 6 * SIZE[1]
    nothing = write_raster("empty.tif", np.zeros((3, *SIZE), np.uint8), nodata=0)
    assert not preview(nothing)[3].any()


@pytest.mark.parametrize("most", [83, 60])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_largest_numbers_are_shown(write_raster: Write, preview: Preview, most: int) -> None:
    image = np.random.default_rng(1).uniform(-1, 1, (3, *SIZE)) * 1.7e308
    found = preview(write_raster("huge.tif", image), f"--size={most}").astype(int)
    small = preview(write_raster("image.tif", image * 1e-300), f"--size={most}")
    assert np.abs(found - small).max() <= 1


def test_memory_does_not_grow_with_the_image(tmp_path: Path) -> None:
    """A sparse file of 60 000 × 60 000 pixels: 10.8 GB of values, most of them zeros."""
    path = tmp_path / "huge.tif"
    profile = {"driver": "GTiff", "height": 60_000, "width": 60_000, "count": 3, "dtype": "uint8"}
    profile |= {"tiled": True, "SPARSE_OK": True, "BIGTIFF": "YES", "crs": "EPSG:32630"}
    profile["transform"] = Affine(1, 0, 5e5, 0, -1, 4e6)
    with rasterio.open(path, "w", **profile) as file:
        block = np.random.default_rng(1).integers(1, 255, (3, 256, 256)).astype(np.uint8)
        file.write(block, window=rasterio.windows.Window(25600, 25600, 256, 256))
    out = tmp_path / "out.png"
    code = (
        "import sys; from tilenet.__main__ import main\n"
        "from tilenet.parallel.health.peak_memory import measure_peak_bytes\n"
        f"code = main(['preview', {str(path)!r}, {str(out)!r}, '--size', '300'])\n"
        "print(measure_peak_bytes([])); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert picture(out).shape == (4, 300, 300)
    assert int(done.stdout.split()[-1]) < 1 << 30
