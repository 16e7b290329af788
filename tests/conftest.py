"""Small rasters and vector files written on the spot, small disks, the real imagery, and ranks.

`pytest` runs tests of one process, and of those over ranks the ones that one rank tells something.
`mpiexec -n N python -m mpi4py -m pytest --ranks N` runs those that are marked with N, on all ranks
at once; files that such tests share are written by rank 0. With `--device cuda` runs and maps that
ask for CPUs take the first GPU, which all ranks share.
"""

import errno
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pytest
import rasterio
import shapely
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE_SECONDS = 10  # a rank that failed waits for the others so long
FAILED = pytest.StashKey[str]()

GRID = {"driver": "GTiff", "crs": "EPSG:32630"}
GRID["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "fuzz",  # make fuzz
    derandomize=False,
    deadline=None,
    database=None,
    print_blob=True,
)
settings.load_profile("fixed")


@pytest.fixture
def write_raster(tmp_path: Path) -> Callable[..., str]:
    """Write (C, H, W) or (H, W) pixels; to a GeoTIFF on a sheared grid unless told otherwise."""

    def write(name: str, values: np.ndarray, **profile: Any) -> str:
        count, height, width = (1, *values.shape)[-3:]
        size = {"count": count, "height": height, "width": width, "dtype": values.dtype.name}
        with rasterio.open(tmp_path / name, "w", **(GRID | size | profile)) as file:
            file.write(values.reshape(count, height, width))
        return str(tmp_path / name)

    return write


@pytest.fixture
def write_vector(tmp_path: Path) -> Callable[..., str]:
    """Write shapes and the values of their field `class`; the ending says in which format."""

    def write(
        name: str,
        shapes: Sequence[Any],
        values: Sequence[Any] | None = None,
        crs: str | None = "EPSG:32630",
        **options: Any,
    ) -> str:
        import pyogrio

        options = {"geometry_type": "Polygon", "promote_to_multi": False} | options
        if name.endswith("json"):
            options["COORDINATE_PRECISION"] = 15
        columns = [] if values is None else [np.array(values)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'crs' was not provided")
            pyogrio.raw.write(
                tmp_path / name,
                shapely.to_wkb(np.array(shapes, object)),
                columns,
                [] if values is None else ["class"],
                crs=crs,
                **options,
            )
        return str(tmp_path / name)

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of so many kB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes: int) -> Path:
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        unmount()
        command = ["mount", *options]
        if not shutil.which("mount") or subprocess.run(command, check=False).returncode:
            pytest.skip("a small disk cannot be mounted here: that needs root")
        return folder

    def unmount() -> None:
        if os.path.ismount(folder):
            subprocess.run(["umount", str(folder)], check=True)

    yield mount
    unmount()


@pytest.fixture
def no_room() -> Callable[..., None]:
    """What a call does on a full disk."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fail


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def real() -> Path:
    """The imagery that TILENET_DATA points to."""
    if "TILENET_DATA" not in os.environ:
        pytest.skip("needs real imagery: set TILENET_DATA to its folder")
    return Path(os.environ["TILENET_DATA"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", type=int, default=1, help="ranks that mpiexec started")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where runs compute")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that tell nothing new on this number of ranks."""
    ranks = config.getoption("--ranks")
    left_out = [item for item in items if ranks not in (counts_of(item) or (1,))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def counts_of(item: pytest.Item) -> tuple[int, ...]:
    """Numbers of ranks that a test runs on, one of each tuple; empty: it is of one process."""
    mark = item.get_closest_marker("ranks")
    turn = crc32(item.name.encode())
    return tuple(
        count[turn % len(count)] if isinstance(count, tuple) else count
        for count in (mark.args if mark else ())
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.failed:
        item.stash[FAILED] = f"{item.nodeid}\n{report.longreprtext}"
    return report


@pytest.fixture(autouse=True)
def no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report, which takes longer than a small run, unless marked so."""
    if not request.node.get_closest_marker("report"):
        from tilenet.library import whole_run

        monkeypatch.setattr(whole_run, "try_report", lambda folder, maps: None)


@pytest.fixture(autouse=True)
def on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and maps take the first GPU with --device cuda."""
    if request.config.getoption("--device") != "cuda":
        return
    from tilenet.parallel.ranks import devices

    use = devices._prepare

    def on_the_first(chosen: tuple[torch.device, ...], place: Any) -> tuple[torch.device, ...]:
        return use((torch.device("cuda", 0),) * len(chosen), place)

    monkeypatch.setattr(devices, "_prepare", on_the_first)
    monkeypatch.setattr(devices, "share_gpus", lambda shown, count: ((0,) * count,) * len(shown))


@pytest.fixture
def not_on_one_gpu(request: pytest.FixtureRequest) -> None:
    """Partitions that flow and wait for other ranks need a GPU each, and would never end on one."""
    if request.config.getoption("--device") == "cuda":
        pytest.skip("needs a GPU for each partition")


@pytest.fixture(autouse=True)
def timer_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one such timer: pytest's stays, and a watchdog has its thread alone."""
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, lambda *args, **options: None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are caught as before: after a stop they are kept from the process, which ends."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> "Iterator[MPI.Intracomm]":
    """All ranks; no test begins before all have ended the one before."""
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == request.config.getoption("--ranks"), "give --ranks with mpiexec"
    _meet(request.node)
    yield MPI.COMM_WORLD
    _meet(request.node)


@cache
def _barrier() -> "MPI.Intracomm":
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()  # the tests' own messages cannot match it


def _meet(item: pytest.Item) -> None:
    """Wait for all ranks; one whose test failed, while others wait for its messages, ends all."""
    barrier = _barrier()
    met, began = barrier.Ibarrier(), time.monotonic()
    while not met.Test():
        failed = item.stash.get(FAILED, None)
        if failed and time.monotonic() - began > ALONE_SECONDS:
            capture = item.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(f"[rank {barrier.rank} of {barrier.size}] {failed}", file=sys.stderr)
                sys.stderr.flush()
                barrier.Abort(1)
        if time.monotonic() - began > 0.01:
            time.sleep(0.001)  # ranks share cores


@pytest.fixture
def shared_path(comm: "MPI.Intracomm", request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder that all ranks see."""
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="tilenet-") if comm.rank == 0 else None))
    yield path
    _meet(request.node)
    if comm.rank == 0:
        shutil.rmtree(path)
