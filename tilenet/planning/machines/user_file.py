"""Where the user's own machines are described."""

import os
from pathlib import Path

__all__ = ["user_file"]


def user_file() -> Path:
    """Where the user's own machines stand, whether there are any or not."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # the XDG specification has relative paths ignored
    folder = Path(home) if os.path.isabs(home) else Path.home() / ".config"
    return folder / "tilenet" / "machines.toml"
