"""The private names of Flower that nodes and `thinwire deploy` use, all in this file.

`thinwire node` needs functions of Flower that are not part of its documented API. `why_not()` checks, before a node
starts, that the installed version is one of `KNOWN` and has every name in `NAMES` with the parameters that are used. If
not, `run_flower_node` runs `flower-supernode`, which needs none of them. Private names that the server uses are in
`reply_limit.py`, which does without them where they are missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from thinwire.errors import ConfigError

KNOWN = ("1.40", "1.41", "1.42")  # tests/deployment/test_pinned_nodes.py runs a deployment with each

NAMES: Mapping[str, Mapping[str, Sequence[str]]] = {  # by module: the names, and the parameters that are used
    "flwr.supernode.cli.flower_supernode": {"flower_supernode": (), "_parse_args_run_supernode": ()},
    "flwr.supernode.start_client_internal": {"start_client_internal": ("isolation", "superexec_auth_secret")},
    "flwr.supernode.runtime.run_clientapp": {
        "run_clientapp": (
            *("runtime_api_address", "token", "insecure", "certificates", "parent_pid", "runtime_dependency_install"),
        ),
        "install_from_fab": ("fab_file", "skip_prompt"),
        "get_load_client_app_fn": ("default_app_ref", "app_path", "multi_app"),
    },
    "flwr.supercore.superexec.run_superexec": {
        "run_superexec": (
            *("runtime_api_address", "insecure", "root_certificates_path", "superexec_auth_secret"),
            "runtime_dependency_install",
        ),
        "get_executor": (),
    },
    "flwr.supercore.superexec.executor": {"LaunchResult": ()},
    "flwr.supercore.constant": {"TaskType": ()},
    "flwr.supercore.exit.exit_handler": {"registered_exit_handlers": ()},
    "flwr.supercore.object_ref": {"load_app": ("module_attribute_str", "error_type", "project_dir")},
    "flwr.cli.build": {"build_fab_from_disk": ("app",)},
    "flwr.common.config": {"parse_config_args": ("config",)},
}

# `flwr supernode register KEY CONNECTION` for many keys, in one process: python -c REGISTER CONNECTION KEY...
REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[2:]:
    app(["supernode", "register", key, sys.argv[1]], standalone_mode=False)
"""


def flower_version() -> str:
    """The installed version of Flower."""
    try:
        return metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def why_not(version: str | None = None) -> str:
    """Why `thinwire node` cannot use the installed version of Flower; empty if it can.

    >>> why_not("2.0.0")
    'flwr 2.0.0 is not a version known to work (1.40, 1.41, 1.42)'
    """
    version = version or flower_version()
    known = f"a version known to work ({', '.join(KNOWN)})"
    if ".".join(version.split(".")[:2]) not in KNOWN:
        return f"flwr {version} is not {known}"
    for module, names in NAMES.items():
        for name, used in names.items():
            try:
                there = getattr(import_module(module), name)
                missing = set(used) - set(signature(there).parameters) if used else set()
            except (ImportError, AttributeError) as error:
                return f"flwr {version} should be {known}, but {error}"
            if missing:
                return f"flwr {version} should be {known}, but {module}.{name} has no parameter {min(missing)!r}"
    return ""


def run_flower_node(options: Sequence[str]) -> NoReturn:
    """Replace this process by Flower's own node."""
    program = shutil.which("flower-supernode", path=str(Path(sys.executable).parent)) or shutil.which(
        "flower-supernode"
    )
    if program is None:
        raise ConfigError(f"the program flower-supernode was not found in the folder of {sys.executable} or in PATH")
    os.execv(program, [program, *options])


# -- the process of the SuperNode ------------------------------------------------------------------------------------


