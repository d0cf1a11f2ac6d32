"""Texts for causal language models: records of one's own, and named sets of questions.

    thinwire run lora --on causal-lm --set task.file=chats.jsonl --set task.client=hospital
    thinwire run lora --on instructions --data-dir DATA

The records of a file are conversations or plain texts (`conversations.py`). Test records come from a second file, from
the split `test` of a dataset of Hugging Face, or are held out of every client and group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data.conversations import RecordForm
from thinwire.data.datasets.huggingface import TEST_SPLITS, load_named
from thinwire.data.datasets.question_sets import QUESTION_SETS, Answers, question_records
from thinwire.data.examples import Source
from thinwire.data.folder import own_path
from thinwire.data.hold_out import held_out_rows
from thinwire.data.language import Encoder, Learned, TemplateName, TooLong, load_tokenizer, with_questions
from thinwire.data.language_checkpoint import SMOLLM2, checkpoint_files, find_checkpoint
from thinwire.data.reading import numbered
from thinwire.data.records import Record, from_rows, read_records
from thinwire.errors import ConfigError, DataError, UnknownName
from thinwire.models.causal_lm import library, location


@dataclass(frozen=True)
class RowSettings:
    """How records become rows, apart from the tokenizer.

    Args:
        packing: whether training rows hold as many records as fit, of one client and one group.
        window: batches within which rows of similar length are put together; 1 for none.
        test_fraction: the fraction of records that is held out for testing, where no test records are named.
        test_rows: the most test records, the same share of each group; 0 for all.
        new_tokens: the most tokens of a generated answer.
        answer_after: what is compared of an answer begins after this text.
        split_seed: of another choice of test records.
    """

    packing: bool = False
    window: int = 8
    test_fraction: float = 0.1
    test_rows: int = 0
    new_tokens: int = 32
    answer_after: str = ""
    split_seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("test_rows", 0), ("new_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"task.{name} must be {least} or more, not {getattr(self, name)}")


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
    template ... too_long, packing ... split_seed      settings of `Encoder` and of `RowSettings`
    """
    if bool(file) == bool(name):
        raise ConfigError("name a file of records or a dataset of Hugging Face: task.file or task.name, one of them")
    if file:
        train = read_records(own_path(data_dir, file, "task.file"))
        test = read_records(own_path(data_dir, test_file, "task.test_file")) if test_file else None
    else:
        train, test = _splits(load_named(name, config, data_dir), name)
    columns = {"prompt": prompt, "response": response, "messages": messages, "text": text}
    form = RecordForm.of(train[0], **columns, system=system, options=options)
    encoder = _encoder(checkpoint, data_dir, template, learned, length, too_long)
    settings = RowSettings(packing, window, test_fraction, test_rows, new_tokens, answer_after, split_seed)
    return source_of(train, test, form, encoder, settings, client=client, group=group)


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

    `data` names the sets; with `answers = "texts"`, questions are asked without their list of answers
    (`question_sets.py`); the other options are those of `causal_lm`.
    """
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
    encoder = _encoder(checkpoint, data_dir, template, "answers", length, too_long)
    settings = RowSettings(packing, window, 0.1, test_rows, new_tokens, answer_after="####")  # as GSM8K marks results
    return source_of(train, test, form, encoder, settings, group="set" if len(names) > 1 else "")


def source_of(
    train: Sequence[Record],
    test: Sequence[Record] | None,
    form: RecordForm,
    encoder: Encoder,
    settings: RowSettings,
    *,
    client: str = "",
    group: str = "",
) -> Source:
    """Rows of tokens of training and test records; a fraction is held out where no test records are given."""
    users, groups = _column(train, client, "task.client"), _column(train, group, "task.group")
    if group and len(set(groups or ())) < 2:
        raise DataError(f"{train[0].where}: the column {group!r} (task.group) has one value only; leave task.group out")
    names = numbered(groups or ())
    if test is None:
        ids = [
            None if one is None else np.unique(np.array(one, object), return_inverse=True)[1] for one in (users, groups)
        ]
        held = held_out_rows(len(train), settings.test_fraction, ids[0], ids[1], settings.split_seed)
        test = [record for record, out in zip(train, held, strict=True) if out]
        train = [record for record, out in zip(train, held, strict=True) if not out]
        users, groups = _column(train, client, "task.client"), _column(train, group, "task.group")
    test = _some(test, _column(test, group, "task.group"), settings.test_rows)
    made, own_names, owners = encoder.encode(train, form, settings.window), numbered(users or ()), None
    rows = replace(made.rows, groups=_tensor(_numbers(groups, names, made.records)))
    owners = _numbers(users, own_names, made.records)
    packed_of = len(rows)
    if settings.packing:
        rows, first = rows.packed(encoder.length, owners)
        owners = None if owners is None else owners[first]
    tested, asked, lost = _tested(test, form, encoder, settings, group, names)
    return Source(
        rows,
        tested,
        len(encoder.tokenizer),
        _tensor(owners),
        note=_note(form, encoder, settings, (packed_of, made.dropped), (len(tested), lost), len(rows)),
        model={"checkpoint": str(encoder.tokenizer.name_or_path)},
        metrics=("perplexity", *(("option-accuracy",) if asked else ())),
        objective="option-accuracy" if asked else "perplexity",
        class_names=names,
        user_names=own_names,
    )


def _tested(
    test: Sequence[Record], form: RecordForm, encoder: Encoder, settings: RowSettings, group: str, names: Sequence[str]
) -> tuple[Any, bool, int]:
    """The test rows with their questions, whether these have options, and the number of records that are too long."""
    conversations = encoder.conversations(test, form)
    made = encoder.rows(test, conversations, form)
    groups = _numbers(_column(test, group, "task.group"), names, made.records)
    if form.kind == "text":
        return replace(made.rows, groups=_tensor(groups)), False, made.dropped
    kept = [conversations[i] for i in made.records.tolist()]
    try:
        more = {"new_tokens": settings.new_tokens, "answer_after": settings.answer_after}
        questions = encoder.questions(kept, groups, names, **more)
    except ValueError as fault:
        raise DataError(f"{test[0].where}: {fault}; write task.template = 'plain'") from None
    return with_questions(made, questions, groups), questions.options is not None, made.dropped


def _encoder(
    checkpoint: str, data_dir: Path | None, template: TemplateName, learned: Learned, length: int, too_long: TooLong
) -> Encoder:
    """The encoder with the tokenizer of a checkpoint."""
    found = find_checkpoint(checkpoint, data_dir)
    folder, more = location(found)
    tokenizer = load_tokenizer(folder, more, library("the task causal-lm"))
    tokenizer.name_or_path = str(found)
    _check_length(folder, length)
    return Encoder(tokenizer, length, template, learned, too_long, checkpoint_files(found))


def _check_length(folder: Path, length: int) -> None:
    """Raise an error if a checkpoint has fewer positions than a row has tokens."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        most = config.get("max_position_embeddings") or config.get("n_positions")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if isinstance(most, int) and length > most:
        raise ConfigError(f"task.length = {length}, but {folder} has {most} positions; write task.length = {most}")


