"""A module's weights and buffers, their names, and a copy of it to run."""

import copy
from collections.abc import Iterable, Iterator, ValuesView
from itertools import permutations

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError

__all__ = [
    "check_hooks",
    "check_memory",
    "copied",
    "fixed_names",
    "state_of",
    "trained_names",
    "twins",
]


def copied(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU in float32, in training mode unless only some parts are in it."""
    lazy = [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise TilenetError(
            f"a network's weights have their shapes ({lazy[0]} in {type(module).__name__} has "
            "none yet); give the module an image before"
        )
    try:
        mine = copy.deepcopy(module).cpu().float()
    except Exception as error:  # a user module may hold any hooks and tensors
        raise TilenetError(
            f"a network can be copied ({type(module).__name__}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); use one without what cannot, such as "
            "torch.nn.utils.weight_norm"
        ) from error
    modes = {part.training for part in module.modules()}
    return mine.train() if len(modes) == 1 else mine


def check_hooks(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse functions that torch calls with a weight's gradient: layers' weights have none.

    Args:
        names: Of the weights that are in layers.
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
                    f"weights that are the same are one tensor of several names ({name} and "
                    f"{other} of {type(module).__name__} are two tensors that share memory); "
                    "assign the parameter itself, not its data or a view of it"
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


def trained_names(module: nn.Module) -> set[str]:
    """All names of weights that are trained."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if parameter.requires_grad}


def twins(module: nn.Module) -> dict[str, str]:
    """Names that the state holds besides the first one of the same tensor."""
    first: dict[int, str] = {}
    twins = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        own = first.setdefault(id(tensor), name)
        if own != name:
            twins[name] = own
    return twins


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's weights and buffers, on the CPU."""
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    # Cloned: weights of a module may share memory, which files of safetensors do not hold.
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def fixed_names(module: nn.Module) -> frozenset[str]:
    """All names of weights and buffers that are not trained."""
    return frozenset(module.state_dict()) - trained_names(module)
