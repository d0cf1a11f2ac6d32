"""What the documentation says is there, and runs."""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import deployment
from benchmarks.faults import FAULTS
from thinwire.core.registry import entries
from thinwire.run.presets import presets
from thinwire.run.repro import load
from thinwire.run.repro_page import section
from thinwire.run.units import human_bytes

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists() or target.startswith("http"), f"{page.name} links to {target}"


def test_the_architecture_names_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `") and ".py" in row]
    assert rows
    for row in rows:
        folder = ""
        for name in re.findall(r"`([a-z_/]+\.py)`", row.split("|")[1]):
            folder = name.rsplit("/", 1)[0] if "/" in name else folder
            assert (ROOT / "thinwire" / folder / name.rsplit("/", 1)[-1]).exists(), name


def test_every_method_is_documented():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/methods").glob("*.md"))
    for name in presets("methods"):
        assert f"`{name}`" in pages, f"no page speaks of `{name}`"


def test_every_part_has_one_line_that_is_a_sentence():
    for kind in (
        "space",
        "sketch",
        "schedule",
        "codec",
        "optimiser",
        "correction",
        "privacy",
        "weigh",
        "mask",
        "mean",
        "split",
    ):
        for entry in entries(kind).values():
            assert entry.doc.endswith("."), f"{kind} {entry.name}: {entry.doc!r}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


def test_the_part_of_the_documentation_is_a_part(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/parts.md").read_text(), re.S)
    file = tmp_path / "documented_part.py"
    file.write_text(code[1])
    sys.path.insert(0, str(tmp_path))
    try:
        __import__("documented_part")
    finally:
        sys.path.remove(str(tmp_path))
        from thinwire.core import registry

        registry._TABLE["space"].pop("scaled", None)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_every_number_of_a_result_has_its_runs(page):
    """Each run that a table names is in the file beside the page, and gives the means that the table shows."""
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
        for column, key in (("best accuracy %", "best_accuracy"), ("final own accuracy %", "final_own_accuracy")):
            if named and column in row:
                mean = statistics.fmean(100 * one[key] for one in named)
                assert row[column].split()[0] == f"{mean:.2f}"
                assert named[0]["best_accuracy"] == max(accuracy for _, accuracy in named[0]["accuracy"])
                seen += 1
    assert seen


def test_every_number_of_the_papers_tables_has_its_runs():
    """Means, differences and bytes are those of the runs beside the page; counts are counted again."""
    page, runs = ROOT / "docs/reproduction.md", json.loads((ROOT / "docs/reproduction.json").read_text())
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
    for one in runs.values():
        assert one["best_accuracy"] == max((accuracy for _, _, accuracy in one["curve"]), default=None)
        assert one["curve"][-1][1] <= one["bytes_total"]
    assert named <= runs.keys()
    pictures = {file.name for file in (ROOT / "docs/reproduction").glob("*.svg")}
    assert pictures == set(re.findall(r"\(reproduction/([^)]+)\)", text)), "pictures that no table shows, or missing"
    counted = [load(name, "gpu") for name, one in presets("repro").items() if one.table.get("counted")]
    assert counted
    for one in counted:
        if f"## {one.content['paper']}:" in text:
            assert section(one, Path()).text.strip() in text


def test_the_page_of_deployments_says_what_was_measured():
    """Each table is that of the numbers beside the page, and the numbers hold what the page promises."""
    page, found = (ROOT / "docs/deployment.md").read_text(), json.loads((ROOT / "docs/deployment.json").read_text())
    assert set(found) == set(deployment.COMMANDS)
    for what, entry in found.items():
        text = deployment.text_of(what, entry).strip()
        assert f"<!-- begin {what}: {deployment.command_of(what)} -->\n{text}\n<!-- end {what} -->" in page, what
    known = {what: entry["found"] for what, entry in found.items()}
    assert all(row["weights"] and row["bytes"] for row in known["same"].values())
    assert known["many"]["lost"] == known["simulated"]["lost"] == 0
    faults = known["faults"]
    assert abs(faults["accuracy"] - faults["quiet accuracy"]) <= 0.02
    assert {*FAULTS, "answer comes twice", "answer of an earlier round"} <= faults["struck"].keys()
    assert sum("server killed" in line for line in faults["havoc"]) == 3
    assert faults["turned away"] >= 1
