"""The viewer on this machine: loopback alone, the named slides alone, nothing for pages of other hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

from gated_srp.errors import UserError
from gated_srp.reports.viewer import STATIC, Viewer, static
from gated_srp.reports.viewer.tiles import levels

HOST = "127.0.0.1"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "txt": "text/plain", "jpg": "image/jpeg"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"
)
_LARGEST = 1_000_000  # bytes of a question
_SLIDE = re.compile(r"/slide/(\d{1,6})/(?:(data)\.js|tiles/(\d{1,2})/(\d{1,6})_(\d{1,6})\.jpg|patch/(\d{1,9})\.jpg)")


def serve(viewer: Viewer, *, port: int = 0, ready: Callable[[str], None] = lambda address: None) -> None:
    """Answer until interrupted (Ctrl-C). ``port`` 0: a free one; ``ready`` is told the address."""
    try:
        server = make_server(viewer, port)
    except OSError as error:
        raise UserError(
            f"cannot listen there ({error.strerror or error})", where=f"--port {port}", cure="Choose another."
        ) from None
    with server, suppress(KeyboardInterrupt):
        Thread(target=viewer.open_ahead, daemon=True).start()
        ready(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()
    viewer.close()


def make_server(viewer: Viewer, port: int = 0) -> ThreadingHTTPServer:
    """A server that listens; whoever calls starts and ends it."""
    tile = lru_cache(4096)(partial(_tile, viewer))
    server = ThreadingHTTPServer(
        (HOST, port), type("Handler", (_Handler,), {"viewer": viewer, "tile": staticmethod(tile)})
    )
    server.daemon_threads = True
    return server


def _tile(viewer: Viewer, number: int, level: int, column: int, row: int) -> bytes:
    reader = viewer.reader(number)
    if reader is None:
        raise UserError("no image", kind="missing")
    return reader.tile(level, column, row)


class _Handler(BaseHTTPRequestHandler):
    viewer: Viewer
    tile: Callable[[int, int, int, int], bytes]
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = (
        True  # a head and a body are two packets: the second would wait for the answer to the first
    )
    wbufsize = -1  # and are sent as one where they fit

    @property
    def _names(self) -> set[str]:
        port = cast(ThreadingHTTPServer, self.server).server_port
        return {f"{name}:{port}" for name in (HOST, "localhost")}

    def handle(self) -> None:
        with suppress(ConnectionError):  # the page was closed between two requests
            super().handle()

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, *_: Any) -> None:
        """Requests are not printed."""

    def _answer(self, make: Callable[[], tuple[str, bytes]]) -> None:
        try:
            # A page of another host that resolves to this machine shows its own name here.
            if self.headers.get("Host") not in self._names:
                return self._send(403, "text/plain", b"this server answers its own page alone")
            ending, content = make()
            self._send(200, _TYPES.get(ending, ending), content)
        except UserError as error:
            self._send(404 if error.kind == "missing" else 422, "text/plain; charset=utf-8", str(error).encode())
        except ConnectionError:
            self.close_connection = True  # the page was closed
        except Exception:
            self._send(500, "text/plain", b"unexpected error")
            raise

    def _get(self) -> tuple[str, bytes]:
        path = self.path.partition("?")[0]
        name = path.removeprefix("/") or "index.html"
        if name in STATIC:
            return name.rpartition(".")[2], static(name)
        if path == "/index.js":
            return "js", self.viewer.index(served=True).encode()
        found = _SLIDE.fullmatch(path)
        if found is None or int(found[1]) >= len(self.viewer.slides):
            raise UserError("no such page", where=path, kind="missing")
        number = int(found[1])
        if found[2]:
            scene = self.viewer.scene(number)
            finest = levels(scene.size)
            return "js", scene.script(finest=finest, coarsest=min(8, finest)).encode()
        if found[3]:
            return "jpg", self.tile(number, int(found[3]), int(found[4]), int(found[5]))
        scene, reader, row = self.viewer.scene(number), self.viewer.reader(number), int(found[6])
        if reader is None or row >= len(scene.patches.corners):
            raise UserError("no such patch", where=path, kind="missing")
        return "jpg", reader.patch(scene.patches.corners[row], scene.patches.side)

    def _post(self) -> tuple[str, bytes]:
        own = {f"http://{name}" for name in self._names}
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/what-if" or self.headers.get("Origin") not in own or not 0 < length <= _LARGEST:
            self.close_connection = True  # its body is not read
            raise UserError("no such page", where=self.path, kind="missing")
        try:
            asked = json.loads(self.rfile.read(length))
            number, run, beta = int(asked["slide"]), int(asked["run"]), float(asked["beta"])
            layer = None if asked.get("layer") is None else int(asked["layer"])
            region = asked.get("region") and [(float(x), float(y)) for x, y in asked["region"]]
            regime = None if asked.get("regime") is None else str(asked["regime"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"a question that cannot be read ({type(error).__name__})") from None
        if not (0 <= number < len(self.viewer.slides) and 0 <= run < len(self.viewer.runs) and abs(beta) <= 2):
            raise UserError("no such slide or run, or a beta beyond 2")
        found = self.viewer.what_if(number, run, beta=beta, layer=layer, regime=regime, region=region or None)
        return "application/json", json.dumps(asdict(found)).encode()

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store" if kind != "image/jpeg" else "private, max-age=3600")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
