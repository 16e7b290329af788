"""A module keeps its inputs only, and is computed again in backward.

torch's non-reentrant checkpoint does the work. What it does not do is done here, so that the second
run sees what the first one saw, and leaves no trace:

- Skips (`tilenet.model.skips`) that the module pops are inputs, kept with the others; those that it
  stashes again are thrown away. Dropout masks and exchanges find the micro-batch's origin, or the
  mask key as it was.
- Buffers are for the second run what they were for the first, and afterwards what they were before
  it: running statistics, of torch's own norms too, count each batch once.
- Writing over what backward needs is an error; torch's checkpoint would compute wrong gradients.

Modules that count calls in attributes of their own ask `torchgpipe.is_recomputing()`, which is true
in the second run. The state of torch's random numbers is kept, of the whole process: threads that
draw from it at the same time disturb one another, as with torch's and torchgpipe's checkpoints.
Buffers are exchanged while the second run computes: a thread that runs the same module meanwhile
would find the wrong ones. An exception of torch's ends the second run as soon as all is there, so a
module that catches every exception (a pipeline's `Partition`) may have such modules but not be one.

The buffers of a module as one forward pass saw them, for the same pass once more.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tilenet.errors import TilenetError
from tilenet.model.dropout import KeyedDropout, MaskKey
from tilenet.model.gpipe import (
    Batch,
    Namespace,
    Skippable,
    SkipTracker,
    current_skip_tracker,
    enable_recomputing,
    use_skip_tracker,
)
from tilenet.model.skips import OriginTracker, origin_under_way
from tilenet.parallel.swap.saved import Watch

__all__ = ["SeenBuffers", "checkpointed"]


class SeenBuffers:
    """Copies of a module's buffers, taken before a pass that may change them.

    Running statistics are changed by it, and a spectral norm's vectors, which it also reads. Only
    modules in training are expected to.

    Args:
        module: With all that it consists of.
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen = [
            (part, name, buffer, buffer._version, buffer.detach().clone())
            for part in module.modules()
            if part.training
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def forget_unchanged(self) -> None:
        """Drop the copies of what the pass did not write, as tables of constants."""
        self._seen = [one for one in self._seen if _changed(*one[:4])]

    @contextmanager
    def as_seen(self) -> Iterator[None]:
        """Let the module find its buffers as they were; what is written there is lost."""
        now = [(part, name, part._buffers[name]) for part, name, *_ in self._seen]
        # Other tensors, not other values: a graph may hold the buffers, and would see a write.
        for part, name, _, _, kept in self._seen:
            part._buffers[name] = kept.clone()
        try:
            yield
        finally:
            for part, name, buffer in now:
                part._buffers[name] = buffer


def _changed(part: nn.Module, name: str, buffer: Tensor, version: int) -> bool:
    # torch's norms write running statistics without counting versions.
    written = isinstance(part, _NormBase) or buffer._version != version
    return written or part._buffers[name] is not buffer


Skip = tuple[Namespace, str]


@contextmanager
def checkpointed(module: nn.Module) -> Iterator[None]:
    """Let a module's forward run under a checkpoint; backward may run behind the context.

    Its name, its weights' names and its hooks stay what they are; hooks run once per call.

    Raises:
        TilenetError: In forward: it writes over its input.
    """
    ours = _CheckpointedForward(module, module.__dict__.get("forward"), _Context())
    module.__dict__["forward"] = ours  # an attribute of the object: its class is anybody's
    try:
        yield
    finally:
        ours.context.open = False
        if ours.before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = ours.before


def skips_from_outside(module: nn.Module) -> list[Skip]:
    """Skips that a module pops and does not stash itself."""
    stashed, popped = _skips(module)
    return [skip for skip in popped if skip not in stashed]


def _skips(module: nn.Module) -> tuple[list[Skip], list[Skip]]:
    layers = [layer for layer in module.modules() if isinstance(layer, Skippable)]
    stashed = [skip for layer in layers for skip in layer.stashable()]
    return stashed, [skip for layer in layers for skip in layer.poppable()]


class _Context:
    """Whether it is still open; shared with the module's copies."""

    open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Context":
        return self


class _CheckpointedForward:
    """Stands in for a module's `forward`.

    Args:
        before: What somebody else had put there; None: nobody had.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., Any] | None, context: _Context
    ) -> None:
        self._module, self.before, self.context = module, before, context

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CheckpointedForward":
        # The copy computes with its own weights.
        module, before = copy.deepcopy((self._module, self.before), memo)
        return _CheckpointedForward(module, before, self.context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = self.before or type(self._module).forward.__get__(self._module)
        # Without gradients nothing is kept, and torchgpipe counts how often skips are used.
        if not self.context.open or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        args, popped = _popped(self._module, args)
        leaves, spec = tree_flatten((args, kwargs, list(popped.values())))
        tensors = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
        versions = [x._version for x in tensors]
        run = _Run(self._module, plain, spec, list(popped))
        made = checkpoint(run, *leaves, use_reentrant=False)
        if versions != [x._version for x in tensors]:
            raise TilenetError(
                "a module that is computed again may not write over its input, as activations in "
                f"place do (module: {type(self._module).__name__}, inputs: "
                f"{[tuple(x.shape) for x in tensors]}); let it begin with another layer, or choose "
                "keep or swap for it"
            )
        return made


def _popped(module: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[Skip, Any]]:
    """The skips that a module will pop, and its arguments, tied to them."""
    found: dict[Skip, Any] = {}
    tracker = current_skip_tracker()
    for skip in skips_from_outside(module):
        # Where a skip came from another device, backward must send its gradient there before it
        # goes on with this one's: torchgpipe ties it to the input.
        batch = Batch(args[0])
        try:
            found[skip] = tracker.load(batch, *skip)
        except KeyError:
            continue  # the layer that pops says it
        args = (batch.tensor_or_tensors, *args[1:])
    return args, found


class _Run:
    """One call of a module, computed once and again. Holds none of its inputs.

    Args:
        forward: What the module computes.
        spec: Structure of arguments, keyword arguments and popped skips.
        popped: These skips' names.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], spec: TreeSpec, popped: list[Skip]
    ) -> None:
        self._module, self._forward, self._spec, self._popped = module, forward, spec, popped
        self._origin = origin_under_way()
        self._first = True
        self._buffers = SeenBuffers(module)
        drops = (one for one in module.modules() if isinstance(one, KeyedDropout))
        keys = {id(one.mask_key): one.mask_key for one in drops}
        # In a pipeline the origin has the images, and threads share the key.
        self._keys = [] if self._origin else [(key, replace(key)) for key in keys.values()]

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs, skips = tree_unflatten(leaves, self._spec)
        popped = dict(zip(self._popped, skips, strict=True))
        if self._first:
            self._first = False
            tracker = _ModuleSkips(self._origin, popped, current_skip_tracker(), self._module)
            with use_skip_tracker(tracker), _watched():
                made = self._forward(*args, **kwargs)
            self._buffers.forget_unchanged()
            return made
        tracker = _ModuleSkips(self._origin, popped)
        seen = self._buffers.as_seen(), _set(self._keys)
        with use_skip_tracker(tracker), enable_recomputing(), seen[0], seen[1]:
            return self._forward(*args, **kwargs)


