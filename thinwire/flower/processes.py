"""Processes, certificates and keys of a deployment on one machine; all are ended and deleted when a block is left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, ThinwireError

FLOWER_ENV = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
}
FAILED = "thinwire failed:"  # prefix of the server's error message in the log
HOPELESS = "thinwire: the same command would fail again"  # the line after it, if the settings are wrong
STARTUP_SECONDS = 90.0


class DeploymentFailed(ThinwireError):
    """A process of a deployment failed."""


class Processes:
    """Processes that are ended, with everything they started, when the `with` block is left.

    Args:
        home: folder for logs, keys and Flower's files; it is removed at the end.
        data_dir: folder that holds the datasets.
    """

    def __init__(self, home: Path, data_dir: Path | None) -> None:
        self.home = home
        self.old_handler: Any = None
        self.running: list[subprocess.Popen[bytes]] = []
        data = {"THINWIRE_DATA": str(data_dir.resolve())} if data_dir else {}
        self.env = {**os.environ, **FLOWER_ENV, **data, "FLWR_HOME": str(home)}
        # child processes must find Flower's programs and the same Python modules
        for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", Path(__file__).parents[2])):
            self.env[name] = os.pathsep.join([str(first), self.env.get(name, "")])

    def __enter__(self) -> Processes:
        if threading.current_thread() is threading.main_thread():  # SIGTERM ends processes as Ctrl-C does
            self.old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self.old_handler is not None:
            signal.signal(signal.SIGTERM, self.old_handler)
        for signum, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            end = time.monotonic() + seconds
            signaled: set[int] = set()
            while time.monotonic() < end and (alive := self._alive()):
                for process in alive - signaled:  # also processes that were started in the meantime
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(process, signum)
                signaled |= alive
                time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    def _alive(self) -> set[int]:
        """Ids of our processes that still run, and of all that they started: these have our FLWR_HOME."""
        alive = {process.pid for process in self.running if process.poll() is None}
        mark = f"FLWR_HOME={self.home}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):  # elsewhere, Flower's processes end with those above
            with contextlib.suppress(OSError):  # it has just ended, or is of another user; a zombie has none
                if any(variable.startswith(mark) for variable in file.read_bytes().split(b"\0")):
                    alive.add(int(file.parent.name))
        return alive

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process in a new session, so that Ctrl-C in the terminal does not reach it."""
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                with_path(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.env, **(env or {})},
                cwd=self.home,
                start_new_session=True,
                umask=0o077,  # databases and states are for their owner only
            )
        self.running.append(process)
        return process

    def call(self, command: Sequence[str]) -> None:
        """Run a short command and wait for it."""
        if self.start("call", command).wait():
            raise DeploymentFailed(f"{Path(command[0]).name} failed: {self.log_tail('call')}")

    def wait_for_port(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Wait until the SuperLink listens on a port."""
        end = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
                return
            time.sleep(0.1)
        raise DeploymentFailed(f"the SuperLink did not start: {self.log_tail('superlink')}")

    def log(self, name: str) -> list[str]:
        """The lines that a process has printed."""
        file = self.home / f"{name}.log"
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()

    def log_tail(self, name: str) -> str:
        """The end of a log, as one line."""
        return " ".join(" ".join(self.log(name)[-5:]).split())[-400:] or "its log is empty"


def with_path(command: Sequence[str]) -> list[str]:
    """A command with the whole path of its program, which is beside this Python or in PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which(command[0], path=path)) is None:
        raise ConfigError(f"the program {command[0]} was not found in the folder of {sys.executable} or in PATH")
    return [program, *command[1:]]


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def make_certificate(folder: Path) -> None:
    """Write a certificate for 127.0.0.1 and its key, `server.pem` and `server.key`; it is its own authority."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "thinwire deploy")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "server.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write_secret(folder / "server.key", private)


def make_key(path: Path) -> Path:
    """Write the private key by which a node authenticates, and its public key, whose name has `.pub` added."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, form = ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.OpenSSH
    _write_secret(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")
    return path


def _write_secret(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
