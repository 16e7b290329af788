"""Command lines: tables for the machines, and lines for jsrun and flux against stand-ins."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.commands import HOSTS, command, environment, once_per_node
from launch.placement import Placement, place
from launch.planned_job import PlannedJob
from tilenet.errors import TilenetError
from tilenet.planning.machines.read import machine

sys.path.insert(0, str(Path(__file__).parent))
import flux
from jsrun import layout, omp_threads, parse


def placed(name: str, ranks: int, partitions: int, nodes: int | None = None) -> Placement:
    job = PlannedJob(ranks, partitions, 1, "elsewhere", 2**30)
    return place(job, machine(name), nodes)


JSRUN = "-X 1 -E OMP_NUM_THREADS={} --smpiargs=-gpu"
FRONTIER = "--mpi=cray_shasta --kill-on-bad-exit=1 --wait=60 --network=disable_rdzv_get"
PERLMUTTER = "--gpus-per-node=4 --gpu-bind=none --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60"
LUMI = "--gpus-per-node=8 --gpu-bind=none --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60"
JUPITER = "--gpus-per-node=4 --gpu-bind=none --mpi=pspmi --kill-on-bad-exit=1 --wait=60"
PALS = "--cpu-bind depth --hostfile " + HOSTS
FLUX = "--setopt=cpu-affinity=per-task --setopt=exit-on-error --setopt=exit-timeout=60s"
SLURM = "--gpus-per-node=4 --gpu-bind=none --mpi=pmi2 --kill-on-bad-exit=1 --wait=60"

# machine, ranks, partitions, --nodes, line: the three layouts, and nodes that are not full
LINES = [
    ("summit", 12, 1, None, "jsrun -n 2 -r 1 -a 6 -g 6 -c 42 -b packed:7 -d packed " + JSRUN, 7),
    ("summit", 2, 6, None, "jsrun -n 2 -r 1 -a 1 -g 6 -c 42 -b rs -d packed " + JSRUN, 42),
    ("summit", 6, 2, None, "jsrun -n 2 -r 1 -a 3 -g 6 -c 42 -b packed:14 -d packed " + JSRUN, 14),
    ("summit", 4, 3, None, "jsrun -n 2 -r 1 -a 2 -g 6 -c 42 -b packed:21 -d packed " + JSRUN, 21),
    ("summit", 8, 1, 2, "jsrun -n 2 -r 1 -a 4 -g 6 -c 42 -b packed:7 -d packed " + JSRUN, 7),
    ("summit", 64, 1, None, "jsrun -n 64 -a 1 -g 1 -c 7 -b rs -d packed " + JSRUN, 7),
    ("summit", 5, 3, None, "jsrun -n 5 -a 1 -g 3 -c 21 -b rs -d packed " + JSRUN, 21),
    (
        *("frontier", 16, 1, None),
        "srun -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest " + FRONTIER,
        7,
    ),
    (
        *("frontier", 2, 8, None),
        "srun -N 2 -n 2 --ntasks-per-node=1 -c 56 --gpus-per-node=8 --gpu-bind=none " + FRONTIER,
        56,
    ),
    (
        *("frontier", 8, 2, None),
        "srun -N 2 -n 8 --ntasks-per-node=4 -c 14 --gpus-per-node=8 --gpu-bind=none " + FRONTIER,
        14,
    ),
    ("perlmutter", 8, 1, None, "srun -N 2 -n 8 --ntasks-per-node=4 -c 32 " + PERLMUTTER, 16),
    ("perlmutter", 2, 4, None, "srun -N 2 -n 2 --ntasks-per-node=1 -c 128 " + PERLMUTTER, 64),
    ("perlmutter", 4, 2, None, "srun -N 2 -n 4 --ntasks-per-node=2 -c 64 " + PERLMUTTER, 32),
    ("slurm", 8, 1, None, "srun -N 2 -n 8 --ntasks-per-node=4 -c 16 " + SLURM, 16),
    ("slurm", 2, 4, None, "srun -N 2 -n 2 --ntasks-per-node=1 -c 64 " + SLURM, 64),
    (*("slurm", 5, 2, None), "srun -N 3 -n 5 --distribution=block,Pack -c 32 " + SLURM, 32),
    ("lumi", 16, 1, None, "srun -N 2 -n 16 --ntasks-per-node=8 -c 7 " + LUMI, 7),
    ("jupiter", 8, 1, None, "srun -N 2 -n 8 --ntasks-per-node=4 -c 72 " + JUPITER, 72),
    ("polaris", 8, 1, None, "mpiexec -n 8 --ppn 4 --depth 8 " + PALS, 8),
    ("aurora", 24, 1, None, "mpiexec -n 24 --ppn 12 --depth 8 " + PALS, 8),
    ("polaris", 5, 2, None, "mpiexec -n 5 --ppn 2 --depth 16 " + PALS, 16),
    ("pbs", 8, 1, None, "mpiexec -n 8 -ppn 4 -f " + HOSTS, 16),
    ("pbs", 9, 1, None, "mpiexec -n 9 -ppn 4 -f " + HOSTS, 16),
    ("tuolumne", 8, 1, None, "flux run -N 2 -n 8 -c 21 -g 1 --exclusive " + FLUX, 21),
    ("tuolumne", 4, 2, None, "flux run -N 2 -n 4 -c 42 -g 2 --exclusive " + FLUX, 42),
    ("workstation", 2, 1, None, "mpiexec -n 2", 16),
    ("workstation", 1, 2, None, "mpiexec -n 1", 32),
]


@pytest.mark.parametrize(("name", "ranks", "partitions", "nodes", "line", "threads"), LINES)
def test_lines(
    name: str, ranks: int, partitions: int, nodes: int | None, line: str, threads: int
) -> None:
    where = placed(name, ranks, partitions, nodes)
    argv = command(where, ["tilenet", "train", "a file"])
    assert argv == [*line.format(threads).split(), "tilenet", "train", "a file"]
    assert environment(where)["OMP_NUM_THREADS"] == str(threads)


def test_one_process_per_node_copies_files() -> None:
    lines = [
        " ".join(once_per_node(placed(name, ranks, 1)))
        for name, ranks in [
            *(("summit", 64), ("slurm", 8), ("workstation", 2)),
            *(("polaris", 8), ("pbs", 8), ("tuolumne", 8)),
        ]
    ]
    assert lines == [
        "jsrun -n 11 -r 1 -a 1 -c 1 -X 1 --smpiargs=off",
        "srun -N 2 -n 2 --ntasks-per-node=1 -c 1 --mpi=none --kill-on-bad-exit=1",
        "mpiexec -n 1",
        f"mpiexec -n 2 --ppn 1 --hostfile {HOSTS}",
        f"mpiexec -n 2 -ppn 1 -f {HOSTS}",
        "flux run -N 2 -n 2 --setopt=exit-on-error",
    ]
    assert flux.tasks_per_node(flux.parse(lines[-1].split()[1:])) == [1, 1]
    ranks = layout(parse(lines[0].split()[1:]), 11)
    assert [rank.node for rank in ranks] == list(range(11))


def test_frontiers_devices_are_reordered_where_ranks_see_them_all() -> None:
    order = {"HIP_VISIBLE_DEVICES": "4,5,2,3,6,7,0,1"}
    assert order.items() <= environment(placed("frontier", 8, 2)).items()
    assert "HIP_VISIBLE_DEVICES" not in environment(placed("frontier", 8, 1))
    assert environment(placed("polaris", 8, 1))["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"


def test_a_cluster_without_gpus_is_asked_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tilenet").mkdir()
    (tmp_path / "tilenet" / "machines.toml").write_text("[slurm]\ndevice = 'cpu'\n")
    line = "srun -N 1 -n 4 --ntasks-per-node=4 -c 16 --mpi=pmi2 --kill-on-bad-exit=1 --wait=60"
    assert command(placed("slurm", 4, 1)) == line.split()


def test_hosts_without_a_batch_system_are_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tilenet").mkdir()
    own = tmp_path / "tilenet" / "machines.toml"
    own.write_text("[workstation.launch]\nlauncher = 'hydra'\nstep = ['-f', 'hosts']\n")
    where = placed("workstation", 4, 1)
    assert command(where, ["x"]) == ["mpiexec", "-n", "4", "-ppn", "2", "-f", "hosts", "x"]
    assert once_per_node(where) == ["mpiexec", "-n", "2", "-ppn", "1", "-f", "hosts"]
    own.write_text("[workstation.launch]\nlauncher = 'hydra'\n")
    with pytest.raises(TilenetError, match=r"workstation.launch.step must name a file of hosts"):
        placed("workstation", 4, 1)


@pytest.mark.parametrize(("ranks", "partitions", "nodes"), [(8, 1, 2), (6, 1, 2), (3, 4, 3)])
def test_flux_takes_the_line_and_fills_the_nodes_alike(
    ranks: int, partitions: int, nodes: int
) -> None:
    where = placed("tuolumne", ranks, partitions, nodes)
    options = flux.parse(command(where, ["tilenet"])[1:])
    assert flux.tasks_per_node(options) == [where.ranks_per_node] * nodes
    assert options.program == ["tilenet"]
    assert options.gpus_per_task * where.ranks_per_node <= 4
    assert options.cores_per_task * where.ranks_per_node <= 84


# --- every line for Summit


def check_against_the_stand_in(where: Placement) -> None:
    """jsrun gives each rank its node, its own cores, and devices to take by its local number."""
    argv = command(where, ["tilenet"])
    options = parse(argv[1:])
    ranks = layout(options, where.nodes)
    assert options.program == ("tilenet",)
    assert options.exit_on_error
    assert len(ranks) == where.ranks
    bindings = where.bindings
    for number, rank in enumerate(ranks):
        node, local = divmod(number, where.ranks_per_node)
        assert (rank.node, rank.local_rank) == (node, local)
        own = bindings[local]
        if where.shares_nodes_in_resource_sets:
            devices = rank.gpus
        else:
            assert rank.gpus == tuple(range(6))
            first = local * where.partitions
            devices = rank.gpus[first : first + where.partitions]
        assert devices == own.devices
        # 21 cores of 4 threads on each socket, the second counted from 88
        threads = tuple(core // 21 * 88 + core % 21 * 4 for core in own.cores)
        assert rank.threads == threads
        assert omp_threads(options, rank) == len(threads) == where.cores_per_rank
    for node in {0, where.nodes - 1}:
        here = [rank.threads for rank in ranks if rank.node == node]
        used = [thread for threads in here for thread in threads]
        assert len(used) == len(set(used))


@settings(max_examples=60)
@given(nodes=st.integers(1, 4600), partitions=st.sampled_from([1, 2, 3, 6]), data=st.data())
@example(nodes=4600, partitions=1, data=None)
@example(nodes=4600, partitions=6, data=None)
@example(nodes=1, partitions=2, data=None)
def test_every_line_for_summit_is_taken_with_the_layout_that_is_wanted(
    nodes: int, partitions: int, data: st.DataObject | None
) -> None:
    most = 6 // partitions
    per_node = data.draw(st.integers(1, most)) if data else most
    check_against_the_stand_in(placed("summit", nodes * per_node, partitions, nodes))


@settings(max_examples=40)
@given(ranks=st.integers(1, 3000), partitions=st.sampled_from([1, 2, 3, 6]))
@example(ranks=64, partitions=1)  # one replica of the paper's grid of 8 × 8 tiles
@example(ranks=64, partitions=2)
@example(ranks=5, partitions=3)
def test_any_number_of_ranks_is_placed_or_refused_with_a_remedy_that_helps(
    ranks: int, partitions: int
) -> None:
    try:
        where = placed("summit", ranks, partitions)
    except TilenetError as error:
        nodes = int(str(error).split("--nodes ")[1].split(",")[0])
        where = placed("summit", ranks, partitions, nodes)
    check_against_the_stand_in(where)


def test_a_slurm_that_knows_generic_resources_alone_gets_no_option_of_gpus() -> None:
    here = place(PlannedJob(4, 1, 4, "slurm", 1), machine("slurm"))
    launch = replace(here.machine.launch, gpu_option="--gres=gpu:")
    line = command(replace(here, machine=replace(here.machine, launch=launch)))
    assert "--gres=gpu:4" in line
    assert not [word for word in line if word.startswith("--gpu")]
