"""The file that describes the user's own machines."""

import os
from pathlib import Path


def user_file() -> Path:
    """Return the path of the user's own machines, whether the file exists or not."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # the XDG specification has relative paths ignored
    folder = Path(home) if os.path.isabs(home) else Path.home() / ".config"
    return folder / "tilenet" / "machines.toml"
