"""An environment in one archive runs where it is unpacked, and what cannot be packed is refused."""

import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from launch.pack import main, pack, relocatable
from tilenet.errors import TilenetError

WHERE = b"import sys, word; print(sys.prefix, word.__file__, *sys.argv[1:])\n"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package and a program, as pip writes it."""
    folder = tmp_path / "first place" / "env"
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "word.py").write_text("")
    program = folder / "bin" / "say"
    program.write_bytes(b"#!%b/bin/python\n" % os.fsencode(folder) + WHERE)
    program.chmod(0o755)
    return folder


def test_a_program_runs_where_the_archive_is_unpacked(environment: Path, tmp_path: Path) -> None:
    archive, place = tmp_path / "env.tar", tmp_path / "other place"
    assert pack(environment, archive) == []
    place.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", place], check=True)  # as jobs do
    environment.rename(environment.with_name("gone"))
    said = subprocess.check_output([place / "bin" / "say", "a b", "$c"], text=True)
    (module,) = place.glob("lib/python*/site-packages/word.py")
    assert said == f"{place} {module} a b $c\n"
    links = ((path.relative_to(environment), os.readlink(path)) for path in environment.rglob("*"))
    assert all(
        os.readlink(place / path) == aim for path, aim in links if (place / path).is_symlink()
    )
    assert sorted(tmp_path.iterdir()) == [archive, environment.parent, place]


def test_a_long_path_of_python_is_found_too() -> None:
    """The kernel reads 127 characters of a first line: pip writes another form."""
    folder = Path("/" + "long/" * 30 + "env")
    text = f"#!/bin/sh\n'''exec' \"{folder}/bin/python3.11\" \"$0\" \"$@\"\n' '''\nimport sys\n"
    changed = relocatable(text.encode(), folder)
    assert changed.startswith(b"#!/bin/sh\n")
    assert changed.endswith(b"\n' '''\nimport sys\n")
    assert b"/python3.11" in changed
    assert b"long" not in changed


@pytest.mark.parametrize(
    "text", [b"#!/usr/bin/python3\nimport sys\n", b"#!/bin/bash\necho\n", b"\x7fELF\0\n", b""]
)
def test_other_programs_stay_as_they_are(text: bytes) -> None:
    assert relocatable(text, Path("/home/me/env")) == text


def test_packages_left_in_their_checkouts_are_named(
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    inside, apart = environment / "src", tmp_path / "apart"
    apart.mkdir()
    away = os.path.relpath(apart, packages)
    for name, text in (
        ("__editable__.mine-1.0.pth", "import a_finder\n"),
        ("_hatched.pth", "/home/me/has%20two parts/src\n"),
        ("easy-install.pth", f"# old\n{inside}\n./here\n\n{away}\n/home/me/old\n"),
    ):
        (packages / name).write_text(text)
    for name, folder, editable in (
        ("mine", "/home/me/mine", True),
        ("hatched", "/home/me/has%2520two%20parts", True),
        ("packed", "/home/me/packed", False),
    ):
        about = packages / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        origin = {"url": f"file://{folder}", "dir_info": {"editable": True} if editable else {}}
        (about / "direct_url.json").write_text(json.dumps(origin))
    spoilt = packages / "spoilt-1.0.dist-info"
    spoilt.mkdir()
    (spoilt / "direct_url.json").write_text("[")
    monkeypatch.setattr(sys, "prefix", str(environment))
    archive = environment / "env.tar"  # in what it holds, and yet not in itself
    archive.write_text("an older one")
    assert main([str(archive)]) == 0
    said = capsys.readouterr().out
    assert f"pip install -e: hatched-1.0, mine-1.0, {inside}, {away}, /home/me/old;" in said
    assert f"--packed {archive}" in said.replace("'", "")
    with tarfile.open(archive) as file:
        assert not {name for name in file.getnames() if name.startswith("env.tar")}


def test_what_is_no_virtual_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match=r"must be a virtual environment .* conda pack"):
        pack(tmp_path, tmp_path / "env.tar")


def test_an_archive_that_cannot_be_written_leaves_nothing(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_room: object
) -> None:
    monkeypatch.setattr(tarfile.TarFile, "addfile", no_room)
    with pytest.raises(TilenetError, match=r"with room for it .*No space left on device"):
        pack(environment, tmp_path / "env.tar")
    assert not list(tmp_path.glob("env.tar*"))
