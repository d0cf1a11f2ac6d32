"""A Flower SuperNode with low latency, apps that are pinned, and limits on replies: all private names of Flower.

    thinwire site start --superlink server:8000 --root-certificates ca.pem ...   takes the options of flower-supernode
    thinwire site start --app my-app --superlink ...                             runs only this app; loads its data once

Started by Flower, a SuperNode polls its SuperLink every 3 seconds; a second process polls the SuperNode for tasks every
second and starts a third one per message, which imports Flower, torch and the app before it begins. Here both
processes import everything once, and the second forks for each message. A message still has a process of its own that
runs Flower's code from the start; only the imports, and with `--app` the data and the model, are loaded in advance.

The two processes tell each other through pipes when there is something to do: a message has come, or its reply is
ready. Only the SuperLink is polled in short intervals: a wait is a fifth of the time since the last work; at least a
twentieth of Flower's wait, since each poll costs bytes; at least ten times as long as a poll takes, up to a quarter of
Flower's wait, since on a busy machine polls delay the work; and at most Flower's wait.

This needs names of Flower that are not part of its documented API. With a version other than those of `KNOWN`, a node
says so and runs `flower-supernode`, and the server checks replies after they were loaded.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib import import_module, metadata
from pathlib import Path
from ssl import create_default_context
from typing import Any, NoReturn

from thinwire.core.text import visible
from thinwire.errors import ConfigError, ThinwireError, WireError
from thinwire.flower import FLOWER_ENV, need_flower, with_path
from thinwire.flower.policy import TOO_LONG
from thinwire.flower.sites import KEY_VARIABLE, Report
from thinwire.runs.toml import loads, read_toml

KNOWN = ("1.40", "1.41", "1.42")  # tests/flower/test_pinned_nodes.py runs a deployment with each
PROJECT = "pyproject.toml"
MOST_AHEAD = 4.0  # seconds of a clock; Flower refuses a node whose clock is 5 seconds ahead
LONGEST_PROJECT = 1_000_000
LONGEST_LIST = 32_000_000  # bytes of the list of replies and their objects; an error of an app is in it

# `flwr supernode register KEY CONNECTION` for many keys, in one process: python -c REGISTER CONNECTION KEY...
REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[2:]:
    app(["supernode", "register", key, sys.argv[1]], standalone_mode=False)
"""


def why_not(version: str | None = None) -> str:
    """Why `thinwire site start` cannot use a version of Flower, by default the installed one; empty if it can.

    >>> why_not("2.0.0")
    'flwr 2.0.0 is not a version known to work (1.40, 1.41, 1.42)'
    """
    version = version or metadata.version("flwr")
    known = ".".join(version.split(".")[:2]) in KNOWN
    return "" if known else f"flwr {version} is not a version known to work ({', '.join(KNOWN)})"


