"""The page in a browser: it shows, asks for nothing, and runs nothing."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import NoBrowserError, find_browser
from pages import EVIL, Page

Browse = Callable[[Path], tuple[Page, list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def browse(pytestconfig: pytest.Config) -> Browse:
    """Open a page: the DOM that becomes of it, and the browser's log of what it did."""
    try:
        # Kept for the next time: to fetch it takes longer than all tests of the page.
        program, environment = find_browser(pytestconfig.cache.mkdir("browser"))
    except NoBrowserError as error:
        pytest.skip(f"needs a browser: {error}")

    def opened(page: Path) -> tuple[Page, list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "net.json"
            done = subprocess.run(
                [
                    program,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-background-networking",
                    f"--user-data-dir={folder}/profile",
                    f"--log-net-log={log}",
                    "--enable-logging=stderr",
                    "--dump-dom",
                    page.as_uri(),
                ],
                capture_output=True,
                text=True,
                env=environment,
                timeout=60,
                check=True,
            )
            events = json.loads(log.read_text())
        kinds = {number: name for name, number in events["constants"]["logEventTypes"].items()}
        asked = [{**e, "kind": kinds[e["type"]]} for e in events["events"]]
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Page(done.stdout), [*asked, *({"kind": "CONSOLE", "text": line} for line in said)]

    return opened


def requests(events: list[dict[str, Any]]) -> set[str]:
    urls = {e.get("params", {}).get("url", "") for e in events if "URL_REQUEST" in e["kind"]}
    return {url for url in urls if url.startswith(("http", "ftp", "ws", "//"))}


def console(events: list[dict[str, Any]]) -> list[str]:
    return [e["text"] for e in events if e["kind"] == "CONSOLE"]


def test_a_browser_shows_all_parts_and_asks_for_nothing(a_run: Path, browse: Browse) -> None:
    page, events = browse(a_run / "report.html")
    titles = [section.all("h2")[0].text for section in page.all("section")]
    assert titles[0] == "Learning"
    assert titles[-1] == "Run file"
    assert len(page.section("Places").all("img")) >= 4
    assert len(page.all("svg")) >= 4
    assert EVIL in page.section("Places").text
    assert page.all("script") == []
    assert requests(events) == set()
    assert console(events) == []


def test_such_a_page_would_be_found(tmp_path: Path, browse: Browse) -> None:
    """What the other test looks for is seen where it is."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><html><head></head><body><img src='http://127.0.0.1:9/x.png'>"
        "<script>document.body.append('it ran'); undefinedName()</script></body></html>"
    )
    found, events = browse(page)
    assert "it ran" in found.all("body")[0].text
    assert requests(events) == {"http://127.0.0.1:9/x.png"}
    assert any("undefinedName" in line for line in console(events))
