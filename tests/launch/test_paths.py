"""What a job will not find is said when its script is written, and refused when it is submitted."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.paths import Missing, check_paths, missing
from launch.scripts import Job
from tilenet.errors import TilenetError

JOB = Job(venv="venv", packed="env.tar", stage=("images", "scene.tif"))
RUN = "images: [images/1.tif, images/2.tif]\nlabels: labels.tif\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that JOB reads."""
    monkeypatch.chdir(tmp_path)
    for path in ("images/1.tif", "images/2.tif", "labels.tif", "scene.tif", "env.tar"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
    Path("venv/bin").mkdir(parents=True)
    Path("venv/bin/activate").touch()
    Path("run.yaml").write_text(RUN)
    return tmp_path


def test_nothing_is_said_where_all_is_there() -> None:
    assert check_paths(JOB, submits=True) == []


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("run.yaml", "--run run.yaml"),
        ("scene.tif", "--image scene.tif"),
        ("env.tar", "--packed env.tar"),
        ("venv/bin/activate", "--venv venv/bin/activate"),
        ("labels.tif", "in run.yaml: labels.tif"),
        ("images/2.tif", "in run.yaml: images/2.tif"),
    ],
)
def test_each_path_is_looked_for(path: str, named: str) -> None:
    Path(path).unlink()
    (said,) = check_paths(JOB, submits=False)
    assert said.startswith("not there yet, where the job is to be submitted from this folder: ")
    assert named in said
    with pytest.raises(TilenetError, match=f"must be there when it is submitted .*{named}"):
        check_paths(JOB, submits=True)


def test_many_images_are_one_and_a_number() -> None:
    for path in (*Path("images").iterdir(), Path("labels.tif")):
        path.unlink()
    assert missing(JOB).here == ("in run.yaml: images/1.tif and 2 more",)


def test_absolute_paths_are_never_refused(folder: Path) -> None:
    """The nodes may see them, and the login node not."""
    far = f"{folder}/far"
    job = replace(JOB, run=f"{far}/run.yaml", image=f"{far}/scene.tif", venv=f"{far}/venv")
    assert missing(job).here == ()
    (said,) = check_paths(job, submits=True)
    assert said.startswith("not seen from here, so the nodes must see it: --run ")
    assert said.count(far) == 3


def test_steps_that_are_left_out_need_nothing() -> None:
    for path in ("run.yaml", "scene.tif"):
        Path(path).unlink()
    left_out = Job(run="", image="")
    assert missing(left_out) == Missing((), ())
    assert missing(replace(left_out, image="scene.tif")).here == ("--image scene.tif",)


@pytest.mark.parametrize(
    "image",
    [
        "https://site.org/scene.tif",
        "s3://bucket/scene.tif",
        "/vsis3/bucket/scene.tif",
        "none/*.tif",
        "items.json#red",
        "items.json#red+nir",
        "none_R.tif+none_G.tif",
        'ZARR:"none.zarr":/red',
    ],
)
def test_names_that_are_not_of_one_file_here_are_left_to_the_job(image: str) -> None:
    Path("run.yaml").write_text(f"images: '{image}'\n")
    assert missing(replace(JOB, image=image)) == Missing((), ())


@pytest.mark.parametrize("text", ["images: [a.tif", "3", "images: 3", "images: {a: b}", "\0"])
def test_a_run_file_that_says_no_images_is_left_to_the_ranks(text: str) -> None:
    Path("run.yaml").write_text(text)
    assert missing(JOB) == Missing((), ())
