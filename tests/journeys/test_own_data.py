"""A stranger's data, by the documented commands only: a table, a folder of images and arrays, from file to result."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from sklearn.datasets import load_digits

import thinwire as tw
from tests.own_files import bunch_columns, hospitals, write_csv, write_digits


def table(file: str, *more: str) -> list[str]:
    return ["--on", "table", "--set", f"task.file={file}", "--set", "task.target=label", *more]


def test_table_with_a_client_column(thinwire, tmp_path):
    write_csv(tmp_path / "tumors.csv", bunch_columns("breast_cancer", hospital=hospitals))
    on = table("tumors.csv", "--set", "task.client=hospital")
    code, out, err = thinwire("check", "--partition", *on, "--plot", "clients.svg")
    assert (code, err) == (0, "wrote clients.svg\n")
    for words in ("hospital 4", "malignant: ", "label skew", "real federation"):
        assert words in out
    assert ElementTree.parse(tmp_path / "clients.svg").getroot().tag.endswith("svg")
    code, out, _ = thinwire("check", "--partition", *on, "--json")
    found = json.loads(out)
    assert sum(row["examples"] for row in found["rows"]) == found["examples"] == 456
    assert {row["client"] for row in found["rows"]} == set(hospitals(569))
    code, out, _ = thinwire("run", "fedavg", *on, "--rounds", "5", "-q", "--out", "run", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["final_accuracy"] > 0.9
    # the same from Python
    source = tw.data.from_table("tumors.csv", "label", client="hospital")
    task = tw.data.make_task(source, "mlp", partition="natural", clients=0)
    assert [*tw.data.describe_partition(task).sizes] == [row["examples"] for row in found["rows"]]
    # and divided by another rule
    more = ("--set", "task.partition=dirichlet", "--clients", "7", "--json")
    code, out, _ = thinwire("check", "--partition", *on, *more)
    assert json.loads(out)["clients"] == 7


def test_regression_from_a_table(thinwire, tmp_path):
    write_csv(tmp_path / "diabetes.csv", bunch_columns("diabetes"))
    code, out, _ = thinwire("run", "fedavg", *table("diabetes.csv"), "--rounds", "8", "-q", "--out", "run", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["objective"]["name"] == "r2"
    assert summary["objective"]["best"] > 0.3


def test_folder_of_images_and_arrays(thinwire, tmp_path):
    write_digits(tmp_path / "digits", 150, clients=3)
    on = ["--on", "image-folder", "--set", "task.folder=digits", "--set", "task.client_folders=true"]
    code, out, _ = thinwire("run", "fedavg", *on, "--rounds", "6", "-q", "--out", "a", "--json")
    assert code == 0
    assert json.loads(out)["best_accuracy"] > 0.5
    bunch = load_digits()
    np.savez(tmp_path / "d.npz", x=bunch.data[:300] / 16, y=bunch.target[:300])
    code, out, _ = thinwire(
        "run", "fedavg", "--on", "arrays", "--set", "task.file=d.npz", "--rounds", "4", "-q", "--json"
    )
    assert code == 0
    assert json.loads(out)["best_accuracy"] > 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "table"], "task.file is missing"),
        (["--on", "table", "--set", "task.file=no.csv"], "no.csv: no such file or folder (task.file)"),
        (["--on", "table", "--set", "task.file=t.csv"], "no target column is named; write task.target"),
        (table("t.csv"), "t.csv: no column 'label' (task.target); did you mean 'lable'?"),
        (["--on", "arrays", "--set", "task.file=t.csv"], "t.csv: cannot be read as .npz"),
        (["--on", "image-folder", "--set", "task.folder=t.csv"], "t.csv: not a folder"),
        (["--on", "huggingface"], "task.name is missing"),
    ],
)
def test_mistakes_are_one_line(thinwire, tmp_path, words, message):
    (tmp_path / "t.csv").write_text("a,lable\n1,u\n2,v\n")
    code, out, err = thinwire("check", "--partition", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"]