@contextmanager
def _set(keys: list[tuple[MaskKey, MaskKey]]) -> Iterator[None]:
    """Let mask keys be as others."""
    now = [(key, replace(key)) for key, _ in keys]
    for key, seen in keys:
        vars(key).update(vars(seen))
    try:
        yield
    finally:
        for key, before in now:
            vars(key).update(vars(before))


class _ModuleSkips(OriginTracker):
    """Skips of one run of a module.

    Args:
        popped: From outside.
        outside: Gets those that the module stashes for others; None: they are thrown away.
        module: The module; None: what it stashes is thrown away.
    """

    def __init__(
        self,
        origin: Any,
        popped: Mapping[Skip, Any],
        outside: SkipTracker | None = None,
        module: nn.Module | None = None,
    ) -> None:
        SkipTracker.__init__(self)
        self.origin = origin
        self.tensors.update(popped)
        self._outside = outside
        stashed, wanted = _skips(module) if module is not None else ([], [])
        self._inside = set(stashed) & set(wanted)

    def save(self, batch: Batch, ns: Namespace, name: str, tensor: Tensor | None) -> None:
        if self._outside is not None and (ns, name) not in self._inside:
            self._outside.save(batch, ns, name, tensor)
        else:
            self.tensors[ns, name] = tensor

    def load(self, batch: Batch, ns: Namespace, name: str) -> Tensor | None:
        found: Tensor | None = self.tensors.pop((ns, name))
        return found


@contextmanager
def _watched() -> Iterator[None]:
    """Let the hooks that are at work refuse tensors that somebody wrote over."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def watch(tensor: Tensor) -> tuple[Watch | None, Any]:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        with torch.no_grad():
            return Watch(tensor) if plain else None, pack(tensor)

    def check(held: tuple[Watch | None, Any]) -> Tensor:
        if held[0] is not None:
            held[0].check()
        made: Tensor = unpack(held[1])
        return made

    with saved_tensors_hooks(watch, check):
        yield
