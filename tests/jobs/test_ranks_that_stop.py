"""A rank that hangs ends the job within its patience, in whatever phase of a run."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launched import mpiexec, write_scene
from stopping_ranks import each_alone

LIMIT_S = 300  # it takes 4

# By the function that a rank hangs in: what its watchdog says it was to finish.
TRAIN = {
    "tilenet.training.images.open:Raster": "opening the images, part 1 of 1",
    "tilenet.training.images.open:open_labels": "opening the labels, part 1 of 1",
    "tilenet.training.images.open:check_same_files": "opening the images on other ranks",
    "tilenet.data.rasters.raster:Raster.collar_runs": "the collar of an image, part 1 of 1",
    "tilenet.data.rasters.collar:Collar.__init__": "the collar of an image on other ranks",
    "tilenet.training.folder.run_folder:newest_whole": "the look into the run's folder",
    "tilenet.data.labelled_blocks:check_classes": "the labels of blocks, part 1 of 16",
    "tilenet.parallel.ranks.layout:say_layout": "the start of the run",
    "tilenet.data.survey:check_classes": "the survey, part 1 of 1",
    "tilenet.data.survey:_check_something_is_there": "the sums of the survey",
    "tilenet.training.network:build_network": "the plan and the proof of the run",
    "tilenet.training.loop:announce": "the first weights",
    "tilenet.training.loop:Step.take": "step 1",
    "tilenet.training.folder.run_folder:save_checkpoint": "the checkpoint of step 1",
    "tilenet.training.scoring:network_to_score": "the validation",
    "tilenet.mapping.job:Mapper.tiles": "the round of tile 0",
    "tilenet.training.folder.log:RunLog.validation": "the sum of a validation",
    "tilenet.training.folder.record:RunAccount.say_swaps": "the last checkpoint",
    "tilenet.training.folder.record:write_times": "the report",
    "tilenet.library.whole_run:try_report": "the report",
}
PREDICT = {
    "tilenet.mapping.predict:find_node_place": "opening the checkpoint and the image",
    "tilenet.mapping.map_source:load_tensors": "opening the checkpoint and the image",
    "tilenet.data.rasters.raster:Raster.collar_runs": "the collar of an image, part 1 of 1",
    "tilenet.mapping.predict:decide_map": "the start of the map",
    "tilenet.mapping.make_map:MapWriter": "the start of the map",
    "tilenet.mapping.job:Mapper.tiles": "the round of tile 0",
    "tilenet.mapping.writing.writer:write_cog": "the finished map",
    "tilenet.mapping.predict:measure_peak_bytes": "the finished map",
}
EVALUATE = {
    "tilenet.mapping.evaluate:open_labels": "opening the map and the labels",
    "tilenet.data.labels.source:LabelSource.read": "the block at row 0, column 0",
}
COMMANDS = {"train": TRAIN, "predict": PREDICT, "evaluate": EVALUATE}
CASES = [(command, function) for command, words in COMMANDS.items() for function in words]
OF_SEVERAL = [
    ("train", "tilenet.training.images.open:Raster", 0),
    ("train", "tilenet.data.survey:check_classes", 0),
    ("train", "tilenet.library.whole_run:try_report", 0),
    ("predict", "tilenet.mapping.job:Mapper.tiles", 1),
    ("predict", "tilenet.mapping.writing.writer:write_cog", 0),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with labels, and a network that was trained on it."""
    folder = tmp_path_factory.mktemp("files")
    write_scene(folder, (64, 61))
    shutil.copy(folder / "labels.tif", folder / "classes.tif")
    command = [sys.executable, "-m", "tilenet", *train(folder, folder / "run")]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return folder


def train(files: Path, output: Path) -> list[str]:
    validation = ["--validation.share", "0.3", "--validation.block_px", "16"]
    validation += ["--validation.every", "1"]
    network = ["--network.poolings", "1", "--network.base", "2", "--classes", "3"]
    inputs = ["--images", str(files / "image.tif"), "--labels", str(files / "labels.tif")]
    inputs += ["--nodata", "collar"]
    steps = ["--steps", "1", "--crop_px", "16", "--device", "cpu", "--hang_seconds", "1000"]
    return ["train", *inputs, *network, *validation, *steps, "--output", str(output)]


def arguments(command: str, files: Path, folder: Path) -> list[str]:
    if command == "train":
        return [*train(files, folder / "run"), "--resume"]
    if command == "evaluate":
        return ["evaluate", str(files / "classes.tif"), str(files / "labels.tif")]
    paths = [str(files / "run"), str(files / "image.tif"), str(folder / "map.tif")]
    return ["predict", *paths, "--device", "cpu", "--hang-seconds", "1000"]


@pytest.fixture(scope="module")
def alone(
    files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], tuple[int, str]]:
    """How a job of one rank ends that hangs there."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = []
    for number, (command, function) in enumerate(CASES):
        (folder / f"of{number}").mkdir()
        jobs.append((function, arguments(command, files, folder / f"of{number}")))
    return dict(zip(CASES, each_alone(jobs, folder), strict=True))


@pytest.mark.parametrize(("command", "function"), CASES)
def test_each_phase_of_a_job_ends(
    alone: Mapping[tuple[str, str], tuple[int, str]], command: str, function: str
) -> None:
    status, text = alone[command, function]
    assert status == 1, text
    assert f"tilenet: {COMMANDS[command][function]} must end within" in text
    assert " in hanging\n" in text


@pytest.mark.parametrize(("command", "function", "rank"), OF_SEVERAL)
def test_a_rank_that_hangs_ends_all(
    files: Path, tmp_path: Path, command: str, function: str, rank: int
) -> None:
    program = str(Path(__file__).with_name("stopping_ranks.py"))
    given = function, str(rank), *arguments(command, files, tmp_path)
    ended = mpiexec(2, program, *given, limit_s=LIMIT_S)
    assert ended.returncode not in (0, 75), ended.stderr
    words = re.escape(COMMANDS[command][function])
    mark = re.escape(f"[rank {rank} of 2] tilenet: ")
    assert re.search(f"^{mark}{words} must end within", ended.stderr, re.MULTILINE), ended.stderr
