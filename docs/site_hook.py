"""The site of `make docs`: pages from outside docs/, the library's functions, and links to all.

A link to a file that is no page keeps its words.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

import tilenet

ROOT = Path(__file__).resolve().parents[1]
# A page's name in the site, and its file.
OUTSIDE = {
    "index.md": "README.md",
    "jobs.md": "jobs/README.md",
    "bench.md": "bench/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
PAGES = {source: page for page, source in OUTSIDE.items()} | {
    "jobs": "jobs.md",
    "docs/README.md": "index.md",
}
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)|(?<=!)\[([^\]]*)\]\(([^)\s]+)\)"
)


def _with_pages(files: Any, config: Any) -> Any:
    """Add what is not in docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for notebook in sorted(ROOT.glob("examples/*.ipynb")):
        name, folders = str(notebook.relative_to(ROOT)), (str(ROOT), config.site_dir)
        files.append(File(name, *folders, config.use_directory_urls))
    files.append(File.generated(config, "api.md", content="\n".join(_functions())))
    return files


on_files = event_priority(100)(_with_pages)  # before the plug-in that makes pages of notebooks


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have links lead to pages of the site."""
    name = page.file.src_uri
    source = name if name.startswith("examples/") else OUTSIDE.get(name, f"docs/{name}")

    def link(match: re.Match[str]) -> str:
        words, aim = (match[1], match[2]) if match[1] else (match[3], match[4])
        if re.match(r"[a-z]+:|#", aim):
            return match[0]
        path, _, anchor = aim.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        file = files.get_file_from_path(inside)
        if file is None or not file.inclusion.is_included():
            if not (ROOT / target).exists():
                raise FileNotFoundError(f"{source} links to {aim}")
            return words
        aim = posixpath.relpath(inside, posixpath.dirname(name))
        return f"[{words}]({aim}{'#' * bool(anchor)}{anchor})"

    # A test reads `no-run` after a block's language; the site must not.
    return re.sub(r"^(```\w+) no-run$", r"\1", LINK.sub(link, markdown), flags=re.MULTILINE)


def _functions() -> Iterator[str]:
    yield "# Functions\n\nWhat `import tilenet` offers; [In Python](library.md) shows it at work.\n"
    for name, room in sorted(tilenet.ROOMS.items()):
        yield f"## tilenet.{name}\n\n::: tilenet.{room}.{name}\n"
