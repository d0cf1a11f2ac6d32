"""A Flower SuperNode with low latency: nothing is imported for a message, and waits are short while there is work.

    thinwire node --superlink server:8000 --root-certificates ca.pem ...      takes the options of flower-supernode

Started by Flower, a SuperNode polls its SuperLink every 3 seconds; a second process polls the SuperNode for tasks every
second and starts a third one per message, which imports Flower, torch and the app before it begins. Here both
processes import everything once, and the second forks for each message. A message still has a process of its own that
runs Flower's code from the start; only the imports are done in advance.

A wait is a fifth of the time since the last work, but at least a twentieth of Flower's wait, since each poll of the
SuperLink costs bytes, and at most Flower's wait. If a version of Flower has other internals, its waits stay.
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


class AdaptiveTime:
    """Replacement of the module `time` whose `sleep` lasts at most a fifth of the time since the last work."""

    def __init__(self) -> None:
        self.last_work, self.last_wait = time.monotonic(), 0.0

    def busy(self) -> None:
        """Note that there was work."""
        self.last_work = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep. A wait of another length than the last one comes from another place in the code: there was work."""
        if seconds != self.last_wait:
            self.busy()
        self.last_wait = seconds
        time.sleep(min(seconds, max(seconds / 20, (time.monotonic() - self.last_work) / 5)))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def node(options: Sequence[str]) -> None:
    """Run a SuperNode until it is stopped.

    Args:
        options: as for `flower-supernode`.
    """
    need_flower()
    if any(option.startswith("--isolation") for option in options):
        raise ConfigError("`thinwire node` sets --isolation; leave it out, or use flower-supernode")
    if not hasattr(os, "fork"):
        raise ConfigError(
            "`thinwire node` needs an operating system with fork; use flower-supernode with the same options"
        )
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    sys.argv = ["flower-supernode", *options]
    parsed = _parse(options)
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    _import_all()
    secret = secrets.token_bytes(32)
    worker = os.fork()
    if worker == 0:
        _work(parsed, secret)
    threading.Thread(target=_stop_with, args=(worker,), daemon=True).start()
    _shorten_waits(start_client_internal, AdaptiveTime())
    read, write = os.pipe()  # the secret is never written to a file
    os.write(write, secret)
    os.close(write)
    sys.argv += ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{read}"]
    flower_supernode()


def _import_all() -> None:
    """Import everything that a message needs, so that forked processes have it."""
    import flwr.clientapp
    import flwr.supernode.runtime.run_clientapp  # noqa: F401
    import torch._dynamo  # noqa: F401 - torch.func imports it when it is first used: a second or more


def _parse(options: Sequence[str]) -> Any:
    """Parse the options with Flower's parser, which exits if they are wrong."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    return _parse_args_run_supernode().parse_args(options)


def _shorten_waits(module: ModuleType, adaptive: AdaptiveTime) -> None:
    if getattr(module, "time", None) is time:
        module.time = adaptive  # type: ignore[attr-defined]


def _stop_with(worker: int) -> None:
    """Stop this process if the worker process ends, so that a supervisor restarts both."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)
    os.kill(os.getpid(), signal.SIGTERM)


# -- the worker process ------------------------------------------------------------------------------------------------


def _work(parsed: Any, secret: bytes) -> NoReturn:
    """Poll the SuperNode for tasks, and fork for each."""
    from flwr.supercore.superexec import run_superexec as module

    _exit_with(os.getppid())
    adaptive = AdaptiveTime()
    _shorten_waits(module, adaptive)
    module.get_executor = lambda *_, **__: ForkExecutor(adaptive)  # type: ignore[assignment]
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    _wait_for_port(parsed.host, parsed.port)
    module.run_superexec(
        runtime_api_address=f"{host}:{parsed.port}",
        insecure=parsed.ssl_certfile is None,
        root_certificates_path=parsed.ssl_ca_certfile,
        superexec_auth_secret=secret,
        runtime_dependency_install=parsed.runtime_dependency_install,
    )
    sys.exit(0)


def _exit_with(parent: int) -> None:
    """Exit when the parent process is gone; uses a timer, since a process that forks should have no threads."""

    def check(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def _wait_for_port(host: str, port: int) -> None:
    while True:
        try:
            socket.create_connection((host, port), 0.5).close()
            return
        except OSError:
            time.sleep(0.05)


class ForkExecutor:
    """An executor for Flower's SuperExec that forks a process for each ClientApp task."""

    def __init__(self, adaptive: AdaptiveTime) -> None:
        self.adaptive = adaptive

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Task types that it can start: ClientApps only."""
        from flwr.supercore.constant import TaskType

        return supported & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Return at once: the number of processes is not limited."""

    def launch(self, spec: Any) -> Any:
        """Fork a process for a message."""
        from flwr.supercore.superexec.executor import LaunchResult

        self.adaptive.busy()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _run_message(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap processes that have ended; called between two polls."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _run_message(spec: Any) -> NoReturn:
    """Handle one message as `flwr-clientapp` does, then exit."""
    from flwr.supercore.exit import exit_handler
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # they belong to the parent process
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
