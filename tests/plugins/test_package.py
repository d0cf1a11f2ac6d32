"""A plugin package, installed with pip, used without changing thinwire: list, check, run, compare, simulate, deploy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.package import PARTS, install, write_package

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (
        importlib.util.find_spec("pip")
        and (importlib.util.find_spec("hatchling") or importlib.util.find_spec("setuptools"))
    ),
    reason="needs pip, and hatchling or setuptools",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed plugin."""
    folder = tmp_path_factory.mktemp("plugin")
    return install(write_package(folder / "project"), folder / "site")


def call(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that finds the plugin."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def thinwire(site: Path, cwd: Path, *words: str) -> str:
    """The output of a command, which must succeed."""
    done = call(site, cwd, "-m", "thinwire", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


LISTED = {
    "codecs": "ternary",
    "parts": "ternary",
    "datasets": "stripes",
    "tasks": "stripes",
    "metrics": "error-rate",
    "methods": "ternary",
}


def test_parts_of_the_plugin_are_listed(site, tmp_path):
    script = "import json; from thinwire.runs.presets import catalog\n"
    script += f"print(json.dumps({{what: [row['name'] for row in catalog(what)] for what in {list(LISTED)}}}))"
    found = json.loads(call(site, tmp_path, "-c", script).stdout)
    for what, name in LISTED.items():
        assert name in found[what], what


@pytest.mark.slow
def test_a_run_uses_the_codec_and_the_dataset_of_the_plugin(site, tmp_path):
    (tmp_path / "my.toml").write_text(
        '[task]\nkind = "stripes"\n[method]\nup = { kind = "ternary", threshold = 0.4 }\n'
        '[eval]\nmetrics = ["error-rate"]\n'
    )
    facts = json.loads(thinwire(site, tmp_path, "check", "my.toml", "--json"))
    summary = json.loads(thinwire(site, tmp_path, "run", "my.toml", "--out", "run", "--json", "-q"))
    assert summary["bytes_up"] == facts["bytes_up_of_all_rounds"]
    assert (summary["task"], summary["rounds"]) == ("stripes", 3)
    assert summary["final_accuracy"] > 0.8
    assert summary["final_metrics"] == {"error-rate": pytest.approx(1 - summary["final_accuracy"])}
    assert "ternary" in thinwire(site, tmp_path, "show", "my.toml")
    assert "import" not in (tmp_path / "run/config.toml").read_text(), "an installed plugin needs no import"
    (tmp_path / "run/summary.json").unlink()
    assert json.loads(thinwire(site, tmp_path, "resume", "run", "--json", "-q"))["bytes_up"] == summary["bytes_up"]


def test_compare_uses_the_method_of_the_plugin_alone_and_joined(site, tmp_path):
    words = ("compare", "fedavg", "ternary", "fedprox+ternary", "--on", "stripes", "--json", "-q", "--out", "runs")
    words = (*words, "--set", 'eval.metrics=["error-rate"]')
    rows = {row["method"]: row for row in json.loads(thinwire(site, tmp_path, *words))}
    assert rows.keys() == {"fedavg", "ternary", "fedprox+ternary"}
    assert rows["ternary"]["bytes_total"] < rows["fedavg"]["bytes_total"]
    assert all("final_metrics.error-rate" in row for row in rows.values())


SCRIPT = """\
import json, torch
import thinwire as tw
from thinwire.core.registry import lookup

generator = torch.Generator().manual_seed(0)
clients = [(torch.randn(32, 4, generator=generator), torch.arange(32) % 2) for _ in range(3)]
more = {"rounds": 2, "seed": 3, "test": clients[0], "metrics": ["error-rate"]}
runs = [tw.simulate(torch.nn.Linear(4, 2), clients, method, **more) for method in METHODS]
assert all("error-rate" in run.history[-1].metrics for run in runs)
method = lookup("method", "ternary").make(threshold=0.1)
runs.append(tw.simulate(torch.nn.Linear(4, 2), clients, method, rounds=2, seed=3))
print(json.dumps([run.bytes_up for run in runs]))
"""


@pytest.mark.slow
def test_simulate_uses_the_method_of_the_plugin(site, tmp_path):
    (tmp_path / "my.toml").write_text('method = "ternary"\n')
    script = SCRIPT.replace("METHODS", "['fedavg', 'ternary', 'fedprox+ternary', 'my.toml']")
    done = call(site, tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    fedavg, *ternary = json.loads(done.stdout)
    assert len(set(ternary)) == 1
    assert ternary[0] < fedavg


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs flwr")
def test_a_deployment_uses_the_method_and_the_dataset_of_the_plugin(site, tmp_path):
    words = ("ternary", "--on", "stripes", "--rounds", "2", "--json", "-q", "--set", 'eval.metrics=["error-rate"]')
    simulated = json.loads(thinwire(site, tmp_path, "run", *words, "--clients", "2", "--cohort", "2", "--out", "run"))
    deployed = json.loads(thinwire(site, tmp_path, "deploy", *words, "--nodes", "2", "--out", "deployed"))
    assert deployed["bytes_up"] == simulated["bytes_up"]
    assert deployed["final_accuracy"] == simulated["final_accuracy"]
    assert deployed["final_metrics"] == simulated["final_metrics"]


# -- modules without an entry point ------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path) -> Path:
    """A folder with the same parts as a plain module, `my_parts`."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "my_parts.py").write_text(PARTS)
    return folder


@pytest.mark.slow
def test_import_on_the_command_line_is_recorded_for_resume(module, tmp_path):
    words = ("run", "ternary", "--on", "stripes", "--import", "my_parts", "--out", "run", "--json", "-q")
    summary = json.loads(thinwire(module, tmp_path, *words))
    assert 'import = ["my_parts"]' in (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/summary.json").unlink()
    assert json.loads(thinwire(module, tmp_path, "resume", "run", "--json", "-q"))["bytes_up"] == summary["bytes_up"]
    done = call(module, tmp_path, "-m", "thinwire", "run", "ternary", "--on", "digits", "-q")
    assert done.returncode == 2
    assert "unknown method 'ternary'" in done.stderr


@pytest.mark.slow
def test_import_in_a_file_is_used_by_run_and_simulate(module, tmp_path):
    text = 'import = ["my_parts"]\n[task]\nkind = "stripes"\n[method]\nup = "ternary"\n'
    (tmp_path / "my.toml").write_text(text)
    summary = json.loads(thinwire(module, tmp_path, "run", "my.toml", "--out", "run", "--json", "-q"))
    assert summary["task"] == "stripes"
    script = SCRIPT.replace("METHODS", "['my.toml', 'my.toml']")
    done = call(module, tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    script = "import thinwire as tw; tw.load_plugins(['my_parts']); print(tw.resolve('ternary', 'stripes').imports)"
    assert call(module, tmp_path, "-c", script).stdout == "('my_parts',)\n"


def test_a_missing_module_is_refused_in_one_line(tmp_path, request):
    code, out, err = request.getfixturevalue("thinwire")("run", "fedavg", "--import", "absent_parts", "-q")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is no module 'absent_parts'; install its package, add its folder to PYTHONPATH" in err
