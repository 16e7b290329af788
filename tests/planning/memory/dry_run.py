"""The peak of one training step, to the byte, from running it on tensors that have no memory.

The pipeline itself runs, with its engine, its recomputation and its skips, in one thread and on
fake tensors; `owned_bytes.py` counts. `partition.py` of the planner predicts the same in a
thousandth of the time, but for the order in which partitions wait for one another.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from owned_bytes import OwnedBytes, ScratchRule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchgpipe import phony

from tilenet.choices import Checkpointing
from tilenet.geometry.layers import Layer
from tilenet.geometry.maps import map_shapes
from tilenet.model.dropout import MaskKey
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.gpipe import Copy, SkipTrackerThroughPotals
from tilenet.model.in_place import in_place
from tilenet.model.loss import cross_entropy, pixel_weight
from tilenet.model.network import Network, build_layer, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.host_store import Store
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.memory.states import OPTIMIZER_STATES


class Charges:
    """Says to which partition a storage belongs: results lie where the operands lie."""

    def __init__(self, live: OwnedBytes) -> None:
        self.live = live
        self._copy_to: int | None = None

    def of(self, func: Any, given: list[Tensor]) -> int:
        if self._copy_to is not None:
            return self._copy_to
        for tensor in given:
            owner = self.live.owner_of(tensor)
            if owner is not None:
                return owner
        return self.live.owner

    def enter(self, number: int) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, args: Any) -> None:
            self.live.owner = number

        return note

    def copy(self, x: Tensor, target: int) -> Tensor:
        """A copy of a tensor for a partition."""
        with self.on(target):
            return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Charge what is made to a partition."""
        before, self._copy_to = self._copy_to, number
        try:
            yield
        finally:
            self._copy_to = before


