"""What runs leave and go on from, spoilt: it is found, or it is still what was written."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from hostile import few, noisy, said, written
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from tilenet.data.rasters.raster import Raster
from tilenet.data.survey_record import Survey, load_survey, save_survey
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.writing import cog, tiff_header, writer
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.resume import MapResume
from tilenet.mapping.writing.writer import MapWriter
from tilenet.parallel.health.signals import StopRequests
from tilenet.storage.checkpoints import FILES, Checkpoint, save_checkpoint
from tilenet.storage.whole_checkpoint import checked_checkpoint, newest_whole

pytestmark = pytest.mark.filterwarnings("ignore")

KIND = MapKind(1, "uint8", 255, ("sea", "land"))
SIDE = 64
PIXELS = np.random.default_rng(5).integers(0, 2, (1, SIDE, SIDE)).astype("uint8")
TILES = [Window(0, 0, 30, SIDE), Window(30, 0, 34, 30), Window(30, 30, 34, 34)]
MADE_OF = {"the weights": "ab12", "nodata": float("nan"), "the tiles": [[0, 1], [2, 3]]}
SURVEY = Survey(
    *(4096, (1.5,), (0.5,), (0.0,), (3.0,), (7, 9)),
    (np.arange(64, dtype=np.uint8).reshape(1, 8, 8),),
)
KEY = "0123456789abcdef"


def pixels_of(window: Window) -> Any:
    return PIXELS[
        :, window.row : window.row + window.height, window.col : window.col + window.width
    ]


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map of which two of three tiles are done."""
    return interrupted(tmp_path_factory.mktemp("rest"), TILES[:2])


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A map whose tiles, 16 of its own and 5 of its overviews, are all compressed."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cog, tiff_header, writer):
            patch.setattr(module, "BLOCK_PX", 16)
        with pytest.MonkeyPatch.context() as full:
            full.setattr(writer, "put_map", out_of_room)
            folder = interrupted(tmp_path_factory.mktemp("compressed"), TILES)
        yield folder


def out_of_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def interrupted(made: Path, tiles: list[Window]) -> Path:
    """A map of which some tiles are done; where those are all, it could not be finished."""
    size = {"driver": "GTiff", "count": 1, "height": SIDE, "width": SIDE, "dtype": "uint8"}
    with rasterio.open(made / "image.tif", "w", **size) as file:
        file.write(PIXELS)
    with (
        Raster(str(made / "image.tif")) as image,
        MapWriter(str(made / "map.tif"), image, KIND, made_of=MADE_OF) as writer,
    ):
        for window in tiles:
            writer.write(window, pixels_of(window))
        writer.write_sums("3", {"tiles": 1, "values": [0.5, 1 / 3]})
        if tiles == TILES:
            with pytest.raises(TilenetError, match="No space left"):
                writer.finish()
    return made


def go_on(rest: Path) -> None:
    """Go on as prediction does: the map has every tile's pixels, whatever was left of it."""
    with (
        Raster(str(rest / "image.tif")) as image,
        MapWriter(str(rest / "map.tif"), image, KIND, made_of=MADE_OF) as writer,
    ):
        assert writer.why_restarted.isprintable()
        sums = MapResume(MPI.COMM_SELF, writer, StopRequests()).sums(3)
        assert isinstance(sums[0], int)
        for window in filter(writer.lacks, TILES):
            writer.write(window, pixels_of(window))
        writer.finish()
    with rasterio.open(rest / "map.tif") as file:
        assert np.array_equal(file.read(), PIXELS)


@pytest.mark.parametrize("name", ["made_of.json", "sums-3.json"])
@few
@given(data=st.data())
def test_rests_of_maps_of_noise(rest: Path, name: str, data: st.DataObject) -> None:
    go_on_spoilt(rest, name, data)


@few
@given(data=st.data())
def test_records_of_compressed_tiles_of_noise(compressed: Path, data: st.DataObject) -> None:
    go_on_spoilt(compressed, "compressed.json", data)


def go_on_spoilt(rest: Path, name: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        shutil.copytree(rest, folder, dirs_exist_ok=True)
        aside = Path(folder, ".map.tif.pieces.part")
        written(aside, name, data.draw(noisy((aside / name).read_bytes())))
        said(lambda: go_on(Path(folder)))


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("survey") / "good.safetensors"
    save_survey(SURVEY, path, KEY)
    return path


@few
@given(data=st.data())
def test_surveys_of_noise(survey: Path, data: st.DataObject) -> None:
    path = written(survey.parent, "spoilt", data.draw(noisy(survey.read_bytes())))

    def use() -> None:
        found = load_survey(path, KEY)
        # None: of another key, which is a text of the header.
        assert found is None or repr(found) == repr(SURVEY)

    said(use)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    made = tmp_path_factory.mktemp("run")
    tensors = {"0.weight": torch.arange(12.0).reshape(3, 4)}
    for step in (1, 2):
        save_checkpoint(made, step, Checkpoint(tensors, {"a": [1, 2]}, tensors))
    return made


@pytest.mark.parametrize("name", [*FILES, "checksums.json"])
@few
@given(data=st.data())
def test_checkpoints_of_noise(run: Path, name: str, data: st.DataObject) -> None:
    """The spoilt one is not gone on from, unless only the words about its sums have other forms."""
    place = run / "checkpoints" / "step-00000002"
    good = (place / name).read_bytes()
    spoiled = data.draw(noisy(good))
    try:
        written(place, name, spoiled)

        def use() -> None:
            going_on = newest_whole(run)
            assert going_on.checkpoint is not None
            if going_on.checkpoint.resolve() == place and name in FILES:
                assert spoiled == good

        assert said(use) is None
        said(lambda: checked_checkpoint(run))
    finally:
        (place / name).write_bytes(good)
