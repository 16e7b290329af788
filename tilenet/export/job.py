"""Export a checkpoint's network to a file that other programs run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from torch import nn

from tilenet.errors import TilenetError
from tilenet.export.deepness import deepness_properties
from tilenet.export.description import Description, origin_of
from tilenet.export.pixels import FromPixels
from tilenet.export.program import Traced, check_onnx, trace
from tilenet.export.stac import stac_item
from tilenet.export.tile import decide_least_px, decide_tile
from tilenet.geometry.by_place import by_corners
from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.layers import GlobalPool, Layer, Norm
from tilenet.mapping.map_source import load_network
from tilenet.mapping.writing.target import check_target
from tilenet.model.dtypes import parameter_dtype
from tilenet.storage.atomic import put, write_aside
from tilenet.storage.checkpoints import WEIGHTS
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.whole_checkpoint import checked_checkpoint

MOST_ROUNDED = 1e-3  # of a band's deviation, that goes without saying
WHAT, ITEM = "an exported network", "the description of an exported network"


@dataclass(frozen=True)
class Export:
    """A network to export, and how.

    Attributes:
        network: Folder of a training run, or of a checkpoint.
        out: File to write; its ending says the format.
        output: `logits` or `probabilities`; a regression has logits only, which are its values.
        tile_px: Side of windows in other programs; None: 512 px or more, depending on the halo.
        module: The module of a checkpoint that holds weights alone (`halo_mode: windows`).
        overwrite: Whether files of that name are replaced.
    """

    network: str
    out: str
    output: str = "logits"
    tile_px: int | None = None
    module: nn.Module | None = None
    overwrite: bool = False


def export_network(job: Export) -> list[str]:
    """Write the file, and a STAC item next to it, with the ending .json.

    Returns:
        Sentences on the file's input and output.

    Raises:
        TilenetError: The checkpoint is broken, the network cannot be exported, or the file not
            written.
    """
    out = Path(job.out)
    onnx = out.suffix == ".onnx"
    _check(job, out)
    folder = checked_checkpoint(Path(job.network)).resolve()
    # Programs that run .onnx files on CPUs often have no convolutions but those of float32.
    record, network = load_network(folder, "float32" if onnx else None, job.module)
    dtype = parameter_dtype("float32" if onnx else record.precision)
    if job.output == "probabilities" and record.task == "regression":
        raise TilenetError(f"a regression has no probabilities ({folder}); leave --output out")
    context = record.context()
    tile = decide_tile(context, record.opaque, job.tile_px)
    whole = FromPixels(network, record, dtype, softmax=job.output == "probabilities")
    # Deepness takes only .onnx files with a fixed size.
    least_px = None
    if not onnx and record.opaque is None:
        least_px = decide_least_px(record.layers, context.alignment_px, tile.px)
    traced = trace(whole, tile.px, context.alignment_px, least_px)
    about = Description(
        file=out.name,
        record=record,
        output=job.output,
        tile=tile,
        least_px=traced.least_px,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        trained=_time_of(folder),
        origin=origin_of(folder, record),
    )
    _write(traced, out, deepness_properties(about))
    write_aside(json.dumps(stac_item(about), indent=1), out.with_suffix(".json"), ITEM)
    return _sentences(job, about)


def _check(job: Export, out: Path) -> None:
    """Refuse an export that cannot be written, before any work is done.

    Raises:
        TilenetError: The ending is not known, or a file is in the way.
    """
    if out.suffix not in (".pt2", ".onnx"):
        raise TilenetError(f"{WHAT} is a .pt2 or .onnx file ({out}); give it one of these endings")
    if out.suffix == ".onnx":
        check_onnx()
    for path, what in ((out, WHAT), (out.with_suffix(".json"), ITEM)):
        check_target(str(path), overwrite=job.overwrite, what=what, ending=path.suffix)


def _time_of(checkpoint: Path) -> str:
    """Time at which a checkpoint was written, in UTC."""
    written = (checkpoint / WEIGHTS).stat().st_mtime
    return datetime.fromtimestamp(written, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(traced: Traced, out: Path, properties: Mapping[str, str]) -> None:
    part = out.with_name(f".{out.stem}.part{out.suffix}")  # torch takes no other ending
    try:
        traced.write(part, properties)
        put(part, out)
    except OSError as error:
        raise TilenetError(
            f"{WHAT} must be written to a place that can be written ({out}: {error.strerror}); "
            "name another file"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _sentences(job: Export, about: Description) -> list[str]:
    """Return sentences on the file's input, its output, and differences from tilenet's maps."""
    tile, alignment_px = about.tile, about.record.context().alignment_px
    size, rest = f"{tile.px} × {tile.px} px", tile.px % alignment_px
    if about.least_px is not None:
        size = f"sizes from {about.least_px} px on that are multiples of {alignment_px} px"
        size += f" and {rest}" * (rest > 0)
    grid = "" if tile.on_grid else ", which then begin off the network's grid, so that maps differ"
    return [
        f"{job.out} takes pixel values of {size}, and gives {job.output}; windows of "
        f"{tile.px} px overlap by {tile.overlap_percent} %{grid}",
        *_note_rounding(about),
        *_notes(about.record),
    ]


def _note_rounding(about: Description) -> list[str]:
    """Return a sentence on the band of which the file's float32 loses most, where that matters."""
    if about.dtype != "float32":
        return []
    record = about.record
    gaps = np.spacing(np.abs(record.mean, dtype=np.float32))
    shares = gaps / [deviation if deviation > 0 else 1.0 for deviation in record.std]
    worst = int(shares.argmax())
    if shares[worst] <= MOST_ROUNDED:
        return []
    return [
        f"near the mean of band {record.wanted_bands[worst]} ({record.mean[worst]:.9g}, deviation "
        f"{record.std[worst]:.3g}) float32 holds multiples of {gaps[worst]:.3g} alone: of images "
        "with values in between others' maps differ from those of tilenet predict"
    ]


def _notes(record: NetworkRecord) -> list[str]:
    """Return sentences on differences between maps of other programs and those of tilenet."""
    if record.opaque is not None:
        return [
            "windows of tilenet predict are blended where they overlap: others' maps differ there"
        ]
    if any(_depends_on_image(layer) for layer in record.layers):
        return [
            "the network takes averages, statistics or places of the whole image, and of a window "
            "where it is given a window: others' maps differ from those of tilenet predict"
        ]
    return []


def _depends_on_image(layer: Layer) -> bool:
    """Whether each value of a trained layer's output depends on the whole input, or its size."""
    return (
        isinstance(layer, GlobalPool | Coordinates)
        or by_corners(layer)
        or (isinstance(layer, Norm) and layer.norm != "batch")
    )
