"""Tiles in, weights out: train a network on images of any size over any number of ranks."""

from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.errors import AgreedError
from tilenet.parallel.health.progress import progress_bar, say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.trace import TraceRecorder
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed, wait_quietly, world
from tilenet.parallel.ranks.start import kept_on_ctrl_c
from tilenet.parallel.ranks.together import end_if_asked, together
from tilenet.report.page import try_report
from tilenet.training.config import RunFile
from tilenet.training.folder import RunFolder, how_to_resume
from tilenet.training.images import (
    RunImages,
    agree_on_files,
    hold_out,
    image_notes,
    open_images,
    staged_on_node,
)
from tilenet.training.network import RunNetwork
from tilenet.training.record import RunAccount, RunLog, keep_run
from tilenet.training.scoring import Validation
from tilenet.training.setup import RunDevices, RunPlan, announce, cell_note, plan_run
from tilenet.training.step import Step, StepResult, Update
from tilenet.training.survey import class_weights, run_survey
from tilenet.training.swap import decide_swaps, say_swaps
from tilenet.training.validation import RunValidation
from tilenet.training.workload import RankWork, TileReader, schedule_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["train"]


STOPPED = 75  # exit code: a checkpoint is written, run again with --resume to go on


def train(
    run: RunFile,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_gaps: bool = False,
    comm: "MPI.Intracomm | None" = None,
) -> int:
    """Train as the run file says. Collective: all ranks of `comm`, None: of the job, call it.

    Args:
        resume: Go on from the folder's checkpoint, where it has one.
        overwrite: Begin where the folder holds a run.
        accept_gaps: Resume although rows of the history are missing.

    Returns:
        The exit code: 0 done, 75 stopped on a signal: with a checkpoint, or before the first step.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first step.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    try:
        with kept_on_ctrl_c(lambda: how_to_resume(Path(run.output))):
            return _train(run, comm, resume=resume, overwrite=overwrite, accept_gaps=accept_gaps)
    except StopAgreed:
        if comm.rank == 0:
            say("tilenet: stopped before the first step: run again as before, nothing was changed")
        return STOPPED


def _train(
    run: RunFile, comm: "MPI.Intracomm", *, resume: bool, overwrite: bool, accept_gaps: bool
) -> int:
    """As `train`.

    Raises:
        StopAgreed: On all ranks, as one was asked to stop before the first step.
    """
    with ExitStack() as stack:
        with agreed(comm):
            name = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(run.hang_seconds, name))
            # From here on: MPICH catches SIGUSR1 itself, and forgets it.
            stop = stack.enter_context(StopRequests())
        with together(comm, stop) as turns:
            opened = open_images(run, stack, watchdog, turns.part_done)
            plan = plan_run(run, opened.shapes, comm.size)
        terms = run.terms | {"files": agree_on_files(opened, comm, watchdog, stop)}
        keep = run.checkpoints.keep
        folder = RunFolder(Path(run.output), write=comm.rank == 0, terms=terms, keep=keep)
        stack.enter_context(folder).open(comm, watchdog, resume=resume, overwrite=overwrite)
        stack.enter_context(staged_on_node(run.cache_dir, opened, comm))
        context_px, names = plan.record.context().context_any_pixel_px, run.class_names
        chosen_by = run.validation, len(names), run.seed, context_px
        opened = hold_out(opened, *chosen_by, comm, watchdog, stop)
        if comm.rank == 0:
            for note in image_notes(opened, context_px, plan.record.layers) + cell_note(plan):
                say(note)
        job = _Job(run, plan, opened, folder, watchdog, stop, comm)
        code = job.train(accept_gaps=accept_gaps)
        watchdog.arm("the end of the run", SLOW)
    return code


class _Job:
    """A run under way on one rank."""

    def __init__(
        self,
        run: RunFile,
        plan: RunPlan,
        opened: RunImages,
        folder: RunFolder,
        watchdog: Watchdog,
        stop: StopRequests,
        comm: "MPI.Intracomm",
    ) -> None:
        self.run, self.opened, self.folder = run, opened, folder
        self.watchdog, self.stop, self.comm = watchdog, stop, comm
        watchdog.arm("the start of the run", SLOW)
        self.devices = RunDevices.choose(run.device, run.num_partitions, comm)
        found = run_survey(opened, plan, run.reading, folder.path, comm, watchdog, stop)
        watchdog.arm("the plan of the run", SLOW)
        weights = class_weights(run.class_weights, run.class_names, found.class_pixels, comm)
        self.loss = run.loss_with(weights)
        with agreed(comm):
            record = folder.record(plan.record, found.mean, found.std)
            self.plan = plan = replace(plan, record=record)
            sizes, cells = tuple(one.size for one in opened.images), found.classes_in_cells
            self.schedule = schedule_of(
                plan,
                sizes,
                cells,
                seed=run.seed,
                batch_size=run.batch_size,
                symmetries=run.augment.symmetries,
                oversample=run.oversample,
            )
        epochs = (run.epochs or 0) * self.schedule.steps_per_epoch
        self.last = epochs if run.steps is None else run.steps
        self.work = RankWork(plan, self.schedule, sizes, cells, comm.rank)
        swap, loads = (run.swap, run.swapping, plan, run.optimizer.kind), self.work.loads()
        swaps = decide_swaps(*swap, loads, self.devices, comm)
        built_of = self.devices.partitions, swaps, run.swapping, run.seed, run.exchange_from
        self.network = RunNetwork(plan, *built_of, comm, stop)
        devices, steps = self.network.pipe.devices, run.profile.numbers
        self.trace = TraceRecorder(folder.path, steps, devices, write=comm.rank == 0)
        self.validation = self._validation()
        self.account = RunAccount()
        end_if_asked(comm, stop)

    def _validation(self) -> RunValidation | None:
        """Validations between the steps; None: nothing is held out. Collective."""
        keys, images, devices = self.run.validation, self.opened.validation, self.devices.partitions
        if not images:
            return None
        scoring = Validation(
            self.plan.record,
            images,
            self.loss.class_weights,
            keys.batch_size,
            self.plan.balance,
            devices,
            self.watchdog,
            self.comm,
            self.stop,
        )
        every = keys.every or self.schedule.steps_per_epoch
        return RunValidation(scoring, keys.score, every, self.last, self.folder)

    def train(self, *, accept_gaps: bool) -> int:
        """Run all steps; return the exit code."""
        run, comm = self.run, self.comm
        self.watchdog.arm("the first weights", SLOW)
        network = self.network.network
        self.update = Update(
            run.optimizer.make(network.parameters()),
            run.schedule.rates(run.optimizer.lr, self.last),
            run.loss_scale,
            run.optimizer.clip_norm,
        )
        with agreed(comm):
            first = self.folder.load(network, self.update.optimizer, self.update.scale, run.init)
        with agreed(comm):  # and not before: others may still read what begin deletes
            log = self._begin(first, accept_gaps=accept_gaps)
        step = self._step()
        if comm.rank == 0:
            left, transport = max(self.last - first, 0), step.gradients.transport
            sample = self.schedule.samples(0)[0]
            announce(self.plan, self.network.pipe, sample, left, transport, comm.size)
        try:
            with self.network.swapping():
                try:
                    finished = self._run(step, first, log)
                finally:
                    self.folder.close()
            say_swaps(comm, self.account.swaps, self.account.times.seconds)
        except AgreedError:
            self._close(step)  # is collective, and all ranks are here
            raise
        finally:
            if log:
                log.close()
        self._close(step)
        self.watchdog.arm("the report", SLOW)
        self.account.write(self.folder.path, first, comm)
        if comm.rank == 0:
            # A job that was told to end has no time for maps.
            try_report(self.folder.path, maps=finished)
        # What a run leaves is there when any rank returns; until then rank 0 has the cores.
        wait_quietly(comm)
        return 0 if finished else STOPPED

    def _begin(self, first: int, *, accept_gaps: bool) -> RunLog | None:
        """Delete what an earlier run left; have rank 0 keep the run file, and open its log."""
        self.folder.begin()
        if self.comm.rank > 0:
            return None
        run, path, sample = self.run, self.folder.path, self.schedule.samples(0)[0]
        left = self.opened.validation, self.devices.layout
        keep_run(path, run, self.plan, self.network.pipe, sample, *left)
        score = run.validation.score if run.validation.wanted else None
        kinds = {"tensorboard": run.tensorboard, "accept_gaps": accept_gaps}
        return RunLog(path, run.class_names, score, first, **kinds)

    def _step(self) -> Step:
        gradients = self.run.gradients
        return Step(
            self.network.pipe,
            self.loss,
            self.update,
            gradients.transport,
            gradients.piece_bytes,
            self.plan.rule.offset_px,
            self.plan.micro_batches,
            self.folder.path,
            self.comm,
            self.network.image_comm,
            self.network.swap_statistics,
        )

    def _close(self, step: Step) -> None:
        step.close()
        self.network.close()

    def _run(self, take: Step, first: int, log: RunLog | None) -> bool:
        """Make the steps after `first`; return whether nothing is left to do."""
        stop, validation, network = self.stop, self.validation, self.network.network
        saved = first if self.folder.has_checkpoint else -1
        step, scored = first, True
        stop.agreed = bool(self.comm.allreduce(int(stop.requested)))
        unit = "image" if self.plan.crop_px is None and self.run.batch_size == 1 else "step"
        bar = progress_bar(self.comm, self.last, unit, first)
        reads = self.work.reads(self._reader(), first, self.last, self.run.read_ahead)
        with self.trace, reads, bar as progress:
            scored = not stop.agreed
            if validation is not None and scored:
                validation.resume(first, network, log, stop)
            while step < self.last and not stop.agreed:
                slow = step == first or self.trace.slows(step + 1)
                self.watchdog.arm(f"step {step + 1}", SLOW if slow else 1.0)
                images = [one.number for one in self.work.samples(step)]
                num_reads = len(self.work.micro_batches(step))
                with self.trace.step(step + 1):
                    done = take.take(step, reads, num_reads, images, self._ends)
                    self.trace.add(done.seconds, done.read_seconds, done.reduce_seconds, done.swaps)
                stop.agreed = done.stop
                step += 1
                progress.set_postfix(self._count(step, done, log), refresh=False)
                progress.update()
                best = False
                if validation is not None and validation.due(step):
                    # A rank that is asked to stop has little time: resuming makes up for that.
                    scored = not stop.agreed
                    best = scored and validation.make(step, network, log, stop)
                if best or step % self.run.checkpoint_every == 0:
                    self._save(step, log, best=best)
                    saved = step
            if saved != step:
                self._save(step, log)
            self.watchdog.arm("the last checkpoint", SLOW)
            with agreed(self.comm):
                self.folder.wait()
        return step == self.last and scored

    def _reader(self) -> TileReader:
        files, radiometry = self.opened, self.run.augment.radiometry
        return TileReader(
            files.images,
            files.labels,
            self.plan.record,
            radiometry,
            self.run.seed,
            keep_unlabelled=self.plan.needs_all_tiles,
        )

    def _count(self, step: int, done: StepResult, log: RunLog | None) -> dict[str, str]:
        """Note a step, counted from 1; return what the bar shows of it."""
        self.account.add(done)
        if log:
            log.step(step, done)
        pixels = sum(prod(one.size) for one in self.schedule.samples(step - 1))
        return {"loss": f"{done.loss:.4f}", "Mpx/s": f"{pixels / done.seconds / 1e6:.3g}"}

    def _ends(self) -> bool:
        """Whether this rank asks to stop: on a signal, or as it could not write a checkpoint."""
        return self.stop.requested or self.folder.failed

    def _save(self, step: int, log: RunLog | None, *, best: bool = False) -> None:
        self.watchdog.arm(f"the checkpoint of step {step}", SLOW)
        state = self.network.network, self.plan.record, self.update.optimizer, self.update.scale
        with agreed(self.comm):
            if log:
                log.sync()
            self.folder.save(step, *state, best=best)
