"""A whole deployment on this machine: a SuperLink, some SuperNodes, one run, and everything down again.

Each part is a process of its own and talks over TLS; a node is let in by its key. Certificates and keys are made for
this one run and thrown away with it. Flower's telemetry, its check for updates and its installing of packages are off.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.deployment.app_folder import write_app
from thinwire.deployment.apps import FAILED, deployable
from thinwire.errors import ConfigError, ThinwireError
from thinwire.experiments.config import Experiment
from thinwire.experiments.execute import OnRound, refuse_diverged
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.flower import need_flower

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
}
CONNECTION = "thinwire"
STARTUP_SECONDS = 90.0


# `flwr supernode register KEY CONNECTION` for many keys, in one process
_REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[2:]:
    app(["supernode", "register", key, sys.argv[1]], standalone_mode=False)
"""


class DeploymentFailed(ThinwireError):
    """A process of a deployment did not do what it should."""


def deploy(
    experiment: Experiment,
    path: Path,
    *,
    nodes: int,
    data_dir: Path | None = None,
    settings: dict[str, float | int] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    on_start: Callable[[Sequence[subprocess.Popen[bytes]]], None] | None = None,
    relay: Callable[[int], int] | None = None,
    awake: bool = True,
    dress: Callable[[Path], None] | None = None,
) -> Summary:
    """Run an experiment between processes of this machine, into a run directory.

    Args:
        experiment: what to run.
        path: the run directory.
        nodes: how many SuperNodes; client i lives on node i modulo their number.
        data_dir: the folder of data sets.
        settings: of the server: `seconds`, `quorum`, `tries` (see `RoundPolicy`).
        resume: go on with an unfinished run.
        on_round: is called after every round.
        on_start: is shown the processes (SuperLink first, then the nodes in order) when all of them run.
        relay: gives the port at which nodes find the SuperLink, from its own: something that stands in between.
        awake: nodes that stay awake (`deployment/node.py`), or Flower's own.
        dress: may change the folder of the app before it is run.
    """
    need_flower()
    experiment = deployable(experiment)
    clients = experiment.task.participating_clients or experiment.task.clients
    if not 1 <= nodes <= clients:
        raise ConfigError(f"--nodes must be from 1 to the number of clients, {clients}, not {nodes}")
    path = path.resolve()
    folder = RunFolder(path, experiment)
    if folder.exists:
        if done := folder.summary():
            folder.verify()
            refuse_diverged(done)
            return done
        if not resume:
            raise ConfigError(f"{path} holds an unfinished run; `thinwire resume {path}` goes on with it")
    home = Path(tempfile.mkdtemp(prefix="thinwire-deploy-"))
    state = path / "nodes"
    with Processes(home, data_dir) as processes:
        write_app(experiment, home / "app")
        if dress:
            dress(home / "app")
        port, *node_ports = free_ports(nodes + 1)
        _make_certificate(home)
        keys = [_make_key(home / f"node-{i}") for i in range(nodes)]
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\nroot-certificates = "{home / "ca.pem"}"\n'
        )
        link = processes.start(
            "superlink",
            [
                *("flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"),
                *("--ssl-certfile", str(home / "server.pem"), "--ssl-keyfile", str(home / "server.key")),
                *("--ssl-ca-certfile", str(home / "ca.pem"), "--disable-runtime-dependency-installation"),
            ],
        )
        processes.wait_for_port(link, port)
        processes.call([sys.executable, "-c", _REGISTER, CONNECTION, *(str(key.with_suffix(".pub")) for key in keys)])
        door = relay(port) if relay else port
        supernodes = []
        for i, (key, own) in enumerate(zip(keys, node_ports, strict=True)):
            config = f"partition-id={i} num-partitions={nodes} state-dir={json.dumps(str(state))}"
            command = [sys.executable, "-m", "thinwire", "node"] if awake else ["flower-supernode"]
            command += ["--superlink", f"127.0.0.1:{door}", "--port", str(own)]
            command += ["--root-certificates", str(home / "ca.pem"), "--auth-supernode-private-key", str(key)]
            command += ["--node-config", config]
            # a place of its own for the app: Flower unpacks it there without a lock
            supernodes.append(processes.start(f"node-{i}", command, {"FLWR_HOME": str(home / f"node-{i}.home")}))
        options = {"run-dir": json.dumps(str(path)), "nodes": nodes, **(settings or {})}
        words = " ".join(f"{key}={value}" for key, value in options.items())
        server = processes.start("server", ["flwr", "run", str(home / "app"), CONNECTION, "--stream", "-c", words])
        if on_start:
            on_start([link, *supernodes])
        seen = 0
        while True:
            over = server.poll() is not None or folder.summary() is not None
            records = folder.history()
            for record in records[seen:] if on_round else ():
                on_round(record)  # type: ignore[misc]
            seen = len(records)
            if over:
                break
            if link.poll() is not None:
                raise DeploymentFailed(f"the SuperLink stopped: {processes.last_words('superlink')}")
            time.sleep(0.2)
        summary = folder.summary()
        if summary is None:
            raise DeploymentFailed(_reason(processes))
    refuse_diverged(summary)
    return summary


