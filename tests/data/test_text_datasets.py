"""Datasets of text: word vocabulary, GLUE, 20 Newsgroups, Shakespeare; damaged files."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from thinwire.data.named_texts import ALPHABET, READERS, newsgroups, shakespeare, strip_message
from thinwire.data.text import IDS, PAD, UNKNOWN, id_rows, vocabulary, words
from thinwire.errors import DataError

# -- words -----------------------------------------------------------------------------------------------------------


def test_the_most_frequent_words_come_first_and_ties_are_alphabetical() -> None:
    assert vocabulary([words("b a c b"), words("d b")], size=6) == {"b": 3, "a": 4, "c": 5}


def test_an_empty_text_becomes_one_unknown_word() -> None:
    assert id_rows([[], ["new"] * 9], {}, 3).tolist() == [[UNKNOWN, PAD, PAD], [UNKNOWN] * 3]


@given(st.lists(st.text(max_size=40), max_size=8), st.integers(4, 12), st.integers(2, 9))
def test_rows_have_only_ids_below_the_size_of_the_vocabulary(texts, size, length) -> None:
    split = [*map(words, texts)]
    rows = id_rows(split, vocabulary(split, size), length)
    assert rows.shape == (len(texts), length)
    assert ((rows >= 0) & (rows < size)).all()
    assert IDS == 20_000


# -- GLUE ------------------------------------------------------------------------------------------------------------

FILES = {
    "SST-2": 'sentence\tlabel\na fine "film\t1\nbad one\t0\n',
    "CoLA": "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tThe rode.\n",
    "RTE": "index\tsentence1\tsentence2\tlabel\n0\tA b.\tB.\tentailment\n1\tA.\tC.\tnot_entailment\n",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t2\t3\tA b\tb a\r\n0\t4\t5\ta\tc\r\n",
}


def write_files(root: Path, name: str, train: str | bytes | None = None) -> Path:
    folder = root / "glue" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("train.tsv", "dev.tsv"):
        (folder / file).write_bytes(FILES[name].encode())
    if train is not None:
        (folder / "train.tsv").write_bytes(train if isinstance(train, bytes) else train.encode())
    return folder


@pytest.mark.parametrize(
    ("task", "name", "first", "labels"),
    [
        ("sst2", "SST-2", ('a fine "film',), [1, 0]),
        ("cola", "CoLA", ("The sailors rode.",), [1, 0]),
        ("rte", "RTE", ("A b.", "B."), [0, 1]),
        ("mrpc", "MRPC", ("A b", "b a"), [1, 0]),
    ],
)
def test_glue_files_are_read(tmp_path, task, name, first, labels) -> None:
    write_files(tmp_path, name)
    data = READERS[task](tmp_path)
    train, test = data.read()
    assert (train.texts[0], train.labels, test) == (first, labels, train)
    assert "dev" in data.note


@pytest.mark.parametrize(
    ("name", "task", "train", "message"),
    [
        ("SST-2", "sst2", "", "no examples"),
        ("SST-2", "sst2", "sentence\tlabel\n", "no examples"),
        ("SST-2", "sst2", "sentence\tlabel\nfine\t1\nbad 0\n", "line 3 is 'bad 0', expected 2 fields"),
        (
            "SST-2",
            "sst2",
            "sentence\tlabel\nfine\t7\n",
            "line 2 is 'fine 7', expected 2 fields between tabs and the label 0 or 1",
        ),
        ("CoLA", "cola", "a\tx\n", "line 1 is 'a x', expected 4 fields"),
        ("SST-2", "sst2", b"sentence\tlabel\n\xff\xfe\t1\n", "row 2 is not UTF-8"),
        (
            "RTE",
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n",
            "and the label entailment or not_entailment",
        ),
    ],
)
def test_an_invalid_file_is_an_error_of_one_line(tmp_path, name, task, train, message) -> None:
    write_files(tmp_path, name, train)
    with pytest.raises(DataError) as caught:
        READERS[task](tmp_path).read()
    assert message in str(caught.value)
    assert "train.tsv" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- 20 Newsgroups ---------------------------------------------------------------------------------------------------

GROUPS = [f"group.{i:02d}" for i in range(20)]


def archive(messages: dict[str, bytes], kind: str = "xz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{kind}") as tar:
        for name, data in messages.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def all_groups() -> dict[str, bytes]:
    return {
        f"20news-bydate-{split}/{group}/{number}": f"Subject: {group}\n\nWord{i} caf\xe9\n".encode("latin-1")
        for split in ("train", "test")
        for i, group in reversed(list(enumerate(GROUPS)))
        for number in (102, 101)
    }


def write_archive(root: Path, data: bytes, name: str = "20news-bydate.tar.xz") -> None:
    (root / "20newsgroups").mkdir(exist_ok=True)
    (root / "20newsgroups" / name).write_bytes(data)


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_the_archive_is_read_sorted_by_name(tmp_path, kind) -> None:
    write_archive(tmp_path, archive(all_groups(), kind), f"20news-bydate.tar.{kind}")
    for _ in range(2):  # the second time from the cache
        source = newsgroups(tmp_path)
        x, y = source.train.gather(torch.arange(40))
        assert y.tolist() == [i // 2 for i in range(40)]
        assert x.shape == (40, 256)
        assert x.dtype == torch.int64
        assert (x[:, 1] == 3).all()  # the word of all messages
        assert (x[:, 2:] == PAD).all()


def test_whole_messages_have_headers_signatures_and_quotations(tmp_path) -> None:
    write_archive(tmp_path, archive(all_groups()))
    stripped, whole = (READERS[name](tmp_path) for name in ("20newsgroups", "20newsgroups-headers"))
    assert [split.texts[0] for split in stripped.read()] == [("Word0 caf\xe9",)] * 2
    assert [split.texts[0] for split in whole.read()] == [("Subject: group.00\n\nWord0 caf\xe9\n",)] * 2
    assert all(a.labels == b.labels for a, b in zip(stripped.read(), whole.read(), strict=True))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data found; put 20newsgroups/20news-bydate"):
        READERS["20newsgroups-headers"](tmp_path / "empty").read()


def without(prefix: str) -> dict[str, bytes]:
    return {name: data for name, data in all_groups().items() if not name.startswith(prefix)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a complete tar archive"),
        (b"plain text", "not a complete tar archive"),
        (archive(all_groups())[:-60], "not a complete tar archive"),
        (archive(without("20news-bydate-test/group.07")), "19 in 20news-bydate-test, expected the same 20"),
        (archive({}), "0 groups"),
        (archive(all_groups() | {"20news-bydate-train/group.00/9": bytes((1 << 22) + 1)}), "too large"),
    ],
)
def test_an_invalid_archive_is_an_error_and_not_cached(tmp_path, monkeypatch, data, message) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    write_archive(tmp_path, data)
    with pytest.raises(DataError) as caught:
        newsgroups(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*"))


def test_header_signature_and_quotations_are_removed() -> None:
    message = "From: a\nSubject: b\n\nIn article <1> c writes:\n> old\n| older\nnew > kept\n\nmore\n\n----\nme"
    assert strip_message(message).split("\n") == ["new > kept", "", "more", ""]
    assert strip_message("no empty line: all header") == ""
    assert strip_message("h\n\nonly paragraph") == "only paragraph"


# -- Shakespeare -----------------------------------------------------------------------------------------------------

TEXT = "".join(chr(97 + (i * i) % 26) for i in range(1000))


def write_json(path: Path, found: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(found).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def decoded(codes: torch.Tensor) -> str:
    return "".join(ALPHABET[i] for i in codes.tolist())


def by_role(data: dict) -> dict:
    return {"users": list(data), "num_samples": [0] * len(data), "user_data": data}


def test_raw_text_becomes_windows_split_in_time(tmp_path) -> None:
    roles = {"A": {"raw": TEXT[:500] + "\n" + TEXT[501:]}, "short": {"raw": "x" * 81}, "mute": {"raw": "x"}}
    write_json(tmp_path / "shakespeare/all_data.json.gz", by_role(roles))
    source = shakespeare(tmp_path)
    assert source.users.tolist() == [0] * 736 + [1]
    assert source.test_users.tolist() == [0] * (920 - 736 - 80)
    x, y = source.train.gather(torch.tensor([5]))
    assert decoded(x[0]) == TEXT[5:85]
    assert decoded(y) == TEXT[85]
    assert decoded(source.test.gather(torch.tensor([0]))[0][0]) == TEXT[816:896]
    assert decoded(source.train.gather(torch.tensor([480]))[0][0])[20] == " "


def test_several_spaces_are_one_and_foreign_characters_share_a_code(tmp_path) -> None:
    write_json(tmp_path / "shakespeare/all_data.json", by_role({"A": {"raw": "a  b\n \nc$é—d" + TEXT}}))
    codes = shakespeare(tmp_path).train.codes
    assert decoded(codes[:9]) == "a b c\n\n\nd"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "expected the JSON object of LEAF"),
        ({"users": ["A"]}, "KeyError ('user_data')"),
        ({"user_data": {}}, "KeyError ('users')"),
        (by_role({}), "enough text"),
        (by_role({"A": {"raw": "x" * 90}}), "enough text"),
        ({"users": ["B"], "user_data": {"A": {}}}, "'B'"),
        ({"users": [["A"]], "user_data": {"A": {}}}, "TypeError"),
        (by_role({"A": {"raw": 7}}), "AttributeError"),
        (by_role({"A": {"text": "x"}}), "KeyError ('raw')"),
    ],
)
def test_json_of_another_layout_is_an_error_of_one_line(tmp_path, found, message) -> None:
    write_json(tmp_path / "shakespeare/all_data.json", found)
    with pytest.raises(DataError) as caught:
        shakespeare(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff{}", "row 1 is not UTF-8"),
        (b'{"users": [', "expected the JSON object of LEAF"),
        (b"[" * 100_000, "expected the JSON object of LEAF"),
        (b"", "expected the JSON object of LEAF"),
    ],
)
def test_files_that_are_not_json_are_an_error_of_one_line(tmp_path, data, message) -> None:
    path = tmp_path / "shakespeare/all_data.json"
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        shakespeare(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "raw", "A"]), inner),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(JSON, JSON)
def test_any_other_json_is_a_data_error(tmp_path_factory, users, data) -> None:
    root = tmp_path_factory.getbasetemp() / "any-json"
    write_json(root / "shakespeare/all_data.json", {"users": users, "user_data": data})
    with pytest.raises(DataError):
        shakespeare(root)


def test_the_alphabet_has_80_ascii_characters() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert np.all(np.frombuffer(ALPHABET.encode("ascii"), np.uint8) < 128)
