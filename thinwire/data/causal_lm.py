"""Records of your own for causal language models: conversations or plain texts, as rows of tokens.

    thinwire run lora --on causal-lm --set task.file=chats.jsonl --set task.client=hospital

    prompt/response   two columns of texts
    messages          a list of {"role": ..., "content": ...}, the form of chat templates
    text              plain text, all of which is learned; it is cut into rows of `length` tokens

    template = chat   the chat template of the tokenizer
    plain             prompt and answer on a line each, the end-of-text token behind the answer
    auto              chat if the tokenizer has a template, else plain

Test records come from a second file, from the split `test` of a dataset of Hugging Face, or are held out of every
client and group. A conversation is a sequence of pieces, each a text that is learned or not. Pieces are tokenized one
by one, so that the tokens of a prompt are the same in training and when an answer is generated.

>>> rows = from_objects({1: {"instruction": "Say hi.", "output": "Hi!", "task": "a"}}, "chats.jsonl")
>>> RecordForm.of(rows)
RecordForm(prompt='instruction', response='output', messages='', text='', options='')
>>> plain([{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi!"}], end="</s>")
[Piece(text='Say hi.\\n', learned=False), Piece(text='Hi!</s>', learned=True)]
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.core.text import check_settings, visible
from thinwire.data.checkpoints import SMOLLM2, find_checkpoint, load_tokenizer, read_config
from thinwire.data.columns import Columns, from_objects, listed, read_records
from thinwire.data.examples import Source, numbered, positions
from thinwire.data.files import one_line, own_path
from thinwire.data.huggingface import load_named, train_and_test
from thinwire.data.partition import held_out_rows
from thinwire.data.token_rows import Questions, TokenRows
from thinwire.errors import ConfigError, DataError

TemplateName = Literal["auto", "chat", "plain"]
TooLong = Literal["error", "drop"]
Learned = Literal["answers", "all"]
Message = Mapping[str, str]
Tokens = tuple[np.ndarray, np.ndarray]  # ids, and whether each is learned

_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))


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
    options: str = "",
    client: str = "",
    group: str = "",
    template: TemplateName = "auto",
    learned: Learned = "answers",
    length: int = 512,
    too_long: TooLong = "error",
    window: int = 8,
    test_fraction: float = 0.1,
    test_rows: int = 0,
    new_tokens: int = 32,
    answer_after: str = "",
) -> Source:
    """Records of a JSONL, JSON, CSV or parquet file, or of a dataset of Hugging Face, as tokens of a checkpoint.

    file, test_file      files of records for training and testing
    name, config         a dataset of Hugging Face instead: a folder, or owner/name on the hub
    checkpoint           a folder, a GGUF file, `smollm2`, or owner/name on the hub
    client               the column that names the client of a record; "" for none
    group                the column by which partitions go and metrics are told apart, such as the kind of question
    prompt ... options   columns of `RecordForm`
    template ... too_long, window ... answer_after      settings of `Encoder` and of `source_of`
    """
    given = locals()
    if bool(file) == bool(name):
        raise ConfigError("name a file of records or a dataset of Hugging Face: task.file or task.name, one of them")
    test: Columns | None
    if file:
        train = read_records(own_path(data_dir, file, "task.file"))
        test = read_records(own_path(data_dir, test_file, "task.test_file")) if test_file else None
    else:
        *parts, names = train_and_test(load_named(name, config, data_dir))
        train, test = (
            from_objects(dict(enumerate(map(dict, part or ()))), name + f", split {split}" * bool(split))
            for part, split in zip(parts, names, strict=True)
        )
        if not len(train):
            raise DataError(f"{name}: it has no rows")
        test = test if len(test) else None
    encoder = encoder_of(checkpoint, data_dir, RecordForm.of(train, **options_of(RecordForm, given)), given)
    return source_of(train, test, encoder, **options_of(source_of, given))


def options_of(call: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a function takes."""
    return {name: given[name] for name in inspect.signature(call).parameters if name in given}


