"""Numbers in the prose of the documentation are those of the linked tables, or name their source."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import published
from tests.claims import Table, claims, paragraphs, rows, runs_of
from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.spec import Spec
from thinwire.experiments.collapse import is_broken
from thinwire.experiments.presets import papers, preset
from thinwire.masks import PruneMask
from thinwire.optimizers import SGD, Adam
from thinwire.spaces.lora import LoRA
from thinwire.spaces.lowrank import LowRank

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#]*(?:results/[a-z0-9-]+|reproduction)\.md)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/methods").glob("*.md"))]
DATA = Path(os.environ.get("THINWIRE_DATA", "no data"))
DISCLOSED = re.compile(
    r"collapse|(?:at|above|to) chance|breaks? down|broke down|diverge"
)  # wording that discloses a failed run
SOURCE = re.compile(r"`(thinwire|python) |tests/\w+|paper's")  # the command, test or paper that a number is from


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_numbers_in_prose_are_in_the_linked_tables(page):
    """Accuracies and bytes are in the tables that their paragraph links to; others name their source."""
    generated = page.with_suffix(".json").exists()  # its tables come from that file, which another test checks
    for words in paragraphs(page.read_text()):
        named = re.match(r"\||#|!\[|\*\*.*?\*\* \(\d+ rounds", words)  # a table, or its caption
        made = [] if generated and named else claims(words)
        tables = [page.parent / target for target in re.findall(LINK, words)]
        if made and tables:
            known = Table(tables)
            missing = [" ".join(claim) for claim in made if not known.holds(*claim)]
            assert not missing, f"{page.name}: no run of {[t.stem for t in tables]} gives {missing}: {words[:90]}..."
        elif made:
            assert SOURCE.search(words), f"{page.name}: no source for {made}: {words[:90]}..."


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_statements_that_rely_on_failed_runs_disclose_it(page):
    """Paragraphs with values of failed runs, or about methods with failed runs, mention the failure."""
    for words in paragraphs(page.read_text()):
        tables = [page.parent / target for target in re.findall(LINK, words)]
        if not tables or words.startswith("|") or DISCLOSED.search(words):
            continue
        whole, sound = Table(tables), Table(tables, sound=True)
        shaky = [
            number
            for number, unit in claims(words)
            if unit == "%" and whole.by_runs(number) and not sound.by_runs(number)
        ]
        assert not shaky, f"{page.name}: {shaky} are values of failed runs: {words[:90]}..."
        for table in tables:
            for label, runs in rows(table) if table.stem != "reproduction" else ():
                if any(run["seed"] != 100 and is_broken(run) for run in runs):
                    named = all(part in words.lower() for part in label.lower().split(",")[0].split("+"))
                    assert not named, f"{page.name}: runs of {label} failed ({table.stem}): {words[:90]}..."


def test_verdicts_name_their_rows_and_disclose_failed_runs():
    text = (ROOT / "docs/reproduction.md").read_text()
    runs = runs_of(ROOT / "docs/reproduction.md")
    parts = {}  # the rows of each table and column of the page
    for part in re.split(r"^(?=## )", text, flags=re.M)[1:]:
        for column in re.split(r"^(?=\*\*.*?\*\* \(\d+ rounds)", part, flags=re.M)[1:]:
            table = column.split("The search, by")[0]
            cells = [line.strip("| \n").split(" | ") for line in table.splitlines() if line.startswith("| ")]
            of_column = {row[0]: [runs[name] for name in row[-1].split() if name in runs] for row in cells}
            parts[part[3:].split(":")[0], column[2:].split("**")[0]] = of_column
    for paper in papers():
        verdict = " ".join(paper["verdict"].split())
        assert paper["rests_on"], paper["name"]
        for rest in paper["rests_on"]:
            found = parts[preset("repro", rest["table"]).paper, rest["column"]]
            disclosed = rest.get("disclosed", {})
            assert disclosed.keys() <= set(rest["rows"])
            for row in rest["rows"]:
                assert found[row], f"{row} of {rest['table']} has no runs"
                failed = any(map(is_broken, found[row]))
                assert failed == (row in disclosed), f"{paper['name']}: {row}, {rest['column']}: failed: {failed}"
                assert disclosed.get(row, "") in verdict


def test_published_pages_are_reproduced_from_their_json_files(tmp_path):
    """Regenerating every page changes nothing, and every status follows from the curve of its run."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    chances = published.read_chance(ROOT / "docs")
    found = {
        page.stem: published.write_result(page, chances) for page in sorted((tmp_path / "docs/results").glob("*.md"))
    }
    found["reproduction"] = published.write_reproduction(tmp_path / "docs/reproduction.md", chances)
    written = [*(tmp_path / "docs/results").iterdir(), *(tmp_path / "docs").glob("reproduction.*")]
    for file in written:
        assert file.read_text() == (ROOT / file.relative_to(tmp_path)).read_text(), f"python {published.__file__}"
    assert published.broken_part(found).strip() in (ROOT / "docs/results.md").read_text()
    everything = [run for runs in found.values() for run in runs.values()]
    assert Counter(run["status"] for run in everything)["collapsed"], "the page has a table of these"
    for run in everything:
        if run["status"] == "collapsed":
            curve = {point[0]: point[-1] for point in run.get("curve") or run["accuracy"]}
            low = [value for number, value in curve.items() if number >= run["status_round"]]
            assert max(low) <= chances[run["task"]].ceiling < chances[run["task"]].learned < run["best_accuracy"]


