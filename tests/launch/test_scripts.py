"""Job scripts: what they say differently from those of jobs/, shellcheck, and what may stand there.

TILENET_RECORD=1 writes tests/launch/recorded/ again.
"""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest

from launch.placement import Placement, place
from launch.planned_job import PlannedJob
from launch.scripts import Job, script, submit_command
from tilenet.errors import TilenetError
from tilenet.planning.machines.read import machine

RECORDED = Path(__file__).with_name("recorded")
KNOWN = Path(__file__).resolve().parents[2] / "jobs"  # tests/jobs/test_jobs.py holds them
STAGE = ("images", "labels/all.gpkg", "scene.tif")

# What the scripts of jobs/ have not. File: machine, ranks, partitions, job
JOBS = {
    "summit-straddling.lsf": ("summit", 64, 1, Job(account="ABC123", stage=STAGE)),
    "frontier.sh": (
        "frontier",
        8,
        2,
        Job(account="ABC123", stage=STAGE, time="0:10", packed="env.tar"),
    ),
    "slurm.sh": ("slurm", 5, 2, Job(queue="gpu", image="")),
    "slurm-elastic.sh": ("slurm", 4, 2, Job(most_nodes=4, stage=STAGE)),
    "pbs.sh": ("pbs", 10, 1, Job(queue="gpu", stage=STAGE, time="0:10")),
    "awkward.bash": (
        *("slurm", 4, 1),
        Job(
            "it's $(me).yaml",
            "a;b}.json",
            "-x`id`.tif",
            "o u't",
            "$v",
            "job.1",
            stage=("$HOME", "a b"),
        ),
    ),
}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machines of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def placed(name: str, ranks: int, partitions: int) -> Placement:
    return place(PlannedJob(ranks, partitions, 1, "elsewhere", 2**30), machine(name))


def text_of(file: str) -> str:
    name, ranks, partitions, job = JOBS[file]
    return script(placed(name, ranks, partitions), replace(job, file=file))


def difference_of(file: str) -> str:
    (known,) = (KNOWN / JOBS[file][0].replace("pbs", "polaris")).glob("job.*")
    texts = known.read_text().splitlines(), text_of(file).splitlines()
    return "\n".join(unified_diff(*texts, known.parent.name, file, n=0, lineterm="")) + "\n"


@pytest.mark.parametrize("file", JOBS)
def test_scripts_are_what_was_recorded(file: str) -> None:
    path = RECORDED / f"{file}.diff"
    if os.environ.get("TILENET_RECORD"):
        path.write_text(difference_of(file))
    assert path.read_text() == difference_of(file), "if this is meant: TILENET_RECORD=1 pytest"


def test_nothing_else_is_recorded() -> None:
    assert sorted(path.stem for path in RECORDED.iterdir()) == sorted(JOBS)


@pytest.mark.parametrize("file", JOBS)
def test_scripts_are_good_shell(file: str, tmp_path: Path) -> None:
    text = text_of(file)
    (tmp_path / file).write_text(text)
    # that $ and ` are not expanded is what is wanted there
    meant = ["-e", "SC2016"] if file == "awkward.bash" else []
    subprocess.run(["shellcheck", *meant, str(tmp_path / file)], check=True)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash" + " -l" * (file == "pbs.sh")
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 31
    # Slurm stops reading options at the first command.
    head, rest = text.split("\nset -e\n")
    assert not re.search(r"^#(SBATCH|BSUB|PBS)", rest, re.MULTILINE)
    assert re.search(r"^#(SBATCH|BSUB|PBS)", head, re.MULTILINE)
    words = shlex.split(text[text.index("\nexec ") :])
    assert words[words.index("--") + 1] in ("jsrun", "srun", "mpiexec")


def test_what_users_name_reaches_the_shell_as_it_is() -> None:
    lines = text_of("awkward.bash").splitlines()
    names = tuple(f"{name}=" for name in ("RUN", "PLAN", "IMAGE", "VENV", "STAGE"))
    code = [line for line in lines if line.startswith(names)]
    shown = ['printf "%s\\n" "$RUN" "$PLAN" "$IMAGE" "$OUTPUT" "$VENV" "${STAGE[@]}"']
    run = subprocess.run(
        ["bash", "-c", "\n".join(code + shown)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        *("it's $(me).yaml", "a;b}.json", "-x`id`.tif", "o u't", "$v"),
        *("$HOME", "a b"),
    ]


def test_only_the_file_of_hosts_is_expanded_in_the_launcher_of_copies(tmp_path: Path) -> None:
    here = placed("pbs", 4, 1)
    words = ("-genv", "X", "it's $HOME `id` \\ \"!")
    launch = replace(here.machine.launch, step=words)
    text = script(replace(here, machine=replace(here.machine, launch=launch)), Job())
    shown = text[text.index("\nexec ") :].replace("exec tilenet batch", "printf '%s\\n'")
    run = subprocess.run(
        ["bash", "-c", shown],
        env={"PATH": os.environ["PATH"], "PBS_NODEFILE": "hosts"},
        capture_output=True,
        text=True,
        check=True,
    )
    (once,) = (line for line in run.stdout.splitlines() if line.startswith("--once-per-node="))
    assert shlex.split(once.partition("=")[2])[-5:] == ["-f", "hosts", *words]


def test_each_batch_system_has_its_command() -> None:
    commands = {
        name: submit_command(placed(name, 1, 1), "a b.sh")
        for name in ("summit", "slurm", "polaris", "tuolumne")
    }
    assert commands == {
        "summit": ["bsub", "a b.sh"],
        "slurm": ["sbatch", "a b.sh"],
        "polaris": ["qsub", "a b.sh"],
        "tuolumne": ["flux", "batch", "a b.sh"],
    }


def test_directives_of_flux_are_options_of_flux_batch() -> None:
    """Of its manual; they stand together, after lines that begin alike (RFC 36)."""
    lines = script(placed("tuolumne", 4, 1), Job(account="x", queue="q")).splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("# flux: ")]
    assert at == list(range(at[0], at[0] + len(at)))
    assert all(line.startswith("#") for line in lines[: at[0]])
    words = [word for number in at for word in shlex.split(lines[number][8:])]
    names = {word.partition("=")[0] for word in words}
    assert names == {
        *("--time-limit", "--nodes", "--exclusive", "--bank", "--queue"),
        *("--job-name", "--output", "--signal"),
    }
    assert {"--signal=USR1@600s", "--time-limit=120m"} <= set(words)


