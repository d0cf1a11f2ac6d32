"""Records of texts as conversations, and as rows of tokens of a language model.

    .jsonl, .jsonl.gz, .jsonl.xz    one JSON object a line
    .json                           a list of objects
    .csv, .tsv, .txt, .parquet      a table with a row of column names

    prompt/response   two columns of texts
    messages          a list of {"role": ..., "content": ...}, the form of chat templates
    text              plain text, all of which is learned; it is cut into rows of `length` tokens

    template = chat   the chat template of the tokenizer
    plain             prompt and answer on a line each, the end-of-text token behind the answer
    auto              chat if the tokenizer has a template, else plain

A conversation is a sequence of pieces, each a text that is learned or not. Pieces are tokenized one by one, so that the
tokens of a prompt are the same in training and when an answer is generated. Every record knows its file and row, for
messages of errors. Nothing in a file is trusted.

>>> form = RecordForm.of(Record({"instruction": "Say hi.", "output": "Hi!", "task": "a"}, "row 1"))
>>> form.kind, form.prompt, form.response
('prompt', 'instruction', 'output')
>>> plain([{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi!"}], end="</s>")
[Piece(text='Say hi.\\n', learned=False), Piece(text='Hi!</s>', learned=True)]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from thinwire.core.text import visible
from thinwire.data.files import one_line, read_text
from thinwire.data.table import LIMIT, SUFFIXES, listed, number_text, read_table
from thinwire.data.token_rows import Questions, TokenRows
from thinwire.errors import ConfigError, DataError

TemplateName = Literal["auto", "chat", "plain"]
TooLong = Literal["error", "drop"]
Learned = Literal["answers", "all"]
Message = Mapping[str, str]
Tokens = tuple[np.ndarray, np.ndarray]  # ids, and whether each is learned

_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))


# -- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One record: its values by column, and its place, file and row.

    >>> record = Record({"prompt": "1 + 1", "response": ""}, "sums.jsonl: row 3")
    >>> record.text("prompt", "task.prompt")
    '1 + 1'
    >>> record.text("response", "task.response")
    Traceback (most recent call last):
    thinwire.errors.DataError: sums.jsonl: row 3: 'response' (task.response) is empty; write a text, or delete the row
    """

    values: Mapping[str, Any]
    where: str

    def text(self, column: str, option: str) -> str:
        """The text of a column that must not be empty; `option` is the setting that names the column."""
        value, where = self.value(column, option), f"{self.where}: {column!r} ({option})"
        if isinstance(value, int | float):
            value = str(value) if isinstance(value, bool) else number_text(float(value))
        if not isinstance(value, str):
            raise DataError(f"{where} is of type {type(value).__name__}, expected a text")
        if not value.strip():
            raise DataError(f"{where} is empty; write a text, or delete the row")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} has half of a character (a lone surrogate)") from None
        return value

    def value(self, column: str, option: str) -> Any:
        """The value of a column, which must be there."""
        if column not in self.values:
            known = listed(list(self.values)) or "none"
            raise DataError(f"{self.where}: no column {visible(column, 80)!r} ({option}); it has {known}")
        if self.values[column] is None:
            raise DataError(f"{self.where}: {column!r} ({option}) has no value; fill it in, or delete the row")
        return self.values[column]


def read_records(path: Path) -> list[Record]:
    """The records of a file."""
    suffix = (Path(path.stem) if path.suffix in (".gz", ".xz") else path).suffix.lower()
    if suffix in SUFFIXES:
        table = read_table(path)
        cells = zip(*(table.texts(name) for name in table.cells), strict=True)
        return [Record(dict(zip(table.cells, row, strict=True)), table.row(i)) for i, row in enumerate(cells)]
    if suffix not in (".jsonl", ".ndjson", ".json"):
        raise DataError(f"{path}: expected records in a file that ends in .jsonl, .json, .csv, .tsv or .parquet")
    text, rows = read_text(path, LIMIT), dict[int, Any]()
    whole = suffix == ".json"
    for number, part in enumerate([text] if whole else text.split("\n"), 1):  # texts may contain other line breaks
        if part.strip():
            try:
                rows[number] = json.loads(part)
            except (ValueError, RecursionError) as fault:
                what = "not a JSON list of objects" if whole else f"row {number} is not a JSON object"
                raise DataError(f"{path}: {what} ({one_line(fault)})") from None
    if whole and isinstance(rows.get(1), list):
        rows = dict(enumerate(rows[1], 1))
    for number, row in rows.items():
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number} is a JSON {type(row).__name__}, expected an object of columns")
    if not rows:
        raise DataError(f"{path}: the file has no records; expected one JSON object a line")
    return [Record(row, f"{path}: row {number}") for number, row in rows.items()]


