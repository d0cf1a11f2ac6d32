"""Search paths of data files: the given folder, else the folder in THINWIRE_DATA.

Loaders of some datasets download them with `hub` if no folder has them.
"""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import ConfigError, DataError

VARIABLE = "THINWIRE_DATA"


def root(data_dir: Path | None) -> Path | None:
    """The folder of all datasets, or None if none is given."""
    given, how = (data_dir, "--data-dir") if data_dir is not None else (os.environ.get(VARIABLE), VARIABLE)
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise DataError(f"{path}: no such folder, but {how} names it; expected the folder of the datasets")
    return path


def find(data_dir: Path | None, *names: str) -> Path | None:
    """The first of these folders that exists, or None."""
    base = root(data_dir)
    if base is None:
        return None
    return next((base / name for name in names if (base / name).is_dir()), None)


def pick(folder: Path, *names: str) -> Path:
    """The first of these files that exists in a folder: alternative names of one file."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: no file {' or '.join(names)}")


def own_path(data_dir: Path | None, given: str, option: str) -> Path:
    """The path of a file or folder of the user: as given, or below the folder of all datasets."""
    if not given:
        raise ConfigError(f"{option} is missing; write for example --set {option}=PATH")
    path = Path(given).expanduser()
    if path.exists():
        return path
    base = root(data_dir)
    if base is not None and (base / path).exists():
        return base / path
    raise DataError(f"{path}: no such file or folder ({option})")
