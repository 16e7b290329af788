"""Train a network on images of any size over any number of ranks, as a run file says."""

from contextlib import ExitStack
from pathlib import Path

from torch import nn

from tilenet.data.same_files import hash_of_folders
from tilenet.library.prepare import prepare_loop
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed, check_torchrun, wait_quietly, world
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.report.page import try_report
from tilenet.training.announce import announce_images
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.log import NO_CALLBACKS, Callbacks
from tilenet.training.folder.run_folder import RunFolder
from tilenet.training.images.held_out import hold_out
from tilenet.training.images.open import agree_on_files, open_images
from tilenet.training.setup.decide import plan_run
from tilenet.training.setup.share import share_architecture

STOPPED = 75  # exit code: a checkpoint is written, run again with --resume to go on


def train(
    run: RunFile,
    *,
    resume: bool = False,
    overwrite: bool = False,
    comm: Intracomm | None = None,
    module: nn.Module | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> int:
    """Train as the run file says. Collective over `comm`.

    Args:
        resume: Continue from the folder's checkpoint, if it has one.
        overwrite: Start over if the folder holds a run.
        comm: Ranks of the run; None: all ranks of the job.
        module: The network that `network.module` names, if a program made it; rank 0's is trained.
        callbacks: Called on rank 0 after each step and validation.

    Returns:
        The exit code: 0 done, 75 stopped on a signal: with a checkpoint, or before the first step.

    Raises:
        AgreedError: On all ranks, if any rank refuses a key or a file before the first step.
        TilenetError: On one rank, if a file cannot be read later.
    """
    comm = world() if comm is None else comm
    try:
        return _train(run, comm, module, callbacks, resume=resume, overwrite=overwrite)
    except StopAgreed:
        if comm.rank == 0:
            say("tilenet: stopped before the first step: run again as before, nothing was changed")
        return STOPPED


def _train(
    run: RunFile,
    comm: Intracomm,
    module: nn.Module | None,
    callbacks: Callbacks,
    *,
    resume: bool,
    overwrite: bool,
) -> int:
    """Do the work of `train`, which handles a stop before the first step.

    Raises:
        StopAgreed: On all ranks, if one was asked to stop before the first step.
    """
    with ExitStack() as stack:
        with agreed(comm):
            check_torchrun(comm)
            name = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(run.hang_seconds, name))
            # From here on: MPICH catches SIGUSR1 itself, and forgets it.
            stop = stack.enter_context(StopRequests())
        control = RankControl(comm, watchdog, stop)
        opened = open_images(run, stack, control)
        names, num_bands = run.class_names, len(opened.shapes[0][0])
        architecture = share_architecture(
            run.network, num_bands, len(names), run.seed, control, module, run.window_px
        )
        with together(comm, stop):
            plan = plan_run(run, opened.shapes, comm.size, architecture)
        terms = run.terms | {"files": agree_on_files(opened, control)}
        terms["folders"] = hash_of_folders(opened.files)
        keep = run.checkpoints.keep
        folder = RunFolder(Path(run.output), write=comm.rank == 0, terms=terms, keep=keep)
        stack.enter_context(folder).open(comm, watchdog, resume=resume, overwrite=overwrite)
        context_px = plan.record.context().context_any_pixel_px
        opened = hold_out(opened, run.validation, len(names), run.seed, context_px, control)
        if comm.rank == 0:
            as_made = run.init is None and not folder.has_checkpoint
            announce_images(opened, plan, as_made=as_made)
        loop = prepare_loop(run, plan, architecture.module, opened, folder, control, stack)
        finished = loop.run(callbacks)
        if comm.rank == 0:
            # A job that was asked to stop has no time for maps.
            try_report(folder.path, maps=finished)
        # The run's files are complete when any rank returns; until then rank 0 has the cores.
        wait_quietly(comm)
        watchdog.arm("the end of the run", SLOW)
    return 0 if finished else STOPPED
