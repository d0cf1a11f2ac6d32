"""Texts for causal language models: records of your own, and named sets of questions with their answers.

    thinwire run lora --on causal-lm --set task.file=chats.jsonl --set task.client=hospital
    thinwire run lora --on instructions --data-dir DATA

The records of a file are conversations or plain texts (`conversations.py`). Test records come from a second file, from
the split `test` of a dataset of Hugging Face, or are held out of every client and group.

Sets of questions: BoolQ, OpenBookQA, ARC and GSM8K, in `instructions/NAME-train.jsonl.xz` and `-test.jsonl.xz`, one
object a line: instruction, output and answer in the form of LLM-Adapters (Hu et al., 2023), or question and answer
(GSM8K). The options of a question are stated at the end of its instruction, after "Answer format:". With `answers =
"texts"` a question of OpenBookQA or ARC is asked without its list of answers, and the options are their texts, as small
models are usually tested: few of them can tell which label stands for which answer.

    labels   ... Answer1: a marsh Answer2: a tundra ... Answer format: answer1/...   the correct answer is answer1
    texts    ...                                                                    a marsh
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from thinwire.core.registry import register
from thinwire.data.checkpoints import SMOLLM2, find_checkpoint, load_tokenizer, read_config
from thinwire.data.conversations import Encoder, Learned, Record, RecordForm, TemplateName, TooLong, read_records
from thinwire.data.examples import Source, numbered, positions
from thinwire.data.files import find, no_data, own_path, pick
from thinwire.data.huggingface import load_named, train_and_test
from thinwire.data.partition import held_out_rows
from thinwire.data.token_rows import TokenRows
from thinwire.errors import ConfigError, DataError, UnknownName

QUESTION_SETS = ("boolq", "openbookqa", "arc-easy", "arc-challenge", "gsm8k")
Answers = Literal["labels", "texts"]
_FORMAT = re.compile(r"Answer format:\s*(\S+)\s*$")
_LIST = re.compile(r"\s*Answer1:\s")  # where the list of answers begins


@register("dataset", "causal-lm", doc="Conversations or texts of your own for a causal language model: task.file.")
def causal_lm(
    data_dir: Path | None = None,
    file: str = "",
    test_file: str = "",
    name: str = "",
    config: str = "",
    checkpoint: str = SMOLLM2,
    prompt: str = "",
    response: str = "",
    messages: str = "",
    text: str = "",
    system: str = "",
    options: str = "",
    client: str = "",
    group: str = "",
    template: TemplateName = "auto",
    learned: Learned = "answers",
    length: int = 512,
    too_long: TooLong = "error",
    packing: bool = False,
    window: int = 8,
    test_fraction: float = 0.1,
    test_rows: int = 0,
    new_tokens: int = 32,
    answer_after: str = "",
    split_seed: int = 0,
) -> Source:
    """Records of a JSONL, JSON, CSV or parquet file, or of a dataset of Hugging Face, as tokens of a checkpoint.

    file, test_file      files of records for training and testing
    name, config         a dataset of Hugging Face instead: a folder, or owner/name on the hub
    checkpoint           a folder, a GGUF file, `smollm2`, or owner/name on the hub
    client               the column that names the client of a record; "" for none
    group                the column by which partitions go and metrics are told apart, such as the kind of question
    prompt ... options   columns of `RecordForm`
    template ... too_long, packing ... split_seed      settings of `Encoder` and of `source_of`
    """
    given = locals()
    if bool(file) == bool(name):
        raise ConfigError("name a file of records or a dataset of Hugging Face: task.file or task.name, one of them")
    if file:
        train = read_records(own_path(data_dir, file, "task.file"))
        test = read_records(own_path(data_dir, test_file, "task.test_file")) if test_file else None
    else:
        *parts, names = train_and_test(load_named(name, config, data_dir))
        train, test = (
            [Record(dict(row), f"{name}{f', split {at}' * bool(at)}: row {i}") for i, row in enumerate(one or ())]
            for one, at in zip(parts, names, strict=True)
        )
        if not train:
            raise DataError(f"{name}: it has no rows")
        test = test or None
    form = RecordForm.of(train[0], **_of(RecordForm, given))
    encoder = _encoder(checkpoint, data_dir, form=form, **_of(Encoder, given))
    return source_of(train, test, encoder, **_of(source_of, given))


def _of(call: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a function takes."""
    return {name: given[name] for name in inspect.signature(call).parameters if name in given}


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
    packing: bool = False,
    window: int = 8,
    test_rows: int = 0,
    new_tokens: int = 32,
    answers: Answers = "labels",
) -> Source:
    """Named sets of questions, as they are distributed; the set is the group of a question.

    `data` names the sets; with `answers = "texts"`, questions are asked without their list of answers; the other
    options are those of `causal_lm`.
    """
    given = locals()
    if answers not in get_args(Answers):
        raise ConfigError(f"task.answers must be one of {', '.join(get_args(Answers))}, not {answers!r}")
    names = (data,) if isinstance(data, str) else tuple(data)
    for one in names:
        if one not in QUESTION_SETS:
            raise UnknownName("task.data", one, QUESTION_SETS)
    if not names:
        raise ConfigError(f"task.data names no set; write one or several of {', '.join(QUESTION_SETS)}")
    train, test = (question_records(names, split, data_dir, answers) for split in ("train", "test"))
    form = RecordForm("prompt", "response", options="options")
    encoder = _encoder(checkpoint, data_dir, form=form, **_of(Encoder, given))
    group = "set" if len(names) > 1 else ""
    marked = "####"  # as GSM8K marks results
    return source_of(train, test, encoder, group=group, answer_after=marked, **_of(source_of, given))


