"""The page and its tables: contents, HTML, equal output for equal runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

import thinwire as tw
from thinwire.reports.figures import Bar, Curve, bars, curves, svg

VOID = {"meta", "link"}


class Page(HTMLParser):
    """All elements of a page; checks that each is closed."""

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


def test_page_of_real_runs_is_complete(real_runs, tmp_path):
    table = tw.report([real_runs], tmp_path / "page.html", tmp_path / "page.md", targets=[0.1, 0.999])
    assert [row.label for row in table.rows] == ["fedavg", "mapo"]
    text, markdown = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not re.findall(r"https?://|url\((?!#)|@import", text)
    charts = [attrs for attrs in page.all("svg") if attrs.get("role") == "img"]
    assert len(charts) == 2 * 4, "wide and narrow: two curves, bars of the reached target, layers"
    assert text.count("</title>") == 1 + len(charts)
    assert "#0063a8" not in re.sub("(?s)<style>.*?</style>", "", text), "colors are variables of the theme"
    assert len(page.all("table")) == len(page.all("caption")) == 4
    for words in ("not reached", "95 % interval", "ideal", "at 2 Mbps"):
        assert words in text
        assert words in markdown


def test_equal_runs_give_equal_pages(real_runs, tmp_path):
    for name in ("a", "b"):
        tw.report(sorted(real_runs.iterdir()), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_totals_on_the_page_equal_the_summaries(real_runs, tmp_path):
    tw.report([real_runs], md=tmp_path / "page.md")
    rows = [row for row in (tmp_path / "page.md").read_text().splitlines() if row.startswith("| mapo |")]
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    summaries = [json.loads(file.read_text()) for file in real_runs.glob("mapo*/summary.json")]
    total = sum(summary["bytes_total"] for summary in summaries) / 2
    ideal = total - sum(summary["bytes_catchup"] for summary in summaries) / 2
    assert (cells[6], cells[7]) == (f"{total / 1000:.3g} kB", f"{ideal / 1000:.3g} kB")


def test_names_are_escaped(write_run, tmp_path):
    run = write_run('<script>alert("x")</script> & |')
    tw.report([run], tmp_path / "page.html", tmp_path / "page.md")
    page = Page((tmp_path / "page.html").read_text())
    assert page.all("script") == []
    assert "\\|" in (tmp_path / "page.md").read_text()


def test_notes_name_unfinished_runs_and_different_clients(write_run, tmp_path):
    runs = [write_run("a", finished=False), write_run("b")]
    config = runs[1] / "config.toml"
    config.write_text(config.read_text().replace("clients = 20", "clients = 99"))
    tw.report(runs, md=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "unfinished: a." in text
    assert "differ in task.clients" in text


def test_layers_are_drawn_if_they_were_recorded(write_run, tmp_path):
    layers = [{"layer": f"block{i}", "numbers": 9, "syncs": 3, "bytes_up": 100 * i} for i in range(20)]
    mixed = [{"layer": "head", "numbers": 9, "syncs": 3, "bytes_up": None}]
    tw.report([write_run("a", layers=layers), write_run("b", layers=mixed), write_run("c")], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "a: block19 (3 of 30)" in text
    assert "a: block4 (3 of 30)" in text
    assert "a: block3 (" not in text, "the 16 largest"
    assert "b: " not in text, "without bytes: `thinwire show` has the synchronizations"
    assert "c: " not in text


def test_a_task_without_accuracy_is_shown_by_its_loss(write_run, tmp_path):
    run = write_run("a")
    file = run / "metrics.jsonl"
    file.write_text(re.sub(r'"accuracy": [^,]+', '"accuracy": null', file.read_text()))
    tw.report([run], tmp_path / "page.html")
    assert "Test loss against bytes" in (tmp_path / "page.html").read_text()


def test_two_tasks_have_separate_chapters(write_run, real_runs, tmp_path):
    table = tw.report([write_run("fedavg"), real_runs], md=tmp_path / "page.md")
    assert [row.label for row in table.rows] == ["fedavg", "fedavg", "mapo"]
    text = (tmp_path / "page.md").read_text()
    assert "## letters: Accuracy and bytes" in text
    assert "## digits: Accuracy and bytes" in text
    found = {(row["task"], row["method"]) for row in table.plain()}
    assert found == {("letters", "fedavg"), ("digits", "fedavg"), ("digits", "mapo")}


def test_bad_input_is_refused(write_run, tmp_path):
    run = write_run("a")
    for given, message in (
        ({"targets": [80]}, "such as 0.8"),
        ({"html": tmp_path / "no/page.html"}, "no folder"),
    ):
        with pytest.raises(tw.ConfigError, match=message):
            tw.report([run], **given)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(tw.ConfigError, match="no finished round"):
        tw.report([run])


def drawn(figure):
    """The axes of a figure, and its SVG, which is the same every time."""
    assert svg(figure, "t") == svg(figure, "t")
    return figure.axes[0], Page(svg(figure, "t"))


def test_bars_are_to_scale_and_show_the_range_over_seeds():
    rows = [Bar("a", "4", [3, 0, 1], (2, 4)), Bar("b " * 60, "1", [1], series=9)]
    axes, _ = drawn(bars(rows, 340))
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([3 * widths[2], widths[2], widths[2]])
    assert widths[0] + widths[1] == pytest.approx(336)
    assert list(axes.lines[0].get_xdata()) == pytest.approx([169, 337])


@pytest.mark.parametrize("width", [1020, 340])
def test_curves_are_inside_the_axes_with_few_ticks(width):
    lines = [
        Curve("a $x$", [(10.0**i, 0.1 * i, 0.0, 1.0) for i in range(9)]),
        Curve("b", [(0.0, 5.0, 5.0, 5.0)]),
        Curve("c", []),
    ]
    axes, page = drawn(curves(lines, "x", "y", width, log_x=True, limits=(0.2, 0.7), marks={"m": 0.5, "n": 0.51}))
    assert min(axes.lines[0].get_ydata()) == 0.2
    assert max(axes.lines[0].get_ydata()) == 0.7
    assert len(axes.lines[1].get_xdata()) == 0, "a point at 0 has no place on a logarithmic axis"
    assert 2 <= len(axes.get_xticks()) <= width / 60
    assert [text.get_text() for text in axes.texts] == ["m"], "the other line is too close"
    assert page.all("clippath") == [] or len(page.ids) == len(set(page.ids))
    drawn(curves([], "x", "y", width, log_x=True))


def test_runs_are_plotted(real_runs, tmp_path):
    assert [line.get_label() for line in tw.report([real_runs]).plot().axes[0].lines] == ["fedavg", "mapo"]
    run = tw.load_run(next(real_runs.iterdir()))
    (line,) = run.plot().axes[0].lines
    assert line.get_xdata()[-1] == run.bytes_total
    assert line.get_ydata()[-1] == run.accuracy
    assert run.plot()._repr_svg_().startswith("<svg ")


CLIENTS = {"count": 20, "mean": 0.8, "worst_10": 0.31, "p10": 0.4, "p50": 0.85, "p90": 0.95}


def page_rows(text: str, start: str) -> dict[str, str]:
    """The cells of the row of a Markdown page that starts with a method, by column head."""
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith(f"| {start} |"))
    head = max(i for i in range(row) if lines[i + 1].startswith("| ---"))
    cells = [[cell.strip() for cell in lines[i].strip("|").split("|")] for i in (head, row)]
    return dict(zip(*cells, strict=True))


def test_metrics_and_client_quantiles_are_shown_if_recorded(write_run, tmp_path):
    for seed in (0, 1):
        write_run("fedavg", seed=seed, metrics={"accuracy": 0.9, "macro_f1": 0.7 + 0.1 * seed}, clients_eval=CLIENTS)
    write_run("plain")
    tw.report([tmp_path / "runs"], tmp_path / "page.html", tmp_path / "page.md")
    html, text = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    assert html.count("Macro_f1 against bytes, letters") == 3, "caption, and the titles of the wide and narrow chart"
    assert "Accuracy against bytes" not in html, "accuracy has a chart already, of test accuracy"
    row = page_rows(text, "fedavg")
    assert row["macro_f1"] == "0.75 ± 0.071"
    assert page_rows(text, "plain")["macro_f1"] == "-"
    assert "accuracy" not in row
    assert row["worst 10 % of clients"] == "31.00 ± 0.00"
    Page(html)


def test_pages_of_runs_without_metrics_have_no_empty_columns(write_run, tmp_path):
    tw.report([write_run("a", metrics={}), write_run("b")], md=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "of clients, %" not in text
    assert "p90" not in text
    assert list(page_rows(text, "a"))[:4] == ["method", "final %", "best %", "up"]


def test_comparisons_have_metrics_and_client_quantiles(write_run, tmp_path):
    for seed in (0, 1):
        write_run("fedavg", seed=seed, metrics={"accuracy": 0.9, "macro_f1": 0.7 + 0.1 * seed}, clients_eval=CLIENTS)
    write_run("plain")
    table = tw.report([tmp_path / "runs"])
    first, second = table.rows
    assert "metrics.accuracy" not in first.others
    assert first.others["metrics.macro_f1"].mean == pytest.approx(0.75)
    assert first.others["clients_eval.worst_10"].mean == 0.31
    assert second.others == {}
    plain = table.plain()[0]
    assert plain["final_metrics.macro_f1"]["mean"] == pytest.approx(0.75)
    assert plain["final_clients_eval.p50"]["mean"] == 0.85


@pytest.mark.parametrize("damaged", [None, 7, [], {"macro_f1": "high"}, {"macro_f1": None}, {"macro_f1": 10**400}])
def test_damaged_metrics_are_ignored(write_run, tmp_path, damaged):
    run = write_run("a", metrics={"macro_f1": 0.5}, clients_eval=CLIENTS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**line, "metrics": damaged, "clients_eval": damaged}) + "\n" for line in lines]
    (run / "metrics.jsonl").write_text("".join(lines))
    tw.report([run], md=tmp_path / "page.md")
    assert "macro_f1" not in (tmp_path / "page.md").read_text()


def test_the_page_has_the_worst_clients_first_and_says_how_many_there_are(write_run, tmp_path):
    run, without = write_run("fedavg"), write_run("mapo", folder="others")
    rows = [{"client": f"<site {i}>", "examples": 9, "accuracy": i / 30, "loss": 2.0} for i in range(30)]
    rows[3]["auroc"] = 0.5
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tw.report([run], tmp_path / "page.html", tmp_path / "page.md")
    html, text = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    assert "Accuracy of each client, letters" in html
    assert "fedavg: the 20 worst of 30 clients" in text
    assert "| client | examples | accuracy | loss | auroc |" in text
    shown = re.findall(r"site (\d+)", text)
    assert shown == [str(i) for i in range(20)]
    assert "<site" not in html
    tw.report([without], md=tmp_path / "page.md")
    assert "No client was measured by itself" in (tmp_path / "page.md").read_text()
