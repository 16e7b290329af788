"""The data of a user-written loop: images, their statistics, this rank's tiles."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.library.local_network import LocalNetwork
from tilenet.library.names import check_names
from tilenet.library.train import read_once
from tilenet.mpi import Intracomm
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.config.read import read_keys
from tilenet.training.config.run_file import RunFile
from tilenet.training.images.open import RunImages, agree_on_files, open_images
from tilenet.training.images.run_data import RunData
from tilenet.training.images.survey import run_survey
from tilenet.training.network import RunNetwork
from tilenet.training.proof.run import proved_network
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.decide import plan_run
from tilenet.training.setup.halo_choice import HaloChoice, choose_halo_mode
from tilenet.training.setup.run_plan import RunPlan

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

# Keys of the run file on data and tiles; loss, optimizer and validation are the loop's.
KEYS = (
    "images", "labels", "classes", "crop_px", "batch_size", "steps", "epochs", "bands", "nodata",
    "resolution", "bbox", "window", "vectors", "ignore_index", "oversample", "augment", "seed",
    "tiles", "mesh", "partitions", "balance", "checkpointing", "device", "read_ahead", "output",
    "prove", "hang_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class OwnData:
    """Data of a loop, and the network over this rank's devices.

    Attributes:
        run: The keys of the run.
        plan: Plan of the tiles of images, with the images' statistics.
        data: This rank's tiles of each step.
        network: The network over this rank's devices; the loop closes it.
        watchdog: A watchdog at rest; steps arm it.
        choice: The chosen halo mode with its plan and reason; None: the caller chose the mode.
        at_once: Reason why tiles cannot be handed out one by one; empty: they can.
    """

    run: RunFile
    plan: RunPlan
    data: RunData
    network: RunNetwork
    watchdog: Watchdog
    choice: HaloChoice | None
    at_once: str


def open_data(
    local: LocalNetwork,
    keys: Mapping[str, Any],
    statistics: Statistics | None,
    stack: ExitStack,
    comm: Intracomm,
) -> OwnData:
    """Open images and labels, survey all pixels, lay out the tiles. Collective.

    Args:
        keys: Values of some of `KEYS`.
        statistics: Mean and std per band that the weights were trained with; None: the images' own.
        stack: Closes files and watchdog.

    Raises:
        AgreedError: On all ranks, if any rank refuses a key, a file or the network.
    """
    with agreed(comm):
        check_names(keys, KEYS, "steps")
    local.check_weights(comm)
    alike = repr(sorted(keys.items(), key=str))
    run, _ = read_once(lambda: (_run_file(local, keys), None), comm, alike)
    watchdog = stack.enter_context(Watchdog(run.hang_seconds, f"rank {comm.rank} of {comm.size}"))
    control = RankControl(comm, watchdog)
    opened = open_images(run, stack, control)
    with agreed(comm):
        adopted = local.adopted
        _check_bands(local, opened)
        architecture = Architecture(adopted.layers, adopted=adopted)
        choice = (
            choose_halo_mode(run, opened.shapes, comm.size, architecture)
            if local.halo_mode == "auto"
            else None
        )
        plan = choice.plan if choice else plan_run(run, opened.shapes, comm.size, architecture)
    agree_on_files(opened, control)
    devices = RunDevices.choose(run.device, run.num_partitions, comm)
    folder = _folder(run, keys, comm)
    survey = run_survey(opened, plan, run.reading, folder, control)
    with agreed(comm):
        mean, std = statistics or (survey.mean, survey.std)
        record = replace(plan.record, mean=mean, std=std)
        plan = replace(plan, record=record)
        data = RunData.of(run, plan, opened, survey.classes_in_cells, comm.rank)
    stacked = max(comm.allgather(max(load.stacked for load in data.work.loads())))
    at_once = f"tiles at once: {stacked}" * (stacked > 1)
    if plan.swept:
        at_once = "halo_mode: sweep"
    watchdog.arm("the proof and the network over the ranks", SLOW)
    local.network.mask_key.seed = run.seed
    network = proved_network(run, plan, None, data, devices, RankControl(comm), local.network)
    watchdog.rest()
    return OwnData(run, plan, data, network, watchdog, choice, at_once)


def _run_file(local: LocalNetwork, keys: Mapping[str, Any]) -> RunFile:
    defaults = {
        "classes": local.adopted.classes,
        "network": {"module": f"tilenet:{local.adopted.name}"},
        "output": ".",  # required by the run file; nothing is written there
        "halo_mode": "overlap" if local.halo_mode == "auto" else local.halo_mode,
        "precision": local.adopted.precision,
    }
    if keys.get("steps") is None and keys.get("epochs") is None:
        defaults["epochs"] = 1
    run = read_keys(defaults | dict(keys))
    if len(run.class_names) != local.adopted.classes:
        raise TilenetError(
            f"a network gives one channel per class (network: {local.adopted.classes}, classes: "
            f"{len(run.class_names)}); name as many"
        )
    return run


def _folder(run: RunFile, keys: Mapping[str, Any], comm: Intracomm) -> Path | None:
    """Return the folder that keeps the survey; None: it is not kept."""
    folder = Path(run.output) if "output" in keys else None
    with agreed(comm):
        if folder is not None and not folder.is_dir():
            raise TilenetError(
                f"the survey is kept in a folder that is there (output: {folder}); make it, or "
                "leave output out"
            )
    return folder


def _check_bands(local: LocalNetwork, opened: RunImages) -> None:
    bands, expected = len(opened.shapes[0][0]), local.adopted.bands
    if expected != bands:
        raise TilenetError(
            f"a network takes the bands of the images (network: {expected}, "
            f"{opened.images[0].path}: {bands}); give as many by bands"
        )
