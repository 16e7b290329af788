"""What cannot be validated is said, before the first step or later, by all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from validated_runs import NETWORK, a_run, held_out, table
from whole_image import IGNORE, Scene

from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.windows import Window
from tilenet.train import train
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.step import Step


def spoiled(comm: MPI.Intracomm, scene: Scene, what: str) -> dict[str, str]:
    """Validation keys of a scene of which something is wrong."""
    if comm.rank == 0:
        if what == "labels":
            with rasterio.open(scene.labels, "r+") as file:
                file.write(np.where(scene.classes == 1, 3, scene.classes).astype(np.uint8), 1)
        elif what == "unlabelled":
            with rasterio.open(scene.labels, "r+") as file:
                file.write(np.full(scene.classes.shape, IGNORE, np.uint8), 1)
        elif what == "bands":
            with rasterio.open(scene.image) as file:
                profile, pixels = file.profile, file.read()[:2]
            with rasterio.open(scene.image, "w", **(profile | {"count": 2})) as file:
                file.write(pixels)
        elif what == "broken":
            whole = scene.image.read_bytes()
            scene.image.write_bytes(whole[: len(whole) // 2])
        elif what == "missing":
            scene.labels.unlink()
    comm.Barrier()
    return {"images": str(scene.image), "labels": str(scene.labels)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("labels", "labels must be 0 to classes − 1"),
        ("unlabelled", "at least one pixel with data must be labelled"),
        ("bands", r"band"),
        ("broken", "must be readable everywhere"),
        ("missing", "labels must be a raster or a vector file"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(
    comm: MPI.Intracomm, shared_path: Path, what: str, said: str
) -> None:
    run, held = a_run(comm, shared_path)
    run = replace(run, validation=ValidationKeys(**spoiled(comm, held[1], what)))
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)
    assert not (Path(run.output) / "history.csv").exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "gives", "said"),
    [
        (Labels, 3, "labels must be 0 to classes − 1"),
        (Labels, None, "is broken"),
        (Raster, None, "is broken"),
        (Labels, IGNORE, "at least one pixel with data must be labelled in what validation holds"),
    ],
    ids=["no class", "labels", "image", "unlabelled"],
)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_what_breaks_later_ends_all_ranks_alike(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    gives: int | None,
    said: str,
    mode: Any,
) -> None:
    network = replace(NETWORK, norm="instance" if mode == "exchange" else None)
    run, _ = a_run(comm, shared_path, network, held_out(comm, shared_path)[1:], halo_mode=mode)
    take, read, begun = Step.take, kind.read, []

    def begins(self: Step, *rest: Any) -> Any:
        begun.append(1)
        return take(self, *rest)

    def breaks(self: Any, window: Window, region: Window | None = None) -> Any:
        # One rank finds it, of a file that is wrong all over each.
        found = read(self, window, region)
        if begun and "held1" in self.path and (gives == IGNORE or comm.rank == 0):
            if gives is None:
                raise TilenetError(f"{self.path} is broken")
            found[:] = gives
        return found

    monkeypatch.setattr(Step, "take", begins)
    monkeypatch.setattr(kind, "read", breaks)
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)
    assert not table(run)
