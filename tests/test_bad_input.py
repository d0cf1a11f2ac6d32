"""Invalid input through the command line: one line, exit code 2, no partial files, no traceback."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import sklearn

from thinwire.cli.app import main
from thinwire.core.text import visible
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import execute
from thinwire.experiments.run_directory import RunFolder
from thinwire.experiments.toml import dumps, loads

FAST = ("--rounds", "2", "--set", "local.steps=1", "--set", "checkpoint.every=1", "-q")


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


def refused(result: tuple[int, str, str]) -> str:
    """The single line of a refusal, which must be printable."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("thinwire: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    assert len(err) < 2100
    return err


LONG = "x" * 300
DEEP = "[" * 5000
DIGITS = "9" * 5000
TOO_LONG = "File name too long; use a shorter name"

WORDS = [
    # seeds and counts
    (("run", "fedavg", "--seed", "-1"), "seed must be from 0 to 2**64 - 1, not -1"),
    (("check", "fedavg", "--seed", "-1"), "seed must be from 0"),
    (("show", "fedavg", "--seed", "-1"), "seed must be from 0"),
    (("compare", "fedavg", "--seed", "-1"), "seed must be from 0"),
    (("tune", "flasc", "--seed", "-1"), "seed must be from 0"),
    (("flower-app", "fedavg", "new", "--seed", "-1"), "seed must be from 0"),
    (("deploy", "fedavg", "--seed", "-1"), "seed must be from 0"),
    (("run", "fedavg", "--seed", "9" * 30), "seed must be from 0"),
    (("run", "fedavg", "--seed", DIGITS), "Invalid value for '--seed'"),
    (("run", "fedavg", "--seed", "[/b]"), "Invalid value for '--seed'"),
    (("run", "fedavg", "--rounds", "1" + "0" * 10), "rounds must be at most 1,000,000,000"),
    (("run", "fedavg", "--clients", "-1"), "task.clients must be 1 or more, not -1"),
    (("tune", "flasc", "--ranks", "1e999999999,2"), "ranks must be numbers separated by commas"),
    (("tune", "flasc", "--ranks", DIGITS), "ranks must be numbers separated by commas"),
    (("tune", "flasc", "--budget", DIGITS), "at most 63 bits"),
    (("report", ".", "--compute", "nan"), "compute must be 0 or more seconds, not nan"),
    (("report", ".", "--joules", "nan"), "joules per megabyte must be more than 0"),
    (("watch", ".", "--every", "inf"), "every must be above 0"),
    # settings
    (("run", "fedavg", "--set", f"rounds={DEEP}"), "a value of --set is nested more than 32 levels deep"),
    (("run", "fedavg", "--set", f"seed={DIGITS}"), "a value of --set holds a whole number of more than 64 bits"),
    (("run", "fedavg", "--set", f"seed=0x{'f' * 5000}"), "a value of --set holds a whole number of more than 64 bits"),
    (("run", "fedavg", "--set", "a" + ".a" * 5000 + "=1"), "unknown key 'a'"),
    (("run", ""), "the name of the method is empty"),
    (("run", "fedavg", "--on", ""), "unknown task ''"),
    (("run", LONG * 30), "unknown method 'xxx"),
    (("list", LONG * 30), "unknown list 'xxx"),
    # names
    (("run", "fedavg", "--set", "name=../x"), "name '../x' cannot be used: it begins with a dot"),
    (("run", "fedavg", "--set", "name=/abs"), "name '/abs' cannot be used: it holds '/'"),
    (("run", "fedavg", "--set", "name=a\x1b[31m"), r"it holds '\x1b'"),
    (("run", "fedavg", "--set", "name=a\u202eb"), r"it holds '\u202e'"),
    (("run", "fedavg", "--set", "name=\udcff"), r"it holds '\udcff'"),
    (("run", "fedavg", "--set", f"name={LONG}"), "it has 300 bytes, more than 120"),
    (("run", "fedavg", "--set", "name="), "it is empty"),
    # paths
    (("run", f"{LONG}.toml"), TOO_LONG),
    (("run", "fedavg", *FAST, "--out", LONG), TOO_LONG),
    (("run", "fedavg", "--on", "mnist", "--data-dir", LONG), TOO_LONG),
    (("resume", LONG), TOO_LONG),
    (("export-peft", LONG, "y"), TOO_LONG),
    (("flower-app", "fedavg", LONG), TOO_LONG),
    (("show", LONG), TOO_LONG),
    (("report", LONG), TOO_LONG),
    (("watch", LONG), TOO_LONG),
    (("compare", "fedavg", *FAST, "--html", LONG), TOO_LONG),
    (("repro", "fedpara-1", "--md", LONG), TOO_LONG),
    (("run", "fedavg", *FAST, "--out", "/dev/null/x"), "/dev/null/x: Not a directory"),
    (("flower-app", "fedavg", "/dev/null/x"), "Not a directory"),
    (("repro", "fedpara-1", "--md", "/dev/null/x.md"), "Not a directory"),
    (("resume", "/dev/null"), "/dev/null is not a run directory"),
    # unknown commands and options
    (("[/b]",), "No such command '[/b]'"),
    (("run", "fedavg", "--\x1b[31m"), r"No such option: --\x1b[31m"),
    (("run",), "Missing argument"),
    (("compare", "fedavg", "--seeds", "0"), "Invalid value for '--seeds'"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[visible(" ".join(words)[:50]) for words, _ in WORDS])
def test_invalid_words_are_refused(thinwire, tmp_path, words, message):
    assert message in refused(thinwire(*words))
    assert list(tmp_path.iterdir()) == []


FILES = [
    (b"x = " + b"[" * 5000 + b"]" * 5000, "bad.toml is nested more than 32 levels deep"),
    (b"rounds = " + b"[" * 40 + b"]" * 40, "bad.toml is nested more than 32 levels deep"),
    (b"x = " + b"{a=" * 3000, "bad.toml is nested more than 32 levels deep"),
    (b"[method]\nup = " + b'{kind="chain",parts=[' * 50 + b'"raw"' + b"]}" * 50, "nested more than 32 levels deep"),
    (b"seed = " + b"9" * 5000, "bad.toml holds a whole number of more than 64 bits"),
    (b"seed = " + b"9" * 4000, "bad.toml holds a whole number of more than 64 bits"),
    (b"seed = 0x" + b"f" * 5000, "bad.toml holds a whole number of more than 64 bits"),
    (b"name = '\xff'", "bad.toml is not UTF-8 (byte 9)"),
    (b"\xff\xfeseed", "bad.toml is not UTF-8 (byte 1)"),
    (b"name = 'a\x00b'", "bad.toml is not valid TOML"),
    (b'name = "\\u001b[31m"', r"it holds '\x1b'"),
    (b'name = "../../x"', "it begins with a dot"),
    (b"#" * (1 << 24) + b"\n", "a file of settings has at most 16,777,216"),
    (b"[task]\nkind = ['digits']", "task.kind must be of type str"),
    (b"on = { digits = 3 }", "on.digits must be a table"),
]


@pytest.mark.parametrize(("data", "message"), FILES, ids=[message for _, message in FILES])
def test_invalid_experiment_files_are_refused(thinwire, tmp_path, data, message):
    (tmp_path / "bad.toml").write_bytes(data)
    for verb in ("run", "check", "show"):
        assert message in refused(thinwire(verb, "bad.toml"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished and an unfinished run of one experiment."""
    folder = tmp_path_factory.mktemp("finished")
    wanted = resolve("fedavg", "digits", {"rounds": 2, "local.steps": 1, "checkpoint.every": 1})
    execute(wanted, folder / "run")
    shutil.copytree(folder / "run", folder / "cut")
    (folder / "cut/summary.json").unlink()
    return folder


DAMAGE = [
    ("run", "config.toml", b"\xff", ("resume", "show", "report", "watch"), "config.toml is not UTF-8"),
    ("run", "config.toml", b"x = " + b"[" * 5000, ("resume", "show", "report", "watch"), "nested more than 32 levels"),
    (
        "run",
        "summary.json",
        b"[" * 5000,
        ("resume", "show", "report", "watch"),
        "summary.json is damaged, or of another",
    ),
    ("run", "metrics.jsonl", b"{}\n", ("resume", "show", "report", "watch"), "metrics.jsonl is damaged, or of another"),
    ("run", "model.safetensors", b"x", ("resume", "show"), "model.safetensors is damaged, or of another"),
    ("run", "SHA256SUMS", b"\xff" * 99, ("resume", "show", "report", "watch"), "SHA256SUMS is damaged"),
    ("cut", "metrics.jsonl", b"", ("report", "watch"), "`thinwire resume cut` restores them"),
    (
        "cut",
        "checkpoints/round-000002.json",
        b"[" * 5000,
        ("resume", "export-peft"),
        "remove it to continue from round 1",
    ),
    ("cut", "checkpoints/round-000002.json", b'{"a": ' + b"9" * 5000, ("resume", "export-peft"), "thousands of digits"),
    ("cut", "checkpoints/round-000002.safetensors", b"x" * 99, ("resume", "export-peft"), "it has 99 bytes, not"),
    ("cut", "deployment.json", b"[" * 200_000, ("resume",), "deployment.json cannot be read (it is nested too deeply)"),
]


@pytest.mark.parametrize(("run", "file", "data", "verbs", "message"), DAMAGE, ids=[f"{d[1]}: {d[4]}" for d in DAMAGE])
def test_damaged_files_of_a_run_are_refused(thinwire, finished, tmp_path, run, file, data, verbs, message):
    shutil.copytree(finished / run, tmp_path / run)
    (tmp_path / run / file).write_bytes(data)
    more = {"export-peft": ("new",), "watch": ("--once",)}
    for verb in verbs:
        assert message in refused(thinwire(verb, run, *more.get(verb, ())))
    assert (tmp_path / run / file).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [run]


def test_a_run_without_metrics_is_resumed_with_a_note(thinwire, finished, tmp_path):
    shutil.copytree(finished / "cut", tmp_path / "cut")
    (tmp_path / "cut/metrics.jsonl").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, out, err = thinwire("resume", "cut", "-q", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2
    assert (
        err == "thinwire: note: cut/metrics.jsonl was damaged; its first 2 rounds were restored from the checkpoint\n"
    )


# -- the file system ---------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int):
    """Limit the size of files of this process, to simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 400, 1500, 5000, 15_000])
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
    RunFolder.open(tmp_path / "run").verify()


@pytest.mark.parametrize(
    "words",
    [
        ("flower-app", "fedavg", "new"),
        ("report", "run", "--html", "new"),
        ("report", "run", "--md", "new"),
        ("show", "run", "--plot", "new.svg"),
    ],
    ids=lambda words: words[0],
)
def test_files_that_cannot_be_written_completely_are_removed(thinwire, tmp_path, finished, words):
    shutil.copytree(finished / "run", tmp_path / "run")
    with files_of_at_most(500):
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
        ("flower-app", "fedavg", "closed/app"),
        ("report", "open/run", "--html", "closed/page.html"),
        ("repro", "fedpara-1", "--md", "closed/page.md"),
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


@pytest.mark.skipif(not shutil.which("unshare"), reason="mounting a disk needs Linux")
def test_a_full_disk_is_refused_in_one_line(tmp_path):
    (tmp_path / "disk").mkdir()
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, sys.executable]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
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


