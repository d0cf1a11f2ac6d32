"""Invalid input through the command line: one line, exit code 2, no partial files, no traceback."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest

from tests.bad_input.refusal import FAST, refused
from thinwire.core.text import visible
from thinwire.runs.run_directory import RunFolder
from thinwire.runs.toml import dumps, loads

LONG = "x" * 300
DEEP = "[" * 5000
DIGITS = "9" * 5000
TOO_LONG = "File name too long; use a shorter name"

WORDS = [
    # seeds and counts
    (("run", "fedavg", "--seed", "-1"), "seed must be from 0 to 2**64 - 1, not -1"),
    (("app", "fedavg", "new", "--seed", "-1"), "seed must be from 0"),
    (("run", "fedavg", "--seed", "9" * 30), "seed must be from 0"),
    (("run", "fedavg", "--seed", DIGITS), "Invalid value for '--seed'"),
    (("run", "fedavg", "--seed", "[/b]"), "Invalid value for '--seed'"),
    (("run", "fedavg", "--rounds", "1" + "0" * 10), "rounds must be at most 1,000,000,000"),
    (("run", "fedavg", "--clients", "-1"), "task.clients must be 0 or more, not -1"),
    (("tune", "flasc", "--over", "rank=1e999999999,2"), "method.space.rank must be of type int, not inf"),
    (("tune", "flasc", "--over", f"rank={DIGITS}"), "a whole number of more than 64 bits"),
    (("tune", "flasc", "--bytes", DIGITS), "at most 63 bits"),
    (("tune", "fedavg", "--rounds", "7"), "the last needs 8 rounds or more, not 7; write more rounds, or fewer"),
    (("tune", "fedavg", "--rates", "1"), "from 2 to 64 rates, not 1"),
    (("tune", "fedavg", "--over", "method.up.density=0.1,0.2"), "unknown key in method.up 'density'"),
    (("tune", "fedavg", "--bytes", "0"), "--bytes is 1 or more"),
    (("tune", "fedavg", "--validation-fraction", "0"), "never chosen by the test set; write --validation-fraction 0.1"),
    (("tune", "fedavg", "--validation-fraction", "0.001"), "too few to hold out"),
    (("tune", "fedavg", "--seed", "-1"), "seed must be from 0"),
    (("tune", "flasc", "--over", "rank=1,4", "--flasc-s"), "--flasc-s searches two settings with ascending values"),
    (("tune", "--bytes", "much"), "a number of bytes is written as 500MB"),
    (("tune", "fedavg", "mapo"), "several for a number of bytes; write --bytes 5MB"),
    (("compare", "fedavg", "--tune", "--tune-seed", "0"), "0, is among the seeds of the comparison"),
    (("compare", "fedavg", "--tune", "--tune-rates", "99"), "from 2 to 64 rates, not 99"),
    (("watch", ".", "--every", "inf"), "every must be above 0"),
    # settings
    (("run", "fedavg", "--set", f"rounds={DEEP}"), "a value of --set is nested more than 32 levels deep"),
    (("run", "fedavg", "--set", f"seed=0x{'f' * 5000}"), "a value of --set holds a whole number of more than 64 bits"),
    (("run", "fedavg", "--set", "a" + ".a" * 5000 + "=1"), "unknown key 'a'"),
    (("run", "fedavg", "--set", "method.client_opt.clip_norm=0"), "clip_norm must be above 0, not 0.0"),
    (("check", "fedavg", "--set", "method.server_opt.clip_norm=nan"), "clip_norm must be above 0, not nan"),
    (("run", "fedavg", "--set", "method.lr_schedule={kind='cosine', fraction=0}"), "must be above 0 and at most 1"),
    (("run", "fedavg", "--set", "method.lr_schedule={kind='warmup', fraction=1.5}"), "must be above 0 and at most 1"),
    (
        ("run", "fedavg", "--rounds", "100", "--set", "method.lr_schedule={kind='cosine', rounds=500}"),
        "longer than the run: a cosine of 500 rounds, but the run has 100",
    ),
    (("run", ""), "the name of the method is empty"),
    (("run", "fedavg", "--on", ""), "unknown task ''"),
    (("run", LONG * 30), "unknown method 'xxx"),
    (("list", LONG * 30), "unknown list 'xxx"),
    # names
    (("run", "fedavg", "--set", "name=../x"), "name '../x' cannot be used: it begins with a dot"),
    (("run", "fedavg", "--set", "name=/abs"), "name '/abs' cannot be used: it holds '/'"),
    (("run", "fedavg", "--set", "name=a\x1b[31m"), r"it holds '\x1b'"),
    (("run", "fedavg", "--set", "name=\udcff"), r"it holds '\udcff'"),
    (("run", "fedavg", "--set", f"name={LONG}"), "it has 300 bytes, more than 120"),
    (("run", "fedavg", "--set", "name="), "it is empty"),
    # paths
    (("run", f"{LONG}.toml"), TOO_LONG),
    (("run", "fedavg", *FAST, "--out", LONG), TOO_LONG),
    (("resume", LONG), TOO_LONG),
    (("app", "fedavg", LONG), TOO_LONG),
    (("report", LONG), TOO_LONG),
    (("compare", "fedavg", *FAST, "--html", LONG), TOO_LONG),
    (("run", "fedavg", *FAST, "--out", "/dev/null/x"), "/dev/null/x: Not a directory"),
    (("app", "fedavg", "/dev/null/x"), "Not a directory"),
    (("resume", "/dev/null"), "/dev/null is not a run directory"),
    # unknown commands and options
    (("[/b]",), "No such command '[/b]'"),
    (("run", "fedavg", "--\x1b[31m"), r"No such option: --\x1b[31m"),
    (("run",), "Missing argument"),
    (("compare", "fedavg", "--seeds", "0"), "seeds must be 1 or more, not 0"),
    # what does not fit, and misspelled names
    (("run", "fedavg", "--on", "digit"), "did you mean 'digits'"),
    (("run", "fedavg", "--set", "method.client_op.lr=1"), "did you mean 'client_opt'"),
    (("run", "fedavg", "--set", "oops"), "key=value"),
    (("run", "fedavg", "--rounds", "0"), "rounds must be 1 or more"),
    (("list", "method"), "did you mean 'methods'"),
    (("runn", "fedavg"), "No such command 'runn'"),
    (("run", "fedavg", "--round", "3"), "`thinwire run --help`"),
    (("compare", "fedavg", "mapoo"), "unknown method 'mapoo'"),
    (("compare", "fedavg", "--html", "no/page.html"), "there is no folder no"),
    (("compare", "fedavg", "--html", "page.html", "--target", "80"), "such as 0.8"),
    (("run", "fedavg", "--log", "tensorbord"), "did you mean 'tensorboard'"),
    (("check", "fedavg", "--set", "method.schedule.private=['nothing*']"), "matches no block"),
    (("check", "fedlama", "--set", "method.space.kind=mapo"), "redraw_every = 0"),
    (("run", "fedavg", "--set", "task.model=cnn2"), "28"),
    (("report", "nowhere"), "not a run directory"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[visible(" ".join(words)[:50]) for words, _ in WORDS])
def test_invalid_words_are_refused(thinwire, tmp_path, words, message):
    assert message in refused(thinwire(*words))
    assert list(tmp_path.iterdir()) == []


FILES = [
    (b"x = " + b"[" * 5000 + b"]" * 5000, "bad.toml is nested more than 32 levels deep"),
    (b"x = " + b"{a=" * 3000, "bad.toml is nested more than 32 levels deep"),
    (b"[method]\nup = " + b'{kind="chain",parts=[' * 50 + b'"raw"' + b"]}" * 50, "nested more than 32 levels deep"),
    (b"seed = " + b"9" * 5000, "bad.toml holds a whole number of more than 64 bits"),
    (b"seed = 0x" + b"f" * 5000, "bad.toml holds a whole number of more than 64 bits"),
    (b"name = '\xff'", "bad.toml is not UTF-8 (byte 9)"),
    (b"\xff\xfeseed", "bad.toml is not UTF-8 (byte 1)"),
    (b"name = 'a\x00b'", "bad.toml is not valid TOML"),
    (b'name = "\\u001b[31m"', r"it holds '\x1b'"),
    (b'name = "../../x"', "it begins with a dot"),
    (b"#" * (1 << 24) + b"\n", "a file of settings has at most 16,777,216"),
    (b"[task]\nkind = ['digits']", "task.kind must be of type str"),
]


@pytest.mark.parametrize(("data", "message"), FILES, ids=[message for _, message in FILES])
def test_invalid_experiment_files_are_refused(thinwire, tmp_path, data, message):
    (tmp_path / "bad.toml").write_bytes(data)
    for verb in ("run", "show"):
        assert message in refused(thinwire(verb, "bad.toml"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


DAMAGE = [
    ("run", "config.toml", b"\xff", ("resume", "show", "report", "watch"), "config.toml is not UTF-8"),
    ("run", "config.toml", b"x = " + b"[" * 5000, ("resume", "show", "report", "watch"), "nested more than 32 levels"),
    (
        "run",
        "summary.json",
        b"[" * 5000,
        ("resume", "show"),
        "summary.json is damaged, missing, or of another",
    ),
    ("run", "summary.json", b"[" * 5000, ("report", "watch"), "summary.json cannot be read (it is nested too deeply)"),
    ("run", "metrics.jsonl", b"{}\n", ("resume", "show"), "metrics.jsonl is damaged, missing, or of another"),
    ("run", "model.safetensors", b"x", ("resume", "show"), "model.safetensors is damaged, missing, or of another"),
    ("run", "SHA256SUMS", b"\xff" * 99, ("resume", "show"), "its SHA-256 is not the one in run/SHA256SUMS"),
    (
        "cut",
        "checkpoints/round-000002.json",
        b"[" * 5000,
        ("resume", "export"),
        "remove it to continue from round 1",
    ),
    ("cut", "checkpoints/round-000002.json", b'{"a": ' + b"9" * 5000, ("resume", "export"), "integer string"),
    (
        "cut",
        "checkpoints/round-000002.safetensors",
        b"x" * 99,
        ("resume", "export"),
        "its SHA-256 does not match; remove it",
    ),
    ("cut", "deployment.json", b"[" * 200_000, ("resume",), "deployment.json cannot be read (it is nested too deeply)"),
]


@pytest.mark.parametrize(("run", "file", "data", "verbs", "message"), DAMAGE, ids=[f"{d[1]}: {d[4]}" for d in DAMAGE])
def test_damaged_files_of_a_run_are_refused(thinwire, finished, tmp_path, run, file, data, verbs, message):
    shutil.copytree(finished / run, tmp_path / run)
    (tmp_path / run / file).write_bytes(data)
    more = {"export": ("new",), "watch": ("--once",)}
    for verb in verbs:
        assert message in refused(thinwire(verb, run, *more.get(verb, ())))
    assert (tmp_path / run / file).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [run]


def test_a_run_without_metrics_is_resumed(thinwire, finished, tmp_path):
    shutil.copytree(finished / "cut", tmp_path / "cut")
    (tmp_path / "cut/metrics.jsonl").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, out, err = thinwire("resume", "cut", "-q", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["rounds"] == 2


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
    assert thinwire("app", "fedavg", "app", "--set", f'name="{name}')[0] == 0


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
