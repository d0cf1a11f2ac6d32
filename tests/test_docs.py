"""Tests of the documentation: links, commands, Python blocks, plugins, and the values of tables."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import statistics
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.main import get_command

import thinwire as tw
from benchmarks.faults import deployment, kills
from benchmarks.faults.faults import FAULTS
from papers import message_sizes as costs
from papers.__main__ import app as papers_app
from papers.frontier import rows_of
from papers.page import section
from papers.tables import load, names, table_of
from tests.federation import records_of
from thinwire.cli.app import app
from thinwire.core import plugins, registry
from thinwire.core.registry import KINDS, entries
from thinwire.core.text import human_bytes
from thinwire.runs import plugins as experiment_plugins
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.runs.options import OPTIONS
from thinwire.runs.run import settings_of

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "CHANGELOG.md",
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]  # the first lists past changes


def test_links_resolve():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists() or target.startswith("http"), f"{page.name} links to {target}"


def test_the_architecture_names_all_folders_and_only_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "thinwire").glob("*/__init__.py")} | {"presets"}
    tree = text.split("```")[3]
    assert set(re.findall(r"\b([a-z]+)/(?=\s|$)", tree)) - {"thinwire", "datasets", "partitions"} == folders
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
        assert (ROOT / "thinwire" / name).exists() or (ROOT / name).exists(), name


def test_the_code_of_a_round_on_a_page_is_that_of_the_files():
    blocks = re.findall(r"```py\n# (\S+)\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)
    assert len(blocks) >= 3
    for name, block in blocks:
        code = (ROOT / name).read_text()
        position = 0
        for part in re.split(r"^ *\.\.\.\n", block, flags=re.M):
            position = code.find(part, position) + 1
            assert position, f"{name} does not contain (in this order):\n{part}"


FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```\n", re.S | re.M)  # a file of a plugin, and its contents


@pytest.fixture(autouse=True)
def unregistered():
    """Remove the parts that a page registers."""
    before = registry.foreign()
    yield
    registry.unregister(registry.foreign() - before)


def import_plugins(page, folder, monkeypatch):
    """Write the files of the plugins of a page and import them; the modules by package and name."""
    for module, name in ((plugins, "_imported"), (experiment_plugins, "_loaded")):
        monkeypatch.setattr(module, name, [])  # forgotten after the test
    packages = {}
    for name, content in FILE.findall(page.read_text()):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        if file.suffix == ".py":
            monkeypatch.syspath_prepend(str(file.parent))
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
            packages.setdefault(file.parent.name, {})[file.stem] = importlib.import_module(file.stem)
    return packages


METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))


def test_tests_named_by_pages_exist():
    named = {match for page in PAGES for match in re.findall(r"(tests/[a-z_/]+\.py)::(test_\w+)", page.read_text())}
    assert len(named) > 80
    for file in sorted({file for file, _ in named}):
        known = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        missing = {name for where, name in named if where == file} - known
        assert not missing, f"{file} has no {missing}"


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_costs_on_a_page_are_lengths_of_messages(page, every):
    """Exactly if the length does not depend on the values; else within a few percent, of the first of every so many."""
    described = costs.described(page.read_text())
    table = re.search(r"<!-- begin costs: .*? -->\n(.*?)<!-- end costs -->", page.read_text(), re.S)
    if not described:
        assert table is None
        return
    rows = {row.split("`")[1]: row for row in table[1].splitlines() if row.startswith("| `")}
    assert list(rows) == described
    plain = costs.cost("fedavg", measure=False)
    measured = [name for name, row in rows.items() if "~" in row][::every]
    for name, row in rows.items():
        found = costs.cost(name, measure=name in measured)
        assert (found is None or not found.exact) == ("~" in row), name
        if found and found.exact:
            assert row == costs.line(name, found, plain)
        elif found:
            up, down = (int(number.replace(",", "")) for number in re.findall(r"~ ([\d,]+)", row))
            assert (up, down) == (pytest.approx(found.up, rel=0.04), pytest.approx(found.down, rel=0.04)), name


VERBS = (
    *("run", "compare", "check", "show", "sweep", "tune", "deploy", "app"),
    *("repro", "frontier", "grid"),  # of papers
)


def commands(page):
    """Every command on a page: its program and its words."""
    text = page.read_text()
    fenced = [inside for kind, inside in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if not kind]
    shown = "".join(fenced).replace("\\\n", " ").splitlines()
    shown += [" ".join(code.split()) for code in re.findall(r"`((?:thinwire|python -m papers) [^`]+)`", text)]
    for line in shown:
        for command in re.split(r"&&|\s#|>", line):
            program = r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(thinwire|python -m papers)"
            if words := re.match(rf"{program} ((?:{'|'.join(VERBS)}) .*)", command.strip()):
                yield words[1], shlex.split(words[2])


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_are_valid(page, tmp_path, monkeypatch):
    """Options exist; methods, tasks and settings are known. Nothing is run."""
    monkeypatch.chdir(tmp_path)
    import_plugins(page, tmp_path, monkeypatch)
    for program, (verb, *words) in commands(page):
        verbs = get_command(app if program == "thinwire" else papers_app).commands
        given = verbs[verb].make_context(verb, list(words)).params
        rows = rows_of(given["rows"]) if given.get("rows") else []  # labels of rows of a frontier, or methods
        for name in given.get("methods") or [given.get("what"), *(row["method"] for row in rows)]:
            if name and not re.search(r"[A-Z./]", name):
                options = {key: value for key, value in given.items() if key in OPTIONS}
                on = None if (given.get("on") or "TASK").isupper() else given["on"]
                settings_of(name, on, {"set": given.get("set_"), **options})


def test_every_part_has_a_one_line_description():
    for kind in KINDS:
        for entry in entries(kind).values():
            assert entry.doc.endswith("."), f"{kind} {entry.name}: {entry.doc!r}"


LANGUAGE = ROOT / "examples/fine_tune_language_model.py"  # on a small checkpoint, below


# compare_on_your_data.py runs on a CSV file, below
@pytest.mark.parametrize("example", [ROOT / "examples/bring_your_model.py"], ids=lambda path: path.name)
def test_examples_run(example, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


def test_http_example_trains(capsys):
    runpy.run_path(str(ROOT / "examples/update_over_http.py"), run_name="__main__")
    said = capsys.readouterr().out
    size, error = map(float, re.fullmatch(r"(\d+) bytes an update instead of 20000; error ([\d.]+) %\n", said).groups())
    assert size < 20000 / 7
    assert error < 1


def test_language_example_runs_on_a_small_checkpoint(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.checkpoints import write_language_model

    monkeypatch.setenv("CHECKPOINT", str(write_language_model(tmp_path / "checkpoint")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(LANGUAGE)])
    runpy.run_path(str(LANGUAGE), run_name="__main__")
    assert "perplexity after round 1" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "fine-tuned").iterdir()} == {
        *("records.jsonl", "run", "page.html", "adapter", "model")
    }


def test_csv_example_writes_a_page(capsys, monkeypatch, tmp_path):
    """The CSV of the README: tensors with any number of channels, text labels, few clients."""
    lines = ["file,label,client"]
    for i in range(60):
        tensor = torch.randn(2, 9, 7) + (i % 3)
        name = f"{i}.pt" if i % 2 else f"{i}.npy"
        torch.save(tensor, tmp_path / name) if i % 2 else np.save(tmp_path / name, tensor.numpy())
        lines.append(f"{name},{('cat', 'dog', 'eel')[i % 3]},{('left', 'middle', 'right')[i % 7 % 3]}")
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    example = ROOT / "examples/compare_on_your_data.py"
    assert f"python examples/{example.name} your.csv" in (ROOT / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path / "mine.csv")])
    runpy.run_path(str(example), run_name="__main__")
    assert "open comparison/page.html" in capsys.readouterr().out
    page = Path("comparison/page.html").read_text()
    for words in ("fedavg", "top 10 %", "mapo", "3 clients, 3 sampled per round", "2 seeds", "Bytes to reach"):
        assert words in page
    assert "partition of the task; model Net with" in page
    tables = "\n".join(file.read_text() for file in Path("comparison/runs").glob("*/config.toml"))
    rates = re.findall(r"client_opt = \{.*?\blr = ([\d.]+)", tables)
    assert len(rates) == 6
    assert len(set(rates)) == 1, "the same learning rate for every method"


NEEDS_MORE = ("mlflow", "wandb", "peft", "checkpoint")  # blocks that need packages or files that are not installed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    """The blocks run in order, with a small model and its data. Files of plugins are tested below."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("attn", nn.Linear(16, 16))
    model.add_module("head", nn.Linear(16, 3))
    clients = [(torch.randn(12, 16), torch.randint(0, 3, (12,))) for _ in range(10)]
    names = {
        "__name__": "page",
        "tw": tw,
        "torch": torch,
        "nn": nn,
        "model": model,
        "clients": clients,
        "test": clients[0],
    }
    for block in re.findall(r"^```python\n(.*?)^```", FILE.sub("", page.read_text()), re.S | re.M):
        if not any(word in block for word in NEEDS_MORE):
            exec(compile(block, f"{page.name}: {block.splitlines()[0]}", "exec"), names)