def parse_options(options: Sequence[str]) -> Any:
    """Parse the options of a node with Flower's parser, which exits if they are wrong."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    return _parse_args_run_supernode().parse_args(options)


def parse_node_config(text: str | None) -> dict[str, Any]:
    """The `--node-config` of a node as the app receives it: a table of strings, numbers and booleans."""
    from flwr.common.config import parse_config_args

    return dict(parse_config_args([text] if text else None))


def run_supernode(options: Sequence[str], secret: bytes, clock: Any) -> None:
    """Run Flower's SuperNode, which gives its tasks only to who knows the secret.

    Args:
        options: as for `flower-supernode`.
        secret: shared with `poll_tasks`; it is passed through a pipe and is never in a file.
        clock: replaces the module `time` where the SuperNode waits.
    """
    from flwr.supernode.cli.flower_supernode import flower_supernode

    shorten_waits(import_module("flwr.supernode.start_client_internal"), clock)
    read, write = os.pipe()
    os.write(write, secret)
    os.close(write)
    given = ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{read}"]
    sys.argv = ["flower-supernode", *options, *given]
    flower_supernode()


def shorten_waits(module: Any, clock: Any) -> None:
    """Replace the module `time` in a module that imports it; its waits stay if it does not."""
    if getattr(module, "time", None) is time:
        module.time = clock


# -- the process that polls for tasks, and the processes of messages -------------------------------------------------


def import_all() -> None:
    """Import everything that a message needs, so that forked processes have it."""
    import flwr.clientapp
    import flwr.supernode.runtime.run_clientapp  # noqa: F401


def poll_tasks(parsed: Any, secret: bytes, clock: Any, launch: Callable[[Any], None]) -> None:
    """Poll the SuperNode for tasks until it ends, and call `launch` with each.

    Args:
        parsed: the options of the node.
        secret: that of `run_supernode`.
        clock: replaces the module `time` where the process waits.
        launch: starts a process for a task, and returns.
    """
    module: Any = import_module("flwr.supercore.superexec.run_superexec")
    shorten_waits(module, clock)
    module.get_executor = lambda *_, **__: _Executor(launch)
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    module.run_superexec(
        runtime_api_address=f"{host}:{parsed.port}",
        insecure=parsed.ssl_certfile is None,
        root_certificates_path=parsed.ssl_ca_certfile,
        superexec_auth_secret=secret,
        runtime_dependency_install=parsed.runtime_dependency_install,
    )


class _Executor:
    """An executor for Flower's SuperExec that starts ClientApps only, by a function."""

    def __init__(self, launch: Callable[[Any], None]) -> None:
        self._launch = launch

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Task types that it can start: ClientApps only."""
        from flwr.supercore.constant import TaskType

        return supported & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Return at once: the number of processes is not limited."""

    def launch(self, spec: Any) -> Any:
        """Start a process for a message."""
        from flwr.supercore.superexec.executor import LaunchResult

        self._launch(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap processes that have ended; called between two polls."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def run_message(
    spec: Any, choose: Callable[[bytes], Any] | None = None, done: Callable[[], None] = lambda: None
) -> NoReturn:
    """Handle one message as `flwr-clientapp` does, then exit; called in a process of its own.

    Args:
        spec: the task.
        choose: returns the app that handles the message, given the app that the server sent. Nothing that the server
            sent is then written or imported. By default Flower installs and imports it.
        done: called when the reply is ready.
    """
    from flwr.supercore.exit import exit_handler

    module: Any = import_module("flwr.supernode.runtime.run_clientapp")
    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # they belong to the parent process
        sys.argv = ["flwr-clientapp"]
        if choose is not None:
            sent: list[bytes] = []
            module.install_from_fab = lambda fab_file, **_: sent.append(fab_file)
            module.get_load_client_app_fn = lambda **_: lambda *_: choose(sent[0])
        certificates = Path(spec.root_certificates_path).read_bytes() if spec.root_certificates_path else None
        module.run_clientapp(
            spec.runtime_api_address,
            spec.token,
            spec.insecure,
            certificates,
            os.getppid(),
            spec.runtime_dependency_install and choose is None,
        )
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        done()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- apps ------------------------------------------------------------------------------------------------------------


def app_bundle(folder: Path) -> bytes:
    """The bundle that `flwr run` would send of an app folder: a ZIP file of its files."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Flower's use of other packages
        bundle: bytes = build_fab_from_disk(folder)
    return bundle


def import_client_app(folder: Path, reference: str) -> Any:
    """Import the ClientApp of an app folder; `reference` is such as `federated.client_app:app`."""
    from flwr.supercore.object_ref import load_app

    return load_app(reference, ConfigError, folder)
