"""Command line: its output, and one-line errors with exit code 2 that leave no files behind."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from thinwire.cli.app import app
from thinwire.core.text import human_bytes
from thinwire.errors import ConfigError
from thinwire.runs.presets import LISTS

FAST = ("--rounds", "2", "--set", "local.epochs=1", "-q")


def error_line(result: tuple[int, str, str], code: int = 2) -> str:
    """The error message, which must be a single line on stderr."""
    found, out, err = result
    assert found == code, err
    assert out == ""
    assert err.startswith("thinwire: ")
    assert err.count("\n") == 1, err
    return err


def test_help_of_every_verb_has_an_example(thinwire):
    code, out, _ = thinwire("--help")
    assert code == 0
    for verb in get_command(app).commands:
        assert verb in out
        assert f"Example: thinwire {verb}" in thinwire(verb, "--help")[1]


def test_help_does_not_load_torch():
    code = "import sys; sys.argv = ['thinwire', '--help']\nfrom thinwire.cli.app import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    check = "assert not {'torch', 'numpy', 'sklearn', 'safetensors'} & set(sys.modules), 'heavy modules were loaded'"
    subprocess.run([sys.executable, "-c", code + check], check=True, stdout=subprocess.DEVNULL)


def test_run_prints_totals_or_json(thinwire, tmp_path):
    code, out, _ = thinwire("run", "fedavg", *FAST, "--out", "here")
    assert code == 0
    assert "final accuracy" in out
    code, out, _ = thinwire("run", "fedavg", *FAST, "--out", "here", "--json")
    assert json.loads(out) == json.loads((tmp_path / "here/summary.json").read_text())


def test_run_without_out_writes_under_runs(thinwire, tmp_path):
    thinwire("run", "fedsgd", *FAST)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("fedsgd-digits-s0-")


def test_progress_outside_a_terminal_is_plain_lines(thinwire):
    _, _, err = thinwire("run", "fedavg", "--rounds", "3", "--set", "local.epochs=1")
    lines = err.splitlines()
    assert len(lines) == 3
    assert all("round" in line and "accuracy" in line for line in lines)


def test_compare_prints_one_row_per_method_and_reuses_runs(thinwire):
    code, out, err = thinwire("compare", "fedavg", "fedsgd", "--seeds", "2", *FAST)
    assert code == 0
    assert err.endswith("wrote runs/compare.html\n")
    assert "Shared settings" in Path("runs/compare.html").read_text()
    assert "fedavg" in out
    assert "fedsgd" in out
    code, out, _ = thinwire("compare", "fedavg", "fedsgd", "--seeds", "2", *FAST, "--json")
    rows = json.loads(out)
    assert [row["method"] for row in rows] == ["fedavg", "fedsgd"]
    assert rows[0]["ratio"] == 1.0
    assert rows[0]["seeds"] == 2
    assert rows[0]["final"].keys() == {"mean", "std", "half"}


def test_compare_shows_both_totals(thinwire):
    fast = ("fedavg", "mapo", *FAST, "--cohort", "2")
    code, out, _ = thinwire("compare", *fast)
    assert code == 0
    head = next(line for line in out.splitlines() if "catch-up" in line)
    assert head.split()[-3:] == ["total", "ideal", "ratio"]
    rows = json.loads(thinwire("compare", *fast, "--json")[1])
    for row in rows:
        assert row["bytes_total_ideal"] == row["bytes_up"] + row["bytes_down"]
        assert row["bytes_total"] == row["bytes_total_honest"] == row["bytes_total_ideal"] + row["bytes_catchup"]
        assert row["ratio"] == rows[0]["bytes_total"] / row["bytes_total"]


def test_compare_report_and_watch_agree(thinwire, tmp_path, monkeypatch):
    code, out, _ = thinwire("compare", "fedavg", "fedsgd", *FAST, "--html", "a.html", "--json")
    rows = json.loads(out)
    assert code == 0
    assert rows[0]["seconds_by_link"]["2 Mbps"] > rows[0]["seconds_by_link"]["50 Mbps"] > 0
    code, out, err = thinwire("report", "runs", "--html", "b.html", "--md", "b.md", "--json")
    assert code == 0
    assert err == "wrote b.html\nwrote b.md\n"
    assert json.loads(out) == rows
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()
    assert "fedsgd" in thinwire("report", "runs")[1]
    run = str(next((tmp_path / "runs").glob("fedavg*")))
    status = json.loads(thinwire("watch", run, "--once", "--json")[1])
    assert (status["state"], status["bytes_total"]) == ("finished", rows[0]["bytes_total"])
    assert json.loads(thinwire("watch", run, "--json")[1]) == status
    assert "finished" in thinwire("watch", run)[1]


def test_watch_writes_a_file_for_prometheus(thinwire, write_run, tmp_path):
    run = write_run("fedavg", rounds=3, up=7)
    assert thinwire("watch", str(run), "--once", "--prometheus", "run.prom")[0] == 0
    text = (tmp_path / "run.prom").read_text()
    assert f'thinwire_bytes_up{{run="{run}"}} 21.0' in text
    assert f'thinwire_round{{run="{run}"}} 3.0' in text


def test_compare_without_methods_runs_a_selection(thinwire):
    rows = json.loads(thinwire("compare", "--rounds", "1", "--set", "local.epochs=1", "-q", "--json")[1])
    assert [row["method"] for row in rows][:4] == ["fedavg", "mapo", "fedpara", "sparse"]


@pytest.mark.parametrize("what", LISTS)
def test_list_items_have_name_description_and_paper(thinwire, what):
    items = json.loads(thinwire("list", what, "--json")[1])
    assert items
    for item in items:
        assert item["name"]
        assert item["about"]
        assert "paper" in item
    if what == "methods":
        assert items[0]["name"] in thinwire("list", what)[1]


def test_show_prints_a_file_that_run_accepts(thinwire, tmp_path):
    _, out, _ = thinwire("show", "fedavgm", "--on", "digits", "--rounds", "2")
    (tmp_path / "mine.toml").write_text(out)
    code, out, _ = thinwire("run", "mine.toml", "-q", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2


def test_show_of_a_run_prints_and_draws_synchronizations_of_layers(thinwire, tmp_path):
    options = ("--rounds", "6", "--set", "method.schedule.phi=2", "--set", "local.steps=2", "--out", "run", "-q")
    assert thinwire("run", "fedlama", *options)[0] == 0
    summary = json.loads(thinwire("show", "run", "--json")[1])
    syncs = {row["layer"]: row["syncs"] for row in summary["layers"]}
    assert set(syncs) == {"fc1", "head"}
    assert sorted(syncs.values())[0] == 4, "one layer was skipped in two of three windows"
    code, out, _ = thinwire("show", "run")
    assert code == 0
    assert all(f"{layer} " in out for layer in syncs)
    assert "seconds by link" in out
    assert thinwire("report", "run", "--html", "run.html")[0] == 0
    page = (tmp_path / "run.html").read_text()
    assert all(f"{row['layer']} ({row['syncs']} of 6)" in page for row in summary["layers"])
    assert all(human_bytes(row["bytes_up"]) in page for row in summary["layers"])


def test_check_prints_costs_without_training(thinwire, tmp_path):
    code, out, _ = thinwire("check", "fedavg", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["trainable"] == facts["parameters"] == 4810
    assert facts["bytes_up_per_client"] == 4 * 4810 + 12
    assert list(tmp_path.iterdir()) == []


def test_missing_and_corrupt_data_are_one_line(thinwire, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    args = ("run", "fedavg", "--on", "mnist", "--data-dir", str(data))
    assert "mnist" in error_line(thinwire(*args))
    folder = data / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(bytes(1000))[:-7])
    assert "-ubyte" in error_line(thinwire(*args))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.filterwarnings("ignore:client")
def test_diverged_run_names_the_round_and_keeps_the_last_checkpoint(thinwire, tmp_path):
    settings = (
        "--set",
        "checkpoint.every=1",
        "--set",
        "method.client_opt.weight_decay=10",
        "--set",
        "method.norm_bound=0",
    )
    line = error_line(thinwire("run", "fedavg", "--rounds", "60", *settings, "--out", "run", "-q"), code=3)
    assert "round" in line
    number = int(line.split("round ")[1].split(":")[0])
    assert number > 1
    assert (tmp_path / f"run/checkpoints/round-{number - 1:06d}.json").exists()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "diverged"
    assert not (tmp_path / "run/model.safetensors").exists()


def test_list_help_names_every_list(thinwire):
    text = thinwire("list", "--help")[1]
    for what in LISTS:
        assert what in text


@pytest.fixture
def loaded(monkeypatch) -> list[list[str]]:
    """The arguments of every call of `load_plugins`."""
    calls: list[list[str]] = []
    plugins = ModuleType("thinwire.runs.plugins")
    plugins.load_plugins = calls.append
    monkeypatch.setitem(sys.modules, "thinwire.runs.plugins", plugins)
    return calls


@pytest.mark.parametrize("verb", ["run", "compare", "check", "show", "list", "deploy"])
def test_import_is_accepted_before_and_after_the_verb(thinwire, loaded, verb):
    args = ("methods",) if verb == "list" else ("no-such-method",)
    thinwire("--import", "one", "--import", "two", verb, *args, "--import", "three")
    assert loaded == [["one", "two"], ["three"]]


def test_import_loads_modules_before_names_are_resolved(thinwire, monkeypatch):
    def load(modules: list[str]) -> None:
        raise ConfigError(f"cannot import {modules[0]}")

    plugins = ModuleType("thinwire.runs.plugins")
    plugins.load_plugins = load
    monkeypatch.setitem(sys.modules, "thinwire.runs.plugins", plugins)
    assert "cannot import absent" in error_line(thinwire("--import", "absent", "run", "no-such-method"))
    assert "cannot import absent" in error_line(thinwire("run", "no-such-method", "--import", "absent"))


def test_without_import_no_plugin_is_loaded(thinwire, loaded):
    assert thinwire("list", "tasks")[0] == 0
    assert loaded == []


def test_report_prints_metrics_and_client_quantiles(thinwire, write_run, tmp_path):
    clients = {"count": 20, "mean": 0.8, "worst_10": 0.31, "p10": 0.4, "p50": 0.85, "p90": 0.95}
    write_run("fedavg", metrics={"macro_f1": 0.75}, clients_eval=clients)
    write_run("plain")
    code, out, _ = thinwire("report", str(tmp_path / "runs"))
    assert code == 0
    head = next(line for line in out.splitlines() if "catch-up" in line)
    assert "best % macro_f1 worst 10 % of clients up" in " ".join(head.split())
    row = next(line for line in out.splitlines() if line.split()[:1] == ["fedavg"])
    assert row.split()[3:5] == ["0.75", "31.00"]
    assert next(line for line in out.splitlines() if line.split()[:1] == ["plain"]).split()[3:5] == ["-", "-"]
    rows = json.loads(thinwire("report", str(tmp_path / "runs"), "--json")[1])
    assert rows[0]["final_metrics.macro_f1"]["mean"] == 0.75
    assert "final_metrics.macro_f1" not in rows[1]


def test_a_page_that_cannot_be_written_is_a_note(thinwire, tmp_path):
    (tmp_path / "runs/compare.html").mkdir(parents=True)
    words = ["--on", "digits", "--rounds", "1", "--cohort", "2", "--out", str(tmp_path / "runs"), "-q"]
    code, out, err = thinwire("compare", "fedavg", *words)
    assert (code, len(list(tmp_path.glob("runs/fedavg-*/summary.json")))) == (0, 1)
    assert "fedavg" in out
    assert re.fullmatch(r"thinwire: note: the page \S+compare.html was not written \(.+\)\n", err)
    if Path("/proc/self").exists():  # root cannot write files there either
        code, out, err = thinwire("report", str(tmp_path / "runs"), "--html", "/proc/page.html")
        assert (code, "fedavg" in out) == (1, True)
        assert re.fullmatch(r"thinwire: note: the page /proc/page.html was not written \(.+\)\n", err)


def test_report_of_runs_without_metrics_has_the_usual_columns(thinwire, write_run, tmp_path):
    write_run("fedavg")
    out = thinwire("report", str(tmp_path / "runs"))[1]
    head = next(line for line in out.splitlines() if "catch-up" in line)
    assert head.split()[:7] == ["method", "final", "%", "best", "%", "up", "down"]
