"""Facts of machines: the packaged ones, the user's own, and files that make no sense."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tilenet.errors import TilenetError
from tilenet.planning.machines.launch_facts import LaunchFacts
from tilenet.planning.machines.read import known_machines, machine
from tilenet.planning.machines.user_file import user_file

OWN = """
[laptop]
devices_per_node = 2
device = "two of something"
memory_bytes = 12_345_678
host_bytes = 987_654_321
cores = 7
memory_bandwidth = 3.5e11
link_bandwidth = 1.5e10
host_bandwidth = 2.5e10
network_bandwidth = 125_000_000
maths_efficiency = 0.35
memory_efficiency = 1
flops = { float32 = 2e12, bfloat16 = 5e12 }
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the user's own file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tilenet").mkdir()
    return tmp_path / "tilenet" / "machines.toml"


def test_summits_facts_are_the_published_ones() -> None:
    summit = machine("summit")
    assert (summit.devices_per_node, summit.cores) == (6, 42)
    assert (summit.memory_bytes, summit.host_bytes) == (16 * 2**30, 512 * 2**30)
    assert summit.flops == {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
    assert (summit.memory_bandwidth, summit.link_bandwidth) == (900e9, 50e9)
    assert (summit.host_bandwidth, summit.network_bandwidth) == (50e9, 25e9)


def test_every_packaged_machine_can_be_had() -> None:
    assert known_machines() == (
        *("summit", "frontier", "perlmutter", "lumi", "jupiter", "polaris", "aurora", "tuolumne"),
        *("slurm", "pbs", "workstation", "local"),
    )
    for name in known_machines():
        facts = machine(name)
        assert facts.name == name
        assert facts.host_bytes * 2 > facts.memory_bytes
        assert (facts.maths_efficiency, facts.memory_efficiency) == (0.6, 0.8)


def test_the_local_machine_is_what_this_process_may_use() -> None:
    local = machine("local")
    assert (local.device, local.devices_per_node) == ("cpu", 1)
    assert local.cores == len(os.sched_getaffinity(0))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**28 < local.host_bytes <= physical
    assert local.memory_bytes == local.rank_bytes == int(local.host_bytes * 0.9)
    assert local.flops["float32"] == 2 * local.flops["float64"]


def test_seconds_follow_from_peaks_and_efficiencies_where_there_is_a_peak() -> None:
    facts = replace(
        machine("summit"), maths_efficiency=0.5, memory_efficiency=0.25, memory_bandwidth=4e9
    )
    assert facts.maths_s(15.7e12, "float32") == pytest.approx(2)
    assert facts.maths_s(1.25e12, "float16") == pytest.approx(0.02)
    assert facts.memory_s(7e9) == pytest.approx(7)
    assert facts.transfer_s(25e9) == pytest.approx(2)

    with pytest.raises(TilenetError, match=r"summit has no peak for precision bfloat16 .*float16"):
        machine("summit").maths_s(1, "bfloat16")


# --- how jobs start


def test_launch_facts_are_mpiexecs_or_overridden_one_by_one(config: Path) -> None:
    config.write_text(OWN)
    assert machine("laptop").launch == LaunchFacts()
    assert LaunchFacts().launcher == "mpiexec"
    config.write_text('[slurm.launch]\nmpi = "pmix"\nenvironment = { UCX_TLS = "tcp" }\n')
    facts = machine("slurm").launch
    assert (facts.mpi, facts.launcher) == ("pmix", "srun")
    assert facts.environment == {"UCX_TLS": "tcp"}


# --- the user's own


def test_what_messages_cost_may_be_said_or_left_out(config: Path) -> None:
    config.write_text("[summit]\nlatency_s = 0\nmessage_s = 3e-6\nfile_bandwidth = 5e8\n")
    facts = machine("summit")
    assert (facts.latency_s, facts.message_s, facts.kernel_s) == (0, 3e-6, 0)
    assert facts.file_bandwidth == 5e8
    config.write_text("[summit]\nkernel_s = -1\n")
    with pytest.raises(TilenetError, match="kernel_s must be a number of seconds, at least 0"):
        machine("summit")
    config.write_text("[summit]\nfile_bandwidth = 0\n")
    with pytest.raises(TilenetError, match="file_bandwidth must be a positive number"):
        machine("summit")


def test_the_users_machines_and_keys_are_taken(config: Path) -> None:
    config.write_text(OWN)
    laptop = machine("laptop")
    assert (laptop.device, laptop.cores) == ("two of something", 7)
    assert laptop.flops == {"float32": 2e12, "bfloat16": 5e12}
    assert known_machines()[-1] == "laptop"
    before = machine("summit")
    config.write_text(
        "[summit]\nmaths_efficiency = 0.41\nflops.bfloat16 = 9e12\n[local]\ncores = 3\n"
    )
    flops = {**before.flops, "bfloat16": 9e12}
    assert machine("summit") == replace(before, maths_efficiency=0.41, flops=flops)
    assert machine("local").cores == 3


def test_without_xdg_config_home_it_is_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unusable)
        assert user_file() == tmp_path / "me" / ".config" / "tilenet" / "machines.toml"


