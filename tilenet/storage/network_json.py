"""`network.json`: all that is needed, besides the weights, to make maps."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, get_args

from tilenet.choices import Precision
from tilenet.errors import TilenetError
from tilenet.geometry.halo import Context, context_of
from tilenet.geometry.layers import Cellwise, Conv, Layer
from tilenet.geometry.legal_layers import MOST_HALO_PX, check_grids, check_layers
from tilenet.geometry.opaque import Opaque, opaque_of
from tilenet.storage.class_names import check_class_names
from tilenet.storage.layer_json import layer_from_json, layer_to_json

FORMAT = "tilenet-network-1"
TASKS = "classification", "regression"


@dataclass(frozen=True)
class NetworkRecord:
    """A trained network's description.

    Attributes:
        layers: The layers in the order in which they run.
        bands: Bands that the network reads, counted from 1, of the first training image.
        classes: Names of the classes.
        ignore_index: Label of pixels that did not count; the value of nodata in class maps.
        mean: Mean of each band over the valid pixels of the training images.
        std: Standard deviation of each band.
        resolution: Pixel size that the images were read at; None: their own.
        nodata: Value of `nodata` in the run file.
        precision: Precision of the training run.
        epsilon_px: The paper's halo for this network.
        band_names: Name of each band in the run file, None for a band given as a number; None: all
            bands were given as numbers.
        names: Name in the user module of each weight of the layers, under which the checkpoint
            holds it; None: it holds the network's own names.
        task: `classification`, or `regression`: `classes` then names the predicted number.
        unit: Unit of a regression; None: not given.
        all_bands: Whether the run file names no bands: another image has as many, but for alpha.
        scaling: Scale and offset tags of each band of the training images; None: not known.
        image_bands: Description of each band in the first training image, empty where it has none;
            None: not known.
    """

    layers: tuple[Layer, ...]
    bands: tuple[int, ...]
    classes: tuple[str, ...]
    ignore_index: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resolution: float | None
    nodata: float | str | None
    precision: str
    epsilon_px: int
    band_names: tuple[str | None, ...] | None = None
    names: dict[str, str] | None = None
    task: str = TASKS[0]
    unit: str | None = None
    all_bands: bool = False
    scaling: tuple[tuple[float, float], ...] | None = None
    image_bands: tuple[str, ...] | None = None

    @property
    def bands_to_read(self) -> tuple[int | str, ...] | None:
        """The bands of another image as the run file names them; None: all but alpha."""
        return None if self.all_bands else self.wanted_bands

    @property
    def wanted_bands(self) -> tuple[int | str, ...]:
        """The bands as the run file names them: another image may hold them elsewhere."""
        names = self.band_names or (None,) * len(self.bands)
        return tuple(name or band for name, band in zip(names, self.bands, strict=True))

    @property
    def opaque(self) -> Opaque | None:
        """The network's only layer, where it is an opaque module; None: a list of layers."""
        return opaque_of(self.layers)

    def same_network(self, other: "NetworkRecord") -> bool:
        """Whether the layers are the same, whichever of their weights are trained."""
        if self.opaque is not None and other.opaque is not None and not self.opaque.digest:
            other = replace(other, layers=(replace(other.opaque, digest=""),))  # of an older file
        kinds = [[_all_trained(layer) for layer in record.layers] for record in (self, other)]
        return kinds[0] == kinds[1]

    def context(self) -> Context:
        """Return the alignment and the context of the network's tiles."""
        return context_of(self.layers)

    def to_json(self) -> dict[str, Any]:
        """The record as plain values.

        `alignment_px`, `halo_px` and `offset_px` follow from the layers; they stand here for
        programs that rebuild the network without tilenet (docs/checkpoint.md).
        """
        context = self.context()
        return {
            "format": FORMAT,
            "bands": list(self.bands),
            "band_names": None if self.band_names is None else list(self.band_names),
            "task": self.task,
            "unit": self.unit,
            "classes": list(self.classes),
            "ignore_index": self.ignore_index,
            "statistics": {"mean": list(self.mean), "std": list(self.std)},
            "all_bands": self.all_bands,
            "scaling": None if self.scaling is None else [list(pair) for pair in self.scaling],
            "image_bands": None if self.image_bands is None else list(self.image_bands),
            "resolution": self.resolution,
            "nodata": self.nodata,
            "precision": self.precision,
            "padding": "valid" if context.valid else "same",
            "alignment_px": context.alignment_px,
            "halo_px": context.halo_px,
            "offset_px": context.offset_px,
            "epsilon_px": self.epsilon_px,
            "names": self.names,
            "layers": [layer_to_json(layer) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "NetworkRecord":
        """The record that `to_json` wrote.

        Raises:
            TilenetError: A key is missing or has the wrong type, or the format is another one.
        """
        if entry.get("format") != FORMAT:
            raise TilenetError(
                f"network.json must have the format {FORMAT} (got {entry.get('format')!r}); use "
                "the tilenet that wrote it"
            )
        try:
            record = cls(
                layers=tuple(layer_from_json(layer) for layer in entry["layers"]),
                bands=tuple(int(band) for band in entry["bands"]),
                classes=tuple(str(name) for name in entry["classes"]),
                ignore_index=int(entry["ignore_index"]),
                mean=tuple(float(x) for x in entry["statistics"]["mean"]),
                std=tuple(float(x) for x in entry["statistics"]["std"]),
                resolution=_number(entry["resolution"]),
                nodata=nodata if isinstance(nodata := entry["nodata"], str) else _number(nodata),
                precision=_one_of(get_args(Precision), entry["precision"]),
                epsilon_px=int(entry["epsilon_px"]),
                band_names=_names(entry.get("band_names")),  # older files have none
                names=_weight_names(entry.get("names")),
                task=_one_of(TASKS, entry.get("task", TASKS[0])),
                unit=None if entry.get("unit") is None else str(entry["unit"]),
                all_bands=bool(entry.get("all_bands", False)),
                scaling=_scaling(entry.get("scaling")),
                image_bands=_image_bands(entry.get("image_bands")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TilenetError(
                f"network.json must hold every key with its type ({error!r}); use another "
                "checkpoint"
            ) from error
        _check(record)
        return record


def _all_trained(layer: Layer) -> Layer:
    if not isinstance(layer, Cellwise | Conv):
        return layer
    return replace(layer, weights=tuple((name, shape, True) for name, shape, _ in layer.weights))


def _check(record: NetworkRecord) -> None:
    """Refuse values that do not fit each other.

    Raises:
        TilenetError: Names the first of them.
    """
    check_class_names(record.classes, "classes in network.json")
    check_class_names((record.unit or "",), "unit in network.json")
    if not len(record.bands) == len(record.mean) == len(record.std):
        raise TilenetError(
            f"network.json must hold one mean and std per band (bands: {len(record.bands)}, "
            f"mean: {len(record.mean)}, std: {len(record.std)}); use another checkpoint"
        )
    of_bands = {name: getattr(record, name) for name in ("band_names", "scaling", "image_bands")}
    for key, part in of_bands.items():
        if part is not None and len(part) != len(record.bands):
            raise TilenetError(
                f"network.json must hold one of {key} per band, or null (bands: "
                f"{len(record.bands)}, {key}: {len(part)}); use another checkpoint"
            )
    numbers = (record.ignore_index, record.epsilon_px, *record.bands)
    if not all(map(isfinite, (*record.mean, *record.std))) or not all(
        abs(number) < 2**31 for number in numbers
    ):
        raise TilenetError(
            "network.json must hold finite statistics, and numbers below 2³¹ (statistics, "
            "bands, ignore_index or epsilon_px); use another checkpoint"
        )
    check_layers(record.layers, len(record.bands), len(record.classes))
    check_grids(record.layers)
    if (halo_px := record.context().halo_px) > MOST_HALO_PX:
        raise TilenetError(
            f"a network's tiles have a halo of {MOST_HALO_PX} px at the most (network.json: "
            f"{halo_px} px); use another checkpoint"
        )


def _number(value: Any) -> float | None:
    """Return a number unchanged, or None.

    Raises:
        TypeError: It is something else.
    """
    if value is not None and type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    return None if value is None else value + 0.0


def _one_of(words: tuple[str, ...], word: str) -> str:
    if word not in words:
        raise ValueError(f"{word!r} is none of {', '.join(words)}")
    return word


def _scaling(entry: list[list[float]] | None) -> tuple[tuple[float, float], ...] | None:
    return None if entry is None else tuple((float(a), float(b)) for a, b in entry)


def _image_bands(entry: list[str] | None) -> tuple[str, ...] | None:
    return None if entry is None else tuple(map(str, entry))


def _weight_names(entry: dict[str, str] | None) -> dict[str, str] | None:
    return None if entry is None else {str(own): str(name) for own, name in entry.items()}


def _names(entry: list[str | None] | None) -> tuple[str | None, ...] | None:
    return None if entry is None else tuple(None if n is None else str(n) for n in entry)
