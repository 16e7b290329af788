"""`tilenet.train`: a run whose keys a program gives, as a run file would."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from tilenet.errors import AgreedError, TilenetError, UsageError
from tilenet.library.network import network_keys
from tilenet.library.run import Run
from tilenet.library.whole_run import train as train_as_said
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.comm import end_where_uncaught, world
from tilenet.parallel.ranks.meeting import check_alike
from tilenet.training.config.read import read_keys, with_listed_images
from tilenet.training.config.run_file import RunFile
from tilenet.training.log import Callbacks, Hears

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["read_once", "train"]

T = TypeVar("T")


def train(
    net: nn.Module | str | None = None,
    /,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: Hears | None = None,
    on_validation: Hears | None = None,
    **keys: Any,
) -> Run:
    """Train a network on images of any size. Collective: all ranks of the job call it alike.

        run = tilenet.train(
            net, images="scene.tif", labels="roads.gpkg", classes=["background", "road"],
            crop_px=512, batch_size=8, epochs=20, output="run",
        )

    Args:
        net: A module that takes images (B, bands, H, W) and gives maps (B, classes, H, W); that of
            rank 0 counts, and stays as it is: the trained weights are `run.weights()`. Or
            `unet-small`, `unet-medium-1`, `unet-medium-2`, `unet-large`; or `package:function` that
            makes a module. None: what `network` says.
        resume: Go on from the folder's checkpoint, where it has one.
        overwrite: Begin where the folder holds a run.
        on_step: Called on rank 0 after each step, with its row of `history.csv`: `step`, `loss`,
            `learning_rate`, `seconds` and more by name.
        on_validation: The same, with a row of `validation.csv`: `step`, `mean_iou` and more.
        keys: Keys of the run file (docs/run-file.md); a group is a dictionary, as in
            `optimizer={"lr": 1e-3}`. `images`, `classes`, `output`, and `steps` or `epochs` are
            needed.

    Returns:
        The run: its folder, curves and weights; unfinished where a signal stopped it.

    Raises:
        TilenetError: On all ranks, for what any rank found wrong: a key, a file, the network.
    """
    comm = world()
    end_where_uncaught()
    module = net if isinstance(net, nn.Module) else None
    given = {name: value for name, value in keys.items() if value is not None}

    def read() -> tuple[RunFile, None]:
        return read_keys(given | {"network": network_keys(net, keys)}), None

    flags = f"resume: {resume}, overwrite: {overwrite}"
    alike = repr(sorted(given.items(), key=str)), type(net).__name__, flags
    run, _ = read_once(read, comm, *alike)
    said = {"on_step": on_step, "on_validation": on_validation}
    callbacks = Callbacks(**{name: hears for name, hears in said.items() if hears is not None})
    code = train_as_said(
        run, resume=resume, overwrite=overwrite, comm=comm, module=module, callbacks=callbacks
    )
    return Run(run.output, finished=code == 0)


def read_once(
    read: Callable[[], tuple[RunFile, T]], comm: "MPI.Intracomm", *alike: str
) -> tuple[RunFile, T]:
    """The run that rank 0 reads, its images listed, and more, on all ranks. Collective.

    A file that differs between nodes, or is missing on one, would have ranks do different things.

    Args:
        alike: What all ranks ask for.

    Raises:
        AgreedError: It cannot be read; the cause is a UsageError where it was not understood. Or
            ranks ask for different things.
    """
    found: tuple[RunFile, T] | TilenetError | UsageError | None = None
    if comm.rank == 0:
        try:
            run, more = read()
            run, notes = with_listed_images(run)
            for note in notes:
                say(note)
            found = run, more
        except (TilenetError, UsageError) as error:
            found = error
    found = comm.bcast(found)
    if isinstance(found, TilenetError | UsageError):
        raise AgreedError(str(found)) from found
    check_alike(comm, *alike)
    assert found is not None
    return found
