"""Settings and fixtures of the tests of papers."""

from __future__ import annotations

import sys

import pytest

from papers.__main__ import app
from tests.conftest import seeded as seeded
from thinwire.cli.app import main


@pytest.fixture
def papers(monkeypatch, capsys, tmp_path):
    """Call `python -m papers` in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["papers", *words])
        with pytest.raises(SystemExit) as stop:
            main(app, "python -m papers")
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call
