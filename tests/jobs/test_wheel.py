"""A wheel, installed where nothing sees the checkout: it holds all files, and its command works."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
import rasterio
from launched import write_scene

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = {"tilenet": "tilenet", "launch": "tilenet/launch"}  # of the checkout, in the wheel
SIZE = (70, 90)
LIMIT_S = 120  # matters only on failure


def run(folder: Path, *command: str, **variables: str) -> str:
    """What a command prints, run in a folder by somebody who has no checkout on the path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders where it builds, and packs what lies in them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(folder, sys.executable, "-m", "pip", "wheel", *options, str(source))
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """An environment with the wheel, and with the packages of this one."""
    folder = wheel.parent / "environment"
    run(wheel.parent, sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet")
    run(wheel.parent, *pip, "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("lib/*/site-packages")
    # Paths in .pth files are searched, but .pth files there, such as the checkout's, are not read.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("\n".join(others))
    return folder


def test_it_holds_all_files_of_the_checkout(wheel: Path) -> None:
    wanted = {
        f"{inside}/{path.relative_to(ROOT / name).as_posix()}"
        for name, inside in FOLDERS.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "tilenet/launch/rank.py" in wanted
    names = set(ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == wanted


def test_it_trains_maps_scores_and_writes_a_job(installed: Path, tmp_path: Path) -> None:
    variables = {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),  # no machines of the user's own
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": f"{sys.prefix}/lib",  # MPI, where it came as a package
    }

    def tilenet(arguments: str) -> str:
        return run(tmp_path, str(installed / "bin" / "tilenet"), *arguments.split(), **variables)

    modules = "tilenet, tilenet.launch"
    code = f"import {modules}; print(*(one.__file__ for one in ({modules})), sep='\\n')"
    for file in run(tmp_path, str(installed / "bin" / "python"), "-c", code).splitlines():
        assert Path(file).is_relative_to(installed)

    write_scene(tmp_path, SIZE)
    files = "--images image.tif --labels labels.tif --classes 3 --output out"
    tilenet(f"train {files} --device cpu --network.poolings 1 --network.base 2 --steps 2")
    assert len((tmp_path / "out" / "history.csv").read_text().splitlines()) == 1 + 2
    assert (tmp_path / "out" / "report.html").exists()
    tilenet("predict out image.tif map.tif --device cpu")
    with rasterio.open(tmp_path / "map.tif") as file:
        assert file.shape == SIZE
    assert "accuracy" in tilenet("evaluate map.tif labels.tif")
    asked = "--poolings 1 --base 2 --bands 2 --classes 3 --image 70x90"
    tilenet(f"plan {asked} --grid 2x2 --machine slurm --nodes 1 -o plan.json")
    assert "written: job.sh" in tilenet("job plan.json --script job.sh")
    run(tmp_path, "bash", "-n", "job.sh")
    batch = "batch --run run.yaml --plan plan.json --output out -- true"
    ended = subprocess.run(
        [installed / "bin" / "tilenet", *batch.split()], cwd=tmp_path, check=False
    )
    assert ended.returncode == 1, "nothing started"
