"""Federated averaging over HTTP: a server and two clients of some other program, with small messages.

    python examples/update_over_http.py

Downloads are all arrays here; `thinwire.protocol.update.Published` sends them as steps from version to version. A body
that is damaged or forged is answered by 400, and the round goes on.
"""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.request import urlopen

import numpy as np

from thinwire.errors import WireError
from thinwire.protocol.update import added, codec_of, decode_update, encode_update

CODEC, CLIENTS, ROUNDS = codec_of("int4"), 2, 10
target = np.random.default_rng(0).normal(size=(100, 50)).astype(np.float32)
arrays, updates = {"w": np.zeros_like(target)}, {}


class Server(BaseHTTPRequestHandler):
    """Arrays, and updates of clients."""

    def do_GET(self):
        """All arrays."""
        self.answer(200, arrays["w"].tobytes())

    def do_POST(self):
        """An update to /ROUND/CLIENT."""
        number, client = map(int, self.path.strip("/").split("/"))
        body = self.rfile.read(min(int(self.headers["Content-Length"]), 10**6))
        try:
            updates[client] = decode_update(body, arrays, CODEC, key=number * CLIENTS + client)
        except WireError as error:
            self.answer(400, str(error).encode())
        else:
            self.answer(200, b"")

    def answer(self, status, body):
        """Send a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
url, states, sent = f"http://127.0.0.1:{server.server_port}", [None] * CLIENTS, 0
for number in range(ROUNDS):
    for client in range(CLIENTS):
        with urlopen(url) as answer:
            received = np.frombuffer(answer.read(), np.float32).reshape(target.shape)
        update = {"w": 0.5 * (target - received)}  # training
        data, states[client] = encode_update(update, CODEC, states[client], key=number * CLIENTS + client)
        urlopen(f"{url}/{number}/{client}", data).close()
        sent += len(data)
    arrays = added(arrays, {"w": np.mean([one["w"] for one in updates.values()], axis=0)})
    updates = {}
server.shutdown()
server.server_close()
error = np.abs(arrays["w"] - target).mean() / np.abs(target).mean()
print(f"{sent / ROUNDS / CLIENTS:.0f} bytes an update instead of {target.nbytes}; error {100 * error:.1f} %")
