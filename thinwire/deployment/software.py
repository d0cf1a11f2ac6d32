"""The software of a machine: the version of thinwire, the message format, and a hash of the files of the app."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from thinwire.core.version import version
from thinwire.flower.hello import Software
from thinwire.protocol.contract import Contract
from thinwire.wire.message import FORMAT

SUFFIXES = (".py", ".toml")  # Flower sends these to nodes, and among others pyproject.toml, which it rewrites


def software_of(job: Any, contract: Contract) -> Software:
    """The software of this machine.

    Args:
        job: the function of the app that returns the job; the app is the package that it is in.
        contract: what the server and this machine agree on.
    """
    return Software(contract.schema.digest, version(), FORMAT, app_hash(package_folder(job)))


def package_folder(job: Any) -> Path | None:
    """The folder of the outermost package that a function is in; None if it is in none."""
    name = str(getattr(job, "__module__", "")).partition(".")[0]
    module = sys.modules.get(name)
    folders = list(getattr(module, "__path__", []))
    return Path(folders[0]) if folders else None


@lru_cache(4)
def app_hash(folder: Path | None) -> str:
    """The SHA-256 of names and contents of the `.py` and `.toml` files below the folder of an app's package.

    Args:
        folder: the folder, for example `my-app/federated`; the hash of None is "". Tests are left out, as Flower does.
    """
    if folder is None:
        return ""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).as_posix()):
        name = file.relative_to(folder).as_posix()
        is_test = file.name.startswith("test_") or file.stem.endswith("_test")
        if file.suffix in SUFFIXES and file.name != "pyproject.toml" and not is_test and file.is_file():
            data = file.read_bytes()
            total.update(f"{len(name.encode())} {name} {len(data)} ".encode() + data)
    return total.hexdigest()
