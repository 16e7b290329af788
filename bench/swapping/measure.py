"""Measure what a choice of actions needs to know of the layer groups of any network.

A step of the user's is run twice, with everything swapped, so that it fits: once to count bytes,
which slows it down and warms it up, and once to take times.

What a group needs at most is not seen while everything is swapped, so it is put together. In
forward: tensors that live, and those it has saved so far whether or not they have gone. In
backward: all that it saved, and the tensors that backward has made and that live; an upper bound,
since what it saved goes piece by piece. Gradients of parameters do not count, and what operations
take for themselves inside (scratch of a convolution) no tensor shows.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from torchgpipe.skip.tracker import current_skip_tracker

from tilenet.errors import TilenetError
from tilenet.parallel.swap.recompute import skips_from_outside
from tilenet.parallel.swap.saved import KeptTensor, SavedTensor
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.swap.groups import LayerGroup

__all__ = ["KeptPeak", "measure_groups"]


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


def measure_groups(
    groups: Sequence[nn.Module], step: Callable[[], None], swapper: Swapper
) -> tuple[LayerGroup, ...]:
    """Run a step twice and look at the groups; of several calls of a group the most bytes.

    Args:
        groups: In the order of their calls, none within another, in training mode.
        step: Forward and backward, on the caller's thread and current device. What it changes
            (gradients, running statistics) it changes twice.
        swapper: Gets all that the groups save; with limit 0 the network fits if each group does.

    Raises:
        TilenetError: The step does not call one of the groups.
    """
    passes = [_Pass(groups, swapper, peak) for peak in (KeptPeak(), None)]
    for one in passes:
        one.run(step)
    for group, bytes_seen in zip(groups, passes[0].seen, strict=True):
        if not bytes_seen.calls:
            raise TilenetError(
                f"the step must call each group (never called: a {type(group).__name__}); name the "
                "modules that it calls"
            )
    return tuple(_figures(a, b) for a, b in zip(passes[0].seen, passes[1].seen, strict=True))


@dataclass
class _Seen:
    """Of one group in one pass; seconds of all calls, bytes at most."""

    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_bytes: int = 0
    saved_bytes: int = 0
    swapped_bytes: int = 0
    forward_bytes: int = 0
    gradient_bytes: int = 0
    may_checkpoint: bool = True


def _figures(counted: _Seen, timed: _Seen) -> LayerGroup:
    return LayerGroup(
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
    """One call of a group under way."""

    def __init__(self, group: nn.Module, seen: _Seen, given: list[Tensor], held: ExitStack) -> None:
        self.group, self.seen, self.given, self.held = group, seen, given, held
        self.versions = [x._version for x in given]
        self.nodes_before: set[Node | None] = {x.grad_fn for x in given}
        self.saved: Any = WeakIdKeyDictionary()  # storage -> whether the swapper takes it
        self.saved_bytes = self.swapped_bytes = 0


class _Pass:
    """One run of the step.

    Args:
        peak: Counts bytes; None: times are taken.
    """

    def __init__(
        self, groups: Sequence[nn.Module], swapper: Swapper, peak: KeptPeak | None
    ) -> None:
        self.seen = [_Seen() for _ in groups]
        self._groups, self._swapper, self._peak = groups, swapper, peak
        self._call: _Call | None = None
        self._nodes: set[Node] = set()
        self._in_backward = False
        self._apart = 0.0  # seconds of the swapper's since the beginning
        self._began = 0.0
        # Storages that groups have saved, and those of parameters and buffers.
        self._known: Any = WeakIdKeyDictionary()
        self._handles = ExitStack()

    def run(self, step: Callable[[], None]) -> None:
        """Run it, and leave nothing behind."""
        with self._handles, self._peak or nullcontext():
            self._handles.callback(self._forget)
            for group, seen in zip(self._groups, self.seen, strict=True):
                self._hook(group, seen)
            step()

    def _forget(self) -> None:
        # Or a step that fails leaves cycles that Python does not see: graphs hold our hooks.
        self._nodes.clear()
        self._call = None

    def _hook(self, group: nn.Module, seen: _Seen) -> None:
        keep = self._handles.enter_context
        keep(
            group.register_forward_pre_hook(
                lambda _, args, kwargs: self._enter(group, seen, (args, kwargs)), with_kwargs=True
            )
        )
        keep(group.register_forward_hook(lambda _, args, output: self._leave(output)))
        for constant in (*group.parameters(), *group.buffers()):
            self._known[constant.untyped_storage()] = True
        if self._peak is not None:
            for parameter in group.parameters():
                if parameter.requires_grad:
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    keep(hook(self._forget_gradient))

    def _enter(self, group: nn.Module, seen: _Seen, arguments: Any) -> None:
        skips = getattr(current_skip_tracker(), "tensors", {})
        popped = [skips.get(skip) for skip in skips_from_outside(group)]
        given = [x for x in tree_leaves((arguments, popped)) if isinstance(x, Tensor)]
        hooks = ExitStack()
        self._call = _Call(group, seen, given, hooks)
        self._handles.push(hooks)  # a forward that fails leaves them, too
        hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._in_backward = False
        if self._peak is not None:
            self._peak.begin(x for x in given if x.untyped_storage() not in self._known)
        self._start()

    def _leave(self, output: Any) -> None:
        call, self._call = self._call, None
        assert call is not None, "a group may not be within another"
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
        """Look at the backward of all nodes between the group's output and input."""
        # By node: hooks on modules would make views of their inputs, which activations in place
        # may not write over, and tensors' hooks do not tell branches apart.
        while ends:
            node = ends.pop()
            if node is None or node in self._nodes or node in before:
                continue
            self._nodes.add(node)
            ends.extend(following for following, _ in node.next_functions)
            # Hooks that held the call would hold the group's input.
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