# -- names that are shown ----------------------------------------------------------------------------------------------


def test_brackets_in_a_name_are_not_markup(thinwire, tmp_path):
    name = "[bold]a[red] b|c `d` <i>"
    code, out, err = thinwire("run", "fedavg", *FAST[:-1], "--set", f"name={name}")
    assert (code, out.count(name), err.count(name)) == (0, 2, 2)
    assert thinwire("compare", "fedavg", *FAST, "--set", f"name={name}")[1].count(name) >= 1
    (run,) = (tmp_path / "runs").glob("*-digits-*")
    assert run.name.startswith(name)
    assert name in thinwire("watch", str(run), "--once")[1]
    assert name in thinwire("show", str(run))[1]
    assert thinwire("report", str(run), "--html", "page.html", "--md", "page.md")[0] == 0
    assert "<i>" not in (tmp_path / "page.html").read_text()
    row = next(line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| \\[bold"))
    assert row.startswith("| \\[bold\\]a\\[red\\] b\\|c \\`d\\` &lt;i> |")
    assert thinwire("flower-app", "fedavg", "app", "--set", f'name="{name}')[0] == 0


def test_names_in_run_directories_are_escaped(thinwire, finished, tmp_path):
    """A run directory may come from another person: its names are escaped."""
    bad = "\x1b[31m[/b]\nred\u202e"
    shutil.copytree(finished / "run", tmp_path / "run")
    table = RunFolder.open(tmp_path / "run").table
    table["task"]["kind"] = bad
    assert loads(dumps({**table, "name": bad}), "x")["name"] == bad
    (tmp_path / "run/config.toml").write_text(dumps({**table, "name": bad, "script": f"{bad}.py"}))
    for words in (("watch", "run", "--once"), ("report", "run", "--html", "page.html", "--md", "page.md")):
        code, out, err = thinwire(*words)
        assert code == 0, err
        assert "\x1b" not in out + err
        assert r"\x1b[31m[/b]\nred\u202e" in out
    for page in ("page.html", "page.md"):
        text = (tmp_path / page).read_text()
        assert text.replace("\n", "").isprintable()
        assert "x1b" in text
