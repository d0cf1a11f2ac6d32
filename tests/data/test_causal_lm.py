"""Records for language models: what is learned of a conversation, rows of tokens, packs, and records in bad form."""

import json
import lzma
from typing import get_args

import pytest
import torch

from tests.checkpoints import SPOKEN, write_language_model
from thinwire.data.causal_lm import RecordForm, causal_lm, chat
from thinwire.data.columns import read_records
from thinwire.data.question_sets import Answers, instructions, question_records
from thinwire.data.site import OwnData, SiteRecords
from thinwire.data.token_rows import TokenRows
from thinwire.errors import ThinwireError
from thinwire.metrics.classification import IGNORED

transformers = pytest.importorskip("transformers")

PAIRS = [
    {"prompt": "a b c", "response": "yes", "home": "x"},
    {"prompt": "d", "response": "no it is", "home": "y"},
] * 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_language_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(ids):
    return " ".join(SPOKEN[i] for i in ids)


def learned(rows, i):
    """The words of a row, and those that are learned."""
    inputs, targets = rows.gather(torch.tensor([i]))
    return words(inputs["input_ids"][0, : int(rows.sizes[i])].tolist()), words(targets[targets != IGNORED].tolist())


def test_only_the_tokens_of_answers_are_learned(tmp_path, checkpoint):
    rows = causal_lm(file=write(tmp_path / "r.jsonl", PAIRS), checkpoint=checkpoint).train
    seen = {learned(rows, i) for i in range(len(rows))}
    assert seen == {
        ("<|user|> a b c </s> <|assistant|> yes </s>", "yes </s>"),
        ("<|user|> d </s> <|assistant|> no it is </s>", "no it is </s>"),
    }
    whole = causal_lm(file=str(tmp_path / "r.jsonl"), checkpoint=checkpoint, learned="all").train
    assert {learned(whole, i)[1] for i in range(2)} == {
        "a b c </s> <|assistant|> yes </s>",
        "d </s> <|assistant|> no it is </s>",
    }
    plain = causal_lm(file=str(tmp_path / "r.jsonl"), checkpoint=checkpoint, template="plain").train
    assert ("a b c yes </s>", "yes </s>") in {learned(plain, i) for i in range(2)}


