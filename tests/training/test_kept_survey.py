"""A survey is kept next to its run, and used where nothing changed that it depends on."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from left_by_runs import losses, same_tensors, weights
from mpi4py import MPI
from rasterio import shutil
from rasterio.vrt import WarpedVRT
from test_same_as_whole_image import NETWORKS, options_of, run_file, scenes_of

from tilenet.data import survey as module
from tilenet.data.holdout import HeldOut
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.fingerprint import files_beside
from tilenet.data.rasters.raster import Raster
from tilenet.data.survey_record import Survey, load_survey, save_survey
from tilenet.errors import AgreedError
from tilenet.geometry.halo import context_of
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.library.whole_run import train
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images import survey as kept_surveys
from tilenet.training.images.open import RunImages
from tilenet.training.images.survey import SURVEY, survey_key

pytestmark = pytest.mark.ranks(1, 2)

USED, ANEW = "statistics and labelled places are those of", "all pixels are looked at again"
Capture = pytest.CaptureFixture[str]


def a_run(comm: MPI.Intracomm, folder: Path) -> RunFile:
    scenes = scenes_of(folder, [(60, 77), (41, 52)], comm)
    run = run_file(folder, scenes, NETWORKS["same-bilinear"])
    return replace(run, crop_px=32, oversample=0.5, class_weights="auto", steps=2)


def said(comm: MPI.Intracomm, capfd: Capture) -> str:
    return "".join(comm.allgather(capfd.readouterr().err))


def as_written(run: RunFile) -> Any:
    return losses(run), weights(run)


def again(run: RunFile, comm: MPI.Intracomm, capfd: Capture) -> str:
    """What is said of the survey when the run is made once more."""
    capfd.readouterr()
    assert train(run, overwrite=True, comm=comm) == 0
    return said(comm, capfd)


def same(first: Any, second: Any) -> bool:
    return bool(first[0] == second[0]) and same_tensors(first[1], second[1])


@pytest.mark.ranks(1, 2, 4)
def test_what_is_kept_is_used_and_gives_the_same_bits(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    first, words = as_written(run), said(comm, capfd)
    assert USED not in words
    assert ANEW not in words
    before = (Path(run.output) / SURVEY).read_bytes()
    assert (
        oct((Path(run.output) / SURVEY).stat().st_mode)[-3:]
        == oct((Path(run.output) / "history.csv").stat().st_mode)[-3:]
    )

    def never(*rest: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(module, "survey", never)
        assert again(run, comm, capfd).count(USED) == 1
        assert same(as_written(run), first)
        assert train(replace(run, steps=3), resume=True, comm=comm) == 0
        assert said(comm, capfd).count(USED) == 1
    assert (Path(run.output) / SURVEY).read_bytes() == before
    # another network on the same grid looks at the same pixels
    wider = replace(run, network=replace(run.network, base=6))
    assert again(wider, comm, capfd).count(USED) == 1


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def turned_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))


def nothing_of_ours(path: Path) -> None:
    path.write_text("mean: 3")


@pytest.mark.parametrize("spoil", [truncated, turned_bit, nothing_of_ours])
def test_what_is_not_whole_is_made_again(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture, spoil: Callable[[Path], None]
) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    first = as_written(run)
    comm.Barrier()
    if comm.rank == 0:
        spoil(Path(run.output) / SURVEY)
    assert again(run, comm, capfd).count(f"{ANEW}: a survey's file must be whole") == 1
    assert same(as_written(run), first)
    assert again(run, comm, capfd).count(USED) == 1
    assert same(as_written(run), first)


def test_other_labels_are_looked_at_anew(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture
) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    first = as_written(run)
    if comm.rank == 0:
        with rasterio.open(run.label_paths[0], "r+") as file:
            file.write((file.read() + 1) % 3)
    comm.Barrier()
    assert again(run, comm, capfd).count(f"{ANEW}: files or keys are not those of") == 1
    assert not same(as_written(run), first)


def test_with_other_blocks_held_out_all_is_looked_at_anew(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture
) -> None:
    run = replace(a_run(comm, shared_path), network=NetworkKeys(poolings=1, base=4))
    run = replace(run, validation=ValidationKeys(share=0.2, block_px=24))
    assert train(run, comm=comm) == 0
    first = as_written(run)
    assert again(run, comm, capfd).count(USED) == 1
    assert same(as_written(run), first)
    other = replace(run, validation=ValidationKeys(share=0.3, block_px=24))
    assert again(other, comm, capfd).count(ANEW) == 1
    assert not same(as_written(run), first)


def test_what_is_wrong_is_not_kept_and_stays_wrong(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture
) -> None:
    run = replace(a_run(comm, shared_path), classes=2, class_weights=None)
    for _ in range(2):
        with pytest.raises(AgreedError, match="labels must be 0 to classes"):
            train(run, comm=comm)
        assert not list(Path(run.output).glob("survey*"))


def test_a_survey_that_cannot_be_kept_stops_no_run(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture
) -> None:
    run = a_run(comm, shared_path)
    if comm.rank == 0:
        (Path(run.output) / SURVEY / "in the way").mkdir(parents=True)
    comm.Barrier()
    assert train(run, comm=comm) == 0
    words = said(comm, capfd)
    assert words.count("the survey of the images is not kept, and will be made again") == 1
    assert not list(Path(run.output).glob("*.part"))


CHANGES: dict[str, dict[str, Any]] = {
    "bands": {"bands": [1, 2]},
    "order of bands": {"bands": [2, 1, 3]},
    "resolution": {"resolution": 4.0},
    "nodata": {"nodata": 7.0},
    "no nodata": {"nodata": "none"},
    "classes": {"classes": 4},
    "ignore_index": {"ignore_index": 254},
    "vectors": {"vectors": VectorKeys(all_touched=True)},
}
SAME: dict[str, dict[str, Any]] = {
    "seed": {"seed": 9},
    "length": {"steps": 99},
    "network": {"network": NETWORKS["valid"]},
    "validation": {"validation": ValidationKeys(batch_size=2, every=3)},
}


@pytest.mark.ranks(1)
def test_the_key_tells_whatever_a_survey_depends_on(shared_path: Path) -> None:
    run = a_run(MPI.COMM_SELF, shared_path)
    first = key_of(run)
    assert first is not None
    keys = {name: key_of(replace(run, **change)) for name, change in CHANGES.items()}
    assert None not in keys.values()
    assert len({first, *keys.values()}) == 1 + len(CHANGES)
    assert {key_of(replace(run, **change)) for change in SAME.values()} == {first}
    assert key_of(run, options_of(NETWORKS["same-nearest"])) != first  # alignment 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_surveys, "VERSION", 3)  # kept percentiles, and other last bits
        assert key_of(run) != first
    # What is hidden from training, and how far around it
    chosen = [np.zeros((3, 4), bool), np.zeros((3, 3), bool)]
    held = [HeldOut(20, ((60, 77), (41, 52)), tuple(one.copy() for one in chosen))]
    for number, place in enumerate([(0, 0), (0, 1), (1, 0)]):
        chosen[number > 1][place] = True
        held.append(HeldOut(20, held[0].sizes, tuple(one.copy() for one in chosen)))
    held.append(replace(held[-1], block_px=21))
    hiding = {key_of(run, held_out=one) for one in held}
    wider = replace(options_of(run.network), convolutions=3)
    assert key_of(run, wider) == first
    hiding.add(key_of(run, wider, held[-1]))
    assert len({first, *hiding}) == 2 + len(held)
    turned = replace(run, images=run.image_paths[::-1], labels=run.label_paths[::-1])
    assert key_of(turned) != first
    image, seen = Path(run.image_paths[1]), {first}
    # sizes, dates, and what lies next to a file
    os.utime(image, ns=(0, image.stat().st_mtime_ns + 1))
    seen.add(key_of(run))
    with rasterio.open(image) as file:
        mask = np.full(file.shape, 255, np.uint8)
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False),
        rasterio.open(image, "r+") as file,
    ):
        file.write_mask(mask)
    seen.add(key_of(run))
    assert len(seen) == 3
    os.utime(f"{image}.msk", ns=(0, 1))
    seen.add(key_of(run))
    assert len(seen) == 4
    assert None not in seen


@pytest.mark.ranks(1)
def test_the_key_tells_rasters_of_one_file_apart(shared_path: Path) -> None:
    run = a_run(MPI.COMM_SELF, shared_path)
    path, label = run.image_paths[0], run.label_paths[0]
    apart = [
        replace(run, images=f"vrt://{path}?bands={bands}", labels=label, bands=None)
        for bands in ("1", "2", "1,2", "2,1")
    ]
    keys = [key_of(one) for one in apart]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("of", ["images", "labels"])
def test_the_key_tells_what_a_file_of_files_reads(shared_path: Path, of: str) -> None:
    """GDAL names the files of the outer one alone."""
    run = a_run(MPI.COMM_SELF, shared_path)
    run = replace(run, images=run.image_paths[0], labels=run.label_paths[0])
    path = getattr(run, of)
    for name in ("inner.vrt", "outer.vrt"):
        with rasterio.open(path) as file, WarpedVRT(file) as warped:
            path = str(shared_path / name)
            shutil.copy(warped, path, driver="VRT")
    changed = replace(run, **{of: path})
    keys = [key_of(changed)]
    os.utime(getattr(run, of), ns=(0, 1))
    keys.append(key_of(changed))
    assert None not in keys
    assert keys[0] != keys[1]


def test_polygons_of_a_virtual_file_have_no_identity(tmp_path: Path) -> None:
    assert files_beside(str(tmp_path / "polygons.vrt")) == ()


def key_of(
    run: RunFile, options: UNetOptions | None = None, held_out: HeldOut | None = None
) -> str | None:
    options = options or options_of(NETWORKS["same-bilinear"])
    with ExitStack() as stack:
        images = [
            stack.enter_context(Raster(path, run.bands, run.resolution, run.nodata))
            for path in run.image_paths
        ]
        pairs = zip(run.label_paths, images, strict=True)
        labels = [stack.enter_context(Labels(path, image, 255)) for path, image in pairs]
        context = context_of(unet_layers(options))
        opened = RunImages(images, labels, [], [], held_out)
        return survey_key(opened, context, context.alignment_px, run.reading)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_survey_without_a_deviation_is_not_used(shared_path: Path, wrong: float) -> None:
    """Older versions kept such ones, and trained on zeros."""
    numbers = (0.5, 2.0)
    found = Survey(99, numbers, numbers, numbers, numbers, (40, 59), ())
    path = shared_path / SURVEY
    save_survey(found, path, "key")
    kept = load_survey(path, "key")
    assert kept is not None
    assert kept.std == numbers
    for name in ("mean", "std"):
        save_survey(replace(found, **{name: (0.5, wrong)}), path, "key")
        assert load_survey(path, "key") is None
