"""Named sets of questions with their answers: BoolQ, OpenBookQA, ARC and GSM8K.

Files: `instructions/NAME-train.jsonl.xz` and `-test.jsonl.xz`, one object a line: instruction, output and answer in the
form of LLM-Adapters (Hu et al., 2023), or question and answer (GSM8K). The options of a question are stated at the end
of its instruction, after "Answer format:".

With `answers = "texts"` a question of OpenBookQA or ARC is asked without its list of answers, and the options are their
texts, as small models are usually tested: few of them can tell which label stands for which answer.

    labels   ... Answer1: a marsh Answer2: a tundra ... Answer format: answer1/...   the correct answer is answer1
    texts    ...                                                                    a marsh
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from thinwire.data.folder import find, pick
from thinwire.data.hub import missing
from thinwire.data.records import Record, read_records
from thinwire.errors import DataError

QUESTION_SETS = ("boolq", "openbookqa", "arc-easy", "arc-challenge", "gsm8k")
Answers = Literal["labels", "texts"]
_FORMAT = re.compile(r"Answer format:\s*(\S+)\s*$")
_LIST = re.compile(r"\s*Answer1:\s")  # where the list of answers begins


def question_records(
    names: Sequence[str], split: str, data_dir: Path | None, answers: Answers = "labels"
) -> list[Record]:
    """The records of some sets: prompt, response, options and set.

    Args:
        names: the sets.
        split: train or test.
        data_dir: the folder of datasets.
        answers: whether an answer is its label, such as answer1, or its text.
    """
    folder = find(data_dir, "instructions")
    if folder is None:
        raise missing("instructions", "instructions/boolq-train.jsonl.xz and the like")
    found = []
    for name in names:
        path = pick(folder, *(f"{name}-{split}.jsonl{end}" for end in (".xz", ".gz", "")))
        found += [_record(one, name, answers) for one in read_records(path)]
    return found


def _record(record: Record, name: str, answers: Answers) -> Record:
    if name == "gsm8k":
        prompt, response = record.text("question", "question"), record.text("answer", "answer")
        return Record({"prompt": prompt, "response": response, "options": None, "set": name}, record.where)
    prompt, response = record.text("instruction", "instruction"), record.text("output", "output").strip()
    stated, answer = _FORMAT.search(prompt), record.text("answer", "answer")
    if stated is None or not response.endswith(answer):
        raise DataError(
            f"{record.where}: no 'Answer format:' at the end of the instruction, or no answer in the output"
        )
    labels = stated[1].split("/")
    options = [response.removesuffix(answer) + option for option in labels]
    if answers == "texts" and _LIST.search(prompt):
        texts = _texts(prompt[: stated.start()], labels)
        if answer not in labels or len(texts) != len(labels):
            raise DataError(f"{record.where}: the instruction does not list a text for each of {stated[1]}")
        prompt, response = _LIST.split(prompt)[0], texts[labels.index(answer)]
        options = list(dict.fromkeys(texts))  # a few questions list an answer twice
    return Record({"prompt": prompt, "response": response, "options": options, "set": name}, record.where)


def _texts(prompt: str, labels: Sequence[str]) -> list[str]:
    """The texts of the answers that a prompt lists.

    >>> _texts("Fog is around: Answer1: a marsh Answer2: a desert ", ["answer1", "answer2"])
    ['a marsh', 'a desert']
    """
    parts = re.split("|".join(rf"\s*\bAnswer{i + 1}:\s*" for i in range(len(labels))), prompt)
    return [part.strip() for part in parts[1:]]
