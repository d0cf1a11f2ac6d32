"""Cache of decoded data, such as images and token ids, that take seconds to decode from their files.

One file of torch per dataset, in THINWIRE_CACHE or ~/.cache/thinwire, read without pickled objects. Its name contains a
digest of the source files, so a changed file is decoded again. It is written to a temporary file, then renamed. A cache
that cannot be written is not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import DataError

_HEAD = 1 << 16


def folder() -> Path:
    """The cache folder."""
    return Path(os.environ.get("THINWIRE_CACHE") or "~/.cache/thinwire").expanduser()


def cached(name: str, files: Iterable[Path], make: Callable[[], Any]) -> Any:
    """What `make` returns, tensors in lists and dictionaries, from the cache if it was made from the same files before.

    Args:
        name: name of the dataset, with a version that changes when `make` does.
        files: all files that `make` reads.
        make: decodes the files; its errors are passed on, and nothing is cached.
    """
    path = folder() / f"{name}-{digest_of(files)}.pt"
    with contextlib.suppress(Exception):  # missing, cut off, or no file of tensors
        return torch.load(path, weights_only=True)
    made = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as draft:
            torch.save(made, Path(draft, path.name))
            os.replace(Path(draft, path.name), path)
    return made


def digest_of(files: Iterable[Path]) -> str:
    """Twelve hexadecimal digits from the name, size, modification time and first 64 KiB of each file."""
    digest = hashlib.sha256()
    for file in files:
        try:
            stat = file.stat()
            with open(file, "rb") as stream:
                head = stream.read(_HEAD)
        except OSError as fault:
            raise DataError(f"{file}: cannot be read ({fault.strerror})") from None
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        digest.update(hashlib.sha256(head).digest())
    return digest.hexdigest()[:12]
