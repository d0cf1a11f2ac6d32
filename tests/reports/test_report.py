"""The page and its tables: complete, self-contained, honest, equal for equal runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

import thinwire as tw
from thinwire.reports.charts import Bar, Curve, Frame, Row, bars, curves, dots
from thinwire.reports.report import summaries
from thinwire.reports.style import BACKGROUNDS, DARK, LIGHT

VOID = {"meta", "link"}


class Page(HTMLParser):
    """Every element, and that each one is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.ids = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def test_the_page_of_real_runs(real_runs, tmp_path):
    lines = tw.report([real_runs], tmp_path / "page.html", tmp_path / "page.md", targets=[0.1, 0.999])
    assert [line.label for line in lines] == ["fedavg", "mapo"]
    text, markdown = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not re.findall(r"https?://|url\(|@import", text)
    charts = [attrs for attrs in page.all("svg") if attrs.get("role") == "img"]
    assert (
        len(charts) == 2 * 6
    )  # wide and narrow: two curves, bars of the target that was reached, dots, layers of both
    for chart in charts:
        assert set(chart["aria-labelledby"].split()) <= set(page.ids)
    assert len(page.all("table")) == len(page.all("caption")) == 7
    for words in ("not reached", "95 % interval", "ideal", "energy", "50 / 3.125", "thinwire run mapo --on digits --"):
        assert words in text
        assert words in markdown
    assert "--seed 1" in text
    assert "torch" in text


