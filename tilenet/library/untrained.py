"""A checkpoint of a module that no run has trained, to make maps with."""

import os
from collections.abc import Sequence
from pathlib import Path

from tilenet.adoption.adopt import Adopted
from tilenet.errors import TilenetError
from tilenet.library.predict import module_record
from tilenet.storage.checkpoints import Checkpoint, save_checkpoint


def save_untrained(
    adopted: Adopted,
    folder: Path,
    classes: Sequence[str] | None,
    statistics: tuple[Sequence[float] | None, Sequence[float] | None],
) -> None:
    """Write a checkpoint of the network, as of a run that made no step.

    Args:
        classes: Names of the classes; None: their numbers.
        statistics: Mean and std per band; None: 0 and 1.

    Raises:
        TilenetError: The folder holds a run, or cannot be written; names or statistics are other
            than the network's channels.
    """
    bands = tuple(range(1, adopted.bands + 1))
    record = module_record(adopted, adopted.name, bands, classes, statistics)
    if os.path.lexists(folder / "last"):
        raise TilenetError(f"a run is not overwritten ({folder} holds one); name another folder")
    weights = adopted.module_state(adopted.network().state_dict())
    save_checkpoint(folder, 0, Checkpoint(weights, record.to_json()))
