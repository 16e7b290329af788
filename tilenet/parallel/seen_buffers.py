"""The buffers of a module as one forward pass saw them, for the same pass once more."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["SeenBuffers"]


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
        for part, name, _, _, copy in self._seen:
            part._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for part, name, buffer in now:
                part._buffers[name] = buffer


def _changed(part: nn.Module, name: str, buffer: Tensor, version: int) -> bool:
    # torch's norms write running statistics without counting versions.
    written = isinstance(part, _NormBase) or buffer._version != version
    return written or part._buffers[name] is not buffer
