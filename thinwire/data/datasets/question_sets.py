"""Named sets of questions with their answers: BoolQ, OpenBookQA, ARC and GSM8K.

Files: `instructions/NAME-train.jsonl.xz` and `-test.jsonl.xz`, one object a line: instruction, output and answer in the
form of LLM-Adapters (Hu et al., 2023), or question and answer (GSM8K). The options of a question are stated at the end
of its instruction, after "Answer format:".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from thinwire.data.folder import find, pick
from thinwire.data.hub import missing
from thinwire.data.records import Record, read_records
from thinwire.errors import DataError

QUESTION_SETS = ("boolq", "openbookqa", "arc-easy", "arc-challenge", "gsm8k")
_FORMAT = re.compile(r"Answer format:\s*(\S+)\s*$")


def question_records(names: Sequence[str], split: str, data_dir: Path | None) -> list[Record]:
    """The records of some sets: prompt, response, options and set.

    Args:
        names: the sets.
        split: train or test.
        data_dir: the folder of datasets.
    """
    folder = find(data_dir, "instructions")
    if folder is None:
        raise missing("instructions", "instructions/boolq-train.jsonl.xz and the like")
    found = []
    for name in names:
        path = pick(folder, *(f"{name}-{split}.jsonl{end}" for end in (".xz", ".gz", "")))
        found += [_record(one, name) for one in read_records(path)]
    return found


def _record(record: Record, name: str) -> Record:
    if name == "gsm8k":
        prompt, response = record.text("question", "question"), record.text("answer", "answer")
        return Record({"prompt": prompt, "response": response, "options": None, "set": name}, record.where)
    prompt, response = record.text("instruction", "instruction"), record.text("output", "output").strip()
    stated, answer = _FORMAT.search(prompt), record.text("answer", "answer")
    if stated is None or not response.endswith(answer):
        raise DataError(
            f"{record.where}: no 'Answer format:' at the end of the instruction, or no answer in the output"
        )
    options = [response.removesuffix(answer) + option for option in stated[1].split("/")]
    return Record({"prompt": prompt, "response": response, "options": options, "set": name}, record.where)