def test_all_answers_of_a_conversation_are_learned_and_tokens_are_those_of_the_template(tmp_path, checkpoint):
    turns = [("system", "the"), ("user", "a"), ("assistant", "yes it"), ("user", "b"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in turns]
    file = write(tmp_path / "m.jsonl", [{"messages": messages}] * 16)
    rows = causal_lm(file=file, checkpoint=checkpoint).train
    assert len({learned(rows, i) for i in range(len(rows))}) == 1
    text, answers = learned(rows, 0)
    assert answers == "yes it </s> no </s>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert text == words(ids)


def test_texts_are_cut_into_rows_and_learned_from_the_second_token(tmp_path, checkpoint):
    file = write(tmp_path / "t.jsonl", [{"text": "a b c d e f g h yes no"}] * 10)
    source = causal_lm(file=file, checkpoint=checkpoint, length=8)
    assert learned(source.train, 0) == ("a b c d e f g h", "b c d e f g h")
    assert learned(source.train, 1) == ("yes no </s>", "no </s>")
    assert (source.objective, source.metrics, source.test.questions) == ("perplexity", ("perplexity",), None)


def test_gathered_rows_are_as_wide_as_the_longest_of_the_batch(tmp_path):
    rows = TokenRows.of([(list(range(1, n + 1)), [False] + [True] * (n - 1)) for n in (3, 40, 9)], pad=7)
    for index, width, labels in (([0], 8, 2), ([0, 2], 16, 8), ([[1], [0]], 40, 39)):
        inputs, targets = rows.gather(torch.tensor(index))
        assert inputs["input_ids"].shape[-1] == width
        assert targets.shape == inputs["label_positions"].shape == (*torch.tensor(index).shape, labels)
    assert rows.gather(torch.tensor([0]))[0]["input_ids"][0].tolist() == [1, 2, 3, 7, 7, 7, 7, 7]
    assert rows.targets[0].tolist() == [2, 3] + [IGNORED] * 37


def test_clients_groups_and_test_rows_come_from_columns_and_files(tmp_path, checkpoint):
    rows = [{**row, "set": "p" if i % 3 else "q"} for i, row in enumerate(PAIRS * 3)]
    file, other = write(tmp_path / "r.jsonl", rows), write(tmp_path / "s.jsonl", rows[:8])
    source = causal_lm(file=file, test_file=other, checkpoint=checkpoint, client="home", group="set", length=32)
    assert (source.user_names, source.class_names, len(source.test)) == (("x", "y"), ("p", "q"), 8)
    assert len(source.train) == len(source.users) == len(source.train.groups) == 60
    assert source.test.questions.answers[:2] == ("yes", "no it is")
    few = causal_lm(file=file, test_file=other, checkpoint=checkpoint, group="set", test_rows=4)
    assert len(few.test) == 4
    assert sorted(few.test.groups.tolist()) == [0, 0, 1, 1]
    table = "home,prompt,response\n" + "x,a b,yes\ny,c,no\n" * 10
    (tmp_path / "r.csv").write_text(table)
    assert len(causal_lm(file=str(tmp_path / "r.csv"), checkpoint=checkpoint, client="home").train) == 18


BAD = {
    "column": ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], "row 2: 'response' (task.response) has no value"),
    "empty": (
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": " "}],
        "row 2: 'response' (task.response) has no value",
    ),
    "type": ([{"prompt": "a", "response": ["b"]}], "row 1: 'response' (task.response) is of type list"),
    "long": ([{"prompt": "a", "response": "b"}, {"prompt": "a " * 99, "response": "b"}], "row 2: it has 104 tokens"),
    "form": ([{"x": 1}], "row 1: it has x; name the columns"),
    "messages": (
        [{"messages": [{"role": "user", "content": "a"}]}],
        "row 1: 'messages' (task.messages) has no message",
    ),
    "content": (
        [{"messages": [{"role": "assistant", "content": ""}]}],
        "message 1 is not an object",
    ),
    "line": ("[1, 2]\n", "row 1 is a JSON list"),
    "json": ('{"prompt": "a", "response": "b"}\n{"prompt"\n', "row 2 is not a JSON object"),
    "bytes": (b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff"}\n', "row 2 is not UTF-8 text"),
    "surrogate": (
        '{"prompt": "a", "response": "\\ud800"}\n',
        "row 1: 'response' (task.response) has half of a character",
    ),
    "nothing": ("\n\n", "the file has no records"),
}


