"""The command ``review``: serves a page of predictions, on this machine only, and keeps the decisions in its folder."""

import json
import mimetypes
import os
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from longseq.arguments import ArgumentError
from longseq.cli.page.folder import DECISIONS, FILES, INDEX, TABLE, checked, decisions_in, read_page
from longseq.cli.page.pictures import PLAYED
from longseq.files.storage import replacing, write_text

_FIRST_PORT, _PORTS = 8400, 100
_LONGEST = 2**28  # bytes of decisions and their table
_BLOCK = 2**16  # bytes that are sent at a time


def review(folder: str, port: int | None = None) -> None:
    """Show a page of predictions until Ctrl-C, and save what is decided in its folder. Only this machine can open it.

    The folder gets decisions.json and labels.csv, the table for fit's --data.table.

    Args:
        folder: The folder that predict --page has written.
        port: The port of the page; by default the first free port from 8400.

    Raises:
        ValueError: If the folder holds no page, or the port is taken.
    """
    if port is not None and not 1 <= port < 2**16:
        raise ArgumentError("port", f"must be in 1..65535, got {port}; {_FIRST_PORT} is usual")
    page = read_page(Path(folder), "folder")
    decisions_in(Path(folder), page["classes"], "folder")  # fails now, instead of when a browser asks
    with _server(Path(folder), page, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _server(folder: Path, page: dict[str, Any], port: int | None) -> "_Server":
    ports = range(_FIRST_PORT, _FIRST_PORT + _PORTS) if port is None else [port]
    reason = ""
    for number in ports:
        try:
            return _Server(folder, page, number)
        except OSError as error:
            reason = str(error.strerror)
    raise ArgumentError("port", f"{ports[0]} cannot be opened ({reason}); leave it out for a free one")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # otherwise two servers could share a port on some systems

    def __init__(self, folder: Path, page: dict[str, Any], port: int) -> None:
        self.folder, self.page, self.lock = folder, page, threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Gives the page, its files and the sounds that it names, and takes decisions; nothing else."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/decisions":
            decisions = decisions_in(self.server.folder, self.server.page["classes"], "folder")
            self._answer(200, json.dumps(decisions).encode(), "application/json")
            return
        file = self._file(path)
        try:
            opened = None if file is None else open(file, "rb")  # noqa: SIM115  (closed below)
        except OSError:
            opened = None
        if opened is None:
            self._answer(404, b"no such file\n")
            return
        with opened, suppress(ConnectionError):  # a browser stops a sound that it does not need
            self._send(opened, mimetypes.guess_type(str(file))[0] or "application/octet-stream")

    def do_PUT(self) -> None:
        if not self._is_ours():
            return
        length = self.headers.get("Content-Length", "")
        is_json = self.headers.get("Content-Type") == "application/json"  # which no foreign page may send unasked
        if self.path != "/decisions" or not is_json or not length.isdigit() or int(length) > _LONGEST:
            self.close_connection = True
            self._answer(400, b"no decisions\n")
            return
        try:
            given = json.loads(self.rfile.read(int(length)))
            decisions = checked(given["decisions"], self.server.page["classes"], "folder", "the page")
            table = given["table"].encode("utf-8", "surrogateescape")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._answer(400, f"{error}\n".encode(errors="replace"))
            return
        with self.server.lock:
            write_text(self.server.folder / DECISIONS, json.dumps(decisions))
            with replacing(self.server.folder / TABLE) as part:
                part.write_bytes(table)
        self._answer(200, b"saved\n")

    def _is_ours(self) -> bool:
        """Whether the browser shows our page. A page of another site may name this server, but not as 127.0.0.1."""
        ours = {f"{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in ours and (origin is None or origin.removeprefix("http://") in ours):
            return True
        self.close_connection = True
        self._answer(403, b"for this machine only\n")
        return False

    def _file(self, path: str) -> Path | None:
        """The file of an address; None if the page has none of this address. Others may have made the folder: no link
        leads out of it, and outside of it only sounds are read."""
        folder = self.server.folder.resolve()
        if inside := re.fullmatch(rf"/({INDEX}|{FILES}/[\w-]+\.\w+)", f"/{INDEX}" if path == "/" else path):
            file = (folder / inside[1]).resolve()
            return file if file.is_relative_to(folder) else None
        number, files = re.fullmatch(r"/sound/(\d{1,9})", path), self.server.page["files"]
        if number and int(number[1]) < len(files) and (address := files[int(number[1])].get("sound")):
            file = (folder / os.fsdecode(unquote_to_bytes(address))).resolve()
            return file if file.suffix.lower() in PLAYED else None
        return None

    def _send(self, file: BinaryIO, kind: str) -> None:
        """Send a file, or the range of it that is asked for."""
        size = os.fstat(file.fileno()).st_size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, size - 1
        if asked and asked[1]:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        elif asked and asked[2]:
            first = max(size - int(asked[2]), 0)
        if asked and first > last:
            self._answer(416, b"", kind, **{"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Cache-Control", "no-cache")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        file.seek(first)
        left = last - first + 1
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            self.wfile.write(block)
            left -= len(block)

    def _answer(self, code: int, body: bytes, kind: str = "text/plain", **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
