"""Pages of runs with any objective: words, units, direction, targets, savings against the best FedAvg, sweeps."""

from __future__ import annotations

import json
import math
import re

import pytest

import thinwire as tw
from thinwire.metrics.objective import Objective
from thinwire.reports.figures import DARK, LIGHT, Curve, scale_limits
from thinwire.reports.rows import baseline_of, evaluations, group
from thinwire.reports.targets import choose_targets, cost_to_reach, saving
from thinwire.runs.records import read_run

R2, LOSS, PERPLEXITY = Objective("r2"), Objective("loss", False), Objective("perplexity", False)


@pytest.fixture
def ranked_run(write_run):
    """Write a run without accuracy whose objective goes from one value to another."""

    def write(name, objective, first, last, **more):
        path = write_run(name, **{"rounds": 20, **more})
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for i, line in enumerate(lines, 1):
            value = last + (first - last) * math.exp(-8 * i / len(lines))
            line["accuracy"] = None
            if objective.name == "loss":
                line["test_loss"] = value
            else:
                line["metrics"] = {objective.name: value}
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        entry = {"name": objective.name, "higher_is_better": objective.higher_is_better}
        change_summary(path, objective=entry)
        return path

    return write


def change_summary(path, **entries):
    file = path / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def page_of(tmp_path, **options):
    table = tw.report([tmp_path / "runs"], tmp_path / "page.html", tmp_path / "page.md", **options)
    return table, (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("objective", "first", "last", "side", "unit"),
    [
        (R2, -3.0, 0.45, "above", "r2"),
        (LOSS, 9000.0, 2900.0, "below", "test loss"),
        (PERPLEXITY, 900.0, 31.0, "below", "perplexity"),
    ],
    ids=["r2", "loss", "perplexity"],
)
def test_pages_have_the_words_and_numbers_of_the_objective(ranked_run, tmp_path, objective, first, last, side, unit):
    for seed in (0, 1):
        ranked_run("fedavg", objective, first, last + seed * 0.01, seed=seed, up=4000)
        ranked_run("thin", objective, first, last + seed * 0.01, seed=seed, up=1000)
    table, html, text = page_of(tmp_path)
    assert f"Fewest bytes to reach {unit} " in html
    assert re.search(
        r"thin, [\d.]+ kB in total, 4 times fewer than fedavg \([\d.]+ kB; 95 % interval over 2 shared", html
    )
    assert f"| method | final {unit} | best {unit} | up |" in text
    assert f"at or {side} it" in text
    assert ("Up and left" if objective.higher_is_better else "Down and left") in html
    assert f"{unit[:1].upper()}{unit[1:]} against bytes" in html
    for word in ("accuracy", "final %", "Accuracy"):
        assert word not in re.sub(r"FedPara.*|<style>.*?</style>", "", html, flags=re.S)
    shown = repr(table)
    assert f"final {unit}" in shown
    assert "%" not in shown
    assert table.plain()[0]["objective"]["name"] == objective.name


def test_targets_of_a_loss_are_reached_from_above(ranked_run, tmp_path):
    path = ranked_run("fedavg", LOSS, 10.0, 2.0)
    (only,) = group([read_run(path)])
    targets = choose_targets([only], only)
    assert targets == sorted(targets, reverse=True)
    cost = cost_to_reach(only, 2.5)
    values = evaluations(only.runs[0], "test_loss")
    assert cost.mean("rounds") == next(i for i, value in enumerate(values, 1) if value <= 2.5)
    assert only.best.mean == min(values)
    _, html, _ = page_of(tmp_path, targets=[2.5])
    assert "Bytes to reach test loss 2.5" in html
    with pytest.raises(tw.ConfigError, match="finite value"):
        page_of(tmp_path, targets=[math.nan])


def test_runs_with_different_objectives_are_not_on_one_axis(ranked_run, write_run, tmp_path):
    ranked_run("fedavg", R2, -1.0, 0.4)
    write_run("mapo")
    ranked_run("unfinished", R2, -1.0, 0.3)
    (tmp_path / "runs/unfinished-s0/summary.json").unlink()
    table, html, text = page_of(tmp_path)
    assert [one.objective.name for one in table.rows] == ["r2", "accuracy", "r2"]
    assert [[row.label for row in part.rows] for part in table.parts.values()] == [["fedavg", "unfinished"], ["mapo"]]
    assert [cells.caption for cells in table.cells()] == ["letters by r2", "letters by test accuracy"]
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert "## letters by r2: R2 and bytes" in text