def _reason(processes: Processes) -> str:
    """Why there is no summary, in the server's own words if it had any."""
    for name in ("server", "superlink"):
        for line in reversed(processes.log(name)):
            if FAILED in line:
                return line.split(FAILED, 1)[1].strip()
    return f"the server stopped: {processes.last_words('server')}"


class Processes:
    """Processes that end with the block in which they were started, whatever ends it."""

    def __init__(self, home: Path, data_dir: Path | None) -> None:
        self.home = home
        self.before: Any = None
        self.running: list[subprocess.Popen[bytes]] = []
        self.sessions: set[int] = set()
        data = {"THINWIRE_DATA": str(data_dir.resolve())} if data_dir else {}
        self.env = {**os.environ, **QUIET, **data, "FLWR_HOME": str(home)}
        # the programs that came with Flower, and what Python finds here must be found there
        self.env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), self.env.get("PATH", "")])
        self.env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), self.env.get("PYTHONPATH", "")])

    def __enter__(self) -> Processes:
        if threading.current_thread() is threading.main_thread():  # to be ended by SIGTERM is as good as by Ctrl-C
            self.before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
        for sign, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            end = time.monotonic() + seconds
            told: set[int] = set()
            while time.monotonic() < end and (left := self._left()):
                for process in left - told:  # also what was started while we looked
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(process, sign)
                told |= left
                time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    def _left(self) -> set[int]:
        """Our processes that still run, and all that they started; Flower gives some a session of their own."""
        left = {process.pid for process in self.running if process.poll() is None}
        if Path("/proc/self/environ").is_file():
            mark = f"FLWR_HOME={self.home}".encode()
            session: dict[int, int] = {}
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    own = int(fields[3])
                    if fields[0] == "Z":  # gone, but for whoever should have asked how it ended
                        continue
                    session[int(entry.name)] = own
                    if any(word.startswith(mark) for word in (entry / "environ").read_bytes().split(b"\0")):
                        left.add(int(entry.name))
                        self.sessions.add(own)
            # some, like Ray's, overwrite what they were told, but are of one session with others
            return left | {process for process, of in session.items() if of in self.sessions - {os.getsid(0)}}
        listed = subprocess.run(["ps", "-axww", "-o", "pid=,args="], capture_output=True, text=True, check=False).stdout
        ours = [line.split(None, 1) for line in listed.splitlines() if str(self.home) in line]
        return left | {int(number) for number, _ in ours}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process that a Ctrl-C in the terminal does not reach: it is ended in order."""
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._found(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.env, **(env or {})},
                cwd=self.home,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def call(self, command: Sequence[str]) -> None:
        """Run a short command to its end."""
        done = subprocess.run(self._found(command), capture_output=True, env=self.env, cwd=self.home, check=False)
        if done.returncode:
            text = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
            raise DeploymentFailed(f"the nodes could not be registered: {' '.join(text)[-300:]}")

    def wait_for_port(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Wait until a process listens."""
        end = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
                return
            except OSError:
                time.sleep(0.1)
        raise DeploymentFailed(f"the SuperLink did not start: {self.last_words('superlink')}")

    def log(self, name: str) -> list[str]:
        """The lines that a process has written."""
        file = self.home / f"{name}.log"
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()

    def last_words(self, name: str) -> str:
        """The end of them, as one line."""
        return " ".join(" ".join(self.log(name)[-5:]).split())[-400:] or "it said nothing"

    def _found(self, command: Sequence[str]) -> list[str]:
        program = shutil.which(command[0], path=self.env["PATH"])
        if program is None:
            raise ConfigError(f"the program {command[0]} was not found beside {sys.executable}")
        return [program, *command[1:]]


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _make_certificate(home: Path) -> None:
    """A certificate authority for one run, and a certificate of it for 127.0.0.1."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("thinwire deploy"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )
        if is_ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(authority, hashes.SHA256())

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (home / "ca.pem").write_bytes(certificate("thinwire deploy", authority, is_ca=True).public_bytes(pem))
    (home / "server.pem").write_bytes(certificate("localhost", own, is_ca=False).public_bytes(pem))
    _write_secret(
        home / "server.key",
        own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _make_key(path: Path) -> Path:
    """A key by which one node is known; its public half lies beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")
    return path


def _write_secret(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
