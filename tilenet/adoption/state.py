"""A module's weights and buffers, their names, and a copy of it to run."""

import copy
from itertools import combinations

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError

__all__ = ["copied", "fixed_names", "state_of", "trained_names", "twins"]


def copied(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU in float32, in training mode unless only some parts are in it.

    Raises:
        TilenetError: It holds what a copy loses.
    """
    lazy = [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise TilenetError(
            f"a network's weights have their shapes ({lazy[0]} in {type(module).__name__} has "
            "none yet); give the module an image before"
        )
    _check_hooks(module)
    _check_memory(module)
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


def _check_hooks(module: nn.Module) -> None:
    """Refuse functions that torch calls with a weight's gradient: layers' weights have none."""
    for name, weight in module.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise TilenetError(
                f"a weight's gradient is that of the loss ({name} of {type(module).__name__} has a "
                "hook that may change it); remove the hook, and fix weights by requires_grad, or "
                "change the gradient in forward"
            )


def _check_memory(module: nn.Module) -> None:
    """Refuse a trained weight whose memory another tensor of the state lies in.

    An update of the one would change the other, which is another tensor of the list.
    """
    lies: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel():
            lies.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for address, tensors in lies.items():
        for (name, first), (other, second) in combinations(tensors, 2):
            trained = first.requires_grad or second.requires_grad
            if address and trained and first is not second and _overlap(first, second):
                raise TilenetError(
                    f"weights that are the same are one tensor of several names ({name} and "
                    f"{other} of {type(module).__name__} are two tensors that share memory); "
                    "assign the parameter itself, not its data or a view of it"
                )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the memory from the first to the last value of each has a part in common."""
    ends = [
        tensor.storage_offset()
        + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in (first, second)
    ]
    return first.storage_offset() <= ends[1] and second.storage_offset() <= ends[0]


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
