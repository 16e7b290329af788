"""A folder over HTTP, by ranges, as object stores give it: python range_server.py FOLDER EVERY HOW.

It prints its address. It answers every EVERY-th request for bytes with the code HOW, 503 or another
one; where HOW is `broken`, it sends half of them and closes the connection; where it is `slow`, it
waits for 0.1 s. `/-/counts` says what was asked so far. A process of its own: GDAL may wait for an
answer while it holds Python's lock.
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Served", "served"]


class Served:
    """A folder that is served.

    Attributes:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def counts(self) -> dict[str, int]:
        """`gets` for bytes, `heads`, `bytes` sent, `failed` by order, `missing`, `most` at once."""
        with urllib.request.urlopen(f"{self.url}/-/counts") as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def served(folder: Path, every: int = 0, how: str = "503") -> Iterator[Served]:
    """Serve a folder; requests for bytes fail every `every`-th time, 0: never."""
    command = [sys.executable, __file__, str(folder), str(every), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Served(server.stdout.readline().strip())
        finally:
            server.kill()


COUNTS = ("gets", "heads", "bytes", "failed", "missing", "most")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder, every, how = Path(), 0, "503"
    counts = dict.fromkeys(COUNTS, 0)
    at_once = 0
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer("heads")

    def do_GET(self) -> None:
        if self.path == "/-/counts":
            self._send(200, json.dumps(self.counts).encode())
        else:
            self._answer("gets")

    def _answer(self, kind: str) -> None:
        with self.lock:
            Handler.at_once += 1
            self.counts["most"] = max(self.counts["most"], Handler.at_once)
        try:
            self._answer_one(kind)
        finally:
            with self.lock:
                Handler.at_once -= 1

    def _answer_one(self, kind: str) -> None:
        path = self.folder / self.path.partition("?")[0].lstrip("/")
        with self.lock:
            self.counts[kind] += 1
            fails = kind == "gets" and self.every and self.counts["gets"] % self.every == 0
            self.counts["failed"] += bool(fails)
            self.counts["missing"] += not path.is_file()
        if not path.is_file():
            return self._send(404, b"")
        if fails and self.how.isdigit():
            return self._send(int(self.how), b"")
        if fails and self.how == "slow":
            time.sleep(0.1)
        whole, broken = path.read_bytes(), bool(fails) and self.how == "broken"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self._send(200, whole, broken=broken)
        first, last = int(asked[1]), min(int(asked[2] or len(whole)), len(whole) - 1)
        if first > last:
            return self._send(416, b"")
        place = {"Content-Range": f"bytes {first}-{last}/{len(whole)}"}
        return self._send(206, whole[first : last + 1], place, broken=broken)

    def _send(
        self, code: int, body: bytes, more: dict[str, str] | None = None, broken: bool = False
    ) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            body = body[: len(body) // 2] if broken else body
            self.wfile.write(body)
            self.close_connection |= broken
            with self.lock:
                self.counts["bytes"] += len(body)


if __name__ == "__main__":
    Handler.folder, Handler.every, Handler.how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
