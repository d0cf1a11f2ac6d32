"""Tables of comparisons and sweeps on real runs: paired seeds, failed settings, objectives without accuracy."""

import json

import pytest
import torch

import thinwire as tw
from thinwire.core import registry
from thinwire.data.examples import Arrays, Source
from thinwire.errors import ConfigError
from thinwire.runs.config import resolve
from thinwire.runs.execute import default_folder, execute

TINY = {"rounds": 2, "clients": 10, "cohort": 2, "set": {"local.steps": 8}}


@pytest.fixture
def line():
    """A regression task: `y = x w + noise`."""
    before = registry.foreign()

    def make(data_dir=None):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(260, 4, generator=random)
        y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1 * torch.randn(260, generator=random)
        y = y[:, None]
        train, test = (Arrays(x[part], y[part]) for part in (slice(200), slice(200, None)))
        return Source(train, test, 1, loss="mse")

    def model():
        made = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(made.weight)
        torch.nn.init.constant_(made.bias, 10.0)  # worse than the mean of the targets
        return made

    preset = {"task": {"clients": 5, "partition": "iid", "model": "line-model"}, "cohort": {"size": 5}}
    tw.register("model", "line-model", doc="A line.")(model)
    tw.register("dataset", "line", doc="A line.", preset=preset)(make)
    yield "line"
    registry.unregister(registry.foreign() - before)


def test_all_settings_have_the_same_seeds_and_the_directories_of_run(tmp_path):
    given = {"rounds": 2, "task.clients": 10, "cohort.size": 2, **TINY["set"]}
    one = resolve("fedavg", "digits", {**given, "seed": 1, "method.client_opt.lr": 0.1, "local.batch": 16})
    folder = default_folder(one, tmp_path)
    execute(one, folder)
    written = (folder / "summary.json").stat().st_mtime_ns
    found = tw.sweep("fedavg", {"lr": [0.1, 0.3], "batch": [16, 64]}, "digits", seeds=2, out=tmp_path, **TINY)
    assert (folder / "summary.json").stat().st_mtime_ns == written, "a finished run is used again"
    assert sorted((row.values["lr"], row.values["batch"]) for row in found.rows) == [
        *((0.1, 16), (0.1, 64), (0.3, 16), (0.3, 64))
    ]
    for row in found.rows:
        totals = [json.loads((path / "summary.json").read_text()) for path in (run.path for run in row.runs)]
        assert [total["seed"] for total in totals] == [0, 1]
        assert row.final.mean == pytest.approx(sum(total["final_accuracy"] for total in totals) / 2)
        assert row.bytes == sum(total["bytes_total_honest"] for total in totals) / 2
    best, *others = found.rows
    assert found.best is best
    assert best.difference.mean == 0
    for row in others:
        assert row.difference.mean == pytest.approx(row.final.mean - best.final.mean)
        assert row.difference.mean <= 0 < row.difference.half
    text = repr(found)
    assert text.startswith("fedavg on digits: 4 settings, 2 seeds\n")
    assert found.how == "final test accuracy"
    assert found._repr_html_().count("<td>") == 4 * 5, "the first column is a head"
    assert [row["is_best"] for row in found.plain()] == [True, False, False, False]


def test_settings_that_fail_are_listed_and_never_the_best(tmp_path):
    rates, long = [1e30, 1e-9, 0.3], TINY | {"rounds": 10}
    found = tw.sweep("fedavg", {"lr": rates}, "digits", seeds=1, out=tmp_path, **long)
    tw.report(found, tmp_path / "page.html")
    assert found.best.values == {"lr": 0.3}
    failed = {row.values["lr"]: row.failed for row in found.rows}
    assert failed == {0.3: "-", 1e30: "1 of 1 diverged", 1e-9: "1 of 1 at chance"}
    assert [row.difference is None for row in found.rows] == [False, True, True]
    assert "1 of 1 diverged" in repr(found)
    assert "fedavg (lr 0.3)" in (tmp_path / "page.html").read_text()
    none = tw.sweep("fedavg", {"lr": rates[:2]}, "digits", seeds=1, out=tmp_path, **long)
    assert none.best is None


def test_regression_is_ranked_by_r2(tmp_path, line):
    found = tw.sweep("fedavg", {"lr": [0.001, 0.1]}, line, seeds=2, rounds=3, out=tmp_path, recipe="paper")
    assert found.ranked_by.name == "r2"
    assert found.best.values == {"lr": 0.1}
    assert found.best.final.mean > found.rows[1].final.mean
    assert "final r2" in found.cells()[0].heads
    held = tw.sweep(
        "fedavg", {"lr": [0.001, 0.1]}, line, seeds=1, rounds=3, out=tmp_path, recipe="paper", validation_fraction=0.2
    )
    assert held.how == "r2 on validation examples"
    assert held.best.validation.mean > held.rows[1].validation.mean
    compared = tw.compare({"slow": _sgd(0.001), "fast": _sgd(0.1)}, line, seeds=1, rounds=3, out=tmp_path / "compare")
    assert "final r2" in repr(compared)
    assert [row.label for row in compared.rows] == ["slow", "fast"]
    tuned = tw.tune("fedavg", line, over={"lr": [0.001, 0.1]}, rounds=4, out=tmp_path / "search", recipe="paper")
    assert tuned.settings == {"method.client_opt.lr": 0.1}
    assert tuned.chosen_by.startswith("r2 on the 10 %")
    assert tuned.best.outcome.startswith("r2 ")


def _sgd(rate):
    return tw.Method(client_opt=tw.optimizers.SGD(rate))


def test_settings_are_ranked_by_the_objective_on_validation_examples(tmp_path):
    options = {"metrics": ["f1"], "objective": "f1", "validation_fraction": 0.2, "rounds": 1, "cohort": 2}
    table = tw.sweep("fedavg", {"lr": [0.1, 0.3]}, "digits", seeds=1, out=tmp_path, **options)
    (best,) = table.rows[0].runs
    assert table.how == "f1 on validation examples"
    assert table.rows[0].validation.mean == best.records[-1]["clients_eval"]["f1"]


def test_impossible_values_are_refused_before_the_first_run(tmp_path):
    for over, message in (
        ({"cohort": [2, 50]}, "cohort must be from 1 to the number of clients, 10, not 50"),
        ({"lr": [0.1, "big"]}, "method.client_opt.lr must be of type float"),
        ({"nothing": [1]}, "fedavg has no setting 'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            tw.sweep("fedavg", over, "digits", out=tmp_path, **(TINY | {"cohort": None}))
    with pytest.raises(ConfigError, match="seeds must be 1 or more, not 0"):
        tw.sweep("fedavg", {"lr": [0.1]}, "digits", seeds=0, out=tmp_path, **TINY)
    for methods in ("fedavg", []):
        with pytest.raises(ConfigError, match="methods must be a list"):
            tw.compare(methods, "digits", out=tmp_path)
    with pytest.raises(ConfigError, match="not int; write for example 'fedavg'"):
        tw.sweep(3, {"lr": [0.1]}, "digits", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_frame_has_the_values_and_means(tmp_path):
    pandas = pytest.importorskip("pandas")
    found = tw.sweep("fedavg", {"lr": [0.1]}, "digits", seeds=1, out=tmp_path, **TINY)
    assert isinstance(found.frame(), pandas.DataFrame)
    assert found.frame()["lr"].tolist() == [0.1]
    compared = tw.compare(["fedavg"], "digits", seeds=1, out=tmp_path, **TINY)
    assert compared.frame()["final_mean"].tolist() == [compared.rows[0].final.mean]
