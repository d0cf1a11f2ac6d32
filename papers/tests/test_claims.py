"""Numbers in the prose of the documentation are those of the linked tables, or name their source."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from papers import published
from papers.archive import Archive, Runs
from papers.page import section
from papers.tables import load, names, papers, table_of
from papers.tests.claims import Table, claims, numbered, paragraphs, rows, statement_troubles, statements, tables_of
from papers.verdicts import STATEMENT, page_verdict
from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.spec import Spec
from thinwire.experiments.collapse import is_broken
from thinwire.masks import PruneMask
from thinwire.optimizers import SGD, Adam
from thinwire.spaces.lora import LoRA
from thinwire.spaces.lowrank import LowRank

ROOT = Path(__file__).parent.parent.parent
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
        named = re.match(
            r"\||#|!\[|\*\*.*?\*\* \(\d+ rounds|\*\*[^*]*\.\*\* ", words
        )  # a table, its caption, a verdict
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


def test_verdicts_are_carried_by_the_runs_of_the_page():
    """Every statement of every verdict is on the page, and agrees with the tables of the page."""
    text = (ROOT / "docs/reproduction.md").read_text()
    assert "No verdict from the runs" not in text
    assert statement_troubles(text) == []
    written = [len(STATEMENT.findall(paper["verdict"])) for paper in papers()]
    assert all(written)
    assert len(statements(text)) == sum(written), "a statement is missing on the page, or was changed"


def ahead_on_the_page() -> tuple[str, str, dict[str, str]]:
    """The page, a statement of the kind `A is N points ahead of B` on it, and the parts of the statement."""
    page = (ROOT / "docs/reproduction.md").read_text()
    found = next(match for _, match in statements(page) if match.groupdict().get("relation") == "ahead of")
    joined = re.compile(r"\s+".join(map(re.escape, found[0].split())))
    assert len(joined.findall(page)) == 1
    return joined.sub(lambda _: found[0], page), found[0], found.groupdict()


@pytest.mark.parametrize("change", ["row", "other row", "swapped", "direction", "level", "number", "value", "column"])
def test_changed_statements_are_detected(change):
    page, statement, parts = ahead_on_the_page()
    row, other = parts["row"], parts["other"]
    found = [labels for places in tables_of(page).values() for name, labels in places.items() if row in labels]
    third = next(label for label in found[0] if label not in (row, other))
    head, tail = statement.split(f" ahead of {other} ")
    changed = {
        "row": statement.replace(row, third, 1),
        "other row": f"{head} ahead of {third} {tail}",
        "swapped": f"{head.replace(row, other, 1)} ahead of {row} {tail}",
        "direction": f"{head} behind {other} {tail}",
        "level": f"{row} is level with {other} {tail}",
        "number": statement.replace(f"is {parts['gap']}", f"is {float(parts['gap']) + 1:.2f}"),
        "value": statement.replace(" against ", " against 1"),
        "column": f"{statement[:-1]} of another table)",
    }[change]
    assert changed != statement
    assert statement_troubles(page) == []
    assert statement_troubles(page.replace(statement, changed)), changed


@pytest.mark.parametrize("failed", ["3 of 3 collapsed", "1 of 3 at chance"])
def test_statements_about_rows_that_failed_are_detected(failed):
    page, _, parts = ahead_on_the_page()
    lines = [line for line in page.splitlines() if line.startswith(f"| {parts['row']} | ") and " ± " in line]
    for line in lines:
        cells = line.split(" | ")
        where = cells.index("-")  # no run failed
        page = page.replace(line, " | ".join([*cells[:where], failed, *cells[where + 1 :]]))
    assert any(parts["row"] in trouble for trouble in statement_troubles(page))


def test_verdicts_are_withheld_where_the_archive_does_not_carry_them(tmp_path):
    """Runs that collapsed, and the runs of two rows exchanged."""
    raw = next(one for paper in papers() for one in STATEMENT.findall(paper["verdict"]) if "; ahead of; " in one)
    name, column, row, _, other = raw.split("; ")
    archive = Archive.read(ROOT / "docs/reproduction.json")
    table = load(name, archive.tables[name]["scale"], archive.tables[name]["device"])
    mine = {key: run for key, run in archive.runs.items() if name in run["tables"]}
    paper, _, title = table.content["paper"].partition(", ")
    rows = tables_of((ROOT / "docs/reproduction.md").read_text())[paper][f"{title}, {column}"]
    ours, theirs = (rows[label].cells["runs"].split() for label in (row, other))

    def written(changed):
        found = section(table, Runs(tmp_path, Archive({}, {**mine, **changed})))
        return page_verdict(f"{{{raw}}}", {name: found.rows})

    assert written({}).startswith(f"{row} is ")
    collapsed = {key: {**mine[key], "status": "collapsed"} for key in ours}
    assert f"all runs of {row} collapsed" in written(collapsed)
    assert f"; 1 of {len(ours)} runs of {row} collapsed; " in written({ours[0]: collapsed[ours[0]]})
    pairs = [*zip(ours, theirs, strict=True), *zip(theirs, ours, strict=True)]
    swapped = {a: {**mine[b], "digest": mine[a]["digest"], "seed": mine[a]["seed"]} for a, b in pairs}
    assert re.search(r"not carried by the runs: .* it is [\d.]+ points behind", written(swapped))


COMPARING = re.compile(
    r"\b(ahead|behind|better|worse|higher|lower|fewer|faster|half|twice|times|points|within|beats|outperforms?|on par|"
    r"level|best|worst|fewest|accurate|collapses?d?|diverges?d?)\b|\d(?:\.\d+)? %",
)


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper["name"])
def test_text_around_statements_has_no_results(paper):
    """Sentences without a source compare nothing; statements do."""
    plain = STATEMENT.sub("", " ".join(paper["verdict"].split()))
    for sentence in re.split(r"(?<=[.;]) ", plain):
        sourced = re.search(r"`python -m papers |tests/\w+|docs/\w+", sentence)
        found = COMPARING.search(sentence)
        assert not found or sourced, f"{paper['name']}: {found[0]!r} without a source: {sentence}"


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper["name"])
def test_every_table_and_figure_of_a_paper_is_reproduced_or_listed(paper):
    tables = [table_of(name)["paper"] for name in names()]
    made = [title.split(", ", 1)[1] for title in tables if title.startswith(paper["name"])]
    known = {item for words in (*made, *paper["not_made"]) for item in numbered(words)}
    wanted = {(kind, i) for kind in ("Table", "Figure") for i in range(1, paper[f"{kind.lower()}s"] + 1)}
    assert known == wanted, f"neither a preset nor in not_made: {wanted - known}; unknown: {known - wanted}"
    whole = [item for words in paper["not_made"] if not re.search(r", [a-zA-Z]", words) for item in numbered(words)]
    both = set(whole) & {item for words in made for item in numbered(words)}
    assert not both, "it is reproduced"


@pytest.mark.parametrize("name", names())
def test_every_preset_states_its_differences(name):
    """A table that is trained has a text of its own; settings of a scale other than `paper` are all listed."""
    one = table_of(name)
    if one.get("counted"):
        return
    assert one.get("differs", "").strip(), name
    found = load(name, "gpu").content["differs"]
    for setting, value in one["scale"].get("gpu", {}).get("set", {}).items():
        if value != one["scale"].get("paper", {}).get("set", {}).get(setting, one["set"].get(setting)):
            assert setting.rsplit(".", 1)[-1] in found or setting in ("eval.every", "checkpoint.every", "cohort.size")


def test_published_pages_are_reproduced_from_their_json_files(tmp_path):
    """Regenerating every page of results changes nothing, and every status follows from the curve of its run."""
    shutil.copytree(ROOT / "docs/results", tmp_path / "results")
    chances = published.read_chance(ROOT / "docs")
    found = {page.stem: published.write_result(page, chances) for page in sorted((tmp_path / "results").glob("*.md"))}
    for file in (tmp_path / "results").iterdir():
        assert file.read_text() == (ROOT / "docs/results" / file.name).read_text(), "python -m papers published"
    found["reproduction"] = published.shown_runs(Archive.read(ROOT / "docs/reproduction.json"))
    assert published.broken_part(found).strip() in (ROOT / "docs/results.md").read_text()
    everything = [run for runs in found.values() for run in runs.values()]
    assert Counter(run["status"] for run in everything)["collapsed"], "the page has a table of these"
    for run in everything:
        if run["status"] == "collapsed":
            curve = {point[0]: point[-1] for point in run.get("curve") or run["accuracy"]}
            low = [value for number, value in curve.items() if number >= run["status_round"]]
            assert max(low) <= chances[run["task"]].ceiling < chances[run["task"]].learned < run["best_accuracy"]


@pytest.mark.parametrize("name", ["fedlama-4", "pfedpara-3"])  # of few runs; the slow test has all
def test_tables_of_papers_are_reproduced_from_the_archive(name):
    page = ROOT / "docs/reproduction.md"
    archive = Archive.read(page.with_suffix(".json"))
    options = archive.tables[name]
    found = section(load(name, options["scale"], options["device"], options["set"]), Runs(Path("none"), archive), page)
    assert found.text in page.read_text(), "python -m papers published"
    assert {key: archive.runs[key] for key in found.runs} == found.runs


@pytest.mark.slow
def test_the_page_of_reproduced_tables_is_reproduced_from_its_archive(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    published.write_reproduction(tmp_path / "docs/reproduction.md", published.read_chance(ROOT / "docs"))
    for file in (tmp_path / "docs").glob("reproduction*/*.svg"):
        assert file.read_text() == (ROOT / file.relative_to(tmp_path)).read_text(), file.name
    for file in (tmp_path / "docs").glob("reproduction.*"):
        assert file.read_text() == (ROOT / file.relative_to(tmp_path)).read_text(), "python -m papers published"


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