@pytest.mark.parametrize(("wrong", "near"), [("sumit", "summit"), ("Frontier", "frontier")])
def test_an_unknown_name_is_refused_with_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(TilenetError, match=rf"named '{wrong}' \(known: summit, .*nearest: {near}"):
        machine(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[summit", "must be a readable TOML file"),
        ("summit = 3", r"must be a table \(summit = 3\)"),
        ("[summit]\ncors = 3", "no key 'cors'.*nearest: cores"),
        ("[mine]\ncores = 3", "missing: 'devices_per_node', 'device', 'memory_bytes', 'host_"),
        ("[summit]\ncores = 0", r"summit.cores must be a positive whole number \(got 0\)"),
        ("[summit]\ncores = 2.5", "positive whole number"),
        ("[summit]\ncores = true", "positive whole number"),
        ("[summit]\nname = 'x'", "no key 'name'"),
        ("[summit]\nlink_bandwidth = inf", "positive number"),
        ("[summit]\nlink_bandwidth = nan", "positive number"),
        ("[summit]\nlink_bandwidth = 1" + "0" * 400, "positive number"),
        ("[summit]\nhost_bytes = 1" + "0" * 5000, "must be a readable TOML file"),
        ("[summit]\nlink_bandwidth = '50 GB/s'", "positive number"),
        ("[summit]\nmaths_efficiency = 1.5", "a share above 0 and at most 1"),
        ("[summit]\nflops = 3", "by precision"),
        ("[summit]\nflops.float8 = 3", r"by precision \(of float32, .*'float8': 3"),
        ("[summit]\nflops.float32 = -3", "summit.flops must be .*positive.*'float32': -3"),
        ("[summit]\ndevice = 3", "must be a text"),
        ("a = " + "[" * 5000, "must be a readable TOML file"),
        (b"[summit]\nname = '\xff\xfe'", "must be a readable TOML file"),
        ("[summit]\nlaunch = 3", "launch must be a table"),
        ("[summit]\nlaunch.modul = ['x']", "no key 'modul'.*nearest: modules"),
        (
            "[summit]\nlaunch.launcher = 'prun'",
            "must be one of jsrun, srun, flux, pals, hydra, mpiexec",
        ),
        ("[summit]\nlaunch.scheduler = 'sge'", "must be one of lsf, slurm, pbs, flux, none"),
        ("[summit]\nlaunch.launcher = 'srun'", "mpi must name srun's plug-in"),
        (
            "[summit]\nlaunch.launcher = 'pals'",
            "pals starts ranks in jobs of PBS .*: pals, .*: lsf",
        ),
        ("[summit]\nlaunch.scheduler = 'flux'", "jobs of LSF .*: jsrun, launch.scheduler: flux"),
        ("[summit]\nlaunch.sockets = 0", "positive whole number"),
        ("[summit]\nlaunch.threads_per_core = true", "positive whole number"),
        ("[summit]\nlaunch.own_device = 1", "true or false"),
        (
            "[summit]\nlaunch.gpu_option = '--gpus='",
            "gpu_option must be --gpus-per-node= or --gres",
        ),
        ("[summit]\nlaunch.gpu_option = '--gres=gpu:4'", "gpu_option must be --gpus-per-node= or"),
        (
            "[summit]\nlaunch.own_device = true\nlaunch.gpu_option = '--gres=gpu:'",
            "own by --gpus-per-task, which goes with",
        ),
        ("[summit]\nlaunch.device_order = ['a']", "a list of whole numbers"),
        ("[summit]\nlaunch.program = []", "at least one text"),
        ("[summit]\nlaunch.modules = 'open-ce'", "a list of texts without line breaks"),
        ('[summit]\nlaunch.header = ["a\\nb"]', "a list of texts without line breaks"),
        ('[summit]\nlaunch.queue = "a\\nb"', "a text without line breaks"),
        ("[summit]\nlaunch.device_order = [0, 0, 1, 2, 3, 4]", "each of the devices 0 to 5 once"),
        (
            "[summit]\ndevice = 'Intel X'\nlaunch.device_order = [0, 1, 2, 3, 4, 5]",
            "orders devices of NVIDIA and AMD",
        ),
        ("[summit]\nlaunch.environment = { 'A B' = 'x' }", "names of variables"),
        ("[summit]\nlaunch.environment = { A = 3 }", "names of variables"),
        ("[summit]\nlaunch.node_storage = 'tmp'", "an absolute path"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_a_sentence(
    config: Path, text: str | bytes, said: str
) -> None:
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TilenetError, match=said) as caught:
        machine("mine" if b"[mine]" in config.read_bytes() else "summit")
    assert str(config) in str(caught.value)


def test_a_folder_in_its_place_is_refused(config: Path) -> None:
    config.mkdir()
    with pytest.raises(TilenetError, match="readable TOML file"):
        machine("summit")
