"""Full disks, limits on file sizes and missing permissions: one line, no partial files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import sklearn

from tests.bad_input.refusal import FAST, refused
from thinwire.runs.run_directory import RunFolder


@contextmanager
def files_of_at_most(size: int):
    """Limit the size of files of this process, to simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # Python would keep truncated bytecode
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 1500, 15_000])
def test_a_file_that_cannot_grow_is_named_and_the_run_continues_later(thinwire, tmp_path, finished, size):
    with files_of_at_most(size):
        line = refused(thinwire("run", "fedavg", *FAST, "--out", "run"))
        assert "run/" in line
        assert "File too large; raise the limit on file sizes" in line
    assert not list(tmp_path.rglob("*.tmp"))
    verb = (
        ("resume", "run", "-q")
        if (tmp_path / "run/config.toml").is_file()
        else ("run", "fedavg", *FAST, "--out", "run")
    )
    assert thinwire(*verb)[0] == 0
    model = (tmp_path / "run/model.safetensors").read_bytes()
    assert model == (finished / "run/model.safetensors").read_bytes()
    assert RunFolder.open(tmp_path / "run").summary()["status"] == "finished", "its files match their checksums"


@pytest.mark.parametrize(
    "words",
    [
        ("app", "fedavg", "new"),
        ("report", "run", "--html", "new"),
    ],
    ids=lambda words: words[0],
)
def test_files_that_cannot_be_written_completely_are_removed(thinwire, tmp_path, finished, words):
    shutil.copytree(finished / "run", tmp_path / "run")
    with files_of_at_most(500):
        if words[0] == "report":
            code, out, err = thinwire(*words)
            assert (code, "fedavg" in out, "new was not written" in err and "File too large" in err) == (1, True, True)
        else:
            assert "File too large" in refused(thinwire(*words))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@contextmanager
def as_nobody():
    """Run without the rights of root, who may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        needed = (os.__file__, sklearn.__file__)  # modules and digits are read on demand
        if not all(os.access(file, os.R_OK, effective_ids=True) for file in needed):
            pytest.skip("root runs the tests with a Python that other users may not read")
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "fedavg", *FAST, "--out", "closed/run"),
        ("compare", "fedavg", *FAST, "--out", "closed/runs"),
        ("app", "fedavg", "closed/app"),
        ("report", "open/run", "--html", "closed/page.html"),
        ("resume", "closed/cut"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_without_write_permission_is_named(thinwire, tmp_path, finished, words):
    for place, run in (("open", "run"), ("closed", "cut")):
        shutil.copytree(finished / run, tmp_path / place / run)
    for path in (*tmp_path.parents, tmp_path, *tmp_path.rglob("*")):
        if path.is_relative_to(tmp_path.parents[2]):
            path.chmod(0o755 if path.is_dir() else 0o644)
    for folder in ("closed", "closed/cut", "closed/cut/checkpoints"):
        (tmp_path / folder).chmod(0o555)
    before = sorted(tmp_path.rglob("*"))
    try:
        with as_nobody():
            line = refused(thinwire(*words))
        assert "closed/" in line
        assert "Permission denied; use a folder that you can read and write" in line
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        for folder in ("closed", "closed/cut", "closed/cut/checkpoints"):
            (tmp_path / folder).chmod(0o755)


FULL = """
mount -t tmpfs -o size=64k tmpfs disk || exit 77
"$0" -m thinwire run fedavg --rounds 2 --set local.steps=1 -q --out disk/run
echo "code $?" >&2
find disk -name '*.tmp' >&2
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare"), reason="mounting a disk needs Linux")
def test_a_full_disk_is_refused_in_one_line(tmp_path):
    (tmp_path / "disk").mkdir()
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, sys.executable]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=env)
    if "code" not in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()[:200]}")
    first, code = done.stderr.splitlines()
    assert code == "code 2"
    assert "disk/run/" in first
    assert first.endswith("No space left on device; free some space, then repeat the command")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full of Linux")
def test_output_that_cannot_be_written_is_refused_in_one_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "thinwire", "list", "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "thinwire: No space left on device; free some space, then repeat the command\n"
