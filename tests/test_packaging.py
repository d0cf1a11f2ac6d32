"""Source distribution and wheel: complete, without data, and working without the checkout."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both packages."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out


def test_the_wheel_has_all_modules_presets_and_the_license(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        metadata = email.message_from_bytes(content.read(next(n for n in names if n.endswith("/METADATA"))))
    tracked = subprocess.run(["git", "ls-files", "thinwire"], cwd=ROOT, capture_output=True, text=True, check=False)
    wanted = set(tracked.stdout.split()) or {
        file.relative_to(ROOT).as_posix() for file in (ROOT / "thinwire").rglob("*.[pt]*") if file.suffix != ".pyc"
    }
    assert wanted <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"thinwire"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"].endswith("counts the bytes of real messages.")
    assert metadata.get_payload().startswith("# thinwire\n")
    assert {"data", "flower", "hf", "docs", "dist", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_all("Project-URL") is None  # there is no public address yet


def test_the_source_distribution_has_documentation_and_tests_but_no_data(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        files = {member.name.split("/", 1)[1]: member.size for member in content.getmembers()}
    for name in ("README.md", "LICENSE", "pyproject.toml", "mkdocs.yml", "tests/test_packaging.py", "docs/glossary.md"):
        assert name in files
    top = {name.split("/")[0] for name in files if "/" in name}
    assert top == {"thinwire", "tests", "docs", "examples", "benchmarks", "papers", "tools", "deploy"}
    forbidden = ("__pycache__", ".pyc", ".npz", ".npy", ".pt", ".safetensors", ".gz", ".parquet", "/runs/")
    assert not [name for name in files if name.endswith(forbidden) or any(part in name for part in forbidden[:1])]
    assert max(files.values()) < 3_000_000
    assert archive.stat().st_size < 5_000_000


@pytest.mark.slow
def test_packages_work_in_an_empty_environment(tmp_path):
    """`make dist`: metadata checked by twine, wheel installed in a new environment, two methods compared there."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    command = ["make", "dist", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED") == 2
    assert (copy / "build/try/runs/compare.html").is_file()
