"""Seconds that each layer was measured to take: the file that `tilenet profile` writes."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError, one_line
from tilenet.geometry.layers import Layer
from tilenet.planning.time.layer_time import LayerTime
from tilenet.storage.layer_json import layer_from_json, layer_to_json
from tilenet.storage.strict_json import parsed_json

VERSION = 2  # of the file; 1 kept kinds alone, so that widths could not be compared
LONGEST_S = 1e6  # of a layer; far beyond any, and small enough that sums stay finite
LARGEST_PX = 2**20  # per side; far beyond any tile, and small enough that products stay exact


@dataclass(frozen=True)
class ProfiledLayer:
    """Measured seconds of one layer.

    Attributes:
        layer: The layer itself, so that a profile of another network is noticed.
        forward_s: Seconds forward, of one sample.
        backward_s: Seconds backward, without recomputation.
    """

    layer: Layer
    forward_s: float
    backward_s: float

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary to write: the layer's own fields, and its seconds."""
        seconds = {"forward_s": self.forward_s, "backward_s": self.backward_s}
        return {**layer_to_json(self.layer), **seconds}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "ProfiledLayer":
        """Read the dictionary that `to_json` returned."""
        own = {key: value for key, value in entry.items() if key not in ("forward_s", "backward_s")}
        return cls(layer_from_json(own), float(entry["forward_s"]), float(entry["backward_s"]))


@dataclass(frozen=True)
class Profile:
    """Measured seconds of a network's layers.

    Attributes:
        device: Name of the device that was measured, in its own words.
        precision: float32, float64, bfloat16 or float16.
        height: Rows of the measured tile, pixels.
        width: Columns of the measured tile, pixels.
        layers: Layers in the order in which they run.
        memory: Measured memory, by names that `tilenet profile` gives.
    """

    device: str
    precision: str
    height: int
    width: int
    layers: tuple[ProfiledLayer, ...]
    memory: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary to write."""
        layers = [layer.to_json() for layer in self.layers]
        return {"tilenet_profile": VERSION, **asdict(self), "layers": layers}


def read_profile(path: Path) -> Profile:
    """Read a file that `tilenet profile` wrote.

    Raises:
        TilenetError: It is no profile, or not one that this version understands.
    """
    try:
        entry = parsed_json(path.read_text("utf-8"))
    except OSError as error:
        raise TilenetError(
            f"the profile must be a readable file ({error}); write one with tilenet profile"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"no JSON: {error}") from error
    version = entry.get("tilenet_profile") if isinstance(entry, dict) else None
    if version is True or version != VERSION:
        raise _wrong(path, f"of version {VERSION}, tilenet_profile: {_short(version)}")
    try:
        profile = Profile(
            device=str(entry["device"]),
            precision=str(entry["precision"]),
            height=int(entry["height"]),
            width=int(entry["width"]),
            layers=tuple(map(ProfiledLayer.from_json, entry["layers"])),
            memory=dict(entry.get("memory", {})),
        )
    except (
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TilenetError,
    ) as error:  # fmt: skip
        raise _wrong(path, f"{type(error).__name__}: {error}") from error
    seconds = [value for layer in profile.layers for value in (layer.forward_s, layer.backward_s)]
    if not all(0 <= value <= LONGEST_S for value in seconds) or not any(seconds):
        raise _wrong(path, f"seconds of layers, 0 to {LONGEST_S:.0f}, some above 0")
    if not all(1 <= side <= LARGEST_PX for side in (profile.height, profile.width)):
        raise _wrong(path, "height and width in pixels")
    return profile


def check_precision(profile: Profile, precision: str) -> None:
    """Refuse a profile of another precision.

    Raises:
        TilenetError: It is of another one.
    """
    if profile.precision != precision:
        raise TilenetError(
            "the profile must be of the precision that is planned (profile: "
            f"{one_line(profile.precision)}, plan: {precision}); profile again with --precision "
            f"{precision}"
        )


def layer_times_of_profile(
    profile: Profile, layers: tuple[Layer, ...], height: int, width: int
) -> tuple[LayerTime, ...]:
    """Seconds of the network's layers for tiles of (height, width) pixels, by the pixels.

    Raises:
        TilenetError: The profile is of another network.
    """
    measured = tuple(layer.layer for layer in profile.layers)
    if measured != layers:
        raise TilenetError(
            f"the profile must be of the network that is planned ({_difference(measured, layers)});"
            " profile this network"
        )
    scale = height * width / (profile.height * profile.width)
    return tuple(
        LayerTime(layer.forward_s * scale, layer.backward_s * scale) for layer in profile.layers
    )


def _difference(measured: tuple[Layer, ...], planned: tuple[Layer, ...]) -> str:
    if len(measured) != len(planned):
        return f"layers in the profile: {len(measured)}, in the network: {len(planned)}"
    pairs = enumerate(zip(measured, planned, strict=True))
    number, (old, new) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    if old.kind != new.kind:
        return f"layer {number} in the profile: {old.kind}, in the network: {new.kind}"
    was, now = layer_to_json(old), layer_to_json(new)
    unlike = [key for key in now if was[key] != now[key]]
    return (
        f"layer {number}, {new.kind}, in the profile: {_text_of(was, unlike)}, "
        f"in the network: {_text_of(now, unlike)}"
    )


def _text_of(entry: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} {_short(entry[key])}" for key in keys)


def _wrong(path: Path, what: str) -> TilenetError:
    return TilenetError(f"{path} must be a profile ({what}); write one with tilenet profile")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits have no text
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