# -- conversations ---------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A text, and whether the model learns to write it."""

    text: str
    learned: bool


class Conversation(NamedTuple):
    """The pieces of a record, its last answer, and the answers to choose from, if it has any."""

    pieces: tuple[Piece, ...]
    answer: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordForm:
    """Which columns of a record hold its texts; "" for none.

    Args:
        prompt, response: columns of texts.
        messages: a column of lists of messages.
        text: a column of plain texts.
        system: a column of system messages, with prompt and response.
        options: a column of the answers to choose from: a list, or texts separated by bars.
    """

    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    system: str = ""
    options: str = ""

    @property
    def kind(self) -> str:
        """`prompt`, `messages` or `text`."""
        return "messages" if self.messages else "text" if self.text else "prompt"

    @classmethod
    def of(cls, record: Record, **named: str) -> RecordForm:
        """The form of a record: the columns that are named, or else those that usually hold such texts.

        Args:
            record: the first one.
            **named: columns by option, "" where none is named.
        """
        stated = [name for name in ("messages", "text", "prompt", "response") if named.get(name)]
        if stated and stated not in (["messages"], ["text"], ["prompt", "response"]):
            raise ConfigError(
                f"task.{' and task.'.join(stated)} {'are' if stated[1:] else 'is'} stated, but a record has one form: "
                "task.prompt and task.response, or task.messages, or task.text"
            )
        given = cls(**named)
        if stated:
            return given
        usual = [{"prompt": prompt, "response": response} for prompt, response in _PAIRS]
        for columns in (*usual, {"messages": "messages"}, {"text": "text"}):
            if all(name in record.values for name in columns.values()):
                return replace(given, **columns)
        raise DataError(
            f"{record.where}: it has {listed(list(record.values))}; name the columns of the texts: task.prompt and "
            "task.response, task.messages, or task.text"
        )

    def note(self) -> str:
        """What is read and learned, for readers of results."""
        if self.kind == "text":
            return f"All tokens of {self.text!r} are learned."
        named = repr(self.messages) if self.messages else f"{self.prompt!r} and {self.response!r}"
        return f"Records are conversations of {named}; tokens of answers are learned."


def plain(messages: Sequence[Message], end: str) -> list[Piece]:
    """The contents of messages, each on a line of its own; answers end with a token."""
    learned = [one["role"] == "assistant" for one in messages]
    texts = [one["content"].strip() + (end if answer else "\n") for one, answer in zip(messages, learned, strict=True)]
    return list(map(Piece, texts, learned))


def chat(messages: Sequence[Message], tokenizer: Any) -> list[Piece]:
    """Messages by the chat template of a tokenizer; what it writes after the end of an answer is not learned."""

    def text(some: Sequence[Message], prompt: bool) -> str:
        try:
            return str(tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=prompt))
        except Exception as fault:  # templates raise errors of jinja, for example if roles do not alternate
            raise ValueError(f"the chat template of the checkpoint refuses it ({one_line(fault)})") from None

    pieces, done, end = list[Piece](), "", tokenizer.eos_token or ""
    for i, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        before, after = text(messages[:i], True), text(messages[: i + 1], False)
        if not (before.startswith(done) and after.startswith(before)):
            raise ValueError(
                "the chat template of the checkpoint rewrites earlier messages, so answers cannot be told from "
                "prompts; write task.template = 'plain'"
            )
        answer, stop, rest = after[len(before) :].partition(end) if end else (after[len(before) :], "", "")
        pieces += [Piece(before[len(done) :], False), Piece(answer + stop, True), Piece(rest, False)]
        done = after
    return [piece for piece in pieces if piece.text]


