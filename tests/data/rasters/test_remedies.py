"""Each line of `rio` that a message names does what the message says."""

import re
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pyogrio.raw
import pytest
import rasterio
import shapely
from click.testing import CliRunner
from on_the_ground import MODEL
from rasterio.control import GroundControlPoint
from rasterio.rio.main import main_group

from tilenet.data.rasters import remedies as tools

Capture = pytest.CaptureFixture[str]
Write = Callable[..., str]
NORTH = {"transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}


def rio(line: str, **words: str) -> None:
    """Run the part of a line that begins with rio, with words of it replaced."""
    arguments = line.split(", or rio ")[1].replace("'", "").split()
    arguments = [words.get(re.sub(r"\W", "", part), part) for part in arguments]
    result = CliRunner().invoke(main_group, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture
def scene(write_raster: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three bands in strips, and a coarser grid elsewhere in the same zone."""
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(6).integers(1, 99, (3, 44, 700)).astype("uint8")
    write_raster("in.tif", values, **NORTH)
    shifted = rasterio.Affine(3, 0, 5e5 + 9, 0, -3, 4e6 - 6)
    write_raster("like.tif", values[:1, :20, :21], transform=shifted)
    return "in.tif"


def bands(path: str) -> np.ndarray:
    with rasterio.open(path) as file:
        return np.asarray(file.read())


@pytest.mark.parametrize("line", [tools.LIKE, tools.NEAREST])
def test_a_file_is_put_on_anothers_grid(scene: str, line: str) -> None:
    rio(line, IN=scene, OUTtif="out.tif", FIRST="like.tif", IMAGE="like.tif")
    with rasterio.open("out.tif") as out, rasterio.open("like.tif") as like:
        assert (out.transform, out.shape, out.crs) == (like.transform, like.shape, like.crs)
        assert out.read(1)[2, 4] == bands(scene)[0, (6 + 2 * 3 + 1) // 2, (9 + 4 * 3 + 1) // 2]


def test_a_file_is_moved_to_another_crs(scene: str) -> None:
    rio(tools.MOVE, IN=scene, OUTtif="out.tif", EPSG="EPSG:4326")
    with rasterio.open("out.tif") as out:
        assert out.crs == "EPSG:4326"


def test_points_and_rpcs_are_put_on_the_ground(scene: str) -> None:
    with rasterio.open(scene) as file:
        values, profile = file.read(), file.profile
    profile = {k: v for k, v in profile.items() if k not in ("crs", "transform")}
    points = [
        GroundControlPoint(row, col, 5e5 + 2 * col, 4e6 - 2 * row)
        for row in (0, 44)
        for col in (0, 700)
    ]
    with rasterio.open("gcps.tif", "w", **profile) as file:
        file.write(values)
        file.gcps = points, "EPSG:32630"
    line = tools.ON_THE_GROUND.replace(" (with RPCs: --like MAP)", "")
    rio(line, IN="gcps.tif", OUTtif="out.tif", EPSG="EPSG:32630")
    with rasterio.open("out.tif") as out:
        assert np.allclose(out.bounds, (5e5, 4e6 - 88, 5e5 + 1400, 4e6), atol=4)
    model = attrs.evolve(MODEL, lat_off=36.14, long_off=-3, samp_off=350, samp_scale=350)
    with rasterio.open("rpcs.tif", "w", **profile) as file:
        file.write(values)
        file.rpcs = model
    like = tools.ON_THE_GROUND.replace("--dst-crs EPSG:… (with RPCs: --like MAP)", "--like MAP")
    rio(like, IN="rpcs.tif", OUTtif="out2.tif", MAP="like.tif")
    assert np.isin(bands("out2.tif"), values).all()
    assert bands("out2.tif").any()


def test_crs_and_transform_are_set(scene: str) -> None:
    rio(tools.SET_CRS, FILE=scene, EPSG="EPSG:32631")
    rio(tools.SET_TRANSFORM, FILE=scene, ABCDEF="[3,0,1,0,-3,2]")
    with rasterio.open(scene) as file:
        assert file.crs == "EPSG:32631"
        assert file.transform == rasterio.Affine(3, 0, 1, 0, -3, 2)


@pytest.mark.parametrize("line", [tools.TILED, tools.tiled_copy("in.tif")])
def test_a_file_in_strips_is_tiled(scene: str, line: str) -> None:
    rio(line, IN=scene, OUTtif="tiled.tif")
    with rasterio.open("tiled.tif") as file:
        assert file.block_shapes[0] == (512, 512)
        assert np.array_equal(file.read(), bands(scene))


def test_files_are_joined_and_checked(scene: str) -> None:
    rio(tools.JOIN, IN=scene, OUTtif="joined.tif")
    assert np.array_equal(bands("joined.tif"), bands(scene))
    rio(f"{tools.CHECK} {scene}")


def test_the_line_of_python_says_what_a_vector_holds(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "l.gpkg")
    shape = np.array([shapely.to_wkb(shapely.box(0, 0, 1, 2))], object)
    field = [np.array(["x"], object)]
    pyogrio.raw.write(path, shape, field, ["kind"], geometry_type="Polygon", crs="EPSG:32630")
    found = re.search(r"python -c '(.*)'", tools.VECTOR_INFO)
    assert found is not None
    exec(found[1].replace("FILE", repr(path)))
    assert "kind" in capsys.readouterr().out