def test_equal_runs_make_equal_pages(real_runs, tmp_path):
    for name in ("a", "b"):
        tw.report(sorted(real_runs.iterdir()), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_totals_on_the_page_are_those_of_the_summaries(real_runs, tmp_path):
    tw.report([real_runs], md=tmp_path / "page.md")
    row = next(row for row in (tmp_path / "page.md").read_text().splitlines() if row.startswith("| mapo |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    summaries = [json.loads(file.read_text()) for file in real_runs.glob("mapo*/summary.json")]
    total = sum(summary["bytes_total"] for summary in summaries) / 2
    ideal = total - sum(summary["bytes_catchup"] for summary in summaries) / 2
    assert (cells[3], cells[9]) == (f"{total / 1000:.3g} kB", f"{ideal / 1000:.3g} kB")
    assert cells[10:] == ["5", "2", "-"]


def test_names_cannot_break_the_page(write_run, tmp_path):
    run = write_run('<script>alert("x")</script> & |')
    tw.report([run], tmp_path / "page.html", tmp_path / "page.md")
    page = Page((tmp_path / "page.html").read_text())
    assert page.all("script") == []
    assert "\\|" in (tmp_path / "page.md").read_text()


def test_unfinished_runs_and_other_clients_are_pointed_out(write_run, tmp_path):
    runs = [write_run("a", finished=False), write_run("b")]
    config = runs[1] / "config.toml"
    config.write_text(config.read_text().replace("clients = 20", "clients = 99"))
    tw.report(runs, md=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "not finished yet: a." in text
    assert "differ in task.clients" in text


def test_layers_are_drawn_where_they_were_counted(write_run, tmp_path):
    layers = [{"layer": f"block{i}", "numbers": 9, "syncs": 3, "bytes_up": 100 * i} for i in range(20)]
    mixed = [{"layer": "head", "numbers": 9, "syncs": 3, "bytes_up": None}]
    tw.report([write_run("a", layers=layers), write_run("b", layers=mixed), write_run("c")], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "a: bytes up by layer, the 16 largest of 20" in text
    assert "block19 (3)" in text
    assert "block3 (" not in text
    assert "b: synchronisations by layer" in text
    assert "c: bytes" not in text
    assert "c: sync" not in text


def test_layers_that_tell_nothing_are_one_sentence_and_bytes_are_on_one_scale(write_run, tmp_path):
    rows = {"a": 1000, "b": 250, "c": None}
    runs = []
    for name, sent in rows.items():
        run = write_run(name, layers=[{"layer": "head", "numbers": 9, "syncs": 30, "bytes_up": sent}])
        summary = json.loads((run / "summary.json").read_text()) | {"rounds": 30}
        (run / "summary.json").write_text(json.dumps(summary))
        runs.append(run)
    tw.report(runs, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "c: every layer spoke in every round" in text
    assert "c: synchronisations by layer" not in text
    charts = [re.search(rf"{name}: bytes up by layer.*?<rect [^>]*width=\"([\d.]+)\"", text, re.S) for name in "ab"]
    assert float(charts[0][1]) == pytest.approx(4 * float(charts[1][1]), rel=0.01)


def test_bars_show_the_spread_over_seeds(write_run, tmp_path):
    for seed, up in ((0, 1000), (1, 3000)):
        write_run("a", seed=seed, up=up)
    tw.report([tmp_path / "runs"], tmp_path / "page.html", targets=[0.5])
    assert 'class="whisker"' in (tmp_path / "page.html").read_text()
    tw.report([tmp_path / "runs" / "a-s0"], tmp_path / "page.html", targets=[0.5])
    assert 'class="whisker"' not in (tmp_path / "page.html").read_text()


def test_a_task_without_accuracy_is_shown_by_its_loss(write_run, tmp_path):
    run = write_run("a")
    file = run / "metrics.jsonl"
    file.write_text(re.sub(r'"accuracy": [^,]+', '"accuracy": null', file.read_text()))
    tw.report([run], tmp_path / "page.html")
    assert "Training loss against bytes" in (tmp_path / "page.html").read_text()


def test_two_tasks_have_chapters_of_their_own(write_run, real_runs, tmp_path):
    lines = tw.report([write_run("fedavg"), real_runs], md=tmp_path / "page.md")
    assert [line.label for line in lines] == ["fedavg", "fedavg", "mapo"]
    text = (tmp_path / "page.md").read_text()
    assert "## letters: What accuracy cost" in text
    assert "## digits: What accuracy cost" in text
    assert {row["method"] for row in summaries(lines)} == {"letters: fedavg", "digits: fedavg", "digits: mapo"}


def test_bad_input_is_one_line(write_run, tmp_path):
    run = write_run("a")
    for given, says in (
        ({"targets": [80]}, "such as 0.8"),
        ({"compute": -1}, "compute"),
        ({"joules_per_megabyte": 0}, "more than 0"),
        ({"html": tmp_path / "no/page.html"}, "no folder"),
    ):
        with pytest.raises(tw.ConfigError, match=says):
            tw.report([run], **given)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(tw.ConfigError, match="no round"):
        tw.report([run])


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize(("colours", "back"), [(LIGHT, BACKGROUNDS[0]), (DARK, BACKGROUNDS[1])], ids=["light", "dark"])
def test_every_line_stands_out_from_its_background(colours, back):
    assert len(set(colours)) == 8
    for colour in colours:
        lights = sorted((luminance(colour), luminance(back)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, colour


def test_bars_are_in_proportion_and_curves_stay_inside():
    basis = Frame("t", "d", "x", "y", width=340, log_x=True)
    picture = bars([Bar("a", "4", 0, [(3, 1.0), (1, 0.0)]), Bar("b", "1", 1, [(1, 1.0)])], basis)
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', picture)]
    assert widths[0] == pytest.approx(3 * widths[2], abs=0.2)
    assert widths[0] + widths[1] == pytest.approx(4 * widths[2], abs=0.3)
    picture = curves([Curve("a", 0, [(10.0**i, 0.1 * i, 0.0, 1.0) for i in range(9)])], basis)
    path = re.search(r'class="line s0" d="M([^"]+)"', picture)[1]
    for x, y in (map(float, pair.split()) for pair in path.split("L")):
        assert 0 < x < 340
        assert 0 < y < basis.height
    assert "nothing to draw" in curves([], basis)
    assert "nothing to draw" in dots([Row("a", [])], basis)
