"""Presets of tables and figures: all are valid, rows are alike, and points are at the right numbers."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import thinwire as tw
from papers.tables import SCALES, load, names, table_of
from thinwire.errors import ConfigError, UnknownName
from thinwire.runs.check import check
from thinwire.runs.config import digest, resolve


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_every_table_loads_at_every_scale(name, scale) -> None:
    found = load(name, scale)
    cells = found.grid.content["rows"]
    if found.content.get("counted"):
        assert not cells
        return
    assert len(cells) == len(found.content["columns"]) * len(found.content["rows"]) > 0
    assert all(isinstance(cell["published"], int | float) for cell in cells)
    firsts = [{key: values[0] for key, values in row.get("over", {}).items()} for row in cells]
    lines = [found.grid.line(number, chosen, [0]) for number, chosen in enumerate(firsts)]
    assert all(line.runs for line in lines)
    if scale != "quick":
        seeds = [cell.get("seeds", found.content["seeds"]) for cell in cells]
        assert statistics.median(map(len, seeds)) >= 3, "a table has at least three seeds"
        if not found.grid.tune:
            assert "there is no search" in " ".join(found.content["differs"].split()), "a table without one says so"
            return
        searched = found.grid.tune["seeds"]
        assert len(searched) == 1
        assert not any(set(searched) & set(final) for final in seeds), "the search uses other seeds"


@pytest.mark.parametrize("name", ["fedlama-1", "fedlama-4", "fedlama-6", "fedlama-7", "fedlama-8"])
def test_rows_of_fedlama_have_equal_steps_and_whole_windows(name) -> None:
    for scale in SCALES:
        grid = load(name, scale).grid
        for share in (1.0, grid.tune.get("share", 1.0)):
            runs = [line.runs[0] for line in grid.lines([0], share)]
            steps = [one.rounds * one.local.steps for one in runs]
            assert max(steps) - min(steps) < 24, "up to rounding"
        runs = [line.runs[0] for line in grid.lines([0])]
        assert all(one.rounds % getattr(one.method.schedule, "phi", 1) == 0 for one in runs)
        if name in ("fedlama-6", "fedlama-7", "fedlama-8"):
            assert {one.method.opt_lifetime for one in runs} == {"run"}
            assert {one.method.client_opt.weight_decay_on for one in runs} == {"kernels"}


def test_a_schedule_scales_with_the_rounds() -> None:
    grid = load("fedlama-4", "paper", changes=["rounds=48"]).grid
    frequent, rare, _ = (line.runs[0] for line in grid.lines([0])[:15:5])
    schedule = frequent.method.lr_schedule
    assert (frequent.rounds, frequent.eval.every, schedule.rounds, schedule.inner.at) == (48, 4, 2, (24, 36))
    assert (rare.rounds, rare.eval.every, rare.method.lr_schedule.inner.at) == (12, 1, (6, 9))


def test_the_criterion_of_a_search_is_the_measure_of_its_row() -> None:
    grid = load("mapo-5", "gpu").grid
    by = {row["label"]: grid.by(i) for i, row in enumerate(grid.content["rows"])}
    assert (by["LoRA"], by["SA-LoRA"]) == ("best_accuracy", "best_client_accuracy")


@pytest.mark.slow
def test_tables_share_runs() -> None:
    one, *others = ({digest(line.runs[0]) for line in load(f"mapa-{n}", "paper").grid.lines([0])} for n in (1, 3, 4, 5))
    assert one <= set.union(*others)


def test_unknown_tables_and_scales_are_refused() -> None:
    with pytest.raises(UnknownName, match="mapo-3"):
        load("mapo-33")
    with pytest.raises(ConfigError, match="quick, gpu, paper"):
        load("mapo-3", "huge")


# -- figures, and the settings of single papers -----------------------------------------------------------------------

FIGURES = [name for name in names() if "against" in table_of(name)]
MNIST_PARAMETERS = 11_274


def experiments(name: str, scale: str = "gpu"):
    """The cells of a table, each with the experiment of its first values."""
    found = load(name, scale)
    for number, cell in enumerate(found.grid.content["rows"]):
        first = {key: values[0] for key, values in cell.get("over", {}).items()}
        yield cell, found.grid.line(number, first, [0]).runs[0]


def test_there_are_presets_of_the_figures_of_three_papers():
    papers = Counter(table_of(name)["paper"].split(",")[0] for name in FIGURES)
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
        if isinstance(space, tw.spaces.MAPA | tw.spaces.MAPAX | tw.spaces.MAPO):
            sizes = space.sizes(MNIST_PARAMETERS)
            assert sizes.k * sizes.p == x
            assert ("frozen" in cell["label"]) == (space.redraw_every == 0)
        elif isinstance(method.sketch, tw.sketches.EvoFed):
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
            masked = not isinstance(method.mask, tw.masks.NoMask)
            assert row["x"] == (method.mask.density if masked else method.up.density)
            assert not masked or method.mask.by == "block"
            assert getattr(method.down, "density", row["x"]) == row["x"]
        else:
            space = method.space if isinstance(method.space, tw.spaces.LoRA) else method.next_stage.space
            assert (row["x"], space.scale) == (space.rank, 1.0)


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("flasc-figure")])
def test_rows_of_flasc_train_alike(name):
    """One rate and momentum for clients, Adam at the server, adapters on query, key and value, whole messages."""
    trained = Counter()
    for cell, experiment in experiments(name):
        method = experiment.method
        trained[repr(method.client_opt), experiment.local, dict(experiment.task.options).get("data")] += 1
        assert isinstance(method.server_opt, tw.optimizers.Adam)
        space = method.space if method.next_stage is None else method.next_stage.space
        if isinstance(space, tw.spaces.LoRA):
            assert space.target_modules == ("*query.weight", "*key.weight", "*value.weight"), cell["label"]
            assert space.modules_to_save == ("*classifier.*",)
    assert len(trained) == 1, trained
    ((opt, _, data),) = trained
    lr = 0.0005 if name in ("flasc-figure-9", "flasc-figure-10") else 0.001
    assert opt == repr(tw.optimizers.SGD(lr, momentum=0.9))
    assert data == "20newsgroups-headers"


def test_methods_with_differential_privacy_train_alike():
    for figure in ("flasc-figure-9", "flasc-figure-10"):
        by_column: dict = {}
        for cell, experiment in experiments(figure):
            assert isinstance(experiment.method.privacy, tw.privacy.DP)
            by_column.setdefault(cell["column"], set()).add(experiment.method.privacy)
        assert all(len(found) == 1 for found in by_column.values())
    first, second = (resolve(name, "digits").method for name in ("dp-fedadam", "ddg"))
    assert second == first.replace(secure_aggregation=True)


@pytest.mark.parametrize("name", ["fedpara-3", "fedpara-8", "fedpara-10", "fedpara-12", "fedpara-figure-8"])
def test_fedpara_at_scale_paper_has_its_regularizer_and_no_augmentation(name):
    for _, experiment in experiments(name, "paper"):
        method = experiment.method
        factorized = isinstance(method.space, tw.spaces.FedPara)
        assert method.penalty == (tw.optimizers.Jacobian(1.0) if factorized else tw.Method().penalty)
        assert experiment.task.augment == "none"
        assert method.lr_schedule.tau == 0.992
        if factorized:
            assert "head.weight" in method.space.modules_to_save, "linear layers are dense"


def test_the_lstm_of_table_11_has_weight_norm_and_the_papers_settings():
    for _, experiment in experiments("fedpara-11", "paper"):
        assert dict(experiment.task.model.options)["weight_norm"] is True
        local, size = experiment.local, experiment.cohort.size
        assert (local.batch, local.epochs, local.steps, size) == (64, 1, 0, 16)


def test_rounds_and_uploads_of_table_5_are_of_the_runs_of_its_accuracies():
    runs, measures = {}, {}
    for cell, experiment in experiments("mapo-5"):
        runs.setdefault((cell["label"], cell["column"][:3]), set()).add(digest(experiment))
        measures[cell["label"], cell["column"]] = cell["measure"]
    assert all(len(digests) == 1 for digests in runs.values())
    assert measures["LoRA", "RTE, rounds to 80 %"] == "rounds to 0.8"
    assert measures["SA-LoRA", "RTE, rounds to 80 %"] == "rounds to 0.8 of clients", "B is private"


# -- real runs ---------------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("THINWIRE_DATA", "no data"))
COMPLETE = all((DATA / name).exists() for name in ("mnist", "cifar10", "shakespeare"))
real = pytest.mark.skipif(not COMPLETE, reason="THINWIRE_DATA names no folder of datasets")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "papers", "repro", *words]


def results(out: Path) -> dict[str, list[dict]]:
    """The records of all finished runs without `seconds`, which differ between equal runs."""
    found = {}
    for folder in sorted(out.iterdir()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[folder.name] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    return found


@pytest.mark.slow
@real
def test_all_tables_are_made_at_scale_quick(tmp_path):
    """No run is missing, diverges, collapses or ends at chance: such a run is named on stderr even if quiet."""
    words = ("all", "--scale", "quick", "--jobs", "2", "--json", "-q", "--out", str(tmp_path / "runs"))
    done = subprocess.run(command(*words), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    tables = json.loads(done.stdout)
    assert set(tables) == set(names())
    assert not any(table["missing"] for table in tables.values())


@pytest.mark.slow
@real
def test_a_killed_call_with_a_budget_goes_on(tmp_path):
    """The table of the higher priority is first; finished runs stay; the results are those of a call without a kill."""
    tables = ("mapa-figure-7", "pfedpara-3")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    words = (*tables, "--budget", "10h", "--out", str(cut))
    ended = []
    for kept in (2, 5):  # runs that have ended at the moment of the kill
        with subprocess.Popen(command(*words), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            for line in process.stderr:
                ended.append(line.split()[1])
                if len(ended) == kept:
                    process.send_signal(signal.SIGKILL)
                    break
    before = {file: file.stat().st_mtime_ns for file in cut.glob("*/summary.json")}
    assert len(before) >= 5
    last = subprocess.run(command(*words), check=True, capture_output=True, text=True)
    ended += [line.split()[1] for line in last.stderr.splitlines()]
    assert all(file.stat().st_mtime_ns == then for file, then in before.items()), "no finished run was made again"
    assert ["fashion" in name for name in ended] == sorted("fashion" in name for name in ended), "pfedpara-3 is first"
    subprocess.run(command(*tables, "--out", str(whole)), check=True, capture_output=True)
    assert results(cut) == results(whole)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="THINWIRE_DATA names no folder")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_every_run_of_every_table_passes_check(name, scale) -> None:
    grid = load(name, scale).grid
    firsts = [{key: values[0] for key, values in row.get("over", {}).items()} for row in grid.content["rows"]]
    ready = {digest(e): e for i, chosen in enumerate(firsts) for e in grid.line(i, chosen, [0]).runs}
    for experiment in ready.values():
        assert check(experiment, DATA)["trainable"] > 0
