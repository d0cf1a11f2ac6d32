"""The command line in an empty folder, and runs to damage."""

from __future__ import annotations

import shutil
import sys

import pytest

from thinwire.cli.app import main
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import execute


@pytest.fixture
def thinwire(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["thinwire", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished and an unfinished run of one experiment."""
    folder = tmp_path_factory.mktemp("finished")
    wanted = resolve("fedavg", "digits", {"rounds": 2, "local.steps": 1, "checkpoint.every": 1})
    execute(wanted, folder / "run")
    shutil.copytree(folder / "run", folder / "cut")
    (folder / "cut/summary.json").unlink()
    return folder
