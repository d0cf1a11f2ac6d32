"""Tables of one's own: what is made of columns, and one line for everything that can be wrong with a file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_diabetes, load_wine

import thinwire as tw
from tests.own_files import bunch_columns, hospitals, write_csv
from thinwire.data.columns import Columns, read_table
from thinwire.data.partition import held_out_rows
from thinwire.data.table import Features


@pytest.fixture
def wine(tmp_path) -> Path:
    return write_csv(tmp_path / "wine.csv", bunch_columns("wine", hospital=hospitals))


def test_classification_with_clients(wine):
    source = tw.data.from_table(wine, "label", client="hospital")
    assert (len(source.train), len(source.test), source.classes) == (143, 35, 3)
    assert source.class_names == ("class_0", "class_1", "class_2")
    assert source.user_names == tuple(f"hospital {i}" for i in (0, 1, 4))
    assert source.model == {"inputs": 13}
    assert (source.loss, source.metrics) == ("cross-entropy", ())
    x = source.train.inputs
    torch.testing.assert_close(x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(13), atol=1e-5, rtol=0)
    for words in ("143 rows", "classification with 3 classes", "derived", "13 number columns", "real federation"):
        assert words in source.note
    # every client and every class is tested
    assert set(source.test_users.tolist()) == {0, 1, 2}
    assert set(source.test.targets.tolist()) == {0, 1, 2}


def test_values_are_those_of_the_file_in_its_order(wine):
    """With the given scale undone, inputs and labels of all rows are those of scikit-learn."""
    source = tw.data.from_table(wine, "label", client="hospital")
    rows = held_out_rows(178, 0.2, np.unique(hospitals(178), return_inverse=True)[1], load_wine().target)
    expected = load_wine().data[~rows]
    scaled = (expected - expected.mean(0)) / expected.std(0)
    torch.testing.assert_close(source.train.inputs, torch.tensor(scaled, dtype=torch.float32), atol=1e-5, rtol=1e-5)
    assert source.train.targets.tolist() == load_wine().target[~rows].tolist()


def test_regression_is_standardized_and_ranked_by_r2(tmp_path):
    file = write_csv(tmp_path / "diabetes.csv", bunch_columns("diabetes"))
    source = tw.data.from_table(file, "label")
    assert (source.loss, source.metrics, source.classes) == ("mse", ("r2",), 1)
    assert source.train.targets.dtype == torch.float32
    assert abs(float(source.train.targets.mean())) < 1e-5
    assert "regression" in source.note
    every = torch.cat([source.train.targets, source.test.targets]).double()
    assert np.corrcoef(np.sort(every.numpy()), np.sort(load_diabetes().target))[0, 1] > 1 - 1e-9


def test_several_targets_are_labels_or_numbers(tmp_path):
    columns = bunch_columns("wine")
    columns["strong"] = [int(v > 13) for v in columns["alcohol"]]
    columns["dark"] = [int(v > 5) for v in columns["color_intensity"]]
    file = write_csv(tmp_path / "w.csv", columns)
    labels = tw.data.from_table(file, ["strong", "dark"])
    assert (labels.loss, labels.metrics, labels.class_names) == ("bce", ("multilabel-f1",), ("strong", "dark"))
    assert set(labels.train.targets.flatten().tolist()) == {0, 1}
    numbers = tw.data.from_table(file, ["hue", "ash"], drop=["label"])
    assert (numbers.loss, numbers.train.targets.shape[1], numbers.model["inputs"]) == ("mse", 2, 13)


def test_missing_numbers_and_unseen_categories(tmp_path):
    train = tmp_path / "train.csv"
    train.write_text("age,city,y\n30,Rome,a\n,Oslo,b\n50,Rome,a\n40,,b\n")
    test = tmp_path / "test.csv"
    test.write_text("y,city,age,more\na,Bonn,?,1\nb,Oslo,40,2\n")
    source = tw.data.from_table(train, "y", test_file=test)
    assert source.model == {"inputs": 6}  # age, missing age, "", Oslo, Rome, other
    assert source.test.inputs.tolist() == [[0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]]
    assert "Missing numbers are the mean" in source.note
    assert source.train.inputs[1].tolist() == [0, 1, 0, 1, 0, 0]


def test_ids_keep_their_text_and_numbers_are_sorted_as_numbers(tmp_path):
    rows = [("007", "10"), ("7", "9"), ("007", "9"), ("7", "10")] * 5
    file = write_csv(tmp_path / "t.csv", {"who": [a for a, _ in rows], "x": range(20), "y": [b for _, b in rows]})
    source = tw.data.from_table(file, "y", client="who")
    assert source.user_names == ("007", "7")
    assert source.class_names == ("9", "10")


def test_same_table_in_other_files(wine, tmp_path):
    expected = tw.data.from_table(wine, "label", client="hospital")
    packed = tmp_path / "wine.csv.gz"
    packed.write_bytes(gzip.compress(wine.read_bytes()))
    semicolons = tmp_path / "semicolons.csv"
    semicolons.write_bytes(b"\xef\xbb\xbf" + wine.read_bytes().replace(b",", b";"))
    indexed = tmp_path / "indexed.csv"
    head, *rows = wine.read_text().splitlines()
    indexed.write_text("\n".join([f",{head}", *(f"{i},{row}" for i, row in enumerate(rows)), ""]))
    for file in (packed, semicolons, indexed):
        found = tw.data.from_table(file, "label", client="hospital")
        torch.testing.assert_close(found.train.inputs, expected.train.inputs)
        assert found.note == expected.note


def test_parquet_and_data_frames_equal_csv(wine, tmp_path):
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(wine)
    frame["city"] = pandas.Categorical(["Rome", "Oslo"] * 89)
    frame["when"] = pandas.Timestamp("2026-01-01")
    frame.to_parquet(tmp_path / "wine.parquet")
    expected = tw.data.from_table(wine, "label", client="hospital")
    for table in (tmp_path / "wine.parquet", frame):
        found = tw.data.from_table(table, "label", client="hospital", drop=["city", "when"])
        torch.testing.assert_close(found.train.inputs, expected.train.inputs)
        assert found.user_names == expected.user_names
        assert tw.data.from_table(table, "label", drop=["when"]).model["inputs"] == 13 + 3 + 3 + 1
        with pytest.raises(tw.DataError, match=r"column 'when' .* leave it out: task.drop"):
            tw.data.from_table(table, "label")
    damaged = tmp_path / "cut.parquet"
    damaged.write_bytes((tmp_path / "wine.parquet").read_bytes()[:900])
    with pytest.raises(tw.DataError, match="cannot be read as parquet"):
        read_table(damaged)


def test_test_rows_do_not_depend_on_the_order_of_clients_and_every_client_trains():
    users = np.array([0] * 50 + [1] * 3 + [2, 3, 4])
    test = held_out_rows(len(users), 0.5, users)
    assert set(users[~test]) == {0, 1, 2, 3, 4}
    assert 26 <= test.sum() <= 28
    assert (test == held_out_rows(len(users), 0.5, users)).all()


BAD = {
    "": "the file is empty",
    "a,y\n": "no rows of examples",
    "a,y\n1,u\n2\n3,v\n": "row 3 has 1 cells, but row 1 names 2 columns",
    "a,y\n1,u\n\n2,v,9\n": "row 4 has 3 cells",
    "a,a,y\n1,2,u\n": "columns 1 and 2 have the same name 'a'",
    "a,,y\n5,6,u\n": "column 2 has no name",
    "1,2,3\n4,5,6\n": "row 1 has numbers",
    "a,label\n1,u\n": "no column 'y' (task.target); it has the columns a, label",
    "a,why\n1,u\n": "did you mean 'why'?",
    "a,y\n1,u\n2,\n": "row 3 has no value in the target column 'y'",
    "a,y\n1,u\n2,u\n": "one class only, 'u'",
    "a,y\n1,0.5\n2,inf\n": "row 3: the target column 'y' has inf",
    "a,y\n" + "inf,u\n2,v\n" * 5: "column 'a' has inf, expected a finite number",
    'a,y\n1,u\n"2,v\n': "row 3 is not CSV",
    "y\n" + "u\nv\n" * 5: "no column is left for the inputs",
    "a,y\n1,u\n2,v\n": "too few for training and testing",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_bad_csv_is_one_line_with_file_and_row(tmp_path, text, message):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(tw.DataError) as caught:
        tw.data.from_table(file, "y")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value) or "too few" in message


def test_other_bad_tables(tmp_path, wine):
    latin = tmp_path / "latin.csv"
    latin.write_bytes("a,y\n1,u\n2,caf\xe9\n".encode("latin-1"))
    with pytest.raises(tw.DataError, match=r"latin.csv: row 3 is not UTF-8 text"):
        tw.data.from_table(latin, "y")
    (tmp_path / "t.xlsx").touch()
    with pytest.raises(tw.DataError, match="save the sheet as CSV"):
        tw.data.from_table(tmp_path / "t.xlsx", "y")
    test = tmp_path / "test.csv"
    test.write_text("alcohol\n12\n")
    with pytest.raises(tw.DataError, match=r"test.csv: no column"):
        tw.data.from_table(wine, "label", test_file=test)
    with pytest.raises(tw.DataError, match=r"no column 'hospitl' \(task.client\); did you mean 'hospital'"):
        tw.data.from_table(wine, "label", client="hospitl")
    with pytest.raises(tw.ConfigError, match=r"task.target_kind must be one of"):
        tw.data.from_table(wine, "label", target_kind="ranking")
    with pytest.raises(tw.DataError, match="expected a number"):
        tw.data.from_table(wine, "label", target_kind="regression")
    with pytest.raises(tw.ConfigError, match="which is the target"):
        tw.data.from_table(wine, "label", features=["label"])
    names = write_csv(
        tmp_path / "n.csv", {"name": [f"p{i}" for i in range(400)], "x": range(400), "y": ["u", "v"] * 200}
    )
    with pytest.raises(tw.DataError, match=r"'name' has .* different texts, such as 'p\d+'.*task.drop = \['name'\]"):
        tw.data.from_table(names, "y")
    assert tw.data.from_table(names, "y", drop=["name"]).model == {"inputs": 1}


def test_text_where_training_rows_have_numbers_is_named():
    features = Features.of(Columns("a.csv", {"x": np.array(["1", "2"], object)}), ["x"])
    with pytest.raises(tw.DataError, match=r"b.csv: row 3: column 'x' has 'two', expected a number"):
        features.encode(Columns("b.csv", {"x": np.array(["1", "two"], object)}))
    with pytest.raises(
        tw.DataError, match="row 2: column 'x' has 1e300, expected a number nearer to the training rows"
    ):
        features.encode(Columns("b.csv", {"x": np.array(["1e300"], object)}))


def test_parquet_is_read_by_pandas(tmp_path, monkeypatch):
    file, frame = tmp_path / "t.parquet", pandas.DataFrame({"x": range(20), "y": ["u", "v"] * 10})
    file.touch()
    monkeypatch.setattr(pandas, "read_parquet", lambda path: frame)
    assert tw.data.from_table(file, "y").class_names == ("u", "v")
    frame.loc[3, "y"] = None
    with pytest.raises(tw.DataError, match=r"t.parquet: row 5 has no value in the target column 'y'"):
        tw.data.from_table(file, "y")

    def fail(fault):
        raise fault

    for read, message in (
        (lambda path: frame[:0], "it has no rows"),
        (lambda path: fail(ZeroDivisionError()), "cannot be read as parquet"),
        (lambda path: fail(ImportError()), r"pip install 'thinwire\[data\]'"),
    ):
        monkeypatch.setattr(pandas, "read_parquet", read)
        with pytest.raises(tw.DataError, match=message):
            tw.data.from_table(file, "y")