# -- the process of the SuperNode --------------------------------------------------------------------------------------


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
        wakes: is rung when there is work; without it waits are not shortened.
    """

    def __init__(self, woken_by: Bell, wakes: Bell | None = None) -> None:
        self.bell, self.other = woken_by, wakes
        self.last_work, self.last_wait, self.woke = time.monotonic(), 0.0, math.inf

    def sleep(self, seconds: float) -> None:
        """Sleep. A wait of another length than the last one comes from another place in the code: there was work."""
        now = time.monotonic()
        if seconds != self.last_wait:
            self.last_work = now
            if self.other:
                self.other.ring()
        self.last_wait = seconds
        # now - self.woke is the time that the last poll took
        short = max(seconds / 20, (now - self.last_work) / 5, min(10 * max(0.0, now - self.woke), seconds / 4))
        rung = self.bell.wait(min(seconds, short) if self.other else seconds)
        self.woke = time.monotonic()
        if rung:
            self.last_work = self.woke

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def node(options: Sequence[str], app: Path | None = None) -> None:
    """Run a SuperNode until it is stopped.

    Args:
        options: as for `flower-supernode`.
        app: the folder of the only app that it runs; by default it runs what the server sends.
    """
    need_flower()
    if not hasattr(os, "fork"):
        raise ConfigError("`thinwire site start` needs Linux or macOS (os.fork); here write flower-supernode instead")
    os.environ |= {**FLOWER_ENV, **os.environ}
    words = [word for option in options for word in option.split("=", 1)]  # --option value, or --option=value
    if (option := "--auth-supernode-private-key") in words[:-1]:
        os.environ[KEY_VARIABLE] = str(Path(words[words.index(option) + 1]).expanduser().resolve())
    if why := why_not():
        if app is not None:
            raise ConfigError(f"--app cannot be kept here: {why}; install one of these versions")
        print(f"thinwire site start: {why}; running flower-supernode instead, which is slower", file=sys.stderr)
        command = with_path(["flower-supernode", *options])
        os.execv(command[0], command)
    import flwr.clientapp
    import flwr.supernode.runtime.run_clientapp  # noqa: F401 - forked processes have it
    import torch._dynamo  # noqa: F401 - torch.func imports it when it is first used: a second or more
    from flwr.common.config import parse_config_args
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, flower_supernode

    sys.argv = ["flower-supernode", *options]
    parsed: Any = _parse_args_run_supernode().parse_args(options)
    pinned = pin(app, parse_config_args([parsed.node_config] if parsed.node_config else None)) if app else None
    gc.collect()
    gc.freeze()  # forked processes share these pages as long as the collector does not write to them
    secret, has_come, is_done = secrets.token_bytes(32), Bell(), Bell()
    if (worker := os.fork()) == 0:
        _work(parsed, secret, pinned, has_come, is_done)
    threading.Thread(target=_stop_with, args=(worker,), daemon=True).start()
    _shorten_waits("flwr.supernode.start_client_internal", AdaptiveTime(is_done, has_come))
    read, write = os.pipe()  # the secret, without which the SuperNode gives no tasks, is never in a file
    os.write(write, secret)
    os.close(write)
    sys.argv += ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{read}"]
    try:
        flower_supernode()
    except SystemExit as end:
        if end.code:
            print(f"thinwire: this node is not connected: {_why_not_connected(parsed)}", flush=True)
        raise


def _why_not_connected(parsed: Any) -> str:
    """The likely reason why a SuperLink refused this node: its clock, or its key."""
    server = HTTPSConnection(parsed.superlink, context=create_default_context(cafile=parsed.root_certificates))
    try:
        server.request("HEAD", "/v1/fleet")
        ahead = time.time() - parsedate_to_datetime(server.getresponse().headers["Date"]).timestamp()
    except (OSError, ValueError, TypeError, HTTPException) as error:
        return f"{parsed.superlink} does not respond: {error}"
    if abs(ahead) > MOST_AHEAD:
        return f"the clock of this machine differs from that of the server by {ahead:.0f} seconds; set it"
    return "its key is not registered there; write on the server: flwr supernode register KEY.pub CONNECTION"


def _shorten_waits(name: str, clock: AdaptiveTime) -> Any:
    """Replace the module `time` in a module of Flower, which is returned."""
    module: Any = import_module(name)
    module.time = clock
    return module


def _stop_with(worker: int) -> None:
    """Stop this process if the worker process ends, so that a service manager restarts both."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker, 0)
    os.kill(os.getpid(), signal.SIGTERM)


# -- the worker process, and the processes of messages -----------------------------------------------------------------


def _work(parsed: Any, secret: bytes, pinned: PinnedApp | None, has_come: Bell, is_done: Bell) -> NoReturn:
    """Ask the SuperNode for tasks when a message has come, and fork for each, until the SuperNode ends."""
    _exit_with(os.getppid())
    while True:  # until the SuperNode listens
        with contextlib.suppress(OSError), socket.create_connection((parsed.host, parsed.port), 0.5):
            break
        time.sleep(0.05)
    module = _shorten_waits("flwr.supercore.superexec.run_superexec", AdaptiveTime(has_come))
    module.get_executor = lambda *_, **__: _Executor(pinned, is_done)
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
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


