"""A module's weights and buffers, their names, and a copy of it to run."""

import copy

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError, one_line


def copied(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU in float32, in training mode unless only some parts are in it."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TilenetError(
            f"a network is a module of Python ({type(module).__name__}: TorchScript); pass the one "
            "that was scripted or traced"
        )
    lazy = [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise TilenetError(
            f"a network's weights have their shapes ({lazy[0]} in {type(module).__name__} has "
            "none yet); give the module an image before"
        )
    try:
        mine = copy.deepcopy(module).cpu().float()
    except Exception as error:  # a user module may hold any hooks and tensors
        raise cannot_copy(module, error) from error
    modes = {part.training for part in module.modules()}
    return mine.train() if len(modes) == 1 else mine


def cannot_copy(module: nn.Module, error: Exception) -> TilenetError:
    """The error that a module cannot be copied."""
    return TilenetError(
        f"a network can be copied ({type(module).__name__}: {type(error).__name__}: "
        f"{one_line(str(error))[:200]}); leave out of it what cannot, and use "
        "torch.nn.utils.parametrizations.weight_norm for torch.nn.utils.weight_norm"
    )


def trained_names(module: nn.Module) -> set[str]:
    """All names of weights that are trained."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if parameter.requires_grad}


def unreached_names(module: nn.Module) -> set[str]:
    """All names of weights that no gradient has reached, as where a map is detached.

    torch's optimizers leave them as they are.
    """
    weights = module.named_parameters(remove_duplicate=False)
    return {name for name, weight in weights if weight.grad is None}


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
