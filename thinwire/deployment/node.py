"""A Flower SuperNode that stays awake: nothing is imported anew for a message, and nobody sleeps beside work.

    thinwire node --superlink server:8000 --root-certificates ca.pem ...       the options are those of flower-supernode

As Flower starts it, a SuperNode asks its SuperLink for messages every 3 seconds; a second process asks the SuperNode
for tasks every second, and starts a third for each message, which imports Flower, torch and the app before it begins.
Here both processes import all of it once. The second forks for a message: each still has a process of its own, which
nothing outlives, and which runs Flower's own code from the beginning; only the imports are done already.

Waits are a fifth of how long there was nothing to do, from a twentieth of Flower's own up to these: each look at the
SuperLink costs bytes. Where a version of Flower has another inside, its waits are left as they are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from thinwire.errors import ConfigError
from thinwire.flower import need_flower


class Eager:
    """Stands in for the module `time`: sleeps no longer than a fifth of the time that there was nothing to do."""

    def __init__(self) -> None:
        self.since, self.before = time.monotonic(), 0.0

    def busy(self) -> None:
        """There was something to do."""
        self.since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep. A wait of another length than the last is for something else: something has happened between."""
        if seconds != self.before:
            self.busy()
        self.before = seconds
        time.sleep(min(seconds, max(seconds / 20, (time.monotonic() - self.since) / 5)))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def node(options: Sequence[str]) -> None:
    """Run a SuperNode until it is ended.

    Args:
        options: as for `flower-supernode`.
    """
    need_flower()
    if any(option.startswith("--isolation") for option in options):
        raise ConfigError("`thinwire node` chooses --isolation itself; leave it out, or use flower-supernode")
    if not hasattr(os, "fork"):
        raise ConfigError("`thinwire node` needs a system that can fork; use flower-supernode with the same options")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    sys.argv = ["flower-supernode", *options]
    given = _parsed(options)
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    _import_all()
    secret = secrets.token_bytes(32)
    worker = os.fork()
    if worker == 0:
        _work(given, secret)
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    _be_eager(start_client_internal, Eager())
    read, write = os.pipe()  # a secret that never is a file
    os.write(write, secret)
    os.close(write)
    sys.argv += ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{read}"]
    flower_supernode()


def _import_all() -> None:
    """What a message needs, so that the process that is forked for it has it already."""
    import flwr.clientapp
    import flwr.supernode.runtime.run_clientapp  # noqa: F401
    import torch._dynamo  # noqa: F401 - torch.func imports it when it is first used: a second or more


def _parsed(options: Sequence[str]) -> Any:
    """Flower's own reading of the options; it ends the process where they are wrong."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    return _parse_args_run_supernode().parse_args(options)


def _be_eager(module: ModuleType, waits: Eager) -> None:
    if getattr(module, "time", None) is time:
        module.time = waits  # type: ignore[attr-defined]


def _end_with(worker: int) -> None:
    """End this process if the one beside it ends: whoever started it, starts both again."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)
    os.kill(os.getpid(), signal.SIGTERM)


# -- the process beside it ---------------------------------------------------------------------------------------------


def _work(given: Any, secret: bytes) -> NoReturn:
    """Ask the SuperNode for tasks, and fork for each."""
    from flwr.supercore.superexec import run_superexec as module

    _leave_with(os.getppid())
    waits = Eager()
    _be_eager(module, waits)
    module.get_executor = lambda *_, **__: Forking(waits)  # type: ignore[assignment]
    host = f"[{given.host}]" if ":" in given.host else given.host
    _wait_for_port(given.host, given.port)
    module.run_superexec(
        runtime_api_address=f"{host}:{given.port}",
        insecure=given.ssl_certfile is None,
        root_certificates_path=given.ssl_ca_certfile,
        superexec_auth_secret=secret,
        runtime_dependency_install=given.runtime_dependency_install,
    )
    sys.exit(0)


def _leave_with(parent: int) -> None:
    """End this process when another is gone, whatever it does; by a timer, since who forks should have no threads."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def _wait_for_port(host: str, port: int) -> None:
    while True:
        try:
            socket.create_connection((host, port), 0.5).close()
            return
        except OSError:
            time.sleep(0.05)


class Forking:
    """An executor of Flower's for clients' processes only, which are forked."""

    def __init__(self, waits: Eager) -> None:
        self.waits = waits

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """What it can start: clients."""
        from flwr.supercore.constant import TaskType

        return supported & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """There is always room for one more."""

    def launch(self, spec: Any) -> Any:
        """Fork for a message."""
        from flwr.supercore.superexec.executor import LaunchResult

        self.waits.busy()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _answer(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Between two looks: bury those that are done."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """Nothing is held."""


def _answer(spec: Any) -> NoReturn:
    """One message, in a process of its own, as `flwr-clientapp` would."""
    from flwr.supercore.exit import exit_handler
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # those of the process that forked are not ours to call
        sys.argv = ["flwr-clientapp"]
        certificates = Path(spec.root_certificates_path).read_bytes() if spec.root_certificates_path else None
        run_clientapp(
            spec.runtime_api_address,
            spec.token,
            spec.insecure,
            certificates,
            os.getppid(),
            spec.runtime_dependency_install,
        )
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
