"""The one app that a node runs: loaded before the first message, and compared with what the server sends.

Under Flower the server sends the app to the nodes, so whoever controls the server runs any program on them. A pinned
app is a folder on the node that its owner has read. Of the app that the server sends only the hashes of its files are
compared with it; nothing of it is written or run. Since app, data and model are loaded before the node forks for
messages, data that take long to read are read once.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.deployment.flower_adapter import app_bundle, import_client_app
from thinwire.errors import ConfigError, ThinwireError
from thinwire.experiments.toml import loads, read_toml

PROJECT = "pyproject.toml"
LONGEST_PROJECT = 1_000_000
_NAMED = 3  # files that a refusal names


def hashes_of(bundle: bytes, sizes: Mapping[str, int] | None = None) -> dict[str, str]:
    """The SHA-256 of each file of a bundle.

    Flower rewrites `pyproject.toml`, so of this file the values are hashed, not the text.

    Args:
        bundle: a Flower app bundle, not trusted.
        sizes: the expected sizes; a longer file is not read, so that reading takes no more memory than these.
    """
    found = {}
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        for entry in files.infolist():
            if entry.is_dir() or entry.filename.startswith(".info/"):
                continue
            known = entry.file_size if sizes is None else sizes.get(entry.filename, 0)
            if entry.file_size > (LONGEST_PROJECT if entry.filename == PROJECT else known):
                found[entry.filename] = ""
                continue
            data = files.read(entry)
            if entry.filename == PROJECT:
                data = repr(_sorted(loads(data.decode(), PROJECT))).encode()
            found[entry.filename] = hashlib.sha256(data).hexdigest()
    return found


def _sorted(value: Any) -> Any:
    """Tables in the order of their keys, since the order in a file has no meaning."""
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


@dataclass(frozen=True)
class PinnedApp:
    """An app folder that was loaded, and the hashes of its files.

    Args:
        folder: the app folder.
        app: its ClientApp.
        hashes: SHA-256 of each file that Flower sends of the folder.
        sizes: their sizes.
    """

    folder: Path
    app: Any
    hashes: Mapping[str, str]
    sizes: Mapping[str, int]

    def difference(self, bundle: bytes) -> str:
        """How the app that the server sent differs from this one, in a few words; empty if it does not."""
        try:
            sent = hashes_of(bundle, self.sizes)
        except Exception as error:  # a damaged ZIP file raises many types; all of them mean that it is another app
            return f"it cannot be read ({visible(str(error), 100)})"
        kinds = {
            "has another": [name for name in sorted(sent) if name in self.hashes and sent[name] != self.hashes[name]],
            "adds": sorted(sent.keys() - self.hashes.keys()),
            "lacks": sorted(self.hashes.keys() - sent.keys()),
        }
        return ", ".join(f"it {kind} {_listed(names)}" for kind, names in kinds.items() if names)

    def choose(self, bundle: bytes) -> Callable[..., Any]:
        """What handles a message: this app, or, if the server sent another one, a refusal."""
        difference = self.difference(bundle)
        if not difference:
            return self.app  # type: ignore[no-any-return]
        return lambda message, context: self._refuse(message, difference)

    def _refuse(self, message: Any, difference: str) -> Any:
        """Reply that this node runs another app; the node prints the same line."""
        from flwr.app import Error, Message

        from thinwire.flower.grid_transport import pack

        print(f"refused: the server sent another app than {self.folder}: {difference}", flush=True)
        reason = f"this node runs only its own app (thinwire node --app): of the app of this run, {difference}"
        if message.metadata.message_type == "query":
            return Message(pack({"refusal": reason}), reply_to=message)
        return Message(Error(code=0, reason=reason), reply_to=message)


def _listed(names: list[str]) -> str:
    shown = ", ".join(visible(name, 80) for name in names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED} more files" if len(names) > _NAMED else "")


def pin(folder: Path, node_config: Mapping[str, Any]) -> PinnedApp:
    """Load an app folder with the data and the model of this node.

    Args:
        folder: the app folder, such as `thinwire flower-app` writes.
        node_config: the configuration of the node.
    """
    folder = folder.resolve()
    if not (folder / PROJECT).is_file():
        raise ConfigError(f"--app {folder} has no {PROJECT}; name a folder that `thinwire flower-app` wrote")
    table = read_toml(folder / PROJECT)
    try:
        reference = str(table["tool"]["flwr"]["app"]["components"]["clientapp"])  # type: ignore[index, call-overload]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / PROJECT} names no clientapp under [tool.flwr.app.components]") from error
    try:
        bundle = app_bundle(folder)
        app = import_client_app(folder, reference)
        load_once(app, node_config)
    except (ThinwireError, OSError):
        raise
    except Exception as error:  # of the app's code: anything
        raise ConfigError(
            f"the app {folder} cannot be loaded: {type(error).__name__}: {visible(str(error))}"
        ) from error
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        sizes = {entry.filename: entry.file_size for entry in files.infolist()}
    return PinnedApp(folder, app, hashes_of(bundle), sizes)


def load_once(app: Any, node_config: Mapping[str, Any]) -> None:
    """Load data and model of an app made by `client_app`, for processes that are forked afterwards.

    torch computes on one core here: threads of a pool do not survive a fork, and a process that waits for them hangs.
    """
    import torch

    load = getattr(app, "load", None)
    if load is None:  # an app of another kind: only its import is done once
        return
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        load(dict(node_config))
    finally:
        torch.set_num_threads(cores)
