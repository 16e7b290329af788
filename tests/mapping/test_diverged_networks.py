"""A network whose weights ran away gives no map, whatever the map would hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Conv
from tilenet.mapping.mapper import Output
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.model.network import build_network
from tilenet.storage.checkpoints import Checkpoint, save_checkpoint
from tilenet.storage.network_json import NetworkRecord

SIZE = 60, 70


@pytest.mark.parametrize("output", ["classes", "logits", "probabilities"])
@pytest.mark.parametrize("sign", [1, -1])  # of all pixels a logit is infinite, or not a number
def test_logits_that_are_not_finite_are_said_to_be_the_networks(
    tmp_path: Path, write_raster: Callable[..., str], output: Output, sign: int
) -> None:
    layers = (Conv(1, 2, 1), Conv(2, 2, 1))
    network = build_network(layers)
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(1e30)
        weight[1, 1] *= sign
    record = NetworkRecord(layers, (1,), ("a", "b"), 255, (0.0,), (1.0,), None, None, "float32", 0)
    run = tmp_path / "run"
    run.mkdir()
    save_checkpoint(run, 0, Checkpoint(dict(network.state_dict()), record.to_json()))
    pixels = np.full((1, *SIZE), 7, "uint8")
    pixels[0, :2], pixels[0, :, :3] = 0, 0
    image = write_raster("image.tif", pixels, nodata=0)
    out = tmp_path / "map.tif"
    place = r"run/checkpoints/step-0+ in float32: .* row 2, column 3"
    said = rf"finite logits \(.*{place}\); .*smaller optimizer\.lr"
    with pytest.raises(TilenetError, match=said):
        predict(Prediction(str(run), image, str(out), output=output), comm=MPI.COMM_SELF)
    assert not out.exists()
