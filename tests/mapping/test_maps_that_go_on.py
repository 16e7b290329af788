"""Maps that are interrupted: what is done is kept, true, and gone on with, or started over."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rasterio
from maps_of_tests import CLASSES, SCORES, Write, like, values_of, write_in_tiles, written

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.journal import MapJournal, Part
from tilenet.mapping.writer import MapKind, MapWriter


def going_on(path: Path, source: Raster, kind: MapKind = CLASSES, **made_of: object) -> MapWriter:
    return MapWriter(str(path), source, kind, made_of={"weights": "ab12", **made_of})


@pytest.mark.parametrize("kind", [CLASSES, SCORES])
@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_map_goes_on_where_it_was_interrupted(
    tmp_path: Path, write_raster: Write, kind: MapKind, error: BaseException
) -> None:
    size, path = (700, 1101), tmp_path / "out" / "map.tif"
    path.parent.mkdir()
    values = values_of(kind, size)
    halves = Window(0, 0, 333, 1101), Window(333, 0, 367, 1101)
    with like(write_raster, size) as source:
        for number, half in enumerate(halves):
            stops = pytest.raises(type(error)) if number == 0 else contextlib.nullcontext()
            with stops, going_on(path, source, kind) as writer:
                assert writer.done.tiles == set(range(5 * number))
                writer.write(half, values[:, half.row : half.row + half.height])
                writer.keep([0, 1, 2])
                writer.keep([3, 4])
                writer.keep_sums("7", {"mean": [0.1, 1 / 3, 5e-324]})
                if number == 0:
                    raise error
                assert writer.done.sums == {"7": {"mean": [0.1, 1 / 3, 5e-324]}}
                writer.finish()
            left = [".map.tif.journal.part", ".map.tif.raw.part"]
            assert sorted(os.listdir(path.parent)) == (written(kind) if number else left)
    with rasterio.open(path) as file:
        assert np.array_equal(file.read(), values, equal_nan=kind is SCORES)
        assert file.descriptions == (kind.classes if kind is SCORES else (None,))


def test_the_disk_holds_tiles_before_the_journal_says_so(
    tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, seen = values_of(CLASSES, (700, 1101)), []
    add, fsync, synced = MapJournal.add_tiles, os.fsync, []
    raw = tmp_path / ".map.tif.raw.part"

    def sync(handle: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def look(journal: MapJournal, tiles: list[int], parts: list[Part]) -> None:
        assert synced[-1] == str(raw)
        with rasterio.open(raw) as file:
            seen.append(file.read())
        add(journal, tiles, parts)

    monkeypatch.setattr(MapJournal, "add_tiles", look)
    monkeypatch.setattr(os, "fsync", sync)
    with (
        like(write_raster, (700, 1101)) as source,
        going_on(tmp_path / "map.tif", source) as writer,
    ):
        assert synced[-2:] == [str(raw), str(tmp_path / ".map.tif.journal.part")]
        write_in_tiles(writer, values, 240)  # parts of blocks, which GDAL keeps for itself
        writer.keep([0])
    assert np.array_equal(seen[0], values)


def change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def change_line(journal: Path, number: int, line: str | int) -> None:
    """A line of the journal becomes another text, or what another line is."""
    lines = journal.read_text().splitlines(keepends=True)
    lines[number] = lines[line] if isinstance(line, int) else line
    journal.write_text("".join(lines))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda raw, journal: raw.unlink(), "gone"),
        (lambda raw, journal: os.truncate(raw, 1000), "damaged: its header"),
        (
            lambda raw, journal: change_byte(raw, -(512 * 512) + 5),
            "its pixels .*rows 333 to 699",
        ),
        (lambda raw, journal: change_byte(raw, -(512 * 512 * 6) + 7), "rows 0 to 332, columns 0"),
        (lambda raw, journal: change_byte(raw, 0), "damaged: its header"),
        (lambda raw, journal: change_byte(raw, 200), "damaged: its header"),
        (lambda raw, journal: journal.write_text("no JSON\n"), "do not follow"),
        (lambda raw, journal: journal.write_bytes(b"\xff\xfe\n[1]\n"), "do not follow"),
        (lambda raw, journal: journal.write_text("[" * 10**5 + "\n"), "do not follow"),
        (lambda raw, journal: change_line(journal, 2, ""), "do not follow"),
        (lambda raw, journal: change_line(journal, 3, '{"tiles": [1, 2]}\n'), "do not follow"),
        (lambda raw, journal: change_line(journal, 3, 2), "do not follow"),
        (lambda raw, journal: journal.write_text(""), "not begun"),
        (lambda raw, journal: journal.unlink(), ""),
    ],
)
def test_what_cannot_be_gone_on_with_is_begun_anew(
    tmp_path: Path, write_raster: Write, spoil: Callable[[Path, Path], None], why: str
) -> None:
    path = tmp_path / "map.tif"
    raw, journal = tmp_path / ".map.tif.raw.part", tmp_path / ".map.tif.journal.part"
    with like(write_raster, (700, 1101)) as source:
        values = values_of(CLASSES, source.size)
        with going_on(path, source) as writer:
            writer.write(Window(0, 0, 333, 1101), values[:, :333])
            writer.keep([0])
            writer.write(Window(333, 0, 367, 1101), values[:, 333:])
            writer.keep([1])
            writer.keep_sums("1", {"mean": [0.5]})
        spoil(raw, journal)
        with going_on(path, source) as writer:
            assert re.search(why, writer.why_anew), writer.why_anew
            assert bool(writer.why_anew) == bool(why)
            assert writer.done.tiles == set()
        with rasterio.open(raw) as file:
            assert (file.read() == 255).all()


def test_a_map_made_of_something_else_is_begun_anew(tmp_path: Path, write_raster: Write) -> None:
    path = tmp_path / "map.tif"
    with like(write_raster, (70, 90)) as source:
        with going_on(path, source, halo=(1, 2)) as writer:
            writer.keep([0])
        with going_on(path, source, halo=(1, 2)) as writer:
            assert (writer.done.tiles, writer.why_anew) == ({0}, "")
        for made_of, why in ({"halo": (1, 3)}, "halo"), ({}, "halo"), ({"tile": 3}, "tile"):
            with going_on(path, source, **made_of) as writer:
                assert writer.why_anew == f"of something else: {why}"
                writer.keep([0])
            # ({} was begun by halo (1, 3), tile by {})
        # One that cannot be interrupted leaves nothing to go on with.
        with MapWriter(str(path), source, CLASSES):
            # Not even if it is killed: its pixels are not those that the journal speaks of.
            assert not (tmp_path / ".map.tif.journal.part").exists()
        with going_on(path, source, tile=3) as writer:
            assert writer.done.tiles == set()


def test_nodata_that_is_nan_is_the_same_nodata(tmp_path: Path, write_raster: Write) -> None:
    path = tmp_path / "map.tif"
    with like(write_raster, (70, 90)) as source:
        for done in (set(), {0}):
            with going_on(path, source, nodata=float("nan")) as writer:
                assert (writer.done.tiles, writer.why_anew) == (done, "")
                writer.keep([0])


def test_a_line_that_was_cut_off_is_as_if_it_were_not_there(
    tmp_path: Path, write_raster: Write
) -> None:
    path, journal = tmp_path / "map.tif", tmp_path / ".map.tif.journal.part"
    with like(write_raster, (70, 90)) as source:
        for number in range(3):
            with going_on(path, source) as writer:
                assert writer.done.tiles == set(range(number))
                writer.keep([number])
            with open(journal, "a") as file:
                file.write('{"tiles": [77')


def test_a_full_disk_keeps_what_is_done(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    """There is room for the pixels, but not for the finished map next to them."""
    kind = SCORES
    values = values_of(kind, (700, 1101))
    with like(write_raster, (700, 1101)) as source:
        path = small_disk(13000) / "map.tif"
        with going_on(path, source, kind) as writer:
            write_in_tiles(writer, values, 240)
            writer.keep([0, 1])
            with pytest.raises(TilenetError, match="room there and go on with --resume, or"):
                writer.finish()
        left = [".map.tif.journal.part", ".map.tif.raw.part"]
        assert sorted(os.listdir(path.parent)) == left
        subprocess.run(["mount", "-o", "remount,size=40000k", str(path.parent)], check=True)
        with going_on(path, source, kind) as writer:
            assert writer.done.tiles == {0, 1}
            writer.finish()
        with rasterio.open(path) as file:
            assert np.array_equal(file.read(), values, equal_nan=True)


def test_a_disk_that_is_too_small_is_known_before_the_first_tile(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    with like(write_raster, (700, 1101)) as source:
        path = small_disk(5000) / "map.tif"
        with pytest.raises(TilenetError, match="make room there or choose"):
            going_on(path, source, SCORES)
        assert os.listdir(path.parent) == []
