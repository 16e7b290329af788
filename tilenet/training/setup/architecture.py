"""The layers of a run's network: those of a U-Net of tilenet, or of a user module."""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import nn

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.opaque import take_as_it_is
from tilenet.adoption.source import build_module
from tilenet.adoption.state import cannot_copy
from tilenet.adoption.weights import load_partial_weights
from tilenet.errors import TilenetError
from tilenet.geometry.halo import epsilon_px
from tilenet.geometry.layers import Layer
from tilenet.geometry.unet import PAPER_LEVELS, PRESETS, UNetOptions, unet_layers
from tilenet.training.config.keys import NetworkKeys


@dataclass(frozen=True)
class Architecture:
    """The network that a run trains.

    Attributes:
        layers: Layers in the order in which they run.
        epsilon_px: The paper's halo; 0 for a user module.
        options: Options of a U-Net of tilenet; None: a user module.
        adopted: The adopted user module with its first weights; None: a U-Net.
        note: A sentence on the weights that were loaded into the module, if any.
        module: The user module itself, on the rank that made it.
    """

    layers: tuple[Layer, ...]
    epsilon_px: int = 0
    options: UNetOptions | None = None
    adopted: Adopted | None = None
    note: str = ""
    module: nn.Module | None = None

    @classmethod
    def of(
        cls,
        keys: NetworkKeys,
        bands: int,
        classes: int,
        seed: int,
        module: nn.Module | None = None,
        window_px: int | None = None,
    ) -> "Architecture":
        """Build the network that a run file names.

        Args:
            module: The module, if a program made it; it is not changed.
            window_px: Side of the windows of an opaque module; None: the module becomes a list of
                layers.

        Raises:
            TilenetError: The network cannot be made, or is for other bands or classes.
        """
        if keys.module is None:
            options = _options(keys, bands, classes)
            return cls(unet_layers(options), _paper_epsilon_px(keys, options), options)
        if len(keys.mean or [0.0] * bands) != bands:
            raise TilenetError(
                f"each band has a mean and a std (network.mean: {keys.mean}, bands: {bands}); give "
                "as many"
            )
        note = ""
        if module is None:
            module = build_module(keys.module, keys.options or {}, seed)
        else:
            module = _copy(module)
        if keys.weights is not None:
            note = load_partial_weights(module, Path(keys.weights))
        if window_px is None:
            adopted = adopt(module, bands, keys.batch_norm or "frozen")
        else:
            adopted = take_as_it_is(module, bands, window_px, keys.module)
        if adopted.classes != classes:
            raise TilenetError(
                f"a network gives one channel per class (network.module: {keys.module} gives "
                f"{adopted.classes}, classes: {classes}); set network.options, such as classes: "
                f"{classes}"
            )
        if not set(adopted.names.values()) - adopted.fixed:
            raise TilenetError(
                f"a network that is trained has weights that are (network.module: {keys.module} "
                "trains none); call requires_grad_() of those to train"
            )
        return cls(adopted.layers, adopted=adopted, note=note, module=module)


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever a user module may hold
        raise cannot_copy(module, error) from error


def _options(keys: NetworkKeys, bands: int, classes: int) -> UNetOptions:
    """The options of the preset, or the defaults, overridden by the keys of the run file."""
    names = {field.name for field in fields(UNetOptions)}
    values = {
        name: value for name, value in vars(keys).items() if name in names and value is not None
    }
    return replace(keys.start, **values, bands=bands, classes=classes)


def _paper_epsilon_px(keys: NetworkKeys, options: UNetOptions) -> int:
    """The paper's halo for this network: for its own models it counts one level less."""
    same = keys.preset is not None and options.poolings == PRESETS[keys.preset].poolings
    levels = PAPER_LEVELS[keys.preset] if same and keys.preset else options.poolings + 1
    return epsilon_px(levels, options.convolutions, options.kernel)