@dataclass(frozen=True)
class _Executor:
    """An executor for Flower's SuperExec that forks for each message to a ClientApp."""

    pinned: PinnedApp | None
    is_done: Bell

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        from flwr.supercore.constant import TaskType

        return supported & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Return at once: the number of processes is not limited."""

    def launch(self, spec: Any) -> Any:
        from flwr.supercore.superexec.executor import LaunchResult

        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _run_message(spec, self.pinned, self.is_done)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap processes that have ended; called between two polls."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _run_message(spec: Any, pinned: PinnedApp | None, is_done: Bell) -> NoReturn:
    """Handle one message as `flwr-clientapp` does, then exit; with a pinned app, what the server sent is compared."""
    from flwr.supercore.exit import exit_handler

    module: Any = import_module("flwr.supernode.runtime.run_clientapp")
    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # they belong to the parent process
        sys.argv = ["flwr-clientapp"]
        if pinned is not None:
            sent: list[bytes] = []
            module.install_from_fab = lambda fab_file, **_: sent.append(fab_file)
            module.get_load_client_app_fn = lambda **_: lambda *_: pinned.choose(sent[0])
        path = spec.root_certificates_path
        module.run_clientapp(
            spec.runtime_api_address,
            spec.token,
            spec.insecure,
            path and Path(path).read_bytes(),
            os.getppid(),
            spec.runtime_dependency_install and pinned is None,
        )
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        is_done.ring()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- pinned apps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PinnedApp:
    """The one app that a node runs: loaded before the first message, and compared with what the server sends.

    Under Flower the server sends the app to the nodes, so any program of the server runs on them. A pinned app is a
    folder on the node that its owner has read. The files of the app that the server sends are only compared with those
    of the folder; nothing of it is written or run.

    Args:
        folder: the app folder.
        app: its ClientApp.
        files: the contents of each file that Flower sends of the folder.
    """

    folder: Path
    app: Any
    files: Mapping[str, bytes]

    def difference(self, bundle: bytes) -> str:
        """How the app that the server sent differs from this one, in a few words; empty if it does not."""
        try:
            sent = files_of(bundle, LONGEST_PROJECT + sum(map(len, self.files.values())))
        except Exception as error:  # a damaged ZIP file raises many types; all of them mean that it is another app
            return f"it cannot be read ({visible(str(error), 100)})"
        names = sorted(name for name in {*sent, *self.files} if sent.get(name) != self.files.get(name))
        return f"it has another {visible(', '.join(names), 240)}" if names else ""

    def choose(self, bundle: bytes) -> Callable[..., Any]:
        """What handles a message: this app, or, if the server sent another one, a refusal, which is also printed."""
        if not (difference := self.difference(bundle)):
            return self.app  # type: ignore[no-any-return]

        def refuse(message: Any, context: Any) -> Any:
            from flwr.app import Message

            from thinwire.flower.grid_transport import pack

            print(f"refused: the server sent another app than {self.folder}: {difference}", flush=True)
            why = f"this node runs only its own app (thinwire site start --app): of the app of this run, {difference}"
            return Message(pack(Report(refusal=why)), reply_to=message)

        return refuse


def files_of(bundle: bytes, most: float = math.inf) -> dict[str, bytes]:
    """The contents of each file of a bundle. Flower rewrites `pyproject.toml`; of this file these are its values.

    Args:
        bundle: a Flower app bundle, not trusted.
        most: how many bytes its files may have together.
    """
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        entries = [one for one in files.infolist() if not one.is_dir() and not one.filename.startswith(".info/")]
        if (size := sum(one.file_size for one in entries)) > most:
            raise ValueError(f"its files have {size:,} bytes, expected at most {most:,}")
        found = {one.filename: files.read(one) for one in entries}
    if PROJECT in found:
        values = loads(found[PROJECT].decode(), PROJECT)
        found[PROJECT] = json.dumps(values, sort_keys=True, default=str).encode()
    return found


def app_bundle(folder: Path) -> bytes:
    """The bundle that `flwr run` would send of an app folder: a ZIP file of its files."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Flower's use of other packages
        return bytes(build_fab_from_disk(folder))


def pin(folder: Path, node_config: Mapping[str, Any]) -> PinnedApp:
    """Load an app folder with the data and the model of this node, for processes that are forked afterwards.

    Args:
        folder: the app folder, such as `thinwire app` writes.
        node_config: the configuration of the node.
    """
    folder = folder.resolve()
    if not (folder / PROJECT).is_file():
        raise ConfigError(f"--app {folder} has no {PROJECT}; name a folder that `thinwire app` wrote")
    import torch

    cores = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a pool do not survive a fork, and a process that waits for them hangs
    try:
        from flwr.supercore.object_ref import load_app

        files, table = files_of(app_bundle(folder)), read_toml(folder / PROJECT)
        app: Any = load_app(table["tool"]["flwr"]["app"]["components"]["clientapp"], ConfigError, folder)
        if load := getattr(app, "load", None):  # else it was not made by `client_app`: only its import is done once
            load(dict(node_config))
    except (ThinwireError, OSError):
        raise
    except Exception as error:  # of the app's code: anything
        raise ConfigError(
            f"the app {folder} cannot be loaded: {type(error).__name__}: {visible(str(error))}"
        ) from error
    finally:
        torch.set_num_threads(cores)
    return PinnedApp(folder, app, files)


