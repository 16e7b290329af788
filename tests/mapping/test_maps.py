"""Maps: what is written is read back; after a failure nothing is left, or what was there before."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from affine import Affine
from maps_of_tests import (
    CLASSES,
    MANY_CLASSES,
    SCALED,
    SCORES,
    Write,
    like,
    values_of,
    write_in_tiles,
    write_map,
    written,
)
from rasterio._err import CPLE_AppDefinedError
from rasterio.errors import RasterioIOError
from rio_cogeo.cogeo import cog_validate

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.writing.class_colours import class_colours
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.target import check_target
from tilenet.mapping.writing.writer import MapWriter

AWKWARD = [(1, 1), (7, 513), (511, 3), (700, 1101), (1025, 640)]


@pytest.mark.parametrize("kind", [CLASSES, SCORES, MANY_CLASSES])
@pytest.mark.parametrize("size", AWKWARD, ids=str)
def test_what_is_written_is_read_back_from_a_cloud_optimised_geotiff(
    tmp_path: Path, write_raster: Write, size: tuple[int, int], kind: MapKind
) -> None:
    values, path = values_of(kind, size), tmp_path / "out" / "map.tif"
    path.parent.mkdir()
    with like(write_raster, size) as source, MapWriter(str(path), source, kind) as writer:
        write_in_tiles(writer, values, 176)
        writer.finish()
    with rasterio.open(path) as file:
        assert file.dtypes == (kind.dtype,) * kind.bands
        assert np.array_equal(file.read(), values, equal_nan=kind.dtype[0] == "f")
        assert bool(file.overviews(1)) == (max(size) > 512)
        assert file.profile["compress"] == "deflate"
    assert cog_validate(path, strict=True, quiet=True) == (True, [], [])
    assert sorted(os.listdir(path.parent)) == written(kind)


@pytest.mark.parametrize("kind", [CLASSES, SCALED, SCORES])
def test_a_map_says_where_it_lies_and_what_its_values_mean(
    tmp_path: Path, write_raster: Write, kind: MapKind
) -> None:
    path = str(tmp_path / "map.tif")
    with like(write_raster, (700, 1101)) as source:
        write_map(source, path, kind)
    with rasterio.open(path) as file:
        assert file.transform == Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
        assert file.crs == "EPSG:32630"
        assert file.nodata == pytest.approx(kind.nodata, nan_ok=True, rel=0)
        if kind is CLASSES:
            tags = {"class_0": "water", "class_1": "forest", "class_2": "town"}
            assert tags.items() <= file.tags(1).items()
            table = file.colormap(1)
            assert [table[index] for index in range(3)] == class_colours(3)
            assert table[255][3] == 0
        else:
            assert file.descriptions == ("water", "forest")
            assert (file.scales, file.offsets) == ((kind.scale,) * 2, (0, 0))


def test_qgis_finds_names_and_colours_next_to_a_map(tmp_path: Path, write_raster: Write) -> None:
    """Those of the map's own table; an older map's go, and what somebody made stays."""
    path, style = str(tmp_path / "map.tif"), tmp_path / "map.qml"
    kind = replace(CLASSES, classes=("water & ice", "<forest>", 'town "Ü"'))
    with like(write_raster, (70, 90)) as source:
        write_map(source, path, kind)
        entries = [dict(one.attrib) for one in ElementTree.parse(style).iter("paletteEntry")]
        with rasterio.open(path) as file:
            table = file.colormap(1)
        for value, (name, entry) in enumerate(zip(kind.classes, entries, strict=True)):
            red, green, blue, alpha = table[value]
            assert entry.pop("color") == f"#{red:02x}{green:02x}{blue:02x}"
            assert entry == {"value": str(value), "alpha": str(alpha), "label": name}
        renderer = ElementTree.parse(style).find("pipe/rasterrenderer")
        assert renderer is not None
        assert (renderer.get("type"), renderer.get("band")) == ("paletted", "1")
        write_map(source, path, CLASSES)
        assert "<forest>" not in style.read_text()
        write_map(source, path, SCORES)
        assert not style.exists()
        style.write_text("<qgis/>")
        for other in (CLASSES, SCORES):
            write_map(source, path, other)
            assert style.read_text() == "<qgis/>"


def test_names_of_classes_lie_beside_the_map_and_go_with_it(
    tmp_path: Path, write_raster: Write
) -> None:
    """What an older map left would be taken for this one's."""
    path, beside = tmp_path / "map.tif", tmp_path / "map.tif.aux.xml"
    names = ('wet & "deep"', "<forest>", "Straße")
    kinds = {names: MapKind(1, "uint8", 255, names), ("water", "forest"): SCORES}
    beside.write_text("<PAMDataset><PAMRasterBand band='1'/></PAMDataset>")
    for classes, kind in kinds.items():
        with like(write_raster, (70, 90)) as source:
            write_map(source, str(path), kind)
        assert beside.exists() == (kind.bands == 1)
        if beside.exists():
            told = ElementTree.parse(beside).findall("PAMRasterBand/CategoryNames/Category")
            assert tuple(one.text for one in told) == classes
            copy = tmp_path / "copy.vrt"  # GDAL has read them if it hands them on
            rasterio.shutil.copy(str(path), str(copy), driver="VRT")
            told = ElementTree.parse(copy).findall("VRTRasterBand/CategoryNames/Category")
            assert tuple(one.text for one in told) == classes


