"""A headless Chromium: the machine's, or Debian's package unpacked next to the tests.

Nothing is installed: the packages that apt would install are fetched once and unpacked in a folder.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PACKAGE = "chromium-headless-shell"
SECONDS = 60  # for all that is fetched


class NoBrowserError(Exception):
    """Says why."""


def find_browser(folder: Path) -> tuple[str, dict[str, str]]:
    """The program and the environment that it needs.

    Raises:
        NoBrowserError: There is none, and none can be had in a minute.
    """
    named = os.environ.get("TILENET_BROWSER")
    for name in [named] if named else NAMES:
        if path := shutil.which(name):
            return path, dict(os.environ)
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NoBrowserError("no Chromium, and no apt-get to fetch one (or set TILENET_BROWSER)")
    return _unpacked(folder)


def _unpacked(folder: Path) -> tuple[str, dict[str, str]]:
    root = folder / "root"
    if not root.is_dir():  # else kept from another day
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            _fetch(Path(aside)).replace(root)
    programs = sorted(root.glob(f"usr/lib/chromium*/{PACKAGE}"))
    if not programs:
        raise NoBrowserError(f"Debian's {PACKAGE} holds no program of that name")
    libraries = [root / "usr" / "lib", *root.glob("usr/lib/*-linux-gnu*"),
                 *root.glob("usr/lib/*-linux-gnu*/pulseaudio")]  # fmt: skip
    path = ":".join(map(str, libraries))
    return str(programs[0]), {**os.environ, "LD_LIBRARY_PATH": path}


def _fetch(folder: Path) -> Path:
    simulated = _run(["apt-get", "install", "-s", "--no-install-recommends", PACKAGE], folder)
    wanted = [
        name for name in re.findall(r"^Inst (\S+)", simulated, re.MULTILINE) if name != "xdg-utils"
    ]
    _run(["apt-get", "download", "-qq", *sorted(wanted)], folder)
    root = folder / "root"
    for package in folder.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(root)], folder)
        package.unlink()
    return root


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise NoBrowserError(f"{' '.join(command[:2])} takes longer than {SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NoBrowserError(f"{' '.join(command[:2])} fails: {last}") from error
    return done.stdout