def test_chance_levels_of_published_tasks_are_those_of_their_test_sets(tmp_path):
    known = published.read_chance(ROOT / "docs")
    published.write_chance(tmp_path / "chance.json", DATA if DATA.is_dir() else None, ("digits",))
    assert published.read_chance(tmp_path)["digits"] == known["digits"]
    for task in published.TASKS[1:]:
        if (DATA / published.data_of(task)).is_dir():
            published.write_chance(tmp_path / "chance.json", DATA, (task,))
            assert published.read_chance(tmp_path)[task] == known[task]


def test_share_of_the_rank_that_low_rank_keeps():
    """The shares in `docs/results.md`, for layers with a smaller side above ten."""
    kept = {}
    for kind in ("vgg16-gn", "cnn-cifar"):
        with torch.device("meta"):
            spec = Spec.of(dict(lookup("model", kind).make(classes=10).named_parameters()))
        shapes = {name: tuple(block.shape) for name, block in spec.shapes().items()}
        inner = {name: rank for name, rank in LowRank(like_gamma=0.1).ranks(spec).items() if min(shapes[name][:2]) > 10}
        shares = [100 * rank / min(shapes[name][:2]) for name, rank in inner.items() if "fc" not in name]
        kept[kind] = round(min(shares)), round(max(shares))
    assert kept == {"vgg16-gn": (17, 34), "cnn-cifar": (20, 31)}


def test_mean_step_length_with_momentum_that_is_reset():
    def moves(window):
        optimizer, state, total = SGD(1.0, momentum=0.9), None, 0.0
        state = optimizer.init({"w": torch.zeros(1)})
        for _ in range(window):
            change, state = optimizer.update({"w": torch.ones(1)}, state, {"w": torch.zeros(1)})
            total -= float(change["w"])
        return total / window

    assert (round(moves(6), 1), round(moves(24), 1), round(moves(3000))) == (3.0, 6.5, 10)
    page = (ROOT / "docs/results.md").read_text()
    assert f"{moves(6):.1f} and {moves(24):.1f} times the learning rate" in page
    assert f"by {moves(3000):.0f} times" in page


def test_magnitude_pruning_after_the_first_step_of_adam_removes_b():
    """The twelve 384 x 384 matrices of MiniLM at rank 16, at each server learning rate of SparseAdapter's row."""
    space = LoRA(rank=16, alpha=16.0)
    base = {f"layer.{i}.weight": torch.zeros(384, 384) for i in range(12)}
    start = space.init(base, space.basis(Spec.of(base), Key(0), "cpu"), Key(0))
    signs = {name: torch.where(Key(1).fold(name).normal(*block.shape) > 0, 1.0, -1.0) for name, block in start.items()}
    assert sum(block.numel() for name, block in start.items() if name.endswith("/b")) == 73_728
    for rate, most in ((0.003, 0), (0.01, 0), (0.03, 20)):
        optimizer = Adam(rate)
        change, _ = optimizer.update(signs, optimizer.init(signs), start)
        left = PruneMask(0.25).left(start, {name: start[name] + change[name] for name in start}, 1)
        assert sum(int(mask.sum()) for name, mask in left.items() if name.endswith("/b")) <= most, rate


def test_values_that_no_run_gives_are_detected():
    table = Table([ROOT / "docs/results/bytes-fashion.md"])
    assert table.holds("1.37", "MB")
    assert not table.holds("1.38", "MB")
    assert not table.holds("1.37", "kB")
    assert table.holds("80.50", "%")
    assert not table.holds("80.52", "%")
    ratios = Table([ROOT / "docs/results/mapo-fashion.md"])
    assert ratios.holds("95.3", "%")
    assert not ratios.holds("95.4", "%")
    assert claims("grew to 12.5 s; see `x = 80 %` and [a](b.md)") == []
    assert claims("81.7 ± 1.3 against 79.1 ± 0.3, then 80 % and 102 MB") == [
        ("80", "%"),
        ("102", "MB"),
        ("81.7", "%"),
        ("79.1", "%"),
    ]