@pytest.mark.parametrize("kind", [CLASSES, SCORES])
def test_a_map_of_a_part_lies_where_the_part_does(
    tmp_path: Path, write_raster: Write, kind: MapKind
) -> None:
    size, path = (700, 1101), str(tmp_path / "map.tif")
    values, part = values_of(kind, size), Window(131, 77, 402, 703)
    with (
        like(write_raster, size) as source,
        MapWriter(path, source, kind, part) as writer,
    ):
        write_in_tiles(writer, values, 176)
        writer.finish()
        corner = source.transform @ (77, 131)
    with rasterio.open(path) as file:
        cut_out = values[:, 131 : 131 + 402, 77 : 77 + 703]
        assert np.array_equal(file.read(), cut_out, equal_nan=kind is SCORES)
        assert (file.transform.c, file.transform.f) == pytest.approx(corner, rel=1e-15)
        a, b, d, e = (getattr(file.transform, name) for name in "abde")
        assert (a, b, d, e) == (2, 0.1, 0.1, -2)


def test_classes_have_distinct_colours() -> None:
    for count in (2, 21, 255):
        colours = class_colours(count)
        assert len(set(colours)) == count
        assert all(0 <= part <= 255 for colour in colours for part in colour)
        assert {colour[3] for colour in colours} == {255}


# --- failures


