"""A user module: made by a function or a class of a package."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tilenet.errors import TilenetError, one_line


def check_name(network: str) -> None:
    """Refuse a name that is not one of a function or a class of a package.

    Raises:
        TilenetError: Names the form.
    """
    package, sign, name = network.partition(":")
    if not (sign and all(part.isidentifier() for part in [*package.split("."), *name.split(".")])):
        raise TilenetError(
            f"a network is named package:function or package:Class ({network}); for instance "
            "segmentation_models_pytorch:Unet"
        )


def build_module(network: str, options: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Call a function or a class that makes a module; it may lie in the working directory.

    Args:
        network: Name of it, as in `package:function` or `package:Class`.
        options: Keyword arguments of the call.
        seed: Seed of torch's random numbers during the call.

    Raises:
        TilenetError: It cannot be imported, it raises, or its result is not a module.
    """
    check_name(network)
    package, _, name = network.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    dtype = torch.get_default_dtype()
    try:
        maker: Any = import_module(package)
        for part in name.split("."):
            maker = getattr(maker, part)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = maker(**options)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise TilenetError(
            f"a network is made by calling a function or a class ({network}: "
            f"{type(error).__name__}: {one_line(str(error))}); try it in Python first"
        ) from error
    finally:
        torch.set_default_dtype(dtype)  # which an import may change, and other ranks keep
    if not isinstance(module, nn.Module):
        raise TilenetError(
            f"a network is a torch.nn.Module ({network} gives {type(module).__name__}); name "
            "a function or a class that makes one"
        )
    return module