def test_savings_are_against_the_best_fedavg_and_say_if_it_was_not_tuned(write_run, tmp_path):
    for rate, best, up in ((0.1, 0.6, 1000), (0.3, 0.9, 3000), (9.0, 0.3, 100)):
        for seed in (0, 1):
            write_run("fedavg", folder=f"runs{rate}", seed=seed, best=best, up=up, lr=rate)
    for seed in (0, 1):
        write_run("thin", folder="runs2", seed=seed, best=0.9, up=300)
    folders = [tmp_path / name for name in ("runs0.1", "runs0.3", "runs9.0", "runs2")]
    tw.report(folders, md=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert baseline_of(tw.report(folders).rows).label == "fedavg (lr 0.3)"
    assert "10 times fewer than fedavg (lr 0.3)" in text
    assert "one setting only" not in text
    assert {row["compared_with"] for row in tw.report(folders).plain()} == {"fedavg (lr 0.3)"}
    tw.report(folders[1::2], md=tmp_path / "page.md")
    untuned = "fedavg ran with one setting only and without a search, so a tuned fedavg may need fewer bytes."
    assert untuned in (tmp_path / "page.md").read_text()


def test_interval_of_savings():
    factor, text = saving({0: 400.0, 1: 440.0, 2: 360.0}, {0: 101.0, 1: 109.0, 2: 90.0})
    assert factor == pytest.approx(4.0)
    low, high = map(float, re.findall(r"3 shared seeds: ([\d.]+) to ([\d.]+) times$", text)[0])
    assert 3.5 < low < 4 < high < 4.5
    assert saving({0: 400.0, 1: 440.0}, {5: 101.0})[1] == "no interval, because they share fewer than two seeds"
    assert "which includes 1" in saving({0: 1.0, 1: 9.0}, {0: 2.0, 1: 3.0})[1]


def test_a_diverged_run_does_not_change_the_scale(ranked_run, tmp_path):
    ranked_run("fedavg", LOSS, 9.0, 2.0)
    path = ranked_run("wild", LOSS, 2.0, 1e12)
    change_summary(path, status="diverged", status_round=21, status_why="the loss is not finite", chance_accuracy=None)
    _, html, text = page_of(tmp_path, targets=[3.0])
    good, wild = ([(x, y * size, y * size, y * size) for x, y in enumerate((9.0, 3.0, 2.0))] for size in (1, 1e12))
    assert scale_limits([Curve("a", good), Curve("b", wild, failed=True)]) == (2.0, 9.0)
    assert "wild (diverged)" in html
    assert "Values outside the scale are drawn at its edge: wild (diverged)." in html
    assert "Never reached by wild." in html
    assert "wild, seed 0, diverged" in text


def test_methods_that_never_reached_a_target_are_listed_and_not_drawn(write_run, tmp_path):
    write_run("fedavg", best=0.9)
    write_run("slow", best=0.4)
    _, html, text = page_of(tmp_path, targets=[0.8])
    assert "Never reached by slow." in html
    assert "| slow | 80 % | not reached |" in text


def contrast(one, other):
    """The contrast of two colors by WCAG 2, from 1 to 21."""
    parts = [[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in (one, other)]
    linear = [[x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in part] for part in parts]
    low, high = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_have_enough_contrast(colors):
    """WCAG 2: 4.5 to 1 for text, 3 to 1 for lines that carry meaning."""
    for text in ("ink", "soft"):
        for under in ("page", "card", "note"):
            assert contrast(colors[text], colors[under]) >= 4.5, (text, under)
    assert len(set(colors.values())) == len(colors), "colors of figures become variables by their value"
    for i in range(8):
        assert contrast(colors[f"c{i}"], colors["card"]) >= 4.5
        assert contrast(colors[f"c{i}"], colors["note"]) >= 3
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