def source_of(
    train: Sequence[Record],
    test: Sequence[Record] | None,
    encoder: Encoder,
    *,
    client: str = "",
    group: str = "",
    packing: bool = False,
    window: int = 8,
    test_fraction: float = 0.1,
    test_rows: int = 0,
    new_tokens: int = 32,
    answer_after: str = "",
    split_seed: int = 0,
) -> Source:
    """Rows of tokens of training and test records.

    Args:
        train: training records.
        test: test records; None to hold out a fraction of the training records.
        encoder: how records become rows.
        client: the column that names the client of a record; "" for none.
        group: the column by which partitions go and metrics are told apart; "" for none.
        packing: whether training rows hold as many records as fit, of one client and one group.
        window: batches within which rows of similar length are put together; 1 for none.
        test_fraction: the fraction of records that is held out for testing, where no test records are given.
        test_rows: the most test records, the same share of each group; 0 for all.
        new_tokens: the most tokens of a generated answer.
        answer_after: what is compared of an answer begins after this text.
        split_seed: of another choice of test records.
    """
    for name, value, least in (("window", window, 1), ("test_rows", test_rows, 0), ("new_tokens", new_tokens, 1)):
        if value < least:
            raise ConfigError(f"task.{name} must be {least} or more, not {value}")
    groups = _column(train, group, "task.group")
    if groups is not None and len(set(groups)) < 2:
        raise DataError(f"{train[0].where}: the column {group!r} (task.group) has one value only; leave task.group out")
    names = numbered(groups or ())
    if test is None:
        users = _column(train, client, "task.client")
        held = held_out_rows(len(train), test_fraction, users, groups, split_seed)
        train, test = ([one for one, out in zip(train, held, strict=True) if out == part] for part in (False, True))
    elif unknown := sorted(set(_column(test, group, "task.group") or ()) - set(names)):
        raise DataError(f"the group {unknown[0]!r} of a test record does not occur in the training records")
    test = _some(test, _column(test, group, "task.group"), test_rows)
    made, tested = encoder.encode(train), encoder.encode(test)
    row_groups, test_groups = (
        positions((records[i].text(group, "task.group") for i in one.records), names) if group else None
        for records, one in ((train, made), (test, tested))
    )
    rows = replace(TokenRows.of(made.rows, pad=encoder.pad, window=window), groups=row_groups)
    owners = [train[i].text(client, "task.client") for i in made.records] if client else None
    if packing:
        rows, first = rows.packed(encoder.length, owners)
        owners = [owners[i] for i in first] if owners else None
    questions = None
    if encoder.form.kind != "text":
        settings = {"names": names, "groups": test_groups, "new_tokens": new_tokens, "answer_after": answer_after}
        try:
            questions = encoder.questions(tested.conversations, **settings)
        except ValueError as fault:
            raise DataError(f"{test[0].where}: {fault}; write task.template = 'plain'") from None
    asked = questions is not None and questions.options is not None
    note = [encoder.form.note()] + [f"They are written by {encoder.written}."] * (encoder.form.kind != "text")
    note.append(
        f"{len(made.rows):,} rows of at most {encoder.length} tokens for training, {len(tested.rows):,} for testing."
    )
    if made.dropped or tested.dropped:
        lost = f"{made.dropped:,} longer training records and {tested.dropped:,} longer test records are left out."
        note.append(lost)
    note += [f"Training rows are packed into {len(rows):,}."] * packing
    return Source.by_user(
        rows,
        replace(TokenRows.of(tested.rows, pad=encoder.pad), groups=test_groups, questions=questions),
        len(encoder.tokenizer),
        (owners, None),
        note=" ".join(note),
        model={"checkpoint": str(encoder.tokenizer.name_or_path)},
        metrics=("perplexity", *(("option-accuracy",) if asked else ())),
        objective="option-accuracy" if asked else "perplexity",
        class_names=names,
    )


