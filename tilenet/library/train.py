"""`tilenet.train`: train with keys of the run file as arguments."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from tilenet.adoption.adopt import own_settings
from tilenet.errors import AgreedError, TilenetError, UsageError
from tilenet.library.network import network_keys
from tilenet.library.run import Run
from tilenet.library.whole_run import train as train_run
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import handlers_come_back
from tilenet.parallel.ranks.abort import end_where_uncaught
from tilenet.parallel.ranks.comm import world
from tilenet.parallel.ranks.meeting import check_alike
from tilenet.training.config.read import read_keys, with_listed_images
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.log import Callbacks, RowCallback

T = TypeVar("T")


def train(
    net: nn.Module | str | None = None,
    /,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: RowCallback | None = None,
    on_validation: RowCallback | None = None,
    **keys: Any,
) -> Run:
    """Train a network on images of any size. Collective: all ranks of the job call it alike.

        run = tilenet.train(
            net, images="scene.tif", labels="roads.gpkg", classes=["background", "road"],
            crop_px=512, batch_size=8, epochs=20, output="run",
        )

    Args:
        net: A module that takes images (B, bands, H, W) and gives maps (B, classes, H, W); rank 0's
            is trained, and is not changed: the trained weights are `run.weights()`. Or
            `unet-small`, `unet-medium-1`, `unet-medium-2`, `unet-large`; or `package:function` that
            makes a module. None: the key `network` names it.
        resume: Continue from the folder's checkpoint, if it has one.
        overwrite: Start over if the folder holds a run.
        on_step: Called on rank 0 after each step, with its row of `history.csv`: `step`, `loss`,
            `learning_rate`, `seconds` and more by name.
        on_validation: The same, with a row of `validation.csv`: `step`, `mean_iou` and more.
        keys: Keys of the run file (docs/run-file.md); a group is a dictionary, as in
            `optimizer={"lr": 1e-3}`. `images`, `classes`, `output`, and `steps` or `epochs` are
            needed.

    Returns:
        The run: its folder, curves and weights; unfinished if a signal stopped it.

    Raises:
        TilenetError: On all ranks, if any rank refuses a key, a file or the network.
    """
    comm = world()
    end_where_uncaught()
    module = net if isinstance(net, nn.Module) else None
    # None is a value where it is the default: it replaces that of a plan.
    run_keys = {
        name: value
        for name, value in keys.items()
        if value is not None or getattr(RunFile, name, "") is None
    }

    def read() -> tuple[RunFile, None]:
        return read_keys(run_keys | {"network": network_keys(net, keys)}), None

    flags = f"resume: {resume}, overwrite: {overwrite}"
    listed_keys = repr(sorted(run_keys.items(), key=str))
    run, _ = read_once(read, comm, listed_keys, type(net).__name__, flags)
    hooks = {"on_step": on_step, "on_validation": on_validation}
    callbacks = Callbacks(**{name: hook for name, hook in hooks.items() if hook is not None})
    with handlers_come_back(), own_settings():
        code = train_run(
            run, resume=resume, overwrite=overwrite, comm=comm, module=module, callbacks=callbacks
        )
    return Run(run.output, finished=code == 0)


def read_once(
    read: Callable[[], tuple[RunFile, T]], comm: Intracomm, *alike: str
) -> tuple[RunFile, T]:
    """Read a run on rank 0, list its images, and give it to all ranks. Collective.

    Rank 0 alone reads, since a file may differ between nodes, or be missing on one.

    Args:
        read: Returns the run and a second value, which all ranks get too.
        alike: Texts that must be the same on all ranks.

    Raises:
        AgreedError: The run cannot be read, or `alike` differs between ranks. The cause is a
            UsageError where a key was not understood.
    """
    outcome: tuple[RunFile, T] | TilenetError | UsageError | None = None
    if comm.rank == 0:
        try:
            run, extra = read()
            run, notes = with_listed_images(run)
            for note in notes:
                say(note)
            outcome = run, extra
        except (TilenetError, UsageError) as error:
            outcome = error
    outcome = comm.bcast(outcome)
    if isinstance(outcome, TilenetError | UsageError):
        raise AgreedError(str(outcome)) from outcome
    check_alike(comm, *alike)
    assert outcome is not None
    return outcome
