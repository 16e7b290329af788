"""The network and the image of a map, opened."""

import copy
import os
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tilenet.data.alike import check_order, check_scaling
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.opaque import no_code
from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Part, Window
from tilenet.mapping.fingerprint import check_image_stays, describe_files, hash_file
from tilenet.mapping.mapper import Computed, Mapper, Output
from tilenet.mapping.prediction import Prediction, UnsavedNetwork
from tilenet.mapping.turns import Turned, turns_of
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import Network, check_weight_count, load_weights, network_to_fill
from tilenet.model.opaque import OpaqueModule, digest_of, opaque_network
from tilenet.planning.maps.question import MapQuestion
from tilenet.storage.checkpoints import load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord


@dataclass(frozen=True)
class MapSource:
    """A checkpoint and an image, opened for a map.

    Attributes:
        folder: Folder of the checkpoint, or the network's name.
        record: Record of the network.
        network: The network with its weights, on the CPU.
        image: The opened image.
        window: Pixels of the image to map.
        precision: Precision in which the network computes.
        rule: Halo and alignment of the tiles.
        output: Kind of the map's values.
    """

    folder: Path
    record: NetworkRecord
    network: Network
    image: Raster
    window: Window
    precision: str
    rule: HaloRule
    output: Output

    def question(self, prediction: Prediction) -> MapQuestion:
        """Return the question that the planner of maps answers."""
        return MapQuestion(
            self.record.layers,
            self.image.size,
            self.rule,
            halo_asked=prediction.halo != "exact",
            tile_px=prediction.tile_px,
            item_bytes=parameter_dtype(self.precision).itemsize,
            steady=prediction.resume,
            exchanges=True,
            turned=prediction.tta is not None,
        )

    def mapper(self, tiling: Tiling, prediction: Prediction) -> Mapper:
        """Return the mapper that computes tiles of the map."""
        return Mapper(
            self.output,
            self.record,
            self.image,
            tiling,
            parameter_dtype(self.precision),
            scaled=prediction.scaled,
            turns=len(turns_of(prediction.tta)),
        )

    @classmethod
    def open(cls, prediction: Prediction, folder: Path, stack: ExitStack) -> "MapSource":
        """Open the network and the image; `stack` closes the image.

        Args:
            folder: Folder that `prediction.checkpoint` returned.

        Raises:
            TilenetError: A file is missing, broken, or does not fit the network.
        """
        record, network = _open_network(prediction, folder)
        nodata = record.nodata if prediction.nodata is None else prediction.nodata
        bands = prediction.bands or record.bands_to_read
        image = stack.enter_context(Raster(prediction.image, bands, record.resolution, nodata))
        if prediction.out is not None:
            check_image_stays(prediction.out, image.files)
        if len(image.bands) != len(record.bands):
            raise TilenetError(
                f"the network reads as many bands as it was trained on (trained on: "
                f"{len(record.bands)}, bands: {len(image.bands)}); name each of them in order"
            )
        # An array has no tags: it holds the numbers as they are stored.
        if record.scaling is not None and not prediction.image.startswith("/vsimem/"):
            check_scaling(image, record.scaling, "trained on")
        if bands is None:
            check_order(image, record.image_bands or (), "trained on")
        precision = prediction.precision or record.precision
        rule = halo_rule(prediction.halo, record.layers, record.epsilon_px)
        window = image.window_of(Part(prediction.bbox, prediction.window))
        output = _choose_output(prediction.output, record, folder)
        return cls(folder, record, network.eval(), image, window, precision, rule, output)

    def check_finite(self, window: Window, computed: Computed) -> None:
        """Refuse a network that diverged: its map of classes would look like any other.

        Args:
            window: Place of the piece in the image.

        Raises:
            TilenetError: Logits are not finite; the error names the first such pixel.
        """
        finite = computed.logits.isfinite().all(dim=0).cpu().numpy() | ~computed.valid
        if not finite.all():
            row, col = np.argwhere(~finite)[0]
            raise TilenetError(
                f"a network must give finite logits ({self.folder} in {self.precision}: nan or "
                f"infinite at row {window.row + row}, column {window.col + col}); map an earlier "
                "checkpoint or with a wider --precision, or train again with a smaller optimizer.lr"
            )

    def made_of(
        self, tiling: Tiling, method: str, device: str, *, scaled: bool, tta: Turned | None
    ) -> dict[str, Any]:
        """All that the pixels of a map depend on, by names for people."""
        return {
            "the version of torch": torch.__version__,
            "the network": hash_file(self.folder / "network.json"),
            "the weights": hash_file(self.folder / "weights.safetensors"),
            "the module": [
                digest_of(p.module) for p in self.network.modules() if isinstance(p, OpaqueModule)
            ],
            "the image": describe_files(self.image.files),
            "the image's name": os.path.basename(self.image.path),
            "bands": self.image.bands,
            "nodata": self.image.nodata,
            "output": [self.output, scaled],
            "the turned images": tta,
            "precision": self.precision,
            "the device": device,
            "the method": method,
            "the tiles": [
                [astuple(span) for span in spans] for spans in (tiling.rows, tiling.cols)
            ],
            "the part of the image": astuple(self.window),
        }


def _choose_output(output: Output | None, record: NetworkRecord, folder: Path) -> Output:
    """Return the kind of the map's values.

    Raises:
        TilenetError: The network does not give it.
    """
    numbers = record.task == "regression"
    if output is not None and numbers != (output == "values"):
        raise TilenetError(
            f"a regression is mapped as values, classes as classes, logits or probabilities "
            f"(output: {output}, {folder}: {record.task}); leave --output out"
        )
    return output or ("values" if numbers else "classes")


def _open_network(prediction: Prediction, folder: Path) -> tuple[NetworkRecord, Network]:
    """The record of the network to map with, and the network with its weights."""
    if isinstance(prediction.network, UnsavedNetwork):
        record, network = prediction.network.record, prediction.network.network
        return record, network.to(parameter_dtype(prediction.precision or record.precision))
    return load_network(folder, prediction.precision, prediction.module)


def load_network(
    folder: Path, precision: str | None, module: nn.Module | None
) -> tuple[NetworkRecord, Network]:
    """A checkpoint's record, and its network with its weights, on the CPU.

    Args:
        precision: Precision in which it computes; None: that of the training run.
        module: Module of a checkpoint that holds weights alone; None: it holds the layers too.

    Raises:
        TilenetError: A file is missing or broken, or a module is needed.
    """
    record = NetworkRecord.from_json(load_json(folder / "network.json"))
    weights = load_tensors(folder / "weights.safetensors")
    precision = precision or record.precision
    if (layer := record.opaque) is not None:
        if module is None:  # a file may not say which code is run
            raise no_code(layer, str(folder))
        network = opaque_network(copy.deepcopy(module).cpu(), 0, precision)
    else:
        check_weight_count(record.layers, weights, str(folder), record.names)
        network = network_to_fill(record.layers, parameter_dtype(precision))
    load_weights(network, weights, str(folder), record.names)
    return record, network