def test_generated_sections_name_an_existing_program():
    found = [
        (page, mark)
        for page in PAGES
        for mark in re.findall(r"<!-- (begin|end) (\w+)(?:: (.*?))? -->", page.read_text())
    ]
    assert len(found) > 30
    for (page, (kind, name, command)), (other, (last, same, _)) in zip(found[::2], found[1::2], strict=True):
        assert (page, name, kind, last) == (other, same, "begin", "end")
        if verb := re.match(r"python -m papers ([a-z-]+)", command):
            assert verb[1] in get_command(papers_app).commands, command
        else:
            assert (ROOT / re.match(r"python (\S+\.py)", command)[1]).is_file(), command


def test_every_page_is_linked_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text()):
            if (linked := (page.parent / target).resolve()) not in seen and linked.exists():
                ahead.append(linked)
    missed = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")} - {
        page.relative_to(ROOT).as_posix() for page in seen
    }
    assert not missed, f"pages without a link: {missed}"


def test_plugins_of_the_page_meet_their_contracts(tmp_path, monkeypatch):
    """Both packages are complete: they import, pass their own tests, and train by name."""
    packages = import_plugins(ROOT / "docs/parts.md", tmp_path, monkeypatch)
    assert set(packages) == {"thinwire-ternary", "thinwire-rings"}
    for package, modules in packages.items():
        project = tomllib.loads((tmp_path / package / "pyproject.toml").read_text())["project"]
        (target,) = project["entry-points"]["thinwire.parts"].values()
        assert target in modules
        for name, test in ((name, test) for module in modules.values() for name, test in vars(module).items()):
            if name.startswith("test_"):
                test()
    codec = resolve("fedavg", "rings", {"method.up": "ternary", "rounds": 2})
    rows = records_of(codec.engine, build_job(codec))
    assert rows[-1].bytes_up < rows[-1].bytes_down / 10
    partition = build_job(resolve("mapo", "rings", {"task.partition.reverse": True})).task
    first = partition.train.targets[partition.clients.client(0)]
    assert set(first.tolist()) == {2}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_values_of_result_tables_are_those_of_their_runs(page):
    """Each run of a table is in the JSON file of the page, and gives the means in the table."""
    runs = json.loads(page.with_suffix(".json").read_text())
    lines = [line.strip("| \n").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    heads = [i for i, cells in enumerate(lines) if cells[0] == "method"]
    assert heads
    seen = 0
    for cells in lines[: heads[1] if len(heads) > 1 else None]:
        if cells[0] == "method":
            head = cells
            continue
        row = dict(zip(head, cells, strict=True))
        named = [] if row["runs"] == "-" else [runs[name] for name in row["runs"].split()]
        for key in ("best_accuracy", "final_accuracy", "final_client_accuracy"):
            column = f"{key.replace('_', ' ')} %"
            if named and column in row:
                mean = statistics.fmean(100 * one[key] for one in named)
                assert row[column].split()[0] == f"{mean:.2f}"
                assert named[0]["best_accuracy"] == max(accuracy for _, accuracy in named[0]["accuracy"])
                seen += 1
        for column, key in (("bytes up", "bytes_up"), ("catch-up", "bytes_catchup"), ("total", "bytes_total")):
            if named and column in row:
                assert row[column] == human_bytes(statistics.fmean(one[key] for one in named))
    assert seen


def test_values_of_reproduced_tables_are_those_of_their_runs():
    """Means, differences and bytes are those of the runs in the JSON file; parameter counts are computed again."""
    page, runs = (
        ROOT / "papers/archive/tables.md",
        json.loads((ROOT / "papers/archive/tables.json").read_text())["runs"],
    )
    text, named, head = page.read_text(), set(), [""]
    for line in text.splitlines():
        cells = line.strip("| \n").split(" | ")
        if cells[0] == "method":
            head = cells
        if not line.startswith("| ") or cells[0] == "method" or len(cells) != len(head) or head[-1] != "runs":
            continue
        row = dict(zip(head, cells, strict=True))
        mine = [] if row["runs"] == "-" else [runs[name] for name in row["runs"].split()]
        named |= set(row["runs"].split()) - {"-"}
        for key, cell in row.items():
            values = [one["values"].get(key.removeprefix("our ")) for one in mine] if key.startswith("our ") else []
            known = [value for value in values if value is not None]
            if known and cell != "-":
                assert cell.split()[0] == f"{statistics.fmean(known):.2f}", (row["method"], key)
                if row["difference"] != "-":
                    printed = float(row["paper's"])
                    assert row["difference"] == f"{statistics.fmean(known) - printed:+.2f}"
        if mine:
            assert row["seeds"].split() == [str(one["seed"]) for one in mine]
            assert row["honest bytes"] == human_bytes(statistics.fmean(one["bytes_total"] for one in mine))
    for one in (one for one in runs.values() if one["status"] != "diverged"):
        assert one["best_accuracy"] == max((accuracy for _, _, accuracy in one["curve"]), default=None)
        assert one["curve"][-1][1] <= one["bytes_total"]
    assert named <= runs.keys()
    charts = {file.name for file in (ROOT / "papers/archive/tables").glob("*.svg")}
    assert charts == set(re.findall(r"\(tables/([^)]+)\)", text)), "charts without a link, or missing"
    counted = [load(name, "gpu") for name in names() if table_of(name).get("counted")]
    assert counted
    for one in counted:
        if f"## {one.content['paper']}:" in text:
            assert section(one, Path()).text.strip() in text


def test_the_table_of_kills_is_that_of_its_measurement():
    page, found = (ROOT / "docs/operation.md").read_text(), json.loads((ROOT / "docs/operation.json").read_text())
    entry = found["kills"]
    text = kills.text_of(entry)
    assert f"<!-- begin kills: {kills.command_of(entry)} -->\n{text}\n<!-- end kills -->" in page


def test_tables_of_the_deployment_page_are_those_of_its_measurements():
    """Each table is generated from the JSON file, and the measurements meet the claims of the page."""
    page, found = (ROOT / "docs/deployment.md").read_text(), json.loads((ROOT / "docs/deployment.json").read_text())
    assert set(found) == set(deployment.COMMANDS)
    for what, entry in found.items():
        text = deployment.text_of(what, entry).strip()
        assert f"<!-- begin {what}: {deployment.command_of(what)} -->\n{text}\n<!-- end {what} -->" in page, what
    known = {what: entry["found"] for what, entry in found.items()}
    assert all(row["weights"] and row["bytes"] for row in known["same"].values())
    assert known["many"]["lost"] == known["simulated"]["lost"] == 0
    faults = known["faults"]
    assert abs(faults["accuracy"] - faults["accuracy without faults"]) <= 0.02
    assert {*FAULTS, "duplicate response", "response of an earlier round"} <= faults["message faults"].keys()
    assert sum("server killed" in line for line in faults["process faults"]) == 3
    assert faults["second servers refused"] >= 1
