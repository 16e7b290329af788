"""Check keys and networks that training by sweeps does not support."""

from tilenet.errors import TilenetError
from tilenet.planning.compatibility import sweep_obstacle, whole_image
from tilenet.planning.mesh import MeshShape
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.run_file import RunFile


def check_sweep(run: RunFile, record: NetworkRecord, mesh: MeshShape) -> None:
    """Refuse keys and networks that a sweep in training does not support.

    Raises:
        TilenetError: The error names the first of them.
    """
    alone = {
        "checkpointing": (run.checkpointing, "never"),
        "swap": (run.swap or "off", "off"),
        "halo": (run.halo, "exact"),
    }
    for key, (value, only) in alone.items():
        if value != only:
            raise TilenetError(
                f"a sweep computes each strip again by itself, from its rows (halo_mode: sweep, "
                f"{key}: {value}); set {key}: {only}, or halo_mode: overlap"
            )
    if reason := sweep_obstacle(record.layers, run.num_partitions):
        raise TilenetError(reason)
    whole = whole_image(record.layers)
    if whole and (run.tiles.cut is not None or mesh.rows > 1):
        raise TilenetError(
            "a sweep averages over images that ranks hold by columns (halo_mode: sweep, over whole "
            f"images: {whole}, mesh.rows: {mesh.rows}, tiles{'' if run.tiles.cut else ' not'} "
            "given); leave tiles and mesh.rows out, or use halo_mode: exchange"
        )