@pytest.mark.parametrize("before", [None, b"the map of yesterday"])
@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), None])
def test_a_map_that_is_not_finished_leaves_what_was_there_before(
    tmp_path: Path, write_raster: Write, error: BaseException | None, before: bytes | None
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "map.tif"
    if before:
        path.write_bytes(before)
    with (
        like(write_raster, (70, 90)) as source,
        pytest.raises(type(error)) if error else contextlib.nullcontext(),
        MapWriter(str(path), source, CLASSES) as writer,
    ):
        writer.write(source.whole, values_of(CLASSES, source.size))
        assert len(os.listdir(folder)) == 1 + bool(before)
        if error:
            raise error
    assert os.listdir(folder) == (["map.tif"] if before else [])
    if before:
        assert path.read_bytes() == before


def test_what_a_killed_run_left_is_overwritten(tmp_path: Path, write_raster: Write) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    aside = folder / ".map.tif.pieces.part"
    aside.mkdir()
    for name in ("0_0_70_90.raw", "35_0_35_90.raw", "map.tif", "0_0_9_9.raw.part"):
        (aside / name).write_bytes(bytes(6300))
    with like(write_raster, (70, 90)) as source:
        write_map(source, str(folder / "map.tif"), CLASSES)
    with rasterio.open(folder / "map.tif") as file:
        assert np.array_equal(file.read(), values_of(CLASSES, (70, 90)))
    assert sorted(os.listdir(folder)) == written(CLASSES)


GDALS_OWN = CPLE_AppDefinedError(3, 1, "TIFFAppendToStrip:Write error\nat scanline 0")


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (os, "fsync", OSError(28, "No space\nleft on device")),
        (os, "replace", OSError(28, "No space\nleft on device")),
        (rasterio.shutil, "copy", RasterioIOError("Write error")),
        (rasterio.shutil, "copy", GDALS_OWN),
    ],
    ids=["fsync", "replace", "copy", "copy with GDAL's own error"],
)
def test_an_error_at_the_end_is_one_sentence_and_leaves_nothing(
    tmp_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    error: Exception,
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def fail(*_: object, **__: object) -> None:
        raise error

    with (
        like(write_raster, (70, 90)) as source,
        MapWriter(str(folder / "map.tif"), source, CLASSES) as writer,
    ):
        writer.write(source.whole, values_of(CLASSES, source.size))
        monkeypatch.setattr(place, name, fail)
        with pytest.raises(
            TilenetError, match=r"writable to its end .*(space left|Write error)"
        ) as said:
            writer.finish()
    assert "\n" not in str(said.value)
    assert os.listdir(folder) == []


def test_a_map_in_a_directory_that_is_not_there_is_refused(
    tmp_path: Path, write_raster: Write
) -> None:
    with (
        like(write_raster, (70, 90)) as source,
        pytest.raises(TilenetError, match="writable to its end"),
    ):
        MapWriter(str(tmp_path / "nowhere" / "map.tif"), source, CLASSES)


@pytest.mark.parametrize(("kind", "sizes"), [(CLASSES, (700, 1400)), (SCORES, (6000, 17000))])
def test_a_full_disk_gives_a_whole_map_or_one_sentence_and_nothing(
    write_raster: Write,
    small_disk: Callable[[int], Path],
    kind: MapKind,
    sizes: tuple[int, int],
) -> None:
    """At some of these sizes the pieces do not fit, at some the COG, or its last block."""
    values, outcomes = values_of(kind, (700, 1101)), []
    with like(write_raster, (700, 1101)) as source:
        for kilobytes in np.linspace(*sizes, 14, dtype=int):
            path = small_disk(int(kilobytes)) / "map.tif"
            said = ""
            try:
                with MapWriter(str(path), source, kind) as writer:
                    write_in_tiles(writer, values, 240)
                    writer.finish()
            except TilenetError as error:
                said = str(error)
            outcomes.append(said)
            if said:
                assert "writable to its end" in said
                assert os.listdir(path.parent) == []
                continue
            assert sorted(os.listdir(path.parent)) == written(kind)
            with rasterio.open(path) as file:
                assert np.array_equal(file.read(), values, equal_nan=kind is SCORES)
                assert file.read(1, out_shape=(350, 550)).shape == (350, 550)
    assert outcomes[0]
    assert not outcomes[-1]


# --- before any work


def test_a_map_is_not_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "map.tif"
    check_target(str(path), overwrite=False)
    path.write_bytes(b"a map")
    with pytest.raises(TilenetError, match=r"map\.tif exists\); add --overwrite"):
        check_target(str(path), overwrite=False)
    check_target(str(path), overwrite=True)
    assert path.read_bytes() == b"a map"
    assert os.listdir(tmp_path) == ["map.tif"]


def test_a_directory_is_no_map(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="is a directory"):
        check_target(str(tmp_path), overwrite=True)


def test_a_map_is_named_as_a_geotiff(tmp_path: Path) -> None:
    for name in ("map.tif", "map.TIFF", "map", "map.v1.2"):
        check_target(str(tmp_path / name), overwrite=False)
    with pytest.raises(TilenetError, match=r"is a GeoTIFF \(.*map\.Png: PNG\); .* in \.tif"):
        check_target(str(tmp_path / "map.Png"), overwrite=False)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_map_needs_a_directory(tmp_path: Path, overwrite: bool) -> None:
    with pytest.raises(TilenetError, match=r"existing directory \(.*nowhere is not\)"):
        check_target(str(tmp_path / "nowhere" / "map.tif"), overwrite=overwrite)
    (tmp_path / "file").write_bytes(b"no directory")
    with pytest.raises(TilenetError, match=r"existing directory \(.*file is not\)"):
        check_target(str(tmp_path / "file" / "map.tif"), overwrite=overwrite)


def test_a_map_needs_a_directory_that_can_be_written() -> None:
    with pytest.raises(TilenetError, match=r"can be written \(/proc/self: .*choose another"):
        check_target("/proc/self/map.tif", overwrite=False)


ROTATED_POLE = "+proj=ob_tran +o_proj=longlat +o_lat_p=39.25 +lon_0=18 +to_meter=0.0174532925199433"


@pytest.mark.parametrize("crs", [ROTATED_POLE, "+proj=healpix +datum=WGS84 +units=m", "EPSG:3035"])
@pytest.mark.parametrize("kind", [CLASSES, SCORES], ids=["classes", "scores"])
def test_a_crs_that_geotiff_has_no_keys_for_stands_next_to_a_map(
    tmp_path: Path, write_raster: Write, kind: MapKind, crs: str
) -> None:
    path = str(tmp_path / "map.tif")
    image = write_raster("image.tif", np.zeros((9, 7), np.uint8), crs=crs)
    with Raster(image) as source:
        write_map(source, path, kind)
        with rasterio.open(path) as file:
            assert source.crs is not None
            assert file.crs == source.crs
    beside = kind is CLASSES or crs != "EPSG:3035"
    assert os.path.exists(f"{path}.aux.xml") == beside
    assert not [name for name in os.listdir(tmp_path) if ".crs." in name]


@pytest.mark.real
def test_a_rotated_grid_survives_a_map(tmp_path: Path, real: Path) -> None:
    path = str(tmp_path / "map.tif")
    with Raster(str(real / "umbra_mount_yasur_rotated.tif")) as source:
        write_map(source, path, CLASSES)
        with rasterio.open(source.path) as original, rasterio.open(path) as file:
            assert original.transform.b != 0
            assert file.transform == original.transform
            assert file.crs == original.crs


def test_four_scaled_scores_are_no_colours(tmp_path: Path, write_raster: Write) -> None:
    kind, path = MapKind(4, "uint8", 255, ("a", "b", "c", "d"), 1 / 250), str(tmp_path / "map.tif")
    values = np.random.default_rng(1).integers(0, 2, (4, 9, 7)).astype(np.uint8)
    image = write_raster("image.tif", np.zeros((9, 7), np.uint8))
    with Raster(image) as source:
        write_map(source, path, kind, values)
    with rasterio.open(path) as file, Raster(path) as mapped:
        assert {colour.name for colour in file.colorinterp} <= {"gray", "undefined"}
        assert mapped.bands == (1, 2, 3, 4)
        assert mapped.read(mapped.whole).valid.all()
        assert np.array_equal(file.read(), values)


def test_masks_and_overviews_of_an_older_map_go_with_it(
    tmp_path: Path, write_raster: Write
) -> None:
    path, values = tmp_path / "map.tif", np.ones((300, 300), np.uint8)
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False, TIFF_USE_OVR=True):
        with rasterio.open(
            path, "w", driver="GTiff", height=300, width=300, count=1, dtype="uint8"
        ) as file:
            file.write_mask(np.zeros((300, 300), np.uint8))
        with rasterio.open(path, "r+") as file:
            file.build_overviews([2])
    assert {".msk", ".ovr"} <= {name.suffix for name in tmp_path.iterdir()}
    with Raster(write_raster("image.tif", values)) as source:
        write_map(source, str(path), CLASSES)
    assert not {".msk", ".ovr"} & {name.suffix for name in tmp_path.iterdir()}
    with rasterio.open(path) as file:
        assert file.overviews(1) == []


@pytest.mark.parametrize("name", ["", "new/"])
def test_a_map_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TilenetError, match="a map is a file"):
        check_target(name, overwrite=False)
