"""Runs on many images of any size, CRS and resolution, and on as many open files."""

import json
import os
import resource
import shutil
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from left_by_runs import alone, check_close
from mpi4py import MPI
from rasterio import shutil as shutil_of_rasterio
from test_same_as_whole_image import run_file, scenes_of
from unlike_scenes import KEYS, NETWORK, mixed_scenes, write

from tilenet.__main__ import main
from tilenet.data.rasters import handles
from tilenet.data.survey import survey
from tilenet.errors import AgreedError, TilenetError
from tilenet.library.whole_run import train
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.config.keys import MeshKeys
from tilenet.training.config.read import with_listed_images
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images import open as open_module
from tilenet.training.images.open import open_images


@pytest.mark.ranks(2)
def test_a_list_is_read_once_and_a_block_of_its_images_held_out(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenes = mixed_scenes(shared_path, comm)
    path = shared_path / "list.csv"
    if comm.rank == 0:
        rows = zip(scenes, ("train", "val", "train"), strict=True)
        text = "".join(f"{s.image.name},{s.labels.name},{split}\n" for s, split in rows)
        path.write_text(f"image,label,split\n{text}gone.tif,,test\n")
    comm.Barrier()
    arguments = [
        *("train", "--images", str(path), "--classes", "3", "--steps", "1", "--batch_size", "2"),
        *("--output", str(shared_path / "run"), "--device", "cpu", "--validation.share", "0.1"),
        *("--validation.block_px", "33", "--network.poolings", "2", "--network.base", "4"),
        *("--network.convolutions", "1", "--network.norm", "instance", "--mesh.replicas", "2"),
    ]
    assert main(arguments) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("2 images to train on, 1 for validation, 1 for test; those for test") == 1
    assert said.count("2 of 24 blocks of 33 px are held out; training leaves out labels w") == 1
    assert said.count("the statistics of norms (image) are of held-out pixels as well") == 1
    assert "held-out blocks have no pixel" not in said
    assert main([*arguments, "--overwrite", "--validation.block_px", "24"]) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("held-out blocks have no pixel whose network looks at held-out pixels o") == 1
    if comm.rank == 0:
        path.write_text("image,label\nimage0.tif,\n")
    comm.Barrier()
    assert main([*arguments, "--overwrite"]) == 1
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("each entry of a list names a file for its label") == 1


@pytest.mark.real
@pytest.mark.ranks(3)
def test_a_list_of_real_scenes(comm: MPI.Intracomm, shared_path: Path, real: Path) -> None:
    """Several CRSs, pixels of 0.3 to 5 m, 8 and 16 bits, a stack, polygons in degrees."""
    town = "massachusetts_23429155_15"
    vegas = "+".join(str(real / f"SN_Vegas_WV03-{band}.tif") for band in "RGB")
    rows = (
        (real / "SN7_int16_4band.tif", real / "SN7_buildings.geojson"),
        (real / f"{town}_uint16.tif", real / f"{town}.gpkg"),
        (vegas, real / "SN_Vegas_WV03.gpkg"),
    )
    path = shared_path / "list.csv"
    if comm.rank == 0:
        path.write_text("\n".join(["image;label", *(f"{image};{label}" for image, label in rows)]))
    comm.Barrier()
    run = RunFile(
        images=str(path),
        classes=2,
        output=str(shared_path / "run"),
        bands=[1, 2, 3],
        nodata="none",
        crop_px=64,
        batch_size=3,
        steps=2,
        network=NETWORK,
        precision="float64",
        device="cpu",
        class_weights="auto",
        validation=ValidationKeys(share=0.2, block_px=128),
    )
    run, notes = with_listed_images(run)
    assert notes == [f"{path}: 3 images to train on"]
    assert train(run, comm=comm) == 0
    check_close(run, alone(run, comm))


@pytest.mark.ranks(2, 3)
def test_a_file_that_another_node_sees_differently_is_named(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank its own folder, as if on its own node."""
    monkeypatch.setattr(open_module, "ranks_of_node", lambda comm: comm.Split(comm.rank))
    mine = shared_path / str(comm.rank)
    mine.mkdir()
    scenes = scenes_of(mine, [(60, 77)] * 2, MPI.COMM_SELF)
    run = run_file(mine, scenes, NETWORK, mesh=MeshKeys(comm.size, 1, 1))
    run = replace(run, steps=1, output=str(shared_path / "run"))
    assert train(run, comm=comm) == 0  # the same files in other folders
    last = comm.size - 1
    if comm.rank == last:
        with scenes[1].labels.open("ab") as file:
            file.write(b"\0")
    size = scenes[1].labels.stat().st_size
    size = comm.bcast(size, root=last)
    said = rf"\(.*0/labels2\.tif on rank 0: {size - 1} bytes, 60 × 77 px, 1 × uint8; "
    with pytest.raises(AgreedError, match=rf"{said}.*labels2\.tif on rank {last}: {size} bytes"):
        train(run, overwrite=True, comm=comm)


@pytest.mark.ranks(2)
def test_a_run_goes_on_with_the_files_that_it_began_with(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, [(60, 77)] * 3, comm)
    run = replace(run_file(shared_path, scenes[:2], NETWORK), batch_size=1)
    assert train(replace(run, steps=1), comm=comm) == 0
    run_of_3 = run_file(shared_path, scenes, NETWORK)
    with pytest.raises(AgreedError, match=r"as it began \(files of .*: 4 files, .*: 6 files, "):
        train(replace(run_of_3, batch_size=1), resume=True, comm=comm)
    swapped = replace(run, images=run.images[::-1], labels=run.labels[::-1])  # type: ignore[index]
    with pytest.raises(AgreedError, match=r"as it began \(files of "):
        train(swapped, resume=True, comm=comm)
    with pytest.raises(AgreedError, match=r"\(held_out of .*: None, .*: 0\.1.* of blocks of 33 px"):
        train(replace(run, validation=replace(KEYS, share=0.125)), resume=True, comm=comm)
    moved = shared_path / "moved"
    if comm.rank == 0:
        moved.mkdir()
        for scene in scenes[:2]:
            shutil.move(scene.image, moved)
            shutil.move(scene.labels, moved)
    comm.Barrier()
    run = replace(
        run,
        images=[str(moved / scene.image.name) for scene in scenes[:2]],
        labels=[str(moved / scene.labels.name) for scene in scenes[:2]],
    )
    assert train(replace(run, steps=2), resume=True, comm=comm) == 0
    progress = json.loads((Path(run.output) / "last" / "progress.json").read_text())
    assert progress["files"].startswith("4 files, ")
    assert progress["held_out"] is None
    assert train(run, resume=True, comm=comm) == 0


@pytest.mark.ranks(2)
def test_files_of_one_name_are_told_apart_by_their_folders(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """Of one size and header, so that nothing else tells them apart."""
    folders = shared_path / "2020", shared_path / "2021"
    if comm.rank == 0:
        scenes = scenes_of(shared_path, [(60, 77)] * 2, MPI.COMM_SELF)
        for folder, scene in zip(folders, scenes, strict=True):
            folder.mkdir()
            shutil.move(scene.image, folder / "image.tif")
            shutil.move(scene.labels, folder / "labels.tif")
        size = (folders[0] / "image.tif").stat().st_size
        assert size == (folders[1] / "image.tif").stat().st_size
    comm.Barrier()

    def a_run(train_on: Path, score_on: Path, steps: int) -> RunFile:
        held_out = ValidationKeys(str(score_on / "image.tif"), str(score_on / "labels.tif"))
        return RunFile(
            images=str(train_on / "image.tif"),
            labels=str(train_on / "labels.tif"),
            classes=3,
            output=str(shared_path / "run"),
            steps=steps,
            network=NETWORK,
            device="cpu",
            validation=held_out,
        )

    assert train(a_run(*folders, 1), comm=comm) == 0
    with pytest.raises(AgreedError, match=r"as it began \(folders of "):
        train(a_run(*folders[::-1], 2), resume=True, comm=comm)
    moved = [shared_path / "moved" / folder.name for folder in folders]
    progress = shared_path / "run" / "last" / "progress.json"
    if comm.rank == 0:
        moved[0].parent.mkdir()
        for folder in folders:
            shutil.move(folder, moved[0].parent)
    comm.Barrier()
    assert train(a_run(*moved, 2), resume=True, comm=comm) == 0
    if comm.rank == 0:  # as older versions wrote it
        terms = json.loads(progress.read_text())
        assert terms.pop("folders")
        progress.write_text(json.dumps(terms))
        (progress.parent / "checksums.json").unlink()
    comm.Barrier()
    assert train(a_run(*moved, 3), resume=True, comm=comm) == 0


@pytest.mark.ranks(1)
def test_images_that_do_not_go_together_are_refused(comm: MPI.Intracomm, shared_path: Path) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes, NETWORK)
    os.symlink(scenes[1].image, shared_path / "link.tif")
    os.link(scenes[1].image, shared_path / "hard.tif")
    linked, hard = (
        ValidationKeys(str(shared_path / name), str(scenes[1].labels))
        for name in ("link.tif", "hard.tif")
    )
    names, labels = run.image_paths, run.label_paths
    shutil_of_rasterio.copy(names[1], shared_path / "virtual.vrt", driver="VRT")
    virtual, plain = (
        ValidationKeys(str(shared_path / name), labels[1]) for name in ("virtual.vrt", "image1.tif")
    )
    red = shared_path / "red.tif"
    with rasterio.open(scenes[0].image) as file:
        grid = {"crs": file.crs, "transform": file.transform, "driver": "GTiff"}
        write(red, file.read([1]), **grid)
        green = shared_path / "green.tif"
        write(green, file.read([2]), **grid)
    one_band = ValidationKeys(str(red), str(scenes[0].labels))
    none, third = ValidationKeys(), ValidationKeys(names[2], labels[2])
    large = ValidationKeys(share=0.1, block_px=200)
    twice, bands = [*names, f"{shared_path}/./image0.tif"], [f"{red}+{green}", f"{green}+{red}"]
    for images, truth, validation, resolution, said in (
        # images, labels, validation and resolution of the run; what is said
        (names, labels, none, 2.0, r" 2, .*image0\.tif: metres, .*image1\.tif: degrees\)"),
        (names[1], labels[1], third, 3e-6, r"1\.tif: degrees, .*2\.tif: .* 0\.30480061 m\)"),
        (names, labels, linked, None, r"not both \(.*link\.tif\)"),
        (names, labels, hard, None, r"not both \(.*hard\.tif\)"),
        (names, labels, virtual, None, r"not both \(.*virtual\.vrt reads .*image1\.tif\)"),
        (str(virtual.images), labels[1], plain, None, r"not both \(.*virtual\.vrt reads "),
        (names[1:], labels[1:], one_band, None, r"\(.*: 3, .*: 1\)"),
        (twice, [*labels, labels[0]], KEYS, None, r"image once \(.*image0\.tif: several"),
        (bands, [labels[0]] * 2, KEYS, None, r"image once \(.*/green\.tif: several"),
        (names[0], labels[0], large, None, r"blocks: 1, with labels: 1\)"),
        ("list.csv", None, none, None, r"are read before .*images: list\.csv\)"),
        (names, labels, ValidationKeys(share=0.95, block_px=12), None, "no others are left"),
    ):
        keys = {"images": images, "labels": truth, "validation": validation}
        with pytest.raises(AgreedError, match=said) as raised:
            train(replace(run, **keys, resolution=resolution), comm=comm)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("limits", "count", "wanted"),
    [
        ((256, 4096), 300, 1264),
        ((256, 1000), 900, 1000),
        ((256, resource.RLIM_INFINITY), 5000, 20064),
        ((1264, 4096), 300, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, None),
    ],
)
def test_the_limit_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], count: int, wanted: int | None
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: found.append(pair))
    handles.allow_open_files(count)
    assert found == ([] if wanted is None else [(wanted, limits[1])])


def test_more_files_than_the_system_allows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1000))
    with pytest.raises(TilenetError, match=r"\(files: 937, the system allows: 1000\)"):
        handles.allow_open_files(937)


def noted_openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of all rasters that are opened from now on, as often as they are."""
    paths: list[str] = []

    def noted(path: str, *more: Any, real: Any = rasterio.DatasetReader, **options: Any) -> Any:
        paths.append(path)
        return real(path, *more, **options)

    monkeypatch.setattr(rasterio, "DatasetReader", noted)
    return paths


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("most", "latest"), [(18, 18), (8, 2), (8, 8), (1, 2)])
def test_files_stay_open_from_header_to_survey(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    latest: int,
) -> None:
    """All where they are few enough; of more, those that were opened first."""
    scenes = scenes_of(shared_path, [(20 + number, 30) for number in range(9)], comm)
    run = run_file(shared_path, scenes, NETWORK)
    monkeypatch.setattr(handles, "MOST_OPEN", most)
    monkeypatch.setattr(handles, "LATEST", latest)
    monkeypatch.setattr(handles, "RECENT", OrderedDict())  # none that another test left open
    paths = noted_openings(monkeypatch)
    with ExitStack() as stack:
        opened = open_images(run, stack, RankControl(comm))
        mine = len(paths)
        seen = survey(opened.images, opened.labels, 3, 4, RankControl(comm))
        assert len(handles.RECENT) <= most
        again = len(paths) - mine
        pixels = [image.read(image.whole) for image in opened.images]
    band = np.concatenate([part.values[0][part.valid] for part in pixels])
    assert (seen.num_valid, seen.mean[0]) == (band.size, pytest.approx(band.mean()))
    assert mine == len(range(comm.rank, 9, comm.size)) * 2
    assert again <= (mine - max(most - latest, 0) if mine > most else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broken", [None, 7])
def test_ranks_of_a_node_share_the_headers(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: int | None,
) -> None:
    """Each file is opened once on all ranks together; a bad one is named by all of them."""
    scenes = scenes_of(shared_path, [(20 + number, 30) for number in range(9)], comm)
    run = run_file(shared_path, scenes, NETWORK)
    if broken is not None and comm.rank == 0:
        scenes[broken].image.write_bytes(b"II*\0broken")
    comm.Barrier()
    paths = noted_openings(monkeypatch)
    with ExitStack() as stack:
        if broken is not None:
            with pytest.raises(AgreedError, match=r"file that GDAL can open \(.*image8\.tif"):
                open_images(run, stack, RankControl(comm))
            return
        opened = open_images(run, stack, RankControl(comm))
        every = sorted(chain(*comm.allgather(paths)))
        assert every == sorted(str(path) for s in scenes for path in (s.image, s.labels))
        assert len(paths) <= 2 * 5
        for image, labels, scene in zip(opened.images, opened.labels, scenes, strict=True):
            np.testing.assert_array_equal(labels.read(image.whole), scene.classes)
            np.testing.assert_array_equal(image.read(image.whole).values, scene.pixels)
