"""Check the run file's keys for training on windows, where a module runs unchanged."""

from typing import Any

from tilenet.errors import TilenetError


def check_windows(run: Any) -> None:
    """Refuse keys that need a list of layers, with `halo_mode: windows`.

    Args:
        run: A `RunFile`, of a module that imports this one.

    Raises:
        TilenetError: The error names the first of them.
    """
    if run.halo_mode != "windows":
        return
    if run.network.module is None or run.crop_px is None or run.crop_px % 2:
        raise TilenetError(
            f"windows are of a user module, as large as crops and of an even size (halo_mode: "
            f"windows, network.module: {run.network.module}, crop_px: {run.crop_px}); give both, "
            "or use halo_mode: overlap, which is exact"
        )
    only: dict[str, tuple[Any, Any]] = {
        "network.batch_norm": (run.network.batch_norm or "frozen", "frozen"),
        "halo": (run.halo, "exact"),
        "tiles": (run.tiles.cut, None),
        "mesh.rows": (run.mesh.rows or 1, 1),
        "mesh.columns": (run.mesh.columns or 1, 1),
        "partitions": (run.num_partitions, 1),
        "checkpointing": (run.checkpointing, "never"),
        "swap": (run.swap or "off", "off"),
        "plan": (run.plan, None),
    }
    for key, (value, needed) in only.items():
        if value != needed:
            raise TilenetError(
                f"a window is computed at once by one rank, by an opaque module (halo_mode: "
                f"windows, {key}: {value}); leave {key} out"
            )
