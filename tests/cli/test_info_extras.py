"""`tilenet info` says what files hold besides pixels and grid: palettes, units, points, arrays."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from affine import Affine
from info_answers import SIZE, Info, Write, pixels
from on_the_ground import MODEL, POINTS

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
    return line


def test_a_palette_is_said_with_its_colours(write_raster: Write, info: Info) -> None:
    path = write_raster("a.tif", pixels(1, "uint8"))
    with rasterio.open(path, "r+") as file:
        file.write_colormap(1, {n: (n * 12, 9, 250, 255) for n in range(1, 20)})
    (found,) = info.asked(path)
    colours = found["bands"][0]["palette"]
    assert colours == {str(n): f"#{n * 12:02x}09fa" for n in range(1, 20)}
    line = line_of(info.shown(path)[0], "palette")
    assert "band 1 holds numbers of colours or classes (1 #0c09fa, 2 #1809fa" in line
    assert "12 #9009fa and 7 more)" in line


def test_scale_offset_and_unit_are_said_and_not_applied(write_raster: Write, info: Info) -> None:
    values = pixels(7, "int16")
    path = write_raster("a.tif", values)
    with rasterio.open(path, "r+") as file:
        file.scales = (1e-4,) * 5 + (0.01, 1)
        file.offsets = (-0.1,) * 5 + (273.15, 0)
        file.units = ("",) * 5 + ("K", "m")
    (found,) = info.asked(path, "--pixels")
    assert [(b["scale"], b["offset"], b["unit"]) for b in found["bands"][4:]] == [
        (1e-4, -0.1, None),
        (0.01, 273.15, "K"),
        (1, 0, "m"),
    ]
    assert found["pixels"]["bands"][5]["maximum"] == values[5].max()
    said = "1–5: number × 0.0001 − 0.1; 6: number × 0.01 + 273.15 K; 7: number m (tilenet reads"
    text, _ = info.shown(path)
    assert said in line_of(text, "value")
    assert "  bands    1–7: int16\n" in text


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("gcps", ["9 ground control points (EPSG:4326) in the file, not used", "rio warp 'PATH' "]),
        ("rpcs", ["           RPCs in the file, not used", "gdalwarp -rpc -t_srs EPSG:…"]),
        ("none", []),
    ],
)
def test_points_and_rpcs_are_said_with_a_way_to_use_them(
    write_raster: Write, info: Info, kind: str, lines: list[str]
) -> None:
    path = write_raster("a b.tif", pixels(1), crs=None, transform=Affine.identity())
    with rasterio.open(path, "r+") as file:
        if kind == "gcps":
            file.gcps = POINTS, "EPSG:4326"
        elif kind == "rpcs":
            file.rpcs = MODEL
    places = info.asked(path)[0]["places"]
    found = places["gcps"], places["gcps_crs"], places["rpcs"]
    wanted = {"gcps": (9, "EPSG:4326", False), "rpcs": (0, None, True), "none": (0, None, False)}
    assert found == wanted[kind]
    text, _ = info.shown(path)
    assert all(line.replace("PATH", path) in text for line in lines)
    assert ("not used" in text) == (kind != "none")


def a_zarr(folder: Path, arrays: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    for name, values in arrays.items():
        (folder / name).mkdir()
        head: dict[str, Any] = {"zarr_format": 2, "order": "C", "compressor": None, "filters": None}
        head |= {"shape": values.shape, "chunks": values.shape, "dtype": values.dtype.str}
        (folder / name / ".zarray").write_text(json.dumps(head | {"fill_value": 0}))
        axes = {"_ARRAY_DIMENSIONS": ["y", "x"] if values.ndim == 2 else [name]}
        (folder / name / ".zattrs").write_text(json.dumps(axes))
        values.tofile(folder / name / ".".join(["0"] * values.ndim))
    return str(folder)


def test_the_array_that_is_read_is_named(tmp_path: Path, info: Info) -> None:
    with rasterio.Env() as env:
        if "Zarr" not in env.drivers():
            pytest.skip("this GDAL reads no Zarr")
    axes = {"x": np.arange(60.0), "y": np.arange(40.0)}
    path = a_zarr(tmp_path / "a.zarr", {"reflectance": pixels(1, "float32")[0], **axes})
    (found,) = info.asked(path)
    assert found["array"] == "reflectance"
    assert found["num_bytes"] is None
    text, _ = info.shown(path)
    assert "  array    reflectance is read\n" in text
    assert "  file     Zarr; " in text
    two = a_zarr(tmp_path / "b.zarr", {"red": pixels(1)[0], "nir": pixels(1, seed=2)[0]})
    assert info.asked(f'ZARR:"{two}":/nir')[0]["array"] == "nir"


def test_other_rasters_of_the_file_are_named(write_raster: Write, info: Info) -> None:
    path, more = write_raster("a.tif", pixels(1)), write_raster("b.tif", pixels(1)[:, :9, :7])
    rasterio.shutil.copy(more, path, driver="GTiff", APPEND_SUBDATASET="YES")
    other = f"GTIFF_DIR:2:{path}"
    assert f"rasters  1 of 2 in the file is read; also: {other}\n" in info.shown(path)[0]
    assert info.asked(path)[0]["others"] == [other]
    assert info.asked(other)[0]["size"] == [9, 7]


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


def test_a_plain_file_says_none_of_this(write_raster: Write, info: Info) -> None:
    path = write_raster("a.tif", pixels(2, "uint8"))
    text, _ = info.shown(path)
    assert not re.search("\n  (palette|value|rasters|array) ", text)
    assert info.asked(path)[0]["array"] is None
    assert ", not compressed; " in text
    png = write_raster("a.png", pixels(1, "uint8"), driver="PNG", crs=None, transform=None)
    assert " compressed" not in info.shown(png)[0]
