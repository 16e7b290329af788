"""Run a sequence of layers over this rank's devices, micro-batch after micro-batch (GPipe).

torchgpipe's engine does the work: worker threads per device, copies on streams of their own, skips
that go from the partition that stashes to the one that pops, and activation checkpointing that
starts recomputing before the gradient arrives. Its front door, `torchgpipe.GPipe`, is not used,
since its additions are in our way:

- it cuts one stacked batch; here micro-batches are a list, so tiles of different sizes can follow
  one another, and neither the input nor the output exists twice,
- it owns the modules, so names of weights would depend on the balance; here partitions are views of
  a network that keeps its names, and a checkpoint moves between balances,
- it counts `except_last` by the micro-batches asked for, not by those there are.

Worker threads know nothing of the caller's thread: neither its autocast nor its dispatch modes.
So each partition enters autocast by itself, and each micro-batch carries with its skips where its
samples come from: dropout masks depend on it, and exchanges between ranks.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from tilenet.choices import Checkpointing
from tilenet.model.gpipe import (
    AbstractStream,
    Batch,
    Pipeline,
    clock_cycles,
    inspect_skip_layout,
    new_stream,
    spawn_workers,
    use_device,
    use_stream,
)
from tilenet.model.network import Network
from tilenet.model.origin import Origin, OriginTracker
from tilenet.model.upload import upload
from tilenet.parallel.pipeline.flow import Flow, Measure, MicroBatch, train_in_flow
from tilenet.parallel.pipeline.host_store import Store
from tilenet.parallel.pipeline.partition import Partition
from tilenet.parallel.pipeline.skip_store import StoringQueue, StoringTracker

_Queues = tuple[list[Any], list[Any]]  # to each partition's thread, and from it


class Pipe:
    """A network cut into partitions, one per device.

    Args:
        network: The network; it keeps its parameters and their names, moved to the devices.
        balance: Layers per partition.
        devices: One device per partition; one device may be named several times.
        checkpointing: The micro-batches that keep their input only, and are computed again in
            backward: `always` all, `except_last` all but the last, `never` none.
        precision: `float64`, `float32`, or `bfloat16` or `float16` under autocast.
        inline: Compute in the caller's thread, for tests, fake tensors and debugging.
        stores: One store per partition, for waiting skips between partitions and inputs of
            checkpoints; None: they wait on the devices.
    """

    def __init__(
        self,
        network: Network,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        checkpointing: Checkpointing = "never",
        precision: str = "float32",
        *,
        inline: bool = False,
        stores: Sequence[Store] | None = None,
    ) -> None:
        if sum(balance) != len(network) or min(balance) < 1 or len(balance) != len(devices):
            raise ValueError(
                f"a balance gives each device at least one layer and all layers away (balance: "
                f"{list(balance)}, layers: {len(network)}, devices: {len(devices)})"
            )
        self.network = network
        self.devices = tuple(devices)
        self.checkpointing = checkpointing
        ends = [sum(balance[: j + 1]) for j in range(len(balance))]
        self._failed: list[Exception] = []
        self.partitions = [
            Partition(list(network)[stop - size : stop], device, precision, self._failed)
            for size, stop, device in zip(balance, ends, devices, strict=True)
        ]
        self._layout = inspect_skip_layout(self.partitions)
        self._inline, self.stores = inline, stores
        # Of each partition, one per micro-batch. Kept: torch has 32 per device, which new ones of
        # each call would share with all other streams, and make these wait for copies.
        self._streams: list[list[AbstractStream]] = [[] for _ in devices]
        self._staying: dict[bool, tuple[_Queues, Callable[[], object]]] = {}
        self._threads: list[ThreadPoolExecutor] = []

    def passes(self, micro_batches: int) -> int:
        """Return how many times one backward adds to each parameter's gradient."""
        # A checkpointed micro-batch runs a backward of its own.
        return 1 if self.checkpointing == "never" else micro_batches

    def __call__(self, images: list[Tensor], origins: Sequence[Origin]) -> list[Tensor]:
        """Run micro-batches through all partitions.

        Args:
            images: One (B, bands, H, W) per micro-batch, on any device; sizes may differ.
            origins: Images and tiles of each micro-batch's samples.

        Returns:
            One (B, classes, H′, W′) per micro-batch, on the last device.
        """
        training = self.network.training and torch.is_grad_enabled()
        for partition in self.partitions:
            partition.train(self.network.training)
        num_plain = {"always": 0, "except_last": 1, "never": len(images)}[self.checkpointing]
        checkpoint_stop = len(images) - num_plain if training else 0
        batches = [Batch(upload(image, self.devices[0])) for image in images]
        for streams, device in zip(self._streams, self.devices, strict=True):
            streams += [new_stream(device) for _ in images[len(streams) :]]
        pipeline = _OriginPipeline(
            batches,
            self.partitions,
            list(self.devices),
            self._streams,
            self._layout,
            checkpoint_stop,
        )
        pipeline.stores = self.stores
        try:
            pipeline.run_from(origins, _inline_workers if self._inline else self._workers)
        finally:
            self._failed.clear()  # an error's traceback holds all that was computed
        return [batch.tensor for batch in batches]

    def train_in_flow(self, feed: Iterator[MicroBatch], measure: Measure, most: int) -> None:
        """Add the gradient of a sum over micro-batches, which flow without draining (1F1B).

        With checkpointing all partitions but the last compute each micro-batch again in backward.
        Collective where layers are, over ranks that have as many micro-batches and `most`.

        Args:
            feed: The micro-batches; taken one by one, in a thread.
            measure: See `flow.Measure`; called in a thread.
            most: Most micro-batches in the pipeline at once.
        """
        if not self._threads:
            self._threads = [ThreadPoolExecutor(1) for _ in self.devices]
        for partition in self.partitions:
            partition.train(self.network.training)
        flow = Flow(self.partitions, self._layout, most, recompute=self.checkpointing != "never")
        try:
            train_in_flow(flow, feed, measure, self._threads)
        finally:
            self._failed.clear()  # an error's traceback holds all that was computed

    @contextmanager
    def _workers(self, devices: list[torch.device]) -> Iterator[_Queues]:
        """Threads that stay from call to call, since cuDNN plans convolutions for each thread."""
        grad = torch.is_grad_enabled()  # a thread keeps what it began with
        if grad not in self._staying:
            stack = ExitStack()
            queues = stack.enter_context(spawn_workers(devices))
            dismiss = weakref.finalize(self, stack.close)
            self._staying[grad] = queues, dismiss
        queues, end = self._staying[grad]
        try:
            yield queues
            # A thread holds the task that it did last until it gets another one.
            for tasks, done in set(zip(*queues, strict=True)):
                tasks.put(_Nothing())
                done.get()
        except BaseException:
            del self._staying[grad]
            end()
            raise