# -- limits on replies, on the server ----------------------------------------------------------------------------------


def limit_replies(grid: Any, longest: int, seconds: float, log: Callable[[str], None] = lambda line: None) -> bool:
    """Refuse replies that are too long before they are loaded; returns whether that is possible.

    A reply waits in the SuperLink as objects: a record of fields, and the chunks of a long message. The server is sent
    a list of the objects of each reply, and pulls them one by one over HTTP. Here the header `Content-Length` of each
    is read before its body is; if the objects of one reply together are longer than any upload, the rest is not pulled,
    the SuperLink is told to delete the reply, and the server treats it as refused. A reply that was announced, but
    whose objects do not arrive, is given up after `seconds`; Flower alone would wait for two hours.

    What a node can store in the SuperLink is limited by a proxy before it, such as `client_max_body_size` of nginx.

    Args:
        grid: Flower's grid.
        longest: the largest number of bytes of a reply.
        seconds: how long to wait for the objects of a reply.
        log: receives a line if it is not possible.
    """
    if type(grid).__name__ == "InMemoryGrid":  # of Flower's simulation: replies are objects of this process
        return False
    try:
        from flwr.proto import message_pb2, runtime_pb2
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        runtime, server = grid._runtime_client, grid.node
        hooks = runtime._client.event_hooks
    except (ImportError, AttributeError):
        log("this version of Flower loads replies before their length can be checked; see docs/safe-rounds.md")
        return False
    reply_of: dict[str, str] = {}  # by object
    pulled: dict[str, int] = {}  # bytes by reply
    since: dict[str, float] = {}  # when the first object of a reply was pulled
    refused: set[str] = set()

    def check(response: Any) -> None:
        """Read the headers of a response of the SuperLink; an event hook of httpx."""
        path, length = response.request.url.path, response.headers.get("content-length", "")
        size = int(length) if length.isdecimal() else 1 << 62
        if path.endswith("/pull-messages"):
            if size > LONGEST_LIST:
                raise WireError(f"the list of replies has {size:,} bytes, expected at most {LONGEST_LIST:,}")
            for known in (reply_of, pulled, since):  # replies of the list before were pulled, or refused
                known.clear()  # type: ignore[attr-defined]
            for tree in runtime_pb2.PullAppMessagesResponse.FromString(response.read()).message_object_trees:
                reply_of.update(dict.fromkeys(_objects(tree), tree.object_id))
        elif path.endswith("/pull-object"):
            check_object(response, size)

    def check_object(response: Any, size: int) -> None:
        asked, now = message_pb2.PullObjectRequest.FromString(response.request.content), time.monotonic()
        reply = reply_of.get(asked.object_id, asked.object_id)
        pulled[reply] = pulled.get(reply, 0) + size
        waited = now - since.setdefault(reply, now)
        if pulled[reply] > longest:
            why = f"{TOO_LONG} {longest:,} bytes"
        elif waited > seconds and not message_pb2.PullObjectResponse.FromString(response.read()).object_available:
            why = f"its reply had not arrived {waited:.0f} seconds after it was announced"
        else:
            return
        if reply not in refused:
            refused.add(reply)
            request = {"node": server, "run_id": asked.run_id, "message_object_id": reply}
            with contextlib.suppress(Exception):  # else the reply stays in the SuperLink until the run ends
                runtime.ConfirmMessageReceived(message_pb2.ConfirmMessageReceivedRequest(**request))
        raise ObjectPullError(asked.object_id, why)

    runtime._client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), check]}
    return True


def _objects(tree: Any) -> list[str]:
    """The objects of a reply."""
    return [tree.object_id, *(name for child in tree.children for name in _objects(child))]
