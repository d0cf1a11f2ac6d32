"""Numbers in the prose of the documentation are those of the linked tables, or name their source."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from papers import published
from papers.archive import Archive
from papers.page import fix_after, without_old
from papers.tables import load, names, papers, table_of
from papers.tests.claims import FINAL, Table, claims, numbered, paragraphs, rows
from papers.verdicts import WORDS, Row, verdict
from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError
from thinwire.masks import PruneMask
from thinwire.optimizers import SGD, Adam
from thinwire.runs.collapse import is_broken
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
def test_what_a_run_ends_at_is_not_its_best(page):
    """Where a sentence says final, its accuracies are final ones, unless it also names the best."""
    for words in paragraphs(page.read_text()):
        tables = [page.parent / target for target in re.findall(LINK, words)]
        finals, known = (
            (Table(tables, sound=True, accuracies=FINAL), Table(tables, sound=True)) if tables else (None, None)
        )
        for sentence in re.split(r"(?<=[.;:]) ", words) if tables and not words.startswith("|") else ():
            if re.search(r"\b(ends?|ended) (?:at|with)\b|\bfinal\b", sentence) and "best" not in sentence:
                asked = [number for number, unit in claims(sentence) if unit == "%" and known.by_runs(number)]
                wrong = [number for number in asked if not finals.by_runs(number)]
                assert not wrong, f"{page.name}: {wrong} are best accuracies: {sentence}"


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


# -- verdicts on papers ------------------------------------------------------------------------------------------------

DONE = ["finished"] * 3


def row(*values: float, **options) -> Row:
    """Three runs with these best accuracies; the final ones are a point lower."""
    both = {"best": dict(enumerate(values)), "final": {seed: value - 1 for seed, value in enumerate(values)}}
    return Row(both, options.pop("statuses", DONE), **options)


ROWS = {
    "a": row(60.0, 62.0, 64.0, sent=1e6, published=61.5, cost=10.0),
    "b": row(50.0, 51.5, 54.5, sent=4e6, published=60.0),
    "c": row(59.0, 64.0, 62.0, statuses=["finished", "finished", "collapsed"]),
    "old": row(10.0, 10.0, 10.0, old="a fix"),
    "one": Row({"best": {0: 99.0}}, ["finished"]),
}
TABLES = {"t": {("IID", label): one for label, one in ROWS.items()}}


@pytest.mark.parametrize(
    ("statement", "word", "text"),
    [
        ("a; ahead of; b; best", "holds", "best 62.00 ± 2.00 against 52.00: +10.00 (+8.76 to +11.24)"),
        ("a; ahead of; b; final", "holds", "final 61.00 ± 2.00 against 51.00: +10.00 (+8.76 to +11.24)"),
        ("b; ahead of; a; best", "fails", "-10.00"),
        ("b; behind by at most 12; a; best", "holds", "-10.00"),
        ("a; ahead of; c; best", "level", "(1 of 3 collapsed)"),
        ("a; level with; c; best", "holds", "+0.33"),
        ("a; near the paper; best", "holds", "against 61.5: +0.50"),
        ("a; bytes of at most 30 %; b", "holds", "25 % at best 62.00 ± 2.00"),
        ("b; bytes of at most 45 %; a", "fails", "400 %"),
        ("a; cost of at most 9 %", "fails", "10 %"),
        ("b; cost of at most 9 %", "not run", "-"),
        ("c; learns", "fails", "1 of 3 collapsed"),
        ("old; ahead of; b; best", "not run", "older than a fix: a fix"),
        ("one; level with; a; best", "not run", "-"),
    ],
)
def test_a_verdict_is_one_word_by_the_interval_of_paired_differences(statement, word, text):
    found = verdict(f"t; IID; {statement}", TABLES)
    assert (found.word, text in found.text) == (word, True), found


@pytest.mark.parametrize(
    "statement", ["a; ahead of; b", "a; better than; b; best", "a; learns; best", "a; ahead of; best"]
)
def test_claims_that_do_not_say_which_accuracy_or_relation_are_refused(statement):
    with pytest.raises(ConfigError, match="a claim has a table"):
        verdict(f"t; IID; {statement}", TABLES)


PAGE = ROOT / "docs/reproduction.md"
CLAIMS = [(paper["name"], claim) for paper in papers() for claim in paper["claims"]]


def cells(claim: dict) -> list[str]:
    """The line of a claim on the page."""
    name = f"repro {claim['recipe'].partition(';')[0]} "
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    (found,) = [one for one in lines if one[0] == claim["claim"] and one[1] == claim["number"] and name in one[-1]]
    return found


@pytest.mark.parametrize(("paper", "claim"), CLAIMS, ids=lambda one: one if isinstance(one, str) else one["claim"])
def test_verdicts_on_the_page_are_those_of_their_intervals_and_of_runs_after_the_fixes(paper, claim):
    """The words again from the numbers on the page; no verdict rests on a run that is older than a fix of its row."""
    _, _, printed, ours, _, word, _ = cells(claim)
    assert word in WORDS
    for statement, text, said in ((claim["recipe"], printed, word), (claim.get("ours", ""), ours, ours.split(":")[0])):
        table, _, label, relation, *rest = (part.strip() for part in statement.split(";")) if statement else [""] * 4
        if found := re.search(r"\(([-+][\d.]+) to ([-+][\d.]+)\)", text):
            assert rest[-1] in text, "the claim and the page name the same accuracy"
            most = float(re.search(r"[\d.]+$", relation)[0]) if "at most" in relation else 0.0
            low, high = (float(one) + most for one in found.groups())
            tolerant = relation in ("level with", "near the paper")
            assert said == ("fails" if high < 0 else "holds" if low > 0 or tolerant else "level"), text
        if statement and said != "not run" and text != "-":
            named = {label, *rest[:1]}
            runs = Archive.read(ROOT / "papers/archive/tables.json").runs.values()
            mine = [run for run in runs if table in run["tables"] and run["method"] in named and run["rounds"]]
            assert not any(fix_after(table, run["method"], run["date"] or "") for run in mine), "made before a fix"


def test_runs_that_are_older_than_a_fix_are_made_again():
    archive = Archive.read(ROOT / "papers/archive/tables.json")
    again = [run for name, run in archive.runs.items() if name not in without_old(archive).runs]
    assert {run["method"] for run in again} <= {run["method"] for run in archive.runs.values()}
    for run in again:
        assert any(fix_after(table, run["method"], run["date"]) for table in run["tables"])
    made = [{**run, "date": "2100-01-01"} for run in again]
    assert without_old(Archive({}, {run["digest"]: run for run in made})).runs.keys() == {run["digest"] for run in made}


def test_prose_of_papers_is_short_and_the_page_has_every_preset():
    text = PAGE.read_text()
    for paper in papers():
        assert len(paper["prose"].split()) <= 120
        assert " ".join(paper["prose"].split()) in text
    assert all(f"\n| {name} | " in text for name in names())


COMPARING = re.compile(
    r"\b(ahead|behind|better|worse|higher|lower|fewer|faster|half|twice|times|points|within|beats|outperforms?|on par|"
    r"level|best|worst|fewest|accurate|collapses?d?|diverges?d?)\b|\d(?:\.\d+)? %",
)


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper["name"])
def test_prose_of_papers_has_no_results(paper):
    """Sentences without a source compare nothing; claims do."""
    for sentence in re.split(r"(?<=[.;]) ", " ".join(paper["prose"].split())):
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


def test_every_preset_states_its_differences():
    """A table that is trained has a text of its own; settings of a scale other than `paper` are all listed."""
    for name, one in ((name, table_of(name)) for name in names()):
        if one.get("counted"):
            continue
        assert one.get("differs", "").strip(), name
        found = load(name, "gpu").content["differs"]
        for setting, value in one["scale"].get("gpu", {}).get("set", {}).items():
            if value != one["scale"].get("paper", {}).get("set", {}).get(setting, one["set"].get(setting)):
                known = ("eval.every", "checkpoint.every", "cohort.size")
                assert setting.rsplit(".", 1)[-1] in found or setting in known, name


def test_published_pages_are_reproduced_from_their_json_files(tmp_path):
    """Regenerating every page of results changes nothing, and every status follows from the curve of its run."""
    shutil.copytree(ROOT / "docs/results", tmp_path / "results")
    chances = published.read_chance(ROOT / "docs")
    found = {page.stem: published.write_result(page, chances) for page in sorted((tmp_path / "results").glob("*.md"))}
    for file in (tmp_path / "results").iterdir():
        assert file.read_text() == (ROOT / "docs/results" / file.name).read_text(), "python -m papers published"
    found["reproduction"] = published.shown_runs(Archive.read(ROOT / "papers/archive/tables.json"))
    assert published.broken_part(found).strip() in (ROOT / "docs/results.md").read_text()
    everything = [run for runs in found.values() for run in runs.values()]
    assert Counter(run["status"] for run in everything)["collapsed"], "the page has a table of these"
    for run in everything:
        if run["status"] == "collapsed":
            curve = {point[0]: point[-1] for point in run.get("curve") or run["accuracy"]}
            low = [value for number, value in curve.items() if number >= run["status_round"]]
            assert max(low) <= chances[run["task"]].ceiling < chances[run["task"]].learned < run["best_accuracy"]


def test_the_pages_of_claims_and_of_tables_are_reproduced_from_their_archive(tmp_path):
    """Claims, tables and charts."""
    shutil.copytree(ROOT / "papers/archive", tmp_path / "archive")
    page, tables = tmp_path / "reproduction.md", tmp_path / "archive/tables.md"
    published.write_reproduction(page, tables, published.read_chance(ROOT / "docs"))
    assert page.read_text() == PAGE.read_text(), "python -m papers published"
    for file in (path for path in (tmp_path / "archive").rglob("*") if path.is_file()):
        texts = [path.read_text() for path in (file, ROOT / "papers" / file.relative_to(tmp_path))]
        if file.suffix == ".svg":  # versions of matplotlib place texts differently
            texts = [[*ElementTree.fromstring(text).itertext()] for text in texts]
        assert texts[0] == texts[1], "python -m papers published"


def test_the_chance_level_of_digits_is_that_of_its_test_set(tmp_path):
    known = published.read_chance(ROOT / "docs")
    published.write_chance(tmp_path / "chance.json", DATA if DATA.is_dir() else None, ("digits",))
    assert published.read_chance(tmp_path)["digits"] == known["digits"]


@pytest.mark.slow
def test_chance_levels_of_large_tasks_are_those_of_their_test_sets(tmp_path):
    known = published.read_chance(ROOT / "docs")
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
