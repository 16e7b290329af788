"""The steps of a run on one rank: read, compute, sum, update, record."""

from math import prod

from tilenet.errors import AgreedError, one_line
from tilenet.model.loss import Loss
from tilenet.parallel.health.progress import progress_bar, say
from tilenet.parallel.health.trace import TraceRecorder
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.announce import announce, say_states_beyond
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.log import Callbacks, RunLog
from tilenet.training.folder.record import RunAccount, keep_run
from tilenet.training.folder.run_folder import RunFolder
from tilenet.training.images.run_data import RunData
from tilenet.training.network import RunNetwork
from tilenet.training.step import Step, StepResult
from tilenet.training.update import Update, check_weights
from tilenet.training.validation import RunValidation


class Loop:
    """The steps of a run. Its methods are collective.

    Args:
        run: Keys of the run.
        network: The network over this rank's devices; closed after the last step.
        data: Images, labels and the schedule.
        loss: The loss, with the weights of the classes.
        validation: Validations between steps; None: nothing is held out.
        folder: Folder of the run.
        control: Ranks of the run; the watchdog is armed for each step, checkpoint and validation.
    """

    def __init__(
        self,
        run: RunFile,
        network: RunNetwork,
        data: RunData,
        loss: Loss,
        validation: RunValidation | None,
        folder: RunFolder,
        control: RankControl,
    ) -> None:
        self.run_file, self.network, self.data = run, network, data
        self.plan, self.loss, self.validation, self.folder = network.plan, loss, validation, folder
        self.watchdog, self.stop, self.comm = control.watchdog, control.stop, control.comm
        self.account = RunAccount()
        self.log: RunLog | None = None
        steps, devices = run.profile.numbers, network.pipe.devices
        self.trace = TraceRecorder(folder.path, steps, devices, write=self.comm.rank == 0)

    def run(self, callbacks: Callbacks) -> bool:
        """Make all remaining steps; return whether the run is complete.

        Args:
            callbacks: Called after each step and validation.

        Raises:
            AgreedError: On all ranks, if any of them refuses to go on.
        """
        run, comm = self.run_file, self.comm
        self.watchdog.arm("the first weights", SLOW)
        self.shares = self.network.shares(comm, run.gradients.piece_bytes)
        self.update = Update.of(run, self.network.network, self.shares, self.data.last)
        with agreed(comm):
            first = self._load()
        step = self._step()
        if comm.rank == 0:
            announce(
                self.plan,
                self.network.pipe,
                sample=self.data.schedule.samples(0)[0],
                steps=max(self.data.last - first, 0),
                transport=step.gradients.transport,
                num_ranks=comm.size,
                state_bytes=self.network.shared_bytes,
            )
            if run.plan is not None:
                say_states_beyond(run.plan, self.network)
        try:
            with self.network.swapping():
                # Only now: other ranks may read files that it deletes, and none refuses any more.
                with agreed(comm):
                    self.log = self._begin(first, callbacks)
                try:
                    finished = self._steps(step, first, self.log)
                finally:
                    self.folder.close()
            self.account.say_swaps(comm)
        except AgreedError:
            self._close(step)  # collective: an AgreedError brings all ranks here
            raise
        finally:
            if self.log:
                self.log.close()
        self._close(step)
        self._check_callbacks()
        self.watchdog.arm("the report", SLOW)
        self.account.write(self.folder.path, first, comm)
        return finished

    def _load(self) -> int:
        """Load the first weights or the checkpoint that a run goes on from; return steps made."""
        update = self.update
        first = self.folder.load(
            self.network.network,
            update.optimizer,
            update.scale,
            self.run_file.init,
            self.plan.record.names,
            self.shares,
            update.average,
        )
        if first > self.data.last and self.comm.rank == 0:
            say(
                f"the run has made more steps than the run file asks for ({first}, not "
                f"{self.data.last}), so nothing is left to do"
            )
        return first

    def _begin(self, first: int, callbacks: Callbacks) -> RunLog | None:
        """Delete the files of an earlier run; on rank 0 write the run file and open the log."""
        run = self.run_file
        self.folder.begin(scalars=run.tensorboard)
        if self.comm.rank > 0:
            return None
        path, sample = self.folder.path, self.data.schedule.samples(0)[0]
        keep_run(
            path,
            run,
            self.plan,
            self.network.pipe,
            sample,
            validation=self.data.images.validation,
            layout=self.network.devices.layout,
        )
        score = run.score if run.validation.holds_out else None
        return RunLog(
            path,
            run.class_names,
            score,
            first,
            tensorboard=run.tensorboard,
            callbacks=callbacks,
            task=run.task,
        )

    def _step(self) -> Step:
        keys, network = self.run_file.gradients, self.network
        pieces = self.shares or keys.piece_bytes
        gradients = network.gradient_sum(self.comm, pieces, keys.transport)
        return Step(network, self.loss, self.update, gradients, self.folder.path, self.comm)

    def _close(self, step: Step) -> None:
        step.close()
        self.network.close()

    def _steps(self, runner: Step, first: int, log: RunLog | None) -> bool:
        """Make the steps after `first`; return whether the run is complete."""
        stop, validation, network = self.stop, self.validation, self.network.network
        saved = first if self.folder.has_checkpoint else -1
        step, scored = first, True
        stop.agreed = any(self.comm.allgather(stop.requested))
        data, run = self.data, self.run_file
        unit = "image" if self.plan.crop_px is None and run.batch_size == 1 else "step"
        bar = progress_bar(self.comm, data.last, unit, first)
        pin = self.network.pipe.devices[0].type != "cpu"
        reads = data.work.reads(data.reader, first, data.last, run.read_ahead, pin=pin)
        with self.trace, reads, bar as progress:
            scored = not stop.agreed
            if validation is not None and scored:
                with self.update.averaged():
                    validation.resume(first, network, log, stop)
            while step < self.data.last and not stop.agreed:
                slow = step == first or self.trace.slows(step + 1)
                self.watchdog.arm(f"step {step + 1}", SLOW if slow else 1.0)
                images = [sample.number for sample in self.data.work.samples(step)]
                num_reads = len(self.data.work.micro_batches(step))
                self.trace.begin(step + 1)
                result = runner.take(step, reads, num_reads, images, self._ends)
                stop.agreed = result.stop
                step += 1
                progress.set_postfix(self._count(step, result, log), refresh=False)
                progress.update()
                best = False
                if validation is not None and validation.due(step):
                    # A rank that is asked to stop has little time: the resumed run validates.
                    scored = not stop.agreed
                    with self.update.averaged():
                        best = scored and validation.make(step, network, log, stop)
                if best or step % self.run_file.checkpoint_every == 0:
                    self._save(step, log, best=best)
                    saved = step
            if saved != step:
                self._save(step, log)
            self.watchdog.arm("the last checkpoint", SLOW)
            with agreed(self.comm):
                self.folder.wait()
        return step >= self.data.last and scored

    def _count(self, step: int, result: StepResult, log: RunLog | None) -> dict[str, str]:
        """Add a step, counted from 1, to account and log; return texts for the progress bar."""
        self.account.add(result)
        if log:
            log.step(step, result)
            if result.overflowed:
                say(
                    f"step {step} changed no weight, since float16 did not hold its gradients; "
                    f"the loss is scaled by {self.update.scale.value:g} from now on"
                )
            if log.raised is not None and self.comm.size == 1:
                raise log.raised
        pixels = sum(prod(sample.size) for sample in self.data.schedule.samples(step - 1))
        return {"loss": f"{result.loss:.4f}", "Mpx/s": f"{pixels / result.seconds / 1e6:.3g}"}

    def _ends(self) -> bool:
        """Whether this rank asks to stop: after a signal, or what failed or was raised aside."""
        raised = self.log is not None and self.log.raised is not None
        return self.stop.requested or self.folder.failed or raised

    def _check_callbacks(self) -> None:
        """Raise on all ranks what a callback raised on rank 0. Collective."""
        error = None if self.log is None else self.log.raised
        text = self.comm.bcast(error and f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if text is not None:
            raise AgreedError(
                f"a callback raised an error on rank 0 ({one_line(text)}), which ended the run "
                "after its next step; the checkpoint is whole: resume=True goes on"
            )

    def _save(self, step: int, log: RunLog | None, *, best: bool = False) -> None:
        self.watchdog.arm(f"the checkpoint of step {step}", SLOW)
        network, update = self.network.network, self.update
        states = update.states(network, self.shares)
        with self.update.averaged(), agreed(self.comm):
            check_weights(network, step, self.folder.path)
            if update.average is not None:
                states |= update.average.trained()
            weights = self.plan.checkpoint_weights(network.state_dict())
            if log:
                log.sync()
            self.folder.save(
                step, network, weights, self.plan.record, states, update.scale, best=best
            )