def _encoder(checkpoint: str, data_dir: Path | None, **options: Any) -> Encoder:
    """The encoder with the tokenizer of a checkpoint and these options."""
    found = find_checkpoint(checkpoint or SMOLLM2, data_dir)
    tokenizer = load_tokenizer(found, "the task causal-lm")
    tokenizer.name_or_path = str(found)
    encoder, config = Encoder(tokenizer, **options), read_config(found)
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(positions, int) and encoder.length > positions:
        raise ConfigError(
            f"task.length = {encoder.length}, but {found} has {positions} positions; write task.length = {positions}"
        )
    return encoder


def _column(records: Sequence[Record], column: str, option: str) -> list[str] | None:
    """The texts of a column, or None if none is named."""
    return [record.text(column, option) for record in records] if column else None


def _some(test: Sequence[Record], groups: list[str] | None, most: int) -> list[Record]:
    """At most so many test records, evenly spaced within each group."""
    if not most or len(test) <= most:
        return list(test)
    own, names = np.array(groups or [""] * len(test), object), sorted(set(groups or [""]))
    chosen = list[int]()
    for rows in (np.flatnonzero(own == name) for name in names):
        count = min(len(rows), max(1, most // len(names)))
        chosen += rows[(np.arange(count) * len(rows)) // count].tolist()
    return [test[i] for i in sorted(chosen)]


# -- sets of questions -----------------------------------------------------------------------------------------------


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
        raise no_data("instructions", "instructions/boolq-train.jsonl.xz and the like")
    found = []
    for name in names:
        path = pick(folder, *(f"{name}-{split}.jsonl{end}" for end in (".xz", ".gz", "")))
        found += [_question(one, name, answers) for one in read_records(path)]
    return found


def _question(record: Record, name: str, answers: Answers) -> Record:
    answer, options = record.text("answer", "answer"), None
    if name == "gsm8k":
        prompt, response = record.text("question", "question"), answer
    else:
        prompt, response = record.text("instruction", "instruction"), record.text("output", "output").strip()
        stated = _FORMAT.search(prompt)
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