def _messages(record: Record, form: RecordForm) -> list[Message]:
    """The messages of a record, checked."""
    if form.kind == "prompt":
        columns = {"system": form.system, "prompt": form.prompt, "response": form.response}
        roles = {"system": "system", "prompt": "user", "response": "assistant"}
        return [
            {"role": roles[name], "content": record.text(column, f"task.{name}")}
            for name, column in columns.items()
            if column
        ]
    where = f"{record.where}: {form.messages!r} (task.messages)"
    found = record.value(form.messages, "task.messages")
    if isinstance(found, str):  # a cell of a table
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise DataError(f"{where} is a text that is not JSON, expected a list of messages") from None
    if not isinstance(found, list) or not found:
        raise DataError(f"{where} is not a list of messages; expected objects with role and content")
    messages = list[Message]()
    for i, one in enumerate(found, 1):
        role, content = (one.get(key) if isinstance(one, Mapping) else None for key in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}, message {i} is not an object with the texts role and content")
        if not content.strip():
            raise DataError(f"{where}, message {i} is empty; write a text, or delete the message")
        messages.append({"role": role, "content": content})
    if not any(one["role"] == "assistant" for one in messages):
        raise DataError(f"{where} has no message of the role 'assistant', so there is nothing to learn")
    return messages


def _options(record: Record, form: RecordForm, answer: str) -> tuple[str, ...]:
    """The answers to choose from, checked; empty if the form has none."""
    found = record.values.get(form.options) if form.options else None
    if found is None:
        return ()
    where = f"{record.where}: {form.options!r} (task.options)"
    texts = found.split("|") if isinstance(found, str) else found
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) and one.strip() for one in texts):
        raise DataError(f"{where} is not a list of texts")
    options = tuple(one.strip() for one in texts)
    if len(set(options)) < max(2, len(options)):
        raise DataError(f"{where} needs two or more different texts")
    if answer not in options:
        known = visible(", ".join(options), 80)
        raise DataError(f"{record.where}: the response {visible(answer, 40)!r} is none of the options ({known})")
    return options


# -- tokens ----------------------------------------------------------------------------------------------------------


class RecordRows(NamedTuple):
    """Rows of tokens; of each row, which record it is of and its conversation; and how many records were too long."""

    rows: list[Tokens]
    records: list[int]
    conversations: list[Conversation]
    dropped: int


