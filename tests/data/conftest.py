import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not use the user's cache; all tests of a run share one."""
    base = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("THINWIRE_CACHE", str(base))


@pytest.fixture
def real() -> Path:
    """The folder of real datasets."""
    folder = os.environ.get("THINWIRE_DATA")
    if not folder:
        pytest.skip("THINWIRE_DATA does not give a folder of real datasets")
    return Path(folder)
