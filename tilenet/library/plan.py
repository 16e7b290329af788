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
from tilenet.planning.machines import machine as facts_of
from tilenet.planning.plan import OwnNetwork, Plan, Question, write_plan
from tilenet.planning.search import Search
from tilenet.training.architecture import Architecture
from tilenet.training.config.keys import NetworkKeys

__all__ = ["Plans", "plan"]


@dataclass(frozen=True, repr=False)
class Plans:
    """A plan, and what it was chosen among.

    Attributes:
        best: The fastest that fits.
        others: The next ones.
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
    **asked: Any,
) -> Plans:
    """Choose what to train a network with, on a machine that need not be this one. Not collective.

        print(tilenet.plan("unet-large", images="scene.tif", machine="summit", nodes=4))

    Args:
        net: A module; what `tilenet.adopt` made of it, such as with `batch_norm="step"`;
            `package:name`; `unet-small` and so on, or keys of the run file's group `network`.
        image: Height and width of the largest image, in pixels.
        images: Instead, a raster of its size and bands.
        bands: Of the image; None: those of `images`, of the module's first convolution, or 4.
        classes: Their number, of a U-Net: a module has its own; None: 2.
        machine: One of `tilenet plan --machine`.
        asked: `nodes`, `num_images`, `batch_size`, `precision`, `optimizer`, `halo`, `halo_mode`,
            `grid`, `tile_px`, `partitions`, `balance`, `micro_batches`, `mbpp`, `checkpointing`,
            `swap`, `reserve`, as of `tilenet plan`; what is left out is chosen.

    Raises:
        TilenetError: Nothing fits; the sentence says what would. Or a rule is broken.
    """
    known = [part.name for part in fields(Question)]
    check_names(asked, [name for name in known[4:] if name != "profile"], "plan")
    if images is not None:
        with Raster(os.fspath(images)) as opened:
            image, bands = image or opened.size, bands or len(opened.bands)
    if image is None:
        raise TilenetError("a plan is for images of a size (image: None); give image or images")
    options, epsilon_px = _network(net, bands, classes)
    question = Question(options, epsilon_px, image, facts_of(machine), **asked)
    best, *others = answer(Search(question))
    return Plans(best, tuple(others))


def _network(
    net: nn.Module | Adopted | str | Mapping[str, Any], bands: int | None, classes: int | None
) -> tuple[UNetOptions | OwnNetwork, int]:
    """What planning asks of a network, and the paper's halo for it.

    Raises:
        TilenetError: There is none, or it has other bands or classes.
    """
    adopted = net if isinstance(net, Adopted) else None
    if isinstance(net, nn.Module):
        adopted = adopt(net, bands or first_bands(net))
    elif adopted is None:
        named = net if isinstance(net, str) else None
        keys = NetworkKeys(**network_keys(named, {"network": {} if named is not None else net}))
        if keys.module is None:
            found = Architecture.of(keys, bands or 4, 2 if classes is None else classes, 0)
            assert found.options is not None
            return found.options, found.epsilon_px
        keys.check()
        module = build_module(keys.module, keys.options or {})
        adopted = adopt(module, bands or first_bands(module), keys.batch_norm or "frozen")
    for name, asked, own in (
        ("bands", bands, adopted.bands),
        ("classes", classes, adopted.classes),
    ):
        if asked not in (None, own):
            raise TilenetError(
                f"a module has its own {name} ({name}: {asked}, {adopted.name}: {own}); leave "
                f"{name} out, or make another module"
            )
    return OwnNetwork(adopted.name, adopted.layers, adopted.together), 0