@pytest.mark.parametrize("name", BAD)
def test_records_in_bad_form_are_one_line_with_file_and_row(tmp_path, checkpoint, name):
    rows, message = BAD[name]
    file = tmp_path / "bad.jsonl"
    data = rows if isinstance(rows, bytes | str) else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ThinwireError) as caught:
        causal_lm(file=str(file), test_file=write(tmp_path / "good.jsonl", PAIRS), checkpoint=checkpoint, length=64)
    assert message in str(caught.value)
    assert f"{file}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "home"}, "has one value only"),
        ({"length": 4096}, "has 1024 positions"),
        ({"length": 2}, "length must be from 8"),
        ({"prompt": "prompt"}, "task.prompt is stated, but a record has one form"),
        ({"prompt": "prompt", "response": "response", "text": "text"}, "a record has one form"),
        ({"template": "jinja"}, "template must be one of"),
        ({"checkpoint": "nowhere.gguf"}, "no GGUF file there"),
        ({"window": 0}, "task.window must be 1 or more"),
        ({"options": "choices"}, "needs two or more different texts"),
        ({"options": "others"}, "is none of the options (b, c)"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(tmp_path, checkpoint, options, message):
    row = {"prompt": "a", "response": "yes", "home": "x", "choices": ["yes"], "others": "b|c"}
    file = write(tmp_path / "r.jsonl", [row] * 20)
    with pytest.raises(ThinwireError) as caught:
        causal_lm(**{"file": file, "checkpoint": checkpoint, "length": 64, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path):
    strange = "{% if add_generation_prompt %}first {% endif %}{{ messages[-1]['content'] }}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_language_model(tmp_path, template=strange))
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)


def test_sets_of_questions_have_options_and_groups(tmp_path, checkpoint):
    folder = tmp_path / "data" / "instructions"
    folder.mkdir(parents=True)
    for name, options in (("boolq", ["true", "false"]), ("arc-easy", ["answer1", "answer2", "answer3"])):
        for split in ("train", "test"):
            rows = [
                {
                    "instruction": f"a {i}?\n\nAnswer format: {'/'.join(options)}",
                    "output": f"it is {one}",
                    "answer": one,
                }
                for i in range(4)
                for one in options
            ]
            with lzma.open(folder / f"{name}-{split}.jsonl.xz", "wt") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in rows)
    source = instructions(tmp_path / "data", ("boolq", "arc-easy"), checkpoint, length=64)
    questions = source.test.questions
    assert (source.objective, source.class_names) == ("option-accuracy", ("arc-easy", "boolq"))
    assert torch.bincount(questions.owners).tolist() == [2] * 8 + [3] * 12
    assert questions.right.tolist() == [0, 1] * 4 + [0, 1, 2] * 4
    with pytest.raises(ThinwireError, match="did you mean 'boolq'"):
        instructions(tmp_path / "data", ("boolqq",), checkpoint)


def test_questions_can_be_asked_by_the_texts_of_their_answers(tmp_path):
    folder = tmp_path / "instructions"
    folder.mkdir()
    asked = "Where?\n\nAnswer1: in a bog Answer2: at sea Answer3: at sea\n\nAnswer format: answer1/answer2/answer3"
    row = {"instruction": asked, "output": "the correct answer is answer2", "answer": "answer2"}
    (folder / "arc-easy-test.jsonl").write_text(json.dumps(row) + "\n")
    found = [question_records(["arc-easy"], "test", tmp_path, kind) for kind in get_args(Answers)]
    labels, texts = ({name: cells[0] for name, cells in rows.cells.items()} for rows in found)
    assert labels["prompt"] == asked
    assert labels["response"] == labels["options"][1] == "the correct answer is answer2"
    assert (texts["prompt"], texts["response"], texts["options"]) == ("Where?", "at sea", ["in a bog", "at sea"])
    (folder / "arc-easy-test.jsonl").write_text(json.dumps(row | {"instruction": asked.replace("Answer3:", "")}) + "\n")
    with pytest.raises(ThinwireError, match="row 1: the instruction does not list a text for each of"):
        question_records(["arc-easy"], "test", tmp_path, "texts")


def test_a_site_reads_the_same_rows_as_the_task(tmp_path, checkpoint):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "records.jsonl", PAIRS)
    from thinwire.models import build

    data = SiteRecords(checkpoint=checkpoint, length=32)
    own = OwnData(data, lambda: build("causal-lm", checkpoint=checkpoint), metrics=("perplexity",))
    task = own.task(tmp_path, clients=2)
    rows = read_records(tmp_path / "one" / "records.jsonl")
    form = RecordForm("prompt", "response")
    alone = TokenRows.of(data.encoder(form).encode(rows)[0])
    for i in range(len(PAIRS)):
        assert learned(task.train, i) == learned(alone, i) == learned(task.train, i + len(PAIRS))
    assert own.without_examples(2).train.gather(torch.tensor([0]))[1].tolist() == [[0]]
    assert task.client_names == ("one", "two")
