"""Records as conversations: which columns hold them, and the texts that a model reads and that it learns.

    prompt/response   two columns of texts
    messages          a list of {"role": ..., "content": ...}, the form of chat templates
    text              plain text, all of which is learned

A conversation is a sequence of pieces, each a text that is learned or not. Pieces are tokenized one by one, so that the
tokens of a prompt are the same in training and when an answer is generated.

>>> from thinwire.data.records import Record
>>> form = RecordForm.of(Record({"instruction": "Say hi.", "output": "Hi!", "task": "a"}, "row 1"))
>>> form.kind, form.prompt, form.response
('prompt', 'instruction', 'output')
>>> conversation(Record({"instruction": "Say hi.", "output": "Hi!"}, "row 1"), form, plain("</s>")).pieces
(Piece(text='Say hi.\\n', learned=False), Piece(text='Hi!</s>', learned=True))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.data.reading import one_line
from thinwire.data.records import Record
from thinwire.errors import ConfigError, DataError

Message = Mapping[str, str]

_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
_MESSAGES = ("messages", "conversations")


class Piece(NamedTuple):
    """A text, and whether the model learns to write it."""

    text: str
    learned: bool


# The pieces of a list of messages; the last one is learned. An error is a ValueError.
Template = Callable[[list[Message]], list[Piece]]


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
        given = cls(**named)
        forms = [name for name in ("messages", "text") if getattr(given, name)]
        forms += ["prompt and response"] * bool(given.prompt or given.response)
        if len(forms) > 1:
            raise ConfigError(
                f"task.{forms[0]} and task.{forms[1]} are both named; a record has one form: leave one out"
            )
        if given.prompt or given.response:
            missing = "response" if given.prompt else "prompt"
            if not (given.prompt and given.response):
                raise ConfigError(f"task.{missing} is missing; name the columns of prompts and of responses")
            return given
        if forms:
            return given
        for prompt, response in _PAIRS:
            if prompt in record.values and response in record.values:
                return replace(given, prompt=prompt, response=response)
        for name in _MESSAGES:
            if name in record.values:
                return replace(given, messages=name)
        if "text" in record.values:
            return replace(given, text="text")
        listed = ", ".join(visible(name, 40) for name in list(record.values)[:12])
        raise DataError(
            f"{record.where}: it has {listed}; name the columns of the texts: task.prompt and task.response, "
            "task.messages, or task.text"
        )

    def note(self) -> str:
        """What is read and learned, for readers of results."""
        if self.kind == "text":
            return f"All tokens of {self.text!r} are learned."
        named = repr(self.messages) if self.messages else f"{self.prompt!r} and {self.response!r}"
        return f"Records are conversations of {named}; tokens of answers are learned."


def conversation(record: Record, form: RecordForm, template: Template) -> Conversation:
    """The conversation of a record; a record in bad form is an error with its file and row."""
    if form.kind == "text":
        return Conversation((Piece(record.text(form.text, "task.text"), True),))
    messages = _messages(record, form)
    try:
        pieces = template(messages)
    except ValueError as fault:
        raise DataError(f"{record.where}: {one_line(fault)}") from None
    answer = str([one["content"] for one in messages if one["role"] == "assistant"][-1]).strip()
    return Conversation(tuple(pieces), answer, _options(record, form, answer))


def with_answer(found: Conversation, option: str) -> tuple[Piece, ...]:
    """The pieces of a conversation with another last answer."""
    *before, last = found.pieces
    if not last.text.startswith(found.answer):
        raise ValueError("the template changes the answer, so that other answers cannot be put in its place")
    return (*before, Piece(option + last.text.removeprefix(found.answer), True))


def plain(end: str) -> Template:
    """A template without roles: the contents of messages, each on a line of its own; answers end with a token."""

    def render(messages: list[Message]) -> list[Piece]:
        pieces = []
        for one in messages:
            if one["role"] == "assistant":
                pieces.append(Piece(one["content"].strip() + end, True))
            else:
                pieces.append(Piece(one["content"].strip() + "\n", False))
        return _to_last_answer(pieces)

    return render


def chat(tokenizer: Any) -> Template:
    """The chat template of a tokenizer; what it writes after the end of an answer is not learned."""
    end = tokenizer.eos_token or ""

    def text(messages: list[Message], prompt: bool) -> str:
        try:
            made = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as fault:  # templates raise errors of jinja, for example if roles do not alternate
            raise ValueError(f"the chat template of the checkpoint refuses it ({one_line(fault)})") from None
        return str(made)

    def render(messages: list[Message]) -> list[Piece]:
        pieces, done = list[Piece](), ""
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
        return _to_last_answer([piece for piece in pieces if piece.text])

    return render


def _to_last_answer(pieces: list[Piece]) -> list[Piece]:
    while pieces and not pieces[-1].learned:
        pieces.pop()
    return pieces


def _messages(record: Record, form: RecordForm) -> list[Message]:
    """The messages of a record, checked."""
    if form.kind == "prompt":
        system = [{"role": "system", "content": record.text(form.system, "task.system")}] if form.system else []
        prompt = record.text(form.prompt, "task.prompt")
        return [
            *system,
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": record.text(form.response, "task.response")},
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
    messages = [_message(one, f"{where}, message {i}") for i, one in enumerate(found, 1)]
    if not any(one["role"] == "assistant" for one in messages):
        raise DataError(f"{where} has no message of the role 'assistant', so there is nothing to learn")
    return messages


def _message(one: Any, where: str) -> Message:
    """A message; the names of ShareGPT (from, value; human, gpt) are understood, too."""
    if not isinstance(one, Mapping):
        raise DataError(f"{where} is of type {type(one).__name__}, expected an object with role and content")
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where} has no texts role and content")
    if not content.strip():
        raise DataError(f"{where} is empty; write a text, or delete the message")
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def _options(record: Record, form: RecordForm, answer: str) -> tuple[str, ...]:
    """The answers to choose from, checked; empty if the form has none."""
    if not form.options or record.values.get(form.options) is None:
        return ()
    found = record.values[form.options]
    listed = found.split("|") if isinstance(found, str) else found
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) and one.strip() for one in listed):
        raise DataError(f"{record.where}: {form.options!r} (task.options) is not a list of texts")
    options = tuple(one.strip() for one in listed)
    if len(set(options)) < 2 or len(set(options)) != len(options):
        raise DataError(f"{record.where}: {form.options!r} (task.options) needs two or more different texts")
    if answer not in options:
        raise DataError(
            f"{record.where}: the response {visible(answer, 40)!r} is none of the options "
            f"({visible(', '.join(options), 80)})"
        )
    return options
