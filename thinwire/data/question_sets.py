"""Named sets of questions with their answers: BoolQ, OpenBookQA, ARC and GSM8K.

    thinwire run lora --on instructions --data-dir DATA

Read from `instructions/NAME-train.jsonl.xz` and `-test.jsonl.xz`, one object a line: instruction, output and answer in
the form of LLM-Adapters (Hu et al., 2023), or question and answer (GSM8K). The options of a question are stated at the
end of its instruction, after "Answer format:". With `answers = "texts"` a question of OpenBookQA or ARC is asked
without its list of answers, and the options are their texts, as small models are usually tested: few of them can tell
which label stands for which answer.

    labels   ... Answer1: a marsh Answer2: a tundra ... Answer format: answer1/...   the correct answer is answer1
    texts    ...                                                                    a marsh
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from thinwire.core.registry import register
from thinwire.data.causal_lm import RecordForm, TemplateName, TooLong, encoder_of, options_of, source_of
from thinwire.data.checkpoints import SMOLLM2
from thinwire.data.columns import Columns, objects, read_records
from thinwire.data.examples import Source
from thinwire.data.files import folder_of, pick
from thinwire.errors import ConfigError, DataError, UnknownName

QUESTION_SETS = ("boolq", "openbookqa", "arc-easy", "arc-challenge", "gsm8k")
Answers = Literal["labels", "texts"]
_FORMAT = re.compile(r"Answer format:\s*(\S+)\s*$")
_LISTED = re.compile(r"\s*\bAnswer\d+:\s*")  # before each text of a list of answers
_MARK = "####"  # before the result in an answer of GSM8K


@register(
    "dataset",
    "instructions",
    doc="Questions (boolq, openbookqa, arc-easy, arc-challenge, gsm8k) for a language model; SmolLM2, 256 tokens.",
    paper="Clark et al., 2019; Mihaylov et al., 2018; Clark et al., 2018; Cobbe et al., 2021",
)
def instructions(
    data_dir: Path | None = None,
    data: tuple[str, ...] = ("boolq", "openbookqa", "arc-easy", "arc-challenge"),
    checkpoint: str = SMOLLM2,
    template: TemplateName = "auto",
    length: int = 256,
    too_long: TooLong = "drop",
    window: int = 8,
    test_rows: int = 0,
    new_tokens: int = 32,
    answers: Answers = "labels",
) -> Source:
    """Named sets of questions, as they are distributed; the set is the group of a question.

    `data` names the sets; with `answers = "texts"`, questions are asked without their list of answers; the other
    options are those of `causal_lm`.
    """
    given, names = locals(), (data,) if isinstance(data, str) else tuple(data)
    if answers not in get_args(Answers):
        raise UnknownName("task.answers", answers, get_args(Answers))
    for name in names:
        if name not in QUESTION_SETS:
            raise UnknownName("task.data", name, QUESTION_SETS)
    if not names:
        raise ConfigError(f"task.data names no set; write one or several of {', '.join(QUESTION_SETS)}")
    train, test = (question_records(names, split, data_dir, answers) for split in ("train", "test"))
    encoder = encoder_of(checkpoint, data_dir, RecordForm("prompt", "response", options="options"), given)
    group = "set" if len(names) > 1 else ""
    return source_of(train, test, encoder, group=group, answer_after=_MARK, **options_of(source_of, given))


def question_records(names: Sequence[str], split: str, data_dir: Path | None, answers: Answers = "labels") -> Columns:
    """The records of some sets: prompt, response, options and set.

    Args:
        names: the sets.
        split: train or test.
        data_dir: the folder of datasets.
        answers: whether an answer is its label, such as answer1, or its text.
    """
    folder = folder_of(data_dir, "instructions", "instructions/boolq-train.jsonl.xz and the like", "instructions")
    found, places = list[tuple[Any, ...]](), list[str]()
    for name in names:
        file = pick(folder, *(f"{name}-{split}.jsonl{end}" for end in (".xz", ".gz", "")))
        rows = read_records(file)
        found += [(*_question(rows, i, name, answers), name) for i in range(len(rows))]
        places += [f"{file.name}: row {number}" for number in rows.rows]
    cells = dict(zip(("prompt", "response", "options", "set"), map(objects, zip(*found, strict=True)), strict=True))
    return Columns(str(folder), cells, row_numbers=objects(places), word="file")


def _question(rows: Columns, i: int, name: str, answers: Answers) -> tuple[str, str, list[str] | None]:
    """Prompt, response and options of a question."""
    answer = rows.text(i, "answer", "answer")
    if name == "gsm8k":
        return rows.text(i, "question", "question"), answer, None
    prompt = rows.text(i, "instruction", "instruction")
    response, stated = rows.text(i, "output", "output").strip(), _FORMAT.search(prompt)
    if stated is None or not response.endswith(answer):
        raise DataError(f"{rows.row(i)}: no 'Answer format:' at the end of the instruction, or no answer in the output")
    labels = stated[1].split("/")
    asked, *listed = _LISTED.split(prompt[: stated.start()])
    if answers == "labels" or not listed:
        return prompt, response, [response.removesuffix(answer) + label for label in labels]
    texts = [text.strip() for text in listed]
    if answer not in labels or len(texts) != len(labels):
        raise DataError(f"{rows.row(i)}: the instruction does not list a text for each of {stated[1]}")
    return asked, texts[labels.index(answer)], list(dict.fromkeys(texts))  # a few questions list an answer twice
