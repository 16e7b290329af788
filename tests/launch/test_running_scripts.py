"""Scripts at work: a pretended tilenet under the real mpiexec, and jsrun's stand-in.

The pretended program waits until it is asked to stop, or ends as its test wants.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.placement import place
from launch.planned_job import PlannedJob
from launch.scripts import Job, script
from tilenet.planning.machines import machine

# Each command runs one line from a file of its name, once per start and rank.
PRETENDED = """#!/bin/bash
rank=${PMIX_RANK:-$PMI_RANK}
echo "$1 $rank $PWD" >>"$LOG"
eval "$(cat "$PLANS/$1")"
"""
ENDLESS = "trap 'exit 75' USR1 TERM; while :; do sleep 0.05; done"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the script of a machine for 2 ranks, with what train and predict shall do."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tilenet").write_text(PRETENDED)
    (tools / "tilenet").chmod(0o755)
    (tools / "module").write_text("#!/bin/bash\n")
    (tools / "module").chmod(0o755)
    for name in ("run.yaml", "plan.json", "scene.tif", "job.sh"):
        (tmp_path / name).write_text(name)
    here = Path(__file__).parent
    env = os.environ | {
        "PATH": f"{tools}:{here}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "PLANS": str(tools),
        "JSRUN_NODES": "1",
        "USER": "me",
    }
    running = []

    def begin(
        train: str, predict: str = "exit 0", name: str = "workstation", job: Job | None = None
    ) -> subprocess.Popen[str]:
        (tools / "train").write_text(train)
        (tools / "predict").write_text(predict)
        (tmp_path / "log").write_text("")
        facts = machine(name)
        placed = place(PlannedJob((1, 1, 2), 1, 1, "elsewhere", 1), facts)
        text = script(placed, job or Job())
        storage = facts.launch.node_storage
        if storage:  # this machine has none
            text = text.replace(f"STORAGE={storage}\n", f"STORAGE={tmp_path}/storage\n")
        (tmp_path / "job.sh").write_text(text)
        process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def log(folder: Path, wanted: int = 0) -> list[str]:
    """What ran, as soon as so many have begun."""
    until = time.monotonic() + 20
    while len(lines := (folder / "log").read_text().splitlines()) < wanted:
        assert time.monotonic() < until, lines
        time.sleep(0.02)
    return sorted(lines)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def both(command: str, where: Path) -> list[str]:
    return [f"{command} 0 {where}", f"{command} 1 {where}"]


@pytest.mark.parametrize("name", ["workstation", "summit"])
def test_train_then_predict(start: Start, tmp_path: Path, name: str) -> None:
    code, output = ends(start("exit 0", name=name))
    assert (code, output.splitlines()) == (0, ["train: finished", "predict: finished"])
    assert log(tmp_path) == both("predict", tmp_path) + both("train", tmp_path)


@pytest.mark.parametrize("name", ["workstation", "summit"])
def test_usr1_reaches_the_ranks_and_the_job_comes_again(
    start: Start, tmp_path: Path, name: str
) -> None:
    job = start(ENDLESS, name=name)
    log(tmp_path, 2)
    time.sleep(0.2)  # for the traps
    os.kill(job.pid, signal.SIGUSR1)
    code, output = ends(job)
    assert (code, output.splitlines()[-1]) == (75, "train: stopped")
    assert log(tmp_path) == both("train", tmp_path)


def test_a_stop_at_once_is_told_from_the_signal(start: Start, tmp_path: Path) -> None:
    """The program ends while the shell around it is still busy with the signal."""
    for _ in range(5):
        job = start("trap 'kill -9 $!; exit 75' USR1; sleep 20 & wait")
        log(tmp_path, 2)
        time.sleep(0.1)
        os.kill(job.pid, signal.SIGUSR1)
        assert ends(job)[0] == 75
        assert (tmp_path / "out" / "status").read_text() == "75\n"


def test_a_cancelled_job_saves_and_does_not_come_again(start: Start, tmp_path: Path) -> None:
    job = start(ENDLESS)
    log(tmp_path, 2)
    time.sleep(0.2)
    os.kill(job.pid, signal.SIGTERM)
    code, output = ends(job)
    assert (code, output.splitlines()[-1]) == (143, "train: stopped")
    assert log(tmp_path) == both("train", tmp_path)


@pytest.mark.parametrize(
    "train",
    [
        "exit 1",
        'if [ "$rank" = 1 ]; then exit 3; fi; exit 75',
        'if [ "$rank" = 1 ]; then kill -9 $$; fi; exit 0',
    ],
)
def test_a_failure_on_any_rank_ends_the_job(start: Start, tmp_path: Path, train: str) -> None:
    code, output = ends(start(train))
    assert code == 1
    assert "train: failed" in output
    assert not [line for line in log(tmp_path) if "predict" in line]


def test_a_rank_that_stops_first_does_not_end_the_others(start: Start, tmp_path: Path) -> None:
    """To a launcher that kills the job on a bad exit, 75 is one; so it sees 0."""
    real = shutil.which("mpiexec")
    pretended = tmp_path / "tools" / "mpiexec"
    pretended.write_text(f'#!/bin/bash\n{real} "$@"\necho "mpiexec: $?"\n')
    pretended.chmod(0o755)
    code, output = ends(start('[ "$rank" = 1 ] || sleep 0.3; exit 75'))
    assert (code, output.splitlines()) == (75, ["mpiexec: 0", "train: stopped"])


def test_a_launcher_that_starts_nothing_is_a_failure(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tools" / "mpiexec").write_text("#!/bin/bash\nexit 0\n")
    (tmp_path / "tools" / "mpiexec").chmod(0o755)
    assert ends(start("exit 0")) == (1, "train: failed\n")


def test_a_map_that_is_cut_off_comes_again_once(start: Start, tmp_path: Path) -> None:
    # predict does not listen to signals: it is killed by them
    for wanted, said in ((75, "predict: stopped"), (1, "more time than the job has")):
        job = start("exit 0", predict="exec sleep 20")
        log(tmp_path, 4)
        time.sleep(0.2)
        os.kill(job.pid, signal.SIGUSR1)
        code, output = ends(job)
        assert code == wanted
        assert said in output


def test_a_signal_between_the_steps_is_not_lost(start: Start, tmp_path: Path) -> None:
    job = start("trap '' USR1; sleep 0.5; exit 0")  # finishes in spite of it
    log(tmp_path, 2)
    time.sleep(0.2)
    os.kill(job.pid, signal.SIGUSR1)
    assert ends(job) == (75, "train: finished\n")
    assert log(tmp_path) == both("train", tmp_path)


def test_files_are_copied_to_the_nodes_first(start: Start, tmp_path: Path) -> None:
    job = Job(stage=("scene.tif", "tools/train"))
    code, output = ends(start("cat scene.tif; exit 0", name="summit", job=job))
    assert (code, output.count("scene.tif")) == (0, 2)
    storage = tmp_path / "storage" / "me" / "tilenet"
    assert log(tmp_path) == both("predict", storage) + both("train", storage)
    assert (storage / "tools" / "train").exists()
