"""Files joined by plus signs are one image, and bands are found by what the files call them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.enums import ColorInterp

from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stack import same_grid
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.writing.target import check_target

Write = Callable[..., str]
HEIGHT, WIDTH = 29, 43


def band(seed: int, dtype: str = "uint8") -> np.ndarray:
    top = 250 if dtype == "uint8" else 9000
    return np.random.default_rng(seed).integers(1, top, (1, HEIGHT, WIDTH)).astype(dtype)


def describe(path: str, *names: str, colours: list[ColorInterp] | None = None) -> str:
    with rasterio.open(path, "r+") as file:
        for number, name in enumerate(names, start=1):
            file.set_band_description(number, name)
        if colours:
            file.colorinterp = colours
    return path


# --- stacks


def test_bands_of_stacked_files_are_counted_through(write_raster: Write) -> None:
    values = np.concatenate([band(seed) for seed in range(4)])
    parts = [write_raster("R.tif", values[:1]), write_raster("GB.tif", values[1:3])]
    parts.append(write_raster("N.tif", values[3:]))
    whole = write_raster("whole.tif", values, photometric="MINISBLACK")
    for bands in (None, (4, 2, 2), (3,)):
        with Raster("+".join(parts), bands) as stack, Raster(whole, bands) as one:
            assert stack.bands == one.bands
            assert stack.stack.count == 4
            assert (stack.crs, stack.transform, stack.size) == (one.crs, one.transform, one.size)
            for window in (Window(3, 5, 9, 11), Window(-7, 30, 50, 40), stack.whole):
                found, wanted = stack.read(window), one.read(window)
                assert np.array_equal(found.values, wanted.values)
                assert found.valid.all()


def test_a_pixel_of_a_stack_counts_where_it_does_in_every_file(write_raster: Write) -> None:
    red, green = band(1, "uint16"), band(2, "int16")
    red[0, 3, 4] = 0
    green[0, 5, 6] = -9
    red[0, 7, 8] = green[0, 7, 8] = 77
    red[0, 9, 10] = 77
    path = f"{write_raster('R.tif', red, nodata=0)}+{write_raster('G.tif', green, nodata=-9)}"
    with Raster(path) as raster:
        assert raster.dtype == np.int32
        found = raster.read(raster.whole)
        assert np.argwhere(~found.valid).tolist() == [[3, 4], [5, 6]]
        assert np.array_equal(found.values, np.concatenate([red, green]).astype(np.int32))
    with Raster(path, nodata=77) as raster:
        wanted = ((red == 77) | (green == 77))[0]
        assert {(7, 8), (9, 10)} <= set(map(tuple, np.argwhere(wanted)))
        assert np.array_equal(~raster.read(raster.whole).valid, wanted)
    with Raster(path, (2,), nodata=77) as raster:
        assert np.array_equal(~raster.read(raster.whole).valid, (green == 77)[0])
    with Raster(path, nodata="none") as raster:
        assert raster.read(raster.whole).valid.all()


def test_the_collar_of_a_stack_is_black_in_all_its_files(write_raster: Write) -> None:
    red, green = band(1), band(2)
    red[0, :6], green[0, :4] = 0, 0
    path = f"{write_raster('R.tif', red)}+{write_raster('G.tif', green)}"
    with Raster(path, nodata="collar") as raster:
        valid = raster.read(raster.whole).valid
    assert not valid[:4].any()
    assert valid[4:].all()


def test_files_without_a_crs_that_are_not_alike_are_not_stacked(write_raster: Write) -> None:
    red = write_raster("R.tif", band(1))
    green = write_raster("G.tif", band(2), crs=None)
    for path in (f"{red}+{green}", f"{green}+{red}"):
        with pytest.raises(
            TilenetError, match=r"same CRS, unless .*: none.*G\.tif has no CRS\)"
        ) as raised:
            Raster(path)
        assert "R.tif: EPSG:32630" in str(raised.value)
        assert "rio warp --like FIRST IN OUT.tif" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_grid_of_flat_pixels_is_measured_along_both_sides() -> None:
    grid = Affine(100, 0, 5e5, 0, -1, 4e6)
    assert same_grid(grid, grid @ Affine.translation(0, 0.009), 9, 9)
    assert not same_grid(grid, grid @ Affine.translation(0, 0.95), 9, 9)
    assert not same_grid(grid, grid @ Affine.translation(0.02, 0), 9, 9)


def test_what_other_software_rounds_is_the_same_grid(write_raster: Write) -> None:
    red = write_raster("R.tif", band(1))
    other = Affine(2.00001, 0.1, 5e5 + 0.001, 0.1, -2, 4e6)
    with Raster(f"{red}+{write_raster('G.tif', band(2), transform=other)}") as raster:
        assert raster.transform == Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def test_a_file_of_a_stack_that_is_missing_or_cut_off_is_named(
    write_raster: Write, tmp_path: Path
) -> None:
    red = write_raster("R.tif", band(1))
    with pytest.raises(TilenetError, match=r"can open \([^+:]*lost.tif: No such .*check the path"):
        Raster(f"{red}+{tmp_path / 'lost.tif'}")
    with pytest.raises(TilenetError, match=r"can open \([^ ]*ost\+lost.tif: .*check the path"):
        Raster(str(tmp_path / "ost+lost.tif"))
    whole = Path(write_raster("G.tif", band(2, "uint16"), compress="deflate", blockysize=4))
    (tmp_path / "cut.tif").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with (
        Raster(f"{red}+{tmp_path / 'cut.tif'}") as raster,
        pytest.raises(TilenetError, match=r"everywhere \([^+]*cut.tif: rows 24 to 28"),
    ):
        raster.read(Window(24, 0, 5, WIDTH))


def test_names_with_plus_signs_are_found_where_they_lie(
    write_raster: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c++").mkdir()
    first, second = write_raster("c++/R+N.tif", band(1)), write_raster("G.tif", band(2))
    assert stacked_paths(first) == (first,)
    assert stacked_paths(f"{first}+{second}+{first}") == (first, second, first)
    with Raster(first) as one, Raster(f"{second}+{first}") as stack:
        assert np.array_equal(one.read(one.whole).values, band(1))
        assert np.array_equal(stack.read(stack.whole).values, np.concatenate([band(2), band(1)]))


def test_a_map_may_replace_no_file_of_a_stack(write_raster: Write) -> None:
    red, green = write_raster("R.tif", band(1)), write_raster("G.tif", band(2))
    for path in (red, green):
        with pytest.raises(TilenetError, match="a map may not replace its image"):
            check_target(path, overwrite=True, image=f"{red}+{green}")


# --- names


def test_bands_are_found_by_description_before_colour(write_raster: Write) -> None:
    values = np.concatenate([band(seed) for seed in range(5)])
    path = write_raster("a.tif", values, photometric="MINISBLACK")
    colours = [ColorInterp[n] for n in ("red", "green", "blue", "nir", "undefined")]
    describe(path, "B04", "", "Red ", "", "swir one", colours=colours)
    for asked, numbers in [
        (("b04",), (1,)),
        (("red",), (3,)),  # described so, although the first is coloured so
        (("NIR", "Green", "SWIR one"), (4, 2, 5)),
        ((2, "blue", 1, "b04"), (2, 3, 1, 1)),
    ]:
        with Raster(path, asked) as raster:
            assert raster.bands == numbers
            found = raster.read(raster.whole).values
        assert np.array_equal(found, values[[n - 1 for n in numbers]])


def test_files_of_a_stack_give_their_names(write_raster: Write) -> None:
    paths = [write_raster(f"T31U_{n}_10m.tif", band(i)) for i, n in enumerate(("B02", "B8A"))]
    describe(paths[1], "narrow")
    path = "+".join(paths)
    for asked, numbers in [(("b8a", "b02"), (2, 1)), (("narrow", "T31U_B02_10m"), (2, 1))]:
        with Raster(path, asked) as raster:
            assert raster.bands == numbers
    with pytest.raises(TilenetError, match=r"of one band \(bands: T31U, .*bands \[1, 2\]"):
        Raster(path, ("T31U",))
    with pytest.raises(TilenetError, match=r"has 1 T31U_B02_10m, 2 narrow; nearest: b02\)"):
        Raster(path, ("B03",))


def test_an_unknown_name_is_refused_with_those_there_are(write_raster: Write) -> None:
    path = write_raster("a.tif", np.concatenate([band(1), band(2), band(3)]))
    describe(path, "red", "nir", colours=[ColorInterp.gray] + [ColorInterp.undefined] * 2)
    said = r"\(bands: nri, .*a.tif has 1 red, 2 nir, 3 \(no name\); nearest: nir\); use one"
    with pytest.raises(TilenetError, match=said) as raised:
        Raster(path, (1, "nri"))
    assert "\n" not in str(raised.value)
    describe(path, "nir", "NIR")
    with pytest.raises(TilenetError, match=r"bands \[1, 2\] are called so\); give its number"):
        Raster(path, ("nir",))


def test_names_are_refused_where_there_are_none(write_raster: Write) -> None:
    path = write_raster("a.tif", np.concatenate([band(1), band(2)]))
    with pytest.raises(TilenetError, match=r"a.tif has 2 without names\); give numbers"):
        Raster(path, ("red",))


# --- real imagery


@pytest.mark.real
def test_four_files_of_one_band_are_an_image(real: Path) -> None:
    paths = [real / f"SN_Vegas_WV03-{name}.tif" for name in "RGBN"]
    with Raster("+".join(map(str, paths)), ("n", 2, "R")) as raster:
        assert raster.bands == (4, 2, 1)
        window = Window(-3, 100, 90, 80)
        found = raster.read(window).values
    for values, name in zip(found, "NGR", strict=True):
        with Raster(str(real / f"SN_Vegas_WV03-{name}.tif")) as one:
            assert np.array_equal(values, one.read(window).values[0])


@pytest.mark.real
def test_colours_and_descriptions_of_real_files_name_their_bands(real: Path) -> None:
    for name, asked, numbers in [
        ("pix4d_rgba_alpha.tif", ("blue", "RED"), (3, 1)),
        ("santa_monica_2020_91.tif", (4, "green"), (4, 2)),
        ("satsense_s2_4band_uint16.tif", ("layer_3", "Layer_1"), (3, 1)),
    ]:
        with Raster(str(real / name), asked) as raster:
            assert raster.bands == numbers