def _splits(found: Any, name: str) -> tuple[list[Record], list[Record] | None]:
    """Training and test records of a dataset of Hugging Face."""
    if not hasattr(found, "keys") or hasattr(found, "features"):
        return from_rows(found, name), None
    splits = list(found.keys())
    first = "train" if "train" in splits else splits[0]
    other = next((one for one in TEST_SPLITS if one in splits and one != first), None)
    test = from_rows(found[other], f"{name}, split {other}") if other else None
    return from_rows(found[first], f"{name}, split {first}"), test


def _column(records: Sequence[Record], column: str, option: str) -> list[str] | None:
    """The texts of a column, or None if none is named."""
    return [record.text(column, option) for record in records] if column else None


def _numbers(texts: list[str] | None, names: Sequence[str], records: np.ndarray) -> np.ndarray | None:
    """(rows,) the number of each row's text, or None."""
    if texts is None:
        return None
    position = {name: i for i, name in enumerate(names)}
    for text in texts:
        if text not in position:
            raise DataError(f"the group {text!r} of a test record does not occur in the training records")
    return np.asarray(np.array([position[text] for text in texts], np.int64)[records])


def _some(test: Sequence[Record], groups: list[str] | None, most: int) -> list[Record]:
    """At most so many test records, evenly spaced within each group."""
    if not most or len(test) <= most:
        return list(test)
    own = np.unique(np.array(groups, object), return_inverse=True)[1] if groups else np.zeros(len(test), np.int64)
    chosen: list[int] = []
    for g in range(int(own.max()) + 1):
        rows = np.flatnonzero(own == g)
        count = min(len(rows), max(1, most // (int(own.max()) + 1)))
        chosen += rows[(np.arange(count) * len(rows)) // count].tolist()
    return [test[i] for i in sorted(chosen)]


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _note(
    form: RecordForm, encoder: Encoder, settings: RowSettings, rows: tuple[int, int], tests: tuple[int, int], packs: int
) -> str:
    """What was done to the records, for readers of results. `rows`, `tests`: how many, and how many are too long."""
    how = "the chat template of the checkpoint" if encoder.is_chat else "plain lines"
    parts = [form.note()] + ([f"They are written by {how}."] if form.kind != "text" else [])
    parts.append(f"{rows[0]:,} rows of at most {encoder.length} tokens for training, {tests[0]:,} for testing.")
    lost = f"{rows[1]:,} longer training records and {tests[1]:,} longer test records are left out."
    parts += [lost] if rows[1] or tests[1] else []
    parts += [f"Training rows are packed into {packs:,}."] if settings.packing else []
    return " ".join(parts)
