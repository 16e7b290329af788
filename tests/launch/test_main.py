"""`tilenet job`: prints by default, writes when named, submits only when asked."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.__main__ import main
from tilenet.__main__ import main as tilenet

Capture = pytest.CaptureFixture[str]
NOTHING = ("--run", "/dev/null", "--image", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, and a pretended sbatch that notes its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    small = ["--poolings", "2", "--base", "8", "--image", "600x400", "--grid", "2x2"]
    asked = [*small, "--partitions", "4", "--machine", "slurm", "--nodes", "2"]
    assert tilenet(["plan", *asked, "--json", "-o", "plan.json"]) == 0
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >submitted\nexit 3\n')
    sbatch.chmod(0o755)
    return tmp_path


def test_it_prints_the_layout_and_the_lines(folder: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["plan.json", "--run", "my run.yaml"]) == 0
    srun = (
        "srun -N 2 -n 2 --ntasks-per-node=1 -c 64 --gpus-per-node=4 --gpu-bind=none --mpi=pmi2 "
        "--kill-on-bad-exit=1 --wait=60 tilenet"
    )
    assert capsys.readouterr().out.splitlines() == [
        "2 nodes, 2 ranks (1 a node), each with 4 devices and 64 cores",
        "  2 nodes: rank 0: cores 0-63, devices 0-3",
        "",
        "export OMP_NUM_THREADS=64",
        f"{srun} train -c 'my run.yaml' --plan plan.json --output out --resume",
        f"{srun} predict out scene.tif out/map.tif --plan plan.json --resume",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "sbatch"]


def test_a_script_is_written_and_not_submitted(folder: Path, capsys: Capture) -> None:
    assert main(["plan.json", "--script", "a job.sh"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "submit it with: sbatch 'a job.sh'"
    assert said.err.startswith("tilenet job: not there yet, ")
    assert said.err.endswith(": --run run.yaml; --image scene.tif\n")
    assert os.access("a job.sh", os.X_OK)
    assert not (folder / "submitted").exists()
    subprocess.run(["shellcheck", "a job.sh"], check=True)


def test_mail_and_a_chain_reach_the_script() -> None:
    assert main(["plan.json", "--script", "job.sh", "--mail", "me@site.org", "--chain"]) == 0
    text = Path("job.sh").read_text()
    assert "#SBATCH --mail-user=me@site.org --mail-type=END,FAIL --dependency=singleton\n" in text


def test_it_submits_when_asked(folder: Path) -> None:
    assert main(["plan.json", "--submit", "--name", "mine"]) == 1  # nothing to run, or to map
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "sbatch"]
    for name in ("run.yaml", "scene.tif"):
        Path(name).touch()
    assert main(["plan.json", "--submit", "--name", "mine"]) == 3  # sbatch's own exit code
    assert (folder / "submitted").read_text() == "mine-slurm.sh\n"
    assert "#SBATCH --job-name=mine " in (folder / "mine-slurm.sh").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json"], "must be a readable file"),
        (["plan.json", "--machine", "sumit"], "no machine named 'sumit'"),
        (["plan.json", "--nodes", "3"], "give --nodes 2"),
        (["plan.json", "--time", "soon"], "hours:minutes"),
        (["plan.json", "--script", "no/such/folder.sh"], "a place that can be written"),
        (["plan.json", "--submit"], "when it is submitted (--run run.yaml; --image scene.tif)"),
        (["plan.json", "--machine", "summit", "--submit", *NOTHING], "must be on the PATH (bsub: "),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], said: str, capsys: Capture) -> None:
    capsys.readouterr()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("tilenet: ")
    assert said in error


def test_a_script_replaces_a_script_only(folder: Path, capsys: Capture) -> None:
    (folder / "labels.tif").write_bytes(b"II*\0")
    for name in (".", "labels.tif", str(folder)):
        assert main(["plan.json", "--script", name]) == 1
        assert f"begins with #! ({name}); give it another name" in capsys.readouterr().err
    assert (folder / "labels.tif").read_bytes() == b"II*\0"
    for _ in range(2):
        assert main(["plan.json", "--script", "job.sh"]) == 0


@pytest.mark.parametrize("name", ["plan.json", "./plan.json", "my run.yaml", "scene.tif"])
def test_a_script_replaces_no_file_that_it_names(folder: Path, capsys: Capture, name: str) -> None:
    for path in ("my run.yaml", "scene.tif"):
        (folder / path).write_text(path)
    before = (folder / name).read_bytes()
    assert main(["plan.json", "--run", "my run.yaml", "--script", name]) == 1
    assert "a script replaces none of the files that it names" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before
