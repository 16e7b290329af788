"""Measure what a choice of actions needs to know of the cells of any network.

A step of the user's is run twice, with everything swapped, so that it fits: once to count bytes,
which slows it down and warms it up, and once to take times.

What a cell needs at most is not seen while everything is swapped, so it is put together. In
forward: tensors that live, and those it has saved so far whether or not they have gone. In
backward: all that it saved, and the tensors that backward has made and that live; an upper bound,
since what it saved goes piece by piece. Gradients of parameters do not count, and what operations
take for themselves inside (scratch of a convolution) no tensor shows.

Most bytes of tensors that would be alive in a part of a program if what it saves stayed.

Bytes that operations take inside, where no tensor shows them: measured by running each once.

Convolutions copy their maps into their kernels' layout, or lay out all windows. How much is the
library's affair and changes with device, dtype and size, so it is asked for, not predicted. On
Volta and later the same holds for cuDNN's workspace.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary
from torchgpipe.skip.tracker import current_skip_tracker

from tilenet.errors import TilenetError
from tilenet.parallel.swap.recompute import skips_from_outside
from tilenet.parallel.swap.saved import KeptTensor, SavedTensor
from tilenet.parallel.swap.swapper import Swapper

__all__ = ["CellFigures", "KeptPeak", "Scratch", "allocated_peak", "measure_cells"]


class KeptPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts storages from the operation that makes them until they die.

    What is saved counts until the next part begins, though a swapper may have sent it away. What
    operations take for themselves inside no tensor shows. Modes belong to a thread; autograd hands
    the caller's to its own.

    Attributes:
        peak: Most bytes since the part began or since `peak` was set.
        current: Bytes now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begin([])
        self._paused = False

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Begin a part, at whose begin there are some tensors that count."""
        self.current = self.peak = 0
        self._counted: Any = WeakIdKeyDictionary()  # storage -> whether it counts when it has died
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor, saved: bool = False) -> None:
        """Count a tensor's storage, once; if it is saved, though it may die."""
        storage = tensor.untyped_storage()
        if storage not in self._counted:
            self._counted[storage] = stays = [saved]
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)
            finish = weakref.finalize(storage, self._die, self._counted, stays, storage.nbytes())
            finish.atexit = False
        self._counted[storage][0] |= saved

    def drop(self, tensor: Tensor) -> None:
        """Count a tensor's storage no more."""
        stays = self._counted.pop(tensor.untyped_storage(), [True])
        if not stays[0]:
            stays[0] = True  # its death changes nothing
            self.current -= tensor.untyped_storage().nbytes()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations make what they like, as a swapper's copies."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._paused:
            given = {id(s): s for s in (x.untyped_storage() for x in _plain((args, kwargs)))}
            for tensor in _plain(made):
                if id(tensor.untyped_storage()) not in given:
                    self.add(tensor)
        return made

    def _die(self, counted: Any, stays: list[bool], num_bytes: int) -> None:
        if counted is self._counted and not stays[0]:
            self.current -= num_bytes


def _plain(values: Any) -> list[Tensor]:
    leaves = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return [x for x in leaves if x.layout is torch.strided]


Saved = KeptTensor | SavedTensor


@dataclass(frozen=True)
class CellFigures:
    """Of one call of a cell; names and meaning are those of a policy's cells.

    Attributes:
        forward_s: Seconds of its forward, without the swapper's work.
        backward_s: Seconds of its backward, without the swapper's work.
        input_bytes: Of what comes in, skips that it pops among it; stays where the cell is computed
            again.
        saved_bytes: Of storages that it saves for backward and no cell before it did; parameters
            and buffers left out.
        swapped_bytes: Part of these that the swapper takes.
        forward_bytes: Most in its forward, above what the cells before have saved.
        backward_bytes: Most in its backward, above the same; what it saved is among them.
        may_checkpoint: Whether it leaves its input as it was.
    """

    forward_s: float
    backward_s: float
    input_bytes: int
    saved_bytes: int
    swapped_bytes: int
    forward_bytes: int
    backward_bytes: int
    may_checkpoint: bool = True


