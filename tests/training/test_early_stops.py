"""A stop that is asked for before the first step ends all ranks in the phase that they are in."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.data import labelled_blocks, survey
from tilenet.data.rasters import collar
from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError, TilenetError
from tilenet.library.whole_run import train
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.model import network
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.ranks.together import RankControl, end_if_asked, together
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images import open as images

STOPPED = "stopped before the first step"

# By the phase: what is called for each part of it, and how many parts there are at least.
PHASES: dict[str, tuple[object, str, int]] = {
    "opening": (images, "Raster", 30),
    "labels": (images, "open_labels", 30),
    "collar": (Raster, "collar_runs", 30),
    "held out": (labelled_blocks, "check_classes", 30),
    "survey": (survey, "check_classes", 30),
    "weights": (network, "build_layer", 30),
    "validation": (survey, "check_classes", 150),
}


def a_run(comm: MPI.Intracomm, folder: Path) -> RunFile:
    """Of so many images that each phase has as many parts on each of two ranks."""
    run = run_file(folder, scenes_of(folder, [(70, 64)] * 30, comm), NETWORKS["same-bilinear"])
    run = replace(run, nodata="collar", crop_px=32, batch_size=2, steps=1)
    return replace(run, validation=ValidationKeys(share=0.2, block_px=32))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collar, "STRIP_ROWS", 32)
    monkeypatch.setattr(survey, "BLOCK_PX", 32)


def slow(
    patch: pytest.MonkeyPatch, owner: object, name: str, asks: Callable[[int], bool]
) -> list[int]:
    """Have each call take its time, and in one of them a signal come; the calls are noted."""
    original, calls = getattr(owner, name), []

    def called(*arguments: Any, **more: Any) -> Any:
        calls.append(len(calls))
        time.sleep(0.02)
        if asks(len(calls)):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **more)

    patch.setattr(owner, name, called)
    return calls


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_before_the_first_step_ends_the_phase_on_all_ranks(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    small_parts: None,
    phase: str,
) -> None:
    run, before = a_run(comm, shared_path), 0
    if phase == "validation":
        files = {"images": run.images[1:], "labels": list(run.label_paths[1:])}
        run = replace(run, images=run.images[:1], labels=list(run.label_paths[:1]), batch_size=1)
        run = replace(run, validation=ValidationKeys(**files))
        before = 9 // comm.size  # blocks of the one that is trained on
    owner, name, parts = PHASES[phase]
    with monkeypatch.context() as patch:
        last = comm.rank == comm.size - 1
        calls = slow(patch, owner, name, lambda number: last and number == before + 3)
        assert train(run, comm=comm) == 75
    # The other rank may hear of it before its first call.
    assert (before + 3 if last else before) <= len(calls) < parts * 2 // 3
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count(STOPPED) == 1
    assert not (Path(run.output) / "checkpoints").exists()
    assert not (Path(run.output) / "history.csv").exists()
    if phase == "survey":
        assert train(run, resume=True, comm=comm) == 0


@pytest.mark.ranks(1, 2)
def test_a_stop_ends_a_block_that_is_made_of_many_pixels(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene,) = scenes_of(shared_path, [(320, 320)], comm)
    monkeypatch.setattr(survey, "STRIP_PX", 5 * 320)  # of the file: less than one row that is read
    requests, reads, read = StopRequests(), [], Raster.read

    def counted(*arguments: Any) -> Any:
        reads.append(time.sleep(0.01))
        requests.requested = True
        return read(*arguments)

    monkeypatch.setattr(Raster, "read", counted)
    with Raster(str(scene.image), resolution=16.02) as image, pytest.raises(StopAgreed):
        survey.survey([image], None, 2, None, RankControl(comm, stop=requests))
    assert len(reads) == 0 if comm.rank else 1 < len(reads) < 40  # of 80 in the block


@pytest.mark.ranks(2)
def test_a_map_that_may_go_on_stops_while_its_collar_is_looked_for(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene,) = scenes_of(shared_path, [(70, 64)], comm)
    run = replace(run_file(shared_path, [scene], NETWORKS["same-bilinear"]), steps=1)
    assert train(run, comm=comm) == 0
    monkeypatch.setattr(collar, "STRIP_ROWS", 1)
    out = shared_path / "map.tif"
    wanted = Prediction(run.output, str(scene.image), str(out), nodata="collar", resume=True)
    with monkeypatch.context() as patch:
        calls = slow(patch, Raster, "collar_runs", lambda number: comm.rank and number == 3)
        assert predict(wanted, comm)["stopped"]
    assert len(calls) < 25
    assert not predict(wanted, comm)["stopped"]


# --- what carries it


def shares(comm: MPI.Intracomm, requests: StopRequests | None, parts: int, wrong: int = -1) -> int:
    """Work through some parts, of which the last rank finds one wrong; returns how many it were."""
    done = 0
    with together(comm, requests) as turns:
        for part in range(parts):
            if comm.rank == comm.size - 1 and part == wrong:
                raise TilenetError("a file is broken")
            turns.part_done()
            time.sleep(0.001)
            done += 1
    return done


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("who", ["first", "last", "all", "none"])
def test_all_ranks_leave_together(comm: MPI.Intracomm, who: str) -> None:
    """After one was asked to, whatever the others have done of their shares by then."""
    asked = {"first": comm.rank == 0, "last": comm.rank == comm.size - 1, "all": True}
    requests = StopRequests()
    requests.requested = asked.get(who, False)
    if who == "none":
        assert shares(comm, requests, comm.rank * 7) == comm.rank * 7
        end_if_asked(comm, requests)
    else:
        with pytest.raises(StopAgreed):
            shares(comm, requests, 1 << 60)
    assert requests.agreed == (who != "none")
    assert shares(comm, None, 2) == 2  # whose messages do not meet those of the one before


@pytest.mark.ranks(2, 3)
def test_what_one_rank_found_wrong_ends_the_others_shares(comm: MPI.Intracomm) -> None:
    with pytest.raises(AgreedError, match=r"^a file is broken$"):
        shares(comm, None, 1 << 60, wrong=5)