@dataclass(frozen=True, eq=False)
class Encoder:
    """How records become rows of tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        form: which columns hold the texts.
        length: the most tokens of a row.
        template: chat, plain or auto.
        learned: `answers` (tokens of answers only) or `all` tokens.
        too_long: what a conversation of more tokens is: an `error`, or to `drop`.
    """

    tokenizer: Any
    form: RecordForm
    length: int = 512
    template: TemplateName = "auto"
    learned: Learned = "answers"
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        for name, known in {"template": TemplateName, "learned": Learned, "too_long": TooLong}.items():
            if (given := getattr(self, name)) not in get_args(known):
                raise ConfigError(f"task.{name} must be one of {', '.join(get_args(known))}, not {given!r}")
        if not 8 <= self.length <= 1 << 20:
            raise ConfigError(f"task.length must be from 8 to {1 << 20} tokens, not {self.length}")
        if self.template == "chat" and not self.is_chat:
            raise ConfigError("task.template = 'chat', but the checkpoint has no chat template; write 'plain'")

    @property
    def is_chat(self) -> bool:
        """Whether conversations are written by the chat template."""
        return self.template != "plain" and bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def written(self) -> str:
        """How conversations are written, for readers of results."""
        return "the chat template of the checkpoint" if self.is_chat else "plain lines"

    @property
    def pad(self) -> int:
        """The token of padding."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((one for one in known if isinstance(one, int)), 0)

    def conversation(self, record: Record) -> Conversation:
        """The conversation of a record; a record in bad form is an error with its file and row."""
        if self.form.kind == "text":
            return Conversation((Piece(record.text(self.form.text, "task.text"), True),))
        messages = _messages(record, self.form)
        try:
            pieces = chat(messages, self.tokenizer) if self.is_chat else plain(messages, self.tokenizer.eos_token or "")
        except ValueError as fault:
            raise DataError(f"{record.where}: {one_line(fault)}") from None
        while pieces and not pieces[-1].learned:  # nothing behind the last answer
            pieces.pop()
        answer = [one["content"] for one in messages if one["role"] == "assistant"][-1].strip()
        return Conversation(tuple(pieces), answer, _options(record, self.form, answer))

    def encode(self, records: Sequence[Record]) -> RecordRows:
        """The rows of records: of plain texts as many as they need, of conversations one."""
        found = [self.conversation(record) for record in records]
        rows, owners, length = list[Tokens](), list[int](), self.length
        for i, (ids, learned) in enumerate(self.tokens([one.pieces for one in found])):
            if self.form.kind == "text":
                if self.tokenizer.eos_token:
                    ids, learned = np.append(ids, int(self.tokenizer.eos_token_id)), np.append(learned, True)
                cuts = range(0, max(1, len(ids) - 1), length)  # a row of one token has no label
                rows += [(ids[first : first + length], learned[first : first + length]) for first in cuts]
                owners += [i] * len(cuts)
            elif len(ids) <= length:
                rows.append((ids, learned | (self.learned == "all")))
                owners.append(i)
            elif self.too_long == "error":
                raise DataError(
                    f"{records[i].where}: it has {len(ids):,} tokens, more than task.length = {length}; shorten it, or "
                    "write task.too_long = 'drop' to leave such records out"
                )
        if not rows:
            raise DataError(f"all {len(records):,} records have more than task.length = {length} tokens")
        return RecordRows(rows, owners, [found[i] for i in owners], len(records) - len(set(owners)))

    def questions(self, found: Sequence[Conversation], **settings: Any) -> Questions:
        """The questions of conversations, one for each row: their prompts, and rows of all options.

        Args:
            found: the conversations.
            **settings: further arguments of `Questions`.
        """
        owners, others = list[int](), list[tuple[Piece, ...]]()
        for i, one in enumerate(found):
            *before, last = (Piece(text, False) for text, _ in one.pieces)
            if one.options and not last.text.startswith(one.answer):
                raise ValueError("the template changes the answer, so that other answers cannot be put in its place")
            rest = last.text.removeprefix(one.answer)
            others += [(*before, Piece(option + rest, True)) for option in one.options]
            owners += [i] * len(one.options)
        return Questions(
            tuple(ids for ids, _ in self.tokens([one.pieces[:-1] for one in found])),
            tuple(one.answer for one in found),
            options=TokenRows.of(self.tokens(others), pad=self.pad) if owners else None,
            owners=torch.tensor(owners) if owners else None,
            right=torch.tensor([one.options.index(one.answer) if one.options else -1 for one in found]),
            tokenizer=self.tokenizer,
            **settings,
        )

    def tokens(self, conversations: Sequence[tuple[Piece, ...]]) -> list[Tokens]:
        """The tokens of each sequence of pieces, and whether each is learned."""
        texts = list(dict.fromkeys(piece.text for pieces in conversations for piece in pieces))
        try:
            made = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        except Exception as fault:  # of a tokenizer of another library
            raise DataError(f"the tokenizer of the checkpoint failed ({one_line(fault)})") from None
        known = dict(zip(texts, made, strict=True))
        # the token that the tokenizer puts before a text; a chat template writes it itself
        begin = [] if self.is_chat or self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        if begin != self.tokenizer("a")["input_ids"][:1]:
            begin = []
        out = []
        for pieces in conversations:
            parts = [begin, *(known[piece.text] for piece in pieces)]
            flags = np.repeat([False, *(piece.learned for piece in pieces)], [len(part) for part in parts])
            out.append((np.concatenate(parts).astype(np.int32), flags))
        return out
