"""The command line in an empty folder, and runs to damage."""

from __future__ import annotations

import shutil

import pytest

from thinwire.runs.config import resolve
from thinwire.runs.execute import execute


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished and an unfinished run of one experiment."""
    folder = tmp_path_factory.mktemp("finished")
    wanted = resolve("fedavg", "digits", {"rounds": 2, "local.steps": 1, "checkpoint.every": 1})
    execute(wanted, folder / "run")
    shutil.copytree(folder / "run", folder / "cut")
    (folder / "cut/summary.json").unlink()
    return folder
