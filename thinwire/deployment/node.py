"""A Flower SuperNode with low latency: nothing is imported for a message, and waits are short while there is work.

    thinwire node --superlink server:8000 --root-certificates ca.pem ...      takes the options of flower-supernode
    thinwire node --app my-app --superlink ...                                runs only this app; loads its data once

Started by Flower, a SuperNode polls its SuperLink every 3 seconds; a second process polls the SuperNode for tasks every
second and starts a third one per message, which imports Flower, torch and the app before it begins. Here both
processes import everything once, and the second forks for each message. A message still has a process of its own that
runs Flower's code from the start; only the imports, and with `--app` the data and the model, are loaded in advance.

The two processes tell each other through pipes when there is something to do: a message has come, or its reply is
ready. Only the SuperLink is polled in short intervals: a wait is a fifth of the time since the last work; at least a
twentieth of Flower's wait, since each poll costs bytes; at least ten times as long as a poll takes, up to a quarter of
Flower's wait, since on a busy machine polls delay the work; and at most Flower's wait. `flower_adapter.py` has
everything that depends on Flower's version; with a version that is not known to work, Flower's own node runs instead.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from thinwire.deployment import flower_adapter as flower
from thinwire.deployment.pinned_app import PinnedApp, pin
from thinwire.errors import ConfigError
from thinwire.flower import need_flower

SITE_KEY = "THINWIRE_SITE_KEY"  # environment variable: the file of the private key by which a site is known


class Bell:
    """A pipe by which one process ends the wait of another."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self.write, False)

    def ring(self) -> None:
        """End the wait of the other process, or its next one."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is full of earlier calls; no process reads it
            os.write(self.write, b".")

    def wait(self, seconds: float) -> bool:
        """Wait; returns whether it was rung before the time was over."""
        if not select.select([self.read], [], [], seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self.read, 4096)
        return True


class AdaptiveTime:
    """Replacement of the module `time` whose `sleep` is shorter while there is work.

    Args:
        woken_by: ends a wait when it is rung.
        wakes: is rung when there is work.
        polls: whether waits are shortened; otherwise they end when `woken_by` is rung, or after Flower's time.
    """

    def __init__(self, woken_by: Bell | None = None, wakes: Bell | None = None, polls: bool = True) -> None:
        self.bell, self.other, self.polls = woken_by or Bell(), wakes, polls
        self.last_work, self.last_wait, self.woke = time.monotonic(), 0.0, math.inf

    def busy(self) -> None:
        """Note that there was work."""
        self.last_work = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep. A wait of another length than the last one comes from another place in the code: there was work."""
        if seconds != self.last_wait:
            self.busy()
            if self.other is not None:
                self.other.ring()
        self.last_wait = seconds
        now = time.monotonic()
        poll = max(0.0, now - self.woke)  # the time from the end of the last wait
        short = max(seconds / 20, (now - self.last_work) / 5, min(10 * poll, seconds / 4))
        if self.bell.wait(min(seconds, short) if self.polls else seconds):
            self.busy()
        self.woke = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def node(options: Sequence[str], app: Path | None = None) -> None:
    """Run a SuperNode until it is stopped.

    Args:
        options: as for `flower-supernode`.
        app: the folder of the only app that it runs; by default it runs what the server sends.
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
    if key := _value_of("--auth-supernode-private-key", options):
        os.environ[SITE_KEY] = str(Path(key).expanduser().resolve())
    if why := flower.why_not():
        if app is not None:
            raise ConfigError(f"--app cannot be kept here: {why}; install one of these versions")
        print(f"thinwire node: {why}; running flower-supernode instead, which is slower", file=sys.stderr, flush=True)
        flower.run_flower_node(options)
    sys.argv = ["flower-supernode", *options]
    parsed = flower.parse_options(options)
    _import_all()
    pinned = pin(app, flower.parse_node_config(parsed.node_config)) if app is not None else None
    gc.collect()
    gc.freeze()  # forked processes share these pages as long as the collector does not write to them
    secret = secrets.token_bytes(32)
    has_come, is_done = Bell(), Bell()
    worker = os.fork()
    if worker == 0:
        _work(parsed, secret, pinned, has_come, is_done)
    threading.Thread(target=_stop_with, args=(worker,), daemon=True).start()
    flower.run_supernode(options, secret, AdaptiveTime(woken_by=is_done, wakes=has_come))


def _value_of(option: str, options: Sequence[str]) -> str | None:
    """The value of an option that is written `--option value` or `--option=value`.

    >>> _value_of("--port", ["--port", "9094"]), _value_of("--port", ["--port=9094"]), _value_of("--port", [])
    ('9094', '9094', None)
    """
    for i, given in enumerate(options):
        if given == option and i + 1 < len(options):
            return options[i + 1]
        if given.startswith(f"{option}="):
            return given.split("=", 1)[1]
    return None


def _import_all() -> None:
    """Import everything that a message needs, so that forked processes have it."""
    flower.import_all()
    import torch._dynamo  # noqa: F401 - torch.func imports it when it is first used: a second or more


def _stop_with(worker: int) -> None:
    """Stop this process if the worker process ends, so that a supervisor restarts both."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)
    os.kill(os.getpid(), signal.SIGTERM)


# -- the worker process ------------------------------------------------------------------------------------------------


def _work(parsed: Any, secret: bytes, pinned: PinnedApp | None, has_come: Bell, is_done: Bell) -> NoReturn:
    """Ask the SuperNode for tasks when a message has come, and fork for each."""
    _exit_with(os.getppid())
    adaptive = AdaptiveTime(woken_by=has_come, polls=False)

    def launch(spec: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            flower.run_message(spec, pinned.choose if pinned else None, is_done.ring)

    _wait_for_port(parsed.host, parsed.port)
    flower.poll_tasks(parsed, secret, adaptive, launch)
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