class _Nothing:
    """A task."""

    def compute(self) -> None:
        """Do nothing."""


class _OriginPipeline(Pipeline):  # type: ignore[misc]
    """torchgpipe's engine, with each micro-batch's origin, and with stores for long-lived maps."""

    stores: Sequence[Store] | None = None

    def run_from(self, origins: Sequence[Origin], workers: Any) -> None:
        layout, stores = self.skip_layout, self.stores
        trackers = [
            StoringTracker(layout, origin, stores) if stores else OriginTracker(layout, origin)
            for origin in origins
        ]
        with workers(self.devices) as (in_queues, out_queues):
            for schedule in clock_cycles(len(self.batches), len(self.partitions)):
                self.fence(schedule, trackers)
                queues = list(in_queues)
                for i, j in schedule:
                    # The first partition's inputs are the images, which the caller has anyway.
                    if stores is not None and j > 0 and i < self.checkpoint_stop:
                        queues[j] = self._storing(queues[j], stores[j], i, j)
                self.compute(schedule, trackers, queues, out_queues)

    def _storing(self, queue: Any, store: Store, i: int, j: int) -> Any:
        if not store.takes(self.batches[i].tensor):
            return queue
        # On the stream that brought the input, so that it leaves while its partition computes.
        with use_stream(self.copy_streams[j][i]), torch.no_grad():
            stored = store.put(self.batches[i].tensor)
        store.expect(stored)
        return StoringQueue(queue, store, stored)


class _InlineQueue:
    """A worker's queues, without a thread: a task is done when it is put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: deque[Any] = deque()

    def put(self, task: Any) -> None:
        with use_device(self._device):
            self._done.append((True, (task, task.compute())))

    def get(self) -> Any:
        return self._done.popleft()


@contextmanager
def _inline_workers(
    devices: list[torch.device],
) -> Iterator[tuple[list[_InlineQueue], list[_InlineQueue]]]:
    queues = [_InlineQueue(device) for device in devices]
    yield queues, queues