def measure_cells(
    cells: Sequence[nn.Module], step: Callable[[], None], swapper: Swapper
) -> tuple[CellFigures, ...]:
    """Run a step twice and look at the cells; of several calls of a cell the most bytes.

    Args:
        cells: In the order of their calls, none within another, in training mode.
        step: Forward and backward, on the caller's thread and current device. What it changes
            (gradients, running statistics) it changes twice.
        swapper: Gets all that the cells save; with limit 0 the network fits if each cell does.

    Raises:
        TilenetError: The step does not call one of the cells.
    """
    passes = [_Pass(cells, swapper, peak) for peak in (KeptPeak(), None)]
    for one in passes:
        one.run(step)
    for cell, bytes_seen in zip(cells, passes[0].seen, strict=True):
        if not bytes_seen.calls:
            raise TilenetError(
                f"the step must call each cell (never called: a {type(cell).__name__}); name the "
                "modules that it calls"
            )
    return tuple(_figures(a, b) for a, b in zip(passes[0].seen, passes[1].seen, strict=True))


@dataclass
class _Seen:
    """Of one cell in one pass; seconds of all calls, bytes at most."""

    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_bytes: int = 0
    saved_bytes: int = 0
    swapped_bytes: int = 0
    forward_bytes: int = 0
    gradient_bytes: int = 0
    may_checkpoint: bool = True


def _figures(counted: _Seen, timed: _Seen) -> CellFigures:
    return CellFigures(
        timed.forward_s / timed.calls,
        timed.backward_s / timed.calls,
        counted.input_bytes,
        counted.saved_bytes,
        counted.swapped_bytes,
        counted.forward_bytes,
        counted.saved_bytes + counted.gradient_bytes,
        counted.may_checkpoint,
    )


class _Call:
    """One call of a cell under way."""

    def __init__(self, cell: nn.Module, seen: _Seen, given: list[Tensor], held: ExitStack) -> None:
        self.cell, self.seen, self.given, self.held = cell, seen, given, held
        self.versions = [x._version for x in given]
        self.nodes_before: set[Node | None] = {x.grad_fn for x in given}
        self.saved: Any = WeakIdKeyDictionary()  # storage -> whether the swapper takes it
        self.saved_bytes = self.swapped_bytes = 0


