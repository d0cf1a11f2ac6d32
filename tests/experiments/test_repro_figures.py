"""Presets of figures and of further tables: rows that are alike, points at the right numbers, charts, costs."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.grid import Grid, metrics, summary
from thinwire.experiments.presets import presets
from thinwire.experiments.repro import Reproduction, load
from thinwire.reports.against_chart import against_chart
from thinwire.reports.measures import cost, measured
from thinwire.reports.repro_page import section

FIGURES = [name for name, one in presets("repro").items() if "against" in one.table]
MNIST_PARAMETERS = 11_274


def experiments(name: str, scale: str = "gpu"):
    """The cells of a table, each with the experiment of its first values."""
    found = load(name, scale)
    for number, cell in enumerate(found.grid.content["rows"]):
        first = {key: values[0] for key, values in cell.get("over", {}).items()}
        yield cell, found.grid.line(number, first, [0]).runs[0]


def test_there_are_presets_of_the_figures_of_three_papers():
    papers = Counter(presets("repro")[name].paper.split(",")[0] for name in FIGURES)
    assert papers == {"MAPA": 3, "MAPO": 3, "FLASC": 3}


@pytest.mark.parametrize("name", FIGURES)
def test_every_row_of_a_figure_is_a_point_of_a_series_or_a_line(name):
    for scale in ("quick", "gpu"):
        rows = load(name, scale).content["rows"]
        labels = [row["label"] for row in rows]
        assert len(set(labels)) == len(labels)
        points = [(row["series"], row["x"]) for row in rows if "x" in row]
        assert points
        assert len(set(points)) == len(points), "one value for each point"


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith("map")])
def test_the_position_of_a_point_is_the_number_of_its_parameters(name):
    rows = {row["label"]: row for row in load(name, "gpu").content["rows"]}
    for cell, experiment in experiments(name):
        if (x := rows[cell["label"]].get("x")) is None:
            continue
        space, method = experiment.method.space, experiment.method
        if isinstance(space, tw.MAPA | tw.MAPAX | tw.MAPO):
            sizes = space.sizes(MNIST_PARAMETERS)
            assert sizes.k * sizes.p == x
            assert ("frozen" in cell["label"]) == (space.redraw_every == 0)
        elif isinstance(method.sketch, tw.EvoFed):
            assert method.sketch.population * method.sketch.partitions == x
        else:
            assert int(method.up.density * MNIST_PARAMETERS + 1e-2) == x


@pytest.mark.parametrize("name", ["flasc-figure-5", "flasc-figure-8", "flasc-figure-10"])
def test_the_position_of_a_point_of_flasc_is_its_density_or_rank(name):
    rows = {row["label"]: row for row in load(name, "gpu").content["rows"]}
    for cell, experiment in experiments(name):
        row, method = rows[cell["label"]], experiment.method
        if "x" not in row:
            continue
        if name == "flasc-figure-5":
            masked = not isinstance(method.mask, tw.NoMask)
            assert row["x"] == (method.mask.density if masked else method.up.density)
            assert not masked or method.mask.by == "block"
            assert getattr(method.down, "density", row["x"]) == row["x"]
        else:
            space = method.space if isinstance(method.space, tw.LoRA) else method.next_stage.space
            assert (row["x"], space.scale) == (space.rank, 1.0)


@pytest.mark.parametrize("name", [name for name in presets("repro") if name.startswith("flasc-figure")])
def test_rows_of_flasc_train_alike(name):
    """One rate and momentum for clients, Adam at the server, adapters on query, key and value, whole messages."""
    trained = Counter()
    for cell, experiment in experiments(name):
        method = experiment.method
        trained[repr(method.client_opt), experiment.local, dict(experiment.task.options).get("data")] += 1
        assert isinstance(method.server_opt, tw.Adam)
        space = method.space if method.next_stage is None else method.next_stage.space
        if isinstance(space, tw.LoRA):
            assert space.target_modules == ("*query.weight", "*key.weight", "*value.weight"), cell["label"]
            assert space.modules_to_save == ("*classifier.*",)
    assert len(trained) == 1, trained
    ((opt, _, data),) = trained
    lr = 0.0005 if name in ("flasc-figure-9", "flasc-figure-10") else 0.001
    assert opt == repr(tw.SGD(lr, momentum=0.9))
    assert data == "20newsgroups-headers"


def test_methods_with_differential_privacy_train_alike():
    for figure in ("flasc-figure-9", "flasc-figure-10"):
        by_column: dict = {}
        for cell, experiment in experiments(figure):
            assert isinstance(experiment.method.privacy, tw.DP)
            by_column.setdefault(cell["column"], set()).add(experiment.method.privacy)
        assert all(len(found) == 1 for found in by_column.values())
    first, second = (resolve(name, "digits").method for name in ("dp-fedadam", "ddg"))
    assert second == first.replace(secure_aggregation=True)


def test_rows_of_fedlamas_further_tables_have_equal_steps_momentum_and_whole_windows():
    for name in ("fedlama-6", "fedlama-7", "fedlama-8"):
        for scale in ("gpu", "quick"):
            grid = load(name, scale).grid
            for share in (1.0, grid.tune.get("share", 1.0)):
                lines = [line.runs[0] for line in grid.lines([0], share)]
                steps = [one.rounds * one.local.steps for one in lines]
                assert max(steps) - min(steps) < 24, "up to rounding"
                assert all(one.rounds % getattr(one.method.schedule, "phi", 1) == 0 for one in lines)
            assert {one.method.opt_lifetime for one in lines} == {"run"}
            assert {one.method.client_opt.weight_decay_on for one in lines} == {"kernels"}


@pytest.mark.parametrize("name", ["fedpara-3", "fedpara-8", "fedpara-10", "fedpara-12", "fedpara-figure-8"])
def test_fedpara_at_scale_paper_has_its_regularizer_and_no_augmentation(name):
    for _, experiment in experiments(name, "paper"):
        method = experiment.method
        factorized = isinstance(method.space, tw.FedPara)
        assert method.penalty == (tw.Jacobian(1.0) if factorized else tw.Method().penalty)
        assert experiment.task.augment == "none"
        assert method.lr_schedule.tau == 0.992
        if factorized:
            assert "head.weight" in method.space.modules_to_save, "linear layers are dense"


def test_the_lstm_of_table_11_has_weight_norm_and_the_papers_settings():
    for _, experiment in experiments("fedpara-11", "paper"):
        assert dict(experiment.task.model.options)["weight_norm"] is True
        local, size = experiment.local, experiment.cohort.size
        assert (local.batch, local.epochs, local.steps, size) == (64, 1, 0, 16)


# -- charts and costs --------------------------------------------------------------------------------------------------

SETTINGS = {"task.clients": 8, "cohort.size": 4, "local.steps": 4, "engine.backend": "loop", "eval.every": 1}


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """A figure of two points and a line on digits, with its runs."""
    rows = [
        {"method": "fedavg", "label": "FedAvg"},
        {"method": "topk", "label": "1/2", "x": 0.5, "series": "top-k", "set": {"method.up.density": 0.5}},
        {"method": "topk", "label": "1/8", "x": 0.125, "series": "top-k", "set": {"method.up.density": 0.125}},
    ]
    content = {
        "paper": "FLASC, Figure 99",
        "about": "a test",
        "on": "digits",
        "rounds": 4,
        "seeds": [0],
        "set": SETTINGS,
        "against": {"x": "density", "log": True},
        "columns": [{"name": "digits", "cost": "MB to 50 % of the first"}],
        "rows": rows,
    }
    cells = [{**row, "column": "digits", "measure": "final_accuracy", "published": 0, "traffic": 0} for row in rows]
    found = Reproduction("flasc-figure-99", "gpu", content, Grid({**content, "rows": cells}))
    out = tmp_path_factory.mktemp("runs")
    for line in found.grid.final(out):
        execute(line.runs[0], default_folder(line.runs[0], out))
    return found, out


def test_a_figure_is_drawn_against_the_number_of_its_rows(figure):
    found, out = figure
    part = section(found, out, Path("page.md"))
    assert list(part.figures) == ["flasc-figure-99-digits.svg"]
    assert "![Accuracy against density, digits](page/flasc-figure-99-digits.svg)" in part.text
    chart = ElementTree.fromstring(part.figures["flasc-figure-99-digits.svg"])
    texts = " ".join(chart.itertext())
    finals = {line.label: 100 * summary(line.runs[0], out)["final_accuracy"] for line in found.grid.final(out)}
    assert f"top-k at 0.125: {finals['1/8']:.2f}; top-k at 0.5: {finals['1/2']:.2f}." in texts
    assert f"FedAvg {finals['FedAvg']:.2f}" in texts
    assert against_chart(found.content, "digits", "final accuracy %", {"FedAvg": [90.0], "1/2": [None]}) == ""


def test_the_cost_until_a_share_of_the_first_rows_accuracy(figure):
    found, out = figure
    lines = found.grid.final(out)
    goal = 0.5 * summary(lines[0].runs[0], out)["final_accuracy"]
    for line in lines:
        records, sent, up = metrics(line.runs[0], out), 0, 0
        for record in records:
            sent, up = sent + record["bytes_up"] + record["bytes_down"], up + record["bytes_up"]
            if record["accuracy"] >= goal:
                break
        assert record["accuracy"] >= goal
        assert cost("MB to 50 % of the first", line, lines, out) == pytest.approx(sent / 1e6)
        assert cost("MB up to 50 % of the first", line, lines, out) == pytest.approx(up / 1e6)
        assert cost("MB to 400 % of the first", line, lines, out) is None
    assert "cost as the paper counts, MB to 50 % of the first" in section(found, out).text
    with pytest.raises(ConfigError, match=r"cost must be one of bytes_up, .*, not 'MB to the first'"):
        cost("MB to the first", lines[0], lines, out)


def test_the_uploads_of_a_client_until_an_accuracy(figure):
    found, out = figure
    run = found.grid.final(out)[0].runs[0]
    rounds = measured("rounds to 0.5", run, out)
    records = metrics(run, out)[: int(rounds)]
    assert [record["accuracy"] >= 0.5 for record in records] == [False] * (len(records) - 1) + [True]
    assert measured("MB up a client to 0.5", run, out) == sum(r["bytes_up"] / r["clients"] for r in records) / 1e6
    assert measured("rounds to 0.5 of clients", run, out) is None, "its clients are not evaluated"


def test_rounds_and_uploads_of_table_5_are_of_the_runs_of_its_accuracies():
    runs, measures = {}, {}
    for cell, experiment in experiments("mapo-5"):
        runs.setdefault((cell["label"], cell["column"][:3]), set()).add(experiment.digest())
        measures[cell["label"], cell["column"]] = cell["measure"]
    assert all(len(digests) == 1 for digests in runs.values())
    assert measures["LoRA", "RTE, rounds to 80 %"] == "rounds to 0.8"
    assert measures["SA-LoRA", "RTE, rounds to 80 %"] == "rounds to 0.8 of clients", "B is private"
