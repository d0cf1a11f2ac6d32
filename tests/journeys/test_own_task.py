"""A fresh project with the files and commands of docs/your-task.md: own table, own model, five methods, own codec."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.own_code import forgotten
from thinwire.runs.records import read_run

PAGE = (Path(__file__).parents[2] / "docs/your-task.md").read_text()
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```\n", PAGE, re.S | re.M))
COMMANDS = [
    shlex.split(line)
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
    for line in block.splitlines()
    if not kind and line.startswith("thinwire ")
]


def command(*words: str) -> list[str]:
    """The command of the page that begins with these words, without `thinwire`."""
    (found,) = (one[1:] for one in COMMANDS if one[1 : 1 + len(words)] == list(words))
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder with the files of the page and the table that one of them writes."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_data.py")
    with forgotten():
        yield tmp_path


def test_five_methods_on_an_own_table_with_an_own_model_and_f1(project, thinwire):
    words = command("compare", "fedavg", "mapo", "thin", "topk+int8", "fedpara")
    code, out, err = thinwire(*words, "--json", "-q", "--rounds", "10")
    assert code in (0, 3), err  # 3: a method that ended at chance is a row of the table
    rows = {row["method"]: row for row in json.loads(out)}
    assert list(rows) == ["fedavg", "mapo", "thin", "topk+int8", "fedpara"]
    for path in (project / "runs").glob("*/config.toml"):
        run = read_run(path.parent)
        assert run.task == "my_task.py:task"
        assert run.table["task"]["kind"] == f"{project.resolve()}/my_task.py:task"
        assert (run.table["task"]["clients"], run.table["cohort"]["size"], len(run.records)) == (6, 6, 10)
        assert 0 <= run.records[-1]["metrics"]["f1"] <= 1
    final = [read_run(path.parent).records[-1] for path in (project / "runs").glob("fedavg-*/config.toml")]
    assert final[0]["accuracy"] > 0.8
    assert final[0]["metrics"]["f1"] > 0.7
    page = (project / "runs/compare.html").read_text()
    assert "my_task.py:task" in page
    assert "f1" in page


def test_the_other_commands_of_the_page(project, thinwire):
    code, out, err = thinwire(*command("check", "mapo"))
    assert code == 0, err
    assert "my_task.py:task" in out
    assert thinwire(*command("run", "mapo", "--on", "my_task.py:task"), "--rounds", "2", "-q")[0] in (0, 3)
    assert set(read_run(Path("mine")).records[-1]["metrics"]) == {"f1", "missed"}
    assert read_run(Path("mine")).table["task"]["hidden"] == 64
    assert thinwire(*command("report", "mine"))[0] == 0
    source = command("run", "fedavg", "--on", "my_source.py:visits")
    code, out, err = thinwire(*source, "--rounds", "2", "-q", "--out", "divided")
    assert code in (0, 3), err
    assert read_run(Path("divided")).table["task"]["clients"] == 8
    assert thinwire("show", "fedavg", "--on", "visits.toml")[0] == 0
    assert "visits.toml" in command("compare", "fedavg", "mapo", "--on")


def test_an_own_codec_by_import(project, thinwire):
    code, out, err = thinwire("list", "codecs", "--import", "codec.py")
    assert code == 0, err
    assert "two-bytes" in out
    code, _, err = thinwire(*command("run", "fedavg", "--on", "my_task.py:task", "--import"), "-q")
    assert code == 0, err
    run = read_run(Path("coded"))
    assert run.table["import"] == [f"{project.resolve()}/codec.py"]
    parameters = run.summary["parameters"]
    assert run.records[0]["bytes_up"] < 6 * (2 * parameters + 40)
    with forgotten():  # a new process imports the file that the run names
        assert thinwire("resume", "coded")[0] == 0
    (project / "codec.py").write_text("import thinwire as tw\ntw.register('codec', 'topk')(dict)\n")
    with forgotten():
        code, _, err = thinwire("list", "codecs", "--import", "codec.py")
    assert (code, err.count("\n")) == (2, 1)
    assert "codec.py, line 2: ValueError: codec 'topk' is already registered" in err