class _Pass:
    """One run of the step.

    Args:
        peak: Counts bytes; None: times are taken.
    """

    def __init__(self, cells: Sequence[nn.Module], swapper: Swapper, peak: KeptPeak | None) -> None:
        self.seen = [_Seen() for _ in cells]
        self._cells, self._swapper, self._peak = cells, swapper, peak
        self._call: _Call | None = None
        self._nodes: set[Node] = set()
        self._in_backward = False
        self._apart = 0.0  # seconds of the swapper's since the beginning
        self._began = 0.0
        # Storages that cells have saved, and those of parameters and buffers.
        self._known: Any = WeakIdKeyDictionary()
        self._handles = ExitStack()

    def run(self, step: Callable[[], None]) -> None:
        """Run it, and leave nothing behind."""
        with self._handles, self._peak or nullcontext():
            self._handles.callback(self._forget)
            for cell, seen in zip(self._cells, self.seen, strict=True):
                self._hook(cell, seen)
            step()

    def _forget(self) -> None:
        # Or a step that fails leaves cycles that Python does not see: graphs hold our hooks.
        self._nodes.clear()
        self._call = None

    def _hook(self, cell: nn.Module, seen: _Seen) -> None:
        keep = self._handles.enter_context
        keep(
            cell.register_forward_pre_hook(
                lambda _, args, kwargs: self._enter(cell, seen, (args, kwargs)), with_kwargs=True
            )
        )
        keep(cell.register_forward_hook(lambda _, args, output: self._leave(output)))
        for constant in (*cell.parameters(), *cell.buffers()):
            self._known[constant.untyped_storage()] = True
        if self._peak is not None:
            for parameter in cell.parameters():
                if parameter.requires_grad:
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    keep(hook(self._forget_gradient))

    def _enter(self, cell: nn.Module, seen: _Seen, arguments: Any) -> None:
        skips = getattr(current_skip_tracker(), "tensors", {})
        popped = [skips.get(skip) for skip in skips_from_outside(cell)]
        given = [x for x in tree_leaves((arguments, popped)) if isinstance(x, Tensor)]
        hooks = ExitStack()
        self._call = _Call(cell, seen, given, hooks)
        self._handles.push(hooks)  # a forward that fails leaves them, too
        hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._in_backward = False
        if self._peak is not None:
            self._peak.begin(x for x in given if x.untyped_storage() not in self._known)
        self._start()

    def _leave(self, output: Any) -> None:
        call, self._call = self._call, None
        assert call is not None, "a cell may not be within another"
        seen = call.seen
        seen.forward_s += self._stop()
        call.held.close()
        seen.calls += 1
        storages = {id(s): s for s in (x.untyped_storage() for x in call.given)}
        seen.input_bytes = max(seen.input_bytes, sum(s.nbytes() for s in storages.values()))
        seen.saved_bytes = max(seen.saved_bytes, call.saved_bytes)
        seen.swapped_bytes = max(seen.swapped_bytes, call.swapped_bytes)
        seen.may_checkpoint &= call.versions == [x._version for x in call.given]
        if self._peak is not None:
            seen.forward_bytes = max(seen.forward_bytes, self._peak.peak)
        ends = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)]
        self._hook_nodes(ends, call.nodes_before, seen)

    def _hook_nodes(self, ends: list[Node | None], before: set[Node | None], seen: _Seen) -> None:
        """Look at the backward of all nodes between the cell's output and input."""
        # By node: hooks on modules would make views of their inputs, which activations in place
        # may not write over, and tensors' hooks do not tell branches apart.
        while ends:
            node = ends.pop()
            if node is None or node in self._nodes or node in before:
                continue
            self._nodes.add(node)
            ends.extend(following for following, _ in node.next_functions)
            # Hooks that held the call would hold the cell's input.
            handles = (
                node.register_prehook(self._begin_node),
                node.register_hook(lambda *_: self._end_node(seen)),
            )
            for handle in handles:
                self._handles.callback(handle.remove)

    def _begin_node(self, gradients: Any) -> None:
        if self._peak is not None:
            if not self._in_backward:
                self._peak.begin([])
            for gradient in gradients:
                if gradient is not None:
                    self._peak.add(gradient)
            self._peak.peak = self._peak.current
        self._in_backward = True
        self._start()

    def _end_node(self, seen: _Seen) -> None:
        seen.backward_s += self._stop()
        if self._peak is not None:
            seen.gradient_bytes = max(seen.gradient_bytes, self._peak.peak)

    def _forget_gradient(self, parameter: Tensor) -> None:
        if self._peak is not None and parameter.grad is not None:
            self._peak.drop(parameter.grad)

    def _pack(self, tensor: Tensor) -> Saved:
        began = _now()
        with self._peak.paused() if self._peak is not None else nullcontext():
            storage = tensor.untyped_storage()
            held = self._swapper.pack(tensor)
            if self._call is not None and storage not in self._known:
                self._known[storage] = True
                self._call.saved[storage] = False
                self._call.saved_bytes += storage.nbytes()
                if self._peak is not None:
                    self._peak.add(tensor, saved=True)
            if self._call is not None and self._call.saved.get(storage) is False:
                self._call.saved[storage] = taken = isinstance(held, SavedTensor)
                self._call.swapped_bytes += taken * storage.nbytes()
        self._apart += _now() - began
        return held

    def _unpack(self, held: Saved) -> Tensor:
        began = _now()
        with self._peak.paused() if self._peak is not None else nullcontext():
            tensor = self._swapper.unpack(held)
        self._apart += _now() - began
        return tensor

    def _start(self) -> None:
        self._began = _now() - self._apart

    def _stop(self) -> float:
        return _now() - self._apart - self._began


def _now() -> float:
    """Seconds, once the device has done what is queued; copies on other streams may go on."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    return perf_counter()


MEASURED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Scratch:
    """Scratch of an operation on tensors, real or fake, in bytes; each kind is measured once.

    Args:
        device: Where operations are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, int] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        """Most bytes that the operation takes besides what it is given and what it returns."""
        if func not in MEASURED:
            return 0
        key = str((func, tree_map(_shape, args), kwargs))
        if key not in self._known:
            with _disable_current_modes():
                self._known[key] = self._measure(func, args, kwargs)
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        real = tree_map(self._real, args)
        made: list[Any] = []
        with torch.no_grad():
            peak = allocated_peak(lambda: made.append(func(*real, **kwargs)), self._device)
        outputs = {id(x): x for x in tree_leaves(made) if isinstance(x, Tensor)}
        kept = sum(x.untyped_storage().nbytes() for x in outputs.values())
        return max(0, peak - kept)

    def _real(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=self._device
        )
        return made.fill_(0.5)


def _shape(value: Any) -> Any:
    return (value.dtype, value.size(), value.stride()) if isinstance(value, Tensor) else value


def allocated_peak(work: Any, device: torch.device) -> int:
    """Most bytes of torch's allocator that `work` took above what was taken before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = most = 0
    # Not from profiler.events(): those hold only what no operation makes.
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most
