"""`tilenet.plan`: tiles, ranks, partitions and micro-batches for a network, an image, a machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.source import build_module
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.library.names import check_names
from tilenet.library.network import first_bands, network_keys
from tilenet.planning.explain import answer, explain, in_gib, in_seconds
from tilenet.planning.machines.read import machine as facts_of
from tilenet.planning.plan import OwnNetwork, Plan, Question, write_plan
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.setup.architecture import Architecture


@dataclass(frozen=True, repr=False)
class Plans:
    """The best plan, and the next best.

    Attributes:
        best: The fastest plan that fits.
        others: The next fastest.
    """

    best: Plan
    others: tuple[Plan, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `plan.json`, for the key `plan` of a run and for `launch`."""
        write_plan(self.best, Path(path))

    def __repr__(self) -> str:
        best = self.best
        return (
            f"<Plans {best.layout}; {best.num_ranks} ranks, {in_gib(best.device_bytes)} GiB per "
            f"device, {in_seconds(best.step_s)} per step>"
        )

    def __str__(self) -> str:
        return explain([self.best, *self.others])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def plan(
    net: nn.Module | Adopted | str | Mapping[str, Any],
    *,
    image: tuple[int, int] | None = None,
    images: str | os.PathLike[str] | None = None,
    bands: int | None = None,
    classes: int | None = None,
    machine: str = "local",
    **options: Any,
) -> Plans:
    """Choose how to train a network on a machine, which need not be this one. Not collective.

        print(tilenet.plan("unet-large", images="scene.tif", machine="summit", nodes=4))

    Args:
        net: A module; the result of `tilenet.adopt`, for instance with `batch_norm="step"`;
            `package:name`; a U-Net such as `unet-small`, or keys of the run file's group `network`.
        image: Height and width of the largest image, in pixels.
        images: Instead, a raster of its size and bands.
        bands: Number of bands; None: that of `images`, of the module's first convolution, or 4.
        classes: Number of classes of a U-Net (a module has its own); None: 2.
        machine: A machine as in `tilenet plan --machine`.
        options: `nodes`, `num_images`, `batch_size`, `precision`, `optimizer`, `halo`, `halo_mode`,
            `grid`, `tile_px`, `partitions`, `balance`, `micro_batches`, `checkpointing`,
            `pipeline`, `swap`, `reserve`, as in `tilenet plan`; options left out are chosen.

    Raises:
        TilenetError: Nothing fits, and the error names changes that would; or a rule is broken.
    """
    names = [part.name for part in fields(Question)]
    check_names(options, [name for name in names[4:] if name != "profile"], "plan")
    if images is not None:
        with Raster(os.fspath(images)) as opened:
            image, bands = image or opened.size, bands or len(opened.bands)
    if image is None:
        raise TilenetError("a plan is for images of a size (image: None); give image or images")
    network, epsilon_px = _network(net, bands, classes)
    options = {"halo_mode": "auto", **options}
    for name in ("grid", "balance"):
        if options.get(name) is not None:
            options[name] = tuple(options[name])
    question = Question(network, epsilon_px, image, facts_of(machine), **options)
    best, *others = answer(question)
    return Plans(best, tuple(others))


def _network(
    net: nn.Module | Adopted | str | Mapping[str, Any], bands: int | None, classes: int | None
) -> tuple[UNetOptions | OwnNetwork, int]:
    """The network as planning takes it, and the paper's halo for it.

    Raises:
        TilenetError: There is no such network, or it has other bands or classes.
    """
    if isinstance(net, Adopted):
        adopted = net
    elif isinstance(net, nn.Module):
        adopted = adopt(net, bands or first_bands(net))
    else:
        keys = NetworkKeys(**network_keys(net, {}))
        if keys.module is None:
            architecture = Architecture.of(keys, bands or 4, 2 if classes is None else classes, 0)
            assert architecture.options is not None
            return architecture.options, architecture.epsilon_px
        keys.check()
        module = build_module(keys.module, keys.options or {})
        adopted = adopt(module, bands or first_bands(module), keys.batch_norm or "frozen")
    for name, requested, own in (
        ("bands", bands, adopted.bands),
        ("classes", classes, adopted.classes),
    ):
        if requested not in (None, own):
            raise TilenetError(
                f"a module has its own {name} ({name}: {requested}, {adopted.name}: {own}); leave "
                f"{name} out, or make another module"
            )
    return OwnNetwork(adopted.name, adopted.layers, adopted.together), 0
