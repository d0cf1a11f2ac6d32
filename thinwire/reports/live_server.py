"""A small web server for the live page of one run: read-only, without settings, files or queries."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.reports.live import health, live_page, metrics_text

KEPT = 1.0  # seconds for which an answer is reused: many readers cost no more than one
CLIENT_SECONDS = 10.0  # for a request


class Answer(NamedTuple):
    """The answer to a request."""

    code: int
    kind: str
    body: bytes


def answer(path: Path, target: str) -> Answer:
    """The answer for the target of a request.

    >>> answer(Path("no such run"), "/config.toml").code, answer(Path("no such run"), "/health").code
    (404, 503)
    """
    if target == "/":
        return Answer(200, "text/html; charset=utf-8", live_page(path).encode())
    if target == "/metrics":
        return Answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(path).encode())
    if target == "/health":
        found = health(path)
        return Answer(found.code, "application/json", (json.dumps(found._asdict()) + "\n").encode())
    return Answer(404, "text/plain; charset=utf-8", b"there are /, /metrics and /health\n")


class _Cache:
    """Answers by target, each made at most once in `KEPT` seconds."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.known: dict[str, tuple[float, Answer]] = {}

    def get(self, target: str) -> Answer:
        if target not in ("/", "/metrics", "/health"):
            return answer(self.path, target)
        with self.lock:
            made, found = self.known.get(target, (float("-inf"), None))
            if found is None or time.monotonic() - made > KEPT:
                found = answer(self.path, target)
                self.known[target] = (time.monotonic(), found)
            return found


@contextmanager
def live_server(path: Path, address: str, log: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Serve the live page of a run in a thread while the block runs; yields the address, with its port.

    Args:
        path: the run directory; it need not exist yet.
        address: HOST:PORT; port 0 for any free one. For "" nothing is served.
        log: receives one line with the address.
    """
    if not address:
        yield ""
        return
    host, port = parse_address(address)
    cache = _Cache(path)

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS
        server_version, sys_version = "thinwire", ""

        def do_GET(self) -> None:
            found = cache.get(self.path)
            self.send_response(found.code)
            self.send_header("Content-Type", found.kind)
            self.send_header("Content-Length", str(len(found.body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found.body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Print nothing for a request."""

    try:
        server = _server(host, port, Handler)
    except OSError as error:
        raise ConfigError(
            f"http = {address!r} cannot be used ({error.strerror or error}); name another port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    shown = f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
    log(f"live page at http://{shown}/, metrics at /metrics, health at /health")
    try:
        yield shown
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    import socket

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Print nothing if a reader has closed its connection."""

    return Server((host, port), handler)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of an address.

    >>> parse_address("127.0.0.1:8080"), parse_address("[::1]:0")
    (('127.0.0.1', 8080), ('::1', 0))
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"an address is HOST:PORT, such as 127.0.0.1:8080, not {text!r}")
    return host, int(port)