def source_of(
    train: Columns,
    test: Columns | None,
    encoder: Encoder,
    *,
    client: str = "",
    group: str = "",
    window: int = 8,
    test_fraction: float = 0.1,
    test_rows: int = 0,
    new_tokens: int = 32,
    answer_after: str = "",
) -> Source:
    """Rows of tokens of training and test records.

    Args:
        train: training records.
        test: test records; None to hold out a fraction of the training records.
        encoder: how records become rows.
        client: the column that names the client of a record; "" for none.
        group: the column by which partitions go and metrics are told apart; "" for none.
        window: batches within which rows of similar length are put together; 1 for none.
        test_fraction: the fraction of records that is held out for testing, where no test records are given.
        test_rows: the most test records, the same share of each group; 0 for all.
        new_tokens: the most tokens of a generated answer.
        answer_after: what is compared of an answer begins after this text.
    """
    for name, value, least in (("window", window, 1), ("test_rows", test_rows, 0), ("new_tokens", new_tokens, 1)):
        if value < least:
            raise ConfigError(f"task.{name} must be {least} or more, not {value}")
    groups = train.column(group, "task.group")
    names = numbered(groups or ())
    if len(names) == 1:
        raise DataError(f"{train.row(0)}: the column {group!r} (task.group) has one value only; leave task.group out")
    if test is None:
        users = train.column(client, "task.client")
        held = held_out_rows(len(train), test_fraction, users, groups)
        train, test = (train.take(np.flatnonzero(held == part)) for part in (False, True))
    elif unknown := sorted(set(test.column(group, "task.group") or ()) - set(names)):
        raise DataError(f"the group {unknown[0]!r} of a test record does not occur in the training records")
    test = _some(test, test.column(group, "task.group"), test_rows)
    (made, at, _), (tested, test_at, conversations) = encoder.encode(train), encoder.encode(test)
    lost, test_lost = len(train) - len(set(at)), len(test) - len(set(test_at))
    train, test = train.take(np.array(at)), test.take(np.array(test_at))
    own, others = (part.column(group, "task.group") for part in (train, test))
    owners = train.column(client, "task.client")
    test_groups = None if others is None else positions(others, names)
    questions, note = None, [encoder.form.note()]
    if not encoder.form.text:
        settings = {"names": names, "groups": test_groups, "new_tokens": new_tokens, "answer_after": answer_after}
        questions = encoder.questions(conversations, **settings)
        note.append(f"They are written by {encoder.written}.")
    note.append(f"{len(made):,} rows of at most {encoder.length} tokens for training, {len(tested):,} for testing.")
    if lost or test_lost:
        note.append(f"{lost:,} longer training records and {test_lost:,} longer test records are left out.")
    asked = questions is not None and questions.options is not None
    return Source.by_user(
        TokenRows.of(made, pad=encoder.pad, window=window, groups=None if own is None else positions(own, names)),
        TokenRows.of(tested, pad=encoder.pad, groups=test_groups, questions=questions),
        len(encoder.tokenizer),
        (owners, None),
        note=" ".join(note),
        model={"checkpoint": str(encoder.tokenizer.name_or_path)},
        metrics=("perplexity", *(("option-accuracy",) if asked else ())),
        objective="option-accuracy" if asked else "perplexity",
        class_names=names,
    )


def encoder_of(checkpoint: str, data_dir: Path | None, form: RecordForm, options: Mapping[str, Any]) -> Encoder:
    """The encoder with the tokenizer of a checkpoint and those of the options that it takes."""
    found = find_checkpoint(checkpoint or SMOLLM2, data_dir)
    tokenizer = load_tokenizer(found, "the task causal-lm")
    tokenizer.name_or_path = str(found)
    encoder, config = Encoder(tokenizer, form, **options_of(Encoder, options)), read_config(found)
    most = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(most, int) and encoder.length > most:
        raise ConfigError(
            f"task.length = {encoder.length}, but {found} has {most} positions; write task.length = {most}"
        )
    return encoder


