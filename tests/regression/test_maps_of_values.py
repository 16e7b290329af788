"""Maps, scores and validations of a regression, held against numpy; and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from heights import Heights, heights, run_file, train_whole
from mpi4py import MPI

import tilenet
from tilenet.__main__ import main
from tilenet.data.labels.source import HeldOutLabels
from tilenet.data.labels.values import Values
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.library.whole_run import train
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.scores import number_scores, number_sums
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys

NAMES = "rmse", "mae", "bias", "r2"


def plainly(found: Any, truth: Any) -> list[float]:
    """The four scores as they are defined."""
    error = found - truth
    spread = np.mean((truth - truth.mean()) ** 2)
    square = np.mean(error**2)
    return [np.sqrt(square), np.mean(np.abs(error)), np.mean(error), 1 - square / spread]


@pytest.mark.ranks(1, 2, 3)
def test_run_validation_map_and_evaluation_say_the_same(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    of = heights(shared_path, write=comm.rank == 0)
    comm.Barrier()
    copy = shared_path / "held_out.tif"
    if comm.rank == 0:
        copy.write_bytes((of.scene.image).read_bytes())
        with rasterio.open(copy, "r+") as file:  # else it is the training image's copy
            file.update_tags(copy="yes")
    comm.Barrier()
    keys = ValidationKeys(images=str(copy), labels=str(shared_path / "heights.tif"))
    run = run_file(shared_path, of.scene, loss="huber", validation=keys)
    assert train(run, comm=comm) == 0
    path = shared_path / "map.tif"
    predict(Prediction(run.output, str(of.scene.image), str(path), tile_px=48), comm)
    wanted = train_whole(of, "huber")[2]
    with rasterio.open(path) as file:
        assert (file.count, file.dtypes, file.units) == (1, ("float64",), ("m",))
        assert file.descriptions == ("height",)
        assert np.isnan(file.nodata)
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert not file.tags(1)
        values = file.read(1)
    assert np.array_equal(np.isnan(values), ~of.scene.valid)
    assert np.abs(values - wanted)[of.scene.valid].max() <= 1e-12 * np.abs(wanted).max()
    counted = ~np.isnan(of.truth)
    scores = plainly(wanted[counted], of.truth[counted])
    found = tilenet.evaluate(path, shared_path / "heights.tif")
    assert isinstance(found, tilenet.NumberScores)
    assert [getattr(found, name) for name in NAMES] == pytest.approx(scores, rel=1e-12, abs=1e-12)
    assert (found.num_pixels, found.unit) == (int(counted.sum()), "m")
    with rasterio.open(shared_path / "heights.tif") as file:
        labelled = np.isfinite(file.read(1)) & (file.read(1) != file.nodata)
    assert found.num_unmapped == int((labelled & ~of.scene.valid).sum()) > 0
    table = tilenet.Run(run.output).validation
    assert [table[name][-1] for name in NAMES] == pytest.approx(scores, rel=1e-12, abs=1e-12)
    assert table["num_pixels"][-1] == found.num_pixels
    error = np.abs(wanted - of.truth)[counted]
    huber = np.where(error < 0.5, error**2 / 2, 0.5 * (error - 0.25)).mean()
    assert table["loss"][-1] == pytest.approx(huber, rel=1e-12)


def test_scores_of_numbers_far_from_0_keep_their_digits() -> None:
    rng = np.random.default_rng(2)
    truth = 1e9 + rng.normal(size=1001)
    found = truth + rng.normal(0.3, 0.5, 1001)
    pieces = [number_sums(found[a:b], truth[a:b]) for a, b in ((0, 7), (7, 500), (500, 1001))]
    scores = number_scores(pieces, 3)
    wanted = plainly(found - 1e9, truth - 1e9)
    assert [scores[name] for name in NAMES] == pytest.approx(wanted, rel=1e-9)
    assert (scores["num_pixels"], scores["num_unmapped"]) == (1001, 3)
    assert number_scores([number_sums(found[:5], np.full(5, 1e9))], 0)["r2"] is None


def test_labels_are_read_by_windows_and_averaged_as_the_image_is(
    tmp_path: Path, write_raster: Callable[..., str]
) -> None:
    of = heights(tmp_path, write=True)
    rows, cols = slice(20, 61), slice(70, 131)
    with Raster(str(of.scene.image)) as image, Values(str(tmp_path / "heights.tif"), image) as it:
        window = it.targets(Window(20, 70, 41, 61))
        assert np.array_equal(
            window[of.scene.valid[rows, cols]],
            of.truth[rows, cols][of.scene.valid[rows, cols]],
            equal_nan=True,
        )
        assert np.isnan(it.targets(Window(-2, 0, 2, 9))).all()
        assert np.array_equal(it.read(Window(20, 70, 41, 61)) == 0, ~np.isnan(window))
        hidden = HeldOutLabels(it, lambda window: np.eye(window.height, window.width) > 0)
        wanted = np.where(np.eye(41, 61) > 0, np.nan, window)
        assert np.array_equal(hidden.targets(Window(20, 70, 41, 61)), wanted, equal_nan=True)
        assert np.array_equal(hidden.counted(wanted), ~np.isnan(wanted))
    grid = {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
    numbers = np.array([[1, 2, 5, 5], [3, -1, 5, -1]], "int16")
    path = write_raster("numbers.tif", numbers[None], nodata=-1, **grid)
    coarse = write_raster("image.tif", np.ones((1, 2, 4), "uint8"), **grid)
    with Raster(coarse, resolution=4) as image, Values(path, image) as it:
        assert it.targets(Window(0, 0, 1, 2)).tolist() == [[2.0, 5.0]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"classes": ["a", "b"]}, r"one number per pixel .*classes: \['a', 'b'\]"),
        ({"ignore_index": 7}, r"only with task: classification \(ignore_index: 7, task"),
        ({"class_weights": "auto"}, r"classification \(class_weights: auto, task: regression\)"),
        ({"oversample": 0.5, "crop_px": 64}, r"classification \(oversample: 0.5, task: regr"),
        ({"vectors": VectorKeys(field="a")}, r"classification \(vectors.field: a, task: regr"),
        ({"loss": "ce"}, r"loss: ce, task: regression\)"),
        ({"huber_delta": 0.0}, r"above 0 \(huber_delta: 0.0\)"),
        ({"validation": ValidationKeys(share=0.2, score="mean_iou")}, "score: mean_iou"),
        ({"task": "classification", "classes": 2, "unit": None, "loss": "l1"}, "loss: l1"),
        ({"task": "classification", "classes": 2}, r"with task: regression \(unit: m, task: c"),
        ({"task": "classification", "unit": None}, "at least two classes"),
    ],
    ids=str,
)
def test_keys_of_the_other_task_are_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TilenetError, match=said):
        run_file(tmp_path, heights(tmp_path, write=False).scene, **keys)


def short_run(folder: Path, **more: Any) -> tuple[Heights, RunFile]:
    of = heights(folder, write=True)
    run = run_file(folder, of.scene, **({"steps": 1} | more))
    assert train(run) == 0
    return of, run


@pytest.mark.report
def test_maps_and_scores_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of, run = short_run(
        tmp_path, precision="float32", validation=ValidationKeys(share=0.2, block_px=64)
    )
    image, out, labels = str(of.scene.image), str(tmp_path / "m.tif"), str(tmp_path / "heights.tif")
    for output in ("classes", "probabilities", "logits"):
        with pytest.raises(TilenetError, match=f"mapped as values.*output: {output}.*regression"):
            tilenet.predict(run.output, image, out, output=output)
    assert main(["predict", run.output, image, out]) == 0
    with rasterio.open(out) as file:
        assert file.dtypes == ("float32",)
    capsys.readouterr()
    assert main(["evaluate", out, labels]) == 0
    assert "RMSE" in (told := capsys.readouterr().out)
    assert " m, " in told
    assert main(["evaluate", out, labels, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {*NAMES, "num_pixels", "unit"}
    with pytest.raises(TilenetError, match="numbers, which have no classes"):
        tilenet.evaluate(out, labels, ignore_index=3)
    page = (Path(run.output) / "report.html").read_text()
    assert "Of a regression no places are shown" in page
    assert "The best by rmse" in page
    assert main(["report", run.output]) == 0
    assert main(["info", image, "--labels", out]) in (0, 1)


def test_labels_on_another_grid_are_refused(
    tmp_path: Path, write_raster: Callable[..., str]
) -> None:
    of = heights(tmp_path, write=True)
    grid = {"crs": "EPSG:32630", "transform": rasterio.Affine(3, 0, 5e5, 0, -3, 4e6)}
    path = write_raster("other.tif", np.ones((1, 100, 100), "float32"), **grid)
    two = write_raster("two.tif", np.ones((2, 100, 100), "float32"), **grid)
    with Raster(str(of.scene.image)) as image:
        with pytest.raises(TilenetError, match="on the image's pixel grid"):
            Values(path, image)
        with pytest.raises(TilenetError, match=r"one band of numbers .*2 bands"):
            Values(two, image)


def test_a_record_without_a_task_is_of_classes(tmp_path: Path) -> None:
    _, run = short_run(tmp_path)
    entry = json.loads((Path(run.output) / "last" / "network.json").read_text())
    assert (entry.pop("task"), entry.pop("unit")) == ("regression", "m")
    record = NetworkRecord.from_json(entry)
    assert (record.task, record.unit) == ("classification", None)
    with pytest.raises(TilenetError, match="'x' is none of classification, regression"):
        NetworkRecord.from_json(entry | {"task": "x"})
