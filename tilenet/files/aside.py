"""Texts that are whole or not there: written beside their target, then renamed."""

from pathlib import Path

from tilenet.errors import TilenetError

__all__ = ["write_aside"]


def write_aside(text: str, path: Path, what: str, *, executable: bool = False) -> None:
    """Write a text and a line end.

    Args:
        what: It is, for the error: `a plan`.
        executable: Whether everybody may run it.

    Raises:
        TilenetError: It cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        if executable:
            part.chmod(0o755)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TilenetError(
            f"{what} must be written to a place that can be written ({path}: {error.strerror}); "
            "name another file"
        ) from error