class NoStore(Store):
    """Maps without memory wait nowhere, and are made again."""

    def takes(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    def put(self, tensor: Tensor) -> Any:
        return [tensor.dtype, tensor.shape, tensor.stride(), lambda: None]

    def get(self, stored: Any) -> Tensor:
        dtype, shape, stride, known = stored
        if known() is not None:
            # torchgpipe asks for a checkpoint's input twice, the second time to count it. (A view
            # of the first would stay in the caches of fake tensors.)
            return torch.empty(0, dtype=dtype)
        made = torch.empty_strided(shape, stride, dtype=dtype)
        stored[-1] = weakref.ref(made.untyped_storage())
        return made

    def expect(self, stored: Any) -> None:
        pass


class ChargedStore(Store):
    """A store whose partition is charged with what comes back."""

    def __init__(self, store: Store, charges: Charges, number: int) -> None:
        self._store, self._charges, self._number = store, charges, number

    def takes(self, tensor: Tensor) -> bool:
        return self._store.takes(tensor)

    def put(self, tensor: Tensor) -> Any:
        return self._store.put(tensor)

    def get(self, stored: Any) -> Tensor:
        with self._charges.on(self._number):
            return self._store.get(stored)

    def expect(self, stored: Any) -> None:
        self._store.expect(stored)


CPU = torch.device("cpu")
META = torch.device("meta")
IGNORED = -100


@dataclass(frozen=True)
class StepBytes:
    """Most bytes alive during a training step, in tensors: of all at one time, and of each."""

    total: int
    partitions: tuple[int, ...]


def dry_run(
    layers: tuple[Layer, ...],
    tile: tuple[int, int],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    precision: str = "float32",
    optimizer: str = "adamw",
    *,
    cut: int = 0,
    one_device: bool = False,
    stored: bool = False,
    scratch: ScratchRule | None = None,
) -> StepBytes:
    """Peak of a step after the first (states of the optimizer are there), to the byte.

    Parameters, the flat gradients and the optimizer's states count; what an allocator loses does
    not. Each micro-batch holds one tile.

    Args:
        cut: Cells of the logits that are cut off on each side, since other tiles own them.
        one_device: All partitions lie on one device: nothing is copied between them.
        stored: Skips between partitions and inputs of checkpoints wait on the host.
        scratch: Bytes that an operation takes inside, as scratch.py measures them;
            None: only tensors count, which makes the prediction exact for them.
    """
    # Begun on meta, since fake parameters cannot be moved to a device as a pipe moves them.
    with META:
        network = _meta_network(layers)
    pipe = Pipe(network, balance, [META] * len(balance), checkpointing, precision, inline=True)
    pipe.devices = (CPU,) * len(balance)
    for partition in pipe.partitions:
        partition.device = CPU
    with FakeTensorMode():
        dtype = parameter_dtype(precision)
        for part in network.modules():
            for name, tensor in list(part.named_parameters(recurse=False)):
                part.register_parameter(name, nn.Parameter(torch.empty(tensor.shape, dtype=dtype)))
            for name, buffer in list(part.named_buffers(recurse=False)):
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part.register_buffer(name, torch.empty(buffer.shape, dtype=kind))
        live = OwnedBytes(scratch=scratch)
        stores = [NoStore() for _ in balance] if stored else None
        return _step(pipe, layers, tile, micro_batches, optimizer, cut, one_device, live, stores)


def measured_run(
    layers: tuple[Layer, ...],
    tile: tuple[int, int],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    precision: str = "float32",
    optimizer: str = "adamw",
    *,
    cut: int = 0,
    one_device: bool = False,
    stores: Sequence[Store] | None = None,
    swapping: Callable[[Pipe], AbstractContextManager[None]] | None = None,
    count: bool = True,
) -> StepBytes:
    """The same step on real tensors, on the CPU: what `dry_run` must predict.

    Args:
        stores: Where skips between partitions and inputs of checkpoints wait.
        swapping: Entered with the pipe around the step, to let its layers swap.
        count: Without, nothing is counted, so that a profiler sees the bare step.
    """
    dtype = parameter_dtype(precision)
    network = build_network(layers, dtype=dtype)
    devices = [CPU] * len(balance)
    pipe = Pipe(network, balance, devices, checkpointing, precision, inline=True)
    live = OwnedBytes() if count else None
    with nullcontext() if swapping is None else swapping(pipe):
        return _step(pipe, layers, tile, micro_batches, optimizer, cut, one_device, live, stores)


def _meta_network(layers: tuple[Layer, ...]) -> Network:
    """A network without memory, and without weights drawn."""
    mask_key = MaskKey()
    modules = [
        build_layer(layer, index, mask_key, in_place=in_place(layers, index))
        for index, layer in enumerate(layers)
    ]
    return Network(modules, mask_key)


def _step(
    pipe: Pipe,
    layers: tuple[Layer, ...],
    tile: tuple[int, int],
    micro_batches: int,
    optimizer: str,
    cut: int,
    one_device: bool,
    counting: OwnedBytes | None,
    stores: Sequence[Store] | None,
) -> StepBytes:
    """Run a step and count."""
    shapes = map_shapes(layers, *tile)
    rows, cols = shapes[-1].rows - 2 * cut, shapes[-1].cols - 2 * cut
    live = counting or OwnedBytes()
    owners = Charges(live)
    live.owner_rule = owners.of
    if stores is not None:
        pipe.stores = [ChargedStore(store, owners, j) for j, store in enumerate(stores)]
    parameters = list(pipe.network.parameters())
    dtype = parameters[0].dtype
    with counting or nullcontext():
        states = _prepare(pipe, live, optimizer)
        images = []
        labels = []
        for _ in range(micro_batches):
            live.owner = 0
            images.append(torch.randn(1, shapes[0].channels, *tile, dtype=dtype))
            live.owner = len(pipe.partitions) - 1
            labels.append(torch.zeros(1, rows, cols, dtype=torch.int64))
        for number, partition in enumerate(pipe.partitions):
            partition.register_forward_pre_hook(owners.enter(number))
        live.reset_peaks()
        copies = copies_made_by(owners.copy, live.owner_of)
        with new_phonies(), nullcontext() if one_device else copies:
            _forward_backward(pipe, images, labels, cut)
        del states
    return StepBytes(live.peak, tuple(live.peak_of[j] for j in range(len(pipe.partitions))))


def _forward_backward(pipe: Pipe, images: list[Tensor], labels: list[Tensor], cut: int) -> None:
    """As `step.Step` does it."""
    outputs = pipe(images, [Origin((number,)) for number in range(len(images))])
    total = torch.zeros((), dtype=torch.float64)
    for target in labels:
        logits = outputs.pop(0).to(next(pipe.network.parameters()).dtype)
        if cut:
            logits = logits[:, :, cut:-cut, cut:-cut]
        pixel_weight(target, IGNORED)
        total = total + cross_entropy(logits, target, IGNORED)
    total.backward()  # type: ignore[no-untyped-call]


def _prepare(pipe: Pipe, live: OwnedBytes, optimizer: str) -> list[Tensor]:
    """Make the flat gradients; return the optimizer's states. Its step takes nothing more."""
    states: list[Tensor] = []
    dtype = next(pipe.network.parameters()).dtype
    for number, partition in enumerate(pipe.partitions):
        live.owner = number
        live.charge([*partition.parameters(), *partition.buffers()])
        parameters = list(partition.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)
        start = 0
        for parameter in reversed(parameters):
            stop = start + parameter.numel()
            parameter.grad = flat[start:stop].view_as(parameter)
            start = stop
        for parameter in parameters:
            states += [torch.zeros_like(parameter) for _ in range(OPTIMIZER_STATES[optimizer])]
    return states


@contextmanager
def new_phonies() -> Iterator[None]:
    """Context without torchgpipe's store of empty tensors: fake ones must not meet real ones."""
    before = dict(phony._phonies)
    phony._phonies.clear()
    try:
        yield
    finally:
        phony._phonies.clear()
        phony._phonies.update(before)


@contextmanager
def copies_made_by(
    copy: Callable[[Tensor, int], Tensor], owner_of: Callable[[Tensor], int | None]
) -> Iterator[None]:
    """Context in which maps are copied between partitions that share one device, too."""
    before = Copy.forward, Copy.backward, SkipTrackerThroughPotals.copy
    of_skip: list[tuple[int, int]] = []  # where the skip under way comes from, and goes

    def forward(ctx: Any, before: Any, behind: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream = before, behind
        source = (owner_of(given[0]) or 0) if given else 0
        ctx.source, target = of_skip[-1] if of_skip else (source, source + 1)
        return tuple(copy(x, target) for x in given)

    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(copy(x, ctx.source) for x in given))

    def copy_skip(tracker: Any, batch: Any, prev: Any, behind: Any, ns: Any, name: str) -> None:
        of_skip.append(tracker.skip_layout.by_ns_name[ns, name])
        before[2](tracker, batch, prev, behind, ns, name)
        of_skip.pop()

    Copy.forward, Copy.backward = staticmethod(forward), staticmethod(backward)
    SkipTrackerThroughPotals.copy = copy_skip
    try:
        yield
    finally:
        Copy.forward, Copy.backward = staticmethod(before[0]), staticmethod(before[1])
        SkipTrackerThroughPotals.copy = before[2]
