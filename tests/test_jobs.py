"""The scripts of jobs/ run to their maps, with stand-ins for what only those machines have.

The stand-ins check the options' arithmetic and start the ranks with mpiexec; how real launchers
place ranks is not their business.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import rasterio

JOBS = Path(__file__).resolve().parent.parent / "jobs"
RUN = """
images: image.tif
labels: labels.tif
classes: 3
device: cpu
network: {poolings: 1, base: 2}
tiles: {size_px: 32}
checkpoint_every: 1000
steps: 3
output: out
"""
# Start as many ranks as the options say, two at most, and keep the options.
START = """#!/bin/bash
echo "{name} $*" >>calls
nodes=1 each=0 total=0
while [ "$1" != bash ]; do
    case $1 in
        --ntasks=*) total=${{1#*=}} ;;
        --nodes=* | -n=*) nodes=${{1#*=}} ;;
        -n) nodes=$2; shift ;;
        -a) each=$2; shift ;;
        -[rgcbdXE]) shift ;;
    esac
    shift
done
[ "$total" != 0 ] || total=$((nodes * each))
exec mpiexec -n $((total < 2 ? total : 2)) bash -c '
    export SLURM_PROCID=$PMI_RANK OMPI_COMM_WORLD_RANK=$PMI_RANK
    unset OMP_NUM_THREADS; export OMP_NUM_THREADS=1; exec "$@"' start "$@"
"""
SAYS = '#!/bin/bash\necho "{name} $*" >>calls\n'
# What scancel --signal does: to all processes of the steps.
SIGNALS = """#!/bin/bash
echo "scancel $*" >>calls
for process in /proc/[0-9]*; do
    [ "$(readlink "$process/cwd")" = "$PWD" ] || continue
    case $(cat "$process/comm") in tilenet | python*) kill -USR1 "${process#/proc/}" || true ;; esac
done
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a scene, a run file, an environment to activate, and the stand-ins."""
    rng = np.random.default_rng(3)
    grid = {"height": 70, "width": 90, "crs": "EPSG:32630", "driver": "GTiff"}
    grid["transform"] = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)
    with rasterio.open(tmp_path / "image.tif", "w", count=2, dtype="uint8", **grid) as out:
        out.write(rng.integers(1, 250, (2, 70, 90)).astype(np.uint8))
    with rasterio.open(tmp_path / "labels.tif", "w", count=1, dtype="uint8", **grid) as out:
        out.write(rng.integers(0, 3, (70, 90)).astype(np.uint8), 1)
    (tmp_path / "run.yaml").write_text(RUN)
    stand_ins = {name: START.format(name=name) for name in ("srun", "jsrun")}
    stand_ins |= {name: SAYS.format(name=name) for name in ("module", "scontrol", "nvidia-smi")}
    stand_ins["scancel"] = SIGNALS
    for name, text in stand_ins.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    return tmp_path


def start(name: str, place: Path, **more: str) -> "subprocess.Popen[str]":
    ours = {name for name in os.environ if name.startswith("SLURM_")}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "IMAGE": "image.tif",
        "SLURM_JOB_ID": "77",
        "LSB_JOBID": "77",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
        **more,
    }
    return subprocess.Popen(
        ["bash", str(JOBS / name)],
        cwd=place,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def calls(place: Path, program: str) -> list[str]:
    lines = (place / "calls").read_text().splitlines() if (place / "calls").exists() else []
    return [line for line in lines if line.split()[0] == program]


@pytest.mark.parametrize(
    ("name", "more", "options"),
    [
        ("train-slurm.sh", {}, "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=8"),
        (
            "train-slurm.sh",
            {"PARTITIONS": "2"},
            "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=16",
        ),
        ("train-frontier.sh", {}, "--ntasks=16 --ntasks-per-node=8 --cpus-per-task=7"),
        (
            "train-frontier.sh",
            {"PARTITIONS": "4"},
            "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=28",
        ),
        ("train-perlmutter.sh", {}, "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=32"),
        (
            "train-perlmutter.sh",
            {"PARTITIONS": "2"},
            "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=64",
        ),
        ("train-summit.lsf", {}, "-n 4 -r 1 -a 6 -g 6 -c 42 -b packed:7 "),
        ("train-summit.lsf", {"PARTITIONS": "3"}, "-n 4 -r 1 -a 2 -g 6 -c 42 -b packed:21 "),
        ("train-summit.lsf", {"PARTITIONS": "6"}, "-n 4 -r 1 -a 1 -g 6 -c 42 -b rs "),
        ("train-workstation.sh", {}, ""),
    ],
    ids=str,
)
def test_a_job_trains_and_maps(place: Path, name: str, more: dict[str, str], options: str) -> None:
    job = start(name, place, **more)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    with rasterio.open(place / "out" / "map.tif") as file:
        assert file.shape == (70, 90)
    assert len((place / "out" / "history.csv").read_text().splitlines()) == 4
    assert ("2 partitions" in said) == (more.get("PARTITIONS") == "2")
    if options:
        steps = calls(place, "jsrun" if name.endswith("lsf") else "srun")
        assert len(steps) == 2, "one to train, one to map"
        assert all(options in step for step in steps)
    if options.startswith("--"):
        assert all("--kill-on-bad-exit=1" in step for step in steps)
        assert all("--gpu-bind=none" in step for step in steps)
    assert not list(place.glob("*.status"))
    assert calls(place, "scontrol") == []


@pytest.mark.parametrize("name", ["train-slurm.sh", "train-summit.lsf"])
def test_a_job_without_time_stops_with_a_checkpoint_and_queues_again(
    place: Path, name: str
) -> None:
    (place / "run.yaml").write_text(RUN.replace("steps: 3", "steps: 3000"))
    job = start(name, place)
    history = place / "out" / "history.csv"
    ends = time.monotonic() + 120
    while not history.exists() or len(history.read_text().splitlines()) < 4:
        assert time.monotonic() < ends
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)  # what Slurm's --signal=B: and LSF's -wa do
    said, _ = job.communicate(timeout=120)
    requeued = calls(place, "scontrol")
    if name.endswith("lsf"):
        assert (job.returncode, requeued) == (75, []), said
    else:
        assert (job.returncode, requeued) == (0, ["scontrol requeue 77"]), said
    made = len(history.read_text().splitlines()) - 1
    assert not (place / "out" / "map.tif").exists()

    steps = made + 2
    (place / "run.yaml").write_text(RUN.replace("steps: 3", f"steps: {steps}"))
    job = start(name, place)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    numbers = [line.split(",")[0] for line in history.read_text().splitlines()[1:]]
    assert numbers == [str(step) for step in range(1, steps + 1)]
    assert (place / "out" / "map.tif").exists()


@pytest.mark.parametrize("name", ["train-slurm.sh", "train-summit.lsf", "train-workstation.sh"])
def test_a_job_that_fails_says_so_and_does_not_queue_again(place: Path, name: str) -> None:
    job = start(name, place, RUN="nowhere.yaml")
    said, _ = job.communicate(timeout=120)
    assert job.returncode in (1, 2)
    assert "nowhere.yaml" in said
    assert calls(place, "scontrol") == []
    assert not (place / "out" / "map.tif").exists()


@pytest.mark.parametrize("path", sorted(JOBS.glob("train-*")), ids=lambda path: path.name)
def test_a_job_says_what_to_change(path: Path) -> None:
    text = path.read_text()
    assert len(re.findall("CHANGE", text)) >= 1
    assert "Install once" in text
    for name in ("RUN", "IMAGE", "OUTPUT"):
        assert len(re.findall(rf"(?m)^{name}=", text)) == 1
