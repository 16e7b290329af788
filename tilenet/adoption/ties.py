"""Refuse what ties a weight to others besides its name: shared memory, hooks of its gradient.

A list of layers has weights of its own, which know of neither.
"""

from collections.abc import Iterable, Iterator, ValuesView
from itertools import permutations

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError


def check_hooks(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse functions that torch calls with a weight's gradient: layers' weights have none.

    Args:
        names: Of the weights that are in layers.

    Raises:
        TilenetError: The error names the first such weight.
    """
    layers = set(names)
    for name, weight in module.named_parameters(remove_duplicate=False):
        hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
        if hooks and weight.requires_grad and name in layers:
            raise TilenetError(
                f"a weight's gradient is that of the loss ({name} of {type(module).__name__} has a "
                "hook that may change it); remove the hook, and fix weights by requires_grad, or "
                "change the gradient in forward"
            )


def check_memory(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse a trained weight whose memory another tensor of the module lies in.

    An update of the one would change the other, which is another tensor of the list.

    Args:
        names: Of the weights that are in layers.

    Raises:
        TilenetError: The error names the first such weight.
    """
    layers = set(names)
    lies: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(module):
        if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
            place = tensor.untyped_storage().data_ptr()
            lies.setdefault(place, {}).setdefault(id(tensor), (name, tensor))
    for tensors in lies.values():
        for (name, weight), (other, tensor) in permutations(tensors.values(), 2):
            if name in layers and weight.requires_grad and _overlap(weight, tensor):
                raise TilenetError(
                    f"tied weights are one tensor under several names ({name} and {other} of "
                    f"{type(module).__name__} are two tensors that share memory); assign the "
                    "parameter itself, not its data or a view of it"
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights, buffers and other tensors that the module and its parts hold, with their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, part in module.named_modules():
        for name, held in vars(part).items():
            values = held.values() if isinstance(held, dict) else held
            for value in values if isinstance(values, list | tuple | ValuesView) else (held,):
                if isinstance(value, Tensor):
                    yield f"{path}.{name}".lstrip("."), value


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one memory have a value in common."""
    begins = [tensor.storage_offset() for tensor in (first, second)]
    ends = [
        begin
        + sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
        for begin, tensor in zip(begins, (first, second), strict=True)
    ]
    if begins[0] > ends[1] or begins[1] > ends[0]:
        return False
    if first.dtype != second.dtype:
        return True
    places = torch.zeros(max(ends) - min(begins) + 1, dtype=torch.bool)
    parts = [
        places.as_strided(tensor.shape, tensor.stride(), begin - min(begins))
        for begin, tensor in zip(begins, (first, second), strict=True)
    ]
    parts[0].fill_(True)
    return bool(parts[1].any())
