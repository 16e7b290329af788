"""`tilenet pack ENV.tar`: the environment as one archive, which a job unpacks on each node.

A rank that starts opens some thousand small files. From the nodes' own disks that takes nothing
from the parallel file system, which reads one large file per node instead.
"""

import json
import os
import re
import sys
import tarfile
from argparse import ArgumentParser
from contextlib import suppress
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tilenet.errors import TilenetError, printable
from tilenet.storage.atomic import put

# The first lines of a program of an environment: as pip writes them, and where the path is long.
FIRST_LINES = re.compile(
    rb"(?:#!|#!/bin/sh\n'''exec' \"?)(/[^\n]*?)/(python[\d.]*)(?:\n|\"? [^\n]*\n' '''\n)"
)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 error, 2 usage."""
    parser = ArgumentParser(
        prog="tilenet pack",
        description="Write the virtual environment in which tilenet runs as one archive, which "
        "tilenet job --packed unpacks on each node.",
    )
    parser.add_argument("archive", metavar="ENV.tar", help="the file to write")
    options = parser.parse_args(arguments)
    path = Path(options.archive)
    try:
        outside = pack(Path(sys.prefix), path)
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    if outside:
        print(
            "not in it, since they were installed with pip install -e: "
            f"{printable(', '.join(outside))}; ranks read them where they are (without -e they are "
            "packed)"
        )
    print(f"written: {printable(str(path))} ({path.stat().st_size / 2**20:.0f} MiB)")
    print(f"its job: tilenet job plan.json --packed {printable(str(path))} --script job.sh")
    return 0


def pack(environment: Path, archive: Path) -> list[str]:
    """Write a virtual environment as a tar archive that runs wherever it is unpacked.

    Only the base Python must be where it was. Programs in bin/ find their Python next to
    themselves, as those of `uv venv --relocatable` do.

    Returns:
        What is elsewhere: packages that were installed with `pip install -e`, and folders that
            .pth files name besides.

    Raises:
        TilenetError: It is no virtual environment, or the archive cannot be written.
    """
    if not (environment / "pyvenv.cfg").is_file():
        raise TilenetError(
            f"what is packed must be a virtual environment ({environment} has no pyvenv.cfg); "
            "install tilenet into one (python -m venv), or write the archive of a conda "
            "environment with conda pack"
        )
    part = archive.with_name(f"{archive.name}.part")
    programs, aside = environment / "bin", (part.resolve(), archive.resolve())

    def add(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = environment / member.name
        if path.name in (part.name, archive.name) and path.resolve() in aside:
            return None  # the archive itself, and an older one, in the environment's folder
        if member.isreg() and path.parent == programs:
            text = path.read_bytes()
            changed = relocatable(text, environment)
            if changed != text:
                member.size = len(changed)
                file.addfile(member, BytesIO(changed))
                return None
        return member

    try:
        with tarfile.open(part, "w") as file:
            for path in sorted(environment.iterdir()):
                file.add(path, path.name, filter=add)
        put(part, archive)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TilenetError(
            f"the archive must be written to a disk with room for it ({archive}: "
            f"{error.strerror}); name another file"
        ) from error
    return _find_outside(environment)


def _find_outside(environment: Path) -> list[str]:
    """Name what Python finds in other places: editable packages, then folders of .pth files."""
    packages = list(environment.glob("lib/python*/site-packages"))
    names, places, folders = [], [], []
    for package in distributions(path=list(map(str, packages))):
        with suppress(ValueError, AttributeError):  # a file that is no JSON object
            origin = json.loads(package.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                names.append(f"{package.name}-{package.version}")
                places.append(Path(unquote(urlsplit(origin["url"]).path)).resolve())
    for path in sorted(path for folder in packages for path in folder.glob("*.pth")):
        for line in path.read_text("utf-8", "surrogateescape").splitlines():
            folder = (path.parent / line.rstrip()).resolve()
            # Others are comments, imports and folders inside; an absolute line names the old place.
            left = folder.is_dir() and not folder.is_relative_to(environment.resolve())
            if (line.startswith("/") or left) and not any(map(folder.is_relative_to, places)):
                folders.append(line.rstrip())
    return [*sorted(names), *folders]


def relocatable(program: bytes, environment: Path) -> bytes:
    """The program of an environment, if it is a script of its Python, with a path that moves."""
    lines = FIRST_LINES.match(program)
    if not lines or Path(os.fsdecode(lines[1])).resolve() != (environment / "bin").resolve():
        return program
    python = b'"$(dirname "$(realpath "$0")")"/' + lines[2]
    return b"#!/bin/sh\n'''exec' " + python + b" \"$0\" \"$@\"\n' '''\n" + program[lines.end() :]
