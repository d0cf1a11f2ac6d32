import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache; all tests of a run use one, as a user does."""
    base = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("THINWIRE_CACHE", str(base))


@pytest.fixture
def real() -> Path:
    """The folder of real data sets."""
    folder = os.environ.get("THINWIRE_DATA")
    if not folder:
        pytest.skip("THINWIRE_DATA names no folder of real data sets")
    return Path(folder)