def _some(test: Columns, groups: list[str] | None, most: int) -> Columns:
    """At most so many test records, evenly spaced within each group."""
    if not most or len(test) <= most:
        return test
    own, names = np.array(groups or [""] * len(test), object), sorted(set(groups or [""]))
    chosen = list[int]()
    for rows in (np.flatnonzero(own == name) for name in names):
        count = min(len(rows), max(1, most // len(names)))
        chosen += rows[(np.arange(count) * len(rows)) // count].tolist()
    return test.take(np.array(sorted(chosen)))


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
        options: a column of the answers to choose from: a list, or texts separated by bars.
    """

    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    options: str = ""

    @classmethod
    def of(cls, rows: Columns, **named: str) -> RecordForm:
        """The form of records: the columns that are named, or else those that usually hold such texts.

        Args:
            rows: the records.
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
            if all(name in rows.cells for name in columns.values()):
                return replace(given, **columns)
        raise DataError(
            f"{rows.row(0)}: it has {listed(list(rows.cells))}; name the columns of the texts: task.prompt and "
            "task.response, task.messages, or task.text"
        )

    def note(self) -> str:
        """What is read and learned, for readers of results."""
        if self.text:
            return f"All tokens of {self.text!r} are learned."
        named = repr(self.messages) if self.messages else f"{self.prompt!r} and {self.response!r}"
        return f"Records are conversations of {named}; tokens of answers are learned."

    def read_messages(self, rows: Columns, i: int) -> list[Message]:
        """The messages of a record, checked."""
        if not self.messages:
            prompt, response = rows.text(i, self.prompt, "task.prompt"), rows.text(i, self.response, "task.response")
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        rows.need(self.messages, "task.messages", any_type=True)
        where, found = f"{rows.row(i)}: {self.messages!r} (task.messages)", rows.cells[self.messages][i]
        if isinstance(found, str):  # a cell of a table
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                raise DataError(f"{where} is a text that is not JSON, expected a list of messages") from None
        if not isinstance(found, list) or not found:
            raise DataError(f"{where} is not a list of messages; expected objects with role and content")
        for number, one in enumerate(found, 1):
            texts = [one.get(key) for key in ("role", "content")] if isinstance(one, Mapping) else [None]
            if not all(isinstance(text, str) and text.strip() for text in texts):
                raise DataError(
                    f"{where}, message {number} is not an object with a role and a content, or one is empty"
                )
        if not any(one["role"] == "assistant" for one in found):
            raise DataError(f"{where} has no message of the role 'assistant', so there is nothing to learn")
        return [{"role": one["role"], "content": one["content"]} for one in found]

    def read_options(self, rows: Columns, i: int, answer: str) -> tuple[str, ...]:
        """The answers to choose from, checked; empty if the record has none."""
        found = rows.cells[self.options][i] if self.options in rows.cells else None
        if found is None:
            return ()
        texts = found.split("|") if isinstance(found, str) else found
        is_list = isinstance(texts, list | tuple) and all(isinstance(one, str) and one.strip() for one in texts)
        options = tuple(one.strip() for one in texts) if is_list else ()
        if len(set(options)) < max(2, len(options)):
            where = f"{rows.row(i)}: {self.options!r} (task.options)"
            raise DataError(f"{where} is no list of texts: it needs two or more different texts")
        if answer not in options:
            known = visible(", ".join(options), 80)
            raise DataError(f"{rows.row(i)}: the response {visible(answer, 40)!r} is none of the options ({known})")
        return options


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
    length: Annotated[int, "[8, 65536]"] = 512
    template: TemplateName = "auto"
    learned: Learned = "answers"
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        check_settings(self)
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

    def conversation(self, rows: Columns, i: int) -> Conversation:
        """The conversation of a record; a record in bad form is an error with its file and row."""
        if self.form.text:
            return Conversation((Piece(rows.text(i, self.form.text, "task.text"), True),))
        messages = self.form.read_messages(rows, i)
        try:
            pieces = chat(messages, self.tokenizer) if self.is_chat else plain(messages, self.tokenizer.eos_token or "")
        except ValueError as fault:
            raise DataError(f"{rows.row(i)}: {one_line(fault)}") from None
        while pieces and not pieces[-1].learned:  # nothing behind the last answer
            pieces.pop()
        answer = [one["content"] for one in messages if one["role"] == "assistant"][-1].strip()
        return Conversation(tuple(pieces), answer, self.form.read_options(rows, i, answer))

    def encode(self, records: Columns) -> tuple[list[Tokens], list[int], list[Conversation]]:
        """The rows of records, of plain texts as many as they need, of conversations one; and of each row, the number
        of its record and its conversation.
        """
        found = [self.conversation(records, i) for i in range(len(records))]
        rows, owners, length = list[Tokens](), list[int](), self.length
        for i, (ids, learned) in enumerate(self.tokens([one.pieces for one in found])):
            if self.form.text:
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
                    f"{records.row(i)}: it has {len(ids):,} tokens, more than task.length = {length}; shorten it, or "
                    "write task.too_long = 'drop' to leave such records out"
                )
        if not rows:
            raise DataError(f"all {len(records):,} records have more than task.length = {length} tokens")
        return rows, owners, [found[i] for i in owners]

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
                raise ConfigError(
                    "the chat template changes the answer, so that other options cannot be put in its place; write "
                    "task.template = 'plain'"
                )
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
