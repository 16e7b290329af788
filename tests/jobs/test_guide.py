"""The guide's pages do what they say: their commands run in order, and print what is shown.

A page's blocks run in one fresh folder that looks like the checkout:

    ```console         lines after `$ ` are commands, the others what they print; `…` is left out
    ```console fails   the same, with the exit code 1
    ```sh              a script of its own
    ```yaml, python    written to the file that its first line names: # run.yaml
    no-run             after any of these: not run, for the reason in the comment above

Progress bars need not be shown. What the machine, torch or the hour may change is masked.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import guide_data
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "first-map",
    "your-data",
    "cluster",
    "pbs-and-flux",
    "exactness",
    "when-it-does-not-fit",
    "library",
    "maps",
    "remote",
    "export",
]
DATA: dict[str, Callable[[Path], None]] = {
    "your-data": guide_data.towns,
    "cluster": guide_data.scene,
    "exactness": guide_data.scene,
    "when-it-does-not-fit": guide_data.scene,
    "maps": guide_data.class_map,
    "remote": guide_data.scene,
    "export": guide_data.scene,
}
MOST_LINES = 120
MOST_NOT_RUN = 8  # of all pages
LIMIT_S = 300  # matters only on failure
MASKS = [
    (r"^node .*?:.*", "node"),  # its name, cores and devices
    (r"\b(\d+)\.(\d{10})\d{3,}\b", r"\1·\2"),  # float64: to ten digits
    (r"\b\d+\.\d{3,}\b", "x"),  # losses and scores of float32
    (r"\b\d+\.\d+e-1\d\b|(?<=difference )0(?= )", "tiny"),  # 0 on some processors
    (r"^ *((?:\w+ +){1,2}[x–] +[x–]) .*", r"\1"),  # a row of scores: pixels mapped
    (r"\d+(\.\d+)? s\b", "s"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    marks: tuple[str, ...]
    text: str
    above: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Of a console: each command and the lines that are shown after it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def blocks_of(page: str) -> list[Block]:
    """The blocks, in order."""
    parts = re.split(r"^```(\w*)([^\n]*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    rows = zip(parts[1::4], parts[2::4], parts[3::4], parts[::4], strict=False)
    return [Block(k, tuple(m.split()), t, a.rstrip().rpartition("\n")[2]) for k, m, t, a in rows]


def masked(line: str) -> str:
    for pattern, mask in MASKS:
        line = re.sub(pattern, mask, line)
    return " ".join(line.split())


def first_difference(shown: list[str], printed: str) -> str | None:
    """The first shown line that was not printed in its place, or printed one that is not shown.

    Args:
        shown: `…` stands for any lines.
        printed: Progress bars are left out, and what is said where cores are few.
    """
    progress = r"\| \d+/\d+ \[|^\d+\w+ \[|^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    of_hour = re.compile(rf"{progress}|^more threads than cores")
    rest = [line for line in printed.splitlines() if line.strip() and not of_hour.search(line)]
    rest = [masked(line) for line in rest]
    skipping = False
    for line in (masked(line) for line in shown if line.strip()):
        if line == "…":
            skipping = True
            continue
        while skipping and rest and rest[0] != line:
            rest.pop(0)
        if not rest or rest[0] != line:
            return f"shown: {line!r}, printed: {rest[:1]}"
        rest.pop(0)
        skipping = False
    return f"printed, not shown: {rest[0]!r}" if rest and not skipping else None


def run_page(text: str, folder: Path) -> None:
    """Run its blocks; the first that does not do what the page says is an AssertionError."""
    paths = [os.path.dirname(os.path.abspath(shutil.which("python") or "")), os.environ["PATH"]]
    more = {"PATH": ":".join(paths), "XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **more, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "HOME": str(folder)}

    def run(script: str, wanted: int) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == wanted, f"{script}\n{done.stdout}"
        return done.stdout

    for block in blocks_of(text):
        name = re.match(r"# ([\w/.-]+\.\w+)\n", block.text)
        if "no-run" in block.marks:
            continue
        if block.kind in ("yaml", "python") and name:
            (folder / name[1]).parent.mkdir(exist_ok=True)
            (folder / name[1]).write_text(block.text)
        elif block.kind == "sh":
            run(block.text, 0)
        elif block.kind == "console":
            for command, shown in block.commands():
                printed = run(command, "fails" in block.marks)
                wrong = first_difference(shown, printed)
                assert wrong is None, f"$ {command}\n{wrong}\n{printed}"


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_do_what_it_says(name: str, tmp_path: Path) -> None:
    for part in ("demo", "jobs", "launch", "docs", "tests"):
        (tmp_path / part).symlink_to(ROOT / part)
    DATA.get(name, lambda folder: None)(tmp_path)
    run_page((DOCS / f"{name}.md").read_text(), tmp_path)


# --- the pages


def test_pages_are_short_and_say_why_a_block_does_not_run() -> None:
    not_run = 0
    for name in PAGES:
        text = (DOCS / f"{name}.md").read_text()
        assert len(text.splitlines()) <= MOST_LINES, name
        blocks = blocks_of(text)
        assert any(block.kind == "console" and not block.marks for block in blocks), name
        for block in blocks:
            assert block.kind, f"{name}: a block has no kind: {block.text}"
            assert set(block.marks) <= {"no-run", "fails"}, block
            said = re.fullmatch(r"<!-- no-run: \w.+ -->", block.above)
            assert bool(said) == ("no-run" in block.marks), f"{name}: {block.text}"
            not_run += "no-run" in block.marks
    assert 0 < not_run <= MOST_NOT_RUN


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    lines = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", lines, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "jobs" / "README.md", *DOCS.glob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)]+)\)", page.read_text())
    ]
    assert len(links) > 50
    for page, link in links:
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {link}"
        assert not heading or heading in anchors(file), f"{page.name}: {link}"


def test_the_index_names_every_page() -> None:
    links = re.findall(r"\]\(([^)#/]+)\)", (DOCS / "README.md").read_text())
    pages = {path.name for ending in ("md", "yaml") for path in DOCS.glob(f"*.{ending}")}
    assert set(links) == pages - {"README.md"}


# --- the test itself

PAGE = """
```yaml
# made/numbers.txt
three
```

```console
$ cat made/numbers.txt; echo 4 5; echo 'loss 0.12345'
# made/numbers.txt
…
loss 0.54321
```

<!-- no-run: it is of no use -->
```sh no-run
exit 3
```

```console fails
$ echo no; exit 1
no
```
"""


def test_a_page_that_keeps_its_word_passes(tmp_path: Path) -> None:
    run_page(PAGE, tmp_path)
    assert (tmp_path / "made" / "numbers.txt").read_text() == "# made/numbers.txt\nthree\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("loss 0.5", "less 0.5", "shown: 'less x'"),
        ("…\n", "", "printed: \\['three'\\]"),
        ("no\n", "", "printed, not shown: 'no'"),
        (" fails", "", "exit 1"),
        ("sh no-run", "sh", "exit 3"),
        ("exit 1", "exit 2", "exit 2"),
        ("echo 4 5", "cd nowhere", "nowhere"),
    ],
)
def test_a_page_that_does_not_is_found(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in PAGE
    with pytest.raises(AssertionError, match=said):
        run_page(PAGE.replace(old, new), tmp_path)