def directives(name: str, job: Job, **facts: str) -> list[str]:
    """The words of the script's head on a machine with these facts of its launch."""
    here = placed(name, 4, 1)
    launch = replace(here.machine.launch, **facts)  # type: ignore[arg-type]
    text = script(replace(here, machine=replace(here.machine, launch=launch)), job)
    heads = re.findall(r"^#(?:SBATCH|BSUB|PBS| flux:) (.*)$", text, re.MULTILINE)
    return shlex.split(" ".join(heads))


MAIL, CHAIN = Job(mail="me+x@a-b.org"), Job(chain=True)


@pytest.mark.parametrize(
    ("name", "job", "words"),
    [
        ("slurm", MAIL, "--mail-user=me+x@a-b.org --mail-type=END,FAIL"),
        ("slurm", CHAIN, "--dependency=singleton"),
        ("summit", MAIL, "-N -u me+x@a-b.org"),
        ("pbs", MAIL, "-m ae -M me+x@a-b.org"),
        ("tuolumne", CHAIN, "--dependency=singleton"),
    ],
)
def test_mail_and_chains_are_the_batch_systems(name: str, job: Job, words: str) -> None:
    found = directives(name, job)
    assert set(found) - set(directives(name, Job())) == set(words.split())
    assert words in " ".join(found)


def test_a_job_takes_all_memory_and_gpus_of_its_nodes_as_the_machine_says() -> None:
    assert {"--exclusive", "--mem=0", "--gpus-per-node=4"} <= set(directives("slurm", Job()))
    other = directives("slurm", Job(), gpu_option="--gres=gpu:a100:", memory_option="")
    assert "--gres=gpu:a100:4" in other
    assert not [word for word in other if word.startswith(("--gpus", "--mem"))]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("summit", r'bsub -w .ended\("mine"\)'),
        ("pbs", "qsub -W depend=afterany:JOB"),
        ("workstation", "run one script after the other"),
    ],
)
def test_a_chain_that_a_batch_system_has_not_is_refused(name: str, remedy: str) -> None:
    with pytest.raises(TilenetError, match=rf"only Slurm and Flux start .*\({name}: .*{remedy}"):
        script(placed(name, 1, 1), Job(name="mine", chain=True))


@pytest.mark.parametrize(
    ("name", "job", "said"),
    [
        *(
            ("slurm", Job(mail=mail), "one address or user")
            for mail in ("-x", "a b", "a@b c", "a@b --uid=0", "a,b@c", "@c", "a@b\n#SBATCH")
        ),
        ("tuolumne", Job(mail="a@b"), "leave --mail out"),
        ("workstation", Job(mail="a@b"), "leave --mail out"),
        ("slurm", Job(run="a\nb"), "one line each"),
        ("slurm", Job(run="", image=""), "must train, or make a map"),
        ("slurm", Job(account="x\n#SBATCH --uid=0"), "one line each"),
        ("slurm", Job(name="a b"), "letters, digits"),
        ("slurm", Job(name="../x"), "letters, digits"),
        ("slurm", Job(time="two"), "hours:minutes"),
        ("slurm", Job(time="0:00"), "hours:minutes"),
        ("slurm", Job(time="1:60"), "hours:minutes"),
        ("slurm", Job(stage=("/data",)), "by relative paths"),
        ("slurm", Job(stage=("../data",)), "by relative paths"),
        ("slurm", Job(stage=("-r",)), "by relative paths"),
        ("perlmutter", Job(stage=("data",)), "need storage on the nodes"),
        ("summit", Job(most_nodes=2), "only Slurm gives a job a range of nodes"),
        ("pbs", Job(most_nodes=2), "only Slurm gives a job a range of nodes"),
        ("tuolumne", Job(most_nodes=2), "only Slurm gives a job a range of nodes"),
        ("workstation", Job(most_nodes=2), "only Slurm gives a job a range of nodes"),
        ("slurm", Job(most_nodes=1), "more at most than at least"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, job: Job, said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        script(placed(name, 1, 1), job)
